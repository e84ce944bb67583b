//! A small file beside a store that the store can do without.
//!
//! It is `NAME.SUFFIX` beside the first volume `NAME`, if that is a file: a device has nothing
//! beside it. It is replaced as a whole, and not synced. All users of the store may read and
//! replace it. Its directory may have other users than those, so neither a link nor a pipe is
//! followed there.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Gid, Mode, OFlags};

use crate::runtime::descriptors;

/// See the module.
#[derive(Debug)]
pub struct Sidecar {
    path: PathBuf,
    volume: PathBuf,
    length_max: usize,
}

impl Sidecar {
    /// The file of a store with this suffix, of at most this length; `None` where none can be.
    #[must_use]
    pub fn beside(volume: &Path, suffix: &str, length_max: usize) -> Option<Sidecar> {
        let is_file = fs::metadata(volume).is_ok_and(|found| found.is_file());
        is_file.then(|| {
            // The process may change its working directory.
            let volume = fs::canonicalize(volume).unwrap_or_else(|_| volume.to_owned());
            Sidecar {
                path: with_suffix(&volume, suffix),
                volume,
                length_max,
            }
        })
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The content, and one byte more than allowed of a longer one. `None` without such a file.
    ///
    /// # Errors
    /// It is no regular file, or cannot be read.
    pub fn read(&self) -> io::Result<Option<Vec<u8>>> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        descriptors::cover()?;
        let file = match rustix::fs::open(&self.path, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("no regular file"));
        }
        let mut bytes = Vec::new();
        file.take(self.length_max as u64 + 1)
            .read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }

    /// Replaces the content.
    ///
    /// # Errors
    /// The directory, the file system or the disk does not take it. The content from before stays.
    pub fn replace(&self, content: &[u8]) -> io::Result<()> {
        let new = with_suffix(&self.path, ".new");
        // A process that was killed may have left it.
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let written = create_like(&self.volume, &new).and_then(|mut file| {
            file.write_all(content)?;
            fs::rename(&new, &self.path)
        });
        if written.is_err() {
            let _ = fs::remove_file(&new);
        }
        written
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut path = OsString::from(path);
    path.push(suffix);
    path.into()
}

/// A new file for the users of another one.
fn create_like(other: &Path, path: &Path) -> io::Result<File> {
    let other = fs::metadata(other)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
    descriptors::cover()?;
    let file = rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)?;
    // Without the group this user alone reads the file.
    let group = Gid::from_raw(other.gid());
    if rustix::fs::fchown(&file, None, Some(group)).is_ok() {
        let rights = Mode::from_bits_truncate(other.mode()) & Mode::from_bits_truncate(0o666);
        rustix::fs::fchmod(&file, rights)?;
    }
    Ok(file.into())
}

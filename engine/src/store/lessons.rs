//! The file beside a store in which the policy of eviction keeps its lessons from open to open.
//!
//! It is `NAME.lessons` beside the first volume `NAME`, if that is a file: a device has nothing
//! beside it. The store does without it: a file that is missing, too long, of another store or
//! torn is ignored, and so it is written without a sync. It is written about every ten minutes in
//! which reclaim runs, and at the close. All users of the store may read and replace it; its
//! directory may have other users than those, so neither a link nor a pipe is followed there.
//!
//! ```text
//!   magic, 8 bytes | store, 16 bytes | checksum of all other bytes, 8 bytes | lessons
//! ```

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use larder_format::StoreId;
use rapidhash::v3::rapidhash_v3;
use rustix::fs::{Gid, Mode, OFlags};

use crate::index::Index;
use crate::runtime::Instant;
use crate::system::files::{self, Kind};
use crate::volume::Volumes;

const MAGIC: [u8; 8] = *b"LarderL1";
const HEAD: usize = 32;

/// Longest file.
const LENGTH_MAX: usize = 1 << 20;

/// Time between two writes.
const PERIOD: Duration = Duration::from_secs(600);

/// See the module.
#[derive(Debug)]
pub(super) struct Lessons {
    path: PathBuf,
    /// The first volume.
    volume: PathBuf,
    store: StoreId,
    written: Instant,
}

impl Lessons {
    /// The file of a store; `None` where there can be none.
    pub(super) fn beside(volumes: &Volumes) -> Option<Lessons> {
        let volume = &volumes.list.first()?.as_ref()?.path;
        let found = files::look(volume).ok()?;
        (found.kind == Kind::File && !cfg!(feature = "simulated")).then(|| {
            // The process may change its working directory.
            let volume = files::resolve(volume).unwrap_or_else(|_| volume.clone());
            Lessons {
                path: with_suffix(&volume, ".lessons"),
                volume,
                store: volumes.superblock().store,
                written: Instant::now(),
            }
        })
    }

    /// What the file holds for this store. Empty if there is nothing.
    pub(super) fn read(&self) -> Vec<u8> {
        match read(&self.path) {
            Ok(mut bytes) if self.is_ours(&bytes) => bytes.split_off(HEAD),
            Ok(_) => {
                tracing::info!(
                    "{}: not the lessons of this store, or damaged; eviction learns anew",
                    self.path.display()
                );
                Vec::new()
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => {
                self.complain("read", &error);
                Vec::new()
            }
        }
    }

    fn is_ours(&self, bytes: &[u8]) -> bool {
        bytes.len() <= LENGTH_MAX
            && bytes
                .split_at_checked(HEAD)
                .is_some_and(|(head, lessons)| head == self.head(lessons).as_slice())
    }

    fn head(&self, lessons: &[u8]) -> [u8; HEAD] {
        let mut head = [0; HEAD];
        head[..8].copy_from_slice(&MAGIC);
        head[8..24].copy_from_slice(self.store.as_bytes());
        let sum = rapidhash_v3(&[&head[..24], lessons].concat());
        head[24..].copy_from_slice(&sum.to_le_bytes());
        head
    }

    /// Writes what the policy has learned, if the last write was some time ago, or `now`.
    pub(super) fn write(&mut self, index: &Index, now: bool) {
        if !now && self.written.elapsed() < PERIOD {
            return;
        }
        self.written = Instant::now();
        let lessons = index.lessons();
        if lessons.is_empty() || lessons.len() > LENGTH_MAX - HEAD {
            return;
        }
        if let Err(error) = self.replace(&lessons) {
            self.complain("written", &error);
        }
    }

    fn replace(&self, lessons: &[u8]) -> io::Result<()> {
        let beside = with_suffix(&self.path, ".new");
        // A process that was killed may have left it.
        match fs::remove_file(&beside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let written = create_like(&self.volume, &beside).and_then(|mut file| {
            file.write_all(&self.head(lessons))?;
            file.write_all(lessons)?;
            fs::rename(&beside, &self.path)
        });
        if written.is_err() {
            let _ = fs::remove_file(&beside);
        }
        written
    }

    fn complain(&self, done: &str, error: &io::Error) {
        tracing::warn!(
            "{}: the lessons of eviction cannot be {done} ({error}); eviction learns anew at the \
             next open",
            self.path.display()
        );
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut path = OsString::from(path);
    path.push(suffix);
    path.into()
}

/// The bytes of a regular file, and one more than allowed of a longer one.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("no regular file"));
    }
    let mut bytes = Vec::new();
    file.take(LENGTH_MAX as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A new file for the users of another one.
fn create_like(other: &Path, path: &Path) -> io::Result<File> {
    let other = fs::metadata(other)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
    let file = rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)?;
    // Without the group its members learn anew.
    let group = Gid::from_raw(other.gid());
    if rustix::fs::fchown(&file, None, Some(group)).is_ok() {
        let rights = Mode::from_bits_truncate(other.mode()) & Mode::from_bits_truncate(0o666);
        rustix::fs::fchmod(&file, rights)?;
    }
    Ok(file.into())
}

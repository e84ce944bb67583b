//! The file system of a path: its mount point, type and size.
//!
//! A disk that is not mounted is invisible: its mount point is a directory of the file system below
//! it. A store that is created there fills the system's disk instead of the NVMe disk.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use larder_disk::probe;
use larder_tools::size::ByteSize;

/// The file system that holds a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The topmost directory of the path that lies on it.
    pub point: PathBuf,
    /// The type, such as `ext4`.
    pub kind: String,
    /// The size of the whole file system.
    pub bytes: u64,
}

impl Mount {
    /// The file system that holds `directory`.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn of(directory: &Path) -> io::Result<Mount> {
        let directory = directory.canonicalize()?;
        let device = fs::metadata(&directory)?.dev();
        let is_same = |above: &&Path| fs::metadata(above).is_ok_and(|found| found.dev() == device);
        let point = directory.ancestors().take_while(is_same).last();
        let space = rustix::fs::statvfs(&directory)?;
        Ok(Mount {
            point: point.unwrap_or(&directory).to_owned(),
            kind: probe::filesystem(File::open(&directory)?),
            bytes: space.f_blocks.saturating_mul(space.f_frsize),
        })
    }

    /// Whether no disk is mounted at the path or above it: it lies on the file system of `/`.
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.point == Path::new("/")
    }
}

impl fmt::Display for Mount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mount { point, kind, bytes } = self;
        write!(f, "{} ({kind}, {})", point.display(), ByteSize(*bytes))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_file_system_of_the_root_is_told_from_others() {
        let root = Mount::of(Path::new("/etc")).unwrap();
        assert!(root.is_root() && root.bytes > 0, "{root}");
        let process = Mount::of(Path::new("/proc/self/task")).unwrap();
        assert!(!process.is_root(), "{process}");
        assert_eq!(process.point, Path::new("/proc"));
        assert!(Mount::of(Path::new("/no/such/place")).is_err());
    }

    #[test]
    fn a_symbolic_link_stands_for_the_directory_behind_it() {
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("/proc/self/task", &link).unwrap();
        assert_eq!(Mount::of(&link).unwrap().point, Path::new("/proc"));
    }
}

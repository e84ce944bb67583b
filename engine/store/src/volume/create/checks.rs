//! Checks before a creation: the paths, the free space, the content of an existing target.

use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use larder_base::random::random_bytes;
use larder_format::{BLOCK_BYTES, SuperblockError};

use super::left::is_zero;
use super::options::CreateOptions;
use crate::error::{StoreError, bytes, count, io_error};
use crate::fit::{least_size, segment_bytes_for};
use crate::volume::{Access, File, not_to_be_recorded};

/// Bytes at either end of a device that must be zero for it to count as unused.
const FOREIGN_CHECK_BYTES: usize = 1 << 20;

pub(super) fn is_there(path: &Path) -> Result<bool, StoreError> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(io_error("looking at the path", path, error)),
    }
}

pub(super) fn may_overwrite(file: &File, path: &Path, force: bool) -> Result<(), StoreError> {
    if force {
        return Ok(());
    }
    match file.superblock() {
        Err(SuperblockError::NotLarder | SuperblockError::Blank) if file.has_segments() => {
            return Err(StoreError::NoSuperblock(path.to_owned()));
        }
        Err(SuperblockError::NotLarder | SuperblockError::Blank) => {}
        _ => return Err(StoreError::Exists(path.to_owned())),
    }
    if file.bytes == 0 && !file.is_device {
        return Ok(());
    }
    // An unused device reads as zeros at both ends, where file systems and partition tables keep
    // their marks. A file with any content belongs to someone else.
    let tail = file.bytes.saturating_sub(FOREIGN_CHECK_BYTES as u64) / BLOCK_BYTES as u64
        * BLOCK_BYTES as u64;
    let unused = file.is_device
        && [0, tail]
            .iter()
            .all(|&offset| is_zero(file, offset, FOREIGN_CHECK_BYTES));
    if unused {
        Ok(())
    } else {
        Err(StoreError::Foreign(path.to_owned()))
    }
}

pub(super) fn identity_bytes() -> Result<[u8; 16], StoreError> {
    random_bytes().map_err(|e| io_error("drawing an identity", Path::new("/dev/urandom"), e))
}

pub(super) fn absolute(path: &Path) -> Result<String, StoreError> {
    // The volume may not have its name yet.
    let parent = parent_of(path).unwrap_or_else(|| PathBuf::from("/"));
    let path = fs::canonicalize(path)
        .or_else(|_| {
            fs::canonicalize(parent).map(|parent| parent.join(path.file_name().unwrap_or_default()))
        })
        .map_err(|e| io_error("resolving the path", path, e))?;
    let text = path.to_str().map(str::to_owned);
    let fits = text.filter(|text| text.len() <= larder_format::VOLUME_PATH_BYTES_MAX);
    fits.ok_or_else(|| not_to_be_recorded(&path))
}

pub(super) fn parent_of(path: &Path) -> Option<PathBuf> {
    let parent = path.parent()?;
    Some(if parent.as_os_str().is_empty() {
        PathBuf::from(".")
    } else {
        parent.to_owned()
    })
}

pub(super) fn check_directory(path: &Path) -> Result<(), StoreError> {
    let directory = parent_of(path).unwrap_or_else(|| PathBuf::from("."));
    fs::metadata(&directory).map_err(|e| io_error("looking at the directory", &directory, e))?;
    rustix::fs::access(&directory, rustix::fs::Access::WRITE_OK)
        .map_err(|e| io_error("checking that the directory is writable", &directory, e))
}

/// Refuses a new volume that does not fit, even with the `given_back` bytes that are released
/// before.
pub(super) fn check_space(path: &Path, bytes: u64, given_back: u64) -> Result<(), StoreError> {
    let free = free_bytes(path).saturating_add(given_back);
    if bytes > free {
        return Err(StoreError::NoSpace {
            path: path.to_owned(),
            needed: bytes,
            free,
        });
    }
    Ok(())
}

/// Bytes of its file system that a file takes.
pub(super) fn allocated_bytes(file: &File) -> u64 {
    let blocks = rustix::fs::fstat(file.file.as_fd()).map_or(0, |stat| stat.st_blocks);
    u64::try_from(blocks).unwrap_or(0) * 512
}

/// Refuses paths if two lead to one file: its second lock would wait for the first.
pub(super) fn check_distinct(paths: &[PathBuf]) -> Result<(), StoreError> {
    let mut seen = Vec::with_capacity(paths.len());
    for path in paths {
        let file = identity(path);
        if file.is_some() && seen.contains(&file) {
            return Err(StoreError::Usage(format!(
                "{}: the same file is named twice; give every volume a file or device of its own",
                path.display()
            )));
        }
        seen.push(file);
    }
    Ok(())
}

/// The identity of the file at a path, or else of a name in a directory; `None` if neither is
/// there.
pub(super) fn identity(path: &Path) -> Option<(u64, u64, OsString)> {
    if let Ok(file) = fs::metadata(path) {
        return Some((file.dev(), file.ino(), OsString::new()));
    }
    let directory = fs::metadata(parent_of(path)?).ok()?;
    let name = path.file_name()?.to_owned();
    Some((directory.dev(), directory.ino(), name))
}

/// Free bytes of the file system that holds (or would hold) `path`. A link, or a file that is
/// mounted by itself, may lie in another one than its directory.
pub(super) fn free_bytes(path: &Path) -> u64 {
    let directory = || parent_of(path).unwrap_or_else(|| PathBuf::from("."));
    rustix::fs::statvfs(path)
        .or_else(|_| rustix::fs::statvfs(directory()))
        .map_or(u64::MAX, |stat| stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// A size in segments and volumes, for messages.
pub(super) fn held(size: u64, segments: u32, segment_bytes: u64, volumes: usize) -> String {
    let each = if volumes == 1 { "" } else { " on each volume" };
    format!(
        "a size of {} makes {} of {}{each}",
        bytes(size),
        count(segments.into(), "segment"),
        bytes(segment_bytes)
    )
}

/// Bytes of all volumes together: the requested size, or else the size of the devices.
pub(super) fn size_of(paths: &[PathBuf], options: &CreateOptions<'_>) -> Result<u64, StoreError> {
    if options.size > 0 {
        return Ok(options.size);
    }
    let mut total = 0;
    for path in paths {
        if !fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device()) {
            return Err(StoreError::NoSize(path.clone()));
        }
        total += File::open(path, Access::ReadOnly)?.bytes;
    }
    Ok(total)
}

/// The segment size for pages of `page_bytes`.
pub(super) fn suited(
    size: u64,
    volumes: usize,
    page_bytes: Option<u64>,
) -> Result<u64, StoreError> {
    segment_bytes_for(size, volumes, page_bytes).ok_or_else(|| {
        let page_bytes = page_bytes.unwrap_or_default();
        let reason = format!(
            "a store of {} keeps no page of {}",
            bytes(size),
            bytes(page_bytes)
        );
        match least_size(volumes, page_bytes) {
            Some(needed) => StoreError::TooSmall {
                reason,
                needed,
                smaller_segments: false,
            },
            None => StoreError::Usage(format!("{reason}, nor does any other: use smaller pages")),
        }
    })
}

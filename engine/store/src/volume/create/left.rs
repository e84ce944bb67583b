//! The remains of a killed creation: the file of an incomplete volume, under its temporary name;
//! and further volumes, which have their names while the first one, named last, has none.

use std::fs;
use std::io::{Error, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use larder_format::{
    BLOCK_BYTES, KEYRING_BYTES, QUOTAS_BYTES, SuperblockError, VolumeEntry, keyring_offsets,
    quotas_offsets, superblock_offsets,
};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::checks::{absolute, allocated_bytes, is_there};
use crate::error::{StoreError, io_error};
use crate::volume::{Access, File};

/// Bytes read at once to check that nothing was written.
const ZEROS_BYTES: u64 = 4 << 20;

/// The name of a volume until it is complete.
pub(super) fn temporary_name(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".creating");
    path.with_file_name(name)
}

/// Removes the remains of a killed creation of `path`.
pub(super) fn remove_left(path: &Path, temporary: &Path) -> Result<(), StoreError> {
    let Some(left) = lock_left(open_left(temporary)?, temporary)? else {
        return Ok(());
    };
    check_left(&left, path, temporary)?;
    fs::remove_file(temporary)
        .map_err(|e| io_error("removing the file of a killed creation", temporary, e))
}

/// Bytes that the remains of a killed creation of `path` take.
pub(super) fn left_bytes(path: &Path) -> Result<u64, StoreError> {
    let temporary = temporary_name(path);
    let Some(left) = open_left(&temporary)? else {
        return Ok(0);
    };
    if left.is_locked() {
        return Err(held(&left, &temporary));
    }
    check_left(&left, path, &temporary)?;
    Ok(allocated_bytes(&left))
}

/// The file that has the temporary name, if there is one.
pub(super) fn open_left(temporary: &Path) -> Result<Option<File>, StoreError> {
    // A creation makes no link, and follows none.
    let opened = match fs::symlink_metadata(temporary) {
        Ok(found) if !found.is_file() => Err(taken(temporary)),
        Ok(_) => File::open(temporary, Access::Exclusive).map(Some),
        Err(error) => Err(io_error("looking at the path", temporary, error)),
    };
    match opened {
        Err(StoreError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        opened => opened,
    }
}

/// Locks it; `None` if it has lost its name meanwhile. It keeps the name while it is locked: only
/// the holder of the lock removes the name.
pub(super) fn lock_left(file: Option<File>, temporary: &Path) -> Result<Option<File>, StoreError> {
    let Some(file) = file else {
        return Ok(None);
    };
    match file.lock(temporary) {
        Err(StoreError::Locked { .. }) => Err(held(&file, temporary)),
        locked => locked.map(|()| is_named(&file.file, temporary).then_some(file)),
    }
}

/// Refuses a file that a killed creation of `path` cannot have left: a file with bytes other than
/// zeros in a place where a creation writes none, unless its superblock names `path` and was never
/// replaced since the creation.
fn check_left(file: &File, path: &Path, temporary: &Path) -> Result<(), StoreError> {
    let is_left = match file.superblock() {
        Ok(superblock) => {
            let entry = superblock.volumes.get(usize::from(superblock.volume));
            superblock.generation == 1
                && absolute(path).is_ok_and(|path| entry.is_some_and(|entry| entry.path == path))
        }
        Err(SuperblockError::NotLarder | SuperblockError::Blank) => is_unused(file, false),
        Err(SuperblockError::Damaged(_)) => is_unused(file, true),
        Err(_) => false,
    };
    if is_left {
        Ok(())
    } else {
        Err(taken(temporary))
    }
}

/// Whether all bytes are zero outside of the places that a creation fills. Those of the superblocks
/// are filled last.
fn is_unused(file: &File, has_superblock: bool) -> bool {
    let places = |offsets: [u64; 3], bytes: usize| offsets.map(|at| at..at + bytes as u64);
    let mut filled = [
        places(keyring_offsets(file.bytes), KEYRING_BYTES),
        places(quotas_offsets(file.bytes), QUOTAS_BYTES),
    ]
    .concat();
    if has_superblock {
        filled.extend(places(superblock_offsets(file.bytes), BLOCK_BYTES));
    }
    filled.sort_by_key(|place| place.start);
    let mut from = 0;
    let mut is_unused = true;
    for place in filled {
        is_unused &= reads_as_zeros(file, from, place.start);
        from = place.end;
    }
    is_unused && reads_as_zeros(file, from, file.bytes)
}

fn reads_as_zeros(file: &File, from: u64, end: u64) -> bool {
    let mut offset = from;
    while offset < end {
        // Most of a preallocated volume was never written, and need not be read.
        match rustix::fs::seek(&file.file, SeekFrom::Data(offset)) {
            Ok(data) => offset = offset.max(data / BLOCK_BYTES as u64 * BLOCK_BYTES as u64),
            Err(Errno::NXIO) => return true,
            Err(_) => {}
        }
        let bytes = end.saturating_sub(offset).min(ZEROS_BYTES);
        if bytes > 0 && !is_zero(file, offset, usize::try_from(bytes).unwrap_or(0)) {
            return false;
        }
        offset += bytes.max(1);
    }
    true
}

/// The further volumes among these that a killed creation of all of them has named. None of them
/// was ever used: their first volume has no name.
pub(super) fn named_left(paths: &[PathBuf]) -> Result<Vec<PathBuf>, StoreError> {
    let mut left = Vec::new();
    let Some((first, further)) = paths.split_first() else {
        return Ok(left);
    };
    if is_there(first)? {
        return Ok(left);
    }
    for (path, index) in further.iter().zip(1..) {
        if is_there(path)? && is_left_volume(&File::open(path, Access::ReadOnly)?, paths, index) {
            left.push(path.clone());
        }
    }
    Ok(left)
}

fn is_left_volume(file: &File, paths: &[PathBuf], index: u16) -> bool {
    let Ok(superblock) = file.superblock() else {
        return false;
    };
    let is_it = |(entry, path): (&VolumeEntry, &PathBuf)| {
        absolute(path).is_ok_and(|path| entry.path == path)
    };
    !file.is_device
        && (superblock.generation, superblock.volume) == (1, index)
        && superblock.volumes.len() == paths.len()
        && superblock.volumes.iter().zip(paths).all(is_it)
}

/// Removes a volume that a killed creation has named.
pub(super) fn remove_named(path: &Path) -> Result<(), StoreError> {
    let file = File::open(path, Access::Exclusive)?;
    file.lock(path)?;
    match is_named(&file.file, path) {
        true => fs::remove_file(path)
            .map_err(|e| io_error("removing the volume of a killed creation", path, e)),
        false => Ok(()),
    }
}

pub(super) fn is_zero(file: &File, offset: u64, bytes: usize) -> bool {
    file.read(offset, bytes)
        .is_ok_and(|bytes| bytes.iter().all(|&byte| byte == 0))
}

pub(super) fn is_named(file: impl AsFd, path: &Path) -> bool {
    rustix::fs::fstat(file).is_ok_and(|stat| {
        fs::symlink_metadata(path)
            .is_ok_and(|found| (found.dev(), found.ino()) == (stat.st_dev, stat.st_ino))
    })
}

/// Another process holds the temporary name: a store of that name, or a creation that has no
/// superblock to identify it yet.
fn held(file: &File, temporary: &Path) -> StoreError {
    if file.superblock().is_ok() {
        return file.held(temporary);
    }
    let advice = "another process is creating it: wait for that, or stop it";
    io_error(
        "creating the volume",
        temporary,
        Error::new(ErrorKind::WouldBlock, advice),
    )
}

fn taken(temporary: &Path) -> StoreError {
    let advice = "a volume has this name until it is whole, and the file there was not left by a \
        killed creation: move it away, or choose another path for the volume";
    io_error(
        "creating the volume",
        temporary,
        Error::new(ErrorKind::AlreadyExists, advice),
    )
}

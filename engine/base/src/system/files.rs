//! Files and block devices: identity, length, bytes, locks.

use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use larder_format::BLOCK_BYTES;
use nix::errno::Errno as NixErrno;
use nix::fcntl::{FcntlArg, fcntl};
use rustix::fs::{
    AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, ResolveFlags, SeekFrom, StatxFlags,
};
use rustix::io::Errno;

use crate::runtime::descriptors;

/// An open file. Its locks live as long as the description behind it.
pub type Handle = OwnedFd;

/// The kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    File,
    BlockDevice,
    CharacterDevice,
    Directory,
    Pipe,
    Socket,
    Link,
}

/// Identity of a file: the same for all its names, and for all nodes of one block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileId {
    /// Device and inode.
    Inode(u64, u64),
    /// The number of a block device.
    BlockDevice(u64),
}

impl FileId {
    /// The number of the device that holds the file, or that it is.
    #[must_use]
    pub fn device(self) -> Option<u64> {
        match self {
            FileId::Inode(device, _) | FileId::BlockDevice(device) => Some(device),
        }
    }
}

/// A file, as its directory entry or its descriptor shows it.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    pub kind: Kind,
    pub id: FileId,
    /// The user that it belongs to.
    pub user: u32,
    /// A directory in which only the owner of a file may remove the file.
    pub is_sticky: bool,
}

impl Found {
    fn of(found: &fs::Metadata) -> Found {
        let kind = found.file_type();
        let kind = if kind.is_dir() {
            Kind::Directory
        } else if kind.is_symlink() {
            Kind::Link
        } else if kind.is_block_device() {
            Kind::BlockDevice
        } else if kind.is_char_device() {
            Kind::CharacterDevice
        } else if kind.is_fifo() {
            Kind::Pipe
        } else if kind.is_socket() {
            Kind::Socket
        } else {
            Kind::File
        };
        Found {
            kind,
            id: match kind {
                Kind::BlockDevice => FileId::BlockDevice(found.rdev()),
                _ => FileId::Inode(found.dev(), found.ino()),
            },
            user: found.uid(),
            is_sticky: found.mode() & Mode::SVTX.bits() != 0,
        }
    }
}

/// The file that a path leads to, links followed.
pub fn look(path: &Path) -> io::Result<Found> {
    fs::metadata(path).map(|found| Found::of(&found))
}

/// The file that has this name, which may be a link.
pub fn look_at_name(path: &Path) -> io::Result<Found> {
    fs::symlink_metadata(path).map(|found| Found::of(&found))
}

/// Identity and owner of an open file.
pub fn identify(file: &Handle) -> io::Result<(FileId, u32)> {
    let found = rustix::fs::fstat(file)?;
    let id = match FileType::from_raw_mode(found.st_mode) {
        FileType::BlockDevice => FileId::BlockDevice(found.st_rdev),
        _ => FileId::Inode(found.st_dev, found.st_ino),
    };
    Ok((id, found.st_uid))
}

/// The file that a path leads to, links followed, if the kernel knows without asking a file system:
/// a lookup in one that hangs could not be ended, not even by a kill.
///
/// # Errors
/// The path leads nowhere; else the kernel does not know, or is older than 5.12.
pub fn look_in_cache(path: &Path) -> io::Result<FileId> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let at = rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::CACHED)?;
    let how = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let found = rustix::fs::statx(&at, "", how, StatxFlags::BASIC_STATS)?;
    let number = |major, minor| rustix::fs::makedev(major, minor);
    Ok(match FileType::from_raw_mode(found.stx_mode.into()) {
        FileType::BlockDevice => {
            FileId::BlockDevice(number(found.stx_rdev_major, found.stx_rdev_minor))
        }
        _ => FileId::Inode(
            number(found.stx_dev_major, found.stx_dev_minor),
            found.stx_ino,
        ),
    })
}

/// The length of an open file, as the kernel knows it without asking a file system; `None` for a
/// device.
pub fn length_in_cache(file: &Handle) -> io::Result<Option<u64>> {
    let how = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let found = rustix::fs::statx(file, "", how, StatxFlags::BASIC_STATS)?;
    let is_file = FileType::from_raw_mode(found.stx_mode.into()) == FileType::RegularFile;
    Ok(is_file.then_some(found.stx_size))
}

/// The name of an open file, as the kernel knows it now. It changes when the file or a directory
/// above is renamed, and when the file is deleted or replaced.
pub fn name_now(file: &Handle) -> io::Result<PathBuf> {
    fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// An absolute path to the same name, links kept.
pub fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// An absolute path to the same file, without links.
pub fn resolve(path: &Path) -> io::Result<PathBuf> {
    fs::canonicalize(path)
}

/// Removes a name.
pub fn remove(path: &Path) -> io::Result<()> {
    fs::remove_file(path)
}

/// Whether this process may add and remove names in a directory.
pub fn may_change(directory: &Path) -> io::Result<()> {
    Ok(rustix::fs::accessat(
        CWD,
        directory,
        rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK,
        AtFlags::EACCESS,
    )?)
}

/// How a file is opened.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// For writing too.
    pub writes: bool,
    /// A device that no other process has opened so, and that is not mounted.
    pub alone: bool,
}

/// Opens a file, without waiting for anything. Returns whether its reads and writes bypass the page
/// cache, which needs the file system's support.
pub fn open(path: &Path, how: How) -> io::Result<(Handle, bool)> {
    descriptors::cover()?;
    let mut flags = OFlags::CLOEXEC | OFlags::NONBLOCK;
    flags |= if how.writes {
        OFlags::RDWR
    } else {
        OFlags::RDONLY
    };
    if how.alone {
        flags |= OFlags::EXCL;
    }
    let (file, direct) = match rustix::fs::open(path, flags | OFlags::DIRECT, Mode::empty()) {
        Ok(file) => {
            // tmpfs and btrfs accept the flag and buffer all the same; statx reports this. A
            // device of larger blocks than the store's cannot bypass the page cache.
            let direct = super::direct::direct_io(file.as_fd());
            (
                file,
                direct.dio && direct.offset_align as usize <= BLOCK_BYTES,
            )
        }
        Err(Errno::INVAL) => (rustix::fs::open(path, flags, Mode::empty())?, false),
        Err(error) => return Err(error.into()),
    };
    // The flag is only for the open, so that it does not wait. With it, a kernel before 5.15 fails
    // io_uring requests that would have to wait.
    let set = rustix::fs::fcntl_getfl(&file)?;
    let unset = match direct {
        true => OFlags::NONBLOCK,
        false => OFlags::NONBLOCK | OFlags::DIRECT,
    };
    rustix::fs::fcntl_setfl(&file, set - unset)?;
    Ok((file, direct))
}

/// Length of a file or a device in bytes.
pub fn length(file: &Handle) -> io::Result<u64> {
    Ok(rustix::fs::seek(file, SeekFrom::End(0))?)
}

/// Reads bytes; fewer than requested at the end of the file.
pub fn read_at(file: &Handle, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    Ok(rustix::io::pread(file, bytes, offset)?)
}

/// Writes bytes. Returns their number.
pub fn write_at(file: &Handle, bytes: &[u8], offset: u64) -> io::Result<usize> {
    Ok(rustix::io::pwrite(file, bytes, offset)?)
}

/// Makes everything written to a file durable.
pub fn sync_data(file: &Handle) -> Result<(), i32> {
    rustix::fs::fdatasync(file).map_err(Errno::raw_os_error)
}

/// `preadv`. Returns the number of bytes, or the error number.
///
/// # Safety
/// The memory behind the pieces is valid and not otherwise used during the call.
pub unsafe fn read_pieces(
    file: &Handle,
    offset: u64,
    pieces: &[libc::iovec],
) -> Result<usize, i32> {
    // SAFETY: as the caller promises.
    unsafe { transfer(libc::preadv, file, offset, pieces) }
}

/// `pwritev`. Returns the number of bytes, or the error number.
///
/// # Safety
/// The memory behind the pieces is valid, and no one writes to it during the call.
pub unsafe fn write_pieces(
    file: &Handle,
    offset: u64,
    pieces: &[libc::iovec],
) -> Result<usize, i32> {
    // SAFETY: as the caller promises.
    unsafe { transfer(libc::pwritev, file, offset, pieces) }
}

/// `preadv` or `pwritev`.
type Vectored = unsafe extern "C" fn(
    libc::c_int,
    *const libc::iovec,
    libc::c_int,
    libc::off_t,
) -> libc::ssize_t;

/// # Safety
/// The memory behind the pieces is valid for the call.
unsafe fn transfer(
    call: Vectored,
    file: &Handle,
    offset: u64,
    pieces: &[libc::iovec],
) -> Result<usize, i32> {
    let offset = libc::off_t::try_from(offset).map_err(|_| libc::EINVAL)?;
    let count = libc::c_int::try_from(pieces.len()).map_err(|_| libc::EINVAL)?;
    // SAFETY: the file is open; the caller promises the memory behind the pieces.
    let moved_bytes = unsafe { call(file.as_raw_fd(), pieces.as_ptr(), count, offset) };
    usize::try_from(moved_bytes).map_err(|_| {
        let error = io::Error::last_os_error();
        error.raw_os_error().unwrap_or(libc::EIO)
    })
}

/// The first hole of a file from an offset on; the end of the file counts as one.
pub fn next_hole(file: &Handle, from: u64) -> io::Result<u64> {
    Ok(rustix::fs::seek(file, SeekFrom::Hole(from))?)
}

/// The first data of a file from an offset on.
pub fn next_data(file: &Handle, from: u64) -> io::Result<u64> {
    Ok(rustix::fs::seek(file, SeekFrom::Data(from))?)
}

/// The descriptor, for questions that only the kernel answers. `None` for a simulated file.
pub fn descriptor(file: &Handle) -> Option<BorrowedFd<'_>> {
    Some(file.as_fd())
}

/// A lock on a whole file (`flock`), which excludes those of other descriptions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    Exclusive,
    Shared,
    /// Releases the lock.
    None,
}

/// Locks a file, or releases its lock.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] if another description holds a lock.
pub fn lock(file: &Handle, lock: Lock) -> io::Result<()> {
    let operation = match lock {
        Lock::Exclusive => FlockOperation::NonBlockingLockExclusive,
        Lock::Shared => FlockOperation::NonBlockingLockShared,
        Lock::None => FlockOperation::Unlock,
    };
    Ok(rustix::fs::flock(file.as_fd(), operation)?)
}

/// Locks bytes of a file for its description (`F_OFD_SETLK`), or releases them. The kernel releases
/// them too when the description and its last I/O are over.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] or [`io::ErrorKind::PermissionDenied`] if another description
/// holds a lock on them.
pub fn lock_bytes(file: &Handle, bytes: Range<i64>, is_locked: bool) -> io::Result<()> {
    let kind = if is_locked {
        libc::F_WRLCK
    } else {
        libc::F_UNLCK
    };
    let lock = byte_lock(kind, &bytes);
    loop {
        match fcntl(file, FcntlArg::F_OFD_SETLK(&lock)) {
            Err(NixErrno::EINTR) => {}
            outcome => return outcome.map(drop).map_err(io::Error::from),
        }
    }
}

/// Whether another description holds a lock on some of these bytes.
pub fn are_bytes_locked(file: &Handle, bytes: Range<i64>) -> io::Result<bool> {
    let mut probe = byte_lock(libc::F_WRLCK, &bytes);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut probe))?;
    Ok(i32::from(probe.l_type) != libc::F_UNLCK)
}

fn byte_lock(kind: libc::c_int, bytes: &Range<i64>) -> libc::flock {
    libc::flock {
        l_type: i16::try_from(kind).unwrap_or(0),
        l_whence: 0,
        l_start: bytes.start,
        l_len: bytes.end - bytes.start,
        l_pid: 0,
    }
}

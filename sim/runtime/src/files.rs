//! Files, with the interface of the engine's `system::files`.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::kernel::{Content, Kernel, Node, with, with_if_there};
use crate::processes::{USER, id_of};
use crate::task::{self, Process};
pub use crate::volumes::Lock;
use crate::volumes::{Memory, Volume, Work};

/// An open file. Its locks live as long as the description behind it.
#[derive(Debug)]
pub struct Handle {
    description: u64,
}

/// The kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Kind {
    File,
    BlockDevice,
    CharacterDevice,
    Directory,
    Pipe,
    Socket,
    Link,
}

/// Identity of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId(u64);

impl FileId {
    /// No device of this machine holds it.
    pub fn device(self) -> Option<u64> {
        None
    }
}

/// A file, as its name shows it.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    /// Its kind.
    pub kind: Kind,
    /// Its identity.
    pub id: FileId,
    /// The user that it belongs to.
    pub user: u32,
    /// A directory in which only the owner of a file may remove the file.
    pub is_sticky: bool,
}

/// How a file is opened.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// For writing too.
    pub writes: bool,
    /// A device that no other process has opened so.
    pub alone: bool,
}

fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

/// Waits until a transfer is over.
fn finish(number: u64, time: Duration) -> Result<usize, i32> {
    if task::is_task() {
        task::sleep(time);
    }
    with(|kernel| kernel.end_transfer(number))
}

fn volume_of<'a>(kernel: &'a mut Kernel, file: &Handle) -> io::Result<&'a mut Volume> {
    let volume = kernel.storage.volume_of(file.description);
    volume.ok_or_else(|| errno(libc::EBADF))
}

fn memory_of(pieces: &[libc::iovec]) -> Vec<Memory> {
    let piece = |piece: &libc::iovec| Memory {
        start: piece.iov_base.cast(),
        bytes: piece.iov_len,
    };
    pieces.iter().map(piece).collect()
}

impl Drop for Handle {
    fn drop(&mut self) {
        with_if_there(|kernel| kernel.storage.close(self.description));
    }
}

fn found(node: Node) -> Found {
    Found {
        kind: match node.content {
            Content::Volume(_) => Kind::File,
            Content::Socket(_) => Kind::Socket,
        },
        id: FileId(node.id),
        user: USER,
        is_sticky: false,
    }
}

/// The file that a path leads to.
///
/// # Errors
/// Not found.
pub fn look(path: &Path) -> io::Result<Found> {
    look_at_name(path)
}

/// The file that has this name. Every path above a file is a directory.
///
/// # Errors
/// Not found.
pub fn look_at_name(path: &Path) -> io::Result<Found> {
    with(|kernel| {
        if let Some(node) = kernel.names.get(path) {
            return Ok(found(*node));
        }
        if kernel.names.keys().any(|name| name.starts_with(path)) {
            return Ok(Found {
                kind: Kind::Directory,
                id: FileId(0),
                user: USER,
                is_sticky: false,
            });
        }
        Err(errno(libc::ENOENT))
    })
}

/// The file that a path leads to. The simulated kernel knows every file.
///
/// # Errors
/// Not found.
pub fn look_in_cache(path: &Path) -> io::Result<FileId> {
    look(path).map(|found| found.id)
}

/// The length of an open file.
///
/// # Errors
/// Those of [`length`].
pub fn length_in_cache(file: &Handle) -> io::Result<Option<u64>> {
    length(file).map(Some)
}

/// The name of an open file.
///
/// # Errors
/// For a closed one, and for one without a name.
pub fn name_now(file: &Handle) -> io::Result<PathBuf> {
    with(|kernel| {
        let id = volume_of(kernel, file)?.id;
        let mut names = kernel.names.iter();
        let found = names.find(|(_, node)| node.id == id);
        let (name, _) = found.ok_or_else(|| errno(libc::ENOENT))?;
        Ok(name.clone())
    })
}

/// The path itself: no simulated process has a working directory.
#[must_use]
pub fn absolute(path: &Path) -> PathBuf {
    path.to_owned()
}

/// Identity and owner of an open file.
///
/// # Errors
/// For a closed one.
pub fn identify(file: &Handle) -> io::Result<(FileId, u32)> {
    with(|kernel| Ok((FileId(volume_of(kernel, file)?.id), USER)))
}

/// An absolute path to the same file, without links: there are none.
///
/// # Errors
/// Not found.
pub fn resolve(path: &Path) -> io::Result<PathBuf> {
    look_at_name(path).map(|_| path.to_owned())
}

/// Removes a name.
///
/// # Errors
/// Not found.
pub fn remove(path: &Path) -> io::Result<()> {
    with(|kernel| match kernel.names.remove(path) {
        Some(_) => Ok(()),
        None => Err(errno(libc::ENOENT)),
    })
}

/// Whether this process may add and remove names in a directory: always.
///
/// # Errors
/// None.
pub fn may_change(_directory: &Path) -> io::Result<()> {
    Ok(())
}

/// Opens a file.
///
/// # Errors
/// Not found, or no volume.
///
/// # Panics
/// Outside a task.
pub fn open(path: &Path, how: How) -> io::Result<(Handle, bool)> {
    let process = Process::current().expect("a file that no task opens");
    with(|kernel| {
        let node = kernel.names.get(path).ok_or_else(|| errno(libc::ENOENT))?;
        let Content::Volume(volume) = node.content else {
            return Err(errno(libc::ENXIO));
        };
        let description = kernel.number();
        kernel
            .storage
            .open(description, process, volume, how.writes);
        Ok((Handle { description }, true))
    })
}

/// Length of a file in bytes.
///
/// # Errors
/// For a closed one.
pub fn length(file: &Handle) -> io::Result<u64> {
    with(|kernel| Ok(volume_of(kernel, file)?.bytes))
}

/// Reads bytes; fewer than requested at the end of the file.
///
/// # Errors
/// Those of a transfer.
pub fn read_at(file: &Handle, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    let piece = Memory {
        start: bytes.as_mut_ptr(),
        bytes: bytes.len(),
    };
    let begun = with(|kernel| kernel.submit(file.description, offset, Work::Read(vec![piece])));
    let outcome = begun.and_then(|(number, time)| finish(number, time));
    outcome.map_err(as_plain)
}

/// Writes bytes. Returns their number.
///
/// # Errors
/// Those of a transfer.
pub fn write_at(file: &Handle, bytes: &[u8], offset: u64) -> io::Result<usize> {
    let piece = Memory {
        start: bytes.as_ptr().cast_mut(),
        bytes: bytes.len(),
    };
    let begun = with(|kernel| kernel.submit(file.description, offset, Work::Write(vec![piece])));
    let outcome = begun.and_then(|(number, time)| finish(number, time));
    outcome.map_err(as_plain)
}

/// A plain read or write is interrupted, and never deferred or cancelled.
fn as_plain(error: i32) -> io::Error {
    match error {
        libc::EAGAIN | libc::ECANCELED => errno(libc::EINTR),
        error => errno(error),
    }
}

/// Makes everything written to a file durable.
///
/// # Errors
/// The error number.
pub fn sync_data(file: &Handle) -> Result<(), i32> {
    let (number, time) = with(|kernel| {
        let volume = volume_of(kernel, file).map_err(|_| libc::EBADF)?;
        let end = volume.writes();
        kernel.submit(file.description, 0, Work::Sync(end))
    })?;
    finish(number, time).map(drop)
}

/// `preadv`. Returns the number of bytes, or the error number.
///
/// # Errors
/// The error number.
///
/// # Safety
/// The memory behind the pieces is valid and not otherwise used during the call.
pub unsafe fn read_pieces(
    file: &Handle,
    offset: u64,
    pieces: &[libc::iovec],
) -> Result<usize, i32> {
    let work = Work::Read(memory_of(pieces));
    let (number, time) = with(|kernel| kernel.submit(file.description, offset, work))?;
    finish(number, time)
}

/// `pwritev`. Returns the number of bytes, or the error number.
///
/// # Errors
/// The error number.
///
/// # Safety
/// The memory behind the pieces is valid, and no one writes to it during the call.
pub unsafe fn write_pieces(
    file: &Handle,
    offset: u64,
    pieces: &[libc::iovec],
) -> Result<usize, i32> {
    let work = Work::Write(memory_of(pieces));
    let (number, time) = with(|kernel| kernel.submit(file.description, offset, work))?;
    finish(number, time)
}

/// The first hole of a file: unknown.
///
/// # Errors
/// Unsupported.
pub fn next_hole(_file: &Handle, _from: u64) -> io::Result<u64> {
    Err(io::ErrorKind::Unsupported.into())
}

/// The first data of a file: unknown.
///
/// # Errors
/// Unsupported.
pub fn next_data(_file: &Handle, _from: u64) -> io::Result<u64> {
    Err(io::ErrorKind::Unsupported.into())
}

/// A simulated file has no descriptor that the kernel knows.
#[must_use]
pub fn descriptor(_file: &Handle) -> Option<BorrowedFd<'_>> {
    None
}

/// Locks a file, or releases its lock.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] if another description holds a lock.
pub fn lock(file: &Handle, lock: Lock) -> io::Result<()> {
    let own = file.description;
    with(|kernel| {
        let volume = volume_of(kernel, file)?;
        if lock == Lock::None {
            volume.locks.remove(&own);
            return Ok(());
        }
        let excludes = |(of, held): (&u64, &Lock)| {
            *of != own && (lock == Lock::Exclusive || *held == Lock::Exclusive)
        };
        if volume.locks.iter().any(excludes) {
            return Err(errno(libc::EWOULDBLOCK));
        }
        volume.locks.insert(own, lock);
        Ok(())
    })
}

fn overlap(a: &Range<i64>, b: &Range<i64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Locks bytes of a file for its description, or releases them.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] if another description holds a lock on them.
pub fn lock_bytes(file: &Handle, bytes: Range<i64>, is_locked: bool) -> io::Result<()> {
    let own = file.description;
    with(|kernel| {
        let volume = volume_of(kernel, file)?;
        let locks = &mut volume.byte_locks;
        if is_locked {
            if locks
                .iter()
                .any(|(of, held)| *of != own && overlap(held, &bytes))
            {
                return Err(errno(libc::EAGAIN));
            }
            locks.push((own, bytes));
            return Ok(());
        }
        locks.retain(|(of, held)| *of != own || !overlap(held, &bytes));
        Ok(())
    })
}

/// Whether another description holds a lock on some of these bytes.
///
/// # Errors
/// For a closed file.
pub fn are_bytes_locked(file: &Handle, bytes: Range<i64>) -> io::Result<bool> {
    let own = file.description;
    with(|kernel| {
        let volume = volume_of(kernel, file)?;
        let mut locks = volume.byte_locks.iter();
        Ok(locks.any(|(of, held)| *of != own && overlap(held, &bytes)))
    })
}

/// The process that holds the exclusive lock of a volume, for checks by the driver.
#[must_use]
pub fn holder_of(path: &Path) -> Option<u32> {
    with(|kernel| {
        let Content::Volume(volume) = kernel.names.get(path)?.content else {
            return None;
        };
        kernel.storage.holder_of(volume).map(id_of)
    })
}

//! The socket file beside a store.

use std::fs::Metadata;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::net::SocketAddrUnix;

use super::peer::IdMap;

/// Path of the catalog's socket for the store at `path`: beside the file or device, with all links
/// resolved.
pub fn socket_path(path: &Path) -> PathBuf {
    let mut name = match std::fs::canonicalize(path) {
        Ok(path) => path.into_os_string(),
        Err(_) => path.as_os_str().to_owned(),
    };
    name.push(".sock");
    PathBuf::from(name)
}

/// Whether [`listen`] is likely to succeed. Checked before a store is opened: opening is much work
/// and changes the store.
///
/// # Errors
/// The reason why it would fail.
pub(in crate::share) fn may_listen(socket: &Path) -> io::Result<()> {
    let directory = directory_of(socket);
    rustix::fs::accessat(
        rustix::fs::CWD,
        directory,
        Access::WRITE_OK | Access::EXEC_OK,
        AtFlags::EACCESS,
    )?;
    let Some(left) = left_there(socket)? else {
        return Ok(());
    };
    // inode(7): in a sticky directory only the owner of the file or of the directory may remove a
    // file.
    let directory = std::fs::metadata(directory)?;
    let uid = rustix::process::geteuid();
    let is_sticky = directory.mode() & Mode::SVTX.bits() != 0;
    if is_sticky && !uid.is_root() && ![left.uid(), directory.uid()].contains(&uid.as_raw()) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(())
}

/// The socket that a former owner left.
fn left_there(socket: &Path) -> io::Result<Option<Metadata>> {
    match std::fs::symlink_metadata(socket) {
        Ok(found) if found.file_type().is_socket() => Ok(Some(found)),
        Ok(_) => Err(io::Error::other("no socket: move it away")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether this process may give a file to a group.
pub(in crate::share) fn may_give_to(gid: u32) -> bool {
    let groups = IdMap::of_groups();
    if groups.hides(gid) || !groups.has(gid) {
        return false;
    }
    let further = rustix::process::getgroups().unwrap_or_default();
    rustix::process::geteuid().is_root()
        || rustix::process::getegid().as_raw() == gid
        || further.iter().any(|group| group.as_raw() == gid)
}

/// Binds the socket, for the store's user, if that user is mapped, and optionally for a group. The
/// holder of the store's lock may replace the socket of a former owner. On failure no file is left.
pub(super) fn listen(
    socket: &Path,
    uid: Option<u32>,
    group: Option<u32>,
) -> io::Result<(UnixListener, FileId)> {
    let process = rustix::process::geteuid();
    // Otherwise a user's store would be accessible to root alone while root serves it.
    let uid = uid.filter(|uid| process.is_root() && *uid != process.as_raw());
    let uid = uid.map(Uid::from_raw);
    let gid = group.map(Gid::from_raw);
    let mode = Mode::from_raw_mode(if gid.is_some() { 0o660 } else { 0o600 });
    let is_given = uid.is_some() || gid.is_some();
    let (_directory, path) = if is_given {
        // The same directory at every step, even if it is renamed meanwhile.
        let (directory, path) = path_through_directory(socket)?;
        (Some(directory), path)
    } else {
        short_path(socket)?
    };
    if left_there(&path)?.is_some() {
        std::fs::remove_file(&path)?;
    }
    let fd = unix_socket()?;
    // Before the bind: the file is created with these permissions.
    rustix::fs::fchmod(&fd, mode)?;
    rustix::net::bind(&fd, &SocketAddrUnix::new(&path)?)?;
    let given = if is_given {
        give(&path, mode, uid, gid)
    } else {
        Ok(())
    };
    if let Err(error) = given.and_then(|()| Ok(rustix::net::listen(&fd, 128)?)) {
        let _ = std::fs::remove_file(&path);
        return Err(error);
    }
    Ok((UnixListener::from(fd), file_id(&path)?))
}

/// Identity of the file behind a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileId(u64, u64);

fn file_id(path: &Path) -> io::Result<FileId> {
    let found = std::fs::symlink_metadata(path)?;
    Ok(FileId(found.dev(), found.ino()))
}

/// Whether a socket's file is the one that was bound.
pub(super) fn is_bound(socket: &Path, own: FileId) -> bool {
    file_id(socket).is_ok_and(|found| found == own)
}

/// Removes the file of a socket that this process has bound. Another file in its place stays: it
/// may be the socket of another store, whose owner could not be reached any more.
pub(super) fn remove(socket: &Path, own: FileId) {
    if is_bound(socket, own) {
        let _ = std::fs::remove_file(socket);
    }
}

/// Gives a socket that this process has just bound to a user and a group. Only the bound file is
/// ever given away: a process that may write to the directory may have replaced it meanwhile.
fn give(socket: &Path, mode: Mode, uid: Option<Uid>, gid: Option<Gid>) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(socket, flags, Mode::empty())?;
    let found = rustix::fs::fstat(&file)?;
    let is_socket = rustix::fs::FileType::from_raw_mode(found.st_mode).is_socket();
    let own = rustix::process::geteuid().as_raw();
    if !is_socket || found.st_uid != own || found.st_nlink != 1 {
        return Err(io::Error::other(
            "something else was put in the socket's place",
        ));
    }
    // The process's umask removed the group's permissions.
    rustix::fs::chmod(format!("/proc/self/fd/{}", file.as_raw_fd()), mode)?;
    match rustix::fs::chownat(&file, "", uid, gid, AtFlags::EMPTY_PATH) {
        // A restricted root: the owner serves root alone.
        Err(error) if gid.is_none() => {
            tracing::warn!(%error, "the store's user cannot use it while root serves it");
            Ok(())
        }
        given => Ok(given?),
    }
}

/// Whether a process listens on a socket. A socket that refuses this process access counts as
/// listening.
pub(crate) fn is_listening(socket: &Path) -> bool {
    let reached = || -> io::Result<()> {
        let (_directory, short) = short_path(socket)?;
        let fd = unix_socket()?;
        // Non-blocking: a full connection queue is no reason to wait.
        rustix::io::ioctl_fionbio(&fd, true)?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(short)?).or_else(|error| match error {
            Errno::AGAIN | Errno::ACCESS => Ok(()),
            error => Err(error.into()),
        })
    };
    reached().is_ok()
}

/// A stream socket that is not connected yet.
pub(in crate::share) fn unix_socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?)
}

fn directory_of(socket: &Path) -> &Path {
    socket
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// A name for a socket that fits an address, however long its directory's name is. The descriptor
/// must stay open while the name is used.
pub(in crate::share) fn short_path(socket: &Path) -> io::Result<(Option<OwnedFd>, PathBuf)> {
    const ADDRESS_BYTES_MAX: usize = 107;
    let whole = directory_of(socket).join(socket.file_name().unwrap_or_default());
    if whole.as_os_str().len() <= ADDRESS_BYTES_MAX {
        return Ok((None, whole));
    }
    let (directory, path) = path_through_directory(socket)?;
    Ok((Some(directory), path))
}

/// A path through the directory that has this name now, and that directory.
fn path_through_directory(socket: &Path) -> io::Result<(OwnedFd, PathBuf)> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(directory_of(socket), flags, Mode::empty())?;
    let path = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
    Ok((directory, path.join(socket.file_name().unwrap_or_default())))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn nothing_but_the_socket_itself_is_given_away() {
        let directory = tempfile::tempdir().unwrap();
        let (socket, other) = (directory.path().join("s"), directory.path().join("other"));
        std::fs::write(&other, "mine").unwrap();
        let own = std::fs::metadata(&other).unwrap();
        let (uid, gid) = (Uid::from_raw(own.uid()), Gid::from_raw(own.gid()));
        let mode = Mode::from_raw_mode(0o660);
        let give = || give(&socket, mode, Some(uid), Some(gid));
        std::os::unix::fs::symlink(&other, &socket).unwrap();
        assert!(give().is_err());
        std::fs::remove_file(&socket).unwrap();
        std::fs::hard_link(&other, &socket).unwrap();
        assert!(give().is_err());
        assert_eq!(std::fs::metadata(&other).unwrap().mode(), own.mode());
        std::fs::remove_file(&socket).unwrap();
        let bound = UnixListener::bind(&socket).unwrap();
        let twice = directory.path().join("twice");
        std::fs::hard_link(&socket, &twice).unwrap();
        assert!(give().is_err());
        std::fs::remove_file(&twice).unwrap();
        give().unwrap();
        assert_eq!(std::fs::metadata(&socket).unwrap().mode() & 0o777, 0o660);
        drop(bound);
    }

    #[test]
    fn the_socket_of_another_owner_in_its_place_stays() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("store.sock");
        let uid = rustix::process::geteuid().as_raw();
        let (_own, own) = listen(&socket, Some(uid), None).unwrap();
        std::fs::remove_file(&socket).unwrap();
        remove(&socket, own);
        let (_other, other) = listen(&socket, Some(uid), None).unwrap();
        remove(&socket, own);
        assert!(UnixStream::connect(&socket).is_ok());
        remove(&socket, other);
        assert!(!socket.exists());
    }
}

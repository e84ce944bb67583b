//! The socket file beside a store.

use std::io;
use std::path::Path;

use larder_base::system::files::{self, FileId, Found, Kind};
use larder_base::system::processes::{self, IdKind};
use larder_base::system::sockets::{self, Name, UnixListener};

use super::peer::IdMap;
use crate::volume::socket::{directory_of, name_of, short_name};

/// Whether [`listen`] is likely to succeed. Checked before a store is opened: opening is much work
/// and changes the store.
///
/// # Errors
/// The reason why it would fail.
pub(in crate::share) fn may_listen(socket: &Path) -> io::Result<()> {
    let directory = directory_of(socket);
    files::may_change(directory)?;
    short_name(socket)?;
    let Some(left) = left_there(socket)? else {
        return Ok(());
    };
    // inode(7): in a sticky directory only the owner of the file or of the directory may remove a
    // file.
    let directory = files::look(directory)?;
    let user = processes::user();
    if directory.is_sticky && user != ROOT && ![left.user, directory.user].contains(&user) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(())
}

const ROOT: u32 = 0;

/// The socket that a former owner left.
fn left_there(socket: &Path) -> io::Result<Option<Found>> {
    match files::look_at_name(socket) {
        Ok(found) if found.kind == Kind::Socket => Ok(Some(found)),
        Ok(_) => Err(io::Error::other("no socket: move it away")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether this process may give a file to a group.
pub(in crate::share) fn may_give_to(gid: u32) -> bool {
    let groups = IdMap::of(IdKind::Group);
    if groups.hides(gid) || !groups.has(gid) {
        return false;
    }
    processes::user() == ROOT || processes::groups().contains(&gid)
}

/// Binds the socket, for the store's user, if that user is mapped, and optionally for a group. The
/// holder of the store's lock may replace the socket of a former owner. On failure no file is left.
pub(super) fn listen(
    socket: &Path,
    uid: Option<u32>,
    group: Option<u32>,
) -> io::Result<(UnixListener, FileId)> {
    let process = processes::user();
    // Otherwise a user's store would be accessible to root alone while root serves it.
    let uid = uid.filter(|uid| process == ROOT && *uid != process);
    let name = if uid.is_some() || group.is_some() {
        // The same directory at every step, even if it is renamed meanwhile.
        Name::through(directory_of(socket), name_of(socket))?
    } else {
        short_name(socket)?
    };
    if left_there(name.path())?.is_some() {
        files::remove(name.path())?;
    }
    let listener = sockets::listen(name.path(), uid, group)?;
    let bound = files::look_at_name(name.path())?;
    Ok((listener, bound.id))
}

/// Whether a socket's file is still the file that was bound.
pub(super) fn is_bound(socket: &Path, own: FileId) -> bool {
    files::look_at_name(socket).is_ok_and(|found| found.id == own)
}

/// Removes the file of a socket that this process has bound. Another file in its place stays: it
/// may be the socket of another store, whose owner could not be reached any more.
pub(super) fn remove(socket: &Path, own: FileId) {
    if is_bound(socket, own) {
        let _ = files::remove(socket);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::net::UnixStream;

    use super::*;

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

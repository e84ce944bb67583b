//! Unix stream sockets, and the files of listening ones.

use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, recvmsg, sendmsg,
};

use crate::runtime::descriptors;

pub use std::os::fd::AsFd as Pollable;
pub use std::os::unix::net::{UnixListener, UnixStream};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;

/// Binds a socket to a new file and listens on it. The file is for this process's user, or is given
/// to `user` and `group`, before anyone can connect. On failure no file is left.
pub fn listen(socket: &Path, user: Option<u32>, group: Option<u32>) -> io::Result<UnixListener> {
    let (uid, gid) = (user.map(Uid::from_raw), group.map(Gid::from_raw));
    let mode = Mode::from_raw_mode(if gid.is_some() { 0o660 } else { 0o600 });
    let is_given = uid.is_some() || gid.is_some();
    let fd = unix_socket()?;
    // Before the bind: the file is created with these permissions.
    rustix::fs::fchmod(&fd, mode)?;
    rustix::net::bind(&fd, &SocketAddrUnix::new(socket)?)?;
    let given = if is_given {
        give(socket, mode, uid, gid)
    } else {
        Ok(())
    };
    if let Err(error) = given.and_then(|()| Ok(rustix::net::listen(&fd, BACKLOG)?)) {
        let _ = std::fs::remove_file(socket);
        return Err(error);
    }
    Ok(UnixListener::from(fd))
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
            tracing::warn!(%error, "the user of the store cannot attach while root serves it");
            Ok(())
        }
        given => Ok(given?),
    }
}

/// A name for a socket that fits an address, however long its directory's name is.
pub struct Name {
    path: PathBuf,
    /// Open while the name is used.
    _directory: Option<OwnedFd>,
}

/// Bytes of a socket's name (`sun_path` in unix(7), without its end).
const ADDRESS_BYTES_MAX: usize = 107;

impl Name {
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The socket's own name if it is short enough.
    pub fn short(directory: &Path, name: &Path) -> io::Result<Name> {
        let whole = directory.join(name);
        if whole.as_os_str().len() > ADDRESS_BYTES_MAX {
            return Name::through(directory, name);
        }
        Ok(Name {
            path: whole,
            _directory: None,
        })
    }

    /// A name in the directory that has its name at this moment, even if it is renamed later.
    pub fn through(directory: &Path, name: &Path) -> io::Result<Name> {
        descriptors::cover()?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(directory, flags, Mode::empty())?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd())).join(name);
        if path.as_os_str().len() > ADDRESS_BYTES_MAX {
            return Err(io::Error::other(
                "the file name is too long for a socket: shorten it to 80 bytes",
            ));
        }
        Ok(Name {
            path,
            _directory: Some(directory),
        })
    }
}

/// Connects to a listening socket. Accepting the connection, each read and each write may take
/// `patience`.
pub fn connect(socket: &Path, patience: Duration) -> io::Result<UnixStream> {
    let stream = UnixStream::from(unix_socket()?);
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    rustix::net::connect(&stream, &SocketAddrUnix::new(socket)?)?;
    Ok(stream)
}

/// Whether a process listens on a socket. A socket that refuses this process access counts as
/// listening.
pub fn is_listening(socket: &Path) -> io::Result<()> {
    let fd = unix_socket()?;
    // Non-blocking: a full connection queue is no reason to wait.
    rustix::io::ioctl_fionbio(&fd, true)?;
    rustix::net::connect(&fd, &SocketAddrUnix::new(socket)?).or_else(|error| match error {
        Errno::AGAIN | Errno::ACCESS => Ok(()),
        error => Err(error.into()),
    })
}

/// A stream socket that is not connected yet.
fn unix_socket() -> io::Result<OwnedFd> {
    descriptors::cover()?;
    Ok(rustix::net::socket_with(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Accepts a connection.
pub fn accept(listener: &UnixListener) -> io::Result<UnixStream> {
    descriptors::cover()?;
    listener.accept().map(|(stream, _)| stream)
}

/// Ends all waits for connections on a listening socket, for good.
pub fn stop_listening(listener: &UnixListener) {
    let _ = rustix::net::shutdown(listener, rustix::net::Shutdown::Both);
}

/// Waits until a stream has data or ends, or a listener has a connection, at most `patience`
/// (without a limit when it is `None`). False after the limit.
///
/// Uses `poll`: a thread that sleeps in a read of a Unix socket is also woken, for nothing, when
/// the other end has read its data (`unix_write_space` in the kernel's net/unix/af_unix.c).
pub fn poll(socket: &impl Pollable, patience: Option<Duration>) -> io::Result<bool> {
    let patience = patience.and_then(|patience| Timespec::try_from(patience).ok());
    let mut polled = [PollFd::new(socket, PollFlags::IN)];
    match rustix::event::poll(&mut polled, patience.as_ref()) {
        Ok(ready) => Ok(ready > 0),
        Err(error) => Err(error.into()),
    }
}

/// The process that was connected when a connection was made, as the kernel attests it.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// 0 for a process of another pid namespace.
    pub pid: u32,
    pub user: u32,
    pub group: u32,
}

/// The peer of a connection (`SO_PEERCRED`).
pub fn peer(stream: &UnixStream) -> io::Result<Peer> {
    let found = getsockopt(stream, PeerCredentials)?;
    Ok(Peer {
        pid: u32::try_from(found.pid()).unwrap_or(0),
        user: found.uid(),
        group: found.gid(),
    })
}

/// The groups of a peer besides its primary one (`SO_PEERGROUPS`, Linux 4.13, net/core/sock.c).
pub fn further_groups(peer: &UnixStream) -> io::Result<Vec<u32>> {
    let mut groups: Vec<libc::gid_t> = vec![0; 32];
    loop {
        let room = size_of_val(groups.as_slice());
        let mut bytes = libc::socklen_t::try_from(room).map_err(io::Error::other)?;
        // SAFETY: the kernel writes at most `bytes` bytes to `groups`, which has that many, and
        // writes their number to `bytes`.
        let outcome = unsafe {
            libc::getsockopt(
                peer.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut bytes,
            )
        };
        let count = bytes as usize / size_of::<libc::gid_t>();
        if outcome == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::ERANGE) || count <= groups.len() {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}

/// Writes bytes with an open file attached to the first of them, or without one.
pub fn send(
    mut stream: &UnixStream,
    bytes: &[u8],
    file: Option<BorrowedFd<'_>>,
) -> io::Result<usize> {
    let Some(file) = file else {
        return stream.write(bytes);
    };
    let files = [file];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&files));
    let iov = [IoSlice::new(bytes)];
    Ok(sendmsg(stream, &iov, &mut control, SendFlags::NOSIGNAL)?)
}

/// Writes bytes as far as there is room for them at this moment.
pub fn send_now(stream: &UnixStream, bytes: &[u8]) -> io::Result<usize> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    Ok(rustix::net::send(stream, bytes, flags)?)
}

/// Reads bytes, and takes the last open file that is attached to them. Other files are closed.
pub fn receive(stream: &UnixStream, bytes: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut iov = [IoSliceMut::new(bytes)];
    let got = recvmsg(stream, &mut iov, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut taken = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message {
            taken = files.last().or(taken);
        }
    }
    Ok((got.bytes, taken))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::MetadataExt;

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
    fn a_peer_has_the_user_and_the_groups_of_its_process() {
        let (stream, _other) = UnixStream::pair().unwrap();
        let further = rustix::process::getgroups().unwrap();
        let further: Vec<u32> = further.iter().map(|gid| gid.as_raw()).collect();
        assert_eq!(further_groups(&stream).unwrap(), further);
        let found = peer(&stream).unwrap();
        let own = (std::process::id(), rustix::process::geteuid().as_raw());
        assert_eq!((found.pid, found.user), own);
    }
}

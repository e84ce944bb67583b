//! The socket file beside a store.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// Where the catalog of the store at `path` is served: beside the file or device, whatever links lead to it.
pub fn socket_path(path: &Path) -> PathBuf {
    let mut name = match std::fs::canonicalize(path) {
        Ok(path) => path.into_os_string(),
        Err(_) => path.as_os_str().to_owned(),
    };
    name.push(".sock");
    PathBuf::from(name)
}

/// Binds the socket: whoever holds the store's lock may replace what a former owner left there.
pub(super) fn listen(socket: &Path, group: Option<u32>) -> io::Result<UnixListener> {
    match std::fs::symlink_metadata(socket) {
        Ok(found) if found.file_type().is_socket() => std::fs::remove_file(socket)?,
        Ok(_) => return Err(io::Error::other("no socket: move it away")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let mode = if group.is_some() { 0o660 } else { 0o600 };
    let fd = unix_socket()?;
    // Before it has a name: the file is made with these permissions.
    rustix::fs::fchmod(&fd, rustix::fs::Mode::from_raw_mode(mode))?;
    let (_directory, short) = short_path(socket)?;
    let address = rustix::net::SocketAddrUnix::new(short)?;
    rustix::net::bind(&fd, &address)?;
    if group.is_some() {
        let gid = group.map(rustix::fs::Gid::from_raw);
        rustix::fs::chown(socket, None, gid)?;
        // The process's umask took the group's share away.
        rustix::fs::chmod(socket, rustix::fs::Mode::from_raw_mode(mode))?;
    }
    rustix::net::listen(&fd, 128)?;
    Ok(UnixListener::from(fd))
}

/// A stream socket that leads nowhere yet.
pub(in crate::share) fn unix_socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?)
}

/// A name for a socket that fits an address, however long its directory's is; and what must stay open while it is used.
pub(in crate::share) fn short_path(socket: &Path) -> io::Result<(Option<OwnedFd>, PathBuf)> {
    const ADDRESS_BYTES_MAX: usize = 107;
    let directory = socket
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let name = socket.file_name().unwrap_or_default();
    let whole = directory.join(name);
    if whole.as_os_str().len() <= ADDRESS_BYTES_MAX {
        return Ok((None, whole));
    }
    let handle = rustix::fs::open(
        directory,
        rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )?;
    let number = std::os::fd::AsRawFd::as_raw_fd(&handle);
    let path = PathBuf::from(format!("/proc/self/fd/{number}")).join(name);
    Ok((Some(handle), path))
}

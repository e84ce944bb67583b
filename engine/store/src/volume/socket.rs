//! The place of the socket beside a store.

use larder_base::system::files;
use larder_base::system::sockets::{self, Name};
use std::io;
use std::path::{Path, PathBuf};

/// Path of the catalog's socket for the store at `path`: beside the file or device, with all links
/// resolved.
pub fn socket_path(path: &Path) -> PathBuf {
    let mut name = match files::resolve(path) {
        Ok(path) => path.into_os_string(),
        Err(_) => path.as_os_str().to_owned(),
    };
    name.push(".sock");
    PathBuf::from(name)
}

/// Whether a process listens on a socket. A socket that refuses this process access counts as
/// listening.
pub(crate) fn is_listening(socket: &Path) -> bool {
    short_name(socket).is_ok_and(|name| sockets::is_listening(name.path()).is_ok())
}

/// The directory of a socket.
pub(crate) fn directory_of(socket: &Path) -> &Path {
    socket
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// Its name there.
pub(crate) fn name_of(socket: &Path) -> &Path {
    Path::new(socket.file_name().unwrap_or_default())
}

/// A name for a socket that fits an address.
pub(crate) fn short_name(socket: &Path) -> io::Result<Name> {
    Name::short(directory_of(socket), name_of(socket))
}

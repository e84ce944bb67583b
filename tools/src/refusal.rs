//! Where the permissions of a path refuse this process: the user, and the first directory or file
//! that refuses it.

use std::fs::{self, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use larder_engine::StoreError;
use larder_store::volume::socket::socket_path;
use nix::unistd::{Group, Uid, User};
use rustix::fs::{Access, AtFlags, CWD};

/// Most links that a path may lead through, as in the kernel.
const LINKS_MAX: u32 = 40;

/// The error of a store, with the place that refuses this process if permissions are its cause.
pub fn explained(error: &StoreError) -> String {
    let place = match error {
        StoreError::Io { path, source, .. } if source.kind() == ErrorKind::PermissionDenied => {
            refusal(path)
        }
        StoreError::Denied { path, .. } => refusal(&socket_path(path)),
        _ => None,
    };
    match place {
        Some(place) => format!("{error}. {place}"),
        None => error.to_string(),
    }
}

/// The user of this process, and the first directory or file of a path that refuses it. `None` if
/// none does.
pub fn refusal(path: &Path) -> Option<String> {
    refusal_within(path, LINKS_MAX)
}

fn refusal_within(path: &Path, links: u32) -> Option<String> {
    let path = std::path::absolute(path).ok()?;
    let mut places: Vec<&Path> = path.ancestors().collect();
    places.reverse();
    for place in places {
        match fs::metadata(place) {
            Ok(_) => {}
            Err(error) if is_refused(&error) => {
                let above = place.parent()?;
                // A link leads to a directory that may refuse, too.
                if let Ok(target) = fs::read_link(place) {
                    return refusal_within(&above.join(target), links.checked_sub(1)?);
                }
                return Some(said("directory", above, &fs::metadata(above).ok()?));
            }
            Err(_) => return None,
        }
    }
    let found = fs::metadata(&path).ok()?;
    let how = Access::READ_OK | Access::WRITE_OK;
    let refused = rustix::fs::accessat(CWD, &path, how, AtFlags::EACCESS).err()?;
    let kind = match found.file_type() {
        kind if kind.is_dir() => "directory",
        kind if kind.is_socket() => "socket",
        kind if kind.is_block_device() => "device",
        _ => "file",
    };
    is_refused(&refused.into()).then(|| said(kind, &real(path), &found))
}

/// The file that a link leads to: its permissions count.
fn real(path: PathBuf) -> PathBuf {
    fs::canonicalize(&path).unwrap_or(path)
}

fn is_refused(error: &io::Error) -> bool {
    error.kind() == ErrorKind::PermissionDenied
}

fn said(kind: &str, place: &Path, found: &Metadata) -> String {
    let user = user(rustix::process::geteuid().as_raw());
    let (mode, owner) = (found.mode() & 0o7777, self::user(found.uid()));
    let group = match Group::from_gid(found.gid().into()) {
        Ok(Some(group)) => format!("{} ({})", group.name, found.gid()),
        _ => found.gid().to_string(),
    };
    format!(
        "The {kind} {} refuses the user {user}: its mode is {mode:o}, its owner {owner}, its group \
         {group}",
        place.display()
    )
}

/// A user, by name and number.
fn user(number: u32) -> String {
    match User::from_uid(Uid::from_raw(number)) {
        Ok(Some(user)) => format!("{} ({number})", user.name),
        _ => number.to_string(),
    }
}

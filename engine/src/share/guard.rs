//! Marks on the volumes. A mark means: this process may still be writing.
//!
//! The owner of a store holds a `flock`. A client cannot have it, but it writes too. Its extents
//! must not be granted again before its last write is over, even when the client is killed in the
//! middle of a write. So each client locks one byte far beyond the end of every volume (an *open
//! file description lock*, `fcntl(2)`), on the same description that its ring writes through. The
//! kernel releases this lock when it has finished the last write, and not before. The owner checks
//! a client's byte before it reuses the client's extents. A new owner first waits until no byte is
//! locked at all.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};

use super::wire::ClientId;
use crate::runtime::Instant;

/// Which clients may have writes in flight.
pub trait Marks {
    /// Whether a client's marks are on every volume. Only then it may be granted extents.
    fn are_on_all(&self, client: ClientId) -> bool;

    /// Whether a mark of the client is left on any volume. While there is one, its extents stay
    /// reserved.
    fn are_on_any(&self, client: ClientId) -> bool;
}

/// The volumes, each through a description other than the clients'.
impl Marks for Vec<Arc<OwnedFd>> {
    fn are_on_all(&self, client: ClientId) -> bool {
        let mut volumes = self.iter();
        volumes.all(|volume| is_marked(volume, client.0) == Ok(true))
    }

    fn are_on_any(&self, client: ClientId) -> bool {
        let mut volumes = self.iter();
        volumes.any(|volume| is_marked(volume, client.0) != Ok(false))
    }
}

/// Offset of the first byte: beyond any volume.
const FIRST: i64 = 1 << 62;

/// Number of bytes: one for each client number.
const COUNT: i64 = 1 << 32;

/// Interval of the checks while waiting for the marks of others.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

fn lock(kind: libc::c_int, start: i64, count: i64) -> libc::flock {
    libc::flock {
        l_type: i16::try_from(kind).unwrap_or(0),
        l_whence: 0,
        l_start: start,
        l_len: count,
        l_pid: 0,
    }
}

fn set(file: &OwnedFd, lock: &libc::flock) -> Result<(), Errno> {
    loop {
        match fcntl(file, FcntlArg::F_OFD_SETLK(lock)) {
            Err(Errno::EINTR) => {}
            outcome => return outcome.map(|_| ()),
        }
    }
}

/// A client's marks. Drop it after the client's last write is over. Dropping removes the marks even
/// if a child process has inherited their descriptions. Otherwise a mark stays for as long as its
/// description is open anywhere.
pub(crate) struct Marked {
    client: u32,
    volumes: Vec<Arc<OwnedFd>>,
}

impl Marked {
    pub(crate) fn by(client: u32) -> Marked {
        Marked {
            client,
            volumes: Vec::new(),
        }
    }

    /// Marks a volume as being written by the client.
    pub(crate) fn mark(&mut self, file: &Arc<OwnedFd>) -> Result<(), Errno> {
        set(file, &own(libc::F_WRLCK, self.client))?;
        self.volumes.push(file.clone());
        Ok(())
    }
}

impl Drop for Marked {
    fn drop(&mut self) {
        for volume in &self.volumes {
            let _ = set(volume, &own(libc::F_UNLCK, self.client));
        }
    }
}

/// A client's own byte.
fn own(kind: libc::c_int, client: u32) -> libc::flock {
    lock(kind, FIRST + i64::from(client), 1)
}

/// Whether a client may have writes to a volume in flight. `file` must be a description other than
/// the client's own.
fn is_marked(file: &OwnedFd, client: u32) -> Result<bool, Errno> {
    let mut probe = own(libc::F_WRLCK, client);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut probe))?;
    Ok(i32::from(probe.l_type) != libc::F_UNLCK)
}

/// Waits until no client has writes to a volume in flight. False when `until` passes first.
pub(crate) fn wait_for_none(file: &OwnedFd, until: Instant) -> bool {
    let all = lock(libc::F_WRLCK, FIRST, COUNT);
    loop {
        match set(file, &all) {
            Ok(()) => {
                let _ = set(file, &lock(libc::F_UNLCK, FIRST, COUNT));
                return true;
            }
            // ENOLCK and ENOMEM: the system has no room for a lock just now, so the state is
            // unknown.
            Err(Errno::EAGAIN | Errno::EACCES | Errno::ENOLCK | Errno::ENOMEM) => {
                if Instant::now() >= until {
                    return false;
                }
                crate::runtime::thread::sleep(LOOK_AGAIN);
            }
            // The file system has no such locks, so no client holds one.
            Err(_) => return true,
        }
    }
}

//! Marks on the volumes that say: this process may still be writing.
//!
//! The owner of a store holds a `flock`. A client cannot have it, but it writes too, and what it was given to write to must not be
//! given to anybody else before its last write is over, also when the client is killed in the middle of one. So each client
//! locks one byte far beyond the end of every volume (an *open file description lock*, `fcntl(2)`), on the very
//! description that its ring writes through: the lock goes when the kernel has let go of the last write, and not before. The
//! owner looks at a client's byte before it reuses what that client had; whoever becomes owner first waits until no byte is
//! locked at all.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};

use super::wire::ClientId;

/// Whose writes may not be over.
pub trait Marks {
    /// Whether a client's marks are on every volume: it may be given something to write to.
    fn are_on_all(&self, client: ClientId) -> bool;

    /// Whether one is left on any volume: what the client was given stays its own.
    fn are_on_any(&self, client: ClientId) -> bool;
}

/// The volumes, each through a description that is not the clients' own.
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

/// Where the bytes begin: beyond any volume.
const FIRST: i64 = 1 << 62;

/// How many there are: one for each client number.
const COUNT: i64 = 1 << 32;

/// How often a wait for somebody else's marks looks again.
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

/// A client's marks. Dropped, to be dropped after its last write is over, they go, also where a child process has inherited the
/// descriptions that they hang on; otherwise they stay for as long as such a description is open anywhere.
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

/// Whether a client's writes to a volume may not be over. `file` must be a description that is not the client's own.
fn is_marked(file: &OwnedFd, client: u32) -> Result<bool, Errno> {
    let mut probe = own(libc::F_WRLCK, client);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut probe))?;
    Ok(i32::from(probe.l_type) != libc::F_UNLCK)
}

/// Waits until no client's writes to a volume are under way; false when `until` passes first.
pub(crate) fn wait_for_none(file: &OwnedFd, until: Instant) -> bool {
    let all = lock(libc::F_WRLCK, FIRST, COUNT);
    loop {
        match set(file, &all) {
            Ok(()) => {
                let _ = set(file, &lock(libc::F_UNLCK, FIRST, COUNT));
                return true;
            }
            // The latter two: the system has no room for a lock just now, and so it is not known.
            Err(Errno::EAGAIN | Errno::EACCES | Errno::ENOLCK | Errno::ENOMEM) => {
                if Instant::now() >= until {
                    return false;
                }
                std::thread::sleep(LOOK_AGAIN);
            }
            // No such locks here, so nobody holds one.
            Err(_) => return true,
        }
    }
}

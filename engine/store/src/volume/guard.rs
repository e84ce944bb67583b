//! Marks on the volumes. A mark means: this process may still be writing.
//!
//! The owner of a store holds a `flock`. A client cannot have it, but it writes too. Its extents
//! must not be granted again before its last write is over, even when the client is killed in the
//! middle of a write. So each client locks one byte far beyond the end of every volume (an *open
//! file description lock*, `fcntl(2)`), on the same description that its ring writes through. The
//! kernel releases this lock when it has finished the last write, and not before. The owner checks
//! a client's byte before it reuses the client's extents. A new owner first waits until no byte is
//! locked at all.

use larder_base::ids::ClientId;
use larder_base::runtime::Instant;
use larder_base::system::files::{Handle, are_bytes_locked, lock_bytes};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Which clients may have writes in flight.
pub trait Marks {
    /// Whether a client's marks are on every volume. Only then it may be granted extents.
    fn are_on_all(&self, client: ClientId) -> bool;

    /// Whether a mark of the client is left on any volume. While there is one, its extents stay
    /// reserved.
    fn are_on_any(&self, client: ClientId) -> bool;
}

/// The volumes, each through a description other than the clients'.
impl Marks for Vec<Arc<Handle>> {
    fn are_on_all(&self, client: ClientId) -> bool {
        let mut volumes = self.iter();
        volumes.all(|volume| is_marked(volume, client.0).is_ok_and(|is_marked| is_marked))
    }

    fn are_on_any(&self, client: ClientId) -> bool {
        let mut volumes = self.iter();
        volumes.any(|volume| !is_marked(volume, client.0).is_ok_and(|is_marked| !is_marked))
    }
}

/// Offset of the first byte: beyond any volume.
const FIRST: i64 = 1 << 62;

/// Number of bytes: one for each client number.
const COUNT: i64 = 1 << 32;

/// Interval of the checks while waiting for the marks of others.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// A client's marks. Drop it after the client's last write is over. Dropping removes the marks even
/// if a child process has inherited their descriptions. Otherwise a mark stays for as long as its
/// description is open anywhere.
pub(crate) struct Marked {
    client: u32,
    volumes: Vec<Arc<Handle>>,
}

impl Marked {
    pub(crate) fn by(client: u32) -> Marked {
        Marked {
            client,
            volumes: Vec::new(),
        }
    }

    /// Marks a volume as being written by the client.
    pub(crate) fn mark(&mut self, file: &Arc<Handle>) -> io::Result<()> {
        lock_bytes(file, byte_of(self.client), true)?;
        self.volumes.push(file.clone());
        Ok(())
    }
}

impl Drop for Marked {
    fn drop(&mut self) {
        for volume in &self.volumes {
            let _ = lock_bytes(volume, byte_of(self.client), false);
        }
    }
}

/// A client's own byte.
fn byte_of(client: u32) -> Range<i64> {
    let first = FIRST + i64::from(client);
    first..first + 1
}

/// Whether a client may have writes to a volume in flight. `file` must be a description other than
/// the client's own.
fn is_marked(file: &Handle, client: u32) -> io::Result<bool> {
    are_bytes_locked(file, byte_of(client))
}

/// Waits until no client has writes to a volume in flight. False when `until` passes first.
pub(crate) fn wait_for_none(file: &Handle, until: Instant) -> bool {
    let all = FIRST..FIRST + COUNT;
    loop {
        match lock_bytes(file, all.clone(), true) {
            Ok(()) => {
                let _ = lock_bytes(file, all, false);
                return true;
            }
            Err(error) if is_held_or_unknown(&error) => {
                if Instant::now() >= until {
                    return false;
                }
                larder_base::runtime::thread::sleep(LOOK_AGAIN);
            }
            // The file system has no such locks, so no client holds one.
            Err(_) => return true,
        }
    }
}

/// Whether another process holds a lock on the bytes.
pub(crate) fn is_held(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::PermissionDenied
    )
}

/// The same, or the system has no room for a lock just now.
fn is_held_or_unknown(error: &io::Error) -> bool {
    is_held(error) || matches!(error.raw_os_error(), Some(libc::ENOLCK | libc::ENOMEM))
}

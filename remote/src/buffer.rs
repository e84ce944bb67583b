//! Memory for objects, which is used again.
//!
//! An object has tens of MiB. The kernel clears fresh memory when it is first touched, which costs
//! more than all other work on an object. So the memory of dropped buffers is kept for the next
//! ones of this process, at most 512 MiB of it, while the agents have work. It is aligned: a store
//! reads pages into it and writes them from it without copies.
//!
//! A simulated run ends with all its memory, so its buffers are not kept.
//!
//! No thread waits for the list of kept memory: in a forked child the holder of its lock may be a
//! thread that is not there. A buffer is allocated or freed then.

use std::ops::{Deref, DerefMut};

use larder_engine::AlignedBuf;
use larder_sync::Mutex;

use crate::error::RemoteError;

/// Most bytes that are kept.
const KEPT_BYTES_MAX: usize = 512 << 20;

/// Memory of dropped buffers, the oldest first.
static KEPT: Mutex<Vec<AlignedBuf>> = Mutex::new(Vec::new());

/// The bytes of an object.
#[derive(Debug)]
pub struct Buffer {
    /// `None` once it is dropped.
    memory: Option<AlignedBuf>,
    length: usize,
}

impl Buffer {
    /// A buffer of so many bytes. They are those of former buffers, or zeros.
    ///
    /// # Errors
    /// There is no memory.
    pub fn of(length: usize) -> Result<Buffer, RemoteError> {
        let memory = match kept(length) {
            Some(memory) => memory,
            None => AlignedBuf::zeroed(length).map_err(|_| RemoteError::Memory(length))?,
        };
        Ok(Buffer {
            memory: Some(memory),
            length,
        })
    }

    /// A buffer with these bytes.
    ///
    /// # Errors
    /// There is no memory.
    pub fn copy_of(bytes: &[u8]) -> Result<Buffer, RemoteError> {
        let mut buffer = Buffer::of(bytes.len())?;
        buffer.copy_from_slice(bytes);
        Ok(buffer)
    }

    /// Leaves out the bytes from `length` on.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let memory = self.memory.as_deref().unwrap_or_default();
        &memory[..self.length]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let memory = self.memory.as_deref_mut().unwrap_or_default();
        &mut memory[..self.length]
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let kept = KEPT.try_lock().filter(|_| !cfg!(feature = "simulated"));
        let Some(mut kept) = kept else {
            return;
        };
        kept.extend(self.memory.take());
        let mut bytes: usize = kept.iter().map(|memory| memory.len()).sum();
        let surplus = kept.iter().take_while(|memory| {
            let is_surplus = bytes > KEPT_BYTES_MAX;
            bytes -= memory.len();
            is_surplus
        });
        let surplus = surplus.count();
        let surplus: Vec<AlignedBuf> = kept.drain(..surplus).collect();
        drop(kept);
        // The kernel frees memory slowly.
        drop(surplus);
    }
}

/// Kept memory for so many bytes. At most half of it is left unused.
fn kept(length: usize) -> Option<AlignedBuf> {
    let mut kept = KEPT.try_lock()?;
    let fits = |memory: &AlignedBuf| (length..=2 * length).contains(&memory.len());
    // The newest is the most likely to be in the processor's cache.
    let at = kept.iter().rposition(fits)?;
    Some(kept.remove(at))
}

/// Frees the memory that is kept, unless another thread takes or gives some at this moment.
pub(crate) fn release() {
    let kept = KEPT.try_lock().map(|mut kept| std::mem::take(&mut *kept));
    drop(kept);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    // Larger than the buffers of other tests of this process.
    const LENGTH: usize = 40 << 20;

    /// Whether it happens, although a thread of another test may have the list at a moment.
    fn eventually(mut happens: impl FnMut() -> bool) -> bool {
        (0..100).any(|_| happens())
    }

    #[test]
    fn memory_is_used_again_and_kept_within_a_limit() {
        assert!(eventually(|| {
            let mut first = Buffer::of(LENGTH).unwrap();
            assert_eq!(first.as_ptr().addr() % 4096, 0);
            first[0] = 7;
            drop(first);
            // Fresh memory is zeroed.
            let second = Buffer::of(LENGTH - 1).unwrap();
            assert_eq!(second.len(), LENGTH - 1);
            let much_less = Buffer::of(LENGTH / 4).unwrap();
            second[0] == 7 && much_less[0] == 0
        }));
        let many = KEPT_BYTES_MAX / LENGTH + 3;
        assert!(eventually(|| {
            let many: Vec<Buffer> = (0..many).map(|_| Buffer::of(LENGTH).unwrap()).collect();
            drop(many);
            let bytes: usize = KEPT.lock().iter().map(|memory| memory.len()).sum();
            assert!(bytes <= KEPT_BYTES_MAX);
            bytes >= KEPT_BYTES_MAX / 2
        }));
        assert!(eventually(|| {
            release();
            KEPT.lock().iter().all(|memory| memory.len() < LENGTH)
        }));
    }

    #[test]
    fn a_buffer_is_as_long_as_it_was_asked_for_and_can_be_cut() {
        let mut buffer = Buffer::copy_of(b"an object").unwrap();
        buffer.truncate(2);
        buffer.truncate(5);
        assert_eq!(&*buffer, b"an");
    }
}

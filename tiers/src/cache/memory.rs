//! Memory for an L2 pool: page-aligned, with huge pages if the kernel provides them, optionally
//! locked and registered with the store.

use std::ptr::NonNull;

use larder_engine::{AlignedBuf, PageStore};
use larder_kernels::HostMemory;
use rustix::mm;

/// Options besides the size.
#[derive(Default)]
pub struct HostMemoryOptions<'s> {
    /// Lock the memory, so that it is never paged out.
    pub locked: bool,
    /// The store with which the memory is registered, so that its pages are not looked up for each
    /// transfer.
    pub store: Option<&'s dyn PageStore>,
}

/// `bytes` bytes of zeroed memory, kept until the process ends, because a store never unregisters
/// it. Also returns the results of locking and registration as messages. If either fails, the
/// memory is usable but slower.
///
/// # Errors
/// The memory is not available.
pub fn host_memory(
    bytes: u64,
    options: &HostMemoryOptions<'_>,
) -> Result<(HostMemory, Vec<String>), std::io::Error> {
    let length = usize::try_from(bytes).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
    let mut memory = larder_base::memory::leak(AlignedBuf::zeroed(length)?);
    let mut notes = Vec::new();
    if options.locked {
        // SAFETY: the range is this buffer. Locking does not change its bytes.
        let locked = unsafe { mm::mlock(memory.as_mut_ptr().cast(), memory.len()) };
        notes.push(match locked {
            Ok(()) => "the host pool is locked in memory".to_owned(),
            Err(error) => format!("the host pool is not locked: {error}; raise the memlock limit"),
        });
    }
    if let Some(store) = options.store {
        let (registered, note) = store.register(memory);
        memory = registered;
        notes.push(note);
    }
    let start = NonNull::from(&mut *memory).cast();
    // SAFETY: the bytes are initialised and live until the process ends. The only reference to them
    // ends here, so all later accesses go through the pool.
    let memory = unsafe { HostMemory::new(start, length, Box::new(())) };
    Ok((memory, notes))
}

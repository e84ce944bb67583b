//! Memory for an L2 pool: page-aligned, huge-page backed where the kernel has them, locked and known to the store where asked for.

use std::ptr::NonNull;

use larder_engine::PageStore;
use larder_engine::memory::AlignedBuf;
use larder_kernels::HostMemory;
use rustix::mm;

/// What is asked for beside the bytes.
#[derive(Default)]
pub struct HostMemoryOptions<'s> {
    /// Lock it, so that it is never paged out.
    pub locked: bool,
    /// The store to make it known to, so that its pages are moved without being looked up each time.
    pub store: Option<&'s dyn PageStore>,
}

/// `bytes` bytes of zeroed memory, for the rest of the process: a store that was told of it never forgets. Also what came of
/// locking and registering it, as sentences: where they fail, the memory is as good, only slower.
///
/// # Errors
/// There is no such memory.
pub fn host_memory(
    bytes: u64,
    options: &HostMemoryOptions<'_>,
) -> Result<(HostMemory, Vec<String>), std::io::Error> {
    let length = usize::try_from(bytes).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
    let mut memory = AlignedBuf::zeroed(length)?.leak();
    let mut notes = Vec::new();
    if options.locked {
        // SAFETY: the range is this very buffer; locking changes none of its bytes.
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
    // SAFETY: the bytes are initialised and live as long as the process; the only reference to them ends here, so that from
    // here on they are touched through the pool alone.
    let memory = unsafe { HostMemory::new(start, length, Box::new(())) };
    Ok((memory, notes))
}

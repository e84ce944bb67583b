//! The two pools that pages are copied between.
//!
//! Invariants: a pool's memory outlives every copy into or out of it (copies hold the pool); its pages, all layers of them, lie
//! within that memory. Which page is whose is not known here: whoever makes a [`Transfer`](crate::Transfer) vouches for it.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::cuda::DeviceMemory;
use crate::error::DeviceError;
use crate::layout::{Layout, Strides, pool_bytes};
use crate::shape::KvShape;

/// Which pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tier {
    /// The device's.
    L1,
    /// The host's.
    L2,
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tier::L1 => "L1",
            Tier::L2 => "L2",
        })
    }
}

/// Memory of the host that an L2 pool is to lie in, with whatever keeps it alive.
pub struct HostMemory {
    start: NonNull<u8>,
    bytes: u64,
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: plain bytes; its maker vouched that nobody touches them but through pools.
unsafe impl Send for HostMemory {}
// SAFETY: as above; a shared reference gives out no bytes.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// `bytes` bytes from `start` on, which `owner` keeps alive: a mapping of one's own, or a tensor. A GPU takes only memory that
    /// begins on a page of 4096 bytes and shares its last one with nothing.
    ///
    /// # Safety
    /// The bytes are initialised, readable and writable for as long as `owner` lives, and from here on nobody reads or writes
    /// those of a page except in its turn: between the end of the last transfer that touched it and the start of the next.
    pub unsafe fn new(
        start: NonNull<u8>,
        bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> HostMemory {
        HostMemory {
            start,
            bytes: bytes as u64,
            _owner: owner,
        }
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Zeroed memory from the allocator: for tests and small pools.
    ///
    /// # Errors
    /// [`DeviceError::NoMemory`].
    pub fn zeroed(bytes: u64) -> Result<HostMemory, DeviceError> {
        let memory = ZeroedBytes::new("an L2 pool", bytes)?;
        Ok(HostMemory {
            start: memory.start(),
            bytes,
            _owner: Box::new(memory),
        })
    }
}

/// The host pool: pages in some [`Layout`], in memory that a device knows of. Clones are the same pool.
#[derive(Clone)]
pub struct L2Pool(Arc<L2>);

struct L2 {
    /// Goes before the memory does.
    registration: Option<Box<dyn Any + Send + Sync>>,
    memory: HostMemory,
    layout: Layout,
    shape: KvShape,
    pages: u32,
    strides: Strides,
    device: DeviceId,
}

impl L2Pool {
    /// For devices: a pool in `memory`, which `registration` makes known to the device until it is dropped.
    ///
    /// # Errors
    /// The memory is too small.
    pub(crate) fn new(
        device: DeviceId,
        memory: HostMemory,
        layout: Layout,
        shape: &KvShape,
        pages: u32,
        registration: Option<Box<dyn Any + Send + Sync>>,
    ) -> Result<L2Pool, DeviceError> {
        let needed = pool_bytes(shape, pages);
        if needed > memory.bytes {
            return Err(DeviceError::MemoryTooSmall {
                pages,
                needed,
                found: memory.bytes,
            });
        }
        Ok(L2Pool(Arc::new(L2 {
            registration,
            memory,
            layout,
            shape: *shape,
            pages,
            strides: layout.strides(shape, pages),
            device,
        })))
    }

    /// How its rows are ordered.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.0.layout
    }

    /// The shape of its pages.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.0.shape
    }

    /// How many pages.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.0.pages
    }

    /// Bytes from row to row.
    #[must_use]
    pub fn strides(&self) -> &Strides {
        &self.0.strides
    }

    /// Its first byte.
    #[must_use]
    pub fn start(&self) -> NonNull<u8> {
        self.0.memory.start
    }

    /// The runs of bytes that a page consists of, in the order in which it is stored: K, then V (one run for MLA), or for
    /// `layer_first` those of every layer of K, then of V. Nothing here keeps others from the bytes: whoever uses the addresses
    /// must have the page.
    ///
    /// # Errors
    /// There is no such page.
    pub fn page_runs(
        &self,
        page: u32,
    ) -> Result<impl Iterator<Item = (NonNull<u8>, u32)> + '_, DeviceError> {
        page_exists(Tier::L2, page, self.0.pages)?;
        let shape = &self.0.shape;
        let (layers, bytes) = match self.0.layout {
            Layout::LayerFirst => (shape.layers(), shape.chunk_bytes()),
            Layout::PageFirst | Layout::PageFirstDirect => (1, shape.part_bytes()),
        };
        let runs = (0..shape.parts()).flat_map(move |part| (0..layers).map(move |l| (part, l)));
        Ok(runs.map(move |(part, layer)| {
            (
                self.at(self.0.strides.page_offset(part, layer, page)),
                bytes,
            )
        }))
    }

    /// The byte at an offset that lies inside the pool.
    pub(crate) fn at(&self, offset: u64) -> NonNull<u8> {
        debug_assert!(offset < pool_bytes(&self.0.shape, self.0.pages));
        // SAFETY: offsets of rows that exist lie inside the memory, which was checked to hold the pool.
        unsafe { self.0.memory.start.add(offset as usize) }
    }

    pub(crate) fn device(&self) -> DeviceId {
        self.0.device
    }

    /// What the device made it known with.
    pub(crate) fn registration(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.0.registration.as_deref()
    }
}

impl fmt::Debug for L2Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("L2Pool")
            .field("layout", &self.0.layout)
            .field("shape", &self.0.shape)
            .field("pages", &self.0.pages)
            .finish_non_exhaustive()
    }
}

/// The device's pool, in [`Layout::LayerFirst`]. Clones are the same pool.
#[derive(Clone)]
pub struct L1Pool(Arc<L1>);

struct L1 {
    memory: L1Memory,
    shape: KvShape,
    pages: u32,
    strides: Strides,
    device: DeviceId,
}

/// What the pool lies in.
pub(crate) enum L1Memory {
    /// Memory of the host.
    Host(ZeroedBytes),
    /// Memory of a GPU.
    Device(DeviceMemory),
}

impl L1Pool {
    pub(crate) fn new(device: DeviceId, memory: L1Memory, shape: &KvShape, pages: u32) -> L1Pool {
        L1Pool(Arc::new(L1 {
            memory,
            shape: *shape,
            pages,
            strides: Layout::LayerFirst.strides(shape, pages),
            device,
        }))
    }

    /// The shape of its pages.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.0.shape
    }

    /// How many pages.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.0.pages
    }

    /// Bytes from row to row.
    #[must_use]
    pub fn strides(&self) -> &Strides {
        &self.0.strides
    }

    /// Address of its first byte, as the device's own kernels know it; of a host device in memory of this process. Nothing here keeps
    /// others from the bytes: whoever uses the address follows the tickets.
    #[must_use]
    pub fn address(&self) -> u64 {
        match &self.0.memory {
            L1Memory::Host(memory) => memory.start().addr().get() as u64,
            L1Memory::Device(memory) => memory.address(),
        }
    }

    pub(crate) fn memory(&self) -> &L1Memory {
        &self.0.memory
    }

    pub(crate) fn device(&self) -> DeviceId {
        self.0.device
    }

    /// Byte offset of a chunk, if `bytes` is its size.
    pub(crate) fn chunk_of(&self, at: ChunkAt, bytes: usize) -> Result<u64, DeviceError> {
        let chunk_bytes = self.0.shape.chunk_bytes();
        if bytes != chunk_bytes as usize {
            return Err(DeviceError::ChunkSize { chunk_bytes, bytes });
        }
        page_exists(Tier::L1, at.page, self.0.pages)?;
        if at.part >= self.0.shape.parts() || at.layer >= self.0.shape.layers() {
            return Err(DeviceError::NoSuchLayer {
                part: at.part,
                layer: at.layer,
            });
        }
        Ok(self.0.strides.page_offset(at.part, at.layer, at.page))
    }
}

impl fmt::Debug for L1Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("L1Pool")
            .field("shape", &self.0.shape)
            .field("pages", &self.0.pages)
            .finish_non_exhaustive()
    }
}

/// One chunk of a pool: a page's tokens, in one layer of one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkAt {
    /// 0 is K or the latent, 1 is V.
    pub part: u32,
    /// Layer number.
    pub layer: u32,
    /// Page number.
    pub page: u32,
}

pub(crate) fn page_exists(tier: Tier, page: u32, pages: u32) -> Result<(), DeviceError> {
    if page < pages {
        return Ok(());
    }
    Err(DeviceError::NoSuchPage { tier, page, pages })
}

/// Tells devices apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceId(u64);

impl DeviceId {
    pub(crate) fn next() -> DeviceId {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        DeviceId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Zeroed bytes, shared by address, on pages of their own: drivers lock whole pages, and none twice. Untouched pages of large ones
/// cost nothing.
pub(crate) struct ZeroedBytes {
    start: NonNull<u8>,
    base: NonNull<u8>,
    layout: std::alloc::Layout,
}

/// Alignment of [`ZeroedBytes`].
const HOST_PAGE_BYTES: usize = 4096;

// SAFETY: plain bytes, given out by address only: whoever uses the address answers for it.
unsafe impl Send for ZeroedBytes {}
// SAFETY: as above.
unsafe impl Sync for ZeroedBytes {}

impl ZeroedBytes {
    pub(crate) fn new(what: &'static str, bytes: u64) -> Result<ZeroedBytes, DeviceError> {
        let none = || DeviceError::NoMemory { what, bytes };
        // Room to align the start, and for the rest of the last page.
        let room = bytes
            .checked_add(2 * HOST_PAGE_BYTES as u64)
            .ok_or_else(none)?;
        let room = usize::try_from(room).map_err(|_| none())?;
        // No alignment of note: then the allocator leaves it to the kernel to zero large memory.
        let layout = std::alloc::Layout::from_size_align(room, 16).map_err(|_| none())?;
        // SAFETY: the layout's size is not zero.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        let base = NonNull::new(base).ok_or_else(none)?;
        let skip = base.align_offset(HOST_PAGE_BYTES);
        assert!(skip < HOST_PAGE_BYTES, "there is room to align in");
        Ok(ZeroedBytes {
            // SAFETY: inside the memory, which is two pages longer than what is asked for.
            start: unsafe { base.add(skip) },
            base,
            layout,
        })
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for ZeroedBytes {
    fn drop(&mut self) {
        // SAFETY: allocated with this very layout, and given back once.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) }
    }
}

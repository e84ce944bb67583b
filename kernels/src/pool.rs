//! The two pools between which pages are copied.
//!
//! L1 is one allocation or an engine's own tensors. In both cases a table holds the start of each
//! layer of each part, and the pages of a layer are consecutive.
//!
//! Invariants: the memory of a pool outlives every copy into or out of it, because copies hold the
//! pool. All layers of its pages lie within that memory. The owner of each page is not known here;
//! the creator of a [`Transfer`](crate::Transfer) guarantees exclusive access.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{self, Advice};

use crate::error::DeviceError;
use crate::layout::{Layout, Strides, Tier, pool_bytes};
use crate::shape::KvShape;

/// Host memory for an L2 pool, with the owner that keeps it alive.
pub struct HostMemory {
    start: NonNull<u8>,
    bytes: u64,
    is_locked: bool,
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: plain bytes. The creator guarantees that they are accessed only through pools.
unsafe impl Send for HostMemory {}
// SAFETY: see `Send`. A shared reference gives no access to the bytes.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// `bytes` bytes from `start`, kept alive by `owner`: a mapping or a tensor. A GPU accepts only
    /// memory that starts on a page of the host (4096 bytes on most) and does not share its last
    /// page.
    ///
    /// # Safety
    /// The bytes are initialised, readable and writable while `owner` lives. From now on, other
    /// accesses touch the bytes of a page only between the end of the last transfer that touched it
    /// and the start of the next.
    pub unsafe fn new(
        start: NonNull<u8>,
        bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> HostMemory {
        HostMemory {
            start,
            bytes: bytes as u64,
            is_locked: false,
            _owner: owner,
        }
    }

    /// The same memory, page-locked by its owner (`cudaHostRegister`, `cudaHostAlloc`) for its
    /// whole lifetime. A GPU looks up the registration instead of locking the memory. The memory
    /// may start at any address.
    #[must_use]
    pub fn locked_by_its_owner(self) -> HostMemory {
        HostMemory {
            is_locked: true,
            ..self
        }
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.is_locked
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Zeroed memory from the allocator. For tests and small pools.
    ///
    /// # Errors
    /// [`DeviceError::NoMemory`].
    pub fn zeroed(bytes: u64) -> Result<HostMemory, DeviceError> {
        let memory = ZeroedBytes::new("an L2 pool", bytes)?;
        Ok(HostMemory {
            start: memory.start(),
            bytes,
            is_locked: false,
            _owner: Box::new(memory),
        })
    }
}

/// The host pool: pages in some [`Layout`], in memory known to a device. Clones refer to the same
/// pool.
#[derive(Clone)]
pub struct L2Pool(Arc<L2>);

struct L2 {
    /// Dropped before the memory.
    registration: Option<Box<dyn Any + Send + Sync>>,
    memory: HostMemory,
    layout: Layout,
    shape: KvShape,
    pages: u32,
    strides: Strides,
    device: DeviceId,
}

impl L2Pool {
    /// For devices: a pool in `memory`. `registration` registers the memory with the device until
    /// it is dropped.
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

    /// The row order.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.0.layout
    }

    /// The shape of its pages.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.0.shape
    }

    /// Number of pages.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.0.pages
    }

    /// Distances between rows, in bytes.
    #[must_use]
    pub fn strides(&self) -> &Strides {
        &self.0.strides
    }

    /// The first byte.
    #[must_use]
    pub fn start(&self) -> NonNull<u8> {
        self.0.memory.start
    }

    /// The byte runs of a page, in the order in which the page is stored: K, then V (one run for
    /// MLA). For `layer_first`: every layer of K, then of V. This function does not prevent other
    /// accesses; the caller must own the page.
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
            Layout::PageFirst | Layout::PageFirstDirect | Layout::PageHead => {
                (1, shape.part_bytes())
            }
        };
        let runs = (0..shape.parts()).flat_map(move |part| (0..layers).map(move |l| (part, l)));
        Ok(runs.map(move |(part, layer)| {
            (
                self.at(self.0.strides.page_offset(part, layer, page)),
                bytes,
            )
        }))
    }

    /// The address of the first byte.
    pub(crate) fn address(&self) -> u64 {
        self.0.memory.start.addr().get() as u64
    }

    /// The byte at an offset inside the pool.
    fn at(&self, offset: u64) -> NonNull<u8> {
        debug_assert!(offset < pool_bytes(&self.0.shape, self.0.pages));
        // SAFETY: offsets of existing rows lie inside the memory. The constructor checked that the
        // memory holds the pool.
        unsafe { self.0.memory.start.add(offset as usize) }
    }

    pub(crate) fn device(&self) -> DeviceId {
        self.0.device
    }

    /// The device's registration of the memory.
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

/// The device's pool, in [`Layout::LayerFirst`]. Clones refer to the same pool.
#[derive(Clone)]
pub struct L1Pool(Arc<L1>);

struct L1 {
    /// Address of page 0 in each layer of each part, part by part, as seen by the device's kernels.
    /// For a host device: in memory of this process.
    bases: Box<[u64]>,
    shape: KvShape,
    pages: u32,
    device: DeviceId,
    /// Bitwise OR of all `bases`.
    base_bits: u64,
    /// The memory, and objects that must be dropped before it.
    _memory: Box<dyn Any + Send + Sync>,
}

impl L1Pool {
    /// For devices: a pool that starts at `start`, in `memory`.
    pub(crate) fn in_one_piece(
        device: DeviceId,
        memory: Box<dyn Any + Send + Sync>,
        start: u64,
        shape: &KvShape,
        pages: u32,
    ) -> L1Pool {
        let strides = Layout::LayerFirst.strides(shape, pages);
        let layers =
            (0..shape.parts()).flat_map(|part| (0..shape.layers()).map(move |l| (part, l)));
        let bases = layers.map(|(part, layer)| start + strides.page_offset(part, layer, 0));
        Self::at(device, memory, bases.collect(), shape, pages)
    }

    /// For devices: a pool whose layers start at `bases`, part by part, in `memory`.
    pub(crate) fn at(
        device: DeviceId,
        memory: Box<dyn Any + Send + Sync>,
        bases: Box<[u64]>,
        shape: &KvShape,
        pages: u32,
    ) -> L1Pool {
        debug_assert_eq!(
            bases.len() as u64,
            u64::from(shape.parts() * shape.layers())
        );
        L1Pool(Arc::new(L1 {
            base_bits: bases.iter().fold(0, |bits, base| bits | base),
            bases,
            shape: *shape,
            pages,
            device,
            _memory: memory,
        }))
    }

    /// The shape of its pages.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.0.shape
    }

    /// Number of pages.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.0.pages
    }

    /// Address of a page in one layer of one part, as seen by the device's kernels. For a host
    /// device: in memory of this process. This function does not prevent other accesses; the caller
    /// must wait for the tickets.
    ///
    /// # Errors
    /// There is no such page or layer.
    pub fn address(&self, at: ChunkAt) -> Result<u64, DeviceError> {
        page_exists(Tier::L1, at.page, self.0.pages)?;
        if at.part >= self.0.shape.parts() || at.layer >= self.0.shape.layers() {
            return Err(DeviceError::NoSuchLayer {
                part: at.part,
                layer: at.layer,
            });
        }
        Ok(self.chunk(at))
    }

    /// Distances between rows within some layers, in bytes. The strides to the next part and the
    /// next layer wrap around. `None` if the layers do not exist or are not evenly spaced; a single
    /// layer always is.
    #[must_use]
    pub fn strides(&self, layers: &Range<u32>) -> Option<Strides> {
        if layers.is_empty() || layers.end > self.0.shape.layers() {
            return None;
        }
        let at = |part, layer| {
            self.chunk(ChunkAt {
                part,
                layer,
                page: 0,
            })
        };
        let start = at(0, layers.start);
        let to = |part, layer| at(part, layer).wrapping_sub(start);
        let parts = self.0.shape.parts();
        let part = if parts > 1 { to(1, layers.start) } else { 0 };
        let layer = if layers.len() > 1 {
            to(0, layers.start + 1)
        } else {
            0
        };
        let even = layers.clone().zip(0u64..).all(|(number, steps)| {
            (0..parts).all(|p| {
                let ahead = part.wrapping_mul(p.into());
                to(p, number) == ahead.wrapping_add(layer.wrapping_mul(steps))
            })
        });
        even.then_some(Strides {
            part,
            layer,
            page: self.0.shape.chunk_bytes().into(),
            token: self.0.shape.row_bytes().into(),
            head: self.0.shape.head_bytes().into(),
        })
    }

    /// Address of a chunk. The chunk must exist.
    pub(crate) fn chunk(&self, at: ChunkAt) -> u64 {
        let layer = at.part * self.0.shape.layers() + at.layer;
        self.0.bases[layer as usize] + u64::from(self.0.shape.chunk_bytes()) * u64::from(at.page)
    }

    /// Whether all layers start at multiples of this.
    pub(crate) fn is_aligned(&self, power_of_two: u64) -> bool {
        self.0.base_bits.is_multiple_of(power_of_two)
    }

    /// Whether the pool overlaps this range.
    pub(crate) fn touches(&self, start: u64, bytes: u64) -> bool {
        let layer_bytes = u64::from(self.0.shape.chunk_bytes()) * u64::from(self.0.pages);
        let mut bases = self.0.bases.iter();
        bases.any(|base| *base < start + bytes && start < base + layer_bytes)
    }

    pub(crate) fn device(&self) -> DeviceId {
        self.0.device
    }

    /// Address of a chunk. Fails if `bytes` is not its size.
    pub(crate) fn chunk_of(&self, at: ChunkAt, bytes: usize) -> Result<u64, DeviceError> {
        let chunk_bytes = self.0.shape.chunk_bytes();
        if bytes != chunk_bytes as usize {
            return Err(DeviceError::ChunkSize { chunk_bytes, bytes });
        }
        self.address(at)
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

/// One chunk of a pool: the tokens of a page in one layer of one part.
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

/// Identifies a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceId(u64);

impl DeviceId {
    pub(crate) fn next() -> DeviceId {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        DeviceId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Zeroed bytes, shared by address, on pages of their own: drivers lock whole pages, and no page
/// twice. Untouched pages of large allocations cost no memory.
pub(crate) struct ZeroedBytes {
    start: NonNull<u8>,
    base: NonNull<u8>,
    layout: std::alloc::Layout,
}

// SAFETY: plain bytes, exposed only as an address. Users of the address ensure correct access.
unsafe impl Send for ZeroedBytes {}
// SAFETY: see `Send`.
unsafe impl Sync for ZeroedBytes {}

impl ZeroedBytes {
    pub(crate) fn new(what: &'static str, bytes: u64) -> Result<ZeroedBytes, DeviceError> {
        ZeroedBytes::on_pages(what, bytes, rustix::param::page_size())
    }

    /// Aligned to the memory pages of a machine where a small one has `page` bytes.
    fn on_pages(what: &'static str, bytes: u64, page: usize) -> Result<ZeroedBytes, DeviceError> {
        let none = || DeviceError::NoMemory { what, bytes };
        // Room to align the start and to fill the last page.
        let room = bytes.checked_add(2 * page as u64).ok_or_else(none)?;
        let room = usize::try_from(room).map_err(|_| none())?;
        // A small alignment: the allocator then obtains large memory zeroed from the kernel and
        // does not clear it itself.
        let layout = std::alloc::Layout::from_size_align(room, 16).map_err(|_| none())?;
        // SAFETY: the size of the layout is not zero.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        let base = NonNull::new(base).ok_or_else(none)?;
        let skip = base.align_offset(page);
        assert!(skip < page, "there is room to align in");
        // SAFETY: inside the memory, which is two pages longer than requested.
        let start = unsafe { base.add(skip) };
        let length = room - 2 * page;
        // A huge page is the memory behind one page of a page table, whose entries have 8 bytes.
        if length >= page * (page / 8) {
            // The first touch of a huge page costs less than that of all its small pages. Without
            // huge pages nothing changes.
            // SAFETY: the range is this memory, and its bytes stay the same.
            let _refused =
                unsafe { mm::madvise(start.as_ptr().cast(), length, Advice::LinuxHugepage) };
        }
        Ok(ZeroedBytes {
            start,
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
        // SAFETY: allocated with exactly this layout, freed once.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn memory_begins_on_a_page_of_each_machine_and_is_zero() {
        for page in [4 << 10, 16 << 10, 64 << 10] {
            let bytes = 3 * page - 5;
            let memory = ZeroedBytes::on_pages("a pool", bytes as u64, page).unwrap();
            assert_eq!(memory.start().addr().get() % page, 0);
            // SAFETY: the memory has so many bytes, which are zero from the start.
            let all = unsafe { std::slice::from_raw_parts(memory.start().as_ptr(), bytes) };
            assert!(all.iter().all(|byte| *byte == 0));
        }
    }
}

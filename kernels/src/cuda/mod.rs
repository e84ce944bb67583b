//! The device where there is one: CUDA, through the driver alone, which is looked for at run time.
//!
//! ```text
//!   load    [wait: after] [layer 0] (event) [layer 1] (event) ...     high priority
//!   store   [wait: after] [all layers] (event)                        low priority
//! ```
//!
//! Builds without CUDA. Where the driver is missing, too old or without a device, [`CudaDevice::open`] says so in about a millisecond,
//! and [`HostDevice`] serves ([`or_host`]); a device that fails later fails all that is asked of it from then on.
//!
//! Stores go by copy engine, which leaves the compute units to the forward. So do loads of few copies; many, or short ones, go by one
//! kernel a layer ([`Way`]). Where the line lies was taken from published figures and not measured on the device.
//!
//! | module | owns |
//! |---|---|
//! | `driver` | calls into the driver: contexts, streams, events, copies, kernels |
//! | `memory` | pools, page lists, registered memory of the host |
//! | `pieces` | registering in pieces, and copies that stay within one |
//! | [`image`] | which code the device gets |
//! | [`nvrtc`] | the compiler, where it is installed |

mod driver;
pub mod image;
mod memory;
pub mod nvrtc;
mod pieces;

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

pub(crate) use driver::Event;
pub(crate) use memory::DeviceMemory;

use crate::device::{Device, ForeignStream, Refused};
use crate::error::DeviceError;
use crate::host::HostDevice;
use crate::kernel::{Addresses, KvCopyArgs};
use crate::layout::{Layout, pool_bytes};
use crate::pool::{ChunkAt, DeviceId, HostMemory, L1Memory, L1Pool, L2Pool};
use crate::shape::KvShape;
use crate::ticket::{Gated, LayerTickets, Ticket};
use crate::transfer::{Copy2d, Direction, Transfer};
use driver::{Context, Function, Module, RawStream, Streams};
use image::{Cache, Image, Origin};
use memory::{Registration, Upload};
use nvrtc::Nvrtc;
use pieces::{HOST_PAGE_BYTES, Piece, pieces};

/// Blocks of a launch: enough to fill a PCIe 5 link, and no more of the device than that.
const BLOCKS: u32 = 2;

/// Threads of a block.
const THREADS: u32 = 1024;

/// Rows from this many bytes on go by copy engine. Published figures for H100 put the break-even between 28 and 64 KiB.
const COPY_ENGINE_FROM_BYTES: u64 = 64 << 10;

/// Fewer short rows than this go by copy engine too: a launch and its page list cost as much.
const KERNEL_FROM_SHORT: usize = 16;

/// Copies from this many a layer on go by kernel, however long their rows: at about 2 microseconds a call, the figure that others have
/// published, the CPU would be slower than the link.
const KERNEL_FROM_COPIES: usize = 64;

/// How loads go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// Whichever is expected to be faster.
    #[default]
    Auto,
    /// By kernel, wherever it can do it.
    Kernel,
    /// By copy engine.
    CopyEngine,
}

/// What a device is opened with.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Which device: its number in the driver's order.
    pub ordinal: u32,
    /// How loads go.
    pub way: Way,
    /// Where cubins are kept from one start to the next.
    pub cubin_cache: Option<PathBuf>,
    /// Largest piece of host memory registered at once, in bytes.
    pub piece_bytes: u64,
}

impl Default for CudaOptions {
    fn default() -> CudaOptions {
        CudaOptions {
            ordinal: 0,
            way: Way::Auto,
            cubin_cache: None,
            piece_bytes: 32 << 30,
        }
    }
}

/// A GPU.
pub struct CudaDevice {
    id: DeviceId,
    name: String,
    way: Way,
    piece_bytes: u64,
    kernel: Option<Kernel>,
    streams: Arc<Streams>,
    /// One transfer is put into the streams at a time, so that they run in the order in which they were given.
    submitting: Mutex<()>,
}

struct Kernel {
    function: Function,
    origin: Origin,
    _module: Module,
}

// SAFETY: a function may be launched from any thread; its module lives as long.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// The GPU where there is one that works; else the host, and why.
///
/// # Errors
/// The host device cannot be made either.
pub fn or_host(
    options: &CudaOptions,
) -> Result<(Arc<dyn Device>, Option<DeviceError>), DeviceError> {
    match CudaDevice::open(options) {
        Ok(device) => Ok((Arc::new(device), None)),
        Err(error) => Ok((Arc::new(HostDevice::new()?), Some(error))),
    }
}

/// What the device knows of an L2 pool.
struct Registered {
    registration: Registration,
    pieces: Vec<Piece>,
}

impl CudaDevice {
    /// Opens a device.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] where there is none; [`DeviceError::Driver`] where it does not work.
    pub fn open(options: &CudaOptions) -> Result<CudaDevice, DeviceError> {
        let context = Context::open(options.ordinal)?;
        let streams = Streams::new(&context)?;
        let kernel = if context.allocates_in_streams()? {
            Kernel::load(&context, options)?
        } else {
            None
        };
        let code = kernel
            .as_ref()
            .map_or("none", |kernel| match kernel.origin {
                Origin::Cached => "cached",
                Origin::Compiled => "compiled",
                Origin::BuiltIn => "built in",
            });
        Ok(CudaDevice {
            id: DeviceId::next(),
            name: format!("{} (kernels: {code})", context.device_name()),
            way: options.way,
            piece_bytes: options.piece_bytes,
            kernel,
            streams,
            submitting: Mutex::new(()),
        })
    }

    fn submit(
        &self,
        direction: Direction,
        transfer: Transfer,
        after: &Ticket,
    ) -> Result<Gated<Transfer>, Refused> {
        let _turn = self.submitting.lock();
        if let Err(error) = self.admit(direction, &transfer, after) {
            return Err(Refused { error, transfer });
        }
        let tickets = self.put(direction, &transfer);
        Ok(Gated::free(transfer).behind(LayerTickets::by_layer(tickets)))
    }

    /// Checks whose pools they are, and has the stream wait.
    fn admit(
        &self,
        direction: Direction,
        transfer: &Transfer,
        after: &Ticket,
    ) -> Result<(), DeviceError> {
        self.streams.context.alive()?;
        if transfer.l1().device() != self.id {
            return Err(DeviceError::ForeignPool);
        }
        if transfer.l2().device() != self.id {
            return Err(DeviceError::NotRegistered);
        }
        let stream = self.streams.of(direction);
        self.order(stream, after).map_err(|error| match error {
            DeviceError::ForeignTicket | DeviceError::Dead(_) | DeviceError::Driver { .. } => error,
            error => DeviceError::After(Arc::new(error)),
        })
    }

    /// Has a stream wait for a ticket.
    fn order(&self, stream: RawStream, ticket: &Ticket) -> Result<(), DeviceError> {
        match ticket.event() {
            Some(event) if event.is_of(&self.streams.context) => {
                self.streams.wait_event(stream, event)
            }
            _ if ticket.poll()? => Ok(()),
            _ => Err(DeviceError::ForeignTicket),
        }
    }

    /// Puts a transfer into its stream: a ticket a layer, or one for all.
    fn put(&self, direction: Direction, transfer: &Transfer) -> Vec<Ticket> {
        let layers = 0..transfer.l1().shape().layers();
        let tickets = match direction {
            Direction::Load => layers.len(),
            Direction::Store => 1,
        };
        let mut done = Vec::with_capacity(tickets);
        let outcome = self.put_layers(direction, transfer, &mut done);
        if let Err(error) = outcome {
            // The device is dead. What it had begun is over before the pages are handed back.
            let _ = self.streams.synchronize(self.streams.of(direction));
            done.resize_with(tickets, || {
                let (promise, ticket) = Ticket::promised();
                promise.settle(Err(error.clone()));
                ticket
            });
        }
        done
    }

    fn put_layers(
        &self,
        direction: Direction,
        transfer: &Transfer,
        done: &mut Vec<Ticket>,
    ) -> Result<(), DeviceError> {
        let stream = self.streams.of(direction);
        let kernel = self.kernel_for(direction, transfer);
        let pairs = match kernel {
            Some(_) => Some(Upload::new(
                &self.streams,
                direction,
                &pair_bytes(transfer),
            )?),
            None => None,
        };
        for layer in 0..transfer.l1().shape().layers() {
            match (kernel, &pairs) {
                (Some(kernel), Some(pairs)) => {
                    self.launch(kernel, direction, transfer, layer, pairs.address)?;
                }
                _ => self.copy(direction, transfer, layer)?,
            }
            if direction == Direction::Load {
                done.push(Ticket::of_event(self.streams.record(stream)?));
            }
        }
        if direction == Direction::Store {
            done.push(Ticket::of_event(self.streams.record(stream)?));
        }
        Ok(())
    }

    /// The kernel, if this transfer is to go by it.
    fn kernel_for(&self, direction: Direction, transfer: &Transfer) -> Option<&Kernel> {
        let kernel = self.kernel.as_ref()?;
        let registered = registered(transfer.l2())?;
        let args = self.arguments(direction, transfer, 0, 0);
        if direction == Direction::Store
            || !registered.registration.same_addresses
            || args.is_none()
        {
            return None;
        }
        let better = match self.way {
            Way::Kernel => true,
            Way::CopyEngine => false,
            Way::Auto => {
                let copies = || transfer.copies(0).take(KERNEL_FROM_COPIES);
                let short = |copy: &Copy2d| copy.rows.width < COPY_ENGINE_FROM_BYTES;
                copies().count() == KERNEL_FROM_COPIES
                    || copies().filter(short).count() >= KERNEL_FROM_SHORT
            }
        };
        better.then_some(kernel)
    }

    fn arguments(
        &self,
        direction: Direction,
        transfer: &Transfer,
        layer: u32,
        pairs: u64,
    ) -> Option<KvCopyArgs> {
        let at = Addresses {
            l1: device_address(transfer.l1())?,
            l2: transfer.l2().start().addr().get() as u64,
            pairs,
        };
        KvCopyArgs::new(transfer, direction, layer..layer + 1, at)
    }

    fn launch(
        &self,
        kernel: &Kernel,
        direction: Direction,
        transfer: &Transfer,
        layer: u32,
        pairs: u64,
    ) -> Result<(), DeviceError> {
        // What held for the first layer holds for all.
        let args = self
            .arguments(direction, transfer, layer, pairs)
            .ok_or(DeviceError::ForeignPool)?;
        let size = (args.grid(BLOCKS, THREADS), THREADS);
        // SAFETY: the kernel takes a `KvCopyArgs`, and this one is of a transfer whose maker vouched for its pages; pools and
        // pages stay until the stream is past it.
        unsafe { self.streams.launch(direction, kernel.function, size, &args) }
    }

    fn copy(
        &self,
        direction: Direction,
        transfer: &Transfer,
        layer: u32,
    ) -> Result<(), DeviceError> {
        let l1 = device_address(transfer.l1()).ok_or(DeviceError::ForeignPool)?;
        let l2 = transfer.l2().start().addr().get() as u64;
        let pieces = &registered(transfer.l2())
            .ok_or(DeviceError::NotRegistered)?
            .pieces;
        let mut outcome = Ok(());
        for copy in transfer.copies(layer) {
            pieces::within(copy, pieces, &mut |copy| {
                if outcome.is_ok() {
                    // SAFETY: the rows of a transfer lie in its pools, and this copy in one piece; whoever made the transfer
                    // vouched for its pages until it is handed back.
                    outcome = unsafe { self.streams.copy(direction, l1, l2, &copy) };
                }
            });
        }
        outcome
    }

    /// The chunk's address, if `bytes` is its size.
    fn chunk(&self, pool: &L1Pool, at: ChunkAt, bytes: usize) -> Result<u64, DeviceError> {
        if pool.device() != self.id {
            return Err(DeviceError::ForeignPool);
        }
        let start = device_address(pool).ok_or(DeviceError::ForeignPool)?;
        Ok(start + pool.chunk_of(at, bytes)?)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Kernels in flight need the module, which goes now; the pools may stay.
        self.streams.drain();
    }
}

impl Kernel {
    /// The best image that the driver takes.
    fn load(context: &Arc<Context>, options: &CudaOptions) -> Result<Option<Kernel>, DeviceError> {
        let arch = context.arch()?;
        let cache = options.cubin_cache.as_ref().map(Cache::new);
        let nvrtc = Nvrtc::find().ok();
        let best = image::best(&arch, nvrtc.as_ref(), cache.as_ref());
        let kernel = Kernel::of(context, &best);
        Ok(kernel.or_else(|| Kernel::of(context, &image::best(&arch, None, None))))
    }

    fn of(context: &Arc<Context>, image: &Image) -> Option<Kernel> {
        let module = Module::load(context, &image.bytes)?;
        Some(Kernel {
            function: module.function("kv_copy")?,
            origin: image.origin,
            _module: module,
        })
    }
}

impl Device for CudaDevice {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn register(
        &self,
        memory: HostMemory,
        layout: Layout,
        shape: &KvShape,
        pages: u32,
    ) -> Result<L2Pool, DeviceError> {
        let start = memory.start().addr().get() as u64;
        if !start.is_multiple_of(HOST_PAGE_BYTES) {
            // The driver would take what else lies on that page for locked, too.
            return Err(DeviceError::NotLockable {
                bytes: memory.bytes(),
                why: format!("it does not begin on a page of {HOST_PAGE_BYTES} bytes"),
            });
        }
        let cut = pieces(start, memory.bytes(), self.piece_bytes);
        let registration = Registration::new(&self.streams, start, &cut)?;
        let registered = Registered {
            registration,
            pieces: cut,
        };
        L2Pool::new(
            self.id,
            memory,
            layout,
            shape,
            pages,
            Some(Box::new(registered)),
        )
    }

    fn alloc_l1(&self, shape: &KvShape, pages: u32) -> Result<L1Pool, DeviceError> {
        let memory = DeviceMemory::zeroed(&self.streams, pool_bytes(shape, pages))?;
        Ok(L1Pool::new(self.id, L1Memory::Device(memory), shape, pages))
    }

    fn load(&self, transfer: Transfer, after: &Ticket) -> Result<Gated<Transfer>, Refused> {
        self.submit(Direction::Load, transfer, after)
    }

    fn store(&self, transfer: Transfer, after: &Ticket) -> Result<Gated<Transfer>, Refused> {
        self.submit(Direction::Store, transfer, after)
    }

    fn record(&self, stream: ForeignStream) -> Result<Ticket, DeviceError> {
        let event = self.streams.record(foreign(stream))?;
        Ok(Ticket::of_event(event))
    }

    fn hold(&self, stream: ForeignStream, ticket: &Ticket) -> Result<(), DeviceError> {
        self.order(foreign(stream), ticket)
    }

    unsafe fn read_l1(
        &self,
        pool: &L1Pool,
        at: ChunkAt,
        into: &mut [u8],
    ) -> Result<(), DeviceError> {
        let chunk = self.chunk(pool, at, into.len())?;
        // SAFETY: the chunk is that long, and the caller keeps it from being written.
        unsafe {
            self.streams
                .copy_now(Direction::Store, chunk, into.as_mut_ptr(), into.len())
        }
    }

    unsafe fn write_l1(&self, pool: &L1Pool, at: ChunkAt, from: &[u8]) -> Result<(), DeviceError> {
        let chunk = self.chunk(pool, at, from.len())?;
        // SAFETY: the chunk is that long, and the caller has it to himself; the host's bytes are only read.
        unsafe {
            self.streams
                .copy_now(Direction::Load, chunk, from.as_ptr().cast_mut(), from.len())
        }
    }
}

fn foreign(stream: ForeignStream) -> RawStream {
    RawStream(stream.address() as *mut _)
}

fn device_address(pool: &L1Pool) -> Option<u64> {
    match pool.memory() {
        L1Memory::Device(memory) => Some(memory.address()),
        L1Memory::Host(_) => None,
    }
}

fn registered(pool: &L2Pool) -> Option<&Registered> {
    pool.registration()?.downcast_ref()
}

/// The pairs as the kernel reads them.
fn pair_bytes(transfer: &Transfer) -> Vec<u8> {
    let bytes = |pair: &crate::PagePair| [pair.l1.to_ne_bytes(), pair.l2.to_ne_bytes()].concat();
    transfer.pairs().iter().flat_map(bytes).collect()
}

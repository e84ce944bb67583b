//! The CUDA device. Uses only the driver library, which is located at run time.
//!
//! ```text
//!   load    [wait: after] [layer 0] (event) [layer 1] (event) ...     high priority
//!   store   [wait: after] [all layers] (event)                        low priority
//! ```
//!
//! Builds without CUDA. If the driver is missing, too old or has no device, [`CudaDevice::open`]
//! returns an error in about a millisecond, and [`HostDevice`] takes its place ([`or_host`]). After
//! a device has failed, it fails all later requests.
//!
//! Stores use the copy engines, which leave the compute units to the forward pass. Loads use the
//! copy engines or one kernel per layer. The cheaper way is chosen by a table that is measured when
//! the device is opened, and cached ([`policy`]).
//!
//! A module imports only the modules below it.
//!
//! | module | owns |
//! |---|---|
//! | `measure` | the policy table |
//! | `options` | the options of a device |
//! | [`policy`] | the choice of the way to copy |
//! | `memory` | pools, page lists, adopted tensors, registered host memory |
//! | `pieces` | registration in pieces, and copies that stay within a piece |
//! | `driver` | calls into the driver: contexts, streams, events, copies, kernels |
//! | `copies` | copies in the forms that the copy engines accept |
//! | [`image`] | the choice of device code |
//! | [`nvrtc`] | the compiler, if it is installed |
//! | [`cache`] | files: code and tables kept between starts |

pub mod cache;
mod copies;
mod driver;
pub mod image;
mod measure;
mod memory;
pub mod nvrtc;
mod options;
mod pieces;
pub mod policy;

use std::ops::Range;
use std::sync::Arc;

use larder_sync::Mutex;

use driver::Event;
pub use options::{Choice, Clock, CudaOptions};

use crate::device::{Device, ForeignStream, Refused};
use crate::error::DeviceError;
use crate::host::HostDevice;
use crate::kernel::KvCopyArgs;
use crate::layout::{Layout, pool_bytes};
use crate::pool::{ChunkAt, DeviceId, HostMemory, L1Pool, L2Pool};
use crate::shape::KvShape;
use crate::tensors::Tensors;
use crate::ticket::{Gated, LayerTickets, Ticket};
use crate::transfer::{Copy2d, Direction, RowCopy, Transfer};
use cache::Cache;
use copies::{Batch, has_batches};
use driver::{Context, Function, Module, RawStream, Streams};
use image::{Image, Origin};
use memory::{Adopted, DeviceMemory, Registration, Upload};
use nvrtc::Nvrtc;
use pieces::{Piece, pieces};
use policy::{Probe, Table, Way, Work};

/// Blocks per launch. More of them, or more threads, load no faster over a PCIe 5 link (H200).
const BLOCKS: u32 = 16;

/// Threads per block: few, because a large block starts only on a processor that has finished
/// almost all other work. On an H200, two blocks of 1024 threads slow busy compute down by 3 to 4 %
/// and these by 1 to 2 %, and the loads beside it are faster.
const THREADS: u32 = 128;

/// Bytes that a launch copies at least, if the transfer has as many: less would leave the link idle
/// between launches. Layers of small transfers share launches, and tickets.
const LAUNCH_BYTES: u64 = 2 << 20;

/// A GPU.
pub struct CudaDevice {
    id: DeviceId,
    name: String,
    choice: Choice,
    /// `None`: the choice uses published figures.
    table: Option<Box<Table>>,
    piece_bytes: u64,
    host_page_bytes: u64,
    kernel: Option<Kernel>,
    takes_batches: bool,
    streams: Arc<Streams>,
    /// Only one transfer of a direction is enqueued at a time, so that transfers run in submission
    /// order. A store that waits for room in its stream does not delay loads.
    submitting: [Mutex<()>; 2],
}

struct Kernel {
    function: Function,
    origin: Origin,
}

/// The GPU, if a working one exists. Otherwise the host device, with the reason.
///
/// # Errors
/// The host device cannot be created either.
pub fn or_host(
    options: &CudaOptions,
) -> Result<(Arc<dyn Device>, Option<DeviceError>), DeviceError> {
    match CudaDevice::open(options) {
        Ok(device) => Ok((Arc::new(device), None)),
        Err(error) => Ok((Arc::new(HostDevice::new()?), Some(error))),
    }
}

/// The registration of an L2 pool with the device.
struct Registered {
    registration: Registration,
    pieces: Vec<Piece>,
}

impl CudaDevice {
    /// Opens a device.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] if there is no device; [`DeviceError::Driver`] if it does not
    /// work.
    pub fn open(options: &CudaOptions) -> Result<CudaDevice, DeviceError> {
        let context = Context::open(options.ordinal)?;
        let streams = Streams::new(&context)?;
        let kernel = if context.allocates_in_streams()? {
            Kernel::load(&streams, options)?
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
        let mut device = CudaDevice {
            id: DeviceId::next(),
            name: format!("{} (kernels: {code})", context.device_name()),
            choice: options.choice,
            table: None,
            piece_bytes: options.piece_bytes,
            host_page_bytes: rustix::param::page_size() as u64,
            kernel,
            takes_batches: has_batches(),
            streams,
            submitting: Default::default(),
        };
        match options.choice {
            Choice::Measured => device.measure(options)?,
            Choice::Published => device.prove_batches()?,
            Choice::Always(_) => {}
        }
        Ok(device)
    }

    /// The policy table. `None` if the choice does not use a table, or if the measurement failed.
    #[must_use]
    pub fn table(&self) -> Option<&Table> {
        self.table.as_deref()
    }

    /// Reads the table from the cache or measures it. A failed measurement is ignored, unless the
    /// device is dead.
    fn measure(&mut self, options: &CudaOptions) -> Result<(), DeviceError> {
        let context = self.streams.context.clone();
        let cache = options.cache.as_ref().map(Cache::new);
        let name = Table::name(&context.uuid()?, context.driver_version()?);
        let kept = cache.as_ref().and_then(|cache| cache.get(&name));
        if let Some(table) = kept.and_then(|bytes| Table::from_bytes(&bytes)) {
            self.takes_batches &= table.has(Probe::Batch);
            self.table = Some(Box::new(table));
            return Ok(());
        }
        self.prove_batches()?;
        match measure::table(self, options.clock) {
            Ok(table) => {
                if let Some(cache) = cache {
                    // A failed cache write only makes the next start slower.
                    let _ = cache.put(&name, &table.to_bytes());
                }
                self.table = Some(Box::new(table));
                Ok(())
            }
            Err(_) => self.still_works(),
        }
    }

    /// Finds out whether the driver accepts batches. Without memory for the test, it counts as one
    /// that does not.
    fn prove_batches(&mut self) -> Result<(), DeviceError> {
        if self.takes_batches {
            let takes = measure::takes_batches(self);
            self.takes_batches = matches!(takes, Ok(true));
            takes.map_or_else(|_| self.still_works(), |_| Ok(()))?;
        }
        Ok(())
    }

    /// Whether the device is alive after an error. The next call shows it.
    fn still_works(&self) -> Result<(), DeviceError> {
        self.streams.synchronize(self.streams.of(Direction::Load))?;
        self.streams.context.alive()
    }

    fn submit(
        &self,
        direction: Direction,
        transfer: Transfer,
        after: &Ticket,
    ) -> Result<Gated<Transfer>, Refused> {
        let _turn = self.submitting[usize::from(direction == Direction::Store)].lock();
        if let Err(error) = self.admit(direction, &transfer, after) {
            return Err(Refused { error, transfer });
        }
        let way = self.way(direction, &transfer);
        let tickets = self.put(direction, &transfer, way);
        Ok(Gated::free(transfer).behind(LayerTickets::by_layer(tickets)))
    }

    /// Checks that the pools belong to this device, and makes the stream wait for `after`.
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

    /// Makes a stream wait for a ticket.
    fn order(&self, stream: RawStream, ticket: &Ticket) -> Result<(), DeviceError> {
        if let Some(members) = ticket.members() {
            let unsettled = members.iter().filter(|member| !member.is_settled());
            return unsettled
                .into_iter()
                .try_for_each(|member| self.order(stream, member));
        }
        match ticket.event::<Event>() {
            Some(event) if event.is_of(&self.streams.context) => {
                self.streams.wait_event(stream, event)
            }
            _ if ticket.poll()? => Ok(()),
            _ => Err(DeviceError::ForeignTicket),
        }
    }

    /// Enqueues a transfer on its stream. Returns one ticket per layer of a load, or one ticket for
    /// a store.
    fn put(&self, direction: Direction, transfer: &Transfer, way: Way) -> Vec<Ticket> {
        self.put_often(direction, transfer, way, 1)
    }

    /// Enqueues the layers of a transfer `times` times, one after the other. Returns the tickets of
    /// all of them.
    fn put_often(
        &self,
        direction: Direction,
        transfer: &Transfer,
        way: Way,
        times: usize,
    ) -> Vec<Ticket> {
        let tickets = match direction {
            Direction::Load => transfer.layers().len() * times,
            Direction::Store => 1,
        };
        let mut done = Vec::with_capacity(tickets);
        let outcome = self.put_layers(direction, transfer, way, times, &mut done);
        if let Err(error) = outcome {
            // The pages are handed back once the work already enqueued has ended.
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
        way: Way,
        times: usize,
        done: &mut Vec<Ticket>,
    ) -> Result<(), DeviceError> {
        let stream = self.streams.of(direction);
        let kernel = match (way, &self.kernel) {
            (Way::Kernel, Some(kernel)) => {
                // Without memory for the pairs, the copy engines do the work.
                let pairs = Upload::new(&self.streams, direction, transfer.pairs())?;
                pairs.map(|pairs| (kernel, pairs))
            }
            _ => None,
        };
        let together = kernel.as_ref().map_or(1, |_| together(transfer));
        for layers in std::iter::repeat_n(runs(transfer, together), times).flatten() {
            match (&kernel, way) {
                (Some((kernel, pairs)), _) => {
                    self.launch(kernel, direction, transfer, &layers, pairs.address)?;
                }
                (None, Way::Copies) => self.copy(direction, transfer, layers.start)?,
                (None, _) if self.takes_batches => {
                    self.copy_batch(direction, transfer, layers.start)?;
                }
                (None, _) => self.copy(direction, transfer, layers.start)?,
            }
            if direction == Direction::Load {
                let ticket = Ticket::of_event(self.streams.record(stream)?);
                done.extend(layers.map(|_| ticket.clone()));
            }
        }
        if direction == Direction::Store {
            done.push(Ticket::of_event(self.streams.record(stream)?));
        }
        Ok(())
    }

    /// The way chosen for this transfer.
    fn way(&self, direction: Direction, transfer: &Transfer) -> Way {
        let work = Work::of(transfer);
        let Range { start, end } = transfer.layers();
        let layers = end - start;
        let has_kernel = self.can(Way::Kernel, direction, transfer);
        let can = |way| {
            self.can(way, direction, transfer) && !(has_kernel && work.crowds_stream(way, layers))
        };
        match (self.choice, &self.table) {
            (Choice::Always(way), _) if self.can(way, direction, transfer) => way,
            (Choice::Always(_), _) => Way::Copies,
            (Choice::Measured, Some(table)) => table.choose(direction, &work, can),
            _ => policy::published(direction, &work, can),
        }
    }

    /// Whether this way is available for this transfer.
    fn can(&self, way: Way, direction: Direction, transfer: &Transfer) -> bool {
        match way {
            Way::Copies => true,
            Way::Batch => self.takes_batches,
            Way::Kernel => {
                let reaches = |pool: &Registered| pool.registration.same_addresses;
                direction == Direction::Load
                    && self.kernel.is_some()
                    && registered(transfer.l2()).is_some_and(reaches)
                    && KvCopyArgs::new(transfer, direction, first(transfer, 1), 0).is_some()
            }
        }
    }

    fn launch(
        &self,
        kernel: &Kernel,
        direction: Direction,
        transfer: &Transfer,
        layers: &Range<u32>,
        pairs: u64,
    ) -> Result<(), DeviceError> {
        let args = KvCopyArgs::new(transfer, direction, layers.clone(), pairs)
            .ok_or(DeviceError::ForeignPool)?;
        let size = (args.grid(BLOCKS, THREADS), THREADS);
        // SAFETY: the kernel takes a `KvCopyArgs`. This one describes a transfer whose creator
        // guarantees exclusive access to its pages. Pools and pages stay valid until the stream has
        // passed the kernel.
        unsafe { self.streams.launch(direction, kernel.function, size, &args) }
    }

    fn copy(
        &self,
        direction: Direction,
        transfer: &Transfer,
        layer: u32,
    ) -> Result<(), DeviceError> {
        let l2 = transfer.l2().address();
        let mut outcome = Ok(());
        copies(transfer, layer, &mut |copy| {
            if outcome.is_ok() {
                // SAFETY: the rows of a transfer lie in its pools, and this copy lies in one piece.
                // The creator of the transfer guarantees exclusive access to its pages until it is
                // handed back.
                outcome = unsafe { self.streams.copy(direction, l2, &copy) };
            }
        })?;
        outcome
    }

    fn copy_batch(
        &self,
        direction: Direction,
        transfer: &Transfer,
        layer: u32,
    ) -> Result<(), DeviceError> {
        let mut batch = batch(direction, transfer, layer)?;
        // SAFETY: see `copy`.
        unsafe { self.streams.copy_batch(direction, &mut batch) }
    }

    /// Whether the driver accepts the first layer as a batch. Waits for the copy.
    fn try_batch(&self, direction: Direction, transfer: &Transfer) -> Result<bool, DeviceError> {
        let mut batch = batch(direction, transfer, transfer.layers().start)?;
        // SAFETY: see `copy`.
        let taken = unsafe { self.streams.try_batch(direction, &mut batch) };
        self.streams.synchronize(self.streams.of(direction))?;
        Ok(taken)
    }

    /// Page-locks host memory, or looks up how its owner has locked it.
    fn lock(&self, memory: &HostMemory) -> Result<Registered, DeviceError> {
        let (start, bytes) = (memory.start().addr().get() as u64, memory.bytes());
        if memory.is_locked() {
            let (registration, pieces) = Registration::found(&self.streams, start, bytes)?;
            return Ok(Registered {
                registration,
                pieces,
            });
        }
        let page = self.host_page_bytes;
        if !start.is_multiple_of(page) {
            // The driver would also lock the other data on this page.
            return Err(DeviceError::NotLockable {
                bytes,
                why: format!("it does not begin on a page of {page} bytes"),
            });
        }
        let pieces = pieces(start, bytes, self.piece_bytes, page);
        Ok(Registered {
            registration: Registration::new(&self.streams, start, &pieces)?,
            pieces,
        })
    }

    /// The address of the chunk. Fails if `bytes` is not its size.
    fn chunk(&self, pool: &L1Pool, at: ChunkAt, bytes: usize) -> Result<u64, DeviceError> {
        if pool.device() != self.id {
            return Err(DeviceError::ForeignPool);
        }
        pool.chunk_of(at, bytes)
    }
}

/// The number of layers of a transfer that a launch copies.
fn together(transfer: &Transfer) -> u32 {
    let layers = transfer.layers();
    let layer_bytes = transfer.bytes() / layers.len() as u64;
    let wanted = LAUNCH_BYTES.div_ceil(layer_bytes.max(1));
    let wanted = u32::try_from(wanted).unwrap_or(u32::MAX);
    let together = wanted.min(layers.end - layers.start);
    // If all layers are evenly spaced and the first of them fit a launch, so does each run.
    let are_even = transfer.l1().strides(&layers).is_some();
    let args = KvCopyArgs::new(transfer, Direction::Load, first(transfer, together), 0);
    let fit = args.is_some();
    if are_even && fit { together } else { 1 }
}

/// The first layers of a transfer.
fn first(transfer: &Transfer, layers: u32) -> Range<u32> {
    let first = transfer.layers().start;
    first..first + layers
}

/// The layers of a transfer, so many at a time.
fn runs(transfer: &Transfer, together: u32) -> impl Iterator<Item = Range<u32>> + Clone {
    let layers = transfer.layers();
    let end = layers.end;
    layers
        .step_by(together as usize)
        .map(move |first| first..first.saturating_add(together).min(end))
}

impl Kernel {
    /// The best image that the driver accepts.
    fn load(streams: &Streams, options: &CudaOptions) -> Result<Option<Kernel>, DeviceError> {
        let arch = streams.context.arch()?;
        let cache = options.cache.as_ref().map(Cache::new);
        let nvrtc = Nvrtc::find().ok();
        let best = image::best(&arch, nvrtc.as_ref(), cache.as_ref());
        let kernel = Kernel::of(streams, &best);
        Ok(kernel.or_else(|| Kernel::of(streams, &image::best(&arch, None, None))))
    }

    fn of(streams: &Streams, image: &Image) -> Option<Kernel> {
        let module = Module::load(&streams.context, &image.bytes)?;
        let function = module.function("kv_copy")?;
        streams.module.set(module).ok()?;
        Some(Kernel {
            function,
            origin: image.origin,
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
        let registered = self.lock(&memory)?;
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
        let start = memory.address();
        let memory = Box::new(memory);
        Ok(L1Pool::in_one_piece(self.id, memory, start, shape, pages))
    }

    fn adopt_l1(
        &self,
        tensors: Tensors,
        shape: &KvShape,
        pages: u32,
    ) -> Result<L1Pool, DeviceError> {
        let bases = tensors.bases(shape, pages)?;
        let memory = Box::new(Adopted::new(&self.streams, tensors, shape)?);
        Ok(L1Pool::at(self.id, memory, bases, shape, pages))
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

    fn has_streams(&self) -> bool {
        true
    }

    unsafe fn copy_rows(
        &self,
        pool: &L1Pool,
        rows: RowCopy,
        stream: Option<ForeignStream>,
    ) -> Result<Ticket, DeviceError> {
        let stream = foreign(stream.ok_or(DeviceError::StreamNeeded)?);
        if pool.device() != self.id {
            return Err(DeviceError::ForeignPool);
        }
        let (bytes, mut pieces) = rows.pieces(pool)?;
        let copied = pieces.try_for_each(|(from, to)| {
            // SAFETY: the rows of two different pages of the pool. The caller ensures that nothing
            // outside the stream writes the source or touches the destination.
            unsafe { self.streams.copy_within(stream, from, to, bytes) }
        });
        copied
            .and_then(|()| self.streams.record(stream))
            .map(Ticket::of_event)
            .inspect_err(|_| {
                // The pages are used again after the copies that have begun.
                let _ = self.streams.synchronize(stream);
            })
    }

    unsafe fn read_l1(
        &self,
        pool: &L1Pool,
        at: ChunkAt,
        into: &mut [u8],
    ) -> Result<(), DeviceError> {
        let chunk = self.chunk(pool, at, into.len())?;
        // SAFETY: the chunk has this length, and the caller ensures that it is not written.
        unsafe {
            self.streams
                .copy_now(Direction::Store, chunk, into.as_mut_ptr(), into.len())
        }
    }

    unsafe fn write_l1(&self, pool: &L1Pool, at: ChunkAt, from: &[u8]) -> Result<(), DeviceError> {
        let chunk = self.chunk(pool, at, from.len())?;
        // SAFETY: the chunk has this length, and the caller has exclusive access to it. The host
        // bytes are only read.
        unsafe {
            self.streams
                .copy_now(Direction::Load, chunk, from.as_ptr().cast_mut(), from.len())
        }
    }
}

fn foreign(stream: ForeignStream) -> RawStream {
    RawStream(stream.address() as *mut _)
}

fn registered(pool: &L2Pool) -> Option<&Registered> {
    pool.registration()?.downcast_ref()
}

/// The copies of a layer, each within one piece of the host memory.
fn copies(
    transfer: &Transfer,
    layer: u32,
    each: &mut impl FnMut(Copy2d),
) -> Result<(), DeviceError> {
    let registered = registered(transfer.l2()).ok_or(DeviceError::NotRegistered)?;
    for copy in transfer.copies(layer) {
        pieces::within(copy, &registered.pieces, each);
    }
    Ok(())
}

/// The rows of a layer, each within one piece of the host memory.
fn batch(direction: Direction, transfer: &Transfer, layer: u32) -> Result<Batch, DeviceError> {
    let l2 = transfer.l2().address();
    let mut batch = Batch::default();
    copies(transfer, layer, &mut |copy| {
        for row in 0..copy.rows.count {
            let l1 = copy.l1 + row * copy.rows.l1_pitch;
            let l2 = l2 + copy.l2 + row * copy.rows.l2_pitch;
            batch.push(direction, l1, l2, copy.rows.width);
        }
    })?;
    Ok(batch)
}

//! The Rust side of `larder_kv.device`: an engine's tensors as an L1 pool, an L2 pool, and copies
//! between them.
//!
//! `larder/device.py` reads tensors and has no state of its own. This module and `larder-kernels`
//! check addresses, sizes and pages. Unlike the storage backend, this module raises: [`Failed`],
//! [`Unavailable`] and [`Busy`] for errors of a device, `ValueError` for invalid arguments.
//!
//! Invariants: a pool holds the tensors of its memory, and a copy holds both pools and the device,
//! so memory is freed only when no copy in flight touches it. Waits, copies and drops run
//! without the interpreter lock.

#![expect(
    clippy::needless_pass_by_value,
    reason = "arguments are converted from Python objects per call, and errors into other errors"
)]

use std::mem::ManuallyDrop;
use std::num::NonZeroUsize;
use std::ops::Deref;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;

use larder_base::system::pages::PageSizes;
use larder_kernels::cuda::or_host;
use larder_kernels::{
    Attention, CudaDevice, CudaOptions, Device as Inner, DeviceError, Direction, ForeignStream,
    Gated, HostDevice, HostMemory, KvShape, L1Pool, L2Pool, LayerTickets, PagePair, Refused,
    Tensor, Tensors, Ticket, Transfer, pool_bytes,
};
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use rustix::mm::{MsyncFlags, msync};

create_exception!(
    larder_kv._larder,
    Failed,
    PyRuntimeError,
    "A device failed."
);
create_exception!(
    larder_kv._larder,
    Unavailable,
    Failed,
    "There is no such device."
);
create_exception!(larder_kv._larder, Busy, Failed, "Too much is in flight.");

fn raised(error: DeviceError) -> PyErr {
    let said = error.to_string();
    match error {
        DeviceError::Unavailable { .. } => Unavailable::new_err(said),
        DeviceError::Busy { .. } => Busy::new_err(said),
        DeviceError::Tensors(_)
        | DeviceError::PoolsOverlap
        | DeviceError::MemoryTooSmall { .. }
        | DeviceError::ShapesDiffer
        | DeviceError::NoSuchPage { .. }
        | DeviceError::PageTwice { .. }
        | DeviceError::NoSuchLayer { .. }
        | DeviceError::ForeignPool
        | DeviceError::NotRegistered
        | DeviceError::NoStreams
        | DeviceError::Stream { .. }
        | DeviceError::Capturing => PyValueError::new_err(said),
        _ => Failed::new_err(said),
    }
}

/// A value whose drop waits for copies. Python drops objects with the interpreter lock, which
/// another thread may need before the copies can end.
struct Detached<T: Send>(ManuallyDrop<T>);

impl<T: Send> Detached<T> {
    fn new(value: T) -> Detached<T> {
        Detached(ManuallyDrop::new(value))
    }
}

impl<T: Send> Deref for Detached<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Send> Drop for Detached<T> {
    fn drop(&mut self) {
        // SAFETY: taken once, here, and not used afterwards.
        let mut value = Some(unsafe { ManuallyDrop::take(&mut self.0) });
        // Without an interpreter, the value is dropped at the end of this function.
        let _ = Python::try_attach(|py| py.detach(|| drop(value.take())));
    }
}

/// A device that holds L1 and copies.
#[pyclass(frozen, module = "larder_kv._larder")]
pub struct Device {
    inner: Detached<Arc<dyn Inner>>,
    is_host: bool,
    why_host: Option<String>,
}

/// An engine's tensors as an L1 pool.
#[pyclass(frozen, module = "larder_kv._larder")]
pub struct DevicePool(Detached<OnDevice<L1Pool>>);

/// A value of a device.
struct OnDevice<T> {
    /// Dropped before the device.
    value: T,
    device: Arc<dyn Inner>,
}

/// An L2 pool.
#[pyclass(frozen, module = "larder_kv._larder")]
pub struct HostPool(Detached<L2Pool>);

/// A copy, possibly in flight.
#[pyclass(frozen, module = "larder_kv._larder")]
pub struct Copying {
    moving: Detached<OnDevice<Gated<Transfer>>>,
    layers: u32,
}

#[pymethods]
impl Device {
    /// `host`, `cuda`, or `auto`: CUDA if it works, otherwise the host.
    #[new]
    fn new(py: Python<'_>, kind: &str, ordinal: u32, cache: Option<PathBuf>) -> PyResult<Device> {
        let options = CudaOptions {
            ordinal,
            cache,
            ..CudaOptions::default()
        };
        let opened = py.detach(|| match kind {
            "host" => Ok((Arc::new(HostDevice::new()?) as Arc<dyn Inner>, true, None)),
            "cuda" => Ok((
                Arc::new(CudaDevice::open(&options)?) as Arc<dyn Inner>,
                false,
                None,
            )),
            _ => or_host(&options).map(|(device, why)| (device, why.is_some(), why)),
        });
        let (inner, is_host, why) = opened.map_err(raised)?;
        Ok(Device {
            inner: Detached::new(inner),
            is_host,
            why_host: why.map(|why| why.to_string()),
        })
    }

    #[getter]
    fn name(&self) -> String {
        self.inner.name()
    }

    #[getter]
    fn is_host(&self) -> bool {
        self.is_host
    }

    /// Why `auto` selected the host.
    #[getter]
    fn why_host(&self) -> Option<String> {
        self.why_host.clone()
    }

    /// A pool of `pages` pages in tensors, each (address, bytes): K of all layers, then V of all
    /// layers, or one part. `owner` keeps them alive.
    #[expect(clippy::too_many_arguments, reason = "a call of Python's")]
    fn pool(
        &self,
        py: Python<'_>,
        parts: u32,
        row_bytes: u32,
        page_tokens: u32,
        pages: u32,
        tensors: Vec<(u64, u64)>,
        owner: Py<PyAny>,
    ) -> PyResult<DevicePool> {
        let attention = match parts {
            1 => Attention::Mla,
            _ => Attention::Mha,
        };
        let layers = u32::try_from(tensors.len()).unwrap_or(u32::MAX) / parts.max(1);
        let shape = KvShape::of_rows(attention, layers, row_bytes, page_tokens)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        if self.is_host {
            for &(address, bytes) in &tensors {
                mapped(address, bytes)?;
            }
        }
        let tensors = tensors
            .into_iter()
            .map(|(address, bytes)| Tensor { address, bytes });
        // SAFETY: `larder_kv.device` received them as tensors that live as long as their owner, and
        // its interface requires that their pages are not touched while they are copied.
        let tensors = unsafe { Tensors::new(tensors.collect(), Box::new(owner)) };
        let pool = py.detach(|| self.inner.adopt_l1(tensors, &shape, pages));
        Ok(DevicePool(Detached::new(OnDevice {
            value: pool.map_err(raised)?,
            device: Arc::clone(&self.inner),
        })))
    }
}

#[pymethods]
impl DevicePool {
    #[getter]
    fn pages(&self) -> u32 {
        self.0.value.pages()
    }

    #[getter]
    fn layers(&self) -> u32 {
        self.0.value.shape().layers()
    }

    #[getter]
    fn page_bytes(&self) -> u32 {
        self.0.value.shape().page_bytes()
    }

    /// An L2 pool of the same shape, in its own memory or in a buffer (address, bytes) that `owner`
    /// keeps alive. `is_locked`: the owner has page-locked the buffer.
    fn host_pool(
        &self,
        py: Python<'_>,
        layout: &str,
        pages: u32,
        buffer: Option<(usize, usize)>,
        is_locked: bool,
        owner: Py<PyAny>,
    ) -> PyResult<HostPool> {
        let layout = layout
            .parse()
            .map_err(|error: larder_kernels::NoSuchLayout| {
                PyValueError::new_err(error.to_string())
            })?;
        let shape = self.0.value.shape();
        let memory = match buffer {
            None => py
                .detach(|| HostMemory::zeroed(pool_bytes(shape, pages)))
                .map_err(raised)?,
            Some((address, bytes)) => self.buffer(address, bytes, is_locked, owner)?,
        };
        let pool = py.detach(|| self.0.device.register(memory, layout, shape, pages));
        Ok(HostPool(Detached::new(pool.map_err(raised)?)))
    }

    /// Copies L2 to L1, after all work enqueued on `stream` so far and after the last layer of
    /// `copying`.
    fn load(
        &self,
        py: Python<'_>,
        host: &HostPool,
        host_pages: Vec<u32>,
        device_pages: Vec<u32>,
        stream: Option<usize>,
        copying: Option<&Copying>,
    ) -> PyResult<Copying> {
        let pairs = pairs(&device_pages, &host_pages)?;
        py.detach(|| self.submit(Direction::Load, host, pairs, stream, copying))
            .map_err(raised)
    }

    /// Copies L1 to L2, in the same order.
    fn store(
        &self,
        py: Python<'_>,
        host: &HostPool,
        host_pages: Vec<u32>,
        device_pages: Vec<u32>,
        stream: Option<usize>,
        copying: Option<&Copying>,
    ) -> PyResult<Copying> {
        let pairs = pairs(&device_pages, &host_pages)?;
        py.detach(|| self.submit(Direction::Store, host, pairs, stream, copying))
            .map_err(raised)
    }
}

impl DevicePool {
    fn buffer(
        &self,
        address: usize,
        bytes: usize,
        is_locked: bool,
        owner: Py<PyAny>,
    ) -> PyResult<HostMemory> {
        mapped(address as u64, bytes as u64)?;
        let start = NonZeroUsize::new(address).map(NonNull::with_exposed_provenance);
        let start = start.ok_or_else(|| PyValueError::new_err("the buffer is not in memory"))?;
        // SAFETY: `larder_kv.device` received it as a buffer that lives as long as its owner, and
        // its interface requires that its pages are not touched while they are copied.
        let memory = unsafe { HostMemory::new(start, bytes, Box::new(owner)) };
        Ok(if is_locked {
            memory.locked_by_its_owner()
        } else {
            memory
        })
    }

    fn submit(
        &self,
        direction: Direction,
        host: &HostPool,
        pairs: Vec<PagePair>,
        stream: Option<usize>,
        copying: Option<&Copying>,
    ) -> Result<Copying, DeviceError> {
        let after = match (stream, copying) {
            (Some(stream), _) => self.0.device.record(foreign(stream))?,
            (None, Some(copying)) => copying.ticket(None),
            (None, None) => Ticket::done(),
        };
        // SAFETY: the interface of `larder_kv.device` requires that the pages of a copy are not
        // touched until its tickets have settled.
        let transfer = unsafe { Transfer::new(&self.0.value, &host.0, pairs) }?;
        let moving = match direction {
            Direction::Load => self.0.device.load(transfer, &after),
            Direction::Store => self.0.device.store(transfer, &after),
        };
        Ok(Copying {
            moving: Detached::new(OnDevice {
                value: moving.map_err(|refused: Refused| refused.error)?,
                device: self.0.device.clone(),
            }),
            layers: self.0.value.shape().layers(),
        })
    }
}

#[pymethods]
impl HostPool {
    #[getter]
    fn pages(&self) -> u32 {
        self.0.pages()
    }

    #[getter]
    fn layout(&self) -> &'static str {
        self.0.layout().name()
    }

    /// The address of the first byte.
    #[getter]
    fn address(&self) -> usize {
        self.0.start().as_ptr().expose_provenance()
    }
}

#[pymethods]
impl Copying {
    #[getter]
    fn layers(&self) -> u32 {
        self.layers
    }

    /// Whether a layer has been copied; without an argument, all layers.
    fn done(&self, py: Python<'_>, layer: Option<u32>) -> PyResult<bool> {
        self.exists(layer)?;
        let outcome = || self.moving.value.gates().first().map(LayerTickets::outcome);
        let done = py.detach(|| match layer {
            Some(_) => self.ticket(layer).poll(),
            None => match outcome() {
                Some(None) => Ok(false),
                Some(Some(outcome)) => outcome.map(|()| true),
                None => Ok(true),
            },
        });
        done.map_err(raised)
    }

    /// Waits until a layer has been copied; without an argument, all layers.
    fn wait(&self, py: Python<'_>, layer: Option<u32>) -> PyResult<()> {
        self.exists(layer)?;
        let layers = layer.map_or(0..self.layers, |layer| layer..layer + 1);
        py.detach(|| {
            // Waits for all layers, even if one fails.
            let mut outcome = Ok(());
            for layer in layers {
                let one = self.ticket(Some(layer)).wait();
                outcome = outcome.and(one);
            }
            outcome
        })
        .map_err(raised)
    }

    /// Makes all later work of a stream wait for a layer; without an argument, for all layers.
    fn hold(&self, py: Python<'_>, stream: usize, layer: Option<u32>) -> PyResult<()> {
        self.exists(layer)?;
        let ticket = self.ticket(layer);
        py.detach(|| self.moving.device.hold(foreign(stream), &ticket))
            .map_err(raised)
    }
}

impl Copying {
    /// The ticket of a layer, or of the last one: layers are copied in order.
    fn ticket(&self, layer: Option<u32>) -> Ticket {
        let layer = layer.unwrap_or(self.layers - 1);
        let tickets = self.moving.value.gates().first();
        tickets.map_or_else(Ticket::done, |tickets| tickets.layer(layer))
    }

    fn exists(&self, layer: Option<u32>) -> PyResult<()> {
        match layer {
            Some(layer) if layer >= self.layers => Err(PyValueError::new_err(format!(
                "there are {} layers, there is no layer {layer}",
                self.layers
            ))),
            _ => Ok(()),
        }
    }
}

fn foreign(stream: usize) -> ForeignStream {
    // SAFETY: `larder_kv.device` received it as a stream of the device's primary context, which
    // exists until it is empty.
    unsafe { ForeignStream::new(stream) }
}

fn pairs(l1: &[u32], l2: &[u32]) -> PyResult<Vec<PagePair>> {
    if l1.len() != l2.len() {
        return Err(PyValueError::new_err(format!(
            "{} pages of the device, {} of the host: each has one of the other",
            l1.len(),
            l2.len()
        )));
    }
    let pairs = std::iter::zip(l1, l2).map(|(&l1, &l2)| PagePair { l1, l2 });
    Ok(pairs.collect())
}

/// Checks that a range is mapped in this process. Confused numbers then cause an error and not a
/// signal.
fn mapped(address: u64, bytes: u64) -> PyResult<()> {
    let length = usize::try_from(bytes).unwrap_or(isize::MAX as usize);
    let (start, whole) = PageSizes::here().around(address as usize, length);
    let start = std::ptr::without_provenance_mut(start);
    // SAFETY: an asynchronous `msync` writes nothing and only checks the mapping.
    let found = unsafe { msync(start, whole, MsyncFlags::ASYNC) };
    found.map_err(|_| {
        PyValueError::new_err(format!(
            "there are no {bytes} bytes of memory at {address:#x}: \
             they were freed, or never allocated"
        ))
    })
}

/// Adds the classes and exceptions to the module.
pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Device>()?;
    module.add_class::<DevicePool>()?;
    module.add_class::<HostPool>()?;
    module.add_class::<Copying>()?;
    module.add("DeviceError", module.py().get_type::<Failed>())?;
    module.add("Unavailable", module.py().get_type::<Unavailable>())?;
    module.add("Busy", module.py().get_type::<Busy>())
}

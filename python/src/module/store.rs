//! The classes of `larder_kv.store`: [`Store`], [`Namespace`], [`Region`].
//!
//! Every call that can wait for the device or another process runs without the interpreter lock. A
//! page call answers a status a page and never raises for faults of the store. Wrong arguments
//! raise `ValueError` or `TypeError`; calls without statuses raise [`StoreError`].

mod configured;
pub mod queue;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use larder_engine::{Count, Part, PutOptions};
use larder_format::PageKey;
use larder_handle::chain::Chain;
use larder_handle::identity::Identity;
use larder_handle::place::{Misfit, PlaceError};
use larder_handle::region::{Region as Memory, part_starts, slices, slices_mut};
use larder_handle::store::queue::Limits;
use larder_handle::store::{Handle, Space};
use larder_store::inventory::Cursor;
use larder_tools::policy::Policy;
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyTuple, PyType};

use super::buffers::{self, Pages};
use super::hints::{HintFields, hinted, pin_end};
use configured::configured;
use queue::Queue;

create_exception!(
    larder_kv._larder,
    StoreError,
    PyRuntimeError,
    "The store cannot be opened or used. The message says what, where, and what to do."
);

/// The named tuples of `larder_kv.store`.
static EVICTIONS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static LISTING: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static USAGE: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// Raises an error of the store.
pub(super) fn raised(error: impl std::fmt::Display) -> PyErr {
    StoreError::new_err(error.to_string())
}

/// The moment after so many seconds.
pub(super) fn moment(timeout: Option<f64>) -> PyResult<Option<Instant>> {
    Ok(buffers::seconds(timeout)?.map(|wait| Instant::now() + wait))
}

/// Where the pages of a put stand, if they are a chain.
pub(super) fn position(
    before: Option<&Bound<'_, PyAny>>,
    depth: u32,
    is_chain: bool,
) -> PyResult<Option<Chain>> {
    let before = before.map(buffers::key).transpose()?;
    match (is_chain, before, depth) {
        (true, before, depth) => Ok(Some(Chain { before, depth })),
        (false, None, 0) => Ok(None),
        (false, ..) => Err(PyValueError::new_err(
            "pages that are no chain have neither `before` nor `depth`",
        )),
    }
}

/// Pages kept on NVMe.
#[pyclass(frozen, module = "larder_kv.store")]
pub struct Store {
    pub(super) handle: Arc<Handle>,
}

/// The pages of a model and layout.
#[pyclass(frozen, module = "larder_kv.store")]
pub struct Namespace {
    pub(super) space: Arc<Space>,
    store: Py<Store>,
}

/// Memory whose pages are named by row.
#[pyclass(frozen, module = "larder_kv.store")]
pub struct Region {
    pub(super) memory: Arc<Memory>,
    described: String,
}

/// Opens a store. A store without room for a page of `fitting` bytes is refused.
fn opened(
    py: Python<'_>,
    fitting: Option<u64>,
    open: impl FnOnce() -> Result<Handle, PlaceError> + Send,
) -> PyResult<Store> {
    crate::log::begin(py)?;
    let opened = py.detach(|| match (open()?, fitting) {
        (handle, Some(page_bytes)) => handle.suiting(page_bytes),
        (handle, None) => Ok(handle),
    });
    let handle = Arc::new(opened.map_err(raised)?);
    for remark in handle.remarks() {
        tracing::warn!("a remark on the store: {remark}");
    }
    Ok(Store { handle })
}

#[pymethods]
impl Store {
    #[staticmethod]
    #[pyo3(signature = (path, *, size=None, page_bytes=None, must_fit=true, create=true,
        sync="interval", lease=10.0, hang_limit=10.0, prewrite=false, codec="auto",
        disk="auto",
        policy=Policy::default().word(), write_budget="off", l4=None,
        key_file=None, key_command=None, key_credential=false))]
    #[expect(clippy::too_many_arguments, reason = "a call of Python's")]
    fn attach(
        py: Python<'_>,
        path: PathBuf,
        size: Option<&Bound<'_, PyAny>>,
        page_bytes: Option<u64>,
        must_fit: bool,
        create: bool,
        sync: &str,
        lease: f64,
        hang_limit: f64,
        prewrite: bool,
        codec: &str,
        disk: &str,
        policy: &str,
        write_budget: &str,
        l4: Option<&Bound<'_, PyAny>>,
        key_file: Option<PathBuf>,
        key_command: Option<String>,
        key_credential: bool,
    ) -> PyResult<Store> {
        let config = configured(
            path,
            size,
            sync,
            lease,
            hang_limit,
            prewrite,
            codec,
            disk,
            policy,
            write_budget,
            l4,
            (key_file, key_command, key_credential),
        )?;
        let fitting = page_bytes.filter(|_| must_fit);
        opened(py, fitting, || Handle::attach(&config, page_bytes, create))
    }

    #[staticmethod]
    #[pyo3(signature = (path, *, size=None, page_bytes=None, must_fit=true, create=true,
        read_only=false, sync="interval", lease=10.0, hang_limit=10.0, prewrite=false, codec="auto",
        disk="auto",
        policy=Policy::default().word(), write_budget="off", l4=None,
        key_file=None, key_command=None, key_credential=false))]
    #[expect(clippy::too_many_arguments, reason = "a call of Python's")]
    fn open(
        py: Python<'_>,
        path: PathBuf,
        size: Option<&Bound<'_, PyAny>>,
        page_bytes: Option<u64>,
        must_fit: bool,
        create: bool,
        read_only: bool,
        sync: &str,
        lease: f64,
        hang_limit: f64,
        prewrite: bool,
        codec: &str,
        disk: &str,
        policy: &str,
        write_budget: &str,
        l4: Option<&Bound<'_, PyAny>>,
        key_file: Option<PathBuf>,
        key_command: Option<String>,
        key_credential: bool,
    ) -> PyResult<Store> {
        let config = configured(
            path,
            size,
            sync,
            lease,
            hang_limit,
            prewrite,
            codec,
            disk,
            policy,
            write_budget,
            l4,
            (key_file, key_command, key_credential),
        )?;
        let fitting = page_bytes.filter(|_| must_fit);
        opened(py, fitting, || {
            Handle::open(&config, page_bytes, create, read_only)
        })
    }

    #[pyo3(signature = (*, model, weights, dtype, layout, page_tokens, parts, tp=(0, 1),
        pp=(0, 1), cp=(0, 1), pool="kv".to_owned(), extra=BTreeMap::new()))]
    #[expect(clippy::too_many_arguments, reason = "a call of Python's")]
    fn namespace(
        slf: &Bound<'_, Self>,
        model: String,
        weights: String,
        dtype: String,
        layout: String,
        page_tokens: u32,
        parts: Vec<u32>,
        tp: (u32, u32),
        pp: (u32, u32),
        cp: (u32, u32),
        pool: String,
        extra: BTreeMap<String, String>,
    ) -> PyResult<Namespace> {
        let record = Identity {
            model,
            weights,
            dtype,
            layout,
            page_tokens,
            parts,
            tp,
            pp,
            cp,
            pool,
            extra,
        };
        let record = record.record();
        let record = record.map_err(|error| PyValueError::new_err(error.to_string()))?;
        let handle = slf.get().handle.clone();
        let space = slf.py().detach(|| handle.space(record)).map_err(raised)?;
        Ok(Namespace {
            space: Arc::new(space),
            store: slf.clone().unbind(),
        })
    }

    #[pyo3(signature = (address, length, stride, *, owner=None, pinned=false))]
    fn register(
        &self,
        py: Python<'_>,
        address: usize,
        length: usize,
        stride: usize,
        owner: Option<Py<PyAny>>,
        pinned: bool,
    ) -> PyResult<Region> {
        self.handle.refuse_closed().map_err(raised)?;
        let owner = owner.map(|owner| Box::new(owner) as Box<_>);
        // SAFETY: the caller of Python gives memory that stays mapped while the region exists.
        let memory = unsafe { Memory::new(address, length, stride, owner) };
        let memory = memory.map_err(|error| PyValueError::new_err(error.to_string()))?;
        let described = match pinned {
            // SAFETY: with `pinned` it stays mapped for the rest of the process.
            true => py.detach(|| unsafe { self.handle.register(address, length) }),
            false => "not registered: `pinned` is false".to_owned(),
        };
        Ok(Region {
            memory: Arc::new(memory),
            described,
        })
    }

    #[pyo3(signature = (*, threads=2, jobs=1024, bytes=None))]
    fn queue(&self, threads: usize, jobs: usize, bytes: Option<usize>) -> PyResult<Queue> {
        self.handle.refuse_closed().map_err(raised)?;
        if threads == 0 || threads > 64 || jobs == 0 {
            return Err(PyValueError::new_err(
                "`threads` is 1 to 64, `jobs` at least 1",
            ));
        }
        let limits = Limits {
            threads,
            jobs,
            bytes: bytes.unwrap_or(usize::MAX),
        };
        Queue::of(&self.handle, limits)
    }

    fn fit(&self, py: Python<'_>, page_bytes: u64) -> PyResult<Option<String>> {
        match py.detach(|| self.handle.misfit(page_bytes)) {
            Some(misfit @ Misfit::Never { .. }) => Err(raised(misfit)),
            other => Ok(other.map(|misfit| misfit.to_string())),
        }
    }

    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.handle.flush()).map_err(raised)
    }

    #[pyo3(signature = (since=0))]
    fn evictions<'py>(&self, py: Python<'py>, since: u64) -> PyResult<Bound<'py, PyAny>> {
        let found = py.detach(|| self.handle.evictions(since)).map_err(raised)?;
        let page = |(namespace, key): &(larder_format::Fingerprint, PageKey)| {
            (
                PyBytes::new(py, namespace.as_bytes()),
                PyBytes::new(py, key.as_bytes()),
            )
        };
        let pages: Vec<_> = found.pages.iter().map(page).collect();
        let class = EVICTIONS.import(py, "larder_kv.store", "Evictions")?;
        class.call1((found.next, found.missed, pages))
    }

    fn usage<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let rows = py.detach(|| self.handle.usage()).map_err(raised)?;
        let class = USAGE.import(py, "larder_kv.store", "Usage")?;
        rows.iter()
            .map(|row| {
                let digest = PyBytes::new(py, row.namespace.as_bytes());
                class.call1((digest, row.pages, row.bytes, row.plain_bytes))
            })
            .collect()
    }

    /// The counters, as their JSON names them.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let json = py.detach(|| self.handle.stats_json()).map_err(raised)?;
        py.import("json")?.call_method1("loads", (json,))
    }

    #[pyo3(signature = (timeout=None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let until = moment(timeout)?;
        py.detach(|| match until {
            Some(until) => self.handle.close_by(until),
            None => self.handle.close().map(|()| true),
        })
        .map_err(raised)
    }

    #[getter]
    fn part(&self) -> &'static str {
        match self.handle.part() {
            Part::Owner => "owner",
            Part::Client => "client",
            _ if self.handle.is_closed() => "closed",
            _ => "nobody",
        }
    }

    #[getter]
    fn is_encrypted(&self) -> bool {
        self.handle.is_encrypted()
    }

    #[getter]
    fn path(&self) -> String {
        self.handle.volume().display().to_string()
    }

    #[getter]
    fn remarks(&self) -> Vec<String> {
        self.handle.remarks().to_vec()
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py, None).map(drop)
    }

    fn __repr__(&self) -> String {
        format!("<larder_kv.Store {} ({})>", self.path(), self.part())
    }
}

impl Drop for Store {
    /// The engine's threads may end with this call, and they never need the interpreter lock.
    fn drop(&mut self) {
        self.handle.leave();
    }
}

/// Answers of a call without the interpreter lock, as `bytes`.
fn answered<'py>(py: Python<'py>, call: impl FnOnce() -> Vec<u8> + Send) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &py.detach(call))
}

#[pymethods]
impl Namespace {
    #[getter]
    fn store(&self, py: Python<'_>) -> Py<Store> {
        self.store.clone_ref(py)
    }

    #[getter]
    fn parts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.space.parts)
    }

    #[getter]
    fn page_bytes(&self) -> usize {
        self.space.page_bytes()
    }

    #[getter]
    fn digest<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.space.fingerprint().as_bytes())
    }

    #[pyo3(signature = (
        keys, pages, *, before=None, depth=0, chain=true, wait=0.0, hint=None, pin_until=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "a call of Python's")]
    fn put<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        pages: &Bound<'py, PyAny>,
        before: Option<&Bound<'py, PyAny>>,
        depth: u32,
        chain: bool,
        wait: f64,
        hint: Option<HintFields>,
        pin_until: Option<f64>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let chain = position(before, depth, chain)?;
        let pin_until = pin_until.map(pin_end).transpose()?;
        let wait = buffers::seconds(Some(wait))?.unwrap_or_default();
        let options = PutOptions::waiting(wait).hinting(hinted(hint)?);
        let (keys, pages) = self.batch(keys, pages, false)?;
        let starts = part_starts(&pages.starts, &self.space.parts);
        Ok(answered(py, || {
            // SAFETY: exported by Python's objects for the length of the call, or addresses that
            // the caller of Python answers for.
            let memory = unsafe { slices(&starts, &self.space.parts) };
            let statuses = self.space.put(&keys, chain, &memory, options, None);
            if let Some(until) = pin_until {
                self.space.pin_stored(&keys, &statuses, until);
            }
            statuses
        }))
    }

    #[pyo3(signature = (keys, pages, *, timeout=None))]
    fn get<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        pages: &Bound<'py, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let deadline = moment(timeout)?;
        let (keys, pages) = self.batch(keys, pages, true)?;
        let starts = part_starts(&pages.starts, &self.space.parts);
        Ok(answered(py, || {
            // SAFETY: as for a put, and no two pages overlap.
            let mut memory = unsafe { slices_mut(&starts, &self.space.parts) };
            self.space.get(&keys, &mut memory, deadline)
        }))
    }

    fn longest_prefix(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let keys = buffers::keys(keys)?;
        Ok(py.detach(|| self.space.longest_prefix(&keys)))
    }

    #[pyo3(signature = (*, asked=None, found=0, served=0, prefill_rate=None))]
    fn count_tokens(&self, asked: Option<u64>, found: u64, served: u64, prefill_rate: Option<f64>) {
        if let Some(tokens) = asked {
            self.space.count(Count::Asked {
                tokens,
                found,
                is_first: true,
            });
        }
        if served > 0 {
            self.space.count(Count::Served {
                tokens: served,
                prefill_rate,
            });
        }
    }

    fn contains<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let keys = buffers::keys(keys)?;
        Ok(answered(py, || self.space.contains(&keys, None)))
    }

    /// With the interpreter lock: it takes less than a microsecond, and taking the lock again may
    /// take milliseconds.
    fn holds(&self, key: &Bound<'_, PyAny>) -> PyResult<Option<bool>> {
        let key: PageKey = buffers::key(key)?;
        Ok(self.space.holds(&key))
    }

    #[pyo3(signature = (keys, *, hint=None, pin_until=None))]
    fn touch(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        hint: Option<HintFields>,
        pin_until: Option<f64>,
    ) -> PyResult<()> {
        let keys = buffers::keys(keys)?;
        let hint = hinted(hint)?;
        let pin_until = pin_until.map(pin_end).transpose()?;
        py.detach(|| {
            self.space.touch(&keys, hint);
            if let Some(until) = pin_until {
                self.space.pin_unreported(&keys, until);
            }
        });
        Ok(())
    }

    fn lease<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let keys = buffers::keys(keys)?;
        Ok(answered(py, || self.space.lease(&keys)))
    }

    fn unlease(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let keys = buffers::keys(keys)?;
        py.detach(|| self.space.unlease(&keys));
        Ok(())
    }

    fn pin<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        until: f64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let keys = buffers::keys(keys)?;
        let until = pin_end(until)?;
        let kept = py.detach(|| self.space.pin(&keys, until)).map_err(raised)?;
        Ok(PyBytes::new(py, &kept))
    }

    fn unpin(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<u64> {
        let keys = buffers::keys(keys)?;
        py.detach(|| self.space.unpin(&keys)).map_err(raised)
    }

    #[pyo3(signature = (cursor=None))]
    fn list<'py>(&self, py: Python<'py>, cursor: Option<u64>) -> PyResult<Bound<'py, PyAny>> {
        let cursor = Cursor(cursor.unwrap_or_default());
        let found = py.detach(|| self.space.list(cursor)).map_err(raised)?;
        let keys: Vec<u8> = found.keys.iter().flat_map(|key| *key.as_bytes()).collect();
        let class = LISTING.import(py, "larder_kv.store", "Listing")?;
        class.call1((PyBytes::new(py, &keys), found.next.map(|Cursor(next)| next)))
    }

    fn delete(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<u64> {
        let keys = buffers::keys(keys)?;
        py.detach(|| self.space.delete(&keys)).map_err(raised)
    }

    fn limit(&self, py: Python<'_>, limits: &str) -> PyResult<()> {
        py.detach(|| self.space.limit(limits)).map_err(raised)
    }

    fn clear(&self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| self.space.clear()).map_err(raised)
    }

    fn __repr__(&self) -> String {
        format!("<larder_kv.Namespace {}>", self.space.namespace)
    }
}

impl Namespace {
    /// The keys of some pages, and their memory.
    fn batch<'py>(
        &self,
        keys: &Bound<'py, PyAny>,
        pages: &Bound<'py, PyAny>,
        writable: bool,
    ) -> PyResult<(Vec<PageKey>, Pages<'py>)> {
        let keys = buffers::keys(keys)?;
        let pages = Pages::of(pages, keys.len(), self.space.page_bytes(), writable)?;
        Ok((keys, pages))
    }
}

#[pymethods]
impl Region {
    #[getter]
    fn rows(&self) -> usize {
        self.memory.rows()
    }

    #[getter]
    fn stride(&self) -> usize {
        self.memory.stride()
    }

    #[getter]
    fn address(&self) -> usize {
        self.memory.address()
    }

    #[getter]
    fn length(&self) -> usize {
        self.memory.length()
    }

    fn move_to_huge_pages(&self) {
        self.memory.move_to_huge_pages();
    }

    #[getter]
    fn huge_bytes(&self) -> Option<usize> {
        self.memory.huge_bytes()
    }

    #[getter]
    fn described(&self) -> &str {
        &self.described
    }
}

//! The class that `larder_kv.sglang` calls.
//!
//! Lookups, reads and writes run without the interpreter lock, and any failure in them is a miss:
//! SGLang's threads never get an exception from here, not even for a bug.

#![expect(
    clippy::needless_pass_by_value,
    reason = "arguments are converted from Python objects per call"
)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use larder_format::PageKey;
use larder_handle::chain::Chain;
use larder_handle::place;
use larder_tools::disk::DiskFacts;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use super::backend::{Backend as Inner, Memory, Request};
use super::hits::Policy;
use super::pool::{Buffer, Pool};
use super::space::{PoolFacts, Server};
use super::{config, doctor};
use crate::log;

/// A storage backend: see `larder_kv.sglang`.
#[pyclass(frozen, module = "larder_kv._larder")]
pub struct Backend {
    inner: Arc<Inner>,
    volume: PathBuf,
    remarks: Vec<String>,
}

impl Drop for Backend {
    /// For a backend that was not closed. Closing the store may wait for the device, and this
    /// thread holds the interpreter lock.
    fn drop(&mut self) {
        if self.inner.is_inherited() {
            // Its threads and their channels belong to the parent.
            std::mem::forget(self.inner.clone());
            return;
        }
        if !self.inner.is_closing() {
            let _ = self.inner.leave();
        }
    }
}

/// Parses keys up to the first invalid one. Pages without a valid key are not stored.
fn parse_keys(keys: &Bound<'_, PyAny>) -> PyResult<Vec<PageKey>> {
    let mut parsed = Vec::with_capacity(keys.len()?);
    for key in keys.try_iter()? {
        let key = key?;
        let key = key.cast::<PyString>()?.to_str()?.parse::<PageKey>();
        let Ok(key) = key else { break };
        parsed.push(key);
    }
    Ok(parsed)
}

fn chain(before: Option<&str>, depth: u32) -> Chain {
    Chain {
        before: before.and_then(|key| key.parse().ok()),
        depth,
    }
}

fn as_request((is_first, pages): (bool, usize)) -> Request {
    Request { is_first, pages }
}

/// Runs work without the interpreter lock. A panic in it is logged and counts as a miss.
fn work<R: Send + Default>(py: Python<'_>, work: impl FnOnce() -> R + Send) -> R {
    py.detach(|| {
        catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
            tracing::error!(
                "a call failed in a way that should not be possible; it counts as a miss"
            );
            R::default()
        })
    })
}

/// Extends the answers to one per key.
fn filled(mut answers: Vec<bool>, keys: usize) -> Vec<bool> {
    answers.resize(keys, false);
    answers
}

/// Copies SGLang's host indices: a contiguous int64 tensor on the CPU.
///
/// # Safety
/// `address` is the address of `count` numbers, which do not change during the call.
unsafe fn indices(address: usize, count: usize) -> Vec<i64> {
    if count == 0 {
        return Vec::new();
    }
    let start = std::ptr::with_exposed_provenance::<i64>(address);
    // SAFETY: guaranteed by the caller.
    unsafe { std::slice::from_raw_parts(start, count) }.to_vec()
}

#[pymethods]
impl Backend {
    /// Attaches to the store in `config`, for the server described by `server`. Both are JSON.
    #[new]
    fn new(py: Python<'_>, config: &str, server: &str) -> PyResult<Backend> {
        log::begin(py)?;
        let mut config =
            config::parse(config).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let relative = config.resolve();
        let server: Server = serde_json::from_str(server)
            .map_err(|error| PyValueError::new_err(format!("the server's facts: {error}")))?;
        let (inner, remark) = py
            .detach(|| Inner::open(&config, server))
            .map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        Ok(Backend {
            inner,
            volume: place::volume_of(&config.path),
            remarks: relative.into_iter().chain(remark).collect(),
        })
    }

    /// The location of the store.
    #[getter]
    fn volume(&self) -> String {
        self.volume.display().to_string()
    }

    /// Warnings.
    #[getter]
    fn remarks(&self) -> Vec<String> {
        self.remarks.clone()
    }

    /// Registers a pool with known addresses: buffers as (base, stride, bytes), and the buffers of
    /// each part.
    fn register(
        &self,
        py: Python<'_>,
        facts: &str,
        buffers: Vec<(usize, usize, usize)>,
        parts: Vec<Vec<usize>>,
        pages: usize,
    ) -> PyResult<String> {
        let facts = read_facts(facts)?;
        let buffers = buffers
            .into_iter()
            .map(|(base, stride, bytes)| Buffer {
                base,
                stride,
                bytes,
            })
            .collect();
        let pool = Pool::new(buffers, parts, facts.page_tokens as usize, pages)
            .map_err(|error| PyValueError::new_err(format!("pool {}: {error}", facts.name)))?;
        self.register_memory(py, &facts, Memory::Mapped(pool))
    }

    /// Registers a pool whose pages are passed in flat, or a pool without bytes if `page_bytes`
    /// is 0.
    fn register_flat(&self, py: Python<'_>, facts: &str, page_bytes: usize) -> PyResult<String> {
        let facts = read_facts(facts)?;
        let memory = if page_bytes == 0 {
            Memory::Logical
        } else {
            Memory::Flat(page_bytes)
        };
        self.register_memory(py, &facts, memory)
    }

    /// `request` is (whether this is its first lookup, its pages from the first key on), for the
    /// counters of tokens.
    #[pyo3(signature = (pool, keys, before=None, depth=0, request=None))]
    fn exists(
        &self,
        py: Python<'_>,
        pool: &str,
        keys: &Bound<'_, PyAny>,
        before: Option<&str>,
        depth: u32,
        request: Option<(bool, usize)>,
    ) -> PyResult<usize> {
        let (keys, chain) = (parse_keys(keys)?, chain(before, depth));
        let request = request.map(as_request);
        Ok(self.call(py, || self.inner.exists(pool, &keys, chain, request)))
    }

    /// Returns (pages, pages of the anchor, reach of each pool, restorable lengths). A pool is
    /// (name, policy, a, b). Policies: `all`; `trailing`, a window of a pages; `groups`, b keys for
    /// each a pages.
    #[pyo3(signature = (anchor, keys, pools, before=None, depth=0, request=None))]
    #[expect(clippy::too_many_arguments, reason = "a call of Python's")]
    fn exists_in(
        &self,
        py: Python<'_>,
        anchor: &str,
        keys: &Bound<'_, PyAny>,
        pools: Vec<(String, String, usize, usize)>,
        before: Option<&str>,
        depth: u32,
        request: Option<(bool, usize)>,
    ) -> PyResult<(usize, usize, Vec<usize>, Vec<usize>)> {
        let (keys, chain) = (parse_keys(keys)?, chain(before, depth));
        let pools = pools
            .into_iter()
            .map(|(name, policy, a, b)| {
                let policy = match policy.as_str() {
                    "trailing" => Policy::Trailing(a),
                    "groups" => Policy::Groups { block: a, group: b },
                    _ => Policy::All,
                };
                (name, policy)
            })
            .collect::<Vec<_>>();
        let request = request.map(as_request);
        let hits = self.call(py, || {
            self.inner.exists_in(anchor, &keys, chain, &pools, request)
        });
        Ok((hits.pages, hits.anchor, hits.reaches, hits.restorable))
    }

    /// Reads pages into a pool. `address` and `count` describe SGLang's host indices.
    fn get(
        &self,
        py: Python<'_>,
        pool: &str,
        keys: &Bound<'_, PyAny>,
        address: usize,
        count: usize,
    ) -> PyResult<Vec<bool>> {
        let (asked, keys) = (keys.len()?, parse_keys(keys)?);
        // SAFETY: `larder_kv.sglang` holds the tensor during the call.
        let mut indices = unsafe { indices(address, count) };
        trim(&mut indices, asked, keys.len());
        let answers = self.call(py, || self.inner.get(pool, &keys, &indices));
        Ok(filled(answers, asked))
    }

    /// Stores pages of a pool. `address` and `count` describe SGLang's host indices.
    #[pyo3(signature = (pool, keys, address, count, before=None, depth=0, is_chain=true))]
    #[expect(clippy::too_many_arguments, reason = "a call of Python's")]
    fn set(
        &self,
        py: Python<'_>,
        pool: &str,
        keys: &Bound<'_, PyAny>,
        address: usize,
        count: usize,
        before: Option<&str>,
        depth: u32,
        is_chain: bool,
    ) -> PyResult<Vec<bool>> {
        let (asked, keys) = (keys.len()?, parse_keys(keys)?);
        // SAFETY: see `get`.
        let mut indices = unsafe { indices(address, count) };
        trim(&mut indices, asked, keys.len());
        let chain = is_chain.then(|| chain(before, depth));
        let answers = self.call(py, || self.inner.set(pool, &keys, &indices, chain));
        Ok(filled(answers, asked))
    }

    /// Reads pages into flat buffers, each (address, bytes).
    fn get_flat(
        &self,
        py: Python<'_>,
        pool: &str,
        keys: &Bound<'_, PyAny>,
        buffers: Vec<(usize, usize)>,
    ) -> PyResult<Vec<bool>> {
        let (asked, keys) = (keys.len()?, parse_keys(keys)?);
        let answers = self.call(py, || {
            let buffers = buffers.iter().take(keys.len()).map(|&(address, bytes)| {
                let start = std::ptr::with_exposed_provenance_mut::<u8>(address);
                // SAFETY: `larder_kv.sglang` created these tensors, or received them to fill, and
                // holds them during the call. They are contiguous and do not overlap.
                unsafe { std::slice::from_raw_parts_mut(start, bytes) }
            });
            self.inner.get_flat(pool, &keys, buffers.collect())
        });
        Ok(filled(answers, asked))
    }

    /// Stores flat pages, each (address, bytes).
    #[pyo3(signature = (pool, keys, buffers, before=None, depth=0, is_chain=true))]
    #[expect(clippy::too_many_arguments, reason = "a call of Python's")]
    fn set_flat(
        &self,
        py: Python<'_>,
        pool: &str,
        keys: &Bound<'_, PyAny>,
        buffers: Vec<(usize, usize)>,
        before: Option<&str>,
        depth: u32,
        is_chain: bool,
    ) -> PyResult<Vec<bool>> {
        let (asked, keys) = (keys.len()?, parse_keys(keys)?);
        let chain = is_chain.then(|| chain(before, depth));
        let answers = self.call(py, || {
            let buffers: Vec<&[u8]> = buffers
                .iter()
                .take(keys.len())
                .map(|&(address, bytes)| {
                    let start = std::ptr::with_exposed_provenance::<u8>(address);
                    // SAFETY: `larder_kv.sglang` holds these tensors during the call, contiguous
                    // and unchanged.
                    unsafe { std::slice::from_raw_parts(start, bytes) }
                })
                .collect();
            self.inner.set_flat(pool, &keys, &buffers, chain)
        });
        Ok(filled(answers, asked))
    }

    /// Deletes the pages of this server's pools. Returns their number, or -1 if this could not be
    /// done yet. This process serves nothing before it is done.
    fn clear(&self, py: Python<'_>) -> i64 {
        let cleared = py.detach(|| self.inner.clear());
        match cleared {
            Ok(pages) => i64::try_from(pages).unwrap_or(i64::MAX),
            Err(error) => {
                tracing::error!(%error, "the store is not cleared; until then nothing is served");
                -1
            }
        }
    }

    /// Batches read and stored since the last call, each (pages, gigabytes per second).
    #[expect(clippy::type_complexity, reason = "a tuple is what Python takes")]
    fn drain(&self) -> (Vec<(u64, f64)>, Vec<(u64, f64)>) {
        self.inner.meters().drain()
    }

    /// All counters: this rank's pages, and the store as a whole.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = PyDict::new(py);
        for (name, count) in self.inner.meters().counts() {
            counters.set_item(name, count)?;
        }
        counters.set_item("buffer_bytes", self.inner.buffer_bytes())?;
        if let Some((stats, part)) = py.detach(|| self.inner.stats()) {
            counters.set_item("part", format!("{part:?}").to_lowercase())?;
            let DiskFacts { disk, disk_reason } = DiskFacts::of(&stats.disk);
            counters.set_item("disk", disk)?;
            counters.set_item("disk_reason", disk_reason)?;
            for (name, count) in [
                ("pages", stats.pages),
                ("live_bytes", stats.live_bytes),
                ("usable_bytes", stats.usable_bytes),
                ("capacity_bytes", stats.capacity_bytes),
                ("index_bytes", stats.index_bytes),
                ("evicted_pages", stats.evicted),
                ("damaged_pages", stats.damaged),
                ("bytes_put", stats.bytes_put),
                ("bytes_written", stats.bytes_written),
                ("bytes_read", stats.bytes_read),
                ("direct_pages", stats.direct_pages),
                ("bounced_pages", stats.bounced_pages),
            ] {
                counters.set_item(name, count)?;
            }
        }
        Ok(counters)
    }

    /// Creates the store for the registered pools if it does not exist. Returns a warning, if any.
    fn make(&self, py: Python<'_>) -> PyResult<Option<String>> {
        py.detach(|| self.inner.make())
            .map_err(|error| PyRuntimeError::new_err(error.to_string()))
    }

    /// Whether there is a store, or none will be created.
    fn is_made(&self) -> bool {
        self.inner.is_made()
    }

    /// The settings of the store's owner, in one line.
    fn settings(&self, py: Python<'_>) -> Option<String> {
        let settings = py.detach(|| self.inner.settings());
        settings.map(|settings| settings.to_string())
    }

    /// Whether pages also go to a remote, which a clear does not reach.
    fn has_remote(&self, py: Python<'_>) -> bool {
        py.detach(|| self.inner.has_remote())
    }

    /// Whether the store is encrypted. In doubt it is.
    fn is_encrypted(&self, py: Python<'_>) -> bool {
        py.detach(|| self.inner.is_encrypted())
    }

    /// One sentence per pool.
    fn describe(&self) -> Vec<String> {
        self.inner.describe()
    }

    /// Tries at once to attach to a store that was not available at start-up. Returns whether no
    /// further attempt is needed.
    fn try_again(&self, py: Python<'_>) -> bool {
        work(py, || self.inner.try_again())
    }

    /// Closes the store. Returns false if this was not done in time and continues in the
    /// background.
    fn close(&self, py: Python<'_>) -> bool {
        work(py, || self.inner.close())
    }
}

impl Backend {
    /// Runs a call of SGLang's threads, after creating the store if possible.
    fn call<R: Send + Default>(&self, py: Python<'_>, call: impl FnOnce() -> R + Send) -> R {
        work(py, || {
            self.inner.make_if_needed();
            call()
        })
    }

    fn register_memory(
        &self,
        py: Python<'_>,
        facts: &PoolFacts,
        memory: Memory,
    ) -> PyResult<String> {
        py.detach(|| self.inner.register(facts, memory))
            .map_err(|error| PyRuntimeError::new_err(error.to_string()))
    }
}

/// Removes the indices of invalid keys.
fn trim(indices: &mut Vec<i64>, asked: usize, keys: usize) {
    if keys < asked && asked > 0 {
        let per_key = indices.len() / asked;
        indices.truncate(per_key * keys);
    }
}

fn read_facts(facts: &str) -> PyResult<PoolFacts> {
    serde_json::from_str(facts)
        .map_err(|error| PyValueError::new_err(format!("the pool's facts: {error}")))
}

/// Checks an extra config, as JSON, for pages of this size (a text such as `16MiB`). Returns the
/// exit code.
#[pyfunction]
#[pyo3(signature = (config, page_bytes=None))]
fn check_sglang_config(py: Python<'_>, config: &str, page_bytes: Option<&str>) -> PyResult<u8> {
    let program = crate::program::program(py)?;
    let examine = |page_bytes| doctor::examine(config, page_bytes);
    py.detach(|| crate::doctor::report(&program, page_bytes, examine))
        .map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Adds the functions that `larder_kv.sglang` and its doctor call.
pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Backend>()?;
    module.add_function(wrap_pyfunction!(check_sglang_config, module)?)
}

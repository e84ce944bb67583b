//! The class `larder_kv.store.Queue`. No call but `wait`, `drain` and `close` waits, and only those
//! release the interpreter lock: to take it again may take longer than the call itself.

use std::sync::Arc;

use larder_engine::{PutOptions, StoreError as EngineError};
use larder_format::PageKey;
use larder_handle::region::part_starts;
use larder_handle::store::Handle;
use larder_handle::store::queue::{Done, Job, Limits, Queue as Inner, Rows, SubmitError, Task};
use pyo3::create_exception;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyList, PyType};

use super::{Namespace, Region, StoreError, moment, position, raised};
use crate::module::buffers;
use crate::module::hints::pin_end;

create_exception!(
    larder_kv._larder,
    QueueFull,
    StoreError,
    "The queue has no room for the job. Nothing of it was accepted."
);

/// `larder_kv.store.Done`.
static DONE: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// Jobs on a store, with an eventfd.
#[pyclass(frozen, module = "larder_kv.store")]
pub struct Queue {
    inner: Arc<Inner>,
}

impl Drop for Queue {
    fn drop(&mut self) {
        // Jobs that run go on to their end, and keep their region.
        self.inner.refuse();
    }
}

fn refused(error: SubmitError) -> PyErr {
    match error {
        SubmitError::Full => QueueFull::new_err(error.to_string()),
        SubmitError::TooLarge { .. } | SubmitError::OtherStore { .. } => {
            PyValueError::new_err(error.to_string())
        }
        SubmitError::Closed | SubmitError::Forked(_) | SubmitError::Thread(_) => raised(error),
    }
}

impl Queue {
    pub(super) fn of(handle: &Arc<Handle>, limits: Limits) -> PyResult<Queue> {
        if handle.is_inherited() {
            return Err(raised(EngineError::Forked));
        }
        let inner = Inner::new(handle, limits).map_err(raised)?;
        Ok(Queue { inner })
    }

    fn submit(
        &self,
        namespace: &Namespace,
        task: Task,
        keys: Vec<PageKey>,
        rows: Option<Rows>,
        timeout: Option<f64>,
        recall: bool,
    ) -> PyResult<u64> {
        let job = Job {
            task,
            space: namespace.space.clone(),
            keys,
            rows,
            deadline: moment(timeout)?,
            recall: recall.then(Arc::default),
        };
        self.inner.submit(job).map_err(refused)
    }
}

impl Queue {
    /// Queues a job that `poll` does not return. False if the queue is full.
    fn submit_unreported(
        &self,
        namespace: &Namespace,
        task: Task,
        keys: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let job = Job {
            task,
            space: namespace.space.clone(),
            keys: buffers::keys(keys)?,
            rows: None,
            deadline: None,
            recall: None,
        };
        match self.inner.submit(job) {
            Ok(_) => Ok(true),
            Err(SubmitError::Full) => Ok(false),
            Err(error) => Err(refused(error)),
        }
    }
}

/// The rows of some keys.
fn rows(
    namespace: &Namespace,
    region: &Region,
    rows: &Bound<'_, PyAny>,
    keys: usize,
    apart: bool,
) -> PyResult<Rows> {
    let rows = buffers::rows(rows)?;
    let page_bytes = namespace.space.page_bytes();
    let starts = region
        .memory
        .starts(rows.into_iter(), keys, page_bytes, apart);
    let starts = starts.map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok(Rows {
        region: Some(region.memory.clone()),
        starts: part_starts(&starts, &namespace.space.parts),
    })
}

/// Finished jobs for Python. An error of a signal handler is raised here, not after the return.
fn made<'py>(class: &Bound<'py, PyType>, finished: &[Done]) -> PyResult<Bound<'py, PyList>> {
    let py = class.py();
    let list = PyList::empty(py);
    for done in finished {
        let statuses = PyBytes::new(py, &done.statuses);
        let fields = (done.job, statuses, done.took.as_secs_f64(), done.bytes);
        list.append(class.call1(fields)?)?;
    }
    py.check_signals()?;
    Ok(list)
}

#[pymethods]
impl Queue {
    fn event_fd(&self) -> i32 {
        self.inner.event_fd()
    }

    #[pyo3(signature = (namespace, keys, region, rows, *, before=None, depth=0, chain=true,
        timeout=None, wait=0.0, recall=false))]
    #[expect(clippy::too_many_arguments, reason = "a call of Python's")]
    fn submit_put(
        &self,
        namespace: &Bound<'_, Namespace>,
        keys: &Bound<'_, PyAny>,
        region: &Bound<'_, Region>,
        rows: &Bound<'_, PyAny>,
        before: Option<&Bound<'_, PyAny>>,
        depth: u32,
        chain: bool,
        timeout: Option<f64>,
        wait: f64,
        recall: bool,
    ) -> PyResult<u64> {
        let keys = buffers::keys(keys)?;
        let task = Task::Put {
            chain: position(before, depth, chain)?,
            options: PutOptions::waiting(buffers::seconds(Some(wait))?.unwrap_or_default()),
        };
        let namespace = namespace.get();
        let rows = self::rows(namespace, region.get(), rows, keys.len(), false)?;
        self.submit(namespace, task, keys, Some(rows), timeout, recall)
    }

    #[pyo3(signature = (namespace, keys, region, rows, *, timeout=None))]
    fn submit_get(
        &self,
        namespace: &Bound<'_, Namespace>,
        keys: &Bound<'_, PyAny>,
        region: &Bound<'_, Region>,
        rows: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        let keys = buffers::keys(keys)?;
        let namespace = namespace.get();
        let rows = self::rows(namespace, region.get(), rows, keys.len(), true)?;
        self.submit(namespace, Task::Get, keys, Some(rows), timeout, false)
    }

    #[pyo3(signature = (namespace, keys, *, lease=false, timeout=None))]
    fn submit_lookup(
        &self,
        namespace: &Bound<'_, Namespace>,
        keys: &Bound<'_, PyAny>,
        lease: bool,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        let keys = buffers::keys(keys)?;
        let task = Task::Lookup { leases: lease };
        self.submit(namespace.get(), task, keys, None, timeout, false)
    }

    fn submit_unlease(
        &self,
        namespace: &Bound<'_, Namespace>,
        keys: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        self.submit_unreported(namespace.get(), Task::Unlease, keys)
    }

    fn submit_touch(
        &self,
        namespace: &Bound<'_, Namespace>,
        keys: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        self.submit_unreported(namespace.get(), Task::Touch, keys)
    }

    fn submit_pin(
        &self,
        namespace: &Bound<'_, Namespace>,
        keys: &Bound<'_, PyAny>,
        until: f64,
    ) -> PyResult<bool> {
        let until_unix_s = pin_end(until)?;
        self.submit_unreported(namespace.get(), Task::Pin { until_unix_s }, keys)
    }

    #[pyo3(signature = (limit=None))]
    fn poll<'py>(&self, py: Python<'py>, limit: Option<usize>) -> PyResult<Bound<'py, PyList>> {
        let class = DONE.import(py, "larder_kv.store", "Done")?;
        let finished = self.inner.poll(limit.unwrap_or(usize::MAX));
        let made = made(class, &finished);
        if made.is_err() {
            self.inner.put_back(finished);
        }
        made
    }

    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let until = moment(timeout)?;
        Ok(py.detach(|| self.inner.wait(until)))
    }

    #[pyo3(signature = (timeout=None))]
    fn drain(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let until = moment(timeout)?;
        Ok(py.detach(|| self.inner.drain(until)))
    }

    #[getter]
    fn pending(&self) -> usize {
        self.inner.pending()
    }

    #[getter]
    fn stuck(&self) -> usize {
        self.inner.stuck()
    }

    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = self.inner.counters();
        let named = PyDict::new(py);
        for (name, count) in [
            ("submitted", counters.submitted),
            ("refused", counters.refused),
            ("dropped_touches", counters.dropped_touches),
            ("late", counters.late),
            ("stuck", counters.stuck),
        ] {
            named.set_item(name, count)?;
        }
        Ok(named)
    }

    #[pyo3(signature = (timeout=None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let until = moment(timeout)?;
        Ok(py.detach(|| self.inner.close(until)))
    }
}

//! The log of the extension: `larder_kv.logs` receives its lines, and passes them to Python's
//! `logging`.

use std::os::fd::{IntoRawFd, RawFd};

use larder_sync::descriptors;
use pyo3::prelude::*;

/// Begins the log, at the first call in a process.
pub fn begin(py: Python<'_>) -> PyResult<()> {
    py.import("larder_kv.logs")?.call_method0("start")?;
    Ok(())
}

/// Begins the log. Returns the descriptor of the socket that receives its lines, for the caller to
/// close; `None` if the log goes to stderr, or has begun.
#[pyfunction]
pub fn log_lines() -> PyResult<Option<RawFd>> {
    descriptors::cover()?;
    let lines = larder_tools::log::of_program()?;
    Ok(lines.map(IntoRawFd::into_raw_fd))
}

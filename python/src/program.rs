//! The command line of this package.

use std::ffi::OsString;
use std::path::PathBuf;

use larder_tools::cli;
use pyo3::prelude::*;

/// The command line of this package, as a program.
pub fn program(py: Python<'_>) -> PyResult<cli::Program> {
    let python: PathBuf = py.import("sys")?.getattr("executable")?.extract()?;
    Ok(cli::Program::new(
        python,
        ["-m", "larder_kv"].map(OsString::from).into(),
    ))
}

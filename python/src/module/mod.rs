//! The Python module `larder_kv._larder`: only the Rust side of the calls.
//!
//! A module imports only those below it:
//!
//! | module | classes |
//! |---|---|
//! | [`store`] | those of `larder_kv.store` |
//! | `hints` | hints, and the ends of pins |
//! | `buffers` | memory that Python passes in |
//!
//! The classes of `larder_kv.device` are in [`device`], the one beneath `larder_kv.sglang` in
//! [`sglang`].

#![expect(
    clippy::needless_pass_by_value,
    reason = "arguments are converted from Python objects per call"
)]

mod buffers;
mod hints;
mod store;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;

use larder_engine::SyncPolicy;
use larder_handle::config::{Config, OnError, l4};
use larder_handle::status::Status;
use larder_seal::KeySource;
use larder_tools::cli;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::program::program;
use crate::{device, doctor, log, sglang, weights};

/// The tag of a description: fields and their values.
#[pyfunction]
fn weights_tag(fields: BTreeMap<String, String>) -> String {
    weights::tag(&fields)
}

/// A digest of the weight files in the first of the places that has some.
#[pyfunction]
fn weights_files(py: Python<'_>, places: Vec<PathBuf>) -> PyResult<String> {
    py.detach(|| weights::files(&places))
        .map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Runs the command line and returns its exit code. `program` and `leading` start this command line
/// again.
#[pyfunction]
fn main(py: Python<'_>, program: PathBuf, leading: Vec<OsString>, arguments: Vec<OsString>) -> u8 {
    let program = cli::Program::new(program, leading);
    py.detach(|| cli::run(&program, arguments))
}

/// Reads a configuration with Larder's keys alone. Both are JSON; the answer has every key, times
/// in seconds and sizes in bytes.
#[pyfunction]
fn parse_config(config: &str) -> PyResult<String> {
    // The remotes have their keys as they were given, for the call that attaches.
    let given: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(config).unwrap_or_default();
    let l4: serde_json::Map<String, serde_json::Value> = given
        .into_iter()
        .filter(|(key, value)| l4::KEYS.contains(&key.as_str()) && !value.is_null())
        .collect();
    let config = Config::parse(config).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let sync = match config.sync {
        SyncPolicy::Relaxed => "relaxed",
        SyncPolicy::Interval(_) => "interval",
        SyncPolicy::Always => "always",
        policy => unreachable!("no key sets {policy}"),
    };
    let on_error = match config.on_error {
        OnError::Fail => "fail",
        OnError::Miss => "miss",
    };
    let json = serde_json::json!({
        "path": config.path,
        "size": config.size,
        "weights_tag": config.weights_tag,
        "on_error": on_error,
        "retry": config.retry.as_secs_f64(),
        "prewrite": config.prewrite,
        "codec": config.codec,
        "disk": config.disk.to_string(),
        "sync": sync,
        "lease": config.lease.as_secs_f64(),
        "policy": config.policy.word(),
        "write_budget": config.write_budget.to_string(),
        "quota": config.quota,
        "tenant": config.tenant,
        "key_file": match &config.key {
            Some(KeySource::File(path)) => Some(path),
            _ => None,
        },
        "key_command": match &config.key {
            Some(KeySource::Command(command)) => Some(command),
            _ => None,
        },
        "key_credential": config.key == Some(KeySource::Credential),
        "timeout": config.timeout.as_secs_f64(),
        "prefill_rate": config.prefill_rate,
        "l4": l4,
    });
    Ok(json.to_string())
}

/// Checks a configuration with Larder's keys alone, as JSON, for pages of this size (a text such as
/// `16MiB`). `derives`: the engine's side derives a tag if none is set. Returns the exit code.
#[pyfunction]
#[pyo3(signature = (config, page_bytes=None, *, derives=true))]
fn check_config(
    py: Python<'_>,
    config: &str,
    page_bytes: Option<&str>,
    derives: bool,
) -> PyResult<u8> {
    let program = program(py)?;
    let examine =
        |page_bytes| doctor::examine(Config::parse(config), Vec::new(), page_bytes, derives);
    py.detach(|| doctor::report(&program, page_bytes, examine))
        .map_err(|error| PyValueError::new_err(error.to_string()))
}

#[pymodule]
fn _larder(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<store::Store>()?;
    module.add_class::<store::Namespace>()?;
    module.add_class::<store::Region>()?;
    module.add_class::<store::queue::Queue>()?;
    module.add("StoreError", module.py().get_type::<store::StoreError>())?;
    module.add(
        "QueueFull",
        module.py().get_type::<store::queue::QueueFull>(),
    )?;
    module.add("STATUSES", Status::NAMES.map(|(name, _)| name).to_vec())?;
    device::add_to(module)?;
    sglang::class::add_to(module)?;
    module.add_function(wrap_pyfunction!(weights_tag, module)?)?;
    module.add_function(wrap_pyfunction!(weights_files, module)?)?;
    module.add_function(wrap_pyfunction!(main, module)?)?;
    module.add_function(wrap_pyfunction!(log::log_lines, module)?)?;
    module.add_function(wrap_pyfunction!(parse_config, module)?)?;
    module.add_function(wrap_pyfunction!(check_config, module)?)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}

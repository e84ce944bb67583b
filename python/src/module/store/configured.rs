//! The configuration of an open, from the arguments of Python's calls.

use std::path::PathBuf;
use std::time::Duration;

use larder_disk::probe::Want;
use larder_engine::{CodecChoice, SyncPolicy};
use larder_handle::config::{Config, OnError, Transfer, key_source};
use larder_tools::l4::L4Config;
use larder_tools::policy::Policy;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::module::buffers;

/// The keys of the remotes, from a mapping.
fn read_l4(keys: &Bound<'_, PyAny>) -> PyResult<L4Config> {
    let json = keys.py().import("json")?.call_method1("dumps", (keys,))?;
    let read = Config::parse_l4(json.extract()?);
    read.map_err(|error| PyValueError::new_err(error.to_string()))
}

/// The configuration of an open.
#[expect(clippy::too_many_arguments, reason = "a call of Python's")]
pub(super) fn configured(
    path: PathBuf,
    size: Option<&Bound<'_, PyAny>>,
    sync: &str,
    lease: f64,
    hang_limit: f64,
    prewrite: bool,
    codec: &str,
    disk: &str,
    policy: &str,
    write_budget: &str,
    l4: Option<&Bound<'_, PyAny>>,
    key: (Option<PathBuf>, Option<String>, bool),
) -> PyResult<Config> {
    let wrong = |why: String| PyValueError::new_err(why);
    let sync = match sync {
        "interval" => SyncPolicy::default(),
        "relaxed" => SyncPolicy::Relaxed,
        "always" => SyncPolicy::Always,
        _ => {
            let why = format!("`sync`: `{sync}` is not one of interval, relaxed, always");
            return Err(wrong(why));
        }
    };
    let disk: Want = disk.parse().map_err(|e| wrong(format!("`disk`: {e}")))?;
    let codec: CodecChoice = codec.parse().map_err(|e| wrong(format!("`codec`: {e}")))?;
    let policy: Policy = policy
        .parse()
        .map_err(|e| wrong(format!("`policy`: {e}")))?;
    let write_budget = write_budget
        .parse()
        .map_err(|e| wrong(format!("`write_budget`: {e}")))?;
    let seconds = |seconds| buffers::seconds(Some(seconds)).map(Option::unwrap_or_default);
    if path.as_os_str().is_empty() {
        return Err(wrong("`path` is empty".to_owned()));
    }
    let mut config = Config {
        path,
        size: size.map(buffers::size).transpose()?,
        weights_tag: None,
        on_error: OnError::Fail,
        retry: Duration::from_secs(30),
        prewrite,
        codec,
        disk,
        sync,
        lease: seconds(lease)?,
        policy,
        write_budget,
        quota: None,
        tenant: None,
        key: key_source(key.0, key.1, key.2).map_err(|error| wrong(error.to_string()))?,
        timeout: seconds(hang_limit)?,
        transfer: Transfer::Auto,
        prefill_rate: None,
        l4: l4.map_or_else(|| Ok(L4Config::default()), read_l4)?,
    };
    // Relative to the working directory of now.
    let _ = config.resolve();
    Ok(config)
}

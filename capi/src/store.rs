//! The functions of stores.

use std::ffi::CString;
use std::sync::Arc;
use std::time::Duration;

use larder_handle::config::{Config, l4};
use larder_handle::store::Handle;
use larder_sync::descriptors;
use serde_json::{Map, Value};

use crate::answer::{Code, Error, Failure, answer};
use crate::given;
use crate::types::{Char, OpenOptions};

/// Keys of the settings, besides those of remotes.
const SETTINGS: [&str; 9] = [
    "codec",
    "disk",
    "key_command",
    "key_credential",
    "key_file",
    "policy",
    "prewrite",
    "sync",
    "write_budget",
];

/// Lease and hang limit without a number.
const USUAL: Duration = Duration::from_secs(10);

/// The longest of either, in milliseconds: 100 years.
const LONGEST: u64 = 100 * 365 * 24 * 3_600_000;

/// `larder_store`.
pub struct Store {
    pub(crate) owner: Arc<Owner>,
}

/// Closes the store when neither the store nor a namespace or queue of it is left.
pub(crate) struct Owner {
    pub(crate) handle: Arc<Handle>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.handle.leave();
    }
}

fn time(name: &str, milliseconds: u64) -> Result<Duration, Failure> {
    match milliseconds {
        0 => Ok(USUAL),
        1..=LONGEST => Ok(Duration::from_millis(milliseconds)),
        _ => Err(Failure::argument(format!(
            "`{name}`: {milliseconds} ms are more than 100 years"
        ))),
    }
}

/// The configuration of an open.
fn configured(path: &str, settings: &str, options: &OpenOptions) -> Result<Config, Failure> {
    let keys: Map<String, Value> = serde_json::from_str(settings)
        .map_err(|error| Failure::argument(format!("`settings` are no JSON object: {error}")))?;
    let is_known = |key: &str| SETTINGS.contains(&key) || l4::KEYS.contains(&key);
    if let Some(key) = keys.keys().find(|key| !is_known(key)) {
        return Err(Failure::argument(format!(
            "`settings`: `{key}` is none of {}, {}",
            SETTINGS.join(", "),
            l4::KEYS.join(", ")
        )));
    }
    let mut table = keys;
    table.insert("path".to_owned(), path.into());
    table.entry("prewrite").or_insert(false.into());
    let mut config = Config::parse(&Value::Object(table).to_string())?;
    config.size = (options.size > 0).then_some(options.size);
    config.lease = time("lease_ms", options.lease_ms)?;
    config.timeout = time("hang_limit_ms", options.hang_limit_ms)?;
    // Relative to the working directory of now.
    let _ = config.resolve();
    Ok(config)
}

/// Opens a store, with a handle that `open` makes of a configuration, the size of pages, and
/// whether it may create a store.
///
/// # Safety
/// By the header.
unsafe fn opened(
    path: *const Char,
    options: *const OpenOptions,
    store: *mut *mut Store,
    open: impl FnOnce(&Config, Option<u64>, bool, bool) -> Result<Handle, Failure>,
) -> Result<(), Failure> {
    let place = given::place(store, "store")?;
    // SAFETY: by the header.
    let path = unsafe { given::text(path, "path") }?;
    // SAFETY: by the header.
    let options = unsafe { given::options(options) }?;
    let settings = match options.settings.is_null() {
        true => "{}",
        // SAFETY: by the header.
        false => unsafe { given::text(options.settings, "settings") }?,
    };
    let read_only = match options.read_only {
        0 => false,
        1 => true,
        other => {
            return Err(Failure::argument(format!(
                "`read_only`: {other} is not 0 or 1"
            )));
        }
    };
    let config = configured(path, settings, &options)?;
    let failed =
        |error: std::io::Error| Failure::new(Code::Store, format!("opening /dev/null: {error}"));
    descriptors::cover().map_err(failed)?;
    larder_tools::log::of_library();
    let page_bytes = (options.page_bytes > 0).then_some(options.page_bytes);
    let mut handle = open(&config, page_bytes, options.size > 0, read_only)?;
    if let Some(page_bytes) = page_bytes {
        handle = handle.suiting(page_bytes)?;
    }
    for remark in handle.remarks() {
        tracing::warn!("a remark on the store: {remark}");
    }
    let owner = Arc::new(Owner {
        handle: Arc::new(handle),
    });
    let made = Box::into_raw(Box::new(Store { owner }));
    // SAFETY: by the header.
    unsafe { place.write(made) };
    Ok(())
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_attach(
    path: *const Char,
    options: *const OpenOptions,
    store: *mut *mut Store,
    error: *mut *mut Error,
) -> i32 {
    let attach = |config: &Config, page_bytes, creates, read_only| {
        if read_only {
            let said = "`read_only` is an option of larder_open alone";
            return Err(Failure::argument(said));
        }
        Ok(Handle::attach(config, page_bytes, creates)?)
    };
    // SAFETY: by the header.
    let call = || unsafe { opened(path, options, store, attach) };
    // SAFETY: by the header.
    unsafe { answer("larder_attach", error, call) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_open(
    path: *const Char,
    options: *const OpenOptions,
    store: *mut *mut Store,
    error: *mut *mut Error,
) -> i32 {
    let open = |config: &Config, page_bytes, creates, read_only| {
        Ok(Handle::open(config, page_bytes, creates, read_only)?)
    };
    // SAFETY: by the header.
    let call = || unsafe { opened(path, options, store, open) };
    // SAFETY: by the header.
    unsafe { answer("larder_open", error, call) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_close(
    store: *mut Store,
    timeout_ms: u64,
    error: *mut *mut Error,
) -> i32 {
    let call = || {
        // SAFETY: by the header.
        let store = unsafe { given::object(store, "store") }?;
        let handle = &store.owner.handle;
        let closed = match given::moment(timeout_ms) {
            None => handle.close().map(|()| true),
            Some(until) => handle.close_by(until),
        };
        match closed.map_err(|error| Failure::from(&*error))? {
            true => Ok(()),
            false => Err(Failure::new(
                Code::Timeout,
                format!(
                    "the store at {} is still being closed: the device or a job has not ended; \
                     call larder_close again",
                    handle.volume().display()
                ),
            )),
        }
    };
    // SAFETY: by the header.
    unsafe { answer("larder_close", error, call) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_store_free(store: *mut Store) {
    // SAFETY: by the header.
    unsafe { given::release("larder_store_free", store) };
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_flush(store: *mut Store, error: *mut *mut Error) -> i32 {
    let call = || {
        // SAFETY: by the header.
        let store = unsafe { given::object(store, "store") }?;
        Ok(store.owner.handle.flush()?)
    };
    // SAFETY: by the header.
    unsafe { answer("larder_flush", error, call) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_stats(
    store: *mut Store,
    json: *mut *mut Char,
    error: *mut *mut Error,
) -> i32 {
    let call = || {
        let place = given::place(json, "json")?;
        // SAFETY: by the header.
        let store = unsafe { given::object(store, "store") }?;
        let text = store.owner.handle.stats_json()?;
        // JSON escapes zero bytes.
        let text = CString::new(text).unwrap_or_default().into_raw();
        // SAFETY: by the header.
        unsafe { place.write(text.cast()) };
        Ok(())
    };
    // SAFETY: by the header.
    unsafe { answer("larder_stats", error, call) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_text_free(text: *mut Char) {
    if !text.is_null() {
        // SAFETY: made by `larder_stats`, and freed once, by the header.
        drop(unsafe { CString::from_raw(text.cast()) });
    }
}

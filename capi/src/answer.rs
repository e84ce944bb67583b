//! Results and errors of calls. Nothing unwinds into the caller.

use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};
#[cfg(debug_assertions)]
use std::sync::LazyLock;

use larder_engine::StoreError;
use larder_handle::config::ConfigError;
use larder_handle::identity::IdentityError;
use larder_handle::place::PlaceError;
use larder_handle::store::queue::SubmitError;

/// `larder_result`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    /// The call was done.
    Done = 0,
    /// A wrong argument.
    Argument = -1,
    /// The store cannot be opened or used.
    Store = -2,
    /// The store or the queue is closed.
    Closed = -3,
    /// The queue has no room.
    Full = -4,
    /// The time is over.
    Timeout = -5,
    /// The handle is of the parent process.
    Forked = -6,
    /// A defect of the library.
    Internal = -7,
}

/// `larder_error`.
#[derive(Debug)]
pub struct Error {
    /// The result of the call.
    pub code: Code,
    /// What failed, where, and what to do.
    pub text: CString,
}

/// Why a call fails.
#[derive(Debug)]
pub(crate) struct Failure {
    code: Code,
    text: String,
}

impl Failure {
    pub(crate) fn new(code: Code, text: impl Into<String>) -> Failure {
        let text = text.into();
        Failure { code, text }
    }

    pub(crate) fn argument(text: impl Into<String>) -> Failure {
        Failure::new(Code::Argument, text)
    }

    fn error(self) -> Error {
        let bytes: Vec<u8> = self.text.into_bytes();
        // Paths have no zero byte, but JSON in a message may.
        let text = CString::new(bytes).unwrap_or_else(|error| {
            let mut bytes = error.into_vec();
            bytes.retain(|byte| *byte != 0);
            CString::new(bytes).unwrap_or_default()
        });
        Error {
            code: self.code,
            text,
        }
    }
}

impl From<&StoreError> for Failure {
    fn from(error: &StoreError) -> Failure {
        let code = match error {
            StoreError::Forked => Code::Forked,
            StoreError::Closed => Code::Closed,
            _ => Code::Store,
        };
        Failure::new(code, error.to_string())
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Failure {
        Failure::from(&error)
    }
}

impl From<PlaceError> for Failure {
    fn from(error: PlaceError) -> Failure {
        Failure::new(Code::Store, error.to_string())
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Failure {
        Failure::argument(error.to_string())
    }
}

impl From<IdentityError> for Failure {
    fn from(error: IdentityError) -> Failure {
        Failure::argument(error.to_string())
    }
}

impl From<SubmitError> for Failure {
    fn from(error: SubmitError) -> Failure {
        let code = match error {
            SubmitError::Full => Code::Full,
            SubmitError::TooLarge { .. } | SubmitError::OtherStore { .. } => Code::Argument,
            SubmitError::Closed => Code::Closed,
            SubmitError::Forked(_) => Code::Forked,
            SubmitError::Thread(_) => Code::Store,
        };
        Failure::new(code, error.to_string())
    }
}

/// Makes the call `name`. Sets `*error`, unless it is null, if the call fails.
///
/// # Safety
/// `error` is null or may be written.
pub(crate) unsafe fn answer(
    name: &'static str,
    error: *mut *mut Error,
    call: impl FnOnce() -> Result<(), Failure>,
) -> i32 {
    let failure = match caught(name, call) {
        Some(Ok(())) => return Code::Done as i32,
        Some(Err(failure)) => failure,
        None => Failure::new(
            Code::Internal,
            format!(
                "{name}: a defect of the library; close the store, and report the line on stderr"
            ),
        ),
    };
    let code = failure.code as i32;
    if !error.is_null() {
        let made = Box::into_raw(Box::new(failure.error()));
        // SAFETY: not null, and may be written, as the caller guarantees.
        unsafe { error.write(made) };
    }
    code
}

/// Makes a call that cannot fail; `None` after a panic.
pub(crate) fn caught<R>(name: &'static str, call: impl FnOnce() -> R) -> Option<R> {
    let guarded = AssertUnwindSafe(|| {
        planted(name);
        call()
    });
    match catch_unwind(guarded) {
        Ok(result) => Some(result),
        Err(payload) => {
            // Dropping an unknown payload may panic again.
            if !payload.is::<String>() && !payload.is::<&'static str>() {
                std::mem::forget(payload);
            }
            None
        }
    }
}

/// Panics in the function that the environment names, if it named one at the first call: tests see
/// that no panic leaves the library.
#[cfg(debug_assertions)]
fn planted(name: &'static str) {
    static IS_TEST: LazyLock<bool> = LazyLock::new(|| std::env::var_os(PLANTED).is_some());
    let named = IS_TEST.then(|| std::env::var_os(PLANTED)).flatten();
    assert!(named.is_none_or(|named| named != name), "planted in {name}");
}

/// The variable of the environment.
#[cfg(debug_assertions)]
const PLANTED: &str = "LARDER_PLANTED_PANIC";

#[cfg(not(debug_assertions))]
fn planted(_: &'static str) {}

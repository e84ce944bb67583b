//! The version, errors, and the log.

use std::ffi::CString;
use std::os::fd::IntoRawFd;
use std::sync::OnceLock;

use larder_handle::status::Status;
use larder_sync::descriptors;

use crate::answer::{Code, Error, Failure, answer, caught};
use crate::given;
use crate::types::{ABI, Char};

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn larder_abi() -> u32 {
    ABI
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn larder_version() -> *const Char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn larder_status_name(status: u8) -> *const Char {
    static NAMES: OnceLock<Vec<CString>> = OnceLock::new();
    let name = || {
        let named = |(name, _): (&str, Status)| CString::new(name).unwrap_or_default();
        let names = NAMES.get_or_init(|| Status::NAMES.into_iter().map(named).collect());
        let other = &names[Status::Other as usize];
        names.get(usize::from(status)).unwrap_or(other).as_ptr()
    };
    caught("larder_status_name", name)
        .unwrap_or(c"OTHER".as_ptr())
        .cast()
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_error_code(error: *const Error) -> i32 {
    // SAFETY: by the header.
    let error = unsafe { error.as_ref() };
    error.map_or(Code::Done, |error| error.code) as i32
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_error_text(error: *const Error) -> *const Char {
    // SAFETY: by the header.
    let error = unsafe { error.as_ref() };
    error.map_or(c"", |error| &error.text).as_ptr().cast()
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_error_free(error: *mut Error) {
    // SAFETY: by the header.
    unsafe { given::release("larder_error_free", error) };
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_log_fd(fd: *mut i32, error: *mut *mut Error) -> i32 {
    let call = || {
        let place = given::place(fd, "fd")?;
        let failed = |error: std::io::Error| {
            Failure::new(Code::Store, format!("making a socket for the log: {error}"))
        };
        descriptors::cover().map_err(failed)?;
        let lines = larder_tools::log::of_program().map_err(failed)?;
        let number = lines.map_or(-1, IntoRawFd::into_raw_fd);
        // SAFETY: by the header.
        unsafe { place.write(number) };
        Ok(())
    };
    // SAFETY: by the header.
    unsafe { answer("larder_log_fd", error, call) }
}

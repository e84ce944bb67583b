//! Memory that Python passes in: keys, pages, rows.
//!
//! The module is built for Python 3.10 and later. The stable ABI has the buffer protocol since
//! 3.11 only, so its functions and the struct `Py_buffer` are declared here. CPython 3.10 exports
//! the same functions, and the fields of the struct are the same in 3.10 and in the stable ABI.

use std::ffi::{c_char, c_int, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::time::Duration;

use larder_format::PageKey;
use larder_handle::region::overlap;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi::{Py_ssize_t, PyObject};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyTuple};

/// Bytes of a key.
const KEY: usize = 32;

/// `PyBUF_SIMPLE`: contiguous bytes.
const SIMPLE: c_int = 0;

/// `PyBUF_WRITABLE`.
const WRITABLE: c_int = 1;

/// `PyBUF_FORMAT | PyBUF_ND`: contiguous, with the format of its items.
const FORMAT: c_int = 0x4 | 0x8;

/// CPython's `Py_buffer`.
#[repr(C)]
struct View {
    buf: *mut c_void,
    obj: *mut PyObject,
    len: Py_ssize_t,
    itemsize: Py_ssize_t,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut Py_ssize_t,
    strides: *mut Py_ssize_t,
    suboffsets: *mut Py_ssize_t,
    internal: *mut c_void,
}

unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut PyObject, view: *mut View, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut View);
}

/// The exported memory of an object. It stays where it is until this is dropped.
pub struct Exported<'py> {
    view: Box<View>,
    /// Released with the interpreter attached.
    _py: PhantomData<Python<'py>>,
}

impl<'py> Exported<'py> {
    fn of(object: &Bound<'py, PyAny>, flags: c_int) -> PyResult<Exported<'py>> {
        let mut view = Box::new(MaybeUninit::<View>::zeroed());
        // SAFETY: the object is alive and the interpreter attached, as `object` proves; `view`
        // has the layout of a `Py_buffer`.
        let failed = unsafe { PyObject_GetBuffer(object.as_ptr(), view.as_mut_ptr(), flags) };
        if failed != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        // SAFETY: filled in by the call; all zero bytes are valid for every field.
        let view = unsafe { view.assume_init() };
        Ok(Exported {
            view,
            _py: PhantomData,
        })
    }

    /// Its first byte and its length.
    pub fn piece(&self) -> (usize, usize) {
        let length = usize::try_from(self.view.len).unwrap_or(0);
        (self.view.buf.expose_provenance(), length)
    }

    fn bytes(&self) -> &[u8] {
        let (_, length) = self.piece();
        if length == 0 {
            return &[];
        }
        // SAFETY: the export keeps the memory in place. Python code that changes it meanwhile
        // spoils the keys, which are copied at once, and nothing else.
        unsafe { std::slice::from_raw_parts(self.view.buf.cast::<u8>(), length) }
    }

    /// The letter of a format with one native letter.
    fn letter(&self) -> Option<u8> {
        if self.view.format.is_null() {
            return Some(b'B');
        }
        // SAFETY: not null, so a text that ends with a zero byte and lives as long as the export.
        let format = unsafe { std::ffi::CStr::from_ptr(self.view.format) }.to_bytes();
        match format {
            [letter] | [b'@' | b'=' | b'<', letter] => Some(*letter),
            _ => None,
        }
    }
}

impl Drop for Exported<'_> {
    fn drop(&mut self) {
        // SAFETY: filled in by `PyObject_GetBuffer`, and released once, with the interpreter
        // attached.
        unsafe { PyBuffer_Release(&raw mut *self.view) };
    }
}

/// Keys: one buffer of 32 bytes a key, or a sequence of `bytes`.
pub fn keys(object: &Bound<'_, PyAny>) -> PyResult<Vec<PageKey>> {
    if let Ok(bytes) = object.cast::<PyBytes>() {
        return split(bytes.as_bytes());
    }
    if let Ok(exported) = Exported::of(object, SIMPLE) {
        return split(exported.bytes());
    }
    let mut keys = Vec::with_capacity(object.len().unwrap_or(0));
    for item in object.try_iter()? {
        keys.push(key(&item?)?);
    }
    Ok(keys)
}

/// One key.
pub fn key(object: &Bound<'_, PyAny>) -> PyResult<PageKey> {
    if let Ok(bytes) = object.cast::<PyBytes>() {
        return one(bytes.as_bytes());
    }
    one(Exported::of(object, SIMPLE)?.bytes())
}

fn one(bytes: &[u8]) -> PyResult<PageKey> {
    let key: [u8; KEY] = bytes.try_into().map_err(|_| {
        PyValueError::new_err(format!("a key has {KEY} bytes, not {}", bytes.len()))
    })?;
    Ok(PageKey::from_bytes(key))
}

fn split(bytes: &[u8]) -> PyResult<Vec<PageKey>> {
    let (keys, rest) = bytes.as_chunks::<KEY>();
    if !rest.is_empty() {
        let length = bytes.len();
        let said = format!("keys have {KEY} bytes each, and {length} is no multiple of it");
        return Err(PyValueError::new_err(said));
    }
    Ok(keys.iter().map(|key| PageKey::from_bytes(*key)).collect())
}

/// Rows: a buffer of native `int32` or `int64`, signed or not, or a sequence of `int`.
pub fn rows(object: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    if let Ok(exported) = Exported::of(object, FORMAT) {
        let bytes = exported.bytes();
        return match (exported.letter(), exported.view.itemsize) {
            (Some(b'i' | b'l' | b'q'), 4) => {
                Ok(numbers(bytes, |four| i64::from(i32::from_ne_bytes(four))))
            }
            (Some(b'I' | b'L' | b'Q'), 4) => {
                Ok(numbers(bytes, |four| i64::from(u32::from_ne_bytes(four))))
            }
            (Some(b'i' | b'l' | b'q'), 8) => Ok(numbers(bytes, i64::from_ne_bytes)),
            // A row beyond `i64` is outside every region.
            (Some(b'I' | b'L' | b'Q'), 8) => Ok(numbers(bytes, |eight| {
                i64::try_from(u64::from_ne_bytes(eight)).unwrap_or(i64::MAX)
            })),
            _ => Err(PyTypeError::new_err(
                "rows are integers of 32 or 64 bits, such as a numpy array of int32 or int64",
            )),
        };
    }
    object.try_iter()?.map(|row| row?.extract()).collect()
}

fn numbers<const N: usize>(bytes: &[u8], read: impl Fn([u8; N]) -> i64) -> Vec<i64> {
    bytes
        .as_chunks::<N>()
        .0
        .iter()
        .map(|bytes| read(*bytes))
        .collect()
}

/// The memory of pages.
pub struct Pages<'py> {
    /// The first byte of each page.
    pub starts: Vec<usize>,
    _exported: Vec<Exported<'py>>,
}

impl<'py> Pages<'py> {
    /// Pages of `page_bytes`: one buffer that holds all of them, or for each an (address, length)
    /// or a buffer. With `writable`, for reads: no two of them overlap.
    pub fn of(
        object: &Bound<'py, PyAny>,
        count: usize,
        page_bytes: usize,
        writable: bool,
    ) -> PyResult<Pages<'py>> {
        let flags = if writable { WRITABLE } else { SIMPLE };
        let mut pages = Pages {
            starts: Vec::with_capacity(count),
            _exported: Vec::new(),
        };
        if let Ok(exported) = Exported::of(object, flags) {
            let (start, length) = exported.piece();
            if length != count.saturating_mul(page_bytes) {
                let needed = count.saturating_mul(page_bytes);
                let said = format!(
                    "{length} bytes for {count} pages of {page_bytes} bytes: {needed} are needed"
                );
                return Err(PyValueError::new_err(said));
            }
            pages
                .starts
                .extend((0..count).map(|at| start + at * page_bytes));
            pages._exported.push(exported);
            return Ok(pages);
        }
        if writable && Exported::of(object, SIMPLE).is_ok() {
            return Err(PyValueError::new_err("the buffer is read-only"));
        }
        for (at, item) in object.try_iter()?.enumerate() {
            let item = item?;
            let (start, length) = match item.cast::<PyTuple>() {
                Ok(pair) => pair.extract::<(usize, usize)>()?,
                Err(_) => {
                    let exported = Exported::of(&item, flags)?;
                    let piece = exported.piece();
                    pages._exported.push(exported);
                    piece
                }
            };
            if length != page_bytes || start.checked_add(length).is_none() || start == 0 {
                let said = format!(
                    "page {at}: {length} bytes at {start:#x} for a page of {page_bytes} bytes"
                );
                return Err(PyValueError::new_err(said));
            }
            pages.starts.push(start);
        }
        if pages.starts.len() != count {
            let said = format!("{} pages for {count} keys", pages.starts.len());
            return Err(PyValueError::new_err(said));
        }
        if writable {
            refuse_overlap(&pages.starts, page_bytes)?;
        }
        Ok(pages)
    }
}

fn refuse_overlap(starts: &[usize], page_bytes: usize) -> PyResult<()> {
    match overlap(starts.iter().map(|&start| (start, page_bytes))) {
        Some(start) => {
            let said = format!("two pages would be read into the memory at {start:#x}");
            Err(PyValueError::new_err(said))
        }
        None => Ok(()),
    }
}

/// Seconds, or none.
pub fn seconds(object: Option<f64>) -> PyResult<Option<Duration>> {
    // A time beyond this has the same effect as it.
    const LONG: f64 = 1e8;
    match object {
        None => Ok(None),
        // `f64::min` would take NaN for the other number.
        Some(seconds) => Duration::try_from_secs_f64(if seconds > LONG { LONG } else { seconds })
            .map(Some)
            .map_err(|_| PyValueError::new_err(format!("{seconds} is no number of seconds"))),
    }
}

/// Bytes: a number, or a text such as `512GiB`.
pub fn size(object: &Bound<'_, PyAny>) -> PyResult<u64> {
    if object.is_instance_of::<PyInt>() {
        return object
            .extract()
            .map_err(|_| PyValueError::new_err(format!("`size`: {object} is no number of bytes")));
    }
    let text: String = object.extract()?;
    let size = text.parse::<larder_tools::size::ByteSize>();
    size.map(|size| size.0)
        .map_err(|error| PyValueError::new_err(format!("`size`: {error}")))
}

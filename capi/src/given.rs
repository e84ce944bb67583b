//! Arguments at the caller's pointers. Only this module reads and writes there, with [`answer`].
//!
//! [`answer`]: mod@crate::answer

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use larder_format::PageKey;
use larder_handle::region::overlap;

use crate::answer::{Failure, caught};
use crate::types::{BATCH_MAX, Char, FOREVER, KEY_BYTES, Options, Part};

/// Bytes of the largest struct of options that is looked at.
const OPTIONS_MAX: usize = 4096;

const _: () = assert!(size_of::<PageKey>() == KEY_BYTES && align_of::<PageKey>() == 1);

fn null(name: &str) -> Failure {
    Failure::argument(format!("`{name}` is NULL"))
}

/// The object at a pointer.
///
/// # Safety
/// The pointer is null, or leads to a live object.
pub(crate) unsafe fn object<'a, T>(at: *const T, name: &str) -> Result<&'a T, Failure> {
    // SAFETY: as the caller guarantees.
    unsafe { at.as_ref() }.ok_or_else(|| null(name))
}

/// Where a result goes.
pub(crate) fn place<T>(at: *mut T, name: &str) -> Result<NonNull<T>, Failure> {
    NonNull::new(at).ok_or_else(|| null(name))
}

/// Checks that there is a place for the statuses of so many pages.
pub(crate) fn place_for(statuses: *mut u8, count: usize) -> Result<(), Failure> {
    match statuses.is_null() && count > 0 {
        true => Err(null("statuses")),
        false => Ok(()),
    }
}

/// Writes a result, unless the pointer is null.
///
/// # Safety
/// The pointer is null, or may be written.
pub(crate) unsafe fn set<T>(at: *mut T, value: T) {
    if !at.is_null() {
        // SAFETY: as the caller guarantees.
        unsafe { at.write(value) };
    }
}

/// Writes one result for each page.
///
/// # Safety
/// So many values may be written at the pointer.
pub(crate) unsafe fn set_all<T: Copy>(at: *mut T, values: &[T]) {
    if !values.is_empty() {
        // SAFETY: as the caller guarantees; the values are the library's, so nothing overlaps.
        unsafe { at.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
    }
}

/// A text.
///
/// # Safety
/// The pointer is null, or leads to bytes with a zero at their end, which stay as they are.
pub(crate) unsafe fn text<'a>(at: *const Char, name: &str) -> Result<&'a str, Failure> {
    let at = place(at.cast_mut(), name)?.cast();
    // SAFETY: as the caller guarantees.
    let text = unsafe { CStr::from_ptr(at.as_ptr()) };
    text.to_str()
        .map_err(|error| Failure::argument(format!("`{name}` is not UTF-8: {error}")))
}

/// `count` values, at most `most`. With none, the pointer does not matter.
///
/// # Safety
/// The pointer is null, or leads to so many values, which stay as they are.
pub(crate) unsafe fn values<'a, T>(
    at: *const T,
    count: usize,
    most: usize,
    name: &str,
) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    if count > most {
        let said = format!("`{name}`: {count} are more than the {most} that one call takes");
        return Err(Failure::argument(said));
    }
    let at = place(at.cast_mut(), name)?;
    if !at.is_aligned() {
        let said = format!(
            "`{name}`: {at:p} is not aligned to {} bytes",
            align_of::<T>()
        );
        return Err(Failure::argument(said));
    }
    // SAFETY: as the caller guarantees; not null, aligned, and of few bytes.
    Ok(unsafe { std::slice::from_raw_parts(at.as_ptr(), count) })
}

/// Keys.
///
/// # Safety
/// As for [`values`].
pub(crate) unsafe fn keys<'a>(at: *const u8, count: usize) -> Result<&'a [PageKey], Failure> {
    // SAFETY: a key is its 32 bytes (`repr(transparent)`), of any alignment.
    unsafe { values(at.cast(), count, BATCH_MAX, "keys") }
}

/// A key that may be absent.
///
/// # Safety
/// The pointer is null, or leads to a key.
pub(crate) unsafe fn key(at: *const u8) -> Option<PageKey> {
    // SAFETY: as the caller guarantees; a key is its 32 bytes.
    unsafe { at.cast::<PageKey>().as_ref() }.copied()
}

/// A copy of options, which may be older or newer than those of this library.
///
/// # Safety
/// The pointer is null, or leads to as many bytes as the struct's first field says.
pub(crate) unsafe fn options<T: Options>(at: *const T) -> Result<T, Failure> {
    let Some(at) = NonNull::new(at.cast_mut().cast::<u8>()) else {
        return Ok(T::DEFAULT);
    };
    let wrong = |why: String| Failure::argument(format!("{}: {why}", T::NAME));
    // SAFETY: the first field of every struct of options.
    let size = unsafe { at.cast::<usize>().read_unaligned() };
    if size < T::FIRST || size > OPTIONS_MAX {
        return Err(wrong(format!(
            "`struct_size` is {size}: set it by the macro of the header"
        )));
    }
    // SAFETY: so many bytes, as the caller guarantees.
    let bytes = unsafe { std::slice::from_raw_parts(at.as_ptr(), size) };
    let (known, unknown) = bytes.split_at(size.min(size_of::<T>()));
    if let Some(at) = unknown.iter().position(|byte| *byte != 0) {
        let at = known.len() + at;
        return Err(wrong(format!(
            "the field at byte {at} is unknown to this library, which is older than the program's \
             header; leave it 0, or install a newer library"
        )));
    }
    let mut options = MaybeUninit::<T>::zeroed();
    // SAFETY: no more bytes than the struct has, and the copy is the library's.
    unsafe {
        options
            .as_mut_ptr()
            .cast::<u8>()
            .copy_from_nonoverlapping(known.as_ptr(), known.len());
    }
    // SAFETY: fields of the caller, and zeros in place of unknown ones.
    Ok(unsafe { options.assume_init() })
}

/// The first byte of each part, page after page. With `apart`, no two parts overlap.
///
/// # Safety
/// The pointer is null, or leads to the parts of so many pages.
pub(crate) unsafe fn part_starts(
    at: *const Part,
    pages: usize,
    sizes: &[usize],
    apart: bool,
) -> Result<Vec<usize>, Failure> {
    let count = pages.saturating_mul(sizes.len());
    let most = BATCH_MAX.saturating_mul(sizes.len());
    // SAFETY: as the caller guarantees.
    let parts = unsafe { values(at, count, most, "parts") }?;
    let mut starts = Vec::with_capacity(count);
    for (at, (part, &bytes)) in parts.iter().zip(sizes.iter().cycle()).enumerate() {
        let start = part.base.expose_provenance();
        let is_memory = start != 0 && start.checked_add(bytes).is_some();
        if !is_memory || part.length != bytes {
            let (page, part_of_page) = (at / sizes.len(), at % sizes.len());
            return Err(Failure::argument(format!(
                "`parts`: page {page}, part {part_of_page}: {} bytes at {start:#x}, but the part \
                 has {bytes} bytes in this namespace",
                part.length
            )));
        }
        starts.push(start);
    }
    let pieces = starts.iter().copied().zip(sizes.iter().copied().cycle());
    if apart && let Some(start) = overlap(pieces) {
        let said = format!("`parts`: two parts would be read into the memory at {start:#x}");
        return Err(Failure::argument(said));
    }
    Ok(starts)
}

/// The moment after so many milliseconds; `None` stands for no limit.
pub(crate) fn moment(milliseconds: u64) -> Option<Instant> {
    if milliseconds == FOREVER {
        return None;
    }
    Instant::now().checked_add(Duration::from_millis(milliseconds))
}

/// Frees an object, unless the pointer is null.
///
/// # Safety
/// The pointer is null, or comes from `Box::into_raw`, and this is its last use.
pub(crate) unsafe fn release<T>(name: &'static str, at: *mut T) {
    if !at.is_null() {
        // SAFETY: as the caller guarantees.
        let object = unsafe { Box::from_raw(at) };
        caught(name, || drop(object));
    }
}

//! The descriptors 0 to 2, which belong to the program and never to a library in it.
//!
//! A program may run with some of them closed: a supervisor started it so, or it closed them. The
//! next file opened gets such a number, and text for standard output or standard error goes into
//! that file.
//!
//! A library that keeps descriptors calls [`cover`] before it makes one. `/dev/null` then has the
//! free numbers, for good, as in programs that run with another user's rights and as in the runtime
//! of Rust programs. The alternative is to move each new descriptor to a higher number
//! (`F_DUPFD_CLOEXEC`). It does not reach the descriptors that other crates make (rings, event
//! loops, connections), and leaves a moment in which the file has the low number.
//!
//! The program notices one difference: what it writes to a closed descriptor is lost without an
//! error. The programs that it starts notice none: their descriptors are closed as before.

use std::ffi::CStr;
use std::io;

/// The descriptors of the program.
const STANDARD: std::ops::RangeInclusive<libc::c_int> = libc::STDIN_FILENO..=libc::STDERR_FILENO;

/// The file in the place of a closed one.
const NOTHING: &CStr = c"/dev/null";

/// Makes sure that no descriptor made after this call has a number below 3.
///
/// # Errors
/// `/dev/null` cannot be opened.
pub fn cover() -> io::Result<()> {
    if STANDARD.into_iter().all(is_open) {
        return Ok(());
    }
    loop {
        // SAFETY: the path ends with a zero byte.
        let fd = unsafe { libc::open(NOTHING.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
        if fd < 0 {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                Some(libc::EINTR) => continue,
                // The limit on open files, as for any other file.
                Some(libc::EMFILE | libc::ENFILE) => Err(error),
                _ => Err(io::Error::other(format!(
                    "a standard descriptor (0, 1 or 2) is closed, and /dev/null cannot take its \
                     place: {error}; start the program with these descriptors open"
                ))),
            };
        }
        // The kernel gives the lowest free number: none below 3 is left.
        if !STANDARD.contains(&fd) {
            // SAFETY: the descriptor was opened above, and nothing else knows its number.
            unsafe { libc::close(fd) };
            return Ok(());
        }
    }
}

fn is_open(fd: libc::c_int) -> bool {
    // SAFETY: the call reads a flag of a number, which may be that of no open file.
    unsafe { libc::fcntl(fd, libc::F_GETFD) >= 0 }
}

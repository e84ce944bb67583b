//! The `larder` binary: the command line of [`larder_tools`].

#![forbid(unsafe_code)]

use std::process::ExitCode;

use larder_tools::cli::{Program, complain, run};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

/// The error with which `getrandom` is refused, if the standard library would panic at it. It
/// panics at every error but the known ones.
fn is_randomness_refused() -> Option<Errno> {
    let drawn = getrandom(&mut [0_u8; 8], GetRandomFlags::NONBLOCK);
    let known = [Errno::NOSYS, Errno::PERM, Errno::AGAIN, Errno::INTR];
    drawn.err().filter(|error| !known.contains(error))
}

/// The allocator of musl takes one lock for all threads.
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    if let Some(error) = is_randomness_refused() {
        complain(&format_args!(
            "getrandom is refused ({error}): allow it in the container's seccomp profile"
        ));
        return ExitCode::from(3);
    }
    ExitCode::from(run(&Program::running(), std::env::args_os().skip(1)))
}

//! Random bytes for identities and secrets.

use std::io;

use crate::system::processes;

/// Random bytes from the device. A container profile may refuse `getrandom`.
///
/// # Errors
/// If `/dev/urandom` cannot be read.
pub fn random_bytes<const COUNT: usize>() -> io::Result<[u8; COUNT]> {
    let mut bytes = [0; COUNT];
    processes::fill_random(&mut bytes)?;
    Ok(bytes)
}

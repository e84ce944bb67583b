//! Random bytes for identities and secrets.

use std::fs::File;
use std::io::{self, Read};

/// Random bytes from the device. A container profile may refuse `getrandom`.
///
/// # Errors
/// If `/dev/urandom` cannot be read.
pub fn random_bytes<const COUNT: usize>() -> io::Result<[u8; COUNT]> {
    let mut bytes = [0; COUNT];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

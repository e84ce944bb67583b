//! What the processes of a group say to each other: frames over a Unix stream socket.
//!
//! A frame is a length (`u32`, little-endian, at most [`FRAME_BYTES_MAX`]) and that many bytes: one message in postcard's encoding.
//!
//! Faults defended against: lengths beyond the limit, frames that end early, bytes that are no message or more than one.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

use super::{RanksError, Reduce, VALUES_MAX};

/// First bytes of a conversation.
pub(super) const MAGIC: [u8; 8] = *b"LARDERRK";

/// Version of the messages.
pub(super) const VERSION: u32 = 1;

/// Longest frame, in bytes: a call of [`VALUES_MAX`] values of up to 10 bytes, or the names of all ranks, with room to spare.
const FRAME_BYTES_MAX: usize = 16 * VALUES_MAX + 4096;

/// What a rank says to its host.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Said {
    /// First of all.
    Join {
        magic: [u8; 8],
        version: u32,
        rank: u32,
        size: u32,
    },
    /// One call.
    Call { reduce: Reduce, values: Vec<u64> },
}

/// What it is answered: nothing to a join that succeeded, the values to a call.
pub(super) type Answer = Result<Vec<u64>, RanksError>;

pub(super) fn send(mut to: impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut frame = postcard::to_extend(message, vec![0; 4]).map_err(io::Error::other)?;
    let bytes = u32::try_from(frame.len() - 4).map_err(io::Error::other)?;
    frame[..4].copy_from_slice(&bytes.to_le_bytes());
    to.write_all(&frame)
}

/// The next message; [`io::ErrorKind::UnexpectedEof`] where there is none, [`io::ErrorKind::InvalidData`] where it is none.
pub(super) fn receive<T: for<'a> Deserialize<'a>>(mut from: impl Read) -> io::Result<T> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    let bytes = u32::from_le_bytes(bytes) as usize;
    if bytes > FRAME_BYTES_MAX {
        return Err(garbled(format!("a frame of {bytes} bytes")));
    }
    let mut frame = vec![0; bytes];
    from.read_exact(&mut frame)?;
    match postcard::take_from_bytes(&frame) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(garbled(format!("{} bytes too many", rest.len()))),
        Err(error) => Err(garbled(format!("no message ({error})"))),
    }
}

fn garbled(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

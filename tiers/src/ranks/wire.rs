//! The messages between the processes of a group: frames over a Unix stream socket.
//!
//! A frame is a length (`u32`, little-endian, at most [`FRAME_BYTES_MAX`]) followed by that many
//! bytes: one message in postcard encoding.
//!
//! Faults covered: lengths beyond the limit, frames that end early, bytes that are not exactly one
//! message.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

use super::{RanksError, Reduce, VALUES_MAX};

/// First bytes of a connection.
pub(super) const MAGIC: [u8; 8] = *b"LARDERRK";

/// Version of the messages.
pub(super) const VERSION: u32 = 2;

/// Maximum length of a frame, in bytes: a call of [`VALUES_MAX`] values of up to 10 bytes, or the
/// numbers of all ranks, with a margin.
const FRAME_BYTES_MAX: usize = 16 * VALUES_MAX + 4096;

/// A message from a rank to its host.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Message {
    /// The first message.
    Join {
        magic: [u8; 8],
        version: u32,
        rank: u32,
        size: u32,
    },
    /// A call.
    Call { reduce: Reduce, values: Vec<u64> },
}

/// The answer of the host: no values for a successful join, the reduced values for a call.
pub(super) type Answer = Result<Vec<u64>, RanksError>;

pub(super) fn send(mut to: impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut frame = postcard::to_extend(message, vec![0; 4]).map_err(io::Error::other)?;
    let bytes = u32::try_from(frame.len() - 4).map_err(io::Error::other)?;
    frame[..4].copy_from_slice(&bytes.to_le_bytes());
    to.write_all(&frame)
}

/// Reads the next message. [`io::ErrorKind::UnexpectedEof`] if the connection has ended,
/// [`io::ErrorKind::InvalidData`] if the bytes are not a message.
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
        Err(error) => Err(garbled(format!("an invalid message ({error})"))),
    }
}

fn garbled(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

//! Frames: the bytes of one message on a stream, and the errors of invalid ones.

use std::io::{self, Read, Write};
use std::time::Duration;

use larder_base::runtime::Instant;
use larder_base::system::sockets::{self, Pollable};
use serde::{Deserialize, Serialize};

use super::FRAME_BYTES_MAX;
use crate::protocol::variants;

/// A stream of frames that ended or was invalid.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("a frame of {0} bytes is longer than the {FRAME_BYTES_MAX} that are allowed")]
    TooLong(usize),
    #[error("the bytes are no message: {0}")]
    Nonsense(postcard::Error),
    #[error("{0} bytes follow the message in its frame")]
    Trailing(usize),
    #[error("message {0} is unknown to this release")]
    Unknown(u32),
}

/// Writes one message.
pub fn send<T: Serialize>(
    stream: &mut impl Write,
    buffer: &mut Vec<u8>,
    message: &T,
) -> Result<(), WireError> {
    buffer.clear();
    buffer.extend_from_slice(&[0; 4]);
    let mut filled =
        postcard::to_extend(message, std::mem::take(buffer)).map_err(WireError::Nonsense)?;
    let bytes = filled.len() - 4;
    if bytes > FRAME_BYTES_MAX {
        return Err(WireError::TooLong(bytes));
    }
    let length = u32::try_from(bytes).unwrap_or(u32::MAX);
    filled[..4].copy_from_slice(&length.to_le_bytes());
    stream.write_all(&filled)?;
    *buffer = filled;
    Ok(())
}

/// Waits until data arrives or the stream ends, at most `patience` (without a limit when it is
/// `None`). False after the limit.
pub(in crate::share) fn arrives(
    stream: &impl Pollable,
    patience: Option<Duration>,
) -> io::Result<bool> {
    let until = patience.map(|patience| Instant::now() + patience);
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        match sockets::poll(stream, left) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}

/// Reads one frame into `buffer`. False at the end of the stream, between two frames.
pub fn receive(stream: &mut impl Read, buffer: &mut Vec<u8>) -> Result<bool, WireError> {
    let mut length = [0; 4];
    let first = loop {
        match stream.read(&mut length) {
            Ok(count) => break count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    };
    if first == 0 {
        return Ok(false);
    }
    stream.read_exact(&mut length[first..])?;
    let bytes = u32::from_le_bytes(length) as usize;
    if bytes > FRAME_BYTES_MAX {
        return Err(WireError::TooLong(bytes));
    }
    buffer.clear();
    // Allocates by the bytes that arrive, not by the announced length.
    let read = stream.take(bytes as u64).read_to_end(buffer)?;
    if read < bytes {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    Ok(true)
}

/// The message in a frame.
///
/// # Errors
/// [`WireError::Unknown`] when the message was appended by a later release.
pub fn parse<'a, T: Deserialize<'a>>(frame: &'a [u8]) -> Result<T, WireError> {
    match postcard::take_from_bytes(frame) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(WireError::Trailing(rest.len())),
        Err(error) => Err(unknown::<T>(frame).unwrap_or(WireError::Nonsense(error))),
    }
}

/// The message at the begin of a frame, whose rest belongs to fields of a later release.
pub fn parse_greeting<'a, T: Deserialize<'a>>(frame: &'a [u8]) -> Result<T, WireError> {
    match postcard::take_from_bytes(frame) {
        Ok((message, _)) => Ok(message),
        Err(error) => Err(unknown::<T>(frame).unwrap_or(WireError::Nonsense(error))),
    }
}

/// The error of a frame whose message `T` does not have.
fn unknown<'a, T: Deserialize<'a>>(frame: &[u8]) -> Option<WireError> {
    let (number, _) = postcard::take_from_bytes::<u32>(frame).ok()?;
    let is_known = variants::<T>().get(number as usize).is_some();
    (!is_known).then_some(WireError::Unknown(number))
}

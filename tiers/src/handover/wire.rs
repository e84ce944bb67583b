//! The messages of a hand-over: frames over a Unix stream socket.
//!
//! A frame is a length (`u32`, little-endian, at most [`FRAME_BYTES_MAX`]) followed by that many
//! bytes: one message in postcard encoding.
//!
//! ```text
//!   decode   --Take-->                                          --Returned-->  prefill
//!            <--Lent (with the memory)-- <--Layers-- ... <--End--
//!            <--Refused--                  at any time instead
//! ```
//!
//! Faults covered: lengths beyond the limit, frames that end early, bytes that are not exactly one
//! message.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use larder_base::system::sockets::{self, UnixStream};
use serde::{Deserialize, Serialize};

use super::error::{HandoverError, garbled};
use super::memory::Loan;

/// First bytes of a connection.
pub(super) const MAGIC: [u8; 8] = *b"LARDERHO";

/// Version of the messages and of the memory.
pub(super) const VERSION: u32 = 2;

/// Maximum length of a frame, in bytes.
const FRAME_BYTES_MAX: usize = 1 << 20;

/// Maximum number of pages of a hand-over: five bytes each in a frame.
pub(super) const PAGES_MAX: usize = 1 << 17;

/// A message to the prefill process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToPrefill {
    /// The first message.
    Take(Take),
    /// The rows have been copied: the memory is returned.
    Returned,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Take {
    pub(super) magic: [u8; 8],
    pub(super) version: u32,
    pub(super) id: String,
    /// The fingerprint of the namespace.
    pub(super) namespace: Vec<u8>,
    /// The digest of the prompt.
    pub(super) prompt: [u8; 32],
    /// The memory that is mapped already.
    pub(super) memory: Option<u64>,
}

/// A message to the decode process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToDecode {
    Lent(Lent),
    /// Layers, and how many tokens of each are in the memory.
    Layers(Vec<(u32, u32)>),
    /// All rows are in the memory.
    End {
        token: u64,
        data: Vec<u8>,
    },
    Refused(Refusal),
}

/// The answer to [`Take`]. The file of the memory is attached unless it is mapped already.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Lent {
    /// Names the memory.
    pub(super) memory: u64,
    /// All blocks of the memory.
    pub(super) blocks: u32,
    /// The first token with rows in the memory: a multiple of the page size.
    pub(super) from: u32,
    /// The blocks of its pages, in order.
    pub(super) loan: Loan,
}

/// Why a hand-over does not take place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Refusal {
    Version(u32),
    Namespace,
    Prompt,
    Taken,
    Cancelled,
    Late,
    Closed,
    Crowded,
}

/// A message as a frame.
pub(super) fn frame(message: &impl Serialize) -> Result<Vec<u8>, HandoverError> {
    let encoded = postcard::to_extend(message, vec![0; 4]);
    let mut frame = encoded.map_err(|error| garbled(format!("no message ({error})")))?;
    let bytes = frame.len() - 4;
    let length = u32::try_from(bytes)
        .ok()
        .filter(|_| bytes <= FRAME_BYTES_MAX);
    let length = length.ok_or_else(|| garbled(format!("a frame of {bytes} bytes")))?;
    frame[..4].copy_from_slice(&length.to_le_bytes());
    Ok(frame)
}

/// The received bytes of a connection that are not processed yet.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
    file: Option<OwnedFd>,
}

impl Inbox {
    /// Reads the bytes that have arrived. The stream does not block. False at its end.
    ///
    /// # Errors
    /// The connection is lost.
    pub(super) fn read(&mut self, stream: &UnixStream) -> io::Result<bool> {
        let mut chunk = [0; 16 << 10];
        loop {
            match sockets::receive(stream, &mut chunk) {
                Ok((0, _)) => return Ok(false),
                Ok((bytes, file)) => {
                    self.bytes.extend_from_slice(&chunk[..bytes]);
                    self.file = file.or(self.file.take());
                    if self.bytes.len() > FRAME_BYTES_MAX + 4 {
                        return Ok(true);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The next whole message.
    ///
    /// # Errors
    /// The bytes are no message.
    pub(super) fn next<T: for<'a> Deserialize<'a>>(&mut self) -> Result<Option<T>, HandoverError> {
        let Some((length, rest)) = self.bytes.split_first_chunk() else {
            return Ok(None);
        };
        let bytes = u32::from_le_bytes(*length) as usize;
        if bytes > FRAME_BYTES_MAX {
            return Err(garbled(format!("a frame of {bytes} bytes")));
        }
        let Some(frame) = rest.get(..bytes) else {
            return Ok(None);
        };
        let message = match postcard::take_from_bytes(frame) {
            Ok((message, [])) => message,
            Ok((_, rest)) => return Err(garbled(format!("{} bytes too many", rest.len()))),
            Err(error) => return Err(garbled(format!("an invalid message ({error})"))),
        };
        self.bytes.drain(..4 + bytes);
        Ok(Some(message))
    }

    /// The file that came with the messages so far.
    pub(super) fn take_file(&mut self) -> Option<OwnedFd> {
        self.file.take()
    }
}

/// Waits until a stream has data or ends, at most `wait`.
///
/// # Errors
/// The system's.
pub(super) fn arrives(stream: &UnixStream, wait: Duration) -> io::Result<bool> {
    match sockets::poll(stream, Some(wait)) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(false),
        outcome => outcome,
    }
}

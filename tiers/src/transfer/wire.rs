//! The messages between two ranks, and between a rank and the bootstrap place.
//!
//! ```text
//!   frame    bytes u32 | checksum u64 | message in postcard | rows of a chunk
//! ```
//!
//! Numbers are little-endian. The checksum is the CRC-64 of pages. It covers the name of the link
//! ([`Name`]), the number of the frame in its direction, its length, and its bytes. So a frame that
//! is damaged, lost, repeated, or of another request is found.

use std::ops::Range;
use std::time::Duration;

use larder_format::{Fingerprint, PageChecksum, PageKey};
use serde::{Deserialize, Serialize};

use super::part::{Entry, Held};
use super::{Room, TransferError};

/// First bytes of a connection.
pub(super) const MAGIC: [u8; 12] = *b"LARDERTX\x01\0\0\0";

/// Bytes before the message of a frame.
pub(super) const HEAD_BYTES: usize = 12;

/// The most bytes of a frame, besides the rows of a chunk: page numbers of a long prompt.
pub(super) const MESSAGE_BYTES_MAX: usize = 8 << 20;

/// The name under which frames are checked. The first frame of each direction has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name {
    pub(super) namespace: Fingerprint,
    /// [`Sequence::digest`](crate::prefix::Sequence::digest).
    pub(super) prompt: PageKey,
}

impl Name {
    pub(super) const NONE: Name = Name {
        namespace: Fingerprint::from_bytes([0; 16]),
        prompt: PageKey::from_bytes([0; 32]),
    };

    /// The checksum of a frame.
    pub(super) fn checksum(&self, number: u64, bytes: &[u8]) -> u64 {
        let mut checksum = PageChecksum::new(self.namespace, &self.prompt);
        let place = [number, bytes.len() as u64].map(u64::to_le_bytes);
        checksum.part(place.as_flattened());
        checksum.part(bytes);
        checksum.finish()
    }
}

/// What a receiver wants from a sender.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) room: Room,
    /// Encoded, of the whole model.
    pub(super) namespace: Vec<u8>,
    /// Of the receivers.
    pub(super) rank: u32,
    pub(super) ranks: u32,
    /// `None`: only the note.
    pub(super) wants: Option<Held>,
    /// The tokens whose rows it wants: up to the end of its prompt.
    pub(super) tokens: Range<u64>,
    pub(super) prompt: [u8; 32],
    /// The pages of these tokens, in order.
    pub(super) pages: Vec<u32>,
    pub(super) silence_ms: u64,
}

/// The place of the rows of a chunk: one head of one part of a page, in the order of `page_head`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ChunkOf {
    /// The number of the page, of the receiver.
    pub(super) page: u32,
    /// Its number among the pages that the receiver wants.
    pub(super) at: u32,
    pub(super) part: u32,
    /// Of the whole model.
    pub(super) head: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    /// To the place.
    Register(Entry),
    /// The answer of the place.
    Registered,
    /// To the place: which ranks are there?
    Ask,
    /// The answer of the place.
    Known(Vec<Entry>),
    /// The first message of a receiver.
    Hello(Hello),
    /// The first message of a sender: both have agreed.
    Welcome { namespace: Vec<u8>, silence_ms: u64 },
    /// Rows follow.
    Chunk(ChunkOf),
    /// A sender has sent everything, with its note.
    Last { chunks: u64, note: Vec<u8> },
    /// A receiver has everything.
    Done,
    /// A sign.
    Alive,
    /// The last message of a side that has failed.
    Failed(TransferError),
}

/// A time in a message.
pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The error of the other side, as this side has it.
pub(super) fn of_other(peer: &str, error: TransferError) -> TransferError {
    match error {
        TransferError::Refused(refusal) => refusal.into(),
        error => TransferError::Other {
            peer: peer.to_owned(),
            why: error.to_string(),
        },
    }
}

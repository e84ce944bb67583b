//! Errors of a hand-over.

use std::time::Duration;

use larder_kernels::DeviceError;

use super::wire::{Refusal, VERSION};
use crate::prefix::{BeginError, Closed, SequenceError};

/// Why a hand-over has failed: its state is [`State::Failed`](super::State::Failed). It holds no
/// page and no memory any more, on either side. The prompt can be computed by either process, or
/// offered and taken again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandoverError {
    /// The socket does not work.
    #[error("{what} {path} failed: {why}")]
    Socket {
        /// The failed operation.
        what: &'static str,
        /// The path of the socket.
        path: String,
        /// The system error.
        why: String,
    },
    /// There is no memory to lend, or it cannot be mapped.
    #[error("{bytes} bytes of memory to lend: {why}; give less memory, or look at the limits")]
    Memory {
        /// Bytes.
        bytes: u64,
        /// The system error.
        why: String,
    },
    /// Other requests have the memory now.
    #[error(
        "{needed} pages of memory are needed, {free} of {all} are free; offer it again when others \
         have been taken, offer fewer of its pages, or give more memory"
    )]
    NoRoom {
        /// Pages of the request that go through the memory.
        needed: usize,
        /// Pages that are not lent.
        free: usize,
        /// All pages of the memory.
        all: usize,
    },
    /// The other process belongs to another user.
    #[error("the other process belongs to user {uid}; run both as one user")]
    Foreign {
        /// Its user.
        uid: u32,
    },
    /// The other process has sent something that is no message.
    #[error("the other process sent {what}; run the same version in both")]
    Garbled {
        /// A description.
        what: String,
    },
    /// The other process has another version of the protocol.
    #[error("the other process has version {theirs} of the protocol, this one {VERSION}")]
    Version {
        /// Its version.
        theirs: u32,
    },
    /// The caches have different namespaces.
    #[error("the caches have different namespaces; give both the same model and head groups")]
    Namespace,
    /// The prompts differ.
    #[error(
        "request {id:?} was offered with another prompt, salt or weights than it is taken with"
    )]
    Prompt {
        /// The request.
        id: String,
    },
    /// A request of this name is on offer already, or was taken by another process.
    #[error("request {id:?} is offered or taken already; give each request a name of its own")]
    Twice {
        /// The request.
        id: String,
    },
    /// The other process has ended, or its connection has.
    #[error("the other process has ended before the hand-over was over")]
    Gone,
    /// The time for the hand-over is over.
    #[error("{what} did not come within {timeout:?}; the other process is stopped or too slow")]
    Late {
        /// What was missing.
        what: &'static str,
        /// The time that the caller gave.
        timeout: Duration,
    },
    /// The memory was taken back before all rows were copied.
    #[error("the prefill process took its memory back before all rows were copied")]
    TakenBack,
    /// The engine has dropped the offer or the request.
    #[error("the other engine has dropped the request")]
    Cancelled,
    /// The prefill process accepts no more requests.
    #[error("the prefill process has ended its hand-overs, or serves too many")]
    Closed,
    /// The rows of another sequence than the offered one, or of a layer or tokens that do not
    /// exist.
    #[error("{what}; pass the sequence, and layers and tokens that it has")]
    NoSuchRows {
        /// What does not exist.
        what: &'static str,
    },
    /// The rows of a layer are not in the memory.
    #[error("layer {layer} has {tokens} of {all} tokens in the memory; report them before the end")]
    NotComputed {
        /// The layer.
        layer: u32,
        /// Its tokens in the memory.
        tokens: usize,
        /// Tokens of the request.
        all: usize,
    },
    /// The data of the engine are too long.
    #[error("{bytes} bytes of data are more than {max}")]
    TooLong {
        /// Bytes.
        bytes: usize,
        /// The most.
        max: usize,
    },
    /// The cache cannot hand over or take.
    #[error("{what} cannot be handed over yet")]
    Unsupported {
        /// The property that is not supported.
        what: &'static str,
    },
    /// A load of a cached page, a forward behind a copy, or a copy has failed.
    #[error("rows cannot be read or copied: {0}; drop the sequence, and ask again")]
    Load(DeviceError),
    /// L1 of the decode process has no room, or its cache is closed.
    #[error("no sequence: {0}")]
    Begin(String),
    /// The sequence is broken, or its cache is closed.
    #[error(transparent)]
    Sequence(#[from] SequenceError),
}

pub(super) fn garbled(what: String) -> HandoverError {
    HandoverError::Garbled { what }
}

impl From<BeginError> for HandoverError {
    fn from(error: BeginError) -> HandoverError {
        HandoverError::Begin(error.to_string())
    }
}

impl From<Closed> for HandoverError {
    fn from(closed: Closed) -> HandoverError {
        HandoverError::Sequence(closed.into())
    }
}

impl HandoverError {
    /// As the decode process sees the refusal of request `id`.
    pub(super) fn of(refusal: Refusal, id: &str, timeout: Duration) -> HandoverError {
        let id = id.to_owned();
        match refusal {
            Refusal::Version(theirs) => HandoverError::Version { theirs },
            Refusal::Namespace => HandoverError::Namespace,
            Refusal::Prompt => HandoverError::Prompt { id },
            Refusal::Taken => HandoverError::Twice { id },
            Refusal::Cancelled => HandoverError::Cancelled,
            Refusal::Late => HandoverError::Late {
                what: "the answer of this process",
                timeout,
            },
            Refusal::Closed | Refusal::Crowded => HandoverError::Closed,
        }
    }
}

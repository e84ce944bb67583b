//! Pages of a request, from the ranks of one engine (prefill) to the ranks of another (decode), on
//! another node.
//!
//! A [`Transport`] is a network engine as one rank uses it. [`TcpTransport`] is one for tests and
//! small loads; a deployment puts NIXL or Mooncake behind the trait. Both engines may have any
//! number of ranks: each receiver takes the layers and heads that it holds from the senders that
//! have them, as `page_head` divides a page.
//!
//! ```text
//!   prefill ranks             bootstrap place             decode ranks
//!      | address, rank ------------>|                          |
//!      |                            |<----- which ranks? ------|
//!      |<------- namespace, prompt, page numbers --------------|   Bootstrapping
//!      |------------------- agreed --------------------------->|   WaitingForInput
//!      |------- chunks of rows, each with its checksum ------->|   Transferring
//!      |------------------- note, end ------------------------>|
//!      |<------------------ all is there ----------------------|   Success
//! ```
//!
//! # Who owns which memory
//!
//! A transfer owns its [`Sequence`], and gives it back when it ends ([`Transfer::end`]). So no
//! other code frees or writes a page that a transfer may still read or write.
//!
//! | state | sender | receiver |
//! |---|---|---|
//! | `Bootstrapping` | some receivers have not come | some senders have not agreed |
//! | `WaitingForInput` | all have come, and it has no sequence | no row has come |
//! | `Transferring` | it reads the computed rows | it writes the own rows of its sequence |
//! | `Success` | all receivers have all rows | its rows are those of the senders |
//! | `Failed` | it reads nothing any more | its rows have any bytes, and stay as they are |
//!
//! `Success` and `Failed` are final. A transport reports one of them only after it has made sure
//! that none of its accesses, and no write of another node, can still reach the pages. A network
//! engine that writes into remote memory has a fence for that: it ends the connection, or takes the
//! registration of the memory back.
//!
//! # What happens when a side fails
//!
//! A side that dies, stops, or cannot be reached is silent. The other side is `Failed` at most
//! [`Patience::silence`] after the last sign of it; before both sides have agreed, at most
//! [`Patience::bootstrap`] after its own start. A side that ends its transfer early tells the other
//! one. A damaged chunk fails the transfer: its checksum covers the namespace, the prompt and its
//! place. The message that all is there can be lost: then a receiver is `Success` and its sender is
//! `Failed`. The reverse does not happen.
//!
//! The ranks of an engine may see different ends. They use the least state of all
//! ([`State::value`], [`Ranks::min`](crate::ranks::Ranks::min)): `Failed` is the least.
//!
//! # In an engine
//!
//! ```no_run
//! # use larder_tiers::{Sequence, transfer::{Room, State, Transport, TransferError}};
//! # fn prefill(transport: &dyn Transport, sequence: Sequence) -> Result<(), TransferError> {
//! let sending = transport.sender(Room(7))?; // when the request arrives
//! let sending = sending.send(sequence, &1_u64.to_le_bytes()); // computed, with the first token
//! while !sending.state().is_final() { /* other requests */ }
//! let ended = sending.end();
//! # Ok(()) }
//! # fn decode(transport: &dyn Transport, sequence: Sequence, prompt: &[u64])
//! #     -> Result<(), Box<dyn std::error::Error>> {
//! let receiving = transport.receiver(Room(7), "10.0.0.1:8998", sequence).map_err(|no| no.error)?;
//! while !receiving.state().is_final() { /* other requests */ }
//! let ended = receiving.end();
//! if let (Some(mut sequence), Ok(note)) = (ended.sequence, ended.outcome) {
//!     sequence.computed(prompt.len())?;
//!     sequence.share()?; // into the tree, and from there to L2 and L3
//!     sequence.push(u64::from_le_bytes(note[..8].try_into()?))?;
//! }
//! # Ok(()) }
//! ```
//!
//! A module imports only the modules below it.
//!
//! | module | contents |
//! |---|---|
//! | `tcp` | the transport over TCP, and its listener |
//! | `send`, `receive` | one transfer |
//! | `place` | the bootstrap place |
//! | `slot` | what a handle and its thread share |
//! | `rows` | rows of a sequence as chunks |
//! | `link` | a connection |
//! | `wire` | the messages |
//! | `part` | layers and heads of ranks, and the comparison of namespaces |

mod link;
mod part;
mod place;
mod receive;
mod rows;
mod send;
mod slot;
mod tcp;
mod wire;

use std::time::Duration;

use larder_format::NamespaceError;
use serde::{Deserialize, Serialize};

use crate::prefix::Sequence;
use crate::ranks::TIMEOUT_MAX;

pub use part::Held;
pub use place::BootstrapPlace;
pub use tcp::{TcpOptions, TcpTransport};

/// The least time of silence. Shorter ones are raised to it.
const SILENCE_MIN: Duration = Duration::from_millis(20);

/// The most bytes of a note.
pub const NOTE_BYTES_MAX: usize = 1 << 20;

/// Names a request on all ranks of both engines. A second attempt has another name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Room(pub u64);

/// How far a transfer is: see the module documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// It has failed, for good.
    Failed,
    /// The sides have not agreed.
    Bootstrapping,
    /// The sides have agreed, and no row has been moved.
    WaitingForInput,
    /// Rows are being moved.
    Transferring,
    /// All rows have arrived.
    Success,
}

impl State {
    /// Whether it does not change any more.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, State::Failed | State::Success)
    }

    /// Its place in the order, for the minimum over ranks.
    #[must_use]
    pub fn value(self) -> u64 {
        self as u64
    }
}

/// How long a side waits for the other one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// From the start of a transfer until both sides have agreed.
    pub bootstrap: Duration,
    /// From a sign of the other side until the next one. Signs do not depend on the engine: a
    /// prefill may take any time. Give the same on both sides, at least some seconds on a busy
    /// machine.
    pub silence: Duration,
}

impl Default for Patience {
    /// 300 s and 30 s.
    fn default() -> Patience {
        Patience {
            bootstrap: Duration::from_secs(300),
            silence: Duration::from_secs(30),
        }
    }
}

impl Patience {
    /// With times that a clock can add, and that leave time for signs.
    fn bounded(self) -> Patience {
        let bounded = |time: Duration| time.clamp(SILENCE_MIN, TIMEOUT_MAX);
        Patience {
            bootstrap: bounded(self.bootstrap),
            silence: bounded(self.silence),
        }
    }
}

/// The time between two signs, for sides that wait so long for one.
fn beat(own: Duration, other: Duration) -> Duration {
    own.min(other).max(SILENCE_MIN) / 4
}

/// A network engine, as one rank of an engine uses it. See the module documentation for the duties
/// of an implementation.
pub trait Transport: Send + Sync {
    /// Prefill: expects the receivers of a request. Does not wait.
    ///
    /// # Errors
    /// The room is in use, or the transport cannot start.
    fn sender(&self, room: Room) -> Result<Box<dyn Sending>, TransferError>;

    /// Decode: fetches the rows that a sequence does not have in its cache, up to the end of its
    /// prompt. `from` is the bootstrap place of the other engine, in the form of the transport.
    /// Does not wait.
    ///
    /// # Errors
    /// The place is not valid, or the transport cannot start: the sequence comes back.
    fn receiver(
        &self,
        room: Room,
        from: &str,
        sequence: Sequence,
    ) -> Result<Box<dyn Transfer>, Box<NotBegun>>;
}

/// One transfer, as one rank sees it. A drop ends it and its sequence.
pub trait Transfer: Send {
    /// How far it is. Does not wait.
    fn state(&self) -> State;

    /// Waits until it has ended, at most so long. For a thread of its own: ranks that poll their
    /// cache in a loop ask for the state.
    fn wait(&self, most: Duration) -> State;

    /// Ends the transfer, and returns the sequence when no access of the transfer can reach its
    /// pages any more. Fails it if it has not ended: the other side fails, too. That waits for an
    /// access in progress, not for the other side.
    fn end(self: Box<Self>) -> Ended;
}

/// The transfer of a sender.
pub trait Sending: Transfer {
    /// Sends the rows of the prompt. All of them are computed, and
    /// [`Sequence::verify`] was true: rows of a failed forward would be sent as they are. `note` is
    /// for the engine of the receivers: the first token, data of sampling. All ranks give the same.
    /// The receivers need not have come. Does not wait.
    fn send(self: Box<Self>, sequence: Sequence, note: &[u8]) -> Box<dyn Transfer>;
}

/// The end of a transfer.
#[must_use]
pub struct Ended {
    /// The sequence. A sender that was given none has none.
    pub sequence: Option<Sequence>,
    /// Of a receiver: the note of the senders. Of a sender: nothing.
    pub outcome: Result<Vec<u8>, TransferError>,
}

/// A receiver that could not start.
pub struct NotBegun {
    /// Why.
    pub error: TransferError,
    /// The sequence, unchanged.
    pub sequence: Sequence,
}

impl std::fmt::Debug for NotBegun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)
    }
}

/// Why the two sides do not transfer a request. Both have the same.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum Refusal {
    /// The pages of the engines have different meanings.
    #[error("the namespaces of prefill and decode differ: {0}; give both engines the same model")]
    Namespace(String),
    /// The prompts, their scopes or the weights differ.
    #[error(
        "room {0} has different prompts, extra keys, salts or weights on its two sides; give each \
         request a room of its own, and both engines the same weights"
    )]
    Prompt(u64),
    /// The ranks do not fit each other.
    #[error("{0}; start all ranks of an engine with their numbers and their parts of the model")]
    Ranks(String),
}

/// Why a transfer has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum TransferError {
    /// The sides do not fit each other.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The sides have not agreed in time.
    #[error("{missing} after {timeout:?}; look whether all ranks of the other engine run")]
    NotAgreed {
        /// The missing ranks, or the missing place.
        missing: String,
        /// The configured time.
        timeout: Duration,
    },
    /// The other side gave no sign.
    #[error("{peer} gave no sign for {timeout:?}; it has stopped, or the network is down")]
    Silent {
        /// The other side.
        peer: String,
        /// The configured time.
        timeout: Duration,
    },
    /// The connection has ended.
    #[error("the connection to {peer} has ended; it has ended, or the network is down")]
    Gone {
        /// The other side.
        peer: String,
    },
    /// The other side has failed.
    #[error("{peer} has failed: {why}")]
    Other {
        /// The other side.
        peer: String,
        /// Its error.
        why: String,
    },
    /// Bytes have changed on their way, or the other side has another version.
    #[error(
        "{peer} sent {what}; run the same version on both sides, and look at the network if it \
         occurs again"
    )]
    Garbled {
        /// The other side.
        peer: String,
        /// The finding.
        what: String,
    },
    /// The engine has ended the transfer.
    #[error("the engine has ended the transfer")]
    Ended,
    /// The sequence cannot be sent or received.
    #[error("the sequence: {0}")]
    Sequence(String),
    /// The model cannot be transferred.
    #[error("the model: {0}")]
    Model(String),
    /// The transport does not work.
    #[error("{what} failed: {why}")]
    System {
        /// The failed operation.
        what: String,
        /// The system error.
        why: String,
    },
    /// The room has a sender already.
    #[error("room {0} has a sender already; give each request a room of its own")]
    Taken(u64),
}

impl TransferError {
    fn system(what: &str, error: &impl ToString) -> TransferError {
        TransferError::System {
            what: what.to_owned(),
            why: error.to_string(),
        }
    }
}

impl From<NamespaceError> for TransferError {
    fn from(error: NamespaceError) -> TransferError {
        TransferError::Model(error.to_string())
    }
}

/// Starts a thread of a transfer.
///
/// # Errors
/// There is no thread.
fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), TransferError> {
    #[cfg(debug_assertions)]
    let run = {
        use larder_base::bugs::Plant;
        let bug = crate::planted::Bug::active().get();
        move || {
            crate::planted::plant(bug);
            run();
        }
    };
    let thread = std::thread::Builder::new().name(name.to_owned());
    match thread.spawn(run) {
        Ok(_) => Ok(()),
        Err(error) => Err(TransferError::system("starting a thread", &error)),
    }
}

//! Errors of a prefix cache.

use larder_engine::StoreError;
use larder_engine::format::NamespaceError;
use larder_kernels::DeviceError;
use larder_remote::l4::L4Error;

use crate::cache::{CacheError, CutError, PrepareError, Stuck};
use crate::core::{Broken, ExtendError, NoRoom, TruncateError};
use crate::model::PartError;
use crate::ranks::RanksError;

/// The cache has ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Closed {
    /// The cache was closed.
    #[error("the prefix cache was closed, or this process is a forked child")]
    Ended,
    /// The ranks do not agree any more: drop the cache, and open one with a new group.
    #[error("the prefix cache of a rank cannot continue: {0}")]
    Ranks(#[from] RanksError),
}

/// Why a cache could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The store.
    #[error("the store of L3: {0}")]
    Store(#[from] StoreError),
    /// The names of the model or its pages are not valid.
    #[error("the model: {0}")]
    Model(#[from] NamespaceError),
    /// The heads of this rank are not whole groups.
    #[error(transparent)]
    Part(#[from] PartError),
    /// The device, or memory for a pool.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The configuration, or a thread.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// There is no memory for L2.
    #[error("{bytes} bytes for L2: {error}; lower l2_pages")]
    Memory {
        /// Bytes of the pool.
        bytes: u64,
        /// The system error.
        #[source]
        error: std::io::Error,
    },
    /// A pool of a component does not fit it.
    #[error("component {name:?} has {found} L1 pools of its sections; give {needed}, or none")]
    Component {
        /// The component.
        name: String,
        /// Pools given.
        found: usize,
        /// Its sections.
        needed: usize,
    },
    /// Windows and states have no place in the runs that a remote carries.
    #[error(
        "the model has a window or state ({name:?}), and a remote carries whole runs of pages \
         only: remove l4.urls"
    )]
    RemoteBeneath {
        /// The window or state.
        name: String,
    },
    /// Ranks do not agree on windows and states yet.
    #[error("the model has a window or state ({name:?}), and ranks agree on full attention only")]
    RanksBeside {
        /// The window or state.
        name: String,
    },
    /// The remotes beneath the store, or their keys.
    #[error(transparent)]
    L4(#[from] L4Error),
    /// A thread that polls, or works for a remote, cannot be started.
    #[error("no thread for the cache: {0}")]
    Thread(#[source] std::io::Error),
}

/// Why a request does not become a sequence.
#[derive(Debug, thiserror::Error)]
pub enum BeginError {
    /// The prompt has no token.
    #[error("the prompt is empty")]
    Empty,
    /// The prompt and the reserved tokens can never fit L1.
    #[error("{pages} pages are needed, L1 has {l1_pages}; shorten the prompt, or raise l1_pages")]
    TooLong {
        /// Pages of the prompt and the reserved tokens.
        pages: usize,
        /// Pages of L1.
        l1_pages: u32,
    },
    /// Running sequences hold the pages, or the blocks of states: keep or drop one, and ask again.
    #[error("{pages} pages of L1 are needed, {available} are free or can be evicted")]
    NoRoom {
        /// Pages of the prompt and the reserved tokens that are not in L1.
        pages: usize,
        /// Pages of L1 that no sequence holds.
        available: usize,
    },
    /// The request has begun before: a future was polled after its end.
    #[error("the request has already begun")]
    Begun,
    /// The cache is closed.
    #[error(transparent)]
    Closed(#[from] Closed),
}

/// Why a sequence cannot continue.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SequenceError {
    /// L1 has no room: keep or drop another sequence, or wait while copies will free pages, and try
    /// again. Nothing has changed.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// A forward or a load behind it failed: drop it, and ask again for the tokens whose output was
    /// used.
    #[error(transparent)]
    Broken(#[from] Broken),
    /// The kept tokens of a truncation end in shared pages whose forwards and loads have not all
    /// ended: try again when [`Sequence::verify`](super::Sequence::verify) is true. Nothing has
    /// changed.
    #[error("the kept tokens end in shared pages that are still written or loaded; verify first")]
    Unsettled,
    /// The kept tokens of a truncation do not end at a border whose state is kept, or their window
    /// has been freed. Truncate to the tokens that can be kept, and compute the others again; or
    /// drop the sequence. Nothing has changed.
    #[error(
        "there is no state at the end of the kept tokens, or no window before it; the first {kept} \
         tokens can be kept"
    )]
    NoState {
        /// The most tokens below that can be kept; 0 if none.
        kept: usize,
    },
    /// The state from which the sequence starts is being loaded: try again.
    #[error("the state from which the sequence starts is being loaded; try again")]
    Loading,
    /// A truncation on a GPU lacks the stream of the forwards, or there is none on a CPU. Nothing
    /// has changed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// More tokens were reported as computed than the sequence has.
    #[error("{computed} tokens cannot be computed, the sequence has {tokens}")]
    Beyond {
        /// Tokens reported.
        computed: usize,
        /// Tokens of the sequence.
        tokens: usize,
    },
    /// The cache is closed.
    #[error(transparent)]
    Closed(Closed),
}

impl From<Closed> for SequenceError {
    /// A sequence of a broken group is broken.
    fn from(closed: Closed) -> SequenceError {
        match closed {
            Closed::Ranks(_) => Broken.into(),
            Closed::Ended => SequenceError::Closed(closed),
        }
    }
}

impl From<CutError> for SequenceError {
    fn from(error: CutError) -> SequenceError {
        match error {
            CutError::Request(TruncateError::Broken(broken)) => broken.into(),
            CutError::Request(TruncateError::NoRoom(no_room)) => no_room.into(),
            CutError::Request(TruncateError::Unsettled) => SequenceError::Unsettled,
            CutError::Request(TruncateError::NoState { kept }) => SequenceError::NoState { kept },
            CutError::Device(error) => error.into(),
        }
    }
}

impl From<PrepareError> for SequenceError {
    fn from(error: PrepareError) -> SequenceError {
        match error {
            PrepareError::Extend(ExtendError::NoRoom(no_room)) => no_room.into(),
            PrepareError::Extend(ExtendError::Broken(broken)) => broken.into(),
            PrepareError::Loading => SequenceError::Loading,
            PrepareError::Device(error) => error.into(),
        }
    }
}

/// Why there is no slice of a row.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    /// The position has no slot.
    #[error("position {position} has no slot, the sequence has {slots}")]
    NoSlot {
        /// The position.
        position: usize,
        /// Slots of the sequence.
        slots: usize,
    },
    /// The row is cached and shared with other sequences: it is only read.
    #[error("position {position} is cached, only rows from {first} on are written")]
    Cached {
        /// The position.
        position: usize,
        /// The first position whose row the sequence owns.
        first: usize,
    },
    /// The state was not prepared for a forward.
    #[error("the state is not prepared; call Sequence::prepare before the forward")]
    NotPrepared,
    /// L1 is not in host memory: use [`Sequence::slots`](super::Sequence::slots).
    #[error("L1 is not in host memory; use the addresses of Sequence::slots")]
    NotOnHost,
    /// The shape has no such layer, or no such part.
    #[error("the rows have no layer {layer} of part {part}")]
    NoSuchRow {
        /// The part.
        part: u32,
        /// The layer.
        layer: u32,
    },
    /// The load of the row failed: drop the sequence, and ask again.
    #[error("the load of the row failed: {0}; drop the sequence, and ask again")]
    Load(#[source] DeviceError),
}

/// Why a cache did not close cleanly.
#[derive(Debug, thiserror::Error)]
pub enum CloseError {
    /// Kept pages are not in L3.
    #[error(
        "{orders} copies and {inserts} inserts had not ended in time: their pages may be missing \
         in L3; settle the tickets of all forwards, or raise close_wait"
    )]
    Unfinished {
        /// Orders in progress.
        orders: usize,
        /// Inserts whose forwards had not ended.
        inserts: usize,
    },
    /// Calls of L3 have not returned. What they use is not freed, and a store stays open.
    #[error(
        "{} calls of L3 have not returned: {} bytes of L2 are not freed, and the store is not \
         closed; look at the device of the store",
        .0.calls, .0.bytes
    )]
    Stuck(Stuck),
    /// The ranks did not agree to the end: kept pages may be missing in L3.
    #[error(transparent)]
    Ranks(#[from] RanksError),
    /// The store could not make everything durable.
    #[error("the store of L3: {0}")]
    Store(#[from] StoreError),
}

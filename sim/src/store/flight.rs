//! An operation of the simulated disk in flight.

use larder_core::index::SegmentId;
use larder_disk::Op;
use larder_engine::format::SegmentState;
use larder_sim_runtime::medium::Content;
use larder_sim_runtime::time::Instant;

/// The kind of an operation in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    Superblock,
    ClosingStatement,
    Quotas,
    Keyring,
    /// Zeros that find out whether a volume takes writes.
    Probe,
    Header(SegmentState),
    Descriptors,
    Pages,
    Read,
    /// It covers the writes before this number. `None` when these are lost already.
    Sync(Option<u64>),
}

/// An operation in flight.
pub struct Flight {
    pub op: Op,
    /// The disk that it was submitted to.
    pub disk: u64,
    pub what: What,
    pub start: usize,
    /// The content of a write.
    pub blocks: Vec<Content>,
    pub number: u64,
    /// The device begins it now. Before, its deadline may pass.
    pub begins: Instant,
    pub due: Instant,
    /// A failed sync has lost it.
    pub is_lost: bool,
    /// It pins its segment.
    pub pins: Option<SegmentId>,
}

impl Flight {
    pub fn volume(&self) -> usize {
        self.op.volume
    }

    pub fn is_write(&self) -> bool {
        !matches!(self.what, What::Read | What::Sync(_))
    }
}

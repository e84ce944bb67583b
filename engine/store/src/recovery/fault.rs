//! Structures that could not be used, and records that are disbelieved.

use larder_disk::DiskError;
use larder_format::{Damage, Structure};

/// A structure in a segment that should have been readable and was not.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Byte offset in the volume.
    pub offset: u64,
    /// The expected structure.
    pub structure: Structure,
    /// The reason.
    pub reason: FaultReason,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.structure, self.reason)
    }
}

/// Why a block could not be used.
#[derive(Clone, Debug, thiserror::Error)]
pub enum FaultReason {
    /// The device could not read it.
    #[error("unreadable: {0}")]
    Unreadable(DiskError),
    /// It does not hold the expected structure.
    #[error("{0}")]
    Damaged(Damage),
    /// Segments that were in use at the clean close hold nothing any more: their number, and the
    /// number of all that were in use.
    #[error("the contents of {lost} of the {used} segments in use at the clean close are lost")]
    Emptied {
        /// Number of segments.
        lost: u32,
        /// Number of segments in use at the close.
        used: u32,
    },
    /// Segments hold other generations than at the clean close.
    #[error("segments hold other generations than at the clean close: old contents are back")]
    OtherGenerations,
    /// The generation of a segment in a store that was closed in order has no header.
    #[error("no header of its generation is there, though the store was closed in order")]
    NoHeader,
    /// The bytes of a page that may be the newest of its key cannot be read. Its segment stays as
    /// it is, for the next opening.
    #[error("a page that it names, perhaps the newest of its key, cannot be read: {0}")]
    UnreadPage(DiskError),
    /// Page records with good checksums that are disbelieved: their number, and the reason.
    #[error("{0} page records {1}")]
    Disbelieved(u64, Disbelief),
}

impl FaultReason {
    /// Whether the device could not read something that may be whole.
    #[must_use]
    pub fn is_unread(&self) -> bool {
        matches!(
            self,
            FaultReason::Unreadable(_) | FaultReason::UnreadPage(_)
        )
    }
}

/// Why page records are disbelieved although their checksums match.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Disbelief {
    /// A namespace fixes the size of its pages.
    #[error("are of another size than their namespace's pages, and cannot be read")]
    Size,
    /// Pages of one generation never share a block.
    #[error("claim more room than their segment has: pages overlap")]
    Overlap,
    /// They name more namespaces than the index can number.
    #[error("belong to namespaces beyond the limit of one store: they cannot be served")]
    Namespaces,
}

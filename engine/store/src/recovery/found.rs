//! The pages and the faults that recovery finds.

use larder_core::index::{NamespaceSlot, Place};
use larder_format::{KeyPrefix, PageKey, PageRecord, Serial};

use super::scan::Fault;

/// Data kept of each page beyond the needs of recovery. An open keeps none: it must be fast with
/// millions of pages.
pub trait Extra: Copy {
    /// Takes the data from the page's descriptor.
    fn of(page: &PageRecord) -> Self;
}

impl Extra for () {
    fn of(_: &PageRecord) {}
}

/// The data of a descriptor that an open does not need.
#[derive(Clone, Copy, Debug)]
pub struct Whole {
    pub key: PageKey,
    pub depth: u32,
    pub put_unix_s: u32,
}

impl Extra for Whole {
    fn of(page: &PageRecord) -> Self {
        Whole {
            key: page.key,
            depth: page.depth,
            put_unix_s: page.put_unix_s,
        }
    }
}

/// A page that a descriptor names.
#[derive(Clone, Copy, Debug)]
pub struct Found<E = ()> {
    pub slot: NamespaceSlot,
    pub key: KeyPrefix,
    pub birth: Serial,
    pub commit: Serial,
    pub place: Place,
    pub checksum: u64,
    pub parent: Option<KeyPrefix>,
    pub depth: u32,
    pub proven: bool,
    /// Disbelieved: the record of its namespace states another size.
    pub is_disbelieved: bool,
    pub extra: E,
}

/// A block that could not be used, or a difference from the last clean close.
#[derive(Clone, Debug)]
pub struct Damage {
    /// Index of the volume.
    pub volume: usize,
    /// Number of the segment in the volume, if it concerns one segment.
    pub segment: Option<u32>,
    /// The fault and its place.
    pub fault: Fault,
}

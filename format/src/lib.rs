//! The bytes of a Larder store: encode, decode, validate.
//!
//! This crate knows what lies on disk and what may be believed of it. It does no I/O, reads no clock, and has no
//! `unsafe`. Nothing that it is handed makes it panic, allocate without bound, or give out a field that was not
//! checked: bytes from disk are hostile until a CRC, a range check and a comparison with the place they were read at
//! have passed ([`Checked`]).
//!
//! ```text
//!  volume   0         64 KiB        1 MiB
//!           +---------+---------+---+-----------+-----------+-- ... --+
//!           | super A | super B |   | segment 0 | segment 1 |         |
//!           +---------+---------+---+-----------+-----------+-- ... --+
//!
//!  segment  block 0    1          2           data_end              last
//!           +----------+----------+-----------+------+--------------+
//!           | header A | header B | pages ->  | free | <- 2 | 1 | 0 |
//!           +----------+----------+-----------+------+--------------+
//!                                                      descriptor blocks
//!  page     | part 0 ..000 | part 1 ..000 |      each part padded to whole blocks
//! ```
//!
//! Pages carry no header of their own: neighbours in a chain are neighbours on disk, and a page lands in its pool
//! with one read. All that is known of a page stands in its descriptor: a [`PageRecord`] in a [`DescriptorBlock`].
//!
//! | module | owns |
//! |---|---|
//! | `consts` | the limits and sizes |
//! | `ids` | identities: store, volume, segment number |
//! | `serial` | run numbers and the serial that orders everything |
//! | `key` | page keys: the hash chain over tokens |
//! | `shape` | the parts of a page and where they lie |
//! | `namespace` | what must match for bytes to be interchangeable, and its fingerprint |
//! | `checksum` | the payload checksum |
//! | `geometry` | where segments and blocks lie in a volume |
//! | `superblock`, `segment`, `descriptor` | one structure each, with its layout |
//! | `archive` | pages in a portable file |
//! | `frame` | what all structures share: prologue, CRC, levels of trust |
//! | `bytes` | cursors over little-endian fields |
//! | `error` | what can be wrong with a block |

#![forbid(unsafe_code)]
#![deny(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]

mod archive;
mod bytes;
mod checksum;
mod consts;
mod descriptor;
mod error;
mod frame;
mod geometry;
mod ids;
mod key;
mod namespace;
mod segment;
mod serial;
mod shape;
mod superblock;

pub use archive::{
    ARCHIVED_PAGES_MAX, ArchiveCounts, ArchiveHead, ArchiveId, ArchiveItem, ArchiveReader,
    ArchiveWriter, ArchivedNamespace, ArchivedPage,
};
pub use checksum::PageChecksum;
pub use consts::{
    BLOCK_BYTES, FORMAT_VERSION, PARTS_MAX, SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, SEGMENTS_MAX,
    VOLUMES_MAX,
};
pub use descriptor::{
    BlockAddress, BlockHeader, Body, DescriptorBlock, PageRecord, RECORDS_PER_BLOCK, Record,
};
pub use error::{Damage, Elsewhere, Structure};
pub use frame::Checked;
pub use geometry::{
    Geometry, GeometryError, HEADER_BLOCKS, SEGMENTS_OFFSET, SUPERBLOCK_OFFSETS, segments_that_fit,
};
pub use ids::{HexError, SegmentNo, StoreId, VolumeId};
pub use key::{KeyPrefix, PageKey, TokenUnits, namespace_seed, page_keys};
pub use namespace::{
    Fingerprint, NAMESPACE_BYTES_MAX, Namespace, NamespaceError, NamespaceFields, Rank,
};
pub use segment::{Identity, SegmentAddress, SegmentHeader, SegmentState};
pub use serial::{Run, Serial};
pub use shape::{PAGE_BYTES_LIMIT, PageShape, ShapeError};
pub use superblock::{
    Holder, OpenState, Superblock, SuperblockError, VOLUME_PATH_BYTES_MAX, VolumeEntry, newest,
};

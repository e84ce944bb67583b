//! The on-disk format of a Larder store: encode, decode, validate.
//!
//! This crate defines the structures on disk and the checks that they must pass. It does no I/O,
//! reads no clock, and contains no `unsafe`. No input makes it panic, allocate without bound, or
//! return an unchecked field. Bytes from disk are hostile until a CRC, a range check and a
//! comparison with the location from which they were read have passed ([`Checked`]).
//!
//! ```text
//!  volume   0         64 KiB        992 KiB   1 MiB                      last MiB
//!           +---------+---------+---+---------+-----------+-----------+-- .. --+---------+
//!           | super A | super B |   | closing | segment 0 | segment 1 |        | super C |
//!           +---------+---------+---+---------+-----------+-----------+-- .. --+---------+
//!
//!  segment  block 0    1          2           data_end              last
//!           +----------+----------+-----------+------+--------------+
//!           | header A | header B | pages ->  | free | <- 2 | 1 | 0 |
//!           +----------+----------+-----------+------+--------------+
//!                                                      descriptor blocks
//!  page     | part 0 ..000 | part 1 ..000 |      each part padded to whole blocks
//! ```
//!
//! Pages have no header of their own. Neighbours in a chain are neighbours on disk, and one read
//! transfers a page into its pool. All metadata of a page is in its descriptor: a [`PageRecord`] in
//! a [`DescriptorBlock`].
//!
//! `docs/design.md` in the repository describes the use of these structures: commits, recovery,
//! release.
//!
//! A module imports only the modules below it. Of several modules in one row, a module imports only
//! those behind it.
//!
//! | module | owns |
//! |---|---|
//! | `archive` | pages in a portable file |
//! | `superblock`, `closing`, `quotas`, `keyring` | one structure each, with its layout |
//! | `descriptor`, `segment` | one structure each |
//! | `record` | one record of a descriptor block |
//! | `sealed` | blocks with a clear header and a body that can be encrypted |
//! | `frame` | the parts common to all structures: prologue, CRC, levels of trust |
//! | `error` | the kinds of damage of a block |
//! | `features` | the features of a store, and the release that wrote it |
//! | `geometry` | the location of segments and blocks in a volume |
//! | `checksum` | the payload checksum |
//! | `namespace` | the fields that must match for pages to be interchangeable; fingerprint |
//! | `shape` | the parts of a page and their location |
//! | `key` | page keys: the hash chain over tokens |
//! | `serial` | epochs ([`Run`]) and the serial numbers that order all events |
//! | `bytes` | cursors over little-endian fields |
//! | `ids` | identities: store, volume, archive, segment number |
//! | `consts` | limits and sizes |

#![forbid(unsafe_code)]
#![deny(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]

mod archive;
mod bytes;
mod checksum;
mod closing;
mod consts;
mod descriptor;
mod error;
mod features;
mod frame;
mod geometry;
mod ids;
mod key;
mod keyring;
mod namespace;
mod quotas;
mod record;
mod sealed;
mod segment;
mod serial;
mod shape;
mod superblock;

pub use archive::{
    ARCHIVED_PAGES_MAX, ArchiveCounts, ArchiveHead, ArchiveItem, ArchiveReader, ArchiveWriter,
    ArchivedNamespace, ArchivedPage, SEALED_PAGES_MAX,
};
pub use checksum::PageChecksum;
pub use closing::{ClosingStatement, Holdings};
pub use consts::{
    BLOCK_BYTES, FORMAT_VERSION, PARTS_MAX, SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, SEGMENTS_MAX,
    VOLUMES_MAX,
};
pub use descriptor::{BlockAddress, BlockHeader, Body, DescriptorBlock, RECORDS_PER_BLOCK};
pub use error::{Damage, Elsewhere, Structure};
pub use features::{Features, Label};
pub use frame::Checked;
pub use geometry::{
    CLOSING_OFFSET, Geometry, GeometryError, HEADER_BLOCKS, OVERHEAD_BYTES, PROBE_OFFSET,
    RESERVED_OFFSET, SEGMENTS_OFFSET, SUPERBLOCK_OFFSETS, TAIL_BYTES, keyring_offsets,
    quotas_offsets, segments_that_fit, superblock_offsets, tail_offset,
};
pub use ids::{ArchiveId, HexError, SegmentNo, StoreId, VolumeId};
pub use key::{KeyPrefix, PageKey, TokenUnits, namespace_seed, page_keys};
pub use keyring::{
    KEY_SLOTS_MAX, KEYRING_BYTES, KeyWrap, KeyringCopy, KeyringSlot, SlotState, TenantId,
    WRAPPED_KEY_BYTES, WRAPS_MAX, WrapId, WrappedKey,
};
pub use namespace::{
    Fingerprint, NAMESPACE_BYTES_MAX, Namespace, NamespaceBuilder, NamespaceError, NamespaceFields,
    Rank,
};
pub use quotas::{
    QUOTA_NAME_BYTES_MAX, QUOTAS_BYTES, QUOTAS_MAX, Quota, QuotaError, QuotaGroup, Quotas,
    TENANT_FIELD,
};
pub use record::{PageHome, PageRecord, Proof, Record, Seal};
pub use sealed::MetadataSeal;
pub use segment::{Identity, SegmentAddress, SegmentHeader, SegmentState};
pub use serial::{Run, Serial};
pub use shape::{PAGE_BYTES_LIMIT, PageShape, ShapeError};
pub use superblock::{
    Clock, History, Holder, OpenState, Superblock, SuperblockError, Unclosed,
    VOLUME_PATH_BYTES_MAX, VolumeEntry, newest,
};

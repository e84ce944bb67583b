//! What can be wrong with bytes read from disk, as types and as sentences.
//!
//! The sentences say what is wrong with one block. The structure that the block should be, and its
//! place (file, offset), are known to the reader of the block and belong in front of them.

use crate::archive::ArchiveId;
use crate::bytes::Overrun;
use crate::consts::FORMAT_VERSION;
use crate::ids::{SegmentNo, StoreId};
use crate::namespace::NamespaceError;

/// The kinds of block that carry a magic of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Structure {
    /// A copy of a volume's superblock.
    Superblock,
    /// A copy of a segment's header.
    SegmentHeader,
    /// A descriptor block.
    DescriptorBlock,
    /// A structure of an archive.
    Archive,
}

impl Structure {
    /// The first eight bytes of the block.
    #[must_use]
    pub const fn magic(self) -> [u8; 8] {
        match self {
            Structure::Superblock => *b"LARDERSB",
            Structure::SegmentHeader => *b"LARDERSH",
            Structure::DescriptorBlock => *b"LARDERDB",
            Structure::Archive => *b"LARDERAR",
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Structure::Superblock => "superblock",
            Structure::SegmentHeader => "segment header",
            Structure::DescriptorBlock => "descriptor block",
            Structure::Archive => "structure of an archive",
        }
    }
}

impl std::fmt::Display for Structure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a block is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// Every byte of the block is zero: it was never written.
    #[error("it is blank")]
    Blank(Structure),
    /// The block begins as no structure of this kind does.
    #[error("its magic is absent")]
    Magic(Structure),
    /// The block is whole but of a version that this build does not read.
    #[error("format version {found}, but this build reads version {FORMAT_VERSION}")]
    Version {
        /// The version it states.
        found: u32,
    },
    /// The length it states, or the length of the slice it came in, cannot be.
    #[error("its length of {found} bytes is impossible")]
    Length {
        /// The length, in bytes.
        found: u64,
    },
    /// It ends before its last field.
    #[error("it ends in the middle of a field")]
    Short,
    /// At least one bit of the block is not what was written.
    #[error("its CRC-32 is {computed:08x}, but {stored:08x} was written")]
    Checksum {
        /// The CRC in the block.
        stored: u32,
        /// The CRC of the block.
        computed: u32,
    },
    /// It is whole, but was written for another place: a misdirected write or read, or a copied file.
    #[error("it belongs elsewhere: {0}")]
    Elsewhere(Elsewhere),
    /// A field holds a value that no writer writes.
    #[error("its field {field} cannot be {value}")]
    Field {
        /// The field, as the layout tables name it.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// Bytes that this version leaves zero are set.
    #[error("bytes that must be zero are not")]
    Reserved,
    /// It holds a namespace that is not one.
    #[error("its namespace is not valid: {0}")]
    Namespace(#[from] NamespaceError),
}

impl From<Overrun> for Damage {
    fn from(Overrun: Overrun) -> Damage {
        Damage::Short
    }
}

/// How the place that a block names differs from the place it was read at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elsewhere {
    /// Another store.
    Store {
        /// What the block says.
        claimed: StoreId,
        /// Where it was read.
        expected: StoreId,
    },
    /// Another volume of the store, by its position.
    Volume {
        /// What the block says.
        claimed: u16,
        /// Where it was read.
        expected: u16,
    },
    /// Another segment of the volume.
    Segment {
        /// What the block says.
        claimed: SegmentNo,
        /// Where it was read.
        expected: SegmentNo,
    },
    /// Another descriptor block of the segment.
    Index {
        /// What the block says.
        claimed: u32,
        /// Where it was read.
        expected: u32,
    },
    /// Another archive.
    Archive {
        /// What the block says.
        claimed: ArchiveId,
        /// The archive's own head.
        expected: ArchiveId,
    },
    /// Another place in the archive, in blocks.
    Position {
        /// What the block says.
        claimed: u64,
        /// Where it was read.
        expected: u64,
    },
}

impl std::fmt::Display for Elsewhere {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Elsewhere::Store { claimed, expected } => {
                write!(f, "it names store {claimed}, this is store {expected}")
            }
            Elsewhere::Volume { claimed, expected } => {
                write!(f, "it names volume {claimed}, this is volume {expected}")
            }
            Elsewhere::Segment { claimed, expected } => {
                write!(f, "it names segment {claimed}, this is segment {expected}")
            }
            Elsewhere::Index { claimed, expected } => {
                write!(
                    f,
                    "it names descriptor block {claimed}, this is descriptor block {expected}"
                )
            }
            Elsewhere::Archive { claimed, expected } => {
                write!(f, "it names archive {claimed}, this is archive {expected}")
            }
            Elsewhere::Position { claimed, expected } => {
                write!(
                    f,
                    "it names block {claimed} of the archive, this is block {expected}"
                )
            }
        }
    }
}

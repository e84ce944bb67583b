//! Damage of blocks read from disk, as types and as messages.
//!
//! A message describes one block. The reader of the block knows the structure and its location
//! (file, offset) and must put them in front of the message.

use crate::bytes::Overrun;
use crate::consts::FORMAT_VERSION;
use crate::ids::{ArchiveId, SegmentNo, StoreId};
use crate::namespace::NamespaceError;

/// The kinds of blocks. Each has its own magic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Structure {
    /// A copy of a volume's superblock.
    Superblock,
    /// A superblock in a file that an operator saved.
    SavedSuperblock,
    /// A copy of a segment's header.
    SegmentHeader,
    /// A descriptor block.
    DescriptorBlock,
    /// The closing statement of a volume.
    ClosingStatement,
    /// A copy of the quotas.
    Quotas,
    /// A copy of the keyring.
    Keyring,
    /// A structure of an archive.
    Archive,
}

impl Structure {
    /// The first eight bytes of the block.
    #[must_use]
    pub const fn magic(self) -> [u8; 8] {
        match self {
            Structure::Superblock => *b"LARDERSB",
            Structure::SavedSuperblock => *b"LARDERSS",
            Structure::SegmentHeader => *b"LARDERSH",
            Structure::DescriptorBlock => *b"LARDERDB",
            Structure::ClosingStatement => *b"LARDERCL",
            Structure::Quotas => *b"LARDERQU",
            Structure::Keyring => *b"LARDERKR",
            Structure::Archive => *b"LARDERAR",
        }
    }

    /// The oldest version that this crate reads. Archives of version 1 have the same content.
    pub(crate) const fn oldest_version(self) -> u32 {
        match self {
            Structure::Archive => 1,
            _ => FORMAT_VERSION,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Structure::Superblock => "superblock",
            Structure::SavedSuperblock => "saved superblock",
            Structure::SegmentHeader => "segment header",
            Structure::DescriptorBlock => "descriptor block",
            Structure::ClosingStatement => "closing statement",
            Structure::Quotas => "quotas",
            Structure::Keyring => "keyring",
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
    /// Every byte of the block is zero: the block was never written.
    #[error("it is blank")]
    Blank(Structure),
    /// The block does not start with the magic of this structure.
    #[error("its magic is absent")]
    Magic(Structure),
    /// The block is whole, but this build does not read its version.
    #[error("format version {found}, but this build reads version {FORMAT_VERSION}")]
    Version {
        /// The version in the block.
        found: u32,
    },
    /// The length field, or the length of the slice, is impossible.
    #[error("its length of {found} bytes is impossible")]
    Length {
        /// The length, in bytes.
        found: u64,
    },
    /// The structure ends before its last field.
    #[error("it ends in the middle of a field")]
    Short,
    /// The CRC-32 does not match: at least one bit differs from the written block.
    #[error("its CRC-32 is {computed:08x}, but {stored:08x} was written")]
    Checksum {
        /// The CRC stored in the block.
        stored: u32,
        /// The CRC computed from the block.
        computed: u32,
    },
    /// The block is whole but belongs to another location: a misdirected write or read, or a copied
    /// file.
    #[error("it belongs elsewhere: {0}")]
    Elsewhere(Elsewhere),
    /// A field holds a value that no writer writes.
    #[error("its field {field} cannot be {value}")]
    Field {
        /// The name of the field in the layout tables.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// Bytes that must be zero in this version are not zero.
    #[error("bytes that must be zero are not")]
    Reserved,
    /// The body is not encrypted with the key of its store or archive.
    #[error("its body does not open with its key: a writer without the key changed it")]
    Sealed,
    /// A body that is encrypted, in an archive whose head states no key.
    #[error(
        "it is of an encrypted archive, and the head states no key: a writer without the key \
         changed the head"
    )]
    Disowned,
    /// The namespace in the block is not valid.
    #[error("its namespace is not valid: {0}")]
    Namespace(#[from] NamespaceError),
}

impl From<Overrun> for Damage {
    fn from(Overrun: Overrun) -> Damage {
        Damage::Short
    }
}

/// The difference between the location claimed by a block and the location from which it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elsewhere {
    /// Another store.
    Store {
        /// The store claimed by the block.
        claimed: StoreId,
        /// The store that was read.
        expected: StoreId,
    },
    /// Another volume of the store, by its index in the volume list.
    Volume {
        /// The volume claimed by the block.
        claimed: u16,
        /// The volume that was read.
        expected: u16,
    },
    /// Another segment of the volume.
    Segment {
        /// The segment claimed by the block.
        claimed: SegmentNo,
        /// The segment that was read.
        expected: SegmentNo,
    },
    /// Another descriptor block of the segment.
    Index {
        /// The index claimed by the block.
        claimed: u32,
        /// The index that was read.
        expected: u32,
    },
    /// Another archive.
    Archive {
        /// The archive claimed by the block.
        claimed: ArchiveId,
        /// The archive in the head.
        expected: ArchiveId,
    },
    /// Another position in the archive, in blocks.
    Position {
        /// The position claimed by the block.
        claimed: u64,
        /// The position that was read.
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

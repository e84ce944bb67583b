//! Identities: fixed-width names. They are compared, stored raw and shown as lowercase hex.
//!
//! The text form is strict: exactly two lowercase digits per byte, so each identity has one
//! spelling.

use std::fmt;

/// The text is not the hex form of an identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HexError {
    /// The text has the wrong length.
    #[error("expected {expected} hex digits, found {found} bytes")]
    Length {
        /// Number of hex digits required.
        expected: usize,
        /// Bytes of the text.
        found: usize,
    },
    /// A character is not one of `0-9a-f`.
    #[error("byte {at} is not a lowercase hex digit")]
    Digit {
        /// Byte offset in the text.
        at: usize,
    },
}

pub(crate) fn write_hex(bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}

/// Bytes that are parsed together.
const BLOCK: usize = 32;

/// Parses without a branch for each digit: half of the branches would be predicted wrongly. The
/// loops over a block become vector instructions.
pub(crate) fn parse_hex<const N: usize>(text: &str) -> Result<[u8; N], HexError> {
    let expected = N.saturating_mul(2);
    if text.len() != expected {
        let found = text.len();
        return Err(HexError::Length { expected, found });
    }
    let mut bytes = [0; N];
    let mut values = [0_u8; 2 * BLOCK];
    let mut is_hex = true;
    let blocks = text.as_bytes().chunks(2 * BLOCK);
    for (characters, bytes) in blocks.zip(bytes.chunks_mut(BLOCK)) {
        for (value, character) in values.iter_mut().zip(characters) {
            is_hex &= is_digit(*character);
            *value = value_of(*character);
        }
        for (byte, [high, low]) in bytes.iter_mut().zip(values.as_chunks::<2>().0) {
            *byte = (high << 4) | low;
        }
    }
    if is_hex {
        return Ok(bytes);
    }
    let at = text.bytes().position(|character| !is_digit(character));
    Err(HexError::Digit {
        at: at.unwrap_or(0),
    })
}

fn is_digit(character: u8) -> bool {
    (character.wrapping_sub(b'0') < 10) | (character.wrapping_sub(b'a') < 6)
}

/// The value of a digit: its low four bits, and 9 more for a letter.
fn value_of(digit: u8) -> u8 {
    (digit & 0xf).wrapping_add(digit.wrapping_shr(6).wrapping_mul(9))
}

/// Declares an identity type of a fixed width.
macro_rules! identity {
    ($(#[$doc:meta])* $name:ident, $bytes:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name([u8; $bytes]);

        impl $name {
            /// From raw bytes, as stored on disk.
            #[must_use]
            pub const fn from_bytes(bytes: [u8; $bytes]) -> Self {
                $name(bytes)
            }

            /// The raw bytes, as stored on disk.
            #[must_use]
            pub const fn as_bytes(&self) -> &[u8; $bytes] {
                &self.0
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                $crate::ids::write_hex(&self.0, f)
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::ids::HexError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                $crate::ids::parse_hex(text).map($name)
            }
        }
    };
}
pub(crate) use identity;

identity! {
    /// Identity of a store: random, drawn at creation, the same on all its volumes.
    StoreId, 16
}

identity! {
    /// Identity of a volume: random, drawn when the volume joins its store.
    VolumeId, 16
}

identity! {
    /// Identity of an archive: random, drawn when the archive is written.
    ArchiveId, 16
}

/// The number of a segment on its volume, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentNo(pub u32);

impl fmt::Display for SegmentNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

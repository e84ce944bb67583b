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

pub(crate) fn parse_hex<const N: usize>(text: &str) -> Result<[u8; N], HexError> {
    let (pairs, odd) = text.as_bytes().as_chunks::<2>();
    if pairs.len() != N || !odd.is_empty() {
        return Err(HexError::Length {
            expected: N.saturating_mul(2),
            found: text.len(),
        });
    }
    let mut bytes = [0; N];
    for (index, (byte, [high, low])) in bytes.iter_mut().zip(pairs).enumerate() {
        let at = index.saturating_mul(2);
        let high = digit(*high).ok_or(HexError::Digit { at })?;
        let low = digit(*low).ok_or(HexError::Digit {
            at: at.saturating_add(1),
        })?;
        *byte = (high << 4) | low;
    }
    Ok(bytes)
}

fn digit(character: u8) -> Option<u8> {
    match character {
        b'0'..=b'9' => character.checked_sub(b'0'),
        b'a'..=b'f' => character.checked_sub(b'a' - 10),
        _ => None,
    }
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

/// The number of a segment on its volume, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentNo(pub u32);

impl fmt::Display for SegmentNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

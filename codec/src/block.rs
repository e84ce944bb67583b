//! The layout of a block and of its entry, and the choice of the base.

/// Values of a block. The last block of a page may have fewer.
pub const BLOCK_VALUES: usize = 4096;

/// Plain bytes of a block.
pub const BLOCK_BYTES: usize = 2 * BLOCK_VALUES;

/// Values that are coded together: their 16 bytes of codes have the first half of the group in the
/// low halves, and the second half in the high ones. A block of another number of values is raw.
pub(crate) const GROUP: usize = 32;

/// Plain bytes of a group.
pub(crate) const GROUP_BYTES: usize = 2 * GROUP;

/// Bytes of the codes of a group.
pub(crate) const CODES: usize = GROUP / 2;

type Places<'a> = (&'a mut [[u8; GROUP]], &'a mut [[u8; CODES]], &'a mut [u8]);
type Parts<'a> = (&'a [[u8; GROUP]], &'a [[u8; CODES]], &'a [u8]);

/// The code of an exponent that follows as a byte.
pub(crate) const ESCAPE: u8 = 15;

/// The highest base: the exponent of each code below the escape is a byte.
pub(crate) const BASE_MAX: u8 = u8::MAX - (ESCAPE - 1);

/// Bytes of an entry.
pub(crate) const ENTRY_BYTES: usize = 8;

/// The field of the escapes of a raw block.
const RAW: u16 = u16::MAX;

/// How a block is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    Raw,
    Coded { base: u8, escapes: u16 },
}

impl Stored {
    /// The stored bytes of a block of so many plain bytes.
    pub(crate) fn bytes(self, plain: usize) -> usize {
        match self {
            Self::Raw => plain,
            Self::Coded { escapes, .. } => fixed_bytes(plain) + usize::from(escapes),
        }
    }
}

/// The bytes of a coded block without its escapes.
pub(crate) fn fixed_bytes(plain: usize) -> usize {
    plain / 4 * 3
}

/// Escapes of a coded block at most: with more it is not shorter than its plain bytes.
fn escapes_max(plain: usize) -> usize {
    (plain / 4).saturating_sub(1)
}

/// Whether a block of so many bytes can be coded.
pub(crate) fn is_whole(plain: usize) -> bool {
    plain.is_multiple_of(GROUP_BYTES) && plain > 0
}

/// The entry of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) stored: Stored,
    pub(crate) sum: u32,
}

impl Entry {
    pub(crate) fn encode(self) -> [u8; ENTRY_BYTES] {
        let (escapes, base) = match self.stored {
            Stored::Raw => (RAW, 0),
            Stored::Coded { base, escapes } => (escapes, base),
        };
        let [a, b, c, d] = self.sum.to_le_bytes();
        let [e, f] = escapes.to_le_bytes();
        [a, b, c, d, e, f, base, 0]
    }

    /// The entry of a block of so many plain bytes, or `None` for bytes that no encoder writes.
    pub(crate) fn decode(bytes: [u8; ENTRY_BYTES], plain: usize) -> Option<Self> {
        let [a, b, c, d, e, f, base, zero] = bytes;
        let escapes = u16::from_le_bytes([e, f]);
        let is_coded =
            is_whole(plain) && usize::from(escapes) <= escapes_max(plain) && base <= BASE_MAX;
        let stored = match escapes {
            RAW if base == 0 => Stored::Raw,
            _ if is_coded => Stored::Coded { base, escapes },
            _ => return None,
        };
        let sum = u32::from_le_bytes([a, b, c, d]);
        (zero == 0).then_some(Self { stored, sum })
    }
}

/// The places of a coded block in `out`, which has room for its plain bytes: signs and mantissas of
/// each group, codes of each group, escapes as many as may be.
#[inline]
pub(crate) fn places(plain: usize, out: &mut [u8]) -> Option<Places<'_>> {
    let (rests, out) = out.split_at_mut_checked(plain / 2)?;
    let (codes, escapes) = out.split_at_mut_checked(plain / 4)?;
    let escapes = escapes.get_mut(..escapes_max(plain))?;
    Some((rests.as_chunks_mut().0, codes.as_chunks_mut().0, escapes))
}

/// The parts of a coded block of so many plain bytes; `None` if it is shorter than these.
#[inline]
pub(crate) fn parts(plain: usize, stored: &[u8]) -> Option<Parts<'_>> {
    let (rests, stored) = stored.split_at_checked(plain / 2)?;
    let (codes, escapes) = stored.split_at_checked(plain / 4)?;
    Some((rests.as_chunks().0, codes.as_chunks().0, escapes))
}

/// The first of the 15 neighbouring exponents that most of the values have. A quarter of them is
/// counted: of each group every fourth, beginning at another one in each of four groups, since the
/// values of a channel stand at a constant distance.
pub(crate) fn base_of(plain: &[u8]) -> u8 {
    let mut counts = [[0u16; 256]; 2];
    let (groups, _) = plain.as_chunks::<GROUP_BYTES>();
    for (at, group) in groups.iter().enumerate() {
        let (quads, _) = group.as_chunks::<8>();
        let first = (at ^ (at >> 2)) & 3;
        for (pair, quad) in quads.iter().enumerate() {
            let exponent = exponent(u16::from_le_bytes([quad[2 * first], quad[2 * first + 1]]));
            counts[pair & 1][usize::from(exponent)] += 1;
        }
    }
    let [even, odd] = counts;
    let of = |exponent: u8| even[usize::from(exponent)] + odd[usize::from(exponent)];
    let mut within: u16 = (0..ESCAPE).map(of).sum();
    let (mut most, mut base) = (within, 0);
    for next in 1..=BASE_MAX {
        within = within + of(next + (ESCAPE - 1)) - of(next - 1);
        if within > most {
            (most, base) = (within, next);
        }
    }
    base
}

/// The exponent of a value.
pub(crate) fn exponent(value: u16) -> u8 {
    ((value >> 7) & 0xff) as u8
}

/// A value without its exponent, as a byte.
pub(crate) fn sign_and_mantissa(value: u16) -> u8 {
    ((value >> 8) as u8 & 0x80) | (value as u8 & 0x7f)
}

/// The value of an exponent, a sign and a mantissa.
pub(crate) fn value(exponent: u8, sign_and_mantissa: u8) -> u16 {
    let [rest, exponent] = [sign_and_mantissa, exponent].map(u16::from);
    ((rest & 0x80) << 8) | (exponent << 7) | (rest & 0x7f)
}

/// What a value adds to the sum of a block: a signed number, since processors add pairs of these.
pub(crate) fn term(value: u16) -> u32 {
    i32::from(value.cast_signed()).cast_unsigned()
}

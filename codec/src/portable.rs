//! The form for each processor, whose bytes the others must equal.

use crate::block::{
    CODES, ESCAPE, GROUP_BYTES, exponent, parts, places, sign_and_mantissa, term, value,
};

/// The escapes and the sum of a block, or `None` if it has too many escapes. `out` has room for the
/// plain bytes.
pub(crate) fn encode(plain: &[u8], base: u8, out: &mut [u8]) -> Option<(usize, u32)> {
    let (rests, codes, escapes) = places(plain.len(), out)?;
    let (groups, _) = plain.as_chunks::<GROUP_BYTES>();
    let (mut escaped, mut sum) = (0, 0u32);
    for ((group, rests), codes) in groups.iter().zip(rests).zip(codes) {
        *codes = [0; CODES];
        let (values, _) = group.as_chunks::<2>();
        for (at, (value, rest)) in values.iter().zip(rests).enumerate() {
            let value = u16::from_le_bytes(*value);
            *rest = sign_and_mantissa(value);
            sum = sum.wrapping_add(term(value));
            let code = exponent(value).wrapping_sub(base).min(ESCAPE);
            codes[at % CODES] |= code << (at / CODES * 4);
            if code == ESCAPE {
                *escapes.get_mut(escaped)? = exponent(value);
                escaped += 1;
            }
        }
    }
    Some((escaped, sum))
}

/// The sum of the decoded block, or `None` if its codes have another number of escapes. `stored`
/// has the length that the entry states.
pub(crate) fn decode(stored: &[u8], base: u8, plain: &mut [u8]) -> Option<u32> {
    let (rests, codes, mut escapes) = parts(plain.len(), stored)?;
    let (groups, _) = plain.as_chunks_mut::<GROUP_BYTES>();
    let mut sum = 0u32;
    for ((group, rests), codes) in groups.iter_mut().zip(rests).zip(codes) {
        let (values, _) = group.as_chunks_mut::<2>();
        for (at, (into, rest)) in values.iter_mut().zip(rests).enumerate() {
            let code = (codes[at % CODES] >> (at / CODES * 4)) & 15;
            let exponent = if code == ESCAPE {
                *escapes.split_off_first()?
            } else {
                base.wrapping_add(code)
            };
            let value = value(exponent, *rest);
            sum = sum.wrapping_add(term(value));
            *into = value.to_le_bytes();
        }
    }
    escapes.is_empty().then_some(sum)
}

/// As [`decode`], with a mistake: the first escape of the block is skipped.
#[cfg(debug_assertions)]
pub(crate) fn decode_and_skip(stored: &[u8], base: u8, plain: &mut [u8]) -> Option<u32> {
    let sum = decode(stored, base, plain)?;
    let (values, _) = plain.as_chunks_mut::<2>();
    let is_escaped = |value: u16| exponent(value).wrapping_sub(base) >= ESCAPE;
    let mut values = values.iter_mut();
    let Some(into) = values.find(|value| is_escaped(u16::from_le_bytes(**value))) else {
        return Some(sum);
    };
    let before = u16::from_le_bytes(*into);
    let after = value(base.wrapping_add(ESCAPE), sign_and_mantissa(before));
    *into = after.to_le_bytes();
    Some(sum.wrapping_sub(term(before)).wrapping_add(term(after)))
}

/// The sum of the values of a raw block. A last byte alone is a value.
pub(crate) fn sum(plain: &[u8]) -> u32 {
    let (values, last) = plain.as_chunks::<2>();
    let whole = values.iter().map(|value| term(u16::from_le_bytes(*value)));
    let alone = last.iter().map(|byte| u32::from(*byte));
    whole.chain(alone).fold(0, u32::wrapping_add)
}

/// Puts the escaped exponents of a decoded group into its values. Takes them from `escapes`, and
/// adds the difference to `sum`. `None` if there are too few.
pub(crate) fn restore(
    mut which: u32,
    group: &mut [u8; GROUP_BYTES],
    escapes: &mut &[u8],
    sum: &mut u32,
) -> Option<()> {
    let (values, _) = group.as_chunks_mut::<2>();
    while which != 0 {
        let into = &mut values[which.trailing_zeros() as usize];
        which &= which - 1;
        let before = u16::from_le_bytes(*into);
        let after = value(*escapes.split_off_first()?, sign_and_mantissa(before));
        *sum = sum.wrapping_sub(term(before)).wrapping_add(term(after));
        *into = after.to_le_bytes();
    }
    Some(())
}

/// Appends the exponents of the escaped values of a group.
pub(crate) fn escape(
    mut which: u32,
    group: &[u8; GROUP_BYTES],
    escapes: &mut [u8],
    escaped: &mut usize,
) -> Option<()> {
    let (values, _) = group.as_chunks::<2>();
    while which != 0 {
        let value = values[which.trailing_zeros() as usize];
        which &= which - 1;
        *escapes.get_mut(*escaped)? = exponent(u16::from_le_bytes(value));
        *escaped += 1;
    }
    Some(())
}

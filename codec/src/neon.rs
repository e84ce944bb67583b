//! The form for aarch64 with NEON. A quarter of a group is a register of eight values.

use std::arch::aarch64::*;

use crate::block::{ESCAPE, GROUP, GROUP_BYTES, escapes_max};
use crate::portable;

type Quarters = [uint16x8_t; 4];

/// See [`portable::encode`].
#[target_feature(enable = "neon")]
pub(crate) fn encode(plain: &[u8], base: u8, out: &mut [u8]) -> Option<(usize, u32)> {
    let (rests, out) = out.split_at_mut(plain.len() / 2);
    let (codes, escapes) = out.split_at_mut(plain.len() / 4);
    let escapes = escapes.get_mut(..escapes_max(plain.len()))?;
    let (groups, _) = plain.as_chunks::<GROUP_BYTES>();
    let (rests, _) = rests.as_chunks_mut::<GROUP>();
    let (codes, _) = codes.as_chunks_mut::<{ GROUP / 2 }>();
    let (base, escape) = (vdupq_n_u8(base), vdupq_n_u8(ESCAPE));
    let (mut escaped, mut sums) = (0, vdupq_n_s32(0));
    for ((group, rests), codes) in groups.iter().zip(rests).zip(codes) {
        let values = load_group(group);
        let [a, b, c, d] = values.map(|quarter| {
            let sign = vandq_u16(vshrq_n_u16::<8>(quarter), vdupq_n_u16(0x80));
            vmovn_u16(vorrq_u16(vandq_u16(quarter, vdupq_n_u16(0x7f)), sign))
        });
        let (halves, _) = rests.as_chunks_mut::<16>();
        store(&mut halves[0], vcombine_u8(a, b));
        store(&mut halves[1], vcombine_u8(c, d));
        // An exponent below the base is a large number without a sign.
        let [a, b, c, d] = values.map(|quarter| vmovn_u16(vshrq_n_u16::<7>(quarter)));
        let code = [vcombine_u8(a, b), vcombine_u8(c, d)]
            .map(|half| vminq_u8(vsubq_u8(half, base), escape));
        store(codes, vorrq_u8(code[0], vshlq_n_u8::<4>(code[1])));
        sums = added(sums, values);
        let which = escaped_of(code, escape);
        if which != 0 {
            portable::escape(which, group, escapes, &mut escaped)?;
        }
    }
    Some((escaped, vaddvq_s32(sums).cast_unsigned()))
}

/// See [`portable::decode`].
#[target_feature(enable = "neon")]
pub(crate) fn decode(stored: &[u8], base: u8, plain: &mut [u8]) -> Option<u32> {
    let (rests, stored) = stored.split_at_checked(plain.len() / 2)?;
    let (codes, mut escapes) = stored.split_at_checked(plain.len() / 4)?;
    let (groups, _) = plain.as_chunks_mut::<GROUP_BYTES>();
    let (rests, _) = rests.as_chunks::<GROUP>();
    let (codes, _) = codes.as_chunks::<{ GROUP / 2 }>();
    let (base, escape) = (vdupq_n_u8(base), vdupq_n_u8(ESCAPE));
    let (mut sums, mut sum) = (vdupq_n_s32(0), 0u32);
    for ((group, rests), codes) in groups.iter_mut().zip(rests).zip(codes) {
        let pairs = load(codes);
        let code = [vandq_u8(pairs, escape), vshrq_n_u8::<4>(pairs)];
        let [exponents, rests] = [
            code.map(|half| vaddq_u8(half, base)),
            [load(&rests.as_chunks().0[0]), load(&rests.as_chunks().0[1])],
        ]
        .map(wide);
        let values = [0, 1, 2, 3].map(|at: usize| {
            let sign = vshlq_n_u16::<8>(vandq_u16(rests[at], vdupq_n_u16(0x80)));
            let rest = vorrq_u16(vandq_u16(rests[at], vdupq_n_u16(0x7f)), sign);
            vorrq_u16(rest, vshlq_n_u16::<7>(exponents[at]))
        });
        store_group(group, values);
        sums = added(sums, values);
        let which = escaped_of(code, escape);
        if which != 0 {
            portable::restore(which, group, &mut escapes, &mut sum)?;
        }
    }
    let sums = vaddvq_s32(sums).cast_unsigned();
    escapes.is_empty().then(|| sum.wrapping_add(sums))
}

/// See [`portable::sum`].
#[target_feature(enable = "neon")]
pub(crate) fn sum(plain: &[u8]) -> u32 {
    let (groups, rest) = plain.as_chunks::<GROUP_BYTES>();
    let sums = groups
        .iter()
        .fold(vdupq_n_s32(0), |sums, group| added(sums, load_group(group)));
    vaddvq_s32(sums)
        .cast_unsigned()
        .wrapping_add(portable::sum(rest))
}

/// Bytes as values.
#[target_feature(enable = "neon")]
fn wide(halves: [uint8x16_t; 2]) -> Quarters {
    let [a, b] = halves;
    [
        vmovl_u8(vget_low_u8(a)),
        vmovl_u8(vget_high_u8(a)),
        vmovl_u8(vget_low_u8(b)),
        vmovl_u8(vget_high_u8(b)),
    ]
}

/// Sums of 32 bits with the values of a group, as signed numbers.
#[target_feature(enable = "neon")]
fn added(sums: int32x4_t, values: Quarters) -> int32x4_t {
    values.iter().fold(sums, |sums, quarter| {
        vpadalq_s16(sums, vreinterpretq_s16_u16(*quarter))
    })
}

/// A bit for each value of a group whose code is the escape.
#[target_feature(enable = "neon")]
fn escaped_of(code: [uint8x16_t; 2], escape: uint8x16_t) -> u32 {
    let found = code.map(|half| vceqq_u8(half, escape));
    if vmaxvq_u8(vorrq_u8(found[0], found[1])) == 0 {
        return 0;
    }
    let mut bytes = [0; GROUP];
    let (halves, _) = bytes.as_chunks_mut::<16>();
    store(&mut halves[0], found[0]);
    store(&mut halves[1], found[1]);
    let bit = |(at, byte): (usize, &u8)| u32::from(*byte & 1) << at;
    bytes.iter().enumerate().map(bit).sum()
}

#[target_feature(enable = "neon")]
fn load_group(group: &[u8; GROUP_BYTES]) -> Quarters {
    let (quarters, _) = group.as_chunks::<16>();
    [0, 1, 2, 3].map(|at: usize| vreinterpretq_u16_u8(load(&quarters[at])))
}

#[target_feature(enable = "neon")]
fn store_group(group: &mut [u8; GROUP_BYTES], values: Quarters) {
    let (quarters, _) = group.as_chunks_mut::<16>();
    for (into, quarter) in quarters.iter_mut().zip(values) {
        store(into, vreinterpretq_u8_u16(quarter));
    }
}

#[target_feature(enable = "neon")]
fn load(bytes: &[u8; 16]) -> uint8x16_t {
    // SAFETY: the reference is valid for 16 bytes, and this load has no alignment.
    unsafe { vld1q_u8(bytes.as_ptr()) }
}

#[target_feature(enable = "neon")]
fn store(bytes: &mut [u8; 16], value: uint8x16_t) {
    // SAFETY: the reference is valid for 16 bytes, and this store has no alignment.
    unsafe { vst1q_u8(bytes.as_mut_ptr(), value) }
}

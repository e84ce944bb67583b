//! The form for aarch64 with NEON. A quarter of a group is a register of eight values.

use std::arch::aarch64::*;

use crate::block::{CODES, ESCAPE, GROUP, GROUP_BYTES, parts, places};
use crate::portable;

type Quarters = [uint16x8_t; 4];

/// See [`portable::encode`].
#[target_feature(enable = "neon")]
pub(crate) fn encode(plain: &[u8], base: u8, out: &mut [u8]) -> Option<(usize, u32)> {
    let (rests, codes, escapes) = places(plain.len(), out)?;
    let (groups, _) = plain.as_chunks::<GROUP_BYTES>();
    let base = vdupq_n_u8(base);
    let (mut escaped, mut sums) = (0, vdupq_n_s32(0));
    for ((group, rests), codes) in groups.iter().zip(rests).zip(codes) {
        let [a, b, c, d] = load_group(group);
        let (halves, _) = rests.as_chunks_mut::<16>();
        store(&mut halves[0], vcombine_u8(rest_of(a), rest_of(b)));
        store(&mut halves[1], vcombine_u8(rest_of(c), rest_of(d)));
        let low = code_of(exponents_of(a, b), base);
        let high = code_of(exponents_of(c, d), base);
        store(codes, vorrq_u8(low, vshlq_n_u8::<4>(high)));
        sums = added(sums, [a, b, c, d]);
        let which = escaped_of(low, high);
        if which != 0 {
            portable::escape(which, group, escapes, &mut escaped)?;
        }
    }
    Some((escaped, vaddvq_s32(sums).cast_unsigned()))
}

/// See [`portable::decode`].
#[target_feature(enable = "neon")]
pub(crate) fn decode(stored: &[u8], base: u8, plain: &mut [u8]) -> Option<u32> {
    let (rests, codes, mut escapes) = parts(plain.len(), stored)?;
    let (groups, _) = plain.as_chunks_mut::<GROUP_BYTES>();
    let base = vdupq_n_u8(base);
    let (mut sums, mut sum) = (vdupq_n_s32(0), 0u32);
    for ((group, rests), codes) in groups.iter_mut().zip(rests).zip(codes) {
        let pairs = load(codes);
        let low = vandq_u8(pairs, vdupq_n_u8(ESCAPE));
        let high = vshrq_n_u8::<4>(pairs);
        let (halves, _) = rests.as_chunks::<16>();
        let [a, b] = values_of(load(&halves[0]), vaddq_u8(low, base));
        let [c, d] = values_of(load(&halves[1]), vaddq_u8(high, base));
        store_group(group, [a, b, c, d]);
        sums = added(sums, [a, b, c, d]);
        let which = escaped_of(low, high);
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
    let mut sums = vdupq_n_s32(0);
    for group in groups {
        sums = added(sums, load_group(group));
    }
    vaddvq_s32(sums)
        .cast_unsigned()
        .wrapping_add(portable::sum(rest))
}

/// Sign and mantissa of eight values, as bytes.
#[inline]
#[target_feature(enable = "neon")]
fn rest_of(values: uint16x8_t) -> uint8x8_t {
    let sign = vandq_u16(vshrq_n_u16::<8>(values), vdupq_n_u16(0x80));
    vmovn_u16(vorrq_u16(vandq_u16(values, vdupq_n_u16(0x7f)), sign))
}

/// The exponents of 16 values.
#[inline]
#[target_feature(enable = "neon")]
fn exponents_of(a: uint16x8_t, b: uint16x8_t) -> uint8x16_t {
    vcombine_u8(
        vmovn_u16(vshrq_n_u16::<7>(a)),
        vmovn_u16(vshrq_n_u16::<7>(b)),
    )
}

/// The codes of 16 exponents. One below the base is a large number without a sign.
#[inline]
#[target_feature(enable = "neon")]
fn code_of(exponents: uint8x16_t, base: uint8x16_t) -> uint8x16_t {
    vminq_u8(vsubq_u8(exponents, base), vdupq_n_u8(ESCAPE))
}

/// 16 values. The exponents of escapes come later.
#[inline]
#[target_feature(enable = "neon")]
fn values_of(rests: uint8x16_t, exponents: uint8x16_t) -> [uint16x8_t; 2] {
    let low = value_of(vget_low_u8(rests), vget_low_u8(exponents));
    [low, value_of(vget_high_u8(rests), vget_high_u8(exponents))]
}

/// Eight values.
#[inline]
#[target_feature(enable = "neon")]
fn value_of(rests: uint8x8_t, exponents: uint8x8_t) -> uint16x8_t {
    let rests = vmovl_u8(rests);
    let sign = vshlq_n_u16::<8>(vandq_u16(rests, vdupq_n_u16(0x80)));
    let rests = vorrq_u16(vandq_u16(rests, vdupq_n_u16(0x7f)), sign);
    vorrq_u16(rests, vshlq_n_u16::<7>(vmovl_u8(exponents)))
}

/// Sums of 32 bits with the values of a group, as signed numbers.
#[inline]
#[target_feature(enable = "neon")]
fn added(mut sums: int32x4_t, values: Quarters) -> int32x4_t {
    for quarter in values {
        sums = vpadalq_s16(sums, vreinterpretq_s16_u16(quarter));
    }
    sums
}

/// A bit for each value of a group whose code is the escape.
#[inline]
#[target_feature(enable = "neon")]
fn escaped_of(low: uint8x16_t, high: uint8x16_t) -> u32 {
    let low = vceqq_u8(low, vdupq_n_u8(ESCAPE));
    let high = vceqq_u8(high, vdupq_n_u8(ESCAPE));
    if vmaxvq_u8(vorrq_u8(low, high)) == 0 {
        return 0;
    }
    let mut found = [0; GROUP];
    let (halves, _) = found.as_chunks_mut::<16>();
    store(&mut halves[0], low);
    store(&mut halves[1], high);
    let mut which = 0;
    for (at, byte) in found.iter().enumerate() {
        which |= u32::from(*byte & 1) << at;
    }
    which
}

#[inline]
#[target_feature(enable = "neon")]
fn load_group(group: &[u8; GROUP_BYTES]) -> Quarters {
    let (quarters, _) = group.as_chunks::<16>();
    [
        vreinterpretq_u16_u8(load(&quarters[0])),
        vreinterpretq_u16_u8(load(&quarters[1])),
        vreinterpretq_u16_u8(load(&quarters[2])),
        vreinterpretq_u16_u8(load(&quarters[3])),
    ]
}

#[inline]
#[target_feature(enable = "neon")]
fn store_group(group: &mut [u8; GROUP_BYTES], values: Quarters) {
    let (quarters, _) = group.as_chunks_mut::<16>();
    for (into, quarter) in quarters.iter_mut().zip(values) {
        store(into, vreinterpretq_u8_u16(quarter));
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn load(bytes: &[u8; 16]) -> uint8x16_t {
    // SAFETY: the reference is valid for 16 bytes, and this load has no alignment.
    unsafe { vld1q_u8(bytes.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn store(bytes: &mut [u8; 16], value: uint8x16_t) {
    // SAFETY: the reference is valid for 16 bytes, and this store has no alignment.
    unsafe { vst1q_u8(bytes.as_mut_ptr(), value) }
}

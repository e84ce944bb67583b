//! The form for x86-64 with AVX2. Half a group is a register of 16 values.

use std::arch::x86_64::*;

use crate::block::{ESCAPE, GROUP_BYTES, parts, places};
use crate::portable;

/// See [`portable::encode`].
#[target_feature(enable = "avx2")]
pub(crate) fn encode(plain: &[u8], base: u8, out: &mut [u8]) -> Option<(usize, u32)> {
    let (rests, codes, escapes) = places(plain.len(), out)?;
    let (groups, _) = plain.as_chunks::<GROUP_BYTES>();
    let base = each(base);
    let (mut escaped, mut sums) = (0, _mm256_setzero_si256());
    for ((group, rests), codes) in groups.iter().zip(rests).zip(codes) {
        let [a, b] = load_group(group);
        store(rests, bytes_of(rest_of(a), rest_of(b)));
        let [a_code, b_code] = [code_of(a, base), code_of(b, base)];
        let pairs = _mm256_or_si256(a_code, _mm256_slli_epi16::<4>(b_code));
        let (low, high) = (
            _mm256_castsi256_si128(pairs),
            _mm256_extracti128_si256::<1>(pairs),
        );
        store_half(codes, _mm_packus_epi16(low, high));
        sums = added(sums, a, b);
        let which = escaped_of(a_code, b_code);
        if which != 0 {
            portable::escape(which, group, escapes, &mut escaped)?;
        }
    }
    Some((escaped, total(sums)))
}

/// See [`portable::decode`].
#[target_feature(enable = "avx2")]
pub(crate) fn decode(stored: &[u8], base: u8, plain: &mut [u8]) -> Option<u32> {
    let (rests, codes, mut escapes) = parts(plain.len(), stored)?;
    let (groups, _) = plain.as_chunks_mut::<GROUP_BYTES>();
    let base = each(base);
    let (mut sums, mut sum) = (_mm256_setzero_si256(), 0u32);
    for ((group, rests), codes) in groups.iter_mut().zip(rests).zip(codes) {
        let pairs = _mm256_cvtepu8_epi16(load_half(codes));
        let a_code = _mm256_and_si256(pairs, each(ESCAPE));
        let b_code = _mm256_srli_epi16::<4>(pairs);
        let rest = load(rests);
        let a = value_of(_mm256_castsi256_si128(rest), a_code, base);
        let b = value_of(_mm256_extracti128_si256::<1>(rest), b_code, base);
        store_group(group, a, b);
        sums = added(sums, a, b);
        let which = escaped_of(a_code, b_code);
        if which != 0 {
            portable::restore(which, group, &mut escapes, &mut sum)?;
        }
    }
    escapes.is_empty().then(|| sum.wrapping_add(total(sums)))
}

/// See [`portable::sum`].
#[target_feature(enable = "avx2")]
pub(crate) fn sum(plain: &[u8]) -> u32 {
    let (groups, rest) = plain.as_chunks::<GROUP_BYTES>();
    let mut sums = _mm256_setzero_si256();
    for group in groups {
        let [a, b] = load_group(group);
        sums = added(sums, a, b);
    }
    total(sums).wrapping_add(portable::sum(rest))
}

/// Brings memory into the caches.
#[target_feature(enable = "avx2")]
pub(crate) fn fetch(bytes: &[u8]) {
    for line in bytes.chunks(64) {
        _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast());
    }
}

/// Sign and mantissa of 16 values, as bytes in 16 bits each.
#[inline]
#[target_feature(enable = "avx2")]
fn rest_of(values: __m256i) -> __m256i {
    let sign = _mm256_and_si256(_mm256_srli_epi16::<8>(values), each(0x80));
    _mm256_or_si256(_mm256_and_si256(values, each(0x7f)), sign)
}

/// The codes of 16 values. An exponent below the base is a large number without a sign.
#[inline]
#[target_feature(enable = "avx2")]
fn code_of(values: __m256i, base: __m256i) -> __m256i {
    let exponent = _mm256_and_si256(_mm256_srli_epi16::<7>(values), each(0xff));
    _mm256_min_epu16(_mm256_sub_epi16(exponent, base), each(ESCAPE))
}

/// 16 values. The exponents of escapes come later.
#[inline]
#[target_feature(enable = "avx2")]
fn value_of(rest: __m128i, code: __m256i, base: __m256i) -> __m256i {
    let rest = _mm256_cvtepu8_epi16(rest);
    let sign = _mm256_slli_epi16::<8>(_mm256_and_si256(rest, each(0x80)));
    let rest = _mm256_or_si256(_mm256_and_si256(rest, each(0x7f)), sign);
    let exponent = _mm256_and_si256(_mm256_add_epi16(code, base), each(0xff));
    _mm256_or_si256(rest, _mm256_slli_epi16::<7>(exponent))
}

/// 16 times the same value.
#[inline]
#[target_feature(enable = "avx2")]
fn each(value: u8) -> __m256i {
    _mm256_set1_epi16(i16::from(value))
}

/// Sums of 32 bits with the values of a group, as signed numbers.
#[inline]
#[target_feature(enable = "avx2")]
fn added(sums: __m256i, a: __m256i, b: __m256i) -> __m256i {
    let one = each(1);
    let pairs = _mm256_add_epi32(_mm256_madd_epi16(a, one), _mm256_madd_epi16(b, one));
    _mm256_add_epi32(sums, pairs)
}

#[target_feature(enable = "avx2")]
fn total(sums: __m256i) -> u32 {
    let mut bytes = [0; 32];
    store(&mut bytes, sums);
    let (words, _) = bytes.as_chunks::<4>();
    words
        .iter()
        .map(|word| u32::from_le_bytes(*word))
        .fold(0, u32::wrapping_add)
}

/// A bit for each value of a group whose code is the escape.
#[inline]
#[target_feature(enable = "avx2")]
fn escaped_of(a_code: __m256i, b_code: __m256i) -> u32 {
    let a = _mm256_cmpeq_epi16(a_code, each(ESCAPE));
    let b = _mm256_cmpeq_epi16(b_code, each(ESCAPE));
    let bytes = _mm256_permute4x64_epi64::<0xd8>(_mm256_packs_epi16(a, b));
    _mm256_movemask_epi8(bytes).cast_unsigned()
}

/// The low bytes of 32 values below 256.
#[inline]
#[target_feature(enable = "avx2")]
fn bytes_of(a: __m256i, b: __m256i) -> __m256i {
    _mm256_permute4x64_epi64::<0xd8>(_mm256_packus_epi16(a, b))
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_group(group: &[u8; GROUP_BYTES]) -> [__m256i; 2] {
    let (halves, _) = group.as_chunks::<32>();
    [load(&halves[0]), load(&halves[1])]
}

#[inline]
#[target_feature(enable = "avx2")]
fn store_group(group: &mut [u8; GROUP_BYTES], a: __m256i, b: __m256i) {
    let (halves, _) = group.as_chunks_mut::<32>();
    store(&mut halves[0], a);
    store(&mut halves[1], b);
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: the reference is valid for 32 bytes, and this load has no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_half(bytes: &[u8; 16]) -> __m128i {
    // SAFETY: the reference is valid for 16 bytes, and this load has no alignment.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(bytes: &mut [u8; 32], value: __m256i) {
    // SAFETY: the reference is valid for 32 bytes, and this store has no alignment.
    unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast(), value) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store_half(bytes: &mut [u8; 16], value: __m128i) {
    // SAFETY: the reference is valid for 16 bytes, and this store has no alignment.
    unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), value) }
}

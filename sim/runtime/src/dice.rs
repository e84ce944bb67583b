//! The only source of randomness of a run, and the digest by which two runs of a seed are compared.

use std::collections::VecDeque;

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

/// A source of randomness with the few draws that the simulation makes.
pub struct Dice(Source);

enum Source {
    Seeded(Pcg64Mcg),
    /// Each draw takes the fewest bytes that can express it. After the last byte a generator takes
    /// over, so that the run still comes to rest.
    Script {
        bytes: VecDeque<u8>,
        after: Pcg64Mcg,
    },
}

impl Dice {
    /// Dice whose draws follow from a seed.
    #[must_use]
    pub fn new(seed: u64) -> Dice {
        Dice(Source::Seeded(Pcg64Mcg::seed_from_u64(seed)))
    }

    /// Dice that take their draws from a script.
    #[must_use]
    pub fn scripted(script: &[u8]) -> Dice {
        Dice(Source::Script {
            bytes: script.iter().copied().collect(),
            after: Pcg64Mcg::seed_from_u64(0),
        })
    }

    /// A number in `0..bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        match &mut self.0 {
            Source::Seeded(generator) => generator.random_range(0..bound),
            Source::Script { .. } => self.between(0, bound as u64 - 1) as usize,
        }
    }

    /// A number in `low..=high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        match &mut self.0 {
            Source::Seeded(generator) => generator.random_range(low..=high),
            Source::Script { bytes, after } => {
                let span = high - low;
                let width = (u64::BITS - span.leading_zeros()).div_ceil(8) as usize;
                if bytes.len() < width {
                    return after.random_range(low..=high);
                }
                let drawn = bytes.drain(..width);
                let word = drawn.fold(0, |word, byte| word << 8 | u64::from(byte));
                low + span.checked_add(1).map_or(word, |bound| word % bound)
            }
        }
    }

    /// Whether an event of this probability happens.
    pub fn chance(&mut self, probability: f64) -> bool {
        if probability <= 0.0 {
            return false;
        }
        match &mut self.0 {
            Source::Seeded(generator) => generator.random_bool(probability.min(1.0)),
            Source::Script { .. } => (self.between(0, 0xffff) as f64) < probability * 65536.0,
        }
    }

    /// One of several.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Other dice, whose draws follow from these.
    #[must_use]
    pub fn fork(&mut self) -> Dice {
        let most = match self.0 {
            Source::Seeded(_) => u64::MAX,
            Source::Script { .. } => 0xff,
        };
        Dice::new(self.between(0, most))
    }
}

/// Mixes two words into one (the finalizer of SplitMix64).
#[must_use]
pub fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.rotate_left(23) ^ b.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

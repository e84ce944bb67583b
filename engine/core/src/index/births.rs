//! The mean time of the puts of a segment's pages. See [`ages`](crate::ages).

use std::sync::atomic::Ordering;

use super::Index;
use super::types::SegmentId;

impl Index {
    /// Counts a page of `blocks` blocks that was put at `born_ms` into the mean of a segment that
    /// had so many blocks of pages before.
    pub fn bear(&self, segment: SegmentId, before: u32, blocks: u32, born_ms: u64) {
        let born = &self.born[segment.0 as usize];
        let mean = match (before, born.load(Ordering::Relaxed), born_ms) {
            (0, _, first) => first,
            (_, known, 0) | (_, 0, known) => known,
            (_, mean, born_ms) => {
                let (before, blocks) = (u128::from(before), u128::from(blocks));
                let sum = u128::from(mean) * before + u128::from(born_ms) * blocks;
                u64::try_from(sum / (before + blocks)).unwrap_or(mean)
            }
        };
        born.store(mean, Ordering::Relaxed);
    }

    /// The mean time of the puts of a segment's pages, in milliseconds since 1970; 0 if unknown.
    pub fn born_ms(&self, segment: SegmentId) -> u64 {
        self.born[segment.0 as usize].load(Ordering::Relaxed)
    }
}

//! Free segments lent to whoever writes their blocks for the first time.
//!
//! A lent segment stays free and holds nothing, but is in no list that segments are opened from: until it is taken back nobody else
//! writes it. Only segments without a life on disk are lent, and only while many are free: reclaim, and puts that need room,
//! never miss one.

use larder_format::{BLOCK_BYTES, Serial};

use super::{Core, Effect};
use crate::index::SegmentId;

/// A free segment that its holder alone may write.
#[derive(Debug)]
pub(crate) struct Lent {
    segment: SegmentId,
    /// Index of its volume.
    pub volume: usize,
    /// Where it begins there, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

impl Core {
    /// Lends the segment that is opened next of those that were never used and not lent before; `None` when there is none, or when
    /// few are free.
    pub(crate) fn lend_unused(&mut self) -> Option<Lent> {
        if self.space.free_segments() <= 2 * self.free_target() {
            return None;
        }
        let segment = self.space.lend_unused()?;
        Some(Lent {
            segment,
            volume: self.space.volume_of(segment),
            offset: self.space.offset_of(segment),
            bytes: u64::from(self.config.segment_blocks) * BLOCK_BYTES as u64,
        })
    }

    /// Takes a segment back. Nothing of the holder's may be under way in it any more.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "who gives it back has it no more"
    )]
    pub(crate) fn take_back(&mut self, lent: Lent) {
        debug_assert_eq!(self.space.segment(lent.segment).sequence, Serial::ZERO);
        self.space.take_back(lent.segment);
        self.write_homeless();
        self.effects.push(Effect::Room);
    }
}

//! The limits of a store: which pages puts store, how much is written, how much is kept.

use super::Core;
use crate::policy::AdmissionPolicy;

impl Core {
    /// Admits new pages by this policy from now on; without one all are admitted.
    pub fn admit_by(&mut self, policy: Box<dyn AdmissionPolicy>) {
        self.puts.admit_by(policy);
    }

    /// Writes at most so many bytes a day from now on. Pages that the budget does not take are
    /// refused.
    pub fn limit_writes(&mut self, bytes_a_day: u64) {
        self.puts.limit_writes(&self.base, bytes_a_day);
    }

    /// Keeps at most so many blocks of pages, as `capacity::usable_blocks` counts them, to leave
    /// reclaim more room. A limit above that of the geometry changes nothing.
    pub fn keep_at_most(&mut self, blocks: u64) {
        self.segments.keep_at_most(blocks);
    }
}

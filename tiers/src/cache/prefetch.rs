//! Reads from L3 for waiting requests.

use super::agree::Call;
use super::{Cache, CacheError};
use crate::core::{Declined, PrefetchId, PrefetchState};
use crate::prompt::Prompt;

impl Cache {
    /// Starts to read into L2 the pages that L3 has after the cached part of a prompt, at most as
    /// many as the share of prefetches in L2 has left ([`PrefetchConfig::l2_percent_max`]). Poll
    /// the prefetch until it has ended, or cancel it: until then its pages count towards that
    /// share.
    ///
    /// [`PrefetchConfig::l2_percent_max`]: crate::config::PrefetchConfig::l2_percent_max
    ///
    /// # Errors
    /// Nothing was started, with the reason.
    pub fn prefetch(&mut self, prompt: &mut Prompt) -> Result<PrefetchId, Declined> {
        self.agreed
            .called(Call::Prefetch, [prompt.words().len() as u64]);
        let result = self.core.prefetch(prompt);
        self.carry_out();
        result
    }

    /// The state of a prefetch for which a request waits. All ranks must call this.
    ///
    /// # Errors
    /// The group of ranks is broken.
    pub fn poll_prefetch(&mut self, id: PrefetchId) -> Result<PrefetchState, CacheError> {
        let overdue = self.core.is_prefetch_overdue(id, self.time.now_us());
        let number = u64::from(id.0);
        let overdue = self.agreed.any(Call::PollPrefetch, number, overdue)?;
        let state = self.core.poll_prefetch(id, overdue);
        self.carry_out();
        Ok(state)
    }

    /// Whether a request waits no longer for a prefetch: it has ended, or its time is over.
    pub(crate) fn is_prefetch_over(&mut self, id: PrefetchId) -> bool {
        let now = self.time.now_us();
        !self.core.is_prefetch_waiting(id) || self.core.is_prefetch_overdue(id, now)
    }

    /// The number of pages that a prefetch has brought, or the reason why it brought none, without
    /// waiting any longer: the pages that have arrived stay, and the prefetch is over.
    pub fn end_prefetch(&mut self, id: PrefetchId) -> PrefetchState {
        self.agreed.called(Call::EndPrefetch, [u64::from(id.0)]);
        let state = self.core.poll_prefetch(id, true);
        self.carry_out();
        state
    }

    /// Cancels a prefetch whose request has ended. No page is kept.
    pub fn cancel_prefetch(&mut self, id: PrefetchId) {
        self.agreed.called(Call::CancelPrefetch, [u64::from(id.0)]);
        self.core.cancel_prefetch(id);
        self.carry_out();
    }
}

//! The end of a cache: the last copies, and the drop.

use std::time::Instant;

use super::agree::{Agreed, Call};
use super::workers::Stuck;
use super::{Cache, CacheError};

impl Cache {
    /// Tries the copies again that have failed, each at most once: pages that L3 has refused for a
    /// while. For an engine that is about to end; [`Cache::drain`] begins with it. All ranks must
    /// call this.
    pub fn retry_failed(&mut self) {
        self.agreed.called(Call::Retry, []);
        self.core.retry_failed();
        self.carry_out();
    }

    /// Polls until the cache is idle. For shutdown and tests. Waits for the device, for L3, and for
    /// the tickets passed to [`Cache::insert`]: all of them must settle, or this never returns.
    /// Pages that L3 refuses are tried once again, and then stay in L2.
    ///
    /// # Errors
    /// The group of ranks is broken.
    pub fn drain(&mut self) -> Result<(), CacheError> {
        self.drain_while(|| true)
    }

    /// As [`Cache::drain`], until `deadline` at the latest. Returns whether the cache is idle. With
    /// other ranks, use [`Cache::drain`]: ranks must make the same calls.
    ///
    /// # Errors
    /// The group of ranks is broken.
    pub fn drain_until(&mut self, deadline: Instant) -> Result<bool, CacheError> {
        self.drain_while(|| Instant::now() < deadline)?;
        Ok(self.is_idle())
    }

    fn drain_while(&mut self, may_wait: impl Fn() -> bool) -> Result<(), CacheError> {
        self.retry_failed();
        while !self.is_idle() && may_wait() {
            if self.poll()? == 0 {
                std::thread::yield_now();
            }
        }
        Ok(())
    }
}

impl Cache {
    /// Ends the cache, as its drop does, but waits for calls of L3 until `deadline` at the latest.
    /// Returns the calls that have not returned by then.
    pub fn end(mut self, deadline: Instant) -> Stuck {
        match &mut self.workers {
            Some(workers) if !self.origin.is_inherited() => workers.end(Some(deadline)),
            _ => Stuck::default(),
        }
    }
}

impl Drop for Cache {
    /// Waits for copies that have begun, because the owner of adopted memory may use it again. Does
    /// not wait for a load whose forwards have not ended: no one may settle their tickets any more.
    /// A device may still execute that load, so the memory of its pools is never freed. A forked
    /// child has no work in flight.
    fn drop(&mut self) {
        if self.origin.is_inherited() {
            // The drop of a rank ends it for the others, and waits for threads.
            std::mem::forget(std::mem::replace(&mut self.agreed, Agreed::new(None)));
            return;
        }
        for copy in std::mem::take(&mut self.copies) {
            if copy.after.is_settled() {
                for transfer in copy.transfers {
                    let _ = transfer.wait();
                }
            } else {
                std::mem::forget(copy);
            }
        }
    }
}

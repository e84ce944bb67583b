//! Emptying a segment for a caller, with all its pages kept.

use std::time::Duration;

use larder_base::runtime::Instant;
use larder_core::core::{Emptying, Fault};

use super::Local;
use crate::error::StoreError;

/// How long a caller waits for its turn behind reclaim.
const TURN_PATIENCE: Duration = Duration::from_secs(1);

/// Interval at which it looks whether it is to go on.
const LOOK: Duration = Duration::from_millis(100);

impl Local {
    /// Empties a segment. Returns the number of pages moved out of it; `None` if it holds other
    /// pages by now. `goes_on` is asked now and then; when it is false, the pages that have not
    /// been moved stay.
    ///
    /// # Errors
    /// [`StoreError::NoRoom`]: no free segment can be spared now, or some page could not be moved.
    pub(crate) fn empty(
        &self,
        wanted: &Emptying,
        goes_on: impl Fn() -> bool,
    ) -> Result<Option<u64>, StoreError> {
        let request = self.new_request();
        let (is_taken, before) = self.with_core(|core| {
            let before = core.counters().moved_as_wanted;
            (core.empty(request, wanted), before)
        });
        if !is_taken {
            return Ok(None);
        }
        let until = Instant::now() + TURN_PATIENCE;
        loop {
            let finished =
                self.wait_a_moment_for(|answers| answers.finished.remove(&request), LOOK);
            match finished {
                Some(Ok(())) => {
                    let after = self.with_core(|core| core.counters().moved_as_wanted);
                    return Ok(Some(after - before));
                }
                Some(Err(Fault::NoRoom | Fault::Write | Fault::Sync | Fault::ReadOnly)) => {
                    return Err(StoreError::NoRoom);
                }
                None if !goes_on() => self.with_core(|core| core.withdraw(request, true)),
                None if Instant::now() >= until => {
                    self.with_core(|core| core.withdraw(request, false));
                }
                None => {}
            }
        }
    }
}

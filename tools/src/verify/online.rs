//! Checks of a store while servers use it: at a limited rate, and with the owner's help.
//!
//! The check reads the volumes without a lock. A page with wrong bytes counts as damaged if a
//! second survey still has it at the same place. It is then read once more through the owner, as
//! any client reads: the owner forgets it, and the next put stores it again.

use std::time::{Duration, Instant};

use larder_engine::survey::{BadPage, Survey};
use larder_engine::{MissReason, OpenOptions, PageStore};

use crate::findings::StoreArgs;
use crate::interrupt::Interrupt;
use crate::open;

/// Longest wait between two looks for a signal.
const LOOK: Duration = Duration::from_millis(200);

/// Limits the rate of a check.
pub(super) struct Pace {
    begun: Instant,
    bytes_per_second: Option<u64>,
}

impl Pace {
    /// Without a rate there is no limit.
    pub(super) fn new(bytes_per_second: Option<u64>) -> Pace {
        Pace {
            begun: Instant::now(),
            bytes_per_second,
        }
    }

    /// Waits until so many bytes may have been read. Whether the check must end.
    pub(super) fn wait(&self, bytes: u64, interrupt: &Interrupt) -> bool {
        let Some(rate) = self.bytes_per_second else {
            return interrupt.is_raised();
        };
        let due = Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64);
        loop {
            let left = due.saturating_sub(self.begun.elapsed());
            if left.is_zero() || interrupt.wait(left.min(LOOK)) {
                return interrupt.is_raised();
            }
        }
    }
}

/// Reads lost pages through the owner, which then drops them. Returns how many it dropped: none
/// without an owner, or if this process may not attach.
pub(super) fn drop_pages(store: &StoreArgs, survey: &Survey, lost: &[BadPage]) -> u64 {
    if lost.is_empty() || larder_engine::report(&store.path).is_err() {
        return 0;
    }
    let options = OpenOptions::default().with(|o| o.volumes = store.volumes.clone());
    let dropped = open::with_any(&store.path, options, |owner| {
        let mut dropped = 0;
        for BadPage { page, .. } in lost {
            let facts = &survey.namespaces[page.namespace];
            let Some(namespace) = &facts.record else {
                continue;
            };
            let id = owner.namespace(namespace)?;
            let read = owner.get_lent(id, &[page.key], None);
            let is_dropped = |read: &Result<_, MissReason>| {
                matches!(read, Err(MissReason::Damaged | MissReason::ReadError))
            };
            dropped += read.iter().filter(|read| is_dropped(read)).count() as u64;
        }
        Ok(dropped)
    });
    dropped.unwrap_or_else(|failure| {
        crate::cli::complain(&format_args!(
            "the owner was not told of the damage: {failure}"
        ));
        0
    })
}

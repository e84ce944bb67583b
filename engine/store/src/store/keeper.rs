//! The housekeeper thread: ticks the core when something is due, runs the steps of reclaim, keeps
//! the policy's lessons, counts lookups for the curve, and removes old pages. The reads and copies
//! of a step are carried out on this thread.
//!
//! It sleeps until it is notified.

use std::sync::Arc;
use std::time::Duration;

use larder_base::planted;
use larder_base::runtime::thread::JoinHandle;
use larder_core::core::Core;
use larder_format::BLOCK_BYTES;

use super::lessons::Lessons;
use super::lifetimes::Watch;
use super::local::Local;
use crate::error::{StoreError, io_error};

/// Pages of a victim planned in one step: a tenth of a millisecond, for which other callers wait
/// for the core.
const PLANNED_AT_ONCE: usize = 256;

/// The running thread.
pub(super) struct Housekeeper {
    local: Arc<Local>,
    thread: JoinHandle<()>,
}

impl Housekeeper {
    pub(super) fn start(
        local: Arc<Local>,
        lessons: Option<Lessons>,
        watch: Watch,
    ) -> Result<Housekeeper, StoreError> {
        let worker = local.clone();
        let thread = larder_base::runtime::thread::Builder::new()
            .name("larder-keeper".to_owned())
            .spawn(move || run(&worker, lessons, watch))
            .map_err(|e| {
                io_error(
                    "starting the housekeeping thread",
                    std::path::Path::new("thread"),
                    e,
                )
            })?;
        local.with_core(Core::start);
        Ok(Housekeeper { local, thread })
    }

    /// Lets the thread finish the pages it is moving, and ends it.
    pub(super) fn stop(self) {
        self.local.inbox.lock().stop = true;
        self.local.inbox_changed.notify_one();
        if self.thread.join().is_err() {
            tracing::error!(
                "the housekeeping thread panicked; the store recovers at the next open"
            );
        }
    }
}

fn run(local: &Local, mut lessons: Option<Lessons>, mut watch: Watch) {
    let mut stopping = false;
    let mut keep = |now| {
        if let Some(lessons) = &mut lessons {
            let put_blocks = local.with_core(|core| core.counters().blocks_put);
            lessons.write(&local.index, put_blocks * BLOCK_BYTES as u64, now);
        }
    };
    keep(true);
    loop {
        let mut inbox = local.inbox.lock();
        while !inbox.reclaim && !inbox.lookups && !inbox.quotas && inbox.stop == stopping {
            match inbox.wake_at.into_iter().chain(watch.due(local)).min() {
                Some(at) => {
                    let now = local.now_ms();
                    if at <= now {
                        break;
                    }
                    local
                        .inbox_changed
                        .wait_for(&mut inbox, Duration::from_millis(at - now));
                }
                None => local.inbox_changed.wait(&mut inbox),
            }
        }
        stopping = inbox.stop;
        inbox.reclaim = false;
        (inbox.wake_at, inbox.quotas) = (None, false);
        let lookups = std::mem::take(&mut inbox.lookups);
        drop(inbox);
        if lookups {
            local.curve.count();
        }
        if stopping {
            local.with_core(Core::stop_reclaim);
        }
        while local.with_core_by_turns(|core| core.reclaim_step(PLANNED_AT_ONCE)) {}
        if !stopping {
            watch.look(local);
        }
        keep(stopping && !planted!(UnkeptPages));
        if stopping && !local.with_core(|core| core.is_reclaiming()) {
            return;
        }
    }
}

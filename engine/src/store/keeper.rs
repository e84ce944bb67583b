//! The housekeeping thread: ticks the core when something falls due, and moves pages out of segments that are reclaimed.
//!
//! It sleeps until it is called.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use larder_format::{DescriptorBlock, StoreId, Superblock};

use super::local::Local;
use super::mover::{batch, move_pages, read_blocks};
use crate::core::{Core, Victim};
use crate::error::StoreError;
use crate::recovery::scan::Spot;

/// Pages of a victim looked at in one step: a tenth of a millisecond, for which nobody else has the core.
const PLANNED_AT_ONCE: usize = 256;

/// Bytes of pages moved at once.
const MOVE_BYTES: u64 = 8 << 20;

/// The running thread.
pub(super) struct Keeper {
    local: Arc<Local>,
    thread: JoinHandle<()>,
}

impl Keeper {
    pub(super) fn start(local: Arc<Local>, superblock: &Superblock) -> Result<Keeper, StoreError> {
        let place = Place {
            store: superblock.store,
            segment_blocks: superblock.segment_blocks,
        };
        let worker = local.clone();
        let thread = std::thread::Builder::new()
            .name("larder-keeper".to_owned())
            .spawn(move || run(&worker, place))
            .map_err(|e| {
                StoreError::io(
                    "starting the housekeeping thread",
                    std::path::Path::new("thread"),
                    e,
                )
            })?;
        local.with_core(Core::start);
        Ok(Keeper { local, thread })
    }

    /// Lets it finish the pages it is moving, and ends it.
    pub(super) fn stop(self) {
        self.local.errands.lock().stop = true;
        self.local.errand.notify_one();
        if self.thread.join().is_err() {
            tracing::error!(
                "the housekeeping thread panicked; the store recovers at the next open"
            );
        }
    }
}

/// What a victim's blocks are recognised by.
#[derive(Clone, Copy)]
struct Place {
    store: StoreId,
    segment_blocks: u32,
}

fn run(local: &Local, place: Place) {
    loop {
        let mut errands = local.errands.lock();
        while !errands.stop && !errands.reclaim {
            match errands.wake_at {
                Some(at) => {
                    let now = local.now_ms();
                    if at <= now {
                        break;
                    }
                    local
                        .errand
                        .wait_for(&mut errands, Duration::from_millis(at - now));
                }
                None => local.errand.wait(&mut errands),
            }
        }
        if errands.stop {
            return;
        }
        errands.reclaim = false;
        errands.wake_at = None;
        drop(errands);
        local.with_core(|_| ());
        while let Some(victim) = local.with_core(Core::next_victim) {
            let spot = Spot {
                store: place.store,
                volume: victim.volume,
                number: victim.number,
                segment_blocks: place.segment_blocks,
            };
            let blocks = read_blocks(local.disk.as_ref(), &spot, &victim);
            if blocks.some_unreadable {
                local.with_core(|core| core.put_back_unread(&victim));
                if local.errands.lock().stop {
                    break;
                }
                continue;
            }
            let moved_all = empty(local, &victim, blocks.whole);
            let released = local.with_core(|core| core.finish_victim(&victim, moved_all));
            if !released || local.errands.lock().stop {
                break;
            }
        }
    }
}

/// Moves what is worth it out of a victim with these descriptor blocks; false when some page found no room, or when something could not
/// be read that a later try may be able to.
fn empty(local: &Local, victim: &Victim, blocks: Vec<DescriptorBlock>) -> bool {
    let mut plan = local.with_core(|core| core.begin_plan(victim, blocks));
    let moves = loop {
        let go_on = |core: &mut Core| core.go_on_planning(&mut plan, PLANNED_AT_ONCE);
        if let Some(moves) = local.with_core_by_turns(go_on) {
            break moves;
        }
        if local.errands.lock().stop {
            return false;
        }
    };
    let mut rest = moves.as_slice();
    while !rest.is_empty() {
        let (now, later) = rest.split_at(batch(rest, MOVE_BYTES));
        if !move_pages(local, now) || local.errands.lock().stop {
            return false;
        }
        rest = later;
    }
    true
}

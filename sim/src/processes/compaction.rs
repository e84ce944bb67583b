//! A process that compacts the store beside its owner: it has segments emptied over a connection
//! (`share::emptier` of the engine).
//!
//! As a real compaction, it knows the segments from the volumes, which it reads without the lock:
//! a segment may be in another generation before its request arrives.

use larder_engine::StoreError;
use larder_engine::format::{BLOCK_BYTES, SEGMENTS_OFFSET, SegmentHeader, Serial};
use larder_sim_runtime::{Machine, note};
use larder_store::share::emptier::Emptier;

use super::plan::Plan;
use super::process::Shared;
use crate::classes::Class;

/// Most pages of a segment in an order of the caller.
const STARTS_MAX: usize = 40;

/// A segment that has held pages.
pub struct Site {
    volume: usize,
    number: u32,
    generation: Serial,
}

/// The segments by the headers on the volumes.
pub fn survey(plan: &Plan, machine: &Machine) -> Vec<Site> {
    let mut sites = Vec::new();
    for (volume, path) in plan.volumes.iter().enumerate() {
        let first = SEGMENTS_OFFSET as usize / BLOCK_BYTES;
        for number in 0..plan.segments {
            let at = first + (number * plan.segment_blocks) as usize;
            let mut block = [0; BLOCK_BYTES];
            machine.with_medium(path, |medium| medium.visible(at).render(&mut block));
            let Ok(header) = SegmentHeader::check(&block) else {
                continue;
            };
            let generation = header.identity().sequence;
            if generation != Serial::ZERO {
                sites.push(Site {
                    volume,
                    number,
                    generation,
                });
            }
        }
    }
    sites
}

/// Has these segments emptied, some of their pages in an order of its own.
///
/// # Panics
/// If the owner refuses for a reason that it cannot have.
pub fn compact(shared: &Shared, sites: &[Site]) {
    let outcome = try_to(shared, sites);
    note(|| format!("a compaction ends: {outcome:?}"));
    if let Err(error) = outcome {
        let is_expected = matches!(
            error,
            StoreError::OwnerGone
                | StoreError::NotServed { .. }
                | StoreError::Locked { .. }
                | StoreError::Unanswered { .. }
        );
        let has_write_errors = shared.borrow().plan.has_write_errors();
        assert!(
            is_expected || has_write_errors,
            "a compaction fails: {error} ({error:?})"
        );
    }
}

fn try_to(shared: &Shared, sites: &[Site]) -> Result<(), StoreError> {
    let path = shared.borrow().plan.path().to_owned();
    let owner = Emptier::reach(&path)?;
    for site in sites {
        let starts = {
            let state = &mut *shared.borrow_mut();
            let count = state.dice.below(state.plan.segment_blocks as usize);
            let blocks = state.plan.segment_blocks;
            (0..count.min(STARTS_MAX))
                .map(|_| state.dice.between(0, blocks.into()) as u32)
                .collect()
        };
        let place = (site.volume, site.number);
        let emptied = match owner.empty(place, site.generation, starts) {
            Err(StoreError::NoRoom) => None,
            emptied => emptied?,
        };
        note(|| {
            format!(
                "segment {place:?} of {:?}: {emptied:?} moved",
                site.generation
            )
        });
        if emptied.is_some() {
            shared.borrow_mut().tally.count(Class::EmptiedForProcess);
        }
    }
    owner.flush()?;
    owner.report().map(drop)
}

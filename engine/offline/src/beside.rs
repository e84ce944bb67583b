//! Compacts a store that an owner serves.
//!
//! A survey without the lock shows the segments that are worth emptying: those with dead space, and
//! those in which chains lie in several short pieces. The owner empties them one after the other,
//! in its reclaim: all pages are kept, and come to lie in the order of their chains. This process
//! moves nothing itself. If it ends, the owner ends with the segment of the moment.
//!
//! Unlike a compaction of a closed store, chains that lie in several segments are not joined: that
//! would take free segments from the puts of servers.

use std::path::Path;
use std::time::Duration;

use larder_base::runtime::{Instant, thread};
use larder_core::index::SegmentId;
use larder_format::{BLOCK_BYTES, HEADER_BLOCKS, SegmentState, Serial};
use larder_store::error::StoreError;
use larder_store::recovery::{Found, Whole};
use larder_store::share::emptier::Emptier;

use super::compact::Compacted;
use super::order::{Site, empties, is_scattered, order};
use super::owner::Progress;
use crate::survey::{SegmentFacts, Survey};

/// Most attempts for each segment: one emptied segment may be the room for another one.
const ROUNDS: usize = 3;

/// A round ends when so many segments in a row cannot be emptied.
const REFUSALS_MAX: usize = 4;

/// How long emptied segments are waited for until they are free. A reader may keep one for longer.
const RELEASE_PATIENCE: Duration = Duration::from_secs(10);

/// A segment worth emptying.
struct Victim {
    volume: usize,
    number: u32,
    sequence: Serial,
    /// The first block of each page, in order of chains.
    starts: Vec<u32>,
    bytes: u64,
}

/// Compacts the store at `path`, of which `survey` shows the content. With `dry_run` nothing is
/// asked of the owner. The result counts a page once, as it is put in its order within a segment.
///
/// # Errors
/// The owner is gone, does not serve this process, or is of a release that does not do this. All
/// segments that were emptied until then stay so.
pub fn compact_beside(
    path: &Path,
    survey: &Survey,
    dry_run: bool,
    progress: &mut Progress<'_>,
) -> Result<Compacted, StoreError> {
    let (mut victims, scattered) = victims(survey);
    let mut outcome = Compacted {
        scattered,
        planned_pages: victims.iter().map(|of| of.starts.len() as u64).sum(),
        planned_bytes: victims.iter().map(|of| of.bytes).sum(),
        ..Compacted::default()
    };
    if dry_run || victims.is_empty() {
        return Ok(outcome);
    }
    let owner = Emptier::reach(path)?;
    let damaged = owner.report()?.stats.damaged;
    let total = outcome.planned_bytes;
    for _ in 0..ROUNDS {
        let before = victims.len();
        victims = round(&owner, victims, &mut outcome, &mut |left| {
            progress(total.saturating_sub(left), total)
        })?;
        if outcome.interrupted || victims.is_empty() || victims.len() == before {
            break;
        }
    }
    outcome.left_pages = victims.iter().map(|of| of.starts.len() as u64).sum();
    outcome.damaged_pages = settle(&owner)?.saturating_sub(damaged);
    Ok(outcome)
}

/// Has each segment emptied. Returns the segments that could not be emptied now. `progress` gets
/// the bytes that are left.
fn round(
    owner: &Emptier,
    victims: Vec<Victim>,
    outcome: &mut Compacted,
    progress: &mut dyn FnMut(u64) -> std::ops::ControlFlow<()>,
) -> Result<Vec<Victim>, StoreError> {
    let mut bytes: u64 = victims.iter().map(|of| of.bytes).sum();
    let mut left = Vec::new();
    let mut refusals = 0;
    for victim in victims {
        if outcome.interrupted || refusals == REFUSALS_MAX {
            left.push(victim);
            continue;
        }
        let place = (victim.volume, victim.number);
        match owner.empty(place, victim.sequence, victim.starts.clone()) {
            Ok(moved) => {
                refusals = 0;
                bytes -= victim.bytes;
                outcome.moved_pages += moved.unwrap_or(0);
                outcome.freed_segments += u64::from(moved.is_some());
            }
            Err(StoreError::NoRoom) => {
                refusals += 1;
                left.push(victim);
            }
            Err(error) => return Err(error),
        }
        outcome.interrupted = progress(bytes).is_break();
    }
    Ok(left)
}

/// Makes the moves durable, and waits until the emptied segments are free. Returns the damaged
/// pages that the owner has dropped since it opened the store.
fn settle(owner: &Emptier) -> Result<u64, StoreError> {
    let until = Instant::now() + RELEASE_PATIENCE;
    loop {
        owner.flush()?;
        let stats = owner.report()?.stats;
        if stats.reclaiming_segments == 0 || Instant::now() >= until {
            return Ok(stats.damaged);
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// The segments worth emptying, those with the fewest live bytes first; and the number of chains
/// that lie in several short pieces within a segment.
fn victims(survey: &Survey) -> (Vec<Victim>, u64) {
    let pages = survey.live_found();
    let blocks = |page: &Found<Whole>| survey.page_blocks(page);
    let sites: Vec<Site> = survey.segments.iter().map(site).collect();
    let mut contents: Vec<Vec<Found<Whole>>> = vec![Vec::new(); sites.len()];
    let mut staying = vec![0; sites.len()];
    for page in pages {
        let SegmentId(id) = page.place.segment;
        staying[id as usize] += u64::from(blocks(&page));
        contents[id as usize].push(page);
    }
    let largest = contents
        .iter()
        .flatten()
        .map(|page| u64::from(blocks(page)));
    let data_blocks = survey.segment_bytes() / BLOCK_BYTES as u64 - u64::from(HEADER_BLOCKS);
    let wasted = empties(&sites, &staying, largest.max().unwrap_or(0), data_blocks);
    let volumes = survey.volumes.len();
    let mut victims = Vec::new();
    let mut scattered = 0;
    for (id, pages) in contents.iter().enumerate() {
        if !sites[id].can_be_emptied {
            continue;
        }
        let steps = order(pages);
        let strands = steps.chunk_by(|_, next| next.follows);
        let found = strands.filter(|strand| is_scattered(strand, pages, blocks, &sites, volumes));
        let found = found.count() as u64;
        scattered += found;
        // The owner frees a segment without pages by itself.
        if !pages.is_empty() && (found > 0 || wasted[id]) {
            let facts = &survey.segments[id];
            victims.push(Victim {
                volume: facts.volume,
                number: facts.number,
                sequence: facts.sequence,
                starts: steps
                    .iter()
                    .map(|step| pages[step.page].place.start)
                    .collect(),
                bytes: staying[id] * BLOCK_BYTES as u64,
            });
        }
    }
    victims.sort_by_key(|of| (of.bytes, of.volume, of.number));
    (victims, scattered)
}

fn site(facts: &SegmentFacts) -> Site {
    Site {
        volume: facts.volume,
        can_be_emptied: facts.state == Some(SegmentState::Sealed) && facts.flaws == 0,
        is_open: false,
        data_end: HEADER_BLOCKS
            + u32::try_from(facts.data_bytes / BLOCK_BYTES as u64).unwrap_or(u32::MAX),
        blocks: facts.descriptor_blocks,
    }
}

//! The ages of pages that are evicted, copied, or found after a crash.

use std::collections::{BTreeMap, BTreeSet};

use larder_core::ages::Ages;
use larder_core::index::{ReadAs, SegmentId};
use larder_engine::format::Run;

use super::common::chain;
use super::common::memory::{BEGAN_MS, Memory};
use super::process::{PAGE_BLOCKS, PAGES, Process, SEGMENT_BLOCKS, SEGMENTS};

const HOUR_MS: u64 = 3_600_000;

/// Chains that a segment has room for.
const CHAINS_PER_SEGMENT: u64 = SEGMENT_BLOCKS as u64 / (PAGES as u64 * PAGE_BLOCKS as u64);

/// Puts chains, one an hour. Calls `then` after each.
fn put_hourly(process: &mut Process<'_>, chains: u64, then: impl Fn(&Process<'_>)) {
    for seed in 0..chains {
        process.now_ms = seed * HOUR_MS;
        assert!(process.put(&chain(seed, PAGES)).is_ok());
        then(process);
    }
}

fn opened<'a>(disk: &'a Memory, run: &mut Run) -> Process<'a> {
    let mut process = Process::open(disk, run, usize::MAX);
    assert!(process.start().is_ok());
    process
}

fn evicted(process: &Process<'_>) -> Ages {
    let ages = process.core.evicted_ages();
    let list: Vec<_> = ages.iter().collect();
    let [(Some(slot), ages)] = list[..] else {
        panic!("{list:?}");
    };
    assert_eq!(slot, process.slot);
    *ages
}

#[test]
fn the_age_of_evicted_pages_is_the_time_in_which_the_store_was_filled() {
    let disk = Memory::new(BTreeMap::new(), BTreeSet::new());
    let mut process = opened(&disk, &mut Run::FIRST.clone());
    let chains = 1000;
    put_hourly(&mut process, chains, |_| ());
    let held = (0..chains).filter(|seed| process.holds(&chain(*seed, PAGES)));
    let held = held.count() as u64;
    let ages = evicted(&process);
    assert_eq!(ages.pages(), process.core.counters().store.evicted);
    let mean_hours = ages.sum_s / 3600 / ages.pages();
    assert!(
        mean_hours.abs_diff(held) <= 2 * CHAINS_PER_SEGMENT,
        "{mean_hours} hours, {held} chains: {ages:?}"
    );
}

#[test]
fn a_copied_page_keeps_its_age() {
    let disk = Memory::new(BTreeMap::new(), BTreeSet::new());
    let mut process = opened(&disk, &mut Run::FIRST.clone());
    let first = chain(0, PAGES);
    put_hourly(&mut process, 1000, |process| {
        let (slot, index) = (process.slot, &process.index);
        for page in index.pin(slot, &first, ReadAs::Use).into_iter().flatten() {
            index.unpin(page.place.segment);
        }
    });
    assert!(process.core.counters().store.moved >= PAGES as u64);
    let place = process.index.locate(process.slot, &first[0]).unwrap().place;
    let born_ms = process.index.born_ms(place.segment);
    let age_hours = (BEGAN_MS + process.now_ms - born_ms) / HOUR_MS;
    let fill_hours = u64::from(SEGMENTS) * CHAINS_PER_SEGMENT;
    assert!(age_hours > fill_hours, "{age_hours} hours, {fill_hours}");
}

#[test]
fn segments_keep_the_time_of_their_pages_over_a_crash() {
    let disk = Memory::new(BTreeMap::new(), BTreeSet::new());
    let mut run = Run::FIRST;
    let times = |process: &Process<'_>| -> Vec<u64> {
        let segments = (0..SEGMENTS).map(SegmentId);
        segments.map(|id| process.index.born_ms(id)).collect()
    };
    let mut process = opened(&disk, &mut run);
    put_hourly(&mut process, 50, |_| ());
    let before = times(&process);
    drop(process);
    let after = times(&opened(&disk, &mut run));
    let sealed = before.iter().filter(|born_ms| **born_ms != 0).count() - 1;
    assert!(sealed >= 2, "{before:?}");
    assert_eq!(after[..sealed], before[..sealed]);
    // The segment that was open has the time at which its first header was written.
    let open = (before[sealed], after[sealed]);
    assert!(open.1 <= open.0 && open.1 > before[sealed - 1], "{open:?}");
}

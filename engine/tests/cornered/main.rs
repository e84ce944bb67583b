//! A full store that is killed again and again, also in the middle of reclaim, until there is no
//! room for copies. The store then gives up the pages that it would have evicted next.
//!
//! The core runs over a volume in memory that carries out each request at once, up to the write at
//! which the process is killed.
#![allow(clippy::unwrap_used)]

mod ages;
#[path = "../common/mod.rs"]
mod common;
mod process;
#[path = "../common/policies.rs"]
#[allow(dead_code, reason = "others are used elsewhere")]
mod toys;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use common::chain;
use common::memory::{Memory, STORE};
use larder_core::core::{Move, RequestId};
use larder_core::index::{Heat, ReadAs, SegmentId};
use larder_core::policy::order::EvictionOrder;
use larder_engine::format::{
    BLOCK_BYTES, BlockHeader, Body, DescriptorBlock, PageKey, RECORDS_PER_BLOCK, Record, Run,
    SEGMENTS_OFFSET, SegmentHeader, SegmentNo, SegmentState, Serial,
};
use larder_engine::policy::{
    Departure, EvictionPolicy, PageFacts, PageNumber, ReclaimLines, Worth,
};
use process::{
    Killed, PAGE_BLOCKS, PAGES, Process, SEGMENT_BLOCKS, SEGMENTS, the_namespace, write_headers,
};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;
use toys::Fifo;

/// Chains acknowledged last that must be there: a sixth of the store's capacity, and more than a
/// segment holds.
const RECENT: usize = 16;

const KILLS: usize = 400;

/// Most writes of one process: four segments full, copies among them.
const WRITES_MAX: usize = 800;

/// One process after another.
struct Processes {
    disk: Memory,
    run: Run,
    /// The acknowledged chains, in order, by their seeds.
    put: Vec<u64>,
    given_up: usize,
}

impl Processes {
    /// Opens the store, and puts one chain after another until the process is killed, or `chains`
    /// are there.
    fn run_process(&mut self, writes: usize, chains: usize) {
        let mut process = Process::open(&self.disk, &mut self.run, writes);
        self.check(&process);
        let _: Result<(), Killed> = (|| {
            process.start()?;
            for _ in 0..chains {
                let seed = self.put.len() as u64;
                process.put(&chain(seed, PAGES))?;
                self.put.push(seed);
            }
            Ok(())
        })();
        self.check(&process);
        self.given_up += process.given_up;
    }

    /// Checks that the chains put lately are there.
    fn check(&self, process: &Process<'_>) {
        let recent = self.put.iter().rev().take(RECENT);
        let missing: Vec<_> = recent
            .filter(|seed| !process.holds(&chain(**seed, PAGES)))
            .collect();
        let put = self.put.len();
        assert!(missing.is_empty(), "{missing:?} of {put} are missing");
    }
}

#[test]
fn pages_put_lately_outlive_kills_that_leave_no_room_for_copies() {
    let mut random = Pcg64::seed_from_u64(7);
    let mut processes = Processes {
        disk: Memory::new(BTreeMap::new(), BTreeSet::new()),
        run: Run::FIRST,
        put: Vec::new(),
        given_up: 0,
    };
    processes.run_process(usize::MAX, 400);
    for _ in 0..KILLS {
        processes.run_process(random.random_range(1..WRITES_MAX), usize::MAX);
    }
    assert!(processes.given_up > 0, "there was always room for copies");
}

/// The segment of a whole chain, if the chain is in one segment.
fn segment_of(process: &Process<'_>, keys: &[PageKey]) -> Option<SegmentId> {
    let found = keys
        .iter()
        .map(|key| process.index.locate(process.slot, key));
    let segments: BTreeSet<_> = found.map(|found| Some(found?.place.segment)).collect();
    let only = segments.first().copied().flatten();
    only.filter(|_| segments.len() == 1)
}

/// A segment that has just been written loses the most to deletions, and is reclaimed first.
#[test]
fn warm_pages_are_copied_also_beyond_half_a_segment() {
    let disk = Memory::new(BTreeMap::new(), BTreeSet::new());
    let mut process = Process::open(&disk, &mut Run::FIRST.clone(), usize::MAX);
    assert!(process.start().is_ok());
    let delete = |process: &mut Process<'_>, keys: &[PageKey]| {
        let (slot, request) = (process.slot, RequestId(0));
        let deleted = process.with_core(|core| core.delete(request, slot, keys));
        assert!(deleted.is_ok_and(|found| found == PAGES as u64));
    };
    let put = |process: &mut Process<'_>, seed: u64| {
        let keys = chain(seed, PAGES);
        assert!(process.put(&keys).is_ok());
        // So many that nothing is evicted for lack of space.
        if seed.is_multiple_of(4) {
            delete(process, &keys);
        }
        keys
    };
    let mut written: BTreeMap<SegmentId, Vec<Vec<PageKey>>> = BTreeMap::new();
    for seed in 0..90 {
        let keys = put(&mut process, seed);
        if let Some(segment) = segment_of(&process, &keys) {
            written.entry(segment).or_default().push(keys);
        }
    }
    // The last is still being written.
    written.pop_last();
    let (last, mut kept) = written.pop_last().unwrap();
    delete(&mut process, &kept.pop().unwrap());
    let mut seeds = 90..1000;
    while process.victims.is_empty() {
        put(
            &mut process,
            seeds.next().expect("nothing is ever reclaimed"),
        );
    }
    assert_eq!((&process.victims[..], process.given_up), (&[last][..], 0));
    assert!(kept.len() * PAGES * PAGE_BLOCKS as usize > SEGMENT_BLOCKS as usize / 2);
    for keys in kept {
        assert!(process.holds(&keys) && segment_of(&process, &keys) != Some(last));
    }
}

/// For example, because a process that may still write there has been stopped: the segments do not
/// come back, and puts must go on.
#[test]
fn emptied_segments_that_stay_pinned_leave_no_store_without_room() {
    for kept in 1..5 {
        let disk = Memory::new(BTreeMap::new(), BTreeSet::new());
        let mut process = Process::open(&disk, &mut Run::FIRST.clone(), usize::MAX);
        assert!(process.start().is_ok());
        for seed in 0..400 {
            if seed == 200 {
                process.to_keep = kept;
            }
            assert!(process.put(&chain(seed, PAGES)).is_ok());
        }
        assert_eq!(process.kept, kept);
        assert!(process.holds(&chain(399, PAGES)));
    }
}

/// Lets reclaim empty segments until it rests.
fn rest(process: &mut Process<'_>) {
    let before = process.victims.len();
    loop {
        let victims = process.victims.len();
        assert!(process.reclaim().is_ok());
        if process.victims.len() == victims {
            return;
        }
        let turned = victims - before;
        assert!(turned < 4 * SEGMENTS as usize, "{turned} victims in a row");
    }
}

/// Deletes absent pages: as many as fill so many blocks with their records.
fn delete_absent(process: &mut Process<'_>, seed: u64, blocks: usize) {
    let (slot, absent) = (process.slot, chain(seed, blocks * RECORDS_PER_BLOCK));
    let deleted = process.with_core(|core| core.delete(RequestId(seed), slot, &absent));
    assert!(deleted.is_ok());
    rest(process);
}

/// Puts twenty chains, and checks that the last one is there.
fn puts_go_on(process: &mut Process<'_>, seed: u64) {
    for seed in seed..seed + 20 {
        assert!(process.put(&chain(seed, PAGES)).is_ok());
        rest(process);
    }
    assert!(process.holds(&chain(seed + 19, PAGES)));
}

/// Deletions are forwarded as long as there is a generation as old as they are. Deletions that take
/// more room than reclaim keeps free must neither keep it busy for ever nor block all others. The
/// segments that hold them up are emptied first.
#[test]
fn deletions_without_end_leave_room_for_pages_and_let_reclaim_rest() {
    let disk = Memory::new(BTreeMap::new(), BTreeSet::new());
    let mut process = Process::open(&disk, &mut Run::FIRST.clone(), usize::MAX);
    assert!(process.start().is_ok());
    // About six segments that are full and stay so.
    let stays: Vec<Vec<PageKey>> = (0..70).map(|seed| chain(seed, PAGES)).collect();
    for keys in &stays {
        assert!(process.put(keys).is_ok());
    }
    for request in 0..60 {
        delete_absent(&mut process, 1000 + request, 24);
    }
    puts_go_on(&mut process, 500);
    // Deletions take room from pages as long as they are needed, and no longer.
    let left = stays.iter().filter(|keys| process.holds(keys)).count();
    assert!(left > stays.len() / 2, "{left} of {}", stays.len());
}

/// The oldest generations are full of pages that stay, or are still being written: no page in them
/// is dead, and they are emptied all the same.
#[test]
fn deletions_that_fill_a_store_go_with_the_generations_that_hold_them_up() {
    let disk = Memory::new(BTreeMap::new(), BTreeSet::new());
    let mut process = Process::open(&disk, &mut Run::FIRST.clone(), usize::MAX);
    assert!(process.start().is_ok());
    for seed in 0..40 {
        assert!(process.put(&chain(seed, PAGES)).is_ok());
    }
    for request in 0..200 {
        delete_absent(&mut process, 1000 + request, 24);
    }
    puts_go_on(&mut process, 500);
}

/// Pages that are old, and colder than all others, stay as long as there is room for them.
#[test]
fn the_learned_order_drops_no_page_before_the_store_has_filled() {
    let disk = Memory::new(BTreeMap::new(), BTreeSet::new());
    let mut process = Process::open(&disk, &mut Run::FIRST.clone(), usize::MAX);
    process
        .index
        .choose(larder_core::policy::make(&larder_engine::policy::learned()));
    assert!(process.start().is_ok());
    let chains: Vec<Vec<PageKey>> = (0..400).map(|seed| chain(seed, PAGES)).collect();
    for (seed, keys) in (0..).zip(&chains) {
        assert!(process.put(keys).is_ok());
        let (slot, first) = (process.slot, usize::from(seed % 8 == 0));
        let deleted = process.with_core(|core| core.delete(RequestId(seed), slot, &keys[first..]));
        assert!(deleted.is_ok());
        rest(&mut process);
    }
    let moved: usize = process.moved.iter().map(Vec::len).sum();
    assert!(moved > 20, "{moved} pages were copied");
    assert!(
        chains
            .iter()
            .step_by(8)
            .all(|keys| process.holds(&keys[..1]))
    );
    assert_eq!(process.core.counters().store.evicted, 0);
}

/// Each segment is full of deletions that are needed. Reclaim still has room to forward those of
/// one segment.
#[test]
fn deletions_that_reclaim_does_not_keep_up_with_leave_it_room() {
    let disk = Memory::new(BTreeMap::new(), BTreeSet::new());
    let mut process = Process::open(&disk, &mut Run::FIRST.clone(), usize::MAX);
    assert!(process.start().is_ok());
    for request in 0..400 {
        let (slot, absent) = (process.slot, chain(1000 + request, 1000));
        let deleted = process.with_core(|core| core.delete(RequestId(request), slot, &absent));
        assert!(deleted.is_ok());
    }
    assert_eq!(process.core.space_view().free_segments, 1);
    puts_go_on(&mut process, 500);
}

/// The segment under a reader cannot be written again, and holds up deletions. But of the deletions
/// of the same pages only the last are needed.
#[test]
fn a_reader_that_stays_does_not_have_deletions_of_the_same_pages_fill_the_store() {
    // Segments have own deletions and forwarded ones in another proportion each.
    [18, 24, 30].into_iter().for_each(deletions_beside_a_reader);
}

fn deletions_beside_a_reader(blocks: usize) {
    let disk = Memory::new(BTreeMap::new(), BTreeSet::new());
    let mut process = Process::open(&disk, &mut Run::FIRST.clone(), usize::MAX);
    assert!(process.start().is_ok());
    process.to_keep = 1;
    for seed in 0..200 {
        assert!(process.put(&chain(seed, PAGES)).is_ok());
    }
    assert_eq!(process.kept, 1);
    for _ in 0..200 {
        delete_absent(&mut process, 1000, blocks);
    }
    puts_go_on(&mut process, 500);
    // Deletions of different pages are all needed, until the reader has gone.
    for request in 0..400 {
        delete_absent(&mut process, 2000 + request, blocks);
    }
    let held = process.victims[0];
    process.index.unpin(held);
    assert!(process.with_core(|core| core.unpinned(held)).is_ok());
    puts_go_on(&mut process, 600);
}

/// Pages that come one by one take a descriptor block each: a segment of them has much to release,
/// with deletions in it too.
#[test]
fn a_deletion_here_and_there_does_not_make_segments_too_dear_to_empty() {
    let disk = Memory::new(BTreeMap::new(), BTreeSet::new());
    let mut process = Process::open(&disk, &mut Run::FIRST.clone(), usize::MAX);
    assert!(process.start().is_ok());
    for seed in 0..4000 {
        assert!(process.put(&chain(seed, 1)).is_ok());
        if seed % 50 == 0 {
            let (slot, absent) = (process.slot, chain(10_000 + seed, 1));
            let deleted = process.with_core(|core| core.delete(RequestId(seed), slot, &absent));
            assert!(deleted.is_ok());
        }
    }
    assert!(process.holds(&chain(3999, 1)));
    let view = process.core.space_view();
    assert!(view.live_blocks > view.usable_blocks / 2, "{view:?}");
}

/// Full segments of dead pages, each with a block of tombstones, as repeated crashes leave them: no
/// segment is free, and there is no gap for a block. The tombstones are younger than all segments,
/// so each is needed. `names` are the keys of a segment's tombstones. Without `proven` no header
/// says that they are durable.
fn full_of_tombstones(proven: bool, names: impl Fn(u32) -> u64) -> Memory {
    full_of_tombstones_born(proven, names, |_| 500)
}

/// The same, with tombstones of these births. The generation of a segment is ten times its number.
fn full_of_tombstones_born(
    proven: bool,
    names: impl Fn(u32) -> u64,
    births: impl Fn(u32) -> u64,
) -> Memory {
    let serial = |counter: u64| Serial::from_raw(Serial::first_of(Run::FIRST).get() + counter);
    let disk = Memory::new(BTreeMap::new(), BTreeSet::new());
    for number in 0..SEGMENTS {
        let (generation, data_end) = (serial(10 * u64::from(number)), SEGMENT_BLOCKS - 1);
        let (commit, segment) = (serial(1000 + u64::from(number)), SegmentNo(number));
        let tombstone = |key| Record::Delete {
            namespace: the_namespace().fingerprint(),
            key,
            birth: serial(births(number)),
        };
        let keys = chain(names(number), 3).into_iter();
        let mut bytes = [0; BLOCK_BYTES];
        let header = BlockHeader {
            store: STORE,
            volume: 0,
            segment,
            sequence: generation,
            index: 0,
            commit,
            data_end,
            synced: Serial::ZERO,
        };
        let body = Body::Records(keys.map(tombstone).collect());
        DescriptorBlock { header, body }.encode(&mut bytes);
        let block = u64::from((number + 1) * SEGMENT_BLOCKS - 1) * BLOCK_BYTES as u64;
        disk.write(SEGMENTS_OFFSET + block, &bytes);
        let header = SegmentHeader {
            store: STORE,
            volume: 0,
            segment,
            sequence: generation,
            state: SegmentState::Sealed,
            blocks: 1,
            data_end,
            proven: if proven { commit } else { Serial::ZERO },
            synced: Serial::ZERO,
            born_ms: 0,
        };
        write_headers(&disk, &header);
    }
    disk
}

/// Copies that crashes have left of a tombstone make room, and then the others can be forwarded.
#[test]
fn a_tombstone_that_another_segment_holds_too_needs_no_room() {
    for held_twice in [1, SEGMENTS - 1] {
        let disk = full_of_tombstones(true, |number| number.min(SEGMENTS - 1 - held_twice).into());
        let mut process = Process::open(&disk, &mut Run::new(2).unwrap(), usize::MAX);
        assert!(process.start().is_ok());
        puts_go_on(&mut process, 100);
    }
}

/// The oldest segment is released, with tombstones of its own pages alone, and takes the others.
#[test]
fn a_tombstone_of_no_other_segment_needs_no_room() {
    let disk = full_of_tombstones_born(true, u64::from, |number| if number == 0 { 5 } else { 500 });
    let mut process = Process::open(&disk, &mut Run::new(2).unwrap(), usize::MAX);
    assert!(process.start().is_ok());
    puts_go_on(&mut process, 100);
    // Another segment holds pages that are older than the deletion.
    each_segment_stays(&full_of_tombstones_born(true, u64::from, |number| {
        if number == 0 { 15 } else { 500 }
    }));
}

/// Tries all segments of a store that crashed again and again: none is released.
fn each_segment_stays(disk: &Memory) {
    let mut process = Process::open(disk, &mut Run::new(2).unwrap(), usize::MAX);
    assert!(process.start().is_ok());
    for _ in 0..1000 {
        assert!(process.reclaim().is_ok());
    }
    let tried: BTreeSet<SegmentId> = process.victims.iter().copied().collect();
    assert_eq!(tried.len(), SEGMENTS as usize);
    let view = process.core.space_view();
    assert_eq!(view.sealed_segments, u64::from(SEGMENTS), "{view:?}");
}

#[test]
fn a_tombstone_that_lies_nowhere_else_keeps_its_segment() {
    each_segment_stays(&full_of_tombstones(true, u64::from));
}

/// A failed sync may have lost the copy, though it can be read.
#[test]
fn a_copy_of_a_tombstone_counts_only_if_it_is_durable() {
    each_segment_stays(&full_of_tombstones(false, |_| 0));
}

/// A sync of an earlier epoch may have failed. A good sync proves nothing about its writes.
#[test]
fn a_sync_of_this_epoch_does_not_prove_an_earlier_copy_of_a_tombstone() {
    let disk = full_of_tombstones(false, |_| 0);
    let mut process = Process::open(&disk, &mut Run::new(2).unwrap(), usize::MAX);
    assert!(process.start().is_ok());
    assert!(process.with_core(|core| core.flush(RequestId(1))).is_ok());
    assert_eq!(process.core.counters().store.syncs, 1);
    for _ in 0..1000 {
        assert!(process.reclaim().is_ok());
    }
    let view = process.core.space_view();
    assert_eq!(view.sealed_segments, u64::from(SEGMENTS), "{view:?}");
}

/// Chats with turns in different segments, so that cold pages have descendants elsewhere. Some
/// chats go on for longer. `then` is called after each turn, until it returns that it is enough.
fn chat(process: &mut Process<'_>, mut then: impl FnMut(&mut Process<'_>) -> bool) {
    const CHATS: u64 = 60;
    const TURNS: usize = 12;
    assert!(process.start().is_ok());
    for turn in 0..TURNS {
        for chat in (0..CHATS).filter(|chat| turn < 4 || chat.is_multiple_of(3)) {
            let keys = chain(chat, (turn + 1) * PAGES);
            assert!(process.put_from(&keys, turn * PAGES).is_ok());
            if then(process) {
                return;
            }
        }
    }
}

/// Moves without the times of the puts: time goes on with each step.
fn without_times(mut moved: Vec<Vec<Move>>) -> Vec<Vec<Move>> {
    for page in moved.iter_mut().flatten() {
        page.record.put_unix_s = 0;
    }
    moved
}

#[test]
fn a_plan_that_is_made_in_steps_is_the_same() {
    let play = |planned_at_once: usize| {
        let disk = Memory::new(BTreeMap::new(), BTreeSet::new());
        let mut process = Process::open(&disk, &mut Run::FIRST.clone(), usize::MAX);
        process.planned_at_once = planned_at_once;
        chat(&mut process, |_| false);
        (
            process.victims,
            without_times(process.moved),
            process.core.counters().store.evicted,
        )
    };
    let at_once = play(usize::MAX);
    assert!(at_once.2 > 0 && at_once.1.iter().any(|moves| !moves.is_empty()));
    for steps in [1, 5, 64] {
        assert_eq!(play(steps), at_once);
    }
}

/// First in, first out, with worths whose scale changes just after reclaim asked for its lines: at
/// the first question, and at each third one after it.
#[derive(Debug, Default)]
struct Rescaled {
    fifo: Fifo,
    arrived: u32,
    asked: AtomicU64,
    changes: bool,
}

impl Rescaled {
    fn shift(&self) -> u32 {
        ((self.scale() % 2) << 24) as u32
    }
}

impl EvictionPolicy for Rescaled {
    fn arrived(&mut self, page: PageNumber, facts: &PageFacts) {
        self.arrived += 1;
        self.fifo.arrived(page, facts);
    }

    fn left(&mut self, page: PageNumber, facts: &PageFacts, why: Departure) {
        self.fifo.left(page, facts, why);
    }

    fn file(&mut self, page: PageNumber, facts: &PageFacts) {
        self.fifo.file(page, facts);
    }

    fn coldest(
        &mut self,
        facts: &mut dyn FnMut(PageNumber) -> Option<PageFacts>,
    ) -> Option<PageNumber> {
        self.fifo.coldest(facts)
    }

    fn worth(&self, page: PageNumber, facts: &PageFacts) -> Worth {
        Worth(self.fifo.worth(page, facts).0 + self.shift())
    }

    fn lines(&self) -> ReclaimLines {
        let line = Worth(self.arrived / 2 + self.shift());
        self.asked.fetch_add(1, Relaxed);
        ReclaimLines::new(Some(line), Worth(u32::MAX))
    }
}

impl EvictionOrder for Rescaled {
    fn scale(&self) -> u64 {
        u64::from(self.changes) * (self.asked.load(Relaxed) + 2) / 3
    }
}

#[test]
fn a_plan_is_the_same_if_the_scale_of_worths_changes_while_it_is_made() {
    let play = |changes: bool| {
        let disk = Memory::new(BTreeMap::new(), BTreeSet::new());
        let mut process = Process::open(&disk, &mut Run::FIRST.clone(), usize::MAX);
        process.index.choose(Box::new(Rescaled {
            changes,
            ..Rescaled::default()
        }));
        process.planned_at_once = 64;
        assert!(process.start().is_ok());
        // Each page is a leaf, and old segments lose a third of their pages.
        for seed in 0..4000 {
            assert!(process.put(&chain(seed, 1)).is_ok());
            if seed % 3 == 0 && seed >= 1000 {
                let (slot, keys) = (process.slot, chain(seed - 1000, 1));
                let deleted = process.with_core(|core| core.delete(RequestId(seed), slot, &keys));
                assert!(deleted.is_ok());
            }
        }
        let changed = process.index.order().1;
        let played = (
            process.victims,
            without_times(process.moved),
            process.core.counters().store.evicted,
        );
        (played, changed)
    };
    let (steady, none) = play(false);
    let (rescaled, changed) = play(true);
    assert!(none == 0 && changed > 2, "{changed} changes");
    assert!(steady.2 > 0 && steady.1.iter().any(|moves| !moves.is_empty()));
    assert_eq!(rescaled, steady);
}

/// Between two steps of a plan any caller may read the pages of the victim.
#[test]
fn pages_used_while_a_plan_is_made_are_not_evicted_by_it() {
    let disk = Memory::new(BTreeMap::new(), BTreeSet::new());
    let mut process = Process::open(&disk, &mut Run::FIRST.clone(), usize::MAX);
    process.once_planned = |process, keys| {
        let there = |key: &&PageKey| process.index.locate(process.slot, key).is_some();
        let left: Vec<PageKey> = keys.iter().filter(there).copied().collect();
        // All of a full segment cannot be copied, however warm.
        if left.len() > 128 {
            return;
        }
        let used: Vec<PageKey> = left.into_iter().step_by(9).collect();
        for page in process
            .index
            .pin(process.slot, &used, ReadAs::Use)
            .into_iter()
            .flatten()
        {
            process.index.unpin(page.place.segment);
        }
        process.used.extend(used);
    };
    let mut used = 0;
    chat(&mut process, |process| {
        used += process.used.len();
        for key in std::mem::take(&mut process.used) {
            assert!(process.holds(&[key]), "a page that has just been used");
        }
        false
    });
    assert!(used > 0 && process.core.counters().store.evicted > 0);
}

#[test]
fn nothing_is_evicted_for_the_sake_of_pages_that_were_deleted_while_a_plan_was_made() {
    let disk = Memory::new(BTreeMap::new(), BTreeSet::new());
    let mut process = Process::open(&disk, &mut Run::FIRST.clone(), usize::MAX);
    process.once_planned = |process, keys| {
        let there = |key: &&PageKey| process.index.locate(process.slot, key).is_some();
        if keys.iter().filter(there).count() * PAGE_BLOCKS as usize > SEGMENT_BLOCKS as usize / 2 {
            let (slot, request) = (process.slot, RequestId(0));
            let deleted = process.with_core(|core| core.delete(request, slot, keys));
            assert!(deleted.is_ok());
            process.evicted = Some(process.core.counters().store.evicted);
        }
    };
    chat(&mut process, |process| {
        let evicted = process.core.counters().store.evicted;
        process.evicted.is_some_and(|before| {
            assert_eq!(evicted, before);
            true
        })
    });
    assert!(process.evicted.is_some(), "no victim is full");
}

/// The chain is evicted in one pass then, leaf by leaf.
#[test]
fn a_chain_that_is_put_again_is_no_hotter_at_its_end() {
    let disk = Memory::new(BTreeMap::new(), BTreeSet::new());
    let mut process = Process::open(&disk, &mut Run::FIRST.clone(), usize::MAX);
    assert!(process.start().is_ok());
    let keys = chain(1, PAGES);
    let heats = |process: &Process<'_>| -> BTreeSet<Heat> {
        let heat = |key: &PageKey| {
            let place = process.index.locate(process.slot, key).unwrap().place;
            let page = process
                .index
                .live(process.slot, key.prefix(), place, process.now_ms);
            page.unwrap().heat
        };
        keys.iter().map(heat).collect()
    };
    assert!(process.put(&keys).is_ok());
    let before = heats(&process);
    assert!(process.put(&keys).is_ok());
    let after = heats(&process);
    assert_eq!((before.len(), after.len()), (1, 1));
    assert!(after > before);
}

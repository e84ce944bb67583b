//! A full store that is killed again and again, also in the middle of reclaim, until there is no
//! room for copies. The store then gives up the pages that it would have evicted next.
//!
//! The core runs over a volume in memory that carries out each request at once, up to the write at
//! which the process is killed.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use common::memory::{self, Memory, STORE};
use common::{chain, namespace};
use larder_engine::PutStatus;
use larder_engine::catalog::{Ask, Grant, ReservationId, SegmentMap};
use larder_engine::core::{
    Config, Copied, Core, Descriptors, Effect, Io, Move, PageCopy, RequestId, Victim,
};
use larder_engine::disk::mailbox::read_all;
use larder_engine::format::{
    BLOCK_BYTES, Body, DescriptorBlock, Namespace, OpenState, PageChecksum, PageKey, Record, Run,
    SEGMENTS_OFFSET, SegmentHeader, Superblock,
};
use larder_engine::index::{Heat, Index, NamespaceSlot, SegmentId};
use larder_engine::recovery::recover;
use larder_engine::recovery::scan::Spot;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;

const SEGMENTS: u32 = 12;
const SEGMENT_BLOCKS: u32 = 402;
const PAGE_BLOCKS: u32 = 2;

/// Pages of a chain, which is put at once.
const PAGES: usize = 16;

/// Chains acknowledged last that must be there: a sixth of the store's capacity, and more than a
/// segment holds.
const RECENT: usize = 16;

const KILLS: usize = 400;

/// Most writes of one process: four segments full, copies among them.
const WRITES_MAX: usize = 800;

/// Pages that reclaim moves at once.
const MOVED_AT_ONCE: u64 = 16;

fn superblock(run: Run, state: OpenState) -> Superblock {
    memory::superblock(run, state, SEGMENTS, SEGMENT_BLOCKS)
}

fn the_namespace() -> Namespace {
    namespace("m", &[PAGE_BLOCKS * BLOCK_BYTES as u32])
}

/// A page's bytes, and their checksum.
fn payload(key: &PageKey) -> (Vec<u8>, u64) {
    let bytes = key
        .as_bytes()
        .repeat(PAGE_BLOCKS as usize * BLOCK_BYTES / 32);
    let mut checksum = PageChecksum::new(the_namespace().fingerprint(), key);
    checksum.blocks(&bytes);
    (bytes, checksum.finish())
}

/// The process has been killed.
struct Killed;

/// A store that is open, in a process that will be killed.
struct Process<'a> {
    disk: &'a Memory,
    core: Core,
    index: Arc<Index>,
    slot: NamespaceSlot,
    /// Writes until the kill.
    writes_left: usize,
    settled: BTreeMap<ReservationId, Vec<PutStatus>>,
    now_ms: u64,
    /// Segments that reclaim has emptied, in order.
    victims: Vec<SegmentId>,
    /// The pages moved out of each of them.
    moved: Vec<Vec<Move>>,
    /// Pages named in the victim's descriptors.
    in_victim: Vec<PageKey>,
    /// Pages of a plan processed in one step.
    planned_at_once: usize,
    /// Called with the pages of a victim after all of them have been planned in one step.
    once_planned: fn(&mut Process<'_>, &[PageKey]),
    /// Pages that `once_planned` has used, and the eviction count after that.
    used: Vec<PageKey>,
    evicted: Option<u64>,
    /// Victims whose pages were evicted for lack of room.
    given_up: usize,
    /// How many of the next victims stay pinned.
    to_keep: usize,
    kept: usize,
}

impl<'a> Process<'a> {
    fn open(disk: &'a Memory, run: &mut Run, writes: usize) -> Process<'a> {
        let blocks = u64::from(SEGMENTS * SEGMENT_BLOCKS);
        let index = Arc::new(Index::new(SEGMENTS as usize, blocks));
        let state = match *run {
            Run::FIRST => OpenState::Clean,
            _ => OpenState::Open,
        };
        let recovery = recover(disk, &[Some(&superblock(*run, state))], &index, false);
        for (_, header) in &recovery.adoptions {
            write_headers(disk, header);
        }
        *run = recovery.recovered.first.run();
        let config = Config {
            copy_blocks_max: MOVED_AT_ONCE * u64::from(PAGE_BLOCKS),
            ..memory::config(SEGMENT_BLOCKS)
        };
        Process {
            disk,
            core: Core::new(config, recovery.recovered, index.clone()),
            index,
            slot: NamespaceSlot(0),
            writes_left: writes,
            settled: BTreeMap::new(),
            now_ms: 0,
            victims: Vec::new(),
            moved: Vec::new(),
            in_victim: Vec::new(),
            planned_at_once: usize::MAX,
            once_planned: |_, _| (),
            used: Vec::new(),
            evicted: None,
            given_up: 0,
            to_keep: 0,
            kept: 0,
        }
    }

    fn start(&mut self) -> Result<(), Killed> {
        self.with_core(|core| core.open_namespace(&the_namespace()))?;
        self.with_core(Core::start)?;
        self.reclaim()
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Killed> {
        self.writes_left = self.writes_left.checked_sub(1).ok_or(Killed)?;
        self.disk.write(offset, bytes);
        Ok(())
    }

    /// Runs a command of the core, and carries out all its effects.
    fn with_core<R>(&mut self, command: impl FnOnce(&mut Core) -> R) -> Result<R, Killed> {
        self.now_ms += 10;
        self.core.tick(self.now_ms);
        let result = command(&mut self.core);
        let mut effects = VecDeque::from(self.core.take_effects());
        while let Some(effect) = effects.pop_front() {
            match effect {
                Effect::Io { id, io, .. } => {
                    if let Io::Write { offset, bytes } = io {
                        self.write(offset, &bytes)?;
                    }
                    self.core.io_done(id, Ok(()));
                }
                Effect::Settled(id, statuses) => {
                    self.settled.insert(id, statuses);
                }
                Effect::ReadDescriptors(victim) => {
                    let read = self.read_descriptors(&victim);
                    self.core.descriptors_read(read);
                }
                Effect::Copy(id, pages) => {
                    let outcomes = self.copy(&pages)?;
                    self.core.copied(id, &outcomes);
                }
                Effect::Finished(..)
                | Effect::Room
                | Effect::Reclaim
                | Effect::ReadOnly(..)
                | Effect::ReadWrite(_) => {}
            }
            effects.extend(self.core.take_effects());
        }
        Ok(result)
    }

    /// Writes the granted pages, and returns the status of each.
    fn transfer(
        &mut self,
        keys: &[PageKey],
        (id, grants): (ReservationId, Vec<Grant>),
    ) -> Result<Vec<PutStatus>, Killed> {
        let mut checksums = Vec::new();
        let mut landed = Vec::new();
        for (at, (key, grant)) in keys.iter().zip(&grants).enumerate() {
            let (bytes, checksum) = payload(key);
            let Grant::Write(extent) = grant else {
                checksums.push(None);
                continue;
            };
            self.write(extent.offset, &bytes)?;
            checksums.push(Some(checksum));
            landed.push((at, true));
        }
        self.with_core(|core| core.commit(id, &checksums))?;
        self.with_core(|core| core.landed(id, &landed))?;
        Ok(self.settled.remove(&id).unwrap())
    }

    /// Puts a chain.
    fn put(&mut self, keys: &[PageKey]) -> Result<(), Killed> {
        self.put_from(keys, 0)
    }

    /// Puts a chain from its page `first` on. If there is no room for it, reclaim runs first.
    fn put_from(&mut self, chain: &[PageKey], first: usize) -> Result<(), Killed> {
        let keys = &chain[first..];
        let asks: Vec<Ask> = (0_u32..)
            .zip(chain)
            .skip(first)
            .map(|(depth, key)| Ask {
                key: *key,
                parent: depth.checked_sub(1).map(|up| chain[up as usize]),
                depth,
            })
            .collect();
        for _ in 0..10_000 {
            let slot = self.slot;
            let granted = self.with_core(|core| core.reserve(slot, &asks))?;
            let statuses = self.transfer(keys, granted)?;
            self.reclaim()?;
            if statuses.iter().all(|status| status.is_present()) {
                return Ok(());
            }
        }
        panic!(
            "there is never room for a put: {:?}",
            self.core.space_view()
        );
    }

    /// Empties one segment, if reclaim wants one.
    fn reclaim(&mut self) -> Result<(), Killed> {
        let at_once = self.planned_at_once;
        self.with_core(|core| core.reclaim_step(at_once))?;
        let mut steps = 0;
        while self.core.is_reclaiming() {
            self.with_core(|core| core.reclaim_step(at_once))?;
            steps += 1;
            // After the records have been forwarded.
            if steps == 2 && self.core.is_reclaiming() && self.moved.last().unwrap().is_empty() {
                let keys = std::mem::take(&mut self.in_victim);
                (self.once_planned)(self, &keys);
            }
        }
        self.core.check_invariants().unwrap();
        Ok(())
    }

    fn read_descriptors(&mut self, victim: &Victim) -> Descriptors {
        if victim.is_given_up {
            // Open segments take part when they are sealed: with fewer others the coldest may be in
            // one.
            if self.kept == 0 {
                self.check_is_coldest(victim);
            }
            self.given_up += 1;
        }
        if let Some(left) = self.to_keep.checked_sub(1) {
            self.index.keep(&[victim.segment]);
            self.to_keep = left;
            self.kept += 1;
        }
        self.victims.push(victim.segment);
        self.moved.push(Vec::new());
        let blocks = self.blocks_of(victim);
        self.in_victim = pages_in(&blocks);
        Descriptors {
            blocks,
            some_unreadable: false,
        }
    }

    fn copy(&mut self, pages: &[PageCopy]) -> Result<Vec<Copied>, Killed> {
        self.moved
            .last_mut()
            .unwrap()
            .extend(pages.iter().map(|copy| copy.page));
        for PageCopy { page, to, .. } in pages {
            let (bytes, _) = payload(&page.record.key);
            self.write(to.offset, &bytes)?;
        }
        Ok(vec![Copied::Written; pages.len()])
    }

    /// Each other segment has a page that is at least as hot as all pages given up with the victim.
    fn check_is_coldest(&self, victim: &Victim) {
        let heats = self.index.worthiest_by_segment();
        let coldest = heats.iter().flatten().min();
        assert_eq!(heats[victim.segment.0 as usize].as_ref(), coldest);
    }

    fn blocks_of(&self, victim: &Victim) -> Vec<DescriptorBlock> {
        let spot = Spot {
            store: STORE,
            volume: victim.volume,
            number: victim.number,
            segment_blocks: SEGMENT_BLOCKS,
        };
        let reads: Vec<_> = (0..victim.blocks).map(|at| spot.blocks(at, 1)).collect();
        read_all(self.disk, &reads)
            .into_iter()
            .zip(0..)
            .map(|(bytes, at)| spot.parse_block(at, &bytes.unwrap()).unwrap())
            .filter(|block| block.header.sequence == victim.sequence)
            .collect()
    }

    /// Whether a whole chain is there, as it was put.
    fn holds(&self, keys: &[PageKey]) -> bool {
        let map = SegmentMap::new(&[SEGMENTS], SEGMENT_BLOCKS);
        keys.iter().all(|key| {
            let (bytes, checksum) = payload(key);
            let mut there = vec![0; bytes.len()];
            let found = self.index.locate(self.slot, key);
            found.is_some_and(|found| {
                let read = self.disk.read(map.extent(found.place).offset, &mut there);
                read.unwrap();
                found.checksum == checksum && there == bytes
            })
        })
    }
}

fn pages_in(blocks: &[DescriptorBlock]) -> Vec<PageKey> {
    let records = blocks.iter().flat_map(|block| match &block.body {
        Body::Records(records) => records.as_slice(),
        Body::Namespace(_) => &[],
    });
    let pages = records.filter_map(|record| match record {
        Record::Page(page) => Some(page.key),
        _ => None,
    });
    pages.collect()
}

fn write_headers(disk: &Memory, header: &SegmentHeader) {
    let mut bytes = [0; BLOCK_BYTES];
    header.encode(&mut bytes);
    let segment = u64::from(header.segment.0 * SEGMENT_BLOCKS);
    let offset = SEGMENTS_OFFSET + segment * BLOCK_BYTES as u64;
    disk.write(offset, &[bytes, bytes].concat());
}

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

/// Deletes absent pages: as many as fill two dozen blocks with their records.
fn delete_absent(process: &mut Process<'_>, seed: u64) {
    let (slot, absent) = (process.slot, chain(seed, 1000));
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
        delete_absent(&mut process, 1000 + request);
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
        delete_absent(&mut process, 1000 + request);
    }
    puts_go_on(&mut process, 500);
}

/// The segment under a reader cannot be written again, and holds up deletions. But of the deletions
/// of the same pages only the last are needed.
#[test]
fn a_reader_that_stays_does_not_have_deletions_of_the_same_pages_fill_the_store() {
    let disk = Memory::new(BTreeMap::new(), BTreeSet::new());
    let mut process = Process::open(&disk, &mut Run::FIRST.clone(), usize::MAX);
    assert!(process.start().is_ok());
    process.to_keep = 1;
    for seed in 0..200 {
        assert!(process.put(&chain(seed, PAGES)).is_ok());
    }
    assert_eq!(process.kept, 1);
    for _ in 0..200 {
        delete_absent(&mut process, 1000);
    }
    puts_go_on(&mut process, 500);
    // Deletions of different pages are all needed, until the reader has gone.
    for request in 0..400 {
        delete_absent(&mut process, 2000 + request);
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

#[test]
fn a_plan_that_is_made_in_steps_is_the_same() {
    let play = |planned_at_once: usize| {
        let disk = Memory::new(BTreeMap::new(), BTreeSet::new());
        let mut process = Process::open(&disk, &mut Run::FIRST.clone(), usize::MAX);
        process.planned_at_once = planned_at_once;
        chat(&mut process, |_| false);
        (
            process.victims,
            process.moved,
            process.core.counters().evicted,
        )
    };
    let at_once = play(usize::MAX);
    assert!(at_once.2 > 0 && at_once.1.iter().any(|moves| !moves.is_empty()));
    for steps in [1, 5, 64] {
        assert_eq!(play(steps), at_once);
    }
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
        for page in process.index.pin(process.slot, &used).into_iter().flatten() {
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
    assert!(used > 0 && process.core.counters().evicted > 0);
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
            process.evicted = Some(process.core.counters().evicted);
        }
    };
    chat(&mut process, |process| {
        let evicted = process.core.counters().evicted;
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

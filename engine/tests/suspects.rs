//! Pages and records lost by failed syncs and writes must never be proven later, whatever else is
//! lost with them.
//!
//! The core runs over a volume in memory that carries out each request at once. A sync that fails
//! loses the blocks that the test names, and makes all others durable.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use common::memory::{self, Block, Memory, STORE, superblock};
use common::{chain, namespace};
use larder_core::core::{Core, Descriptors, Effect, Fault, Io, PageCopy, RequestId, Victim};
use larder_core::grants::{Ask, Finding, Grant, ReservationId};
use larder_core::index::{Index, NamespaceSlot};
use larder_core::planted::{Bug, plant};
use larder_core::status::PutFailure;
use larder_disk::DiskError;
use larder_disk::mailbox::read_all;
use larder_engine::format::{
    BLOCK_BYTES, DescriptorBlock, OpenState, PageKey, Run, SEGMENTS_OFFSET, Superblock,
    VolumeEntry, VolumeId,
};
use larder_engine::{Hint, PutStatus};
use larder_store::recovery::recover;
use larder_store::recovery::scan::{Bodies, Spot};

const SEGMENTS: u32 = 24;
const SEGMENT_BLOCKS: u32 = 64;
const SLOT: NamespaceSlot = NamespaceSlot(0);
const EIO: Result<(), DiskError> = Err(DiskError::Os(5));

/// Longer than the core's pause before a retry.
const PAUSE_MS: u64 = 10_000;

fn index(volumes: u32) -> Arc<Index> {
    let segments = volumes * SEGMENTS;
    let blocks = u64::from(segments * SEGMENT_BLOCKS);
    Arc::new(Index::new(segments as usize, blocks))
}

fn spot(number: u32) -> Spot {
    Spot {
        store: STORE,
        volume: 0,
        number,
        segment_blocks: SEGMENT_BLOCKS,
        bodies: Bodies::Clear,
    }
}

struct Store {
    disk: Memory,
    /// By offset: the blocks that a failed sync reverts to. A missing block is zero.
    durable: BTreeMap<u64, Block>,
    /// Offsets of blocks.
    unsynced: BTreeSet<u64>,
    /// The blocks that the next sync loses. With `None` the sync succeeds.
    lost: Option<BTreeSet<u64>>,
    core: Core,
    index: Arc<Index>,
    run: Run,
    settled: BTreeMap<ReservationId, Vec<PutStatus>>,
    finished: BTreeMap<RequestId, Result<(), Fault>>,
    requests: u64,
    now_ms: u64,
    /// The descriptors of victims cannot be read.
    is_unreadable: bool,
}

impl Store {
    fn new() -> Store {
        let clean = superblock(Run::FIRST, OpenState::Clean, SEGMENTS, SEGMENT_BLOCKS);
        Store::over(&[Some(&clean)])
    }

    /// A store whose second volume has been given up.
    fn beside_a_lost_volume() -> Store {
        let mut clean = superblock(Run::FIRST, OpenState::Clean, SEGMENTS, SEGMENT_BLOCKS);
        clean.volumes.push(VolumeEntry {
            id: VolumeId::from_bytes([2; 16]),
            lost: true,
            ..clean.volumes[0].clone()
        });
        Store::over(&[Some(&clean), None])
    }

    fn over(superblocks: &[Option<&Superblock>]) -> Store {
        let disk = Memory::new(BTreeMap::new(), BTreeSet::new());
        let mut store = Store::on(disk, BTreeMap::new(), superblocks);
        store.name("m");
        store
    }

    /// Recovers the content of a disk.
    fn on(
        disk: Memory,
        durable: BTreeMap<u64, Block>,
        superblocks: &[Option<&Superblock>],
    ) -> Store {
        let index = index(superblocks.len() as u32);
        let recovered = recover(&disk, superblocks, &index, false).recovered;
        let config = memory::config(SEGMENT_BLOCKS);
        let run = recovered.first.run();
        Store {
            disk,
            durable,
            unsynced: BTreeSet::new(),
            lost: None,
            core: Core::new(config, recovered, index.clone()),
            index,
            run,
            settled: BTreeMap::new(),
            finished: BTreeMap::new(),
            requests: 0,
            now_ms: 0,
            is_unreadable: false,
        }
    }

    fn name(&mut self, model: &str) {
        let page = namespace(model, &[BLOCK_BYTES as u32]);
        self.core.open_namespace(&page).unwrap();
        self.carry_out();
    }

    /// The process ends without a close, and the next one opens the store.
    fn reopen(self) -> Store {
        let crashed = superblock(self.run, OpenState::Open, SEGMENTS, SEGMENT_BLOCKS);
        Store::on(self.disk, self.durable, &[Some(&crashed)])
    }

    /// Changes the bytes of these pages on disk.
    fn spoil(&mut self, keys: &[PageKey]) {
        for key in keys {
            let place = self.index.locate(SLOT, key).unwrap().place;
            self.core.found(SLOT, key, place, Finding::Mismatch);
        }
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.disk.write(offset, bytes);
        let blocks = (offset..).step_by(BLOCK_BYTES);
        self.unsynced.extend(blocks.take(bytes.len() / BLOCK_BYTES));
    }

    /// Syncs. Returns whether it succeeded.
    fn sync(&mut self) -> bool {
        let lost = self.lost.take();
        for offset in std::mem::take(&mut self.unsynced) {
            if lost.as_ref().is_some_and(|lost| lost.contains(&offset)) {
                self.undo(offset);
            } else {
                let mut block = [0; BLOCK_BYTES];
                self.disk.read(offset, &mut block).unwrap();
                self.durable.insert(offset, block);
            }
        }
        lost.is_none()
    }

    fn lose_power(&mut self) {
        for offset in std::mem::take(&mut self.unsynced) {
            self.undo(offset);
        }
    }

    /// Reverts a block to its last durable bytes.
    fn undo(&self, offset: u64) {
        let before = self.durable.get(&offset).unwrap_or(&[0; BLOCK_BYTES]);
        self.disk.write(offset, before);
    }

    /// Fails the writes that the core asks for.
    fn refuse_writes(&mut self) {
        for effect in self.core.take_effects() {
            if let Effect::Io { id, .. } = effect {
                self.core.io_done(id, EIO);
            }
        }
    }

    /// Carries out all that the core asks for.
    fn carry_out(&mut self) {
        let effects = self.core.take_effects();
        self.carry_out_these(effects);
    }

    fn carry_out_these(&mut self, effects: Vec<Effect>) {
        let mut effects = VecDeque::from(effects);
        while let Some(effect) = effects.pop_front() {
            match effect {
                Effect::Io { id, volume, io } => {
                    assert_eq!(volume, 0, "there is no other volume");
                    let good = match io {
                        Io::Write { offset, bytes } => {
                            self.write(offset, &bytes);
                            true
                        }
                        Io::Sync => self.sync(),
                    };
                    self.core.io_done(id, if good { Ok(()) } else { EIO });
                }
                Effect::Settled(id, statuses) => {
                    self.settled.insert(id, statuses);
                }
                Effect::Finished(id, result) => {
                    self.finished.insert(id, result);
                }
                Effect::ReadDescriptors(victim) => {
                    let read = Descriptors {
                        blocks: self.blocks_of(&victim),
                        some_unreadable: self.is_unreadable,
                    };
                    self.core.descriptors_read(read);
                }
                Effect::Copy(id, pages) => {
                    let copied: Vec<_> = pages.iter().map(PageCopy::written).collect();
                    self.core.copied(id, &copied);
                }
                Effect::Room
                | Effect::Reclaim
                | Effect::ReadOnly(..)
                | Effect::ReadWrite(_)
                | Effect::Damaged(_) => {}
            }
            effects.extend(self.core.take_effects());
        }
    }

    /// Writes a page, and has its descriptor written. Further effects of the core are left to the
    /// caller.
    fn submit(&mut self, key: PageKey) -> (ReservationId, u64) {
        let ask = Ask {
            key,
            parent: None,
            depth: 0,
            saved: 0,
        };
        let (id, grants) = self.core.reserve(SLOT, &[ask], Hint::default());
        let Grant::Write(extent) = grants[0] else {
            panic!("a new page is not granted: {grants:?}");
        };
        self.carry_out();
        self.write(extent.offset, &[1; BLOCK_BYTES]);
        self.core.commit(id, &[Some(1.into())]);
        (id, extent.offset)
    }

    fn land(&mut self, id: ReservationId) -> Vec<PutStatus> {
        self.core.landed(id, &[(0, true)]);
        self.carry_out();
        self.settled.remove(&id).unwrap()
    }

    fn put(&mut self, key: PageKey) {
        let (id, _) = self.submit(key);
        self.carry_out();
        assert_eq!(self.land(id), [PutStatus::Stored]);
    }

    fn pause(&mut self) {
        self.now_ms += PAUSE_MS;
        self.core.tick(self.now_ms);
        self.carry_out();
    }

    fn flush(&mut self) -> Result<(), Fault> {
        self.pause();
        self.requests += 1;
        let request = RequestId(self.requests);
        self.core.flush(request);
        self.carry_out();
        self.finished.remove(&request).unwrap()
    }

    fn blocks_of(&self, victim: &Victim) -> Vec<DescriptorBlock> {
        let spot = spot(victim.number);
        let reads: Vec<_> = (0..victim.blocks).map(|at| spot.blocks(at, 1)).collect();
        let blocks = read_all(&self.disk, &reads).into_iter().zip(0..);
        blocks
            .filter_map(|(bytes, at)| spot.parse_block(at, &bytes.unwrap()).ok())
            .collect()
    }

    /// Empties all segments that reclaim wants, with every page kept.
    fn reclaim(&mut self) {
        while self.reclaim_step(usize::MAX) || self.core.is_reclaiming() {
            self.core.check_invariants().unwrap();
        }
    }

    fn reclaim_step(&mut self, pages: usize) -> bool {
        let more = self.core.reclaim_step(pages);
        self.carry_out();
        more
    }
}

/// Offsets of the headers of its first segment.
fn headers() -> BTreeSet<u64> {
    BTreeSet::from([SEGMENTS_OFFSET, SEGMENTS_OFFSET + BLOCK_BYTES as u64])
}

/// Several syncs fail in a row. The first one loses the bytes of the second page, whose put failed,
/// since another descriptor behind its own could not be written. The others lose the headers of its
/// segment. Then one sync succeeds, and releases the segment, whose free header no sync has
/// covered.
fn after_failed_syncs(keys: &[PageKey], failures: usize) -> Store {
    let mut store = Store::new();
    store.put(keys[0]);
    let (refused, place) = store.submit(keys[1]);
    let descriptor = store.core.take_effects();
    let (behind, _) = store.submit(keys[2]);
    store.refuse_writes();
    store.carry_out_these(descriptor);
    // The segment takes no more: once both are over a sync begins, to seal it.
    store.lost = Some(BTreeSet::from([place]));
    let status = [PutStatus::Failed(PutFailure::Write)];
    assert_eq!(store.land(refused), status);
    assert_eq!(store.land(behind), status);
    assert_eq!(store.core.counters().store.failed_syncs, 1);
    store.reclaim();

    for _ in 1..failures {
        store.lost = Some(headers());
        assert_eq!(store.flush(), Err(Fault::Sync));
        store.reclaim();
    }
    store.pause();
    assert_eq!(store.core.counters().store.syncs, 1);
    store
}

/// For each page: whether it is there after a crash, and proven.
fn are_proven(store: &Store, keys: &[PageKey]) -> Vec<Option<bool>> {
    let index = index(1);
    let crashed = superblock(store.run, OpenState::Open, SEGMENTS, SEGMENT_BLOCKS);
    recover(&store.disk, &[Some(&crashed)], &index, false);
    let found = keys.iter().map(|key| index.locate(SLOT, key));
    found
        .map(|found| found.map(|found| !found.unproven))
        .collect()
}

#[test]
fn no_durable_watermark_proves_pages_that_failed_syncs_lost() {
    // The record of the failed put would hide its page.
    plant(Some(Bug::UnvoidedFailure));
    for failures in 1..4 {
        let keys = chain(1, 4);
        let mut store = after_failed_syncs(&keys, failures);
        // Its descriptor would carry the durable watermark.
        store.put(keys[3]);
        store.lost = Some(headers());
        assert_eq!(store.flush(), Err(Fault::Sync));
        // A power loss comes before any header is written again for good.
        store.lose_power();
        let proven = are_proven(&store, &keys[..2]);
        assert_eq!(proven, [Some(false), Some(false)], "{failures}");
    }
}

#[test]
fn the_durable_watermark_advances_with_the_sync_that_makes_the_free_header_durable() {
    for failures in 1..4 {
        let keys = chain(1, 5);
        let mut store = after_failed_syncs(&keys, failures);
        store.put(keys[3]);
        assert_eq!(store.flush(), Ok(()));
        // Its descriptor carries the durable watermark.
        store.put(keys[4]);
        let proven = are_proven(&store, &keys);
        let found = [Some(true), None, None, Some(true), Some(false)];
        assert_eq!(proven, found, "{failures}");
    }
}

/// The header that excludes a page is on its way when a sync fails. The device answers that the
/// header is written, and has lost it.
#[test]
fn a_header_that_was_on_its_way_during_a_failed_sync_excludes_nothing() {
    // The record of the failed put would hide its page.
    plant(Some(Bug::UnvoidedFailure));
    let keys = chain(1, 3);
    let mut store = Store::new();
    store.put(keys[0]);
    let (refused, _) = store.submit(keys[1]);
    store.carry_out();
    store.core.landed(refused, &[(0, false)]);
    let is_header = |effect: &mut Effect| {
        let Effect::Io { io, .. } = effect else {
            return false;
        };
        matches!(io, Io::Write { offset, .. } if headers().contains(offset))
    };
    let mut effects = store.core.take_effects();
    let held: Vec<Effect> = effects.extract_if(.., is_header).collect();
    let [Effect::Io { id: header, .. }] = held[..] else {
        panic!("no header is on its way: {effects:?}");
    };
    store.carry_out_these(effects);
    store.lost = Some(BTreeSet::new());
    assert_eq!(store.flush(), Err(Fault::Sync));
    store.core.io_done(header, Ok(()));
    store.carry_out();
    store.reclaim();
    store.pause();
    assert_eq!(store.core.counters().store.syncs, 1);
    // Its descriptor would carry a durable watermark above the refused page.
    store.put(keys[2]);
    store.lost = Some(headers());
    assert_eq!(store.flush(), Err(Fault::Sync));
    store.lose_power();
    assert_eq!(are_proven(&store, &keys[1..2]), [Some(false)]);
}

/// A sync loses a page's bytes, and its segment's descriptors cannot be read for a while: the store
/// goes on without the segment, and is closed.
#[test]
fn pages_dropped_with_an_unreadable_suspect_are_not_proven_at_a_close() {
    let keys = chain(1, 2);
    let mut store = Store::new();
    let (id, place) = store.submit(keys[0]);
    store.carry_out();
    assert_eq!(store.land(id), [PutStatus::Stored]);
    store.lost = Some(BTreeSet::from([place]));
    assert_eq!(store.flush(), Err(Fault::Sync));
    for _ in 0..2 {
        assert_eq!(store.flush(), Err(Fault::Sync));
        store.is_unreadable = true;
        store.reclaim_step(usize::MAX);
        store.is_unreadable = false;
    }
    assert!(store.index.locate(SLOT, &keys[0]).is_none());
    store.put(keys[1]);
    assert_eq!(store.flush(), Ok(()));
    for (_, offset, bytes) in store.core.closing_headers().unwrap() {
        store.write(offset, &bytes);
    }
    let index = index(1);
    let closed = superblock(store.run, OpenState::Clean, SEGMENTS, SEGMENT_BLOCKS);
    recover(&store.disk, &[Some(&closed)], &index, false);
    let is_proven = |key| index.locate(SLOT, key).is_some_and(|found| !found.unproven);
    assert_eq!((is_proven(&keys[0]), is_proven(&keys[1])), (false, true));
}

#[test]
fn a_failed_sync_does_not_have_lost_volumes_synced() {
    let mut store = Store::beside_a_lost_volume();
    let keys = chain(1, 2);
    store.put(keys[0]);
    store.lost = Some(BTreeSet::new());
    assert_eq!(store.flush(), Err(Fault::Sync));
    store.reclaim();
    store.put(keys[1]);
    assert_eq!(store.flush(), Ok(()));
}

/// The deletion record is written into a segment that no header lists, behind a missing block:
/// recovery would not find it.
#[test]
fn a_deletion_outlives_the_first_header_of_its_segment() {
    let keys = chain(1, 3);
    let mut store = Store::new();
    store.put(keys[0]);
    store.put(keys[1]);
    // This segment takes no more.
    let (refused, _) = store.submit(keys[2]);
    store.refuse_writes();
    store.carry_out();
    store.land(refused);

    store.core.delete(RequestId(1), SLOT, &keys[..1]);
    let mut first = store.core.take_effects().into_iter();
    store.core.delete(RequestId(2), SLOT, &keys[1..2]);
    let second = store.core.take_effects();
    let Some(Effect::Io { id: header, .. }) = first.next() else {
        panic!("no segment is opened");
    };
    store.core.io_done(header, EIO);
    store.carry_out_these(second);
    assert!(!store.finished.contains_key(&RequestId(1)));
    assert_eq!(store.finished[&RequestId(2)], Ok(()));

    let index = index(1);
    let crashed = superblock(store.run, OpenState::Open, SEGMENTS, SEGMENT_BLOCKS);
    recover(&store.disk, &[Some(&crashed)], &index, false);
    let is_there = |key| index.locate(SLOT, key).is_some();
    assert_eq!((is_there(&keys[0]), is_there(&keys[1])), (true, false));
}

/// The store is being closed. The close fails at once after a failed sync, and then waits until
/// nothing is left to be written.
#[test]
fn records_queued_by_a_plan_are_written_after_it_is_aborted() {
    let keys = chain(1, 4);
    let mut store = Store::new();
    store.put(keys[0]);
    store.core.delete(RequestId(1), SLOT, &keys[..1]);
    store.carry_out();
    for key in &keys[1..] {
        store.put(*key);
    }
    store.lost = Some(BTreeSet::new());
    assert_eq!(store.flush(), Err(Fault::Sync));
    store.pause();
    // There is a segment to write into.
    store.put(chain(2, 1)[0]);
    store.reclaim_step(1);
    // Up to the deletion.
    for _ in 0..SEGMENT_BLOCKS {
        if store.core.is_idle() {
            assert!(store.core.reclaim_step(1));
        }
    }
    assert!(!store.core.is_idle(), "the deletion is never carried on");
    store.core.stop_reclaim();
    store.core.reclaim_step(1);
    assert!(!store.core.is_reclaiming());
    store.core.flush(RequestId(2));
    store.carry_out();
    assert_eq!(store.finished[&RequestId(2)], Err(Fault::Sync));
    assert!(store.core.is_idle());
}

/// The namespace record is forwarded out of a segment beside the last of its pages, which leave
/// before a failed sync has the copy written again.
#[test]
fn an_unused_namespace_does_not_block_syncs() {
    let keys = chain(1, 39);
    let mut store = Store::new();
    keys.iter().for_each(|key| store.put(*key));
    store.name("other");
    assert_eq!(store.flush(), Ok(()));

    let mut store = store.reopen();
    store.name("other");
    assert_eq!(store.flush(), Ok(()));
    let is_first = |key: &&PageKey| {
        let found = store.index.locate(SLOT, key).unwrap();
        found.place.segment == store.index.locate(SLOT, &keys[0]).unwrap().place.segment
    };
    let in_first = keys.iter().filter(is_first).count();
    let (first, rest) = keys.split_at(in_first);
    assert!(!rest.is_empty());
    store.spoil(first);
    store.reclaim_step(usize::MAX);
    // The namespace record is forwarded.
    assert!(store.reclaim_step(usize::MAX));
    store.spoil(rest);
    store.lost = Some(BTreeSet::new());
    while store.core.is_reclaiming() {
        store.reclaim_step(usize::MAX);
    }
    assert_eq!(store.core.counters().store.failed_syncs, 1);
    for _ in 0..5 {
        store.reclaim();
        store.pause();
    }
    assert_eq!(store.flush(), Ok(()));
    assert!(store.core.is_idle());
}

/// Two groups in flight in one segment: the later one lands, and its page is acknowledged, before
/// the earlier one fails.
fn behind_a_hole(can_be_filled: bool) -> (bool, usize) {
    let keys = chain(1, 3);
    let mut store = Store::new();
    store.put(keys[0]);
    let (lost, _) = store.submit(keys[1]);
    let descriptor = store.core.take_effects();
    let (behind, _) = store.submit(keys[2]);
    store.carry_out();
    assert_eq!(store.land(behind), [PutStatus::Stored]);
    for effect in descriptor {
        if let Effect::Io { id, .. } = effect {
            store.core.io_done(id, EIO);
        }
    }
    store.core.landed(lost, &[(0, true)]);
    if !can_be_filled {
        store.refuse_writes();
    }
    store.carry_out();
    assert_eq!(store.flush(), Ok(()));

    let index = index(1);
    let crashed = superblock(store.run, OpenState::Open, SEGMENTS, SEGMENT_BLOCKS);
    let recovery = recover(&store.disk, &[Some(&crashed)], &index, false);
    assert!(index.locate(SLOT, &keys[0]).is_some());
    assert!(index.locate(SLOT, &keys[1]).is_none());
    let found = index.locate(SLOT, &keys[2]).unwrap();
    (!found.unproven, recovery.damage.len())
}

#[test]
fn records_behind_a_failed_descriptor_write_are_proven_once_the_hole_is_filled() {
    assert_eq!(behind_a_hole(true), (true, 0));
    assert_eq!(behind_a_hole(false), (false, 0));
}

//! A process with a core over a volume in memory. It carries out each request of the core at once,
//! up to the write at which it is killed.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use larder_core::core::{Config, Copied, Core, Descriptors, Effect, Io, Move, PageCopy, Victim};
use larder_core::grants::{Ask, Grant, ReservationId, SegmentMap};
use larder_core::index::{Index, NamespaceSlot, SegmentId};
use larder_disk::mailbox::read_all;
use larder_engine::format::{
    BLOCK_BYTES, Body, DescriptorBlock, Namespace, OpenState, PageChecksum, PageKey, Record, Run,
    SEGMENTS_OFFSET, SegmentHeader, Superblock,
};
use larder_engine::{Hint, PutStatus};
use larder_store::recovery::recover;
use larder_store::recovery::scan::{Bodies, Spot};

use super::common::memory::{self, Memory, STORE};
use super::common::namespace;

pub const SEGMENTS: u32 = 12;
pub const SEGMENT_BLOCKS: u32 = 402;
pub const PAGE_BLOCKS: u32 = 2;

/// Pages of a chain, which is put at once.
pub const PAGES: usize = 16;

/// Pages that reclaim moves at once.
const MOVED_AT_ONCE: u64 = 16;

fn superblock(run: Run, state: OpenState) -> Superblock {
    memory::superblock(run, state, SEGMENTS, SEGMENT_BLOCKS)
}

pub fn the_namespace() -> Namespace {
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
pub struct Killed;

/// A store that is open, in a process that will be killed.
pub struct Process<'a> {
    pub disk: &'a Memory,
    pub core: Core,
    pub index: Arc<Index>,
    pub slot: NamespaceSlot,
    /// Writes until the kill.
    pub writes_left: usize,
    pub settled: BTreeMap<ReservationId, Vec<PutStatus>>,
    pub now_ms: u64,
    /// Segments that reclaim has emptied, in order.
    pub victims: Vec<SegmentId>,
    /// The pages moved out of each of them.
    pub moved: Vec<Vec<Move>>,
    /// Pages named in the victim's descriptors.
    pub in_victim: Vec<PageKey>,
    /// Pages of a plan processed in one step.
    pub planned_at_once: usize,
    /// Called with the pages of a victim after all of them have been planned in one step.
    pub once_planned: fn(&mut Process<'_>, &[PageKey]),
    /// Pages that `once_planned` has used, and the eviction count after that.
    pub used: Vec<PageKey>,
    pub evicted: Option<u64>,
    /// Victims whose pages were evicted for lack of room.
    pub given_up: usize,
    /// How many of the next victims stay pinned.
    pub to_keep: usize,
    pub kept: usize,
}

impl<'a> Process<'a> {
    pub fn open(disk: &'a Memory, run: &mut Run, writes: usize) -> Process<'a> {
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

    pub fn start(&mut self) -> Result<(), Killed> {
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
    pub fn with_core<R>(&mut self, command: impl FnOnce(&mut Core) -> R) -> Result<R, Killed> {
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
                | Effect::ReadWrite(_)
                | Effect::Damaged(_) => {}
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
            checksums.push(Some(checksum.into()));
            landed.push((at, true));
        }
        self.with_core(|core| core.commit(id, &checksums))?;
        self.with_core(|core| core.landed(id, &landed))?;
        Ok(self.settled.remove(&id).unwrap())
    }

    /// Puts a chain.
    pub fn put(&mut self, keys: &[PageKey]) -> Result<(), Killed> {
        self.put_from(keys, 0)
    }

    /// Puts a chain from its page `first` on. If there is no room for it, reclaim runs first.
    pub fn put_from(&mut self, chain: &[PageKey], first: usize) -> Result<(), Killed> {
        let keys = &chain[first..];
        let asks: Vec<Ask> = (0_u32..)
            .zip(chain)
            .skip(first)
            .map(|(depth, key)| Ask {
                key: *key,
                parent: depth.checked_sub(1).map(|up| chain[up as usize]),
                depth,
                saved: 0,
            })
            .collect();
        for _ in 0..10_000 {
            let slot = self.slot;
            let granted = self.with_core(|core| core.reserve(slot, &asks, Hint::default()))?;
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
    pub fn reclaim(&mut self) -> Result<(), Killed> {
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
        Ok(pages.iter().map(PageCopy::written).collect())
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
            bodies: Bodies::Clear,
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
    pub fn holds(&self, keys: &[PageKey]) -> bool {
        let map = SegmentMap::new(&[SEGMENTS], SEGMENT_BLOCKS);
        keys.iter().all(|key| {
            let (bytes, checksum) = payload(key);
            let mut there = vec![0; bytes.len()];
            let found = self.index.locate(self.slot, key);
            found.is_some_and(|found| {
                let read = self.disk.read(map.extent(found.place).offset, &mut there);
                read.unwrap();
                found.proof.checksum == checksum && there == bytes
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

pub fn write_headers(disk: &Memory, header: &SegmentHeader) {
    let mut bytes = [0; BLOCK_BYTES];
    header.encode(&mut bytes);
    let segment = u64::from(header.segment.0 * SEGMENT_BLOCKS);
    let offset = SEGMENTS_OFFSET + segment * BLOCK_BYTES as u64;
    disk.write(offset, &[bytes, bytes].concat());
}

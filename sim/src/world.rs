//! One run of a seed: a core, its disk, callers and a housekeeper, all moved by one generator.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};

use larder_engine::PutStatus;
use larder_engine::catalog::ReservationId;
use larder_engine::core::{Config, Core, Effect, Fault, Io, IoId, RequestId};
use larder_engine::format::{
    BlockAddress, Body, DescriptorBlock, Fingerprint, OpenState, Record, SEGMENTS_OFFSET,
    SegmentHeader, SegmentNo, SegmentState, Serial, StoreId, Superblock,
};
use larder_engine::index::{Index, NamespaceSlot, Place, SegmentId};
use larder_engine::recovery::scan::Spot;

use crate::clients::Task;
use crate::dice::{Dice, mix};
use crate::disk::{Content, SimDisk, contents};
use crate::keeper::Keeper;
use crate::oracle::{Name, Oracle, VersionId};
use crate::setup::{BLOCK, Setup};
use crate::totals::Totals;

/// The last events of a run, for when it fails.
pub type Journal = Arc<Mutex<VecDeque<String>>>;

const EVENTS_KEPT: usize = 100;

/// Something that the device is doing.
pub enum Flight {
    /// A metadata write of the core.
    Meta {
        id: IoId,
        volume: usize,
        start: usize,
        blocks: Vec<Content>,
        is_header: bool,
    },
    /// A sync of the core; how many writes it covers.
    Sync {
        id: IoId,
        volume: usize,
        covers: usize,
    },
    /// A write of neighbouring pages, by a caller or (`client` is `None`) by the housekeeper.
    Data {
        client: Option<usize>,
        asks: Vec<usize>,
        volume: usize,
        start: usize,
        blocks: Vec<Content>,
    },
    /// A caller's read of one page.
    Read {
        client: usize,
        at: usize,
        volume: usize,
        start: usize,
        count: usize,
    },
}

/// A page's descriptor that has been written in this run.
struct Described {
    name: Name,
    version: VersionId,
    place: Place,
    volume: usize,
    block: usize,
    content: Content,
}

/// The store while it is open.
pub struct Live {
    pub core: Core,
    pub index: Arc<Index>,
    pub slots: Vec<NamespaceSlot>,
    pub clients: Vec<Option<Task>>,
    pub keeper: Keeper,
    pub flights: Vec<Flight>,
    pub settled: BTreeMap<ReservationId, Vec<PutStatus>>,
    pub finished: BTreeMap<RequestId, Result<(), Fault>>,
    pub reclaim: bool,
    wake_at: Option<u64>,
    pub pins: BTreeMap<SegmentId, u32>,
    described: BTreeMap<Serial, Vec<Described>>,
    mark: Serial,
    /// Pages that recovery published.
    pub recovered: u64,
    /// Where those lay: they may be unproven.
    pub unproven: BTreeMap<Name, Place>,
    /// Pages given up, or whose write failed, so that a failed status is due.
    pub failures: u64,
    pub stopping: bool,
    /// What the index held after the last step.
    names: Vec<Name>,
    /// Births of the evictions of this run that have been written down.
    evictions: BTreeSet<Serial>,
}

pub struct World {
    pub setup: Setup,
    pub dice: Dice,
    pub disk: Arc<SimDisk>,
    pub superblocks: Vec<Superblock>,
    pub store: StoreId,
    pub oracle: Oracle,
    pub now_ms: u64,
    /// Counts everything that happens; orders reservations and deletions.
    pub clock: u64,
    pub next_request: u64,
    pub digest: u64,
    pub calm: bool,
    /// Segments whose metadata the device spoiled, in their present life.
    pub tainted: BTreeSet<SegmentId>,
    /// Segments one of whose headers rotted at some time: their old life may come back under their new one's bytes.
    pub headless: BTreeSet<SegmentId>,
    /// Pages that have left the index at some time.
    pub left: BTreeSet<Name>,
    /// Segments whose metadata a failed sync dropped, in their present life.
    pub shaken: BTreeSet<SegmentId>,
    /// Segments that some earlier run left so: nobody remembers, and what is read there may not be what is durable.
    pub forgotten: BTreeSet<SegmentId>,
    journal: Option<Journal>,
    pub totals: Totals,
}

impl World {
    pub fn new(seed: u64, journal: Option<Journal>) -> World {
        let mut dice = Dice::new(seed);
        let setup = Setup::draw(&mut dice);
        if journal.is_some() {
            eprintln!("{setup:?}");
        }
        let store = StoreId::from_bytes([7; 16]);
        World {
            disk: SimDisk::new(&setup.volume_blocks()),
            superblocks: setup.superblocks(store),
            oracle: Oracle::new(&setup, seed),
            store,
            setup,
            dice,
            now_ms: 0,
            clock: 0,
            next_request: 0,
            digest: 0,
            calm: false,
            tainted: BTreeSet::new(),
            headless: BTreeSet::new(),
            left: BTreeSet::new(),
            shaken: BTreeSet::new(),
            forgotten: BTreeSet::new(),
            journal,
            totals: Totals::default(),
        }
    }

    /// Notes an event. `tell` is called only when somebody listens.
    pub fn note(&mut self, weight: u64, tell: impl FnOnce() -> String) {
        self.digest = mix(self.digest, weight);
        if let Some(journal) = &self.journal {
            let mut journal = journal.lock().unwrap();
            if journal.len() == EVENTS_KEPT {
                journal.pop_front();
            }
            journal.push_back(format!("{:6} {:8}ms  {}", self.clock, self.now_ms, tell()));
        }
    }

    pub fn fault(&mut self, probability: f64) -> bool {
        !self.calm && self.dice.chance(probability)
    }

    pub fn config(&self) -> Config {
        Config {
            store: self.store,
            segment_blocks: self.setup.segment_blocks,
            sync: self.setup.sync,
            write_bytes_max: self.setup.write_bytes_max,
            read_only: false,
        }
    }

    // ---- addresses

    pub fn segment_first_block(&self, number: u32) -> usize {
        SEGMENTS_OFFSET as usize / BLOCK + (number * self.setup.segment_blocks) as usize
    }

    /// Store-wide number of a volume's segment.
    pub fn segment_id(&self, volume: usize, number: u32) -> SegmentId {
        SegmentId(self.setup.volumes[..volume].iter().sum::<u32>() + number)
    }

    pub fn volume_of(&self, segment: SegmentId) -> (usize, u32) {
        let mut number = segment.0;
        for (volume, &segments) in self.setup.volumes.iter().enumerate() {
            if number < segments {
                return (volume, number);
            }
            number -= segments;
        }
        panic!("segment {segment:?} is beyond the store");
    }

    /// Volume and block of a place.
    pub fn address(&self, place: Place) -> (usize, usize) {
        let (volume, number) = self.volume_of(place.segment);
        (
            volume,
            self.segment_first_block(number) + place.start as usize,
        )
    }

    /// Segment and block within it; `None` before the first segment.
    pub fn locate_block(&self, volume: usize, block: usize) -> (SegmentId, u32, u32) {
        let within = block - SEGMENTS_OFFSET as usize / BLOCK;
        let number = within as u32 / self.setup.segment_blocks;
        (
            self.segment_id(volume, number),
            number,
            within as u32 % self.setup.segment_blocks,
        )
    }

    pub fn spot(&self, volume: usize, number: u32) -> Spot {
        Spot {
            store: self.store,
            volume,
            number,
            segment_blocks: self.setup.segment_blocks,
        }
    }

    pub fn namespace_of(&self, fingerprint: Fingerprint) -> usize {
        self.setup
            .namespaces
            .iter()
            .position(|n| n.fingerprint() == fingerprint)
            .expect("a namespace that was never opened")
    }

    pub fn is_intact(&self, version: VersionId, place: Place) -> bool {
        let (volume, start) = self.address(place);
        let count = self.oracle.version(version).blocks as usize;
        let volumes = self.disk.volumes();
        let blocks: Vec<Content> = (start..start + count)
            .map(|at| volumes[volume].visible(at).clone())
            .collect();
        self.oracle.is_payload(version, &blocks)
    }

    // ---- the core

    /// Runs a command as the store does: a tick, the command, its effects.
    pub fn with_core<R>(&mut self, live: &mut Live, command: impl FnOnce(&mut Core) -> R) -> R {
        self.clock += 1;
        live.core.tick(self.now_ms);
        let result = command(&mut live.core);
        let effects = live.core.take_effects();
        let wake_at = live.core.wakes_at();
        for effect in effects {
            self.take_effect(live, effect);
        }
        live.wake_at = match (live.wake_at, wake_at) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        result
    }

    /// Whether the housekeeper is to be woken now.
    pub fn is_called(&self, live: &Live) -> bool {
        live.reclaim || live.wake_at.is_some_and(|at| at <= self.now_ms)
    }

    pub fn answer_call(live: &mut Live) {
        live.reclaim = false;
        live.wake_at = None;
    }

    /// When the housekeeper wants to be woken.
    pub fn wakes_at(live: &Live) -> Option<u64> {
        live.wake_at
    }

    fn take_effect(&mut self, live: &mut Live, effect: Effect) {
        match effect {
            Effect::Io { id, volume, io } => match io {
                Io::Sync => {
                    let covers = self.disk.volumes()[volume].unsynced();
                    self.note(id.0, || {
                        format!("sync of volume {volume} starts, covers {covers}")
                    });
                    live.flights.push(Flight::Sync { id, volume, covers });
                }
                Io::Write { offset, bytes } => {
                    let start = usize::try_from(offset).unwrap() / BLOCK;
                    let blocks = contents(&bytes);
                    let is_header = self.inspect(live, volume, start, &blocks);
                    live.flights.push(Flight::Meta {
                        id,
                        volume,
                        start,
                        blocks,
                        is_header,
                    });
                }
            },
            Effect::Settled(id, statuses) => {
                self.note(id.0, || format!("{id:?} settles: {statuses:?}"));
                let before = live.settled.insert(id, statuses);
                assert!(before.is_none(), "{id:?} settles twice");
            }
            Effect::Finished(id, result) => {
                self.note(id.0, || format!("{id:?} finishes: {result:?}"));
                let before = live.finished.insert(id, result);
                assert!(before.is_none(), "{id:?} finishes twice");
            }
            Effect::Room => {}
            Effect::Reclaim => live.reclaim = true,
        }
    }

    /// Looks at a metadata write before it starts: what it claims must be true. Whether it is one of headers.
    fn inspect(
        &mut self,
        live: &mut Live,
        volume: usize,
        start: usize,
        blocks: &[Content],
    ) -> bool {
        let (segment, number, within) = self.locate_block(volume, start);
        let is_header = within < 2;
        for (content, at) in blocks.iter().zip(start..) {
            let Content::Meta(bytes) = content else {
                panic!("metadata that is none");
            };
            let (_, _, within) = self.locate_block(volume, at);
            if is_header {
                let header = SegmentHeader::check(&bytes[..])
                    .and_then(|header| {
                        header.at(&larder_engine::format::SegmentAddress {
                            store: self.store,
                            volume: volume as u16,
                            segment: SegmentNo(number),
                            segment_blocks: self.setup.segment_blocks,
                        })
                    })
                    .expect("a header that no reader takes");
                self.inspect_header(live, segment, &header);
            } else {
                let index = self.setup.segment_blocks - 1 - within;
                let block = self
                    .spot(volume, number)
                    .parse_block(index, &bytes[..])
                    .expect("a descriptor block that no reader takes");
                self.inspect_block(live, segment, (volume, at), content, &block);
            }
        }
        is_header
    }

    fn inspect_header(&mut self, live: &mut Live, segment: SegmentId, header: &SegmentHeader) {
        self.note(header.sequence.get(), || {
            format!(
                "header of {segment:?}: {:?} {} blocks {} proven {} synced {}",
                header.state, header.sequence, header.blocks, header.proven, header.synced
            )
        });
        if matches!(header.state, SegmentState::Open | SegmentState::Free) {
            let pins = live.pins.get(&segment).copied().unwrap_or(0);
            assert!(pins == 0, "{segment:?} is given back under {pins} readers");
        }
        if header.state == SegmentState::Open {
            assert!(
                self.is_durably_free(segment)
                    || self.headless.contains(&segment)
                    || self.forgotten.contains(&segment),
                "{segment:?} is written again, and a power loss would bring its old life back"
            );
            self.tainted.remove(&segment);
            self.shaken.remove(&segment);
            for pages in live.described.values_mut() {
                pages.retain(|page| page.place.segment != segment);
            }
        }
        self.check_mark(live, header.synced);
    }

    /// Whether a segment would be free after a power loss: one header copy says so, or it never had one.
    fn is_durably_free(&self, segment: SegmentId) -> bool {
        let (volume, number) = self.volume_of(segment);
        let first = self.segment_first_block(number);
        let volumes = self.disk.volumes();
        let copies = [first, first + 1].map(|at| volumes[volume].durable(at));
        let says_free = |copy: &&Content| {
            let Content::Meta(bytes) = copy else {
                return false;
            };
            let header = self.spot(volume, number).parse_headers(&bytes[..])[0];
            header.is_ok_and(|header| header.state == SegmentState::Free)
        };
        copies.iter().any(says_free) || copies.iter().all(|copy| **copy == Content::Zero)
    }

    fn inspect_block(
        &mut self,
        live: &mut Live,
        segment: SegmentId,
        (volume, at): (usize, usize),
        content: &Content,
        block: &DescriptorBlock,
    ) {
        let header = &block.header;
        self.note(header.commit.get(), || {
            format!(
                "block {} of {segment:?} commit {} synced {} {:?}",
                header.index, header.commit, header.synced, block.body
            )
        });
        self.check_mark(live, header.synced);
        if let Content::Meta(before) = self.disk.volumes()[volume].visible(at)
            && let Ok(before) = DescriptorBlock::check(&before[..])
        {
            // What a crash left behind the last block that recovery found may be written over by a later run.
            let spot = self.spot(volume, header.segment.0);
            let is_other = before.at(&BlockAddress {
                store: self.store,
                volume: volume as u16,
                segment: header.segment,
                segment_blocks: spot.segment_blocks,
                index: header.index,
            });
            assert!(
                is_other.is_err()
                    || is_other.is_ok_and(|before| {
                        before.header.sequence != header.sequence
                            || before.header.commit.run() < header.commit.run()
                    }),
                "a descriptor block is written twice in one life"
            );
        }
        let Body::Records(records) = &block.body else {
            return;
        };
        for record in records {
            if matches!(record, Record::Evict { birth, .. } if birth.run() == live.run()) {
                live.evictions.insert(record.birth());
            }
            let Record::Page(page) = record else { continue };
            let namespace = self.namespace_of(page.namespace);
            let name = self
                .oracle
                .by_key(namespace, page.key.prefix().as_bytes())
                .expect("a page that was never put");
            let version = self
                .oracle
                .find(name, page.checksum)
                .expect("a version that was never written");
            live.described
                .entry(header.commit)
                .or_default()
                .push(Described {
                    name,
                    version,
                    place: Place {
                        segment,
                        start: page.start,
                    },
                    volume,
                    block: at,
                    content: content.clone(),
                });
        }
    }

    /// What is stated to be synced must be durable, as far as the index still knows it there.
    fn check_mark(&mut self, live: &mut Live, mark: Serial) {
        if mark <= live.mark || mark.run() != live.run() {
            return;
        }
        let due: Vec<Serial> = live
            .described
            .range(..=mark)
            .map(|(commit, _)| *commit)
            .collect();
        for commit in due {
            for page in live.described.remove(&commit).unwrap_or_default() {
                self.check_synced(live, commit, &page);
            }
        }
        live.mark = mark;
    }

    fn check_synced(&self, live: &Live, commit: Serial, page: &Described) {
        let info = self.oracle.name(page.name);
        let slot = live.slots[info.namespace];
        let located = live.index.locate(slot, &info.key);
        let version = self.oracle.version(page.version);
        let is_there = located
            .is_some_and(|found| found.place == page.place && found.checksum == version.checksum);
        if !is_there || version.rotten {
            return;
        }
        let (volume, start) = self.address(page.place);
        let volumes = self.disk.volumes();
        let payload: Vec<Content> = (start..start + version.blocks as usize)
            .map(|at| volumes[volume].durable(at).clone())
            .collect();
        assert!(
            self.oracle.is_payload(page.version, &payload),
            "commit {commit} is called synced, but the payload of {:?} at {:?} is not durable",
            page.version,
            page.place
        );
        let is_tainted = self.tainted.contains(&page.place.segment);
        assert!(
            is_tainted || *volumes[page.volume].durable(page.block) == page.content,
            "commit {commit} is called synced, but the descriptor of {:?} is not durable",
            page.version
        );
    }

    /// What the index holds, by name; everything in it must be something that was put.
    pub fn snapshot(
        &self,
        index: &Index,
        namespaces: &[usize],
    ) -> BTreeMap<Name, (VersionId, Place, bool)> {
        let mut pages = BTreeMap::new();
        index.each(|page| {
            let namespace = namespaces[usize::from(page.namespace.0)];
            let name = self
                .oracle
                .by_key(namespace, page.key.as_bytes())
                .expect("the index holds a page that was never put");
            let version = self
                .oracle
                .find(name, page.checksum)
                .expect("the index holds a checksum that was never put under this name");
            pages.insert(name, (version, page.place, page.unproven));
        });
        pages
    }

    /// By slot, which namespace it is.
    pub fn namespaces_by_slot(&self, live: &Live) -> Vec<usize> {
        let slots = live
            .slots
            .iter()
            .map(|slot| usize::from(slot.0))
            .max()
            .map_or(0, |max| max + 1);
        let mut namespaces = vec![usize::MAX; slots];
        for (namespace, slot) in live.slots.iter().enumerate() {
            namespaces[usize::from(slot.0)] = namespace;
        }
        namespaces
    }

    /// Checks what must hold between any two steps.
    pub fn check(&mut self, live: &mut Live) {
        live.core.check_invariants().unwrap();
        let pages = self.snapshot(&live.index, &self.namespaces_by_slot(live));
        for (version, place, _) in pages.values() {
            assert!(
                !self.oracle.is_dead(*version),
                "{version:?} at {place:?} was deleted"
            );
        }
        let names: Vec<Name> = pages.keys().copied().collect();
        let gone = |name: &&Name| !pages.contains_key(name);
        self.left.extend(live.names.iter().filter(gone));
        live.names = names;
        let c = live.core.counters();
        let balance = live.recovered + c.pages_put;
        let gone = c.replaced + c.evicted + c.deleted + c.damaged + c.unfinished;
        assert_eq!(
            balance,
            gone + pages.len() as u64,
            "pages do not add up: {} recovered, {c:?}, {} in the index",
            live.recovered,
            pages.len()
        );
        if !self.setup.faults.spoils()
            && self.setup.faults.misdirected_read == 0.0
            && self.setup.faults.sync_error == 0.0
            && self.setup.faults.header_error == 0.0
        {
            assert_eq!(c.damaged, 0, "damage on a device that does none");
        }
    }

    /// At a clean close with a segment to spare every eviction of the run has been written down.
    pub fn check_evictions(&self, live: &Live) {
        let (evicted, written) = (live.core.counters().evicted, live.evictions.len() as u64);
        let had_room = live.core.space_view().free_segments > 0;
        assert!(
            written >= evicted || !had_room || self.setup.faults.fail_writes(),
            "{evicted} pages were evicted, and {written} of that written down"
        );
    }

    pub fn mark_clean(&mut self) {
        for superblock in &mut self.superblocks {
            superblock.state = OpenState::Clean;
        }
    }
}

impl Live {
    pub fn new(core: Core, index: Arc<Index>, clients: usize, mark: Serial) -> Live {
        Live {
            core,
            recovered: index.len() as u64,
            unproven: BTreeMap::new(),
            index,
            slots: Vec::new(),
            clients: (0..clients).map(|_| None).collect(),
            keeper: Keeper::Idle,
            flights: Vec::new(),
            settled: BTreeMap::new(),
            finished: BTreeMap::new(),
            reclaim: false,
            wake_at: None,
            pins: BTreeMap::new(),
            described: BTreeMap::new(),
            mark,
            failures: 0,
            stopping: false,
            names: Vec::new(),
            evictions: BTreeSet::new(),
        }
    }

    fn run(&self) -> larder_engine::format::Run {
        self.mark.run()
    }
}

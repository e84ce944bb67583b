//! One run of a seed: a core, its disk, callers and a housekeeper, all driven by one generator.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex};

use larder_engine::PutStatus;
use larder_engine::catalog::ReservationId;
use larder_engine::core::{Config, Core, Effect, Fault, Io, IoId, RequestId};
use larder_engine::format::{
    Fingerprint, Run, SEGMENTS_OFFSET, SegmentState, Serial, StoreId, Superblock,
};
use larder_engine::index::{Index, NamespaceSlot, Place, SegmentId};
use larder_engine::recovery::scan::Spot;
use larder_sim_runtime::dice::{Dice, mix};
use larder_sim_runtime::medium::{Content, contents};

use crate::classes::{Class, Tally};
use crate::clients::Task;
use crate::disk::SimDisk;
use crate::keeper::Keeper;
use crate::oracle::{Name, Oracle, VersionId};
use crate::setup::{BLOCK, Setup};
use crate::superblocks::Cut;
use crate::totals::Totals;

/// The last events of a run, printed if it fails.
pub type Journal = Arc<Mutex<VecDeque<String>>>;

const EVENTS_KEPT: usize = 400;

/// Longest delay of an operation, in steps.
const DELAY_STEPS_MAX: u64 = 150;

/// An operation in flight at the device.
pub enum Flight {
    /// A metadata write of the core.
    Meta {
        id: IoId,
        volume: usize,
        start: usize,
        blocks: Vec<Content>,
        /// The state that a header states. `None` for descriptors.
        header: Option<SegmentState>,
    },
    /// A sync of the core, and the number of writes that it covers. `None` when these are lost
    /// already.
    Sync {
        id: IoId,
        volume: usize,
        covers: Option<usize>,
    },
    /// A write of adjacent pages, by a caller or (`client` is `None`) by the housekeeper.
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

/// An operation in flight at the device, with its start.
pub struct InFlight {
    pub flight: Flight,
    /// Order of the operations' starts.
    pub number: u64,
    /// Does not end before this moment.
    pub due: u64,
}

impl Flight {
    pub fn volume(&self) -> usize {
        match *self {
            Flight::Meta { volume, .. }
            | Flight::Sync { volume, .. }
            | Flight::Data { volume, .. }
            | Flight::Read { volume, .. } => volume,
        }
    }
}

/// A page descriptor that was written in this epoch.
pub struct Described {
    pub name: Name,
    pub version: VersionId,
    pub place: Place,
    pub volume: usize,
    pub block: usize,
    pub content: Content,
}

/// What a run knows of the present epoch.
pub struct Epoch {
    pub index: Arc<Index>,
    /// By namespace. `None` while this epoch does not know the namespace.
    pub slots: Vec<Option<NamespaceSlot>>,
    /// By namespace: whether it was named in this epoch.
    pub named: Vec<bool>,
    /// A write of this epoch has arrived.
    pub has_written: bool,
    pub pins: BTreeMap<SegmentId, u32>,
    pub described: BTreeMap<Serial, Vec<Described>>,
    /// The highest durable watermark that the core has stated.
    pub mark: Serial,
    /// Pages that recovery published.
    pub recovered: u64,
    /// Locations of these pages. They may be unproven.
    pub unproven: BTreeMap<Name, Place>,
    /// Pages given up, and failed writes: a failed status is due.
    pub failures: u64,
    /// Versions of the recorded evictions of this epoch.
    pub evictions: BTreeSet<Serial>,
}

/// The store while it is open.
pub struct Live {
    pub core: Core,
    pub epoch: Epoch,
    pub clients: Vec<Option<Task>>,
    pub keeper: Keeper,
    pub flights: Vec<InFlight>,
    launched: u64,
    pub settled: BTreeMap<ReservationId, Vec<PutStatus>>,
    pub finished: BTreeMap<RequestId, Result<(), Fault>>,
    /// Number of times that space or write budget became available.
    pub room: u64,
    pub reclaim: bool,
    wake_at: Option<u64>,
    pub stopping: bool,
    /// The moment at which its close is cut short.
    pub closing: Cut,
}

impl Deref for Live {
    type Target = Epoch;

    fn deref(&self) -> &Epoch {
        &self.epoch
    }
}

impl DerefMut for Live {
    fn deref_mut(&mut self) -> &mut Epoch {
        &mut self.epoch
    }
}

pub struct World {
    pub setup: Setup,
    pub dice: Dice,
    pub disk: Arc<SimDisk>,
    /// The superblocks as the running process knows them. `None` for a lost volume.
    pub superblocks: Vec<Option<Superblock>>,
    /// By volume and copy: the generation of the superblock that is certainly there.
    pub copies: Vec<[Option<u64>; 2]>,
    pub store: StoreId,
    pub oracle: Oracle,
    pub now_ms: u64,
    /// Counts all events. Orders reservations and deletions.
    pub clock: u64,
    /// Counts steps.
    pub moment: u64,
    /// The clock stands still until this moment.
    pub frozen_until: u64,
    pub next_request: u64,
    pub digest: u64,
    pub calm: bool,
    /// Segments whose metadata the device spoiled, in their present generation.
    pub tainted: BTreeSet<SegmentId>,
    /// Segments with a header that was spoiled at some time. Their old generation may come back
    /// with the bytes of the new one.
    pub headless: BTreeSet<SegmentId>,
    /// A header was lost on its way. It may have been the only record of refused page writes.
    pub unsealed: bool,
    /// Pages with a record of their removal, and the time of the last such record.
    pub left: BTreeMap<Name, u64>,
    /// A crash tore a header or a descriptor block in the middle: it is neither old nor new.
    pub torn_inside: bool,
    /// Segments whose metadata a failed sync dropped, in their present generation.
    pub shaken: BTreeSet<SegmentId>,
    /// Segments that an earlier epoch left in that state, or with a spoiled header. Their visible
    /// content may differ from the durable one, and the store cannot know it.
    pub forgotten: BTreeSet<SegmentId>,
    /// Namespaces whose records are on the device for certain, for as long as they have pages.
    pub recorded: BTreeSet<usize>,
    /// Syncs that have just begun and will lose the writes that they cover: volume, and number of
    /// unsynced writes.
    pub losing: Vec<(usize, usize)>,
    journal: Option<Journal>,
    pub totals: Totals,
    pub tally: Tally,
}

impl World {
    /// A world with these dice. `salt` makes the bytes of its pages differ from those of other
    /// worlds.
    pub fn new(mut dice: Dice, salt: u64, journal: Option<Journal>) -> World {
        let setup = Setup::draw(&mut dice);
        if journal.is_some() {
            eprintln!("{setup:?}");
        }
        let store = StoreId::from_bytes([7; 16]);
        let kernel = dice.fork();
        let superblocks: Vec<Option<Superblock>> =
            setup.superblocks(store).into_iter().map(Some).collect();
        let mut world = World {
            disk: SimDisk::new(&setup.volume_blocks(), kernel, setup.faults.calls),
            copies: vec![[None; 2]; superblocks.len()],
            superblocks,
            oracle: Oracle::new(&setup, salt),
            store,
            setup,
            dice,
            now_ms: 0,
            clock: 0,
            moment: 0,
            frozen_until: 0,
            next_request: 0,
            digest: 0,
            calm: false,
            tainted: BTreeSet::new(),
            headless: BTreeSet::new(),
            unsealed: false,
            left: BTreeMap::new(),
            torn_inside: false,
            shaken: BTreeSet::new(),
            forgotten: BTreeSet::new(),
            recorded: BTreeSet::new(),
            losing: Vec::new(),
            journal,
            totals: Totals::default(),
            tally: Tally::default(),
        };
        world.create_superblocks();
        world
    }

    /// Records an event. `tell` is called only if there is a journal.
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

    /// Delay of an operation, in steps.
    pub fn draw_delay(&mut self) -> u64 {
        if self.strikes(Class::Delayed, self.setup.faults.delay) {
            self.dice.between(1, DELAY_STEPS_MAX)
        } else {
            0
        }
    }

    /// Starts an operation at the device.
    pub fn launch(&mut self, live: &mut Live, flight: Flight) {
        let delay = self.draw_delay();
        live.launched += 1;
        live.flights.push(InFlight {
            flight,
            number: live.launched,
            due: self.moment + delay,
        });
    }

    pub fn config(&self) -> Config {
        Config {
            store: self.store,
            segment_blocks: self.setup.segment_blocks,
            sync: self.setup.sync,
            write_bytes_max: self.setup.write_bytes_max,
            copy_blocks_max: self.setup.copy_blocks_max,
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

    /// The segment of a block, and the block's number in it. The block must not lie before the
    /// first segment.
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

    /// Whether a deleted page is present. That is excused where a segment's headers were spoiled:
    /// its old generation may come back with such pages.
    pub fn is_undead(&self, version: VersionId, place: Place) -> bool {
        self.oracle.is_dead(version) && !self.headless.contains(&place.segment)
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
        let volumes = self.setup.volumes.len();
        let evicted = evicted_when_read_only(&live.core, volumes);
        live.core.tick(self.now_ms);
        let result = command(&mut live.core);
        if let (Some(before), Some(after)) = (evicted, evicted_when_read_only(&live.core, volumes))
        {
            assert_eq!(
                before, after,
                "a page is evicted while no volume takes writes"
            );
        }
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

    /// Whether the housekeeper has to wake up now.
    pub fn is_called(&self, live: &Live) -> bool {
        live.reclaim || live.wake_at.is_some_and(|at| at <= self.now_ms)
    }

    pub fn answer_call(live: &mut Live) {
        live.reclaim = false;
        live.wake_at = None;
    }

    /// The next wakeup of the housekeeper.
    pub fn wakes_at(live: &Live) -> Option<u64> {
        live.wake_at
    }

    fn take_effect(&mut self, live: &mut Live, effect: Effect) {
        match effect {
            Effect::Io { id, volume, io } => match io {
                Io::Sync => {
                    let covers = self.begin_sync(volume);
                    self.note(id.0, || {
                        format!("sync of volume {volume} starts, covers {covers:?}")
                    });
                    self.launch(live, Flight::Sync { id, volume, covers });
                }
                Io::Write { offset, bytes } => {
                    let start = usize::try_from(offset).unwrap() / BLOCK;
                    let blocks = contents(&bytes);
                    let header = self.inspect(live, volume, start, &blocks);
                    let flight = Flight::Meta {
                        id,
                        volume,
                        start,
                        blocks,
                        header,
                    };
                    self.launch(live, flight);
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
            Effect::ReadDescriptors(victim) => {
                self.note(u64::from(victim.segment.0), || format!("victim {victim:?}"));
                live.keeper = Keeper::Reading(victim);
            }
            Effect::Copy(id, pages) => {
                self.note(id.0, || format!("{id:?}: {} pages to copy", pages.len()));
                live.begin_copying(id, pages);
            }
            Effect::Room => live.room += 1,
            Effect::Reclaim => live.reclaim = true,
            Effect::ReadOnly(volume, error) => {
                self.count(Class::ReadOnlyService);
                self.note(volume as u64, || {
                    format!("volume {volume} is read-only: {error}")
                });
            }
            Effect::ReadWrite(volume) => {
                self.note(volume as u64, || {
                    format!("volume {volume} takes writes again")
                });
            }
        }
    }
}

/// Pages evicted so far, if every volume is read-only.
fn evicted_when_read_only(core: &Core, volumes: usize) -> Option<u64> {
    (core.read_only_volumes().len() == volumes).then(|| core.counters().evicted)
}

impl Epoch {
    pub fn new(index: Arc<Index>, mark: Serial) -> Epoch {
        Epoch {
            recovered: index.len() as u64,
            unproven: BTreeMap::new(),
            index,
            slots: Vec::new(),
            named: Vec::new(),
            has_written: false,
            pins: BTreeMap::new(),
            described: BTreeMap::new(),
            mark,
            failures: 0,
            evictions: BTreeSet::new(),
        }
    }

    /// The slot of a named namespace.
    pub fn slot(&self, namespace: usize) -> NamespaceSlot {
        assert!(self.named[namespace], "the namespace was not named");
        self.slots[namespace].expect("a named namespace has a slot")
    }

    pub fn run(&self) -> Run {
        self.mark.run()
    }
}

impl Live {
    pub fn new(core: Core, index: Arc<Index>, clients: usize, mark: Serial) -> Live {
        Live {
            core,
            epoch: Epoch::new(index, mark),
            clients: (0..clients).map(|_| None).collect(),
            keeper: Keeper::Idle,
            flights: Vec::new(),
            launched: 0,
            settled: BTreeMap::new(),
            finished: BTreeMap::new(),
            room: 0,
            reclaim: false,
            wake_at: None,
            stopping: false,
            closing: Cut::never(),
        }
    }
}

//! The facts of one seed that outlive a process: the disk, the promises, and the losses that faults
//! excuse.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::{Deref, Range};
use std::sync::{Arc, Mutex, PoisonError};

use larder_core::index::{Index, NamespaceSlot, Place, SegmentId};
use larder_engine::CodecChoice;
use larder_engine::format::{Fingerprint, Run, SEGMENTS_OFFSET, Serial, StoreId, Superblock};
use larder_sim_runtime::dice::{Dice, mix};
use larder_sim_runtime::medium::{Content, Medium};
use larder_sim_runtime::time::Instant;
use larder_sim_runtime::{Machine, task};
use larder_store::recovery::scan::{Bodies, Spot};

use crate::classes::Tally;
use crate::disk::SimDisk;
use crate::oracle::{Name, Oracle, VersionId};
use crate::secrets::Sealed;
use crate::setup::{BLOCK, COPIES, Setup, blocks_of};
use crate::totals::Totals;

/// The last events of a run, printed if it fails.
pub type Journal = Arc<Mutex<VecDeque<String>>>;

/// A machine whose last events are added to a journal at its end, also by a panic.
pub struct Recorded {
    machine: Machine,
    journal: Option<Journal>,
}

impl Recorded {
    pub fn new(machine: Machine, journal: Option<Journal>) -> Recorded {
        Recorded { machine, journal }
    }
}

impl Deref for Recorded {
    type Target = Machine;

    fn deref(&self) -> &Machine {
        &self.machine
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if let Some(journal) = &self.journal {
            let mut journal = journal.lock().unwrap_or_else(PoisonError::into_inner);
            journal.extend(self.machine.events());
        }
    }
}

const EVENTS_KEPT: usize = 400;

/// A page descriptor that was written in this epoch.
pub struct Described {
    pub name: Name,
    pub version: VersionId,
    pub place: Place,
    pub volume: usize,
    pub block: usize,
    pub content: Content,
}

/// Reads that fail now.
pub struct Outage {
    pub volume: usize,
    pub blocks: Range<usize>,
    pub until: Instant,
    pub errno: i32,
}

/// The state of a run in the present epoch.
pub struct Epoch {
    pub index: Arc<Index>,
    /// By namespace. `None` while this epoch does not know the namespace.
    pub slots: Vec<Option<NamespaceSlot>>,
    /// A write of this epoch has arrived.
    pub has_written: bool,
    pub pins: BTreeMap<SegmentId, u32>,
    pub described: BTreeMap<Serial, Vec<Described>>,
    /// Generations that this epoch has begun.
    pub opened: BTreeSet<Serial>,
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
    /// Evictions and failed puts that its close could not write down.
    pub unwritten: u64,
    /// Versions whose puts failed or were refused.
    pub given_up: BTreeSet<VersionId>,
}

pub struct World {
    pub setup: Setup,
    pub dice: Dice,
    pub disk: Arc<SimDisk>,
    /// The superblocks as the running process knows them. `None` for a lost volume.
    pub superblocks: Vec<Option<Superblock>>,
    /// By volume and copy: the generation of the superblock that is certainly there.
    pub copies: Vec<[Option<u64>; COPIES]>,
    pub store: StoreId,
    /// Of an encrypted store.
    pub sealed: Option<Sealed>,
    pub oracle: Oracle,
    /// Counts all events. Orders reservations and deletions.
    pub clock: u64,
    /// Counts steps.
    pub moment: u64,
    pub next_request: u64,
    pub digest: u64,
    pub calm: bool,
    /// The power fails at this moment.
    pub power_due: Option<u64>,
    /// An opening is in progress.
    pub is_opening: bool,
    /// Reads that fail now.
    pub outage: Option<Outage>,
    /// Reads of this opening have failed, or may have.
    pub has_outage: bool,
    /// Segments whose metadata the device spoiled, in their present generation.
    pub tainted: BTreeSet<SegmentId>,
    /// Segments with a header that was spoiled, or lost by a failed sync, at some time. Their old
    /// generation may come back with the bytes of the new one.
    pub headless: BTreeSet<SegmentId>,
    /// When each version of a page was put, by its first descriptor.
    pub put_times: BTreeMap<Serial, u32>,
    /// A header was lost on its way. It may have been the only record of refused page writes.
    pub unsealed: bool,
    /// Pages with a record of their removal: the version of the last such record, and the time of
    /// its first write.
    pub left: BTreeMap<Name, (Serial, u64)>,
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
    pub losing: Vec<(usize, u64)>,
    /// By volume: the number of syncs that succeeded.
    pub good_syncs: Vec<u64>,
    journal: Option<Journal>,
    pub totals: Totals,
    pub tally: Tally,
}

impl World {
    /// A world with these dice. `salt` makes the bytes of its pages differ from those of other
    /// worlds. With dice for a codec, half of the worlds have a codec. With dice for encryption,
    /// half of them are encrypted.
    pub fn new(
        mut dice: Dice,
        salt: u64,
        mut codec: Option<Dice>,
        mut budget: Option<Dice>,
        mut seal: Option<(Dice, Option<u64>)>,
        journal: Option<Journal>,
    ) -> World {
        let mut setup = Setup::draw(&mut dice);
        if let Some(codec) = &mut codec {
            setup.draw_codec(codec);
            setup.quotas = codec.chance(0.3);
        }
        if let Some(budget) = &mut budget {
            setup.draw_budget(budget);
            setup.draw_lives(budget);
        }
        if let Some((seal, _)) = &mut seal {
            setup.draw_seal(seal);
        }
        if journal.is_some() {
            eprintln!("{setup:?}");
        }
        let store = StoreId::from_bytes([7; 16]);
        let kernel = dice.fork();
        let volumes = setup.volumes.len();
        let seal = seal.filter(|_| setup.sealed);
        let sealed = seal.map(|(dice, differs_from)| Sealed::new(store, dice, differs_from));
        if let Some(sealed) = &sealed {
            sealed.name(&mut setup.namespaces);
        }
        let mut superblocks = setup.superblocks(store);
        for superblock in &mut superblocks {
            superblock.keyring = sealed.as_ref().map_or(0, |sealed| sealed.first.generation);
        }
        let superblocks: Vec<Option<Superblock>> = superblocks.into_iter().map(Some).collect();
        let mut world = World {
            disk: SimDisk::new(&setup.volume_blocks(), kernel, setup.faults.calls),
            copies: vec![[None; COPIES]; superblocks.len()],
            superblocks,
            oracle: Oracle::new(&setup, salt),
            store,
            sealed,
            setup,
            dice,
            clock: 0,
            moment: 0,
            next_request: 0,
            digest: 0,
            calm: false,
            power_due: None,
            is_opening: false,
            outage: None,
            has_outage: false,
            tainted: BTreeSet::new(),
            headless: BTreeSet::new(),
            put_times: BTreeMap::new(),
            unsealed: false,
            left: BTreeMap::new(),
            torn_inside: false,
            shaken: BTreeSet::new(),
            forgotten: BTreeSet::new(),
            recorded: BTreeSet::new(),
            losing: Vec::new(),
            good_syncs: vec![0; volumes],
            journal,
            totals: Totals::default(),
            tally: Tally::default(),
        };
        world.create_superblocks();
        world.create_keyring();
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
            let now = task::elapsed().as_secs_f64() * 1e3;
            journal.push_back(format!("{:6} {now:10.3} ms  {}", self.clock, tell()));
        }
    }

    pub fn fault(&mut self, probability: f64) -> bool {
        !self.calm && self.dice.chance(probability)
    }

    /// The codec of the puts of an opening.
    pub fn draw_codec(&mut self) -> CodecChoice {
        match self.setup.codec {
            Some((choice, share)) if self.dice.chance(share) => choice,
            _ => CodecChoice::Off,
        }
    }

    /// A digest of all events, and their counts.
    pub fn sum_up(&self) -> (u64, Totals, Tally) {
        let volumes = self.disk.volumes();
        let digests = volumes.iter().map(Medium::digest);
        let digest = digests.fold(self.digest, mix);
        let mut tally = self.tally;
        tally.add(&self.disk.kernel().tally);
        tally.end_seed();
        (digest, self.totals, tally)
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

    /// The copy of the superblock in this block of a volume, if it is one.
    pub fn superblock_at(&self, volume: usize, block: usize) -> Option<usize> {
        let blocks = self.disk.volumes()[volume].blocks();
        blocks_of(blocks).iter().position(|at| *at == block)
    }

    /// Whether a block of a volume lies in a segment.
    pub fn is_in_segment(&self, volume: usize, block: usize) -> bool {
        let end = self.segment_first_block(self.setup.volumes[volume]);
        (self.segment_first_block(0)..end).contains(&block)
    }

    /// The segment of a block, and the block's number in it. The block must lie in a segment.
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
            bodies: Bodies::with(self.keys()),
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

    /// Blocks of a version that is stored at this place.
    pub fn blocks_at(&self, version: VersionId, place: Place) -> usize {
        (self.oracle.version(version).blocks - place.saved) as usize
    }

    pub fn is_intact(&self, version: VersionId, place: Place) -> bool {
        let (volume, start) = self.address(place);
        let count = self.blocks_at(version, place);
        let volumes = self.disk.volumes();
        let blocks: Vec<Content> = (start..start + count)
            .map(|at| volumes[volume].visible(at).clone())
            .collect();
        self.oracle.is_payload(version, &blocks)
    }

    // ---- pages

    /// A random run of consecutive pages of a chain of one namespace, head first.
    pub fn draw_names(&mut self, batch: usize) -> (usize, Vec<Name>) {
        let mut at = Some(Name(self.dice.below(self.oracle.names())));
        let namespace = self
            .oracle
            .name(Name(at.map_or(0, |name| name.0)))
            .namespace;
        let mut names = Vec::new();
        while let Some(name) = at {
            names.push(name);
            at = self.oracle.name(name).parent;
        }
        names.reverse();
        // Mostly from the head, as a prefill does. Sometimes from any page.
        let from = if self.dice.chance(0.8) {
            0
        } else {
            self.dice.below(names.len())
        };
        let to = names.len().min(from + batch.max(1));
        (namespace, names[from..to].to_vec())
    }

    /// The version in the index, and the segment of the page.
    pub fn current(&self, epoch: &Epoch, name: Name) -> Option<(VersionId, SegmentId)> {
        let info = self.oracle.name(name);
        let found = epoch
            .index
            .locate(epoch.slots[info.namespace]?, &info.key)?;
        let version = self.oracle.find(name, found.proof.checksum)?;
        Some((version, found.place.segment))
    }

    /// A call has made a version durable. A loss of bytes before the last good sync counts no more.
    pub fn made_durable(&mut self, version: VersionId) {
        let version = self.oracle.version_mut(version);
        let is_later = |(volume, syncs): &(usize, u64)| self.good_syncs[*volume] <= *syncs;
        version.dropped = version.dropped.filter(is_later);
    }

    pub fn new_request(&mut self) -> u64 {
        self.next_request += 1;
        self.next_request
    }
}

impl Epoch {
    pub fn new(index: Arc<Index>, mark: Serial) -> Epoch {
        Epoch {
            recovered: index.len() as u64,
            unproven: BTreeMap::new(),
            index,
            slots: Vec::new(),
            has_written: false,
            pins: BTreeMap::new(),
            described: BTreeMap::new(),
            opened: BTreeSet::new(),
            mark,
            failures: 0,
            evictions: BTreeSet::new(),
            unwritten: 0,
            given_up: BTreeSet::new(),
        }
    }

    pub fn run(&self) -> Run {
        self.mark.run()
    }
}

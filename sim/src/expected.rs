//! The pages that the next recovery must find, after a crash or a clean close; and the damage that
//! a crash does to the device.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};

use larder_core::core::Core;
use larder_core::index::{Place, SegmentId};
use larder_engine::format::{
    Body, DescriptorBlock, HEADER_BLOCKS, Record, SegmentHeader, SegmentState, Serial,
};
use larder_sim_runtime::medium::{Arrival, Content, Medium};

use crate::classes::Class;
use crate::oracle::{Name, Version, VersionId};
use crate::world::{Epoch, World};

/// The state that the next recovery must find.
#[derive(Default)]
pub struct Expected {
    /// By name: whether the page must survive a power loss too.
    pub names: BTreeMap<Name, bool>,
    /// The versions of these pages, and their locations.
    pub pages: BTreeMap<Name, (VersionId, Place)>,
    /// After a clean close: recovery must find every page in `all`.
    pub exactly: bool,
    pub all: BTreeSet<Name>,
    /// Pages that were not proven at that close.
    pub unproven: BTreeSet<Name>,
    /// Versions whose puts failed or were refused in the epoch of that close.
    pub given_up: BTreeSet<VersionId>,
}

/// The whole structures of a segment; the descriptor blocks with their indexes.
struct Structures {
    headers: Vec<SegmentHeader>,
    blocks: Vec<(u32, DescriptorBlock)>,
}

/// The metadata of a segment, as reads see it and as it survives a power loss.
pub struct Metadata {
    visible: Structures,
    durable: Structures,
}

/// The metadata of all segments, by number: parsed once for all pages that ask at one moment.
type Parsed = OnceCell<Vec<Metadata>>;

impl Metadata {
    fn headers(&self) -> impl Iterator<Item = &SegmentHeader> {
        self.visible.headers.iter().chain(&self.durable.headers)
    }

    /// The present generation, if there is one.
    fn generation(&self) -> Option<Serial> {
        let blocks = self.visible.blocks.iter();
        let blocks = blocks.map(|(_, block)| block.header.sequence);
        blocks
            .chain(self.headers().map(|header| header.sequence))
            .max()
    }

    /// Whether a header or the first descriptor block states the present generation durably. Else
    /// no recovery finds it after a power loss.
    pub fn is_stated(&self) -> bool {
        let headers = self.durable.headers.iter().map(|header| header.sequence);
        let first = self.durable.blocks.iter().filter(|(index, _)| *index == 0);
        let mut stated = headers.chain(first.map(|(_, block)| block.header.sequence));
        stated.any(|stated| Some(stated) == self.generation())
    }

    /// The records in its durable descriptor blocks, of any generation.
    fn durable_records(&self) -> impl Iterator<Item = &Record> {
        let bodies = self.durable.blocks.iter().map(|(_, block)| &block.body);
        bodies.flat_map(|body| match body {
            Body::Records(records) => &records[..],
            Body::Namespace(_) => &[],
        })
    }
}

impl World {
    /// The state that a recovery after this moment must find.
    pub fn expect(&self, live: &Epoch, power: bool) -> Expected {
        let mut expected = Expected::default();
        let parsed = Parsed::new();
        let pages = self.snapshot(&live.index, &self.namespaces_by_slot(live));
        for (name, (version, place, _)) in pages {
            let durable = self.is_durable(version, &parsed);
            if !self.is_excused(name, version, place, &parsed) && (durable || !power) {
                expected.names.insert(name, durable);
                expected.pages.insert(name, (version, place));
            }
        }
        expected
    }

    /// Whether a fault touched a page, so that it may be gone.
    fn is_excused(&self, name: Name, version: VersionId, place: Place, parsed: &Parsed) -> bool {
        let known = self.oracle.version(version);
        // Until this version itself is durable, an older version may come back, or one between the
        // two.
        let older_is_bad = known.in_place_of.is_some_and(|(older, segment)| {
            self.has_bad_bytes(self.oracle.version(older))
                || self.has_bad_successor(older)
                || self.tainted.contains(&segment)
        });
        // A crash may undo a removal that was not durable. Then the page is back, and is not
        // promised: the record of the removal may count again after the next crash.
        let left = self.left.get(&name);
        left.is_some_and(|(_, at)| known.begun_at <= *at)
            || self.has_bad_bytes(known)
            || older_is_bad
            || known.torn
            || self.has_bad_successor(version)
            || self.tainted.contains(&place.segment)
            || !self.is_durable(version, parsed)
                && (known.dropped.is_some() || self.shaken.contains(&place.segment))
    }

    /// Whether a version must survive a power loss: itself, or an older one in its place.
    fn is_durable(&self, version: VersionId, parsed: &Parsed) -> bool {
        let known = self.oracle.version(version);
        let older = known.in_place_of.map(|(older, _)| older);
        known.durable
            && !older.is_some_and(|older| self.is_removed(older, parsed))
            && !self.are_spoiled(&[version, older.unwrap_or(version)], parsed)
    }

    /// Whether the device durably keeps both a version and a record that removes it. A recovery
    /// that cannot read the record brings the version back. The next one may read it.
    fn is_removed(&self, version: VersionId, parsed: &Parsed) -> bool {
        let known = self.oracle.version(version);
        let all = self.metadata(parsed);
        let records = || all.iter().flat_map(Metadata::durable_records);
        let copies = records().filter_map(|record| match record {
            Record::Page(page) if known.has_checksum(page.checksum) => Some(page.birth),
            _ => None,
        });
        copies.max().is_some_and(|birth| {
            let later = records().filter(|record| record.birth() > birth);
            later
                .flat_map(|record| self.removed_by(record))
                .any(|name| name == known.name)
        })
    }

    /// Whether these versions have durable copies, and all of them are in generations that the
    /// device spoiled. A copy that was made since is lost with the power until it is synced.
    ///
    /// A failed sync of an earlier epoch may have dropped the blocks that state a generation, while
    /// reads returned them. This epoch cannot know. It may have freed older copies of its pages.
    fn are_spoiled(&self, versions: &[VersionId], parsed: &Parsed) -> bool {
        if self.tainted.is_empty() && self.forgotten.is_empty() {
            return false;
        }
        let is_in = |&(segment, metadata): &(SegmentId, &Metadata)| {
            let mut versions = versions.iter();
            versions.any(|id| self.is_kept_in(*id, segment, metadata))
        };
        let is_spoiled = |(segment, metadata): &(SegmentId, &Metadata)| {
            self.tainted.contains(segment)
                || self.forgotten.contains(segment) && !metadata.is_stated()
        };
        let all = (0..).map(SegmentId).zip(self.metadata(parsed));
        let (spoiled, sound): (Vec<_>, Vec<_>) = all.partition(is_spoiled);
        spoiled.iter().any(is_in) && !sound.iter().any(is_in)
    }

    fn metadata<'a>(&self, parsed: &'a Parsed) -> &'a [Metadata] {
        let all = || (0..self.setup.volumes.iter().sum()).map(SegmentId);
        parsed.get_or_init(|| all().map(|segment| self.metadata_of(segment)).collect())
    }

    /// The whole metadata of a segment, as reads see it and as it survives a power loss.
    pub fn metadata_of(&self, segment: SegmentId) -> Metadata {
        Metadata {
            visible: self.structures_of(segment, Medium::visible),
            durable: self.structures_of(segment, Medium::durable),
        }
    }

    fn structures_of(
        &self,
        segment: SegmentId,
        see: impl Fn(&Medium, usize) -> &Content,
    ) -> Structures {
        let (volume, number) = self.volume_of(segment);
        let (spot, first) = (self.spot(volume, number), self.segment_first_block(number));
        let begin = first + HEADER_BLOCKS as usize;
        let end = first + self.setup.segment_blocks as usize;
        let volumes = self.disk.volumes();
        let see = |at: usize| match see(&volumes[volume], at) {
            Content::Bytes(bytes) => Some(bytes.clone()),
            Content::Zero | Content::Data(_) | Content::Coded(..) => None,
        };
        let headers = (first..begin).filter_map(|at| spot.parse_headers(&see(at)?[..])[0].ok());
        let blocks = (0..).zip((begin..end).rev()).filter_map(|(index, at)| {
            let block = spot.parse_block(index, &see(at)?[..]).ok()?;
            Some((index, block))
        });
        Structures {
            headers: headers.collect(),
            blocks: blocks.collect(),
        }
    }

    /// Whether the present generation of a segment has a durable copy of a version: its bytes and
    /// its descriptor. A freed generation has none.
    fn is_kept_in(&self, version: VersionId, segment: SegmentId, metadata: &Metadata) -> bool {
        let (volume, number) = self.volume_of(segment);
        let first = self.segment_first_block(number);
        let generation = metadata.generation();
        let is_free = |header: &SegmentHeader| {
            header.state == SegmentState::Free && Some(header.sequence) == generation
        };
        if metadata.headers().any(is_free) {
            return false;
        }
        let known = self.oracle.version(version);
        let volumes = self.disk.volumes();
        let is_kept = |record: &Record| match record {
            Record::Page(page) if known.has_checksum(page.checksum) => {
                let start = first + page.start as usize;
                let payload =
                    (start..start + page.stored as usize).map(|at| volumes[volume].durable(at));
                let payload: Vec<Content> = payload.cloned().collect();
                self.oracle.is_payload(version, &payload)
            }
            _ => false,
        };
        let own = metadata.durable.blocks.iter().map(|(_, block)| block);
        own.filter(|block| Some(block.header.sequence) == generation)
            .any(|block| match &block.body {
                Body::Records(records) => records.iter().any(is_kept),
                Body::Namespace(_) => false,
            })
    }

    /// The page, or a copy of it, has wrong bytes somewhere, and recovery may find these: the
    /// device spoiled the bytes, or it refused a write and no record of the failure is left.
    fn has_bad_bytes(&self, version: &Version) -> bool {
        version.rotten || version.refused && self.unsealed
    }

    /// A later version of the page with wrong bytes may come back in its place.
    fn has_bad_successor(&self, version: VersionId) -> bool {
        let is_bad = |later: &Version| self.has_bad_bytes(later);
        self.oracle.has_successor(version, is_bad)
    }

    /// Removes pages that faults have excused since the expectation was computed.
    pub fn expect_less(&self, expected: &mut Expected) {
        let pages = &expected.pages;
        let parsed = Parsed::new();
        expected.names.retain(|name, _| {
            let (version, place) = pages[name];
            !self.is_excused(*name, version, place, &parsed)
        });
    }

    /// Writes the part of a write in flight that a crash leaves.
    pub fn tear(&mut self, volume: usize, start: usize, blocks: &[Content], arrival: &Arrival) {
        let is_metadata = blocks
            .iter()
            .any(|block| matches!(block, Content::Bytes(_)));
        self.torn_inside |= is_metadata && matches!(arrival, Arrival::Prefix(_, 1..));
        self.disk.volumes()[volume].write_part(start, blocks, arrival);
    }

    /// The power fails on every volume.
    pub fn lose_power(&mut self) {
        let mut dice = self.dice.fork();
        let mut kept_some = false;
        for volume in self.disk.volumes().iter_mut() {
            kept_some |= volume.lose_power(&mut dice);
        }
        if kept_some {
            self.count(Class::PowerKeptSome);
        }
    }

    /// Whether a crash at a free moment is a power loss.
    pub fn draws_power(&mut self) -> bool {
        let (kill, power) = (self.setup.faults.kill, self.setup.faults.power);
        power > 0.0 && (kill == 0.0 || self.dice.chance(0.5))
    }

    pub fn expect_after_close(&mut self, live: &Epoch) -> Expected {
        let mut expected = self.expect(live, false);
        let faults = &self.setup.faults;
        expected.exactly = !faults.spoils() && !faults.misleads();
        // A fault may spoil the records of failed puts, and a full store has no room for them.
        if live.unwritten == 0 && expected.exactly {
            expected.given_up.clone_from(&live.given_up);
        }
        let pages = self.snapshot(&live.index, &self.namespaces_by_slot(live));
        expected.all = pages.keys().copied().collect();
        for name in expected.names.keys().copied().collect::<Vec<_>>() {
            if let Some((version, _)) = self.current(live, name) {
                self.oracle.version_mut(version).durable = true;
            }
            expected.names.insert(name, true);
        }
        // Unproven pages that were not written since stay unproven: a verified read is not recorded
        // on disk.
        expected.unproven = pages
            .into_iter()
            .filter(|(name, (_, place, _))| live.unproven.get(name) == Some(place))
            .map(|(name, _)| name)
            .collect();
        expected
    }

    /// At a clean close with a spare segment, every eviction of the epoch is recorded.
    pub fn check_evictions(&self, live: &Epoch, core: &Core) {
        let (evicted, written) = (core.counters().store.evicted, live.evictions.len() as u64);
        let had_room = core.space_view().free_segments > 0;
        assert!(
            written >= evicted || !had_room || self.setup.faults.fail_writes(),
            "{evicted} pages were evicted, and {written} evictions recorded"
        );
    }
}

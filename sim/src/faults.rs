//! Device faults, and the losses that they excuse.
//!
//! A fault excuses only the content that it touched. Page data: its page. A descriptor block: every
//! page recorded in it, and the deletions. One copy of a header: nothing, if the other copy is the
//! same; both: the segment. One superblock: nothing; both: the volume.

use std::ops::Range;

use larder_core::index::SegmentId;
use larder_disk::DiskError;
use larder_engine::format::{Body, DescriptorBlock, HEADER_BLOCKS, Record, SegmentHeader};
use larder_sim_runtime::medium::{Arrival, Block, Content, Left, Medium};

use crate::classes::Class;
use crate::disk::Fate;
use crate::kernel::{Answer, Odds};
use crate::oracle::{Name, VersionId};
use crate::setup::{COPIES, Faults, blocks_of};
use crate::world::World;

const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const EDQUOT: i32 = 122;

/// Number of times that a reader tries to read a block. A block that fails fewer times never
/// appears to fail.
const READ_TRIES: usize = 3;

/// Tries to find a block of the kind that a fault is to hit.
const LOOKS: usize = 60;

/// Probability at each step that a volume without writes takes writes again.
const REVIVES: f64 = 0.01;

/// Highest probability that a sync of an opening fails.
const SYNC_ERROR_OPENING_MAX: f64 = 0.02;

/// Probability that the power fails soon after a failed sync or an erasure, within this many steps.
const POWER_SOON: f64 = 0.3;
const POWER_SOON_STEPS_MAX: u64 = 60;

/// The kind of content of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Superblock(usize),
    Header(SegmentId),
    Descriptor(SegmentId),
    Payload,
    /// Never written.
    Nothing,
}

impl World {
    pub fn count(&mut self, class: Class) {
        self.tally.count(class);
    }

    /// Draws whether a fault of this class happens now, and counts it.
    pub fn strikes(&mut self, class: Class, probability: f64) -> bool {
        let strikes = self.fault(probability);
        if strikes {
            self.count(class);
        }
        strikes
    }

    /// Ends all faults of the run.
    pub fn calm_down(&mut self) {
        self.calm = true;
        self.disk.kernel().odds = Odds::default();
        self.revive();
    }

    /// Draws the part of an interrupted write that arrives.
    pub fn draw_tear(&mut self, blocks: usize) -> Arrival {
        let arrival = Arrival::draw(&mut self.dice, blocks);
        if arrival.is_torn() {
            match arrival {
                Arrival::Prefix(_, 0) => self.count(Class::TornPrefix),
                Arrival::Prefix(..) => self.count(Class::TornInside),
                _ => self.count(Class::TornSubset),
            }
        }
        arrival
    }

    /// A write arrives: done, failed in part, lost, or at a wrong address. Returns the answer of
    /// the device. `error` gives the probability that such a write fails, and the class of the
    /// failure.
    pub fn write(
        &mut self,
        volume: usize,
        start: usize,
        blocks: &[Content],
        error: impl Fn(&Faults) -> (f64, Class),
    ) -> Result<(), DiskError> {
        let fate = self.draw_fate(volume, start, blocks, error);
        self.disk.write(volume, start, blocks, &fate)
    }

    fn draw_fate(
        &mut self,
        volume: usize,
        start: usize,
        blocks: &[Content],
        error: impl Fn(&Faults) -> (f64, Class),
    ) -> Fate {
        let (error, class) = error(&self.setup.faults);
        let (no_space, no_progress) = (self.setup.faults.no_space, self.setup.faults.no_progress);
        let is_dead = self.disk.volumes()[volume].left != Left::Everything;
        let answer = if is_dead || self.strikes(class, error) {
            Answer::Error(EIO)
        } else if self.strikes(Class::NoSpace, no_space) {
            Answer::Error(self.dice.pick(&[ENOSPC, EDQUOT]))
        } else if self.strikes(Class::NoProgress, no_progress) {
            Answer::NoProgress
        } else {
            Answer::Done
        };
        if answer != Answer::Done {
            let arrival = self.draw_tear(blocks.len());
            if arrival.is_torn() {
                self.count(Class::TornByError);
            }
            for block in blocks {
                if let Some(version) = self.oracle.owner(block) {
                    self.oracle.version_mut(version).refused = true;
                }
            }
            return Fate::Fails(answer, arrival);
        }
        if self.strikes(Class::LostWrite, self.setup.faults.lost_write) {
            self.note(start as u64, || {
                format!("the write at {volume}:{start} is lost")
            });
            self.excuse_unwritten(volume, start, blocks);
            return Fate::Lost;
        }
        if self.strikes(Class::MisdirectedWrite, self.setup.faults.misdirected_write) {
            let to = self
                .dice
                .below(self.disk.volumes()[volume].blocks() - blocks.len());
            self.note(to as u64, || {
                format!("the write at {volume}:{start} lands at {to}")
            });
            self.excuse_unwritten(volume, start, blocks);
            let victims: Vec<Content> = (to..to + blocks.len())
                .map(|at| self.disk.volumes()[volume].visible(at).clone())
                .collect();
            self.excuse(volume, to, &victims);
            return Fate::Elsewhere(to);
        }
        if self.setup.faults.lost_write + self.setup.faults.misdirected_write > 0.0 {
            for (block, at) in blocks.iter().zip(start..) {
                self.excuse_unknown_generation(volume, at, block);
            }
        }
        Fate::Done
    }

    /// The address that a read of page data really reads, and whether the read may fail: sometimes
    /// a wrong address.
    pub fn read_from(&mut self, volume: usize, start: usize, count: usize) -> (bool, usize) {
        if self.strikes(Class::MisdirectedRead, self.setup.faults.misdirected_read) {
            let last = self.disk.volumes()[volume].blocks() - count;
            (true, self.dice.below(last))
        } else {
            (self.disk.volumes()[volume].left == Left::Nothing, start)
        }
    }

    /// The probability that a sync fails. An opening makes several, and ends with the first that
    /// fails.
    fn sync_error(&self) -> f64 {
        let probability = self.setup.faults.sync_error;
        match self.is_opening {
            true => probability.min(SYNC_ERROR_OPENING_MAX),
            false => probability,
        }
    }

    /// A sync of a volume begins. Returns the number of the first write that it does not cover.
    /// Returns `None` when the others are lost already: the failure is reported later.
    pub fn begin_sync(&mut self, volume: usize) -> Option<u64> {
        let covers = self.disk.volumes()[volume].next();
        if self.strikes(Class::SyncLostBefore, self.sync_error()) {
            self.losing.push((volume, covers));
            return None;
        }
        Some(covers)
    }

    /// Syncs that have begun lose the writes that they cover. This happens after the answers of the
    /// same step were processed: the loss does not concern them.
    pub fn lose_begun(&mut self) {
        for (volume, covers) in std::mem::take(&mut self.losing) {
            self.fail_sync(volume, 0..covers);
        }
    }

    /// A sync of the writes before `covers` of a volume ends. Returns whether the device
    /// reports success.
    pub fn sync(&mut self, volume: usize, covers: Option<u64>) -> bool {
        self.lose_begun();
        let is_dead = matches!(
            self.disk.volumes()[volume].left,
            Left::Reads | Left::Nothing
        );
        let fails =
            covers.is_none() || is_dead || self.strikes(Class::SyncError, self.sync_error());
        let error = fails.then(|| self.dice.pick(&[EIO, ENOSPC, EDQUOT]));
        let good = self.disk.kernel().sync(error).is_ok();
        assert_eq!(
            good, !fails,
            "the result of a sync differs from the kernel's answer"
        );
        if good {
            self.disk.volumes()[volume].synced(covers.unwrap_or(0));
            self.good_syncs[volume] += 1;
            return true;
        }
        // Of the writes that were answered since it began, it may lose the first ones.
        let covers = covers.unwrap_or(0);
        let later = self.disk.volumes()[volume].unsynced_from(covers);
        let more = match self.dice.chance(0.5) {
            true => self.dice.below(later.len() + 1),
            false => 0,
        };
        if more > 0 {
            self.count(Class::SyncLostLater);
        }
        let end = later[..more].last().map_or(covers, |last| last + 1);
        self.fail_sync(volume, 0..end);
        false
    }

    /// A failed sync loses the writes since `from`, all of them or in part.
    pub fn lose_written(&mut self, volume: usize, from: u64) {
        let end = self.disk.volumes()[volume].next();
        self.fail_sync(volume, from..end);
    }

    /// After a failed sync, and after an erasure, the power often fails soon: before all that was
    /// lost, or was not made durable, is written again.
    pub fn draw_power_soon(&mut self) {
        if self.setup.faults.power > 0.0 && self.fault(POWER_SOON) {
            let steps = self.dice.between(0, POWER_SOON_STEPS_MAX);
            self.power_due = Some(self.moment + steps);
        }
    }

    fn fail_sync(&mut self, volume: usize, lost: Range<u64>) {
        let mut dice = self.dice.fork();
        let keep = dice.pick(&[0.0, 0.5, 1.0]);
        let stays = dice.pick(&[0.0, 0.5, 1.0]);
        let dropped = self.disk.volumes()[volume].sync_failed(lost, &mut dice, keep, stays);
        if !dropped.is_empty() {
            self.count(Class::SyncDropped);
        }
        for (at, block) in dropped {
            if matches!(block, Content::Bytes(_)) && self.is_in_segment(volume, at) {
                let (segment, ..) = self.locate_block(volume, at);
                self.shaken.insert(segment);
            }
            let moment = Some((volume, self.good_syncs[volume]));
            if let Some(version) = self.oracle.owner(&block) {
                self.oracle.version_mut(version).dropped = moment;
            }
            for record in self.records_of(volume, at, &block) {
                if let Some(name) = self.deleted_by(&record) {
                    self.oracle.deletion_dropped(name);
                }
            }
            for version in self.pages_of(volume, at, &block) {
                self.oracle.version_mut(version).dropped = moment;
            }
        }
    }

    // ---- losses that a fault excuses

    /// The address of a block decides its kind. Page data at the address of a descriptor does not
    /// count as a descriptor.
    fn kind_of(&self, volume: usize, at: usize) -> Kind {
        if !self.is_in_segment(volume, at) {
            let copy = self.superblock_at(volume, at);
            return copy.map_or(Kind::Nothing, Kind::Superblock);
        }
        let (segment, _, within) = self.locate_block(volume, at);
        if within < HEADER_BLOCKS {
            return Kind::Header(segment);
        }
        match self.disk.volumes()[volume].visible(at) {
            Content::Zero => Kind::Nothing,
            Content::Data(_) | Content::Coded(..) => Kind::Payload,
            Content::Bytes(_) => Kind::Descriptor(segment),
        }
    }

    /// These blocks are not written.
    fn excuse_unwritten(&mut self, volume: usize, start: usize, blocks: &[Content]) {
        self.unsealed |= matches!(self.kind_of(volume, start), Kind::Header(_));
        self.excuse(volume, start, blocks);
    }

    /// These blocks lose their content, or do not receive it.
    fn excuse(&mut self, volume: usize, start: usize, blocks: &[Content]) {
        // If both copies of a header are lost together, nothing is left to compare with.
        let headers = (start..start + blocks.len())
            .filter(|at| matches!(self.kind_of(volume, *at), Kind::Header(_)))
            .count();
        for (block, at) in blocks.iter().zip(start..) {
            match self.kind_of(volume, at) {
                Kind::Superblock(copy) => self.copies[volume][copy] = None,
                Kind::Header(segment) => {
                    // It may have been the copy that states `Free`.
                    self.forgotten.insert(segment);
                    self.excuse_header(segment, volume, at, headers > 1);
                }
                _ => self.excuse_block(volume, at, block),
            }
        }
    }

    fn excuse_block(&mut self, volume: usize, at: usize, block: &Content) {
        match block {
            Content::Zero => {}
            Content::Data(_) | Content::Coded(..) => {
                if let Some(version) = self.oracle.owner(block) {
                    self.oracle.version_mut(version).rotten = true;
                }
            }
            Content::Bytes(bytes) => {
                self.excuse_life(volume, at, bytes);
                for record in self.records_of(volume, at, block) {
                    self.spoil_deletion(&record);
                }
                for version in self.pages_of(volume, at, block) {
                    self.oracle.version_mut(version).rotten = true;
                }
            }
        }
    }

    /// The first block of a segment states its generation as long as the headers do not state it
    /// durably.
    fn excuse_life(&mut self, volume: usize, at: usize, bytes: &Block) {
        if at < self.segment_first_block(0) {
            return;
        }
        let (segment, number, within) = self.locate_block(volume, at);
        let Ok(block) = self.check_descriptor(bytes) else {
            return;
        };
        if within + 1 < self.setup.segment_blocks {
            return;
        }
        let life = block.identity().sequence;
        let first = self.segment_first_block(number);
        let is_told = (first..first + HEADER_BLOCKS as usize).all(|at| {
            let disk = &self.disk.volumes()[volume];
            let is_durable = disk.durable(at) == disk.visible(at) && !disk.is_unreadable(at);
            let Content::Bytes(bytes) = disk.durable(at) else {
                return false;
            };
            let header = SegmentHeader::check(&bytes[..]);
            is_durable && header.is_ok_and(|header| header.identity().sequence >= life)
        });
        if !is_told {
            self.tainted.insert(segment);
            self.headless.insert(segment);
            // Deletions that were written behind it are lost with it.
            self.spoil_deletions_in(segment);
        }
    }

    fn spoil_deletions_in(&mut self, segment: SegmentId) {
        let (volume, number) = self.volume_of(segment);
        let first = self.segment_first_block(number);
        for at in first..first + self.setup.segment_blocks as usize {
            let block = self.disk.volumes()[volume].visible(at).clone();
            for record in self.records_of(volume, at, &block) {
                self.spoil_deletion(&record);
            }
        }
    }

    /// A block arrives in a generation that neither a header nor the first block states: both were
    /// lost before. No recovery finds the block.
    fn excuse_unknown_generation(&mut self, volume: usize, at: usize, content: &Content) {
        let Content::Bytes(bytes) = content else {
            return;
        };
        let Ok(block) = self.check_descriptor(bytes) else {
            return;
        };
        let sequence = block.identity().sequence;
        let (_, number, _) = self.locate_block(volume, at);
        let first = self.segment_first_block(number);
        let states_it = |at: usize| {
            let volumes = self.disk.volumes();
            let Content::Bytes(bytes) = volumes[volume].visible(at) else {
                return false;
            };
            let header = SegmentHeader::check(&bytes[..]).map(|header| header.identity().sequence);
            let block = || {
                let block = self.check_descriptor(bytes);
                block.map(|block| block.identity().sequence)
            };
            header
                .or_else(|_| block())
                .is_ok_and(|known| known >= sequence)
        };
        let last = first + self.setup.segment_blocks as usize - 1;
        if at == last || [first, first + 1, last].into_iter().any(states_it) {
            return;
        }
        for record in self.records_of(volume, at, content) {
            self.spoil_deletion(&record);
        }
    }

    /// A record is lost: pages that it deletes may come back.
    pub fn spoil_deletion(&mut self, record: &Record) {
        if let Some(name) = self.deleted_by(record) {
            self.oracle.deletion_spoiled(name);
        }
    }

    /// One copy of a header is bad. That costs nothing as long as the other copy is the same and
    /// durable.
    fn excuse_header(&mut self, segment: SegmentId, volume: usize, at: usize, both: bool) {
        let (_, _, within) = self.locate_block(volume, at);
        let other = if within == 0 { at + 1 } else { at - 1 };
        let (is_whole, is_same) = {
            let disk = &self.disk.volumes()[volume];
            let twin = disk.visible(other);
            let is_whole = matches!(
                twin,
                Content::Bytes(bytes) if SegmentHeader::check(&bytes[..]).is_ok()
            ) && !disk.is_unreadable(other);
            let is_same = disk.durable(other) == twin && disk.visible(at) == twin;
            (is_whole && !both, is_same)
        };
        if is_whole && is_same {
            return;
        }
        // The segment's old generation may come back, with the bytes of the new one, and with pages
        // deleted since.
        self.headless.insert(segment);
        if !is_whole {
            self.tainted.insert(segment);
            // A failed sync may have dropped the first block and the first header before.
            if !self.metadata_of(segment).is_stated() {
                self.spoil_deletions_in(segment);
            }
        }
    }

    /// The name that a record deletes. The inner `None` stands for a whole namespace.
    fn deleted_by(&self, record: &Record) -> Option<Option<Name>> {
        match record {
            Record::Page(_) | Record::Evict { .. } | Record::Void { .. } | Record::Pin { .. } => {
                None
            }
            Record::Clear { .. } => Some(None),
            Record::Delete { namespace, key, .. } => {
                let namespace = self.namespace_of(*namespace);
                Some(self.oracle.by_key(namespace, key.prefix().as_bytes()))
            }
        }
    }

    /// The pages that a descriptor block describes.
    fn pages_of(&self, volume: usize, at: usize, block: &Content) -> Vec<VersionId> {
        self.records_of(volume, at, block)
            .into_iter()
            .filter_map(|record| match record {
                Record::Page(page) => {
                    let namespace = self.namespace_of(page.namespace);
                    let name = self
                        .oracle
                        .by_key(namespace, page.key.prefix().as_bytes())?;
                    self.oracle.find(name, page.checksum)
                }
                _ => None,
            })
            .collect()
    }

    /// The records of a descriptor block. None of a block of another kind.
    pub fn records_of(&self, volume: usize, at: usize, block: &Content) -> Vec<Record> {
        let Content::Bytes(bytes) = block else {
            return Vec::new();
        };
        if at < self.segment_first_block(0) {
            return Vec::new();
        }
        let (_, number, within) = self.locate_block(volume, at);
        let index = self.setup.segment_blocks - 1 - within;
        match self.spot(volume, number).parse_block(index, &bytes[..]) {
            Ok(DescriptorBlock {
                body: Body::Records(records),
                ..
            }) => records,
            _ => Vec::new(),
        }
    }

    // ---- volumes that take no writes

    /// A volume may stop taking writes, or take them again.
    pub fn draw_death(&mut self) {
        let is_dead = |volume: &Medium| volume.left != Left::Everything;
        if self.disk.volumes().iter().any(is_dead) {
            if self.dice.chance(REVIVES) {
                self.revive();
            }
        } else if self.strikes(Class::VolumeDies, self.setup.faults.volume_dies) {
            let volume = self.dice.below(self.setup.volumes.len());
            let lefts = [Left::ReadsAndSyncs, Left::Reads, Left::Nothing];
            let left = self.dice.pick(&lefts);
            self.note(volume as u64, || {
                format!("volume {volume} still does: {left:?}")
            });
            self.disk.volumes()[volume].left = left;
        }
    }

    pub fn revive(&mut self) {
        for volume in self.disk.volumes().iter_mut() {
            volume.left = Left::Everything;
        }
    }

    // ---- faults at rest

    /// The device may rot stored blocks, or fail to read them.
    pub fn spoil(&mut self) {
        for (class, probability) in self.setup.faults.at_rest.each() {
            if self.fault(probability) {
                self.spoil_one(class);
            }
        }
        if self.fault(self.setup.faults.miscodes) {
            self.miscode();
        }
    }

    /// A page proves to have been encoded wrongly: its bytes have the checksum that was stated.
    fn miscode(&mut self) {
        let volume = self.dice.below(self.setup.volumes.len());
        let Some((at, _)) = self.find_victim(Class::Miscoded, volume) else {
            return;
        };
        let content = self.disk.volumes()[volume].visible(at).clone();
        if self.setup.sealed {
            self.forge(volume, at, &content);
            return;
        }
        if let Some((version, wrong)) = self.oracle.miscode(&content) {
            self.count(Class::Miscoded);
            self.note(at as u64, || {
                format!("{version:?} is miscoded at {volume}:{at}")
            });
            self.oracle.version_mut(version).rotten = true;
            self.disk.volumes()[volume].spoil(at, wrong);
        }
    }

    fn spoil_one(&mut self, class: Class) {
        let volume = self.dice.below(self.setup.volumes.len());
        let Some((at, kind)) = self.find_victim(class, volume) else {
            return;
        };
        let blocks = match (class, kind) {
            // Both copies at the start, or all.
            (Class::RotSuperblocks, _) => {
                let count = COPIES - self.dice.below(2);
                blocks_of(self.disk.volumes()[volume].blocks())[..count].to_vec()
            }
            (Class::RotHeaders, _) => {
                let (_, _, within) = self.locate_block(volume, at);
                let first = at - within as usize;
                vec![first, first + 1]
            }
            _ => vec![at],
        };
        let tries = match class {
            Class::Unreadable => Some(None),
            Class::ReadErrors => Some(Some(1 + self.dice.below(2 * READ_TRIES) as u32)),
            _ => None,
        };
        self.count(class);
        self.note(at as u64, || {
            format!("{class:?} at {volume}:{at}, {kind:?}, for {tries:?}")
        });
        // An error that ends before a reader gives up has no effect.
        let is_seen = tries
            .flatten()
            .is_none_or(|tries| tries as usize >= READ_TRIES);
        if is_seen && blocks.len() == 2 && class == Class::RotHeaders {
            let contents: Vec<Content> = blocks
                .iter()
                .map(|at| self.disk.volumes()[volume].visible(*at).clone())
                .collect();
            self.excuse(volume, blocks[0], &contents);
        } else if is_seen {
            for &at in &blocks {
                let content = self.disk.volumes()[volume].visible(at).clone();
                self.excuse(volume, at, &[content]);
            }
        }
        let mut volumes = self.disk.volumes();
        for at in blocks {
            match tries {
                Some(tries) => volumes[volume].make_unreadable(at, tries),
                None => volumes[volume].rot(at),
            }
        }
    }

    /// A block of the kind that a class of faults hits.
    fn find_victim(&mut self, class: Class, volume: usize) -> Option<(usize, Kind)> {
        let first = self.segment_first_block(0);
        let end = self.segment_first_block(self.setup.volumes[volume]);
        let any = matches!(class, Class::Unreadable | Class::ReadErrors);
        if matches!(class, Class::RotSuperblock | Class::RotSuperblocks)
            || any && self.dice.chance(0.05)
        {
            let copy = self.dice.below(COPIES);
            let places = blocks_of(self.disk.volumes()[volume].blocks());
            return Some((places[copy], Kind::Superblock(copy)));
        }
        // Metadata is rare on the device. Where any kind is allowed, half of the searches look for
        // metadata.
        let wants_metadata = any && self.dice.chance(0.5);
        for _ in 0..LOOKS {
            let mut at = first + self.dice.below(end - first);
            let segment = first
                + (at - first) / self.setup.segment_blocks as usize
                    * self.setup.segment_blocks as usize;
            if matches!(class, Class::RotHeader | Class::RotHeaders) {
                at = segment + self.dice.below(HEADER_BLOCKS as usize);
            } else if class == Class::RotDescriptor || wants_metadata && self.dice.chance(0.8) {
                let last = segment + self.setup.segment_blocks as usize - 1;
                at = last - self.dice.below(self.setup.segment_blocks as usize / 4);
            }
            let kind = self.kind_of(volume, at);
            let is_there = *self.disk.volumes()[volume].visible(at) != Content::Zero;
            let fits = match (class, kind) {
                (_, Kind::Nothing | Kind::Superblock(_)) => false,
                (Class::RotPayload | Class::Miscoded, kind) => kind == Kind::Payload,
                (Class::RotDescriptor, kind) => matches!(kind, Kind::Descriptor(_)),
                (Class::RotHeader | Class::RotHeaders, kind) => matches!(kind, Kind::Header(_)),
                (_, kind) => !wants_metadata || kind != Kind::Payload,
            };
            if fits && is_there {
                return Some((at, kind));
            }
        }
        None
    }
}

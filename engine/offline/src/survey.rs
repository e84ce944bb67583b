//! Reads a store without opening it, for the tools: the content of the volumes, the pages that
//! count, and the faults.
//!
//! A survey writes nothing. It goes on past every fault and lists it with its place ([`Flaw`]).
//! Recovery's own rules interpret the records, so a survey shows the pages that an open would find.
//! [`SurveyOptions::hold`] keeps writers away while the survey lasts. Without it, a survey of a
//! store in use shows one moment.
//!
//! Writes that a crash may have interrupted are no flaws. Descriptor blocks and header copies in
//! flight at the crash count as unfinished. So do pages that no sync covers and whose bytes fail
//! their checksum ([`Survey::check_payloads`]).
//!
//! | module | task |
//! |---|---|
//! | `segments` | scans the segments and finds the faults |
//! | `sealed` | reads the keyring of an encrypted store |
//! | `volumes` | opens the volumes that are there |
//! | `extract` | returns pages with their bytes, chain by chain |
//! | `chains` | measures the placement of chains on disk |
//! | `payloads` | reads every live page and verifies its bytes |
//! | `losses` | sums up the cost of damage, per namespace |
//! | `facts` | the facts about the store as a whole, and the kinds of faults |
//!
//! It does not repair, and does not print.

mod chains;
mod extract;
mod facts;
mod losses;
mod payloads;
mod sealed;
mod segments;
mod volumes;

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use larder_disk::mailbox::ReadAt;
use larder_disk::probe::open_disk;
use larder_disk::{Disk, DiskOptions, Witness};
use larder_format::{
    BLOCK_BYTES, Features, KeyPrefix, PageKey, Run, Seal, Serial, StoreId, Superblock,
};

use larder_core::capacity::usable_blocks;
use larder_core::core::NamespaceInit;
use larder_core::index::SegmentId;
use larder_store::error::StoreError;
use larder_store::recovery::scan::{Bodies, Spot};
use larder_store::recovery::{Fate, Found, Statement, Whole};

pub use chains::ChainFacts;
pub use extract::{Ancestry, RecordId};
pub use facts::{
    Condition, Encryption, Flaw, FlawReason, HolderFacts, NamespaceFacts, Sealed, SurveyError,
    SurveyOptions,
};
pub use losses::{Losses, NamespaceLosses};
pub use payloads::{BadPage, PayloadFault, Payloads};
pub use segments::{Removal, RemovalKind, SegmentFacts};
use volumes::{Opened, Opening};
pub use volumes::{VolumeFacts, VolumeState};

/// How often a store in use is read again when something looks broken: a write may have been in
/// progress.
const LOOKS_MAX: usize = 3;

/// A page that a descriptor names.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    /// Position of its namespace in [`Survey::namespaces`].
    pub namespace: usize,
    /// Its key.
    pub key: PageKey,
    /// The key before it in its chain.
    pub parent: Option<KeyPrefix>,
    /// Number of pages before it in its chain.
    pub depth: u32,
    /// Position of its segment in [`Survey::segments`].
    pub segment: usize,
    /// Byte offset of its payload in the segment's volume.
    pub offset: u64,
    /// Bytes of its payload, padding included.
    pub bytes: u64,
    /// Blocks of the plain page that a codec saved.
    pub saved: u32,
    /// When the page was put, in seconds since 1970; 0 if it is not known.
    pub put_unix_s: u32,
    /// The version.
    pub birth: Serial,
    /// The group that holds this record of the page.
    pub commit: Serial,
    /// The checksum of its payload at the put.
    pub checksum: u64,
    /// What its decryption needs besides the key, if it is encrypted.
    pub seal: Option<Seal>,
    /// Whether its payload is proven to be on the device.
    pub proven: bool,
    /// The outcome of the page.
    pub fate: Fate,
}

/// The pages of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Pages that count.
    pub pages: u64,
    /// Their bytes.
    pub live_bytes: u64,
    /// Pages that no sync covers.
    pub unproven: u64,
    /// Page records, live or not.
    pub records: u64,
    /// See [`Survey::unfinished_records`].
    pub unfinished_records: u64,
}

/// A surveyed store. Writers are admitted again when it is dropped.
pub struct Survey {
    reference: Superblock,
    /// Whether the store is closed.
    pub condition: Condition,
    /// The process that opened it last.
    pub holder: HolderFacts,
    /// The highest epoch in any superblock.
    pub run: Run,
    /// Whether it is encrypted.
    pub encryption: Encryption,
    /// Its volumes, in the store's order.
    pub volumes: Vec<VolumeFacts>,
    /// The segments of all volumes, in the order of the volumes. Includes every segment whose
    /// beginning is there.
    pub segments: Vec<SegmentFacts>,
    /// The number of further segments, on missing volumes or behind the end of a volume. Only
    /// counted: a superblock may claim millions, and must not size an allocation.
    pub unreachable: u64,
    /// Its namespaces, also those without pages.
    pub namespaces: Vec<NamespaceFacts>,
    /// The faults found.
    pub flaws: Vec<Flaw>,
    /// Descriptor blocks and header copies that the last crash interrupted.
    pub unfinished_blocks: u64,
    /// The removals of the requested key, oldest first.
    pub removals: Vec<Removal>,
    losses: Option<Losses>,
    /// By volume.
    statements: Vec<Statement>,
    spots: Vec<Spot>,
    bodies: Bodies,
    records: Records,
    disk: Arc<Witness>,
    /// Held for their locks.
    opened: Vec<Option<Opened>>,
}

/// Every page record, in the order of namespaces, keys and ages.
#[derive(Default)]
struct Records {
    found: Vec<Found<Whole>>,
    fates: Vec<Fate>,
    /// Positions of the live ones.
    live: Vec<usize>,
    page_blocks: Vec<u32>,
    /// Those of encrypted pages, by place.
    seals: HashMap<(SegmentId, u32), Seal>,
}

impl Survey {
    /// Surveys the store whose first volume is at `path`.
    ///
    /// # Errors
    /// [`SurveyError`]: the file is no store, or a store of a newer version; no superblock is
    /// usable; the store is in use and `hold` is set; this process cannot read it.
    pub fn new(path: &Path, options: &SurveyOptions) -> Result<Survey, SurveyError> {
        Survey::through(path, options, |disk| disk)
    }

    /// The same, through a disk before the store's own.
    pub fn through(
        path: &Path,
        options: &SurveyOptions,
        through: impl FnOnce(Arc<dyn Disk>) -> Arc<dyn Disk>,
    ) -> Result<Survey, SurveyError> {
        let mut opening = Opening::new(path, options)?;
        let files = opening.opened.iter();
        let disk = open_disk(
            DiskOptions {
                files: files
                    .map(|opened| opened.as_ref().map(|opened| opened.file.file.clone()))
                    .collect(),
                depth: options.depth.max(1),
                latencies: Arc::default(),
                pacing: Arc::default(),
                board: Arc::default(),
            },
            options.disk,
        )
        .map_err(StoreError::from)?;
        let disk = Arc::new(Witness::new(through(disk), opening.patience.clone()));
        let condition = opening.condition(options.hold);
        let bodies = match opening.bodies(path, disk.as_ref(), options, condition) {
            Ok(bodies) => bodies,
            Err(error) => {
                disk.shutdown();
                return Err(error.into());
            }
        };
        opening.quotas(disk.as_ref(), &bodies, condition);
        let mut survey = Survey {
            condition,
            holder: opening.holder(),
            run: opening.newest_run(),
            encryption: match &bodies {
                Bodies::Clear => Encryption::None,
                Bodies::Sealed(_) => Encryption::Unlocked,
                Bodies::Locked => Encryption::Locked { pages: None },
            },
            spots: opening.spots(&bodies),
            bodies,
            unreachable: 0,
            reference: opening.reference,
            volumes: opening.facts,
            segments: Vec::new(),
            namespaces: Vec::new(),
            flaws: Vec::new(),
            unfinished_blocks: 0,
            removals: Vec::new(),
            losses: None,
            statements: Vec::new(),
            records: Records::default(),
            disk,
            opened: opening.opened,
        };
        let claimed = survey.volumes.iter().map(|facts| u64::from(facts.segments));
        survey.unreachable = claimed.sum::<u64>() - survey.spots.len() as u64;
        for _ in 0..LOOKS_MAX {
            survey.flaws.clone_from(&opening.flaws);
            survey.scan(options.key);
            if survey.condition != Condition::InUse || survey.flaws.len() == opening.flaws.len() {
                break;
            }
        }
        survey
            .disk
            .verdict()
            .map_err(|source| StoreError::NotRead {
                path: path.to_owned(),
                source,
            })?;
        Ok(survey)
    }

    /// The store's identity.
    #[must_use]
    pub fn store(&self) -> StoreId {
        self.reference.store
    }

    /// When it was created: seconds since 1970.
    #[must_use]
    pub fn created_unix_s(&self) -> u64 {
        self.reference.created_unix_s
    }

    /// Its features, and the release that wrote its superblock.
    #[must_use]
    pub fn features(&self) -> Features {
        self.reference.features
    }

    /// Bytes of a segment.
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        u64::from(self.reference.segment_blocks) * BLOCK_BYTES as u64
    }

    /// Most bytes of pages that the store keeps at once, without the volumes that are missing.
    #[must_use]
    pub fn usable_bytes(&self) -> u64 {
        let reachable = self.segments.iter().filter(|facts| facts.case.is_some());
        let there = |volume: &&VolumeFacts| volume.bytes.is_some();
        let blocks = usable_blocks(
            reachable.count() as u64,
            self.volumes.iter().filter(there).count(),
            self.reference.segment_blocks,
        );
        blocks * BLOCK_BYTES as u64
    }

    /// The pages that count, in the order of namespaces and keys.
    pub fn live(&self) -> impl ExactSizeIterator<Item = Page> + '_ {
        self.records.live.iter().map(|&index| self.page(index))
    }

    /// The counts of its pages; `None` for an encrypted store without its key.
    #[must_use]
    pub fn counts(&self) -> Option<Counts> {
        let is_known = !matches!(self.encryption, Encryption::Locked { .. });
        is_known.then(|| Counts {
            pages: self.live().len() as u64,
            live_bytes: self.live_bytes(),
            unproven: self.live().filter(|page| !page.proven).count() as u64,
            records: self.record_count() as u64,
            unfinished_records: self.unfinished_records() as u64,
        })
    }

    /// Number of page records, live or not.
    #[must_use]
    pub fn record_count(&self) -> usize {
        self.records.found.len()
    }

    /// Number of page records whose write a crash interrupted, and whose key has an older whole
    /// record.
    #[must_use]
    pub fn unfinished_records(&self) -> usize {
        let fates = self.records.fates.iter();
        fates.filter(|fate| **fate == Fate::Unfinished).count()
    }

    /// Every record of a key, in all namespaces; oldest first in each namespace.
    pub fn records_of(&self, key: KeyPrefix) -> impl Iterator<Item = Page> + '_ {
        let ranges = (0..self.namespaces.len()).map(move |slot| self.records.range(slot, key));
        ranges.flatten().map(|index| self.page(index))
    }

    /// The records that recovery keeps of the pages that count, the oldest commits first.
    pub(crate) fn live_found(&self) -> Vec<Found<Whole>> {
        let live = self.records.live.iter();
        let mut live: Vec<_> = live.map(|&index| self.records.found[index]).collect();
        live.sort_unstable_by_key(|page| (page.commit, page.birth));
        live
    }

    /// Blocks of a page.
    pub(crate) fn page_blocks(&self, page: &Found<Whole>) -> u32 {
        self.records.blocks(page)
    }

    /// The place of a page's payload.
    pub(crate) fn place_of(&self, page: &Found<Whole>) -> ReadAt {
        self.spots[page.place.segment.0 as usize].data(page.place.start, self.records.blocks(page))
    }

    /// The disk of the survey.
    pub(crate) fn disk(&self) -> &dyn Disk {
        self.disk.as_ref()
    }

    fn page(&self, index: usize) -> Page {
        let found = &self.records.found[index];
        let segment = found.place.segment.0 as usize;
        let namespace = usize::from(found.slot.0);
        Page {
            namespace,
            key: found.extra.key,
            parent: found.parent,
            depth: found.extra.depth,
            segment,
            offset: self.offset(found),
            bytes: self.records.bytes(found),
            saved: found.place.saved,
            put_unix_s: found.extra.put_unix_s,
            birth: found.birth,
            commit: found.commit,
            checksum: found.checksum,
            seal: self.seal_of(found),
            proven: found.proven,
            fate: self.records.fates[index],
        }
    }

    fn offset(&self, found: &Found<Whole>) -> u64 {
        let segment = self.spots[found.place.segment.0 as usize].headers().offset;
        segment + u64::from(found.place.start) * BLOCK_BYTES as u64
    }
}

impl Records {
    fn new(
        found: Vec<Found<Whole>>,
        fates: Vec<Fate>,
        namespaces: &[NamespaceInit],
        seals: HashMap<(SegmentId, u32), Seal>,
    ) -> Records {
        let live = (0..fates.len()).filter(|&index| fates[index] == Fate::Live);
        Records {
            live: live.collect(),
            page_blocks: namespaces.iter().map(|init| init.page_blocks).collect(),
            found,
            fates,
            seals,
        }
    }

    fn range(&self, slot: usize, key: KeyPrefix) -> Range<usize> {
        let wanted = (slot, key);
        let place = |found: &Found<Whole>| (usize::from(found.slot.0), found.key);
        let start = self.found.partition_point(|found| place(found) < wanted);
        let end = self.found.partition_point(|found| place(found) <= wanted);
        start..end
    }

    /// Blocks of a page as it is stored.
    fn blocks(&self, found: &Found<Whole>) -> u32 {
        let plain = self.page_blocks[usize::from(found.slot.0)];
        plain.saturating_sub(found.place.saved)
    }

    fn bytes(&self, found: &Found<Whole>) -> u64 {
        u64::from(self.blocks(found)) * BLOCK_BYTES as u64
    }
}

impl Drop for Survey {
    fn drop(&mut self) {
        self.disk.shutdown();
    }
}

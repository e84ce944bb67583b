//! Repair: plans the remedies for the findings of a survey, and carries them out.
//!
//! | damage | remedy |
//! |---|---|
//! | a copy of a superblock | opening writes all copies again, the good one last |
//! | a copy of the keyring | opening writes all copies again, from the good one |
//! | a copy of a segment's header | written again from the other copy, or else from the blocks |
//! | a page's bytes | the page is dropped, with a record that keeps it from coming back |
//! | all headers and descriptor blocks of a segment | the segment is released |
//! | a descriptor block, overlaps, wrong sizes | good pages are copied, the segment is released |
//! | contents lost since a clean close | closing writes a statement of the rest |
//! | a volume (1) | none: the store can only be opened without it, for good |
//!
//! (1) Missing, truncated, of an older epoch, or without a superblock.
//!
//! The store may have been opened since the survey, so the plan is checked again. Each page is read
//! again before it is dropped. A header is written only if its copies still differ when the store
//! is locked. Emptying a segment removes no good page. So an interrupted repair can be run again,
//! and a repair too many does no harm.

use std::collections::HashMap;
use std::path::Path;

use larder_core::grants::Finding;
use larder_core::index::{NamespaceSlot, Place, SegmentId};
use larder_disk::mailbox::{ReadAt, read_all};
use larder_format::{BLOCK_BYTES, Fingerprint, PageChecksum, PageKey};
use larder_store::api::OpenOptions;
use larder_store::error::StoreError;
use larder_store::recovery::scan::Case;
use larder_store::recovery::{Whole, spots_in};
use larder_store::store::opening::{Opening, open_volumes, settle};
use larder_store::volume::Access;
use serde::Serialize;

use super::headers;
use super::owner::{Emptied, Owner, Progress, SegmentName};
use crate::survey::{BadPage, Flaw, FlawReason, Survey};

/// Bytes of pages read again at once.
const READ_BYTES: usize = 32 << 20;

/// Pages dropped before their eviction records are written.
const DROPS: usize = 4096;

/// A page whose bytes do not match its checksum.
#[derive(Clone, Copy, Debug)]
pub struct DamagedPage {
    namespace: Fingerprint,
    key: PageKey,
    segment: SegmentName,
    /// First block in the segment.
    start: u32,
}

/// The plan of a repair.
#[derive(Clone, Debug, Default)]
pub struct Repair {
    /// Volumes with one bad copy of the superblock.
    pub superblocks: Vec<usize>,
    /// Bad copies of the keyring.
    pub keyrings: u64,
    /// Bad copies of the quotas.
    pub quotas: u64,
    /// The quotas are lost: no repair brings them back.
    pub has_lost_quotas: bool,
    /// Segments with a bad copy of their header.
    pub headers: Vec<SegmentName>,
    /// Volumes whose closing statement is written anew.
    pub statements: Vec<usize>,
    /// Segments to be emptied and released.
    pub segments: Vec<SegmentName>,
    /// Pages in those segments that count; the good ones are copied elsewhere.
    pub pages_to_move: u64,
    /// Bytes of those pages.
    pub bytes_to_move: u64,
    /// Pages to be dropped.
    pub pages: Vec<DamagedPage>,
    /// Flaws that no tool can repair.
    pub beyond: Vec<Flaw>,
}

/// The result of a repair.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Repaired {
    /// Superblock copies written again.
    pub superblocks: u64,
    /// Copies of the keyring written again.
    pub keyrings: u64,
    /// Copies of the quotas written again.
    pub quotas: u64,
    /// Header copies written again.
    pub headers: u64,
    /// Closing statements written anew, because the volumes held something else.
    pub statements: u64,
    /// Segments emptied and released.
    #[serde(rename = "freed_segments")]
    pub emptied_segments: u64,
    /// Pages copied out of them.
    #[serde(rename = "pages_moved")]
    pub moved_pages: u64,
    /// Damaged pages dropped.
    pub dropped_pages: u64,
    /// Pages whose writes a crash had interrupted, dropped during the repair.
    pub unfinished_pages: u64,
    /// Segments that could not be emptied for want of room, or because the device refused.
    #[serde(skip)]
    pub stuck: Vec<SegmentName>,
    /// Dropped pages for whose record there was no room: they will be found damaged again.
    #[serde(skip)]
    pub unrecorded_pages: u64,
    /// Whether `progress` ended it early.
    pub interrupted: bool,
}

impl Repair {
    /// Plans the remedies for the damage that a survey and its check of the payloads found.
    #[must_use]
    pub fn plan(survey: &Survey, bad: &[BadPage]) -> Repair {
        let mut repair = Repair::default();
        for flaw in &survey.flaws {
            repair.take(flaw);
        }
        repair.superblocks.sort_unstable();
        repair.superblocks.dedup();
        for names in [&mut repair.headers, &mut repair.segments] {
            names.sort_unstable();
            names.dedup();
        }
        // Segments that are in use, and whose content is unknown.
        let mut hidden = Vec::new();
        for facts in &survey.segments {
            let name = SegmentName {
                volume: facts.volume,
                number: facts.number,
            };
            if repair.segments.binary_search(&name).is_ok() {
                repair.pages_to_move += facts.live_pages;
                repair.bytes_to_move += facts.live_bytes;
            } else if repair.headers.binary_search(&name).is_ok()
                && matches!(facts.case, Some(Case::Hidden))
                && facts.records == 0
            {
                hidden.push(name);
            }
        }
        repair.segments.extend(hidden);
        repair.pages = bad.iter().map(|bad| DamagedPage::of(survey, bad)).collect();
        repair
    }

    fn take(&mut self, flaw: &Flaw) {
        let name = flaw.segment.map(|number| SegmentName {
            volume: flaw.volume,
            number,
        });
        match (&flaw.reason, name) {
            (
                FlawReason::Superblock {
                    other_is_good: true,
                    ..
                },
                _,
            ) => self.superblocks.push(flaw.volume),
            (
                FlawReason::Keyring {
                    other_is_good: true,
                    ..
                },
                _,
            ) => self.keyrings += 1,
            (FlawReason::Quotas { other_is_good, .. }, _) => match other_is_good {
                true => self.quotas += 1,
                false => self.has_lost_quotas = true,
            },
            (FlawReason::LostContents { .. } | FlawReason::ClosingStatement(_), _) => {
                self.statements.push(flaw.volume);
            }
            (FlawReason::Header { .. }, Some(name)) => self.headers.push(name),
            (
                FlawReason::LostSegment(_)
                | FlawReason::Descriptor(_)
                | FlawReason::Disbelieved { .. }
                | FlawReason::Overlap(_),
                Some(name),
            ) => self.segments.push(name),
            _ => self.beyond.push(flaw.clone()),
        }
    }

    /// Whether there is nothing to repair, and nothing beyond repair.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.superblocks.is_empty()
            && self.keyrings + self.quotas == 0
            && !self.has_lost_quotas
            && self.headers.is_empty()
            && self.statements.is_empty()
            && self.segments.is_empty()
            && self.pages.is_empty()
            && self.beyond.is_empty()
    }

    /// Whether an open without some volumes would remove every flaw beyond repair. The first volume
    /// cannot be left out.
    #[must_use]
    pub fn can_be_degraded(&self) -> bool {
        self.beyond.iter().all(|flaw| flaw.volume > 0)
    }
}

impl DamagedPage {
    fn of(survey: &Survey, bad: &BadPage) -> DamagedPage {
        let BadPage { page, .. } = bad;
        let facts = &survey.segments[page.segment];
        let inside = page.offset - facts.offset;
        DamagedPage {
            namespace: survey.namespaces[page.namespace].fingerprint,
            key: page.key,
            segment: SegmentName {
                volume: facts.volume,
                number: facts.number,
            },
            start: u32::try_from(inside / BLOCK_BYTES as u64).unwrap_or(u32::MAX),
        }
    }
}

/// Carries out a plan, as far as possible.
///
/// # Errors
/// [`StoreError::Locked`] when a process has the store open; else as for an open. So any flaw in
/// [`Repair::beyond`] is an error unless the options set `degraded`. After any error the store is
/// as after a crash: sound, without the parts that were damaged before.
pub fn repair(
    path: &Path,
    options: &OpenOptions,
    plan: &Repair,
    progress: &mut Progress<'_>,
) -> Result<Repaired, StoreError> {
    let (mut volumes, disk) = open_volumes(path, options, Access::Exclusive)?;
    let spots = spots_in(&volumes);
    if plan.quotas > 0
        && let Some(error) = volumes.mend_quotas(disk.as_ref()).unwrap_or_else(Some)
    {
        disk.shutdown();
        return Err(error);
    }
    let mut done = Repaired {
        superblocks: plan.superblocks.len() as u64,
        keyrings: plan.keyrings,
        quotas: plan.quotas,
        statements: plan.statements.len() as u64,
        ..Repaired::default()
    };
    match headers::restore(&volumes, disk.as_ref(), &spots, &plan.headers) {
        Ok(written) => done.headers = written,
        Err(error) => {
            disk.shutdown();
            return Err(error);
        }
    }
    let opening: Opening<Whole> = Opening::new(volumes, disk, options)?;
    let segments: Vec<SegmentId> = plan
        .segments
        .iter()
        .filter(|name| {
            opening
                .volumes
                .list
                .get(name.volume)
                .is_some_and(Option::is_some)
        })
        .filter_map(|name| name.id(&spots))
        .collect();
    let (mut owner, _) = Owner::begin(opening, &segments, options)?;
    done.headers += 2 * owner.adopted;
    drop_pages(&owner, &plan.pages)?;
    empty_all(&owner, &segments, plan.bytes_to_move, &mut done, progress)?;
    let counters = owner.local.with_core(|core| core.counters());
    done.moved_pages = counters.store.moved;
    done.dropped_pages = counters.store.damaged;
    done.unfinished_pages = counters.store.unfinished;
    done.unrecorded_pages = owner.close()? as u64;
    // A released segment has one copy with its free header. The other copy may have been bad from
    // the beginning.
    let again: Vec<SegmentName> = plan.headers.iter().chain(&plan.segments).copied().collect();
    done.headers += headers::restore(&owner.volumes, owner.local.disk.as_ref(), &spots, &again)?;
    Ok(done)
}

/// Drops those pages that are still damaged.
fn drop_pages(owner: &Owner, pages: &[DamagedPage]) -> Result<(), StoreError> {
    let slots: HashMap<Fingerprint, NamespaceSlot> = (0..)
        .zip(&owner.namespaces)
        .map(|(slot, (fingerprint, _))| (*fingerprint, NamespaceSlot(slot)))
        .collect();
    for pages in pages.chunks(DROPS) {
        let there: Vec<(NamespaceSlot, Place, DamagedPage)> = pages
            .iter()
            .filter_map(|page| {
                let slot = *slots.get(&page.namespace)?;
                let segment = page.segment.id(&owner.spots)?;
                let found = owner.local.index.locate(slot, &page.key)?;
                let place = found.place;
                let is_there = (place.segment, place.start) == (segment, page.start);
                is_there.then_some((slot, place, *page))
            })
            .collect();
        let mut rest = there.as_slice();
        while !rest.is_empty() {
            let largest = rest.iter().map(|(slot, ..)| page_bytes(owner, *slot)).max();
            let count = (READ_BYTES / largest.unwrap_or(READ_BYTES).max(1)).max(1);
            let (now, later) = rest.split_at(count.min(rest.len()));
            drop_batch(owner, now)?;
            rest = later;
        }
        owner
            .local
            .with_core(larder_core::core::Core::write_departures);
    }
    Ok(())
}

fn page_bytes(owner: &Owner, slot: NamespaceSlot) -> usize {
    owner.namespaces[usize::from(slot.0)].1 as usize * BLOCK_BYTES
}

fn drop_batch(
    owner: &Owner,
    pages: &[(NamespaceSlot, Place, DamagedPage)],
) -> Result<(), StoreError> {
    let reads: Vec<ReadAt> = pages
        .iter()
        .map(|(slot, place, _)| {
            let spot = &owner.spots[place.segment.0 as usize];
            let plain = owner.namespaces[usize::from(slot.0)].1;
            spot.data(place.start, plain.saturating_sub(place.saved))
        })
        .collect();
    let results = read_all(owner.local.disk.as_ref(), &reads);
    for ((slot, place, page), bytes) in pages.iter().zip(results) {
        let finding = match bytes {
            Ok(bytes) => {
                let mut checksum = PageChecksum::new(page.namespace, &page.key);
                checksum.blocks(&bytes);
                let stored = owner.local.index.locate(*slot, &page.key);
                let is_good =
                    stored.is_some_and(|found| found.proof.has_checksum(checksum.finish()));
                if is_good {
                    Finding::Good
                } else {
                    Finding::Mismatch
                }
            }
            Err(error) if error.is_of_the_medium() => Finding::Unreadable,
            Err(source) if source.is_of_this_process() => {
                let path = owner.volumes.first_path();
                return Err(StoreError::NotRead { path, source });
            }
            Err(_) => continue,
        };
        owner
            .local
            .with_core(|core| core.found(*slot, &page.key, *place, finding));
    }
    Ok(())
}

/// Empties segments, those with the fewest live blocks first. If there is no room, makes some from
/// dead blocks elsewhere.
fn empty_all(
    owner: &Owner,
    segments: &[SegmentId],
    bytes: u64,
    done: &mut Repaired,
    progress: &mut Progress<'_>,
) -> Result<(), StoreError> {
    let live_in = |id: &SegmentId| owner.local.with_core(|core| core.live_in(*id));
    let mut segments = segments.to_vec();
    segments.sort_by_key(live_in);
    let mut moved = 0;
    for id in segments {
        let live = live_in(&id) * BLOCK_BYTES as u64;
        if empty_one(owner, id)? {
            done.emptied_segments += 1;
        } else {
            let spot = &owner.spots[id.0 as usize];
            done.stuck.push(SegmentName {
                volume: spot.volume,
                number: spot.number,
            });
        }
        moved += live;
        if progress(moved.min(bytes), bytes).is_break() {
            done.interrupted = true;
            break;
        }
    }
    Ok(())
}

fn empty_one(owner: &Owner, id: SegmentId) -> Result<bool, StoreError> {
    while owner.local.with_core(|core| core.holds_something(id)) {
        let emptied = owner.empty(id, |page| page.from);
        settle(&owner.local)?;
        if emptied != Emptied::Yes && owner.gain_room(0, |_| false, |page| page.from)?.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}

//! Recovery: builds the state of a core and an index from the descriptors of all segments.
//!
//! First every segment is scanned ([`scan`]). Then the records are compared (`judge`):
//!
//! - Of several records of one key, the highest version counts. Of equal versions (copies), the
//!   highest commit counts. If that record is not proven, the newest record counts whose payload
//!   has the right checksum, or that is proven (`doubt`). Recovery reads payload in this case only.
//!   If a newer payload cannot be read now, its segment stays as it is: the next opening may find
//!   it whole.
//! - A deletion kills the pages of its key that have a lower version. A clear does so for its
//!   namespace.
//! - If the segment's header is sealed, or open and written by a clean close, it alone decides
//!   which pages are *proven*. Otherwise the highest durable watermark of the same epoch in any
//!   block or header decides (`synced` on disk). An unproven page is served only if its checksum
//!   matches. A segment without a valid header and with a bad copy has no proven page: the absent
//!   header may have excluded pages whose writes failed.
//!
//! Pages enter the index in the order of their commits, so the oldest pages are the coldest after a
//! restart. For this order a moved page has the commit of its copy. Evictions are records too.
//! Without them a crash would bring evicted pages back, and the pages that were kept instead would
//! have to make room for them.
//!
//! A record with a good checksum may still be wrong. Recovery disbelieves combinations that no
//! writer produces, and reports them:
//!
//! - Pages of another size than their namespace's. The namespace's own record decides (its
//!   fingerprint covers the size), else the first page.
//! - Pages that take more room than their segment's data has. So live data never exceeds the
//!   volumes.
//! - More namespaces than the index can number.
//!
//! Recovery writes nothing. It returns the headers that the opener has to write
//! ([`Recovery::adoptions`]). After the opener has written them, segments that a crash left open
//! need no second scan, and unproven pages stay unproven.

mod closing;
mod doubt;
mod fault;
mod found;
mod gather;
mod judge;
pub mod scan;
mod spot;

use std::collections::HashMap;
use std::sync::Arc;

use larder_disk::Disk;
use larder_format::{
    HEADER_BLOCKS, OpenState, Run, SegmentHeader, SegmentNo, Serial, Structure, Superblock,
};

use crate::keys::Keys;
use crate::volume::Volumes;
pub use closing::{Found as FoundHoldings, Statement, judge as judge_closed, read_statements};
pub use found::Damage;
pub use found::{Extra, Found, Whole};
pub use gather::{Gathered, SegmentSummary};
pub use judge::Fate;
use larder_base::planted;
use larder_core::core::{InitState, Recovered, SegmentInit};
use larder_core::index::{Index, SegmentId};
use scan::{Bodies, Fault, FaultReason, Spot};

/// The result of recovery.
#[derive(Debug)]
pub struct Recovery {
    /// For the core.
    pub recovered: Recovered,
    /// Headers to write before the store is used: volume, header.
    pub adoptions: Vec<(usize, SegmentHeader)>,
    /// The faults found.
    pub damage: Vec<Damage>,
    /// Number of pages that are not proven.
    pub unproven: u64,
    /// Upper bound of the pages that count again although a lost record had removed them.
    pub doubtful: u64,
    /// Highest epoch in any block or header.
    pub highest_run: Run,
}

impl Recovery {
    /// Leaves a segment as it is: its header cannot be written.
    pub fn leave_alone(&mut self, volume: usize, segment: SegmentNo) {
        let before = self.recovered.volumes.iter().take(volume);
        let at = before.sum::<u32>().saturating_add(segment.0);
        if let Some(segment) = self.recovered.segments.get_mut(at as usize) {
            segment.state = InitState::Unreadable;
            self.recovered.is_partial = true;
        }
    }
}

/// The newest epoch that must be recorded on every volume: a record was written in it, or it ended
/// in order, and both come after the superblocks of all volumes. A volume without this epoch is an
/// old copy. (An epoch that no superblock knows does not distinguish the volumes.)
pub fn known_to_all<'a>(
    superblocks: impl Iterator<Item = &'a Superblock> + Clone,
    highest_run: Run,
) -> Run {
    let newest = superblocks.clone().map(|superblock| superblock.run).max();
    let closed = superblocks.filter(|superblock| superblock.state == OpenState::Clean);
    let closed = closed.map(|superblock| superblock.run).max();
    highest_run
        .max(closed.unwrap_or(highest_run))
        .min(newest.unwrap_or(highest_run))
}

/// The places of all segments that a superblock names, by volume.
#[must_use]
pub fn spots_of(superblock: &Superblock) -> Vec<Spot> {
    spots_with(superblock, &Bodies::Clear)
}

/// The same of volumes, with the keys of an encrypted store that is unlocked.
#[must_use]
pub fn spots_in(volumes: &Volumes) -> Vec<Spot> {
    spots_with(volumes.superblock(), &Bodies::with(volumes.keys()))
}

/// The same, with bodies of descriptor blocks that are read so.
pub(crate) fn spots_with(superblock: &Superblock, bodies: &Bodies) -> Vec<Spot> {
    let mut spots = Vec::new();
    for (volume, entry) in superblock.volumes.iter().enumerate() {
        for number in 0..entry.segments {
            spots.push(Spot {
                store: superblock.store,
                volume,
                number,
                segment_blocks: superblock.segment_blocks,
                bodies: bodies.clone(),
            });
        }
    }
    spots
}

/// Reads a store's descriptors into `index`, which must be empty. `superblocks` has one entry for
/// each volume, in the store's order; `None` for a lost volume. With `proven_only`, recovery takes
/// only pages that are proven to be on the device, in segments that take no more pages: a reader
/// without the lock may see only these.
///
/// # Panics
/// When no volume is there.
pub fn recover(
    disk: &dyn Disk,
    superblocks: &[Option<&Superblock>],
    index: &Index,
    proven_only: bool,
) -> Recovery {
    recover_pages::<()>(disk, superblocks, None, index, proven_only).0
}

/// As [`recover`], of a store with these keys, if it is encrypted.
#[cfg(feature = "simulated")]
pub fn recover_with(
    disk: &dyn Disk,
    superblocks: &[Option<&Superblock>],
    keys: Option<&Arc<Keys>>,
    index: &Index,
) -> Recovery {
    recover_pages::<()>(disk, superblocks, keys, index, true).0
}

/// As [`recover`]; also returns the pages that count, in the order in which they entered the index.
pub(crate) fn recover_pages<E: Extra>(
    disk: &dyn Disk,
    superblocks: &[Option<&Superblock>],
    keys: Option<&Arc<Keys>>,
    index: &Index,
    proven_only: bool,
) -> (Recovery, Vec<Found<E>>) {
    let there = || superblocks.iter().copied().flatten();
    let superblock = there()
        .next()
        .expect("a store is recovered from at least one volume");
    let clean = there().all(|superblock| superblock.state == OpenState::Clean);
    let newest_run = there()
        .map(|superblock| superblock.run)
        .fold(Run::FIRST, Run::max);
    let all = spots_with(superblock, &Bodies::with(keys));
    let present: Vec<Spot> = all
        .iter()
        .filter(|spot| superblocks.get(spot.volume).is_some_and(Option::is_some))
        .cloned()
        .collect();
    let mut gathered: Gathered<E> = Gathered::new();
    let mut scans: HashMap<(usize, u32), SegmentSummary> = HashMap::with_capacity(present.len());
    let ids: HashMap<(usize, u32), SegmentId> = all
        .iter()
        .zip(0..)
        .map(|(spot, id)| ((spot.volume, spot.number), SegmentId(id)))
        .collect();
    let statements = match proven_only {
        true => vec![Statement::None; superblocks.len()],
        false => read_statements(disk, superblocks),
    };
    let mut holdings = vec![closing::Found::default(); superblocks.len()];
    scan::scan(disk, &present, clean.then_some(newest_run), |spot, scan| {
        let key = (spot.volume, spot.number);
        let statement = &statements[spot.volume];
        let scan = closing::judge(spot, scan, statement);
        let is_vouched = statement.proves_all();
        let summary = gathered.take(ids[&key], spot, scan, proven_only, is_vouched);
        holdings[spot.volume].add(&summary);
        scans.insert(key, summary);
    });
    for (volume, (held, statement)) in holdings.iter().zip(&statements).enumerate() {
        if let Some(fault) = held.compare(statement) {
            gathered.note_difference(volume, fault);
        }
    }
    gathered.prove(scans.values_mut());
    for spot in &present {
        let summary = &scans[&(spot.volume, spot.number)];
        if !clean && summary.was_open_in(newest_run) {
            gathered.forget_torn_headers(spot);
        }
        let disbelieved = summary.disbelieved.iter();
        gathered
            .damage
            .extend(disbelieved.map(|(why, pages)| Damage {
                volume: spot.volume,
                segment: Some(spot.number),
                fault: Fault {
                    offset: spot.headers().offset,
                    structure: Structure::DescriptorBlock,
                    reason: FaultReason::Disbelieved(*pages, *why),
                },
            }));
    }
    let highest_run = gathered.highest.run().max(Run::FIRST);
    let last = newest_run.max(highest_run);
    let next = if planted!(RunNotBumped) {
        Some(last)
    } else {
        last.next()
    };
    let run = next.unwrap_or(highest_run);
    let first = Serial::first_of(run);
    let pages = gathered.publish(disk, &all, index, proven_only);
    for id in &gathered.unread {
        let spot = &all[id.0 as usize];
        if let Some(summary) = scans.get_mut(&(spot.volume, spot.number)) {
            summary.unreadable = true;
        }
    }
    let mut found = vec![0; superblocks.len()];
    for page in &pages {
        found[all[page.place.segment.0 as usize].volume] += 1;
    }
    let lost = { holdings.iter().zip(&statements).zip(found) }
        .map(|((held, statement), found)| held.lost_pages(statement, found));
    let lost_pages = lost.sum();
    let unproven = pages.iter().filter(|page| !page.proven).count() as u64;
    let is_doubtful = |page: &&Found<E>| page.commit < gathered.lost_until;
    let doubtful = pages.iter().filter(is_doubtful).count() as u64;
    let mut adoptions = Vec::new();
    let segments = all
        .iter()
        .map(|spot| match scans.get(&(spot.volume, spot.number)) {
            None => SegmentInit {
                state: InitState::Lost,
                sequence: Serial::ZERO,
                data_end: HEADER_BLOCKS,
                blocks: 0,
                last_commit: Serial::ZERO,
                proven: Serial::ZERO,
                born_ms: 0,
            },
            Some(summary) => summary.init(spot, first, &mut adoptions),
        })
        .collect();
    let recovered = Recovered {
        volumes: superblock
            .volumes
            .iter()
            .map(|entry| entry.segments)
            .collect(),
        segments,
        namespaces: gathered.namespaces,
        first,
        clean,
        lost_pages,
        is_partial: { gathered.damage.iter() }.any(|damage| damage.fault.reason.is_unread()),
    };
    let recovery = Recovery {
        recovered,
        adoptions,
        damage: gathered.damage,
        unproven,
        doubtful,
        highest_run,
    };
    (recovery, pages)
}

//! A store that is open for offline work.

use std::ops::ControlFlow;
use std::sync::Arc;

use larder_disk::Witness;
use larder_format::{BLOCK_BYTES, Fingerprint, PageRecord};

use larder_core::core::{Core, GAIN_SHARE, InitState, Move, NamespaceInit, batch};
use larder_core::index::{Place, SegmentId};
use larder_core::status::PutStatus;
use larder_store::api::OpenOptions;
use larder_store::error::StoreError;
use larder_store::recovery::scan::{Spot, read_descriptors};
use larder_store::recovery::{Found, Whole, spots_in};
use larder_store::store::local::Local;
use larder_store::store::mover::move_pages;
use larder_store::store::opening::{self, Opening};
use larder_store::volume::Volumes;

/// Bytes of pages moved at once.
pub(super) const MOVE_BYTES: u64 = 32 << 20;

/// Receives the bytes of pages moved so far, and the total. May end the work early.
pub type Progress<'a> = dyn FnMut(u64, u64) -> ControlFlow<()> + 'a;

/// A segment by its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentName {
    /// Index of its volume.
    pub volume: usize,
    /// Its number in the volume.
    pub number: u32,
}

impl SegmentName {
    /// Its number in the whole store; `None` if there is no such segment.
    pub(super) fn id(self, spots: &[Spot]) -> Option<SegmentId> {
        let place = (self.volume, self.number);
        let found = spots.binary_search_by_key(&place, |spot| (spot.volume, spot.number));
        u32::try_from(found.ok()?).ok().map(SegmentId)
    }
}

/// A store that is open for offline work. Dropping it without [`Owner::close`] leaves the store as
/// a crash does.
pub(super) struct Owner {
    pub(super) volumes: Volumes,
    pub(super) local: Arc<Local>,
    /// By number of segment.
    pub(super) spots: Vec<Spot>,
    /// By slot.
    pub(super) namespaces: Vec<(Fingerprint, u32)>,
    /// Segments whose header was written when the epoch began.
    pub(super) adopted: u64,
}

/// The result of emptying a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Emptied {
    /// It is being released.
    Yes,
    /// A page or record in it found no room. It keeps everything that has not been moved.
    NoRoom,
    /// The device did not read or write all of it this time. It keeps everything that has not been
    /// moved.
    Failed,
}

impl Emptied {
    /// After moves with these statuses.
    pub(super) fn after(statuses: &[PutStatus]) -> Emptied {
        let has_failed = |status: &PutStatus| matches!(status, PutStatus::Failed(_));
        if statuses.iter().any(has_failed) {
            Emptied::Failed
        } else if statuses.iter().all(|status| status.is_present()) {
            Emptied::Yes
        } else {
            Emptied::NoRoom
        }
    }
}

impl Owner {
    /// Begins an epoch. Open segments among `closed` take no more pages. Returns the pages that
    /// count, the oldest commits first.
    pub(super) fn begin(
        opening: Opening<Whole>,
        closed: &[SegmentId],
        options: &OpenOptions,
    ) -> Result<(Owner, Vec<Found<Whole>>), StoreError> {
        let Opening {
            mut volumes,
            disk,
            index,
            mut recovery,
            pages,
        } = opening;
        if let Err(error) = opening::begin_run(&mut volumes, disk.as_ref(), &mut recovery) {
            disk.shutdown();
            return Err(error);
        }
        let adopted = recovery.adoptions.len() as u64;
        for id in closed {
            let segment = &mut recovery.recovered.segments[id.0 as usize];
            if segment.state == InitState::Open {
                segment.state = InitState::Closed;
            }
        }
        let spots = spots_in(&volumes);
        let namespaces = sizes(&recovery.recovered.namespaces);
        let config = opening::config(&volumes, options);
        let services = opening::services(&volumes);
        let disk = Arc::new(Witness::new(disk, volumes.patience.clone()));
        let keys = volumes.keys().cloned();
        let local = opening::catalog(config, recovery, index, disk, options, services, keys);
        local.with_core(Core::open_for_copies);
        let owner = Owner {
            volumes,
            local,
            spots,
            namespaces,
            adopted,
        };
        Ok((owner, pages))
    }

    /// The move of a page from its present place; `None` if the page is gone.
    pub(super) fn move_of(&self, page: &Found<Whole>) -> Option<Move> {
        let found = self.local.index.locate(page.slot, &page.extra.key)?;
        let (namespace, blocks) = self.namespaces[usize::from(page.slot.0)];
        let stored = blocks.checked_sub(found.place.saved)?;
        let record = PageRecord {
            namespace,
            key: page.extra.key,
            parent: page.parent,
            depth: page.extra.depth,
            birth: page.birth,
            start: found.place.start,
            blocks,
            stored,
            put_unix_s: page.extra.put_unix_s,
            checksum: page.checksum,
            seal: found.proof.seal,
        };
        found.proof.has_checksum(page.checksum).then_some(Move {
            namespace: page.slot,
            record,
            from: found.place,
        })
    }

    /// Whether a page still lies at a place.
    pub(super) fn is_at(&self, page: &Move, place: Place) -> bool {
        let found = self.local.index.locate(page.namespace, &page.record.key);
        found.is_some_and(|found| found.place == place)
    }

    /// Moves every good page and record out of a segment, and releases it. `rank` orders the pages.
    pub(super) fn empty<R: Ord>(&self, segment: SegmentId, rank: impl Fn(&Move) -> R) -> Emptied {
        let taken = self.local.with_core(|core| {
            let was_read = !core.is_unreadable(segment);
            Some((core.take_named(segment)?, was_read))
        });
        let Some((victim, was_read)) = taken else {
            return Emptied::Failed;
        };
        let spot = &self.spots[segment.0 as usize];
        let read = read_descriptors(self.local.disk.as_ref(), spot, &victim);
        if read.some_unreadable && was_read {
            // The unreadable part may hold deletions, which would be undone.
            self.local
                .with_core(|core| core.finish_victim(&victim, false));
            return Emptied::Failed;
        }
        let mut moves = self
            .local
            .with_core(|core| core.plan_whole(&victim, &read.blocks));
        moves.sort_by_key(rank);
        let mut rest = moves.as_slice();
        let mut moved = Emptied::Yes;
        while !rest.is_empty() && moved == Emptied::Yes {
            let (now, later) = rest.split_at(batch(rest, MOVE_BYTES / BLOCK_BYTES as u64));
            moved = Emptied::after(&move_pages(&self.local, now));
            rest = later;
        }
        self.local.with_core(|core| {
            // A page that recovery could still name stays where it is until its descriptor can be
            // read again.
            if moved == Emptied::Yes && core.live_in(segment) > 0 {
                moved = Emptied::Failed;
            }
            let is_released = core.finish_victim(&victim, moved == Emptied::Yes);
            match moved {
                // A record has no place elsewhere.
                Emptied::Yes if !is_released => Emptied::NoRoom,
                moved => moved,
            }
        })
    }

    /// Releases sealed segments in which nothing counts any more. Returns them.
    pub(super) fn give_back_dead(&self) -> Result<Vec<SegmentId>, StoreError> {
        let sealed = self.local.with_core(|core| core.sealed());
        let mut given_back = Vec::new();
        for view in sealed.iter().filter(|view| view.live == 0) {
            if self.empty(view.segment, |page| page.from) == Emptied::Yes {
                given_back.push(view.segment);
            }
        }
        if !given_back.is_empty() {
            opening::settle(&self.local)?;
        }
        Ok(given_back)
    }

    /// Turns dead blocks into free ones: empties the segment with the fewest live blocks, with all
    /// its pages kept, while `kept_free` segments stay free. A segment with few dead blocks
    /// qualifies only if it `is_wasted`. Returns the segment, or `None` if no segment qualifies or
    /// can be emptied.
    pub(super) fn gain_room<R: Ord>(
        &self,
        kept_free: u64,
        is_wasted: impl Fn(SegmentId) -> bool,
        rank: impl Fn(&Move) -> R,
    ) -> Result<Option<SegmentId>, StoreError> {
        let sealed = self.local.with_core(|core| core.sealed());
        let room = self.room_beside(kept_free);
        let least = u64::from(self.volumes.superblock().segment_blocks) / GAIN_SHARE;
        let worth = sealed
            .iter()
            .filter(|view| (view.dead >= least || is_wasted(view.segment)) && view.live <= room);
        let Some(view) = worth.min_by_key(|view| (view.live, view.segment)) else {
            return Ok(None);
        };
        let emptied = self.empty(view.segment, rank) == Emptied::Yes;
        opening::settle(&self.local)?;
        Ok(emptied.then_some(view.segment))
    }

    /// Blocks that copies can take while `kept_free` segments stay free.
    pub(super) fn room_beside(&self, kept_free: u64) -> u64 {
        let room = self.local.with_core(|core| core.room_for_copies());
        room.saturating_sub(kept_free * u64::from(self.volumes.superblock().segment_blocks))
    }

    /// Writes all waiting records, makes everything durable, and closes the store in order. Returns
    /// the number of evictions for whose records there was no room.
    pub(super) fn close(&mut self) -> Result<usize, StoreError> {
        opening::mark_clean(&self.local, &mut self.volumes)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.local.disk.shutdown();
        // The disk has answered every operation: nothing of this epoch can reach the volumes any
        // more.
        for volume in self.volumes.list.iter_mut().filter_map(Option::take) {
            volume.unlock();
        }
    }
}

/// Fingerprint and blocks of a plain page of each namespace.
pub(super) fn sizes(namespaces: &[NamespaceInit]) -> Vec<(Fingerprint, u32)> {
    namespaces
        .iter()
        .map(|init| (init.fingerprint, init.page_blocks))
        .collect()
}

/// Blocks of a page as it is stored.
pub(super) fn stored_blocks(sizes: &[(Fingerprint, u32)], page: &Found<Whole>) -> u32 {
    let (_, plain) = sizes[usize::from(page.slot.0)];
    plain.saturating_sub(page.place.saved)
}

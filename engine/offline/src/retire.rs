//! Retires a volume: its pages move to the other volumes, and the store goes on without it.
//!
//! Nothing is placed on the volume any more. Pages that the others have no room for are evicted,
//! the coldest of the whole store first: after an open those are the oldest. When the volume holds
//! nothing and all is durable, its copies of the keyring are blanked: no keyring of an earlier time
//! may stay on a volume that leaves the store. Then the superblocks of the other volumes record it
//! as given up, the first one first, which counts. At last its own superblock is blanked. A kill
//! before the first superblock leaves a store with all its volumes, whose next open writes the
//! keyring again; a later kill leaves a store without this one.

use std::path::{Path, PathBuf};

use larder_base::memory::AlignedBuf;
use larder_base::system::files;
use larder_core::capacity::{segments_min, usable_blocks};
use larder_core::core::Core;
use larder_core::index::SegmentId;
use larder_disk::mailbox::{WriteAt, sync_all, write_all};
use larder_format::{BLOCK_BYTES, KEYRING_BYTES, OpenState};
use larder_store::api::OpenOptions;
use larder_store::error::{StoreError, io_error};
use larder_store::recovery::{Whole, spots_in};
use larder_store::store::opening::{Opening, open_volumes, settle};
use larder_store::volume::{Access, Volume, Volumes};
use serde::Serialize;

use super::owner::{Emptied, Owner, Progress};

/// Failed tries to empty a segment, before the retirement fails. A refused write goes to another
/// segment at the next try.
const FAILURES_MAX: u32 = 3;

/// The result of a retirement, or of a dry run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Retired {
    /// Pages on the volume, and their bytes.
    pub pages: u64,
    /// Their bytes.
    #[serde(rename = "live_bytes")]
    pub bytes: u64,
    /// Bytes of pages beyond the room of the other volumes; in a dry run alone.
    pub excess_bytes: u64,
    /// Pages copied; some may count twice.
    #[serde(rename = "pages_moved")]
    pub moved_pages: u64,
    /// Pages evicted, for want of room.
    pub evicted_pages: u64,
    /// Pages whose bytes did not match their checksum: dropped, as a get would drop them.
    pub damaged_pages: u64,
    /// Pages whose writes the last crash had interrupted: dropped.
    pub unfinished_pages: u64,
    /// The store has given the volume up before: nothing was done.
    #[serde(skip)]
    pub was_retired: bool,
    /// Whether `progress` ended it early: the store keeps the volume.
    pub interrupted: bool,
}

/// Retires the volume at `volume` from the store at `path`. With `dry_run` nothing is written.
/// Nothing is done to a volume that the store has given up already.
///
/// # Errors
/// [`StoreError::Usage`] for a file that is no further volume of the store, and if the store would
/// be too small; [`StoreError::Locked`] when a process has it open, [`StoreError::Unsound`] when
/// structures are damaged, else as for an open. After any error the store is sound, and has all its
/// volumes unless a superblock could not be written.
pub fn retire(
    path: &Path,
    volume: &Path,
    options: &OpenOptions,
    dry_run: bool,
    progress: &mut Progress<'_>,
) -> Result<Retired, StoreError> {
    let access = match dry_run {
        true => Access::Held,
        false => Access::Exclusive,
    };
    let (volumes, disk) = open_volumes(path, options, access)?;
    let opening: Opening<Whole> = Opening::new(volumes, disk, options)?;
    let (index, outcome) = match plan(path, volume, &opening) {
        Ok(plan) if !dry_run && !plan.1.was_retired => plan,
        outcome => {
            opening.give_up();
            return outcome.map(|(_, outcome)| outcome);
        }
    };
    let spots = spots_in(&opening.volumes);
    let on_it = (0..).zip(&spots).filter(|(_, spot)| spot.volume == index);
    let segments: Vec<SegmentId> = on_it.map(|(id, _)| SegmentId(id)).collect();
    let (owner, _) = Owner::begin(opening, &segments, options)?;
    Retirement {
        owner,
        index,
        outcome,
    }
    .run(&segments, progress)
}

/// The index of the volume, and the pages on it.
fn plan(
    path: &Path,
    volume: &Path,
    opening: &Opening<Whole>,
) -> Result<(usize, Retired), StoreError> {
    let volumes = &opening.volumes;
    let index = index_of(volumes, volume)?;
    if volumes.list[index].is_none() {
        let outcome = Retired {
            was_retired: true,
            ..Retired::default()
        };
        return Ok((index, outcome));
    }
    if !opening.recovery.damage.is_empty() {
        return Err(StoreError::Unsound {
            path: path.to_owned(),
            flaws: opening.recovery.damage.len(),
        });
    }
    let superblock = volumes.superblock();
    let others = volumes.present().filter(|(other, _)| *other != index);
    let count = others.clone().count();
    let segments = others.map(|(other, _)| u64::from(superblock.volumes[other].segments));
    let segments: u64 = segments.sum();
    if segments < segments_min(count) {
        return Err(StoreError::Usage(format!(
            "the other volumes have {segments} segments, and a store on so many volumes needs {}; \
             add another volume first (`larder volume add`)",
            segments_min(count)
        )));
    }
    let sizes = super::owner::sizes(&opening.recovery.recovered.namespaces);
    let spots = spots_in(volumes);
    let mut outcome = Retired::default();
    let mut taken = 0;
    for page in &opening.pages {
        let blocks = super::owner::stored_blocks(&sizes, page);
        taken += larder_core::capacity::footprint(superblock.segment_blocks, blocks);
        if spots[page.place.segment.0 as usize].volume == index {
            outcome.pages += 1;
            outcome.bytes += u64::from(blocks) * BLOCK_BYTES as u64;
        }
    }
    let usable = usable_blocks(segments, count, superblock.segment_blocks);
    outcome.excess_bytes = taken.saturating_sub(usable) * BLOCK_BYTES as u64;
    Ok((index, outcome))
}

/// The index of the volume that a path leads to, which may have been given up. The first volume, by
/// which the store is opened, cannot go.
fn index_of(volumes: &Volumes, path: &Path) -> Result<usize, StoreError> {
    let file = files::look(path).map(|found| found.id);
    let file = file.map_err(|e| io_error("looking at the volume", path, e))?;
    let is_it = |of: &Path| files::look(of).is_ok_and(|found| found.id == file);
    let found = volumes.present().find(|(_, volume)| is_it(&volume.path));
    let refused = |why: &str| StoreError::Usage(format!("{}: {why}", path.display()));
    match found {
        Some((0, _)) => Err(refused(
            "the first volume, by which the store is opened, cannot be retired; make a new store, \
             and move the pages with `larder export` and `larder import`",
        )),
        Some((index, _)) => Ok(index),
        None => given_up(volumes, path)
            .ok_or_else(|| refused("no volume of this store; `larder inspect` lists its volumes")),
    }
}

/// The index of the volume that was at this path and has been given up.
fn given_up(volumes: &Volumes, path: &Path) -> Option<usize> {
    let path = files::resolve(path).ok()?;
    let mut entries = volumes.superblock().volumes.iter();
    entries.position(|entry| entry.lost && Path::new(&entry.path) == path)
}

struct Retirement {
    owner: Owner,
    index: usize,
    outcome: Retired,
}

impl Retirement {
    fn run(
        mut self,
        segments: &[SegmentId],
        progress: &mut Progress<'_>,
    ) -> Result<Retired, StoreError> {
        let index = self.index;
        self.owner.local.with_core(|core| core.retire(index, 0));
        self.give_back()?;
        let total = self.live_in(segments);
        for id in segments {
            let left = self.live_in(segments);
            let bytes = |blocks: u64| blocks * BLOCK_BYTES as u64;
            let done = bytes(total.saturating_sub(left));
            if progress(done, bytes(total)).is_break() {
                self.outcome.interrupted = true;
                break;
            }
            self.empty(*id)?;
        }
        let counters = self.owner.local.with_core(|core| core.counters());
        self.outcome.moved_pages = counters.store.moved;
        self.outcome.evicted_pages = counters.store.evicted;
        self.outcome.damaged_pages = counters.store.damaged;
        self.outcome.unfinished_pages = counters.store.unfinished;
        self.outcome.excess_bytes = 0;
        self.owner.close()?;
        if !self.outcome.interrupted {
            self.give_up()?;
        }
        Ok(self.outcome)
    }

    fn live_in(&self, segments: &[SegmentId]) -> u64 {
        let local = &self.owner.local;
        local.with_core(|core| segments.iter().map(|id| core.live_in(*id)).sum())
    }

    /// Records the evictions, and releases segments in which nothing counts any more.
    fn give_back(&self) -> Result<(), StoreError> {
        self.owner.local.with_core(Core::write_departures);
        self.owner.give_back_dead().map(drop)
    }

    /// Empties a segment for good. Pages are evicted for want of room alone.
    fn empty(&self, id: SegmentId) -> Result<(), StoreError> {
        let local = &self.owner.local;
        let mut failures = 0;
        while local.with_core(|core| core.holds_something(id)) {
            let emptied = self.owner.empty(id, |page| page.from);
            settle(local)?;
            match emptied {
                Emptied::Yes => {}
                Emptied::NoRoom => self.make_room(id)?,
                Emptied::Failed if failures < FAILURES_MAX => failures += 1,
                Emptied::Failed => return Err(self.not_emptied(id)),
            }
        }
        Ok(())
    }

    /// Makes room for pages of this segment on the other volumes: dead blocks first, then the
    /// coldest pages.
    fn make_room(&self, id: SegmentId) -> Result<(), StoreError> {
        let rank = |page: &larder_core::core::Move| page.from;
        if self.owner.gain_room(0, |_| false, rank)?.is_some() {
            return Ok(());
        }
        let blocks = u64::from(self.owner.spots[id.0 as usize].segment_blocks);
        let evicted = self.owner.local.with_core(|core| {
            let before = core.counters().store.evicted;
            core.retire(self.index, blocks);
            core.counters().store.evicted - before
        });
        if evicted == 0 {
            return Err(StoreError::NoRoom);
        }
        self.give_back()
    }

    fn not_emptied(&self, id: SegmentId) -> StoreError {
        let number = self.owner.spots[id.0 as usize].number;
        let volume = self.owner.volumes.list[self.index].as_ref();
        StoreError::NotEmptied {
            path: volume.map_or_else(PathBuf::new, |volume| volume.path.clone()),
            segment: number,
        }
    }

    /// Records the empty volume as given up, and blanks its superblock.
    fn give_up(&mut self) -> Result<(), StoreError> {
        let volumes = &mut self.owner.volumes;
        let Some(retired) = volumes.list[self.index].take() else {
            return Ok(());
        };
        if volumes.keys().is_some() {
            self.blank(&retired, &retired.keyring_places(), KEYRING_BYTES)?;
        }
        let Owner { volumes, local, .. } = &mut self.owner;
        let disk = local.disk.as_ref();
        let recorded = volumes.update(disk, |superblock| superblock.state = OpenState::Clean);
        // From here on the store does not look for it.
        let blanked = recorded.and_then(|()| {
            let places = retired.superblock_places().concat();
            self.blank(&retired, &places, BLOCK_BYTES)
        });
        retired.unlock();
        blanked
    }

    /// Writes zeros of this length to places of the retired volume, and syncs it.
    fn blank(&self, retired: &Volume, places: &[u64], bytes: usize) -> Result<(), StoreError> {
        let disk = self.owner.local.disk.as_ref();
        let mut writes = Vec::new();
        for offset in places {
            writes.push(WriteAt {
                volume: self.index,
                offset: *offset,
                memory: AlignedBuf::zeroed(bytes)
                    .map_err(|e| io_error("retiring", &retired.path, e))?,
            });
        }
        let mut results = write_all(disk, writes);
        results.extend(sync_all(disk, &[self.index]));
        let failed = |e| io_error("blanking", &retired.path, e);
        results
            .into_iter()
            .try_for_each(|done| done.map_err(failed))
    }
}

//! Adds a volume to a store.
//!
//! The new volume is complete, and has its name, before any superblock lists it. The superblock of
//! the first volume counts, and is changed before those of the others. So a kill leaves the store
//! without the new volume, or with it; the same call again finishes.

use std::path::{Path, PathBuf};

use larder_base::system::holder::this_holder;
use larder_disk::Patience;
use larder_format::{
    BLOCK_BYTES, Geometry, OVERHEAD_BYTES, Superblock, VOLUMES_MAX, VolumeEntry, VolumeId,
    segments_that_fit,
};

use super::checks::{absolute, identity, identity_bytes, size_of};
use super::options::{CreateOptions, Created};
use super::{Plan, Target, prewrite};
use crate::error::StoreError;
use crate::volume::{Access, Found};

/// Adds a volume at `new` to the store whose first volume is at `path`. Of the options, `size` is
/// the size of the new volume: by default that of the largest other one, or the whole device;
/// `volumes` are places of the other volumes. A file that is a volume of the store already stays as
/// it is.
///
/// # Errors
/// [`StoreError::Locked`] when a process has the store open; [`StoreError::Usage`] when the store
/// has as many volumes as it may; else as for a creation.
pub fn add(path: &Path, new: &Path, options: &CreateOptions<'_>) -> Result<Created, StoreError> {
    let (mut volumes, disk) = options.unlock(path, Access::Exclusive)?;
    let superblock = volumes.superblock().clone();
    let paths = volumes.present().map(|(_, volume)| volume.path.clone());
    let mut paths: Vec<PathBuf> = paths.collect();
    let is_there = paths.iter().any(|path| identity(path) == identity(new));
    if is_there {
        if !options.dry_run {
            volumes.mend_keyring(disk.as_ref())?;
            // A call that was killed may have left volumes that do not list it.
            volumes.update(disk.as_ref(), |_| {})?;
        }
        return Ok(Created::of(&superblock, paths, false));
    }
    let Some(index) = index_of_next(&superblock) else {
        return Err(StoreError::Usage(format!(
            "a store has at most {VOLUMES_MAX} volumes, those that were retired included; make a \
             new store, and move the pages with `larder export` and `larder import`"
        )));
    };
    let plan = plan(&superblock, new, options)?;
    // An addition that was killed leaves a volume that no other one lists.
    let force = options.force || is_unlisted(new, &superblock, index);
    let mut entry = VolumeEntry {
        id: VolumeId::from_bytes(identity_bytes()?),
        segments: plan.geometry.segments(),
        lost: false,
        path: String::new(),
    };
    paths.push(new.to_owned());
    let mut added = superblock.clone();
    if options.dry_run {
        Target::check(new, force, plan.volume_bytes)?;
        added.volumes.push(entry);
        return Ok(Created::of(&added, paths, true));
    }
    let mut target = Target::open(new, force)?;
    entry.path = absolute(new)?;
    added.volumes.push(entry.clone());
    target.allocate(plan.volume_bytes, options.prewrite)?;
    if options.prewrite {
        prewrite(&target, 0..plan.volume_bytes, 0, plan.volume_bytes, options)?;
    } else {
        plan.blank(&target, 0)?;
    }
    volumes.mend_keyring(disk.as_ref())?;
    let keyring = volumes.newest_keyring(disk.as_ref())?;
    if let Some(keyring) = &keyring {
        target.write_keyring(keyring)?;
    }
    target.write_superblock(&Superblock {
        volume: index,
        generation: 1,
        keyring: keyring.map_or(0, |keyring| keyring.generation),
        quotas: 0,
        holder: this_holder(),
        features: superblock.features.written_here(),
        ..added.clone()
    })?;
    target.name()?;
    target.keep();
    volumes.update(disk.as_ref(), |superblock| {
        superblock.volumes.push(entry.clone());
    })?;
    Ok(Created::of(&added, paths, true))
}

/// The index of a further volume, if the store may have one.
fn index_of_next(superblock: &Superblock) -> Option<u16> {
    let count = superblock.volumes.len();
    u16::try_from(count).ok().filter(|_| count < VOLUMES_MAX)
}

/// Whether the file at `path` would be this volume of the store, and was never used as such. A used
/// one may be missing in an old copy of the first volume.
fn is_unlisted(path: &Path, of: &Superblock, index: u16) -> bool {
    let found = Found::at(path, Access::ReadOnly, &Patience::none());
    found.is_ok_and(|found| {
        found.is(of.store, usize::from(index)) && found.superblock.generation == 1
    })
}

fn plan(
    superblock: &Superblock,
    new: &Path,
    options: &CreateOptions<'_>,
) -> Result<Plan, StoreError> {
    let segment_bytes = u64::from(superblock.segment_blocks) * BLOCK_BYTES as u64;
    let others = superblock.volumes.iter().filter(|entry| !entry.lost);
    let largest = others.map(|entry| entry.segments).max().unwrap_or(0);
    let size = match size_of(&[new.to_owned()], options) {
        Err(StoreError::NoSize(_)) => OVERHEAD_BYTES + u64::from(largest) * segment_bytes,
        size => size?,
    };
    let segments = segments_that_fit(size, segment_bytes);
    if segments == 0 {
        return Err(StoreError::TooSmall {
            reason: format!("a volume of {size} bytes has no segment of {segment_bytes} bytes"),
            needed: OVERHEAD_BYTES + segment_bytes,
            smaller_segments: false,
        });
    }
    let geometry = Geometry::new(superblock.segment_blocks, segments)
        .map_err(|e| StoreError::Usage(e.to_string()))?;
    Ok(Plan {
        volume_bytes: size / BLOCK_BYTES as u64 * BLOCK_BYTES as u64,
        geometry,
        volumes: 1,
    })
}

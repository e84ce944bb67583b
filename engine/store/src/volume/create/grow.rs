//! Enlarges the volumes of a store.

use std::path::{Path, PathBuf};

use larder_format::{
    BLOCK_BYTES, Geometry, OVERHEAD_BYTES, Superblock, TAIL_BYTES, segments_that_fit, tail_offset,
};

use super::checks::{held, size_of};
use super::options::{CreateOptions, Created};
use super::{Plan, Target, prewrite};
use crate::error::StoreError;
use crate::volume::Access;

/// Enlarges every volume evenly, up to `size` in all. Existing content is not changed; the new
/// segments come after it. A store that has the size already stays as it is.
pub(super) fn grow(path: &Path, options: &CreateOptions<'_>) -> Result<Created, StoreError> {
    let (mut volumes, disk) = options.unlock(path, Access::Exclusive)?;
    let superblock = volumes.superblock().clone();
    let segment_bytes = u64::from(superblock.segment_blocks) * BLOCK_BYTES as u64;
    if options
        .segment_size
        .is_some_and(|size| size != segment_bytes)
    {
        return Err(StoreError::Usage(format!(
            "the store has segments of {segment_bytes} bytes; growing does not change that"
        )));
    }
    let paths: Vec<PathBuf> = volumes
        .present()
        .map(|(_, volume)| volume.path.clone())
        .collect();
    let targets = volumes
        .present()
        .map(|(_, volume)| Ok((Target::of(volume)?, volume.geometry()?)))
        .collect::<Result<Vec<_>, StoreError>>()?;
    let file_bytes = targets.iter().map(|(target, _)| target.file.bytes).min();
    let size = size_of(&paths, options)?;
    let (plan, is_grown) = Plan::grown(&superblock, size, file_bytes.unwrap_or(0))?;
    if options.dry_run || !is_grown {
        return Ok(Created {
            is_grown,
            ..plan.created(paths, superblock.keyring != 0)
        });
    }
    // The copies at the start are whole before the copy at the former end is given up.
    volumes.mend_keyring(disk.as_ref())?;
    if let Some(error) = volumes.mend_quotas(disk.as_ref())? {
        return Err(error);
    }
    // The new end is written before the new segments, which may lie where the former end is. A
    // superblock may state a larger size only when the length of its file is durable.
    let mut each = targets.iter();
    let durable = each
        .try_for_each(|(target, _)| plan.lengthen(target, options))
        .and_then(|()| volumes.move_ends(disk.as_ref()))
        .and_then(|()| {
            let mut each = targets.iter();
            each.try_for_each(|(target, there)| plan.enlarge(target, *there, options))
        })
        .and_then(|()| volumes.sync(disk.as_ref()));
    if let Err(error) = durable {
        // No superblock states the larger size yet.
        targets.iter().for_each(|(target, _)| target.shrink());
        return Err(error);
    }
    let segments = plan.geometry.segments();
    volumes.update(disk.as_ref(), |superblock| {
        for entry in superblock.volumes.iter_mut().filter(|entry| !entry.lost) {
            entry.segments = segments;
        }
    })?;
    Ok(Created {
        is_grown,
        ..plan.created(paths, superblock.keyring != 0)
    })
}

impl Plan {
    /// The sizes of a store after it is enlarged to `size`, and whether it is smaller now.
    /// `file_bytes` is the length of its shortest volume.
    fn grown(
        superblock: &Superblock,
        size: u64,
        file_bytes: u64,
    ) -> Result<(Plan, bool), StoreError> {
        let there = superblock.volumes.iter().filter(|entry| !entry.lost);
        let volumes = there.count();
        let segment_bytes = u64::from(superblock.segment_blocks) * BLOCK_BYTES as u64;
        let volume_bytes = size / volumes as u64 / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        let segments = segments_that_fit(volume_bytes, segment_bytes);
        let there = superblock.volumes.iter().filter(|entry| !entry.lost);
        let most = there.map(|entry| entry.segments).max();
        let most = most.unwrap_or(0);
        let mut there = superblock.volumes.iter().filter(|entry| !entry.lost);
        let is_there = volume_bytes <= file_bytes && there.all(|entry| entry.segments == segments);
        if segments <= most && !is_there {
            let needed = (OVERHEAD_BYTES + (u64::from(most) + 1) * segment_bytes) * volumes as u64;
            return Err(StoreError::TooSmall {
                reason: format!(
                    "{}, and the store has {most}, which grows by whole segments and never shrinks",
                    held(size, segments, segment_bytes, volumes)
                ),
                needed,
                smaller_segments: false,
            });
        }
        let geometry = Geometry::new(superblock.segment_blocks, segments)
            .map_err(|e| StoreError::Usage(e.to_string()))?;
        let plan = Plan {
            volume_bytes,
            geometry,
            volumes,
        };
        Ok((plan, !is_there))
    }

    /// Allocates the missing blocks of a volume, and blanks its new end. The end of a device stays
    /// where it is.
    fn lengthen(&self, target: &Target, options: &CreateOptions<'_>) -> Result<(), StoreError> {
        target.allocate(self.volume_bytes, options.prewrite)?;
        let length = target.length()?;
        if tail_offset(length) == tail_offset(target.file.bytes) {
            return Ok(());
        }
        target.blank(tail_offset(length)..length)
    }

    /// Prepares the new segments of a volume with these segments. Bytes beyond these are left by an
    /// enlargement that was killed, or by the former end.
    fn enlarge(
        &self,
        target: &Target,
        there: Geometry,
        options: &CreateOptions<'_>,
    ) -> Result<(), StoreError> {
        if !options.prewrite {
            return self.blank(target, there.segments());
        }
        // All bytes up to the new end, which is written.
        let end = self.volume_bytes.min(tail_offset(target.length()?));
        let bytes = there.volume_bytes() - TAIL_BYTES..end;
        let total = bytes.end.saturating_sub(bytes.start);
        prewrite(target, bytes, 0, total, options)
    }
}

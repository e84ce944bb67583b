//! The options of a creation, and its result.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_core::capacity::usable_blocks;
use larder_disk::Disk;
use larder_disk::probe::Want;
use larder_format::{BLOCK_BYTES, OVERHEAD_BYTES, Superblock};
use larder_seal::WrappingKey;

use crate::api::OpenOptions;
use crate::error::StoreError;
use crate::volume::{Access, Volumes};

/// Receives the progress of the prewrite. May end it.
pub type Progress<'a> = dyn Fn(u64, u64) -> ControlFlow<()> + 'a;

/// Options of a creation: `CreateOptions::new(1 << 30).with(|o| o.prewrite = true)`.
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct CreateOptions<'a> {
    /// Bytes of all volumes together. For block devices zero means the whole device. Pages take at
    /// most 7/8 of it, in a small store far less, because some segments stay empty.
    pub size: u64,
    /// Bytes of a segment; `None` for the size that suits the store and
    /// [`CreateOptions::page_bytes`] ([`fit::segment_bytes_for`](crate::fit::segment_bytes_for)).
    pub segment_size: Option<u64>,
    /// Bytes on the device of the pages that the store will keep, if they are known
    /// ([`fit`](crate::fit)).
    pub page_bytes: Option<u64>,
    /// Volumes after the first.
    pub volumes: Vec<PathBuf>,
    /// The key that wraps the master key of the store. With it the store is encrypted, or has to
    /// be, if it is there.
    pub wrapping: Option<WrappingKey>,
    /// Write every block once: overwriting is up to 2.3 times as fast as the first write into
    /// preallocated space.
    pub prewrite: bool,
    /// Enlarge an existing store to `size`.
    pub grow: bool,
    /// Leave a store that is at the path as it is, also one in use. Its sizes are not compared with
    /// these options.
    pub if_absent: bool,
    /// Overwrite any content.
    pub force: bool,
    /// Check everything, change nothing.
    pub dry_run: bool,
    /// Receives bytes done and bytes in all. A break ends the creation like a failure.
    pub progress: Option<&'a Progress<'a>>,
}

impl<'a> CreateOptions<'a> {
    /// A store of so many bytes, with the defaults for all else.
    #[must_use]
    pub fn new(size: u64) -> CreateOptions<'a> {
        CreateOptions {
            size,
            ..CreateOptions::default()
        }
    }

    /// These options, changed by `change`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// The volumes of the store at `path`, unlocked with the key of these options.
    pub(super) fn unlock(
        &self,
        path: &Path,
        access: Access,
    ) -> Result<(Volumes, Arc<dyn Disk>), StoreError> {
        let by_threads = OpenOptions {
            disk: Want::Threads,
            depth: 1,
            volumes: self.volumes.clone(),
            wrapping: self.wrapping.clone(),
            ..OpenOptions::default()
        };
        Volumes::open_unlocked(path, &by_threads, access, None)
    }
}

/// The created store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Created {
    /// Segments on all volumes.
    pub segments: u64,
    /// Bytes of each segment.
    pub segment_bytes: u64,
    /// Most bytes of pages that the store keeps.
    pub usable_bytes: u64,
    /// Bytes of all volumes.
    pub capacity_bytes: u64,
    /// Every volume.
    pub volumes: Vec<PathBuf>,
    /// Whether an existing store was enlarged. Not if it had the size already.
    pub is_grown: bool,
    /// Whether the store was there already, and is as it was: [`CreateOptions::if_absent`].
    pub is_present: bool,
    /// Whether the store is encrypted.
    pub is_encrypted: bool,
}

impl Created {
    /// The store of a superblock.
    pub(super) fn of(of: &Superblock, volumes: Vec<PathBuf>, is_grown: bool) -> Created {
        let entries = of.volumes.iter().filter(|entry| !entry.lost);
        let segments: u64 = entries.map(|entry| u64::from(entry.segments)).sum();
        let segment_bytes = u64::from(of.segment_blocks) * BLOCK_BYTES as u64;
        let usable = usable_blocks(segments, volumes.len(), of.segment_blocks);
        Created {
            segments,
            segment_bytes,
            usable_bytes: usable * BLOCK_BYTES as u64,
            capacity_bytes: OVERHEAD_BYTES * volumes.len() as u64 + segments * segment_bytes,
            volumes,
            is_grown,
            is_present: false,
            is_encrypted: of.keyring != 0,
        }
    }
}

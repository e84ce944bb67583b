//! A store over a simulated disk, and the view of a simulation into it.

use std::sync::Arc;

use larder_core::core::{Core, Emptying, Victim};
use larder_core::index::{Index, SegmentId};
use larder_disk::Disk;
use larder_format::{Clock, Superblock};
use larder_seal::WrappingKey;

use super::opening::{Opening, begin_run, config};
use super::{LocalStore, given_up};
use crate::api::OpenOptions;
use crate::error::StoreError;
use crate::recovery::Recovery;
use crate::volume::Volumes;
use crate::volume::simulated::volumes;

/// Unlocks the keyring, as an opening of files does.
fn unlocked(
    mut volumes: Volumes,
    disk: &Arc<dyn Disk>,
    options: &OpenOptions,
) -> Result<Volumes, StoreError> {
    if let Some(wrapping) = &options.wrapping
        && let Err(error) = volumes.unlock_keyring(disk.as_ref(), wrapping)
    {
        disk.shutdown();
        return Err(error);
    }
    Ok(volumes)
}

impl LocalStore {
    /// Segments that stores of this thread have given up with their pages, for lack of room for
    /// copies. Needs no handle: a process may be killed before its handle is there.
    #[must_use]
    pub fn segments_given_up() -> u64 {
        given_up::of_this_thread()
    }

    /// Fails if a page is stored whose key is erased, as far as no task changes the keyring.
    pub fn check_keys(&self) {
        let Some(keys) = &self.local.keys else {
            return;
        };
        self.local.index.each(|page| {
            let seal = page.proof.seal;
            let may_have = seal.is_none_or(|seal| keys.may_have(seal.slot));
            assert!(may_have, "a page is stored whose key is erased: {page:?}");
        });
    }

    /// Opens a store whose volumes have these superblocks. Of each: the newer valid copy, and which
    /// copy is the other one; `None` for a lost volume. `recovered` sees the result of recovery
    /// before anything is written.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub fn open_simulated(
        superblocks: Vec<Option<(Superblock, usize)>>,
        disk: Arc<dyn Disk>,
        options: &OpenOptions,
        recovered: impl FnOnce(&Recovery, &Arc<Index>),
    ) -> Result<LocalStore, StoreError> {
        let volumes = unlocked(volumes(superblocks)?, &disk, options)?;
        let opening: Opening = Opening::new(volumes, disk, options)?;
        recovered(&opening.recovery, &opening.index);
        LocalStore::assemble(opening, options)
    }

    /// Opens a store as [`LocalStore::open_simulated`] does, up to the moment when everything is
    /// written and no thread is started. A crash would leave the volumes like this.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub fn begin_simulated(
        superblocks: Vec<Option<(Superblock, usize)>>,
        disk: Arc<dyn Disk>,
        options: &OpenOptions,
        recovered: impl FnOnce(&Recovery, &Arc<Index>),
    ) -> Result<Core, StoreError> {
        let mut opening: Opening = Opening::new(volumes(superblocks)?, disk, options)?;
        recovered(&opening.recovery, &opening.index);
        if !options.read_only {
            let (volumes, disk) = (&mut opening.volumes, opening.disk.as_ref());
            begin_run(volumes, disk, &mut opening.recovery)?;
        }
        let config = config(&opening.volumes, options);
        Ok(Core::new(config, opening.recovery.recovered, opening.index))
    }

    /// The clock of the store now.
    #[must_use]
    pub fn clock(&self) -> Clock {
        self.local.clock()
    }

    /// Looks at the core, unless a task holds it.
    pub fn try_core<R>(&self, look: impl FnOnce(&Core) -> R) -> Option<R> {
        self.local.core.try_lock().map(|core| look(&core))
    }

    /// The first segment from this number on that holds pages.
    #[must_use]
    pub fn segment_with_pages(&self, from: u32) -> Option<Victim> {
        self.local
            .with_core(|core| core.books().segment_with_pages(from))
    }

    /// Empties a segment, as a compaction has it done (`share::server::emptying`). Pages that begin
    /// at these blocks are copied first.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub fn empty_segment(
        &self,
        segment: &Victim,
        starts: Vec<u32>,
        goes_on: impl Fn() -> bool,
    ) -> Result<Option<u64>, StoreError> {
        let wanted = Emptying {
            volume: segment.volume,
            number: segment.number,
            sequence: segment.sequence,
            starts,
        };
        self.empty(&wanted, goes_on)
    }

    /// Erases a tenant. Returns how many pages are gone.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub fn erase_tenant(&self, tenant: &str) -> Result<u64, StoreError> {
        self.erase(tenant).map(|(_, pages)| pages)
    }

    /// Replaces the key that wraps the master key.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub fn rotate(&self, former: &WrappingKey, wrapping: &WrappingKey) -> Result<(), StoreError> {
        self.replace_wrap(former, wrapping)
    }

    /// Pins on all segments. `None` while a task holds the core.
    pub fn pins(&self) -> Option<u32> {
        let segments = self.try_core(|core| core.space_view().segments)?;
        let segments = u32::try_from(segments).unwrap_or(u32::MAX);
        let pins = |segment| self.local.index.pins(SegmentId(segment));
        Some((0..segments).map(pins).sum())
    }
}

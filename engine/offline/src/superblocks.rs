//! Copies the superblock of a store, and writes it back over superblocks that are destroyed.
//!
//! Both copies of a superblock lie in the first 128 KiB of a volume. The superblocks of one store
//! differ in the index of their volume, and in fields that each open changes: epoch, state, holder,
//! generation, paths. The identity of the store, its sizes and the list of its volumes change only
//! when it is enlarged, and when it gains or loses a volume. So the superblock of the first volume
//! stands for all, and a saved one stays good until then.
//!
//! A restored superblock states an open store of the highest epoch that any header, descriptor
//! block or superblock names. So the next open has a higher epoch and runs as after a crash: it
//! reads all descriptors, and no closing statement counts. Nothing is written before every volume
//! is found, locked and checked. A restoration that is killed can be run again.
//!
//! A saved superblock has no keyring. Those of an encrypted store are on its volumes, and one of
//! them has to be whole.

use std::path::{Path, PathBuf};

use larder_base::memory::AlignedBuf;
use larder_base::system::files;
use larder_base::system::holder::this_holder;
use larder_disk::DiskError;
use larder_format::{
    BLOCK_BYTES, Damage, Elsewhere, KEYRING_BYTES, KeyringCopy, OpenState, Run, Serial, StoreId,
    Superblock, SuperblockError, keyring_offsets, segments_that_fit, superblock_offsets,
};
use larder_store::error::{StoreError, io_error};
use larder_store::recovery::scan::{Bodies, GAP_BLOCKS, Spot};
use larder_store::volume::{Access, File, OF_ANOTHER, Volumes, check_used, places_of};

/// Descriptor blocks read at once.
const WINDOW_BLOCKS: u32 = 256;

/// Why superblocks could not be restored. Nothing was written, except for [`StoreError::Io`].
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The same errors as at an open.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The volume is of another store.
    #[error(
        "{path}: {OF_ANOTHER}: its segments name store {found}, the saved superblock names store \
         {saved}"
    )]
    Other {
        /// The volume.
        path: PathBuf,
        /// The store that it names.
        found: StoreId,
        /// The store of the saved superblock.
        saved: StoreId,
    },
    /// No segment of the volume shows whose it is.
    #[error("{path}: holds no segment of store {saved}, which the saved superblock names")]
    Nothing {
        /// The volume.
        path: PathBuf,
        /// The store of the saved superblock.
        saved: StoreId,
    },
    /// The volume has another size.
    #[error(
        "{path}: has {found} segments, the saved superblock lists {saved}: the store was enlarged \
         after the save, or the file was cut; restore a later save"
    )]
    Size {
        /// The volume.
        path: PathBuf,
        /// Segments by the size of the file, or by their headers.
        found: u32,
        /// Segments in the saved superblock.
        saved: u32,
    },
    /// A superblock that is whole contradicts the saved one.
    #[error(
        "{0}: its superblock is whole and lists other volumes or sizes than the saved one: the \
         store was changed after the save; restore a later save"
    )]
    Changed(PathBuf),
}

/// The result of a restoration.
#[derive(Clone, Debug)]
pub struct Restored {
    /// The volumes, the first one first.
    pub volumes: Vec<PathBuf>,
    /// Volumes whose superblocks were destroyed. With none, nothing was written.
    pub destroyed: usize,
    /// The epoch in the restored superblocks.
    pub run: Run,
}

/// The superblock that stands for all volumes of the store at `path`, which may be in use.
///
/// # Errors
/// As for an open.
pub fn superblock_to_save(path: &Path) -> Result<Superblock, StoreError> {
    // The first volume is enough.
    let volumes = Volumes::open_any(path, &[], Access::ReadOnly, true)?;
    Ok(volumes.superblock().clone())
}

/// Writes the superblocks of all volumes of the store at `path`, if one of them is destroyed.
/// `elsewhere` are places of volumes that have moved. With `dry_run` nothing is written.
///
/// # Errors
/// See [`RestoreError`]; a process has the store open, or a volume is missing.
pub fn restore(
    path: &Path,
    elsewhere: &[PathBuf],
    saved: &Superblock,
    dry_run: bool,
) -> Result<Restored, RestoreError> {
    let search = Search {
        first: path,
        elsewhere,
        saved,
        dry_run,
    };
    let mut volumes = Vec::new();
    for (index, entry) in saved.volumes.iter().enumerate() {
        if !entry.lost {
            volumes.push(search.find(index)?);
        }
    }
    check_used(elsewhere, volumes.iter().map(|volume| &*volume.path))?;
    // A volume whose segments were never written proves nothing.
    if !volumes.iter().any(|volume| volume.is_proven) {
        let (path, saved) = (path.to_owned(), saved.store);
        return Err(RestoreError::Nothing { path, saved });
    }
    let mut newest = saved.clone();
    newest.keyring = keyring_of(&volumes, saved)?;
    // A writer without the key may have changed a superblock: it states no keyring then.
    let is_sealed = newest.keyring != 0;
    let is_own = |whole: &Superblock| (whole.keyring != 0) == is_sealed;
    let destroyed = volumes.iter().filter(|volume| {
        let whole = volume.whole.as_ref();
        !whole.is_some_and(is_own)
    });
    let destroyed = destroyed.count();
    if destroyed > 0 && !dry_run {
        for volume in &volumes {
            let run = volume.newest_run(saved)?;
            newest.run = newest.run.max(run);
            if let Some(whole) = &volume.whole {
                newest.run = newest.run.max(whole.run);
                newest.generation = newest.generation.max(whole.generation);
                newest.quotas = newest.quotas.max(whole.quotas);
            }
        }
        if newest.run.next().is_none() {
            return Err(StoreError::RunsExhausted(path.to_owned()).into());
        }
        newest.state = OpenState::Open;
        newest.holder = this_holder();
        newest.generation = newest.generation.saturating_add(1);
        newest.features = newest.features.written_here();
        for volume in &volumes {
            if let Some(path) = recorded(&volume.path) {
                newest.volumes[volume.index].path = path;
            }
        }
        for volume in &volumes {
            volume.write(&newest)?;
        }
    }
    Ok(Restored {
        volumes: volumes.into_iter().map(|volume| volume.path).collect(),
        destroyed,
        run: newest.run,
    })
}

/// The generation of the keyring; zero for a store that is not encrypted. The volumes have the
/// keyring: a saved superblock never brings an earlier one back.
fn keyring_of(volumes: &[Volume], saved: &Superblock) -> Result<u64, RestoreError> {
    let whole = volumes.iter().filter_map(|volume| volume.whole.as_ref());
    let stated = whole.fold(saved.keyring, |most, whole| most.max(whole.keyring));
    if stated == 0 {
        return Ok(0);
    }
    let mut newest = None;
    for volume in volumes {
        for offset in keyring_offsets(volume.file.bytes) {
            let copy = volume.read(offset, KEYRING_BYTES)?;
            let copy = KeyringCopy::decode(&copy, saved.store).ok();
            newest = newest.max(copy.map(|copy| copy.generation));
        }
    }
    newest.filter(|newest| *newest >= stated).ok_or_else(|| {
        let path = volumes.first().map(|volume| volume.path.clone());
        let error = StoreError::Keyring {
            path: path.unwrap_or_default(),
            reason: format!("no whole copy has generation {stated}, or a later one"),
        };
        error.into()
    })
}

/// A path as a superblock records it, if it can.
fn recorded(path: &Path) -> Option<String> {
    let path = files::resolve(path).ok()?.into_os_string();
    let text = path.into_string().ok();
    text.filter(|text| text.len() <= larder_format::VOLUME_PATH_BYTES_MAX)
}

/// The search for the volumes of the saved superblock.
struct Search<'a> {
    first: &'a Path,
    elsewhere: &'a [PathBuf],
    saved: &'a Superblock,
    dry_run: bool,
}

/// A volume of the store, locked.
struct Volume {
    index: usize,
    path: PathBuf,
    file: File,
    /// Its superblock, if a copy is whole.
    whole: Option<Superblock>,
    /// Its superblock, or its segments, name the store.
    is_proven: bool,
}

/// The segments of a volume by their headers and first descriptor blocks, which `larder create`
/// blanks: blocks behind these may be of an earlier store.
#[derive(Default)]
struct Traces {
    own: u64,
    others: u64,
    /// Another store that they name.
    other: Option<StoreId>,
    /// Something else than zeros is there.
    is_written: bool,
    /// The last segment with a trace of this store, and one.
    segments: u32,
}

impl Traces {
    fn note(&mut self, number: u32, found: Result<(), Damage>) {
        self.is_written |= !matches!(found, Err(Damage::Blank(_)));
        match found {
            Ok(()) => {
                self.own += 1;
                self.segments = number + 1;
            }
            Err(Damage::Elsewhere(place)) => {
                self.others += 1;
                if let Elsewhere::Store { claimed, .. } = place {
                    self.other = Some(claimed);
                }
            }
            Err(_) => {}
        }
    }
}

impl Search<'_> {
    /// Finds, locks and checks a volume.
    fn find(&self, index: usize) -> Result<Volume, RestoreError> {
        if index == 0 {
            return self.take(index, self.first);
        }
        let entry = &self.saved.volumes[index];
        let mut reason = "not found".to_owned();
        for place in places_of(entry, self.first, self.elsewhere) {
            match self.take(index, &place) {
                Err(RestoreError::Store(StoreError::Io { source, .. }))
                    if source.kind() == std::io::ErrorKind::NotFound => {}
                Err(error @ (RestoreError::Other { .. } | RestoreError::Nothing { .. })) => {
                    reason = error.to_string();
                }
                taken => return taken,
            }
        }
        Err(RestoreError::Store(StoreError::VolumeMissing {
            index,
            path: PathBuf::from(&entry.path),
            reason,
        }))
    }

    /// The file at `path`, if it is the volume of this index.
    fn take(&self, index: usize, path: &Path) -> Result<Volume, RestoreError> {
        let saved = self.saved;
        let access = match self.dry_run {
            true => Access::Held,
            false => Access::Exclusive,
        };
        let mut file = File::open(path, access)?;
        match self.dry_run {
            true => file.lock_shared(path)?,
            false => file.lock(path)?,
        }
        file.measure(path)?;
        let path = path.to_owned();
        let whole = match file.superblock() {
            Ok(whole) if whole.store != saved.store || usize::from(whole.volume) != index => {
                let (found, saved) = (whole.store, saved.store);
                return Err(RestoreError::Other { path, found, saved });
            }
            Ok(whole) if !is_same_list(&whole, saved) => return Err(RestoreError::Changed(path)),
            Ok(whole) => Some(whole),
            Err(
                SuperblockError::NotLarder
                | SuperblockError::Blank
                | SuperblockError::Damaged(_)
                | SuperblockError::Invalid { .. },
            ) => None,
            Err(source) => return Err(StoreError::Superblock { path, source }.into()),
        };
        let features = whole.as_ref().unwrap_or(saved).features;
        if !features.may_be_written() {
            let features = Box::new(features);
            return Err(StoreError::UnknownFeatures { path, features }.into());
        }
        let mut volume = Volume {
            index,
            path,
            file,
            is_proven: whole.is_some(),
            whole,
        };
        volume.check(saved)?;
        Ok(volume)
    }
}

/// Whether both list the same volumes of the same sizes.
fn is_same_list(a: &Superblock, b: &Superblock) -> bool {
    let list = |of: &Superblock| -> Vec<_> {
        let entries = of.volumes.iter();
        entries
            .map(|entry| (entry.id, entry.segments, entry.lost))
            .collect()
    };
    a.segment_blocks == b.segment_blocks && list(a) == list(b)
}

impl Volume {
    /// Compares the size of the file, and its segments, with the saved superblock.
    fn check(&mut self, saved: &Superblock) -> Result<(), RestoreError> {
        let segment_bytes = u64::from(saved.segment_blocks) * BLOCK_BYTES as u64;
        let fit = segments_that_fit(self.file.bytes, segment_bytes);
        let listed = saved.volumes[self.index].segments;
        let size = |found| RestoreError::Size {
            path: self.path.clone(),
            found,
            saved: listed,
        };
        // A store need not fill its device.
        if fit < listed || fit > listed && !self.file.is_device {
            return Err(size(fit));
        }
        if self.whole.is_some() {
            return Ok(());
        }
        let traces = self.traces(saved, fit)?;
        if traces.segments > listed {
            return Err(size(traces.segments));
        }
        self.is_proven = traces.own > 0;
        let path = self.path.clone();
        match traces.other {
            Some(found) if traces.others > traces.own => {
                let saved = saved.store;
                Err(RestoreError::Other { path, found, saved })
            }
            _ if !self.is_proven && traces.is_written => {
                let saved = saved.store;
                Err(RestoreError::Nothing { path, saved })
            }
            _ => Ok(()),
        }
    }

    fn spot(&self, saved: &Superblock, number: u32) -> Spot {
        Spot {
            store: saved.store,
            volume: self.index,
            number,
            segment_blocks: saved.segment_blocks,
            // The headers have all that is asked for here.
            bodies: Bodies::Locked,
        }
    }

    fn traces(&self, saved: &Superblock, segments: u32) -> Result<Traces, RestoreError> {
        let mut traces = Traces::default();
        for number in 0..segments {
            let spot = self.spot(saved, number);
            let headers = self.read(spot.headers().offset, spot.headers().bytes)?;
            for header in spot.parse_headers(&headers) {
                traces.note(number, header.map(drop));
            }
            let block = self.read(spot.block_offset(0), BLOCK_BYTES)?;
            traces.note(number, spot.parse_block(0, &block).map(drop));
        }
        Ok(traces)
    }

    /// The highest epoch in the headers and descriptor blocks. A generation has no gap of
    /// [`GAP_BLOCKS`] among its blocks, so that none of its epoch is missed.
    fn newest_run(&self, saved: &Superblock) -> Result<Run, RestoreError> {
        let mut newest = Run::FIRST;
        for number in 0..saved.volumes[self.index].segments {
            let spot = self.spot(saved, number);
            let headers = self.read(spot.headers().offset, spot.headers().bytes)?;
            for header in spot.parse_headers(&headers).into_iter().flatten() {
                let serials = [header.sequence, header.proven, header.synced];
                newest = serials.map(Serial::run).into_iter().fold(newest, Run::max);
            }
            let most = spot.segment_blocks - larder_format::HEADER_BLOCKS;
            let (mut next, mut gap) = (0, 0);
            while next < most && gap < GAP_BLOCKS {
                let count = WINDOW_BLOCKS.min(most - next);
                let blocks = self.read(
                    spot.blocks(next, count).offset,
                    spot.blocks(next, count).bytes,
                )?;
                for (bytes, index) in blocks.rchunks_exact(BLOCK_BYTES).zip(next..) {
                    let Ok(block) = spot.parse_block(index, bytes) else {
                        gap += 1;
                        continue;
                    };
                    gap = 0;
                    let header = block.header;
                    let serials = [header.sequence, header.commit, header.synced];
                    newest = serials.map(Serial::run).into_iter().fold(newest, Run::max);
                }
                next += count;
            }
        }
        Ok(newest)
    }

    /// Reads whole blocks. Blocks that the medium does not return read as zeros.
    fn read(&self, offset: u64, bytes: usize) -> Result<Vec<u8>, StoreError> {
        let failed = |error| io_error("reading the segments", &self.path, error);
        let is_of_the_medium = |error: &std::io::Error| {
            let errno = error.raw_os_error();
            errno.is_some_and(|errno| DiskError::Os(errno).is_of_the_medium())
        };
        match self.file.read(offset, bytes) {
            Ok(mut read) => {
                read.resize(bytes, 0);
                Ok(read)
            }
            Err(error) if !is_of_the_medium(&error) => Err(failed(error)),
            Err(_) if bytes <= BLOCK_BYTES => Ok(vec![0; bytes]),
            Err(_) => {
                let offsets = (0..bytes).step_by(BLOCK_BYTES);
                let blocks = offsets.map(|at| self.read(offset + at as u64, BLOCK_BYTES));
                let blocks: Vec<Vec<u8>> = blocks.collect::<Result<_, _>>()?;
                Ok(blocks.concat())
            }
        }
    }

    /// Writes all copies, one after the other.
    fn write(&self, newest: &Superblock) -> Result<(), StoreError> {
        let own = Superblock {
            volume: u16::try_from(self.index).unwrap_or(u16::MAX),
            ..newest.clone()
        };
        let encoded = own.encode().map_err(|source| StoreError::Superblock {
            path: self.path.clone(),
            source,
        })?;
        let failed = |error| io_error("writing the superblock", &self.path, error);
        let mut memory = AlignedBuf::zeroed(BLOCK_BYTES).map_err(failed)?;
        memory.copy_from_slice(&encoded[..]);
        for offset in superblock_offsets(self.file.bytes) {
            self.file.write(offset, &memory).map_err(failed)?;
            let synced = files::sync_data(&self.file.file);
            synced.map_err(|errno| failed(std::io::Error::from_raw_os_error(errno)))?;
        }
        Ok(())
    }
}

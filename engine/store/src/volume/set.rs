//! All volumes of a store: finding them, and the operations on all of them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_base::ids::ClientId;
use larder_base::latency::DeviceLatencies;
use larder_base::memory::AlignedBuf;
use larder_base::system::files;
use larder_disk::mailbox::{WriteAt, sync_all, write_all};
use larder_disk::probe::open_disk;
use larder_disk::{Board, Common, Disk, DiskError, DiskOptions, Pacing, Patience, Witness};
use larder_format::{BLOCK_BYTES, Clock, Run, Superblock, VolumeEntry, tail_offset};

use super::file::{Access, length};
use super::{Found, OF_ANOTHER, Volume, encode, is_volume_of};
use crate::api::OpenOptions;
use crate::error::{StoreError, io_error, leaves_the_volume_unknown};
use crate::keys::Keys;

/// The number of the owner's row on the board.
pub(crate) const OWNER: u64 = 1;

/// The number of a client's row.
pub(crate) fn row_of(client: ClientId) -> u64 {
    u64::from(client.0) + 1 + OWNER
}

/// The volumes of one store, in its order; `None` for a lost volume.
#[derive(Debug)]
pub struct Volumes {
    /// Each volume.
    pub list: Vec<Option<Volume>>,
    /// The latencies of their devices.
    pub(crate) latencies: Arc<DeviceLatencies>,
    /// The pacing of their disk, and the times of its answers.
    pub(crate) pacing: Arc<Pacing>,
    pub(crate) board: Arc<Board>,
    /// The keys of an encrypted store, once its keyring is unlocked.
    pub(crate) keys: Option<Arc<Keys>>,
    /// The time that their open has left for reads that fail.
    pub patience: Arc<Patience>,
}

/// The places where a further volume of the store may be, whose first volume is at `first`: the
/// given paths, the directory of the first volume, the recorded path. Volumes in one directory may
/// have been moved, or copied, together: then the other volumes in it belong to this first volume.
pub fn places_of(
    entry: &VolumeEntry,
    first: &Path,
    elsewhere: &[PathBuf],
) -> impl Iterator<Item = PathBuf> {
    let known = PathBuf::from(&entry.path);
    let beside = first.with_file_name(known.file_name().unwrap_or_default());
    let guess = Some(beside).filter(|beside| beside != first && *beside != known);
    elsewhere.iter().cloned().chain(guess).chain([known])
}

/// How well a volume suits the first one, by their superblocks. Of several copies of a volume at
/// paths that the caller did not name, the best is used, and the first of equals. A new epoch is
/// written to the first volume before the others. So a volume with a higher epoch belongs to
/// another store: it, or the first volume, was copied. A volume with a lower epoch may be an old
/// copy. A smaller one may be a copy from before the store was enlarged.
pub fn suits(found: &Superblock, first: &Superblock) -> impl Ord + use<> {
    let segments = |of: &Superblock| {
        let entry = of.volumes.get(usize::from(found.volume));
        entry.map(|entry| entry.segments)
    };
    let is_enlarged = segments(found) == segments(first);
    (found.run <= first.run, found.run, is_enlarged)
}

/// Each volume that the caller names must be used: a name that is not used is an error.
pub fn check_used<'a>(
    named: &[PathBuf],
    used: impl Iterator<Item = &'a Path>,
) -> Result<(), StoreError> {
    let used: Vec<&Path> = used.collect();
    let file = |path: &Path| files::look(path).map(|it| it.id).ok();
    let is_same = |a: &Path, b: &Path| a == b || file(a).is_some_and(|a| file(b) == Some(a));
    let is_unused = |path: &&PathBuf| !used.iter().any(|used| is_same(used, path));
    let Some(path) = named.iter().find(is_unused) else {
        return Ok(());
    };
    let why = match Found::at(path, Access::ReadOnly, &Patience::none()) {
        Ok(_) => format!("{}: {OF_ANOTHER}, or was given up", path.display()),
        Err(error) => error.to_string(),
    };
    Err(StoreError::Usage(format!(
        "a file named as a volume is no volume of this store (`larder volume add` adds one): {why}"
    )))
}

impl Volumes {
    /// Opens all volumes of the store whose first volume is at `path`. The store must not be
    /// encrypted.
    ///
    /// # Errors
    /// See [`StoreError`]: a volume may be absent, foreign, damaged, truncated or in use.
    pub fn open(
        path: &Path,
        elsewhere: &[PathBuf],
        access: Access,
        degraded: bool,
    ) -> Result<Volumes, StoreError> {
        let volumes = Volumes::open_any(path, elsewhere, access, degraded)?;
        volumes.check_plain()?;
        Ok(volumes)
    }

    /// The same for a store that may be encrypted, for a caller that needs no metadata of pages.
    ///
    /// # Errors
    /// As [`Volumes::open`].
    pub fn open_any(
        path: &Path,
        elsewhere: &[PathBuf],
        access: Access,
        degraded: bool,
    ) -> Result<Volumes, StoreError> {
        let patience = Arc::new(Patience::default());
        let first = Volume::open(path, access, &patience)?;
        if first.superblock.volume != 0 {
            let name = first
                .superblock
                .volumes
                .first()
                .map(|entry| entry.path.clone())
                .unwrap_or_default();
            return Err(StoreError::NotFirstVolume(path.to_owned(), name));
        }
        let entries = first.superblock.volumes.clone();
        let reference = first.superblock.clone();
        let store = reference.store;
        let mut list = vec![Some(first)];
        for (index, entry) in entries.iter().enumerate().skip(1) {
            if entry.lost {
                list.push(None);
                continue;
            }
            let mut reason = "not found".to_owned();
            let mut best: Option<(PathBuf, Found)> = None;
            let mut unseen = None;
            for place in places_of(entry, path, elsewhere) {
                let is_named = elsewhere.contains(&place);
                match Found::at(&place, access, &patience) {
                    Ok(found) if found.is(store, index) => {
                        let suits = |found: &Found| suits(&found.superblock, &reference);
                        if best
                            .as_ref()
                            .is_none_or(|(_, best)| suits(best) < suits(&found))
                        {
                            best = Some((place, found));
                        }
                        if is_named {
                            break;
                        }
                    }
                    Ok(_) => reason = format!("{}: {OF_ANOTHER}", place.display()),
                    Err(error) if leaves_the_volume_unknown(&error) => unseen = Some(error),
                    // A volume in the expected place that has no usable superblock. Another copy is
                    // not looked for: it would belong to another store.
                    Err(error @ (StoreError::Superblock { .. } | StoreError::NoSuperblock(_)))
                        if !is_named =>
                    {
                        reason = error.to_string();
                        break;
                    }
                    Err(error) => reason = error.to_string(),
                }
            }
            // A volume that cannot be examined is not missing: the store must not be opened without
            // it.
            if let Some(error) = unseen
                && best.is_none()
            {
                return Err(error);
            }
            // An old copy from before an enlargement would lack a part.
            let least = u16::try_from(index).ok().and_then(|index| {
                let geometry = reference.geometry(index).ok()?;
                Some(geometry.volume_bytes())
            });
            let take = |(place, found): (PathBuf, Found)| {
                Volume::take(&place, access, found, least.unwrap_or(0), &patience)
            };
            let volume = match best.map(take) {
                None => None,
                Some(Ok(volume)) if is_volume_of(&volume.superblock, store, index) => Some(volume),
                Some(Ok(_)) => {
                    reason = format!("{}: {OF_ANOTHER}", entry.path);
                    None
                }
                Some(Err(StoreError::Truncated { .. })) if degraded => None,
                // The volume is there, and another process uses it, or did just now: this is no
                // reason to open without it.
                Some(Err(error)) => return Err(error),
            };
            if volume.is_none() && !degraded {
                return Err(StoreError::VolumeMissing {
                    index,
                    path: PathBuf::from(&entry.path),
                    reason,
                });
            }
            list.push(volume);
        }
        let volumes = Volumes {
            list,
            latencies: Arc::default(),
            pacing: Arc::default(),
            board: Arc::default(),
            keys: None,
            patience,
        };
        // The owner sends its client the paths of all volumes, under any name. If a volume is
        // missing and may be, an unused name may be its name.
        if access != Access::Client && !degraded {
            let used = volumes.present().map(|(_, volume)| volume.path.as_path());
            check_used(elsewhere, used)?;
        }
        if access == Access::Exclusive {
            elsewhere.iter().try_for_each(|path| check_place(path))?;
        }
        Ok(volumes)
    }

    /// Opens all volumes, and a disk on them, and unlocks an encrypted store with the key in the
    /// options.
    ///
    /// # Errors
    /// As [`Volumes::open`]; without the key of an encrypted store, or with one of a plain store.
    pub(crate) fn open_unlocked(
        path: &Path,
        options: &OpenOptions,
        access: Access,
        common: Option<Arc<Common>>,
    ) -> Result<(Volumes, Arc<dyn Disk>), StoreError> {
        let (elsewhere, degraded) = (&options.volumes, options.degraded);
        let Some(wrapping) = &options.wrapping else {
            let mut volumes = Volumes::open(path, elsewhere, access, degraded)?;
            let disk = volumes.open_disk(options, common, OWNER)?;
            return match volumes.refuse_disowned(disk.as_ref()) {
                Ok(()) => Ok((volumes, disk)),
                Err(error) => {
                    disk.shutdown();
                    Err(error)
                }
            };
        };
        if options
            .beneath
            .as_ref()
            .is_some_and(|beneath| !beneath.encrypts())
        {
            return Err(StoreError::Usage(format!(
                "{}: an encrypted store has no unsigned remote beneath it, which would have its \
                 pages in clear: give the remote a key file",
                path.display()
            )));
        }
        let mut volumes = Volumes::open_any(path, elsewhere, access, degraded)?;
        let disk = volumes.open_disk(options, common, OWNER)?;
        match volumes.unlock_keyring(disk.as_ref(), wrapping) {
            Ok(()) => Ok((volumes, disk)),
            Err(error) => {
                disk.shutdown();
                Err(error)
            }
        }
    }

    /// The keys of an encrypted store that is unlocked.
    #[must_use]
    pub fn keys(&self) -> Option<&Arc<Keys>> {
        self.keys.as_ref()
    }

    /// Fails if the store is encrypted.
    fn check_plain(&self) -> Result<(), StoreError> {
        match self.keyring_generation() {
            0 => Ok(()),
            _ => Err(StoreError::Sealed(self.first_path())),
        }
    }

    /// Opens the disk for these volumes, under the layer in the options. From here on all bytes go
    /// through it. Reads the superblocks that count through it. `common` is the memory that the
    /// processes of the store share, `row` the number of this one.
    ///
    /// # Errors
    /// When there is no such disk, or a superblock cannot be used any more.
    pub(crate) fn open_disk(
        &mut self,
        options: &OpenOptions,
        common: Option<Arc<Common>>,
        row: u64,
    ) -> Result<Arc<dyn Disk>, StoreError> {
        let paced = common.clone().filter(|_| options.pacing);
        self.pacing = Arc::new(paced.map_or_else(Pacing::default, Pacing::among));
        let board = common.map_or_else(Board::default, |common| Board::new(common, row));
        self.board = Arc::new(board);
        let file = |volume: &Option<Volume>| volume.as_ref().map(|volume| volume.file.clone());
        let disk_options = DiskOptions {
            files: self.list.iter().map(file).collect(),
            depth: options.depth.max(1),
            latencies: self.latencies.clone(),
            pacing: self.pacing.clone(),
            board: self.board.clone(),
        };
        let mut disk = open_disk(disk_options, options.disk)?;
        if let Some(wrapper) = &options.disk_wrapper {
            disk = wrapper.wrap(disk);
        }
        let patient = Witness::new(disk.clone(), self.patience.clone());
        for (index, volume) in self.list.iter_mut().enumerate() {
            let Some(volume) = volume else { continue };
            if let Err(error) = volume.read_superblock(&patient, index) {
                disk.shutdown();
                return Err(error);
            }
        }
        Ok(disk)
    }

    /// Carries out writes, all at once.
    ///
    /// # Errors
    /// The error of the first write that failed.
    pub fn write(&self, disk: &dyn Disk, writes: Vec<WriteAt>) -> Result<(), StoreError> {
        let volumes: Vec<usize> = writes.iter().map(|write| write.volume).collect();
        self.judge("writing", &volumes, write_all(disk, writes))
    }

    /// Makes everything written to any volume durable.
    ///
    /// # Errors
    /// The error of the first volume whose sync failed.
    pub fn sync(&self, disk: &dyn Disk) -> Result<(), StoreError> {
        let volumes: Vec<usize> = self.present().map(|(index, _)| index).collect();
        self.judge("syncing", &volumes, sync_all(disk, &volumes))
    }

    /// The same for one volume.
    pub(super) fn sync_one(&self, disk: &dyn Disk, volume: usize) -> Result<(), StoreError> {
        self.judge("syncing", &[volume], sync_all(disk, &[volume]))
    }

    /// The first error among operations on these volumes.
    fn judge(
        &self,
        doing: &'static str,
        volumes: &[usize],
        results: Vec<Result<(), DiskError>>,
    ) -> Result<(), StoreError> {
        for (volume, result) in volumes.iter().zip(results) {
            result.map_err(|error| {
                let volume = self.list.get(*volume).and_then(Option::as_ref);
                let path = volume.map_or_else(PathBuf::new, |volume| volume.path.clone());
                io_error(doing, &path, error)
            })?;
        }
        Ok(())
    }

    /// The volumes that are there.
    pub fn present(&self) -> impl Iterator<Item = (usize, &Volume)> + Clone {
        self.list
            .iter()
            .enumerate()
            .filter_map(|(index, volume)| volume.as_ref().map(|volume| (index, volume)))
    }

    /// The superblock of each volume; `None` for a lost volume.
    #[must_use]
    pub fn superblocks(&self) -> Vec<Option<&Superblock>> {
        self.list
            .iter()
            .map(|volume| volume.as_ref().map(|volume| &volume.superblock))
            .collect()
    }

    /// The superblock of the first volume, for the facts that all volumes share.
    #[must_use]
    pub fn superblock(&self) -> &Superblock {
        &self.list[0]
            .as_ref()
            .expect("a store is opened by its first volume, which is never lost")
            .superblock
    }

    /// The path of the first volume.
    pub fn first_path(&self) -> PathBuf {
        self.present()
            .next()
            .map_or_else(PathBuf::new, |(_, volume)| volume.path.clone())
    }

    /// Writes the superblocks of the volumes, the keyring and the quotas at the ends that their
    /// files have now, as they are, and makes them durable. The next update writes them there too.
    ///
    /// # Errors
    /// The error of the system.
    pub(crate) fn move_ends(&mut self, disk: &dyn Disk) -> Result<(), StoreError> {
        let mut writes = Vec::new();
        for (index, volume) in self.list.iter_mut().enumerate() {
            let Some(volume) = volume else { continue };
            volume.bytes = length(&volume.file, &volume.path)?;
            let failed = |e| io_error("writing the superblock of", &volume.path, e);
            let mut memory = AlignedBuf::zeroed(BLOCK_BYTES).map_err(failed)?;
            let encoded = encode(&volume.superblock);
            let encoded = encoded.map_err(|source| StoreError::Superblock {
                path: volume.path.clone(),
                source,
            })?;
            memory.copy_from_slice(&encoded[..]);
            writes.push(WriteAt {
                volume: index,
                offset: tail_offset(volume.bytes),
                memory,
            });
        }
        self.write(disk, writes)?;
        self.sync(disk)?;
        self.mend_keyring(disk)?;
        self.mend_quotas(disk)?.map_or(Ok(()), Err)
    }

    /// The highest epoch in any superblock.
    #[must_use]
    pub fn newest_run(&self) -> Run {
        self.present()
            .map(|(_, volume)| volume.superblock.run)
            .max()
            .unwrap_or(Run::FIRST)
    }

    /// The first volume whose superblock is of an older epoch than `run`.
    #[must_use]
    pub fn older_than(&self, run: Run) -> Option<&Volume> {
        self.present()
            .map(|(_, volume)| volume)
            .find(|volume| volume.superblock.run < run)
    }

    /// Writes the superblocks of all volumes, changed by `change`, and makes them durable: one
    /// volume after the other, and in each volume the copy that counts after the others, so that
    /// one copy is whole at every moment. All get the list of the first volume, which counts: a
    /// crash may have kept its last change from the others.
    ///
    /// # Errors
    /// The error of the system.
    pub fn update(
        &mut self,
        disk: &dyn Disk,
        change: impl Fn(&mut Superblock),
    ) -> Result<(), StoreError> {
        let listed = self.listed();
        for index in 0..self.list.len() {
            let change = |superblock: &mut Superblock| {
                superblock.volumes.clone_from(&listed);
                change(superblock);
            };
            let sync = |volumes: &Volumes| volumes.sync_one(disk, index);
            self.update_one(disk, index, change, sync)?;
        }
        Ok(())
    }

    /// The same for the first volume of a store in use. `sync` makes all writes to it durable: by
    /// the core, which has to know of a failed sync.
    ///
    /// # Errors
    /// The error of the system.
    pub fn note_clock(
        &mut self,
        disk: &dyn Disk,
        clock: Clock,
        sync: impl Fn() -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let change = |superblock: &mut Superblock| superblock.clock = clock;
        self.update_one(disk, 0, change, |_| sync())
    }

    /// The list of the first volume, with the known place of each volume.
    fn listed(&self) -> Vec<VolumeEntry> {
        let mut listed = self.superblock().volumes.clone();
        for (entry, volume) in listed.iter_mut().zip(&self.list) {
            entry.lost = volume.is_none();
            // A volume that was named because it had moved is found at its new path from then on.
            if let Some(place) = volume.as_ref().and_then(|volume| place_of(&volume.path)) {
                entry.path = place;
            }
        }
        listed
    }

    /// States the generation of the keyring in the superblocks that lack it.
    pub(super) fn state_keyring(
        &mut self,
        disk: &dyn Disk,
        generation: u64,
        sync: impl Fn(&Volumes, usize) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        for index in 0..self.list.len() {
            let volume = self.list[index].as_ref();
            if volume.is_some_and(|volume| volume.superblock.keyring != generation) {
                let change = |superblock: &mut Superblock| superblock.keyring = generation;
                self.update_one(disk, index, change, |volumes| sync(volumes, index))?;
            }
        }
        Ok(())
    }

    /// States the generation of the quotas in the superblock of the first volume.
    pub(super) fn state_quotas(
        &mut self,
        disk: &dyn Disk,
        generation: u64,
        sync: impl Fn(&Volumes) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let first = self.list[0].as_ref();
        if first.is_none_or(|first| first.superblock.quotas == generation) {
            return Ok(());
        }
        let change = |superblock: &mut Superblock| superblock.quotas = generation;
        self.update_one(disk, 0, change, sync)
    }

    fn update_one(
        &mut self,
        disk: &dyn Disk,
        index: usize,
        change: impl Fn(&mut Superblock),
        sync: impl Fn(&Volumes) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let Some(volume) = &mut self.list[index] else {
            return Ok(());
        };
        let mut superblock = volume.superblock.clone();
        change(&mut superblock);
        superblock.features = superblock.features.written_here();
        superblock.generation = volume.superblock.generation.saturating_add(1);
        // No later write has the same generation, if this one fails on the way.
        volume.superblock.generation = superblock.generation;
        let path = volume.path.clone();
        let places = volume.superblock_places();
        let encoded = encode(&superblock).map_err(|source| StoreError::Superblock {
            path: path.clone(),
            source,
        })?;
        let write = |offset| {
            let memory = AlignedBuf::zeroed(BLOCK_BYTES);
            let mut memory = memory.map_err(|e| io_error("writing", &path, e))?;
            memory.copy_from_slice(&encoded[..]);
            Ok(WriteAt {
                volume: index,
                offset,
                memory,
            })
        };
        for offsets in places {
            let writes = offsets.into_iter().map(write);
            self.write(disk, writes.collect::<Result<_, StoreError>>()?)?;
            sync(self)?;
        }
        if let Some(volume) = &mut self.list[index] {
            volume.superblock = superblock;
        }
        Ok(())
    }
}

/// A volume's path as a superblock records it, if it can be recorded.
fn place_of(path: &Path) -> Option<String> {
    let path = files::resolve(path).ok()?;
    let text = path.into_os_string().into_string().ok();
    text.filter(|text| text.len() <= larder_format::VOLUME_PATH_BYTES_MAX)
}

/// A caller that names a volume relies on its recorded path later.
fn check_place(path: &Path) -> Result<(), StoreError> {
    place_of(path)
        .map(drop)
        .ok_or_else(|| not_to_be_recorded(path))
}

/// The error for the path of a volume that no superblock can record: too long, or no UTF-8.
pub fn not_to_be_recorded(path: &Path) -> StoreError {
    StoreError::Usage(format!(
        "{}: a volume's path, links followed, is UTF-8 and at most {} bytes long; choose a \
         shorter path, or another one",
        path.display(),
        larder_format::VOLUME_PATH_BYTES_MAX
    ))
}

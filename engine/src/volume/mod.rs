//! Volumes: opens, locks and checks the files or block devices of a store.
//!
//! A volume is opened with O_DIRECT if the file system honours it. It is locked (`flock`) on the
//! same file description that the disk writes through, so that the lock lives exactly as long as
//! any write in flight. Block devices are opened with O_EXCL as well, which the kernel refuses for
//! mounted devices.
//!
//! The superblocks are read here directly as long as there is no disk: to find the volumes, and to
//! check them under the lock. From `Volumes::open_disk` on, all bytes go through that [`Disk`].

pub mod create;
pub mod holder;
pub mod holes;

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use larder_format::{
    BLOCK_BYTES, Geometry, Run, SUPERBLOCK_OFFSETS, StoreId, Superblock, SuperblockError,
    VolumeEntry, newest,
};
use rustix::fs::{FlockOperation, Mode, OFlags};

use crate::api::OpenOptions;
use crate::disk::mailbox::{ReadAt, WriteAt, read_all, sync_all, write_all};
use crate::disk::probe::open_disk;
use crate::disk::{Disk, DiskError, DiskOptions, EIO_READS_MAX};
use crate::error::StoreError;
use crate::fork::{Private, keep_private};
use crate::latency::DeviceLatencies;
use crate::memory::AlignedBuf;
use crate::runtime::Instant;
use crate::share::{guard, is_listening, socket_path};
pub use holder::{HolderState, LockHolder, this_holder};

/// How long to retry a locked volume: an io_uring may outlive its process for a moment.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
const LOCK_RETRY: Duration = Duration::from_millis(20);

/// The purpose of an open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading and writing, alone. Waits a moment for a process that is exiting.
    Exclusive,
    /// The same, without waiting.
    AtOnce,
    /// Reading, and writing at places that the owner grants, beside the owner.
    Client,
    /// Reading, beside a writer.
    ReadOnly,
    /// Reading, with writers locked out.
    Held,
}

impl Access {
    fn only_reads(self) -> bool {
        matches!(self, Access::ReadOnly | Access::Held)
    }

    fn is_exclusive(self) -> bool {
        matches!(self, Access::Exclusive | Access::AtOnce)
    }
}

/// An open volume.
#[derive(Debug)]
pub struct Volume {
    /// Its path.
    pub path: PathBuf,
    /// Its file. The lock lives as long as this description.
    pub file: Arc<OwnedFd>,
    pub(crate) private: Private,
    /// Its superblock: the newer valid copy.
    pub superblock: Superblock,
    /// The copy of the superblock that is written first: the older copy, or an unusable one. So the
    /// copy that counts is not touched before the other is whole. Known from [`Volumes::open_disk`]
    /// on.
    older_copy: usize,
    /// Whether reads and writes bypass the page cache.
    pub direct: bool,
}

/// The volumes of one store, in its order; `None` for a lost volume.
#[derive(Debug)]
pub struct Volumes {
    /// Each volume.
    pub list: Vec<Option<Volume>>,
    /// The latencies of their devices.
    pub(crate) latencies: Arc<DeviceLatencies>,
}

/// An open file that may become or be a volume.
#[derive(Debug)]
pub(crate) struct File {
    pub file: Arc<OwnedFd>,
    pub private: Private,
    pub direct: bool,
    pub bytes: u64,
    pub is_device: bool,
}

impl File {
    /// Opens an existing file or block device.
    pub(crate) fn open(path: &Path, access: Access) -> Result<File, StoreError> {
        let found =
            fs::metadata(path).map_err(|e| StoreError::io("opening the volume", path, e))?;
        let kind = found.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(StoreError::NotAVolume(path.to_owned(), kind_name(kind)));
        }
        let is_device = kind.is_block_device();
        let mut flags = OFlags::CLOEXEC | OFlags::NONBLOCK;
        flags |= if access.only_reads() {
            OFlags::RDONLY
        } else {
            OFlags::RDWR
        };
        if is_device && access.is_exclusive() {
            flags |= OFlags::EXCL;
        }
        let (file, direct) = open_direct(path, flags)?;
        // The flag is only for the open, so that it does not wait. With it, a kernel before 5.15
        // fails io_uring requests that would have to wait.
        rustix::fs::fcntl_getfl(&file)
            .and_then(|set| rustix::fs::fcntl_setfl(&file, set - OFlags::NONBLOCK))
            .map_err(|e| StoreError::io("opening the volume", path, e))?;
        let bytes = length(&file, path, is_device)?;
        Ok(File {
            private: keep_private(&file),
            file: Arc::new(file),
            direct,
            bytes,
            is_device,
        })
    }

    /// Reads its length again. Another process may be enlarging the store. The superblock with the
    /// larger size is written after the file has its length, so a length counts only if it was read
    /// after the superblock.
    pub(crate) fn measure(&mut self, path: &Path) -> Result<(), StoreError> {
        self.bytes = length(&self.file, path, self.is_device)?;
        Ok(())
    }

    /// The same device, claimed: no other process can open it exclusively, and it cannot be
    /// mounted.
    fn claimed(self, path: &Path, access: Access, patience: Duration) -> Result<File, StoreError> {
        let until = Instant::now() + patience;
        loop {
            match File::open(path, access) {
                Err(error) if error.is_busy() && Instant::now() < until => {
                    crate::runtime::thread::sleep(LOCK_RETRY);
                }
                Err(error) if error.is_busy() => {
                    let held = self.held(path);
                    let is_known = matches!(
                        &held,
                        StoreError::Locked { holder, .. } if holder.state == HolderState::Running
                    );
                    return Err(if is_known { held } else { error });
                }
                outcome => return outcome,
            }
        }
    }

    /// Locks it against every other opener. Waits a moment for a process that is exiting.
    pub(crate) fn lock(&self, path: &Path) -> Result<(), StoreError> {
        self.lock_within(path, LOCK_PATIENCE)
    }

    fn lock_within(&self, path: &Path, patience: Duration) -> Result<(), StoreError> {
        let until = Instant::now() + patience;
        self.flock(path, FlockOperation::NonBlockingLockExclusive, until)?;
        // Clients of a former owner may still write to places that this owner would grant to
        // others.
        if guard::wait_for_none(&self.file, until) {
            Ok(())
        } else {
            Err(StoreError::ClientsWriting(path.to_owned()))
        }
    }

    /// Locks it against writers, beside other shared locks: for a reader under which nothing may
    /// move.
    pub(crate) fn lock_shared(&self, path: &Path) -> Result<(), StoreError> {
        let until = Instant::now() + LOCK_PATIENCE;
        self.flock(path, FlockOperation::NonBlockingLockShared, until)
    }

    fn flock(
        &self,
        path: &Path,
        operation: FlockOperation,
        until: Instant,
    ) -> Result<(), StoreError> {
        loop {
            match rustix::fs::flock(self.file.as_fd(), operation) {
                Ok(()) => return Ok(()),
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => {
                    crate::runtime::thread::sleep(LOCK_RETRY);
                }
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(self.held(path)),
                Err(error) => return Err(StoreError::io("locking the volume", path, error)),
            }
        }
    }

    /// The error of a lock that another process holds.
    pub(crate) fn held(&self, path: &Path) -> StoreError {
        let superblock = self.superblock().ok();
        // The socket lies beside the first volume.
        let is_first = superblock.as_ref().is_some_and(|of| of.volume == 0);
        let holder = superblock.as_ref().map(|of| LockHolder::of(&of.holder));
        StoreError::Locked {
            path: path.to_owned(),
            holder: holder.unwrap_or_default(),
            is_unserved: is_first && !is_listening(&socket_path(path)),
        }
    }

    /// Whether a process holds the lock now. A lock taken for this check is released at once.
    pub(crate) fn is_locked(&self) -> bool {
        match rustix::fs::flock(self.file.as_fd(), FlockOperation::NonBlockingLockShared) {
            Ok(()) => {
                let _ = rustix::fs::flock(self.file.as_fd(), FlockOperation::Unlock);
                false
            }
            // A lock refused for another reason is no evidence of another process.
            Err(error) => error == rustix::io::Errno::WOULDBLOCK,
        }
    }

    /// Whether the lock stays held for longer than by a process that has just ended.
    pub(crate) fn stays_locked(&self, path: &Path) -> bool {
        let locked = matches!(self.lock_shared(path), Err(StoreError::Locked { .. }));
        let _ = rustix::fs::flock(self.file.as_fd(), FlockOperation::Unlock);
        locked
    }

    /// The newer valid superblock.
    pub(crate) fn superblock(&self) -> Result<Superblock, SuperblockError> {
        let [a, b] = SUPERBLOCK_OFFSETS.map(|offset| self.superblock_at(offset));
        newest(a, b)
    }

    /// One copy of the superblock.
    pub(crate) fn superblock_at(&self, offset: u64) -> Result<Superblock, SuperblockError> {
        let bytes = self.read(offset, BLOCK_BYTES).map_err(|error| {
            // Unreadable is not absent: a store must not be created over a store whose device does
            // not answer.
            SuperblockError::Unreadable(error.raw_os_error().unwrap_or(libc::EIO))
        })?;
        if bytes.len() < BLOCK_BYTES {
            // Too short for a superblock: it never was a volume.
            return Err(SuperblockError::NotLarder);
        }
        Superblock::decode(&bytes)
    }

    /// Reads bytes; fewer than requested if the volume ends.
    pub(crate) fn read(&self, offset: u64, bytes: usize) -> Result<Vec<u8>, std::io::Error> {
        let mut buffer = AlignedBuf::zeroed(bytes)?;
        let mut done = 0;
        let mut failed = 0;
        while done < bytes {
            match rustix::io::pread(self.file.as_fd(), &mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(rustix::io::Errno::INTR) => {}
                // As often as a disk retries: a sector that reads at the second try is not lost.
                Err(rustix::io::Errno::IO) if failed + 1 < EIO_READS_MAX => failed += 1,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(buffer[..done].to_vec())
    }

    pub(crate) fn write(&self, offset: u64, bytes: &AlignedBuf) -> Result<(), std::io::Error> {
        let mut done = 0;
        while done < bytes.len() {
            match rustix::io::pwrite(self.file.as_fd(), &bytes[done..], offset + done as u64) {
                Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
                Ok(count) => done += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

fn kind_name(kind: fs::FileType) -> &'static str {
    if kind.is_dir() {
        "directory"
    } else if kind.is_fifo() {
        "pipe"
    } else if kind.is_socket() {
        "socket"
    } else {
        "character device"
    }
}

/// Opens with O_DIRECT, or without it if the file system does not support it.
fn open_direct(path: &Path, flags: OFlags) -> Result<(OwnedFd, bool), StoreError> {
    let failed = |error: rustix::io::Errno| match error {
        rustix::io::Errno::BUSY => StoreError::io(
            "opening the device (is it mounted, or in use?)",
            path,
            error,
        ),
        _ => StoreError::io("opening the volume", path, error),
    };
    match rustix::fs::open(path, flags | OFlags::DIRECT, Mode::empty()) {
        Ok(file) => {
            // tmpfs and btrfs accept the flag and buffer all the same; statx reports this.
            let direct = crate::disk::probe::direct_io(file.as_fd()).dio;
            Ok((file, direct))
        }
        Err(rustix::io::Errno::INVAL) => rustix::fs::open(path, flags, Mode::empty())
            .map(|file| (file, false))
            .map_err(failed),
        Err(error) => Err(failed(error)),
    }
}

fn length(file: &OwnedFd, path: &Path, is_device: bool) -> Result<u64, StoreError> {
    let end = if is_device {
        rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))
    } else {
        rustix::fs::fstat(file).map(|stat| u64::try_from(stat.st_size).unwrap_or(0))
    };
    end.map_err(|e| StoreError::io("measuring the volume", path, e))
}

/// A volume that is not locked yet: other processes may be writing to it.
struct Found {
    file: File,
    superblock: Superblock,
}

impl Found {
    fn at(path: &Path, access: Access) -> Result<Found, StoreError> {
        // A device in use can be opened, but not exclusively.
        let beside_others = match access {
            Access::Exclusive | Access::AtOnce => Access::Client,
            Access::Client | Access::ReadOnly | Access::Held => access,
        };
        let file = File::open(path, beside_others)?;
        let superblock = superblock_of(&file, path)?;
        Ok(Found { file, superblock })
    }

    fn is(&self, store: StoreId, index: usize) -> bool {
        is_volume_of(&self.superblock, store, index)
    }
}

/// Why a file in a volume's place is not that volume.
pub(crate) const OF_ANOTHER: &str =
    "it is a volume of another store, or another volume of this one";

/// The places where a further volume of the store may be, whose first volume is at `first`: the
/// given paths, the directory of the first volume, the recorded path. Volumes in one directory may
/// have been moved, or copied, together: then the other volumes in it belong to this first volume.
pub(crate) fn places_of(
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
pub(crate) fn suits(found: &Superblock, first: &Superblock) -> impl Ord + use<> {
    let segments = |of: &Superblock| {
        let entry = of.volumes.get(usize::from(found.volume));
        entry.map(|entry| entry.segments)
    };
    let is_enlarged = segments(found) == segments(first);
    (found.run <= first.run, found.run, is_enlarged)
}

/// Each volume that the caller names must be used: a name that is not used is an error.
pub(crate) fn check_used<'a>(
    named: &[PathBuf],
    used: impl Iterator<Item = &'a Path>,
) -> Result<(), StoreError> {
    let used: Vec<&Path> = used.collect();
    let file = |path: &Path| fs::metadata(path).map(|it| (it.dev(), it.ino())).ok();
    let is_same = |a: &Path, b: &Path| a == b || file(a).is_some_and(|a| file(b) == Some(a));
    let is_unused = |path: &&PathBuf| !used.iter().any(|used| is_same(used, path));
    let Some(path) = named.iter().find(is_unused) else {
        return Ok(());
    };
    let why = match Found::at(path, Access::ReadOnly) {
        Ok(_) => format!("{}: {OF_ANOTHER}, or one that was given up", path.display()),
        Err(error) => error.to_string(),
    };
    Err(StoreError::Usage(format!(
        "a file named as a volume is no volume of this store, and a store keeps the volumes that \
         it was made with: {why}"
    )))
}

fn superblock_of(file: &File, path: &Path) -> Result<Superblock, StoreError> {
    file.superblock().map_err(|source| match source {
        SuperblockError::NotLarder => StoreError::NotAStore(path.to_owned()),
        source => StoreError::Superblock {
            path: path.to_owned(),
            source,
        },
    })
}

pub(crate) fn is_volume_of(superblock: &Superblock, store: StoreId, index: usize) -> bool {
    superblock.store == store && usize::from(superblock.volume) == index
}

fn geometry_of(superblock: &Superblock, path: &Path) -> Result<Geometry, StoreError> {
    let geometry = superblock.geometry(superblock.volume);
    geometry.map_err(|source| StoreError::Superblock {
        path: path.to_owned(),
        source,
    })
}

impl Volume {
    fn open(path: &Path, access: Access) -> Result<Volume, StoreError> {
        Volume::take(path, access, Found::at(path, access)?, 0)
    }

    /// Makes a volume of a file, which must have at least `least` bytes.
    fn take(path: &Path, access: Access, found: Found, least: u64) -> Result<Volume, StoreError> {
        let Found {
            mut file,
            superblock,
        } = found;
        let patience = match access {
            Access::Exclusive => Some(LOCK_PATIENCE),
            Access::AtOnce => Some(Duration::ZERO),
            Access::Client | Access::ReadOnly | Access::Held => None,
        };
        if access == Access::Held {
            file.lock_shared(path)?;
        }
        if let Some(patience) = patience {
            if file.is_device {
                file = file.claimed(path, access, patience)?;
            }
            file.lock_within(path, patience)?;
        }
        // The last holder of the lock may have written a newer one, or made another store of it.
        let superblock = match access {
            Access::Exclusive | Access::AtOnce | Access::Held => superblock_of(&file, path)?,
            Access::Client | Access::ReadOnly => superblock,
        };
        let geometry = geometry_of(&superblock, path)?;
        let needed = geometry.volume_bytes().max(least);
        file.measure(path)?;
        if file.bytes < needed {
            return Err(StoreError::Truncated {
                path: path.to_owned(),
                found: file.bytes,
                needed,
            });
        }
        Ok(Volume {
            path: path.to_owned(),
            older_copy: 0,
            file: file.file,
            private: file.private,
            superblock,
            direct: file.direct,
        })
    }

    /// The places of its segments, by its superblock.
    pub(crate) fn geometry(&self) -> Result<Geometry, StoreError> {
        geometry_of(&self.superblock, &self.path)
    }

    /// Releases the lock, also when the file is still open elsewhere.
    pub(crate) fn unlock(&self) {
        if let Err(error) = rustix::fs::flock(self.file.as_fd(), FlockOperation::Unlock) {
            tracing::warn!("{}: unlocking: {error}", self.path.display());
        }
    }

    /// Reads both copies of the superblock through a disk.
    fn read_superblock(&mut self, disk: &dyn Disk, index: usize) -> Result<(), StoreError> {
        let [a, b] = SUPERBLOCK_OFFSETS;
        let (a, b) = (self.copy_at(disk, index, a)?, self.copy_at(disk, index, b)?);
        self.older_copy = match (&a, &b) {
            (Ok(a), Ok(b)) => usize::from(b.generation < a.generation),
            (Ok(_), Err(_)) => 1,
            _ => 0,
        };
        let found = newest(a, b);
        let superblock = found.map_err(|source| StoreError::Superblock {
            path: self.path.clone(),
            source,
        })?;
        // Without a lock another store may have been made of it meanwhile.
        if !is_volume_of(&superblock, self.superblock.store, index) {
            return Err(StoreError::VolumeMissing {
                index,
                path: self.path.clone(),
                reason: OF_ANOTHER.to_owned(),
            });
        }
        self.superblock = superblock;
        Ok(())
    }

    /// One copy of the superblock, if the disk can read it.
    fn copy_at(
        &self,
        disk: &dyn Disk,
        index: usize,
        offset: u64,
    ) -> Result<Result<Superblock, SuperblockError>, StoreError> {
        let read = ReadAt {
            volume: index,
            offset,
            bytes: BLOCK_BYTES,
        };
        match read_all(disk, &[read]).pop() {
            Some(Ok(bytes)) => Ok(Superblock::decode(&bytes)),
            Some(Err(source)) if source.is_of_this_process() => Err(StoreError::NotRead {
                path: self.path.clone(),
                source,
            }),
            Some(Err(DiskError::Os(errno))) => Ok(Err(SuperblockError::Unreadable(errno))),
            _ => Ok(Err(SuperblockError::Unreadable(libc::EIO))),
        }
    }
}

impl Volumes {
    /// Opens all volumes of the store whose first volume is at `path`.
    ///
    /// # Errors
    /// See [`StoreError`]: a volume may be absent, foreign, damaged, truncated or in use.
    pub fn open(
        path: &Path,
        elsewhere: &[PathBuf],
        access: Access,
        degraded: bool,
    ) -> Result<Volumes, StoreError> {
        let first = Volume::open(path, access)?;
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
                match Found::at(&place, access) {
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
                    Err(error) if error.leaves_the_volume_unknown() => unseen = Some(error),
                    // A volume in the expected place that has no usable superblock. Another copy is
                    // not looked for: it would belong to another store.
                    Err(error @ StoreError::Superblock { .. }) if !is_named => {
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
                Volume::take(&place, access, found, least.unwrap_or(0))
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

    /// Opens the disk for these volumes, under the layer in the options. From here on all bytes go
    /// through it. Reads the superblocks that count through it.
    ///
    /// # Errors
    /// When there is no such disk, or a superblock cannot be used any more.
    pub(crate) fn open_disk(&mut self, options: &OpenOptions) -> Result<Arc<dyn Disk>, StoreError> {
        let file = |volume: &Option<Volume>| volume.as_ref().map(|volume| volume.file.clone());
        let disk_options = DiskOptions {
            files: self.list.iter().map(file).collect(),
            depth: options.depth.max(1),
            latencies: self.latencies.clone(),
        };
        let mut disk = open_disk(disk_options, options.disk)?;
        if let Some(wrapper) = &options.disk_wrapper {
            disk = wrapper.wrap(disk);
        }
        for (index, volume) in self.list.iter_mut().enumerate() {
            let Some(volume) = volume else { continue };
            if let Err(error) = volume.read_superblock(disk.as_ref(), index) {
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
    pub(crate) fn write(&self, disk: &dyn Disk, writes: Vec<WriteAt>) -> Result<(), StoreError> {
        let volumes: Vec<usize> = writes.iter().map(|write| write.volume).collect();
        self.judge("writing", &volumes, write_all(disk, writes))
    }

    /// Makes everything written to any volume durable.
    ///
    /// # Errors
    /// The error of the first volume whose sync failed.
    pub(crate) fn sync(&self, disk: &dyn Disk) -> Result<(), StoreError> {
        let volumes: Vec<usize> = self.present().map(|(index, _)| index).collect();
        self.judge("syncing", &volumes, sync_all(disk, &volumes))
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
                StoreError::io(doing, &path, error)
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
    pub(crate) fn first_path(&self) -> PathBuf {
        self.present()
            .next()
            .map_or_else(PathBuf::new, |(_, volume)| volume.path.clone())
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
    /// volume after the other, and in each volume one copy after the other, so that one copy is
    /// whole at every moment.
    ///
    /// # Errors
    /// The error of the system.
    pub(crate) fn update(
        &mut self,
        disk: &dyn Disk,
        change: impl Fn(&mut Superblock),
    ) -> Result<(), StoreError> {
        let places: Vec<Option<Option<String>>> = self
            .list
            .iter()
            .map(|volume| volume.as_ref().map(|volume| place_of(&volume.path)))
            .collect();
        for index in 0..self.list.len() {
            let Some(volume) = &self.list[index] else {
                continue;
            };
            let mut superblock = volume.superblock.clone();
            for (entry, place) in superblock.volumes.iter_mut().zip(&places) {
                entry.lost = place.is_none();
                // A volume that was named because it had moved is found at its new path from then
                // on.
                if let Some(Some(place)) = place {
                    entry.path.clone_from(place);
                }
            }
            change(&mut superblock);
            superblock.generation = volume.superblock.generation.saturating_add(1);
            let encoded = superblock
                .encode()
                .map_err(|source| StoreError::Superblock {
                    path: volume.path.clone(),
                    source,
                })?;
            for copy in [volume.older_copy, 1 - volume.older_copy] {
                let mut memory = AlignedBuf::zeroed(BLOCK_BYTES)
                    .map_err(|e| StoreError::io("writing", &volume.path, e))?;
                memory.copy_from_slice(&encoded[..]);
                let write = WriteAt {
                    volume: index,
                    offset: SUPERBLOCK_OFFSETS[copy],
                    memory,
                };
                self.write(disk, vec![write])?;
                self.judge("syncing", &[index], sync_all(disk, &[index]))?;
            }
            if let Some(volume) = &mut self.list[index] {
                volume.superblock = superblock;
            }
        }
        Ok(())
    }
}

/// A volume's path as a superblock records it, if it can be recorded.
fn place_of(path: &Path) -> Option<String> {
    let path = fs::canonicalize(path).ok()?;
    let text = path.into_os_string().into_string().ok();
    text.filter(|text| text.len() <= larder_format::VOLUME_PATH_BYTES_MAX)
}

/// A caller that names a volume relies on its recorded path later.
fn check_place(path: &Path) -> Result<(), StoreError> {
    place_of(path)
        .map(drop)
        .ok_or_else(|| not_to_be_recorded(path))
}

/// A superblock has no room for the path of this volume.
fn not_to_be_recorded(path: &Path) -> StoreError {
    StoreError::Usage(format!(
        "{}: a volume's path, links followed, is UTF-8 and at most {} bytes long; choose a \
         shorter one",
        path.display(),
        larder_format::VOLUME_PATH_BYTES_MAX
    ))
}

//! Creates stores. Files are preallocated in full, so that a store never runs out of the space it
//! was given, and never takes more.

mod add;
mod checks;
mod grow;
mod left;
mod options;
mod present;

use std::fs;
use std::io::{Error, ErrorKind};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use larder_base::fork::keep_private;
use larder_base::memory::AlignedBuf;
use larder_base::runtime::descriptors;
use larder_base::system::holder::this_holder;
use larder_core::capacity::{segments_min, usable_blocks};
use larder_disk::probe::filesystem;
use larder_format::{
    BLOCK_BYTES, Clock, Features, Geometry, HEADER_BLOCKS, History, KeyringCopy, OVERHEAD_BYTES,
    OpenState, Quotas, RESERVED_OFFSET, Run, SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, SEGMENTS_OFFSET,
    StoreId, Superblock, VOLUMES_MAX, VolumeEntry, VolumeId, keyring_offsets, quotas_offsets,
    segments_that_fit, superblock_offsets, tail_offset,
};
use rustix::fs::{CWD, FallocateFlags, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::keyrings::not_usable;
use super::{Access, File};
use crate::error::{StoreError, count, io_error};
use crate::fit::SHARE_MIN;
use crate::keys::{self, Keys};
pub use add::add;
use checks::{
    absolute, allocated_bytes, check_directory, check_distinct, check_space, free_bytes, held,
    identity_bytes, is_there, may_overwrite, parent_of, size_of, suited,
};
use grow::grow;
use left::{
    is_named, left_bytes, lock_left, named_left, open_left, remove_left, remove_named,
    temporary_name,
};
pub use options::{CreateOptions, Created, Progress};
use present::present;

/// Bytes per write when every block is written beforehand.
const PREWRITE_BYTES: usize = 4 << 20;

/// Creates a store whose first volume is at `path`.
///
/// # Errors
/// [`StoreError::TooSmall`], [`StoreError::NoSize`] and [`StoreError::Usage`] for invalid sizes;
/// [`StoreError::Exists`] and [`StoreError::Foreign`] without `force`; [`StoreError::Locked`] when
/// the store is in use, with `force` too; [`StoreError::NoSpace`]; and errors of the system, of the
/// kind [`ErrorKind::Interrupted`] when `progress` breaks. Files created by a call that fails are
/// removed.
pub fn create(path: &Path, options: &CreateOptions<'_>) -> Result<Created, StoreError> {
    if options.grow {
        return grow(path, options);
    }
    if options.if_absent
        && let Some(there) = present(path, options)?
    {
        return Ok(there);
    }
    match make(path, options) {
        // Of creations at once, one makes the store.
        Err(StoreError::Exists(at)) if options.if_absent && at == path => {
            present(path, options)?.ok_or(StoreError::NotAStore(at))
        }
        made => made,
    }
}

fn make(path: &Path, options: &CreateOptions<'_>) -> Result<Created, StoreError> {
    let paths: Vec<PathBuf> = std::iter::once(path.to_owned())
        .chain(options.volumes.iter().cloned())
        .collect();
    if paths.len() > VOLUMES_MAX {
        return Err(StoreError::Usage(format!(
            "{} volumes: a store has at most {VOLUMES_MAX}",
            paths.len()
        )));
    }
    check_distinct(&paths)?;
    // A store that is there has its sizes: the given ones need not make sense.
    let left = named_left(&paths)?;
    let force = |path: &PathBuf| options.force || left.contains(path);
    for path in &paths {
        Target::check_content(path, force(path))?;
    }
    let plan = Plan::new(&paths, options)?;
    if options.dry_run {
        for path in &paths {
            Target::check(path, force(path), plan.volume_bytes)?;
        }
        return Ok(plan.created(paths, options.wrapping.is_some()));
    }
    for path in &left {
        remove_named(path)?;
    }
    let mut targets: Vec<Target> = Vec::with_capacity(paths.len());
    for path in &paths {
        targets.push(Target::open(path, options.force)?);
    }
    plan.write(&targets, options)?;
    // The first volume, by which the store is opened, gets its name last.
    for target in targets.iter_mut().rev() {
        target.name()?;
    }
    targets.iter_mut().for_each(Target::keep);
    Ok(plan.created(paths, options.wrapping.is_some()))
}

/// Sizes, decided before anything is written.
struct Plan {
    volume_bytes: u64,
    geometry: Geometry,
    volumes: usize,
}

impl Plan {
    fn new(paths: &[PathBuf], options: &CreateOptions<'_>) -> Result<Plan, StoreError> {
        let volumes = paths.len();
        let size = size_of(paths, options)?;
        let segment_bytes = match options.segment_size {
            Some(segment_bytes) => segment_bytes,
            None => suited(size, volumes, options.page_bytes)?,
        };
        if !(SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&segment_bytes)
            || !segment_bytes.is_multiple_of(BLOCK_BYTES as u64)
        {
            return Err(StoreError::Usage(format!(
                "a segment of {segment_bytes} bytes: the segment size is a multiple of 4 KiB from \
                 256 KiB to 4 GiB"
            )));
        }
        let volume_bytes = size / volumes as u64 / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        let segments = segments_that_fit(volume_bytes, segment_bytes);
        let least = segments_min(volumes);
        if u64::from(segments) * (volumes as u64) < least {
            let needed =
                (least.div_ceil(volumes as u64) * segment_bytes + OVERHEAD_BYTES) * volumes as u64;
            let smallest = segments_that_fit(volume_bytes, SHARE_MIN);
            return Err(StoreError::TooSmall {
                reason: format!(
                    "{}, and a store on {} needs {least} in all",
                    held(size, segments, segment_bytes, volumes),
                    count(volumes as u64, "volume")
                ),
                needed,
                smaller_segments: u64::from(smallest) * volumes as u64 >= least,
            });
        }
        let blocks = u32::try_from(segment_bytes / BLOCK_BYTES as u64).unwrap_or(u32::MAX);
        let geometry =
            Geometry::new(blocks, segments).map_err(|e| StoreError::Usage(e.to_string()))?;
        Ok(Plan {
            volume_bytes,
            geometry,
            volumes,
        })
    }

    /// Blanks the headers and the first descriptor block of each segment from `first` on, and all
    /// other places of a new volume but its first superblocks, where the volume held other bytes
    /// before. So a place that is not blank was written by the store, or is damaged.
    fn blank(&self, target: &Target, first: u32) -> Result<(), StoreError> {
        if !target.held_bytes() {
            return Ok(());
        }
        let io = |e: Error| io_error("blanking the segments", &target.path, e);
        let headers = u64::from(HEADER_BLOCKS) * BLOCK_BYTES as u64;
        if first == 0 {
            let length = target.length()?;
            target.blank(RESERVED_OFFSET..SEGMENTS_OFFSET)?;
            target.blank(tail_offset(length)..length)?;
        }
        let last = self.geometry.segments();
        // The first descriptor block of a segment lies before the headers of the next one.
        for segment in first..=last {
            let border = SEGMENTS_OFFSET + u64::from(segment) * self.geometry.segment_bytes();
            let before = if segment > first {
                BLOCK_BYTES as u64
            } else {
                0
            };
            let behind = if segment < last { headers } else { 0 };
            let bytes = usize::try_from(before + behind).unwrap_or(BLOCK_BYTES);
            let zeros = AlignedBuf::zeroed(bytes).map_err(io)?;
            target.file.write(border - before, &zeros).map_err(io)?;
        }
        rustix::fs::fsync(target.file.file.as_fd()).map_err(|e| io(e.into()))
    }

    fn created(&self, volumes: Vec<PathBuf>, is_encrypted: bool) -> Created {
        let segments = u64::from(self.geometry.segments()) * self.volumes as u64;
        Created {
            segments,
            segment_bytes: self.geometry.segment_bytes(),
            usable_bytes: usable_blocks(segments, self.volumes, self.geometry.segment_blocks())
                * BLOCK_BYTES as u64,
            capacity_bytes: self.volume_bytes * self.volumes as u64,
            volumes,
            is_grown: false,
            is_present: false,
            is_encrypted,
        }
    }

    fn write(&self, targets: &[Target], options: &CreateOptions<'_>) -> Result<(), StoreError> {
        let store = StoreId::from_bytes(identity_bytes()?);
        let mut entries = Vec::with_capacity(targets.len());
        for target in targets {
            entries.push(VolumeEntry {
                id: VolumeId::from_bytes(identity_bytes()?),
                segments: self.geometry.segments(),
                lost: false,
                path: absolute(&target.path)?,
            });
        }
        for target in targets {
            target.allocate(self.volume_bytes, options.prewrite)?;
        }
        if options.prewrite {
            let total = self.volume_bytes * targets.len() as u64;
            for (index, target) in targets.iter().enumerate() {
                prewrite(
                    target,
                    0..self.volume_bytes,
                    index as u64 * self.volume_bytes,
                    total,
                    options,
                )?;
            }
        } else {
            for target in targets {
                self.blank(target, 0)?;
            }
        }
        let created_unix_s = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |passed| passed.as_secs());
        let wrapping = options.wrapping.as_ref();
        let keys = wrapping.map(|wrapping| keys::create(store, wrapping, created_unix_s));
        let keys = keys.transpose();
        let keys = keys.map_err(|error| not_usable(&targets[0].path, &error))?;
        let keyring = keys.as_ref().map(Keys::copy);
        for (index, target) in targets.iter().enumerate() {
            let superblock = Superblock {
                store,
                volume: u16::try_from(index).unwrap_or(u16::MAX),
                generation: 1,
                run: Run::FIRST,
                state: OpenState::Clean,
                created_unix_s,
                holder: this_holder(),
                history: History::default(),
                clock: Clock::default(),
                keyring: keyring.as_ref().map_or(0, |copy| copy.generation),
                quotas: 0,
                segment_blocks: self.geometry.segment_blocks(),
                features: Features::default().written_here(),
                volumes: entries.clone(),
            };
            if index == 0 {
                target.write_quotas(store, keys.as_ref())?;
            }
            if let Some(keyring) = &keyring {
                target.write_keyring(keyring)?;
            }
            target.write_superblock(&superblock)?;
        }
        Ok(())
    }
}

/// A file that becomes a volume. A new file carries another name until it is complete, so that a
/// killed creation leaves nothing at `path`.
struct Target {
    path: PathBuf,
    file: File,
    undo: Undo,
}

/// The remains of a creation that fails.
enum Undo {
    /// A file with this name, which is removed.
    New(PathBuf),
    /// A file that was empty, and is again.
    Empty,
    /// Nothing: the creation has succeeded, or the volume was there before.
    Nothing,
}

impl Target {
    /// Whether `path` may become a volume of `bytes` bytes. Does not change it.
    fn check(path: &Path, force: bool, bytes: u64) -> Result<(), StoreError> {
        if !is_there(path)? {
            check_directory(path)?;
            return check_space(path, bytes, left_bytes(path)?);
        }
        Target::check_content(path, force)
    }

    /// Whether the content of `path`, if there is any, may be overwritten. Does not change it.
    fn check_content(path: &Path, force: bool) -> Result<(), StoreError> {
        if !is_there(path)? {
            return Ok(());
        }
        let file = File::open(path, Access::ReadOnly)?;
        if file.is_locked() {
            file.lock(path)?;
        }
        may_overwrite(&file, path, force)
    }

    fn open(path: &Path, force: bool) -> Result<Target, StoreError> {
        // Again whenever another creation of the same volume was faster.
        loop {
            if is_there(path)? {
                return Target::over(path, force);
            }
            if let Some(target) = Target::make(path)? {
                return Ok(target);
            }
        }
    }

    fn over(path: &Path, force: bool) -> Result<Target, StoreError> {
        let file = File::open(path, Access::Exclusive)?;
        file.lock(path)?;
        may_overwrite(&file, path, force)?;
        let undo = match file.bytes {
            0 => Undo::Empty,
            _ => Undo::Nothing,
        };
        Ok(Target {
            path: path.to_owned(),
            file,
            undo,
        })
    }

    /// The target for a volume that is there and open.
    fn of(volume: &super::Volume) -> Result<Target, StoreError> {
        let is_device = fs::metadata(&volume.path).is_ok_and(|m| !m.is_file());
        Ok(Target {
            path: volume.path.clone(),
            file: File {
                private: keep_private(&volume.file),
                file: volume.file.clone(),
                direct: volume.direct,
                bytes: super::length(&volume.file, &volume.path)?,
                is_device,
            },
            undo: Undo::Nothing,
        })
    }

    /// `None` if another creation took or removed one of the names meanwhile.
    fn make(path: &Path) -> Result<Option<Target>, StoreError> {
        let temporary = temporary_name(path);
        remove_left(path, &temporary)?;
        descriptors::cover().map_err(|e| io_error("creating the volume", path, e))?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let made = match rustix::fs::open(&temporary, flags, Mode::RUSR | Mode::WUSR) {
            Ok(made) => made,
            Err(Errno::EXIST) => return Ok(None),
            Err(error) => {
                let doing = match error {
                    Errno::NOENT => "creating the volume (is its directory there?)",
                    _ => "creating the volume",
                };
                return Err(io_error(doing, path, error));
            }
        };
        let locked = open_left(&temporary).and_then(|file| lock_left(file, &temporary));
        let Some(file) = locked.inspect_err(|_| {
            if is_named(&made, &temporary) {
                let _ = fs::remove_file(&temporary);
            }
        })?
        else {
            return Ok(None);
        };
        let target = Target {
            path: path.to_owned(),
            file,
            undo: Undo::New(temporary),
        };
        // Another creation may have ended after the check of `path`, before this one had the
        // temporary name.
        Ok((!is_there(path)?).then_some(target))
    }

    /// Whether its blocks may hold bytes of an earlier use.
    fn held_bytes(&self) -> bool {
        self.file.is_device || matches!(self.undo, Undo::Nothing) && self.file.bytes > 0
    }

    /// Gives a complete volume its name.
    fn name(&mut self) -> Result<(), StoreError> {
        if let Undo::New(name) = &mut self.undo {
            let (from, to) = (name.as_path(), self.path.as_path());
            rename(from, to).map_err(|e| io_error("naming the new volume", to, e))?;
            name.clone_from(&self.path);
        }
        // The name must be durable too.
        if let Some(directory) = parent_of(&self.path)
            && let Ok(directory) = fs::File::open(directory)
        {
            let _ = directory.sync_all();
        }
        Ok(())
    }

    /// The file stays.
    fn keep(&mut self) {
        self.undo = Undo::Nothing;
    }

    /// Gives the file its length and its blocks. If the file system cannot preallocate, or the call
    /// is refused, a prewrite allocates the blocks.
    fn allocate(&self, bytes: u64, prewrite: bool) -> Result<(), StoreError> {
        let failed = |doing, error: Errno| match error {
            Errno::NOSPC | Errno::DQUOT => StoreError::NoSpace {
                path: self.path.clone(),
                needed: bytes,
                free: free_bytes(&self.path),
            },
            error => io_error(doing, &self.path, error),
        };
        if self.file.is_device {
            if self.file.bytes < bytes {
                return Err(StoreError::Usage(format!(
                    "{}: the device has {} bytes, {bytes} are needed",
                    self.path.display(),
                    self.file.bytes
                )));
            }
            return Ok(());
        }
        let have = allocated_bytes(&self.file);
        if bytes > have && bytes - have > free_bytes(&self.path) {
            return Err(StoreError::NoSpace {
                path: self.path.clone(),
                needed: bytes - have,
                free: free_bytes(&self.path),
            });
        }
        let file = self.file.file.as_fd();
        rustix::fs::ftruncate(file, bytes).map_err(|e| failed("sizing the volume", e))?;
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) => Ok(()),
            Err(error) if !is_missing(error) => Err(failed("allocating the volume", error)),
            Err(_) if prewrite => Ok(()),
            Err(error) => Err(StoreError::NoPreallocation {
                path: self.path.clone(),
                file_system: filesystem(file),
                source: error.into(),
            }),
        }
    }

    /// Releases the bytes that [`Target::allocate`] added to an existing volume.
    fn shrink(&self) {
        if !self.file.is_device {
            let _ = rustix::fs::ftruncate(self.file.file.as_fd(), self.file.bytes);
        }
    }

    /// Bytes of the file or device now.
    fn length(&self) -> Result<u64, StoreError> {
        super::length(&self.file.file, &self.path)
    }

    /// Writes zeros to all whole blocks of a range.
    fn blank(&self, range: std::ops::Range<u64>) -> Result<(), StoreError> {
        let io = |e: Error| io_error("blanking the volume", &self.path, e);
        let bytes = range.end.saturating_sub(range.start) / BLOCK_BYTES as u64;
        let bytes = usize::try_from(bytes).unwrap_or(0) * BLOCK_BYTES;
        let zeros = AlignedBuf::zeroed(bytes).map_err(io)?;
        self.file.write(range.start, &zeros).map_err(io)
    }

    /// The copies say that there are no quotas, so that damage to some of them costs nothing.
    fn write_quotas(&self, store: StoreId, keys: Option<&Keys>) -> Result<(), StoreError> {
        let encoded = Quotas::default().encode(store);
        let mut encoded = encoded.map_err(|error| StoreError::Quotas(error.to_string()))?;
        if let Some(keys) = keys {
            let sealed = keys.seal_quotas(&mut encoded);
            sealed.map_err(|error| StoreError::Quotas(error.to_string()))?;
        }
        let io = |e: Error| io_error("writing the quotas", &self.path, e);
        let mut bytes = AlignedBuf::zeroed(encoded.len()).map_err(io)?;
        bytes.copy_from_slice(&encoded);
        for offset in quotas_offsets(self.length()?) {
            self.file.write(offset, &bytes).map_err(io)?;
        }
        Ok(())
    }

    /// The copies are durable before a superblock states them.
    fn write_keyring(&self, keyring: &KeyringCopy) -> Result<(), StoreError> {
        let io = |e: Error| io_error("writing the keyring", &self.path, e);
        let encoded = keyring.encode();
        let mut bytes = AlignedBuf::zeroed(encoded.len()).map_err(io)?;
        bytes.copy_from_slice(&encoded);
        for offset in keyring_offsets(self.length()?) {
            self.file.write(offset, &bytes).map_err(io)?;
        }
        rustix::fs::fsync(self.file.file.as_fd()).map_err(|e| io(e.into()))
    }

    fn write_superblock(&self, superblock: &Superblock) -> Result<(), StoreError> {
        let encoded = superblock
            .encode()
            .map_err(|source| StoreError::Superblock {
                path: self.path.clone(),
                source,
            })?;
        let io = |e: Error| io_error("writing the superblock", &self.path, e);
        let mut bytes = AlignedBuf::zeroed(BLOCK_BYTES).map_err(io)?;
        bytes.copy_from_slice(&encoded[..]);
        for offset in superblock_offsets(self.length()?) {
            self.file.write(offset, &bytes).map_err(io)?;
        }
        rustix::fs::fsync(self.file.file.as_fd()).map_err(|e| io(e.into()))?;
        Ok(())
    }
}

/// Renames a file. The new name must be free.
fn rename(from: &Path, to: &Path) -> Result<(), Error> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        // Some file systems do not know the flag.
        Err(error) if is_missing(error) || error == Errno::INVAL => {
            fs::hard_link(from, to)?;
            fs::remove_file(from)
        }
        Err(error) => Err(error.into()),
    }
}

/// Whether the file system or the kernel lacks a call, or a container profile refuses it.
fn is_missing(error: Errno) -> bool {
    matches!(
        error,
        Errno::OPNOTSUPP | Errno::NOSYS | Errno::PERM | Errno::ACCESS
    )
}

impl Drop for Target {
    fn drop(&mut self) {
        match &self.undo {
            Undo::New(temporary) => {
                let _ = fs::remove_file(temporary);
            }
            Undo::Empty => self.shrink(),
            Undo::Nothing => {}
        }
    }
}

fn prewrite(
    target: &Target,
    range: std::ops::Range<u64>,
    before: u64,
    total: u64,
    options: &CreateOptions<'_>,
) -> Result<(), StoreError> {
    let io = |e: Error| io_error("writing the volume's blocks", &target.path, e);
    let zeros = AlignedBuf::zeroed(PREWRITE_BYTES).map_err(io)?;
    let mut offset = range.start;
    while offset < range.end {
        let left = range.end - offset;
        if left >= PREWRITE_BYTES as u64 {
            target.file.write(offset, &zeros).map_err(io)?;
        } else {
            let rest =
                AlignedBuf::zeroed(usize::try_from(left).unwrap_or(BLOCK_BYTES)).map_err(io)?;
            target.file.write(offset, &rest).map_err(io)?;
        }
        offset += left.min(PREWRITE_BYTES as u64);
        if let Some(progress) = options.progress
            && progress(before + offset - range.start, total).is_break()
        {
            return Err(io(ErrorKind::Interrupted.into()));
        }
    }
    Ok(())
}

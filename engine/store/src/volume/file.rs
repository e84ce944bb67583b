//! One file or block device: opening, locking, and its superblock before there is a disk.

use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use larder_base::fork::{Private, keep_private};
use larder_base::memory::AlignedBuf;
use larder_base::planted;
use larder_base::runtime::{Instant, thread};
use larder_base::system::files::{self, Handle, How, Kind, Lock};
use larder_base::system::holder::{HolderState, LockHolder};
use larder_disk::{MEDIUM_READS_MAX, Patience, is_of_the_medium};
use larder_format::{
    BLOCK_BYTES, HEADER_BLOCKS, SEGMENTS_OFFSET, SegmentHeader, Superblock, SuperblockError,
    newest, superblock_offsets,
};

use crate::error::{StoreError, io_error};
use crate::volume::guard;
use crate::volume::socket::{is_listening, socket_path};

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
    pub(super) fn only_reads(self) -> bool {
        matches!(self, Access::ReadOnly | Access::Held)
    }

    pub(super) fn is_exclusive(self) -> bool {
        matches!(self, Access::Exclusive | Access::AtOnce)
    }
}

/// How long to retry a locked volume: an io_uring may outlive its process for a moment.
pub(super) const LOCK_PATIENCE: Duration = Duration::from_secs(2);
const LOCK_RETRY: Duration = Duration::from_millis(20);

/// An open file that may become or be a volume.
#[derive(Debug)]
pub struct File {
    pub file: Arc<Handle>,
    pub private: Private,
    pub direct: bool,
    pub bytes: u64,
    pub is_device: bool,
}

impl File {
    /// Opens an existing file or block device.
    pub fn open(path: &Path, access: Access) -> Result<File, StoreError> {
        let found = files::look(path).map_err(|e| io_error("opening the volume", path, e))?;
        let is_device = match found.kind {
            Kind::File => false,
            Kind::BlockDevice => true,
            kind => return Err(StoreError::NotAVolume(path.to_owned(), name_of(kind))),
        };
        let how = How {
            writes: !access.only_reads(),
            alone: is_device && access.is_exclusive(),
        };
        let (file, direct) = files::open(path, how).map_err(|error| {
            let doing = match error.kind() {
                ErrorKind::ResourceBusy => "opening the device (is it mounted, or in use?)",
                _ => "opening the volume",
            };
            io_error(doing, path, error)
        })?;
        let bytes = length(&file, path)?;
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
    pub fn measure(&mut self, path: &Path) -> Result<(), StoreError> {
        self.bytes = length(&self.file, path)?;
        Ok(())
    }

    /// The same device, claimed: no other process can open it exclusively, and it cannot be
    /// mounted.
    pub(super) fn claimed(
        self,
        path: &Path,
        access: Access,
        patience: Duration,
    ) -> Result<File, StoreError> {
        let until = Instant::now() + patience;
        loop {
            match File::open(path, access) {
                Err(error) if error.is_busy() && Instant::now() < until => {
                    thread::sleep(LOCK_RETRY);
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
    pub fn lock(&self, path: &Path) -> Result<(), StoreError> {
        self.lock_within(path, LOCK_PATIENCE)
    }

    pub(super) fn lock_within(&self, path: &Path, patience: Duration) -> Result<(), StoreError> {
        let until = Instant::now() + patience;
        self.flock(path, Lock::Exclusive, until)?;
        // Clients of a former owner may still write to places that this owner would grant to
        // others.
        if planted!(UnawaitedMarks) || guard::wait_for_none(&self.file, until) {
            Ok(())
        } else {
            Err(StoreError::ClientsWriting(path.to_owned()))
        }
    }

    /// Locks it against writers, beside other shared locks: for a reader under which nothing may
    /// move.
    pub fn lock_shared(&self, path: &Path) -> Result<(), StoreError> {
        let until = Instant::now() + LOCK_PATIENCE;
        self.flock(path, Lock::Shared, until)
    }

    fn flock(&self, path: &Path, lock: Lock, until: Instant) -> Result<(), StoreError> {
        loop {
            match files::lock(&self.file, lock) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if Instant::now() >= until {
                        return Err(self.held(path));
                    }
                    thread::sleep(LOCK_RETRY);
                }
                Err(error) => return Err(io_error("locking the volume", path, error)),
            }
        }
    }

    /// The error of a lock that another process holds.
    pub(crate) fn held(&self, path: &Path) -> StoreError {
        let superblock = self.superblock().ok();
        // The socket lies beside the first volume.
        let is_first = superblock.as_ref().is_some_and(|of| of.volume == 0);
        let holder = superblock.as_ref().map(|of| LockHolder::from(&of.holder));
        StoreError::Locked {
            path: path.to_owned(),
            holder: holder.unwrap_or_default(),
            is_unserved: is_first && !is_listening(&socket_path(path)),
        }
    }

    /// Whether a process holds the lock now. A lock taken for this check is released at once.
    pub fn is_locked(&self) -> bool {
        match files::lock(&self.file, Lock::Shared) {
            Ok(()) => {
                let _ = files::lock(&self.file, Lock::None);
                false
            }
            // A lock refused for another reason is no evidence of another process.
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        }
    }

    /// Whether the lock stays held for longer than by a process that has just ended.
    pub fn stays_locked(&self, path: &Path) -> bool {
        let locked = matches!(self.lock_shared(path), Err(StoreError::Locked { .. }));
        let _ = files::lock(&self.file, Lock::None);
        locked
    }

    /// The newest valid superblock.
    pub fn superblock(&self) -> Result<Superblock, SuperblockError> {
        self.superblock_within(&Patience::none())
    }

    /// The same; copies that cannot be read are tried again with patience.
    pub(super) fn superblock_within(
        &self,
        patience: &Patience,
    ) -> Result<Superblock, SuperblockError> {
        newest(self.superblock_bytes(patience).map(decoded))
    }

    /// The bytes of the three copies. Copies that cannot be read are tried again with patience.
    pub fn superblock_bytes(&self, patience: &Patience) -> [Result<Vec<u8>, io::Error>; 3] {
        let read = |offset| self.read(offset, BLOCK_BYTES);
        let offsets = superblock_offsets(self.bytes);
        let mut copies = offsets.map(read);
        if copies.iter().any(Result::is_err) {
            patience.spend(|| {
                copies = offsets.map(read);
                copies.iter().all(Result::is_ok)
            });
        }
        copies
    }

    /// Whether a segment begins at the place of the first one.
    pub fn has_segments(&self) -> bool {
        let headers = self.read(SEGMENTS_OFFSET, HEADER_BLOCKS as usize * BLOCK_BYTES);
        let is_header = |block: &[u8]| SegmentHeader::check(block).is_ok();
        headers.is_ok_and(|bytes| bytes.chunks(BLOCK_BYTES).any(is_header))
    }

    /// Reads bytes; fewer than requested if the volume ends.
    pub fn read(&self, offset: u64, bytes: usize) -> Result<Vec<u8>, io::Error> {
        let mut buffer = AlignedBuf::zeroed(bytes)?;
        let mut done = 0;
        let mut failed = 0;
        while done < bytes {
            match files::read_at(&self.file, &mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // As often as a disk retries: a sector that reads at the second try is not lost.
                Err(error)
                    if error.raw_os_error().is_some_and(is_of_the_medium)
                        && failed + 1 < MEDIUM_READS_MAX =>
                {
                    failed += 1;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(buffer[..done].to_vec())
    }

    pub fn write(&self, offset: u64, bytes: &AlignedBuf) -> Result<(), io::Error> {
        let mut done = 0;
        while done < bytes.len() {
            match files::write_at(&self.file, &bytes[done..], offset + done as u64) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => done += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn decoded(bytes: Result<Vec<u8>, io::Error>) -> Result<Superblock, SuperblockError> {
    let bytes = bytes.map_err(|error| {
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

fn name_of(kind: Kind) -> &'static str {
    match kind {
        Kind::File => "file",
        Kind::BlockDevice => "block device",
        Kind::CharacterDevice => "character device",
        Kind::Directory => "directory",
        Kind::Pipe => "pipe",
        Kind::Socket => "socket",
        Kind::Link => "link",
    }
}

pub fn length(file: &Handle, path: &Path) -> Result<u64, StoreError> {
    files::length(file).map_err(|e| io_error("measuring the volume", path, e))
}

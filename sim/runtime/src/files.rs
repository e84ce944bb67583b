//! Files, with the interface of the engine's `system::files`.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use larder_format::BLOCK_BYTES;

use crate::machine::{Content as NodeContent, Event, Kernel, Node, with, with_if_there};
use crate::medium::{Arrival, Content, Medium, shortest};
use crate::processes::{USER, id_of};
use crate::task::{self, Process};
use crate::time::Instant;

/// Longest time that a write of a killed process takes, in transfers.
const ORPHAN_TRANSFERS_MAX: u64 = 4000;

/// An open file. Its locks live as long as the description behind it.
#[derive(Debug)]
pub struct Handle {
    description: u64,
}

/// The kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Kind {
    File,
    BlockDevice,
    CharacterDevice,
    Directory,
    Pipe,
    Socket,
    Link,
}

/// Identity of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId(u64);

/// A file, as its name shows it.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    /// Its kind.
    pub kind: Kind,
    /// Its identity.
    pub id: FileId,
    /// The user that it belongs to.
    pub user: u32,
    /// A directory in which only the owner of a file may remove the file.
    pub is_sticky: bool,
}

/// How a file is opened.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// For writing too.
    pub writes: bool,
    /// A device that no other process has opened so.
    pub alone: bool,
}

/// A lock on a whole file, which excludes those of other descriptions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// Alone.
    Exclusive,
    /// Beside other shared locks.
    Shared,
    /// Releases the lock.
    None,
}

/// All media, and what is open.
#[derive(Default)]
pub(crate) struct Storage {
    volumes: Vec<Volume>,
    descriptions: BTreeMap<u64, Description>,
    transfers: BTreeMap<u64, Transfer>,
}

struct Volume {
    id: u64,
    medium: Medium,
    /// As its file states it.
    bytes: u64,
    /// Number of unsynced writes that syncs have taken away so far.
    synced: u64,
    /// By description.
    locks: BTreeMap<u64, Lock>,
    byte_locks: Vec<(u64, Range<i64>)>,
}

struct Description {
    process: Process,
    volume: usize,
    writes: bool,
    is_closed: bool,
}

/// A piece of the memory of a process.
#[derive(Clone, Copy)]
struct Memory {
    start: *mut u8,
    bytes: usize,
}

enum Work {
    Read(Vec<Memory>),
    Write(Vec<Memory>),
    /// The bytes of a write of a killed process.
    OrphanWrite(Vec<Content>),
    /// Covers the writes before this one.
    Sync(u64),
}

struct Transfer {
    description: u64,
    process: Process,
    offset: u64,
    work: Work,
    due: Instant,
    outcome: Option<Result<usize, i32>>,
}

impl Storage {
    pub(crate) fn add(&mut self, medium: Medium, id: u64) -> usize {
        self.volumes.push(Volume {
            id,
            bytes: (medium.blocks() * BLOCK_BYTES) as u64,
            medium,
            synced: 0,
            locks: BTreeMap::new(),
            byte_locks: Vec::new(),
        });
        self.volumes.len() - 1
    }

    pub(crate) fn medium(&mut self, number: usize) -> &mut Medium {
        &mut self.volumes[number].medium
    }

    pub(crate) fn state_length(&mut self, number: usize, bytes: u64) {
        self.volumes[number].bytes = bytes;
    }

    /// Whether another process has a write in flight to some of the blocks of this one.
    fn collides(&self, process: Process, volume: usize, offset: u64, bytes: usize) -> bool {
        let collides = |other: &Transfer| {
            let bytes_of_other = match &other.work {
                Work::Write(memory) => memory.iter().map(|piece| piece.bytes).sum(),
                Work::OrphanWrite(blocks) => blocks.len() * BLOCK_BYTES,
                Work::Read(_) | Work::Sync(_) => return false,
            };
            other.process != process
                && other.outcome.is_none()
                && self.descriptions[&other.description].volume == volume
                && other.offset < offset + bytes as u64
                && offset < other.offset + bytes_of_other as u64
        };
        self.transfers.values().any(collides)
    }

    /// Byte offset and process of each write in flight.
    pub(crate) fn writes(&self) -> impl Iterator<Item = (u64, Process)> {
        let is_write = |transfer: &&Transfer| {
            let is_write = matches!(transfer.work, Work::Write(_) | Work::OrphanWrite(_));
            is_write && transfer.outcome.is_none()
        };
        let writes = self.transfers.values().filter(is_write);
        writes.map(|transfer| (transfer.offset, transfer.process))
    }

    fn orphan_transfers(&self) -> impl Iterator<Item = &Transfer> {
        let transfers = self.transfers.values();
        transfers.filter(|transfer| matches!(transfer.work, Work::OrphanWrite(_)))
    }

    pub(crate) fn orphans(&self) -> usize {
        self.orphan_transfers().count()
    }

    pub(crate) fn next_orphan(&self) -> Option<Instant> {
        self.orphan_transfers().map(|transfer| transfer.due).min()
    }

    fn has_transfers(&self, description: u64) -> bool {
        let mut transfers = self.transfers.values();
        transfers.any(|transfer| transfer.description == description && transfer.outcome.is_none())
    }

    /// Ends a description that is closed, once its last transfer is over.
    fn release(&mut self, number: u64) {
        let is_over = self
            .descriptions
            .get(&number)
            .is_some_and(|description| description.is_closed);
        if is_over && !self.has_transfers(number) {
            self.descriptions.remove(&number);
            for volume in &mut self.volumes {
                volume.locks.remove(&number);
                volume.byte_locks.retain(|(owner, _)| *owner != number);
            }
        }
    }

    fn volume_of(&mut self, file: &Handle) -> io::Result<&mut Volume> {
        let description = self.descriptions.get(&file.description);
        let description = description.filter(|description| !description.is_closed);
        let description = description.ok_or_else(|| errno(libc::EBADF))?;
        Ok(&mut self.volumes[description.volume])
    }
}

impl Kernel {
    /// A process is about to be killed: copies the writes that happen in spite of that.
    pub(crate) fn end_transfers(&mut self, process: Process) {
        let numbers: Vec<u64> = self
            .storage
            .transfers
            .iter()
            .filter(|(_, transfer)| transfer.process == process && transfer.outcome.is_none())
            .map(|(number, _)| *number)
            .collect();
        for number in numbers {
            let happens = !self.dice.chance(0.2);
            let late = self
                .dice
                .pick(&[0, 20, ORPHAN_TRANSFERS_MAX / 10, ORPHAN_TRANSFERS_MAX]);
            let usual = u64::try_from(self.odds.transfer.as_nanos()).unwrap_or(0);
            let delay = Duration::from_nanos(self.dice.between(0, late * usual));
            let Some(transfer) = self.storage.transfers.get_mut(&number) else {
                continue;
            };
            match &transfer.work {
                Work::Write(memory) if happens => {
                    // SAFETY: the process has not been killed yet. The memory of its writes in
                    // flight is valid, as the caller of `write_pieces` promises.
                    let bytes = unsafe { gather(memory) };
                    transfer.work = Work::OrphanWrite(shortest(&bytes));
                    transfer.due = transfer.due.max(task::now() + delay);
                    self.count(Event::OrphanWrite);
                }
                Work::Write(_) => {
                    self.storage.transfers.remove(&number);
                    self.count(Event::UnstartedWrite);
                }
                Work::Read(_) | Work::OrphanWrite(_) | Work::Sync(_) => {
                    self.storage.transfers.remove(&number);
                }
            }
        }
        let storage = &mut self.storage;
        storage
            .transfers
            .retain(|_, transfer| transfer.process != process || transfer.outcome.is_none());
    }

    /// Closes the descriptors of a killed process.
    pub(crate) fn close_files_of(&mut self, process: Process) {
        let own = |(number, description): (&u64, &mut Description)| {
            (description.process == process).then(|| {
                description.is_closed = true;
                *number
            })
        };
        let closed: Vec<u64> = self
            .storage
            .descriptions
            .iter_mut()
            .filter_map(own)
            .collect();
        for number in closed {
            if self.storage.has_transfers(number) {
                self.count(Event::LockKeptByTransfer);
            }
            self.storage.release(number);
        }
    }

    /// Carries out the transfers that are due, in their order.
    pub(crate) fn settle(&mut self) {
        let now = task::now();
        let mut due: Vec<(Instant, u64)> = self
            .storage
            .transfers
            .iter()
            .filter(|(_, transfer)| transfer.due <= now && transfer.outcome.is_none())
            .map(|(number, transfer)| (transfer.due, *number))
            .collect();
        due.sort_unstable();
        for (_, number) in due {
            self.carry_out(number);
        }
    }

    /// Carries out one transfer.
    fn carry_out(&mut self, number: u64) {
        let Some(mut transfer) = self.storage.transfers.remove(&number) else {
            return;
        };
        let outcome = match &transfer.work {
            Work::Read(memory) => self.read(&transfer, memory),
            Work::Write(memory) => {
                if transfer.process.is_stopped() {
                    self.count(Event::WriteOfStopped);
                }
                // SAFETY: the caller of `write_pieces` waits for this transfer: its memory is valid
                // and is not written to.
                let bytes = unsafe { gather(memory) };
                self.write(&transfer, &shortest(&bytes))
            }
            Work::OrphanWrite(blocks) => self.write(&transfer, blocks),
            Work::Sync(end) => self.sync(&transfer, *end),
        };
        let description = transfer.description;
        if !matches!(transfer.work, Work::OrphanWrite(_)) {
            transfer.outcome = Some(outcome);
            self.storage.transfers.insert(number, transfer);
        }
        self.storage.release(description);
    }

    fn place(&self, transfer: &Transfer) -> (usize, usize) {
        let volume = self.storage.descriptions[&transfer.description].volume;
        let block = usize::try_from(transfer.offset).unwrap_or(usize::MAX) / BLOCK_BYTES;
        (volume, block)
    }

    /// An answer of the kernel that makes the caller try again.
    fn interruption(&mut self) -> Option<i32> {
        let errors = [libc::EINTR, libc::EAGAIN, libc::ECANCELED];
        let strikes = self.strikes(Event::Interrupted, self.odds.interrupted);
        strikes.then(|| self.dice.pick(&errors))
    }

    /// The number of bytes that a transfer moves: at least one block, not always whole blocks.
    fn moved(&mut self, bytes: usize, event: Event) -> usize {
        if bytes <= BLOCK_BYTES || !self.strikes(event, self.odds.short) {
            return bytes;
        }
        BLOCK_BYTES + self.dice.below(bytes - BLOCK_BYTES)
    }

    fn read(&mut self, transfer: &Transfer, memory: &[Memory]) -> Result<usize, i32> {
        if let Some(error) = self.interruption() {
            return Err(error);
        }
        let (volume, block) = self.place(transfer);
        let wanted: usize = memory.iter().map(|piece| piece.bytes).sum();
        let there = self.storage.volumes[volume].medium.blocks();
        let wanted = wanted.min(there.saturating_sub(block) * BLOCK_BYTES);
        let count = wanted / BLOCK_BYTES;
        let fails = self.storage.volumes[volume].medium.fails(block, count);
        if fails || self.strikes(Event::ReadError, self.odds.read_error) {
            return Err(libc::EIO);
        }
        let moved = self.moved(wanted, Event::ShortRead);
        let medium = &self.storage.volumes[volume].medium;
        let mut bytes = vec![0; count * BLOCK_BYTES];
        for (at, out) in (block..).zip(bytes.chunks_exact_mut(BLOCK_BYTES)) {
            medium.visible(at).render(out);
        }
        // SAFETY: the caller of `read_pieces` waits for this transfer: its memory is valid and not
        // otherwise used.
        unsafe { scatter(&bytes[..moved], memory) };
        Ok(moved)
    }

    fn write(&mut self, transfer: &Transfer, blocks: &[Content]) -> Result<usize, i32> {
        let is_orphan = matches!(transfer.work, Work::OrphanWrite(_));
        if !is_orphan && let Some(error) = self.interruption() {
            return Err(error);
        }
        let (volume, block) = self.place(transfer);
        let there = self.storage.volumes[volume].medium.blocks();
        if block + blocks.len() > there {
            return Err(libc::ENOSPC);
        }
        if is_orphan {
            let arrival = Arrival::draw(&mut self.dice, blocks.len());
            self.note(|| format!("a write of {} blocks at {block} lands late", blocks.len()));
            let medium = &mut self.storage.volumes[volume].medium;
            medium.write_part(block, blocks, &arrival);
            return Ok(0);
        }
        if self.strikes(Event::WriteError, self.odds.write_error) {
            let arrival = Arrival::draw(&mut self.dice, blocks.len());
            let medium = &mut self.storage.volumes[volume].medium;
            medium.write_part(block, blocks, &arrival);
            return Err(libc::EIO);
        }
        let moved = self.moved(blocks.len() * BLOCK_BYTES, Event::ShortWrite);
        let medium = &mut self.storage.volumes[volume].medium;
        medium.write(block, &blocks[..moved / BLOCK_BYTES], || true);
        Ok(moved)
    }

    fn sync(&mut self, transfer: &Transfer, end: u64) -> Result<usize, i32> {
        let (number, _) = self.place(transfer);
        // An interrupted sync has failed. A cancelled one never ran.
        if self.strikes(Event::Interrupted, self.odds.interrupted) {
            return Err(libc::ECANCELED);
        }
        let fails = self.strikes(Event::SyncError, self.odds.sync_error);
        let volume = &mut self.storage.volumes[number];
        let count = usize::try_from(end.saturating_sub(volume.synced)).unwrap_or(usize::MAX);
        let count = count.min(volume.medium.unsynced());
        volume.synced += count as u64;
        if fails {
            let keep = self.dice.pick(&[0.0, 0.5, 1.0]);
            let stays = self.dice.pick(&[0.0, 0.5, 1.0]);
            volume
                .medium
                .sync_failed(0..count, &mut self.dice, keep, stays);
            return Err(libc::EIO);
        }
        volume.medium.synced(count);
        Ok(0)
    }

    pub(crate) fn lose_power(&mut self) {
        let open = self.storage.descriptions.values();
        assert!(
            open.clone().all(|description| description.is_closed),
            "a power loss while a process has files open"
        );
        let numbers: Vec<u64> = self.storage.transfers.keys().copied().collect();
        for number in numbers {
            // What a write in flight leaves is drawn when it is carried out.
            if self.dice.chance(0.5) {
                self.carry_out(number);
            } else {
                self.storage.transfers.remove(&number);
            }
        }
        self.storage.transfers.clear();
        self.storage.descriptions.clear();
        for number in 0..self.storage.volumes.len() {
            let volume = &mut self.storage.volumes[number];
            volume.synced += volume.medium.unsynced() as u64;
            volume.locks.clear();
            volume.byte_locks.clear();
            if volume.medium.lose_power(&mut self.dice) {
                self.count(Event::TornByPowerLoss);
            }
        }
    }

    /// Begins a transfer. Returns its number and the time that it takes.
    fn submit(&mut self, file: &Handle, offset: u64, work: Work) -> Result<(u64, Duration), i32> {
        let description = self.storage.descriptions.get(&file.description);
        let Some(description) = description.filter(|of| !of.is_closed) else {
            return Err(libc::EBADF);
        };
        let may = description.writes || !matches!(work, Work::Write(_));
        if !may || !offset.is_multiple_of(BLOCK_BYTES as u64) {
            return Err(if may { libc::EINVAL } else { libc::EBADF });
        }
        let (process, volume) = (description.process, description.volume);
        if let Work::Write(memory) = &work {
            let bytes = memory.iter().map(|piece| piece.bytes).sum();
            if self.storage.collides(process, volume, offset, bytes) {
                self.count(Event::WritesCollide);
                self.note(|| format!("a write at {offset} collides with one of another process"));
            }
        }
        let time = self.draw_time();
        let number = self.number();
        self.storage.transfers.insert(
            number,
            Transfer {
                description: file.description,
                process,
                offset,
                work,
                due: task::now() + time,
                outcome: None,
            },
        );
        Ok((number, time))
    }
}

/// # Safety
/// The memory is valid and not written to during the call.
unsafe fn gather(memory: &[Memory]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(memory.iter().map(|piece| piece.bytes).sum());
    for piece in memory {
        // SAFETY: as the caller promises.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(piece.start, piece.bytes) });
    }
    bytes
}

/// # Safety
/// The memory is valid, has at least as many bytes, and is not used during the call.
unsafe fn scatter(mut bytes: &[u8], memory: &[Memory]) {
    for piece in memory {
        let count = piece.bytes.min(bytes.len());
        let (part, rest) = bytes.split_at(count);
        // SAFETY: as the caller promises; `part` is memory of the machine.
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), piece.start, count) };
        bytes = rest;
    }
}

fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

/// Waits until a transfer is over.
fn finish(number: u64, time: Duration) -> Result<usize, i32> {
    if task::is_task() {
        task::sleep(time);
    }
    with(|kernel| {
        // The driver has carried it out, unless it calls `Machine::settle` too seldom.
        let due = kernel.storage.transfers.get(&number);
        if due.is_some_and(|transfer| transfer.outcome.is_none()) {
            kernel.carry_out(number);
        }
        let over = kernel.storage.transfers.remove(&number);
        let outcome = over.and_then(|transfer| transfer.outcome);
        outcome.unwrap_or(Err(libc::EIO))
    })
}

fn memory_of(pieces: &[libc::iovec]) -> Vec<Memory> {
    let piece = |piece: &libc::iovec| Memory {
        start: piece.iov_base.cast(),
        bytes: piece.iov_len,
    };
    pieces.iter().map(piece).collect()
}

impl Drop for Handle {
    fn drop(&mut self) {
        with_if_there(|kernel| {
            if let Some(description) = kernel.storage.descriptions.get_mut(&self.description) {
                description.is_closed = true;
            }
            kernel.storage.release(self.description);
        });
    }
}

fn found(node: Node) -> Found {
    Found {
        kind: match node.content {
            NodeContent::Volume(_) => Kind::File,
            NodeContent::Socket(_) => Kind::Socket,
        },
        id: FileId(node.id),
        user: USER,
        is_sticky: false,
    }
}

/// The file that a path leads to.
///
/// # Errors
/// Not found.
pub fn look(path: &Path) -> io::Result<Found> {
    look_at_name(path)
}

/// The file that has this name. Every path above a file is a directory.
///
/// # Errors
/// Not found.
pub fn look_at_name(path: &Path) -> io::Result<Found> {
    with(|kernel| {
        if let Some(node) = kernel.names.get(path) {
            return Ok(found(*node));
        }
        if kernel.names.keys().any(|name| name.starts_with(path)) {
            return Ok(Found {
                kind: Kind::Directory,
                id: FileId(0),
                user: USER,
                is_sticky: false,
            });
        }
        Err(errno(libc::ENOENT))
    })
}

/// Identity and owner of an open file.
///
/// # Errors
/// For a closed one.
pub fn identify(file: &Handle) -> io::Result<(FileId, u32)> {
    with(|kernel| Ok((FileId(kernel.storage.volume_of(file)?.id), USER)))
}

/// An absolute path to the same file, without links: there are none.
///
/// # Errors
/// Not found.
pub fn resolve(path: &Path) -> io::Result<PathBuf> {
    look_at_name(path).map(|_| path.to_owned())
}

/// Removes a name.
///
/// # Errors
/// Not found.
pub fn remove(path: &Path) -> io::Result<()> {
    with(|kernel| match kernel.names.remove(path) {
        Some(_) => Ok(()),
        None => Err(errno(libc::ENOENT)),
    })
}

/// Whether this process may add and remove names in a directory: always.
///
/// # Errors
/// None.
pub fn may_change(_directory: &Path) -> io::Result<()> {
    Ok(())
}

/// Opens a file.
///
/// # Errors
/// Not found, or no volume.
///
/// # Panics
/// Outside a task.
pub fn open(path: &Path, how: How) -> io::Result<(Handle, bool)> {
    let process = Process::current().expect("a file that no task opens");
    with(|kernel| {
        let node = kernel.names.get(path).ok_or_else(|| errno(libc::ENOENT))?;
        let NodeContent::Volume(volume) = node.content else {
            return Err(errno(libc::ENXIO));
        };
        let description = kernel.number();
        kernel.storage.descriptions.insert(
            description,
            Description {
                process,
                volume,
                writes: how.writes,
                is_closed: false,
            },
        );
        Ok((Handle { description }, true))
    })
}

/// Length of a file in bytes.
///
/// # Errors
/// For a closed one.
pub fn length(file: &Handle) -> io::Result<u64> {
    with(|kernel| Ok(kernel.storage.volume_of(file)?.bytes))
}

/// Reads bytes; fewer than requested at the end of the file.
///
/// # Errors
/// Those of a transfer.
pub fn read_at(file: &Handle, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    let piece = Memory {
        start: bytes.as_mut_ptr(),
        bytes: bytes.len(),
    };
    let begun = with(|kernel| kernel.submit(file, offset, Work::Read(vec![piece])));
    let outcome = begun.and_then(|(number, time)| finish(number, time));
    outcome.map_err(as_plain)
}

/// Writes bytes. Returns their number.
///
/// # Errors
/// Those of a transfer.
pub fn write_at(file: &Handle, bytes: &[u8], offset: u64) -> io::Result<usize> {
    let piece = Memory {
        start: bytes.as_ptr().cast_mut(),
        bytes: bytes.len(),
    };
    let begun = with(|kernel| kernel.submit(file, offset, Work::Write(vec![piece])));
    let outcome = begun.and_then(|(number, time)| finish(number, time));
    outcome.map_err(as_plain)
}

/// A plain read or write is interrupted, and never deferred or cancelled.
fn as_plain(error: i32) -> io::Error {
    match error {
        libc::EAGAIN | libc::ECANCELED => errno(libc::EINTR),
        error => errno(error),
    }
}

/// Makes everything written to a file durable.
///
/// # Errors
/// The error number.
pub fn sync_data(file: &Handle) -> Result<(), i32> {
    let (number, time) = with(|kernel| {
        let volume = kernel.storage.volume_of(file).map_err(|_| libc::EBADF)?;
        let end = volume.synced + volume.medium.unsynced() as u64;
        kernel.submit(file, 0, Work::Sync(end))
    })?;
    finish(number, time).map(drop)
}

/// `preadv`. Returns the number of bytes, or the error number.
///
/// # Errors
/// The error number.
///
/// # Safety
/// The memory behind the pieces is valid and not otherwise used during the call.
pub unsafe fn read_pieces(
    file: &Handle,
    offset: u64,
    pieces: &[libc::iovec],
) -> Result<usize, i32> {
    let work = Work::Read(memory_of(pieces));
    let (number, time) = with(|kernel| kernel.submit(file, offset, work))?;
    finish(number, time)
}

/// `pwritev`. Returns the number of bytes, or the error number.
///
/// # Errors
/// The error number.
///
/// # Safety
/// The memory behind the pieces is valid, and no one writes to it during the call.
pub unsafe fn write_pieces(
    file: &Handle,
    offset: u64,
    pieces: &[libc::iovec],
) -> Result<usize, i32> {
    let work = Work::Write(memory_of(pieces));
    let (number, time) = with(|kernel| kernel.submit(file, offset, work))?;
    finish(number, time)
}

/// The first hole of a file: unknown.
///
/// # Errors
/// Unsupported.
pub fn next_hole(_file: &Handle, _from: u64) -> io::Result<u64> {
    Err(io::ErrorKind::Unsupported.into())
}

/// The first data of a file: unknown.
///
/// # Errors
/// Unsupported.
pub fn next_data(_file: &Handle, _from: u64) -> io::Result<u64> {
    Err(io::ErrorKind::Unsupported.into())
}

/// A simulated file has no descriptor that the kernel knows.
#[must_use]
pub fn descriptor(_file: &Handle) -> Option<BorrowedFd<'_>> {
    None
}

/// Locks a file, or releases its lock.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] if another description holds a lock.
pub fn lock(file: &Handle, lock: Lock) -> io::Result<()> {
    let own = file.description;
    with(|kernel| {
        let volume = kernel.storage.volume_of(file)?;
        if lock == Lock::None {
            volume.locks.remove(&own);
            return Ok(());
        }
        let excludes = |(of, held): (&u64, &Lock)| {
            *of != own && (lock == Lock::Exclusive || *held == Lock::Exclusive)
        };
        if volume.locks.iter().any(excludes) {
            return Err(errno(libc::EWOULDBLOCK));
        }
        volume.locks.insert(own, lock);
        Ok(())
    })
}

fn overlap(a: &Range<i64>, b: &Range<i64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Locks bytes of a file for its description, or releases them.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] if another description holds a lock on them.
pub fn lock_bytes(file: &Handle, bytes: Range<i64>, is_locked: bool) -> io::Result<()> {
    let own = file.description;
    with(|kernel| {
        let volume = kernel.storage.volume_of(file)?;
        let locks = &mut volume.byte_locks;
        if is_locked {
            if locks
                .iter()
                .any(|(of, held)| *of != own && overlap(held, &bytes))
            {
                return Err(errno(libc::EAGAIN));
            }
            locks.push((own, bytes));
            return Ok(());
        }
        locks.retain(|(of, held)| *of != own || !overlap(held, &bytes));
        Ok(())
    })
}

/// Whether another description holds a lock on some of these bytes.
///
/// # Errors
/// For a closed file.
pub fn are_bytes_locked(file: &Handle, bytes: Range<i64>) -> io::Result<bool> {
    let own = file.description;
    with(|kernel| {
        let volume = kernel.storage.volume_of(file)?;
        let mut locks = volume.byte_locks.iter();
        Ok(locks.any(|(of, held)| *of != own && overlap(held, &bytes)))
    })
}

/// The process that holds the exclusive lock of a volume, for checks by the driver.
#[must_use]
pub fn holder_of(path: &Path) -> Option<u32> {
    with(|kernel| {
        let NodeContent::Volume(volume) = kernel.names.get(path)?.content else {
            return None;
        };
        let locks = &kernel.storage.volumes[volume].locks;
        let (holder, _) = locks.iter().find(|(_, lock)| **lock == Lock::Exclusive)?;
        Some(id_of(kernel.storage.descriptions.get(holder)?.process))
    })
}

//! The volumes of a simulated machine, the open descriptions of their files, and the transfers in
//! flight.

use std::collections::BTreeMap;
use std::ops::Range;

use larder_format::BLOCK_BYTES;

use crate::medium::{Content, Medium};
use crate::task::Process;
use crate::time::Instant;

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

/// All media, the open descriptions, and the transfers in flight.
#[derive(Default)]
pub(crate) struct Storage {
    pub(crate) volumes: Vec<Volume>,
    pub(crate) descriptions: BTreeMap<u64, Description>,
    pub(crate) transfers: BTreeMap<u64, Transfer>,
}

pub(crate) struct Volume {
    pub(crate) id: u64,
    pub(crate) medium: Medium,
    /// As its file states it.
    pub(crate) bytes: u64,
    /// By description.
    pub(crate) locks: BTreeMap<u64, Lock>,
    pub(crate) byte_locks: Vec<(u64, Range<i64>)>,
}

pub(crate) struct Description {
    pub(crate) process: Process,
    pub(crate) volume: usize,
    pub(crate) may_write: bool,
    pub(crate) is_closed: bool,
}

/// A piece of the memory of a process.
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    pub(crate) start: *mut u8,
    pub(crate) bytes: usize,
}

pub(crate) enum Work {
    Read(Vec<Memory>),
    Write(Vec<Memory>),
    /// The bytes of a write of a killed process.
    OrphanWrite(Vec<Content>),
    /// Covers the writes before this one.
    Sync(u64),
}

pub(crate) struct Transfer {
    pub(crate) description: u64,
    pub(crate) process: Process,
    pub(crate) offset: u64,
    pub(crate) work: Work,
    pub(crate) due: Instant,
    pub(crate) outcome: Option<Result<usize, i32>>,
}

impl Volume {
    /// The number that a sync gets which covers all writes so far.
    pub(crate) fn writes(&self) -> u64 {
        self.medium.next()
    }
}

impl Storage {
    pub(crate) fn add(&mut self, medium: Medium, id: u64) -> usize {
        self.volumes.push(Volume {
            id,
            bytes: (medium.blocks() * BLOCK_BYTES) as u64,
            medium,
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
    pub(crate) fn collides(
        &self,
        process: Process,
        volume: usize,
        offset: u64,
        bytes: usize,
    ) -> bool {
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

    pub(crate) fn orphan_transfers(&self) -> impl Iterator<Item = &Transfer> {
        let transfers = self.transfers.values();
        transfers.filter(|transfer| matches!(transfer.work, Work::OrphanWrite(_)))
    }

    pub(crate) fn orphans(&self) -> usize {
        self.orphan_transfers().count()
    }

    pub(crate) fn next_orphan(&self) -> Option<Instant> {
        self.orphan_transfers().map(|transfer| transfer.due).min()
    }

    pub(crate) fn has_transfers(&self, description: u64) -> bool {
        let mut transfers = self.transfers.values();
        transfers.any(|transfer| transfer.description == description && transfer.outcome.is_none())
    }

    /// Ends a description that is closed, once its last transfer is over.
    pub(crate) fn release(&mut self, number: u64) {
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

    /// The volume of an open description; `None` for a closed one.
    pub(crate) fn volume_of(&mut self, number: u64) -> Option<&mut Volume> {
        let description = self.descriptions.get(&number);
        let description = description.filter(|description| !description.is_closed)?;
        Some(&mut self.volumes[description.volume])
    }

    pub(crate) fn open(&mut self, number: u64, process: Process, volume: usize, may_write: bool) {
        let description = Description {
            process,
            volume,
            may_write,
            is_closed: false,
        };
        self.descriptions.insert(number, description);
    }

    pub(crate) fn close(&mut self, number: u64) {
        if let Some(description) = self.descriptions.get_mut(&number) {
            description.is_closed = true;
        }
        self.release(number);
    }

    /// The process that holds the exclusive lock of a volume.
    pub(crate) fn holder_of(&self, volume: usize) -> Option<Process> {
        let locks = &self.volumes[volume].locks;
        let (holder, _) = locks.iter().find(|(_, lock)| **lock == Lock::Exclusive)?;
        Some(self.descriptions.get(holder)?.process)
    }
}

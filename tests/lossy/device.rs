//! A file with a volatile cache in front of it.
//!
//! Writes go to memory; a sync makes all of them durable. When the power is cut
//! ([`Device::cut_power`]) every request fails from that instant on, so that nothing that was under
//! way completes behind it. When it comes back ([`Device::restore_power`]), each block written
//! since the last sync holds one of its versions, chosen by dice: the durable version, or a written
//! one. Some blocks are torn between sectors: the beginning of the newest version, and the rest of
//! another.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use fuser::Errno;
use rand::RngExt;
use rand_pcg::Pcg64Mcg;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::fuse::{self, Mount, OneFile};

const BLOCK_BYTES: usize = 4096;

/// The unit that a device writes whole or not at all.
const SECTOR_BYTES: usize = 512;

/// How long a killed process may take to let go of the file.
const PATIENCE: Duration = Duration::from_secs(60);

type Block = [u8; BLOCK_BYTES];

/// See the module documentation.
pub struct Device {
    shared: Arc<Shared>,
    mountpoint: PathBuf,
    _mount: Mount,
}

struct Shared {
    backing: File,
    bytes: u64,
    state: Mutex<State>,
    closed: Condvar,
    /// Becomes readable when the power goes by itself.
    gone: OwnedFd,
}

#[derive(Default)]
struct State {
    /// The writes to each block since the last sync, the oldest first.
    unsynced: BTreeMap<u64, Vec<Box<Block>>>,
    powerless: bool,
    /// Writes until the power goes by itself.
    writes_left: Option<u64>,
    /// Blocks that cannot be read.
    spoilt: BTreeSet<u64>,
    /// How often the file is open.
    open: u64,
    counts: Counts,
}

/// Counters of the device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Writes that were taken.
    pub writes: u64,
    /// Blocks that syncs made durable.
    pub synced: u64,
    /// Blocks that were not synced when the power was cut. `lost`: the number that did not keep
    /// their last write.
    pub doubtful: u64,
    pub lost: u64,
    /// The number of lost blocks that were torn.
    pub torn: u64,
}

impl Device {
    /// A device over a file, mounted at a directory.
    ///
    /// # Errors
    /// Where the system offers no FUSE, or not to this user.
    pub fn mount(backing: &Path, mountpoint: &Path) -> io::Result<Device> {
        let file = File::options().read(true).write(true).open(backing)?;
        let shared = Arc::new(Shared {
            bytes: file.metadata()?.len(),
            backing: file,
            state: Mutex::default(),
            closed: Condvar::new(),
            gone: eventfd(0, EventfdFlags::CLOEXEC)?,
        });
        let mount = fuse::mount(Arc::clone(&shared), mountpoint)?;
        Ok(Device {
            shared,
            mountpoint: mountpoint.to_owned(),
            _mount: mount,
        })
    }

    /// Where the file is.
    pub fn path(&self) -> PathBuf {
        self.mountpoint.join(fuse::NAME)
    }

    pub fn counts(&self) -> Counts {
        self.shared.lock().counts
    }

    /// From now on the block at a byte offset cannot be read.
    pub fn spoil(&self, offset: u64) {
        let block = offset / BLOCK_BYTES as u64;
        self.shared.lock().spoilt.insert(block);
    }

    /// From now on every request fails.
    pub fn cut_power(&self) {
        self.shared.lock().powerless = true;
    }

    /// The power goes with the next write after so many, and kills `child`, which writes. Returns
    /// when the child has ended, and whether the power has gone.
    pub fn cut_power_after(&self, writes: u64, child: &mut Command) -> bool {
        self.shared.lock().writes_left = Some(writes);
        let mut child = child.spawn().unwrap();
        let ended = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        let mut events = [
            PollFd::new(&ended, PollFlags::IN),
            PollFd::new(&self.shared.gone, PollFlags::IN),
        ];
        poll(&mut events, None).unwrap();
        // It takes no harm if it has ended.
        child.kill().unwrap();
        child.wait().unwrap();
        self.shared.lock().powerless
    }

    /// Waits until the file is closed, chooses the content of each unsynced block by dice, and
    /// works again.
    pub fn restore_power(&self, dice: &mut Pcg64Mcg) {
        let state = self.shared.lock();
        let waited = self
            .shared
            .closed
            .wait_timeout_while(state, PATIENCE, |state| state.open > 0);
        let (mut state, timeout) = waited.unwrap();
        assert!(!timeout.timed_out(), "a killed process keeps the file open");
        // Whole losses and no losses as well as everything between.
        let keeps = dice.random_range(0.0..1.0_f64);
        for (block, versions) in std::mem::take(&mut state.unsynced) {
            state.counts.doubtful += 1;
            let newest = versions.len() - 1;
            let kept = if dice.random_bool(keeps) {
                Some(newest)
            } else {
                dice.random_range(0..=versions.len()).checked_sub(1)
            };
            state.counts.lost += u64::from(kept != Some(newest));
            let mut bytes = match kept {
                Some(kept) => *versions[kept],
                None => self.shared.durable(block).unwrap(),
            };
            if dice.random_ratio(1, 10) {
                // Torn: it begins with the last write.
                let sectors = dice.random_range(0..=BLOCK_BYTES / SECTOR_BYTES);
                let torn = sectors * SECTOR_BYTES;
                bytes[..torn].copy_from_slice(&versions[newest][..torn]);
                state.counts.torn += 1;
            }
            self.shared.write_back(block, &bytes).unwrap();
        }
        state.powerless = false;
        state.writes_left = None;
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// The state, unless the power is off.
    fn powered(&self) -> Result<MutexGuard<'_, State>, Errno> {
        let state = self.lock();
        if state.powerless {
            Err(Errno::EIO)
        } else {
            Ok(state)
        }
    }

    fn write_back(&self, block: u64, bytes: &Block) -> io::Result<()> {
        self.backing.write_all_at(bytes, block * BLOCK_BYTES as u64)
    }

    fn block(&self, state: &State, block: u64) -> io::Result<Block> {
        if let Some(newest) = state
            .unsynced
            .get(&block)
            .and_then(|versions| versions.last())
        {
            return Ok(**newest);
        }
        self.durable(block)
    }

    fn durable(&self, block: u64) -> io::Result<Block> {
        let mut bytes = [0; BLOCK_BYTES];
        self.backing
            .read_exact_at(&mut bytes, block * BLOCK_BYTES as u64)?;
        Ok(bytes)
    }
}

impl OneFile for Shared {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn opened(&self) {
        self.lock().open += 1;
    }

    fn closed(&self) {
        self.lock().open -= 1;
        self.closed.notify_all();
    }

    fn read(&self, offset: u64, size: u32) -> Result<Vec<u8>, Errno> {
        let state = self.powered()?;
        let end = self.bytes.min(offset + u64::from(size));
        let blocks = offset / BLOCK_BYTES as u64..end.div_ceil(BLOCK_BYTES as u64);
        if blocks.start < blocks.end && state.spoilt.range(blocks).next().is_some() {
            return Err(Errno::EIO);
        }
        let mut bytes = vec![0; usize::try_from(end.saturating_sub(offset)).unwrap()];
        self.backing.read_exact_at(&mut bytes, offset)?;
        for (&block, versions) in state.unsynced.range(offset / BLOCK_BYTES as u64..) {
            let start = block * BLOCK_BYTES as u64;
            if start >= end {
                break;
            }
            let from = start.max(offset);
            let to = (start + BLOCK_BYTES as u64).min(end);
            let place = |at: u64, base: u64| usize::try_from(at - base).unwrap();
            if let (true, Some(newest)) = (from < to, versions.last()) {
                bytes[place(from, offset)..place(to, offset)]
                    .copy_from_slice(&newest[place(from, start)..place(to, start)]);
            }
        }
        Ok(bytes)
    }

    fn write(&self, offset: u64, mut bytes: &[u8]) -> Result<u32, Errno> {
        let mut state = self.powered()?;
        match &mut state.writes_left {
            Some(0) => {
                state.powerless = true;
                rustix::io::write(&self.gone, &1_u64.to_ne_bytes()).unwrap();
                return Err(Errno::EIO);
            }
            Some(left) => *left -= 1,
            None => {}
        }
        if offset + bytes.len() as u64 > self.bytes {
            return Err(Errno::ENOSPC);
        }
        state.counts.writes += 1;
        let written = u32::try_from(bytes.len()).unwrap();
        let mut at = offset;
        while !bytes.is_empty() {
            let block = at / BLOCK_BYTES as u64;
            let within = usize::try_from(at % BLOCK_BYTES as u64).unwrap();
            let (piece, rest) = bytes.split_at(bytes.len().min(BLOCK_BYTES - within));
            let mut version = if piece.len() == BLOCK_BYTES {
                [0; BLOCK_BYTES]
            } else {
                self.block(&state, block)?
            };
            version[within..within + piece.len()].copy_from_slice(piece);
            state
                .unsynced
                .entry(block)
                .or_default()
                .push(Box::new(version));
            at += piece.len() as u64;
            bytes = rest;
        }
        Ok(written)
    }

    fn sync(&self) -> Result<(), Errno> {
        let mut state = self.powered()?;
        for (block, versions) in std::mem::take(&mut state.unsynced) {
            state.counts.synced += 1;
            if let Some(newest) = versions.last() {
                self.write_back(block, newest)?;
            }
        }
        Ok(())
    }
}

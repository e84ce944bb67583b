//! A disk in memory that can lose, tear, refuse and rot its content.
//!
//! A volume has two images, by block. Reads see the *visible* one. The *durable* one survives a
//! power loss. An acknowledged write is visible, and belongs to the *unsynced* writes until a sync.
//! A power loss keeps of each unsynced block any of its versions, or the durable one. Writes in
//! flight stay with the driver. It hands a write over when it decides that the write happens, in
//! whole or in part.
//!
//! Page data is kept as one word for each block, all else as bytes: no run materialises the payload
//! that it writes.
//!
//! Every operation passes the simulated system calls of [`Kernel`]. As a [`Disk`] it answers at
//! once: recovery and reclaim read through it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use larder_engine::disk::{Action, Buffer, Choice, Disk, DiskError, Done, Kind, Op, Piece};
use larder_engine::format::BLOCK_BYTES;
use larder_engine::memory::AlignedBuf;

use crate::dice::{Dice, mix};
use crate::kernel::{Answer, Kernel, Odds};

pub type Block = [u8; BLOCK_BYTES];

/// The content of one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    Zero,
    /// Page data: the whole block repeats this word.
    Data(u64),
    /// Metadata, or the rest of a torn write.
    Bytes(Arc<Block>),
}

impl Content {
    pub fn render(&self, out: &mut [u8]) {
        match self {
            Content::Zero => out.fill(0),
            Content::Data(word) => {
                for chunk in out.chunks_exact_mut(8) {
                    chunk.copy_from_slice(&word.to_le_bytes());
                }
            }
            Content::Bytes(bytes) => out.copy_from_slice(&bytes[..]),
        }
    }

    /// The content after a write of `new` that is torn after `bytes` bytes.
    fn torn(&self, new: &Content, bytes: usize) -> Content {
        let mut old: Block = [0; BLOCK_BYTES];
        let mut block: Block = [0; BLOCK_BYTES];
        self.render(&mut old);
        new.render(&mut block);
        block[bytes..].copy_from_slice(&old[bytes..]);
        if block == old {
            self.clone()
        } else {
            Content::Bytes(Arc::new(block))
        }
    }

    /// The same with one bit flipped. Reading again gives the same result.
    fn rotten(&self) -> Content {
        match self {
            Content::Zero => Content::Data(1),
            Content::Data(word) => Content::Data(word ^ (1 << (word % 64))),
            Content::Bytes(bytes) => {
                let mut bytes = bytes.clone();
                // Each time another bit is flipped: rotting twice must not restore the block.
                let sum: usize = bytes.iter().map(|byte| usize::from(*byte)).sum();
                let at = 24 + sum % 127;
                Arc::make_mut(&mut bytes)[at] ^= 1 << (at % 8);
                Content::Bytes(bytes)
            }
        }
    }
}

/// Blocks of bytes as contents.
pub fn contents(bytes: &[u8]) -> Vec<Content> {
    bytes
        .chunks_exact(BLOCK_BYTES)
        .map(|block| Content::Bytes(Arc::new(block.try_into().unwrap())))
        .collect()
}

/// The part of a write that arrives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arrival {
    All,
    Nothing,
    /// This many whole blocks, and this many bytes of the next one.
    Prefix(usize, usize),
    /// For each block, whether it arrives.
    Subset(Vec<bool>),
}

impl Arrival {
    /// Draws the part that arrives of an interrupted write of `count` blocks.
    pub fn draw(dice: &mut Dice, count: usize) -> Arrival {
        match dice.below(5) {
            0 => Arrival::All,
            1 => Arrival::Nothing,
            2 => Arrival::Prefix(dice.below(count), SECTOR * dice.below(BLOCK_BYTES / SECTOR)),
            3 => Arrival::Prefix(dice.below(count), 0),
            _ => {
                let share = dice.pick(&[0.1, 0.5, 0.9]);
                Arrival::Subset((0..count).map(|_| dice.chance(share)).collect())
            }
        }
    }

    /// Whether some of it arrives and some does not.
    pub fn is_torn(&self) -> bool {
        match self {
            Arrival::All | Arrival::Nothing => false,
            Arrival::Prefix(blocks, bytes) => blocks + bytes > 0,
            Arrival::Subset(keep) => keep.contains(&true) && keep.contains(&false),
        }
    }
}

/// Blocks are torn at multiples of this size, in bytes.
const SECTOR: usize = 512;

/// The outcome of a write.
#[derive(Clone, Debug)]
pub enum Fate {
    Done,
    /// Acknowledged, but never happens.
    Lost,
    /// Acknowledged, but lands from this block on.
    Elsewhere(usize),
    /// Fails, after this part of it has arrived.
    Fails(Answer, Arrival),
}

/// Number of failing reads of a block that stays unreadable for good.
const FOR_GOOD: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct Written {
    blocks: Vec<(usize, Content)>,
}

/// The operations that a volume still performs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    Everything,
    ReadsAndSyncs,
    Reads,
    Nothing,
}

#[derive(Debug)]
pub struct SimVolume {
    pub left: Left,
    visible: Vec<Content>,
    durable: Vec<Content>,
    unsynced: Vec<Written>,
    /// Unreadable blocks: how many reads still fail.
    sick: BTreeMap<usize, u32>,
}

impl SimVolume {
    fn new(blocks: usize) -> SimVolume {
        SimVolume {
            left: Left::Everything,
            visible: vec![Content::Zero; blocks],
            durable: vec![Content::Zero; blocks],
            unsynced: Vec::new(),
            sick: BTreeMap::new(),
        }
    }

    pub fn blocks(&self) -> usize {
        self.visible.len()
    }

    pub fn visible(&self, block: usize) -> &Content {
        &self.visible[block]
    }

    pub fn durable(&self, block: usize) -> &Content {
        &self.durable[block]
    }

    /// A write. `keep` decides for each block whether it arrives.
    pub fn write(&mut self, start: usize, blocks: &[Content], mut keep: impl FnMut() -> bool) {
        assert!(
            start + blocks.len() <= self.visible.len(),
            "a write beyond the end of the volume"
        );
        let mut written = Written {
            blocks: Vec::with_capacity(blocks.len()),
        };
        for (at, content) in (start..).zip(blocks) {
            if keep() {
                self.visible[at] = content.clone();
                self.sick.remove(&at);
                written.blocks.push((at, content.clone()));
            }
        }
        self.unsynced.push(written);
    }

    /// A write of which only a part arrives.
    pub fn write_part(&mut self, start: usize, blocks: &[Content], arrival: &Arrival) {
        match arrival {
            Arrival::All => self.write(start, blocks, || true),
            Arrival::Nothing => {}
            Arrival::Subset(keep) => {
                let mut keep = keep.iter().copied();
                self.write(start, blocks, || keep.next().unwrap_or(false));
            }
            &Arrival::Prefix(whole, bytes) => {
                let whole = whole.min(blocks.len());
                self.write(start, &blocks[..whole], || true);
                if bytes > 0
                    && let Some(last) = blocks.get(whole)
                {
                    let torn = self.visible[start + whole].torn(last, bytes);
                    self.write(start + whole, &[torn], || true);
                }
            }
        }
    }

    /// The number of unsynced writes: a sync that starts now will cover them.
    pub fn unsynced(&self) -> usize {
        self.unsynced.len()
    }

    /// A sync of the first `count` unsynced writes succeeds.
    pub fn synced(&mut self, count: usize) {
        for written in self.unsynced.drain(..count) {
            for (at, content) in written.blocks {
                self.durable[at] = content;
            }
        }
    }

    /// A sync fails. `keep` is the probability that a covered block becomes durable, `stays` the
    /// probability that reads still see a dropped one. Returns the dropped blocks.
    pub fn sync_failed(
        &mut self,
        count: usize,
        dice: &mut Dice,
        keep: f64,
        stays: f64,
    ) -> Vec<(usize, Content)> {
        let mut dropped = Vec::new();
        for written in self.unsynced.drain(..count) {
            for (at, content) in written.blocks {
                if dice.chance(keep) {
                    self.durable[at] = content;
                } else {
                    dropped.push((at, content));
                }
            }
        }
        for (at, content) in &dropped {
            if self.visible[*at] == *content && !dice.chance(stays) {
                self.visible[*at] = self.durable[*at].clone();
            }
        }
        dropped
    }

    /// The power fails: each unsynced block keeps any of its versions. Returns whether some were
    /// kept and some were not.
    pub fn lose_power(&mut self, dice: &mut Dice) -> bool {
        // Some crashes lose everything, some nothing, most something.
        let keep = dice.pick(&[0.0, 0.1, 0.5, 0.9, 1.0]);
        let whole = dice.chance(0.5);
        let (mut kept, mut lost) = (false, false);
        for written in std::mem::take(&mut self.unsynced) {
            let all = dice.chance(keep);
            for (at, content) in written.blocks {
                if if whole { all } else { dice.chance(keep) } {
                    self.durable[at] = content;
                    kept = true;
                } else {
                    lost = true;
                }
            }
        }
        self.visible.clone_from(&self.durable);
        kept && lost
    }

    pub fn rot(&mut self, block: usize) {
        let rotten = self.visible[block].rotten();
        self.visible[block] = rotten.clone();
        self.durable[block] = rotten;
        for written in &mut self.unsynced {
            written.blocks.retain(|(at, _)| *at != block);
        }
    }

    /// Makes a block unreadable, for good or for this many reads.
    pub fn make_unreadable(&mut self, block: usize, tries: Option<u32>) {
        let sick = self.sick.entry(block).or_default();
        *sick = tries.unwrap_or(FOR_GOOD).max(*sick);
    }

    pub fn is_unreadable(&self, block: usize) -> bool {
        self.sick.contains_key(&block)
    }

    /// Whether it has unreadable blocks.
    pub fn is_sick(&self) -> bool {
        !self.sick.is_empty()
    }

    /// Whether this read fails.
    fn fails(&mut self, start: usize, count: usize) -> bool {
        if self.left == Left::Nothing {
            return true;
        }
        if self.sick.is_empty() {
            return false;
        }
        let mut fails = false;
        for (_, tries) in self.sick.range_mut(start..start + count) {
            fails |= *tries > 0;
            if *tries != FOR_GOOD {
                *tries = tries.saturating_sub(1);
            }
        }
        self.sick.retain(|_, tries| *tries > 0);
        fails
    }

    pub fn digest(&self) -> u64 {
        let mut digest = 0;
        for (at, content) in (0..).zip(&self.durable) {
            digest = match content {
                Content::Zero => digest,
                Content::Data(word) => mix(digest ^ at, *word),
                Content::Bytes(bytes) => mix(
                    digest ^ at,
                    u64::from_le_bytes(bytes[16..24].try_into().unwrap()),
                ),
            };
        }
        digest
    }
}

/// All volumes of a store.
pub struct SimDisk {
    volumes: Mutex<Vec<SimVolume>>,
    kernel: Mutex<Kernel>,
    choice: Choice,
}

impl SimDisk {
    pub fn new(blocks: &[usize], dice: Dice, odds: Odds) -> Arc<SimDisk> {
        Arc::new(SimDisk {
            volumes: Mutex::new(
                blocks
                    .iter()
                    .map(|&blocks| SimVolume::new(blocks))
                    .collect(),
            ),
            kernel: Mutex::new(Kernel::new(dice, odds)),
            choice: Choice {
                kind: Kind::Threads,
                reason: "simulated".to_owned(),
            },
        })
    }

    pub fn volumes(&self) -> MutexGuard<'_, Vec<SimVolume>> {
        self.volumes.lock().unwrap()
    }

    pub fn kernel(&self) -> MutexGuard<'_, Kernel> {
        self.kernel.lock().unwrap()
    }

    /// A read of adjacent blocks.
    pub fn read(
        &self,
        volume: usize,
        start: usize,
        count: usize,
    ) -> Result<Vec<Content>, DiskError> {
        let volume = &mut self.volumes()[volume];
        let mut kernel = self.kernel();
        kernel.read(start, count, |start, count| volume.fails(start, count))?;
        Ok(volume.visible[start..start + count].to_vec())
    }

    /// A write of adjacent blocks, with its outcome. Returns the answer of the device.
    pub fn write(
        &self,
        volume: usize,
        start: usize,
        blocks: &[Content],
        fate: &Fate,
    ) -> Result<(), DiskError> {
        let volume = &mut self.volumes()[volume];
        let mut kernel = self.kernel();
        let answer = match fate {
            Fate::Fails(answer, _) => *answer,
            Fate::Done | Fate::Lost | Fate::Elsewhere(_) => Answer::Done,
        };
        let land = |first: usize, count: usize, is_last: bool| {
            let within = first - start;
            let part = &blocks[within..within + count];
            match fate {
                Fate::Lost => {}
                Fate::Elsewhere(to) => volume.write(to + within, part, || true),
                Fate::Fails(_, arrival) if is_last => volume.write_part(first, part, arrival),
                Fate::Done | Fate::Fails(..) => volume.write(first, part, || true),
            }
        };
        kernel.write(start, blocks.len(), answer, land)
    }

    fn carry_out(
        &self,
        volume: usize,
        action: Action,
    ) -> (Result<(), DiskError>, Option<AlignedBuf>) {
        let Action::Read { offset, buffer } = action else {
            panic!("only reads use the disk interface");
        };
        let Buffer::Owned(mut bytes) = buffer else {
            panic!("a read into memory that the simulation does not own");
        };
        let start = usize::try_from(offset).unwrap() / BLOCK_BYTES;
        let blocks = self.read(volume, start, bytes.len() / BLOCK_BYTES);
        let result = blocks.map(|blocks| {
            for (block, out) in blocks.iter().zip(bytes.chunks_exact_mut(BLOCK_BYTES)) {
                // The buffer is zeroed already.
                if *block != Content::Zero {
                    block.render(out);
                }
            }
        });
        (result, Some(bytes))
    }
}

impl Disk for SimDisk {
    unsafe fn submit(&self, ops: Vec<Op>) {
        for op in ops {
            let (result, buffer) = self.carry_out(op.volume, op.action);
            op.sink.done(vec![Done {
                tag: op.tag,
                result,
                buffer,
            }]);
        }
    }

    unsafe fn register(&self, _: &[Piece]) -> String {
        "simulated".to_owned()
    }

    fn choice(&self) -> &Choice {
        &self.choice
    }

    fn shutdown(&self) {}
}

//! A disk in memory that can lose, tear, refuse and rot what it is given.
//!
//! A volume has two images, by block: what reads see (*visible*), and what would survive a power loss (*durable*). A write that
//! has been answered is visible and waits among the *unsynced* for a sync; a power loss keeps of each unsynced block any of its
//! versions, or the durable one. What is still in flight lies with the driver, which hands it over when it decides that
//! the write happens, in whole or in part.
//!
//! Page data is kept as one word a block, metadata as bytes: no run ever materialises the payload it writes.
//!
//! As a [`Disk`] it answers at once: recovery and reclaim read through it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};

use larder_engine::disk::{Action, Buffer, Choice, Disk, DiskError, Done, Kind, Op, Piece};
use larder_engine::format::BLOCK_BYTES;

use crate::dice::{Dice, mix};

pub type Block = [u8; BLOCK_BYTES];

/// What one block holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    Zero,
    /// Page data: the whole block repeats this word.
    Data(u64),
    Meta(Arc<Block>),
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
            Content::Meta(bytes) => out.copy_from_slice(&bytes[..]),
        }
    }

    /// The same with one bit turned, always the same bit: reading again does not heal it.
    fn rotten(&self) -> Content {
        match self {
            Content::Zero => Content::Data(1),
            Content::Data(word) => Content::Data(word ^ (1 << (word % 64))),
            Content::Meta(bytes) => {
                let mut bytes = bytes.clone();
                // Another bit each time, so that rotting twice does not heal.
                let sum: usize = bytes.iter().map(|byte| usize::from(*byte)).sum();
                let at = 24 + sum % 127;
                Arc::make_mut(&mut bytes)[at] ^= 1 << (at % 8);
                Content::Meta(bytes)
            }
        }
    }
}

/// Blocks of bytes as contents.
pub fn contents(bytes: &[u8]) -> Vec<Content> {
    bytes
        .chunks_exact(BLOCK_BYTES)
        .map(|block| Content::Meta(Arc::new(block.try_into().unwrap())))
        .collect()
}

#[derive(Clone, Debug)]
struct Written {
    blocks: Vec<(usize, Content)>,
}

#[derive(Debug)]
pub struct SimVolume {
    visible: Vec<Content>,
    durable: Vec<Content>,
    unsynced: Vec<Written>,
    unreadable: BTreeSet<usize>,
}

impl SimVolume {
    fn new(blocks: usize) -> SimVolume {
        SimVolume {
            visible: vec![Content::Zero; blocks],
            durable: vec![Content::Zero; blocks],
            unsynced: Vec::new(),
            unreadable: BTreeSet::new(),
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

    /// A write that happens, of which `keep` says for each block whether it does.
    pub fn write(&mut self, start: usize, blocks: &[Content], mut keep: impl FnMut() -> bool) {
        assert!(
            start + blocks.len() <= self.visible.len(),
            "a write beyond the volume's end"
        );
        let mut written = Written {
            blocks: Vec::with_capacity(blocks.len()),
        };
        for (at, content) in (start..).zip(blocks) {
            if keep() {
                self.visible[at] = content.clone();
                self.unreadable.remove(&at);
                written.blocks.push((at, content.clone()));
            }
        }
        self.unsynced.push(written);
    }

    /// How much a sync that starts now will cover.
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

    /// A sync fails: of each block it should have covered `keep` says whether it became durable, and of one that did not,
    /// `stays` whether reads still see it. Returns what was dropped.
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

    /// The power goes: each unsynced block keeps any of its versions.
    pub fn lose_power(&mut self, dice: &mut Dice) {
        // Some crashes lose everything, some nothing, most something.
        let keep = dice.pick(&[0.0, 0.1, 0.5, 0.9, 1.0]);
        let whole = dice.chance(0.5);
        for written in std::mem::take(&mut self.unsynced) {
            let all = dice.chance(keep);
            for (at, content) in written.blocks {
                if if whole { all } else { dice.chance(keep) } {
                    self.durable[at] = content;
                }
            }
        }
        self.visible.clone_from(&self.durable);
    }

    pub fn rot(&mut self, block: usize) {
        let rotten = self.visible[block].rotten();
        self.visible[block] = rotten.clone();
        self.durable[block] = rotten;
        for written in &mut self.unsynced {
            written.blocks.retain(|(at, _)| *at != block);
        }
    }

    pub fn make_unreadable(&mut self, block: usize) {
        self.unreadable.insert(block);
    }

    /// What a read of these blocks gives; `None` for an error of the device.
    pub fn read(&self, start: usize, count: usize) -> Option<Vec<Content>> {
        let end = start + count;
        let bad = self.unreadable.range(start..end).next().is_some();
        (!bad && end <= self.visible.len()).then(|| self.visible[start..end].to_vec())
    }

    pub fn digest(&self) -> u64 {
        let mut digest = 0;
        for (at, content) in (0..).zip(&self.durable) {
            digest = match content {
                Content::Zero => digest,
                Content::Data(word) => mix(digest ^ at, *word),
                Content::Meta(bytes) => mix(
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
    choice: Choice,
}

impl SimDisk {
    pub fn new(blocks: &[usize]) -> Arc<SimDisk> {
        Arc::new(SimDisk {
            volumes: Mutex::new(
                blocks
                    .iter()
                    .map(|&blocks| SimVolume::new(blocks))
                    .collect(),
            ),
            choice: Choice {
                kind: Kind::Threads,
                reason: "simulated".to_owned(),
            },
        })
    }

    pub fn volumes(&self) -> MutexGuard<'_, Vec<SimVolume>> {
        self.volumes.lock().unwrap()
    }

    fn carry_out(&self, volume: usize, action: Action) -> (Result<(), DiskError>, Option<Buffer>) {
        let volumes = self.volumes();
        let Action::Read { offset, buffer } = action else {
            panic!("only reads go through the disk's own interface");
        };
        let Buffer::Owned(mut bytes) = buffer else {
            panic!("a read into memory that the simulation does not own");
        };
        let start = usize::try_from(offset).unwrap() / BLOCK_BYTES;
        let count = bytes.len() / BLOCK_BYTES;
        match volumes[volume].read(start, count) {
            Some(blocks) => {
                for (block, out) in blocks.iter().zip(bytes.chunks_exact_mut(BLOCK_BYTES)) {
                    // The buffer comes zeroed.
                    if *block != Content::Zero {
                        block.render(out);
                    }
                }
                (Ok(()), Some(Buffer::Owned(bytes)))
            }
            None => (Err(DiskError::Os(5)), Some(Buffer::Owned(bytes))),
        }
    }
}

impl Disk for SimDisk {
    unsafe fn submit(&self, ops: Vec<Op>) {
        for op in ops {
            let (result, buffer) = self.carry_out(op.volume, op.action);
            let buffer = match buffer {
                Some(Buffer::Owned(bytes)) => Some(bytes),
                _ => None,
            };
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

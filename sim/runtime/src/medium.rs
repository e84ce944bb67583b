//! A medium in memory that can lose, tear, refuse and rot its content: the device under a volume.
//!
//! It has two images, by block. Reads see the *visible* one. The *durable* one survives a power
//! loss. An acknowledged write is visible, and belongs to the *unsynced* writes until a sync. A
//! power loss keeps of each unsynced block any of its versions, or the durable one. Writes in
//! flight stay with the driver of the medium. It hands a write over when it decides that the write
//! happens, in whole or in part.
//!
//! A block that repeats one word, as the payload of the simulation's pages, is kept as that word. A
//! block of a page that a codec made smaller is kept as bytes, with a digest of these.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use larder_format::BLOCK_BYTES;
use rapidhash::v3::rapidhash_v3;

use crate::dice::{Dice, mix};

/// The bytes of a block.
pub type Block = [u8; BLOCK_BYTES];

/// The content of one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Never written.
    Zero,
    /// Page data: the whole block repeats this word.
    Data(u64),
    /// Page data as a codec stores it, with a digest.
    Coded(u64, Arc<Block>),
    /// Metadata, or the rest of a torn write.
    Bytes(Arc<Block>),
}

impl Content {
    /// Page data as a codec stores it.
    #[must_use]
    pub fn coded(block: &Block) -> Content {
        if let Some(word) = word_of(block) {
            return Content::Data(word);
        }
        Content::Coded(rapidhash_v3(block), Arc::new(*block))
    }

    /// Its bytes.
    pub fn render(&self, out: &mut [u8]) {
        match self {
            Content::Zero => out.fill(0),
            Content::Data(word) => out.as_chunks_mut().0.fill(word.to_le_bytes()),
            Content::Coded(_, bytes) | Content::Bytes(bytes) => out.copy_from_slice(&bytes[..]),
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
            Content::Coded(_, bytes) => Content::coded(&flipped(bytes)),
            Content::Bytes(bytes) => Content::Bytes(flipped(bytes)),
        }
    }
}

/// A block with one bit flipped. Each time it is another bit: rotting twice must not restore the
/// block.
fn flipped(block: &Arc<Block>) -> Arc<Block> {
    let mut bytes = block.clone();
    let sum: usize = bytes.iter().map(|byte| usize::from(*byte)).sum();
    let at = 24 + sum % 127;
    Arc::make_mut(&mut bytes)[at] ^= 1 << (at % 8);
    bytes
}

/// The word that a block repeats.
#[must_use]
pub fn word_of(block: &Block) -> Option<u64> {
    let (first, _) = block.split_first_chunk()?;
    (block[8..] == block[..BLOCK_BYTES - 8]).then_some(u64::from_le_bytes(*first))
}

/// Blocks of bytes as contents, with the shortest form of each block.
#[must_use]
pub fn shortest(bytes: &[u8]) -> Vec<Content> {
    let blocks = bytes.as_chunks().0.iter();
    let shortest = |block: &Block| match word_of(block) {
        Some(0) => Content::Zero,
        Some(word) => Content::Data(word),
        None => Content::Bytes(Arc::new(*block)),
    };
    blocks.map(shortest).collect()
}

/// Blocks of bytes as contents.
///
/// # Panics
/// Never: the blocks have their length.
#[must_use]
pub fn contents(bytes: &[u8]) -> Vec<Content> {
    bytes
        .chunks_exact(BLOCK_BYTES)
        .map(|block| Content::Bytes(Arc::new(block.try_into().unwrap())))
        .collect()
}

/// The part of a write that arrives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// The whole write.
    All,
    /// None of it.
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
    #[must_use]
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

/// Number of failing reads of a block that stays unreadable for good.
const FOR_GOOD: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct Written {
    number: u64,
    blocks: Vec<(usize, Content)>,
}

/// The operations that a volume still performs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Left {
    Everything,
    ReadsAndSyncs,
    Reads,
    Nothing,
}

#[derive(Debug)]
/// See the module.
pub struct Medium {
    /// Its remaining service.
    pub left: Left,
    visible: Vec<Content>,
    durable: Vec<Content>,
    unsynced: Vec<Written>,
    /// The number of the next write.
    next: u64,
    /// Unreadable blocks: how many reads still fail.
    sick: BTreeMap<usize, u32>,
}

impl Medium {
    /// A medium of zeros.
    #[must_use]
    pub fn new(blocks: usize) -> Medium {
        Medium {
            left: Left::Everything,
            visible: vec![Content::Zero; blocks],
            durable: vec![Content::Zero; blocks],
            unsynced: Vec::new(),
            next: 0,
            sick: BTreeMap::new(),
        }
    }

    /// Its length in blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.visible.len()
    }

    /// The content that reads see.
    #[must_use]
    pub fn visible(&self, block: usize) -> &Content {
        &self.visible[block]
    }

    /// The content of adjacent blocks that reads see.
    #[must_use]
    pub fn all_visible(&self, start: usize, count: usize) -> &[Content] {
        &self.visible[start..start + count]
    }

    /// The content that survives a power loss.
    #[must_use]
    pub fn durable(&self, block: usize) -> &Content {
        &self.durable[block]
    }

    /// The contents of a block that a sync or a power loss may leave: the durable one, and those of
    /// unsynced writes.
    pub fn survivors(&self, block: usize) -> impl Iterator<Item = &Content> {
        let unsynced = self.unsynced.iter().flat_map(|written| &written.blocks);
        let unsynced = unsynced.filter(move |(at, _)| *at == block);
        [&self.durable[block]]
            .into_iter()
            .chain(unsynced.map(|(_, content)| content))
    }

    /// A write. `keep` decides for each block whether it arrives.
    ///
    /// # Panics
    /// Beyond the end.
    pub fn write(&mut self, start: usize, blocks: &[Content], mut keep: impl FnMut() -> bool) {
        assert!(
            start + blocks.len() <= self.visible.len(),
            "a write beyond the end of the volume"
        );
        let mut written = Written {
            number: self.next,
            blocks: Vec::with_capacity(blocks.len()),
        };
        for (at, content) in (start..).zip(blocks) {
            if keep() {
                self.visible[at] = content.clone();
                self.sick.remove(&at);
                written.blocks.push((at, content.clone()));
            }
        }
        self.next += 1;
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

    /// The number of the next write. A sync that starts now covers the writes before it.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The numbers of the unsynced writes from this one on.
    #[must_use]
    pub fn unsynced_from(&self, number: u64) -> Vec<u64> {
        let later = &self.unsynced[self.position(number)..];
        later.iter().map(|written| written.number).collect()
    }

    /// Where the unsynced writes from this number on begin.
    fn position(&self, number: u64) -> usize {
        self.unsynced
            .partition_point(|written| written.number < number)
    }

    /// A sync of the writes before this number succeeds.
    pub fn synced(&mut self, end: u64) {
        let end = self.position(end);
        for written in self.unsynced.drain(..end) {
            for (at, content) in written.blocks {
                self.durable[at] = content;
            }
        }
    }

    /// A sync fails, and loses these of the unsynced writes. `keep` is the probability that a block
    /// of them becomes durable, `stays` the probability that reads still see a dropped one. Returns
    /// the dropped blocks.
    pub fn sync_failed(
        &mut self,
        lost: Range<u64>,
        dice: &mut Dice,
        keep: f64,
        stays: f64,
    ) -> Vec<(usize, Content)> {
        let mut dropped = Vec::new();
        let lost = self.position(lost.start)..self.position(lost.end);
        let earlier = lost.start;
        for written in self.unsynced.drain(lost).collect::<Vec<_>>() {
            for (at, content) in written.blocks {
                if dice.chance(keep) {
                    self.durable[at] = content;
                    // A later sync must not bring older content of the block back.
                    for older in &mut self.unsynced[..earlier] {
                        older.blocks.retain(|(other, _)| *other != at);
                    }
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

    /// Spoils a block: reads see other bytes from here on.
    pub fn rot(&mut self, block: usize) {
        self.spoil(block, self.visible[block].rotten());
    }

    /// Spoils a block: reads see this content from here on.
    pub fn spoil(&mut self, block: usize, rotten: Content) {
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

    /// Whether reads of a block fail.
    #[must_use]
    pub fn is_unreadable(&self, block: usize) -> bool {
        self.sick.contains_key(&block)
    }

    /// Whether it has unreadable blocks.
    #[must_use]
    pub fn is_sick(&self) -> bool {
        !self.sick.is_empty()
    }

    /// Whether this read fails. Counts as one try.
    pub fn fails(&mut self, start: usize, count: usize) -> bool {
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

    /// A digest of the durable content.
    ///
    /// # Panics
    /// Never: a block has enough bytes.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let mut digest = 0;
        for (at, content) in (0..).zip(&self.durable) {
            digest = match content {
                Content::Zero => digest,
                Content::Data(word) | Content::Coded(word, _) => mix(digest ^ at, *word),
                Content::Bytes(bytes) => mix(
                    digest ^ at,
                    u64::from_le_bytes(bytes[16..24].try_into().unwrap()),
                ),
            };
        }
        digest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn syncs_that_overlap_cover_the_writes_before_their_begin() {
        let mut medium = Medium::new(4);
        let begin_after_write = |medium: &mut Medium, block: usize| {
            medium.write(block, &[Content::Data(block as u64 + 1)], || true);
            medium.next()
        };
        let first = begin_after_write(&mut medium, 0);
        let second = begin_after_write(&mut medium, 1);
        begin_after_write(&mut medium, 2);
        medium.synced(first);
        assert_eq!(*medium.durable(1), Content::Zero);
        medium.synced(second);
        assert_eq!(*medium.durable(1), Content::Data(2));
        assert_eq!(*medium.durable(2), Content::Zero);
        // It covers nothing that is left.
        medium.synced(first);
        assert_eq!(medium.unsynced_from(second), [2]);
    }

    #[test]
    fn a_block_that_a_failed_sync_keeps_is_newer_than_the_writes_before_it() {
        let mut medium = Medium::new(1);
        medium.write(0, &[Content::Data(1)], || true);
        let later = medium.next();
        medium.write(0, &[Content::Data(2)], || true);
        let lost = later..medium.next();
        medium.sync_failed(lost, &mut Dice::new(1), 1.0, 1.0);
        medium.synced(medium.next());
        assert_eq!(*medium.durable(0), Content::Data(2));
        assert_eq!(medium.visible(0), medium.durable(0));
    }
}

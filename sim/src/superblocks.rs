//! The superblocks on the simulated volumes, as an opening must find them.
//!
//! Invariants: a volume opens as long as one of its copies is sound, and shows no state older than
//! that copy. A volume without a sound copy may be lost. Then the store is opened without it, or
//! refused if it was the first volume.

use larder_core::index::Place;
use larder_engine::format::{BLOCK_BYTES, Body, Record, Superblock, SuperblockError, newest};
use larder_sim_runtime::medium::{Content, Medium, contents};
use larder_store::volume::{choose, simulated};

use crate::classes::Class;
use crate::expected::Expected;
use crate::oracle::VersionId;
use crate::setup::{COPIES, blocks_of};
use crate::world::World;

fn encode(superblock: &Superblock) -> Vec<Content> {
    let bytes = simulated::encode(superblock).expect("a superblock that readers reject");
    contents(&bytes[..])
}

pub fn decode(block: &Content) -> Result<Superblock, SuperblockError> {
    let mut bytes = [0; BLOCK_BYTES];
    block.render(&mut bytes);
    simulated::decode(&bytes)
}

fn visible(volume: &Medium) -> [Result<Superblock, SuperblockError>; COPIES] {
    blocks_of(volume.blocks()).map(|at| decode(volume.visible(at)))
}

/// The copy that holds this superblock.
pub fn counting_copy(volume: &Medium, superblock: &Superblock) -> usize {
    let copies = visible(volume);
    let is_it = |copy: &usize| copies[*copy].as_ref() == Ok(superblock);
    [1, 0, 2].into_iter().find(is_it).unwrap_or(0)
}

impl World {
    /// Writes and syncs all copies for each volume of a new store.
    pub fn create_superblocks(&mut self) {
        for volume in 0..self.superblocks.len() {
            let superblock = self.superblocks[volume].clone().expect("none is lost yet");
            let blocks = encode(&superblock);
            let disk = &mut self.disk.volumes()[volume];
            for at in blocks_of(disk.blocks()) {
                disk.write(at, &blocks, || true);
            }
            self.copies[volume] = [Some(superblock.generation); COPIES];
            disk.synced(disk.next());
        }
    }

    /// Reads the superblocks. Returns `None` when the store is refused for good: its first volume
    /// is lost.
    pub fn read_superblocks(&mut self, expected: &mut Expected) -> Option<()> {
        for volume in 0..self.superblocks.len() {
            if self.superblocks[volume].is_none() {
                continue;
            }
            // An unreadable copy counts as an absent one.
            let places = blocks_of(self.disk.volumes()[volume].blocks());
            let copies = places.map(|at| {
                let mut block = Content::Zero;
                let take = |blocks: &[Content]| block.clone_from(&blocks[0]);
                let _ = self.disk.read(volume, at, 1, take);
                decode(&block)
            });
            // Beside other bytes at the start of the volume, the copy at its end does not count.
            let is_foreign = |copy: &&_| matches!(copy, Err(SuperblockError::NotLarder));
            let counting = match copies[..2].iter().any(|copy| is_foreign(&copy)) {
                true => &self.copies[volume][..2],
                false => &self.copies[volume][..],
            };
            let sound = counting.iter().flatten().max().copied();
            let is_by_end = copies[..2].iter().all(Result::is_err) && copies[2].is_ok();
            let found = newest(copies);
            if is_by_end && found.is_ok() {
                self.count(Class::OpenedByEnd);
            }
            match (found, sound) {
                (Ok(found), Some(sound)) => {
                    assert!(
                        found.generation >= sound,
                        "volume {volume} opens with a superblock older than a sound one"
                    );
                    self.superblocks[volume] = Some(found);
                }
                (Err(error), Some(_)) => {
                    panic!("volume {volume} is lost with a sound superblock: {error}")
                }
                // Without a sound copy, content that is found there need not be the last state.
                (_, None) if volume == 0 => {
                    self.count(Class::StoreLost);
                    return None;
                }
                (_, None) => self.lose_volume(volume, expected),
            }
        }
        Some(())
    }

    /// The store continues without a volume, for good.
    fn lose_volume(&mut self, volume: usize, expected: &mut Expected) {
        self.count(Class::VolumeLost);
        self.note(volume as u64, || format!("volume {volume} is lost"));
        self.superblocks[volume] = None;
        // Deletions on that volume are lost with it.
        self.oracle.deletion_spoiled(None);
        let pages = &expected.pages;
        expected.names.retain(|name, _| {
            let (version, place) = pages[name];
            // The older version that must survive in its place may have been there.
            let stands_alone = self.oracle.version(version).in_place_of.is_none();
            // The page itself may have been there too, and `place` be the location of a copy that
            // was not synced.
            stands_alone
                && self.volume_of(place.segment).0 != volume
                && self.is_intact(version, place)
                && self.is_told_of(version, place)
        });
        expected.exactly = false;
    }

    /// Whether a descriptor records the page at this location: its bytes may outlive a power loss
    /// that the descriptor does not.
    fn is_told_of(&self, version: VersionId, place: Place) -> bool {
        let (volume, number) = self.volume_of(place.segment);
        let spot = self.spot(volume, number);
        let known = self.oracle.version(version);
        let is_it = |record: &Record| {
            matches!(
                record,
                Record::Page(page)
                    if page.start == place.start && known.has_checksum(page.checksum)
            )
        };
        (0..self.setup.segment_blocks).any(|index| {
            let at = spot.blocks(index, 1).offset / BLOCK_BYTES as u64;
            let at = usize::try_from(at).unwrap_or(usize::MAX);
            let Content::Bytes(bytes) = self.disk.volumes()[volume].visible(at).clone() else {
                return false;
            };
            match spot.parse_block(index, &bytes[..]).map(|block| block.body) {
                Ok(Body::Records(records)) => records.iter().any(is_it),
                _ => false,
            }
        })
    }

    /// The superblocks that an opening at this moment finds, and of each which copy it is. `None`
    /// for a volume without a valid one.
    pub fn visible_superblocks(&self) -> Vec<Option<(Superblock, usize)>> {
        let volumes = self.disk.volumes();
        let found = volumes.iter().map(|volume| choose(&visible(volume)).ok());
        found.collect()
    }
}

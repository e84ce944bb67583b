//! What goes wrong at the device, and what is excused by it.

use larder_engine::format::{Body, DescriptorBlock, Record};

use crate::disk::Content;
use crate::oracle::VersionId;
use crate::world::World;

impl World {
    /// A write arrives: done, failed in part, or lost. Whether the device calls it done.
    pub fn write(
        &mut self,
        volume: usize,
        start: usize,
        blocks: &[Content],
        (error, lost): (f64, f64),
    ) -> bool {
        if self.fault(error) {
            let mut dice = self.dice.fork();
            let keep = dice.pick(&[0.0, 0.5, 1.0]);
            self.disk.volumes()[volume].write(start, blocks, || dice.chance(keep));
            for block in blocks {
                if let Some(version) = self.oracle.owner(block) {
                    self.oracle.version_mut(version).refused = true;
                }
            }
            return false;
        }
        if self.fault(lost) {
            self.note(start as u64, || {
                format!("the write at {volume}:{start} is lost")
            });
            self.count_spoiled(volume, start, blocks);
            return true;
        }
        self.disk.volumes()[volume].write(start, blocks, || true);
        true
    }

    /// These blocks do not hold what they should.
    fn count_spoiled(&mut self, volume: usize, start: usize, blocks: &[Content]) {
        for (block, at) in blocks.iter().zip(start..) {
            match block {
                Content::Zero => {}
                Content::Data(_) => {
                    if let Some(version) = self.oracle.owner(block) {
                        self.oracle.version_mut(version).rotten = true;
                    }
                }
                Content::Meta(_) => {
                    self.oracle.spoiled = true;
                    let (segment, _, within) = self.locate_block(volume, at);
                    self.tainted.insert(segment);
                    if within < 2 {
                        self.headless.insert(segment);
                    }
                    for version in self.pages_of(block) {
                        self.oracle.version_mut(version).rotten = true;
                    }
                }
            }
        }
    }

    /// The pages that a descriptor block describes.
    fn pages_of(&self, block: &Content) -> Vec<VersionId> {
        self.records_of(block)
            .into_iter()
            .filter_map(|record| match record {
                Record::Page(page) => {
                    let namespace = self.namespace_of(page.namespace);
                    let name = self
                        .oracle
                        .by_key(namespace, page.key.prefix().as_bytes())?;
                    self.oracle.find(name, page.checksum)
                }
                _ => None,
            })
            .collect()
    }

    fn records_of(&self, block: &Content) -> Vec<Record> {
        let Content::Meta(bytes) = block else {
            return Vec::new();
        };
        let Ok(block) = DescriptorBlock::check(&bytes[..]) else {
            return Vec::new();
        };
        let (volume, number) = (block.identity().volume, block.identity().segment);
        let spot = self.spot(usize::from(volume), number.0);
        (0..self.setup.segment_blocks)
            .find_map(|index| spot.parse_block(index, &bytes[..]).ok())
            .map_or(Vec::new(), |block| match block.body {
                Body::Records(records) => records,
                Body::Namespace(_) => Vec::new(),
            })
    }

    pub fn fail_sync(&mut self, volume: usize, covers: usize) {
        let mut dice = self.dice.fork();
        let keep = dice.pick(&[0.0, 0.5, 1.0]);
        let stays = dice.pick(&[0.0, 0.5, 1.0]);
        let dropped = self.disk.volumes()[volume].sync_failed(covers, &mut dice, keep, stays);
        for (at, block) in dropped {
            if matches!(block, Content::Meta(_)) {
                let (segment, ..) = self.locate_block(volume, at);
                self.shaken.insert(segment);
            }
            if let Some(version) = self.oracle.owner(&block) {
                self.oracle.version_mut(version).dropped = true;
            }
            for record in self.records_of(&block) {
                match record {
                    Record::Page(_) => {}
                    Record::Delete { namespace, key, .. } => {
                        let namespace = self.namespace_of(namespace);
                        let name = self.oracle.by_key(namespace, key.prefix().as_bytes());
                        self.oracle.deletion_dropped(name);
                    }
                    _ => self.oracle.deletion_dropped(None),
                }
            }
            for version in self.pages_of(&block) {
                self.oracle.version_mut(version).dropped = true;
            }
        }
    }

    /// The device may rot a block or lose the ability to read one.
    pub fn spoil(&mut self) {
        let rot = self.fault(self.setup.faults.rot);
        let unreadable = self.fault(self.setup.faults.unreadable);
        for (happens, rots) in [(rot, true), (unreadable, false)] {
            if !happens {
                continue;
            }
            let volume = self.dice.below(self.setup.volumes.len());
            let first = self.segment_first_block(0);
            let blocks = self.disk.volumes()[volume].blocks();
            // Metadata is rare on the device: look at a few blocks and prefer it.
            let mut at = first + self.dice.below(blocks - first);
            for _ in 0..self.dice.below(40) {
                let other = first + self.dice.below(blocks - first);
                if matches!(self.disk.volumes()[volume].visible(other), Content::Meta(_)) {
                    at = other;
                    break;
                }
            }
            let content = self.disk.volumes()[volume].visible(at).clone();
            if content == Content::Zero {
                continue;
            }
            self.note(at as u64, || {
                format!("{volume}:{at} is spoiled, rots {rots}: {content:.0?}")
            });
            self.count_spoiled(volume, at, &[content]);
            let mut volumes = self.disk.volumes();
            if rots {
                volumes[volume].rot(at);
            } else {
                volumes[volume].make_unreadable(at);
            }
        }
    }
}

//! Whether the volumes still hold what this process wrote: their superblocks and their lengths, and
//! the damage that the open found.
//!
//! Once a second the owner reads one copy of the superblock of each volume, so that a program that
//! writes over the beginning of a volume is noticed long before the next open fails. A volume
//! without use has a state by this read, too (`answering`). Nothing waits for it.
//!
//! Invariants:
//! - One wrong read is no evidence: the store writes its superblocks at a close, and a file system
//!   may return half of such a write.
//! - The contents behind the end of a file that was cut are lost, also when it has its length
//!   again.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use larder_base::memory::AlignedBuf;
use larder_base::system::files::{self, Handle};
use larder_disk::{Action, Buffer, Disk, Done, Op, Purpose, Sink};
use larder_format::{BLOCK_BYTES, Geometry, SUPERBLOCK_OFFSETS, StoreId};

use crate::share::wire::{DamagedVolume, VolumeDamage};
use crate::store::LocalStore;
use crate::volume::{Volumes, decode, is_volume_of};

/// Wrong reads of a copy in a row from which its superblock is overwritten.
const WRONG: u32 = 2;

/// Age of an operation from which its volume is not read.
const LATE: Duration = Duration::from_millis(500);

/// See the module.
pub(super) struct Soundness(Vec<Volume>);

struct Volume {
    /// In the store's list.
    index: usize,
    path: PathBuf,
    file: Arc<Handle>,
    /// Its least length.
    least: Option<u64>,
    is_cut: AtomicBool,
    is_overwritten: AtomicBool,
    read: Arc<Read>,
    /// Damaged places that the open found.
    places: u64,
}

/// The owner's read of a copy of the superblock.
struct Read {
    store: StoreId,
    volume: usize,
    is_out: AtomicBool,
    /// Reads so far, which alternate between the copies.
    count: AtomicU32,
    /// The last reads of each copy that found something else, in a row.
    wrong: [AtomicU32; 2],
}

impl Sink for Read {
    fn done(&self, answers: Vec<Done>) {
        for answer in answers {
            let copy = usize::try_from(answer.tag).ok();
            let wrong = copy.and_then(|copy| self.wrong.get(copy));
            // A failed read is no evidence.
            if let (Ok(()), Some(bytes), Some(wrong)) = (answer.result, answer.buffer, wrong) {
                let found = decode(&bytes);
                match found.is_ok_and(|found| is_volume_of(&found, self.store, self.volume)) {
                    true => wrong.store(0, Ordering::Relaxed),
                    false => _ = wrong.fetch_add(1, Ordering::Relaxed),
                }
            }
        }
        self.is_out.store(false, Ordering::Release);
    }
}

impl Soundness {
    pub(super) fn of(volumes: &Volumes, places: &[u64]) -> Soundness {
        let volume = |(index, volume): (usize, &crate::volume::Volume)| {
            let geometry = volume.geometry().ok();
            Volume {
                index,
                path: volume.path.clone(),
                file: volume.file.clone(),
                least: geometry.map(Geometry::volume_bytes),
                is_cut: AtomicBool::default(),
                is_overwritten: AtomicBool::default(),
                read: Arc::new(Read {
                    store: volume.superblock.store,
                    volume: index,
                    is_out: AtomicBool::default(),
                    count: AtomicU32::default(),
                    wrong: Default::default(),
                }),
                places: places.get(index).copied().unwrap_or(0),
            }
        };
        Soundness(volumes.present().map(volume).collect())
    }

    /// Looks at each volume. To be called once a second.
    pub(super) fn look(&self, store: &LocalStore) {
        let board = &store.data.board;
        for volume in &self.0 {
            // A simulation has no such looks.
            if let Some(answers) = board.look(volume.index) {
                volume.look(&*store.data.disk, answers.oldest);
            }
        }
    }

    /// The volumes that are damaged, and how.
    pub(super) fn report(&self) -> Vec<DamagedVolume> {
        let volumes = self.0.iter();
        volumes.flat_map(Volume::damage).collect()
    }
}

impl Volume {
    fn look(&self, disk: &dyn Disk, oldest: Option<Duration>) {
        let wrong = self.read.wrong.iter();
        let is_overwritten = wrong
            .map(|wrong| wrong.load(Ordering::Relaxed))
            .any(|it| it >= WRONG);
        let was_overwritten = self.is_overwritten.swap(is_overwritten, Ordering::Relaxed);
        if is_overwritten && !was_overwritten {
            self.log(VolumeDamage::Overwritten);
        }
        let length = files::length_in_cache(&self.file).ok().flatten();
        let is_cut = self
            .least
            .zip(length)
            .is_some_and(|(least, length)| length < least);
        if is_cut && !self.is_cut.swap(true, Ordering::Relaxed) {
            self.log(VolumeDamage::Truncated);
        }
        // A volume that does not answer has a state without a read, which would take a thread of
        // its disk from the calls.
        if oldest.is_none_or(|age| age < LATE) {
            self.read.ask(self.index, disk);
        }
    }

    fn log(&self, damage: VolumeDamage) {
        tracing::warn!(
            "{}: a volume does not hold what this process wrote: {}",
            self.path.display(),
            damage.what()
        );
    }

    fn damage(&self) -> Vec<DamagedVolume> {
        let found = [
            (
                self.is_overwritten.load(Ordering::Relaxed),
                VolumeDamage::Overwritten,
                0,
            ),
            (
                self.is_cut.load(Ordering::Relaxed),
                VolumeDamage::Truncated,
                0,
            ),
            (self.places > 0, VolumeDamage::AtOpen, self.places),
        ];
        let found = found.into_iter().filter(|(is_so, ..)| *is_so);
        found
            .map(|(_, damage, places)| DamagedVolume {
                path: self.path.clone(),
                damage,
                places,
            })
            .collect()
    }
}

impl Read {
    /// Reads the copy whose turn it is, unless such a read is on its way.
    fn ask(self: &Arc<Read>, volume: usize, disk: &dyn Disk) {
        let Ok(memory) = AlignedBuf::zeroed(BLOCK_BYTES) else {
            return;
        };
        if self.is_out.swap(true, Ordering::AcqRel) {
            return;
        }
        let copy = self.count.fetch_add(1, Ordering::Relaxed) as usize % SUPERBLOCK_OFFSETS.len();
        let op = Op {
            volume,
            action: Action::Read {
                offset: SUPERBLOCK_OFFSETS[copy],
                buffer: Buffer::Owned(memory),
            },
            purpose: Purpose::Record,
            deadline: None,
            tag: copy as u64,
            sink: self.clone(),
        };
        // SAFETY: the memory travels with the operation.
        unsafe { disk.submit(vec![op]) };
    }
}

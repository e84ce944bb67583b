//! Opens volumes for a survey. Faults are listed, and everything else is used.
//!
//! A volume without a usable superblock is used all the same when another volume names the store:
//! headers and descriptor blocks identify their own places.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_base::system::holder::{self, HolderState, LockHolder};
use larder_disk::{DiskError, Patience};
use larder_format::{
    BLOCK_BYTES, Damage, Geometry, Holder, OpenState, Run, Structure, Superblock, SuperblockError,
    newest, superblock_offsets,
};
use larder_store::error::{StoreError, leaves_the_volume_unknown};
use larder_store::recovery::scan::{Bodies, Spot};
use larder_store::volume::{Access, File, OF_ANOTHER, check_used, is_volume_of, places_of, suits};

use super::facts::{Condition, Flaw, FlawReason, HolderFacts, SurveyError, SurveyOptions};

/// Whether a volume can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeState {
    /// Whole.
    Present,
    /// Shorter than its segments.
    Truncated,
    /// Missing from its path.
    Missing,
    /// The store was once opened without it, which gave it up for good.
    GivenUp,
}

/// A volume, as far as it is known.
#[derive(Clone, Debug)]
pub struct VolumeFacts {
    /// Its path, actual or expected.
    pub path: PathBuf,
    /// Whether it can be read.
    pub state: VolumeState,
    /// Its length; `None` if it is missing.
    pub bytes: Option<u64>,
    /// The number of its segments in the store's superblock.
    pub segments: u32,
    /// The epoch in its superblock; `None` without a usable superblock.
    pub run: Option<Run>,
}

/// A volume that is there.
pub(super) struct Opened {
    pub path: PathBuf,
    pub file: File,
    copies: [Result<Superblock, CopyFault>; 3],
    /// The superblock that counts.
    pub superblock: Option<Superblock>,
}

/// All volumes of a store, and their faults.
pub(super) struct Opening {
    /// A superblock that identifies the store.
    pub reference: Superblock,
    /// In the store's order; `None` for a missing volume.
    pub opened: Vec<Option<Opened>>,
    pub facts: Vec<VolumeFacts>,
    pub flaws: Vec<Flaw>,
    /// The time that is left for reads that fail.
    pub patience: Arc<Patience>,
}

/// Why a copy of a superblock cannot be used.
#[derive(Debug, thiserror::Error)]
enum CopyFault {
    #[error("unreadable: {0}")]
    Unreadable(io::Error),
    #[error("{0}")]
    Bad(SuperblockError),
}

impl Opened {
    fn new(path: &Path, patience: &Patience) -> Result<Opened, StoreError> {
        let mut file = File::open(path, Access::ReadOnly)?;
        let copies = read_copies(&file, patience);
        let superblock = choose(path, &file, &copies)?;
        file.measure(path)?;
        Ok(Opened {
            path: path.to_owned(),
            file,
            copies,
            superblock,
        })
    }

    /// Locks the volume, if requested, and reads it again. Only volumes of this store are locked:
    /// other files belong to others.
    fn held(mut self, hold: bool, patience: &Patience) -> Result<Opened, StoreError> {
        if hold {
            self.file.lock_shared(&self.path)?;
            self.copies = read_copies(&self.file, patience);
            self.superblock = choose(&self.path, &self.file, &self.copies)?;
            self.file.measure(&self.path)?;
        }
        Ok(self)
    }

    /// The copies of the superblock with their offsets. The end of a file that was cut is another
    /// place, which holds none.
    fn copies(&self) -> impl Iterator<Item = (&Result<Superblock, CopyFault>, u64)> {
        let geometry = |of: &Superblock| of.geometry(of.volume).ok();
        let geometry = self.superblock.as_ref().and_then(geometry);
        let is_cut = geometry.is_some_and(|of| self.file.bytes < of.volume_bytes());
        let count = if is_cut { 2 } else { 3 };
        let places = superblock_offsets(self.file.bytes);
        self.copies.iter().zip(places).take(count)
    }

    fn flaws(&self, volume: usize) -> impl Iterator<Item = Flaw> + '_ {
        let bad = self.copies().filter_map(move |(copy, offset)| {
            let reason = FlawReason::Superblock {
                reason: copy.as_ref().err()?.to_string(),
                other_is_good: self.superblock.is_some(),
            };
            Some(Flaw::at(volume, offset, reason))
        });
        bad.chain(self.stale_copies(volume))
    }

    /// All copies are written each time, one of them after the others. A copy that is more than one
    /// write behind was not written.
    fn stale_copies(&self, volume: usize) -> impl Iterator<Item = Flaw> + '_ {
        self.copies().filter_map(move |(copy, offset)| {
            let (copy, counting) = (copy.as_ref().ok()?, self.superblock.as_ref()?);
            let reason = if copy.store != counting.store || copy.volume != counting.volume {
                format!(
                    "it belongs to volume {} of store {}",
                    copy.volume, copy.store
                )
            } else if copy.generation.saturating_add(1) < counting.generation {
                format!(
                    "it is of generation {}, another copy of generation {}: writes to it were lost",
                    copy.generation, counting.generation
                )
            } else {
                return None;
            };
            let reason = FlawReason::Superblock {
                reason,
                other_is_good: true,
            };
            Some(Flaw::at(volume, offset, reason))
        })
    }
}

fn read_copies(file: &File, patience: &Patience) -> [Result<Superblock, CopyFault>; 3] {
    file.superblock_bytes(patience).map(|bytes| {
        let bytes = bytes.map_err(CopyFault::Unreadable)?;
        if bytes.len() < BLOCK_BYTES && !bytes.starts_with(&Structure::Superblock.magic()) {
            return Err(CopyFault::Bad(SuperblockError::NotLarder));
        }
        Superblock::decode(&bytes).map_err(CopyFault::Bad)
    })
}

/// The superblock that counts; `None` if all copies are broken, but the volume is Larder's all the
/// same.
fn choose(
    path: &Path,
    file: &File,
    copies: &[Result<Superblock, CopyFault>; 3],
) -> Result<Option<Superblock>, StoreError> {
    let known = copies.each_ref().map(|copy| match copy {
        Ok(superblock) => Ok(superblock.clone()),
        Err(CopyFault::Bad(error)) => Err(error.clone()),
        // Unreadable is never the same as empty.
        Err(CopyFault::Unreadable(_)) => Err(SuperblockError::Damaged(Damage::Short)),
    });
    let unread = copies.iter().find_map(|copy| match copy {
        Err(CopyFault::Unreadable(error)) => error.raw_os_error().map(DiskError::Os),
        _ => None,
    });
    match (newest(known), unread) {
        (Ok(superblock), _) => Ok(Some(superblock)),
        (Err(_), Some(source)) if !source.is_of_the_medium() => Err(StoreError::NotRead {
            path: path.to_owned(),
            source,
        }),
        (Err(SuperblockError::NotLarder | SuperblockError::Blank), _) => {
            match file.has_segments() {
                true => Ok(None),
                false => Err(StoreError::NotAStore(path.to_owned())),
            }
        }
        (Err(SuperblockError::Damaged(_) | SuperblockError::Invalid { .. }), _) => Ok(None),
        (Err(source), _) => Err(StoreError::Superblock {
            path: path.to_owned(),
            source,
        }),
    }
}

impl Opening {
    pub(super) fn new(path: &Path, options: &SurveyOptions) -> Result<Opening, SurveyError> {
        let patience = Arc::new(Patience::default());
        let first = Opened::new(path, &patience)?.held(options.hold, &patience)?;
        let reference = match &first.superblock {
            Some(superblock) => superblock.clone(),
            None => named_elsewhere(&first, &options.volumes)?,
        };
        if let Some(superblock) = first.superblock.as_ref().filter(|s| s.volume != 0) {
            let entry = superblock.volumes.first();
            let name = entry.map(|entry| entry.path.clone()).unwrap_or_default();
            return Err(StoreError::NotFirstVolume(path.to_owned(), name).into());
        }
        let mut opening = Opening {
            reference,
            opened: Vec::new(),
            facts: Vec::new(),
            flaws: Vec::new(),
            patience,
        };
        opening.add(Ok(first));
        for index in 1..opening.reference.volumes.len() {
            let found = opening.find(index, path, options)?;
            opening.add(found);
        }
        let opened = opening.opened.iter().flatten();
        check_used(&options.volumes, opened.map(|opened| opened.path.as_path()))?;
        Ok(opening)
    }

    /// The volume of this index, or why there is none. A volume that a process has open is an error
    /// if it must not be.
    fn find(
        &self,
        index: usize,
        first: &Path,
        options: &SurveyOptions,
    ) -> Result<Result<Opened, String>, StoreError> {
        let entry = &self.reference.volumes[index];
        if entry.lost {
            return Ok(Err("given up".to_owned()));
        }
        let usual = PathBuf::from(&entry.path);
        let mut reason = "not found".to_owned();
        let mut best: Option<Opened> = None;
        let mut unseen = None;
        for place in places_of(entry, first, &options.volumes) {
            let opened = match Opened::new(&place, &self.patience) {
                Ok(opened) => opened,
                Err(error) if leaves_the_volume_unknown(&error) => {
                    unseen = Some(error);
                    continue;
                }
                Err(error) => {
                    reason = error.to_string();
                    continue;
                }
            };
            let is_it = match &opened.superblock {
                Some(superblock) => is_volume_of(superblock, self.reference.store, index),
                // Without a superblock, a path that the caller named does not identify its volume.
                None => place == usual || !options.volumes.contains(&place),
            };
            if !is_it {
                reason = format!("{}: {OF_ANOTHER}", place.display());
                continue;
            }
            let suits = |opened: &Opened| {
                let superblock = opened.superblock.as_ref();
                superblock.map(|superblock| suits(superblock, &self.reference))
            };
            // A volume without a superblock ends the search: no other copy of it is looked for.
            let is_last = options.volumes.contains(&place) || opened.superblock.is_none();
            if best
                .as_ref()
                .is_none_or(|best| suits(best) < suits(&opened))
            {
                best = Some(opened);
            }
            if is_last {
                break;
            }
        }
        match (best, unseen) {
            (Some(opened), _) => opened.held(options.hold, &self.patience).map(Ok),
            (None, Some(error)) => Err(error),
            (None, None) => Ok(Err(reason)),
        }
    }

    fn add(&mut self, found: Result<Opened, String>) {
        let index = self.facts.len();
        let entry = &self.reference.volumes[index];
        let mut facts = VolumeFacts {
            path: PathBuf::from(&entry.path),
            state: VolumeState::Missing,
            bytes: None,
            segments: entry.segments,
            run: None,
        };
        match &found {
            Ok(opened) => {
                let needed = self.needed_bytes(index);
                facts.path.clone_from(&opened.path);
                facts.bytes = Some(opened.file.bytes);
                facts.run = opened.superblock.as_ref().map(|superblock| superblock.run);
                facts.state = VolumeState::Present;
                self.flaws.extend(opened.flaws(index));
                if opened.file.bytes < needed {
                    facts.state = VolumeState::Truncated;
                    let found = opened.file.bytes;
                    self.flaws.push(Flaw::of_volume(
                        index,
                        FlawReason::Truncated { found, needed },
                    ));
                }
            }
            Err(_) if entry.lost => facts.state = VolumeState::GivenUp,
            Err(reason) => {
                let path = format!("{}: ", entry.path);
                let reason = reason.strip_prefix(&path).unwrap_or(reason);
                let reason = FlawReason::Missing(reason.to_owned());
                self.flaws.push(Flaw::of_volume(index, reason));
            }
        }
        self.facts.push(facts);
        self.opened.push(found.ok());
    }

    fn needed_bytes(&self, index: usize) -> u64 {
        let index = u16::try_from(index).unwrap_or(u16::MAX);
        self.reference
            .geometry(index)
            .map_or(0, Geometry::volume_bytes)
    }

    /// The places of the segments that begin on a volume that is there.
    pub(super) fn spots(&self, bodies: &Bodies) -> Vec<Spot> {
        let mut spots = Vec::new();
        for (volume, facts) in self.facts.iter().enumerate() {
            let all = (0..facts.segments).map(|number| Spot {
                store: self.reference.store,
                volume,
                number,
                segment_blocks: self.reference.segment_blocks,
                bodies: bodies.clone(),
            });
            let bytes = facts.bytes.unwrap_or(0);
            spots.extend(all.take_while(|spot| spot.headers().offset < bytes));
        }
        spots
    }

    pub(super) fn superblocks(&self) -> impl Iterator<Item = &Superblock> {
        self.opened
            .iter()
            .flatten()
            .filter_map(|opened| opened.superblock.as_ref())
    }

    /// The highest epoch in any superblock.
    pub(super) fn newest_run(&self) -> Run {
        let runs = self.superblocks().map(|superblock| superblock.run);
        runs.max().unwrap_or(self.reference.run)
    }

    /// Whether the store was closed in order.
    pub(super) fn is_clean(&self) -> bool {
        self.superblocks()
            .all(|superblock| superblock.state == OpenState::Clean)
    }

    /// The process that opened the store last.
    pub(super) fn holder(&self) -> HolderFacts {
        let latest = self.superblocks().max_by_key(|superblock| superblock.run);
        HolderFacts::of(&latest.unwrap_or(&self.reference).holder)
    }

    /// Whether the store is closed, or a process has it open. With `held`, no process can have it
    /// open.
    pub(super) fn condition(&self, held: bool) -> Condition {
        let mut opened = self.opened.iter().flatten();
        let runs = self.holder().process.state == HolderState::Running;
        let in_use = |o: &Opened| o.file.is_locked() && (runs || o.file.stays_locked(&o.path));
        if !held && opened.any(in_use) {
            Condition::InUse
        } else if self.is_clean() {
            Condition::Clean
        } else {
            Condition::NotClosed
        }
    }
}

/// The store, as a volume named on the command line knows it, when both superblocks of the first
/// volume are broken.
fn named_elsewhere(first: &Opened, elsewhere: &[PathBuf]) -> Result<Superblock, SurveyError> {
    let named = elsewhere
        .iter()
        .filter_map(|path| Opened::new(path, &Patience::none()).ok()?.superblock)
        .max_by_key(|superblock| superblock.run);
    named.ok_or_else(|| SurveyError::NoSuperblock {
        path: first.path.clone(),
        flaws: first.flaws(0).collect(),
    })
}

impl HolderFacts {
    fn of(holder: &Holder) -> HolderFacts {
        let process = LockHolder::from(holder);
        HolderFacts {
            process,
            command: holder::command(&process),
        }
    }
}

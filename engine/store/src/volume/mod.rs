//! Volumes: opens, locks and checks the files or block devices of a store.
//!
//! A volume is opened with O_DIRECT if the file system honours it. It is locked (`flock`) on the
//! same file description that the disk writes through, so that the lock lives exactly as long as
//! any write in flight. Block devices are opened with O_EXCL as well, which the kernel refuses for
//! mounted devices.
//!
//! The superblocks are read here directly as long as there is no disk: to find the volumes, and to
//! check them under the lock. From `Volumes::open_disk` on, all bytes go through that [`Disk`].
//!
//! | module | content |
//! |---|---|
//! | [`create`] | creating and enlarging |
//! | [`holes`] | unallocated and shared parts of a file |
//! | `simulated` | volumes of the simulation, whose segments are smaller than the format allows |
//! | [`keyrings`] | the keyring of an encrypted store, in each volume |
//! | [`quotas`] | the quotas of a store, in its first volume |
//! | `set` | all volumes of a store |
//! | `file` | one file: opening, locking, its superblock before there is a disk |
//! | `guard` | marks on the volumes: a mark outlives a killed client as long as its I/O does |
//! | `socket` | the place of the socket beside a store |

#[cfg(not(feature = "simulated"))]
pub mod create;
mod file;
pub mod guard;
pub mod holes;
pub mod keyrings;
pub mod quotas;
mod set;
#[cfg(feature = "simulated")]
pub mod simulated;
pub mod socket;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use larder_base::fork::Private;
use larder_base::system::files::{self, Handle, Lock};
use larder_disk::mailbox::{ReadAt, read_all};
use larder_disk::{Disk, DiskError, Patience};
use larder_format::{
    BLOCK_BYTES, Geometry, StoreId, Superblock, SuperblockError, newest, superblock_offsets,
};

use crate::error::StoreError;
pub use file::Access;
use file::LOCK_PATIENCE;
pub use file::{File, length};
pub use larder_base::system::holder::this_holder;
#[cfg(test)]
pub(crate) use set::OWNER;
pub use set::Volumes;
pub(crate) use set::row_of;
pub use set::{check_used, not_to_be_recorded, places_of, suits};

/// Why a file in a volume's place is not that volume.
pub const OF_ANOTHER: &str = "it is a volume of another store, or another volume of this one";

/// An open volume.
#[derive(Debug)]
pub struct Volume {
    /// Its path.
    pub path: PathBuf,
    /// Its file. The lock lives as long as this description.
    pub file: Arc<Handle>,
    pub(crate) private: Private,
    /// Its superblock: the newest valid copy.
    pub superblock: Superblock,
    /// Bytes of its file or device.
    bytes: u64,
    /// The copy of the superblock that counts, which is written last: it is not touched before the
    /// others are whole. Known from [`Volumes::open_disk`] on.
    counting_copy: usize,
    /// Whether reads and writes bypass the page cache.
    pub direct: bool,
}

/// A volume that is not locked yet: other processes may be writing to it.
struct Found {
    file: File,
    superblock: Superblock,
}

impl Found {
    fn at(path: &Path, access: Access, patience: &Patience) -> Result<Found, StoreError> {
        // A device in use can be opened, but not exclusively.
        let beside_others = match access {
            Access::Exclusive | Access::AtOnce => Access::Client,
            Access::Client | Access::ReadOnly | Access::Held => access,
        };
        let file = File::open(path, beside_others)?;
        let superblock = superblock_of(&file, path, patience)?;
        Ok(Found { file, superblock })
    }

    fn is(&self, store: StoreId, index: usize) -> bool {
        is_volume_of(&self.superblock, store, index)
    }
}

fn superblock_of(file: &File, path: &Path, patience: &Patience) -> Result<Superblock, StoreError> {
    file.superblock_within(patience)
        .map_err(|source| match source {
            SuperblockError::NotLarder | SuperblockError::Blank if file.has_segments() => {
                StoreError::NoSuperblock(path.to_owned())
            }
            SuperblockError::NotLarder | SuperblockError::Blank => {
                StoreError::NotAStore(path.to_owned())
            }
            source => StoreError::Superblock {
                path: path.to_owned(),
                source,
            },
        })
}

pub fn is_volume_of(superblock: &Superblock, store: StoreId, index: usize) -> bool {
    superblock.store == store && usize::from(superblock.volume) == index
}

fn geometry_of(superblock: &Superblock, path: &Path) -> Result<Geometry, StoreError> {
    let geometry = superblock.geometry(superblock.volume);
    geometry.map_err(|source| StoreError::Superblock {
        path: path.to_owned(),
        source,
    })
}

impl Volume {
    fn open(path: &Path, access: Access, patience: &Patience) -> Result<Volume, StoreError> {
        let found = Found::at(path, access, patience)?;
        Volume::take(path, access, found, 0, patience)
    }

    /// Makes a volume of a file, which must have at least `least` bytes.
    fn take(
        path: &Path,
        access: Access,
        found: Found,
        least: u64,
        patience: &Patience,
    ) -> Result<Volume, StoreError> {
        let Found {
            mut file,
            superblock,
        } = found;
        let lock_patience = match access {
            Access::Exclusive => Some(LOCK_PATIENCE),
            Access::AtOnce => Some(Duration::ZERO),
            Access::Client | Access::ReadOnly | Access::Held => None,
        };
        if access == Access::Held {
            file.lock_shared(path)?;
        }
        if let Some(lock_patience) = lock_patience {
            if file.is_device {
                file = file.claimed(path, access, lock_patience)?;
            }
            file.lock_within(path, lock_patience)?;
        }
        // The last holder of the lock may have written a newer one, or made another store of it.
        let superblock = match access {
            Access::Exclusive | Access::AtOnce | Access::Held => {
                superblock_of(&file, path, patience)?
            }
            Access::Client | Access::ReadOnly => superblock,
        };
        if access.is_exclusive() && !superblock.features.may_be_written() {
            return Err(StoreError::UnknownFeatures {
                path: path.to_owned(),
                features: Box::new(superblock.features),
            });
        }
        let geometry = geometry_of(&superblock, path)?;
        let needed = geometry.volume_bytes().max(least);
        file.measure(path)?;
        if file.bytes < needed {
            return Err(StoreError::Truncated {
                volume: superblock.volume,
                path: path.to_owned(),
                found: file.bytes,
                needed,
            });
        }
        Ok(Volume {
            path: path.to_owned(),
            bytes: file.bytes,
            counting_copy: 0,
            file: file.file,
            private: file.private,
            superblock,
            direct: file.direct,
        })
    }

    /// The places of its segments, by its superblock.
    pub(crate) fn geometry(&self) -> Result<Geometry, StoreError> {
        geometry_of(&self.superblock, &self.path)
    }

    /// Releases the lock, also when the file is still open elsewhere.
    pub fn unlock(&self) {
        if let Err(error) = files::lock(&self.file, Lock::None) {
            tracing::warn!("{}: unlocking: {error}", self.path.display());
        }
    }

    /// The offsets of the copies of its superblock, in the order in which they are written: the
    /// last one alone, after the others are durable.
    pub fn superblock_places(&self) -> [Vec<u64>; 2] {
        let offsets = superblock_offsets(self.bytes);
        let last = offsets[self.counting_copy];
        let others = offsets.into_iter().filter(|offset| *offset != last);
        [others.collect(), vec![last]]
    }

    /// The offsets of the copies of the keyring of an encrypted store.
    #[must_use]
    pub fn keyring_places(&self) -> [u64; 3] {
        larder_format::keyring_offsets(self.bytes)
    }

    /// Reads the copies of the superblock through a disk.
    fn read_superblock(&mut self, disk: &dyn Disk, index: usize) -> Result<(), StoreError> {
        let [a, b, end] = superblock_offsets(self.bytes).map(|at| self.copy_at(disk, index, at));
        let copies = [a?, b?, end?];
        let found = choose(&copies);
        let (superblock, counting_copy) = found.map_err(|source| StoreError::Superblock {
            path: self.path.clone(),
            source,
        })?;
        // Without a lock another store may have been made of it meanwhile.
        if !is_volume_of(&superblock, self.superblock.store, index) {
            return Err(StoreError::VolumeMissing {
                index,
                path: self.path.clone(),
                reason: OF_ANOTHER.to_owned(),
            });
        }
        (self.superblock, self.counting_copy) = (superblock, counting_copy);
        Ok(())
    }

    /// One copy of the superblock, if the disk can read it.
    fn copy_at(
        &self,
        disk: &dyn Disk,
        index: usize,
        offset: u64,
    ) -> Result<Result<Superblock, SuperblockError>, StoreError> {
        let read = ReadAt {
            volume: index,
            offset,
            bytes: BLOCK_BYTES,
        };
        match read_all(disk, &[read]).pop() {
            Some(Ok(bytes)) => Ok(decode(&bytes)),
            Some(Err(source)) if !source.is_of_the_medium() => Err(StoreError::NotRead {
                path: self.path.clone(),
                source,
            }),
            Some(Err(DiskError::Os(errno))) => Ok(Err(SuperblockError::Unreadable(errno))),
            _ => Ok(Err(SuperblockError::Unreadable(libc::EIO))),
        }
    }
}

/// The superblock that counts, and its copy: of equal ones the second, then the first.
///
/// # Errors
/// See [`newest`].
pub fn choose(
    copies: &[Result<Superblock, SuperblockError>; 3],
) -> Result<(Superblock, usize), SuperblockError> {
    let found = newest(copies.clone())?;
    let is_found = |copy: &usize| copies[*copy].as_ref() == Ok(&found);
    let counting_copy = [1, 0, 2].into_iter().find(is_found);
    Ok((found, counting_copy.unwrap_or(0)))
}

#[cfg(not(feature = "simulated"))]
fn encode(superblock: &Superblock) -> Result<Box<[u8; BLOCK_BYTES]>, SuperblockError> {
    superblock.encode()
}

#[cfg(not(feature = "simulated"))]
pub(crate) fn decode(block: &[u8]) -> Result<Superblock, SuperblockError> {
    Superblock::decode(block)
}

#[cfg(feature = "simulated")]
pub(crate) use simulated::decode;
#[cfg(feature = "simulated")]
use simulated::encode;

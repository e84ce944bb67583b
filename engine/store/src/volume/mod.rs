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
//! | `set` | all volumes of a store |
//! | `file` | one file: opening, locking, its superblock before there is a disk |
//! | `guard` | marks on the volumes: a mark outlives a killed client as long as its I/O does |
//! | `socket` | the place of the socket beside a store |

#[cfg(not(feature = "simulated"))]
pub mod create;
mod file;
pub mod guard;
pub mod holes;
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
    BLOCK_BYTES, Geometry, SUPERBLOCK_OFFSETS, StoreId, Superblock, SuperblockError, newest,
};

use crate::error::StoreError;
pub use file::Access;
use file::LOCK_PATIENCE;
pub use file::{File, length};
pub use larder_base::system::holder::this_holder;
pub use set::Volumes;
pub(crate) use set::{OWNER, row_of};
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
    /// Its superblock: the newer valid copy.
    pub superblock: Superblock,
    /// The copy of the superblock that is written first: the older copy, or an unusable one. So the
    /// copy that counts is not touched before the other is whole. Known from [`Volumes::open_disk`]
    /// on.
    older_copy: usize,
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
            SuperblockError::NotLarder if file.has_segments() => {
                StoreError::NoSuperblock(path.to_owned())
            }
            SuperblockError::NotLarder => StoreError::NotAStore(path.to_owned()),
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
            older_copy: 0,
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

    /// Reads both copies of the superblock through a disk.
    fn read_superblock(&mut self, disk: &dyn Disk, index: usize) -> Result<(), StoreError> {
        let [a, b] = SUPERBLOCK_OFFSETS;
        let (a, b) = (self.copy_at(disk, index, a)?, self.copy_at(disk, index, b)?);
        self.older_copy = match (&a, &b) {
            (Ok(a), Ok(b)) => usize::from(b.generation < a.generation),
            (Ok(_), Err(_)) => 1,
            _ => 0,
        };
        let found = newest(a, b);
        let superblock = found.map_err(|source| StoreError::Superblock {
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
        self.superblock = superblock;
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

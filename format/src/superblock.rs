//! The superblock: what a volume is, which store it belongs to, and who has it open.
//!
//! It lies in two copies at [`SUPERBLOCK_OFFSETS`](crate::SUPERBLOCK_OFFSETS); a writer replaces the older one, so that
//! a torn write leaves the other, and [`newest`] tells which counts. Every volume lists all volumes of its store, so
//! that one path finds the rest and an absent one is noticed.
//!
//! ```text
//!  offset  bytes  field
//!       0     24  prologue
//!      24     16  store
//!      40     16  pid_scope        where the pid of the holder means something
//!      56      8  generation       grows with each write of a superblock of this volume
//!      64      8  created_unix_s
//!      72      4  run
//!      76      4  pid              of the holder
//!      80      4  segment_blocks
//!      84      2  volume           own place in the list
//!      86      2  volumes          length of the list: 1 to 16
//!      88      4  state            1 open, 2 clean
//!      92    164  zero
//!     256    224  each volume:
//!             16    id
//!              4    segments
//!              2    flags          bit 0: lost
//!              2    path_bytes
//!            200    path           UTF-8, then zeros
//! ```
//!
//! It defends against torn and stale copies, foreign files, and stores of a newer version. It does not say whether
//! the path it names still leads to the volume.

use crate::bytes::{Overrun, Reader, Writer};
use crate::consts::{BLOCK_BYTES, FORMAT_VERSION, SEGMENTS_MAX, VOLUMES_MAX};
use crate::error::{Damage, Structure};
use crate::frame::{self, PROLOGUE_BYTES};
use crate::geometry::{Geometry, GeometryError};
use crate::ids::{StoreId, VolumeId};
use crate::serial::Run;

/// Longest path of a volume that a superblock holds, in bytes.
pub const VOLUME_PATH_BYTES_MAX: usize = 200;

const FIXED_BYTES: usize = 256;
const FIXED_RESERVED: usize = FIXED_BYTES - PROLOGUE_BYTES - (2 * 16 + 2 * 8 + 3 * 4 + 2 * 2 + 4);
const ENTRY_BYTES: usize = 16 + 4 + 2 + 2 + VOLUME_PATH_BYTES_MAX;
const FLAG_LOST: u16 = 1;

const _: () = assert!(FIXED_RESERVED == 164 && ENTRY_BYTES == 224);
const _: () = assert!(FIXED_BYTES + VOLUMES_MAX * ENTRY_BYTES <= BLOCK_BYTES);

/// Whether somebody has the store open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpenState {
    /// Opened, or left without being closed.
    Open,
    /// Closed in order: everything is synced, and the segment headers say where each open segment ends.
    Clean,
}

/// Who opened the store last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Holder {
    /// Process id, in the holder's own pid namespace.
    pub pid: u32,
    /// The boot of the machine and the pid namespace that the pid belongs to. In another scope the
    /// same number is another process.
    pub pid_scope: [u8; 16],
}

/// One volume, as all volumes of its store know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeEntry {
    /// Its identity.
    pub id: VolumeId,
    /// How many segments it has.
    pub segments: u32,
    /// Whether the store has been opened without it: it never counts again.
    pub lost: bool,
    /// Where it was when it joined, at most [`VOLUME_PATH_BYTES_MAX`] bytes.
    pub path: String,
}

/// What a volume is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The store it belongs to.
    pub store: StoreId,
    /// Its own place in `volumes`.
    pub volume: u16,
    /// Grows with each write: of two copies the higher counts.
    pub generation: u64,
    /// The run of the last opening.
    pub run: Run,
    /// Whether that opening has ended.
    pub state: OpenState,
    /// When the store was created: seconds since 1970, for people only.
    pub created_unix_s: u64,
    /// Who that opening was.
    pub holder: Holder,
    /// Blocks of a segment, on all volumes.
    pub segment_blocks: u32,
    /// All volumes of the store: 1 to [`VOLUMES_MAX`].
    pub volumes: Vec<VolumeEntry>,
}

/// Why bytes are not a superblock, or a superblock is not one to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SuperblockError {
    /// Some other file, or an empty one.
    #[error("not a Larder volume: its superblock's magic is absent")]
    NotLarder,
    /// The device would not give it; what it says is not known.
    #[error("the superblock cannot be read (error {0} of the system)")]
    Unreadable(i32),
    /// Written by a newer Larder.
    #[error(
        "format version {version} is newer than version {FORMAT_VERSION}, which this build reads: use a newer Larder"
    )]
    Newer {
        /// Its version.
        version: u32,
    },
    /// A Larder superblock, but not a whole one.
    #[error("the superblock is damaged: {0}")]
    Damaged(Damage),
    /// Whole, but a field is not one that a writer writes.
    #[error("the superblock is not valid: {field} cannot be {value}")]
    Invalid {
        /// The field, as the layout table names it.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The two copies belong to two stores: a creation over an older store was cut short.
    #[error(
        "the two superblocks name two stores, {a} and {b}: creation was cut short, create the store again"
    )]
    TwoStores {
        /// The store of the first copy.
        a: StoreId,
        /// The store of the second.
        b: StoreId,
    },
}

impl From<Damage> for SuperblockError {
    fn from(damage: Damage) -> SuperblockError {
        match damage {
            Damage::Blank(_) | Damage::Magic(_) => SuperblockError::NotLarder,
            Damage::Version { found } if found > FORMAT_VERSION => {
                SuperblockError::Newer { version: found }
            }
            damage => SuperblockError::Damaged(damage),
        }
    }
}

impl From<Overrun> for SuperblockError {
    fn from(overrun: Overrun) -> SuperblockError {
        SuperblockError::Damaged(overrun.into())
    }
}

impl Superblock {
    /// The block to write.
    ///
    /// # Errors
    /// [`SuperblockError::Invalid`]: a field that [`Superblock::decode`] would refuse, such as too long a path.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "validated: at most 16 volumes, paths of at most 200 bytes"
    )]
    pub fn encode(&self) -> Result<Box<[u8; BLOCK_BYTES]>, SuperblockError> {
        self.validate()?;
        let mut block = Box::new([0; BLOCK_BYTES]);
        let mut writer = frame::begin(&mut block);
        writer.bytes(self.store.as_bytes());
        writer.bytes(&self.holder.pid_scope);
        writer.u64(self.generation);
        writer.u64(self.created_unix_s);
        writer.u32(self.run.get());
        writer.u32(self.holder.pid);
        writer.u32(self.segment_blocks);
        writer.u16(self.volume);
        writer.u16(self.volumes.len() as u16);
        writer.u32(match self.state {
            OpenState::Open => 1,
            OpenState::Clean => 2,
        });
        writer.reserved(FIXED_RESERVED);
        self.volumes
            .iter()
            .for_each(|volume| write_volume(&mut writer, volume));
        frame::seal(
            &mut block,
            Structure::Superblock,
            length_of(self.volumes.len()),
        );
        Ok(block)
    }

    /// Reads a block.
    ///
    /// # Errors
    /// See [`SuperblockError`]. A block of a newer version is reported as newer when its CRC is right, and as damaged
    /// when it is not.
    pub fn decode(block: &[u8]) -> Result<Superblock, SuperblockError> {
        let mut reader = frame::open(block, Structure::Superblock)?;
        let store = StoreId::from_bytes(reader.array()?);
        let pid_scope = reader.array()?;
        let generation = reader.u64()?;
        let created_unix_s = reader.u64()?;
        let run = reader.u32()?;
        let pid = reader.u32()?;
        let segment_blocks = reader.u32()?;
        let volume = reader.u16()?;
        let count = reader.u16()?;
        let state = reader.u32()?;
        reader.reserved(FIXED_RESERVED)?;
        if usize::from(count) > VOLUMES_MAX {
            return Err(invalid("volumes", count));
        }
        let volumes = (0..count)
            .map(|_| read_volume(&mut reader))
            .collect::<Result<Vec<_>, _>>()?;
        let surplus = reader.rest().len() as u64;
        if surplus != 0 {
            let found = u64::from(length_of(volumes.len())).saturating_add(surplus);
            return Err(SuperblockError::Damaged(Damage::Length { found }));
        }
        let superblock = Superblock {
            store,
            volume,
            generation,
            run: Run::new(run).ok_or(invalid("run", run))?,
            state: match state {
                1 => OpenState::Open,
                2 => OpenState::Clean,
                other => return Err(invalid("state", other)),
            },
            created_unix_s,
            holder: Holder { pid, pid_scope },
            segment_blocks,
            volumes,
        };
        superblock.validate()?;
        Ok(superblock)
    }

    /// The sizes of one of the store's volumes.
    ///
    /// # Errors
    /// There is no such volume, or the superblock was not decoded and its sizes cannot be.
    pub fn geometry(&self, volume: u16) -> Result<Geometry, SuperblockError> {
        let entry = self
            .volumes
            .get(usize::from(volume))
            .ok_or(invalid("volume", volume))?;
        Geometry::new(self.segment_blocks, entry.segments).map_err(|error| match error {
            GeometryError::SegmentBlocks { blocks } => invalid("segment_blocks", blocks),
            GeometryError::Segments { segments } => invalid("segments", segments),
        })
    }

    fn validate(&self) -> Result<(), SuperblockError> {
        let count = self.volumes.len();
        if count == 0 || count > VOLUMES_MAX {
            return Err(invalid("volumes", count as u64));
        }
        if self.run == Run::ZERO {
            return Err(invalid("run", 0_u32));
        }
        // The one we read cannot be lost.
        if self
            .volumes
            .get(usize::from(self.volume))
            .is_none_or(|own| own.lost)
        {
            return Err(invalid("volume", self.volume));
        }
        let mut segments = 0_u32;
        for (place, entry) in (0..).zip(&self.volumes) {
            self.geometry(place)?;
            segments = segments.saturating_add(entry.segments);
            if entry.path.len() > VOLUME_PATH_BYTES_MAX {
                return Err(invalid("path_bytes", entry.path.len() as u64));
            }
            if self
                .volumes
                .iter()
                .filter(|other| other.id == entry.id)
                .count()
                > 1
            {
                return Err(invalid("id", place));
            }
        }
        if segments > SEGMENTS_MAX {
            return Err(invalid("segments", segments));
        }
        Ok(())
    }
}

/// Which of the two copies counts: the valid one of the higher generation.
///
/// # Errors
/// Neither is valid (the reason that tells most), the copies belong to two stores, or one of them was written by a
/// newer Larder: then the other is out of date, however valid.
pub fn newest(
    a: Result<Superblock, SuperblockError>,
    b: Result<Superblock, SuperblockError>,
) -> Result<Superblock, SuperblockError> {
    match (a, b) {
        (Ok(a), Ok(b)) if a.store != b.store => Err(SuperblockError::TwoStores {
            a: a.store,
            b: b.store,
        }),
        (Ok(a), Ok(b)) => Ok(if b.generation > a.generation { b } else { a }),
        (Err(newer @ SuperblockError::Newer { .. }), _)
        | (_, Err(newer @ SuperblockError::Newer { .. })) => Err(newer),
        (Ok(only), Err(_)) | (Err(_), Ok(only)) => Ok(only),
        (Err(SuperblockError::NotLarder), Err(reason)) | (Err(reason), Err(_)) => Err(reason),
    }
}

fn invalid(field: &'static str, value: impl Into<u64>) -> SuperblockError {
    SuperblockError::Invalid {
        field,
        value: value.into(),
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "at most a block: asserted above"
)]
fn length_of(volumes: usize) -> u32 {
    volumes
        .saturating_mul(ENTRY_BYTES)
        .saturating_add(FIXED_BYTES) as u32
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "validated: at most 200 bytes"
)]
fn write_volume(writer: &mut Writer<'_>, volume: &VolumeEntry) {
    writer.bytes(volume.id.as_bytes());
    writer.u32(volume.segments);
    writer.u16(if volume.lost { FLAG_LOST } else { 0 });
    writer.u16(volume.path.len() as u16);
    writer.bytes(volume.path.as_bytes());
    writer.reserved(VOLUME_PATH_BYTES_MAX.saturating_sub(volume.path.len()));
}

fn read_volume(reader: &mut Reader<'_>) -> Result<VolumeEntry, SuperblockError> {
    let id = VolumeId::from_bytes(reader.array()?);
    let segments = reader.u32()?;
    let lost = match reader.u16()? {
        0 => false,
        FLAG_LOST => true,
        other => return Err(invalid("flags", other)),
    };
    let path_bytes = reader.u16()?;
    let padding = VOLUME_PATH_BYTES_MAX
        .checked_sub(usize::from(path_bytes))
        .ok_or(invalid("path_bytes", path_bytes))?;
    let path = std::str::from_utf8(reader.slice(usize::from(path_bytes))?);
    let path = path
        .map_err(|error| invalid("path", error.valid_up_to() as u64))?
        .to_owned();
    reader.reserved(padding)?;
    Ok(VolumeEntry {
        id,
        segments,
        lost,
        path,
    })
}

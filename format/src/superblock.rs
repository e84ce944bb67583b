//! The superblock: the identity of a volume, its store, and the process that has it open.
//!
//! The superblock has three copies, at the offsets of
//! [`superblock_offsets`](crate::superblock_offsets): two at the start, and one at the end of the
//! file or device. A writer replaces the copy that counts last, so a torn write leaves a valid
//! copy; [`newest`] selects it. Every volume lists all volumes of its store, so one path is enough
//! to find the others and to detect an absent volume.
//!
//! ```text
//!  offset  bytes  field
//!       0     24  prologue
//!      24     16  store
//!      40     16  pid_scope        boot and pid namespace in which pid is valid
//!      56      8  generation       grows with each write of a superblock of this volume
//!      64      8  created_unix_s
//!      72      4  run              the epoch
//!      76      4  pid              of the holder
//!      80      4  segment_blocks
//!      84      2  volume           own index in the list
//!      86      2  volumes          length of the list: 1 to 16
//!      88      4  state            1 open, 2 clean
//!      92      4  zero
//!      96      8  compatible             these four are here in all versions, see `features`
//!     104      8  read_only_compatible
//!     112     16  release
//!     128     64  feature_names
//!     192      8  opened_unix_s    these three are for people, zero if they are not known
//!     200      8  unclosed_unix_s
//!     208      4  unclosed_pid     0: the last open found the store closed in order
//!     212      8  clock_ms         the clock of the store at a moment, see `Clock`
//!     220      8  clock_unix_ms    the time of day at that moment
//!     228      8  keyring          its generation; 0: the store is not encrypted
//!     236      8  quotas           their generation; 0: none were ever set
//!     244     12  zero
//!     256    224  each volume:
//!             16    id
//!              4    segments
//!              2    flags          bit 0: lost
//!              2    path_bytes
//!            200    path           UTF-8, then zeros
//! ```
//!
//! A file that an operator saved holds the superblock of the first volume, which stands for those
//! of all volumes, in the same layout with a magic of its own. So no tool takes it for a volume.
//!
//! Faults covered: torn and stale copies, foreign files, and stores of a newer version. The
//! superblock does not prove that its paths still lead to the volumes.

use std::num::NonZeroU32;

use crate::bytes::{Overrun, Reader, Writer};
use crate::consts::{BLOCK_BYTES, FORMAT_VERSION, SEGMENTS_MAX, VOLUMES_MAX};
use crate::error::{Damage, Structure};
use crate::features::{Features, Label};
use crate::frame::{self, PROLOGUE_BYTES};
use crate::geometry::{Geometry, GeometryError};
use crate::ids::{StoreId, VolumeId};
use crate::serial::Run;

/// Maximum length of a volume path in a superblock, in bytes.
pub const VOLUME_PATH_BYTES_MAX: usize = 200;

const FIXED_BYTES: usize = 256;
const FEATURES_AT: usize = 96;
const FEATURES_BYTES: usize = 8 + 8 + 16 + 64;
const RESERVED_BEFORE: usize = FEATURES_AT - PROLOGUE_BYTES - (2 * 16 + 2 * 8 + 3 * 4 + 2 * 2 + 4);
const HISTORY_BYTES: usize = 2 * 8 + 4;
const CLOCK_BYTES: usize = 2 * 8;
const KEYRING_BYTES: usize = 8;
const QUOTAS_BYTES: usize = 8;
const STATED_BYTES: usize = KEYRING_BYTES + QUOTAS_BYTES;
const RESERVED_BEHIND: usize =
    FIXED_BYTES - FEATURES_AT - FEATURES_BYTES - HISTORY_BYTES - CLOCK_BYTES - STATED_BYTES;
const ENTRY_BYTES: usize = 16 + 4 + 2 + 2 + VOLUME_PATH_BYTES_MAX;
const FLAG_LOST: u16 = 1;

const _: () = assert!(RESERVED_BEFORE == 4 && RESERVED_BEHIND == 12 && ENTRY_BYTES == 224);
const _: () = assert!(FIXED_BYTES + VOLUMES_MAX * ENTRY_BYTES <= BLOCK_BYTES);

/// Whether a process has the store open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpenState {
    /// Open, or not closed in order.
    Open,
    /// Closed in order: everything is synced, and the segment headers record the end of each open
    /// segment.
    Clean,
}

/// The process that opened the store last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Holder {
    /// Process id, in the holder's own pid namespace.
    pub pid: u32,
    /// The boot of the machine and the pid namespace of the pid. In another scope the same number
    /// is another process.
    pub pid_scope: [u8; 16],
}

/// The last open of a store, and the state of the store then. For people: nothing is decided by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct History {
    /// When the store was opened last, in seconds since 1970; 0 if it is not known.
    pub opened_unix_s: u64,
    /// The open before, if the last open found that it was not closed in order.
    pub unclosed: Option<Unclosed>,
}

/// The clock of a store at a moment: the times of puts are by it. It goes on while the store is in
/// use, whatever the time of day is set to. While the store is closed it goes on with the time of
/// day, and never goes back. So it may differ from the time of day for good.
///
/// Both are in milliseconds since 1970, and zero if they are not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Clock {
    /// The clock of the store.
    pub store_ms: u64,
    /// The time of day at that moment.
    pub unix_ms: u64,
}

impl Clock {
    /// The clock at a later time of day, in a store that has not been in use in between.
    #[must_use]
    pub fn at(self, unix_ms: u64) -> Clock {
        let store_ms = match self {
            Clock { store_ms: 0, .. } => unix_ms,
            known => {
                let since = unix_ms.saturating_sub(known.unix_ms);
                known.store_ms.saturating_add(since)
            }
        };
        Clock { store_ms, unix_ms }
    }
}

/// An open of a store whose process ended without closing it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Unclosed {
    /// When it was opened, in seconds since 1970; 0 if it is not known.
    pub opened_unix_s: u64,
    /// The process, in its own pid namespace.
    pub pid: NonZeroU32,
}

/// The entry of a volume in the list that every volume of its store holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeEntry {
    /// The identity of the volume.
    pub id: VolumeId,
    /// Number of segments.
    pub segments: u32,
    /// Whether the store has been opened without this volume. Such a volume is never used again.
    pub lost: bool,
    /// The path at the time it joined the store, at most [`VOLUME_PATH_BYTES_MAX`] bytes.
    pub path: String,
}

/// The superblock of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The store of the volume.
    pub store: StoreId,
    /// The index of this volume in `volumes`.
    pub volume: u16,
    /// Increases with each write. The valid copy with the highest generation counts.
    pub generation: u64,
    /// The epoch of the last open.
    pub run: Run,
    /// Whether that epoch was closed in order.
    pub state: OpenState,
    /// Creation time of the store in seconds since 1970. Informational only.
    pub created_unix_s: u64,
    /// The process of the last open.
    pub holder: Holder,
    /// The time of that open, and the state of the store then.
    pub history: History,
    /// The clock of the store at the open or close that wrote this, or at a moment of its use.
    pub clock: Clock,
    /// The least generation of the keyring, if the store is encrypted; else 0. An older keyring is
    /// none of the store.
    pub keyring: u64,
    /// The least generation of the quotas, in the superblock of the first volume. Older quotas are
    /// not those of the store.
    pub quotas: u64,
    /// Blocks per segment, the same on all volumes.
    pub segment_blocks: u32,
    /// Features of the store, and the release that wrote this.
    pub features: Features,
    /// All volumes of the store: 1 to [`VOLUMES_MAX`].
    pub volumes: Vec<VolumeEntry>,
}

/// Why bytes are not a superblock, or a superblock cannot be encoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SuperblockError {
    /// Another file, or an empty file.
    #[error("not a Larder volume: its superblock's magic is absent")]
    NotLarder,
    /// Zeros in the place of a superblock: never written, or wiped.
    #[error("not a Larder volume: its superblock is blank")]
    Blank,
    /// The device failed the read; the content is unknown.
    #[error("the superblock cannot be read (error {0} of the system)")]
    Unreadable(i32),
    /// Written by a newer Larder.
    #[error(
        "format version {version} is newer than version {FORMAT_VERSION}, which this build reads \
         ({features}): use a newer Larder"
    )]
    Newer {
        /// The version of the superblock.
        version: u32,
        /// Its features.
        features: Box<Features>,
    },
    /// Written by a former Larder.
    #[error(
        "format version {version} is older than version {FORMAT_VERSION}, which this build reads: \
         export its pages with the release that wrote it, create the store anew, and import them"
    )]
    Older {
        /// The version of the superblock.
        version: u32,
    },
    /// A Larder superblock that is not whole.
    #[error("the superblock is damaged: {0}")]
    Damaged(Damage),
    /// Whole, but a field has a value that no writer writes.
    #[error("the superblock is not valid: {field} cannot be {value}")]
    Invalid {
        /// The name of the field in the layout table.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The two copies belong to two stores: creation over an older store was interrupted.
    #[error(
        "the two superblocks belong to two stores, {a} and {b}: creation was interrupted, create \
         the store again"
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
            Damage::Blank(_) => SuperblockError::Blank,
            Damage::Magic(_) => SuperblockError::NotLarder,
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
    /// Encodes the block.
    ///
    /// # Errors
    /// [`SuperblockError::Invalid`]: a field that [`Superblock::decode`] would refuse, for example
    /// a path that is too long.
    pub fn encode(&self) -> Result<Box<[u8; BLOCK_BYTES]>, SuperblockError> {
        self.encode_as(Structure::Superblock)
    }

    /// Encodes the block of a saved file.
    ///
    /// # Errors
    /// As for [`Superblock::encode`].
    pub fn encode_saved(&self) -> Result<Box<[u8; BLOCK_BYTES]>, SuperblockError> {
        self.encode_as(Structure::SavedSuperblock)
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "validated: at most 16 volumes, paths of at most 200 bytes"
    )]
    fn encode_as(&self, structure: Structure) -> Result<Box<[u8; BLOCK_BYTES]>, SuperblockError> {
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
        writer.reserved(RESERVED_BEFORE);
        write_features(&mut writer, &self.features);
        let unclosed = self.history.unclosed;
        writer.u64(self.history.opened_unix_s);
        writer.u64(unclosed.map_or(0, |of| of.opened_unix_s));
        writer.u32(unclosed.map_or(0, |of| of.pid.get()));
        writer.u64(self.clock.store_ms);
        writer.u64(self.clock.unix_ms);
        writer.u64(self.keyring);
        writer.u64(self.quotas);
        writer.reserved(RESERVED_BEHIND);
        self.volumes
            .iter()
            .for_each(|volume| write_volume(&mut writer, volume));
        frame::seal(&mut block, structure, length_of(self.volumes.len()));
        Ok(block)
    }

    /// Decodes a block.
    ///
    /// # Errors
    /// See [`SuperblockError`]. A block of a newer version is reported as newer if its CRC is
    /// right, and as damaged otherwise.
    pub fn decode(block: &[u8]) -> Result<Superblock, SuperblockError> {
        Superblock::decode_as(Structure::Superblock, block)
    }

    /// Decodes the block of a saved file.
    ///
    /// # Errors
    /// As for [`Superblock::decode`].
    pub fn decode_saved(block: &[u8]) -> Result<Superblock, SuperblockError> {
        Superblock::decode_as(Structure::SavedSuperblock, block)
    }

    fn decode_as(structure: Structure, block: &[u8]) -> Result<Superblock, SuperblockError> {
        let mut reader = frame::open(block, structure).map_err(|damage| refused(block, damage))?;
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
        reader.reserved(RESERVED_BEFORE)?;
        let features = read_features(&mut reader)?;
        let opened_unix_s = reader.u64()?;
        let before_unix_s = reader.u64()?;
        let unclosed = NonZeroU32::new(reader.u32()?);
        let clock = Clock {
            store_ms: reader.u64()?,
            unix_ms: reader.u64()?,
        };
        let keyring = reader.u64()?;
        let quotas = reader.u64()?;
        reader.reserved(RESERVED_BEHIND)?;
        if unclosed.is_none() && before_unix_s != 0 {
            return Err(invalid("unclosed_unix_s", before_unix_s));
        }
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
            history: History {
                opened_unix_s,
                unclosed: unclosed.map(|pid| Unclosed {
                    opened_unix_s: before_unix_s,
                    pid,
                }),
            },
            clock,
            keyring,
            quotas,
            segment_blocks,
            features,
            volumes,
        };
        superblock.validate()?;
        Ok(superblock)
    }

    /// The sizes of a volume of the store.
    ///
    /// # Errors
    /// There is no such volume, or the superblock was not decoded and its sizes are not valid.
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
        // The volume that holds this superblock cannot be lost.
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

/// Selects the valid copy with the highest generation. The copies are those at the
/// [`superblock_offsets`](crate::superblock_offsets), in this order.
///
/// The third copy counts beside a valid one of the same volume. Without a valid one it counts if
/// both places at the start are blank, damaged or unreadable. Other bytes there belong to another
/// use of the device: the copy at its end may be a remnant, and the store must not be written to.
///
/// # Errors
/// No copy counts (the most specific reason is returned), the first two belong to two stores, or
/// one copy was written by a newer Larder. In the last case the others are out of date, even if
/// they are valid.
pub fn newest(
    copies: [Result<Superblock, SuperblockError>; 3],
) -> Result<Superblock, SuperblockError> {
    let [a, b, end] = copies;
    let is_wiped = is_wiped(&a) && is_wiped(&b);
    match (newer_of(a, b), end) {
        (_, Err(newer @ SuperblockError::Newer { .. })) => Err(newer),
        (Ok(first), Ok(end)) => {
            let is_same = (end.store, end.volume) == (first.store, first.volume);
            let is_newer = end.generation > first.generation;
            Ok(if is_same && is_newer { end } else { first })
        }
        (Err(_), Ok(end)) if is_wiped => Ok(end),
        (Err(SuperblockError::Blank), Err(reason)) if reason != SuperblockError::NotLarder => {
            Err(reason)
        }
        (first, _) => first,
    }
}

/// Whether the copy is gone, and nothing else has taken its place.
fn is_wiped(copy: &Result<Superblock, SuperblockError>) -> bool {
    matches!(
        copy,
        Err(SuperblockError::Blank
            | SuperblockError::Damaged(_)
            | SuperblockError::Invalid { .. }
            | SuperblockError::Unreadable(_))
    )
}

fn newer_of(
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
        (Err(SuperblockError::Blank), Err(reason)) | (Err(reason), Err(SuperblockError::Blank)) => {
            Err(reason)
        }
        (Err(SuperblockError::NotLarder), Err(reason)) | (Err(reason), Err(_)) => Err(reason),
    }
}

/// The error of a block that [`frame::open`] refused. The features of a newer block are where those
/// of this version are.
fn refused(block: &[u8], damage: Damage) -> SuperblockError {
    let Damage::Version { found: version } = damage else {
        return damage.into();
    };
    let features = block.get(FEATURES_AT..).unwrap_or_default();
    match read_features(&mut Reader::new(features)) {
        Ok(features) if version > FORMAT_VERSION => {
            let features = Box::new(features);
            SuperblockError::Newer { version, features }
        }
        _ if version < FORMAT_VERSION => SuperblockError::Older { version },
        _ => damage.into(),
    }
}

fn write_features(writer: &mut Writer<'_>, features: &Features) {
    writer.u64(features.compatible);
    writer.u64(features.read_only_compatible);
    writer.bytes(features.release.as_bytes());
    writer.bytes(features.names.as_bytes());
}

fn read_features(reader: &mut Reader<'_>) -> Result<Features, Overrun> {
    Ok(Features {
        compatible: reader.u64()?,
        read_only_compatible: reader.u64()?,
        release: Label::from_bytes(reader.array()?),
        names: Label::from_bytes(reader.array()?),
    })
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

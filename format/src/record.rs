//! Records: the entries of the log of a segment, in its descriptor blocks.
//!
//! ```text
//!  offset  bytes  field
//!       0      1  kind          1 page, 2 delete, 3 clear, 4 evict, 5 void, 6 pin
//!       1      1  flags         bit 0: has a parent; the others are zero
//!       2      2  key_slot      of an encrypted page: the slot of its tenant's key
//!       4      4  depth         of a page: pages before it in its chain
//!       8     16  namespace
//!      24     32  key           whole; of an evict or void: 12 bytes of it, then zeros
//!      56     12  parent        of a page that has one
//!      68      7  place         three numbers in 56 bits, see below
//!      75      4  unix_s        page: when it was put; pin: its end; in seconds since 1970
//!      79      8  birth         the version; of a void: that of the page
//!      87      8  checksum      of a page; of an evict or void: the generation of the segment
//!      95     12  salt          of an encrypted page
//!     107     16  tag           of an encrypted page
//!
//!  place, by bits
//!           page  0..20 first block in the segment, 20..38 blocks, 38..56 stored blocks
//!    evict, void  0..24 the segment, 24..40 the volume
//! ```
//!
//! Fields that a kind does not use are zero. So are key slot, salt and tag of a page that is not
//! encrypted.
//!
//! `blocks` is the size of a page in the shape of its namespace. `stored` is the number of blocks
//! that it takes in the segment: fewer if a codec has encoded it, else the same number.

use std::num::NonZeroU16;

use crate::bytes::{Reader, Writer};
use crate::consts::{BLOCK_BYTES, SEGMENT_BLOCKS_MAX, SEGMENTS_MAX};
use crate::error::Damage;
use crate::geometry::HEADER_BLOCKS;
use crate::ids::SegmentNo;
use crate::key::{KeyPrefix, PageKey};
use crate::namespace::Fingerprint;
use crate::serial::Serial;
use crate::shape::PAGE_BYTES_LIMIT;

/// Bytes of a record.
pub(crate) const RECORD_BYTES: usize = 123;

const FLAG_PARENT: u8 = 1;
const KIND_PAGE: u8 = 1;
const KIND_DELETE: u8 = 2;
const KIND_CLEAR: u8 = 3;
const KIND_EVICT: u8 = 4;
const KIND_VOID: u8 = 5;
const KIND_PIN: u8 = 6;
const KEY_SLOT_BYTES: usize = 2;
const PLACE_BYTES: usize = 7;
const PLACE_BITS: u32 = 56;
const SALT_BYTES: usize = 12;
const TAG_BYTES: usize = 16;
const START_BITS: u32 = 20;
const BLOCKS_BITS: u32 = 18;
const SEGMENT_BITS: u32 = 24;

const _: () = assert!(
    1 + 1 + KEY_SLOT_BYTES + 4 + 16 + 32 + 12 + PLACE_BYTES + 4 + 8 + 8 + SALT_BYTES + TAG_BYTES
        == RECORD_BYTES
);
const _: () = assert!(START_BITS + 2 * BLOCKS_BITS == PLACE_BITS);
const _: () = assert!(SEGMENT_BLOCKS_MAX == 1 << START_BITS && SEGMENTS_MAX == 1 << SEGMENT_BITS);
// Every page is smaller than 2^18 blocks.
const _: () = assert!(PAGE_BYTES_LIMIT == (BLOCK_BYTES as u64) << BLOCKS_BITS);

/// What decryption of a page needs besides its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Seal {
    /// The slot of its tenant's key in the keyring.
    pub slot: NonZeroU16,
    /// Random bytes, drawn for the encryption of this page alone.
    pub salt: [u8; SALT_BYTES],
    /// The tag over the name of the page and its stored bytes.
    pub tag: [u8; TAG_BYTES],
}

/// What shows that stored bytes are those of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Proof {
    /// The [`PageChecksum`](crate::PageChecksum) of the stored blocks.
    pub checksum: u64,
    /// Of an encrypted page.
    pub seal: Option<Seal>,
}

impl Proof {
    /// Bits of the checksum of an encrypted page that count, from the lowest: an index keeps no
    /// more. The tag shows whether bytes are the page's. The checksum only shows whether bytes
    /// without the right tag are the stored ones.
    pub const SEALED_CHECKSUM_BITS: u32 = 48;

    /// Whether stored bytes with this checksum are those of the page.
    #[must_use]
    pub const fn has_checksum(&self, checksum: u64) -> bool {
        let differs = self.checksum ^ checksum;
        match self.seal {
            None => differs == 0,
            Some(_) => differs << (u64::BITS - Proof::SEALED_CHECKSUM_BITS) == 0,
        }
    }
}

impl From<u64> for Proof {
    /// That of a page which is not encrypted.
    fn from(checksum: u64) -> Proof {
        let seal = None;
        Proof { checksum, seal }
    }
}

/// A page of the segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageRecord {
    /// The namespace.
    pub namespace: Fingerprint,
    /// The key.
    pub key: PageKey,
    /// The first 96 bits of the key of the previous page in the chain.
    pub parent: Option<KeyPrefix>,
    /// Number of pages before this page in the chain.
    pub depth: u32,
    /// The version of the page. A copy keeps it.
    pub birth: Serial,
    /// The first block, counted in blocks of the segment.
    pub start: u32,
    /// Number of blocks in the shape of its namespace.
    pub blocks: u32,
    /// Number of blocks in the segment: fewer than `blocks` if the page is encoded, else as many.
    pub stored: u32,
    /// When the page was put, in seconds since 1970; 0 if it is not known. A copy keeps it.
    pub put_unix_s: u32,
    /// The [`PageChecksum`](crate::PageChecksum) of the stored blocks.
    pub checksum: u64,
    /// Of an encrypted page. A copy keeps it, and the stored bytes.
    pub seal: Option<Seal>,
}

/// A record of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Record {
    /// The page was put, or copied here.
    Page(PageRecord),
    /// Tombstone: deletes every page of this key with a lower version.
    Delete {
        /// The namespace of the key.
        namespace: Fingerprint,
        /// The key.
        key: PageKey,
        /// The version of the tombstone.
        birth: Serial,
    },
    /// Tombstone: deletes every page of this namespace with a lower version.
    Clear {
        /// The namespace.
        namespace: Fingerprint,
        /// The version of the tombstone.
        birth: Serial,
    },
    /// The page of this key with a lower version was evicted, or found damaged. The record is
    /// needed while that generation of the page's segment is on disk.
    Evict {
        /// The namespace of the key.
        namespace: Fingerprint,
        /// The first 96 bits of the key, as stored in the index.
        key: KeyPrefix,
        /// The version of the eviction.
        birth: Serial,
        /// The place of the page.
        home: PageHome,
    },
    /// The put of the page of this key and this very version failed after its descriptor was sent
    /// to the device. Pages of the key with another version are not concerned. The record is needed
    /// as long as that of an eviction.
    Void {
        /// The namespace of the key.
        namespace: Fingerprint,
        /// The first 96 bits of the key.
        key: KeyPrefix,
        /// The version of the page.
        birth: Serial,
        /// The place of the page.
        home: PageHome,
    },
    /// The page of this key is to stay until a time. Tombstones with a higher version end it, and
    /// the pin with the highest version counts.
    Pin {
        /// The namespace of the key.
        namespace: Fingerprint,
        /// The key.
        key: PageKey,
        /// The version of the pin.
        birth: Serial,
        /// Its end, in seconds since 1970. The earliest time, 0, takes the pin back.
        until_unix_s: u32,
    },
}

/// The generation of the segment that holds a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageHome {
    /// The volume, as an index in the volume list of the store.
    pub volume: u16,
    /// The segment.
    pub segment: SegmentNo,
    /// The generation of the segment.
    pub sequence: Serial,
}

impl Record {
    /// The namespace of the record.
    #[must_use]
    pub fn namespace(&self) -> Fingerprint {
        match self {
            Record::Page(page) => page.namespace,
            Record::Delete { namespace, .. }
            | Record::Clear { namespace, .. }
            | Record::Evict { namespace, .. }
            | Record::Void { namespace, .. }
            | Record::Pin { namespace, .. } => *namespace,
        }
    }

    /// The version of the record; of a void record, the version of its page.
    #[must_use]
    pub fn birth(&self) -> Serial {
        match self {
            Record::Page(page) => page.birth,
            Record::Delete { birth, .. }
            | Record::Clear { birth, .. }
            | Record::Evict { birth, .. }
            | Record::Void { birth, .. }
            | Record::Pin { birth, .. } => *birth,
        }
    }

    pub(crate) fn write(&self, writer: &mut Writer<'_>) {
        let fields = Fields::of(self);
        let has_parent = fields.parent.is_some();
        let [place @ .., _] = fields.place.to_le_bytes();
        writer.u8(fields.kind);
        writer.u8(if has_parent { FLAG_PARENT } else { 0 });
        writer.u16(fields.seal.map_or(0, |seal| seal.slot.get()));
        writer.u32(fields.depth);
        writer.bytes(fields.namespace.as_bytes());
        writer.bytes(fields.key.as_bytes());
        writer.bytes(&fields.parent.map_or([0; 12], |parent| *parent.as_bytes()));
        writer.bytes(&place);
        writer.u32(fields.unix_s);
        writer.u64(fields.birth.get());
        writer.u64(fields.checksum);
        writer.bytes(&fields.seal.map_or([0; SALT_BYTES], |seal| seal.salt));
        writer.bytes(&fields.seal.map_or([0; TAG_BYTES], |seal| seal.tag));
    }

    #[inline]
    pub(crate) fn read(bytes: &[u8; RECORD_BYTES]) -> Result<Record, Damage> {
        let fields = Fields::read(bytes)?;
        if fields.kind == KIND_PAGE {
            return Ok(Record::Page(fields.page()));
        }
        let Fields {
            kind,
            namespace,
            key,
            birth,
            unix_s: until_unix_s,
            ..
        } = fields;
        let is_departure = matches!(kind, KIND_EVICT | KIND_VOID);
        let is_lean = fields.parent.is_none()
            && fields.depth == 0
            && fields.seal.is_none()
            && (until_unix_s == 0 || kind == KIND_PIN)
            && (is_departure || fields.place == 0 && fields.checksum == 0);
        if !is_lean {
            return Err(Damage::Reserved);
        }
        if is_departure && key.prefix().padded() != key {
            return Err(Damage::Reserved);
        }
        match kind {
            KIND_DELETE => Ok(Record::Delete {
                namespace,
                key,
                birth,
            }),
            KIND_CLEAR if *key.as_bytes() == [0; 32] => Ok(Record::Clear { namespace, birth }),
            KIND_CLEAR => Err(Damage::Reserved),
            KIND_EVICT => Ok(Record::Evict {
                namespace,
                key: key.prefix(),
                birth,
                home: fields.home()?,
            }),
            KIND_VOID => Ok(Record::Void {
                namespace,
                key: key.prefix(),
                birth,
                home: fields.home()?,
            }),
            KIND_PIN => Ok(Record::Pin {
                namespace,
                key,
                birth,
                until_unix_s,
            }),
            other => Err(damaged("kind", other)),
        }
    }

    /// Checks the rules that do not depend on the location, for a block with these fields.
    #[inline]
    pub(crate) fn validate(&self, commit: Serial, data_end: u32) -> Result<(), Damage> {
        let birth = self.birth();
        if !birth.is_drawn() || birth >= commit {
            return Err(damaged("birth", birth.get()));
        }
        let page = match self {
            Record::Page(page) => page,
            Record::Evict { home, .. } | Record::Void { home, .. } => {
                let segment = home.segment.0;
                return match segment >> SEGMENT_BITS {
                    0 => Ok(()),
                    _ => Err(damaged("segment", segment)),
                };
            }
            Record::Delete { .. } | Record::Clear { .. } | Record::Pin { .. } => return Ok(()),
        };
        if page.start < HEADER_BLOCKS || page.start >= SEGMENT_BLOCKS_MAX {
            return Err(damaged("start", page.start));
        }
        if page.blocks >> BLOCKS_BITS != 0 {
            return Err(damaged("blocks", page.blocks));
        }
        if page.stored == 0 || page.stored > page.blocks {
            return Err(damaged("stored", page.stored));
        }
        match page.start.checked_add(page.stored) {
            Some(end) if end <= data_end => Ok(()),
            _ => Err(damaged("stored", page.stored)),
        }
    }
}

/// The fields of a record of any kind.
#[derive(Clone, Copy)]
struct Fields {
    kind: u8,
    parent: Option<KeyPrefix>,
    depth: u32,
    namespace: Fingerprint,
    key: PageKey,
    place: u64,
    unix_s: u32,
    birth: Serial,
    checksum: u64,
    seal: Option<Seal>,
}

impl Fields {
    fn of(record: &Record) -> Fields {
        let absent = Fields {
            kind: 0,
            parent: None,
            depth: 0,
            namespace: record.namespace(),
            key: PageKey::from_bytes([0; 32]),
            place: 0,
            unix_s: 0,
            birth: record.birth(),
            checksum: 0,
            seal: None,
        };
        let departed = |kind, key: &KeyPrefix, home: &PageHome| Fields {
            kind,
            key: key.padded(),
            place: u64::from(home.segment.0) | u64::from(home.volume) << SEGMENT_BITS,
            checksum: home.sequence.get(),
            ..absent
        };
        match record {
            Record::Page(page) => Fields {
                kind: KIND_PAGE,
                parent: page.parent,
                depth: page.depth,
                key: page.key,
                place: u64::from(page.start)
                    | u64::from(page.blocks) << START_BITS
                    | u64::from(page.stored) << (START_BITS + BLOCKS_BITS),
                unix_s: page.put_unix_s,
                checksum: page.checksum,
                seal: page.seal,
                ..absent
            },
            Record::Delete { key, .. } => Fields {
                kind: KIND_DELETE,
                key: *key,
                ..absent
            },
            Record::Clear { .. } => Fields {
                kind: KIND_CLEAR,
                ..absent
            },
            Record::Evict { key, home, .. } => departed(KIND_EVICT, key, home),
            Record::Void { key, home, .. } => departed(KIND_VOID, key, home),
            Record::Pin {
                key, until_unix_s, ..
            } => Fields {
                kind: KIND_PIN,
                key: *key,
                unix_s: *until_unix_s,
                ..absent
            },
        }
    }

    /// Reads the fields, and checks the bits that no kind uses.
    #[inline]
    fn read(bytes: &[u8; RECORD_BYTES]) -> Result<Fields, Damage> {
        let mut reader = Reader::new(bytes);
        let kind = reader.u8()?;
        let flags = reader.u8()?;
        let slot = NonZeroU16::new(reader.u16()?);
        let depth = reader.u32()?;
        let namespace = Fingerprint::from_bytes(reader.array()?);
        let key = PageKey::from_bytes(reader.array()?);
        let parent = KeyPrefix::from_bytes(reader.array()?);
        let place = read_place(&mut reader)?;
        let unix_s = reader.u32()?;
        let birth = Serial::from_raw(reader.u64()?);
        let checksum = reader.u64()?;
        let seal = read_seal(slot, &mut reader)?;
        let has_parent = flags & FLAG_PARENT != 0;
        let no_parent = *parent.as_bytes() == [0; 12];
        if flags & !FLAG_PARENT != 0 || !(has_parent || no_parent) {
            return Err(Damage::Reserved);
        }
        Ok(Fields {
            kind,
            parent: has_parent.then_some(parent),
            depth,
            namespace,
            key,
            place,
            unix_s,
            birth,
            checksum,
            seal,
        })
    }

    fn page(&self) -> PageRecord {
        PageRecord {
            namespace: self.namespace,
            key: self.key,
            parent: self.parent,
            depth: self.depth,
            birth: self.birth,
            start: bits(self.place, 0, START_BITS),
            blocks: bits(self.place, START_BITS, BLOCKS_BITS),
            stored: bits(self.place, START_BITS + BLOCKS_BITS, BLOCKS_BITS),
            put_unix_s: self.unix_s,
            checksum: self.checksum,
            seal: self.seal,
        }
    }

    /// The place of the page of an evict or void record.
    #[expect(clippy::cast_possible_truncation, reason = "16 bits")]
    fn home(&self) -> Result<PageHome, Damage> {
        if self.place >> (SEGMENT_BITS + u16::BITS) != 0 {
            return Err(Damage::Reserved);
        }
        Ok(PageHome {
            volume: bits(self.place, SEGMENT_BITS, u16::BITS) as u16,
            segment: SegmentNo(bits(self.place, 0, SEGMENT_BITS)),
            sequence: Serial::from_raw(self.checksum),
        })
    }
}

/// `count` bits of a place, at most 24.
#[expect(clippy::cast_possible_truncation, reason = "at most 24 bits")]
const fn bits(place: u64, from: u32, count: u32) -> u32 {
    (place >> from) as u32 & !(u32::MAX << count)
}

#[inline]
fn read_place(reader: &mut Reader<'_>) -> Result<u64, Damage> {
    let mut bytes = [0; 8];
    let [low @ .., _] = &mut bytes;
    *low = reader.array::<PLACE_BYTES>()?;
    Ok(u64::from_le_bytes(bytes))
}

/// The seal of a page with a key slot. A page without one has none, and a seal of zeros is none.
#[inline]
fn read_seal(slot: Option<NonZeroU16>, reader: &mut Reader<'_>) -> Result<Option<Seal>, Damage> {
    let Some(slot) = slot else {
        reader.reserved(SALT_BYTES + TAG_BYTES)?;
        return Ok(None);
    };
    let (salt, tag) = (reader.array()?, reader.array()?);
    if salt == [0; SALT_BYTES] && tag == [0; TAG_BYTES] {
        return Err(damaged("key_slot", slot.get()));
    }
    Ok(Some(Seal { slot, salt, tag }))
}

fn damaged(field: &'static str, value: impl Into<u64>) -> Damage {
    Damage::Field {
        field,
        value: value.into(),
    }
}

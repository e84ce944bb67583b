//! The keyring of an encrypted store: its master key and the tenants' keys, all of them wrapped.
//!
//! A copy takes [`KEYRING_BYTES`] at each of the offsets of
//! [`keyring_offsets`](crate::keyring_offsets) in every volume. It is a row of blocks, as the
//! quotas are: a copy is whole if all blocks of the row are valid and have one generation. This
//! crate has no cipher. It reads and writes the layout; `larder-seal` unwraps the keys, and checks
//! the tag, which covers all else of the copy.
//!
//! ```text
//!  offset  bytes  field
//!       0     24  prologue
//!      24     16  store
//!      40      8  generation   grows with each change of the keyring
//!      48      2  index        of this block in the row
//!      50      2  blocks       of the row: 1 to 95
//!      52      2  entries      in this block: 1 to 8 wraps, or 1 to 31 slots
//!      54      1  cipher       1 AES-256-GCM
//!      55      1  zero
//!      56      -  block 0:
//!             24    nonce
//!             16    tag        under the master key
//!             88    each wrap of the master key:
//!                   16  id         of the key that wraps it
//!                   24  nonce
//!                   48  key        wrapped
//!             128   each slot, in the other blocks:
//!                   16  tenant     keyed: only the master key shows whose slot it is
//!                    1  state      1 current, 2 earlier, 3 erased
//!                    7  zero
//!                    8  created_unix_s
//!                    8  erased     serial: segments of a lower generation may have its pages
//!                   24  nonce
//!                   48  key        wrapped; zero if it is erased
//!                   16  zero
//! ```
//!
//! The number of a slot is its place, counted from 1. Pages name it, and a page with the number 0
//! is not encrypted.

use crate::bytes::{Reader, Writer};
use crate::consts::BLOCK_BYTES;
use crate::error::{Damage, Elsewhere, Structure};
use crate::frame::{self, PROLOGUE_BYTES};
use crate::ids::{StoreId, identity};
use crate::serial::Serial;

/// Bytes of the room for one copy of the keyring.
pub const KEYRING_BYTES: usize = 384 << 10;

/// Maximum number of slots of a keyring, erased ones included.
pub const KEY_SLOTS_MAX: usize = 2_900;

/// Maximum number of keys that wrap the master key.
pub const WRAPS_MAX: usize = 8;

/// Bytes of a wrapped key: the key, and the tag of its wrap.
pub const WRAPPED_KEY_BYTES: usize = 32 + 16;

const BLOCKS_MAX: usize = 1 + KEY_SLOTS_MAX.div_ceil(SLOTS_PER_BLOCK);
const FIXED_BYTES: usize = PROLOGUE_BYTES + 16 + 8 + 3 * 2 + 2;
const HEAD_BYTES: usize = FIXED_BYTES + NONCE_BYTES + TAG_BYTES;
const NONCE_BYTES: usize = 24;
const TAG_BYTES: usize = 16;
pub(crate) const WRAP_BYTES: usize = 16 + NONCE_BYTES + WRAPPED_KEY_BYTES;
const SLOT_BYTES: usize = 128;
const SLOT_RESERVED: usize = SLOT_BYTES - (16 + 1 + 7 + 2 * 8 + NONCE_BYTES + WRAPPED_KEY_BYTES);
const SLOTS_PER_BLOCK: usize = 31;
const CIPHER_AES_256_GCM: u8 = 1;
const STATE_CURRENT: u8 = 1;
const STATE_EARLIER: u8 = 2;
const STATE_ERASED: u8 = 3;

const _: () = assert!(FIXED_BYTES == 56 && WRAP_BYTES == 88 && SLOT_RESERVED == 16);
const _: () = assert!(HEAD_BYTES + WRAPS_MAX * WRAP_BYTES <= BLOCK_BYTES);
const _: () = assert!(FIXED_BYTES + SLOTS_PER_BLOCK * SLOT_BYTES <= BLOCK_BYTES);
const _: () = assert!(BLOCKS_MAX == 95 && BLOCKS_MAX * BLOCK_BYTES <= KEYRING_BYTES);

identity! {
    /// Identity of a key that wraps a master key. It follows from the key, which it does not show.
    WrapId, 16
}

identity! {
    /// A tenant, as a keyring names it: a keyed hash of its name.
    TenantId, 16
}

/// A wrapped key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct WrappedKey {
    /// The nonce of the wrap.
    pub nonce: [u8; NONCE_BYTES],
    /// The encrypted key and the tag of the wrap.
    pub bytes: [u8; WRAPPED_KEY_BYTES],
}

impl std::fmt::Debug for WrappedKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WrappedKey(..)")
    }
}

/// The master key of a store, or the key of an archive, wrapped by one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyWrap {
    /// The key that wraps it.
    pub id: WrapId,
    /// The wrapped key.
    pub key: WrappedKey,
}

impl KeyWrap {
    pub(crate) fn write(&self, writer: &mut Writer<'_>) {
        writer.bytes(self.id.as_bytes());
        write_key(writer, &self.key);
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<KeyWrap, Damage> {
        Ok(KeyWrap {
            id: WrapId::from_bytes(reader.array()?),
            key: read_key(reader)?,
        })
    }
}

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotState {
    /// The key of its tenant, for new pages too.
    Current(WrappedKey),
    /// A former key of its tenant, for pages that have it.
    Earlier(WrappedKey),
    /// No key. Segments of a generation below this serial may have pages that name the slot.
    Erased(Serial),
}

/// The slot of a tenant's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyringSlot {
    /// The tenant. Of an erased slot, too: a caller may ask for the erasure once more.
    pub tenant: TenantId,
    /// When the key was made, in seconds since 1970.
    pub created_unix_s: u64,
    /// What the slot holds.
    pub state: SlotState,
}

/// A copy of the keyring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyringCopy {
    /// The store.
    pub store: StoreId,
    /// Increases with each change, from 1. The whole copy with the highest generation counts.
    pub generation: u64,
    /// The nonce of the tag.
    pub nonce: [u8; NONCE_BYTES],
    /// The tag of the copy under its master key.
    pub tag: [u8; TAG_BYTES],
    /// The wraps of the master key: 1 to [`WRAPS_MAX`].
    pub wraps: Vec<KeyWrap>,
    /// The slots: at most [`KEY_SLOTS_MAX`].
    pub slots: Vec<KeyringSlot>,
}

impl KeyringCopy {
    /// Encodes the copy: the blocks of its row, and zeros up to [`KEYRING_BYTES`].
    ///
    /// # Panics
    /// Without a wrap, or with more wraps or slots than fit.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.encode_row(&self.nonce, &self.tag);
        bytes.resize(KEYRING_BYTES, 0);
        bytes
    }

    /// The bytes that the tag covers: the row with zeros for nonce and tag.
    ///
    /// # Panics
    /// As [`KeyringCopy::encode`] does.
    #[must_use]
    pub fn authenticated(&self) -> Vec<u8> {
        self.encode_row(&[0; NONCE_BYTES], &[0; TAG_BYTES])
    }

    fn encode_row(&self, nonce: &[u8; NONCE_BYTES], tag: &[u8; TAG_BYTES]) -> Vec<u8> {
        assert!(
            (1..=WRAPS_MAX).contains(&self.wraps.len()) && self.slots.len() <= KEY_SLOTS_MAX,
            "more wraps or slots than a keyring has"
        );
        let rows = self.slots.chunks(SLOTS_PER_BLOCK);
        let mut copy = Vec::with_capacity(KEYRING_BYTES);
        let mut block = [0; BLOCK_BYTES];
        let mut writer = self.head(&mut block, 0, self.wraps.len());
        writer.bytes(nonce);
        writer.bytes(tag);
        for wrap in &self.wraps {
            wrap.write(&mut writer);
        }
        let length = length_of(HEAD_BYTES, WRAP_BYTES, self.wraps.len());
        frame::seal(&mut block, Structure::Keyring, length);
        copy.extend_from_slice(&block);
        for (row, index) in rows.zip(1_u16..) {
            let mut writer = self.head(&mut block, index, row.len());
            row.iter().for_each(|slot| write_slot(&mut writer, slot));
            let length = length_of(FIXED_BYTES, SLOT_BYTES, row.len());
            frame::seal(&mut block, Structure::Keyring, length);
            copy.extend_from_slice(&block);
        }
        copy
    }

    /// Begins a block of the row.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "at most 95 blocks, 8 wraps and 31 slots in a block"
    )]
    fn head<'a>(&self, block: &'a mut [u8; BLOCK_BYTES], index: u16, entries: usize) -> Writer<'a> {
        let rows = self.slots.len().div_ceil(SLOTS_PER_BLOCK);
        let mut writer = frame::begin(block);
        writer.bytes(self.store.as_bytes());
        writer.u64(self.generation);
        writer.u16(index);
        writer.u16(rows.saturating_add(1) as u16);
        writer.u16(entries as u16);
        writer.u8(CIPHER_AES_256_GCM);
        writer.reserved(1);
        writer
    }

    /// The keyring of a copy that was read from this store. A copy of zeros is [`Damage::Blank`].
    /// Bytes behind the blocks of the row are left by a longer row.
    ///
    /// # Errors
    /// The copy is not whole, or it belongs elsewhere; see [`Damage`].
    pub fn decode(copy: &[u8], store: StoreId) -> Result<KeyringCopy, Damage> {
        if copy.len() != KEYRING_BYTES {
            let found = copy.len() as u64;
            return Err(Damage::Length { found });
        }
        let mut blocks = copy.chunks(BLOCK_BYTES);
        let first = blocks.next().unwrap_or_default();
        let (head, mut reader) = match Head::read(first, store) {
            // Zeros before other bytes are no copy that was never written.
            Err(Damage::Blank(_)) if copy.iter().any(|byte| *byte != 0) => {
                return Err(Damage::Magic(Structure::Keyring));
            }
            read => read?,
        };
        if head.index != 0 {
            return Err(field("index", head.index));
        }
        if !(1..=WRAPS_MAX).contains(&usize::from(head.entries)) {
            return Err(field("entries", head.entries));
        }
        let nonce = reader.array()?;
        let tag = reader.array()?;
        let wraps = (0..head.entries)
            .map(|_| KeyWrap::read(&mut reader))
            .collect::<Result<_, Damage>>()?;
        ended(
            reader,
            length_of(HEAD_BYTES, WRAP_BYTES, head.entries.into()),
        )?;
        let mut slots = Vec::new();
        for index in 1..head.blocks {
            let block = blocks.next().unwrap_or_default();
            let (next, mut reader) = Head::read(block, store)?;
            let is_last = index.saturating_add(1) == head.blocks;
            let most = SLOTS_PER_BLOCK.min(KEY_SLOTS_MAX.saturating_sub(slots.len()));
            let least = if is_last { 1 } else { SLOTS_PER_BLOCK };
            if next.index != index {
                return Err(field("index", next.index));
            }
            if next.blocks != head.blocks {
                return Err(field("blocks", next.blocks));
            }
            if next.generation != head.generation {
                let value = next.generation;
                let field = "generation";
                return Err(Damage::Field { field, value });
            }
            if !(least..=most).contains(&usize::from(next.entries)) {
                return Err(field("entries", next.entries));
            }
            for _ in 0..next.entries {
                slots.push(read_slot(&mut reader)?);
            }
            ended(
                reader,
                length_of(FIXED_BYTES, SLOT_BYTES, next.entries.into()),
            )?;
        }
        Ok(KeyringCopy {
            store,
            generation: head.generation,
            nonce,
            tag,
            wraps,
            slots,
        })
    }
}

/// The fields that each block of a row has.
struct Head {
    generation: u64,
    index: u16,
    blocks: u16,
    entries: u16,
}

impl Head {
    fn read(block: &[u8], store: StoreId) -> Result<(Head, Reader<'_>), Damage> {
        let mut reader = frame::open(block, Structure::Keyring)?;
        let claimed = StoreId::from_bytes(reader.array()?);
        if claimed != store {
            let expected = store;
            return Err(Damage::Elsewhere(Elsewhere::Store { claimed, expected }));
        }
        let head = Head {
            generation: reader.u64()?,
            index: reader.u16()?,
            blocks: reader.u16()?,
            entries: reader.u16()?,
        };
        let cipher = reader.u8()?;
        reader.reserved(1)?;
        if head.generation == 0 {
            return Err(field("generation", 0));
        }
        if !(1..=BLOCKS_MAX).contains(&usize::from(head.blocks)) {
            return Err(field("blocks", head.blocks));
        }
        if cipher != CIPHER_AES_256_GCM {
            return Err(field("cipher", cipher.into()));
        }
        Ok((head, reader))
    }
}

fn write_key(writer: &mut Writer<'_>, key: &WrappedKey) {
    writer.bytes(&key.nonce);
    writer.bytes(&key.bytes);
}

fn read_key(reader: &mut Reader<'_>) -> Result<WrappedKey, Damage> {
    Ok(WrappedKey {
        nonce: reader.array()?,
        bytes: reader.array()?,
    })
}

fn write_slot(writer: &mut Writer<'_>, slot: &KeyringSlot) {
    let (state, erased, key) = match slot.state {
        SlotState::Current(key) => (STATE_CURRENT, Serial::ZERO, Some(key)),
        SlotState::Earlier(key) => (STATE_EARLIER, Serial::ZERO, Some(key)),
        SlotState::Erased(serial) => (STATE_ERASED, serial, None),
    };
    writer.bytes(slot.tenant.as_bytes());
    writer.u8(state);
    writer.reserved(7);
    writer.u64(slot.created_unix_s);
    writer.u64(erased.get());
    match key {
        Some(key) => write_key(writer, &key),
        None => writer.reserved(NONCE_BYTES + WRAPPED_KEY_BYTES),
    }
    writer.reserved(SLOT_RESERVED);
}

fn read_slot(reader: &mut Reader<'_>) -> Result<KeyringSlot, Damage> {
    let tenant = TenantId::from_bytes(reader.array()?);
    let state = reader.u8()?;
    reader.reserved(7)?;
    let created_unix_s = reader.u64()?;
    let erased = Serial::from_raw(reader.u64()?);
    let key = read_key(reader)?;
    reader.reserved(SLOT_RESERVED)?;
    let is_blank = key.nonce == [0; NONCE_BYTES] && key.bytes == [0; WRAPPED_KEY_BYTES];
    let state = match state {
        STATE_CURRENT | STATE_EARLIER if erased != Serial::ZERO => return Err(Damage::Reserved),
        STATE_CURRENT => SlotState::Current(key),
        STATE_EARLIER => SlotState::Earlier(key),
        STATE_ERASED if !is_blank => return Err(Damage::Reserved),
        STATE_ERASED => SlotState::Erased(erased),
        other => return Err(field("state", other.into())),
    };
    Ok(KeyringSlot {
        tenant,
        created_unix_s,
        state,
    })
}

fn ended(reader: Reader<'_>, length: u32) -> Result<(), Damage> {
    match reader.rest().len() as u64 {
        0 => Ok(()),
        surplus => Err(Damage::Length {
            found: u64::from(length).saturating_add(surplus),
        }),
    }
}

fn field(field: &'static str, value: u16) -> Damage {
    Damage::Field {
        field,
        value: value.into(),
    }
}

#[expect(clippy::cast_possible_truncation, reason = "at most a block")]
const fn length_of(fixed: usize, entry: usize, entries: usize) -> u32 {
    entry.saturating_mul(entries).saturating_add(fixed) as u32
}

//! The quotas of a store: how much of it a group of namespaces keeps, and for how long.
//!
//! A copy takes [`QUOTAS_BYTES`] at each of the offsets of
//! [`quotas_offsets`](crate::quotas_offsets) in the first volume. It is a row of blocks, each of
//! this layout. A copy is whole if its first block and all others of the same row are valid and
//! have one generation, so a torn write leaves none that is whole.
//!
//! ```text
//!  offset  bytes  field
//!       0     24  prologue
//!      24     16  store
//!      40      8  generation   grows with each change of the quotas
//!      48      2  index        of this block in the row
//!      50      2  blocks       of the row: 1 to 12
//!      52      2  groups       in this block: 0 to 15
//!      54      2  zero
//!      56     24  nonce        these two of encrypted groups
//!      80     16  tag
//!      96    256  each group:
//!              2    kind         1 namespace, 2 model, 3 tenant
//!              2    name_bytes
//!              4    zero
//!              8    min          bytes
//!              8    max          bytes; 0: none
//!              8    max_age_s    0: none
//!            224    name         a namespace's fingerprint, or UTF-8; then zeros
//! ```
//!
//! An encrypted store has encrypted groups: [`Quotas::unseal`] makes a copy with clear ones.
//!
//! The groups ascend by kind and name, so equal quotas have one encoding.

use crate::bytes::Reader;
use crate::consts::BLOCK_BYTES;
use crate::error::{Damage, Elsewhere, Structure};
use crate::frame::{self, PROLOGUE_BYTES};
use crate::ids::StoreId;
use crate::namespace::{Fingerprint, NamespaceFields};
use crate::sealed::{MetadataSeal, NONCE_BYTES, Sealable, TAG_BYTES};

/// Bytes of one copy of the quotas.
pub const QUOTAS_BYTES: usize = 48 << 10;

/// Maximum length of the name of a model or tenant with a quota, in bytes.
pub const QUOTA_NAME_BYTES_MAX: usize = 224;

/// Maximum number of groups with a quota.
pub const QUOTAS_MAX: usize = BLOCKS_MAX * GROUPS_PER_BLOCK;

/// The further field of a namespace that names its tenant.
pub const TENANT_FIELD: &str = "tenant";

const BLOCKS_MAX: usize = QUOTAS_BYTES / BLOCK_BYTES;
const NONCE_AT: usize = PROLOGUE_BYTES + 16 + 8 + 4 * 2;
const FIXED_BYTES: usize = NONCE_AT + NONCE_BYTES + TAG_BYTES;
const GROUP_BYTES: usize = 2 * 2 + 4 + 3 * 8 + QUOTA_NAME_BYTES_MAX;
const GROUPS_PER_BLOCK: usize = 15;
const BLOCKS_AT: usize = PROLOGUE_BYTES + 16 + 8 + 2;

const SEALABLE: Sealable = Sealable {
    structure: Structure::Quotas,
    nonce_at: NONCE_AT,
    body_at: FIXED_BYTES,
};

const _: () = assert!(FIXED_BYTES == 96 && GROUP_BYTES == 256);
const _: () = assert!(FIXED_BYTES + GROUPS_PER_BLOCK * GROUP_BYTES <= BLOCK_BYTES);

/// A set of namespaces that share a quota.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum QuotaGroup {
    /// One namespace.
    Namespace(Fingerprint),
    /// All namespaces of a model.
    Model(String),
    /// All namespaces whose further field `tenant` has this value.
    Tenant(String),
}

impl QuotaGroup {
    /// Whether a namespace belongs to the group.
    #[must_use]
    pub fn has(&self, fingerprint: Fingerprint, fields: Option<&NamespaceFields>) -> bool {
        match self {
            QuotaGroup::Namespace(own) => *own == fingerprint,
            QuotaGroup::Model(model) => fields.is_some_and(|fields| fields.model == *model),
            QuotaGroup::Tenant(tenant) => {
                let own = fields.and_then(|fields| fields.extra.get(TENANT_FIELD));
                own.is_some_and(|own| own == tenant)
            }
        }
    }

    const fn kind(&self) -> u16 {
        match self {
            QuotaGroup::Namespace(_) => 1,
            QuotaGroup::Model(_) => 2,
            QuotaGroup::Tenant(_) => 3,
        }
    }

    fn name(&self) -> &[u8] {
        match self {
            QuotaGroup::Namespace(fingerprint) => fingerprint.as_bytes(),
            QuotaGroup::Model(name) | QuotaGroup::Tenant(name) => name.as_bytes(),
        }
    }
}

impl std::fmt::Display for QuotaGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            QuotaGroup::Namespace(fingerprint) => write!(f, "namespace {fingerprint}"),
            QuotaGroup::Model(name) => write!(f, "model {name}"),
            QuotaGroup::Tenant(name) => write!(f, "tenant {name}"),
        }
    }
}

/// The quota of a group, in bytes as stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quota {
    /// The group.
    pub group: QuotaGroup,
    /// Eviction takes nothing of the group below this.
    pub min: u64,
    /// The group takes at most this. Not zero, and at least `min`.
    pub max: Option<u64>,
    /// Pages put longer ago than this are not served. Not zero.
    pub max_age_s: Option<u64>,
}

/// The quotas of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quotas {
    /// Increases with each change. The whole copy with the highest generation counts. Zero: none
    /// were ever set.
    pub generation: u64,
    /// At most [`QUOTAS_MAX`], ascending by their groups, none twice.
    pub list: Vec<Quota>,
}

/// Why quotas are not valid. Messages get into logs, and name no group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuotaError {
    /// A name has no byte, too many, or a control character.
    #[error(
        "the name of a model or tenant with a quota has 1 to {QUOTA_NAME_BYTES_MAX} bytes and no \
         control character"
    )]
    Name,
    /// The maximum is below the minimum, or zero.
    #[error("the maximum is {max} bytes, and the minimum {min}: raise the maximum")]
    Range {
        /// Its minimum.
        min: u64,
        /// Its maximum.
        max: u64,
    },
    /// A quota without minimum, maximum and age, or an age of zero.
    #[error("the quota states nothing: give a minimum, a maximum or an age above zero")]
    Empty,
    /// More groups than there is room for.
    #[error("{0} quotas, and a store keeps at most {QUOTAS_MAX}: remove some")]
    TooMany(usize),
    /// A group comes twice, or before a lesser one.
    #[error("the groups of the quotas do not ascend")]
    Order,
}

impl Quotas {
    /// The quota of a group.
    #[must_use]
    pub fn get(&self, group: &QuotaGroup) -> Option<&Quota> {
        self.list.iter().find(|quota| quota.group == *group)
    }

    /// Adds a quota, or replaces that of its group.
    pub fn set(&mut self, quota: Quota) {
        match self
            .list
            .binary_search_by(|own| own.group.cmp(&quota.group))
        {
            Ok(at) => {
                if let Some(own) = self.list.get_mut(at) {
                    *own = quota;
                }
            }
            Err(at) => self.list.insert(at, quota),
        }
    }

    /// Removes the quota of a group. Returns whether there was one.
    pub fn remove(&mut self, group: &QuotaGroup) -> bool {
        let before = self.list.len();
        self.list.retain(|quota| quota.group != *group);
        self.list.len() < before
    }

    /// # Errors
    /// See [`QuotaError`].
    pub fn validate(&self) -> Result<(), QuotaError> {
        if self.list.len() > QUOTAS_MAX {
            return Err(QuotaError::TooMany(self.list.len()));
        }
        if !self.list.is_sorted_by(|a, b| a.group < b.group) {
            return Err(QuotaError::Order);
        }
        self.list.iter().try_for_each(Quota::validate)
    }

    /// Encodes a copy.
    ///
    /// # Errors
    /// Those of [`Quotas::validate`].
    #[expect(
        clippy::cast_possible_truncation,
        reason = "validated: at most 12 blocks of 15 groups, names of at most 224 bytes"
    )]
    pub fn encode(&self, store: StoreId) -> Result<Vec<u8>, QuotaError> {
        self.validate()?;
        let mut rows: Vec<&[Quota]> = self.list.chunks(GROUPS_PER_BLOCK).collect();
        if rows.is_empty() {
            rows.push(&[]);
        }
        let mut copy = Vec::with_capacity(QUOTAS_BYTES);
        let mut block = [0; BLOCK_BYTES];
        for (row, index) in rows.iter().zip(0_u16..) {
            let mut writer = frame::begin(&mut block);
            writer.bytes(store.as_bytes());
            writer.u64(self.generation);
            writer.u16(index);
            writer.u16(rows.len() as u16);
            writer.u16(row.len() as u16);
            writer.reserved(2 + NONCE_BYTES + TAG_BYTES);
            for quota in *row {
                let name = quota.group.name();
                writer.u16(quota.group.kind());
                writer.u16(name.len() as u16);
                writer.reserved(4);
                writer.u64(quota.min);
                writer.u64(quota.max.unwrap_or(0));
                writer.u64(quota.max_age_s.unwrap_or(0));
                writer.bytes(name);
                writer.reserved(QUOTA_NAME_BYTES_MAX.saturating_sub(name.len()));
            }
            frame::seal(&mut block, Structure::Quotas, length_of(row.len()));
            copy.extend_from_slice(&block);
        }
        copy.resize(QUOTAS_BYTES, 0);
        Ok(copy)
    }

    /// Encrypts the groups of an encoded copy, block by block. `seal` gets what a tag covers
    /// besides the groups, and the groups.
    ///
    /// # Errors
    /// That of `seal`. The copy is not whole then.
    pub fn seal<E>(
        copy: &mut [u8],
        mut seal: impl FnMut(&[u8], &mut [u8]) -> Result<MetadataSeal, E>,
    ) -> Result<(), E> {
        let magic = Structure::Quotas.magic();
        let blocks = copy.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut();
        blocks
            .take_while(|block| block.starts_with(&magic))
            .try_for_each(|block| SEALABLE.seal(block, &mut seal))
    }

    /// Decrypts the groups of a copy of an encrypted store. `open` gets what a tag covers besides
    /// the groups, the groups, and their seal. It returns whether the tag is right. Blocks behind
    /// those of the row stay as they are, and so does a copy of zeros.
    ///
    /// # Errors
    /// A block of the row is not whole; or [`Damage::Sealed`], if a tag is wrong or the groups are
    /// not encrypted.
    pub fn unseal(
        copy: &mut [u8],
        mut open: impl FnMut(&[u8], &mut [u8], &MetadataSeal) -> bool,
    ) -> Result<(), Damage> {
        if copy.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        let row = copy.get(BLOCKS_AT..).and_then(<[u8]>::first_chunk);
        let row = row.map_or(0, |bytes| u16::from_le_bytes(*bytes));
        let blocks = copy.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut();
        blocks
            .take(usize::from(row).max(1))
            .try_for_each(|block| SEALABLE.unseal(block, &mut open))
            .map_err(|damage| match damage {
                // Zeros before other bytes are no copy that was never written.
                Damage::Blank(structure) => Damage::Magic(structure),
                damage => damage,
            })
    }

    /// The generation of a copy with encrypted groups, for a reader without their key.
    ///
    /// # Errors
    /// As for [`Quotas::decode`].
    pub fn check_locked(copy: &[u8], store: StoreId) -> Result<u64, Damage> {
        let mut blocks = copy.chunks(BLOCK_BYTES);
        let first = Head::decode(blocks.next().unwrap_or_default(), store);
        let (first, _) = first.map_err(|damage| not_blank(damage, copy))?;
        for (index, block) in (0..first.blocks).zip(copy.chunks(BLOCK_BYTES)) {
            let (head, _) = Head::decode(block, store)?;
            if head != (Head { index, ..first }) {
                return Err(field("index", head.index));
            }
        }
        Ok(first.generation)
    }

    /// The quotas of a copy that was read from this store. A copy of zeros is
    /// [`Damage::Blank`]. What lies behind the blocks of the row is of no account: it is left by a
    /// longer row.
    ///
    /// # Errors
    /// The copy is not whole, or it belongs elsewhere; see [`Damage`].
    pub fn decode(copy: &[u8], store: StoreId) -> Result<Quotas, Damage> {
        if copy.len() != QUOTAS_BYTES {
            let found = copy.len() as u64;
            return Err(Damage::Length { found });
        }
        let mut blocks = copy.chunks(BLOCK_BYTES);
        let first = blocks.next().unwrap_or_default();
        let mut row = Row::decode(first, store).map_err(|damage| not_blank(damage, copy))?;
        if row.index != 0 {
            return Err(field("index", row.index));
        }
        for index in 1..row.blocks {
            let block = blocks.next().unwrap_or_default();
            let next = Row::decode(block, store)?;
            if next.index != index {
                return Err(field("index", next.index));
            }
            if next.blocks != row.blocks {
                return Err(field("blocks", next.blocks));
            }
            if next.generation != row.generation {
                let value = next.generation;
                return Err(Damage::Field {
                    field: "generation",
                    value,
                });
            }
            row.list.extend(next.list);
        }
        let quotas = Quotas {
            generation: row.generation,
            list: row.list,
        };
        match quotas.encode(store) {
            // Another division into blocks, or an order of its own, is no writer's.
            Ok(own) if own.get(..used(row.blocks)) == copy.get(..used(row.blocks)) => Ok(quotas),
            _ => Err(Damage::Reserved),
        }
    }
}

impl Quota {
    fn validate(&self) -> Result<(), QuotaError> {
        if let QuotaGroup::Model(name) | QuotaGroup::Tenant(name) = &self.group {
            let fits = (1..=QUOTA_NAME_BYTES_MAX).contains(&name.len());
            if !fits || name.chars().any(char::is_control) {
                return Err(QuotaError::Name);
            }
        }
        if let Some(max) = self.max.filter(|max| *max == 0 || *max < self.min) {
            return Err(QuotaError::Range { min: self.min, max });
        }
        let states_nothing = self.min == 0 && self.max.is_none() && self.max_age_s.is_none();
        if states_nothing || self.max_age_s == Some(0) {
            return Err(QuotaError::Empty);
        }
        Ok(())
    }
}

/// The damage of the first block of a copy. Zeros before other bytes are no copy that was never
/// written.
fn not_blank(damage: Damage, copy: &[u8]) -> Damage {
    match damage {
        Damage::Blank(structure) if copy.iter().any(|byte| *byte != 0) => Damage::Magic(structure),
        damage => damage,
    }
}

/// The header of one block of a copy.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Head {
    generation: u64,
    index: u16,
    blocks: u16,
}

impl Head {
    /// The header, and a reader behind the position of the block in its row.
    fn decode(block: &[u8], store: StoreId) -> Result<(Head, Reader<'_>), Damage> {
        let mut reader = frame::open(block, Structure::Quotas)?;
        let claimed = StoreId::from_bytes(reader.array()?);
        if claimed != store {
            let expected = store;
            return Err(Damage::Elsewhere(Elsewhere::Store { claimed, expected }));
        }
        let head = Head {
            generation: reader.u64()?,
            index: reader.u16()?,
            blocks: reader.u16()?,
        };
        match (1..=BLOCKS_MAX).contains(&usize::from(head.blocks)) {
            true => Ok((head, reader)),
            false => Err(field("blocks", head.blocks)),
        }
    }
}

/// One block of a copy.
struct Row {
    generation: u64,
    index: u16,
    blocks: u16,
    list: Vec<Quota>,
}

impl Row {
    fn decode(block: &[u8], store: StoreId) -> Result<Row, Damage> {
        let (head, mut reader) = Head::decode(block, store)?;
        let Head {
            generation,
            index,
            blocks,
        } = head;
        let groups = reader.u16()?;
        reader.reserved(2 + NONCE_BYTES + TAG_BYTES)?;
        if usize::from(groups) > GROUPS_PER_BLOCK {
            return Err(field("groups", groups));
        }
        let list = (0..groups)
            .map(|_| read_quota(&mut reader))
            .collect::<Result<_, Damage>>()?;
        let surplus = reader.rest().len() as u64;
        if surplus != 0 {
            let found = u64::from(length_of(groups.into())).saturating_add(surplus);
            return Err(Damage::Length { found });
        }
        Ok(Row {
            generation,
            index,
            blocks,
            list,
        })
    }
}

fn read_quota(reader: &mut Reader<'_>) -> Result<Quota, Damage> {
    let kind = reader.u16()?;
    let name_bytes = reader.u16()?;
    reader.reserved(4)?;
    let min = reader.u64()?;
    let max = reader.u64()?;
    let max_age_s = reader.u64()?;
    let room = reader.slice(QUOTA_NAME_BYTES_MAX)?;
    let name = room.get(..usize::from(name_bytes));
    let name = name.ok_or(field("name_bytes", name_bytes))?;
    let text = || {
        let text = String::from_utf8(name.to_vec());
        text.map_err(|_| field("name", name_bytes))
    };
    let group = match kind {
        1 => {
            let fingerprint = name.try_into();
            let fingerprint = fingerprint.map_err(|_| field("name_bytes", name_bytes))?;
            QuotaGroup::Namespace(Fingerprint::from_bytes(fingerprint))
        }
        2 => QuotaGroup::Model(text()?),
        3 => QuotaGroup::Tenant(text()?),
        kind => return Err(field("kind", kind)),
    };
    Ok(Quota {
        group,
        min,
        max: Some(max).filter(|max| *max != 0),
        max_age_s: Some(max_age_s).filter(|age| *age != 0),
    })
}

fn field(field: &'static str, value: u16) -> Damage {
    Damage::Field {
        field,
        value: value.into(),
    }
}

fn used(blocks: u16) -> usize {
    usize::from(blocks).saturating_mul(BLOCK_BYTES)
}

#[expect(clippy::cast_possible_truncation, reason = "at most a block")]
const fn length_of(groups: usize) -> u32 {
    GROUP_BYTES
        .saturating_mul(groups)
        .saturating_add(FIXED_BYTES) as u32
}

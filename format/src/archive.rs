//! Archives: pages in one portable file that a store of any geometry can import.
//!
//! ```text
//!  block   0      1           2       3 ..       n       n+1 ..              last
//!          +------+-----------+-------+----------+-------+----------+- ... -+-----+
//!          | head | namespace | pages | payloads | pages | payloads |       | end |
//!          +------+-----------+-------+----------+-------+----------+- ... -+-----+
//! ```
//!
//! An archive is a sequence of blocks. Structures have the common prologue. Payloads are laid out
//! as in a store, each part padded to whole blocks. A `pages` block lists the pages whose payloads
//! follow it; they belong to the namespace listed last. The `end` block holds the totals and
//! nothing follows it. An archive can therefore be written and read as a stream.
//!
//! ```text
//!  offset  bytes  field
//!       0     24  prologue      its length is that of the header and the body
//!      24     16  archive       the same in all blocks of an archive
//!      40      8  position      its own block number in the archive
//!      48      2  body          1 head, 2 namespace, 3 unnamed namespace, 4 pages, 5 end
//!      50      2  zero
//!      52      4  count         pages, bytes of the namespace, or wraps of a head; else 0
//!      56     24  nonce         zero if the body is clear
//!      80     16  tag           of an encrypted body; a clear one begins here
//!      96      -  body          in an encrypted archive, but for its head
//!
//!  head      store (16), created_unix_s (8), pages (8), blocks (8);
//!            in an encrypted archive the wrap of its key: id (16), nonce (24), wrapped key (48)
//!  namespace its encoding
//!  unnamed   fingerprint (16), page_blocks (4)
//!  pages     64 bytes each, and 96 in an encrypted archive:
//!       0      1  flags         bit 0: has a parent
//!       1      1  codec         0 none, 1 bf16
//!       2      2  key slot      zero in a plain archive
//!       4      4  depth         pages before it in its chain
//!       8     32  key
//!      40     12  parent        if it has one
//!      52      4  saved         blocks of the plain page that a codec saved; zero without one
//!      56      8  checksum      its PageChecksum, of the encrypted blocks if they are
//!      64     12  salt
//!      76     16  tag
//!      92      4  zero
//!  end       pages (8), blocks (8), left_out (8)
//! ```
//!
//! An encrypted archive has a clear head. The bodies of all other blocks are encrypted, and so are
//! the payloads, with a key that is random for the archive and wrapped in its head. The tag of the
//! wrap covers the version, the identity of the archive and the head ([`ArchiveHead::named`]). The
//! tag of a body covers its header, so that no block stands in another place or archive. An
//! encrypted namespace has zeros behind it: lengths tell nothing of names. This crate has no
//! cipher: [`ArchiveWriter::seal`] and [`ArchiveReader::sealed_item`] take one.
//!
//! Invariants of the items that a reader returns: exactly one head, first; pages only after a
//! namespace; exactly one end, last. The counts of the end match the items before it and add up to
//! the counts in the head. Parents come before their children if the writer knew both, so a prefix
//! is one contiguous range of the archive; a reader need not rely on this order. Items returned
//! before an error stay valid.
//!
//! Faults covered: bit flips (CRC-32 of structures, checksums of payloads), truncation (the end is
//! missing), blocks removed, repeated, reordered or copied from another archive (identity and
//! position), and wrong counts and sizes. Deliberate forgery is covered by encryption alone:
//! checksums are not signatures, and anyone who can write a plain archive can store any bytes under
//! any key.

mod layout;

use std::num::NonZeroU16;

use crate::bytes::{Reader, Writer};
use crate::consts::{BLOCK_BYTES, BLOCK_BYTES_U64, FORMAT_VERSION};
use crate::error::{Damage, Elsewhere, Structure};
use crate::frame;
use crate::ids::{ArchiveId, StoreId};
use crate::key::{KeyPrefix, PageKey};
use crate::keyring::{KeyWrap, WRAP_BYTES};
use crate::namespace::{Fingerprint, NAMESPACE_BYTES_MAX, Namespace};
use crate::record::Seal;
use crate::sealed::MetadataSeal;
use crate::shape::PAGE_BYTES_LIMIT;
use layout::{Layout, PAGE_RESERVED, PLAIN, SEALABLE, SEALED};

/// Maximum number of pages listed in one block of a plain archive.
pub const ARCHIVED_PAGES_MAX: usize = PLAIN.pages_max;

/// Maximum number of pages listed in one block of an encrypted archive.
pub const SEALED_PAGES_MAX: usize = SEALED.pages_max;

const HEAD_BYTES: usize = 16 + 3 * 8;
const FLAG_PARENT: u8 = 1;
const BODY_HEAD: u16 = 1;
const BODY_NAMESPACE: u16 = 2;
const BODY_UNNAMED: u16 = 3;
const BODY_PAGES: u16 = 4;
const BODY_END: u16 = 5;

const _: () = assert!(ARCHIVED_PAGES_MAX == 62 && SEALED_PAGES_MAX == 41);
const _: () = assert!(PLAIN.header_bytes == 80 && SEALED.header_bytes == 96);
const _: () = assert!(1 + 3 + 4 + 32 + 12 + 4 + 8 == PLAIN.page_bytes && SEALED.page_bytes == 96);
const _: () = assert!(SEALED.header_bytes + NAMESPACE_BYTES_MAX <= BLOCK_BYTES);
const _: () = assert!(PLAIN.header_bytes + HEAD_BYTES + WRAP_BYTES <= BLOCK_BYTES);

/// The head of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArchiveHead {
    /// The source store. Informational only.
    pub store: StoreId,
    /// Creation time in seconds since 1970. A store that has erased a tenant since takes none of
    /// its pages.
    pub created_unix_s: u64,
    /// Number of pages planned: written pages plus left-out pages.
    pub pages: u64,
    /// Number of payload blocks planned.
    pub blocks: u64,
    /// The key of an encrypted archive, wrapped.
    pub wrap: Option<KeyWrap>,
}

impl ArchiveHead {
    /// What the tag of the wrap covers, besides the key that wraps: the version, the archive, and
    /// all else of its head.
    #[must_use]
    pub fn named(&self, archive: ArchiveId) -> [u8; 4 + 16 + HEAD_BYTES] {
        let mut bytes = [0; 4 + 16 + HEAD_BYTES];
        let mut writer = Writer::new(&mut bytes);
        // A reader takes an encrypted archive of this version alone.
        writer.u32(FORMAT_VERSION);
        writer.bytes(archive.as_bytes());
        self.write(&mut writer);
        bytes
    }

    fn write(&self, writer: &mut Writer<'_>) {
        writer.bytes(self.store.as_bytes());
        writer.u64(self.created_unix_s);
        writer.u64(self.pages);
        writer.u64(self.blocks);
    }
}

/// The namespace of the pages that follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArchivedNamespace {
    /// The complete namespace record.
    Whole(Namespace),
    /// A namespace whose complete record the source store had lost. Only a store that knows the
    /// namespace can import its pages.
    Unnamed {
        /// The fingerprint that the page records hold.
        fingerprint: Fingerprint,
        /// Blocks per page.
        page_blocks: u32,
    },
}

/// A page of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArchivedPage {
    /// Its key.
    pub key: PageKey,
    /// The first 96 bits of the key of the previous page in the chain.
    pub parent: Option<KeyPrefix>,
    /// Number of pages before this page in the chain.
    pub depth: u32,
    /// Blocks of the plain page that are not in its payload: zero, unless a codec made it smaller.
    pub saved: u32,
    /// The [`PageChecksum`](crate::PageChecksum) of its payload.
    pub checksum: u64,
    /// Of an encrypted payload.
    pub seal: Option<Seal>,
}

/// The totals of an archive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArchiveCounts {
    /// Pages.
    pub pages: u64,
    /// Blocks of their payloads.
    pub blocks: u64,
    /// Planned pages that could not be read completely.
    pub left_out: u64,
}

/// A structure of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArchiveItem {
    /// The head.
    Head(ArchiveHead),
    /// The namespace of the pages that follow.
    Namespace(ArchivedNamespace),
    /// The pages whose payloads follow: 1 to [`ARCHIVED_PAGES_MAX`].
    Pages(Vec<ArchivedPage>),
    /// The end.
    End(ArchiveCounts),
}

impl ArchivedNamespace {
    /// The fingerprint that the page records hold.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        match self {
            ArchivedNamespace::Whole(namespace) => namespace.fingerprint(),
            ArchivedNamespace::Unnamed { fingerprint, .. } => *fingerprint,
        }
    }

    /// Blocks per page: below 2^18.
    #[must_use]
    pub fn page_blocks(&self) -> u32 {
        match self {
            ArchivedNamespace::Whole(namespace) => namespace.shape().page_blocks(),
            ArchivedNamespace::Unnamed { page_blocks, .. } => *page_blocks,
        }
    }
}

/// Progress of a writer or reader: the position, and the state that decides which item may follow.
#[derive(Clone, Debug, Default)]
struct Course {
    /// Blocks so far, including payloads.
    position: u64,
    head: Option<ArchiveHead>,
    /// Blocks per page of the last namespace.
    page_blocks: Option<u32>,
    pages: u64,
    blocks: u64,
    ended: bool,
}

impl Course {
    /// The layout of the next block. A head is always clear.
    fn layout(&self) -> Layout {
        match self.head.is_some_and(|head| head.wrap.is_some()) {
            true => SEALED,
            false => PLAIN,
        }
    }

    /// Advances past an item and its payloads.
    fn pass(&mut self, item: &ArchiveItem) -> Result<(), Damage> {
        match (item, &self.head, self.page_blocks) {
            _ if self.ended => return Err(out_of_order(item)),
            (ArchiveItem::Head(head), None, _) => self.head = Some(*head),
            (ArchiveItem::Namespace(namespace), Some(_), _) => {
                self.page_blocks = Some(page_blocks(namespace)?);
            }
            (ArchiveItem::Pages(pages), Some(head), Some(page_blocks)) => {
                let (count, blocks) = payloads(pages, page_blocks, head, self)?;
                self.pages = self.pages.saturating_add(count);
                self.blocks = self.blocks.saturating_add(blocks);
                self.position = self.position.saturating_add(blocks);
            }
            (ArchiveItem::End(counts), Some(head), _) => {
                self.check_end(counts, head)?;
                self.ended = true;
            }
            _ => return Err(out_of_order(item)),
        }
        self.position = self.position.saturating_add(1);
        Ok(())
    }

    fn check_end(&self, counts: &ArchiveCounts, head: &ArchiveHead) -> Result<(), Damage> {
        if counts.pages != self.pages {
            return Err(damaged("pages", counts.pages));
        }
        if counts.blocks != self.blocks {
            return Err(damaged("blocks", counts.blocks));
        }
        if counts.pages.checked_add(counts.left_out) != Some(head.pages) {
            return Err(damaged("left_out", counts.left_out));
        }
        Ok(())
    }
}

/// The pages and payload blocks that a pages block adds. Fails if the total would exceed the head's
/// counts.
fn payloads(
    pages: &[ArchivedPage],
    page_blocks: u32,
    head: &ArchiveHead,
    so_far: &Course,
) -> Result<(u64, u64), Damage> {
    let count = pages.len() as u64;
    let mut blocks = 0_u64;
    for page in pages {
        if page.seal.is_some() != head.wrap.is_some() {
            return Err(damaged(
                "key slot",
                page.seal.map_or(0, |seal| seal.slot.get()),
            ));
        }
        let payload = page_blocks.checked_sub(page.saved).filter(|left| *left > 0);
        let payload = payload.ok_or_else(|| damaged("saved", page.saved))?;
        blocks = blocks.saturating_add(u64::from(payload));
    }
    let fits = count <= head.pages.saturating_sub(so_far.pages)
        && blocks <= head.blocks.saturating_sub(so_far.blocks);
    if pages.is_empty() || pages.len() > so_far.layout().pages_max || !fits {
        return Err(damaged("count", count));
    }
    Ok((count, blocks))
}

fn page_blocks(namespace: &ArchivedNamespace) -> Result<u32, Damage> {
    let blocks = namespace.page_blocks();
    let bytes = u64::from(blocks).saturating_mul(BLOCK_BYTES_U64);
    if blocks == 0 || bytes >= PAGE_BYTES_LIMIT {
        return Err(damaged("page_blocks", blocks));
    }
    Ok(blocks)
}

/// Encodes the structures of an archive, in order. The caller writes the payloads between them.
#[derive(Clone, Debug)]
pub struct ArchiveWriter {
    archive: ArchiveId,
    course: Course,
}

impl ArchiveWriter {
    /// A writer at the start of an archive.
    #[must_use]
    pub fn new(archive: ArchiveId) -> ArchiveWriter {
        ArchiveWriter {
            archive,
            course: Course::default(),
        }
    }

    /// Encodes the block of an item. The caller must write the payloads of its pages, if any,
    /// directly after the block.
    ///
    /// # Errors
    /// [`Damage::Field`]: the item is not allowed here or is too long, or the counts of an end are
    /// wrong.
    pub fn item(&mut self, item: &ArchiveItem) -> Result<Box<[u8; BLOCK_BYTES]>, Damage> {
        let (position, layout) = (self.course.position, self.course.layout());
        self.course.pass(item)?;
        let mut block = Box::new([0; BLOCK_BYTES]);
        let mut writer = frame::begin(&mut block);
        let (count, length) = sizes(item, layout);
        writer.bytes(self.archive.as_bytes());
        writer.u64(position);
        writer.u16(kind(item));
        writer.reserved(2);
        writer.u32(count);
        writer.reserved(layout.zero_bytes);
        write_body(&mut writer, item);
        frame::seal(&mut block, Structure::Archive, length);
        Ok(block)
    }

    /// Encrypts the body of a block that is no head. `seal` gets what the tag covers besides the
    /// body, and the body.
    ///
    /// # Errors
    /// That of `seal`. The block is blank then.
    pub fn seal<E>(
        block: &mut [u8; BLOCK_BYTES],
        seal: impl FnOnce(&[u8], &mut [u8]) -> Result<MetadataSeal, E>,
    ) -> Result<(), E> {
        SEALABLE.seal(block, seal)
    }

    /// The counts for an end at this position. `left_out` is the number of planned pages that the
    /// archive does not contain.
    #[must_use]
    pub fn counts(&self, left_out: u64) -> ArchiveCounts {
        ArchiveCounts {
            pages: self.course.pages,
            blocks: self.course.blocks,
            left_out,
        }
    }
}

/// Decodes the structures of an archive, in order. The caller reads or skips the payloads between
/// them.
#[derive(Clone, Debug, Default)]
pub struct ArchiveReader {
    archive: Option<ArchiveId>,
    course: Course,
}

impl ArchiveReader {
    /// A reader at the start of an archive.
    #[must_use]
    pub fn new() -> ArchiveReader {
        ArchiveReader::default()
    }

    /// The byte offset of the next structure from the start of the archive. After the end: the
    /// length of the archive.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.course.position.saturating_mul(BLOCK_BYTES_U64)
    }

    /// Whether the end has been read.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.course.ended
    }

    /// The identity of the archive, once a block was read.
    #[must_use]
    pub fn archive(&self) -> Option<ArchiveId> {
        self.archive
    }

    /// The same as [`ArchiveReader::item`], for the blocks of an encrypted archive behind its head.
    /// `open` gets what the tag covers besides the body, the body, and its seal. It returns whether
    /// the tag is right.
    ///
    /// # Errors
    /// The block is not a valid next structure, or a writer without the key changed it: see
    /// [`Damage`]. The position of the reader does not change.
    pub fn sealed_item(
        &mut self,
        block: &[u8],
        open: impl FnOnce(&[u8], &mut [u8], &MetadataSeal) -> bool,
    ) -> Result<ArchiveItem, Damage> {
        let Ok(mut block) = <[u8; BLOCK_BYTES]>::try_from(block) else {
            let found = block.len() as u64;
            return Err(Damage::Length { found });
        };
        SEALABLE.unseal(&mut block, open)?;
        self.item(&block)
    }

    /// Reads the block at [`ArchiveReader::offset`].
    ///
    /// # Errors
    /// The block is not a valid next structure: see [`Damage`]. The position of the reader does not
    /// change.
    pub fn item(&mut self, block: &[u8]) -> Result<ArchiveItem, Damage> {
        let mut reader = frame::open(block, Structure::Archive)?;
        let archive = ArchiveId::from_bytes(reader.array()?);
        let position = reader.u64()?;
        let kind = reader.u16()?;
        reader.reserved(2)?;
        let count = reader.u32()?;
        let layout = self.course.layout();
        reader.reserved(layout.zero_bytes).map_err(|damage| {
            // In an encrypted archive these bytes are a nonce.
            let is_behind_head = self.course.head.is_some();
            if is_behind_head {
                Damage::Disowned
            } else {
                damage
            }
        })?;
        let expected = self.archive.unwrap_or(archive);
        if archive != expected {
            return Err(Damage::Elsewhere(Elsewhere::Archive {
                claimed: archive,
                expected,
            }));
        }
        if position != self.course.position {
            return Err(Damage::Elsewhere(Elsewhere::Position {
                claimed: position,
                expected: self.course.position,
            }));
        }
        let item = read_body(reader, (kind, count), layout)?;
        let version = frame::version_of(block);
        if let ArchiveItem::Head(ArchiveHead { wrap: Some(_), .. }) = item
            && version != FORMAT_VERSION
        {
            return Err(Damage::Version { found: version });
        }
        self.course.pass(&item)?;
        self.archive = Some(archive);
        Ok(item)
    }
}

fn kind(item: &ArchiveItem) -> u16 {
    match item {
        ArchiveItem::Head(_) => BODY_HEAD,
        ArchiveItem::Namespace(ArchivedNamespace::Whole(_)) => BODY_NAMESPACE,
        ArchiveItem::Namespace(ArchivedNamespace::Unnamed { .. }) => BODY_UNNAMED,
        ArchiveItem::Pages(_) => BODY_PAGES,
        ArchiveItem::End(_) => BODY_END,
    }
}

/// The count field and the byte length of the structure.
#[expect(clippy::cast_possible_truncation, reason = "the body fits a block")]
fn sizes(item: &ArchiveItem, layout: Layout) -> (u32, u32) {
    let (count, body_bytes) = match item {
        ArchiveItem::Head(head) => {
            let wraps = usize::from(head.wrap.is_some());
            let bytes = WRAP_BYTES.saturating_mul(wraps);
            (wraps, HEAD_BYTES.saturating_add(bytes))
        }
        ArchiveItem::Namespace(ArchivedNamespace::Whole(namespace)) => {
            let bytes = match layout.hides_lengths {
                true => NAMESPACE_BYTES_MAX,
                false => namespace.encode().len(),
            };
            (bytes, bytes)
        }
        ArchiveItem::Namespace(ArchivedNamespace::Unnamed { .. }) => (0, 20),
        ArchiveItem::Pages(pages) => (pages.len(), pages.len().saturating_mul(layout.page_bytes)),
        ArchiveItem::End(_) => (0, 24),
    };
    let length = layout.header_bytes.saturating_add(body_bytes);
    (count as u32, length as u32)
}

fn write_body(writer: &mut Writer<'_>, item: &ArchiveItem) {
    match item {
        ArchiveItem::Head(head) => {
            head.write(writer);
            if let Some(wrap) = &head.wrap {
                wrap.write(writer);
            }
        }
        ArchiveItem::Namespace(ArchivedNamespace::Whole(namespace)) => {
            writer.bytes(namespace.encode());
        }
        ArchiveItem::Namespace(ArchivedNamespace::Unnamed {
            fingerprint,
            page_blocks,
        }) => {
            writer.bytes(fingerprint.as_bytes());
            writer.u32(*page_blocks);
        }
        ArchiveItem::Pages(pages) => pages.iter().for_each(|page| write_page(writer, page)),
        ArchiveItem::End(counts) => {
            writer.u64(counts.pages);
            writer.u64(counts.blocks);
            writer.u64(counts.left_out);
        }
    }
}

fn write_page(writer: &mut Writer<'_>, page: &ArchivedPage) {
    writer.u8(if page.parent.is_some() {
        FLAG_PARENT
    } else {
        0
    });
    writer.u8(u8::from(page.saved > 0));
    writer.u16(page.seal.map_or(0, |seal| seal.slot.get()));
    writer.u32(page.depth);
    writer.bytes(page.key.as_bytes());
    match &page.parent {
        Some(parent) => writer.bytes(parent.as_bytes()),
        None => writer.reserved(12),
    }
    writer.u32(page.saved);
    writer.u64(page.checksum);
    if let Some(seal) = &page.seal {
        writer.bytes(&seal.salt);
        writer.bytes(&seal.tag);
        writer.reserved(PAGE_RESERVED);
    }
}

fn read_body(
    mut reader: Reader<'_>,
    (kind, count): (u16, u32),
    layout: Layout,
) -> Result<ArchiveItem, Damage> {
    let item = match kind {
        BODY_NAMESPACE => {
            let encoding = reader.rest();
            if encoding.len() != count as usize {
                return Err(damaged("count", count));
            }
            let namespace = match layout.hides_lengths {
                true => Namespace::decode_padded(encoding)?,
                false => Namespace::decode(encoding)?,
            };
            let namespace = ArchivedNamespace::Whole(namespace);
            return Ok(ArchiveItem::Namespace(namespace));
        }
        BODY_PAGES => return read_pages(reader.rest(), count, layout).map(ArchiveItem::Pages),
        BODY_HEAD => ArchiveItem::Head(ArchiveHead {
            store: StoreId::from_bytes(reader.array()?),
            created_unix_s: reader.u64()?,
            pages: reader.u64()?,
            blocks: reader.u64()?,
            wrap: match count {
                1 => Some(KeyWrap::read(&mut reader)?),
                _ => None,
            },
        }),
        BODY_UNNAMED => ArchiveItem::Namespace(ArchivedNamespace::Unnamed {
            fingerprint: Fingerprint::from_bytes(reader.array()?),
            page_blocks: reader.u32()?,
        }),
        BODY_END => ArchiveItem::End(ArchiveCounts {
            pages: reader.u64()?,
            blocks: reader.u64()?,
            left_out: reader.u64()?,
        }),
        other => return Err(damaged("body", other)),
    };
    let surplus = reader.rest().len() as u64;
    if matches!(item, ArchiveItem::Head(_)) && surplus == WRAP_BYTES as u64 {
        return Err(Damage::Disowned);
    }
    if surplus != 0 {
        let (_, known) = sizes(&item, layout);
        let found = u64::from(known).saturating_add(surplus);
        return Err(Damage::Length { found });
    }
    if count != sizes(&item, layout).0 {
        return Err(damaged("count", count));
    }
    Ok(item)
}

fn read_pages(body: &[u8], count: u32, layout: Layout) -> Result<Vec<ArchivedPage>, Damage> {
    let pages = body.chunks_exact(layout.page_bytes);
    // The body lies within one block. This check bounds the number of pages before any allocation.
    if pages.len() != count as usize || !pages.remainder().is_empty() {
        return Err(damaged("count", count));
    }
    pages.map(read_page).collect()
}

fn read_page(bytes: &[u8]) -> Result<ArchivedPage, Damage> {
    let mut reader = Reader::new(bytes);
    let flags = reader.u8()?;
    let codec = reader.u8()?;
    let slot = NonZeroU16::new(reader.u16()?);
    let depth = reader.u32()?;
    let key = PageKey::from_bytes(reader.array()?);
    let parent = KeyPrefix::from_bytes(reader.array()?);
    let saved = reader.u32()?;
    let checksum = reader.u64()?;
    let seal = match slot {
        Some(slot) if bytes.len() == SEALED.page_bytes => Some(Seal {
            slot,
            salt: reader.array()?,
            tag: reader.array()?,
        }),
        Some(slot) => return Err(damaged("key slot", slot.get())),
        None => None,
    };
    if seal.is_some() {
        reader.reserved(PAGE_RESERVED)?;
    }
    if codec != u8::from(saved > 0) {
        return Err(damaged("codec", codec));
    }
    let has_parent = flags & FLAG_PARENT != 0;
    let no_parent = *parent.as_bytes() == [0; 12];
    if flags & !FLAG_PARENT != 0 || !(has_parent || no_parent) {
        return Err(Damage::Reserved);
    }
    Ok(ArchivedPage {
        key,
        parent: has_parent.then_some(parent),
        depth,
        saved,
        checksum,
        seal,
    })
}

fn out_of_order(item: &ArchiveItem) -> Damage {
    damaged("body", kind(item))
}

fn damaged(field: &'static str, value: impl Into<u64>) -> Damage {
    Damage::Field {
        field,
        value: value.into(),
    }
}

//! Archives: pages in one portable file, for a store of any geometry to take.
//!
//! ```text
//!  block   0      1           2       3 ..       n       n+1 ..              last
//!          +------+-----------+-------+----------+-------+----------+- ... -+-----+
//!          | head | namespace | pages | payloads | pages | payloads |       | end |
//!          +------+-----------+-------+----------+-------+----------+- ... -+-----+
//! ```
//!
//! A sequence of blocks: structures, each a block with the prologue that all structures share, and payloads as they lie in a
//! store, each part padded to whole blocks. A pages block names the pages whose payloads follow it, of the namespace named
//! last. The end says how much there was; nothing follows it. So an archive can be written and read as a stream.
//!
//! ```text
//!  offset  bytes  field
//!       0     24  prologue      its length is 80 and the body's bytes
//!      24     16  archive       the same in all blocks of an archive
//!      40      8  position      its own block number in the archive
//!      48      2  body          1 head, 2 namespace, 3 unnamed namespace, 4 pages, 5 end
//!      50      2  zero
//!      52      4  count         pages, or bytes of the namespace; else 0
//!      56     24  zero
//!      80      -  body
//!
//!  head      store (16), created_unix_s (8), pages (8), blocks (8)
//!  namespace its encoding
//!  unnamed   fingerprint (16), page_blocks (4)
//!  pages     64 bytes each:
//!       0      1  flags         bit 0: has a parent
//!       1      3  zero
//!       4      4  depth         pages before it in its chain
//!       8     32  key
//!      40     12  parent        if it has one
//!      52      4  zero
//!      56      8  checksum      its PageChecksum
//!  end       pages (8), blocks (8), left_out (8)
//! ```
//!
//! Invariants of what a reader gives out: one head, first; pages only behind a namespace; one end, last, whose counts are those
//! of what came before it and make up what the head announced. Parents come before their children where the writer knew
//! both, which makes a prefix one stretch of the archive; a reader need not believe it. What came before an error stays true.
//!
//! Defends against: flipped bits (CRC-32 of structures, checksums of payloads), a file that was cut off (its end is missing),
//! pieces cut out, repeated, reordered or taken from another archive (identity and position), counts and sizes that lie. Not
//! against intent: checksums are no signature, and whoever can write an archive can put any bytes under any key.

use crate::bytes::{Reader, Writer};
use crate::consts::{BLOCK_BYTES, BLOCK_BYTES_U64};
use crate::error::{Damage, Elsewhere, Structure};
use crate::frame::{self, PROLOGUE_BYTES};
use crate::ids::{StoreId, identity};
use crate::key::{KeyPrefix, PageKey};
use crate::namespace::{Fingerprint, NAMESPACE_BYTES_MAX, Namespace};
use crate::shape::PAGE_BYTES_LIMIT;

/// Most pages that one block of an archive names.
pub const ARCHIVED_PAGES_MAX: usize = (BLOCK_BYTES - HEADER_BYTES) / PAGE_BYTES;

const HEADER_BYTES: usize = 80;
const HEADER_RESERVED: usize = HEADER_BYTES - PROLOGUE_BYTES - (16 + 8 + 2 + 2 + 4);
const PAGE_BYTES: usize = 64;
const FLAG_PARENT: u8 = 1;
const BODY_HEAD: u16 = 1;
const BODY_NAMESPACE: u16 = 2;
const BODY_UNNAMED: u16 = 3;
const BODY_PAGES: u16 = 4;
const BODY_END: u16 = 5;

const _: () = assert!(ARCHIVED_PAGES_MAX == 62 && HEADER_RESERVED == 24);
const _: () = assert!(1 + 3 + 4 + 32 + 12 + 4 + 8 == PAGE_BYTES);
const _: () = assert!(HEADER_BYTES + NAMESPACE_BYTES_MAX <= BLOCK_BYTES);

identity! {
    /// An archive: random, drawn when it is written.
    ArchiveId, 16
}

/// What an archive says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArchiveHead {
    /// The store it was taken from, for people only.
    pub store: StoreId,
    /// When: seconds since 1970, for people only.
    pub created_unix_s: u64,
    /// Pages it was to hold: those it holds, and those that were left out.
    pub pages: u64,
    /// Blocks of payload it was to hold.
    pub blocks: u64,
}

/// The namespace of the pages that follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArchivedNamespace {
    /// Its full record.
    Whole(Namespace),
    /// A namespace whose full record the store had lost: only a store that knows it can take its pages.
    Unnamed {
        /// The name by which its pages know it.
        fingerprint: Fingerprint,
        /// Blocks of a page.
        page_blocks: u32,
    },
}

/// A page of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArchivedPage {
    /// Its key.
    pub key: PageKey,
    /// The key of the page before it in its chain, the first 96 bits.
    pub parent: Option<KeyPrefix>,
    /// Pages before it in its chain.
    pub depth: u32,
    /// Its [`PageChecksum`](crate::PageChecksum).
    pub checksum: u64,
}

/// How much an archive holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArchiveCounts {
    /// Pages.
    pub pages: u64,
    /// Blocks of their payloads.
    pub blocks: u64,
    /// Pages that were to be in it and could not be read whole.
    pub left_out: u64,
}

/// A structure of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArchiveItem {
    /// What it says of itself.
    Head(ArchiveHead),
    /// The namespace of the pages that follow.
    Namespace(ArchivedNamespace),
    /// The pages whose payloads follow: 1 to [`ARCHIVED_PAGES_MAX`].
    Pages(Vec<ArchivedPage>),
    /// The end.
    End(ArchiveCounts),
}

impl ArchivedNamespace {
    /// The name by which its pages know it.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        match self {
            ArchivedNamespace::Whole(namespace) => namespace.fingerprint(),
            ArchivedNamespace::Unnamed { fingerprint, .. } => *fingerprint,
        }
    }

    /// Blocks of a page: below 2^18.
    #[must_use]
    pub fn page_blocks(&self) -> u32 {
        match self {
            ArchivedNamespace::Whole(namespace) => namespace.shape().page_blocks(),
            ArchivedNamespace::Unnamed { page_blocks, .. } => *page_blocks,
        }
    }
}

/// What has been written or read of an archive so far: what may come next, and where.
#[derive(Clone, Debug, Default)]
struct Course {
    /// Blocks so far, payloads included.
    position: u64,
    head: Option<ArchiveHead>,
    /// Blocks of a page of the namespace named last.
    page_blocks: Option<u32>,
    pages: u64,
    blocks: u64,
    ended: bool,
}

impl Course {
    /// Moves on past an item and the payloads that belong to it.
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

/// How many pages and blocks a pages block adds, if it may: never more in all than the head announced.
fn payloads(
    pages: &[ArchivedPage],
    page_blocks: u32,
    head: &ArchiveHead,
    so_far: &Course,
) -> Result<(u64, u64), Damage> {
    let count = pages.len() as u64;
    let blocks = count.saturating_mul(u64::from(page_blocks));
    let fits = count <= head.pages.saturating_sub(so_far.pages)
        && blocks <= head.blocks.saturating_sub(so_far.blocks);
    if pages.is_empty() || pages.len() > ARCHIVED_PAGES_MAX || !fits {
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

/// Makes the structures of an archive, in order; the payloads between them are the caller's to write.
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

    /// The block to write for an item. The payloads of its pages, if it names any, must follow it.
    ///
    /// # Errors
    /// [`Damage::Field`]: an item that does not belong here, that is too long, or an end whose counts are wrong.
    pub fn item(&mut self, item: &ArchiveItem) -> Result<Box<[u8; BLOCK_BYTES]>, Damage> {
        let position = self.course.position;
        self.course.pass(item)?;
        let mut block = Box::new([0; BLOCK_BYTES]);
        let mut writer = frame::begin(&mut block);
        let (count, body_bytes) = sizes(item);
        writer.bytes(self.archive.as_bytes());
        writer.u64(position);
        writer.u16(kind(item));
        writer.reserved(2);
        writer.u32(count);
        writer.reserved(HEADER_RESERVED);
        write_body(&mut writer, item);
        frame::seal(&mut block, Structure::Archive, body_bytes);
        Ok(block)
    }

    /// The counts that end the archive here, with `left_out` pages that were announced and are not in it.
    #[must_use]
    pub fn counts(&self, left_out: u64) -> ArchiveCounts {
        ArchiveCounts {
            pages: self.course.pages,
            blocks: self.course.blocks,
            left_out,
        }
    }
}

/// Reads the structures of an archive, in order; the payloads between them are the caller's to read or to skip.
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

    /// Where the next structure lies, in bytes from the start of the archive; behind the end, the archive's length.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.course.position.saturating_mul(BLOCK_BYTES_U64)
    }

    /// Whether the end has been read.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.course.ended
    }

    /// Reads the block at [`ArchiveReader::offset`].
    ///
    /// # Errors
    /// It is not what must come next: see [`Damage`]. The reader stays where it is.
    pub fn item(&mut self, block: &[u8]) -> Result<ArchiveItem, Damage> {
        let mut reader = frame::open(block, Structure::Archive)?;
        let archive = ArchiveId::from_bytes(reader.array()?);
        let position = reader.u64()?;
        let kind = reader.u16()?;
        reader.reserved(2)?;
        let count = reader.u32()?;
        reader.reserved(HEADER_RESERVED)?;
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
        let item = read_body(reader, kind, count)?;
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

/// The count field, and the bytes of the whole structure.
#[expect(clippy::cast_possible_truncation, reason = "the body fits a block")]
fn sizes(item: &ArchiveItem) -> (u32, u32) {
    let (count, body_bytes) = match item {
        ArchiveItem::Head(_) => (0, 40),
        ArchiveItem::Namespace(ArchivedNamespace::Whole(namespace)) => {
            (namespace.encode().len(), namespace.encode().len())
        }
        ArchiveItem::Namespace(ArchivedNamespace::Unnamed { .. }) => (0, 20),
        ArchiveItem::Pages(pages) => (pages.len(), pages.len().saturating_mul(PAGE_BYTES)),
        ArchiveItem::End(_) => (0, 24),
    };
    (count as u32, HEADER_BYTES.saturating_add(body_bytes) as u32)
}

fn write_body(writer: &mut Writer<'_>, item: &ArchiveItem) {
    match item {
        ArchiveItem::Head(head) => {
            writer.bytes(head.store.as_bytes());
            writer.u64(head.created_unix_s);
            writer.u64(head.pages);
            writer.u64(head.blocks);
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
    writer.reserved(3);
    writer.u32(page.depth);
    writer.bytes(page.key.as_bytes());
    match &page.parent {
        Some(parent) => writer.bytes(parent.as_bytes()),
        None => writer.reserved(12),
    }
    writer.reserved(4);
    writer.u64(page.checksum);
}

fn read_body(mut reader: Reader<'_>, kind: u16, count: u32) -> Result<ArchiveItem, Damage> {
    let item = match kind {
        BODY_NAMESPACE => {
            let encoding = reader.rest();
            if encoding.len() != count as usize {
                return Err(damaged("count", count));
            }
            let namespace = ArchivedNamespace::Whole(Namespace::decode(encoding)?);
            return Ok(ArchiveItem::Namespace(namespace));
        }
        BODY_PAGES => return read_pages(reader.rest(), count).map(ArchiveItem::Pages),
        BODY_HEAD => ArchiveItem::Head(ArchiveHead {
            store: StoreId::from_bytes(reader.array()?),
            created_unix_s: reader.u64()?,
            pages: reader.u64()?,
            blocks: reader.u64()?,
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
    if surplus != 0 {
        let (_, known) = sizes(&item);
        let found = u64::from(known).saturating_add(surplus);
        return Err(Damage::Length { found });
    }
    if count != 0 {
        return Err(damaged("count", count));
    }
    Ok(item)
}

fn read_pages(body: &[u8], count: u32) -> Result<Vec<ArchivedPage>, Damage> {
    let (pages, rest) = body.as_chunks::<PAGE_BYTES>();
    // The body lies within one block, so the number of pages is bounded before anything is allocated for them.
    if pages.len() != count as usize || !rest.is_empty() {
        return Err(damaged("count", count));
    }
    pages.iter().map(read_page).collect()
}

fn read_page(bytes: &[u8; PAGE_BYTES]) -> Result<ArchivedPage, Damage> {
    let mut reader = Reader::new(bytes);
    let flags = reader.u8()?;
    reader.reserved(3)?;
    let depth = reader.u32()?;
    let key = PageKey::from_bytes(reader.array()?);
    let parent = KeyPrefix::from_bytes(reader.array()?);
    reader.reserved(4)?;
    let checksum = reader.u64()?;
    let has_parent = flags & FLAG_PARENT != 0;
    let no_parent = *parent.as_bytes() == [0; 12];
    if flags & !FLAG_PARENT != 0 || !(has_parent || no_parent) {
        return Err(Damage::Reserved);
    }
    Ok(ArchivedPage {
        key,
        parent: has_parent.then_some(parent),
        depth,
        checksum,
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

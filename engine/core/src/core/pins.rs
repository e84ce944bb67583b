//! Pins: pages that an operator or a caller wants kept until a time.
//!
//! A pin is a record of the log, like a deletion. It counts for the page that its key
//! has when it is set: a page that is put later under this key is not pinned. So a deletion, a
//! clear, damage and an age limit end it. Of several pins of a key the one with the highest version
//! counts, and a pin with an end that has passed takes the others back.
//!
//! Pinned pages and the minima of the quotas take at most half of the usable room. A store that
//! finds no room for copies evicts pinned pages too, and counts them.

use larder_format::{BLOCK_BYTES, Fingerprint, KeyPrefix, PageKey, Record};

use super::Core;
use super::base::Base;
use super::puts::Below;
use super::types::RequestId;
use crate::index::{Keep, NamespaceSlot};

/// Time between two looks for pins whose time has come.
const PINS_EVERY_MS: u64 = 1000;

/// The outcome of a pin for one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Kept {
    /// It is pinned; with time 0, it is not any more.
    Yes,
    /// It is not stored; with time 0, it is not pinned.
    Absent,
    /// Pins and minima may take no more room.
    Refused,
}

/// A pinned page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptPage {
    /// Its namespace.
    pub namespace: Fingerprint,
    /// The first 96 bits of its key.
    pub key: KeyPrefix,
    /// The end of its pin, in seconds since 1970.
    pub until_unix_s: u32,
    /// Its blocks.
    pub blocks: u32,
}

impl Base {
    /// Blocks that the minima of the quotas keep.
    fn minima(&self) -> u64 {
        let minima = self.quotas.iter().map(|quota| quota.min);
        let blocks = minima.map(|min| min.div_ceil(BLOCK_BYTES as u64));
        blocks.fold(0, u64::saturating_add)
    }

    /// Whether a page is pinned by this record.
    pub(super) fn is_pinned_by(&self, record: &Record) -> bool {
        let Record::Pin {
            namespace,
            key,
            birth,
            ..
        } = record
        else {
            return false;
        };
        let slot = self.namespaces.slot_of(namespace);
        let keep = slot.and_then(|slot| self.index.kept(slot, key.prefix()));
        keep.is_some_and(|keep| keep.birth == *birth)
    }

    /// The blocks that a stored page takes.
    fn blocks_of(&self, namespace: NamespaceSlot, key: &PageKey) -> Option<u32> {
        let found = self.index.locate(namespace, key)?;
        Some(self.namespaces.stored_blocks(namespace, found.place))
    }
}

fn keep(
    below: &mut Below<'_>,
    request: RequestId,
    namespace: NamespaceSlot,
    keys: &[PageKey],
    until_unix_s: u32,
) -> Vec<Kept> {
    if below.refuses_records(request) {
        return vec![Kept::Absent; keys.len()];
    }
    let base = &*below.base;
    let (_, mut kept) = base.index.kept_totals();
    let most = below.segments.usable_blocks().1 / 2;
    let most = most.saturating_sub(base.minima());
    let mut wanted = Vec::new();
    let mut judge = |key: &PageKey| {
        let is_kept = base.index.kept(namespace, key.prefix()).is_some();
        let stored = base.blocks_of(namespace, key);
        let Some(blocks) = stored.filter(|_| is_kept || until_unix_s > 0) else {
            return Kept::Absent;
        };
        let more = if is_kept { 0 } else { u64::from(blocks) };
        if more > 0 && kept + more > most {
            return Kept::Refused;
        }
        kept += more;
        wanted.push((*key, blocks));
        Kept::Yes
    };
    let outcomes: Vec<Kept> = keys.iter().map(&mut judge).collect();
    for (key, blocks, keep) in write(below, request, namespace, &wanted, until_unix_s) {
        let index = &below.base.index;
        match until_unix_s {
            0 => index.let_go(namespace, key.prefix()),
            _ => _ = index.keep_until(namespace, key.prefix(), blocks, keep),
        }
    }
    outcomes
}

/// Queues the pins of pages. Returns the pages whose pins found room.
fn write(
    below: &mut Below<'_>,
    request: RequestId,
    namespace: NamespaceSlot,
    pages: &[(PageKey, u32)],
    until_unix_s: u32,
) -> Vec<(PageKey, u32, Keep)> {
    let fingerprint = below.base.namespaces.get(namespace).fingerprint;
    let record = |(key, _): &(PageKey, u32)| {
        Some(Record::Pin {
            namespace: fingerprint,
            key: *key,
            birth: below.base.next_serial()?,
            until_unix_s,
        })
    };
    let records: Option<Vec<Record>> = pages.iter().map(record).collect();
    let births: Vec<_> = records.iter().flatten().map(Record::birth).collect();
    let placed = below.write_records(request, records);
    let pages = pages.iter().zip(births).take(placed);
    let keep = |birth| Keep {
        until_unix_s,
        birth,
    };
    pages
        .map(|((key, blocks), birth)| (*key, *blocks, keep(birth)))
        .collect()
}

impl Core {
    fn below(&mut self) -> Below<'_> {
        let Core {
            base,
            segments,
            journal,
            durability,
            ..
        } = self;
        Below {
            base,
            segments,
            journal,
            durability,
        }
    }

    /// Ends the pins whose time has come. Looks once a second.
    pub(super) fn end_pins(&mut self) {
        let base = &mut self.base;
        if base.now_ms >= base.pins_due_ms {
            base.pins_due_ms = base.now_ms.saturating_add(PINS_EVERY_MS);
            base.index.end_keeping(base.unix_ms() / 1000);
        }
    }

    /// Pins pages until a time, in place of former pins; 0 takes them back. It counts at once, and
    /// is written when `request` is finished. Without room for the records of some pages the
    /// request fails, and these pages stay as they are.
    pub fn keep(
        &mut self,
        request: RequestId,
        namespace: NamespaceSlot,
        keys: &[PageKey],
        until_unix_s: u32,
    ) -> Vec<Kept> {
        let outcomes = keep(&mut self.below(), request, namespace, keys, until_unix_s);
        self.run();
        outcomes
    }

    /// Pinned pages and their blocks.
    #[must_use]
    pub fn kept_totals(&self) -> (u64, u64) {
        self.base.index.kept_totals()
    }

    /// Some pinned pages behind the first `from`, in the order of their ends.
    #[must_use]
    pub fn kept_pages(&self, from: usize, most: usize) -> Vec<KeptPage> {
        let pages = self.base.index.kept_pages(from, most).into_iter();
        let view = |(namespace, key, blocks, keep): (NamespaceSlot, _, _, Keep)| KeptPage {
            namespace: self.base.namespaces.get(namespace).fingerprint,
            key,
            until_unix_s: keep.until_unix_s,
            blocks,
        };
        pages.map(view).collect()
    }
}

//! The books of a store in this process: see [`Inventory`].

use larder_base::ids::NamespaceId;
use larder_core::core::{Descriptors, Evictions, Kept, KeptPage as Pinned, NamespaceUse, Victim};
use larder_core::index::Leased;
use larder_format::{BLOCK_BYTES, Namespace, PageKey};

use super::LocalStore;
use super::local::Local;
use crate::catalog::Catalog;
use crate::error::StoreError;
use crate::inventory::{Cursor, Inventory, KeptPage, Listing, PAGES_MAX, Usage};
use crate::recovery::scan::{Spot, read_descriptors};

/// Most segments that one call of a list reads: about a second on a slow disk.
const SEGMENTS_AT_ONCE: u32 = 64;

impl Local {
    /// Reads the descriptors of a segment's present generation.
    fn descriptors(&self, victim: &Victim) -> Descriptors {
        let spot: Spot = self.spot(victim);
        read_descriptors(self.disk.as_ref(), &spot, victim)
    }
}

impl Inventory for Local {
    fn lease(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<Leased> {
        let Some(shape) = self.shape(namespace) else {
            return vec![Leased::Absent; keys.len()];
        };
        let blocks = shape.shape.page_blocks();
        let leased = self.index.lease(namespace.into(), keys, blocks);
        if leased.contains(&Leased::Refused) {
            self.note_refused_lease();
        }
        leased
    }

    fn unlease(&self, namespace: NamespaceId, keys: &[PageKey]) {
        self.index.unlease(namespace.into(), keys);
    }

    fn keep(
        &self,
        namespace: NamespaceId,
        keys: &[PageKey],
        until_unix_s: u32,
    ) -> Result<Vec<Kept>, StoreError> {
        self.pin_pages(namespace, keys, until_unix_s)
    }

    fn kept(&self, from: u32) -> Result<Vec<KeptPage>, StoreError> {
        let pages = self.with_core(|core| core.kept_pages(from as usize, PAGES_MAX));
        let view = |page: Pinned| KeptPage {
            namespace: page.namespace,
            key: page.key,
            until_unix_s: page.until_unix_s,
            bytes: u64::from(page.blocks) * BLOCK_BYTES as u64,
        };
        Ok(pages.into_iter().map(view).collect())
    }

    fn list(&self, namespace: NamespaceId, cursor: Cursor) -> Result<Listing, StoreError> {
        if self.shape(namespace).is_none() {
            return Err(StoreError::UnknownNamespace);
        }
        let (mut segment, mut seen) = split(cursor);
        let mut keys = Vec::new();
        for _ in 0..SEGMENTS_AT_ONCE {
            let Some(victim) = self.with_core(|core| core.books().segment_with_pages(segment))
            else {
                return Ok(Listing { keys, next: None });
            };
            let read = self.descriptors(&victim);
            if read.some_unreadable {
                return Err(StoreError::WriteFailed(
                    "some descriptors cannot be read: look at the disk".to_owned(),
                ));
            }
            if victim.segment.0 != segment {
                seen = 0;
            }
            let room = PAGES_MAX - keys.len();
            let found = self.with_core_by_turns(|core| {
                core.books()
                    .pages_in(namespace.into(), &victim, &read.blocks, seen as usize, room)
            });
            keys.extend(found.keys);
            if let Some(next) = found.next {
                let next = Some(join(
                    victim.segment.0,
                    u32::try_from(next).unwrap_or(u32::MAX),
                ));
                return Ok(Listing { keys, next });
            }
            (segment, seen) = (victim.segment.0 + 1, 0);
        }
        let next = Some(join(segment, 0));
        Ok(Listing { keys, next })
    }

    fn evictions(&self, since: u64) -> Result<Evictions, StoreError> {
        let unread = self.with_core(|core| core.books().unread_evictions(since, PAGES_MAX));
        for victim in &unread {
            let read = self.descriptors(victim);
            self.with_core_by_turns(|core| core.books().evictions_read(victim, &read.blocks));
        }
        Ok(self.with_core(|core| core.books().evictions(since, PAGES_MAX)))
    }

    fn usage(&self) -> Result<Vec<Usage>, StoreError> {
        let usage = |row: NamespaceUse| Usage {
            namespace: row.namespace,
            pages: row.pages,
            bytes: row.stored * BLOCK_BYTES as u64,
            plain_bytes: row.blocks * BLOCK_BYTES as u64,
        };
        let rows = self.with_core(|core| core.books().usage());
        Ok(rows.into_iter().map(usage).collect())
    }

    fn records(&self) -> Result<Vec<Namespace>, StoreError> {
        Ok(self.with_core(|core| core.books().records()))
    }
}

/// Segment and records seen in it.
fn split(Cursor(cursor): Cursor) -> (u32, u32) {
    (
        u32::try_from(cursor >> 32).unwrap_or(u32::MAX),
        cursor as u32,
    )
}

fn join(segment: u32, seen: u32) -> Cursor {
    Cursor(u64::from(segment) << 32 | u64::from(seen))
}

impl Inventory for LocalStore {
    fn lease(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<Leased> {
        let Some(_gate) = self.enter() else {
            return vec![Leased::Absent; keys.len()];
        };
        self.leases.lease(&*self.local, namespace, keys)
    }

    fn unlease(&self, namespace: NamespaceId, keys: &[PageKey]) {
        if let Some(_gate) = self.enter() {
            self.leases.unlease(&*self.local, namespace, keys);
        }
    }

    fn keep(
        &self,
        namespace: NamespaceId,
        keys: &[PageKey],
        until_unix_s: u32,
    ) -> Result<Vec<Kept>, StoreError> {
        let _gate = self.enter_to_write()?;
        self.local.keep(namespace, keys, until_unix_s)
    }

    fn kept(&self, from: u32) -> Result<Vec<KeptPage>, StoreError> {
        let _gate = self.enter().ok_or_else(|| self.refusal())?;
        self.local.kept(from)
    }

    fn list(&self, namespace: NamespaceId, cursor: Cursor) -> Result<Listing, StoreError> {
        let _gate = self.enter().ok_or_else(|| self.refusal())?;
        self.local.list(namespace, cursor)
    }

    fn evictions(&self, since: u64) -> Result<Evictions, StoreError> {
        let _gate = self.enter().ok_or_else(|| self.refusal())?;
        self.local.evictions(since)
    }

    fn usage(&self) -> Result<Vec<Usage>, StoreError> {
        let _gate = self.enter().ok_or_else(|| self.refusal())?;
        self.local.usage()
    }

    fn records(&self) -> Result<Vec<Namespace>, StoreError> {
        let _gate = self.enter().ok_or_else(|| self.refusal())?;
        self.local.records()
    }
}

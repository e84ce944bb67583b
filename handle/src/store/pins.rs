//! Leases and pins: pages of a namespace that stay until they are let go, or until a time.

use std::sync::atomic::{AtomicBool, Ordering};

use larder_engine::StoreError;
use larder_format::PageKey;
use larder_store::inventory::{Inventory, Kept, Leased};

use super::Space;
use crate::status::Status;

fn is_first(line: &AtomicBool) -> bool {
    !line.swap(true, Ordering::Relaxed)
}

impl Space {
    /// Takes counted leases: see [`Inventory::lease`].
    pub fn lease(&self, keys: &[PageKey]) -> Vec<u8> {
        let absent = self.absent();
        let code = |leased| match leased {
            Leased::Yes => Status::Ok as u8,
            Leased::Absent => absent as u8,
            Leased::Refused => Status::Refused as u8,
        };
        let leased = self.handle.store.lease(self.id, keys);
        let refused = leased
            .iter()
            .filter(|leased| **leased == Leased::Refused)
            .count();
        let counter = &self.handle.refused_leases;
        counter.fetch_add(refused as u64, Ordering::Relaxed);
        leased.into_iter().map(code).collect()
    }

    /// Returns counted leases.
    pub fn unlease(&self, keys: &[PageKey]) {
        self.handle.store.unlease(self.id, keys);
    }

    /// Pins pages until a time: see [`Inventory::keep`].
    ///
    /// # Errors
    /// As there.
    pub fn pin(&self, keys: &[PageKey], until_unix_s: u32) -> Result<Vec<u8>, StoreError> {
        let absent = self.absent();
        let code = |kept| match kept {
            Kept::Yes => Status::Ok as u8,
            Kept::Absent => absent as u8,
            Kept::Refused => Status::Refused as u8,
        };
        let kept = self.handle.store.keep(self.id, keys, until_unix_s)?;
        Ok(kept.into_iter().map(code).collect())
    }

    /// Pins the pages that a put has stored, by its statuses. A pin that is refused is logged, not
    /// reported: see [`Space::pin`].
    pub fn pin_stored(&self, keys: &[PageKey], statuses: &[u8], until_unix_s: u32) {
        let stored = [Status::Ok as u8, Status::Duplicate as u8];
        let keys = keys.iter().zip(statuses);
        let keys = keys.filter(|(_, status)| stored.contains(status));
        let keys: Vec<PageKey> = keys.map(|(key, _)| *key).collect();
        if !keys.is_empty() {
            self.pin_unreported(&keys, until_unix_s);
        }
    }

    /// Pins pages for a caller who waits for no answer.
    pub fn pin_unreported(&self, keys: &[PageKey], until_unix_s: u32) {
        let volume = self.handle.volume().display();
        let refused = Status::Refused as u8;
        let [on_refused, on_failed] = &self.handle.logged_pin_lines;
        match self.pin(keys, until_unix_s) {
            Ok(statuses) if !statuses.contains(&refused) => {}
            Ok(_) if is_first(on_refused) => tracing::warn!(
                "{volume}: pages are not pinned: pinned pages and the minima of quotas take half \
                 of the store (logged once)"
            ),
            Ok(_) => {}
            Err(error) if is_first(on_failed) => {
                tracing::warn!("{volume}: pages are not pinned: {error} (logged once)");
            }
            Err(_) => {}
        }
    }

    /// Takes pins back. Returns how many pages were pinned.
    ///
    /// # Errors
    /// As for [`Inventory::keep`].
    pub fn unpin(&self, keys: &[PageKey]) -> Result<u64, StoreError> {
        let kept = self.handle.store.keep(self.id, keys, 0)?;
        Ok(kept.iter().filter(|kept| **kept == Kept::Yes).count() as u64)
    }
}

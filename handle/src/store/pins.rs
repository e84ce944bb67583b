//! Pins: the pages of a namespace that stay until a time.

use larder_engine::StoreError;
use larder_format::PageKey;
use larder_store::inventory::{Inventory, Kept};

use super::Space;
use crate::status::Status;

impl Space {
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

    /// Takes pins back. Returns how many pages were pinned.
    ///
    /// # Errors
    /// As for [`Inventory::keep`].
    pub fn unpin(&self, keys: &[PageKey]) -> Result<u64, StoreError> {
        let kept = self.handle.store.keep(self.id, keys, 0)?;
        Ok(kept.iter().filter(|kept| **kept == Kept::Yes).count() as u64)
    }
}

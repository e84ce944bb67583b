//! Calls for callers who keep books of their own about a store: leases with a count, lists of
//! pages, evictions, usage.
//!
//! Whole keys. The index knows 96 bits of a key. The keys in [`Inventory::list`] and
//! [`Inventory::evictions`] are read from the descriptors on disk, so both may wait for the device.
//! Not known: the key of an evicted page whose descriptor was lost before it was read
//! ([`Evictions::missed`]).

use larder_core::core::Evictions;
use std::cmp::Reverse;
use std::collections::BTreeMap;

use larder_base::ids::NamespaceId;
use larder_format::{Fingerprint, KeyPrefix, Namespace, PageKey};

use crate::error::StoreError;
pub use larder_core::core::Kept;
pub use larder_core::index::Leased;

/// Most pages of one answer.
pub const PAGES_MAX: usize = 4096;

/// See the module.
pub trait Inventory: Send + Sync {
    /// Takes a lease of each page that is stored: it is not evicted until the lease was returned as
    /// often as it was taken. All leased pages take at most a quarter of the store.
    ///
    /// A lease ends with its page, when that is deleted, cleared or found damaged; with the handle;
    /// and with the store's owner. A store that finds no room for copies evicts leased pages too.
    fn lease(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<Leased>;

    /// Returns leases. Keys without a lease of this handle are ignored.
    fn unlease(&self, namespace: NamespaceId, keys: &[PageKey]);

    /// Pins stored pages until a time, in seconds since 1970: eviction takes none of them before.
    /// It replaces their former pins, and 0 takes them back. Pins survive a restart and a crash;
    /// after a flush, a power loss too.
    /// They end with their page: a deletion, a clear, damage and an age limit come first. Pinned
    /// pages and the minima of quotas take at most half of the store: [`Kept::Refused`] beyond it.
    /// A store that finds no room for copies evicts pinned pages too.
    ///
    /// # Errors
    /// There is no owner, or the pins could not be recorded.
    fn keep(
        &self,
        namespace: NamespaceId,
        keys: &[PageKey],
        until_unix_s: u32,
    ) -> Result<Vec<Kept>, StoreError>;

    /// Pinned pages behind the first `from`, in the order of their ends: some, and none only behind
    /// the last.
    ///
    /// # Errors
    /// There is no owner.
    fn kept(&self, from: u32) -> Result<Vec<KeptPage>, StoreError>;

    /// Some pages of a namespace, in no particular order. A page that is stored, evicted or moved
    /// between two calls may be listed, or listed twice, or not.
    ///
    /// # Errors
    /// There is no owner, or a descriptor cannot be read.
    fn list(&self, namespace: NamespaceId, cursor: Cursor) -> Result<Listing, StoreError>;

    /// The pages that the store evicted or dropped as damaged since number `since`; zero begins.
    /// Deletions by callers are not among them. Nothing is recorded before the first call.
    ///
    /// # Errors
    /// There is no owner.
    fn evictions(&self, since: u64) -> Result<Evictions, StoreError>;

    /// The pages of each namespace that has some.
    ///
    /// # Errors
    /// There is no owner.
    fn usage(&self) -> Result<Vec<Usage>, StoreError>;

    /// The namespaces whose records are known, with pages or without. Beyond ten thousand some may
    /// be missing.
    ///
    /// # Errors
    /// There is no owner, or it is of a release that does not tell.
    fn records(&self) -> Result<Vec<Namespace>, StoreError>;
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
    /// Its bytes, as stored.
    pub bytes: u64,
}

/// A namespace with pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Space {
    /// Its pages.
    pub usage: Usage,
    /// Its record; `None` if it is lost.
    pub namespace: Option<Namespace>,
}

/// The namespaces with pages, those with the most bytes first.
///
/// # Errors
/// Those of [`Inventory::usage`] and [`Inventory::records`].
pub fn spaces(books: &(impl Inventory + ?Sized)) -> Result<Vec<Space>, StoreError> {
    let records = books.records()?;
    let mut records: BTreeMap<Fingerprint, Namespace> = records
        .into_iter()
        .map(|record| (record.fingerprint(), record))
        .collect();
    let mut usage = books.usage()?;
    usage.sort_by_key(|usage| (Reverse(usage.bytes), usage.namespace));
    let space = |usage: Usage| Space {
        usage,
        namespace: records.remove(&usage.namespace),
    };
    Ok(usage.into_iter().map(space).collect())
}

/// Where a list goes on. The default begins it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor(pub u64);

/// Some pages of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// Their keys.
    pub keys: Vec<PageKey>,
    /// Where the list goes on; `None` at its end. There may be more pages when `keys` is empty.
    pub next: Option<Cursor>,
}

/// The pages of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The namespace.
    pub namespace: Fingerprint,
    /// Its pages.
    pub pages: u64,
    /// Their bytes on the device.
    pub bytes: u64,
    /// Their bytes as plain pages: more, if a codec made some smaller.
    pub plain_bytes: u64,
}

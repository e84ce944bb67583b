//! L3: the tier below host memory.
//!
//! A module imports only the modules below it.
//!
//! | module | contents |
//! |---|---|
//! | `heads` | the page store, with a namespace for each group of heads |
//! | `store` | the page store of `larder-engine` |
//! | `files` | a directory with one file per page, for comparison |
//!
//! A backend is called from several threads, with keys of one namespace only. It never returns an
//! error: a page that it cannot read is a miss, and a page that it cannot write is not stored. It
//! transfers bytes directly from and to the caller's pages.

mod files;
mod heads;
mod store;

use larder_engine::{Count, GetPage, PutPage};
use larder_format::{Namespace, PageKey};

pub use files::{FilesError, FilesL3};
pub use heads::HeadsL3;
pub use store::StoreL3;

/// See the module documentation. The keys of a call are consecutive in their chain. Each call
/// returns: the end of a cache waits for the calls in progress, and leaks the memory lent to a call
/// that does not return in time.
pub trait L3: Send + Sync {
    /// The namespace of its pages. A cache checks that it describes the pages of its pools: see
    /// [`Model::namespace`](crate::Model::namespace). `None`: pages of any shape.
    fn namespace(&self) -> Option<&Namespace> {
        None
    }

    /// Number of these pages that L3 has, counted from the first.
    fn longest_prefix(&self, keys: &[PageKey]) -> usize;

    /// For each of these pages whether L3 has it. They need not be consecutive.
    fn contains(&self, keys: &[PageKey]) -> Vec<bool> {
        let has = |key: &PageKey| self.longest_prefix(std::slice::from_ref(key)) == 1;
        keys.iter().map(has).collect()
    }

    /// Reads pages. Returns how many, counted from the first, are whole. The bytes of the others
    /// are unspecified.
    fn get(&self, pages: &mut [GetPage<'_, '_>]) -> usize;

    /// Writes pages. Returns how many, counted from the first, L3 then has. It no longer uses their
    /// bytes after the return.
    fn put(&self, pages: &[PutPage<'_>]) -> usize;

    /// Reports that these pages were used in an upper tier.
    fn touch(&self, keys: &[PageKey]);

    /// Counts for a request. An L3 without counters ignores it.
    fn count(&self, _count: Count) {}
}

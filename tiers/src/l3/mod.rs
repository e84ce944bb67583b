//! L3: whatever keeps pages below the host tier.
//!
//! | module | what it is |
//! |---|---|
//! | `store` | the page store of `larder-engine` |
//! | `files` | a directory with a file a page, for comparison |
//!
//! A backend is called from several threads, only with keys of one namespace, and never answers with an error: what it cannot
//! give is a miss, what it cannot take is not stored. The bytes that it moves are the caller's pages themselves.

mod files;
mod store;

use larder_engine::{GetPage, PutPage};
use larder_format::PageKey;

pub use files::{FilesError, FilesL3};
pub use store::StoreL3;

/// See the module. Keys of one call follow one another in their chain.
pub trait L3: Send + Sync {
    /// How many of these it has, counted from the first.
    fn longest_prefix(&self, keys: &[PageKey]) -> usize;

    /// Reads pages; how many, counted from the first, are whole. The bytes of the others are unspecified.
    fn get(&self, pages: &mut [GetPage<'_, '_>]) -> usize;

    /// Takes pages; how many, counted from the first, it has now. It is done with their bytes when this returns.
    fn put(&self, pages: &[PutPage<'_>]) -> usize;

    /// Hears that these were of use in a tier above.
    fn touch(&self, keys: &[PageKey]);
}

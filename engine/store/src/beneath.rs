//! The seam for a place beneath the store: beyond the node, with pages that the store lacks.
//!
//! In the owner's process the store reports the puts and lookups of all processes to it
//! ([`Beneath`]). The place brings pages by ordinary puts. So its pages are verified, admitted and
//! evicted like all others, and this crate knows no network.
//!
//! A lookup may count pages that are on their way. A read that misses some of them waits for their
//! arrival until its deadline ([`Beneath::wait`]), and then reads them like others.

use std::collections::BTreeMap;
use std::fmt;

use larder_base::runtime::Instant;
use larder_format::{Fingerprint, Namespace, PageKey};
use serde::{Deserialize, Serialize};

use larder_core::grants::Ask;

/// A place beneath the store.
///
/// All calls but [`wait`](Beneath::wait) and [`ended`](Beneath::ended) come on the threads of puts
/// and lookups, under no lock of the store, and must be short. None may call the store.
pub trait Beneath: fmt::Debug + Send + Sync {
    /// Whether it keeps pages and their names encrypted. Nothing else lies beneath an encrypted
    /// store.
    fn encrypts(&self) -> bool {
        false
    }

    /// The store is open in this process, which owns it.
    fn began(&self);

    /// The use of the store in this process is over: it is closed, given up or dropped. No other
    /// process owns it before this returns; this one may own it again ([`began`](Beneath::began)).
    fn ended(&self) {}

    /// A caller uses this namespace. Comes before all other calls for it, and may come again.
    fn opened(&self, namespace: &Namespace);

    /// A put asks the store to take these pages. It may refuse them.
    fn asked(&self, namespace: Fingerprint, pages: &[Ask]);

    /// A lookup found these pages, or a caller touched them.
    fn used(&self, namespace: Fingerprint, keys: &[PageKey]);

    /// Of these consecutive pages of a chain a lookup found the first `found`. Returns the number
    /// of the others, without a gap, that will be stored in time for a read.
    fn missed(&self, namespace: Fingerprint, keys: &[PageKey], found: usize) -> usize;

    /// Waits until none of these pages is on its way any more, at most until `until`.
    fn wait(&self, namespace: Fingerprint, keys: &[PageKey], until: Instant);

    /// Ends or resumes its work, as an operator decides. Without its work it has no pages.
    fn use_it(&self, is_used: bool);

    /// Its state and its counters.
    fn report(&self) -> BeneathReport;
}

/// State and counters of a place beneath a store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BeneathReport {
    /// Its name.
    pub place: String,
    /// Its state in a sentence.
    pub state: String,
    /// Whether it does its work now.
    pub works: bool,
    /// Counters since the owner opened the store.
    pub counts: BTreeMap<String, u64>,
}

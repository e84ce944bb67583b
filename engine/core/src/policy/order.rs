//! The seam for an order of eviction that learns: the calls beside those of an [`EvictionPolicy`],
//! from one open of a store to the next.

use std::sync::Arc;

use larder_base::ids::NamespaceId;
use larder_format::KeyPrefix;

use super::{
    Departure, EvictionPolicy, PageFacts, PageNumber, PolicyMaker, ReclaimLines, Use, Worth,
};

/// See the module.
pub trait EvictionOrder: EvictionPolicy {
    /// A store of so many segments is opened. Comes first. For a reason against its order the store
    /// follows LRU until it is closed, without the policy.
    fn opened(&mut self, segments: usize) -> Option<String> {
        let _ = segments;
        None
    }

    /// It decides for no store, and serves an estimate: it logs nothing. Comes first of all.
    fn estimates(&mut self) {}

    /// Pages of these names may arrive next: a policy that remembers names can fetch its memory of
    /// them, so that no page waits for another page's cache miss.
    fn fetch(&self, names: &mut dyn Iterator<Item = (NamespaceId, KeyPrefix)>) {
        let _ = names;
    }

    /// These stored pages were used, and [`EvictionPolicy::used`] comes next for each: it can fetch
    /// its facts of them.
    fn fetch_used(&self, pages: &[PageNumber]) {
        let _ = pages;
    }

    /// A page that arrived before its parent is linked to it: `facts.parent` names it from now on.
    fn linked(&mut self, page: PageNumber, facts: &PageFacts) {
        let _ = (page, facts);
    }

    /// A stored child of a page, if it knows one. Reclaim evicts a page that is not worth a copy
    /// with the chain below it, as far as the policy names that chain. By default it names none,
    /// and a page with children is copied.
    fn child(&self, page: PageNumber) -> Option<PageNumber> {
        let _ = page;
        None
    }

    /// Whether [`EvictionPolicy::used`] is called for lookups ([`Use::Lookup`]). Asked once, first.
    fn sees_lookups(&self) -> bool {
        true
    }

    /// The bytes of pages that puts and reclaim have written since the store was opened. Comes
    /// before `lines`.
    fn written(&mut self, put: u64, copied: u64) {
        let _ = (put, copied);
    }

    /// What it has learned, for [`EvictionOrder::recall`] after the next open of a store that is a
    /// file: at most 1 MiB, in a form of its own. Empty: nothing.
    fn lessons(&self) -> Vec<u8> {
        Vec::new()
    }

    /// What it knows of a stored page, for the same recall: a word in a form of its own, in which
    /// it finds the page by its key. Comes before `lessons`. `None`: nothing.
    fn note(&self, page: PageNumber, key: KeyPrefix) -> Option<u128> {
        let _ = (page, key);
        None
    }

    /// The lessons of this store's last open, empty if there are none, and its notes in the order
    /// of their numbers. They may be those of another policy or release, and the pages of notes may
    /// have left: it ignores what it cannot use. Comes after `opened`.
    fn recall(&mut self, lessons: &[u8], notes: Vec<u128>) {
        let _ = (lessons, notes);
    }

    /// All pages that the open recovered have arrived.
    fn loaded(&mut self) {}

    /// The order that it follows, for people: in a word, and where there is a reason as
    /// `order: reason`.
    fn order(&self) -> String {
        "custom".to_owned()
    }

    /// How often it has changed its order, and with it the scale of worths. Reclaim compares only
    /// worths of one scale.
    fn scale(&self) -> u64 {
        0
    }
}

/// A policy without these calls.
#[derive(Debug)]
pub(super) struct Plain<P>(pub(super) P);

impl<P: EvictionPolicy> EvictionOrder for Plain<P> {}

impl<P: EvictionPolicy> EvictionPolicy for Plain<P> {
    fn arrived(&mut self, page: PageNumber, facts: &PageFacts) {
        self.0.arrived(page, facts);
    }

    fn used(&mut self, page: PageNumber, facts: &PageFacts, by: Use) {
        self.0.used(page, facts, by);
    }

    fn left(&mut self, page: PageNumber, facts: &PageFacts, why: Departure) {
        self.0.left(page, facts, why);
    }

    fn file(&mut self, page: PageNumber, facts: &PageFacts) {
        self.0.file(page, facts);
    }

    fn coldest(
        &mut self,
        facts: &mut dyn FnMut(PageNumber) -> Option<PageFacts>,
    ) -> Option<PageNumber> {
        self.0.coldest(facts)
    }

    fn worth(&self, page: PageNumber, facts: &PageFacts) -> Worth {
        self.0.worth(page, facts)
    }

    fn lines(&self) -> ReclaimLines {
        self.0.lines()
    }

    fn ram_bytes(&self) -> usize {
        self.0.ram_bytes()
    }
}

/// Makes an order of eviction for the option `eviction` of an open.
pub fn maker<O: EvictionOrder + 'static>(
    make: impl Fn() -> O + Send + Sync + 'static,
) -> PolicyMaker<dyn EvictionOrder> {
    PolicyMaker(Arc::new(move || Box::new(make())))
}

//! The seams for policies: which pages a store takes, which it evicts first, and which it copies
//! when it reclaims a segment. The engine documents them, in its module `policy`.

pub mod miniature;
pub mod order;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use larder_base::ids::NamespaceId;
use larder_format::{KeyPrefix, PageKey};

use crate::hint::Hint;
use order::{EvictionOrder, Plain};

/// Names a stored page until it leaves. Numbers are small and are used again: a policy may keep its
/// own facts of a page in an array, by the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageNumber(pub u32);

/// How much a page is worth keeping: of two pages the one with the lower worth goes first. The
/// scale is the policy's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Worth(pub u32);

/// The facts that the store knows of a page.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct PageFacts {
    /// Its namespace.
    pub namespace: NamespaceId,
    /// The first 96 bits of its key.
    pub key: KeyPrefix,
    /// Number of pages before it in its chain, as its writer gave it.
    pub depth: u32,
    /// Its stored children.
    pub children: u32,
    /// How often it was read, touched or put again since it was stored; 255 stands for more.
    pub hits: u32,
    /// Calls that used any page since a call used this one.
    pub idle_calls: u32,
    /// Time since a call used it, to about a second while lookups or puts go on. Above 18 hours it
    /// may be less than that time.
    pub idle: Duration,
    /// The last hint that a put or a touch gave.
    pub hint: Hint,
    /// Its bytes on the device.
    pub bytes: u64,
    /// Its parent in the chain, if that is stored and linked.
    pub parent: Option<PageNumber>,
    /// Pages that the reported put or touch asked for and that were not stored;
    /// `None` in other calls.
    pub new_pages: Option<u32>,
    /// Time since a fixed moment, as far as calls told it.
    pub now: Duration,
}

/// A call that uses pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Use {
    /// A lookup found it.
    Lookup,
    /// It is read.
    Read,
    /// A caller touched it, or puts it again, or puts pages of its chain.
    Touch,
}

/// Why a page leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Departure {
    /// For room, or instead of being copied.
    Evicted,
    /// Deleted, cleared or damaged.
    Removed,
}

/// The worths between which reclaim decides for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReclaimLines {
    /// A leaf of at most this worth is evicted rather than copied, and so is a page with the chain
    /// below it. `None`: no page is evicted for its worth alone.
    pub drop_up_to: Option<Worth>,
    /// A page of at least this worth is copied, even if the live pages of its segment fill more
    /// than half of it. Below this line leaves of such a segment are evicted, the least worth
    /// first, until the rest fits half. A low line costs writes: reclaim copies more to gain the
    /// same room.
    pub keep_from: Worth,
}

impl ReclaimLines {
    /// Both lines.
    #[must_use]
    pub const fn new(drop_up_to: Option<Worth>, keep_from: Worth) -> ReclaimLines {
        ReclaimLines {
            drop_up_to,
            keep_from,
        }
    }
}

/// Decides which page leaves next, and which pages reclaim copies. See the [module](self).
pub trait EvictionPolicy: fmt::Debug + Send + Sync {
    /// A page is stored, by a put or by the recovery of an open (the oldest first, with the facts
    /// that the disk has).
    fn arrived(&mut self, page: PageNumber, facts: &PageFacts) {
        let _ = (page, facts);
    }

    /// A call used a page. The facts are those after the call.
    fn used(&mut self, page: PageNumber, facts: &PageFacts, by: Use) {
        let _ = (page, facts, by);
    }

    /// A page left, whether it was a leaf or not: the policy drops all its facts. Its number names
    /// another page from now on.
    fn left(&mut self, page: PageNumber, facts: &PageFacts, why: Departure) {
        let _ = (page, facts, why);
    }

    /// Takes in a leaf that it does not hold.
    fn file(&mut self, page: PageNumber, facts: &PageFacts);

    /// Returns the leaf that goes next, and takes it out of the leaves that it holds; `None` when
    /// it holds none. It keeps other facts of the page until `left`: a page that cannot go at the
    /// moment, for a lease, is filed again.
    ///
    /// Pages that it holds may have been used since they were filed. `facts` returns the present
    /// facts of such a page, or `None` if it is no leaf any more: the policy takes it out of its
    /// leaves then. It is filed again if it becomes one.
    fn coldest(
        &mut self,
        facts: &mut dyn FnMut(PageNumber) -> Option<PageFacts>,
    ) -> Option<PageNumber>;

    /// How much a page is worth, leaf or not. It should order pages as `coldest` does. Reclaim asks
    /// for each page of a segment that it empties. A page whose worth rises meanwhile is compared
    /// again.
    fn worth(&self, page: PageNumber, facts: &PageFacts) -> Worth;

    /// The lines of reclaim at this moment.
    ///
    /// By default no page is protected: if the live pages of a segment fill more than half of it,
    /// its leaves are evicted down to half, also leaves that are worth more than those of other
    /// segments. Pages of high worth gather in few segments, because reclaim copies them together.
    /// So a policy that protects pages has to state `keep_from`.
    fn lines(&self) -> ReclaimLines {
        ReclaimLines::new(None, Worth(u32::MAX))
    }

    /// Bytes allocated.
    fn ram_bytes(&self) -> usize {
        0
    }
}

/// A page that a put asks the store to take.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Candidate {
    /// Its namespace.
    pub namespace: NamespaceId,
    /// Its key.
    pub key: PageKey,
    /// Number of pages before it in its chain.
    pub depth: u32,
    /// The hint of the put.
    pub hint: Hint,
    /// Bytes that it will take on the device.
    pub bytes: u64,
    /// Bytes that pages take of the store, and the most they may take.
    pub taken_bytes: u64,
    /// See `taken_bytes`.
    pub usable_bytes: u64,
    /// Time since the store was opened.
    pub now: Duration,
}

/// Decides which pages are stored.
pub trait AdmissionPolicy: fmt::Debug + Send + Sync {
    /// Whether to store a page that is not stored. If not, it and all pages behind it in the put
    /// are refused, so that no page is stored without its parent. It is asked again for a page that
    /// it admitted and that then found no room.
    fn admits(&mut self, page: &Candidate) -> bool;
}

/// Makes the policy of a store: once for each open, and at each change of a shared store's owner.
pub struct PolicyMaker<P: ?Sized>(Arc<dyn Fn() -> Box<P> + Send + Sync>);

impl PolicyMaker<dyn EvictionOrder> {
    /// For the option `eviction` of an open.
    pub fn eviction<P: EvictionPolicy + 'static>(
        make: impl Fn() -> P + Send + Sync + 'static,
    ) -> Self {
        order::maker(move || Plain(make()))
    }
}

impl PolicyMaker<dyn AdmissionPolicy> {
    /// For the option `admission` of an open.
    pub fn admission<P: AdmissionPolicy + 'static>(
        make: impl Fn() -> P + Send + Sync + 'static,
    ) -> Self {
        PolicyMaker(Arc::new(move || Box::new(make())))
    }
}

/// A new policy.
#[must_use]
pub fn make<P: ?Sized>(maker: &PolicyMaker<P>) -> Box<P> {
    (maker.0)()
}

impl<P: ?Sized> Clone for PolicyMaker<P> {
    fn clone(&self) -> Self {
        PolicyMaker(self.0.clone())
    }
}

impl<P: ?Sized> fmt::Debug for PolicyMaker<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PolicyMaker")
    }
}

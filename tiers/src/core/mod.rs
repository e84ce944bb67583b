//! The core decides: what is matched, inserted, evicted, copied, read and written. It does no I/O and reads no clock.
//!
//! ```text
//!   requests                    +------+   orders: back up, load, put, exists, get
//!   match, start, load back --> | core | ------------------------------------------> device, L3
//!   extend, insert, finish      |      | <------------------------------------------
//!   prefetch, poll              +------+   completions
//! ```
//!
//! Calls come from one thread, the scheduler's; a completion is looked at when the scheduler hands it over, and only then do
//! the locks of its transfer go. What a transfer reads or writes is held from its order to its completion, so that no page is
//! given out while a copy touches it.
//!
//! Fences: the forward passes are numbered in the order in which they are inserted. A load, which
//! overwrites L1, comes after the newest one. A backup is ordered when the forwards of its pages
//! have ended well.
//!
//! Invariant ([`Core::validate`]): every page of a pool that is not free has exactly one owner: the
//! tree, a request, a transfer, a prefetch, or a loss (pages of a failed load or forward that
//! requests still hold).
//!
//! | module | what it is |
//! |---|---|
//! | `request` | a request's way: start, load back, extend, insert, finish |
//! | `forward` | inserts whose forward has not ended; failed forwards |
//! | `room` | making room in L1 and L2 |
//! | `transfer` | backups, loads, puts, and what their completions change |
//! | `prefetch` | L3 to L2 |
//! | `report` | counters and events |
//! | `audit` | the invariant, checked |

mod audit;
mod forward;
mod prefetch;
mod report;
mod request;
mod room;
mod transfer;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZeroU32;

use larder_format::PageKey;

use crate::config::{Config, ConfigError, WritePolicy};
use crate::pool::{PagePool, Row};
use crate::prompt::{Prompt, Scope, Vocabulary, VocabularyFull};
use crate::runs::{L1, L2, Runs, Tier};
use crate::tree::{LoadId, Matched, Tree, TreeCounts};

pub use audit::Leak;
pub use forward::Broken;
pub use prefetch::{Declined, PrefetchId, PrefetchState, Retries};
pub use report::{Declines, Event, Stats, TierName};
pub use request::{ExtendError, InsertEnd, LoadBack, NoRoom, Request, RequestId};
pub use room::Evicted;

/// Number of a forward pass, in the order in which they are inserted. 0 is before the first: there
/// is nothing to wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fence(pub u64);

/// Number of a transfer under way. Loads are [`LoadId`]s of the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub u32);

impl From<LoadId> for OpId {
    fn from(load: LoadId) -> OpId {
        OpId(load.0)
    }
}

/// Something to be done outside. Each is answered by one [`Done`] of its number, in any order, [`Order::Touch`] aside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Copy L1 to L2, all layers.
    BackUp {
        /// Its number.
        id: OpId,
        /// From.
        l1: Runs<L1>,
        /// To.
        l2: Runs<L2>,
    },
    /// Copy L2 to L1, layer by layer.
    Load {
        /// Its number.
        id: OpId,
        /// From.
        l2: Runs<L2>,
        /// To.
        l1: Runs<L1>,
        /// Not before all forwards up to this one have ended, well or not.
        after: Fence,
    },
    /// Write pages of L2 to L3.
    Put {
        /// Its number.
        id: OpId,
        /// Their keys, one after the other in their chain.
        keys: Vec<PageKey>,
        /// The key before the first.
        parent: Option<PageKey>,
        /// Pages before the first.
        depth: usize,
        /// Where they lie.
        l2: Runs<L2>,
        /// Whether another rank writes them: then nothing is to be done, and all are stored.
        is_skipped: bool,
    },
    /// Ask L3 how many of these it has, counted from the first.
    Exists {
        /// Its number.
        id: OpId,
        /// One after the other in their chain.
        keys: Vec<PageKey>,
    },
    /// Read pages of L3 into L2.
    Get {
        /// Its number.
        id: OpId,
        /// One after the other in their chain.
        keys: Vec<PageKey>,
        /// Where they go.
        l2: Runs<L2>,
    },
    /// Tell L3 that these were of use. Not answered.
    Touch {
        /// Which.
        keys: Vec<PageKey>,
    },
}

/// What became of an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Of a backup or a load: whether everything was copied.
    Copied(bool),
    /// Of a put, exists or get: how many pages, counted from the first.
    Pages(usize),
}

/// An order that has come to its end: nothing outside touches its pages any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Which.
    pub id: OpId,
    /// What became of it.
    pub outcome: Outcome,
}

/// A completion that answers no order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DoneError {
    /// No such order is out.
    #[error("no order {} is out: it was answered twice, or never given", .0.0)]
    Unknown(OpId),
    /// The answer is of another kind than the order.
    #[error("order {} was answered by {found:?}, which is no answer to it", .id.0)]
    WrongKind {
        /// Which order.
        id: OpId,
        /// The answer.
        found: Outcome,
    },
}

/// Something still uses the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the cache is in use: {locks} locks are out and {orders} orders under way; finish the requests and poll until idle"
)]
pub struct Busy {
    /// Locks out.
    pub locks: u32,
    /// Orders under way, and inserts whose forwards have not ended.
    pub orders: usize,
}

/// See the module.
#[derive(Debug)]
pub struct Core {
    config: Config,
    page_tokens: NonZeroU32,
    tree: Tree,
    vocabulary: Vocabulary,
    l1: PagePool<L1>,
    l2: PagePool<L2>,
    flights: BTreeMap<OpId, transfer::Flight>,
    loads: usize,
    put_pages: usize,
    pending: Vec<forward::Pending>,
    /// Running requests whose forward has failed.
    broken: BTreeSet<RequestId>,
    prefetches: BTreeMap<PrefetchId, prefetch::Prefetch>,
    prefetch_pages: usize,
    read_speed: Option<prefetch::ReadSpeed>,
    /// Prefetches in a row that were not worth it.
    given_up: u32,
    next_id: u32,
    next_request: u64,
    orders: VecDeque<Order>,
    /// The newest forward, and the newest of those that have ended with all before them.
    newest: Fence,
    ended: Fence,
    stats: Stats,
    events: Vec<Event>,
}

impl Core {
    /// A core over empty pools.
    ///
    /// # Errors
    /// A field of the configuration makes no sense.
    pub fn new(config: Config) -> Result<Core, ConfigError> {
        config.check()?;
        let page_tokens = NonZeroU32::new(config.page_tokens).unwrap_or(NonZeroU32::MIN);
        let mut core = Core {
            page_tokens,
            tree: Tree::new(
                page_tokens
                    .try_into()
                    .unwrap_or(std::num::NonZero::<usize>::MIN),
                config.eviction,
                config.write_policy == WritePolicy::WriteBack,
            ),
            vocabulary: Vocabulary::new(config.wide_tokens_max),
            l1: PagePool::new(config.l1_pages),
            l2: PagePool::new(config.l2_pages),
            flights: BTreeMap::new(),
            loads: 0,
            put_pages: 0,
            pending: Vec::new(),
            broken: BTreeSet::new(),
            prefetches: BTreeMap::new(),
            prefetch_pages: 0,
            read_speed: None,
            given_up: 0,
            next_id: 0,
            next_request: 0,
            orders: VecDeque::new(),
            newest: Fence::default(),
            ended: Fence::default(),
            stats: Stats::default(),
            events: Vec::new(),
            config,
        };
        core.reserve();
        Ok(core)
    }

    /// Room for as many nodes as there can be, so that none moves while requests wait: a node has a page of its own in L1 or L2.
    fn reserve(&mut self) {
        let pages = self.config.l1_pages as usize + self.config.l2_pages as usize;
        self.tree.reserve(pages.min(NODES_RESERVED_MAX));
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// An empty prompt of this scope.
    #[must_use]
    pub fn prompt(&self, scope: &Scope) -> Prompt {
        let page_tokens = self.page_tokens.try_into();
        Prompt::new(
            scope,
            page_tokens.unwrap_or(std::num::NonZero::<usize>::MIN),
        )
    }

    /// Adds tokens to a prompt.
    ///
    /// # Errors
    /// The vocabulary is full; the prompt ends there.
    pub fn extend_prompt(
        &mut self,
        prompt: &mut Prompt,
        tokens: impl IntoIterator<Item = u64>,
    ) -> Result<(), VocabularyFull> {
        prompt.extend(&mut self.vocabulary, tokens)
    }

    /// Hashes the keys of a prompt's whole pages that have not been hashed before: what [`Core::insert`] and [`Core::prefetch`] do
    /// when they need them. For callers with time to spare earlier.
    pub fn hash_prompt(&self, prompt: &mut Prompt) {
        prompt.keys(&self.vocabulary, prompt.pages());
    }

    /// What is cached of a prompt. Holds nothing: it is true until the next call.
    pub fn match_prefix(&mut self, prompt: &Prompt) -> Matched {
        self.tree.match_prefix(prompt.root(), prompt.words())
    }

    /// How many pages of a prompt are in L1, and how many behind them in L2 alone. Changes nothing, not even what is used.
    #[must_use]
    pub fn peek(&self, prompt: &Prompt) -> (usize, usize) {
        self.tree.peek(prompt.root(), prompt.words())
    }

    /// The next thing to be done outside.
    pub fn next_order(&mut self) -> Option<Order> {
        self.orders.pop_front()
    }

    /// Orders that have not been answered.
    #[must_use]
    pub fn orders_out(&self) -> usize {
        self.flights.len() + self.prefetches.values().filter(|p| p.is_waiting()).count()
    }

    /// Has L3 told of pages that were of use in the tiers above.
    pub fn tell_warmth(&mut self) {
        let keys = self.tree.take_warm();
        if !keys.is_empty() {
            self.orders.push_back(Order::Touch { keys });
        }
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Events since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Sizes of the tree.
    #[must_use]
    pub fn counts(&self) -> TreeCounts {
        self.tree.counts()
    }

    /// Pages that can be had: in L1, in L2.
    #[must_use]
    pub fn free_pages(&self) -> (u32, u32) {
        (self.l1.free_pages(), self.l2.free_pages())
    }

    /// Pages of L1 that are free or can be made so.
    #[must_use]
    pub fn available_pages(&self) -> usize {
        let counts = self.tree.counts();
        self.l1.free_pages() as usize + counts.l1_pages - counts.l1_locked_pages
    }

    /// A digest of the tree; equal on ranks that agree.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.tree.digest()
    }

    /// Bytes of the tree, tokens aside.
    #[must_use]
    pub fn tree_bytes(&self) -> usize {
        self.tree.ram_bytes()
    }

    /// Forgets everything cached. Prompts stay valid.
    ///
    /// # Errors
    /// Something still uses it: then nothing changes.
    pub fn reset(&mut self) -> Result<(), Busy> {
        let (l1, l2) = self.tree.locks_out();
        let (locks, orders) = (l1 + l2, self.orders_out() + self.pending.len());
        if locks > 0 || orders > 0 {
            return Err(Busy { locks, orders });
        }
        while let Some((node, in_l2)) = self.tree.next_of_l1(&[]) {
            let gone = if in_l2 {
                self.tree.leave_l1(node)
            } else if let Some(gone) = self.tree.remove_subtree(node) {
                gone
            } else {
                break;
            };
            self.give_back(gone);
        }
        while let Some(node) = self.tree.next_of_l2() {
            let gone = self.tree.remove(node);
            self.give_back(gone);
        }
        Ok(())
    }

    fn fresh_id(&mut self) -> OpId {
        loop {
            let id = OpId(self.next_id);
            // The highest number means "no load" in a node.
            self.next_id = (self.next_id + 1) % u32::MAX;
            let prefetch = PrefetchId(id.0);
            if !self.flights.contains_key(&id) && !self.prefetches.contains_key(&prefetch) {
                return id;
            }
        }
    }

    fn row(&self) -> Row {
        Row::new(self.page_tokens)
    }

    fn tell(&mut self, event: Event) {
        if self.config.events {
            self.events.push(event);
        }
    }

    fn free_l1(&mut self, pages: &Runs<L1>) {
        free(&mut self.l1, pages);
    }

    fn free_l2(&mut self, pages: &Runs<L2>) {
        free(&mut self.l2, pages);
    }
}

/// Most nodes that room is made for ahead of need.
const NODES_RESERVED_MAX: usize = 1 << 24;

/// Gives pages back that the core took from this very pool.
fn free<T: Tier>(pool: &mut PagePool<T>, pages: &Runs<T>) {
    if let Err(error) = pool.free(pages) {
        panic!("pages have two owners: {error}");
    }
}

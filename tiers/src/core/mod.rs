//! The core makes all decisions: match, insert, evict, copy, read and write. It does no I/O and
//! reads no clock.
//!
//! ```text
//!   requests                    +------+   orders: back up, load, put, exists, get
//!   match, start, load back --> | core | ------------------------------------------> device, L3
//!   extend, insert, finish      |      | <------------------------------------------
//!   prefetch, poll              +------+   completions
//! ```
//!
//! All calls come from the scheduler's thread. A completion is processed, and the locks of its
//! transfer are released, only when the scheduler passes it in. The pages of a transfer are held
//! from its order to its completion, so no page is reused while a copy touches it.
//!
//! Fences: forward passes are numbered in the order in which they are inserted, and execute in this
//! order. A load overwrites pages of L1, so it waits for the newest forward of an ended request
//! that had one of them. A backup is ordered after the forwards of its pages have ended
//! successfully.
//!
//! Invariant ([`Core::validate`]): every page of a pool that is not free has exactly one owner: the
//! tree, a request, a transfer, a prefetch, or a loss (pages of a failed load or forward that
//! requests still hold).
//!
//! A module imports only the modules below it.
//!
//! | module | contents |
//! |---|---|
//! | `audit` | checks of the invariant |
//! | `truncate` | the end of a request taken back: rejected speculation |
//! | `cut` | the windows and states of a truncation |
//! | `hybrid` | the windows and states of a request, from its start to its end |
//! | `request` | the steps of a request: start, load back, extend, insert, finish |
//! | `forward` | inserts whose forward has not ended; failed forwards |
//! | `late` | pages that leave the window of an L3 that is written late |
//! | `transfer` | backups, loads, puts, and the effects of their completions |
//! | `prefetch` | L3 to L2 |
//! | `descent` | windows and states to L2 and L3 |
//! | `room` | eviction from L1 and L2 |
//! | `flight` | transfers, inserts and prefetches in progress |
//! | `side` | the window pages and states that a request has |
//! | `order` | orders to the device and to L3, and their completions |
//! | `ids` | numbers of forwards, orders, requests and prefetches |
//! | `report` | counters and events |

mod audit;
mod cut;
mod descent;
mod flight;
mod forward;
mod hybrid;
mod ids;
mod late;
mod order;
mod prefetch;
mod report;
mod request;
mod room;
mod side;
mod transfer;
mod truncate;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZeroU32;

use larder_format::PageKey;

use crate::config::{Config, ConfigError, L3Write, TailConfig, TailKind, WritePolicy};
use crate::planted::planted;
use crate::pool::{PagePool, Row};
use crate::prompt::{Prompt, Scope, Vocabulary, VocabularyFull, Weights};
use crate::runs::{L1, L2, Runs, Tier};
use crate::tails::{TailId, TailPool};
use crate::tree::{Matched, NodeId, Tree, TreeCounts};
use flight::{Flight, Pending, Prefetch};

pub use audit::Leak;
pub use flight::{Declined, PrefetchState};
pub use forward::Broken;
pub use ids::{Fence, OpId, PrefetchId, RequestId};
pub use order::{
    Done, DoneError, Order, Outcome, TailAsk, TailCopy, TailLookup, TailPage, TailPair,
};
pub use prefetch::Retries;
pub use report::{Declines, Event, Stats, TierName};
pub use request::{ExtendError, InsertEnd, LoadBack, NoRoom, Request};
pub use room::Evicted;
pub use truncate::TruncateError;

/// The cache is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the cache is in use: {locks} locks are held and {orders} orders are in progress; \
     finish the requests and poll until idle"
)]
pub struct Busy {
    /// Locks held.
    pub locks: u32,
    /// Orders in progress, plus inserts whose forwards have not ended.
    pub orders: usize,
}

/// A tail pool of the core.
#[derive(Debug)]
struct Tail {
    kind: TailKind,
    pool: TailPool,
    /// By page of L1: the newest forward of the former owners.
    touched: Vec<Fence>,
    /// Number of writes to L3 in flight.
    puts: usize,
}

/// See the module documentation.
#[derive(Debug)]
pub struct Core {
    config: Config,
    page_tokens: NonZeroU32,
    tree: Tree,
    vocabulary: Vocabulary,
    weights: Weights,
    l1: PagePool<L1>,
    /// By page of L1: the newest forward of the ended requests that had it.
    touched: Vec<Fence>,
    /// By page of L1: the tenant whose rows it has.
    tenants: Vec<u64>,
    /// Whether a request had a tenant: until then all pages are those of none.
    has_tenants: bool,
    /// Pages that a request got, with rows of another tenant.
    unclean: Vec<u32>,
    l2: PagePool<L2>,
    /// The pools of windows and states. Empty for a model of full attention.
    tails: Vec<Tail>,
    /// Pages of tail pools that are to be written to L3.
    tails_due: VecDeque<(usize, TailId)>,
    /// Pages of tail pools whose copy to L2 or L3 has failed.
    tails_failed: BTreeSet<(usize, TailId)>,
    /// Pages of tail pools for which L2 had no room.
    tails_refused: BTreeSet<(usize, TailId)>,
    /// Pages of tail pools that requests got, with bytes of others.
    tails_unclean: Vec<(usize, u32)>,
    flights: BTreeMap<OpId, Flight>,
    loads: usize,
    put_pages: usize,
    pending: Vec<Pending>,
    /// Nodes whose copy to L2 or L3 had no room, or waits for an attempt in flight.
    refused: BTreeSet<NodeId>,
    /// Nodes whose copy to L2 or L3 has failed, or waits behind such a node, by the progress at
    /// which the next attempt may begin.
    paused: BTreeSet<(u64, NodeId)>,
    /// Number of inserts, and of pages that L3 has stored: the clock of pauses after failures. The
    /// same on all ranks.
    progress: u64,
    /// Running requests whose forward has failed.
    broken: BTreeSet<RequestId>,
    prefetches: BTreeMap<PrefetchId, Prefetch>,
    prefetch_pages: usize,
    /// A caller waits until all pages are in L3, also those in the window of an L3 that is written
    /// late.
    is_flushing: bool,
    /// The read speed of L3, in bytes per second: a running mean.
    read_speed: Option<f64>,
    /// Number of consecutive prefetches that were not worth reading.
    given_up: u32,
    next_id: u32,
    next_request: u64,
    orders: VecDeque<Order>,
    /// The newest forward, and the newest forward for which it and all earlier ones have ended.
    newest: Fence,
    ended: Fence,
    stats: Stats,
    events: Vec<Event>,
}

impl Core {
    /// A core over empty pools.
    ///
    /// # Errors
    /// A field of the configuration is not valid.
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
            is_flushing: false,
            vocabulary: Vocabulary::new(config.wide_tokens_max),
            weights: Weights::default(),
            l1: PagePool::new(config.l1_pages),
            touched: vec![Fence::default(); config.l1_pages as usize + 1],
            tenants: vec![0; config.l1_pages as usize + 1],
            has_tenants: false,
            unclean: Vec::new(),
            l2: PagePool::new(config.l2_pages),
            tails: tails_of(&config),
            tails_due: VecDeque::new(),
            tails_failed: BTreeSet::new(),
            tails_refused: BTreeSet::new(),
            tails_unclean: Vec::new(),
            flights: BTreeMap::new(),
            loads: 0,
            put_pages: 0,
            pending: Vec::new(),
            refused: BTreeSet::new(),
            paused: BTreeSet::new(),
            progress: 0,
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
        if core.config.l3_write == L3Write::Late {
            core.tree = core.tree.with_unwritten();
        }
        core.reserve();
        Ok(core)
    }

    /// Reserves space for the maximum number of nodes, so that no reallocation delays requests.
    /// Every node has at least one page of its own in L1 or L2.
    fn reserve(&mut self) {
        let pages = self.config.l1_pages as usize + self.config.l2_pages as usize;
        self.tree.reserve(pages.min(NODES_RESERVED_MAX));
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// An empty prompt with this scope.
    #[must_use]
    pub fn prompt(&self, scope: &Scope) -> Prompt {
        let page_tokens = self.page_tokens.try_into();
        let page_tokens = page_tokens.unwrap_or(std::num::NonZero::<usize>::MIN);
        let mut prompt = Prompt::new(scope, page_tokens);
        prompt.renew(&self.weights);
        prompt
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

    /// A hash of a prompt of so many tokens, with its scope and weights.
    pub(crate) fn digest_of(&self, prompt: &Prompt, tokens: usize) -> Option<PageKey> {
        prompt.digest(&self.vocabulary, tokens)
    }

    /// Hashes the keys of whole pages that have not been hashed yet. [`Core::insert`] and
    /// [`Core::prefetch`] do this on demand; this function is for callers with idle time earlier.
    pub fn hash_prompt(&self, prompt: &mut Prompt) {
        prompt.keys(&self.vocabulary, prompt.pages());
    }

    /// The cached part of a prompt. Takes no lock: the result is valid until the next call.
    pub fn match_prefix(&mut self, prompt: &Prompt) -> Matched {
        let root = prompt.root_under(&self.weights);
        self.tree.match_prefix(root, prompt.words())
    }

    /// Number of pages of a prompt in L1, and number of following pages in L2 only. With tail
    /// pools: of the prefix that can be continued. Changes nothing, not even the recency of use.
    #[must_use]
    pub fn peek(&self, prompt: &Prompt) -> (usize, usize) {
        let root = prompt.root_under(&self.weights);
        if self.tails.is_empty() {
            return self.tree.peek(root, prompt.words());
        }
        let words = &prompt.words()[..self.usable(prompt)];
        let (keys, in_l1) = self.tree.peek_keys(root, words);
        let in_l1 = self.longest_tail(&keys[..in_l1], true);
        (in_l1, self.longest_tail(&keys, false) - in_l1)
    }

    /// The next order to execute.
    pub fn next_order(&mut self) -> Option<Order> {
        self.orders.pop_front()
    }

    /// Number of outstanding orders.
    #[must_use]
    pub fn orders_out(&self) -> usize {
        self.flights.len() + self.prefetches.values().filter(|p| p.is_waiting()).count()
    }

    /// Orders a report to L3 of the pages that were used in the upper tiers.
    pub fn tell_warmth(&mut self) {
        let keys = self.tree.take_warm();
        if !keys.is_empty() {
            self.orders.push_back(Order::Touch { keys });
        }
        for (pool, tail) in self.tails.iter_mut().enumerate() {
            let keys = tail.pool.take_warm();
            if !keys.is_empty() {
                self.orders.push_back(Order::TouchTails { pool, keys });
            }
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

    /// Number of free pages in L1 and L2.
    #[must_use]
    pub fn free_pages(&self) -> (u32, u32) {
        (self.l1.free_pages(), self.l2.free_pages())
    }

    /// Number of free pages in L1 and L2 of each tail pool.
    #[must_use]
    pub fn free_tails(&self) -> Vec<(u32, u32)> {
        let pools = self.tails.iter().map(|tail| &tail.pool);
        pools.map(TailPool::free_pages).collect()
    }

    /// Number of L1 pages that are free or can be freed.
    #[must_use]
    pub fn available_pages(&self) -> usize {
        let counts = self.tree.counts();
        self.l1.free_pages() as usize + counts.l1_pages - counts.l1_locked_pages
    }

    /// A digest of the tree. Equal on ranks with equal trees.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let tails = self.tails.iter().map(|tail| tail.pool.digest());
        tails.fold(self.tree.digest(), |sum, tail| sum.rotate_left(9) ^ tail)
    }

    /// Bytes of the tree, without tokens.
    #[must_use]
    pub fn tree_bytes(&self) -> usize {
        self.tree.ram_bytes()
    }

    /// Drops all cached pages. Prompts stay valid.
    ///
    /// # Errors
    /// The cache is in use: nothing changes.
    pub fn reset(&mut self) -> Result<(), Busy> {
        let (l1, l2) = self.tree.locks_out();
        let (locks, orders) = (l1 + l2, self.orders_out() + self.pending.len());
        if locks > 0 || orders > 0 {
            return Err(Busy { locks, orders });
        }
        self.drop_unheld(false);
        self.refused.clear();
        self.paused.clear();
        self.tails_failed.clear();
        self.tails_refused.clear();
        self.tree.take_bereft(false);
        Ok(())
    }

    /// The model has other weights from now on, named by `tag`: pages computed under other tags are
    /// not matched. All running requests are broken. Pages that nothing holds are dropped; the
    /// others, and those of copies in flight, stay under the former tag until they are evicted.
    /// Prompts stay valid.
    pub fn new_weights(&mut self, tag: &str) {
        self.weights.replace(tag);
        if self.config.l3_write == L3Write::Late {
            self.flush();
        }
        self.drop_unheld(true);
    }

    /// Number of calls of [`Core::new_weights`].
    #[must_use]
    pub fn weights_replaced(&self) -> u64 {
        self.weights.changes()
    }

    /// Drops all pages that nothing holds. With `keeps_unwritten`, pages of an L3 that is written
    /// late stay until they are written.
    fn drop_unheld(&mut self, keeps_unwritten: bool) {
        for tail in &mut self.tails {
            tail.pool.drop_unheld();
        }
        let mut held = Vec::new();
        while let Some((node, in_l2)) = self.tree.next_of_l1(&held) {
            let gone = match in_l2 {
                true => Some(self.tree.leave_l1(node)),
                false => self.tree.remove_subtree(node),
            };
            match gone {
                Some(gone) => drop(self.give_back(gone)),
                None => held.push(node),
            }
        }
        loop {
            let unwritten = || {
                let is_kept = keeps_unwritten && !planted!(DropsPromisedPages);
                (!is_kept)
                    .then(|| self.tree.next_unwritten_leaf())
                    .flatten()
            };
            let Some(node) = self.tree.next_of_l2().or_else(unwritten) else {
                return;
            };
            let gone = self.tree.remove(node);
            self.give_back(gone);
        }
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

    fn emit(&mut self, event: Event) {
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

fn tails_of(config: &Config) -> Vec<Tail> {
    let tail = |of: &TailConfig| Tail {
        kind: of.kind,
        pool: TailPool::new(config.trailing_pages(of.kind), of.l1_pages, of.l2_pages),
        touched: vec![Fence::default(); of.l1_pages as usize + 1],
        puts: 0,
    };
    config.tails.iter().map(tail).collect()
}

/// Maximum number of nodes for which space is reserved in advance.
const NODES_RESERVED_MAX: usize = 1 << 24;

/// Frees pages that the core took from this pool.
fn free<T: Tier>(pool: &mut PagePool<T>, pages: &Runs<T>) {
    if let Err(error) = pool.free(pages) {
        panic!("pages have two owners: {error}");
    }
}

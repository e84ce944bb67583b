//! The cache: the core combined with a device, an L3 and other ranks. An engine embeds it.
//!
//! ```text
//!  loop of a scheduler
//!    poll                        completions; locks are released only here
//!    prefetch, poll_prefetch     for waiting requests
//!    start, load_back, extend    for running requests
//!    pages(request)              its L1 pages, behind the loads that fill them
//!    ... forward ...
//!    insert / finish             with the ticket of the forward
//! ```
//!
//! One thread calls the cache. Copies run on the device, and separate threads wait for L3. Their
//! completions are processed only in [`Cache::poll`].
//!
//! # When a forward fails
//!
//! The ticket of a forward settles when that forward no longer touches L1. It fails if any page
//! written by the forward is not valid. Tickets may settle in any order. The ticket passed to
//! [`Cache::insert`] and [`Cache::finish`] covers all computation for the request since its last
//! insert. With several forwards, pass one ticket that fails if any of them failed. If the failure
//! is known before that call, use [`Ticket::failed`].
//!
//! 1. Let the ticket fail, or drop its promise. Nothing else must be undone: pages of that forward
//!    never reach L2 or L3, and [`Cache::poll`] removes them from L1, together with all pages that
//!    were computed from them.
//! 2. Before the output tokens of a forward are used: wait for its ticket and those of all earlier
//!    forwards, poll, and call [`Cache::is_broken`] for each of its requests. A request is broken
//!    if a forward of its own has failed, or a forward of pages that it shares, or a load. Its
//!    calls return [`Broken`].
//! 3. [`Cache::restart`] a broken request with the tokens whose output was used, or
//!    [`Cache::finish`] it.
//!
//! A request whose forward failed before it was inserted must be restarted, or finished with
//! `keep = false`.
//!
//! # Ranks
//!
//! All ranks make the same calls in the same order. Completions are taken in the order of their
//! orders, as many as every rank has, with the worst outcome of any rank. All trees therefore stay
//! equal, even if a rank is faster or fails. With other ranks, a failed forward is detected only in
//! [`Cache::poll`]; without, also by the calls that start, insert or finish a request.
//!
//! # Forks
//!
//! A forked child must not use the cache of its parent, because it has none of the threads. It may
//! drop the cache.
//!
//! # Faults covered
//!
//! A device that refuses or fails copies: the pages are freed, and the request computes. A forward
//! that fails at any time: see above. An L3 that fails, returns wrong counts or stalls: a miss, and
//! no other work waits for it.
//!
//! | module | contents |
//! |---|---|
//! | `forwards` | forwards that have not ended |
//! | `lent` | pages of the host pool lent to L3 |
//! | `workers` | threads that wait for L3 |
//! | `memory` | memory for the host pool |
//! | `error` | errors of a cache |
//! | `agree` | agreement between ranks on completions |
//! | `time` | real time, or the time of a replay |

mod agree;
mod error;
mod forwards;
mod lent;
mod memory;
mod time;
mod workers;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use larder_engine::fork::Origin;
use larder_kernels::{
    ChunkAt, Device, DeviceError, Gated, L1Pool, L2Pool, LayerTickets, PagePair, Ticket, Transfer,
};

use crate::config::Config;
use crate::core::{
    Broken, Busy, Core, Declined, Done, Event, ExtendError, Fence, InsertEnd, LoadBack, OpId,
    Order, Outcome, PrefetchId, PrefetchState, Request, Stats,
};
use crate::l3::L3;
use crate::pool::Row;
use crate::prompt::{Prompt, Scope, VocabularyFull};
use crate::ranks::Ranks;
use crate::runs::{L1, L2, Runs};
use crate::tree::{LoadId, Matched};

pub use error::{CacheError, ChunkError};
pub use memory::{HostMemoryOptions, host_memory};
pub use time::Time;
pub use workers::READERS;

use agree::{Agreed, End, Line, Work as Awaited};
use error::check_pool;
use forwards::Forwards;
use lent::LentPages;
use time::RealTime;
use workers::{Work, Workers};

/// The components of a cache.
pub struct Parts {
    /// Copies between the pools.
    pub device: Arc<dyn Device>,
    /// The device pool: `l1_pages` pages plus one for padding.
    pub l1: L1Pool,
    /// The host pool: `l2_pages` pages plus one for padding.
    pub l2: L2Pool,
    /// The tier below L2, if there is one.
    pub l3: Option<Arc<dyn L3>>,
    /// The other ranks, if there are any.
    pub ranks: Option<Box<dyn Ranks>>,
}

/// A copy in progress, for one order or for several merged orders.
struct Copy {
    ids: Vec<OpId>,
    transfer: Gated<Transfer>,
}

/// See the module documentation.
pub struct Cache {
    core: Core,
    device: Arc<dyn Device>,
    l1: L1Pool,
    l2: L2Pool,
    copies: Vec<Copy>,
    /// The tickets of each load in flight.
    loads: HashMap<LoadId, Vec<LayerTickets>>,
    workers: Option<Workers>,
    agreed: Agreed,
    forwards: Forwards,
    time: Box<dyn Time>,
    /// Orders completed by the device or L3 that may not have ended by `time`, with the duration of
    /// a read in microseconds.
    ended: Vec<(Done, Option<u64>)>,
    /// Reads in progress, with the number of requested pages.
    reads: HashMap<OpId, usize>,
    origin: Origin,
}

impl Cache {
    /// A cache over empty pools.
    ///
    /// # Errors
    /// The configuration is not valid, or the pools do not match it.
    pub fn new(config: Config, parts: Parts) -> Result<Cache, CacheError> {
        Self::in_time(config, parts, Box::new(RealTime(Instant::now())))
    }

    /// As [`Cache::new`], with its own time, for replays.
    ///
    /// # Errors
    /// The configuration is not valid, or the pools do not match it.
    pub fn in_time(config: Config, parts: Parts, time: Box<dyn Time>) -> Result<Cache, CacheError> {
        config.check()?;
        let Parts {
            device,
            l1,
            l2,
            l3,
            ranks,
        } = parts;
        check_pool("l1", &config, l1.shape(), l1.pages(), config.l1_pages)?;
        check_pool("l2", &config, l2.shape(), l2.pages(), config.l2_pages)?;
        let workers = l3.map(|l3| Workers::start(&l3)).transpose()?;
        Ok(Cache {
            core: Core::new(config)?,
            device,
            l1,
            l2,
            copies: Vec::new(),
            loads: HashMap::new(),
            workers,
            agreed: Agreed::new(ranks),
            forwards: Forwards::default(),
            time,
            ended: Vec::new(),
            reads: HashMap::new(),
            origin: Origin::here(),
        })
    }

    /// The core: sizes, counters, the digest, and [`Core::validate`] for tests.
    #[must_use]
    pub fn core(&self) -> &Core {
        &self.core
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        self.core.stats()
    }

    /// Events since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.core.take_events()
    }

    /// A prompt with this scope and these tokens.
    ///
    /// # Errors
    /// The vocabulary is full.
    pub fn prompt(
        &mut self,
        scope: &Scope,
        tokens: impl IntoIterator<Item = u64>,
    ) -> Result<Prompt, VocabularyFull> {
        let mut prompt = self.core.prompt(scope);
        self.core.extend_prompt(&mut prompt, tokens)?;
        Ok(prompt)
    }

    /// Adds tokens to the prompt of a request as the answer is generated.
    ///
    /// # Errors
    /// The vocabulary is full: the prompt is cached up to there.
    pub fn extend_prompt(
        &mut self,
        request: &mut Request,
        tokens: impl IntoIterator<Item = u64>,
    ) -> Result<(), VocabularyFull> {
        self.core.extend_prompt(request.prompt_mut(), tokens)
    }

    /// The cached part of a prompt, for scheduling. [`Cache::start`] gives access to its pages.
    pub fn match_prefix(&mut self, prompt: &Prompt) -> Matched {
        self.look_at_forwards();
        self.core.match_prefix(prompt)
    }

    /// See [`Core::start`].
    pub fn start(&mut self, prompt: Prompt, priority: i32) -> Request {
        self.look_at_forwards();
        self.core.start(prompt, priority)
    }

    /// See [`Core::restart`]. `forward`: the last forward that uses the request's pages.
    pub fn restart(&mut self, request: Request, tokens: usize, forward: &Ticket) -> Request {
        self.look_at_forwards();
        let fence = self.fence(forward);
        self.core.restart(request, tokens, fence)
    }

    /// See [`Core::load_back`].
    ///
    /// # Errors
    /// The request is broken.
    pub fn load_back(&mut self, request: &mut Request, quota: usize) -> Result<LoadBack, Broken> {
        self.look_at_forwards();
        let newest = self.forwards.newest();
        let result = self.core.load_back(request, quota, newest);
        self.carry_out();
        result
    }

    /// See [`Core::extend`].
    ///
    /// # Errors
    /// There is no room, or the request is broken.
    pub fn extend(&mut self, request: &mut Request, tokens: usize) -> Result<(), ExtendError> {
        let result = self.core.extend(request, tokens);
        self.carry_out();
        result
    }

    /// The L1 pages of a request, guarded by the loads that still fill some of them. The ticket of
    /// a layer covers that layer of all pages.
    ///
    /// # Errors
    /// The request is broken.
    pub fn pages<'r>(&self, request: &'r Request) -> Result<Gated<&'r Row>, Broken> {
        if self.core.is_broken(request) {
            return Err(Broken);
        }
        let (row, loads) = request.pages();
        let gates = loads
            .iter()
            .filter_map(|load| self.loads.get(load))
            .flatten();
        Ok(gates.fold(Gated::free(row), |row, gate| row.behind(gate.clone())))
    }

    /// Writes one chunk of a page owned by the request, as a forward would. For replays and tests
    /// without computation. `page` is relative to the request's first page.
    ///
    /// # Errors
    /// The page does not belong to the request, there is no such chunk, or `bytes` has another
    /// size.
    pub fn write_chunk(
        &self,
        request: &Request,
        at: ChunkAt,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        let row = request.pages().0;
        let page = self.page_at(row, at.page, row.shared_pages())?;
        // SAFETY: the request owns the page. The page is not in the tree, so no order uses it, and
        // this synchronous call is its only access.
        unsafe {
            self.device
                .write_l1(&self.l1, ChunkAt { page, ..at }, bytes)
        }
    }

    /// Reads one chunk of a request's pages, as a forward would. Waits for the loads of that layer.
    /// `page` is relative to the request's first page.
    ///
    /// # Errors
    /// The request is broken, a load failed, the request has no such page, there is no such chunk,
    /// or `into` has another size.
    pub fn read_chunk(
        &self,
        request: &Request,
        at: ChunkAt,
        into: &mut [u8],
    ) -> Result<(), ChunkError> {
        let gated = self.pages(request)?;
        let page = self.page_at(gated.wait_layer(at.layer)?, at.page, 0)?;
        // SAFETY: the loads of the layer have ended. The request holds the page, and held pages are
        // only read.
        unsafe { self.device.read_l1(&self.l1, ChunkAt { page, ..at }, into) }?;
        Ok(())
    }

    fn page_at(&self, row: &Row, page: u32, from: usize) -> Result<u32, DeviceError> {
        let index = page as usize;
        let found = row.pages().get(index).filter(|_| index >= from);
        found.copied().ok_or(DeviceError::NoSuchPage {
            tier: larder_kernels::Tier::L1,
            page,
            pages: u32::try_from(row.pages().len()).unwrap_or(u32::MAX),
        })
    }

    /// Whether a request depends on pages of a failed forward or load. See the module documentation
    /// for the required steps.
    #[must_use]
    pub fn is_broken(&mut self, request: &Request) -> bool {
        self.look_at_forwards();
        self.core.is_broken(request)
    }

    /// See [`Core::insert`]. `forward` settles when the request's pages have been written, and
    /// fails if they are not valid.
    ///
    /// # Errors
    /// The request is broken or `forward` has already failed: no page of the request is in the
    /// tree.
    pub fn insert(&mut self, request: &mut Request, forward: &Ticket) -> Result<InsertEnd, Broken> {
        self.look_at_forwards();
        let fence = self.fence(forward);
        let inserted = self.core.insert(request, fence);
        self.look_at_forwards();
        self.carry_out();
        inserted.and_then(|inserted| match self.core.is_broken(request) {
            true => Err(Broken),
            false => Ok(inserted),
        })
    }

    /// See [`Core::finish`]. `forward`: the last forward that uses the request's pages, as for
    /// [`Cache::insert`].
    pub fn finish(&mut self, request: Request, keep: bool, forward: &Ticket) -> InsertEnd {
        self.look_at_forwards();
        let fence = self.fence(forward);
        let inserted = self.core.finish(request, keep, fence);
        self.look_at_forwards();
        self.carry_out();
        inserted
    }

    /// The number of the forward with this ticket.
    fn fence(&mut self, forward: &Ticket) -> Fence {
        if let Some(fence) = self.forwards.known(forward) {
            return fence;
        }
        if !self.agreed.has_ranks() && self.forwards.is_past(forward) {
            return self.forwards.newest();
        }
        let fence = self.forwards.push(forward);
        self.agreed.expect(Line::Forward, Awaited::Forward(fence));
        fence
    }

    /// Processes ended forwards if no agreement with other ranks is needed. A forward that failed
    /// before it was passed in is processed after its insert, and removes the inserted pages.
    fn look_at_forwards(&mut self) {
        if self.agreed.has_ranks() {
            return;
        }
        for (fence, is_good) in self.settled_forwards() {
            self.forward_over(fence, is_good);
        }
    }

    /// The forwards whose tickets have settled on this rank since the last call, with their
    /// success.
    fn settled_forwards(&mut self) -> Vec<(Fence, bool)> {
        let settled = self.forwards.settled().into_iter();
        let is_good = |(fence, outcome): (Fence, Result<(), DeviceError>)| {
            if let Err(error) = &outcome {
                tracing::warn!("a forward failed, its pages are removed from the cache: {error}");
            }
            (fence, outcome.is_ok())
        };
        settled.map(is_good).collect()
    }

    fn forward_over(&mut self, fence: Fence, is_good: bool) {
        if !is_good {
            self.core.forward_failed(fence);
        }
        if let Some(until) = self.forwards.over(fence) {
            self.core.forwards_ended(until);
        }
    }

    /// See [`Core::prefetch`].
    ///
    /// # Errors
    /// Nothing was started, with the reason.
    pub fn prefetch(&mut self, prompt: &mut Prompt) -> Result<PrefetchId, Declined> {
        let result = self.core.prefetch(prompt);
        self.carry_out();
        result
    }

    /// The state of a prefetch for which a request waits. All ranks must call this.
    ///
    /// # Errors
    /// The group of ranks is broken.
    pub fn poll_prefetch(&mut self, id: PrefetchId) -> Result<PrefetchState, CacheError> {
        let overdue = self.core.is_prefetch_overdue(id, self.time.now_us());
        let overdue = self.agreed.any(overdue)?;
        let state = self.core.poll_prefetch(id, overdue);
        self.carry_out();
        Ok(state)
    }

    /// See [`Core::cancel_prefetch`].
    pub fn cancel_prefetch(&mut self, id: PrefetchId) {
        self.core.cancel_prefetch(id);
    }

    /// Evicts at least `pages` pages from L1, or as many as possible.
    pub fn evict(&mut self, pages: usize) -> usize {
        let evicted = self.core.evict(pages);
        self.carry_out();
        evicted.freed
    }

    /// Reports to L3 the pages that were used in the upper tiers. Occasional calls are enough.
    pub fn tell_warmth(&mut self) {
        self.core.tell_warmth();
        self.carry_out();
    }

    /// Drops all cached pages of L1 and L2.
    ///
    /// # Errors
    /// The cache is in use.
    pub fn reset(&mut self) -> Result<(), Busy> {
        self.core.reset()
    }

    /// Processes completions. All ranks must call this. Returns the number of orders and forwards
    /// that ended.
    ///
    /// # Errors
    /// The group of ranks is broken.
    pub fn poll(&mut self) -> Result<usize, CacheError> {
        self.collect();
        let ends = self.agreed.take()?;
        let count = ends.len();
        for end in ends {
            match end.work {
                Awaited::Order(id) => self.order_ended(id, end)?,
                Awaited::Forward(fence) => {
                    self.forward_over(fence, end.outcome == Outcome::Copied(true));
                }
            }
        }
        // A completed load is not over while a load above it is in flight. Requests behind it still
        // need its tickets.
        let core = &self.core;
        self.loads.retain(|load, _| core.is_loading(*load));
        self.carry_out();
        Ok(count)
    }

    fn order_ended(&mut self, id: OpId, end: End) -> Result<(), CacheError> {
        // A read that returned fewer pages than requested gives no information about the speed of
        // L3.
        let asked = self.reads.remove(&id);
        if let (Some(micros), Some(asked)) = (end.read_micros, asked)
            && end.outcome == Outcome::Pages(asked)
        {
            let bytes = asked as u64 * u64::from(self.l2.shape().page_bytes());
            self.core.observe_read(bytes, micros);
        }
        let outcome = end.outcome;
        self.core.complete(Done { id, outcome })?;
        Ok(())
    }

    /// Polls until no order is outstanding and no insert waits for its forward. For shutdown and
    /// tests. Waits for the device, for L3, and for the tickets passed to [`Cache::insert`]: all of
    /// them must settle.
    ///
    /// # Errors
    /// The group of ranks is broken.
    pub fn drain(&mut self) -> Result<(), CacheError> {
        while self.core.orders_out() > 0 || self.core.inserts_pending() > 0 {
            if self.poll()? == 0 {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Collects completions of the device and the threads.
    fn collect(&mut self) {
        for (fence, is_good) in self.settled_forwards() {
            self.agreed.ended(End {
                work: Awaited::Forward(fence),
                outcome: Outcome::Copied(is_good),
                read_micros: None,
            });
        }
        for copy in std::mem::take(&mut self.copies) {
            match copy.transfer.open() {
                Err(transfer) => self.copies.push(Copy { transfer, ..copy }),
                Ok((_, outcome)) => {
                    if let Err(error) = &outcome {
                        tracing::warn!("a copy between L1 and L2 failed: {error}");
                    }
                    let outcome = Outcome::Copied(outcome.is_ok());
                    let dones = copy.ids.into_iter().map(|id| Done { id, outcome });
                    self.ended.extend(dones.map(|done| (done, None)));
                }
            }
        }
        let answers = self.workers.iter().flat_map(Workers::answers);
        self.ended
            .extend(answers.map(|answer| (answer.done, answer.read_micros)));
        for (done, measured) in std::mem::take(&mut self.ended) {
            let read_micros = measured.map(|us| self.time.read_us(done.id, us));
            if self.time.is_over(done.id) {
                self.agreed.ended(End {
                    work: Awaited::Order(done.id),
                    outcome: done.outcome,
                    read_micros,
                });
            } else {
                self.ended.push((done, measured));
            }
        }
    }

    /// Passes the core's orders to the device and the threads.
    fn carry_out(&mut self) {
        let mut orders: VecDeque<Order> = std::iter::from_fn(|| self.core.next_order()).collect();
        let answered = |order: &&Order| !matches!(order, Order::Touch { .. });
        for order in orders.iter().filter(answered) {
            self.time.begun(order);
        }
        while let Some(order) = orders.pop_front() {
            match order {
                Order::BackUp { id, l1, l2, .. } => {
                    let (mut ids, mut pairs) = (vec![id], pairs(&l1, &l2));
                    while let Some(Order::BackUp { id, l1, l2, .. }) = orders.front() {
                        ids.push(*id);
                        pairs.extend(self::pairs(l1, l2));
                        orders.pop_front();
                    }
                    ids.iter()
                        .for_each(|id| self.agreed.expect(Line::BackUp, Awaited::Order(*id)));
                    // The core orders a backup after the forwards of its pages have ended.
                    let stored = self.transfer(pairs).and_then(|transfer| {
                        self.device
                            .store(transfer, &Ticket::done())
                            .map_err(|refused| refused.error)
                    });
                    self.copy_begun(ids, stored);
                }
                Order::Load { id, l2, l1, .. } => {
                    self.agreed.expect(Line::Load, Awaited::Order(id));
                    let after = self.forwards.all_over();
                    let loaded = self.transfer(pairs(&l1, &l2)).and_then(|transfer| {
                        self.device
                            .load(transfer, &after)
                            .map_err(|refused| refused.error)
                    });
                    let gates = match &loaded {
                        Ok(transfer) => transfer.gates().to_vec(),
                        Err(error) => vec![failed(error)],
                    };
                    self.loads.insert(LoadId(id.0), gates);
                    self.copy_begun(vec![id], loaded);
                }
                order => self.ask_l3(order),
            }
        }
    }

    fn transfer(&self, pairs: Vec<PagePair>) -> Result<Transfer, DeviceError> {
        // SAFETY: the core holds every page of an order until the order is completed, which happens
        // only after the transfer has been returned. Until then the core neither hands out nor
        // writes these pages. Pages of a backup were written by forwards that have ended. A load
        // begins when every forward that may still use its L1 pages is over, and rows contain those
        // pages only behind the tickets of the load.
        unsafe { Transfer::new(&self.l1, &self.l2, pairs) }
    }

    fn copy_begun(&mut self, ids: Vec<OpId>, begun: Result<Gated<Transfer>, DeviceError>) {
        match begun {
            Ok(transfer) => self.copies.push(Copy { ids, transfer }),
            Err(error) => {
                tracing::warn!("the device refused a copy between L1 and L2: {error}");
                let outcome = Outcome::Copied(false);
                let dones = ids.into_iter().map(|id| Done { id, outcome });
                self.ended.extend(dones.map(|done| (done, None)));
            }
        }
    }

    fn ask_l3(&mut self, order: Order) {
        let (line, id, work) = match order {
            Order::Touch { keys } => {
                if let Some(workers) = &self.workers {
                    workers.give(Work::Touch { keys });
                }
                return;
            }
            Order::Exists { id, keys } => (Line::Prefetch, id, Ok(Work::Exists { id, keys })),
            Order::Get { id, keys, l2 } => {
                self.reads.insert(id, keys.len());
                (
                    Line::Prefetch,
                    id,
                    self.lend(&l2).map(|into| Work::Get { id, keys, into }),
                )
            }
            Order::Put {
                id,
                keys,
                is_skipped: true,
                ..
            } => {
                self.agreed.expect(Line::Put, Awaited::Order(id));
                let outcome = Outcome::Pages(keys.len());
                return self.ended.push((Done { id, outcome }, None));
            }
            Order::Put {
                id,
                keys,
                parent,
                depth,
                l2,
                ..
            } => {
                let put = |from| Work::Put {
                    id,
                    keys,
                    parent,
                    depth,
                    from,
                };
                (Line::Put, id, self.lend(&l2).map(put))
            }
            Order::BackUp { .. } | Order::Load { .. } => return,
        };
        self.agreed.expect(line, Awaited::Order(id));
        let nothing = Done {
            id,
            outcome: Outcome::Pages(0),
        };
        let refused = match (&self.workers, work) {
            (Some(workers), Ok(work)) => workers.give(work),
            _ => Some(nothing),
        };
        self.ended.extend(refused.map(|done| (done, None)));
    }

    fn lend(&self, pages: &Runs<L2>) -> Result<LentPages, DeviceError> {
        // SAFETY: as for transfers: the pages belong to the order until its answer is processed.
        unsafe { LentPages::new(&self.l2, pages) }
    }
}

impl Drop for Cache {
    /// Waits for work in flight, because the pools may be dropped together with the cache. A forked
    /// child has no work in flight.
    fn drop(&mut self) {
        if self.origin.is_inherited() {
            return;
        }
        for copy in std::mem::take(&mut self.copies) {
            let _ = copy.transfer.wait();
        }
    }
}

fn failed(error: &DeviceError) -> LayerTickets {
    let (promise, ticket) = Ticket::promised();
    promise.settle(Err(error.clone()));
    LayerTickets::whole(ticket)
}

fn pairs(l1: &Runs<L1>, l2: &Runs<L2>) -> Vec<PagePair> {
    let both = l1.page_numbers().zip(l2.page_numbers());
    both.map(|(l1, l2)| PagePair { l1, l2 }).collect()
}

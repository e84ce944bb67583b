//! The cache: the core combined with a device, an L3 and other ranks. For engines with a scheduler
//! of their own, and for several ranks; [`PrefixCache`](crate::PrefixCache) is simpler.
//!
//! ```text
//!  loop of a scheduler
//!    poll                        completions; locks are released only here; also when idle
//!    prefetch, poll_prefetch     for waiting requests
//!    start, load_back, extend    for running requests; after NoRoom again, or retract a request
//!    pages(request)              its L1 pages, behind the loads that fill them
//!    ... forward ...
//!    insert / finish             with the ticket of the forward; keep = false aborts
//!  at the end
//!    drain_until, drop           then flush and close the store
//! ```
//!
//! One thread calls the cache. Copies run on the device, and separate threads wait for L3. Their
//! completions are processed only in [`Cache::poll`], and only there does a copy to L2 lead to a
//! write to L3. Pages of requests that end go to L2 and L3 as long as the cache is polled: poll it
//! until [`Cache::is_idle`], also between requests. Pages that are not in L3 when the cache is
//! dropped are lost; [`Cache::drain`] before the drop keeps them.
//!
//! A [`Request`] and the number of a prefetch are receipts: each request must be finished, and each
//! prefetch polled to its end or cancelled. Their pages and locks are held until then.
//!
//! # When a forward fails
//!
//! The ticket of a forward settles when that forward no longer touches L1. It fails if any page
//! written by the forward is not valid. The ticket passed to [`Cache::insert`] and
//! [`Cache::finish`] covers all computation for the request since its last insert. With several
//! forwards, pass one ticket that fails if any of them failed. If the failure is known before that
//! call, use [`Ticket::failed`].
//!
//! All forwards of a cache execute in the order in which their tickets are passed: on one stream,
//! or on streams ordered by events. Pages of a running forward are matched, and freed pages used
//! again, without a wait for it. The tickets themselves may settle in any order.
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
//! equal, even if a rank is faster or fails. A poll of ranks that have made different calls, or
//! with different arguments, is an error that names both. With other ranks, a failed forward is
//! detected only in [`Cache::poll`]; without, also by the calls that start, insert or finish a
//! request.
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
//! A module imports only the modules below it.
//!
//! | module | contents |
//! |---|---|
//! | `tokens` | prompts and their tokens |
//! | `prefetch` | reads from L3 for waiting requests |
//! | `hybrid` | windows and states of requests: copies within L1 |
//! | `clean` | rows of other tenants, zeroed |
//! | `orders` | the execution of the core's orders |
//! | `ending` | the last copies before a drop, and the drop |
//! | `workers` | threads that wait for L3 |
//! | `lent` | pages of the host pool lent to L3 |
//! | `left` | requests that have ended under copies of their rows |
//! | `forwards` | forwards that have not ended |
//! | `agree` | agreement between ranks on completions |
//! | `memory` | memory for the host pool |
//! | `failures` | log lines of counters |
//! | `error` | errors of a cache |
//! | `pools` | the pools of the components of a hybrid model |
//! | `l3s` | the L3 of all components |
//! | `time` | real time, or the time of a replay |

mod agree;
mod clean;
mod ending;
mod error;
mod failures;
mod forwards;
mod hybrid;
mod l3s;
mod left;
mod lent;
mod memory;
mod orders;
mod pools;
mod prefetch;
mod time;
mod tokens;
mod workers;

use std::collections::HashMap;
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use larder_base::fork::Origin;
use larder_kernels::{
    ChunkAt, Device, DeviceError, ForeignStream, Gated, L1Pool, L2Pool, LayerTickets, Ticket,
};

use crate::config::Config;
use crate::core::{
    Broken, Busy, Core, Done, Event, ExtendError, Fence, InsertEnd, LoadBack, OpId, Outcome,
    Request, Stats,
};
use crate::l3::L3;
use crate::pool::Row;
use crate::prompt::Prompt;
use crate::ranks::{Ranks, RanksError};
use crate::tree::{LoadId, Matched};

pub use error::{CacheError, ChunkError, CutError, PrepareError};
pub use memory::{HostMemoryOptions, host_memory};
pub use pools::{ComponentPools, Components, Section};
pub use time::Time;
pub use workers::{READERS, Stuck, leaked_bytes};

use agree::{Agreed, Call, End, Line, Work as Awaited};
use error::{check_components, check_l3, check_pool};
use failures::Failures;
use forwards::Forwards;
use left::Left;
use pools::Copy;
use time::RealTime;
use workers::{Answer, Terms, Workers};

/// The components of a cache. Page 0 of each pool is padding: no request gets it, and its bytes are
/// never copied.
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

/// See the module documentation.
pub struct Cache {
    core: Core,
    device: Arc<dyn Device>,
    l1: L1Pool,
    l2: L2Pool,
    /// The sections under the page numbers of the model: its own, then those of its followers.
    main: Vec<Vec<Section>>,
    /// The sections of each window and state.
    tails: Vec<Vec<Section>>,
    copies: Vec<Copy>,
    /// The tickets of each load in flight.
    loads: HashMap<LoadId, Vec<LayerTickets>>,
    workers: Option<Workers>,
    agreed: Agreed,
    forwards: Forwards,
    time: Box<dyn Time>,
    /// Orders completed by the device or L3 that may not have ended by `time`.
    ended: Vec<Answer>,
    /// Reads in progress, with the number of requested pages.
    reads: HashMap<OpId, usize>,
    failures: Failures,
    left: Vec<Left>,
    origin: Origin,
}

impl Cache {
    /// A cache over empty pools.
    ///
    /// # Errors
    /// The configuration is not valid, or the pools or L3 do not match it.
    pub fn new(config: Config, parts: Parts) -> Result<Cache, CacheError> {
        Self::in_time(config, parts, Box::new(RealTime(Instant::now())))
    }

    /// A cache for a hybrid model, over empty pools. `parts` are those of its full attention.
    ///
    /// # Errors
    /// The configuration is not valid, or the pools or L3 do not match it.
    pub fn hybrid(
        config: Config,
        parts: Parts,
        components: Components,
    ) -> Result<Cache, CacheError> {
        let time = Box::new(RealTime(Instant::now()));
        Self::over(config, parts, components, time)
    }

    /// As [`Cache::new`], with its own time, for replays.
    ///
    /// # Errors
    /// The configuration is not valid, or the pools or L3 do not match it.
    pub fn in_time(config: Config, parts: Parts, time: Box<dyn Time>) -> Result<Cache, CacheError> {
        Self::over(config, parts, Components::default(), time)
    }

    fn over(
        config: Config,
        parts: Parts,
        components: Components,
        time: Box<dyn Time>,
    ) -> Result<Cache, CacheError> {
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
        if let Some(l3) = &l3 {
            check_l3(&config, &l2, &**l3)?;
        }
        check_components(&config, &components, l3.is_some())?;
        let terms = Terms::of(&config);
        let own = Section {
            l1: l1.clone(),
            l2: l2.clone(),
        };
        let l3s = l3.map(|l3| components.l3s(l3));
        let (main, tails) = components.sections(own);
        let workers = l3s.map(|l3s| Workers::start(&l3s, terms)).transpose()?;
        Ok(Cache {
            core: Core::new(config)?,
            device,
            l1,
            l2,
            main,
            tails,
            copies: Vec::new(),
            loads: HashMap::new(),
            workers,
            agreed: Agreed::new(ranks),
            forwards: Forwards::default(),
            time,
            ended: Vec::new(),
            reads: HashMap::new(),
            failures: Failures::default(),
            left: Vec::new(),
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

    /// The cached part of a prompt, for scheduling. [`Cache::start`] gives access to its pages.
    pub fn match_prefix(&mut self, prompt: &Prompt) -> Matched {
        self.agreed
            .called(Call::Match, [prompt.words().len() as u64]);
        self.look_at_forwards();
        self.core.match_prefix(prompt)
    }

    /// Starts a request on the part of its prompt that is in L1. The last token is excluded,
    /// because it is always computed. The following part in L2 is held until [`Cache::load_back`].
    pub fn start(&mut self, prompt: Prompt, priority: i32) -> Request {
        let tokens = prompt.words().len() as u64;
        self.agreed.called(Call::Start, [tokens, priority as u64]);
        self.look_at_forwards();
        self.core.start(prompt, priority)
    }

    /// Ends a broken request and starts it again on the cached part of the first `tokens` tokens of
    /// its prompt, which must not include the output of a failed forward. `forward`: the last
    /// forward that uses the request's pages.
    pub fn restart(&mut self, request: Request, tokens: usize, forward: &Ticket) -> Request {
        self.agreed.called(Call::Restart, [tokens as u64]);
        self.look_at_forwards();
        let fence = self.fence(forward);
        self.core.restart(request, tokens, fence)
    }

    /// Decides whether the L2 part of a request is loaded into L1: all of it, if it has at most
    /// `pages_max` pages, or nothing. Without a load, the request computes those tokens.
    ///
    /// # Errors
    /// The request is broken.
    pub fn load_back(
        &mut self,
        request: &mut Request,
        pages_max: usize,
    ) -> Result<LoadBack, Broken> {
        self.agreed.called(Call::LoadBack, [pages_max as u64]);
        self.look_at_forwards();
        let result = self.core.load_back(request, pages_max);
        self.carry_out();
        result
    }

    /// Allocates slots for `tokens` further tokens, and evicts pages if necessary. The tokens
    /// themselves are added by [`Cache::extend_prompt`]. A prompt may have more tokens than slots,
    /// not the reverse when the request is inserted.
    ///
    /// # Errors
    /// There is no room: poll and try again while copies are pending ([`NoRoom`]), or finish
    /// another request. Or the request is broken.
    ///
    /// [`NoRoom`]: crate::core::NoRoom
    pub fn extend(&mut self, request: &mut Request, tokens: usize) -> Result<(), ExtendError> {
        self.agreed.called(Call::Extend, [tokens as u64]);
        let result = self.core.extend(request, tokens);
        self.clean();
        self.carry_out();
        result
    }

    /// Keeps the first `tokens` tokens of a request: those behind were rejected. Its forwards have
    /// been passed to [`Cache::insert`] or [`Cache::insert_first`]. No page of the tree
    /// changes: if the kept tokens end within one, their rows are copied to an own page. On a
    /// device with streams, `stream` is that of the forwards, and the copy runs on it. Returns the
    /// ticket of the copy, if there is one: the last forward of the request.
    ///
    /// # Errors
    /// The request is broken, shared pages are not settled, or L1 has no page for the rows. Or the
    /// stream is missing, or the device has none. Nothing has changed.
    pub fn truncate(
        &mut self,
        request: &mut Request,
        tokens: usize,
        stream: Option<ForeignStream>,
    ) -> Result<Option<Ticket>, CutError> {
        self.agreed.called(Call::Truncate, [tokens as u64]);
        self.look_at_forwards();
        match (self.device.has_streams(), stream) {
            (true, None) => return Err(DeviceError::StreamNeeded.into()),
            (false, Some(_)) => return Err(DeviceError::NoStreams.into()),
            _ => {}
        }
        let copy = self.core.truncate(request, tokens, stream.is_some());
        self.clean();
        self.carry_out();
        let Some(copy) = copy? else {
            return Ok(None);
        };
        // SAFETY: forwards and loads of the source have ended, and it is in the tree, so nothing
        // writes it: a load into it comes behind the forward below. The destination belongs to the
        // request, and no transfer has it; forwards that touch it are ordered by the stream, or
        // have ended.
        let copied = unsafe { self.device.copy_rows(&self.l1, copy, stream) };
        let ticket = copied.unwrap_or_else(Ticket::failed);
        let fence = self.fence(&ticket);
        self.core.rows_copied(request, copy, fence);
        Ok(Some(ticket))
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
        let (row, loads) = request.row_and_loads();
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
        let row = request.row_and_loads().0;
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

    /// Moves the computed whole pages of a request to the tree, where other requests match them.
    /// All tokens of its prompt that have a slot are computed. `forward` settles when the request's
    /// pages have been written, and fails if they are not valid. Pages behind a load in flight are
    /// not inserted, here and in [`Cache::finish`]: poll until the load is over.
    ///
    /// # Errors
    /// The request is broken or `forward` has already failed: no page of the request is in the
    /// tree.
    pub fn insert(&mut self, request: &mut Request, forward: &Ticket) -> Result<InsertEnd, Broken> {
        self.insert_first(request, usize::MAX, forward)
    }

    /// As [`Cache::insert`], for a request that has computed only its first `tokens` tokens.
    ///
    /// # Errors
    /// Those of [`Cache::insert`].
    pub fn insert_first(
        &mut self,
        request: &mut Request,
        tokens: usize,
        forward: &Ticket,
    ) -> Result<InsertEnd, Broken> {
        self.agreed.called(Call::Insert, [tokens as u64]);
        self.look_at_forwards();
        let fence = self.fence(forward);
        let inserted = self.core.insert_first(request, tokens, fence);
        self.look_at_forwards();
        self.carry_out();
        inserted.and_then(|inserted| match self.core.is_broken(request) {
            true => Err(Broken),
            false => Ok(inserted),
        })
    }

    /// Ends a request. With `keep`, its computed pages are inserted first, unless it is broken.
    /// Without, it is aborted: the pages that it has not inserted are freed. `forward`: the last
    /// forward that uses the request's pages, as for [`Cache::insert`].
    pub fn finish(&mut self, request: Request, keep: bool, forward: &Ticket) -> InsertEnd {
        self.agreed.called(Call::Finish, [u64::from(keep)]);
        self.look_at_forwards();
        let fence = self.fence(forward);
        let inserted = self.core.finish(request, keep, fence);
        self.look_at_forwards();
        self.carry_out();
        inserted
    }

    /// The number of the forward with this ticket. A forward that has ended successfully needs
    /// none: nothing waits for it. Other ranks may not see its end yet.
    fn fence(&mut self, forward: &Ticket) -> Fence {
        if !self.agreed.has_ranks() && forward.poll() == Ok(true) {
            return Fence::default();
        }
        if let Some(fence) = self.forwards.known(forward) {
            return fence;
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

    /// Evicts at least `pages` pages from L1, or as many as possible.
    pub fn evict(&mut self, pages: usize) -> usize {
        self.agreed.called(Call::Evict, [pages as u64]);
        let evicted = self.core.evict(pages);
        self.carry_out();
        evicted.freed
    }

    /// Reports to L3 the pages that were used in the upper tiers. Occasional calls are enough.
    pub fn tell_warmth(&mut self) {
        self.core.tell_warmth();
        self.carry_out();
    }

    /// The model has other weights from now on: see [`Core::new_weights`]. Pass all forwards that
    /// were computed with the former ones before. All ranks must call this.
    pub fn new_weights(&mut self, tag: &str) {
        self.agreed
            .called(Call::Weights, tag.bytes().map(u64::from));
        self.core.new_weights(tag);
        self.carry_out();
    }

    /// Drops all cached pages of L1 and L2.
    ///
    /// # Errors
    /// The cache is in use.
    pub fn reset(&mut self) -> Result<(), Busy> {
        self.agreed.called(Call::Reset, []);
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
        let count = ends.len() + self.finish_left();
        for end in ends {
            match end.work {
                Awaited::Order(id) => self.order_ended(id, &end)?,
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
        self.failures.log(self.core.stats());
        Ok(count)
    }

    fn order_ended(&mut self, id: OpId, end: &End) -> Result<(), CacheError> {
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

    /// Whether no order is outstanding, no insert waits for its forward, and no request for a copy
    /// of its rows: a poll has nothing to do.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.core.orders_out() == 0 && self.core.inserts_pending() == 0 && self.left.is_empty()
    }

    /// Wakes `waker` whenever L3 has answered, so that the next poll is not late. Copies of the
    /// device wake no one.
    pub fn wake_on_l3(&self, waker: Waker) {
        if let Some(workers) = &self.workers {
            workers.wake(waker);
        }
    }

    /// Whether there are other ranks.
    pub(crate) fn has_ranks(&self) -> bool {
        self.agreed.has_ranks()
    }

    /// Why the ranks do not agree any more.
    pub(crate) fn ranks_failure(&self) -> Option<&RanksError> {
        self.agreed.failure()
    }

    /// Whether a deadline of any rank is over.
    pub(crate) fn is_any_late(&mut self, own: bool) -> Result<bool, RanksError> {
        self.agreed.any(Call::Deadline, 0, own)
    }

    /// The number of the newest forward.
    pub(crate) fn newest_forward(&self) -> Fence {
        self.forwards.newest()
    }

    /// Collects completions of the device and the threads.
    fn collect(&mut self) {
        for (fence, is_good) in self.settled_forwards() {
            self.agreed.ended(End {
                work: Awaited::Forward(fence),
                outcome: Outcome::Copied(is_good),
                read_micros: None,
                legal: None,
            });
        }
        for mut copy in std::mem::take(&mut self.copies) {
            if !copy.is_over() {
                self.copies.push(copy);
                continue;
            }
            let outcome = Outcome::Copied(copy.is_good);
            let dones = copy.ids.into_iter().map(|id| Done { id, outcome });
            self.ended.extend(dones.map(Answer::of));
        }
        let answers = self.workers.iter().flat_map(Workers::answers);
        self.ended.extend(answers);
        for answer in std::mem::take(&mut self.ended) {
            let done = answer.done;
            let read_micros = answer.read_micros.map(|us| self.time.read_us(done.id, us));
            if self.time.is_over(done.id) {
                self.agreed.ended(End {
                    work: Awaited::Order(done.id),
                    outcome: done.outcome,
                    read_micros,
                    legal: answer.legal,
                });
            } else {
                self.ended.push(answer);
            }
        }
    }
}

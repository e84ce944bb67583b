//! A cache that an engine of one process embeds with a few calls: it opens its store, polls itself,
//! and frees the pages of dropped requests.
//!
//! ```no_run
//! use std::path::Path;
//!
//! use larder_kernels::KvShape;
//! use larder_tiers::{Model, PrefixCache};
//! # fn forward(_: &mut larder_tiers::Sequence, _: std::ops::Range<usize>) -> u64 { 0 }
//!
//! // K and V of 4 layers with 1 head of 32 values of 4 bytes, 16 tokens a page.
//! let model = Model::new("toy", "seed 42", "f32", KvShape::mha(4, 1, 32, 4, 16)?);
//! let cache = PrefixCache::open(Path::new("kv.store"), 256 << 20, &model, 1000, 4000)?;
//!
//! let prompt: Vec<u64> = (0..100).collect();
//! let mut sequence = cache.begin(&prompt)?; // its cached pages are in L1, or on their way
//! let from = sequence.cached().tokens();
//! let mut next = forward(&mut sequence, from..prompt.len()); // row, row_mut
//! sequence.computed(prompt.len())?;
//! while next != 0 {
//!     sequence.push(next)?; // a token and its slot
//!     let position = sequence.len() - 1;
//!     next = forward(&mut sequence, position..position + 1);
//!     sequence.computed(position + 1)?;
//! }
//! sequence.keep()?; // a drop abandons it
//! cache.close()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `docs/embedding.md` in the repository walks through a whole engine, `tiers/examples/engine.rs`.
//!
//! # Requests
//!
//! [`PrefixCache::ask`] looks a prompt up and starts to read its pages from L3. The result, a
//! [`Waiting`] request, becomes a [`Sequence`] when the pages have arrived and L1 has room for the
//! prompt and the reserved tokens: by [`Waiting::try_begin`] in a scheduler's loop, by
//! [`Waiting::begin_within`] in a thread, or by `await`, because it is a future. A [`Sequence`] has
//! the KV of its cached tokens and slots for the others. After a forward, the engine reports how
//! many tokens are computed ([`Sequence::computed`]). At the end it keeps the sequence. A sequence
//! or a waiting request that is dropped, for example by `?`, frees its pages, its locks and its
//! prefetch.
//!
//! # Forwards
//!
//! On a CPU, [`Sequence::row`] and [`Sequence::row_mut`] are the rows of L1 as slices. They wait
//! for the loads that fill them. On a GPU, [`Sequence::slots`] has the page numbers and
//! the tickets of those loads, and [`PrefixCache::l1`] has the addresses. A forward that runs on is
//! passed with its ticket ([`Sequence::computed_by`]). If it fails, its pages leave the cache, and
//! each sequence that depends on them is broken: its calls return [`Broken`](crate::core::Broken).
//! Before output is used, [`Sequence::verify`] answers whether all forwards behind it have ended
//! well. A broken sequence is dropped, and its prompt asked again.
//!
//! All forwards of a cache execute in the order of their reports. On a GPU: on one stream, or on
//! streams ordered by events. On a CPU: no forward begins while a reported one runs; if each ends
//! before its report, threads need no order. The reason: pages of a running forward are matched at
//! once, and pages of a dropped sequence are used again at once. Tickets order no forwards, so they
//! may settle in any order.
//!
//! # Hybrid models
//!
//! A [`Model`] may have components: followers of its pages, sliding windows and states
//! ([`Component`](crate::Component)). [`Sequence::prepare`] comes before each forward, and the
//! report of a forward that ends at a border of pages keeps its state there. A prompt is continued
//! behind the longest prefix that has a state at its end and the windows before it.
//! `tiers/examples/hybrid_engine.rs` is a whole engine.
//!
//! # Ranks
//!
//! Several ranks of one engine agree through a group ([`PrefixOptions::ranks`]): the engine of each
//! rank makes the same calls with the same arguments in the same order, in one thread. No thread of
//! the cache polls: each engine calls [`PrefixCache::poll`] in its loop, also while it is idle. All
//! ranks find the same pages, and results of calls are equal on all. A failed load of a row
//! ([`RowError::Load`]) is seen by one rank alone: report that forward with [`Ticket::failed`],
//! and [`Sequence::verify`] returns [`Broken`](crate::core::Broken) on all. After a rank has ended,
//! stalled or made another call, calls fail with [`Closed::Ranks`] on all ranks, and those of
//! sequences with [`Broken`](crate::core::Broken).
//!
//! [`Ticket::failed`]: larder_kernels::Ticket::failed
//!
//! # Pages lost at an exit
//!
//! A thread of the cache polls it, so pages go on to L2 and L3 while the engine sleeps. Pages that
//! were not reported as computed and kept (or shared) are lost at an exit. So are, after an exit
//! without [`PrefixCache::close`], kept pages whose write to L3 has not ended: those of the last
//! moments when L3 keeps up, else at most half of L2 and the pages that wait behind it
//! ([`Config::l3_queue_bytes_max`](crate::Config::l3_queue_bytes_max)). Pages in L3 survive a kill;
//! they survive a power loss if they were stored one second before it, or before `close`.
//!
//! A module imports only the modules below it.
//!
//! | module | contents |
//! |---|---|
//! | `options` | the options of an open |
//! | `handed` | sequences that go to another process, or come from one |
//! | `stage` | rows on a device, on their way through host memory |
//! | `waiting` | a request before it has its pages |
//! | `component` | followers, windows and states of a sequence |
//! | `sequence` | a running request |
//! | `filling` | rows of a sequence that come from another process, while they come |
//! | `shared` | the cache behind its lock, and the thread that polls it |
//! | `queue` | requests whose futures wait |
//! | `error` | the errors |

mod component;
mod error;
mod filling;
mod handed;
mod options;
mod queue;
mod sequence;
mod shared;
mod stage;
mod waiting;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_base::runtime::after;
use larder_engine::{PageStore, Store, StoreError};
use larder_kernels::L1Pool;
use larder_remote::l4::L4;
use larder_sync::Mutex;

use crate::cache::Cache;
use crate::core::{Busy, Core, Event, Leak, Stats};

pub use crate::model::Model;
pub use component::RowAt;
pub(crate) use filling::{DeviceCopies, Filling, Rows};
pub(crate) use handed::Lender;
pub(crate) use stage::{HeadAt, Stage};

pub use error::{BeginError, CloseError, Closed, OpenError, RowError, SequenceError};
pub use options::{L1Memory, PrefixOptions};
pub use sequence::{Cached, Kept, Replaced, Sequence, Slots};
pub use waiting::{Ask, Begin, Waiting};

use shared::{Poller, Shared};

/// See the module documentation. All calls may come from any thread: share it in an [`Arc`].
pub struct PrefixCache {
    shared: Arc<Shared>,
    /// `None` after the end, as the fields below.
    poller: Mutex<Option<Poller>>,
    /// Ends before the store.
    l4: Mutex<Option<L4>>,
    store: Mutex<Option<Arc<Store>>>,
    begin_wait: Duration,
    close_wait: Duration,
}

impl PrefixCache {
    /// Opens the store at `path`, shared with other processes, with the defaults of
    /// [`PrefixOptions`]; creates a store of `store_bytes` bytes first if there is none. L1 is in
    /// host memory.
    ///
    /// # Errors
    /// The store, the memory or the configuration.
    pub fn open(
        path: &Path,
        store_bytes: u64,
        model: &Model,
        l1_pages: u32,
        l2_pages: u32,
    ) -> Result<PrefixCache, OpenError> {
        PrefixOptions::new(model, l1_pages, l2_pages).open(path, store_bytes)
    }

    /// Asks for a prompt, and waits for its pages and for room: [`PrefixCache::ask`] and
    /// [`Waiting::begin_within`] the [`PrefixOptions::begin_wait`].
    ///
    /// # Errors
    /// Those of [`Waiting::begin_within`].
    pub fn begin(&self, tokens: &[u64]) -> Result<Sequence, BeginError> {
        self.ask(&Ask::new(tokens))?.begin_within(self.begin_wait)
    }

    /// Looks a prompt up, and starts to read the pages that the upper tiers lack from L3. Does not
    /// wait.
    ///
    /// # Errors
    /// The prompt is empty, or longer than L1. Or the cache is closed.
    pub fn ask(&self, ask: &Ask<'_>) -> Result<Waiting, BeginError> {
        Waiting::new(self.shared.clone(), ask)
    }

    /// The cache as the hand-over of requests needs it.
    pub(crate) fn lender(&self) -> Lender {
        Lender::new(self.shared.clone())
    }

    /// The pool of L1, for the addresses of pages on a GPU.
    #[must_use]
    pub fn l1(&self) -> &L1Pool {
        self.shared.l1()
    }

    /// The pools of L1 of a component's sections, for the addresses of pages on a GPU. Empty if
    /// there is no such component.
    #[must_use]
    pub fn component_l1(&self, component: usize) -> &[L1Pool] {
        let component = self.shared.component(component);
        component.map_or(&[], |of| &of.sections)
    }

    /// Processes completions: for a caller that polls in its own loop
    /// ([`PrefixOptions::polls_itself`]).
    ///
    /// # Errors
    /// The cache is closed.
    pub fn poll(&self) -> Result<(), Closed> {
        self.shared.poll().map(drop)
    }

    /// Counters.
    ///
    /// # Errors
    /// The cache is closed.
    pub fn stats(&self) -> Result<Stats, Closed> {
        self.with_core(|core| core.stats().clone())
    }

    /// Looks at the core of the cache: sizes, counters, cached parts of prompts. Other calls of the
    /// cache wait.
    ///
    /// # Errors
    /// The cache is closed.
    pub fn with_core<R>(&self, look: impl FnOnce(&Core) -> R) -> Result<R, Closed> {
        self.shared.with_any(|cache| look(cache.core()))
    }

    /// Events since the last call, if [`Config::events`](crate::Config::events) is set.
    ///
    /// # Errors
    /// The cache is closed.
    pub fn take_events(&self) -> Result<Vec<Event>, Closed> {
        self.shared.with(Cache::take_events)
    }

    /// Evicts at least `pages` pages from L1, or as many as possible. Returns their number.
    ///
    /// # Errors
    /// The cache is closed.
    pub fn evict(&self, pages: usize) -> Result<usize, Closed> {
        self.shared.with(|cache| cache.evict(pages))
    }

    /// The model has other weights from now on, named by `tag`. Running sequences are broken. Only
    /// pages of an equal tag are matched, here and in L3: the tag is part of their keys. So a tag
    /// names the same weights for ever, in all processes that share the store.
    ///
    /// The first tag is [`Model::weights`]: an open with these weights finds the pages of that tag.
    /// After a restart, open with the weights that the engine has loaded.
    ///
    /// Pages that are on their way to L3 arrive there under the former tag. Waiting requests go on
    /// under the new one: drop a request whose prompt has words of the former weights.
    ///
    /// Report all forwards of the former weights before, or drop their sequences.
    ///
    /// # Errors
    /// The cache is closed.
    pub fn new_weights(&self, tag: &str) -> Result<(), Closed> {
        self.shared.with(|cache| cache.new_weights(tag))?;
        self.shared.has_freed();
        Ok(())
    }

    /// Drops all cached pages of L1 and L2.
    ///
    /// # Errors
    /// The cache is in use: sequences run, or work is in flight.
    pub fn reset(&self) -> Result<(), Busy> {
        // A closed cache has no pages.
        self.shared.with(Cache::reset).unwrap_or(Ok(()))
    }

    /// Waits until nothing is in flight and all kept pages are in L3, as far as L3 takes them:
    /// pages that it has refused are tried once more. Returns whether that was so before
    /// `deadline`. It is not while a forward of a sequence has not ended.
    ///
    /// # Errors
    /// The cache is closed.
    pub fn settle(&self, deadline: Instant) -> Result<bool, Closed> {
        self.shared.with(Cache::retry_failed)?;
        let is_idle = |cache: &mut Cache, _| cache.is_idle().then_some(());
        Ok(self.shared.wait(deadline, is_idle)?.is_some())
    }

    /// As [`PrefixCache::settle`], without a wait: polls once, and returns whether that is so now.
    /// For a loop that begins with [`PrefixCache::settle`] of a deadline in the past.
    ///
    /// # Errors
    /// The cache is closed.
    pub fn is_settled(&self) -> Result<bool, Closed> {
        self.shared.poll().map(|(_, is_idle)| is_idle)
    }

    /// Checks that each page and each lock has an owner. `running` are all sequences; requests that
    /// wait own none. The time grows with the pools.
    ///
    /// # Errors
    /// The first page or lock without an owner, or with two.
    pub fn audit<'s>(&self, running: impl IntoIterator<Item = &'s Sequence>) -> Result<(), Leak> {
        let requests = running.into_iter().filter_map(Sequence::request);
        let checked = self.with_core(|core| core.validate(requests));
        checked.unwrap_or(Ok(()))
    }

    /// Ends the cache: waits until kept pages are in L3, makes them durable, and closes the store.
    /// Waiting requests end, and sequences that are left can still be dropped. The last quarter of
    /// the [`PrefixOptions::close_wait`] is for the calls of L3 that are then in progress.
    ///
    /// # Errors
    /// Pages were not written in time, or not made durable; or a call of L3 has not returned. The
    /// store is closed, except under a call that has not returned.
    pub fn close(&self) -> Result<(), CloseError> {
        let deadline = after(self.close_wait);
        drop(self.poller.lock().take());
        let _warm = self.shared.with(Cache::tell_warmth);
        let is_settled = self.settle(after(self.close_wait / 4 * 3));
        let left = self.with_core(|core| (core.orders_out(), core.inserts_pending()));
        self.end(deadline)?;
        drop(self.l4.lock().take());
        if let Some(store) = self.store.lock().take() {
            // The owner may end at the same time, as another rank.
            let is_gone = |flushed: &_| matches!(flushed, Err(StoreError::OwnerGone));
            let flushed = store.steadily(deadline, is_gone, |_| store.flush());
            store.close()?;
            flushed?;
        }
        match (is_settled, left) {
            (Err(Closed::Ranks(failure)), _) => Err(failure.into()),
            (Ok(false), Ok((orders, inserts))) => Err(CloseError::Unfinished { orders, inserts }),
            _ => Ok(()),
        }
    }

    fn end(&self, deadline: Instant) -> Result<(), CloseError> {
        let stuck = self.shared.end(deadline);
        if stuck.calls == 0 {
            return Ok(());
        }
        // Their ends could wait for the calls.
        std::mem::forget((self.l4.lock().take(), self.store.lock().take()));
        Err(CloseError::Stuck(stuck))
    }
}

impl Drop for PrefixCache {
    /// Ends the cache without [`PrefixCache::close`]: waiting requests and later calls of sequences
    /// end with [`Closed`]. Waits for copies and for calls of L3 in progress, for these at most the
    /// [`PrefixOptions::close_wait`], and for nothing behind them.
    fn drop(&mut self) {
        drop(self.poller.lock().take());
        // The calls are logged and counted.
        let _stuck = self.end(after(self.close_wait));
    }
}

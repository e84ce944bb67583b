//! One server: a queue, a cache over its own L1 and L2, and one prefill at a time.
//!
//! A request starts a prefetch when it arrives. A free server takes the first request that does not
//! wait for its prefetch. It loads the pages that L2 has, and computes the rest layer by layer
//! behind the load. Its pages really exist: found pages are compared with the content that their
//! tokens define, and computed pages are written with it. Decoding is left out: a request ends with
//! its first token. Its answer is part of a prompt only when a later request of the trace contains
//! it.
//!
//! A page is named by the block of its last token, which stands for everything before, and by its
//! place in that block.

use std::collections::VecDeque;
use std::sync::Arc;

use larder_engine::PageStore;
use larder_kernels::{ChunkAt, Device, HostMemory, KvShape, Layout, Ticket, pool_bytes};
use larder_tiers::cache::{HostMemoryOptions, host_memory};
use larder_tiers::config::PrefetchPolicy;
use larder_tiers::core::{
    Declined, ExtendError, LoadBack, OpId, PrefetchId, PrefetchState, Request, Retries,
};
use larder_tiers::l3::L3;
use larder_tiers::prompt::{Prompt, Scope};
use larder_tiers::{Cache, Config, Parts};

use super::machine::{Event, Machine, ServerNumber, nanos};
use super::outcome::{Found, Served, Timing};
use super::shared::Nanos;
use crate::failure::Failure;
use crate::model::{Compute, Model, prefill_end};
use crate::trace::{self, BLOCK_TOKENS};
use crate::workload::Words;

/// Microseconds to nanoseconds.
const MICROSECOND: Nanos = 1000;

/// The parts of a server.
pub struct Build<'a> {
    /// The configuration of its cache: pools, policies, pages as they really are.
    pub config: &'a Config,
    /// Those pages.
    pub shape: &'a KvShape,
    /// The device of its L1.
    pub device: &'a Arc<dyn Device>,
    /// The store below, as L3, and as the store with which its memory is registered.
    pub l3: Option<(&'a Arc<dyn L3>, &'a dyn PageStore)>,
    /// The model that it computes.
    pub model: &'a Model,
    /// Its computing power.
    pub compute: Compute,
    /// Whether L3 receives the pages that are hot above.
    pub tells_warmth: bool,
}

/// A request that has arrived.
struct Waiting {
    prompt: Prompt,
    blocks: Vec<u64>,
    arrived: Nanos,
    prefetch: Option<PrefetchId>,
    /// No prefetch was started yet, or others have used up the limit: to be tried.
    is_postponed: bool,
    retries: Retries,
    /// The longest wait for its prefetch, until the clock has it.
    patience: Option<Nanos>,
    prefetched: usize,
}

/// The request in service.
struct Taken {
    request: Request,
    blocks: Vec<u64>,
    arrived: Nanos,
    taken: Nanos,
    load: Option<OpId>,
    found: Found,
}

#[derive(Default)]
enum Work {
    #[default]
    Nothing,
    /// It waits for room in L1.
    NoRoom(Taken),
    /// It computes, for this time.
    Prefill(Taken, Nanos),
}

/// See the module.
pub struct Server {
    number: ServerNumber,
    machine: Machine,
    cache: Cache,
    shape: KvShape,
    model: Model,
    compute: Compute,
    has_l3: bool,
    tells_warmth: bool,
    queue: VecDeque<Waiting>,
    work: Work,
    passes: u64,
    expected: Vec<u8>,
    served: Served,
}

impl Server {
    /// An idle server with empty pools.
    ///
    /// # Errors
    /// There is no memory for them, or the configuration makes no sense.
    pub fn new(
        number: ServerNumber,
        machine: &Machine,
        build: &Build<'_>,
    ) -> Result<Server, Failure> {
        let &Build {
            config,
            shape,
            device,
            model,
            compute,
            tells_warmth,
            ..
        } = build;
        let pages = config.l2_pages + 1;
        let bytes = pool_bytes(shape, pages);
        let memory = match build.l3 {
            None => HostMemory::zeroed(bytes)?,
            Some((_, store)) => {
                let options = HostMemoryOptions {
                    store: Some(store),
                    ..HostMemoryOptions::default()
                };
                let made = host_memory(bytes, &options);
                let (memory, _) = made.map_err(|error| {
                    Failure::environment(format!(
                        "no memory for L2 ({bytes} bytes): {error}; choose a larger --scale"
                    ))
                })?;
                memory
            }
        };
        let l2 = device.register(memory, Layout::PageFirstDirect, shape, pages);
        let parts = Parts {
            device: device.clone(),
            l1: device.alloc_l1(shape, config.l1_pages + 1)?,
            l2: l2?,
            l3: build.l3.map(|(l3, _)| l3.clone()),
            ranks: None,
        };
        let cache = Cache::in_time(config.clone(), parts, machine.time_of(number));
        Ok(Server {
            number,
            machine: machine.clone(),
            cache: cache?,
            shape: *shape,
            model: model.clone(),
            compute,
            has_l3: build.l3.is_some(),
            tells_warmth,
            queue: VecDeque::new(),
            work: Work::default(),
            passes: 0,
            expected: vec![0; shape.chunk_bytes() as usize],
            served: Served::default(),
        })
    }

    /// Tokens of the requests that have not got their first one.
    pub fn backlog(&self) -> usize {
        let waiting = self
            .queue
            .iter()
            .map(|waiting| waiting.prompt.words().len());
        let at_work = match &self.work {
            Work::Nothing => 0,
            Work::NoRoom(taken) | Work::Prefill(taken, _) => taken.request.prompt().words().len(),
        };
        waiting.sum::<usize>() + at_work
    }

    /// A request arrives.
    ///
    /// # Errors
    /// Its tokens are invalid.
    pub fn arrive(&mut self, request: trace::Request) -> Result<(), Failure> {
        let blocks = request.hash_ids;
        let tokens = tokens(&blocks, request.input_length);
        let prompt = self.cache.prompt(&Scope::default(), tokens);
        let prompt = prompt.map_err(|error| Failure::usage(error.to_string()))?;
        let config = self.cache.core().config();
        if prompt.words().len().div_ceil(config.page_tokens as usize) > config.l1_pages as usize {
            self.served.too_long += 1;
            return Ok(());
        }
        self.queue.push_back(Waiting {
            prompt,
            blocks,
            arrived: self.machine.now(),
            prefetch: None,
            is_postponed: self.has_l3,
            retries: Retries::default(),
            patience: None,
            prefetched: 0,
        });
        self.prefetch(self.queue.len() - 1);
        Ok(())
    }

    /// Requests the missing pages of a waiting request from L3, if it is time to try.
    fn prefetch(&mut self, at: usize) {
        let Some(waiting) = self
            .queue
            .get_mut(at)
            .filter(|waiting| waiting.is_postponed)
        else {
            return;
        };
        let is_due = waiting
            .retries
            .is_due(self.cache.core(), self.passes, at == 0);
        if !is_due {
            return;
        }
        let (l1, l2) = self.cache.core().peek(&waiting.prompt);
        let missing = waiting.prompt.pages() - l1 - l2;
        let begun = self.cache.prefetch(&mut waiting.prompt);
        waiting.is_postponed = begun == Err(Declined::L2Share);
        waiting.prefetch = begun.ok();
        let config = self.cache.core().config();
        let tokens = missing as u64 * u64::from(config.page_tokens);
        let prefetch = &config.prefetch;
        let allowed =
            prefetch.timeout_base_us + prefetch.timeout_per_1024_tokens_us * tokens / 1024;
        waiting.patience =
            (prefetch.policy == PrefetchPolicy::Timeout).then_some(allowed * MICROSECOND);
    }

    /// Continues its work, or takes the next request.
    ///
    /// # Errors
    /// The device failed.
    pub fn look(&mut self) -> Result<(), Failure> {
        self.passes += 1;
        let taken = match std::mem::take(&mut self.work) {
            work @ Work::Prefill(..) => {
                self.work = work;
                return Ok(());
            }
            Work::NoRoom(taken) => Some(taken),
            Work::Nothing => self.take_up()?,
        };
        let Some(mut taken) = taken else {
            return Ok(());
        };
        let left = taken.request.prompt().words().len() - taken.request.tokens();
        match self.cache.extend(&mut taken.request, left) {
            Ok(()) => self.prefill(taken),
            Err(ExtendError::NoRoom(_)) => {
                // Under `write_back` an evicted page is free when its copy has ended.
                self.work = Work::NoRoom(taken);
                Ok(())
            }
            Err(ExtendError::Broken(error)) => Err(error.into()),
        }
    }

    /// Starts the first request that does not wait for its prefetch.
    fn take_up(&mut self) -> Result<Option<Taken>, Failure> {
        for at in 0..self.queue.len() {
            self.prefetch(at);
            if self.is_ready(at)?
                && let Some(waiting) = self.queue.remove(at)
            {
                return self.start(waiting).map(Some);
            }
        }
        Ok(None)
    }

    fn is_ready(&mut self, at: usize) -> Result<bool, Failure> {
        let waiting = &mut self.queue[at];
        let Some(id) = waiting.prefetch else {
            return Ok(true);
        };
        match self.cache.poll_prefetch(id)? {
            PrefetchState::Waiting => {
                if let Some(patience) = waiting.patience.take() {
                    // The cache counts in microseconds, and waits until more than that has passed.
                    let at = self.machine.now() + patience + 2 * MICROSECOND;
                    self.machine.plan(at, Event::Wake(self.number));
                }
                return Ok(false);
            }
            PrefetchState::Ended(pages) => waiting.prefetched = pages,
            PrefetchState::Declined(_) | PrefetchState::Unknown => {}
        }
        waiting.prefetch = None;
        Ok(true)
    }

    fn start(&mut self, waiting: Waiting) -> Result<Taken, Failure> {
        let mut request = self.cache.start(waiting.prompt, 0);
        let l1 = request.row_and_loads().0.shared_pages() as u64;
        let (load, loaded) = match self.cache.load_back(&mut request, usize::MAX)? {
            LoadBack::Started(load, pages) => (Some(load.into()), pages),
            _ => (None, 0),
        };
        let l3 = waiting.prefetched.min(loaded);
        Ok(Taken {
            request,
            blocks: waiting.blocks,
            arrived: waiting.arrived,
            taken: self.machine.now(),
            load,
            found: Found {
                l1,
                l2: (loaded - l3) as u64,
                l3: l3 as u64,
            },
        })
    }

    /// Computes the pages that the request has not found.
    fn prefill(&mut self, taken: Taken) -> Result<(), Failure> {
        let row = taken.request.row_and_loads().0;
        let shared = row.shared_pages();
        let tokens = row.tokens();
        let past = shared * self.shape.page_tokens() as usize;
        for page in 0..shared {
            let is_right = self.is_right(&taken, page)?;
            self.served.wrong_pages += u64::from(!is_right);
        }
        for page in shared..taken.request.prompt().pages() {
            self.write(&taken, page)?;
        }
        let computed = (tokens - past) as u64;
        let layer = self
            .model
            .layer_seconds(&self.compute, computed, past as u64);
        let layer = nanos(layer);
        let load = taken
            .load
            .and_then(|load| self.machine.take_load(self.number, load));
        let end = prefill_end(self.machine.now(), self.model.layers, layer, load);
        self.machine.plan(end, Event::PrefillEnds(self.number));
        self.served.input_tokens += tokens as u64;
        self.served.computed_tokens += computed;
        self.served.found.l1 += taken.found.l1;
        self.served.found.l2 += taken.found.l2;
        self.served.found.l3 += taken.found.l3;
        self.work = Work::Prefill(taken, layer * u64::from(self.model.layers));
        Ok(())
    }

    /// Every chunk of a page: its place, and its expected content.
    fn chunks(
        &self,
        blocks: &[u64],
        page: usize,
    ) -> impl Iterator<Item = (ChunkAt, Words)> + use<> {
        let last = (page + 1) * self.shape.page_tokens() as usize - 1;
        let block = blocks[last / BLOCK_TOKENS as usize];
        let (parts, layers) = (self.shape.parts(), self.shape.layers());
        let number = u32::try_from(page).unwrap_or(u32::MAX);
        let pairs = (0..parts).flat_map(move |part| (0..layers).map(move |layer| (part, layer)));
        pairs.map(move |(part, layer)| {
            let name = [block, last as u64, part.into(), layer.into()];
            let at = ChunkAt {
                part,
                layer,
                page: number,
            };
            (at, Words::named(name))
        })
    }

    fn is_right(&mut self, taken: &Taken, page: usize) -> Result<bool, Failure> {
        let mut is_right = true;
        for (at, words) in self.chunks(&taken.blocks, page) {
            self.cache
                .read_chunk(&taken.request, at, &mut self.expected)?;
            is_right &= words.match_part(&self.expected);
        }
        Ok(is_right)
    }

    fn write(&mut self, taken: &Taken, page: usize) -> Result<(), Failure> {
        for (at, words) in self.chunks(&taken.blocks, page) {
            words.fill(&mut self.expected);
            self.cache.write_chunk(&taken.request, at, &self.expected)?;
        }
        Ok(())
    }

    /// The first token of the current request is complete.
    pub fn prefill_ended(&mut self) {
        let Work::Prefill(taken, computed) = std::mem::take(&mut self.work) else {
            return;
        };
        self.served.timings.push(Timing {
            queued: taken.taken - taken.arrived,
            service: self.machine.now() - taken.taken,
            computed,
        });
        self.cache.finish(taken.request, true, &Ticket::done());
        if self.tells_warmth {
            self.cache.tell_warmth();
        }
    }

    /// Processes ended orders, and waits until the device and L3 have finished all orders. The
    /// clock advances only then.
    ///
    /// # Errors
    /// The cache is broken.
    pub fn settle(&mut self) -> Result<(), Failure> {
        loop {
            let ended = self.cache.poll()?;
            if ended == 0 && self.machine.is_settled(self.number) {
                return Ok(());
            }
            if ended == 0 {
                std::thread::yield_now();
            }
        }
    }

    /// Adds the server's result, when nothing is in flight. Everything still held or missing then
    /// has leaked.
    pub fn close(mut self, all: &mut Served) {
        let mut served = std::mem::take(&mut self.served);
        let core = self.cache.core();
        let (l1_pages, l2_pages) = (core.config().l1_pages, core.config().l2_pages);
        let valid = core.validate([]).map_err(|leak| leak.to_string());
        let reset = self.cache.reset().map_err(|busy| busy.to_string());
        served
            .leaks
            .extend([valid, reset].into_iter().filter_map(Result::err));
        let (l1_free, l2_free) = self.cache.core().free_pages();
        served.leaked_pages = u64::from(l1_pages - l1_free) + u64::from(l2_pages - l2_free);
        all.add(served, self.cache.stats());
    }
}

/// The tokens of a request's blocks. An id stands for a whole prefix, so its number is enough. The
/// last block may be partly filled.
fn tokens(blocks: &[u64], input_length: Option<u64>) -> impl Iterator<Item = u64> + '_ {
    let block = u64::from(BLOCK_TOKENS);
    let whole = blocks.len() as u64 * block;
    // A length that contradicts the blocks is ignored.
    let length = input_length.filter(|length| *length <= whole && length + block > whole);
    let ids = blocks.iter().flat_map(move |id| (0..block).map(|_| *id));
    ids.take(usize::try_from(length.unwrap_or(whole)).unwrap_or(usize::MAX))
}

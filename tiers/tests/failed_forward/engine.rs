//! A small engine over the cache: a model in which every output token depends on all bytes of its
//! KV, and forwards that fail.
//!
//! The model has two layers and a row of eight bytes per token and part. An output token depends on
//! the K and V rows of all earlier positions, as stored in L1, so one wrong byte changes the
//! output. [`uncached`] is the same model without a cache.
//!
//! Forwards are computed when they are submitted; their tickets settle later, in any order. A
//! failed forward has written garbage, and all results computed from it in the meantime are garbage
//! too. Output is accepted by the rules of the cache's documentation: after the tickets have
//! settled successfully and a poll, and if the request is not broken.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use larder_engine::{GetPage, PutPage};
use larder_format::PageKey;
use larder_kernels::{
    ChunkAt, Device, DeviceError, Direction, HostDevice, HostMemory, KvShape, Layout, Promise,
    Ticket, pool_bytes,
};
use larder_tiers::config::{Config, L3Write, PrefetchPolicy, WritePolicy};
use larder_tiers::core::{ExtendError, LoadBack, PrefetchId, PrefetchState, Request};
use larder_tiers::l3::L3;
use larder_tiers::prompt::Scope;
use larder_tiers::tree::EvictionOrder;
use larder_tiers::{Cache, Parts};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

const LAYERS: u32 = 2;
const PARTS: u32 = 2;
const ROW: usize = 8;

/// Output tokens per request.
const ANSWER: usize = 5;

fn mix(a: u64, b: u64) -> u64 {
    let z = (a ^ b.rotate_left(29)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (z ^ z >> 31).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

/// Computes one token and returns the next. `row` reads the K or V row of an earlier position,
/// `keep` stores the rows of this position.
fn step(
    token: u64,
    position: usize,
    mut row: impl FnMut(u32, u32, usize) -> u64,
    mut keep: impl FnMut(u32, u32, u64),
) -> u64 {
    let mut hidden = mix(token, position as u64);
    for layer in 0..LAYERS {
        for part in 0..PARTS {
            keep(layer, part, mix(hidden, u64::from(layer * PARTS + part)));
        }
        for before in 0..position {
            for part in 0..PARTS {
                hidden = mix(hidden, row(layer, part, before));
            }
        }
    }
    hidden % 5
}

/// Rows by layer, part and position.
type Rows = HashMap<(u32, u32, usize), u64>;

/// The output for a prompt, computed without a cache, and the rows of all positions.
fn uncached(prompt: &[u64]) -> (Vec<u64>, Rows) {
    let mut rows = Rows::new();
    let mut tokens = prompt.to_vec();
    for position in 0..prompt.len() + ANSWER - 1 {
        let mut own = Vec::new();
        let word = step(
            tokens[position],
            position,
            |layer, part, before| rows[&(layer, part, before)],
            |layer, part, row| own.push((layer, part, row)),
        );
        for (layer, part, row) in own {
            rows.insert((layer, part, position), row);
        }
        if position + 1 >= prompt.len() {
            tokens.push(word);
        }
    }
    (tokens.split_off(prompt.len()), rows)
}

/// An L3 in memory that outlives its caches.
#[derive(Default)]
pub struct Pages(Mutex<HashMap<PageKey, Vec<u8>>>);

impl L3 for Pages {
    fn longest_prefix(&self, keys: &[PageKey]) -> usize {
        let pages = self.0.lock().unwrap();
        keys.iter()
            .take_while(|key| pages.contains_key(key))
            .count()
    }

    fn get(&self, asked: &mut [GetPage<'_, '_>]) -> usize {
        let pages = self.0.lock().unwrap();
        let mut found = 0;
        for page in asked {
            let Some(mut bytes) = pages.get(&page.key).map(Vec::as_slice) else {
                break;
            };
            for part in page.parts.iter_mut() {
                let (own, rest) = bytes.split_at(part.len());
                part.copy_from_slice(own);
                bytes = rest;
            }
            found += 1;
        }
        found
    }

    fn put(&self, given: &[PutPage<'_>]) -> usize {
        let mut pages = self.0.lock().unwrap();
        for page in given {
            let bytes = page.parts.iter().flat_map(|part| part.iter().copied());
            // As in the store: an existing page is not written again.
            pages.entry(page.key).or_insert_with(|| bytes.collect());
        }
        given.len()
    }

    fn touch(&self, _: &[PageKey]) {}
}

/// A forward whose ticket has not settled.
struct Forward {
    number: u64,
    promise: Promise,
    is_bad: bool,
}

struct Running {
    request: Request,
    prompt: usize,
    tokens: Vec<u64>,
    /// Number of tokens whose KV is computed.
    computed: usize,
    /// The ticket of the newest forward. It covers all forwards since the last insert.
    ticket: Ticket,
    /// The number of that forward.
    forward: u64,
    /// A forward since the last insert has failed, so the later ones fail too.
    is_bad: bool,
}

/// Events of a run.
#[derive(Default)]
pub struct Seen {
    pub answers: u64,
    pub restarts: u64,
    pub failed_pages: u64,
    pub l3_hits: u64,
    pub loaded: u64,
}

pub struct Engine {
    dice: Pcg64Mcg,
    cache: Cache,
    device: Arc<HostDevice>,
    shape: KvShape,
    /// Prompts with their expected output.
    prompts: Vec<(Vec<u64>, Vec<u64>)>,
    running: Vec<Running>,
    forwards: Vec<Forward>,
    /// Number of forwards so far.
    submitted: u64,
    prefetches: Vec<PrefetchId>,
    seen: Seen,
    /// One forward in this many fails; none if 0.
    bad_forwards: usize,
}

impl Engine {
    /// An engine over this L3. The seed determines the whole run. Engines of the same `family` have
    /// the same prompts.
    pub fn new(seed: u64, family: u64, l3: Arc<Pages>) -> Engine {
        let mut dice = Pcg64Mcg::seed_from_u64(seed);
        let shape = KvShape::mha(LAYERS, 1, ROW as u32 / 2, 2, 2).unwrap();
        let page_bytes = u64::from(shape.page_bytes());
        let mut config = Config::new(2, page_bytes, dice.random_range(24..60), 60);
        config.write_policy = WritePolicy::ALL[dice.random_range(0..3)];
        config.eviction = EvictionOrder::ALL[dice.random_range(0..6)];
        config.l3_write =
            [L3Write::OnBackup, L3Write::Selective, L3Write::Late][dice.random_range(0..3)];
        if config.l3_write == L3Write::Late {
            config.write_policy = WritePolicy::WriteThrough;
            config.late_percent = [20, 50, 100][dice.random_range(0..3)];
        }
        config.load_threshold_tokens = 1;
        config.prefetch.threshold_tokens = 1;
        config.prefetch.policy = PrefetchPolicy::WaitComplete;
        config.prefetch.batch_pages = 2;
        let device = Arc::new(HostDevice::stepped(Box::new(|_| Ok(()))));
        let memory = HostMemory::zeroed(pool_bytes(&shape, config.l2_pages + 1)).unwrap();
        let layout = Layout::PageFirstDirect;
        let l2 = device.register(memory, layout, &shape, config.l2_pages + 1);
        let parts = Parts {
            l1: device.alloc_l1(&shape, config.l1_pages + 1).unwrap(),
            l2: l2.unwrap(),
            device: device.clone(),
            l3: Some(l3),
            ranks: None,
        };
        let mut family = Pcg64Mcg::seed_from_u64(family);
        let document: Vec<u64> = (0..12).map(|_| family.random_range(0..5)).collect();
        let prompts = (0..4).map(|_| {
            let shared = family.random_range(1..document.len());
            let own = family.random_range(1..5);
            let own = (0..own).map(|_| family.random_range(0..5));
            let prompt: Vec<u64> = document[..shared].iter().copied().chain(own).collect();
            let (words, _) = uncached(&prompt);
            (prompt, words)
        });
        Engine {
            prompts: prompts.collect(),
            cache: Cache::new(config, parts).unwrap(),
            device,
            shape,
            running: Vec::new(),
            forwards: Vec::new(),
            submitted: 0,
            prefetches: Vec::new(),
            seen: Seen::default(),
            bad_forwards: [0, 4, 20, 20][dice.random_range(0..4)],
            dice,
        }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.dice.random_range(0..bound)
    }

    fn copy(&mut self) {
        for direction in [Direction::Load, Direction::Store] {
            while self.device.step(direction) {}
        }
    }

    /// Runs this number of random steps, completes all requests, and ends all work. Checks that
    /// nothing is left over and that L3 has the right bytes.
    pub fn play(mut self, steps: usize, l3: &Pages) -> Seen {
        self.warm_up();
        for _ in 0..steps {
            self.step();
            let running = self.running.iter().map(|running| &running.request);
            self.cache.core().validate(running).unwrap();
        }
        while let Some(at) = self.running.len().checked_sub(1) {
            self.settle_all();
            self.advance(at);
        }
        self.settle_all();
        for id in std::mem::take(&mut self.prefetches) {
            self.cache.cancel_prefetch(id);
        }
        self.drain();
        assert_eq!(self.cache.core().inserts_pending(), 0);
        self.cache.reset().unwrap();
        let config = self.cache.core().config();
        let all = (config.l1_pages, config.l2_pages);
        assert_eq!(self.cache.core().free_pages(), all, "pages are lost");
        self.check(l3);
        let stats = self.cache.stats();
        self.seen.failed_pages = stats.forward_failed;
        self.seen.l3_hits = stats.l3_hits;
        self.seen.loaded = stats.loaded;
        self.seen
    }

    /// Loads the pages that L3 has.
    fn warm_up(&mut self) {
        for at in 0..self.prompts.len() {
            let tokens = self.prompts[at].0.clone();
            let mut prompt = self.cache.prompt(&Scope::default(), tokens).unwrap();
            if let Ok(id) = self.cache.prefetch(&mut prompt) {
                self.drain();
                self.cache.poll_prefetch(id).unwrap();
            }
        }
    }

    fn drain(&mut self) {
        while self.cache.core().orders_out() > 0 {
            self.copy();
            if self.cache.poll().unwrap() == 0 {
                std::thread::yield_now();
            }
        }
    }

    /// Checks that every page of L3 has the bytes of its prompt.
    fn check(&mut self, l3: &Pages) {
        let pages = l3.0.lock().unwrap();
        for (prompt, words) in &self.prompts {
            let (_, rows) = uncached(prompt);
            let tokens = prompt.iter().chain(words).copied();
            let size = std::num::NonZero::new(2).unwrap();
            let units = larder_format::TokenUnits::Single;
            let keys = larder_format::page_keys(&tokens.collect::<Vec<_>>(), size, None, units);
            for (page, key) in keys.iter().enumerate() {
                let Some(found) = pages.get(key) else {
                    continue;
                };
                let mut expected = Vec::new();
                for part in 0..PARTS {
                    for layer in 0..LAYERS {
                        let positions = [2 * page, 2 * page + 1];
                        let row = |position| rows.get(&(layer, part, position));
                        expected.extend(positions.map(|at| row(at).copied()));
                    }
                }
                if expected.contains(&None) {
                    // The KV of the last output token is not known here; a longer prompt has
                    // computed the page.
                    continue;
                }
                let (found, _) = found.as_chunks::<ROW>();
                let found: Vec<_> = found
                    .iter()
                    .map(|row| Some(u64::from_le_bytes(*row)))
                    .collect();
                assert_eq!(found, expected, "page {page} of {prompt:?} in L3");
            }
        }
    }

    fn step(&mut self) {
        match self.below(16) {
            0..3 => self.ask(),
            3..9 if !self.running.is_empty() => {
                let at = self.below(self.running.len());
                self.advance(at);
            }
            9..12 => {
                if !self.forwards.is_empty() {
                    let at = self.below(self.forwards.len());
                    self.settle(at);
                }
            }
            12 => {
                let pages = self.below(8);
                self.cache.evict(pages);
            }
            13 => self.prefetch(),
            14 => drop(self.cache.poll().unwrap()),
            _ => {
                self.copy();
                self.cache.poll().unwrap();
            }
        }
    }

    fn settle(&mut self, at: usize) {
        let Forward {
            promise, is_bad, ..
        } = self.forwards.swap_remove(at);
        match is_bad {
            true if self.below(2) == 0 => drop(promise),
            true => promise.settle(Err(DeviceError::Closed)),
            false => promise.settle(Ok(())),
        }
    }

    fn settle_all(&mut self) {
        while !self.forwards.is_empty() {
            let at = self.below(self.forwards.len());
            self.settle(at);
        }
        self.copy();
        self.cache.poll().unwrap();
    }

    fn ask(&mut self) {
        if self.running.len() == 4 {
            return;
        }
        let prompt = self.below(self.prompts.len());
        let tokens = self.prompts[prompt].0.clone();
        let cached = self.cache.prompt(&Scope::default(), tokens.iter().copied());
        let request = self.cache.start(cached.unwrap(), 0);
        let running = self.begin(request, prompt, tokens);
        self.running.push(running);
    }

    fn begin(&mut self, mut request: Request, prompt: usize, tokens: Vec<u64>) -> Running {
        let loaded = self.cache.load_back(&mut request, 100);
        if matches!(loaded, Ok(LoadBack::Started(..))) {
            self.copy();
        }
        Running {
            computed: request.tokens(),
            request,
            prompt,
            tokens,
            ticket: Ticket::done(),
            forward: 0,
            is_bad: false,
        }
    }

    fn prefetch(&mut self) {
        if let Some(id) = self.prefetches.pop() {
            if self.cache.poll_prefetch(id).unwrap() == PrefetchState::Waiting {
                self.prefetches.push(id);
            }
            return;
        }
        let at = self.below(self.prompts.len());
        let tokens = self.prompts[at].0.clone();
        let mut prompt = self.cache.prompt(&Scope::default(), tokens).unwrap();
        self.prefetches.extend(self.cache.prefetch(&mut prompt));
    }

    /// One step of a request: restart it, finish it, or compute a chunk.
    fn advance(&mut self, at: usize) {
        if self.cache.is_broken(&self.running[at].request) {
            return self.restart(at);
        }
        let wanted = self.prompts[self.running[at].prompt].0.len() + ANSWER;
        if self.running[at].tokens.len() == wanted {
            return self.answer(at);
        }
        let running = &self.running[at];
        let left = running.tokens.len() - running.computed;
        // Slots that it got earlier and has not used, behind a load.
        let chunk = match running.request.tokens() - running.computed {
            0 => 1 + self.below(left),
            given => given,
        };
        let running = &self.running[at];
        let slots = running.computed + chunk - running.request.tokens();
        match self.cache.extend(&mut self.running[at].request, slots) {
            Ok(()) => {}
            Err(ExtendError::Broken(_)) => return self.restart(at),
            Err(ExtendError::NoRoom(_)) => {
                // The other requests continue. If all are blocked, one is finished.
                let running = self.running.swap_remove(at);
                self.cache.finish(running.request, true, &running.ticket);
                return;
            }
        }
        let last = LAYERS - 1;
        match self.cache.pages(&self.running[at].request) {
            Ok(pages) if pages.layer(last).unwrap().is_some() => {}
            Ok(_) => {
                // A load waits for forwards.
                self.settle_all();
                return;
            }
            Err(_) => return self.restart(at),
        }
        self.forward(at, chunk);
        if self.below(3) > 0 {
            let running = &mut self.running[at];
            if self
                .cache
                .insert(&mut running.request, &running.ticket)
                .is_ok()
            {
                running.is_bad = false;
            }
        }
    }

    /// Computes a chunk of a request, which may fail.
    fn forward(&mut self, at: usize, chunk: usize) {
        let fails = self.bad_forwards > 0 && self.below(self.bad_forwards) == 0;
        let is_bad = self.running[at].is_bad || fails;
        let wrong = if is_bad { 0x5a5a } else { 0 };
        for _ in 0..chunk {
            let running = &self.running[at];
            let position = running.computed;
            let mut own = BTreeMap::new();
            let mut chunks = HashMap::new();
            let word = step(
                running.tokens[position],
                position,
                |layer, part, before| self.row(&mut chunks, running, layer, part, before),
                |layer, part, row| own.extend([((layer, part), row ^ wrong)]),
            );
            for ((layer, part), row) in own {
                self.keep(at, layer, part, position, row);
            }
            let running = &mut self.running[at];
            running.computed += 1;
            if running.computed == running.tokens.len() {
                running.tokens.push(word);
                let extended = self.cache.extend_prompt(&mut running.request, [word]);
                extended.unwrap();
            }
        }
        let (promise, ticket) = Ticket::promised();
        self.submitted += 1;
        let number = self.submitted;
        let running = &mut self.running[at];
        running.is_bad = is_bad;
        running.ticket = ticket;
        running.forward = number;
        self.forwards.push(Forward {
            number,
            promise,
            is_bad,
        });
    }

    fn row(
        &self,
        chunks: &mut HashMap<(u32, u32, usize), Vec<u8>>,
        running: &Running,
        layer: u32,
        part: u32,
        position: usize,
    ) -> u64 {
        let chunk = chunks
            .entry((layer, part, position / 2))
            .or_insert_with(|| {
                let page = (position / 2) as u32;
                let mut chunk = vec![0; self.shape.chunk_bytes() as usize];
                let at = ChunkAt { part, layer, page };
                self.cache
                    .read_chunk(&running.request, at, &mut chunk)
                    .unwrap();
                chunk
            });
        let (rows, _) = chunk.as_chunks::<ROW>();
        u64::from_le_bytes(rows[position % 2])
    }

    fn keep(&mut self, at: usize, layer: u32, part: u32, position: usize, row: u64) {
        let request = &self.running[at].request;
        let page = (position / 2) as u32;
        let at = ChunkAt { part, layer, page };
        let mut chunk = vec![0; self.shape.chunk_bytes() as usize];
        self.cache.read_chunk(request, at, &mut chunk).unwrap();
        let (rows, _) = chunk.as_chunks_mut::<ROW>();
        rows[position % 2] = row.to_le_bytes();
        self.cache.write_chunk(request, at, &chunk).unwrap();
    }

    /// Restarts a request that cannot continue, from its prompt.
    fn restart(&mut self, at: usize) {
        self.seen.restarts += 1;
        let running = self.running.swap_remove(at);
        let tokens = self.prompts[running.prompt].0.clone();
        let request = if self.below(2) == 0 {
            self.cache.finish(running.request, true, &running.ticket);
            let prompt = self.cache.prompt(&Scope::default(), tokens.iter().copied());
            self.cache.start(prompt.unwrap(), 0)
        } else {
            self.cache
                .restart(running.request, tokens.len(), &running.ticket)
        };
        let running = self.begin(request, running.prompt, tokens);
        self.running.push(running);
    }

    /// A request has its complete output. It is accepted when all forwards up to its last one have
    /// ended successfully.
    fn answer(&mut self, at: usize) {
        let running = &mut self.running[at];
        let is_before = |forward: &Forward| forward.number <= running.forward;
        if self.forwards.iter().any(is_before) {
            return;
        }
        let inserted = self.cache.insert(&mut running.request, &running.ticket);
        if inserted.is_err() {
            return self.restart(at);
        }
        self.cache.poll().unwrap();
        if self.cache.is_broken(&self.running[at].request) {
            return self.restart(at);
        }
        let running = self.running.swap_remove(at);
        let (prompt, words) = &self.prompts[running.prompt];
        let found = &running.tokens[prompt.len()..];
        assert_eq!(
            found, words,
            "words of {prompt:?} differ from the uncached run"
        );
        self.seen.answers += 1;
        let keep = self.below(4) > 0;
        self.cache.finish(running.request, keep, &running.ticket);
    }
}

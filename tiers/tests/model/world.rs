//! A model of the core's environment: requests with forwards, and a device and an L3 that answer
//! late, in any order, wrongly or never.
//!
//! The content of a page is the key of its tokens, computed here and not by the core; poison is not
//! a content. Every copy and every forward checks its source and its destination. Events report the
//! pages that enter and leave each tier; a match must find exactly the resulting sets.
//!
//! Forwards run in submission order. Some fail: they write some of their pages, or none. The core
//! is notified of each end later, in any order. A page is tainted if a failed forward wrote it, or
//! if its own forward read tainted pages. Once the core knows of that failure, no match finds the
//! page, no copy uses it, and requests that hold it are broken.

mod device;
mod forwards;
mod late;
mod tenants;
mod truncate;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::num::NonZeroUsize;

use larder_format::{PageKey, TokenUnits, namespace_seed, page_keys};
use larder_tiers::config::{Config, L3Write, PrefetchPolicy, WritePolicy};
use larder_tiers::core::{
    Core, Event, Fence, LoadBack, OpId, Order, PrefetchId, PrefetchState, Request, RequestId,
    TierName,
};
use larder_tiers::prompt::Scope;
use larder_tiers::runs::{Runs, Tier};
use larder_tiers::tree::EvictionOrder;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

type Content = Option<PageKey>;

/// Number of prompts that are requested again.
const RECENT_MAX: usize = 8;

/// How an L3 takes pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    Takes,
    Refuses,
    RefusesForAWhile,
}

/// A request with its state in the model.
struct Running {
    request: Request,
    tokens: Vec<u64>,
    scope: Scope,
    counted: usize,
    /// The newest forward of the request, and the forwards that it was inserted with.
    forwards: u64,
    inserted_with: Vec<u64>,
    /// Its forwards since its last insert. The next ticket covers all of them.
    since_insert: Vec<u64>,
    /// Its partly filled page, with the mark of the rows that a truncation has copied into it.
    copied: Option<(u32, PageKey)>,
    /// It was inserted with a forward that the core knows to have failed, or held pages tainted by
    /// such a forward.
    must_break: bool,
    may_break: bool,
}

/// A forward pass that has been submitted but has not run.
struct Forward {
    fence: u64,
    /// The forwards of its request since the previous insert. This forward fails if any of them has
    /// failed.
    since: Vec<u64>,
    /// The partly filled page that it continues.
    goes_on: Option<u32>,
    reads: Vec<(u32, PageKey)>,
    writes: Vec<(u32, Content)>,
    loads: Vec<OpId>,
}

impl Forward {
    fn touches(&self, page: u32) -> bool {
        let reads = self.reads.iter().any(|(of, _)| *of == page);
        reads || self.writes.iter().any(|(of, _)| *of == page)
    }
}

struct Flight {
    order: Order,
    /// The contents of its source at the start; `None` before.
    begun: Option<Vec<Content>>,
}

pub struct World {
    dice: Pcg64Mcg,
    core: Core,
    page_tokens: usize,
    l1: Vec<Content>,
    l2: Vec<Content>,
    l3: HashSet<PageKey>,
    flights: BTreeMap<OpId, Flight>,
    running: Vec<Running>,
    prefetches: Vec<PrefetchId>,
    recent: Vec<(Scope, Vec<u64>)>,
    forwards: Vec<Forward>,
    fence: u64,
    fence_passed: u64,
    /// Forwards that have run but are not known to the core, with their success.
    ran: BTreeMap<u64, bool>,
    /// Failed forwards that the core knows of.
    known_failed: HashSet<u64>,
    /// Forwards that have run and failed.
    failed: HashSet<u64>,
    /// For a forward, the later forward whose ticket covered it at an insert.
    speaks: HashMap<u64, u64>,
    /// L1 pages that the tree took over, with the forward and the request of the insert.
    inserted: HashMap<u32, (u64, RequestId)>,
    /// The requests that were inserted with a forward.
    inserts: HashMap<u64, HashSet<RequestId>>,
    /// Tainted L1 pages, with the failed forward.
    taint: HashMap<u32, u64>,
    /// The tag of the weights, once they were replaced.
    weights: Option<String>,
    /// The scope of the request that last got an L1 page.
    tenants: HashMap<u32, Scope>,
    failed_loads: HashSet<OpId>,
    loads_out: HashSet<OpId>,
    told: BTreeMap<TierName, HashSet<PageKey>>,
    loading: HashMap<OpId, Vec<PageKey>>,
    /// Pages that L3 was asked to store late.
    offered: HashSet<PageKey>,
    counts: HashMap<PageKey, u32>,
    /// How L3 takes pages, and whether it refuses all of them now.
    l3_mood: Mood,
    l3_refuses: bool,
    /// Failed orders for a page since it has entered the tier above: to L2 and to L3, with the
    /// progress at the first.
    failures: HashMap<(TierName, PageKey), (u32, u64)>,
    /// Number of inserts, and of pages that L3 has taken.
    progress: u64,
    /// Failure probability of copies and L3, and of forwards.
    faults: f64,
    forward_faults: f64,
    /// Steps of the device and L3 at a time.
    device_speed: u32,
    now: u64,
    pub ops: u64,
}

fn numbers<T: Tier>(runs: &Runs<T>) -> Vec<usize> {
    runs.page_numbers().map(|page| page as usize).collect()
}

impl World {
    pub fn new(seed: u64) -> World {
        let mut dice = Pcg64Mcg::seed_from_u64(seed);
        let page_tokens = [1, 2, 4][dice.random_range(0..3)];
        let mut config = Config::new(
            page_tokens,
            4096,
            dice.random_range(6..60),
            dice.random_range(0..80),
        );
        config.write_policy = WritePolicy::ALL[dice.random_range(0..3)];
        config.eviction = EvictionOrder::ALL[dice.random_range(0..6)];
        config.l3_write = [
            L3Write::OnBackup,
            L3Write::Selective,
            L3Write::Late,
            L3Write::Never,
        ][dice.random_range(0..4)];
        config.late_percent = [0, 20, 50, 100][dice.random_range(0..4)];
        config.l3_queue_bytes_max = 4096 * dice.random_range(1..60);
        config.load_threshold_tokens = dice.random_range(0..4);
        config.loads_max = dice.random_range(3..6);
        config.prefetch.policy = PrefetchPolicy::ALL[dice.random_range(0..3)];
        config.prefetch.threshold_tokens = dice.random_range(0..3);
        config.prefetch.batch_pages = dice.random_range(1..6);
        config.prefetch.l2_percent_max = dice.random_range(20..=100);
        config.prefetch.timeout_base_us = 50;
        config.events = true;
        let faults = [0.0, 0.05, 0.3][dice.random_range(0..3)];
        let forward_faults = [0.0, 0.02, 0.2][dice.random_range(0..3)];
        let l3_mood = [
            Mood::Takes,
            Mood::Takes,
            Mood::Refuses,
            Mood::RefusesForAWhile,
        ][dice.random_range(0..4)];
        World {
            page_tokens: page_tokens as usize,
            l1: vec![None; config.l1_pages as usize + 1],
            l2: vec![None; config.l2_pages as usize + 1],
            l3: HashSet::new(),
            core: Core::new(config).unwrap(),
            flights: BTreeMap::new(),
            running: Vec::new(),
            prefetches: Vec::new(),
            recent: Vec::new(),
            forwards: Vec::new(),
            fence: 0,
            fence_passed: 0,
            ran: BTreeMap::new(),
            known_failed: HashSet::new(),
            failed: HashSet::new(),
            inserted: HashMap::new(),
            inserts: HashMap::new(),
            speaks: HashMap::new(),
            taint: HashMap::new(),
            tenants: HashMap::new(),
            weights: None,
            failed_loads: HashSet::new(),
            loads_out: HashSet::new(),
            told: [TierName::L1, TierName::L2, TierName::L3]
                .map(|tier| (tier, HashSet::new()))
                .into(),
            loading: HashMap::new(),
            offered: HashSet::new(),
            counts: HashMap::new(),
            l3_mood,
            l3_refuses: l3_mood == Mood::Refuses,
            failures: HashMap::new(),
            progress: 0,
            faults,
            forward_faults,
            device_speed: [1, 3][dice.random_range(0..2)],
            now: 0,
            ops: 0,
            dice,
        }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.dice.random_range(0..bound)
    }

    fn is_bad(&mut self) -> bool {
        self.faults > 0.0 && self.dice.random_bool(self.faults)
    }

    /// The core's counters.
    pub fn stats(&self) -> serde_json::Value {
        serde_json::to_value(self.core.stats()).unwrap()
    }

    /// Runs this number of random operations. From time to time ends all work, after which only L3
    /// has pages.
    pub fn play(&mut self, ops: u64) {
        while self.ops < ops {
            for _ in 0..self.below(400) {
                self.step();
                self.ops += 1;
                self.settle();
            }
            self.rest();
        }
    }

    fn step(&mut self) {
        if self.l3_mood == Mood::RefusesForAWhile && self.below(100) == 0 {
            self.l3_refuses = !self.l3_refuses;
        }
        match self.below(100) {
            0..10 => self.start(),
            10..18 => self.load_back(),
            18..34 => self.forward(),
            34..38 => self.finish(),
            38..41 => self.truncate(),
            41..43 => {
                let pages = [4, 4, 4, 50][self.below(4)];
                self.core.evict(pages);
            }
            43..50 => self.prefetch(),
            50..55 => self.poll_prefetch(),
            55..80 => (0..self.device_speed).for_each(|_| self.run_device()),
            80..88 => {
                self.run_forward();
                self.run_forward();
            }
            88..96 => (0..3).for_each(|_| self.report_forward()),
            96 => self.core.tell_warmth(),
            97 => {
                if self.below(10) == 0 {
                    self.retry_failed();
                } else if self.below(6) == 0 {
                    self.new_weights();
                }
            }
            98 => {
                let is_used = |running: &Running| running.request.locks() != (0, 0);
                let is_idle = !self.running.iter().any(is_used) && self.core.orders_out() == 0;
                if self.below(10) == 0 {
                    assert!(
                        self.core.reset().is_err() || is_idle,
                        "reset dropped pages in use"
                    );
                }
            }
            _ => self.peek(),
        }
    }

    /// Ends the pauses of all failed copies, which starts their count anew.
    fn retry_failed(&mut self) {
        self.failures.clear();
        self.core.retry_failed();
    }

    /// Counts a failed order for pages. Attempts follow progress only, each further one twice as
    /// much. An eviction that needs room orders copies without a pause.
    fn count_failure(&mut self, to: TierName, keys: &[PageKey]) {
        let config = self.core.config();
        let is_paused = match to {
            TierName::L2 => config.write_policy != WritePolicy::WriteBack,
            _ => config.l3_write != L3Write::Late,
        };
        // Only the first page is known to have failed: those behind it may not have been tried.
        let Some(key) = keys.first().filter(|_| is_paused) else {
            return;
        };
        let progress = self.progress;
        let (count, first) = self.failures.entry((to, *key)).or_insert((0, progress));
        *count += 1;
        let most = 2 + (progress - *first + 1).ilog2();
        assert!(
            *count <= most,
            "{key} failed {count} times, with progress {progress} since {first}"
        );
    }

    /// Takes orders and events, and runs all checks.
    fn settle(&mut self) {
        while let Some(order) = self.core.next_order() {
            self.take_order(order);
        }
        self.take_events();
        let requests = self.running.iter().map(|running| &running.request);
        if let Err(leak) = self.core.validate(requests) {
            panic!("{leak}");
        }
        for running in &self.running {
            let is_broken = self.core.is_broken(&running.request);
            assert!(
                is_broken || !running.must_break,
                "a request continues with pages of a failed forward"
            );
            assert!(
                !is_broken || running.may_break || self.has_failed_load(&running.request),
                "a request is broken and nothing of it has failed"
            );
        }
    }

    fn take_order(&mut self, order: Order) {
        let id = match &order {
            Order::Touch { keys } => {
                assert!(!keys.is_empty());
                return;
            }
            Order::BackUp { id, .. }
            | Order::Put { id, .. }
            | Order::Exists { id, .. }
            | Order::Get { id, .. } => *id,
            Order::Load { id, l1, .. } => {
                let is_filled = |page: &u32| l1.page_numbers().any(|of| of == *page);
                self.inserted.retain(|page, _| !is_filled(page));
                self.loads_out.insert(*id);
                *id
            }
            _ => panic!("{order:?} of a core without tail pools"),
        };
        if let Order::Put { keys, parent, .. } = &order {
            self.check_put(keys, *parent);
            let known = &self.told[&TierName::L3];
            assert!(
                !keys.iter().any(|key| known.contains(key)),
                "L3 is given pages that it has"
            );
        }
        let flight = Flight { order, begun: None };
        assert!(
            self.flights.insert(id, flight).is_none(),
            "two orders have one number"
        );
    }

    fn take_events(&mut self) {
        for event in self.core.take_events() {
            self.take_event(event);
        }
    }

    fn take_event(&mut self, event: Event) {
        match event {
            Event::Stored { tier, keys, .. } => {
                for key in keys {
                    self.failures.remove(&(tier, key));
                    let is_new = self.told.get_mut(&tier).unwrap().insert(key);
                    assert!(is_new || tier == TierName::L3, "{tier:?} has {key} already");
                    let config = self.core.config();
                    if tier == TierName::L2
                        && config.write_policy == WritePolicy::WriteThroughSelective
                        && self.told[&TierName::L1].contains(&key)
                    {
                        let hits = self.counts.get(&key).copied().unwrap_or(0);
                        assert!(
                            hits >= config.selective_hits,
                            "{key} was copied after {hits} hits"
                        );
                    }
                }
            }
            Event::Removed { tier, keys } => {
                for key in keys {
                    let below = match tier {
                        TierName::L1 => TierName::L2,
                        _ => TierName::L3,
                    };
                    self.failures.remove(&(below, key));
                    assert!(
                        self.told.get_mut(&tier).unwrap().remove(&key),
                        "{tier:?} has no {key}"
                    );
                    let is_cached = [TierName::L1, TierName::L2]
                        .iter()
                        .any(|tier| self.told[tier].contains(&key));
                    if !is_cached {
                        self.told.get_mut(&TierName::L3).unwrap().remove(&key);
                        self.counts.remove(&key);
                    }
                }
            }
        }
    }

    fn keys(&self, scope: &Scope, tokens: &[u64]) -> Vec<PageKey> {
        let units = if scope.bigram {
            TokenUnits::Bigram
        } else {
            TokenUnits::Single
        };
        let mut seed = namespace_seed(scope.extra_key.as_deref(), scope.cache_salt.as_deref());
        if let Some(tag) = &self.weights {
            let scope = seed.map(|seed| seed.to_string());
            let tagged = namespace_seed(Some(tag), scope.as_deref()).unwrap();
            seed = namespace_seed(Some("larder-weights"), Some(&tagged.to_string()));
        }
        let page_tokens = NonZeroUsize::new(self.page_tokens).unwrap();
        page_keys(tokens, page_tokens, seed, units)
    }

    /// A prompt that shares its beginning with some others.
    fn tokens(&mut self) -> Vec<u64> {
        let document = self.below(3) as u64;
        let mut tokens: Vec<u64> = (0..self.below(14) as u64)
            .map(|at| document * 100 + at)
            .collect();
        for _ in 0..self.below(10) {
            tokens.push(self.below(2) as u64);
        }
        tokens.push(if self.below(10) == 0 { 1 << 40 } else { 7 });
        tokens.push(8);
        tokens
    }

    /// A prompt for a request: often an earlier prompt, or an extension of it.
    fn ask(&mut self) -> (Scope, Vec<u64>) {
        if self.recent.is_empty() || self.below(12) == 0 {
            let asked = (self.scope(), self.tokens());
            if self.recent.len() < RECENT_MAX {
                self.recent.push(asked.clone());
            } else {
                let at = self.below(RECENT_MAX);
                self.recent[at] = asked.clone();
            }
            return asked;
        }
        let at = self.below(self.recent.len());
        let (scope, mut tokens) = self.recent[at].clone();
        for _ in 0..self.below(3) {
            tokens.push(self.below(2) as u64);
        }
        (scope, tokens)
    }

    fn scope(&mut self) -> Scope {
        let text = |text: &str| Some(text.to_owned());
        match self.below(8) {
            0 => Scope {
                cache_salt: text("salt"),
                ..Scope::default()
            },
            1 => Scope {
                bigram: true,
                ..Scope::default()
            },
            2 => Scope {
                extra_key: text("lora"),
                ..Scope::default()
            },
            _ => Scope::default(),
        }
    }

    fn start(&mut self) {
        if self.running.len() >= 6 {
            return;
        }
        let (scope, tokens) = self.ask();
        let mut prompt = self.core.prompt(&scope);
        self.core
            .extend_prompt(&mut prompt, tokens.iter().copied())
            .unwrap();
        self.check_match(&scope, &tokens);
        let priority = self.below(3) as i32;
        let request = self.core.start(prompt, priority);
        self.run_request(request, scope, tokens);
    }

    fn run_request(&mut self, request: Request, scope: Scope, tokens: Vec<u64>) {
        self.running.push(Running {
            request,
            tokens,
            scope,
            counted: 0,
            forwards: 0,
            inserted_with: Vec::new(),
            since_insert: Vec::new(),
            copied: None,
            must_break: false,
            may_break: false,
        });
    }

    fn peek(&mut self) {
        let (scope, tokens) = self.ask();
        self.check_match(&scope, &tokens);
    }

    /// Checks that a match finds exactly the pages reported by events.
    fn check_match(&mut self, scope: &Scope, tokens: &[u64]) {
        let mut prompt = self.core.prompt(scope);
        self.core
            .extend_prompt(&mut prompt, tokens.iter().copied())
            .unwrap();
        let keys = self.keys(scope, tokens);
        let is_in = |tier: TierName| {
            keys.iter()
                .take_while(|key| self.told[&tier].contains(*key))
                .count()
        };
        let known = keys.iter().take_while(|key| {
            self.told[&TierName::L1].contains(*key) || self.told[&TierName::L2].contains(*key)
        });
        let (expected, l1) = (known.count(), is_in(TierName::L1));
        let matched = self.core.match_prefix(&prompt);
        assert_eq!(
            matched.pages(),
            expected,
            "a match differs from the pages reported by events"
        );
        if matched.loads.is_empty() {
            assert_eq!(matched.l1.pages() as usize, l1);
            for (page, key) in matched.l1.page_numbers().zip(&keys) {
                assert!(!self.is_lost(page), "a hit on pages of a failed forward");
                let is_unknown = self.is_unwritten(page) || self.taint.contains_key(&page);
                assert!(
                    is_unknown || self.l1[page as usize] == Some(*key),
                    "a hit on wrong bytes"
                );
            }
        }
    }

    fn load_back(&mut self) {
        let waiting: Vec<usize> = (0..self.running.len())
            .filter(|at| self.running[*at].request.l2_pages() > 0)
            .collect();
        if waiting.is_empty() {
            return;
        }
        let at = waiting[self.below(waiting.len())];
        let quota = [0, 3, 100, 100][self.below(4)];
        let running = &mut self.running[at];
        let before = running.request.row_and_loads().0.shared_pages();
        let is_broken = self.core.is_broken(&running.request);
        let result = self.core.load_back(&mut running.request, quota);
        assert_eq!(result.is_err(), is_broken);
        let after = running.request.row_and_loads().0.shared_pages();
        if let Ok(LoadBack::Started(load, pages)) = result {
            assert_eq!(after, before + pages);
            self.got(at, before);
            let keys = self.keys(&self.running[at].scope, &self.running[at].tokens);
            self.loading
                .insert(load.into(), keys[before..after].to_vec());
        } else {
            assert_eq!(after, before);
        }
    }

    fn finish(&mut self) {
        if self.below(2) == 0 {
            return self.abandon();
        }
        if !self.running.is_empty() {
            let at = self.below(self.running.len());
            let keep = self.below(4) > 0 && self.running[at].forwards > 0;
            self.finish_one(at, keep);
        }
    }

    fn finish_one(&mut self, at: usize, keep: bool) {
        if keep {
            self.insert(at);
        }
        let running = self.running.swap_remove(at);
        let last = Fence(running.forwards);
        self.core.finish(running.request, false, last);
    }

    fn prefetch(&mut self) {
        let (scope, tokens) = self.ask();
        let mut prompt = self.core.prompt(&scope);
        self.core.extend_prompt(&mut prompt, tokens).unwrap();
        if let Ok(id) = self.core.prefetch(&mut prompt) {
            self.prefetches.push(id);
        }
    }

    fn poll_prefetch(&mut self) {
        if self.prefetches.is_empty() {
            return;
        }
        self.now += 20;
        let at = self.below(self.prefetches.len());
        let id = self.prefetches[at];
        if self.below(8) == 0 {
            self.core.cancel_prefetch(id);
            let _over = self.prefetches.swap_remove(at);
            return;
        }
        let overdue = self.core.is_prefetch_overdue(id, self.now);
        if self.core.poll_prefetch(id, overdue) != PrefetchState::Waiting {
            let _over = self.prefetches.swap_remove(at);
        }
    }

    /// Runs the device, L3 and forwards until all orders have ended.
    fn end_orders(&mut self) {
        for _ in 0..100_000 {
            if self.flights.is_empty() && self.forwards.is_empty() && self.ran.is_empty() {
                break;
            }
            self.run_forward();
            self.report_forward();
            self.run_device();
            self.settle();
        }
        assert!(
            self.flights.is_empty() && self.core.orders_out() == 0,
            "orders never end"
        );
    }

    /// Without a fault and without refusals, all pages of L2 that the policy writes get to L3.
    fn check_last_chance(&mut self) {
        let (faults, refuses) = (self.faults, self.l3_refuses);
        (self.faults, self.l3_refuses) = (0.0, false);
        self.retry_failed();
        self.settle();
        self.end_orders();
        if self.is_late() || self.core.config().l3_write == L3Write::OnBackup {
            let l2 = &self.told[&TierName::L2];
            assert!(l2.is_subset(&self.l3), "pages of L2 are not written to L3");
        }
        (self.faults, self.l3_refuses) = (faults, refuses);
    }

    /// Ends all work. Then nothing is held, and all pages can be freed.
    fn rest(&mut self) {
        while !self.running.is_empty() {
            let keep = self.below(2) == 0 && self.running[0].forwards > 0;
            self.finish_one(0, keep);
            self.settle();
        }
        while let Some(id) = self.prefetches.pop() {
            self.core.cancel_prefetch(id);
            self.settle();
        }
        self.end_orders();
        self.check_last_chance();
        self.core.reset().unwrap();
        self.settle();
        let config = self.core.config();
        let all = (config.l1_pages, config.l2_pages);
        assert_eq!(self.core.free_pages(), all, "pages are lost");
        assert_eq!(
            self.core.counts(),
            larder_tiers::tree::TreeCounts::default()
        );
    }
}

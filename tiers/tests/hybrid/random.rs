//! Random runs of the toy engine in one process: forwards that fail, requests dropped at every
//! step, evictions in every tier, truncations, restarts, faults of the device and of L3.

use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use larder_kernels::host::{Faults, Moment};
use larder_kernels::{DeviceError, HostDevice, Promise, Ticket};
use larder_tiers::config::{L3Write, PrefetchPolicy, TailKind, WritePolicy};
use larder_tiers::l3::L3;
use larder_tiers::prefix::{Begin, L1Memory, SequenceError, Waiting};
use larder_tiers::tree::EvictionOrder;
use larder_tiers::{Ask, PrefixCache, PrefixOptions, Sequence};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::memory::Memory as Pages;
use super::toy::{self, Memory, PAGE, WORDS};
use super::{ANSWER, PATIENCE};

/// Prompts of a group of runs, each with its answer from a run without a cache.
type Prompts = Vec<(Vec<u64>, Vec<u64>)>;

/// The L3 of the model and of each component.
type Stores = [Arc<Pages>; 4];

struct Running {
    sequence: Sequence,
    prompt: usize,
    tokens: Vec<u64>,
    computed: usize,
}

/// Events of the runs.
const EVENTS: usize = 11;
#[derive(Clone, Copy)]
enum Event {
    Answers,
    Broken,
    Dropped,
    NoRoom,
    Truncated,
    FromL1,
    FromL2,
    FromL3,
    FailedPages,
    FailedCopies,
    Stored,
}

struct Engine<'t> {
    dice: Pcg64Mcg,
    prompts: &'t Prompts,
    cache: PrefixCache,
    l3: Stores,
    waiting: Vec<(usize, Waiting)>,
    running: Vec<Running>,
    /// Forwards whose tickets have not settled, and whether they fail.
    forwards: Vec<(Promise, bool)>,
    /// One forward in this many fails; none if 0.
    bad_forwards: u32,
    seen: [u64; EVENTS],
}

fn prompts(group: u64) -> Prompts {
    let mut dice = Pcg64Mcg::seed_from_u64(group);
    let mut text =
        |tokens: usize| -> Vec<u64> { (0..tokens).map(|_| dice.random_range(0..WORDS)).collect() };
    let document = text(6 * PAGE);
    let tokens = [(1, 2), (PAGE, 6), (3 * PAGE, 5), (11, 9), (6 * PAGE, 4)];
    let prompt = |(shared, own)| {
        let prompt = [&document[..shared], &text(own)].concat();
        let all = toy::uncached(&prompt, ANSWER);
        (prompt, all)
    };
    tokens.map(prompt).into()
}

/// Faults of one copy in so many.
fn faults(one_in: u64) -> Faults {
    let copies = AtomicU64::new(0);
    Box::new(move |moment| {
        let Moment::Copy(_, layer) = moment else {
            return Ok(());
        };
        let copy = copies.fetch_add(1, Ordering::Relaxed) + 1;
        if one_in > 0 && copy.is_multiple_of(one_in) {
            let why = "a test".to_owned();
            return Err(DeviceError::Copy { layer, why });
        }
        Ok(())
    })
}

impl<'t> Engine<'t> {
    /// The seed determines the configuration and the decisions, not the moments at which copies and
    /// reads end.
    fn new(seed: u64, prompts: &'t Prompts, l3: Stores, polls_itself: bool) -> Engine<'t> {
        let mut dice = Pcg64Mcg::seed_from_u64(seed);
        let l1_pages = dice.random_range(14..30);
        let l2_pages = l1_pages + dice.random_range(0..20);
        let options = PrefixOptions::new(&toy::model().unwrap(), l1_pages, l2_pages).with(|o| {
            o.config.write_policy = WritePolicy::ALL[dice.random_range(0..3)];
            o.config.eviction = EvictionOrder::ALL[dice.random_range(0..6)];
            let writes = [L3Write::OnBackup, L3Write::Selective, L3Write::Late];
            o.config.l3_write = writes[dice.random_range(0..3)];
            if o.config.l3_write == L3Write::Late {
                o.config.write_policy = WritePolicy::WriteThrough;
                o.config.late_percent = [20, 50, 100][dice.random_range(0..3)];
            }
            o.config.selective_hits = 1;
            o.config.prefetch.policy = PrefetchPolicy::ALL[dice.random_range(0..3)];
            o.config.prefetch.timeout_base_us = 1000;
            o.config.prefetch.batch_pages = dice.random_range(1..4);
            for tail in &mut o.config.tails {
                tail.l1_pages = dice.random_range(8..20);
                tail.l2_pages = dice.random_range(2..30);
            }
            o.config.tails[1].kind = TailKind::State {
                every: dice.random_range(1..3),
            };
            o.polls_itself = polls_itself && dice.random_bool(0.7);
            let faults = faults([0, 0, 7, 40][dice.random_range(0..4)]);
            o.l1 = Some(L1Memory::Host(HostDevice::with_faults(faults).unwrap()));
        });
        for pages in &l3 {
            let faults = [0, 0, 5, 17][dice.random_range(0..4)];
            pages.fails.store(faults, Ordering::Relaxed);
        }
        let each = l3
            .iter()
            .map(|pages| pages.clone() as Arc<dyn L3>)
            .collect();
        Engine {
            prompts,
            cache: options.over_each(each).unwrap(),
            l3,
            waiting: Vec::new(),
            running: Vec::new(),
            forwards: Vec::new(),
            bad_forwards: [0, 5, 25][dice.random_range(0..3)],
            seen: [0; EVENTS],
            dice,
        }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.dice.random_range(0..bound)
    }

    fn saw(&mut self, event: Event, count: u64) {
        self.seen[event as usize] += count;
    }

    fn play(mut self, steps: usize) -> [u64; EVENTS] {
        for step in 0..steps {
            self.step();
            if step % 16 == 0 {
                let sequences = self.running.iter().map(|running| &running.sequence);
                self.cache.audit(sequences).unwrap();
            }
        }
        self.end()
    }

    fn step(&mut self) {
        match self.below(34) {
            0..3 => self.ask(),
            3..7 => self.begin(),
            19..34 if !self.running.is_empty() => {
                let at = self.below(self.running.len());
                self.advance(at);
            }
            7..11 if !self.forwards.is_empty() => {
                let at = self.below(self.forwards.len());
                self.settle(at);
            }
            11 => {
                let pages = self.below(10);
                self.cache.evict(pages).unwrap();
            }
            12 => {
                let at = self.below(self.l3.len());
                let dice = &mut self.dice;
                self.l3[at].evict(|_| dice.random_bool(0.1));
            }
            13 if !self.running.is_empty() => {
                let at = self.below(self.running.len());
                drop(self.running.swap_remove(at));
                self.saw(Event::Dropped, 1);
            }
            14 if !self.waiting.is_empty() => {
                let at = self.below(self.waiting.len());
                drop(self.waiting.swap_remove(at));
                self.saw(Event::Dropped, 1);
            }
            15 => self.rest(),
            16 if self.below(3) == 0 => {
                // As after a restart: only L3 has pages.
                self.waiting.clear();
                self.running.clear();
                self.rest();
                self.cache.reset().unwrap();
            }
            17 if !self.running.is_empty() => {
                let at = self.below(self.running.len());
                self.truncate(at);
            }
            _ => self.cache.poll().unwrap(),
        }
    }

    /// Lets all copies and writes end, and evicts L1.
    fn rest(&mut self) {
        self.settle_all();
        for pages in [usize::MAX, 0] {
            // With write_back an eviction begins copies.
            let deadline = Instant::now() + PATIENCE;
            assert!(self.cache.settle(deadline).unwrap(), "work does not end");
            self.cache.evict(pages).unwrap();
        }
    }

    fn ask(&mut self) {
        if self.waiting.len() + self.running.len() == 4 {
            return;
        }
        let number = self.below(self.prompts.len());
        let reserved = self.below(ANSWER + 1);
        let ask = Ask::new(&self.prompts[number].0).reserved(reserved);
        self.waiting.push((number, self.cache.ask(&ask).unwrap()));
    }

    fn begin(&mut self) {
        let Some((number, waiting)) = self.waiting.pop() else {
            return;
        };
        match waiting.try_begin().unwrap() {
            Begin::Later(waiting) => self.waiting.insert(0, (number, waiting)),
            Begin::Ready(sequence) => {
                let cached = sequence.cached();
                self.saw(Event::FromL1, cached.l1 as u64);
                self.saw(Event::FromL2, cached.l2 as u64);
                self.saw(Event::FromL3, cached.l3 as u64);
                self.running.push(Running {
                    computed: cached.tokens(),
                    sequence,
                    prompt: number,
                    tokens: self.prompts[number].0.clone(),
                });
            }
        }
    }

    fn settle(&mut self, at: usize) {
        let (promise, is_bad) = self.forwards.swap_remove(at);
        match is_bad {
            true if self.below(2) == 0 => drop(promise),
            true => promise.settle(Err(DeviceError::Closed)),
            false => promise.settle(Ok(())),
        }
    }

    fn settle_all(&mut self) {
        while !self.forwards.is_empty() {
            self.settle(0);
        }
    }

    /// A broken sequence is dropped, and its prompt asked again.
    fn give_up(&mut self, at: usize) {
        let running = self.running.swap_remove(at);
        self.saw(Event::Broken, 1);
        drop(running.sequence);
        let prompt = &self.prompts[running.prompt].0;
        let waiting = self.cache.ask(&Ask::new(prompt)).unwrap();
        self.waiting.push((running.prompt, waiting));
    }

    /// Handles the failure of a call. The sequence has ended.
    fn failed(&mut self, at: usize, error: SequenceError) {
        match error {
            SequenceError::NoRoom(_) => {
                self.saw(Event::NoRoom, 1);
                drop(self.running.swap_remove(at));
            }
            SequenceError::Broken(_) => self.give_up(at),
            error => panic!("{error}"),
        }
    }

    /// One step of a sequence: a chunk of its prompt, a word, or its end.
    fn advance(&mut self, at: usize) {
        let all = self.prompts[self.running[at].prompt].1.len();
        let running = &self.running[at];
        if running.tokens.len() == all {
            return self.finish(at);
        }
        if !running.sequence.is_loaded() {
            // The load waits for these forwards.
            self.settle_all();
        }
        let chunk = [1, PAGE, PAGE, 2 * PAGE][self.below(4)];
        let running = &mut self.running[at];
        let chunk_end = match chunk {
            1 => running.computed + 1,
            _ => (running.computed / chunk + 1) * chunk,
        };
        let until = chunk_end.min(running.tokens.len());
        if let Err(error) = running.sequence.prepare(until) {
            return self.failed(at, error);
        }
        let Some((word, is_bad)) = self.forward(at, until) else {
            return self.give_up(at);
        };
        let ticket = if !is_bad && self.below(3) == 0 {
            Ticket::done()
        } else if is_bad && self.below(4) == 0 {
            Ticket::failed(DeviceError::Closed)
        } else {
            let (promise, ticket) = Ticket::promised();
            self.forwards.push((promise, is_bad));
            ticket
        };
        let shares = self.below(2) == 0;
        let running = &mut self.running[at];
        running.computed = until;
        let mut result = running.sequence.computed_by(until, &ticket);
        if shares {
            result = result.and_then(|()| running.sequence.share().map(drop));
        }
        if result.is_ok() && until == running.tokens.len() {
            running.tokens.push(word);
            result = running.sequence.push(word);
        }
        if let Err(error) = result {
            self.failed(at, error);
        }
    }

    /// Computes the tokens up to a position. Returns the next word, and whether the forward fails:
    /// its bytes are garbage then. `None` if a load has failed.
    fn forward(&mut self, at: usize, until: usize) -> Option<(u64, bool)> {
        let is_bad = self.bad_forwards > 0 && self.dice.random_ratio(1, self.bad_forwards);
        let Running {
            sequence,
            tokens,
            computed,
            ..
        } = &mut self.running[at];
        let mut word = 0;
        let left = tokens.iter().enumerate().take(until).skip(*computed);
        for (position, token) in left {
            word = match toy::forward(sequence, *token, position) {
                Ok(word) => word,
                Err(error) => {
                    let error = error.to_string();
                    assert!(error.contains("load"), "{error}");
                    return None;
                }
            };
            if is_bad {
                sequence.full(1, position).unwrap().fill(0x3e);
                sequence.row(toy::SLIDING, position).unwrap().fill(0x3e);
                sequence.state(0).unwrap().fill(0x3e);
                word = WORDS - 1;
            }
        }
        Some((word, is_bad))
    }

    /// Takes words of the answer back, or tokens of the prompt.
    fn truncate(&mut self, at: usize) {
        let kept = {
            let running = &self.running[at];
            let least = running.computed.saturating_sub(3 * PAGE).max(1);
            self.dice.random_range(least..=running.computed.max(1))
        };
        let running = &mut self.running[at];
        let mut result = running.sequence.truncate(kept);
        let mut left = kept;
        if let Err(SequenceError::NoState { kept, .. }) = result {
            if kept == 0 {
                return;
            }
            left = kept;
            result = running.sequence.truncate(kept);
        }
        match result {
            Ok(()) => {}
            Err(SequenceError::Unsettled) => return self.settle_all(),
            Err(SequenceError::NoRoom(_)) => return,
            Err(error) => return self.failed(at, error),
        }
        running.tokens.truncate(left);
        running.computed = running.computed.min(left);
        // The rest of the prompt, or the word that was accepted instead.
        let (prompt, all) = &self.prompts[running.prompt];
        for token in &all[left..prompt.len().max(left + 1)] {
            match running.sequence.push(*token) {
                Ok(()) => running.tokens.push(*token),
                Err(error) => return self.failed(at, error),
            }
        }
        self.saw(Event::Truncated, 1);
    }

    /// Accepts the output when all forwards behind it have ended well.
    fn finish(&mut self, at: usize) {
        match self.running[at].sequence.verify() {
            Ok(false) => self.settle_all(),
            Err(error) => self.failed(at, error),
            Ok(true) => {
                let keeps = self.below(4) > 0;
                let running = self.running.swap_remove(at);
                let words = &self.prompts[running.prompt].1;
                assert_eq!(&running.tokens, words, "words differ from the uncached run");
                self.saw(Event::Answers, 1);
                if keeps {
                    running.sequence.keep().unwrap();
                }
            }
        }
    }

    /// Ends all requests, and checks that nothing is left.
    fn end(mut self) -> [u64; EVENTS] {
        self.waiting.clear();
        self.running.clear();
        self.rest();
        self.cache.audit([]).unwrap();
        let stats = self.cache.stats().unwrap();
        self.saw(Event::FailedPages, stats.forward_failed);
        self.saw(Event::FailedCopies, stats.load_failed + stats.backup_failed);
        self.cache.reset().unwrap();
        self.saw(
            Event::Stored,
            self.l3.iter().map(|pages| pages.len() as u64).sum(),
        );
        let left = self.cache.with_core(|core| {
            let config = core.config();
            let all = (config.l1_pages, config.l2_pages);
            let tails = config.tails.iter();
            let tails: Vec<_> = tails.map(|tail| (tail.l1_pages, tail.l2_pages)).collect();
            let is_free = core.free_pages() == all && core.free_tails() == tails;
            (is_free, core.prefetches_out())
        });
        assert_eq!(left.unwrap(), (true, 0), "pages or prefetches are lost");
        if self.below(2) == 0 {
            self.cache.close().unwrap();
        }
        self.seen
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Eight runs share their L3. `LARDER_HYBRID_RUNS` sets the number of runs, `LARDER_HYBRID_RUN`
/// runs one group of eight.
#[test]
fn no_word_of_a_hybrid_model_differs_from_the_uncached_run() {
    let one = number("LARDER_HYBRID_RUN").map(|run| run / 8..run / 8 + 1);
    let groups = one.unwrap_or(0..number("LARDER_HYBRID_RUNS").unwrap_or(400) / 8);
    let (mut all, begun) = ([0; EVENTS], Instant::now());
    for group in groups {
        let (prompts, l3) = (prompts(group), Stores::default());
        for run in 8 * group..8 * group + 8 {
            let play = || Engine::new(run, &prompts, l3.clone(), true).play(400);
            let Ok(seen) = catch_unwind(AssertUnwindSafe(play)) else {
                panic!("run {run} fails: LARDER_HYBRID_RUN={run}");
            };
            all.iter_mut().zip(seen).for_each(|(all, one)| *all += one);
        }
    }
    let seconds = begun.elapsed().as_secs();
    println!(
        "answers, broken, dropped, without room, truncated, tokens from L1, L2, L3, failed pages, \
         failed copies, stored pages: {all:?} in {seconds} s"
    );
    assert!(
        !all.contains(&0),
        "an event that never happens is not tested"
    );
}

/// The test of the test: a bug that no run detects points to bytes on which no word depends.
#[cfg(debug_assertions)]
#[test]
fn every_planted_bug_of_hybrid_models_is_noticed() {
    use larder_tiers::planted::{Bug, plant};

    let (here, hook) = (std::thread::current().id(), take_hook());
    set_hook(Box::new(move |panic| {
        if std::thread::current().id() != here {
            hook(panic);
        }
    }));
    let mut missed = Vec::new();
    // The ranks have a test of their own.
    for &bug in Bug::HYBRID
        .iter()
        .filter(|bug| **bug != Bug::MinimumOfLengths)
    {
        plant(Some(bug));
        let found = (0..200).find(|run| {
            let (prompts, l3) = (prompts(run / 8), Stores::default());
            let play = || Engine::new(*run, &prompts, l3, false).play(250);
            catch_unwind(AssertUnwindSafe(play)).is_err()
        });
        plant::<Bug>(None);
        match found {
            Some(run) => println!("{bug:?}: {} runs", run + 1),
            None => missed.push(bug),
        }
    }
    let _ = take_hook();
    assert!(missed.is_empty(), "not detected: {missed:?}");
}

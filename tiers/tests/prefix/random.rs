//! Random runs of the toy engine in one process: forwards that fail, requests dropped at every
//! step, evictions at every level, faults of the device and of L3.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use larder_kernels::host::{Faults, Moment};
use larder_kernels::{DeviceError, HostDevice, Promise, Ticket};
use larder_tiers::config::{L3Write, PrefetchPolicy, WritePolicy};
use larder_tiers::prefix::{Begin, L1Memory, SequenceError, Waiting};
use larder_tiers::tree::EvictionOrder;
use larder_tiers::{Ask, PrefixCache, PrefixOptions, Sequence};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::engine::{PAGE, Rows, Transformer, WORDS};
use super::memory::Memory;
use super::{ANSWER, PATIENCE, toy};

/// Prompts of a group of runs, each with its answer from a run without a cache.
type Prompts = Vec<(Vec<u64>, Vec<u64>)>;

struct Running {
    sequence: Sequence,
    prompt: usize,
    tokens: Vec<u64>,
    computed: usize,
}

/// Events of the runs.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    answers: u64,
    broken: u64,
    dropped: u64,
    no_room: u64,
    truncated: u64,
    from_l1: u64,
    from_l2: u64,
    from_l3: u64,
    failed_pages: u64,
    failed_copies: u64,
}

struct Engine<'t> {
    dice: Pcg64Mcg,
    toy: &'t Transformer,
    prompts: &'t Prompts,
    cache: PrefixCache,
    l3: Arc<Memory>,
    waiting: Vec<(usize, Waiting)>,
    running: Vec<Running>,
    /// Forwards whose tickets have not settled, and whether they fail.
    forwards: Vec<(Promise, bool)>,
    /// One forward in this many fails; none if 0.
    bad_forwards: u32,
    seen: Seen,
}

fn prompts(toy: &Transformer, group: u64) -> Prompts {
    let mut dice = Pcg64Mcg::seed_from_u64(group);
    let mut text =
        |tokens: usize| -> Vec<u64> { (0..tokens).map(|_| dice.random_range(0..WORDS)).collect() };
    let document = text(4 * PAGE);
    // Most answers begin a page.
    let tokens = [(1, 2), (PAGE, 14), (2 * PAGE, 13), (53, 8), (4 * PAGE, 12)];
    let prompt = |(shared, own)| {
        let prompt = [&document[..shared], &text(own)].concat();
        let all = toy.uncached(&prompt, ANSWER);
        (prompt, all)
    };
    tokens.map(prompt).into()
}

/// Faults of one copy in so many.
pub fn faults(one_in: u64) -> Faults {
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
    fn new(seed: u64, toy: &'t Transformer, prompts: &'t Prompts, l3: Arc<Memory>) -> Engine<'t> {
        let mut dice = Pcg64Mcg::seed_from_u64(seed);
        let l1_pages = dice.random_range(6..14);
        let l2_pages = l1_pages + dice.random_range(0..10);
        let options = PrefixOptions::new(&toy.model(), l1_pages, l2_pages).with(|o| {
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
            o.polls_itself = dice.random_bool(0.7);
            let faults = faults([0, 0, 7, 40][dice.random_range(0..4)]);
            o.l1 = Some(L1Memory::Host(HostDevice::with_faults(faults).unwrap()));
        });
        let l3_faults = [0, 0, 5, 17][dice.random_range(0..4)];
        l3.fails.store(l3_faults, Ordering::Relaxed);
        Engine {
            toy,
            prompts,
            cache: options.over(Some(l3.clone())).unwrap(),
            l3,
            waiting: Vec::new(),
            running: Vec::new(),
            forwards: Vec::new(),
            bad_forwards: [0, 5, 25][dice.random_range(0..3)],
            seen: Seen::default(),
            dice,
        }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.dice.random_range(0..bound)
    }

    fn play(mut self, steps: usize) -> Seen {
        for _ in 0..steps {
            self.step();
        }
        let sequences = self.running.iter().map(|running| &running.sequence);
        self.cache.audit(sequences).unwrap();
        self.end()
    }

    fn step(&mut self) {
        match self.below(32) {
            0..3 => self.ask(),
            3..7 => self.begin(),
            19..32 if !self.running.is_empty() => {
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
                let dice = &mut self.dice;
                self.l3.evict(|_| dice.random_bool(0.02));
            }
            13 if !self.running.is_empty() => {
                let at = self.below(self.running.len());
                drop(self.running.swap_remove(at));
                self.seen.dropped += 1;
            }
            14 if !self.waiting.is_empty() => {
                let at = self.below(self.waiting.len());
                drop(self.waiting.swap_remove(at));
                self.seen.dropped += 1;
            }
            15 => self.rest(),
            17 if !self.running.is_empty() => {
                let at = self.below(self.running.len());
                self.truncate(at);
            }
            16 if self.below(3) == 0 => {
                // As after a restart: only L3 has pages.
                self.waiting.clear();
                self.running.clear();
                self.rest();
                self.cache.reset().unwrap();
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
                self.seen.from_l1 += cached.l1 as u64;
                self.seen.from_l2 += cached.l2 as u64;
                self.seen.from_l3 += cached.l3 as u64;
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
        self.seen.broken += 1;
        drop(running.sequence);
        let prompt = &self.prompts[running.prompt].0;
        let waiting = self.cache.ask(&Ask::new(prompt)).unwrap();
        self.waiting.push((running.prompt, waiting));
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
        let running = &self.running[at];
        let chunk_end = (running.computed / PAGE + 1) * PAGE;
        let until = chunk_end.min(running.tokens.len());
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
        match result {
            Ok(()) => {}
            Err(SequenceError::NoRoom(_)) => {
                self.seen.no_room += 1;
                drop(self.running.swap_remove(at));
            }
            Err(SequenceError::Broken(_)) => self.give_up(at),
            Err(error) => panic!("{error}"),
        }
    }

    /// Takes words of the answer back, or tokens of the prompt. The rows behind the cut are garbage
    /// then.
    fn truncate(&mut self, at: usize) {
        let running = &mut self.running[at];
        let computed = running.computed.min(running.tokens.len());
        let kept = 1 + self.dice.random_range(0..computed.max(1));
        match running.sequence.truncate(kept) {
            Ok(()) => {}
            Err(SequenceError::Unsettled) => return self.settle_all(),
            Err(SequenceError::NoRoom(_)) => return,
            Err(SequenceError::Broken(_)) => return self.give_up(at),
            Err(error) => panic!("{error}"),
        }
        running.tokens.truncate(kept);
        running.computed = running.computed.min(kept);
        self.seen.truncated += 1;
        // The rest of the prompt, or the word that was accepted instead.
        let (prompt, all) = &self.prompts[running.prompt];
        for token in &all[kept..prompt.len().max(kept + 1)] {
            match running.sequence.push(*token) {
                Ok(()) => running.tokens.push(*token),
                Err(SequenceError::NoRoom(_)) => {
                    self.seen.no_room += 1;
                    drop(self.running.swap_remove(at));
                    return;
                }
                Err(SequenceError::Broken(_)) => return self.give_up(at),
                Err(error) => panic!("{error}"),
            }
        }
        let rows = running.sequence.len();
        for position in kept..rows {
            let row = running.sequence.row_mut(0, 0, position).unwrap();
            row.fill(0x3e);
        }
    }

    /// Computes the rows up to a position. Returns the next word, and whether the forward fails:
    /// its rows are garbage then. `None` if a load has failed.
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
            word = self.toy.forward(sequence, *token, position).ok()?;
            if is_bad {
                let row = vec![0x3e; sequence.get(0, 0, position).unwrap().len()];
                sequence.put(1, 0, position, &row).unwrap();
                word = WORDS - 1;
            }
        }
        Some((word, is_bad))
    }

    /// Accepts the output when all forwards behind it have ended well.
    fn finish(&mut self, at: usize) {
        let running = &mut self.running[at];
        match running.sequence.verify() {
            Ok(false) => self.settle_all(),
            Err(SequenceError::Broken(_)) => self.give_up(at),
            Err(error) => panic!("{error}"),
            Ok(true) => {
                let keeps = self.below(4) > 0;
                let running = self.running.swap_remove(at);
                let words = &self.prompts[running.prompt].1;
                assert_eq!(&running.tokens, words, "words differ from the uncached run");
                self.seen.answers += 1;
                if keeps {
                    running.sequence.keep().unwrap();
                }
            }
        }
    }

    /// Ends all requests, and checks that nothing is left.
    fn end(mut self) -> Seen {
        self.waiting.clear();
        self.running.clear();
        self.rest();
        self.cache.audit([]).unwrap();
        let stats = self.cache.stats().unwrap();
        self.seen.failed_pages = stats.forward_failed;
        self.seen.failed_copies = stats.load_failed + stats.backup_failed;
        self.cache.reset().unwrap();
        let left = self.cache.with_core(|core| {
            let all = (core.config().l1_pages, core.config().l2_pages);
            (core.free_pages(), all, core.prefetches_out())
        });
        let (free, all, prefetches) = left.unwrap();
        assert_eq!((free, prefetches), (all, 0), "pages or prefetches are lost");
        if self.below(2) == 0 {
            self.cache.close().unwrap();
        }
        self.seen
    }
}

/// Eight runs share an L3. `LARDER_ENGINE_RUNS` sets the number of runs, `LARDER_ENGINE_RUN` runs
/// one group of eight.
#[test]
fn no_word_differs_from_the_uncached_run_and_nothing_leaks() {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let one = number("LARDER_ENGINE_RUN").map(|run| run / 8..run / 8 + 1);
    let groups = one.unwrap_or(0..number("LARDER_ENGINE_RUNS").unwrap_or(400) / 8);
    let (toy, mut all, begun) = (toy(), [0; 10], Instant::now());
    for group in groups {
        let (prompts, l3) = (prompts(&toy, group), Arc::<Memory>::default());
        for run in 8 * group..8 * group + 8 {
            let play = || Engine::new(run, &toy, &prompts, l3.clone()).play(250);
            let Ok(seen) = std::panic::catch_unwind(AssertUnwindSafe(play)) else {
                panic!("run {run} fails: LARDER_ENGINE_RUN={run}");
            };
            let Seen {
                answers,
                broken,
                dropped,
                no_room,
                truncated,
                from_l1,
                from_l2,
                from_l3,
                failed_pages,
                failed_copies,
            } = seen;
            let seen = [
                answers,
                broken,
                dropped,
                no_room,
                truncated,
                from_l1,
                from_l2,
                from_l3,
                failed_pages,
                failed_copies,
            ];
            all.iter_mut().zip(seen).for_each(|(all, one)| *all += one);
        }
    }
    let seconds = Duration::as_secs(&begun.elapsed());
    println!(
        "answers, broken, dropped, without room, truncated, tokens from L1, L2, L3, failed pages, \
         failed copies: {all:?} in {seconds} s"
    );
    assert!(
        !all.contains(&0),
        "an event that never happens is not tested"
    );
}

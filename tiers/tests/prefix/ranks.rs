//! Ranks of one engine, as threads: they find the same pages, their words are those of a run
//! without a cache, and no fault of one rank leaves the others alone.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use larder_kernels::host::Faults;
use larder_kernels::{DeviceError, HostDevice, KvShape, Ticket};
use larder_tiers::cache::CacheError;
use larder_tiers::core::Core;
use larder_tiers::l3::L3;
use larder_tiers::prefix::{
    Begin, BeginError, Cached, Closed, L1Memory, OpenError, SequenceError, Waiting,
};
use larder_tiers::ranks::{Ranks, RanksError, ThreadRank, threads};
use larder_tiers::{Ask, Component, Model, PrefixCache, PrefixOptions, Role, Sequence};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::engine::{PAGE, Transformer, WORDS};
use super::memory::Memory;
use super::random::faults;
use super::{ANSWER, PATIENCE, toy};

/// A timeout that a test waits for: long enough for threads on a busy machine to join a call.
const SHORT: Duration = Duration::from_secs(1);

/// A rank of a tensor-parallel engine: each has one head, and a word depends on all of them.
pub struct Rank {
    cache: PrefixCache,
    toy: Transformer,
    /// Where the ranks of the engine exchange their parts of a word.
    engine: Box<dyn Ranks>,
}

type Memories = Vec<Arc<Memory>>;

fn memories(ranks: u32) -> Memories {
    (0..ranks).map(|_| Arc::default()).collect()
}

pub fn options(rank: u32, ranks: u32) -> PrefixOptions {
    let shape = KvShape::mha(2, ranks, 8, 4, PAGE as u32).unwrap();
    let model = Model::new("toy", "seed 42", "f32", shape);
    PrefixOptions::new(&model.heads(rank..rank + 1).unwrap(), 20, 40)
}

/// Runs `act` for each rank of a new group on a thread of its own.
fn group<T: Send>(
    ranks: u32,
    timeout: Duration,
    open: impl Fn(u32, PrefixOptions) -> PrefixCache + Sync,
    act: impl Fn(Rank) -> T + Sync,
) -> Vec<T> {
    let agreeing = threads(ranks, timeout).unwrap();
    let engine = threads(ranks, PATIENCE).unwrap();
    let (open, act) = (&open, &act);
    std::thread::scope(|scope| {
        let start = |(own, engine): (ThreadRank, ThreadRank)| {
            scope.spawn(move || {
                let number = engine.rank();
                let options = options(number, ranks).with(|o| o.ranks = Some(Box::new(own)));
                let cache = open(number, options);
                act(Rank::new(cache, toy(), Box::new(engine)))
            })
        };
        let all: Vec<_> = agreeing.into_iter().zip(engine).map(start).collect();
        all.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn over(l3s: &Memories) -> impl Fn(u32, PrefixOptions) -> PrefixCache + Sync {
    |rank, options| {
        let l3: Arc<dyn L3> = l3s[rank as usize].clone();
        options.over(Some(l3)).unwrap()
    }
}

/// The token whose rows a rank computes.
fn own(token: u64, rank: u32) -> u64 {
    (token + u64::from(rank)) % WORDS
}

pub fn text(seed: u64, tokens: usize) -> Vec<u64> {
    let mut dice = Pcg64Mcg::seed_from_u64(seed);
    (0..tokens).map(|_| dice.random_range(0..WORDS)).collect()
}

/// The prompt and its answer, computed without a cache.
pub fn uncached(prompt: &[u64], ranks: u32) -> Vec<u64> {
    let (toy, mut tokens) = (toy(), prompt.to_vec());
    let mut rows = vec![HashMap::new(); ranks as usize];
    for position in 0..prompt.len() + ANSWER - 1 {
        let (token, mut sum) = (tokens[position], 0);
        for (rank, rows) in (0..).zip(&mut rows) {
            sum += toy.forward(rows, own(token, rank), position).unwrap();
        }
        if position + 1 == tokens.len() {
            tokens.push(sum % WORDS);
        }
    }
    tokens
}

impl Rank {
    pub fn new(cache: PrefixCache, toy: Transformer, engine: Box<dyn Ranks>) -> Rank {
        Rank { cache, toy, engine }
    }

    fn number(&self) -> u32 {
        self.engine.rank()
    }

    /// Computes the rows of some tokens, and reports them. Returns the next word of all ranks.
    fn forward(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u64],
        computed: usize,
    ) -> Result<Result<u64, SequenceError>, RanksError> {
        let (mut word, mut ticket) = (0, Ticket::done());
        for (position, token) in tokens.iter().enumerate().skip(computed) {
            match self
                .toy
                .forward(sequence, own(*token, self.number()), position)
            {
                Ok(next) => word = next,
                // A load has failed on this rank alone.
                Err(_) => ticket = Ticket::failed(DeviceError::Closed),
            }
        }
        let mut words = vec![0; self.engine.size() as usize];
        words[self.number() as usize] = word;
        self.engine.max(&mut words)?;
        let reported = sequence.computed_by(tokens.len(), &ticket);
        Ok(reported.map(|()| words.iter().sum::<u64>() % WORDS))
    }

    /// Answers a prompt and keeps it. Returns the cached tokens and all tokens.
    fn serve(&mut self, prompt: &[u64]) -> (Cached, Vec<u64>) {
        let mut sequence = self.cache.begin(prompt).unwrap();
        let (mut tokens, cached) = (prompt.to_vec(), sequence.cached());
        let mut computed = cached.tokens();
        while tokens.len() < prompt.len() + ANSWER {
            let word = self.forward(&mut sequence, &tokens, computed);
            computed = tokens.len();
            tokens.push(word.unwrap().unwrap());
            sequence.push_within(tokens[computed], PATIENCE).unwrap();
        }
        while !sequence.verify().unwrap() {}
        sequence.keep().unwrap();
        (cached, tokens)
    }

    fn settle(&self) {
        let deadline = Instant::now() + PATIENCE;
        assert!(self.cache.settle(deadline).unwrap());
    }

    fn digest(&self) -> u64 {
        self.cache.with_core(Core::digest).unwrap()
    }
}

fn in_tiers(l1: usize, l2: usize, l3: usize) -> Cached {
    let [l1, l2, l3] = [l1, l2, l3].map(|pages| pages * PAGE);
    Cached { l1, l2, l3 }
}

#[test]
fn the_words_of_two_and_four_ranks_are_those_of_an_uncached_run() {
    for ranks in [2, 4] {
        let prompt = text(1, 4 * PAGE + 3);
        let words = uncached(&prompt, ranks);
        let l3s = memories(ranks);
        let digests = group(ranks, PATIENCE, over(&l3s), |mut rank| {
            for cached in [
                in_tiers(0, 0, 0),
                in_tiers(4, 0, 0),
                in_tiers(0, 4, 0),
                in_tiers(0, 0, 4),
            ] {
                if cached.l2 > 0 {
                    rank.cache.evict(20).unwrap();
                }
                if cached.l3 > 0 {
                    rank.cache.reset().unwrap();
                }
                assert_eq!(rank.serve(&prompt), (cached, words.clone()));
                rank.settle();
                rank.cache.audit([]).unwrap();
            }
            let digest = rank.digest();
            rank.cache.close().unwrap();
            digest
        });
        assert!(digests.iter().all(|digest| *digest == digests[0]));
    }
}

#[test]
fn a_rank_that_ends_is_an_error_for_all_and_a_new_group_finds_the_pages() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv.store");
    let open = |_, options: PrefixOptions| options.open(&path, 128 << 20).unwrap();
    let prompt = text(2, 3 * PAGE + 1);
    group(4, PATIENCE, open, |mut rank| {
        rank.serve(&prompt);
        rank.settle();
        let mut sequence = rank.cache.begin(&prompt).unwrap();
        let waiting = rank.cache.ask(&Ask::new(&prompt)).unwrap();
        if rank.number() == 1 {
            return;
        }
        let failure = loop {
            match rank.cache.poll() {
                Ok(()) => {}
                Err(Closed::Ranks(failure)) => break failure,
                Err(closed) => panic!("{closed}"),
            }
        };
        assert!(matches!(failure, RanksError::Gone { .. }), "{failure}");
        let broken = |result| matches!(result, Err(SequenceError::Broken(_)));
        assert!(broken(sequence.push(1)));
        assert!(broken(sequence.computed(prompt.len())));
        assert!(broken(sequence.verify().map(drop)));
        assert!(broken(sequence.keep().map(drop)));
        let again = rank.cache.ask(&Ask::new(&prompt)).err();
        for refused in [again, waiting.try_begin().err()] {
            let closed = Closed::Ranks(failure.clone());
            assert!(matches!(refused, Some(BeginError::Closed(found)) if found == closed));
        }
        assert!(rank.cache.close().is_err());
    });
    let words = uncached(&prompt, 4);
    group(4, PATIENCE, open, |mut rank| {
        assert_eq!(rank.serve(&prompt), (in_tiers(0, 0, 3), words.clone()));
        rank.cache.close().unwrap();
    });
}

#[test]
fn a_rank_that_stops_is_an_error_for_all_within_the_timeout() {
    let (prompt, l3s) = (text(3, PAGE + 1), memories(3));
    let stopped = Barrier::new(3);
    group(3, SHORT, over(&l3s), |mut rank| {
        rank.serve(&prompt);
        let mut sequence = rank.cache.begin(&prompt).unwrap();
        if rank.number() == 2 {
            stopped.wait();
        }
        let failure = loop {
            if let Err(closed) = rank.cache.poll() {
                break closed;
            }
        };
        let stalled = RanksError::Stalled {
            ranks: vec![2],
            timeout: SHORT,
        };
        assert_eq!(failure, Closed::Ranks(stalled));
        assert!(matches!(sequence.verify(), Err(SequenceError::Broken(_))));
        if rank.number() != 2 {
            stopped.wait();
        }
    });
}

#[test]
fn a_page_that_one_rank_lacks_is_a_miss_for_all() {
    let (prompt, l3s) = (text(4, 5 * PAGE + 1), memories(4));
    let words = uncached(&prompt, 4);
    group(4, PATIENCE, over(&l3s), |mut rank| {
        rank.serve(&prompt[..2 * PAGE + 1]);
        rank.settle();
        let l3 = &l3s[rank.number() as usize];
        let mut first = Vec::new();
        l3.evict(|key| {
            first.push(*key);
            false
        });
        rank.serve(&prompt);
        rank.settle();
        if rank.number() == 3 {
            l3.evict(|key| !first.contains(key));
        }
        rank.cache.close().unwrap();
    });
    group(4, PATIENCE, over(&l3s), |mut rank| {
        assert_eq!(rank.serve(&prompt), (in_tiers(0, 0, 2), words.clone()));
        rank.cache.close().unwrap();
    });
}

#[test]
fn ranks_that_make_different_calls_get_an_error_that_names_both() {
    type Calls = fn(&PrefixCache, bool);
    let cases: [(Calls, &str, &str); 3] = [
        (
            |cache, is_odd| match is_odd {
                true => drop(cache.evict(1)),
                false => drop(cache.reset()),
            },
            "(poll after evict)",
            "(poll after reset)",
        ),
        (
            |cache, is_odd| drop(cache.evict(usize::from(is_odd))),
            "(poll after evict)",
            "the same call after other arguments",
        ),
        (
            |cache, is_odd| drop(is_odd.then(|| cache.evict(1))),
            "call 2 (poll after new weights)",
            "call 3 (poll after evict)",
        ),
    ];
    for (call, first, second) in cases {
        let l3s = memories(3);
        group(3, PATIENCE, over(&l3s), |rank| {
            call(&rank.cache, rank.number() == 1);
            let closed = rank.cache.poll().unwrap_err();
            assert!(matches!(closed, Closed::Ranks(RanksError::Diverged { .. })));
            let said = closed.to_string();
            assert!(said.contains(first) && said.contains(second), "{said}");
            assert_eq!(rank.cache.poll(), Err(closed));
        });
    }
}

#[test]
fn ranks_of_different_configurations_are_refused() {
    let groups = threads(2, PATIENCE).unwrap();
    let open = |(rank, own): (u32, ThreadRank)| {
        let options = options(rank, 2).with(|o| o.config.l1_pages += rank);
        options.with(|o| o.ranks = Some(Box::new(own))).over(None)
    };
    std::thread::scope(|scope| {
        let opening = (0..).zip(groups).map(|of| scope.spawn(move || open(of)));
        for opened in opening.collect::<Vec<_>>() {
            let refused = opened.join().unwrap().err();
            let Some(OpenError::Cache(CacheError::Ranks(error))) = refused else {
                panic!("{refused:?}");
            };
            assert_eq!(error, RanksError::Unlike);
        }
    });
}

#[test]
fn windows_and_states_of_several_ranks_are_refused() {
    let state = KvShape::mha(1, 1, 8, 4, 1).unwrap();
    let state = Component::new("state", "f32", Role::State, &[state]);
    let model = toy().model().with(state).unwrap();
    let own = threads(1, PATIENCE).unwrap().remove(0);
    let options = PrefixOptions::new(&model, 20, 40).with(|o| o.ranks = Some(Box::new(own)));
    let refused = options.over_each(Vec::new()).err();
    let Some(OpenError::RanksBeside { name }) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(name, "state");
}

/// The caches of ranks that all hold the whole model (MLA).
fn whole(path: &Path, own: ThreadRank) -> PrefixCache {
    let options = PrefixOptions::new(&toy().model(), 20, 40);
    let options = options.with(|o| o.ranks = Some(Box::new(own)));
    options.open(path, 128 << 20).unwrap()
}

#[test]
fn one_rank_writes_the_pages_that_all_ranks_hold() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv.store");
    let prompt = text(5, 2 * PAGE + 1);
    let words = toy().uncached(&prompt, ANSWER);
    for cached in [in_tiers(0, 0, 0), in_tiers(0, 0, 2)] {
        std::thread::scope(|scope| {
            for own in threads(2, PATIENCE).unwrap() {
                let (path, prompt, words) = (&path, &prompt, &words);
                scope.spawn(move || {
                    let is_first = own.rank() == 0;
                    let cache = whole(path, own);
                    let writes = cache.with_core(|core| core.config().writes_l3);
                    assert_eq!(writes, Ok(is_first));
                    let mut sequence = cache.begin(prompt).unwrap();
                    assert_eq!(sequence.cached(), cached);
                    let answer = super::answer(&toy(), &mut sequence, prompt);
                    assert_eq!(answer, *words);
                    sequence.keep().unwrap();
                    cache.close().unwrap();
                });
            }
        });
    }
}

struct Running {
    sequence: Sequence,
    prompt: usize,
    tokens: Vec<u64>,
    computed: usize,
}

/// A random run. All ranks have the same dice, and each has faults of its own.
pub struct Run<'r> {
    rank: Rank,
    dice: Pcg64Mcg,
    prompts: &'r [(Vec<u64>, Vec<u64>)],
    waiting: Vec<(usize, Waiting)>,
    running: Vec<Running>,
    answers: u64,
    broken: u64,
}

pub fn failure_of(closed: Closed) -> RanksError {
    match closed {
        Closed::Ranks(failure) => failure,
        Closed::Ended => panic!("{closed}"),
    }
}

fn failure_of_begin(error: BeginError) -> RanksError {
    match error {
        BeginError::Closed(closed) => failure_of(closed),
        error => panic!("{error}"),
    }
}

impl<'r> Run<'r> {
    /// All ranks give the same seed.
    pub fn new(rank: Rank, seed: u64, prompts: &'r [(Vec<u64>, Vec<u64>)]) -> Run<'r> {
        Run {
            rank,
            dice: Pcg64Mcg::seed_from_u64(seed),
            prompts,
            waiting: Vec::new(),
            running: Vec::new(),
            answers: 0,
            broken: 0,
        }
    }

    pub fn cache(&self) -> &PrefixCache {
        &self.rank.cache
    }

    pub fn answers(&self) -> u64 {
        self.answers
    }

    /// Drops all requests.
    pub fn end_all(&mut self) {
        self.waiting.clear();
        self.running.clear();
    }

    fn below(&mut self, bound: usize) -> usize {
        self.dice.random_range(0..bound)
    }

    pub fn step(&mut self) -> Result<(), RanksError> {
        match self.below(16) {
            0..3 if self.waiting.len() + self.running.len() < 4 => {
                let number = self.below(self.prompts.len());
                let ask = Ask::new(&self.prompts[number].0).reserved(self.below(ANSWER + 1));
                let waiting = self.rank.cache.ask(&ask).map_err(failure_of_begin)?;
                self.waiting.push((number, waiting));
            }
            3..6 if !self.waiting.is_empty() => self.begin()?,
            6..13 if !self.running.is_empty() => {
                let at = self.below(self.running.len());
                self.advance(at)?;
            }
            13 if !self.running.is_empty() => {
                let at = self.below(self.running.len());
                drop(self.running.swap_remove(at));
            }
            14 => {
                let pages = self.below(10);
                self.rank.cache.evict(pages).map_err(failure_of)?;
            }
            15 if self.below(8) == 0 => {
                self.waiting.clear();
                self.running.clear();
                let deadline = Instant::now() + PATIENCE;
                let is_settled = self.rank.cache.settle(deadline).map_err(failure_of)?;
                assert!(is_settled, "work does not end");
                self.rank.cache.reset().unwrap();
            }
            _ => self.rank.cache.poll().map_err(failure_of)?,
        }
        Ok(())
    }

    fn begin(&mut self) -> Result<(), RanksError> {
        let (prompt, waiting) = self.waiting.remove(0);
        match waiting.try_begin().map_err(failure_of_begin)? {
            Begin::Later(waiting) => self.waiting.push((prompt, waiting)),
            Begin::Ready(sequence) => self.running.push(Running {
                computed: sequence.cached().tokens(),
                tokens: self.prompts[prompt].0.clone(),
                sequence,
                prompt,
            }),
        }
        Ok(())
    }

    /// One step of a sequence: a chunk of its prompt, a word, or its end.
    fn advance(&mut self, at: usize) -> Result<(), RanksError> {
        let (keeps, shares) = (self.below(4) > 0, self.below(2) == 0);
        let mut of = self.running.swap_remove(at);
        let words = &self.prompts[of.prompt].1;
        if of.tokens.len() == words.len() {
            let verified = loop {
                match of.sequence.verify() {
                    Ok(false) => {}
                    verified => break verified,
                }
            };
            if verified.is_err() {
                self.broken += 1;
                return Ok(());
            }
            assert_eq!(of.tokens, *words, "words differ from the uncached run");
            self.answers += 1;
            if keeps {
                // A group that breaks now is found by the next call.
                let _kept = of.sequence.keep();
            }
            return Ok(());
        }
        let until = ((of.computed / PAGE + 1) * PAGE).min(of.tokens.len());
        let tokens = &of.tokens[..until];
        let forward = self.rank.forward(&mut of.sequence, tokens, of.computed)?;
        of.computed = until;
        let result = forward.and_then(|word| {
            if shares {
                of.sequence.share()?;
            }
            if until == of.tokens.len() {
                of.sequence.push(word)?;
                of.tokens.push(word);
            }
            Ok(())
        });
        match result {
            Ok(()) => self.running.push(of),
            Err(SequenceError::Broken(_)) => self.broken += 1,
            Err(SequenceError::NoRoom(_)) => {}
            Err(error) => panic!("{error}"),
        }
        Ok(())
    }
}

/// The options of a rank in a run: the same on all ranks, but for the faults.
fn varied(options: PrefixOptions, seed: u64, rank: u32) -> PrefixOptions {
    let mut dice = Pcg64Mcg::seed_from_u64(seed);
    let (l1, more) = (dice.random_range(8..16), dice.random_range(0..10));
    let one_in = [0, 0, 7, 40][dice.random_range(0..4)];
    let own: Faults = faults(if one_in == 0 {
        0
    } else {
        one_in + u64::from(rank)
    });
    options.with(|o| {
        (o.config.l1_pages, o.config.l2_pages) = (l1, l1 + more);
        o.config.prefetch.timeout_base_us = 1000;
        o.l1 = Some(L1Memory::Host(HostDevice::with_faults(own).unwrap()));
    })
}

/// Four groups after each other share their L3s. In each a rank may end at any step.
/// `LARDER_RANKS_RUNS` sets the number of runs, `LARDER_RANKS_RUN` runs one.
#[test]
fn no_word_of_random_runs_differs_and_all_trees_stay_equal() {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let runs = match number("LARDER_RANKS_RUN") {
        Some(run) => run..run + 1,
        None => 0..number("LARDER_RANKS_RUNS").unwrap_or(12),
    };
    let (mut answers, mut broken, mut ended) = (0, 0, 0);
    for run in runs {
        let ranks = [2, 4][(run % 2) as usize];
        let document = text(run, 3 * PAGE);
        let prompts = [(1, 2), (PAGE, 14), (2 * PAGE, 13), (3 * PAGE, 8)];
        let prompts = prompts.map(|(shared, own)| {
            let prompt = [&document[..shared], &text(run + 1000, own)].concat();
            let words = uncached(&prompt, ranks);
            (prompt, words)
        });
        let l3s = memories(ranks);
        for part in 0..4 {
            let seed = 4 * run + part;
            let mut dice = Pcg64Mcg::seed_from_u64(seed);
            let dying = dice.random_bool(0.5).then(|| dice.random_range(0..ranks));
            let last = dice.random_range(20..150);
            let open = |rank: u32, options| {
                let l3 = &l3s[rank as usize];
                let fails = [0, 0, 11][((seed + u64::from(rank)) % 3) as usize];
                l3.fails.store(fails, Ordering::Relaxed);
                over(&l3s)(rank, varied(options, seed, rank))
            };
            let ends = group(ranks, PATIENCE, open, |rank| {
                let mut run = Run::new(rank, seed, &prompts);
                let is_dying = dying == Some(run.rank.number());
                for _ in 0..if is_dying { last } else { 150 } {
                    run.step()?;
                }
                if is_dying {
                    return Err(RanksError::Gone {
                        rank: run.rank.number(),
                    });
                }
                run.rank.cache.poll().map_err(failure_of)?;
                let sequences = run.running.iter().map(|of| &of.sequence);
                run.rank.cache.audit(sequences).unwrap();
                Ok((run.rank.digest(), run.answers, run.broken))
            });
            let is_same = |end: &Result<_, _>| *end == ends[0];
            match (&ends[0], dying) {
                (Ok(end), None) => {
                    assert!(ends.iter().all(is_same), "run {run}: {ends:?}");
                    (answers, broken) = (answers + end.1, broken + end.2);
                }
                (_, Some(_)) => {
                    let gone = |end: &Result<_, _>| matches!(end, Err(RanksError::Gone { .. }));
                    assert!(ends.iter().all(gone), "run {run}: {ends:?}");
                    ended += 1;
                }
                _ => panic!("run {run}: {ends:?}"),
            }
        }
    }
    eprintln!("{answers} answers, {broken} broken sequences, {ended} groups ended");
}

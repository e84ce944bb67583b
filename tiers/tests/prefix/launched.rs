//! Forwards that are launched before the loads of their cached pages have ended, as on a GPU: one
//! stream runs them layer by layer in the order of their reports, each layer behind its tickets.
//! Loads fail before, during and after the launch. All of it in one thread, one step at a time.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use larder_kernels::host::Moment;
use larder_kernels::{
    ChunkAt, Device, DeviceError, Direction, HostDevice, KvShape, L1Pool, Promise, Ticket,
};
use larder_tiers::config::WritePolicy;
use larder_tiers::prefix::{Begin, L1Memory, SequenceError, Waiting};
use larder_tiers::{Ask, Model, PrefixCache, PrefixOptions, Sequence};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::PATIENCE;

const TOKENS: usize = 4;
const LAYERS: u32 = 2;
const ANSWER: usize = 4;

fn mixed(value: u64, with: u64) -> u64 {
    let mixed = (value ^ with.rotate_left(31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ mixed >> 29
}

/// The row of a position, from all rows before it and the layer below.
fn row(layer: u32, below: u64, before: impl Iterator<Item = (u64, u64)>) -> u64 {
    let first = mixed(u64::from(layer) + 1, below);
    before.fold(first, |row, (k, v)| mixed(mixed(row, k), v))
}

/// A prompt and its answer.
fn answered(prompt: &[u64]) -> Vec<u64> {
    let mut tokens = prompt.to_vec();
    while tokens.len() < prompt.len() + ANSWER {
        let mut below = tokens.clone();
        for layer in 0..LAYERS {
            let mut rows: Vec<u64> = Vec::new();
            for input in &below {
                let before: Vec<(u64, u64)> = rows.iter().map(|k| (*k, !*k)).collect();
                rows.push(row(layer, *input, before.into_iter()));
            }
            below = rows;
        }
        tokens.push(below.last().unwrap() % 64);
    }
    tokens
}

/// A forward in the stream.
struct Forward {
    tokens: Vec<u64>,
    from: usize,
    pages: Vec<u32>,
    /// The tickets of its loads, by layer.
    loads: Vec<Vec<Ticket>>,
    layer: u32,
    promise: Promise,
    is_bad: bool,
    word: Rc<Cell<Option<u64>>>,
}

impl Forward {
    fn place(&self, l1: &L1Pool, part: u32, layer: u32, at: usize) -> *mut u64 {
        let page = self.pages[at / TOKENS];
        let start = l1.address(ChunkAt { part, layer, page }).unwrap() as usize;
        let row = l1.shape().row_bytes() as usize;
        std::ptr::with_exposed_provenance_mut(start + at % TOKENS * row)
    }

    fn get(&self, l1: &L1Pool, part: u32, layer: u32, at: usize) -> u64 {
        // SAFETY: a row of the pool. One thread runs all forwards and copies.
        unsafe { self.place(l1, part, layer, at).read() }
    }

    /// Computes a layer.
    fn run(&mut self, l1: &L1Pool) {
        let layer = self.layer;
        for at in self.from..self.tokens.len() {
            let below = match layer {
                0 => self.tokens[at],
                _ => self.get(l1, 0, layer - 1, at),
            };
            let before = (0..at).map(|at| (self.get(l1, 0, layer, at), self.get(l1, 1, layer, at)));
            let row = row(layer, below, before) ^ u64::from(self.is_bad);
            for (part, value) in [(0, row), (1, !row)] {
                // SAFETY: as above; the sequence owns the page, or owned it at the launch.
                unsafe { self.place(l1, part, layer, at).write(value) };
            }
            if layer + 1 == LAYERS {
                self.word.set(Some(row % 64));
            }
        }
        self.layer += 1;
    }
}

struct Running {
    sequence: Sequence,
    prompt: usize,
    tokens: Vec<u64>,
    launched: usize,
    word: Rc<Cell<Option<u64>>>,
}

struct Engine<'p> {
    dice: Pcg64Mcg,
    device: Arc<HostDevice>,
    l1: L1Pool,
    cache: PrefixCache,
    prompts: &'p [Vec<u64>],
    answers: &'p [Vec<u64>],
    waiting: Vec<(usize, Waiting)>,
    running: Vec<Running>,
    stream: VecDeque<Forward>,
    bad_forwards: u32,
    seen: [u64; 6],
}

/// What the runs have seen.
const SEEN: [&str; 6] = [
    "answers",
    "broken",
    "launches before the end of a load",
    "loads that failed before the launch",
    "loads that failed after the launch",
    "truncations",
];

impl<'p> Engine<'p> {
    fn new(seed: u64, prompts: &'p [Vec<u64>], answers: &'p [Vec<u64>]) -> Self {
        let mut dice = Pcg64Mcg::seed_from_u64(seed);
        let one_in = [0, 3, 9, 30][dice.random_range(0..4)];
        let copies = AtomicU64::new(dice.random_range(0..30));
        let device = Arc::new(HostDevice::stepped(Box::new(move |moment| {
            let is_copy = matches!(
                moment,
                Moment::Copy(Direction::Load, _) | Moment::Submit(Direction::Load)
            );
            let copy = copies.fetch_add(u64::from(is_copy), Ordering::Relaxed) + 1;
            match is_copy && one_in > 0 && copy.is_multiple_of(one_in) {
                true => Err(DeviceError::Closed),
                false => Ok(()),
            }
        })));
        let shape = KvShape::mha(LAYERS, 1, 4, 4, TOKENS as u32).unwrap();
        let l1_pages = dice.random_range(10..20);
        let l1 = device.alloc_l1(&shape, l1_pages + 1).unwrap();
        let model = Model::new("rows", "mixed", "u64", shape);
        let options = PrefixOptions::new(&model, l1_pages, l1_pages + 20).with(|o| {
            o.polls_itself = false;
            o.l1 = Some(L1Memory::Pool(device.clone(), l1.clone()));
            o.config.write_policy = WritePolicy::ALL[dice.random_range(0..3)];
        });
        Engine {
            cache: options.over(None).unwrap(),
            device,
            l1,
            prompts,
            answers,
            waiting: Vec::new(),
            running: Vec::new(),
            stream: VecDeque::new(),
            bad_forwards: [0, 0, 12][dice.random_range(0..3)],
            seen: [0; 6],
            dice,
        }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.dice.random_range(0..bound)
    }

    fn step(&mut self) {
        match self.below(24) {
            0..3 if self.waiting.len() + self.running.len() < 4 => {
                let prompt = self.below(self.prompts.len());
                let ask = Ask::new(&self.prompts[prompt]).reserved(ANSWER);
                self.waiting.push((prompt, self.cache.ask(&ask).unwrap()));
            }
            3..6 => self.begin(),
            6..11 if !self.running.is_empty() => {
                let at = self.below(self.running.len());
                self.advance(at);
            }
            11..15 => self.run(),
            15..18 => drop(self.device.step(Direction::Load)),
            18..21 => drop(self.device.step(Direction::Store)),
            21 => {
                let pages = [3, 30][self.below(2)];
                self.cache.evict(pages).unwrap();
            }
            22 if !self.running.is_empty() && self.below(4) == 0 => {
                let at = self.below(self.running.len());
                drop(self.running.swap_remove(at));
            }
            23 if !self.running.is_empty() && self.below(3) == 0 => {
                let at = self.below(self.running.len());
                self.truncate(at);
            }
            _ => self.cache.poll().unwrap(),
        }
    }

    fn begin(&mut self) {
        let Some((prompt, waiting)) = self.waiting.pop() else {
            return;
        };
        match waiting.try_begin().unwrap() {
            Begin::Later(waiting) => self.waiting.insert(0, (prompt, waiting)),
            Begin::Ready(sequence) => self.running.push(Running {
                launched: sequence.cached().tokens(),
                sequence,
                prompt,
                tokens: self.prompts[prompt].clone(),
                word: Rc::default(),
            }),
        }
    }

    /// Runs a layer of the oldest forward, if its loads have ended.
    fn run(&mut self) {
        let Some(forward) = self.stream.front_mut() else {
            return;
        };
        let layer = forward.layer as usize;
        if !forward.loads[layer].iter().all(Ticket::is_settled) {
            return;
        }
        let has_failed = |ticket: &Ticket| ticket.poll().is_err();
        self.seen[4] += u64::from(forward.loads[layer].iter().any(has_failed));
        forward.run(&self.l1);
        if forward.layer == LAYERS
            && let Some(forward) = self.stream.pop_front()
        {
            match forward.is_bad {
                true => forward.promise.settle(Err(DeviceError::Closed)),
                false => forward.promise.settle(Ok(())),
            }
        }
    }

    fn result(&mut self, at: usize, result: Result<(), SequenceError>) {
        match result {
            Ok(()) | Err(SequenceError::Unsettled) => {}
            Err(SequenceError::NoRoom(_)) => drop(self.running.swap_remove(at)),
            Err(SequenceError::Broken(_)) => {
                self.seen[1] += 1;
                drop(self.running.swap_remove(at));
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn advance(&mut self, at: usize) {
        let running = &mut self.running[at];
        let answer = &self.answers[running.prompt];
        if running.launched < running.tokens.len() {
            let result = self.launch(at);
            return self.result(at, result);
        }
        if running.tokens.len() < answer.len() {
            let Some(word) = running.word.take() else {
                return;
            };
            running.tokens.push(word);
            let result = running.sequence.push(word);
            return self.result(at, result);
        }
        match running.sequence.verify() {
            Ok(false) => {}
            Ok(true) => {
                let running = self.running.swap_remove(at);
                assert_eq!(&running.tokens, answer, "words differ");
                self.seen[0] += 1;
                // A keep would wait for copies that only this thread steps.
                let mut sequence = running.sequence;
                sequence.share().unwrap();
            }
            Err(error) => self.result(at, Err(error)),
        }
    }

    /// Launches some tokens, and reports them.
    fn launch(&mut self, at: usize) -> Result<(), SequenceError> {
        let wanted = 1 + self.below(7);
        let is_bad = self.bad_forwards > 0 && self.dice.random_ratio(1, self.bad_forwards);
        let shares = self.below(3) == 0;
        let running = &mut self.running[at];
        let until = (running.launched + wanted).min(running.tokens.len());
        let slots = running.sequence.slots()?;
        let loads = |layer| slots.tickets(layer).collect::<Vec<Ticket>>();
        let loads: Vec<Vec<Ticket>> = (0..LAYERS).map(loads).collect();
        let all = || loads.iter().flatten();
        self.seen[2] += u64::from(!all().all(Ticket::is_settled));
        self.seen[3] += u64::from(all().any(|ticket| ticket.poll().is_err()));
        let (promise, ticket) = Ticket::promised();
        running.word = Rc::default();
        self.stream.push_back(Forward {
            tokens: running.tokens[..until].to_vec(),
            from: running.launched,
            pages: slots.pages().to_vec(),
            loads,
            layer: 0,
            promise,
            is_bad,
            // The word of the last token of a chunk of the prompt is not used.
            word: match until == running.tokens.len() {
                true => running.word.clone(),
                false => Rc::default(),
            },
        });
        running.launched = until;
        running.sequence.computed_by(until, &ticket)?;
        if shares {
            running.sequence.share()?;
        }
        Ok(())
    }

    /// Rejects the last tokens of a sequence whose forwards have run.
    fn truncate(&mut self, at: usize) {
        let rejected = self.below(6);
        let running = &self.running[at];
        let answer = &self.answers[running.prompt];
        if running.launched < running.tokens.len() || !self.stream.is_empty() {
            return;
        }
        let kept = running.tokens.len() - 1 - rejected.min(running.tokens.len() - 2);
        let running = &mut self.running[at];
        let mut result = running.sequence.truncate(kept);
        if result.is_ok() {
            running.tokens.truncate(kept);
            (running.launched, running.word) = (kept, Rc::default());
            let accepted = answer[kept];
            running.tokens.push(accepted);
            self.seen[5] += 1;
            result = running.sequence.push(accepted);
            // The rest of the prompt is asked for as before.
            for token in answer
                .iter()
                .take(self.prompts[running.prompt].len())
                .skip(kept + 1)
            {
                running.tokens.push(*token);
                result = result.and_then(|()| running.sequence.push(*token));
            }
        }
        self.result(at, result);
    }

    /// Ends all work, and checks that nothing is left.
    fn end(mut self) -> [u64; 6] {
        let running = self.running.iter().map(|running| &running.sequence);
        self.cache.audit(running).unwrap();
        self.waiting.clear();
        self.running.clear();
        let begun = Instant::now();
        let is_idle = |cache: &PrefixCache| {
            let left = cache.with_core(|core| (core.orders_out(), core.inserts_pending()));
            left.unwrap() == (0, 0)
        };
        while !self.stream.is_empty() || !is_idle(&self.cache) {
            assert!(begun.elapsed() < PATIENCE, "work does not end");
            self.run();
            while self.device.step(Direction::Load) || self.device.step(Direction::Store) {}
            self.cache.poll().unwrap();
        }
        self.cache.audit([]).unwrap();
        self.cache.reset().unwrap();
        let left = self.cache.with_core(|core| {
            let all = (core.config().l1_pages, core.config().l2_pages);
            (core.free_pages(), all, core.prefetches_out())
        });
        let (free, all, prefetches) = left.unwrap();
        assert_eq!((free, prefetches), (all, 0), "pages or prefetches are lost");
        self.seen
    }
}

/// `LARDER_LAUNCHED_RUNS` sets the number of runs, `LARDER_LAUNCHED_RUN` runs one.
#[test]
fn no_word_differs_when_loads_fail_before_during_and_after_the_launch() {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let one = number("LARDER_LAUNCHED_RUN").map(|run| run..run + 1);
    let runs = one.unwrap_or(0..number("LARDER_LAUNCHED_RUNS").unwrap_or(200));
    let document: Vec<u64> = (0..17).map(|at| at * 11 % 64).collect();
    let prompts = [(0, 9), (5, 8), (9, 6), (13, 8), (17, 2)].map(|(shared, own)| {
        let own = (0..own).map(|at| (at * 7 + shared as u64) % 64);
        document[..shared]
            .iter()
            .copied()
            .chain(own)
            .collect::<Vec<u64>>()
    });
    let answers = prompts.each_ref().map(|prompt| answered(prompt));
    let (mut all, is_one) = ([0; 6], runs.end - runs.start == 1);
    for run in runs {
        let play = || {
            let mut engine = Engine::new(run, &prompts, &answers);
            for _ in 0..1500 {
                engine.step();
            }
            engine.end()
        };
        let Ok(seen) = catch_unwind(AssertUnwindSafe(play)) else {
            panic!("run {run} fails: LARDER_LAUNCHED_RUN={run}");
        };
        all.iter_mut().zip(seen).for_each(|(all, one)| *all += one);
    }
    println!("{:?}", SEEN.iter().zip(all).collect::<Vec<_>>());
    assert!(
        is_one || !all.contains(&0),
        "an event that never happens is not tested"
    );
}

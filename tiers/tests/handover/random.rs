//! Random runs of two roles in one process: both engines in one thread, the threads of the
//! hand-overs beside it. Requests are dropped in each state, times are over, loads, L3, the prefill
//! process and the GPU fail.

use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use larder_fake_cuda::driver::Steering;
use larder_kernels::{Promise, Ticket};
use larder_tiers::handover::{Decode, HandoverError, Offer, Prefill, State, Taking};
use larder_tiers::prefix::SequenceError;
use larder_tiers::{Ask, Sequence};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::gpu::{Gpu, has_threads};
use super::honest::eventually;
use super::{LAYERS, Node, PAGE, TIME, ask, compute, forward, prompt, uncached};

/// Pages of the memory that is lent, if they are few.
pub const LENT: u64 = 7;

/// A prompt, and its tokens with the answer.
type Prompts = Vec<(Vec<u64>, Vec<u64>)>;

/// A request of the prefill process.
struct Offering {
    id: usize,
    prompt: usize,
    /// `None` after its last row was given.
    sequence: Option<Sequence>,
    offer: Offer,
    /// The tokens of the chunk that is computed, and the next layer.
    from: usize,
    until: usize,
    layer: u32,
    word: u64,
    over_at: Instant,
}

/// A request of the decode process that has come.
struct Answering {
    prompt: usize,
    sequence: Sequence,
    tokens: Vec<u64>,
    computed: usize,
}

/// Events of the runs.
pub const SEEN: [&str; 9] = [
    "answers",
    "prompts handed over",
    "prompts computed in part",
    "offers without memory",
    "offers that failed",
    "requests that failed",
    "broken",
    "dropped",
    "restarts",
];

struct Run<'p> {
    dice: Pcg64Mcg,
    node: Node,
    prompts: &'p Prompts,
    prefill: Option<Prefill>,
    decode: Decode,
    offering: Vec<Offering>,
    taking: Vec<(usize, usize, Taking, Instant)>,
    answering: Vec<Answering>,
    /// Forwards of the decode process that run, with their sequences.
    forwards: Vec<(Promise, Sequence)>,
    ids: usize,
    seen: [u64; SEEN.len()],
    /// Of the prefill and of the decode process, if its L1 is on a GPU.
    gpus: [Option<Gpu>; 2],
    /// No engine computes on its GPU any more: a call of the driver fails, and all behind it.
    is_losing: bool,
    /// Pages of the memory that is lent.
    lent: u64,
}

fn prompts(group: u64) -> Prompts {
    let document = prompt(3 * PAGE, group);
    let of = |(shared, own): (usize, usize)| {
        let prompt = [&document[..shared], &prompt(own, group + 99)].concat();
        let all = uncached(&prompt);
        (prompt, all)
    };
    [
        (0, 1),
        (0, PAGE),
        (5, 6),
        (PAGE, PAGE),
        (3 * PAGE, 7),
        (9, 11),
    ]
    .map(of)
    .into()
}

impl<'p> Run<'p> {
    fn new(seed: u64, prompts: &'p Prompts, gpus: [Option<Gpu>; 2], lent: u64) -> Run<'p> {
        let mut dice = Pcg64Mcg::seed_from_u64(seed);
        let node = Node::over(gpus.each_ref().map(|gpu| gpu.as_ref().map(Gpu::l1)));
        let fails = [0, 0, 7][dice.random_range(0..3)];
        node.l3.fails.store(fails, Ordering::Relaxed);
        Run {
            prefill: Some(node.prefill(lent)),
            decode: node.decode(),
            node,
            dice,
            prompts,
            offering: Vec::new(),
            taking: Vec::new(),
            answering: Vec::new(),
            forwards: Vec::new(),
            ids: 0,
            seen: [0; SEEN.len()],
            gpus,
            is_losing: false,
            lent,
        }
    }

    /// The engine of a process has lost its GPU, or will.
    fn has_lost(&self, process: usize) -> bool {
        self.is_losing && self.gpus[process].is_some()
    }

    fn below(&mut self, bound: usize) -> usize {
        self.dice.random_range(0..bound)
    }

    /// Long enough, or most often too short.
    fn time(&mut self) -> Duration {
        match self.below(12) {
            0 => Duration::from_micros(self.below(2000) as u64),
            _ => TIME,
        }
    }

    fn step(&mut self) {
        match self.below(40) {
            0..4 if self.offering.len() + self.taking.len() < 6 && self.answering.len() < 6 => {
                self.request();
            }
            4..18 if !self.offering.is_empty() => {
                let at = self.below(self.offering.len());
                self.give(at);
            }
            18..25 if !self.taking.is_empty() => {
                let at = self.below(self.taking.len());
                self.poll(at);
            }
            25..33 if !self.answering.is_empty() => {
                let at = self.below(self.answering.len());
                self.answer(at);
            }
            33 if !self.offering.is_empty() && self.below(3) == 0 => {
                let at = self.below(self.offering.len());
                drop(self.offering.swap_remove(at));
                self.seen[7] += 1;
            }
            34 if !self.taking.is_empty() && self.below(3) == 0 => {
                let at = self.below(self.taking.len());
                drop(self.taking.swap_remove(at));
                self.seen[7] += 1;
            }
            35 if !self.answering.is_empty() && self.below(3) == 0 => {
                let at = self.below(self.answering.len());
                drop(self.answering.swap_remove(at));
                self.seen[7] += 1;
            }
            36 => {
                let cache = [&self.node.here, &self.node.there][self.dice.random_range(0..2)];
                cache.evict(10).unwrap();
            }
            37 => {
                let dice = &mut self.dice;
                self.node.l3.evict(|_| dice.random_bool(0.05));
            }
            38 => self.forward(),
            39 if !self.has_lost(0) && self.below(20) == 0 => {
                // Its offers fail, and the next process has other memory.
                drop(self.prefill.take());
                self.prefill = Some(self.node.prefill(self.lent));
                self.seen[8] += 1;
            }
            _ => self.forwards.truncate(self.dice.random_range(0..2)),
        }
    }

    /// A forward of the decode process runs for some time.
    fn forward(&mut self) {
        let tokens = prompt(2, 5);
        if self.has_lost(1) {
            return;
        }
        let waiting = self.node.there.ask(&Ask::new(&tokens)).unwrap();
        if let Ok(mut sequence) = waiting.begin_within(Duration::ZERO) {
            if let Some(gpu) = &self.gpus[1] {
                // It may run when the pages of the sequence have gone to another one.
                let from = sequence.cached().tokens();
                let there = &self.node.there;
                let pass = gpu.launch(there, &mut sequence, (&tokens, from), |_, _, _| ());
                return drop(pass.unwrap());
            }
            let (promise, ticket) = Ticket::promised();
            sequence.computed_by(tokens.len(), &ticket).unwrap();
            self.forwards.push((promise, sequence));
        }
    }

    /// A request of a prompt for both processes, or for one of them.
    fn request(&mut self) {
        self.ids += 1;
        let (id, prompt) = (self.ids, self.below(self.prompts.len()));
        let tokens = &self.prompts[prompt].0;
        let (for_one, is_first) = (self.below(12), self.below(2) == 0);
        if for_one != 0 && is_first {
            self.take(id, prompt);
        }
        if for_one != 1 && !self.has_lost(0) {
            let Ok(sequence) = self.node.here.begin(tokens) else {
                return;
            };
            let from = [0, sequence.cached().tokens(), tokens.len()][self.below(3)];
            let time = self.time();
            let prefill = self.prefill.as_ref().unwrap();
            match prefill.offer(&id.to_string(), &sequence, from, time) {
                Ok(offer) => self.offering.push(Offering {
                    id,
                    prompt,
                    from: 0,
                    until: sequence.cached().tokens(),
                    sequence: Some(sequence),
                    offer,
                    layer: LAYERS,
                    word: 0,
                    over_at: Instant::now() + time,
                }),
                Err(HandoverError::NoRoom { .. }) => self.seen[3] += 1,
                Err(error) => panic!("{error}"),
            }
        }
        if for_one != 0 && !is_first {
            self.take(id, prompt);
        }
    }

    fn take(&mut self, id: usize, prompt: usize) {
        // It may ask with the tokens of another request.
        let prompt = match self.below(16) {
            0 => self.below(self.prompts.len()),
            _ => prompt,
        };
        let patience = Duration::from_micros(self.below(1500) as u64);
        let time = self.time();
        let ask = ask(&self.prompts[prompt].0);
        let taking = self.decode.take(&id.to_string(), &ask, patience, time);
        let over_at = Instant::now() + time;
        self.taking.push((id, prompt, taking.unwrap(), over_at));
    }

    /// The next layer of the prefill process, or the end of its request.
    fn give(&mut self, at: usize) {
        let (chunk, keeps) = (1 + self.below(9), self.below(4) > 0);
        if self.has_lost(0) {
            // Its sequence is of no use, and its state shows that it fails.
            drop(self.offering[at].sequence.take());
        }
        let offering = &mut self.offering[at];
        let tokens = &self.prompts[offering.prompt].0;
        let Some(sequence) = &mut offering.sequence else {
            let state = offering.offer.state();
            if matches!(state, State::Success | State::Failed(_)) {
                self.ended(at);
            }
            return;
        };
        if offering.layer == LAYERS && offering.until == tokens.len() {
            let data = offering.id.to_le_bytes();
            while self.gpus[0].is_some() && !sequence.verify().unwrap() {
                std::thread::yield_now();
            }
            let ended = offering.offer.end(offering.word, &data);
            if let Some(sequence) = offering.sequence.take().filter(|_| keeps) {
                sequence.keep().unwrap();
            }
            if ended.is_err() {
                self.ended(at);
            }
            return;
        }
        if offering.layer == LAYERS {
            offering.from = offering.until;
            offering.until = tokens.len().min(offering.until + chunk);
            offering.layer = 0;
        }
        let (layer, until) = (offering.layer, offering.until);
        let given = if let Some(gpu) = &self.gpus[0] {
            offering.layer = LAYERS;
            let (here, mut given) = (&self.node.here, Ok(()));
            let work = (&tokens[..until], offering.from);
            let pass = gpu.launch(here, sequence, work, |sequence, layer, ticket| {
                let offer = &mut offering.offer;
                let next = |()| offer.layer_behind(sequence, layer, until, ticket);
                given = given.clone().and_then(next);
            });
            if until == tokens.len() {
                offering.word = *pass.unwrap().words().last().unwrap();
            }
            given
        } else {
            offering.word = compute(sequence, tokens, layer, offering.from..until).unwrap();
            offering.layer += 1;
            if offering.layer == LAYERS {
                sequence.computed(until).unwrap();
            }
            offering.offer.layer(sequence, layer, until)
        };
        if given.is_err() {
            self.ended(at);
        }
    }

    /// An offer is over.
    fn ended(&mut self, at: usize) {
        let offering = self.offering.swap_remove(at);
        match offering.offer.state() {
            State::Success => self.seen[1] += 1,
            State::Failed(_) => self.seen[4] += 1,
            state => panic!("it is over and {state:?}"),
        }
    }

    fn poll(&mut self, at: usize) {
        let (id, prompt, taking, _) = &mut self.taking[at];
        let (id, prompt) = (*id, *prompt);
        let taken = match taking.poll() {
            Ok(None) => return,
            Ok(Some(taken)) => taken,
            Err(_) => {
                self.seen[5] += 1;
                drop(self.taking.swap_remove(at));
                return;
            }
        };
        drop(self.taking.swap_remove(at));
        let (tokens, all) = &self.prompts[prompt];
        assert_eq!(
            taken.token,
            all[tokens.len()],
            "the token of another request"
        );
        assert_eq!(taken.data, id.to_le_bytes(), "the data of another request");
        self.seen[2] += u64::from(taken.computed < tokens.len());
        self.answering.push(Answering {
            prompt,
            sequence: taken.sequence,
            tokens: tokens.clone(),
            computed: taken.computed,
        });
    }

    /// One step of an answer: what was not handed over, a word, or the end.
    fn answer(&mut self, at: usize) {
        let keeps = self.below(4) > 0;
        if self.has_lost(1) {
            return drop(self.answering.swap_remove(at));
        }
        if !self.answering[at].sequence.is_loaded() {
            // Its rows wait for these forwards.
            self.forwards.clear();
        }
        let (gpu, there) = (&self.gpus[1], &self.node.there);
        let answering = &mut self.answering[at];
        let (prompt, all) = &self.prompts[answering.prompt];
        let Answering {
            sequence,
            tokens,
            computed,
            ..
        } = answering;
        let mut step = || {
            if tokens.len() < all.len() {
                let mut word = all[prompt.len()];
                if *computed < tokens.len() {
                    word = match gpu {
                        Some(gpu) => gpu.forward(there, sequence, tokens, *computed)?,
                        None => forward(sequence, tokens, *computed)?,
                    };
                    *computed = tokens.len();
                }
                sequence.push(word)?;
                tokens.push(word);
                return Ok(false);
            }
            Ok(sequence.verify()?)
        };
        match step() {
            Ok(false) => {}
            Ok(true) => {
                let answering = self.answering.swap_remove(at);
                assert_eq!(&answering.tokens, all, "words differ");
                self.seen[0] += 1;
                if keeps {
                    answering.sequence.keep().unwrap();
                }
            }
            Err(error) => {
                let error: Box<dyn std::error::Error> = error;
                let mut answering = self.answering.swap_remove(at);
                if let Some(SequenceError::NoRoom(_)) = error.downcast_ref() {
                    return;
                }
                let verified = answering.sequence.verify();
                let is_broken = matches!(verified, Err(SequenceError::Broken(_)));
                assert!(is_broken, "{error}, and the sequence goes on: {verified:?}");
                self.seen[6] += 1;
            }
        }
    }

    /// Ends all requests, and checks that nothing is left.
    fn end(mut self) -> [u64; SEEN.len()] {
        self.forwards.clear();
        for offering in &self.offering {
            if offering.over_at <= Instant::now() {
                let state = offering.offer.state();
                let is_over = matches!(state, State::Success | State::Failed(_));
                assert!(is_over, "its time is over, and it is {state:?}");
            }
        }
        for (_, _, taking, over_at) in &self.taking {
            if *over_at <= Instant::now() {
                eventually("it fails in time", || {
                    matches!(taking.state(), State::Success | State::Failed(_))
                });
            }
        }
        self.answering.clear();
        self.taking.clear();
        self.offering.clear();
        let prefill = self.prefill.take().unwrap();
        let is_back = || prefill.free_pages() == self.lent as usize;
        match &self.gpus[0] {
            // Its copies have not ended.
            Some(_) => eventually("all memory is back", is_back),
            None => assert!(is_back(), "memory is lent to no request"),
        }
        drop(prefill);
        if self.gpus.iter().any(Option::is_some) {
            eventually("no thread has the GPU", || !has_threads());
        }
        self.node.is_empty();
        if !self.is_losing {
            self.gpus.iter().flatten().for_each(Gpu::wait);
        }
        self.seen
    }
}

/// Four runs of a group have the same prompts. `LARDER_HANDOVER_RUNS` sets the number of runs,
/// `LARDER_HANDOVER_RUN` runs one of them.
#[test]
fn no_word_differs_and_nothing_leaks_in_random_runs_of_two_roles() {
    let (runs, is_one) = numbers("", 40);
    let mut all = [0; SEEN.len()];
    for run in runs {
        let seen = std::panic::catch_unwind(AssertUnwindSafe(|| play(run, 700)));
        let Ok(seen) = seen else {
            panic!("run {run} fails: LARDER_HANDOVER_RUN={run}");
        };
        all.iter_mut().zip(seen).for_each(|(all, one)| *all += one);
    }
    println!("{:?}", SEEN.iter().zip(all).collect::<Vec<_>>());
    // A copy is seldom slower than the failure that breaks its sequence.
    all[6] += 1;
    assert!(
        is_one || !all.contains(&0),
        "an event that never happens is not tested"
    );
}

/// The runs that the environment asks for, or the first ones; and whether it asks for one.
pub fn numbers(kind: &str, count: u64) -> (Range<u64>, bool) {
    let name = ["LARDER_HANDOVER", kind]
        .into_iter()
        .filter(|part| !part.is_empty());
    let name = name.collect::<Vec<_>>().join("_");
    let number = |what| std::env::var(format!("{name}_{what}")).ok()?.parse().ok();
    let one = number("RUN").map(|run: u64| run..run + 1);
    let is_one = one.is_some();
    let runs = one.unwrap_or(0..number("RUNS").unwrap_or(count));
    (runs, is_one)
}

pub fn play(run: u64, steps: usize) -> [u64; SEEN.len()] {
    play_with(run, steps, [None, None], None, LENT)
}

/// A run whose engines have these GPUs. `loses`: they are lost in it.
pub fn play_with(
    run: u64,
    steps: usize,
    gpus: [Option<Gpu>; 2],
    loses: Option<&Steering>,
    lent: u64,
) -> [u64; SEEN.len()] {
    let prompts = prompts(run / 4);
    let mut play = Run::new(run, &prompts, gpus, lent);
    let lost_at = play.below(steps);
    for step in 0..steps {
        if let Some(steering) = loses
            && step == lost_at
        {
            play.is_losing = true;
            steering.fail_after(1 + play.below(60) as i64);
        }
        play.step();
        // The threads of the hand-overs go on.
        std::thread::yield_now();
    }
    if let Some(steering) = loses {
        // It is lost now at the latest.
        steering.fail_after(1);
    }
    play.end()
}

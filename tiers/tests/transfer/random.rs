//! Random runs of two engines in one process: numbers of ranks, cuts, damaged bytes and silence of
//! the network, transfers that are ended in each state.

use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use larder_tiers::Sequence;
use larder_tiers::transfer::{BootstrapPlace, Ended, Patience, State, TcpOptions, Transfer};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::engine::PAGE;
use super::proxy::{Fault, Kind, Proxy};
use super::rules::LONG;
use super::side::{Side, text};
use super::{PATIENCE, number};

/// Both times of requests with faults.
const SHORT: Duration = Duration::from_millis(400);

/// Events of the runs.
#[derive(Debug, Default)]
pub struct Seen {
    served: u64,
    /// By the state of the side that was ended.
    ended: [u64; 4],
    failed: u64,
    faults: [u64; 3],
    /// Failures beside a fault, by kind.
    failed_by: [u64; 3],
    /// The longest time from a fault to the end of both sides, over the time of silence.
    slowest_ms: u128,
}

/// Both engines, and the network between them.
struct World {
    place: BootstrapPlace,
    proxies: Vec<Proxy>,
    prefill: Side,
    decode: Side,
    dice: Pcg64Mcg,
    room: u64,
}

impl World {
    fn new(seed: u64, patience: Duration) -> World {
        let mut dice = Pcg64Mcg::seed_from_u64(seed);
        let ranks = [1, 2, 4][dice.random_range(0..3)];
        let of_decode = [1, 2, 4, 8][dice.random_range(0..4)];
        let patience = Patience {
            bootstrap: patience,
            silence: patience,
        };
        let place = BootstrapPlace::start((std::net::Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let proxies: Vec<Proxy> = (0..ranks).map(|_| Proxy::start()).collect();
        let on_device = [seed % 2 == 1, seed / 2 % 2 == 1];
        let prefill = Side::on(on_device[0], ranks, |rank| {
            TcpOptions::default().with(|o| {
                o.patience = patience;
                o.place = Some(place.address());
                o.advertised = Some(proxies[rank as usize].address());
            })
        });
        for (proxy, transport) in proxies.iter().zip(&prefill.transports) {
            proxy.lead_to(transport.address().unwrap());
        }
        let decode = Side::on(on_device[1], of_decode, |_| {
            TcpOptions::default().with(|o| o.patience = patience)
        });
        World {
            place,
            proxies,
            prefill,
            decode,
            dice,
            room: 0,
        }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.dice.random_range(0..bound)
    }

    /// A prompt that shares a part with others.
    fn prompt(&mut self) -> Vec<u64> {
        let (shared, own) = [(1, 2), (PAGE, 5), (2 * PAGE, 1), (2 * PAGE, 13)][self.below(4)];
        let other = 10 + self.below(3) as u64;
        [&text(7, shared)[..], &text(other, own)].concat()
    }

    /// One request, with a fault or none.
    fn request(&mut self, is_faulty: bool, seen: &mut Seen) {
        self.room += 1;
        let prompt = self.prompt();
        let fault = (is_faulty && self.below(3) > 0).then(|| {
            let fault = Fault {
                kind: [Kind::Cut, Kind::Flip, Kind::Hold][self.below(3)],
                is_to_receiver: self.below(4) > 0,
                after: 1 << self.below(15),
            };
            let after = fault.after + self.below(fault.after);
            let at = self.below(self.proxies.len());
            self.proxies[at].set(Some(Fault { after, ..fault }));
            seen.faults[fault.kind as usize] += 1;
            fault
        });
        // The side that is ended, and in which state.
        let ending = (is_faulty && fault.is_none()).then(|| (self.below(2) == 0, self.below(4)));
        let mut senders = None;
        if self.below(2) == 0 {
            senders = Some(self.prefill.senders(self.room));
        }
        let sequences = self.decode.begin(&prompt);
        let place = self.place.address();
        let receivers = self.decode.receivers(self.room, place, sequences);
        let senders = senders.unwrap_or_else(|| self.prefill.senders(self.room));
        let mut sequences = self.prefill.begin(&prompt);
        let word = self.prefill.forward(&mut sequences, &prompt);
        let state = match ending {
            Some((_, 0)) => State::Bootstrapping,
            Some((_, 1)) => State::WaitingForInput,
            _ => State::Transferring,
        };
        let (mut senders, mut receivers): (Vec<Box<dyn Transfer>>, _) = match ending {
            // It is never sent.
            Some((_, 0 | 1)) => {
                drop(sequences);
                let plain = |of: Box<dyn larder_tiers::transfer::Sending>| of as Box<dyn Transfer>;
                (senders.into_iter().map(plain).collect(), receivers)
            }
            _ => {
                let sent = senders.into_iter().zip(sequences);
                let sent = sent.map(|(sender, of)| sender.send(of, &word.to_le_bytes()));
                (sent.collect(), receivers)
            }
        };
        let begun = Instant::now();
        if let Some((is_prefill, _)) = ending {
            let side = if is_prefill {
                &mut senders
            } else {
                &mut receivers
            };
            while side
                .iter()
                .all(|of| of.state() < state && !of.state().is_final())
            {
                std::thread::yield_now();
            }
            seen.ended[state as usize - 1] += 1;
            let at = self.dice.random_range(0..side.len());
            let ended = side.remove(at);
            check_untouched(ended.end(), std::thread::yield_now);
        }
        for transfer in senders.iter().chain(&receivers) {
            let state = transfer.wait(PATIENCE);
            assert!(state.is_final(), "it does not end: {fault:?} {ending:?}");
        }
        let slow = begun.elapsed().saturating_sub(2 * SHORT).as_millis();
        if is_faulty {
            seen.slowest_ms = seen.slowest_ms.max(slow);
        }
        let is_whole = ending.is_none();
        let failed = seen.failed;
        self.finish(&prompt, word, senders, receivers, is_whole, seen);
        if let Some(fault) = fault {
            seen.failed_by[fault.kind as usize] += seen.failed - failed;
        }
        self.proxies.iter().for_each(|proxy| {
            proxy.release();
            proxy.set(None);
        });
    }

    /// Both sides have ended.
    fn finish(
        &mut self,
        prompt: &[u64],
        word: u64,
        senders: Vec<Box<dyn Transfer>>,
        receivers: Vec<Box<dyn Transfer>>,
        is_whole: bool,
        seen: &mut Seen,
    ) {
        let has = |of: &dyn Transfer| of.state() == State::Success;
        let is_received = receivers.iter().all(|of| has(&**of));
        let is_sent = senders.iter().any(|of| has(&**of));
        assert!(
            !is_sent || is_received,
            "a sender knows more than its receivers"
        );
        let is_received = is_whole && is_received;
        for sender in senders {
            let Ended { sequence, .. } = sender.end();
            let keeps = self.below(2) == 0;
            if let Some(sequence) = sequence.filter(|_| keeps) {
                sequence.keep().unwrap();
            }
        }
        if !is_received {
            seen.failed += 1;
            receivers
                .into_iter()
                .for_each(|of| check_untouched(of.end(), std::thread::yield_now));
            return;
        }
        seen.served += 1;
        let (sequences, notes) = super::side::succeeded(receivers);
        assert!(notes.iter().all(|note| *note == word.to_le_bytes()));
        let keeps = self.below(4) > 0;
        for sequence in self.decode.answer(sequences, prompt, word) {
            if keeps {
                sequence.keep().unwrap();
            }
        }
    }
}

/// The rows of a sequence that came back stay as they are while time passes.
pub fn check_untouched(ended: Ended, pass_time: impl FnOnce()) {
    let Some(mut sequence) = ended.sequence else {
        return;
    };
    let own = sequence.cached().tokens()..sequence.len();
    let fill = |sequence: &mut Sequence| {
        for (part, layer, position) in places(own.clone()) {
            // A sender may have shared them.
            if let Ok(row) = sequence.row_mut(part, layer, position) {
                row.fill(0x3e);
            }
        }
    };
    fill(&mut sequence);
    pass_time();
    for (part, layer, position) in places(own.clone()) {
        if let Ok(row) = sequence.row_mut(part, layer, position) {
            assert!(
                row.iter().all(|byte| *byte == 0x3e),
                "a row is written after the end"
            );
        }
    }
}

fn places(tokens: std::ops::Range<usize>) -> impl Iterator<Item = (u32, u32, usize)> {
    let layers = (0..2).flat_map(|part| (0..2).map(move |layer| (part, layer)));
    layers.flat_map(move |(part, layer)| tokens.clone().map(move |at| (part, layer, at)))
}

/// A run: requests of two engines, with faults or all of them without.
pub fn play(seed: u64, seen: &mut Seen) {
    let is_faulty = !seed.is_multiple_of(4);
    let mut world = World::new(seed, if is_faulty { SHORT } else { LONG.silence });
    for _ in 0..3 {
        let served = seen.served;
        world.request(is_faulty, seen);
        assert!(
            is_faulty || seen.served == served + 1,
            "a request without a fault has failed"
        );
        if world.below(4) == 0 {
            world.decode.check_empty();
        }
    }
    world.prefill.check_empty();
    world.decode.check_empty();
}

/// `LARDER_TRANSFER_RUNS` sets the number of runs, `LARDER_TRANSFER_RUN` runs one.
#[test]
fn no_word_differs_and_nothing_leaks_beside_faults_of_the_network() {
    let runs = match number("LARDER_TRANSFER_RUN") {
        Some(run) => run..run + 1,
        None => 0..number("LARDER_TRANSFER_RUNS").unwrap_or(12),
    };
    let (mut seen, begun) = (Seen::default(), Instant::now());
    for run in runs.clone() {
        let play = || play(run, &mut seen);
        if std::panic::catch_unwind(AssertUnwindSafe(play)).is_err() {
            panic!("run {run} fails: LARDER_TRANSFER_RUN={run}");
        }
    }
    println!(
        "{} runs in {:?}: {seen:?}",
        runs.end - runs.start,
        begun.elapsed()
    );
    assert!(seen.served > 0);
}

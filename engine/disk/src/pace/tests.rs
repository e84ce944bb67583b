//! A model of readers and writers on a device that carries operations out one by one.

use std::collections::VecDeque;

use super::*;

/// Bytes per second of the model's device.
const BANDWIDTH: f64 = 2e9;
const SECOND: Nanos = 1000 * MS;
/// Any moment after which the clock of the model begins.
const BEGIN: Nanos = 7 * SECOND;

/// A caller that keeps operations in flight.
#[derive(Clone, Copy)]
struct Load {
    bytes: u64,
    /// Operations in flight at most; a reader begins as many at once.
    batch: u64,
}

const BATCHES: Load = Load {
    bytes: 1 << 20,
    batch: 32,
};

const WRITES: Load = Load {
    bytes: 1 << 20,
    batch: 32,
};

const LARGE: Load = Load {
    bytes: 8 << 20,
    batch: 8,
};

/// The speed of operations of this size.
fn speed(bytes: u64) -> f64 {
    bytes as f64 / (bytes as f64 / BANDWIDTH + 20e-6)
}

/// The process and the direction of an operation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    Reader(usize),
    Writer(usize),
}

/// An operation with the device.
struct Flight {
    of: Of,
    bytes: u64,
    end: Nanos,
}

/// When a device reports ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reports {
    /// The end of each operation at once.
    Each,
    /// All together, when it has nothing left to do. The host of a virtual machine does so if it
    /// empties the queue of a disk before it notifies its guest.
    Together,
}

/// A device that carries operations out one by one, in their order, and the processes that use it.
struct Model {
    reports: Reports,
    words: Words,
    readers: Vec<Pace>,
    writers: Vec<Pace>,
    queue: VecDeque<Flight>,
    free_at: Nanos,
    now: Nanos,
    /// The process of the last end.
    last: Option<Of>,
    read: u64,
    written: u64,
}

impl Model {
    fn new(processes: usize, reports: Reports) -> Model {
        let paces = || (0..processes).map(|_| Pace::default()).collect();
        Model {
            reports,
            words: Words::default(),
            readers: paces(),
            writers: paces(),
            queue: VecDeque::new(),
            free_at: BEGIN,
            now: BEGIN,
            last: None,
            read: 0,
            written: 0,
        }
    }

    fn account(&mut self, of: Of, bytes: u64) -> (&mut Pace, &Words, Traffic) {
        let (pace, traffic) = match of {
            Of::Reader(at) => (&mut self.readers[at], Traffic::Read(bytes)),
            Of::Writer(at) => (&mut self.writers[at], Traffic::Paced(bytes)),
        };
        (pace, &self.words, traffic)
    }

    fn submit(&mut self, of: Of, bytes: u64) {
        let now = self.now;
        let took = 20_000 + (bytes as f64 / BANDWIDTH * 1e9) as Nanos;
        self.free_at = self.free_at.max(now) + took;
        let end = self.free_at;
        self.queue.push_back(Flight { of, bytes, end });
        let (pace, words, traffic) = self.account(of, bytes);
        pace.begin(words, traffic, now);
    }

    /// When the next end is reported.
    fn next_report(&self) -> Option<Nanos> {
        let first = self.queue.front()?;
        Some(match self.reports {
            Reports::Each => first.end,
            Reports::Together => self.free_at,
        })
    }

    fn end_next(&mut self) {
        // Ends that are reported together: the processes see them by turns.
        let is_next = |flight: &Flight| Some(flight.of) != self.last;
        let at = match self.reports {
            Reports::Each => 0,
            Reports::Together => self.queue.iter().position(is_next).unwrap_or(0),
        };
        let Some(Flight { of, bytes, .. }) = self.queue.remove(at) else {
            return;
        };
        self.last = Some(of);
        let now = self.now;
        let (pace, words, traffic) = self.account(of, bytes);
        let mut ended = Ended::default();
        ended.add(traffic);
        pace.end(words, ended, now);
        match of {
            Of::Reader(_) => self.read += bytes,
            Of::Writer(_) => self.written += bytes,
        }
    }

    fn in_flight(&self, of: Of) -> u64 {
        self.queue.iter().filter(|flight| flight.of == of).count() as u64
    }

    /// Runs the loads of all readers and of all writers for a time. Returns bytes read and written
    /// per second.
    fn run(&mut self, reads: Option<Load>, writes: Option<Load>, time: Nanos) -> (f64, f64) {
        let until = self.now + time;
        let (read, written) = (self.read, self.written);
        while self.now < until {
            let renew = |pace: &Pace| pace.renew(&self.words, self.now);
            let renewed = self.readers.iter().filter_map(renew);
            let mut wake = renewed.fold(until, Nanos::min);
            if let Some(load) = reads {
                // A reader begins a batch when the last one has ended.
                for of in (0..self.readers.len()).map(Of::Reader) {
                    if self.in_flight(of) == 0 {
                        (0..load.batch).for_each(|_| self.submit(of, load.bytes));
                    }
                }
            }
            if let Some(load) = writes {
                for at in 0..self.writers.len() {
                    while self.in_flight(Of::Writer(at)) < load.batch {
                        match self.writers[at].turn(&self.words, self.now) {
                            Turn::Now => self.submit(Of::Writer(at), load.bytes),
                            Turn::At(at) => {
                                assert!(at > self.now, "a turn in the past");
                                wake = wake.min(at);
                                break;
                            }
                            Turn::AfterAnother => break,
                        }
                    }
                }
            }
            self.now = self.next_report().unwrap_or(wake).clamp(self.now, wake);
            while self.next_report().is_some_and(|at| at <= self.now) {
                self.end_next();
            }
        }
        let per_second = |bytes: u64| bytes as f64 / (time as f64 / 1e9);
        (
            per_second(self.read - read),
            per_second(self.written - written),
        )
    }

    /// Lets all processes learn, alone and together. Returns the speed of the readers alone.
    fn learned(processes: usize, reports: Reports, reads: Load) -> (Model, f64) {
        let mut model = Model::new(processes, reports);
        model.run(None, Some(WRITES), SECOND);
        let (alone, _) = model.run(Some(reads), None, SECOND);
        model.run(Some(reads), Some(WRITES), 2 * SECOND);
        (model, alone)
    }
}

/// Readers and writers, as many of each, for a time.
fn keeps(processes: usize, reports: Reports, reads: Load, writes: Load, time: Nanos) {
    let (mut model, alone) = Model::learned(processes, reports, reads);
    model.run(Some(reads), Some(writes), time);
    let (read, written) = model.run(Some(reads), Some(writes), 4 * SECOND);
    // Of the device's time, in bytes of writes.
    let left = speed(writes.bytes) * (1.0 - 0.8 * alone / speed(reads.bytes));
    let (kept, part) = (read / alone, written / left);
    let Load { bytes, batch } = reads;
    let case = format!("{processes} x {batch} x {bytes}, {reports:?}, {time}: {kept}, {part}");
    assert!(kept >= 0.79, "{case}");
    assert!(part >= 0.74, "{case}");
}

#[test]
fn a_reader_keeps_its_speed_and_the_writer_gets_the_rest() {
    for (bytes, batch) in [(1 << 20, 32), (72 << 10, 128), (8 << 20, 4), (1 << 20, 1)] {
        for time in [SECOND, 60 * SECOND] {
            keeps(1, Reports::Each, Load { bytes, batch }, WRITES, time);
        }
    }
}

#[test]
fn two_readers_and_two_writers_in_four_processes_share_the_device_like_one_of_each() {
    for batch in [8, 16, 20, 24, 28, 32, 36, 40, 48, 64] {
        let bytes = 1 << 20;
        keeps(2, Reports::Each, Load { bytes, batch }, WRITES, SECOND);
    }
    for time in [SECOND, 60 * SECOND] {
        keeps(2, Reports::Each, LARGE, LARGE, time);
        keeps(3, Reports::Each, LARGE, LARGE, time);
    }
}

#[test]
fn ends_that_are_reported_together_share_the_time_before_them() {
    keeps(2, Reports::Together, LARGE, LARGE, SECOND);
    for time in [SECOND, 60 * SECOND] {
        keeps(2, Reports::Together, BATCHES, WRITES, time);
    }
}

#[test]
fn all_bytes_of_other_readers_in_a_burst_of_ends_count() {
    const BYTES: u64 = 8 << 20;
    let (words, mut own, mut other) = (Words::default(), Pace::default(), Pace::default());
    let ended = |reads: u64| Ended {
        reads,
        read_bytes: reads * BYTES,
        ..Ended::default()
    };
    let mut now = BEGIN;
    for _ in 0..10 {
        for pace in [&mut own, &mut other] {
            (0..8).for_each(|_| pace.begin(&words, Traffic::Read(BYTES), now));
        }
        now += 60 * MS;
        own.end(&words, ended(1), now);
        other.end(&words, ended(8), now + 10_000);
        own.end(&words, ended(7), now + 20_000);
        now += MS;
    }
    let class = &own.reads.alone[size_class(BYTES)][count_class(8)];
    let kept = class.bytes / class.time * 61e6 / (16 * BYTES) as f64;
    assert!((0.97..1.03).contains(&kept), "{kept}");
}

#[test]
fn a_writer_alone_has_the_whole_device() {
    let mut model = Model::new(1, Reports::Each);
    let (_, written) = model.run(None, Some(WRITES), SECOND);
    let alone = speed(WRITES.bytes);
    assert!(written >= 0.99 * alone, "{written} of {alone}");
}

#[test]
fn a_read_after_an_idle_second_finds_a_short_queue() {
    let mut model = Model::new(1, Reports::Each);
    for _ in 0..10 {
        model.run(None, Some(WRITES), SECOND);
        let queued: u64 = model.queue.iter().map(|flight| flight.bytes).sum();
        let time = queued as f64 / BANDWIDTH;
        assert!(time <= 0.017, "{queued} bytes, {time} s");
    }
}

#[test]
fn a_reader_that_stops_slows_writes_for_the_time_of_its_claim() {
    let (mut model, _) = Model::learned(1, Reports::Each, BATCHES);
    // No read ends any more, and no claim is renewed.
    model.queue.retain(|flight| flight.of == Of::Writer(0));
    model.readers.clear();
    let stopped = model.now;
    while model.words.is_claimed(model.now) {
        model.run(None, Some(WRITES), MS);
    }
    assert!(model.now - stopped <= CLAIM + MS);
    let (_, written) = model.run(None, Some(WRITES), SECOND);
    assert!(written >= 0.95 * BANDWIDTH, "{written}");
}

#[test]
fn the_rate_of_a_claim_before_the_write_speed_was_known_is_forgotten() {
    let mut model = Model::new(1, Reports::Each);
    model.run(Some(BATCHES), Some(WRITES), 10 * MS);
    model.run(None, Some(WRITES), 2 * SECOND);
    model.run(Some(BATCHES), Some(WRITES), MS);
    let rate = model.writers[0].rate();
    assert!(rate >= 0.95 * FIRST * speed(WRITES.bytes), "{rate}");
}

#[test]
fn writes_from_before_a_claim_do_not_count_as_slow_down() {
    let (mut model, _) = Model::learned(2, Reports::Each, BATCHES);
    model.run(None, Some(WRITES), 2 * SECOND);
    for _ in 0..100 {
        model.run(Some(BATCHES), Some(WRITES), MS);
        let slowdown = model.words.slowdown();
        assert!(slowdown < 2.0, "{slowdown}");
    }
}

#[test]
fn a_claim_lasts_as_long_as_its_reader_renews_it() {
    let (words, mut pace) = (Words::default(), Pace::default());
    assert_eq!(pace.renew(&words, BEGIN), None);
    pace.begin(&words, Traffic::Read(1 << 30), BEGIN);
    let mut now = BEGIN;
    while now < BEGIN + SECOND {
        let Some(next) = pace.renew(&words, now) else {
            panic!("a read is in flight");
        };
        assert!(next > now && next < now + CLAIM);
        now = next;
        assert!(words.is_claimed(now) && words.claimed_since.load(Relaxed) == BEGIN);
    }
    let mut ended = Ended::default();
    ended.add(Traffic::Read(1 << 30));
    pace.end(&words, ended, now);
    assert_eq!(pace.renew(&words, now), None);
    assert!(!words.is_claimed(now + CLAIM));
}

#[test]
fn forged_words_slow_writes_to_the_floor_at_worst() {
    let mut model = Model::new(1, Reports::Each);
    model.run(None, Some(WRITES), SECOND);
    let begun = model.now;
    let written = model.written;
    let mut turn = 0;
    while model.now < begun + 4 * SECOND {
        turn += 1;
        let now = model.now;
        model.words.claimed_at.store(now, Relaxed);
        model.words.slowdown.store(u64::MAX - turn, Relaxed);
        model.words.begun.store(turn << 40, Relaxed);
        model.words.paced_at.store(now ^ turn, Relaxed);
        model.run(None, Some(WRITES), MS);
    }
    let speed = (model.written - written) as f64 / 4.0;
    assert!(speed >= 0.9 * FLOOR * BANDWIDTH, "{speed}");
    // Moments that are far off make no claim.
    for far in [1, u64::MAX, model.now + 2 * CLAIM] {
        model.words.claimed_at.store(far, Relaxed);
        assert!(!model.words.is_claimed(model.now));
    }
}

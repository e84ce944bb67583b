//! A model of a reader and a writer on a device that carries operations out one by one.

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
    /// Operations of a batch. A reader begins the next batch when the last one has ended, and
    /// `gap` has passed.
    batch: u64,
    gap: Nanos,
}

const BATCHES: Load = Load {
    bytes: 1 << 20,
    batch: 32,
    gap: 0,
};

const WRITES: Load = Load {
    bytes: 1 << 20,
    batch: 32,
    gap: 0,
};

/// The speed of operations of this size.
fn speed(bytes: u64) -> f64 {
    bytes as f64 / (bytes as f64 / BANDWIDTH + 20e-6)
}

/// A device that carries operations out one by one, in their order: `(is_read, bytes, end)`.
struct Model {
    words: Words,
    reader: Pace,
    writer: Pace,
    queue: std::collections::VecDeque<(bool, u64, Nanos)>,
    free_at: Nanos,
    now: Nanos,
    read: u64,
    written: u64,
}

impl Model {
    fn new() -> Model {
        Model {
            words: Words::default(),
            reader: Pace::default(),
            writer: Pace::default(),
            queue: std::collections::VecDeque::new(),
            free_at: BEGIN,
            now: BEGIN,
            read: 0,
            written: 0,
        }
    }

    fn submit(&mut self, is_read: bool, bytes: u64) {
        let took = 20_000 + (bytes as f64 / BANDWIDTH * 1e9) as Nanos;
        self.free_at = self.free_at.max(self.now) + took;
        self.queue.push_back((is_read, bytes, self.free_at));
        let (pace, traffic) = match is_read {
            true => (&mut self.reader, Traffic::Read(bytes)),
            false => (&mut self.writer, Traffic::Paced(bytes)),
        };
        pace.begin(&self.words, traffic, self.now);
    }

    fn ended(&mut self) {
        let Some((is_read, bytes, end)) = self.queue.pop_front() else {
            return;
        };
        self.now = self.now.max(end);
        let mut ended = Ended::default();
        let (pace, traffic) = match is_read {
            true => (&mut self.reader, Traffic::Read(bytes)),
            false => (&mut self.writer, Traffic::Paced(bytes)),
        };
        ended.add(traffic);
        pace.end(&self.words, ended, self.now);
        match is_read {
            true => self.read += bytes,
            false => self.written += bytes,
        }
    }

    /// Runs both loads for a time. Returns bytes read and written per second.
    fn run(&mut self, reads: Option<Load>, writes: Option<Load>, time: Nanos) -> (f64, f64) {
        let until = self.now + time;
        let (read, written) = (self.read, self.written);
        let mut left = 0;
        let mut next_batch = self.now;
        while self.now < until {
            let mut wake = until;
            let in_flight = |queue: &std::collections::VecDeque<(bool, u64, Nanos)>, which| {
                queue
                    .iter()
                    .filter(|(is_read, ..)| *is_read == which)
                    .count() as u64
            };
            if let Some(load) = reads {
                if left == 0 && in_flight(&self.queue, true) == 0 {
                    if next_batch <= self.now {
                        left = load.batch;
                    } else {
                        wake = wake.min(next_batch);
                    }
                }
                while left > 0 {
                    self.submit(true, load.bytes);
                    left -= 1;
                    next_batch = Nanos::MAX;
                }
            }
            if let Some(load) = writes {
                while in_flight(&self.queue, false) < load.batch {
                    match self.writer.turn(&self.words, load.bytes, self.now) {
                        Turn::Now => self.submit(false, load.bytes),
                        Turn::At(at) => {
                            assert!(at > self.now, "a turn in the past");
                            wake = wake.min(at);
                            break;
                        }
                        Turn::AfterAnother => break,
                    }
                }
            }
            match self.queue.front() {
                Some((.., end)) if *end <= wake => self.ended(),
                _ => self.now = wake,
            }
            if let Some(load) = reads
                && next_batch == Nanos::MAX
                && in_flight(&self.queue, true) == 0
            {
                next_batch = self.now + load.gap;
            }
        }
        let per_second = |bytes: u64| bytes as f64 / (time as f64 / 1e9);
        (
            per_second(self.read - read),
            per_second(self.written - written),
        )
    }

    /// Lets both learn, alone, and together.
    fn learned(reads: Load) -> (Model, f64) {
        let mut model = Model::new();
        model.run(None, Some(WRITES), SECOND);
        let (alone, _) = model.run(Some(reads), None, SECOND);
        model.run(Some(reads), Some(WRITES), 2 * SECOND);
        (model, alone)
    }
}

#[test]
fn a_reader_keeps_its_speed_and_the_writer_gets_the_rest() {
    let singles = Load {
        batch: 1,
        ..BATCHES
    };
    let small = Load {
        bytes: 72 << 10,
        batch: 128,
        ..BATCHES
    };
    let large = Load {
        bytes: 8 << 20,
        batch: 4,
        ..BATCHES
    };
    for reads in [BATCHES, small, large, singles] {
        let (mut model, alone) = Model::learned(reads);
        let (read, written) = model.run(Some(reads), Some(WRITES), 4 * SECOND);
        // Of the device's time, in bytes of writes.
        let left = speed(WRITES.bytes) * (1.0 - 0.8 * alone / speed(reads.bytes));
        assert!(read >= 0.8 * alone, "{} of {alone}", read / alone);
        assert!(written >= 0.73 * left, "{} of {left}", written / left);
    }
}

#[test]
fn a_writer_alone_has_the_whole_device() {
    let mut model = Model::new();
    let (_, written) = model.run(None, Some(WRITES), SECOND);
    let alone = speed(WRITES.bytes);
    assert!(written >= 0.99 * alone, "{written} of {alone}");
}

#[test]
fn a_read_after_an_idle_second_finds_a_short_queue() {
    let mut model = Model::new();
    for _ in 0..10 {
        model.run(None, Some(WRITES), SECOND);
        let queued: u64 = model.queue.iter().map(|(_, bytes, _)| bytes).sum();
        let time = queued as f64 / BANDWIDTH;
        assert!(time <= 0.017, "{queued} bytes, {time} s");
    }
}

#[test]
fn a_reader_that_stops_slows_writes_for_the_time_of_its_claim() {
    let (mut model, _) = Model::learned(BATCHES);
    // No read ends any more.
    model.queue.retain(|(is_read, ..)| !is_read);
    let stopped = model.now;
    while model.words.is_claimed(model.now) {
        model.run(None, Some(WRITES), MS);
    }
    assert!(model.now - stopped <= CLAIM + MS);
    let (_, written) = model.run(None, Some(WRITES), SECOND);
    assert!(written >= 0.95 * BANDWIDTH, "{written}");
}

#[test]
fn forged_words_slow_writes_to_the_floor_at_worst() {
    let mut model = Model::new();
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

//! Reads first: the rate of writes while reads are in progress.
//!
//! A read is a *claim* on the volume's device while it is in flight, and shortly after its end.
//! While there is a claim, writes of puts and all background operations are *paced*: they get a
//! rate, and few of their bytes are in flight at once. Without a claim only their bytes in flight
//! are bounded, so that a first read finds a short queue.
//!
//! The rate follows the slow-down of reads: the time that the device takes for their bytes, divided
//! by the time that it takes while nothing paced is in flight. The rate falls above [`SLOWDOWN`],
//! rises below it, and never falls below [`FLOOR`] of the device's measured write speed. In short
//! regular intervals of a claim nothing paced is started ([`REST`]): reads measure their speed
//! alone then.
//!
//! Claims and slow-downs are in [`Words`] that processes share. All words are hints. A process that
//! forges them, or stops in the middle, slows the writes of others to the floor at worst. A claim
//! ends by itself after [`CLAIM`], unless a read begins or ends, or is still in flight in a process
//! that renews it ([`Pace::renew`]).
//!
//! Owns: the account of one volume in one process ([`Pace`]). It reads no clock and does no I/O:
//! its caller passes the time, in nanoseconds of the system's monotonic clock.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A moment or a duration, in nanoseconds.
pub type Nanos = u64;

pub(super) const MS: Nanos = 1_000_000;

/// How long a claim lasts after a read began or ended, or after it was renewed.
pub const CLAIM: Nanos = 50 * MS;

/// Age at which the claim of reads in flight is renewed.
const RENEWED: Nanos = CLAIM / 2;

/// The slow-down of reads at which the rate of writes stays the same. Reads keep 0.84 of their
/// speed, since they have the rests for themselves.
const SLOWDOWN: f64 = 1.2;

/// The lowest rate, and the rate at the beginning of a claim, as parts of the device's write speed.
const FLOOR: f64 = 0.1;
const FIRST: f64 = 0.25;

/// The strength of the controller: the relative change of the rate for a slow-down that is off by
/// 1, and the largest change at a time.
const GAIN: f64 = 0.3;
const CHANGE_MAX: f64 = 0.2;

/// While there is a claim, nothing paced is started for this long, at this interval. All processes
/// rest at the same time, because they have the same clock. The time suffices for the device to end
/// the paced operations and then some batches of reads.
const REST: Nanos = 50 * MS;
const REST_EVERY: Nanos = 1000 * MS;

/// The write speed that is assumed before one was measured, in bytes per second.
const SPEED_MIN: f64 = (128 << 20) as f64;

/// More than any device reads, in bytes per nanosecond.
const SPEED_MAX: u64 = 64;

/// Beside a claim, no paced operation is started while so many bytes are in flight: this, or the
/// bytes of this time at the paced rate, if they are more.
const BESIDE_BYTES_MIN: u64 = 2 << 20;
const BESIDE_TIME: Nanos = 50 * MS;

/// The same without a claim: this, or the bytes that the device writes in this time, if they are
/// more.
const FREE_BYTES_MIN: u64 = 8 << 20;
const FREE_TIME: Nanos = 16 * MS;

/// At the beginning of a claim, the device still has the writes that began before it. For so long
/// they slow the reads, and the rate does not.
const SETTLES: Nanos = 2 * FREE_TIME;

/// The rate of the last claim is forgotten after this time.
const RATE_LASTS: Nanos = 1000 * MS;

/// Unused rate is kept for this long: a wake-up may be late by as much, and so may the next put.
const CREDIT: Nanos = 8 * MS;

/// Device time after which a slow-down, or a write speed, counts as measured.
const SAMPLE: Nanos = 20 * MS;
const SPEED_SAMPLE: Nanos = 50 * MS;

/// Ends that follow an end within this part of the time before it are of the same interval: some
/// devices report the ends of many operations at once.
const BURST: Nanos = 16;

/// The part of the time before that stays in the next slow-down: single ones depend on how many
/// writes came before the first read of a batch.
const STAYS: f64 = 0.8;

/// The part of the measured times alone that stays at each read.
const KEPT: f64 = 1.0 - 1.0 / 128.0;

/// Slow-downs are published in units of `1 / SCALE`, up to the maximum.
const SCALE: f64 = 1024.0;
const SLOWDOWN_MAX: f64 = 64.0;

/// Classes of reads by size (a power of four each, from 16 KiB on) and by the largest number in
/// flight at once (a power of two each).
const SIZES: usize = 6;
const COUNTS: usize = 6;

/// The state of one volume that processes share: in a cache line of its own, valid with any
/// content. Processes of other versions use it too: new words come last.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Words {
    /// When a read last began or ended, or when the claim was renewed.
    claimed_at: AtomicU64,
    /// The slow-down of reads, below the low half of the moment of its publication.
    slowdown: AtomicU64,
    /// Numbers of paced operations begun and ended, and when the last one began or ended.
    begun: AtomicU64,
    ended: AtomicU64,
    paced_at: AtomicU64,
    /// When the present claim, or the last one, began.
    claimed_since: AtomicU64,
    /// Bytes of all reads that have ended.
    read: AtomicU64,
}

impl Words {
    /// The end of the present claim. Moments that no read can have written make no claim.
    fn claim_end(&self, now: Nanos) -> Option<Nanos> {
        let claimed_at = self.claimed_at.load(Relaxed);
        let is_live = claimed_at != 0 && claimed_at.abs_diff(now) < CLAIM;
        is_live.then(|| claimed_at.saturating_add(CLAIM))
    }

    /// Whether there is a claim.
    pub(super) fn is_claimed(&self, now: Nanos) -> bool {
        self.claim_end(now).is_some()
    }

    /// A read begins, ends, or is still in flight.
    fn claim(&self, now: Nanos) {
        if !self.is_claimed(now) {
            self.claimed_since.store(now, Relaxed);
        }
        self.claimed_at.store(now, Relaxed);
    }

    /// Whether the writes from before the claim count as ended at `moment`: by the time alone.
    fn is_settled(&self, moment: Nanos) -> bool {
        self.claimed_since.load(Relaxed).abs_diff(moment) >= SETTLES
    }

    /// The last published slow-down of reads; 0 before the first.
    pub(super) fn slowdown(&self) -> f64 {
        f64::from(self.slowdown.load(Relaxed) as u32) / SCALE
    }

    fn publish(&self, slowdown: f64, now: Nanos) {
        let scaled = (slowdown.clamp(0.0, SLOWDOWN_MAX) * SCALE) as u64;
        self.slowdown.store((now << 32) | scaled, Relaxed);
    }

    /// When the last paced operation ended, if none is in flight.
    fn unpaced_since(&self, now: Nanos) -> Option<Nanos> {
        let (begun, ended) = (self.begun.load(Relaxed), self.ended.load(Relaxed));
        let paced_at = self.paced_at.load(Relaxed);
        if begun != ended && paced_at.abs_diff(now) > 20 * CLAIM {
            // Operations of a killed process: they are never reported as ended.
            self.ended.store(begun, Relaxed);
        }
        (begun == ended).then_some(paced_at)
    }
}

/// The part of an operation in the pacing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// A read that a call waits for, of so many bytes. Claims the device.
    Read(u64),
    /// A write of a put, or an operation in the background. Paced.
    Paced(u64),
    /// Neither: small, or waited for by everything else.
    Free,
}

impl Traffic {
    /// Its bytes, if they are accounted for.
    pub(super) fn bytes(self) -> u64 {
        match self {
            Traffic::Read(bytes) | Traffic::Paced(bytes) => bytes,
            Traffic::Free => 0,
        }
    }
}

/// Whether a paced operation may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    Now,
    /// To be asked again at this moment.
    At(Nanos),
    /// To be asked again when a paced operation has ended.
    AfterAnother,
}

/// The account of one volume in one process.
#[derive(Debug, Default)]
pub struct Pace {
    reads: Reads,
    writes: Writes,
}

impl Pace {
    /// Whether a paced operation may start now.
    pub fn turn(&mut self, words: &Words, now: Nanos) -> Turn {
        self.writes.turn(words, now)
    }

    /// An operation is handed to the device.
    pub fn begin(&mut self, words: &Words, traffic: Traffic, now: Nanos) {
        match traffic {
            Traffic::Read(bytes) => self.reads.begin(words, bytes, now),
            Traffic::Paced(bytes) => self.writes.begin(words, bytes, now),
            Traffic::Free => {}
        }
    }

    /// Operations have ended. Ends that were seen together come in one call.
    pub fn end(&mut self, words: &Words, ended: Ended, now: Nanos) {
        if ended.reads > 0 {
            self.reads.end(words, ended, now);
        }
        if ended.paced > 0 {
            self.writes.end(words, ended, now);
        }
    }

    /// Keeps the claim of reads that are in flight. Returns when to call it again: `None` if there
    /// are none.
    pub fn renew(&self, words: &Words, now: Nanos) -> Option<Nanos> {
        self.reads.renew(words, now)
    }

    /// The rate of paced operations beside a claim, in bytes per second.
    pub fn rate(&self) -> f64 {
        self.writes.rate
    }

    /// Whether paced operations are beside a claim now.
    pub fn is_beside(&self) -> bool {
        self.writes.is_beside
    }
}

/// Operations that ended.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ended {
    reads: u64,
    read_bytes: u64,
    paced: u64,
    paced_bytes: u64,
}

impl Ended {
    pub fn add(&mut self, traffic: Traffic) {
        match traffic {
            Traffic::Read(bytes) => {
                self.reads += 1;
                self.read_bytes += bytes;
            }
            Traffic::Paced(bytes) => {
                self.paced += 1;
                self.paced_bytes += bytes;
            }
            Traffic::Free => {}
        }
    }
}

/// Time and bytes; older ones count less.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    time: f64,
    bytes: f64,
}

impl Measured {
    fn add(&mut self, time: Nanos, bytes: u64) {
        self.time = self.time * KEPT + time as f64;
        self.bytes = self.bytes * KEPT + bytes as f64;
    }

    /// The time for some bytes, if any were measured.
    fn time_for(&self, bytes: u64) -> Option<f64> {
        (self.bytes > 0.0).then(|| self.time / self.bytes * bytes as f64)
    }
}

/// The time between two ends of reads, and its bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Interval {
    took: Nanos,
    /// The part of the time without paced operations.
    alone: Nanos,
    bytes: u64,
    class: (usize, usize),
    is_settled: bool,
}

impl Interval {
    /// Adds an interval that followed.
    fn extend(&mut self, next: Interval) {
        self.took += next.took;
        self.alone += next.alone;
        self.bytes += next.bytes;
    }

    /// The bytes of the time alone: the device is slower in the rest of the time, by a slow-down
    /// that is no number before the first is known.
    fn bytes_alone(&self, slowdown: f64) -> u64 {
        let slowdown = slowdown.max(1.0);
        let alone = self.alone as f64 * slowdown;
        let part = alone / (alone + (self.took - self.alone) as f64).max(1.0);
        ((self.bytes as f64 * part) as u64).min(self.bytes)
    }
}

/// The reads of calls, and their device times: alone, and beside paced operations.
#[derive(Debug, Default)]
struct Reads {
    count: u64,
    bytes: u64,
    /// The largest number in flight at once, of this busy time and of the one before.
    most: u64,
    most_before: u64,
    /// When the device began with the next of them to end: at the end of the one before. If it was
    /// idle in between, that time counts up to the time that it was busy before.
    since: Nanos,
    /// The bytes that all had read by then.
    seen: u64,
    /// No paced operation was in flight by then.
    is_unpaced: bool,
    /// The last interval, not counted yet: ends may follow that belong to it.
    last: Interval,
    alone: [[Measured; COUNTS]; SIZES],
    /// Time of late, and the time expected for the same reads.
    took: f64,
    expected: f64,
    /// The time since a slow-down was last published.
    fresh: Nanos,
    /// When the device last became busy, and how long it was busy the time before.
    busy_since: Nanos,
    busy: Nanos,
}

impl Reads {
    fn begin(&mut self, words: &Words, bytes: u64, now: Nanos) {
        words.claim(now);
        if self.count == 0 {
            self.count_last(words, now);
            // The reader's own time counts: it is shorter where a slower device has it wait less.
            let own = now.saturating_sub(self.since);
            if own >= CLAIM || own > self.busy {
                let own = if own < CLAIM { self.busy } else { 0 };
                self.since = now.saturating_sub(own);
                self.seen = words.read.load(Relaxed);
            }
            self.busy_since = now;
            self.is_unpaced = words.unpaced_since(now).is_some();
            self.most_before = std::mem::take(&mut self.most);
        }
        self.count += 1;
        self.bytes += bytes;
        self.most = self.most.max(self.count);
    }

    fn renew(&self, words: &Words, now: Nanos) -> Option<Nanos> {
        if self.count == 0 {
            return None;
        }
        let claimed_at = words.claimed_at.load(Relaxed);
        if claimed_at.abs_diff(now) < RENEWED {
            return Some(claimed_at + RENEWED);
        }
        words.claim(now);
        Some(now + RENEWED)
    }

    fn end(&mut self, words: &Words, ended: Ended, now: Nanos) {
        words.claim(now);
        let took = now.saturating_sub(self.since);
        let size = size_class(self.bytes / self.count.max(1));
        let next = Interval {
            took,
            alone: self.time_alone(words, now).min(took),
            bytes: self.bytes_of_all(words, ended.read_bytes, took),
            class: (size, count_class(self.most.max(self.most_before))),
            is_settled: words.is_settled(self.since),
        };
        if took > self.last.took / BURST {
            self.count_last(words, now);
            self.last = next;
        } else {
            self.last.extend(next);
        }
        self.count = self.count.saturating_sub(ended.reads);
        self.bytes = self.bytes.saturating_sub(ended.read_bytes);
        if self.count == 0 {
            self.busy = now.saturating_sub(self.busy_since);
        }
        self.since = now;
        self.is_unpaced = words.unpaced_since(now).is_some();
    }

    /// Counts the last interval, as soon as it is known to be complete.
    fn count_last(&mut self, words: &Words, now: Nanos) {
        let last = std::mem::take(&mut self.last);
        let beside = last.took - last.alone;
        let bytes_alone = last.bytes_alone(self.took / self.expected);
        let (size, count) = last.class;
        let alone = &mut self.alone[size][count];
        if last.alone > 0 {
            alone.add(last.alone, bytes_alone);
        }
        let expected = alone.time_for(last.bytes - bytes_alone);
        if let Some(expected) = expected.filter(|_| last.is_settled) {
            self.took += beside as f64;
            self.expected += expected;
            self.fresh += beside;
        }
        if self.fresh >= SAMPLE && self.expected > 0.0 {
            self.publish(words, now);
        }
    }

    /// The bytes that all processes have read since the last read of this process ended. They share
    /// the device: the time between two ends is that of the bytes of all.
    fn bytes_of_all(&mut self, words: &Words, bytes: u64, took: Nanos) -> u64 {
        let read = words.read.fetch_add(bytes, Relaxed).wrapping_add(bytes);
        let seen = std::mem::replace(&mut self.seen, read);
        // Whatever the word says: not less than its own, nor more than any device reads.
        let most = took.max(SAMPLE).saturating_mul(SPEED_MAX).max(bytes);
        read.wrapping_sub(seen).clamp(bytes, most)
    }

    /// How long, since the last read ended, the device had no paced operations and was to have
    /// none: in a rest, or long after the last one. The moments between two paced operations do not
    /// count, since short reads fit in there more often than long ones.
    fn time_alone(&self, words: &Words, now: Nanos) -> Nanos {
        let rest = now - now % REST_EVERY;
        let rest_end = rest + REST;
        let (from, until) = match words.unpaced_since(now) {
            Some(since) if since.abs_diff(now) >= CLAIM => (since, now),
            Some(since) => (since.max(rest), now.min(rest_end)),
            None if self.is_unpaced => (rest, rest_end),
            None => return 0,
        };
        until.saturating_sub(from.max(self.since))
    }

    fn publish(&mut self, words: &Words, now: Nanos) {
        words.publish(self.took / self.expected, now);
        self.took *= STAYS;
        self.expected *= STAYS;
        self.fresh = 0;
    }
}

/// The paced operations: their rate, and their bytes in flight.
#[derive(Debug, Default)]
struct Writes {
    in_flight: u64,
    speed: Speed,
    is_beside: bool,
    rate: f64,
    /// Bytes that may start now; negative after an operation that was larger.
    credit: f64,
    credited_at: Nanos,
    /// The rate has held something back since it last changed.
    is_held: bool,
    /// The published slow-down that the rate has followed last.
    followed: u64,
}

impl Writes {
    fn turn(&mut self, words: &Words, now: Nanos) -> Turn {
        let claim_end = words.claim_end(now);
        let most = match claim_end {
            Some(_) => BESIDE_BYTES_MIN.max((self.rate * seconds(BESIDE_TIME)) as u64),
            None => FREE_BYTES_MIN.max((self.speed.get() * seconds(FREE_TIME)) as u64),
        };
        let begins = claim_end.is_some() && !self.is_beside;
        self.is_beside = claim_end.is_some();
        if begins {
            self.begin_claim(words, now);
        }
        if self.in_flight >= most {
            // The bound grows with the rate.
            self.is_held |= self.is_beside;
            return Turn::AfterAnother;
        }
        let Some(claim_end) = claim_end else {
            return Turn::Now;
        };
        self.follow(words);
        self.credit(now);
        let at = if is_rest(now) {
            now - now % REST_EVERY + REST
        } else if self.credit < 0.0 {
            self.is_held = true;
            now + ((-self.credit / self.rate * 1e9) as Nanos).max(1)
        } else {
            return Turn::Now;
        };
        Turn::At(at.min(claim_end))
    }

    fn begin_claim(&mut self, words: &Words, now: Nanos) {
        let first = self.speed.get() * FIRST;
        let is_known = now.saturating_sub(self.credited_at) < RATE_LASTS;
        self.rate = if is_known {
            self.rate.min(first)
        } else {
            first
        };
        (self.credit, self.credited_at) = (0.0, now);
        self.followed = words.slowdown.load(Relaxed);
    }

    /// Adapts the rate to a slow-down that was published since the last time. A rate that holds
    /// nothing back does not rise.
    fn follow(&mut self, words: &Words) {
        let published = words.slowdown.load(Relaxed);
        if published != std::mem::replace(&mut self.followed, published) {
            let is_held = std::mem::take(&mut self.is_held);
            let change = GAIN * (SLOWDOWN - words.slowdown());
            if change < 0.0 || is_held {
                self.rate *= 1.0 + change.clamp(-CHANGE_MAX, CHANGE_MAX);
            }
        }
        self.rate = self.rate.max(self.speed.get() * FLOOR);
    }

    fn credit(&mut self, now: Nanos) {
        let passed = now.saturating_sub(self.credited_at);
        let most = self.rate * seconds(CREDIT);
        self.credit = (self.credit + self.rate * seconds(passed)).min(most);
        self.credited_at = now;
    }

    fn begin(&mut self, words: &Words, bytes: u64, now: Nanos) {
        if self.is_beside {
            self.credit -= bytes as f64;
        }
        if self.in_flight == 0 {
            self.speed.since = now;
        }
        self.in_flight += bytes;
        words.begun.fetch_add(1, Relaxed);
        words.paced_at.store(now, Relaxed);
    }

    fn end(&mut self, words: &Words, ended: Ended, now: Nanos) {
        self.in_flight = self.in_flight.saturating_sub(ended.paced_bytes);
        self.speed.add(ended.paced_bytes, self.is_beside, now);
        words.ended.fetch_add(ended.paced, Relaxed);
        words.paced_at.store(now, Relaxed);
    }
}

/// The write speed of the device: the highest of late. Forgotten slowly, and only without a claim:
/// beside reads it shows the pacing.
#[derive(Debug, Default)]
struct Speed {
    highest: f64,
    since: Nanos,
    time: Nanos,
    bytes: u64,
}

impl Speed {
    fn get(&self) -> f64 {
        self.highest.max(SPEED_MIN)
    }

    fn add(&mut self, bytes: u64, is_beside: bool, now: Nanos) {
        self.time += now.saturating_sub(self.since);
        self.bytes += bytes;
        self.since = now;
        if self.time >= SPEED_SAMPLE {
            let speed = self.bytes as f64 / seconds(self.time);
            let kept = if is_beside { 1.0 } else { 0.95 };
            self.highest = speed.max(self.highest * kept);
            (self.time, self.bytes) = (0, 0);
        }
    }
}

fn is_rest(now: Nanos) -> bool {
    now % REST_EVERY < REST
}

fn seconds(time: Nanos) -> f64 {
    time as f64 / 1e9
}

fn size_class(bytes: u64) -> usize {
    let powers = (bytes >> 14).max(1).ilog2() as usize;
    powers.div_ceil(2).min(SIZES - 1)
}

fn count_class(count: u64) -> usize {
    (count.max(1).ilog2() as usize).min(COUNTS - 1)
}

#[cfg(test)]
mod tests;

//! The budget of writes: which new pages are stored, so that the store writes no more than it.
//!
//! ```text
//!   rate of the budget --> bucket --> pages that are taken, copies, descriptors, headers
//!                            | level
//!                            v
//!   scores of new pages --> line: a page is taken from this score on
//! ```
//!
//! Every byte that the store writes leaves the bucket, which is empty at an open and holds three
//! minutes of the budget. The bytes of a page that is taken are there before. Copies, descriptors
//! and headers are charged once they are written, and the level may fall below zero for them.
//!
//! *Score* of a new page: one, divided by its number among the new pages of its chain. So chains
//! keep their beginnings, and long ones their first part. A page that was asked for before, and was
//! refused or has left since, counts sixteen times as much: a second touch is the best sign of a
//! third. The classes of the learned order are not in it: they know the pages that were stored, and
//! with their chance of a use as a factor a chat trace lost 16.6 % of the hits in place of 11.8 %.
//!
//! *Line*: the score that leaves as many bytes of the last minutes above it as the bucket gets, and
//! up to half more or less by its level. A full bucket has no line: else its bytes were lost.
//!
//! A page is taken only if its parent is stored or under way, or unknown.

use std::collections::VecDeque;

use larder_format::KeyPrefix;

use super::seen::Seen;
use crate::counters::{Counted, Written};
use crate::index::NamespaceSlot;

const DAY_MS: f64 = 86_400_000.0;

/// The bucket holds the budget of this time.
const BUCKET_MS: f64 = 180_000.0;

/// From this part of it on the bucket counts as full.
const FULL: f64 = 0.95;

/// A page that was asked for before counts so many times.
const SEEN_WORTH: f32 = 16.0;

/// The scores of this time count half.
const HALF_LIFE_MS: f64 = 300_000.0;

/// Scores are counted in steps of an eighth of an octave, from 2^-24 on.
const STEPS: usize = 256;
const STEPS_AN_OCTAVE: f32 = 8.0;
const LEAST_OCTAVE: f32 = -24.0;

/// Chains whose last new page is remembered: a call may go on with a chain of another call.
const ENDS: usize = 64;

type Name = (NamespaceSlot, KeyPrefix);

/// See the module.
#[derive(Debug)]
pub(super) struct Budget {
    /// Bytes a millisecond.
    rate: f64,
    level: f64,
    now_ms: u64,
    /// Bytes that the store has written up to now.
    written: u64,
    /// When it began, and the bytes of pages of puts by then.
    begun: (u64, u64),
    scores: Box<[f32; STEPS]>,
    /// Milliseconds that the scores stand for.
    time: f64,
    line: f32,
    seen: Seen,
    call: Call,
    /// The last new page of a chain, and its number among them.
    ends: VecDeque<(Name, u32)>,
}

/// The present call.
#[derive(Debug, Default)]
struct Call {
    /// The number of its last new page in the chain; `None` before the first one.
    number: Option<u32>,
    end: Option<Name>,
}

/// A new page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Offer {
    pub name: Name,
    /// Its parent, and whether that is stored or under way. `None` if it is not known.
    pub parent: Option<(KeyPrefix, bool)>,
    pub bytes: u64,
    /// Bytes that are being written, and are not in the level yet.
    pub in_flight: u64,
}

/// A number for a name. Keys are hashes already.
fn number((namespace, key): Name) -> u64 {
    let low = key.as_bytes().first_chunk::<8>();
    let low = u64::from_le_bytes(*low.expect("it has 12 bytes"));
    low ^ u64::from(namespace.0) << 48
}

fn step_of(score: f32) -> usize {
    let step = (score.log2() - LEAST_OCTAVE) * STEPS_AN_OCTAVE;
    // A score of zero has the first step.
    (step.max(0.0) as usize).min(STEPS - 1)
}

fn score_of(step: f32) -> f32 {
    (step / STEPS_AN_OCTAVE + LEAST_OCTAVE).exp2()
}

impl Budget {
    /// So many bytes a day from now on.
    pub(super) fn new(bytes_a_day: u64, now_ms: u64, written: &Written) -> Budget {
        Budget {
            rate: bytes_a_day as f64 / DAY_MS,
            level: 0.0,
            now_ms,
            written: written.total(),
            begun: (now_ms, written.pages_bytes),
            scores: Box::new([0.0; STEPS]),
            time: 0.0,
            line: 0.0,
            seen: Seen::default(),
            call: Call::default(),
            ends: VecDeque::with_capacity(ENDS),
        }
    }

    /// A call begins. `written` is what the store has written in all, `stored` are its pages.
    pub(super) fn begin(&mut self, now_ms: u64, written: u64, stored: usize) {
        let passed = now_ms.saturating_sub(self.now_ms) as f64;
        self.now_ms = self.now_ms.max(now_ms);
        let spent = written.saturating_sub(self.written) as f64;
        self.written = written;
        self.level = (self.level - spent + self.rate * passed).min(self.room());
        let fade = (-passed / HALF_LIFE_MS).exp2();
        if passed > 0.0 {
            self.scores
                .iter_mut()
                .for_each(|bytes| *bytes *= fade as f32);
            self.time = self.time * fade + passed;
        }
        self.line = self.line();
        self.seen.expect(stored, self.now_ms);
        self.call = Call {
            number: None,
            end: None,
        };
    }

    /// Bytes that the bucket holds.
    fn room(&self) -> f64 {
        self.rate * BUCKET_MS
    }

    fn line(&self) -> f32 {
        let share = (self.level / self.room()).clamp(0.0, 1.0);
        if share >= FULL {
            return 0.0;
        }
        let wanted = self.rate * self.time * (0.5 + share);
        let mut above = 0.0;
        for (step, bytes) in self.scores.iter().enumerate().rev() {
            let bytes = f64::from(*bytes);
            if above + bytes > wanted {
                let part = (wanted - above) / bytes;
                return score_of(step as f32 + 1.0 - part as f32);
            }
            above += bytes;
        }
        0.0
    }

    /// Whether a new page is stored. If not, none behind it in the call is.
    pub(super) fn takes(&mut self, offer: &Offer) -> bool {
        let parent = offer.parent.map(|(parent, _)| parent);
        let score = self.score(offer.name, parent, offer.bytes);
        let has_parent = offer.parent.is_none_or(|(_, is_there)| is_there);
        let left = self.level - offer.in_flight as f64;
        // A page that is larger than the bucket waits until that is full.
        let is_paid = left >= (offer.bytes as f64).min(FULL * self.room());
        let is_taken = has_parent && is_paid && score >= self.line;
        if is_taken {
            self.call.end = Some(offer.name);
        }
        is_taken
    }

    /// Counts a new page behind the first one that is not stored.
    pub(super) fn passes(&mut self, name: Name, bytes: u64) {
        let _ = self.score(name, None, bytes);
    }

    /// Counts a new page, and returns its score.
    fn score(&mut self, name: Name, parent: Option<KeyPrefix>, bytes: u64) -> f32 {
        let place = match (self.call.number, parent) {
            (Some(number), _) => number + 1,
            (None, Some(parent)) => self.goes_on_from((name.0, parent)),
            (None, None) => 1,
        };
        self.call.number = Some(place);
        let is_seen = self.seen.ask(number(name), self.now_ms);
        let worth = if is_seen { SEEN_WORTH } else { 1.0 };
        let score = worth / place as f32;
        self.scores[step_of(score)] += bytes as f32;
        score
    }

    /// The number of a new page with this parent.
    fn goes_on_from(&self, parent: Name) -> u32 {
        let end = self.ends.iter().rev().find(|(name, _)| *name == parent);
        end.map_or(1, |(_, number)| number + 1)
    }

    /// # Errors
    /// More bytes of pages were put than the budget had.
    pub(super) fn check(&self, now_ms: u64, pages_bytes: u64) -> Result<(), String> {
        let (begun_ms, before) = self.begun;
        let put = pages_bytes - before;
        let had = self.rate * (now_ms - begun_ms) as f64;
        if put as f64 > had + 1.0 {
            return Err(format!("{put} bytes of pages put, {had} in the budget"));
        }
        Ok(())
    }

    /// The call ends.
    pub(super) fn end(&mut self) {
        if let (Some(end), Some(number)) = (self.call.end.take(), self.call.number) {
            if self.ends.len() == ENDS {
                self.ends.pop_front();
            }
            self.ends.push_back((end, number));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use larder_format::PageKey;

    const PAGE: u64 = 1 << 20;

    /// A budget of one page a second, and the clock and the books of a store around it.
    struct World {
        budget: Budget,
        now_ms: u64,
        written: u64,
    }

    fn key(number: u64) -> KeyPrefix {
        let mut bytes = [0; 32];
        let hash = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bytes[..8].copy_from_slice(&hash.to_le_bytes());
        PageKey::from_bytes(bytes).prefix()
    }

    impl World {
        fn new() -> World {
            World {
                budget: Budget::new(PAGE * 86_400, 0, &Written::default()),
                now_ms: 0,
                written: 0,
            }
        }

        /// A put of a chain, the first page of which has this parent. Returns how many are taken.
        fn put(&mut self, keys: &[u64], parent: Option<(u64, bool)>) -> usize {
            self.budget.begin(self.now_ms, self.written, 1000);
            let mut parent = parent.map(|(number, is_there)| (key(number), is_there));
            let mut taken = 0;
            for number in keys {
                let name = (NamespaceSlot(0), key(*number));
                let offer = Offer {
                    name,
                    parent,
                    bytes: PAGE,
                    in_flight: taken * PAGE,
                };
                if !self.budget.takes(&offer) {
                    break;
                }
                taken += 1;
                parent = Some((name.1, true));
            }
            for number in keys.iter().skip(taken as usize + 1) {
                self.budget.passes((NamespaceSlot(0), key(*number)), PAGE);
            }
            self.budget.end();
            self.written += taken * PAGE;
            taken as usize
        }
    }

    #[test]
    fn an_open_begins_with_an_empty_bucket_which_fills_for_three_minutes() {
        let mut world = World::new();
        assert_eq!(world.put(&[1], None), 0);
        world.now_ms = 10_000;
        assert_eq!(world.put(&(100..120).collect::<Vec<_>>(), None), 10);
        world.now_ms += 3_600_000;
        assert_eq!(world.put(&(1000..2000).collect::<Vec<_>>(), None), 180);
    }

    #[test]
    fn copies_are_charged_and_paid_back_before_new_pages() {
        let mut world = World::new();
        world.now_ms = 100_000;
        world.written += 150 * PAGE;
        assert_eq!(world.put(&[1], None), 0);
        world.now_ms += 49_000;
        assert_eq!(world.put(&[2], None), 0);
        world.now_ms += 3_000;
        assert_eq!(world.put(&[3], None), 1);
    }

    #[test]
    fn more_pages_than_the_budget_had_are_a_broken_invariant() {
        let world = World::new();
        assert_eq!(world.budget.check(10_000, 10 * PAGE), Ok(()));
        let error = world.budget.check(10_000, 11 * PAGE).unwrap_err();
        assert!(error.contains("in the budget"), "{error}");
    }

    #[test]
    fn a_page_without_its_parent_is_not_taken() {
        let mut world = World::new();
        world.now_ms = 100_000;
        assert_eq!(world.put(&[2], Some((1, false))), 0);
        assert_eq!(world.put(&[2], Some((1, true))), 1);
    }

    /// Twice as many pages are asked for as the budget has.
    fn settle(world: &mut World, chains: std::ops::Range<u64>) {
        for chain in chains {
            world.now_ms += 5_000;
            let keys: Vec<u64> = (chain * 100..chain * 100 + 10).collect();
            world.put(&keys, None);
        }
    }

    #[test]
    fn chains_keep_their_beginnings_also_over_several_calls() {
        let mut world = World::new();
        settle(&mut world, 100..400);
        let long: Vec<u64> = (1..=40).collect();
        let taken = world.put(&long, None);
        assert!((2..15).contains(&taken), "{taken}");
        // The same in calls of one page each.
        let mut world = World::new();
        settle(&mut world, 100..400);
        let singly = long.iter().take_while(|number| {
            let parent = (**number > 1).then(|| (*number - 1, true));
            world.put(&[**number], parent) == 1
        });
        let singly = singly.count();
        assert!(singly.abs_diff(taken) <= 1, "{singly}, {taken}");
    }

    #[test]
    fn a_page_that_is_asked_for_again_later_is_taken_before_new_ones() {
        let mut world = World::new();
        settle(&mut world, 100..400);
        let keys: Vec<u64> = (1..=20).collect();
        let first = world.put(&keys, None);
        assert!(first < 15, "{first}");
        let rest = &keys[first..];
        // At once it is the same request.
        world.now_ms += 1_000;
        assert!(world.put(rest, Some((first as u64, true))) < rest.len());
        settle(&mut world, 400..410);
        let parent = Some((first as u64, true));
        assert_eq!(world.put(rest, parent), rest.len());
    }
}

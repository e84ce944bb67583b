//! The learned policy beside LRU on small traces that are made here: how far it may fall behind.

#![allow(clippy::unwrap_used)]

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;

use super::volume::{FILL, Geometry};
use super::{Hints, Limits, play};
use crate::interrupt::Interrupt;
use crate::policy::Policy;
use crate::replay::requests::Requests;

/// Requests: a time in milliseconds, and the blocks.
pub(super) type Trace = Vec<(f64, Vec<u64>)>;

pub(super) fn requests(trace: &Trace) -> Requests {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace");
    let line = |(at, blocks): &(f64, Vec<u64>)| {
        let line = serde_json::json!({"timestamp": *at as u64, "hash_ids": blocks});
        format!("{line}\n")
    };
    std::fs::write(&path, trace.iter().map(line).collect::<String>()).unwrap();
    Requests::read(&path, usize::MAX, &Interrupt::never()).unwrap()
}

/// A trace under both orders, in a store of about so many segments.
struct Pair {
    /// Pages that the store keeps.
    pages: usize,
    /// By request: the pages asked for, and the hits under LRU and learned.
    requests: Vec<(usize, usize, usize)>,
}

impl Pair {
    fn play(trace: &Trace, segments: u32) -> Pair {
        let requests = requests(trace);
        let percent = |percent| Geometry::keeping(percent, FILL, None, &requests);
        let geometry = (1..1000)
            .map(|step| percent(f64::from(step) / 10.0).unwrap())
            .find(|geometry| geometry.segments >= segments)
            .unwrap();
        let never = Interrupt::never();
        let hits = |policy| {
            play(
                &requests,
                &geometry,
                policy,
                Hints::None,
                Limits::default(),
                &never,
            )
            .unwrap()
            .hits_of
        };
        let asked = trace.iter().map(|(_, blocks)| blocks.len());
        let both = hits(Policy::Lru).into_iter().zip(hits(Policy::Learned));
        Pair {
            pages: geometry.pages,
            requests: asked
                .zip(both)
                .map(|(asked, (lru, learned))| (asked, lru, learned))
                .collect(),
        }
    }

    /// The hits of the learned policy less those of LRU, in points.
    fn lead(&self) -> f64 {
        lead(&self.requests)
    }

    /// The same for each span between two changes of the trace, which begin with these requests,
    /// without its beginning: until LRU has missed as many pages as the store keeps.
    fn settled_leads(&self, changes: &[usize]) -> Vec<f64> {
        let ends = changes[1..].iter().copied().chain([self.requests.len()]);
        let spans = changes.iter().zip(ends);
        spans
            .filter_map(|(begin, end)| {
                let mut missed = 0;
                let span = &self.requests[*begin..end];
                let settled = span.iter().position(|(asked, lru, _)| {
                    missed += asked - lru;
                    missed >= self.pages
                });
                settled.map(|at| lead(&span[at + 1..]))
            })
            .collect()
    }
}

fn lead(requests: &[(usize, usize, usize)]) -> f64 {
    let asked: usize = requests.iter().map(|(asked, ..)| asked).sum();
    let gains = requests
        .iter()
        .map(|(_, lru, learned)| *learned as f64 - *lru as f64);
    gains.sum::<f64>() / asked.max(1) as f64 * 100.0
}

/// Single pages, drawn with odds that fall with the power of their rank.
pub(super) struct Zipf(Vec<f64>);

impl Zipf {
    pub(super) fn new(pages: usize, power: f64) -> Zipf {
        let mut sum = 0.0;
        let odds = (1..=pages).map(|rank| {
            sum += (rank as f64).powf(-power);
            sum
        });
        Zipf(odds.collect())
    }

    pub(super) fn draw(&self, dice: &mut Pcg64) -> u64 {
        let at = dice.random::<f64>() * self.0[self.0.len() - 1];
        self.0.partition_point(|sum| *sum < at) as u64
    }
}

const RATE: f64 = 50.0;

pub(super) fn times(count: usize) -> impl Iterator<Item = f64> {
    (0..count).map(|at| at as f64 * 1000.0 / RATE)
}

#[test]
fn pages_drawn_with_fixed_odds_cost_at_most_three_tenths_of_a_point() {
    for (segments, power, seed) in [(64, 1.0, 1), (64, 0.8, 2), (256, 1.0, 3)] {
        let mut dice = Pcg64::seed_from_u64(seed);
        let zipf = Zipf::new(12_000, power);
        let trace = times(100_000).map(|at| (at, vec![zipf.draw(&mut dice)]));
        let lead = Pair::play(&trace.collect(), segments).lead();
        assert!(lead > -0.3, "{segments} segments, power {power}: {lead}");
    }
}

#[test]
fn a_store_that_pages_fill_less_keeps_as_many_and_copies_less() {
    let mut dice = Pcg64::seed_from_u64(8);
    let zipf = Zipf::new(4_000, 0.8);
    let trace = times(30_000).map(|at| (at, vec![zipf.draw(&mut dice)]));
    let requests = requests(&trace.collect());
    let never = Interrupt::never();
    let [full, less] = [FILL, 60.0].map(|fill| {
        let geometry = Geometry::keeping(10.0, fill, None, &requests).unwrap();
        let played = play(
            &requests,
            &geometry,
            Policy::Lru,
            Hints::None,
            Limits::default(),
            &never,
        )
        .unwrap();
        (geometry, played)
    });
    assert_eq!(full.0.pages, less.0.pages);
    assert!(less.0.segments > full.0.segments * 5 / 4);
    let (full, less) = (full.1, less.1);
    let copied = (full.copied_bytes, less.copied_bytes);
    assert!(copied.1 < copied.0 / 4 * 3, "{copied:?}");
    assert!(less.hits.abs_diff(full.hits) < full.hits / 20);
}

/// Reclaim meets chains of high worth, and copies more than the bound of write amplification
/// allows.
#[test]
fn chains_drawn_with_fixed_odds_cost_at_most_three_tenths_of_a_point() {
    for (segments, seed) in [(64, 6), (512, 7)] {
        let mut dice = Pcg64::seed_from_u64(seed);
        let zipf = Zipf::new(3_000, 0.9);
        let trace = times(40_000).map(|at| {
            let chain = zipf.draw(&mut dice) * 8;
            (at, (chain..=chain + chain / 8 % 8).collect())
        });
        let lead = Pair::play(&trace.collect(), segments).lead();
        assert!(lead > -0.3, "{segments} segments: {lead}");
    }
}

/// The bound of a workload that changes: a point over the run, and three tenths of a point between
/// two changes, once the store has taken in one capacity.
fn assert_bounds(trace: &Trace, segments: u32, changes: &[usize]) {
    let pair = Pair::play(trace, segments);
    let lead = pair.lead();
    assert!(lead > -1.0, "{segments} segments: {lead}");
    let settled = pair.settled_leads(changes);
    assert!(
        !settled.is_empty(),
        "{segments} segments: no span is long enough"
    );
    assert!(
        settled.iter().all(|lead| *lead > -0.3),
        "{segments} segments: {settled:?}"
    );
}

#[test]
fn a_loop_larger_than_the_store_costs_at_most_a_point_and_nothing_in_the_end() {
    let trace = times(30_000).enumerate().map(|(step, at)| {
        let head = (step % 500) as u64 * 8;
        (at, vec![head, head + 1, head + 2])
    });
    assert_bounds(&trace.collect(), 128, &[0]);
}

#[test]
fn scans_between_used_pages_cost_at_most_a_point_and_nothing_in_the_end() {
    const STEPS: usize = 2000;
    let mut dice = Pcg64::seed_from_u64(4);
    let zipf = Zipf::new(3_000, 0.9);
    let trace: Trace = times(60_000)
        .enumerate()
        .map(|(step, at)| {
            let is_scan = step / STEPS % 4 == 3;
            let page = match is_scan {
                true => 1_000_000 + step as u64,
                false => zipf.draw(&mut dice),
            };
            (at, vec![page * 8, page * 8 + 1])
        })
        .collect();
    let scans = (3 * STEPS..trace.len()).step_by(4 * STEPS);
    let changes: Vec<_> = scans.flat_map(|begin| [begin, begin + STEPS]).collect();
    assert_bounds(&trace, 64, &changes);
}

/// Every ten minutes the meaning of a first use changes: pages used once return never, or once,
/// after a while.
#[test]
fn a_workload_that_changes_every_ten_minutes_costs_at_most_a_point_and_nothing_in_the_end() {
    const PHASE_MS: f64 = 600_000.0;
    for segments in [64, 256] {
        let mut dice = Pcg64::seed_from_u64(5);
        let zipf = Zipf::new(2_000, 0.8);
        let mut waiting = std::collections::VecDeque::new();
        let mut next = 1_000_000;
        let trace = times(100_000).map(|at| {
            let is_even = ((at / PHASE_MS) as u64).is_multiple_of(2);
            let page = if is_even && dice.random_bool(0.5) {
                zipf.draw(&mut dice)
            } else if !is_even && waiting.len() > 150 {
                waiting.pop_front().unwrap()
            } else {
                next += 1;
                if !is_even {
                    waiting.push_back(next);
                }
                next
            };
            (at, vec![page * 8, page * 8 + 1])
        });
        let trace: Trace = trace.collect();
        let phase = |at: f64| (at / PHASE_MS) as u64;
        let changes: Vec<_> = (0..trace.len())
            .filter(|at| *at == 0 || phase(trace[*at].0) != phase(trace[at - 1].0))
            .collect();
        assert_bounds(&trace, segments, &changes);
    }
}

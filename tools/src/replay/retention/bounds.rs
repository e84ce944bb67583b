//! The learned policy beside LRU on small traces that are made here: how far it may fall behind.

#![allow(clippy::unwrap_used)]

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;

use super::requests::Requests;
use super::volume::{Geometry, SEGMENT_BYTES};
use super::{Hints, PAGE_BYTES, play};
use crate::interrupt::Interrupt;
use crate::open::Policy;

/// Requests: a time in milliseconds, and the blocks.
type Trace = Vec<(f64, Vec<u64>)>;

fn requests(trace: &Trace) -> Requests {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace");
    let line = |(at, blocks): &(f64, Vec<u64>)| {
        let line = serde_json::json!({"timestamp": *at as u64, "hash_ids": blocks});
        format!("{line}\n")
    };
    std::fs::write(&path, trace.iter().map(line).collect::<String>()).unwrap();
    Requests::read(&path, None, &Interrupt::never()).unwrap()
}

/// The hits of the learned policy less those of LRU, in points, in a store of about so many
/// segments.
fn lead(trace: &Trace, segments: u32) -> f64 {
    let requests = requests(trace);
    let percent = |percent| Geometry::keeping(percent, &requests, PAGE_BYTES, SEGMENT_BYTES);
    let geometry = (1..1000)
        .map(|step| percent(f64::from(step) / 10.0).unwrap())
        .find(|geometry| geometry.segments >= segments)
        .unwrap();
    let never = Interrupt::never();
    let hits = |policy| {
        play(&requests, &geometry, policy, Hints::None, &never)
            .unwrap()
            .hits
    };
    let lead = hits(Policy::Learned) as f64 - hits(Policy::Lru) as f64;
    lead / requests.references() as f64 * 100.0
}

/// Single pages, drawn with odds that fall with the power of their rank.
struct Zipf(Vec<f64>);

impl Zipf {
    fn new(pages: usize, power: f64) -> Zipf {
        let mut sum = 0.0;
        let odds = (1..=pages).map(|rank| {
            sum += (rank as f64).powf(-power);
            sum
        });
        Zipf(odds.collect())
    }

    fn draw(&self, dice: &mut Pcg64) -> u64 {
        let at = dice.random::<f64>() * self.0[self.0.len() - 1];
        self.0.partition_point(|sum| *sum < at) as u64
    }
}

const RATE: f64 = 50.0;

fn times(count: usize) -> impl Iterator<Item = f64> {
    (0..count).map(|at| at as f64 * 1000.0 / RATE)
}

#[test]
fn pages_drawn_with_fixed_odds_cost_at_most_three_tenths_of_a_point() {
    for (segments, power, seed) in [(64, 1.0, 1), (64, 0.8, 2), (256, 1.0, 3)] {
        let mut dice = Pcg64::seed_from_u64(seed);
        let zipf = Zipf::new(12_000, power);
        let trace = times(100_000).map(|at| (at, vec![zipf.draw(&mut dice)]));
        let lead = lead(&trace.collect(), segments);
        assert!(lead > -0.3, "{segments} segments, power {power}: {lead}");
    }
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
        let lead = lead(&trace.collect(), segments);
        assert!(lead > -0.3, "{segments} segments: {lead}");
    }
}

#[test]
fn a_loop_larger_than_the_store_costs_at_most_a_point() {
    let trace = times(30_000).enumerate().map(|(step, at)| {
        let head = (step % 500) as u64 * 8;
        (at, vec![head, head + 1, head + 2])
    });
    let lead = lead(&trace.collect(), 128);
    assert!(lead > -1.0, "{lead}");
}

#[test]
fn scans_between_used_pages_cost_at_most_a_point() {
    let mut dice = Pcg64::seed_from_u64(4);
    let zipf = Zipf::new(3_000, 0.9);
    let trace = times(60_000).enumerate().map(|(step, at)| {
        let is_scan = step / 2000 % 4 == 3;
        let page = match is_scan {
            true => 1_000_000 + step as u64,
            false => zipf.draw(&mut dice),
        };
        (at, vec![page * 8, page * 8 + 1])
    });
    let lead = lead(&trace.collect(), 64);
    assert!(lead > -1.0, "{lead}");
}

/// Every ten minutes the meaning of a first use changes: pages used once return never, or once,
/// after a while.
#[test]
fn a_workload_that_changes_every_ten_minutes_costs_at_most_a_point() {
    for segments in [64, 256] {
        let mut dice = Pcg64::seed_from_u64(5);
        let zipf = Zipf::new(2_000, 0.8);
        let mut waiting = std::collections::VecDeque::new();
        let mut next = 1_000_000;
        let trace = times(100_000).map(|at| {
            let is_even = ((at / 600_000.0) as u64).is_multiple_of(2);
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
        let lead = lead(&trace.collect(), segments);
        assert!(lead > -1.0, "{segments} segments: {lead}");
    }
}

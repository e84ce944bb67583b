//! Small traces under a budget of writes, in the time of the trace.

#![allow(clippy::unwrap_used)]

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;

use super::bounds::{Trace, Zipf, requests};
use super::volume::{FILL, Geometry, Played};
use super::{Hints, Limits, play};
use crate::interrupt::Interrupt;
use crate::policy::Policy;

const HOUR_MS: f64 = 3_600_000.0;
const MINUTE_MS: f64 = 60_000.0;

fn run(trace: &Trace, policy: Policy, budget: Option<u64>) -> Played {
    let requests = requests(trace);
    let geometry = Geometry::keeping(20.0, FILL, None, &requests).unwrap();
    let lessons = &[];
    let limits = Limits { lessons, budget };
    let never = Interrupt::never();
    play(&requests, &geometry, policy, Hints::None, limits, &never).unwrap()
}

/// The bytes of each hour that begins with a minute of the trace, as parts of an hour's budget.
fn hours(trace: &Trace, played: &Played, bytes_a_day: u64) -> Vec<f64> {
    let written_by = |ms: f64| {
        let requests = trace.partition_point(|(at, _)| *at <= ms);
        let last = requests.checked_sub(1);
        last.map_or(0, |last| played.written_of[last])
    };
    let last = trace.last().unwrap().0 - HOUR_MS;
    let begins = (0..).map(|minute| f64::from(minute) * MINUTE_MS);
    begins
        .take_while(|begin| *begin <= last)
        .map(|begin| {
            let bytes = written_by(begin + HOUR_MS) - written_by(begin);
            bytes as f64 / (bytes_a_day as f64 / 24.0)
        })
        .collect()
}

fn bytes_a_day(trace: &Trace, written: u64, share: f64) -> u64 {
    (share * written as f64 * 24.0 * HOUR_MS / trace.last().unwrap().0) as u64
}

/// Single pages by Zipf: reclaim copies a tenth of what is put and more.
fn singles(requests: usize, hours: f64) -> Trace {
    let mut dice = Pcg64::seed_from_u64(11);
    let zipf = Zipf::new(3_000, 0.8);
    let step = hours * HOUR_MS / requests as f64;
    (0..requests)
        .map(|at| (at as f64 * step, vec![zipf.draw(&mut dice)]))
        .collect()
}

#[test]
fn each_hour_writes_at_least_nine_tenths_of_its_budget_and_at_most_eleven_tenths() {
    let trace = singles(20_000, 3.0);
    for policy in [Policy::Lru, Policy::Learned] {
        let all = run(&trace, policy, None);
        assert!(all.copied_bytes > all.put_bytes / 20, "reclaim has to copy");
        for share in [0.5, 0.12] {
            let budget = bytes_a_day(&trace, all.written_bytes, share);
            let played = run(&trace, policy, Some(budget));
            let hours = hours(&trace, &played, budget);
            assert!(hours.len() > 100);
            let is_within = |part: &f64| (0.9..=1.1).contains(part);
            assert!(
                hours.iter().all(is_within),
                "{policy:?}, {share}: {hours:?}"
            );
        }
    }
}

#[test]
fn a_load_in_bursts_writes_at_most_eleven_tenths_of_an_hours_budget() {
    let even = singles(15_000, 3.0);
    // The requests of an hour come in its first ten minutes.
    let trace: Trace = even
        .into_iter()
        .map(|(at, blocks)| {
            let hour = (at / HOUR_MS).floor();
            (hour * HOUR_MS + (at - hour * HOUR_MS) / 6.0, blocks)
        })
        .collect();
    let all = run(&trace, Policy::Lru, None);
    let budget = bytes_a_day(&trace, all.written_bytes, 0.5);
    let played = run(&trace, Policy::Lru, Some(budget));
    let hours = hours(&trace, &played, budget);
    assert!(
        hours.iter().all(|part| (0.1..=1.1).contains(part)),
        "{hours:?}"
    );
}

/// Half of the requests bring a long prompt that never returns, the others go on with one of some
/// conversations.
#[test]
fn half_of_the_bytes_keep_most_of_the_hits_of_conversations() {
    let mut dice = Pcg64::seed_from_u64(12);
    let mut turns = vec![0_u64; 100];
    let mut next = 1_000_000;
    let trace: Trace = (0..6_000)
        .map(|at| {
            let blocks = if dice.random_bool(0.5) {
                next += 100;
                (next..next + dice.random_range(4..24)).collect()
            } else {
                let talk = dice.random_range(0..turns.len());
                // A conversation ends after twelve turns, and another one takes its place.
                turns[talk] += 1;
                let (round, turn) = (turns[talk] / 12, turns[talk] % 12 + 1);
                let head = talk as u64 * 1_000 + round * 20;
                (head..head + turn).collect()
            };
            (f64::from(at) * 1_000.0, blocks)
        })
        .collect();
    for policy in [Policy::Lru, Policy::Learned] {
        let all = run(&trace, policy, None);
        let budget = bytes_a_day(&trace, all.written_bytes, 0.5);
        let played = run(&trace, policy, Some(budget));
        assert!(played.written_bytes < all.written_bytes * 55 / 100);
        let kept = played.hits as f64 / all.hits as f64;
        assert!(kept > 0.85, "{policy:?}: {kept}");
    }
}

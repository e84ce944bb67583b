//! The curve as the store evicts, beside the hits of the store itself.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;

use larder_base::ids::NamespaceId;
use larder_core::policy::make;
use larder_engine::Hint;
use larder_format::PageKey;
use larder_store::curve::{Curve, CurveReport, FACTORS, Used};
use rand::SeedableRng;
use rand_pcg::Pcg64;

use super::bounds::{Zipf, requests, times};
use super::volume::{FILL, Geometry, PAGE_BLOCKS, Volume};
use super::{Hints, Limits, play};
use crate::interrupt::Interrupt;
use crate::policy::Policy;
use crate::replay::requests::Requests;

/// The requests at the end that are compared.
const LAST: usize = 10_000;

pub(super) const CHAT: &str = "conversation_trace.jsonl";
const AGENTS: &str = "agent_a.jsonl.gz";

/// Most memory that the curve of an order takes.
const RAM_MAX: usize = 10 << 20;

const SPACE: NamespaceId = NamespaceId(0);

/// Sizes at which another store is played, as multiples of the first one, and the greatest error of
/// the curve there in points.
const OTHERS: [(usize, f64); 2] = [(1, 0.5), (5, 2.0)];
const OTHERS_MAX: f64 = 1.5;

/// The greatest error of the miniature of the present size, before the adjustment.
const MINIATURE_MAX: f64 = 2.0;

/// The place of the present size.
const PRESENT: usize = 3;

/// The hit rates in percent of the last requests.
struct Compared {
    /// Of the store, and of its miniature.
    real: f64,
    miniature: f64,
    own: [f64; FACTORS.len()],
    lru: [f64; FACTORS.len()],
}

/// Pages asked for, and the hits by the miniature of the present size, by the curve, and by LRU.
fn counted(report: &CurveReport) -> Vec<f64> {
    let total = report.total();
    let rates = [1.0, total.miniature_hit_rate.unwrap()].into_iter();
    let rates = rates.chain(total.own_hit_rates).chain(total.hit_rates);
    rates
        .map(|rate| rate * total.pages_requested as f64)
        .collect()
}

/// The keys of another trace that is the same otherwise: other pages are sampled.
fn salted(keys: &[PageKey], salt: u8) -> Vec<PageKey> {
    let salted = |key: &PageKey| {
        let mut bytes = *key.as_bytes();
        bytes[0] ^= salt;
        PageKey::from_bytes(bytes)
    };
    keys.iter().map(salted).collect()
}

fn compare(requests: &Requests, percent: f64, salt: u8) -> Compared {
    let geometry = Geometry::keeping(percent, FILL, None, requests).unwrap();
    let maker = Policy::Learned.maker().unwrap();
    let mut volume = Volume::new(&geometry, Some(make(&maker)), None).unwrap();
    let blocks = geometry.pages as u64 * u64::from(PAGE_BLOCKS);
    let curve = Curve::new(blocks, Some((maker, geometry.segments as usize)));
    let report = |now_ms| curve.report(now_ms, |_| None);
    let (mut hits, mut before) = (0, Vec::new());
    let skipped = requests.iter().len().saturating_sub(LAST);
    for (at, request) in requests.iter().enumerate() {
        if at == skipped {
            (hits, before) = (0, counted(&report(request.at_ms)));
        }
        let keys = salted(&requests.keys(request), salt);
        volume.tick(request.at_ms);
        let stored = volume.stored(&keys);
        hits += stored;
        let blocks = (PAGE_BLOCKS, PAGE_BLOCKS);
        if curve.looked_up(SPACE, blocks, (&keys, stored), request.at_ms) {
            curve.count();
        }
        let used = Used {
            namespace: SPACE,
            blocks: PAGE_BLOCKS,
            parent: stored.checked_sub(1).map(|at| &keys[at]),
            hint: Hint::default(),
            now_ms: request.at_ms,
        };
        let put = keys.iter().enumerate().skip(stored);
        let put = put.map(|(at, key)| (key, at as u32, false));
        if stored < keys.len() && curve.put(&used, put) {
            curve.count();
        }
        volume.read(&keys[..stored]);
        volume.put(&keys, stored, Hint::default());
    }
    let after = counted(&report(u64::MAX));
    let ram = curve.own_ram_bytes();
    assert!(ram <= RAM_MAX, "{ram}");
    let asked = after[0] - before[0];
    let percent = |at: usize| (after[at] - before[at]) / asked * 100.0;
    Compared {
        real: hits as f64 / asked * 100.0,
        miniature: percent(1),
        own: std::array::from_fn(|at| percent(2 + at)),
        lru: std::array::from_fn(|at| percent(2 + FACTORS.len() + at)),
    }
}

/// The hit rate in percent of the last requests in a store that keeps this part of the blocks.
fn played(requests: &Requests, percent: f64) -> f64 {
    let geometry = Geometry::keeping(percent, FILL, None, requests).unwrap();
    let (limits, never) = (Limits::default(), Interrupt::never());
    let played = play(
        requests,
        &geometry,
        Policy::Learned,
        Hints::Sglang,
        limits,
        &never,
    )
    .unwrap();
    let skipped = requests.iter().len().saturating_sub(LAST);
    let last = requests.iter().zip(&played.hits_of).skip(skipped);
    let sums = last.fold((0, 0), |(asked, hits), (request, found)| {
        (asked + requests.keys(request).len(), hits + found)
    });
    sums.1 as f64 / sums.0 as f64 * 100.0
}

/// With each set of keys the curve has the hit rate of the store, and is close to those of stores
/// of other sizes. Returns the first comparison.
#[track_caller]
fn agrees(name: &str, requests: &Requests, percent: f64, salts: u8) -> Compared {
    let others = OTHERS.map(|(at, factor)| {
        assert_eq!(FACTORS[at], factor);
        (at, played(requests, percent * factor))
    });
    let mut compared: Vec<Compared> = (0..salts)
        .map(|salt| compare(requests, percent, salt))
        .collect();
    for of in &compared {
        println!(
            "{name}, {percent} %: the store {:.2}, the miniature {:.2}, LRU {:.2}",
            of.real, of.miniature, of.lru[PRESENT]
        );
        for (at, real) in others {
            println!(
                "  {} x: the store {real:.2}, the curve {:.2}",
                FACTORS[at], of.own[at]
            );
        }
    }
    for of in &compared {
        assert!(
            (of.real - of.own[PRESENT]).abs() < 0.01,
            "{name}, {percent} %"
        );
        let error = of.miniature - of.real;
        assert!(error.abs() <= MINIATURE_MAX, "{name}, {percent} %: {error}");
        for (at, real) in others {
            let error = of.own[at] - real;
            assert!(
                error.abs() <= OTHERS_MAX,
                "{name}, {percent} %, {at}: {error}"
            );
        }
    }
    compared.swap_remove(0)
}

/// A trace in a file beside the repository; its absence is reported.
pub(super) fn published(name: &str) -> Option<Requests> {
    let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/traces");
    // Plain text is passed on.
    let unpacked = Command::new("gzip")
        .args(["-dcf"])
        .arg(place.join(name))
        .output()
        .ok()
        .filter(|output| output.status.success());
    let Some(unpacked) = unpacked else {
        println!("SKIPPED the curve of {name}: there is no such trace");
        return None;
    };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace");
    std::fs::write(&path, unpacked.stdout).unwrap();
    Some(Requests::read(&path, usize::MAX, &Interrupt::never()).unwrap())
}

#[test]
fn the_curve_of_the_chat_trace_agrees_with_stores() {
    if let Some(requests) = published(CHAT) {
        agrees(CHAT, &requests, 5.0, 2);
    }
}

#[test]
#[ignore = "takes minutes"]
fn the_curves_of_published_traces_agree_with_stores_of_several_sizes() {
    for (name, percents) in [(CHAT, &[2.0, 10.0][..]), (AGENTS, &[2.0, 5.0])] {
        if let Some(requests) = published(name) {
            for percent in percents {
                agrees(name, &requests, *percent, 2);
            }
        }
    }
}

/// Chains by Zipf, of which LRU keeps fewer. Reclaim drops many of their pages, and a miniature
/// none.
#[test]
fn the_curve_of_a_made_trace_agrees_with_stores_and_not_with_lru() {
    let mut dice = Pcg64::seed_from_u64(11);
    let zipf = Zipf::new(3_000, 0.9);
    let trace = times(40_000).map(|at| {
        let chain = zipf.draw(&mut dice) * 8;
        (at, (chain..=chain + chain / 8 % 8).collect())
    });
    let requests = requests(&trace.collect());
    let found = agrees("chains by Zipf", &requests, 8.0, 2);
    assert!((found.real - found.lru[PRESENT]).abs() > 3.0);
}

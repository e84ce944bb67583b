//! The curve against exact stack distances.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::process::Command;

use super::*;

const SPACE: NamespaceId = NamespaceId(3);

fn key(number: u64) -> PageKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&number.wrapping_mul(MIX).to_le_bytes());
    PageKey::from_bytes(bytes)
}

/// A random number below a limit, of a sequence.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = self.0.wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

type Trace = Vec<Vec<u64>>;

/// A put of pages that take so many blocks.
fn put(curve: &Curve, namespace: NamespaceId, blocks: u32, keys: &[PageKey]) {
    let used = Used {
        namespace,
        blocks,
        parent: None,
        hint: Hint::default(),
        now_ms: 0,
    };
    curve.put(
        &used,
        keys.iter()
            .enumerate()
            .map(|(at, key)| (key, at as u32, false)),
    );
}

/// Conversations that grow turn by turn, on a few shared beginnings.
fn conversations(turns: usize, seed: u64) -> Trace {
    let mut random = Random(seed);
    let mut held: Vec<Vec<u64>> = Vec::new();
    let mut next = 1000;
    (0..turns)
        .map(|_| {
            let again = !held.is_empty() && random.below(10) < 6;
            let mut chain = match again {
                true => {
                    let age = random.below(2000).min(random.below(2000));
                    let at = held.len() - 1 - (age as usize).min(held.len() - 1);
                    held.remove(at)
                }
                false => (0..8).map(|page| random.0 % 4 * 8 + page).collect(),
            };
            let more = 1 + random.below(24);
            chain.extend(next..next + more);
            next += more;
            held.push(chain.clone());
            chain
        })
        .collect()
}

/// Pages of a skewed popularity, in chains of one page.
fn skewed(count: usize, pages: u64, seed: u64) -> Trace {
    let mut random = Random(seed);
    let mut pick = || {
        let part = random.below(1 << 30) as f64 / f64::from(1 << 30);
        (part * part * part * pages as f64) as u64
    };
    (0..count).map(|_| vec![pick()]).collect()
}

/// The same long documents again and again, in turn: the worst case of LRU.
fn rounds(documents: u64, pages: u64, times: usize) -> Trace {
    let document = move |of: u64| (0..pages).map(|page| of * pages + page).collect();
    let round = move |_| (0..documents).map(document);
    (0..times).flat_map(round).collect()
}

/// A trace in a file beside the repository; its absence is reported.
fn published(name: &str) -> Option<Trace> {
    let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces");
    let path = place.join(name);
    // Plain text is passed on.
    let unpacked = Command::new("gzip").args(["-dcf"]).arg(&path).output();
    let text = unpacked.ok().filter(|output| output.status.success());
    let Some(text) = text.and_then(|output| String::from_utf8(output.stdout).ok()) else {
        crate::honest::skipped(
            "the curve of a published trace",
            format!("there is no {name}"),
        );
        return None;
    };
    let ids = |line: &str| -> Vec<u64> {
        let request: serde_json::Value = serde_json::from_str(line).unwrap();
        let ids = request["hash_ids"].as_array().unwrap();
        ids.iter().map(|id| id.as_u64().unwrap()).collect()
    };
    Some(text.lines().map(ids).collect())
}

/// Exact stack distances: how many other pages were used since each lookup's last use.
fn distances(trace: &Trace) -> (Vec<u64>, u64) {
    let total = trace.iter().map(Vec::len).sum::<usize>();
    let mut sums = vec![0_i64; total + 1];
    let add = |mut node: usize, change: i64, sums: &mut Vec<i64>| {
        node += 1;
        while node <= total {
            sums[node] += change;
            node += node & node.wrapping_neg();
        }
    };
    let upto = |mut node: usize, sums: &Vec<i64>| {
        let mut sum = 0;
        node += 1;
        while node > 0 {
            sum += sums[node];
            node &= node - 1;
        }
        sum
    };
    let mut last: HashMap<u64, usize> = HashMap::new();
    let (mut found, mut now) = (Vec::new(), 0);
    for page in trace.iter().flat_map(|chain| chain.iter().rev()) {
        if let Some(before) = last.insert(*page, now) {
            let since = last.len() as i64 - upto(before, &sums);
            found.push(since.unsigned_abs());
            add(before, -1, &mut sums);
        }
        add(now, 1, &mut sums);
        now += 1;
    }
    (found, total as u64)
}

/// The mean error and the greatest one, in points, for a store that keeps so many pages.
fn errors(trace: &Trace, pages: u64) -> (f64, f64) {
    let curve = Curve::new(pages, None);
    for chain in trace {
        let keys: Vec<PageKey> = chain.iter().map(|page| key(*page)).collect();
        curve.looked_up(SPACE, (1, 1), (&keys, 0), 0);
        // All pages, so that the order is that of the exact distances.
        put(&curve, SPACE, 1, &keys);
    }
    let memory = {
        let state = curve.state.lock();
        let places = state.order.at.capacity() * size_of::<Option<u64>>();
        let sums = state.order.sums.capacity() * size_of::<u64>();
        let entry = size_of::<(u64, Page)>() + 1;
        places + sums + (state.pages.capacity() * 8 / 7).next_power_of_two() * entry
    };
    assert!(memory <= 2 << 20, "{memory}");
    let (distances, asked) = distances(trace);
    let mut by: BTreeMap<u64, u64> = BTreeMap::new();
    for distance in distances {
        *by.entry(distance).or_default() += 1;
    }
    let report = curve.report(1, |_| Some("a".to_owned()));
    let rates = &report.spaces[0].hit_rates;
    let all = FACTORS.iter().zip(rates).map(|(factor, rate)| {
        let size = (factor * pages as f64) as u64;
        let hits: u64 = by.range(..size).map(|(_, count)| count).sum();
        (rate - hits as f64 / asked as f64).abs() * 100.0
    });
    let all: Vec<f64> = all.collect();
    let worst = all.iter().fold(0.0, |worst: f64, error| worst.max(*error));
    (all.iter().sum::<f64>() / all.len() as f64, worst)
}

#[track_caller]
fn agrees(trace: &Trace, pages: u64) {
    let (mean, worst) = errors(trace, pages);
    println!("{pages} pages: mean error {mean:.3} points, worst {worst:.3}");
    assert!(mean <= 1.0 && worst <= 3.0, "{pages}: {mean} and {worst}");
}

#[test]
fn the_curves_of_made_traces_agree_with_exact_distances() {
    for (trace, sizes) in [
        (conversations(20_000, 1), [2_000, 20_000]),
        (skewed(400_000, 100_000, 2), [2_000, 20_000]),
        // All 20,000 pages fit or none does: no size is near that edge.
        (rounds(400, 50, 6), [6_000, 15_000]),
    ] {
        for pages in sizes {
            agrees(&trace, pages);
        }
    }
}

#[test]
fn the_curves_of_published_traces_agree_with_exact_distances() {
    for name in ["conversation_trace.jsonl", "agent_a.jsonl.gz"] {
        for pages in [4_000, 20_000] {
            if let Some(trace) = published(name) {
                agrees(&trace, pages);
            }
        }
    }
}

#[test]
fn namespaces_have_curves_of_their_own_and_share_the_store() {
    let curve = Curve::new(100, None);
    let keys: Vec<PageKey> = (0..60).map(key).collect();
    for _ in 0..10 {
        for space in [1, 2, 3] {
            let space = NamespaceId(space);
            curve.looked_up(space, (1, 1), (&keys, 0), 0);
            put(&curve, space, 1, &keys);
        }
    }
    curve.looked_up(NamespaceId(9), (1, 1), (&keys[..1], 0), 0);
    let report = curve.report(5000, |space| Some(space.0.to_string()));
    assert_eq!((report.spaces.len(), report.size_bytes), (4, 409_600));
    for of in &report.spaces[..3] {
        assert_eq!((of.pages_requested, of.is_rough), (600, false));
        // 180 pages are used in turn: they all fit twice the size, and none fits the present one.
        assert_eq!((of.hit_rates[3], of.hit_rates[5]), (0.0, 0.9));
        assert_eq!(of.read_bytes[5], 540 * 4096);
    }
    let rough = &report.spaces[3];
    assert_eq!((&*rough.fingerprint, rough.is_rough), ("9", true));
    let total = report.total();
    assert_eq!(total.pages_requested, 1801);
    assert!((total.hit_rates[5] - 0.9).abs() < 0.001);
    curve.resize(100);
    assert_eq!(curve.report(5000, |_| None).spaces.len(), 4);
    curve.resize(200);
    assert!(curve.report(5000, |_| None).spaces.is_empty());
}

#[test]
fn further_namespaces_share_a_curve_and_old_lookups_fade() {
    let curve = Curve::new(100, None);
    let keys: Vec<PageKey> = (0..4).map(key).collect();
    for space in 0..OWN_MAX as u16 + 5 {
        curve.looked_up(NamespaceId(space), (1, 1), (&keys, 0), 0);
    }
    let report = curve.report(0, |space| Some(space.0.to_string()));
    assert_eq!(report.spaces.len(), OWN_MAX + 1);
    assert_eq!(report.spaces[0].fingerprint, crate::spaces::OTHER);
    assert_eq!(report.spaces[0].pages_requested, 20);
    curve.looked_up(NamespaceId(0), (1, 1), (&keys, 0), HALVED_MS + 1);
    let report = curve.report(HALVED_MS + 1, |space| Some(space.0.to_string()));
    assert_eq!(report.spaces[0].pages_requested, 10);
    assert_eq!(report.seconds, (HALVED_MS / 2) as f64 / 1000.0);
}

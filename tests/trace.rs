//! The main job on a request trace: nothing wrong, as many hits as an exact LRU, few extra writes,
//! and most of the hits under a budget of writes.
#![allow(clippy::unwrap_used)]

mod support;

use std::path::Path;

use support::{Request, chat_trace, directory, exact_lru_hit_rate, json, make_trace, read_trace};

struct Sizes<'a> {
    capacity: &'a str,
    capacity_bytes: f64,
    segment: &'a str,
    write_amplification_max: f64,
}

fn replays_like_an_exact_lru(trace_path: &Path, trace: &[Request], sizes: &Sizes<'_>) {
    let directory = directory();
    let store = directory.path().join("store");
    let report = json(&[
        "replay",
        "store",
        trace_path.to_str().unwrap(),
        "--store",
        store.to_str().unwrap(),
        "--capacity",
        sizes.capacity,
        "--segment-size",
        sizes.segment,
        "--page-bytes",
        "64KiB",
    ]);
    assert_eq!(report["requests"], trace.len());
    for nothing in [
        "wrong_pages",
        "damaged_pages",
        "unfinished_pages",
        "refused_pages",
        "failed_pages",
    ] {
        assert_eq!(report[nothing], 0, "{nothing}: {report:#}");
    }
    let usable = report["usable_pages"].as_u64().unwrap();
    let expected = exact_lru_hit_rate(trace, usize::try_from(usable).unwrap());
    let found = report["hit_rate"].as_f64().unwrap();
    assert!(
        (found - expected).abs() <= 0.005,
        "hit rate {found}, an exact LRU has {expected}"
    );
    let amplification = report["write_amplification"].as_f64().unwrap();
    assert!(
        amplification <= sizes.write_amplification_max,
        "write amplification {amplification}"
    );
    assert!(
        usable as f64 * 65536.0 >= 0.85 * sizes.capacity_bytes,
        "{usable} usable pages"
    );
    assert!(std::fs::metadata(&store).unwrap().len() as f64 <= sizes.capacity_bytes);
    let stored = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&store).unwrap()) * 512;
    assert!(
        stored as f64 <= sizes.capacity_bytes + 65536.0,
        "{stored} bytes on disk"
    );
    println!(
        "{}: hit rate {found:.4} (exact LRU {expected:.4}), write amplification {amplification:.3}",
        sizes.capacity
    );
}

#[test]
fn a_small_store_under_a_made_trace_hits_like_an_exact_lru() {
    let directory = directory();
    let path = directory.path().join("trace.jsonl");
    let trace = make_trace(&path, 1500, 7);
    let sizes = Sizes {
        capacity: "514MiB",
        capacity_bytes: f64::from(514 << 20),
        segment: "16MiB",
        write_amplification_max: 1.3,
    };
    replays_like_an_exact_lru(&path, &trace, &sizes);
}

#[test]
fn the_chat_trace_in_1_gib_of_16_mib_segments_hits_like_an_exact_lru() {
    let Some(path) = chat_trace() else { return };
    let sizes = Sizes {
        capacity: "1GiB",
        capacity_bytes: f64::from(1 << 30),
        segment: "16MiB",
        write_amplification_max: 1.3,
    };
    replays_like_an_exact_lru(&path, &read_trace(&path), &sizes);
}

#[test]
fn the_chat_trace_in_4_gib_hits_like_an_exact_lru() {
    let Some(path) = chat_trace() else { return };
    let sizes = Sizes {
        capacity: "4GiB",
        capacity_bytes: 4.0 * f64::from(1 << 30),
        segment: "16MiB",
        write_amplification_max: 1.3,
    };
    replays_like_an_exact_lru(&path, &read_trace(&path), &sizes);
}

#[test]
fn half_of_the_bytes_keep_85_percent_of_the_hits_of_the_chat_trace() {
    let Some(path) = chat_trace() else { return };
    let path = path.to_str().unwrap();
    let report = json(&[
        "replay",
        "policy",
        path,
        "--percent",
        "10",
        "--hints",
        "sglang",
        "--write-budget",
        "50",
    ]);
    let budget = &report["capacities"][0]["budgets"][0];
    let lost = budget["hits_lost"].as_f64().unwrap();
    assert!(lost <= 0.15, "{lost} of the hits are lost");
    let written = budget["bytes_written"].as_f64().unwrap();
    let all = report["capacities"][0]["bytes_written"].as_f64().unwrap();
    let share = written / all;
    assert!(
        (0.45..=0.55).contains(&share),
        "{share} of the bytes are written"
    );
    println!("{lost:.3} of the hits lost, {share:.3} of the bytes");
}

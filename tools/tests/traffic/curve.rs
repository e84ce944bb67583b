//! `larder stat --curve`: the curve of the lookups that a store got.

use std::fmt::Write as _;
use std::path::Path;

use super::record::Scene;
use super::serve;
use super::support::{json, says, text};

/// Documents of eight blocks, some of them asked for more often than others: more than fit.
pub fn documents(path: &Path) {
    let mut state = 7_u64;
    let mut text = String::new();
    for at in 0..3000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005);
        state = state.wrapping_add(1_442_695_040_888_963_407);
        let part = (state >> 33) as f64 / f64::from(1 << 31);
        let first = (part * part * 2500.0) as u64 * 8;
        let blocks: Vec<u64> = (first..first + 8).collect();
        writeln!(text, "{{\"timestamp\": {at}, \"hash_ids\": {blocks:?}}}").unwrap();
    }
    std::fs::write(path, text).unwrap();
}

#[test]
fn the_curve_at_the_present_size_is_the_hit_rate_of_the_store() {
    let scene = Scene::new("128MiB");
    let _owner = serve(&scene.store);
    let trace = scene.at("trace.jsonl");
    documents(&trace);
    let replayed = scene.replay(&trace, &scene.store);
    let curve = &json(&["stat", text(&scene.store)])["curve"];
    assert_eq!(curve["pages_requested"], replayed["pages_requested"]);
    let rates: Vec<f64> = curve["sizes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|size| size["hit_rate"].as_f64().unwrap())
        .collect();
    // It grows with the size, and at the present one a store of few segments follows LRU.
    assert!(rates.is_sorted() && rates[0] < rates[9], "{rates:?}");
    let found = replayed["hit_rate"].as_f64().unwrap();
    assert_eq!(curve["sizes"][3]["factor"], 1.0);
    assert!((rates[3] - found).abs() < 0.015, "{rates:?}, {found}");
    let space = &curve["spaces"][0];
    assert_eq!(
        (&space["model"], &space["is_rough"]),
        (&"replay".into(), &false.into())
    );
    let words = ["Curve of LRU", "0.25 x", "8 x"];
    says(&["stat", text(&scene.store), "--curve"], 0, &words);
    let gauge = "larder_curve_hit_ratio{size=\"0.25\"}";
    says(&["stat", text(&scene.store), "--openmetrics"], 0, &[gauge]);
}

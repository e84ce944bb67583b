//! `larder plan`, from each of its sources.

use std::path::Path;

use serde_json::Value;

use super::curve::documents;
use super::record::Scene;
use super::serve;
use super::support::{directory, fails, json, says, text};

/// A model with 32 bytes a token: a block of 512 has 16 KiB.
const CONFIG: &str = r#"{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8,
    "intermediate_size": 16, "num_attention_heads": 1, "head_dim": 8}"#;

fn number(report: &Value, key: &str) -> f64 {
    report[key].as_f64().unwrap()
}

#[track_caller]
fn is_near(found: f64, expected: f64, part: f64) {
    let ratio = found / expected;
    assert!((ratio - 1.0).abs() <= part, "{found}, not {expected}");
}

#[test]
fn tokens_a_day_give_bytes_and_days_and_no_hits() {
    let of = ["plan", "--model", "llama-3.1-70b", "--ranks", "8"];
    let source = [
        "--tokens-per-day",
        "10000000",
        "--days",
        "7",
        "--drive-writes",
        "7000",
    ];
    let plan = json(&[&of[..], &source].concat());
    assert_eq!(plan["token_bytes"], 320 << 10);
    assert_eq!(plan["page_bytes"], 64 * (40 << 10));
    let put = 10e6 * f64::from(320 << 10);
    is_near(number(&plan, "bytes_put_per_day"), put, 0.001);
    // An eighth of the room stays free.
    is_near(number(&plan, "capacity_bytes"), put * 7.0 * 8.0 / 7.0, 0.01);
    is_near(number(&plan, "days"), 7.0, 0.01);
    is_near(
        number(&plan, "drive_years"),
        7000e12 / (put * 1.06) / 365.25,
        0.01,
    );
    assert_eq!(
        (&plan["hit_rate"], &plan["verdict"]),
        (&Value::Null, &"unknown".into())
    );
    says(
        &[&of[..], &source].concat(),
        0,
        &["give a trace or a running store"],
    );
    // The ranks of a model with MLA have the same bytes.
    let latent = ["plan", "--model", "deepseek-v3", "--ranks", "8"];
    let plan = json(&[&latent[..], &source].concat());
    assert_eq!(plan["token_bytes"], 61 * 576 * 2);
    let slow = ["--disk-read", "0.01"];
    let plan = json(&[&latent[..], &source, &slow].concat());
    assert_eq!(plan["verdict"], "prefill_faster");
}

#[test]
fn models_that_would_be_computed_wrongly_and_plans_without_a_source_are_refused() {
    let directory = directory();
    let config = directory.path().join("config.json");
    let hybrid = CONFIG.replace(
        "\"llama\"",
        "\"qwen3_next\", \"full_attention_interval\": 4",
    );
    std::fs::write(&config, hybrid).unwrap();
    let source = ["--tokens-per-day", "1000", "--days", "1"];
    let of = ["plan", "--model", text(&config)];
    fails(&[&of[..], &source].concat(), 2, &["a hybrid model"]);
    fails(&["plan"], 2, &["--trace"]);
    let ranks = ["plan", "--model", "llama-3.1-70b", "--ranks", "3"];
    fails(&[&ranks[..], &source].concat(), 2, &["cannot divide"]);
    let trace = directory.path().join("trace");
    std::fs::write(&trace, "{\"hash_ids\": [1]}\n").unwrap();
    fails(&["plan", "--trace", text(&trace)], 2, &["`timestamp`"]);
}

/// The plan of a trace for a disk.
fn planned(trace: &Path, config: &Path, size: &str) -> Value {
    let of = ["plan", "--model", text(config), "--trace", text(trace)];
    let disk = ["--size", size, "--disk-read", "5", "--disk-write", "2"];
    json(&[&of[..], &disk].concat())
}

#[test]
fn a_plan_for_a_trace_has_the_hits_and_the_bytes_of_its_replay() {
    let scene = Scene::new("128MiB");
    let (trace, config) = (scene.at("trace.jsonl"), scene.at("config.json"));
    documents(&trace);
    std::fs::write(&config, CONFIG).unwrap();
    let replayed = scene.replay(&trace, &scene.store);
    let plan = planned(&trace, &config, "128MiB");
    let rates = [&plan, &replayed].map(|report| number(report, "hit_rate"));
    assert!((rates[0] - rates[1]).abs() < 0.005, "{rates:?}");
    // 2,999 ms of a day.
    let whole = |key: &str| number(&plan, key) * 2.999 / 86_400.0;
    let put = number(&replayed, "pages_put") * 16384.0;
    is_near(whole("bytes_put_per_day"), put, 0.01);
    is_near(
        whole("bytes_written_per_day"),
        number(&replayed, "bytes_written"),
        0.1,
    );
    assert_eq!(plan["page_bytes"], 16384);
    assert!(number(&plan, "double_hit_rate") > rates[0]);
    assert!(number(&plan, "ceiling_hit_rate") >= number(&plan, "double_hit_rate"));
    let p99 = |of: &str| number(&plan[of], "p99_seconds");
    assert!(p99("computed_ttft") > 0.0 && p99("stored_ttft") > 0.0);
    assert_eq!(plan["verdict"], "prefill_faster", "{plan:#}");
    assert!(number(&plan, "write_share") > 0.0);
}

#[test]
fn a_plan_for_a_running_store_has_its_curve_and_its_writes() {
    let scene = Scene::new("128MiB");
    let _owner = serve(&scene.store);
    let (trace, config) = (scene.at("trace.jsonl"), scene.at("config.json"));
    documents(&trace);
    std::fs::write(&config, CONFIG).unwrap();
    let of = [
        "plan",
        "--model",
        text(&config),
        "--store",
        text(&scene.store),
    ];
    assert_eq!(json(&of)["hit_rate"], Value::Null);
    let replayed = scene.replay(&trace, &scene.store);
    let plan = json(&of);
    let rates = [&plan, &replayed].map(|report| number(report, "hit_rate"));
    assert!((rates[0] - rates[1]).abs() < 0.015, "{rates:?}");
    assert_eq!(plan["capacity_bytes"], 128 << 20);
    assert_eq!(
        (&plan["page_tokens"], &plan["verdict"]),
        (&512.into(), &"too_small".into())
    );
    assert!(number(&plan, "bytes_put_per_day") > 0.0);
    let week = json(&[&of[..], &["--days", "7"]].concat());
    is_near(number(&week, "days"), 7.0, 0.01);
    assert_eq!(week["hit_rate"], Value::Null);
}

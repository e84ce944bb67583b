//! `larder replay l4`: the worth of a remote in a roll-out.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../tests/support/mod.rs"]
mod support;

use support::{chat_trace, directory, json, text};

/// 8 nodes of 8,000 blocks that all lose their disks; then 1,500 requests, with a router that sends
/// common prefixes to the same node.
const ROLL_OUT: [&str; 8] = [
    "--nodes",
    "8",
    "--node-blocks",
    "8000",
    "--after",
    "1500",
    "--routing",
    "sticky",
];

#[test]
fn after_a_roll_out_the_remote_gives_back_most_of_the_lost_hits() {
    let Some(trace) = chat_trace() else { return };
    let run = |admission| {
        let arguments = ["replay", "l4", text(&trace), "--admission", admission];
        json(&[&arguments[..], &ROLL_OUT].concat())
    };
    let rate = |window: &serde_json::Value, field: &str| window[field].as_f64().unwrap();
    let through = run("through");
    let (lost, kept) = (&through["lost"], &through["kept"]);
    assert!(rate(lost, "l4_hit_rate") >= 0.14, "{through}");
    assert!(
        rate(lost, "local_hit_rate") < rate(kept, "local_hit_rate") - 0.1,
        "{through}"
    );
    let second = run("second-touch");
    assert!(
        rate(&second["lost"], "l4_hit_rate") < rate(lost, "l4_hit_rate"),
        "{second}"
    );
    assert_eq!(run("none")["lost"]["l4_blocks"], 0);
}

fn line(at: u64, ids: &str) -> String {
    format!("{{\"timestamp\": {at}, \"input_length\": 1024, \"hash_ids\": {ids}}}\n")
}

#[test]
fn a_full_disk_keeps_the_heads_of_its_chains() {
    let directory = directory();
    let trace = directory.path().join("trace.jsonl");
    let lines = [
        line(0, "[1, 2, 3]"),
        line(1, "[4, 5]"),
        line(2, "[1, 2, 3]"),
    ];
    std::fs::write(&trace, lines.concat()).unwrap();
    let one = ["--admission", "none", "--nodes", "1", "--node-blocks", "4"];
    let arguments = ["replay", "l4", text(&trace)];
    let report = json(&[&arguments[..], &one].concat());
    assert_eq!(report["kept"]["local_blocks"], 2, "{report}");
}

#[test]
fn blocks_of_lost_disks_are_found_in_the_remote() {
    let directory = directory();
    let trace = directory.path().join("trace.jsonl");
    // Published two seconds after its first use; the disks are lost before the third request.
    let lines = [
        line(0, "[1, 2]"),
        line(1000, "[3, 4]"),
        line(2500, "[1, 2]"),
        line(2600, "[3, 4]"),
    ];
    std::fs::write(&trace, lines.concat()).unwrap();
    let report = json(&["replay", "l4", text(&trace), "--admission", "through"]);
    assert_eq!(report["lost"]["blocks_requested"], 4);
    assert_eq!(report["lost"]["local_blocks"], 0);
    assert_eq!(report["lost"]["l4_blocks"], 2);
    assert_eq!(report["kept"]["local_blocks"], 4);
    assert_eq!(report["published_blocks"], 2);
}

//! `larder report` of the documents of replays, and of the tables of benchmarks.

use super::page::{charts_are_readable, drawn, has, report};
use super::support::{directory, ends, fails, make_trace, text};

#[test]
fn replays_have_their_charts() {
    let directory = directory();
    let trace = directory.path().join("trace.jsonl");
    make_trace(&trace, 300, 3);
    let store = directory.path().join("store");
    let [at, trace] = [text(&store), text(&trace)];
    let sizes = "--capacity=128MiB,192MiB,256MiB";
    let tiers = ["--store", at, "--capacity", "512GiB", "--l1", "5GiB"];
    let slow = ["--l2", "10GiB", "--page-size", "256", "--scale", "4096"];
    let cases: [(&str, Vec<&str>, usize, &[&str]); 3] = [
        (
            "sizes",
            vec!["store", trace, "--store", at, sizes, "--page-bytes=16KiB"],
            1,
            &["Hit rate by size", "128 MiB", "without a limit"],
        ),
        (
            "policy",
            vec!["policy", trace, "--percent", "10,20"],
            1,
            &["Hit rate by size", "optimum", "20 %"],
        ),
        (
            "tiers",
            [&["tiers", trace, "--rate", "0.0005"], &tiers[..], &slow].concat(),
            4,
            &[
                "Is it worth it?",
                "Tokens found in L1",
                "Half of the requests",
                "L1+L2+L3",
            ],
        ),
    ];
    for (name, replay, charts, words) in cases {
        let command = [&["replay"], &replay[..], &["--json"]].concat();
        let document = directory.path().join(format!("{name}.json"));
        std::fs::write(&document, ends(&command, 0).stdout).unwrap();
        let out = report(&document, 0);
        if let Some(seen) = drawn(&out, &[]) {
            charts_are_readable(&seen, charts);
            has(&seen, words);
        }
    }
}

/// The text of a benchmark script.
const TABLES: &str = "\
AMD EPYC, 2 cores, ext4

| operation | rounds | time of a page | CPU of a page | not slower |
|---|---|---|---|---|
| put | 9 | 1.02 (0.98 to 1.04) | 12 us | yes |
| get <b> | 11 | 0.97 (0.95 to 1.01) | 8.5 us | yes |

Ratios of medians.
";

#[test]
fn each_column_of_numbers_of_a_table_has_bars() {
    let directory = directory();
    let table = directory.path().join("result.md");
    std::fs::write(&table, TABLES).unwrap();
    let out = report(&table, 0);
    if let Some(seen) = drawn(&out, &[]) {
        charts_are_readable(&seen, 3);
        assert_eq!(seen["charts"].as_array().unwrap().len(), 3);
        has(&seen, &["get <b>", "Ratios of medians.", "AMD EPYC", "us"]);
    }
}

#[test]
fn what_has_no_charts_is_refused() {
    let directory = directory();
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let out = directory.path().join("out.html");
    let refused = |path: &std::path::Path, code, word| {
        fails(&["report", text(path), "-o", text(&out)], code, &[word]);
        assert!(!out.exists());
    };
    let other = write("stat.json", "{\"schema\": 1, \"command\": \"stat\"}");
    refused(&other, 2, "replay sizes");
    let torn = write("torn.json", "{\"schema\": 1, \"command\": ");
    refused(&torn, 2, "neither a document nor a table");
    let no_rule = write("no-rule.md", "| a | b |\n| 1 | 2 |\n");
    refused(&no_rule, 2, "neither a document nor a table");
}

//! The output of `larder bench`, and the content of a store after it.

use super::*;

#[test]
fn bench_puts_gets_and_finds_what_it_put() {
    let directory = directory();
    let path = store_in(&directory);
    let path = text(&path);
    let pages = ["--page-bytes", "128KiB", "--pages", "100", "--batch", "32"];
    let put = json(&[&["bench", path, "--op", "put"], &pages[..]].concat());
    assert_eq!(
        (&put["pages_put"], &put["verified_pages"]),
        (&100.into(), &4.into())
    );
    let again = json(&[&["bench", path, "--op", "put"], &pages[..]].concat());
    assert_eq!(again["pages_put"], 100, "every run puts new pages");
    for disk in ["uring", "threads"] {
        if disk == "uring" && !io_uring_works() {
            skipped("bench on io_uring", "doctor finds none");
            continue;
        }
        let get = json(&[&["bench", path, "--op", "get", "--disk", disk], &pages[..]].concat());
        assert_eq!(
            (&get["pages_requested"], &get["verified_pages"]),
            (&100.into(), &100.into())
        );
        assert_eq!(
            (&get["wrong_pages"], &get["pages_missed"]),
            (&0.into(), &0.into())
        );
        assert_eq!(get["disk"], disk);
        for figure in [
            "bytes_per_second",
            "pages_per_second",
            "p50_us",
            "p99_us",
            "cpu_seconds",
            "cpu_seconds_per_gib",
        ] {
            assert!(get[figure].as_f64().unwrap() > 0.0, "{figure}");
        }
        assert!(get["memory_page_bytes"].as_u64().unwrap() >= 4096);
    }
    // A shorter chain is the beginning of a longer, stored one.
    for keys in ["300", "299", "100"] {
        let exists = json(&["bench", path, "--op", "exists", "--keys", keys]);
        assert_eq!(exists["batch"].to_string(), keys);
        assert_eq!(exists["verified_pages"], exists["pages_requested"]);
    }
}

#[test]
fn seeds_of_the_same_pages_expect_the_same_bytes() {
    let directory = directory();
    let path = store_in(&directory);
    let load = ["bench", text(&path), "--op", "load", "--pages", "4"];
    // Tokens have 31 bits.
    for seed in ["1", "2147483649"] {
        let seed = ["--page-bytes", "128KiB", "--seed", seed];
        assert_eq!(json(&[&load[..], &seed].concat())["verified_pages"], 4);
    }
}

#[test]
fn bench_by_turns_waits_for_each_call() {
    let directory = directory();
    let path = store_in(&directory);
    let small = ["--page-bytes", "64KiB", "--pages", "3", "--batch", "1"];
    for op in ["put", "get"] {
        let bench = ["bench", text(&path), "--op", op, "--turns", "--json"];
        let mut bench = larder(&[&bench, &small[..]].concat())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut gives = bench.stdin.take().unwrap();
        let mut says = BufReader::new(bench.stdout.take().unwrap());
        for calls in 0..=3 {
            let mut line = String::new();
            says.read_line(&mut line).unwrap();
            let turn: Value = serde_json::from_str(&line).unwrap();
            assert_eq!(turn["calls"], calls);
            assert_eq!(turn["last_us"].is_number(), calls > 0, "{line}");
            // The last process goes on without an answer: the others have ended.
            if calls < 3 {
                gives.write_all(b"\n").unwrap();
            }
        }
        drop(gives);
        let mut report = String::new();
        says.read_to_string(&mut report).unwrap();
        let report: Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["pages_requested"], 3);
        assert!(bench.wait().unwrap().success());
    }
    let load = ["bench", text(&path), "--op", "load", "--turns", "--json"];
    fails(&load, 2, &["--turns"]);
    fails(&load[..5], 2, &["--json"]);
}

#[test]
fn bench_refuses_pages_that_fit_no_segment() {
    let directory = directory();
    let path = store_in(&directory);
    let large = ["--page-bytes", "64MiB", "--pages", "2", "--batch", "2"];
    for op in ["put", "get"] {
        fails(
            &[&["bench", text(&path), "--op", op], &large[..]].concat(),
            2,
            &[text(&path), "does not fit a segment", "--segment-size"],
        );
    }
}

#[test]
fn bench_loads_pages_tier_by_tier_and_compares_them_in_l1() {
    let directory = directory();
    let path = store_in(&directory);
    let path = text(&path);
    let load = ["bench", path, "--op", "load", "--page-bytes", "128KiB"];
    let chains = ["--pages", "50", "--batch", "16"];
    // The second time all of them are there.
    for parts in ["2", "2", "1"] {
        let report = json(&[&load[..], &chains[..], &["--parts", parts]].concat());
        assert_eq!(
            (&report["op"], &report["device"], &report["layers"]),
            (&"load".into(), &"host memory".into(), &32.into())
        );
        assert_eq!(
            (&report["pages_loaded"], &report["verified_pages"]),
            (&50.into(), &50.into())
        );
        assert_eq!(
            (&report["wrong_pages"], &report["pages_missed"]),
            (&0.into(), &0.into())
        );
        for (tier, (from, to)) in [("L3", "L2"), ("L2", "L1")].into_iter().enumerate() {
            let tier = &report["tiers"][tier];
            assert_eq!((&tier["from"], &tier["to"]), (&from.into(), &to.into()));
            assert!(tier["bytes_per_second"].as_f64().unwrap() > 0.0);
        }
    }
    // Longer chains, whose beginning is stored, and larger pages, none of which is stored.
    for (batch, page) in [("24", "128KiB"), ("50", "128KiB"), ("50", "256KiB")] {
        let load = ["bench", path, "--op", "load", "--page-bytes", page];
        let chains = ["--pages", "50", "--batch", batch];
        let report = json(&[&load[..], &chains[..]].concat());
        assert_eq!(report["verified_pages"], 50, "{report}");
    }
    fails(&[&load[..], &["--parts", "3"]].concat(), 2, &["--parts"]);
    let uneven = ["bench", path, "--op", "load", "--page-bytes", "129KiB"];
    fails(&uneven, 2, &["--page-bytes"]);
    fails(&[&load[..], &["--shared"]].concat(), 2, &["--shared"]);
    fails(&[&load[..], &["--cuda", "99"]].concat(), 3, &["--cuda"]);
    fails(
        &["bench", path, "--op", "get", "--cuda", "0"],
        2,
        &["--op load"],
    );
}

pub fn io_uring_works() -> bool {
    let doctor: Value = serde_json::from_str(&doctor(&["--json"])).unwrap();
    doctor["facts"]
        .as_array()
        .unwrap()
        .iter()
        .any(|fact| fact["name"] == "io_uring" && fact["level"] == "ok")
}

#[test]
fn bench_of_more_pages_than_fit_says_how_many_would() {
    let directory = directory();
    let path = store_in(&directory);
    fails(
        &["bench", text(&path), "--op", "get", "--pages", "512"],
        2,
        &["512 pages of 4 MiB do not fit", "keeps"],
    );
    fails(
        &[
            "bench",
            text(&path),
            "--op",
            "get",
            "--page-bytes",
            "10",
            "--parts",
            "3",
        ],
        2,
        &["--parts"],
    );
    fails(
        &["bench", text(&path), "--op", "get", "--disk", "floppy"],
        2,
        &["floppy"],
    );
}

#[test]
fn bench_spares_the_pages_of_others_unless_it_is_told_not_to() {
    let directory = directory();
    let path = directory.path().join("store");
    let path = text(&path);
    let trace = trace_in(&directory, 300, 4);
    let replay = [
        "replay",
        "store",
        text(&trace),
        "--store",
        path,
        "--capacity",
        STORE_SIZE,
        "--page-bytes",
        "64KiB",
    ];
    let there = json(&replay)["pages_put"].as_u64().unwrap();
    assert!(there > 1000);
    let put = [
        "bench",
        path,
        "--op",
        "put",
        "--page-bytes",
        "1MiB",
        "--pages",
        "200",
        "--batch",
        "32",
    ];
    let get = [
        "bench",
        path,
        "--op",
        "get",
        "--page-bytes",
        "1MiB",
        "--pages",
        "200",
    ];
    let exists = ["bench", path, "--op", "exists", "--keys", "60000"];
    let shared = [&put[..], &["--shared"]].concat();
    let length = std::fs::metadata(path).unwrap().len();
    for arguments in [&put[..], &get, &exists, &shared] {
        fails(arguments, 2, &[path, "may be of others", "--force"]);
        let kept = json(&["inspect", path])["pages"].as_u64().unwrap();
        assert_eq!(kept, there, "{arguments:?}");
    }
    assert_eq!(std::fs::metadata(path).unwrap().len(), length);
    // Few enough have room beside them.
    let few = [
        "bench",
        path,
        "--op",
        "put",
        "--page-bytes",
        "1MiB",
        "--pages",
        "8",
    ];
    assert_eq!(json(&few)["evicted_pages"], 0);
    let forced = json(&[&put[..], &["--force"]].concat());
    let left = json(&["inspect", path])["pages"].as_u64().unwrap();
    assert_eq!(
        forced["evicted_pages"].as_u64().unwrap(),
        there + 208 - left
    );
    assert!(left < there);
}

//! Quotas on the command line, in documents and metrics.

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use larder_engine::format::quotas_offsets;

use super::metrics::{serve, serve_with};
use super::operator::{PAGE_BYTES, namespace, put};
use super::support::chain;
use super::*;

#[test]
fn quotas_are_set_listed_and_removed_beside_servers_and_without_them() {
    let directory = directory();
    let path = store_in(&directory);
    let at = text(&path);
    says(&["quota", at], 0, &["no quotas"]);
    let set = json(&[
        "quota", at, "--model", "tiny", "--min", "1MiB", "--max", "8MiB",
    ]);
    let group = &set["groups"][0];
    assert_eq!(
        (
            &group["kind"],
            &group["name"],
            &group["min_bytes"],
            &group["max_bytes"]
        ),
        (
            &"model".into(),
            &"tiny".into(),
            &(1 << 20).into(),
            &(8 << 20).into()
        )
    );
    let owner = serve(at);
    let server = Store::attach(&path, OpenOptions::default()).unwrap();
    put(&server, &namespace("tiny", "w1"), 1, 4);
    says(
        &["quota", at],
        0,
        &["model tiny", "1 MiB", "8 MiB", "1 namespace"],
    );
    json(&["quota", at, "--tenant", "t", "--max", "1MiB"]);
    let told = json(&["stat", at]);
    let groups = told["quotas"]["groups"].as_array().unwrap();
    assert_eq!(groups.len(), 2);
    assert_eq!(groups[0]["stored_bytes"], 4 * PAGE_BYTES);
    let metrics = larder(&["stat", at, "--openmetrics"])
        .output()
        .unwrap()
        .stdout;
    let metrics = String::from_utf8(metrics).unwrap();
    assert!(
        metrics.contains("larder_quota_max_bytes{group=\"tenant t\"} 1048576"),
        "{metrics}"
    );
    // Refused, or without sense.
    fails(
        &["quota", at, "--model", "large", "--min", "1TiB"],
        2,
        &["half of the usable room"],
    );
    fails(
        &["quota", at, "--model", "none", "--remove"],
        2,
        &["model none has none"],
    );
    fails(&["quota", at, "--model", "tiny"], 2, &["--min"]);
    fails(&["quota", at, "--min", "1MiB"], 2, &[]);
    fails(
        &["quota", at, "--namespace", "tiny", "--min", "1MiB"],
        2,
        &[],
    );
    let left = json(&["quota", at, "--model", "tiny", "--remove"]);
    assert_eq!(left["groups"].as_array().unwrap().len(), 1);
    server.close().unwrap();
    drop(owner);
    assert_eq!(
        json(&["quota", at, "--clear"])["groups"],
        serde_json::json!([])
    );
}

#[test]
fn quotas_that_cannot_be_read_are_told_and_can_be_set_anew() {
    let directory = directory();
    let path = store_in(&directory);
    let at = text(&path);
    json(&["quota", at, "--model", "tiny", "--min", "1MiB"]);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    for offset in quotas_offsets(file.metadata().unwrap().len()) {
        file.write_all_at(&[1; 4096], offset).unwrap();
    }
    assert!(doctor(&[at]).contains("the quotas cannot be read"));
    let owner = serve(at);
    says(&["stat", at], 0, &["the quotas cannot be read"]);
    assert!(doctor(&[at]).contains("the quotas cannot be read"));
    says(&["stat", at, "--check"], 1, &["the quotas cannot be read"]);
    says(&["quota", at], 1, &["the quotas cannot be read"]);
    fails(
        &["quota", at, "--model", "tiny", "--min", "2MiB"],
        2,
        &["--clear"],
    );
    says(&["quota", at, "--clear"], 0, &["no quotas"]);
    json(&["quota", at, "--model", "tiny", "--min", "2MiB"]);
    says(&["stat", at, "--check"], 0, &["serving"]);
    drop(owner);
}

#[test]
fn a_limit_of_lifetimes_is_set_told_and_followed_in_use_and_closed() {
    let directory = directory();
    let path = store_in(&directory);
    let at = text(&path);
    let set = json(&["quota", at, "--model", "tiny", "--max-age", "30d"]);
    assert_eq!(set["groups"][0]["max_age_s"], 30 * 86_400);
    assert_eq!(set["removes_old_pages"], false);
    says(&["quota", at], 0, &["for 30 d after the put"]);
    fails(
        &["quota", at, "--model", "tiny", "--max-age", "0s"],
        2,
        &["above zero"],
    );
    let owner = serve(at);
    let server = Store::attach(&path, OpenOptions::default()).unwrap();
    put(&server, &namespace("tiny", "w1"), 1, 4);
    let metrics = larder(&["stat", at, "--openmetrics"])
        .output()
        .unwrap()
        .stdout;
    let metrics = String::from_utf8(metrics).unwrap();
    for line in [
        "larder_quota_max_age_seconds{group=\"model tiny\"} 2592000",
        "larder_removes_old_pages 0",
        "larder_expired_pages_total 0",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    says(
        &["stat", at],
        0,
        &["30 d after", "not served", "time service"],
    );
    assert!(doctor(&[at]).contains("time service"));
    json(&["quota", at, "--model", "tiny", "--max-age", "1s"]);
    let id = server.namespace(&namespace("tiny", "w1")).unwrap();
    let keys = chain(1, 4);
    let until = Instant::now() + Duration::from_secs(60);
    while server.longest_prefix(id, &keys) > 0 {
        assert!(Instant::now() < until, "the pages do not expire");
    }
    server.close().unwrap();
    drop(owner);
}

#[test]
fn an_owner_sets_the_quotas_of_its_command_line() {
    let directory = directory();
    let path = store_in(&directory);
    let at = text(&path);
    json(&["quota", at, "--model", "large", "--max", "1MiB"]);
    json(&["quota", at, "--model", "tiny", "--max", "1MiB"]);
    let quotas = ["model=tiny,min=2MiB", "tenant=t,max=4MiB,max-age=12h"];
    let owner = serve_with(at, &["--quota", quotas[0], "--quota", quotas[1]]);
    let found = json(&["quota", at])["groups"].clone();
    let found = found.as_array().unwrap().iter().map(|group| {
        let of = |key: &str| group[key].to_string();
        [
            of("name"),
            of("min_bytes"),
            of("max_bytes"),
            of("max_age_s"),
        ]
        .join(" ")
    });
    let found: Vec<String> = found.collect();
    let expected = [
        "\"large\" 0 1048576 null",
        "\"tiny\" 2097152 null null",
        "\"t\" 0 4194304 43200",
    ];
    assert_eq!(found, expected);
    drop(owner);
    fails(&["serve", at, "--quota", "tiny"], 2, &["is not a quota"]);
    let huge = ["serve", at, "--quota", "model=tiny,min=1TiB"];
    fails(&huge, 2, &["half of the usable room"]);
}

/// Lost quotas are never taken for none, whatever the volume has in their place.
#[test]
fn quotas_that_were_lost_are_damage_until_they_are_removed() {
    let directory = directory();
    let (path, key) = (store_in(&directory), directory.path().join("key"));
    json(&["key", "make", text(&key)]);
    let sealed = directory.path().join("sealed");
    json(&[
        "create",
        text(&sealed),
        "--size",
        "128MiB",
        "--key-file",
        text(&key),
    ]);
    let with_key = ["--key-file", text(&key)];
    for (path, with) in [(&path, &[][..]), (&sealed, &with_key)] {
        let at = text(path);
        let run = |words: &[&'static str], code| {
            let (command, options) = words.split_first().unwrap();
            report(&[&[command, at][..], options, with].concat(), code)
        };
        let set = ["quota", "--tenant", "t", "--max", "1MiB"];
        let offsets = quotas_offsets(std::fs::metadata(path).unwrap().len());
        let lose = |byte: u8, copies: &[u64]| {
            for offset in copies {
                support::overwrite(path, *offset, &[byte; 48 << 10]);
            }
        };
        assert_eq!(run(&["verify"], 0)["damage"], serde_json::json!([]));
        for byte in [0, 0xee] {
            // One copy of three: an open for writing, or a repair, writes it anew.
            run(&set, 0);
            lose(byte, &offsets[1..2]);
            let found = run(&["verify"], 1);
            assert_eq!(found["damage"][0]["kind"], "quotas", "{found}");
            assert_eq!(run(&["verify", "--repair"], 0)["repair"]["quotas"], 1);
            assert_eq!(run(&["quota"], 0)["groups"][0]["name"], "t");
            // All copies.
            lose(byte, &offsets);
            let found = run(&["verify"], 1);
            assert_eq!(found["damage"].as_array().unwrap().len(), 3, "{found}");
            // Without the key, too.
            report(&["verify", at], 1);
            let kept = run(&["verify", "--repair"], 1);
            assert_eq!(kept["repair"]["remaining_damage"][0]["kind"], "quotas");
            assert!(run(&["quota"], 1)["fault"].is_string());
            fails(
                &[&["quota", at][..], &set[1..], with].concat(),
                2,
                &["--clear"],
            );
            run(&["quota", "--clear"], 0);
            run(&set, 0);
            assert_eq!(run(&["verify"], 0)["damaged"], false);
        }
        // Copies of former quotas.
        let copies: Vec<Vec<u8>> = offsets
            .iter()
            .map(|offset| {
                let mut copy = vec![0; 48 << 10];
                let file = std::fs::File::open(path).unwrap();
                file.read_exact_at(&mut copy, *offset).unwrap();
                copy
            })
            .collect();
        run(&["quota", "--tenant", "t", "--max", "2MiB"], 0);
        for (offset, copy) in offsets.iter().zip(&copies) {
            support::overwrite(path, *offset, copy);
        }
        assert_eq!(run(&["verify"], 1)["damage"][0]["kind"], "quotas");
        assert!(run(&["quota"], 1)["fault"].is_string());
    }
}

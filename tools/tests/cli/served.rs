//! A served store: its directory stands for it, and its settings are shown.

use std::fs;
use std::io::IoSliceMut;
use std::time::{Duration, Instant};

use larder_engine::{GetPage, GetStatus, NamespaceId};
use larder_format::{Namespace, NamespaceFields, PageKey, PageShape, Rank};

use super::metrics::serve;
use super::*;

const PATIENCE: Duration = Duration::from_secs(60);

pub fn namespace() -> Namespace {
    let fields = NamespaceFields {
        model: "tiny".to_owned(),
        weights: "w1".to_owned(),
        dtype: "bf16".to_owned(),
        layout: "page_first_direct".to_owned(),
        page_tokens: 64,
        shape: PageShape::new(&[64 << 10]).unwrap(),
        tp: Rank::ALONE,
        pp: Rank::ALONE,
        cp: Rank::ALONE,
        pool: "kv".to_owned(),
        extra: std::collections::BTreeMap::new(),
    };
    Namespace::new(fields).unwrap()
}

/// A store under the name that a backend gives it, and its owner with settings of its own.
fn served(directory: &TempDir) -> (Process, String) {
    served_with(
        directory,
        &["--sync", "always", "--lease", "7s", "--prewrite"],
    )
}

fn served_with(directory: &TempDir, settings: &[&str]) -> (Process, String) {
    let path = directory.path().join("larder.store");
    json(&["create", text(&path), "--size", STORE_SIZE]);
    let mut owner = larder(&[&["serve", text(directory.path())][..], settings].concat())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = String::new();
    let told = owner.stdout.take().unwrap();
    BufReader::new(told).read_line(&mut first).unwrap();
    (Process(owner), first)
}

#[test]
fn the_directory_of_a_backend_stands_for_the_store_in_it() {
    let directory = directory();
    let path = directory.path().join("larder.store");
    let at = text(directory.path());
    let (owner, first) = served(&directory);
    assert!(first.contains("larder.store.sock"), "{first}");
    for arguments in [&["stat", at][..], &["inspect", at]] {
        assert_eq!(json(arguments)["path"], text(&path), "{arguments:?}");
    }
    drop(owner);
    for arguments in [&["verify", at][..], &["compact", at, "--dry-run"]] {
        assert_eq!(json(arguments)["path"], text(&path), "{arguments:?}");
    }
    let grow = ["create", at, "--size", "512MiB", "--grow"];
    assert_eq!(json(&grow)["path"], text(&path));
    let said = doctor(&[at]);
    assert!(
        said.contains(&format!("the store is {}", text(&path))),
        "{said}"
    );
}

#[test]
fn the_settings_of_the_owner_are_shown_and_a_client_with_others_warns_once() {
    let directory = directory();
    let at = text(directory.path());
    let (_owner, _) = served(&directory);
    let told = json(&["stat", at]);
    assert_eq!(told["sync"], "always");
    assert_eq!(told["lease_seconds"], 7.0);
    assert_eq!(told["prewrite"], true);
    let small = "lru: the store has fewer than 160 segments";
    assert_eq!(told["eviction"], small);
    says(&["stat", at], 0, &[small]);
    says(&["stat", at], 0, &["sync always, lease 7 s, prewrite true"]);
    let said = doctor(&[at]);
    assert!(
        said.contains("sync always, lease 7s, prewrite true") && said.contains(small),
        "{said}"
    );
    let pages = ["--page-bytes", "64KiB", "--pages", "256", "--batch", "16"];
    let put = [&["bench", at, "--op", "put", "--shared"][..], &pages].concat();
    let warnings = |more: &[&str]| {
        let output = ends(&[&put[..], more].concat(), 0);
        stderr(&output).matches("the owner's settings hold").count()
    };
    assert_eq!(warnings(&[]), 1);
    let same = ["--sync", "always", "--lease", "7s", "--prewrite"];
    assert_eq!(warnings(&same), 0);
}

#[test]
fn the_pages_that_the_codec_made_smaller_are_shown() {
    let directory = directory();
    let (at, content) = (text(directory.path()), directory.path().join("kv"));
    let (_owner, _) = served_with(&directory, &["--codec", "bf16"]);
    let put = [
        "bench",
        at,
        "--op",
        "put",
        "--shared",
        "--page-bytes",
        "64KiB",
    ];
    let put = [&put[..], &["--pages", "64"]].concat();
    ends(&put, 0);
    let said = doctor(&[at]);
    assert!(said.contains("no page that was put got smaller"), "{said}");
    // Values in bf16 from 1 to 2.
    let values =
        (0..1_u32 << 20).flat_map(|at| [at.wrapping_mul(0x9e37_79b9) as u8 >> 1 | 0x80, 0x3f]);
    fs::write(&content, Vec::from_iter(values)).unwrap();
    ends(&[&put[..], &["--content", text(&content)]].concat(), 0);
    let said = doctor(&[at]);
    assert!(
        said.contains("1.23 plain bytes for each stored byte"),
        "{said}"
    );
}

#[test]
fn refused_pages_are_explained_once() {
    let directory = directory();
    let at = |name: &str| text(&directory.path().join(name)).to_owned();
    let (large, archive) = (at("large"), at("archive"));
    let segments = ["--size", "256MiB", "--segment-size", "32MiB"];
    ends(&[&["create", &large][..], &segments].concat(), 0);
    let two = ["--page-bytes", "20MiB", "--pages", "2", "--batch", "1"];
    ends(&[&["bench", &large, "--op", "put"][..], &two].concat(), 0);
    ends(&["export", &large, &archive], 0);
    let small = store_in(&directory);
    let said = stderr(&ends(&["import", text(&small), &archive], 1));
    let explained = said.matches("none of this size can ever be stored").count();
    assert_eq!(explained, 1, "{said}");
}

/// Keys of pages that were never stored.
pub fn absent_keys(count: u8) -> Vec<PageKey> {
    (0..count)
        .map(|key| PageKey::from_bytes([key; 32]))
        .collect()
}

/// Reads pages of 64 KiB.
pub fn read(
    store: &Store,
    id: NamespaceId,
    keys: &[PageKey],
    deadline: Option<Instant>,
) -> Vec<GetStatus> {
    let mut memory = vec![vec![0; 64 << 10]; keys.len()];
    let mut parts: Vec<_> = memory
        .iter_mut()
        .map(|page| [IoSliceMut::new(page)])
        .collect();
    let pages = keys.iter().zip(&mut parts);
    let mut pages: Vec<_> = pages
        .map(|(key, parts)| GetPage { key: *key, parts })
        .collect();
    store.get(id, &mut pages, deadline)
}

#[test]
fn the_table_of_processes_has_clients_at_work_and_those_that_have_ended() {
    let directory = directory();
    let at = text(directory.path());
    let (_owner, _) = served(&directory);
    let pages = ["--page-bytes", "64KiB", "--pages", "64", "--batch", "16"];
    for op in ["put", "get"] {
        ends(
            &[&["bench", at, "--op", op, "--shared"][..], &pages].concat(),
            0,
        );
    }
    // This process is a client at work.
    let path = directory.path().join("larder.store");
    let store = Store::attach(&path, OpenOptions::default()).unwrap();
    let namespace = store.namespace(&namespace()).unwrap();
    let statuses = read(&store, namespace, &absent_keys(7), None);
    assert!(statuses.iter().all(|status| !status.is_hit()));

    let own = u64::from(std::process::id());
    let until = Instant::now() + PATIENCE;
    let told = loop {
        let told = json(&["stat", at]);
        let arrived = told["processes"][1]["pages_missed"] == 7 && told["departed"]["clients"] == 2;
        if arrived {
            break told;
        }
        assert!(Instant::now() < until, "{told}");
    };
    let rows = told["processes"].as_array().unwrap();
    assert_eq!(rows.len(), 2, "{told}");
    let [owner, client] = [&rows[0], &rows[1]];
    assert_eq!(
        (&owner["client"], &owner["name"]),
        (&Value::Null, &Value::from("larder"))
    );
    assert_eq!(owner["pid"], told["pid"]);
    assert_eq!(client["pid"], own);
    assert_eq!(client["counts"]["misses"]["absent"], 7);
    assert_eq!(client["hit_rate"], 0.0);
    // A bench of gets stores its pages first, and warms up.
    let ended = &told["departed"]["counts"];
    assert!(ended["pages_hit"].as_u64().unwrap() >= 64, "{ended}");
    assert!(ended["bytes_put"].as_u64().unwrap() >= 64 * 65536);
    assert_eq!(told["total"]["counts"]["pages_hit"], ended["pages_hit"]);
    assert_eq!(told["total"]["pages_missed"], 7);

    let lines = String::from_utf8(ends(&["stat", at], 0).stdout).unwrap();
    for word in ["ended (2)", "larder (owner)", "total", "absent"] {
        assert!(lines.contains(word), "{lines}");
    }
    assert!(lines.contains(&format!("  {own}  ")), "{lines}");
    assert!(!lines.contains("read error"), "a column of zeros: {lines}");

    let mut watch = larder(&["stat", at, "--watch", "0.01", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let told = watch.stdout.take().unwrap();
    let mut documents = serde_json::Deserializer::from_reader(told).into_iter::<Value>();
    let first = documents.next().unwrap().unwrap();
    let second = documents.next().unwrap().unwrap();
    let _watch = Process(watch);
    let seconds = |of: &Value| of["total"]["rates"]["interval_seconds"].as_f64().unwrap();
    assert!(seconds(&first) > seconds(&second));
    assert_eq!(
        second["processes"][1]["rates"]["pages_missed_per_second"],
        0.0
    );
    store.close().unwrap();
}

#[test]
fn a_watch_goes_on_under_the_next_owner() {
    let directory = directory();
    let path = store_in(&directory);
    let at = text(&path);
    let owner = serve(at);
    let mut watch = larder(&["stat", at, "--watch", "0.02", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut lines = lines.map(Result::unwrap);
    let complaints = BufReader::new(watch.stderr.take().unwrap()).lines();
    let mut complaints = complaints.map(Result::unwrap);
    let _watch = Process(watch);
    let mut shows = |owner: &Process| {
        let pid = format!("  \"pid\": {},", owner.0.id());
        assert!(lines.any(|line| line == pid), "{pid}");
    };
    shows(&owner);
    drop(owner);
    let complaint = complaints.next().unwrap();
    assert!(complaint.contains("larder: "), "{complaint}");
    shows(&serve(at));
}

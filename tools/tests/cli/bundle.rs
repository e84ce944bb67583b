//! `doctor --bundle`: the facts in the archive, and no secret in it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IoSlice;

use larder_engine::{AlignedBuf, PutOptions, PutPage, PutStatus};
use larder_format::{Namespace, NamespaceFields, PageKey, PageShape, Rank};

use super::*;

const PAGE: &[u8] = b"bytes-of-a-page";
const PAGE_BYTES: usize = 64 << 10;

const MODEL: &str = "/srv/models/acme large";
const WEIGHTS: &str = "rev-77c1";
const SALT: &str = "s4lt-of-acme";
const TENANT: &str = "tenant nine";
const TOKEN: &str = "planted-credential-1";

/// A store with one page of a namespace with names to hide.
fn store_of_a_customer(directory: &TempDir) -> PathBuf {
    let path = store_in(directory);
    let store = Store::open(&path, OpenOptions::default()).unwrap();
    let extra = [("cache_salt", SALT), ("tenant", TENANT)];
    let namespace = Namespace::new(NamespaceFields {
        model: MODEL.to_owned(),
        weights: WEIGHTS.to_owned(),
        dtype: "bf16".to_owned(),
        layout: "page_first_direct".to_owned(),
        page_tokens: 64,
        shape: PageShape::new(&[u32::try_from(PAGE_BYTES).unwrap()]).unwrap(),
        tp: Rank::ALONE,
        pp: Rank::ALONE,
        cp: Rank::ALONE,
        pool: "kv".to_owned(),
        extra: extra
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
    });
    let namespace = store.namespace(&namespace.unwrap()).unwrap();
    let mut memory = AlignedBuf::zeroed(PAGE_BYTES).unwrap();
    memory[..PAGE.len()].copy_from_slice(PAGE);
    let page = PutPage {
        key: PageKey::from_bytes([7; 32]),
        parent: None,
        depth: 0,
        parts: &[IoSlice::new(&memory)],
    };
    let put = store.put(namespace, &[page], PutOptions::default());
    assert_eq!(put, [PutStatus::Stored]);
    store.close().unwrap();
    path
}

/// A log as servers write it: each line has text that must not be in the archive.
fn log_lines(host: &str) -> Vec<(String, Vec<&str>)> {
    let line = |text: &str, secrets: &[&'static str]| (text.to_owned(), secrets.to_vec());
    let mut lines = vec![
        line(
            "WARN larder: model /srv/models/acme large is registered",
            &["acme large"],
        ),
        line(
            "INFO sglang: --model-path other/name-7b --api-key qwertz",
            &["name-7b", "qwertz"],
        ),
        line(
            "INFO lmcache: cache_salt=p3pper tenant_id: 'cust-12'",
            &["p3pper", "cust-12"],
        ),
        line(
            "INFO s3://id:pass@bucket.example/acme-checkpoints/x",
            &["pass@", "checkpoints"],
        ),
        line(
            "INFO Authorization: Bearer abcdef0123456789",
            &["abcdef0123456789"],
        ),
        line(
            "INFO using hf_aaaabbbbccccdddd and AKIAIOSFODNN7EXAMPLE",
            &["ccccdddd", "FODNN7"],
        ),
        line("INFO {\"password\": \"hunter 2\", \"n\": 1}", &["hunter"]),
        line(
            "INFO loaded /opt/customers/umbrella/weights.bin",
            &["umbrella"],
        ),
        line(
            "INFO peer 10.11.12.13 is gpu7.umbrella.internal",
            &["10.11.12.13", "gpu7"],
        ),
        line(
            "WARN larder_store::share: took over at 12:34:56, 7 pages",
            &[],
        ),
    ];
    lines.push((format!("INFO this is {host}, env has {TOKEN}"), Vec::new()));
    lines
}

/// The files of an archive by name.
fn unpacked(archive: &Path) -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    let file = std::fs::File::open(archive).unwrap();
    for entry in tar::Archive::new(file).entries().unwrap() {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().to_str().unwrap().to_owned();
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        files.insert(name, text);
    }
    files
}

/// Makes the archive of a store, with a credential in the environment.
fn bundle(store: &Path, archive: &Path, log: &Path) -> Value {
    let output = larder(&["doctor", text(store), "--json"])
        .args(["--bundle", text(archive), "--log", text(log)])
        .env("SOME_SERVICE_TOKEN", TOKEN)
        .env("LARDER_LOG", "warn")
        .output()
        .unwrap();
    assert_eq!(stderr(&output), "");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn the_archive_has_the_facts_and_none_of_the_secrets_that_are_planted() {
    let directory = directory();
    let path = store_of_a_customer(&directory);
    let host = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    let (archive, log) = (directory.path().join("f.tar"), directory.path().join("log"));
    let lines = log_lines(&host);
    let all: String = lines.iter().map(|(line, _)| format!("{line}\n")).collect();
    std::fs::write(&log, all).unwrap();
    let found = bundle(&path, &archive, &log);
    assert_eq!(found["bundle"], text(&archive));

    let bytes = std::fs::read(&archive).unwrap();
    let has = |wanted: &str| {
        bytes
            .windows(wanted.len())
            .any(|some| some == wanted.as_bytes())
    };
    let planted = [
        MODEL,
        WEIGHTS,
        SALT,
        TENANT,
        TOKEN,
        "acme large",
        text(directory.path()),
    ];
    let in_lines = lines.iter().flat_map(|(_, secrets)| secrets);
    for secret in planted.iter().chain(in_lines) {
        assert!(!has(secret), "{secret}");
    }
    assert!(!has(std::str::from_utf8(PAGE).unwrap()), "page data");
    assert!(!has(&"07".repeat(12)), "a page key");

    let files = unpacked(&archive);
    let names: BTreeSet<&str> = files.keys().map(String::as_str).collect();
    let expected = [
        "README.txt",
        "configuration.json",
        "doctor.json",
        "log.txt",
        "stat.json",
        "versions.json",
    ];
    assert_eq!(
        names,
        expected
            .map(|name| format!("larder/{name}"))
            .iter()
            .map(String::as_str)
            .collect()
    );
    let document = |name: &str| -> Value {
        serde_json::from_str(&files[&format!("larder/{name}.json")]).unwrap()
    };
    assert_eq!(document("versions")["release"], env!("CARGO_PKG_VERSION"));
    let configuration = document("configuration");
    assert_eq!(configuration["environment"]["LARDER_LOG"], "warn");
    let namespace = &configuration["store"]["namespaces"][0];
    assert_eq!(
        (&namespace["pages"], &namespace["fields"]["page_tokens"]),
        (&1.into(), &64.into())
    );
    assert_eq!(document("doctor")["command"], "doctor");
    // The store has no owner.
    assert!(
        document("stat")["reason"]
            .as_str()
            .unwrap()
            .contains("no process"),
        "{:?}",
        document("stat")
    );
    let log = &files["larder/log.txt"];
    assert_eq!(log.lines().count(), lines.len());
    assert!(log.contains("took over at 12:34:56, 7 pages"), "{log}");
    // The name of this machine as a word: a short one may be part of others.
    let words = log.split(|c: char| !c.is_alphanumeric() && c != '-' && c != '.');
    assert!(!words.into_iter().any(|word| word == host), "{log}");
}

#[test]
fn an_archive_replaces_no_file_and_a_log_needs_an_archive() {
    let directory = directory();
    let (archive, log) = (directory.path().join("f.tar"), directory.path().join("log"));
    let at = text(directory.path());
    std::fs::write(&archive, "another").unwrap();
    fails(
        &["doctor", at, "--bundle", text(&archive)],
        3,
        &["f.tar", "choose another name"],
    );
    assert_eq!(std::fs::read(&archive).unwrap(), b"another");
    fails(&["doctor", at, "--log", text(&log)], 2, &["--bundle"]);
    let fresh = directory.path().join("g.tar");
    let with_log = ["doctor", at, "--bundle", text(&fresh), "--log", text(&log)];
    fails(&with_log, 3, &["check --log"]);
    assert!(!fresh.exists());
}

#[test]
fn the_archive_has_no_names_of_quotas() {
    let directory = directory();
    let path = store_in(&directory);
    let at = text(&path);
    json(&["quota", at, "--tenant", "t9", "--max-age", "7d"]);
    json(&["quota", at, "--model", "acme small", "--max", "1MiB"]);
    let owner = metrics::serve(at);
    let (archive, log) = (directory.path().join("f.tar"), directory.path().join("log"));
    std::fs::write(&log, "WARN larder: model acme small is told\n").unwrap();
    bundle(&path, &archive, &log);
    drop(owner);
    let files = unpacked(&archive);
    let stat = &files["larder/stat.json"];
    assert!(
        stat.contains("[tenant]") && stat.contains("[model]"),
        "{stat}"
    );
    for (name, file) in &files {
        assert!(
            !file.contains("\"t9\"") && !file.contains("acme small"),
            "{name}: {file}"
        );
    }
}

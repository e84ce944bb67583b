//! Pins on the command line, in documents and metrics.

use larder_engine::format::{PageKey, TokenUnits, page_keys};

use super::metrics::serve;
use super::operator::{PAGE_BYTES, namespace, put_keys};
use super::*;

#[test]
fn pages_are_pinned_listed_and_unpinned_beside_servers_and_without_them() {
    let directory = directory();
    let path = store_in(&directory);
    let at = text(&path);
    let file = directory.path().join("prompt.json");
    let tokens: Vec<u64> = (0..200).collect();
    std::fs::write(&file, format!("{tokens:?}")).unwrap();
    let keys = page_keys(&tokens, 64.try_into().unwrap(), None, TokenUnits::Single);
    let prompt = text(&file);
    says(&["pin", at], 0, &["0 pages"]);
    let owner = serve(at);
    let server = Store::attach(&path, OpenOptions::default()).unwrap();
    put_keys(&server, &namespace("tiny", "w1"), &keys);
    let done = json(&["pin", at, "--tokens", prompt, "--until", "30d"]);
    assert_eq!(done["changed_pages"], 3);
    let list = json(&["pin", at, "--model", "tiny"]);
    let pins = list["pins"].as_array().unwrap();
    assert_eq!(pins.len(), 3);
    assert_eq!(pins[0]["bytes"], PAGE_BYTES);
    assert_eq!(json(&["stat", at])["pinned_pages"], 3);
    let metrics = larder(&["stat", at, "--openmetrics"]).output().unwrap();
    let metrics = String::from_utf8(metrics.stdout).unwrap();
    assert!(metrics.contains("larder_pinned_pages 3"), "{metrics}");
    server.close().unwrap();
    drop(owner);
    // The store is closed.
    let key = keys[0].to_string();
    let unpinned = json(&["unpin", at, "--key", &key]);
    assert_eq!(unpinned["changed_pages"], 1);
    says(&["pin", at], 0, &["tiny", "2 pages", "until 2"]);
    fails(&["unpin", at, "--key", &key], 1, &[]);
    let absent = PageKey::from_bytes([7; 32]).to_string();
    fails(&["pin", at, "--key", &absent, "--until", "1h"], 1, &[]);
    // Without sense.
    fails(&["pin", at, "--key", &key], 2, &["--until"]);
    fails(&["pin", at, "--until", "1h"], 2, &[]);
    fails(&["unpin", at], 2, &["--key"]);
    fails(&["pin", at, "--key", &key, "--until", "soon"], 2, &["soon"]);
    fails(&["pin", at, "--key", "12", "--until", "1h"], 2, &[]);
    std::fs::write(&file, "one two").unwrap();
    fails(
        &["pin", at, "--tokens", prompt, "--until", "1h"],
        2,
        &["whole numbers"],
    );
}

//! Replays of traces over encrypted stores.

use std::fs;

use super::Place;
use crate::support::fails;

/// A replay has no option for a key.
#[test]
fn a_replay_refuses_an_encrypted_store_with_advice_that_applies() {
    let place = Place::new();
    let key = place.key("key");
    let store = place.store("store", Some(&key));
    let trace = place.at("trace");
    fs::write(
        &trace,
        "{\"timestamp\":0,\"input_length\":512,\"output_length\":1,\"hash_ids\":[1]}\n",
    )
    .unwrap();
    let replay = [
        "replay",
        "store",
        &trace,
        "--store",
        &store,
        "--capacity",
        "16MiB",
        "--page-bytes",
        "16KiB",
    ];
    let said = fails(&replay, 3, &["is encrypted", "--store"]);
    assert!(!said.contains("--key-file"), "{said}");
}

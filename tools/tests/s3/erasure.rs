//! `larder erase --remote` of a bucket.

use serde_json::{Value, json};

use super::faults::Answer;
use super::home::{EVEN, put};
use super::server::Identity;
use super::support::{chain, directory, larder, report, text};
use super::{RUN, of_faults, with_runs};

/// The keys are erased then, which the document says.
#[test]
fn an_erasure_whose_remote_fails_is_finished_by_the_next_one() {
    let (server, source) = with_runs();
    source.with(|store| put(store, EVEN, &chain(3, 8)));
    let push = ["push", text(&source.path)];
    assert_eq!(of_faults(&server, &push, &RUN).0, 0);
    let home = directory();
    let (store, key) = (home.path().join("store"), home.path().join("key"));
    report(&["key", "make", text(&key)], 0);
    let key = ["--key-file", text(&key)];
    let create = ["create", text(&store), "--size", "128MiB"];
    report(&[&create[..], &key].concat(), 0);
    let erase = || {
        let remote = ["--remote", "s3://b", "--remote-unsigned", "--json"];
        let endpoint = ["--remote-endpoint", &server.endpoint];
        let tenant = ["erase", text(&store), "--tenant", ""];
        let mut command = larder(&[&tenant[..], &key, &remote, &endpoint].concat());
        let output = command.envs(Identity::Writer.variables()).output().unwrap();
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        (output.status.code().unwrap(), document)
    };
    server.at(
        "DELETE",
        ".run",
        Answer::Status("500 Internal Server Error"),
    );
    let (code, refused) = erase();
    assert_eq!(
        (code, &refused["removed_runs"]),
        (1, &json!(0)),
        "{refused}"
    );
    assert_eq!(refused["erased_keys"].as_array().unwrap().len(), 1);
    assert!(refused["problem"].is_string(), "{refused}");
    server.heal();
    let (code, removed) = erase();
    assert_eq!(
        (code, &removed["removed_runs"]),
        (0, &json!(6)),
        "{removed}"
    );
    assert_eq!(removed["problem"], Value::Null);
    assert!(server.runs().is_empty());
}

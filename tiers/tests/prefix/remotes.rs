//! Remotes beneath the store of a prefix cache: pages of another node.

use std::path::Path;
use std::time::Instant;

use larder_remote::l4::L4Config;
use larder_tiers::{PrefixCache, PrefixOptions};

use super::engine::{PAGE, WORDS};
use super::{PATIENCE, serve, toy};

/// Pages of a run.
const RUN: usize = 4;

const RUNS: usize = 5;

/// A node with a store of its own.
fn node(directory: &Path, name: &str) -> PrefixCache {
    let url = format!("file://{}", directory.join("shared").display());
    let options = PrefixOptions::new(&toy().model(), 60, 60).with(|o| {
        o.l4 = L4Config {
            urls: vec![url],
            is_unsigned: true,
            is_through: true,
            run_tokens: (RUN * PAGE) as u32,
            // A loaded machine measures a low speed.
            patience: PATIENCE,
            ..L4Config::default()
        };
    });
    options.open(&directory.join(name), 128 << 20).unwrap()
}

fn objects(directory: &Path) -> usize {
    let entries = std::fs::read_dir(directory).into_iter().flatten();
    let count = |path: &Path| match path.is_dir() {
        true => objects(path),
        false => usize::from(path.extension().is_some_and(|kind| kind == "run")),
    };
    entries.map(|entry| count(&entry.unwrap().path())).sum()
}

#[track_caller]
fn eventually(is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
}

#[test]
fn a_node_that_never_saw_a_prompt_has_its_pages_and_keeps_them() {
    let directory = tempfile::tempdir().unwrap();
    let (home, shared) = (directory.path(), directory.path().join("shared"));
    std::fs::create_dir_all(shared.join("v1")).unwrap();
    let tokens = 0..(RUNS * RUN * PAGE + 3) as u64;
    let prompt: Vec<u64> = tokens.map(|token| token * token % WORDS).collect();
    let first = node(home, "first");
    serve(&first, &toy(), &prompt);
    eventually(|| objects(&shared) == RUNS);
    first.close().unwrap();

    let second = node(home, "second");
    // Its listing, and fetches that take longer than a prefetch on a busy machine.
    eventually(|| {
        let sequence = second.begin(&prompt).unwrap();
        sequence.cached().tokens() == RUNS * RUN * PAGE
    });
    let cached = serve(&second, &toy(), &prompt);
    assert_eq!(cached.tokens(), RUNS * RUN * PAGE);
    second.close().unwrap();

    std::fs::remove_dir_all(&shared).unwrap();
    let again = node(home, "second");
    assert_eq!(serve(&again, &toy(), &prompt).l3, RUNS * RUN * PAGE);
    again.close().unwrap();
}

#[test]
fn a_remote_without_a_key_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let options = PrefixOptions::new(&toy().model(), 60, 60).with(|o| {
        o.l4.urls = vec!["file:///mnt/pages".to_owned()];
    });
    let refused = options.open(&directory.path().join("store"), 128 << 20);
    let said = refused.err().unwrap().to_string();
    assert!(said.contains("key file"), "{said}");
}

//! The backend over a real store, with pools in the memory of the test.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use larder_engine::{AlignedBuf, StoreError};
use larder_format::PageKey;
use larder_handle::chain::Chain;
use larder_handle::store::OWNER_PATIENCE;

mod slow;

use super::clear::ClearError;
use super::*;
use crate::sglang::pool::{Buffer, Pool};
use crate::sglang::space::PoolFacts;

const PAGE_BYTES: usize = 1 << 20;

/// A pool with one part and one token per page.
struct Memories {
    bytes: AlignedBuf,
}

impl Memories {
    fn new(pages: usize) -> Memories {
        let mut bytes = AlignedBuf::zeroed(pages * PAGE_BYTES).unwrap();
        for (at, page) in bytes.chunks_exact_mut(PAGE_BYTES).enumerate() {
            page.fill(u8::try_from(at % 251).unwrap() + 1);
        }
        Memories { bytes }
    }

    fn pool(&mut self) -> Memory {
        let pages = self.bytes.len() / PAGE_BYTES;
        let buffer = Buffer {
            base: self.bytes.as_mut_ptr().expose_provenance(),
            stride: PAGE_BYTES,
            bytes: PAGE_BYTES,
        };
        Memory::Mapped(Pool::new(vec![buffer], vec![vec![0]], 1, pages).unwrap())
    }
}

fn open(path: &Path, retry: &str) -> Arc<Backend> {
    let json = serde_json::json!({
        "path": path, "size": "144MiB", "prewrite": false, "transfer": "direct",
        "on_error": "miss", "retry": retry
    });
    let config = Config::parse(&json.to_string()).unwrap();
    Backend::open(&config, server()).unwrap().0
}

fn facts(name: &str) -> PoolFacts {
    PoolFacts {
        name: name.to_owned(),
        dtype: "u8".to_owned(),
        layout: "page_first".to_owned(),
        page_tokens: 1,
        sharded: false,
        extra: BTreeMap::new(),
    }
}

fn register(backend: &Arc<Backend>, name: &str, memory: &mut Memories) {
    backend.register(&facts(name), memory.pool()).unwrap();
    backend.make_if_needed();
}

fn backend(path: &Path, memory: &mut Memories) -> Arc<Backend> {
    let backend = open(path, "60m");
    register(&backend, "kv", memory);
    backend
}

fn keys(count: usize, seed: u8) -> Vec<PageKey> {
    let key = |at: usize| *blake3::hash(&[&[seed][..], &at.to_le_bytes()].concat()).as_bytes();
    (0..count).map(|at| PageKey::from_bytes(key(at))).collect()
}

fn count(backend: &Backend, name: &str) -> u64 {
    let mut counts = backend.meters().counts();
    counts.find(|(found, _)| *found == name).unwrap().1
}

/// A store with segments of 16 MiB.
fn small_segments(path: &Path) {
    let options = larder_engine::CreateOptions::new(144 << 20).with(|o| {
        o.segment_size = Some(16 << 20);
    });
    larder_engine::create(&place::volume_of(path), &options).unwrap();
}

fn config_of(path: &Path, on_error: &str, size: &str) -> Config {
    let json = serde_json::json!({
        "path": path, "size": size, "prewrite": false, "on_error": on_error, "retry": "60m"
    });
    Config::parse(&json.to_string()).unwrap()
}

fn server() -> Server {
    Server {
        model: "m".to_owned(),
        weights: "w".to_owned(),
        tp: (0, 1),
        pp: (0, 1),
        cp: (0, 1),
        replicated: false,
        prefetch_limit: None,
    }
}

#[test]
fn a_store_is_created_for_the_largest_page_once_the_pools_are_known() {
    let directory = tempfile::tempdir().unwrap();
    let config = config_of(directory.path(), "fail", "300MiB");
    let (backend, _) = Backend::open(&config, server()).unwrap();
    assert!(!backend.is_made());
    for (name, page_bytes) in [("kv", 3 << 20), ("mamba", 22 << 20)] {
        backend
            .register(&facts(name), Memory::Flat(page_bytes))
            .unwrap();
    }
    assert!(!place::volume_of(directory.path()).exists());
    assert_eq!(backend.make().unwrap(), None);
    assert!(backend.is_made());
    let page = vec![5; 22 << 20];
    let chain = keys(1, 9);
    assert_eq!(
        backend.set_flat("mamba", &chain, &[&page], Some(Chain::default())),
        [true]
    );
    assert_eq!(backend.exists("mamba", &chain, Chain::default(), None), 1);
    assert_eq!(count(&backend, "stored"), 1);
    assert!(backend.close());
}

#[test]
fn a_page_too_large_for_the_store_size_is_an_error_at_start_or_a_warning() {
    for on_error in ["fail", "miss"] {
        let directory = tempfile::tempdir().unwrap();
        let config = config_of(directory.path(), on_error, "200MiB");
        let (backend, _) = Backend::open(&config, server()).unwrap();
        backend
            .register(&facts("kv"), Memory::Flat(90 << 20))
            .unwrap();
        let said = match backend.make() {
            Ok(remark) => remark.unwrap(),
            Err(error) => error.to_string(),
        };
        assert_eq!(
            said.contains("serving without"),
            on_error == "miss",
            "{said}"
        );
        let words = ["`size`", "at least 667942912 bytes"];
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
        assert!(backend.close());
    }
}

#[test]
fn a_store_created_by_another_server_for_smaller_pages_is_refused() {
    for on_error in ["fail", "miss"] {
        let directory = tempfile::tempdir().unwrap();
        let config = config_of(directory.path(), on_error, "144MiB");
        let (backend, _) = Backend::open(&config, server()).unwrap();
        backend
            .register(&facts("kv"), Memory::Flat(17 << 20))
            .unwrap();
        small_segments(directory.path());
        match backend.make() {
            Ok(_) => assert_eq!(on_error, "miss"),
            Err(error) => {
                assert_eq!(on_error, "fail");
                let said = error.to_string();
                assert!(
                    said.contains("pool kv") && said.contains("--page-bytes"),
                    "{said}"
                );
            }
        }
        assert!(backend.close());
    }
}

#[test]
fn pages_that_do_not_fit_an_existing_store_are_an_error_at_start_or_a_warning() {
    let directory = tempfile::tempdir().unwrap();
    small_segments(directory.path());
    for on_error in ["fail", "miss"] {
        let config = config_of(directory.path(), on_error, "144MiB");
        let (backend, _) = Backend::open(&config, server()).unwrap();
        assert!(backend.is_made());
        let registered = backend.register(&facts("kv"), Memory::Flat(17 << 20));
        assert_eq!(registered.is_ok(), on_error == "miss");
        let said = registered.unwrap_or_else(|error| error.to_string());
        let command = format!(
            "larder create {} --size",
            place::volume_of(directory.path()).display()
        );
        assert!(said.contains("none can ever be stored"), "{said}");
        assert!(said.contains(&command), "{said}");
        if on_error == "miss" {
            let page = vec![1; 17 << 20];
            let stored = backend.set_flat("kv", &keys(1, 3), &[&page], Some(Chain::default()));
            assert_eq!(stored, [false]);
            assert_eq!(count(&backend, "failed"), 1);
        }
        let wasteful = backend.register(&facts("swa"), Memory::Flat(9 << 20));
        assert!(wasteful.unwrap().contains("more than half a segment"));
        let good = backend.register(&facts("mamba"), Memory::Flat(2 << 20));
        assert!(!good.unwrap().contains("segment"));
        assert!(backend.close());
    }
}

#[test]
fn pages_after_a_tail_that_was_left_out_are_left_out_too() {
    let directory = tempfile::tempdir().unwrap();
    let mut memory = Memories::new(4);
    let backend = backend(directory.path(), &mut memory);
    let chain = keys(8, 1);
    let after = |page: usize| {
        Some(Chain {
            before: Some(chain[page]),
            depth: u32::try_from(page).unwrap() + 1,
        })
    };
    assert_eq!(
        backend.set("kv", &chain[..2], &[0, 1], Some(Chain::default())),
        [true; 2]
    );
    // As if there had been no room for page 3, the last page of a batch.
    *backend.pool("kv").unwrap().left_out.lock() = Some(chain[3]);
    for at in [4, 6] {
        assert_eq!(
            backend.set("kv", &chain[at..at + 2], &[2, 3], after(at - 1)),
            [true; 2]
        );
    }
    assert_eq!(count(&backend, "dropped"), 4);
    assert_eq!(backend.exists("kv", &chain[4..], Chain::default(), None), 0);
    // A different chain is not affected, and resets the state.
    assert_eq!(
        backend.set("kv", &chain[2..4], &[2, 3], after(1)),
        [true; 2]
    );
    assert_eq!(
        backend.set("kv", &chain[4..6], &[2, 3], after(3)),
        [true; 2]
    );
    assert_eq!(backend.exists("kv", &chain, Chain::default(), None), 6);
    assert_eq!(count(&backend, "dropped"), 4);
    assert!(backend.close());
}

#[test]
fn running_calls_continue_with_the_next_owner() {
    let directory = tempfile::tempdir().unwrap();
    let (mut first, mut second) = (Memories::new(8), Memories::new(8));
    let owner = backend(directory.path(), &mut first);
    let client = backend(directory.path(), &mut second);
    assert_eq!(client.stats().unwrap().1, Part::Client);
    let indices: Vec<i64> = (0..8).collect();
    let chain = keys(8, 1);
    assert_eq!(
        owner.set("kv", &chain, &indices, Some(Chain::default())),
        [true; 8]
    );
    std::thread::scope(|scope| {
        let calls = scope.spawn(|| {
            for round in 2..40 {
                let other = keys(8, round);
                assert_eq!(client.exists("kv", &chain, Chain::default(), None), 8);
                assert_eq!(
                    client.set("kv", &other, &indices, Some(Chain::default())),
                    [true; 8]
                );
                assert_eq!(client.get("kv", &chain, &indices), [true; 8]);
            }
        });
        assert!(owner.close());
        calls.join().unwrap();
    });
    assert_eq!(client.stats().unwrap().1, Part::Owner);
    assert!(second.bytes[7 * PAGE_BYTES..].iter().all(|byte| *byte == 8));
    assert!(client.close());
}

/// Makes the store unavailable for a while.
struct Away {
    store: std::path::PathBuf,
    aside: std::path::PathBuf,
}

impl Away {
    fn take(directory: &Path) -> Away {
        let away = Away {
            store: directory.join("larder.store"),
            aside: directory.join("aside"),
        };
        std::fs::rename(&away.store, &away.aside).unwrap();
        away
    }

    fn bring_back(self) {
        std::fs::rename(&self.aside, &self.store).unwrap();
    }
}

#[test]
fn without_a_next_owner_calls_miss_at_once_and_a_clear_waits() {
    let directory = tempfile::tempdir().unwrap();
    let (mut first, mut second) = (Memories::new(2), Memories::new(2));
    let owner = backend(directory.path(), &mut first);
    let client = backend(directory.path(), &mut second);
    let chain = keys(2, 1);
    let set = || client.set("kv", &chain, &[0, 1], Some(Chain::default()));
    let exists = || client.exists("kv", &chain, Chain::default(), None);
    assert_eq!(set(), [true; 2]);
    let away = Away::take(directory.path());
    assert!(owner.close());
    let begun = Instant::now();
    for _ in 0..40 {
        assert_eq!(exists(), 0);
        assert_eq!(client.get("kv", &chain, &[0, 1]), [false; 2]);
    }
    // One wait for an owner in total, not one per call.
    assert!(begun.elapsed() < 20 * OWNER_PATIENCE);
    std::thread::scope(|scope| {
        let clear = scope.spawn(|| client.clear());
        away.bring_back();
        assert_eq!(clear.join().unwrap().unwrap(), 2);
    });
    assert_eq!(client.stats().unwrap().1, Part::Owner);
    assert_eq!(exists(), 0);
    assert_eq!(set(), [true; 2]);
    assert_eq!(exists(), 2);
    assert!(client.close());
}

#[test]
fn pages_cleared_before_the_store_was_attached_are_not_served() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("stores");
    let chain = keys(2, 1);
    let mut memory = Memories::new(2);
    {
        let before = backend(&path, &mut memory);
        let set = before.set("kv", &chain, &[0, 1], Some(Chain::default()));
        assert_eq!(set, [true; 2]);
        assert!(before.close());
    }
    let aside = directory.path().join("aside");
    std::fs::rename(&path, &aside).unwrap();
    std::fs::write(&path, b"in the way").unwrap();
    let backend = backend(&path, &mut memory);
    assert!(backend.stats().is_none());
    assert!(matches!(backend.clear(), Err(ClearError::NoStore)));
    std::fs::remove_file(&path).unwrap();
    std::fs::rename(&aside, &path).unwrap();
    assert!(backend.try_again());
    assert_eq!(backend.exists("kv", &chain, Chain::default(), None), 0);
    assert_eq!(backend.get("kv", &chain, &[0, 1]), [false; 2]);
    assert_eq!(
        backend.set("kv", &chain, &[0, 1], Some(Chain::default())),
        [true; 2]
    );
    assert_eq!(backend.exists("kv", &chain, Chain::default(), None), 2);
    assert!(backend.close());
}

#[test]
fn a_closed_backend_touches_nothing_and_stays_closed() {
    let directory = tempfile::tempdir().unwrap();
    let mut memory = Memories::new(2);
    let backend = backend(directory.path(), &mut memory);
    let chain = keys(2, 1);
    assert_eq!(
        backend.set("kv", &chain, &[0, 1], Some(Chain::default())),
        [true; 2]
    );
    assert!(backend.close() && backend.close());
    assert_eq!(backend.get("kv", &chain, &[0, 1]), [false; 2]);
    assert_eq!(
        backend.set("kv", &chain, &[0, 1], Some(Chain::default())),
        [false; 2]
    );
    assert_eq!(backend.exists("kv", &chain, Chain::default(), None), 0);
    let cleared = backend.clear();
    assert!(matches!(
        cleared,
        Err(ClearError::Store(StoreError::Closed))
    ));
}

#[test]
fn a_close_waits_for_a_running_call_and_no_other_call_begins() {
    let directory = tempfile::tempdir().unwrap();
    let mut memory = Memories::new(2);
    let backend = backend(directory.path(), &mut memory);
    let chain = keys(2, 1);
    let store = |backend: &Backend| backend.set("kv", &chain, &[0, 1], Some(Chain::default()));
    assert_eq!(store(&backend), [true; 2]);
    let call = backend.place.read();
    let left = backend.leave().unwrap();
    assert_eq!(backend.get("kv", &chain, &[0, 1]), [false; 2]);
    assert_eq!(store(&backend), [false; 2]);
    let cleared = backend.clear();
    assert!(matches!(
        cleared,
        Err(ClearError::Store(StoreError::Closed))
    ));
    assert!(left.try_recv().is_err());
    drop(call);
    left.recv_timeout(Duration::from_secs(60)).unwrap();
    let next = self::backend(directory.path(), &mut memory);
    assert_eq!(next.stats().unwrap().1, Part::Owner);
    assert_eq!(next.get("kv", &chain, &[0, 1]), [true; 2]);
    assert!(next.close());
}

#[test]
fn a_store_that_becomes_available_late_is_used_from_then_on() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    std::fs::write(&path, b"in the way").unwrap();
    let (mut before, mut after) = (Memories::new(2), Memories::new(2));
    let backend = backend(&path, &mut before);
    let chain = keys(2, 1);
    let store = |pool| backend.set(pool, &chain, &[0, 1], Some(Chain::default()));
    assert_eq!(store("kv"), [false; 2]);
    assert!(!backend.try_again());
    assert_eq!(backend.exists("kv", &chain, Chain::default(), None), 0);
    std::fs::remove_file(&path).unwrap();
    assert!(backend.try_again());
    register(&backend, "draft", &mut after);
    for pool in ["kv", "draft"] {
        assert_eq!(store(pool), [true; 2]);
        assert_eq!(backend.exists(pool, &chain, Chain::default(), None), 2);
        assert_eq!(backend.get(pool, &chain, &[0, 1]), [true; 2]);
    }
    assert!(backend.try_again());
    assert!(backend.close());
}

#[test]
fn attempts_to_attach_to_a_store_run_in_the_background() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    std::fs::write(&path, b"in the way").unwrap();
    let backend = open(&path, "1ms");
    assert!(backend.stats().is_none());
    std::fs::remove_file(&path).unwrap();
    let patience = Instant::now() + Duration::from_secs(60);
    while backend.stats().is_none() {
        assert!(Instant::now() < patience, "no attempt was made");
        std::thread::yield_now();
    }
    assert!(backend.close());
}

#[test]
fn no_attempt_to_attach_is_made_after_a_close() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    std::fs::write(&path, b"in the way").unwrap();
    let backend = open(&path, "60m");
    assert!(backend.close());
    std::fs::remove_file(&path).unwrap();
    assert!(backend.try_again());
    assert!(backend.stats().is_none() && !path.exists());
}

//! The backend over a real store, with pools in this test's own memory.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use larder_engine::memory::AlignedBuf;

use super::*;
use crate::place;
use crate::pool::Buffer;

const PAGE_BYTES: usize = 1 << 20;

/// A pool of one part, one token a page.
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

fn config(path: &std::path::Path) -> Config {
    let json = serde_json::json!({"path": path, "size": "144MiB", "transfer": "direct"});
    Config::parse(&json.to_string()).unwrap()
}

fn backend(path: &std::path::Path, memory: &mut Memories) -> Backend {
    let config = config(path);
    let server = Server {
        model: "m".to_owned(),
        weights: "w".to_owned(),
        tp: (0, 1),
        pp: (0, 1),
        cp: (0, 1),
        replicated: false,
    };
    let store = place::attach(&config).unwrap().store;
    let backend = Backend::new(Some(store), server, &config);
    let facts = PoolFacts {
        name: "kv".to_owned(),
        dtype: "u8".to_owned(),
        layout: "page_first".to_owned(),
        page_tokens: 1,
        sharded: false,
        extra: BTreeMap::new(),
    };
    backend.register(&facts, memory.pool()).unwrap();
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

#[test]
fn what_follows_a_tail_that_was_left_out_is_left_out_too() {
    let directory = tempfile::tempdir().unwrap();
    let mut memory = Memories::new(4);
    let backend = backend(directory.path(), &mut memory);
    let chain = keys(8, 1);
    let after = |page: usize| Chain {
        before: Some(chain[page]),
        depth: u32::try_from(page).unwrap() + 1,
    };
    assert_eq!(
        backend.set("kv", &chain[..2], &[0, 1], Chain::default()),
        [true; 2]
    );
    // As when there was no room for page 3, the last one of a batch.
    *backend.pool("kv").unwrap().left_out.lock() = Some(chain[3]);
    for at in [4, 6] {
        assert_eq!(
            backend.set("kv", &chain[at..at + 2], &[2, 3], after(at - 1)),
            [true; 2]
        );
    }
    assert_eq!(count(&backend, "dropped"), 4);
    assert_eq!(backend.exists("kv", &chain[4..], Chain::default()), 0);
    // Another chain is none of it, and ends it.
    assert_eq!(
        backend.set("kv", &chain[2..4], &[2, 3], after(1)),
        [true; 2]
    );
    assert_eq!(
        backend.set("kv", &chain[4..6], &[2, 3], after(3)),
        [true; 2]
    );
    assert_eq!(backend.exists("kv", &chain, Chain::default()), 6);
    assert_eq!(count(&backend, "dropped"), 4);
    assert!(backend.close());
}

#[test]
fn calls_under_way_go_on_with_the_next_owner() {
    let directory = tempfile::tempdir().unwrap();
    let (mut first, mut second) = (Memories::new(8), Memories::new(8));
    let owner = backend(directory.path(), &mut first);
    let client = backend(directory.path(), &mut second);
    assert_eq!(client.stats().unwrap().1, Part::Client);
    let indices: Vec<i64> = (0..8).collect();
    let chain = keys(8, 1);
    assert_eq!(
        owner.set("kv", &chain, &indices, Chain::default()),
        [true; 8]
    );
    std::thread::scope(|scope| {
        let calls = scope.spawn(|| {
            for round in 2..40 {
                let other = keys(8, round);
                assert_eq!(client.exists("kv", &chain, Chain::default()), 8);
                assert_eq!(
                    client.set("kv", &other, &indices, Chain::default()),
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

#[test]
fn a_closed_backend_touches_nothing_and_stays_closed() {
    let directory = tempfile::tempdir().unwrap();
    let mut memory = Memories::new(2);
    let backend = backend(directory.path(), &mut memory);
    let chain = keys(2, 1);
    assert_eq!(
        backend.set("kv", &chain, &[0, 1], Chain::default()),
        [true; 2]
    );
    assert!(backend.close() && backend.close());
    assert_eq!(backend.get("kv", &chain, &[0, 1]), [false; 2]);
    assert_eq!(
        backend.set("kv", &chain, &[0, 1], Chain::default()),
        [false; 2]
    );
    assert_eq!(backend.exists("kv", &chain, Chain::default()), 0);
    assert_eq!(backend.clear().unwrap(), 0);
}

#[test]
fn huge_pages_are_known_by_their_mapping() {
    let maps = "1000-3000 rw-s 00000000 00:01 12 /dev/zero (deleted)\n\
                200000-600000 rw-s 00000000 00:0f 13 /anon_hugepage (deleted)\n";
    assert!(!lies_on_huge_pages(maps, 0x1000));
    assert!(lies_on_huge_pages(maps, 0x3f_ffff));
    assert!(!lies_on_huge_pages(maps, 0x60_0000));
}

//! Charts: the live screen of a store, and the page of its report.
#![allow(clippy::unwrap_used)]

#[path = "../../../tests/support/mod.rs"]
mod support;

mod many;
mod page;
mod results;
mod screen;
mod terminal;

use std::io::{BufRead, BufReader, IoSlice, IoSliceMut};
use std::path::Path;
use std::process::Stdio;

use larder_engine::{GetPage, OpenOptions, PageStore, PutOptions, PutPage, Store};
use larder_format::{Namespace, PageShape, SEGMENTS_OFFSET};
use support::honest::Process;
use support::{chain, flip, larder, text};

const PAGE_BYTES: u32 = 16 << 10;

/// Names that a screen and a page must not take for their own signs.
pub const STRANGE: [&str; 6] = [
    "<script>alert(1)</script>",
    "a&amp;b \"quoted\" 'too'",
    "turned \u{202e}round\u{202c}",
    "מודל שפה",
    "模型模型模型模型模型模型模型模型模型模型模型模型模型模型模型模型",
    "e\u{301}\u{301}\u{301}\u{301} \u{1f469}\u{200d}\u{1f4bb}",
];

/// An owner of the store, which keeps it.
pub fn serve(store: &Path) -> Process {
    let mut child = larder(&["serve", text(store)])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let said = child.stdout.take().unwrap();
    BufReader::new(said).read_line(&mut String::new()).unwrap();
    Process(child)
}

/// A namespace of small pages.
pub fn namespace(model: &str) -> Namespace {
    let shape = PageShape::new(&[PAGE_BYTES]).unwrap();
    Namespace::builder(model, "w1", 64, shape).build().unwrap()
}

/// A client of a served store.
pub fn client(store: &Path) -> Store {
    Store::attach(store, OpenOptions::default()).unwrap()
}

/// Puts a chain of pages, and reads it.
pub fn put_and_read(store: &Store, model: &str, seed: u64, pages: u64) {
    let id = store.namespace(&namespace(model)).unwrap();
    let bytes = vec![7; PAGE_BYTES as usize];
    let mut parent = None;
    for (depth, key) in (0..).zip(chain(seed, pages)) {
        let parts = [IoSlice::new(&bytes)];
        let page = PutPage {
            key,
            parent,
            depth,
            parts: &parts,
        };
        let statuses = store.put(id, &[page], PutOptions::default());
        assert!(statuses[0].is_present(), "{statuses:?}");
        parent = Some(key);
    }
    assert_eq!(hits(store, model, seed, pages), pages);
}

/// Pages of a chain that are read and not damaged.
pub fn hits(store: &Store, model: &str, seed: u64, pages: u64) -> u64 {
    let id = store.namespace(&namespace(model)).unwrap();
    let mut bytes = vec![0; PAGE_BYTES as usize];
    let mut hits = 0;
    for key in chain(seed, pages) {
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        let statuses = store.get(id, &mut [GetPage { key, parts }], None);
        hits += u64::from(statuses[0].is_hit());
    }
    hits
}

/// An owner that has found a damaged page of its store.
pub fn serve_damaged(path: &Path) -> Process {
    let owner = serve(path);
    let store = client(path);
    put_and_read(&store, "tiny", 1, 20);
    store.flush().unwrap();
    flip(path, SEGMENTS_OFFSET + 2 * 4096 + 99);
    assert_eq!(hits(&store, "tiny", 1, 20), 19);
    store.close().unwrap();
    owner
}

//! Leases with a count, lists of pages, evictions and usage: for an owner and for its clients.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::io::IoSlice;
use std::path::{Path, PathBuf};
use std::time::Duration;

use larder_disk::probe::Want;
use larder_engine::format::{Namespace, PageKey, PageShape};
use larder_engine::{
    AlignedBuf, CreateOptions, NamespaceId, OpenOptions, PageStore, PutOptions, PutPage, Store,
    create,
};
use larder_store::inventory::{Cursor, Inventory, Leased};

const PAGE: u32 = 256 << 10;
const SIZE: u64 = 112 << 20;

fn created() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let options = CreateOptions::new(SIZE).with(|o| o.segment_size = Some(16 << 20));
    create(&path, &options).unwrap();
    (directory, path)
}

fn attach(path: &Path) -> Store {
    let options = OpenOptions::default().with(|o| {
        o.disk = Want::Threads;
        // Lookups lease nothing, so that only the leases of a test keep pages.
        o.lease = Duration::ZERO;
    });
    Store::attach(path, options).unwrap()
}

fn namespace(model: &str) -> Namespace {
    Namespace::builder(model, "w", 1, PageShape::new(&[PAGE]).unwrap())
        .elements("d", "l")
        .pool("")
        .build()
        .unwrap()
}

/// Keys that differ in their first bits and, for the same `at`, in their last bits.
fn key(set: u8, at: u32) -> PageKey {
    let mut bytes = [set; 32];
    bytes[..4].copy_from_slice(&at.to_be_bytes());
    bytes[28..].copy_from_slice(&(at ^ 0xdead_beef).to_be_bytes());
    PageKey::from_bytes(bytes)
}

fn put(store: &dyn PageStore, space: NamespaceId, keys: &[PageKey]) {
    let buffer = AlignedBuf::zeroed(PAGE as usize).unwrap();
    let parts = [IoSlice::new(&buffer)];
    let options = PutOptions::waiting(Duration::from_secs(60));
    for keys in keys.chunks(16) {
        let page = |key: &PageKey| PutPage {
            key: *key,
            parent: None,
            depth: 0,
            parts: &parts,
        };
        let pages: Vec<PutPage<'_>> = keys.iter().map(page).collect();
        let statuses = store.put(space, &pages, options);
        assert!(
            statuses.iter().all(|status| status.is_present()),
            "{statuses:?}"
        );
    }
}

/// Puts pages until the store has evicted so many.
fn overfill(store: &Store, space: NamespaceId, set: u8, evicted: u64) -> Vec<PageKey> {
    let before = store.stats().evicted;
    let mut keys = Vec::new();
    while store.stats().evicted < before + evicted {
        let first = u32::try_from(keys.len()).unwrap();
        let some: Vec<PageKey> = (first..first + 16).map(|at| key(set, at)).collect();
        put(store, space, &some);
        keys.extend(some);
    }
    keys
}

fn all(store: &dyn Inventory, space: NamespaceId) -> BTreeSet<PageKey> {
    let mut found = BTreeSet::new();
    let mut cursor = Some(Cursor::default());
    while let Some(next) = cursor {
        let listing = store.list(space, next).unwrap();
        for key in listing.keys {
            assert!(found.insert(key), "{key} is listed twice");
        }
        cursor = listing.next;
    }
    found
}

#[test]
fn a_leased_page_stays_until_its_lease_was_returned_as_often_as_taken() {
    let (_directory, path) = created();
    let (owner, client) = (attach(&path), attach(&path));
    for store in [&owner, &client] {
        let space = store.namespace(&namespace("m")).unwrap();
        let keys: Vec<PageKey> = (0..8).map(|at| key(1, at)).collect();
        put(store, space, &keys);
        let absent = key(1, 99);
        assert_eq!(store.lease(space, &keys), [Leased::Yes; 8]);
        assert_eq!(
            store.lease(space, &[keys[0], absent]),
            [Leased::Yes, Leased::Absent]
        );
        overfill(store, space, 2, 350);
        assert_eq!(store.contains(space, &keys), [true; 8]);
        // One lease of the first page is left. Returns without a lease have no effect.
        store.unlease(space, &keys);
        store.unlease(space, &[keys[1], keys[1], absent]);
        overfill(store, space, 3, 350);
        let mut left = [false; 8];
        left[0] = true;
        assert_eq!(store.contains(space, &keys), left);
        // A lease ends with its page.
        assert_eq!(store.delete(space, &keys[..1]).unwrap(), 1);
        put(store, space, &keys[..1]);
        overfill(store, space, 4, 350);
        assert_eq!(store.contains(space, &keys[..1]), [false]);
        store.clear_namespace(space).unwrap();
    }
    client.close().unwrap();
    owner.close().unwrap();
}

#[test]
fn leases_take_a_quarter_of_the_store_and_end_with_their_client() {
    let (_directory, path) = created();
    let (owner, client) = (attach(&path), attach(&path));
    let space = client.namespace(&namespace("m")).unwrap();
    let keys: Vec<PageKey> = (0..150).map(|at| key(1, at)).collect();
    put(&client, space, &keys);
    let leased = client.lease(space, &keys);
    let taken = leased
        .iter()
        .filter(|leased| **leased == Leased::Yes)
        .count();
    let bytes = taken as u64 * u64::from(PAGE);
    assert!(
        (SIZE / 8..=SIZE / 4).contains(&bytes),
        "{bytes} bytes are leased"
    );
    assert!(leased.contains(&Leased::Refused), "{leased:?}");
    client.close().unwrap();
    let space = owner.namespace(&namespace("m")).unwrap();
    overfill(&owner, space, 2, 350);
    assert_eq!(owner.contains(space, &keys), vec![false; keys.len()]);
    owner.close().unwrap();
}

#[test]
fn a_list_has_the_whole_keys_of_a_namespace_also_after_a_restart() {
    let (_directory, path) = created();
    let expected = {
        let store = attach(&path);
        let space = store.namespace(&namespace("m")).unwrap();
        let other = store.namespace(&namespace("other")).unwrap();
        put(&store, other, &[key(9, 1)]);
        let keys = overfill(&store, space, 1, 60);
        store.delete(space, &keys[keys.len() - 3..]).unwrap();
        let stored = store.contains(space, &keys);
        let kept = keys.into_iter().zip(stored).filter(|(_, stored)| *stored);
        let kept: BTreeSet<PageKey> = kept.map(|(key, _)| key).collect();
        assert_eq!(all(&store, space), kept);
        store.close().unwrap();
        kept
    };
    let (owner, client) = (attach(&path), attach(&path));
    for store in [&owner, &client] {
        let space = store.namespace(&namespace("m")).unwrap();
        assert_eq!(all(store, space), expected);
        let usage = store.usage().unwrap();
        let own = namespace("m").fingerprint();
        let own = usage.iter().find(|usage| usage.namespace == own).unwrap();
        assert_eq!(own.pages, expected.len() as u64);
        assert_eq!(own.bytes, own.pages * u64::from(PAGE));
    }
    client.close().unwrap();
    owner.close().unwrap();
}

#[test]
fn evictions_have_whole_keys_for_owner_and_client() {
    let (_directory, path) = created();
    let (owner, client) = (attach(&path), attach(&path));
    let space = owner.namespace(&namespace("m")).unwrap();
    let begun = [&owner, &client].map(|store| store.evictions(0).unwrap());
    for begun in &begun {
        assert!(begun.pages.is_empty() && !begun.missed);
    }
    let mut since = begun.map(|begun| begun.next);
    let mut seen = [BTreeSet::new(), BTreeSet::new()];
    let mut put = Vec::new();
    for set in 1..6 {
        put.extend(overfill(&owner, space, set, 150));
        for at in 0..2 {
            let evictions = [&owner, &client][at].evictions(since[at]).unwrap();
            assert!(!evictions.missed);
            since[at] = evictions.next;
            for (of, key) in evictions.pages {
                assert_eq!(of, namespace("m").fingerprint());
                assert!(seen[at].insert(key), "{key} was evicted twice");
            }
        }
    }
    let stored = owner.contains(space, &put);
    let gone = put.into_iter().zip(stored).filter(|(_, stored)| !*stored);
    let gone: BTreeSet<PageKey> = gone.map(|(key, _)| key).collect();
    assert_eq!(seen[0], gone);
    assert_eq!(seen[1], gone);
    // Numbers of another owner are known to be such.
    client.close().unwrap();
    owner.close().unwrap();
    let again = attach(&path);
    assert!(again.evictions(since[0]).unwrap().missed);
    again.close().unwrap();
}

#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::fs;
use std::io::{IoSlice, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use larder_core::counters::Misses;
use larder_core::status::{GetStatus, MissReason, PutStatus, Refusal};
use larder_disk::probe::Want;
use larder_format::{BLOCK_BYTES, Namespace, PageKey, PageShape};
use larder_seal::{Vault, WrappingKey};

use super::*;
use crate::api::{GetPage, OpenOptions, PageStore, PutOptions, PutPage};
use crate::encoder::CodecChoice;
use crate::error::StoreError;
use crate::share::Store;
use crate::share::tests::created;
use crate::store::LocalStore;
use crate::volume::{Access, OWNER, Volumes};

const PARTS: [u32; 2] = [4096 * 3, 5000];
const ALL: Serial = Serial::MAX;

/// An encrypted store without pages.
pub(crate) struct Sample {
    _directory: tempfile::TempDir,
    pub(crate) path: PathBuf,
}

fn wrapping(byte: u8) -> WrappingKey {
    WrappingKey::new(&Vault::new(), &[byte; 32]).unwrap()
}

pub(crate) fn options(key: u8) -> OpenOptions {
    OpenOptions::default().with(|o| {
        o.disk = Want::Threads;
        o.codec = CodecChoice::Off;
        o.wrapping = Some(wrapping(key));
    })
}

impl Sample {
    pub(crate) fn new() -> Sample {
        let (directory, path) = created();
        let sample = Sample {
            _directory: directory,
            path,
        };
        sample.change(|volumes, _| {
            let store = volumes.superblock().store;
            Keyring::create(store, &wrapping(1), &Vault::new(), &mut random, 1).unwrap()
        });
        sample
    }

    /// Replaces the keyring while the store is closed.
    pub(crate) fn change(&self, change: impl FnOnce(&Volumes, Option<Keyring>) -> Keyring) {
        let opened = Volumes::open_any(&self.path, &[], Access::Exclusive, false);
        let mut volumes = opened.unwrap();
        let by_threads = OpenOptions::default().with(|o| o.disk = Want::Threads);
        let disk = volumes.open_disk(&by_threads, None, OWNER).unwrap();
        let copy = volumes.newest_keyring(&*disk).unwrap();
        let ring = copy.map(|copy| Keyring::open(copy, &wrapping(1), &Vault::new()).unwrap());
        let next = change(&volumes, ring);
        let sync = |volumes: &Volumes, _| volumes.sync(&*disk);
        volumes.set_keyring(&*disk, next.copy(), sync).unwrap();
        disk.shutdown();
    }

    fn open(&self) -> LocalStore {
        LocalStore::open(&self.path, &options(1)).unwrap()
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        fs::read(&self.path).unwrap()
    }
}

pub(crate) fn namespace(tenant: Option<&str>) -> Namespace {
    let shape = PageShape::new(&PARTS).unwrap();
    let builder = Namespace::builder("a model by name", "", 64, shape);
    let builder = match tenant {
        Some(tenant) => builder.extra(TENANT_FIELD, tenant),
        None => builder,
    };
    builder.build().unwrap()
}

pub(crate) fn key(number: u32) -> PageKey {
    let mut key = [0x5b; 32];
    key[4..8].copy_from_slice(&number.to_be_bytes());
    PageKey::from_bytes(key)
}

fn content(number: u32, part: usize) -> Vec<u8> {
    let bytes = PARTS[part] as usize;
    let text = format!("page {number:08}, part {part:02}.. ");
    text.bytes().cycle().take(bytes).collect()
}

pub(crate) fn put(
    store: &dyn PageStore,
    tenant: Option<&str>,
    numbers: std::ops::Range<u32>,
) -> Vec<PutStatus> {
    let options = PutOptions::waiting(Duration::from_secs(60));
    put_with(store, tenant, numbers, options)
}

pub(crate) fn put_with(
    store: &dyn PageStore,
    tenant: Option<&str>,
    numbers: std::ops::Range<u32>,
    options: PutOptions,
) -> Vec<PutStatus> {
    let id = store.namespace(&namespace(tenant)).unwrap();
    let contents: Vec<[Vec<u8>; 2]> = numbers
        .clone()
        .map(|number| [content(number, 0), content(number, 1)])
        .collect();
    let parts: Vec<[IoSlice<'_>; 2]> = contents
        .iter()
        .map(|parts| parts.each_ref().map(|part| IoSlice::new(part)))
        .collect();
    let page = |(number, parts)| PutPage {
        key: key(number),
        parent: None,
        depth: 0,
        parts,
    };
    let pages = numbers.zip(parts.iter().map(|parts| &parts[..]));
    let pages: Vec<PutPage<'_>> = pages.map(page).collect();
    store.put(id, &pages, options)
}

pub(crate) fn get(store: &dyn PageStore, tenant: Option<&str>, number: u32) -> GetStatus {
    let id = store.namespace(&namespace(tenant)).unwrap();
    let mut parts = PARTS.map(|bytes| vec![7; bytes as usize]);
    let [a, b] = &mut parts;
    let page = GetPage {
        key: key(number),
        parts: &mut [IoSliceMut::new(a), IoSliceMut::new(b)],
    };
    let status = store.get(id, &mut [page], None)[0];
    let expected = [content(number, 0), content(number, 1)];
    match status {
        GetStatus::Hit => assert_eq!(parts, expected),
        GetStatus::Miss(_) => assert!(parts.iter().flatten().all(|byte| [0, 7].contains(byte))),
    }
    status
}

pub(crate) fn all_hit(store: &dyn PageStore, tenant: Option<&str>, numbers: std::ops::Range<u32>) {
    for number in numbers {
        assert_eq!(get(store, tenant, number), GetStatus::Hit, "{number}");
    }
}

/// Where a text begins.
pub(crate) fn position(bytes: &[u8], text: &[u8]) -> Option<usize> {
    let first = |at: &usize| bytes[*at..].starts_with(text);
    let starts = bytes
        .iter()
        .enumerate()
        .filter(|(_, byte)| **byte == text[0]);
    starts.map(|(at, _)| at).find(first)
}

fn misses(store: &LocalStore) -> Misses {
    store.data.counts().misses
}

#[test]
fn pages_come_back_after_a_close_and_after_a_crash_and_the_volume_shows_nothing_of_them() {
    let sample = Sample::new();
    let tenant = Some("a tenant by name");
    let store = sample.open();
    assert_eq!(put(&store, None, 0..40), vec![PutStatus::Stored; 40]);
    assert_eq!(put(&store, tenant, 0..40), vec![PutStatus::Stored; 40]);
    assert_eq!(
        put(&store, tenant, 30..50)[..10],
        vec![PutStatus::Duplicate; 10]
    );
    all_hit(&store, None, 0..40);
    all_hit(&store, tenant, 0..50);
    store.flush().unwrap();
    // As after a crash.
    drop(store);
    let store = sample.open();
    all_hit(&store, None, 0..40);
    all_hit(&store, tenant, 0..50);
    assert_eq!(misses(&store), Misses::default());
    store.close().unwrap();
    let bytes = sample.bytes();
    let page = key(7);
    let texts: [&[u8]; 5] = [
        b"a model by name",
        b"a tenant",
        b"part 01",
        &page.as_bytes()[..12],
        b"LARDERNS",
    ];
    for text in texts {
        let at = position(&bytes, text);
        assert_eq!(at, None, "{}", text.escape_ascii());
    }
    assert!(position(&bytes, b"LARDERDB").is_some());
    let store = sample.open();
    all_hit(&store, None, 0..40);
    all_hit(&store, tenant, 0..50);
    store.check_invariants().unwrap();
    store.close().unwrap();
}

/// They are in the index, and are written again.
#[test]
fn unproven_pages_are_put_again_after_a_crash() {
    let sample = Sample::new();
    let store = sample.open();
    assert_eq!(put(&store, None, 0..8), [PutStatus::Stored; 8]);
    drop(store);
    let store = sample.open();
    let statuses = put(&store, None, 0..8);
    assert!(statuses.iter().all(|status| status.is_present()));
    all_hit(&store, None, 0..8);
    store.close().unwrap();
}

#[test]
fn without_the_right_key_nothing_is_written_and_nothing_is_lost() {
    let sample = Sample::new();
    let store = sample.open();
    put(&store, Some("a"), 0..20);
    store.flush().unwrap();
    drop(store);
    let before = sample.bytes();
    let plain = || OpenOptions::default().with(|o| o.disk = Want::Threads);
    let refused = LocalStore::open(&sample.path, &plain()).map(drop);
    assert!(matches!(refused, Err(StoreError::Sealed(_))));
    let attached = Store::attach(&sample.path, plain()).map(drop);
    assert!(attached.is_err());
    let wrong = LocalStore::open(&sample.path, &options(2)).map(drop);
    assert!(matches!(wrong, Err(StoreError::WrongKey { .. })));
    assert!(sample.bytes() == before);
    let store = sample.open();
    all_hit(&store, Some("a"), 0..20);
    store.close().unwrap();
    let (_directory, path) = created();
    let given = LocalStore::open(&path, &options(1)).map(drop);
    assert!(matches!(given, Err(StoreError::Usage(_))));
}

#[test]
fn row_33_changed_bytes_are_damage_and_are_put_again() {
    let sample = Sample::new();
    let store = sample.open();
    put(&store, None, 0..4);
    let id = store.namespace(&namespace(None)).unwrap();
    let pinned = store
        .catalog()
        .pin(id, &[key(2)], larder_core::index::ReadAs::Check);
    let pinned = pinned[0].unwrap();
    store.catalog().unpin(&[pinned.extent]);
    let file = fs::File::options()
        .read(true)
        .write(true)
        .open(&sample.path)
        .unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, pinned.extent.offset + 9)
        .unwrap();
    file.write_all_at(&[byte[0] ^ 4], pinned.extent.offset + 9)
        .unwrap();
    assert_eq!(get(&store, None, 2), GetStatus::Miss(MissReason::Damaged));
    assert_eq!(get(&store, None, 2), GetStatus::Miss(MissReason::Absent));
    assert_eq!(put(&store, None, 2..3), [PutStatus::Stored]);
    all_hit(&store, None, 0..4);
    store.close().unwrap();
}

/// Fills a keyring with other tenants.
fn fill(ring: &mut Keyring) {
    for number in ring.copy().slots.len()..larder_format::KEY_SLOTS_MAX {
        ring.add_tenant(&number.to_string(), Serial::ZERO, &mut random, 1)
            .unwrap();
    }
}

/// Keys that are lost or wrong are never taken for damage.
#[test]
fn a_page_without_its_key_is_a_miss_of_its_own_and_stays() {
    let sample = Sample::new();
    let store = sample.open();
    put(&store, Some("a"), 0..8);
    put(&store, Some("b"), 0..8);
    store.close().unwrap();
    let former = std::cell::RefCell::new(None);
    // Another key in the same slot, as after a mistake.
    sample.change(|_, ring| {
        let mut ring = ring.unwrap();
        *former.borrow_mut() = Some(ring.clone());
        ring.erase("a", Serial::ZERO, &mut random).unwrap();
        fill(&mut ring);
        ring.add_tenant("a", ALL, &mut random, 1).unwrap();
        ring
    });
    let sealed = GetStatus::Miss(MissReason::Sealed);
    for erases in [false, true] {
        if erases {
            sample.change(|_, ring| {
                let mut ring = ring.unwrap();
                ring.erase("a", ALL, &mut random).unwrap();
                ring
            });
        }
        let store = sample.open();
        // Without a key in the slot it is not even looked for.
        let (expected, count) = match erases {
            false => (sealed, 16),
            true => (GetStatus::Miss(MissReason::Absent), 0),
        };
        for number in 0..8 {
            assert_eq!(get(&store, Some("a"), number), expected);
            assert_eq!(get(&store, Some("a"), number), expected);
        }
        all_hit(&store, Some("b"), 0..8);
        let counted = misses(&store);
        assert_eq!((counted.sealed, counted.damaged), (count, 0));
        store.close().unwrap();
    }
    // With the former key all of them are there.
    sample.change(|_, ring| {
        let mut former = former.take().unwrap();
        while former.copy().generation <= ring.as_ref().unwrap().copy().generation {
            former.skip_generation();
        }
        former
            .add_tenant("c", Serial::ZERO, &mut random, 1)
            .unwrap();
        former
    });
    let store = sample.open();
    all_hit(&store, Some("a"), 0..8);
    store.close().unwrap();
}

/// Two different copies of one generation would both count.
#[test]
fn no_later_keyring_has_the_generation_of_one_that_was_written_in_part() {
    let store = StoreId::from_bytes([4; 16]);
    let ring = Keyring::create(store, &wrapping(1), &Vault::new(), &mut random, 1).unwrap();
    let keys = Keys::new(ring.clone());
    let mut next = ring;
    next.add_wrap(&wrapping(2), &mut random).unwrap();
    next.remove_wrap(wrapping(1).id(), &mut random).unwrap();
    keys.skip_past(&next);
    let later = keys.erase(NO_TENANT, Run::FIRST).unwrap().next.clone();
    assert!(later.copy().generation > next.copy().generation);
}

#[test]
fn a_full_keyring_takes_no_further_tenant_and_says_so() {
    let sample = Sample::new();
    sample.change(|_, ring| {
        let mut ring = ring.unwrap();
        fill(&mut ring);
        ring
    });
    let store = sample.open();
    let refused = PutStatus::Refused(Refusal::KeyringFull);
    assert_eq!(put(&store, Some("a"), 0..3), [refused; 3]);
    assert_eq!(put(&store, Some("2899"), 0..3), [PutStatus::Stored; 3]);
    store.close().unwrap();
}

#[test]
fn moved_pages_open_as_before() {
    let sample = Sample::new();
    let store = sample.open();
    let tenant = Some("a");
    let last = put(&store, tenant, 0..9000).last().copied();
    assert_eq!(last, Some(PutStatus::Stored));
    let id = store.namespace(&namespace(tenant)).unwrap();
    let kept = |number: &u32| number.is_multiple_of(5);
    let gone: Vec<PageKey> = (0..9000).filter(|it| !kept(it)).map(key).collect();
    store.delete(id, &gone).unwrap();
    put(&store, tenant, 20_000..27_000);
    let counters = store.local.with_core(|core| core.counters());
    assert!(counters.store.written.copies_bytes > 0);
    let is_there = |store: &LocalStore, number: &u32| store.contains(id, &[key(*number)])[0];
    let mut found = 0;
    for number in (0..9000)
        .filter(kept)
        .filter(|number| is_there(&store, number))
    {
        all_hit(&store, tenant, number..number + 1);
        found += 1;
    }
    assert!(found > 1000, "{found}");
    store.close().unwrap();
    let store = sample.open();
    for number in (0..9000)
        .filter(kept)
        .filter(|number| is_there(&store, number))
    {
        all_hit(&store, tenant, number..number + 1);
    }
    assert_eq!((misses(&store).damaged, misses(&store).sealed), (0, 0));
    store.check_invariants().unwrap();
    store.close().unwrap();
}

#[test]
fn stored_lengths_of_encoded_pages_are_sixteenths_of_the_page() {
    const PAGE: usize = 64 * BLOCK_BYTES;
    let sample = Sample::new();
    let with_codec = options(1).with(|o| o.codec = CodecChoice::Bf16);
    let store = LocalStore::open(&sample.path, &with_codec).unwrap();
    let shape = PageShape::new(&[u32::try_from(PAGE).unwrap()]).unwrap();
    let wide = Namespace::builder("wide", "", 64, shape).build().unwrap();
    let id = store.namespace(&wide).unwrap();
    let (mut lengths, mut before) = (HashSet::new(), 0);
    for (number, smooth) in (0..=64).step_by(4).enumerate() {
        // The codec makes the blocks of equal values smaller, and leaves the others.
        let bytes: Vec<u8> = (0..PAGE)
            .map(|at| match at < smooth * BLOCK_BYTES {
                true => 0x3f,
                false => ((at * at / 7) ^ (at >> 3)) as u8,
            })
            .collect();
        let key = key(u32::try_from(number).unwrap());
        let page = PutPage {
            key,
            parent: None,
            depth: 0,
            parts: &[IoSlice::new(&bytes)],
        };
        let options = PutOptions::waiting(Duration::from_secs(60));
        assert_eq!(store.put(id, &[page], options), [PutStatus::Stored]);
        let after = store.data.counts().encoded_stored_bytes;
        lengths.insert(after - before);
        before = after;
        let mut read = vec![0; PAGE];
        let parts = &mut [IoSliceMut::new(&mut read)];
        let page = GetPage { key, parts };
        assert_eq!(store.get(id, &mut [page], None), [GetStatus::Hit]);
        assert_eq!(read, bytes);
    }
    let sixteenth = (PAGE / 16) as u64;
    assert!(lengths.len() > 3, "{lengths:?}");
    assert!(
        lengths.iter().all(|length| length % sixteenth == 0),
        "{lengths:?}"
    );
    store.close().unwrap();
}

//! The segments of the store of a prefix cache, and the pages of its model.

use std::path::Path;

use larder_engine::{CreateOptions, OpenOptions, PageStore, Store, StoreError, create};
use larder_kernels::KvShape;
use larder_tiers::prefix::OpenError;
use larder_tiers::{Model, PrefixCache};

const MIB: u64 = 1 << 20;

/// A model with one token and so many bytes a page.
fn model(page_bytes: u64) -> Model {
    let shape = KvShape::mha(4, 1, (page_bytes / 8) as u32, 1, 1).unwrap();
    assert_eq!(u64::from(shape.page_bytes()), page_bytes);
    Model::new("m", "", "u8", shape)
}

fn open(path: &Path, bytes: u64, page_bytes: u64) -> Result<PrefixCache, OpenError> {
    PrefixCache::open(path, bytes, &model(page_bytes), 3, 3)
}

/// Keeps two pages, closes the cache, and finds one by another cache: the last token is always
/// computed.
fn keep_one(path: &Path, bytes: u64, page_bytes: u64) {
    let cache = open(path, bytes, page_bytes).unwrap();
    let mut sequence = cache.begin(&[1, 2]).unwrap();
    assert_eq!(sequence.cached().tokens(), 0);
    sequence.row_mut(1, 3, 0).unwrap().fill(7);
    sequence.computed(2).unwrap();
    sequence.keep().unwrap();
    cache.close().unwrap();
    let cache = open(path, bytes, page_bytes).unwrap();
    let sequence = cache.begin(&[1, 2]).unwrap();
    assert_eq!(sequence.cached().l3, 1);
    assert!(sequence.row(1, 3, 0).unwrap().iter().all(|byte| *byte == 7));
}

#[test]
fn a_new_store_has_segments_that_hold_the_pages_of_the_model() {
    for (bytes, page_bytes) in [
        (300 * MIB, 17 * MIB),
        (200 * MIB, 8 * MIB + 8),
        (128 * MIB, 8),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kv.store");
        keep_one(&path, bytes, page_bytes);
    }
}

#[test]
fn a_new_store_that_is_too_small_for_a_page_is_refused_with_the_least_size_and_not_made() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv.store");
    let page_bytes = 33 * MIB;
    let refused = open(&path, 150 * MIB, page_bytes).err();
    let Some(OpenError::Store(StoreError::TooSmall { needed, .. })) = refused else {
        panic!("{refused:?}");
    };
    assert!(!path.exists());
    keep_one(&path, needed, page_bytes);
}

#[test]
fn a_store_whose_segments_hold_no_page_is_refused_to_its_owner_and_to_clients() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv.store");
    let small = CreateOptions::new(160 * MIB).with(|o| o.segment_size = Some(16 * MIB));
    create(&path, &small).unwrap();
    let refused = |page_bytes| match open(&path, 0, page_bytes).err() {
        Some(OpenError::Store(StoreError::PageTooLarge {
            page_bytes,
            largest_bytes,
        })) => (page_bytes, largest_bytes),
        other => panic!("{other:?}"),
    };
    let largest = 16 * MIB - 3 * 4096;
    assert_eq!(refused(16 * MIB), (16 * MIB, largest));
    // It was closed: another process opens it without a recovery.
    let owner = Store::attach(&path, OpenOptions::default()).unwrap();
    assert_eq!(refused(20 * MIB), (20 * MIB, largest));
    owner.close().unwrap();
    keep_one(&path, 0, 8 * MIB);
}

#[test]
fn the_size_does_not_matter_for_a_store_that_is_there() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv.store");
    keep_one(&path, 160 * MIB, 4096);
    for bytes in [0, 1, MIB, 1 << 60] {
        let cache = open(&path, bytes, 4096).unwrap();
        assert_eq!(
            cache.begin(&[1, 2]).unwrap().cached().l3,
            1,
            "{bytes} bytes"
        );
        cache.close().unwrap();
        let size = CreateOptions::new(bytes);
        let store = Store::open_or_create(&path, &size, OpenOptions::default()).unwrap();
        assert_eq!(store.stats().pages, 2);
        store.close().unwrap();
    }
    let other = path.with_extension("new");
    assert!(matches!(
        open(&other, 0, 4096).err(),
        Some(OpenError::Store(StoreError::NoSize(_)))
    ));
}

//! Changes of the keyring that are killed at each of their writes.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use larder_disk::Disk;
use larder_engine::{OpenOptions, PageStore, PutOptions, Store, StoreError};
use larder_format::{KEYRING_BYTES, keyring_offsets};
use larder_offline::{rekey, retire, rotate};
use larder_store::api::DiskWrapper;
use larder_store::share::erase_tenant;

use super::common::chain;
use super::common::faulty::{Fault, Faulty, Seen};
use super::{Sample, key, options, pool};

/// A disk that stops at a write. From then on it answers with errors, as for a process that is
/// killed there. The write itself may have reached the device in part.
fn dies_at(write: usize, place: &Arc<Mutex<Option<(usize, u64)>>>, path: &Path) -> DiskWrapper {
    let (path, place) = (path.to_owned(), place.clone());
    DiskWrapper::new(move |disk| {
        let disk = Faulty::new(disk, &path);
        let (writes, place) = (AtomicUsize::new(0), place.clone());
        disk.when_on(Fault::Fails(libc::EIO), usize::MAX, move |volume, seen| {
            let Seen::Write { offset, .. } = seen else {
                return matches!(seen, Seen::Sync) && writes.load(Ordering::Relaxed) > write;
            };
            let now = writes.fetch_add(1, Ordering::Relaxed);
            if now == write {
                *place.lock().unwrap() = Some((volume, offset));
            }
            now >= write
        });
        disk as Arc<dyn Disk>
    })
}

fn options_dying(
    byte: u8,
    write: usize,
    place: &Arc<Mutex<Option<(usize, u64)>>>,
    path: &Path,
) -> OpenOptions {
    options(byte).with(|o| o.disk_wrapper = Some(dies_at(write, place, path)))
}

/// Runs a change again and again, each time killed at a later write, until it succeeds. `check`
/// sees the store after each kill, once with the killed write left out and once torn. Returns the
/// number of kills.
fn killed_at_each_write(
    sample: &Sample,
    change: impl Fn(&OpenOptions) -> Result<(), StoreError>,
    check: impl Fn(),
) -> usize {
    killed_at(0.., sample, change, check)
}

/// As [`killed_at_each_write`], at some of the writes.
fn killed_at(
    writes: impl Iterator<Item = usize>,
    sample: &Sample,
    change: impl Fn(&OpenOptions) -> Result<(), StoreError>,
    check: impl Fn(),
) -> usize {
    let before = sample.bytes();
    for write in writes {
        let place = Arc::default();
        sample.set(&before);
        if change(&options_dying(1, write, &place, sample.path())).is_ok() {
            return write;
        }
        let killed = place.lock().unwrap().unwrap();
        check();
        sample.set(&before);
        let again = Arc::default();
        change(&options_dying(1, write, &again, sample.path())).unwrap_err();
        let (volume, offset) = killed;
        let file = fs::File::options().write(true).open(&sample.paths[volume]);
        // A part of the write is there.
        file.unwrap().write_all_at(&[0x5a; 700], offset).unwrap();
        check();
    }
    unreachable!("a change has an end")
}

#[test]
fn a_rotation_killed_at_each_write_leaves_the_old_key_or_the_new_one() {
    let sample = Sample::new();
    let kills = killed_at_each_write(
        &sample,
        |options| rotate(sample.path(), options, &key(2)),
        || {
            let opens = |byte: u8| Store::open(sample.path(), options(byte));
            let opened: Vec<u8> = [1, 2]
                .into_iter()
                .filter(|byte| match opens(*byte) {
                    Ok(store) => {
                        store.close().unwrap();
                        true
                    }
                    Err(StoreError::WrongKey { .. }) => false,
                    Err(error) => panic!("{error}"),
                })
                .collect();
            let [byte] = opened[..] else {
                panic!("{opened:?}")
            };
            sample.all_hit(byte);
            let copies = sample.copies();
            assert!(
                copies
                    .iter()
                    .all(|copy| copy.is_some() && *copy == copies[0])
            );
            assert!(sample.unlocked(byte).flaws.is_empty());
        },
    );
    // Three copies of the keyring in each volume, and the copies of its superblock.
    assert!(kills > 6, "{kills}");
    assert!(matches!(
        Store::open(sample.path(), options(1)).map(drop),
        Err(StoreError::WrongKey { .. })
    ));
    sample.all_hit(2);
    let ids: Vec<_> = sample.copies()[0]
        .as_ref()
        .unwrap()
        .wraps
        .iter()
        .map(|it| it.id)
        .collect();
    assert_eq!(ids, [key(2).id()]);
}

/// A put of a new tenant: its key is durable before its first page.
#[test]
fn a_new_key_killed_at_each_write_leaves_all_other_tenants() {
    let sample = Sample::new();
    let put = |options: &OpenOptions| {
        let store = Store::open(sample.path(), options.clone())?;
        let pool = pool(&store, "c");
        let stored = pool.put_from(&chain(9, 1), 0, PutOptions::default());
        match stored.iter().all(|status| status.is_present()) {
            true => store.close(),
            false => Err(StoreError::ReadOnly),
        }
    };
    let kills = killed_at_each_write(&sample, put, || {
        sample.all_hit(1);
        let copies = sample.copies();
        assert!(
            copies
                .iter()
                .all(|copy| copy.is_some() && *copy == copies[0])
        );
    });
    assert!(kills > 6, "{kills}");
}

#[test]
fn a_retirement_killed_at_each_write_leaves_every_page() {
    let sample = Sample::new();
    let retire = |options: &OpenOptions| {
        let mut progress = |_, _| ControlFlow::Continue(());
        let (path, volume) = (sample.path(), &sample.paths[1]);
        retire(path, volume, options, false, &mut progress).map(drop)
    };
    let is_torn = Cell::new(false);
    let kills = killed_at_each_write(&sample, retire, || {
        let rest = sample.bytes();
        sample.all_hit(1);
        // The next run goes on, also if the store is not opened before. Bytes of a torn write that
        // are none of Larder's are damage to it, which an open mends.
        if !is_torn.replace(!is_torn.get()) {
            sample.set(&rest);
        }
        retire(&options(1)).unwrap();
        sample.all_hit(1);
    });
    assert!(kills > 6, "{kills}");
    sample.all_hit(1);
    let [kept @ .., _, _, _] = &sample.generations()[..] else {
        panic!()
    };
    assert_eq!(kept.len(), 3);
    assert!(kept.iter().all(Option::is_some));
    // No keyring stays on the volume that has left the store.
    let left = fs::read(&sample.paths[1]).unwrap();
    for offset in keyring_offsets(left.len() as u64) {
        let at = usize::try_from(offset).unwrap();
        assert!(left[at..at + KEYRING_BYTES].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn an_erasure_killed_at_each_write_leaves_the_tenant_whole_or_erased() {
    let sample = Sample::new();
    let erase = |options: &OpenOptions| {
        let store = Store::open(sample.path(), options.clone())?;
        erase_tenant(&store, "a", Duration::ZERO)?;
        store.close()
    };
    let seen = RefCell::new([0, 0]);
    let kills = killed_at_each_write(&sample, erase, || {
        let hits = sample.hits(1, "a");
        assert!([0, 80].contains(&hits), "{hits}");
        assert_eq!((sample.hits(1, "a"), sample.hits(1, "b")), (hits, 80));
        assert!(
            sample
                .copies()
                .iter()
                .all(|copy| *copy == sample.copies()[0])
        );
        seen.borrow_mut()[usize::from(hits > 0)] += 1;
    });
    assert!(kills > 6 && !seen.borrow().contains(&0), "{kills} {seen:?}");
    assert_eq!((sample.hits(1, "a"), sample.hits(1, "b")), (0, 80));
}

#[test]
fn a_renewal_killed_at_any_write_leaves_every_page_and_goes_on() {
    let sample = Sample::new();
    let renew = |options: &OpenOptions| {
        let mut progress = |_, _| ControlFlow::Continue(());
        rekey(sample.path(), options, Some("a"), false, &mut progress).map(drop)
    };
    // The writes of pages are many: some of them.
    let writes = (0..).step_by(41);
    let kills = killed_at(writes, &sample, renew, || {
        assert_eq!(sample.hits(1, "a"), 80);
        renew(&options(1)).unwrap();
        sample.all_hit(1);
        assert_eq!(sample.slots(), BTreeMap::from([(3, 80), (4, 80)]));
    });
    assert!(kills > 34, "{kills}");
}

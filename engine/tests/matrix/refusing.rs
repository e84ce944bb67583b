//! Parts of a device that fail for good, while the store goes on without them: rows 6 and 7.

use std::time::Instant;

use larder_engine::format::SEGMENTS_OFFSET;
use larder_engine::{OpenOptions, PageStore, PutFailure, PutOptions, PutStatus, Refusal};
use larder_store::share::Inside;

use super::common::faulty::{Fault, Seen, open_faulty};
use super::common::honest::PATIENCE;
use super::common::{Home, MIB, Pool, chain};
use super::{SEGMENT, SIZE};

const EIO: i32 = 5;

#[test]
fn row_07_a_store_goes_on_without_segments_whose_header_the_device_refuses() {
    for bad in [1, 3] {
        let home = Home::with_store(2 * SIZE);
        let (store, disk) = open_faulty(&home, OpenOptions::default());
        let pool = Pool::new(&store, "m", &[1 << 20]);
        disk.when(Fault::Fails(EIO), usize::MAX, move |seen| match seen {
            Seen::Write { offset, .. } if offset >= SEGMENTS_OFFSET => {
                let at = offset - SEGMENTS_OFFSET;
                at.is_multiple_of(SEGMENT) && (2..2 + bad).contains(&(at / SEGMENT))
            }
            _ => false,
        });
        // Three times the store's capacity.
        for seed in 0..50 {
            // A page that is written again may go into the next of them.
            let fails = PutStatus::Failed(PutFailure::Write);
            let is_stored = |status: &PutStatus| *status == PutStatus::Stored || *status == fails;
            // A page in each segment stays in use: none of them dies by itself.
            pool.put(&chain(1000 + seed, 1));
            (0..=seed).for_each(|used| {
                store.contains(pool.id, &chain(1000 + used, 1));
            });
            let statuses = pool.put(&chain(seed, 12));
            assert!(
                statuses.iter().all(is_stored),
                "{bad} segments, call {seed}: {statuses:?}"
            );
        }
        assert!(disk.hits() > 0);
        assert_eq!(pool.hits(&chain(49, 12)), 12);
        store.local().unwrap().check_invariants().unwrap();
        let kept = store.stats().usable_bytes;
        disk.clear_rules();
        for seed in 50..60 {
            assert_eq!(pool.put(&chain(seed, 12)), [PutStatus::Stored; 12]);
        }
        store.flush().unwrap();
        let until = Instant::now() + PATIENCE;
        while store.stats().usable_bytes == kept {
            assert!(Instant::now() < until, "{bad} segments stay out");
            std::thread::yield_now();
        }
    }
}

/// While a segment is out of use, the store holds less. A chain that needs the segment is refused
/// for now, and may be put again later.
#[test]
fn row_07_without_a_segment_a_chain_is_not_too_long_for_good() {
    let home = Home::with_store(SIZE);
    let (store, disk) = open_faulty(&home, OpenOptions::default());
    let pool = Pool::new(&store, "m", &[1 << 20]);
    let all = store.stats().usable_bytes;
    let length = usize::try_from(store.stats().usable_pages(MIB)).unwrap();
    let wait = PutOptions::waiting(std::time::Duration::from_secs(120));
    disk.when(Fault::Fails(EIO), usize::MAX, |seen| match seen {
        Seen::Write { offset, .. } => offset == SEGMENTS_OFFSET + 2 * SEGMENT,
        _ => false,
    });
    let mut seed = 0;
    while store.stats().usable_bytes == all {
        pool.put(&chain(seed, 12));
        seed += 1;
        assert!(seed < 1000, "nothing is ever stranded");
    }
    let statuses = pool.put_from(&chain(2000, length), 0, PutOptions::default());
    let unreachable = PutStatus::Refused(Refusal::Unreachable);
    assert!(!statuses.contains(&unreachable), "{statuses:?}");
    assert!(statuses.contains(&PutStatus::Refused(Refusal::NoSpace)));
    disk.clear_rules();
    let statuses = pool.put_from(&chain(3000, length), 0, wait);
    assert!(
        statuses.iter().all(|status| *status == PutStatus::Stored),
        "{statuses:?}"
    );
}

/// The operations that a dying device still carries out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    ReadsAndSyncs,
    Reads,
    Nothing,
}

#[test]
fn row_07_a_store_goes_on_without_a_volume_that_takes_no_writes_even_if_it_never_did() {
    const VOLUMES: usize = 3;
    for failing in 0..VOLUMES {
        for (left, before) in [
            (Left::ReadsAndSyncs, 0),
            (Left::ReadsAndSyncs, 60),
            (Left::Reads, 60),
            (Left::Nothing, 60),
        ] {
            let case = format!("{left:?} of volume {failing} after {before} calls");
            let home = Home::on_volumes(VOLUMES, 128 * MIB);
            let (store, disk) = open_faulty(&home, OpenOptions::default());
            let pool = Pool::new(&store, "m", &[131_072]);
            for seed in 0..before {
                assert_eq!(pool.put(&chain(seed, 8)), [PutStatus::Stored; 8], "{case}");
            }
            disk.when_on(Fault::Fails(EIO), usize::MAX, move |volume, seen| {
                let is_left = match seen {
                    Seen::Read { .. } => left != Left::Nothing,
                    Seen::Sync => left == Left::ReadsAndSyncs,
                    Seen::Write { .. } => false,
                };
                volume == failing && !is_left
            });
            // Several times the capacity of the two others.
            let end = before + 500;
            for seed in before..end {
                let statuses = pool.put(&chain(seed, 8));
                assert_eq!(statuses, [PutStatus::Stored; 8], "{case}, call {seed}");
            }
            assert!(disk.hits() > 0);
            for seed in end - 50..end {
                assert_eq!(pool.hits(&chain(seed, 8)), 8, "{case}, call {seed}");
            }
            store.local().unwrap().check_invariants().unwrap();
            flush_at_last(&store, &case);
            disk.clear_rules();
            for seed in end..end + 300 {
                let statuses = pool.put(&chain(seed, 8));
                assert_eq!(statuses, [PutStatus::Stored; 8], "{case}, then {seed}");
            }
            store.close().unwrap();
            let store = home.open();
            let pool = Pool::new(&store, "m", &[131_072]);
            for seed in end + 250..end + 300 {
                assert_eq!(pool.hits(&chain(seed, 8)), 8, "{case}, reopened {seed}");
            }
            assert_eq!(store.stats().damaged, 0, "{case}");
        }
    }
}

/// Flushes until the suspects of a failed sync have been written again.
fn flush_at_last(store: &dyn PageStore, case: &str) {
    let until = Instant::now() + PATIENCE;
    while let Err(why) = store.flush() {
        assert!(Instant::now() < until, "{case}: no flush is good: {why}");
        std::thread::yield_now();
    }
}

#[test]
fn row_06_segments_whose_descriptors_cannot_be_read_do_not_keep_others_from_being_emptied() {
    const BAD: u64 = 4;
    let home = Home::with_store(2 * SIZE);
    let (store, disk) = open_faulty(&home, OpenOptions::default());
    let pool = Pool::new(&store, "m", &[1 << 20]);
    disk.when(Fault::Fails(EIO), usize::MAX, |seen| match seen {
        // Descriptors are read up to the segment's end.
        Seen::Read { offset, bytes } if offset >= SEGMENTS_OFFSET => {
            let end = offset - SEGMENTS_OFFSET + bytes as u64;
            end.is_multiple_of(SEGMENT) && (3..3 + BAD).contains(&(end / SEGMENT))
        }
        _ => false,
    });
    // Five times the store's capacity.
    for seed in 0..70 {
        assert_eq!(
            pool.put(&chain(seed, 12)),
            [PutStatus::Stored; 12],
            "call {seed}"
        );
    }
    assert!(disk.hits() > 0);
    assert_eq!(pool.hits(&chain(69, 12)), 12);
    store.local().unwrap().check_invariants().unwrap();
}

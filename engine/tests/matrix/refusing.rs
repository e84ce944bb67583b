//! Parts of a device that fail for good, and the store goes on without: rows 6 and 7.

use larder_engine::format::SEGMENTS_OFFSET;
use larder_engine::{OpenOptions, PageStore, PutFailure, PutStatus};

use super::common::{Home, MIB, Pool, chain};
use super::faulty::{Fault, Seen};
use super::{SEGMENT, SIZE, open_faulty};

const EIO: i32 = 5;

#[test]
fn row_07_segments_whose_header_the_device_does_not_take_are_done_without() {
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
        // Three times what it keeps.
        for seed in 0..50 {
            // One that is written again may come into the next of them.
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
        store.check_invariants().unwrap();
        let kept = store.stats().usable_bytes;
        disk.calm();
        for seed in 50..60 {
            assert_eq!(pool.put(&chain(seed, 12)), [PutStatus::Stored; 12]);
        }
        store.flush().unwrap();
        assert!(kept < store.stats().usable_bytes);
    }
}

#[test]
fn row_07_pages_whose_volume_takes_no_writes_are_stored_on_another() {
    const VOLUMES: usize = 3;
    for failing in 0..VOLUMES {
        let home = Home::on_volumes(VOLUMES, 128 * MIB);
        let (store, disk) = open_faulty(&home, OpenOptions::default());
        let pool = Pool::new(&store, "m", &[131_072]);
        disk.when_on(Fault::Fails(EIO), usize::MAX, move |volume, seen| {
            volume == failing && matches!(seen, Seen::Write { .. })
        });
        // Where the namespace is written first a segment has begun whose groups wait for a header. A volume that has never taken
        // anything is done without for as long as one likes: several times what the two others keep.
        let calls = if failing == 0 { 50 } else { 600 };
        for seed in 0..calls {
            let statuses = pool.put(&chain(seed, 8));
            assert_eq!(statuses, [PutStatus::Stored; 8], "{failing}, call {seed}");
        }
        assert!(disk.hits() > 0);
        assert!((calls - 50..calls).all(|seed| pool.hits(&chain(seed, 8)) == 8));
        store.check_invariants().unwrap();
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
    // Five times what it keeps.
    for seed in 0..70 {
        assert_eq!(
            pool.put(&chain(seed, 12)),
            [PutStatus::Stored; 12],
            "call {seed}"
        );
    }
    assert!(disk.hits() > 0);
    assert_eq!(pool.hits(&chain(69, 12)), 12);
    store.check_invariants().unwrap();
}

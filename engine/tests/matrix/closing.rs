//! Stores that were closed in order: contents that vanish (row 30), and puts that failed (row 31).

use std::ops::ControlFlow;

use larder_engine::format::{BLOCK_BYTES, CLOSING_OFFSET, PageKey, SEGMENTS_OFFSET};
use larder_engine::{
    GetStatus, MissReason, OpenOptions, PageStore, PutFailure, PutOptions, PutStatus, Store,
};
use larder_offline::survey::{FlawReason, Survey, SurveyOptions};
use larder_offline::{Repair, repair};

use super::common::faulty::{Fault, Seen, open_faulty};
use super::common::{Home, MIB, Pool, chain};
use super::{SEGMENT, SIZE, write};

/// Pages of 1 MiB that fill a segment.
const CHAIN: usize = 15;

fn pool(store: &Store) -> Pool<'_> {
    Pool::new(store, "m", &[1 << 20])
}

/// A closed store whose first segments are full of pages: a chain in each.
fn closed(chains: u64) -> (Home, Vec<PageKey>) {
    let home = Home::with_store(2 * SIZE);
    let store = home.open();
    let keys: Vec<PageKey> = (0..chains).flat_map(|seed| chain(seed, CHAIN)).collect();
    for keys in keys.chunks(CHAIN) {
        assert_eq!(pool(&store).put(keys), [PutStatus::Stored; CHAIN]);
    }
    store.close().unwrap();
    (home, keys)
}

/// The flaws of a survey, the pages with wrong bytes, and the number of unfinished pages.
fn verified(home: &Home) -> (Survey, Vec<larder_offline::survey::BadPage>, u64) {
    let survey = Survey::new(&home.path, &SurveyOptions::default()).unwrap();
    let mut bad = Vec::new();
    let payloads = survey
        .check_payloads(|_| ControlFlow::Continue(()), |page| bad.push(page))
        .unwrap();
    (survey, bad, payloads.unfinished)
}

fn repaired(home: &Home, survey: Survey, bad: &[larder_offline::survey::BadPage]) {
    let plan = Repair::plan(&survey, bad);
    drop(survey);
    assert!(plan.beyond.is_empty(), "{plan:?}");
    let mut progress = |_, _| ControlFlow::Continue(());
    repair(&home.path, &OpenOptions::default(), &plan, &mut progress).unwrap();
    let (survey, bad, unfinished) = verified(home);
    assert_eq!((survey.flaws.len(), bad.len(), unfinished), (0, 0, 0));
}

fn segment(number: u64) -> u64 {
    SEGMENTS_OFFSET + number * SEGMENT
}

#[test]
fn row_30_segments_that_become_zeros_are_missed_and_their_pages_counted() {
    for lost in [1, 2, 5] {
        let (home, keys) = closed(6);
        let zeros = vec![0; usize::try_from(SEGMENT).unwrap()];
        (1..=lost).for_each(|number| write(&home.path, segment(number), &zeros));
        let pages = lost * CHAIN as u64;
        let (survey, bad, _) = verified(&home);
        let flaws: Vec<&FlawReason> = survey.flaws.iter().map(|flaw| &flaw.reason).collect();
        let [
            FlawReason::LostContents {
                segments,
                pages: gone,
            },
        ] = flaws[..]
        else {
            panic!("{flaws:?}");
        };
        assert_eq!((u64::from(*segments), *gone), (lost, pages));
        assert_eq!(survey.losses().map(|losses| losses.segments), Some(lost));
        assert!(bad.is_empty());
        {
            let store = home.open();
            assert_eq!(store.stats().damaged, pages, "counted at the open");
            assert_eq!(pool(&store).hits(&keys), keys.len() - lost as usize * CHAIN);
            // Left as by a crash: the statement counts no more, and nothing is counted twice.
        }
        let store = home.open();
        assert_eq!(store.stats().damaged, 0);
        store.close().unwrap();
        let (survey, bad, _) = verified(&home);
        assert!(survey.flaws.is_empty() && bad.is_empty());
    }
}

#[test]
fn row_30_lost_contents_are_repaired_once() {
    let (home, _) = closed(4);
    write(
        &home.path,
        segment(2),
        &vec![0; usize::try_from(SEGMENT).unwrap()],
    );
    let (survey, bad, _) = verified(&home);
    repaired(&home, survey, &bad);
}

#[test]
fn row_30_wrong_bytes_behind_a_lost_header_are_damage_and_repair_drops_them() {
    // From the middle of a segment's pages over the next segment's header to its middle.
    for (from, bytes) in [(SEGMENT / 2, SEGMENT), (SEGMENT - 3 * MIB, 7 * MIB)] {
        let (home, keys) = closed(5);
        let garbage: Vec<u8> = (0..bytes).map(|at| (at * 31 % 251) as u8 | 1).collect();
        write(&home.path, segment(1) + from, &garbage);
        let (survey, bad, unfinished) = verified(&home);
        assert_eq!(unfinished, 0, "no crash was");
        assert!(!bad.is_empty() && !survey.flaws.is_empty());
        {
            let store = home.open();
            let statuses = pool(&store).get(&keys);
            let unfinished = GetStatus::Miss(MissReason::Unfinished);
            assert!(!statuses.contains(&unfinished), "no crash was");
            let stats = store.stats();
            let misses = statuses.iter().filter(|status| !status.is_hit()).count();
            assert_eq!(stats.damaged, misses as u64, "each lost page is counted");
            assert_eq!(stats.unfinished, 0);
        }
        let (home, keys) = closed(5);
        write(&home.path, segment(1) + from, &garbage);
        let (survey, bad, _) = verified(&home);
        repaired(&home, survey, &bad);
        let store = home.open();
        let there = store.contains(pool(&store).id, &keys);
        let there = there.iter().filter(|there| **there).count();
        assert_eq!(pool(&store).hits(&keys), there, "no bad page is live");
    }
}

#[test]
fn row_30_a_statement_counts_for_its_own_close_alone() {
    let (home, keys) = closed(3);
    let mut statement = vec![0; BLOCK_BYTES];
    let file = std::fs::File::open(&home.path).unwrap();
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut statement, CLOSING_OFFSET).unwrap();
    {
        let store = home.open();
        let more = chain(77, CHAIN);
        assert_eq!(pool(&store).put(&more), [PutStatus::Stored; CHAIN]);
        store.close().unwrap();
    }
    // The statement of the former close, in place of that of the last one.
    write(&home.path, CLOSING_OFFSET, &statement);
    let (survey, _, _) = verified(&home);
    assert!(survey.flaws.is_empty(), "{:?}", survey.flaws);
    drop(survey);
    // A store of a release without statements has zeros there.
    write(&home.path, CLOSING_OFFSET, &[0; BLOCK_BYTES]);
    let store = home.open();
    assert_eq!(pool(&store).hits(&keys), keys.len());
    store.close().unwrap();
    // A spoilt one is named, and the next close writes it anew.
    write(&home.path, CLOSING_OFFSET + 50, &[0x5a; 7]);
    let (survey, _, _) = verified(&home);
    let is_named = |reason: &FlawReason| matches!(reason, FlawReason::ClosingStatement(_));
    assert!(survey.flaws.len() == 1 && is_named(&survey.flaws[0].reason));
    drop(survey);
    home.open().close().unwrap();
    assert!(verified(&home).0.flaws.is_empty());
}

/// Bytes of a page whose write differs from every other write: a write probe has 1 MiB.
const ODD: u32 = 3 << 19;

fn odd_pool(store: &Store) -> Pool<'_> {
    Pool::new(store, "m", &[ODD])
}

/// Whether it is a write of such a page.
fn is_odd_write(seen: Seen) -> bool {
    matches!(seen, Seen::Write { bytes, .. } if bytes == ODD as usize)
}

/// A store whose last put failed: some of its writes of page data are refused, all descriptors are
/// written. Pages that are unproven at first may be among the keys.
fn failed_put(home: &Home, keys: &[PageKey], errno: i32) -> Vec<PutStatus> {
    let (store, disk) = open_faulty(home, OpenOptions::default());
    let pool = odd_pool(&store);
    assert_eq!(pool.put(&chain(500, 3)), [PutStatus::Stored; 3]);
    disk.when(Fault::Fails(errno), usize::MAX, is_odd_write);
    let statuses = pool.put_from(keys, 0, PutOptions::default());
    disk.clear_rules();
    assert!(store.contains(pool.id, keys).iter().all(|there| !there));
    store.close().unwrap();
    statuses
}

#[test]
fn row_31_pages_whose_put_failed_are_absent_after_an_orderly_close() {
    for errno in [libc::EIO, libc::ETIMEDOUT, libc::ENOSPC] {
        let home = Home::with_store(2 * SIZE);
        let keys = chain(1, 9);
        let statuses = failed_put(&home, &keys, errno);
        let failed = PutStatus::Failed(PutFailure::Write);
        assert!(statuses.contains(&failed), "{statuses:?}");
        for _ in 0..2 {
            let store = home.open();
            let pool = odd_pool(&store);
            assert_eq!(store.contains(pool.id, &keys), [false; 9], "error {errno}");
            assert_eq!(store.longest_prefix(pool.id, &keys), 0);
            assert_eq!(pool.hits(&chain(500, 3)), 3);
            store.close().unwrap();
        }
        // They can be put again, and stay.
        let store = home.open();
        assert_eq!(odd_pool(&store).put(&keys), [PutStatus::Stored; 9]);
        store.close().unwrap();
        let store = home.open();
        assert_eq!(odd_pool(&store).hits(&keys), 9);
    }
}

#[test]
fn row_31_a_failed_put_leaves_the_older_page_of_its_key() {
    let home = Home::with_store(2 * SIZE);
    let keys = chain(1, 5);
    {
        let store = home.open();
        assert_eq!(odd_pool(&store).put(&keys), [PutStatus::Stored; 5]);
        // Left as by a crash: the pages are unproven, and a put writes them again.
    }
    {
        let (store, disk) = open_faulty(&home, OpenOptions::default());
        assert!(store.stats().unproven > 0);
        disk.when(Fault::Fails(libc::EIO), usize::MAX, is_odd_write);
        let statuses = odd_pool(&store).put_from(&keys, 0, PutOptions::default());
        assert!(statuses.contains(&PutStatus::Failed(PutFailure::Write)));
        disk.clear_rules();
        store.close().unwrap();
    }
    let store = home.open();
    assert_eq!(odd_pool(&store).hits(&keys), 5);
}

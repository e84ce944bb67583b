//! Repair and compaction through the public interface, on real files.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::path::Path;

use common::{Home, MIB, Pool, chain};
use larder_engine::format::{PageKey, SEGMENTS_OFFSET};
use larder_engine::{CreateOptions, OpenOptions, PageStore, PutOptions, Store, StoreError, create};
use larder_offline::survey::{Survey, SurveyOptions};
use larder_offline::{Compacted, compact, copy_into};
use larder_store::share::Inside;

const PARTS: &[u32] = &[65536];

/// Puts the chains page by page in turns, so that no two pages of one chain are adjacent.
fn put_in_turns(pool: &Pool<'_>, chains: &[Vec<PageKey>]) {
    let pages = chains.iter().map(Vec::len).max().unwrap_or(0);
    for page in 0..pages {
        for keys in chains.iter().filter(|keys| keys.len() > page) {
            pool.put_from(&keys[..=page], page, PutOptions::default());
        }
    }
}

fn chains(count: u64, pages: usize) -> Vec<Vec<PageKey>> {
    (1..=count).map(|seed| chain(seed, pages)).collect()
}

fn home_with(chains: &[Vec<PageKey>], size: u64) -> Home {
    let home = Home::with_store(size);
    let store = home.open();
    put_in_turns(&Pool::new(&store, "m", PARTS), chains);
    store.close().unwrap();
    home
}

fn compact_all(path: &Path) -> Compacted {
    let mut progress = |_, _| ControlFlow::Continue(());
    compact(path, &OpenOptions::default(), false, &mut progress).unwrap()
}

fn survey(path: &Path) -> Survey {
    Survey::new(path, &SurveyOptions::default()).unwrap()
}

/// Pages in a row, on average.
fn mean_run(path: &Path) -> f64 {
    survey(path).chains()[0].mean_run_pages()
}

/// Parts of the chains without a missing page: the fewest possible rows.
fn unbroken(chains: &[Vec<PageKey>], pages: &[PageKey]) -> u64 {
    let pages: HashSet<&PageKey> = pages.iter().collect();
    let parts = |keys: &Vec<PageKey>| {
        let parts = keys.chunk_by(|key, next| pages.contains(key) == pages.contains(next));
        parts.filter(|part| pages.contains(&part[0])).count() as u64
    };
    chains.iter().map(parts).sum()
}

fn dead_bytes(path: &Path) -> u64 {
    let survey = survey(path);
    survey
        .segments
        .iter()
        .map(|facts| facts.data_bytes.saturating_sub(facts.live_bytes))
        .sum()
}

/// Opens the store and reads every page.
#[track_caller]
fn assert_all_there(home: &Home, chains: &[Vec<PageKey>]) {
    let store = home.open();
    let pool = Pool::new(&store, "m", PARTS);
    for keys in chains {
        assert_eq!(store.longest_prefix(pool.id, keys), keys.len());
        assert_eq!(pool.hits(keys), keys.len());
    }
    store.local().unwrap().check_invariants().unwrap();
    store.close().unwrap();
}

#[test]
fn compaction_puts_interleaved_chains_in_a_row_and_keeps_every_page_bit_exact() {
    let chains = chains(8, 64);
    let home = home_with(&chains, 256 * MIB);
    assert!(mean_run(&home.path) < 1.5);
    let done = compact_all(&home.path);
    assert_eq!((done.planned_pages, done.moved_pages), (512, 512));
    assert_eq!((done.left_pages, done.damaged_pages), (0, 0));
    // 64 pages are a quarter of a segment: at most every fourth chain is cut by the end of a
    // segment.
    assert!(mean_run(&home.path) > 40.0, "{}", mean_run(&home.path));
    assert_eq!(dead_bytes(&home.path), 0);
    assert_all_there(&home, &chains);
}

#[test]
fn a_second_compaction_finds_nothing_to_do_and_writes_nothing() {
    let home = home_with(&chains(8, 64), 256 * MIB);
    compact_all(&home.path);
    let before = std::fs::read(&home.path).unwrap();
    let done = compact_all(&home.path);
    assert_eq!(done, Compacted::default());
    assert!(before == std::fs::read(&home.path).unwrap());
}

#[test]
fn a_dry_run_plans_the_same_and_leaves_every_byte_alone() {
    let home = home_with(&chains(8, 32), 256 * MIB);
    let before = std::fs::read(&home.path).unwrap();
    let mut progress = |_, _| ControlFlow::Continue(());
    let dry = compact(&home.path, &OpenOptions::default(), true, &mut progress).unwrap();
    assert_eq!((dry.planned_pages, dry.moved_pages), (256, 0));
    assert!(before == std::fs::read(&home.path).unwrap());
    let done = compact_all(&home.path);
    assert_eq!(done.planned_pages, dry.planned_pages);
}

#[test]
fn a_nearly_full_store_is_put_in_order_with_the_little_room_it_has() {
    // Of 12 segments' room 8 are usable: 2,000 pages of 64 KiB fill them, and leave 4 segments or
    // fewer to work with.
    let chains = chains(20, 100);
    let home = home_with(&chains, 2 * MIB + 12 * 16 * MIB);
    let live = survey(&home.path).live().len();
    let done = compact_all(&home.path);
    assert_eq!(done.left_pages, 0, "{done:?}");
    // With more room no page would have had to make way.
    assert!(done.moved_pages > done.planned_pages, "{done:?}");
    assert!(
        dead_bytes(&home.path) < 2 * MIB,
        "{}",
        dead_bytes(&home.path)
    );
    assert_eq!(survey(&home.path).live().len(), live);
    assert!(mean_run(&home.path) > 30.0, "{}", mean_run(&home.path));
    let store = home.open();
    let pool = Pool::new(&store, "m", PARTS);
    let hits: usize = chains.iter().map(|keys| pool.hits(keys)).sum();
    assert_eq!(hits, live);
}

#[test]
fn a_store_that_has_evicted_for_long_keeps_all_that_it_has() {
    const SEGMENTS: u64 = 10;
    let chains = chains(40, 100);
    let home = home_with(&chains, 2 * MIB + SEGMENTS * 16 * MIB);
    let keys = |survey: &Survey| -> Vec<PageKey> { survey.live().map(|page| page.key).collect() };
    let before = keys(&survey(&home.path));
    assert!(before.len() < 1700, "nothing was evicted");
    let done = compact_all(&home.path);
    assert_eq!(done.left_pages, 0, "{done:?}");
    assert_eq!(keys(&survey(&home.path)), before);
    // The rest of each chain depends on when reclaim ran, and the length of rows with it. A row may
    // have one gap, and ends where a segment ends.
    let rows = survey(&home.path).chains()[0].runs;
    let most = 2 * unbroken(&chains, &before) + SEGMENTS;
    assert!(rows <= most, "{rows} > {most}: {done:?}");
    assert!(
        dead_bytes(&home.path) < 2 * MIB,
        "{}",
        dead_bytes(&home.path)
    );
    // Nor is there any page that the store would have to evict when it is used again.
    let store = home.open();
    let pool = Pool::new(&store, "m", PARTS);
    assert_eq!(pool.hits(&before), before.len());
    assert_eq!(store.stats().evicted, 0);
}

#[test]
fn a_nearly_full_store_is_in_order_after_a_few_compactions() {
    // More than the store keeps: the rest of the chains lies between holes, and there is room for a
    // segment or two. Pages that have to make way leave some work to do.
    let home = home_with(&chains(60, 100), 2 * MIB + 20 * 16 * MIB);
    let compactions = (0..8).map(|_| compact_all(&home.path));
    let moved: Vec<u64> = compactions.map(|done| done.moved_pages).collect();
    assert!(moved[0] > 0 && moved[1] < moved[0] / 2, "{moved:?}");
    assert_eq!(moved[7], 0, "{moved:?}");
}

#[test]
fn progress_is_reported_while_room_is_made_too() {
    let home = home_with(&chains(60, 100), 2 * MIB + 20 * 16 * MIB);
    let mut reported = Vec::new();
    let mut progress = |moved: u64, _| {
        reported.push(moved);
        ControlFlow::Continue(())
    };
    compact(&home.path, &OpenOptions::default(), false, &mut progress).unwrap();
    // Pages that make way are not in their order yet.
    assert!(
        reported.windows(2).any(|pair| pair[0] == pair[1]),
        "{reported:?}"
    );
}

#[test]
fn chains_on_two_volumes_lie_in_long_rows_on_each() {
    let home = Home::new();
    let options = CreateOptions::new(2 * (2 * MIB + 10 * 16 * MIB)).with(|o| {
        o.segment_size = Some(16 * MIB);
        o.volumes = vec![home.directory.path().join("second")];
    });
    create(&home.path, &options).unwrap();
    let chains = chains(6, 120);
    let store = home.open();
    put_in_turns(&Pool::new(&store, "m", PARTS), &chains);
    store.close().unwrap();
    compact_all(&home.path);
    // A volume gets 4 MiB at a time, which are 64 pages.
    assert!(mean_run(&home.path) > 30.0, "{}", mean_run(&home.path));
    assert_eq!(compact_all(&home.path), Compacted::default());
    assert_all_there(&home, &chains);
}

#[test]
fn a_chain_in_order_stays_where_it_is_while_scattered_ones_move() {
    let home = Home::with_store(256 * MIB);
    let scattered = chains(4, 50);
    let whole = chain(99, 400);
    let store = home.open();
    let pool = Pool::new(&store, "m", PARTS);
    pool.put(&whole);
    put_in_turns(&pool, &scattered);
    store.close().unwrap();
    let done = compact_all(&home.path);
    // Of the chain in order, only pages that share a segment with scattered ones may move.
    assert!((200..400).contains(&done.moved_pages), "{done:?}");
    let mut all = scattered;
    all.push(whole);
    assert_all_there(&home, &all);
}

#[test]
fn dead_space_is_released_and_deleted_pages_stay_deleted() {
    let chains = chains(6, 128);
    let home = Home::with_store(256 * MIB);
    let store = home.open();
    let pool = Pool::new(&store, "m", PARTS);
    for keys in &chains {
        pool.put(keys);
    }
    for keys in &chains[..4] {
        assert_eq!(store.delete(pool.id, &keys[32..]).unwrap(), 96);
    }
    store.close().unwrap();
    let before = survey(&home.path);
    assert!(dead_bytes(&home.path) > 20 * MIB);
    let done = compact_all(&home.path);
    assert!(done.freed_segments >= 1, "{done:?}");
    let after = survey(&home.path);
    assert_eq!(after.live().len(), before.live().len());
    assert!(dead_bytes(&home.path) < MIB);
    let births = |survey: &Survey| -> Vec<_> {
        let live = survey.live();
        live.map(|page| (page.key, page.birth)).collect()
    };
    assert_eq!(births(&before), births(&after));
    drop((before, after));
    // Not closed, so that the next open recovers every record there is.
    drop(home.open());
    let store = home.open();
    let pool = Pool::new(&store, "m", PARTS);
    for keys in &chains[..4] {
        assert_eq!(store.longest_prefix(pool.id, keys), 32);
        assert_eq!(pool.hits(&keys[32..]), 0);
    }
}

#[test]
fn a_header_torn_by_a_crash_does_not_prevent_compaction() {
    use std::os::unix::fs::FileExt;
    for copy in 0..2 {
        let chains = chains(4, 40);
        let home = Home::with_store(256 * MIB);
        let store = home.open();
        put_in_turns(&Pool::new(&store, "m", PARTS), &chains);
        drop(store);
        let file = std::fs::File::options()
            .write(true)
            .open(&home.path)
            .unwrap();
        let torn = SEGMENTS_OFFSET + copy * 4096 + 100;
        file.write_all_at(&[0xa5], torn).unwrap();
        let found = survey(&home.path);
        assert_eq!((found.flaws.len(), found.unfinished_blocks), (0, 1));
        assert!(compact_all(&home.path).moved_pages > 0);
        assert_eq!(survey(&home.path).unfinished_blocks, 0);
        assert_all_there(&home, &chains);
    }
}

#[test]
fn after_a_crash_unproven_pages_are_moved_if_whole_and_dropped_if_not() {
    use std::os::unix::fs::FileExt;
    let chains = chains(4, 40);
    let home = Home::with_store(256 * MIB);
    let store = home
        .open_with(OpenOptions::default().with(|o| o.sync = larder_engine::SyncPolicy::Relaxed));
    put_in_turns(&Pool::new(&store, "m", PARTS), &chains);
    drop(store);
    let last = chains[3][39];
    let offset = survey(&home.path)
        .live()
        .find(|page| page.key == last)
        .unwrap()
        .offset;
    let file = std::fs::File::options()
        .write(true)
        .open(&home.path)
        .unwrap();
    file.write_all_at(&[0x77; 100], offset + 5000).unwrap();
    let done = compact_all(&home.path);
    assert_eq!((done.unfinished_pages, done.damaged_pages), (1, 0));
    assert!(survey(&home.path).live().all(|page| page.proven));
    let mut left = chains;
    left[3].pop();
    assert_all_there(&home, &left);
    let store = home.open();
    assert_eq!(Pool::new(&store, "m", PARTS).hits(&[last]), 0);
}

#[test]
fn a_compaction_that_is_asked_to_end_leaves_a_closed_store_and_the_next_one_goes_on() {
    let chains = chains(8, 128);
    let home = home_with(&chains, 512 * MIB);
    let mut progress = |_, _| ControlFlow::Break(());
    // The last written pages are in a segment that is open, and has to be emptied as well.
    {
        let store = home.open();
        let pool = Pool::new(&store, "m", PARTS);
        let of_each: Vec<PageKey> = chains.iter().map(|chain| chain[127]).collect();
        assert_eq!(store.delete(pool.id, &of_each[..4]).unwrap(), 4);
        assert_eq!(store.delete(pool.id, &of_each[4..]).unwrap(), 4);
        store.close().unwrap();
    }
    let chains: Vec<Vec<PageKey>> = chains.iter().map(|chain| chain[..127].to_vec()).collect();
    let done = compact(&home.path, &OpenOptions::default(), false, &mut progress).unwrap();
    assert!(done.interrupted && done.left_pages > 0 && done.moved_pages > 0);
    assert_eq!(
        survey(&home.path).condition,
        larder_offline::survey::Condition::Clean
    );
    // A read-only handle relies on headers alone.
    {
        let reader = home.open_with(OpenOptions::default().with(|o| o.read_only = true));
        let pool = Pool::new(&reader, "m", PARTS);
        assert_eq!(
            chains.iter().map(|chain| pool.hits(chain)).sum::<usize>(),
            8 * 127
        );
    }
    let done = compact_all(&home.path);
    assert_eq!(done.left_pages, 0);
    assert!(mean_run(&home.path) > 60.0);
    assert_all_there(&home, &chains);
}

#[test]
fn branches_of_one_prompt_follow_their_parents() {
    let home = Home::with_store(256 * MIB);
    let store = home.open();
    let pool = Pool::new(&store, "m", PARTS);
    // Conversations that share their first 20 pages and then continue separately, turn by turn.
    let prompt: Vec<u64> = (0..20).collect();
    let conversations: Vec<Vec<PageKey>> = (1..=5_u64)
        .map(|seed| {
            let own = (0..30 + seed).map(|page| seed << 24 | page);
            let tokens: Vec<u64> = prompt.iter().copied().chain(own).collect();
            larder_engine::format::page_keys(
                &tokens,
                std::num::NonZeroUsize::MIN,
                None,
                larder_engine::format::TokenUnits::Single,
            )
        })
        .collect();
    put_in_turns(&pool, &conversations);
    store.close().unwrap();
    compact_all(&home.path);
    let facts = survey(&home.path).chains()[0];
    assert_eq!((facts.pages, facts.heads, facts.longest), (185, 1, 55));
    // One row for each conversation.
    assert!((5..=6).contains(&facts.runs), "{facts:?}");
    assert_all_there(&home, &conversations);
}

#[test]
fn pages_too_large_to_fill_a_segment_are_not_moved_again_and_again() {
    let home = Home::with_store(512 * MIB);
    let store = home.open();
    // 3 pages of 5 MiB fit a segment of 16.
    let pool = Pool::new(&store, "large", &[5 << 20]);
    let chains = chains(3, 6);
    for page in 0..6 {
        for keys in &chains {
            pool.put_from(&keys[..=page], page, PutOptions::default());
        }
    }
    store.close().unwrap();
    assert_eq!(compact_all(&home.path).left_pages, 0);
    assert_eq!(compact_all(&home.path), Compacted::default());
    let store = home.open();
    let pool = Pool::new(&store, "large", &[5 << 20]);
    for keys in &chains {
        assert_eq!(pool.hits(keys), 6);
    }
}

/// A store with this segment size.
fn home_of(size: u64, segment_size: u64) -> Home {
    let home = Home::new();
    let options = CreateOptions::new(size).with(|o| {
        o.segment_size = Some(segment_size);
    });
    create(&home.path, &options).unwrap();
    home
}

#[test]
fn pages_larger_than_all_that_is_moved_at_once_are_moved_too() {
    // 2 pages fit a segment.
    let home = home_of(1024 * MIB, 72 * MIB);
    let store = home.open();
    let pool = Pool::new(&store, "huge", &[33 << 20]);
    let chains = chains(1, 6);
    put_in_turns(&pool, &chains);
    let gone = [chains[0][1], chains[0][3]];
    assert_eq!(store.delete(pool.id, &gone).unwrap(), 2);
    store.close().unwrap();
    let done = compact_all(&home.path);
    assert!(done.moved_pages > 0 && done.left_pages == 0, "{done:?}");
    assert_eq!(compact_all(&home.path), Compacted::default());
}

#[test]
fn pages_dropped_for_lack_of_room_in_a_new_store_are_counted() {
    let home = Home::with_store(512 * MIB);
    let store = home.open();
    // 2 pages fit a segment of 16 MiB.
    put_in_turns(&Pool::new(&store, "large", &[13 << 19]), &chains(2, 12));
    store.close().unwrap();
    let small = home_of(192 * MIB, 16 * MIB);
    let target = small.open();
    let mut progress = |_, _| ControlFlow::Continue(());
    let copied = copy_into(&survey(&home.path), &target, &mut progress).unwrap();
    let pages = target.stats().pages;
    target.close().unwrap();
    let (refused, evicted) = (copied.refused_pages, copied.evicted_pages);
    assert!(
        refused + evicted > 0 && pages == 24 - refused - evicted,
        "{copied:?}, {pages}"
    );
}

#[test]
fn a_store_in_use_is_refused_with_the_name_of_its_holder() {
    let home = home_with(&chains(2, 4), 256 * MIB);
    let store = home.open();
    let mut progress = |_, _| ControlFlow::Continue(());
    let refused = compact(&home.path, &OpenOptions::default(), false, &mut progress);
    assert!(
        matches!(&refused, Err(StoreError::Locked { holder, .. })
            if holder.pid == std::process::id()),
        "{refused:?}"
    );
    store.close().unwrap();
}

#[test]
fn a_copy_into_a_new_store_holds_the_same_pages_in_order() {
    let chains = chains(5, 60);
    let home = home_with(&chains, 256 * MIB);
    let new = home.directory.path().join("new");
    let options = CreateOptions::new(256 * MIB).with(|o| {
        o.segment_size = Some(16 * MIB);
    });
    create(&new, &options).unwrap();
    let before = std::fs::read(&home.path).unwrap();
    let target = Store::open(&new, OpenOptions::default()).unwrap();
    let mut progress = |_, _| ControlFlow::Continue(());
    let copied = copy_into(&survey(&home.path), &target, &mut progress).unwrap();
    assert_eq!((copied.pages, copied.refused_pages), (300, 0));
    target.close().unwrap();
    assert!(before == std::fs::read(&home.path).unwrap());
    assert!(mean_run(&new) > 30.0);
    let copy = Home {
        directory: home.directory,
        path: new,
    };
    assert_all_there(&copy, &chains);
}

//! Offline commands on a store whose pages the codec made smaller: they move stored bytes.

use larder_engine::PageStore;
use larder_format::PageKey;

use crate::beside::{end, serve};
use crate::home::{PAGE_BYTES, Pool, block_offset};
use crate::support::home::Home;
use crate::support::{chain, ends, flip, text};

fn chains() -> Vec<Vec<PageKey>> {
    (1..=9).map(|seed| chain(seed, 60)).collect()
}

/// Chains that were put in turns.
fn scattered(further: &[&str]) -> Home {
    let home = Home::with_volumes(further);
    let store = home.open();
    Pool::smooth(&store).put_in_turns(&chains());
    store.close().unwrap();
    let document = home.json("inspect", &[], 0);
    let stored = document["live_bytes"].as_u64().unwrap();
    assert!(stored * 6 < 540 * u64::from(PAGE_BYTES) * 5, "{stored}");
    home
}

/// The store is sound, and has so many of the pages with their bytes.
#[track_caller]
fn has(home: &Home, pages: usize) {
    let document = home.json("verify", &["--deep"], 0);
    assert_eq!(document["deep"]["good_pages"], pages);
    let store = home.open();
    assert_eq!(Pool::smooth(&store).hits(&chains().concat()), pages);
    store.close().unwrap();
}

#[test]
fn a_compaction_moves_encoded_pages() {
    let home = scattered(&[]);
    let done = home.report("compact", &[], 0);
    assert_eq!(done["in_place"]["pages_moved"], 540, "{done:#}");
    has(&home, 540);
    let again = home.report("compact", &[], 0);
    assert_eq!(again["in_place"]["planned_pages"], 0, "{again:#}");
}

#[test]
fn so_does_one_of_a_store_in_use() {
    let home = scattered(&[]);
    let owner = serve(&home);
    home.says("compact", &[], 0, &["540 pages"]);
    end(owner);
    has(&home, 540);
}

#[test]
fn encoded_pages_of_a_retired_volume_move_to_the_others() {
    let home = scattered(&["second"]);
    let second = home.beside("second");
    ends(&["volume", "retire", text(&home.path), text(&second)], 0);
    has(&home, 540);
}

#[test]
fn a_repair_keeps_the_encoded_pages_around_the_damage() {
    let home = scattered(&[]);
    let keys = chains().concat();
    flip(&home.path, home.offset_of(&keys[77]) + 20_000);
    let (segment, blocks) = home.written_segment();
    flip(&home.path, block_offset(segment, blocks - 1) + 200);
    let damaged = home.json("verify", &["--deep"], 1);
    let good = damaged["deep"]["good_pages"].as_u64().unwrap();
    assert!((500..540).contains(&good), "{damaged:#}");
    home.json("verify", &["--repair", "--deep"], 0);
    has(&home, usize::try_from(good).unwrap());
}

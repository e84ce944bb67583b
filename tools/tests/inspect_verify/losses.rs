//! Whole segments and volumes lost: named as damage, and the losses summed up per namespace.

use std::fs::File;
use std::os::unix::fs::FileExt;

use larder_engine::PageStore;
use larder_format::SEGMENTS_OFFSET;
use serde_json::Value;

use crate::home::{BLOCK_BYTES, Pool, block_offset, finding};
use crate::support::home::{Home, SEGMENT_BYTES};
use crate::support::{chain, ends, overwrite, report, text};

/// Pages of a chain that fills more than three segments.
const PAGES: u64 = 900;

/// Bytes that no structure of a store begins with.
fn noise(bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| (at % 253) as u8 | 1).collect()
}

/// Overwrites the whole of a segment.
fn lose(home: &Home, segment: u64) {
    let offset = SEGMENTS_OFFSET + segment * SEGMENT_BYTES;
    overwrite(&home.path, offset, &noise(SEGMENT_BYTES));
}

/// The segment that holds a page.
fn segment_of(home: &Home, key: &larder_format::PageKey) -> u64 {
    (home.offset_of(key) - SEGMENTS_OFFSET) / SEGMENT_BYTES
}

/// The only namespace's losses.
fn losses(document: &Value) -> &Value {
    let rows = document["losses"]["namespaces"].as_array().unwrap();
    assert_eq!(rows.len(), 1, "{document:#}");
    &rows[0]
}

#[test]
fn a_segment_of_foreign_bytes_is_damage_and_its_pages_are_counted_as_lost() {
    let home = Home::new();
    let keys = chain(1, PAGES);
    home.with(|pool| pool.put(&keys));
    lose(&home, segment_of(&home, &keys[450]));
    for command in ["inspect", "verify"] {
        let document = home.json(command, &[], 1);
        assert_eq!(finding(&document)["kind"], "lost_segment", "{command}");
        let left = document["pages"].as_u64().unwrap();
        assert!(0 < left && left < PAGES, "{left} pages are left");
        assert_eq!(losses(&document)["lost_pages"], PAGES - left);
        assert_eq!(document["losses"]["lost_segments"], 1);
        home.says(command, &[], 1, &["Lost", "at least", "tiny"]);
    }
    let states = &home.json("inspect", &[], 1)["segment_states"];
    assert_eq!(states["lost"], 1);
    home.says(
        "verify",
        &["--deep", "--repair"],
        0,
        &["Lost", "1 segment;"],
    );
    let mended = home.json("verify", &["--deep"], 0);
    assert_eq!(mended["losses"], Value::Null);
}

#[test]
fn foreign_bytes_over_the_headers_and_the_first_descriptor_block_cost_that_blocks_pages_alone() {
    let home = Home::new();
    home.with(|pool| (1..=3).for_each(|seed| pool.put(&chain(seed, 50))));
    let (segment, blocks) = home.written_segment();
    assert!(blocks > 2);
    overwrite(&home.path, segment, &noise(2 * BLOCK_BYTES));
    let first = block_offset(segment, 0);
    overwrite(&home.path, first, &noise(BLOCK_BYTES));
    let document = home.json("verify", &["--deep"], 1);
    let pages = document["pages"].as_u64().unwrap();
    assert!(pages >= 100, "{pages} pages are left");
    assert_eq!(document["deep"]["good_pages"], pages);
    ends(&["verify", text(&home.path), "--repair"], 0);
    assert_eq!(home.json("verify", &["--deep"], 0)["pages"], pages);
}

#[test]
fn pages_that_a_lost_deletion_brings_back_are_counted() {
    let home = Home::new();
    let (deleted, later) = (chain(1, 20), chain(2, 300));
    home.with(|pool| pool.put(&deleted));
    home.with(|pool| pool.put(&later));
    home.with(|pool| {
        // The records of these lie behind the pages of a chain that has filled the first segment.
        deleted.iter().rev().for_each(|key| pool.delete(*key));
    });
    let document = home.json("inspect", &["--segments"], 0);
    assert_eq!(document["pages"], 300);
    let first = segment_of(&home, &later[0]);
    let last = segment_of(&home, &later[299]);
    assert_ne!(first, last);
    lose(&home, last);
    let document = home.json("verify", &[], 1);
    let pages = document["pages"].as_u64().unwrap();
    let revived = losses(&document)["doubtful_pages"].as_u64().unwrap();
    assert!(
        pages > 20 && revived >= 20 && revived <= pages,
        "{document:#}"
    );
    let said = [
        "Lost",
        "an unknown number of pages",
        "may have been deleted earlier",
    ];
    home.says("verify", &[], 1, &said);
    home.says("inspect", &[], 1, &said);
}

#[test]
fn a_cleared_namespace_that_a_lost_record_brings_back_is_damage_and_counted() {
    let home = Home::new();
    home.with(|pool| pool.put(&chain(1, 20)));
    home.with(|pool| {
        pool.clear();
        pool.put(&chain(2, 30));
    });
    let document = home.json("inspect", &["--segments"], 0);
    assert_eq!(document["pages"], 30);
    let (segment, blocks) = home.written_segment();
    // The block of the clear is the one without which the cleared pages count again.
    let comes_back = (1..blocks).find(|index| {
        let offset = block_offset(segment, *index);
        let mut whole = vec![0; BLOCK_BYTES as usize];
        let file = File::open(&home.path).unwrap();
        file.read_exact_at(&mut whole, offset).unwrap();
        overwrite(&home.path, offset, &noise(BLOCK_BYTES));
        let found = home.json("verify", &[], 1);
        let is_it = found["pages"] == 50;
        if is_it {
            assert_eq!(losses(&found)["doubtful_pages"], 20);
        }
        overwrite(&home.path, offset, &whole);
        is_it
    });
    assert!(comes_back.is_some());
}

#[test]
fn pages_written_after_the_damage_are_not_doubtful() {
    let home = Home::new();
    home.with(|pool| (1..=3).for_each(|seed| pool.put(&chain(seed, 20))));
    let (segment, _) = home.written_segment();
    // Block 0 tells of the namespace, each further one of a chain.
    overwrite(&home.path, block_offset(segment, 2), &noise(BLOCK_BYTES));
    let document = home.json("verify", &[], 1);
    assert_eq!(document["pages"], 40);
    assert_eq!(losses(&document)["doubtful_pages"], 20);
}

#[test]
fn a_lost_block_below_the_last_sync_of_a_crashed_run_is_summed_up_too() {
    let home = Home::new();
    home.crash_after(|pool| {
        (1..=3).for_each(|seed| pool.put(&chain(seed, 20)));
        pool.store.flush().unwrap();
        pool.put(&chain(4, 20));
    });
    let (segment, _) = home.written_segment();
    overwrite(&home.path, block_offset(segment, 2), &noise(BLOCK_BYTES));
    let document = home.json("verify", &[], 1);
    assert_eq!(finding(&document)["kind"], "descriptor");
    assert_eq!(document["pages"], 60);
    assert_eq!(losses(&document)["doubtful_pages"], 20);
}

#[test]
fn a_missing_volume_is_summed_up_before_it_is_given_up() {
    let home = Home::with_volumes(&["second"]);
    let keys = chain(1, PAGES);
    home.with(|pool| pool.put(&keys));
    std::fs::remove_file(home.beside("second")).unwrap();
    let document = report(
        &[
            "verify",
            text(&home.path),
            "--repair",
            "--degraded",
            "--dry-run",
        ],
        1,
    );
    let left = document["pages"].as_u64().unwrap();
    let lost = losses(&document)["lost_pages"].as_u64().unwrap();
    assert!(0 < left && left + lost <= PAGES, "{document:#}");
    assert!(lost > 0, "{document:#}");
    home.says(
        "verify",
        &["--repair", "--degraded", "--dry-run"],
        1,
        &["Would give up", "Lost", "tiny"],
    );
}

#[test]
fn damaged_pages_are_summed_up_per_namespace() {
    let home = Home::new();
    let keys = chain(1, 60);
    home.with(|pool| pool.put(&keys));
    for at in [10, 33, 59] {
        overwrite(&home.path, home.offset_of(&keys[at]) + 300, b"not this");
    }
    let document = home.json("verify", &["--deep"], 1);
    assert_eq!(losses(&document)["damaged_pages"], 3);
    assert_eq!(losses(&document)["lost_pages"], 0);
    assert_eq!(losses(&document)["doubtful_pages"], 0);
}

#[test]
fn a_store_made_over_foreign_bytes_is_sound() {
    let home = Home::new();
    let path = home.beside("used");
    let file = File::create(&path).unwrap();
    for segment in 0..9 {
        file.write_all_at(&noise(SEGMENT_BYTES), segment * SEGMENT_BYTES)
            .unwrap();
    }
    file.sync_all().unwrap();
    let create = ["create", text(&path), "--size", "144MiB", "--force"];
    ends(&create, 0);
    let document = report(&["verify", text(&path), "--deep"], 0);
    assert_eq!(document["damage"].as_array().unwrap().len(), 0);
    let store = larder_engine::Store::open(&path, larder_engine::OpenOptions::default()).unwrap();
    let pool = Pool::new(&store);
    pool.put(&chain(3, 100));
    store.close().unwrap();
    assert_eq!(report(&["verify", text(&path), "--deep"], 0)["pages"], 100);
}

//! Stores that were not closed: structures that a crash may cut short are no damage.

use std::fs::File;
use std::os::unix::fs::FileExt;

use larder_engine::PageStore;
use serde_json::Value;

use crate::home::{BLOCK_BYTES, block_offset, finding};
use crate::support::home::Home;
use crate::support::{chain, flip, overwrite};

#[test]
fn after_a_crash_a_page_whose_bytes_never_landed_is_unfinished_and_not_damage() {
    let home = Home::new();
    let keys = chain(2, 10);
    home.crash_after(|pool| {
        pool.put(&chain(1, 10));
        pool.store.flush().unwrap();
        pool.put(&keys);
        pool.put(&chain(3, 10));
    });
    let document = home.json("verify", &["--deep"], 0);
    assert_eq!(document["condition"], "not_closed");
    assert_eq!(document["deep"]["good_pages"], 30);
    assert_eq!(document["unproven_pages"], 20);
    flip(&home.path, home.offset_of(&keys[4]));
    let document = home.json("verify", &["--deep"], 0);
    assert_eq!(document["deep"]["unfinished_pages"], 1);
    assert_eq!(document["deep"]["good_pages"], 29);
    home.says(
        "verify",
        &["--deep"],
        0,
        &[
            "NOT CLOSED: the next open recovers it",
            "20 pages (checked when read)",
            "1 unfinished",
            "sound",
        ],
    );
    home.says(
        "inspect",
        &[],
        0,
        &[
            "NOT CLOSED",
            "20 pages (checked when read)",
            "the next open recovers it",
        ],
    );
}

#[test]
fn after_crashes_the_newest_whole_record_of_a_key_counts_and_an_unfinished_one_is_told() {
    let home = Home::new();
    let keys = chain(1, 3);
    home.crash_after(|pool| pool.put(&keys));
    let old = home.offset_of(&keys[2]);
    flip(&home.path, old);
    home.crash_after(|pool| pool.put(&keys[2..]));
    let new = home.offset_of(&keys[2]);
    assert_ne!(old, new);
    flip(&home.path, old);
    flip(&home.path, new);
    assert_eq!(home.offset_of(&keys[2]), old);
    let document = home.json("inspect", &["--key", &keys[2].to_string()], 0);
    let records = document["key"]["records"].as_array().unwrap();
    let fates: Vec<&Value> = records.iter().map(|record| &record["fate"]).collect();
    assert_eq!(fates, ["live", "unfinished"]);
    let document = home.json("verify", &["--deep"], 0);
    assert_eq!(document["unfinished_records"], 1);
    assert_eq!(document["deep"]["good_pages"], 3);
}

#[test]
fn after_a_power_loss_a_header_that_the_last_open_wrote_anew_may_be_old_in_one_copy() {
    let home = Home::new();
    home.crash_after(|pool| {
        pool.put(&chain(1, 10));
        pool.store.flush().unwrap();
    });
    let (segment, _) = home.written_segment();
    let copy = segment + BLOCK_BYTES;
    let read = || {
        let mut header = [0; BLOCK_BYTES as usize];
        let file = File::open(&home.path).unwrap();
        file.read_exact_at(&mut header, copy).unwrap();
        header
    };
    let old = read();
    // The open seals the segments that the crash left open. No sync has covered that yet.
    home.crash_after(|_| ());
    assert_ne!(read(), old);
    overwrite(&home.path, copy, &old);
    let document = home.json("verify", &["--deep"], 0);
    assert_eq!(document["unfinished_blocks"], 1);
    assert_eq!(document["deep"]["good_pages"], 10);
}

#[test]
fn after_a_crash_a_synced_page_that_is_broken_is_damage() {
    let home = Home::new();
    let keys = chain(1, 10);
    home.crash_after(|pool| {
        pool.put(&keys);
        pool.store.flush().unwrap();
        pool.put(&chain(2, 10));
    });
    flip(&home.path, home.offset_of(&keys[4]));
    let document = home.json("verify", &["--deep"], 1);
    assert_eq!(finding(&document)["key"], keys[4].to_string());
}

#[test]
fn after_a_crash_a_lost_descriptor_block_is_damage_only_below_what_was_synced() {
    let home = Home::new();
    home.crash_after(|pool| {
        pool.put(&chain(1, 10));
        pool.put(&chain(5, 10));
        pool.store.flush().unwrap();
        (2..=4).for_each(|seed| pool.put(&chain(seed, 10)));
    });
    let (segment, blocks) = home.written_segment();
    // The last block but one belongs to pages that nothing was promised of.
    flip(&home.path, block_offset(segment, blocks - 2) + 200);
    let document = home.json("verify", &["--deep"], 0);
    assert_eq!(document["unfinished_blocks"], 1);
    assert_eq!(document["pages"], 40);
    // The blocks before the flush were promised. That is known for a block whose successor was
    // promised too.
    let promised = (0..blocks).map(|index| block_offset(segment, index) + 200);
    for offset in promised.take(usize::try_from(blocks - 4).unwrap()) {
        flip(&home.path, offset);
        let document = home.json("verify", &[], 1);
        let found = finding(&document);
        assert_eq!(found["kind"], "descriptor");
        assert_eq!(found["offset"], offset - 200);
        flip(&home.path, offset);
    }
}

//! Each structure damaged, repaired, and looked at again.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

use larder_format::{PageKey, SEGMENTS_OFFSET, SUPERBLOCK_OFFSETS};

use crate::home::{BLOCK_BYTES, block_offset};
use crate::support::home::{Home, SEGMENT_BYTES};
use crate::support::sparse::pack;
use crate::support::{chain, flip, overwrite, superblocks};

/// A store of three chains of 20 pages in one segment.
fn store() -> (Home, Vec<PageKey>) {
    let home = Home::new();
    let keys: Vec<PageKey> = (1..=3).flat_map(|seed| chain(seed, 20)).collect();
    home.with(|pool| (1..=3).for_each(|seed| pool.put(&chain(seed, 20))));
    (home, keys)
}

/// Repairs a damaged store, after a dry run that must change nothing. Afterwards it is sound and
/// has just these pages.
#[track_caller]
fn repair(home: &Home, survivors: &[PageKey], lost: &[PageKey]) {
    home.json("verify", &["--deep"], 1);
    let before = pack(&home.path);
    let dry = home.json("verify", &["--repair", "--dry-run"], 1);
    assert_eq!(dry["repair"]["dry_run"], true);
    assert!(before == pack(&home.path), "a dry run changed the store");
    let done = home.json("verify", &["--repair"], 0);
    let repaired = &done["repair"];
    assert_eq!(repaired["remaining_damage"].as_array().unwrap().len(), 0);
    for planned in ["freed_segments", "pages_moved", "dropped_pages"] {
        assert!(
            repaired[planned].as_u64() <= dry["repair"][planned].as_u64(),
            "{planned}: {done:#}, planned {dry:#}"
        );
    }
    let document = home.json("verify", &["--deep"], 0);
    assert_eq!(document["condition"], "clean");
    assert_eq!(document["deep"]["good_pages"], survivors.len() as u64);
    home.with(|pool| {
        assert_eq!(pool.hits(survivors), survivors.len());
        assert_eq!(pool.hits(lost), 0);
    });
    home.json("verify", &["--deep"], 0);
}

#[test]
fn a_page_with_a_flipped_bit_is_dropped_and_does_not_come_back() {
    let (home, mut keys) = store();
    flip(&home.path, home.offset_of(&keys[33]) + 40_000);
    let lost = keys.remove(33);
    repair(&home, &keys, &[lost]);
    home.with(|pool| assert_eq!(pool.hits(&keys), 59));
    let document = home.json("inspect", &["--key", &lost.to_string()], 0);
    assert_eq!(document["key"]["removals"][0]["kind"], "evicted");
    // Putting it again is all it takes.
    home.with(|pool| pool.put(&[lost]));
    assert_eq!(
        home.json("verify", &["--deep"], 0)["deep"]["good_pages"],
        60
    );
}

#[test]
fn the_pages_around_a_damaged_descriptor_block_move_out_of_its_segment() {
    let (home, keys) = store();
    let (segment, blocks) = home.written_segment();
    flip(&home.path, block_offset(segment, blocks - 1) + 200);
    repair(&home, &keys[..40], &keys[40..]);
    let (now, _) = home.written_segment();
    assert_ne!(segment, now);
}

#[test]
fn header_copies_are_written_anew_from_their_twins_and_both_from_the_blocks() {
    for bad in [&[0][..], &[1], &[0, 1]] {
        let (home, keys) = store();
        let (segment, _) = home.written_segment();
        for copy in bad {
            flip(&home.path, segment + copy * BLOCK_BYTES + 41);
        }
        repair(&home, &keys, &[]);
    }
    let (home, keys) = store();
    let (segment, _) = home.written_segment();
    overwrite(&home.path, segment + BLOCK_BYTES, &[0; 4096]);
    repair(&home, &keys, &[]);
}

#[test]
fn superblock_copies_that_are_bad_or_stayed_behind_are_written_anew() {
    for copy in 0..3 {
        let (home, keys) = store();
        flip(&home.path, superblocks(&home.path)[copy] + 73);
        repair(&home, &keys, &[]);
    }
    let home = Home::new();
    let mut old = [0; BLOCK_BYTES as usize];
    let file = File::open(&home.path).unwrap();
    file.read_exact_at(&mut old, SUPERBLOCK_OFFSETS[1]).unwrap();
    let keys = chain(1, 20);
    home.with(|pool| pool.put(&keys));
    overwrite(&home.path, SUPERBLOCK_OFFSETS[1], &old);
    repair(&home, &keys, &[]);
}

#[test]
fn the_good_superblock_is_not_touched_before_the_bad_one_is_whole() {
    let (home, _) = store();
    flip(&home.path, SUPERBLOCK_OFFSETS[1] + 73);
    let good = |home: &Home| {
        let mut block = [0; BLOCK_BYTES as usize];
        let file = File::open(&home.path).unwrap();
        file.read_exact_at(&mut block, SUPERBLOCK_OFFSETS[0])
            .unwrap();
        block
    };
    let before = good(&home);
    // Writes from 16 or 32 KiB on end the process, as a power cut would at that moment: the second
    // copy lies at 64.
    let status = Command::new("sh")
        .args(["-c", "ulimit -f 32; exec \"$0\" \"$@\""])
        .args([env!("CARGO_BIN_EXE_larder"), "verify", "--repair"])
        .arg(&home.path)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert!(!status.success());
    assert!(
        before == good(&home),
        "the only good copy was written first"
    );
    home.json("verify", &["--repair"], 0);
}

#[test]
fn a_segment_that_nothing_tells_of_any_more_is_given_back() {
    let (home, keys) = store();
    let (segment, blocks) = home.written_segment();
    for copy in 0..2 {
        flip(&home.path, segment + copy * BLOCK_BYTES + 41);
    }
    for index in 0..blocks {
        flip(&home.path, block_offset(segment, index) + 200);
    }
    repair(&home, &[], &keys);
}

#[test]
fn everything_damaged_at_once_is_repaired_at_once() {
    let home = Home::new();
    // More than one segment: 10 chains of 60 pages are 37 MiB.
    let chains: Vec<Vec<PageKey>> = (1..=10).map(|seed| chain(seed, 60)).collect();
    home.with(|pool| chains.iter().for_each(|keys| pool.put(keys)));
    let mut survivors: Vec<PageKey> = chains.concat();
    flip(&home.path, home.offset_of(&chains[9][59]) + 17);
    let last = survivors.pop().unwrap();
    flip(&home.path, home.offset_of(&chains[4][30]) + 17);
    let middle = survivors.remove(4 * 60 + 30);
    let segment = SEGMENTS_OFFSET;
    flip(&home.path, block_offset(segment, 2) + 200);
    flip(&home.path, segment + 41);
    flip(&home.path, segment + SEGMENT_BYTES + BLOCK_BYTES + 41);
    flip(&home.path, SUPERBLOCK_OFFSETS[0] + 73);
    // The pages of the lost descriptor block.
    let good = home.json("verify", &["--deep"], 1)["deep"]["good_pages"]
        .as_u64()
        .unwrap();
    assert!(good < 598 && good > 500, "{good}");
    home.json("verify", &["--repair"], 0);
    let document = home.json("verify", &["--deep"], 0);
    assert_eq!(document["deep"]["good_pages"], good);
    home.with(|pool| {
        assert_eq!(pool.hits(&survivors) as u64, good);
        assert_eq!(pool.hits(&[last, middle]), 0);
    });
}

#[test]
fn the_repair_of_a_sound_store_changes_nothing() {
    let (home, _) = store();
    let crashed = Home::new();
    crashed.crash_after(|pool| pool.put(&chain(1, 10)));
    for home in [&home, &crashed] {
        let before = pack(&home.path);
        let document = home.json("verify", &["--repair"], 0);
        assert_eq!(document["repair"]["headers"], 0);
        home.says("verify", &["--repair"], 0, &["sound"]);
        assert!(before == pack(&home.path));
    }
}

#[test]
fn damage_on_both_of_two_volumes_is_repaired() {
    let home = Home::with_volumes(&["second"]);
    let chains: Vec<Vec<PageKey>> = (1..=4).map(|seed| chain(seed, 100)).collect();
    home.with(|pool| chains.iter().for_each(|keys| pool.put(keys)));
    let second = home.beside("second");
    flip(&second, SEGMENTS_OFFSET + 2 * BLOCK_BYTES + 9);
    flip(&home.path, SEGMENTS_OFFSET + 2 * BLOCK_BYTES + 9);
    flip(&second, block_offset(SEGMENTS_OFFSET, 0) + 200);
    let good = home.json("verify", &["--deep"], 1)["deep"]["good_pages"]
        .as_u64()
        .unwrap();
    home.json("verify", &["--repair"], 0);
    let document = home.json("verify", &["--deep"], 0);
    assert_eq!(document["deep"]["good_pages"], good);
    home.with(|pool| assert_eq!(pool.hits(&chains.concat()) as u64, good));
}

#[test]
fn a_volume_that_is_gone_is_beyond_repair_until_it_is_given_up_for_good() {
    let home = Home::with_volumes(&["second"]);
    let chains: Vec<Vec<PageKey>> = (1..=4).map(|seed| chain(seed, 100)).collect();
    home.with(|pool| chains.iter().for_each(|keys| pool.put(keys)));
    for offset in superblocks(&home.beside("second")) {
        flip(&home.beside("second"), offset + 73);
    }
    let before = pack(&home.path);
    let words = ["beyond repair: volume 1", "--repair --degraded"];
    home.says("verify", &["--repair"], 1, &words);
    assert!(before == pack(&home.path));
    std::fs::remove_file(home.beside("second")).unwrap();
    home.says("verify", &["--repair"], 1, &words);
    let left = home.json("verify", &["--deep"], 1)["deep"]["good_pages"]
        .as_u64()
        .unwrap();
    let options = ["--repair", "--degraded", "--dry-run"];
    let said = ["Would give up", "volume 1: 0 pages, and the pages of"];
    home.says("verify", &options, 1, &said);
    assert!(before == pack(&home.path));
    home.json("verify", &["--repair", "--degraded"], 0);
    let document = home.json("verify", &["--deep"], 0);
    assert_eq!(document["deep"]["good_pages"], left);
    home.with(|pool| assert_eq!(pool.hits(&chains.concat()) as u64, left));
}

#[test]
fn a_store_grows_on_the_volumes_that_it_has_and_takes_no_others() {
    let home = Home::with_volumes(&["second"]);
    home.with(|pool| pool.put(&chain(1, 50)));
    let grow = ["--grow", "--size", "600MiB"];
    let third = home.beside("third");
    let named = [&grow[..], &["--volume", third.to_str().unwrap()]].concat();
    home.says("create", &named, 2, &["third", "larder volume add"]);
    assert!(!third.exists());
    home.says(
        "verify",
        &["--volume", third.to_str().unwrap()],
        2,
        &["third"],
    );
    std::fs::remove_file(home.beside("second")).unwrap();
    home.json("verify", &["--repair", "--degraded"], 0);
    let grown = home.report("create", &grow, 0);
    let found = home.json("inspect", &[], 0);
    assert_eq!(grown["usable_bytes"], found["usable_bytes"], "{found}");
    let length = std::fs::metadata(&home.path).unwrap().len();
    assert_eq!(grown["capacity_bytes"], length);
    home.with(|pool| assert_eq!(pool.hits(&chain(1, 50)), 50));
}

#[test]
fn a_volume_that_is_named_and_given_up_leaves_a_report() {
    let home = Home::with_volumes(&["second"]);
    home.with(|pool| pool.put(&chain(1, 50)));
    let moved = home.beside("moved");
    std::fs::rename(home.beside("second"), &moved).unwrap();
    File::options()
        .write(true)
        .open(&moved)
        .unwrap()
        .set_len(BLOCK_BYTES)
        .unwrap();
    let options = ["--repair", "--degraded", "--volume"];
    let named = [&options[..], &[moved.to_str().unwrap()]].concat();
    let document = home.json("verify", &named, 0);
    assert_eq!(document["repair"]["given_up_volumes"][0], 1, "{document}");
}

#[test]
fn damaged_pages_behind_a_volume_that_is_given_up_are_dropped() {
    let home = Home::with_volumes(&["second", "third"]);
    home.with(|pool| (1..=4).for_each(|seed| pool.put(&chain(seed, 100))));
    std::fs::remove_file(home.beside("second")).unwrap();
    flip(&home.beside("third"), SEGMENTS_OFFSET + 2 * BLOCK_BYTES + 9);
    let document = home.json("verify", &["--deep"], 1);
    let good = &document["deep"]["good_pages"];
    let document = home.json("verify", &["--repair", "--degraded"], 0);
    assert_eq!(document["repair"]["dropped_pages"], 1);
    assert_eq!(
        &home.json("verify", &["--deep"], 0)["deep"]["good_pages"],
        good
    );
}

#[test]
fn a_store_without_any_superblock_is_beyond_repair_and_that_is_said() {
    let (home, _) = store();
    for offset in superblocks(&home.path) {
        flip(&home.path, offset + 73);
    }
    let before = pack(&home.path);
    for options in [&["--repair"][..], &["--repair", "--degraded"]] {
        home.says("verify", options, 1, &["cannot be repaired", "--volume"]);
    }
    assert!(before == pack(&home.path));
}

#[test]
fn a_store_in_use_is_not_repaired() {
    let (home, _) = store();
    let store = home.open();
    let by = format!("in use by process {}", std::process::id());
    home.says("verify", &["--repair"], 3, &[&by]);
    drop(store);
    home.says("verify", &["--dry-run"], 2, &["--repair"]);
}

//! Every structure of a store damaged in turn: the findings, and the lost pages.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Command;

use larder_engine::{OpenOptions, PageStore, Store, StoreError};
use larder_format::{SEGMENTS_OFFSET, SUPERBLOCK_OFFSETS};

use crate::home::{BLOCK_BYTES, block_offset, finding};
use crate::support::home::{Home, SEGMENT_BYTES, SEGMENTS};
use crate::support::{chain, ends, flip, overwrite, report, superblocks, text};

#[test]
fn a_flipped_bit_in_a_page_is_found_by_deep_verification_alone_and_names_the_page() {
    let home = Home::new();
    let keys = chain(1, 60);
    home.with(|pool| pool.put(&keys));
    let offset = home.offset_of(&keys[33]);
    flip(&home.path, offset + 40_000);
    home.json("verify", &[], 0);
    let document = home.json("verify", &["--deep"], 1);
    let found = finding(&document);
    assert_eq!(found["kind"], "payload");
    assert_eq!(found["key"], keys[33].to_string());
    assert_eq!(found["offset"], offset);
    assert_eq!(found["volume"], 0);
    assert_eq!(found["segment"], (offset - SEGMENTS_OFFSET) / SEGMENT_BYTES);
    assert!(found["reason"].as_str().unwrap().contains("checksum"));
    assert_eq!(document["deep"]["damaged_pages"], 1);
    assert_eq!(document["deep"]["good_pages"], 59);
    let key = keys[33].to_string();
    home.says(
        "verify",
        &["--deep"],
        1,
        &[
            &key,
            &offset.to_string(),
            "1 thing damaged",
            "putting it again",
        ],
    );
}

#[test]
fn a_flipped_bit_in_a_descriptor_block_is_damage_and_costs_its_pages_alone() {
    let home = Home::new();
    home.with(|pool| (1..=3).for_each(|seed| pool.put(&chain(seed, 20))));
    let (segment, blocks) = home.written_segment();
    let offset = block_offset(segment, blocks - 1);
    flip(&home.path, offset + 200);
    let document = home.json("verify", &["--deep"], 1);
    let found = finding(&document);
    assert_eq!(found["kind"], "descriptor");
    assert_eq!(found["offset"], offset);
    assert_eq!(document["pages"], 40);
    assert_eq!(document["deep"]["good_pages"], 40);
    home.says(
        "inspect",
        &[],
        1,
        &[
            "DAMAGED: 1 finding",
            "CRC-32",
            &offset.to_string(),
            "What to do",
        ],
    );
}

#[test]
fn a_flipped_bit_in_a_header_copy_loses_nothing_but_the_redundancy() {
    for copy in 0..2 {
        let home = Home::new();
        home.with(|pool| pool.put(&chain(1, 20)));
        let (segment, _) = home.written_segment();
        let offset = segment + copy * BLOCK_BYTES;
        flip(&home.path, offset + 41);
        let document = home.json("verify", &["--deep"], 1);
        let found = finding(&document);
        assert_eq!(found["kind"], "header");
        assert_eq!(found["offset"], offset);
        assert_eq!(document["deep"]["good_pages"], 20);
        home.says(
            "inspect",
            &[],
            1,
            &["the other copy is good, nothing is lost"],
        );
    }
}

#[test]
fn a_wiped_header_copy_is_damage_too() {
    let home = Home::new();
    home.with(|pool| pool.put(&chain(1, 20)));
    let (segment, _) = home.written_segment();
    overwrite(
        &home.path,
        segment + BLOCK_BYTES,
        &[0; BLOCK_BYTES as usize],
    );
    let document = home.json("verify", &[], 1);
    assert_eq!(finding(&document)["kind"], "header");
}

#[test]
fn with_both_header_copies_gone_the_descriptor_blocks_still_tell_every_page() {
    let home = Home::new();
    home.with(|pool| pool.put(&chain(1, 20)));
    let (segment, _) = home.written_segment();
    flip(&home.path, segment + 41);
    flip(&home.path, segment + BLOCK_BYTES + 41);
    let document = home.json("verify", &["--deep"], 1);
    assert_eq!(document["damage"].as_array().unwrap().len(), 2);
    assert_eq!(document["pages"], 20);
    assert_eq!(document["deep"]["good_pages"], 20);
    let document = home.json("inspect", &["--segments"], 1);
    assert_eq!(document["segment_states"]["no_header"], 1);
    // An open for writing repairs that.
    home.with(|_| ());
    home.json("verify", &["--deep"], 0);
}

#[test]
fn a_flipped_bit_in_a_superblock_copy_loses_nothing_and_the_next_open_repairs_it() {
    for copy in 0..3 {
        let home = Home::new();
        home.with(|pool| pool.put(&chain(1, 20)));
        let offset = superblocks(&home.path)[copy];
        flip(&home.path, offset + 73);
        let document = home.json("verify", &["--deep"], 1);
        let found = finding(&document);
        assert_eq!(found["kind"], "superblock");
        assert_eq!(found["offset"], offset);
        assert_eq!(document["deep"]["good_pages"], 20);
        home.says(
            "inspect",
            &[],
            1,
            &["superblock copy", "CRC-32", "another copy is good"],
        );
        home.with(|_| ());
        home.json("verify", &[], 0);
    }
}

#[test]
fn a_superblock_copy_that_stayed_behind_by_more_than_one_write_is_damage() {
    let home = Home::new();
    let mut old = [0; BLOCK_BYTES as usize];
    let file = File::open(&home.path).unwrap();
    file.read_exact_at(&mut old, SUPERBLOCK_OFFSETS[1]).unwrap();
    home.with(|pool| pool.put(&chain(1, 20)));
    overwrite(&home.path, SUPERBLOCK_OFFSETS[1], &old);
    home.says("verify", &[], 1, &["generation", "writes to it were lost"]);
    let document = home.json("verify", &[], 1);
    assert_eq!(finding(&document)["offset"], SUPERBLOCK_OFFSETS[1]);
}

#[test]
fn without_a_usable_superblock_all_copies_are_named_and_nothing_is_guessed() {
    let damaged = Home::new();
    let wiped = Home::new();
    for home in [&damaged, &wiped] {
        home.with(|pool| pool.put(&chain(1, 20)));
    }
    for offset in superblocks(&damaged.path) {
        flip(&damaged.path, offset + 73);
        overwrite(&wiped.path, offset, &[0; BLOCK_BYTES as usize]);
    }
    for home in [&damaged, &wiped] {
        for command in ["verify", "inspect"] {
            let document = home.json(command, &[], 1);
            assert_eq!(document["damage"].as_array().unwrap().len(), 3);
            home.says(
                command,
                &[],
                1,
                &[
                    "no copy of the superblock can be used",
                    "superblock restore",
                ],
            );
        }
    }
}

#[test]
fn a_truncated_volume_is_damage_and_what_is_left_of_it_is_checked() {
    let home = Home::new();
    home.with(|pool| (1..=10).for_each(|seed| pool.put(&chain(seed, 50))));
    let whole = home.json("inspect", &[], 0)["pages"].as_u64().unwrap();
    let file = File::options().write(true).open(&home.path).unwrap();
    file.set_len(SEGMENTS_OFFSET + SEGMENT_BYTES + SEGMENT_BYTES / 2)
        .unwrap();
    let document = home.json("verify", &["--deep"], 1);
    assert_eq!(finding(&document)["kind"], "volume_truncated");
    assert_eq!(
        (&document["segments"], &document["segments_read"]),
        (&SEGMENTS.into(), &1.into())
    );
    let left = document["deep"]["good_pages"].as_u64().unwrap();
    assert!(0 < left && left < whole, "{left} of {whole} pages are left");
    home.says(
        "inspect",
        &[],
        1,
        &["TRUNCATED", "7 UNREACHABLE", "its end is cut off"],
    );
}

#[test]
fn a_missing_volume_is_damage_until_its_new_place_is_named() {
    let home = Home::with_volumes(&["second"]);
    home.with(|pool| (1..=4).for_each(|seed| pool.put(&chain(seed, 100))));
    assert_eq!(
        home.json("verify", &["--deep"], 0)["deep"]["good_pages"],
        400
    );
    let elsewhere = home.beside("elsewhere");
    std::fs::rename(home.beside("second"), &elsewhere).unwrap();
    let document = home.json("verify", &["--deep"], 1);
    assert_eq!(finding(&document)["kind"], "volume_missing");
    assert_eq!(finding(&document)["volume"], 1);
    let left = document["deep"]["good_pages"].as_u64().unwrap();
    assert!(0 < left && left < 400, "{left} pages are left");
    home.says("inspect", &[], 1, &["MISSING", "UNREACHABLE", "--volume"]);
    let elsewhere = elsewhere.to_str().unwrap();
    let document = home.json("verify", &["--deep", "--volume", elsewhere], 0);
    assert_eq!(document["deep"]["good_pages"], 400);
}

#[test]
fn a_volume_that_this_process_may_not_open_is_not_missing_and_not_given_up() {
    let home = Home::with_volumes(&["second"]);
    home.with(|pool| (1..=4).for_each(|seed| pool.put(&chain(seed, 100))));
    for command in [
        "inspect",
        "verify",
        "verify --repair",
        "verify --repair --degraded",
    ] {
        let limited = format!("ulimit -n 4; exec \"$0\" {command} \"$1\"");
        let mut shell = Command::new("sh");
        shell.args([
            "-c",
            &limited,
            env!("CARGO_BIN_EXE_larder"),
            text(&home.path),
        ]);
        let output = shell.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{command}: {said}");
        assert!(said.contains("second: "), "{command}: {said}");
        assert!(said.contains("Too many open files"), "{command}: {said}");
    }
    assert_eq!(
        home.json("verify", &["--deep"], 0)["deep"]["good_pages"],
        400
    );
}

#[test]
fn a_volume_that_could_not_be_found_again_is_not_taken_from_its_new_place() {
    use std::os::unix::ffi::OsStrExt;
    let home = Home::with_volumes(&["second"]);
    home.with(|pool| pool.put(&chain(1, 100)));
    let long = "a".repeat(200);
    for name in [long.as_bytes(), b"v\xff"] {
        let moved = home.path.with_file_name(std::ffi::OsStr::from_bytes(name));
        std::fs::rename(home.beside("second"), &moved).unwrap();
        let named = OpenOptions::default().with(|o| o.volumes = vec![moved.clone()]);
        let error = Store::open(&home.path, named.clone()).err().unwrap();
        assert!(error.to_string().contains("shorter"), "{error}");
        // Who only reads need not find it again.
        let reader = named.with(|o| o.read_only = true);
        drop(Store::open(&home.path, reader).unwrap());
        std::fs::rename(&moved, home.beside("second")).unwrap();
    }
}

#[test]
fn the_volumes_of_a_copied_store_are_the_copies() {
    let home = Home::with_volumes(&["second"]);
    home.with(|pool| (1..=4).for_each(|seed| pool.put(&chain(seed, 100))));
    let place = home.beside("copies");
    std::fs::create_dir(&place).unwrap();
    for volume in [&home.path, &home.beside("second")] {
        std::fs::copy(volume, place.join(volume.file_name().unwrap())).unwrap();
    }
    let first = place.join(home.path.file_name().unwrap());
    let second = place.join("second");
    flip(&second, SEGMENTS_OFFSET + 2 * BLOCK_BYTES + 9);
    let finds = |code| ends(&["verify", text(&first), "--deep"], code);
    finds(1);
    // A volume without a readable superblock is still named by its neighbour.
    for offset in superblocks(&second) {
        flip(&second, offset + 73);
    }
    finds(1);
    // And is not replaced by the original, which would be written to.
    let refused = Store::open(&first, OpenOptions::default()).err().unwrap();
    let is_missed = matches!(refused, StoreError::VolumeMissing { index: 1, .. });
    assert!(is_missed, "{refused}");
    assert_eq!(
        home.json("verify", &["--deep"], 0)["deep"]["good_pages"],
        400
    );
}

/// The option that names a moved volume.
enum FirstUse {
    Open,
    Grow,
}

#[test]
fn an_old_copy_beside_the_first_volume_does_not_stand_in_for_one_that_was_moved() {
    move_a_volume(&FirstUse::Open);
    move_a_volume(&FirstUse::Grow);
}

fn move_a_volume(first_use: &FirstUse) {
    let home = Home::with_volumes(&["second"]);
    home.with(|pool| pool.put(&chain(1, 100)));
    // As who moves a volume to another disk does, and keeps the old one for safety.
    let disk = home.beside("disk");
    std::fs::create_dir(&disk).unwrap();
    let moved = disk.join("second");
    std::fs::copy(home.beside("second"), &moved).unwrap();
    // Named once, in any open of the store for writing.
    let named = ["--volume", text(&moved)];
    match first_use {
        FirstUse::Grow => {
            let larger = ["create", text(&home.path), "--grow", "--size", "512MiB"];
            ends(&[&larger[..], &named].concat(), 0);
        }
        FirstUse::Open => {
            let named = OpenOptions::default().with(|o| o.volumes = vec![moved.clone()]);
            let store = Store::open(&home.path, named).unwrap();
            store.close().unwrap();
        }
    }
    home.with(|pool| pool.put(&chain(2, 100)));
    let finds = |path| report(&["verify", text(path), "--deep"], 0)["deep"]["good_pages"].clone();
    assert_eq!(finds(&home.path), 200);
    ends(&["verify", text(&home.path), "--repair", "--degraded"], 0);
    home.with(|pool| pool.put(&chain(3, 100)));
    assert_eq!(finds(&home.path), 300);
    assert_eq!(
        home.json("inspect", &[], 0)["volumes"][1]["path"],
        text(&moved)
    );
    // Of two copies of a store in which each volume lies beside the first one neither takes the
    // other's, however far that has come.
    let copy = home.beside("copy");
    std::fs::create_dir(&copy).unwrap();
    let first = copy.join(home.path.file_name().unwrap());
    std::fs::copy(&home.path, &first).unwrap();
    std::fs::copy(&moved, copy.join("second")).unwrap();
    home.with(|pool| pool.put(&chain(4, 100)));
    let store = Store::open(&first, OpenOptions::default()).unwrap();
    store.close().unwrap();
    assert_eq!(finds(&home.path), 400);
    assert_eq!(finds(&first), 300);
}

#[test]
fn a_first_volume_without_superblocks_is_read_with_the_help_of_another_one() {
    let home = Home::with_volumes(&["second"]);
    home.with(|pool| (1..=4).for_each(|seed| pool.put(&chain(seed, 100))));
    for offset in superblocks(&home.path) {
        flip(&home.path, offset + 73);
    }
    let second = home.beside("second");
    let document = home.json(
        "verify",
        &["--deep", "--volume", second.to_str().unwrap()],
        1,
    );
    assert_eq!(document["damage"].as_array().unwrap().len(), 3);
    assert_eq!(document["deep"]["good_pages"], 400);
}

#[test]
fn a_volume_that_has_not_seen_the_last_runs_is_damage() {
    // In some of the last runs nothing was written, or none of it is left on the other volume.
    for (run, writing) in [(2, &[true][..]), (3, &[true, false]), (3, &[false, false])] {
        let home = Home::with_volumes(&["second"]);
        let old = home.beside("old");
        std::fs::copy(home.beside("second"), &old).unwrap();
        for &writes in writing {
            home.with(|pool| {
                if writes {
                    (1..=4).for_each(|seed| pool.put(&chain(seed, 100)));
                }
            });
        }
        std::fs::rename(&old, home.beside("second")).unwrap();
        let said = format!("of run 1, the store has been in run {run} since: an old copy");
        home.says("verify", &[], 1, &[&said]);
        let refused = Store::open(&home.path, OpenOptions::default())
            .err()
            .unwrap();
        assert!(
            matches!(refused, StoreError::VolumeStale { run: 1, .. }),
            "{refused}"
        );
    }
}

//! `larder superblock save` and `larder superblock restore` on the command line.

use larder_engine::PageStore;
use larder_format::{OVERHEAD_BYTES, PageKey, SEGMENTS_OFFSET};

use nix::sys::signal::Signal;

use crate::kills::{Watch, started, stop};
use crate::support::home::Home;
use crate::support::honest::{Process, eventually};
use crate::support::{
    chain, ends, fails, flip, json, larder, overwrite, report, says, superblocks, text,
};

/// The loss that all tests are about: everything before the first segment.
fn destroy(home: &Home, volume: &str) {
    let bytes: Vec<u8> = (0..SEGMENTS_OFFSET).map(|at| (at % 251) as u8).collect();
    overwrite(&home.beside(volume), 0, &bytes);
}

fn save(home: &Home) -> String {
    let file = text(&home.beside("saved")).to_owned();
    let saved = report(&["superblock", "save", text(&home.path), &file], 0);
    assert!(saved["segments"].as_u64().unwrap() > 0, "{saved}");
    file
}

fn restore(home: &Home, file: &str) -> u64 {
    let restored = report(&["superblock", "restore", text(&home.path), file], 0);
    restored["destroyed_superblocks"].as_u64().unwrap()
}

/// What a restore of this file says, which must change nothing.
#[track_caller]
fn refused(home: &Home, file: &str, words: &[&str]) {
    let before = std::fs::read(&home.path).unwrap();
    let arguments = ["superblock", "restore", text(&home.path), file];
    fails(&arguments, 3, words);
    fails(&[&arguments[..], &["--dry-run"]].concat(), 3, words);
    assert!(before == std::fs::read(&home.path).unwrap());
}

/// The pages are there, with their bytes, before and after a repair.
#[track_caller]
fn is_whole(home: &Home, keys: &[PageKey]) {
    home.with(|pool| assert_eq!(pool.hits(keys), keys.len()));
    let document = home.json("verify", &["--deep"], 0);
    assert_eq!(document["deep"]["good_pages"], keys.len());
}

#[test]
fn a_store_that_lost_its_first_mebibyte_opens_with_all_pages() {
    let home = Home::new();
    let (early, late) = (chain(1, 100), chain(2, 100));
    home.with(|pool| pool.put(&early));
    let file = save(&home);
    // Opens and closes since the save: their epochs are in no saved superblock.
    for _ in 0..3 {
        home.with(|_| ());
    }
    home.with(|pool| pool.put(&late));
    destroy(&home, "store");
    let remedy = "larder superblock restore";
    fails(&["serve", text(&home.path)], 3, &[remedy]);
    says(&["doctor", text(&home.path)], 1, &[remedy]);
    fails(
        &["create", text(&home.path), "--size", "1GiB"],
        3,
        &[remedy],
    );
    home.report("verify", &[], 1);

    let planned = [
        "superblock",
        "restore",
        text(&home.path),
        &file,
        "--dry-run",
    ];
    assert_eq!(json(&planned)["destroyed_superblocks"], 1);
    fails(&["serve", text(&home.path)], 3, &[remedy]);
    assert_eq!(restore(&home, &file), 1);
    let document = home.json("inspect", &[], 0);
    assert_eq!(document["condition"], "not_closed");
    is_whole(&home, &[early.clone(), late.clone()].concat());
    // A second restore finds whole superblocks, and lets them be.
    let before = std::fs::read(&home.path).unwrap();
    assert_eq!(restore(&home, &file), 0);
    assert!(before == std::fs::read(&home.path).unwrap());
    let more = chain(3, 100);
    home.with(|pool| pool.put(&more));
    is_whole(&home, &[early, late, more].concat());
}

#[test]
fn pages_that_were_deleted_before_the_loss_stay_deleted() {
    let home = Home::new();
    let keys = chain(1, 50);
    home.with(|pool| pool.put(&keys));
    let file = save(&home);
    home.with(|pool| pool.delete(keys[49]));
    destroy(&home, "store");
    restore(&home, &file);
    is_whole(&home, &keys[..49]);
    home.with(|pool| assert_eq!(pool.hits(&keys[49..]), 0));
}

#[test]
fn a_save_beside_the_owner_and_its_sudden_end_lose_no_page() {
    let home = Home::new();
    let keys = chain(1, 100);
    home.with(|pool| pool.put(&keys));
    let mut owner = started(&home, &["serve"]);
    eventually("it is served", || {
        let check = larder(&["stat", text(&home.path), "--check"]).output();
        check.unwrap().status.success()
    });
    let file = save(&home);
    refused(&home, &file, &["in use"]);
    owner.0.kill().unwrap();
    owner.0.wait().unwrap();
    destroy(&home, "store");
    restore(&home, &file);
    is_whole(&home, &keys);
    // Left by a crash in the midst of puts.
    let more = chain(2, 300);
    home.crash_after(|pool| {
        pool.put(&more[..200]);
        pool.store.flush().unwrap();
        pool.put(&more[200..]);
    });
    destroy(&home, "store");
    restore(&home, &file);
    home.with(|pool| {
        assert_eq!(pool.hits(&keys), keys.len());
        assert_eq!(pool.hits(&more[..200]), 200);
    });
}

#[test]
fn each_volume_of_a_store_is_restored() {
    for lost in [&["store"][..], &["second"], &["store", "second"]] {
        let home = Home::with_volumes(&["second"]);
        let keys: Vec<PageKey> = (1..9).flat_map(|seed| chain(seed, 60)).collect();
        home.with(|pool| (1..9).for_each(|seed| pool.put(&chain(seed, 60))));
        let file = save(&home);
        home.with(|_| ());
        lost.iter().for_each(|volume| destroy(&home, volume));
        fails(&["serve", text(&home.path)], 3, &["superblock restore"]);
        assert_eq!(restore(&home, &file), lost.len() as u64);
        is_whole(&home, &keys);
    }
}

#[test]
fn a_restore_killed_at_any_moment_is_run_again_and_ends_the_same() {
    let keys = chain(1, 200);
    let run = |writes: usize| {
        let home = Home::with_volumes(&["second"]);
        home.with(|pool| pool.put(&keys));
        let file = save(&home);
        destroy(&home, "store");
        destroy(&home, "second");
        let watch = Watch::on(&home);
        let Process(child) = &mut started(&home, &["superblock restore", &file]);
        let seen = watch.await_writes(child, writes);
        stop(child, Signal::SIGKILL);
        let code = child.wait().unwrap().code();
        restore(&home, &file);
        is_whole(&home, &keys);
        (seen, code)
    };
    let (writes, code) = run(usize::MAX);
    assert_eq!(code, Some(0));
    // Writes that follow each other at once are seen as one.
    assert!(writes > 0);
    (0..writes.max(2)).for_each(|writes| _ = run(writes));
}

#[test]
fn a_volume_that_moved_is_named_once() {
    let home = Home::with_volumes(&["second"]);
    let keys = chain(1, 200);
    home.with(|pool| pool.put(&keys));
    let file = save(&home);
    destroy(&home, "second");
    let moved = home.beside("moved");
    std::fs::rename(home.beside("second"), &moved).unwrap();
    refused(&home, &file, &["volume 1 of the store is missing"]);
    let at = text(&home.path);
    let restore = ["superblock", "restore", at, &file, "--volume", text(&moved)];
    ends(&restore, 0);
    is_whole(&home, &keys);
}

#[test]
fn a_file_that_does_not_fit_the_store_is_refused() {
    let home = Home::new();
    home.with(|pool| pool.put(&chain(1, 100)));
    let file = save(&home);
    let other = Home::new();
    other.with(|pool| pool.put(&chain(1, 100)));
    let foreign = save(&other);
    // Of another store, beside whole and beside destroyed superblocks.
    refused(&home, &foreign, &["of another store"]);
    destroy(&home, "store");
    refused(&home, &foreign, &["its segments name store"]);
    // No file of this command at all.
    let letter = home.beside("letter");
    std::fs::write(&letter, "a letter").unwrap();
    refused(&home, text(&letter), &["is no whole file of"]);
    refused(&home, text(&home.path), &["is no whole file of"]);
    // A file, and a store, that were cut.
    let cut = home.beside("cut");
    std::fs::write(&cut, &std::fs::read(&file).unwrap()[..4000]).unwrap();
    refused(&home, text(&cut), &["is no whole file of"]);
    let bytes = std::fs::metadata(&home.path).unwrap().len();
    let volume = std::fs::File::options()
        .write(true)
        .open(&home.path)
        .unwrap();
    volume.set_len(bytes - 1).unwrap();
    refused(
        &home,
        &file,
        &["has 7 segments, the saved superblock lists 8"],
    );
    volume.set_len(bytes).unwrap();
    // Bytes that are no store, though of its size.
    std::fs::write(&home.path, vec![0x5a; usize::try_from(bytes).unwrap()]).unwrap();
    refused(&home, &file, &["holds no segment of store"]);
    std::fs::write(&home.path, vec![0; usize::try_from(bytes).unwrap()]).unwrap();
    refused(&home, &file, &["holds no segment of store"]);
}

#[test]
fn a_store_whose_first_mebibyte_is_wiped_opens_by_the_superblock_at_its_end() {
    let home = Home::with_volumes(&["second"]);
    let keys = chain(1, 100);
    home.with(|pool| pool.put(&keys));
    let size = (2 * (OVERHEAD_BYTES + 10 * (16 << 20))).to_string();
    for grown in [false, true] {
        if grown {
            home.report("create", &["--size", &size, "--grow"], 0);
        }
        let segments = home.json("inspect", &[], 0)["segments"].clone();
        // Bytes of another program, until the operator has removed them.
        destroy(&home, "store");
        let remedy = "larder superblock restore";
        fails(&["serve", text(&home.path)], 3, &[remedy]);
        for volume in ["store", "second"] {
            let path = home.beside(volume);
            overwrite(
                &path,
                0,
                &vec![0; usize::try_from(SEGMENTS_OFFSET).unwrap()],
            );
        }
        let words = ["superblock copy", "is blank", "another copy is good"];
        home.says("verify", &[], 1, &words);
        let document = home.json("inspect", &[], 1);
        assert_eq!(document["damage"].as_array().unwrap().len(), 4);
        assert_eq!(document["segments"], segments);
        is_whole(&home, &keys);
    }
}

#[test]
fn a_superblock_at_the_end_counts_for_no_other_store() {
    let (home, other) = (Home::new(), Home::new());
    let keys = chain(1, 100);
    home.with(|pool| pool.put(&keys));
    // It was opened more often, so that its generation is the higher one.
    (0..5).for_each(|_| other.with(|_| ()));
    let end = superblocks(&home.path)[2];
    let foreign = &std::fs::read(&other.path).unwrap()[usize::try_from(end).unwrap()..][..4096];
    overwrite(&home.path, end, foreign);
    home.says(
        "verify",
        &[],
        1,
        &["superblock copy", "it belongs to volume 0 of"],
    );
    is_whole(&home, &keys);
}

#[test]
fn a_file_of_the_store_before_a_change_is_refused() {
    let home = Home::new();
    home.with(|pool| pool.put(&chain(1, 100)));
    let file = save(&home);
    let size = (OVERHEAD_BYTES + 10 * (16 << 20)).to_string();
    home.report("create", &["--size", &size, "--grow"], 0);
    refused(&home, &file, &["lists other volumes or sizes"]);
    destroy(&home, "store");
    refused(
        &home,
        &file,
        &["has 10 segments, the saved superblock lists 8"],
    );

    let home = Home::new();
    home.with(|pool| pool.put(&chain(1, 100)));
    let file = save(&home);
    let second = home.beside("second");
    ends(&["volume", "add", text(&home.path), text(&second)], 0);
    let file_of_two = save(&home);
    assert_eq!(file, file_of_two);
    ends(&["volume", "retire", text(&home.path), text(&second)], 0);
    refused(&home, &file, &["lists other volumes or sizes"]);
}

#[test]
fn a_flipped_byte_of_a_saved_file_is_noticed() {
    let home = Home::new();
    home.with(|pool| pool.put(&chain(1, 10)));
    let file = save(&home);
    destroy(&home, "store");
    let bytes = std::fs::metadata(&file).unwrap().len();
    for at in [0, 9, 17, 30, 70, 100, 300, bytes - 1] {
        flip(file.as_ref(), at);
        refused(&home, &file, &["is no whole file of"]);
        flip(file.as_ref(), at);
    }
    assert_eq!(restore(&home, &file), 1);
}

#[test]
fn a_save_replaces_an_earlier_one_of_the_store_and_nothing_else() {
    let (home, other) = (Home::new(), Home::new());
    let file = save(&home);
    assert_eq!(save(&home), file);
    let foreign = save(&other);
    let save = ["superblock", "save", text(&home.path)];
    fails(&[&save[..], &[&foreign]].concat(), 3, &["another store"]);
    for wrong in [text(&home.path), text(&other.path)] {
        let before = std::fs::read(wrong).unwrap();
        fails(&[&save[..], &[wrong]].concat(), 3, &["is no whole file of"]);
        assert!(before == std::fs::read(wrong).unwrap());
    }
    fails(
        &["superblock", "save", text(&home.beside("no")), &file],
        3,
        &["no"],
    );
}

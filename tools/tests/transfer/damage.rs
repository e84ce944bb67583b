//! Damaged stores and archives: omitted pages, refusals, and messages.

use std::fs::File;
use std::path::Path;

use larder_engine::PageStore;
use larder_format::{ArchiveItem, ArchivedNamespace, BLOCK_BYTES};

use crate::home::{EVEN, RAGGED, archived, items, put};
use crate::support::home::Home;
use crate::support::{chain, flip, overwrite, superblocks, text};

#[test]
fn a_damaged_page_is_left_out_and_named_and_the_others_are_taken() {
    let source = Home::new();
    let keys = chain(1, 30);
    source.with(|store| put(store, EVEN, &keys));
    flip(&source.path, source.offset_of(&keys[7]) + 40_000);
    let file = source.beside("archive");
    let document = source.report("export", &[text(&file)], 1);
    assert_eq!(document["damaged"], true);
    assert_eq!(document["damaged_pages"], 1);
    assert_eq!(document["pages"], 29);
    let damage = document["damage"].as_array().unwrap();
    assert_eq!(damage.len(), 1);
    assert_eq!(damage[0]["kind"], "payload");
    assert_eq!(damage[0]["key"], keys[7].to_string());
    let key = keys[7].to_string();
    let options = [text(&file), "--force"];
    source.says("export", &options, 1, &["1 page damaged", &key, "checksum"]);
    let target = Home::new();
    let document = target.report("import", &[text(&file)], 0);
    assert_eq!(document["pages_put"], 29);
    assert_eq!(document["left_out_pages"], 1);
    assert_eq!(target.having(EVEN, &keys), 29);
}

#[test]
fn damage_in_structures_is_told_because_pages_may_be_missing_for_it() {
    let source = Home::new();
    source.with(|store| put(store, EVEN, &chain(1, 10)));
    flip(&source.path, 73);
    let file = source.beside("archive");
    let document = source.report("export", &[text(&file)], 1);
    assert_eq!(document["damage"][0]["kind"], "superblock");
    assert_eq!(document["pages"], 10);
}

#[test]
fn without_a_superblock_nothing_is_exported_and_all_copies_are_named() {
    let source = Home::new();
    source.with(|store| put(store, EVEN, &chain(1, 10)));
    for offset in superblocks(&source.path) {
        flip(&source.path, offset + 73);
    }
    let file = source.beside("archive");
    let document = source.report("export", &[text(&file)], 1);
    assert_eq!(document["damage"].as_array().unwrap().len(), 3);
    assert_eq!(document["file"], serde_json::Value::Null);
    assert!(!file.exists());
}

#[test]
fn a_write_that_a_crash_cut_short_is_left_out_and_is_no_damage() {
    let source = Home::new();
    let keys = chain(1, 10);
    let store = source.open();
    put(&store, EVEN, &keys);
    drop(store);
    overwrite(&source.path, source.offset_of(&keys[6]), &[0; 64 << 10]);
    let file = source.beside("archive");
    let document = source.report("export", &[text(&file)], 0);
    assert_eq!(document["unfinished_pages"], 1);
    assert_eq!(document["pages"], 9);
    let document = Home::new().report("import", &[text(&file)], 0);
    assert_eq!(document["pages_put"], 9);
    // Of a chain that was asked for it is a gap all the same.
    let key = keys[9].to_string();
    let options = [text(&file), "--force", "--key", &key];
    let document = source.report("export", &options, 1);
    assert_eq!(document["chain_complete"], false);
    assert_eq!(document["damaged"], false);
}

/// Breaks every descriptor block that holds the full record of a namespace.
fn lose_namespace_records(path: &Path) {
    let bytes = std::fs::read(path).unwrap();
    let blocks = bytes.chunks(BLOCK_BYTES).zip(0_u64..);
    let records = blocks.filter(|(block, _)| block.windows(8).any(|at| at == b"LARDERNS"));
    let offsets: Vec<u64> = records
        .map(|(_, index)| index * BLOCK_BYTES as u64)
        .collect();
    assert!(!offsets.is_empty());
    offsets.iter().for_each(|offset| flip(path, offset + 100));
}

#[test]
fn pages_of_a_namespace_whose_record_is_lost_go_to_stores_that_know_it() {
    let source = Home::new();
    let keys = chain(1, 12);
    source.with(|store| put(store, RAGGED, &keys));
    lose_namespace_records(&source.path);
    let file = source.beside("archive");
    let document = source.report("export", &[text(&file)], 1);
    assert_eq!(document["namespaces"][0]["name"], serde_json::Value::Null);
    assert_eq!(document["pages"], 12);
    let options = [text(&file), "--force"];
    source.says("export", &options, 1, &["its record is lost"]);
    let unnamed = |item: &ArchiveItem| {
        matches!(
            item,
            ArchiveItem::Namespace(ArchivedNamespace::Unnamed { page_blocks: 3, .. })
        )
    };
    assert!(items(&file).iter().any(|(_, item)| unnamed(item)));

    let stranger = Home::new();
    let document = stranger.report("import", &[text(&file)], 1);
    assert_eq!(document["refusals"][0]["kind"], "unknown_namespace");
    assert_eq!(document["refused_pages"], 12);
    assert!(stranger.pages().is_empty());

    let friend = Home::new();
    friend.with(|store| store.namespace(&RAGGED.namespace()).map(|_| ()).unwrap());
    let document = friend.report("import", &[text(&file)], 0);
    assert_eq!(document["pages_put"], 12);
    assert_eq!(friend.having(RAGGED, &keys), 12);
}

/// An archive of 150 pages: three blocks of names, the first two full.
fn archive_of_three_blocks(source: &Home) -> std::path::PathBuf {
    source.with(|store| put(store, RAGGED, &chain(1, 150)));
    source.export("archive", &[])
}

#[test]
fn an_archive_cut_off_anywhere_gives_what_is_whole_and_says_where_it_ends() {
    let source = Home::new();
    let archive = archive_of_three_blocks(&source);
    let whole = std::fs::read(&archive).unwrap();
    let structures = items(&archive);
    // Behind each structure, in the middle of one, behind a page, and in the middle of a page.
    let page_bytes = 3 * BLOCK_BYTES as u64;
    let first = structures[2].0 + BLOCK_BYTES as u64;
    let mut cuts: Vec<u64> = structures.iter().map(|(offset, _)| *offset).collect();
    cuts.extend([
        first,
        first + 5 * page_bytes,
        first + 5 * page_bytes + 77,
        first - 1,
    ]);
    cuts.extend([whole.len() as u64 - 1]);
    for cut in cuts.into_iter().filter(|cut| *cut > BLOCK_BYTES as u64) {
        std::fs::write(&archive, &whole[..usize::try_from(cut).unwrap()]).unwrap();
        let target = Home::new();
        let document = target.report("import", &[text(&archive)], 1);
        assert_eq!(document["damaged"], true);
        assert_eq!(document["damage"][0]["offset"], cut);
        assert!(
            document["damage"][0]["reason"]
                .as_str()
                .unwrap()
                .contains("cut off")
        );
        let pages = |(offset, item): &(u64, ArchiveItem)| match item {
            ArchiveItem::Pages(pages) => {
                let behind = cut.saturating_sub(offset + BLOCK_BYTES as u64);
                (pages.len() as u64).min(behind / page_bytes)
            }
            _ => 0,
        };
        let expected: u64 = structures.iter().map(pages).sum();
        assert_eq!(document["pages_put"], expected, "cut at {cut}");
        assert_eq!(target.having(RAGGED, &chain(1, 150)) as u64, expected);
    }
}

#[test]
fn a_damaged_archive_is_taken_up_to_the_damage_and_the_rest_from_a_good_copy() {
    let source = Home::new();
    let archive = archive_of_three_blocks(&source);
    let structures = items(&archive);
    let (first, second) = (structures[2].0, structures[3].0);
    // In a page of the first batch, in the names of the second, in the end.
    let in_page = first + BLOCK_BYTES as u64 + 10 * 3 * BLOCK_BYTES as u64 + 900;
    let places = [
        (in_page, in_page - 900, 10, "checksum"),
        (second + 500, second, 62, "CRC-32"),
        (structures[5].0 + 90, structures[5].0, 150, "CRC-32"),
    ];
    for (place, offset, stored, word) in places {
        flip(&archive, place);
        let target = Home::new();
        let document = target.report("import", &[text(&archive)], 1);
        assert_eq!(document["damage"][0]["offset"], offset);
        let reason = document["damage"][0]["reason"].as_str().unwrap();
        assert!(reason.contains(word), "{reason}");
        assert_eq!(document["pages_put"], stored);
        flip(&archive, place);
        let document = target.report("import", &[text(&archive)], 0);
        assert_eq!(document["pages_put"], 150 - stored);
        assert_eq!(document["duplicate_pages"], stored);
        assert_eq!(target.having(RAGGED, &chain(1, 150)), 150);
    }
}

#[test]
fn a_dry_run_finds_the_damage_of_an_archive() {
    let source = Home::new();
    let archive = archive_of_three_blocks(&source);
    let (second, _) = items(&archive)[3];
    flip(&archive, second + 500);
    let target = Home::new();
    let options = [text(&archive), "--dry-run"];
    let document = target.report("import", &options, 1);
    assert_eq!(document["damage"][0]["offset"], second);
    assert_eq!(document["pages_put"], 62);
    assert!(target.pages().is_empty());
}

#[test]
fn bytes_behind_the_end_of_an_archive_are_damage() {
    let source = Home::new();
    let archive = archive_of_three_blocks(&source);
    let length = archive.metadata().unwrap().len();
    let file = File::options().append(true).open(&archive).unwrap();
    std::io::Write::write_all(&mut &file, b"x").unwrap();
    let document = Home::new().report("import", &[text(&archive)], 1);
    assert_eq!(document["damage"][0]["offset"], length);
    assert_eq!(document["pages_put"], 150);
    assert_eq!(archived_before(&archive, length), 150);
}

fn archived_before(archive: &Path, length: u64) -> usize {
    File::options()
        .write(true)
        .open(archive)
        .unwrap()
        .set_len(length)
        .unwrap();
    archived(archive).len()
}

#[test]
fn what_is_no_archive_is_refused_and_a_damaged_head_is_damage() {
    let target = Home::new();
    let file = target.beside("file");
    std::fs::write(&file, vec![b'x'; 10_000]).unwrap();
    let refused = |words: &[&str]| target.says("import", &[text(&file)], 3, words);
    refused(&["no archive", "check the path"]);
    std::fs::write(&file, b"short").unwrap();
    refused(&["shorter than any archive"]);
    std::fs::remove_file(&file).unwrap();
    refused(&["check the path"]);
    let options = [text(&target.path)];
    target.says("import", &options, 3, &["no archive"]);
    let source = Home::new();
    let archive = archive_of_three_blocks(&source);
    flip(&archive, 300);
    let document = target.report("import", &[text(&archive)], 1);
    assert_eq!(document["damage"][0]["offset"], 0);
    assert_eq!(document["pages_put"], 0);
}

//! After an import, a store of any shape has exactly the exported pages.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::process::{Child, Stdio};

use larder_engine::{CodecChoice, OpenOptions, PageStore, Store};
use larder_format::ArchiveItem;
use larder_store::inventory::Inventory;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::home::{EVEN, RAGGED, SMOOTH, archived, items, put, put_after, put_from};
use crate::support::home::{Home, SEGMENT_BYTES};
use crate::support::honest::{Process, eventually, found};
use crate::support::sparse::pack;
use crate::support::{chain, text};

/// Two namespaces, chains of several lengths, one with two branches.
fn populated(home: Home) -> Home {
    home.with(|store| {
        for seed in 1..=4 {
            put(store, EVEN, &chain(seed, 20 + seed));
            put(store, RAGGED, &chain(seed, 5));
        }
        for seed in [5, 6] {
            let mut branch = chain(1, 10);
            branch.extend(chain(seed, 7));
            put_from(store, EVEN, &branch, 10);
        }
    });
    home
}

#[test]
fn pages_go_between_stores_of_any_shape_whole_and_with_their_places_in_their_chains() {
    let shapes = [
        (&[][..], 8, 16 << 20),
        (&["second"], 5, 16 << 20),
        (&[], 6, 24 << 20),
        (&["second", "third"], 4, 16 << 20),
    ];
    let mut source = populated(Home::new());
    let pages = source.pages();
    for (further, segments, segment_bytes) in shapes {
        let archive = source.export("archive", &[]);
        let target = Home::shaped(further, segments, segment_bytes);
        let document = target.report("import", &[text(&archive)], 0);
        assert_eq!(document["pages_put"], pages.len());
        assert_eq!(document["refused_pages"], 0);
        assert_eq!(target.pages(), pages);
        for seed in 1..=4 {
            assert_eq!(
                target.having(EVEN, &chain(seed, 20 + seed)),
                20 + seed as usize
            );
            assert_eq!(target.having(RAGGED, &chain(seed, 5)), 5);
        }
        target.report("verify", &["--deep"], 0);
        // The next import takes the same pages.
        source = target;
    }
}

#[test]
fn encoded_pages_go_through_an_archive_as_they_are_stored() {
    let home = Home::new();
    let keys = chain(1, 20);
    let encoding = || OpenOptions::default().with(|o| o.codec = CodecChoice::Bf16);
    let usage = |store: &Store| store.usage().unwrap()[0];
    let source = Store::open(&home.path, encoding()).unwrap();
    put(&source, SMOOTH, &keys);
    let stored = usage(&source);
    assert!(stored.bytes < stored.plain_bytes);
    source.close().unwrap();
    let archive = home.export("archive", &[]);
    let structures = 64 << 10;
    let length = archive.metadata().unwrap().len();
    assert!((stored.bytes..stored.bytes + structures).contains(&length));

    // A store without a codec gets plain pages.
    let target = Home::new();
    target.report("import", &[text(&archive)], 0);
    assert_eq!(target.pages(), home.pages());
    assert_eq!(target.having(SMOOTH, &keys), keys.len());
    assert_eq!(target.with(|store| usage(store).bytes), stored.plain_bytes);
    target.report("verify", &["--deep"], 0);

    // A new store from it with a codec.
    let compact = target.beside("compact");
    let options = ["--into", text(&compact), "--codec", "bf16"];
    target.report("compact", &options, 0);
    let store = Store::open(&compact, OpenOptions::default()).unwrap();
    assert_eq!(usage(&store), stored);
}

#[test]
fn an_archive_imported_twice_stores_nothing_more() {
    let source = populated(Home::new());
    let archive = source.export("archive", &[]);
    let target = Home::new();
    target.report("import", &[text(&archive)], 0);
    let document = target.report("import", &[text(&archive)], 0);
    assert_eq!(document["pages_put"], 0);
    assert_eq!(document["duplicate_pages"], source.pages().len());
}

#[test]
fn parents_come_before_their_children_and_a_chain_is_one_stretch() {
    let source = populated(Home::new());
    // Written page by page in turns, so that they do not lie in their order.
    let chains: Vec<_> = (20..24).map(|seed| chain(seed, 12)).collect();
    source.with(|store| {
        for page in (0..12).rev() {
            for keys in &chains {
                put_from(store, EVEN, &keys[..=page], page);
            }
        }
    });
    let archive = source.export("archive", &["--namespace", &EVEN.fingerprint()]);
    let pages = archived(&archive);
    let places: HashMap<_, usize> = pages
        .iter()
        .map(|page| page.key.prefix())
        .zip(0..)
        .collect();
    for (place, page) in pages.iter().enumerate() {
        if let Some(parent) = page.parent {
            assert!(places[&parent] < place);
        }
    }
    for keys in &chains {
        let at: Vec<usize> = keys.iter().map(|key| places[&key.prefix()]).collect();
        assert!(at.windows(2).all(|pair| pair[1] == pair[0] + 1), "{at:?}");
    }
}

#[test]
fn a_namespace_is_exported_alone_and_one_that_is_not_there_is_a_usage_error() {
    let source = populated(Home::new());
    let file = source.beside("archive");
    let options = [text(&file), "--namespace", &RAGGED.fingerprint()];
    let document = source.report("export", &options, 0);
    assert_eq!(document["pages"], 20);
    assert_eq!(
        document["namespaces"][0]["fingerprint"],
        RAGGED.fingerprint()
    );
    assert_eq!(document["file_bytes"], file.metadata().unwrap().len());
    let target = Home::new();
    let document = target.report("import", &[text(&file)], 0);
    assert_eq!(document["pages_put"], 20);
    let other = source.beside("other");
    let nowhere = "0".repeat(32);
    let options = [text(&other), "--namespace", &nowhere];
    source.says(
        "export",
        &options,
        2,
        &["no namespace", "inspect --namespaces"],
    );
    let options = [text(&other), "--namespace", "ragged"];
    source.says("export", &options, 2, &["32 hex digits", "--model"]);
    assert!(!other.exists());
}

#[test]
fn a_key_brings_its_ancestors_and_nothing_else() {
    let source = populated(Home::new());
    let mut branch = chain(1, 10);
    branch.extend(chain(5, 7));
    let file = source.beside("archive");
    let key = branch[14].to_string();
    let options = [text(&file), "--key", &key];
    let document = source.report("export", &options, 0);
    assert_eq!(document["chain_complete"], true);
    let keys: Vec<_> = archived(&file).iter().map(|page| page.key).collect();
    assert_eq!(keys, branch[..15]);
    let nowhere = chain(77, 1)[0].to_string();
    let options = [text(&file), "--force", "--key", &nowhere];
    source.says("export", &options, 2, &["is not in the store"]);
}

#[test]
fn a_key_that_two_namespaces_have_is_exported_from_both_unless_one_is_named() {
    let source = populated(Home::new());
    let key = chain(2, 3)[2].to_string();
    let both = source.export("both", &["--key", &key]);
    assert_eq!(archived(&both).len(), 6);
    let fingerprint = RAGGED.fingerprint();
    let one = source.export("one", &["--key", &key, "--namespace", &fingerprint]);
    assert_eq!(archived(&one).len(), 3);
}

#[test]
fn a_chain_that_is_not_stored_whole_is_exported_from_where_it_is_and_said_so() {
    let source = Home::new();
    let keys = chain(1, 9);
    source.with(|store| {
        put(store, EVEN, &keys);
        let id = store.namespace(&EVEN.namespace()).unwrap();
        assert_eq!(store.delete(id, &keys[3..4]).unwrap(), 1);
    });
    let file = source.beside("archive");
    let key = keys[8].to_string();
    let options = [text(&file), "--key", &key];
    source.says("export", &options, 1, &["incomplete"]);
    let found: Vec<_> = archived(&file).iter().map(|page| page.key).collect();
    assert_eq!(found, keys[4..]);
    assert_eq!(archived(&file)[0].depth, 4);
    // A store takes a page whose parent it does not have.
    let target = Home::new();
    target.report("import", &[text(&file)], 0);
    assert_eq!(target.having(EVEN, &keys), 5);
}

#[test]
fn circles_that_callers_claimed_are_exported_once_and_taken() {
    let source = Home::new();
    let (keys, other) = (chain(1, 3), chain(2, 1));
    source.with(|store| {
        // Each follows the one before it, and the first the last; another one follows itself.
        put_after(store, RAGGED, &keys[0], &keys[2]);
        put_after(store, RAGGED, &keys[1], &keys[0]);
        put_after(store, RAGGED, &keys[2], &keys[1]);
        put_after(store, RAGGED, &other[0], &other[0]);
    });
    let file = source.beside("circle");
    let key = keys[1].to_string();
    let options = [text(&file), "--key", &key];
    let document = source.report("export", &options, 1);
    assert_eq!(
        (&document["pages"], &document["chain_complete"]),
        (&3.into(), &false.into())
    );
    let archive = source.export("archive", &[]);
    assert_eq!(archived(&archive).len(), 4);
    let target = Home::new();
    target.report("import", &[text(&archive)], 0);
    assert_eq!(
        target.having(RAGGED, &keys) + target.having(RAGGED, &other),
        4
    );
}

#[test]
fn an_empty_store_makes_an_archive_of_nothing() {
    let source = Home::new();
    let archive = source.export("archive", &[]);
    assert_eq!(items(&archive).len(), 2);
    let target = Home::new();
    let document = target.report("import", &[text(&archive)], 0);
    assert_eq!(document["pages_put"], 0);
}

#[test]
fn pages_larger_than_a_batch_and_than_a_read_go_through() {
    const LARGE: crate::home::Model = crate::home::Model("large", &[9 << 20, 123]);
    let source = Home::new();
    let keys = chain(1, 3);
    source.with(|store| put(store, LARGE, &keys));
    let archive = source.export("archive", &[]);
    let blocks = |(_, item): &(u64, ArchiveItem)| matches!(item, ArchiveItem::Pages(_));
    assert_eq!(
        items(&archive).iter().filter(|item| blocks(item)).count(),
        3
    );
    let target = Home::shaped(&[], 6, 32 << 20);
    target.report("import", &[text(&archive)], 0);
    assert_eq!(target.having(LARGE, &keys), 3);
    // A page that no segment holds is refused with its reason; smaller ones would go in.
    const HUGE: crate::home::Model = crate::home::Model("huge", &[20 << 20]);
    target.with(|store| put(store, HUGE, &keys[..1]));
    let archive = target.export("huge", &["--namespace", &HUGE.fingerprint()]);
    let document = Home::new().report("import", &[text(&archive)], 1);
    assert_eq!(document["refusals"][0]["kind"], "too_large");
    assert_eq!(document["refused_pages"], 1);
}

#[test]
fn a_pipe_carries_an_archive_from_store_to_store() {
    let source = populated(Home::new());
    let target = Home::new();
    let mut export = source.larder("export", &["-"]);
    let mut export = export.stdout(Stdio::piped()).spawn().unwrap();
    let mut import = target.larder("import", &["-", "--json"]);
    let output = import
        .stdin(export.stdout.take().unwrap())
        .output()
        .unwrap();
    assert!(export.wait().unwrap().success());
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(target.pages(), source.pages());
}

#[test]
fn a_dry_run_counts_and_stores_nothing() {
    let source = populated(Home::new());
    let archive = source.export("archive", &[]);
    let target = Home::new();
    target.with(|store| put(store, RAGGED, &chain(2, 5)));
    let before = pack(&target.path);
    let document = target.report("import", &[text(&archive), "--dry-run"], 0);
    assert_eq!(document["dry_run"], true);
    assert_eq!(document["duplicate_pages"], 5);
    assert_eq!(document["pages_put"], source.pages().len() - 5);
    assert!(before == pack(&target.path), "it was changed");
}

#[test]
fn a_store_in_use_is_exported_as_far_as_it_is_written() {
    let source = Home::new();
    let store = source.open();
    put(&store, EVEN, &chain(1, 9));
    store.flush().unwrap();
    let archive = source.export("archive", &[]);
    assert_eq!(archived(&archive).len(), 9);
    let target = Home::new();
    let _in_use = target.open();
    target.says("import", &[text(&archive)], 3, &["in use by process"]);
}

#[test]
fn pages_that_the_owner_drops_while_they_are_exported_are_left_out_and_are_no_damage() {
    // Of more than is read ahead.
    let source = Home::shaped(&[], 24, SEGMENT_BYTES);
    source.with(|store| (1..=30).for_each(|seed| put(store, EVEN, &chain(seed, 100))));
    let mut export = source.larder("export", &["-", "--json"]);
    let mut child = export
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The exported pages have been chosen when the first bytes come. All the rest waits for room in
    // the pipe.
    let mut out = child.stdout.take().unwrap();
    let mut begun = vec![0; 4096];
    out.read_exact(&mut begun).unwrap();
    let store = source.open();
    (101..=160).for_each(|seed| put(&store, EVEN, &chain(seed, 100)));
    store.flush().unwrap();
    out.read_to_end(&mut begun).unwrap();
    let output = child.wait_with_output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{report}");
    let count = |name: &str| report[name].as_u64().unwrap();
    assert!(count("departed_pages") > 0, "{report}");
    assert_eq!(count("pages") + count("departed_pages"), 3000);
    assert_eq!(count("damaged_pages"), 0);
    assert_eq!(report["damage"], serde_json::json!([]));
    let file = source.beside("archive");
    std::fs::write(&file, &begun).unwrap();
    assert_eq!(archived(&file).len() as u64, count("pages"));
}

#[test]
fn what_does_not_fit_is_refused_beforehand_and_forced_in_by_dropping_what_is_coldest() {
    let source = Home::new();
    source.with(|store| (1..=8).for_each(|seed| put(store, EVEN, &chain(seed, 100))));
    let archive = source.export("archive", &[]);
    let target = Home::new();
    target.with(|store| {
        (11..=15).for_each(|seed| put(store, EVEN, &chain(seed, 100)));
        // Half of the incoming pages are stored already.
        (1..=4).for_each(|seed| put(store, EVEN, &chain(seed, 100)));
    });
    let before = target.pages();
    let words = ["no room", "25 MiB", "--force"];
    target.says("import", &[text(&archive)], 3, &words);
    assert_eq!(target.pages(), before);
    let document = target.report("import", &[text(&archive), "--force"], 0);
    assert_eq!(document["duplicate_pages"], 400);
    assert_eq!(document["pages_put"], 400);
    assert!(document["evicted_pages"].as_u64().unwrap() > 0);
    // Pages that are stored already need no room.
    let half = Home::new();
    half.with(|store| (1..=8).for_each(|seed| put(store, EVEN, &chain(seed, 100))));
    let document = half.report("import", &[text(&archive)], 0);
    assert_eq!(document["duplicate_pages"], 800);
}

#[test]
fn a_dry_run_over_a_store_in_use_or_not_closed_says_so() {
    let source = populated(Home::new());
    let archive = source.export("archive", &[]);
    let options = [text(&archive), "--dry-run"];
    let target = Home::new();
    {
        let store = target.open();
        put(&store, EVEN, &chain(1, 9));
        target.says("import", &options, 3, &["in use by process"]);
    }
    let document = target.report("import", &options, 0);
    assert_eq!(document["condition"], "not_closed");
    target.open().close().unwrap();
    let document = target.report("import", &options, 0);
    assert_eq!(document["condition"], "clean");
}

/// Waits until a process has its signals blocked, so that it takes note of them.
fn until_it_listens(child: &mut Child) {
    let status = format!("/proc/{}/status", child.id());
    eventually("it has its signals blocked", || {
        assert_eq!(child.try_wait().unwrap(), None, "it ended by itself");
        let status = std::fs::read_to_string(&status).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
        let mask = u64::from_str_radix(mask.unwrap().trim(), 16).unwrap();
        mask & (1 << (Signal::SIGINT as i32 - 1)) != 0
    });
}

#[test]
fn an_import_that_waits_for_its_input_is_ended_by_a_signal() {
    let source = populated(Home::new());
    let archive = std::fs::read(source.export("archive", &[])).unwrap();
    // Before the head, and in the midst of the pages.
    for begun in [0, archive.len() / 2] {
        let target = Home::new();
        let mut import = target.larder("import", &["-"]);
        let import = import
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let Process(import) = &mut Process(import.unwrap());
        let mut pipe = import.stdin.take().unwrap();
        pipe.write_all(&archive[..begun]).unwrap();
        until_it_listens(import);
        kill(Pid::from_raw(import.id().cast_signed()), Signal::SIGINT).unwrap();
        let status = found("it ends", || import.try_wait().unwrap());
        assert_eq!(status.code(), Some(130), "{begun} bytes");
        drop(pipe);
        // Closed in order.
        let document = target.report("inspect", &[], 0);
        assert_eq!(document["condition"], "clean", "{document}");
    }
}

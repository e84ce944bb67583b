//! Remotes whose objects have encoded pages, and stores that encode, in all pairs.

use larder_engine::{CodecChoice, OpenOptions, Store};
use larder_format::PageKey;

use super::*;
use crate::home::SMOOTH;

/// A store with a chain of two runs of pages that the codec makes smaller.
fn source(codec: CodecChoice, keys: &[PageKey]) -> Home {
    let home = Home::shaped(&[], 8, 16 << 20);
    let store = Store::open(&home.path, OpenOptions::default().with(|o| o.codec = codec));
    let store = store.unwrap();
    put(&store, SMOOTH, keys);
    store.close().unwrap();
    home
}

#[test]
fn pages_reach_another_node_from_each_kind_of_store_by_each_kind_of_remote() {
    let keys = chain(1, 2 * RUN_PAGES as u64);
    for stored in [CodecChoice::Off, CodecChoice::Bf16] {
        let source = source(stored, &keys);
        let bytes = ["off", "bf16"].map(|codec| {
            let shared = Shared::new();
            let set = shared.remote("init", None, &["--codec", codec], 0);
            assert_eq!(set["codec"], codec);
            let pushed = shared.push(&source, 0);
            assert_eq!(pushed["runs_pushed"], 2, "{stored} {codec}: {pushed:#}");
            let verified = shared.remote("verify", None, &[], 0);
            assert_eq!(verified["good_pages"], 2 * RUN_PAGES);
            let node = Home::shaped(&[], 8, 16 << 20);
            let pulled = shared.remote("pull", Some(&node), &[], 0);
            assert_eq!(pulled["pages_put"], 2 * RUN_PAGES);
            assert_eq!(node.having(SMOOTH, &keys), keys.len());
            pushed["bytes_pushed"].as_u64().unwrap()
        });
        // A length shows sixteenths of a page.
        assert!(bytes[1] * 5 <= bytes[0] * 4, "{stored}: {bytes:?}");
    }
}

#[test]
fn an_object_without_keys_is_an_archive_that_import_takes() {
    let keys = chain(1, RUN_PAGES as u64);
    let source = source(CodecChoice::Off, &keys);
    let bytes = ["off", "bf16"].map(|codec| {
        let shared = Shared::new();
        shared.remote("init", None, &["--codec", codec], 0);
        let url = shared.url();
        let push = ["remote", "push", text(&source.path), &url, "--unsigned"];
        let pushed = report(&[&push[..], &["--run-tokens", RUN_TOKENS]].concat(), 0);
        let objects = shared.objects();
        let object = objects
            .iter()
            .find(|file| file.extension().is_some_and(|end| end == "run"));
        let node = Home::shaped(&[], 8, 16 << 20);
        let imported = node.report("import", &[text(object.unwrap())], 0);
        assert_eq!(imported["pages_put"], RUN_PAGES);
        assert_eq!(node.having(SMOOTH, &keys), RUN_PAGES);
        pushed["bytes_pushed"].as_u64().unwrap()
    });
    assert!(bytes[1] * 5 < bytes[0] * 4, "{bytes:?}");
}

#[test]
fn the_codec_of_a_remote_is_set_again_and_kept_by_what_does_not_set_it() {
    let shared = Shared::new();
    let codec = |options: &[&str]| shared.remote("init", None, options, 0)["codec"].clone();
    assert_eq!(codec(&[]), "off");
    assert_eq!(codec(&["--codec", "auto"]), "auto");
    assert_eq!(codec(&["--new"]), "auto");
    assert_eq!(shared.objects().len(), 1);
    assert_eq!(codec(&["--codec", "off"]), "off");
    assert_eq!(shared.objects(), Vec::<PathBuf>::new());
    // It is no object.
    codec(&["--codec", "bf16"]);
    assert_eq!(shared.remote("ls", None, &[], 0)["runs"], 0);
    fs::write(shared.root().join("v1-codec"), "zstd\n").unwrap();
    let unknown = shared.remote("init", None, &[], 1);
    let problem = unknown["problem"].as_str().unwrap();
    assert!(
        problem.contains("zstd") && problem.contains("--codec"),
        "{problem}"
    );
    let source = source(CodecChoice::Off, &chain(1, RUN_PAGES as u64));
    let url = shared.url();
    let push = ["remote", "push", text(&source.path), &url, "--unsigned"];
    fails(&push, 3, &["zstd"]);
    fs::remove_dir(shared.root().join("v1")).unwrap();
    let unmarked = shared.remote("init", None, &["--codec", "off"], 0);
    assert_eq!(unmarked["codec"], Value::Null);
}

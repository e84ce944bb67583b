//! `larder top` on a terminal of 80 x 24, and on others.

use larder_engine::PageStore;

use super::support::{directory, fails, json, text};
use super::terminal::Terminal;
use super::{STRANGE, client, put_and_read, serve, serve_damaged};

const USUAL: (u16, u16) = (24, 80);

fn store_in(directory: &tempfile::TempDir, size: &str) -> std::path::PathBuf {
    let path = directory.path().join("store");
    json(&[
        "create",
        text(&path),
        "--size",
        size,
        "--page-bytes",
        "16KiB",
    ]);
    path
}

#[test]
fn a_used_store_is_shown_on_24_rows_without_colours() {
    let directory = directory();
    let path = store_in(&directory, "128MiB");
    let _owner = serve(&path);
    let store = client(&path);
    put_and_read(&store, "tiny", 1, 20);
    let top = Terminal::of(&["top", text(&path), "--every", "100ms"], USUAL);
    let rows = top.shows(&[
        "larder top",
        "20, 320 KiB",
        "100.0 % in all",
        "tiny",
        "nothing",
    ]);
    let begins = |at: usize, word: &str| assert!(rows[at].trim().starts_with(word), "{rows:#?}");
    for (at, word) in [
        (0, "larder top"),
        (1, "Pages"),
        (2, "Hits"),
        (3, "Now"),
        (4, "Disk"),
    ] {
        begins(at, word);
    }
    for word in [
        "Evictions",
        "Pacing",
        "Remote",
        "Wrong now",
        "Processes (2)",
        "Namespaces (1)",
    ] {
        assert!(
            rows.iter().any(|row| row.starts_with(word)),
            "{word}: {rows:#?}"
        );
    }
    begins(23, "q ends it");
    // Hits by second: a second chain is read while the screen is drawn.
    put_and_read(&store, "tiny", 2, 200);
    top.shows(&["█"]);
    let sent = top.quits();
    // Bold and reversed text, and no colour.
    let colours = regex_lite::Regex::new("\u{1b}\\[([0-9;]*;)?(3[0-8]|4[0-8]|9[0-7])(;[0-9;]*)?m");
    assert!(!colours.unwrap().is_match(&sent), "{sent:?}");
    store.close().unwrap();
}

#[test]
fn a_store_without_an_owner_an_empty_one_and_a_path_without_a_store_are_readable() {
    let directory = directory();
    let path = store_in(&directory, "128MiB");
    let top = Terminal::of(&["top", text(&path), "--every", "100ms"], USUAL);
    top.shows(&["No answer", "no process", "q ends it"]);
    // The screen goes on when an owner comes, and when it ends.
    let owner = serve(&path);
    top.shows(&["Pages", "Namespaces: none", "Processes (1)"]);
    drop(owner);
    top.shows(&["No answer"]);
    top.quits();
    let nothing = directory.path().join("nothing");
    let top = Terminal::of(&["top", text(&nothing)], USUAL);
    top.shows(&["No answer", "nothing"]);
    top.quits();
}

#[test]
fn damage_is_what_is_wrong_now() {
    let directory = directory();
    let path = store_in(&directory, "128MiB");
    let _owner = serve_damaged(&path);
    let top = Terminal::of(&["top", text(&path)], USUAL);
    let rows = top.shows(&["Wrong now", "1 damaged page dropped"]);
    assert!(
        rows.iter().any(|row| row.starts_with("Namespaces")),
        "{rows:#?}"
    );
    top.quits();
}

#[test]
fn strange_names_of_64_namespaces_keep_to_their_rows() {
    let directory = directory();
    let path = store_in(&directory, "256MiB");
    let _owner = serve(&path);
    let store = client(&path);
    for at in 0..64 {
        let name = format!("{at} {}", STRANGE[at % STRANGE.len()]);
        put_and_read(&store, &name, 100 + at as u64, 1);
    }
    let mut top = Terminal::of(&["top", text(&path)], (100, 120));
    let rows = top.shows(&["Namespaces (64)", "<script>alert(1)", "מודל", "模型"]);
    assert!(!rows.join("").contains('\u{202e}'), "{rows:#?}");
    // Each row begins with its fingerprint.
    let fingerprint = regex_lite::Regex::new("^[0-9a-f]{12} ").unwrap();
    let named = rows.iter().filter(|row| fingerprint.is_match(row));
    assert_eq!(named.count(), 64, "{rows:#?}");
    top.types("q");
    let mut top = Terminal::of(&["top", text(&path)], USUAL);
    top.shows(&["Namespaces 1-", "of 64"]);
    top.types("\u{1b}[6~");
    top.shows(&["Namespaces 11-"]);
    for _ in 0..10 {
        top.types("\u{1b}[6~");
    }
    top.shows(&["-64 of 64"]);
    top.quits();
    store.close().unwrap();
}

#[test]
fn a_small_terminal_shows_the_first_rows() {
    let directory = directory();
    let path = store_in(&directory, "128MiB");
    let _owner = serve(&path);
    for size in [(1, 1), (3, 20), (10, 40)] {
        let top = Terminal::of(&["top", text(&path)], size);
        if size.0 > 1 {
            top.shows(&["larder top"]);
        }
        top.quits();
    }
}

#[test]
fn without_a_terminal_the_lines_of_stat_are_named() {
    fails(
        &["top", "/nowhere"],
        2,
        &["terminal", "larder stat /nowhere --watch"],
    );
    let usual = Terminal::of(&["top", "/nowhere", "--every", "1ms"], USUAL);
    usual.shows(&["--every", "100ms"]);
}

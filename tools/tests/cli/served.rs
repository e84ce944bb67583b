//! A served store: its directory stands for it, and its settings are shown.

use super::*;

/// A store under the name that a backend gives it, and its owner with settings of its own.
fn served(directory: &TempDir) -> (Process, String) {
    let path = directory.path().join("larder.store");
    json(&["create", text(&path), "--size", STORE_SIZE]);
    let settings = ["--sync", "always", "--lease", "7s", "--prewrite"];
    let mut owner = larder(&[&["serve", text(directory.path())][..], &settings].concat())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = String::new();
    let told = owner.stdout.take().unwrap();
    BufReader::new(told).read_line(&mut first).unwrap();
    (Process(owner), first)
}

#[test]
fn the_directory_of_a_backend_stands_for_the_store_in_it() {
    let directory = directory();
    let path = directory.path().join("larder.store");
    let at = text(directory.path());
    let (owner, first) = served(&directory);
    assert!(first.contains("larder.store.sock"), "{first}");
    for arguments in [&["stat", at][..], &["inspect", at]] {
        assert_eq!(json(arguments)["path"], text(&path), "{arguments:?}");
    }
    drop(owner);
    for arguments in [&["verify", at][..], &["compact", at, "--dry-run"]] {
        assert_eq!(json(arguments)["path"], text(&path), "{arguments:?}");
    }
    let grow = ["create", at, "--size", "512MiB", "--grow"];
    assert_eq!(json(&grow)["path"], text(&path));
    let said = doctor(&[at]);
    assert!(
        said.contains(&format!("the store is {}", text(&path))),
        "{said}"
    );
}

#[test]
fn the_settings_of_the_owner_are_shown_and_a_client_with_others_warns_once() {
    let directory = directory();
    let at = text(directory.path());
    let (_owner, _) = served(&directory);
    let told = json(&["stat", at]);
    assert_eq!(told["sync"], "always");
    assert_eq!(told["lease_seconds"], 7.0);
    assert_eq!(told["prewrite"], true);
    says(&["stat", at], 0, &["sync always, lease 7 s, prewrite true"]);
    let said = doctor(&[at]);
    assert!(
        said.contains("sync always, lease 7s, prewrite true"),
        "{said}"
    );
    let pages = ["--page-bytes", "64KiB", "--pages", "256", "--batch", "16"];
    let put = [&["bench", at, "--op", "put", "--shared"][..], &pages].concat();
    let warnings = |more: &[&str]| {
        let output = ends(&[&put[..], more].concat(), 0);
        stderr(&output)
            .matches("the settings of the store's owner")
            .count()
    };
    assert_eq!(warnings(&[]), 1);
    let same = ["--sync", "always", "--lease", "7s", "--prewrite"];
    assert_eq!(warnings(&same), 0);
}

#[test]
fn refused_pages_are_explained_once() {
    let directory = directory();
    let at = |name: &str| text(&directory.path().join(name)).to_owned();
    let (large, archive) = (at("large"), at("archive"));
    let segments = ["--size", "256MiB", "--segment-size", "32MiB"];
    ends(&[&["create", &large][..], &segments].concat(), 0);
    let two = ["--page-bytes", "20MiB", "--pages", "2", "--batch", "1"];
    ends(&[&["bench", &large, "--op", "put"][..], &two].concat(), 0);
    ends(&["export", &large, &archive], 0);
    let small = store_in(&directory);
    let said = stderr(&ends(&["import", text(&small), &archive], 1));
    let explained = said.matches("none of this size can ever be stored").count();
    assert_eq!(explained, 1, "{said}");
}

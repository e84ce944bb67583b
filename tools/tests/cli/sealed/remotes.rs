//! Runs of encrypted stores in a remote.

use super::*;

/// A directory as a new remote, with the key of its nodes.
fn remote(place: &Place) -> (String, String) {
    let (directory, key) = (place.at("remote"), place.at("remote-key"));
    fs::create_dir(&directory).unwrap();
    json(&["remote", "key", &key]);
    (format!("file://{directory}"), key)
}

/// Puts the runs of a store into a new remote.
fn push_new<'a>(store: &'a str, url: &'a str) -> [&'a str; 7] {
    ["remote", "push", store, url, "--new", "--run-tokens", "256"]
}

/// The names and the bytes of everything below a directory.
fn all_of(directory: &Path) -> Vec<u8> {
    let mut all = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        all.extend(path.file_name().unwrap().as_encoded_bytes());
        match path.is_dir() {
            true => all.extend(all_of(&path)),
            false => all.extend(fs::read(&path).unwrap()),
        }
    }
    all
}

#[test]
fn runs_of_an_encrypted_store_show_nothing_and_reach_other_stores() {
    let place = Place::new();
    let (key, other) = (place.key("key"), place.key("other"));
    let (url, shared) = remote(&place);
    let store = place.store("store", Some(&key));
    let of_remote = ["--key-file", &shared];
    let push = [&push_new(&store, &url)[..], &of_remote].concat();
    fails(&push, 3, &["is encrypted", "--store-key-file"]);
    let with_key = [&push[..], &["--store-key-file", &key]].concat();
    let pushed = json(&with_key);
    assert_eq!(pushed["runs_pushed"], 6);
    assert_eq!(json(&with_key)["present_runs"], 6);
    let bytes = all_of(Path::new(&place.at("remote")));
    for key in [&key, &shared] {
        assert_eq!(Needles::new(Some(key)).found_in(&bytes), BTreeSet::new());
    }
    let text = bytes.escape_ascii().to_string();
    let fingerprint = space(TENANT).fingerprint().to_string();
    assert!(!text.contains(&fingerprint));
    assert!(
        keys()
            .iter()
            .all(|key| !text.contains(&key.to_string()[..24]))
    );
    let verified = json(&[&["remote", "verify", &url][..], &of_remote].concat());
    assert_eq!(verified["good_pages"], keys().len());
    for (name, key) in [("plain", None), ("sealed", Some(&other))] {
        let taker = place.at(name);
        let with = |option: &'static str| key.map_or_else(Vec::new, |key| vec![option, key]);
        json(&[&["create", &taker][..], &SIZE, &with("--key-file")].concat());
        let pull = ["remote", "pull", &taker, &url];
        if key.is_some() {
            let without = [&pull[..], &of_remote].concat();
            fails(&without, 3, &["is encrypted", "--store-key-file"]);
        }
        let pull = [&pull[..], &of_remote, &with("--store-key-file")].concat();
        assert_eq!(json(&pull)["pages_put"], keys().len());
        assert_eq!(json(&pull)["present_runs"], 6);
        assert_eq!(hits(&taker, key.map(String::as_str)), keys().len());
    }
    // Without the key of the nodes there is no page of it.
    let another = place.at("another-key");
    json(&["remote", "key", &another]);
    let wrong = report(&["remote", "verify", &url, "--key-file", &another], 1);
    assert_eq!(wrong["good_pages"], 0);
}

#[test]
fn an_erased_tenant_is_removed_from_the_remote_and_does_not_come_back() {
    let place = Place::new();
    let key = place.key("key");
    let (url, shared) = remote(&place);
    let store = place.store("store", Some(&key));
    let of_remote = ["--key-file", &shared, "--store-key-file", &key];
    json(&[&push_new(&store, &url)[..], &of_remote].concat());
    let erase = ["erase", &store, "--tenant", TENANT, "--key-file", &key];
    json(&erase);
    // A node refuses runs of a tenant that it erased.
    let pull = [&["remote", "pull", &store, &url][..], &of_remote].concat();
    let refused = report(&pull, 1);
    assert_eq!(
        (&refused["pages_put"], &refused["refused_pages"]),
        (&0.into(), &keys().len().into())
    );
    assert_eq!(hits(&store, Some(&key)), 0);
    let with_remote = ["--remote", &url, "--remote-key-file", &shared];
    let other = ["erase", &store, "--tenant", "another", "--key-file", &key];
    let kept = json(&[&other[..], &with_remote].concat());
    assert_eq!(kept["removed_runs"], 0);
    fails(
        &[&erase[..], &["--remote", &url]].concat(),
        2,
        &["--remote-key-file"],
    );
    let removed = json(&[&erase[..], &with_remote].concat());
    assert_eq!(removed["removed_runs"], 6);
    assert_eq!(json(&["remote", "ls", &url])["runs"], 0);
}

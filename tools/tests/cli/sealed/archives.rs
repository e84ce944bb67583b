//! Archives of encrypted stores, and encrypted archives of plain ones.

use super::*;

/// Bytes of a block.
const BLOCK: usize = 4096;

/// A new store without pages.
fn empty(place: &Place, name: &str, key: Option<&str>) -> String {
    let store = place.at(name);
    let with = key.map_or_else(Vec::new, |key| vec!["--key-file", key]);
    json(&[&["create", &store][..], &SIZE, &with].concat());
    store
}

/// The pages in a file are those of the tests, and none of them can be read from it.
fn shows_nothing(archive: &str, keys: &[&str]) {
    let bytes = fs::read(archive).unwrap();
    for key in keys {
        assert_eq!(Needles::new(Some(key)).found_in(&bytes), BTreeSet::new());
    }
    assert!(bytes.len() > super::keys().len() * 4 * BLOCK);
}

#[test]
fn an_archive_of_an_encrypted_store_opens_with_its_key_alone() {
    let place = Place::new();
    let (key, other) = (place.key("key"), place.key("other"));
    let (store, archive) = (place.store("store", Some(&key)), place.at("archive"));
    let made = json(&["export", &store, &archive, "--key-file", &key]);
    let pages = keys().len();
    assert_eq!(made["pages"], pages);
    assert!(made["archive_key_id"].is_string());
    shows_nothing(&archive, &[&key]);
    let plain = empty(&place, "plain", None);
    let sealed = empty(&place, "sealed", Some(&other));
    let before = [&plain, &sealed].map(|store| fs::read(store).unwrap());
    let hint = "--archive-key-file";
    fails(&["import", &plain, &archive], 3, &["no key is given", hint]);
    let into = ["import", &sealed, &archive, "--key-file", &other];
    fails(&into, 3, &["is encrypted for the key", hint]);
    let wrong = ["import", &plain, &archive, hint, &other];
    fails(&wrong, 3, &["is encrypted for the key", hint]);
    let dry = [&wrong[..], &["--dry-run"]].concat();
    fails(&dry, 3, &["is encrypted for the key", hint]);
    assert!(before == [&plain, &sealed].map(|store| fs::read(store).unwrap()));
    let with = |store| ["import", store, &archive, hint, &key];
    let would = json(&[&with(&plain)[..], &["--dry-run"]].concat());
    assert_eq!(would["pages_put"], pages);
    let taken = json(&with(&plain));
    assert_eq!(
        (&taken["pages_put"], &taken["encrypted"]),
        (&pages.into(), &true.into())
    );
    assert_eq!(hits(&plain, None), pages);
    json(&[&with(&sealed)[..], &["--key-file", &other]].concat());
    assert_eq!(hits(&sealed, Some(&other)), pages);
    let clear = place.at("clear");
    let store_key = ["export", &store, &clear, "--key-file", &key];
    json(&[&store_key[..], &["--plaintext"]].concat());
    let swapped = ["import", &plain, &clear, hint, &key];
    fails(&swapped, 2, &["the archive is not encrypted"]);
    // Through a pipe, into a store that a process serves.
    let served_store = empty(&place, "served", Some(&other));
    let (taken, _) = served(&served_store, Some(&other), || {
        let mut import = larder(&["import", &served_store, "-", hint, &key, "--json"]);
        import.stdin(fs::File::open(&archive).unwrap());
        let output = import.output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    });
    assert_eq!(taken["pages_put"], pages);
    assert_eq!(hits(&served_store, Some(&other)), pages);
}

#[test]
fn the_key_of_an_archive_is_that_of_the_store_or_one_of_its_own() {
    let place = Place::new();
    let (key, own) = (place.key("key"), place.key("own"));
    let store = place.store("store", Some(&key));
    let plain = place.store("plain", None);
    let (archive, of_plain) = (place.at("archive"), place.at("of-plain"));
    let command = format!("cat {own}");
    let export = ["export", &store, &archive, "--key-file", &key];
    json(&[&export[..], &["--archive-key-command", &command]].concat());
    json(&["export", &plain, &of_plain, "--archive-key-file", &own]);
    for archive in [&archive, &of_plain] {
        shows_nothing(archive, &[&key, &own]);
        let taker = empty(&place, &format!("{}-taker", archive.len()), Some(&key));
        let import = ["import", &taker, archive, "--key-file", &key];
        fails(&import, 3, &["is encrypted for the key"]);
        json(&[&import[..], &["--archive-key-file", &own]].concat());
        assert_eq!(hits(&taker, Some(&key)), keys().len());
    }
    // In clear, by name.
    let clear = place.at("clear");
    let export = ["export", &store, &clear, "--key-file", &key, "--plaintext"];
    let both = [&export[..], &["--archive-key-file", &own]].concat();
    fails(&both, 2, &["cannot be used with"]);
    assert!(json(&export)["archive_key_id"].is_null());
    let needles = Needles::new(Some(&key));
    let found = needles.found_in(&fs::read(&clear).unwrap());
    assert_eq!(
        found,
        BTreeSet::from(["model", "page", "page key", "tenant"])
    );
}

/// A block with a right CRC.
fn with_crc(archive: &mut [u8], block: usize) {
    let block = &mut archive[block * BLOCK..][..BLOCK];
    block[16..20].fill(0);
    let crc = crc32fast::hash(block);
    block[16..20].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn a_changed_archive_gives_the_pages_before_the_change_and_only_wrong_bytes_are_damage() {
    let place = Place::new();
    let key = place.key("key");
    let (store, archive) = (place.store("store", Some(&key)), place.at("archive"));
    json(&["export", &store, &archive, "--key-file", &key]);
    let whole = fs::read(&archive).unwrap();
    let taker = empty(&place, "taker", None);
    let import = ["import", &taker, &archive, "--archive-key-file", &key];
    let changed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = whole.clone();
        change(&mut bytes);
        fs::write(&archive, bytes).unwrap();
    };
    // The namespace, and the list of pages, by a writer that computes CRCs. Nothing is damaged.
    for (block, at) in [(1, 100), (2, 100), (2, 60), (2, 90)] {
        changed(&|bytes| {
            bytes[block * BLOCK + at] ^= 0x20;
            with_crc(bytes, block);
        });
        let found = report(&import, 1);
        let (damaged, forged) = (&found["damaged"], &found["forged"]);
        assert_eq!(
            (damaged, forged),
            (&false.into(), &true.into()),
            "{block}, {at}"
        );
        assert_eq!((&found["pages_put"], hits(&taker, None)), (&0.into(), 0));
    }
    // The version of a block: a former one has the same content.
    for block in [1, 2] {
        changed(&|bytes| {
            bytes[block * BLOCK + 8] = 1;
            with_crc(bytes, block);
        });
        let found = report(&import, 1);
        assert_eq!((&found["forged"], hits(&taker, None)), (&true.into(), 0));
    }
    changed(&|bytes| {
        bytes[8] = 1;
        with_crc(bytes, 0);
    });
    fails(&import, 3, &["format version 1"]);
    // The head.
    changed(&|bytes| {
        bytes[96] ^= 1;
        with_crc(bytes, 0);
    });
    fails(&import, 3, &["its head does not open with its key"]);
    // A head that states no key: of the same length, and of a plain archive.
    changed(&|bytes| {
        bytes[52] = 0;
        with_crc(bytes, 0);
    });
    says(&import, 1, &["encrypted", "changed the head"]);
    changed(&|bytes| {
        bytes[12..16].copy_from_slice(&120_u32.to_le_bytes());
        bytes[52] = 0;
        bytes[120..BLOCK].fill(0);
        with_crc(bytes, 0);
    });
    let found = report(&["import", &taker, &archive], 1);
    let (damaged, forged) = (&found["damaged"], &found["forged"]);
    assert_eq!((damaged, forged), (&false.into(), &true.into()));
    assert_eq!(hits(&taker, None), 0);
    // Wrong bytes, in a structure and in a payload.
    changed(&|bytes| bytes[2 * BLOCK + 100] ^= 0x20);
    let found = report(&import, 1);
    assert_eq!(
        (&found["damaged"], &found["forged"]),
        (&true.into(), &false.into())
    );
    assert_eq!(hits(&taker, None), 0);
    let third = (3 + 2 * 4) * BLOCK + 9;
    changed(&|bytes| bytes[third] ^= 0x20);
    let found = report(&import, 1);
    assert_eq!(
        (&found["damaged"], &found["pages_put"]),
        (&true.into(), &2.into())
    );
    assert_eq!(hits(&taker, None), 2);
    // Cut off, in the middle of a page.
    changed(&|bytes| bytes.truncate(third));
    let found = report(&import, 1);
    assert_eq!(
        (&found["damaged"], &found["duplicate_pages"]),
        (&true.into(), &2.into())
    );
}

#[test]
fn pages_of_a_tenant_that_was_erased_since_do_not_come_back_from_an_archive() {
    let place = Place::new();
    let key = place.key("key");
    let (store, archive) = (place.store("store", Some(&key)), place.at("archive"));
    let clear = place.at("clear");
    json(&["export", &store, &archive, "--key-file", &key]);
    json(&["export", &store, &clear, "--key-file", &key, "--plaintext"]);
    json(&["erase", &store, "--tenant", TENANT, "--key-file", &key]);
    let pages = keys().len();
    let refused = |of: &Value| {
        assert_eq!(
            (&of["refused_pages"], &of["pages_put"]),
            (&pages.into(), &0.into())
        );
        assert_eq!(of["refusals"][0]["kind"], "erased");
    };
    for archive in [&archive, &clear] {
        refused(&report(&["import", &store, archive, "--key-file", &key], 1));
    }
    let ((), _) = served(&store, Some(&key), || {
        let import = ["import", &store, &archive, "--archive-key-file", &key];
        refused(&report(&import, 1));
    });
    assert_eq!(hits(&store, Some(&key)), 0);
    // The tenant comes back by itself, and its pages of before do not.
    let opened = open(&store, Some(&key));
    put(&opened);
    opened
        .clear_namespace(opened.namespace(&space(TENANT)).unwrap())
        .unwrap();
    opened.close().unwrap();
    refused(&report(
        &["import", &store, &archive, "--key-file", &key],
        1,
    ));
    // A store that did not erase it takes them.
    let another = empty(&place, "another", Some(&key));
    json(&["import", &another, &archive, "--key-file", &key]);
    assert_eq!(hits(&another, Some(&key)), pages);
}

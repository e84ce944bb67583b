//! Encrypted stores whose superblocks a writer without the key has changed.

use super::*;

#[test]
fn an_encrypted_store_whose_superblocks_say_that_it_is_plain_is_never_taken_for_a_plain_one() {
    let place = Place::new();
    let key = place.key("key");
    let (store, saved) = (place.store("store", Some(&key)), place.at("saved"));
    json(&["superblock", "save", &store, &saved]);
    let mut bytes = fs::read(&store).unwrap();
    for at in support::superblocks(Path::new(&store)) {
        let block = &mut bytes[usize::try_from(at).unwrap()..][..4096];
        block[228..236].fill(0);
        block[16..20].fill(0);
        let crc = crc32fast::hash(block);
        block[16..20].copy_from_slice(&crc.to_le_bytes());
    }
    fs::write(&store, &bytes).unwrap();
    let found = report(&["verify", &store], 1);
    assert_eq!(found["encryption"], "locked");
    assert_eq!(found["damage"][0]["kind"], "keyring");
    let repair = ["verify", &store, "--repair"];
    for command in [&repair[..], &["compact", &store], &["quota", &store]] {
        fails(command, 3, &["key"]);
        let with_key = [command, &["--key-file", &key]].concat();
        fails(&with_key, 3, &["changed the superblocks"]);
    }
    let opened = Store::open(Path::new(&store), OpenOptions::default());
    let error = opened.err().unwrap().to_string();
    assert!(error.contains("changed the superblocks"), "{error}");
    assert!(fs::read(&store).unwrap() == bytes);
    json(&["superblock", "restore", &store, &saved]);
    assert_eq!(hits(&store, Some(&key)), keys().len());
}

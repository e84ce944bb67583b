//! `larder create`, `create --grow` and `volume add` of encrypted stores, killed before each of
//! their calls that change a file.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use larder_engine::{OpenOptions, PageStore, Store, StoreError};
use larder_format::{KEYRING_BYTES, KeyringCopy, keyring_offsets};
use larder_offline::superblock_to_save;
use tempfile::TempDir;

use crate::home::Pool;
use crate::support::sparse::{pack, unpack};
use crate::support::{chain, directory, ends, larder, overwrite, text};
use crate::traced::{End, can_trace, end_at};

const PAGES: u64 = 20;

const CREATE: &str =
    "create @store --size 16MiB --segment-size 256KiB --volume @second --key-file @key";

/// A directory for an encrypted store of the volumes `store` and `second`, and a third volume.
struct Place(TempDir);

impl Place {
    fn new() -> Place {
        let place = Place(directory());
        let key = place.at("key");
        fs::write(&key, "07".repeat(32) + "\n").unwrap();
        fs::set_permissions(&key, fs::Permissions::from_mode(0o400)).unwrap();
        place
    }

    /// With a store with pages.
    fn filled() -> Place {
        let place = Place::new();
        place.runs(CREATE);
        let store = place.open(true).unwrap();
        Pool::new(&store).put(&chain(1, PAGES));
        store.close().unwrap();
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn open(&self, with_key: bool) -> Result<Store, StoreError> {
        let key = format!("file:{}", text(&self.at("key")));
        let options = OpenOptions::default();
        let options = options.with(|o| o.wrapping = with_key.then(|| key.parse().unwrap()));
        Store::open(&self.at("store"), options)
    }

    /// Words of a command, with the paths of the files that they name.
    fn words(&self, words: &str) -> Vec<String> {
        let path = |word: &str| match word.strip_prefix('@') {
            Some(name) => text(&self.at(name)).to_owned(),
            None => word.to_owned(),
        };
        words.split(' ').map(path).collect()
    }

    /// Runs a command, which must succeed.
    #[track_caller]
    fn runs(&self, words: &str) {
        let words = self.words(words);
        ends(&words.iter().map(String::as_str).collect::<Vec<_>>(), 0);
    }

    /// The files of volumes, packed.
    fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let files = fs::read_dir(self.0.path()).unwrap();
        let files = files.map(|file| file.unwrap().path());
        let files = files.filter(|path| !path.ends_with("key"));
        files.map(|path| (path.clone(), pack(&path))).collect()
    }

    fn restore(&self, files: &BTreeMap<PathBuf, Vec<u8>>) {
        for path in self.files().into_keys() {
            fs::remove_file(path).unwrap();
        }
        files.iter().for_each(|(path, packed)| unpack(packed, path));
    }

    /// All is there, in so many volumes: the pages, and a keyring that is the same in all places.
    #[track_caller]
    fn is_whole(&self, pages: usize, volumes: &[&str]) {
        assert!(matches!(self.open(false), Err(StoreError::Sealed(_))));
        let store = self.open(true).unwrap();
        assert_eq!(Pool::new(&store).hits(&chain(1, PAGES)), pages);
        store.close().unwrap();
        let id = superblock_to_save(&self.at("store")).unwrap().store;
        let copies = volumes.iter().flat_map(|name| {
            let bytes = fs::read(self.at(name)).unwrap();
            keyring_offsets(bytes.len() as u64).map(|at| {
                let at = usize::try_from(at).unwrap();
                KeyringCopy::decode(&bytes[at..at + KEYRING_BYTES], id).unwrap()
            })
        });
        let copies: Vec<KeyringCopy> = copies.collect();
        assert!(!copies[0].slots.is_empty() && copies.iter().all(|copy| *copy == copies[0]));
    }

    /// Runs a command again and again, each time killed before a later call, and some writes torn.
    /// `check` sees the rest. Returns the number of kills.
    fn killed_at_each_call(&self, words: &str, check: impl Fn(&Place)) -> usize {
        let before = self.files();
        for call in 0.. {
            let command = || {
                let words = self.words(words);
                larder(&words.iter().map(String::as_str).collect::<Vec<_>>())
            };
            let end = end_at(command(), call).unwrap();
            let End::Killed(write) = end else {
                assert!(matches!(end, End::Ended(0)), "it fails");
                return call;
            };
            check(self);
            if write.is_some() {
                self.restore(&before);
                let End::Killed(Some(write)) = end_at(command(), call).unwrap() else {
                    panic!("a second run makes other calls");
                };
                // The write was executed in part.
                overwrite(&write.path, write.offset, &write.begin);
                check(self);
            }
            self.restore(&before);
        }
        unreachable!("a command has an end")
    }
}

#[test]
fn a_creation_killed_at_each_call_leaves_nothing_or_the_store() {
    if !can_trace() {
        return;
    }
    let place = Place::new();
    let kills = place.killed_at_each_call(CREATE, |place| {
        let volumes = ["store", "second"];
        if place.at("store").exists() {
            place.is_whole(0, &volumes);
        }
        place.runs(&format!("{CREATE} --if-absent"));
        place.is_whole(0, &volumes);
        let left: Vec<PathBuf> = place.files().into_keys().collect();
        assert_eq!(left, [place.at("second"), place.at("store")]);
    });
    // Each of two volumes: length, blocks, three copies of keyring and superblock, and the name.
    assert!(kills >= 18, "{kills}");
    place.is_whole(0, &["store", "second"]);
}

#[test]
fn a_growth_killed_at_each_call_leaves_every_page_and_is_run_again() {
    if !can_trace() {
        return;
    }
    let grow = "create @store --grow --size 24MiB --key-file @key";
    let place = Place::filled();
    let kills = place.killed_at_each_call(grow, |place| {
        let volumes = ["store", "second"];
        place.is_whole(PAGES as usize, &volumes);
        place.runs(grow);
        place.is_whole(PAGES as usize, &volumes);
    });
    assert!(kills >= 18, "{kills}");
    place.is_whole(PAGES as usize, &["store", "second"]);
}

#[test]
fn an_addition_killed_at_each_call_leaves_every_page_and_is_run_again() {
    if !can_trace() {
        return;
    }
    let add = "volume add @store @third --key-file @key";
    let place = Place::filled();
    let kills = place.killed_at_each_call(add, |place| {
        place.is_whole(PAGES as usize, &["store", "second"]);
        place.runs(add);
        place.is_whole(PAGES as usize, &["store", "second", "third"]);
    });
    assert!(kills >= 15, "{kills}");
    place.is_whole(PAGES as usize, &["store", "second", "third"]);
}

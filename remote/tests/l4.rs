//! Remotes by configuration alone, beneath a store that several processes share.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::io::IoSlice;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use common::*;
use larder_engine::{
    CreateOptions, NamespaceId, OpenOptions, PageStore, PutOptions, PutPage, Store, create,
};
use larder_format::PageKey;
use larder_remote::l4::{L4, L4Config};

/// Longest time of a wait, on a loaded machine too.
const PATIENCE: Duration = Duration::from_secs(120);

const RUN_PAGES: usize = 4;

/// A process of a node: its first call owns the store, or is a client of the owner.
struct Member {
    l4: L4,
    store: Arc<Store>,
    id: NamespaceId,
}

impl Member {
    fn of(store: &Path, remote: &Path) -> Member {
        let config = L4Config {
            urls: vec![format!("file://{}", remote.display())],
            is_unsigned: true,
            run_tokens: 16 * u32::try_from(RUN_PAGES).unwrap(),
            ..L4Config::default()
        };
        let l4 = config.connect().unwrap().unwrap();
        let options = l4.beneath(OpenOptions::default());
        let attached = Arc::new(Store::attach(store, options).unwrap());
        l4.start(&attached, store).unwrap();
        let id = attached.namespace(&namespace("model")).unwrap();
        Member {
            l4,
            store: attached,
            id,
        }
    }

    fn put(&self, keys: &[PageKey]) {
        for (at, key) in keys.iter().enumerate() {
            let payload = payload(key);
            let page = PutPage {
                key: *key,
                parent: at.checked_sub(1).map(|before| keys[before]),
                depth: u32::try_from(at).unwrap(),
                parts: &[
                    IoSlice::new(&payload[..5000]),
                    IoSlice::new(&payload[8192..8492]),
                ],
            };
            self.store
                .put(self.id, &[page], PutOptions::waiting(PATIENCE));
        }
    }

    fn close(&self) {
        self.l4.close();
        self.store.close().unwrap();
    }
}

#[test]
fn numbers_and_times_of_zero_are_refused_by_their_key() {
    let refused = |change: fn(&mut L4Config)| {
        let mut config = L4Config {
            urls: vec!["file:///some/where".to_owned()],
            is_unsigned: true,
            ..L4Config::default()
        };
        change(&mut config);
        let error = config.connect().err();
        error.map_or_else(String::new, |error| error.to_string())
    };
    assert_eq!(refused(|_| {}), "");
    assert!(refused(|config| config.run_tokens = 0).contains("l4_run_tokens"));
    assert!(refused(|config| config.timeout = Duration::ZERO).contains("l4_timeout"));
    assert!(refused(|config| config.refresh = Duration::ZERO).contains("--l4-refresh"));
    for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let config = L4Config {
            prefill_rate: Some(rate),
            ..L4Config::default()
        };
        assert_eq!(config.not_positive(), Some("l4_prefill_rate"));
    }
}

/// The number of files below a directory.
fn files(directory: &Path) -> usize {
    let entries = fs::read_dir(directory).unwrap();
    entries
        .map(|entry| match entry.unwrap().path() {
            path if path.is_dir() => files(&path),
            _ => 1,
        })
        .sum()
}

#[track_caller]
fn eventually(is_so: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until);
        thread::sleep(Duration::from_millis(1));
    }
}

/// The memory of the former owner is newer than the attachment of the next one.
#[test]
fn a_process_that_takes_over_knows_the_puts_of_the_former_owner() {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, remote) = (home.path().join("store"), home.path().join("remote"));
    fs::create_dir(&remote).unwrap();
    let size = CreateOptions::new(128 << 20).with(|o| o.segment_size = Some(16 << 20));
    create(&path, &size).unwrap();
    let owner = Member::of(&path, &remote);
    let next = Member::of(&path, &remote);
    let pages = chain(1, RUN_PAGES);
    owner.put(&pages);
    owner.close();
    let memory = path.with_file_name("store.touched");
    let length = || fs::metadata(&memory).unwrap().len();
    let before = length();
    eventually(|| {
        let found = next.store.longest_prefix(next.id, &pages);
        found == RUN_PAGES && files(&remote) == 1
    });
    next.close();
    assert_eq!(length(), before);
}

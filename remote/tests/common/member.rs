//! A process of a node, over a directory as its remote.

use std::fs;
use std::io::IoSlice;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use larder_engine::{
    CreateOptions, NamespaceId, OpenOptions, PageStore, PutOptions, PutPage, Store, create,
};
use larder_format::PageKey;
use larder_remote::l4::{L4, L4Config};
use tempfile::TempDir;

use super::{namespace, payload};

/// Longest time of a wait, on a loaded machine too.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub const RUN_PAGES: usize = 4;

/// A directory with a store and a directory for its remote.
pub struct Home {
    pub store: PathBuf,
    pub remote: PathBuf,
    _directory: TempDir,
}

impl Home {
    pub fn new() -> Home {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let store = directory.path().join("store");
        let remote = directory.path().join("remote");
        fs::create_dir_all(remote.join("v1")).unwrap();
        let size = CreateOptions::new(128 << 20).with(|o| o.segment_size = Some(16 << 20));
        create(&store, &size).unwrap();
        Home {
            store,
            remote,
            _directory: directory,
        }
    }

    /// The file with the memory of puts.
    pub fn memory(&self) -> PathBuf {
        self.store.with_file_name("store.touched")
    }

    pub fn member(&self) -> Member {
        Member::of(&self.store, &self.remote)
    }
}

/// A process of a node: its first call owns the store, or is a client of the owner.
pub struct Member {
    pub l4: L4,
    pub store: Arc<Store>,
    pub id: NamespaceId,
}

impl Member {
    pub fn of(store: &Path, remote: &Path) -> Member {
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

    pub fn put(&self, keys: &[PageKey]) {
        put(&self.store, self.id, keys);
    }

    pub fn close(&self) {
        self.l4.close();
        self.store.close().unwrap();
    }
}

/// Puts the pages of a chain.
pub fn put(store: &Store, id: NamespaceId, keys: &[PageKey]) {
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
        store.put(id, &[page], PutOptions::waiting(PATIENCE));
    }
}

/// The number of files below a directory.
pub fn files(directory: &Path) -> usize {
    let entries = fs::read_dir(directory).unwrap();
    entries
        .map(|entry| match entry.unwrap().path() {
            path if path.is_dir() => files(&path),
            _ => 1,
        })
        .sum()
}

#[track_caller]
pub fn eventually(is_so: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until);
        thread::sleep(Duration::from_millis(1));
    }
}

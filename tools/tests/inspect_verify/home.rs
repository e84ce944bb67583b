//! What the tests share: stores in a directory of their own, pages in them, and ways to break them.
#![allow(dead_code)]

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use larder_engine::memory::AlignedBuf;
use larder_engine::{
    CreateOptions, GetPage, NamespaceId, OpenOptions, PageStore, PutOptions, PutPage, PutStatus,
    Store, SyncPolicy, create,
};
use larder_format::{
    Namespace, NamespaceFields, PageKey, PageShape, Rank, SEGMENTS_OFFSET, TokenUnits, page_keys,
};
use serde_json::Value;
use tempfile::TempDir;

pub const SEGMENT_BYTES: u64 = 16 << 20;

/// Segments of each volume.
pub const SEGMENTS: u64 = 8;

pub const BLOCK_BYTES: u64 = 4096;
pub const PAGE_BYTES: u32 = 64 << 10;

/// A directory on a real filesystem, and the path of a store in it.
pub struct Home {
    pub directory: TempDir,
    pub path: PathBuf,
}

impl Home {
    /// A new store: one volume.
    pub fn new() -> Home {
        Home::with_volumes(&[])
    }

    /// A new store with further volumes of these names.
    pub fn with_volumes(further: &[&str]) -> Home {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = directory.path().join("store");
        let volumes: Vec<PathBuf> = further
            .iter()
            .map(|name| directory.path().join(name))
            .collect();
        let options = CreateOptions {
            size: (SEGMENTS_OFFSET + SEGMENTS * SEGMENT_BYTES) * (1 + further.len() as u64),
            segment_size: Some(SEGMENT_BYTES),
            volumes,
            ..CreateOptions::default()
        };
        create(&path, &options).unwrap();
        Home { directory, path }
    }

    pub fn beside(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Works on the store and closes it in order.
    pub fn with<T>(&self, work: impl FnOnce(&Pool<'_>) -> T) -> T {
        let store = self.open();
        let value = work(&Pool::new(&store));
        store.close().unwrap();
        value
    }

    /// Works on the store and leaves it as a crash does.
    pub fn crash_after<T>(&self, work: impl FnOnce(&Pool<'_>) -> T) -> T {
        let store = self.open();
        work(&Pool::new(&store))
    }

    /// Opens it so that nothing is synced unless a flush asks for it.
    pub fn open(&self) -> Store {
        let options = OpenOptions {
            sync: SyncPolicy::Relaxed,
            ..OpenOptions::default()
        };
        Store::open(&self.path, options).unwrap()
    }

    pub fn run(&self, command: &str, options: &[&str]) -> Output {
        larder(command, &self.path, options)
    }

    /// Runs a command with `--json` that must end with `code`.
    #[track_caller]
    pub fn json(&self, command: &str, options: &[&str], code: i32) -> Value {
        let output = self.run(command, &[options, &["--json"]].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{command} {options:?}: {stdout}{stderr}"
        );
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(document["schema"], 1);
        assert_eq!(document["command"], command);
        assert_eq!(document["damaged"], code == 1);
        document
    }

    /// Runs a command for people that must end with `code` and print all of `words`.
    #[track_caller]
    pub fn says(&self, command: &str, options: &[&str], code: i32, words: &[&str]) {
        let output = self.run(command, options);
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8(text).unwrap();
        assert_eq!(
            output.status.code(),
            Some(code),
            "{command} {options:?}: {text}"
        );
        for word in words {
            assert!(
                text.contains(word),
                "{command} {options:?}: no `{word}` in: {text}"
            );
        }
    }

    /// Where the payload of the key's live page begins.
    #[track_caller]
    pub fn offset_of(&self, key: &PageKey) -> u64 {
        let document = self.json("inspect", &["--key", &key.to_string()], 0);
        let records = document["key"]["records"].as_array().unwrap().clone();
        let live = records.iter().find(|record| record["fate"] == "live");
        live.unwrap()["offset"].as_u64().unwrap()
    }

    /// The first segment that was written, and how many descriptor blocks it has.
    pub fn written_segment(&self) -> (u64, u64) {
        let document = self.json("inspect", &["--segments"], 0);
        let list = document["segment_list"].as_array().unwrap().clone();
        let written = list.iter().find(|segment| segment["records"] != 0).unwrap();
        (
            written["offset"].as_u64().unwrap(),
            written["descriptor_blocks"].as_u64().unwrap(),
        )
    }
}

pub fn larder(command: &str, path: &Path, options: &[&str]) -> Output {
    larder_command(command, path, options).output().unwrap()
}

pub fn larder_command(command: &str, path: &Path, options: &[&str]) -> Command {
    let mut larder = Command::new(env!("CARGO_BIN_EXE_larder"));
    larder
        .arg(command)
        .arg(path)
        .args(options)
        .env_remove("LARDER_LOG")
        .stdin(Stdio::null());
    larder
}

/// A namespace in an open store.
pub struct Pool<'a> {
    pub store: &'a Store,
    id: NamespaceId,
}

impl<'a> Pool<'a> {
    pub fn new(store: &'a Store) -> Pool<'a> {
        let namespace = Namespace::new(NamespaceFields {
            model: "tiny".to_owned(),
            weights: "w1".to_owned(),
            dtype: "bf16".to_owned(),
            layout: "page_first_direct".to_owned(),
            page_tokens: 64,
            shape: PageShape::new(&[PAGE_BYTES]).unwrap(),
            tp: Rank::ALONE,
            pp: Rank::ALONE,
            cp: Rank::ALONE,
            pool: "kv".to_owned(),
            extra: std::collections::BTreeMap::new(),
        });
        let id = store.namespace(&namespace.unwrap()).unwrap();
        Pool { store, id }
    }

    /// Stores the pages of a whole chain in one call.
    pub fn put(&self, keys: &[PageKey]) {
        let mut memory = AlignedBuf::zeroed(PAGE_BYTES as usize).unwrap();
        memory.fill(0x5a);
        let parts = [IoSlice::new(&memory)];
        let parents = std::iter::once(None).chain(keys.iter().copied().map(Some));
        let pages: Vec<PutPage<'_>> = keys
            .iter()
            .zip(parents)
            .zip(0..)
            .map(|((key, parent), depth)| PutPage {
                key: *key,
                parent,
                depth,
                parts: &parts,
            })
            .collect();
        let options = PutOptions {
            wait: Duration::from_secs(20),
        };
        let statuses = self.store.put(self.id, &pages, options);
        assert_eq!(statuses, vec![PutStatus::Stored; keys.len()]);
    }

    /// Stores the next page of each chain in turns, so that no two pages of one lie together.
    pub fn put_in_turns(&self, chains: &[Vec<PageKey>]) {
        let mut memory = AlignedBuf::zeroed(PAGE_BYTES as usize).unwrap();
        memory.fill(0x5a);
        let parts = [IoSlice::new(&memory)];
        for depth in 0..chains.iter().map(Vec::len).max().unwrap_or(0) {
            for keys in chains.iter().filter(|keys| keys.len() > depth) {
                let page = PutPage {
                    key: keys[depth],
                    parent: depth.checked_sub(1).map(|before| keys[before]),
                    depth: u32::try_from(depth).unwrap(),
                    parts: &parts,
                };
                let options = PutOptions {
                    wait: Duration::from_secs(20),
                };
                let statuses = self.store.put(self.id, &[page], options);
                assert_eq!(statuses, [PutStatus::Stored]);
            }
        }
    }

    /// How many of these pages are there, with the bytes that were put.
    pub fn hits(&self, keys: &[PageKey]) -> usize {
        let mut memory = AlignedBuf::zeroed(PAGE_BYTES as usize).unwrap();
        let is_hit = |key: &PageKey| {
            memory.fill(0);
            let mut parts = [IoSliceMut::new(&mut memory)];
            let mut pages = [GetPage {
                key: *key,
                parts: &mut parts,
            }];
            let hit = self.store.get(self.id, &mut pages, None)[0].is_hit();
            assert!(!hit || memory.iter().all(|byte| *byte == 0x5a));
            hit
        };
        keys.iter().copied().filter(is_hit).count()
    }

    pub fn delete(&self, key: PageKey) {
        assert_eq!(self.store.delete(self.id, &[key]).unwrap(), 1);
    }
}

/// The keys of a chain; those of different seeds share nothing.
pub fn chain(seed: u64, pages: u64) -> Vec<PageKey> {
    let tokens: Vec<u64> = (0..pages).map(|page| seed << 24 | page).collect();
    page_keys(&tokens, NonZeroUsize::MIN, None, TokenUnits::Single)
}

/// Changes one bit.
pub fn flip(path: &Path, offset: u64) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
    file.sync_all().unwrap();
}

pub fn overwrite(path: &Path, offset: u64, bytes: &[u8]) {
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(bytes, offset).unwrap();
    file.sync_all().unwrap();
}

/// Where descriptor block `index` of the segment at `segment_offset` lies.
pub fn block_offset(segment_offset: u64, index: u64) -> u64 {
    segment_offset + SEGMENT_BYTES - (index + 1) * BLOCK_BYTES
}

/// The one finding of a document.
#[track_caller]
pub fn finding(document: &Value) -> &Value {
    let damage = document["damage"].as_array().unwrap();
    assert_eq!(damage.len(), 1, "{document:#}");
    &damage[0]
}

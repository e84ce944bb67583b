//! A store in a directory of its own, and the commands on it.

use std::path::PathBuf;
use std::process::Command;

use larder_engine::{CreateOptions, OpenOptions, Store, SyncPolicy, create};
use larder_format::{OVERHEAD_BYTES, PageKey};
use larder_offline::survey::{Survey, SurveyOptions};
use serde_json::Value;
use tempfile::TempDir;

use super::{directory, larder, report, says, text};

/// Bytes of a segment, by default.
pub const SEGMENT_BYTES: u64 = 16 << 20;

/// Segments of each volume, by default.
pub const SEGMENTS: u64 = 8;

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
        Home::shaped(further, SEGMENTS, SEGMENT_BYTES)
    }

    /// The same, with so many segments a volume, of so many bytes.
    pub fn shaped(further: &[&str], segments: u64, segment_bytes: u64) -> Home {
        let directory = directory();
        let path = directory.path().join("store");
        let further = further.iter().map(|name| directory.path().join(name));
        let volumes: Vec<PathBuf> = further.collect();
        let options = CreateOptions::new(
            (OVERHEAD_BYTES + segments * segment_bytes) * (1 + volumes.len() as u64),
        )
        .with(|o| {
            o.segment_size = Some(segment_bytes);
            o.volumes = volumes;
        });
        create(&path, &options).unwrap();
        Home { directory, path }
    }

    /// A file beside the store.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Opens it so that nothing is synced unless a flush asks for it.
    pub fn open(&self) -> Store {
        let options = OpenOptions::default().with(|o| o.sync = SyncPolicy::Relaxed);
        Store::open(&self.path, options).unwrap()
    }

    fn arguments<'a>(&'a self, command: &'a str, options: &[&'a str]) -> Vec<&'a str> {
        [&[command, text(&self.path)], options].concat()
    }

    /// `larder COMMAND STORE OPTIONS...`.
    pub fn larder(&self, command: &str, options: &[&str]) -> Command {
        larder(&self.arguments(command, options))
    }

    /// Runs a command with `--json` that must end with `code`; its document.
    #[track_caller]
    pub fn report(&self, command: &str, options: &[&str], code: i32) -> Value {
        report(&self.arguments(command, options), code)
    }

    /// Runs a command without `--json`. It must end with `code` and print all of `words`.
    #[track_caller]
    pub fn says(&self, command: &str, options: &[&str], code: i32, words: &[&str]) {
        says(&self.arguments(command, options), code, words);
    }

    /// Where the payload of the key's live page begins.
    #[track_caller]
    pub fn offset_of(&self, key: &PageKey) -> u64 {
        let survey = Survey::new(&self.path, &SurveyOptions::default()).unwrap();
        survey.live().find(|page| page.key == *key).unwrap().offset
    }
}

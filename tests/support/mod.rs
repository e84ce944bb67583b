//! What the whole-system tests share: the binary, a directory on a real disk, traces, a stage for kills.
#![allow(dead_code)]

pub mod honest;
pub mod sparse;
pub mod stage;

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

/// A directory on the disk that the build is on, so that direct I/O is real.
pub fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// `larder` with these arguments, as a child process.
pub fn larder(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    command
        .args(arguments)
        .env_remove("LARDER_LOG")
        .stdin(Stdio::null());
    command
}

/// Runs `larder` with `--json`, which must succeed; its document.
#[track_caller]
pub fn json(arguments: &[&str]) -> Value {
    let output = larder(arguments).arg("--json").output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {errors}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// One request of a trace: the ids of its blocks.
pub type Request = Vec<u64>;

/// The public chat trace, where it has been put beside the repository; says so where it has not.
pub fn chat_trace() -> Option<PathBuf> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/traces/conversation_trace.jsonl");
    if path.exists() {
        return Some(path);
    }
    let why = format!("there is no {}", path.display());
    honest::skipped("the public chat trace", why);
    None
}

pub fn read_trace(path: &Path) -> Vec<Request> {
    std::fs::read_to_string(path)
        .unwrap()
        .lines()
        .map(|line| {
            let request: Value = serde_json::from_str(line).unwrap();
            request["hash_ids"]
                .as_array()
                .unwrap()
                .iter()
                .map(|id| id.as_u64().unwrap())
                .collect()
        })
        .collect()
}

/// A trace of our own in the same format: conversations that grow turn by turn and are taken up again, most of them soon,
/// on top of a few shared system prompts.
pub fn make_trace(path: &Path, requests: usize, seed: u64) -> Vec<Request> {
    let mut state = seed;
    let mut random = |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut next_id = 0;
    let mut fresh = |count: u64| -> Request {
        next_id += count;
        (next_id - count..next_id).collect()
    };
    let prompts: Vec<Request> = (0..4).map(|_| fresh(6)).collect();
    let mut conversations: Vec<Request> = Vec::new();
    let mut trace = Vec::with_capacity(requests);
    for _ in 0..requests {
        let again = !conversations.is_empty() && random(10) < 4;
        let mut blocks = if again {
            let age = random(8)
                .min(random(400))
                .min(conversations.len() as u64 - 1);
            conversations.remove(conversations.len() - 1 - usize::try_from(age).unwrap())
        } else {
            prompts[usize::try_from(random(4)).unwrap()].clone()
        };
        blocks.extend(fresh(1 + random(24)));
        conversations.push(blocks.clone());
        trace.push(blocks);
    }
    let mut text = String::new();
    for (at, blocks) in trace.iter().enumerate() {
        let tokens = blocks.len() * 512;
        writeln!(text, r#"{{"timestamp": {at}, "input_length": {tokens}, "output_length": 1, "hash_ids": {blocks:?}}}"#)
            .unwrap();
    }
    std::fs::write(path, text).unwrap();
    trace
}

/// Share of blocks that an exact page-LRU of `pages` pages finds: a request hits the longest stored prefix of its
/// blocks, then uses them all, the tail first, so that only leaves are ever the coldest.
pub fn exact_lru_hit_rate(trace: &[Request], pages: usize) -> f64 {
    let mut last_use: HashMap<u64, u64> = HashMap::new();
    let mut by_age: BTreeSet<(u64, u64)> = BTreeSet::new();
    let (mut clock, mut hits, mut asked) = (0_u64, 0, 0);
    for blocks in trace {
        asked += blocks.len();
        hits += blocks
            .iter()
            .take_while(|id| last_use.contains_key(id))
            .count();
        for id in blocks.iter().rev() {
            clock += 1;
            if let Some(before) = last_use.insert(*id, clock) {
                by_age.remove(&(before, *id));
            }
            by_age.insert((clock, *id));
        }
        while by_age.len() > pages {
            let (_, coldest) = by_age.pop_first().unwrap();
            last_use.remove(&coldest);
        }
    }
    f64::from(u32::try_from(hits).unwrap()) / f64::from(u32::try_from(asked).unwrap())
}

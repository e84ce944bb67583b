//! Code shared by the tests of the whole system and of the tools: the binary and its output, a
//! directory on a real disk, stores and their damage, traces, a stage for kills.
#![allow(dead_code)]

pub mod home;
pub mod honest;
pub mod observe;
pub mod served;
pub mod sparse;
pub mod stage;

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;
use std::fs::File;
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use larder_format::{PageKey, TokenUnits, page_keys, superblock_offsets};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use serde_json::Value;

/// A directory on the disk that the build is on, so that direct I/O is real.
pub fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Bytes that no codec makes smaller.
pub fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut noise = vec![0; bytes];
    Pcg64Mcg::seed_from_u64(seed).fill(&mut noise[..]);
    noise
}

/// Values in bf16 with exponents of eight neighbours: the codec makes pages of them smaller.
pub fn smooth(seed: u64, bytes: usize) -> Vec<u8> {
    let mut smooth = noise(seed, bytes);
    for [_, high] in smooth.as_chunks_mut().0 {
        *high = *high & 0x83 | 0x3c;
    }
    smooth
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

/// The same as another user and its group, or as this one.
pub fn as_user(arguments: &[&str], user: Option<u32>) -> Command {
    let mut command = larder(arguments);
    if let Some(user) = user {
        command.uid(user).gid(user);
    }
    command
}

/// Runs `larder`, which must end with `code`.
#[track_caller]
pub fn ends(arguments: &[&str], code: i32) -> Output {
    let output = larder(arguments).output().unwrap();
    let said = text_of(&output);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
    assert!(!said.contains("panicked"), "{arguments:?}: {said}");
    output
}

/// Runs `larder` with `--json`, which must end with `code`; its document.
#[track_caller]
pub fn report(arguments: &[&str], code: i32) -> Value {
    let output = ends(&[arguments, &["--json"]].concat(), code);
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["schema"], 1);
    let command = document["command"].as_str().unwrap();
    assert_eq!(command.split(' ').next(), Some(arguments[0]));
    document
}

/// The same for a command that must succeed.
#[track_caller]
pub fn json(arguments: &[&str]) -> Value {
    report(arguments, 0)
}

/// Runs `larder`, which must end with `code` and print all of `words`.
#[track_caller]
pub fn says(arguments: &[&str], code: i32, words: &[&str]) {
    let said = text_of(&ends(arguments, code));
    has_all(&said, words);
}

/// The same for words on standard error. Returns the text there.
#[track_caller]
pub fn fails(arguments: &[&str], code: i32, words: &[&str]) -> String {
    let message = stderr(&ends(arguments, code));
    has_all(&message, words);
    message
}

#[track_caller]
fn has_all(said: &str, words: &[&str]) {
    for word in words {
        assert!(said.contains(word), "no `{word}` in: {said}");
    }
}

fn text_of(output: &Output) -> String {
    let bytes = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&bytes).into_owned()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The keys of a chain. Chains of different seeds share no key.
pub fn chain(seed: u64, pages: u64) -> Vec<PageKey> {
    let tokens: Vec<u64> = (0..pages).map(|page| seed << 24 | page).collect();
    page_keys(&tokens, NonZeroUsize::MIN, None, TokenUnits::Single)
}

/// Changes one bit.
pub fn flip(path: &Path, offset: u64) {
    let file = File::open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    overwrite(path, offset, &[byte[0] ^ 0x10]);
}

/// The places of the copies of the superblock in a volume.
pub fn superblocks(path: &Path) -> [u64; 3] {
    superblock_offsets(std::fs::metadata(path).unwrap().len())
}

pub fn overwrite(path: &Path, offset: u64, bytes: &[u8]) {
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(bytes, offset).unwrap();
    file.sync_all().unwrap();
}

/// One request of a trace: the ids of its blocks.
pub type Request = Vec<u64>;

/// The public chat trace, if it is beside the repository. Otherwise the skip is reported.
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

/// A trace of our own in the same format: conversations that grow turn by turn and are taken up
/// again, most of them soon, on top of a few shared system prompts.
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
        let line = serde_json::json!({
            "timestamp": at, "input_length": tokens, "output_length": 1, "hash_ids": blocks
        });
        writeln!(text, "{line}").unwrap();
    }
    std::fs::write(path, text).unwrap();
    trace
}

/// Share of blocks that an exact page-LRU of `pages` pages finds: a request hits the longest stored
/// prefix of its blocks, then uses them all, the tail first, so that only leaves are ever the
/// coldest.
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

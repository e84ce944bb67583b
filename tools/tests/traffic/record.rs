//! `larder record`: its files, and what they are good for.

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use larder_engine::{OpenOptions, PageStore, Store};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

use super::support::{chain, chat_trace, directory, fails, json, larder, make_trace, stderr, text};
use super::{Process, serve};

const PATIENCE: Duration = Duration::from_secs(60);
const PAGE: &str = "16KiB";

/// A store that another process owns, and a place for files.
pub struct Scene {
    directory: TempDir,
    pub store: PathBuf,
    capacity: &'static str,
}

impl Scene {
    pub fn new(capacity: &'static str) -> Scene {
        let directory = directory();
        let store = directory.path().join("store");
        let create = ["create", text(&store), "--size", capacity];
        json(&[&create[..], &["--page-bytes", PAGE]].concat());
        Scene {
            store,
            directory,
            capacity,
        }
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Replays a trace, on the served store or on a new one.
    pub fn replay(&self, trace: &Path, store: &Path) -> Value {
        let replay = ["replay", "store", text(trace), "--store", text(store)];
        let sizes = ["--capacity", self.capacity, "--page-bytes", PAGE];
        json(&[&replay[..], &sizes].concat())
    }

    /// Begins a recording.
    fn record(&self, out: &Path, options: &[&str]) -> Recording {
        let record = ["record", text(&self.store), text(out), "--json"];
        let mut command = larder(&[&record[..], options].concat());
        let child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let recording = Recording(Some(child.unwrap()));
        wait_until(|| out.exists());
        recording
    }
}

/// The process of a recording.
struct Recording(Option<std::process::Child>);

impl Recording {
    fn end(mut self) -> Output {
        let child = self.0.take().unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
        kill(pid, Signal::SIGINT).unwrap();
        child.wait_with_output().unwrap()
    }

    /// Its document.
    #[track_caller]
    fn report(self) -> Value {
        let output = self.end();
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(0), "{said}");
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        drop(self.0.take().map(Process));
    }
}

fn wait_until(mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// The recording of a replay has the replay's hits, on a store of the same size.
fn replays_alike(trace: &Path, capacity: &'static str) {
    let scene = Scene::new(capacity);
    let owner = serve(&scene.store);
    let out = scene.at("traffic.jsonl.zst");
    let recording = scene.record(&out, &["--requests"]);
    let first = scene.replay(trace, &scene.store);
    let report = recording.report();
    drop(owner);
    assert_eq!(report["lost_calls"], 0, "{report:#}");
    assert_eq!(report["pages_requested"], first["pages_requested"]);
    assert_eq!(report["pages_found"], first["pages_hit"]);
    let again = scene.replay(&out, &scene.at("again"));
    assert_eq!(again["pages_requested"], first["pages_requested"]);
    let rate = |report: &Value| report["hit_rate"].as_f64().unwrap();
    assert!(
        (rate(&again) - rate(&first)).abs() <= 0.005,
        "{} then {}",
        rate(&first),
        rate(&again)
    );
    let count = |key: &str| first[key].as_u64().unwrap();
    assert!(count("pages_hit") > 500 && count("evicted_pages") > 0);
    let tiers = ["replay", "tiers", text(&out), "--store", "x"];
    let sizes = ["--capacity", "1GiB", "--l1", "1GiB", "--l2", "1GiB"];
    fails(&[&tiers[..], &sizes].concat(), 2, &["a recording of L3"]);
}

#[test]
fn a_recording_of_a_made_trace_replays_alike() {
    let directory = directory();
    let trace = directory.path().join("trace.jsonl");
    make_trace(&trace, 1200, 5);
    replays_alike(&trace, "128MiB");
}

#[test]
fn a_recording_of_the_chat_trace_replays_alike() {
    let Some(chat) = chat_trace() else {
        return;
    };
    let directory = directory();
    let trace = directory.path().join("trace.jsonl");
    let text = std::fs::read_to_string(chat).unwrap();
    let first: Vec<&str> = text.lines().take(800).collect();
    std::fs::write(&trace, first.join("\n")).unwrap();
    replays_alike(&trace, "128MiB");
}

#[test]
fn each_call_is_a_line_with_its_whole_chain_and_no_key() {
    let scene = Scene::new("128MiB");
    let owner = serve(&scene.store);
    let out = scene.at("traffic.jsonl");
    let recording = scene.record(&out, &[]);
    let trace = scene.at("trace.jsonl");
    make_trace(&trace, 20, 1);
    scene.replay(&trace, &scene.store);
    let report = recording.report();
    drop(owner);
    let lines = lines(&out);
    assert_eq!(report["calls"], lines.len());
    let of = |call: &str| lines.iter().filter(|line| line["call"] == call).count();
    assert_eq!(of("lookup"), 20);
    assert!(of("put") >= 19 && of("get") > 0, "{lines:#?}");
    for line in &lines {
        let ids = line["hash_ids"].as_array().unwrap();
        assert!(ids.iter().all(|id| id.as_u64().unwrap() < 1 << 53));
        assert_eq!((&line["rank"], &line["ranks"]), (&0.into(), &1.into()));
        assert_eq!(line["block_tokens"], 512);
        assert_eq!(line["model"], "replay");
        let pages = line["found"].as_u64().unwrap();
        assert_eq!(line["bytes"], pages * 16384);
    }
    // A put states its chain from the root on, as its lookup did.
    let chains = |call: &str| -> Vec<&Value> {
        let of = lines.iter().filter(|line| line["call"] == call);
        of.map(|line| &line["hash_ids"]).collect()
    };
    let lookups = chains("lookup");
    assert!(chains("put").iter().all(|chain| lookups.contains(chain)));
    let refused = ["replay", "store", text(&out), "--store", "x"];
    let sizes = ["--capacity", "128MiB", "--page-bytes", PAGE];
    fails(&[&refused[..], &sizes].concat(), 2, &["--requests"]);
}

#[test]
fn a_recording_outlasts_its_owner_and_states_the_gap() {
    let scene = Scene::new("128MiB");
    let out = scene.at("traffic.jsonl");
    let keys = chain(3, 4);
    let lookup = || {
        let store = Store::attach(&scene.store, OpenOptions::default()).unwrap();
        let space = store.namespace(&super::namespace()).unwrap();
        assert_eq!(store.longest_prefix(space, &keys), 0);
        store
    };
    let owner = serve(&scene.store);
    let recording = scene.record(&out, &[]);
    drop(lookup());
    // The next owner is in this process: its own calls are recorded as those of others.
    drop(owner);
    let store = lookup();
    wait_until(|| {
        store.longest_prefix(store.namespace(&super::namespace()).unwrap(), &keys);
        let text = std::fs::read_to_string(&out).unwrap();
        text.matches("\"call\"").count() > 1
    });
    let report = recording.report();
    assert_eq!(report["gaps"], 1);
    let lines = lines(&out);
    let gaps: Vec<_> = lines
        .iter()
        .filter(|line| !line["gap_seconds"].is_null())
        .collect();
    assert_eq!(gaps.len(), 1, "{lines:#?}");
    let chains: Vec<_> = lines
        .iter()
        .filter(|line| !line["call"].is_null())
        .collect();
    // The salt is the same under both owners.
    assert!(
        chains
            .iter()
            .all(|line| line["hash_ids"] == chains[0]["hash_ids"])
    );
    store.close().unwrap();
}

#[test]
fn one_process_records_at_a_time_and_a_file_is_not_overwritten() {
    let scene = Scene::new("128MiB");
    let out = scene.at("traffic.jsonl");
    let record = |out: &Path| -> Vec<String> {
        let words = ["record", text(&scene.store), text(out)];
        words.map(str::to_owned).to_vec()
    };
    let fails = |out: &Path, words: &[&str]| {
        let arguments = record(out);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        fails(&arguments, 3, words);
    };
    fails(&out, &["larder serve"]);
    assert!(!out.exists());
    let _owner = serve(&scene.store);
    let recording = scene.record(&out, &[]);
    fails(&scene.at("another"), &["another process records"]);
    assert!(!scene.at("another").exists());
    drop(recording);
    fails(&out, &["new file"]);
}

//! A node: a store that `larder serve --l4` owns, and this process as its client.

use std::fs;
use std::io::{BufRead, BufReader, IoSliceMut};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use larder_engine::{GetPage, OpenOptions, PageStore, Store};
use larder_format::PageKey;
use larder_remote::RunName;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::home::{Model, put};
use crate::support::home::Home;
use crate::support::honest::{Process, eventually};
use crate::support::{directory, larder, report, text};

/// A directory that nodes share, and the file with their key.
pub struct Shared {
    home: tempfile::TempDir,
}

impl Shared {
    pub fn new() -> Shared {
        let shared = Shared { home: directory() };
        fs::create_dir_all(shared.place().join("v1")).unwrap();
        report(&["remote", "key", text(&shared.key_file())], 0);
        shared
    }

    fn place(&self) -> PathBuf {
        self.home.path().join("remote")
    }

    pub fn key_file(&self) -> PathBuf {
        self.home.path().join("key")
    }

    pub fn url(&self) -> String {
        format!("file://{}", self.place().display())
    }

    pub fn take_key_of(&self, other: &Shared) {
        fs::copy(other.key_file(), self.key_file()).unwrap();
    }

    pub fn remove(&self) {
        fs::remove_dir_all(self.place()).unwrap();
    }

    pub fn change_key(&self) {
        fs::remove_file(self.key_file()).unwrap();
        report(&["remote", "key", text(&self.key_file())], 0);
    }

    /// `larder remote verify`; its document.
    #[track_caller]
    pub fn verify(&self) -> Value {
        let (url, key) = (self.url(), self.key_file());
        report(&["remote", "verify", &url, "--key-file", text(&key)], 0)
    }

    /// The file of the object with this name.
    pub fn file_of(&self, name: &RunName) -> PathBuf {
        self.place().join(name.to_string())
    }

    /// The files of all objects, without the marks of use.
    pub fn objects(&self) -> Vec<PathBuf> {
        let mut objects = Vec::new();
        let mut left = vec![self.place().join("v1")];
        while let Some(directory) = left.pop() {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                match path.is_dir() {
                    true => left.push(path),
                    false => objects.push(path),
                }
            }
        }
        objects.sort();
        objects
    }
}

pub struct Node {
    pub home: Home,
    owner: Process,
    store: Store,
}

impl Node {
    /// A node with an empty store, whose owner has these options.
    pub fn serving(shared: &Shared, options: &[&str]) -> Node {
        Node::of(Home::new(), shared, options)
    }

    /// A node with an empty encrypted store and a key of its own.
    pub fn encrypted(shared: &Shared, options: &[&str]) -> Node {
        let home = directory();
        let (path, key) = (home.path().join("store"), home.path().join("store-key"));
        report(&["key", "make", text(&key)], 0);
        let size = ["--size", "160MiB", "--segment-size", "16MiB"];
        let key = ["--key-file", text(&key)];
        report(&[&["create", text(&path)], &size[..], &key].concat(), 0);
        let home = Home {
            directory: home,
            path: path.clone(),
        };
        Node::of(home, shared, &[options, &key].concat())
    }

    /// Kills the owner. Another one with these options takes over the store.
    pub fn killed(self, shared: &Shared, options: &[&str]) -> Node {
        Node::of(self.kill(), shared, options)
    }

    /// Kills the owner. Its store.
    pub fn kill(self) -> Home {
        let Node { home, owner, store } = self;
        // This client may not own the store itself.
        drop(store);
        drop(owner);
        home
    }

    /// Ends the owner in order. Another one with these options takes over the store.
    pub fn restarted(self, shared: &Shared, options: &[&str]) -> Node {
        self.restarted_with(shared, options, |_| {})
    }

    /// The same, with work on the file that remembers its puts in between.
    pub fn restarted_with(
        self,
        shared: &Shared,
        options: &[&str],
        work: impl FnOnce(&Path),
    ) -> Node {
        let home = self.end();
        work(&home.path.with_file_name("store.touched"));
        Node::of(home, shared, options)
    }

    pub fn without_l4() -> Node {
        Node::with(Home::new(), &[], &[])
    }

    fn of(home: Home, shared: &Shared, options: &[&str]) -> Node {
        let (url, key) = (shared.url(), shared.key_file());
        let l4 = ["--l4", &url, "--l4-key-file", text(&key)];
        Node::with(home, &[&l4, options].concat(), &[])
    }

    /// A node whose owner has these options for its L4, and these variables.
    pub fn with(home: Home, l4: &[&str], variables: &[(&str, &str)]) -> Node {
        // A slow machine measures a low speed.
        let patience = ["--l4-patience", "60s"];
        let patience = if l4.is_empty() { &[] } else { &patience[..] };
        let mut command = larder(&[&["serve", text(&home.path)], l4, patience].concat());
        if !l4.is_empty() && !l4.contains(&"--l4-run-tokens") {
            command.args(["--l4-run-tokens", crate::RUN_TOKENS]);
        }
        command.envs(variables.iter().copied());
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        let stdout = child.stdout.take().unwrap();
        BufReader::new(stdout).read_line(&mut said).unwrap();
        assert!(said.contains("Serving on"), "{said}");
        let store = Store::attach(&home.path, OpenOptions::default()).unwrap();
        Node {
            owner: Process(child),
            store,
            home,
        }
    }

    pub fn put(&self, model: Model, keys: &[PageKey]) {
        put(&self.store, model, keys);
    }

    /// The answer to one lookup.
    pub fn found(&self, model: Model, keys: &[PageKey]) -> usize {
        let id = self.store.namespace(&model.namespace()).unwrap();
        self.store.longest_prefix(id, keys)
    }

    /// Reads pages in one call with a deadline. Returns which of them were hits. Their bytes must
    /// be right.
    #[track_caller]
    pub fn read(&self, model: Model, keys: &[PageKey]) -> Vec<bool> {
        self.read_until(model, keys, Instant::now() + Duration::from_secs(30))
    }

    /// The same with this deadline.
    #[track_caller]
    pub fn read_until(&self, model: Model, keys: &[PageKey], deadline: Instant) -> Vec<bool> {
        let id = self.store.namespace(&model.namespace()).unwrap();
        let expected: Vec<_> = keys.iter().map(|key| model.content(key)).collect();
        let mut memory = expected.clone();
        memory.iter_mut().flatten().for_each(|part| part.fill(0xee));
        let slices = memory
            .iter_mut()
            .map(|page| page.iter_mut().map(|part| IoSliceMut::new(part)).collect());
        let mut slices: Vec<Vec<IoSliceMut<'_>>> = slices.collect();
        let pages = keys.iter().zip(&mut slices);
        let mut pages: Vec<GetPage<'_, '_>> = pages
            .map(|(key, parts)| GetPage { key: *key, parts })
            .collect();
        let statuses = self.store.get(id, &mut pages, Some(deadline));
        let is_hit: Vec<bool> = statuses.iter().map(|status| status.is_hit()).collect();
        for (at, is_hit) in is_hit.iter().enumerate() {
            assert!(
                !is_hit || memory[at] == expected[at],
                "wrong bytes of page {at}"
            );
        }
        is_hit
    }

    fn stat(&self) -> Value {
        report(&["stat", text(&self.home.path)], 0)["l4"].clone()
    }

    pub fn count(&self, name: &str) -> u64 {
        let stat = self.stat();
        let count = stat["counts"][name].as_u64();
        count.unwrap_or_else(|| panic!("no {name} in {stat}"))
    }

    /// The value of a metric.
    pub fn metric(&self, name: &str) -> f64 {
        let arguments = ["stat", text(&self.home.path), "--openmetrics"];
        let output = larder(&arguments).output().unwrap();
        let exported = String::from_utf8(output.stdout).unwrap();
        let mut lines = exported.lines().filter_map(|line| line.split_once(' '));
        let value = lines.find_map(|(metric, value)| (metric == name).then_some(value));
        value.and_then(|value| value.parse().ok()).expect(name)
    }

    pub fn state(&self) -> String {
        self.stat()["state"].as_str().unwrap().to_owned()
    }

    /// The level of a fact of `larder doctor`, and its text.
    pub fn doctor(&self, name: &str) -> (String, String) {
        let path = text(&self.home.path);
        let output = larder(&["doctor", path, "--json"]).output().unwrap();
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        let facts = document["facts"].as_array().unwrap();
        let fact = facts.iter().find(|fact| fact["name"] == name).unwrap();
        let field = |name: &str| fact[name].as_str().unwrap().to_owned();
        (field("level"), field("what"))
    }

    /// Waits until a counter has a value.
    #[track_caller]
    pub fn reaches(&self, name: &str, value: u64) {
        eventually(name, || self.count(name) == value);
    }

    /// Waits until the runs of the remote and its speed are known.
    #[track_caller]
    pub fn knows(&self, model: Model, runs: u64) {
        // Tells the owner the namespace.
        assert_eq!(self.found(model, &[]), 0);
        self.reaches("known_runs", runs);
        eventually("a speed", || self.count("speed_bytes_per_s") > 0);
    }

    /// Waits until an empty remote was listed.
    #[track_caller]
    pub fn knows_nothing(&self, model: Model) {
        assert_eq!(self.found(model, &[]), 0);
        self.reaches("listings", 1);
    }

    /// `larder remote on` or `off`.
    #[track_caller]
    pub fn switch(&self, word: &str) {
        report(&["remote", word, text(&self.home.path)], 0);
    }

    /// The error message of a command that fails.
    #[track_caller]
    pub fn switch_fails(&self, word: &str) -> String {
        let failed = larder(&["remote", word, text(&self.home.path)])
            .output()
            .unwrap();
        assert_eq!(failed.status.code(), Some(3));
        String::from_utf8(failed.stderr).unwrap()
    }

    /// Ends the owner in order. Its store.
    pub fn end(self) -> Home {
        let Node {
            home,
            mut owner,
            store,
        } = self;
        drop(store);
        end(&mut owner);
        home
    }
}

fn end(owner: &mut Process) {
    let pid = Pid::from_raw(i32::try_from(owner.0.id()).unwrap());
    kill(pid, Signal::SIGTERM).unwrap();
    assert!(owner.0.wait().unwrap().success());
}

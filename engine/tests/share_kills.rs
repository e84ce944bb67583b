//! Four processes on one store, killed at random moments, the owner among them: nobody reads wrong bytes, nobody hangs, and
//! what was acknowledged lately is there at the end.
//!
//! `LARDER_KILLS=n` kills more often. The workers are this same program, told so by an environment variable.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use common::{Home, MIB, Pool, chain};
use larder_engine::share::Part;
use larder_engine::{AttachOptions, PageStore, PutOptions, Store};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;

const WORKERS: usize = 4;
const KILLS: usize = 25;
const PAGES: usize = 16;
const PARTS: [u32; 1] = [65536];
const ROLE: &str = "LARDER_TEST_SHARE_WORKER";

/// Pages acknowledged last that must be there: a fifth of what the store keeps.
const RECENT: usize = 700;

/// A worker that says nothing for so long hangs.
const HANG: Duration = Duration::from_secs(20);

/// What a worker says: a line for each chain it has put, with how many pages of it were acknowledged.
struct Said {
    worker: usize,
    chain: u64,
    pages: usize,
    is_owner: bool,
    at: Instant,
}

fn work(path: &Path, number: u64) {
    let store = Store::attach(path, AttachOptions::default()).unwrap();
    let pool = Pool::new(&store, "m", &PARTS);
    let mut random = Pcg64::seed_from_u64(number);
    let mut recent = VecDeque::new();
    let mut out = std::io::stdout().lock();
    for round in 0.. {
        let seed = number * 100_000 + round;
        let keys = chain(seed, PAGES);
        let wait = Duration::from_secs(if random.random_bool(0.5) { 1 } else { 0 });
        let statuses = pool.put_from(&keys, 0, PutOptions { wait });
        let acknowledged = statuses.iter().take_while(|s| s.is_present()).count();
        let is_owner = store.part() == Part::Owner;
        // The parent reads until this process ends; when it is gone nobody cares.
        if writeln!(out, "{seed} {acknowledged} {is_owner}").is_err() {
            return;
        }
        recent.push_back(seed);
        if recent.len() > 20 {
            recent.pop_front();
        }
        // Panics on wrong bytes.
        pool.get(&chain(recent[random.random_range(0..recent.len())], PAGES));
        let other = random.random_range(0..WORKERS as u64 * 4) * 100_000 + round;
        pool.get(&chain(other, PAGES));
        if random.random_bool(0.05) {
            let _ = store.flush();
        }
    }
}

struct Worker {
    child: Child,
    is_owner: bool,
    /// When it was started, or spoke last.
    spoke: Instant,
}

/// What the test has heard.
#[derive(Default)]
struct Heard {
    /// The chains put last, with how many of their pages were acknowledged.
    recent: VecDeque<(u64, usize)>,
    /// The longest that one worker was silent.
    silence: Duration,
}

fn start(path: &Path, number: u64, worker: usize, said: &Sender<Said>) -> Worker {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "what_was_acknowledged_outlives_killed_owners_and_clients",
            "--nocapture",
        ])
        .env(ROLE, format!("{number} {}", path.display()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let said = said.clone();
    std::thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            let words: Vec<&str> = line.split_whitespace().collect();
            // The test harness says things of its own.
            let (Some(Ok(chain)), 3) = (words.first().map(|w| w.parse()), words.len()) else {
                continue;
            };
            let (Ok(pages), Ok(is_owner)) = (words[1].parse(), words[2].parse()) else {
                continue;
            };
            let _ = said.send(Said {
                worker,
                chain,
                pages,
                is_owner,
                at: Instant::now(),
            });
        }
    });
    Worker {
        child,
        is_owner: false,
        spoke: Instant::now(),
    }
}

impl Heard {
    fn hear(&mut self, said: &Receiver<Said>, workers: &mut [Worker]) {
        let word = said.recv_timeout(HANG).expect("nobody has said anything");
        let worker = &mut workers[word.worker];
        // What its predecessor said last may be heard late.
        let silence = word.at.saturating_duration_since(worker.spoke);
        self.silence = self.silence.max(silence);
        worker.spoke = worker.spoke.max(word.at);
        worker.is_owner = word.is_owner;
        for (number, worker) in workers.iter().enumerate() {
            let silence = word.at.saturating_duration_since(worker.spoke);
            assert!(silence < HANG, "worker {number} hangs");
        }
        self.keep(&word);
    }

    fn keep(&mut self, word: &Said) {
        if word.pages > 0 {
            self.recent.push_back((word.chain, word.pages));
            while self.recent.len() * PAGES > RECENT {
                self.recent.pop_front();
            }
        }
    }
}

#[test]
fn what_was_acknowledged_outlives_killed_owners_and_clients() {
    if let Ok(role) = std::env::var(ROLE) {
        let (number, path) = role.split_once(' ').unwrap();
        work(Path::new(path), number.parse().unwrap());
        return;
    }
    let kills = std::env::var("LARDER_KILLS").map_or(KILLS, |n| n.parse().unwrap());
    let home = Home::with_store(256 * MIB);
    let mut random = Pcg64::seed_from_u64(7);
    let (sender, said) = channel();
    let mut workers: Vec<Worker> = (0..WORKERS)
        .map(|worker| start(&home.path, worker as u64, worker, &sender))
        .collect();
    let mut heard = Heard::default();
    let mut owners_killed = 0;
    for (next, kill) in (WORKERS as u64..).zip(0..kills) {
        for _ in 0..random.random_range(4..40) {
            heard.hear(&said, &mut workers);
        }
        // Every other time the owner.
        let owner = workers.iter().position(|worker| worker.is_owner);
        let victim = owner
            .filter(|_| kill % 2 == 0)
            .unwrap_or_else(|| random.random_range(0..WORKERS));
        owners_killed += usize::from(workers[victim].is_owner);
        workers[victim].child.kill().unwrap();
        let status = workers[victim].child.wait().unwrap();
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&status),
            Some(9),
            "worker {victim} ended by itself"
        );
        workers[victim] = start(&home.path, next, victim, &sender);
    }
    assert!(owners_killed > 0);
    for worker in &mut workers {
        worker.child.kill().unwrap();
        worker.child.wait().unwrap();
    }
    // What they said before they died: their listeners end with them.
    drop(sender);
    for word in said {
        heard.keep(&word);
    }
    let begun = Instant::now();
    let store = home.open();
    eprintln!(
        "{kills} kills, {owners_killed} of owners; longest silence of a worker {:?}; opened in {:?}",
        heard.silence,
        begun.elapsed()
    );
    let pool = Pool::new(&store, "m", &PARTS);
    for (seed, pages) in heard.recent {
        let keys = &chain(seed, PAGES)[..pages];
        assert_eq!(
            pool.hits(keys),
            pages,
            "chain {seed} lost acknowledged pages"
        );
    }
    store.check_invariants().unwrap();
}

//! Four processes on one store, killed at random moments, the owner among them: no process reads
//! wrong bytes, no process hangs, and acknowledged pages are there.
//!
//! Twice: with workers that delete their oldest chains, so that nothing is ever evicted and every
//! acknowledged page must be there; and with a store that is always full, where pages acknowledged
//! lately must be there, as eviction cannot have reached them.
//!
//! Every other worker is of the next release, as far as a test can be (`common/release.rs`), and
//! the store has a feature that this release does not know. Each release is owner and client in
//! turn.
//!
//! `LARDER_KILLS=n` kills more often, `LARDER_KILL_SECONDS=n` for that time. The workers are this
//! same program, with their role in an environment variable.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::release::{LATER, features, later_features, next_release, set_features};
use common::{Home, MIB, Pool, chain};
use larder_engine::{OpenOptions, PageStore, Part, PutOptions, Store};
use larder_store::api::speaking;
use larder_store::share::Inside;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;

const WORKERS: usize = 4;
const KILLS: usize = 25;
const PAGES: usize = 16;
const PARTS: [u32; 1] = [65536];
const ROLE: &str = "LARDER_TEST_SHARE_WORKER";

/// Pages acknowledged last that must be in a full store: a quarter of its capacity.
const RECENT: usize = 700;

/// Chains that a worker keeps before it deletes the oldest. The chains of all workers are a quarter
/// of the store's capacity: reclaim finds no segment so full that it would evict.
const KEPT: usize = 12;

/// After this many kills all workers are killed, and the required pages are checked.
const KILLS_BETWEEN_CHECKS: usize = 20;

/// A worker that is silent for this long hangs.
const HANG: Duration = Duration::from_secs(120);

/// How often the speed of the device is measured.
const PROBE_EVERY: Duration = Duration::from_millis(20);

/// How the workers treat their chains.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Regime {
    /// The store evicts them.
    Evicted,
    /// The worker deletes the oldest.
    Deleted,
}

/// The start parameters of a worker, passed through its environment.
struct Role {
    regime: Regime,
    /// Unique among all workers so far.
    number: u64,
    /// Chains that its predecessor put, or tried to, and has not deleted.
    chains: VecDeque<u64>,
    path: String,
}

impl Role {
    fn write(&self) -> String {
        let regime = match self.regime {
            Regime::Evicted => "evicted",
            Regime::Deleted => "deleted",
        };
        let chains: Vec<String> = self.chains.iter().map(u64::to_string).collect();
        format!(
            "{regime} {} {},{}",
            self.number,
            chains.join(":"),
            self.path
        )
    }

    fn read(text: &str) -> Option<Role> {
        let (words, path) = text.split_once(',')?;
        let mut words = words.split(' ');
        let regime = match words.next()? {
            "evicted" => Regime::Evicted,
            _ => Regime::Deleted,
        };
        let number = words.next()?.parse().ok()?;
        let chains = words.next()?.split(':');
        Some(Role {
            regime,
            number,
            chains: chains.filter_map(|chain| chain.parse().ok()).collect(),
            path: path.to_owned(),
        })
    }
}

/// A worker's messages, one per line.
#[derive(Clone, Copy)]
enum Message {
    /// The worker is about to put a chain.
    Tries(u64),
    /// The worker has put a chain, and this many of its first pages were acknowledged.
    Has {
        chain: u64,
        pages: usize,
        is_owner: bool,
        /// The evictions of the store under this owner.
        evicted: u64,
    },
    /// The worker is about to delete a chain.
    Deletes(u64),
    /// The worker has deleted a chain.
    Deleted(u64),
}

impl Message {
    fn write(self) -> String {
        match self {
            Message::Tries(chain) => format!("tries {chain}"),
            Message::Has {
                chain,
                pages,
                is_owner,
                evicted,
            } => format!("has {chain} {pages} {is_owner} {evicted}"),
            Message::Deletes(chain) => format!("deletes {chain}"),
            Message::Deleted(chain) => format!("deleted {chain}"),
        }
    }

    /// `None` for lines of the test harness.
    fn read(line: &str) -> Option<Message> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["tries", chain] => Some(Message::Tries(chain.parse().ok()?)),
            ["has", chain, pages, is_owner, evicted] => Some(Message::Has {
                chain: chain.parse().ok()?,
                pages: pages.parse().ok()?,
                is_owner: is_owner.parse().ok()?,
                evicted: evicted.parse().ok()?,
            }),
            ["deletes", chain] => Some(Message::Deletes(chain.parse().ok()?)),
            ["deleted", chain] => Some(Message::Deleted(chain.parse().ok()?)),
            _ => None,
        }
    }
}

/// Sends a message, or ends this process: without a parent there is no use for it.
fn send(message: Message) {
    let mut out = std::io::stdout().lock();
    if writeln!(out, "{}", message.write()).is_err() {
        std::process::exit(0);
    }
}

impl Role {
    fn is_of_next_release(&self) -> bool {
        self.number % 2 == 1
    }
}

fn work(role: Role) {
    let mut options = OpenOptions::default();
    if role.is_of_next_release() {
        options = speaking(options, next_release());
    }
    let store = Store::attach(Path::new(&role.path), options).unwrap();
    let pool = Pool::new(&store, "m", &PARTS);
    let mut random = Pcg64::seed_from_u64(role.number);
    let mut mine = role.chains;
    let mut round = 0;
    loop {
        let seed = role.number * 100_000 + round;
        let wait = Duration::from_secs(if random.random_bool(0.5) { 1 } else { 0 });
        send(Message::Tries(seed));
        let statuses = pool.put_from(&chain(seed, PAGES), 0, PutOptions::waiting(wait));
        let pages = statuses.iter().take_while(|s| s.is_present()).count();
        send(Message::Has {
            chain: seed,
            pages,
            is_owner: store.part() == Part::Owner,
            evicted: store.stats().evicted,
        });
        if pages == 0 {
            continue;
        }
        round += 1;
        mine.push_back(seed);
        // Panics on wrong bytes.
        pool.get(&chain(mine[random.random_range(0..mine.len())], PAGES));
        let other = random.random_range(0..WORKERS as u64 * 4) * 100_000 + round;
        pool.get(&chain(other, PAGES));
        if random.random_bool(0.05) {
            let _ = store.flush();
        }
        while mine.len() > KEPT {
            if role.regime == Regime::Deleted {
                send(Message::Deletes(mine[0]));
                // If the store has no owner right now: later.
                if store.delete(pool.id, &chain(mine[0], PAGES)).is_err() {
                    break;
                }
                send(Message::Deleted(mine[0]));
            }
            mine.pop_front();
        }
    }
}

struct Worker {
    is_of_next_release: bool,
    child: Child,
    listener: JoinHandle<()>,
    is_owner: bool,
    /// When it was started, or sent its last message.
    last_message_at: Instant,
}

impl Worker {
    fn start(test: &str, role: &Role, worker: usize, sender: &Sender<Received>) -> Worker {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(ROLE, role.write())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let sender = sender.clone();
        let listener = std::thread::spawn(move || {
            let lines = lines.map_while(Result::ok);
            for message in lines.filter_map(|line| Message::read(&line)) {
                let at = Instant::now();
                let _ = sender.send(Received {
                    worker,
                    message,
                    at,
                });
            }
        });
        Worker {
            is_of_next_release: role.is_of_next_release(),
            child,
            listener,
            is_owner: false,
            last_message_at: Instant::now(),
        }
    }

    /// When this returns, all its messages are in the channel.
    fn kill(mut self, number: usize) {
        self.child.kill().unwrap();
        let status = self.child.wait().unwrap();
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&status),
            Some(9),
            "worker {number} ended by itself"
        );
        self.listener.join().unwrap();
    }
}

struct Received {
    worker: usize,
    message: Message,
    at: Instant,
}

/// A chain that was put, or is being put.
struct Chain {
    seed: u64,
    worker: usize,
    /// Pages of it that must be there.
    pages: usize,
}

/// A small write beside the workers, now and then: no worker can be faster than the device.
struct Probe {
    stop: Sender<()>,
    thread: JoinHandle<Duration>,
}

impl Probe {
    fn start(beside: &Path) -> Probe {
        let file = std::fs::File::create(beside.with_extension("probe")).unwrap();
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || {
            let mut longest = Duration::ZERO;
            while stopped.recv_timeout(PROBE_EVERY) == Err(RecvTimeoutError::Timeout) {
                let begun = Instant::now();
                file.write_all_at(&[0; 4096], 0).unwrap();
                file.sync_data().unwrap();
                longest = longest.max(begun.elapsed());
            }
            longest
        });
        Probe { stop, thread }
    }

    /// How long the longest write took.
    fn end(self) -> Duration {
        drop(self.stop);
        self.thread.join().unwrap()
    }
}

/// The workers, and their messages.
struct Fleet {
    test: &'static str,
    regime: Regime,
    home: Home,
    workers: Vec<Worker>,
    next: u64,
    sender: Sender<Received>,
    received: Receiver<Received>,
    /// The chains that must be there, oldest first.
    chains: VecDeque<Chain>,
    /// The longest silence of a worker.
    silence: Duration,
    /// Acknowledged pages that were checked and found.
    looked_for: usize,
}

impl Fleet {
    fn new(test: &'static str, regime: Regime) -> Fleet {
        let (sender, received) = channel();
        let mut fleet = Fleet {
            test,
            regime,
            home: Home::with_store(256 * MIB),
            workers: Vec::new(),
            next: 0,
            sender,
            received,
            chains: VecDeque::new(),
            silence: Duration::ZERO,
            looked_for: 0,
        };
        set_features(&fleet.home.path, later_features(LATER, 0));
        fleet.start_all();
        fleet
    }

    fn start(&mut self, worker: usize) -> Worker {
        let chains = self.chains.iter();
        let role = Role {
            regime: self.regime,
            number: self.next,
            chains: chains
                .filter(|chain| chain.worker == worker)
                .map(|chain| chain.seed)
                .collect(),
            path: self.home.path.display().to_string(),
        };
        self.next += 1;
        Worker::start(self.test, &role, worker, &self.sender)
    }

    fn start_all(&mut self) {
        self.workers = (0..WORKERS).map(|worker| self.start(worker)).collect();
    }

    /// Receives messages until `puts` chains have been put, and checks that no worker hangs.
    fn receive(&mut self, puts: usize) {
        let mut puts_seen = 0;
        while puts_seen < puts {
            let message = self.receive_message();
            puts_seen += usize::from(matches!(message, Message::Has { pages: 1.., .. }));
        }
    }

    fn receive_message(&mut self) -> Message {
        let received = self
            .received
            .recv_timeout(HANG)
            .expect("no worker has sent a message");
        let worker = &mut self.workers[received.worker];
        // The last message of its predecessor may arrive late.
        let silence = received
            .at
            .saturating_duration_since(worker.last_message_at);
        self.silence = self.silence.max(silence);
        worker.last_message_at = worker.last_message_at.max(received.at);
        if let Message::Has { is_owner, .. } = received.message {
            worker.is_owner = is_owner;
        }
        for (number, worker) in self.workers.iter().enumerate() {
            let silence = received
                .at
                .saturating_duration_since(worker.last_message_at);
            assert!(silence < HANG, "worker {number} hangs");
        }
        self.note(&received);
        received.message
    }

    fn note(&mut self, received: &Received) {
        let (Message::Tries(seed)
        | Message::Has { chain: seed, .. }
        | Message::Deletes(seed)
        | Message::Deleted(seed)) = received.message;
        let at = self.chains.iter().position(|chain| chain.seed == seed);
        match (received.message, at) {
            (Message::Tries(_), None) => self.chains.push_back(Chain {
                seed,
                worker: received.worker,
                pages: 0,
            }),
            (Message::Has { pages, evicted, .. }, Some(at)) => {
                self.chains[at].pages = pages;
                assert!(
                    evicted == 0 || self.regime == Regime::Evicted,
                    "there was room for all"
                );
            }
            (Message::Deletes(_), Some(at)) => self.chains[at].pages = 0,
            (Message::Deleted(_), Some(at)) => drop(self.chains.remove(at)),
            (Message::Tries(_), Some(_)) | (_, None) => {}
        }
        if self.regime == Regime::Evicted {
            while self.chains.len() * PAGES > RECENT {
                self.chains.pop_front();
            }
        }
    }

    /// Kills one worker, every other time the owner, and starts another in its place. If it was the
    /// owner, returns whether it was of the next release.
    fn kill_one(&mut self, kill: usize, random: &mut Pcg64) -> Option<bool> {
        let owner = self.workers.iter().position(|worker| worker.is_owner);
        let victim = owner
            .filter(|_| kill.is_multiple_of(2))
            .unwrap_or_else(|| random.random_range(0..WORKERS));
        let worker = self.workers.remove(victim);
        let owner_release = worker.is_owner.then_some(worker.is_of_next_release);
        worker.kill(victim);
        self.receive_rest();
        let successor = self.start(victim);
        self.workers.insert(victim, successor);
        owner_release
    }

    fn receive_rest(&mut self) {
        while let Ok(received) = self.received.try_recv() {
            self.note(&received);
        }
    }

    /// Kills all workers, and checks all chains that must be there.
    fn check(&mut self) {
        for (number, worker) in std::mem::take(&mut self.workers).into_iter().enumerate() {
            worker.kill(number);
        }
        self.receive_rest();
        let store = self.home.open();
        let pool = Pool::new(&store, "m", &PARTS);
        for Chain { seed, pages, .. } in &self.chains {
            let hits = pool.hits(&chain(*seed, PAGES)[..*pages]);
            assert_eq!(hits, *pages, "chain {seed} lost acknowledged pages");
            self.looked_for += pages;
        }
        store.local().unwrap().check_invariants().unwrap();
        store.close().unwrap();
    }
}

fn kill_many(test: &'static str, regime: Regime) {
    if let Ok(role) = std::env::var(ROLE) {
        work(Role::read(&role).unwrap());
        return;
    }
    let number = |name| {
        std::env::var(name)
            .ok()
            .map(|n| n.parse::<usize>().unwrap())
    };
    let seconds = number("LARDER_KILL_SECONDS");
    let kills = match seconds {
        Some(_) => usize::MAX,
        None => number("LARDER_KILLS").unwrap_or(KILLS),
    };
    let until = Instant::now() + Duration::from_secs(seconds.unwrap_or(0) as u64);
    let mut fleet = Fleet::new(test, regime);
    let probe = Probe::start(&fleet.home.path);
    let mut random = Pcg64::seed_from_u64(7);
    // Owners killed: of this release, of the next one.
    let mut owners = [0, 0];
    let mut killed = 0;
    for kill in 0..kills {
        if seconds.is_some() && Instant::now() >= until {
            break;
        }
        fleet.receive(random.random_range(4..40));
        if let Some(is_of_next_release) = fleet.kill_one(kill, &mut random) {
            owners[usize::from(is_of_next_release)] += 1;
        }
        killed += 1;
        if (kill + 1).is_multiple_of(KILLS_BETWEEN_CHECKS) {
            fleet.check();
            fleet.start_all();
        }
    }
    fleet.check();
    let kept = features(&fleet.home.path);
    assert_eq!(kept.compatible, LATER, "a takeover dropped a feature");
    assert!(owners.iter().all(|killed| *killed > 0), "{owners:?}");
    eprintln!(
        "{killed} kills, {} of owners of this release, {} of the next one; longest silence of a \
         worker {:?}, longest small write beside them {:?}; {} acknowledged pages looked for and \
         found",
        owners[0],
        owners[1],
        fleet.silence,
        probe.end(),
        fleet.looked_for
    );
}

#[test]
fn pages_acknowledged_lately_outlive_kills_in_a_full_store() {
    kill_many(
        "pages_acknowledged_lately_outlive_kills_in_a_full_store",
        Regime::Evicted,
    );
}

#[test]
fn all_acknowledged_pages_outlive_kills_where_nothing_is_evicted() {
    kill_many(
        "all_acknowledged_pages_outlive_kills_where_nothing_is_evicted",
        Regime::Deleted,
    );
}

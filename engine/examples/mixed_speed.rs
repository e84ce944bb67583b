//! How fast pages are read beside a writer, and written beside a reader: each alone and both at
//! once, by turns, in one process or in two.
//!
//! `cargo run --release -p larder-engine --example mixed_speed -- STORE PAGE_BYTES READ_BATCH
//! WRITE_BATCH SECONDS ROUNDS [--readers N] [--writers N] [--processes] [--no-pacing]
//! [--only read|write|both] [--idle MS]`
//!
//! STORE is an existing store of 4 GiB or more. 1 GiB of pages to read is put before each part, as
//! far as they are not there. A reader gets batches of them in random order; a writer puts batches
//! of new pages, and the store evicts older ones. Every further reader or writer runs on a thread
//! of its own; with `--processes`, all but the first reader run in processes of their own. With
//! `--idle`, a reader waits for so long before each call. `--only` names the only part. Prints one
//! JSON document for each part of each round: bytes per second, times of the calls in
//! microseconds, pages not read and not written, and CPU seconds of all processes.

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, missing_docs)]

use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Write};
use std::num::NonZeroUsize;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use larder_engine::format::{Namespace, PageKey, PageShape, TokenUnits, page_keys};
use larder_engine::{
    AlignedBuf, GetPage, NamespaceId, OpenOptions, PageStore, PutOptions, PutPage, SharedReads,
    Store, StoreError,
};
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Bytes of the pages that are read.
const READ_BYTES: usize = 1 << 30;

/// Pages that are put at once before the measurement.
const FILL_BYTES: usize = 32 << 20;

/// Longest wait of a put for room.
const WAIT: Duration = Duration::from_secs(30);

#[derive(Clone)]
struct Load {
    store: String,
    page_bytes: usize,
    read_batch: usize,
    write_batch: usize,
    time: Duration,
    rounds: usize,
    readers: usize,
    writers: usize,
    are_processes: bool,
    is_paced: bool,
    idle: Duration,
    only: Option<String>,
}

/// The bytes and times of readers and writers in one part of a round.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Done {
    bytes: f64,
    seconds: f64,
    call_us: Vec<f64>,
    /// Pages that were not there, or were refused.
    missed: u64,
    cpu_seconds: f64,
    /// Longest waits of writes for the device, and the pacing, at the end.
    wait_p50_us: f64,
    wait_p99_us: f64,
    paced_rate: u64,
    read_slowdown: f64,
    pacing: String,
}

/// One part of a round, for a role.
#[derive(Serialize)]
struct Line<'a> {
    part: &'a str,
    role: &'a str,
    bytes_per_second: f64,
    call_p50_us: f64,
    call_p99_us: f64,
    calls: usize,
    missed_pages: u64,
    cpu_seconds: f64,
    wait_p50_us: f64,
    wait_p99_us: f64,
    paced_rate: u64,
    read_slowdown: f64,
    pacing: &'a str,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Reader,
    Writer,
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.first().map(String::as_str) {
        Some("reader") => serve(&Load::parse(&args[1..]), Role::Reader),
        Some("writer") => serve(&Load::parse(&args[1..]), Role::Writer),
        _ => measure(&args, &Load::parse(&args)),
    }
}

impl Load {
    fn parse(args: &[String]) -> Load {
        let usage = "see the head of mixed_speed.rs";
        let number = |at: usize| args.get(at).expect(usage).parse::<usize>().expect(usage);
        let is_given = |name: &str| args.iter().any(|arg| arg == name);
        let word_after = |name: &str| {
            let at = args.iter().position(|arg| arg == name);
            at.map(|at| args.get(at + 1).expect(usage))
        };
        let after = |name: &str, default: usize| {
            word_after(name).map_or(default, |word| word.parse().expect(usage))
        };
        Load {
            store: args.first().expect(usage).clone(),
            page_bytes: number(1),
            read_batch: number(2),
            write_batch: number(3),
            time: Duration::from_millis(number(4) as u64 * 1000),
            rounds: number(5),
            readers: after("--readers", 1),
            writers: after("--writers", 1),
            are_processes: is_given("--processes"),
            is_paced: !is_given("--no-pacing"),
            idle: Duration::from_millis(after("--idle", 0) as u64),
            only: word_after("--only").cloned(),
        }
    }

    fn open(&self) -> (Store, NamespaceId) {
        let options = OpenOptions::default().with(|o| {
            o.pacing = self.is_paced;
            o.shared_reads = SharedReads::Off;
        });
        let store = Store::attach(self.store.as_ref(), options).unwrap();
        let space = Namespace::builder(
            "mixed_speed",
            "",
            8,
            PageShape::new(&[u32::try_from(self.page_bytes).unwrap()]).unwrap(),
        )
        .build();
        let space = store.namespace(&space.unwrap()).unwrap();
        (store, space)
    }

    fn read_keys(&self) -> Vec<PageKey> {
        keys(0, READ_BYTES / self.page_bytes)
    }
}

fn keys(chain: u64, count: usize) -> Vec<PageKey> {
    let tokens: Vec<u64> = [chain].into_iter().chain(1..count as u64).collect();
    page_keys(&tokens, NonZeroUsize::MIN, None, TokenUnits::Single)
}

/// Another number in each process and each call.
fn seed() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = now.tv_sec.unsigned_abs() << 30 | now.tv_nsec.unsigned_abs();
    seconds ^ u64::from(std::process::id()) << 48
}

fn measure(args: &[String], load: &Load) {
    let (store, space) = load.open();
    let mut others: Vec<(Role, Other)> = Vec::new();
    if load.are_processes {
        let readers = (1..load.readers).map(|_| Role::Reader);
        let writers = (0..load.writers).map(|_| Role::Writer);
        others.extend(
            readers
                .chain(writers)
                .map(|role| (role, Other::start(role, args))),
        );
    }
    for _ in 0..load.rounds {
        for part in ["read", "write", "both"] {
            if load.only.as_ref().is_some_and(|only| only != part) {
                continue;
            }
            let (reads, writes) = (part != "write", part != "read");
            fill(load, &store, space);
            let runs = |role| if role == Role::Reader { reads } else { writes };
            for (role, other) in &mut others {
                if runs(*role) {
                    other.go();
                }
            }
            let mut done = here(load, &store, space, reads, writes);
            for (role, other) in &mut others {
                if runs(*role) {
                    done.push((*role, other.done()));
                }
            }
            for (role, name) in [(Role::Reader, "reader"), (Role::Writer, "writer")] {
                print(part, name, done.iter().filter(|(of, _)| *of == role));
            }
        }
    }
    drop(others);
    close(&store);
}

/// A client whose owner closes at the same moment has nothing left to close.
fn close(store: &Store) {
    match store.close() {
        Ok(()) | Err(StoreError::OwnerGone) => {}
        Err(error) => panic!("{error}"),
    }
}

fn print<'a>(part: &str, role: &str, done: impl Iterator<Item = &'a (Role, Done)>) {
    let done: Vec<&Done> = done.map(|(_, done)| done).collect();
    let Some(last) = done.last() else {
        return;
    };
    let mut calls: Vec<f64> = done.iter().flat_map(|done| done.call_us.clone()).collect();
    calls.sort_unstable_by(f64::total_cmp);
    let at = |part: f64| {
        let last = calls.len().saturating_sub(1);
        calls
            .get((last as f64 * part) as usize)
            .copied()
            .unwrap_or(0.0)
    };
    let line = Line {
        part,
        role,
        bytes_per_second: done.iter().map(|done| done.bytes / done.seconds).sum(),
        call_p50_us: at(0.5),
        call_p99_us: at(0.99),
        calls: calls.len(),
        missed_pages: done.iter().map(|done| done.missed).sum(),
        cpu_seconds: done.iter().map(|done| done.cpu_seconds).sum(),
        wait_p50_us: last.wait_p50_us,
        wait_p99_us: last.wait_p99_us,
        paced_rate: last.paced_rate,
        read_slowdown: last.read_slowdown,
        pacing: &last.pacing,
    };
    println!("{}", serde_json::to_string(&line).unwrap());
}

/// Puts the pages to read that are not there.
fn fill(load: &Load, store: &Store, space: NamespaceId) {
    let keys = load.read_keys();
    let count = (FILL_BYTES / load.page_bytes).max(1);
    let memory = memory(count, load.page_bytes);
    for chunk in keys.chunks(count) {
        if store.longest_prefix(space, chunk) < chunk.len() {
            assert_eq!(put(store, space, chunk, &memory, load.page_bytes), 0);
        }
    }
    store.flush().unwrap();
}

fn memory(pages: usize, page_bytes: usize) -> AlignedBuf {
    let mut memory = AlignedBuf::zeroed(pages * page_bytes).unwrap();
    memory.fill(0xa5);
    memory
}

/// Runs the readers and writers of this process. Their CPU time is counted with the first.
fn here(
    load: &Load,
    store: &Store,
    space: NamespaceId,
    reads: bool,
    writes: bool,
) -> Vec<(Role, Done)> {
    let (readers, writers) = match load.are_processes {
        true => (1, 0),
        false => (load.readers, load.writers),
    };
    let cpu = cpu_seconds();
    let mut done: Vec<(Role, Done)> = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for _ in 0..if reads { readers } else { 0 } {
            threads.push((Role::Reader, scope.spawn(|| read(load, store, space))));
        }
        for _ in 0..if writes { writers } else { 0 } {
            threads.push((Role::Writer, scope.spawn(|| write(load, store, space))));
        }
        let join = |(role, thread): (Role, std::thread::ScopedJoinHandle<'_, Done>)| {
            (role, thread.join().unwrap())
        };
        threads.into_iter().map(join).collect()
    });
    if let Some((_, first)) = done.first_mut() {
        first.cpu_seconds = cpu_seconds() - cpu;
    }
    done
}

fn read(load: &Load, store: &Store, space: NamespaceId) -> Done {
    let keys = load.read_keys();
    let mut memory = memory(load.read_batch, load.page_bytes);
    let mut dice = Pcg64::seed_from_u64(seed());
    let mut done = Done::default();
    let begun = Instant::now();
    while begun.elapsed() < load.time {
        let mut parts: Vec<[IoSliceMut<'_>; 1]> = memory
            .chunks_mut(load.page_bytes)
            .map(|page| [IoSliceMut::new(page)])
            .collect();
        let mut pages: Vec<GetPage<'_, '_>> = parts
            .iter_mut()
            .map(|parts| GetPage {
                key: *keys.choose(&mut dice).unwrap(),
                parts,
            })
            .collect();
        std::thread::sleep(load.idle);
        let called = Instant::now();
        let statuses = store.get(space, &mut pages, None);
        done.call_us.push(called.elapsed().as_secs_f64() * 1e6);
        let hits = statuses.iter().filter(|status| status.is_hit()).count();
        done.bytes += (hits * load.page_bytes) as f64;
        done.missed += (statuses.len() - hits) as u64;
    }
    done.end(begun, store)
}

fn write(load: &Load, store: &Store, space: NamespaceId) -> Done {
    let memory = memory(load.write_batch, load.page_bytes);
    let mut dice = Pcg64::seed_from_u64(seed());
    let mut done = Done::default();
    let begun = Instant::now();
    while begun.elapsed() < load.time {
        let keys = keys(dice.random(), load.write_batch);
        let called = Instant::now();
        let refused = put(store, space, &keys, &memory, load.page_bytes);
        done.call_us.push(called.elapsed().as_secs_f64() * 1e6);
        done.missed += refused;
        done.bytes += ((keys.len() as u64 - refused) * load.page_bytes as u64) as f64;
    }
    done.end(begun, store)
}

/// Puts pages. Returns the number of refused pages.
fn put(
    store: &Store,
    space: NamespaceId,
    keys: &[PageKey],
    memory: &[u8],
    page_bytes: usize,
) -> u64 {
    let parts: Vec<[IoSlice<'_>; 1]> = memory
        .chunks(page_bytes)
        .map(|page| [IoSlice::new(page)])
        .collect();
    let pages: Vec<PutPage<'_>> = (0..)
        .zip(keys.iter().zip(&parts))
        .map(|(depth, (key, parts))| PutPage {
            key: *key,
            parent: (depth > 0).then(|| keys[depth as usize - 1]),
            depth,
            parts,
        })
        .collect();
    let statuses = store.put(space, &pages, PutOptions::waiting(WAIT));
    let refused = statuses.iter().filter(|status| !status.is_present());
    refused.count() as u64
}

impl Done {
    fn end(mut self, begun: Instant, store: &Store) -> Done {
        self.seconds = begun.elapsed().as_secs_f64();
        let stats = store.stats();
        self.wait_p50_us = stats.put_wait_latency.p50_us;
        self.wait_p99_us = stats.put_wait_latency.p99_us;
        self.paced_rate = stats.paced_rate;
        self.read_slowdown = stats.read_slowdown;
        self.pacing = stats.pacing;
        self
    }
}

/// A reader or a writer in a process of its own.
struct Other {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Other {
    fn start(role: Role, args: &[String]) -> Other {
        let name = match role {
            Role::Reader => "reader",
            Role::Writer => "writer",
        };
        let mut child = Command::new(std::env::current_exe().unwrap())
            .arg(name)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        lines.read_line(&mut String::new()).unwrap();
        Other { child, lines }
    }

    fn go(&mut self) {
        writeln!(self.child.stdin.as_mut().unwrap(), "go").unwrap();
    }

    fn done(&mut self) -> Done {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// A process that does one part for each line of input.
fn serve(load: &Load, role: Role) {
    let (store, space) = load.open();
    println!("ready");
    for _ in std::io::stdin().lines() {
        let cpu = cpu_seconds();
        let mut done = match role {
            Role::Reader => read(load, &store, space),
            Role::Writer => write(load, &store, space),
        };
        done.cpu_seconds = cpu_seconds() - cpu;
        println!("{}", serde_json::to_string(&done).unwrap());
    }
    close(&store);
}

fn cpu_seconds() -> f64 {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

//! What the codec changes for a store: bytes a second of puts and gets, and processor time, beside
//! a store without it, in the same run.
//!
//! `cargo run --release -p larder-engine --example codec_store -- DIRECTORY CONTENT PAGE_BYTES
//! ROUNDS [MB_PER_SECOND]`
//!
//! Two new stores of 2 GiB in DIRECTORY take turns: one plain, one with the codec. CONTENT is a
//! file of values in bf16, for example KV from `scripts/kv-pages`; pages are cut from it one after
//! the other. Each round puts 256 MiB of pages in calls of 32 MiB, and gets them in the same calls;
//! reads are O_DIRECT. With MB_PER_SECOND the volumes of both are slowed down to that rate of reads
//! and writes together, in front of the disk. Then, without that limit, single pages are read.
//!
//! Prints one JSON document a round, and the medians at the end: the ratio of the store with the
//! codec to the plain one for puts and gets; the processor time of a get above that of the plain
//! one, in copies (memcpy) of its pages; the ratio of the p50 of one page; plain bytes for each
//! stored byte; and the pages that a full store keeps.

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, missing_docs)]

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use larder_disk::{Action, Buffer, Choice, Disk, Op, Piece};
use larder_engine::format::{Namespace, PageKey, PageShape, TokenUnits, page_keys};
use larder_engine::{
    AlignedBuf, CodecChoice, CreateOptions, GetPage, NamespaceId, OpenOptions, PageStore,
    PutOptions, PutPage, Store, create,
};
use larder_store::api::DiskWrapper;
use larder_store::inventory::Inventory;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

const ROUND_BYTES: usize = 256 << 20;
const CALL_BYTES: usize = 32 << 20;
const STORE_BYTES: u64 = 2 << 30;
const SINGLE_READS: usize = 400;
const WAIT: Duration = Duration::from_secs(60);

/// Hands operations to a disk at a rate.
struct Slow {
    inner: Arc<dyn Disk>,
    bytes_per_second: f64,
    queue: Arc<Queue>,
}

#[derive(Default)]
struct Queue {
    held: Mutex<Held>,
    changed: Condvar,
}

#[derive(Default)]
struct Held {
    ops: VecDeque<(Instant, Op)>,
    /// When all before are done.
    free_at: Option<Instant>,
    is_over: bool,
}

impl Slow {
    fn over(inner: Arc<dyn Disk>, bytes_per_second: f64) -> Slow {
        let queue = Arc::new(Queue::default());
        let (to, from) = (inner.clone(), queue.clone());
        thread::spawn(move || from.hand_out(to.as_ref()));
        Slow {
            inner,
            bytes_per_second,
            queue,
        }
    }
}

impl Queue {
    fn hand_out(&self, to: &dyn Disk) {
        let mut held = self.held.lock().unwrap();
        loop {
            let now = Instant::now();
            let Held { ops, is_over, .. } = &mut *held;
            let mut due = Vec::new();
            while ops.front().is_some_and(|(at, _)| *at <= now || *is_over) {
                due.extend(ops.pop_front().map(|(_, op)| op));
            }
            let next = ops.front().map(|(at, _)| *at);
            if !due.is_empty() {
                drop(held);
                // SAFETY: the contract of the call that queued them.
                unsafe { to.submit(due) };
                held = self.held.lock().unwrap();
                continue;
            }
            if *is_over {
                return;
            }
            held = match next {
                Some(at) => self.changed.wait_timeout(held, at - now).unwrap().0,
                None => self.changed.wait(held).unwrap(),
            };
        }
    }
}

impl Disk for Slow {
    unsafe fn submit(&self, ops: Vec<Op>) {
        let mut held = self.queue.held.lock().unwrap();
        for op in ops {
            let bytes = match &op.action {
                Action::Read { buffer, .. } | Action::Write { buffer, .. } => match buffer {
                    Buffer::Owned(memory) => memory.len(),
                    Buffer::Borrowed(pieces) => pieces.iter().map(|piece| piece.len).sum(),
                },
                Action::Sync => 0,
            };
            let takes = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second);
            let now = Instant::now();
            let done = held.free_at.map_or(now, |free_at| free_at.max(now)) + takes;
            held.free_at = Some(done);
            held.ops.push_back((done, op));
        }
        self.queue.changed.notify_one();
    }

    fn expire(&self) {
        self.inner.expire();
    }

    unsafe fn register(&self, memory: &[Piece]) -> String {
        // SAFETY: the same contract.
        unsafe { self.inner.register(memory) }
    }

    fn choice(&self) -> &Choice {
        self.inner.choice()
    }

    fn shutdown(&self) {
        self.queue.held.lock().unwrap().is_over = true;
        self.queue.changed.notify_one();
        self.inner.shutdown();
    }
}

/// A store, and memory for the pages of a call.
struct Side {
    store: Store,
    codec: CodecChoice,
    id: NamespaceId,
    memory: AlignedBuf,
    page_bytes: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Times {
    put_seconds: f64,
    put_cpu: f64,
    get_seconds: f64,
    get_cpu: f64,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Round {
    put_ratio: f64,
    get_ratio: f64,
    put_bytes_per_second: f64,
    get_bytes_per_second: f64,
    get_cpu_above_plain_in_copies: f64,
    put_cpu_above_plain_in_copies: f64,
    one_page_p50_ratio: f64,
    plain_bytes_by_stored: f64,
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let usage = "see the head of codec_store.rs";
    let number = |at: usize| args.get(at).expect(usage).parse::<usize>().expect(usage);
    let directory = PathBuf::from(args.first().expect(usage));
    let content = std::fs::read(args.get(1).expect(usage)).unwrap();
    let (page_bytes, rounds) = (number(2), number(3));
    let rate = args
        .get(4)
        .map(|rate| rate.parse::<f64>().expect(usage) * 1e6);
    let mut list: Vec<Round> = Vec::new();
    for round in 0..rounds {
        let found = measure(&directory, &content, page_bytes, rate, round as u64);
        println!("{}", serde_json::to_string(&found).unwrap());
        list.push(found);
    }
    let median = |of: fn(&Round) -> f64| {
        let mut values: Vec<f64> = list.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let medians = Round {
        put_ratio: median(|of| of.put_ratio),
        get_ratio: median(|of| of.get_ratio),
        put_bytes_per_second: median(|of| of.put_bytes_per_second),
        get_bytes_per_second: median(|of| of.get_bytes_per_second),
        get_cpu_above_plain_in_copies: median(|of| of.get_cpu_above_plain_in_copies),
        put_cpu_above_plain_in_copies: median(|of| of.put_cpu_above_plain_in_copies),
        one_page_p50_ratio: median(|of| of.one_page_p50_ratio),
        plain_bytes_by_stored: median(|of| of.plain_bytes_by_stored),
    };
    println!("medians: {}", serde_json::to_string(&medians).unwrap());
    let [plain, codec] = [CodecChoice::Off, CodecChoice::Bf16]
        .map(|codec| kept(&directory, &content, page_bytes, codec));
    let ratio = codec as f64 / plain as f64;
    println!("pages kept by a full store: {plain} plain, {codec} with the codec, {ratio:.3}");
}

/// Pages that a store keeps after puts of twice its size.
fn kept(directory: &Path, content: &[u8], page_bytes: usize, codec: CodecChoice) -> u64 {
    let path = directory.join(format!("{codec}.store"));
    let _ = std::fs::remove_file(&path);
    create(&path, &CreateOptions::new(STORE_BYTES)).unwrap();
    let mut side = Side::open(&path, codec, page_bytes, None);
    for chain in 0..2 * STORE_BYTES / CALL_BYTES as u64 {
        side.put(
            content,
            &keys_of(chain, CALL_BYTES / page_bytes),
            &mut Times::default(),
        );
    }
    side.store.usage().unwrap()[0].pages
}

/// One round of both stores, the plain one first in every second one.
fn measure(
    directory: &Path,
    content: &[u8],
    page_bytes: usize,
    rate: Option<f64>,
    round: u64,
) -> Round {
    let open = |codec: CodecChoice, rate: Option<f64>| {
        let path = directory.join(format!("{codec}.store"));
        let _ = std::fs::remove_file(&path);
        create(&path, &CreateOptions::new(STORE_BYTES)).unwrap();
        Side::open(&path, codec, page_bytes, rate)
    };
    let keys = keys_of(round, ROUND_BYTES / page_bytes);
    let mut times = [Times::default(); 2];
    let mut sides = [CodecChoice::Off, CodecChoice::Bf16].map(|codec| open(codec, rate));
    let order = if round.is_multiple_of(2) {
        [0, 1]
    } else {
        [1, 0]
    };
    for at in order {
        times[at] = sides[at].put_and_get(content, &keys);
    }
    let usage = sides[1].store.usage().unwrap()[0];
    // Without the limit, and page by page in turns.
    let mut sides = sides.map(|side| side.reopen(directory));
    let mut singles = [Vec::new(), Vec::new()];
    for read in 0..SINGLE_READS {
        let key = keys[read * 7919 % keys.len()];
        for at in [read % 2, 1 - read % 2] {
            singles[at].push(sides[at].get_one(key));
        }
    }
    let [plain_p50, codec_p50] = singles.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    });
    let copy = copy_seconds(content, page_bytes) * keys.len() as f64;
    let [plain, codec] = times;
    Round {
        put_ratio: plain.put_seconds / codec.put_seconds,
        get_ratio: plain.get_seconds / codec.get_seconds,
        put_bytes_per_second: ROUND_BYTES as f64 / codec.put_seconds,
        get_bytes_per_second: ROUND_BYTES as f64 / codec.get_seconds,
        get_cpu_above_plain_in_copies: (codec.get_cpu - plain.get_cpu) / copy,
        put_cpu_above_plain_in_copies: (codec.put_cpu - plain.put_cpu) / copy,
        one_page_p50_ratio: codec_p50 / plain_p50,
        plain_bytes_by_stored: usage.plain_bytes as f64 / usage.bytes as f64,
    }
}

impl Side {
    fn open(path: &Path, codec: CodecChoice, page_bytes: usize, rate: Option<f64>) -> Side {
        let options = OpenOptions::default().with(|o| {
            o.codec = codec;
            o.disk_wrapper = rate.map(|rate| {
                DiskWrapper::new(move |disk| Arc::new(Slow::over(disk, rate)) as Arc<dyn Disk>)
            });
        });
        let store = Store::open(path, options).unwrap();
        let shape = PageShape::new(&[u32::try_from(page_bytes).unwrap()]).unwrap();
        let namespace = Namespace::builder("codec", "w", 64, shape).build().unwrap();
        let id = store.namespace(&namespace).unwrap();
        let mut memory = AlignedBuf::zeroed(CALL_BYTES.max(page_bytes)).unwrap();
        memory.fill(1);
        Side {
            store,
            codec,
            id,
            memory,
            page_bytes,
        }
    }

    fn reopen(self, directory: &Path) -> Side {
        let path = directory.join(format!("{}.store", self.codec));
        let page_bytes = self.page_bytes;
        self.store.close().unwrap();
        Side::open(&path, CodecChoice::Off, page_bytes, None)
    }

    fn put_and_get(&mut self, content: &[u8], keys: &[PageKey]) -> Times {
        let mut times = Times::default();
        let batch = (CALL_BYTES / self.page_bytes).max(1);
        self.put(content, keys, &mut times);
        self.store.flush().unwrap();
        for some in keys.chunks(batch) {
            let (began, cpu) = (Instant::now(), cpu_seconds());
            self.get(some);
            times.get_seconds += began.elapsed().as_secs_f64();
            times.get_cpu += cpu_seconds() - cpu;
        }
        times
    }

    fn put(&mut self, content: &[u8], keys: &[PageKey], times: &mut Times) {
        let batch = (CALL_BYTES / self.page_bytes).max(1);
        let mut at = 0;
        for (call, some) in keys.chunks(batch).enumerate() {
            for slot in self
                .memory
                .chunks_exact_mut(self.page_bytes)
                .take(some.len())
            {
                at = if at + self.page_bytes > content.len() {
                    0
                } else {
                    at
                };
                slot.copy_from_slice(&content[at..at + self.page_bytes]);
                at += self.page_bytes;
            }
            let parts: Vec<[IoSlice<'_>; 1]> = self
                .memory
                .chunks_exact(self.page_bytes)
                .map(|page| [IoSlice::new(page)])
                .collect();
            let pages: Vec<PutPage<'_>> = some
                .iter()
                .zip(&parts)
                .enumerate()
                .map(|(index, (key, parts))| {
                    let depth = call * batch + index;
                    PutPage {
                        key: *key,
                        parent: depth.checked_sub(1).map(|before| keys[before]),
                        depth: u32::try_from(depth).unwrap(),
                        parts,
                    }
                })
                .collect();
            let (began, cpu) = (Instant::now(), cpu_seconds());
            let statuses = self.store.put(self.id, &pages, PutOptions::waiting(WAIT));
            times.put_seconds += began.elapsed().as_secs_f64();
            times.put_cpu += cpu_seconds() - cpu;
            assert!(statuses.iter().all(|status| status.is_present()));
        }
    }

    fn get(&mut self, keys: &[PageKey]) {
        let mut parts: Vec<[IoSliceMut<'_>; 1]> = self
            .memory
            .chunks_exact_mut(self.page_bytes)
            .map(|page| [IoSliceMut::new(page)])
            .collect();
        let mut pages: Vec<GetPage<'_, '_>> = keys
            .iter()
            .zip(&mut parts)
            .map(|(key, parts)| GetPage { key: *key, parts })
            .collect();
        let statuses = self.store.get(self.id, &mut pages, None);
        assert!(statuses.iter().all(|status| status.is_hit()));
    }

    fn get_one(&mut self, key: PageKey) -> f64 {
        let began = Instant::now();
        self.get(&[key]);
        began.elapsed().as_secs_f64()
    }
}

fn keys_of(round: u64, pages: usize) -> Vec<PageKey> {
    let tokens: Vec<u64> = (0..pages as u64).map(|page| round << 32 | page).collect();
    page_keys(&tokens, NonZeroUsize::MIN, None, TokenUnits::Single)
}

/// Seconds that a copy of one page takes, over 64 MiB.
fn copy_seconds(content: &[u8], page_bytes: usize) -> f64 {
    let bytes = (64 << 20).min(content.len());
    let mut into = vec![1_u8; bytes];
    let mut times: Vec<f64> = (0..9)
        .map(|_| {
            let began = Instant::now();
            into.copy_from_slice(std::hint::black_box(&content[..bytes]));
            std::hint::black_box(&mut into);
            began.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2] * page_bytes as f64 / bytes as f64
}

fn cpu_seconds() -> f64 {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

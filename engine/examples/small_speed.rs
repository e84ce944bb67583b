//! How long reads of small pages take, and the CPU time of a GiB of them: by a store, and by bare
//! programs that read pages of the same file and compute the same checksums.
//!
//! `cargo run --release -p larder-engine --example small_speed -- STORE PAGE_BYTES BATCH CALLS
//! ROUNDS`
//!
//! STORE is an existing store of one volume, of 2 GiB or more; 1 GiB of pages is put into it first,
//! as one chain. In each round each way reads CALLS batches of BATCH pages. The order of the ways
//! is random.
//!
//! - `scattered`: `PageStore::get` of pages of the chain in random order.
//! - `neighbours`: `PageStore::get` of pages that follow each other in the chain.
//! - `ring`: the caller has a ring, with 32 reads in flight, of places in random order.
//! - `thread`, for a batch of one page: a thread of its own has the ring. The caller wakes it with
//!   an eventfd and sleeps until it is woken: the wake-ups of a store that many threads call.
//!
//! Prints one JSON document for each way of each round: microseconds of a call, the median and the
//! 99th percentile; bytes per second; CPU seconds per GiB of the process.

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, missing_docs)]

use std::fs::{File, OpenOptions as FileOptions};
use std::hint::black_box;
use std::io::{IoSlice, IoSliceMut};
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering::SeqCst};
use std::thread::Thread;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};
use larder_engine::format::{
    Fingerprint, Namespace, PageChecksum, PageKey, PageShape, TokenUnits, page_keys,
};
use larder_engine::{
    AlignedBuf, GetPage, NamespaceId, OpenOptions, PageStore, PutOptions, PutPage, Store,
};
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;
use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{ClockId, clock_gettime};

/// Bytes of the pages, and of the part of the file that the bare programs read.
const BYTES: usize = 1 << 30;

/// Where they begin: behind the superblocks.
const FROM: u64 = 1 << 20;

/// Reads of a bare ring in flight.
const DEPTH: usize = 32;

/// No request; and the request to end.
const NONE: u64 = u64::MAX;
const END: u64 = u64::MAX - 1;

type Read<'a> = Box<dyn FnMut(&mut Pcg64) + 'a>;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [path, numbers @ ..] = words.as_slice() else {
        panic!("see the head of small_speed.rs");
    };
    let numbers: Vec<usize> = numbers.iter().map(|word| word.parse().unwrap()).collect();
    let &[page_bytes, batch, calls, rounds] = numbers.as_slice() else {
        panic!("see the head of small_speed.rs");
    };
    let mut dice = Pcg64::seed_from_u64(u64::from(std::process::id()));
    let store = Store::open(path.as_ref(), OpenOptions::default()).unwrap();
    let chain = Chain::put(&store, page_bytes);
    let shared = &Shared::new();
    std::thread::scope(|scope| {
        let bare = || Bare::new(path, page_bytes, batch);
        let (mut server, mut alone, mut handed) = (bare(), bare(), bare());
        scope.spawn(move || server.serve(shared));
        let mut ways: Vec<(&str, Read<'_>)> = vec![
            ("scattered", chain.reader(batch, true)),
            ("ring", Box::new(move |dice| alone.read(dice))),
        ];
        if batch == 1 {
            ways.push(("thread", Box::new(move |dice| handed.ask(shared, dice))));
        } else {
            ways.push(("neighbours", chain.reader(batch, false)));
        }
        for _ in 0..rounds {
            ways.shuffle(&mut dice);
            for (name, read) in &mut ways {
                measure(name, calls, batch * page_bytes, read, &mut dice);
            }
        }
        shared.send(END);
    });
    store.close().unwrap();
}

fn measure(name: &str, calls: usize, bytes: usize, read: &mut Read<'_>, dice: &mut Pcg64) {
    let cpu = cpu_seconds();
    let mut times: Vec<f64> = Vec::with_capacity(calls);
    for _ in 0..calls {
        let begun = Instant::now();
        read(dice);
        times.push(begun.elapsed().as_secs_f64());
    }
    let (cpu, moved) = (cpu_seconds() - cpu, (calls * bytes) as f64);
    let speed = moved / times.iter().sum::<f64>();
    times.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| times[(calls as f64 * share) as usize] * 1e6;
    let line = serde_json::json!({
        "way": name,
        "p50_us": at(0.5),
        "p99_us": at(0.99),
        "bytes_per_second": speed,
        "cpu_seconds_per_gib": cpu * BYTES as f64 / moved,
    });
    println!("{line}");
}

fn cpu_seconds() -> f64 {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

/// A chain of pages in a store.
struct Chain<'a> {
    store: &'a Store,
    space: NamespaceId,
    page_bytes: usize,
    keys: Vec<PageKey>,
}

impl Chain<'_> {
    fn put(store: &Store, page_bytes: usize) -> Chain<'_> {
        let shape = PageShape::new(&[u32::try_from(page_bytes).unwrap()]).unwrap();
        let space = Namespace::builder("small_speed", "", 8, shape).build();
        let space = store.namespace(&space.unwrap()).unwrap();
        let tokens: Vec<u64> = (0..(BYTES / page_bytes) as u64).collect();
        let keys = page_keys(&tokens, NonZeroUsize::MIN, None, TokenUnits::Single);
        let mut memory = AlignedBuf::zeroed(page_bytes).unwrap();
        memory.fill(0xa5);
        let parts = [IoSlice::new(&memory)];
        let page = |(depth, key): (usize, &PageKey)| PutPage {
            key: *key,
            parent: depth.checked_sub(1).map(|before| keys[before]),
            depth: u32::try_from(depth).unwrap(),
            parts: &parts,
        };
        let pages: Vec<PutPage<'_>> = keys.iter().enumerate().map(page).collect();
        for some in pages.chunks(512) {
            let statuses = store.put(space, some, PutOptions::waiting(Duration::from_secs(30)));
            assert!(statuses.iter().all(|status| status.is_present()));
        }
        store.flush().unwrap();
        drop(pages);
        Chain {
            store,
            space,
            page_bytes,
            keys,
        }
    }

    fn reader(&self, batch: usize, are_scattered: bool) -> Read<'_> {
        let mut memory = AlignedBuf::zeroed(batch * self.page_bytes).unwrap();
        memory.fill(0xa5);
        Box::new(move |dice| {
            let mut parts: Vec<[IoSliceMut<'_>; 1]> = memory
                .chunks_mut(self.page_bytes)
                .map(|page| [IoSliceMut::new(page)])
                .collect();
            let first = dice.random_range(0..=self.keys.len() - batch);
            let keys = (first..).zip(&mut parts).map(|(at, parts)| GetPage {
                key: match are_scattered {
                    true => *self.keys.choose(dice).unwrap(),
                    false => self.keys[at],
                },
                parts,
            });
            let mut pages: Vec<GetPage<'_, '_>> = keys.collect();
            let statuses = self.store.get(self.space, &mut pages, None);
            assert!(statuses.iter().all(|status| status.is_hit()));
        })
    }
}

/// A file, a ring and a buffer.
struct Bare {
    ring: IoUring,
    file: File,
    /// As many pages as a batch has.
    memory: AlignedBuf,
    page_bytes: usize,
}

/// Between a caller and the thread that has the ring.
struct Shared {
    bell: OwnedFd,
    asked: AtomicU64,
    /// The memory to read into.
    memory: AtomicPtr<u8>,
    is_done: AtomicBool,
    caller: Thread,
}

impl Shared {
    fn new() -> Shared {
        Shared {
            bell: eventfd(0, EventfdFlags::empty()).unwrap(),
            asked: AtomicU64::new(NONE),
            memory: AtomicPtr::default(),
            is_done: AtomicBool::new(false),
            caller: std::thread::current(),
        }
    }

    fn send(&self, request: u64) {
        self.asked.store(request, SeqCst);
        rustix::io::write(&self.bell, &1_u64.to_ne_bytes()).unwrap();
    }
}

impl Bare {
    fn new(path: &str, page_bytes: usize, batch: usize) -> Bare {
        let file = FileOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(path)
            .unwrap();
        let mut memory = AlignedBuf::zeroed(batch * page_bytes).unwrap();
        memory.fill(0xa5);
        Bare {
            ring: IoUring::new(2 * DEPTH as u32).unwrap(),
            file,
            memory,
            page_bytes,
        }
    }

    fn somewhere(&self, dice: &mut Pcg64) -> u64 {
        let pages = (BYTES / self.page_bytes) as u64;
        FROM + dice.random_range(0..pages) * self.page_bytes as u64
    }

    /// Reads a batch, and looks at each page while the next are read.
    fn read(&mut self, dice: &mut Pcg64) {
        let count = self.memory.len() / self.page_bytes;
        let (mut next, mut landed) = (0, 0);
        while landed < count {
            if next > landed {
                self.ring.submit_and_wait(1).unwrap();
            }
            let ended: Vec<u64> = self.landed().collect();
            landed += ended.len();
            // The next reads begin before these pages are looked at.
            while next < count && next - landed < DEPTH {
                let offset = self.somewhere(dice);
                let page = self.memory[next * self.page_bytes..].as_mut_ptr();
                self.push(offset, page, next as u64);
                next += 1;
            }
            self.ring.submit().unwrap();
            for page in ended {
                look(
                    &self.memory[usize::try_from(page).unwrap() * self.page_bytes..]
                        [..self.page_bytes],
                );
            }
        }
    }

    fn push(&mut self, offset: u64, memory: *mut u8, tag: u64) {
        let length = u32::try_from(self.page_bytes).unwrap();
        let file = types::Fd(self.file.as_raw_fd());
        let read = opcode::Read::new(file, memory, length).offset(offset);
        // SAFETY: the memory is a `Bare`'s, which looks at it after the read has ended.
        unsafe { self.ring.submission().push(&read.build().user_data(tag)) }.unwrap();
    }

    /// The tags of the reads that have ended.
    fn landed(&mut self) -> impl Iterator<Item = u64> + '_ {
        let length = i32::try_from(self.page_bytes).unwrap();
        self.ring.completion().map(move |entry| {
            assert_eq!(entry.result(), length);
            entry.user_data()
        })
    }

    /// A read by the thread, into the memory of the caller.
    fn ask(&mut self, shared: &Shared, dice: &mut Pcg64) {
        shared.memory.store(self.memory.as_mut_ptr(), SeqCst);
        shared.send(self.somewhere(dice));
        while !shared.is_done.swap(false, SeqCst) {
            std::thread::park();
        }
        look(&self.memory);
    }

    /// The thread: waits for the bell on its ring.
    fn serve(&mut self, shared: &Shared) {
        let mut rung = [0_u8; 8];
        loop {
            let bell = types::Fd(shared.bell.as_raw_fd());
            let wait = opcode::Read::new(bell, rung.as_mut_ptr(), 8);
            // SAFETY: `rung` outlives the read, which has ended after the wait.
            unsafe { self.ring.submission().push(&wait.build()) }.unwrap();
            self.ring.submit_and_wait(1).unwrap();
            assert_eq!(self.ring.completion().next().unwrap().result(), 8);
            match shared.asked.swap(NONE, SeqCst) {
                NONE => {}
                END => return,
                offset => {
                    self.push(offset, shared.memory.load(SeqCst), 0);
                    self.ring.submit_and_wait(1).unwrap();
                    assert_eq!(self.landed().count(), 1);
                    shared.is_done.store(true, SeqCst);
                    shared.caller.unpark();
                }
            }
        }
    }
}

fn look(memory: &[u8]) {
    let mut checksum = PageChecksum::new(
        Fingerprint::from_bytes([1; 16]),
        &PageKey::from_bytes([2; 32]),
    );
    checksum.blocks(memory);
    black_box(checksum.finish());
}

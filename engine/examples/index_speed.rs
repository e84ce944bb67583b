//! How fast and how large the index is with millions of pages; prints one table.
//!
//! `cargo run --release -p larder-engine --example index_speed [PAGES]` (default 10,000,000 pages,
//! 0.7 GB). The targets are the engine's: 2,048 keys within 150 us, 131,072 within 15 ms, 64 bytes
//! a page at any moment of the growth, no step of a writer over 1 ms.

use std::time::{Duration, Instant};

use larder_core::index::{
    Heat, Index, Lease, NamespaceSlot, Parent, Place, Publish, ReadAs, SEGMENT_BLOCKS_MAX,
    SegmentId,
};
use larder_format::{KeyPrefix, PageKey};

const CHAIN_PAGES: u64 = 2048;
const BLOCKS_PER_PAGE: u32 = 16;
const SEGMENTS: usize = 4096;
const NAMESPACE: NamespaceSlot = NamespaceSlot(7);

fn main() {
    let pages = std::env::args()
        .nth(1)
        .and_then(|word| word.parse().ok())
        .unwrap_or(10_000_000);
    let chains = (pages / CHAIN_PAGES).max(64);
    let blocks = chains * CHAIN_PAGES * u64::from(BLOCKS_PER_PAGE);
    let index = Index::new(SEGMENTS, blocks);
    let machine = Machine::read();
    println!(
        "{} pages in chains of {CHAIN_PAGES}; {}",
        chains * CHAIN_PAGES,
        machine.processor
    );
    println!("{:<52}{:>14}{:>14}", "", "median", "worst");
    fill(&index, chains, &machine);
    look_up(&index, chains);
    churn(&index, chains);
    fill_with_leaves();
    age(chains);
}

/// Fills chain by chain, dealt over the segments, and watches RAM.
fn fill(index: &Index, chains: u64, machine: &Machine) {
    let mut times = Vec::new();
    let (mut own_max, mut resident_max, mut pages_then) = (0.0_f64, 0.0_f64, 0);
    for chain in 0..chains {
        for batch in batch_of(chain).chunks(256) {
            times.push(timed(|| index.publish(batch)));
        }
        let pages = (chain + 1) * CHAIN_PAGES;
        if pages >= 200_000 {
            let own = index.ram_bytes() as f64 / pages as f64;
            if own > own_max {
                (own_max, pages_then) = (own, pages);
            }
            if chain % 16 == 0 {
                resident_max = resident_max.max(machine.resident_growth() / pages as f64);
            }
        }
    }
    report("publish 256 pages", times);
    println!(
        "{:<52}{own_max:>12.1} B at {pages_then} pages; resident {resident_max:.1} B; now {:.1} B",
        "RAM a page, the most over the fill",
        index.ram_bytes() as f64 / index.len() as f64
    );
}

fn look_up(index: &Index, chains: u64) {
    let terms = Lease {
        now_ms: 1,
        duration_ms: 1000,
        blocks_per_page: BLOCKS_PER_PAGE,
    };
    let mut order = Scatter(1);
    let mut orphans = Vec::new();
    let mut measure = |label: &str, rounds: usize, call: &mut dyn FnMut(&[PageKey])| {
        let mut times = Vec::new();
        for _ in 0..rounds {
            let keys = keys_of(order.next() % chains);
            times.push(timed(|| call(&keys)));
        }
        report(label, times);
    };
    measure(
        "longest_prefix, 2,048 keys, all stored",
        2000,
        &mut |keys| {
            let found = index.longest_prefix(NAMESPACE, keys, terms, &mut orphans);
            assert_eq!(found, keys.len());
        },
    );
    measure("peek, 2,048 keys, all stored", 1000, &mut |keys| {
        drop(index.peek(NAMESPACE, keys));
    });
    measure("peek, 2,048 keys, none stored", 1000, &mut |keys| {
        drop(index.peek(NamespaceSlot(8), keys));
    });
    measure("pin and unpin, 2,048 keys", 1000, &mut |keys| {
        for found in index
            .pin(NAMESPACE, keys, ReadAs::Use)
            .into_iter()
            .flatten()
        {
            index.unpin(found.place.segment);
        }
    });
    measure("touch, 2,048 keys", 1000, &mut |keys| {
        index.touch(NAMESPACE, keys);
    });
    let mut times = Vec::new();
    for _ in 0..40 {
        let keys: Vec<PageKey> = (0..64)
            .flat_map(|_| keys_of(order.next() % chains))
            .collect();
        times.push(timed(|| {
            let stored = index.contains(NAMESPACE, &keys, terms, &mut Vec::new());
            assert!(stored.iter().all(|stored| *stored));
        }));
    }
    report("contains, 131,072 keys, all stored", times);
}

/// A store at its capacity: each new chain pushes as many pages out.
fn churn(index: &Index, chains: u64) {
    let (mut evictions, mut publishes) = (Vec::new(), Vec::new());
    let rounds = (chains / 2).max(100);
    for chain in chains..chains + rounds {
        for batch in batch_of(chain).chunks(256) {
            for _ in batch {
                evictions.push(timed(|| {
                    index.evict_coldest(u64::MAX, |_, _| false, |_| false)
                }));
            }
            publishes.push(timed(|| index.publish(batch)));
        }
    }
    report("evict_coldest, at capacity", evictions);
    report("publish 256 pages, at capacity", publishes);
    let terms = Lease {
        now_ms: 1,
        duration_ms: 1000,
        blocks_per_page: BLOCKS_PER_PAGE,
    };
    let mut order = Scatter(2);
    let mut times = Vec::new();
    for _ in 0..1000 {
        let keys = keys_of(chains + order.next() % rounds);
        times.push(timed(|| {
            index.longest_prefix(NAMESPACE, &keys, terms, &mut Vec::new())
        }));
    }
    report("longest_prefix, 2,048 keys, after that churn", times);
    println!(
        "{:<52}{:>12.1} B",
        "RAM a page, after that churn",
        index.ram_bytes() as f64 / index.len() as f64
    );
}

/// The most RAM that pages can take: each one a chain by itself.
fn fill_with_leaves() {
    let index = Index::new(SEGMENTS, 1 << 26);
    let mut most = 0.0_f64;
    for chain in 0..2048 {
        let mut batch = batch_of(chain);
        for page in &mut batch {
            page.parent = Parent::Head;
        }
        index.publish(&batch);
        if index.len() > 200_000 {
            most = most.max(index.ram_bytes() as f64 / index.len() as f64);
        }
    }
    println!(
        "{:<52}{most:>12.1} B",
        "RAM a page, the most, when every page is a leaf"
    );
}

/// The one long hold of the lock: lowering all heats.
fn age(chains: u64) {
    let index = Index::with_clock(SEGMENTS, 1 << 28, Heat((1 << 31) - chains as u32 - 1));
    for chain in 0..chains {
        index.publish(&batch_of(chain));
    }
    let keys = keys_of(0);
    index.touch(NAMESPACE, &keys[..1]);
    report(
        "lowering all heats",
        vec![timed(|| index.touch(NAMESPACE, &keys[..1]))],
    );
}

fn batch_of(chain: u64) -> Vec<Publish> {
    (0..CHAIN_PAGES)
        .map(|page| Publish {
            namespace: NAMESPACE,
            key: prefix_of(chain, page),
            parent: match page.checked_sub(1) {
                Some(before) => Parent::Key(prefix_of(chain, before)),
                None => Parent::Head,
            },
            place: Place {
                segment: SegmentId((chain % SEGMENTS as u64) as u32),
                start: (page as u32 * BLOCKS_PER_PAGE) % SEGMENT_BLOCKS_MAX,
                saved: 0,
            },
            proof: page.into(),
            unproven: false,
            told: Default::default(),
        })
        .collect()
}

fn keys_of(chain: u64) -> Vec<PageKey> {
    (0..CHAIN_PAGES).map(|page| key_of(chain, page)).collect()
}

fn prefix_of(chain: u64, page: u64) -> KeyPrefix {
    key_of(chain, page).prefix()
}

/// A key as random as a SHA-256 output, in a fraction of the time.
fn key_of(chain: u64, page: u64) -> PageKey {
    let mut words = Scatter(chain * CHAIN_PAGES + page);
    let mut bytes = [0; 32];
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&words.next().to_le_bytes());
    }
    PageKey::from_bytes(bytes)
}

/// SplitMix64.
struct Scatter(u64);

impl Scatter {
    fn next(&mut self) -> u64 {
        // Streams of neighbouring seeds must not overlap: the seed is spread before its first use.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^= word >> 31;
        self.0 ^= word.rotate_left(17);
        word
    }
}

fn timed<T>(call: impl FnOnce() -> T) -> Duration {
    let start = Instant::now();
    std::hint::black_box(call());
    start.elapsed()
}

fn report(label: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let (Some(worst), Some(median)) = (times.last(), times.get(times.len() / 2)) else {
        return;
    };
    let micros = |time: &Duration| time.as_nanos() as f64 / 1000.0;
    println!(
        "{label:<52}{:>11.1} us{:>11.1} us",
        micros(median),
        micros(worst)
    );
}

/// The kernel's figures for the machine and this process.
struct Machine {
    processor: String,
    resident_at_start: f64,
}

impl Machine {
    fn read() -> Self {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = info.lines().find(|line| line.starts_with("model name"));
        let processor = model
            .and_then(|line| line.split(": ").nth(1))
            .unwrap_or("unknown CPU");
        Self {
            processor: processor.into(),
            resident_at_start: resident(),
        }
    }

    fn resident_growth(&self) -> f64 {
        resident() - self.resident_at_start
    }
}

/// Resident bytes of this process, 0 where the kernel does not report them.
fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok());
    kib.unwrap_or(0.0) * 1024.0
}

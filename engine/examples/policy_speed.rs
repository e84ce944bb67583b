//! The costs of the learned policy beside those of LRU, in two indexes of the same pages; prints
//! one table.
//!
//! `cargo run --release -p larder-engine --example policy_speed [PAGES]` (default 10,000,000 pages,
//! 2 GB). Both indexes are full. In each round both do the same work, in turns first. The times are
//! CPU times.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use larder_core::index::{
    Index, Lease, NamespaceSlot, Parent, Place, Publish, ReadAs, SEGMENT_BLOCKS_MAX, SegmentId,
};
use larder_core::policy::make;
use larder_engine::policy;
use larder_format::{KeyPrefix, PageKey};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;
use rustix::time::{ClockId, clock_gettime};

const CHAIN_PAGES: u64 = 64;
const BLOCKS_PER_PAGE: u32 = 16;
const SEGMENTS: usize = 4096;
const NAMESPACE: NamespaceSlot = NamespaceSlot(7);

/// Evictions measured, and rounds over which they and all others are spread.
const EVICTIONS: u64 = 1_000_000;
const ROUNDS: u64 = 100;

/// New pages in a millisecond of the clock of the indexes.
const PAGES_PER_MS: u64 = 10;

const LABELS: [&str; 4] = ["evict", "put", "lookup", "get"];

/// An index, and how long each kind of call took in each round.
struct Side {
    index: Index,
    times: [Vec<Duration>; LABELS.len()],
}

impl Side {
    fn new(learned: bool, pages: u64) -> Side {
        let index = Index::new(SEGMENTS, pages * u64::from(BLOCKS_PER_PAGE));
        if learned {
            index.choose(make(&policy::learned()));
        }
        Side {
            index,
            times: Default::default(),
        }
    }

    /// Makes room for the pages of some chains, puts them, and looks up and reads others. The time
    /// of each kind of call.
    fn play(
        &self,
        new: &[Vec<Publish>],
        old: &[Vec<PageKey>],
        now_ms: u64,
        full: bool,
    ) -> [Duration; 4] {
        let evict = timed(|| {
            let pages = if full {
                new.len() as u64 * CHAIN_PAGES
            } else {
                0
            };
            for _ in 0..pages {
                let gone = self.index.evict_coldest(now_ms, |_, _| false, |_| false);
                assert!(gone.is_some());
            }
        });
        let put = timed(|| new.iter().for_each(|batch| drop(self.index.publish(batch))));
        let terms = Lease {
            now_ms,
            duration_ms: 0,
            blocks_per_page: BLOCKS_PER_PAGE,
        };
        let mut orphans = Vec::new();
        let lookup = timed(|| {
            for keys in old {
                self.index
                    .longest_prefix(NAMESPACE, keys, terms, &mut orphans);
            }
        });
        let get = timed(|| {
            for keys in old {
                for found in self
                    .index
                    .pin(NAMESPACE, keys, ReadAs::Use)
                    .into_iter()
                    .flatten()
                {
                    self.index.unpin(found.place.segment);
                }
            }
        });
        [evict, put, lookup, get]
    }
}

fn main() {
    let pages = std::env::args().nth(1);
    let pages: u64 = pages.map_or(10_000_000, |word| word.parse().unwrap());
    let chains = pages / CHAIN_PAGES;
    let mut sides = [Side::new(false, pages), Side::new(true, pages)];
    let mut dice = Pcg64::seed_from_u64(1);
    let mut next = 0;
    let mut play = |sides: &mut [Side; 2], count: u64, full: bool, round: Option<u64>| {
        let new: Vec<_> = (next..next + count).map(batch_of).collect();
        // Chains of the newer half, so that both orders have kept most of them.
        let old: Vec<_> = (0..count)
            .map(|_| next.saturating_sub(dice.random_range(1..=chains / 2)))
            .map(|chain| (0..CHAIN_PAGES).map(|page| key_of(chain, page)).collect())
            .collect();
        next += count;
        let now_ms = next * CHAIN_PAGES / PAGES_PER_MS;
        let first = round.unwrap_or(0) as usize % 2;
        for at in [first, 1 - first] {
            let took = sides[at].play(&new, &old, now_ms, full);
            if round.is_some() {
                let times = sides[at].times.iter_mut();
                times.zip(took).for_each(|(times, took)| times.push(took));
            }
        }
    };
    let count = EVICTIONS / CHAIN_PAGES / ROUNDS;
    for _ in 0..chains / count {
        play(&mut sides, count, false, None);
    }
    // The guard begins a trial of the learned order after half a capacity.
    while sides[1].index.order().0 != "learned" {
        play(&mut sides, count, true, None);
    }
    for round in 0..ROUNDS {
        play(&mut sides, count, true, Some(round));
    }
    println!(
        "{} pages; order at the end: {}; {} B of policy a page",
        sides[0].index.len(),
        sides[1].index.order().0,
        sides[1].index.policy_ram_bytes() / sides[1].index.len()
    );
    println!(
        "{:<10}{:>12}{:>12}  ratio of the rounds: median, 5 % to 95 %",
        "ns a page", "LRU", "learned"
    );
    for (at, label) in LABELS.iter().enumerate() {
        let [lru, learned] = [0, 1].map(|side: usize| &sides[side].times[at]);
        let mean = |times: &[Duration]| {
            times.iter().sum::<Duration>().as_nanos() as u64 / (ROUNDS * count * CHAIN_PAGES)
        };
        let pairs = learned.iter().zip(lru);
        let mut ratios: Vec<f64> = pairs
            .map(|(one, other)| one.div_duration_f64(*other))
            .collect();
        ratios.sort_by(f64::total_cmp);
        let [low, median, high] = [5, 50, 95].map(|percent| ratios[ratios.len() * percent / 100]);
        println!(
            "{label:<10}{:>12}{:>12}  {median:.2}, {low:.2} to {high:.2}",
            mean(lru),
            mean(learned)
        );
    }
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

fn prefix_of(chain: u64, page: u64) -> KeyPrefix {
    key_of(chain, page).prefix()
}

/// A key as random as a hash.
fn key_of(chain: u64, page: u64) -> PageKey {
    let mut bytes = [0; 32];
    Pcg64::seed_from_u64(chain * CHAIN_PAGES + page).fill(&mut bytes[..]);
    PageKey::from_bytes(bytes)
}

/// CPU time of this thread: others that want the processor do not count.
fn timed(call: impl FnOnce()) -> Duration {
    let now = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
    let start = now();
    call();
    now() - start
}

//! A request trace through all three tiers with real bytes, under every write and every prefetch policy.
//!
//! A block of the trace is a page of 4 tokens and 8 KiB. Eight requests are under way at once: each asks for a prefetch when it
//! arrives, and runs when it is its turn. Every chunk of every page that a request finds is compared with what its key says it
//! must be. At the end nothing is held, and every page of both pools can be had.
//!
//! Prints, for each pair of policies, where the pages came from, what left, and the seconds it took: of moving bytes and making
//! and comparing them, not of serving.
//!
//! `cargo run --release -p larder-tiers --example trace_tiers -- TRACE DIRECTORY [REQUESTS]`

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, missing_docs)]

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use larder_engine::{CreateOptions, OpenOptions, PageStore, Store, create};
use larder_format::{Namespace, NamespaceFields, PageShape, Rank};
use larder_kernels::{ChunkAt, Device, HostDevice, KvShape, Layout, Ticket, pool_bytes};
use larder_tiers::cache::{HostMemoryOptions, host_memory};
use larder_tiers::config::{PrefetchPolicy, WritePolicy};
use larder_tiers::core::{PrefetchId, PrefetchState, Request};
use larder_tiers::l3::StoreL3;
use larder_tiers::prompt::Scope;
use larder_tiers::{Cache, Config, Parts};

/// Tokens of a page, which stands for a block of the trace.
const PAGE_TOKENS: u32 = 4;
/// Pages of the device pool, and of the host pool.
const L1_PAGES: u32 = 4_000;
const L2_PAGES: u32 = 16_000;
/// Bytes of the store.
const STORE_BYTES: u64 = 1 << 30;
/// Requests under way at once.
const WINDOW: usize = 8;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: trace_tiers TRACE DIRECTORY [REQUESTS]";
    let trace = arguments.next().expect(usage);
    let directory = arguments.next().expect(usage);
    let limit = arguments
        .next()
        .map_or(usize::MAX, |limit| limit.parse().expect(usage));
    let requests: Vec<Vec<u64>> = BufReader::new(File::open(trace).unwrap())
        .lines()
        .take(limit)
        .map(|line| {
            let request: serde_json::Value = serde_json::from_str(&line.unwrap()).unwrap();
            let ids = request["hash_ids"].as_array().unwrap();
            ids.iter().map(|id| id.as_u64().unwrap()).collect()
        })
        .collect();
    println!(
        "write policy, prefetch policy: pages asked for | hit in L1, L2, brought from L3 | left L1, L2 | wrong | seconds"
    );
    for write in WritePolicy::ALL {
        for prefetch in PrefetchPolicy::ALL {
            let store = Path::new(&directory).join("trace-tiers-store");
            let _ = std::fs::remove_file(&store);
            replay(&store, &requests, write, prefetch);
            std::fs::remove_file(&store).unwrap();
        }
    }
}

fn replay(path: &Path, requests: &[Vec<u64>], write: WritePolicy, prefetch: PrefetchPolicy) {
    let options = CreateOptions {
        size: STORE_BYTES,
        segment_size: Some(16 << 20),
        ..CreateOptions::default()
    };
    create(path, &options).unwrap();
    let store: Arc<dyn PageStore> = Arc::new(Store::open(path, OpenOptions::default()).unwrap());
    let mut replay = Replay::new(&store, write, prefetch);
    let started = Instant::now();
    for ids in requests {
        while replay.waiting.len() >= WINDOW {
            replay.serve_next();
        }
        replay.arrive(ids);
    }
    while !replay.waiting.is_empty() {
        replay.serve_next();
    }
    replay.cache.drain().unwrap();
    replay.cache.core().validate([]).unwrap();
    let stats = replay.cache.stats().clone();
    replay.cache.reset().unwrap();
    assert_eq!(
        replay.cache.core().free_pages(),
        (L1_PAGES, L2_PAGES),
        "pages are lost"
    );
    assert_eq!(replay.wrong, 0, "wrong pages");
    println!(
        "{write:?}, {prefetch:?}: {} | {}, {}, {} | {}, {} | {} | {:.1}",
        stats.requested,
        stats.l1_hits,
        stats.l2_hits,
        stats.l3_hits,
        stats.l1_evicted + stats.l1_dropped,
        stats.l2_evicted,
        replay.wrong,
        started.elapsed().as_secs_f64()
    );
    drop(replay);
    store.close().unwrap();
}

/// A request that waits for its turn.
struct Waiting {
    ids: Vec<u64>,
    prefetch: Option<PrefetchId>,
}

struct Replay {
    cache: Cache,
    shape: KvShape,
    waiting: VecDeque<Waiting>,
    wrong: u64,
    scratch: Vec<u8>,
}

impl Replay {
    fn new(store: &Arc<dyn PageStore>, write: WritePolicy, prefetch: PrefetchPolicy) -> Replay {
        let shape = KvShape::mha(2, 4, 64, 2, PAGE_TOKENS).unwrap();
        let mut config = Config::new(
            PAGE_TOKENS,
            u64::from(shape.page_bytes()),
            L1_PAGES,
            L2_PAGES,
        );
        config.write_policy = write;
        config.prefetch.policy = prefetch;
        config.prefetch.threshold_tokens = PAGE_TOKENS;
        config.load_threshold_tokens = PAGE_TOKENS;
        let device = Arc::new(HostDevice::new().unwrap());
        let pages = L2_PAGES + 1;
        let options = HostMemoryOptions {
            store: Some(&**store),
            ..HostMemoryOptions::default()
        };
        let (memory, _) = host_memory(pool_bytes(&shape, pages), &options).unwrap();
        let parts = Parts {
            l1: device.alloc_l1(&shape, L1_PAGES + 1).unwrap(),
            l2: device
                .register(memory, Layout::PageFirstDirect, &shape, pages)
                .unwrap(),
            device,
            l3: Some(Arc::new(
                StoreL3::new(store.clone(), &namespace(&shape)).unwrap(),
            )),
            ranks: None,
        };
        Replay {
            cache: Cache::new(config, parts).unwrap(),
            scratch: vec![0; shape.chunk_bytes() as usize],
            shape,
            waiting: VecDeque::new(),
            wrong: 0,
        }
    }

    fn arrive(&mut self, ids: &[u64]) {
        let mut prompt = self.cache.prompt(&Scope::default(), tokens(ids)).unwrap();
        let prefetch = self.cache.prefetch(&mut prompt).ok();
        self.waiting.push_back(Waiting {
            ids: ids.to_vec(),
            prefetch,
        });
        self.cache.poll().unwrap();
    }

    /// Has the request that waits longest run to its end.
    fn serve_next(&mut self) {
        let Some(Waiting { ids, prefetch }) = self.waiting.pop_front() else {
            return;
        };
        if let Some(id) = prefetch {
            while self.cache.poll_prefetch(id).unwrap() == PrefetchState::Waiting {
                if self.cache.poll().unwrap() == 0 {
                    std::thread::yield_now();
                }
            }
        }
        let prompt = self.cache.prompt(&Scope::default(), tokens(&ids)).unwrap();
        let mut request = self.cache.start(prompt, 0);
        self.cache.load_back(&mut request, usize::MAX);
        let left = request.prompt().words().len() - request.tokens();
        while self.cache.extend(&mut request, left).is_err() {
            // What leaves under write_back is free when its copy has ended.
            self.cache.poll().unwrap();
            std::thread::yield_now();
        }
        self.compare(&request, &ids);
        self.compute(&request, &ids);
        self.cache.finish(request, true, &Ticket::done());
        self.cache.poll().unwrap();
    }

    fn chunks(&self) -> impl Iterator<Item = (u32, u32)> + use<> {
        let (parts, layers) = (self.shape.parts(), self.shape.layers());
        (0..parts).flat_map(move |part| (0..layers).map(move |layer| (part, layer)))
    }

    fn compare(&mut self, request: &Request, ids: &[u64]) {
        let mut found = vec![0; self.scratch.len()];
        for (page, id) in (0..).zip(&ids[..request.pages().0.shared_pages()]) {
            let mut is_right = true;
            for (part, layer) in self.chunks() {
                let at = ChunkAt { part, layer, page };
                self.cache.read_chunk(request, at, &mut found).unwrap();
                fill(&mut self.scratch, *id, part, layer);
                is_right &= found == self.scratch;
            }
            self.wrong += u64::from(!is_right);
        }
    }

    fn compute(&mut self, request: &Request, ids: &[u64]) {
        let shared = request.pages().0.shared_pages();
        for (page, id) in (0..).zip(ids).skip(shared) {
            for (part, layer) in self.chunks() {
                fill(&mut self.scratch, *id, part, layer);
                let at = ChunkAt { part, layer, page };
                self.cache.write_chunk(request, at, &self.scratch).unwrap();
            }
        }
    }
}

/// The tokens of a block: an id stands for a whole prefix, so that its number is enough. One more, which is always computed.
fn tokens(ids: &[u64]) -> impl Iterator<Item = u64> + '_ {
    let of_block = |id: &u64| [*id, *id, *id, *id];
    ids.iter().flat_map(of_block).chain([u64::from(u32::MAX)])
}

/// What belongs into a chunk of a block.
fn fill(chunk: &mut [u8], id: u64, part: u32, layer: u32) {
    let mut word = (id << 8 | u64::from(part << 4 | layer)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for bytes in chunk.chunks_mut(8) {
        word = word
            .wrapping_mul(0xd129_42f1_9e21_5a55)
            .wrapping_add(0x632b_e59b_d9b4_e019);
        bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
    }
}

fn namespace(shape: &KvShape) -> Namespace {
    Namespace::new(NamespaceFields {
        model: "trace".into(),
        weights: String::new(),
        dtype: "bytes".into(),
        layout: Layout::PageFirstDirect.name().into(),
        page_tokens: PAGE_TOKENS,
        shape: PageShape::new(&vec![shape.part_bytes(); shape.parts() as usize]).unwrap(),
        tp: Rank::ALONE,
        pp: Rank::ALONE,
        cp: Rank::ALONE,
        pool: String::new(),
        extra: BTreeMap::new(),
    })
    .unwrap()
}

//! Speed of copies between L1 and L2 on the host device, compared with memcpy of the same bytes in
//! the same run.
//!
//! Every round copies the same number of bytes in four ways, in turn: memcpy on this thread in one
//! piece; memcpy in scattered pieces of the contiguous size of the layouts; a load; a store. The
//! ways alternate because the load of a shared machine varies. The result is the median over the
//! rounds of the ratio to memcpy in pieces. Needs about 2 GiB of memory.
//!
//! `cargo run --release -p larder-kernels --example copy_speed [ROUNDS]`

#![allow(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    missing_docs
)]

use std::time::Instant;

use larder_kernels::{
    Device, Direction, HostDevice, HostMemory, KvShape, L1Pool, L2Pool, Layout, PagePair, Ticket,
    Transfer, pool_bytes,
};
use rand::SeedableRng;
use rand::seq::SliceRandom;

/// Approximate bytes of each pool. A transfer moves half of them.
const POOL_BYTES: u64 = 512 << 20;

struct Bench {
    device: HostDevice,
    l1: L1Pool,
    l2: L2Pool,
    pairs: Vec<PagePair>,
    memcpy: Memcpy,
}

/// The same number of bytes, copied by memcpy only.
struct Memcpy {
    from: Vec<u8>,
    to: Vec<u8>,
    piece: usize,
    /// Offsets of the pieces on both sides.
    pieces: Vec<(usize, usize)>,
}

fn main() {
    let rounds = std::env::args()
        .nth(1)
        .map_or(9, |rounds| rounds.parse().unwrap());
    println!(
        "medians of {rounds} rounds; GB/s of memcpy in one piece, in pieces, of loads and stores; \
         the latter two over pieces"
    );
    let shapes = [
        ("Llama-3.1-8B,   64 tokens", KvShape::mha(32, 8, 128, 2, 64)),
        ("70B, 8 ranks,   64 tokens", KvShape::mha(80, 1, 128, 2, 64)),
        ("DeepSeek-V3,    64 tokens", KvShape::mla(61, 576, 2, 64)),
        ("Llama-3.1-8B,   16 tokens", KvShape::mha(32, 8, 128, 2, 16)),
        ("Llama-3.1-8B,    1 token ", KvShape::mha(32, 8, 128, 2, 1)),
    ];
    for (name, shape) in shapes {
        for layout in Layout::ALL {
            Bench::new(&shape.unwrap(), layout).run(&format!("{name}  {layout:18}"), rounds);
        }
    }
}

impl Bench {
    fn new(shape: &KvShape, layout: Layout) -> Bench {
        let device = HostDevice::new().unwrap();
        let pages = (POOL_BYTES / u64::from(shape.page_bytes())) as u32;
        let bytes = pool_bytes(shape, pages);
        let memory = HostMemory::zeroed(bytes).unwrap();
        let l2 = device.register(memory, layout, shape, pages).unwrap();
        let l1 = device.alloc_l1(shape, pages).unwrap();
        let mut random = rand_pcg::Pcg64Mcg::seed_from_u64(1);
        let every: Vec<u32> = (0..pages).collect();
        let [mut from, mut to] = [every.clone(), every];
        from.shuffle(&mut random);
        to.shuffle(&mut random);
        let pairs: Vec<PagePair> = std::iter::zip(from, to)
            .take(pages as usize / 2)
            .map(|(l1, l2)| PagePair { l1, l2 })
            .collect();
        // The contiguous size on both sides: a chunk, or one row of it if the host layout
        // interleaves layers.
        let piece = match layout {
            Layout::PageFirst => shape.row_bytes(),
            Layout::LayerFirst | Layout::PageFirstDirect => shape.chunk_bytes(),
            Layout::PageHead => shape.head_bytes(),
        };
        let moved = pairs.len() as u64 * u64::from(shape.page_bytes());
        Bench {
            memcpy: Memcpy::new(&mut random, bytes as usize, piece as usize, moved as usize),
            device,
            l1,
            l2,
            pairs,
        }
    }

    fn run(&mut self, name: &str, rounds: usize) {
        let bytes = (self.memcpy.pieces.len() * self.memcpy.piece) as f64;
        let mut seconds: [Vec<f64>; 4] = Default::default();
        // The warm-up round touches all memory for the first time.
        for round in 0..=rounds {
            let round_seconds = [
                self.memcpy.whole_seconds(),
                self.memcpy.seconds(),
                self.seconds(Direction::Load),
                self.seconds(Direction::Store),
            ];
            if round > 0 {
                for (all, one) in seconds.iter_mut().zip(round_seconds) {
                    all.push(one);
                }
            }
        }
        let [whole, memcpy, load, store] = &seconds;
        let ratio =
            |other: &[f64]| median(std::iter::zip(memcpy, other).map(|(a, b)| a / b).collect());
        let rate = |all: &[f64]| bytes / median(all.to_vec()) / 1e9;
        println!(
            "{name} {:6.2} {:6.2} {:6.2} {:6.2}   load {:.2}  store {:.2}",
            rate(whole),
            rate(memcpy),
            rate(load),
            rate(store),
            ratio(load),
            ratio(store)
        );
    }

    fn seconds(&self, direction: Direction) -> f64 {
        // SAFETY: no other code touches the pools.
        let transfer = unsafe { Transfer::new(&self.l1, &self.l2, self.pairs.clone()) }.unwrap();
        let started = Instant::now();
        let moving = match direction {
            Direction::Load => self.device.load(transfer, &Ticket::done()),
            Direction::Store => self.device.store(transfer, &Ticket::done()),
        };
        moving.unwrap().wait().1.unwrap();
        started.elapsed().as_secs_f64()
    }
}

impl Memcpy {
    fn new(random: &mut rand_pcg::Pcg64Mcg, bytes: usize, piece: usize, moved: usize) -> Memcpy {
        let every: Vec<usize> = (0..bytes / piece).map(|index| index * piece).collect();
        let [mut from, mut to] = [every.clone(), every];
        from.shuffle(random);
        to.shuffle(random);
        Memcpy {
            from: vec![1; bytes],
            to: vec![0; bytes],
            piece,
            pieces: std::iter::zip(from, to).take(moved / piece).collect(),
        }
    }

    fn whole_seconds(&mut self) -> f64 {
        let bytes = self.pieces.len() * self.piece;
        let started = Instant::now();
        self.to[..bytes].copy_from_slice(&self.from[..bytes]);
        std::hint::black_box(&mut self.to);
        started.elapsed().as_secs_f64()
    }

    fn seconds(&mut self) -> f64 {
        let started = Instant::now();
        for &(from, to) in &self.pieces {
            self.to[to..to + self.piece].copy_from_slice(&self.from[from..from + self.piece]);
        }
        std::hint::black_box(&mut self.to);
        started.elapsed().as_secs_f64()
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

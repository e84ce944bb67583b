//! Speed of loads and stores on this machine's GPU, by copy engine and by kernel, compared with the
//! maximum of the link in the same run.
//!
//! For each shape and way, alternating with one large copy in each direction (the maximum): GB/s of
//! loads and stores of random pages, the share of the maximum, the CPU time to submit a layer, and
//! whether every byte was copied correctly. Medians. Needs 6 GiB on both sides.
//!
//! `cargo run --release -p larder-kernels --example device_speed [ROUNDS]`
//!
//! With `--answer` it executes requests from standard input line by line, so that a script can
//! alternate it with other programs (`scripts/gpu-peers`). The reply to
//! `pools PARTS LAYERS ROW_BYTES TOKENS PAGES` is `ready`. The reply to `ceiling`, `load`, `store`
//! and `copies` (loads with one plain copy per chunk) is GB/s and the CPU microseconds per layer.
//!
//! Exit code 1: wrong bytes. Exit code 3: no GPU; the detection time is printed.

#![allow(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    missing_docs
)]

use std::io::{BufRead, Write};
use std::process::ExitCode;
use std::time::Instant;

use larder_kernels::cuda::Choice;
use larder_kernels::cuda::policy::Way;
use larder_kernels::{
    Attention, CudaDevice, CudaOptions, Device, Direction, HostMemory, KvShape, L1Pool, L2Pool,
    Layout, PagePair, Ticket, Transfer, pool_bytes,
};
use rand::SeedableRng;
use rand::seq::SliceRandom;

/// Approximate bytes of a pool.
const POOL_BYTES: u64 = 1 << 30;

/// Pages per transfer.
const PAGES: [usize; 2] = [16, 256];

fn main() -> ExitCode {
    let argument = std::env::args().nth(1);
    if argument.as_deref() == Some("--answer") {
        return answer();
    }
    let rounds = argument.map_or(7, |rounds| rounds.parse().unwrap());
    let started = Instant::now();
    let options = CudaOptions {
        choice: Choice::Always(Way::Copies),
        ..CudaOptions::default()
    };
    let opened = CudaDevice::open(&options);
    println!("detection: {:.2} ms", started.elapsed().as_secs_f64() * 1e3);
    let engine = match opened {
        Ok(device) => device,
        Err(error) => {
            println!("{error}");
            return ExitCode::from(3);
        }
    };
    println!("{}; medians of {rounds} rounds", engine.name());
    let shapes = [
        (
            "Llama-3.1-8B   64 tokens 128 KiB",
            KvShape::mha(32, 8, 128, 2, 64),
        ),
        (
            "DeepSeek-V3    64 tokens  72 KiB",
            KvShape::mla(61, 576, 2, 64),
        ),
        (
            "Llama-3.1-8B   16 tokens  32 KiB",
            KvShape::mha(32, 8, 128, 2, 16),
        ),
        (
            "70B, 8 ranks   64 tokens  16 KiB",
            KvShape::mha(80, 1, 128, 2, 64),
        ),
    ];
    let mut right = true;
    for (name, shape) in shapes {
        for choice in [
            Choice::Always(Way::Copies),
            Choice::Always(Way::Batch),
            Choice::Always(Way::Kernel),
            Choice::Measured,
        ] {
            let options = CudaOptions {
                choice,
                ..CudaOptions::default()
            };
            let device = CudaDevice::open(&options).unwrap();
            let bench = Bench::new(&device, &engine, &shape.unwrap());
            for pages in PAGES {
                right &= bench.run(&format!("{name}  {choice:?}"), pages, rounds);
            }
        }
    }
    ExitCode::from(u8::from(!right))
}

/// The pools used in `--answer` mode.
struct Beside<'a> {
    bench: Bench<'a>,
    pages: usize,
}

fn answer() -> ExitCode {
    let open = |choice| {
        CudaDevice::open(&CudaOptions {
            choice,
            ..CudaOptions::default()
        })
    };
    let (device, engine) = match (open(Choice::Measured), open(Choice::Always(Way::Copies))) {
        (Ok(device), Ok(engine)) => (device, engine),
        (Err(error), _) | (_, Err(error)) => {
            eprintln!("{error}");
            return ExitCode::from(3);
        }
    };
    let mut beside: Option<Beside<'_>> = None;
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        match (words.as_slice(), &beside) {
            (["pools", numbers @ ..], _) => {
                let numbers: Vec<u32> = numbers.iter().map(|word| word.parse().unwrap()).collect();
                let [parts, layers, row_bytes, tokens, pages] = numbers[..] else {
                    panic!("{line}");
                };
                let attention = [Attention::Mla, Attention::Mha][parts as usize - 1];
                let shape = KvShape::of_rows(attention, layers, row_bytes, tokens).unwrap();
                // Free the old pools first.
                drop(beside.take());
                beside = Some(Beside {
                    bench: Bench::new(&device, &engine, &shape),
                    pages: pages as usize,
                });
                println!("ready");
            }
            ([what], Some(beside)) => {
                let (rate, cpu) = beside.measure(what);
                println!("{rate} {cpu}");
            }
            _ => panic!("no answer to: {line}"),
        }
        std::io::stdout().flush().unwrap();
    }
    ExitCode::SUCCESS
}

impl Beside<'_> {
    fn measure(&self, what: &str) -> (f64, f64) {
        let bench = &self.bench;
        let pools = (bench.l1.clone(), bench.l2.clone());
        let pairs = bench.pairs(self.pages);
        match what {
            "load" => rate(bench.device, Direction::Load, &pools, pairs),
            "store" => rate(bench.device, Direction::Store, &pools, pairs),
            "ceiling" => {
                let one = vec![PagePair { l1: 0, l2: 0 }];
                rate(bench.engine, Direction::Load, &bench.one, one)
            }
            "copies" => rate(bench.engine, Direction::Load, &bench.plain, pairs),
            _ => panic!("no answer to: {what}"),
        }
    }
}

struct Bench<'a> {
    device: &'a CudaDevice,
    l1: L1Pool,
    l2: L2Pool,
    /// For one page as large as the pools, by copy engine: the maximum of the link.
    engine: &'a CudaDevice,
    one: (L1Pool, L2Pool),
    /// For the same pages by plain copies.
    plain: (L1Pool, L2Pool),
}

impl Bench<'_> {
    fn new<'a>(device: &'a CudaDevice, engine: &'a CudaDevice, shape: &KvShape) -> Bench<'a> {
        let pages = (POOL_BYTES / u64::from(shape.page_bytes())) as u32;
        let (l1, l2) = pools(device, shape, pages);
        let row = (POOL_BYTES / 2) as u32;
        let one = KvShape::of_rows(Attention::Mla, 1, row, 1).unwrap();
        Bench {
            device,
            l1,
            l2,
            engine,
            one: pools(engine, &one, 1),
            plain: pools(engine, shape, pages),
        }
    }

    /// `pages` pairs of random pages, from the first half of L2.
    fn pairs(&self, pages: usize) -> Vec<PagePair> {
        let mut random = rand_pcg::Pcg64Mcg::seed_from_u64(1);
        let mut l1: Vec<u32> = (0..self.l1.pages()).collect();
        let mut l2: Vec<u32> = (0..self.l2.pages() / 2).collect();
        l1.shuffle(&mut random);
        l2.shuffle(&mut random);
        let pairs = std::iter::zip(l1, l2).take(pages);
        pairs.map(|(l1, l2)| PagePair { l1, l2 }).collect()
    }

    /// Prints one line. Returns whether all bytes were copied correctly.
    fn run(&self, name: &str, pages: usize, rounds: usize) -> bool {
        let half = self.l2.pages() / 2;
        let pages = pages.min(half as usize);
        let first = self.pairs(pages);
        let pairs = |offset: u32| -> Vec<PagePair> {
            let moved = first.iter().map(|pair| PagePair {
                l1: pair.l1,
                l2: pair.l2 + offset,
            });
            moved.collect()
        };
        let one = vec![PagePair { l1: 0, l2: 0 }];
        let (mut load, mut store, mut submit) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..=rounds {
            let up = rate(self.engine, Direction::Load, &self.one, one.clone()).0;
            let down = rate(self.engine, Direction::Store, &self.one, one.clone()).0;
            let pools = (self.l1.clone(), self.l2.clone());
            let (loaded, cpu) = rate(self.device, Direction::Load, &pools, pairs(0));
            // Store to other pages, so that the bytes can be compared.
            let (stored, _) = rate(self.device, Direction::Store, &pools, pairs(half));
            if round > 0 {
                load.push((loaded, loaded / up));
                store.push((stored, stored / down));
                submit.push((cpu, 0.0));
            }
        }
        let right = pairs(0)
            .iter()
            .all(|pair| self.same(pair.l2, pair.l2 + half));
        let ((load, of_up), (store, of_down)) = (median(load), median(store));
        println!(
            "{name} {pages:4} pages  load {load:6.2} GB/s {:4.0} %  store {store:6.2} GB/s \
             {:4.0} %  {:6.2} us a layer  {}",
            of_up * 100.0,
            of_down * 100.0,
            median(submit).0,
            if right { "right" } else { "WRONG" }
        );
        right
    }

    fn same(&self, one: u32, other: u32) -> bool {
        let bytes = |page| -> Vec<&[u8]> {
            let runs = self.l2.page_runs(page).unwrap();
            // SAFETY: runs of this pool, and nothing is in flight.
            runs.map(|(start, bytes)| unsafe {
                std::slice::from_raw_parts(start.as_ptr(), bytes as usize)
            })
            .collect()
        };
        bytes(one) == bytes(other)
    }
}

/// GB/s of one transfer, and CPU microseconds per layer.
fn rate(
    device: &CudaDevice,
    direction: Direction,
    pools: &(L1Pool, L2Pool),
    pairs: Vec<PagePair>,
) -> (f64, f64) {
    // SAFETY: no other code touches the pools.
    let transfer = unsafe { Transfer::new(&pools.0, &pools.1, pairs) }.unwrap();
    let bytes = transfer.bytes() as f64;
    let layers = f64::from(pools.0.shape().layers());
    let started = Instant::now();
    let moving = match direction {
        Direction::Load => device.load(transfer, &Ticket::done()),
        Direction::Store => device.store(transfer, &Ticket::done()),
    };
    let submitted = started.elapsed().as_secs_f64();
    moving.unwrap().wait().1.unwrap();
    (
        bytes / started.elapsed().as_secs_f64() / 1e9,
        submitted * 1e6 / layers,
    )
}

fn pools(device: &CudaDevice, shape: &KvShape, pages: u32) -> (L1Pool, L2Pool) {
    let bytes = pool_bytes(shape, pages);
    let memory = HostMemory::zeroed(bytes).unwrap();
    let l2 = device
        .register(memory, Layout::PageFirstDirect, shape, pages)
        .unwrap();
    // Every word differs, so that a misplaced page is detected.
    for (word, number) in (0..bytes / 8).zip(1u64..) {
        let at = l2
            .start()
            .as_ptr()
            .cast::<u64>()
            .wrapping_add(word as usize);
        // SAFETY: inside the pool, aligned, and nothing is in flight.
        unsafe { at.write(number.wrapping_mul(0x9e37_79b9_7f4a_7c15)) };
    }
    (device.alloc_l1(shape, pages).unwrap(), l2)
}

fn median(mut values: Vec<(f64, f64)>) -> (f64, f64) {
    values.sort_by(|one, other| one.0.total_cmp(&other.0));
    values[values.len() / 2]
}

//! What a GPU does beside loads: TTFT with L2 hits, layer by layer, and by how much loads slow compute down. All by the device's clock.
//!
//! First a stand-in for the forward that waits for each layer's ticket, a half, once and twice as long a layer as its load: both
//! together may take as long as the longer of the two alone, one layer of it, 10 us a layer and 1 %. Of compute that uses the whole device
//! (`Busy`) 5 % more, since that is what loads may cost it. With the timeline of one run: `-` a layer is loaded, `#` it is computed.
//!
//! Then compute on its own and while loads go on all of its time, for each way that loads can go: at most 5 % slower. `Busy` computes in
//! every processor's caches, `Streaming` reads the device's memory.
//!
//! `cargo run --release -p larder-kernels --example timeline [ROUNDS]`; with `--find` it only says which device there is, with
//! `--host [ROUNDS]` it shows the first of both on the host device instead, by the CPU's clock: there a thread stands in for the
//! forward, which takes its time and nothing else, on a core of its own.
//!
//! Medians. Ends with 1 where anything takes longer than it may, with 3 where there is no GPU. Needs 2 GiB on both sides.

#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    missing_docs
)]

#[path = "../tests/support/compute.rs"]
mod compute;
#[path = "../tests/support/timeline.rs"]
mod timeline;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use larder_kernels::cuda::Choice;
use larder_kernels::cuda::policy::Way;
use larder_kernels::{
    CudaDevice, CudaOptions, Device, HostDevice, HostMemory, KvShape, L1Pool, L2Pool, Layout,
    PagePair, Ticket, Transfer, pool_bytes,
};
use timeline::{Figures, Kind, Layer, SLOWER, Stage, Waits};

/// Bytes of a pool, about: a transfer moves all of it.
const POOL_BYTES: u64 = 1 << 30;

/// What streaming compute reads at a time.
const LARGE_BYTES: u32 = 1 << 29;

/// Milliseconds of compute beside loads.
const BESIDE_MS: f64 = 50.0;

/// Rows of a timeline at most: of more layers every other one is shown, or fewer.
const ROWS: usize = 32;

/// Columns of it.
const COLUMNS: usize = 64;

fn main() -> ExitCode {
    let argument = std::env::args().nth(1);
    let rounds_of = |rounds: Option<String>| rounds.map_or(7, |rounds| rounds.parse().unwrap());
    if argument.as_deref() == Some("--host") {
        return ExitCode::from(u8::from(!on_host(rounds_of(std::env::args().nth(2)))));
    }
    let name = match open(Choice::Published) {
        Ok(device) => device.name(),
        Err(error) => {
            println!("{error}");
            return ExitCode::from(3);
        }
    };
    if argument.as_deref() == Some("--find") {
        println!("{name}");
        return ExitCode::SUCCESS;
    }
    let rounds = rounds_of(argument);
    println!("{name}; medians of {rounds} rounds");
    let shapes = shapes();
    let mut good = true;
    for (name, shape) in &shapes {
        let device = open(Choice::Measured).unwrap();
        let stage = stage(&device, shape, false);
        good &= first_token(name, &stage, rounds);
    }
    for (name, shape) in &shapes {
        for way in [Way::Kernel, Way::Copies, Way::Batch] {
            let device = open(Choice::Always(way)).unwrap();
            // Neighbours are what single copies are for.
            let stage = stage(&device, shape, way == Way::Copies);
            good &= beside(&format!("{name}  {way:?}"), &stage, rounds);
        }
    }
    ExitCode::from(u8::from(!good))
}

fn shapes() -> [(&'static str, KvShape); 3] {
    [
        (
            "Llama-3.1-8B   64 tokens 128 KiB",
            KvShape::mha(32, 8, 128, 2, 64),
        ),
        (
            "DeepSeek-V3    64 tokens  72 KiB",
            KvShape::mla(61, 576, 2, 64),
        ),
        (
            "70B, 8 ranks   64 tokens  16 KiB",
            KvShape::mha(80, 1, 128, 2, 64),
        ),
    ]
    .map(|(name, shape)| (name, shape.unwrap()))
}

fn open(choice: Choice) -> Result<CudaDevice, larder_kernels::DeviceError> {
    CudaDevice::open(&CudaOptions {
        choice,
        ..CudaOptions::default()
    })
}

fn stage<'a>(device: &'a CudaDevice, shape: &KvShape, neighbours: bool) -> Stage<'a> {
    let pages = (POOL_BYTES / u64::from(shape.page_bytes())) as u32;
    let pairs = (0..pages).map(|page| PagePair {
        l1: if neighbours { page } else { pages - 1 - page },
        l2: page,
    });
    Stage::new(
        device,
        pools(device, shape, pages),
        pairs.collect(),
        LARGE_BYTES,
    )
}

fn pools(device: &impl Device, shape: &KvShape, pages: u32) -> (L1Pool, L2Pool) {
    let memory = HostMemory::zeroed(pool_bytes(shape, pages)).unwrap();
    // Memory that was never written is one page of zeros, which copies faster than any other.
    let l2 = device
        .register(memory, Layout::PageFirstDirect, shape, pages)
        .unwrap();
    // SAFETY: the pool has that many bytes, and nothing is in flight.
    unsafe {
        l2.start()
            .write_bytes(0x5a, pool_bytes(shape, pages) as usize);
    };
    (device.alloc_l1(shape, pages).unwrap(), l2)
}

/// TTFT of compute as long as a half, once and twice its load. Whether it was what it may be.
fn first_token(name: &str, stage: &Stage<'_>, rounds: usize) -> bool {
    let load_ms = stage.load_ms();
    let rate = stage.bytes() as f64 / load_ms / 1e6;
    println!("\n{name}  load {load_ms:.2} ms, {rate:.1} GB/s");
    let mut good = true;
    for kind in [Kind::Idle, Kind::Busy] {
        for share in [0.5, 1.0, 2.0] {
            let work = stage.work_of(kind, load_ms * share / f64::from(stage.layers()));
            let run = |_| stage.figures(work, Waits::ByLayer);
            good &= judge(kind, share, (0..rounds).map(run).collect());
        }
    }
    good
}

/// Prints the median of these runs, of compute as long as this share of the load. Whether it was what it may be.
fn judge(kind: Kind, share: f64, mut runs: Vec<Figures>) -> bool {
    let in_order = runs.iter().all(Figures::is_in_order);
    runs.sort_by(|one, other| share_of_bound(one, kind).total_cmp(&share_of_bound(other, kind)));
    let run = &runs[runs.len() / 2];
    let is_good = in_order && run.is_good(kind);
    println!(
        "  {:9} x {share:3}  load {:7.2} ms  compute {:7.2} ms  together {:7.2} ms  may take {:7.2} ms  ratio {:.3}  {}",
        format!("{kind:?}"),
        run.load_ms,
        run.compute_ms,
        run.together_ms,
        run.bound_ms(kind),
        share_of_bound(run, kind),
        if is_good {
            "good"
        } else if in_order {
            "TOO LONG"
        } else {
            "OUT OF ORDER"
        },
    );
    if kind == Kind::Busy && share == 1.0 {
        print_layers(run);
    }
    is_good
}

/// TTFT on the host device. Whether it was what it may be.
fn on_host(rounds: usize) -> bool {
    let device = HostDevice::new().unwrap();
    println!("{}; medians of {rounds} rounds", device.name());
    let mut good = true;
    for (name, shape) in shapes() {
        let pages = (POOL_BYTES / u64::from(shape.page_bytes())) as u32;
        let (l1, l2) = pools(&device, &shape, pages);
        let pairs: Vec<PagePair> = (0..pages)
            .map(|page| PagePair {
                l1: pages - 1 - page,
                l2: page,
            })
            .collect();
        let load = || {
            // SAFETY: nobody looks at what these pages hold.
            let transfer = unsafe { Transfer::new(&l1, &l2, pairs.clone()) }.unwrap();
            device.load(transfer, &Ticket::done()).unwrap()
        };
        let load_ms = || {
            let start = Instant::now();
            load().wait().1.unwrap();
            ms_since(start)
        };
        // The first touches every page of L1.
        load_ms();
        let usual_ms = load_ms();
        println!("\n{name}  load {usual_ms:.2} ms");
        for share in [0.5, 1.0, 2.0] {
            let layer = Duration::from_secs_f64(usual_ms * share / 1e3 / f64::from(shape.layers()));
            let run = |_| {
                let load_ms = load_ms();
                let start = Instant::now();
                (0..shape.layers()).for_each(|_| take_time(layer));
                let compute_ms = ms_since(start);
                let start = Instant::now();
                let loading = load();
                let layers: Vec<Layer> = (0..shape.layers())
                    .map(|number| {
                        loading.wait_layer(number).unwrap();
                        let begun = ms_since(start);
                        take_time(layer);
                        Layer {
                            loaded: begun,
                            begun,
                            computed: ms_since(start),
                        }
                    })
                    .collect();
                loading.wait().1.unwrap();
                Figures {
                    load_ms,
                    compute_ms,
                    together_ms: layers.last().map_or(0.0, |layer| layer.computed),
                    layers,
                }
            };
            good &= judge(Kind::Idle, share, (0..rounds).map(run).collect());
        }
    }
    good
}

fn take_time(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

fn ms_since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

fn share_of_bound(figures: &Figures, kind: Kind) -> f64 {
    figures.together_ms / figures.bound_ms(kind)
}

/// One line a layer: when it was loaded, and when it was computed.
fn print_layers(run: &Figures) {
    let column = |ms: f64| ((ms / run.together_ms * COLUMNS as f64) as usize).min(COLUMNS);
    let before = std::iter::once(0.0).chain(run.layers.iter().map(|layer| layer.loaded));
    let rows = before.zip(&run.layers).enumerate();
    for (number, (before, layer)) in rows.step_by(run.layers.len().div_ceil(ROWS)) {
        let mut bar = vec![b' '; COLUMNS + 1];
        bar[column(before)..=column(layer.loaded)].fill(b'-');
        bar[column(layer.begun)..=column(layer.computed)].fill(b'#');
        println!(
            "    layer {number:3}  loaded {before:7.2} to {:7.2}  computed {:7.2} to {:7.2}  |{}|",
            layer.loaded,
            layer.begun,
            layer.computed,
            String::from_utf8_lossy(&bar)
        );
    }
}

/// Compute on its own and beside loads that go one way. Whether it was slowed down no more than it may.
fn beside(name: &str, stage: &Stage<'_>, rounds: usize) -> bool {
    let mut good = true;
    for kind in [Kind::Busy, Kind::Streaming] {
        let work = stage.work_of(kind, BESIDE_MS / 10.0);
        let mut runs: Vec<_> = (0..rounds).map(|_| stage.beside(work, 10)).collect();
        runs.sort_by(|one, other| one.slower().total_cmp(&other.slower()));
        let run = runs[runs.len() / 2];
        let is_good = run.slower() <= SLOWER;
        good &= is_good;
        println!(
            "{name}  {:9}  alone {:7.2} ms  beside loads {:7.2} ms  {:+6.2} %  loads {:6.2} GB/s  {}",
            format!("{kind:?}"),
            run.alone_ms,
            run.beside_ms,
            run.slower() * 100.0,
            stage.bytes() as f64 / run.load_ms / 1e6,
            if is_good { "good" } else { "SLOWED DOWN" },
        );
    }
    good
}

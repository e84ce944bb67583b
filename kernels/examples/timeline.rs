//! Interference between loads and compute on a GPU: the TTFT with L2 hits, layer by layer, and the
//! slowdown of compute by loads. All times come from the device's clock.
//!
//! The first part uses a stand-in for the forward pass that waits for each layer's ticket. Its
//! layers take half, once and twice the time of their load. Limit for both together: the longer of
//! the two alone, one of its layers, 30 us per layer and 1 %. For compute that uses the whole
//! device (`Busy`) the limit is 5 % higher, the allowed slowdown by loads. The timeline of one run
//! is printed: `-` a layer is loaded, `#` it is computed.
//!
//! The second part measures compute alone and during continuous loads, for each way of loading.
//! Limit: 5 % slower. `Busy` computes in every processor's caches, `Streaming` reads the device's
//! memory.
//!
//! `cargo run --release -p larder-kernels --example timeline [ROUNDS]`. With `--find` it only
//! prints the device. With `--host [ROUNDS]` it runs the first part on the host device, by the
//! CPU's clock; a thread on its own core, which only spends time, is the stand-in for the forward
//! pass.
//!
//! Medians. Exit code 1: a limit was exceeded. Exit code 3: no GPU. Needs 2 GiB on both sides.

#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    missing_docs
)]

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

/// Approximate bytes of a pool. A transfer moves all of it.
const POOL_BYTES: u64 = 1 << 30;

/// Bytes that streaming compute reads per pass.
const LARGE_BYTES: u32 = 1 << 29;

/// Milliseconds of compute during loads.
const BESIDE_MS: f64 = 50.0;

/// Maximum rows of a timeline. With more layers, only every n-th layer is shown.
const ROWS: usize = 32;

/// Columns of a timeline.
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
            // Single copies are meant for neighbours.
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
    // Memory that was never written maps to one page of zeros, which copies faster than real data.
    let l2 = device
        .register(memory, Layout::PageFirstDirect, shape, pages)
        .unwrap();
    // SAFETY: the pool has this size, and nothing is in flight.
    unsafe {
        l2.start()
            .write_bytes(0x5a, pool_bytes(shape, pages) as usize);
    };
    (device.alloc_l1(shape, pages).unwrap(), l2)
}

/// TTFT of compute that takes half, once and twice the time of its load. Returns whether the limits
/// held.
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

/// Prints the median of these runs, with compute of this share of the load time. Returns whether
/// the limits held.
fn judge(kind: Kind, share: f64, mut runs: Vec<Figures>) -> bool {
    let in_order = runs.iter().all(Figures::is_in_order);
    runs.sort_by(|one, other| share_of_bound(one, kind).total_cmp(&share_of_bound(other, kind)));
    let run = &runs[runs.len() / 2];
    let is_good = in_order && run.is_good(kind);
    println!(
        "  {:9} x {share:3}  load {:7.2} ms  compute {:7.2} ms  together {:7.2} ms  \
         limit {:7.2} ms  ratio {:.3}  {}",
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

/// TTFT on the host device. Returns whether the limits held.
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
            // SAFETY: no code reads these pages.
            let transfer = unsafe { Transfer::new(&l1, &l2, pairs.clone()) }.unwrap();
            device.load(transfer, &Ticket::done()).unwrap()
        };
        let load_ms = || {
            let start = Instant::now();
            load().wait().1.unwrap();
            ms_since(start)
        };
        // The first load touches every page of L1.
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

/// Prints one line per layer: its load time and its compute time.
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

/// Compute alone and during loads by one way. Returns whether the slowdown is within the limit.
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
            "{name}  {:9}  alone {:7.2} ms  during loads {:7.2} ms  {:+6.2} %  \
             loads {:6.2} GB/s  {}",
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

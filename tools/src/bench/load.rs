//! `larder bench --op load`: the speed of pages on their way up, tier by tier: L3 to L2 by
//! prefetch, L2 to L1 by load, with every byte checked at its destination.
//!
//! The pages come through the tiers as in serving. Chains of `--batch` pages are prefetched into an
//! L2 that is empty otherwise, and then loaded into an empty L1. L1 is memory of the host, or with
//! `--cuda` of a GPU. Pages missing in the store are computed and backed up first, which is not
//! measured. Runs with the same seed use the same pages.

use std::path::PathBuf;
use std::sync::Arc;
use std::task::Wake;
use std::thread::{self, Thread};
use std::time::Duration;

use indicatif::ProgressBar;
use larder_engine::{PageStore, Store};
use larder_kernels::{Attention, ChunkAt, Device, KvShape, Layout, Ticket, pool_bytes};
use larder_tiers::cache::{HostMemoryOptions, host_memory};
use larder_tiers::config::PrefetchPolicy;
use larder_tiers::core::{LoadBack, PrefetchState, Request};
use larder_tiers::l3::StoreL3;
use larder_tiers::prompt::{Prompt, Scope};
use larder_tiers::{Cache, Config, Parts};
use serde::Serialize;

use super::{BenchArgs, Counts, PAGE_BYTES, PAGE_TOKENS, check_room, holds_others, spare_others};
use crate::disk::DiskFacts;
use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::l1;
use crate::open::patient;
use crate::report::{self, Lines, Report, rows};
use crate::size::ByteSize;
use crate::usage::{self, Meter};
use crate::workload::{self, Words};

/// Prefix of the models in the namespaces of load measurements.
pub(super) const NAMESPACE: &str = "bench-load of ";

/// Layers of a page, which load copies one by one.
const LAYERS: u32 = 32;

/// The longest wait between two polls of a prefetch, which may also end by its time limit.
const POLL: Duration = Duration::from_millis(1);

/// The result of a measurement.
#[derive(Serialize)]
struct LoadReport {
    /// The store: its first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// `load`.
    op: &'static str,
    /// The holder of L1.
    device: String,
    /// Bytes of a page, all parts together.
    page_bytes: u64,
    /// Parts of a page.
    parts: u32,
    /// Layers of a page.
    layers: u32,
    /// Pages that came up into L1.
    pages_loaded: u64,
    /// Pages of a chain.
    batch: u64,
    /// The disk that moved the bytes, and the reason for its choice.
    #[serde(flatten)]
    disk: DiskFacts,
    /// From the bottom up.
    tiers: [TierReport; 2],
    #[serde(flatten)]
    counts: Counts,
    /// Whether the operator ended it early.
    interrupted: bool,
}

/// One step up.
#[derive(Serialize)]
struct TierReport {
    from: &'static str,
    to: &'static str,
    /// From the request of a chain until all of it is present, for all chains together.
    seconds: f64,
    /// Page bytes per second of that time.
    bytes_per_second: f64,
    /// Median and 99th percentile of the chains, in microseconds.
    p50_us: f64,
    p99_us: f64,
    /// CPU time of the whole process during that time.
    cpu_seconds: f64,
    /// The same for each GiB.
    cpu_seconds_per_gib: f64,
}

impl TierReport {
    fn new(from: &'static str, to: &'static str, meter: &Meter, bytes: u64) -> TierReport {
        let (seconds, cpu_seconds) = (meter.seconds(), meter.cpu_seconds());
        TierReport {
            from,
            to,
            seconds,
            bytes_per_second: usage::per_second(bytes, seconds),
            p50_us: meter.percentile_us(50),
            p99_us: meter.percentile_us(99),
            cpu_seconds,
            cpu_seconds_per_gib: usage::per_gib(cpu_seconds, bytes),
        }
    }
}

impl Report for LoadReport {
    const COMMAND: &'static str = "bench load";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        lines.row("Operation", "load, chain by chain");
        let (size, parts, layers) = (ByteSize(self.page_bytes), self.parts, self.layers);
        rows! { lines:
            "Pages" => "{}; of {size} in {parts} parts of {layers} layers, chains of {}",
                self.pages_loaded, self.batch;
            "L1" => "{}", &self.device;
        }
        for tier in &self.tiers {
            rows! { lines:
                format!("{} to {}", tier.from, tier.to) =>
                    "{}; a chain p50 {:.0} us, p99 {:.0} us; CPU {:.3} s/GiB",
                    usage::rate(tier.bytes_per_second), tier.p50_us, tier.p99_us,
                    tier.cpu_seconds_per_gib;
            }
        }
        lines.row("Disk", self.disk.to_string());
        let counts = &self.counts;
        rows! { lines:
            "Verified" => "{} right, {} wrong, {} missed",
                counts.verified_pages, counts.wrong_pages, counts.pages_missed;
        }
        if self.interrupted {
            lines.text("Interrupted: these are the figures up to then.");
        }
        lines
    }
}

/// Runs the command.
pub fn run(args: &BenchArgs, interrupt: &Interrupt) -> Result<Ending, Failure> {
    if args.shared {
        return Err(Failure::usage(
            "--op load: the tiers take a store of their own; leave --shared out",
        ));
    }
    if args.turns {
        return Err(Failure::usage("--turns: --op load takes none"));
    }
    let shape = shape(args)?;
    let device = l1::device(args.cuda)?;
    let options = args.share.options()?.with(|o| o.eviction = None);
    let store = Arc::new(Store::open(&args.path, options)?);
    let measured = measure(args, &shape, &device, &store, interrupt);
    let closed = store.close();
    let report = measured?;
    closed?;
    report::print(&report, args.json)?;
    Ok(Ending::Done
        .or_interrupted(report.interrupted)
        .or_findings(report.counts.is_bad()))
}

fn shape(args: &BenchArgs) -> Result<KvShape, Failure> {
    let page_bytes = args.page_bytes.unwrap_or(PAGE_BYTES);
    let cannot = |why: String| {
        Failure::usage(format!(
            "pages of {} bytes in {} parts of {LAYERS} layers: {why}; choose other --page-bytes \
             or --parts",
            page_bytes.0, args.parts
        ))
    };
    let attention = match args.parts {
        1 => Attention::Mla,
        2 => Attention::Mha,
        _ => return Err(cannot("a page has 1 part or 2, K and V".to_owned())),
    };
    let rows = u64::from(args.parts) * u64::from(LAYERS) * u64::from(PAGE_TOKENS);
    if !page_bytes.0.is_multiple_of(rows) {
        return Err(cannot(format!(
            "each layer of a part has {PAGE_TOKENS} equal rows"
        )));
    }
    let row_bytes =
        u32::try_from(page_bytes.0 / rows).map_err(|error| cannot(error.to_string()))?;
    KvShape::of_rows(attention, LAYERS, row_bytes, PAGE_TOKENS)
        .map_err(|error| cannot(error.to_string()))
}

fn measure(
    args: &BenchArgs,
    shape: &KvShape,
    device: &Arc<dyn Device>,
    store: &Arc<Store>,
    interrupt: &Interrupt,
) -> Result<LoadReport, Failure> {
    let batch = args.batch.min(args.pages);
    let mut load = Load {
        cache: cache(shape, batch, device, store, args)?,
        shape: *shape,
        // A token has 31 bits.
        seed: args.seed & u64::from(u32::MAX >> 1),
        chunk: vec![0; shape.chunk_bytes() as usize],
        up: [Meter::default(), Meter::default()],
        counts: Counts::default(),
    };
    let bar = report::progress(Some(args.pages), "loading {wide_bar} {pos}/{len}");
    load.chains(args.pages, batch, interrupt, &bar)?;
    bar.finish_and_clear();
    let pages = load.counts.verified_pages + load.counts.wrong_pages;
    let bytes = pages * u64::from(shape.page_bytes());
    let [prefetches, loads] = &load.up;
    Ok(LoadReport {
        path: args.path.clone(),
        op: "load",
        device: device.name(),
        page_bytes: shape.page_bytes().into(),
        parts: shape.parts(),
        layers: shape.layers(),
        pages_loaded: pages,
        batch,
        disk: DiskFacts::of(&store.stats().disk),
        tiers: [
            TierReport::new("L3", "L2", prefetches, bytes),
            TierReport::new("L2", "L1", loads, bytes),
        ],
        counts: load.counts,
        interrupted: interrupt.is_raised(),
    })
}

/// The tiers. L1 has room for one chain, L2 for an incoming chain beside a chain that is backed up.
fn cache(
    shape: &KvShape,
    batch: u64,
    device: &Arc<dyn Device>,
    store: &Arc<Store>,
    args: &BenchArgs,
) -> Result<Cache, Failure> {
    let stored = workload::shape(ByteSize(shape.page_bytes().into()), shape.parts())?;
    check_room(&args.path, &**store, &stored, args.pages)?;
    if holds_others(store) && !args.force {
        spare_others(&args.path, &**store, &stored, args.pages)?;
    }
    let model = format!("{NAMESPACE}{} layers", shape.layers());
    let namespace = workload::model_namespace(&model, shape)?;
    let shared: Arc<dyn PageStore> = store.clone();
    let l3 = StoreL3::new(shared, &namespace)?.with_puts(patient());
    let l1_pages = u32::try_from(batch).unwrap_or(u32::MAX).saturating_add(1);
    let l2_pages = l1_pages.saturating_mul(2);
    let mut config = Config::new(PAGE_TOKENS, shape.page_bytes().into(), l1_pages, l2_pages);
    config.prefetch.policy = PrefetchPolicy::WaitComplete;
    config.prefetch.threshold_tokens = 1;
    config.prefetch.l2_percent_max = 100;
    config.load_threshold_tokens = 1;
    config.l3_queue_bytes_max = u64::MAX;
    config
        .check()
        .map_err(|error| Failure::usage(error.to_string()))?;
    let bytes = pool_bytes(shape, l2_pages + 1);
    let options = HostMemoryOptions {
        store: Some(&**store),
        ..HostMemoryOptions::default()
    };
    let (memory, _) = host_memory(bytes, &options).map_err(|error| {
        Failure::environment(format!(
            "no memory for L2 ({bytes} bytes): {error}; choose a smaller --batch"
        ))
    })?;
    let parts = Parts {
        device: device.clone(),
        l1: device.alloc_l1(shape, l1_pages + 1)?,
        l2: device.register(memory, Layout::PageFirstDirect, shape, l2_pages + 1)?,
        l3: Some(Arc::new(l3)),
        ranks: None,
    };
    let cache = Cache::new(config, parts)?;
    cache.wake_on_l3(Arc::new(Unpark(thread::current())).into());
    Ok(cache)
}

/// A run in progress.
struct Load {
    cache: Cache,
    shape: KvShape,
    seed: u64,
    /// Space for one chunk.
    chunk: Vec<u8>,
    /// L3 to L2, L2 to L1.
    up: [Meter; 2],
    counts: Counts,
}

impl Load {
    fn chains(
        &mut self,
        pages: u64,
        batch: u64,
        interrupt: &Interrupt,
        bar: &ProgressBar,
    ) -> Result<(), Failure> {
        for number in 0..pages.div_ceil(batch) {
            if interrupt.is_raised() {
                break;
            }
            let pages = batch.min(pages - number * batch);
            self.provide(number, pages)?;
            self.load(number, pages)?;
            bar.inc(pages);
        }
        Ok(())
    }

    /// The prompt of a chain: this many pages, and one more token, which is never cached.
    fn prompt(&mut self, number: u64, pages: u64) -> Result<Prompt, Failure> {
        let named = [self.seed, number];
        let tokens = named
            .into_iter()
            .chain(2..)
            .take(1 + usize::try_from(pages * u64::from(PAGE_TOKENS)).unwrap_or(usize::MAX - 1));
        let prompt = self.cache.prompt(&Scope::default(), tokens);
        prompt.map_err(|error| Failure::usage(error.to_string()))
    }

    /// Makes L3 hold a chain. Not measured.
    fn provide(&mut self, number: u64, pages: u64) -> Result<(), Failure> {
        let mut prompt = self.prompt(number, pages)?;
        prefetch(&mut self.cache, &mut prompt)?;
        let mut request = self.cache.start(prompt, 0);
        self.cache.load_back(&mut request, usize::MAX)?;
        // The tree does not adopt pages behind a load in flight.
        self.cache.drain()?;
        let row = request.row_and_loads().0;
        let (shared, left) = (
            row.shared_pages(),
            request.prompt().words().len() - request.tokens(),
        );
        self.cache
            .extend(&mut request, left)
            .map_err(|error| Failure::environment(error.to_string()))?;
        for page in shared..usize::try_from(pages).unwrap_or(usize::MAX) {
            for (at, words) in self.chunks(number, page) {
                words.fill(&mut self.chunk);
                self.cache.write_chunk(&request, at, &self.chunk)?;
            }
        }
        self.forget(request)
    }

    /// Waits until L3 has the pages that the request leaves, and empties L1 and L2.
    fn forget(&mut self, request: Request) -> Result<(), Failure> {
        self.cache.finish(request, true, &Ticket::done());
        self.cache.drain()?;
        self.cache
            .reset()
            .map_err(|error| Failure::environment(error.to_string()))
    }

    /// Brings a chain up.
    fn load(&mut self, number: u64, pages: u64) -> Result<(), Failure> {
        let mut prompt = self.prompt(number, pages)?;
        let [prefetches, loads] = &mut self.up;
        prefetches.measure(|| prefetch(&mut self.cache, &mut prompt))?;
        let mut request = self.cache.start(prompt, 0);
        let last = self.shape.layers() - 1;
        let loaded = loads.measure(|| -> Result<u64, Failure> {
            let LoadBack::Started(_, loaded) = self.cache.load_back(&mut request, usize::MAX)?
            else {
                return Ok(0);
            };
            self.cache.pages(&request)?.wait_layer(last)?;
            Ok(loaded as u64)
        })?;
        let loaded = loaded.min(pages);
        self.counts.pages_missed += pages - loaded;
        for page in 0..usize::try_from(loaded).unwrap_or(usize::MAX) {
            let mut is_right = true;
            for (at, words) in self.chunks(number, page) {
                self.cache.read_chunk(&request, at, &mut self.chunk)?;
                is_right &= words.match_part(&self.chunk);
            }
            self.counts.verified_pages += u64::from(is_right);
            self.counts.wrong_pages += u64::from(!is_right);
        }
        self.forget(request)
    }

    /// Every chunk of a page: its place, and its expected content.
    fn chunks(&self, number: u64, page: usize) -> impl Iterator<Item = (ChunkAt, Words)> + use<> {
        let (parts, layers) = (self.shape.parts(), self.shape.layers());
        let page = u32::try_from(page).unwrap_or(u32::MAX);
        let seed = self.seed.rotate_left(32) ^ number;
        let pairs = (0..parts).flat_map(move |part| (0..layers).map(move |layer| (part, layer)));
        pairs.map(move |(part, layer)| {
            let words = Words::named([seed, page.into(), part.into(), layer.into()]);
            (ChunkAt { part, layer, page }, words)
        })
    }
}

/// Wakes the thread that waits for L3, whose CPU time would otherwise count as that of a prefetch.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Requests all of a prompt from L3, and waits until it has come or is known to be missing.
fn prefetch(cache: &mut Cache, prompt: &mut Prompt) -> Result<(), Failure> {
    let Ok(id) = cache.prefetch(prompt) else {
        return Ok(());
    };
    while cache.poll_prefetch(id)? == PrefetchState::Waiting {
        if cache.poll()? == 0 {
            thread::park_timeout(POLL);
        }
    }
    Ok(())
}

//! `larder bench`: the speed of puts, gets and lookups of a store, and their CPU cost, with every
//! byte checked.
//!
//! Only the store's calls are timed and their CPU counted. Pages are made and compared between rows
//! of calls ([`ROW_BYTES`]). Reads are cold: the store reads past the page cache. Every run of
//! `put` makes pages that no store holds yet. `get` and `exists` use the same pages in every run
//! with one seed, and put missing ones first. `load` continues to the tiers above ([`load`]).
//! Processes that are compared take turns call by call ([`turns`](crate::turns)).

mod load;
mod result;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::{Args, ValueEnum};
use indicatif::ProgressBar;
use larder_base::memory::backing_page_bytes;
use larder_engine::{NamespaceId, PageStore, PutFailure, PutStatus, Refusal, Store};
use larder_format::{Namespace, PageKey, PageShape};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_pcg::Pcg64;
use serde::Serialize;

use crate::disk::DiskFacts;
use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::open::{ShareArgs, closing};
use crate::place;
use crate::report;
use crate::size::ByteSize;
use crate::usage::{self, Meter};
use crate::workload::{self, Content, Link, PageBuffers};
use result::{BenchReport, Counts};

/// Pages of a chain that `get` reads. The chains do not depend on the batch, so runs with different
/// batches share pages.
const CHAIN_PAGES: u64 = 128;

/// Page data of calls that follow each other without a pause, unless one call has more.
///
/// After a pause the device's threads sleep, and the caches are full of compared data. The first
/// call then takes 4 % longer than the calls behind it (16 MiB a call, an EPYC's virtual disk,
/// 2026-11-25). No reader of a store pauses for that reason. Also, pages made just before their put
/// would come out of the cache, and a server's pages do not.
const ROW_BYTES: u64 = 256 << 20;

/// Page data that `put` reads back.
const READ_BACK_BYTES: u64 = 64 << 20;

/// Lookups that `exists` times.
const EXISTS_CALLS: u64 = 200;

/// Page size of `exists`, whose pages are never read, unless given.
const EXISTS_PAGE_BYTES: ByteSize = ByteSize(4 << 10);

/// Page size of `put` and `get` unless given.
const PAGE_BYTES: ByteSize = ByteSize(4 << 20);

/// The model of the namespaces that puts, gets and lookups are measured with.
const NAMESPACE: &str = "bench";

/// Tokens of a bench page. They only name the namespace.
const PAGE_TOKENS: u32 = 64;

/// Measure a store: puts, gets, lookups or loads
///
/// The pages that it puts stay in the store. Refuses to evict
/// cached pages unless --force is set.
#[derive(Args, Debug)]
pub struct BenchArgs {
    /// The store, or a backend's directory; it must exist (`larder create --prewrite`)
    #[arg(value_parser = place::parser())]
    path: PathBuf,
    /// The operation to measure
    #[arg(long, value_enum)]
    op: What,
    /// Size of a page over all its parts [default: 4MiB; 4KiB for exists]
    #[arg(long)]
    page_bytes: Option<ByteSize>,
    /// Parts of a page, of equal size: K and V are two
    #[arg(long, default_value_t = 2)]
    parts: u32,
    /// Pages to put or get in all
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    pages: u64,
    /// Pages of a call; of a chain of load
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    batch: u64,
    /// Pages of put and get are pieces of this file, KV of a model for example, in place of words
    /// that no codec makes smaller
    #[arg(long, value_name = "FILE")]
    content: Option<PathBuf>,
    /// Length of the chain that exists looks up
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    keys: u64,
    /// Chooses the pages of get, exists and load, and the order of get; put makes new pages in
    /// every run
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// For load: to this CUDA device, by its number, rather than to memory of the host
    #[arg(long, value_name = "N")]
    cuda: Option<u32>,
    /// Measure even if cached pages are evicted for it
    #[arg(long)]
    force: bool,
    /// Share the store: as a client of the process that owns it, if one does
    #[arg(long)]
    shared: bool,
    #[command(flatten)]
    share: ShareArgs,
    /// Wait for a line of input before each timed call and after the last, and say with a line of
    /// JSON that it is awaited: processes that are compared take turns
    #[arg(long, requires = "json")]
    turns: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// The operation to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// Writes new pages, one chain a batch
    Put,
    /// Reads pages in random order
    Get,
    /// Looks one chain up, again and again
    Exists,
    /// Prefetches chains into L2, and loads them into L1
    Load,
}

/// The measured operation of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Writes new pages, one chain a batch.
    Put,
    /// Reads pages in random order.
    Get,
    /// Looks one chain up, again and again.
    Exists,
}

/// The parameters of a measurement.
pub struct Plan<'a> {
    /// The store's path, for messages.
    pub path: &'a Path,
    /// The operation.
    pub op: Op,
    /// Parts of a page.
    pub parts: u32,
    /// Their content.
    pub content: Content,
    /// Pages to put or get in all.
    pub pages: u64,
    /// Pages of a call.
    pub batch: u64,
    /// Length of the chain that `exists` looks up.
    pub keys: u64,
    /// Chooses the pages of `get` and `exists`, and the order of `get`.
    pub seed: u64,
    /// Operations with the kernel at once, per volume.
    pub depth: u32,
    /// Whether timed calls wait for their turns ([`crate::turns`]).
    pub by_turns: bool,
}

/// The speed at which a store moves pages.
pub struct Speed {
    /// Page bytes a second.
    pub bytes_per_second: f64,
    /// Median of the calls.
    pub call: Duration,
}

/// A run in progress.
struct Run<'a> {
    plan: &'a Plan<'a>,
    store: &'a dyn PageStore,
    namespace: NamespaceId,
    /// Space for a row of calls.
    buffers: PageBuffers,
    /// Pages of a call.
    batch: usize,
    meter: Meter,
    counts: Counts,
    /// The store's status of the first page that it did not store.
    unstored: Option<PutStatus>,
    pages: u64,
    flush: Duration,
    interrupt: &'a Interrupt,
    bar: ProgressBar,
}

/// Runs the command.
pub fn run(args: &BenchArgs) -> Result<Ending, Failure> {
    let interrupt = Interrupt::watch();
    let op = match args.op {
        What::Put => Op::Put,
        What::Get => Op::Get,
        What::Exists => Op::Exists,
        What::Load => return load::run(args, &interrupt),
    };
    if args.cuda.is_some() {
        return Err(Failure::usage("--cuda is for --op load"));
    }
    let default = if op == Op::Exists {
        EXISTS_PAGE_BYTES
    } else {
        PAGE_BYTES
    };
    let shape = workload::shape(args.page_bytes.unwrap_or(default), args.parts)?;
    let content = Content::of(args.content.as_deref(), &shape)?;
    let options = args.share.options()?;
    let plan = Plan {
        path: &args.path,
        op,
        parts: args.parts,
        content,
        pages: args.pages,
        batch: args.batch,
        keys: args.keys,
        seed: args.seed,
        depth: options.depth,
        by_turns: args.turns,
    };
    let work = |store: &dyn PageStore, holds_others: bool| {
        if holds_others && !args.force {
            spare_others(&args.path, store, &shape, plan.puts())?;
        }
        measure(&plan, store, &shape, &interrupt)
    };
    let report = if args.shared {
        // Only the owner knows the client to which pages belong.
        closing(&Store::attach(&args.path, options)?, |store| {
            work(store, true)
        })?
    } else {
        closing(&Store::open(&args.path, options)?, |store| {
            work(store, holds_others(store))
        })?
    };
    report::print(&report, args.json)?;
    Ok(Ending::Done
        .or_interrupted(report.interrupted)
        .or_findings(report.counts.is_bad()))
}

/// Measures puts or gets on a store, for callers that need only its speed.
///
/// # Errors
/// The store lost pages or returned wrong ones, or has no room for them.
pub fn speed(
    plan: &Plan<'_>,
    store: &dyn PageStore,
    shape: &PageShape,
    interrupt: &Interrupt,
) -> Result<Speed, Failure> {
    let report = measure(plan, store, shape, interrupt)?;
    if report.counts.is_bad() {
        let reason = report.unstored_reason.as_deref();
        return Err(Failure::environment(format!(
            "{}: measuring it, {:?}: {}",
            plan.path.display(),
            report.counts,
            reason.unwrap_or("`larder doctor` tells more")
        )));
    }
    Ok(Speed {
        bytes_per_second: report.bytes_per_second,
        call: Duration::from_secs_f64(report.p50_us / 1e6),
    })
}

fn measure(
    plan: &Plan<'_>,
    store: &dyn PageStore,
    shape: &PageShape,
    interrupt: &Interrupt,
) -> Result<BenchReport, Failure> {
    let batch = plan.batch.min(plan.puts());
    let calls = (ROW_BYTES / batch.saturating_mul(shape.page_bytes())).max(1);
    let row = batch.saturating_mul(calls).min(plan.puts());
    let [batch, row] = [batch, row].map(|pages| usize::try_from(pages).unwrap_or(usize::MAX));
    // Before anything is written. Pages may be evicted between calls, but not during their own
    // call.
    let together = match plan.op {
        Op::Put => plan.batch.min(plan.pages),
        Op::Get | Op::Exists => plan.puts(),
    };
    check_room(plan.path, store, shape, together)?;
    let evicted_before = store.stats().evicted;
    let mut run = Run {
        plan,
        store,
        namespace: store.namespace(&workload::namespace(NAMESPACE, PAGE_TOKENS, *shape)?)?,
        buffers: PageBuffers::new(shape, row)?.with(plan.content.clone()),
        batch,
        meter: Meter::new(plan.by_turns),
        counts: Counts::default(),
        unstored: None,
        pages: 0,
        flush: Duration::ZERO,
        interrupt,
        bar: report::progress(None, "{msg} {wide_bar} {pos}/{len}"),
    };
    run.buffers.register(store);
    match plan.op {
        Op::Put => run.put(shape)?,
        Op::Get => run.get()?,
        Op::Exists => run.exists()?,
    }
    run.bar.finish_and_clear();
    run.counts.evicted_pages = store.stats().evicted.saturating_sub(evicted_before);
    Ok(run.report(shape))
}

impl Plan<'_> {
    /// Upper bound of the pages that it puts.
    fn puts(&self) -> u64 {
        match self.op {
            Op::Put | Op::Get => self.pages,
            Op::Exists => self.keys,
        }
    }
}

impl Run<'_> {
    /// Pages between two pauses.
    fn row(&self) -> usize {
        self.buffers.slots()
    }

    fn start_bar(&self, what: &'static str, total: u64) {
        self.bar.set_message(what);
        self.bar.set_length(total);
        self.bar.set_position(0);
    }

    /// Puts pages that no store holds yet, one chain a batch. Then reads some of the last batch
    /// back: only a few, since pages that are read become hot, and later runs would copy them.
    fn put(&mut self, shape: &PageShape) -> Result<(), Failure> {
        let seed = fresh_seed();
        let batch = self.plan.batch;
        let mut chains = (0..self.plan.pages.div_ceil(batch)).map(|number| {
            let pages = batch.min(self.plan.pages - number * batch);
            workload::links(&seeded_chain(seed, number, pages))
        });
        let calls = self.row().div_ceil(self.batch);
        let mut last = Vec::new();
        let mut is_refused = false;
        self.start_bar("putting", self.plan.pages);
        // After a refusal there is nothing to measure: each further call may wait as long as the
        // refused one.
        while !self.interrupt.is_raised() && !is_refused {
            let mut row: Vec<Vec<Link>> = chains.by_ref().take(calls).collect();
            let links = row.concat();
            let Some(chain) = row.pop() else { break };
            last = chain;
            let statuses = self.buffers.put(
                self.store,
                self.namespace,
                &links,
                self.batch,
                &mut self.meter,
            );
            for status in statuses {
                if status == PutStatus::Stored {
                    self.counts.pages_put += 1;
                } else {
                    self.counts.unstored_pages += 1;
                    self.unstored = self.unstored.or(Some(status));
                    is_refused |= matches!(status, PutStatus::Refused(_));
                }
            }
            self.pages += links.len() as u64;
            self.bar.inc(links.len() as u64);
        }
        self.meter.end();
        let started = Instant::now();
        self.store.flush()?;
        self.flush = started.elapsed();
        let few = (READ_BACK_BYTES / shape.page_bytes()).max(1);
        let few = usize::try_from(few).unwrap_or(usize::MAX);
        let keys: Vec<PageKey> = last.iter().map(|link| link.key).take(few).collect();
        self.read_and_compare(&keys, &mut Meter::default());
        Ok(())
    }

    /// Reads pages in random order.
    fn get(&mut self) -> Result<(), Failure> {
        let chains: Vec<Vec<PageKey>> = (0..self.plan.pages.div_ceil(CHAIN_PAGES))
            .map(|number| {
                let pages = CHAIN_PAGES.min(self.plan.pages - number * CHAIN_PAGES);
                seeded_chain(self.plan.seed, number, pages)
            })
            .collect();
        self.provide(&chains)?;
        let mut keys = chains.concat();
        keys.shuffle(&mut Pcg64::seed_from_u64(self.plan.seed));
        self.start_bar("getting", self.plan.pages);
        let mut meter = std::mem::take(&mut self.meter);
        for row in keys.chunks(self.row()) {
            if self.interrupt.is_raised() {
                break;
            }
            self.read_and_compare(row, &mut meter);
            self.pages += row.len() as u64;
            self.bar.inc(row.len() as u64);
        }
        meter.end();
        self.meter = meter;
        Ok(())
    }

    /// Looks one chain up, with a key at its end that no store holds.
    fn exists(&mut self) -> Result<(), Failure> {
        // The number keeps the chain apart from the chains of `get`, which start with the same
        // seed. The absent key belongs to a chain that is never put: the next key of this chain is
        // in the store after a run with more keys.
        let mut keys = seeded_chain(self.plan.seed, u64::MAX, self.plan.keys);
        let absent = seeded_chain(self.plan.seed, u64::MAX - 1, 1);
        self.provide(std::slice::from_ref(&keys))?;
        let expected = keys.len();
        keys.extend(absent);
        self.start_bar("looking up", EXISTS_CALLS);
        for _ in 0..EXISTS_CALLS {
            if self.interrupt.is_raised() {
                break;
            }
            let found = self
                .meter
                .measure(|| self.store.longest_prefix(self.namespace, &keys));
            self.counts.verified_pages += found.min(expected) as u64;
            self.counts.pages_missed += expected.saturating_sub(found) as u64;
            self.counts.wrong_pages += found.saturating_sub(expected) as u64;
            self.pages += expected as u64;
            self.bar.inc(1);
        }
        self.meter.end();
        Ok(())
    }

    /// Makes the store hold these chains. Not measured.
    fn provide(&mut self, chains: &[Vec<PageKey>]) -> Result<(), Failure> {
        let pages: u64 = chains.iter().map(|chain| chain.len() as u64).sum();
        self.start_bar("filling the store", pages);
        for chain in chains {
            self.put_missing(chain)?;
        }
        Ok(())
    }

    fn put_missing(&mut self, chain: &[PageKey]) -> Result<(), Failure> {
        let present = self.store.contains(self.namespace, chain);
        let missing: Vec<Link> = workload::links(chain)
            .into_iter()
            .zip(&present)
            .filter(|(_, there)| !**there)
            .map(|(link, _)| link)
            .collect();
        self.bar.inc((chain.len() - missing.len()) as u64);
        for row in missing.chunks(self.row()) {
            let statuses = self.buffers.put(
                self.store,
                self.namespace,
                row,
                self.batch,
                &mut Meter::default(),
            );
            if let Some(status) = statuses.into_iter().find(|status| !status.is_present()) {
                return Err(Failure::environment(format!(
                    "{}: cannot fill the store: {}",
                    self.plan.path.display(),
                    reason(status)
                )));
            }
            self.bar.inc(row.len() as u64);
        }
        Ok(())
    }

    fn read_and_compare(&mut self, keys: &[PageKey], meter: &mut Meter) {
        let statuses = self
            .buffers
            .get(self.store, self.namespace, keys, self.batch, meter);
        for (slot, (key, status)) in keys.iter().zip(statuses).enumerate() {
            if !status.is_hit() {
                self.counts.pages_missed += 1;
            } else if self.buffers.holds(slot, key) {
                self.counts.verified_pages += 1;
            } else {
                self.counts.wrong_pages += 1;
            }
        }
    }

    fn report(&self, shape: &PageShape) -> BenchReport {
        let stats = self.store.stats();
        let moved = match self.plan.op {
            Op::Put => self.counts.pages_put,
            Op::Get => self.counts.verified_pages,
            Op::Exists => 0,
        };
        let done = if self.plan.op == Op::Exists {
            self.counts.verified_pages
        } else {
            moved
        };
        let bytes = moved * shape.page_bytes();
        let seconds = self.meter.seconds();
        let cpu_seconds = self.meter.cpu_seconds();
        BenchReport {
            path: self.plan.path.to_owned(),
            op: self.plan.op,
            page_bytes: shape.page_bytes(),
            parts: self.plan.parts,
            pages_requested: self.pages,
            batch: if self.plan.op == Op::Exists {
                self.plan.keys
            } else {
                self.plan.batch
            },
            depth: self.plan.depth,
            disk: DiskFacts::of(&stats.disk),
            memory_page_bytes: backing_page_bytes(self.buffers.address()).unwrap_or(0),
            seconds,
            bytes_per_second: usage::per_second(bytes, seconds),
            pages_per_second: usage::per_second(done, seconds),
            p50_us: self.meter.percentile_us(50),
            p99_us: self.meter.percentile_us(99),
            cpu_seconds,
            cpu_seconds_per_gib: usage::per_gib(cpu_seconds, bytes),
            flush_seconds: self.flush.as_secs_f64(),
            counts: self.counts,
            unstored_reason: self.unstored.map(reason),
            interrupted: self.interrupt.is_raised(),
        }
    }
}

/// The reason why a page was not stored, and the remedy.
pub(crate) fn reason(status: PutStatus) -> String {
    let why = match status {
        PutStatus::Stored => "nothing is wrong",
        PutStatus::Duplicate => "it was there",
        PutStatus::Refused(why) => match why {
            Refusal::TooLarge => {
                return "a page does not fit a segment of this store; choose smaller --page-bytes, \
                    or create a store with a larger \
                        --segment-size"
                    .to_owned();
            }
            Refusal::Unreachable => {
                return "a page and those before it in its chain are more than the store keeps; \
                    create a larger one"
                    .to_owned();
            }
            Refusal::NoSpace => "there was no room for it in time",
            Refusal::Busy => "too much was being written",
            Refusal::WrongShape => "its parts are not of the namespace's shape",
            Refusal::ReadOnly => "the store is open for reading alone",
            Refusal::Closed => "the store is closed, or a volume has failed for good",
            Refusal::ReadOnlyService => "every volume refuses writes and is in read-only service",
            Refusal::Exhausted => {
                "the store's serial numbers for this run are used up: open it again"
            }
            Refusal::NotAdmitted => "the store's policy does not take it",
            Refusal::Budget => "the store's budget of writes does not take it",
            Refusal::Quota => "its group is at the maximum of its quota",
            Refusal::Erased => "its tenant is being erased",
            Refusal::KeyringFull => "the keyring of the store takes no more tenants",
        },
        PutStatus::Failed(PutFailure::Write) => "the device did not take it",
        PutStatus::Failed(PutFailure::Sync) => "the device failed the sync that it waited for",
    };
    format!("a page was not stored: {why}; `larder doctor` and `larder verify` tell more")
}

/// Whether a store has namespaces that do not belong to measurements.
fn holds_others(store: &Store) -> bool {
    let is_own = |model: &str| model == NAMESPACE || model.starts_with(load::NAMESPACE);
    let is_other = |space: &Namespace| !is_own(&space.fields().model);
    store.namespaces().iter().any(is_other)
}

/// Refuses a measurement that would evict pages of others.
fn spare_others(
    path: &Path,
    store: &dyn PageStore,
    shape: &PageShape,
    pages: u64,
) -> Result<(), Failure> {
    let stats = store.stats();
    let page_bytes = u64::from(shape.page_blocks()) * larder_format::BLOCK_BYTES as u64;
    let free = stats.free_pages(page_bytes);
    if stats.pages == 0 || pages <= free {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "{}: the store holds pages that may be of others, and has room for {free} more of {}, not \
         for {pages}: measure a store of its own, ask \
         for fewer pages, or use --force to have the coldest dropped",
        path.display(),
        ByteSize(page_bytes),
    )))
}

/// Refuses a measurement whose pages do not fit: they would be evicted before they are read.
fn check_room(
    path: &Path,
    store: &dyn PageStore,
    shape: &PageShape,
    pages: u64,
) -> Result<(), Failure> {
    let page_bytes_on_disk = u64::from(shape.page_blocks()) * larder_format::BLOCK_BYTES as u64;
    let stats = store.stats();
    let room = stats.usable_pages(page_bytes_on_disk);
    if pages <= room {
        return Ok(());
    }
    if stats.footprint(page_bytes_on_disk) < u64::MAX && room == 0 {
        return Err(Failure::environment(format!(
            "{}: the store has no room for pages: its device refuses too many of its {} segments; \
             see `larder doctor` and `larder verify`",
            path.display(),
            stats.segments,
        )));
    }
    if room == 0 {
        return Err(Failure::usage(format!(
            "{}: {}",
            path.display(),
            reason(PutStatus::Refused(Refusal::TooLarge))
        )));
    }
    Err(Failure::usage(format!(
        "{}: {pages} pages of {} do not fit together, the store keeps {room}; ask for fewer \
         (--pages, --batch), or create a larger store",
        path.display(),
        ByteSize(shape.page_bytes()),
    )))
}

/// The chain of `pages` pages for `seed` and `number`.
fn seeded_chain(seed: u64, number: u64, pages: u64) -> Vec<PageKey> {
    workload::chain_after(&[seed, number], pages)
}

/// A seed that no other run has, from the time and the process id.
fn fresh_seed() -> u64 {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let nanoseconds = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
    nanoseconds.rotate_left(20) ^ u64::from(std::process::id())
}

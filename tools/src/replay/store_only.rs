//! A trace against the store alone, with the use pattern of a server: the longest stored prefix is
//! read, the rest put.
//!
//! One page is one block of the trace. A store that another process serves is used as its client.
//! Every byte read is compared with the content that the page's
//! key defines. A store with pages of an earlier run is continued, so a replay can be killed at any
//! moment and started again. `--ack-log` and `--check-log` prove that pages acknowledged before the
//! kill are still present ([`crate::ack_log`]).
//!
//! Defends against a wrong store: its capacity and the shape of its replay pages must be the
//! requested ones.
//!
//! Eviction by the learned order sees the times of the trace, not those of the disk.

use std::iter::Peekable;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use larder_engine::{CodecChoice, CreateOptions, PageStore, Store};
use larder_format::{PageKey, PageShape};
use larder_store::fit::page_bytes_on_disk;

use serde::Serialize;

use super::clock::TraceClock;
use super::setup::{Setup, check_capacity, check_namespace, create_missing, does_not_fit};
use crate::ack_log::{AckLog, History};
use crate::bench;
use crate::disk::DiskFacts;
use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::open::{DiskArgs, with_any};
use crate::place;
use crate::policy::Policy;
use crate::report::{self, Lines, Report};
use crate::session::{Counts, Session, Witness};
use crate::size::ByteSize;
use crate::trace::{BLOCK_TOKENS, Request, TraceError};
use crate::usage;
use crate::workload::{self, Content};

/// How long a lookup protects its pages: until they are read. At the speed of a disk the usual
/// seconds would protect the pages of minutes of the trace.
const LEASE: Duration = Duration::from_millis(100);

/// The model that names the namespace of replay pages.
const MODEL: &str = "replay";

/// Run a trace against a store: read the longest stored prefix, put the rest, check every byte
#[derive(Args, Clone, Debug)]
pub struct StoreArgs {
    #[command(flatten)]
    pub(super) setup: Setup,
    /// The store, or a backend's directory: created when it does not exist, continued when it does
    #[arg(long, value_parser = place::parser())]
    pub(super) store: PathBuf,
    /// Size of the store (4GiB). With several sizes (1GiB,2GiB,4GiB) a store of each is made beside
    /// --store and removed, and the hit rates are compared
    #[arg(long, value_name = "SIZE", value_delimiter = ',', required = true)]
    pub(super) capacity: Vec<ByteSize>,
    /// Size of a page
    #[arg(long, value_name = "SIZE")]
    pub(super) page_bytes: ByteSize,
    /// Size of a segment of a store that is created [default: by its size and that of a page]
    #[arg(long, value_name = "SIZE")]
    pub(super) segment_size: Option<ByteSize>,
    /// Append every acknowledged page to this file
    #[arg(long, value_name = "FILE")]
    pub(super) ack_log: Option<PathBuf>,
    /// Flush after every so many requests, and log only flushed pages to --ack-log: they survive
    /// power loss
    #[arg(long, value_name = "REQUESTS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) flush_every: Option<u64>,
    /// First check the store against such a file, also if --ack-log continues it; the store must
    /// have all that was put into it
    #[arg(long, value_name = "FILE")]
    pub(super) check_log: Option<PathBuf>,
    /// Pages are pieces of this file, KV of a model for example, in place of words that no codec
    /// makes smaller
    #[arg(long, value_name = "FILE")]
    pub(super) content: Option<PathBuf>,
    /// Encode pages of values in bf16: off, bf16 or auto; the store's owner decides
    #[arg(long, value_name = "CODEC", default_value_t)]
    pub(super) codec: CodecChoice,
    #[command(flatten)]
    pub(super) disk: DiskArgs,
    /// Which pages go first when the store is full
    #[arg(long, value_enum, default_value_t)]
    pub(super) policy: Policy,
}

/// The result.
#[derive(Serialize)]
pub(super) struct ReplayReport {
    /// The store: its first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    #[serde(flatten)]
    pub(super) counts: Counts,
    /// `pages_hit / pages_requested`.
    pub(super) hit_rate: f64,
    /// Bytes of pages read from the volumes.
    bytes_read: u64,
    /// Bytes written to the volumes in all: pages, descriptors, headers, copies.
    pub(super) bytes_written: u64,
    /// `bytes_written` for each byte of pages put.
    write_amplification: f64,
    /// Pages dropped to make room.
    pub(super) evicted_pages: u64,
    /// Pages that the store forgot because their bytes failed their checksum or could not be read.
    pub(super) damaged_pages: u64,
    /// Pages that the store forgot because a crash cut their write short.
    unfinished_pages: u64,
    /// Bytes of a page.
    page_bytes: u64,
    /// Bytes of all volumes together.
    pub(super) capacity_bytes: u64,
    /// Most pages that the store keeps at once.
    usable_pages: u64,
    /// From opening the store to the flush at the end.
    seconds: f64,
    /// Time in the store's gets and puts.
    get_seconds: f64,
    put_seconds: f64,
    /// CPU time of the process since its start, making and comparing pages included.
    cpu_seconds: f64,
    /// Most memory that the process had resident.
    peak_rss_bytes: u64,
    /// The disk that moved the bytes, and the reason for its choice.
    #[serde(flatten)]
    disk: DiskFacts,
    /// The reason why the first unstored page was not stored, and the remedy.
    pub(super) unstored_reason: Option<String>,
    /// The check of `--check-log`.
    #[serde(skip_serializing_if = "Option::is_none")]
    check: Option<CheckReport>,
    /// Whether the operator ended it early.
    pub(super) interrupted: bool,
}

/// The outcome for pages that were acknowledged earlier.
#[derive(Clone, Copy, Default, Serialize)]
struct CheckReport {
    /// Pages in the log.
    acknowledged_pages: u64,
    /// Pages read and right.
    found_pages: u64,
    /// Not in the store: evicted, or lost.
    missing_pages: u64,
    /// Acknowledged so recently that eviction cannot have taken them.
    owed_pages: u64,
    /// Owed and missing. Must be 0.
    lost_pages: u64,
    /// Read and wrong. Must be 0.
    wrong_pages: u64,
    /// Lines of the log that were cut short.
    torn_lines: u64,
}

impl Report for ReplayReport {
    const COMMAND: &'static str = "replay store";

    fn lines(&self) -> Lines {
        let counts = &self.counts;
        let mut lines = Lines::default();
        if let Some(check) = &self.check {
            let before = format!("{} pages", check.acknowledged_pages);
            lines.row("Acknowledged before", before);
            let found = format!("{}, {} wrong", check.found_pages, check.wrong_pages);
            lines.row("  still there", found);
            let owed = format!("{}, {} lost", check.owed_pages, check.lost_pages);
            lines.row("  owed", owed);
        }
        lines.row("Requests", counts.requests.to_string());
        let page = ByteSize(self.page_bytes);
        let asked = format!("{} of {page}", counts.pages_requested);
        lines.row("Pages asked for", asked);
        let hit = format!("{} ({:.2} %)", counts.pages_hit, self.hit_rate * 100.0);
        lines.row("Pages hit", hit);
        let (put, known) = (counts.pages_put, counts.duplicate_pages);
        lines.row("Pages put", format!("{put}, and {known} that were there"));
        let (evicted, kept) = (self.evicted_pages, self.usable_pages);
        let evicted = format!("{evicted} (the store keeps {kept})");
        lines.row("Pages evicted", evicted);
        lines.row("Wrong pages", counts.wrong_pages.to_string());
        let lost = format!(
            "{} refused, {} failed, {} damaged, {} unfinished, {} lapsed",
            counts.refused_pages,
            counts.failed_pages,
            self.damaged_pages,
            self.unfinished_pages,
            counts.lapsed_pages
        );
        lines.row("Other losses", lost);
        if let Some(reason) = &self.unstored_reason {
            lines.row("Why not stored", reason.clone());
        }
        let speed = |bytes, seconds| {
            let rate = usage::rate(usage::per_second(bytes, seconds));
            format!("{} at {rate}", ByteSize(bytes))
        };
        lines.row("Read", speed(self.bytes_read, self.get_seconds));
        lines.row("Written", speed(self.bytes_written, self.put_seconds));
        let amplification = format!("{:.3}", self.write_amplification);
        lines.row("Write amplification", amplification);
        let usage = format!("{:.1} s, {:.1} s of CPU", self.seconds, self.cpu_seconds);
        lines.row("Time", usage);
        lines.row("Peak memory", ByteSize(self.peak_rss_bytes).to_string());
        lines.row("Disk", self.disk.to_string());
        if self.interrupted {
            lines.text("Interrupted: run it again to go on.");
        }
        lines
    }
}

/// Runs it.
pub fn run(args: &StoreArgs, interrupt: &Interrupt) -> Result<Ending, Failure> {
    let ended = with_report(args, interrupt, |report| {
        // A failing device may prevent the close, so the result is printed before.
        report::print(&report, args.setup.json)?;
        Ok(report.ending())
    })?;
    Ok(ended.unwrap_or(Ending::Interrupted))
}

/// The same, for `take`; `None` if it was ended before it began.
pub(super) fn with_report<T>(
    args: &StoreArgs,
    interrupt: &Interrupt,
    take: impl FnOnce(ReplayReport) -> Result<T, Failure>,
) -> Result<Option<T>, Failure> {
    let shape = workload::shape(args.page_bytes, 1)?;
    // The trace and the logs are opened first: a wrong path, or a wrong kind of file, must not
    // leave a store behind.
    let mut requests = args.setup.requests(interrupt)?;
    let block_tokens = block_tokens(&mut requests);
    let log = args.ack_log.as_deref().map(AckLog::open).transpose()?;
    let acks = Acks {
        log,
        unflushed: args.flush_every.map(|_| Vec::new()),
    };
    let history = args.check_log.as_deref().map(History::read).transpose()?;
    if interrupt.is_raised() {
        return Ok(None);
    }
    let options = CreateOptions::new(args.capacity()).with(|o| {
        o.segment_size = args.segment_size.map(|size| size.0);
        o.page_bytes = Some(page_bytes_on_disk(&shape));
    });
    create_missing(&args.store, &options, &shape)?;
    let input = Input {
        requests: one_size(args, requests, block_tokens),
        block_tokens,
        acks,
        history,
        shape,
        clock: TraceClock::default(),
    };
    let options = args.disk.options(args.policy).with(|o| {
        o.codec = args.codec;
        o.lease = LEASE;
        o.eviction = o.eviction.take().map(|orders| input.clock.over(orders));
    });
    with_any(&args.store, options, |store| {
        take(replay(args, store, input, interrupt)?).map(Some)
    })
}

/// Tokens of a block of the trace: those of its first request.
fn block_tokens(requests: &mut Peekable<impl Iterator<Item = Result<Request, TraceError>>>) -> u32 {
    let first = requests.peek().and_then(|first| first.as_ref().ok());
    first.map_or(BLOCK_TOKENS, Request::block_tokens)
}

/// The requests, up to a block of another size: all pages of a store have one.
fn one_size(
    args: &StoreArgs,
    requests: impl Iterator<Item = Result<Request, TraceError>>,
    block_tokens: u32,
) -> impl Iterator<Item = Result<Request, Failure>> {
    let path = args.setup.trace.clone();
    requests.map(move |request| {
        let request = request?;
        match request.block_tokens() {
            tokens if tokens == block_tokens => Ok(request),
            other => Err(Failure::usage(format!(
                "{}: it has blocks of {block_tokens} tokens and blocks of {other}, of different \
                 models; replay each of them alone (each line states its `block_tokens`)",
                path.display()
            ))),
        }
    })
}

impl StoreArgs {
    /// The capacity of a run: one is required.
    fn capacity(&self) -> u64 {
        self.capacity.first().map_or(0, |size| size.0)
    }
}

/// The inputs of a replay, all of them readable.
struct Input<R> {
    requests: R,
    block_tokens: u32,
    acks: Acks,
    history: Option<History>,
    shape: PageShape,
    clock: TraceClock,
}

fn replay(
    args: &StoreArgs,
    store: &Store,
    mut input: Input<impl Iterator<Item = Result<Request, Failure>>>,
    interrupt: &Interrupt,
) -> Result<ReplayReport, Failure> {
    let started = Instant::now();
    check_capacity(store, &args.store, args.capacity(), args.capacity())?;
    let namespace = workload::namespace(MODEL, input.block_tokens, input.shape)?;
    check_namespace(store, &args.store, &namespace)?;
    let namespace = store.namespace(&namespace)?;
    let content = Content::of(args.content.as_deref(), &input.shape)?;
    let mut session = Session::new(store, namespace, &input.shape)?.with(content);
    let usable_pages = store.stats().usable_pages(page_bytes_on_disk(&input.shape));
    if usable_pages == 0 {
        return Err(does_not_fit(&args.store));
    }
    let check = input
        .history
        .map(|history| check(&mut session, &history, usable_pages));
    let checked = store.stats();
    let bar = report::progress(args.setup.limit, "{pos} requests, {per_sec}, {elapsed}");
    for request in input.requests {
        if interrupt.is_raised() {
            break;
        }
        let request = request?;
        if let Some(at_ms) = request.timestamp {
            input.clock.tell(at_ms);
        }
        let keys = workload::chain(&request.hash_ids);
        session.serve_part(&keys, request.asked(), request.stored(), &mut input.acks)?;
        bar.inc(1);
        if args
            .flush_every
            .is_some_and(|every| session.counts.requests % every == 0)
        {
            store.flush()?;
            input.acks.flushed()?;
        }
    }
    bar.finish_and_clear();
    store.flush()?;
    input.acks.flushed()?;
    let stats = store.stats();
    Ok(ReplayReport {
        path: args.store.clone(),
        counts: session.counts,
        hit_rate: usage::ratio(session.counts.pages_hit, session.counts.pages_requested),
        bytes_read: stats.bytes_read - checked.bytes_read,
        bytes_written: stats.bytes_written,
        write_amplification: stats.write_amplification(),
        evicted_pages: stats.evicted,
        damaged_pages: stats.damaged,
        unfinished_pages: stats.unfinished,
        page_bytes: input.shape.page_bytes(),
        capacity_bytes: stats.capacity_bytes,
        usable_pages,
        seconds: started.elapsed().as_secs_f64(),
        get_seconds: session.gets.seconds(),
        put_seconds: session.puts.seconds(),
        cpu_seconds: usage::cpu_time().as_secs_f64(),
        peak_rss_bytes: usage::peak_rss_bytes(),
        disk: DiskFacts::of(&stats.disk),
        unstored_reason: session.unstored.map(bench::reason),
        check,
        interrupted: interrupt.is_raised(),
    })
}

impl ReplayReport {
    pub(super) fn ending(&self) -> Ending {
        let check = self.check.unwrap_or_default();
        let counts = &self.counts;
        let wrong = counts.wrong_pages + check.wrong_pages + check.lost_pages;
        let unstored = counts.refused_pages + counts.failed_pages;
        Ending::Done
            .or_interrupted(self.interrupted)
            .or_findings(wrong + unstored + self.damaged_pages > 0)
    }
}

/// Checks the store against the promises of an earlier run.
fn check(session: &mut Session<'_>, history: &History, usable_pages: u64) -> CheckReport {
    let mut acknowledged = history.acknowledged();
    // Both lists are newest first: the owed pages are the first of all.
    let owed = history.owed(usable_pages).len();
    // Reading is a use: in the order of the puts it leaves the newest pages the warmest, as they
    // were.
    acknowledged.reverse();
    let (older, newest) = acknowledged.split_at(acknowledged.len() - owed);
    let (older, newest) = (session.check(older), session.check(newest));
    CheckReport {
        acknowledged_pages: acknowledged.len() as u64,
        found_pages: newest.right + older.right,
        missing_pages: newest.missing + older.missing,
        owed_pages: owed as u64,
        lost_pages: newest.missing,
        wrong_pages: newest.wrong + older.wrong,
        torn_lines: history.torn_lines,
    }
}

/// Logs the store's acknowledgements: at once, or after their flush. Without a log it does nothing.
struct Acks {
    log: Option<AckLog>,
    /// Events since the last flush, if the log waits for flushes.
    unflushed: Option<Vec<(Event, Vec<PageKey>)>>,
}

type Event = fn(&mut AckLog, &[PageKey]) -> Result<(), Failure>;

impl Acks {
    fn tell(&mut self, event: Event, keys: &[PageKey]) -> Result<(), Failure> {
        match (&mut self.log, &mut self.unflushed) {
            (None, _) => {}
            (Some(_), Some(unflushed)) => unflushed.push((event, keys.to_vec())),
            (Some(log), None) => event(log, keys)?,
        }
        Ok(())
    }

    /// Everything so far is flushed.
    fn flushed(&mut self) -> Result<(), Failure> {
        let (Some(log), Some(unflushed)) = (&mut self.log, &mut self.unflushed) else {
            return Ok(());
        };
        let mut events = unflushed.drain(..);
        events.try_for_each(|(event, keys)| event(log, &keys))
    }
}

impl Witness for Acks {
    fn hit(&mut self, keys: &[PageKey]) -> Result<(), Failure> {
        self.tell(AckLog::hit, keys)
    }

    fn acknowledged(&mut self, keys: &[PageKey]) -> Result<(), Failure> {
        self.tell(AckLog::put, keys)
    }
}

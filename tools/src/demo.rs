//! `larder demo`: a newcomer's first minute, without preparation.
//!
//! It creates a store in its own directory and serves a synthetic chat load from it in a child
//! process. It kills the child with SIGKILL in the middle, reopens the store, looks for every page
//! that was acknowledged before, and continues. The disk's own speed is measured in the same run,
//! beside the store. A slow disk ends a half early, so that the user does not wait. At the end a
//! second process attaches to the store beside the first, and finds the pages that the first one
//! put.
//!
//! The child reports each turn in one line of JSON on its stdout. Lines written before the kill are
//! in the pipe. The directory is removed at the end, also after an error or Ctrl-C, unless `--keep`
//! is given.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::ProgressBar;
use larder_disk::probe;
use larder_engine::{CreateOptions, OpenOptions, PageStore, Store};
use larder_format::{PageKey, PageShape};
use serde::{Deserialize, Serialize};

use crate::conversations::Turns;
use crate::device::{self, DeviceSpeed};
use crate::disk::DiskFacts;
use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::program::{Program, complain};
use crate::report::{self, Lines, Report, rows};
use crate::session::{Checked, Counts, Session, Witness};
use crate::size::ByteSize;
use crate::usage;
use crate::workload;

/// Size of the store. All pages of the demo fit, so that every one must survive.
const STORE_BYTES: u64 = 1 << 30;

/// Chunks of 1 MiB that the disk is measured with.
const DEVICE_CHUNKS: u64 = 256;

/// Required space beyond the store. The file for measuring the disk is removed before the store is
/// created.
const SPARE_BYTES: u64 = 64 << 20;

/// Size of a page.
const PAGE_BYTES: ByteSize = ByteSize(1 << 20);

/// Parts of a page: K and V.
const PAGE_PARTS: u32 = 2;

/// Tokens of a page: with 1 MiB a page, the size for a model of 8 billion parameters.
const PAGE_TOKENS: u32 = 8;

/// Turns in each half; the kill comes between them.
const HALF_TURNS: u64 = 50;

/// Turns that the second process serves again.
const BESIDE_TURNS: u64 = 20;

/// Longest time for a half.
const HALF_TIME: Duration = Duration::from_secs(8);

/// Names the conversations.
const SEED: u64 = 20;

/// Demonstrate a store: a chat load, a kill, and the result
#[derive(Args, Debug)]
pub struct DemoArgs {
    /// Directory to work in, on the disk to try; needs 1.1 GiB [default: the system's directory for
    /// temporary files]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Keep the store, to look at it with the other commands
    #[arg(long)]
    keep: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// The half of the demo that is killed, or the second process of its end
#[derive(Args, Debug)]
pub struct WorkerArgs {
    /// The store
    store: PathBuf,
    /// Attach to it beside its owner, and serve the last of so many turns again
    #[arg(long, value_name = "TURNS")]
    beside: Option<u64>,
}

/// The result of the demo.
#[derive(Serialize)]
struct DemoReport {
    /// The store: its first volume, gone unless `kept`.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// The file system under it.
    filesystem: String,
    /// Whether the store was left in place.
    kept: bool,
    /// Bytes of the store, and of a page.
    capacity_bytes: u64,
    page_bytes: u64,
    /// Both halves together.
    #[serde(flatten)]
    counts: Counts,
    /// `pages_hit / pages_requested`.
    hit_rate: f64,
    /// Page bytes a second while the store was reading and writing, and the disk's own.
    get_bytes_per_second: f64,
    put_bytes_per_second: f64,
    device_read_bytes_per_second: f64,
    device_write_bytes_per_second: f64,
    /// Turns completed before the kill.
    killed_after_requests: u64,
    /// Pages acknowledged before the kill, and how many of them were found and right after it.
    acknowledged_pages: u64,
    survived_pages: u64,
    /// Time to open the store after the kill.
    reopen_seconds: f64,
    /// Pages that a second process requested beside the first, and how many of them it read from
    /// the pages that the first one had put.
    second_process_pages_requested: u64,
    second_process_pages_hit: u64,
    /// The disk that moved the bytes, and the reason for its choice.
    #[serde(flatten)]
    disk: DiskFacts,
}

impl Report for DemoReport {
    const COMMAND: &'static str = "demo";

    fn lines(&self) -> Lines {
        let counts = &self.counts;
        let mut lines = Lines::default();
        let store = self.path.display();
        let (page, capacity) = (ByteSize(self.page_bytes), ByteSize(self.capacity_bytes));
        lines.text(format!(
            "Served {} turns of made-up conversations from a store of {capacity}",
            counts.requests
        ));
        lines
            .text(format!(
                "in {store} ({}), pages of {page}.",
                self.filesystem
            ))
            .text("");
        rows! { lines:
            "Pages asked for" => "{}", counts.pages_requested;
            "  read, not computed" => "{} ({:.1} %)", counts.pages_hit, self.hit_rate * 100.0;
            "  new, written" => "{}", counts.pages_put;
            "Reading" => "{}", beside(self.get_bytes_per_second, self.device_read_bytes_per_second);
        }
        lines.row(
            "Writing",
            beside(
                self.put_bytes_per_second,
                self.device_write_bytes_per_second,
            ),
        );
        rows! { lines:
            "Killed (SIGKILL)" => "after turn {}, while serving the next",
                self.killed_after_requests;
            "  acknowledged before" => "{} pages", self.acknowledged_pages;
            "  found after" => "{} pages, compared byte by byte", self.survived_pages;
            "  reopened in" => "{:.0} ms", self.reopen_seconds * 1e3;
            "A second process" => "attached beside this one, and read {} of {} pages",
                self.second_process_pages_hit, self.second_process_pages_requested;
            "Wrong pages" => "{}", counts.wrong_pages;
        }
        lines.row("I/O", self.disk.to_string()).text("");
        if self.filesystem == "tmpfs" {
            lines.text(
                "This directory is memory, not a disk: give one on the disk to try with --dir.",
            );
        }
        if self.kept {
            let directory = self.path.parent().unwrap_or(&self.path).display();
            lines.text(format!(
                "The store is kept. Look at it:  larder inspect {store}"
            ));
            lines.text(format!("Remove it when done:            rm -r {directory}"));
        } else {
            lines.text("The store has been removed; --keep leaves it in place.");
        }
        lines
    }
}

/// `3.1 GiB/s, 94 % of the disk's own 3.3 GiB/s`.
fn beside(ours: f64, device: f64) -> String {
    let share = if device > 0.0 {
        ours / device * 100.0
    } else {
        0.0
    };
    format!(
        "{}, {share:.0} % of the disk's own {}",
        usage::rate(ours),
        usage::rate(device)
    )
}

/// The demo's own directory; removed when dropped, unless kept.
struct Place {
    directory: PathBuf,
    keep: bool,
}

impl Place {
    fn make(args: &DemoArgs) -> Result<Self, Failure> {
        let parent = args.dir.clone().unwrap_or_else(std::env::temp_dir);
        let directory = parent.join(format!("larder-demo-{}", std::process::id()));
        let failure = |doing: &str, error: &dyn std::fmt::Display| {
            Failure::environment(format!(
                "{}: {doing}: {error}; choose another directory with --dir",
                directory.display()
            ))
        };
        std::fs::create_dir(&directory).map_err(|error| failure("making the directory", &error))?;
        let place = Place {
            directory: directory.clone(),
            keep: args.keep,
        };
        let space = rustix::fs::statvfs(&directory)
            .map_err(|error| failure("asking for its free space", &error))?;
        let (free, needed) = (
            space.f_bavail.saturating_mul(space.f_frsize),
            STORE_BYTES + SPARE_BYTES,
        );
        if free < needed {
            let short = format!("{} needed, {} free", ByteSize(needed), ByteSize(free));
            return Err(failure("no space", &short));
        }
        Ok(place)
    }

    fn store(&self) -> PathBuf {
        self.directory.join("store")
    }

    fn filesystem(&self) -> String {
        File::open(&self.directory).map_or_else(
            |error| error.to_string(),
            |directory| probe::filesystem(&directory),
        )
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        if let Err(error) = std::fs::remove_dir_all(&self.directory) {
            complain(&format_args!(
                "{}: removing the directory: {error}; remove it by hand",
                self.directory.display()
            ));
        }
    }
}

/// Runs the command.
pub fn run(args: &DemoArgs, program: &Program) -> Result<Ending, Failure> {
    let interrupt = Interrupt::watch();
    let place = Place::make(args)?;
    let bar = report::progress(None, "{spinner} {msg}");
    let shown = show(&place, program, &bar, &interrupt);
    bar.finish_and_clear();
    let shown = shown?;
    // The store is not read after this. The table reports it as removed, which is true from here
    // on.
    drop(place);
    let Some(report) = shown else {
        return Ok(Ending::Interrupted);
    };
    report::print(&report, args.json)?;
    let lost = report.acknowledged_pages - report.survived_pages;
    Ok(if lost + report.counts.wrong_pages > 0 {
        Ending::Findings
    } else {
        Ending::Done
    })
}

/// The whole demo. `None` if the operator ended it.
fn show(
    place: &Place,
    program: &Program,
    bar: &ProgressBar,
    interrupt: &Interrupt,
) -> Result<Option<DemoReport>, Failure> {
    let tell = |what: &'static str| {
        bar.set_message(what);
        bar.tick();
    };
    let shape = workload::shape(PAGE_BYTES, PAGE_PARTS)?;
    tell("measuring the disk without the store");
    let device = device::measure(&place.directory, DEVICE_CHUNKS)?;
    tell("making the store");
    let options = CreateOptions::new(STORE_BYTES).with(|o| {
        o.prewrite = true;
    });
    larder_engine::create(&place.store(), &options)?;
    tell("serving conversations in a process that will be killed");
    let Some(before) = serve_and_kill(&place.store(), program, interrupt)? else {
        return Ok(None);
    };
    tell("reopening the store");
    let started = Instant::now();
    let store = Store::attach(&place.store(), OpenOptions::default())?;
    let reopen_seconds = started.elapsed().as_secs_f64();
    tell("looking for every page and serving on");
    let after = serve_on(&store, &shape, &before, interrupt).and_then(|(found, after)| {
        tell("serving from a second process beside this one");
        let served = before.counts.requests + after.counts.requests;
        let beside = serve_beside(&place.store(), program, served)?;
        Ok(After {
            found,
            half: after,
            beside,
            reopen_seconds,
        })
    });
    let disk = DiskFacts::of(&store.stats().disk);
    let closed = store.close();
    // The operator's signal ends the second process as well: that is no failure.
    if interrupt.is_raised() {
        return Ok(None);
    }
    let after = after?;
    closed?;
    Ok(Some(summary(place, device, &before, &after, disk)))
}

/// The results after the kill.
struct After {
    reopen_seconds: f64,
    found: Checked,
    half: Half,
    beside: Counts,
}

fn summary(
    place: &Place,
    device: DeviceSpeed,
    before: &Half,
    after: &After,
    disk: DiskFacts,
) -> DemoReport {
    let After {
        reopen_seconds,
        found,
        half: after,
        beside,
    } = after;
    let mut counts = before.counts + after.counts;
    counts.wrong_pages += found.wrong + beside.wrong_pages;
    let per_second = |pages: u64, seconds: f64| usage::per_second(pages * PAGE_BYTES.0, seconds);
    DemoReport {
        path: place.store(),
        filesystem: place.filesystem(),
        kept: place.keep,
        capacity_bytes: STORE_BYTES,
        page_bytes: PAGE_BYTES.0,
        counts,
        hit_rate: usage::ratio(counts.pages_hit, counts.pages_requested),
        get_bytes_per_second: per_second(counts.pages_hit, before.get_seconds + after.get_seconds),
        put_bytes_per_second: per_second(counts.pages_put, before.put_seconds + after.put_seconds),
        device_read_bytes_per_second: device.read,
        device_write_bytes_per_second: device.write,
        killed_after_requests: before.counts.requests,
        acknowledged_pages: before.acknowledged.len() as u64,
        survived_pages: found.right,
        reopen_seconds: *reopen_seconds,
        second_process_pages_requested: beside.pages_requested,
        second_process_pages_hit: beside.pages_hit,
        disk,
    }
}

/// The work of one process.
#[derive(Default)]
struct Half {
    counts: Counts,
    get_seconds: f64,
    put_seconds: f64,
    acknowledged: Vec<PageKey>,
}

/// The child's report after each turn: the pages acknowledged in it, and its totals so far.
#[derive(Serialize, Deserialize)]
struct TurnLine {
    acknowledged: Vec<String>,
    counts: Counts,
    get_seconds: f64,
    put_seconds: f64,
}

/// Keeps the keys of acknowledged pages.
impl Witness for Vec<PageKey> {
    fn hit(&mut self, _keys: &[PageKey]) -> Result<(), Failure> {
        Ok(())
    }

    fn acknowledged(&mut self, keys: &[PageKey]) -> Result<(), Failure> {
        self.extend(keys);
        Ok(())
    }
}

/// Serves turns in a child process and kills it in the middle of one. `None` if the operator ended
/// the demo.
fn serve_and_kill(
    store: &Path,
    program: &Program,
    interrupt: &Interrupt,
) -> Result<Option<Half>, Failure> {
    let failure = |error| child_failed(&error);
    let mut command = worker(store, program).map_err(failure)?;
    let mut child = command.spawn().map_err(failure)?;
    let read = match child.stdout.take() {
        Some(lines) => read_turns(lines, &mut child, interrupt),
        None => Err(io::Error::other("it has no stdout")),
    };
    // After an error it may still run; killing a process that has ended is no error.
    let killed = child.kill().and_then(|()| child.wait());
    let half = read.map_err(failure)?;
    killed.map_err(failure)?;
    if interrupt.is_raised() {
        return Ok(None);
    }
    half.map(Some).ok_or_else(gave_up)
}

fn worker(store: &Path, program: &Program) -> io::Result<Command> {
    let mut command = program.command()?;
    command
        .arg("demo-worker")
        .arg(store)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    Ok(command)
}

fn child_failed(error: &io::Error) -> Failure {
    Failure::environment(format!("the demo's child process: {error}; try again"))
}

fn gave_up() -> Failure {
    Failure::environment("the child process of the demo failed; see its messages above")
}

/// Serves the last turns again in a second process, which finds the store's owner here.
fn serve_beside(store: &Path, program: &Program, turns: u64) -> Result<Counts, Failure> {
    let failure = |error| child_failed(&error);
    let mut command = worker(store, program).map_err(failure)?;
    command.arg("--beside").arg(turns.to_string());
    command.stderr(Stdio::inherit());
    let told = command.output().map_err(failure)?;
    serde_json::from_slice(&told.stdout).map_err(|_| gave_up())
}

/// Reads the child's reports until it has done enough, kills it, and reads the rest of the pipe.
/// `None` when it ended by itself.
fn read_turns(
    lines: ChildStdout,
    child: &mut Child,
    interrupt: &Interrupt,
) -> io::Result<Option<Half>> {
    let started = Instant::now();
    let mut half = Half::default();
    let mut killed = false;
    for line in BufReader::new(lines).lines() {
        // The kill may cut the last line short.
        let Ok(turn) = serde_json::from_str::<TurnLine>(&line?) else {
            break;
        };
        let keys: Result<Vec<PageKey>, _> =
            turn.acknowledged.iter().map(|key| key.parse()).collect();
        half.acknowledged.extend(keys.map_err(io::Error::other)?);
        (half.counts, half.get_seconds, half.put_seconds) =
            (turn.counts, turn.get_seconds, turn.put_seconds);
        let enough = half.counts.requests >= HALF_TURNS || started.elapsed() >= HALF_TIME;
        if (enough || interrupt.is_raised()) && !killed {
            child.kill()?;
            killed = true;
        }
    }
    Ok(killed.then_some(half))
}

/// The second process: serves turns that another process has served, and reports the result.
fn work_beside(store: &Path, turns: u64) -> Result<Ending, Failure> {
    let shape = workload::shape(PAGE_BYTES, PAGE_PARTS)?;
    let store = Store::attach(store, OpenOptions::default())?;
    let namespace = store.namespace(&workload::namespace("demo", PAGE_TOKENS, shape)?)?;
    let mut session = Session::new(&store, namespace, &shape)?;
    let last = turns.min(BESIDE_TURNS);
    let first = usize::try_from(turns - last).unwrap_or(usize::MAX);
    let last = usize::try_from(last).unwrap_or(usize::MAX);
    for turn in Turns::new(SEED).skip(first).take(last) {
        session.serve(&workload::chain(&turn), &mut Vec::new())?;
    }
    let told = serde_json::to_string(&session.counts).map_err(io::Error::other);
    let told = told.and_then(|counts| {
        let mut out = io::stdout().lock();
        out.write_all(counts.as_bytes())?;
        // The end of a Python process writes nothing that is buffered here.
        out.flush()
    });
    drop(session);
    store.close()?;
    told.map_err(|error| child_failed(&error))?;
    Ok(Ending::Done)
}

/// The killed half: serves turns and reports them, until it is killed or the pipe is closed.
pub fn work(args: &WorkerArgs) -> Result<Ending, Failure> {
    if let Some(turns) = args.beside {
        return work_beside(&args.store, turns);
    }
    let shape = workload::shape(PAGE_BYTES, PAGE_PARTS)?;
    let store = Store::open(&args.store, OpenOptions::default())?;
    let namespace = store.namespace(&workload::namespace("demo", PAGE_TOKENS, shape)?)?;
    let mut session = Session::new(&store, namespace, &shape)?;
    for turn in Turns::new(SEED) {
        let mut acknowledged: Vec<PageKey> = Vec::new();
        session.serve(&workload::chain(&turn), &mut acknowledged)?;
        let line = TurnLine {
            acknowledged: acknowledged.iter().map(PageKey::to_string).collect(),
            counts: session.counts,
            get_seconds: session.gets.seconds(),
            put_seconds: session.puts.seconds(),
        };
        let told = serde_json::to_string(&line).map_err(io::Error::other);
        let told = told.and_then(|line| io::stdout().lock().write_all((line + "\n").as_bytes()));
        if told.is_err() {
            break;
        }
    }
    store.close()?;
    Ok(Ending::Done)
}

/// Looks for every page acknowledged before the kill, then serves the following turns, the
/// interrupted one first.
fn serve_on(
    store: &dyn PageStore,
    shape: &PageShape,
    before: &Half,
    interrupt: &Interrupt,
) -> Result<(Checked, Half), Failure> {
    let namespace = store.namespace(&workload::namespace("demo", PAGE_TOKENS, *shape)?)?;
    let mut session = Session::new(store, namespace, shape)?;
    let found = session.check(&before.acknowledged);
    let started = Instant::now();
    let mut half = Half::default();
    let done = usize::try_from(before.counts.requests).unwrap_or(usize::MAX);
    for turn in Turns::new(SEED).skip(done) {
        let enough = session.counts.requests >= HALF_TURNS || started.elapsed() >= HALF_TIME;
        if enough || interrupt.is_raised() {
            break;
        }
        session.serve(&workload::chain(&turn), &mut half.acknowledged)?;
    }
    half.counts = session.counts;
    (half.get_seconds, half.put_seconds) = (session.gets.seconds(), session.puts.seconds());
    Ok((found, half))
}

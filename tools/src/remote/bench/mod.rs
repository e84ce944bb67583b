//! `larder remote bench`: the speed of publications and fetches, beside the client of the object
//! store alone, and the cost of an idle L4 for a store.
//!
//! All ways move as many bytes in as many objects, to and from the same server, in turns within a
//! round. A publication reads the pages of a store, encrypts them and creates an object. A fetch
//! gets an object, verifies it and puts its pages into another store: both as the agent of `larder
//! serve --l4` does them. The client alone moves bytes of memory. The bare program also reads its
//! bytes from the disk and encrypts them, or verifies and writes them: it shows the limit of the
//! machine. The CPU time of the encryption, and of the stores, is measured apart: that of a
//! publication or fetch above the client's cannot be less.
//!
//! Each way begins after a sync of the stores' file system. A server on the same disk holds bytes
//! in memory that it has acknowledged: their writes belong to the way before.
//!
//! Scratch stores and objects are removed at the end. A signal ends each wait.
//!
//! A module imports only modules below it.
//!
//! | module | content |
//! |---|---|
//! | `scratch` | the stores of a measurement, and their agents |
//! | `bare` | bare publications and fetches |
//! | `objects` | the objects of a measurement, and a client of them |
//! | `pairs` | measurements in pairs, and the ratios of pairs |

mod bare;
mod objects;
mod pairs;
mod scratch;

use std::path::PathBuf;

use clap::Args;
use indicatif::ProgressBar;
use larder_remote::agent::PUBLICATIONS;
use serde::Serialize;

use super::place::{ConnectionsArgs, PlaceArgs, TrustArgs};
use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::report::{self, Lines, Report};
use crate::size::ByteSize;
use crate::usage::rate;
use objects::Objects;
use pairs::{Pairs, RatioReport, Sample, Stop};
use scratch::Scratch;

/// Pairs of the measurement of an idle L4.
const IDLE_PAIRS: u32 = 9;

/// Pages of the chains that it puts and gets, in runs.
const IDLE_RUNS: u64 = 2;

/// Measure publications and fetches, beside the client of the object store alone
///
/// Makes scratch stores and objects, and removes them.
#[derive(Args, Debug)]
pub struct BenchArgs {
    /// A directory for the scratch stores, on the disk of the store
    #[arg(value_name = "DIRECTORY")]
    directory: PathBuf,
    #[command(flatten)]
    place: PlaceArgs,
    #[command(flatten)]
    trust: TrustArgs,
    #[command(flatten)]
    connections: ConnectionsArgs,
    /// Bytes of a run
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "32MiB",
        help_heading = "Expert settings"
    )]
    run_bytes: ByteSize,
    /// Size of a page
    #[arg(long, value_name = "SIZE", default_value = "2MiB")]
    page_bytes: ByteSize,
    /// Runs of a round
    #[arg(long, value_name = "N", default_value_t = 8, help_heading = "Expert settings",
        value_parser = clap::value_parser!(u64).range(1..=1024))]
    runs: u64,
    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 5, help_heading = "Expert settings",
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct BenchReport {
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    remote: String,
    run_bytes: u64,
    page_bytes: u64,
    runs: u64,
    connections: usize,
    rounds: u32,
    publish: WayReport,
    fetch: WayReport,
    bare_publish: BareReport,
    bare_fetch: BareReport,
    idle_put: RatioReport,
    idle_get: RatioReport,
    interrupted: bool,
}

/// One way, with the client alone beside it.
#[derive(Serialize)]
struct WayReport {
    bytes_per_second: f64,
    alone_bytes_per_second: f64,
    speed: RatioReport,
    cpu_seconds_per_gib: f64,
    alone_cpu_seconds_per_gib: f64,
    encryption_cpu_seconds_per_gib: f64,
    store_cpu_seconds_per_gib: f64,
}

/// One way, by the bare program.
#[derive(Serialize)]
struct BareReport {
    bytes_per_second: f64,
    cpu_seconds_per_gib: f64,
    /// Of the agent's way to the bare one.
    speed: RatioReport,
}

impl WayReport {
    /// Of the pairs of a way, with the CPU time of its encryption and of its store.
    fn of(pairs: &Pairs, encryption: Sample, store: Sample) -> WayReport {
        let (ours, alone) = pairs.sums();
        WayReport {
            bytes_per_second: ours.bytes_per_second(),
            alone_bytes_per_second: alone.bytes_per_second(),
            speed: pairs.ratios(),
            cpu_seconds_per_gib: ours.cpu_seconds_per_gib(),
            alone_cpu_seconds_per_gib: alone.cpu_seconds_per_gib(),
            encryption_cpu_seconds_per_gib: encryption.cpu_seconds_per_gib(),
            store_cpu_seconds_per_gib: store.cpu_seconds_per_gib(),
        }
    }

    fn lines(&self, what: &str, of_store: &str, lines: &mut Lines) {
        let speeds = format!(
            "{}; the client alone {}; ratio {}",
            rate(self.bytes_per_second),
            rate(self.alone_bytes_per_second),
            self.speed
        );
        lines.row(what, speeds);
        let cpu = format!(
            "{:.2} s/GiB; the client alone {:.2}; {:.2} above it (cipher {:.2}, {of_store} {:.2})",
            self.cpu_seconds_per_gib,
            self.alone_cpu_seconds_per_gib,
            self.cpu_seconds_per_gib - self.alone_cpu_seconds_per_gib,
            self.encryption_cpu_seconds_per_gib,
            self.store_cpu_seconds_per_gib,
        );
        lines.row("  CPU", cpu);
    }
}

impl BareReport {
    /// Of pairs of the agent's way and the bare one.
    fn of(pairs: &Pairs) -> BareReport {
        let (_, bare) = pairs.sums();
        BareReport {
            bytes_per_second: bare.bytes_per_second(),
            cpu_seconds_per_gib: bare.cpu_seconds_per_gib(),
            speed: pairs.ratios(),
        }
    }

    fn lines(&self, lines: &mut Lines) {
        let speeds = format!(
            "{}, {:.2} CPU s/GiB; ratio {}",
            rate(self.bytes_per_second),
            self.cpu_seconds_per_gib,
            self.speed
        );
        lines.row("  Bare", speeds);
    }
}

impl Report for BenchReport {
    const COMMAND: &'static str = "remote bench";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        let bytes = ByteSize(self.run_bytes);
        let runs = format!(
            "{} of {bytes}, {} rounds; {PUBLICATIONS} published at once, {} fetched",
            self.runs, self.rounds, self.connections
        );
        lines.row("Runs", runs);
        self.publish.lines("Publish", "get", &mut lines);
        self.bare_publish.lines(&mut lines);
        self.fetch.lines("Fetch", "put", &mut lines);
        self.bare_fetch.lines(&mut lines);
        let idle = "of the speed without one";
        lines.row("Put, L4 idle", format!("{} {idle}", self.idle_put));
        lines.row("Get, L4 idle", format!("{} {idle}", self.idle_get));
        if self.interrupted {
            lines.text("Interrupted: fewer rounds were measured.");
        }
        lines
    }
}

/// The results until now.
#[derive(Default)]
struct Found {
    publish: Pairs,
    fetch: Pairs,
    /// The same beside bare ones.
    bare_publish: Pairs,
    bare_fetch: Pairs,
    /// A store over an idle L4, and one without.
    put: Pairs,
    get: Pairs,
    /// Encrypting runs, and opening them.
    encrypt: Sample,
    open: Sample,
}

/// Runs the command.
///
/// # Errors
/// The remote fails, or the directory takes no store.
pub fn run(args: &BenchArgs) -> Result<Ending, Failure> {
    let interrupt = Interrupt::watch();
    let objects = Objects::new(
        (&args.place, &args.trust),
        args.connections.at_once(),
        (args.runs, args.run_bytes.0),
        &interrupt,
    )?;
    let mut found = Found::default();
    let outcome = measure(args, &objects, &interrupt, &mut found);
    let removed = objects.remove();
    if let Err(Stop::Failed(failure)) = outcome {
        return Err(failure);
    }
    removed?;
    let report = BenchReport {
        path: args.directory.clone(),
        remote: args.place.url.clone(),
        run_bytes: args.run_bytes.0,
        page_bytes: args.page_bytes.0,
        runs: args.runs,
        connections: args.connections.at_once(),
        rounds: args.rounds,
        publish: WayReport::of(&found.publish, found.encrypt, found.get.sums().1),
        fetch: WayReport::of(&found.fetch, found.open, found.put.sums().1),
        bare_publish: BareReport::of(&found.bare_publish),
        bare_fetch: BareReport::of(&found.bare_fetch),
        idle_put: found.put.ratios(),
        idle_get: found.get.ratios(),
        interrupted: outcome.is_err(),
    };
    report::print(&report, args.json)?;
    Ok(Ending::Done.or_interrupted(report.interrupted))
}

fn measure(
    args: &BenchArgs,
    objects: &Objects,
    interrupt: &Interrupt,
    found: &mut Found,
) -> Result<(), Stop> {
    let mut scratch = Scratch::new(args, objects, interrupt)?;
    let outcome = rounds(args, objects, &mut scratch, found);
    let closed = scratch.close();
    outcome?;
    Ok(closed?)
}

fn rounds(
    args: &BenchArgs,
    objects: &Objects,
    scratch: &mut Scratch,
    found: &mut Found,
) -> Result<(), Stop> {
    let steps = 6 * u64::from(args.rounds) + u64::from(IDLE_PAIRS);
    let bar = report::progress(Some(steps), "{msg} {wide_bar} {pos}/{len}");
    (found.encrypt, found.open) = scratch.encryption(objects)?;
    for round in 0..args.rounds {
        self::round(scratch, objects, round, found, &bar)?;
    }
    bar.set_message("idle");
    let mut idle = scratch.idle(objects, IDLE_RUNS)?;
    let measured = (0..IDLE_PAIRS).try_for_each(|pair| {
        let (plain, over) = idle.pair(pair)?;
        found.put.add(over.put, plain.put);
        found.get.add(over.get, plain.get);
        bar.inc(1);
        Ok(())
    });
    let closed = idle.close();
    bar.finish_and_clear();
    measured.and(closed.map_err(Stop::from))
}

/// Publishes and fetches new runs, and moves as many bytes by the bare program and by the client
/// alone: each of them first, in turns.
fn round(
    scratch: &mut Scratch,
    objects: &Objects,
    round: u32,
    found: &mut Found,
    bar: &ProgressBar,
) -> Result<(), Stop> {
    let chain = scratch.put_chain(u64::from(round))?;
    let directory = scratch.directory().to_owned();
    let measured = |what: &'static str, work: &mut dyn FnMut() -> Result<Sample, Stop>| {
        bar.set_message(what);
        scratch::settle(&directory)?;
        let sample = work();
        bar.inc(1);
        sample
    };
    let runs = scratch.bare_runs(round)?;
    let (mut ours, mut bare, mut alone) = <(Sample, Sample, Sample)>::default();
    for way in 0..3 {
        match (round + way) % 3 {
            0 => alone = measured("client alone", &mut || objects.put_alone(round))?,
            1 => bare = measured("bare", &mut || scratch.bare.publish(objects, &runs))?,
            _ => ours = measured("publish", &mut || scratch.publish(&chain))?,
        }
    }
    found.publish.add(ours, alone);
    found.bare_publish.add(ours, bare);
    for way in 0..3 {
        match (round + way) % 3 {
            0 => ours = measured("fetch", &mut || scratch.fetch(objects, &chain))?,
            1 => bare = measured("bare", &mut || scratch.bare.fetch(objects, &runs))?,
            _ => alone = measured("client alone", &mut || objects.get_alone(round))?,
        }
    }
    found.fetch.add(ours, alone);
    found.bare_fetch.add(ours, bare);
    Ok(())
}

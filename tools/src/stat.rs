//! `larder stat`: asks the owner of a store for its state.

mod curve;
pub mod processes;
pub mod spaces;

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use larder_base::latency::Buckets;
use larder_core::counters::{Counted, Counts, Latencies, StoreCounts, Value};
use larder_engine::{CodecChoice, LatencySummary, Stats};
use larder_store::beneath::BeneathReport;
use larder_store::quotas::QuotaReport;
use larder_store::share;
use larder_store::share::{VolumeDamage, VolumeState};
use larder_store::spaces::{SpaceAges, Tokens};
use serde::Serialize;

use crate::disk::DiskFacts;
use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::metrics;
use crate::owner::{
    answering_line, damaged_line, damaged_pages_line, displaced_line, ended_line, eviction_line,
    lifetimes_line, monthly, pacing_line, process, quota_line, stopped_line, unread_quotas_line,
    unserved,
};
use crate::place;
use crate::program::complain;
use crate::report::{self as output, Lines, Report, rows};
use crate::size::{ByteSize, Time};
use processes::{Before, Processes};

/// Shortest pause between two reports, to keep the load on the owner low.
const PAUSE_MIN: Duration = Duration::from_millis(10);

/// Show the counters of a store and of each process that uses it
#[derive(Args, Debug)]
pub struct StatArgs {
    /// The store: its first volume, or a backend's directory
    #[arg(value_parser = place::parser())]
    path: PathBuf,
    /// Repeat the report, every so many seconds, until stopped, also under the next owner
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1")]
    watch: Option<f64>,
    /// Check the service, for probes: exit code 0 if the store is served, 1 if the service is
    /// degraded, 3 if the store has no owner
    #[arg(long, conflicts_with = "watch")]
    check: bool,
    /// End with 0 also if the service is degraded: for probes whose failure restarts the owner
    #[arg(long, requires = "check")]
    alive: bool,
    /// Show the hit rate that the store would have at other sizes, too
    #[arg(long, conflicts_with_all = ["check", "openmetrics"])]
    curve: bool,
    /// Print metrics in the text format of OpenMetrics, for a textfile collector
    #[arg(long, conflicts_with_all = ["watch", "check", "json"])]
    openmetrics: bool,
    /// Print JSON documents
    #[arg(long)]
    json: bool,
}

/// An owner's answer. Counters count since it opened the store.
#[derive(Serialize)]
struct StatReport {
    /// The store: its first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// The owner's process, if it is visible here, and the bytes of its memory in RAM.
    pid: Option<u32>,
    rss_bytes: u64,
    /// Its release and the catalog protocol that it speaks.
    protocol: larder_store::protocol::Protocol,
    /// Version of the on-disk format.
    format_version: u32,
    /// When the owner opened the store.
    started_unix_s: f64,
    /// Clients attached.
    clients: u32,
    /// The same by release.
    releases: Vec<share::wire::ReleaseCount>,
    /// Clients that are gone, and whose writes may still be in flight.
    lingering_clients: u32,
    /// The memory through which clients share their reads.
    staging: larder_store::staging::StagingReport,
    /// Pages that clients are reading, and puts of clients in flight.
    reads_in_flight: u64,
    puts_in_flight: u64,
    /// Pages of puts that were given up because their client was silent (stopped, for example), and
    /// whose writes may still be in flight.
    adrift_pages: u64,
    /// Processes that compact the store.
    compactions: u32,
    /// The settings of all processes that use the store: the time at which puts are durable, the
    /// protection of pages by a lookup, whether unused blocks are written beforehand, and whether
    /// puts encode pages.
    sync: String,
    lease_seconds: f64,
    prewrite: bool,
    codec: CodecChoice,
    write_budget: String,
    /// The same in bytes.
    write_budget_bytes_a_day: Option<u64>,
    #[serde(flatten)]
    processes: Processes,
    /// Volumes whose paths no longer lead to the files that the owner serves.
    displaced_volumes: Vec<share::DisplacedVolume>,
    /// The volumes that do not hold what the store wrote.
    damaged_volumes: Vec<share::DamagedVolume>,
    /// How each volume answers, over all processes. Empty if that is not measured.
    answering_volumes: Vec<share::AnsweringVolume>,
    /// Clients that are stopped in the middle of reads or puts.
    stopped_clients: Vec<share::StoppedClient>,
    /// The last client that ended in the middle of puts.
    ended_client: Option<share::EndedClient>,
    totals: TotalCounts,
    /// Its namespaces, the largest ones first.
    namespaces: Vec<spaces::Space>,
    /// Its `disk` is the disk alone.
    #[serde(flatten)]
    stats: Stats,
    /// The reason for that disk.
    disk_reason: String,
    /// The hit rate at other sizes, and whether it is shown to people.
    curve: curve::Curve,
    #[serde(skip)]
    shows_curve: bool,
    /// The remote beneath the store, if there is one.
    l4: Option<BeneathReport>,
    /// The quotas of the store.
    quotas: QuotaReport,
}

/// Counters of all processes, under this owner and the owners before it.
#[derive(Serialize)]
struct TotalCounts {
    counts: Counts,
    pages_missed: u64,
    /// Tokens of requests.
    tokens: Tokens,
    /// Ages of pages, in all namespaces.
    ages: SpaceAges,
    /// The times of calls and of device operations, by their name.
    latencies: BTreeMap<&'static str, CallTimes>,
    #[serde(flatten)]
    store: StoreCounts,
}

/// The times of one kind of call or operation, from a histogram: each but the mean is a bound.
#[derive(Serialize)]
struct CallTimes {
    count: u64,
    mean_seconds: f64,
    p50_seconds: Option<f64>,
    p99_seconds: Option<f64>,
    max_seconds: Option<f64>,
}

impl CallTimes {
    fn of(times: &Buckets) -> CallTimes {
        let bound = |part| times.bound(part).map(|bound| bound.as_secs_f64());
        CallTimes {
            count: times.count(),
            mean_seconds: times.mean().as_secs_f64(),
            p50_seconds: bound(0.5),
            p99_seconds: bound(0.99),
            max_seconds: bound(1.0),
        }
    }
}

impl fmt::Display for CallTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.count == 0 {
            return f.write_str("none measured");
        }
        let time = |seconds| Time(Duration::from_secs_f64(seconds)).to_string();
        let bound = |seconds: Option<f64>| match seconds {
            Some(seconds) => format!("up to {}", time(seconds)),
            None => "over 10 s".to_owned(),
        };
        write!(
            f,
            "{} measured: mean {}, half of them {}, 99 % {}, the longest {}",
            self.count,
            time(self.mean_seconds),
            bound(self.p50_seconds),
            bound(self.p99_seconds),
            bound(self.max_seconds)
        )
    }
}

/// The times of all kinds.
fn call_times(latencies: &Latencies) -> BTreeMap<&'static str, CallTimes> {
    let rows = latencies.rows().into_iter();
    let times = rows.filter_map(|(row, value)| match value {
        Value::Times(times) => Some((row.name, CallTimes::of(times))),
        Value::Count(_) => None,
    });
    times.collect()
}

impl StatReport {
    /// Asks the owner.
    fn of(path: &Path, before: &mut Before) -> Result<StatReport, Failure> {
        let view = share::view(path).map_err(|error| unserved(path, error))?;
        let namespaces = spaces::spaces(&view);
        let curve = curve::Curve::of(&view);
        let mut told = view.report;
        let DiskFacts { disk, disk_reason } = DiskFacts::of(&told.stats.disk);
        told.stats.disk = disk;
        Ok(StatReport {
            processes: Processes::of(&told, before),
            totals: TotalCounts {
                counts: told.totals.counts,
                pages_missed: told.totals.counts.misses.total(),
                tokens: told.totals.spaces.total().tokens,
                ages: told.totals.ages.total(),
                latencies: call_times(&told.totals.latencies),
                store: told.totals.store,
            },
            namespaces,
            displaced_volumes: told.displaced_volumes,
            damaged_volumes: told.damaged_volumes,
            answering_volumes: told.answering_volumes,
            stopped_clients: told.stopped_clients,
            ended_client: told.ended_client,
            path: path.to_owned(),
            pid: told.pid,
            rss_bytes: told.rss_bytes,
            protocol: told.protocol,
            format_version: told.format_version,
            started_unix_s: told.started_unix_s,
            clients: told.clients,
            releases: told.releases,
            lingering_clients: told.lingering,
            reads_in_flight: told.reads_in_flight,
            puts_in_flight: told.puts_in_flight,
            adrift_pages: told.pages_adrift,
            compactions: told.compactions,
            staging: told.staging,
            sync: told.settings.sync.to_string(),
            lease_seconds: told.settings.lease.as_secs_f64(),
            prewrite: told.settings.prewrite,
            codec: told.settings.codec,
            write_budget: told.settings.write_budget.to_string(),
            write_budget_bytes_a_day: (told.settings.write_budget)
                .bytes_a_day(told.stats.capacity_bytes),
            stats: told.stats,
            disk_reason,
            curve,
            shows_curve: false,
            l4: told.beneath,
            quotas: told.quotas,
        })
    }
}

impl Report for StatReport {
    const COMMAND: &'static str = "stat";

    fn lines(&self) -> Lines {
        let stats = &self.stats;
        let size = |bytes| ByteSize(bytes).to_string();
        let mut lines = Lines::default();
        rows! { lines:
            "Owner" => "{}, {} of RAM, {}, format {}",
                process(self.pid), size(self.rss_bytes), self.protocol, self.format_version;
            "Clients" =>
                "{}; {} pages being read, {} puts in flight; disconnected with unfinished writes: \
                {}",
                self.clients, self.reads_in_flight, self.puts_in_flight, self.lingering_clients;
        }
        // Of interest in the middle of an upgrade alone.
        for of in &self.releases {
            if of.release != self.protocol.release {
                rows! { lines:
                    "  of release" => "{}: {}, protocol {}", of.release, of.clients, of.version;
                }
            }
        }
        if self.adrift_pages > 0 {
            rows! { lines:
                "Aborted" =>
                    "puts of {} pages by silent clients whose writes may be unfinished; is a \
                    client stopped?",
                    self.adrift_pages;
            }
        }
        for client in &self.stopped_clients {
            lines.row("Stopped", stopped_line(client));
        }
        if let Some(client) = &self.ended_client {
            lines.row("Ended", ended_line(client));
        }
        if self.compactions > 0 {
            lines.row("Compaction", "under way: see the pages moved below");
        }
        rows! { lines:
            "Settings" => "sync {}, lease {} s, prewrite {}, codec {}, write budget {}",
                self.sync, self.lease_seconds, self.prewrite, self.codec, self.write_budget;
        }
        if stats.prewritten_bytes > 0 {
            let written = size(stats.prewritten_bytes);
            lines.row("Prewritten", format!("{written} before their first use"));
        }
        rows! { lines:
            "Pages" => "{}, {}; {} of {} usable in use",
                stats.pages, size(stats.live_bytes), size(stats.taken_bytes),
                size(stats.usable_bytes);
        }
        for volume in &self.answering_volumes {
            lines.row("Volume", answering_line(volume));
        }
        for volume in &self.displaced_volumes {
            lines.row("Displaced", displaced_line(volume));
        }
        for volume in &self.damaged_volumes {
            lines.row("Damaged", damaged_line(volume));
        }
        if let Some(pages) = damaged_pages_line(stats) {
            lines.row("Damaged", pages);
        }
        if let Some(fault) = &self.quotas.fault {
            lines.row("Quotas", unread_quotas_line(fault));
        }
        for group in &self.quotas.groups {
            lines.row("Quota", quota_line(group));
        }
        if let Some(line) = lifetimes_line(&self.quotas) {
            lines.row("Lifetimes", line);
        }
        for volume in &stats.read_only_volumes {
            rows! { lines:
                "Read-only" => "{} refuses writes: {}; {} puts refused",
                    volume.path.display(), volume.reason, stats.puts_refused_read_only;
            }
        }
        let puts = &self.totals.counts;
        let unreadable = match stats.unreadable_segments {
            0 => String::new(),
            some => format!(", {some} that cannot be read or written"),
        };
        rows! { lines:
            "Segments" => "{}, {} free, {} open, {} sealed, {} being emptied{unreadable}",
                stats.segments, stats.free_segments, stats.open_segments, stats.sealed_segments,
                stats.reclaiming_segments;
            "Put" =>
                "{} pages, {}; {} duplicates, {} refused, {} failed, {} given up by clients that \
                ended or were stopped",
                puts.pages_put, size(puts.bytes_put), puts.duplicates, puts.refused, puts.failed,
                self.totals.store.aborted;
        }
        if !self.processes.are_listed() {
            rows! { lines:
                "Reads of the owner process" => "{} hits, {} misses", stats.hits, stats.misses;
            }
        }
        lines.row("Tokens", spaces::tokens_line(&self.totals.tokens));
        for (name, ages) in [
            ("Age at a read", &self.totals.ages.used),
            ("Age at eviction", &self.totals.ages.evicted),
        ] {
            if ages.pages() > 0 {
                lines.row(name, spaces::ages_line(ages));
            }
        }
        let staging = &self.staging;
        if staging.area_bytes > 0 {
            rows! { lines:
                "Shared reads" =>
                    "{} loaded, {} hits, {} waits, {} timed out; {} wrong checksums, {} without \
                    memory",
                    staging.fills, staging.hits, staging.waits, staging.timeouts,
                    staging.mismatches, staging.crowded;
                "  through" => "{} of memory, {} in use by {} pages",
                    size(staging.area_bytes), size(staging.used_bytes), staging.pages;
            }
        }
        let amplified = match stats.bytes_put {
            0 => String::new(),
            _ => format!(
                ", {:.2} times the bytes of puts",
                stats.write_amplification()
            ),
        };
        rows! { lines:
            "Removed" => "{} evicted, {} deleted, {} damaged, {} unfinished",
                stats.evicted, stats.deleted, stats.damaged, stats.unfinished;
            "Eviction" => "{}", eviction_line(stats);
            "Written" => "{}{amplified}; {} pages moved, {} segments reclaimed",
                size(stats.bytes_written), stats.moved, stats.reclaimed;
            "Syncs" => "{}, {} failed", stats.syncs, stats.failed_syncs;
        }
        for (operations, name) in [
            ("Device reads", "device_read"),
            ("Device writes", "device_write"),
            ("Device syncs", "device_sync"),
            ("Puts", "put"),
            ("Gets", "get"),
            ("Lookups", "lookup"),
        ] {
            let times = &self.totals.latencies[name];
            lines.row(operations, times.to_string());
        }
        lines.row(
            "Queue of the owner's writes",
            latency_line(&stats.put_wait_latency),
        );
        lines.row("Pacing", pacing_line(stats));
        if let Some(l4) = &self.l4 {
            l4_lines(l4, &mut lines);
        }
        lines.row("Index", size(stats.index_bytes));
        let disk = DiskFacts {
            disk: stats.disk.clone(),
            disk_reason: self.disk_reason.clone(),
        };
        lines.row("Disk", disk.to_string());
        if !self.namespaces.is_empty() {
            lines.text("");
            spaces::lines(&self.namespaces, &mut lines);
        }
        if self.shows_curve {
            lines.text("");
            self.curve.lines(&mut lines);
        }
        if self.processes.are_listed() {
            lines.text("");
            self.processes.lines(&mut lines);
        }
        lines
    }
}

/// The remote beneath the store, for people.
fn l4_lines(l4: &BeneathReport, lines: &mut Lines) {
    let of = |name: &str| l4.counts.get(name).copied().unwrap_or_default();
    let size = |name: &str| ByteSize(of(name));
    lines.row("L4", format!("{}, {}", l4.place, l4.state));
    if let Some(cost) = monthly(l4) {
        lines.row("  cost", cost);
    }
    rows! { lines:
        "  published" =>
            "{} runs, {}; {} there already, {} waiting; dropped: {} for the queue, {} for a \
            budget, {} not stored any more, {} failed",
            of("published_runs"), size("published_bytes"), of("present_runs"), of("waiting_runs"),
            of("dropped_queue_runs"), of("dropped_budget_runs"), of("dropped_absent_runs"),
            of("dropped_failed_runs");
        "  fetched" =>
            "{} runs, {}, at {} a second; {} pages stored, {} refused, {} faulty; {} faulty runs, \
            {} gone, {} late, {} failed, {} too slow",
            of("fetched_runs"), size("fetched_bytes"), size("speed_bytes_per_s"),
            of("stored_pages"), of("refused_pages"), of("faulty_pages"), of("faulty_runs"),
            of("gone_runs"), of("late_runs"), of("failed_fetches"), of("too_slow_runs");
    }
}

/// A latency, for people.
fn latency_line(latency: &LatencySummary) -> String {
    let LatencySummary {
        count,
        p50_us,
        p90_us,
        p99_us,
        p999_us,
        max_us,
    } = latency;
    if *count == 0 {
        return "none measured".to_owned();
    }
    let time = |us: &f64| Time(Duration::from_secs_f64(us / 1e6));
    format!(
        "{count} measured: p50 {}, p90 {}, p99 {}, p99.9 {}, max {}",
        time(p50_us),
        time(p90_us),
        time(p99_us),
        time(p999_us),
        time(max_us)
    )
}

/// The health of a store's service.
#[derive(Serialize)]
struct CheckReport {
    /// The store: its first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// The owner's process, if it is visible here.
    pid: Option<u32>,
    /// The problems. Empty if there are none.
    troubles: Vec<String>,
    /// Faults beside which the store is served in full.
    warnings: Vec<String>,
}

impl Report for CheckReport {
    const COMMAND: &'static str = "stat check";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        let owner = process(self.pid);
        if self.troubles.is_empty() {
            lines.text(format!("serving: {owner}"));
        }
        for trouble in &self.troubles {
            lines.text(format!("degraded: {owner}: {trouble}"));
        }
        for warning in &self.warnings {
            lines.text(format!("warning: {warning}"));
        }
        lines
    }
}

/// Obstacles to normal service of the store.
pub fn troubles(told: &share::Report) -> Vec<String> {
    let unreadable = told.stats.unreadable_segments;
    let disk = (unreadable > 0).then(|| {
        format!(
            "{unreadable} segments cannot be read or written: check the disk, and the owner's log"
        )
    });
    let read_only = told.stats.read_only_volumes.iter().map(|volume| {
        format!(
            "{}: in read-only service, the device refuses writes ({})",
            volume.path.display(),
            volume.reason
        )
    });
    let displaced = told.displaced_volumes.iter().map(displaced_line);
    let damaged = told.damaged_volumes.iter();
    let damaged = damaged.filter(|volume| volume.damage != VolumeDamage::AtOpen);
    let late = told.answering_volumes.iter();
    let late = late.filter(|volume| volume.state != VolumeState::Answering);
    let quotas = told.quotas.fault.as_deref().map(unread_quotas_line);
    let disk = disk.into_iter().chain(quotas);
    let of_the_disk = disk.chain(late.map(answering_line));
    let stopped = told.stopped_clients.iter().map(stopped_line);
    let of_files = read_only.chain(displaced).chain(damaged.map(damaged_line));
    of_the_disk.chain(of_files).chain(stopped).collect()
}

/// Faults beside which the store is served in full.
pub fn warnings(told: &share::Report) -> Vec<String> {
    let damaged = told.damaged_volumes.iter();
    let at_open = damaged.filter(|volume| volume.damage == VolumeDamage::AtOpen);
    let remote = told.beneath.iter().filter(|l4| !l4.works);
    let remote = remote.map(|l4| format!("the remote {}: {}", l4.place, l4.state));
    let of_pages = damaged_pages_line(&told.stats).into_iter();
    let ended = told.ended_client.iter().map(ended_line);
    at_open
        .map(damaged_line)
        .chain(of_pages)
        .chain(remote)
        .chain(ended)
        .collect()
}

fn check(path: &Path, is_alive_enough: bool, json: bool) -> Result<Ending, Failure> {
    let told = share::report(path).map_err(|error| unserved(path, error))?;
    let report = CheckReport {
        path: path.to_owned(),
        pid: told.pid,
        troubles: troubles(&told),
        warnings: warnings(&told),
    };
    output::print(&report, json)?;
    Ok(Ending::Done.or_findings(!report.troubles.is_empty() && !is_alive_enough))
}

/// Runs the command.
pub fn run(args: &StatArgs) -> Result<Ending, Failure> {
    if args.check {
        return check(&args.path, args.alive, args.json);
    }
    if args.openmetrics {
        output::print_text(&metrics::text(&args.path)?)?;
        return Ok(Ending::Done);
    }
    let pause = args.watch.map(pause).transpose()?;
    let interrupt = Interrupt::watch();
    let mut before = Before::default();
    let mut report = StatReport::of(&args.path, &mut before)?;
    loop {
        report.shows_curve = args.curve;
        output::print(&report, args.json)?;
        let mut last_failure = String::new();
        report = loop {
            match pause {
                Some(pause) if !interrupt.wait(pause) => {}
                _ => return Ok(Ending::Done),
            }
            match StatReport::of(&args.path, &mut before) {
                Ok(report) => break report,
                // A watch goes on: another process may be taking the store over.
                Err(failure) => {
                    let why = failure.to_string();
                    if why != last_failure {
                        complain(&why);
                        last_failure = why;
                    }
                }
            }
        };
        if !end_report()? {
            return Ok(Ending::Done);
        }
    }
}

/// The document of a store's counters.
///
/// # Errors
/// If the store has no owner that answers.
pub fn document(path: &Path) -> Result<serde_json::Value, Failure> {
    output::document(&StatReport::of(path, &mut Before::default())?)
}

/// The pause between two reports.
fn pause(seconds: f64) -> Result<Duration, Failure> {
    match Duration::try_from_secs_f64(seconds) {
        Ok(pause) if pause >= PAUSE_MIN => Ok(pause),
        _ => Err(Failure::usage(format!(
            "--watch {seconds}: not a time to wait; give seconds, 0.01 at least, as in --watch 0.5"
        ))),
    }
}

/// Separates a report from the next one. Returns whether the output still has a reader.
fn end_report() -> Result<bool, Failure> {
    match writeln!(io::stdout()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::environment(format!(
            "writing the reports: {error}; the rest is lost"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_on_documents_has_the_rows_of_the_table_of_counters() {
        let page = include_str!("../../docs/json.md");
        let (counts, store) = (Counts::default(), StoreCounts::default());
        for (row, _) in counts.rows().into_iter().chain(store.rows()) {
            let unit = if row.name.contains("bytes") {
                ", bytes"
            } else {
                ""
            };
            let meaning = metrics::begun_small(row.meaning);
            let begin = format!("| `{}` | integer{unit} | {meaning}", row.name);
            assert!(
                page.lines().any(|line| line.starts_with(&begin)),
                "docs/json.md, `larder stat`: add the row, or let it begin with:\n{begin}"
            );
        }
    }
}

//! A trace against stores of several sizes, one after the other, and the hit rate that no size
//! exceeds.
//!
//! The store of each size is made in a directory beside `--store` and removed after its run. The
//! ceiling is that of a store without a limit, which keeps every page: it is counted, not run.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::setup::Setup;
use super::store_only::{self, ReplayReport, StoreArgs};
use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::place::directory_of;
use crate::report::{self, Lines, Report, rows};
use crate::size::ByteSize;
use crate::usage;

/// Gain of the hit rate, in points, below which a larger store does not pay.
const POINTS_MIN: f64 = 1.0;

#[derive(Serialize)]
struct SizesReport {
    /// The trace.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// Bytes of a page.
    page_bytes: u64,
    /// One for each size, the smallest first.
    sizes: Vec<SizeRow>,
    /// Hit rate of a store without a limit.
    ceiling_hit_rate: f64,
    /// The smallest size after which no size gains a point; `None` if even the largest is too
    /// small.
    paying_capacity_bytes: Option<u64>,
    /// Whether the operator ended it early.
    interrupted: bool,
}

/// The run of one size.
#[derive(Serialize)]
struct SizeRow {
    capacity_bytes: u64,
    hit_rate: f64,
    pages_requested: u64,
    pages_hit: u64,
    evicted_pages: u64,
    bytes_written: u64,
    wrong_pages: u64,
    /// Pages that were refused, or whose write failed, and pages that were found damaged.
    unstored_pages: u64,
    damaged_pages: u64,
    /// Why pages were not stored, if some were not.
    unstored_reason: Option<String>,
}

impl SizeRow {
    fn of(report: &ReplayReport) -> SizeRow {
        SizeRow {
            capacity_bytes: report.capacity_bytes,
            hit_rate: report.hit_rate,
            pages_requested: report.counts.pages_requested,
            pages_hit: report.counts.pages_hit,
            evicted_pages: report.evicted_pages,
            bytes_written: report.bytes_written,
            wrong_pages: report.counts.wrong_pages,
            unstored_pages: report.counts.refused_pages + report.counts.failed_pages,
            damaged_pages: report.damaged_pages,
            unstored_reason: report.unstored_reason.clone(),
        }
    }

    /// The faults of the run, for people.
    fn faults(&self) -> Option<String> {
        let numbers = [
            (self.wrong_pages, "wrong"),
            (self.damaged_pages, "damaged"),
            (self.unstored_pages, "not stored"),
        ];
        let found = numbers.iter().filter(|(pages, _)| *pages > 0);
        let found: Vec<String> = found.map(|(n, name)| format!("{n} pages {name}")).collect();
        let reason = self.unstored_reason.as_ref();
        let reason = reason.map_or_else(String::new, |reason| format!(": {reason}"));
        (!found.is_empty()).then(|| found.join(", ") + &reason)
    }
}

impl Report for SizesReport {
    const COMMAND: &'static str = "replay sizes";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        for row in &self.sizes {
            let (evicted, written) = (row.evicted_pages, ByteSize(row.bytes_written));
            rows! { lines:
                ByteSize(row.capacity_bytes).to_string() =>
                    "{:.2} % hit, {evicted} pages evicted, {written} written",
                    row.hit_rate * 100.0;
            }
            if let Some(faults) = row.faults() {
                lines.row("  faults", faults);
            }
        }
        rows! { lines:
            "no limit" => "{:.2} % hit", self.ceiling_hit_rate * 100.0;
        }
        if self.interrupted {
            lines.text("Interrupted: the last of these sizes is incomplete, others were not run.");
        } else {
            lines.text(self.verdict());
        }
        lines
    }
}

impl SizesReport {
    /// Which size pays.
    fn verdict(&self) -> String {
        let ceiling = self.ceiling_hit_rate;
        let points = |to: f64, from: f64| (to - from).max(0.0) * 100.0;
        let Some(paying) = self.paying_capacity_bytes else {
            let most = self.sizes.last().map_or(0.0, |row| row.hit_rate);
            return format!(
                "Pays: more than the largest of these sizes; up to {:.1} points are left.",
                points(ceiling, most)
            );
        };
        let rate = self.sizes.iter().find(|row| row.capacity_bytes == paying);
        format!(
            "Pays: {}; no larger store gains more than {:.1} points.",
            ByteSize(paying),
            points(ceiling, rate.map_or(ceiling, |row| row.hit_rate))
        )
    }
}

/// The smallest size from which the ceiling is less than a point away.
fn paying(sizes: &[SizeRow], ceiling: f64) -> Option<u64> {
    let pays = |row: &&SizeRow| (ceiling - row.hit_rate) * 100.0 < POINTS_MIN;
    sizes.iter().find(pays).map(|row| row.capacity_bytes)
}

/// Runs the trace with pages of this size against a store of each size. A run that is ended before
/// its first size has no result.
pub fn run(args: &StoreArgs, interrupt: &Interrupt) -> Result<Ending, Failure> {
    if args.ack_log.is_some() || args.check_log.is_some() {
        return Err(Failure::usage(
            "--ack-log and --check-log take one --capacity: they are of one store",
        ));
    }
    let (ceiling, requested) = ceiling(&args.setup, interrupt)?;
    let mut capacities = args.capacity.clone();
    capacities.sort_unstable_by_key(|size| size.0);
    capacities.dedup_by_key(|size| size.0);
    let beside = tempfile::tempdir_in(directory_of(&args.store))
        .map_err(|error| failed("making a directory beside it", &args.store, &error))?;
    let mut sizes = Vec::new();
    let mut has_findings = false;
    for (number, capacity) in capacities.into_iter().enumerate() {
        if interrupt.is_raised() {
            break;
        }
        let of_one = StoreArgs {
            store: beside.path().join(format!("store-{number}")),
            capacity: vec![capacity],
            ..args.clone()
        };
        let Some(report) = store_only::with_report(&of_one, interrupt, Ok)? else {
            break;
        };
        if !report.interrupted && report.counts.pages_requested != requested {
            return Err(Failure::usage(format!(
                "{}: gave {} pages at first and {} now; it is read more than once: give a file",
                args.setup.trace.display(),
                requested,
                report.counts.pages_requested
            )));
        }
        has_findings |= report.ending() == Ending::Findings;
        sizes.push(SizeRow::of(&report));
        // The next size needs the room.
        std::fs::remove_file(&of_one.store)
            .map_err(|error| failed("removing the store", &of_one.store, &error))?;
    }
    let interrupted = interrupt.is_raised();
    let ending = Ending::Done
        .or_interrupted(interrupted)
        .or_findings(has_findings);
    if sizes.is_empty() {
        return Ok(ending);
    }
    let report = SizesReport {
        path: args.setup.trace.clone(),
        page_bytes: args.page_bytes.0,
        paying_capacity_bytes: paying(&sizes, ceiling),
        sizes,
        ceiling_hit_rate: ceiling,
        interrupted,
    };
    report::print(&report, args.setup.json)?;
    Ok(ending)
}

fn failed(doing: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::environment(format!("{}: {doing}: {error}", path.display()))
}

/// The hit rate of a store that keeps every page, and the pages that the trace requests.
fn ceiling(setup: &Setup, interrupt: &Interrupt) -> Result<(f64, u64), Failure> {
    let mut seen = HashSet::new();
    let (mut hit, mut requested) = (0, 0);
    for request in setup.requests(interrupt)? {
        let request = request?;
        let (blocks, asked) = (&request.hash_ids, request.asked());
        let found = blocks[asked.clone()].iter();
        hit += found.take_while(|block| seen.contains(*block)).count() as u64;
        requested += asked.len() as u64;
        let stored = blocks.get(asked.start..request.stored());
        seen.extend(stored.unwrap_or_default().iter().copied());
    }
    Ok((usage::ratio(hit, requested), requested))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(capacity_bytes: u64, hit_rate: f64) -> SizeRow {
        SizeRow {
            capacity_bytes,
            hit_rate,
            pages_requested: 100,
            pages_hit: 0,
            evicted_pages: 0,
            bytes_written: 0,
            wrong_pages: 0,
            unstored_pages: 0,
            damaged_pages: 0,
            unstored_reason: None,
        }
    }

    #[test]
    fn a_size_pays_from_which_less_than_a_point_is_left() {
        let rows = [row(1, 0.40), row(2, 0.595), row(4, 0.6)];
        assert_eq!(paying(&rows, 0.6), Some(2));
        assert_eq!(paying(&rows, 0.604), Some(2));
        assert_eq!(paying(&rows, 0.609), Some(4));
        assert_eq!(paying(&rows, 0.7), None);
        assert_eq!(paying(&[], 0.7), None);
    }
}

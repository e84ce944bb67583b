//! The table of the processes that use a store: hits, misses by reason, bytes and rates of each.

use std::collections::HashMap;
use std::time::Instant;

use larder_core::counters::{Counted, Counter, Counts, Value};
use larder_engine::{Departed, Process, Report};
use serde::Serialize;

use crate::report::Lines;
use crate::size::ByteSize;

/// A process, or several together.
#[derive(Serialize)]
pub struct Row {
    /// The process; absent for several together.
    #[serde(flatten)]
    pub process: Option<Identity>,
    /// `None` if the release of the process does not send counters.
    pub counts: Option<Counts>,
    pages_missed: Option<u64>,
    /// Of the pages that gets requested; `None` if there are none.
    pub hit_rate: Option<f64>,
    pub rates: Option<Rates>,
}

#[derive(Serialize)]
pub struct Identity {
    /// Number among the clients; `None` for the owner.
    client: Option<u32>,
    pub pid: Option<u32>,
    name: Option<String>,
    release: String,
    pub uptime_seconds: f64,
}

/// Counters per second.
#[derive(Serialize)]
pub struct Rates {
    /// Length of the time that they are the average of.
    interval_seconds: f64,
    pub pages_hit_per_second: f64,
    pages_missed_per_second: f64,
    pub read_bytes_per_second: f64,
    pub put_bytes_per_second: f64,
}

/// The processes of a store.
#[derive(Serialize)]
pub struct Processes {
    /// The owner, then its clients. Empty if the owner's release does not list them.
    pub processes: Vec<Row>,
    /// The clients that have gone.
    departed: Departed,
    /// All of them together.
    total: Row,
}

/// The counters of the report before, for the rates of a watch.
#[derive(Default)]
pub struct Before {
    at: Option<Instant>,
    /// By number among the clients; `None` is the owner.
    of: HashMap<Option<u32>, Counts>,
    total: Counts,
}

impl Row {
    /// `since` are the counters at the begin of the interval.
    fn new(process: Option<Identity>, counts: Option<Counts>, since: Counts, seconds: f64) -> Row {
        let missed = counts.map(|counts| counts.misses.total());
        let requested = counts
            .zip(missed)
            .map(|(counts, missed)| counts.hits + missed);
        let share = |counts: Counts, requested: u64| counts.hits as f64 / requested as f64;
        Row {
            process,
            counts,
            pages_missed: missed,
            hit_rate: counts
                .zip(requested.filter(|pages| *pages > 0))
                .map(|(counts, requested)| share(counts, requested)),
            rates: counts
                .filter(|_| seconds > 0.0)
                .map(|counts| Rates::new(counts, since, seconds)),
        }
    }

    pub fn label(&self, several: &str) -> String {
        let Some(process) = &self.process else {
            return several.to_owned();
        };
        let name = process.name.as_deref().unwrap_or("?");
        match process.client {
            None => format!("{name} (owner)"),
            Some(_) => name.to_owned(),
        }
    }
}

impl Rates {
    fn new(counts: Counts, since: Counts, seconds: f64) -> Rates {
        let rate = |now: u64, then: u64| now.saturating_sub(then) as f64 / seconds;
        Rates {
            interval_seconds: seconds,
            pages_hit_per_second: rate(counts.hits, since.hits),
            pages_missed_per_second: rate(counts.misses.total(), since.misses.total()),
            read_bytes_per_second: rate(counts.bytes_read, since.bytes_read),
            put_bytes_per_second: rate(counts.bytes_put, since.bytes_put),
        }
    }
}

impl Processes {
    /// Rates are averages since the report before; in the first one, since each process attached.
    pub fn of(report: &Report, before: &mut Before) -> Processes {
        let now = Instant::now();
        let watched = before.at.replace(now).map(|at| (now - at).as_secs_f64());
        let then = std::mem::take(&mut before.of);
        let owner_seconds = report.processes.first().map_or(0.0, |of| of.uptime_seconds);
        let mut total = report.departed.counts;
        let rows = report.processes.iter().map(|process| {
            if let Some(counts) = process.counts {
                total.add(&counts);
                before.of.insert(process.client, counts);
            }
            let since = then.get(&process.client).copied();
            // A process that is new since the report before has its own interval.
            let seconds = watched.filter(|_| since.is_some());
            Row::new(
                Some(identity(process)),
                process.counts,
                since.unwrap_or_default(),
                seconds.unwrap_or(process.uptime_seconds),
            )
        });
        let processes = rows.collect();
        let since = std::mem::replace(&mut before.total, total);
        let seconds = watched.unwrap_or(owner_seconds);
        Processes {
            processes,
            departed: report.departed,
            total: Row::new(None, Some(total), since, seconds),
        }
    }

    /// The clients that have gone, together.
    pub fn ended(&self) -> Option<Row> {
        let counts = Some(self.departed.counts);
        (self.departed.clients > 0).then(|| Row::new(None, counts, Counts::default(), 0.0))
    }

    /// Whether the owner's release lists them.
    pub fn are_listed(&self) -> bool {
        !self.processes.is_empty()
    }

    /// The table for people. A reason of misses, or for which found pages are not read, has a
    /// column if there is such a page.
    pub fn lines(&self, lines: &mut Lines) {
        let total = self.total.counts.unwrap_or_default();
        let reasons = nonzero(&total, "larder_page_misses{reason}");
        let unread = nonzero(&total, "larder_unread_pages{reason}");
        let named = |of: &Counter| of.value.replace('_', " ");
        let names: Vec<String> = reasons.iter().chain(&unread).map(named).collect();
        let (missed, found) = names.split_at(reasons.len());
        let mut headings = vec!["Process", "pid", "up", "hits", "misses"];
        headings.extend(missed.iter().map(String::as_str));
        headings.extend(["hit rate", "hits/s", "read", "read/s", "put", "put/s"]);
        headings.extend(found.iter().map(String::as_str));
        let mut rows: Vec<Vec<String>> = Vec::new();
        for row in &self.processes {
            rows.push(cells(row, "", &reasons, &unread));
        }
        if let Some(gone) = self.ended() {
            let label = format!("ended ({})", self.departed.clients);
            rows.push(cells(&gone, &label, &reasons, &unread));
        }
        rows.push(cells(&self.total, "total", &reasons, &unread));
        lines.table(&headings, &rows);
    }
}

/// The counters of a metric that are not 0.
fn nonzero(total: &Counts, metric: &str) -> Vec<Counter> {
    let rows = total.rows().into_iter();
    rows.filter(|(row, value)| row.metric == metric && matches!(value, Value::Count(1..)))
        .map(|(row, _)| row)
        .collect()
}

/// The value of a counter.
fn value_of(counts: &Counts, of: &Counter) -> u64 {
    let rows = counts.rows().into_iter();
    let values = rows.filter(|(row, _)| row.name == of.name);
    values.fold(0, |sum, (_, value)| match value {
        Value::Count(count) => sum + count,
        Value::Times(_) => sum,
    })
}

fn identity(process: &Process) -> Identity {
    Identity {
        client: process.client,
        pid: process.pid,
        name: process.name.clone(),
        release: process.release.clone(),
        uptime_seconds: process.uptime_seconds,
    }
}

fn cells(row: &Row, several: &str, reasons: &[Counter], unread: &[Counter]) -> Vec<String> {
    let unknown = || "-".to_owned();
    let process = row.process.as_ref();
    let pid = process.and_then(|process| process.pid);
    let up = process.map(|process| duration(process.uptime_seconds));
    let mut cells = vec![
        row.label(several),
        pid.map_or_else(unknown, |pid| pid.to_string()),
        up.unwrap_or_else(unknown),
    ];
    let count = |of: &dyn Fn(&Counts) -> u64| {
        row.counts
            .as_ref()
            .map_or_else(unknown, |counts| of(counts).to_string())
    };
    let bytes = |of: &dyn Fn(&Counts) -> u64| {
        let bytes = row.counts.as_ref().map(of);
        bytes.map_or_else(unknown, |bytes| ByteSize(bytes).to_string())
    };
    let rate = |of: fn(&Rates) -> f64| row.rates.as_ref().map(of);
    let size_rate = |of| rate(of).map_or_else(unknown, |rate| ByteSize(rate as u64).to_string());
    cells.push(count(&|counts| counts.hits));
    cells.push(count(&|counts| counts.misses.total()));
    for reason in reasons {
        cells.push(count(&|counts| value_of(counts, reason)));
    }
    let percent = row.hit_rate.map(|share| format!("{:.1} %", share * 100.0));
    cells.push(percent.unwrap_or_else(unknown));
    let hits = rate(|rates| rates.pages_hit_per_second);
    cells.push(hits.map_or_else(unknown, |rate| format!("{rate:.1}")));
    cells.push(bytes(&|counts| counts.bytes_read));
    cells.push(size_rate(|rates| rates.read_bytes_per_second));
    cells.push(bytes(&|counts| counts.bytes_put));
    cells.push(size_rate(|rates| rates.put_bytes_per_second));
    for reason in unread {
        cells.push(count(&|counts| value_of(counts, reason)));
    }
    cells
}

/// An uptime in its two largest units.
pub fn duration(seconds: f64) -> String {
    let seconds = seconds as u64;
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, ..) => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_uptime_has_its_two_largest_units() {
        let shown = [59.9, 61.0, 7265.0, 90_000.0].map(duration);
        assert_eq!(shown, ["59 s", "1 min 1 s", "2 h 1 min", "1 d 1 h"]);
    }
}

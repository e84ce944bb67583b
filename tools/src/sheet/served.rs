//! The facts of a store in use, from its owner.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use larder_base::latency::{BOUNDS_NS, Buckets};
use larder_core::ages::{Ages, BOUNDS_S};
use larder_core::counters::{Counted, Value};
use larder_store::curve::FACTORS;
use larder_store::history::HistoryRow;
use larder_store::share::{Report, View, VolumeState};

use super::answers;
use super::chart::{self, Axis};
use super::page::{Page, Section, Table};
use super::words::words;
use crate::drives::{self, Drive};
use crate::failure::Failure;
use crate::owner::{answering_line, eviction_line, monthly, pacing_line, process};
use crate::report::count;
use crate::size::{ByteSize, Time, date};
use crate::stat::processes::{Before, Processes, duration};
use crate::stat::spaces::{Space, ages_line, spaces, tokens_line};
use crate::stat::{troubles, warnings};

/// Most bars of a chart.
const BARS_MAX: usize = 16;

/// Longest wait for the reports of drives: a drive may hang.
const DRIVES_PATIENCE: Duration = Duration::from_secs(2);

/// Names in words, in the order of the page.
const CALLS: [(&str, &str); 9] = [
    ("lookup", "lookups"),
    ("get", "gets"),
    ("put", "puts"),
    ("flush", "flushes"),
    ("device_read", "reads of the device"),
    ("device_write", "writes of the device"),
    ("device_sync", "syncs of the device"),
    ("encode", "encoding of a page"),
    ("decode", "decoding of a page"),
];

/// Counters that state a fault when they are not 0, by the begin of their metric.
const FAULTS: [&str; 6] = [
    "larder_page_misses",
    "larder_refused",
    "larder_failed_pages",
    "larder_aborted",
    "larder_removed_pages",
    "larder_syncs",
];

/// Values of labels of these metrics that are no fault.
const USUAL: [&str; 4] = ["absent", "evicted", "deleted", "ok"];

/// Counters of a row, by name: found and not found.
type Part = (&'static str, fn(&HistoryRow) -> (u64, u64));

/// The page of a store.
pub fn page(path: &Path, view: &View) -> Result<Page, Failure> {
    let spaces = spaces(view);
    let drives = drives_of(&view.report);
    Ok(Page {
        title: format!("Larder store {}", path.display()),
        facts: facts(view),
        answers: answers::of_store(view, &spaces, &drives),
        sections: vec![
            incidents(&view.report),
            curve(view, &spaces)?,
            over_time(&view.report)?,
            namespaces(&spaces)?,
            processes(&view.report),
            evictions(&view.report)?,
            latencies(&view.report)?,
            wear(view, &drives),
            remote(&view.report),
            words(),
        ],
    })
}

/// The drives under the volumes. None if they do not answer soon, or if a volume hangs.
fn drives_of(report: &Report) -> Vec<Drive> {
    let volumes = &report.answering_volumes;
    if volumes.iter().any(|of| of.state == VolumeState::Hung) {
        return Vec::new();
    }
    let paths: Vec<PathBuf> = volumes.iter().map(|of| of.path.clone()).collect();
    let (tell, told) = mpsc::channel();
    // A thread that waits for a drive ends with this process.
    let asking = thread::Builder::new().spawn(move || drop(tell.send(drives::under_all(&paths))));
    let found = asking.ok().map(|_| told.recv_timeout(DRIVES_PATIENCE));
    found.and_then(Result::ok).unwrap_or_default()
}

fn facts(view: &View) -> Vec<(&'static str, String)> {
    let report = &view.report;
    let stats = &report.stats;
    let now = larder_base::system::processes::unix_seconds() as u64;
    vec![
        ("Made", date(now)),
        (
            "Owner",
            format!(
                "{}, for {}; {}",
                process(report.pid),
                duration(answers::open_seconds(view)),
                count(u64::from(report.clients), "client")
            ),
        ),
        (
            "Size",
            format!(
                "{}, {} of it for pages",
                ByteSize(stats.capacity_bytes),
                ByteSize(stats.usable_bytes)
            ),
        ),
        (
            "Pages",
            format!(
                "{}, {}; {} of the usable bytes in use",
                stats.pages,
                ByteSize(stats.live_bytes),
                percent(
                    stats.taken_bytes as f64,
                    stats.usable_bytes.saturating_sub(stats.taken_bytes) as f64
                )
            ),
        ),
        ("Tokens", tokens_line(&report.totals.spaces.total().tokens)),
        (
            "Counted",
            "by this owner, and by those before it that handed their counters over".to_owned(),
        ),
    ]
}

/// A part of a sum in percent.
pub fn percent(part: f64, rest: f64) -> String {
    match part + rest {
        sum if sum > 0.0 => format!("{:.1} %", 100.0 * part / sum),
        _ => "-".to_owned(),
    }
}

/// An axis from 0 to 100 %.
pub fn percent_axis(name: &str) -> Axis<'_> {
    Axis {
        name,
        places: &[0.0, 25.0, 50.0, 75.0, 100.0],
        label: &|at| format!("{at:.0} %"),
    }
}

/// A share by seconds.
pub fn time_chart(points: &[(f64, f64)], seconds: f64) -> Result<String, Failure> {
    over_seconds(points, seconds, &percent_axis("found"))
}

fn over_seconds(points: &[(f64, f64)], seconds: f64, y: &Axis<'_>) -> Result<String, Failure> {
    let units = [
        (86_400.0, "days"),
        (3600.0, "hours"),
        (60.0, "minutes"),
        (1.0, "seconds"),
    ];
    let unit = units.into_iter().find(|(of, _)| seconds >= 2.0 * of);
    let (unit, name) = unit.unwrap_or((1.0, "seconds"));
    let places = chart::steps(seconds / unit).into_iter();
    let places: Vec<f64> = places
        .map(|at| at * unit)
        .filter(|at| *at <= seconds * 1.001)
        .collect();
    let x = Axis {
        name,
        places: &places,
        label: &|at| format!("{}", (at / unit * 100.0).round() / 100.0),
    };
    chart::line(points, (&x, y), None)
}

/// The part of the pages and tokens asked for that was found, and the bytes that were read and put.
fn over_time(report: &Report) -> Result<Section, Failure> {
    let mut section = Section::new("Hits and bytes over time");
    let history = &report.history;
    let seconds = history.rows.len() as f64 * history.row_seconds;
    let parts: [Part; 2] = [
        ("Pages", |row| (row.found_pages, row.not_found_pages)),
        ("Tokens", |row| (row.found_tokens, row.not_found_tokens)),
    ];
    for (name, part) in parts {
        let point = |(at, row): (usize, &HistoryRow)| {
            let (found, not_found) = part(row);
            let seconds = (at as f64 + 0.5) * history.row_seconds;
            let asked = found.saturating_add(not_found);
            (asked > 0).then(|| (seconds, found as f64 * 100.0 / asked as f64))
        };
        let points: Vec<(f64, f64)> = history.rows.iter().enumerate().filter_map(point).collect();
        if !points.is_empty() {
            let about = format!(
                "{name} found of the {} asked for, in each {} since the owner opened the store",
                name.to_lowercase(),
                duration(history.row_seconds)
            );
            section.charts.push((time_chart(&points, seconds)?, about));
        }
    }
    if section.charts.is_empty() {
        let nothing = "Nothing was looked up since the owner opened the store.";
        section.text.push(nothing.to_owned());
    }
    let read: Vec<u64> = history.rows.iter().map(|row| row.read_bytes).collect();
    let put: Vec<u64> = history.rows.iter().map(|row| row.put_bytes).collect();
    for (name, bytes) in [("read from the devices", read), ("of pages put", put)] {
        let rates = bytes.iter().enumerate().map(|(at, bytes)| {
            let seconds = (at as f64 + 0.5) * history.row_seconds;
            (seconds, *bytes as f64 / history.row_seconds)
        });
        let points: Vec<(f64, f64)> = rates.collect();
        let most = points.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
        if most > 0.0 {
            let up = chart::byte_steps(most);
            let y = Axis {
                name: "bytes a second",
                places: &up,
                label: &|at| ByteSize(at as u64).to_string(),
            };
            let about = format!("Bytes {name}, a second");
            section
                .charts
                .push((over_seconds(&points, seconds, &y)?, about));
        }
    }
    Ok(section)
}

fn incidents(report: &Report) -> Section {
    let mut section = Section::new("Incidents");
    let now: Vec<String> = troubles(report)
        .into_iter()
        .chain(warnings(report))
        .collect();
    match now.is_empty() {
        true => section.text.push("Nothing is wrong now.".to_owned()),
        false => section.text.extend(now),
    }
    let (counts, store) = (&report.totals.counts, &report.totals.store);
    let rows = counts.rows().into_iter().chain(store.rows());
    let faults = rows.filter_map(|(row, value)| {
        let is_fault = FAULTS.iter().any(|of| row.metric.starts_with(of));
        match value {
            Value::Count(count @ 1..) if is_fault && !USUAL.contains(&row.value) => {
                let meaning = match row.meaning == row.help || row.value.is_empty() {
                    true => row.help.to_owned(),
                    false => format!("{}: {}", row.help, row.meaning),
                };
                Some(vec![meaning, count.to_string()])
            }
            _ => None,
        }
    });
    let rows: Vec<Vec<String>> = faults.collect();
    if !rows.is_empty() {
        section
            .tables
            .push(Table::new(&["Counted", "number"], rows));
    }
    section
}

fn curve(view: &View, spaces: &[Space]) -> Result<Section, Failure> {
    let report = &view.report.curve;
    let total = report.total();
    let mut section = Section::new("Hit rate by size");
    if total.pages_requested == 0 {
        section.text.push("Nothing was looked up yet.".to_owned());
        return Ok(section);
    }
    let points = |rates: &[f64]| -> Vec<(f64, f64)> {
        let percents = rates.iter().map(|rate| rate * 100.0);
        FACTORS.iter().map(|of| of.log2()).zip(percents).collect()
    };
    let (lru, own) = (points(&total.hit_rates), points(&total.own_hit_rates));
    let places: Vec<f64> = [0.25_f64, 0.5, 1.0, 2.0, 4.0, 8.0].map(f64::log2).to_vec();
    let x = Axis {
        name: "bytes for pages",
        places: &places,
        label: &|at| ByteSize((report.size_bytes as f64 * at.exp2()) as u64).to_string(),
    };
    let shown = if own.is_empty() { &lru } else { &own };
    let present = shown.iter().find(|(x, _)| *x == 0.0).copied();
    let axes = (&x, &percent_axis("pages found"));
    let svg = match own.is_empty() {
        true => chart::line(&lru, axes, present)?,
        false => chart::lines(
            [("order of this store", &own), ("LRU", &lru)],
            axes,
            present,
        )?,
    };
    section.charts.push((
        svg,
        format!(
            "Pages that a store of each size would find, of {} looked up in {}; the ring is the \
             present size",
            total.pages_requested,
            duration(report.seconds)
        ),
    ));
    if !own.is_empty() {
        section.text.push(
            "The store evicts in an order that it has learned. LRU evicts the least recently used \
             pages."
                .to_owned(),
        );
    }
    let named = |fingerprint: &str| {
        let known = spaces.iter().find(|space| space.fingerprint == fingerprint);
        known
            .and_then(|space| space.model.clone())
            .unwrap_or_else(|| fingerprint.to_owned())
    };
    let row = |name: String, rates: &[f64], asked: u64| {
        let mut row = vec![name, asked.to_string()];
        row.extend(rates.iter().map(|rate| format!("{:.1} %", rate * 100.0)));
        row
    };
    let asked = total.pages_requested;
    let mut rows = vec![row("all".to_owned(), total.as_evicted(), asked)];
    if !own.is_empty() {
        rows.push(row("all, by LRU".to_owned(), &total.hit_rates, asked));
    }
    rows.extend(report.spaces.iter().map(|of| {
        let rough = if of.is_rough { " (rough)" } else { "" };
        let name = format!("{}{rough}", named(&of.fingerprint));
        row(name, of.as_evicted(), of.pages_requested)
    }));
    let mut headings = vec!["Namespace", "looked up"];
    headings.extend([
        "0.25x", "0.5x", "0.75x", "1x", "1.5x", "2x", "3x", "4x", "6x", "8x",
    ]);
    section.tables.push(Table::new(&headings, rows));
    Ok(section)
}

/// Bars of the largest namespaces; none without any bytes.
pub fn bytes_chart(bytes: &[u64]) -> Result<Option<(String, String)>, Failure> {
    let shown: Vec<f64> = bytes.iter().take(BARS_MAX).map(|of| *of as f64).collect();
    let most = shown.iter().copied().fold(0.0, f64::max);
    if most == 0.0 {
        return Ok(None);
    }
    let places: Vec<f64> = (0..shown.len()).map(|at| at as f64).collect();
    let x = Axis {
        name: "namespace, by its number in the table",
        places: &places,
        label: &|at| format!("{}", at as u64 + 1),
    };
    let up = chart::byte_steps(most);
    let y = Axis {
        name: "bytes",
        places: &up,
        label: &|at| ByteSize(at as u64).to_string(),
    };
    let svg = chart::bars(&shown, (&x, &y))?;
    let about = match bytes.len() > BARS_MAX {
        true => format!(
            "Bytes of the {BARS_MAX} largest of {} namespaces",
            bytes.len()
        ),
        false => "Bytes of each namespace".to_owned(),
    };
    Ok(Some((svg, about)))
}

fn namespaces(spaces: &[Space]) -> Result<Section, Failure> {
    let mut section = Section::new("Namespaces");
    let bytes: Vec<u64> = spaces.iter().map(|space| space.bytes).collect();
    section.charts.extend(bytes_chart(&bytes)?);
    let row = |(at, space): (usize, &Space)| {
        let tokens = space.reads.tokens;
        vec![
            space.model.clone().unwrap_or_else(|| "?".to_owned()),
            (at + 1).to_string(),
            space.fingerprint.chars().take(12).collect(),
            space.pages.to_string(),
            ByteSize(space.bytes).to_string(),
            space.reads.hits.to_string(),
            percent(space.reads.hits as f64, space.pages_missed as f64),
            percent(tokens.found as f64, tokens.not_found as f64),
        ]
    };
    let mut headings = vec!["Model", "number", "namespace", "pages", "size"];
    headings.extend(["pages read", "reads without loss", "tokens found"]);
    section.tables.push(Table::new(
        &headings,
        spaces.iter().enumerate().map(row).collect(),
    ));
    Ok(section)
}

fn processes(report: &Report) -> Section {
    let mut section = Section::new("Processes");
    let listed = Processes::of(report, &mut Before::default());
    let gone = listed.ended();
    let ended = format!("ended ({})", report.departed.clients);
    let row = |row: &crate::stat::processes::Row| {
        let process = row.process.as_ref();
        let counts = row.counts.unwrap_or_default();
        vec![
            row.label(&ended),
            process
                .and_then(|of| of.pid)
                .map_or_else(|| "-".to_owned(), |pid| pid.to_string()),
            process.map_or_else(|| "-".to_owned(), |of| duration(of.uptime_seconds)),
            counts.hits.to_string(),
            row.hit_rate
                .map_or_else(|| "-".to_owned(), |rate| percent(rate, 1.0 - rate)),
            ByteSize(counts.bytes_read).to_string(),
            ByteSize(counts.bytes_put).to_string(),
        ]
    };
    section.tables.push(Table::new(
        &[
            "Process",
            "pid",
            "up",
            "pages read",
            "reads without loss",
            "bytes read",
            "bytes put",
        ],
        listed.processes.iter().chain(&gone).map(row).collect(),
    ));
    section
}

/// The upper bound of a bucket of ages.
pub fn age_label(at: f64) -> String {
    let bound = BOUNDS_S.get(at as usize).copied();
    match bound {
        None => "more".to_owned(),
        Some(seconds @ ..3600) => format!("{}m", seconds / 60),
        Some(seconds @ ..86_400) => format!("{}h", seconds / 3600),
        Some(seconds) => format!("{}d", seconds / 86_400),
    }
}

fn evictions(report: &Report) -> Result<Section, Failure> {
    let mut section = Section::new("Ages at eviction");
    let stats = &report.stats;
    let ages = report.totals.ages.total();
    section.text.push(format!(
        "{} evicted; the order is {}.",
        count(report.totals.store.evicted, "page"),
        eviction_line(stats)
    ));
    section
        .charts
        .extend(ages_chart(&ages.evicted, "evicted pages")?);
    section.text.push(match ages.used.pages() {
        0 => "No page with a known age was read.".to_owned(),
        _ => format!("Pages are read at these ages: {}.", ages_line(&ages.used)),
    });
    Ok(section)
}

fn ages_chart(ages: &Ages, what: &str) -> Result<Option<(String, String)>, Failure> {
    let all = ages.pages();
    if all == 0 {
        return Ok(None);
    }
    let values = ages.counts.map(|count| count as f64 * 100.0 / all as f64);
    let places: Vec<f64> = (0..values.len()).map(|at| at as f64).collect();
    let x = Axis {
        name: "age, at most (m: minutes, h: hours, d: days)",
        places: &places,
        label: &age_label,
    };
    let svg = chart::bars(&values, (&x, &percent_axis(what)))?;
    Ok(Some((
        svg,
        format!("Ages of {all} {what}: {}", ages_line(ages)),
    )))
}

fn latencies(report: &Report) -> Result<Section, Failure> {
    let mut section = Section::new("Latencies");
    let rows = report.totals.latencies.rows();
    let times = |name: &str| {
        rows.iter().find_map(|(row, value)| match value {
            Value::Times(times) if row.name == name => Some(*times),
            _ => None,
        })
    };
    if let Some(reads) = times("device_read").filter(|times| times.count() > 0) {
        section.charts.push(times_chart(reads)?);
    }
    let bound = |times: &Buckets, part| match times.bound(part) {
        Some(bound) => Time(bound).to_string(),
        None => "over 10 s".to_owned(),
    };
    let row = |(name, words): &(&str, &str)| {
        let times = times(name).filter(|times| times.count() > 0)?;
        Some(vec![
            (*words).to_owned(),
            times.count().to_string(),
            Time(times.mean()).to_string(),
            bound(times, 0.5),
            bound(times, 0.99),
            bound(times, 1.0),
        ])
    };
    section.tables.push(Table::new(
        &[
            "Time of",
            "measured",
            "mean",
            "half below",
            "99 % below",
            "all below",
        ],
        CALLS.iter().filter_map(row).collect(),
    ));
    section.text.push(
        "A call has one page or many; gets and puts wait for the device, lookups do not. Times are \
         upper bounds, but for the means."
            .to_owned(),
    );
    section.text.push(format!(
        "Writes beside reads: {}.",
        pacing_line(&report.stats)
    ));
    Ok(section)
}

/// The times of reads: every third bound has a label.
fn times_chart(times: &Buckets) -> Result<(String, String), Failure> {
    let all = times.count().max(1) as f64;
    let values: Vec<f64> = times
        .counts
        .iter()
        .map(|count| *count as f64 * 100.0 / all)
        .collect();
    let places: Vec<f64> = (0..values.len()).step_by(3).map(|at| at as f64).collect();
    let x = Axis {
        name: "time of a read of the device, at most",
        places: &places,
        label: &|at| match BOUNDS_NS.get(at as usize) {
            Some(ns) => Time(Duration::from_nanos(*ns)).to_string(),
            None => "more".to_owned(),
        },
    };
    let svg = chart::bars(&values, (&x, &percent_axis("reads")))?;
    Ok((
        svg,
        format!("Times of {} reads of the device", times.count()),
    ))
}

fn wear(view: &View, drives: &[Drive]) -> Section {
    let mut section = Section::new("Wear");
    let written = &view.report.totals.store.written;
    let all = written.total();
    let rate = answers::written_per_day(view);
    let rate = rate.map_or_else(String::new, |bytes| {
        format!(": {} a day", ByteSize(bytes as u64))
    });
    section.text.push(format!(
        "{} written in {}, since the owner opened the store{rate}.",
        ByteSize(all),
        duration(answers::open_seconds(view))
    ));
    let rows = written.rows();
    let row = |(row, value): &(larder_core::counters::Counter, Value<'_>)| match value {
        Value::Count(bytes @ 1..) => Some(vec![
            row.meaning.to_owned(),
            ByteSize(*bytes).to_string(),
            percent(*bytes as f64, all.saturating_sub(*bytes) as f64),
        ]),
        _ => None,
    };
    let mut rows: Vec<Vec<String>> = rows.iter().filter_map(row).collect();
    rows.push(vec![
        "all together".to_owned(),
        ByteSize(all).to_string(),
        String::new(),
    ]);
    section
        .tables
        .push(Table::new(&["Written", "bytes", "share"], rows));
    let unknown = || "-".to_owned();
    let row = |drive: &Drive| match &drive.health {
        Err(error) => vec![drive.name.clone(), drives::advice(error).to_owned()],
        Ok(health) => vec![
            drive.name.clone(),
            if health.is_critical {
                "reports a failure"
            } else {
                "well"
            }
            .to_owned(),
            health
                .used_percent
                .map_or_else(unknown, |used| format!("{used} %")),
            health.spare_percent.map_or_else(unknown, |(left, least)| {
                format!("{left} % ({least} % least)")
            }),
            health
                .written_bytes
                .map_or_else(unknown, |bytes| ByteSize(bytes).to_string()),
            health
                .media_errors
                .map_or_else(unknown, |errors| errors.to_string()),
        ],
    };
    if !drives.is_empty() {
        let mut headings = vec!["Drive", "state", "life used", "spare blocks"];
        headings.extend(["written in its life", "errors"]);
        section
            .tables
            .push(Table::new(&headings, drives.iter().map(row).collect()));
    }
    section
        .text
        .extend(view.report.answering_volumes.iter().map(answering_line));
    section
}

fn remote(report: &Report) -> Section {
    let mut section = Section::new("Remote");
    let Some(l4) = &report.beneath else {
        section
            .text
            .push("No remote lies beneath this store.".to_owned());
        return section;
    };
    section.text.push(format!("{}: {}.", l4.place, l4.state));
    section.text.extend(monthly(l4));
    let row = |(name, count): (&String, &u64)| {
        let value = match name.contains("bytes") {
            true => ByteSize(*count).to_string(),
            false => count.to_string(),
        };
        vec![name.replace('_', " "), value]
    };
    section.tables.push(Table::new(
        &["Counted since the owner opened the store", "number"],
        l4.counts.iter().map(row).collect(),
    ));
    section
}

#[cfg(test)]
mod tests;

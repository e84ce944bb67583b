//! The questions of an operator, answered from the facts.

use larder_base::system::processes::unix_seconds;
use larder_store::curve::FACTORS;
use larder_store::history::HistoryRow;
use larder_store::share::View;

use crate::drives::Drive;
use crate::report::count;
use crate::shown::shown;
use crate::size::ByteSize;
use crate::stat::processes::duration;
use crate::stat::spaces::Space;
use crate::verdict::{Facts, Judgement};

/// The questions, in their order.
pub const SIZE: &str = "Is it too small?";
pub const USERS: &str = "Who uses it?";
pub const WEAR: &str = "When is the drive worn out?";
pub const WORTH: &str = "Is it worth it?";

const DAY_S: f64 = 86_400.0;

/// Lookups of a shorter time are said to be few.
const ENOUGH_S: f64 = 3600.0;

/// The criterion of a verdict.
const CRITERION: &str = "A store is worth it if pages are read in less time than they are \
    computed, lookups find 2 % of their pages or more, and twice the size would find less than 5 \
    points more.";

/// Gain of a larger store, in points, that is worth a remark.
const GAIN_POINTS: f64 = 5.0;

/// The answers for a store in use.
pub fn of_store(view: &View, spaces: &[Space], drives: &[Drive]) -> Vec<(&'static str, String)> {
    vec![
        (SIZE, size(view)),
        (USERS, users(view, spaces)),
        (WEAR, wear(view, drives)),
        (WORTH, worth(view)),
    ]
}

/// The hit rate, as the store evicts, at a multiple of the present size; `None` without lookups.
pub fn rate_at(view: &View, factor: f64) -> Option<f64> {
    let total = view.report.curve.total();
    let place = FACTORS.iter().position(|of| *of == factor)?;
    let rate = total.as_evicted().get(place).copied();
    rate.filter(|_| total.pages_requested > 0)
}

/// Seconds since the owner opened the store.
pub fn open_seconds(view: &View) -> f64 {
    match view.report.started_unix_s {
        0.0 => 0.0,
        began => (unix_seconds() - began).max(0.0),
    }
}

/// A sentence about the gain of larger stores.
fn gain(now: f64, double: f64, four: f64) -> String {
    let (double, four) = ((double - now) * 100.0, (four - now) * 100.0);
    match double >= GAIN_POINTS {
        true => format!(
            "Yes. A store with twice the bytes for pages would find {double:.1} points more, with \
             four times {four:.1} points more."
        ),
        false => format!(
            "No. A store with twice the bytes for pages would find only {double:.1} points more, \
             with four times {four:.1}."
        ),
    }
}

/// The part of the pages that lookups found, and that part in the last tenth of the time.
fn found(view: &View) -> String {
    let store = &view.report.totals.store;
    let asked = store.found.saturating_add(store.not_found);
    if asked == 0 {
        return String::new();
    }
    let rows = &view.report.history.rows;
    let last = &rows[rows.len() - rows.len().div_ceil(10)..];
    let sum = |of: fn(&HistoryRow) -> u64| last.iter().map(of).fold(0, u64::saturating_add);
    let (hits, losses) = (sum(|row| row.found_pages), sum(|row| row.not_found_pages));
    let lately = match hits.saturating_add(losses) {
        0 => String::new(),
        recent => format!(
            ", and {:.1} % in the last {}",
            share(hits, recent),
            duration(last.len() as f64 * view.report.history.row_seconds)
        ),
    };
    format!(
        " Lookups asked for {} and found {:.1} %{lately}.",
        count(asked, "page"),
        share(store.found, asked)
    )
}

fn size(view: &View) -> String {
    let stats = &view.report.stats;
    let [Some(now), Some(double), Some(four)] = [1.0, 2.0, 4.0].map(|at| rate_at(view, at)) else {
        return "Not known yet: nothing was looked up since the owner opened the store.".to_owned();
    };
    let store = &view.report.totals.store;
    let is_full = stats.evicted > 0 || store.evicted > 0;
    let full = match is_full {
        true => "",
        false => {
            " Nothing was evicted yet: the curve shows larger sizes too low until the store \
                  is full."
        }
    };
    let seconds = view.report.curve.seconds;
    let little = match seconds < ENOUGH_S {
        true => format!(
            " Little is known yet: the lookups of {}.",
            duration(seconds)
        ),
        false => String::new(),
    };
    format!("{}{}{full}{little}", gain(now, double, four), found(view))
}

fn share(part: u64, all: u64) -> f64 {
    part as f64 * 100.0 / all.max(1) as f64
}

fn users(view: &View, spaces: &[Space]) -> String {
    let names: Vec<String> = view
        .report
        .processes
        .iter()
        .map(|of| {
            let pid = of.pid.map_or_else(|| "?".to_owned(), |pid| pid.to_string());
            format!("{} ({pid})", shown(of.name.as_deref().unwrap_or("?")))
        })
        .collect();
    let processes = match names.len() {
        0 => "No process is listed.".to_owned(),
        1 => format!("One process now: {}.", names[0]),
        all => {
            let some = names.iter().take(6).cloned().collect::<Vec<_>>().join(", ");
            let more = if all > 6 { ", and others" } else { "" };
            format!("{all} processes now: {some}{more}.")
        }
    };
    let gone = &view.report.departed;
    let ended = match gone.clients {
        0 => String::new(),
        clients => format!(
            " {} ended: read {}, put {}.",
            match clients {
                1 => "One other has".to_owned(),
                clients => format!("{clients} others have"),
            },
            ByteSize(gone.counts.bytes_read),
            ByteSize(gone.counts.bytes_put)
        ),
    };
    let processes = format!("{processes}{ended}");
    let all: u64 = spaces.iter().map(|space| space.bytes).sum();
    let read: u64 = spaces.iter().map(|space| space.reads.hits).sum();
    let largest = spaces.iter().filter(|space| space.bytes > 0);
    let largest: Vec<String> = largest
        .take(3)
        .map(|space| {
            let model = space.model.as_deref().unwrap_or(&space.fingerprint);
            format!(
                "{} ({:.0} % of the bytes, {:.0} % of the pages read)",
                shown(model),
                share(space.bytes, all),
                share(space.reads.hits, read)
            )
        })
        .collect();
    match largest.is_empty() {
        true => format!("{processes} It has no pages yet."),
        false => format!(
            "{processes} The largest models of {}: {}.",
            count(spaces.len() as u64, "namespace"),
            largest.join(", ")
        ),
    }
}

/// Bytes written to the volumes in a day, as far as the owner has seen.
pub fn written_per_day(view: &View) -> Option<f64> {
    let seconds = open_seconds(view);
    (seconds >= 60.0).then(|| view.report.stats.bytes_written as f64 * DAY_S / seconds)
}

fn wear(view: &View, drives: &[Drive]) -> String {
    let per_day = written_per_day(view);
    let rate = per_day.map_or_else(
        || "The store is open for less than a minute: its writes a day are not known.".to_owned(),
        |bytes| format!("The store writes {} a day.", ByteSize(bytes as u64)),
    );
    let ends = drives.iter().map(|drive| match &drive.health {
        Err(error) => format!(
            " The wear of {} is not known: {}.",
            shown(&drive.name),
            crate::drives::advice(error)
        ),
        Ok(health) => {
            let used = health.used_percent.map_or_else(
                || "does not tell its used life".to_owned(),
                |used| format!("has used {used} % of its rated life"),
            );
            let left = per_day.and_then(|bytes| health.days_left(bytes as u64));
            let left = left.map_or_else(
                || "; too little is used to tell its end".to_owned(),
                |days| {
                    format!(
                        "; at this rate it lasts for another {:.1} years",
                        days as f64 / 365.0
                    )
                },
            );
            format!(" {} {used}{left}.", shown(&drive.name))
        }
    });
    let ends: String = ends.collect();
    match drives.is_empty() {
        true => format!("{rate} No drive under it tells its wear: a virtual disk, or RAID."),
        false => format!("{rate}{ends}"),
    }
}

fn worth(view: &View) -> String {
    let totals = &view.report.totals;
    let tokens = totals.spaces.total().tokens;
    let seconds = open_seconds(view);
    let read_s = totals.latencies.get.mean().as_secs_f64() * totals.latencies.get.count() as f64;
    let saved_s = tokens.saved_ms as f64 / 1000.0;
    let is_known = tokens.saved_ms > 0 && tokens.served > 0;
    let per_thousand = |seconds: f64| is_known.then(|| seconds * 1e6 / tokens.served.max(1) as f64);
    // The curve gives the gain of a larger store.
    let (store, now) = (&totals.store, rate_at(view, 1.0));
    let hit_rate = match store.found.saturating_add(store.not_found) {
        0 => now,
        asked => Some(store.found as f64 / asked as f64),
    };
    let facts = Facts {
        hit_rate,
        double_hit_rate: hit_rate.and_then(|rate| Some(rate + rate_at(view, 2.0)? - now?)),
        read_ms: per_thousand(read_s),
        prefill_ms: per_thousand(saved_s),
        write_share: None,
        saved_seconds_per_day: (is_known && seconds >= 60.0)
            .then(|| (saved_s - read_s) * DAY_S / seconds),
    };
    let verdict = facts.verdict();
    let unmeasured = match is_known {
        true => "",
        false => " The time to compute pages is not known (`prefill_rate`): hits alone are judged.",
    };
    if verdict.verdict == Judgement::Unknown {
        return "Not known yet: nothing was looked up since the owner opened the store.".to_owned();
    }
    let counted = match (tokens.found + tokens.not_found, is_known) {
        (0, _) => String::new(),
        (asked, false) => format!(
            " Of {asked} tokens asked for, {:.1} % were found.",
            share(tokens.found, asked)
        ),
        (asked, true) => format!(
            " Of {asked} tokens asked for, {:.1} % were found; {} of prefill saved, {} spent on \
             reads, in {}.",
            share(tokens.found, asked),
            duration(saved_s),
            duration(read_s),
            duration(seconds)
        ),
    };
    let read = format!(
        " {} were read ({}), and {} put.",
        count(totals.counts.hits, "page"),
        ByteSize(totals.counts.bytes_read),
        ByteSize(totals.counts.bytes_put)
    );
    let reason = verdict.verdict_reason;
    format!("{reason}{unmeasured}{counted}{read} {CRITERION}")
}

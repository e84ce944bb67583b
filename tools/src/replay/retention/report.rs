//! The document of a comparison of policies, and its lines.

use std::path::PathBuf;

use serde::Serialize;

use super::RetentionArgs;
use super::l2::PlayedAbove;
use super::volume::{Geometry, Played};
use larder_tiers::config::L3Write;

use crate::policy::Policy;
use crate::replay::requests::Requests;
use crate::report::{Lines, Report, rows};
use crate::usage::ratio;

#[derive(Serialize)]
pub(super) struct RetentionReport {
    /// The trace.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    policy: &'static str,
    requests: u64,
    pages_requested: u64,
    distinct_pages: u64,
    /// The trace whose tables the policy began with.
    #[serde(serialize_with = "crate::report::paths")]
    learned_on: Option<PathBuf>,
    /// Most of the room that pages fill.
    fill_percent: f64,
    /// One for each capacity.
    capacities: Vec<Row>,
    /// Whether the operator ended it early.
    interrupted: bool,
}

/// The runs at one capacity.
#[derive(Serialize)]
pub(super) struct Row {
    /// Of the distinct pages of the trace.
    percent: f64,
    /// Most pages that the store keeps.
    pages: u64,
    segments: u32,
    pages_hit: u64,
    lru_pages_hit: u64,
    optimum_pages_hit: u64,
    /// Part of the way from LRU to the optimum; 0 where there is none.
    gap_closed: f64,
    bytes_written: u64,
    lru_bytes_written: u64,
    /// Bytes of pages put and copied for each byte put.
    write_amplification: f64,
    lru_write_amplification: f64,
    pages_put: u64,
    evicted_pages: u64,
    refused_pages: u64,
    /// Memory of the policy.
    policy_bytes: u64,
    /// Time of the run, and of that under LRU.
    seconds: f64,
    lru_seconds: f64,
    /// The runs under a budget of writes.
    budgets: Vec<Limited>,
    /// The runs with an L2 above the store.
    with_l2: Vec<Above>,
}

/// A run with an L2 above the store, both of them together as large as the store of the others.
#[derive(Serialize)]
struct Above {
    l3_write: L3Write,
    /// The budget of writes, of the bytes that the run without L2 and budget wrote.
    percent: Option<f64>,
    l2_pages: u64,
    store_pages: u64,
    pages_hit: u64,
    /// Of these, in L1 or L2.
    l2_pages_hit: u64,
    /// Part of the hits of the run without L2 and budget that this one lacks.
    hits_lost: f64,
    bytes_written: u64,
    /// Pages that left L2 without having been written.
    never_written_pages: u64,
    seconds: f64,
}

/// A run under a budget of writes.
#[derive(Serialize)]
struct Limited {
    /// Of the bytes that the run without a budget wrote.
    percent: f64,
    bytes_a_day: u64,
    pages_hit: u64,
    /// Part of the hits of the run without a budget that this one lacks.
    hits_lost: f64,
    bytes_written: u64,
    refused_pages: u64,
    seconds: f64,
}

impl Row {
    pub(super) fn new(
        percent: f64,
        geometry: &Geometry,
        run: &Played,
        lru: &Played,
        optimum: u64,
    ) -> Row {
        let amplification = |run: &Played| ratio(run.put_bytes + run.copied_bytes, run.put_bytes);
        let gained = run.hits as f64 - lru.hits as f64;
        let gap = optimum.saturating_sub(lru.hits);
        Row {
            percent,
            pages: geometry.pages as u64,
            segments: geometry.segments,
            pages_hit: run.hits,
            lru_pages_hit: lru.hits,
            optimum_pages_hit: optimum,
            gap_closed: if gap == 0 { 0.0 } else { gained / gap as f64 },
            bytes_written: run.written_bytes,
            lru_bytes_written: lru.written_bytes,
            write_amplification: amplification(run),
            lru_write_amplification: amplification(lru),
            pages_put: run.put,
            evicted_pages: run.evicted,
            refused_pages: run.refused,
            policy_bytes: run.policy_bytes,
            seconds: run.seconds,
            lru_seconds: lru.seconds,
            budgets: Vec::new(),
            with_l2: Vec::new(),
        }
    }

    /// Adds a run with an L2, beside the run without one.
    pub(super) fn above(
        &mut self,
        l3_write: L3Write,
        percent: Option<f64>,
        run: &PlayedAbove,
        all: &Played,
    ) {
        self.with_l2.push(Above {
            l3_write,
            percent,
            l2_pages: run.l2_pages,
            store_pages: run.store_pages,
            pages_hit: run.played.hits,
            l2_pages_hit: run.l2_hits,
            hits_lost: 1.0 - ratio(run.played.hits, all.hits),
            bytes_written: run.played.written_bytes,
            never_written_pages: run.never_written,
            seconds: run.played.seconds,
        });
    }

    /// Adds a run under a budget, beside the run without one.
    pub(super) fn limited(&mut self, percent: f64, bytes_a_day: u64, run: &Played, all: &Played) {
        self.budgets.push(Limited {
            percent,
            bytes_a_day,
            pages_hit: run.hits,
            hits_lost: 1.0 - ratio(run.hits, all.hits),
            bytes_written: run.written_bytes,
            refused_pages: run.refused,
            seconds: run.seconds,
        });
    }
}

impl RetentionReport {
    pub(super) fn new(
        args: &RetentionArgs,
        requests: &Requests,
        capacities: Vec<Row>,
        interrupted: bool,
    ) -> RetentionReport {
        RetentionReport {
            path: args.setup.trace.clone(),
            policy: Policy::Learned.word(),
            requests: requests.iter().len() as u64,
            pages_requested: requests.references(),
            distinct_pages: requests.distinct() as u64,
            learned_on: args.learned_on.clone(),
            fill_percent: args.fill,
            capacities,
            interrupted,
        }
    }
}

impl Report for RetentionReport {
    const COMMAND: &'static str = "replay policy";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        let rate = |hits| ratio(hits, self.pages_requested) * 100.0;
        lines.text(format!(
            "{} requests, {} pages asked for, {} distinct; hits in % of pages asked for",
            self.requests, self.pages_requested, self.distinct_pages
        ));
        for row in &self.capacities {
            rows! { lines:
                format!("{} %", row.percent) =>
                    "{:.2} {}, {:.2} LRU ({:+.2}), {:.2} optimum, gap closed {:.1} %; {} pages in \
                    {} segments, write amplification {:.3} (LRU {:.3}), {} GiB written (LRU {}), \
                    {} refused, policy {} KiB, {:.1} s (LRU {:.1} s)",
                    rate(row.pages_hit), self.policy, rate(row.lru_pages_hit),
                    rate(row.pages_hit) - rate(row.lru_pages_hit), rate(row.optimum_pages_hit),
                    row.gap_closed * 100.0, row.pages, row.segments, row.write_amplification,
                    row.lru_write_amplification, row.bytes_written >> 30,
                    row.lru_bytes_written >> 30, row.refused_pages, row.policy_bytes >> 10,
                    row.seconds, row.lru_seconds;
            }
            for run in &row.budgets {
                rows! { lines:
                    format!("  budget of {} %", run.percent) =>
                        "{:.2}, {:.1} % of the hits lost; {} GiB written ({:.1} %), {} refused, \
                        {:.1} s",
                        rate(run.pages_hit), run.hits_lost * 100.0, run.bytes_written >> 30,
                        ratio(run.bytes_written, row.bytes_written) * 100.0, run.refused_pages,
                        run.seconds;
                }
            }
        }
        for row in &self.capacities {
            for run in &row.with_l2 {
                let l3_write = match run.l3_write {
                    L3Write::Late => "late",
                    _ => "at once",
                };
                let budget = run
                    .percent
                    .map(|percent| format!(", budget of {percent} %"));
                rows! { lines:
                    format!("  L2, written {l3_write}{}", budget.unwrap_or_default()) =>
                        "{:.2} ({:.2} of them in L2), {:.1} % of the hits lost; {} pages of L2, {} \
                        of the store; {} GiB written ({:.1} %), {} pages never, {:.1} s",
                        rate(run.pages_hit), rate(run.l2_pages_hit), run.hits_lost * 100.0,
                        run.l2_pages, run.store_pages, run.bytes_written >> 30,
                        ratio(run.bytes_written, row.bytes_written) * 100.0,
                        run.never_written_pages, run.seconds;
                }
            }
        }
        if self.interrupted {
            lines.text("Interrupted: the last capacity is incomplete.");
        }
        lines
    }
}

//! A trace against the learned policy of eviction: `larder replay policy`.
//!
//! The core, the index, the policy and reclaim are those of a store. The volume is in memory and
//! drops the pages' bytes, and the time is that of the trace. So a trace of hours takes seconds,
//! and the same trace gives the same figures. For each capacity there are three runs: the learned
//! policy, LRU in the same store, and the optimum, which knows the future.
//!
//! A module imports only modules below it.
//!
//! | module | content |
//! |---|---|
//! | `curve` | (tests: the curve as the store evicts, beside the store) |
//! | `bounds` | (tests: how far the learned policy may fall behind LRU) |
//! | `budgets` | (tests: the bytes and the hits under a budget of writes) |
//! | `report` | the document and its lines |
//! | `l2` | the caches of a server above the store |
//! | `volume` | a core over a volume without payload |
//! | `optimum` | the optimum |

#[cfg(test)]
mod bounds;
#[cfg(test)]
mod budgets;
#[cfg(test)]
mod curve;
mod l2;
mod optimum;
mod report;
mod volume;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use larder_core::policy::make;
use larder_engine::{Class, Hint, Stop};
use larder_tiers::config::L3Write;

use super::requests::{Request, Requests};
use super::setup::Setup;
use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::policy::Policy;
use crate::report as reports;
use crate::size;
use report::{RetentionReport, Row};
use volume::{Geometry, Played, Volume};

/// The facts that callers tell the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Hints {
    /// All of the trace: output tokens, why the answer ended, whether the last page is partial.
    Trace,
    /// The hints that SGLang gives without a change: none; pages are read, then new ones put.
    Sglang,
    /// The hints that vLLM gives without a change: none; pages are put after a lookup.
    Vllm,
    /// None; a request puts all its pages.
    None,
}

/// Compare the learned policy of eviction with LRU and with the optimum, in the time of a trace and
/// without moving bytes
#[derive(Args, Clone, Debug)]
pub struct RetentionArgs {
    #[command(flatten)]
    setup: Setup,
    /// The facts that the store gets
    #[arg(long, value_enum, default_value = "trace")]
    hints: Hints,
    /// Capacity in hundredths of the trace's distinct blocks
    #[arg(
        long,
        value_name = "PERCENT",
        value_delimiter = ',',
        default_value = "2,5,10,20"
    )]
    percent: Vec<f64>,
    /// Percent of the store's room that pages fill at most: the lower, the less reclaim copies
    #[arg(long, value_name = "PERCENT", default_value_t = volume::FILL, value_parser = fill)]
    fill: f64,
    /// Number of segments of the store; without it segments have 16 MiB, eight pages
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..1 << 24))]
    segments: Option<u32>,
    /// Budgets of writes to compare, in hundredths of the bytes that the learned policy writes
    /// without one
    #[arg(long, value_name = "PERCENT", value_delimiter = ',', value_parser = size::above_zero)]
    write_budget: Vec<f64>,
    /// Hundredths of the capacity that are an L2 above the store, which gets the rest: replays with
    /// the caches of `replay tiers`, that write a page when it is made, and when it leaves L2
    #[arg(long, value_name = "PERCENT", value_parser = l2::percent)]
    l2: Option<f64>,
    /// Begin with the tables that the policy learns on this trace
    #[arg(long, value_name = "TRACE")]
    learned_on: Option<PathBuf>,
}

fn fill(text: &str) -> Result<f64, String> {
    let range = 1.0..=volume::FILL;
    let fill: Option<f64> = text.parse().ok();
    fill.filter(|fill| range.contains(fill)).ok_or_else(|| {
        let most = range.end();
        format!("a store fills at most {most} percent of its room: give 1 to {most}")
    })
}

/// Runs it.
pub fn run(args: &RetentionArgs, interrupt: &Interrupt) -> Result<Ending, Failure> {
    let setup = &args.setup;
    let requests = Requests::read(&setup.trace, setup.limit(), interrupt)?;
    let learned_on = args.learned_on.as_ref();
    let earlier = learned_on
        .map(|path| Requests::read(path, setup.limit(), interrupt))
        .transpose()?;
    let mut rows = Vec::new();
    for percent in &args.percent {
        let geometry = Geometry::keeping(*percent, args.fill, args.segments, &requests)?;
        let play = |requests, policy, lessons: &[u8], budget| {
            let limits = Limits { lessons, budget };
            play(requests, &geometry, policy, args.hints, limits, interrupt)
        };
        let lru = play(&requests, Policy::Lru, &[], None)?;
        let lessons = match &earlier {
            Some(earlier) => play(earlier, Policy::Learned, &[], None)?.lessons,
            None => Vec::new(),
        };
        let run = play(&requests, Policy::Learned, &lessons, None)?;
        let best = optimum::hits(&requests, geometry.pages);
        let mut row = Row::new(*percent, &geometry, &run, &lru, best);
        for percent in &args.write_budget {
            let budget = bytes_a_day(&requests, run.written_bytes, *percent);
            let limited = play(&requests, Policy::Learned, &lessons, Some(budget))?;
            row.limited(*percent, budget, &limited, &run);
        }
        if let Some(percent_of_l2) = args.l2 {
            let below = *percent * (100.0 - percent_of_l2) / 100.0;
            let below = Geometry::keeping(below, args.fill, args.segments, &requests)?;
            let pages = geometry.pages.saturating_sub(below.pages);
            for l3_write in [L3Write::OnBackup, L3Write::Late] {
                let mut play = |percent: Option<f64>| {
                    let budget =
                        percent.map(|percent| bytes_a_day(&requests, run.written_bytes, percent));
                    let limits = Limits {
                        lessons: &lessons,
                        budget,
                    };
                    let config = l2::config(pages, l3_write, &requests)?;
                    let above = l2::play(&requests, &below, config, limits, interrupt)?;
                    row.above(l3_write, percent, &above, &run);
                    Ok::<(), Failure>(())
                };
                play(None)?;
                for percent in &args.write_budget {
                    play(Some(*percent))?;
                }
            }
        }
        rows.push(row);
        if interrupt.is_raised() {
            break;
        }
    }
    let report = RetentionReport::new(args, &requests, rows, interrupt.is_raised());
    reports::print(&report, setup.json)?;
    Ok(Ending::Done.or_interrupted(interrupt.is_raised()))
}

/// The budget of a day that is this part of so many bytes in the time of the trace.
fn bytes_a_day(requests: &Requests, written_bytes: u64, percent: f64) -> u64 {
    const DAY_MS: f64 = 86_400_000.0;
    let times = || requests.iter().map(|request| request.at_ms);
    let passed = times().max().unwrap_or(0) - times().min().unwrap_or(0);
    (percent / 100.0 * written_bytes as f64 * DAY_MS / passed.max(1) as f64) as u64
}

/// Where a run begins, and what it may write a day.
#[derive(Clone, Copy, Default)]
struct Limits<'a> {
    lessons: &'a [u8],
    budget: Option<u64>,
}

fn play(
    requests: &Requests,
    geometry: &Geometry,
    policy: Policy,
    hints: Hints,
    limits: Limits<'_>,
    interrupt: &Interrupt,
) -> Result<Played, Failure> {
    let policy = policy.maker().map(|maker| {
        let mut policy = make(&maker);
        policy.recall(limits.lessons, Vec::new());
        policy
    });
    let mut volume = Volume::new(geometry, policy, limits.budget)?;
    let begun = std::time::Instant::now();
    let mut played = Played::default();
    for request in requests.iter() {
        if interrupt.is_raised() {
            break;
        }
        let keys = requests.keys(request);
        volume.tick(request.at_ms);
        let stored = volume.stored(&keys);
        played.hits += stored as u64;
        played.hits_of.push(stored);
        match hints {
            Hints::Trace => {
                let full = keys.len() - usize::from(request.is_partial);
                volume.put(&keys[..full], 0, told(request));
                volume.put(&keys, full, Hint::new(Class::PARTIAL));
            }
            Hints::None => volume.put(&keys, 0, Hint::default()),
            Hints::Sglang => {
                volume.read(&keys[..stored]);
                volume.put(&keys, stored, Hint::default());
            }
            Hints::Vllm => {
                volume.look_up(&keys);
                volume.read(&keys[..stored]);
                volume.put(&keys, stored, Hint::default());
            }
        }
        played.written_of.push(volume.written());
    }
    volume.sum_up(&mut played)?;
    played.seconds = begun.elapsed().as_secs_f64();
    Ok(played)
}

/// The hint of a request of the trace.
fn told(request: &Request) -> Hint {
    let stop = match request.stop {
        1 => Stop::ToolCall,
        2 => Stop::EndOfTurn,
        0 => Stop::Unknown,
        _ => Stop::Other,
    };
    Hint::new(Class::of_turn(stop, request.output_tokens))
}

//! `larder plan`: the disk to buy, and whether it is worth it.
//!
//! From tokens a day alone there are bytes and days. From a trace or a running store there are
//! hits, too, and with a model and a disk the time that they save.
//!
//! | module | content |
//! |---|---|
//! | `source` | the facts of a trace, a running store, or a number of tokens a day |
//! | `distances` | the hits of a trace in an LRU store of any size |
//! | `room` | how many pages a store of a size keeps |

pub mod distances;
mod room;
mod source;

use std::path::PathBuf;
use std::sync::Arc;

use clap::{ArgGroup, Args};
use larder_format::BLOCK_BYTES;
use serde::Serialize;

use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::model::{Compute, MODELS, Model};
use crate::place;
use crate::report::{self, Lines, Report, rows};
use crate::size::{ByteSize, above_zero};
use crate::usage::nearest_rank;
use crate::verdict::{Facts, Verdict};
use source::Found;

/// Days of a year.
const YEAR_DAYS: f64 = 365.25;

/// Tokens of the prompt by which the speed of a prefill is judged.
const USUAL_TOKENS: u64 = 8192;

/// Plan the size of a store: bytes and days, and with a trace or a running store whether it pays
#[derive(Args, Debug)]
#[command(group(ArgGroup::new("source").required(true)
    .args(["tokens_per_day", "trace", "store"])))]
pub struct PlanArgs {
    /// Whose pages: llama-3.1-8b, llama-3.1-70b, qwen3-32b, deepseek-v3, or a config.json
    #[arg(long, default_value = &*MODELS[0].name, value_parser = Model::named)]
    model: Arc<Model>,
    /// Tensor-parallel ranks that share the disk
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,
    /// Bytes of an element of KV: 2 for bf16, 1 for fp8
    #[arg(long, value_name = "BYTES", default_value_t = 2,
        value_parser = clap::value_parser!(u32).range(1..=2))]
    element_bytes: u32,
    /// Tokens of a page; those of a trace are its own
    #[arg(long, value_name = "TOKENS", default_value_t = 64,
        value_parser = clap::value_parser!(u32).range(1..=65_536))]
    page_size: u32,
    /// New tokens that the servers compute in a day
    #[arg(long, value_name = "N", requires = "days")]
    tokens_per_day: Option<u64>,
    /// A trace, as `larder replay` takes it
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// A served store, whose curve and counters are asked for
    #[arg(long, value_parser = place::parser())]
    store: Option<PathBuf>,
    /// Days after which a page may go [default: of the size, or 1]
    #[arg(long, value_parser = above_zero)]
    days: Option<f64>,
    /// Size of the store, instead of days
    #[arg(long, conflicts_with = "days")]
    size: Option<ByteSize>,
    /// GB/s that the disk reads
    #[arg(long, value_name = "GB/s", value_parser = above_zero)]
    disk_read: Option<f64>,
    /// GB/s that the disk writes
    #[arg(long, value_name = "GB/s", value_parser = above_zero)]
    disk_write: Option<f64>,
    /// Microseconds of a read besides its bytes
    #[arg(long, value_name = "US", default_value_t = 100.0, value_parser = above_zero)]
    disk_latency: f64,
    /// Terabytes that the drives are rated to have written in their life
    #[arg(long, value_name = "TB", value_parser = above_zero)]
    drive_writes: Option<f64>,
    /// TFLOP/s that a prefill reaches, all accelerators of a server together: an H200 by default
    #[arg(long, default_value_t = 600.0, value_parser = above_zero)]
    tflops: f64,
    /// GB/s of their memory
    #[arg(long, value_name = "GB/s", default_value_t = 4800.0, value_parser = above_zero)]
    hbm: f64,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Quantiles of times to the first token.
#[derive(Clone, Copy, Debug, Serialize)]
struct Quantiles {
    p50_seconds: f64,
    p90_seconds: f64,
    p99_seconds: f64,
}

impl Quantiles {
    /// `None` without times.
    fn of(mut times: Vec<f64>) -> Option<Quantiles> {
        times.sort_unstable_by(f64::total_cmp);
        let of = |percent| nearest_rank(&times, percent);
        Some(Quantiles {
            p50_seconds: of(50)?,
            p90_seconds: of(90)?,
            p99_seconds: of(99)?,
        })
    }
}

#[derive(Serialize)]
struct PlanReport {
    /// The trace or the store; none for tokens a day.
    #[serde(serialize_with = "crate::report::paths")]
    path: Option<PathBuf>,
    model: String,
    ranks: u32,
    page_tokens: u32,
    /// Bytes of a token on all ranks together, as they are stored.
    token_bytes: u64,
    /// Of one rank, on the device.
    page_bytes: u64,
    /// The size of the store.
    capacity_bytes: u64,
    /// How long a page stays in it, if none is used again.
    days: f64,
    bytes_put_per_day: f64,
    /// With the copies of reclaim.
    bytes_written_per_day: f64,
    drive_writes_per_day: f64,
    /// Years until the rated bytes are written.
    drive_years: Option<f64>,
    /// Bytes to be written for each byte that the disk can write.
    write_share: Option<f64>,
    hit_rate: Option<f64>,
    double_hit_rate: Option<f64>,
    ceiling_hit_rate: Option<f64>,
    tokens_read_per_day: Option<f64>,
    saved_seconds_per_day: Option<f64>,
    read_ms_per_1000_tokens: Option<f64>,
    prefill_ms_per_1000_tokens: f64,
    /// Times to the first token, without queues: all computed, and with the store.
    computed_ttft: Option<Quantiles>,
    stored_ttft: Option<Quantiles>,
    #[serde(flatten)]
    verdict: Verdict,
}

impl Report for PlanReport {
    const COMMAND: &'static str = "plan";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        let size = |bytes: f64| ByteSize(bytes as u64).to_string();
        let percent = |rate: f64| format!("{:.2} %", rate * 100.0);
        rows! { lines:
            "Tokens of" => "{}, {} a token on {} ranks together",
                self.model, ByteSize(self.token_bytes), self.ranks;
            "Pages" => "{} tokens, {} a rank", self.page_tokens, ByteSize(self.page_bytes);
            "Size of the store" => "{}", ByteSize(self.capacity_bytes);
            "A page stays" => "{:.2} days, if it is not used again", self.days;
            "Put" => "{} a day", size(self.bytes_put_per_day);
            "Written" => "{} a day, {:.2} drive writes a day", size(self.bytes_written_per_day),
                self.drive_writes_per_day;
        }
        if let Some(years) = self.drive_years {
            lines.row("Drive worn out", format!("in {years:.1} years"));
        }
        if let Some(share) = self.write_share {
            lines.row(
                "Writes",
                format!("{:.1} % of what the disk can write", share * 100.0),
            );
        }
        if let (Some(hits), Some(double)) = (self.hit_rate, self.double_hit_rate) {
            let ceiling = self.ceiling_hit_rate;
            let ceiling = ceiling.map_or(String::new(), |rate| {
                format!(", without a limit {}", percent(rate))
            });
            rows! { lines:
                "Pages found" => "{}, at twice the size {}{ceiling}", percent(hits),
                    percent(double);
            }
        }
        for (label, ttft) in [
            ("TTFT, computed", &self.computed_ttft),
            ("TTFT, with the store", &self.stored_ttft),
        ] {
            if let Some(of) = ttft {
                rows! { lines:
                    label => "P50 {:.3} s, P90 {:.3} s, P99 {:.3} s, without queues",
                        of.p50_seconds, of.p90_seconds, of.p99_seconds;
                }
            }
        }
        lines.text(&*self.verdict.verdict_reason);
        lines
    }
}

/// The bytes of pages, and the speeds.
struct Costs<'a> {
    args: &'a PlanArgs,
    /// Of a token on one rank.
    rank_token_bytes: u64,
    /// Ranks with bytes of their own.
    copies: u32,
}

impl Costs<'_> {
    /// Bytes of a page of one rank on the device.
    fn page_bytes(&self, page_tokens: u32) -> u64 {
        let bytes = self.rank_token_bytes * u64::from(page_tokens);
        bytes.next_multiple_of(BLOCK_BYTES as u64)
    }

    /// Bytes of a token on all ranks.
    fn token_bytes(&self) -> u64 {
        self.rank_token_bytes * u64::from(self.copies)
    }

    /// Pages of all ranks that a store keeps.
    fn pages(&self, size: u64, page_tokens: u32) -> u64 {
        room::pages(size, self.page_bytes(page_tokens)) / u64::from(self.copies)
    }

    fn segments(&self, size: u64, page_tokens: u32) -> u64 {
        let shape = room::segments(size, self.page_bytes(page_tokens));
        shape.map_or(0, |(segments, _)| segments)
    }

    fn compute(&self) -> Compute {
        Compute {
            flops: self.args.tflops * 1e12,
            memory_bytes_per_second: self.args.hbm * 1e9,
        }
    }

    /// Seconds to read so many tokens, if the disk is known.
    fn read_seconds(&self, tokens: u64) -> Option<f64> {
        let bytes = (tokens * self.token_bytes()) as f64;
        let rate = self.args.disk_read? * 1e9;
        Some(self.args.disk_latency / 1e6 + bytes / rate)
    }

    fn read_ms(&self) -> Option<f64> {
        let seconds = self.read_seconds(USUAL_TOKENS)?;
        Some(seconds * 1e6 / USUAL_TOKENS as f64)
    }

    fn prefill_ms(&self) -> f64 {
        let model = &self.args.model;
        let seconds = model.prefill_seconds(&self.compute(), USUAL_TOKENS, 0);
        seconds * 1e6 / USUAL_TOKENS as f64
    }
}

/// Runs the command.
pub fn run(args: &PlanArgs) -> Result<Ending, Failure> {
    let interrupt = Interrupt::watch();
    let bytes = args.model.token_bytes(args.ranks, args.element_bytes);
    let (rank_token_bytes, copies) = bytes.map_err(|why| {
        Failure::usage(format!("{}: {why}; choose other --ranks", args.model.name))
    })?;
    let costs = Costs {
        args,
        rank_token_bytes,
        copies,
    };
    let found = match (&args.trace, &args.store, args.tokens_per_day) {
        (Some(trace), ..) => source::of_trace(&costs, trace, &interrupt)?,
        (_, Some(store), _) => source::of_store(&costs, store)?,
        (.., tokens) => source::of_tokens(&costs, tokens.unwrap_or(0))?,
    };
    report::print(&report_of(&costs, &found), args.json)?;
    Ok(Ending::Done.or_interrupted(interrupt.is_raised()))
}

fn report_of(costs: &Costs<'_>, found: &Found) -> PlanReport {
    let args = costs.args;
    let written = found.bytes_put_per_day * found.write_amplification;
    let facts = Facts {
        write_share: args
            .disk_write
            .map(|rate| written / (rate * 1e9 * 86_400.0)),
        hit_rate: found.hit_rate,
        double_hit_rate: found.double_hit_rate,
        read_ms: costs.read_ms(),
        prefill_ms: Some(costs.prefill_ms()),
        saved_seconds_per_day: found.saved_seconds_per_day,
    };
    PlanReport {
        path: args.trace.clone().or_else(|| args.store.clone()),
        model: args.model.name.clone().into_owned(),
        ranks: args.ranks,
        page_tokens: found.page_tokens,
        token_bytes: costs.token_bytes(),
        page_bytes: costs.page_bytes(found.page_tokens),
        capacity_bytes: found.capacity_bytes,
        days: found.usable_bytes as f64 / found.bytes_put_per_day.max(1.0),
        bytes_put_per_day: found.bytes_put_per_day,
        bytes_written_per_day: written,
        drive_writes_per_day: written / (found.capacity_bytes as f64).max(1.0),
        drive_years: args
            .drive_writes
            .map(|rated| rated * 1e12 / written.max(1.0) / YEAR_DAYS),
        write_share: facts.write_share,
        hit_rate: found.hit_rate,
        double_hit_rate: found.double_hit_rate,
        ceiling_hit_rate: found.ceiling_hit_rate,
        tokens_read_per_day: found.tokens_read_per_day,
        saved_seconds_per_day: found.saved_seconds_per_day,
        read_ms_per_1000_tokens: facts.read_ms,
        prefill_ms_per_1000_tokens: costs.prefill_ms(),
        computed_ttft: found.computed_ttft,
        stored_ttft: found.stored_ttft,
        verdict: facts.verdict(),
    }
}

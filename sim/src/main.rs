//! Plays the simulation: many seeds, or one again.
//!
//! `larder-sim --seeds 100000 --minutes 10`, `larder-sim --shared`, `larder-sim --agents`,
//! `larder-sim --seed 8104`, `larder-sim --exhaustive`.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use larder_sim::exhaustive::{self, Limits};
use larder_sim::{Heap, Mode};

#[global_allocator]
static HEAP: Heap = Heap;

/// Plays a simulated store under crashes and faults, seed by seed.
#[derive(Parser)]
#[command(name = "larder-sim", version)]
struct Args {
    /// Number of seeds.
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Stop after this many minutes, even if seeds are left.
    #[arg(long)]
    minutes: Option<f64>,
    /// Seeds played at once. Default: the number of cores.
    #[arg(long)]
    threads: Option<usize>,
    /// Simulate an owner and its clients, each a process with the whole engine.
    #[arg(long)]
    shared: bool,
    /// Simulate two nodes, and a remote beneath their stores.
    #[arg(long, conflicts_with = "shared")]
    agents: bool,
    /// Play this seed again and print its last events.
    #[arg(long)]
    seed: Option<u64>,
    /// No seeds: try every crash of every script of up to this many operations.
    #[arg(long, value_name = "OPERATIONS", num_args = 0..=1, default_missing_value = "3")]
    exhaustive: Option<usize>,
    /// With --exhaustive: every subset of this many unsynced blocks.
    #[arg(long, default_value_t = Limits::default().blocks)]
    blocks: usize,
}

fn exhaust(operations: usize, blocks: usize) -> ExitCode {
    let begun = Instant::now();
    let limits = Limits {
        operations,
        blocks,
        ..Limits::default()
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    match exhaustive::exhaust(limits, threads) {
        Ok(counts) => {
            println!("{counts:?}, {:?}", begun.elapsed());
            ExitCode::SUCCESS
        }
        Err(why) => {
            println!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let mode = match (args.shared, args.agents) {
        (true, _) => Mode::Shared,
        (_, true) => Mode::Agents,
        _ => Mode::Store,
    };
    if let Some(seed) = args.seed {
        return ExitCode::from(u8::from(larder_sim::report(mode, seed)));
    }
    if let Some(operations) = args.exhaustive {
        return exhaust(operations, args.blocks);
    }
    let begun = Instant::now();
    let until = args
        .minutes
        .map(|minutes| begun + Duration::from_secs_f64(minutes * 60.0));
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.unwrap_or_else(cores).max(1);
    let end = args.first.saturating_add(args.seeds);
    let campaign = larder_sim::campaign(mode, args.first, end, threads, until);
    let seconds = begun.elapsed().as_secs_f64();
    println!("{}{:?}\n", campaign.tally, campaign.totals);
    println!(
        "{} seeds from {} on in {seconds:.1} s on {threads} threads: \
         {:.0} seeds/s a thread, {} failed",
        campaign.played,
        args.first,
        campaign.played as f64 / seconds / threads as f64,
        campaign.failed.len(),
    );
    for seed in &campaign.failed {
        println!("seed {seed} fails: {}", mode.command(*seed));
    }
    if let Some(&seed) = campaign.failed.first() {
        let _ = larder_sim::report(mode, seed);
    }
    ExitCode::from(u8::from(!campaign.failed.is_empty()))
}

//! Plays the simulation: many seeds, or one again.
//!
//! `larder-sim --seeds 100000 --minutes 10`, `larder-sim --seed 8104`.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;

/// Plays a simulated store under crashes and faults, seed by seed.
#[derive(Parser)]
#[command(name = "larder-sim", version)]
struct Args {
    /// How many seeds.
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    /// The first of them.
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Stop after so many minutes, however many seeds are left.
    #[arg(long)]
    minutes: Option<f64>,
    /// Play this one again and print its last events.
    #[arg(long)]
    seed: Option<u64>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(seed) = args.seed {
        return ExitCode::from(u8::from(larder_sim::report(seed)));
    }
    let begun = Instant::now();
    let until = args
        .minutes
        .map(|minutes| begun + Duration::from_secs_f64(minutes * 60.0));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let end = args.first.saturating_add(args.seeds);
    let campaign = larder_sim::campaign(args.first, end, threads, until);
    println!("{} seeds, {:?}", campaign.played, begun.elapsed());
    println!("{:?}", campaign.totals);
    for seed in &campaign.failed {
        println!("seed {seed} fails: larder-sim --seed {seed}");
    }
    ExitCode::from(u8::from(!campaign.failed.is_empty()))
}

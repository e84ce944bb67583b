//! The `larder` binary: stores pages of LLM key-value caches on local disks, and shows what is in there.
//!
//! Each subcommand has a file of its own; what they share is the small library beside them.
//!
//! | module | what it is |
//! |---|---|
//! | [`create`] | makes a store, or enlarges one |
//! | [`inspect`], [`verify`] | look at a store without opening it: what is in it, and whether it is whole ([`findings`], [`repair`]) |
//! | [`compact`] | puts a store in order |
//! | [`export`], [`import`] | pages of a store to a file ([`archive`]), and from one into a store |
//! | [`bench`](mod@bench) | measures puts, gets and lookups |
//! | [`replay`] | runs a request trace against a store ([`ack_log`]: what was promised before a kill) |
//! | [`doctor`] | says what this machine offers and what is in the way |
//! | [`serve`], [`stat`] | own a store for other processes; ask who does |
//! | [`demo`] | a first minute with nothing to prepare ([`device`]: the disk's own speed, [`conversations`]: its load) |
//! | [`open`], [`trace`], [`workload`], [`session`] | opening a store, request traces, made-up pages, serving requests |
//! | [`size`], [`usage`], [`report`], [`failure`], [`interrupt`] | sizes, meters, output, exit codes, signals |
//!
//! Conventions: `--json` prints one document on stdout, people get lines; progress goes to stderr and only to a terminal;
//! `LARDER_LOG` (`warn` unless set) chooses what the engine logs to stderr.

#![forbid(unsafe_code)]

mod ack_log;
mod archive;
mod bench;
mod compact;
mod conversations;
mod create;
mod demo;
mod device;
mod doctor;
mod export;
mod failure;
mod findings;
mod import;
mod inspect;
mod interrupt;
mod open;
mod repair;
mod replay;
mod report;
mod serve;
mod session;
mod stat;
mod usage;
mod verify;
mod workload;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use larder_tools::{size, trace};
use tracing_subscriber::EnvFilter;

/// A local L3 for LLM serving: a page store on NVMe
///
/// Exit codes: 0 done, 1 found something wrong, 2 usage, 3 environment (locked, not a store, no space), 130 interrupted.
#[derive(Parser)]
#[command(name = "larder", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Create(create::CreateArgs),
    Inspect(inspect::InspectArgs),
    Verify(verify::VerifyArgs),
    Compact(compact::CompactArgs),
    Export(export::ExportArgs),
    Import(import::ImportArgs),
    Bench(bench::BenchArgs),
    Replay(replay::ReplayArgs),
    Doctor(doctor::DoctorArgs),
    Serve(serve::ServeArgs),
    Stat(stat::StatArgs),
    Demo(demo::DemoArgs),
    #[command(hide = true)]
    DemoWorker(demo::WorkerArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    log_to_stderr();
    let ended = match &cli.command {
        Command::Create(args) => create::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Compact(args) => compact::run(args),
        Command::Export(args) => export::run(args),
        Command::Import(args) => import::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Stat(args) => stat::run(args),
        Command::Demo(args) => demo::run(args),
        Command::DemoWorker(args) => demo::work(args),
    };
    match ended {
        Ok(ending) => ending.into(),
        Err(failure) => {
            eprintln!("larder: {failure}");
            failure.exit_code()
        }
    }
}

fn log_to_stderr() {
    let filter = EnvFilter::try_from_env("LARDER_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    subscriber.with_ansi(std::io::stderr().is_terminal()).init();
}

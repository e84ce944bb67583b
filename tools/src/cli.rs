//! The command line: from its arguments to its exit code.
//!
//! Separate from the binary, so that the Python package runs the same command line in its own
//! process.

use std::ffi::OsString;

use clap::{CommandFactory, Parser, Subcommand};
use nix::sys::signal::{SigSet, Signal};

pub use crate::program::{Program, complain};
use crate::program::{complain_in_json, lacks};

use crate::failure::Failure;
use crate::log::LogFormat;
use crate::{
    bench, compact, create, delete, demo, doctor, erase, export, exporter, gone, import, inspect,
    keys, log, manuals, pin, plan, quota, record, remote, replay, serve, sheet, stat, superblock,
    top, verify, volume,
};

/// A local L3 for LLM serving: a page store on NVMe
///
/// Exit codes: 0 done, 1 found something wrong, 2 usage, 3 environment (locked, not a store, no
/// space), 130 interrupted.
#[derive(Parser)]
#[command(name = "larder", version, max_term_width = 100)]
struct Cli {
    /// Form of the log on stderr; LARDER_LOG sets its levels [default: text]
    #[arg(
        long,
        global = true,
        value_enum,
        default_value_t,
        hide_default_value = true
    )]
    log_format: LogFormat,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Create(create::CreateArgs),
    Volume(volume::VolumeArgs),
    Superblock(superblock::SuperblockArgs),
    Key(keys::KeyCommandArgs),
    Inspect(inspect::InspectArgs),
    Verify(verify::VerifyArgs),
    Compact(compact::CompactArgs),
    Export(export::ExportArgs),
    Import(import::ImportArgs),
    Bench(bench::BenchArgs),
    Plan(plan::PlanArgs),
    Record(record::RecordArgs),
    Replay(replay::ReplayArgs),
    Doctor(doctor::DoctorArgs),
    #[command(hide = true)]
    DoctorChecks(doctor::apart::ChecksArgs),
    Serve(serve::ServeArgs),
    Stat(stat::StatArgs),
    Top(top::TopArgs),
    Report(sheet::SheetArgs),
    Delete(delete::DeleteArgs),
    Erase(erase::EraseArgs),
    Quota(quota::QuotaArgs),
    Pin(pin::PinArgs),
    Unpin(pin::UnpinArgs),
    Remote(remote::RemoteArgs),
    Exporter(exporter::ExporterArgs),
    Demo(demo::DemoArgs),
    Completions(manuals::CompletionsArgs),
    #[command(hide = true)]
    Man(manuals::ManArgs),
    #[command(hide = true)]
    DemoWorker(demo::WorkerArgs),
}

/// Runs a command line (without the program's name). Returns the exit code. Errors go to stderr.
pub fn run(program: &Program, arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let named = std::iter::once(OsString::from("larder")).chain(arguments);
    let named: Vec<OsString> = named.collect();
    let cli = match Cli::try_parse_from(&named) {
        Ok(cli) => cli,
        Err(mut error) => {
            gone::explain(&mut error);
            if error.use_stderr() && asks_for_json(&named) {
                complain_in_json();
                complain(&error.render());
            } else {
                // If this cannot be printed, no other message can.
                let _ = error.print();
            }
            return u8::try_from(error.exit_code()).unwrap_or(2);
        }
    };
    log::of_command(cli.log_format);
    let is_printer = matches!(cli.command, Command::Completions(_) | Command::Man(_));
    if let Some(lacking) = lacks().filter(|_| !is_printer) {
        let failure = Failure::environment(lacking);
        complain(&failure);
        return failure.exit_code();
    }
    // A file that may not grow (`ulimit -f`) is an error to report. Without this block the signal
    // ends the process silently.
    let _ = SigSet::from_iter([Signal::SIGXFSZ]).thread_block();
    let ended = match &cli.command {
        Command::Create(args) => create::run(args),
        Command::Volume(args) => volume::run(args),
        Command::Superblock(args) => superblock::run(args),
        Command::Key(args) => keys::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Compact(args) => compact::run(args),
        Command::Export(args) => export::run(args),
        Command::Import(args) => import::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Record(args) => record::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Doctor(args) => doctor::run(args, program),
        Command::DoctorChecks(args) => doctor::apart::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Stat(args) => stat::run(args),
        Command::Top(args) => top::run(args),
        Command::Report(args) => sheet::run(args),
        Command::Delete(args) => delete::run(args),
        Command::Erase(args) => erase::run(args),
        Command::Quota(args) => quota::run(args),
        Command::Pin(args) => pin::pin(args),
        Command::Unpin(args) => pin::unpin(args),
        Command::Remote(args) => remote::run(args),
        Command::Exporter(args) => exporter::run(args),
        Command::Demo(args) => demo::run(args, program),
        Command::Completions(args) => manuals::completions(args, Cli::command()),
        Command::Man(args) => manuals::man(args, Cli::command()),
        Command::DemoWorker(args) => demo::work(args),
    };
    match ended {
        Ok(ending) => ending.exit_code(),
        Err(failure) => {
            complain(&failure);
            failure.exit_code()
        }
    }
}

/// Whether a command line that cannot be parsed asks for a log in JSON.
fn asks_for_json(arguments: &[OsString]) -> bool {
    let follows = |pair: &[OsString]| pair[0] == "--log-format" && pair[1] == "json";
    arguments
        .iter()
        .any(|argument| argument == "--log-format=json")
        || arguments.windows(2).any(follows)
}

#[cfg(test)]
mod tests;

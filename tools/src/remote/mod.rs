//! `larder remote`: runs of pages in a place that nodes share, and from it into a store.
//!
//! `push` reads a store as `export` does, without opening it. `pull` stores pages as `import` does.
//! Both are for an operator: before a roll-out, or for a new node.
//!
//! A module imports only modules below it, or behind it in its row.
//!
//! | module | command |
//! |---|---|
//! | `key` | `key`: makes a key file |
//! | `bench` | `bench`: the speed of a bucket; with the feature `remote` alone |
//! | `init` | `init`: the settings of a bucket |
//! | `push`, `pull` | runs from a store, and into one |
//! | `shelf` | `ls`, `verify`: the objects themselves |
//! | `prune` | `prune`: removes objects |
//! | `erase` | the runs of a tenant, for `larder erase` |
//! | `switch` | `on`, `off`: the remotes of a store in use |
//! | `reports` | parts that reports share |
//! | `in_order` | work on several runs at once |
//! | `pull_order` | the order of a pull |
//! | `place` | the remote that a command names |
//! | `left_out` | the objects that a command leaves out |
//!
//! An object that cannot be looked at, read, written or removed is left out and named, and the
//! command ends with 1. Errors of the remote itself end a command.

#[cfg(feature = "remote")]
mod bench;
mod erase;
mod in_order;
mod init;
mod key;
mod left_out;
mod place;
mod prune;
mod pull;
mod pull_order;
mod push;
mod reports;
mod shelf;
mod switch;

use clap::{Args, Subcommand};

use crate::failure::{Ending, Failure};
pub use erase::{ErasedRemoteArgs, Removed};

/// Share pages between nodes: in an object store, or a directory that all of them mount
///
/// Exit codes: 0 done, 1 something is damaged, forged, unreadable or incomplete, 2 usage, 3
/// environment, also a place that is no remote yet, 130 interrupted.
#[derive(Args, Debug)]
pub struct RemoteArgs {
    #[command(subcommand)]
    command: RemoteCommand,
}

#[derive(Debug, Subcommand)]
enum RemoteCommand {
    Init(init::InitArgs),
    Key(key::KeyArgs),
    Push(push::PushArgs),
    Pull(pull::PullArgs),
    Ls(shelf::LsArgs),
    Verify(shelf::VerifyArgs),
    Prune(prune::PruneArgs),
    #[cfg(feature = "remote")]
    Bench(bench::BenchArgs),
    /// Make no requests to the remotes of a store in use, until `larder remote on` or the end of
    /// its owner
    Off(switch::SwitchArgs),
    /// Resume the work of the remotes of a store in use
    On(switch::SwitchArgs),
}

/// Runs the command.
///
/// # Errors
/// Those of the subcommand.
pub fn run(args: &RemoteArgs) -> Result<Ending, Failure> {
    match &args.command {
        RemoteCommand::Init(args) => init::run(args),
        RemoteCommand::Key(args) => key::run(args),
        RemoteCommand::Push(args) => push::run(args),
        RemoteCommand::Pull(args) => pull::run(args),
        RemoteCommand::Ls(args) => shelf::ls(args),
        RemoteCommand::Verify(args) => shelf::verify(args),
        RemoteCommand::Prune(args) => prune::run(args),
        #[cfg(feature = "remote")]
        RemoteCommand::Bench(args) => bench::run(args),
        RemoteCommand::Off(args) => switch::run(args, false),
        RemoteCommand::On(args) => switch::run(args, true),
    }
}

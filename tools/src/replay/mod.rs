//! `larder replay`: runs a request trace against a store, through three tiers, or without bytes.
//!
//! A module imports only modules below it.
//!
//! | module | content |
//! |---|---|
//! | `sizes` | the store alone, in several sizes, and the gain of a larger one |
//! | `store_only` | the store alone: the longest stored prefix is read, the rest put |
//! | `tiers` | L1, L2 and the store in front of servers that compute, with and without each tier |
//! | `retention` | the learned policy of eviction beside LRU and the optimum, without bytes |
//! | `fleet` | nodes that share an L4 and lose their disks, without bytes |
//! | `clock` | the time of a trace for the order of eviction of a real store |
//! | `requests` | a trace in memory, for the replays without bytes |
//! | `setup` | the trace, and the store: its creation, and the checks of an existing one |
//!
//! Every byte that is read back from a store is compared with its expected value.

mod clock;
mod fleet;
mod requests;
mod retention;
mod setup;
mod sizes;
mod store_only;
mod tiers;

use clap::{Args, Subcommand};

use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;

/// Run a request trace: against a store, through all three tiers, or without bytes
#[derive(Args, Debug)]
pub struct ReplayArgs {
    #[command(subcommand)]
    command: ReplayCommand,
}

#[derive(Debug, Subcommand)]
enum ReplayCommand {
    Store(store_only::StoreArgs),
    Tiers(tiers::TiersArgs),
    Policy(retention::RetentionArgs),
    L4(fleet::FleetArgs),
}

/// Runs the command.
pub fn run(args: &ReplayArgs) -> Result<Ending, Failure> {
    let interrupt = Interrupt::watch();
    match &args.command {
        ReplayCommand::Store(args) if args.capacity.len() > 1 => sizes::run(args, &interrupt),
        ReplayCommand::Store(args) => store_only::run(args, &interrupt),
        ReplayCommand::Tiers(args) => tiers::run(args, &interrupt),
        ReplayCommand::Policy(args) => retention::run(args, &interrupt),
        ReplayCommand::L4(args) => fleet::run(args, &interrupt),
    }
}

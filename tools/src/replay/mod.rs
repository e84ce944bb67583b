//! `larder replay`: runs a request trace against a store, or with `--l1` through all three tiers.
//!
//! A module imports only modules below it.
//!
//! | module | content |
//! |---|---|
//! | `sizes` | the store alone, in several sizes, and the gain of a larger one |
//! | `store_only` | the store alone: the longest stored prefix is read, the rest put |
//! | `tiers` | L1, L2 and the store in front of servers that compute, with and without each tier |
//! | `retention` | a policy of eviction beside LRU and the optimum, without bytes |
//! | `fleet` | nodes that share an L4 and lose their disks, without bytes |
//! | `requests` | a trace in memory, for the replays without bytes |
//! | `setup` | the trace, and the store: its creation, and the checks of an existing one |
//!
//! Every byte that is read back from a store is compared with its expected value.

mod fleet;
mod requests;
mod retention;
mod setup;
mod sizes;
mod store_only;
mod tiers;

use clap::Args;

use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use setup::Setup;

/// Run a request trace against a store, or with --l1 through all three tiers, and check every byte
#[derive(Args, Clone, Debug)]
pub struct ReplayArgs {
    #[command(flatten)]
    setup: Setup,
    #[command(flatten)]
    tiers: tiers::TiersArgs,
    #[command(flatten)]
    retention: retention::RetentionArgs,
    #[command(flatten)]
    fleet: fleet::FleetArgs,
}

/// Runs the command.
pub fn run(args: &ReplayArgs) -> Result<Ending, Failure> {
    let interrupt = Interrupt::watch();
    let ReplayArgs {
        setup,
        tiers,
        retention,
        fleet,
    } = args;
    if let Some(policy) = retention.policy
        && setup.capacity.is_empty()
    {
        return retention::run(setup, retention, policy, &interrupt);
    }
    if let Some(admission) = fleet.l4 {
        return fleet::run(setup, fleet, admission, &interrupt);
    }
    let policy = retention.policy.unwrap_or_default();
    match (setup.page_bytes, tiers.plan()?) {
        (_, Some(_)) if setup.capacity.len() > 1 => Err(Failure::usage(
            "--l1 takes one --capacity; several sizes are compared with --page-bytes",
        )),
        (Some(page_bytes), None) if setup.capacity.len() > 1 => {
            sizes::run(setup, page_bytes, policy, &interrupt)
        }
        (_, Some(plan)) => tiers::run(setup, &plan, &interrupt),
        (Some(page_bytes), None) => store_only::run(setup, page_bytes, policy, &interrupt),
        (None, None) => Err(Failure::usage(
            "give --page-bytes, or --l1 for all three tiers",
        )),
    }
}

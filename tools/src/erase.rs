//! `larder erase`: the keys of a tenant of an encrypted store, and with them its pages.
//!
//! It is a client if the store has an owner. The keys are gone from all volumes, and no page of the
//! tenant is found, when the command has ended. Processes that may still have the keys are named.

use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use larder_engine::Store;
use larder_store::share::{Erasure, erase_tenant};
use serde::Serialize;

use crate::failure::{Ending, Failure};
use crate::open::{self, OpenArgs};
use crate::owner::process;
use crate::place;
use crate::remote::{ErasedRemoteArgs, Removed};
use crate::report::{self, Lines, Report, count};
use crate::size;

/// Erase a tenant of an encrypted store: its keys in all volumes, and with them its pages, also
/// while servers use the store
///
/// Every process that uses the store is asked to wipe the keys. Processes that have not answered in
/// time are named: continue or end them, and run the command again. L1, L2 and GPU memory of
/// running engines, snapshots, backups and archives are not reached. Nodes that share a remote:
/// erase the tenant on all of them, the last time with --remote.
///
/// Exit codes: 0 erased, 1 runs of the tenant may be left in the remote, 2 usage, 3 environment, or
/// a process may still have a key.
#[derive(Args, Debug)]
pub struct EraseArgs {
    /// The store: its first volume, or a backend's directory
    #[arg(value_parser = place::parser())]
    path: PathBuf,
    /// The field `tenant` of its namespaces
    #[arg(long, value_name = "NAME")]
    tenant: String,
    /// How long to wait until all processes have wiped the keys: at most a minute
    #[arg(long, value_name = "DURATION", value_parser = size::duration, default_value = "10s")]
    wait: Duration,
    #[command(flatten)]
    remote: ErasedRemoteArgs,
    #[command(flatten)]
    open: OpenArgs,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct EraseReport {
    /// The store: its first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// Slots of the erased keys.
    erased_keys: Vec<NonZeroU16>,
    /// Pages that went with them.
    erased_pages: u64,
    /// Processes that may still have a key.
    waits_for: Vec<Keyholder>,
    /// Runs that were removed from a remote.
    #[serde(flatten)]
    removed: Option<Removed>,
}

#[derive(Serialize)]
struct Keyholder {
    pid: Option<u32>,
    program: String,
}

impl Report for EraseReport {
    const COMMAND: &'static str = "erase";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        lines.text(match self.erased_keys.len() {
            0 => "no tenant of this name has a key: it was erased before, or never stored a page"
                .to_owned(),
            keys => format!(
                "erased {}, and {} with them",
                count(keys as u64, "key"),
                count(self.erased_pages, "page")
            ),
        });
        for Keyholder { pid, program } in &self.waits_for {
            let process = process(*pid);
            lines.text(format!(
                "{process} ({program}) may still have a key: continue or end it, and run the \
                 command again"
            ));
        }
        if let Some(removed) = &self.removed {
            removed.lines(&mut lines);
        }
        lines
    }
}

/// Runs the command.
pub fn run(args: &EraseArgs) -> Result<Ending, Failure> {
    // Before the erasure: an operator may have mistyped it.
    let remote = args.remote.open()?;
    let work = |store: &Store| Ok(erase_tenant(store, &args.tenant, args.wait)?);
    let erasure: Erasure = open::with_any(&args.path, args.open.options()?, work)?;
    let keyholder = |of: larder_store::share::Keyholder| Keyholder {
        pid: of.pid,
        program: of.name,
    };
    let report = EraseReport {
        path: args.path.clone(),
        erased_keys: erasure.slots,
        erased_pages: erasure.pages,
        waits_for: erasure.waits_for.into_iter().map(keyholder).collect(),
        removed: remote.map(|remote| remote.remove(&args.tenant)),
    };
    report::print(&report, args.json)?;
    let is_partial = report.removed.as_ref().is_some_and(Removed::is_partial);
    Ok(match report.waits_for.is_empty() {
        true => Ending::Done.or_findings(is_partial),
        false => Ending::Blocked,
    })
}

//! `larder replay`: runs a request trace against a store, or with `--l1` through all three tiers.
//!
//! | module | content |
//! |---|---|
//! | `store_only` | the store alone: the longest stored prefix is read, the rest put |
//! | `sizes` | the same for stores of several sizes, and the gain of a larger store |
//! | `retention` | a policy of eviction beside LRU and the optimum, without bytes |
//! | `fleet` | nodes that share an L4 and lose their disks, without bytes |
//! | `tiers` | L1, L2 and the store in front of servers that compute, with and without each tier |
//! | `drive` | one run of a trace through servers, in virtual time |
//! | `server` | one of them: its cache, its queue, its prefills |
//! | `machine` | virtual time: clock, disk and links, for the servers' caches |
//! | `shared` | a disk that several transfers share |
//! | `model` | the cache size and the computation of models |
//! | `speed` | the measured speed of the disk and the memory |
//! | `outcome` | the result of a run |
//! | `tiers_report` | the document and the lines of `tiers` |
//!
//! In both modes every byte that is read back is compared with its expected value.

mod drive;
mod fleet;
mod machine;
mod model;
mod outcome;
mod retention;
mod server;
mod shared;
mod sizes;
mod speed;
mod store_only;
mod tiers;
mod tiers_report;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use larder_engine::{CreateOptions, Created, PageStore, PutStatus, Refusal, Store};
use larder_format::{BLOCK_BYTES, HEADER_BLOCKS, Namespace, PageShape};

use crate::bench;
use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::open::OpenArgs;
use crate::size::{self, ByteSize};

/// Tokens of a block of the trace.
const BLOCK_TOKENS: u32 = 512;

/// Run a request trace against a store, or with --l1 through all three tiers, and check every byte
#[derive(Args, Clone, Debug)]
pub struct ReplayArgs {
    /// Mooncake trace: one JSON object a line, with hash_ids of 512-token blocks
    trace: PathBuf,
    /// The store, or a backend's directory: created when it does not exist, continued when it does
    #[arg(
        long,
        value_parser = crate::place::parser(),
        required_unless_present_any = ["policy", "l4"],
        default_value = "store"
    )]
    store: PathBuf,
    /// Size of the store (4GiB); with --l1, before it is scaled. With several sizes
    /// (1GiB,2GiB,4GiB) a store of each is made beside --store and removed, and the hit rates are
    /// compared
    #[arg(
        long,
        value_name = "SIZE",
        value_delimiter = ',',
        required_unless_present_any = ["policy", "l4"]
    )]
    capacity: Vec<ByteSize>,
    /// Size of a page
    #[arg(long, required_unless_present_any = ["l1", "policy", "l4"], conflicts_with = "TiersArgs")]
    page_bytes: Option<ByteSize>,
    /// Size of a segment of a store that is created [default: by its size]
    #[arg(long)]
    segment_size: Option<ByteSize>,
    /// Stop after this many requests
    #[arg(long)]
    limit: Option<u64>,
    /// How long a put may wait for space
    #[arg(long, default_value = "30s", value_parser = size::duration)]
    wait: Duration,
    /// Append every acknowledged page to this file
    #[arg(long, value_name = "FILE", conflicts_with = "l1")]
    ack_log: Option<PathBuf>,
    /// Flush after every so many requests, and log only flushed pages to --ack-log: they survive
    /// power loss
    #[arg(
        long,
        value_name = "REQUESTS",
        conflicts_with = "l1",
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    flush_every: Option<u64>,
    /// First check the store against such a file, also one that --ack-log continues; it must have
    /// all that was put into the store
    #[arg(long, value_name = "FILE", conflicts_with = "l1")]
    check_log: Option<PathBuf>,
    #[command(flatten)]
    open: OpenArgs,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
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
    if let Some(policy) = args.retention.policy
        && args.capacity.is_empty()
    {
        return retention::run(args, policy, &interrupt);
    }
    if let Some(admission) = args.fleet.l4 {
        return fleet::run(args, admission, &interrupt);
    }
    match (args.page_bytes, args.tiers.plan()?) {
        (_, Some(_)) if args.capacity.len() > 1 => Err(Failure::usage(
            "--l1 takes one --capacity; several sizes are compared with --page-bytes",
        )),
        (Some(page_bytes), None) if args.capacity.len() > 1 => {
            sizes::run(args, page_bytes, &interrupt)
        }
        (_, Some(plan)) => tiers::run(args, &plan, &interrupt),
        (Some(page_bytes), None) => store_only::run(args, page_bytes, &interrupt),
        (None, None) => Err(Failure::usage(
            "give --page-bytes, or --l1 for all three tiers",
        )),
    }
}

impl ReplayArgs {
    /// The capacity of a run: one is required.
    fn capacity(&self) -> u64 {
        self.capacity.first().map_or(0, |size| size.0)
    }
}

/// Creates the store if there is none. Returns whether it did. A store in which no page of this
/// shape fits is not created.
fn create_missing(args: &ReplayArgs, bytes: u64, shape: &PageShape) -> Result<bool, Failure> {
    let there = args.store.try_exists();
    if there.map_err(|error| {
        Failure::environment(format!("{}: {error}; check the path", args.store.display()))
    })? {
        return Ok(false);
    }
    let planned = create(args, &args.store, bytes, true)?;
    let page_blocks = u64::from(shape.page_blocks()) + 1;
    if (page_blocks + u64::from(HEADER_BLOCKS)) * BLOCK_BYTES as u64 > planned.segment_bytes {
        return Err(does_not_fit(&args.store));
    }
    create(args, &args.store, bytes, false)?;
    Ok(true)
}

/// No page of the replay fits the store.
fn does_not_fit(store: &Path) -> Failure {
    let why = bench::reason(PutStatus::Refused(Refusal::TooLarge));
    Failure::usage(format!("{}: {why}", store.display()))
}

fn create(args: &ReplayArgs, path: &Path, bytes: u64, dry_run: bool) -> Result<Created, Failure> {
    let options = CreateOptions::new(bytes).with(|o| {
        o.segment_size = args.segment_size.map(|size| size.0);
        o.dry_run = dry_run;
    });
    larder_engine::create(path, &options).map_err(|error| Failure::sized(error, "--capacity"))
}

fn check_capacity(args: &ReplayArgs, store: &Store, bytes: u64) -> Result<(), Failure> {
    let capacity_bytes = store.stats().capacity_bytes;
    // A file is whole blocks.
    if bytes - bytes % BLOCK_BYTES as u64 == capacity_bytes {
        return Ok(());
    }
    let scaled = if bytes == args.capacity() {
        String::new()
    } else {
        format!(", which is {bytes} when scaled")
    };
    Err(Failure::usage(format!(
        "{}: its capacity is {capacity_bytes} bytes, --capacity says {}{scaled}; give the store's \
         own, or another --store",
        args.store.display(),
        args.capacity()
    )))
}

/// Refuses the namespace of replay pages if the store holds replay pages of another shape.
fn check_namespace(store: &Store, path: &Path, asked: &Namespace) -> Result<(), Failure> {
    let other = store
        .namespaces()
        .into_iter()
        .find(|held| held.fields().model == asked.fields().model && held != asked);
    if let Some(held) = other {
        return Err(Failure::usage(format!(
            "{}: namespace mismatch: it holds pages of `{held}`, asked for is `{asked}`; give the \
             same --page-bytes (or \
             --model, --page-size and --scale), or another --store",
            path.display()
        )));
    }
    Ok(())
}

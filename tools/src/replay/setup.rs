//! The trace of a replay, and its store: its creation, and the checks of an existing one.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use larder_engine::{CreateOptions, Created, PageStore, PutStatus, Refusal, Store};
use larder_format::{BLOCK_BYTES, HEADER_BLOCKS, Namespace, PageShape};

use crate::bench;
use crate::failure::Failure;
use crate::open::OpenArgs;
use crate::size::{self, ByteSize};

/// The arguments of every replay.
#[derive(Args, Clone, Debug)]
pub struct Setup {
    /// Mooncake trace: one JSON object a line, with hash_ids of 512-token blocks
    pub trace: PathBuf,
    /// The store, or a backend's directory: created when it does not exist, continued when it does
    #[arg(
        long,
        value_parser = crate::place::parser(),
        required_unless_present_any = ["policy", "l4"],
        default_value = "store"
    )]
    pub store: PathBuf,
    /// Size of the store (4GiB); with --l1, before it is scaled. With several sizes
    /// (1GiB,2GiB,4GiB) a store of each is made beside --store and removed, and the hit rates are
    /// compared
    #[arg(
        long,
        value_name = "SIZE",
        value_delimiter = ',',
        required_unless_present_any = ["policy", "l4"]
    )]
    pub capacity: Vec<ByteSize>,
    /// Size of a page
    #[arg(long, required_unless_present_any = ["l1", "policy", "l4"], conflicts_with = "TiersArgs")]
    pub page_bytes: Option<ByteSize>,
    /// Size of a segment of a store that is created [default: by its size]
    #[arg(long)]
    pub segment_size: Option<ByteSize>,
    /// Stop after this many requests
    #[arg(long)]
    pub limit: Option<u64>,
    /// How long a put may wait for space
    #[arg(long, default_value = "30s", value_parser = size::duration)]
    pub wait: Duration,
    /// Append every acknowledged page to this file
    #[arg(long, value_name = "FILE", conflicts_with = "l1")]
    pub ack_log: Option<PathBuf>,
    /// Flush after every so many requests, and log only flushed pages to --ack-log: they survive
    /// power loss
    #[arg(
        long,
        value_name = "REQUESTS",
        conflicts_with = "l1",
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    pub flush_every: Option<u64>,
    /// First check the store against such a file, also one that --ack-log continues; it must have
    /// all that was put into the store
    #[arg(long, value_name = "FILE", conflicts_with = "l1")]
    pub check_log: Option<PathBuf>,
    #[command(flatten)]
    pub open: OpenArgs,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

impl Setup {
    /// The capacity of a run: one is required.
    pub fn capacity(&self) -> u64 {
        self.capacity.first().map_or(0, |size| size.0)
    }

    /// Most requests to read.
    pub fn limit(&self) -> usize {
        self.limit.map_or(usize::MAX, |limit| {
            usize::try_from(limit).unwrap_or(usize::MAX)
        })
    }

    /// Creates the store if there is none. Returns whether it did. A store in which no page of this
    /// shape fits is not created.
    pub fn create_missing(&self, bytes: u64, shape: &PageShape) -> Result<bool, Failure> {
        let there = self.store.try_exists();
        if there.map_err(|error| {
            Failure::environment(format!("{}: {error}; check the path", self.store.display()))
        })? {
            return Ok(false);
        }
        let planned = self.create(&self.store, bytes, true)?;
        let page_blocks = u64::from(shape.page_blocks()) + 1;
        if (page_blocks + u64::from(HEADER_BLOCKS)) * BLOCK_BYTES as u64 > planned.segment_bytes {
            return Err(self.does_not_fit());
        }
        self.create(&self.store, bytes, false)?;
        Ok(true)
    }

    /// Creates a store with the segments that were asked for, or plans it.
    pub fn create(&self, path: &Path, bytes: u64, dry_run: bool) -> Result<Created, Failure> {
        let options = CreateOptions::new(bytes).with(|o| {
            o.segment_size = self.segment_size.map(|size| size.0);
            o.dry_run = dry_run;
        });
        larder_engine::create(path, &options).map_err(|error| Failure::sized(error, "--capacity"))
    }

    /// No page of the replay fits the store.
    pub fn does_not_fit(&self) -> Failure {
        let why = bench::reason(PutStatus::Refused(Refusal::TooLarge));
        Failure::usage(format!("{}: {why}", self.store.display()))
    }

    /// Refuses a store of another capacity.
    pub fn check_capacity(&self, store: &Store, bytes: u64) -> Result<(), Failure> {
        let capacity_bytes = store.stats().capacity_bytes;
        // A file is whole blocks.
        if bytes - bytes % BLOCK_BYTES as u64 == capacity_bytes {
            return Ok(());
        }
        let scaled = if bytes == self.capacity() {
            String::new()
        } else {
            format!(", which is {bytes} when scaled")
        };
        Err(Failure::usage(format!(
            "{}: its capacity is {capacity_bytes} bytes, --capacity says {}{scaled}; give the \
             store's own, or another --store",
            self.store.display(),
            self.capacity()
        )))
    }
}

/// Refuses the namespace of replay pages if the store holds replay pages of another shape.
pub fn check_namespace(store: &Store, path: &Path, asked: &Namespace) -> Result<(), Failure> {
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

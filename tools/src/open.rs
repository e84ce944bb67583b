//! Options of every command that opens a store.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use larder_disk::probe::Want;
use larder_engine::{
    CodecChoice, OpenOptions, PageStore, PutOptions, SharedReads, Store, StoreError, SyncPolicy,
};
use larder_store::api::WriteBudget;

use crate::failure::Failure;
use crate::key::KeyArgs;
use crate::policy::Policy;
use crate::size::{self, ByteSize};

/// Longest wait of a command's put for space or for earlier writes.
const PUT_WAIT: Duration = Duration::from_secs(30);

/// The volumes of a store that a command opens for writing.
#[derive(Args, Clone, Debug)]
pub struct OpenArgs {
    /// Where a volume other than the first is, if it has been moved; the store remembers it from
    /// then on
    #[arg(long = "volume", value_name = "PATH")]
    volumes: Vec<PathBuf>,
    #[command(flatten)]
    pub key: KeyArgs,
}

/// How bytes are moved, and when they are durable.
#[derive(Args, Clone, Debug)]
pub struct DiskArgs {
    /// How bytes are moved: uring, threads, or auto, which tries io_uring and falls back to threads
    #[arg(long, default_value_t = Want::Auto)]
    disk: Want,
    /// When puts become durable: on flush, within a second, or before each put returns
    #[arg(long, value_enum, default_value_t = SyncArg::Interval)]
    sync: SyncArg,
}

/// The way in which a process serves a store to itself and others.
#[derive(Args, Clone, Debug)]
pub struct ShareArgs {
    #[command(flatten)]
    open: OpenArgs,
    #[command(flatten)]
    disk: DiskArgs,
    /// Operations with the kernel at once, per volume
    #[arg(long, value_name = "N", help_heading = "Expert settings",
        value_parser = clap::value_parser!(u32).range(1..=4096))]
    depth: Option<u32>,
    /// Whether processes that read the same pages share their reads: auto does so for pages that
    /// all ranks of a tensor-parallel group hold alike
    #[arg(long, value_enum, default_value_t = SharedReadsArg::Auto)]
    shared_reads: SharedReadsArg,
    /// Limit of the memory for shared reads; the owner's value holds [default: 512MiB]
    #[arg(long, value_name = "SIZE")]
    staging: Option<ByteSize>,
    /// Write unused blocks once in the background; later puts are faster
    #[arg(long)]
    prewrite: bool,
    /// Encode pages of values in bf16 without loss, so that more of them fit: off, bf16 (all), or
    /// auto (namespaces of bf16, while it is worthwhile); the store's owner decides
    #[arg(long, value_name = "CODEC", default_value_t)]
    codec: CodecChoice,
    /// How much the store writes at most: bytes a day (3TB/day), drive writes a day (0.5DWPD, of
    /// the store's size), or off; the store's owner decides
    #[arg(long, value_name = "BUDGET", default_value_t)]
    write_budget: WriteBudget,
    /// How long a lookup protects the pages that it found; the store's owner decides [default: 10s]
    #[arg(long, value_name = "DURATION", value_parser = size::duration)]
    lease: Option<Duration>,
    /// Which pages go first when the store is full; the store's owner decides
    #[arg(long, value_enum, default_value_t)]
    policy: Policy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SharedReadsArg {
    Auto,
    On,
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SyncArg {
    Relaxed,
    Interval,
    Always,
}

impl OpenArgs {
    /// The engine's options, without a policy: a command that moves or deletes pages is no traffic
    /// to learn from.
    ///
    /// # Errors
    /// The key of the store cannot be read.
    pub fn options(&self) -> Result<OpenOptions, Failure> {
        let wrapping = self.key.read()?;
        Ok(OpenOptions::default().with(|o| {
            o.volumes = self.volumes.clone();
            o.wrapping = wrapping;
        }))
    }
}

impl DiskArgs {
    /// These options with this policy.
    pub fn options(&self, policy: Policy) -> OpenOptions {
        OpenOptions::default().with(|o| {
            o.disk = self.disk;
            o.sync = match self.sync {
                SyncArg::Relaxed => SyncPolicy::Relaxed,
                SyncArg::Interval => SyncPolicy::default(),
                SyncArg::Always => SyncPolicy::Always,
            };
            o.eviction = policy.maker();
        })
    }
}

impl ShareArgs {
    /// Whether an option names the key of the store.
    pub fn has_key(&self) -> bool {
        self.open.key.is_given()
    }

    /// The engine's options.
    ///
    /// # Errors
    /// The key of the store cannot be read.
    pub fn options(&self) -> Result<OpenOptions, Failure> {
        let opening = self.open.options()?;
        Ok(self.disk.options(self.policy).with(|o| {
            o.volumes = opening.volumes;
            o.wrapping = opening.wrapping;
            o.depth = self.depth.unwrap_or(o.depth);
            o.shared_reads = match self.shared_reads {
                SharedReadsArg::Auto => SharedReads::Auto,
                SharedReadsArg::On => SharedReads::On,
                SharedReadsArg::Off => SharedReads::Off,
            };
            o.staging_bytes = self.staging.map_or(o.staging_bytes, |size| size.0);
            o.prewrite = self.prewrite;
            o.codec = self.codec;
            o.write_budget = self.write_budget;
            o.lease = self.lease.unwrap_or(o.lease);
        }))
    }
}

/// A put that waits for space, and for earlier writes.
pub fn patient() -> PutOptions {
    PutOptions::waiting(PUT_WAIT)
}

/// Opens the store at `path`, as a client if an owner serves it. Works on it, and closes it
/// cleanly, whether the work succeeds or not.
///
/// # Errors
/// The work's, else those of opening and closing.
pub fn with_any<T>(
    path: &Path,
    options: OpenOptions,
    work: impl FnOnce(&Store) -> Result<T, Failure>,
) -> Result<T, Failure> {
    // A store without an owner that serves it is opened alone: attaching would wait for its holder.
    let store = match larder_engine::report(path) {
        Ok(_) => Store::attach(path, options)?,
        Err(unserved) => match Store::open(path, options) {
            // The holder's answer, or silence, says more than its lock.
            Err(StoreError::Locked { .. }) if answers(&unserved) => return Err(unserved.into()),
            opened => opened?,
        },
    };
    closing(&store, work)
}

/// Whether a process is on the store's socket, though it does not serve this one.
fn answers(error: &StoreError) -> bool {
    matches!(
        error,
        StoreError::Unanswered { .. }
            | StoreError::Denied { .. }
            | StoreError::NotUnderstood { .. }
    )
}

/// Works on a store, and closes it cleanly, whether the work succeeds or not.
///
/// # Errors
/// The work's, else that of closing.
pub fn closing<T>(
    store: &Store,
    work: impl FnOnce(&Store) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let outcome = work(store);
    let closed = store.close();
    let value = outcome?;
    closed?;
    Ok(value)
}

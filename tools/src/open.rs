//! Options of every command that opens a store.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use larder_disk::probe::Want;
use larder_engine::{OpenOptions, PageStore, SharedReads, Store, StoreError, SyncPolicy};

use crate::failure::Failure;
use crate::policy::Policy;
use crate::size::{self, ByteSize};

/// The way in which a command opens the store.
#[derive(Args, Clone, Debug)]
pub struct OpenArgs {
    /// How bytes are moved: uring, threads, or auto, which tries io_uring and falls back to threads
    #[arg(long, default_value_t = Want::Auto)]
    disk: Want,
    /// Operations with the kernel at once, per volume
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    depth: Option<u32>,
    /// Where a volume other than the first is, if it has been moved; the store remembers it from
    /// then on
    #[arg(long = "volume", value_name = "PATH")]
    volumes: Vec<PathBuf>,
    /// When puts become durable: on flush, within a second, or before each put returns
    #[arg(long, value_enum, default_value_t = SyncArg::Interval)]
    sync: SyncArg,
}

/// The way in which a store is shared with other processes.
#[derive(Args, Clone, Debug)]
pub struct ShareArgs {
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
    /// How long a lookup protects the pages that it found; the store's owner decides [default: 10s]
    #[arg(long, value_name = "DURATION", value_parser = size::duration)]
    lease: Option<Duration>,
    /// Which pages go first when the store is full; the store's owner decides
    #[arg(long, value_enum, default_value_t)]
    pub policy: Policy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SharedReadsArg {
    Auto,
    On,
    Off,
}

impl ShareArgs {
    /// The engine's options, with these of `open`.
    pub fn options(&self, open: &OpenArgs, group: Option<u32>) -> OpenOptions {
        open.options().with(|o| {
            o.group = group;
            o.shared_reads = match self.shared_reads {
                SharedReadsArg::Auto => SharedReads::Auto,
                SharedReadsArg::On => SharedReads::On,
                SharedReadsArg::Off => SharedReads::Off,
            };
            o.staging_bytes = self.staging.map_or(o.staging_bytes, |size| size.0);
            o.prewrite = self.prewrite;
            o.lease = self.lease.unwrap_or(o.lease);
            o.eviction = self.policy.maker();
        })
    }

    /// Attaches to the store at `path`, works on it, and closes it cleanly, whether the work
    /// succeeds or not.
    ///
    /// # Errors
    /// The work's, else those of attaching and closing.
    pub fn with<T>(
        &self,
        open: &OpenArgs,
        path: &Path,
        work: impl FnOnce(&dyn PageStore) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let store = Store::attach(path, self.options(open, None))?;
        let outcome = work(&store);
        finish(&store, outcome)
    }
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
    pub fn options(&self) -> OpenOptions {
        OpenOptions::default().with(|o| {
            o.disk = self.disk;
            o.depth = self.depth.unwrap_or(o.depth);
            o.volumes = self.volumes.clone();
            o.sync = match self.sync {
                SyncArg::Relaxed => SyncPolicy::Relaxed,
                SyncArg::Interval => SyncPolicy::default(),
                SyncArg::Always => SyncPolicy::Always,
            };
        })
    }

    /// Operations with the kernel at once, per volume.
    pub fn depth(&self) -> u32 {
        self.options().depth
    }

    /// Opens the store at `path` with this policy, works on it, and closes it cleanly, whether the
    /// work succeeds or not.
    ///
    /// # Errors
    /// The work's, else those of opening and closing.
    pub fn with<T>(
        &self,
        path: &Path,
        policy: Policy,
        work: impl FnOnce(&Store) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let options = self.options().with(|o| o.eviction = policy.maker());
        let store = Store::open(path, options)?;
        let outcome = work(&store);
        finish(&store, outcome)
    }
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
    let outcome = work(&store);
    finish(&store, outcome)
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

fn finish<T>(store: &dyn PageStore, outcome: Result<T, Failure>) -> Result<T, Failure> {
    let closed = store.close();
    let value = outcome?;
    closed?;
    Ok(value)
}

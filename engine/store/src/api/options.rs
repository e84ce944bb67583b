//! Options of an open, and the settings among them that the owner of a store decides.

use larder_core::core::SyncPolicy;
use larder_core::policy::order::EvictionOrder;
use larder_core::policy::{AdmissionPolicy, PolicyMaker};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use larder_disk::Disk;
use larder_disk::probe::Want;
use larder_seal::WrappingKey;
use serde::{Deserialize, Serialize};

use super::write_budget::WriteBudget;
use crate::beneath::Beneath;
use crate::encoder::CodecChoice;
use crate::protocol::Protocol;

/// Whether processes that attach to one store share their reads. A page that several of them
/// request at about the same time is then read from the device once, and copied from memory by the
/// others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SharedReads {
    /// In namespaces that all ranks of a tensor-parallel group read alike (`tp` is 0 of 1), while
    /// two processes or more use them.
    #[default]
    Auto,
    /// In every namespace that two processes or more use.
    On,
    /// Never.
    Off,
}

/// A layer over the disk of an open store: for fault injection, accounting or rate limits.
///
/// It receives every read, write and sync of the store's volumes, superblocks included. The
/// exceptions are listed in [`disk`](larder_disk). It may delay an operation, or answer it with an
/// error. It may not change bytes: a read that it answers with success has the bytes of the volume,
/// and a write that it answers with success has reached the volume. The durability of acknowledged
/// pages rests on this rule.
///
/// It forwards every method of [`Disk`], also those with a default.
#[derive(Clone)]
pub struct DiskWrapper(Arc<Wrap>);

type Wrap = dyn Fn(Arc<dyn Disk>) -> Arc<dyn Disk> + Send + Sync;

impl DiskWrapper {
    /// `wrap` makes the layer. Its call comes once for each disk: at an open, and at each change
    /// of a shared store's owner.
    pub fn new(wrap: impl Fn(Arc<dyn Disk>) -> Arc<dyn Disk> + Send + Sync + 'static) -> Self {
        DiskWrapper(Arc::new(wrap))
    }

    pub(crate) fn wrap(&self, disk: Arc<dyn Disk>) -> Arc<dyn Disk> {
        (self.0)(disk)
    }
}

impl fmt::Debug for DiskWrapper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DiskWrapper")
    }
}

/// Options of an open: `OpenOptions::default().with(|o| o.depth = 64)`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OpenOptions {
    /// The requested disk. By default io_uring, or threads where it is forbidden.
    pub disk: Want,
    /// A layer over that disk. None by default.
    pub disk_wrapper: Option<DiskWrapper>,
    /// The key that opens an encrypted store: `"file:/etc/larder/store.key".parse()`, or
    /// `credential`, or `command:LINE`. It is read then, and kept in locked memory. None by
    /// default: an encrypted store is refused then. With a key a plain store is refused.
    pub wrapping: Option<WrappingKey>,
    /// Operations of one volume in the kernel at once; 32 by default.
    pub depth: u32,
    /// When puts are durable.
    pub sync: SyncPolicy,
    /// Take no lock and write nothing. Only sealed and proven pages are visible. Off by default.
    pub read_only: bool,
    /// Open without volumes that are missing, for good; their pages are lost. Off by default.
    pub degraded: bool,
    /// How long a lookup protects the pages that it finds; 10 s by default. Such leases cover at
    /// most a quarter of the store: beyond that the oldest end early.
    pub lease: Duration,
    /// A volume that does not answer for this long counts as hung: its pages miss at once. 10 s by
    /// default.
    pub hang_limit: Duration,
    /// Write the blocks of never used segments once, in the background: the first write into a
    /// preallocated file is slower than any later one. It takes a quarter of the device's time at
    /// most, until all are written. Off by default.
    pub prewrite: bool,
    /// Whether writes of puts, reclaim's copies and prewriting give way to reads. On by default.
    /// While calls read, writes get a rate that follows the slow-down of the reads: a tenth of the
    /// device's write speed at least. Otherwise only their bytes in flight are bounded.
    pub pacing: bool,
    /// Most bytes of puts in flight; further pages are refused or wait. 1 GiB by default.
    pub write_bytes_max: u64,
    /// Paths of volumes other than the first, if they differ from the paths stored in the
    /// superblock.
    pub volumes: Vec<PathBuf>,
    /// A group. Processes of its members may be clients of this process, besides those of the user
    /// who owns the store's first volume. Only for [`Store::attach`](crate::share::Store::attach).
    pub group: Option<u32>,
    /// Own the store as long as the handle is open: an owner without this option is asked for the
    /// ownership, and hands it over in order. Off by default. Only for
    /// [`Store::attach`](crate::share::Store::attach).
    pub keeps_ownership: bool,
    /// Decides which page is evicted next, and which pages reclaim copies; `None` for the least
    /// recently used. The owner's policy applies.
    pub eviction: Option<PolicyMaker<dyn EvictionOrder>>,
    /// Decides which new pages are stored; `None` for all. The owner's policy applies.
    pub admission: Option<PolicyMaker<dyn AdmissionPolicy>>,
    /// How much the store may write: `"3TB/day".parse()`, or drive writes a day as `0.5DWPD`. Pages
    /// that the budget does not take are refused, those first that promise the fewest uses. With a
    /// budget no blocks are prewritten. Off by default. The owner's setting applies to all
    /// processes.
    pub write_budget: WriteBudget,
    /// Whether reads are shared with other processes. Only for
    /// `Store::attach`. The owner's setting applies to all processes, a
    /// client's setting to its own reads.
    pub shared_reads: SharedReads,
    /// Whether puts encode pages. `Auto` by default. The owner's setting applies to all processes.
    pub codec: CodecChoice,
    /// A place beneath the store, used while this process is the owner.
    pub(crate) beneath: Option<Arc<dyn Beneath>>,
    /// The catalog protocol that this process speaks: that of this release, except in tests.
    pub(crate) protocol: Protocol,
    /// Bytes of the memory for shared reads, while reads are shared; 512 MiB by default. The
    /// owner's setting applies. Memory is taken as it is used.
    pub staging_bytes: u64,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions {
            disk: Want::Auto,
            disk_wrapper: None,
            wrapping: None,
            depth: 32,
            sync: SyncPolicy::default(),
            read_only: false,
            degraded: false,
            lease: Duration::from_secs(10),
            hang_limit: Duration::from_secs(10),
            prewrite: false,
            // A simulated disk has no speed.
            pacing: cfg!(not(feature = "simulated")),
            write_bytes_max: 1 << 30,
            volumes: Vec::new(),
            group: None,
            keeps_ownership: false,
            eviction: None,
            admission: None,
            write_budget: WriteBudget::Off,
            codec: CodecChoice::default(),
            beneath: None,
            protocol: Protocol::default(),
            shared_reads: SharedReads::Auto,
            staging_bytes: 512 << 20,
        }
    }
}

/// The settings that the owner of a store decides for all processes that use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
#[serde(default)]
pub struct Settings {
    /// [`OpenOptions::sync`].
    pub sync: SyncPolicy,
    /// [`OpenOptions::lease`].
    pub lease: Duration,
    /// [`OpenOptions::prewrite`].
    pub prewrite: bool,
    /// [`OpenOptions::codec`].
    pub codec: CodecChoice,
    /// [`OpenOptions::write_budget`].
    pub write_budget: WriteBudget,
}

impl Default for Settings {
    fn default() -> Settings {
        OpenOptions::default().settings()
    }
}

impl OpenOptions {
    /// These options, changed by `change`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// These options, with a place beneath the store.
    #[must_use]
    pub fn over(mut self, beneath: Arc<dyn Beneath>) -> Self {
        self.beneath = Some(beneath);
        self
    }

    /// The settings that apply if this process is the owner.
    #[must_use]
    pub fn settings(&self) -> Settings {
        Settings {
            sync: self.sync,
            lease: self.lease,
            prewrite: self.prewrite && self.write_budget == WriteBudget::Off,
            codec: self.codec,
            write_budget: self.write_budget,
        }
    }
}

/// Options with another catalog protocol than that of this release, for tests.
#[must_use]
pub fn speaking(mut options: OpenOptions, protocol: Protocol) -> OpenOptions {
    options.protocol = protocol;
    options
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Settings {
            sync,
            lease,
            prewrite,
            codec,
            write_budget,
        } = self;
        write!(
            f,
            "sync {sync}, lease {lease:?}, prewrite {prewrite}, codec {codec}, write budget \
             {write_budget}"
        )
    }
}

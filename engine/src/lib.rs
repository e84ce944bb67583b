//! The page store: keeps KV-cache pages on NVMe between requests, restarts and processes.
//!
//! Three layers, each with one job. The *handle* ([`Store`]) runs on callers' threads. It looks
//! pages up, moves their bytes between the device and the caller's memory, and verifies every byte
//! it returns. The *core* ([`core`]) decides to which segment a page goes, when a group of
//! descriptors is written, and what is synced, evicted and reclaimed. It does no I/O and reads no
//! clock. The *disk* ([`disk`]) moves bytes and decides nothing.
//!
//! ```text
//!   callers' threads         one mutex                       threads of its own
//!  +----------------+  reserve, commit  +------+  I/O requests  +------+
//!  | handle: put    | ----------------> | core | -------------> | disk | -> volumes
//!  |         get    | <---------------- |      | <------------- |      |
//!  +----------------+   statuses        +------+  completions   +------+
//!     |   ^   page data, straight between device and caller memory   ^
//!     |   +----------------------------------------------------------+
//!     v lookup, lease, pin
//!  +-------+
//!  | index |   RAM; read from any thread, changed by the core alone
//!  +-------+
//! ```
//!
//! The path of a page, from its tokens to its bytes read back:
//!
//! ```
//! use std::io::{IoSlice, IoSliceMut};
//! use std::num::NonZeroUsize;
//!
//! use larder_engine::format::{Namespace, NamespaceFields, PageShape, Rank, TokenUnits, page_keys};
//! use larder_engine::memory::AlignedBuf;
//! use larder_engine::{
//!     CreateOptions, GetPage, GetStatus, OpenOptions, PageStore, PutOptions, PutPage, PutStatus,
//!     Store, create,
//! };
//!
//! let directory = tempfile::tempdir()?;
//! let path = directory.path().join("store");
//! create(&path, &CreateOptions { size: 128 << 20, ..CreateOptions::default() })?;
//! let store = Store::open(&path, OpenOptions::default())?;
//!
//! // Pages with the same key in one namespace are interchangeable. Here a page has two parts: K
//! // and V of 64 tokens.
//! let part_bytes = 128 << 10;
//! let pages = store.namespace(&Namespace::new(NamespaceFields {
//!     model: "some-model".to_owned(),
//!     weights: "2026-11-23".to_owned(),
//!     dtype: "bf16".to_owned(),
//!     layout: "page_first_direct".to_owned(),
//!     page_tokens: 64,
//!     shape: PageShape::new(&[part_bytes, part_bytes])?,
//!     tp: Rank::ALONE,
//!     pp: Rank::ALONE,
//!     cp: Rank::ALONE,
//!     pool: "kv".to_owned(),
//!     extra: Default::default(),
//! })?)?;
//!
//! let tokens: Vec<u64> = (0..64).collect();
//! let keys = page_keys(&tokens, NonZeroUsize::new(64).unwrap(), None, TokenUnits::Single);
//!
//! // Aligned memory goes directly to the device; other memory is copied on the way.
//! let buffer = || AlignedBuf::zeroed(part_bytes as usize);
//! let [k, v] = [buffer()?, buffer()?];
//! let parts = [IoSlice::new(&k), IoSlice::new(&v)];
//! let page = PutPage { key: keys[0], parent: None, depth: 0, parts: &parts };
//! assert_eq!(store.put(pages, &[page], PutOptions::default()), [PutStatus::Stored]);
//!
//! // A lookup leases the pages it finds: they stay long enough to be read.
//! assert_eq!(store.longest_prefix(pages, &keys), 1);
//! let [mut k, mut v] = [buffer()?, buffer()?];
//! let mut parts = [IoSliceMut::new(&mut k), IoSliceMut::new(&mut v)];
//! let page = GetPage { key: keys[0], parts: &mut parts };
//! assert_eq!(store.get(pages, &mut [page], None), [GetStatus::Hit]);
//! store.close()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `docs/design.md` in the repository describes the design: terms, states, crashes, recovery,
//! reclaim, sharing.
//!
//! | module | content |
//! |---|---|
//! | [`api`] | the interface for callers: the [`PageStore`] trait, statuses, options |
//! | [`error`] | why a store could not be opened or used, and the remedy |
//! | [`fit`] | whether pages fit segments, and the segment size that suits a page |
//! | [`store`] | opening, the handle, the background threads |
//! | [`capacity`] | how many pages a store of a given geometry keeps |
//! | [`catalog`] | the boundary between handle and allocation: reserve, write, commit |
//! | [`core`] | the deciding state machine: segments, journal, syncs, puts, reclaim |
//! | [`fork`] | handles in a forked child |
//! | [`index`] | key to place, in RAM |
//! | [`inventory`] | leases with a count, lists of pages, evictions, usage |
//! | [`recovery`] | from descriptors on disk to a core and an index |
//! | [`offline`] | work on a store that is not in use: repair, compaction |
//! | [`share`] | one store, many processes: owner, clients, takeover |
//! | `runtime` | threads, locks and time: those of the system, or of a simulation |
//! | `seldom` | the limit of a log line that may recur |
//! | `system` | the calls to the operating system that a simulation has to control |
//! | [`survey`] | reading a store without opening it, for the tools |
//! | [`volume`] | files and block devices: creating, locking, superblocks |
//! | [`disk`] | io_uring and threads behind one trait |
//! | [`latency`] | histograms of latencies: of the devices, and of calls |
//! | [`memory`] | aligned, huge-page backed buffers |
//! | [`random`] | random bytes for identities |
//! | [`planted`](mod@planted) | bugs for the simulation to find; empty in other builds |

// The unit tests are those of the engine that ships.
#![cfg(not(all(test, feature = "simulated")))]
#![cfg_attr(
    feature = "simulated",
    allow(
        unused_imports,
        dead_code,
        reason = "what creation and offline work alone use"
    )
)]

pub mod api;
pub mod capacity;
pub mod catalog;
pub mod core;
pub mod disk;
pub mod error;
pub mod fit;
#[cfg(not(feature = "simulated"))]
pub mod fork;
pub mod index;
pub mod inventory;
pub mod latency;
pub mod memory;
#[cfg(not(feature = "simulated"))]
pub mod offline;
pub mod planted;
pub mod random;
pub mod recovery;
mod runtime;
pub mod seldom;
pub mod share;
pub mod store;
pub mod survey;
mod system;
pub mod volume;

pub use api::{
    DiskWrapper, GetPage, GetStatus, LentPage, MissReason, NamespaceId, OpenOptions, PageStore,
    PutFailure, PutOptions, PutPage, PutStatus, ReadOnlyVolume, Refusal, Settings, SharedReads,
    Stats, SyncPolicy,
};
pub use error::{StoreError, advice};
pub use larder_format as format;
#[cfg(feature = "simulated")]
pub use larder_sim_runtime::fork;
pub use latency::LatencySummary;
pub use share::{AttachOptions, SharedStore};
pub use store::Store;
#[cfg(not(feature = "simulated"))]
pub use volume::create::{CreateOptions, Created, create};

//! The page store: keeps KV-cache pages on NVMe between requests, restarts and processes.
//!
//! A server that embeds a store:
//!
//! ```
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("store");
//! # let prompt: Vec<u64> = (0..300).collect();
//! use larder_engine::format::{Namespace, PageShape};
//! use larder_engine::{
//!     CreateOptions, NamespaceHandle, OpenOptions, PageStore, PutOptions, Store,
//! };
//!
//! let size = CreateOptions::new(128 << 20);
//! let store = Store::open_or_create(&path, &size, OpenOptions::default())?;
//! // A page has two parts, K and V of 64 tokens. Pages with the same key are interchangeable.
//! let shape = PageShape::new(&[128 << 10, 128 << 10])?;
//! let namespace = Namespace::builder("some-model", "2026-11-23", 64, shape).build()?;
//! let pages = NamespaceHandle::new(&store, namespace)?;
//!
//! let chain = pages.chain(&prompt); // of its full pages
//! let mut buffers = pages.buffers(chain.keys().len())?;
//! let mut slots: Vec<_> = buffers.iter_mut().map(|page| page.parts_mut()).collect();
//! let read = pages.read_prefix(&chain, &mut slots, None);
//! // The server computes the rest of the prompt into its pages, and stores them.
//! slots[read..].iter_mut().for_each(|parts| parts[0].fill(1));
//! let computed: Vec<_> = buffers[read..].iter().map(|page| page.parts()).collect();
//! let stored = pages.append(&chain.skip(read), &computed, PutOptions::default());
//! assert!(stored.iter().all(|status| status.is_present()));
//! store.close()?;
//! # let store = Store::open(&path, OpenOptions::default())?;
//! # let pages = NamespaceHandle::new(&store, pages.namespace().clone())?;
//! # assert_eq!(pages.longest_prefix(&chain), 4);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `docs/design.md` in the repository describes the design: terms, states, crashes, recovery,
//! reclaim, sharing.
//!
//! | to | there is |
//! |---|---|
//! | make a store | [`create`], [`Store::open_or_create`], [`CreateOptions`]; sizes: [`fit`] |
//! | open it | [`Store::open`] for this process alone, [`Store::attach`] for several processes |
//! | use it | [`NamespaceHandle`] and [`Chain`], or the calls of [`PageStore`] |
//! | read without memory of your own, until a deadline | [`NamespaceHandle::get_lent`] |
//! | choose the kept pages | [`policy::EvictionPolicy`], [`policy::AdmissionPolicy`], [`Hint`] |
//! | put another store beneath a server | an implementation of [`PageStore`] |
//! | watch it | [`PageStore::stats`], [`report`] |
//!
//! # The code
//!
//! Three layers, each with one job. The *handle* ([`Store`]) runs on callers' threads. It looks
//! pages up, moves their bytes between the device and the caller's memory, and verifies every byte
//! it returns. The *core* decides to which segment a page goes, when a group of descriptors is
//! written, and what is synced, evicted and reclaimed. It does no I/O and reads no clock. The
//! *disk* moves bytes and decides nothing.
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
//! Of the modules, all but [`fit`] and [`policy`] are private. The feature
//! `internals` makes public what the simulation, the fuzz targets, the tiers, the tools and the
//! tests need; it has no stable interface.
//!
//! From the top down: a module imports only modules below its own row. The tables in the modules
//! keep the same order, and `tests/floors` checks them.
//!
//! | module | content |
//! |---|---|
//! | `offline` | work on a store that is not in use: repair, compaction |
//! | `survey` | reading a store without opening it, for the tools |
//! | `share` | [`Store`], the handle of callers: alone, as owner, or as client |
//! | `pages` | the pages of a namespace, and their chains |
//! | `store` | a store of one process: opening, calls, background threads |
//! | `inventory` | leases with a count, lists of pages, evictions, usage |
//! | `staging` | pages that one process reads and others copy |
//! | `recovery` | from descriptors on disk to a core and an index |
//! | `volume` | files and block devices: creating, locking, superblocks |
//! | `catalog` | the boundary between handle and allocation: reserve, write, commit |
//! | `totals` | counters of all processes, across owners |
//! | `spaces` | reads by namespace |
//! | `counts` | counters of each process: hits, misses by reason, bytes |
//! | `api` | the interface for callers: the [`PageStore`] trait, options, statistics |
//! | `beneath` | the seam for a place beneath the store, beyond the node |
//! | `protocol` | the version and the features of the messages between owner and clients |
//! | [`fit`] | whether pages fit segments, and the segment size that suits a page |
//! | `error` | why a store could not be opened or used, and the remedy |
//! | `core` | the deciding state machine: segments, journal, syncs, puts, reclaim |
//! | `learned` | the policy that learns which pages are used again |
//! | `grants` | the pages that a put asks to store, and the extents that it is granted |
//! | `index` | key to place, in RAM |
//! | [`policy`] | which pages a store takes, keeps and copies: the seams for policies |
//! | `hint` | callers' knowledge of pages, for policies |
//! | `status` | the results of puts and gets, page by page |
//! | `capacity` | how many pages a store of a given geometry keeps |
//! | `chunks` | arrays that grow without a copy of all their elements |
//! | `planted` | bugs for the simulation to find; empty in other builds |
//!
//! Below them are the crates `larder-disk`, io_uring and threads behind one trait, and
//! `larder-base`: threads, time, files, memory.

#![cfg_attr(
    not(feature = "internals"),
    allow(
        dead_code,
        unused_imports,
        reason = "simulation, fuzzing, tools and tests use the rest"
    )
)]
// The unit tests are those of the engine that ships.
#![cfg(not(all(test, feature = "simulated")))]
#![cfg_attr(
    feature = "simulated",
    allow(
        unused_imports,
        dead_code,
        reason = "used by creation and offline work alone"
    )
)]

mod counts;
pub mod fit;
mod hint;
#[cfg(test)]
#[path = "../../tests/support/honest.rs"]
mod honest;
mod learned;
mod pages;
pub mod policy;

#[cfg(not(feature = "internals"))]
mod api;
#[cfg(not(feature = "internals"))]
mod beneath;
#[cfg(not(feature = "internals"))]
mod capacity;
#[cfg(not(feature = "internals"))]
mod catalog;
#[cfg(not(feature = "internals"))]
mod chunks;
#[cfg(not(feature = "internals"))]
mod core;
#[cfg(not(feature = "internals"))]
mod error;
#[cfg(not(feature = "internals"))]
mod grants;
#[cfg(not(feature = "internals"))]
mod index;
#[cfg(not(feature = "internals"))]
mod inventory;
#[cfg(not(feature = "internals"))]
mod offline;
#[cfg(not(feature = "internals"))]
mod planted;
#[cfg(not(feature = "internals"))]
mod protocol;
#[cfg(not(feature = "internals"))]
mod recovery;
#[cfg(not(feature = "internals"))]
mod share;
#[cfg(not(feature = "internals"))]
mod spaces;
#[cfg(not(feature = "internals"))]
mod staging;
#[cfg(not(feature = "internals"))]
mod status;
#[cfg(not(feature = "internals"))]
mod store;
#[cfg(not(feature = "internals"))]
mod survey;
#[cfg(not(feature = "internals"))]
mod totals;
#[cfg(not(feature = "internals"))]
mod volume;

#[cfg(feature = "internals")]
pub mod api;
#[cfg(feature = "internals")]
pub mod beneath;
#[cfg(feature = "internals")]
pub mod capacity;
#[cfg(feature = "internals")]
pub mod catalog;
#[cfg(feature = "internals")]
pub mod chunks;
#[cfg(feature = "internals")]
pub mod core;
#[cfg(feature = "internals")]
pub mod error;
#[cfg(feature = "internals")]
pub mod grants;
#[cfg(feature = "internals")]
pub mod index;
#[cfg(feature = "internals")]
pub mod inventory;
#[cfg(all(feature = "internals", not(feature = "simulated")))]
pub mod offline;
#[cfg(feature = "internals")]
pub mod planted;
#[cfg(feature = "internals")]
pub mod protocol;
#[cfg(feature = "internals")]
pub mod recovery;
#[cfg(feature = "internals")]
pub mod share;
#[cfg(feature = "internals")]
pub mod spaces;
#[cfg(feature = "internals")]
pub mod staging;
#[cfg(feature = "internals")]
pub mod status;
#[cfg(feature = "internals")]
pub mod store;
#[cfg(feature = "internals")]
pub mod survey;
#[cfg(feature = "internals")]
pub mod totals;
#[cfg(feature = "internals")]
pub mod volume;

#[cfg(not(feature = "internals"))]
use larder_base::{fork, ids, latency, memory, random, seldom, sidecar};
#[cfg(feature = "internals")]
pub use larder_base::{fork, ids, latency, memory, random, seldom, sidecar};
use larder_base::{planted, system};
#[cfg(feature = "internals")]
pub use larder_disk as disk;

#[cfg(feature = "internals")]
pub use api::DiskWrapper;
pub use api::{
    GetPage, LentPage, OpenOptions, PageStore, PutOptions, PutPage, ReadOnlyVolume, Recall,
    Settings, SharedReads, Stats,
};
pub use core::SyncPolicy;
pub use counts::{Counts, Departed, Misses, Process};
pub use error::{StoreError, advice};
#[doc(inline)]
pub use fork::Origin;
pub use hint::{Class, Hint, Stop};
#[doc(inline)]
pub use ids::NamespaceId;
#[doc(inline)]
pub use larder_disk::probe::Want as DiskKind;
pub use larder_format as format;
#[doc(inline)]
pub use latency::LatencySummary;
#[doc(inline)]
pub use memory::AlignedBuf;
pub use pages::{Chain, NamespaceHandle};
pub use share::{Part, Report, Store, report};
pub use staging::StagingReport;
pub use status::{GetStatus, MissReason, PutFailure, PutStatus, Refusal};
#[doc(inline)]
pub use system::holder::{HolderState, LockHolder};
#[cfg(not(feature = "simulated"))]
pub use volume::create::{CreateOptions, Created, create};

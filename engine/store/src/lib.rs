//! The store of one node: its calls, its threads, its volumes, its recovery, and the processes that
//! share it.
//!
//! Crates of this project alone use it: `larder-engine`, which is its public face,
//! `larder-offline`, `larder-remote`, `larder-tiers`, and the tools, Python bindings, tests and
//! simulations that look inside. It has no stable interface.
//!
//! # The code
//!
//! Three layers, each with one job. The *handle* ([`Store`](share::Store)) runs on callers'
//! threads. It looks pages up, moves their bytes between the device and the caller's memory, and
//! verifies every byte it returns. The *core* decides to which segment a page goes, when a group of
//! descriptors is written, and which segments and pages are synced, evicted and reclaimed. It does
//! no I/O and reads no clock. The *disk* moves bytes and decides nothing.
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
//! A put in the process that owns the store: [`share`] calls [`store`], which speaks to the core
//! through the [`catalog`]. It asks for extents, the places of the pages on the volumes
//! (`reserve`), starts the writes of the bytes, gives the core their checksums (`commit`), and
//! reports the end of the writes (`landed`). The core has the descriptors written meanwhile. A page
//! is visible when its bytes and its descriptor are on the device.
//!
//! A put of a client is the same, but for the catalog: that of a client is a connection
//! (`share::remote`) to the owner's process, whose server (`share::server`) asks the core. The
//! client writes the bytes to the volumes itself.
//!
//! From the top down: a module imports only modules below its own row. The tables in the modules
//! keep the same order, and `tests/floors` checks them.
//!
//! | module | content |
//! |---|---|
//! | [`share`] | [`Store`](share::Store), the handle of callers: alone, as owner, or as client |
//! | [`store`] | a store of one process: opening, calls, background threads |
//! | [`inventory`] | leases with a count, lists of pages, evictions, usage |
//! | [`staging`] | pages that one process reads and others copy |
//! | [`recovery`] | from descriptors on disk to a core and an index |
//! | [`volume`] | files and block devices: creating, locking, superblocks |
//! | [`catalog`] | the boundary between handle and allocation: reserve, write, commit |
//! | [`history`] | counters of all processes over the time of an owner |
//! | [`totals`] | counters of all processes, across owners |
//! | [`curve`] | the hit rate of a store of another size |
//! | [`spaces`] | reads by namespace |
//! | [`traffic`] | the calls of all processes, for a recording |
//! | [`counts`] | the processes that use a store, with their counters |
//! | [`api`] | the interface for callers: the trait `PageStore`, options, statistics |
//! | [`keys`] | the keys of an open encrypted store |
//! | [`encoder`] | which pages of puts are encoded by a codec |
//! | [`quotas`] | the quotas of a store, as people and programs see them |
//! | [`beneath`] | the seam for a place beneath the store, beyond the node |
//! | [`protocol`] | the version and the features of the messages between owner and clients |
//! | [`fit`] | whether pages fit segments, and the segment size that suits a page |
//! | [`error`] | why a store could not be opened or used, and the remedy |
//!
//! Below them are the crates `larder-core`, which decides, `larder-disk`, io_uring and threads
//! behind one trait, and `larder-base`: threads, time, files, memory.

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
#![allow(
    missing_docs,
    clippy::new_without_default,
    reason = "the engine has the face"
)]

pub mod api;
pub mod beneath;
pub mod catalog;
pub mod counts;
pub mod curve;
pub mod encoder;
pub mod error;
pub mod fit;
pub mod history;
#[cfg(test)]
#[path = "../../../tests/support/honest.rs"]
mod honest;
pub mod inventory;
pub mod keys;
pub mod protocol;
pub mod quotas;
pub mod recovery;
pub mod share;
pub mod spaces;
pub mod staging;
pub mod store;
pub mod totals;
pub mod traffic;
pub mod volume;

#[cfg(debug_assertions)]
use larder_core::planted;

//! The page store: keeps KV-cache pages on NVMe between requests, restarts and processes.
//!
//! Three layers, each with one job. The *handle* ([`Store`]) runs on callers' threads: it looks pages up, moves their
//! bytes between the device and the caller's memory, and checks every byte it hands out. The *core* ([`core`])
//! decides: which segment a page goes to, when a group of descriptors is written, what is synced, evicted and
//! reclaimed. It does no I/O and reads no clock. The *disk* ([`disk`]) moves bytes and decides nothing.
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
//! | module | what it is |
//! |---|---|
//! | [`api`] | what a caller sees: the [`PageStore`] trait, statuses, options |
//! | [`error`] | why a store could not be opened or used, and what to do about it |
//! | [`store`] | opening, the handle, the housekeeping thread |
//! | [`catalog`] | the seam between the handle and whoever decides: reserve, write, commit |
//! | [`core`] | the deciding state machine: space, log, syncs, eviction, reclaim |
//! | [`index`] | key to place, in RAM |
//! | [`recovery`] | from descriptors on disk to a core and an index |
//! | [`offline`] | working on a store that nobody uses: repair, compaction |
//! | [`share`] | one store, many processes: owner, clients, takeover |
//! | [`survey`] | reading a store without opening it, for the tools |
//! | [`volume`] | files and block devices: creating, locking, superblocks |
//! | [`disk`] | io_uring and threads behind one trait |
//! | [`memory`] | aligned, huge-page backed buffers |
//! | [`planted`](mod@planted) | bugs for the simulation to find; nothing in any other build |

pub mod api;
pub mod catalog;
pub mod core;
pub mod disk;
pub mod error;
pub mod index;
pub mod memory;
pub mod offline;
pub mod planted;
pub mod recovery;
pub mod share;
pub mod store;
pub mod survey;
pub mod volume;

pub use api::{
    GetPage, GetStatus, LentPage, MissReason, NamespaceId, OpenOptions, PageStore, PutOptions,
    PutPage, PutStatus, Refusal, SharedReads, Stats, SyncPolicy,
};
pub use error::StoreError;
pub use larder_format as format;
pub use share::{AttachOptions, SharedStore};
pub use store::Store;
pub use volume::create::{CreateOptions, create};

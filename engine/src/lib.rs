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
//! This crate is the face of several. From the top down:
//!
//! | crate | content |
//! |---|---|
//! | `larder-offline` | work on a store that is not in use: repair, compaction, surveys |
//! | `larder-engine` | the public face, and the pages of a namespace with their chains |
//! | `larder-store` | the store of one node: calls, threads, volumes, recovery, sharing |
//! | `larder-learned` | the policy that learns which pages are used again |
//! | `larder-core` | the deciding state machine, the index, the seams for policies |
//! | `larder-disk` | io_uring and threads behind one trait |
//! | `larder-base` | threads, time, files, memory |
//!
//! The modules here, from the top down:
//!
//! | module | content |
//! |---|---|
//! | `pages` | the pages of a namespace, and their chains |
//! | [`policy`] | which pages a store takes, keeps and copies: the seams for policies |

// The unit tests are those of the engine that ships.
#![cfg(not(all(test, feature = "simulated")))]

mod pages;
pub mod policy;

#[doc(inline)]
pub use larder_base::fork::Origin;
#[doc(inline)]
pub use larder_base::ids::NamespaceId;
#[doc(inline)]
pub use larder_base::latency::LatencySummary;
#[doc(inline)]
pub use larder_base::memory::AlignedBuf;
#[doc(inline)]
pub use larder_base::system::holder::{HolderState, LockHolder};
#[doc(inline)]
pub use larder_core::core::{Evictions, SyncPolicy};
#[doc(inline)]
pub use larder_core::grants::Ask;
#[doc(inline)]
pub use larder_core::hint::{Class, Hint, Stop};
#[doc(inline)]
pub use larder_core::status::{GetStatus, MissReason, PutFailure, PutStatus, Refusal};
#[doc(inline)]
pub use larder_disk::probe::Want as DiskKind;
pub use larder_format as format;
#[doc(inline)]
pub use larder_store::api::{
    GetPage, LentPage, OpenOptions, PageStore, PutOptions, PutPage, ReadOnlyVolume, Recall,
    Settings, SharedReads, Stats,
};
#[doc(inline)]
pub use larder_store::counts::{Counts, Departed, Misses, Process};
#[doc(inline)]
pub use larder_store::error::{StoreError, advice};
#[doc(inline)]
pub use larder_store::fit;
#[doc(inline)]
pub use larder_store::share::{Part, Report, Store, report};
#[doc(inline)]
pub use larder_store::staging::StagingReport;
#[cfg(not(feature = "simulated"))]
#[doc(inline)]
pub use larder_store::volume::create::CreateOptions;
#[cfg(not(feature = "simulated"))]
#[doc(inline)]
pub use larder_store::volume::create::Created;
#[cfg(not(feature = "simulated"))]
#[doc(inline)]
pub use larder_store::volume::create::create;
pub use pages::{Chain, NamespaceHandle};

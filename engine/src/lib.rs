//! The page store: keeps KV-cache pages on NVMe between requests, restarts and processes.
//!
//! A server that embeds a store:
//!
//! ```
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("store");
//! # let prompt: Vec<u64> = (0..300).collect();
//! use std::io::{IoSlice, IoSliceMut};
//!
//! use larder_engine::format::{Namespace, PageShape, TokenUnits, page_keys};
//! use larder_engine::{
//!     CreateOptions, GetPage, OpenOptions, PageStore, PutOptions, PutPage, Store,
//! };
//!
//! let size = CreateOptions::new(128 << 20);
//! let store = Store::open_or_create(&path, &size, OpenOptions::default())?;
//! // A page has one part, the KV of 64 tokens. Pages with the same key are interchangeable.
//! let shape = PageShape::new(&[256 << 10])?;
//! let namespace = Namespace::builder("some-model", "2026-11-23", 64, shape).build()?;
//! let id = store.namespace(&namespace)?;
//!
//! // The chain of the prompt: one key for each full page of its tokens.
//! let keys = page_keys(&prompt, 64.try_into()?, None, TokenUnits::Single);
//! let mut memory = vec![vec![0; 256 << 10]; keys.len()];
//! let found = store.longest_prefix(id, &keys);
//! let mut parts: Vec<_> = memory.iter_mut().map(|page| [IoSliceMut::new(page)]).collect();
//! let asked = keys.iter().zip(&mut parts).take(found);
//! let mut pages: Vec<_> = asked.map(|(key, parts)| GetPage { key: *key, parts }).collect();
//! let statuses = store.get(id, &mut pages, None);
//! let read = statuses.iter().take_while(|status| status.is_hit()).count();
//! // The server computes the rest of the prompt into its pages, and stores them.
//! let parts: Vec<_> = memory.iter().map(|page| [IoSlice::new(page)]).collect();
//! let page = |at: usize| PutPage {
//!     key: keys[at],
//!     parent: at.checked_sub(1).map(|before| keys[before]),
//!     depth: at as u32,
//!     parts: &parts[at],
//! };
//! let computed: Vec<_> = (read..keys.len()).map(page).collect();
//! let stored = store.put(id, &computed, PutOptions::default());
//! assert!(stored.iter().all(|status| status.is_present()));
//! store.close()?;
//! # let store = Store::open(&path, OpenOptions::default())?;
//! # let id = store.namespace(&namespace)?;
//! # assert_eq!(store.longest_prefix(id, &keys), 4);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `docs/design.md` in the repository describes the design: terms, states, crashes, recovery,
//! reclaim, sharing.
//!
//! | to | there is |
//! |---|---|
//! | make a store | [`create`], [`Store::open_or_create`], [`CreateOptions`] |
//! | open it | [`Store::open`] for this process alone, [`Store::attach`] for several processes |
//! | use it | the calls of [`PageStore`] |
//! | choose the kept pages | [`policy::EvictionPolicy`], [`policy::AdmissionPolicy`], [`Hint`] |
//! | put another store beneath a server | an implementation of [`PageStore`] |
//! | watch it | [`PageStore::stats`], [`report`] |
//!
//! # The code
//!
//! This crate is the face of those below it. From the top down:
//!
//! | crate | content |
//! |---|---|
//! | `larder-store` | the store of one node: calls, threads, volumes, recovery, sharing |
//! | `larder-learned` | the policy that learns which pages are used again |
//! | `larder-core` | the deciding state machine, the index, the seams for policies |
//! | `larder-disk` | io_uring and threads behind one trait |
//! | `larder-base` | threads, time, files, memory |
//! | `larder-format` | the bytes on disk, key chains, checksums |
//!
//! The modules here, from the top down:
//!
//! | module | content |
//! |---|---|
//! | [`policy`] | which pages a store takes, keeps and copies: the seams for policies |

// The unit tests are those of the engine that ships.
#![cfg(not(all(test, feature = "simulated")))]

pub mod policy;

#[doc(inline)]
pub use larder_base::ids::NamespaceId;
#[doc(inline)]
pub use larder_base::latency::LatencySummary;
#[doc(inline)]
pub use larder_base::memory::AlignedBuf;
#[doc(inline)]
pub use larder_base::system::holder::{HolderState, LockHolder};
#[doc(inline)]
pub use larder_core::core::SyncPolicy;
#[doc(inline)]
pub use larder_core::hint::{Class, Hint, Stop};
#[doc(inline)]
pub use larder_core::status::{GetStatus, MissReason, PutFailure, PutStatus, Refusal};
#[doc(inline)]
pub use larder_disk::probe::Want as DiskKind;
pub use larder_format as format;
#[doc(inline)]
pub use larder_store::api::{
    Count, GetPage, OpenOptions, PageStore, PutOptions, PutPage, ReadOnlyVolume, Recall, Settings,
    SharedReads, Stats,
};
#[doc(inline)]
pub use larder_store::counts::{Departed, Process};
#[doc(inline)]
pub use larder_store::encoder::CodecChoice;
#[doc(inline)]
pub use larder_store::error::{StoreError, advice};
#[doc(inline)]
pub use larder_store::share::{Part, Report, Store, report};
#[cfg(not(feature = "simulated"))]
#[doc(inline)]
pub use larder_store::volume::create::CreateOptions;
#[cfg(not(feature = "simulated"))]
#[doc(inline)]
pub use larder_store::volume::create::Created;
#[cfg(not(feature = "simulated"))]
#[doc(inline)]
pub use larder_store::volume::create::create;

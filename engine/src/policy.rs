//! Policies of another crate: which pages a store takes, which it evicts first, and which it copies
//! when it reclaims a segment.
//!
//! [`OpenOptions`](crate::OpenOptions) chooses them:
//! `options.with(|o| o.eviction = Some(PolicyMaker::eviction(MyPolicy::default)))`. Examples are
//! in the repository, in `tests/outside/src/policies.rs`. The default evicts the least recently
//! used leaf and admits every page. It has no object, and lookups do not call it.
//!
//! Eviction takes leaves only: pages without stored children. So every stored page can be found.
//! The store gives a page to [`EvictionPolicy::file`] when it becomes a leaf, and asks
//! [`EvictionPolicy::coldest`] when it needs room. Leased pages, and pages on volumes that refuse
//! writes, are passed over by the store itself, and filed again later. Reclaim compares pages by
//! their [`Worth`].
//!
//! The calls for one page:
//!
//! ```text
//! arrived, file, used ..., coldest, left    a leaf that is evicted for room
//! arrived, file, used ..., left             evicted by reclaim, deleted, or found damaged
//! ```
//!
//! - `arrived` comes first. Each page of a new chain is filed as a leaf; it is none any more when
//!   its child arrives, which `facts` of `coldest` shows. It is filed again when its last child
//!   leaves, or a lease of it ends.
//! - `used` comes late: uses are collected, and handed over before the next decision. A read by
//!   `read_prefix` is two uses, a lookup and a read.
//! - `left` may come at any time after `arrived`, also after `coldest` has returned the page.
//!
//! After every open, and with every new owner of a shared store, a new policy is given the stored
//! pages again, without hits and hints: these are in RAM alone. In a shared store the policies are
//! those of the owner's process. They see the pages of all clients, with their hints.
//!
//! All calls come under locks of the store: they must be short, must not block, and must not call
//! the store. A policy that panics may end the process. With any answers of a policy, the store
//! returns no wrong page and loses no page without counting it. A policy that returns no leaf,
//! although it holds some, leaves the store without room: puts are refused.

#[doc(inline)]
pub use larder_core::policy::{
    AdmissionPolicy, Candidate, Departure, EvictionPolicy, PageFacts, PageNumber, PolicyMaker,
    ReclaimLines, Use, Worth,
};
#[doc(inline)]
pub use larder_learned::learned;

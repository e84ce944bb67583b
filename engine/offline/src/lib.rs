//! Work on a store that is not in use: repair, compaction, copies, and surveys without an open. A
//! store in use is compacted with the help of its owner.
//!
//! Crates of this project alone use it: the tools, `larder-remote`, and the tests. It has no stable
//! interface.
//!
//! [`repair`](fn@repair) and [`compact`](fn@compact) open a store as its owner does, with a lock,
//! an epoch of its own and recovery, but without callers and without the background threads. These
//! modules decide which pages move, and in which order. Every page moves as in reclaim: read,
//! verify, copy, commit; its old place is released when the copies are synced. So a kill at any
//! moment leaves each page readable, and the next open finds a store as after any crash. No good
//! page is ever overwritten, and no page is evicted, except for want of room without a retired
//! volume. If there is no room, less is done, and the result reports it.
//!
//! Only bad copies of superblocks and headers are written in place, from their good copies.
//!
//! From the top down: a module imports only modules below its own row.
//!
//! | module | task |
//! |---|---|
//! | `beside` | has the owner of a store in use move its pages, segment by segment |
//! | `rekey` | gives tenants of an encrypted store new keys |
//! | `compact` | moves pages to their places in order |
//! | `repair` | plans the remedies for damage, and carries them out |
//! | `headers` | restores the copies of segment headers |
//! | `retire` | moves the pages of a volume to the others, and gives it up |
//! | `rotate` | changes the key that wraps the master key of an encrypted store |
//! | `into` | copies the pages of one store into another, in order |
//! | `superblocks` | copies the superblock of a store, and writes it back |
//! | `order` | decides in which order pages should lie, and which are worth moving |
//! | `owner` | the store, open for this work |
//! | [`survey`] | reads a store without opening it |

// The unit tests are those of the engine that ships.
#![cfg(not(all(test, feature = "simulated")))]
#![allow(missing_docs, reason = "no crate outside of this project uses it")]

mod beside;
mod compact;
mod headers;
mod into;
mod order;
mod owner;
mod rekey;
mod repair;
mod retire;
mod rotate;
#[cfg(not(feature = "simulated"))]
mod superblocks;
pub mod survey;

pub use beside::compact_beside;
pub use compact::{Compacted, compact};
pub use into::{Copied, copy_into};
pub use owner::{Progress, SegmentName};
pub use rekey::rekey;
pub use repair::{DamagedPage, Repair, Repaired, repair};
pub use retire::{Retired, retire};
pub use rotate::rotate;
#[cfg(not(feature = "simulated"))]
pub use superblocks::{RestoreError, Restored, restore, superblock_to_save};

#[cfg(test)]
mod tests;

//! The disk: moves bytes between memory and volumes, behind the [`Disk`] trait.
//!
//! Crates of this project alone use it: those of `engine/` above it, and the tools, bindings,
//! tests and simulations. It has no stable interface.
//!
//! A disk takes batches of operations ([`Op`]) on the store's volumes. It answers each one exactly
//! once, through the [`Sink`] that came with it. It decides nothing: the core decides which bytes
//! go where, and the reader verifies them. It owns four things:
//!
//! - *Progress*: a short transfer is resumed. An interrupted, cancelled or postponed one is retried
//!   a bounded number of times. A transfer without progress is a failure ([`DiskError`]). A read
//!   that fails because of the medium is tried three times. A failed sync is never retried: the
//!   kernel reports a lost write once.
//! - *Depth*: at most `depth` operations of a volume are in the kernel at once. The rest wait.
//! - *Order*: reads of calls, the store's own structures (superblocks, headers, descriptors) and
//!   syncs come first, then writes of puts, then work in the background ([`Purpose`]). While a call
//!   reads, puts and work in the background are paced (`pace`).
//! - *Deadlines*: an operation that has not been handed to the kernel by its deadline never is. It
//!   is answered [`DiskError::Deadline`] when its turn comes, or at a call of [`Disk::expire`]. An
//!   operation in the kernel is always waited for: its buffers belong to the kernel.
//!
//! Crates of this project alone use it: the engine, and through it the simulation and the tools. It
//! has no stable interface. A module imports only modules below its own row:
//!
//! | module | task |
//! |---|---|
//! | [`health`] | the drive's own report of its wear and faults |
//! | `witness` | tries failed reads again, and notes errors that are no evidence on volumes |
//! | `patience` | the time for these further tries |
//! | [`probe`] | chooses between the disks by trying, with a reason in plain text |
//! | [`uring`] | moves bytes with one io_uring and one thread a volume |
//! | [`threads`] | moves bytes with `pread`/`pwrite`, where io_uring is forbidden |
//! | `queue` | the order of the operations of a volume that wait for the device |
//! | `job` | the progress of one operation, common to both: resume, retry, give up |
//! | `options` | the options of a disk |
//! | `pacing` | the pace of a whole store, and its counters |
//! | `board` | how the volumes answer, over all processes |
//! | `common` | the memory that the processes of a store share |
//! | `pace` | the rate of writes while reads are in progress |
//! | [`mailbox`] | waits for answers |
//! | `operations` | the trait, its operations and their errors |
//!
//! All disks use [`carry_out`] for one operation. A simulated disk uses it with its own system
//! calls.
//!
//! An idle disk sleeps in the kernel: no polling, no timers. A timer runs only while a paced
//! operation waits for its moment.
//!
//! A disk is the only way to the bytes of an open store: pages, descriptors, headers and
//! superblocks, from the first read of recovery to the last write of a close. So a layer over it
//! (`DiskWrapper` of `larder-store`) sees them all. The exceptions:
//!
//! | exception | where | bytes |
//! |---|---|---|
//! | creating and enlarging | `volume::create` | new structures (1) |
//! | finding and locking volumes | `volume` | superblocks (2) |
//! | choosing the disk | [`probe`] | one block of each volume, read with each candidate |
//! | surveys of a store that is not open | `larder-offline` | superblocks, read only |
//!
//! (1) First superblocks, and headers and blocks of new segments.
//!
//! (2) Read before there is a disk. They are read again through the disk, and only the second read
//! counts.
//!
//! The kernel is asked directly for locks, lengths and holes of the files: these calls move no
//! bytes.

// The unit tests are those of the engine that ships.
#![cfg(not(all(test, feature = "simulated")))]
#![allow(missing_docs, reason = "no crate outside of this project uses it")]

mod board;
mod common;
pub mod health;
#[cfg(test)]
#[path = "../../../tests/support/honest.rs"]
mod honest;
mod job;
pub mod mailbox;
mod operations;
mod options;
mod pace;
mod pacing;
mod patience;
pub mod probe;
mod queue;
pub mod threads;
pub mod uring;
mod witness;

pub use larder_base::failure::{DiskError, is_of_the_medium};

pub use board::{Answers as VolumeAnswers, BEAT, Board};
pub use common::{BOUNDS_MS, Classes, Common};
pub use job::MEDIUM_READS_MAX;
pub use job::{Step, carry_out};
pub use operations::{
    Action, Buffer, Choice, Disk, Done, Kind, MERGE_BYTES_MAX, Op, PIECES_MAX, Piece, Purpose, Sink,
};
pub use options::DiskOptions;
pub use pacing::Pacing;
pub use patience::Patience;
pub use witness::Witness;

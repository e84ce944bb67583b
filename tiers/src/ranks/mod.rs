//! How the ranks of one engine agree.
//!
//! Every rank keeps a tree of its own, and all trees must stay the same. What a rank alone has seen (how many pages its L3
//! holds, whether its deadline has passed) therefore changes a tree only after all ranks have reduced it to one value: the
//! least, or the greatest. All ranks make the same calls in the same order.
//!
//! | module | what it is |
//! |---|---|
//! | `group` | one round after another, and everything that can go wrong in one |
//! | `threads` | ranks that are threads of one process |
//! | `socket` | ranks that are processes: rank 0 hosts the group, the others join it |
//! | `wire` | what the processes say to each other |
//!
//! Faults defended against: a rank that does not come is an error for all after a timeout; one that has gone is an error for all
//! at once; calls that differ are an error that names both. A group in which anything went wrong stays broken, with the
//! same error for everybody: ranks that went on by themselves would no longer have the same trees. A round in which every
//! rank has taken part is over, whatever happens afterwards.

mod group;
mod socket;
mod threads;
mod wire;

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use socket::{SocketRank, Timeouts};
pub use threads::{ThreadRank, threads};

/// Most values of one call.
pub const VALUES_MAX: usize = 256;

/// Most ranks of a group.
pub const RANKS_MAX: u32 = 1024;

/// Longest time that a group waits; longer timeouts are this long.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// What becomes of the values of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Reduce {
    /// The least of each.
    Min,
    /// The greatest of each.
    Max,
}

/// One rank's end of a group.
pub trait Ranks: Send {
    /// Which one: below [`Ranks::size`].
    fn rank(&self) -> u32;

    /// How many there are.
    fn size(&self) -> u32;

    /// Replaces each value by that of all ranks; waits for them. After an error the values are as before.
    ///
    /// # Errors
    /// Something went wrong in the group, now or earlier.
    fn all_reduce(&mut self, reduce: Reduce, values: &mut [u64]) -> Result<(), RanksError>;

    /// The least of each value over all ranks.
    ///
    /// # Errors
    /// As [`Ranks::all_reduce`].
    fn min(&mut self, values: &mut [u64]) -> Result<(), RanksError> {
        self.all_reduce(Reduce::Min, values)
    }

    /// The greatest of each value over all ranks.
    ///
    /// # Errors
    /// As [`Ranks::all_reduce`].
    fn max(&mut self, values: &mut [u64]) -> Result<(), RanksError> {
        self.all_reduce(Reduce::Max, values)
    }
}

/// Why ranks do not agree, and why they no longer will.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum RanksError {
    /// Some did not come in time.
    #[error("{} did not come within {timeout:?}; the group is broken, restart all ranks", Names(.ranks))]
    Stalled {
        /// Those that were missing.
        ranks: Vec<u32>,
        /// How long the others waited.
        timeout: Duration,
    },
    /// One has ended, or its connection has.
    #[error("rank {rank} is gone; the group is broken, restart all ranks")]
    Gone {
        /// Which one.
        rank: u32,
    },
    /// Two made different calls.
    #[error("{first} but {second}: the ranks no longer do the same, restart all of them")]
    Mismatch {
        /// Who came first.
        first: Call,
        /// Who came later, with another call.
        second: Call,
    },
    /// One said something that is not understood.
    #[error("rank {rank} sent {what}; all ranks must run the same version")]
    Garbled {
        /// Which one.
        rank: u32,
        /// What it was.
        what: String,
    },
    /// Too many values in one call.
    #[error("rank {rank} called with {values} values, at most {VALUES_MAX} are reduced at once")]
    TooLong {
        /// Which one.
        rank: u32,
        /// How many.
        values: usize,
    },
    /// A number of ranks, or of a rank, that cannot be.
    #[error("rank {rank} of {size}: there are 1 to {RANKS_MAX} ranks, numbered from 0")]
    NoSuchRank {
        /// Which one.
        rank: u32,
        /// How many ranks.
        size: u32,
    },
    /// One that asked to join was turned away.
    #[error("rank {rank} was turned away: {why}")]
    TurnedAway {
        /// Which one.
        rank: u32,
        /// Why.
        why: String,
    },
    /// The socket does not work.
    #[error("{what} {path:?} failed: {why}")]
    Socket {
        /// What was tried.
        what: String,
        /// Where.
        path: String,
        /// What the system said.
        why: String,
    },
}

/// One rank's call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Whose.
    pub rank: u32,
    /// What it asked for.
    pub reduce: Reduce,
    /// Of how many values.
    pub values: usize,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Call {
            rank,
            reduce,
            values,
        } = self;
        write!(f, "rank {rank} called for the {reduce} of {values} values")
    }
}

impl fmt::Display for Reduce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reduce::Min => "minimum",
            Reduce::Max => "maximum",
        })
    }
}

/// Ranks by name.
struct Names<'a>(&'a [u32]);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.len() == 1 { "rank" } else { "ranks" })?;
        for (index, rank) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma} {rank}")?;
        }
        Ok(())
    }
}

/// # Errors
/// There is no such rank.
fn rank_exists(rank: u32, size: u32) -> Result<(), RanksError> {
    if rank < size && size <= RANKS_MAX {
        return Ok(());
    }
    Err(RanksError::NoSuchRank { rank, size })
}

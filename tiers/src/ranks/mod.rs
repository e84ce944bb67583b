//! Agreement between the ranks of one engine.
//!
//! Every rank has its own tree, and all trees must stay equal. A local observation (the number of
//! pages in its L3, an expired deadline) therefore changes a tree only after all ranks have reduced
//! it to one value: the minimum or the maximum. All ranks make the same calls in the same order,
//! which each poll of their caches checks.
//!
//! A module imports only the modules below it.
//!
//! | module | contents |
//! |---|---|
//! | `socket` | ranks that are processes: rank 0 hosts the group, the others join it |
//! | `threads` | ranks that are threads of one process |
//! | `group` | consecutive rounds, and the errors of a round |
//! | `wire` | the messages between the processes |
//!
//! Faults covered: a rank that does not join a call is an error for all ranks after a timeout. A
//! rank that has ended is an immediate error for all. Differing calls are an error that reports
//! both. A broken group stays broken, with the same error for all ranks: ranks that continued alone
//! would no longer have equal trees. A round joined by every rank is complete, independent of later
//! failures.

mod group;
mod socket;
mod threads;
mod wire;

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use socket::{SocketRank, Timeouts};
pub use threads::{ThreadRank, threads};

/// Maximum number of values per call.
pub const VALUES_MAX: usize = 256;

/// Maximum number of ranks of a group.
pub const RANKS_MAX: u32 = 1024;

/// Maximum timeout of a group. Longer timeouts are reduced to it.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// How the values of all ranks are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Reduce {
    /// The minimum of each value.
    Min,
    /// The maximum of each value.
    Max,
}

/// One rank's end of a group.
pub trait Ranks: Send {
    /// The number of this rank: below [`Ranks::size`].
    fn rank(&self) -> u32;

    /// Number of ranks.
    fn size(&self) -> u32;

    /// Replaces each value with the combined value of all ranks. Waits for all ranks. After an
    /// error the values are unchanged.
    ///
    /// # Errors
    /// The group is broken, by this call or earlier.
    fn all_reduce(&mut self, reduce: Reduce, values: &mut [u64]) -> Result<(), RanksError>;

    /// The minimum of each value over all ranks.
    ///
    /// # Errors
    /// As [`Ranks::all_reduce`].
    fn min(&mut self, values: &mut [u64]) -> Result<(), RanksError> {
        self.all_reduce(Reduce::Min, values)
    }

    /// The maximum of each value over all ranks.
    ///
    /// # Errors
    /// As [`Ranks::all_reduce`].
    fn max(&mut self, values: &mut [u64]) -> Result<(), RanksError> {
        self.all_reduce(Reduce::Max, values)
    }
}

/// Why the ranks do not agree. The group stays broken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum RanksError {
    /// Some ranks did not join in time.
    #[error(
        "{} did not join within {timeout:?}; the group is broken, restart all ranks",
        Names(.ranks)
    )]
    Stalled {
        /// The missing ranks.
        ranks: Vec<u32>,
        /// How long the others waited.
        timeout: Duration,
    },
    /// A rank has ended, or its connection has.
    #[error("rank {rank} has ended; the group is broken, restart all ranks")]
    Gone {
        /// The rank.
        rank: u32,
    },
    /// Two ranks made different calls.
    #[error("{first} but {second}: the ranks have diverged, restart all of them")]
    Mismatch {
        /// The earlier call.
        first: Call,
        /// The later, different call.
        second: Call,
    },
    /// The ranks have called their caches differently.
    #[error(
        "one rank is at {first}, another at {}; all ranks must make the same calls with the same \
         arguments: restart all of them",
        Other(.first, .second)
    )]
    Diverged {
        /// The least position of a rank.
        first: Position,
        /// The greatest position. Equal if only arguments differ, of this call or an earlier one.
        second: Position,
    },
    /// The ranks have opened caches of different configurations.
    #[error("the configurations of the ranks differ; give all ranks the same sizes and policies")]
    Unlike,
    /// A rank sent an invalid message.
    #[error("rank {rank} sent {what}; all ranks must run the same version")]
    Garbled {
        /// The rank.
        rank: u32,
        /// A description of the message.
        what: String,
    },
    /// Too many values in one call.
    #[error("rank {rank} called with {values} values, at most {VALUES_MAX} are reduced at once")]
    TooLong {
        /// The rank.
        rank: u32,
        /// Number of values.
        values: usize,
    },
    /// An impossible number of ranks, or rank number.
    #[error("rank {rank} of {size}: there are 1 to {RANKS_MAX} ranks, numbered from 0")]
    NoSuchRank {
        /// The rank.
        rank: u32,
        /// Number of ranks.
        size: u32,
    },
    /// A join request was refused.
    #[error("rank {rank} was refused: {why}")]
    TurnedAway {
        /// The rank.
        rank: u32,
        /// The reason.
        why: String,
    },
    /// The socket does not work.
    #[error("{what} {path:?} failed: {why}")]
    Socket {
        /// The failed operation.
        what: String,
        /// The path of the socket.
        path: String,
        /// The system error.
        why: String,
    },
}

/// How far the calls of a rank are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// The number of its last call.
    pub number: u64,
    /// The kind of that call.
    pub call: String,
    /// The kind of the call before it.
    pub former: String,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Position {
            number,
            call,
            former,
        } = self;
        write!(f, "call {number} ({call} after {former})")
    }
}

/// The second position for messages.
struct Other<'a>(&'a Position, &'a Position);

impl fmt::Display for Other<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == self.1 {
            return f.write_str("the same call after other arguments");
        }
        self.1.fmt(f)
    }
}

/// One rank's call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// The rank.
    pub rank: u32,
    /// The reduction.
    pub reduce: Reduce,
    /// Number of values.
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

/// A list of ranks for messages.
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

//! Ranks that are threads of one process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::group::Group;
use super::wire::Answer;
use super::{Ranks, RanksError, Reduce, rank_exists};

/// One thread's end of a group. Dropped, it is gone for all others.
pub struct ThreadRank {
    rank: u32,
    group: Arc<Group>,
    told: Arc<Told>,
}

/// Where a thread waits to be told.
#[derive(Default)]
struct Told {
    answer: Mutex<Option<Answer>>,
    arrived: Condvar,
}

/// The ends of a group of `size` ranks, in order. A rank that does not come to a call within `timeout` of another one breaks the
/// group.
///
/// # Errors
/// No such number of ranks.
pub fn threads(size: u32, timeout: Duration) -> Result<Vec<ThreadRank>, RanksError> {
    rank_exists(0, size)?;
    let group = Arc::new(Group::new(size, timeout));
    let of = |rank| ThreadRank::new(rank, group.clone());
    Ok((0..size).map(of).collect())
}

impl ThreadRank {
    pub(super) fn new(rank: u32, group: Arc<Group>) -> ThreadRank {
        ThreadRank {
            rank,
            group,
            told: Arc::default(),
        }
    }
}

impl Ranks for ThreadRank {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.group.size()
    }

    fn all_reduce(&mut self, reduce: Reduce, values: &mut [u64]) -> Result<(), RanksError> {
        let until = Instant::now() + self.group.timeout();
        let told = self.told.clone();
        let reply = Box::new(move |answer| {
            *told.answer.lock() = Some(answer);
            told.arrived.notify_one();
        });
        let round = self.group.come(self.rank, reduce, values, reply);
        let mut answer = self.told.answer.lock();
        let mut expired = false;
        let reduced = loop {
            if let Some(answer) = answer.take() {
                break answer?;
            }
            if expired {
                // Whoever had the round end or break tells everybody next.
                self.told.arrived.wait(&mut answer);
            } else if self.told.arrived.wait_until(&mut answer, until).timed_out() {
                expired = true;
                MutexGuard::unlocked(&mut answer, || self.group.expire(round));
            }
        };
        values.copy_from_slice(&reduced);
        Ok(())
    }
}

impl Drop for ThreadRank {
    fn drop(&mut self) {
        self.group.break_up(RanksError::Gone { rank: self.rank });
    }
}

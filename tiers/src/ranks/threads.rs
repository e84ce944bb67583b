//! Ranks that are threads of one process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_sync::{Condvar, Mutex, MutexGuard};

use super::group::Group;
use super::wire::Answer;
use super::{Ranks, RanksError, Reduce, rank_exists};

/// One thread's end of a group. If dropped, the rank has ended for all others.
pub struct ThreadRank {
    rank: u32,
    group: Arc<Group>,
    slot: Arc<ReplySlot>,
}

/// The place where a thread waits for its reply.
#[derive(Default)]
struct ReplySlot {
    answer: Mutex<Option<Answer>>,
    arrived: Condvar,
}

/// The ends of a group of `size` ranks, in order. A rank that does not join a call within `timeout`
/// of another rank breaks the group.
///
/// # Errors
/// The number of ranks is not valid.
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
            slot: Arc::default(),
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
        let slot = self.slot.clone();
        let reply = Box::new(move |answer| {
            *slot.answer.lock() = Some(answer);
            slot.arrived.notify_one();
        });
        let round = self.group.come(self.rank, reduce, values, reply);
        let mut answer = self.slot.answer.lock();
        let mut expired = false;
        let reduced = loop {
            if let Some(answer) = answer.take() {
                break answer?;
            }
            if expired {
                // The round has ended or the group is broken, so the notification is about to
                // arrive.
                self.slot.arrived.wait(&mut answer);
            } else if self.slot.arrived.wait_until(&mut answer, until).timed_out() {
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

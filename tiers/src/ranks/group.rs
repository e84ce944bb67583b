//! The rendezvous of all ranks, in consecutive rounds. Nothing blocks here; each caller passes a
//! callback for its reply.
//!
//! Invariants: a round ends when every rank has joined it once, and all ranks get the same reply.
//! Each caller is notified exactly once. A broken group stays broken, and all callers get the first
//! reason. Callbacks run outside the lock.

use std::time::Duration;

use larder_sync::{Mutex, MutexGuard};

use super::wire::Answer;
use super::{Call, RanksError, Reduce, TIMEOUT_MAX, VALUES_MAX};

/// The callback that receives the result of a round.
pub(super) type Reply = Box<dyn FnOnce(Answer) + Send>;

/// Names a round.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Round(u64);

pub(super) struct Group {
    size: u32,
    timeout: Duration,
    state: Mutex<State>,
}

struct State {
    round: Round,
    /// The calls that have joined the round.
    came: Vec<(Call, Reply)>,
    /// The values reduced so far.
    reduced: Vec<u64>,
    broken: Option<RanksError>,
}

impl Group {
    pub(super) fn new(size: u32, timeout: Duration) -> Group {
        Group {
            size,
            timeout: timeout.min(TIMEOUT_MAX),
            state: Mutex::new(State {
                round: Round(0),
                came: Vec::new(),
                reduced: Vec::new(),
                broken: None,
            }),
        }
    }

    pub(super) fn size(&self) -> u32 {
        self.size
    }

    /// The maximum wait of a rank in a round before it calls [`expire`](Group::expire).
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A rank joins the round. Its callback runs with the result: at once if this rank is the last
    /// or the group is broken.
    pub(super) fn come(&self, rank: u32, reduce: Reduce, values: &[u64], reply: Reply) -> Round {
        let mut state = self.state.lock();
        let round = state.round;
        let call = Call {
            rank,
            reduce,
            values: values.len(),
        };
        let came = state.reduce(call, values);
        state.came.push((call, reply));
        let answer = match came {
            Err(error) => Err(state.broken.get_or_insert(error).clone()),
            Ok(()) if state.came.len() < self.size as usize => return round,
            Ok(()) => {
                state.round.0 += 1;
                Ok(std::mem::take(&mut state.reduced))
            }
        };
        let waiters = std::mem::take(&mut state.came);
        drop(state);
        notify(waiters, &answer);
        round
    }

    /// A caller's wait for this round has timed out: the group is broken if the round has not
    /// ended.
    pub(super) fn expire(&self, round: Round) {
        let state = self.state.lock();
        if state.round == round && state.broken.is_none() {
            let error = RanksError::Stalled {
                ranks: state.missing(self.size),
                timeout: self.timeout,
            };
            Self::broken(state, error);
        }
    }

    /// Breaks the group with this reason, unless it is already broken. Returns the effective
    /// reason.
    pub(super) fn break_up(&self, error: RanksError) -> RanksError {
        Self::broken(self.state.lock(), error)
    }

    fn broken(mut state: MutexGuard<'_, State>, error: RanksError) -> RanksError {
        let error = state.broken.get_or_insert(error).clone();
        let waiters = std::mem::take(&mut state.came);
        drop(state);
        notify(waiters, &Err(error.clone()));
        error
    }
}

fn notify(came: Vec<(Call, Reply)>, answer: &Answer) {
    for (_, reply) in came {
        reply(answer.clone());
    }
}

impl State {
    fn reduce(&mut self, call: Call, values: &[u64]) -> Result<(), RanksError> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        if values.len() > VALUES_MAX {
            return Err(RanksError::TooLong {
                rank: call.rank,
                values: values.len(),
            });
        }
        match self.came.first() {
            None => self.reduced = values.to_vec(),
            Some((first, _)) if (first.reduce, first.values) != (call.reduce, call.values) => {
                return Err(RanksError::Mismatch {
                    first: *first,
                    second: call,
                });
            }
            Some(_) => {
                for (all, one) in self.reduced.iter_mut().zip(values) {
                    *all = match call.reduce {
                        Reduce::Min => *one.min(all),
                        Reduce::Max => *one.max(all),
                    };
                }
            }
        }
        Ok(())
    }

    fn missing(&self, size: u32) -> Vec<u32> {
        let came = |rank: &u32| self.came.iter().any(|(call, _)| call.rank == *rank);
        (0..size).filter(|rank| !came(rank)).collect()
    }
}

//! The meeting point of all ranks: one round after another. Nobody waits here; whoever comes says how to be told.
//!
//! Invariants: a round ends when every rank has come to it once, and all are told the same; everybody who comes is told exactly once.
//! Broken stays broken, and the first reason is the one that everybody is told. Nobody is told under the lock.

use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::wire::Answer;
use super::{Call, RanksError, Reduce, TIMEOUT_MAX, VALUES_MAX};

/// How somebody is told what came of a round.
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
    /// Who has come to it.
    came: Vec<(Call, Reply)>,
    /// What their values have been reduced to.
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

    /// How long a rank waits in a round before it has it [expire](Group::expire).
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A rank comes to the round. It is told what came of it: at once if it is the last or the group is broken.
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
        let told = std::mem::take(&mut state.came);
        drop(state);
        tell(told, &answer);
        round
    }

    /// Somebody has waited long enough for this round: the group is broken if it has not ended.
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

    /// Nobody agrees on anything any more, for this reason unless there was one already. Returns what it is.
    pub(super) fn break_up(&self, error: RanksError) -> RanksError {
        Self::broken(self.state.lock(), error)
    }

    fn broken(mut state: MutexGuard<'_, State>, error: RanksError) -> RanksError {
        let error = state.broken.get_or_insert(error).clone();
        let told = std::mem::take(&mut state.came);
        drop(state);
        tell(told, &Err(error.clone()));
        error
    }
}

fn tell(came: Vec<(Call, Reply)>, answer: &Answer) {
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

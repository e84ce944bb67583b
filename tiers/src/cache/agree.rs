//! What ranks agree on before it is believed.
//!
//! Every rank gives the same orders in the same order. Completions are taken in that order too, within each line of work: as many
//! as all ranks have at the front of the line, each with the least outcome of any rank. There are lines of their own for what
//! must not wait for one another: a slow L3 holds back no load. What only one rank may decide (how fast L3 is) is rank 0's word.
//!
//! Without other ranks, completions are taken as they come.

use std::collections::{BTreeMap, VecDeque};

use crate::core::{Done, OpId, Outcome};
use crate::ranks::{Ranks, RanksError, VALUES_MAX};

/// Most completions of a line taken at once: two values each, within one call of the group.
const TAKEN_MAX: usize = VALUES_MAX / 2 / LINES;

/// Work that is answered in the order in which it is given.
#[derive(Clone, Copy, Debug)]
pub(super) enum Line {
    BackUp,
    Load,
    Put,
    Prefetch,
}

const LINES: usize = 4;

/// A completion that all ranks have.
pub(super) struct AgreedDone {
    pub(super) done: Done,
    pub(super) read_micros: Option<u64>,
}

/// See the module.
pub(super) struct Agreed {
    ranks: Option<Box<dyn Ranks>>,
    /// Orders without an agreed answer, oldest first.
    expected: [VecDeque<OpId>; LINES],
    ended: BTreeMap<OpId, AgreedDone>,
    /// Without ranks: what has ended, as it came.
    taken: Vec<AgreedDone>,
}

impl Agreed {
    pub(super) fn new(ranks: Option<Box<dyn Ranks>>) -> Agreed {
        Agreed {
            ranks,
            expected: Default::default(),
            ended: BTreeMap::new(),
            taken: Vec::new(),
        }
    }

    /// An order is on its way.
    pub(super) fn expect(&mut self, line: Line, id: OpId) {
        if self.ranks.is_some() {
            self.expected[line as usize].push_back(id);
        }
    }

    /// An order has ended on this rank.
    pub(super) fn ended(&mut self, done: Done, read_micros: Option<u64>) {
        let ended = AgreedDone { done, read_micros };
        if self.ranks.is_some() {
            self.ended.insert(done.id, ended);
        } else {
            self.taken.push(ended);
        }
    }

    /// Whether any rank says yes.
    pub(super) fn any(&mut self, own: bool) -> Result<bool, RanksError> {
        let Some(ranks) = &mut self.ranks else {
            return Ok(own);
        };
        let mut votes = [u64::from(own)];
        ranks.max(&mut votes)?;
        Ok(votes != [0])
    }

    /// The completions that all ranks have.
    pub(super) fn take(&mut self) -> Result<Vec<AgreedDone>, RanksError> {
        let Some(ranks) = &mut self.ranks else {
            return Ok(std::mem::take(&mut self.taken));
        };
        let mut counts = self.expected.each_ref().map(|line| {
            let ended = line.iter().take_while(|id| self.ended.contains_key(id));
            ended.take(TAKEN_MAX).count() as u64
        });
        ranks.min(&mut counts)?;
        let lines = self.expected.iter_mut().zip(counts);
        let ids: Vec<OpId> = lines
            .flat_map(|(line, count)| line.drain(..count as usize))
            .collect();
        let own: Vec<AgreedDone> = ids.iter().filter_map(|id| self.ended.remove(id)).collect();
        if own.is_empty() {
            return Ok(own);
        }
        let is_first = ranks.rank() == 0;
        let mut values = Vec::new();
        for ended in &own {
            values.push(match ended.done.outcome {
                Outcome::Copied(is_good) => u64::from(is_good),
                Outcome::Pages(pages) => pages as u64,
            });
            // The least of all is rank 0's: no other says anything less.
            values.push(ended.read_micros.filter(|_| is_first).unwrap_or(u64::MAX));
        }
        ranks.min(&mut values)?;
        let (values, _) = values.as_chunks::<2>();
        let agreed = own
            .into_iter()
            .zip(values)
            .map(|(ended, [outcome, micros])| AgreedDone {
                done: Done {
                    id: ended.done.id,
                    outcome: match ended.done.outcome {
                        Outcome::Copied(_) => Outcome::Copied(*outcome != 0),
                        Outcome::Pages(_) => Outcome::Pages(*outcome as usize),
                    },
                },
                read_micros: (*micros != u64::MAX).then_some(*micros),
            });
        Ok(agreed.collect())
    }
}

//! What ranks agree on before it is believed.
//!
//! Every rank gives the same orders and forwards in the same order. Completions are taken in that
//! order too, within each line of work: as many as all ranks have at the front of the line, each
//! with the least outcome of any rank. There are lines of their own for what must not wait for one
//! another: a slow L3 holds back no load. What only one rank may decide (how fast L3 is) is rank
//! 0's word.
//!
//! Without other ranks, completions are taken as they come.

use std::collections::{BTreeMap, VecDeque};

use crate::core::{Fence, OpId, Outcome};
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
    Forward,
}

const LINES: usize = 5;

/// Work whose end is agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Work {
    Order(OpId),
    Forward(Fence),
}

/// The end of some work.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    pub(super) work: Work,
    /// Of a forward: `Copied`, and whether it succeeded.
    pub(super) outcome: Outcome,
    /// How long it took, for a read of L3.
    pub(super) read_micros: Option<u64>,
}

/// See the module.
pub(super) struct Agreed {
    ranks: Option<Box<dyn Ranks>>,
    /// Work without an agreed end, oldest first.
    expected: [VecDeque<Work>; LINES],
    ended: BTreeMap<Work, End>,
    /// Without ranks: what has ended, as it came.
    taken: Vec<End>,
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

    /// Whether there are other ranks.
    pub(super) fn has_ranks(&self) -> bool {
        self.ranks.is_some()
    }

    /// Some work is on its way.
    pub(super) fn expect(&mut self, line: Line, work: Work) {
        if self.ranks.is_some() {
            self.expected[line as usize].push_back(work);
        }
    }

    /// Some work has ended on this rank.
    pub(super) fn ended(&mut self, end: End) {
        if self.ranks.is_some() {
            self.ended.insert(end.work, end);
        } else {
            self.taken.push(end);
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

    /// The ends that all ranks have.
    pub(super) fn take(&mut self) -> Result<Vec<End>, RanksError> {
        let Some(ranks) = &mut self.ranks else {
            return Ok(std::mem::take(&mut self.taken));
        };
        let mut counts = self.expected.each_ref().map(|line| {
            let ended = line.iter().take_while(|work| self.ended.contains_key(work));
            ended.take(TAKEN_MAX).count() as u64
        });
        ranks.min(&mut counts)?;
        let lines = self.expected.iter_mut().zip(counts);
        let works: Vec<Work> = lines
            .flat_map(|(line, count)| line.drain(..count as usize))
            .collect();
        let mut ends: Vec<End> = works
            .iter()
            .filter_map(|work| self.ended.remove(work))
            .collect();
        if ends.is_empty() {
            return Ok(ends);
        }
        let is_first = ranks.rank() == 0;
        let mut values = Vec::new();
        for end in &ends {
            values.push(match end.outcome {
                Outcome::Copied(is_good) => u64::from(is_good),
                Outcome::Pages(pages) => pages as u64,
            });
            // The least of all is rank 0's: no other says anything less.
            values.push(end.read_micros.filter(|_| is_first).unwrap_or(u64::MAX));
        }
        ranks.min(&mut values)?;
        let (values, _) = values.as_chunks::<2>();
        for (end, [outcome, micros]) in ends.iter_mut().zip(values) {
            end.outcome = match end.outcome {
                Outcome::Copied(_) => Outcome::Copied(*outcome != 0),
                Outcome::Pages(_) => Outcome::Pages(*outcome as usize),
            };
            end.read_micros = (*micros != u64::MAX).then_some(*micros);
        }
        Ok(ends)
    }
}

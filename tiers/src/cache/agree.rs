//! Agreement between ranks on completions.
//!
//! Every rank issues the same orders and forwards in the same order. Within each line of work,
//! completions are also taken in that order: as many as all ranks have at the front of the line,
//! each with the least outcome of any rank. For a lookup with tail pools it is the longest prefix
//! that all ranks can continue. Work that must not wait for other work has its own line; for
//! example, a slow L3 delays no load. Values that only one rank may decide (the speed of L3) come
//! from rank 0.
//!
//! Each call that changes the core is counted, with its kind and a digest of its arguments. A poll
//! compares them before any end takes effect: ranks that have made different calls get an error
//! that names both, and no rank continues.
//!
//! Without other ranks, completions are taken as they arrive.

use std::collections::{BTreeMap, VecDeque};

use crate::core::{Fence, OpId, Outcome};
use crate::planted::planted;
use crate::ranks::{Position, Ranks, RanksError, VALUES_MAX};
use crate::tails::Legal;

/// Maximum number of completions per line and round: two values each, within one call of the group.
const TAKEN_MAX: usize = VALUES_MAX / 2 / LINES;

/// Work that is completed in the order in which it is issued.
#[derive(Clone, Copy, Debug)]
pub(super) enum Line {
    BackUp,
    Load,
    Put,
    Prefetch,
    Forward,
}

const LINES: usize = 5;

/// A call that changes the core, or agrees on a value.
#[derive(Clone, Copy, Debug)]
pub(super) enum Call {
    Tokens,
    Match,
    Start,
    Restart,
    LoadBack,
    Extend,
    Truncate,
    Insert,
    Finish,
    Prepare,
    Passed,
    Evict,
    Weights,
    Reset,
    Retry,
    Prefetch,
    EndPrefetch,
    CancelPrefetch,
    PollPrefetch,
    Deadline,
    Poll,
}

/// By their numbers.
const CALLS: [&str; 21] = [
    "tokens",
    "match",
    "start",
    "restart",
    "load back",
    "extend",
    "truncate",
    "insert",
    "finish",
    "prepare",
    "passed",
    "evict",
    "new weights",
    "reset",
    "retry",
    "prefetch",
    "end prefetch",
    "cancel prefetch",
    "poll prefetch",
    "deadline",
    "poll",
];

/// The calls of this rank so far.
#[derive(Default)]
struct Calls {
    count: u64,
    last: u8,
    former: u8,
    digest: u64,
}

impl Calls {
    /// The number of the last call, its kind, and that of the call before it.
    fn position(&self) -> u64 {
        self.count << 16 | u64::from(self.last) << 8 | u64::from(self.former)
    }
}

fn position_of(value: u64) -> Position {
    let kind = |number: u64| {
        let kind = CALLS.get((number & 0xff) as usize);
        kind.copied().unwrap_or("none").to_owned()
    };
    Position {
        number: value >> 16,
        call: kind(value >> 8),
        former: kind(value),
    }
}

/// Work whose end needs agreement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Work {
    Order(OpId),
    Forward(Fence),
}

/// The end of some work.
#[derive(Clone, Debug)]
pub(super) struct End {
    pub(super) work: Work,
    /// Of a forward: `Copied`, and whether it succeeded.
    pub(super) outcome: Outcome,
    /// Duration of a read from L3.
    pub(super) read_micros: Option<u64>,
    /// Of a lookup with tail pools: the prefixes that can be continued.
    pub(super) legal: Option<Legal>,
}

/// See the module documentation.
pub(super) struct Agreed {
    ranks: Option<Box<dyn Ranks>>,
    calls: Calls,
    /// Why the ranks do not agree any more.
    failure: Option<RanksError>,
    /// Work without an agreed end, oldest first.
    expected: [VecDeque<Work>; LINES],
    ended: BTreeMap<Work, End>,
    /// Without ranks: completions in order of arrival.
    taken: Vec<End>,
}

impl Agreed {
    pub(super) fn new(ranks: Option<Box<dyn Ranks>>) -> Agreed {
        Agreed {
            ranks,
            calls: Calls::default(),
            failure: None,
            expected: Default::default(),
            ended: BTreeMap::new(),
            taken: Vec::new(),
        }
    }

    /// Whether there are other ranks.
    pub(super) fn has_ranks(&self) -> bool {
        self.ranks.is_some()
    }

    /// Why the ranks do not agree any more.
    pub(super) fn failure(&self) -> Option<&RanksError> {
        self.failure.as_ref()
    }

    /// Counts a call of this rank.
    pub(super) fn called(&mut self, call: Call, arguments: impl IntoIterator<Item = u64>) {
        if self.ranks.is_none() {
            return;
        }
        self.calls.count += 1;
        (self.calls.former, self.calls.last) = (self.calls.last, call as u8);
        for value in std::iter::once(call as u64).chain(arguments) {
            let mixed = (self.calls.digest ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            self.calls.digest = mixed ^ mixed >> 32;
        }
    }

    /// The minimum of each value over all ranks, which have made the same calls up to this one.
    fn meet(
        &mut self,
        call: Call,
        argument: u64,
        values: &mut [u64; LINES],
    ) -> Result<(), RanksError> {
        self.called(call, [argument]);
        let Some(ranks) = &mut self.ranks else {
            return Ok(());
        };
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let (position, digest) = (self.calls.position(), self.calls.digest);
        let mut all = [0; 4 + LINES];
        all[..4].copy_from_slice(&[position, !position, digest, !digest]);
        all[4..].copy_from_slice(values);
        let met = ranks.min(&mut all).and_then(|()| {
            let same_digest = all[2] == !all[3];
            match all[0] == !all[1] && same_digest {
                true => Ok(()),
                false => Err(RanksError::Diverged {
                    first: position_of(all[0]),
                    second: position_of(!all[1]),
                }),
            }
        });
        if let Err(failure) = &met {
            self.failure = Some(failure.clone());
        }
        values.copy_from_slice(&all[4..]);
        met
    }

    /// Registers work that has been issued.
    pub(super) fn expect(&mut self, line: Line, work: Work) {
        if self.ranks.is_some() {
            self.expected[line as usize].push_back(work);
        }
    }

    /// Records that work has ended on this rank.
    pub(super) fn ended(&mut self, end: End) {
        if self.ranks.is_some() {
            self.ended.insert(end.work, end);
        } else {
            self.taken.push(end);
        }
    }

    /// Whether the value is true on any rank.
    pub(super) fn any(&mut self, call: Call, of: u64, own: bool) -> Result<bool, RanksError> {
        // The minimum over all ranks is 0 if it is 0 on any.
        let mut votes = [u64::from(!own); LINES];
        self.meet(call, of, &mut votes)?;
        Ok(votes[0] == 0)
    }

    /// Returns the ends that all ranks have.
    pub(super) fn take(&mut self) -> Result<Vec<End>, RanksError> {
        let mut all = std::mem::take(&mut self.taken);
        while self.ranks.is_some() {
            let mut counts = self.expected.each_ref().map(|line| {
                let ended = line.iter().take_while(|work| self.ended.contains_key(work));
                ended.take(TAKEN_MAX).count() as u64
            });
            self.meet(Call::Poll, 0, &mut counts)?;
            let lines = self.expected.iter_mut().zip(counts);
            let works = lines.flat_map(|(line, count)| line.drain(..count as usize));
            let mut ends: Vec<End> = works.filter_map(|work| self.ended.remove(&work)).collect();
            if let Some(ranks) = &mut self.ranks
                && let Err(failure) = agree(&mut **ranks, &mut ends)
            {
                self.failure = Some(failure.clone());
                return Err(failure);
            }
            all.append(&mut ends);
            // A line that is cut to the maximum may have more.
            if counts.iter().all(|count| *count < TAKEN_MAX as u64) {
                break;
            }
        }
        Ok(all)
    }
}

/// Replaces outcomes and durations with the values that all ranks use.
fn agree(ranks: &mut dyn Ranks, ends: &mut [End]) -> Result<(), RanksError> {
    if ends.is_empty() {
        return Ok(());
    }
    let is_first = ranks.rank() == 0;
    let mut values = Vec::new();
    for end in &*ends {
        values.push(match end.outcome {
            Outcome::Copied(is_good) => u64::from(is_good),
            Outcome::Pages(pages) => pages as u64,
        });
        // The minimum over all ranks is rank 0's value, because all other ranks send the maximum.
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
    if ends.iter().any(|end| end.legal.is_some()) && !planted!(MinimumOfLengths) {
        agree_on_prefixes(ranks, ends)?;
    }
    Ok(())
}

/// Replaces the prefixes of lookups by the longest that all ranks can continue. In each round all
/// go down to the shortest of their longest ones, until that is one of each.
fn agree_on_prefixes(ranks: &mut dyn Ranks, ends: &mut [End]) -> Result<(), RanksError> {
    loop {
        let longest = ends.iter().map(|end| match (&end.legal, end.outcome) {
            (Some(legal), Outcome::Pages(pages)) => legal.longest_within(pages) as u64,
            _ => 0,
        });
        let mut values: Vec<u64> = longest.collect();
        ranks.min(&mut values)?;
        let mut is_over = true;
        for (end, value) in ends.iter_mut().zip(values) {
            let pages = Outcome::Pages(value as usize);
            if end.legal.is_some() && end.outcome != pages {
                end.outcome = pages;
                is_over = false;
            }
        }
        if is_over {
            return Ok(());
        }
    }
}

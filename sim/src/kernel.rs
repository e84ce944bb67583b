//! The simulated system calls: the results that one operation gets on its way to the volume,
//! besides the outcome for its blocks.
//!
//! The rules of progress are the engine's own ([`carry_out`]). Only the kernel's answers are
//! simulated. Calls are interrupted, deferred and cancelled, transfers come back short. All of that
//! must stay invisible. A failing read of a block is tried as often as the engine tries it.

use std::sync::{Arc, Mutex};

use larder_disk::{Action, Buffer, DiskError, Done, Op, Piece, Purpose, Sink, Step, carry_out};
use larder_engine::format::BLOCK_BYTES;
use larder_sim_runtime::dice::Dice;

use crate::classes::{Class, Tally};

const EIO: i32 = 5;
const EINTR: i32 = 4;
const EAGAIN: i32 = 11;
const ECANCELED: i32 = 125;

/// Most interruptions of one operation: far fewer than the engine tolerates.
const INTERRUPTIONS_MAX: usize = 3;

/// Probabilities, for each operation, of results other than complete success.
#[derive(Clone, Copy, Debug, Default)]
pub struct Odds {
    /// A call is interrupted, deferred or cancelled, up to three times.
    pub interrupted: f64,
    /// A transfer comes back short, and is resumed.
    pub short: f64,
}

/// The device's final answer to a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// All of it is written.
    Done,
    /// This error number.
    Error(i32),
    /// Success, without a byte moved.
    NoProgress,
}

pub struct Kernel {
    dice: Dice,
    pub odds: Odds,
    pub tally: Tally,
}

/// Holds the single answer of an operation.
#[derive(Default)]
struct Slot(Mutex<Option<Result<(), DiskError>>>);

impl Sink for Slot {
    fn done(&self, answers: Vec<Done>) {
        for done in answers {
            let before = self.0.lock().unwrap().replace(done.result);
            assert!(before.is_none(), "an operation is answered twice");
        }
    }
}

/// Memory at an invented address, which is never dereferenced.
fn nowhere(blocks: usize) -> Buffer {
    Buffer::Borrowed(vec![Piece {
        ptr: std::ptr::without_provenance_mut(BLOCK_BYTES),
        len: blocks * BLOCK_BYTES,
    }])
}

fn play(
    action: Action,
    kernel: impl FnMut(Step<'_>) -> Result<usize, i32>,
) -> Result<(), DiskError> {
    let slot = Arc::new(Slot::default());
    let op = Op {
        volume: 0,
        action,
        purpose: Purpose::Call,
        deadline: None,
        tag: 0,
        sink: slot.clone(),
    };
    carry_out(op, kernel);
    let answer = slot.0.lock().unwrap().take();
    answer.expect("an operation is answered")
}

fn length(pieces: &[Piece]) -> usize {
    pieces.iter().map(|piece| piece.len).sum()
}

fn block_of(offset: u64) -> usize {
    assert!(
        offset.is_multiple_of(BLOCK_BYTES as u64),
        "direct I/O begins at a block"
    );
    usize::try_from(offset).unwrap() / BLOCK_BYTES
}

impl Kernel {
    pub fn new(dice: Dice, odds: Odds) -> Kernel {
        Kernel {
            dice,
            odds,
            tally: Tally::default(),
        }
    }

    fn interruptions(&mut self) -> usize {
        if self.dice.chance(self.odds.interrupted) {
            1 + self.dice.below(INTERRUPTIONS_MAX)
        } else {
            0
        }
    }

    fn interrupt(&mut self, left: &mut usize, is_sync: bool) -> Option<i32> {
        *left = left.checked_sub(1)?;
        // An interrupted sync has failed. A cancelled one never ran.
        let (errno, class) = if is_sync {
            (ECANCELED, Class::Cancelled)
        } else {
            self.dice.pick(&[
                (EINTR, Class::Interrupted),
                (EAGAIN, Class::Again),
                (ECANCELED, Class::Cancelled),
            ])
        };
        self.tally.count(class);
        Some(errno)
    }

    /// The number of bytes that a call moves: at least one block, not always whole blocks.
    fn moved(&mut self, bytes: usize, is_short: &mut bool, class: Class) -> usize {
        if bytes <= BLOCK_BYTES || !std::mem::take(is_short) {
            return bytes;
        }
        self.tally.count(class);
        BLOCK_BYTES + self.dice.below(bytes - BLOCK_BYTES)
    }

    /// A read of `count` blocks from `start` on. `fails` decides for a range whether this read of
    /// it fails.
    pub fn read(
        &mut self,
        start: usize,
        count: usize,
        mut fails: impl FnMut(usize, usize) -> bool,
    ) -> Result<(), DiskError> {
        let mut interruptions = self.interruptions();
        let mut is_short = self.dice.chance(self.odds.short);
        let action = Action::Read {
            offset: (start * BLOCK_BYTES) as u64,
            buffer: nowhere(count),
        };
        play(action, |step| {
            let Step::Read { offset, pieces } = step else {
                panic!("a read turns into something else");
            };
            if let Some(errno) = self.interrupt(&mut interruptions, false) {
                return Err(errno);
            }
            let bytes = length(pieces);
            if fails(block_of(offset), bytes / BLOCK_BYTES) {
                return Err(EIO);
            }
            Ok(self.moved(bytes, &mut is_short, Class::ShortRead))
        })
    }

    /// A write of `count` blocks from `start` on. `land` gets each range that arrives, and whether
    /// it is the last one. The call for the last range returns `answer`.
    pub fn write(
        &mut self,
        start: usize,
        count: usize,
        answer: Answer,
        mut land: impl FnMut(usize, usize, bool),
    ) -> Result<(), DiskError> {
        let mut interruptions = self.interruptions();
        let mut is_short = self.dice.chance(self.odds.short);
        let action = Action::Write {
            offset: (start * BLOCK_BYTES) as u64,
            buffer: nowhere(count),
        };
        play(action, |step| {
            let Step::Write { offset, pieces } = step else {
                panic!("a write turns into something else");
            };
            if let Some(errno) = self.interrupt(&mut interruptions, false) {
                return Err(errno);
            }
            let (first, bytes) = (block_of(offset), length(pieces));
            let moved = self.moved(bytes, &mut is_short, Class::ShortWrite);
            land(first, moved / BLOCK_BYTES, moved == bytes);
            match answer {
                _ if moved < bytes => Ok(moved),
                Answer::Done => Ok(moved),
                Answer::Error(errno) => Err(errno),
                Answer::NoProgress => Ok(self.dice.below(BLOCK_BYTES)),
            }
        })
    }

    /// A sync. `error` is the device's answer instead of success.
    pub fn sync(&mut self, error: Option<i32>) -> Result<(), DiskError> {
        let mut interruptions = self.interruptions();
        play(Action::Sync, |step| {
            assert!(
                matches!(step, Step::Sync),
                "a sync turns into something else"
            );
            match (self.interrupt(&mut interruptions, true), error) {
                (Some(errno), _) | (None, Some(errno)) => Err(errno),
                (None, None) => Ok(0),
            }
        })
    }
}

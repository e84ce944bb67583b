//! The simulated system calls: what one operation meets on its way to the volume, besides what becomes of its blocks.
//!
//! The rules of progress are the engine's own ([`carry_out`]): only what the kernel answers is made up here. Calls
//! are interrupted, put off and cancelled, transfers come back short: all of that has to go unnoticed. A read of a block
//! that fails is tried as often as the engine tries it.

use std::sync::{Arc, Mutex};

use larder_engine::disk::{Action, Buffer, DiskError, Done, Op, Piece, Sink, Step, carry_out};
use larder_engine::format::BLOCK_BYTES;

use crate::classes::{Class, Tally};
use crate::dice::Dice;

const EIO: i32 = 5;
const EINTR: i32 = 4;
const EAGAIN: i32 = 11;
const ECANCELED: i32 = 125;

/// Most times that one operation is interrupted: far fewer than the engine bears.
const INTERRUPTIONS_MAX: usize = 3;

/// How often calls go other than asked, of an operation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Odds {
    /// A call is interrupted, put off or cancelled, up to three times.
    pub interrupted: f64,
    /// A transfer comes back short, and goes on from there.
    pub short: f64,
}

/// What the device answers to a write in the end.
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

/// Keeps the one answer of an operation.
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

/// Memory at a made-up address, which nobody follows.
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
        // A sync that is interrupted has failed; one that is cancelled never ran.
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

    /// How much of a transfer a call moves: at least one block, not always whole ones.
    fn moved(&mut self, bytes: usize, is_short: &mut bool, class: Class) -> usize {
        if bytes <= BLOCK_BYTES || !std::mem::take(is_short) {
            return bytes;
        }
        self.tally.count(class);
        BLOCK_BYTES + self.dice.below(bytes - BLOCK_BYTES)
    }

    /// A read of `count` blocks from `start` on. `fails` says of a range whether this try at it fails.
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

    /// A write of `count` blocks from `start` on, of which `land` is told what arrives, and whether that is the last of it; the
    /// answer to that last one is `answer`.
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

    /// A sync; `error` is what the device answers instead of success.
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

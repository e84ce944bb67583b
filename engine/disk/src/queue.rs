//! The operations of one volume that wait for the device, and their order.
//!
//! Owns: three lines of operations, and the pace of the volume.
//!
//! | line | operations | order |
//! |---|---|---|
//! | first | reads of calls, records of the store, syncs | as submitted |
//! | puts | writes of calls | as submitted, at the pace of the volume |
//! | background | reads and writes that no call waits for | the same, after puts |
//!
//! The pace alone puts reads before writes. Where it lets a write start, the write comes before
//! the reads that were submitted after it: else reads that fill the volume's depth would starve it.
//!
//! Invariants: an operation is in one line; each line keeps the order of submission; a put that was
//! submitted more than [`STEP_BACK`] after an operation in the background comes after it. So no
//! operation is starved.

use std::collections::VecDeque;
use std::sync::Arc;

use larder_base::runtime::Instant;

use super::job::is_late;
use super::pace::{Ended, MS, Nanos, Pace, Traffic, Turn};
use super::pacing::Pacing;
use super::{Action, Op, Purpose};

/// How much later a put may be submitted and still come before an operation in the background.
const STEP_BACK: Nanos = 20 * MS;

/// See the module.
pub(super) struct Queue {
    first: VecDeque<Waiting>,
    puts: VecDeque<Waiting>,
    background: VecDeque<Waiting>,
    pace: Pace,
    pacing: Arc<Pacing>,
    volume: usize,
}

struct Waiting {
    op: Op,
    since: Nanos,
}

/// The next operation of a queue.
pub(super) enum Next {
    /// To be started. It counts as begun until [`Queue::end`].
    Start(Op),
    /// Not to be started any more: its deadline has passed.
    Late(Op),
    /// The remaining operations wait: until this moment, or until another operation has ended.
    Held(Option<Nanos>),
    /// There is none.
    Nothing,
}

impl Queue {
    pub(super) fn new(volume: usize, pacing: Arc<Pacing>) -> Queue {
        Queue {
            first: VecDeque::new(),
            puts: VecDeque::new(),
            background: VecDeque::new(),
            pace: Pace::default(),
            pacing,
            volume,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first.is_empty() && self.puts.is_empty() && self.background.is_empty()
    }

    /// Takes in operations that are submitted now.
    pub(super) fn extend(&mut self, ops: Vec<Op>, now: Nanos) {
        let since = now;
        for op in ops {
            match (op.purpose, &op.action) {
                (Purpose::Background, Action::Read { .. } | Action::Write { .. }) => {
                    self.background.push_back(Waiting { op, since });
                }
                (Purpose::Call, Action::Write { .. }) => self.puts.push_back(Waiting { op, since }),
                _ => self.first.push_back(Waiting { op, since }),
            }
        }
    }

    /// The operation whose turn it is.
    pub(super) fn next(&mut self, now: Nanos) -> Next {
        let (first, paced) = (since(&self.first), since(self.paced()));
        let mut held = None;
        if let Some(paced) = paced
            && first.is_none_or(|first| paced < first)
        {
            match self.turn(now) {
                Turn::Now => return self.start_paced(now),
                Turn::At(moment) => held = Some(Next::Held(Some(moment))),
                Turn::AfterAnother => held = Some(Next::Held(None)),
            }
        }
        match self.first.pop_front() {
            Some(waiting) => self.start(waiting.op, now),
            None => held.unwrap_or(Next::Nothing),
        }
    }

    /// The line of the next paced operation.
    fn paced(&mut self) -> &mut VecDeque<Waiting> {
        let is_put = match (since(&self.puts), since(&self.background)) {
            (Some(put), Some(other)) => put <= other.saturating_add(STEP_BACK),
            (put, _) => put.is_some(),
        };
        match is_put {
            true => &mut self.puts,
            false => &mut self.background,
        }
    }

    /// Whether the next paced operation may start.
    fn turn(&mut self, now: Nanos) -> Turn {
        match self.pacing.words(self.volume) {
            Some(words) => self.pace.turn(words, now),
            None => Turn::Now,
        }
    }

    fn start_paced(&mut self, now: Nanos) -> Next {
        let Some(Waiting { op, since }) = self.paced().pop_front() else {
            return Next::Nothing;
        };
        let waited = now.saturating_sub(since);
        self.pacing.note(self.volume, &self.pace, &op, waited);
        self.start(op, now)
    }

    fn start(&mut self, op: Op, now: Nanos) -> Next {
        if is_late(&op, Instant::now()) {
            return Next::Late(op);
        }
        if let Some(words) = self.pacing.words(self.volume) {
            self.pace.begin(words, Traffic::of(&op), now);
        }
        Next::Start(op)
    }

    /// Keeps the claim of reads that are in flight for long. Returns when to call it again: `None`
    /// if there are none.
    pub(super) fn renew(&self, now: Nanos) -> Option<Nanos> {
        let words = self.pacing.words(self.volume)?;
        self.pace.renew(words, now)
    }

    /// Operations that were started have ended.
    pub(super) fn end(&mut self, ended: Ended, now: Nanos) {
        if let Some(words) = self.pacing.words(self.volume) {
            self.pace.end(words, ended, now);
        }
    }

    /// Takes out all operations that must not be started any more.
    pub(super) fn take_late(&mut self) -> Vec<Op> {
        let now = Instant::now();
        let lines = [&mut self.first, &mut self.puts, &mut self.background];
        let late = lines.map(|line| take_if(line, |waiting| is_late(&waiting.op, now)));
        late.into_iter()
            .flatten()
            .map(|waiting| waiting.op)
            .collect()
    }

    /// Takes one operation out, whatever its turn.
    pub(super) fn pop(&mut self) -> Option<Op> {
        let mut lines = [&mut self.first, &mut self.puts, &mut self.background].into_iter();
        Some(lines.find_map(VecDeque::pop_front)?.op)
    }

    /// Takes out all operations.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Op> {
        let lines = [&mut self.first, &mut self.puts, &mut self.background];
        lines
            .into_iter()
            .flat_map(|line| line.drain(..))
            .map(|waiting| waiting.op)
    }
}

/// When the next operation of a line was submitted.
fn since(line: &VecDeque<Waiting>) -> Option<Nanos> {
    line.front().map(|waiting| waiting.since)
}

/// Takes out some elements; the others stay in order.
fn take_if<T>(line: &mut VecDeque<T>, is_taken: impl Fn(&T) -> bool) -> VecDeque<T> {
    if !line.iter().any(&is_taken) {
        return VecDeque::new();
    }
    let (taken, rest) = std::mem::take(line).into_iter().partition(is_taken);
    *line = rest;
    taken
}

impl Traffic {
    /// The part of an operation.
    pub(super) fn of(op: &Op) -> Traffic {
        match (op.purpose, &op.action) {
            (_, Action::Sync) | (Purpose::Record, _) => Traffic::Free,
            (Purpose::Call, Action::Read { buffer, .. }) => Traffic::Read(buffer.len() as u64),
            (Purpose::Call, Action::Write { buffer, .. })
            | (Purpose::Background, Action::Read { buffer, .. } | Action::Write { buffer, .. }) => {
                Traffic::Paced(buffer.len() as u64)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mailbox::Mailbox;
    use crate::{Buffer, Piece};

    const BYTES: usize = 1 << 20;
    const BEGIN: Nanos = 1_000_000 * MS;

    fn op(tag: u64, purpose: Purpose, action: fn(Buffer) -> Action) -> Op {
        let piece = Piece {
            ptr: std::ptr::without_provenance_mut(4096),
            len: BYTES,
        };
        Op {
            volume: 0,
            action: action(Buffer::Borrowed(vec![piece])),
            purpose,
            deadline: None,
            tag,
            sink: Arc::new(Mailbox::default()),
        }
    }

    fn read(buffer: Buffer) -> Action {
        Action::Read { offset: 0, buffer }
    }

    fn write(buffer: Buffer) -> Action {
        Action::Write { offset: 0, buffer }
    }

    fn sync(_: Buffer) -> Action {
        Action::Sync
    }

    /// The tags of the operations that may start now, in order. None of them ends.
    fn started(queue: &mut Queue, now: Nanos) -> Vec<u64> {
        let mut tags = Vec::new();
        while let Next::Start(op) = queue.next(now) {
            tags.push(op.tag);
        }
        tags
    }

    #[test]
    fn reads_records_and_syncs_come_before_puts_and_these_before_the_background() {
        let mut queue = Queue::new(0, Arc::default());
        let ops = vec![
            op(0, Purpose::Background, write),
            op(1, Purpose::Background, read),
            op(2, Purpose::Call, write),
            op(3, Purpose::Call, write),
            op(4, Purpose::Call, read),
            op(5, Purpose::Background, sync),
            op(6, Purpose::Record, write),
        ];
        queue.extend(ops, BEGIN);
        assert_eq!(started(&mut queue, BEGIN), [4, 5, 6, 2, 3, 0, 1]);
        assert!(queue.is_empty());
    }

    #[test]
    fn a_write_that_may_start_comes_before_reads_submitted_later() {
        let mut queue = Queue::new(0, Arc::default());
        queue.extend(vec![op(0, Purpose::Call, read)], BEGIN);
        queue.extend(vec![op(1, Purpose::Call, write)], BEGIN + 1);
        queue.extend(vec![op(2, Purpose::Call, read)], BEGIN + 1);
        queue.extend(vec![op(3, Purpose::Background, write)], BEGIN + 2);
        queue.extend(vec![op(4, Purpose::Call, read)], BEGIN + 3);
        assert_eq!(started(&mut queue, BEGIN + 3), [0, 2, 1, 3, 4]);
    }

    #[test]
    fn reads_that_fill_the_depth_do_not_starve_writes() {
        let mut queue = Queue::new(0, Arc::new(Pacing::create()));
        let reads = (0..20).map(|tag| op(tag, Purpose::Call, read));
        queue.extend(reads.collect(), BEGIN);
        let writes = (100..110).map(|tag| op(tag, Purpose::Call, write));
        queue.extend(writes.collect(), BEGIN + 1);
        // One operation ends at each millisecond, and its reader submits another read.
        let mut written = 0;
        for passed in 1..1500 {
            let now = BEGIN + passed * MS;
            queue.extend(vec![op(50, Purpose::Call, read)], now);
            let Next::Start(op) = queue.next(now) else {
                panic!("there are reads in the queue");
            };
            let mut ended = Ended::default();
            ended.add(Traffic::of(&op));
            queue.end(ended, now);
            written += u32::from((100..110).contains(&op.tag));
        }
        assert_eq!(written, 10);
    }

    #[test]
    fn reads_pass_the_writes_that_are_held_back() {
        let mut queue = Queue::new(0, Arc::new(Pacing::create()));
        let writes = (0..20).map(|tag| op(tag, Purpose::Call, write));
        queue.extend(vec![op(100, Purpose::Call, read)], BEGIN);
        queue.extend(writes.collect(), BEGIN);
        queue.extend(vec![op(101, Purpose::Call, read)], BEGIN + 1);
        let tags = started(&mut queue, BEGIN + 1);
        assert_eq!((tags.first(), tags.last()), (Some(&100), Some(&101)));
        assert!(tags.len() < 22 && !queue.is_empty(), "{tags:?}");
    }

    #[test]
    fn the_background_is_passed_by_puts_for_a_limited_time() {
        let mut queue = Queue::new(0, Arc::default());
        queue.extend(vec![op(0, Purpose::Background, write)], BEGIN);
        queue.extend(vec![op(1, Purpose::Call, write)], BEGIN + STEP_BACK);
        queue.extend(vec![op(2, Purpose::Call, write)], BEGIN + STEP_BACK + 1);
        assert_eq!(started(&mut queue, BEGIN + STEP_BACK + 1), [1, 0, 2]);
    }

    #[test]
    fn reads_of_calls_hold_writes_back_and_reads_in_the_background_do_not() {
        for (purpose, is_held) in [(Purpose::Call, true), (Purpose::Background, false)] {
            let mut queue = Queue::new(0, Arc::new(Pacing::create()));
            queue.extend(vec![op(0, purpose, read)], BEGIN);
            assert_eq!(started(&mut queue, BEGIN), [0]);
            let writes = (1..=6).map(|tag| op(tag, Purpose::Call, write));
            queue.extend(writes.collect(), BEGIN);
            let count = started(&mut queue, BEGIN).len();
            assert_eq!(count < 6, is_held, "{count} writes beside {purpose:?}");
            assert_eq!(queue.is_empty(), !is_held);
        }
    }

    #[test]
    fn operations_past_their_deadline_are_taken_out_of_every_line() {
        let mut queue = Queue::new(0, Arc::default());
        let late = Instant::now();
        let ops = [read, write, read].into_iter().zip([
            Purpose::Call,
            Purpose::Call,
            Purpose::Background,
        ]);
        let ops = ops.zip(0..).flat_map(|((action, purpose), tag)| {
            let late = Op {
                deadline: Some(late),
                ..op(tag, purpose, action)
            };
            [late, op(tag + 10, purpose, action)]
        });
        queue.extend(ops.collect(), BEGIN);
        let tags: Vec<u64> = queue.take_late().iter().map(|op| op.tag).collect();
        assert_eq!(tags, [0, 1, 2]);
        assert_eq!(started(&mut queue, BEGIN), [10, 11, 12]);
    }
}

//! How the volumes answer, over all processes that use a store.
//!
//! A process has a row of the board: when it was last alive, and the start of its oldest operation
//! in the kernel for each volume. All processes count the reads and writes that end, by their time.
//! The owner reads the board.
//!
//! A stopped process leaves its row as it is. Its operations prove nothing once it has not said for
//! [`ALIVE`] that it is alive: the kernel may have ended them.
//!
//! Owns: the rows, and the operations of this process that are in the kernel. All words are hints.
//! A process that forges them makes a volume look slow or hung at worst.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use larder_base::runtime::Mutex;
use larder_base::system::processes::monotonic_nanoseconds as now;
use larder_format::VOLUMES_MAX;

use super::common::{BOUNDS_MS, BoardWords, Classes, Common, Row};
use super::pace::{MS, Nanos};

/// Time between two beats of a process.
pub const BEAT: Duration = Duration::from_secs(1);

/// How long after its last beat a process counts as alive.
pub const ALIVE: Duration = Duration::from_secs(3);

/// See the module. Without memory nothing is measured.
#[derive(Debug, Default)]
pub struct Board {
    common: Option<Arc<Common>>,
    row: Option<usize>,
    /// The starts of the operations in the kernel, by volume, in order.
    starts: [Mutex<Vec<Nanos>>; VOLUMES_MAX],
}

/// The answers of one volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answers {
    /// The age of the oldest operation that is in the kernel, over all processes that are alive.
    pub oldest: Option<Duration>,
    /// Reads and writes that have ended since the owner opened the store. The counts wrap.
    pub ended: Classes,
}

impl Board {
    /// The board in this memory, with a row for the process with this number, which is not zero.
    #[must_use]
    pub fn new(common: Arc<Common>, process: u64) -> Board {
        let rows = common.content().map(|content| &content.board.rows);
        let free = |row: &Row| {
            let taken = row.process.compare_exchange(0, process, Relaxed, Relaxed);
            taken.is_ok()
        };
        let row = rows.and_then(|rows| rows.iter().position(free));
        let board = Board {
            common: Some(common),
            row,
            starts: Default::default(),
        };
        board.beat();
        board
    }

    /// An operation on a volume goes to the kernel. Returns its start, for [`Board::end`].
    pub(super) fn begin(&self, volume: usize) -> Nanos {
        let at = now();
        if let Some(starts) = self.starts.get(volume).filter(|_| self.row.is_some()) {
            let mut starts = starts.lock();
            let place = starts.partition_point(|start| *start <= at);
            starts.insert(place, at);
            self.publish(volume, &starts);
        }
        at
    }

    /// An operation that began at `start` has ended. `took` is the time of a read or a write.
    pub(super) fn end(&self, volume: usize, start: Nanos, took: Option<Nanos>) {
        if let Some(starts) = self.starts.get(volume).filter(|_| self.row.is_some()) {
            let mut starts = starts.lock();
            if let Ok(place) = starts.binary_search(&start) {
                starts.remove(place);
            }
            self.publish(volume, &starts);
        }
        let ended = self.words().and_then(|words| words.ended.get(volume));
        if let (Some(ended), Some(took)) = (ended, took) {
            ended.0[class_of(took / MS)].fetch_add(1, Relaxed);
        }
    }

    /// Whether anything is measured.
    #[must_use]
    pub fn is_measured(&self) -> bool {
        self.common.is_some()
    }

    /// The memory, to be passed to another process; `None` if it is this process's own.
    #[must_use]
    pub fn share(&self) -> Option<BorrowedFd<'_>> {
        self.common.as_ref()?.share()
    }

    /// This process is alive.
    pub fn beat(&self) {
        if let Some(row) = self.row() {
            row.beat_at.store(now(), Relaxed);
        }
    }

    /// The process with this number has gone.
    pub fn leave(&self, process: u64) {
        let rows = self.words().into_iter().flat_map(|words| &words.rows);
        for row in rows.filter(|row| row.process.load(Relaxed) == process) {
            row.oldest
                .iter()
                .for_each(|oldest| oldest.store(0, Relaxed));
            row.process.store(0, Relaxed);
        }
    }

    /// The answers of a volume; `None` if nothing is measured.
    #[must_use]
    pub fn look(&self, volume: usize) -> Option<Answers> {
        let words = self.words()?;
        let ended = words.ended.get(volume)?;
        let now = now();
        let oldest = words.rows.iter().filter_map(|row| row.oldest(volume, now));
        let mut answers = Answers {
            oldest: oldest.max(),
            ended: Classes::default(),
        };
        for (count, words) in answers.ended.iter_mut().zip(&ended.0) {
            *count = words.load(Relaxed);
        }
        Some(answers)
    }

    /// Whether the process with this number is alive, and the age of its oldest operation.
    #[must_use]
    pub fn oldest_of(&self, process: u64) -> Option<Duration> {
        let now = now();
        let mut rows = self.words()?.rows.iter();
        let row = rows.find(|row| row.process.load(Relaxed) == process)?;
        (0..VOLUMES_MAX)
            .filter_map(|volume| row.oldest(volume, now))
            .max()
    }

    /// Time since the process with this number was last alive.
    #[must_use]
    pub fn silence_of(&self, process: u64) -> Option<Duration> {
        let mut rows = self.words()?.rows.iter();
        let row = rows.find(|row| row.process.load(Relaxed) == process)?;
        Some(row.silence(now()))
    }

    fn publish(&self, volume: usize, starts: &[Nanos]) {
        if let Some(row) = self.row() {
            let oldest = starts.first().copied().unwrap_or(0);
            row.oldest[volume].store(oldest, Relaxed);
        }
    }

    fn words(&self) -> Option<&BoardWords> {
        Some(&self.common.as_ref()?.content()?.board)
    }

    fn row(&self) -> Option<&Row> {
        self.words()?.rows.get(self.row?)
    }
}

impl Row {
    fn silence(&self, now: Nanos) -> Duration {
        Duration::from_nanos(now.saturating_sub(self.beat_at.load(Relaxed)))
    }

    /// The age of the oldest operation of a process that is alive.
    fn oldest(&self, volume: usize, now: Nanos) -> Option<Duration> {
        let is_alive = self.process.load(Relaxed) != 0 && self.silence(now) < ALIVE;
        let start = self.oldest[volume].load(Relaxed);
        (is_alive && start != 0).then(|| Duration::from_nanos(now.saturating_sub(start)))
    }
}

/// The class of a time in milliseconds.
fn class_of(ms: u64) -> usize {
    BOUNDS_MS.partition_point(|bound| *bound <= ms)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::common::ROWS;
    use super::*;

    #[test]
    fn the_oldest_operation_of_all_processes_shows_until_it_ends() {
        let common = Arc::new(Common::local(String::new()));
        let (owner, client) = (Board::new(common.clone(), 1), Board::new(common, 2));
        assert_eq!(owner.look(0), Some(Answers::default()));
        let first = client.begin(0);
        let second = owner.begin(0);
        let of_second = owner.oldest_of(1).unwrap();
        assert!(owner.look(0).unwrap().oldest.unwrap() >= of_second);
        assert_eq!(owner.look(1), Some(Answers::default()));
        client.end(0, first, Some(MS));
        assert_eq!(owner.oldest_of(2), None);
        assert!(owner.look(0).unwrap().oldest.is_some());
        owner.end(0, second, Some(MS));
        let seen = owner.look(0).unwrap();
        assert_eq!((seen.oldest, seen.ended.iter().sum::<u32>()), (None, 2));
    }

    #[test]
    fn a_process_that_has_gone_and_one_that_is_stopped_leave_no_operation() {
        let common = Arc::new(Common::local(String::new()));
        let (owner, client) = (Board::new(common.clone(), 1), Board::new(common, 2));
        client.begin(3);
        let row = client.row().unwrap();
        let beat_at = row.beat_at.load(Relaxed);
        row.beat_at.store(0, Relaxed);
        assert_eq!(owner.look(3).unwrap().oldest, None);
        row.beat_at.store(beat_at, Relaxed);
        assert!(owner.look(3).unwrap().oldest.is_some());
        owner.leave(2);
        assert_eq!(owner.look(3).unwrap().oldest, None);
        assert_eq!(owner.oldest_of(2), None);
    }

    #[test]
    fn a_process_without_a_row_counts_its_operations() {
        let common = Arc::new(Common::local(String::new()));
        let rows: Vec<Board> = (1..=ROWS as u64)
            .map(|process| Board::new(common.clone(), process))
            .collect();
        let further = Board::new(common, 99);
        let start = further.begin(0);
        assert_eq!(rows[0].look(0).unwrap().oldest, None);
        further.end(0, start, Some(MS));
        assert_eq!(rows[0].look(0).unwrap().ended[0], 1);
    }

    #[test]
    fn times_fall_into_the_class_of_their_bound() {
        assert_eq!(
            [0, 9, 10, 499, 500, 20_000].map(class_of),
            [0, 0, 1, 5, 6, 11]
        );
    }
}

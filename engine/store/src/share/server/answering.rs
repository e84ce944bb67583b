//! How the volumes answer: the state of each, once a second, from the board of all processes.
//!
//! - *hung*: an operation of a process that is alive is in the kernel for longer than [`HUNG`];
//! - *slow*: more than 1 % of the reads and writes of the last ten seconds, and more than one of
//!   them, took longer than [`SLOW`];
//! - *answering*: neither.
//!
//! The owner reads a block of each volume once a second (`soundness`), so that a volume without use
//! has a state too. No look here touches a volume.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Duration;

use larder_base::runtime::Mutex;
use larder_base::seldom::Seldom;
use larder_base::system::devices;
use larder_base::system::files::{self, FileId};
use larder_disk::{BOUNDS_MS, Board, Classes, VolumeAnswers};

use crate::share::wire::{AnsweringVolume, VolumeState};
use crate::store::LocalStore;
use crate::volume::Volumes;

/// Longest time of an operation on a volume that is not hung.
const HUNG: Duration = Duration::from_secs(5);

/// Longest usual time of a read or a write on a volume that is not slow. It is a bound of a class.
const SLOW: Duration = Duration::from_millis(500);

/// Looks that the state of a volume depends on, one a second.
const LOOKS: usize = 10;

/// See the module.
pub(super) struct Answering {
    volumes: Mutex<Vec<Volume>>,
    /// Limits the log lines.
    changes: Seldom,
}

/// The last looks at one volume.
struct Volume {
    /// In the store's list.
    index: usize,
    path: PathBuf,
    /// Its file when it was opened; `None` if it is not known.
    file: Option<FileId>,
    /// The operations that had ended at each look, the oldest first.
    ended: VecDeque<Classes>,
    state: VolumeState,
    oldest: Option<Duration>,
}

impl Answering {
    pub(super) fn of(volumes: &Volumes) -> Answering {
        let volume = |(index, volume): (usize, &crate::volume::Volume)| Volume {
            index,
            path: volume.path.clone(),
            file: files::identify(&volume.file).ok().map(|(file, _)| file),
            ended: VecDeque::new(),
            state: VolumeState::default(),
            oldest: None,
        };
        Answering {
            volumes: Mutex::new(volumes.present().map(volume).collect()),
            changes: Seldom::default(),
        }
    }

    /// Looks at each volume. To be called once a second.
    pub(super) fn look(&self, store: &LocalStore) {
        let board = &store.data.board;
        board.beat();
        for volume in &mut *self.volumes.lock() {
            let Some(answers) = board.look(volume.index) else {
                continue;
            };
            let was = volume.state;
            volume.take(&answers);
            if volume.state != was {
                self.log(volume);
            }
        }
    }

    /// Its volumes, at the last look. None is listed where nothing is measured.
    pub(super) fn report(&self, board: &Board) -> Vec<AnsweringVolume> {
        let volumes = self.volumes.lock();
        let measured = volumes.iter().filter(|_| board.is_measured());
        measured.map(Volume::report).collect()
    }

    fn log(&self, volume: &Volume) {
        let path = volume.path.display();
        if volume.state == VolumeState::Answering {
            tracing::info!(%path, "the volume answers in time again");
            return;
        }
        let Some(more) = self.changes.is_due() else {
            return;
        };
        tracing::warn!(
            %path,
            device = volume.device(),
            state = volume.state.as_str(),
            oldest_operation_s = volume.oldest.unwrap_or_default().as_secs(),
            p99_ms = volume.p99().as_millis(),
            more,
            "a volume answers late, or not at all; look for errors of the device in the kernel's \
             log (dmesg), and for limits on its I/O (logged once a minute)"
        );
    }
}

impl Volume {
    fn take(&mut self, answers: &VolumeAnswers) {
        self.ended.push_back(answers.ended);
        if self.ended.len() > LOOKS + 1 {
            self.ended.pop_front();
        }
        self.oldest = answers.oldest;
        let (slow, all) = self.slow();
        self.state = if self.oldest.is_some_and(|age| age > HUNG) {
            VolumeState::Hung
        } else if slow > 1 && slow * 100 > all {
            VolumeState::Slow
        } else {
            VolumeState::Answering
        };
    }

    /// The operations within the last looks, by class.
    fn recent(&self) -> [u64; BOUNDS_MS.len() + 1] {
        let ends = self.ended.front().zip(self.ended.back());
        let of = |class: usize| {
            ends.map_or(0, |(first, last)| {
                u64::from(last[class].wrapping_sub(first[class]))
            })
        };
        std::array::from_fn(of)
    }

    /// The slow operations within the last looks, and all of them.
    fn slow(&self) -> (u64, u64) {
        let recent = self.recent();
        let is_slow =
            |class: usize| class > 0 && u128::from(BOUNDS_MS[class - 1]) >= SLOW.as_millis();
        let slow = (0..recent.len()).filter(|class| is_slow(*class));
        (slow.map(|class| recent[class]).sum(), recent.iter().sum())
    }

    /// The bound below which 99 % of the operations within the last looks are; the highest bound
    /// for longer ones. Zero without operations.
    fn p99(&self) -> Duration {
        let recent = self.recent();
        let all: u64 = recent.iter().sum();
        if all == 0 {
            return Duration::ZERO;
        }
        let mut below = 0;
        let bound = recent.iter().zip(BOUNDS_MS).find(|(count, _)| {
            below += *count;
            below * 100 >= all * 99
        });
        let highest = BOUNDS_MS[BOUNDS_MS.len() - 1];
        Duration::from_millis(bound.map_or(highest, |(_, bound)| bound))
    }

    /// The device below it, found without a call of its file system.
    fn device(&self) -> String {
        let number = self.file.and_then(FileId::device);
        number.and_then(devices::below).unwrap_or_default()
    }

    fn report(&self) -> AnsweringVolume {
        AnsweringVolume {
            path: self.path.clone(),
            device: self.device(),
            state: self.state,
            oldest_seconds: self.oldest.map_or(0.0, |age| age.as_secs_f64()),
            p99_seconds: self.p99().as_secs_f64(),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn volume() -> Volume {
        Volume {
            index: 0,
            path: PathBuf::new(),
            file: None,
            ended: VecDeque::new(),
            state: VolumeState::default(),
            oldest: None,
        }
    }

    fn answers(ended: Classes, oldest: u64) -> VolumeAnswers {
        VolumeAnswers {
            oldest: (oldest > 0).then(|| Duration::from_secs(oldest)),
            ended,
        }
    }

    #[test]
    fn one_slow_operation_makes_no_slow_volume_and_two_of_a_hundred_do() {
        let mut volume = volume();
        let mut ended = Classes::default();
        volume.take(&answers(ended, 0));
        assert_eq!(
            (volume.state, volume.p99()),
            (VolumeState::Answering, Duration::ZERO)
        );
        ended[6] += 1;
        volume.take(&answers(ended, 0));
        assert_eq!(volume.state, VolumeState::Answering);
        ended[0] += 98;
        ended[6] += 1;
        volume.take(&answers(ended, 0));
        assert_eq!(volume.state, VolumeState::Slow);
        assert_eq!(volume.p99(), Duration::from_secs(1));
        ended[0] += 200;
        volume.take(&answers(ended, 0));
        assert_eq!(volume.state, VolumeState::Answering);
        assert_eq!(volume.p99(), Duration::from_millis(10));
    }

    #[test]
    fn what_was_slow_is_forgotten_after_ten_looks() {
        let mut volume = volume();
        let mut ended = Classes::default();
        volume.take(&answers(ended, 0));
        ended[11] = 5;
        for _ in 0..LOOKS {
            volume.take(&answers(ended, 0));
            assert_eq!(volume.state, VolumeState::Slow);
        }
        volume.take(&answers(ended, 0));
        assert_eq!(volume.state, VolumeState::Answering);
    }

    #[test]
    fn an_operation_that_does_not_end_makes_a_hung_volume() {
        let mut volume = volume();
        volume.take(&answers(Classes::default(), 5));
        assert_eq!(volume.state, VolumeState::Answering);
        volume.take(&answers(Classes::default(), 6));
        assert_eq!(volume.state, VolumeState::Hung);
        volume.take(&answers(Classes::default(), 0));
        assert_eq!(volume.state, VolumeState::Answering);
    }
}

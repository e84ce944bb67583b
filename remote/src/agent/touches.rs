//! The runs whose use is to be marked in the remote, so that `prune` keeps them.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use larder_base::runtime::Instant;

use crate::run::{RunId, RunName};

/// Least time between two marks of a run.
const AGE: Duration = Duration::from_hours(24);

/// Most runs that are remembered. The use of others is not marked.
const NOTED_MAX: usize = 1 << 16;

/// See the module.
#[derive(Default)]
pub(super) struct Touches {
    waiting: VecDeque<RunName>,
    noted: HashSet<RunId>,
    /// With the moment of the note, in its order.
    order: VecDeque<(Instant, RunId)>,
}

impl Touches {
    /// A run is used. Returns whether its mark is to be made.
    pub(super) fn note(&mut self, run: RunName, now: Instant) -> bool {
        let is_new = self.note_made(&run, now);
        if is_new {
            self.waiting.push_back(run);
        }
        is_new
    }

    /// The object or the mark of a run is new. Returns whether it is noted now.
    pub(super) fn note_made(&mut self, run: &RunName, now: Instant) -> bool {
        while let Some((at, oldest)) = self.order.front()
            && now >= *at + AGE
        {
            self.noted.remove(oldest);
            self.order.pop_front();
        }
        let id = run.id();
        let is_new = self.order.len() < NOTED_MAX && self.noted.insert(id);
        if is_new {
            self.order.push_back((now, id));
        }
        is_new
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn next(&mut self) -> Option<RunName> {
        self.waiting.pop_front()
    }

    pub(super) fn clear(&mut self) {
        *self = Touches::default();
    }
}

#[cfg(test)]
mod tests {
    use larder_format::{Fingerprint, PageKey};

    use super::*;

    fn run(at: usize) -> RunName {
        let mut last = [0; 32];
        last[..8].copy_from_slice(&at.to_le_bytes());
        RunName {
            namespace: Fingerprint::from_bytes([1; 16]),
            last: PageKey::from_bytes(last),
        }
    }

    #[test]
    fn the_use_of_a_run_is_marked_once_a_day() {
        let (mut touches, now) = (Touches::default(), Instant::now());
        assert!(touches.note(run(1), now) && !touches.note(run(1), now + AGE / 2));
        assert!(touches.note_made(&run(2), now) && !touches.note(run(2), now + AGE / 2));
        assert_eq!((touches.next(), touches.next()), (Some(run(1)), None));
        assert!(touches.note(run(1), now + AGE) && touches.note(run(2), now + AGE));
    }

    #[test]
    fn so_many_runs_are_remembered() {
        let (mut touches, now) = (Touches::default(), Instant::now());
        assert!((0..NOTED_MAX).all(|at| touches.note(run(at), now)));
        assert!(!touches.note(run(NOTED_MAX), now));
        assert!(touches.note(run(NOTED_MAX), now + AGE));
    }
}

//! Commits that something holds back, each as often as something does.

use std::collections::BTreeMap;

use larder_format::Serial;

#[derive(Debug, Default)]
pub(super) struct Holds(BTreeMap<Serial, usize>);

impl Holds {
    pub(super) fn hold(&mut self, commit: Serial) {
        *self.0.entry(commit).or_default() += 1;
    }

    pub(super) fn let_go(&mut self, commit: Serial) {
        if let Some(times) = self.0.get_mut(&commit) {
            *times -= 1;
            if *times == 0 {
                self.0.remove(&commit);
            }
        }
    }

    /// How many commits.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn lowest(&self) -> Option<Serial> {
        self.0.first_key_value().map(|(commit, _)| *commit)
    }
}

//! Commits that are held back, each with the number of holds on it.

use std::collections::BTreeMap;

use larder_format::Serial;

#[derive(Debug, Default)]
pub(in crate::core) struct Holds(BTreeMap<Serial, usize>);

impl Holds {
    pub(in crate::core) fn hold(&mut self, commit: Serial) {
        *self.0.entry(commit).or_default() += 1;
    }

    pub(in crate::core) fn let_go(&mut self, commit: Serial) {
        if let Some(times) = self.0.get_mut(&commit) {
            *times -= 1;
            if *times == 0 {
                self.0.remove(&commit);
            }
        }
    }

    /// How many commits.
    pub(in crate::core) fn len(&self) -> usize {
        self.0.len()
    }

    pub(in crate::core) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(in crate::core) fn lowest(&self) -> Option<Serial> {
        self.0.first_key_value().map(|(commit, _)| *commit)
    }
}

//! Small files beside a store, with the interface of the engine's `sidecar`.
//!
//! A file is replaced at once, and never synced: after a power loss it has any content that it ever
//! had, a part of it, or none.

use std::io;
use std::path::{Path, PathBuf};

use crate::kernel::{Kernel, with};

/// Contents kept of each file.
const KEPT: usize = 6;

/// See the module.
#[derive(Debug)]
pub struct Sidecar {
    path: PathBuf,
}

impl Sidecar {
    /// The file of a store with this suffix; `None` without that store.
    #[must_use]
    pub fn beside(volume: &Path, suffix: &str, _length_max: usize) -> Option<Sidecar> {
        let mut path = volume.as_os_str().to_owned();
        path.push(suffix);
        let is_there = with(|kernel| kernel.names.contains_key(volume));
        is_there.then(|| Sidecar { path: path.into() })
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The content. `None` without such a file.
    ///
    /// # Errors
    /// None.
    pub fn read(&self) -> io::Result<Option<Vec<u8>>> {
        with(|kernel| {
            Ok(kernel
                .sides
                .get(&self.path)
                .and_then(|kept| kept.last().cloned()))
        })
    }

    /// Replaces the content.
    ///
    /// # Errors
    /// None.
    pub fn replace(&self, content: &[u8]) -> io::Result<()> {
        with(|kernel| {
            let kept = kernel.sides.entry(self.path.clone()).or_default();
            if kept.len() == KEPT {
                kept.remove(1);
            }
            kept.push(content.to_owned());
        });
        Ok(())
    }
}

impl Kernel {
    /// The power fails.
    pub(crate) fn lose_sides(&mut self) {
        for kept in self.sides.values_mut() {
            if self.dice.chance(0.4) {
                continue;
            }
            let mut content = match kept.is_empty() {
                true => continue,
                false => kept.swap_remove(self.dice.below(kept.len())),
            };
            if self.dice.chance(0.5) && !content.is_empty() {
                let at = self.dice.below(content.len());
                match self.dice.below(4) {
                    0 => content.truncate(at),
                    1 => content[at..].fill(0),
                    2 => content[at] ^= 1 << self.dice.below(8),
                    _ => {
                        kept.clear();
                        continue;
                    }
                }
            }
            kept.push(content);
        }
    }
}

//! The facts of a check, and the lines in which a process that makes checks says them to its
//! parent.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use larder_disk::probe::Fact;
use serde::{Deserialize, Serialize};

/// A line of a process that makes checks.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Said {
    /// The file that is examined from here on.
    Examines(String),
    Found(Fact),
    /// Checks are left out, for a volume that does not answer.
    LeavesOut,
    /// The failure that ended the checks.
    Failed(String),
}

impl Said {
    /// Says it to the parent, which may have given up.
    pub(super) fn say(&self) {
        if let Ok(line) = serde_json::to_string(self) {
            let _ = writeln!(io::stdout(), "{line}");
        }
    }
}

/// The facts so far.
#[derive(Default)]
pub(super) struct Facts {
    pub(super) list: Vec<Fact>,
    /// Each is said to the parent of this process instead.
    pub(super) are_said: bool,
    /// The volume that they are about, of several.
    pub(super) of: Option<PathBuf>,
    /// The devices that were examined.
    pub(super) devices: Vec<u64>,
}

impl Facts {
    pub(super) fn push(&mut self, mut fact: Fact) {
        if let Some(volume) = &self.of {
            fact.what = format!("{}: {}", volume.display(), fact.what);
        }
        match self.are_said {
            true => Said::Found(fact).say(),
            false => self.list.push(fact),
        }
    }

    /// From here on this file is examined: it may hang.
    pub(super) fn examine(&self, path: &Path) {
        if self.are_said {
            Said::Examines(path.display().to_string()).say();
        }
    }

    /// From here on checks are left out.
    pub(super) fn leave_out(&self) {
        if self.are_said {
            Said::LeavesOut.say();
        }
    }
}

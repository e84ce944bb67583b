//! Parts that the reports of several commands have.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::left_out::LeftOut;
use super::place::PlaceArgs;
use crate::report::{Lines, count};
use crate::size::ByteSize;

/// The reports of `push` and `pull` begin with the same fields.
#[derive(Default, Serialize)]
pub struct Between {
    #[serde(serialize_with = "crate::report::paths")]
    pub path: PathBuf,
    pub remote: String,
    pub present_runs: u64,
    pub unreadable: LeftOut,
    pub interrupted: bool,
}

impl Between {
    pub fn new(path: &Path, place: &PlaceArgs) -> Between {
        Between {
            path: path.to_owned(),
            remote: place.url.clone(),
            ..Between::default()
        }
    }

    pub fn last_lines(&self, lines: &mut Lines) {
        self.unreadable.lines(lines);
        if self.interrupted {
            lines.text("Interrupted: run it again for the rest.");
        }
    }
}

/// `3 runs, 96 MiB`.
pub fn size_of_runs(runs: u64, bytes: u64) -> String {
    format!("{}, {}", count(runs, "run"), ByteSize(bytes))
}

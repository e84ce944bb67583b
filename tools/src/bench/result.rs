//! The result of a measurement, as text and JSON.

use std::path::PathBuf;

use serde::Serialize;

use super::Op;
use crate::disk::DiskFacts;
use crate::report::{Lines, Report, rows};
use crate::size::ByteSize;
use crate::usage;

/// The result of a measurement.
#[derive(Serialize)]
pub(super) struct BenchReport {
    /// The store: its first volume.
    #[serde(serialize_with = "crate::report::paths")]
    pub(super) path: PathBuf,
    /// `put`, `get` or `exists`.
    pub(super) op: Op,
    /// Bytes of a page, all parts together.
    pub(super) page_bytes: u64,
    /// Parts of a page.
    pub(super) parts: u32,
    /// Pages (for `exists`: keys) requested in all timed calls.
    pub(super) pages_requested: u64,
    /// Pages (keys) of a call.
    pub(super) batch: u64,
    /// Operations with the kernel at once, per volume.
    pub(super) depth: u32,
    /// The disk that moved the bytes, and the reason for its choice.
    #[serde(flatten)]
    pub(super) disk: DiskFacts,
    /// Size of the memory pages behind the buffers.
    pub(super) memory_page_bytes: u64,
    /// Time of the store's calls.
    pub(super) seconds: f64,
    /// Page bytes moved per second of that time; 0 for `exists`.
    pub(super) bytes_per_second: f64,
    /// Pages (keys) a second.
    pub(super) pages_per_second: f64,
    /// Median and 99th percentile of the calls, in microseconds.
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    /// CPU time of the whole process during the calls.
    pub(super) cpu_seconds: f64,
    /// The same for each GiB of pages moved; 0 for `exists`.
    pub(super) cpu_seconds_per_gib: f64,
    /// Time of the flush after the last put. `seconds` does not include it.
    pub(super) flush_seconds: f64,
    #[serde(flatten)]
    pub(super) counts: Counts,
    /// The reason why the first unstored page was not stored, and the remedy.
    pub(super) unstored_reason: Option<String>,
    /// Whether the operator ended it early.
    pub(super) interrupted: bool,
}

/// The outcome for the pages.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Counts {
    /// Pages that were compared and right: all pages of `get`; of `put` the last batch, read back;
    /// confirmed keys of `exists`.
    pub(super) verified_pages: u64,
    /// Pages whose bytes were wrong, or keys with a wrong answer. Must be 0.
    pub(super) wrong_pages: u64,
    /// Pages stored by the timed puts.
    pub(super) pages_put: u64,
    /// Pages that the timed puts could not store.
    pub(super) unstored_pages: u64,
    /// Pages that should have been present and were not.
    pub(super) pages_missed: u64,
    /// Pages that the store dropped meanwhile to make room.
    pub(super) evicted_pages: u64,
}

impl Counts {
    pub(super) fn is_bad(&self) -> bool {
        self.wrong_pages + self.pages_missed + self.unstored_pages > 0
    }
}

impl Report for BenchReport {
    const COMMAND: &'static str = "bench";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        let what = match self.op {
            Op::Put => "put",
            Op::Get => "get, random order",
            Op::Exists => "exists, one chain",
        };
        lines.row("Operation", what);
        let (unit, speed, cpu) = if self.op == Op::Exists {
            ("Keys", String::new(), String::new())
        } else {
            let speed = format!("{}, ", usage::rate(self.bytes_per_second));
            (
                "Pages",
                speed,
                format!(", {:.3} s/GiB", self.cpu_seconds_per_gib),
            )
        };
        let (size, parts) = (ByteSize(self.page_bytes), self.parts);
        let (p50, p99) = (self.p50_us, self.p99_us);
        rows! { lines:
            unit => "{}; pages of {size} in {parts} parts", self.pages_requested;
            "Calls of" => "{}; p50 {p50:.0} us, p99 {p99:.0} us", self.batch;
            "Speed" => "{speed}{:.0} {} a second", self.pages_per_second, unit.to_lowercase();
            "CPU" => "{:.3} s{cpu}", self.cpu_seconds;
            "Disk" => "{} at depth {}", self.disk.disk, self.depth;
            "Buffers" => "in memory pages of {}", ByteSize(self.memory_page_bytes);
        }
        let counts = &self.counts;
        rows! { lines:
            "Verified" => "{} right, {} wrong", counts.verified_pages, counts.wrong_pages;
        }
        if counts.pages_missed + counts.unstored_pages > 0 {
            rows! { lines:
                "Not there" => "{} missed, {} not stored",
                    counts.pages_missed, counts.unstored_pages;
            }
        }
        if counts.evicted_pages > 0 {
            rows! { lines:
                "Dropped" => "{} pages, the coldest, to make room", counts.evicted_pages;
            }
        }
        if let Some(reason) = &self.unstored_reason {
            lines.row("Not stored", reason);
        }
        if self.interrupted {
            lines.text("Interrupted: these are the figures up to then.");
        }
        lines
    }
}

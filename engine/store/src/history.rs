//! Counters of a store over the time since its owner opened it, in fixed memory: at most
//! [`ROWS_MAX`] rows of equal length. When they are full, each two of them become one.

use serde::{Deserialize, Serialize};

use crate::totals::Totals;

/// Most rows.
pub const ROWS_MAX: usize = 240;

/// Length of the first rows, in seconds.
const FIRST_SECONDS: f64 = 5.0;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HistoryReport {
    /// Length of a row.
    pub row_seconds: f64,
    /// The oldest one first.
    pub rows: Vec<HistoryRow>,
}

/// Counters of a time, of all processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HistoryRow {
    /// Tokens of requests that were found, and that were not.
    pub found_tokens: u64,
    /// See `found_tokens`.
    pub not_found_tokens: u64,
    /// Pages that lookups asked for and found, and did not find.
    pub found_pages: u64,
    /// See `found_pages`.
    pub not_found_pages: u64,
    /// Bytes read from the devices, and bytes of pages put.
    pub read_bytes: u64,
    /// See `read_bytes`.
    pub put_bytes: u64,
}

/// The history that an owner keeps.
pub(crate) struct History {
    report: HistoryReport,
    /// The counters at the end of the last row, and the seconds since the open then.
    last: HistoryRow,
    end: f64,
}

impl HistoryRow {
    fn of(totals: &Totals) -> HistoryRow {
        let counts = &totals.counts;
        let tokens = totals.spaces.total().tokens;
        HistoryRow {
            found_tokens: tokens.found,
            not_found_tokens: tokens.not_found,
            found_pages: totals.store.found,
            not_found_pages: totals.store.not_found,
            read_bytes: counts.bytes_read,
            put_bytes: counts.bytes_put,
        }
    }

    fn with(self, other: HistoryRow, with: impl Fn(u64, u64) -> u64) -> HistoryRow {
        HistoryRow {
            found_tokens: with(self.found_tokens, other.found_tokens),
            not_found_tokens: with(self.not_found_tokens, other.not_found_tokens),
            found_pages: with(self.found_pages, other.found_pages),
            not_found_pages: with(self.not_found_pages, other.not_found_pages),
            read_bytes: with(self.read_bytes, other.read_bytes),
            put_bytes: with(self.put_bytes, other.put_bytes),
        }
    }
}

impl History {
    /// Counts from the totals of former owners on.
    pub(crate) fn after(former: &Totals) -> History {
        History {
            report: HistoryReport {
                row_seconds: FIRST_SECONDS,
                rows: Vec::new(),
            },
            last: HistoryRow::of(former),
            end: 0.0,
        }
    }

    /// Whether a row ends after so many seconds since the open.
    pub(crate) fn is_due(&self, seconds: f64) -> bool {
        seconds >= self.end + self.report.row_seconds
    }

    /// Ends the rows that are due. Counters of a time without a look are in its first row.
    pub(crate) fn look(&mut self, seconds: f64, totals: &Totals) {
        let now = HistoryRow::of(totals);
        while self.is_due(seconds) {
            let row = now.with(self.last, u64::saturating_sub);
            self.last = now;
            self.end += self.report.row_seconds;
            self.report.rows.push(row);
            if self.report.rows.len() >= ROWS_MAX {
                self.halve();
            }
        }
    }

    fn halve(&mut self) {
        let rows = self.report.rows.chunks(2);
        let halved = rows.map(|pair| {
            let second = pair.get(1).copied().unwrap_or_default();
            pair[0].with(second, u64::saturating_add)
        });
        self.report.rows = halved.collect();
        self.report.row_seconds *= 2.0;
    }

    pub(crate) fn report(&self) -> HistoryReport {
        self.report.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(bytes: u64) -> Totals {
        let mut totals = Totals::default();
        totals.counts.bytes_read = bytes;
        totals
    }

    #[test]
    fn rows_cover_all_of_the_time_and_all_of_the_counters() {
        let mut history = History::after(&totals(7));
        for second in 0..100_000_u64 {
            if history.is_due(second as f64) {
                history.look(second as f64, &totals(7 + second));
            }
        }
        let report = history.report();
        assert!(report.rows.len() < ROWS_MAX && report.rows.len() >= ROWS_MAX / 2 - 1);
        let seconds = report.row_seconds * report.rows.len() as f64;
        assert!(
            seconds <= 100_000.0 && seconds > 100_000.0 - report.row_seconds,
            "{seconds}"
        );
        let bytes: u64 = report.rows.iter().map(|row| row.read_bytes).sum();
        assert_eq!(bytes as f64, seconds);
        let equal = report
            .rows
            .iter()
            .all(|row| row.read_bytes as f64 == report.row_seconds);
        assert!(equal, "{report:?}");
    }

    #[test]
    fn a_time_without_looks_has_its_counters_in_one_row() {
        let mut history = History::after(&Totals::default());
        history.look(21.0, &totals(8));
        let rows = history.report().rows;
        assert_eq!(
            rows.iter().map(|row| row.read_bytes).collect::<Vec<_>>(),
            [8, 0, 0, 0]
        );
    }
}

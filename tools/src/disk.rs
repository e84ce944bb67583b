//! The disk that moves a store's bytes, as documents state it: the disk in one word, and the reason
//! in a sentence.
//!
//! The engine gives both in one line, which is printed for people.

use std::fmt;

use serde::Serialize;

/// A disk and the reason for its choice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DiskFacts {
    /// `uring` or `threads`.
    pub disk: String,
    /// The reason for its choice.
    pub disk_reason: String,
}

impl DiskFacts {
    /// Parses the engine's line.
    #[must_use]
    pub fn of(line: &str) -> DiskFacts {
        let (disk, reason) = line.split_once(": ").unwrap_or((line, ""));
        DiskFacts {
            disk: disk.to_owned(),
            disk_reason: reason.to_owned(),
        }
    }
}

impl fmt::Display for DiskFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.disk)?;
        if self.disk_reason.is_empty() {
            return Ok(());
        }
        write!(f, ": {}", self.disk_reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_told_in_two_fields_and_shown_as_it_was() {
        let line = "threads: io_uring: refused by seccomp";
        let facts = DiskFacts::of(line);
        assert_eq!(
            (facts.disk.as_str(), facts.disk_reason.as_str()),
            ("threads", "io_uring: refused by seccomp")
        );
        assert_eq!(facts.to_string(), line);
        assert_eq!(DiskFacts::of("threads").to_string(), "threads");
    }
}

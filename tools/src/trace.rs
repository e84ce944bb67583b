//! Reads Mooncake request traces: one JSON object a line. Only `hash_ids` is required in it.
//!
//! A recording of `larder record --requests` has a few fields more. Its text may be compressed by
//! zstd, as that of any trace.
//!
//! A hash id stands for a whole prefix of 512-token blocks up to and including its own. The trace
//! is read as a stream, one line in memory at a time. Defends against input that is not a trace:
//! lines have a length limit, and every error names the file, the line and the remedy. Blank lines
//! are skipped. When the operator asks for an end, a trace from a pipe ends at the next wait for
//! input. Timestamps and lengths are not interpreted.

use std::io::{self, BufRead, BufReader, Read};
use std::iter::Peekable;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::failure::Failure;
use crate::interrupt::{self, Input, Interrupt};
use crate::zstd;

/// Tokens of a block, unless a request states them.
pub const BLOCK_TOKENS: u32 = 512;

/// The tier of a trace that `larder record` made.
pub const L3: &str = "l3";

/// Longest line, in bytes; the longest of the published traces has a thousandth of it.
const LINE_BYTES_MAX: u64 = 16 << 20;

/// One request of a trace.
#[derive(Debug, Deserialize, PartialEq)]
pub struct Request {
    /// Its arrival, in milliseconds since some moment.
    pub timestamp: Option<f64>,
    /// Tokens of its input.
    pub input_length: Option<u64>,
    /// Tokens of its output.
    pub output_length: Option<u32>,
    /// Why its answer ended: 1 a tool call, 2 the end of the turn.
    pub stop: Option<u32>,
    /// One id for each block of its input, in order; the last block may be partial.
    pub hash_ids: Vec<u64>,
    /// Tokens of a block.
    pub block_tokens: Option<u32>,
    /// The tier that got the request; none for requests of users.
    pub tier: Option<String>,
    /// The model that was asked, in a recording.
    pub model: Option<String>,
    /// The first block that the tier was asked for, and the block behind the last one.
    asked: Option<(usize, usize)>,
    /// The blocks that are stored after the request, from the first one on.
    stored: Option<usize>,
}

impl Request {
    /// Tokens of a block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens.unwrap_or(BLOCK_TOKENS)
    }

    /// The blocks that the store is asked for: all, unless it is a recorded request.
    pub fn asked(&self) -> Range<usize> {
        let (first, end) = self.asked.unwrap_or((0, self.hash_ids.len()));
        first..end
    }

    /// How many blocks are stored after the request, from the first one on: not fewer than a lookup
    /// found.
    pub fn stored(&self) -> usize {
        self.stored.unwrap_or(self.hash_ids.len())
    }

    /// Whether its blocks are those of its ids.
    fn is_valid(&self) -> bool {
        let Range { start, end } = self.asked();
        start <= end && end.max(self.stored()) <= self.hash_ids.len() && self.block_tokens() > 0
    }
}

/// A line of a trace.
#[derive(Deserialize)]
struct Line {
    /// Of a recording: calls were lost here.
    lost_calls: Option<u64>,
    /// Of a recording without `--requests`.
    call: Option<String>,
}

/// Why a trace could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The system refused.
    #[error("{path}: cannot read the trace: {source}; check the path")]
    Io {
        /// The trace.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A line is longer than any request.
    #[error(
        "{path}, line {line}: longer than {LINE_BYTES_MAX} bytes; a trace has one JSON object a \
         line"
    )]
    TooLong {
        /// The trace.
        path: PathBuf,
        /// Counted from 1.
        line: u64,
    },
    /// A line is not a request.
    #[error(
        "{path}, line {line}: not a request ({reason}); expected one JSON object a line, such as \
         {{\"timestamp\": 0, \"input_length\": 1024, \"output_length\": 8, \"hash_ids\": [0, 1]}}"
    )]
    Malformed {
        /// The trace.
        path: PathBuf,
        /// Counted from 1.
        line: u64,
        /// The parser's message.
        reason: String,
    },
}

impl From<TraceError> for Failure {
    fn from(error: TraceError) -> Self {
        match error {
            TraceError::Io { .. } => Failure::environment(error.to_string()),
            TraceError::TooLong { .. } | TraceError::Malformed { .. } => {
                Failure::usage(error.to_string())
            }
        }
    }
}

/// A trace being read; iterates over its requests and ends after the first error.
pub struct Trace<R> {
    path: PathBuf,
    input: R,
    line: u64,
    text: Vec<u8>,
    failed: bool,
}

/// A trace in a file. Its first line has been read.
pub type FileTrace = Peekable<Trace<Box<dyn BufRead>>>;

impl Trace<Box<dyn BufRead>> {
    /// Opens a trace, and reads its first request: a file that is not a trace is rejected before
    /// anything is created for it.
    ///
    /// # Errors
    /// If the file cannot be read, or does not begin with a request.
    pub fn open(path: &Path, interrupt: &Interrupt) -> Result<FileTrace, TraceError> {
        let open = || zstd::reader(BufReader::new(Input::open(path, interrupt)?));
        let input = match open() {
            Err(error) if interrupt::is_end_asked_for(&error) => Box::new(io::empty()),
            input => input.map_err(|source| TraceError::Io {
                path: path.to_owned(),
                source,
            })?,
        };
        let mut trace = Trace::new(path, input).peekable();
        match trace.next_if(Result::is_err) {
            Some(Err(error)) => Err(error),
            _ => Ok(trace),
        }
    }
}

impl<R: BufRead> Trace<R> {
    /// Reads a trace from `input`. Errors name it `path`.
    pub fn new(path: &Path, input: R) -> Self {
        Trace {
            path: path.to_owned(),
            input,
            line: 0,
            text: Vec::new(),
            failed: false,
        }
    }

    /// Reads the next line into `text`. Returns false at the end, and when the operator has asked
    /// for an end.
    fn read_line(&mut self) -> Result<bool, TraceError> {
        self.text.clear();
        self.line += 1;
        let mut limited = self.input.by_ref().take(LINE_BYTES_MAX + 1);
        let read = limited.read_until(b'\n', &mut self.text);
        let read = match read {
            Err(error) if interrupt::is_end_asked_for(&error) => return Ok(false),
            read => read.map_err(|source| TraceError::Io {
                path: self.path.clone(),
                source,
            })?,
        };
        if read as u64 > LINE_BYTES_MAX {
            return Err(TraceError::TooLong {
                path: self.path.clone(),
                line: self.line,
            });
        }
        Ok(read > 0)
    }

    fn next_request(&mut self) -> Result<Option<Request>, TraceError> {
        while self.read_line()? {
            let text = self.text.trim_ascii();
            if text.is_empty() {
                continue;
            }
            let malformed = |reason: String| TraceError::Malformed {
                path: self.path.clone(),
                line: self.line,
                reason,
            };
            return match serde_json::from_slice::<Request>(text) {
                Ok(request) if !request.is_valid() => Err(malformed(
                    "`asked`, `stored` or `block_tokens` is out of range".to_owned(),
                )),
                Ok(_) if is_call(text) => Err(malformed(
                    "a recorded call: record with `larder record --requests`".to_owned(),
                )),
                Ok(request) => Ok(Some(request)),
                Err(_) if is_loss(text) => continue,
                Err(error) => Err(malformed(
                    error
                        .to_string()
                        .replace(" at line 1 column ", " at column "),
                )),
            };
        }
        Ok(None)
    }
}

/// Whether the line states that calls were lost.
fn is_loss(text: &[u8]) -> bool {
    serde_json::from_slice(text).is_ok_and(|line: Line| line.lost_calls.is_some())
}

/// Whether the line is a call of a recording, and no request.
fn is_call(text: &[u8]) -> bool {
    memchr::memmem::find(text, b"\"call\"").is_some()
        && serde_json::from_slice(text).is_ok_and(|line: Line| line.call.is_some())
}

impl<R: BufRead> Iterator for Trace<R> {
    type Item = Result<Request, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let next = self.next_request().transpose();
        self.failed = matches!(next, Some(Err(_)));
        next
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn trace(text: &[u8]) -> Vec<Result<Request, TraceError>> {
        Trace::new(Path::new("t.jsonl"), text).collect()
    }

    #[test]
    fn requests_are_read_in_order_whatever_else_a_line_holds() {
        let text =
            b"{\"timestamp\": 0, \"input_length\": 900, \"output_length\": 5, \"hash_ids\": \
            [0, 1]}\n\n\
                     {\"hash_ids\": [], \"timestamp\": 3.5}\r\n  \
                     {\"hash_ids\":[18446744073709551615]}";
        let ids: Vec<Vec<u64>> = trace(text)
            .into_iter()
            .map(|request| request.unwrap().hash_ids)
            .collect();
        assert_eq!(ids, [vec![0, 1], vec![], vec![u64::MAX]]);
    }

    #[test]
    fn a_recorded_request_states_the_blocks_it_asked_for_and_lost_calls_are_skipped() {
        let text = br#"{"timestamp": 1, "lost_calls": 3, "lost_pages": 9}
            {"hash_ids": [1, 2, 3], "asked": [1, 2], "stored": 2, "tier": "l3", "block_tokens": 64}
            {"hash_ids": [1, 2]}"#;
        let read: Vec<Request> = trace(text).into_iter().map(Result::unwrap).collect();
        assert_eq!((read[0].asked(), read[0].stored()), (1..2, 2));
        assert_eq!(
            (read[0].block_tokens(), read[0].tier.as_deref()),
            (64, Some(L3))
        );
        assert_eq!((read[1].asked(), read[1].stored()), (0..2, 2));
        assert_eq!(read[1].block_tokens(), BLOCK_TOKENS);
        for bad in [
            r#"{"hash_ids": [1], "asked": [1, 2]}"#,
            r#"{"hash_ids": [1], "asked": [1, 0]}"#,
            r#"{"hash_ids": [1], "stored": 2}"#,
            r#"{"hash_ids": [1], "block_tokens": 0}"#,
            r#"{"hash_ids": [1], "call": "lookup"}"#,
        ] {
            let read = trace(bad.as_bytes());
            assert!(
                matches!(read[..], [Err(TraceError::Malformed { line: 1, .. })]),
                "{bad}"
            );
        }
    }

    #[test]
    fn a_malformed_line_is_an_error_that_names_its_line_and_ends_the_trace() {
        for bad in [
            "{\"hash_ids\": [1, -2]}",
            "{\"hash_ids\": 7}",
            "{}",
            "[1]",
            "{\"hash_ids\": [1]",
            "\u{e9}",
        ] {
            let text = format!("{{\"hash_ids\": [1]}}\n\n{bad}\n{{\"hash_ids\": [2]}}\n");
            let read = trace(text.as_bytes());
            assert_eq!(read.len(), 2, "{bad}");
            let message = read[1].as_ref().unwrap_err().to_string();
            assert!(
                message.starts_with("t.jsonl, line 3: not a request ("),
                "{message}"
            );
        }
    }

    #[test]
    fn an_endless_line_is_refused_without_being_read_to_its_end() {
        let endless = BufReader::new(io::repeat(b'['));
        let mut trace = Trace::new(Path::new("/dev/zero"), endless);
        assert!(matches!(
            trace.next(),
            Some(Err(TraceError::TooLong { line: 1, .. }))
        ));
        assert!(trace.next().is_none());
    }

    #[test]
    fn a_file_that_is_no_trace_is_refused_when_it_is_opened() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("t");
        std::fs::write(&path, "\n\u{7f}ELF").unwrap();
        let error = Trace::open(&path, &Interrupt::never()).err().unwrap();
        assert!(matches!(error, TraceError::Malformed { line: 2, .. }));
        std::fs::write(&path, "{\"hash_ids\": [1]}\n\n[").unwrap();
        let read: Vec<_> = Trace::open(&path, &Interrupt::never()).unwrap().collect();
        assert!(matches!(
            read[..],
            [Ok(_), Err(TraceError::Malformed { line: 3, .. })]
        ));
        assert!(matches!(
            Trace::open(directory.path(), &Interrupt::never()),
            Err(TraceError::Io { .. })
        ));
    }

    #[test]
    fn a_compressed_trace_is_read_over_all_its_frames() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("t.jsonl.zst");
        let mut bytes = zstd::frame(b"{\"hash_ids\": [1]}\n{\"hash");
        bytes.extend(zstd::frame(b"_ids\": [2]}\n"));
        std::fs::write(&path, &bytes).unwrap();
        let ids = |path: &Path| -> Vec<Vec<u64>> {
            let trace = Trace::open(path, &Interrupt::never()).unwrap();
            trace
                .map_while(Result::ok)
                .map(|request| request.hash_ids)
                .collect()
        };
        assert_eq!(ids(&path), [vec![1], vec![2]]);
        std::fs::write(&path, &bytes[..bytes.len() - 5]).unwrap();
        let cut: Vec<_> = Trace::open(&path, &Interrupt::never()).unwrap().collect();
        assert!(
            matches!(cut[..], [Ok(_), Err(TraceError::Io { .. })]),
            "{cut:?}"
        );
    }

    #[test]
    fn a_trace_that_is_not_there_is_an_error_that_names_it() {
        let error = Trace::open(Path::new("/nonexistent/trace.jsonl"), &Interrupt::never())
            .err()
            .unwrap();
        assert!(
            error
                .to_string()
                .starts_with("/nonexistent/trace.jsonl: cannot read the trace: "),
            "{error}"
        );
    }
}

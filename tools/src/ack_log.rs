//! The promises made to a replay: a log of acknowledged pages that outlives the process, and its
//! check against a store.
//!
//! ```text
//!   hit 4ebfa8a1...f54396d6    this page was read, and so became recently used
//!   put cf97adee...ab733b72    this page was acknowledged
//! ```
//!
//! Each put's lines are written to the kernel in one `write` before the replay continues. So the
//! log never names more pages than the store acknowledged, even if the process is killed in
//! between. A line cut short by a kill is skipped, even if a later run continued behind it. A file
//! with any other content is not a log.
//!
//! The check. A page that a store acknowledged may be gone only by eviction, and eviction takes the
//! least recently used pages. So a page is *owed* if, since its acknowledgement, uses and puts
//! touched at most half as many pages as the store keeps. An owed page that is missing is lost.
//! Half, not all, because reclaim may take pages that are cold within one segment. Older pages may
//! be missing, but no present page may be wrong. A read does not make a page owed: a store forgets
//! uses when it is reopened.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use larder_format::PageKey;

use crate::failure::Failure;

/// Longest line of a log, in bytes. A longer one is not a log line.
const LINE_BYTES_MAX: u64 = 128;

/// Bytes of a line before its key, and digits of a key.
const VERB_BYTES: usize = "put ".len();
const KEY_DIGITS: usize = 64;

/// An acknowledgement log being written.
pub struct AckLog {
    path: PathBuf,
    file: File,
    text: String,
}

impl AckLog {
    /// Opens a log for appending. Creates it if there is none.
    ///
    /// # Errors
    /// If the file cannot be opened or written, or is not a log.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        if path.metadata().is_ok_and(|there| there.is_file()) {
            History::read(path)?;
        }
        let file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(path);
        let file = file.and_then(|mut file| end_torn_line(&mut file).map(|()| file));
        let file = file.map_err(|error| failure(path, &error))?;
        Ok(AckLog {
            path: path.to_owned(),
            file,
            text: String::new(),
        })
    }

    /// Records that pages were read.
    ///
    /// # Errors
    /// If the log cannot be written.
    pub fn hit(&mut self, keys: &[PageKey]) -> Result<(), Failure> {
        self.append("hit", keys)
    }

    /// Records that pages were acknowledged.
    ///
    /// # Errors
    /// If the log cannot be written.
    pub fn put(&mut self, keys: &[PageKey]) -> Result<(), Failure> {
        self.append("put", keys)
    }

    fn append(&mut self, what: &str, keys: &[PageKey]) -> Result<(), Failure> {
        self.text.clear();
        let written = keys
            .iter()
            .try_for_each(|key| writeln!(self.text, "{what} {key}"))
            .map_err(io::Error::other)
            .and_then(|()| self.file.write_all(self.text.as_bytes()));
        written.map_err(|error| failure(&self.path, &error))
    }
}

/// Ends a line that a kill cut short, so that the next one is whole.
fn end_torn_line(file: &mut File) -> io::Result<()> {
    if file.metadata()?.len() == 0 {
        return Ok(());
    }
    let mut last = [0];
    file.seek(SeekFrom::End(-1))?;
    file.read_exact(&mut last)?;
    if last == *b"\n" {
        Ok(())
    } else {
        file.write_all(b"\n")
    }
}

fn failure(path: &Path, error: &io::Error) -> Failure {
    Failure::environment(format!(
        "{}: acknowledgement log: {error}; check the path",
        path.display()
    ))
}

/// A log that was read back.
pub struct History {
    events: Vec<Event>,
    /// Lines that were cut short.
    pub torn_lines: u64,
}

enum Event {
    Put(PageKey),
    Hit(PageKey),
}

impl History {
    /// Reads a log.
    ///
    /// # Errors
    /// When the file cannot be read, or is not a log.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let file = File::open(path).map_err(|error| failure(path, &error))?;
        Self::parse(BufReader::new(file), path)
    }

    fn parse(mut input: impl BufRead, path: &Path) -> Result<Self, Failure> {
        let mut history = History {
            events: Vec::new(),
            torn_lines: 0,
        };
        let mut line = Vec::new();
        for number in 1_u64.. {
            line.clear();
            let mut limited = input.by_ref().take(LINE_BYTES_MAX);
            let read = limited.read_until(b'\n', &mut line);
            if read.map_err(|error| failure(path, &error))? == 0 {
                break;
            }
            match event(&line) {
                Some(event) => history.events.push(event),
                None if is_torn(&line) => history.torn_lines += 1,
                None => {
                    return Err(Failure::usage(format!(
                        "{}, line {number}: not a line of an acknowledgement log; give a file that \
                         --ack-log wrote",
                        path.display()
                    )));
                }
            }
        }
        Ok(history)
    }

    /// Every page that was ever acknowledged, once, in the order of its last acknowledgement,
    /// newest first.
    pub fn acknowledged(&self) -> Vec<PageKey> {
        self.newest_puts(u64::MAX)
    }

    /// The pages that a store keeping `usable_pages` still owes; newest first.
    pub fn owed(&self, usable_pages: u64) -> Vec<PageKey> {
        self.newest_puts(usable_pages / 2)
    }

    /// Pages acknowledged while at most `used_max` pages were used or put, counted from the end.
    fn newest_puts(&self, used_max: u64) -> Vec<PageKey> {
        let (mut used, mut seen) = (HashSet::new(), HashSet::new());
        let mut puts = Vec::new();
        for event in self.events.iter().rev() {
            let (Event::Put(key) | Event::Hit(key)) = event;
            used.insert(*key);
            if used.len() as u64 > used_max {
                break;
            }
            if matches!(event, Event::Put(_)) && seen.insert(*key) {
                puts.push(*key);
            }
        }
        puts
    }
}

fn event(line: &[u8]) -> Option<Event> {
    let line = std::str::from_utf8(line.strip_suffix(b"\n")?).ok()?;
    match line.split_once(' ')? {
        ("put", key) => key.parse().ok().map(Event::Put),
        ("hit", key) => key.parse().ok().map(Event::Hit),
        _ => None,
    }
}

/// Whether the line is a prefix of a valid line, with or without its end.
fn is_torn(line: &[u8]) -> bool {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    let (what, key) = line.split_at(line.len().min(VERB_BYTES));
    let is_key = key.len() <= KEY_DIGITS && key.iter().all(u8::is_ascii_hexdigit);
    !what.is_empty()
        && is_key
        && [b"put ", b"hit "]
            .iter()
            .any(|whole| whole.starts_with(what))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::workload::chain;

    fn log(dir: &tempfile::TempDir) -> PathBuf {
        dir.path().join("acks")
    }

    fn temporary() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    #[test]
    fn what_was_acknowledged_is_read_back_newest_first_and_once() {
        let dir = temporary();
        let keys = chain(&[1, 2, 3]);
        let mut acks = AckLog::open(&log(&dir)).unwrap();
        acks.put(&keys[..2]).unwrap();
        acks.hit(&keys[..2]).unwrap();
        acks.put(&[keys[2], keys[0]]).unwrap();
        let history = History::read(&log(&dir)).unwrap();
        assert_eq!(history.acknowledged(), [keys[0], keys[2], keys[1]]);
        assert_eq!(history.torn_lines, 0);
    }

    #[test]
    fn a_line_cut_short_by_a_kill_costs_that_line_alone() {
        let dir = temporary();
        let keys = chain(&[1, 2, 3]);
        AckLog::open(&log(&dir)).unwrap().put(&keys[..2]).unwrap();
        let whole = std::fs::read(log(&dir)).unwrap();
        for cut in 1..=69 {
            std::fs::write(log(&dir), &whole[..whole.len() - cut]).unwrap();
            AckLog::open(&log(&dir)).unwrap().put(&keys[2..]).unwrap();
            let acknowledged = History::read(&log(&dir)).unwrap().acknowledged();
            // A line without its newline is complete.
            let expected = if cut == 1 {
                vec![keys[2], keys[1], keys[0]]
            } else {
                vec![keys[2], keys[0]]
            };
            assert_eq!(acknowledged, expected, "cut by {cut}");
        }
    }

    #[test]
    fn pages_are_owed_while_the_uses_since_touched_half_of_the_store() {
        let dir = temporary();
        let keys = chain(&[1, 2, 3, 4, 5, 6]);
        let mut acks = AckLog::open(&log(&dir)).unwrap();
        acks.put(&keys[..2]).unwrap();
        acks.hit(&[keys[4], keys[5], keys[4]]).unwrap();
        acks.put(&keys[2..4]).unwrap();
        let history = History::read(&log(&dir)).unwrap();
        assert_eq!(history.owed(0), []);
        assert_eq!(history.owed(3), [keys[3]]);
        assert_eq!(history.owed(4), [keys[3], keys[2]]);
        assert_eq!(history.owed(9), [keys[3], keys[2]]);
        assert_eq!(history.owed(10), [keys[3], keys[2], keys[1]]);
        assert_eq!(history.owed(1000).len(), 4);
    }

    #[test]
    fn a_file_that_is_no_log_is_refused_with_the_line() {
        let dir = temporary();
        let keys = chain(&[1, 2]);
        AckLog::open(&log(&dir)).unwrap().put(&keys).unwrap();
        let good = std::fs::read(log(&dir)).unwrap();
        let endless = [b'a'; 1000];
        for garbage in [
            b"hello".as_slice(),
            b"hello\n",
            b"\n",
            b"get 3\n",
            b"put -1\n",
            b"hit 12 13\n",
            b"\xff\xfe\x00",
            &endless,
            &[b"put ".as_slice(), &endless].concat(),
        ] {
            let all = [&good, garbage, &good].concat();
            std::fs::write(log(&dir), &all).unwrap();
            let read = History::read(&log(&dir)).err().unwrap();
            let opened = AckLog::open(&log(&dir)).err().unwrap();
            for error in [read, opened] {
                assert_eq!(error.exit_code(), 2);
                let place = format!("{}, line 3: ", log(&dir).display());
                assert!(error.to_string().starts_with(&place), "{error}");
            }
            assert_eq!(std::fs::read(log(&dir)).unwrap(), all);
        }
    }

    #[test]
    fn a_log_that_is_not_there_is_an_error_that_names_it() {
        let error = History::read(Path::new("/nonexistent/acks")).err().unwrap();
        assert!(
            error
                .to_string()
                .starts_with("/nonexistent/acks: acknowledgement log: "),
            "{error}"
        );
    }
}

//! The file beside a store in which the policy of eviction keeps what it has learned, and what it
//! knows of the pages, from open to open: `NAME.lessons` (see [`Sidecar`]).
//!
//! ```text
//!   magic, 8 bytes | store, 16 bytes | run, 4 bytes | length of the lessons, 4 bytes |
//!   checksum of all other bytes, 8 bytes | lessons | notes of pages, 16 bytes each, sorted
//! ```
//!
//! A file that is missing, too long, of another store or torn is ignored. Notes count if they are
//! of the last run that wrote to the store: a later one has used and evicted pages that it did not
//! note. So each run writes the file when it begins. It writes it anew after as many bytes of puts
//! as make the file small beside them, and after ten minutes, both while reclaim runs, and at the
//! close.

use std::io;
use std::time::Duration;

use larder_base::planted;
use larder_base::runtime::Instant;
use larder_base::sidecar::Sidecar;
use larder_core::index::Index;
use larder_format::{Run, StoreId};
use rapidhash::v3::rapidhash_v3;

use crate::volume::Volumes;

const MAGIC: [u8; 8] = *b"LarderL2";
const HEAD: usize = 40;
const NOTE: usize = size_of::<u128>();

/// Longest lessons, and most notes: 64 MiB of them.
const LESSONS_MAX: usize = 1 << 20;
const NOTES_MAX: usize = 1 << 22;
const LENGTH_MAX: usize = HEAD + LESSONS_MAX + NOTES_MAX * NOTE;

/// Longest time between two writes, and the shortest one.
const PERIOD: Duration = Duration::from_secs(600);
const PAUSE: Duration = Duration::from_secs(5);

/// A file is written again after so many bytes of puts for each of its bytes.
const PUT_SHARE: u64 = 64;

/// See the module.
#[derive(Debug)]
pub(super) struct Lessons {
    file: Sidecar,
    store: StoreId,
    /// The last run that wrote to the store.
    run: Run,
    /// When the file was written last in this run.
    written: Option<Instant>,
    /// The bytes of puts at which it is written again.
    due: u64,
}

impl Lessons {
    /// The file of a store; `None` where there can be none.
    pub(super) fn beside(volumes: &Volumes) -> Option<Lessons> {
        let volume = volumes.list.first()?.as_ref()?;
        Some(Lessons {
            file: Sidecar::beside(&volume.path, ".lessons", LENGTH_MAX)?,
            store: volumes.superblock().store,
            run: volumes.newest_run(),
            written: None,
            due: 0,
        })
    }

    /// The lessons and the notes that the file holds for this store. Empty if there are none.
    pub(super) fn read(&self) -> (Vec<u8>, Vec<u128>) {
        let found = match self.file.read() {
            Ok(found) => found,
            Err(error) => {
                self.complain("read", &error);
                None
            }
        };
        let Some(bytes) = found else {
            return Default::default();
        };
        self.split(&bytes).unwrap_or_else(|| {
            tracing::info!(
                "{}: not the lessons of this store, or damaged; eviction learns anew",
                self.file.path().display()
            );
            Default::default()
        })
    }

    /// The parts of a file. `None` if it is not a whole one of this store.
    fn split(&self, bytes: &[u8]) -> Option<(Vec<u8>, Vec<u128>)> {
        if bytes.len() > LENGTH_MAX {
            return None;
        }
        let (head, rest) = bytes.split_first_chunk::<HEAD>()?;
        let word =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (run, length) = (word(24), word(28));
        let (lessons, notes) = rest.split_at_checked(length as usize)?;
        if *head != self.head(run, lessons, notes) && !planted!(BlindSideFile) {
            return None;
        }
        let is_last = run == self.run.get() || planted!(StaleSideFile);
        let (notes, _) = notes.as_chunks::<NOTE>();
        let notes = notes.iter().filter(|_| is_last);
        let notes = notes.map(|note| u128::from_le_bytes(*note)).collect();
        Some((lessons.to_owned(), notes))
    }

    fn head(&self, run: u32, lessons: &[u8], notes: &[u8]) -> [u8; HEAD] {
        let mut head = [0; HEAD];
        head[..8].copy_from_slice(&MAGIC);
        head[8..24].copy_from_slice(self.store.as_bytes());
        head[24..28].copy_from_slice(&run.to_le_bytes());
        let length = u32::try_from(lessons.len()).unwrap_or(u32::MAX);
        head[28..32].copy_from_slice(&length.to_le_bytes());
        let sums = [lessons, notes].map(|part| rapidhash_v3(part).to_le_bytes());
        let sum = rapidhash_v3(&[&head[..32], &sums[0], &sums[1]].concat());
        head[32..].copy_from_slice(&sum.to_le_bytes());
        head
    }

    /// Writes what the policy knows, if it is time, or `now`. Puts have written so many bytes.
    pub(super) fn write(&mut self, index: &Index, put_bytes: u64, now: bool) {
        let is_due = self.written.is_none_or(|written| {
            let since = written.elapsed();
            since >= PERIOD || since >= PAUSE && put_bytes >= self.due
        });
        if !is_due && !now {
            return;
        }
        self.written = Some(Instant::now());
        let (lessons, mut notes) = index.lessons(NOTES_MAX);
        if lessons.is_empty() || lessons.len() > LESSONS_MAX {
            return;
        }
        notes.sort_unstable();
        let notes: Vec<u8> = notes.into_iter().flat_map(u128::to_le_bytes).collect();
        let head = self.head(self.run.get(), &lessons, &notes);
        let content = [head.as_slice(), &lessons, &notes].concat();
        self.due = put_bytes.saturating_add(content.len() as u64 * PUT_SHARE);
        if let Err(error) = self.file.replace(&content) {
            self.complain("written", &error);
        }
    }

    fn complain(&self, done: &str, error: &io::Error) {
        tracing::warn!(
            "{}: the lessons of eviction cannot be {done} ({error}); eviction learns anew at the \
             next open",
            self.file.path().display()
        );
    }
}

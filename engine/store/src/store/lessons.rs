//! The file beside a store in which the policy of eviction keeps its lessons from open to open:
//! `NAME.lessons` (see [`Sidecar`]).
//!
//! A file that is missing, too long, of another store or torn is ignored. It is written about every
//! ten minutes in which reclaim runs, and at the close.
//!
//! ```text
//!   magic, 8 bytes | store, 16 bytes | checksum of all other bytes, 8 bytes | lessons
//! ```

use std::io;
use std::time::Duration;

use larder_base::runtime::Instant;
use larder_base::sidecar::Sidecar;
use larder_core::index::Index;
use larder_format::StoreId;
use rapidhash::v3::rapidhash_v3;

use crate::volume::Volumes;

const MAGIC: [u8; 8] = *b"LarderL1";
const HEAD: usize = 32;

/// Longest file.
const LENGTH_MAX: usize = 1 << 20;

/// Time between two writes.
const PERIOD: Duration = Duration::from_secs(600);

/// See the module.
#[derive(Debug)]
pub(super) struct Lessons {
    file: Sidecar,
    store: StoreId,
    written: Instant,
}

impl Lessons {
    /// The file of a store; `None` where there can be none.
    pub(super) fn beside(volumes: &Volumes) -> Option<Lessons> {
        let volume = volumes.list.first()?.as_ref()?;
        if cfg!(feature = "simulated") {
            return None;
        }
        Some(Lessons {
            file: Sidecar::beside(&volume.path, ".lessons", LENGTH_MAX)?,
            store: volumes.superblock().store,
            written: Instant::now(),
        })
    }

    /// What the file holds for this store. Empty if there is nothing.
    pub(super) fn read(&self) -> Vec<u8> {
        match self.file.read() {
            Ok(Some(mut bytes)) if self.is_ours(&bytes) => bytes.split_off(HEAD),
            Ok(Some(_)) => {
                tracing::info!(
                    "{}: not the lessons of this store, or damaged; eviction learns anew",
                    self.file.path().display()
                );
                Vec::new()
            }
            Ok(None) => Vec::new(),
            Err(error) => {
                self.complain("read", &error);
                Vec::new()
            }
        }
    }

    fn is_ours(&self, bytes: &[u8]) -> bool {
        bytes.len() <= LENGTH_MAX
            && bytes
                .split_at_checked(HEAD)
                .is_some_and(|(head, lessons)| head == self.head(lessons).as_slice())
    }

    fn head(&self, lessons: &[u8]) -> [u8; HEAD] {
        let mut head = [0; HEAD];
        head[..8].copy_from_slice(&MAGIC);
        head[8..24].copy_from_slice(self.store.as_bytes());
        let sum = rapidhash_v3(&[&head[..24], lessons].concat());
        head[24..].copy_from_slice(&sum.to_le_bytes());
        head
    }

    /// Writes what the policy has learned, if the last write was some time ago, or `now`.
    pub(super) fn write(&mut self, index: &Index, now: bool) {
        if !now && self.written.elapsed() < PERIOD {
            return;
        }
        self.written = Instant::now();
        let lessons = index.lessons();
        if lessons.is_empty() || lessons.len() > LENGTH_MAX - HEAD {
            return;
        }
        let content = [self.head(&lessons).as_slice(), &lessons].concat();
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

//! A disk for readers that judge a store by its content.
//!
//! "Cannot be read now" is no fact of a store. A failed read is tried again while there is
//! [`Patience`]. If it fails in the end, an error of the medium is a fact of the store. Any other
//! error is none: this process could not read (io_uring without worker threads, no memory, a
//! security module), or the path to the medium failed (a controller, a fabric, a file server).
//! Unread data must not pass for damage, and a store must not be opened with a part unread.

use std::sync::{Arc, OnceLock};

use larder_base::failure::DiskError;
use larder_base::memory::AlignedBuf;

use super::mailbox::{ReadAt, read_once};
use super::patience::Patience;
use super::{Choice, Disk, Op, Piece};

/// Forwards every operation. A read through [`read_all`](super::mailbox::read_all) that fails is
/// tried again, and the first one that says nothing of the store is remembered.
pub struct Witness {
    disk: Arc<dyn Disk>,
    patience: Arc<Patience>,
    seen: OnceLock<DiskError>,
}

impl Witness {
    pub fn new(disk: Arc<dyn Disk>, patience: Arc<Patience>) -> Witness {
        Witness {
            disk,
            patience,
            seen: OnceLock::new(),
        }
    }

    /// Whether every read so far has shown the bytes, or an error of the medium.
    ///
    /// # Errors
    /// The first failure of this process, or of the path to the medium.
    pub fn verdict(&self) -> Result<(), DiskError> {
        self.seen.get().map_or(Ok(()), |error| Err(*error))
    }
}

/// The reads that are worth another try. The limits of this process do not pass by themselves.
fn failed(results: &[Result<AlignedBuf, DiskError>]) -> impl Iterator<Item = usize> {
    let is_failed = |result: &Result<AlignedBuf, DiskError>| {
        let error = result.as_ref().err();
        error.is_some_and(|error| !error.is_of_this_process())
    };
    (0..results.len()).filter(move |at| is_failed(&results[*at]))
}

impl Disk for Witness {
    unsafe fn submit(&self, ops: Vec<Op>) {
        // SAFETY: this caller has the same contract.
        unsafe { self.disk.submit(ops) };
    }

    fn try_again(&self, reads: &[ReadAt], results: &mut [Result<AlignedBuf, DiskError>]) {
        if failed(results).next().is_some() {
            self.patience.spend(|| {
                let at: Vec<usize> = failed(results).collect();
                let again: Vec<ReadAt> = at.iter().map(|at| reads[*at]).collect();
                let answers = read_once(self.disk.as_ref(), &again);
                for (at, answer) in at.into_iter().zip(answers) {
                    results[at] = answer;
                }
                failed(results).next().is_none()
            });
        }
        let errors = results.iter().filter_map(|result| result.as_ref().err());
        if let Some(error) = { errors }.find(|error| !error.is_of_the_medium()) {
            let _ = self.seen.set(*error);
        }
    }

    fn expire(&self) {
        self.disk.expire();
    }

    unsafe fn register(&self, memory: &[Piece]) -> String {
        // SAFETY: this caller has the same contract.
        unsafe { self.disk.register(memory) }
    }

    fn choice(&self) -> &Choice {
        self.disk.choice()
    }

    fn shutdown(&self) {
        self.disk.shutdown();
    }
}

//! A connection to a running owner that empties segments, for a compaction.
//!
//! Its process is no client: it does not move page data, and does not become the owner.

use std::path::Path;

use larder_format::Serial;

use super::reach_own;
use super::remote::{Gone, Remote};
use super::wire::{KEYS_MAX, Reply, Report, Request};
use crate::error::StoreError;

/// See the module.
pub struct Emptier(Remote);

impl Emptier {
    /// Connects to the owner of the store at `path`.
    ///
    /// # Errors
    /// Those of [`report`](super::report).
    pub fn reach(path: &Path) -> Result<Emptier, StoreError> {
        reach_own(path).map(Emptier)
    }

    /// Has a segment emptied if it is of this generation. Returns the number of pages moved out of
    /// it; `None` if it holds other pages by now. Pages are moved in the order of their first
    /// blocks in `starts`.
    ///
    /// # Errors
    /// [`StoreError::NoRoom`]: not all its pages could be moved now. The owner may be gone, or of a
    /// release that does not do this.
    pub fn empty(
        &self,
        (volume, segment): (usize, u32),
        sequence: Serial,
        mut starts: Vec<u32>,
    ) -> Result<Option<u64>, StoreError> {
        starts.truncate(KEYS_MAX);
        let request = Request::Empty {
            volume: u16::try_from(volume).unwrap_or(u16::MAX),
            segment,
            sequence: sequence.get(),
            starts,
        };
        match self.0.ask(&request) {
            Ok(Reply::Emptied(moved)) => Ok(moved),
            Ok(Reply::Failed(failure)) => Err(failure.into()),
            Ok(_) | Err(Gone) => Err(StoreError::OwnerGone),
        }
    }

    /// Makes all moves durable.
    ///
    /// # Errors
    /// A sync failed, or the owner is gone.
    pub fn flush(&self) -> Result<(), StoreError> {
        match self.0.ask(&Request::Flush) {
            Ok(Reply::Done) => Ok(()),
            Ok(Reply::Failed(failure)) => Err(failure.into()),
            Ok(_) | Err(Gone) => Err(StoreError::OwnerGone),
        }
    }

    /// The owner's report.
    ///
    /// # Errors
    /// The owner is gone.
    pub fn report(&self) -> Result<Report, StoreError> {
        self.0.report().map_err(|Gone| StoreError::OwnerGone)
    }
}

impl Drop for Emptier {
    fn drop(&mut self) {
        self.0.hang_up();
    }
}

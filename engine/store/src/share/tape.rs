//! A connection to a running owner that records the traffic of its store.
//!
//! Its process is no client: it does not move page data, and does not become the owner.

use std::path::Path;

use larder_format::Namespace;

use super::reach_own;
use super::remote::{Gone, Remote};
use super::wire::{Reply, Request};
use crate::error::StoreError;
use crate::inventory::Inventory;
use crate::traffic::{Salt, Taken};

/// See the module. The recording ends when it is dropped.
pub struct Tape {
    remote: Remote,
    salt: Salt,
}

impl Tape {
    /// Connects to the owner of the store at `path`, and begins a recording.
    ///
    /// # Errors
    /// Those of [`report`](super::report), and those of [`Tape::take`].
    pub fn reach(path: &Path, salt: Salt) -> Result<(Tape, Taken), StoreError> {
        let tape = Tape {
            remote: reach_own(path)?,
            salt,
        };
        let taken = tape.take()?;
        Ok((tape, taken))
    }

    /// The calls since the last ones.
    ///
    /// # Errors
    /// [`StoreError::Recorded`] when another process records. The owner may be gone, or of a
    /// release that does not do this.
    pub fn take(&self) -> Result<Taken, StoreError> {
        match self.remote.ask(&Request::Record { salt: self.salt }) {
            Ok(Reply::Recorded(taken)) => Ok(taken),
            Ok(Reply::Failed(failure)) => Err(failure.into()),
            Ok(_) | Err(Gone) => Err(StoreError::OwnerGone),
        }
    }

    /// The namespaces of the store.
    ///
    /// # Errors
    /// The owner is gone.
    pub fn namespaces(&self) -> Result<Vec<Namespace>, StoreError> {
        self.remote.records()
    }
}

impl Drop for Tape {
    fn drop(&mut self) {
        self.remote.hang_up();
    }
}

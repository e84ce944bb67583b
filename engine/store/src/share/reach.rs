//! The errors of a store whose owner is not reached.

use std::io::ErrorKind;
use std::path::Path;

use super::remote::ReachError;
use crate::error::StoreError;
use crate::volume::{self, Access};

pub(super) fn not_served(path: &Path, error: &ReachError) -> StoreError {
    let is_unowned = matches!(error, ReachError::Nobody | ReachError::OfAnother { .. });
    if let Some(locked) = is_unowned.then(|| locked(path)).flatten() {
        return locked;
    }
    let (path, reason) = (path.to_owned(), error.to_string());
    match error {
        ReachError::Silent { .. } | ReachError::Unreachable(_) => {
            StoreError::Unanswered { path, reason }
        }
        ReachError::Forbidden(_) | ReachError::Denied(_) => StoreError::Denied { path, reason },
        ReachError::Version { .. } | ReachError::Nonsense => {
            StoreError::NotUnderstood { path, reason }
        }
        ReachError::Nobody if is_absent(&path) => StoreError::NotServed {
            path,
            reason: "there is no such file; check the path, or make a store there with `larder \
                     create`"
                .to_owned(),
        },
        ReachError::Nobody => StoreError::NotServed { path, reason },
        ReachError::OfAnother { .. } => StoreError::ServesAnother { path, reason },
    }
}

fn is_absent(path: &Path) -> bool {
    let found = path.symlink_metadata();
    found.is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// Whether no process can own the store at a path. A lock on one node of a device says nothing
/// about its other nodes.
pub(super) fn is_free(path: &Path) -> bool {
    let volume = volume::File::open(path, Access::ReadOnly);
    volume.is_ok_and(|volume| !volume.is_device && !volume.is_locked())
}

/// The error of a store that is locked by a process; `None` when it is not locked.
pub(super) fn locked(path: &Path) -> Option<StoreError> {
    let volume = volume::File::open(path, Access::ReadOnly).ok()?;
    volume.is_locked().then(|| volume.held(path))
}

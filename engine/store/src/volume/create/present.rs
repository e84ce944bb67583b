//! A store that is at the path of a creation already.

use std::path::{Path, PathBuf};

use super::add::created;
use super::checks::is_there;
use super::{Access, Created};
use crate::error::StoreError;
use crate::volume::Volumes;

/// The store at `path`; `None` if nothing is there, or the bytes of no store. It may be in use.
///
/// # Errors
/// If a part of the store is missing or cannot be read, as for an open.
pub(super) fn present(path: &Path, elsewhere: &[PathBuf]) -> Result<Option<Created>, StoreError> {
    if !is_there(path)? {
        return Ok(None);
    }
    let volumes = match Volumes::open(path, elsewhere, Access::ReadOnly, false) {
        Ok(volumes) => volumes,
        Err(StoreError::NotAStore(_)) => return Ok(None),
        Err(error) => return Err(error),
    };
    let paths = volumes.present().map(|(_, volume)| volume.path.clone());
    Ok(Some(Created {
        is_present: true,
        ..created(volumes.superblock(), paths.collect(), false)
    }))
}

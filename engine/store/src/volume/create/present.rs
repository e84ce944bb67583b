//! A store that is at the path of a creation already.

use std::path::Path;

use super::checks::is_there;
use super::options::{CreateOptions, Created};
use crate::error::StoreError;
use crate::volume::{Access, Volumes};

/// The store at `path`; `None` if nothing is there, or the bytes of no store. It may be in use.
///
/// # Errors
/// If a part of the store is missing or cannot be read, as for an open.
/// With a key, a store that is there has to be encrypted with it: [`StoreError::Usage`],
/// [`StoreError::WrongKey`].
pub(super) fn present(
    path: &Path,
    options: &CreateOptions<'_>,
) -> Result<Option<Created>, StoreError> {
    if !is_there(path)? {
        return Ok(None);
    }
    let opened = match &options.wrapping {
        None => Volumes::open_any(path, &options.volumes, Access::ReadOnly, false),
        Some(_) => options
            .unlock(path, Access::ReadOnly)
            .map(|(volumes, disk)| {
                disk.shutdown();
                volumes
            }),
    };
    let volumes = match opened {
        Ok(volumes) => volumes,
        Err(StoreError::NotAStore(_)) => return Ok(None),
        Err(error) => return Err(error),
    };
    let paths = volumes.present().map(|(_, volume)| volume.path.clone());
    Ok(Some(Created {
        is_present: true,
        ..Created::of(volumes.superblock(), paths.collect(), false)
    }))
}

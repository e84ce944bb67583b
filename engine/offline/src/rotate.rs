//! Rotates the key that wraps the master key of an encrypted store.
//!
//! The keyring alone is written: no page, and no key of a tenant. A kill at any moment leaves a
//! store that opens with the old key, or with the new one.

use std::path::Path;

use larder_seal::WrappingKey;
use larder_store::api::OpenOptions;
use larder_store::error::StoreError;
use larder_store::store::opening::open_volumes;
use larder_store::volume::Access;

/// Has `new` in place of the key in the options open the store at `path`.
///
/// # Errors
/// [`StoreError::Locked`] when a process has it open; without the present key; when a write or a
/// sync fails: then the store opens with the old key or with the new one.
pub fn rotate(path: &Path, options: &OpenOptions, new: &WrappingKey) -> Result<(), StoreError> {
    let Some(present) = &options.wrapping else {
        return Err(StoreError::Usage(format!(
            "{}: a rotation needs the present key of the store",
            path.display()
        )));
    };
    let (mut volumes, disk) = open_volumes(path, options, Access::Exclusive)?;
    let rotated = volumes.rewrap(disk.as_ref(), present, new);
    disk.shutdown();
    for (_, volume) in volumes.present() {
        volume.unlock();
    }
    rotated
}

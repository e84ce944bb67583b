//! On-disk cache of data that is determined once per device: cubins and the policy table.
//!
//! The name of a file contains everything that its contents depend on. The file ends with the
//! BLAKE3 of its bytes and is written by write-and-rename. A torn, truncated or corrupted file
//! counts as absent and is written again.

use std::io::{self, Write};
use std::path::PathBuf;

const HASH_BYTES: usize = blake3::OUT_LEN;

/// Maximum size of a cache file, in bytes. Longer files are not read.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// A directory of cache files.
#[derive(Clone, Debug)]
pub struct Cache {
    directory: PathBuf,
}

impl Cache {
    /// A cache in a directory. The directory is created on the first `put`.
    #[must_use]
    pub fn new(directory: impl Into<PathBuf>) -> Cache {
        Cache {
            directory: directory.into(),
        }
    }

    /// The contents stored under a name, if the file is whole.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Vec<u8>> {
        let path = self.directory.join(name);
        if std::fs::metadata(&path).ok()?.len() > FILE_BYTES_MAX {
            return None;
        }
        let mut bytes = std::fs::read(&path).ok()?;
        let hash = bytes.split_off(bytes.len().checked_sub(HASH_BYTES)?);
        (!bytes.is_empty() && blake3::hash(&bytes).as_bytes() == hash.as_slice()).then_some(bytes)
    }

    /// Stores contents under a name.
    ///
    /// # Errors
    /// File system errors. The previous contents stay in place.
    pub fn put(&self, name: &str, contents: &[u8]) -> io::Result<()> {
        std::fs::create_dir_all(&self.directory)?;
        let mut file = tempfile::NamedTempFile::new_in(&self.directory)?;
        file.write_all(contents)?;
        file.write_all(blake3::hash(contents).as_bytes())?;
        file.persist(self.directory.join(name))?;
        Ok(())
    }
}

//! What is found out about a device once, kept on disk: cubins, and the table of the policy.
//!
//! A file is named after everything that its contents depend on. It ends with the BLAKE3 of its bytes, and is written under another
//! name and renamed: a file that is torn, cut off or spoiled is none, and is written again.

use std::io::{self, Write};
use std::path::PathBuf;

const HASH_BYTES: usize = blake3::OUT_LEN;

/// Largest file that can be one of ours, in bytes; longer ones are not read.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// Files in a directory.
#[derive(Clone, Debug)]
pub struct Cache {
    directory: PathBuf,
}

impl Cache {
    /// In a directory, which is made when something is stored.
    #[must_use]
    pub fn new(directory: impl Into<PathBuf>) -> Cache {
        Cache {
            directory: directory.into(),
        }
    }

    /// What was stored under a name, if it is whole.
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

    /// Stores something under a name.
    ///
    /// # Errors
    /// Those of the file system. What was there before is there still.
    pub fn put(&self, name: &str, contents: &[u8]) -> io::Result<()> {
        std::fs::create_dir_all(&self.directory)?;
        let mut file = tempfile::NamedTempFile::new_in(&self.directory)?;
        file.write_all(contents)?;
        file.write_all(blake3::hash(contents).as_bytes())?;
        file.persist(self.directory.join(name))?;
        Ok(())
    }
}

//! A directory with one file per page. Serving engines ship such a backend; it is kept for
//! comparison and as a model in tests.
//!
//! ```text
//!  <64 hex digits of the key>.kv    the parts, back to back
//!  <the same>.<number>.tmp          being written; renamed when complete
//! ```
//!
//! Not durable, not bounded, not checksummed. It guarantees no more than those backends, except
//! that a file of the wrong length is a miss and is removed, so that the page can be stored again.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use larder_engine::{GetPage, PutPage};
use larder_format::PageKey;

use super::L3;

/// The directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{path:?} cannot be a directory of pages: {error}")]
pub struct FilesError {
    /// The directory.
    pub path: PathBuf,
    /// The system error.
    #[source]
    pub error: io::Error,
}

/// See the module documentation.
pub struct FilesL3 {
    directory: PathBuf,
    written: AtomicU64,
}

impl FilesL3 {
    /// The pages of this directory, which is created if necessary. All pages must have the same
    /// shape and model, because the file name does not distinguish them.
    ///
    /// # Errors
    /// The directory cannot be created.
    pub fn new(directory: &Path) -> Result<FilesL3, FilesError> {
        fs::create_dir_all(directory).map_err(|error| FilesError {
            path: directory.to_owned(),
            error,
        })?;
        Ok(FilesL3 {
            directory: directory.to_owned(),
            written: AtomicU64::new(0),
        })
    }

    fn path(&self, key: &PageKey) -> PathBuf {
        self.directory.join(format!("{key}.kv"))
    }

    fn read(&self, page: &mut GetPage<'_, '_>) -> io::Result<()> {
        let path = self.path(&page.key);
        let mut file = File::open(&path)?;
        let expected: u64 = page.parts.iter().map(|part| part.len() as u64).sum();
        if file.metadata()?.len() != expected {
            fs::remove_file(&path)?;
            return Err(io::ErrorKind::InvalidData.into());
        }
        page.parts
            .iter_mut()
            .try_for_each(|part| file.read_exact(part))
    }

    fn write(&self, page: &PutPage<'_>) -> io::Result<()> {
        let path = self.path(&page.key);
        if path.exists() {
            return Ok(());
        }
        let number = self.written.fetch_add(1, Ordering::Relaxed);
        let unfinished = self.directory.join(format!("{}.{number}.tmp", page.key));
        let written = File::create(&unfinished)
            .and_then(|mut file| page.parts.iter().try_for_each(|part| file.write_all(part)))
            .and_then(|()| fs::rename(&unfinished, &path));
        if written.is_err() {
            // The incomplete file is useless. If its removal fails too, it only takes space.
            let _ = fs::remove_file(&unfinished);
        }
        written
    }
}

impl L3 for FilesL3 {
    fn longest_prefix(&self, keys: &[PageKey]) -> usize {
        keys.iter()
            .take_while(|key| self.path(key).exists())
            .count()
    }

    fn get(&self, pages: &mut [GetPage<'_, '_>]) -> usize {
        let mut read = pages.iter_mut().map(|page| self.read(page));
        let failed = read.position(|result| result.is_err());
        failed.unwrap_or(pages.len())
    }

    fn put(&self, pages: &[PutPage<'_>]) -> usize {
        pages
            .iter()
            .take_while(|page| self.write(page).is_ok())
            .count()
    }

    fn touch(&self, _keys: &[PageKey]) {}
}

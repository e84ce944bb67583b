//! The place of a store on the command line: its first volume, or the directory that a backend's
//! `path` names.

use std::path::{Path, PathBuf};

use clap::builder::{PathBufValueParser, TypedValueParser};

/// The store's file in a backend's directory.
pub const STORE_FILE: &str = "larder.store";

/// The first volume of the store at `path`: the file in it where `path` is the directory of a
/// backend.
#[must_use]
pub fn volume_at(path: PathBuf) -> PathBuf {
    let file = path.join(STORE_FILE);
    // A directory that this user may not enter: the file in it is refused with that reason.
    if path.is_dir() && file.try_exists().unwrap_or(true) {
        file
    } else {
        path
    }
}

/// The directory in which a file is, or is to be.
#[must_use]
pub fn directory_of(file: &Path) -> &Path {
    let directory = file.parent().filter(|path| !path.as_os_str().is_empty());
    directory.unwrap_or(Path::new("."))
}

/// Reads such a path from the command line.
pub fn parser() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().map(volume_at)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_directory_stands_for_the_store_in_it_and_everything_else_for_itself() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        assert_eq!(volume_at(path.clone()), path);
        let file = path.join(STORE_FILE);
        std::fs::write(&file, b"").unwrap();
        assert_eq!(volume_at(path), file);
        assert_eq!(volume_at(file.clone()), file);
        let gone = PathBuf::from("/no/such/place");
        assert_eq!(volume_at(gone.clone()), gone);
    }
}

//! A tag for a set of weights: what tells it from others that go by the same name.
//!
//! Pages hold what the weights made of the tokens, so pages of other weights must never be served, and a model's name does not say
//! which weights it stands for: files are replaced, revisions move, adapters are merged. The tag is a digest of what the server was told
//! (path, revision, quantization, KV type) and of the names, sizes and modification times of the files that hold weights and their
//! configuration. Their content is not read: it would take minutes. Configuration alone tells no weights from others, so a
//! directory without weights is none of theirs.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Endings of files that weights and adapters lie in.
const WEIGHTS: [&str; 5] = ["safetensors", "bin", "pt", "pth", "gguf"];

/// Endings of files that their configuration lies in.
const CONFIGURATION: [&str; 2] = ["json", "model"];

/// Digits of a tag.
const DIGITS: usize = 16;

/// Deepest directory below the given one that is looked into.
const DEPTH_MAX: usize = 3;

/// Why no tag can be derived.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// A place cannot be read.
    #[error(
        "the weights at {path} cannot be looked at ({source}), so that nothing tells them from others: set `weights_tag` in the extra config"
    )]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// There is nothing there that weights lie in.
    #[error(
        "no weight files at {0}, so that nothing tells these weights from others: set `weights_tag` in the extra config"
    )]
    Nothing(PathBuf),
}

/// A tag of what the server was told, by name, and of files. Each of these may lie in one of several places: the first that holds weights
/// counts.
///
/// # Errors
/// No place with weights, or one that cannot be read.
pub fn derive(
    told: &BTreeMap<String, String>,
    files: &[Vec<PathBuf>],
) -> Result<String, WeightsError> {
    let mut digest = blake3::Hasher::new();
    let mut say = |text: &str| {
        digest.update(&(text.len() as u64).to_le_bytes());
        digest.update(text.as_bytes());
    };
    for (name, value) in told {
        say(name);
        say(value);
    }
    for places in files {
        say("files");
        first_with_weights(places)?
            .iter()
            .for_each(|line| say(line));
    }
    let tag = digest.finalize().to_hex();
    Ok(tag.as_str()[..DIGITS].to_owned())
}

/// The files of the first of these places that holds weights.
fn first_with_weights(places: &[PathBuf]) -> Result<Vec<String>, WeightsError> {
    for place in places {
        let mut found = Found::default();
        look(place, Path::new(""), 0, &mut found).map_err(|source| WeightsError::Unreadable {
            path: place.clone(),
            source,
        })?;
        if found.has_weights {
            found.lines.sort();
            return Ok(found.lines);
        }
    }
    let first = places.first().cloned().unwrap_or_default();
    Err(WeightsError::Nothing(first))
}

/// What lies in a place.
#[derive(Default)]
struct Found {
    /// One line a file: name, size, modification time.
    lines: Vec<String>,
    has_weights: bool,
}

fn look(place: &Path, name: &Path, depth: usize, found: &mut Found) -> io::Result<()> {
    let metadata = fs::metadata(place)?;
    if metadata.is_dir() {
        if depth > DEPTH_MAX {
            return Ok(());
        }
        for entry in fs::read_dir(place)? {
            let entry = entry?;
            let name = name.join(entry.file_name());
            look(&entry.path(), &name, depth + 1, found)?;
        }
        return Ok(());
    }
    let ending = place.extension().and_then(|ending| ending.to_str());
    let ends_with = |endings: &[&str]| ending.is_some_and(|ending| endings.contains(&ending));
    // A place that is a file is one because it was named.
    let is_weights = depth == 0 || ends_with(&WEIGHTS);
    if is_weights || ends_with(&CONFIGURATION) {
        let modified = metadata.modified()?.duration_since(UNIX_EPOCH);
        let modified = modified.map_or(0, |passed| passed.as_nanos());
        let line = format!("{} {} {modified}", name.display(), metadata.len());
        found.lines.push(line);
        found.has_weights |= is_weights;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use std::time::{Duration, SystemTime};

    fn told(revision: &str) -> BTreeMap<String, String> {
        BTreeMap::from([("revision".to_owned(), revision.to_owned())])
    }

    fn model() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("model.safetensors");
        fs::write(&file, b"weights").unwrap();
        set_age(&file, 100);
        fs::write(directory.path().join("notes.txt"), b"read me").unwrap();
        (directory, file)
    }

    fn set_age(file: &Path, seconds: u64) {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let file = fs::File::options().write(true).open(file).unwrap();
        file.set_modified(time).unwrap();
    }

    #[test]
    fn the_same_weights_have_the_same_tag_and_others_another() {
        let (directory, file) = model();
        let tag = |revision| derive(&told(revision), &[vec![directory.path().to_owned()]]).unwrap();
        let first = tag("main");
        assert_eq!(first.len(), DIGITS);
        assert_eq!(tag("main"), first);
        assert_ne!(tag("other"), first);
        fs::write(directory.path().join("notes.txt"), b"read me again").unwrap();
        assert_eq!(tag("main"), first);
        set_age(&file, 200);
        let later = tag("main");
        assert_ne!(later, first);
        fs::write(&file, b"longer weights").unwrap();
        set_age(&file, 200);
        assert_ne!(tag("main"), later);
    }

    #[test]
    fn the_first_place_that_holds_weights_counts() {
        let (directory, _) = model();
        let configuration = tempfile::tempdir().unwrap();
        fs::write(configuration.path().join("config.json"), b"{}").unwrap();
        let [weights, without] = [&directory, &configuration].map(|at| at.path().to_owned());
        let tag = |places: &[&PathBuf]| {
            derive(&told("main"), &[places.iter().copied().cloned().collect()])
        };
        let alone = tag(&[&weights]).unwrap();
        assert_eq!(tag(&[&without, &weights]).unwrap(), alone);
        assert_eq!(tag(&[&weights, &without]).unwrap(), alone);
        let named = tag(&[&without.join("config.json")]).unwrap();
        assert_ne!(named, alone);
    }

    #[test]
    fn weights_that_cannot_be_looked_at_are_refused_with_the_key_that_helps() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("config.json"), b"{}").unwrap();
        let tag = |place: PathBuf| derive(&told("main"), &[vec![place]]);
        let without = tag(directory.path().to_owned()).unwrap_err();
        let absent = tag(directory.path().join("no")).unwrap_err();
        let nowhere = derive(&told("main"), &[Vec::new()]).unwrap_err();
        for error in [without, absent, nowhere] {
            assert!(error.to_string().contains("`weights_tag`"), "{error}");
        }
    }
}

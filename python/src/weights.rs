//! A tag for a set of weights, which distinguishes it from others with the same name.
//!
//! Pages are computed from the weights, so pages of other weights must never be served. A model's
//! name does not identify its weights: files are replaced, revisions move, adapters are merged. The
//! tag is a digest of a description: fields of the server's configuration, and a digest of the
//! names, sizes and modification times of the weight files, their configuration and the model's own
//! code. File contents are not read, because that would take minutes. Files whose times were set to
//! a constant have no digest: other weights of the same size would have the same one. Configuration
//! files alone do not identify weights, so a directory without weights is not used.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

/// Extensions of weight and adapter files.
const WEIGHTS: [&str; 5] = ["safetensors", "bin", "pt", "pth", "gguf"];

/// Extensions of configuration files, and of the code that a model brings for its pages.
const CONFIGURATION: [&str; 3] = ["json", "model", "py"];

/// Digits of a tag.
const DIGITS: usize = 16;

/// Maximum directory depth of the search.
const DEPTH_MAX: usize = 3;

/// Before 1990, in seconds since 1970. Package and image builders set all modification times to one
/// constant: 0 or 1, or 1980, the first year of zip archives. No weights are that old.
const CONSTANT_BEFORE: u64 = 631_152_000;

/// Why no tag can be derived.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// A place cannot be read.
    #[error(
        "the weights at {path} cannot be read ({source}), so they cannot be identified: \
         set `weights_tag` in the extra config"
    )]
    Unreadable {
        /// The place.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// There are no weight files.
    #[error(
        "no weight files at {0}, so the weights cannot be identified: \
         set `weights_tag` in the extra config"
    )]
    Nothing(PathBuf),
    /// The modification time of a file is a constant.
    #[error(
        "the modification time of {0} is before 1990, a constant that some image builders set, so \
         these weights cannot be told from others of the same size: set `weights_tag` in the \
         extra config"
    )]
    Undated(PathBuf),
}

/// The tag of a description: fields and their values.
#[must_use]
pub fn tag(fields: &BTreeMap<String, String>) -> String {
    digest(fields.iter().flat_map(|(name, value)| [name, value]))
}

/// The digest of the names, sizes and modification times of the files in the first of the places
/// that has weights.
///
/// # Errors
/// No place has weights, a place cannot be read, or files in it have no modification time of their
/// own.
pub fn files(places: &[PathBuf]) -> Result<String, WeightsError> {
    Ok(digest(&first_with_weights(places)?))
}

fn digest<'a>(texts: impl IntoIterator<Item = &'a String>) -> String {
    let mut digest = blake3::Hasher::new();
    for text in texts {
        digest.update(&(text.len() as u64).to_le_bytes());
        digest.update(text.as_bytes());
    }
    digest.finalize().to_hex().as_str()[..DIGITS].to_owned()
}

/// The files of the first place that has weights.
fn first_with_weights(places: &[PathBuf]) -> Result<Vec<String>, WeightsError> {
    for place in places {
        let mut found = Found::default();
        look(place, Path::new(""), 0, &mut found).map_err(|source| WeightsError::Unreadable {
            path: place.clone(),
            source,
        })?;
        if found.has_weights {
            if let Some(file) = found.undated {
                return Err(WeightsError::Undated(file));
            }
            found.lines.sort();
            return Ok(found.lines);
        }
    }
    let first = places.first().cloned().unwrap_or_default();
    Err(WeightsError::Nothing(first))
}

/// The contents of a place.
#[derive(Default)]
struct Found {
    /// One line per file: name, size, modification time.
    lines: Vec<String>,
    has_weights: bool,
    /// A file among them whose modification time is a constant.
    undated: Option<PathBuf>,
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
    // A place that is itself a file was named explicitly.
    let is_weights = depth == 0 || ends_with(&WEIGHTS);
    if is_weights || ends_with(&CONFIGURATION) {
        let modified = metadata.modified()?.duration_since(UNIX_EPOCH);
        let modified = modified.unwrap_or_default();
        if modified < Duration::from_secs(CONSTANT_BEFORE) {
            found.undated = Some(place.to_owned());
        }
        let nanos = modified.as_nanos();
        let line = format!("{} {} {nanos}", name.display(), metadata.len());
        found.lines.push(line);
        found.has_weights |= is_weights;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use std::time::SystemTime;

    /// A modification time that is no constant.
    const LATER: u64 = CONSTANT_BEFORE + 100;

    fn model() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("model.safetensors");
        fs::write(&file, b"weights").unwrap();
        set_time(&file, LATER);
        fs::write(directory.path().join("notes.txt"), b"read me").unwrap();
        (directory, file)
    }

    fn set_time(file: &Path, seconds: u64) {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let file = fs::File::options().write(true).open(file).unwrap();
        file.set_modified(time).unwrap();
    }

    #[test]
    fn each_name_and_value_counts_and_their_bounds_too() {
        let of = |pairs: &[(&str, &str)]| {
            let owned = |(name, value): &(&str, &str)| (String::from(*name), String::from(*value));
            tag(&pairs.iter().map(owned).collect())
        };
        let first = of(&[("dtype", "bf16"), ("revision", "main")]);
        assert_eq!(first.len(), DIGITS);
        assert_eq!(of(&[("revision", "main"), ("dtype", "bf16")]), first);
        assert_ne!(of(&[("dtype", "fp16"), ("revision", "main")]), first);
        assert_ne!(of(&[("dtype", "bf16")]), first);
        assert_ne!(of(&[("ab", "c")]), of(&[("a", "bc")]));
    }

    #[test]
    fn the_same_weights_have_the_same_digest_and_others_another() {
        let (directory, file) = model();
        let of = || files(&[directory.path().to_owned()]).unwrap();
        let first = of();
        assert_eq!(first.len(), DIGITS);
        fs::write(directory.path().join("notes.txt"), b"read me again").unwrap();
        assert_eq!(of(), first);
        set_time(&file, LATER + 100);
        let later = of();
        assert_ne!(later, first);
        fs::write(&file, b"longer weights").unwrap();
        set_time(&file, LATER + 100);
        assert_ne!(of(), later);
    }

    #[test]
    fn files_that_decide_the_pages_count_beside_the_weights() {
        for name in ["config.json", "tokenizer.model", "modeling_own.py"] {
            let (directory, _) = model();
            let file = directory.path().join(name);
            let of = || files(&[directory.path().to_owned()]).unwrap();
            let without = of();
            fs::write(&file, b"one").unwrap();
            set_time(&file, LATER);
            let with = of();
            assert_ne!(with, without, "{name}");
            set_time(&file, LATER + 100);
            assert_ne!(of(), with, "{name}");
        }
    }

    #[test]
    fn the_first_place_that_has_weights_counts() {
        let (directory, _) = model();
        let configuration = tempfile::tempdir().unwrap();
        fs::write(configuration.path().join("config.json"), b"{}").unwrap();
        let [weights, without] = [&directory, &configuration].map(|at| at.path().to_owned());
        let of = |places: &[&PathBuf]| {
            let places: Vec<PathBuf> = places.iter().copied().cloned().collect();
            files(&places).unwrap()
        };
        let alone = of(&[&weights]);
        assert_eq!(of(&[&without, &weights]), alone);
        assert_eq!(of(&[&weights, &without]), alone);
        let named = of(&[&without.join("config.json")]);
        assert_ne!(named, alone);
    }

    #[test]
    fn weights_whose_times_are_a_constant_have_no_digest() {
        let (directory, file) = model();
        let configuration = directory.path().join("config.json");
        fs::write(&configuration, b"{}").unwrap();
        let of = || files(&[directory.path().to_owned()]);
        of().unwrap();
        for changed in [&file, &configuration] {
            for constant in [0, 1, 315_532_800] {
                set_time(changed, constant);
                let error = of().unwrap_err().to_string();
                assert!(
                    error.contains("`weights_tag`") && error.contains("1990"),
                    "{error}"
                );
            }
            set_time(changed, LATER);
        }
        of().unwrap();
    }

    #[test]
    fn unreadable_weights_are_refused_with_the_key_that_helps() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("config.json"), b"{}").unwrap();
        let without = files(&[directory.path().to_owned()]).unwrap_err();
        let absent = files(&[directory.path().join("no")]).unwrap_err();
        let nowhere = files(&[]).unwrap_err();
        for error in [without, absent, nowhere] {
            assert!(error.to_string().contains("`weights_tag`"), "{error}");
        }
    }
}

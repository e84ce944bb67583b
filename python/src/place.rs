//! From a configured path to a store that this process uses, beside whatever other processes do.
//!
//! The path is a directory, in which the store is a file of a fixed name with its socket beside it, or a block device. Every rank and
//! every server of a node comes here at about the same moment, and there may be no store yet: exactly one of them creates it, under
//! a lock, and the others wait for that and attach.

use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use larder_engine::{
    AttachOptions, CreateOptions, OpenOptions, PageStore, SharedStore, Store, StoreError, create,
};
use larder_tools::size::ByteSize;
use rustix::fs::FlockOperation;

use crate::config::Config;

/// The store's file in its directory.
const STORE_FILE: &str = "larder.store";

/// What the processes that may create it agree by.
const LOCK_FILE: &str = "larder.lock";

/// How long one waits for another that is creating the store.
const CREATION_PATIENCE: Duration = Duration::from_secs(30);

/// Pause between two looks: a lock on a file cannot be waited for with a time limit.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Why there is no store to use.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// The path is something else.
    #[error("`path`: {0} is neither a directory nor a block device")]
    Kind(PathBuf),
    /// The directory cannot be used.
    #[error("`path`: {path}: {doing}: {source}; check the path, its permissions and its mount")]
    Directory {
        /// What was touched.
        path: PathBuf,
        /// To do what.
        doing: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// Nobody said how large it is to be.
    #[error(
        "`size` is missing: there is no store at {0} yet, and its size is fixed when it is created"
    )]
    NoSize(PathBuf),
    /// Another process creates it, for too long.
    #[error(
        "`path`: another process has been creating the store at {0} for too long; stop it, or try again"
    )]
    Busy(PathBuf),
    /// The engine refused.
    #[error("`path`: {0}")]
    Store(#[from] StoreError),
}

/// A store that this process uses.
pub struct Attached {
    /// The handle.
    pub store: SharedStore,
    /// Where its first volume is.
    pub volume: PathBuf,
    /// A remark on its size, if it is not the configured one.
    pub remark: Option<String>,
}

/// Attaches to the store that `config` names; creates it if nobody has.
///
/// # Errors
/// See [`PlaceError`].
pub fn attach(config: &Config) -> Result<Attached, PlaceError> {
    let volume = match kind(&config.path)? {
        Kind::Device => {
            attend_to_device(config)?;
            config.path.clone()
        }
        Kind::Directory => attend_to_file(config)?,
    };
    let options = AttachOptions {
        open: OpenOptions {
            disk: config.disk,
            sync: config.sync,
            lease: config.lease,
            hang_limit: config.timeout,
            prewrite: config.prewrite,
            ..OpenOptions::default()
        },
        group: None,
    };
    let store = Store::attach(&volume, options)?;
    let remark = remark(config, &volume, store.stats().capacity_bytes);
    Ok(Attached {
        store,
        volume,
        remark,
    })
}

/// What a path is.
pub(crate) enum Kind {
    Directory,
    Device,
}

/// What the configured path is; a directory is made if there is nothing.
pub(crate) fn kind(path: &Path) -> Result<Kind, PlaceError> {
    let failed = |doing| {
        move |source| PlaceError::Directory {
            path: path.to_owned(),
            doing,
            source,
        }
    };
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Ok(Kind::Directory),
        Ok(metadata) if metadata.file_type().is_block_device() => Ok(Kind::Device),
        Ok(_) => Err(PlaceError::Kind(path.to_owned())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !path.starts_with("/dev") => {
            std::fs::create_dir_all(path).map_err(failed("making the directory"))?;
            Ok(Kind::Directory)
        }
        Err(error) => Err(failed("looking at it")(error)),
    }
}

/// The store's first volume, if the configured path is a directory or a device.
pub(crate) fn volume_of(path: &Path) -> PathBuf {
    if path.is_dir() {
        path.join(STORE_FILE)
    } else {
        path.to_owned()
    }
}

/// Sees to it that there is a store in the directory.
fn attend_to_file(config: &Config) -> Result<PathBuf, PlaceError> {
    let volume = config.path.join(STORE_FILE);
    if volume.exists() {
        return Ok(volume);
    }
    let lock_path = config.path.join(LOCK_FILE);
    let failed = |doing| {
        let path = lock_path.clone();
        move |source: std::io::Error| PlaceError::Directory {
            path,
            doing,
            source,
        }
    };
    let lock = File::options()
        .create(true)
        .write(true)
        .truncate(false)
        .open(&lock_path)
        .map_err(failed("opening the lock"))?;
    let until = Instant::now() + CREATION_PATIENCE;
    // The lock goes with the file, however this ends.
    while let Err(error) = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        if error != rustix::io::Errno::WOULDBLOCK {
            return Err(failed("taking the lock")(error.into()));
        }
        if Instant::now() >= until {
            return Err(PlaceError::Busy(volume));
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    if !volume.exists() {
        make(&volume, config)?;
    }
    Ok(volume)
}

/// Sees to it that there is a store on the device: the engine's own lock decides who makes it.
fn attend_to_device(config: &Config) -> Result<(), PlaceError> {
    let until = Instant::now() + CREATION_PATIENCE;
    loop {
        if larder_engine::share::report(&config.path).is_ok() {
            return Ok(());
        }
        match make(&config.path, config) {
            Ok(()) | Err(PlaceError::Store(StoreError::Exists(_))) => return Ok(()),
            // Somebody makes it, or has just opened it: looked at again, until attaching has to tell.
            Err(PlaceError::Store(StoreError::Locked { .. })) if Instant::now() < until => {}
            Err(PlaceError::Store(StoreError::Locked { .. })) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

fn make(volume: &Path, config: &Config) -> Result<(), PlaceError> {
    let is_device = volume == config.path;
    // Zero stands for a whole device.
    let size = match config.size {
        Some(size) => size,
        None if is_device => 0,
        None => return Err(PlaceError::NoSize(volume.to_owned())),
    };
    let options = CreateOptions {
        size,
        ..CreateOptions::default()
    };
    create(volume, &options)?;
    tracing::info!(volume = %volume.display(), size, "created the store");
    Ok(())
}

fn remark(config: &Config, volume: &Path, capacity: u64) -> Option<String> {
    // What does not make up a block is not used.
    const BLOCK: u64 = 4096;
    let wanted = config.size? / BLOCK * BLOCK;
    if capacity == 0 || wanted == capacity {
        return None;
    }
    let advice = if wanted > capacity {
        format!(
            "to enlarge it, stop its servers and run: larder create {} --size {wanted} --grow",
            volume.display()
        )
    } else {
        "a store does not shrink: to have a smaller one, stop its servers and delete it".to_owned()
    };
    Some(format!(
        "the store at {} has {}, not the configured `size` of {}; it stays as it is; {advice}",
        volume.display(),
        ByteSize(capacity),
        ByteSize(wanted)
    ))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn config(path: &Path, size: &str) -> Config {
        let json = serde_json::json!({"path": path, "size": size, "prewrite": false});
        Config::parse(&json.to_string()).unwrap()
    }

    #[test]
    fn a_store_is_made_on_first_use_and_found_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("new/place");
        let config = config(&path, "256MiB");
        let first = attach(&config).unwrap();
        assert_eq!(first.remark, None);
        assert_eq!(first.store.stats().capacity_bytes, 256 << 20);
        first.store.close().unwrap();
        let again = attach(&config).unwrap();
        assert_eq!(again.volume, path.join(STORE_FILE));
        again.store.close().unwrap();
    }

    #[test]
    fn of_many_that_come_at_once_one_makes_the_store_and_all_use_it() {
        let directory = tempfile::tempdir().unwrap();
        let config = config(directory.path(), "256MiB");
        let attached: Vec<Attached> = std::thread::scope(|scope| {
            let all: Vec<_> = (0..4).map(|_| scope.spawn(|| attach(&config))).collect();
            all.into_iter()
                .map(|one| one.join().unwrap().unwrap())
                .collect()
        });
        let owners = attached
            .iter()
            .filter(|one| one.store.part() == larder_engine::share::Part::Owner);
        assert_eq!(owners.count(), 1);
        for one in attached.iter().rev() {
            one.store.close().unwrap();
        }
    }

    #[test]
    fn a_store_keeps_its_size_and_says_so() {
        let directory = tempfile::tempdir().unwrap();
        let first = attach(&config(directory.path(), "256MiB")).unwrap();
        first.store.close().unwrap();
        let larger = attach(&config(directory.path(), "1GiB")).unwrap();
        let remark = larger.remark.unwrap();
        assert!(
            remark.contains("--grow") && remark.contains("256 MiB"),
            "{remark}"
        );
        larger.store.close().unwrap();
    }

    #[test]
    fn what_cannot_hold_a_store_is_refused_by_its_key() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        std::fs::write(&file, b"text").unwrap();
        let refused = |path: &Path, size| match attach(&config(path, size)) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("attached to {}", path.display()),
        };
        assert!(refused(&file, "256MiB").contains("`path`"));
        assert!(refused(Path::new("/dev/no-such-disk"), "256MiB").contains("`path`"));
        assert!(refused(&file.join("below"), "256MiB").contains("`path`"));
        assert!(refused(directory.path(), "1MiB").contains("segments"));
        assert!(!directory.path().join(STORE_FILE).exists());
        let json = serde_json::json!({"path": directory.path()}).to_string();
        let error = attach(&Config::parse(&json).unwrap())
            .map(|_| ())
            .unwrap_err();
        assert!(error.to_string().contains("`size` is missing"));
    }
}

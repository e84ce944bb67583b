//! From a configured path to a store that this process uses, together with other processes.
//!
//! The path is a directory or a block device. In a directory the store is a file of a fixed name,
//! with its socket beside it. Every rank and every server of a node starts at about the same time,
//! and the store may not exist yet. Exactly one process creates it, under a lock; the others wait
//! for it and attach.

use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_engine::{CreateOptions, OpenOptions, PageStore, Stats, Store, StoreError, create};
use larder_seal::{SourceError, Vault, WrappingKey};
use larder_store::fit::{PageFit, largest_page, least_size, page_fit, segment_bytes_for};
use larder_tools::l4::{L4, L4Error};
use larder_tools::place::STORE_FILE;
use larder_tools::size::ByteSize;
use rustix::fs::FlockOperation;

use crate::config::Config;
use crate::mount::Mount;

/// The file that processes lock to create the store.
const LOCK_FILE: &str = "larder.lock";

/// How long a process waits for another that is creating the store.
const CREATION_PATIENCE: Duration = Duration::from_secs(30);

/// Poll interval: a file lock has no wait with a time limit.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Why no store is available.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// The path is neither a directory nor a block device.
    #[error("`path`: {0} is neither a directory nor a block device")]
    Kind(PathBuf),
    /// The path is the file of a store.
    #[error("`path`: {0} is the file of a store: give its directory")]
    File(PathBuf),
    /// The directory cannot be used.
    #[error("`path`: {path}: {doing}: {source}; check the path, its permissions and its mount")]
    Directory {
        /// The path.
        path: PathBuf,
        /// The failed operation.
        doing: &'static str,
        /// The system error.
        source: std::io::Error,
    },
    /// The size of the store is not configured.
    #[error(
        "`size` is missing: there is no store at {0} yet, and its size is fixed when it is created"
    )]
    NoSize(PathBuf),
    /// Another process has been creating the store for too long.
    #[error(
        "`path`: another process has been creating the store at {0} for too long; \
         stop it, or try again"
    )]
    Busy(PathBuf),
    /// The configured size makes no store, or none for the pages of this server.
    #[error("`size`: {0}")]
    Size(StoreError),
    /// No page of a pool can ever be stored.
    #[error("pool {0}: {1}")]
    Misfit(String, Misfit),
    /// No page of the size that the caller has named can ever be stored.
    #[error(transparent)]
    Never(Misfit),
    /// The key of the store cannot be read.
    #[error(transparent)]
    Key(#[from] SourceError),
    /// The remotes or their keys cannot be used.
    #[error("`l4`: {0}")]
    L4(#[from] L4Error),
    /// The threads of the remotes cannot be started.
    #[error("`l4`: starting a thread: {0}; raise the limit of threads")]
    Threads(std::io::Error),
    /// An error of the engine.
    #[error("`path`: {0}")]
    Store(#[from] StoreError),
    /// The store could not be closed cleanly.
    #[error("`path`: {0}")]
    NotClosed(#[from] Arc<StoreError>),
}

/// A store that this process uses.
pub struct Attached {
    /// The handle.
    pub store: Arc<Store>,
    /// The remotes beneath it.
    pub l4: Option<L4>,
    /// The path of the first volume.
    pub volume: PathBuf,
    /// A remark on its size, if it differs from the configured size.
    pub remark: Option<String>,
}

impl Attached {
    fn new(
        config: &Config,
        volume: PathBuf,
        options: OpenOptions,
        open: impl FnOnce(&Path, OpenOptions) -> Result<Store, StoreError>,
    ) -> Result<Attached, PlaceError> {
        let l4 = match options.read_only {
            true => None,
            false => config.l4.connect()?,
        };
        let options = match &l4 {
            Some(l4) => l4.beneath(options),
            None => options,
        };
        let store = Arc::new(open(&volume, options)?);
        let started = l4.iter().try_for_each(|l4| l4.start(&store, &volume));
        if let Err(error) = started {
            l4.iter().for_each(L4::close);
            store.close()?;
            return Err(PlaceError::Threads(error));
        }
        let remark = remark(config, &volume, store.stats().capacity_bytes);
        Ok(Attached {
            store,
            l4,
            volume,
            remark,
        })
    }
}

/// Whether there already is a store. If not, checks that a store of the configured size can be
/// created.
///
/// # Errors
/// See [`PlaceError`].
pub fn is_made(config: &Config) -> Result<bool, PlaceError> {
    // First, because it creates the directory.
    let kind = kind(&config.path)?;
    let volume = volume_of(&config.path);
    let is_there = match kind {
        Kind::Directory => volume.exists(),
        Kind::Device => larder_engine::report(&volume).is_ok(),
    };
    if is_there {
        return Ok(true);
    }
    // The lock excludes another process that is just allocating the space for the store.
    let _lock = match kind {
        Kind::Directory => Some(lock_creation(config)?),
        Kind::Device => None,
    };
    if kind == Kind::Directory && volume.exists() {
        return Ok(true);
    }
    let options = options(&volume, config, None)?.with(|o| o.dry_run = true);
    match create(&volume, &options) {
        Ok(_) => Ok(false),
        // Attaching reports the details.
        Err(StoreError::Exists(_) | StoreError::Locked { .. }) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// Attaches to the store in `config`. Creates it if it does not exist, with segments that suit
/// pages of `page_bytes`.
///
/// # Errors
/// See [`PlaceError`].
pub fn attach(config: &Config, page_bytes: Option<u64>) -> Result<Attached, PlaceError> {
    let volume = attend(config, page_bytes)?;
    attach_to(config, volume)
}

/// Attaches to the store in `config`, which exists.
///
/// # Errors
/// See [`PlaceError`].
pub fn attach_existing(config: &Config) -> Result<Attached, PlaceError> {
    attach_to(config, volume_of(&config.path))
}

fn attach_to(config: &Config, volume: PathBuf) -> Result<Attached, PlaceError> {
    let options = unlocking(config)?;
    Attached::new(config, volume, options, |volume, options| {
        Store::attach(volume, options)
    })
}

/// Opens the store in `config` for this process alone. Creates it if `creates` and it does not
/// exist.
///
/// # Errors
/// See [`PlaceError`].
pub fn open(
    config: &Config,
    page_bytes: Option<u64>,
    creates: bool,
    read_only: bool,
) -> Result<Attached, PlaceError> {
    let volume = match creates {
        true => attend(config, page_bytes)?,
        false => volume_of(&config.path),
    };
    let options = unlocking(config)?.with(|o| o.read_only = read_only);
    Attached::new(config, volume, options, |volume, options| {
        Store::open(volume, options)
    })
}

/// Ensures that there is a store. Returns its first volume.
fn attend(config: &Config, page_bytes: Option<u64>) -> Result<PathBuf, PlaceError> {
    match kind(&config.path)? {
        Kind::Device => {
            attend_to_device(config, page_bytes)?;
            Ok(config.path.clone())
        }
        Kind::Directory => attend_to_file(config, page_bytes),
    }
}

/// The key of an encrypted store, read from its source.
fn wrapping(config: &Config) -> Result<Option<WrappingKey>, PlaceError> {
    let key = config.key.as_ref().map(|key| key.read(&Vault::new()));
    Ok(key.transpose()?)
}

/// The options with which this process opens the store, with its key.
fn unlocking(config: &Config) -> Result<OpenOptions, PlaceError> {
    let wrapping = wrapping(config)?;
    Ok(open_options(config).with(|o| o.wrapping = wrapping))
}

/// The options with which this process opens the store, without its key.
pub fn open_options(config: &Config) -> OpenOptions {
    OpenOptions::default().with(|o| {
        o.disk = config.disk;
        o.sync = config.sync;
        o.lease = config.lease;
        o.eviction = config.policy.maker();
        o.hang_limit = config.timeout;
        o.prewrite = config.prewrite;
        o.codec = config.codec;
        o.write_budget = config.write_budget;
    })
}

/// The kind of a path.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A directory, with the store in a file of a fixed name.
    Directory,
    /// A block device.
    Device,
}

/// The kind of the configured path. Creates a directory if nothing exists.
pub fn kind(path: &Path) -> Result<Kind, PlaceError> {
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
        Ok(metadata) if metadata.is_file() && path.ends_with(STORE_FILE) => {
            Err(PlaceError::File(path.to_owned()))
        }
        Ok(_) => Err(PlaceError::Kind(path.to_owned())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !path.starts_with("/dev") => {
            std::fs::create_dir_all(path).map_err(failed("making the directory"))?;
            Ok(Kind::Directory)
        }
        Err(error) => Err(failed("looking at it")(error)),
    }
}

/// The store's first volume, if the configured path is a directory or a device.
pub fn volume_of(path: &Path) -> PathBuf {
    if path.is_dir() {
        path.join(STORE_FILE)
    } else {
        path.to_owned()
    }
}

/// Ensures that there is a store in the directory.
fn attend_to_file(config: &Config, page_bytes: Option<u64>) -> Result<PathBuf, PlaceError> {
    let volume = config.path.join(STORE_FILE);
    if volume.exists() {
        return Ok(volume);
    }
    let _lock = lock_creation(config)?;
    if !volume.exists() {
        make(&volume, config, page_bytes)?;
    }
    Ok(volume)
}

/// Prevents other processes from creating the store in the directory until the result is dropped.
fn lock_creation(config: &Config) -> Result<File, PlaceError> {
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
    // The lock is released with the file in every case.
    while let Err(error) = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        if error != rustix::io::Errno::WOULDBLOCK {
            return Err(failed("taking the lock")(error.into()));
        }
        if Instant::now() >= until {
            return Err(PlaceError::Busy(config.path.join(STORE_FILE)));
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    Ok(lock)
}

/// Ensures that there is a store on the device. The engine's own lock decides which process creates
/// it.
fn attend_to_device(config: &Config, page_bytes: Option<u64>) -> Result<(), PlaceError> {
    let until = Instant::now() + CREATION_PATIENCE;
    loop {
        if larder_engine::report(&config.path).is_ok() {
            return Ok(());
        }
        match make(&config.path, config, page_bytes) {
            Ok(()) | Err(PlaceError::Store(StoreError::Exists(_))) => return Ok(()),
            // Another process is creating it or has just opened it. Retries until attaching must
            // report the error.
            Err(PlaceError::Store(StoreError::Locked { .. })) if Instant::now() < until => {}
            Err(PlaceError::Store(StoreError::Locked { .. })) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

/// The options for creating the store.
pub fn options(
    volume: &Path,
    config: &Config,
    page_bytes: Option<u64>,
) -> Result<CreateOptions<'static>, PlaceError> {
    let is_device = volume == config.path;
    // Zero means the whole device.
    let size = match config.size {
        Some(size) => size,
        None if is_device => 0,
        None => return Err(PlaceError::NoSize(volume.to_owned())),
    };
    let wrapping = wrapping(config)?;
    Ok(CreateOptions::new(size).with(|o| {
        o.page_bytes = page_bytes;
        o.wrapping = wrapping;
    }))
}

fn make(volume: &Path, config: &Config, page_bytes: Option<u64>) -> Result<(), PlaceError> {
    let created = match create(volume, &options(volume, config, page_bytes)?) {
        Err(error @ (StoreError::Usage(_) | StoreError::TooSmall { .. })) => {
            return Err(PlaceError::Size(error));
        }
        made => made?,
    };
    tracing::info!(
        volume = %volume.display(),
        size = created.capacity_bytes,
        segment = created.segment_bytes,
        "created the store"
    );
    if let Some(mount) = unmounted(&config.path) {
        tracing::warn!(
            "no disk is mounted where the store was created: {} is on the file system of {mount}. \
             If a disk should be there: stop the servers, delete the store, mount the disk",
            config.path.display()
        );
    }
    Ok(())
}

/// The file system of `/`, if the directory lies on it: the disk that was meant for the store may
/// not be mounted. Not every directory without a mount of its own is suspect: that of a store is
/// often one of many on its disk.
pub fn unmounted(path: &Path) -> Option<Mount> {
    let mount = Mount::of(path).ok().filter(Mount::is_root)?;
    path.is_dir().then_some(mount)
}

/// Why pages of a size do not suit a store, and the command that fixes it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Misfit {
    /// None of the pages can ever be stored.
    #[error(
        "a page has {page_bytes} bytes, and the segments of the store at {volume} take \
         pages of at most {largest_bytes}: none can ever be stored. {mend}",
        volume = volume.display()
    )]
    Never {
        /// Bytes per page.
        page_bytes: u64,
        /// Maximum bytes of a page that fits.
        largest_bytes: u64,
        /// The store.
        volume: PathBuf,
        /// The remedy.
        mend: String,
    },
    /// They fit, but waste space.
    #[error(
        "a page has {page}, more than half a segment of the store at {volume}: \
         {hundredths} % of its room are never used. {mend}",
        page = ByteSize(*page_bytes),
        volume = volume.display()
    )]
    Wasteful {
        /// Bytes per page.
        page_bytes: u64,
        /// Share of the space that is never used.
        hundredths: u64,
        /// The store.
        volume: PathBuf,
        /// The remedy.
        mend: String,
    },
}

/// Why pages of a size do not suit a store; `None` if they do, or if the segment size is not known
/// yet.
#[must_use]
pub fn misfit(volume: &Path, stats: &Stats, page_bytes: u64) -> Option<Misfit> {
    if stats.segment_bytes == 0 || page_bytes == 0 {
        return None;
    }
    let volume = volume.to_owned();
    let mend = mend(&volume, stats.capacity_bytes, page_bytes);
    match page_fit(stats.segment_bytes, page_bytes) {
        PageFit::Never => Some(Misfit::Never {
            page_bytes,
            largest_bytes: largest_page(stats.segment_bytes),
            volume,
            mend,
        }),
        PageFit::Wasteful(hundredths) => Some(Misfit::Wasteful {
            page_bytes,
            hundredths,
            volume,
            mend,
        }),
        PageFit::Good => None,
    }
}

/// The command that replaces the store at `volume` with a store for pages of this size.
fn mend(volume: &Path, capacity: u64, page_bytes: u64) -> String {
    let size = match segment_bytes_for(capacity, 1, Some(page_bytes)) {
        Some(_) => Some(capacity),
        None => least_size(1, page_bytes),
    };
    let Some(size) = size else {
        return "Use smaller pages".to_owned();
    };
    format!(
        "Stop all servers that use the store, then create it again, which drops its pages: larder \
         create {} --size {size} --page-bytes {page_bytes} --force",
        volume.display()
    )
}

fn remark(config: &Config, volume: &Path, capacity: u64) -> Option<String> {
    // A partial block at the end is not used.
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

    use std::os::unix::fs::PermissionsExt;

    use larder_seal::KeySource;

    use super::*;

    fn config(path: &Path, size: &str) -> Config {
        let json = serde_json::json!({"path": path, "size": size, "prewrite": false});
        Config::parse(&json.to_string()).unwrap()
    }

    #[test]
    fn a_store_is_created_on_first_use_and_found_later() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("new/place");
        let config = config(&path, "256MiB");
        let first = attach(&config, None).unwrap();
        assert_eq!(first.remark, None);
        assert_eq!(first.store.stats().capacity_bytes, 256 << 20);
        first.store.close().unwrap();
        let again = attach(&config, None).unwrap();
        assert_eq!(again.volume, path.join(STORE_FILE));
        again.store.close().unwrap();
    }

    #[test]
    fn of_many_concurrent_processes_one_creates_the_store_and_all_use_it() {
        let directory = tempfile::tempdir().unwrap();
        let config = config(directory.path(), "256MiB");
        let attached: Vec<Attached> = std::thread::scope(|scope| {
            let all: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| attach(&config, None)))
                .collect();
            all.into_iter()
                .map(|one| one.join().unwrap().unwrap())
                .collect()
        });
        let owners = attached
            .iter()
            .filter(|one| one.store.part() == larder_engine::Part::Owner);
        assert_eq!(owners.count(), 1);
        for one in attached.iter().rev() {
            one.store.close().unwrap();
        }
    }

    #[test]
    fn a_store_that_is_created_with_a_key_opens_with_it_alone() {
        let directory = tempfile::tempdir().unwrap();
        let key = directory.path().join("key");
        let mode = |mode| std::fs::set_permissions(&key, PermissionsExt::from_mode(mode)).unwrap();
        std::fs::write(&key, "5a".repeat(32)).unwrap();
        mode(0o400);
        let plain = config(&directory.path().join("place"), "256MiB");
        let keyed = Config {
            key: Some(KeySource::File(key.clone())),
            ..plain.clone()
        };
        let made = open(&keyed, None, true, false).unwrap();
        made.store.close().unwrap();
        open(&keyed, None, false, false)
            .unwrap()
            .store
            .close()
            .unwrap();
        let refused = open(&plain, None, true, false).err().unwrap();
        assert!(matches!(refused, PlaceError::Store(StoreError::Sealed(_))));
        mode(0o444);
        let refused = open(&keyed, None, true, false).err().unwrap();
        assert!(matches!(refused, PlaceError::Key(SourceError::Mode { .. })));
    }

    #[test]
    fn a_store_keeps_its_size_and_reports_it() {
        let directory = tempfile::tempdir().unwrap();
        let first = attach(&config(directory.path(), "256MiB"), None).unwrap();
        first.store.close().unwrap();
        let larger = attach(&config(directory.path(), "1GiB"), None).unwrap();
        let remark = larger.remark.unwrap();
        assert!(
            remark.contains("--grow") && remark.contains("256 MiB"),
            "{remark}"
        );
        larger.store.close().unwrap();
    }

    #[test]
    fn a_process_waits_for_a_store_that_another_process_creates() {
        let directory = tempfile::tempdir().unwrap();
        let config = config(directory.path(), "256MiB");
        let making = lock_creation(&config).unwrap();
        std::thread::scope(|scope| {
            let asks = scope.spawn(|| is_made(&config));
            make(&directory.path().join(STORE_FILE), &config, None).unwrap();
            drop(making);
            assert!(asks.join().unwrap().unwrap());
        });
    }

    #[test]
    fn a_store_is_created_with_segments_for_its_pages() {
        let directory = tempfile::tempdir().unwrap();
        let config = config(directory.path(), "300MiB");
        assert!(!is_made(&config).unwrap());
        let page_bytes = 20 << 20;
        let made = attach(&config, Some(page_bytes)).unwrap();
        assert!(is_made(&config).unwrap());
        let stats = made.store.stats();
        assert_eq!(misfit(&made.volume, &stats, page_bytes), None);
        assert!(stats.usable_pages(page_bytes) >= 4, "{stats:?}");
        made.store.close().unwrap();
        let large = make(&directory.path().join("other"), &config, Some(200 << 20));
        let error = large.err().unwrap();
        let said = error.to_string();
        assert!(
            said.contains("`size`") && said.contains("at least"),
            "{said}"
        );
    }

    #[test]
    fn the_command_that_fixes_a_misfit_creates_a_store_that_fits() {
        let directory = tempfile::tempdir().unwrap();
        let made = attach(&config(directory.path(), "256MiB"), None).unwrap();
        let stats = made.store.stats();
        made.store.close().unwrap();
        let of = |page_bytes| misfit(&made.volume, &stats, page_bytes);
        assert_eq!(of(7 << 20), None);
        assert!(matches!(
            of(9 << 20),
            Some(Misfit::Wasteful { hundredths: 44, .. })
        ));
        let Some(Misfit::Never { mend, .. }) = of(17 << 20) else {
            panic!("17 MiB in segments of 16 MiB");
        };
        let (_, command) = mend.split_once("larder create ").unwrap();
        let words: Vec<&str> = command.split(' ').collect();
        let number = |flag| {
            let at = words.iter().position(|word| *word == flag).unwrap();
            words[at + 1].parse::<u64>().unwrap()
        };
        let again = CreateOptions::new(number("--size")).with(|o| {
            o.page_bytes = Some(number("--page-bytes"));
            o.force = true;
        });
        create(Path::new(words[0]), &again).unwrap();
        let mended = attach(&config(directory.path(), "256MiB"), None).unwrap();
        assert_eq!(
            misfit(&mended.volume, &mended.store.stats(), 17 << 20),
            None
        );
        mended.store.close().unwrap();
    }

    #[test]
    fn a_directory_on_the_file_system_of_the_root_is_suspect_and_one_on_another_is_not() {
        let found = unmounted(Path::new("/etc")).unwrap();
        assert_eq!(found.point, Path::new("/"));
        assert_eq!(unmounted(Path::new("/proc/self/task")), None);
        assert_eq!(unmounted(Path::new("/etc/passwd")), None);
        assert_eq!(unmounted(Path::new("/no/such/place")), None);
    }

    #[test]
    fn a_path_that_cannot_hold_a_store_is_refused_with_its_key() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        std::fs::write(&file, b"text").unwrap();
        let refused = |path: &Path, size| match attach(&config(path, size), None) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("attached to {}", path.display()),
        };
        assert!(refused(&file, "256MiB").contains("`path`"));
        assert!(refused(Path::new("/dev/no-such-disk"), "256MiB").contains("`path`"));
        assert!(refused(&file.join("below"), "256MiB").contains("`path`"));
        assert!(refused(directory.path(), "1MiB").contains("segments"));
        assert!(!directory.path().join(STORE_FILE).exists());
        let json = serde_json::json!({"path": directory.path()}).to_string();
        let error = attach(&Config::parse(&json).unwrap(), None)
            .map(|_| ())
            .unwrap_err();
        assert!(error.to_string().contains("`size` is missing"));
    }
}

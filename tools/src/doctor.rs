//! `larder doctor`: the features of this machine that a store uses, the obstacles, and their
//! remedies.
//!
//! Every fact comes from a trial or from the kernel. A trial file without a name is made in a
//! directory, as `create` makes one. It is gone when it is closed. The engine checks the features
//! that it depends on ([`probe::report`]). The other checks concern one place: the directory, file
//! or device of a present or future store. A line is `ok`, `warn` (works, but slower or riskier
//! than possible) or `fail` (a store cannot work there).
//!
//! | module | content |
//! |---|---|
//! | `apart` | the checks of a path in a process of their own |
//! | `store` | the store at a path, its volumes and its owner |
//! | `device` | the device under a store: its stable name, the drive's health |
//! | `facts` | the facts so far, and the lines of a process that makes the checks |
//! | `bundle` | an archive of facts for a report of a problem |
//! | `redact` | takes names and secrets out of the archive |

pub mod apart;
mod bundle;
mod device;
mod facts;
mod redact;
mod store;

use std::fs::{File, Metadata};
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use clap::Args;
use larder_base::memory::backing_page_bytes;
use larder_base::system::pages::PageSizes;
use larder_disk::probe::{self, Fact, Level};
use larder_engine::{AlignedBuf, advice};
use larder_format::BLOCK_BYTES;
use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, Mode, OFlags, StatxFlags, ftruncate};
use rustix::io::Errno;
use serde::Serialize;

use crate::failure::{Ending, Failure};
use crate::place::{STORE_FILE, directory_of, volume_at};
use crate::program::Program;
use crate::refusal::refusal;
use crate::report::{self, Lines, Report};
use crate::size::ByteSize;
use facts::Facts;
use store::store;

/// The release of this program.
const RELEASE: &str = env!("CARGO_PKG_VERSION");

/// Free space below which a store of useful size does not fit, in bytes.
const FREE_BYTES_MIN: u64 = 1 << 30;

/// Size of the smallest store: six segments of 16 MiB, and 2 MiB beside them.
const STORE_BYTES_MIN: u64 = 98 << 20;

/// Most files of a directory in which a store is looked for.
const FILES_MAX: usize = 1000;

/// Size of the file that is made for trial.
const TRIAL_BYTES: u64 = 1 << 20;

/// Longest huge page that is worth a trial, which touches two of them. Where they are longer, small
/// pages have 64 KiB.
const HUGE_BYTES_MAX: usize = 32 << 20;

/// Strictest alignment that the format provides for, in bytes.
const ALIGN_BYTES_MAX: u32 = 4096;

/// Schedulers that add little to a fast disk.
const LIGHT_SCHEDULERS: [&str; 3] = ["none", "mq-deadline", "kyber"];

/// Check this machine and print obstacles with their remedies
#[derive(Args, Debug)]
#[command(
    after_help = "The configuration of an engine is checked by the Python package, in the \
    engine's environment: python -m larder_kv doctor --sglang CONFIG (or --vllm, --lmcache)."
)]
pub struct DoctorArgs {
    /// A store, or the directory or device for one
    #[arg(default_value = ".")]
    path: PathBuf,
    /// Also write an archive of facts for a report of a problem: versions, configuration, counters,
    /// this report, without page data, names and secrets
    #[arg(long, value_name = "FILE.tar")]
    bundle: Option<PathBuf>,
    /// Add the last lines of this log file to the archive
    #[arg(long, value_name = "FILE", requires = "bundle")]
    log: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// The findings.
#[derive(Serialize)]
struct DoctorReport {
    /// The path that was examined.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// One line for each fact.
    facts: Vec<Fact>,
    /// The archive that was written.
    #[serde(serialize_with = "crate::report::paths")]
    bundle: Option<PathBuf>,
    /// Whether it has lines of a log.
    #[serde(skip)]
    has_log: bool,
}

impl Report for DoctorReport {
    const COMMAND: &'static str = "doctor";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        let width = self
            .facts
            .iter()
            .map(|fact| fact.name.len())
            .max()
            .unwrap_or(0);
        for fact in &self.facts {
            lines.row(
                format!("{:<4}  {:<width$}", fact.level, fact.name),
                &fact.what,
            );
        }
        if let Some(bundle) = &self.bundle {
            let path = bundle.display();
            lines.text(match self.has_log {
                true => format!("Archive: {path}; read its log.txt before you send it"),
                false => format!("Archive: {path}"),
            });
        }
        lines
    }
}

/// Runs the command. The exit code is 1 if a line has the level `fail`.
pub fn run(args: &DoctorArgs, program: &Program) -> Result<Ending, Failure> {
    let mut facts = probe::report();
    huge_pages(&mut facts);
    let checked = apart::checked(program, &args.path)?;
    facts.extend(checked.facts);
    let failed = facts.iter().any(|fact| fact.level == Level::Fail);
    let mut document = DoctorReport {
        path: args.path.clone(),
        facts,
        bundle: None,
        has_log: args.log.is_some(),
    };
    if let Some(archive) = &args.bundle {
        let found = report::document(&document)?;
        bundle::write(
            &args.path,
            archive,
            args.log.as_deref(),
            found,
            checked.is_whole,
        )?;
        document.bundle = Some(archive.clone());
    }
    report::print(&document, args.json)?;
    Ok(match failed {
        true => Ending::Findings,
        false => Ending::Done,
    })
}

/// Whether large buffers get huge pages: the largest single effect on speed.
fn huge_pages(facts: &mut Vec<Fact>) {
    let mode =
        std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    let mode = chosen(&mode).unwrap_or("unknown").to_owned();
    let sizes = PageSizes::here();
    if sizes.huge() > HUGE_BYTES_MAX {
        let small = ByteSize(sizes.small() as u64);
        let what = format!("not needed: small memory pages have {small}");
        facts.push(Fact::ok("huge pages", what));
        return;
    }
    let page_bytes = AlignedBuf::zeroed(2 * sizes.huge())
        .ok()
        .and_then(|mut buffer| {
            buffer.fill(1);
            backing_page_bytes(buffer.as_ptr())
        });
    match page_bytes {
        Some(bytes) if bytes > sizes.small() as u64 => {
            let what = format!(
                "buffers get memory pages of {} (transparent_hugepage: \
                {mode})",
                ByteSize(bytes)
            );
            facts.push(Fact::ok("huge pages", what));
        }
        _ => facts.push(Fact::warn(
            "huge pages",
            format!(
                "buffers get small memory pages (transparent_hugepage: {mode}), which costs \
                 bandwidth and CPU time: \
                 echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
            ),
        )),
    }
}

/// The word in brackets of a sysfs choice such as `none [mq-deadline] kyber`.
fn chosen(choice: &str) -> Option<&str> {
    Some(choice.split_once('[')?.1.split_once(']')?.0)
}

/// Facts about the path itself.
fn place(path: &Path, facts: &mut Facts) -> Result<(), Failure> {
    let failure = |error: &std::io::Error| {
        Failure::environment(format!(
            "{}: looking at the file: {error}; check the path",
            path.display()
        ))
    };
    if store::is_hung(path, facts) {
        return Ok(());
    }
    let metadata = match std::fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let parent = directory_of(path);
            if !store::is_served_without_file(path, facts) {
                let what = format!(
                    "{}: no store is here. `larder create` makes one; if one should be here, mount \
                     its file system first, or check the path",
                    path.display()
                );
                facts.push(Fact::fail("path", what));
            }
            // A future store is judged by its directory.
            return match std::fs::metadata(parent) {
                Ok(metadata) if metadata.is_dir() => directory(parent, facts),
                Ok(_) => Err(Failure::environment(format!(
                    "{}: not a directory; check the path",
                    parent.display()
                ))),
                Err(error) => Err(failure(&error)),
            };
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            let place = refusal(path).unwrap_or_default();
            let what = format!(
                "{}: {error}. {place}. Run as the store's user, or as a member of its group",
                path.display()
            );
            facts.push(Fact::fail("permission", what));
            return Ok(());
        }
        found => found.map_err(|error| failure(&error))?,
    };
    if metadata.is_dir() {
        directory(path, facts)?;
        let volume = volume_at(path.to_owned());
        if volume != path {
            facts.push(Fact::ok(
                "path",
                format!("the store is {}", volume.display()),
            ));
            store(&volume, true, facts);
            return Ok(());
        }
        facts.push(match other_store(path) {
            Some(other) => Fact::warn(
                "path",
                format!(
                    "{} has no {STORE_FILE}, but the store {}: name that file, since a directory \
                     stands for the {STORE_FILE} in it",
                    path.display(),
                    other.display()
                ),
            ),
            None => Fact::ok(
                "path",
                format!(
                    "no store is in {} yet. If one should be here, is its file system mounted?",
                    path.display()
                ),
            ),
        });
        return Ok(());
    }
    beneath(path, &metadata, facts);
    store(path, !metadata.file_type().is_block_device(), facts);
    Ok(())
}

/// A store in a directory, whose file has another name than a backend gives it.
fn other_store(directory: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(directory).ok()?;
    let mut files: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()))
        .map(|entry| entry.path())
        .take(FILES_MAX)
        .collect();
    files.sort();
    files.into_iter().find(|file| store::is_there(file))
}

/// The file system and the device beneath a volume.
fn beneath(path: &Path, metadata: &Metadata, facts: &mut Facts) {
    match rustix::fs::open(
        path,
        OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC | OFlags::NONBLOCK,
        Mode::empty(),
    ) {
        Ok(file) => direct_io(&file, facts),
        Err(error) => facts.push(Fact::warn(
            "direct I/O",
            format!("cannot be opened with O_DIRECT: {error}"),
        )),
    }
    let is_device = metadata.file_type().is_block_device();
    if is_device {
        device::name(path, metadata.rdev(), facts);
    }
    let number = match is_device {
        true => metadata.rdev(),
        false => metadata.dev(),
    };
    device_of_volumes(number, facts);
}

/// The scheduler and the health of a device, once for all volumes on it.
fn device_of_volumes(number: u64, facts: &mut Facts) {
    if !facts.devices.contains(&number) {
        facts.devices.push(number);
        scheduler(number, facts);
        device::health(number, facts);
    }
}

fn directory(path: &Path, facts: &mut Facts) -> Result<(), Failure> {
    let failure = |error: std::io::Error| {
        Failure::environment(format!(
            "{}: looking at the file: {error}; check the path",
            path.display()
        ))
    };
    let directory = File::open(path).map_err(failure)?;
    match trial_file(path) {
        Ok(file) => {
            let prepared = ftruncate(&file, TRIAL_BYTES);
            direct_io(&file, facts);
            as_create_does(&file, prepared, facts);
        }
        Err(error) => {
            filesystem(&directory, facts);
            let what = format!(
                "{}: no file can be made here: {error}; {}",
                path.display(),
                remedy(error)
            );
            facts.push(Fact::fail("writable", what));
        }
    }
    let under = directory.metadata().map_err(failure)?.dev();
    device_of_volumes(under, facts);
    // The blocks of a store that is there are judged with the store.
    if !volume_at(path.to_owned()).is_file() {
        free_space(path, facts);
    }
    Ok(())
}

/// A file without a name: it is gone when it is closed. With O_DIRECT where the file system allows
/// it.
fn trial_file(directory: &Path) -> Result<OwnedFd, Errno> {
    let mode = Mode::RUSR | Mode::WUSR;
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let nameless = |more| rustix::fs::open(directory, flags | OFlags::TMPFILE | more, mode);
    nameless(OFlags::DIRECT)
        .or_else(|_| nameless(OFlags::empty()))
        .or_else(|error| match error {
            // Not every file system makes nameless files.
            Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL => {
                let name = directory.join(format!(".larder-doctor-{}", std::process::id()));
                let flags = flags | OFlags::CREATE | OFlags::EXCL;
                let file = rustix::fs::open(&name, flags | OFlags::DIRECT, mode)
                    .or_else(|_| rustix::fs::open(&name, flags, mode))?;
                rustix::fs::unlink(&name)?;
                Ok(file)
            }
            error => Err(error),
        })
}

/// Tries the calls that `create` makes on a volume.
fn as_create_does(file: &OwnedFd, prepared: Result<(), Errno>, facts: &mut Facts) {
    let allocated = prepared
        .and_then(|()| rustix::fs::fallocate(file, FallocateFlags::empty(), 0, TRIAL_BYTES));
    match allocated {
        Ok(()) => facts.push(Fact::ok("preallocation", "works")),
        Err(error @ (Errno::NOSPC | Errno::DQUOT)) => {
            let what = format!("{error}: {}", remedy(error));
            facts.push(Fact::fail("preallocation", what));
        }
        Err(error) => {
            let what = format!(
                "not here ({error}): `larder create --prewrite` writes every block instead; ext4 \
                 and xfs can preallocate"
            );
            facts.push(Fact::warn("preallocation", what));
        }
    }
    let locked = rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive);
    match locked {
        Ok(()) => facts.push(Fact::ok("locks", "work")),
        Err(error) => {
            let what = format!("a file cannot be locked here: {error}; {}", remedy(error));
            facts.push(Fact::fail("locks", what));
        }
    }
    let written = AlignedBuf::zeroed(BLOCK_BYTES)
        .map_err(|_| Errno::NOMEM)
        .and_then(|block| rustix::io::pwrite(file, &block, 0))
        .and_then(|_| rustix::fs::fdatasync(file));
    match written {
        Ok(()) => facts.push(Fact::ok("writes and syncs", "work")),
        Err(error) => {
            let what = format!("a write or a sync fails here: {error}; {}", remedy(error));
            facts.push(Fact::fail("writes and syncs", what));
        }
    }
}

/// Advice on an error of a file system.
fn remedy(error: Errno) -> &'static str {
    match error {
        Errno::ROFS => "it is mounted read-only: remount it writable, or choose another path",
        Errno::NOSPC | Errno::DQUOT => {
            "the file system or the quota is full: free some space, or choose another path"
        }
        Errno::PERM | Errno::ACCESS | Errno::NOSYS | Errno::NOMEM => advice(&error.into()),
        Errno::IO => "look for errors of the device in the kernel's log (dmesg)",
        _ => "check permissions and mount",
    }
}

fn direct_io(file: &OwnedFd, facts: &mut Facts) {
    filesystem(file, facts);
    let direct = probe::direct_io(file.as_fd());
    let asked = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS);
    if let (false, Err(error)) = (direct.dio, asked) {
        let what = format!("unknown: statx is refused ({error}); {}", remedy(error));
        facts.push(Fact::warn("direct I/O", what));
        return;
    }
    if !direct.dio {
        let what = "not honoured here: everything goes through the page cache, at many times the \
            CPU cost; use ext4, xfs or \
                    a block device";
        facts.push(Fact::warn("direct I/O", what));
        return;
    }
    let (memory, offset) = (direct.memory_align, direct.offset_align);
    let (level, remedy) = if memory > ALIGN_BYTES_MAX {
        (
            Level::Fail,
            ": a store aligns to 4096 bytes, use another disk",
        )
    } else if offset > ALIGN_BYTES_MAX {
        let remedy = ": a store reads 4096 bytes, so everything goes through the page cache, at \
                      many times the CPU cost; use another disk";
        (Level::Warn, remedy)
    } else {
        (Level::Ok, "")
    };
    let what =
        format!("honoured, memory aligned to {memory} and offsets to {offset} bytes{remedy}");
    facts.push(Fact::new("direct I/O", level, what));
}

fn filesystem(file: impl AsFd, facts: &mut Facts) {
    let name = probe::filesystem(file);
    let (level, advice) = match name.as_str() {
        "ext4" | "xfs" | "block device" => (Level::Ok, ""),
        "tmpfs" | "ramfs" => (
            Level::Warn,
            ": this is memory; a store here does not outlive the machine's next start",
        ),
        "btrfs" | "zfs" | "bcachefs" => (
            Level::Warn,
            ": it copies on write and checks data itself, at a cost; use ext4, xfs or a block \
             device",
        ),
        "nfs" | "smb" | "9p" | "fuse" | "ceph" | "lustre" => (
            Level::Warn,
            ": it may be remote, where locks and syncs may not hold; use a local disk",
        ),
        _ => (
            Level::Warn,
            ": not tried with this one; ext4, xfs and block devices are",
        ),
    };
    facts.push(Fact::new("file system", level, format!("{name}{advice}")));
}

/// The I/O scheduler of the disk under a file system, or of a device.
fn scheduler(device: u64, facts: &mut Facts) {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let device = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    // A partition has its queue in the disk above it.
    let queue = ["queue/scheduler", "../queue/scheduler"].map(|queue| device.join(queue));
    let Some(text) = queue
        .iter()
        .find_map(|queue| std::fs::read_to_string(queue).ok())
    else {
        facts.push(Fact::ok(
            "scheduler",
            format!("device {major}:{minor} has none of its own"),
        ));
        return;
    };
    let name = chosen(&text).unwrap_or("none");
    if LIGHT_SCHEDULERS.contains(&name) {
        facts.push(Fact::ok("scheduler", name));
    } else {
        let real = device.canonicalize().unwrap_or(device);
        let disk = real
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        let what = format!(
            "{name} slows a fast disk down: echo none > /sys/block/{disk}/queue/scheduler (of the \
             whole disk)"
        );
        facts.push(Fact::warn("scheduler", what));
    }
}

/// The room for a new store.
fn free_space(path: &Path, facts: &mut Facts) {
    match rustix::fs::statvfs(path) {
        Ok(space) => {
            let free = space.f_bavail.saturating_mul(space.f_frsize);
            let (level, advice) = match free {
                FREE_BYTES_MIN.. => (Level::Ok, ""),
                STORE_BYTES_MIN.. => (Level::Warn, ": too little for a new store of any use"),
                _ => (
                    Level::Warn,
                    ": too little for any new store: free some space",
                ),
            };
            facts.push(Fact::new(
                "free space",
                level,
                format!("{}{advice}", ByteSize(free)),
            ));
        }
        Err(error) => facts.push(Fact::warn("free space", format!("unknown: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::store::writable;
    use super::*;

    #[test]
    fn the_chosen_word_is_the_one_in_brackets() {
        assert_eq!(chosen("none [mq-deadline] kyber\n"), Some("mq-deadline"));
        assert_eq!(chosen("always [madvise] never"), Some("madvise"));
        assert_eq!(chosen("none"), None);
    }

    #[test]
    fn every_fact_of_a_directory_says_something() {
        let directory = tempfile::tempdir().unwrap();
        let store = directory.path().join("store");
        let of = |path: &Path| {
            let mut facts = Facts::default();
            place(path, &mut facts).unwrap();
            facts.list
        };
        let facts = [of(directory.path()), of(&store)].concat();
        for name in [
            "file system",
            "direct I/O",
            "preallocation",
            "locks",
            "writes and syncs",
            "scheduler",
            "free space",
        ] {
            assert_eq!(
                facts
                    .iter()
                    .filter(|fact| fact.name == name && !fact.what.is_empty())
                    .count(),
                2,
                "{name}"
            );
        }
        assert_eq!(
            std::fs::read_dir(directory.path()).unwrap().count(),
            0,
            "no trial file is left"
        );
    }

    #[test]
    fn a_volume_that_cannot_be_written_fails() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        std::fs::write(&path, b"").unwrap();
        let mut facts = Facts::default();
        writable(&path, &mut facts);
        assert_eq!(facts.list.len(), 0);
        // A directory cannot be written, not even by root.
        writable(directory.path(), &mut facts);
        let (name, level) = (&*facts.list[0].name, facts.list[0].level);
        assert_eq!((name, level), ("writable", Level::Fail));
    }

    #[test]
    fn a_path_into_nowhere_is_an_error() {
        let error = place(
            Path::new("/nonexistent/directory/store"),
            &mut Facts::default(),
        )
        .err()
        .unwrap();
        assert!(
            error
                .to_string()
                .starts_with("/nonexistent/directory/store: "),
            "{error}"
        );
    }
}

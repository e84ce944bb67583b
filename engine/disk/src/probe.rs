//! Chooses a disk by trying, and probes the system under it.
//!
//! Owns: the choice between [`Uring`] and [`Threads`] ([`open_disk`]), the reasons why io_uring
//! cannot be used ([`Obstacle`]), and facts for `doctor` ([`report`], [`direct_io`],
//! [`filesystem`]).
//!
//! Invariants: io_uring is chosen only after it has read from every volume; the disk states the
//! choice and its reason ([`super::Choice`]); nothing here changes a volume.
//!
//! Faults defended against: kernels and containers without io_uring, or with an io_uring that sets
//! up but does not work; file systems that accept `O_DIRECT` and then buffer; kernels too old to
//! report whether they do.
//!
//! It does not warn or decide about file systems that buffer: the opener of the store does.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::str::FromStr;
use std::sync::Arc;

use larder_base::failure::DiskError;
use larder_base::memory::AlignedBuf;
use larder_base::system::files::{self, Handle};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use rustix::fs::FileType;
use rustix::thread::CapabilitySet;
use serde::{Deserialize, Serialize};

use super::mailbox::{ReadAt, read_all};
use super::threads::Threads;
use super::uring::{Features, Uring};
use super::{Disk, DiskOptions};
pub use larder_base::system::direct::{Direct, direct_io};

/// Length of the read that proves a ring, in bytes.
const PROOF_BYTES: usize = 4096;

/// Locked-memory limit below which registered buffers are not worth having, in bytes.
const MEMLOCK_BYTES_MIN: u64 = 1 << 30;

/// The requested disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Want {
    /// io_uring where it works, else threads.
    #[default]
    Auto,
    /// io_uring or nothing.
    Uring,
    /// Threads.
    Threads,
}

impl fmt::Display for Want {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Want::Auto => "auto",
            Want::Uring => "uring",
            Want::Threads => "threads",
        })
    }
}

/// A word that names no disk.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a disk: use auto, uring or threads")]
pub struct UnknownDisk(String);

impl FromStr for Want {
    type Err = UnknownDisk;

    fn from_str(word: &str) -> Result<Self, UnknownDisk> {
        match word {
            "auto" => Ok(Want::Auto),
            "uring" => Ok(Want::Uring),
            "threads" => Ok(Want::Threads),
            _ => Err(UnknownDisk(word.to_owned())),
        }
    }
}

/// Why io_uring cannot be used, and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Obstacle {
    /// The kernel lacks it, or an operation that this disk needs.
    #[error("io_uring is missing: use Linux 5.6 or newer, outside of sandboxes that hide it")]
    Missing,
    /// The administrator has switched it off.
    #[error(
        "io_uring is switched off by kernel.io_uring_disabled = {0}: set it to 0, or if it is 1 \
         run in the group named by kernel.io_uring_group"
    )]
    SwitchedOff(u32),
    /// Another mechanism forbids it.
    #[error(
        "io_uring is forbidden, most likely by the container's seccomp profile: allow \
         io_uring_setup, io_uring_enter and io_uring_register"
    )]
    Forbidden,
    /// No memory for the rings.
    #[error(
        "io_uring gets no memory for its rings: raise the locked-memory limit (ulimit -l, \
         LimitMEMLOCK=)"
    )]
    LockedMemory,
    /// It can be set up but does not read.
    #[error(
        "io_uring does not read volume {volume} ({error}), which can be read without it: use the \
         threads disk"
    )]
    Unfit {
        /// Index of the volume in the store.
        volume: usize,
        /// The error of the read through the ring.
        error: DiskError,
    },
    /// Anything else.
    #[error("io_uring cannot be set up: {0}; use the threads disk")]
    Other(io::Error),
}

impl Obstacle {
    /// The cause of an error of io_uring's set-up, given `kernel.io_uring_disabled`.
    fn behind(error: io::Error, disabled: Option<u32>) -> Self {
        match (error.raw_os_error(), disabled) {
            (Some(libc::EPERM | libc::EACCES), Some(level @ 1..)) => Obstacle::SwitchedOff(level),
            (Some(libc::EPERM | libc::EACCES), _) => Obstacle::Forbidden,
            (Some(libc::ENOMEM), _) => Obstacle::LockedMemory,
            (Some(libc::ENOSYS), _) => Obstacle::Missing,
            _ if error.kind() == io::ErrorKind::Unsupported => Obstacle::Missing,
            _ => Obstacle::Other(error),
        }
    }
}

/// Why no disk could be opened.
#[derive(Debug, thiserror::Error)]
pub enum DiskOpenError {
    /// io_uring was requested and cannot be used.
    #[error("{0}")]
    Uring(Obstacle),
    /// The system has no more threads.
    #[error(
        "cannot start the threads of the disk: {0}; raise the limits on threads and memory \
         (ulimit -u, ulimit -v, TasksMax=), or allow clone3 in the container's seccomp profile"
    )]
    Threads(io::Error),
}

/// Opens the requested disk. io_uring must first read from every volume.
///
/// # Errors
/// [`DiskOpenError::Uring`] only if [`Want::Uring`] was requested. Otherwise threads take its
/// place, and the disk's [`super::Choice`] states why.
pub fn open_disk(options: DiskOptions, want: Want) -> Result<Arc<dyn Disk>, DiskOpenError> {
    choose(options, want, open_uring)
}

fn choose(
    options: DiskOptions,
    want: Want,
    open_uring: impl FnOnce(DiskOptions) -> Result<Arc<dyn Disk>, Obstacle>,
) -> Result<Arc<dyn Disk>, DiskOpenError> {
    match want {
        Want::Threads => open_threads(options, "threads, as asked for".to_owned()),
        Want::Uring => open_uring(options).map_err(DiskOpenError::Uring),
        Want::Auto => {
            let same = DiskOptions {
                files: options.files.clone(),
                depth: options.depth,
                latencies: options.latencies.clone(),
                pacing: options.pacing.clone(),
                board: options.board.clone(),
            };
            open_uring(same).or_else(|obstacle| {
                tracing::warn!(%obstacle, "reading and writing with threads instead of io_uring");
                open_threads(options, format!("threads, because {obstacle}"))
            })
        }
    }
}

fn open_threads(options: DiskOptions, reason: String) -> Result<Arc<dyn Disk>, DiskOpenError> {
    Ok(Arc::new(
        Threads::open(options, reason).map_err(DiskOpenError::Threads)?,
    ))
}

fn open_uring(options: DiskOptions) -> Result<Arc<dyn Disk>, Obstacle> {
    let files = options.files.clone();
    let disk = Features::probe()
        .and_then(|features| Uring::open(options, features))
        .map_err(|error| Obstacle::behind(error, io_uring_disabled()))?;
    for (volume, file) in files.iter().enumerate() {
        if let Some(file) = file {
            prove(&disk, volume, file)?;
        }
    }
    Ok(Arc::new(disk))
}

/// Reads the start of a volume through the disk. If the read fails without io_uring too, io_uring
/// is not the cause.
fn prove(disk: &Uring, volume: usize, file: &Handle) -> Result<(), Obstacle> {
    let proof = ReadAt {
        volume,
        offset: 0,
        bytes: PROOF_BYTES,
    };
    let Some(Err(error)) = read_all(disk, &[proof]).pop() else {
        return Ok(());
    };
    let mut memory = AlignedBuf::zeroed(PROOF_BYTES).map_err(Obstacle::Other)?;
    match files::read_at(file, &mut memory[..], 0) {
        Ok(PROOF_BYTES) => Err(Obstacle::Unfit { volume, error }),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// `kernel.io_uring_disabled`: 0 enabled, 1 enabled for one group only, 2 disabled; `None` before
/// Linux 6.6.
fn io_uring_disabled() -> Option<u32> {
    std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled")
        .ok()?
        .trim()
        .parse()
        .ok()
}

/// The rating of a fact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Works, but could be better; the fact states the remedy.
    Warn,
    /// Does not work.
    Fail,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Level::Ok => "ok",
            Level::Warn => "warn",
            Level::Fail => "fail",
        })
    }
}

/// One fact, for `doctor`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fact {
    /// The subject, in a word or two.
    pub name: Cow<'static, str>,
    /// The rating.
    pub level: Level,
    /// The finding and, unless it is good, the remedy.
    pub what: String,
}

impl Fact {
    pub fn new(name: &'static str, level: Level, what: impl Into<String>) -> Fact {
        Fact {
            name: name.into(),
            level,
            what: what.into(),
        }
    }

    pub fn ok(name: &'static str, what: impl Into<String>) -> Fact {
        Fact::new(name, Level::Ok, what)
    }

    pub fn warn(name: &'static str, what: impl Into<String>) -> Fact {
        Fact::new(name, Level::Warn, what)
    }

    pub fn fail(name: &'static str, what: impl Into<String>) -> Fact {
        Fact::new(name, Level::Fail, what)
    }
}

/// The facts that the disks depend on, found by trying: for `doctor`.
pub fn report() -> Vec<Fact> {
    let release = rustix::system::uname()
        .release()
        .to_string_lossy()
        .into_owned();
    vec![
        Fact::ok("kernel", format!("Linux {release}")),
        io_uring_fact(),
        sysctl_fact(io_uring_disabled()),
        memlock_fact(),
    ]
}

fn io_uring_fact() -> Fact {
    match Features::probe() {
        Ok(features) => Fact::ok("io_uring", features.to_string()),
        Err(error) => {
            let what = format!(
                "{}; threads are used instead",
                Obstacle::behind(error, io_uring_disabled())
            );
            Fact::warn("io_uring", what)
        }
    }
}

fn sysctl_fact(disabled: Option<u32>) -> Fact {
    let (level, what) = match disabled {
        None => (Level::Ok, "this kernel has no such switch".to_owned()),
        Some(0) => (Level::Ok, "0: io_uring is allowed".to_owned()),
        Some(value) => (
            Level::Warn,
            format!("{value}: {}", Obstacle::SwitchedOff(value)),
        ),
    };
    Fact::new("kernel.io_uring_disabled", level, what)
}

fn memlock_fact() -> Fact {
    let limit_bytes = match getrlimit(Resource::RLIMIT_MEMLOCK) {
        Ok((bytes, _)) => Some(bytes).filter(|bytes| *bytes != RLIM_INFINITY),
        Err(error) => {
            let advice = "allow prlimit64 in the container's seccomp profile";
            return Fact::warn("locked memory", format!("unknown: {error}; {advice}"));
        }
    };
    let exempt = rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    let (level, what) = match limit_bytes {
        None => (Level::Ok, "unlimited".to_owned()),
        Some(bytes) if exempt => (
            Level::Ok,
            format!(
                "{} KiB, but this process is exempt (CAP_IPC_LOCK)",
                bytes >> 10
            ),
        ),
        Some(bytes) if bytes >= MEMLOCK_BYTES_MIN => (Level::Ok, format!("{} MiB", bytes >> 20)),
        Some(bytes) => {
            let advice =
                "too low to register buffers; raise it (ulimit -l, LimitMEMLOCK=) to save CPU time";
            (Level::Warn, format!("{} KiB: {advice}", bytes >> 10))
        }
    };
    Fact::new("locked memory", level, what)
}

/// The name of the file system that holds a file, or `block device`.
pub fn filesystem(file: impl AsFd) -> String {
    let file = file.as_fd();
    let mode = rustix::fs::fstat(file).map(|stat| stat.st_mode);
    if mode.is_ok_and(|mode| FileType::from_raw_mode(mode) == FileType::BlockDevice) {
        return "block device".to_owned();
    }
    match rustix::fs::fstatfs(file) {
        Ok(stat) => filesystem_name(stat.f_type as u32),
        Err(error) => format!("unknown ({error})"),
    }
}

fn filesystem_name(magic: u32) -> String {
    let name = match magic {
        0x0000_ef53 => "ext4",
        0x5846_5342 => "xfs",
        0x9123_683e => "btrfs",
        0xf2f5_2010 => "f2fs",
        0x2fc1_2fc1 => "zfs",
        0xca45_1a4e => "bcachefs",
        0x0102_1994 => "tmpfs",
        0x8584_58f6 => "ramfs",
        0x794c_7630 => "overlayfs",
        0x6573_5546 => "fuse",
        0x0102_1997 => "9p",
        0x0000_6969 => "nfs",
        0xfe53_4d42 | 0xff53_4d42 => "smb",
        0x00c3_6400 => "ceph",
        0x0bd0_0bd0 => "lustre",
        _ => return format!("unknown (0x{magic:x})"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::Kind;

    fn no_volumes() -> DiskOptions {
        DiskOptions {
            files: vec![None],
            depth: 1,
            latencies: Arc::default(),
            pacing: Arc::default(),
            board: Arc::default(),
        }
    }

    fn refused_with(errno: i32, disabled: Option<u32>) -> Obstacle {
        Obstacle::behind(io::Error::from_raw_os_error(errno), disabled)
    }

    #[test]
    fn auto_falls_back_to_threads_with_a_reason() {
        let forbidden = |_| Err(refused_with(libc::EPERM, Some(0)));
        let disk = choose(no_volumes(), Want::Auto, forbidden).unwrap();
        assert_eq!(disk.choice().kind, Kind::Threads);
        assert!(
            disk.choice().reason.contains("seccomp"),
            "{}",
            disk.choice().reason
        );
    }

    #[test]
    fn io_uring_asked_for_by_name_is_not_replaced() {
        let switched_off = |_| Err(refused_with(libc::EPERM, Some(2)));
        let error = choose(no_volumes(), Want::Uring, switched_off)
            .err()
            .unwrap();
        assert!(matches!(
            error,
            DiskOpenError::Uring(Obstacle::SwitchedOff(2))
        ));
        assert!(
            error.to_string().contains("kernel.io_uring_disabled = 2"),
            "{error}"
        );
    }

    #[test]
    fn threads_asked_for_by_name_never_touch_io_uring() {
        let untouchable = |_| panic!("io_uring was tried");
        let disk = choose(no_volumes(), Want::Threads, untouchable).unwrap();
        assert_eq!(disk.choice().kind, Kind::Threads);
    }

    #[test]
    fn every_refusal_of_the_kernel_has_its_remedy() {
        assert!(matches!(
            refused_with(libc::EPERM, Some(0)),
            Obstacle::Forbidden
        ));
        assert!(matches!(
            refused_with(libc::EPERM, None),
            Obstacle::Forbidden
        ));
        assert!(matches!(
            refused_with(libc::EPERM, Some(1)),
            Obstacle::SwitchedOff(1)
        ));
        assert!(matches!(
            refused_with(libc::ENOSYS, None),
            Obstacle::Missing
        ));
        assert!(matches!(
            refused_with(libc::ENOMEM, Some(0)),
            Obstacle::LockedMemory
        ));
        assert!(matches!(
            refused_with(libc::EMFILE, Some(0)),
            Obstacle::Other(_)
        ));
        let lacking = io::Error::new(io::ErrorKind::Unsupported, "no fsync");
        assert!(matches!(Obstacle::behind(lacking, None), Obstacle::Missing));
    }

    #[test]
    fn disks_are_named_as_they_are_printed() {
        for want in [Want::Auto, Want::Uring, Want::Threads] {
            assert_eq!(want.to_string().parse(), Ok(want));
        }
        assert!("aio".parse::<Want>().is_err());
    }

    #[test]
    fn a_pipe_has_no_direct_io_and_a_file_system_has_a_name() {
        let (reader, _writer) = io::pipe().unwrap();
        assert!(!direct_io(&reader).dio);
        assert_eq!(filesystem_name(0xef53), "ext4");
        assert_eq!(filesystem_name(0x1234), "unknown (0x1234)");
    }

    #[test]
    fn the_report_covers_kernel_io_uring_and_limits() {
        let facts = report();
        for name in [
            "kernel",
            "io_uring",
            "kernel.io_uring_disabled",
            "locked memory",
        ] {
            assert!(
                facts
                    .iter()
                    .any(|fact| fact.name == name && !fact.what.is_empty()),
                "{name}"
            );
        }
    }
}

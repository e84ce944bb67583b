//! Why a store could not be created, opened or used, with the place and the remedy.

use std::io;
use std::path::PathBuf;

use larder_base::system::holder::{HolderState, LockHolder};
use larder_disk::DiskError;
use larder_disk::probe::DiskOpenError;
use larder_format::{Damage, Features, SuperblockError};

/// A store could not be created, opened or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The operating system refused an operation.
    #[error("{path}: {doing}: {source}{}", hint(.source))]
    Io {
        /// The operation.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// There is no store at this path.
    #[error("{0}: not a Larder store; create one with `larder create`, or check the path")]
    NotAStore(PathBuf),
    /// Segments of a store are there, and no copy of its superblock.
    #[error(
        "{0}: its superblocks, in the first 128 KiB, are destroyed, and segments of a store \
         follow: write them back with `larder superblock restore`, from the file of a `larder \
         superblock save`; without such a file the content is lost"
    )]
    NoSuperblock(PathBuf),
    /// The file or device holds other data than Larder's.
    #[error(
        "{0}: holds data that is not a Larder store; use --force to overwrite it, or choose \
         another path"
    )]
    Foreign(PathBuf),
    /// There is a store already.
    #[error(
        "{0}: already holds a Larder store; use --force to destroy it, or --grow to enlarge it"
    )]
    Exists(PathBuf),
    /// Neither a file nor a block device.
    #[error("{0}: is a {1}; a volume is a regular file or a block device")]
    NotAVolume(PathBuf, &'static str),
    /// Another process has it open.
    #[error("{path}: in use by {holder}; {}", unlock(*.is_unserved, holder.state))]
    Locked {
        /// The volume.
        path: PathBuf,
        /// The process that opened it last.
        holder: LockHolder,
        /// Whether no process listens on the store's socket.
        is_unserved: bool,
    },
    /// Clients have writes in flight though their owner is gone, or is exiting.
    #[error(
        "{0}: clients of the store's former owner are still writing; they end as soon as the \
         device lets them, and until then no process can open the store: try again, or stop them"
    )]
    ClientsWriting(PathBuf),
    /// No process serves the store's catalog.
    #[error("{path}: {reason}")]
    NotServed {
        /// The store.
        path: PathBuf,
        /// The reason, and the remedy.
        reason: String,
    },
    /// The process on the store's socket serves another store, and no process serves this one.
    #[error("{path}: {reason}; or start `larder serve`, which takes its place at the socket")]
    ServesAnother {
        /// The store.
        path: PathBuf,
        /// The process, and the remedy.
        reason: String,
    },
    /// No file is at the path, and the process on its socket serves the file that was there.
    #[error(
        "{path}: no file is at this path. {} serves the file that was here, which was deleted or \
         moved. Move it back; or stop that process, and create a store",
        served_by(*.owner)
    )]
    Removed {
        /// The store.
        path: PathBuf,
        /// The process, if it is visible here.
        owner: Option<u32>,
    },
    /// The process on the store's socket speaks another version of the protocol, or no such
    /// protocol.
    #[error("{path}: {reason}")]
    NotUnderstood {
        /// The store.
        path: PathBuf,
        /// Its answer.
        reason: String,
    },
    /// The store's owner does not serve this process.
    #[error("{path}: {reason}")]
    Denied {
        /// The store.
        path: PathBuf,
        /// The reason, and the remedy.
        reason: String,
    },
    /// The store's owner does not answer.
    #[error("{path}: {reason}")]
    Unanswered {
        /// The store.
        path: PathBuf,
        /// The result of the attempt.
        reason: String,
    },
    /// The volumes that this process opened are not those of the store's owner.
    #[error(
        "{0}: this process found other volumes than the store's owner uses (copies, or another \
         device node); mount the same files or device nodes in both, and name \
         further volumes with --volume"
    )]
    OtherVolumes(PathBuf),
    /// An owner must distinguish users.
    #[error(
        "{0}: the user of this process is not mapped in its user namespace, so that it cannot own \
         a shared store: it could not tell its clients' users apart; map the user (`unshare \
         --map-current-user`), or let another process own the store (`larder serve`)"
    )]
    UserUnmapped(PathBuf),
    /// A change of the quotas that is refused, and the reason.
    #[error("the quotas stay as they are: {0}")]
    Quotas(String),
    /// The store is encrypted, and this process has no key of it.
    #[error(
        "{0}: the store is encrypted, and no key is given: name it with --key-file, --key-command \
         or --key-credential, as `key_file` in Python, or as `wrapping` of the options in Rust; \
         without it a process can use the store while another one with the key serves it"
    )]
    Sealed(PathBuf),
    /// The given key is not one of this store.
    #[error("{path}: {reason}")]
    WrongKey {
        /// The first volume.
        path: PathBuf,
        /// The reason, and the remedy.
        reason: String,
    },
    /// The keyring of an encrypted store cannot be used.
    #[error(
        "{path}: the keyring of the store cannot be used ({reason}); nothing was written. Bring \
         back all volumes of the store, or a copy of them that is whole"
    )]
    Keyring {
        /// The first volume.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The owner of a shared store has gone.
    #[error(
        "the process that owned the store has gone; another one takes over in a moment: try again"
    )]
    OwnerGone,
    /// Reads failed for reasons in this process, or on the path to the medium. Nothing was
    /// written.
    #[error(
        "{path}: could not be read: {source}; the store itself may be sound, and nothing was \
         written. {}",
        read_advice(source)
    )]
    NotRead {
        /// The first volume.
        path: PathBuf,
        /// The error of the first such read.
        source: DiskError,
    },
    /// The superblocks cannot be used.
    #[error("{path}: {source}; run `larder verify` for the state of the store")]
    Superblock {
        /// The volume.
        path: PathBuf,
        /// The reason.
        source: SuperblockError,
    },
    /// A volume of the store is not at its path.
    #[error(
        "volume {index} of the store is missing ({reason}); bring it back, or name its new path \
         with --volume; only if it is gone for good: `larder verify --repair --degraded` gives up \
         its pages"
    )]
    VolumeMissing {
        /// Its index in the store.
        index: usize,
        /// Where it was expected.
        path: PathBuf,
        /// The file found in its place, and its path.
        reason: String,
    },
    /// A volume lacks the store's newest epoch.
    #[error(
        "{path}: an old copy? It is of run {run}, the store is at run {newest}; bring back the \
         current one; with `larder verify --repair --degraded` its pages are given up for good"
    )]
    VolumeStale {
        /// The volume.
        path: PathBuf,
        /// Its epoch.
        run: u32,
        /// The epoch of the store.
        newest: u32,
    },
    /// A volume is shorter than its geometry.
    #[error(
        "{path}: volume {volume} of the store was truncated: it is {} long, and must be at least \
         {} long. Restore the file, or save the remaining pages with `larder export`, for a new \
         store{}",
        bytes(*.found),
        bytes(*.needed),
        given_up(*.volume)
    )]
    Truncated {
        /// Its index in the store.
        volume: u16,
        /// The volume.
        path: PathBuf,
        /// Its length.
        found: u64,
        /// The length it must have.
        needed: u64,
    },
    /// The given path is not that of the first volume.
    #[error("{0}: is not the first volume of its store; open the store by its first volume ({1})")]
    NotFirstVolume(PathBuf, String),
    /// No epoch number is left.
    #[error(
        "{0}: every run number has been used (or a block claims so): copy the pages worth keeping \
         to a new store"
    )]
    RunsExhausted(PathBuf),
    /// The request is invalid.
    #[error("{0}")]
    Usage(String),
    /// The requested size is too small for a store, or for the growth of one.
    #[error(
        "{reason}: at least {} are needed{}",
        bytes(*.needed),
        if *.smaller_segments { ", or smaller segments" } else { "" }
    )]
    TooSmall {
        /// The resulting sizes.
        reason: String,
        /// The least sufficient size, over all volumes.
        needed: u64,
        /// Whether smaller segments would suffice too.
        smaller_segments: bool,
    },
    /// Pages of which the store can never hold one.
    #[error(
        "a page takes {} of the device, and the segments of the store hold pages of at most {}: \
         none can ever be stored; use pages of fewer tokens, or create the store again with larger \
         segments (--segment-size), which drops its pages",
        bytes(*.page_bytes),
        bytes(*.largest_bytes)
    )]
    PageTooLarge {
        /// Bytes of a page on the device.
        page_bytes: u64,
        /// Bytes of the largest page that fits.
        largest_bytes: u64,
    },
    /// No size is given, and the file has none of its own.
    #[error("{0}: a file needs a size; only a block device has one")]
    NoSize(PathBuf),
    /// No room.
    #[error("{path}: no space: {} needed, {} free; free some", bytes(*.needed), bytes(*.free))]
    NoSpace {
        /// The volume.
        path: PathBuf,
        /// Bytes requested.
        needed: u64,
        /// Free bytes of the file system.
        free: u64,
    },
    /// The file system does not preallocate, or a container profile forbids the call.
    #[error(
        "{path}: the file system ({file_system}) cannot preallocate a file ({source}): add \
         --prewrite to `larder create`, which writes every block instead, or use ext4, xfs or a \
         block device"
    )]
    NoPreallocation {
        /// The volume.
        path: PathBuf,
        /// The file system's name.
        file_system: String,
        /// The error of the system.
        source: io::Error,
    },
    /// A structure on disk could not be trusted.
    #[error("{path}: at byte {offset}: {source}")]
    Damaged {
        /// The volume.
        path: PathBuf,
        /// Byte offset in the volume.
        offset: u64,
        /// The kind of damage.
        source: Damage,
    },
    /// Structures of a store are damaged that offline work requires whole.
    #[error(
        "{path}: {flaws} damaged places; list them with `larder verify`, and run `larder verify \
         --repair` first"
    )]
    Unsound {
        /// The first volume.
        path: PathBuf,
        /// Number of damaged places.
        flaws: usize,
    },
    /// Pages could not be moved out of a segment.
    #[error(
        "{path}: segment {segment} cannot be emptied, because the device fails to read or write \
         some of its blocks; nothing of it is lost: try again, or run `larder verify --repair`, \
         which gives up what cannot be read"
    )]
    NotEmptied {
        /// The volume.
        path: PathBuf,
        /// The number of the segment in the volume.
        segment: u32,
    },
    /// No disk could be opened.
    #[error(transparent)]
    Disk(#[from] DiskOpenError),
    /// Read-only.
    #[error("the store is open read-only")]
    ReadOnly,
    /// The handle belongs to the parent of this process.
    #[error("the store was opened before a fork: a child opens it anew, after the fork")]
    Forked,
    /// The store has features that this release must not ignore when it writes.
    #[error(
        "{path}: this build must not write to the store, because it does not know all of its \
         features ({features}): use a newer Larder, or open the store read-only"
    )]
    UnknownFeatures {
        /// The volume.
        path: PathBuf,
        /// Its features.
        features: Box<Features>,
    },
    /// The owner's release does not have this call.
    #[error(
        "the owner of the store is of an older release that does not have this call; upgrade all \
         processes of the store"
    )]
    OwnerOlder,
    /// Another process records the store's traffic.
    #[error(
        "another process records the traffic of this store, and one can at a time: end its `larder \
         record`"
    )]
    Recorded,
    /// Closed.
    #[error("the store is closed")]
    Closed,
    /// A write failed.
    #[error("a write to the store failed ({0}); its pages are not stored")]
    WriteFailed(String),
    /// A sync failed.
    #[error(
        "a sync failed: pages written since the last successful sync may not survive power loss; \
         the store is rewriting them, flush again later"
    )]
    SyncFailed,
    /// A record could not be written for lack of space.
    #[error(
        "no room for the record: every segment is in use; try again when reclaim has caught up"
    )]
    NoRoom,
    /// Every volume is in read-only service.
    #[error(
        "every volume of the store refuses writes and is in read-only service; `larder stat` and \
         `larder doctor` show the reason"
    )]
    ReadOnlyService,
    /// Too many namespaces.
    #[error(
        "the store knows {0} namespaces, its limit; clear those no longer used, and compact it \
         into a new one (`larder compact --into`)"
    )]
    TooManyNamespaces(usize),
    /// The id belongs to no namespace of this store.
    #[error("unknown namespace id: ids are valid for one opening of one store")]
    UnknownNamespace,
}

impl StoreError {
    /// Another process has the device.
    pub(crate) fn is_busy(&self) -> bool {
        let is_busy = |source: &io::Error| source.kind() == io::ErrorKind::ResourceBusy;
        matches!(self, StoreError::Io { source, .. } if is_busy(source))
    }
}

/// The remedy for a read that says nothing of the store.
fn read_advice(source: &DiskError) -> &'static str {
    if source.is_of_this_process() {
        "Raise the limits of this process on threads and memory (ulimit -u, ulimit -v, TasksMax=), \
         or let it read the volumes"
    } else {
        "Look for the device and the path to it in the kernel's log, and open the store again"
    }
}

fn hint(error: &io::Error) -> String {
    match advice(error) {
        "" => String::new(),
        advice => format!("; {advice}"),
    }
}

/// The remedy for an error of the operating system; empty if there is none.
///
/// The permissions of a file end in `EACCES`. `EPERM` and `ENOSYS` also come from calls that no
/// permission refuses, such as `flock` and `fdatasync`: a seccomp profile returns them.
#[must_use]
pub fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => return "raise the limit on open files (ulimit -n)",
        Some(libc::EPERM) => {
            return "in a container, allow the call in its seccomp profile; elsewhere, run as the \
                    store's owner, or look for an immutable file (lsattr)";
        }
        // No file system returns it.
        Some(libc::ENOSYS) => {
            return "the kernel or the container's seccomp profile lacks this call: allow it, or \
                    use another file system";
        }
        // Of the calls made for a store, only the start of a thread fails so.
        Some(libc::EAGAIN) => {
            return "raise the limits on threads and memory (ulimit -u, ulimit -v, TasksMax=)";
        }
        _ => {}
    }
    match error.kind() {
        io::ErrorKind::NotFound => "check the path",
        io::ErrorKind::PermissionDenied => {
            "run as the store's owner, or change its permissions; in a container, check its \
             seccomp profile"
        }
        io::ErrorKind::OutOfMemory => {
            "raise the limit on memory (ulimit -v, MemoryMax=, the container's)"
        }
        io::ErrorKind::StorageFull => "free some space",
        io::ErrorKind::FileTooLarge => {
            "raise the limit on files (ulimit -f), or choose a filesystem that takes larger ones"
        }
        io::ErrorKind::ReadOnlyFilesystem => "remount it writable, or choose another path",
        _ => "",
    }
}

/// The last remedy for a volume that lost its end. A store is identified by its first volume.
fn given_up(volume: u16) -> &'static str {
    match volume {
        0 => "",
        _ => "; with `larder verify --repair --degraded` all pages on it are given up for good",
    }
}

/// The remedy for a lock that another process holds.
fn unlock(is_unserved: bool, holder: HolderState) -> &'static str {
    match (is_unserved, holder) {
        (_, HolderState::Exited) => {
            "another process takes the store over, or its last writes are in flight: try again in \
             a few seconds. If it lasts, a child of it holds the lock: stop that"
        }
        (true, _) => {
            "it serves no socket beside the store: wait for it, or stop it. In a container, mount \
             the store's directory, and not its file alone. `larder inspect` needs no lock"
        }
        (false, _) => "stop it first; `larder inspect` and `larder verify --online` need no lock",
    }
}

/// A size for people, exact and readable: `101711872 bytes (97 MiB)`.
pub(crate) fn bytes(number: u64) -> String {
    const UNITS: [(&str, u64); 4] = [
        ("TiB", 1 << 40),
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
    ];
    let exact = count(number, "byte");
    let Some((name, unit)) = UNITS.iter().find(|(_, unit)| number >= *unit) else {
        return exact;
    };
    if number.is_multiple_of(*unit) {
        return format!("{exact} ({} {name})", number / unit);
    }
    #[expect(clippy::cast_precision_loss, reason = "one decimal for people")]
    let about = number as f64 / *unit as f64;
    format!("{exact} ({about:.1} {name})")
}

/// `1 volume`, `2 volumes`.
pub(crate) fn count(number: u64, thing: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {thing}{plural}")
}

/// Whether opening a volume failed for a reason that is no evidence on the volume: it may be
/// there, and whole.
pub fn leaves_the_volume_unknown(error: &StoreError) -> bool {
    let errno = match error {
        StoreError::Io { source, .. } => source.raw_os_error(),
        StoreError::Superblock {
            source: SuperblockError::Unreadable(errno),
            ..
        } => return !DiskError::Os(*errno).is_of_the_medium(),
        _ => None,
    };
    errno.is_some_and(|errno| {
        matches!(
            errno,
            libc::EMFILE
                | libc::ENFILE
                | libc::EBUSY
                | libc::EROFS
                | libc::ETXTBSY
                | libc::ETIMEDOUT
                | libc::ENOLINK
                | libc::ESTALE
                | libc::EHOSTDOWN
                | libc::EHOSTUNREACH
        ) || DiskError::Os(errno).is_of_this_process()
    })
}

/// The process on a socket, at the beginning of a sentence.
pub(crate) fn served_by(pid: Option<u32>) -> String {
    match pid {
        Some(pid) => format!("Process {pid}"),
        None => "A process of another pid namespace".to_owned(),
    }
}

/// The error of the system that ended work on a file of the store.
pub fn io_error(
    doing: &'static str,
    path: &std::path::Path,
    source: impl Into<io::Error>,
) -> StoreError {
    StoreError::Io {
        doing,
        path: path.to_owned(),
        source: source.into(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_refusal_that_no_permission_explains_is_blamed_on_the_seccomp_profile_first() {
        let text = |errno| {
            let source = io::Error::from_raw_os_error(errno);
            io_error("locking the volume", "store".as_ref(), source).to_string()
        };
        for errno in [libc::EPERM, libc::ENOSYS] {
            let text = text(errno);
            let seccomp = text.find("seccomp profile").unwrap();
            let owner = text.find("owner").unwrap_or(usize::MAX);
            assert!(seccomp < owner, "{text}");
        }
        let denied = text(libc::EACCES);
        assert!(denied.contains("; run as the store's owner"), "{denied}");
        assert!(text(libc::ENOMEM).contains("; raise the limit on memory"));
        assert!(text(libc::EAGAIN).contains("; raise the limits on threads"));
        assert!(text(libc::EIO).ends_with("(os error 5)"));
    }

    #[test]
    fn sizes_are_exact_and_readable() {
        let cases = [
            (0, "0 bytes"),
            (1, "1 byte"),
            (1023, "1023 bytes"),
            (4096, "4096 bytes (4 KiB)"),
            (101_711_872, "101711872 bytes (97 MiB)"),
            (3 << 29, "1610612736 bytes (1.5 GiB)"),
        ];
        for (number, text) in cases {
            assert_eq!(bytes(number), text);
        }
    }
}

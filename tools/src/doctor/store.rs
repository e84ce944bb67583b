//! The store at a path, as a survey of its superblocks and its owner show it.

use std::os::fd::AsFd;
use std::path::Path;

use larder_disk::probe::{Fact, Level};
use larder_engine::{HolderState, LockHolder, StoreError};
use larder_format::{FORMAT_VERSION, OpenState, Superblock};
use larder_store::share;
use larder_store::share::VolumeState;
use larder_store::volume::holes::holes;
use larder_store::volume::socket::socket_path;
use larder_store::volume::{Access, Volume, Volumes};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::{Facts, RELEASE, remedy};
use crate::owner::{
    answering_line, damaged_line, damaged_pages_line, displaced_line, eviction_line, monthly,
    pacing_line, process, stopped_line,
};
use crate::place::volume_at;
use crate::size::ByteSize;

/// Age of an operation from which no check touches its volume: the owner calls it hung later.
const LATE_SECONDS: f64 = 1.0;

/// Whether the owner of the store waits for a volume. Then the facts are those of its report: a
/// check that touched the volume would hang, too.
pub(super) fn is_hung(path: &Path, facts: &mut Facts) -> bool {
    let path = volume_at(path.to_owned());
    let report = match socket_path(&path).exists() {
        true => share::report(&path).ok(),
        false => None,
    };
    let is_hung = |volume: &share::AnsweringVolume| volume.oldest_seconds >= LATE_SECONDS;
    match report.filter(|report| report.answering_volumes.iter().any(is_hung)) {
        Some(report) => {
            facts.push(Fact::warn(
                "checks",
                "those of the volumes are left out: the owner waits for a volume",
            ));
            served(&report, facts);
        }
        None => return false,
    }
    true
}

/// The facts of an owner's report.
fn served(report: &share::Report, facts: &mut Facts) {
    facts.push(Fact::ok("store in use", served_by(report.pid)));
    about(report, facts);
}

/// The store at a path: whole, closed, in use? `is_file`: a regular file is there.
pub(super) fn store(path: &Path, is_file: bool, facts: &mut Facts) {
    let volumes = match Volumes::open(path, &[], Access::ReadOnly, false) {
        Ok(volumes) => volumes,
        Err(StoreError::NotAStore(_)) if is_file => {
            let what = format!(
                "{}: a file, but no store: both superblocks, in the first 128 KiB, are overwritten \
                 or were never there. If it was a store, write them back with `larder superblock \
                 restore`, from the file of a `larder superblock save`; without such a file the \
                 content is lost. Else choose another path",
                path.display()
            );
            facts.push(Fact::fail("store", what));
            return;
        }
        Err(StoreError::NotAStore(_)) => {
            facts.push(Fact::ok(
                "store",
                "none here; `larder create` makes one, over other data only with --force",
            ));
            writable(path, facts);
            return;
        }
        Err(error) => {
            // The owner of a store that was damaged meanwhile knows more.
            let report = share::report(path).ok();
            if report
                .as_ref()
                .is_none_or(|of| of.damaged_volumes.is_empty())
            {
                facts.push(Fact::fail("store", error.to_string()));
            }
            if let Some(report) = report {
                served(&report, facts);
            }
            return;
        }
    };
    let superblock = volumes.superblock();
    let segments: u64 = superblock
        .volumes
        .iter()
        .map(|volume| u64::from(volume.segments))
        .sum();
    let what = format!(
        "{} on {} volumes, {segments} segments",
        superblock.store,
        superblock.volumes.len()
    );
    facts.push(Fact::ok("store", what));
    let features = superblock.features;
    let what = format!("version {FORMAT_VERSION}, {features}; this is release {RELEASE}");
    match features.may_be_written() {
        true => facts.push(Fact::ok("format", what)),
        false => facts.push(Fact::fail(
            "format",
            format!("{what}, which must not write to it: use a newer Larder"),
        )),
    }
    for (_, volume) in volumes.present() {
        writable(&volume.path, facts);
        blocks(volume, facts);
    }
    let locked = match is_locked(&volumes) {
        Ok(locked) => locked,
        Err(error) => {
            let what = format!("a volume cannot be locked: {error}; {}", remedy(error));
            facts.push(Fact::fail("store in use", what));
            return;
        }
    };
    // A process on the socket of a store that is not locked serves another one.
    let is_asked = locked || socket_path(path).exists();
    let asked = is_asked.then(|| share::report(path));
    let (level, what) = match &asked {
        Some(Err(StoreError::ServesAnother { reason, .. })) => (Level::Fail, reason.clone()),
        Some(Ok(report)) => (Level::Ok, served_by(report.pid)),
        Some(Err(StoreError::Unanswered { reason, .. })) => {
            let (_, holder) = in_use(superblock, locked);
            (Level::Fail, format!("{holder}; {reason}"))
        }
        _ => in_use(superblock, locked),
    };
    let report = asked.and_then(Result::ok);
    facts.push(Fact::new("store in use", level, what));
    if let Some(report) = report {
        about(&report, facts);
    }
}

/// The facts of an owner's report, without its process.
fn about(report: &share::Report, facts: &mut Facts) {
    let owner = process(report.pid);
    let what = format!("{owner} serves it with {}", report.settings);
    facts.push(Fact::ok("settings", what));
    facts.push(Fact::ok("protocol", protocol(report)));
    pacing(report, facts);
    eviction(report, facts);
    remote(report, facts);
    service(report, facts);
    places(report, facts);
    answers(report, facts);
    clients(report, facts);
    damage(report, facts);
}

/// The damage that the owner has found.
fn damage(report: &share::Report, facts: &mut Facts) {
    let pages = damaged_pages_line(&report.stats);
    let volumes = report.damaged_volumes.iter().map(damaged_line);
    let found: Vec<String> = volumes.chain(pages).collect();
    if found.is_empty() {
        let what = "none found since the owner opened the store";
        facts.push(Fact::ok("damage", what));
    }
    for what in found {
        facts.push(Fact::fail("damage", what));
    }
}

/// No file is at the path: does a process serve one that was there?
pub(super) fn absent(path: &Path, facts: &mut Facts) {
    let Ok(report) = share::report(path) else {
        return;
    };
    facts.push(Fact::ok("store in use", served_by(report.pid)));
    places(&report, facts);
}

/// The volumes whose files are not at their paths.
fn places(report: &share::Report, facts: &mut Facts) {
    for volume in &report.displaced_volumes {
        facts.push(Fact::fail("place", displaced_line(volume)));
    }
}

/// The clients that are stopped.
fn clients(report: &share::Report, facts: &mut Facts) {
    for client in &report.stopped_clients {
        facts.push(Fact::warn("clients", stopped_line(client)));
    }
}

/// How the volumes answer the processes that use the store.
fn answers(report: &share::Report, facts: &mut Facts) {
    for volume in &report.answering_volumes {
        let level = match volume.state {
            VolumeState::Answering => Level::Ok,
            VolumeState::Slow => Level::Warn,
            VolumeState::Hung => Level::Fail,
        };
        facts.push(Fact::new("answers", level, answering_line(volume)));
    }
}

/// The remote beneath the store, and the cost of its budgets.
fn remote(report: &share::Report, facts: &mut Facts) {
    let Some(l4) = &report.beneath else {
        return;
    };
    let level = if l4.works { Level::Ok } else { Level::Warn };
    facts.push(Fact::new(
        "l4",
        level,
        format!("{}, {}", l4.place, l4.state),
    ));
    if let Some(cost) = monthly(l4) {
        facts.push(Fact::ok("l4 cost", cost));
    }
}

/// Whether writes of the owner give way to the reads of all processes.
fn pacing(report: &share::Report, facts: &mut Facts) {
    let scope = report.stats.pacing.as_str();
    let level = match scope {
        // The owner's release has none.
        "" => return,
        "shared" | "local" => Level::Ok,
        _ => Level::Warn,
    };
    facts.push(Fact::new("pacing", level, pacing_line(&report.stats)));
}

/// The order in which the owner evicts pages.
fn eviction(report: &share::Report, facts: &mut Facts) {
    // Empty: the owner's release does not say.
    if !report.stats.eviction.is_empty() {
        facts.push(Fact::ok("eviction", eviction_line(&report.stats)));
    }
}

/// The releases of the owner and of its clients.
fn protocol(report: &share::Report) -> String {
    let mut what = format!("the owner is {}", report.protocol);
    for of in &report.releases {
        if of.release != report.protocol.release {
            what += &format!("; {} clients of release {}", of.clients, of.release);
        }
    }
    what
}

/// Whether a process has a volume locked. A lock taken for this check is released at once.
fn is_locked(volumes: &Volumes) -> Result<bool, Errno> {
    for (_, volume) in volumes.present() {
        let file = volume.file.as_fd();
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => {
                let _ = rustix::fs::flock(file, FlockOperation::Unlock);
            }
            Err(Errno::WOULDBLOCK) => return Ok(true),
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

/// The process that serves a store.
fn served_by(pid: Option<u32>) -> String {
    let owner = process(pid);
    match pid {
        Some(_) => format!("yes, served by {owner}"),
        None => format!(
            "yes, served by {owner}, whose number is unknown here. Clients work all the same; to \
             stop it or to read its log, go to its container or to the host"
        ),
    }
}

/// Whether every block of a volume's file is allocated to it alone: otherwise a write may find no
/// space.
fn blocks(volume: &Volume, facts: &mut Facts) {
    let Some(holes) = holes(&*volume.file) else {
        return;
    };
    if holes.is_none() {
        let what = match holes.unwritten_bytes {
            None => "all allocated".to_owned(),
            Some(0) => "all allocated, all written before".to_owned(),
            Some(bytes) => format!(
                "all allocated, {} never written: a first write there is slower (`--prewrite`)",
                ByteSize(bytes)
            ),
        };
        facts.push(Fact::ok("blocks", what));
        return;
    }
    let path = volume.path.display();
    let free = rustix::fs::statvfs(&volume.path).map_or(u64::MAX, |space| {
        space.f_bavail.saturating_mul(space.f_frsize)
    });
    let (level, advice) = if free < holes.unallocated_bytes + holes.shared_bytes {
        let advice = format!("; {} are free: free some space first", ByteSize(free));
        (Level::Fail, advice)
    } else {
        (Level::Warn, String::new())
    };
    let what = format!(
        "{path}: {holes}; a write there needs free space: {}{advice}",
        holes.remedy(&volume.path)
    );
    facts.push(Fact::new("blocks", level, what));
}

/// The volumes that the owner of a shared store serves read-only.
fn service(report: &share::Report, facts: &mut Facts) {
    for volume in &report.stats.read_only_volumes {
        let what = format!(
            "{}: in read-only service, {} puts were refused: the device refuses writes ({}). Make \
             it \
             take writes again (free space, mount, health of the device: see dmesg); the owner \
             tries every second",
            volume.path.display(),
            report.stats.puts_refused_read_only,
            volume.reason
        );
        facts.push(Fact::fail("service", what));
    }
    if report.stats.read_only_volumes.is_empty() {
        facts.push(Fact::ok("service", "every volume takes writes"));
    }
}

/// Whether a volume can be written: a read-only one passes all other checks.
pub(super) fn writable(volume: &Path, facts: &mut Facts) {
    let opened = rustix::fs::open(volume, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    if let Err(error) = opened {
        let what = format!(
            "{}: cannot be opened for writing: {error}; {}",
            volume.display(),
            remedy(error)
        );
        facts.push(Fact::fail("writable", what));
    }
}

fn in_use(superblock: &Superblock, locked: bool) -> (Level, String) {
    let holder = LockHolder::from(&superblock.holder);
    let pid = holder.pid;
    match (locked, superblock.state) {
        (true, _) => {
            let level = match holder.state {
                HolderState::Running | HolderState::OutOfSight => Level::Ok,
                HolderState::Exited => Level::Warn,
            };
            (level, format!("yes, by {holder}"))
        }
        (false, OpenState::Clean) => (Level::Ok, "no; it was closed cleanly".to_owned()),
        (false, OpenState::Open) => (
            Level::Ok,
            format!("no; process {pid} did not close it; the next open recovers it"),
        ),
    }
}

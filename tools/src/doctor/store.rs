//! The store at a path, as a survey of its superblocks and its owner show it.

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;

use larder_base::system::devices;
use larder_base::system::files::{self, FileId};
use larder_disk::probe::{Fact, Level, filesystem};
use larder_engine::{CodecChoice, HolderState, LockHolder, StoreError};
use larder_format::{FORMAT_VERSION, OpenState, Superblock};
use larder_store::share;
use larder_store::share::VolumeState;
use larder_store::volume::holes::holes;
use larder_store::volume::quotas::QuotaState;
use larder_store::volume::socket::socket_path;
use larder_store::volume::{Access, File, Volume, Volumes, places_of};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::facts::Facts;
use super::{RELEASE, beneath, remedy};
use crate::owner::{
    answering_line, damaged_line, damaged_pages_line, displaced_line, ended_line, eviction_line,
    history, lifetimes_line, monthly, on_device, pacing_line, process, stopped_line,
    unread_quotas_line,
};
use crate::place::volume_at;
use crate::refusal::explained;
use crate::size::ByteSize;

/// Age of an operation from which no check touches its volume: the owner calls it hung later.
const LATE_SECONDS: f64 = 1.0;

/// Whether the owner of the store waits for a volume. Then the facts are those of its report, and
/// of the other volumes: a check that touched that one would hang, too.
pub(super) fn is_hung(path: &Path, facts: &mut Facts) -> bool {
    let path = volume_at(path.to_owned());
    let report = match socket_path(&path).exists() {
        true => share::report(&path).ok(),
        false => None,
    };
    let is_late = |volume: &share::AnsweringVolume| volume.oldest_seconds >= LATE_SECONDS;
    let Some(report) = report.filter(|report| report.answering_volumes.iter().any(is_late)) else {
        return false;
    };
    facts.leave_out();
    served(&report, facts);
    let what = "those of the store are left out: the owner waits for a volume";
    facts.push(Fact::warn("checks", what));
    for volume in &report.answering_volumes {
        if is_late(volume) {
            let what = format!(
                "{}: left out, as an operation on it has not ended",
                on_device(volume)
            );
            facts.push(Fact::warn("volume", what));
        } else {
            describe(&volume.path, facts);
        }
    }
    true
}

/// A volume: its size, and the device and the file system beneath it with their room.
fn describe(path: &Path, facts: &mut Facts) {
    facts.examine(path);
    let file = match File::open(path, Access::ReadOnly) {
        Ok(file) => file,
        Err(error) => {
            let what = format!("{}: left out: {}", path.display(), explained(&error));
            facts.push(Fact::warn("volume", what));
            return;
        }
    };
    // A device that hangs does so in the first read. What it holds is judged with the store.
    let _ = file.superblock();
    let identity = files::identify(&file.file)
        .ok()
        .map(|(identity, _)| identity);
    let device = identity.and_then(FileId::device).and_then(devices::below);
    let device = device.unwrap_or_else(|| "an unknown device".to_owned());
    let room = match (file.is_device, rustix::fs::statvfs(path)) {
        (false, Ok(space)) => {
            let free = space.f_bavail.saturating_mul(space.f_frsize);
            format!(", {} free", ByteSize(free))
        }
        _ => String::new(),
    };
    let what = format!(
        "{}: {} on {device}, {}{room}",
        path.display(),
        ByteSize(file.bytes),
        filesystem(&*file.file),
    );
    facts.push(Fact::ok("volume", what));
}

/// Describes the volumes one after the other, so that a volume that hangs is named. What is beneath
/// the first one is known already.
fn describe_all(path: &Path, facts: &mut Facts) {
    describe(path, facts);
    let first = File::open(path, Access::ReadOnly).map(|file| file.superblock());
    let Ok(Ok(superblock)) = first else {
        return;
    };
    let further = superblock
        .volumes
        .iter()
        .skip(1)
        .filter(|entry| !entry.lost);
    for entry in further {
        // A volume that is nowhere is reported with the store.
        let mut places = places_of(entry, path, &[]);
        let found = places.find_map(|place| {
            facts.examine(&place);
            fs::metadata(&place).ok().map(|found| (place, found))
        });
        let Some((place, metadata)) = found else {
            continue;
        };
        describe(&place, facts);
        facts.of = Some(place.clone());
        beneath(&place, &metadata, facts);
        facts.of = None;
    }
    facts.examine(path);
}

/// Whether a file holds a superblock.
pub(super) fn is_there(path: &Path) -> bool {
    File::open(path, Access::ReadOnly).is_ok_and(|file| file.superblock().is_ok())
}

/// The facts of an owner's report.
fn served(report: &share::Report, facts: &mut Facts) {
    facts.push(Fact::ok("store in use", served_by(report.pid)));
    about(report, facts);
}

/// The store at a path: whole, closed, in use? `is_file`: a regular file is there.
pub(super) fn store(path: &Path, is_file: bool, facts: &mut Facts) {
    describe_all(path, facts);
    let volumes = match Volumes::open_any(path, &[], Access::ReadOnly, false) {
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
            let what = "no superblock and no segment of a store is on this device. For a new \
                device this is right: `larder create` makes a store, over other data only with \
                --force. If it was a store, `larder superblock restore` writes its superblocks \
                back, from the file of a `larder superblock save`";
            facts.push(Fact::warn("store", what));
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
                facts.push(Fact::fail("store", explained(&error)));
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
    match (report, volumes.present().next()) {
        (Some(report), _) => about(&report, facts),
        // Another holder may be writing them.
        (None, Some((_, first))) if !locked => {
            let state = first.quotas_beside_owner();
            quotas(state.as_ref().and_then(QuotaState::fault), facts);
        }
        _ => {}
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
    codec(report, facts);
    remote(report, facts);
    service(report, facts);
    places(report, facts);
    answers(report, facts);
    clients(report, facts);
    damage(report, facts);
    quotas(report.quotas.fault.as_deref(), facts);
    if let Some(line) = lifetimes_line(&report.quotas) {
        facts.push(Fact::new("lifetimes", Level::Warn, line));
    }
}

/// Quotas that cannot be read.
fn quotas(fault: Option<&str>, facts: &mut Facts) {
    if let Some(fault) = fault {
        facts.push(Fact::fail("quotas", unread_quotas_line(fault)));
    }
}

/// The damage that the owner has found.
fn damage(report: &share::Report, facts: &mut Facts) {
    let pages = damaged_pages_line(&report.stats);
    let volumes = report.damaged_volumes.iter().map(damaged_line);
    let found: Vec<String> = volumes.chain(pages).collect();
    if found.is_empty() {
        let what = "none found in the pages that were read since the owner opened the store; \
                    `larder verify --online` reads all";
        facts.push(Fact::ok("damage", what));
    }
    for what in found {
        facts.push(Fact::fail("damage", what));
    }
}

/// No file is at the path: whether a process serves one that was there.
pub(super) fn is_served_without_file(path: &Path, facts: &mut Facts) -> bool {
    let Ok(report) = share::report(path) else {
        return false;
    };
    facts.push(Fact::ok("store in use", served_by(report.pid)));
    places(&report, facts);
    true
}

/// The volumes whose files are not at their paths.
fn places(report: &share::Report, facts: &mut Facts) {
    for volume in &report.displaced_volumes {
        facts.push(Fact::fail("place", displaced_line(volume)));
    }
}

/// The clients that are stopped, and the last client that ended in the middle of puts.
fn clients(report: &share::Report, facts: &mut Facts) {
    let stopped = report.stopped_clients.iter().map(stopped_line);
    let ended = report.ended_client.iter().map(ended_line);
    for what in stopped.chain(ended) {
        facts.push(Fact::warn("clients", what));
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

/// The share of the pages of puts that the codec made smaller, and its ratio. Of `auto`, a share
/// below the whole shows that it leaves pages plain.
fn codec(report: &share::Report, facts: &mut Facts) {
    let counts = &report.totals.counts;
    let (put, plain) = (counts.bytes_put, counts.encoded_plain_bytes);
    if plain > 0 {
        let ratio = plain as f64 / counts.encoded_stored_bytes.max(1) as f64;
        let what = format!(
            "{} of {} that were put are encoded: {ratio:.2} plain bytes for each stored byte",
            ByteSize(plain),
            ByteSize(put),
        );
        facts.push(Fact::ok("codec", what));
    } else if put > 0 && report.settings.codec == CodecChoice::Bf16 {
        let what = "no page that was put got smaller: turn it off, it costs time (`--codec off`)";
        facts.push(Fact::warn("codec", what));
    }
    let undecodable = counts.misses.undecodable;
    if undecodable > 0 {
        let what = format!(
            "{undecodable} pages with right checksums could not be decoded: turn it off (`--codec \
             off`), and report the fault"
        );
        facts.push(Fact::fail("codec", what));
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
    match (locked, superblock.state) {
        (true, _) => {
            let level = match holder.state {
                HolderState::Running | HolderState::OutOfSight => Level::Ok,
                HolderState::Exited => Level::Warn,
            };
            (level, format!("yes, by {holder}"))
        }
        (false, _) => {
            let is_sound = superblock.state == OpenState::Clean;
            let level = match is_sound && superblock.history.unclosed.is_none() {
                true => Level::Ok,
                false => Level::Warn,
            };
            (
                level,
                format!("no process serves the store; {}", history(superblock)),
            )
        }
    }
}

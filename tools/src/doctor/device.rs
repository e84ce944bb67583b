//! The device under a store: its stable name, and the health of the drive.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use larder_disk::health::Health;
use larder_disk::probe::{Fact, Level};

use super::facts::Facts;
use crate::drives;
use crate::size::ByteSize;

/// Links to devices by names that stay the same after a restart.
const BY_ID: &str = "/dev/disk/by-id";

/// Used life from which the drive's replacement should be planned, in percent.
const USED_PERCENT_WARN: u8 = 80;

/// A block device as a volume: its name, and that others take it for empty.
pub(super) fn name(path: &Path, device: u64, facts: &mut Facts) {
    match stable_name(Path::new(BY_ID), device) {
        Some(name) if name == path => {
            facts.push(Fact::ok(
                "device",
                format!("{} stays its name", name.display()),
            ));
        }
        Some(name) => {
            let what = format!(
                "{} may have another name after a restart: name the store {}",
                path.display(),
                name.display()
            );
            facts.push(Fact::warn("device", what));
        }
        None => {
            let what = format!("{} has no name in {BY_ID}", path.display());
            facts.push(Fact::ok("device", what));
        }
    }
    let what = "blkid, lsblk, mkfs, pvcreate and installers see no data on a device with a store: \
        note in its label or inventory that it is in use";
    facts.push(Fact::warn("device contents", what));
}

/// The shortest link in a directory to a device.
fn stable_name(directory: &Path, device: u64) -> Option<PathBuf> {
    let links = fs::read_dir(directory).ok()?.flatten();
    let is_it = |path: &PathBuf| fs::metadata(path).is_ok_and(|found| found.rdev() == device);
    let names = links.map(|link| link.path()).filter(is_it);
    names.min_by_key(|name| (name.as_os_str().len(), name.clone()))
}

/// The health of the drives under a file system or device, where this process may ask them.
pub(super) fn health(device: u64, facts: &mut Facts) {
    let drives = drives::under(device);
    if drives.is_empty() {
        let what = "none: the volume is on no drive of this machine, but in memory, in the layer \
            of a container, or in the network";
        facts.push(Fact::ok("drive health", what));
    }
    for drive in drives {
        let name = &drive.name;
        match drive.health {
            Ok(health) => judge(name, &health, facts),
            Err(error) => {
                let advice = drives::advice(&error);
                let what = format!("{name}: not readable: {error}; {advice}");
                facts.push(Fact::ok("drive health", what));
            }
        }
    }
}

fn judge(drive: &str, health: &Health, facts: &mut Facts) {
    let mut parts = Vec::new();
    let is_worn = health
        .used_percent
        .is_some_and(|used| used >= USED_PERCENT_WARN);
    let is_short = health
        .spare_percent
        .is_some_and(|(left, least)| left <= least);
    if let Some(used) = health.used_percent {
        parts.push(format!("{used} % of its rated life used"));
    }
    if let Some((left, least)) = health.spare_percent {
        parts.push(format!("{left} % spare blocks left (least {least} %)"));
    }
    if let Some(written) = health.written_bytes {
        parts.push(format!("{} written", ByteSize(written)));
        if let Some(hours) = health.power_on_hours.filter(|hours| *hours >= 24) {
            let per_day = written / (hours / 24);
            parts.push(format!("{} a day since it was new", ByteSize(per_day)));
            if let Some(days) = health.days_left(per_day) {
                parts.push(format!("{days} days left at that rate"));
            }
        }
    }
    if let Some(errors) = health.media_errors {
        parts.push(format!("{errors} media errors"));
    }
    let told = parts.join(", ");
    let (level, advice) = match (health.is_critical, is_worn || is_short) {
        (true, _) => (Level::Fail, "; the drive reports a failure: replace it"),
        (false, true) => (Level::Warn, "; plan its replacement (docs/runbook.md#wear)"),
        (false, false) => (Level::Ok, ""),
    };
    facts.push(Fact::new(
        "drive health",
        level,
        format!("{drive}: {told}{advice}"),
    ));
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_worn_and_a_failing_drive_are_distinguished_from_a_good_one() {
        let good = Health {
            used_percent: Some(12),
            spare_percent: Some((98, 10)),
            written_bytes: Some(1 << 40),
            power_on_hours: Some(2400),
            ..Health::default()
        };
        let worn = Health {
            used_percent: Some(85),
            ..good
        };
        let failing = Health {
            is_critical: true,
            ..worn
        };
        let mut facts = Facts::default();
        for health in [good, worn, failing] {
            judge("nvme0n1", &health, &mut facts);
        }
        let levels: Vec<Level> = facts.list.iter().map(|fact| fact.level).collect();
        assert_eq!(levels, [Level::Ok, Level::Warn, Level::Fail]);
        let told = &facts.list[0].what;
        assert!(told.contains("12 % of its rated life used"), "{told}");
        assert!(told.contains("733 days left"), "{told}");
    }

    #[test]
    fn a_device_is_named_by_its_shortest_link() {
        let directory = tempfile::tempdir().unwrap();
        let null = fs::metadata("/dev/null").unwrap().rdev();
        for name in ["wwn-0x5000", "short", "other"] {
            let target = if name == "other" {
                "/dev/zero"
            } else {
                "/dev/null"
            };
            std::os::unix::fs::symlink(target, directory.path().join(name)).unwrap();
        }
        let found = stable_name(directory.path(), null);
        assert_eq!(found, Some(directory.path().join("short")));
        assert_eq!(stable_name(&directory.path().join("none"), null), None);
    }
}

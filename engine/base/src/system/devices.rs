//! The device below a file, as people know it. Found in `/sys` and in the table of mounts: no call
//! reaches a file system that may hang.

use std::fs;
use std::path::{Path, PathBuf};

/// The devices below a device number, such as `/dev/nvme0n1`; the kind and the source of the file
/// system where it is on no device of this machine. `None` if neither is known.
#[must_use]
pub fn below(device: u64) -> Option<String> {
    let drives = drives(device);
    if drives.is_empty() {
        let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
        return file_system(&mounts, device);
    }
    let paths: Vec<String> = drives.iter().map(|name| format!("/dev/{name}")).collect();
    Some(paths.join(", "))
}

/// The names of the drives under a block device, or under the device of a file system.
#[must_use]
pub fn drives(device: u64) -> Vec<String> {
    names(&Path::new("/sys/dev/block").join(number(device)))
}

fn number(device: u64) -> String {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    format!("{major}:{minor}")
}

/// The names of the drives under a block device: the disk of a partition, the members of a volume
/// of LVM or md.
fn names(node: &Path) -> Vec<String> {
    let members: Vec<PathBuf> = fs::read_dir(node.join("slaves"))
        .map(|members| members.flatten().map(|member| member.path()).collect())
        .unwrap_or_default();
    if !members.is_empty() {
        let mut all: Vec<String> = members.iter().flat_map(|member| names(member)).collect();
        all.sort();
        all.dedup();
        return all;
    }
    let Ok(real) = node.canonicalize() else {
        return Vec::new();
    };
    let disk = match real.join("partition").exists() {
        true => real.parent().map(Path::to_owned),
        false => Some(real),
    };
    let name = disk.as_deref().and_then(Path::file_name);
    name.map(|name| name.to_string_lossy().into_owned())
        .into_iter()
        .collect()
}

/// The file system with a device number, in a table of mounts: its kind and its source.
fn file_system(mounts: &str, device: u64) -> Option<String> {
    let number = number(device);
    mounts.lines().find_map(|line| {
        // `36 35 98:0 / /mnt rw,noatime shared:1 - ext4 /dev/sda1 rw`, with any number of fields
        // before the hyphen.
        let (mount, source) = line.split_once(" - ")?;
        (mount.split(' ').nth(2)? == number).then_some(())?;
        let mut fields = source.split(' ');
        let (kind, source) = (fields.next()?, fields.next()?);
        Some(format!("a file system of the kind {kind} ({source})"))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_partition_is_of_its_disk_and_a_mapped_volume_of_its_members() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::create_dir_all(at("nvme0n1/nvme0n1p1")).unwrap();
        fs::write(at("nvme0n1/nvme0n1p1/partition"), "1").unwrap();
        fs::create_dir_all(at("sda")).unwrap();
        fs::create_dir_all(at("dm-0/slaves")).unwrap();
        for (name, target) in [("nvme0n1p1", "nvme0n1/nvme0n1p1"), ("sda", "sda")] {
            std::os::unix::fs::symlink(at(target), at("dm-0/slaves").join(name)).unwrap();
        }
        assert_eq!(names(&at("nvme0n1/nvme0n1p1")), ["nvme0n1"]);
        assert_eq!(names(&at("dm-0")), ["nvme0n1", "sda"]);
        assert_eq!(names(&at("none")), [""; 0]);
    }

    #[test]
    fn a_file_system_on_no_device_is_named_by_its_kind_and_its_source() {
        let mounts = "22 1 0:20 / /proc rw - proc proc rw\n\
            36 35 0:41 / /mnt/pages rw shared:1 master:2 - nfs4 server:/pages rw,vers=4.2\n";
        let device = rustix::fs::makedev(0, 41);
        let said = file_system(mounts, device).unwrap();
        assert_eq!(said, "a file system of the kind nfs4 (server:/pages)");
        assert_eq!(file_system(mounts, rustix::fs::makedev(0, 4)), None);
    }
}

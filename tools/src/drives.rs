//! The drives under a store, and the health that they report.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use larder_disk::health::{Health, of_device};

/// A drive.
pub struct Drive {
    /// Its name below `/dev`.
    pub name: String,
    /// Its own report. An error if it may not be asked, or has none.
    pub health: io::Result<Health>,
}

/// The remedy for a drive whose report cannot be read.
pub fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied if !rustix::process::geteuid().is_root() => {
            "run as root to read it"
        }
        io::ErrorKind::PermissionDenied => {
            "the report takes the capability CAP_SYS_ADMIN, in a container too"
        }
        io::ErrorKind::NotFound => {
            "its device node is not here: a container, or PrivateDevices= of a unit, hides it"
        }
        _ => "a virtual drive, and some controllers, have no such report",
    }
}

/// The drives under a block device, or under the device of a file system.
pub fn under(device: u64) -> Vec<Drive> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let node = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let drive = |name: String| Drive {
        health: of_device(&Path::new("/dev").join(&name)),
        name,
    };
    names(&node).into_iter().map(drive).collect()
}

/// The drives under some volumes. Reads no volume: a volume that hangs would keep this process.
pub fn under_all(volumes: &[PathBuf]) -> Vec<Drive> {
    let found = volumes.iter().filter_map(|path| fs::metadata(path).ok());
    let mut devices: Vec<u64> = found
        .map(|found| match found.file_type().is_block_device() {
            true => found.rdev(),
            false => found.dev(),
        })
        .collect();
    devices.sort_unstable();
    devices.dedup();
    let mut drives: Vec<Drive> = devices.into_iter().flat_map(under).collect();
    drives.sort_by(|a, b| a.name.cmp(&b.name));
    drives.dedup_by(|a, b| a.name == b.name);
    drives
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
}

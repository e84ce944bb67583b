//! The drives under a store, and the health that they report.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use larder_base::system::devices;
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
            "to read it takes the capability CAP_SYS_ADMIN: run as root"
        }
        io::ErrorKind::PermissionDenied => {
            "to read it takes the capability CAP_SYS_ADMIN, also in a container"
        }
        io::ErrorKind::NotFound => {
            "its device node is not here: a container, or PrivateDevices= of a unit, hides it"
        }
        _ => "a virtual drive, and some controllers, have no such report",
    }
}

/// The drives under a block device, or under the device of a file system.
pub fn under(device: u64) -> Vec<Drive> {
    let drive = |name: String| Drive {
        health: of_device(&Path::new("/dev").join(&name)),
        name,
    };
    devices::drives(device).into_iter().map(drive).collect()
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

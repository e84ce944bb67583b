//! The permissions of a store's files, and of its directory.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Gid, Mode, OFlags, fchmod, fchown, openat};

use crate::failure::Failure;

/// The mode of files that a group shares.
const SHARED_MODE: u32 = 0o660;

/// New files in a directory get its group (`S_ISGID`).
const KEEPS_GROUP: u32 = 0o2000;

/// The permissions to give, if any.
pub struct Access {
    mode: Option<u32>,
    group: Option<u32>,
}

/// Permission bits on the command line.
pub fn mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok();
    let mode = mode.filter(|mode| *mode <= 0o777 && mode & 0o600 == 0o600);
    mode.ok_or_else(|| "permission bits in octal, with 6 or 7 for the owner: 660".to_owned())
}

impl Access {
    /// A group's files have a mode too.
    pub fn new(mode: Option<u32>, group: Option<u32>) -> Access {
        Access {
            mode: mode.or(group.map(|_| SHARED_MODE)),
            group,
        }
    }

    /// Refuses devices, whose permissions are those of the system.
    pub fn check(&self, first: &Path, others: &[PathBuf]) -> Result<(), Failure> {
        let is_device = |path: &&Path| {
            fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device())
        };
        let others = others.iter().map(PathBuf::as_path);
        match std::iter::once(first).chain(others).find(is_device) {
            Some(device) if self.mode.is_some() => Err(Failure::usage(format!(
                "{}: --mode and --group are of files; the permissions of a device are set by \
                 rules of udev",
                device.display()
            ))),
            _ => Ok(()),
        }
    }

    /// Gives all volumes their permissions, and with a group the first volume's directory.
    pub fn give(&self, volumes: &[PathBuf]) -> Result<(), Failure> {
        let Some(mode) = self.mode else {
            return Ok(());
        };
        if let (Some(first), Some(_)) = (volumes.first(), self.group) {
            let directory = first.parent().filter(|path| !path.as_os_str().is_empty());
            self.set(directory.unwrap_or(Path::new(".")), directory_mode(mode))?;
        }
        volumes.iter().try_for_each(|path| self.set(path, mode))
    }

    /// Sets group and mode of the file or directory that is at the path itself: a member of the
    /// group may have put a link there.
    fn set(&self, path: &Path, mode: u32) -> Result<(), Failure> {
        let failure = |what: &str, error: rustix::io::Errno| {
            Failure::environment(format!(
                "{}: {what}: {error}; run it as the owner of the file, a member of the group, or \
                 as root",
                path.display()
            ))
        };
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = openat(CWD, path, flags, Mode::empty());
        let file = fs::File::from(file.map_err(|error| failure("opening it", error))?);
        let found = file.metadata().map_err(|error| {
            Failure::environment(format!("{}: looking at it: {error}", path.display()))
        })?;
        if let Some(group) = self.group
            && found.gid() != group
        {
            let group = Some(Gid::from_raw(group));
            // This clears the bits above the permissions, so the mode comes after it.
            fchown(&file, None, group).map_err(|error| failure("setting its group", error))?;
        } else if found.permissions().mode() & 0o7777 == mode {
            // A later start of a container needs no right to change it.
            return Ok(());
        }
        fchmod(&file, Mode::from_raw_mode(mode)).map_err(|error| failure("setting its mode", error))
    }
}

/// The directory's mode: a reader of its files may search it, and new files get its group.
fn directory_mode(files: u32) -> u32 {
    KEEPS_GROUP | files | (files & 0o444) >> 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_can_be_searched_by_the_readers_of_its_files() {
        for (files, directory) in [(0o660, 0o2770), (0o640, 0o2750), (0o600, 0o2700)] {
            assert_eq!(directory_mode(files), directory);
        }
    }

    #[test]
    fn a_mode_is_octal_and_lets_the_owner_read_and_write() {
        assert_eq!(mode("660"), Ok(0o660));
        assert_eq!(mode("0600"), Ok(0o600));
        for wrong in ["", "rw-rw----", "440", "1777", "680", "-660"] {
            assert!(mode(wrong).is_err(), "{wrong}");
        }
    }
}

//! A volume in a file system that can be filled: a sparse file in memory.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::support::honest::skipped;
use crate::support::text;

/// See the module. Unmounts when it is dropped.
pub struct Room {
    mounted: PathBuf,
}

/// A full file system, until it is dropped.
pub struct Filled(PathBuf);

impl Room {
    /// Moves the volume at `path` into such a file system, without its empty blocks: `path` becomes
    /// a link to it. `None` where none can be mounted, which is reported.
    pub fn mount(path: &Path) -> Option<Room> {
        let mounted = path.with_extension("mounted");
        std::fs::create_dir(&mounted).unwrap();
        let options = Some("size=64m");
        let none = None::<&str>;
        if let Err(error) = mount(none, &mounted, Some("tmpfs"), MsFlags::empty(), options) {
            skipped("the incident of a full file system", error);
            return None;
        }
        let room = Room { mounted };
        let volume = room.mounted.join("volume");
        let mut copy = Command::new("cp");
        let copy = copy.args(["--sparse=always", text(path), text(&volume)]);
        assert!(copy.status().unwrap().success());
        std::fs::remove_file(path).unwrap();
        symlink(&volume, path).unwrap();
        Some(room)
    }

    /// Fills it.
    pub fn fill(&self) -> Filled {
        let filler = self.mounted.join("filler");
        let mut file = File::create(&filler).unwrap();
        while file.write_all(&[1; 1 << 16]).is_ok() {}
        Filled(filler)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let _ = umount2(&self.mounted, MntFlags::MNT_DETACH);
    }
}

impl Drop for Filled {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

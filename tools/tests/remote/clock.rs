//! A file system whose clock differs from that of the node: it stamps all that is made in it with
//! one time.
//!
//! Needs FUSE and the right to mount.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, ReplyAttr, ReplyCreate, ReplyDirectory, ReplyEmpty, ReplyEntry, Request,
};

use crate::support::honest::skipped;

/// The kernel asks each time.
const BELIEF: Duration = Duration::ZERO;

struct Entry {
    parent: INodeNo,
    name: String,
    kind: FileType,
    modified: SystemTime,
}

type Entries = Arc<Mutex<BTreeMap<u64, Entry>>>;

/// See the module.
pub struct Clock {
    entries: Entries,
    /// Unmounts when it is dropped.
    _session: BackgroundSession,
}

impl Clock {
    /// With these files, of these ages. `None` without FUSE.
    pub fn mount(at: &Path, now: SystemTime, files: &[(&str, Duration)]) -> Option<Clock> {
        let entries = Entries::default();
        let stamped = Stamped {
            now,
            entries: Arc::clone(&entries),
        };
        for (path, age) in files {
            let (directories, name) = path.rsplit_once('/').unwrap();
            let mut parent = INodeNo::ROOT;
            for directory in directories.split('/') {
                parent = match stamped.find(parent, directory) {
                    Some(found) => found,
                    None => stamped.add(parent, directory, FileType::Directory, now),
                };
            }
            stamped.add(parent, name, FileType::RegularFile, now - *age);
        }
        match fuser::spawn_mount(stamped, at, &Config::default()) {
            Ok(session) => Some(Clock {
                entries,
                _session: session,
            }),
            Err(error) => {
                let why = format!("no FUSE file system can be mounted: {error}");
                skipped("the ages of files by another clock", why);
                None
            }
        }
    }

    /// The names of all files.
    pub fn files(&self) -> Vec<String> {
        let entries = self.entries.lock().unwrap();
        let files = entries
            .values()
            .filter(|entry| entry.kind == FileType::RegularFile);
        let mut names: Vec<String> = files.map(|file| file.name.clone()).collect();
        names.sort_unstable();
        names
    }
}

struct Stamped {
    now: SystemTime,
    entries: Entries,
}

impl Stamped {
    fn find(&self, parent: INodeNo, name: &str) -> Option<INodeNo> {
        let entries = self.entries.lock().unwrap();
        let mut entries = entries.iter();
        entries.find_map(|(inode, entry)| {
            (entry.parent == parent && entry.name == name).then_some(INodeNo(*inode))
        })
    }

    fn add(&self, parent: INodeNo, name: &str, kind: FileType, modified: SystemTime) -> INodeNo {
        let mut entries = self.entries.lock().unwrap();
        let inode = entries.keys().last().map_or(2, |last| last + 1);
        let entry = Entry {
            parent,
            name: name.to_owned(),
            kind,
            modified,
        };
        entries.insert(inode, entry);
        INodeNo(inode)
    }

    fn attributes(&self, inode: INodeNo) -> FileAttr {
        let entries = self.entries.lock().unwrap();
        let entry = entries.get(&inode.0);
        let kind = entry.map_or(FileType::Directory, |entry| entry.kind);
        let modified = entry.map_or(self.now, |entry| entry.modified);
        FileAttr {
            ino: inode,
            size: 0,
            blocks: 0,
            atime: modified,
            mtime: modified,
            ctime: modified,
            crtime: modified,
            kind,
            perm: 0o755,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl Filesystem for Stamped {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.find(parent, name.to_str().unwrap()) {
            Some(inode) => reply.entry(&BELIEF, &self.attributes(inode), Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&BELIEF, &self.attributes(inode));
    }

    fn readdir(
        &self,
        _: &Request,
        parent: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let entries = self.entries.lock().unwrap();
        for (inode, entry) in entries.range(offset..) {
            if entry.parent == parent
                && reply.add(INodeNo(*inode), inode + 1, entry.kind, &entry.name)
            {
                break;
            }
        }
        reply.ok();
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        _: u32,
        _: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        let name = name.to_str().unwrap();
        let inode = self.add(parent, name, FileType::RegularFile, self.now);
        let attributes = self.attributes(inode);
        let flags = FopenFlags::empty();
        reply.created(&BELIEF, &attributes, Generation(0), FileHandle(0), flags);
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        match self.find(parent, name.to_str().unwrap()) {
            Some(inode) => {
                self.entries.lock().unwrap().remove(&inode.0);
                reply.ok();
            }
            None => reply.error(Errno::ENOENT),
        }
    }
}

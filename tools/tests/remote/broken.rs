//! A directory with one object that cannot be looked at, opened or read.
//!
//! Needs FUSE and the right to mount.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEntry,
    ReplyOpen, Request,
};

use crate::support::honest::skipped;

const OBJECT: INodeNo = INodeNo(2);

/// The kernel asks each time.
const BELIEF: Duration = Duration::ZERO;

/// The call that fails, and its error.
#[derive(Clone, Copy)]
pub enum Fault {
    Stat(Errno),
    Open(Errno),
    Read(Errno),
    /// Of the directory.
    List(Errno),
}

/// See the module.
pub struct Broken {
    /// Unmounts when it is dropped.
    _session: BackgroundSession,
}

impl Broken {
    /// Hides the directory of an object behind one whose object has the fault. `None` without FUSE.
    pub fn over(object: &Path, fault: Fault) -> Option<Broken> {
        let place: PathBuf = object.parent().unwrap().to_owned();
        let broken = Directory {
            name: object.file_name().unwrap().to_owned(),
            bytes: object.metadata().unwrap().len(),
            fault,
        };
        match fuser::spawn_mount(broken, place, &Config::default()) {
            Ok(session) => Some(Broken { _session: session }),
            Err(error) => {
                let why = format!("no FUSE file system can be mounted: {error}");
                skipped("objects of a remote that cannot be read", why);
                None
            }
        }
    }
}

struct Directory {
    name: OsString,
    bytes: u64,
    fault: Fault,
}

impl Directory {
    fn attributes(&self, inode: INodeNo) -> FileAttr {
        let (kind, size) = match inode == OBJECT {
            true => (FileType::RegularFile, self.bytes),
            false => (FileType::Directory, 0),
        };
        FileAttr {
            ino: inode,
            size,
            blocks: size.div_ceil(512),
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
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

impl Filesystem for Directory {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.fault {
            _ if name != self.name => reply.error(Errno::ENOENT),
            Fault::Stat(error) => reply.error(error),
            _ => reply.entry(&BELIEF, &self.attributes(OBJECT), Generation(0)),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&BELIEF, &self.attributes(inode));
    }

    fn opendir(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match self.fault {
            Fault::List(error) => reply.error(error),
            _ => reply.opened(FileHandle(0), FopenFlags::empty()),
        }
    }

    fn readdir(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        if offset == 0 {
            let _ = reply.add(OBJECT, 1, FileType::RegularFile, &self.name);
        }
        reply.ok();
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match self.fault {
            Fault::Open(error) => reply.error(error),
            _ => reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO),
        }
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.fault {
            Fault::Read(error) => reply.error(error),
            _ => reply.data(&[]),
        }
    }
}

//! A FUSE file system of one file, whose reads, writes and syncs a test carries out.
//!
//! The kernel caches nothing of the file (direct I/O), and locks on it are its own affair.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyWrite, Request, WriteFlags,
};
use nix::mount::{MntFlags, umount2};

/// The file's name in the mounted directory.
pub const NAME: &str = "volume";

const FILE: INodeNo = INodeNo(2);

/// How long the kernel may cache the attributes of the file.
const BELIEF: Duration = Duration::from_secs(600);

/// The file.
pub trait OneFile: Send + Sync + 'static {
    fn bytes(&self) -> u64;

    fn opened(&self) {}

    fn closed(&self) {}

    fn read(&self, offset: u64, size: u32) -> Result<Vec<u8>, Errno>;

    /// Returns the number of bytes written.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<u32, Errno>;

    fn sync(&self) -> Result<(), Errno>;
}

/// A mounted file. Unmounts when it is dropped, also while a process has the file open.
pub struct Mount {
    directory: PathBuf,
    _session: BackgroundSession,
}

/// Mounts a file at a directory.
///
/// # Errors
/// Where the system offers no FUSE, or not to this user.
pub fn mount(file: Arc<impl OneFile>, directory: &Path) -> io::Result<Mount> {
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("larder-test".to_owned())];
    Ok(Mount {
        _session: fuser::spawn_mount(Mounted(file), directory, &config)?,
        directory: directory.to_owned(),
    })
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = umount2(&self.directory, MntFlags::MNT_DETACH);
    }
}

struct Mounted<F>(Arc<F>);

impl<F: OneFile> Mounted<F> {
    fn attributes(&self, inode: INodeNo) -> Result<FileAttr, Errno> {
        let (kind, size, links) = match inode {
            INodeNo::ROOT => (FileType::Directory, 0, 2),
            FILE => (FileType::RegularFile, self.0.bytes(), 1),
            _ => return Err(Errno::ENOENT),
        };
        Ok(FileAttr {
            ino: inode,
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm: 0o700,
            nlink: links,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

impl<F: OneFile> Filesystem for Mounted<F> {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.attributes(FILE) {
            Ok(found) if parent == INodeNo::ROOT && name == NAME => {
                reply.entry(&BELIEF, &found, Generation(0));
            }
            Ok(_) => reply.error(Errno::ENOENT),
            Err(error) => reply.error(error),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(inode) {
            Ok(found) => reply.attr(&BELIEF, &found),
            Err(error) => reply.error(error),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.0.opened();
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.0.closed();
        reply.ok();
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.0.read(offset, size) {
            Ok(bytes) => reply.data(&bytes),
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.0.write(offset, data) {
            Ok(written) => reply.written(written),
            Err(error) => reply.error(error),
        }
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        match self.0.sync() {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }
}

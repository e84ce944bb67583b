//! A volume that is slow or hangs: a FUSE file system that serves one file of another one.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry,
    ReplyOpen, ReplyWrite, Request, WriteFlags,
};

use crate::support::honest::skipped;

const FILE: INodeNo = INodeNo(2);

/// The file's name in the mounted directory.
const NAME: &str = "volume";

/// How long the kernel may cache the attributes of the file.
const BELIEF: Duration = Duration::from_secs(600);

/// How the volume answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    Full,
    /// At so many bytes per second.
    Slow(u64),
    /// Not at all.
    Hung,
}

/// A mounted volume.
pub struct Ill {
    served: Arc<Served>,
    _session: BackgroundSession,
}

pub struct Served {
    file: File,
    bytes: u64,
    pace: Mutex<Pace>,
    changed: Condvar,
}

impl Ill {
    /// Puts a file system of this kind between the store and its volume: `path` becomes a link to
    /// the file in it. `None` where there is no FUSE, which is reported.
    pub fn mount(path: &Path) -> Option<Ill> {
        let backing = path.with_extension("backing");
        let mounted = path.with_extension("mounted");
        std::fs::rename(path, &backing).unwrap();
        std::fs::create_dir(&mounted).unwrap();
        let file = File::options().read(true).write(true).open(&backing);
        let file = file.unwrap();
        let served = Arc::new(Served {
            bytes: file.metadata().unwrap().len(),
            file,
            pace: Mutex::new(Pace::Full),
            changed: Condvar::new(),
        });
        match fuser::spawn_mount(Mounted(served.clone()), &mounted, &Config::default()) {
            Ok(session) => {
                symlink(mounted.join(NAME), path).unwrap();
                Some(Ill {
                    served,
                    _session: session,
                })
            }
            Err(error) => {
                let why = format!("no FUSE file system can be mounted: {error}");
                skipped("incidents of a slow and of a hung volume", why);
                None
            }
        }
    }

    /// Answers at this pace until the illness is dropped: else a test that fails would wait for
    /// processes that wait for the volume.
    pub fn falls(&self, pace: Pace) -> Illness<'_> {
        self.served.set(pace);
        Illness(&self.served)
    }
}

/// See [`Ill::falls`].
pub struct Illness<'a>(&'a Served);

impl Drop for Illness<'_> {
    fn drop(&mut self) {
        self.0.set(Pace::Full);
    }
}

impl Served {
    fn set(&self, pace: Pace) {
        *self.pace.lock().unwrap() = pace;
        self.changed.notify_all();
    }

    /// Waits as long as the volume takes for so many bytes.
    fn wait(&self, bytes: usize) {
        let pace = self.pace.lock().unwrap();
        let is_hung = |pace: &mut Pace| *pace == Pace::Hung;
        let pace = *self.changed.wait_while(pace, is_hung).unwrap();
        if let Pace::Slow(rate) = pace {
            // The file system itself is the slow device: this is no wait of the test.
            let time = Duration::from_secs_f64(bytes as f64 / rate as f64);
            let pace = self.pace.lock().unwrap();
            let is_slow = |now: &mut Pace| *now == Pace::Slow(rate);
            drop(
                self.changed
                    .wait_timeout_while(pace, time, is_slow)
                    .unwrap(),
            );
        }
    }
}

struct Mounted(Arc<Served>);

impl Mounted {
    fn attributes(&self, inode: INodeNo) -> Option<FileAttr> {
        let (kind, size, links) = match inode {
            INodeNo::ROOT => (FileType::Directory, 0, 2),
            FILE => (FileType::RegularFile, self.0.bytes, 1),
            _ => return None,
        };
        Some(FileAttr {
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

impl Filesystem for Mounted {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.attributes(FILE) {
            Some(found) if parent == INodeNo::ROOT && name == NAME => {
                reply.entry(&BELIEF, &found, Generation(0));
            }
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(inode) {
            Some(found) => reply.attr(&BELIEF, &found),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
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
        let end = self.0.bytes.min(offset + u64::from(size));
        let mut bytes = vec![0; usize::try_from(end.saturating_sub(offset)).unwrap()];
        self.0.wait(bytes.len());
        match self.0.file.read_exact_at(&mut bytes, offset) {
            Ok(()) => reply.data(&bytes),
            Err(error) => reply.error(error.into()),
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
        self.0.wait(data.len());
        match self.0.file.write_all_at(data, offset) {
            Ok(()) => reply.written(u32::try_from(data.len()).unwrap()),
            Err(error) => reply.error(error.into()),
        }
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.0.wait(0);
        reply.ok();
    }
}

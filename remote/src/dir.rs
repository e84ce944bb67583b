//! A directory as a remote: a mounted 3FS, CephFS, Lustre or NFS.
//!
//! The directory itself must exist: a file system that is not mounted must not become files of the
//! directory beneath it. An object gets its name by a hard link to a file that is complete and
//! synced. So no reader sees a part of one, and of several writers one succeeds. Files that a crash
//! left without their name are removed by the next listing, an hour later.
//!
//! Nodes may have different users. So objects and directories get their permissions from the root,
//! whatever the umask. An object that a node may not read is absent for this node; a root that it
//! may not use is an error.
//!
//! A mounted file system that does not answer blocks its callers for ever. So each call runs on a
//! thread of its own, and its caller waits until the deadline, or for the next step of a listing.
//! Threads that wait for the file system are bounded: beyond that calls fail at once.

use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, Read, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use larder_format::Fingerprint;
use larder_sync::descriptors;
use tempfile::NamedTempFile;

use crate::buffer::Buffer;
use crate::remote::{Listed, Published, Remote, RemoteError, leave_out};
use crate::run::RunName;

/// Most calls that wait for the file system.
const CALLS_MAX: usize = 64;

/// Begins the name of a file that is being written.
const UNFINISHED: &str = ".unfinished-";

/// After this time no process writes such a file any more.
const UNFINISHED_AGE: Duration = Duration::from_hours(1);

/// Parts of the path of an object. Directories below are not walked: another writer of the remote
/// may make any number of them.
const PARTS: usize = 4;

/// Steps of a listing that are made and not taken yet.
const STEPS_AHEAD: usize = 1000;

/// Bytes that are read between two looks at the deadline.
const PIECE: usize = 1 << 20;

/// Permissions of an object: its owner reads and writes it, others as the root lets them read.
const OF_OWNER: u32 = 0o600;
const TO_READ: u32 = 0o444;

/// Objects in a directory.
pub struct Dir {
    root: PathBuf,
    calls: Arc<AtomicUsize>,
}

/// A call that waits for the file system.
struct Call(Arc<AtomicUsize>);

impl Drop for Call {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Dir {
    /// Objects below a directory, which must exist. Nothing is created before the first object.
    #[must_use]
    pub fn new(root: PathBuf) -> Dir {
        let calls = Arc::default();
        Dir { root, calls }
    }

    /// Begins a call on a thread of its own.
    fn begin(&self, work: impl FnOnce(&Path) + Send + 'static) -> Result<(), RemoteError> {
        let waiting = self.calls.fetch_add(1, Ordering::AcqRel);
        let call = Call(Arc::clone(&self.calls));
        if waiting >= CALLS_MAX {
            let reason = format!("{CALLS_MAX} calls wait for {}", self.root.display());
            return Err(RemoteError::Overloaded(reason));
        }
        let root = self.root.clone();
        let spawned = thread::Builder::new()
            .name("larder-remote-dir".to_owned())
            .spawn(move || {
                work(&root);
                drop(call);
            });
        let failed = |error| RemoteError::Failed(format!("starting a thread: {error}"));
        spawned.map(drop).map_err(failed)
    }

    fn call<T: Send + 'static>(
        &self,
        deadline: Instant,
        work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
    ) -> Result<T, RemoteError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.begin(move |root| {
            // The caller may have left at its deadline.
            let _ = sender.send(work(root));
        })?;
        let left = deadline.saturating_duration_since(Instant::now());
        self.answer(receiver.recv_timeout(left))
    }

    fn answer<T>(&self, answer: Result<io::Result<T>, RecvTimeoutError>) -> Result<T, RemoteError> {
        match answer {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(self.failed(&error)),
            Err(RecvTimeoutError::Timeout) => Err(RemoteError::Deadline),
            Err(RecvTimeoutError::Disconnected) => {
                Err(RemoteError::Failed("the call ended early".to_owned()))
            }
        }
    }

    fn failed(&self, error: &io::Error) -> RemoteError {
        let reason = format!("{}: {error}", self.root.display());
        match error.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                RemoteError::Denied(reason)
            }
            io::ErrorKind::NotFound => RemoteError::Missing(reason),
            io::ErrorKind::TimedOut => RemoteError::Deadline,
            _ => RemoteError::Failed(reason),
        }
    }
}

impl Remote for Dir {
    fn holds(&self, run: &RunName, deadline: Instant) -> Result<bool, RemoteError> {
        let name = run.to_string();
        self.call(deadline, move |root| {
            let path = root.join(name);
            let found = open_to_us(root, &path, path.symlink_metadata())?;
            if found.is_none() {
                root.metadata()?;
            }
            Ok(found.is_some_and(|found| found.is_file()))
        })
    }

    fn fetch(
        &self,
        run: &RunName,
        bytes_max: usize,
        deadline: Instant,
    ) -> Result<Option<Buffer>, RemoteError> {
        let name = run.to_string();
        let fetched = self.call(deadline, move |root| {
            let path = root.join(name);
            let Some(file) = open_to_us(root, &path, open(&path))? else {
                root.metadata()?;
                return Ok(None);
            };
            let found = file.metadata()?;
            let bytes = usize::try_from(found.len()).unwrap_or(usize::MAX);
            if !found.is_file() || bytes > bytes_max {
                return Ok(None);
            }
            Ok(Some(read(file, bytes, deadline)?))
        })?;
        fetched.transpose()
    }

    fn publish(
        &self,
        run: &RunName,
        object: Buffer,
        deadline: Instant,
    ) -> Result<Published, RemoteError> {
        let name = run.to_string();
        self.call(deadline, move |root| {
            let path = root.join(&name);
            if is_taken(&path)? {
                return Ok(Published::Present);
            }
            let of_root = root.metadata()?.permissions();
            let directory = path.parent().unwrap_or(root);
            if !directory.try_exists()? {
                let parents = name.match_indices('/').map(|(at, _)| &name[..at]);
                for parent in parents {
                    make(&root.join(parent), of_root.clone())?;
                }
            }
            let mut file = unfinished(directory)?;
            file.write_all(&object)?;
            let mode = OF_OWNER | of_root.mode() & TO_READ;
            let permissions = Permissions::from_mode(mode);
            file.as_file().set_permissions(permissions)?;
            file.as_file().sync_all()?;
            match fs::hard_link(file.path(), &path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    return Ok(Published::Present);
                }
                Err(error) => return Err(error),
            }
            File::open(directory)?.sync_all()?;
            Ok(Published::Created)
        })
    }

    fn remove(&self, run: &RunName, deadline: Instant) -> Result<(), RemoteError> {
        let name = run.to_string();
        self.call(deadline, move |root| {
            absent(fs::remove_file(root.join(name))).map(|_| ())
        })
    }

    fn list(
        &self,
        within: Option<Fingerprint>,
        each: &mut dyn FnMut(Listed) -> ControlFlow<()>,
        patience: Duration,
    ) -> Result<(), RemoteError> {
        let prefix = RunName::prefix(within);
        let (steps, receiver) = mpsc::sync_channel(STEPS_AHEAD);
        self.begin(move |root| {
            let depth = prefix.split('/').count();
            // Of a remote without objects there is the root alone.
            let walked = root
                .metadata()
                .and_then(|_| walk(root, &root.join(prefix), depth, &steps));
            // The receiver may have enough.
            let _ = steps.send(walked.map(|()| Step::End));
        })?;
        loop {
            match self.answer(receiver.recv_timeout(patience))? {
                Step::Object(listed) if each(listed).is_break() => return Ok(()),
                Step::Object(_) | Step::Other => {}
                Step::End => return Ok(()),
            }
        }
    }
}

/// Opens a file. Another writer of the remote may have put a pipe or a link in its place: a pipe
/// would block the thread for ever, and a link leads out of the remote.
fn open(path: &Path) -> io::Result<File> {
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
    let opened = File::options().read(true).custom_flags(flags).open(path);
    opened.map_err(|error| match error.raw_os_error() {
        // A link, or a socket.
        Some(libc::ELOOP | libc::ENXIO) => io::ErrorKind::NotFound.into(),
        _ => error,
    })
}

/// Whether a name is taken: by an object, or by something else that another writer has made.
fn is_taken(path: &Path) -> io::Result<bool> {
    Ok(absent(path.symlink_metadata())?.is_some())
}

/// So many bytes of a file, or fewer if it has been cut: another writer of the remote may be
/// hostile. Ends at the deadline, since the caller has left by then.
fn read(
    mut file: File,
    bytes: usize,
    deadline: Instant,
) -> io::Result<Result<Buffer, RemoteError>> {
    let mut object = match Buffer::of(bytes) {
        Ok(object) => object,
        Err(error) => return Ok(Err(error)),
    };
    let mut filled = 0;
    while filled < bytes {
        in_time(deadline)?;
        let end = bytes.min(filled + PIECE);
        match file.read(&mut object[filled..end]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    object.truncate(filled);
    Ok(Ok(object))
}

fn in_time(deadline: Instant) -> io::Result<()> {
    match Instant::now() < deadline {
        true => Ok(()),
        false => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// Makes a directory with these permissions.
fn make(directory: &Path, permissions: Permissions) -> io::Result<()> {
    match fs::create_dir(directory) {
        Ok(()) => fs::set_permissions(directory, permissions),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// The outcome, with `None` if there is no such file, or if this node alone may not use it.
fn open_to_us<T>(root: &Path, path: &Path, outcome: io::Result<T>) -> io::Result<Option<T>> {
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            // A look through the root, not at it.
            root.join(".").metadata()?;
            leave_out(&path.display(), &error);
            Ok(None)
        }
        outcome => absent(outcome),
    }
}

/// The outcome, with `None` if there is no such file.
fn absent<T>(outcome: io::Result<T>) -> io::Result<Option<T>> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// A file without its name yet, removed when it is dropped.
fn unfinished(directory: &Path) -> io::Result<NamedTempFile> {
    descriptors::cover()?;
    tempfile::Builder::new()
        .prefix(UNFINISHED)
        .tempfile_in(directory)
}

/// A step of a listing.
enum Step {
    Object(Listed),
    /// A look at something else. The file system answers.
    Other,
    End,
}

/// Lists the objects below a directory of `depth` parts. Ends early when its steps are not received
/// any more.
fn walk(
    root: &Path,
    directory: &Path,
    depth: usize,
    steps: &SyncSender<io::Result<Step>>,
) -> io::Result<()> {
    let Some(entries) = open_to_us(root, directory, fs::read_dir(directory))? else {
        return Ok(());
    };
    for entry in entries {
        let entry = entry?;
        let path = entry.path();
        let found = open_to_us(root, &path, entry.metadata())?;
        let listed = found.as_ref().and_then(|found| listed(root, &path, found));
        let step = listed.map_or(Step::Other, Step::Object);
        steps
            .send(Ok(step))
            .map_err(|_| io::ErrorKind::BrokenPipe)?;
        if found.is_some_and(|found| found.is_dir()) && depth + 1 < PARTS {
            walk(root, &path, depth + 1, steps)?;
        }
    }
    Ok(())
}

/// The object in a file. Removes the file if a crash has left it.
fn listed(root: &Path, path: &Path, found: &Metadata) -> Option<Listed> {
    if !found.is_file() {
        return None;
    }
    let modified = found.modified().unwrap_or(UNIX_EPOCH);
    if path.file_name()?.to_string_lossy().starts_with(UNFINISHED) {
        let age = SystemTime::now().duration_since(modified);
        if age.is_ok_and(|age| age > UNFINISHED_AGE) {
            // Another process may have removed it, or only its owner may remove it.
            let _ = fs::remove_file(path);
        }
        return None;
    }
    let name = path.strip_prefix(root).ok()?.to_str()?;
    let created = modified.duration_since(UNIX_EPOCH);
    let created = created.map_or(0, |since| since.as_secs());
    Listed::of(name, found.len(), created)
}

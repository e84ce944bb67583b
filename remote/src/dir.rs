//! A directory as a remote: a mounted 3FS, CephFS, Lustre or NFS.
//!
//! The directory itself must exist and have the mark, the directory `v1`: a file system that is not
//! mounted must not become files of the directory beneath it. An object gets its name by a hard
//! link to a file that is complete and synced. So no reader sees a part of one, and of several
//! writers one succeeds. Files that a crash left without their name are removed by a listing, an
//! hour later. Their age is taken from the clock of the file system alone: the clock of a node may
//! differ from it.
//!
//! Another writer of the remote may make links. One in place of an object is no object, and one in
//! place of a directory is an error: below the root no link is followed out of the remote.
//!
//! Nodes may have different users. So objects and directories get their permissions from the root,
//! whatever the umask.
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
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use larder_base::runtime::Instant;
use larder_engine::CodecChoice;
use larder_format::Fingerprint;
use larder_sync::descriptors;
use tempfile::NamedTempFile;

use crate::buffer::Buffer;
use crate::error::RemoteError;
use crate::remote::{Listed, Published, Remote, Unreadable, codec_of};
use crate::run::{CODEC, CODEC_BYTES_MAX, RunName, USED, VERSION};

/// Most calls that wait for the file system.
const CALLS_MAX: usize = 96;

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

/// The operation that reads the attributes of a file.
const LOOKING: &str = "looking at it";

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
        work: impl FnOnce(&Path) -> Result<T, RemoteError> + Send + 'static,
    ) -> Result<T, RemoteError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.begin(move |root| {
            // The caller may have left at its deadline.
            let _ = sender.send(work(root));
        })?;
        let left = deadline.saturating_duration_since(Instant::now());
        answer(receiver.recv_timeout(left))
    }
}

fn answer<T>(answer: Result<Result<T, RemoteError>, RecvTimeoutError>) -> Result<T, RemoteError> {
    match answer {
        Ok(answer) => answer,
        Err(RecvTimeoutError::Timeout) => Err(RemoteError::Deadline),
        Err(RecvTimeoutError::Disconnected) => {
            Err(RemoteError::Failed("the call ended early".to_owned()))
        }
    }
}

/// The failure of an operation on this path.
fn failed(doing: &str, path: &Path, error: &io::Error) -> RemoteError {
    let reason = format!("{}: {doing}: {error}", path.display());
    match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => RemoteError::Denied(
            format!("{reason}; check the permissions of the directory, and how it is mounted"),
        ),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => RemoteError::Failed(format!(
            "{reason}; free some space, or remove old objects with `larder remote prune`"
        )),
        io::ErrorKind::TimedOut => RemoteError::Deadline,
        _ => RemoteError::Failed(reason),
    }
}

/// Looks through the root, and not at its entry in the directory above.
fn look_at_root(root: &Path) -> Result<(), RemoteError> {
    match root.join(".").metadata() {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(RemoteError::Missing(format!("{}: {error}", root.display())))
        }
        Err(error) => Err(failed(LOOKING, root, &error)),
    }
}

fn look_at_mark(root: &Path) -> Result<(), RemoteError> {
    look_at_root(root)?;
    let mark = root.join(VERSION);
    let found = check_links(root, VERSION).and_then(|()| absent(mark.metadata()));
    let found = found.map_err(|error| failed(LOOKING, &mark, &error))?;
    match found.is_some_and(|found| found.is_dir()) {
        true => Ok(()),
        false => Err(RemoteError::Unmarked(root.display().to_string())),
    }
}

/// Checks that no directory of a name below the root is a link.
fn check_links(root: &Path, name: &str) -> io::Result<()> {
    let mut directory = root.to_owned();
    for part in name.split('/').take(PARTS - 1) {
        directory.push(part);
        let Some(found) = absent(directory.symlink_metadata())? else {
            return Ok(());
        };
        if found.is_symlink() {
            return Err(io::Error::new(
                io::ErrorKind::NotADirectory,
                format!(
                    "{} is a link, which may lead out of the remote: put a directory in its place",
                    directory.display()
                ),
            ));
        }
    }
    Ok(())
}

/// The outcome of a call for an object; `None` if there is no such file in the root.
fn found<T>(
    root: &Path,
    doing: &str,
    name: &str,
    call: impl FnOnce(&Path) -> io::Result<T>,
) -> Result<Option<T>, RemoteError> {
    let path = root.join(name);
    let outcome = check_links(root, name).and_then(|()| call(&path));
    match absent(outcome) {
        Ok(None) => look_at_root(root).map(|()| None),
        Ok(found) => Ok(found),
        Err(error) => Err(failed(doing, &path, &error)),
    }
}

impl Dir {
    /// The object of a run, up to a length that follows from its own, or the most that is taken.
    fn read(
        &self,
        run: &RunName,
        deadline: Instant,
        length: impl FnOnce(usize) -> Result<usize, usize> + Send + 'static,
    ) -> Result<Option<Buffer>, RemoteError> {
        let name = run.to_string();
        self.call(deadline, move |root| {
            let Some(file) = found(root, "opening", &name, open)? else {
                return Ok(None);
            };
            let path = root.join(name);
            let found = file
                .metadata()
                .map_err(|error| failed(LOOKING, &path, &error))?;
            if !found.is_file() {
                return Ok(None);
            }
            let bytes = usize::try_from(found.len()).unwrap_or(usize::MAX);
            match length(bytes) {
                Ok(bytes) => read(file, &path, bytes, deadline).map(Some),
                Err(bytes_max) => Err(RemoteError::TooLong {
                    object: path.display().to_string(),
                    bytes_max,
                }),
            }
        })
    }
}

impl Remote for Dir {
    fn look(&self, deadline: Instant) -> Result<(), RemoteError> {
        self.call(deadline, look_at_mark)
    }

    fn mark(&self, deadline: Instant) -> Result<(), RemoteError> {
        self.call(deadline, |root| {
            look_at_root(root)?;
            let mark = root.join(VERSION);
            let made = root
                .metadata()
                .and_then(|root| make(&mark, root.permissions()));
            made.map_err(|error| failed("making the directory", &mark, &error))
        })
    }

    fn codec(&self, deadline: Instant) -> Result<CodecChoice, RemoteError> {
        self.call(deadline, move |root| {
            let Some(file) = found(root, "opening", CODEC, open)? else {
                return Ok(CodecChoice::Off);
            };
            let (path, mut text) = (root.join(CODEC), Vec::new());
            file.take(CODEC_BYTES_MAX as u64)
                .read_to_end(&mut text)
                .map_err(|error| failed("reading", &path, &error))?;
            codec_of(&path.display().to_string(), &text)
        })
    }

    fn set_codec(&self, codec: CodecChoice, deadline: Instant) -> Result<(), RemoteError> {
        self.call(deadline, move |root| {
            look_at_mark(root)?;
            let set = match codec {
                CodecChoice::Off => absent(fs::remove_file(root.join(CODEC))).map(|_| ()),
                codec => replace(root, CODEC, format!("{codec}\n").as_bytes()),
            };
            set.map_err(|error| failed("setting the codec", &root.join(CODEC), &error))
        })
    }

    fn now_unix_s(&self, deadline: Instant) -> Result<u64, RemoteError> {
        self.call(deadline, |root| {
            let directory = root.join(VERSION);
            let now = now(&directory)
                .map_err(|error| failed("making a file in it", &directory, &error))?;
            Ok(unix_s(now))
        })
    }

    fn holds(&self, run: &RunName, deadline: Instant) -> Result<bool, RemoteError> {
        let name = run.to_string();
        self.call(deadline, move |root| {
            let found = found(root, LOOKING, &name, Path::symlink_metadata)?;
            Ok(found.is_some_and(|found| found.is_file()))
        })
    }

    fn fetch(
        &self,
        run: &RunName,
        bytes_max: usize,
        deadline: Instant,
    ) -> Result<Option<Buffer>, RemoteError> {
        self.read(run, deadline, move |found| match found <= bytes_max {
            true => Ok(found),
            false => Err(bytes_max),
        })
    }

    fn begin_of(
        &self,
        run: &RunName,
        bytes: usize,
        deadline: Instant,
    ) -> Result<Option<Buffer>, RemoteError> {
        self.read(run, deadline, move |found| Ok(found.min(bytes)))
    }

    fn publish(
        &self,
        run: &RunName,
        object: Buffer,
        deadline: Instant,
    ) -> Result<Published, RemoteError> {
        let name = run.to_string();
        self.call(deadline, move |root| {
            let created = match create(root, &name, &object) {
                // A directory, or the file without its name, was removed meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    look_at_mark(root)?;
                    create(root, &name, &object)
                }
                created => created,
            };
            created.map_err(|error| failed("publishing", &root.join(&name), &error))
        })
    }

    fn touch(&self, run: &RunName, deadline: Instant) -> Result<(), RemoteError> {
        let name = run.mark();
        self.call(deadline, move |root| {
            look_at_mark(root)?;
            let touched = replace(root, &name, b"");
            touched.map_err(|error| failed("marking the use", &root.join(&name), &error))
        })
    }

    fn remove(&self, run: &RunName, deadline: Instant) -> Result<(), RemoteError> {
        let (name, mark) = (run.to_string(), run.mark());
        self.call(deadline, move |root| {
            found(root, "removing", &mark, |path| fs::remove_file(path))?;
            found(root, "removing", &name, |path| fs::remove_file(path)).map(|_| ())
        })
    }

    fn list(
        &self,
        within: Option<Fingerprint>,
        part: &mut dyn FnMut() -> ControlFlow<()>,
        each: &mut dyn FnMut(Result<Listed, Unreadable>) -> ControlFlow<()>,
        patience: Duration,
    ) -> Result<(), RemoteError> {
        self.list_below(RunName::prefix(within), part, each, patience)
    }

    fn list_marks(
        &self,
        part: &mut dyn FnMut() -> ControlFlow<()>,
        each: &mut dyn FnMut(Result<Listed, Unreadable>) -> ControlFlow<()>,
        patience: Duration,
    ) -> Result<(), RemoteError> {
        self.list_below(USED.to_owned(), part, each, patience)
    }
}

impl Dir {
    fn list_below(
        &self,
        prefix: String,
        part: &mut dyn FnMut() -> ControlFlow<()>,
        each: &mut dyn FnMut(Result<Listed, Unreadable>) -> ControlFlow<()>,
        patience: Duration,
    ) -> Result<(), RemoteError> {
        if part().is_break() {
            return Ok(());
        }
        let (steps, receiver) = mpsc::sync_channel(STEPS_AHEAD);
        self.begin(move |root| {
            let mut walk = Walk {
                root,
                steps: &steps,
                now: None,
            };
            // Of a remote without objects there is the root alone.
            let walked = look_at_root(root).and_then(|()| walk.all(&prefix));
            // The receiver may have enough.
            let _ = match walked {
                Ok(_) => steps.send(Ok(Step::End)),
                Err(error) => steps.send(Err(error)),
            };
        })?;
        loop {
            match answer(receiver.recv_timeout(patience))? {
                Step::Object(object) => {
                    if each(object).is_break() {
                        return Ok(());
                    }
                }
                Step::Other => {}
                Step::End => return Ok(()),
            }
        }
    }
}

/// Makes a small file, or replaces it by a new one.
fn replace(root: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    check_links(root, name)?;
    let path = root.join(name);
    let of_root = root.metadata()?.permissions();
    for (end, _) in name.match_indices('/') {
        make(&root.join(&name[..end]), of_root.clone())?;
    }
    let mut file = unfinished(path.parent().unwrap_or(root))?;
    file.write_all(content)?;
    let mode = OF_OWNER | of_root.mode() & TO_READ;
    let permissions = Permissions::from_mode(mode);
    file.as_file().set_permissions(permissions)?;
    file.persist(&path)?;
    Ok(())
}

/// Creates an object. `NotFound` without the mark: the root alone is no remote.
fn create(root: &Path, name: &str, object: &[u8]) -> io::Result<Published> {
    let path = root.join(name);
    check_links(root, name)?;
    if is_taken(&path)? {
        return Ok(Published::Present);
    }
    let of_root = root.metadata()?.permissions();
    let directory = path.parent().unwrap_or(root);
    if !directory.try_exists()? {
        let parents = name.match_indices('/').map(|(at, _)| &name[..at]);
        for parent in parents.skip(1) {
            make(&root.join(parent), of_root.clone())?;
        }
    }
    let mut file = unfinished(directory)?;
    file.write_all(object)?;
    let mode = OF_OWNER | of_root.mode() & TO_READ;
    let permissions = Permissions::from_mode(mode);
    file.as_file().set_permissions(permissions)?;
    file.as_file().sync_all()?;
    match fs::hard_link(file.path(), &path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            return Ok(Published::Present);
        }
        Err(error) => return Err(unlinked(error)),
    }
    File::open(directory)?.sync_all()?;
    Ok(Published::Created)
}

/// The error of a hard link. A file system without hard links refuses them as if a permission were
/// missing, though the file is this process's own.
fn unlinked(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL) => io::Error::new(
            io::ErrorKind::Unsupported,
            format!(
                "the file system makes no hard link ({error}); use a file system with hard links"
            ),
        ),
        _ => error,
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
    path: &Path,
    bytes: usize,
    deadline: Instant,
) -> Result<Buffer, RemoteError> {
    let mut object = Buffer::of(bytes)?;
    let mut filled = 0;
    while filled < bytes {
        if Instant::now() >= deadline {
            return Err(RemoteError::Deadline);
        }
        let end = bytes.min(filled + PIECE);
        match file.read(&mut object[filled..end]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed("reading", path, &error)),
        }
    }
    object.truncate(filled);
    Ok(object)
}

/// Makes a directory with these permissions.
fn make(directory: &Path, permissions: Permissions) -> io::Result<()> {
    match fs::create_dir(directory) {
        Ok(()) => fs::set_permissions(directory, permissions),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
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

/// The time by the clock of the file system of a directory.
fn now(directory: &Path) -> io::Result<SystemTime> {
    unfinished(directory)?.as_file().metadata()?.modified()
}

fn unix_s(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// A step of a listing.
enum Step {
    Object(Result<Listed, Unreadable>),
    /// A look at something else. The file system answers.
    Other,
    End,
}

/// A walk through the objects. It ends early when its steps are not received any more.
struct Walk<'a> {
    root: &'a Path,
    steps: &'a SyncSender<Result<Step, RemoteError>>,
    /// The time of the file system at the first unfinished file; `Some(None)` where this node can
    /// make no file.
    now: Option<Option<SystemTime>>,
}

impl Walk<'_> {
    /// Lists the objects below a prefix of names.
    fn all(&mut self, prefix: &str) -> Result<ControlFlow<()>, RemoteError> {
        let directory = self.root.join(prefix);
        let entries = check_links(self.root, prefix).and_then(|()| fs::read_dir(&directory));
        match entries {
            Ok(entries) => self.entries(&directory, entries, prefix.split('/').count()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(ControlFlow::Continue(())),
            Err(error) => Err(failed("listing", &directory, &error)),
        }
    }

    /// Lists the objects of a directory of `depth` parts, and below it.
    fn entries(
        &mut self,
        directory: &Path,
        entries: fs::ReadDir,
        depth: usize,
    ) -> Result<ControlFlow<()>, RemoteError> {
        for entry in entries {
            let step = match entry {
                Ok(entry) => self.entry(directory, &entry.path(), entry.metadata(), depth)?,
                Err(error) => self.unreadable(directory, &error)?,
            };
            if step.is_break() {
                return Ok(step);
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    fn entry(
        &mut self,
        directory: &Path,
        path: &Path,
        outcome: io::Result<Metadata>,
        depth: usize,
    ) -> Result<ControlFlow<()>, RemoteError> {
        let found = match outcome {
            Ok(found) => found,
            Err(error) => return self.unreadable(path, &error),
        };
        if !found.is_dir() || depth + 1 >= PARTS {
            let step = self.listed(directory, path, &found);
            return Ok(self.send(step.map_or(Step::Other, |object| Step::Object(Ok(object)))));
        }
        if self.send(Step::Other).is_break() {
            return Ok(ControlFlow::Break(()));
        }
        match fs::read_dir(path) {
            Ok(entries) => self.entries(path, entries, depth + 1),
            Err(error) => self.unreadable(path, &error),
        }
    }

    /// Something cannot be looked at. An error of the root ends the walk.
    fn unreadable(
        &mut self,
        path: &Path,
        error: &io::Error,
    ) -> Result<ControlFlow<()>, RemoteError> {
        look_at_root(self.root)?;
        // It vanished.
        if error.kind() == io::ErrorKind::NotFound {
            return Ok(self.send(Step::Other));
        }
        let name = path.strip_prefix(self.root).ok().and_then(Path::to_str);
        Ok(self.send(Step::Object(Err(Unreadable {
            run: name.and_then(|name| name.parse().ok()),
            reason: failed(LOOKING, path, error).to_string(),
        }))))
    }

    fn send(&self, step: Step) -> ControlFlow<()> {
        match self.steps.send(Ok(step)) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    }

    /// The object in a file. Removes the file if a crash has left it.
    fn listed(&mut self, directory: &Path, path: &Path, found: &Metadata) -> Option<Listed> {
        if !found.is_file() {
            return None;
        }
        let modified = found.modified().unwrap_or(UNIX_EPOCH);
        if path.file_name()?.to_string_lossy().starts_with(UNFINISHED) {
            let now = self.now.get_or_insert_with(|| now(directory).ok());
            let age = now.and_then(|now| now.duration_since(modified).ok());
            if age.is_some_and(|age| age > UNFINISHED_AGE) {
                // Another process may have removed it, or only its owner may remove it.
                let _ = fs::remove_file(path);
            }
            return None;
        }
        let name = path.strip_prefix(self.root).ok()?.to_str()?;
        Listed::of(name, found.len(), unix_s(modified))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_without_hard_links_is_no_matter_of_permissions() {
        let path = Path::new("/mnt/remote/v1/run");
        for errno in [libc::EPERM, libc::EOPNOTSUPP, libc::ENOSYS] {
            let error = unlinked(io::Error::from_raw_os_error(errno));
            let said = failed("publishing", path, &error).to_string();
            let begin = "/mnt/remote/v1/run: publishing: the file system makes no hard link";
            assert!(said.starts_with(begin), "{said}");
        }
        let full = io::Error::from_raw_os_error(libc::ENOSPC);
        let said = failed("publishing", path, &full).to_string();
        assert!(said.contains("larder remote prune"), "{said}");
        let denied = io::Error::from_raw_os_error(libc::EACCES);
        let said = failed("publishing", path, &denied).to_string();
        assert!(
            said.contains("check the permissions of the directory"),
            "{said}"
        );
    }
}

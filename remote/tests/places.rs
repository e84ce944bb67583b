//! Places: objects are created once, read whole, found and removed, until a deadline.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::ops::ControlFlow;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, UNIX_EPOCH};

use common::*;
use larder_remote::dir::Dir;
use larder_remote::keys::KeyError;
use larder_remote::{
    Buffer, Keyring, Listed, OBJECT_BYTES_MAX, Place, Published, Remote, RemoteError, RunName,
    Unreadable,
};
use rustix::fs::Mode;
use rustix::process::{Uid, geteuid, umask};
use rustix::thread::set_thread_res_uid;

/// Another part of a listing is wanted.
fn go_on() -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// The objects. All of them can be looked at.
fn listed(remote: &dyn Remote, within: Option<&RunName>) -> Vec<Listed> {
    let mut listed = Vec::new();
    let mut each = |object: Result<Listed, Unreadable>| {
        listed.push(object.unwrap());
        ControlFlow::Continue(())
    };
    let within = within.map(|name| name.namespace);
    remote.list(within, &mut go_on, &mut each, LATE).unwrap();
    listed.sort_by_key(|object| object.run);
    listed
}

/// A directory with the mark of a remote.
fn new_remote() -> (tempfile::TempDir, Dir) {
    let directory = tempfile::tempdir().unwrap();
    let remote = Dir::new(directory.path().to_owned());
    remote.mark(later()).unwrap();
    (directory, remote)
}

fn publish(remote: &Dir, name: &RunName, object: &[u8]) -> Result<Published, RemoteError> {
    remote.publish(name, Buffer::copy_of(object).unwrap(), later())
}

/// Two objects of each of two namespaces.
fn objects() -> Vec<(RunName, Vec<u8>)> {
    let chain = chain(1, 4);
    let run = |model: &str, run| object(&namespace(model), &run_of(&chain, run, 2), &trust(1));
    vec![run("a", 0), run("a", 1), run("b", 0), run("b", 1)]
}

#[test]
fn an_object_is_created_once_and_read_whole() {
    let (_directory, remote) = new_remote();
    for (name, object) in objects() {
        assert!(!remote.holds(&name, later()).unwrap());
        assert!(
            remote
                .fetch(&name, OBJECT_BYTES_MAX, later())
                .unwrap()
                .is_none()
        );
        let published = publish(&remote, &name, &object);
        assert_eq!(published, Ok(Published::Created));
        let published = publish(&remote, &name, &[0; 8]);
        assert_eq!(published, Ok(Published::Present));
        assert!(remote.holds(&name, later()).unwrap());
        let bytes = object.len();
        let fetched = remote.fetch(&name, bytes - 1, later());
        assert!(matches!(fetched, Err(RemoteError::TooLong { .. })));
        let fetched = remote.fetch(&name, bytes, later()).unwrap();
        assert_eq!(*fetched.unwrap(), *object);
    }
}

#[test]
fn of_racing_nodes_one_creates_an_object() {
    let (directory, _) = new_remote();
    let (name, object) = objects().remove(0);
    let barrier = Barrier::new(8);
    let outcomes: Vec<Published> = thread::scope(|scope| {
        let nodes: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    let remote = Dir::new(directory.path().to_owned());
                    barrier.wait();
                    publish(&remote, &name, &object).unwrap()
                })
            })
            .collect();
        nodes.into_iter().map(|node| node.join().unwrap()).collect()
    });
    let created = outcomes
        .iter()
        .filter(|outcome| **outcome == Published::Created);
    assert_eq!(created.count(), 1);
    // Nothing of the others is left.
    let path = directory.path().join(name.to_string());
    let beside = fs::read_dir(path.parent().unwrap()).unwrap();
    assert_eq!(beside.count(), 1);
}

#[test]
fn objects_are_listed_by_namespace_and_removed() {
    let (directory, remote) = new_remote();
    assert!(listed(&remote, None).is_empty());
    let objects = objects();
    for (name, object) in &objects {
        publish(&remote, name, object).unwrap();
    }
    fs::write(directory.path().join("v1/foreign"), b"not ours").unwrap();
    let mut names: Vec<RunName> = objects.iter().map(|(name, _)| *name).collect();
    names.sort_unstable();
    let found = listed(&remote, None);
    assert_eq!(found.iter().map(|o| o.run).collect::<Vec<_>>(), names);
    assert!(found.iter().all(|o| o.bytes == objects[0].1.len() as u64));
    let of_a = listed(&remote, Some(&objects[0].0));
    assert_eq!(of_a.len(), 2);
    remote.remove(&objects[0].0, later()).unwrap();
    remote.remove(&objects[0].0, later()).unwrap();
    assert!(!remote.holds(&objects[0].0, later()).unwrap());
    assert_eq!(listed(&remote, None).len(), 3);
}

#[test]
fn a_directory_that_is_a_link_leads_nowhere() {
    let (name, object) = objects().remove(0);
    let text = name.to_string();
    for (depth, (end, _)) in text.match_indices('/').enumerate() {
        let directory = &text[..end];
        let (root, remote) = new_remote();
        publish(&remote, &name, &object).unwrap();
        let (inside, elsewhere) = (root.path().join(directory), tempfile::tempdir().unwrap());
        let outside = elsewhere.path().join("kept");
        fs::rename(&inside, &outside).unwrap();
        symlink(&outside, &inside).unwrap();
        let refuses = |outcome: Result<(), RemoteError>| {
            let said = outcome.unwrap_err().to_string();
            assert!(said.contains(&format!("{directory} is a link")), "{said}");
        };
        refuses(publish(&remote, &name, &object).map(drop));
        refuses(remote.holds(&name, later()).map(drop));
        let fetched = remote.fetch(&name, OBJECT_BYTES_MAX, later());
        refuses(fetched.map(drop));
        refuses(remote.remove(&name, later()));
        // A listing passes over the links that it meets.
        let mut each = |_| panic!("an object that is outside");
        let all = remote.list(None, &mut go_on, &mut each, LATE);
        let of_namespace = remote.list(Some(name.namespace), &mut go_on, &mut each, LATE);
        match depth {
            0 => [all, of_namespace, remote.look(later())]
                .into_iter()
                .for_each(refuses),
            1 => {
                all.unwrap();
                refuses(of_namespace);
            }
            _ => [all, of_namespace].into_iter().for_each(Result::unwrap),
        }
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
    }
}

/// A path of the kernel is shorter. In bytes.
const PATH_MAX: usize = 4096;

#[test]
fn directories_below_those_of_names_are_not_walked() {
    let (root, remote) = new_remote();
    let (name, object) = objects().remove(0);
    publish(&remote, &name, &object).unwrap();
    let version = root.path().join("v1");
    let mut deep = version.clone();
    while deep.as_os_str().len() + 2 < PATH_MAX {
        deep.push("a");
        fs::create_dir(&deep).unwrap();
    }
    assert_eq!(listed(&remote, None).len(), 1);
    // The removal of a temporary directory keeps a file open for each level.
    let made = deep.ancestors().take_while(|made| *made != version);
    made.for_each(|made| fs::remove_dir(made).unwrap());
}

#[test]
fn a_listing_that_is_left_ends_its_walk() {
    let (root, remote) = new_remote();
    let (name, object) = objects().remove(0);
    publish(&remote, &name, &object).unwrap();
    // More than are looked at ahead.
    let beside = root.path().join(name.to_string());
    for file in 0..3000 {
        fs::write(beside.with_file_name(file.to_string()), b"").unwrap();
    }
    let mut objects = 0;
    let mut first = |_| {
        objects += 1;
        ControlFlow::Break(())
    };
    remote.list(None, &mut go_on, &mut first, LATE).unwrap();
    assert_eq!(objects, 1);
    assert_eq!(listed(&remote, None).len(), 1);
    no_call();
}

/// Where a file system does not tell the kinds of files with their names (NFS), each is looked at.
#[test]
fn a_file_that_vanishes_during_a_listing_is_absent() {
    let (root, remote) = new_remote();
    let (name, object) = objects().remove(0);
    publish(&remote, &name, &object).unwrap();
    let path = root.path().join(name.to_string());
    let (beside, is_over) = (path.with_file_name("vanishes"), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                fs::write(&beside, b"").unwrap();
                fs::remove_file(&beside).unwrap();
            }
        });
        let lists = || (0..1000).all(|_| listed(&remote, None).len() == 1);
        let all = scope.spawn(lists).join();
        is_over.store(true, Ordering::Relaxed);
        assert!(all.is_ok_and(|all| all));
    });
}

#[test]
fn a_lookup_finds_the_runs_without_a_gap_by_few_questions() {
    let (_directory, remote) = new_remote();
    let keys = chain(1, 21);
    let namespace = namespace("a");
    let runs: Vec<_> = (0..21)
        .map(|run| object(&namespace, &run_of(&keys, run, 1), &trust(1)))
        .collect();
    let names: Vec<RunName> = runs.iter().map(|(name, _)| *name).collect();
    for (there, (name, object)) in runs.into_iter().enumerate() {
        assert_eq!(remote.lookup(&names, later()), Ok(there));
        publish(&remote, &name, &object).unwrap();
    }
    assert_eq!(remote.lookup(&names, later()), Ok(21));
    assert_eq!(remote.lookup(&[], later()), Ok(0));
}

/// Another writer of the remote may put anything in place of an object. None of it takes a thread
/// for ever: those are bounded.
#[test]
fn a_pipe_or_a_link_is_absent_and_in_the_way_of_its_object() {
    let (directory, remote) = new_remote();
    let objects = objects();
    let path = |at: usize| directory.path().join(objects[at].0.to_string());
    (0..4).for_each(|at| fs::create_dir_all(path(at).parent().unwrap()).unwrap());
    // No process writes to this pipe.
    pipe(&path(0));
    symlink(path(3), path(1)).unwrap();
    fs::create_dir(path(2)).unwrap();
    publish(&remote, &objects[3].0, &objects[3].1).unwrap();
    for (name, object) in &objects[..3] {
        for _ in 0..70 {
            let deadline = Instant::now() + Duration::from_secs(30);
            let fetched = remote.fetch(name, OBJECT_BYTES_MAX, deadline);
            assert!(fetched.unwrap().is_none());
        }
        assert!(!remote.holds(name, later()).unwrap());
        let published = publish(&remote, name, object).unwrap();
        assert_eq!(published, Published::Present);
    }
    let (name, object) = &objects[3];
    let fetched = remote.fetch(name, OBJECT_BYTES_MAX, later()).unwrap();
    assert!(fetched.is_some_and(|fetched| *fetched == object[..]));
}

fn pipe(path: &Path) {
    rustix::fs::mkfifoat(rustix::fs::CWD, path, Mode::RWXU).unwrap();
}

/// Bytes that this process has read from files.
fn bytes_read() -> u64 {
    let io = fs::read_to_string("/proc/self/io").unwrap();
    let read = io.lines().find_map(|line| line.strip_prefix("rchar: "));
    read.unwrap().parse().unwrap()
}

/// Whether a thread of this process is in a call of a directory.
fn some_call() -> bool {
    let threads = fs::read_dir("/proc/self/task").unwrap();
    threads
        .filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("comm")).ok())
        .any(|name| name.starts_with("larder-remote-d"))
}

/// Waits for the end of all calls.
fn no_call() {
    let until = later();
    while some_call() {
        assert!(Instant::now() < until);
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_long_object_is_not_read_beyond_the_deadline() {
    const BYTES: u64 = 512 << 20;
    let (directory, remote) = new_remote();
    let (name, object) = objects().remove(0);
    publish(&remote, &name, &object).unwrap();
    let path = directory.path().join(name.to_string());
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(BYTES).unwrap();
    let before = bytes_read();
    let fetched = remote.fetch(&name, OBJECT_BYTES_MAX, Instant::now());
    assert_eq!(fetched.unwrap_err(), RemoteError::Deadline);
    // Its thread may not have begun yet.
    thread::sleep(Duration::from_millis(100));
    no_call();
    assert!(bytes_read() - before < BYTES / 2);
}

fn permit(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn permissions(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn whoever_may_read_the_directory_may_read_its_objects() {
    for (of_root, of_object) in [(0o2775, 0o644), (0o777, 0o644), (0o750, 0o640)] {
        let root = tempfile::tempdir().unwrap();
        permit(root.path(), of_root);
        let (name, object) = objects().remove(0);
        let before = umask(Mode::from_bits_retain(0o077));
        let remote = Dir::new(root.path().to_owned());
        remote.mark(later()).unwrap();
        publish(&remote, &name, &object).unwrap();
        umask(before);
        let path = root.path().join(name.to_string());
        assert_eq!(permissions(&path), of_object);
        let made = path.ancestors().skip(1);
        for directory in made.take_while(|made| *made != root.path()) {
            assert_eq!(permissions(directory), of_root, "{}", directory.display());
        }
    }
}

/// Does this as a user without rights to the files of others.
fn as_nobody<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let work = || {
        if geteuid().is_root() {
            let nobody = Uid::from_raw(65534);
            set_thread_res_uid(nobody, nobody, nobody).unwrap();
        }
        work()
    };
    thread::scope(|scope| scope.spawn(work).join().unwrap())
}

#[test]
fn an_object_that_a_node_may_not_read_is_named_and_no_other_fails() {
    let (root, remote) = new_remote();
    permit(root.path(), 0o755);
    permit(&root.path().join("v1"), 0o755);
    let objects = objects();
    for (name, object) in &objects {
        publish(&remote, name, object).unwrap();
    }
    let path = |at: usize| root.path().join(objects[at].0.to_string());
    let fetched = |at: usize| {
        let fetch = || remote.fetch(&objects[at].0, OBJECT_BYTES_MAX, later());
        as_nobody(fetch).map(|object| object.is_some())
    };
    let denied = |at: usize| match fetched(at) {
        Err(RemoteError::Denied(reason)) => reason.contains(&objects[at].0.to_string()),
        other => panic!("{other:?}"),
    };
    let look = || as_nobody(|| remote.look(later()));
    permit(&path(0), 0);
    assert!(denied(0));
    assert_eq!((fetched(1), look()), (Ok(true), Ok(())));
    // A directory with all objects of the second namespace.
    let closed = path(2);
    let closed = closed.ancestors().nth(2).unwrap();
    permit(closed, 0);
    assert!(denied(2));
    assert_eq!((fetched(1), look()), (Ok(true), Ok(())));
    let holds = as_nobody(|| remote.holds(&objects[2].0, later()));
    assert!(matches!(holds, Err(RemoteError::Denied(_))), "{holds:?}");
    let (good, bad) = as_nobody(|| of_listing(&remote));
    assert_eq!((good.len(), bad.len()), (2, 1));
    assert!(bad[0].reason.contains(closed.to_str().unwrap()));
    permit(closed, 0o755);
    // The root is no fault of an object.
    permit(root.path(), 0);
    let denied = look();
    permit(root.path(), 0o755);
    assert!(matches!(denied, Err(RemoteError::Denied(_))), "{denied:?}");
}

/// The objects, and the unreadable ones.
fn of_listing(remote: &dyn Remote) -> (Vec<Listed>, Vec<Unreadable>) {
    let (mut good, mut bad) = (Vec::new(), Vec::new());
    let mut each = |object| {
        match object {
            Ok(object) => good.push(object),
            Err(object) => bad.push(object),
        }
        ControlFlow::Continue(())
    };
    remote.list(None, &mut go_on, &mut each, LATE).unwrap();
    (good, bad)
}

#[test]
fn a_missing_directory_is_an_error_and_is_not_made() {
    let home = tempfile::tempdir().unwrap();
    let root = home.path().join("not mounted");
    let remote = Dir::new(root.clone());
    let is_missing = |error: RemoteError| {
        assert!(matches!(error, RemoteError::Missing(_)), "{error}");
    };
    let mut each = |_| ControlFlow::Continue(());
    is_missing(remote.list(None, &mut go_on, &mut each, LATE).unwrap_err());
    let (name, object) = objects().remove(0);
    is_missing(remote.look(later()).unwrap_err());
    is_missing(remote.mark(later()).unwrap_err());
    is_missing(remote.holds(&name, later()).unwrap_err());
    is_missing(remote.fetch(&name, 1, later()).unwrap_err());
    is_missing(remote.remove(&name, later()).unwrap_err());
    is_missing(publish(&remote, &name, &object).unwrap_err());
    assert!(!root.exists());
}

/// The directory of a mount without the mount.
#[test]
fn a_directory_without_the_mark_takes_no_object() {
    let root = tempfile::tempdir().unwrap();
    let remote = Dir::new(root.path().to_owned());
    let (name, object) = objects().remove(0);
    let is_unmarked = |error: RemoteError| {
        assert!(matches!(error, RemoteError::Unmarked(_)), "{error}");
        assert!(error.to_string().contains("--new"), "{error}");
    };
    is_unmarked(remote.look(later()).unwrap_err());
    is_unmarked(publish(&remote, &name, &object).unwrap_err());
    assert!(listed(&remote, None).is_empty());
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    remote.mark(later()).unwrap();
    assert_eq!(publish(&remote, &name, &object), Ok(Published::Created));
    // It is mounted no more.
    fs::rename(root.path().join("v1"), root.path().join("hidden")).unwrap();
    is_unmarked(publish(&remote, &name, &object).unwrap_err());
    assert!(!root.path().join("v1").exists());
}

/// A directory for objects with a file that a crash has left without its name. It is so old by the
/// clock of the file system.
fn with_unfinished(root: &Path, age: Duration) -> PathBuf {
    let place = root.join(objects()[0].0.to_string());
    let left = place.with_file_name(".unfinished-abcdef");
    fs::create_dir_all(left.parent().unwrap()).unwrap();
    let file = fs::File::create(&left).unwrap();
    let now = file.metadata().unwrap().modified().unwrap();
    file.set_modified(now - age).unwrap();
    left
}

#[test]
fn a_file_that_a_crash_left_is_removed_an_hour_later_and_not_by_a_reader() {
    let (root, remote) = new_remote();
    let young = with_unfinished(root.path(), Duration::from_mins(50));
    assert!(listed(&remote, None).is_empty());
    assert!(young.exists());
    let old = with_unfinished(root.path(), Duration::from_mins(70));
    permit(root.path(), 0o755);
    let directories = old.ancestors().skip(1);
    directories
        .take_while(|directory| *directory != root.path())
        .for_each(|directory| permit(directory, 0o755));
    // A reader can make no file to read the clock by.
    assert!(as_nobody(|| listed(&remote, None)).is_empty());
    assert!(old.exists());
    assert!(listed(&remote, None).is_empty());
    assert!(!old.exists());
    // Nothing of the reading of the clock is left.
    let beside = fs::read_dir(old.parent().unwrap()).unwrap();
    assert_eq!(beside.count(), 0);
}

/// By a node whose clock is ahead, or which removes what it does not know.
#[test]
fn an_object_whose_unfinished_file_is_removed_meanwhile_is_written_again() {
    let (root, remote) = new_remote();
    let (name, _) = objects().remove(0);
    let path = root.path().join(name.to_string());
    let directory = path.parent().unwrap();
    fs::create_dir_all(directory).unwrap();
    let object = vec![7; 16 << 20];
    let unfinished = || {
        let mut files = fs::read_dir(directory).unwrap().flatten();
        files.find(|file| {
            file.file_name()
                .to_str()
                .unwrap()
                .starts_with(".unfinished-")
        })
    };
    thread::scope(|scope| {
        let remover = scope.spawn(|| {
            loop {
                let removed = unfinished().is_some_and(|file| fs::remove_file(file.path()).is_ok());
                if removed && !path.exists() {
                    return;
                }
            }
        });
        while !remover.is_finished() {
            let _ = fs::remove_file(&path);
            assert_eq!(publish(&remote, &name, &object), Ok(Published::Created));
        }
    });
    assert!(unfinished().is_none());
    assert!(remote.holds(&name, later()).unwrap());
}

#[test]
fn the_time_of_a_directory_is_that_of_its_file_system() {
    let (root, remote) = new_remote();
    let file = fs::File::create(root.path().join("beside")).unwrap();
    let modified = file.metadata().unwrap().modified().unwrap();
    let before = modified.duration_since(UNIX_EPOCH).unwrap().as_secs();
    let now = remote.now_unix_s(later()).unwrap();
    assert!((before..before + LATE.as_secs()).contains(&now));
    assert_eq!(fs::read_dir(root.path().join("v1")).unwrap().count(), 0);
}

#[test]
fn urls_name_places_and_others_are_refused() {
    let place = |url: &str| {
        Place {
            url: url.to_owned(),
            ..Place::default()
        }
        .connect()
        .is_ok()
    };
    assert!(place("file:///some/where"));
    for url in ["file://relative", "/some/where", "ftp://host/"] {
        assert!(!place(url), "{url}");
    }
}

#[test]
fn a_key_file_has_one_key_or_two() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let load = |text: &str| {
        fs::write(file.path(), text).unwrap();
        Keyring::load(file.path())
    };
    let (one, two) = ("01".repeat(32), "02".repeat(32));
    assert_eq!(load(&one).unwrap().current().id(), key(1).id());
    let both = load(&format!("# rotated\n{two}\n\n{one}\n")).unwrap();
    assert_eq!(both.current().id(), key(2).id());
    assert!(both.find(key(1).id()).is_some() && both.find(key(3).id()).is_none());
    let count = |text: &str| match load(text) {
        Err(KeyError::Count { found, .. }) => found,
        other => panic!("{other:?}", other = other.map(|_| ())),
    };
    assert_eq!(count(""), 0);
    assert_eq!(count(&format!("{one}\n{two}\n{one}\n")), 3);
    let short = load(&format!("{one}\n{}\n", &two[1..]));
    assert!(matches!(short, Err(KeyError::Malformed { line: 2, .. })));
}

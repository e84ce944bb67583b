//! Locks and descriptions of the volumes: of other processes, of devices, and of children.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;

use larder_engine::{
    CreateOptions, HolderState, OpenOptions, PageStore, Part, PutStatus, Store, StoreError, create,
};
use nix::fcntl::{FcntlArg, fcntl};

use super::attach;
use super::common::honest::{PATIENCE, eventually, skipped};
use super::common::{Home, MIB, Pool, chain};

/// Marks a volume as being written by a client, until the returned file is dropped.
pub fn mark(volume: &Path, client: u32) -> std::fs::File {
    let mut options = std::fs::File::options();
    let file = options.read(true).write(true).open(volume).unwrap();
    let lock = libc::flock {
        l_type: i16::try_from(libc::F_WRLCK).unwrap(),
        l_whence: 0,
        l_start: (1 << 62) + i64::from(client),
        l_len: 1,
        l_pid: 0,
    };
    fcntl(&file, FcntlArg::F_OFD_SETLK(&lock)).unwrap();
    file
}

/// The first volume is free already: the rings of a process that dies are released one after the
/// other.
#[test]
fn a_volume_that_other_processes_still_use_is_neither_missing_nor_given_up() {
    let home = Home::new();
    let second = home.directory.path().join("second");
    let options = CreateOptions::new(256 * MIB).with(|o| {
        o.segment_size = Some(16 * MIB);
        o.volumes = vec![second.clone()];
    });
    create(&home.path, &options).unwrap();
    let segments = home.open().stats().segments;
    for degraded in [false, true] {
        let open = || {
            let options = OpenOptions::default().with(|o| o.degraded = degraded);
            Store::open(&home.path, options).map(|store| store.stats().segments)
        };
        let marked = mark(&second, 7);
        assert!(matches!(open(), Err(StoreError::ClientsWriting(_))));
        drop(marked);
        let taken = std::fs::File::open(&second).unwrap();
        taken.lock().unwrap();
        assert!(matches!(open(), Err(StoreError::Locked { .. })));
        drop(taken);
        assert!(open().is_ok_and(|found| found == segments));
    }
}

/// A loop device of a file; `None` where this process may not have one.
pub struct Loop(pub PathBuf);

impl Loop {
    pub fn over(file: &Path) -> Option<Loop> {
        let mut command = Command::new("losetup");
        let made = command.args(["--find", "--show"]).arg(file).output().ok()?;
        let name = String::from_utf8(made.stdout).ok()?;
        made.status
            .success()
            .then(|| Loop(PathBuf::from(name.trim_end())))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup")
            .arg("--detach")
            .arg(&self.0)
            .status();
    }
}

#[test]
fn a_device_is_shared_like_a_file() {
    let home = Home::new();
    let file = std::fs::File::create(&home.path).unwrap();
    file.set_len(256 * MIB).unwrap();
    let Some(device) = Loop::over(&home.path) else {
        skipped("a store on a device, shared", "no loop device can be made");
        return;
    };
    let options = CreateOptions::new(256 * MIB).with(|o| {
        o.segment_size = Some(16 * MIB);
    });
    create(&device.0, &options).unwrap();
    let alone = Store::open(&device.0, OpenOptions::default()).unwrap();
    let refused = Store::open(&device.0, OpenOptions::default())
        .err()
        .unwrap();
    let pid = std::process::id();
    assert!(
        matches!(&refused, StoreError::Locked { holder, .. }
            if (holder.pid, holder.state) == (pid, HolderState::Running)),
        "{refused}"
    );
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        // Retries until it is the owner.
        scope.spawn(|| {
            let found = Store::attach(&device.0, OpenOptions::default());
            sender.send(found.map(|store| store.part())).unwrap();
        });
        alone.close().unwrap();
        let part = receiver.recv_timeout(PATIENCE).unwrap();
        assert_eq!(part.unwrap(), Part::Owner);
    });
    let owner = Store::attach(&device.0, OpenOptions::default()).unwrap();
    let client = Store::attach(&device.0, OpenOptions::default()).unwrap();
    assert_eq!((owner.part(), client.part()), (Part::Owner, Part::Client));
    let pool = Pool::new(&client, "m", &[65536]);
    let keys = chain(1, 4);
    assert_eq!(pool.put(&keys), vec![PutStatus::Stored; 4]);
    drop(owner);
    // It stays a client until it learns that its owner has gone.
    eventually("the client takes over", || client.part() == Part::Owner);
    assert_eq!(pool.hits(&keys), 4);
}

/// The descriptors that a child process inherits: every description of the store that this process
/// has open.
fn inherited(home: &Home) -> Vec<OwnedFd> {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let numbers = open.filter_map(|entry| {
        let entry = entry.unwrap();
        let is_store = std::fs::read_link(entry.path()).is_ok_and(|path| path == home.path);
        let number: i32 = entry.file_name().to_str()?.parse().ok()?;
        is_store.then_some(number)
    });
    numbers
        .map(|number| {
            // SAFETY: just listed, and the handles that have it open outlive this call.
            unsafe { BorrowedFd::borrow_raw(number) }
                .try_clone_to_owned()
                .unwrap()
        })
        .collect()
}

#[test]
fn descriptors_inherited_by_a_child_process_block_no_process() {
    let home = Home::with_store(256 * MIB);
    let keys = chain(1, 4);
    let owner = attach(&home);
    let client = attach(&home);
    assert_eq!(
        Pool::new(&client, "m", &[65536]).put(&keys),
        [PutStatus::Stored; 4]
    );
    let inherited = inherited(&home);
    assert!(inherited.len() > 1);
    client.close().unwrap();
    owner.close().unwrap();
    let store = home.open();
    assert_eq!(Pool::new(&store, "m", &[65536]).hits(&keys), 4);
    drop(inherited);
}

/// A kernel before 5.15 fails an operation that would have to wait on a description that must not.
#[test]
fn descriptions_used_for_writes_are_blocking() {
    let home = Home::with_store(256 * MIB);
    let owner = attach(&home);
    let client = attach(&home);
    for descriptor in inherited(&home) {
        let flags = rustix::fs::fcntl_getfl(&descriptor).unwrap();
        assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK), "{flags:?}");
    }
    client.close().unwrap();
    owner.close().unwrap();
}

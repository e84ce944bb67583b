//! Where a store is opened, by which process, and with which resources: rows 14 to 16, 19 and 21.

use std::os::unix::fs::symlink;
use std::sync::Arc;
use std::time::Duration;

use larder_core::core::{
    Config, Core, Effect, InitState, Io, IoId, Recovered, RequestId, SegmentInit,
};
use larder_core::grants::Ask;
use larder_core::index::{Index, NamespaceSlot};
use larder_disk::Kind;
use larder_engine::format::{HEADER_BLOCKS, Run, SEGMENTS_OFFSET, Serial, StoreId};
use larder_engine::{
    CreateOptions, GetStatus, Hint, HolderState, MissReason, OpenOptions, PageStore, PutStatus,
    Store, StoreError, SyncPolicy, create,
};
use larder_store::share::Inside;
use larder_store::volume::{Access, Volumes};

use super::common::faulty::{Fault, Seen, open_faulty};
use super::common::honest::skipped;
use super::common::{Home, MIB, Pool, chain, namespace};
use super::{SIZE, read};

/// Answers everything that a core asks for, and counts its syncs.
fn serve(core: &mut Core) -> usize {
    let mut syncs = 0;
    loop {
        let effects = core.take_effects();
        if effects.is_empty() {
            return syncs;
        }
        for effect in effects {
            if let Effect::Io { id, io, .. } = effect {
                syncs += usize::from(matches!(io, Io::Sync));
                core.io_done(id, Ok(()));
            }
        }
    }
}

/// A core over free segments, syncing once a second.
fn core_of(segments: u32) -> (Core, NamespaceSlot) {
    let segment = SegmentInit {
        state: InitState::Free,
        sequence: Serial::ZERO,
        data_end: HEADER_BLOCKS,
        blocks: 0,
        last_commit: Serial::ZERO,
        proven: Serial::ZERO,
        born_ms: 0,
    };
    let recovered = Recovered {
        volumes: vec![segments],
        segments: vec![segment; segments as usize],
        namespaces: Vec::new(),
        first: Serial::first_of(Run::FIRST),
        clean: true,
        lost_pages: 0,
        is_partial: false,
    };
    let config = Config {
        store: StoreId::from_bytes([1; 16]),
        segment_blocks: 4096,
        sync: SyncPolicy::Interval(Duration::from_secs(1)),
        write_bytes_max: 1 << 30,
        copy_blocks_max: 64,
        read_only: false,
        began_ms: 0,
    };
    let index = Index::new(segments as usize, u64::from(segments) * 4096);
    let mut core = Core::new(config, recovered, Arc::new(index));
    let slot: NamespaceSlot = core
        .open_namespace(&namespace("m", &[4096]))
        .unwrap()
        .into();
    serve(&mut core);
    (core, slot)
}

#[test]
fn row_14_a_clock_that_jumps_freezes_or_goes_back_decides_nothing_but_when() {
    let (mut core, slot) = core_of(8);
    let century_ms = 100 * 365 * 86_400_000;
    let mut request = 0;
    let mut write = |core: &mut Core| {
        request += 1;
        core.delete(RequestId(request), slot, &chain(request, 1));
        serve(core)
    };
    core.tick(1000);
    assert_eq!(write(&mut core), 0);
    assert_eq!(core.wakes_at(), Some(2000));
    // Back and frozen: nothing is due, nothing is forgotten.
    for now in [0, 999, 1000, 1000] {
        core.tick(now);
        assert_eq!(
            (serve(&mut core), core.wakes_at()),
            (0, Some(2000)),
            "{now}"
        );
    }
    // Far ahead: one sync, not one for each second that passed.
    core.tick(century_ms);
    assert_eq!((serve(&mut core), core.wakes_at()), (1, None));
    // From there the interval counts on, whatever the clock shows in between.
    assert_eq!(write(&mut core), 0);
    assert_eq!(core.wakes_at(), Some(century_ms + 1000));
    core.tick(5000);
    assert_eq!(serve(&mut core), 0);
    core.tick(century_ms + 1000);
    assert_eq!(serve(&mut core), 1);
    // The end of time is no overflow.
    core.tick(u64::MAX);
    write(&mut core);
    core.tick(u64::MAX);
    assert_eq!(serve(&mut core), 1);
    assert!(core.is_idle());
    core.check_invariants().unwrap();
}

/// The I/O that a core asks for, not yet done.
fn asked(core: &mut Core) -> Vec<(IoId, bool)> {
    let io = |effect| match effect {
        Effect::Io { id, io, .. } => Some((id, matches!(io, Io::Sync))),
        _ => None,
    };
    core.take_effects().into_iter().filter_map(io).collect()
}

#[test]
fn row_14_a_deletion_that_is_acknowledged_while_a_sync_runs_falls_due_again() {
    let (mut core, slot) = core_of(8);
    core.tick(1000);
    // A page whose descriptor is written before its bytes: a flush waits for these.
    let ask = Ask {
        key: chain(1, 1)[0],
        parent: None,
        depth: 0,
        saved: 0,
    };
    let (page, _) = core.reserve(slot, &[ask], Hint::default());
    serve(&mut core);
    core.commit(page, &[Some(1.into())]);
    serve(&mut core);
    core.flush(RequestId(1));
    core.delete(RequestId(2), slot, &chain(2, 1));
    let deletion = asked(&mut core);
    assert!(matches!(deletion[..], [(_, false)]), "{deletion:?}");
    core.landed(page, &[(0, true)]);
    let sync = asked(&mut core);
    assert!(matches!(sync[..], [(_, true)]), "{sync:?}");
    // Acknowledged before the sync ends, which does not cover it.
    core.io_done(deletion[0].0, Ok(()));
    core.io_done(sync[0].0, Ok(()));
    assert_eq!(serve(&mut core), 0);
    assert_eq!(core.wakes_at(), Some(2000));
    core.tick(2000);
    assert_eq!((serve(&mut core), core.wakes_at()), (1, None));
    assert!(core.is_idle());
}

#[test]
fn row_15_a_second_opener_gets_the_holders_name_and_a_reader_changes_nothing() {
    let home = Home::with_store(SIZE);
    let keys = chain(1, 8);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[65536]);
    assert_eq!(pool.put(&keys), [PutStatus::Stored; 8]);
    store.flush().unwrap();
    let locked = Store::open(&home.path, OpenOptions::default())
        .err()
        .unwrap();
    let own = std::process::id();
    assert!(
        matches!(&locked, StoreError::Locked { holder, .. }
            if (holder.pid, holder.state) == (own, HolderState::Running)),
        "{locked}"
    );
    // The holder ends as in a crash, and leaves its name behind: that is no lock.
    drop(store);
    let left = std::fs::read(&home.path).unwrap();
    let options = || OpenOptions::default().with(|o| o.read_only = true);
    let readers = [home.open_with(options()), home.open_with(options())];
    for reader in &readers {
        let pool = Pool::new(reader, "m", &[65536]);
        pool.hits(&keys);
        assert!(matches!(
            reader.delete(pool.id, &keys),
            Err(StoreError::ReadOnly)
        ));
        reader.close().unwrap();
    }
    drop(readers);
    assert!(
        std::fs::read(&home.path).unwrap() == left,
        "a reader wrote to the store"
    );
    let store = home.open();
    assert_eq!(Pool::new(&store, "m", &[65536]).hits(&keys), 8);
}

#[test]
fn row_15_a_reader_beside_a_writer_takes_nothing_from_segments_in_another_generation() {
    let home = Home::with_store(SIZE);
    let keys = chain(1, 8);
    {
        let store = home.open();
        let pool = Pool::new(&store, "m", &[MIB as u32]);
        assert_eq!(pool.put(&keys), [PutStatus::Stored; 8]);
        store.close().unwrap();
    }
    let options = OpenOptions::default().with(|o| o.read_only = true);
    let (reader, disk) = open_faulty(&home, options);
    let reading = Pool::new(&reader, "m", &[MIB as u32]);
    // A sector that cannot be read under one copy of the header leaves the other.
    disk.when(Fault::Fails(5), usize::MAX, |seen| {
        matches!(seen, Seen::Read { offset, bytes }
            if (offset..offset + bytes as u64).contains(&SEGMENTS_OFFSET))
    });
    assert_eq!(reading.hits(&keys), 8);
    assert!(disk.hits() > 0);
    // The writer goes over the whole store, many times.
    let store = home.open();
    let writing = Pool::new(&store, "m", &[MIB as u32]);
    for seed in 2..20 {
        let other = chain(seed, 12);
        assert_eq!(writing.put(&other), [PutStatus::Stored; 12]);
    }
    assert_eq!(writing.hits(&keys), 0);
    let stale = MissReason::Stale;
    assert_eq!(reading.get(&keys), [GetStatus::Miss(stale); 8]);
    assert_eq!(reader.stats().damaged, 0);
}

#[test]
fn row_16_a_file_that_is_no_store_is_refused_by_kind_and_left_unchanged() {
    let home = Home::new();
    let path = |name: &str| home.directory.path().join(name);
    let open = |name: &str| {
        Store::open(&path(name), OpenOptions::default())
            .err()
            .unwrap()
    };
    let elf = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let mut ext4 = vec![0; 1 << 20];
    ext4[1080..1082].copy_from_slice(&[0x53, 0xef]);
    for (name, content) in [
        ("empty", &[][..]),
        ("short", b"larder"),
        ("image", b"\x89PNG\r\n\x1a\n and more"),
        ("ext4", &ext4),
        ("program", &elf[..elf.len().min(1 << 20)]),
        ("zeros", &[0; 200_000]),
    ] {
        std::fs::write(path(name), content).unwrap();
        let error = open(name);
        assert!(matches!(error, StoreError::NotAStore(_)), "{name}: {error}");
        assert!(
            std::fs::read(path(name)).unwrap() == content,
            "{name} was written to"
        );
        let refused = create(&path(name), &CreateOptions::new(SIZE));
        let is_void = content.iter().all(|byte| *byte == 0);
        assert!(
            is_void || matches!(refused, Err(StoreError::Foreign(_))),
            "{name}: {refused:?}"
        );
        assert!(
            is_void || std::fs::read(path(name)).unwrap() == content,
            "{name} was written to"
        );
    }
    std::fs::create_dir(path("directory")).unwrap();
    assert!(matches!(
        open("directory"),
        StoreError::NotAVolume(_, "directory")
    ));
    rustix::fs::mknodat(
        rustix::fs::CWD,
        path("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    assert!(matches!(open("pipe"), StoreError::NotAVolume(_, "pipe")));
    symlink(path("loop"), path("loop")).unwrap();
    assert!(matches!(open("loop"), StoreError::Io { .. }));
    assert!(matches!(open("absent"), StoreError::Io { .. }));
}

#[test]
fn row_16_a_truncated_volume_is_refused_and_an_extended_one_is_not() {
    let home = Home::with_store(SIZE);
    let keys = chain(1, 4);
    {
        let store = home.open();
        assert_eq!(
            Pool::new(&store, "m", &[65536]).put(&keys),
            [PutStatus::Stored; 4]
        );
        store.close().unwrap();
    }
    let bytes = std::fs::metadata(&home.path).unwrap().len();
    let file = std::fs::File::options()
        .write(true)
        .open(&home.path)
        .unwrap();
    file.set_len(bytes + 12_345).unwrap();
    assert_eq!(Pool::new(&home.open(), "m", &[65536]).hits(&keys), 4);
    file.set_len(20 << 20).unwrap();
    let before = read(&home.path, 0, 20 << 20);
    let error = Store::open(&home.path, OpenOptions::default())
        .err()
        .unwrap();
    assert!(
        matches!(error, StoreError::Truncated { found, .. } if found == 20 << 20),
        "{error}"
    );
    assert!(
        read(&home.path, 0, 20 << 20) == before,
        "a truncated volume was written to"
    );
}

/// Runs `work` in a process of its own, whose limits are its own too.
fn in_a_process_of_its_own(test: &str, work: impl FnOnce()) {
    const MARK: &str = "LARDER_TEST_ALONE";
    if std::env::var(MARK).as_deref() == Ok(test) {
        return work();
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).env(MARK, test);
    let output = child.output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Makes `io_uring_setup` fail with this error for the rest of the process, as a container's
/// seccomp profile does.
fn forbid_io_uring(errno: i32) {
    // Load the number of the system call; is it io_uring_setup; if so this error, else go on.
    let filter = [
        libc::sock_filter {
            code: 0x20,
            jt: 0,
            jf: 0,
            k: 0,
        },
        libc::sock_filter {
            code: 0x15,
            jt: 0,
            jf: 1,
            k: 425,
        },
        libc::sock_filter {
            code: 0x06,
            jt: 0,
            jf: 0,
            k: 0x0005_0000 | errno.unsigned_abs(),
        },
        libc::sock_filter {
            code: 0x06,
            jt: 0,
            jf: 0,
            k: 0x7fff_0000,
        },
    ];
    let program = libc::sock_fprog {
        len: 4,
        filter: filter.as_ptr().cast_mut(),
    };
    // SAFETY: plain numbers.
    let privileges = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(privileges, 0);
    // SAFETY: the program and its filter outlive the call, which copies them.
    let installed = unsafe { libc::prctl(libc::PR_SET_SECCOMP, 2, &raw const program) };
    assert_eq!(installed, 0, "{}", std::io::Error::last_os_error());
}

fn put_and_get(store: &Store) {
    let pool = Pool::new(store, "m", &[65536]);
    assert!(
        pool.put(&chain(1, 4))
            .iter()
            .all(|status| status.is_present())
    );
    assert_eq!(pool.hits(&chain(1, 4)), 4);
}

#[test]
fn row_19_without_io_uring_threads_do_its_work_and_report_the_reason() {
    let test = "place::row_19_without_io_uring_threads_do_its_work_and_report_the_reason";
    in_a_process_of_its_own(test, || {
        let home = Home::with_store(SIZE);
        for errno in [libc::EPERM, libc::ENOSYS] {
            forbid_io_uring(errno);
            let store = home.open();
            let choice = store.disk().unwrap().choice().clone();
            assert_eq!(choice.kind, Kind::Threads);
            assert!(choice.reason.contains("io_uring"), "{choice:?}");
            put_and_get(&store);
            store.close().unwrap();
        }
    });
}

#[test]
fn row_19_a_store_without_lockable_memory_or_descriptors_works_or_reports_it() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let test = "place::row_19_a_store_without_lockable_memory_or_descriptors_works_or_reports_it";
    in_a_process_of_its_own(test, || {
        let home = Home::on_volumes(3, SIZE);
        setrlimit(
            Resource::Memlock,
            Rlimit {
                current: Some(0),
                maximum: Some(0),
            },
        )
        .unwrap();
        let store = home.open();
        let memory = Box::leak(vec![0; 1 << 20].into_boxed_slice());
        let (_, outcome) = store.register(memory);
        assert!(!outcome.is_empty());
        put_and_get(&store);
        store.close().unwrap();
        drop(store);
        let usual = getrlimit(Resource::Nofile);
        let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        // From no descriptor to spare up to enough: an error with a name each time, and then a
        // store.
        let mut opened = false;
        for spare in 0..64 {
            let limit = Rlimit {
                current: Some(open.saturating_sub(1) + spare),
                ..usual
            };
            setrlimit(Resource::Nofile, limit).unwrap();
            match Store::open(&home.path, OpenOptions::default()) {
                Ok(store) => {
                    put_and_get(&store);
                    store.close().unwrap();
                    opened = true;
                    break;
                }
                Err(error) => assert!(
                    matches!(error, StoreError::Io { .. } | StoreError::Disk(_)),
                    "{error}"
                ),
            }
        }
        assert!(opened);
        setrlimit(Resource::Nofile, usual).unwrap();
        put_and_get(&home.open());
    });
}

#[test]
fn row_21_a_file_system_that_buffers_all_the_same_is_noticed_and_served() {
    const UNTESTED: &str = "a file system that buffers all the same";
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
        skipped(UNTESTED, "there is no /dev/shm to write to");
        return;
    };
    let path = directory.path().join("store");
    let options = CreateOptions::new(SIZE);
    match create(&path, &options) {
        Err(StoreError::NoSpace { .. }) => {
            skipped(UNTESTED, format!("/dev/shm has no room for {SIZE} bytes"));
            return;
        }
        created => created.unwrap(),
    };
    {
        let volumes = Volumes::open(&path, &[], Access::ReadOnly, false).unwrap();
        assert!(volumes.present().all(|(_, volume)| !volume.direct));
    }
    {
        let store = Store::open(&path, OpenOptions::default()).unwrap();
        put_and_get(&store);
        store.flush().unwrap();
    }
    let store = Store::open(&path, OpenOptions::default()).unwrap();
    let pool = Pool::new(&store, "m", &[65536]);
    assert_eq!(pool.hits(&chain(1, 4)), 4);
    let absent = GetStatus::Miss(MissReason::Absent);
    assert_eq!(pool.get(&chain(2, 1)), [absent]);
}

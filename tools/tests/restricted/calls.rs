//! System calls that are refused from the start, as container profiles do it.
//!
//! Every command ends: its work is done another way, or its error gives advice.
//! `LARDER_REFUSALS=all` tries each call with every error, instead of one of them.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Child;

use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};

use crate::filters::{self, Serving, can_refuse, end, under, worked};
use crate::support::{directory, larder, stderr, text};

/// How commands end without a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Without {
    /// All work.
    Works,
    /// Each works, or ends with an error that gives advice.
    MayEnd,
}

const CALLS: &[(&str, libc::c_long, Without)] = &[
    ("io_uring_setup", libc::SYS_io_uring_setup, Without::Works),
    ("io_uring_enter", libc::SYS_io_uring_enter, Without::Works),
    (
        "io_uring_register",
        libc::SYS_io_uring_register,
        Without::Works,
    ),
    ("memfd_create", libc::SYS_memfd_create, Without::Works),
    ("statx", libc::SYS_statx, Without::Works),
    ("mlock", libc::SYS_mlock, Without::Works),
    ("madvise", libc::SYS_madvise, Without::Works),
    ("sync_file_range", libc::SYS_sync_file_range, Without::Works),
    ("pidfd_open", libc::SYS_pidfd_open, Without::Works),
    ("inotify_init1", libc::SYS_inotify_init1, Without::Works),
    ("eventfd2", libc::SYS_eventfd2, Without::Works),
    (
        "sched_setaffinity",
        libc::SYS_sched_setaffinity,
        Without::Works,
    ),
    ("membarrier", libc::SYS_membarrier, Without::Works),
    ("copy_file_range", libc::SYS_copy_file_range, Without::Works),
    ("renameat2", libc::SYS_renameat2, Without::Works),
    ("prlimit64", libc::SYS_prlimit64, Without::Works),
    ("getrandom", libc::SYS_getrandom, Without::MayEnd),
    ("fallocate", libc::SYS_fallocate, Without::MayEnd),
    ("flock", libc::SYS_flock, Without::MayEnd),
    ("fcntl", libc::SYS_fcntl, Without::MayEnd),
    ("fdatasync", libc::SYS_fdatasync, Without::MayEnd),
    ("fsync", libc::SYS_fsync, Without::MayEnd),
    ("getsockopt", libc::SYS_getsockopt, Without::MayEnd),
    ("accept4", libc::SYS_accept4, Without::MayEnd),
    ("clone3", libc::SYS_clone3, Without::MayEnd),
];

const ERRORS: [i32; 3] = [libc::EPERM, libc::EACCES, libc::ENOSYS];

/// Serves a store until SIGTERM; whether it was served.
fn serves(child: Child, what: &str) -> bool {
    let serving = Serving::of(child);
    let serves = serving.serves;
    worked(&serving.ended(what), what) && serves
}

fn try_all(path: &Path, name: &str, call: libc::c_long, errno: i32, without: Without) {
    let filters = filters::without(&[call], errno);
    let (new, there) = (path.join("new"), path.join("there"));
    let (new, there) = (text(&new), text(&there));
    let bench = |op| {
        let pages = ["--pages", "4", "--page-bytes", "64KiB", "--batch", "2"];
        [&["bench", there, "--op", op][..], &pages].concat()
    };
    let commands = [
        vec!["create", new, "--size", "128MiB"],
        bench("put"),
        bench("get"),
        vec!["verify", there, "--deep"],
    ];
    let setup = larder(&["create", there, "--size", "128MiB"]).output();
    assert!(setup.unwrap().status.success());
    for arguments in commands {
        let what = format!("`larder {}` without {name} ({errno})", arguments[0]);
        let child = under(&filters, &arguments).spawn().unwrap();
        let did = worked(&end(child, &what), &what);
        assert!(did || without == Without::MayEnd, "{what}");
    }
    let what = format!("`larder serve` without {name} ({errno})");
    let child = under(&filters, &["serve", there]).spawn().unwrap();
    let did = serves(child, &what);
    assert!(did || without == Without::MayEnd, "{what}");
    let what = format!("`larder doctor` without {name} ({errno})");
    let child = under(&filters, &["doctor", text(path)]).spawn().unwrap();
    let output = end(child, &what);
    let said = String::from_utf8_lossy(&output.stdout);
    if output.status.code() != Some(1) {
        let did = worked(&output, &what);
        assert!(did || without == Without::MayEnd, "{what}");
    }
    if name.starts_with("io_uring") {
        assert!(said.contains("threads are used instead"), "{said}");
    }
    std::fs::remove_file(there).unwrap();
    let _ = std::fs::remove_file(new);
}

#[test]
fn every_command_works_another_way_or_ends_with_advice_where_a_call_is_refused() {
    if !can_refuse() {
        return;
    }
    let all = std::env::var("LARDER_REFUSALS").is_ok_and(|value| value == "all");
    let tries = CALLS.iter().enumerate().flat_map(|(at, call)| {
        let errors = ERRORS.iter().enumerate();
        let errors = errors.filter(move |(error, _)| all || error % 3 == at % 3);
        errors.map(move |(_, errno)| (call, *errno))
    });
    let more = [
        ("io_uring_setup", libc::SYS_io_uring_setup),
        ("mlock", libc::SYS_mlock),
    ];
    for ((name, call, without), errno) in tries {
        try_all(directory().path(), name, *call, errno, *without);
    }
    for (name, call) in more {
        try_all(directory().path(), name, call, libc::ENOMEM, Without::Works);
    }
}

#[test]
fn where_a_file_cannot_be_preallocated_a_prewrite_allocates_it() {
    if !can_refuse() {
        return;
    }
    let directory = directory();
    let path = directory.path().join("store");
    // The answer of ext2, and of NFS before 4.2.
    let filters = filters::without(&[libc::SYS_fallocate], libc::EOPNOTSUPP);
    let create = |more: &[&str]| {
        let arguments = [&["create", text(&path), "--size", "128MiB"][..], more].concat();
        let child = under(&filters, &arguments).spawn();
        end(child.unwrap(), "larder create")
    };
    let output = create(&[]);
    assert_eq!(output.status.code(), Some(3));
    let said = stderr(&output);
    assert!(
        said.contains("cannot preallocate") && said.contains("--prewrite"),
        "{said}"
    );
    assert!(!path.exists());
    let output = create(&["--prewrite"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let allocated = path.metadata().unwrap().blocks() * 512;
    assert!(allocated >= 128 << 20, "{allocated} bytes are allocated");
    let doctor = [text(directory.path()), text(&path)].map(|place| {
        let doctor = under(&filters, &["doctor", place]).spawn();
        let output = end(doctor.unwrap(), "larder doctor");
        String::from_utf8(output.stdout).unwrap()
    });
    assert!(doctor[0].contains("--prewrite"), "{}", doctor[0]);
    assert!(doctor[1].contains("all allocated"), "{}", doctor[1]);
}

/// The permissions of a file do not refuse these calls.
#[test]
fn a_refused_lock_or_sync_is_blamed_on_the_seccomp_profile() {
    if !can_refuse() {
        return;
    }
    let directory = directory();
    let beside = |name: &str| directory.path().join(name);
    let (store, new, archive) = (beside("store"), beside("new"), beside("archive"));
    let (store, new, archive) = (text(&store), text(&new), text(&archive));
    let setup = larder(&["create", store, "--size", "128MiB"]).output();
    assert!(setup.unwrap().status.success());
    let create = ["create", new, "--size", "128MiB"];
    let put = ["bench", store, "--op", "put", "--pages", "2"];
    // io_uring syncs without this call.
    let put_on_threads = [&put[..], &["--disk", "threads"]].concat();
    let cases: [(libc::c_long, &[&str]); 7] = [
        (libc::SYS_flock, &create),
        (libc::SYS_flock, &put),
        (libc::SYS_flock, &["doctor", store]),
        (libc::SYS_fcntl, &put),
        (libc::SYS_fdatasync, &put_on_threads),
        (libc::SYS_fsync, &create),
        (libc::SYS_fsync, &["export", store, archive]),
    ];
    for (call, arguments) in cases {
        for errno in [libc::EPERM, libc::ENOSYS] {
            let what = format!("{arguments:?} without call {call} ({errno})");
            let filters = filters::without(&[call], errno);
            let output = end(under(&filters, arguments).spawn().unwrap(), &what);
            assert_ne!(output.status.code(), Some(0), "{what}");
            let said = [&output.stdout[..], &output.stderr].concat();
            let said = String::from_utf8(said).unwrap();
            let seccomp = said.find("seccomp profile");
            let seccomp = seccomp.unwrap_or_else(|| panic!("{what}: {said}"));
            let owner = said.find("the store's owner").unwrap_or(usize::MAX);
            assert!(seccomp < owner, "{what}: {said}");
        }
    }
    // `inspect` needs no lock, and must not blame another process.
    let filters = filters::without(&[libc::SYS_flock], libc::EPERM);
    let output = under(&filters, &["inspect", store]).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success() && !said.contains("IN USE"),
        "{said}"
    );
}

/// Maps that are smaller belong to the C library, which cannot start a process without them.
#[test]
fn memory_that_cannot_be_mapped_ends_in_advice() {
    if !can_refuse() {
        return;
    }
    let directory = directory();
    let beside = |name: &str| directory.path().join(name);
    let (store, new, archive) = (beside("store"), beside("new"), beside("archive"));
    let (store, new, archive) = (text(&store), text(&new), text(&archive));
    let pages = ["--pages", "4", "--page-bytes", "64KiB", "--batch", "2"];
    let bench = |op| [&["bench", store, "--op", op][..], &pages].concat();
    for arguments in [vec!["create", store, "--size", "128MiB"], bench("put")] {
        assert!(larder(&arguments).output().unwrap().status.success());
    }
    let commands = [
        vec!["create", new, "--size", "128MiB"],
        bench("put"),
        bench("get"),
        vec!["inspect", store],
        vec!["verify", store, "--deep"],
        vec!["compact", store],
        vec!["export", store, archive],
        vec!["doctor", store],
        vec!["serve", store],
    ];
    let mut failed = 0;
    // The buffers, then the stacks of threads too.
    for bytes in [3 << 20, 128 << 10] {
        let large = SeccompCmpOp::Ge;
        let large = SeccompCondition::new(1, SeccompCmpArgLen::Qword, large, bytes);
        let anonymous = u64::from(libc::MAP_ANONYMOUS.unsigned_abs());
        let is = SeccompCmpOp::MaskedEq(anonymous);
        let anonymous = SeccompCondition::new(3, SeccompCmpArgLen::Dword, is, anonymous);
        let rule = SeccompRule::new(vec![large.unwrap(), anonymous.unwrap()]);
        let filters = filters::refusing(&[(libc::SYS_mmap, vec![rule.unwrap()])], libc::ENOMEM);
        for arguments in &commands {
            let what = format!("{arguments:?} without maps of {bytes} bytes");
            let child = under(&filters, arguments).spawn().unwrap();
            let did = match arguments[0] {
                "serve" => serves(child, &what),
                _ => worked(&end(child, &what), &what),
            };
            failed += usize::from(!did);
        }
        for made in [new, archive] {
            let _ = std::fs::remove_file(made);
        }
    }
    assert!(failed > 0, "no map was refused");
}

//! System calls that are refused from the start, as container profiles do it.
//!
//! Every command ends: its work is done another way, or its error gives advice.
//! `LARDER_REFUSALS=all` tries each call with every error, instead of one of them.

use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::honest::{PATIENCE, skipped};
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

/// The program of a filter that answers some calls with an error: load the number of the call,
/// compare it with each, and return.
fn filter(calls: &[libc::c_long], errno: i32) -> Vec<libc::sock_filter> {
    let step = |code: u16, jt: usize, k: u32| libc::sock_filter {
        code,
        jt: u8::try_from(jt).unwrap(),
        jf: 0,
        k,
    };
    let mut program = vec![step(0x20, 0, 0)];
    for (before, call) in calls.iter().enumerate() {
        program.push(step(
            0x15,
            calls.len() - before,
            u32::try_from(*call).unwrap(),
        ));
    }
    program.push(step(0x06, 0, 0x7fff_0000));
    program.push(step(0x06, 0, 0x0005_0000 | errno.unsigned_abs()));
    program
}

/// Refuses this process some calls for good.
fn refuse(filter: &[libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: u16::try_from(filter.len()).unwrap_or(0),
        filter: filter.as_ptr().cast_mut(),
    };
    // SAFETY: plain numbers.
    let privileges = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    // SAFETY: the program and its filter outlive the call, which copies them.
    let installed = unsafe { libc::prctl(libc::PR_SET_SECCOMP, 2, &raw const program) };
    if privileges == 0 && installed == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// `larder`, to be refused these calls.
fn refused(calls: &[libc::c_long], errno: i32, arguments: &[&str]) -> Command {
    let filter = filter(calls, errno);
    let mut command = larder(arguments);
    // SAFETY: between fork and exec the closure makes two system calls, and allocates nothing.
    unsafe { command.pre_exec(move || refuse(&filter)) };
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Waits for the end, which must come.
fn end(mut child: Child, what: &str) -> Output {
    let until = Instant::now() + PATIENCE;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > until {
            child.kill().unwrap();
            panic!("{what} never ends: {:?}", child.wait_with_output());
        }
        std::thread::yield_now();
    }
    child.wait_with_output().unwrap()
}

/// Whether a command did its work; if not, its error must give advice.
#[track_caller]
fn worked(output: &Output, what: &str) -> bool {
    let said = stderr(output);
    assert!(output.status.signal().is_none(), "{what}: {output:?}");
    assert!(!said.contains("panicked"), "{what}: {said}");
    match output.status.code() {
        Some(0) => true,
        Some(3) => {
            let advice = ["seccomp", "--prewrite", "limit", "ulimit"];
            assert!(
                advice.iter().any(|word| said.contains(word)),
                "{what}: {said}"
            );
            false
        }
        code => panic!("{what} ends with {code:?}: {said}"),
    }
}

/// Serves a store until SIGTERM; whether it was served.
fn serves(mut child: Child, what: &str) -> bool {
    let mut told = BufReader::new(child.stdout.take().unwrap());
    let mut first = String::new();
    told.read_line(&mut first).unwrap();
    if !first.is_empty() {
        kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
    }
    let output = end(child, what);
    worked(&output, what) && !first.is_empty()
}

fn try_all(path: &Path, name: &str, calls: &[libc::c_long], errno: i32, without: Without) {
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
        let child = refused(calls, errno, &arguments).spawn().unwrap();
        let did = worked(&end(child, &what), &what);
        assert!(did || without == Without::MayEnd, "{what}");
    }
    let what = format!("`larder serve` without {name} ({errno})");
    let child = refused(calls, errno, &["serve", there]).spawn().unwrap();
    let did = serves(child, &what);
    assert!(did || without == Without::MayEnd, "{what}");
    let what = format!("`larder doctor` without {name} ({errno})");
    let child = refused(calls, errno, &["doctor", text(path)])
        .spawn()
        .unwrap();
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

/// Whether this system lets a process refuse itself a call.
fn can_refuse() -> bool {
    let mut command = refused(&[libc::SYS_mbind], libc::EPERM, &["--version"]);
    let works = command.output();
    if let Err(error) = &works {
        skipped("refused system calls", error);
    }
    works.is_ok()
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
        try_all(directory().path(), name, &[*call], errno, *without);
    }
    for (name, call) in more {
        try_all(
            directory().path(),
            name,
            &[call],
            libc::ENOMEM,
            Without::Works,
        );
    }
}

/// Calls that a container of Docker's default profile, and a service under systemd's
/// `SystemCallFilter=@system-service`, are refused.
#[test]
fn under_the_profiles_of_docker_and_of_systemd_every_command_works() {
    if !can_refuse() {
        return;
    }
    let docker = [
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register,
        libc::SYS_mbind,
        libc::SYS_set_mempolicy,
        libc::SYS_get_mempolicy,
        libc::SYS_move_pages,
        libc::SYS_bpf,
        libc::SYS_perf_event_open,
        libc::SYS_userfaultfd,
        libc::SYS_keyctl,
        libc::SYS_mount,
        libc::SYS_unshare,
        libc::SYS_setns,
        libc::SYS_quotactl,
        libc::SYS_kcmp,
    ];
    let systemd = [
        libc::SYS_mount,
        libc::SYS_umount2,
        libc::SYS_bpf,
        libc::SYS_perf_event_open,
        libc::SYS_ptrace,
        libc::SYS_process_vm_readv,
        libc::SYS_clock_settime,
        libc::SYS_reboot,
        libc::SYS_swapon,
        libc::SYS_init_module,
        libc::SYS_quotactl,
        libc::SYS_userfaultfd,
    ];
    for (name, calls) in [("Docker", &docker[..]), ("systemd", &systemd)] {
        try_all(directory().path(), name, calls, libc::EPERM, Without::Works);
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
    let create = |more: &[&str]| {
        let arguments = [&["create", text(&path), "--size", "128MiB"][..], more].concat();
        let child = refused(&[libc::SYS_fallocate], libc::EOPNOTSUPP, &arguments).spawn();
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
        let doctor = refused(&[libc::SYS_fallocate], libc::EOPNOTSUPP, &["doctor", place]).spawn();
        let output = end(doctor.unwrap(), "larder doctor");
        String::from_utf8(output.stdout).unwrap()
    });
    assert!(doctor[0].contains("--prewrite"), "{}", doctor[0]);
    assert!(doctor[1].contains("all allocated"), "{}", doctor[1]);
}

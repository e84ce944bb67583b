//! The profiles of containers and of services: every command works under each.
//!
//! The lists are of x86-64.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use crate::filters::{Filters, Serving, can_refuse, end, named, under, worked};
use crate::support::honest::skipped;
use crate::support::{directory, larder, text};

/// Calls that both lists allow: the one of Docker (moby/profiles, `seccomp/default.json` of
/// June 2026, without capabilities) and the one of systemd 252
/// (`systemd-analyze syscall-filter @system-service`).
const BOTH: &str = "\
    accept accept4 access alarm arch_prctl bind brk capget capset chdir chmod chown clock_getres \
    clock_gettime clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3 \
    epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait \
    epoll_wait_old eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 \
    fadvise64 fallocate fchdir fchmod fchmodat fchown fchownat fcntl fdatasync fgetxattr \
    flistxattr flock fork fremovexattr fsetxattr fstat fstatfs fsync ftruncate futex futex_waitv \
    futimesat get_robust_list get_thread_area getcpu getcwd getdents getdents64 getegid geteuid \
    getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom \
    getresgid getresuid getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday \
    getuid getxattr inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel \
    io_destroy io_getevents io_pgetevents io_setup io_submit ioctl ioprio_get ioprio_set kill \
    lchown lgetxattr link linkat listen listxattr llistxattr lremovexattr lseek lsetxattr lstat \
    madvise membarrier memfd_create mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap \
    mprotect mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink mremap \
    msgctl msgget msgrcv msgsnd msync munlock munlockall munmap name_to_handle_at nanosleep \
    newfstatat open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 poll ppoll \
    prctl pread64 preadv preadv2 prlimit64 process_vm_readv process_vm_writev pselect6 pwrite64 \
    pwritev pwritev2 read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg \
    remap_file_pages removexattr rename renameat renameat2 restart_syscall rmdir rseq \
    rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend \
    rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min \
    sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval \
    sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield select semctl \
    semget semop semtimedop sendfile sendmmsg sendmsg sendto set_robust_list set_thread_area \
    set_tid_address setfsgid setfsuid setgid setgroups setitimer setpgid setpriority setregid \
    setresgid setresuid setreuid setrlimit setsid setsockopt setuid setxattr shmat shmctl shmdt \
    shmget shutdown sigaltstack signalfd signalfd4 socketpair splice stat statfs statx symlink \
    symlinkat sync sync_file_range syncfs sysinfo tee tgkill time timer_create timer_delete \
    timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime \
    times tkill truncate umask uname unlink unlinkat utime utimensat utimes vfork vmsplice wait4 \
    waitid write writev";

/// Further calls that Docker allows. It compares arguments of three more, see [`docker`].
const DOCKER: &str = "\
    adjtimex cachestat clock_adjtime fanotify_mark fchmodat2 futex_requeue futex_wait futex_wake \
    landlock_add_rule landlock_create_ruleset landlock_restrict_self listmount map_shadow_stack \
    memfd_secret mincore modify_ldt mseal pkey_alloc pkey_free pkey_mprotect process_mrelease \
    ptrace seccomp statmount uretprobe";

/// Further calls that systemd allows.
const SYSTEMD: &str = "\
    add_key clone clone3 get_mempolicy io_uring_enter io_uring_register io_uring_setup kcmp \
    keyctl mbind migrate_pages move_pages personality process_madvise request_key set_mempolicy \
    set_mempolicy_home_node setns socket unshare userfaultfd";

fn names<'a>(lists: &'a [&'a str]) -> impl Iterator<Item = Value> + 'a {
    let names = lists.iter().flat_map(|list| list.split_whitespace());
    names.map(|name| json!({"syscall": name}))
}

/// A filter that allows these calls and answers all others with EPERM.
fn allowing(rules: &[Value]) -> Value {
    json!({"mismatch_action": {"errno": libc::EPERM}, "match_action": "allow", "filter": rules})
}

fn docker() -> Filters {
    let mut allowed: Vec<Value> = names(&[BOTH, DOCKER]).collect();
    // Neither a new namespace nor a socket of a rare family. Without `clone3`, whose arguments a
    // filter does not see, the C library takes `clone`.
    let namespaces = json!({"masked_eq": 0x7e02_0000});
    allowed.extend([
        json!({"syscall": "clone3"}),
        json!({"syscall": "clone", "args": [
            {"index": 0, "type": "qword", "op": namespaces, "val": 0}]}),
        json!({"syscall": "socket", "args": [
            {"index": 0, "type": "dword", "op": "lt", "val": 12}]}),
        json!({"syscall": "personality", "args": [
            {"index": 0, "type": "dword", "op": "eq", "val": 0}]}),
    ]);
    let no_clone3 = json!({
        "mismatch_action": "allow",
        "match_action": {"errno": libc::ENOSYS},
        "filter": [{"syscall": "clone3"}],
    });
    named(&json!({"allowed": allowing(&allowed), "clone3": no_clone3}))
}

fn systemd() -> Filters {
    let allowed: Vec<Value> = names(&[BOTH, SYSTEMD]).collect();
    named(&json!({"allowed": allowing(&allowed)}))
}

/// The profile that this repository gives containers, perhaps with further refusals.
fn deployed(refused: &[&str]) -> Filters {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../deploy/seccomp-io-uring.json"
    );
    let profile = std::fs::read(path).unwrap();
    let profile: Value = serde_json::from_slice(&profile).unwrap();
    assert_eq!(profile["defaultAction"], "SCMP_ACT_ALLOW");
    let mut filters: BTreeMap<u64, Vec<Value>> = BTreeMap::new();
    for rule in profile["syscalls"].as_array().unwrap() {
        assert_eq!(rule["action"], "SCMP_ACT_ERRNO");
        let args = rule.get("args").and_then(Value::as_array);
        let args = args.into_iter().flatten().map(|arg| {
            assert_eq!(arg["op"], "SCMP_CMP_MASKED_EQ");
            let op = json!({"masked_eq": arg["value"]});
            json!({"index": arg["index"], "type": "qword", "op": op, "val": arg["valueTwo"]})
        });
        let args: Vec<Value> = args.collect();
        let filter = filters
            .entry(rule["errnoRet"].as_u64().unwrap())
            .or_default();
        for name in rule["names"].as_array().unwrap() {
            let mut rule = json!({"syscall": name});
            if !args.is_empty() {
                rule["args"] = args.clone().into();
            }
            filter.push(rule);
        }
    }
    let eperm = filters
        .entry(libc::EPERM.unsigned_abs().into())
        .or_default();
    eperm.extend(names(refused));
    let filters = filters.into_iter().map(|(errno, filter)| {
        let filter = json!({
            "mismatch_action": "allow", "match_action": {"errno": errno}, "filter": filter,
        });
        (errno.to_string(), filter)
    });
    named(&Value::Object(filters.collect()))
}

/// Every command works; the disk that the owner of a shared store says it has.
fn disk_of_all(profile: &str, filters: &Filters) -> String {
    let directory = directory();
    let beside = |name: &str| directory.path().join(name);
    let [store, archive, other, target] = ["store", "archive", "other", "target"].map(beside);
    let [store, archive, other, target] = [&store, &archive, &other, &target].map(|at| text(at));
    let works = |arguments: &[&str]| {
        let what = format!(
            "`larder {}` under the profile of {profile}",
            arguments.join(" ")
        );
        let output = end(under(filters, arguments).spawn().unwrap(), &what);
        assert!(worked(&output, &what), "{what}: {output:?}");
        output.stdout
    };
    let pages = ["--pages", "8", "--page-bytes", "64KiB", "--batch", "4"];
    let bench = |more: &[&str]| works(&[&["bench", store, "--op"][..], more, &pages].concat());
    works(&["create", store, "--size", "128MiB"]);
    bench(&["put"]);
    bench(&["get"]);
    works(&["inspect", store]);
    works(&["verify", store, "--deep"]);
    works(&["export", store, archive]);
    works(&["create", other, "--size", "128MiB"]);
    works(&["import", other, archive]);
    works(&["compact", store]);
    works(&["compact", store, "--into", target]);
    works(&["doctor", text(directory.path())]);
    let owner = Serving::of(under(filters, &["serve", store]).spawn().unwrap());
    if !owner.serves {
        panic!("{profile}: {:?}", owner.ended("`larder serve`"));
    }
    bench(&["put", "--shared", "--seed", "2"]);
    bench(&["get", "--shared", "--seed", "2"]);
    let told: Value = serde_json::from_slice(&works(&["stat", store, "--json"])).unwrap();
    works(&["doctor", store]);
    let what = format!("`larder serve` under the profile of {profile}");
    let output = owner.ended(&what);
    assert!(worked(&output, &what), "{what}: {output:?}");
    works(&["verify", store, "--deep"]);
    told["disk"].as_str().unwrap().to_owned()
}

#[test]
fn under_the_profiles_of_docker_and_of_systemd_every_command_works() {
    if !can_refuse() {
        return;
    }
    assert_eq!(disk_of_all("Docker", &docker()), "threads");
    disk_of_all("systemd", &systemd());
}

/// Whether the system gives a process without filters io_uring.
fn has_io_uring(beside: &Path) -> bool {
    let said = larder(&["doctor", text(beside)]).output().unwrap().stdout;
    !String::from_utf8_lossy(&said).contains("threads are used instead")
}

#[test]
fn the_profile_for_kubernetes_gives_a_store_io_uring() {
    let directory = directory();
    if !can_refuse() {
        return;
    }
    if !has_io_uring(directory.path()) {
        return skipped("io_uring under the profile for Kubernetes", "there is none");
    }
    assert_eq!(disk_of_all("Kubernetes", &deployed(&[])), "uring");
    let calls = "io_uring_setup io_uring_enter io_uring_register";
    let disk = disk_of_all("Kubernetes without io_uring", &deployed(&[calls]));
    assert_eq!(disk, "threads");
}

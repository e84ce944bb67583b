//! This process and others: pids, users, groups, clocks, random numbers.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::process::Pid;
use rustix::time::{ClockId, clock_gettime};

use super::pages::PageSizes;

/// Inode number of the initial pid namespace (`PROC_PID_INIT_INO` in the kernel's
/// include/linux/proc_ns.h).
const INITIAL_PID_NAMESPACE: u64 = 0xefff_fffc;

/// The pid of this process.
pub fn id() -> u32 {
    std::process::id()
}

/// Seconds since 1970.
pub fn unix_seconds() -> f64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

/// Milliseconds since 1970.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "not negative, and far below 2^64"
)]
pub fn unix_ms() -> u64 {
    (unix_seconds() * 1e3) as u64
}

/// Nanoseconds on the clock that all processes of a machine share, and that no one sets.
pub fn monotonic_nanoseconds() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let part = |part: i64| u64::try_from(part).unwrap_or(0);
    part(now.tv_sec) * 1_000_000_000 + part(now.tv_nsec)
}

/// Milliseconds on the clock that goes on while the machine sleeps, and that no one sets.
pub fn boottime_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let part = |part: i64| u64::try_from(part).unwrap_or(0);
    part(now.tv_sec) * 1000 + part(now.tv_nsec) / 1_000_000
}

/// Whether the kernel states that a time service keeps the time of day right.
pub fn is_clock_synchronised() -> bool {
    // SAFETY: for this struct of integers zeros are a value. Its modes are zero: nothing is set.
    let mut state: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes to this struct alone.
    let outcome = unsafe { libc::adjtimex(&raw mut state) };
    outcome >= 0 && outcome != libc::TIME_ERROR && state.status & libc::STA_UNSYNC == 0
}

/// Ends this process at once: a thread of it cannot go on.
pub fn abort() {
    std::process::abort();
}

/// Whether a process of this pid namespace exists and is no zombie. Asked with signal 0, which is
/// not sent: `/proc` may be that of another pid namespace.
pub fn exists(pid: u32) -> bool {
    let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return false;
    };
    let is_there = rustix::process::test_kill_process(number) != Err(rustix::io::Errno::SRCH);
    is_there && !(sees_own_processes() && is_zombie(pid))
}

/// The name of the program of a process that runs, if `/proc` shows it.
pub fn command(pid: u32) -> Option<String> {
    let name = fs::read_to_string(format!("/proc/{pid}/comm"));
    let name = name.ok().filter(|_| sees_own_processes())?;
    let shown = name.trim_end().chars().filter(|c| !c.is_control());
    Some(shown.collect())
}

/// Whether a signal or a debugger has stopped a process; `None` if `/proc` does not show it.
pub fn is_stopped(pid: u32) -> Option<bool> {
    let state = sees_own_processes().then(|| state(pid)).flatten()?;
    Some(matches!(state, 'T' | 't'))
}

/// Whether a process has exited and waits for its parent: it holds nothing any more.
fn is_zombie(pid: u32) -> bool {
    matches!(state(pid), Some('Z' | 'X'))
}

/// The state of a process, as `ps` shows it.
fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before the state is in parentheses, and may contain parentheses.
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.chars().next()
}

/// Whether `/proc` shows the processes of this process's own pid namespace.
fn sees_own_processes() -> bool {
    let own = fs::read_link("/proc/self");
    own.is_ok_and(|own| own == Path::new(&id().to_string()))
}

/// The scope of this process's pid: the boot id of the machine. For any but the initial pid
/// namespace, the number of that namespace is mixed into it. `None` if `/proc` does not show it.
pub fn pid_scope() -> Option<[u8; 16]> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let boot = u128::from_str_radix(&text.trim().replace('-', ""), 16).ok()?;
    let namespace = fs::metadata("/proc/self/ns/pid").ok()?.ino();
    let mixed = match namespace {
        INITIAL_PID_NAMESPACE => boot,
        other => boot ^ u128::from(other),
    };
    Some(mixed.to_be_bytes())
}

/// The effective user of this process. 0 is root.
pub fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The effective group of this process, and its further groups.
pub fn groups() -> Vec<u32> {
    let further = rustix::process::getgroups().unwrap_or_default();
    let further = further.iter().map(|group| group.as_raw());
    further
        .chain([rustix::process::getegid().as_raw()])
        .collect()
}

/// The two kinds of ids that a user namespace maps.
#[derive(Clone, Copy, Debug)]
pub enum IdKind {
    User,
    Group,
}

/// The map of one kind of ids (`uid_map` or `gid_map`) in the user namespace of this process, and
/// the id that stands for unmapped ones. Each is `None` if `/proc` does not show it.
pub fn id_map(kind: IdKind) -> (Option<String>, Option<u32>) {
    let (map, overflow) = match kind {
        IdKind::User => ("/proc/self/uid_map", "/proc/sys/kernel/overflowuid"),
        IdKind::Group => ("/proc/self/gid_map", "/proc/sys/kernel/overflowgid"),
    };
    let overflow = fs::read_to_string(overflow).ok();
    let overflow = overflow.and_then(|text| text.trim().parse().ok());
    (fs::read_to_string(map).ok(), overflow)
}

/// Resident memory of this process in bytes; zero when the system does not report it.
pub fn resident_bytes() -> u64 {
    let text = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    resident_in(&text, PageSizes::here())
}

fn resident_in(statm: &str, sizes: PageSizes) -> u64 {
    let pages = statm.split_whitespace().nth(1).and_then(|n| n.parse().ok());
    pages.unwrap_or(0) * sizes.small() as u64
}

/// Fills memory with random bytes from the device. A container profile may refuse `getrandom`.
///
/// # Errors
/// If `/dev/urandom` cannot be read.
pub fn fill_random(bytes: &mut [u8]) -> std::io::Result<()> {
    std::io::Read::read_exact(&mut fs::File::open("/dev/urandom")?, bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::process::{Command, Stdio};

    use rustix::process::{Signal, WaitId, WaitIdOptions, kill_process, waitid};

    use super::*;

    #[test]
    fn a_process_is_stopped_between_two_signals() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pid = Pid::from_child(&child);
        let becomes = |signal, state| {
            kill_process(pid, signal).unwrap();
            waitid(WaitId::Pid(pid), state | WaitIdOptions::NOWAIT).unwrap();
            is_stopped(child.id())
        };
        assert_eq!(becomes(Signal::STOP, WaitIdOptions::STOPPED), Some(true));
        assert_eq!(becomes(Signal::CONT, WaitIdOptions::CONTINUED), Some(false));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(is_stopped(child.id()), None);
    }

    #[test]
    fn resident_memory_is_counted_in_pages_of_the_machine() {
        for (small, bytes) in [
            (4 << 10, 2 << 20),
            (16 << 10, 8 << 20),
            (64 << 10, 32 << 20),
        ] {
            let sizes = PageSizes::of(small);
            assert_eq!(resident_in("1000 512 300 1 0 90 0", sizes), bytes);
            assert_eq!(resident_in("", sizes), 0);
        }
    }
}

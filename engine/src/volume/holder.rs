//! The process that a superblock names as the store's holder, as this process sees it.
//!
//! A pid is a number of one pid namespace during one boot. A superblock records both beside the pid
//! (its *scope*), so that a number from another container or another boot is never taken for a
//! process of this one. No decision rests on a pid. The lock decides whether a store is in use; the
//! pid is for display.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use larder_format::Holder;
use rustix::process::Pid;

/// Inode number of the initial pid namespace (`PROC_PID_INIT_INO` in the kernel's
/// include/linux/proc_ns.h).
const INITIAL_PID_NAMESPACE: u64 = 0xefff_fffc;

/// The state of a holder, as far as this process can determine it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HolderState {
    /// The process exists.
    Running,
    /// The process has exited.
    Exited,
    /// The pid belongs to another pid namespace or another boot.
    #[default]
    OutOfSight,
}

/// The holder of a lock, as its superblock names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LockHolder {
    /// Its pid, in its own pid namespace.
    pub pid: u32,
    /// Its state, as far as this process can determine it.
    pub state: HolderState,
}

impl LockHolder {
    /// The holder that a superblock names.
    #[must_use]
    pub fn of(holder: &Holder) -> LockHolder {
        let is_near = pid_scope().is_some_and(|scope| scope == holder.pid_scope);
        let state = match is_near {
            true if exists(holder.pid) => HolderState::Running,
            true => HolderState::Exited,
            false => HolderState::OutOfSight,
        };
        LockHolder {
            pid: holder.pid,
            state,
        }
    }

    /// The name of its program, while it runs.
    pub(crate) fn command(&self) -> Option<String> {
        let is_readable = self.state == HolderState::Running && sees_own_processes();
        let name = fs::read_to_string(format!("/proc/{}/comm", self.pid));
        let name = name.ok().filter(|_| is_readable)?;
        let shown = name.trim_end().chars().filter(|c| !c.is_control());
        Some(shown.collect())
    }
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pid = self.pid;
        match self.state {
            HolderState::Running => write!(f, "process {pid}"),
            HolderState::Exited => write!(
                f,
                "process {pid}, which has exited and whose last writes are still in flight, or by \
                 a child of it, or by a process that is just opening it"
            ),
            HolderState::OutOfSight => f.write_str(
                "a process that is not visible here (in another container or pid namespace, or \
                 just opening it)",
            ),
        }
    }
}

/// This process, as a superblock records it.
#[must_use]
pub fn this_holder() -> Holder {
    Holder {
        pid: std::process::id(),
        // No process has this scope, so the pid is never taken for a local process.
        pid_scope: pid_scope().unwrap_or_default(),
    }
}

/// Whether a process of this pid namespace exists and is no zombie. Asked with signal 0, which is
/// not sent: `/proc` may be that of another pid namespace.
fn exists(pid: u32) -> bool {
    let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return false;
    };
    let is_there = rustix::process::test_kill_process(number) != Err(rustix::io::Errno::SRCH);
    is_there && !(sees_own_processes() && is_zombie(pid))
}

/// Whether a process has exited and waits for its parent: it holds nothing any more.
fn is_zombie(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name before the state is in parentheses, and may contain parentheses.
    let state = stat
        .rsplit_once(") ")
        .and_then(|(_, rest)| rest.chars().next());
    matches!(state, Some('Z' | 'X'))
}

/// Whether `/proc` shows the processes of this process's own pid namespace.
fn sees_own_processes() -> bool {
    let own = fs::read_link("/proc/self");
    own.is_ok_and(|own| own == Path::new(&std::process::id().to_string()))
}

/// The scope of this process's pid: the boot id of the machine. For any but the initial pid
/// namespace, the number of that namespace is mixed into it. `None` if `/proc` does not show it.
fn pid_scope() -> Option<[u8; 16]> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let boot = u128::from_str_radix(&text.trim().replace('-', ""), 16).ok()?;
    let namespace = fs::metadata("/proc/self/ns/pid").ok()?.ino();
    let mixed = match namespace {
        INITIAL_PID_NAMESPACE => boot,
        other => boot ^ u128::from(other),
    };
    Some(mixed.to_be_bytes())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_holder_is_running_until_it_exits_whether_or_not_its_parent_has_waited() {
        let own = LockHolder::of(&this_holder());
        assert_eq!(
            (own.pid, own.state),
            (std::process::id(), HolderState::Running)
        );
        assert!(own.command().is_some());
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let holder = Holder {
            pid: child.id(),
            ..this_holder()
        };
        assert_eq!(LockHolder::of(&holder).state, HolderState::Running);
        drop(child.stdin.take());
        let ends = rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        let pid = Pid::from_child(&child);
        rustix::process::waitid(rustix::process::WaitId::Pid(pid), ends).unwrap();
        assert_eq!(LockHolder::of(&holder).state, HolderState::Exited);
        child.wait().unwrap();
        assert_eq!(LockHolder::of(&holder).state, HolderState::Exited);
    }

    #[test]
    fn the_same_number_in_another_pid_namespace_or_boot_is_out_of_sight() {
        let mut holder = this_holder();
        holder.pid_scope[15] ^= 1;
        let seen = LockHolder::of(&holder);
        assert_eq!(seen.state, HolderState::OutOfSight);
        assert_eq!(seen.command(), None);
        assert!(seen.to_string().contains("container"));
    }
}

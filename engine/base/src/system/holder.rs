//! The process that a superblock names as the store's holder, as this process sees it.
//!
//! A pid is a number of one pid namespace during one boot. A superblock records both beside the pid
//! (its *scope*), so that a number from another container or another boot is never taken for a
//! process of this one. No decision rests on a pid. The lock decides whether a store is in use; the
//! pid is for display.

use std::fmt;

use larder_format::Holder;

use crate::system::processes;

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

/// The holder that a superblock names.
impl From<&Holder> for LockHolder {
    fn from(holder: &Holder) -> LockHolder {
        let is_near = processes::pid_scope().is_some_and(|scope| scope == holder.pid_scope);
        let state = match is_near {
            true if processes::exists(holder.pid) => HolderState::Running,
            true => HolderState::Exited,
            false => HolderState::OutOfSight,
        };
        LockHolder {
            pid: holder.pid,
            state,
        }
    }
}

/// The name of a holder's program, while it runs.
#[must_use]
pub fn command(holder: &LockHolder) -> Option<String> {
    match holder.state {
        HolderState::Running => processes::command(holder.pid),
        HolderState::Exited | HolderState::OutOfSight => None,
    }
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pid = self.pid;
        match self.state {
            HolderState::Running => write!(f, "process {pid}"),
            HolderState::Exited => write!(f, "process {pid}, which has exited"),
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
        pid: processes::id(),
        // No process has this scope, so the pid is never taken for a local process.
        pid_scope: processes::pid_scope().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::process::{Command, Stdio};

    use rustix::process::Pid;

    use super::*;

    #[test]
    fn a_holder_is_running_until_it_exits_whether_or_not_its_parent_has_waited() {
        let own = LockHolder::from(&this_holder());
        assert_eq!(
            (own.pid, own.state),
            (std::process::id(), HolderState::Running)
        );
        assert!(command(&own).is_some());
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let holder = Holder {
            pid: child.id(),
            ..this_holder()
        };
        assert_eq!(LockHolder::from(&holder).state, HolderState::Running);
        drop(child.stdin.take());
        let ends = rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        let pid = Pid::from_child(&child);
        rustix::process::waitid(rustix::process::WaitId::Pid(pid), ends).unwrap();
        assert_eq!(LockHolder::from(&holder).state, HolderState::Exited);
        child.wait().unwrap();
        assert_eq!(LockHolder::from(&holder).state, HolderState::Exited);
    }

    #[test]
    fn the_same_number_in_another_pid_namespace_or_boot_is_out_of_sight() {
        let mut holder = this_holder();
        holder.pid_scope[15] ^= 1;
        let seen = LockHolder::from(&holder);
        assert_eq!(seen.state, HolderState::OutOfSight);
        assert_eq!(command(&seen), None);
        assert!(seen.to_string().contains("container"));
    }
}

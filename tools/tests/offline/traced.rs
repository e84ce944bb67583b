//! A command that is killed before one of its calls that change a file.

use std::ffi::c_long;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::support::honest::skipped;

/// The calls that change a file, or a name.
const CHANGES: &[c_long] = &[
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_linkat,
    libc::SYS_unlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
];

/// Bytes of a write that are kept.
const BEGIN: usize = 700;

/// A write that was not executed.
pub struct Write {
    pub path: PathBuf,
    pub offset: u64,
    /// Its first bytes.
    pub begin: Vec<u8>,
}

/// The end of a traced command.
pub enum End {
    /// It was killed before the call. That of a write is known.
    Killed(Option<Write>),
    /// It ended before that call, with this code.
    Ended(i32),
}

/// Whether this system lets a process trace its children.
pub fn can_trace() -> bool {
    match end_at(Command::new("true"), usize::MAX) {
        Ok(_) => true,
        Err(error) => {
            skipped("kills before each call", error);
            false
        }
    }
}

/// Runs a command up to the call with this number, of the calls that change files in any of its
/// threads.
pub fn end_at(mut command: Command, call: usize) -> io::Result<End> {
    // SAFETY: between fork and exec the closure makes one system call, and allocates nothing.
    unsafe { command.pre_exec(|| Ok(ptrace::traceme()?)) };
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn()?;
    let pid = Pid::from_raw(child.id().cast_signed());
    let ended = trace(pid, call);
    // After its end `waitpid` has taken its status: this fails then, or takes it.
    let _ = child.kill();
    let _ = child.wait();
    ended
}

fn trace(pid: Pid, call: usize) -> io::Result<End> {
    // Children of this thread alone: other tests have theirs.
    let any = Some(WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD);
    waitpid(pid, any)?;
    let options =
        Options::PTRACE_O_TRACESYSGOOD | Options::PTRACE_O_TRACECLONE | Options::PTRACE_O_EXITKILL;
    ptrace::setoptions(pid, options)?;
    ptrace::syscall(pid, None)?;
    let mut seen = 0;
    let mut killed = None;
    loop {
        let (thread, signal) = match waitpid(None, any)? {
            WaitStatus::Exited(of, code) if of == pid => return Ok(End::Ended(code)),
            WaitStatus::Signaled(of, signal, _) if of == pid => {
                return match killed {
                    Some(at) => Ok(End::Killed(at)),
                    None => Err(io::Error::other(format!("it ended by {signal}"))),
                };
            }
            WaitStatus::PtraceSyscall(thread) => {
                if let Some((number, arguments)) = entered(thread)?
                    && CHANGES.contains(&number)
                {
                    if seen == call {
                        killed = Some(write(pid, number, arguments)?);
                        kill(pid, Signal::SIGKILL)?;
                        continue;
                    }
                    seen += 1;
                }
                (thread, None)
            }
            // The first stop of a new thread is by no signal of the system.
            WaitStatus::Stopped(thread, Signal::SIGSTOP | Signal::SIGTRAP) => (thread, None),
            WaitStatus::Stopped(thread, signal) => (thread, Some(signal)),
            WaitStatus::PtraceEvent(thread, ..) => (thread, None),
            _ => continue,
        };
        match ptrace::syscall(thread, signal) {
            // It has been killed with the others.
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The call that a thread has entered, if it has not left one.
fn entered(thread: Pid) -> io::Result<Option<(c_long, [u64; 6])>> {
    let info = match ptrace::syscall_info(thread) {
        Err(Errno::ESRCH) => return Ok(None),
        info => info?,
    };
    if info.op != libc::PTRACE_SYSCALL_INFO_ENTRY {
        return Ok(None);
    }
    // SAFETY: the kernel has filled in the part for an entry.
    let entry = unsafe { info.u.entry };
    Ok(Some((entry.nr.cast_signed(), entry.args)))
}

/// The write of a call, if it is one.
fn write(pid: Pid, number: c_long, arguments: [u64; 6]) -> io::Result<Option<Write>> {
    let memory = File::open(format!("/proc/{pid}/mem"))?;
    let [file, mut from, _, offset, ..] = arguments;
    match number {
        libc::SYS_pwrite64 => {}
        libc::SYS_pwritev | libc::SYS_pwritev2 => {
            // The address of the first piece.
            let mut address = [0; 8];
            memory.read_exact_at(&mut address, from)?;
            from = u64::from_ne_bytes(address);
        }
        _ => return Ok(None),
    }
    let mut begin = vec![0; BEGIN];
    memory.read_exact_at(&mut begin, from)?;
    let path = fs::read_link(format!("/proc/{pid}/fd/{file}"))?;
    Ok(Some(Write {
        path,
        offset,
        begin,
    }))
}

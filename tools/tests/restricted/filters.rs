//! `larder` under seccomp filters, which it finds installed when it starts.

use std::io::{self, BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompFilter, SeccompRule, TargetArch, apply_filter,
    compile_from_json,
};
use serde_json::Value;

use crate::support::honest::{PATIENCE, skipped};
use crate::support::{larder, stderr};

/// Filters of one process: each call gets the strictest of their answers.
pub type Filters = Vec<BpfProgram>;

fn machine() -> TargetArch {
    std::env::consts::ARCH.try_into().unwrap()
}

/// Answers calls with an error: all calls, or the calls that match a rule.
pub fn refusing(calls: &[(libc::c_long, Vec<SeccompRule>)], errno: i32) -> Filters {
    let error = SeccompAction::Errno(errno.unsigned_abs());
    let rules = calls.iter().cloned().collect();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, error, machine());
    vec![filter.unwrap().try_into().unwrap()]
}

/// Answers all of these calls with an error.
pub fn without(calls: &[libc::c_long], errno: i32) -> Filters {
    let calls: Vec<_> = calls.iter().map(|call| (*call, Vec::new())).collect();
    refusing(&calls, errno)
}

/// Filters in the JSON of seccompiler, which has the numbers of the calls.
pub fn named(filters: &Value) -> Filters {
    let filters = compile_from_json(filters.to_string().as_bytes(), machine());
    filters.unwrap().into_values().collect()
}

/// `larder` under these filters.
pub fn under(filters: &Filters, arguments: &[&str]) -> Command {
    let filters = filters.clone();
    let install = move || {
        for filter in &filters {
            apply_filter(filter).map_err(|error| match error {
                seccompiler::Error::Prctl(error) | seccompiler::Error::Seccomp(error) => error,
                _ => io::ErrorKind::Unsupported.into(),
            })?;
        }
        Ok(())
    };
    let mut command = larder(arguments);
    // SAFETY: between fork and exec the closure makes system calls, and allocates nothing.
    unsafe { command.pre_exec(install) };
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Whether this system lets a process refuse itself a call.
pub fn can_refuse() -> bool {
    let filters = without(&[libc::SYS_mbind], libc::EPERM);
    let works = under(&filters, &["--version"]).output();
    if let Err(error) = &works {
        skipped("refused system calls", error);
    }
    works.is_ok()
}

/// Waits for the end, which must come.
pub fn end(mut child: Child, what: &str) -> Output {
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
pub fn worked(output: &Output, what: &str) -> bool {
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

/// A process that serves a store, and ends with its test.
pub struct Serving {
    child: Option<Child>,
    /// Whether it said so before it ended.
    pub serves: bool,
    _told: BufReader<ChildStdout>,
}

impl Serving {
    /// Waits until the store is served, or the process ends.
    pub fn of(mut child: Child) -> Serving {
        let mut told = BufReader::new(child.stdout.take().unwrap());
        let mut first = String::new();
        told.read_line(&mut first).unwrap();
        Serving {
            child: Some(child),
            serves: !first.is_empty(),
            _told: told,
        }
    }

    /// Its end by SIGTERM, or of its own accord.
    pub fn ended(mut self, what: &str) -> Output {
        let child = self.child.take().unwrap();
        if self.serves {
            kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
        }
        end(child, what)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

//! The checks of a path, in a process of their own.
//!
//! A call on a volume that hangs keeps its process in the kernel until the device answers; not even
//! a kill ends that. So a child makes the calls, and says each fact when it is found. If it is
//! silent for too long, this process leaves it behind, and ends with the facts so far.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use clap::Args;
use larder_disk::probe::Fact;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::facts::{Facts, Said};
use super::place;
use crate::failure::{Ending, Failure};
use crate::program::Program;

/// Longest time between two facts.
const PATIENCE: Duration = Duration::from_secs(5);

/// The checks of a path, for the process that asks for them
#[derive(Args, Debug)]
pub struct ChecksArgs {
    path: PathBuf,
}

/// The facts that a child has found.
pub(super) struct Checked {
    pub(super) facts: Vec<Fact>,
    /// No check was left out.
    pub(super) is_whole: bool,
}

/// Makes the checks, and says their facts.
pub fn run(args: &ChecksArgs) -> Result<Ending, Failure> {
    let mut facts = Facts {
        are_said: true,
        ..Facts::default()
    };
    if let Err(failure) = place(&args.path, &mut facts) {
        Said::Failed(failure.to_string()).say();
    }
    Ok(Ending::Done)
}

/// Checks a path. If the first child does not end, the owner of the store knows by then which
/// volume hangs, and a second child spares it.
pub(super) fn checked(program: &Program, path: &Path) -> Result<Checked, Failure> {
    let (first, hangs_at) = listen(program, path)?;
    let Some(hangs_at) = hangs_at else {
        return Ok(first);
    };
    let (second, still_hangs) = listen(program, path)?;
    let mut facts = match still_hangs {
        None => second.facts,
        Some(_) => first.facts,
    };
    let what = format!(
        "{hangs_at}: a check has not ended within {} s: the volume or its file system hangs \
         (`dmesg` names the device)",
        PATIENCE.as_secs()
    );
    facts.push(Fact::fail("answers", what));
    Ok(Checked {
        facts,
        is_whole: false,
    })
}

/// Starts a child, and takes its facts. If it is silent for too long, it is left behind; returns
/// the file that it was examining.
fn listen(program: &Program, path: &Path) -> Result<(Checked, Option<String>), Failure> {
    let failed = |error: io::Error| {
        Failure::environment(format!("starting the checks of the path: {error}"))
            .with_hint("raise the limits on processes and memory: ulimit -u, ulimit -v, TasksMax=")
    };
    // A child that is left behind keeps no output of this process open.
    let mut child = program
        .command()
        .map_err(failed)?
        .arg("doctor-checks")
        .arg("--")
        .arg(path)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(failed)?;
    let mut checked = Checked {
        facts: Vec::new(),
        is_whole: true,
    };
    let mut at = path.display().to_string();
    let mut output = child.stdout.take();
    let mut unread = Vec::new();
    while let Some(pipe) = &mut output {
        if !has_more(pipe).map_err(failed)? {
            // It ends when the kernel lets it go.
            let _ = child.kill();
            return Ok((checked, Some(at)));
        }
        let mut bytes = [0; 4096];
        match pipe.read(&mut bytes) {
            Ok(0) => output = None,
            Ok(count) => unread.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(error)),
        }
        while let Some(end) = unread.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = unread.drain(..=end).collect();
            match serde_json::from_slice(&line) {
                Ok(Said::Examines(path)) => at = path,
                Ok(Said::Found(fact)) => checked.facts.push(fact),
                Ok(Said::LeavesOut) => checked.is_whole = false,
                Ok(Said::Failed(message)) => return Err(Failure::environment(message)),
                // Not of the checks: another line of the program that runs them.
                Err(_) => {}
            }
        }
    }
    let ended = child.wait().map_err(failed)?;
    match ended.success() {
        true => Ok((checked, None)),
        false => Err(Failure::environment(format!(
            "the checks of the path have failed ({ended}); report this as a bug"
        ))),
    }
}

/// Whether the pipe has bytes, or its end, in time.
fn has_more(pipe: &impl std::os::fd::AsFd) -> io::Result<bool> {
    let patience = Timespec::try_from(PATIENCE).ok();
    loop {
        let mut pipes = [PollFd::new(pipe, PollFlags::IN)];
        match poll(&mut pipes, patience.as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

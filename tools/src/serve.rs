//! `larder serve`: owns a store as long as it runs, so that other processes can attach to it.
//!
//! The first process to attach would do the same work. Use this command if ownership must not move
//! when one of those processes ends. It ends on SIGINT, SIGTERM or SIGHUP, with the store closed
//! cleanly.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use larder_engine::disk::probe::limit;
use larder_engine::share::{Part, report, socket_path};
use larder_engine::{PageStore, Store};
use rustix::process::{Resource, Rlimit, setrlimit};
use serde::Serialize;

use crate::disk::DiskFacts;
use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::open::{OpenArgs, ShareArgs};
use crate::place;
use crate::report::{self as output, Lines, Report};
use crate::stat::process;

/// Longest sleep between two wakeups.
const SLEEP: Duration = Duration::from_secs(24 * 60 * 60);

/// Own a store and serve it to other processes, until stopped
#[derive(Args, Debug)]
pub struct ServeArgs {
    /// The store: its first volume, or a backend's directory
    #[arg(value_parser = place::parser())]
    path: PathBuf,
    /// Let members of this group (a number) attach too, besides the user that the store belongs to
    #[arg(long, value_name = "GID")]
    group: Option<u32>,
    #[command(flatten)]
    open: OpenArgs,
    #[command(flatten)]
    share: ShareArgs,
    /// Print one JSON document once the store is served
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct ServeReport {
    /// The store: its first volume.
    path: PathBuf,
    /// The socket for clients.
    socket: PathBuf,
    /// Pages in the store.
    pages: u64,
    /// The disk that moves the owner's bytes, and the reason for its choice.
    #[serde(flatten)]
    disk: DiskFacts,
}

impl Report for ServeReport {
    const COMMAND: &'static str = "serve";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        lines.row("Serving on", self.socket.display().to_string());
        lines.row("Pages", self.pages.to_string());
        lines.row("Disk", self.disk.to_string());
        lines
    }
}

/// Each connection of a client costs a descriptor, and the usual limit is low for the sake of old
/// programs.
fn take_descriptors() {
    // An exhausted limit is reported when a connection cannot be accepted.
    let Ok(limit) = limit(Resource::Nofile) else {
        return;
    };
    let all = Rlimit {
        current: limit.maximum,
        ..limit
    };
    let _ = setrlimit(Resource::Nofile, all);
}

/// Another process serves the store.
fn served(path: &Path, owner: Option<u32>) -> Failure {
    Failure::environment(format!(
        "{}: {} serves it already; see `larder stat`",
        path.display(),
        process(owner)
    ))
}

/// Runs the command.
pub fn run(args: &ServeArgs) -> Result<Ending, Failure> {
    let interrupt = Interrupt::watch();
    if let Ok(running) = report(&args.path) {
        return Err(served(&args.path, running.pid));
    }
    take_descriptors();
    let store = Store::attach(&args.path, args.share.options(&args.open, args.group))?;
    if store.part() != Part::Owner {
        let owner = store.report().ok().and_then(|running| running.pid);
        store.close()?;
        return Err(served(&args.path, owner));
    }
    // A container profile may allow listening, and refuse to accept connections.
    if let Err(error) = report(&args.path) {
        store.close()?;
        return Err(Failure::environment(format!(
            "{}: this process cannot serve it: its own socket does not answer ({error}); \
             allow accept4 and getsockopt \
             in the container's seccomp profile",
            args.path.display()
        )));
    }
    let stats = store.stats();
    let served = ServeReport {
        path: args.path.clone(),
        socket: socket_path(&args.path),
        pages: stats.pages,
        disk: DiskFacts::of(&stats.disk),
    };
    output::print(&served, args.json)?;
    while !interrupt.wait(SLEEP) {}
    store.close()?;
    Ok(Ending::Done)
}

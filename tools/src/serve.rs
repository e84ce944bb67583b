//! `larder serve`: owns a store as long as it runs, so that other processes can attach to it.
//!
//! The first process to attach would do the same work. Use this command if ownership must not move
//! when one of those processes ends. If another process owns the store, it attaches as a client
//! and asks for the ownership, which the owner hands over in order. An owner that is `larder serve`
//! too, or of an older release, keeps it: then this process waits for the end of that owner. It
//! ends on SIGINT, SIGTERM or SIGHUP, with the store closed cleanly.
//!
//! A service manager is notified (`sd_notify`) when it serves the store or waits for it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use larder_engine::{PageStore, Part, Store, report};
use larder_store::quotas::{QuotaChange, QuotaSpec};
use larder_store::share::change_quotas;
use larder_store::volume::socket::socket_path;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use sd_notify::NotifyState;
use serde::Serialize;

use crate::disk::DiskFacts;
use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::l4::{L4, L4Args};
use crate::open::ShareArgs;
use crate::owner::process;
use crate::place;
use crate::quota;
use crate::report::{self as output, Lines, Report};

/// Interval at which a waiting client looks whether it is the owner.
const LOOK: Duration = Duration::from_millis(200);

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
    /// Set this quota at the start, in place of the former one of its group
    ///
    /// As model=NAME,min=1TiB,max=2TiB,max-age=30d, with namespace=FINGERPRINT or tenant=NAME for
    /// other groups. Repeat it for each group. `larder quota` shows and changes quotas.
    #[arg(long = "quota", value_name = "QUOTA", value_parser = quota::spec)]
    quotas: Vec<QuotaSpec>,
    #[command(flatten)]
    share: ShareArgs,
    #[command(flatten)]
    l4: L4Args,
    /// Print one JSON document once the store is served, and before it, if it has to wait
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct ServeReport {
    /// The store: its first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// The socket for clients.
    #[serde(serialize_with = "crate::report::paths")]
    socket: PathBuf,
    /// Whether another process owns the store. This one serves it when that one hands it over or
    /// ends.
    waiting: bool,
    /// The owner's process, if it is visible here.
    pid: Option<u32>,
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
        if self.waiting {
            lines.row("Waiting", self.status());
            return lines;
        }
        lines.row("Serving on", self.socket.display().to_string());
        lines.row("Pages", self.pages.to_string());
        lines.row("Disk", self.disk.to_string());
        lines
    }
}

impl ServeReport {
    fn of(args: &ServeArgs, store: &Store, part: Part) -> Result<ServeReport, Failure> {
        // A container profile may allow listening, and refuse to accept connections.
        let running = report(&args.path);
        if let (Part::Owner, Err(error)) = (part, &running) {
            return Err(Failure::environment(format!(
                "{}: this process cannot serve it: its own socket does not answer ({error}); \
                 allow accept4 and getsockopt in the container's seccomp profile",
                args.path.display()
            )));
        }
        let stats = store.stats();
        Ok(ServeReport {
            path: args.path.clone(),
            socket: socket_path(&args.path),
            waiting: part != Part::Owner,
            pid: running.ok().and_then(|running| running.pid),
            pages: stats.pages,
            disk: DiskFacts::of(&stats.disk),
        })
    }

    /// The state in a sentence.
    fn status(&self) -> String {
        match self.waiting {
            true => format!(
                "as a client: {} owns the store; this process serves it when that one hands it \
                 over or ends",
                process(self.pid)
            ),
            false => format!("serving {} pages", self.pages),
        }
    }
}

/// Each connection of a client costs a descriptor, and the usual limit is low for the sake of old
/// programs.
fn take_descriptors() {
    // An exhausted limit is reported when a connection cannot be accepted.
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

/// Keeps the memory of this process, which has keys and pages in clear, out of core dumps, and from
/// other processes of the same user.
fn keep_from_dumps() -> Result<(), Failure> {
    let kept = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    kept.map_err(|error| {
        Failure::environment(format!(
            "this process would be written into core dumps, with its keys ({error}): allow \
             prctl(PR_SET_DUMPABLE) in the container's seccomp profile"
        ))
    })
}

/// Runs the command.
pub fn run(args: &ServeArgs) -> Result<Ending, Failure> {
    let interrupt = Interrupt::watch();
    take_descriptors();
    if args.share.has_key() {
        keep_from_dumps()?;
    }
    let l4 = args.l4.config().connect()?;
    let mut options = args.share.options()?.with(|o| {
        o.group = args.group;
        o.keeps_ownership = true;
    });
    if let Some(l4) = &l4 {
        options = l4.beneath(options);
    }
    let store = Arc::new(Store::attach(&args.path, options)?);
    for spec in &args.quotas {
        change_quotas(&store, &QuotaChange::Set(spec.clone()))?;
    }
    let started = l4.iter().try_for_each(|l4| l4.start(&store, &args.path));
    let started =
        started.map_err(|error| Failure::environment(format!("starting a thread: {error}")));
    let served = match started {
        Ok(()) => serve(args, &store, &interrupt),
        Err(error) => Err(error),
    };
    tell(&[
        NotifyState::Stopping,
        NotifyState::Status("closing the store"),
    ]);
    l4.iter().for_each(L4::close);
    let closed = store.close();
    served?;
    closed?;
    Ok(Ending::Done)
}

/// Serves the store, or waits until it may, until the operator ends it.
fn serve(args: &ServeArgs, store: &Store, interrupt: &Interrupt) -> Result<(), Failure> {
    let mut shown = None;
    loop {
        let part = store.part();
        if part != Part::Nobody && shown != Some(part) {
            let report = ServeReport::of(args, store, part)?;
            tell(&[NotifyState::Ready, NotifyState::Status(&report.status())]);
            output::print(&report, args.json)?;
            shown = Some(part);
        }
        let pause = if part == Part::Owner { SLEEP } else { LOOK };
        if interrupt.wait(pause) {
            return Ok(());
        }
    }
}

/// Tells the service manager, if there is one (`NOTIFY_SOCKET`).
fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "the service manager cannot be notified; is NOTIFY_SOCKET right?");
    }
}

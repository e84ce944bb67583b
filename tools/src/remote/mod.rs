//! `larder remote`: runs of pages in a place that nodes share, and from it into a store.
//!
//! `push` reads a store as `export` does, without opening it. `pull` stores pages as `import` does.
//! Both are for an operator: before a roll-out, or for a new node.
//!
//! | module | command |
//! |---|---|
//! | `key` | `key`: makes a key file |
//! | `bench` | `bench`: the speed of a bucket; with the feature `remote` alone |
//! | `init` | `init`: the settings of a bucket |
//! | `push`, `pull` | runs from a store, and into one |
//! | `shelf` | `ls`, `verify`, `prune`: the objects themselves |
//! | `switch` | `on`, `off`: the remotes of a store in use |
//! | `left_out` | the objects that a command leaves out |
//!
//! An object that cannot be looked at, read, written or removed is left out and named, and the
//! command ends with 1. Errors of the remote itself end a command.

#[cfg(feature = "remote")]
mod bench;
mod init;
mod key;
mod left_out;
mod pull;
mod push;
mod shelf;
mod switch;

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use larder_remote::{
    Buffer, Keyring, Listed, OBJECT_BYTES_MAX, Place, Remote, RemoteError, RunName, Trust,
};
use serde::Serialize;

use crate::failure::{Ending, Failure};
use crate::report::{Lines, count};
use crate::size::{self, ByteSize};
use left_out::LeftOut;

/// Share pages between nodes: in an object store, or a directory that all of them mount
///
/// Exit codes: 0 done, 1 something is damaged, forged, unreadable or incomplete, 2 usage, 3
/// environment, also a place that is no remote yet, 130 interrupted.
#[derive(Args, Debug)]
pub struct RemoteArgs {
    #[command(subcommand)]
    command: RemoteCommand,
}

#[derive(Debug, Subcommand)]
enum RemoteCommand {
    Init(init::InitArgs),
    Key(key::KeyArgs),
    Push(push::PushArgs),
    Pull(pull::PullArgs),
    Ls(shelf::LsArgs),
    Verify(shelf::VerifyArgs),
    Prune(shelf::PruneArgs),
    #[cfg(feature = "remote")]
    Bench(bench::BenchArgs),
    /// Make no requests to the remotes of a store in use, until `larder remote on` or the end of
    /// its owner
    Off(switch::SwitchArgs),
    /// Resume the work of the remotes of a store in use
    On(switch::SwitchArgs),
}

/// Runs the command.
///
/// # Errors
/// Those of the subcommand.
pub fn run(args: &RemoteArgs) -> Result<Ending, Failure> {
    match &args.command {
        RemoteCommand::Init(args) => init::run(args),
        RemoteCommand::Key(args) => key::run(args),
        RemoteCommand::Push(args) => push::run(args),
        RemoteCommand::Pull(args) => pull::run(args),
        RemoteCommand::Ls(args) => shelf::ls(args),
        RemoteCommand::Verify(args) => shelf::verify(args),
        RemoteCommand::Prune(args) => shelf::prune(args),
        #[cfg(feature = "remote")]
        RemoteCommand::Bench(args) => bench::run(args),
        RemoteCommand::Off(args) => switch::run(args, false),
        RemoteCommand::On(args) => switch::run(args, true),
    }
}

/// The remote of a command.
#[derive(Args, Clone, Debug)]
struct PlaceArgs {
    /// The remote: s3://BUCKET/PREFIX or file:///DIRECTORY
    #[arg(value_name = "URL")]
    url: String,
    /// The URL of the S3 service, if it is not AWS
    #[arg(long, value_name = "URL")]
    endpoint: Option<String>,
    /// A PEM file of certificate authorities to trust instead of the system's
    #[arg(long, value_name = "FILE")]
    ca_file: Option<PathBuf>,
    /// Longest wait for an answer of the remote, and for the next part of a listing
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = size::duration)]
    timeout: Duration,
}

impl PlaceArgs {
    fn connect(&self) -> Result<Box<dyn Remote>, Failure> {
        let place = Place {
            url: self.url.clone(),
            endpoint: self.endpoint.clone(),
            ca_file: self.ca_file.clone(),
        };
        Ok(place.connect()?)
    }

    /// A client of the remote, which answers and has its mark.
    fn open(&self) -> Result<Box<dyn Remote>, Failure> {
        let remote = self.connect()?;
        remote.look(self.deadline())?;
        Ok(remote)
    }

    /// A client of the remote, which is made if it is new.
    fn open_or_make(&self) -> Result<Box<dyn Remote>, Failure> {
        let remote = self.connect()?;
        match remote.look(self.deadline()) {
            Err(RemoteError::Unmarked(_)) => remote.mark(self.deadline())?,
            looked => looked?,
        }
        Ok(remote)
    }

    /// The end of a wait that begins now.
    fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// All objects that can be looked at, or some of them if it is stopped.
    fn list(
        &self,
        remote: &dyn Remote,
        left_out: &mut LeftOut,
        is_stopped: impl Fn() -> bool,
    ) -> Result<Vec<Listed>, Failure> {
        let mut listed = Vec::new();
        let mut each = |object| {
            match object {
                Ok(object) => listed.push(object),
                Err(object) => left_out.listed(object),
            }
            match is_stopped() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        };
        remote.list(None, &mut each, self.timeout)?;
        Ok(listed)
    }

    /// A listed object.
    fn fetch(&self, remote: &dyn Remote, object: &Listed) -> Result<Fetched, Failure> {
        if object.bytes > OBJECT_BYTES_MAX as u64 {
            let most = ByteSize(OBJECT_BYTES_MAX as u64);
            return Ok(Fetched::Unread(format!("it is longer than {most}")));
        }
        match remote.fetch(&object.run, OBJECT_BYTES_MAX, self.deadline()) {
            Ok(Some(bytes)) => Ok(Fetched::Object(bytes)),
            Ok(None) => Ok(Fetched::Gone),
            Err(error) => self.reason(remote, error).map(Fetched::Unread),
        }
    }

    /// The reason to leave an object out, if the remote itself does not fail.
    fn reason(&self, remote: &dyn Remote, error: RemoteError) -> Result<String, Failure> {
        if matches!(error, RemoteError::NoService(_)) {
            return Err(error.into());
        }
        remote.look(self.deadline())?;
        Ok(error.to_string())
    }

    /// Leaves out those objects that were listed, could not be fetched because they are not there,
    /// and are listed all the same. The others were removed meanwhile.
    fn look_again(
        &self,
        remote: &dyn Remote,
        gone: &HashSet<RunName>,
        left_out: &mut LeftOut,
    ) -> Result<(), Failure> {
        if gone.is_empty() {
            return Ok(());
        }
        let mut each = |object: Result<Listed, _>| {
            // The others have been named.
            let run = object.ok().map(|object: Listed| object.run);
            if let Some(run) = run.filter(|run| gone.contains(run)) {
                left_out.add(&run, "it is listed, and cannot be fetched: it is not there");
            }
            ControlFlow::Continue(())
        };
        Ok(remote.list(None, &mut each, self.timeout)?)
    }
}

/// The outcome of a fetch.
enum Fetched {
    Object(Buffer),
    /// It is not there.
    Gone,
    /// It cannot be read, for this reason. Other objects can.
    Unread(String),
}

/// The keys of a command.
#[derive(Args, Clone, Debug)]
#[group(required = true, multiple = false)]
struct TrustArgs {
    /// The file with the key of the nodes; `larder remote key` makes one
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Without keys: everybody who can write to the remote can plant pages
    #[arg(long)]
    unsigned: bool,
}

impl TrustArgs {
    fn load(&self) -> Result<Trust, Failure> {
        match &self.key_file {
            Some(path) => Ok(Trust::Sealed(Keyring::load(path)?)),
            None => Ok(Trust::Unsigned),
        }
    }
}

/// The reports of `push` and `pull` begin with the same fields.
#[derive(Default, Serialize)]
struct Between {
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    remote: String,
    present_runs: u64,
    unreadable: LeftOut,
    interrupted: bool,
}

impl Between {
    fn new(path: &Path, place: &PlaceArgs) -> Between {
        Between {
            path: path.to_owned(),
            remote: place.url.clone(),
            ..Between::default()
        }
    }

    fn last_lines(&self, lines: &mut Lines) {
        self.unreadable.lines(lines);
        if self.interrupted {
            lines.text("Interrupted: run it again for the rest.");
        }
    }
}

/// `3 runs, 96 MiB`.
fn size_of_runs(runs: u64, bytes: u64) -> String {
    format!("{}, {}", count(runs, "run"), ByteSize(bytes))
}

/// The end of a command that can be interrupted.
fn ending(interrupted: bool, has_findings: bool) -> Ending {
    match (interrupted, has_findings) {
        (true, _) => Ending::Interrupted,
        (false, true) => Ending::Findings,
        (false, false) => Ending::Done,
    }
}

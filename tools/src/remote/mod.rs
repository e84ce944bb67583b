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
//! | `cost` | the cost of an L4 in a bucket |
//! | `push`, `pull` | runs from a store, and into one |
//! | `shelf` | `ls`, `verify`, `prune`: the objects themselves |
//! | `switch` | `on`, `off`: the remotes of a store in use |

#[cfg(feature = "remote")]
mod bench;
pub mod cost;
mod init;
mod key;
mod pull;
mod push;
mod shelf;
mod switch;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use larder_remote::{
    Buffer, KeyError, Keyring, Listed, OBJECT_BYTES_MAX, Place, PlaceError, Remote, RemoteError,
    Trust,
};
use serde::Serialize;

use crate::failure::{Ending, Failure};
use crate::findings::count;
use crate::l4::L4Error;
use crate::report::Lines;
use crate::size::{self, ByteSize};

/// Share pages between nodes: in an object store, or a directory that all of them mount
///
/// Exit codes: 0 done, 1 something is damaged, forged or incomplete, 2 usage, 3 environment, 130
/// interrupted.
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

    /// The end of a wait that begins now.
    fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// All objects, or some of them if it is stopped.
    fn list(
        &self,
        remote: &dyn Remote,
        is_stopped: impl Fn() -> bool,
    ) -> Result<Vec<Listed>, Failure> {
        let mut listed = Vec::new();
        let mut each = |object| {
            listed.push(object);
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
            Err(error @ RemoteError::Memory(_)) => Ok(Fetched::Unread(error.to_string())),
            Err(error) => Err(error.into()),
        }
    }
}

/// The outcome of a fetch.
enum Fetched {
    Object(Buffer),
    /// It was removed since it was listed, or this node may not read it.
    Gone,
    /// It is too long to be read, for this reason. Other objects can be read.
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

    fn last_line(&self, lines: &mut Lines) {
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

impl From<RemoteError> for Failure {
    fn from(error: RemoteError) -> Failure {
        Failure::environment(format!("the remote: {error}"))
    }
}

impl From<PlaceError> for Failure {
    fn from(error: PlaceError) -> Failure {
        Failure::usage(error.to_string())
    }
}

impl From<L4Error> for Failure {
    fn from(error: L4Error) -> Failure {
        match error {
            L4Error::NoKey | L4Error::NotPositive(_) => Failure::usage(error.to_string()),
            L4Error::Key(error) => error.into(),
            L4Error::Place(error) => error.into(),
        }
    }
}

impl From<KeyError> for Failure {
    fn from(error: KeyError) -> Failure {
        match error {
            KeyError::Unreadable { .. } => Failure::environment(error.to_string()),
            KeyError::Malformed { .. } | KeyError::Count { .. } => {
                Failure::usage(error.to_string())
            }
        }
    }
}

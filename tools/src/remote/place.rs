//! The remote that a command names: its arguments, and the objects in it.

use std::collections::{BTreeMap, HashSet};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use larder_engine::format::{Fingerprint, Namespace};
use larder_remote::agent::CONNECTIONS_MAX;
use larder_remote::run::{self, OUTLINE_BYTES, Outline};
use larder_remote::{
    Buffer, Keyring, LISTED_MAX, Listed, OBJECT_BYTES_MAX, Place, Remote, RemoteError, RunName,
    Trust,
};

use super::left_out::LeftOut;
use crate::failure::Failure;
use crate::size::{self, ByteSize};

/// How often a failed request is tried again.
const RETRIES: usize = 3;

/// Failed writes in a row that are a fault of the remote.
const FAILURES_MAX: u32 = 5;

/// Objects of a namespace that are opened to learn its fields.
const OPENED_MAX: usize = 8;

/// Objects by the names of their namespaces.
pub fn by_namespace(listed: Vec<Listed>) -> BTreeMap<Fingerprint, Vec<Listed>> {
    let mut all: BTreeMap<Fingerprint, Vec<Listed>> = BTreeMap::new();
    for object in listed {
        all.entry(object.run.namespace).or_default().push(object);
    }
    all
}

/// The remote of a command.
#[derive(Args, Clone, Debug)]
pub struct PlaceArgs {
    /// The remote: s3://BUCKET/PREFIX or file:///DIRECTORY
    #[arg(value_name = "URL")]
    pub url: String,
    /// The URL of the S3 service, if it is not AWS
    #[arg(long, value_name = "URL")]
    pub endpoint: Option<String>,
    /// A PEM file of certificate authorities to trust instead of the system's
    #[arg(long, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// Longest wait for an answer of the remote, and for the next part of a listing
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = size::duration)]
    pub timeout: Duration,
}

impl PlaceArgs {
    pub fn connect(&self) -> Result<Box<dyn Remote>, Failure> {
        let place = Place {
            url: self.url.clone(),
            endpoint: self.endpoint.clone(),
            ca_file: self.ca_file.clone(),
            retries: RETRIES,
            parts: 1,
        };
        Ok(place.connect()?)
    }

    /// A client of the remote, which answers and has its mark.
    pub fn open(&self) -> Result<Box<dyn Remote>, Failure> {
        let remote = self.connect()?;
        remote.look(self.deadline())?;
        Ok(remote)
    }

    /// A client of the remote, which is made if it is new.
    pub fn open_or_make(&self) -> Result<Box<dyn Remote>, Failure> {
        let remote = self.connect()?;
        match remote.look(self.deadline()) {
            Err(RemoteError::Unmarked(_)) => remote.mark(self.deadline())?,
            looked => looked?,
        }
        Ok(remote)
    }

    /// The end of a wait that begins now.
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// All objects that can be looked at, or those of a namespace. Some of them if it is stopped.
    /// More than [`LISTED_MAX`] are a failure: a server may make up names without end.
    pub fn list(
        &self,
        remote: &dyn Remote,
        within: Option<Fingerprint>,
        left_out: &mut LeftOut,
        is_stopped: impl Fn() -> bool,
    ) -> Result<Vec<Listed>, Failure> {
        let (mut listed, mut seen) = (Vec::new(), 0);
        let go_on = || match is_stopped() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        let mut part = go_on;
        let mut each = |object| {
            seen += 1;
            match object {
                _ if seen > LISTED_MAX => return ControlFlow::Break(()),
                Ok(object) => listed.push(object),
                Err(object) => left_out.listed(object),
            }
            go_on()
        };
        remote.list(within, &mut part, &mut each, self.timeout)?;
        if seen > LISTED_MAX {
            let reason = format!("it has more than {LISTED_MAX} runs");
            return Err(RemoteError::Endless(reason).into());
        }
        Ok(listed)
    }

    /// A listed object.
    pub fn fetch(&self, remote: &dyn Remote, object: &Listed) -> Result<Fetched, Failure> {
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

    /// The begin of a run; `None` if it is not there or cannot be read. A fetch says why.
    pub fn outline(
        &self,
        remote: &dyn Remote,
        run: &RunName,
        trust: &Trust,
    ) -> Result<Option<Outline>, Failure> {
        match remote.begin_of(run, OUTLINE_BYTES, self.deadline()) {
            Ok(begin) => Ok(begin.and_then(|begin| run::outline(&begin, run, trust))),
            Err(error) => self.reason(remote, error).map(|_| None),
        }
    }

    /// The namespace of objects with one name of a namespace; `None` if none of the first opens.
    pub fn namespace_of(
        &self,
        remote: &dyn Remote,
        objects: &[Listed],
        trust: &Trust,
    ) -> Result<Option<Namespace>, Failure> {
        for object in objects.iter().take(OPENED_MAX) {
            if let Some(outline) = self.outline(remote, &object.run, trust)? {
                return Ok(Some(outline.namespace));
            }
        }
        Ok(None)
    }

    /// The reason to leave an object out, if the remote itself does not fail.
    pub fn reason(&self, remote: &dyn Remote, error: RemoteError) -> Result<String, Failure> {
        if matches!(error, RemoteError::NoService(_)) {
            return Err(error.into());
        }
        remote.look(self.deadline())?;
        Ok(error.to_string())
    }

    /// Leaves out those objects that were listed, could not be fetched because they are not there,
    /// and are listed all the same. The others were removed meanwhile.
    pub fn look_again(
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
        let mut part = || ControlFlow::Continue(());
        Ok(remote.list(None, &mut part, &mut each, self.timeout)?)
    }
}

/// The outcome of a fetch.
pub enum Fetched {
    Object(Buffer),
    /// It is not there.
    Gone,
    /// It cannot be read, for this reason. Other objects can.
    Unread(String),
}

/// Runs at once.
#[derive(Args, Clone, Debug)]
pub struct ConnectionsArgs {
    /// Runs on their way at once, each on a connection of its own
    #[arg(long, value_name = "N", default_value_t = 16, help_heading = "Expert settings",
        value_parser = clap::value_parser!(u64).range(1..=CONNECTIONS_MAX as u64))]
    connections: u64,
}

impl ConnectionsArgs {
    pub fn at_once(&self) -> usize {
        self.connections as usize
    }
}

/// The keys of a command.
#[derive(Args, Clone, Debug)]
#[group(required = true, multiple = false)]
pub struct TrustArgs {
    /// The file with the key of the nodes; `larder remote key` makes one
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Without keys: everybody who can read the remote reads its pages, and everybody who can write
    /// to it can plant some
    #[arg(long)]
    unsigned: bool,
}

impl TrustArgs {
    pub fn load(&self) -> Result<Trust, Failure> {
        match &self.key_file {
            Some(path) => Ok(Trust::Sealed(Keyring::load(path)?)),
            None => Ok(Trust::Unsigned),
        }
    }
}

/// The writes of a command to a remote. A failed write leaves its object out. A failure of several
/// in a row, or a refusal of all, is that of the remote.
#[derive(Default)]
pub struct Writes {
    done: u64,
    failures: u32,
    denied: Option<RemoteError>,
}

impl Writes {
    pub fn succeeded(&mut self) {
        self.done += 1;
        self.failures = 0;
    }

    /// The reason to leave the object out.
    pub fn failed(
        &mut self,
        place: &PlaceArgs,
        remote: &dyn Remote,
        error: RemoteError,
    ) -> Result<String, Failure> {
        self.failures += 1;
        if self.failures >= FAILURES_MAX {
            return Err(error.into());
        }
        if matches!(error, RemoteError::Denied(_)) {
            self.denied.get_or_insert_with(|| error.clone());
        }
        place.reason(remote, error)
    }

    /// No write was permitted.
    pub fn end(self) -> Result<(), Failure> {
        match self.denied.filter(|_| self.done == 0) {
            Some(error) => Err(error.into()),
            None => Ok(()),
        }
    }
}

//! The runs of a tenant, removed from a remote: a part of `larder erase`.
//!
//! The names of runs show no tenant. So an object of each namespace is opened, which says whose the
//! namespace is.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use larder_format::TENANT_FIELD;
use larder_remote::{Keyring, Remote, Trust};
use larder_seal::NO_TENANT;
use serde::Serialize;

use super::left_out::LeftOut;
use super::place::{PlaceArgs, Writes, by_namespace};
use super::reports::size_of_runs;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::report::Lines;

/// Longest wait for an answer.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The remote from which a tenant is erased.
#[derive(Args, Clone, Debug)]
pub struct ErasedRemoteArgs {
    /// Remove the tenant's runs from this remote, too: s3://BUCKET/PREFIX or file:///DIRECTORY
    #[arg(long, value_name = "URL", requires = "remote_trust")]
    remote: Option<String>,
    /// The file with the key of the nodes that share the remote
    #[arg(long, value_name = "FILE", requires = "remote", group = "remote_trust")]
    remote_key_file: Option<PathBuf>,
    /// The remote is without keys
    #[arg(long, requires = "remote", group = "remote_trust")]
    remote_unsigned: bool,
    /// The URL of its S3 service, if it is not AWS
    #[arg(long, value_name = "URL", requires = "remote")]
    remote_endpoint: Option<String>,
    /// A PEM file of certificate authorities to trust instead of the system's
    #[arg(long, value_name = "FILE", requires = "remote")]
    remote_ca_file: Option<PathBuf>,
}

/// The result of a removal.
#[derive(Serialize)]
pub struct Removed {
    remote: String,
    removed_runs: u64,
    removed_bytes: u64,
    unreadable: LeftOut,
    problem: Option<String>,
    interrupted: bool,
}

impl Removed {
    /// Whether runs of the tenant may be left.
    pub fn is_partial(&self) -> bool {
        self.interrupted || self.problem.is_some() || !self.unreadable.is_empty()
    }

    pub fn lines(&self, lines: &mut Lines) {
        let removed = size_of_runs(self.removed_runs, self.removed_bytes);
        lines.row("Removed", format!("{removed} of {}", self.remote));
        self.unreadable.lines(lines);
        if let Some(problem) = &self.problem {
            lines.row("Problem", problem.as_str());
        }
        if self.is_partial() {
            lines.text("Runs of the tenant may be left in the remote: run the command again.");
        }
    }
}

impl ErasedRemoteArgs {
    /// The remote, which answers; `None` if none is named.
    ///
    /// # Errors
    /// It cannot be used.
    pub fn open(&self) -> Result<Option<ErasedRemote>, Failure> {
        let Some(url) = &self.remote else {
            return Ok(None);
        };
        let place = PlaceArgs {
            url: url.clone(),
            endpoint: self.remote_endpoint.clone(),
            ca_file: self.remote_ca_file.clone(),
            timeout: TIMEOUT,
        };
        let trust = match &self.remote_key_file {
            Some(path) => Trust::Sealed(Keyring::load(path)?),
            None => Trust::Unsigned,
        };
        let remote = place.open()?;
        Ok(Some(ErasedRemote {
            place,
            trust,
            remote,
        }))
    }
}

/// A remote from which a tenant is erased.
pub struct ErasedRemote {
    place: PlaceArgs,
    trust: Trust,
    remote: Box<dyn Remote>,
}

impl ErasedRemote {
    /// Removes all runs of a tenant, as far as the remote lets it.
    pub fn remove(&self, tenant: &str) -> Removed {
        let interrupt = Interrupt::watch();
        let mut removed = Removed {
            remote: self.place.url.clone(),
            removed_runs: 0,
            removed_bytes: 0,
            unreadable: LeftOut::default(),
            problem: None,
            interrupted: false,
        };
        let failed = self.remove_all(tenant, &interrupt, &mut removed).err();
        removed.problem = failed.map(|failure| failure.to_string());
        removed.interrupted |= interrupt.is_raised();
        removed
    }

    fn remove_all(
        &self,
        tenant: &str,
        interrupt: &Interrupt,
        removed: &mut Removed,
    ) -> Result<(), Failure> {
        let (place, remote) = (&self.place, self.remote.as_ref());
        let left_out = &mut removed.unreadable;
        let listed = place.list(remote, None, left_out, || interrupt.is_raised())?;
        let mut writes = Writes::default();
        for objects in by_namespace(listed).values() {
            let namespace = place.namespace_of(remote, objects, &self.trust)?;
            let of = namespace.as_ref().map(|namespace| {
                let tenant = namespace.fields().extra.get(TENANT_FIELD);
                tenant.map_or(NO_TENANT, String::as_str)
            });
            match of {
                Some(of) if of != tenant => continue,
                Some(_) => {}
                None => {
                    let reason = "no object of this namespace opens: name the key file of the \
                                  nodes, with both keys while they are rotated; `larder remote \
                                  prune --faulty` removes objects that no node takes";
                    removed.unreadable.add(&objects[0].run, reason);
                    continue;
                }
            }
            for object in objects {
                if interrupt.is_raised() {
                    removed.interrupted = true;
                    break;
                }
                match remote.remove(&object.run, place.deadline()) {
                    Ok(()) => {
                        writes.succeeded();
                        removed.removed_runs += 1;
                        removed.removed_bytes += object.bytes;
                    }
                    Err(error) => {
                        let reason = writes.failed(place, remote, error)?;
                        removed.unreadable.add(&object.run, reason);
                    }
                }
            }
        }
        writes.end()
    }
}

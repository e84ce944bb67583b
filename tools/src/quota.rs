//! `larder quota`: how much of a store a group of namespaces keeps at least and takes at most, and
//! for how long its pages are served.
//!
//! It is a client if the store has an owner. A change is durable, and in force for all processes,
//! when the command has ended.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use larder_engine::Store;
use larder_store::quotas::{GroupKind, GroupName, QuotaChange, QuotaReport, QuotaSpec};
use larder_store::share::change_quotas;
use serde::Serialize;

use crate::failure::{Ending, Failure};
use crate::open::{self, OpenArgs};
use crate::owner::{lifetimes_line, quota_line, unread_quotas_line};
use crate::place;
use crate::report::{self, Lines, Report};
use crate::size::{self, ByteSize};

/// Show or change how much of a store models, tenants or namespaces keep and may take, and for how
/// long, also while servers use it
///
/// Without a group it lists the quotas. A quota replaces the former one of its group.
///
/// Exit codes: 0 done, 1 the quotas cannot be read, 2 usage or a refused change, 3 environment.
#[derive(Args, Debug)]
pub struct QuotaArgs {
    /// The store: its first volume, or a backend's directory
    #[arg(value_parser = place::parser())]
    path: PathBuf,
    #[command(flatten)]
    group: GroupArgs,
    /// Bytes below which eviction takes no page of the group
    #[arg(long, value_name = "SIZE", value_parser = size::positive, requires = "GroupArgs")]
    min: Option<ByteSize>,
    /// Most bytes that the group takes: beyond it a put evicts pages of the group itself
    #[arg(long, value_name = "SIZE", value_parser = size::positive, requires = "GroupArgs")]
    max: Option<ByteSize>,
    /// Serve no page of the group that was put longer ago than this (12h, 30d)
    #[arg(long, value_name = "DURATION", value_parser = size::duration, requires = "GroupArgs")]
    max_age: Option<Duration>,
    /// Remove the quota of the group
    #[arg(long, requires = "GroupArgs", conflicts_with_all = ["min", "max", "max_age"])]
    remove: bool,
    /// Remove all quotas, also if they cannot be read
    #[arg(long, conflicts_with = "GroupArgs")]
    clear: bool,
    #[command(flatten)]
    open: OpenArgs,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// The group of a quota.
#[derive(Args, Debug)]
#[group(multiple = false)]
struct GroupArgs {
    /// One namespace, by its fingerprint as `larder inspect --namespaces` shows it
    #[arg(long, value_name = "FINGERPRINT")]
    namespace: Option<String>,
    /// All namespaces of this model
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// All namespaces whose further field `tenant` has this value
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
}

/// Reads the limits of a quota, `min=SIZE,max=SIZE,max-age=DURATION`, for this namespace.
///
/// # Errors
/// A sentence about the form.
pub fn limits(text: &str, namespace: &str) -> Result<QuotaSpec, String> {
    let malformed =
        |_| format!("`{text}` is not a quota; write min=, max= and max-age=, as far as wanted");
    spec(&format!("namespace={namespace},{text}")).map_err(malformed)
}

/// Reads a quota for the command line: `model=NAME,min=SIZE,max=SIZE,max-age=DURATION`.
///
/// # Errors
/// A sentence about the form of a quota.
pub fn spec(text: &str) -> Result<QuotaSpec, String> {
    let malformed = || {
        format!(
            "`{text}` is not a quota; write namespace=, model= or tenant= with the name, then \
             min=, max= and max-age= as far as they are wanted, with commas between them"
        )
    };
    let (kind, rest) = text.split_once('=').ok_or_else(malformed)?;
    let kind = match kind {
        "namespace" => GroupKind::Namespace,
        "model" => GroupKind::Model,
        "tenant" => GroupKind::Tenant,
        _ => return Err(malformed()),
    };
    let mut spec = QuotaSpec {
        group: GroupName {
            kind,
            name: String::new(),
        },
        min_bytes: 0,
        max_bytes: None,
        max_age_s: None,
    };
    let mut name: Vec<&str> = Vec::new();
    let mut has_limit = false;
    for part in rest.split(',') {
        let size = |value: &str| size::positive(value).map_err(|error| error.to_string());
        match part.split_once('=') {
            Some(("min", value)) => spec.min_bytes = size(value)?.0,
            Some(("max", value)) => spec.max_bytes = Some(size(value)?.0),
            Some(("max-age", value)) => spec.max_age_s = Some(size::duration(value)?.as_secs()),
            // A name may have commas.
            _ if !has_limit => {
                name.push(part);
                continue;
            }
            _ => return Err(malformed()),
        }
        has_limit = true;
    }
    spec.group.name = name.join(",");
    match has_limit && !spec.group.name.is_empty() {
        true => Ok(spec),
        false => Err(malformed()),
    }
}

#[derive(Serialize)]
struct QuotaDocument {
    /// The store: its first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    #[serde(flatten)]
    quotas: QuotaReport,
}

impl Report for QuotaDocument {
    const COMMAND: &'static str = "quota";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        if let Some(fault) = &self.quotas.fault {
            lines.text(unread_quotas_line(fault));
        } else if self.quotas.groups.is_empty() {
            lines.text("no quotas");
        }
        for group in &self.quotas.groups {
            lines.text(quota_line(group));
        }
        if let Some(line) = lifetimes_line(&self.quotas) {
            lines.text(line);
        }
        lines
    }
}

impl GroupArgs {
    fn name(&self) -> Option<GroupName> {
        let of = |kind, name: &Option<String>| {
            let name = name.clone()?;
            Some(GroupName { kind, name })
        };
        of(GroupKind::Namespace, &self.namespace)
            .or_else(|| of(GroupKind::Model, &self.model))
            .or_else(|| of(GroupKind::Tenant, &self.tenant))
    }
}

impl QuotaArgs {
    fn change(&self) -> Result<QuotaChange, Failure> {
        let Some(group) = self.group.name() else {
            return Ok(match self.clear {
                true => QuotaChange::Clear,
                false => QuotaChange::None,
            });
        };
        if self.remove {
            return Ok(QuotaChange::Remove(group));
        }
        if self.min.is_none() && self.max.is_none() && self.max_age.is_none() {
            return Err(Failure::usage("give --min, --max, --max-age or --remove"));
        }
        Ok(QuotaChange::Set(QuotaSpec {
            group,
            min_bytes: self.min.map_or(0, |size| size.0),
            max_bytes: self.max.map(|size| size.0),
            max_age_s: self.max_age.map(|age| age.as_secs()),
        }))
    }
}

/// Runs the command.
pub fn run(args: &QuotaArgs) -> Result<Ending, Failure> {
    let change = args.change()?;
    let work = |store: &Store| Ok(change_quotas(store, &change)?);
    let quotas = open::with_any(&args.path, args.open.options()?, work)?;
    let document = QuotaDocument {
        path: args.path.clone(),
        quotas,
    };
    report::print(&document, args.json)?;
    Ok(Ending::Done.or_findings(document.quotas.fault.is_some()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_quota_is_read_from_one_word() {
        let read = spec("tenant=a, b,min=1MiB,max-age=30d").unwrap();
        assert_eq!(read.group.to_string(), "tenant a, b");
        assert_eq!((read.min_bytes, read.max_bytes), (1 << 20, None));
        assert_eq!(read.max_age_s, Some(30 * 86_400));
        for wrong in [
            "",
            "tenant",
            "tenant=a",
            "tenant=,min=1MiB",
            "pool=a,min=1MiB",
            "model=a,min=1MiB,b",
            "model=a,max=0",
            "model=a,max-age=soon",
        ] {
            assert!(spec(wrong).is_err(), "{wrong}");
        }
    }
}

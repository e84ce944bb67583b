//! `larder remote ls` and `verify`: the objects of a remote, without a store.

use std::collections::HashSet;
use std::path::PathBuf;

use clap::{ArgGroup, Args};
use larder_engine::format::Namespace;
use larder_format::TENANT_FIELD;
use larder_remote::{Keyring, RunName, Trust, run};
use serde::Serialize;

use super::left_out::LeftOut;
use super::place::{Fetched, PlaceArgs, TrustArgs, by_namespace};
use super::reports::size_of_runs;
use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::report::{self, Lines, Report, count};

/// List the namespaces of a remote
///
/// With the key of the nodes also their models and tenants: reads the begin of an object of each.
#[derive(Args, Debug)]
#[command(group(ArgGroup::new("trust").args(["key_file", "unsigned"])))]
pub struct LsArgs {
    #[command(flatten)]
    place: PlaceArgs,
    /// The file with the key of the nodes: shows models and tenants
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Shows models and tenants of a remote without keys
    #[arg(long)]
    unsigned: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct LsReport {
    remote: String,
    runs: u64,
    bytes: u64,
    namespaces: Vec<NamespaceRow>,
    unreadable: LeftOut,
}

#[derive(Serialize)]
struct NamespaceRow {
    fingerprint: String,
    model: Option<String>,
    tenant: Option<String>,
    runs: u64,
    bytes: u64,
    newest_unix_s: u64,
}

impl Report for LsReport {
    const COMMAND: &'static str = "remote ls";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        for row in &self.namespaces {
            let size = size_of_runs(row.runs, row.bytes);
            let of = |name: &Option<String>, kind: &str| match name {
                Some(name) => format!(", {kind} {name}"),
                None => String::new(),
            };
            let (model, tenant) = (of(&row.model, "model"), of(&row.tenant, "tenant"));
            lines.row(row.fingerprint.as_str(), format!("{size}{model}{tenant}"));
        }
        lines.row("In all", size_of_runs(self.runs, self.bytes));
        self.unreadable.lines(&mut lines);
        lines
    }
}

/// Runs `ls`.
///
/// # Errors
/// The remote fails.
pub fn ls(args: &LsArgs) -> Result<Ending, Failure> {
    let remote = args.place.open()?;
    let mut unreadable = LeftOut::default();
    let trust = match (&args.key_file, args.unsigned) {
        (Some(path), _) => Some(Trust::Sealed(Keyring::load(path)?)),
        (None, true) => Some(Trust::Unsigned),
        (None, false) => None,
    };
    let place = &args.place;
    let listed = place.list(remote.as_ref(), None, &mut unreadable, || false)?;
    let mut namespaces = Vec::new();
    for (fingerprint, objects) in by_namespace(listed) {
        let namespace = match &trust {
            Some(trust) => place.namespace_of(remote.as_ref(), &objects, trust)?,
            None => None,
        };
        let fields = namespace.as_ref().map(Namespace::fields);
        namespaces.push(NamespaceRow {
            fingerprint: fingerprint.to_string(),
            model: fields.map(|fields| fields.model.clone()),
            tenant: fields.and_then(|fields| fields.extra.get(TENANT_FIELD).cloned()),
            runs: objects.len() as u64,
            bytes: objects.iter().map(|object| object.bytes).sum(),
            newest_unix_s: objects
                .iter()
                .fold(0, |newest, object| newest.max(object.created_unix_s)),
        });
    }
    let report = LsReport {
        remote: args.place.url.clone(),
        runs: namespaces.iter().map(|row| row.runs).sum(),
        bytes: namespaces.iter().map(|row| row.bytes).sum(),
        namespaces,
        unreadable,
    };
    report::print(&report, args.json)?;
    Ok(Ending::Done.or_findings(!report.unreadable.is_empty()))
}

/// Read every object of a remote and verify every page
#[derive(Args, Debug)]
pub struct VerifyArgs {
    #[command(flatten)]
    place: PlaceArgs,
    #[command(flatten)]
    trust: TrustArgs,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Default, Serialize)]
struct VerifyReport {
    remote: String,
    runs: u64,
    bytes: u64,
    good_pages: u64,
    faults: Vec<FaultRow>,
    unreadable: LeftOut,
    interrupted: bool,
}

/// A page, or an object, that no node takes.
#[derive(Serialize)]
struct FaultRow {
    run: String,
    key: Option<String>,
    reason: String,
}

impl Report for VerifyReport {
    const COMMAND: &'static str = "remote verify";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        lines.row("Verified", size_of_runs(self.runs, self.bytes));
        lines.row("Good", count(self.good_pages, "page"));
        lines.row("Faults", self.faults.len().to_string());
        let faults = self.faults.iter().map(|fault| {
            let page = fault.key.as_ref().map(|key| format!("page {key}: "));
            let page = page.unwrap_or_default();
            format!("{}: {page}{}", fault.run, fault.reason)
        });
        lines.list("faults", faults);
        if !self.faults.is_empty() {
            lines.text(
                "Nodes miss these pages. `larder remote prune --faulty` removes their objects; a \
                 push makes them again.",
            );
        }
        self.unreadable.lines(&mut lines);
        if self.interrupted {
            lines.text("Interrupted: the other objects were not read.");
        }
        lines
    }
}

impl VerifyReport {
    /// Verifies an object.
    fn object(&mut self, bytes: &mut [u8], run: &RunName, trust: &Trust) {
        self.runs += 1;
        self.bytes += bytes.len() as u64;
        let opened = run::open(bytes, run, trust);
        self.good_pages += opened.pages.len() as u64;
        for (page, reason) in opened.page_faults() {
            self.good_pages -= 1;
            self.fault(run, Some(page.key.to_string()), reason.to_string());
        }
        if let Some(reason) = opened.fault {
            self.fault(run, None, reason.to_string());
        }
    }

    fn fault(&mut self, run: &RunName, key: Option<String>, reason: String) {
        self.faults.push(FaultRow {
            run: run.to_string(),
            key,
            reason,
        });
    }
}

/// Runs `verify`.
///
/// # Errors
/// The remote fails.
pub fn verify(args: &VerifyArgs) -> Result<Ending, Failure> {
    let interrupt = Interrupt::watch();
    let trust = args.trust.load()?;
    let remote = args.place.open()?;
    let mut gone = HashSet::new();
    let mut report = VerifyReport {
        remote: args.place.url.clone(),
        ..VerifyReport::default()
    };
    let (place, left_out) = (&args.place, &mut report.unreadable);
    let listed = place.list(remote.as_ref(), None, left_out, || interrupt.is_raised())?;
    for object in listed {
        if interrupt.is_raised() {
            report.interrupted = true;
            break;
        }
        match args.place.fetch(remote.as_ref(), &object)? {
            Fetched::Object(mut bytes) => report.object(&mut bytes, &object.run, &trust),
            Fetched::Gone => {
                gone.insert(object.run);
            }
            Fetched::Unread(reason) => report.unreadable.add(&object.run, reason),
        }
    }
    if !report.interrupted {
        let left_out = &mut report.unreadable;
        args.place.look_again(remote.as_ref(), &gone, left_out)?;
    }
    report::print(&report, args.json)?;
    let has_findings = !report.faults.is_empty() || !report.unreadable.is_empty();
    Ok(Ending::Done
        .or_findings(has_findings)
        .or_interrupted(report.interrupted))
}

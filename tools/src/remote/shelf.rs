//! `larder remote ls` and `verify`: the objects of a remote, without a store.

use std::collections::{BTreeMap, HashSet};

use clap::Args;
use larder_engine::format::Fingerprint;
use larder_remote::{RunName, Trust, run};
use serde::Serialize;

use super::left_out::LeftOut;
use super::place::{Fetched, PlaceArgs, TrustArgs};
use super::reports::size_of_runs;
use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::report::{self, Lines, Report, count};

/// List the namespaces of a remote
#[derive(Args, Debug)]
pub struct LsArgs {
    #[command(flatten)]
    place: PlaceArgs,
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

#[derive(Default, Serialize)]
struct NamespaceRow {
    fingerprint: String,
    runs: u64,
    bytes: u64,
    newest_unix_s: u64,
}

impl Report for LsReport {
    const COMMAND: &'static str = "remote ls";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        for row in &self.namespaces {
            lines.row(row.fingerprint.as_str(), size_of_runs(row.runs, row.bytes));
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
    let mut rows: BTreeMap<Fingerprint, NamespaceRow> = BTreeMap::new();
    for object in args
        .place
        .list(remote.as_ref(), None, &mut unreadable, || false)?
    {
        let row = rows.entry(object.run.namespace).or_default();
        row.fingerprint = object.run.namespace.to_string();
        row.runs += 1;
        row.bytes += object.bytes;
        row.newest_unix_s = row.newest_unix_s.max(object.created_unix_s);
    }
    let namespaces: Vec<NamespaceRow> = rows.into_values().collect();
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

//! `larder remote pull`: runs of a remote into a store.
//!
//! Each page is verified before the store takes it: its seal, or without keys its checksum. No page
//! of the store is evicted for them: the pull ends when the store has no room for the next run.

use std::collections::HashSet;
use std::path::PathBuf;

use clap::Args;
use larder_engine::format::{BLOCK_BYTES, Fingerprint, Namespace};
use larder_engine::{PageStore, PutStatus, Store};
use larder_remote::local;
use larder_remote::run::{self, OpenedPage};
use larder_remote::{Listed, Remote, RunName, Trust};
use larder_store::inventory::Inventory;

use serde::Serialize;

use super::place::{Fetched, PlaceArgs, TrustArgs};
use super::reports::{Between, size_of_runs};
use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::open::{self, OpenArgs};
use crate::place;
use crate::report::{self, Lines, Report, count, rows};
use crate::selection::Selection;

/// Take runs of a remote into a store, also while servers use it
///
/// Evicts nothing: it ends when the store is full.
#[derive(Args, Debug)]
pub struct PullArgs {
    /// The store: its first volume, or a backend's directory
    #[arg(value_parser = place::parser())]
    path: PathBuf,
    #[command(flatten)]
    place: PlaceArgs,
    #[command(flatten)]
    trust: TrustArgs,
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    open: OpenArgs,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Default, Serialize)]
struct PullReport {
    #[serde(flatten)]
    between: Between,
    runs_pulled: u64,
    bytes_pulled: u64,
    pages_put: u64,
    duplicate_pages: u64,
    refused_pages: u64,
    faulty_runs: u64,
    faulty_pages: u64,
    full: bool,
}

impl Report for PullReport {
    const COMMAND: &'static str = "remote pull";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        rows! { lines:
            "Pulled" => "{}", size_of_runs(self.runs_pulled, self.bytes_pulled);
            "Stored" => "{}", count(self.pages_put, "page");
            "There already" => "{}, and {} of other runs",
                count(self.between.present_runs, "run"), count(self.duplicate_pages, "page");
        }
        if self.refused_pages > 0 {
            lines.row("Refused", count(self.refused_pages, "page"));
        }
        if self.faulty_runs + self.faulty_pages > 0 {
            rows! { lines:
                "Not taken" =>
                    "{} and {} of others, damaged or forged; `larder remote verify` shows them",
                    count(self.faulty_runs, "run"), count(self.faulty_pages, "page");
            }
        }
        if self.full {
            lines.text("The store is full: the other runs were not fetched.");
        }
        self.between.last_lines(&mut lines);
        lines
    }
}

/// Runs the command.
///
/// # Errors
/// There is no store, or the remote fails.
pub fn run(args: &PullArgs) -> Result<Ending, Failure> {
    let interrupt = Interrupt::watch();
    let trust = args.trust.load()?;
    let remote = args.place.open()?;
    let mut between = Between::new(&args.path, &args.place);
    let (place, left_out) = (&args.place, &mut between.unreadable);
    let listed = place.list(remote.as_ref(), None, left_out, || interrupt.is_raised())?;
    let report = open::with_any(&args.path, args.open.options(), |store| {
        let mut pull = Pull {
            args,
            store,
            trust: &trust,
            remote: remote.as_ref(),
            foreign: HashSet::new(),
            gone: HashSet::new(),
            report: PullReport {
                between,
                ..PullReport::default()
            },
        };
        for object in &listed {
            if interrupt.is_raised() {
                pull.report.between.interrupted = true;
                break;
            }
            if pull.run(object)?.is_none() {
                pull.report.full = true;
                break;
            }
        }
        store.flush()?;
        if !pull.report.between.interrupted {
            let left_out = &mut pull.report.between.unreadable;
            place.look_again(remote.as_ref(), &pull.gone, left_out)?;
        }
        Ok(pull.report)
    })?;
    report::print(&report, args.json)?;
    let faults = report.faulty_runs + report.faulty_pages + report.refused_pages;
    let has_findings = faults > 0 || !report.between.unreadable.is_empty();
    Ok(Ending::Done
        .or_findings(has_findings)
        .or_interrupted(report.between.interrupted))
}

struct Pull<'a> {
    args: &'a PullArgs,
    store: &'a Store,
    trust: &'a Trust,
    remote: &'a dyn Remote,
    /// Namespaces that are not chosen, by an object of each.
    foreign: HashSet<Fingerprint>,
    /// Runs that were listed and are not there.
    gone: HashSet<RunName>,
    report: PullReport,
}

impl Pull<'_> {
    /// Takes a run. `None` if there is no room for it.
    fn run(&mut self, object: &Listed) -> Result<Option<()>, Failure> {
        let name = object.run;
        let records = self.store.records()?;
        let known = records
            .iter()
            .find(|known| known.fingerprint() == name.namespace);
        if known.is_none() && !self.may_be_chosen(object) {
            return Ok(Some(()));
        }
        if let Some(known) = known {
            if !self.args.selection.takes(&name.namespace, Some(known)) {
                return Ok(Some(()));
            }
            let id = self.store.namespace(known)?;
            if self.store.contains(id, &[name.last]) == [true] {
                self.report.between.present_runs += 1;
                return Ok(Some(()));
            }
        }
        let bytes = match self.args.place.fetch(self.remote, object)? {
            Fetched::Object(bytes) => bytes,
            Fetched::Gone => {
                self.gone.insert(name);
                return Ok(Some(()));
            }
            Fetched::Unread(reason) => {
                self.report.between.unreadable.add(&name, reason);
                return Ok(Some(()));
            }
        };
        let opened = run::open(&bytes, &name, self.trust);
        self.report.faulty_runs += u64::from(opened.fault.is_some());
        let Some(namespace) = opened.namespace else {
            return Ok(Some(()));
        };
        if !self.args.selection.takes(&name.namespace, Some(&namespace)) {
            self.foreign.insert(name.namespace);
            return Ok(Some(()));
        }
        let (good, faulty): (Vec<_>, Vec<_>) = opened
            .pages
            .iter()
            .partition(|opened| opened.payload.is_ok());
        self.report.faulty_pages += faulty.len() as u64;
        let page_bytes = u64::from(namespace.shape().page_blocks()) * BLOCK_BYTES as u64;
        if self.store.stats().free_pages(page_bytes) < good.len() as u64 {
            return Ok(None);
        }
        self.put(&namespace, &good)?;
        self.report.runs_pulled += 1;
        self.report.bytes_pulled += bytes.len() as u64;
        Ok(Some(()))
    }

    /// Whether an object may be of a chosen namespace that the store does not have.
    fn may_be_chosen(&self, object: &Listed) -> bool {
        let fingerprint = &object.run.namespace;
        // The model of a namespace is known only from an object, and the same in all of them.
        if self.args.selection.is_of_a_model() {
            return !self.foreign.contains(fingerprint);
        }
        self.args.selection.takes(fingerprint, None)
    }

    fn put(&mut self, namespace: &Namespace, opened: &[&OpenedPage<'_>]) -> Result<(), Failure> {
        let id = self.store.namespace(namespace)?;
        let options = open::patient();
        for status in local::put(self.store, id, namespace.shape(), opened, options) {
            match status {
                PutStatus::Stored => self.report.pages_put += 1,
                PutStatus::Duplicate => self.report.duplicate_pages += 1,
                _ => self.report.refused_pages += 1,
            }
        }
        Ok(())
    }
}

//! `larder delete`: deletes the pages of chosen namespaces, also in a store that is served.
//!
//! It is a client if the store has an owner. So it works beside running servers, which lose these
//! pages at once and may store new ones. Deletions are durable when the command has ended.

use std::path::PathBuf;

use clap::Args;
use larder_engine::{PageStore, Store};
use larder_store::inventory::{Space, spaces};
use serde::Serialize;

use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::open::{self, OpenArgs};
use crate::place;
use crate::report::{self, Lines, Report, count};
use crate::selection::Selection;
use crate::size::ByteSize;

/// Delete all pages of a namespace or of a model, also while servers use the store
///
/// Exit codes: 0 done, 2 usage or no such namespace, 3 environment, 130 interrupted.
#[derive(Args, Debug)]
pub struct DeleteArgs {
    /// The store: its first volume, or a backend's directory
    #[arg(value_parser = place::parser())]
    path: PathBuf,
    #[command(flatten)]
    selection: Selection,
    /// Print the pages that would be deleted, and delete none
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    open: OpenArgs,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Default, Serialize)]
struct DeleteReport {
    /// The store: its first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// Whether nothing was deleted.
    dry_run: bool,
    namespaces: Vec<NamespaceRow>,
    /// Pages deleted, or that would be.
    deleted_pages: u64,
    /// Namespaces whose record is lost: their pages cannot be read or named.
    nameless_namespaces: u64,
    /// Whether the operator ended it.
    interrupted: bool,
}

/// A chosen namespace.
#[derive(Serialize)]
struct NamespaceRow {
    fingerprint: String,
    model: String,
    /// Pages deleted, or that would be.
    pages: u64,
    /// Bytes of its pages before.
    live_bytes: u64,
}

impl Report for DeleteReport {
    const COMMAND: &'static str = "delete";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        for row in &self.namespaces {
            let (pages, bytes) = (count(row.pages, "page"), ByteSize(row.live_bytes));
            lines.text(format!(
                "{}  {}: {pages}, {bytes}",
                row.fingerprint, row.model
            ));
        }
        let done = match self.dry_run {
            true => "Would delete",
            false => "Deleted",
        };
        lines.row(done, count(self.deleted_pages, "page"));
        if self.nameless_namespaces > 0 {
            let lost = count(self.nameless_namespaces, "namespace");
            lines.text(format!(
                "{lost} without a record cannot be named; their pages are evicted as they grow cold"
            ));
        }
        if self.interrupted {
            lines.text("Interrupted: run it again to delete the rest.");
        }
        lines
    }
}

/// Runs the command.
pub fn run(args: &DeleteArgs) -> Result<Ending, Failure> {
    if args.selection.is_open() {
        return Err(Failure::usage(
            "give --namespace FINGERPRINT or --model NAME; to delete all pages, create the store \
             again with `larder create --force`",
        ));
    }
    let interrupt = Interrupt::watch();
    let report = open::with_any(&args.path, args.open.options()?, |store| {
        delete(args, store, &interrupt)
    })?;
    report::print(&report, args.json)?;
    Ok(Ending::Done.or_interrupted(report.interrupted))
}

fn delete(
    args: &DeleteArgs,
    store: &Store,
    interrupt: &Interrupt,
) -> Result<DeleteReport, Failure> {
    let spaces = spaces(store)?;
    let chosen = |space: &&Space| {
        let namespace = space.namespace.as_ref();
        args.selection.takes(&space.usage.namespace, namespace)
    };
    let mut report = DeleteReport {
        path: args.path.clone(),
        dry_run: args.dry_run,
        nameless_namespaces: spaces.iter().filter(|s| s.namespace.is_none()).count() as u64,
        ..DeleteReport::default()
    };
    for space in spaces.iter().filter(chosen) {
        let Some(namespace) = &space.namespace else {
            continue;
        };
        if interrupt.is_raised() {
            report.interrupted = true;
            break;
        }
        let pages = match args.dry_run {
            true => space.usage.pages,
            false => store.clear_namespace(store.namespace(namespace)?)?,
        };
        report.deleted_pages += pages;
        report.namespaces.push(NamespaceRow {
            fingerprint: space.usage.namespace.to_string(),
            model: namespace.fields().model.clone(),
            pages,
            live_bytes: space.usage.bytes,
        });
    }
    let nameless = |space: &Space| space.namespace.is_none() && chosen(&space);
    if report.namespaces.is_empty() && spaces.iter().any(nameless) {
        return Err(Failure::usage(
            "the record of this namespace is lost: let the server that uses it open the store \
             once, then delete again",
        ));
    }
    if report.namespaces.is_empty() && !report.interrupted {
        let records = spaces.iter().filter_map(|space| space.namespace.as_ref());
        return Err(args.selection.unmatched(records));
    }
    if !args.dry_run {
        store.flush()?;
    }
    Ok(report)
}

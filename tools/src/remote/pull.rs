//! `larder remote pull`: runs of a remote into a store.
//!
//! Each page is verified before the store takes it: its seal, or without keys its checksum. No page
//! of the store is evicted for them: the pull ends when the store has no room for the next run. So
//! whole prefixes come first.

use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;
use std::path::PathBuf;

use clap::Args;
use larder_engine::format::{BLOCK_BYTES, Fingerprint, Namespace, PageKey};
use larder_engine::{NamespaceId, OpenOptions, PageStore, PutStatus, Store};
use larder_remote::local;
use larder_remote::run::{self, OUTLINE_BYTES, OpenedPage, Outline};
use larder_remote::{Listed, Remote, RunName, RunNames, Trust};
use larder_store::inventory::Inventory;

use serde::Serialize;

use super::in_order::in_order;
use super::place::{ConnectionsArgs, Fetched, PlaceArgs, TrustArgs};
use super::pull_order;
use super::reports::{Between, size_of_runs};
use crate::failure::{Ending, Failure};
use crate::findings::check_remote;
use crate::interrupt::Interrupt;
use crate::key::StoreKeyArgs;
use crate::open;
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
    store_key: StoreKeyArgs,
    #[command(flatten)]
    place: PlaceArgs,
    #[command(flatten)]
    trust: TrustArgs,
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    connections: ConnectionsArgs,
    /// Where a volume other than the first is, if it has been moved; the store remembers it from
    /// then on
    #[arg(long = "volume", value_name = "PATH")]
    volumes: Vec<PathBuf>,
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
            lines.text(
                "A store refuses pages of a tenant that it has erased since they were made, and \
                 pages beyond a quota.",
            );
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
    let is_served = || larder_engine::report(&args.path).is_ok();
    if check_remote(&args.path, &trust)? && !is_served() {
        args.store_key.require(&args.path)?;
    }
    let wrapping = args.store_key.as_key().read()?;
    let remote = args.place.open()?;
    let mut between = Between::new(&args.path, &args.place);
    let (place, left_out) = (&args.place, &mut between.unreadable);
    let listed = place.list(remote.as_ref(), None, left_out, || interrupt.is_raised())?;
    let options = OpenOptions::default().with(|o| {
        o.volumes = args.volumes.clone();
        o.wrapping = wrapping;
    });
    let report = open::with_any(&args.path, options, |store| {
        let mut pull = Pull {
            args,
            store,
            trust: &trust,
            remote: remote.as_ref(),
            stored: HashMap::new(),
            gone: HashSet::new(),
            report: PullReport {
                between,
                ..PullReport::default()
            },
        };
        let chosen = pull.choose(listed, &interrupt)?;
        in_order(
            args.connections.at_once(),
            &chosen,
            |object| object.bytes,
            |object| place.fetch(remote.as_ref(), object),
            |object, fetched| {
                if interrupt.is_raised() {
                    pull.report.between.interrupted = true;
                } else if pull.run(object, fetched?)?.is_some() {
                    return Ok(ControlFlow::Continue(()));
                } else {
                    pull.report.full = true;
                }
                Ok(ControlFlow::Break(()))
            },
        )?;
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
    /// The chosen namespaces of the store, by their names in the remote.
    stored: HashMap<Fingerprint, NamespaceId>,
    /// Runs that were listed and are not there.
    gone: HashSet<RunName>,
    report: PullReport,
}

/// Whether a namespace is chosen. An encrypted store has a name of its own for it.
fn takes(selection: &Selection, namespace: &Namespace) -> bool {
    let names = [namespace, &namespace.plain()].map(Namespace::fingerprint);
    names
        .iter()
        .any(|name| selection.takes(name, Some(namespace)))
}

impl Pull<'_> {
    /// The runs of a listing that are chosen and not stored yet, in the order in which they are
    /// stored.
    fn choose(
        &mut self,
        listed: Vec<Listed>,
        interrupt: &Interrupt,
    ) -> Result<Vec<Listed>, Failure> {
        let mut chosen = self.of_selection(listed)?;
        let stats = self.store.stats();
        let room = stats.usable_bytes.saturating_sub(stats.taken_bytes);
        let bytes: u64 = chosen.iter().map(|object| object.bytes).sum();
        // Without room for all, runs without those before them in their chain would be of no use.
        let is_tight = bytes.saturating_add(bytes / 8) > room;
        // With keys the name of a run does not show its pages.
        let may_be_there = |object: &Listed| match self.trust.encrypts() {
            true => self.stored.contains_key(&object.run.namespace),
            false => self.has(object.run.namespace, object.run.last),
        };
        let is_asked = |object: &Listed| is_tight || may_be_there(object);
        let asked: Vec<Listed> = chosen.extract_if(.., |object| is_asked(object)).collect();
        let (place, remote) = (&self.args.place, self.remote);
        let (mut outlined, mut present) = (Vec::new(), 0);
        in_order(
            self.args.connections.at_once(),
            &asked,
            |_| OUTLINE_BYTES as u64,
            |object| place.outline(remote, &object.run, self.trust),
            |object, outline| {
                let outline = outline?;
                match self.has_all(object, outline.as_ref()) {
                    true => present += 1,
                    false => outlined.push((*object, outline)),
                }
                Ok(match interrupt.is_raised() {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                })
            },
        )?;
        self.report.between.present_runs += present;
        let mut ordered = pull_order::chains(&outlined, self.trust, |(namespace, page)| {
            self.has(namespace, page.padded())
        });
        // Heads are made before the runs behind them.
        chosen.sort_by_key(|object| (object.created_unix_s, object.run));
        ordered.append(&mut chosen);
        Ok(ordered)
    }

    /// The objects of chosen namespaces.
    fn of_selection(&mut self, listed: Vec<Listed>) -> Result<Vec<Listed>, Failure> {
        let selection = &self.args.selection;
        let mut records = HashMap::new();
        for record in self.store.records()? {
            let names = RunNames::of(self.trust, record.plain().fingerprint());
            if takes(selection, &record) {
                let id = self.store.namespace(&record)?;
                self.stored.extend(names.spaces().map(|space| (space, id)));
            }
            records.extend(names.spaces().map(|space| (space, record.clone())));
        }
        let by_record = selection.is_of_a_model() || self.trust.encrypts() && !selection.is_open();

        let mut chosen = Vec::new();
        for object in listed {
            let space = object.run.namespace;
            if by_record && !records.contains_key(&space) {
                // The namespace is known only from an object.
                let place = &self.args.place;
                match place.outline(self.remote, &object.run, self.trust)? {
                    Some(outline) => drop(records.insert(space, outline.namespace)),
                    // Its fetch says why.
                    None => {
                        chosen.push(object);
                        continue;
                    }
                }
            }
            let is_chosen = match records.get(&space) {
                Some(record) => takes(selection, record),
                None => selection.takes(&space, None),
            };
            if is_chosen {
                chosen.push(object);
            }
        }
        Ok(chosen)
    }

    fn has(&self, namespace: Fingerprint, page: PageKey) -> bool {
        let id = self.stored.get(&namespace);
        id.is_some_and(|id| self.store.contains(*id, &[page]) == [true])
    }

    /// Whether the store has all pages of a run: one of them may have been damaged when the others
    /// were stored.
    fn has_all(&self, object: &Listed, outline: Option<&Outline>) -> bool {
        let namespace = object.run.namespace;
        let has_pages = |outline: &Outline| {
            let mut pages = outline.pages.iter();
            pages.all(|page| self.has(namespace, page.key))
        };
        match self.trust.encrypts() {
            // Of a long run the outline has not the last page.
            true => outline.is_some_and(|outline| outline.is_whole && has_pages(outline)),
            false => outline.is_none_or(has_pages) && self.has(namespace, object.run.last),
        }
    }

    /// Takes a run. `None` if there is no room for it.
    fn run(&mut self, object: &Listed, fetched: Fetched) -> Result<Option<()>, Failure> {
        let name = object.run;
        let mut bytes = match fetched {
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
        let length = bytes.len() as u64;
        let opened = run::open(&mut bytes, &name, self.trust);
        self.report.faulty_runs += u64::from(opened.fault.is_some());
        let Some(namespace) = opened.namespace else {
            return Ok(Some(()));
        };
        let is_chosen = self.stored.contains_key(&name.namespace);
        if !is_chosen && !takes(&self.args.selection, &namespace) {
            return Ok(Some(()));
        }
        let good = opened.pages.iter().filter(|page| page.payload.is_ok());
        let page_bytes = u64::from(namespace.shape().page_blocks()) * BLOCK_BYTES as u64;
        if self.store.stats().free_pages(page_bytes) < good.count() as u64 {
            return Ok(None);
        }
        self.put(&namespace, &opened.pages, opened.created_unix_s)?;
        self.report.runs_pulled += 1;
        self.report.bytes_pulled += length;
        Ok(Some(()))
    }

    fn put(
        &mut self,
        namespace: &Namespace,
        opened: &[OpenedPage<'_>],
        made_unix_s: u64,
    ) -> Result<(), Failure> {
        let id = self.store.namespace(namespace)?;
        let options = open::patient().made_at(made_unix_s);
        let put = local::put(self.store, id, namespace.shape(), opened, options)?;
        self.report.faulty_pages += put.faulty.len() as u64;
        for status in put.statuses {
            match status {
                PutStatus::Stored => self.report.pages_put += 1,
                PutStatus::Duplicate => self.report.duplicate_pages += 1,
                _ => self.report.refused_pages += 1,
            }
        }
        Ok(())
    }
}

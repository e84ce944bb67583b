//! `larder remote push`: the whole runs of a store to a remote.
//!
//! Runs go in the order of their chains, several at once, so that an interrupted push leaves
//! prefixes. A run that the remote lists is passed over: its name covers all its tokens.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use larder_engine::format::{Namespace, PageShape};
use larder_offline::survey::{PayloadFault, RecordId, Survey};
use larder_remote::run::object_bytes;
use larder_remote::stored::{Run, run_pages, whole_runs};
use larder_remote::{
    Draft, Published, RUN_TOKENS, Remote, RemoteError, RunName, RunNames, Trust, pages_of_run,
};
use larder_store::encoder::{self, Encoder};
use larder_store::keys::Unopened;
use serde::Serialize;

use super::in_order::in_order;
use super::left_out::LeftOut;
use super::place::{ConnectionsArgs, PlaceArgs, TrustArgs, Writes};
use super::reports::{Between, size_of_runs};
use crate::failure::{Ending, Failure};
use crate::findings::{Look, StoreArgs, check_remote};
use crate::interrupt::Interrupt;
use crate::key::StoreKeyArgs;
use crate::place;
use crate::report::{self, Lines, Report, count};
use crate::selection::Selection;

/// Put the whole runs of a store's chains into a remote
///
/// Needs no lock and writes nothing to the store. Pages behind the last whole run of a chain are
/// left out.
#[derive(Args, Debug)]
pub struct PushArgs {
    /// The store: its first volume, or a backend's directory
    #[arg(value_parser = place::parser())]
    path: PathBuf,
    /// Where a further volume is, if not where the store remembers it (may be repeated)
    #[arg(long = "volume", value_name = "PATH")]
    volumes: Vec<PathBuf>,
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
    /// Make a remote of a place that is none yet
    ///
    /// Without it nothing is put into such a place: it may be a directory whose file system is not
    /// mounted, or a mistyped prefix.
    #[arg(long)]
    new: bool,
    /// Tokens of a run; all nodes need the same number
    #[arg(long, value_name = "N", default_value_t = RUN_TOKENS, help_heading = "Expert settings")]
    run_tokens: u32,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Default, Serialize)]
struct PushReport {
    #[serde(flatten)]
    between: Between,
    runs_pushed: u64,
    bytes_pushed: u64,
    damaged_runs: u64,
    left_out_pages: u64,
}

impl Report for PushReport {
    const COMMAND: &'static str = "remote push";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        lines.row("Pushed", size_of_runs(self.runs_pushed, self.bytes_pushed));
        lines.row("There already", count(self.between.present_runs, "run"));
        if self.damaged_runs > 0 {
            let runs = count(self.damaged_runs, "run");
            lines.row(
                "Damaged",
                format!("{runs}; `larder verify` shows the pages"),
            );
        }
        lines.row("In no whole run", count(self.left_out_pages, "page"));
        self.between.last_lines(&mut lines);
        lines
    }
}

/// Runs the command.
///
/// # Errors
/// There is no store or no such namespace, or the remote fails.
pub fn run(args: &PushArgs) -> Result<Ending, Failure> {
    let interrupt = Interrupt::watch();
    let trust = args.trust.load()?;
    if check_remote(&args.path, &trust)? {
        args.store_key.require(&args.path)?;
    }
    let store = StoreArgs::with_key(&args.path, &args.volumes, args.store_key.as_key());
    let survey = match store.look(|options| options)? {
        Look::Store(survey) => survey,
        Look::Wreck(_, message) => return Err(Failure::environment(message)),
    };
    let remote = match args.new {
        true => args.place.open_or_make()?,
        false => args.place.open()?,
    };
    let codec = remote.codec(args.place.deadline())?;
    let mut writes = Writes::default();
    let mut report = PushReport {
        between: Between::new(&args.path, &args.place),
        ..PushReport::default()
    };
    let mut is_chosen = false;
    for (at, facts) in survey.namespaces.iter().enumerate() {
        let Some(record) = &facts.record else {
            continue;
        };
        if !args.selection.takes(&facts.fingerprint, Some(record)) {
            continue;
        }
        is_chosen = true;
        let namespace = record.plain();
        let push = Push {
            args,
            survey: &survey,
            namespace: &namespace,
            names: RunNames::of(&trust, namespace.fingerprint()),
            trust: &trust,
            remote: remote.as_ref(),
            encoder: Encoder::of(codec, &namespace),
        };
        push.runs(at, &interrupt, &mut writes, &mut report)?;
    }
    if !is_chosen && !args.selection.is_open() {
        let facts = survey.namespaces.iter();
        let records = facts.filter_map(|facts| facts.record.as_ref());
        return Err(args.selection.unmatched(records));
    }
    writes.end()?;
    report::print(&report, args.json)?;
    let has_findings = report.damaged_runs > 0 || !report.between.unreadable.is_empty();
    Ok(Ending::Done
        .or_findings(has_findings)
        .or_interrupted(report.between.interrupted))
}

/// A push of the runs of one namespace.
struct Push<'a> {
    args: &'a PushArgs,
    survey: &'a Survey,
    namespace: &'a Namespace,
    names: RunNames,
    trust: &'a Trust,
    remote: &'a dyn Remote,
    /// Of the objects, if they are encoded.
    encoder: Option<Arc<Encoder>>,
}

/// The outcome of a push of a run.
enum Pushed {
    /// Its object was created, with so many bytes.
    Created(u64),
    /// Another writer has created it meanwhile.
    Present,
    /// Its pages cannot be read, or differ from the written ones.
    Damaged,
    /// Its tenant was erased.
    Erased,
    /// The remote did not take it.
    NotTaken(RemoteError),
}

impl Push<'_> {
    fn runs(
        &self,
        namespace: usize,
        interrupt: &Interrupt,
        writes: &mut Writes,
        report: &mut PushReport,
    ) -> Result<(), Failure> {
        let pages = pages_of_run(self.namespace, self.args.run_tokens).get();
        let (mut runs, left_out) = whole_runs(self.survey, namespace, pages);
        report.left_out_pages += left_out;
        let there = self.there(interrupt, report)?;
        let before = runs.len();
        let is_there = |run: &Run| {
            let mut names = run
                .last()
                .into_iter()
                .flat_map(|(_, page)| self.names.all(&page.key));
            names.any(|name| there.contains(&name))
        };
        runs.retain(|run| !is_there(run));
        report.between.present_runs += (before - runs.len()) as u64;
        let bytes = object_bytes(self.namespace, pages as usize) as u64;
        in_order(
            self.args.connections.at_once(),
            &runs,
            |_| bytes,
            |run| self.run(run),
            |run, pushed| {
                self.note(run, pushed?, writes, report)?;
                if interrupt.is_raised() {
                    report.between.interrupted = true;
                    return Ok(ControlFlow::Break(()));
                }
                Ok(ControlFlow::Continue(()))
            },
        )
    }

    /// The runs that the remote has, or cannot show. A listing takes fewer requests than a question
    /// for each run.
    fn there(
        &self,
        interrupt: &Interrupt,
        report: &mut PushReport,
    ) -> Result<HashSet<RunName>, Failure> {
        let place = &self.args.place;
        let mut there = HashSet::new();
        for space in self.names.spaces() {
            let mut unreadable = LeftOut::default();
            let listed = place.list(self.remote, Some(space), &mut unreadable, || {
                interrupt.is_raised()
            })?;
            there.extend(listed.iter().map(|object| object.run));
            there.extend(unreadable.runs());
            report.between.unreadable.append(unreadable);
        }
        Ok(there)
    }

    /// Reads a run from the store and creates its object.
    fn run(&self, run: &Run) -> Result<Pushed, Failure> {
        let trust = self.trust.clone();
        let mut draft = Draft::new(self.namespace.clone(), run_pages(run), trust)?;
        let Some(name) = draft.name() else {
            return Ok(Pushed::Present);
        };
        let ids: Vec<RecordId> = run.iter().map(|(id, _)| *id).collect();
        let shape = self.namespace.shape();
        let mut payloads = draft.payloads().into_iter();
        let mut left_out = None;
        let read = self.survey.read_pages(&ids, |_, stored| {
            let erased = PayloadFault::Sealed(Unopened::Erased);
            let why = match stored == Err(erased) {
                true => Pushed::Erased,
                false => Pushed::Damaged,
            };
            let taken = stored.ok().zip(payloads.next());
            match taken.is_some_and(|(stored, page)| fill(page, shape, stored)) {
                true => ControlFlow::Continue(()),
                false => {
                    left_out = Some(why);
                    ControlFlow::Break(())
                }
            }
        });
        read.map_err(|error| Failure::environment(format!("reading pages: {error}")))?;
        if let Some(why) = left_out {
            return Ok(why);
        }
        drop(payloads);
        if let Some(encoder) = &self.encoder {
            draft.encode(encoder);
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let object = draft
            .finish(self.survey.store(), now.map_or(0, |now| now.as_secs()))
            .map_err(|error| Failure::environment(format!("making an object: {error}")))?;
        let bytes = object.len() as u64;
        let deadline = self.args.place.deadline();
        Ok(match self.remote.publish(&name, object, deadline) {
            Ok(Published::Created) => Pushed::Created(bytes),
            Ok(Published::Present) => Pushed::Present,
            Err(error) => Pushed::NotTaken(error),
        })
    }

    fn note(
        &self,
        run: &Run,
        pushed: Pushed,
        writes: &mut Writes,
        report: &mut PushReport,
    ) -> Result<(), Failure> {
        match pushed {
            Pushed::Created(bytes) => {
                writes.succeeded();
                report.runs_pushed += 1;
                report.bytes_pushed += bytes;
            }
            Pushed::Present => report.between.present_runs += 1,
            Pushed::Damaged => report.damaged_runs += 1,
            Pushed::Erased => report.left_out_pages += run.len() as u64,
            Pushed::NotTaken(error) => {
                let reason = writes.failed(&self.args.place, self.remote, error)?;
                let name = run.last().map(|(_, page)| self.names.name(&page.key));
                if let Some(name) = name {
                    report.between.unreadable.add(&name, reason);
                }
            }
        }
        Ok(())
    }
}

/// Takes a page as a store has it on its disk: plain, or encoded. False if it cannot be decoded.
fn fill(page: &mut [u8], shape: &PageShape, stored: &[u8]) -> bool {
    if stored.len() == page.len() {
        page.copy_from_slice(stored);
        return true;
    }
    encoder::decode(shape, stored, page).is_ok()
}

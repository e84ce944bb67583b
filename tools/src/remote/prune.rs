//! `larder remote prune`: removes objects, by age, by namespace, by their last use, or faulty ones.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args};
use larder_engine::format::Fingerprint;
use larder_remote::{Keyring, Listed, Remote, RunName, Trust, Unreadable, run};
use serde::Serialize;

use super::left_out::LeftOut;
use super::place::{Fetched, PlaceArgs, Writes};
use super::reports::size_of_runs;
use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::report::{self, Lines, Report};
use crate::size::{self, ByteSize};

/// Remove objects of a remote: by age, by namespace, by their last use, or faulty ones
#[derive(Args, Debug)]
#[command(group(ArgGroup::new("which").multiple(true).required(true)
    .args(["older_than", "namespace", "keep", "faulty"])))]
#[command(group(ArgGroup::new("trust").args(["key_file", "unsigned"]).requires("faulty")))]
pub struct PruneArgs {
    #[command(flatten)]
    place: PlaceArgs,
    /// Objects that are older than this, by the clock of the server or of the file system
    #[arg(long, value_name = "DURATION", value_parser = size::duration)]
    older_than: Option<Duration>,
    /// Objects of the namespace with this fingerprint, as `larder remote ls` shows it
    #[arg(long, value_name = "FINGERPRINT", value_parser = fingerprint)]
    namespace: Option<Fingerprint>,
    /// The objects that were used least recently, until the others have at most this size
    ///
    /// An object is used when it is made, and when a node marks its use: at most once a day.
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["older_than", "faulty"])]
    keep: Option<ByteSize>,
    /// Objects that no node takes: planted, damaged or cut off ones. Reads all objects
    #[arg(long, requires = "trust")]
    faulty: bool,
    /// The file with the key of the nodes, for --faulty
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// For --faulty, without keys: checksums alone
    #[arg(long)]
    unsigned: bool,
    /// Print the number of objects that would be removed, and remove none
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

fn fingerprint(text: &str) -> Result<Fingerprint, String> {
    let parsed = text.trim().to_ascii_lowercase().parse();
    parsed.map_err(|error| format!("{error}; `larder remote ls` shows fingerprints"))
}

#[derive(Default, Serialize)]
struct PruneReport {
    remote: String,
    dry_run: bool,
    removed_runs: u64,
    removed_bytes: u64,
    kept_runs: u64,
    kept_bytes: u64,
    unreadable: LeftOut,
    interrupted: bool,
}

impl Report for PruneReport {
    const COMMAND: &'static str = "remote prune";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        let done = match self.dry_run {
            true => "Would remove",
            false => "Removed",
        };
        lines.row(done, size_of_runs(self.removed_runs, self.removed_bytes));
        lines.row("Kept", size_of_runs(self.kept_runs, self.kept_bytes));
        self.unreadable.lines(&mut lines);
        if self.interrupted {
            lines.text("Interrupted: run it again for the rest.");
        }
        lines
    }
}

/// Runs the command.
///
/// # Errors
/// The remote fails.
pub fn run(args: &PruneArgs) -> Result<Ending, Failure> {
    let interrupt = Interrupt::watch();
    let trust = args.trust()?;
    let remote = args.place.open()?;
    let mut prune = Prune {
        args,
        remote: remote.as_ref(),
        interrupt: &interrupt,
        writes: Writes::default(),
        report: PruneReport {
            remote: args.place.url.clone(),
            dry_run: args.dry_run,
            ..PruneReport::default()
        },
    };
    let chosen = prune.chosen()?;
    let chosen = match (args.keep, &trust) {
        (Some(most), _) => prune.least_used(chosen, most)?,
        (None, Some(trust)) => prune.faulty(chosen, trust)?,
        (None, None) => chosen,
    };
    prune.remove(&chosen)?;
    let Prune { writes, report, .. } = prune;
    writes.end()?;
    report::print(&report, args.json)?;
    Ok(Ending::Done
        .or_findings(!report.unreadable.is_empty())
        .or_interrupted(report.interrupted))
}

impl PruneArgs {
    /// The keys by which an object is faulty; `None` if faults do not count.
    fn trust(&self) -> Result<Option<Trust>, Failure> {
        Ok(match (self.faulty, &self.key_file) {
            (false, _) => None,
            (true, Some(path)) => Some(Trust::Sealed(Keyring::load(path)?)),
            (true, None) => Some(Trust::Unsigned),
        })
    }
}

struct Prune<'a> {
    args: &'a PruneArgs,
    remote: &'a dyn Remote,
    interrupt: &'a Interrupt,
    writes: Writes,
    report: PruneReport,
}

impl Prune<'_> {
    fn keep(&mut self, object: &Listed) {
        self.report.kept_runs += 1;
        self.report.kept_bytes += object.bytes;
    }

    /// The objects of this age and namespace.
    fn chosen(&mut self) -> Result<Vec<Listed>, Failure> {
        let (args, interrupt) = (self.args, self.interrupt);
        // The clock that stamped the objects.
        let now = match args.older_than {
            Some(_) => self.remote.now_unix_s(args.place.deadline())?,
            None => 0,
        };
        let left_out = &mut self.report.unreadable;
        let listed = args
            .place
            .list(self.remote, None, left_out, || interrupt.is_raised())?;
        let is_chosen = |object: &Listed| {
            let age = now.saturating_sub(object.created_unix_s);
            let is_old = args.older_than.is_none_or(|limit| age > limit.as_secs());
            let wanted = args.namespace;
            is_old && wanted.is_none_or(|wanted| wanted == object.run.namespace)
        };
        let (chosen, others): (Vec<_>, Vec<_>) = listed.into_iter().partition(is_chosen);
        others.iter().for_each(|object| self.keep(object));
        Ok(chosen)
    }

    /// The objects that were used least recently, beyond so many bytes.
    fn least_used(
        &mut self,
        mut chosen: Vec<Listed>,
        most: ByteSize,
    ) -> Result<Vec<Listed>, Failure> {
        let interrupt = self.interrupt;
        let go_on = || match interrupt.is_raised() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        let mut marked: HashMap<RunName, u64> = HashMap::new();
        let mut each = |mark: Result<Listed, Unreadable>| {
            // A mark that cannot be read is none.
            marked.extend(mark.map(|mark| (mark.run, mark.created_unix_s)));
            go_on()
        };
        let timeout = self.args.place.timeout;
        self.remote
            .list_marks(&mut || go_on(), &mut each, timeout)?;
        let used = |object: &Listed| {
            let marked = marked.get(&object.run).copied();
            object.created_unix_s.max(marked.unwrap_or(0))
        };
        // Of two that were made in the same second the name decides.
        chosen.sort_by_key(|object| (Reverse(used(object)), object.run));
        let mut bytes = 0;
        let kept = chosen.iter().take_while(|object| {
            bytes += object.bytes;
            bytes <= most.0
        });
        let others = chosen.split_off(kept.count());
        chosen.iter().for_each(|object| self.keep(object));
        Ok(others)
    }

    /// The objects with a fault. Each is read twice: the fault may be that of one answer.
    fn faulty(&mut self, chosen: Vec<Listed>, trust: &Trust) -> Result<Vec<Listed>, Failure> {
        let (mut faulty, mut good) = (Vec::new(), 0_u64);
        for object in chosen {
            if self.interrupt.is_raised() {
                self.report.interrupted = true;
                break;
            }
            let is_faulty = match self.is_faulty(&object, trust)? {
                Some(true) => self.is_faulty(&object, trust)?,
                first => first,
            };
            match is_faulty {
                Some(true) => faulty.push(object),
                Some(false) => {
                    good += 1;
                    self.keep(&object);
                }
                None => {}
            }
        }
        if good == 0 && !faulty.is_empty() {
            return Err(Failure::environment(format!(
                "no object is good by this key, and {} are not: nothing was removed; is it the key \
                 of the nodes?",
                faulty.len()
            )));
        }
        Ok(faulty)
    }

    /// Whether an object has a fault; `None` if it is not there, or cannot be read.
    fn is_faulty(&mut self, object: &Listed, trust: &Trust) -> Result<Option<bool>, Failure> {
        Ok(match self.args.place.fetch(self.remote, object)? {
            Fetched::Object(mut bytes) => {
                let opened = run::open(&mut bytes, &object.run, trust);
                Some(opened.fault.is_some() || opened.page_faults().next().is_some())
            }
            Fetched::Gone => None,
            Fetched::Unread(reason) => {
                self.report.unreadable.add(&object.run, reason);
                None
            }
        })
    }

    fn remove(&mut self, objects: &[Listed]) -> Result<(), Failure> {
        for object in objects {
            if self.interrupt.is_raised() {
                self.report.interrupted = true;
                break;
            }
            if !self.args.dry_run {
                match self.remote.remove(&object.run, self.args.place.deadline()) {
                    Ok(()) => self.writes.succeeded(),
                    Err(error) => {
                        let place = &self.args.place;
                        let reason = self.writes.failed(place, self.remote, error)?;
                        self.report.unreadable.add(&object.run, reason);
                        continue;
                    }
                }
            }
            self.report.removed_runs += 1;
            self.report.removed_bytes += object.bytes;
        }
        Ok(())
    }
}

//! `larder import`: takes the pages of an archive (`larder export`) into a store.
//!
//! The store is opened as a server opens it, and the pages are put as a server puts them. Each is
//! checked against the archive first. Present pages are left alone. A full store makes room by
//! evicting its coldest pages, which is refused beforehand unless requested. A damaged archive is
//! read up to the first fault. The pages before it are good, and stay.
//!
//! One thread reads and checks, another stores.

mod batches;
mod taking;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::mpsc::{channel, sync_channel};
use std::time::Instant;

use clap::Args;
use larder_engine::format::{
    ArchiveHead, ArchiveItem, BLOCK_BYTES, Damage, Fingerprint, Namespace,
};
use larder_engine::{PageStore, PutStatus, Refusal, Store};
use larder_offline::survey::{Survey, SurveyError, SurveyOptions};
use larder_seal::WrappingKey;
use larder_store::inventory::Inventory;
use serde::Serialize;

use crate::archive::{ArchiveSource, Fault, FaultReason, Locked, read_head};
use crate::failure::{Ending, Failure};
use crate::findings::{self, Finding};
use crate::interrupt::{Input, Interrupt};
use crate::key::ArchiveKeyArgs;
use crate::open::{self, OpenArgs};
use crate::place;
use crate::report::{self, Lines, Report, count, rows};
use crate::size::ByteSize;
use crate::usage;
use batches::Batches;
use taking::Taking;

/// The file name that stands for standard input.
const STDIN: &str = "-";

/// Batches that are read ahead of the store.
const BATCHES_AHEAD: usize = 2;

/// The remedy for a damaged archive.
const DRY_RUN_ADVICE: &str = "the pages before it are good and would be stored; export again, or \
    bring a good copy of the file";
const FORGED_ADVICE: &str =
    "the pages before it are those that were exported; bring an unchanged copy of the file";
const ARCHIVE_ADVICE: &str = "what came before it was good and is stored; export again, or bring a \
    good copy of the file and import that: pages stored \
     already are passed over";

/// Take the pages of an archive into a store
///
/// An encrypted archive needs the key that it was made with. Its pages are encrypted in the store
/// only if the store is.
///
/// Exit codes: 0 done, 1 the archive is damaged or was changed by a writer without its key, or
/// pages were not admitted, 2 usage, 3 the store is in use or there is none, the file is no archive
/// or needs another key, or it does not fit (--force).
#[derive(Args, Debug)]
pub struct ImportArgs {
    /// The store: its first volume, or a backend's directory
    #[arg(value_parser = place::parser())]
    path: PathBuf,
    /// The archive; `-` for standard input
    file: PathBuf,
    /// Check the archive, print the plan and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Import even if the coldest pages are evicted for it
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    open: OpenArgs,
    #[command(flatten)]
    archive_key: ArchiveKeyArgs,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Default, Serialize)]
struct ImportReport {
    /// The first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// The archive.
    #[serde(serialize_with = "crate::report::paths")]
    file: PathBuf,
    /// The store from which it was exported, the time, and the announced pages.
    source_store_id: String,
    created_unix_s: u64,
    announced_pages: u64,
    /// Whether it is encrypted.
    encrypted: bool,
    /// Whether nothing was stored.
    dry_run: bool,
    /// In a dry run the state of the store: `clean`, or `not_closed`. In the latter, pages that are
    /// not durable count as absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    condition: Option<&'static str>,
    /// Pages stored now, or that would be, and the bytes of their payloads.
    pages_put: u64,
    bytes_put: u64,
    /// Pages that were present already.
    duplicate_pages: u64,
    /// Pages that were not admitted, in all and by reason.
    refused_pages: u64,
    refusals: Vec<RefusalRow>,
    /// Pages whose write failed.
    failed_pages: u64,
    /// Pages evicted meanwhile to make room, and the pages of the store afterwards.
    evicted_pages: u64,
    store_pages: u64,
    /// Pages that the export had to leave out.
    left_out_pages: u64,
    /// How long it took, and how fast it was.
    seconds: f64,
    bytes_per_second: f64,
    /// Whether the operator ended it.
    interrupted: bool,
    /// Whether the archive is damaged, and the place. There is at most one, since nothing is read
    /// behind it.
    damaged: bool,
    damage: Vec<Finding>,
    /// Whether a writer without the key changed an encrypted archive: `damage` has the place, and
    /// nothing is damaged.
    forged: bool,
}

/// Pages that were not admitted for one reason.
#[derive(Serialize)]
struct RefusalRow {
    #[serde(flatten)]
    why: Why,
    pages: u64,
}

/// The reason why pages are not admitted.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
struct Why {
    /// One word for programs.
    kind: &'static str,
    reason: &'static str,
}

impl Report for ImportReport {
    const COMMAND: &'static str = "import";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        lines.row("Archive of store", self.source_store_id.as_str());
        let left_out = match self.left_out_pages {
            0 => String::new(),
            pages => format!(", of which {pages} were left out by the export"),
        };
        rows! { lines:
            "Pages announced" => "{}{left_out}", self.announced_pages;
        }
        let (stored, bytes) = (self.pages_put, ByteSize(self.bytes_put));
        if self.dry_run {
            lines.row("Would store", format!("{}, {bytes}", count(stored, "page")));
        } else {
            let rate = usage::rate(self.bytes_per_second);
            let pages = count(stored, "page");
            rows! { lines:
                "Stored" => "{pages}, {bytes} in {:.1} s, {rate}", self.seconds;
            }
        }
        lines.row("There already", count(self.duplicate_pages, "page"));
        if self.condition == Some(findings::NOT_CLOSED) {
            lines.row(
                "Not closed",
                "the store was not closed in order: of its pages only those count here that a sync \
                 covers",
            );
        }
        for row in &self.refusals {
            let pages = count(row.pages, "page");
            lines.row("Refused", format!("{pages}: {}", row.why.reason));
        }
        if self.failed_pages > 0 {
            lines.row("Failed", count(self.failed_pages, "write"));
        }
        if self.evicted_pages > 0 {
            let kept = count(self.store_pages, "page");
            rows! { lines:
                "Evicted for them" => "{}; the store has {kept} now",
                    count(self.evicted_pages, "page");
            }
        }
        for damage in &self.damage {
            lines.text(damage.archive_line());
        }
        if self.interrupted {
            lines.text("Interrupted: what was stored until then stays; run it again for the rest.");
        }
        lines
    }
}

impl ImportReport {
    /// `spares`: no page of others was allowed to be evicted.
    fn ending(&self, spares: bool) -> Ending {
        let dropped = spares && self.evicted_pages > 0;
        let unstored = self.refused_pages + self.failed_pages;
        Ending::Done
            .or_interrupted(self.interrupted)
            .or_findings(self.damaged || self.forged || unstored > 0 || dropped)
    }

    fn note(&mut self, status: PutStatus, page_bytes: u64) {
        match status {
            PutStatus::Stored => {
                self.pages_put += 1;
                self.bytes_put += page_bytes;
            }
            PutStatus::Duplicate => self.duplicate_pages += 1,
            PutStatus::Refused(refusal) => self.refuse(why(refusal), 1),
            PutStatus::Failed(_) => self.failed_pages += 1,
        }
    }

    fn refuse(&mut self, why: Why, pages: u64) {
        self.refused_pages += pages;
        match self.refusals.iter_mut().find(|row| row.why == why) {
            Some(row) => row.pages += pages,
            None => self.refusals.push(RefusalRow { why, pages }),
        }
    }
}

fn why(refusal: Refusal) -> Why {
    let (kind, reason) = match refusal {
        Refusal::NoSpace => (
            "no_space",
            "no room: reclaim did not catch up, or everything is leased; import again",
        ),
        Refusal::Busy => ("busy", "too many writes in flight; import again"),
        Refusal::WrongShape => ("wrong_shape", "not of their namespace's shape"),
        Refusal::TooLarge => (
            "too_large",
            "larger than a segment of this store: import into one with larger segments",
        ),
        Refusal::Unreachable => (
            "unreachable",
            "with the pages before them in their chain more than this store keeps: import into a \
             larger one",
        ),
        Refusal::ReadOnly => ("read_only", "the store is open read-only"),
        Refusal::Closed => ("closed", "a volume of the store has failed"),
        Refusal::ReadOnlyService => (
            "read_only_service",
            "every volume refuses writes: see `larder doctor`, then import again",
        ),
        Refusal::Exhausted => (
            "exhausted",
            "the store's serial numbers for this run are used up; import again",
        ),
        Refusal::NotAdmitted => ("not_admitted", "the store's policy does not take them"),
        Refusal::Budget => ("budget", "the store's budget of writes does not take them"),
        Refusal::Quota => (
            "quota",
            "their group is at the maximum of its quota: raise it with `larder quota`, then import \
             again",
        ),
        Refusal::Erased => (
            "erased",
            "of a tenant that this store has erased since they were exported, or is erasing",
        ),
        Refusal::KeyringFull => (
            "keyring_full",
            "the keyring of the store takes no more tenants: import into another store",
        ),
    };
    Why { kind, reason }
}

/// Runs the command.
///
/// # Errors
/// There is no store, another process has it open, the file is no archive, or it does not fit.
pub fn run(args: &ImportArgs) -> Result<Ending, Failure> {
    let interrupt = Interrupt::watch();
    let input = open(args, &interrupt)?;
    let mut source = ArchiveSource::new(input);
    let head = match read_head(&mut source) {
        Ok(head) => head,
        Err(_) if interrupt.is_raised() => return Ok(Ending::Interrupted),
        Err(fault) => return headless(args, &fault),
    };
    let key = match head.wrap {
        Some(_) => args.archive_key.read(&args.open.key)?,
        None if args.archive_key.is_given() => {
            return Err(Failure::usage(format!(
                "{}: the archive is not encrypted, and a key of an archive is given. It may have \
                 been put in the place of an encrypted archive; leave the option out to import it \
                 all the same",
                args.file.display()
            )));
        }
        None => None,
    };
    source.unlock(&head, key.as_ref()).map_err(|locked| {
        let file = args.file.display();
        let failure = Failure::environment(format!("{file}: {locked}"));
        match locked {
            Locked::NoKey(_) | Locked::OtherKey { .. } => failure.with_hint(
                "--archive-key-file and --archive-key-command name the key of an archive; by \
                 default it is that of the store",
            ),
            Locked::Forged | Locked::Vault(_) => failure,
        }
    })?;
    let archive = Archive { head, key };
    let report = if args.dry_run && larder_engine::report(&args.path).is_ok() {
        let report = open::with_any(&args.path, args.open.options()?, |store| {
            import(args, store, &archive, source, &interrupt)
        })?;
        ImportReport {
            condition: Some(findings::IN_USE),
            ..report
        }
    } else if args.dry_run {
        let condition = condition(args)?;
        let options = args.open.options()?.with(|o| o.read_only = true);
        let store = Store::open(&args.path, options)?;
        let report = import(args, &store, &archive, source, &interrupt);
        store.close()?;
        ImportReport {
            condition: Some(condition),
            ..report?
        }
    } else {
        open::with_any(&args.path, args.open.options()?, |store| {
            import(args, store, &archive, source, &interrupt)
        })?
    };
    report::print(&report, args.json)?;
    Ok(report.ending(!args.force))
}

/// An archive whose head was read.
struct Archive {
    head: ArchiveHead,
    /// That wraps its own, if it is encrypted.
    key: Option<WrappingKey>,
}

/// Whether the store was closed in order, in a word.
///
/// # Errors
/// Another process has it open: then only the owner knows its content.
fn condition(args: &ImportArgs) -> Result<&'static str, Failure> {
    let options = SurveyOptions {
        hold: true,
        volumes: args.open.options()?.volumes,
        sealed: args.open.key.sealed()?,
        ..SurveyOptions::default()
    };
    match Survey::new(&args.path, &options) {
        Ok(survey) => Ok(findings::condition(&survey)),
        Err(SurveyError::Store(error)) => Err(error.into()),
        Err(error) => Err(Failure::environment(error.to_string())),
    }
}

fn is_stdin(args: &ImportArgs) -> bool {
    args.file.as_os_str() == STDIN
}

fn open(args: &ImportArgs, interrupt: &Interrupt) -> Result<Input, Failure> {
    if is_stdin(args) {
        return Input::stdin(interrupt)
            .map_err(|error| Failure::environment(format!("standard input: {error}")));
    }
    Input::open(&args.file, interrupt).map_err(|error| {
        Failure::environment(format!("{}: {error}; check the path", args.file.display()))
    })
}

/// Ends the command over a file whose first block is not the head of an archive that this build
/// reads.
fn headless(args: &ImportArgs, fault: &Fault) -> Result<Ending, Failure> {
    let file = args.file.display();
    let message = match &fault.reason {
        FaultReason::Structure(Damage::Blank(_) | Damage::Magic(_)) => {
            format!("{file}: is no archive of `larder export`; check the path")
        }
        FaultReason::Structure(Damage::Version { .. }) => {
            format!("{file}: {}; use the Larder that wrote it", fault.reason)
        }
        FaultReason::Unreadable(_) => format!("{file}: {}; check the path", fault.reason),
        FaultReason::CutOff | FaultReason::Surplus => {
            let advice = if is_stdin(args) {
                "did its writer fail?"
            } else {
                "check the path"
            };
            format!("{file}: is shorter than any archive; {advice}")
        }
        FaultReason::Structure(_) | FaultReason::Payload { .. } | FaultReason::Sealed(_) => {
            let mut report = ImportReport {
                path: args.path.clone(),
                file: args.file.clone(),
                dry_run: args.dry_run,
                ..ImportReport::default()
            };
            report.damage(fault);
            report::print(&report, args.json)?;
            return Ok(report.ending(!args.force));
        }
    };
    Err(Failure::environment(message))
}

impl ImportReport {
    fn damage(&mut self, fault: &Fault) {
        (self.damaged, self.forged) = (!fault.is_forged(), fault.is_forged());
        let advice = match (self.forged, self.dry_run) {
            (true, _) => FORGED_ADVICE,
            (false, true) => DRY_RUN_ADVICE,
            (false, false) => ARCHIVE_ADVICE,
        };
        let finding = Finding::of_archive(&self.file, fault, advice);
        self.damage.push(finding);
    }
}

fn import(
    args: &ImportArgs,
    store: &Store,
    archive: &Archive,
    source: ArchiveSource<Input>,
    interrupt: &Interrupt,
) -> Result<ImportReport, Failure> {
    let started = Instant::now();
    let before = store.stats();
    let head = &archive.head;
    if !args.force {
        check_room(args, store, archive)?;
    }
    let mut report = ImportReport {
        path: args.path.clone(),
        file: args.file.clone(),
        source_store_id: head.store.to_string(),
        created_unix_s: head.created_unix_s,
        announced_pages: head.pages,
        encrypted: head.wrap.is_some(),
        dry_run: args.dry_run,
        ..ImportReport::default()
    };
    let total = head.blocks.saturating_mul(BLOCK_BYTES as u64);
    let template = "importing {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let bar = report::progress(Some(total), template);
    let (batches, steps) = sync_channel(BATCHES_AHEAD);
    let (spare, spares) = channel();
    let (stored, read) = std::thread::scope(|scope| {
        let reader = std::thread::Builder::new()
            .spawn_scoped(scope, move || Batches::new(source, batches, spares).read());
        let reader = match reader {
            Ok(reader) => reader,
            Err(error) => return (Err(Failure::thread(&error)), Ok(Ok(0))),
        };
        let taking = Taking {
            store,
            spares: !args.force && !args.dry_run,
            made_unix_s: head.created_unix_s,
            interrupt,
        };
        let stored = taking.take(&steps, &spare, &mut report, &bar);
        // The reader stops when its channel is closed.
        drop(steps);
        let read = reader.join();
        (stored, read)
    });
    bar.finish_and_clear();
    stored?;
    // The signal ended the reading while it waited for input.
    report.interrupted |= interrupt.is_raised() && matches!(read, Ok(Err(_)));
    match read {
        Ok(Ok(left_out)) => report.left_out_pages = left_out,
        Ok(Err(fault)) if !report.interrupted => report.damage(&fault),
        Ok(Err(_)) => {}
        Err(panic) => std::panic::resume_unwind(panic),
    }
    if !args.dry_run {
        store.flush()?;
    }
    let after = store.stats();
    report.evicted_pages = after.evicted.saturating_sub(before.evicted);
    report.store_pages = after.pages;
    report.seconds = started.elapsed().as_secs_f64();
    report.bytes_per_second = usage::per_second(report.bytes_put, report.seconds);
    Ok(report)
}

/// Refuses an archive whose new pages need more room than is free.
fn check_room(args: &ImportArgs, store: &Store, archive: &Archive) -> Result<(), Failure> {
    let (stats, head) = (store.stats(), &archive.head);
    let free = stats.usable_bytes.saturating_sub(stats.taken_bytes);
    // A page takes less than twice its own bytes, as long as it fits at all.
    let announced = head.blocks.saturating_mul(2 * BLOCK_BYTES as u64);
    if announced <= free {
        return Ok(());
    }
    let needed = if is_stdin(args) {
        announced / 2
    } else {
        // A fault here is found again, and reported, when the pages themselves are read.
        needed_bytes(args, store, archive).unwrap_or(announced / 2)
    };
    if needed <= free {
        return Ok(());
    }
    let which = if is_stdin(args) {
        "pages (some may be in the store, which a pipe cannot tell)"
    } else {
        "pages that are not in the store"
    };
    Err(Failure::environment(format!(
        "{}: no room: the archive brings {} of {which}, {} are free; enlarge the store with \
         `larder create \
         --grow`, or use --force to have the coldest pages dropped",
        args.path.display(),
        ByteSize(needed),
        ByteSize(free)
    )))
}

/// Bytes of the archive's pages that the store does not have, found without reading any page.
/// Counts up to the first fault. A page that fits no segment takes nothing.
fn needed_bytes(args: &ImportArgs, store: &Store, archive: &Archive) -> Option<u64> {
    let stats = store.stats();
    let known: BTreeMap<Fingerprint, Namespace> = store
        .records()
        .ok()?
        .into_iter()
        .map(|namespace| (namespace.plain().fingerprint(), namespace))
        .collect();
    if !args.file.is_file() {
        return None;
    }
    let mut source = ArchiveSource::new(File::open(&args.file).ok()?);
    let head = read_head(&mut source).ok()?;
    source.unlock(&head, archive.key.as_ref()).ok()?;
    let (mut bytes, mut page_bytes, mut id) = (0, 0, None);
    while let Ok(Some(item)) = source.item() {
        match item {
            ArchiveItem::Namespace(namespace) => {
                let bytes = u64::from(namespace.page_blocks()) * BLOCK_BYTES as u64;
                page_bytes = if stats.usable_pages(bytes) > 0 {
                    stats.footprint(bytes)
                } else {
                    0
                };
                let namespace = known.get(&namespace.fingerprint());
                id = namespace.and_then(|namespace| store.namespace(namespace).ok());
            }
            ArchiveItem::Pages(pages) => {
                let keys: Vec<_> = pages.iter().map(|page| page.key).collect();
                let there = id.map_or(0, |id| {
                    let there = store.contains(id, &keys);
                    there.into_iter().filter(|there| *there).count()
                });
                bytes += (pages.len() - there) as u64 * page_bytes;
                source.skip_payloads().ok()?;
            }
            ArchiveItem::Head(_) | ArchiveItem::End(_) => {}
        }
    }
    Some(bytes)
}

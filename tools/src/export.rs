//! `larder export`: pages of a store in one portable file, which another store of any geometry
//! takes (`larder import`).
//!
//! The archive of an encrypted store is encrypted, by default with the store's key.
//!
//! It reads without opening the store. So it works beside a server, on a store left by a crash, and
//! on a damaged one. Every page is checked. A page with wrong bytes is left out and reported. The
//! file gets its name when it is complete and durable: an interrupted export leaves no partial
//! file.

mod target;

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use indicatif::ProgressBar;
use larder_base::random::random_bytes;
use larder_engine::format::{
    ArchiveHead, ArchiveId, ArchivedNamespace, ArchivedPage, BLOCK_BYTES, PageKey,
};
use larder_offline::survey::{BadPage, Page, PayloadFault, RecordId, Survey, SurveyOptions};
use larder_seal::WrappingKey;
use serde::Serialize;

use crate::archive::{self, ArchiveSink};
use crate::failure::{Ending, Failure};
use crate::findings::{self, Finding, Look, StoreArgs};
use crate::interrupt::Interrupt;
use crate::key::ArchiveKeyArgs;
use crate::report::{self, Lines, Report, count, rows};
use crate::selection::Selection;
use crate::size::ByteSize;
use crate::usage;
use target::Target;

/// Write pages of a store to one file that another store can take
///
/// Needs no lock and writes nothing to the store. Exit codes: 0 done, 1 done, but pages are missing
/// (damaged, or a chain that is not stored whole), 2 usage, 3 there is no store, or the file cannot
/// be written.
#[derive(Args, Debug)]
pub struct ExportArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// The file to make; `-` for standard output
    file: PathBuf,
    #[command(flatten)]
    selection: Selection,
    /// Only the chain that ends in the page with this key: the page and all before it
    #[arg(long, value_name = "HEX", value_parser = page_key)]
    key: Option<PageKey>,
    #[command(flatten)]
    archive_key: ArchiveKeyArgs,
    /// Write the pages of an encrypted store in clear
    #[arg(long, conflicts_with = "archive_key")]
    plaintext: bool,
    /// Replace the file if there is one
    #[arg(long)]
    force: bool,
    /// Print one JSON document (on standard error when the archive goes to standard output)
    #[arg(long)]
    json: bool,
}

fn page_key(text: &str) -> Result<PageKey, String> {
    let key = text.trim().to_ascii_lowercase().parse();
    key.map_err(|error| format!("{error}; a page key has 64 hex digits"))
}

#[derive(Default, Serialize)]
struct ExportReport {
    /// The first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// The created file. Absent if the export was interrupted, or if the store cannot be
    /// identified.
    #[serde(serialize_with = "crate::report::paths")]
    file: Option<PathBuf>,
    /// Its length in bytes.
    file_bytes: u64,
    /// The identity of the key that it is encrypted for. Absent if it is plain.
    #[serde(skip_serializing_if = "Option::is_none")]
    archive_key_id: Option<String>,
    /// Whether anything is damaged.
    damaged: bool,
    /// The state of the store: `clean`, `not_closed` or `in_use`. In a store in use, pages may have
    /// moved before they were read. Absent if the store cannot be identified.
    #[serde(skip_serializing_if = "Option::is_none")]
    condition: Option<&'static str>,
    namespaces: Vec<NamespaceRow>,
    /// Pages in the file, and the bytes of their payloads, padding included.
    pages: u64,
    payload_bytes: u64,
    /// Pages left out because they are damaged, and because a crash cut their write short.
    damaged_pages: u64,
    unfinished_pages: u64,
    /// Pages left out because the store's owner moved or dropped them meanwhile.
    departed_pages: u64,
    /// Pages of an encrypted store left out because no key opens them: another writer changed
    /// their records.
    sealed_pages: u64,
    /// With `--key`: whether it and every page before it are in the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    chain_complete: Option<bool>,
    /// How long it took, and how fast it was.
    seconds: f64,
    bytes_per_second: f64,
    /// Whether the operator ended it.
    interrupted: bool,
    /// Everything that is damaged.
    damage: Vec<Finding>,
    /// The reason why nothing could be exported.
    #[serde(skip_serializing_if = "Option::is_none")]
    wreck: Option<String>,
}

/// A namespace of the file.
#[derive(Serialize)]
struct NamespaceRow {
    fingerprint: String,
    /// Its record. `None` when the store has lost the record: then only a store that knows the
    /// namespace can take the pages.
    name: Option<String>,
    /// Pages chosen, damaged ones among them.
    pages: u64,
}

impl Report for ExportReport {
    const COMMAND: &'static str = "export";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        if let Some(file) = &self.file {
            let size = ByteSize(self.file_bytes);
            lines.row("Exported to", format!("{}, {size}", file.display()));
            if let Some(key) = &self.archive_key_id {
                lines.row("Encrypted", format!("for the key {key}"));
            }
            let rate = usage::rate(self.bytes_per_second);
            let bytes = ByteSize(self.payload_bytes);
            rows! { lines:
                "Pages" => "{}, {bytes} in {:.1} s, {rate}", self.pages, self.seconds;
            }
            self.describe(&mut lines);
        }
        findings::list(&self.damage, &mut lines);
        if let Some(wreck) = &self.wreck {
            lines.text(wreck.as_str());
        }
        if self.interrupted {
            lines.text("Interrupted: no file was made.");
        }
        lines
    }
}

impl ExportReport {
    fn describe(&self, lines: &mut Lines) {
        for namespace in &self.namespaces {
            let name = namespace.name.as_deref().unwrap_or(
                "its record is lost: only a store that knows the namespace can take its pages",
            );
            let pages = count(namespace.pages, "page");
            rows! { lines:
                "Namespace" => "{}, {pages}: {name}", namespace.fingerprint;
            }
        }
        if self.damaged_pages + self.unfinished_pages + self.departed_pages > 0 {
            rows! { lines:
                "Left out" =>
                    "{} damaged, {} cut short by a crash, {} moved or dropped by the store's owner \
                    meanwhile",
                    count(self.damaged_pages, "page"), self.unfinished_pages, self.departed_pages;
            }
        }
        if self.sealed_pages > 0 {
            rows! { lines:
                "Not decrypted" => "{}, changed by another writer",
                    count(self.sealed_pages, "page");
            }
        }
        if self.chain_complete == Some(false) {
            lines.text("The chain is incomplete: pages are missing or left out.");
        }
    }

    fn ending(&self) -> Ending {
        Ending::Done
            .or_findings(self.damaged || self.chain_complete == Some(false))
            .or_interrupted(self.interrupted)
    }
}

/// Runs the command.
///
/// # Errors
/// There is no store, no such namespace or page, or the file cannot be written.
pub fn run(args: &ExportArgs) -> Result<Ending, Failure> {
    let interrupt = Interrupt::watch();
    let target = Target::check(&args.file, args.force)?;
    let report = match args.store.look(|options: SurveyOptions| options)? {
        Look::Wreck(damage, message) => wreck(args, damage, message),
        Look::Store(survey) => {
            target.refuse_volumes(&survey)?;
            let key = match args.plaintext {
                true => None,
                false => args.archive_key.read(&args.store.key)?,
            };
            export(args, &survey, key.as_ref(), &target, &interrupt)?
        }
    };
    match target {
        Target::Stdout => report::print_on(&report, args.json, &mut io::stderr().lock())?,
        Target::File { .. } => report::print(&report, args.json)?,
    }
    Ok(report.ending())
}

fn wreck(args: &ExportArgs, damage: Vec<Finding>, message: String) -> ExportReport {
    ExportReport {
        path: args.store.path.clone(),
        damaged: true,
        damage,
        wreck: Some(message),
        ..ExportReport::default()
    }
}

fn export(
    args: &ExportArgs,
    survey: &Survey,
    key: Option<&WrappingKey>,
    target: &Target,
    interrupt: &Interrupt,
) -> Result<ExportReport, Failure> {
    let started = Instant::now();
    let choice = Choice::new(args, survey)?;
    let template = "exporting {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let bar = report::progress(Some(choice.bytes()), template);
    let mut progress = Progress {
        bar: &bar,
        interrupt,
        bad: Vec::new(),
        outcome: Outcome::default(),
    };
    let needed = archive::bytes_max(choice.sections.len(), choice.pages(), choice.bytes());
    let made = target.make(needed, |out| {
        write(survey, &choice, key, out, &mut progress)
    });
    let Progress { bad, outcome, .. } = progress;
    let is_sealed = |bad: &BadPage| matches!(bad.fault, PayloadFault::Sealed(_));
    let (sealed, bad): (Vec<_>, Vec<_>) = bad.into_iter().partition(is_sealed);
    bar.finish_and_clear();
    let file_bytes = made?;
    let seconds = started.elapsed().as_secs_f64();
    // An interrupted export reports nothing but the interruption.
    let (there, departed) = match file_bytes {
        Some(_) => args.store.departed(bad),
        None => (Vec::new(), 0),
    };
    let (unfinished, damaged): (Vec<_>, Vec<_>) = there.into_iter().partition(is_unfinished);
    let mut damage = Finding::all_of(survey);
    damage.extend(damaged.iter().map(|bad| Finding::of_page(survey, bad)));
    Ok(ExportReport {
        path: args.store.path.clone(),
        file: file_bytes.is_some().then(|| args.file.clone()),
        file_bytes: file_bytes.unwrap_or(0),
        archive_key_id: key.map(|key| key.id().to_string()),
        damaged: !damage.is_empty(),
        condition: Some(findings::condition(survey)),
        namespaces: choice.rows(survey),
        pages: outcome.pages,
        payload_bytes: outcome.bytes,
        damaged_pages: damaged.len() as u64,
        unfinished_pages: unfinished.len() as u64,
        departed_pages: departed,
        sealed_pages: sealed.len() as u64,
        chain_complete: choice
            .complete
            .map(|complete| complete && outcome.pages == choice.pages()),
        seconds,
        bytes_per_second: usage::per_second(outcome.bytes, seconds),
        interrupted: file_bytes.is_none(),
        damage,
        wreck: None,
    })
}

/// Whether the wrong bytes of a page come from a write that a crash cut short.
fn is_unfinished(bad: &BadPage) -> bool {
    !bad.page.proven && matches!(bad.fault, PayloadFault::Mismatch { .. })
}

/// The pages to export.
struct Choice {
    /// By namespace, in the order in which they are written.
    sections: Vec<Section>,
    /// With `--key`: whether its chain is stored whole.
    complete: Option<bool>,
}

/// The pages of one namespace.
struct Section {
    /// Position among the survey's namespaces.
    namespace: usize,
    pages: Vec<RecordId>,
    /// Blocks of a plain page.
    page_blocks: u32,
    /// Bytes of all payloads.
    bytes: u64,
}

impl Choice {
    fn new(args: &ExportArgs, survey: &Survey) -> Result<Choice, Failure> {
        let chosen: Vec<usize> = (0..survey.namespaces.len())
            .filter(|&at| {
                let facts = &survey.namespaces[at];
                args.selection
                    .takes(&facts.fingerprint, facts.record.as_ref())
            })
            .collect();
        if chosen.is_empty() && !args.selection.is_open() {
            let facts = survey.namespaces.iter();
            let records = facts.filter_map(|facts| facts.record.as_ref());
            return Err(args.selection.unmatched(records));
        }
        let Some(key) = args.key else {
            let sections = chosen
                .into_iter()
                .map(|at| Section::new(survey, at, survey.chain_order(at)));
            return Ok(Choice {
                sections: sections.collect(),
                complete: None,
            });
        };
        let mut complete = true;
        let mut sections = Vec::new();
        for at in chosen {
            if let Some(ancestry) = survey.ancestry(at, &key) {
                complete &= ancestry.complete;
                sections.push(Section::new(survey, at, ancestry.pages));
            }
        }
        if sections.is_empty() {
            let path = args.store.path.display();
            return Err(Failure::usage(format!(
                "{path}: page {key} is not in the store; `larder inspect --key` tells what became \
                 of it"
            )));
        }
        Ok(Choice {
            sections,
            complete: Some(complete),
        })
    }

    fn pages(&self) -> u64 {
        let pages = self.sections.iter().map(|section| section.pages.len());
        pages.sum::<usize>() as u64
    }

    fn bytes(&self) -> u64 {
        self.sections.iter().map(|section| section.bytes).sum()
    }

    fn rows(&self, survey: &Survey) -> Vec<NamespaceRow> {
        let row = |section: &Section| {
            let facts = &survey.namespaces[section.namespace];
            NamespaceRow {
                fingerprint: facts.fingerprint.to_string(),
                name: facts.record.as_ref().map(ToString::to_string),
                pages: section.pages.len() as u64,
            }
        };
        self.sections.iter().map(row).collect()
    }
}

impl Section {
    fn new(survey: &Survey, namespace: usize, pages: Vec<RecordId>) -> Section {
        let found = || pages.iter().map(|&page| survey.page_of(page));
        Section {
            namespace,
            page_blocks: found().next().map_or(0, |page| {
                page.saved + u32::try_from(page.bytes / BLOCK_BYTES as u64).unwrap_or(0)
            }),
            bytes: found().map(|page| page.bytes).sum(),
            pages,
        }
    }

    /// The archive's entry for the namespace. `None` when the store knows neither its record nor a
    /// page of it.
    fn archived(&self, survey: &Survey) -> Option<ArchivedNamespace> {
        let facts = &survey.namespaces[self.namespace];
        if let Some(record) = &facts.record {
            return Some(ArchivedNamespace::Whole(record.clone()));
        }
        (self.page_blocks > 0).then_some(ArchivedNamespace::Unnamed {
            fingerprint: facts.fingerprint,
            page_blocks: self.page_blocks,
        })
    }
}

/// The state of an export in progress.
#[derive(Default)]
struct Outcome {
    pages: u64,
    bytes: u64,
}

struct Progress<'a> {
    bar: &'a ProgressBar,
    interrupt: &'a Interrupt,
    /// Pages with wrong bytes.
    bad: Vec<BadPage>,
    outcome: Outcome,
}

/// Writes the archive. Returns its length, or `None` if the operator ended it.
fn write(
    survey: &Survey,
    choice: &Choice,
    key: Option<&WrappingKey>,
    out: &mut dyn Write,
    progress: &mut Progress<'_>,
) -> io::Result<Option<u64>> {
    let head = ArchiveHead {
        store: survey.store(),
        created_unix_s: unix_seconds(),
        pages: choice.pages(),
        blocks: choice.bytes() / BLOCK_BYTES as u64,
        wrap: None,
    };
    let mut sink = ArchiveSink::begin(out, random_id()?, head, key)?;
    for section in &choice.sections {
        let Some(namespace) = section.archived(survey) else {
            continue;
        };
        sink.namespace(namespace)?;
        let mut written = Ok(());
        survey.read_pages(&section.pages, |page, bytes| {
            written = progress.page(page, bytes, &mut sink);
            if written.is_err() || progress.interrupt.is_raised() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?;
        written?;
        if progress.interrupt.is_raised() {
            return Ok(None);
        }
    }
    let (_, bytes) = sink.end(progress.bad.len() as u64)?;
    Ok(Some(bytes))
}

impl Progress<'_> {
    fn page(
        &mut self,
        page: &Page,
        bytes: Result<&[u8], PayloadFault>,
        sink: &mut ArchiveSink<&mut dyn Write>,
    ) -> io::Result<()> {
        self.bar.inc(page.bytes);
        let outcome = &mut self.outcome;
        match bytes {
            Ok(bytes) => {
                let archived = ArchivedPage {
                    key: page.key,
                    parent: page.parent,
                    depth: page.depth,
                    saved: page.saved,
                    checksum: page.checksum,
                    seal: None,
                };
                sink.page(archived, bytes)?;
                outcome.pages += 1;
                outcome.bytes += page.bytes;
            }
            Err(fault) => self.bad.push(BadPage { page: *page, fault }),
        }
        Ok(())
    }
}

fn unix_seconds() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

fn random_id() -> io::Result<ArchiveId> {
    random_bytes().map(ArchiveId::from_bytes)
}

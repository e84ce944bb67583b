//! `larder compact`: orders the pages of a store, in place or into a new store.
//!
//! In place, the engine moves scattered pages and releases dead space ([`larder_offline`]).
//! A kill at any moment leaves every page readable. In a store that servers use, its owner moves
//! the pages, segment by segment. Into a new store the pages are put like any others. The report
//! describes the layout before and after in the same fields.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::Args;
use indicatif::ProgressBar;
use larder_engine::format::OVERHEAD_BYTES;
use larder_engine::{CodecChoice, CreateOptions, OpenOptions, PageStore, Store, StoreError};
use larder_offline::survey::{Sealed, Survey, SurveyOptions};
use larder_offline::{Compacted, Copied};
use larder_seal::{KeySource, Vault, WrappingKey};
use larder_store::recovery::scan::Case;
use serde::Serialize;

use crate::failure::{Ending, Failure};
use crate::findings::{Finding, Look, StoreArgs};
use crate::interrupt::Interrupt;
use crate::report::{self, Lines, Report, count, rows};
use crate::size::ByteSize;
use crate::usage;

/// Put the pages of a store in order, so that a chain is one sequential read, and drop dead space
///
/// Nothing is evicted, and a kill at any moment leaves every page readable. While servers use the
/// store, its owner moves the pages behind their reads, within segments. Exit codes: 0 done, 1 the
/// store is damaged, or not all could be put in order, 2 usage, 3 the store is in use by a process
/// that serves no other, or there is none.
#[derive(Args, Debug)]
pub struct CompactArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Write the pages into a new store at this path instead, and leave this one as it is
    #[arg(long, value_name = "NEW")]
    into: Option<PathBuf>,
    /// Size of the new store (64GiB, 512MiB, bytes) [default: as this one]
    #[arg(long, requires = "into")]
    size: Option<ByteSize>,
    /// The codec of the new store's pages: off, bf16 or auto [default: bf16 if pages of this store
    /// are encoded, else off]
    #[arg(long, value_name = "CODEC", requires = "into")]
    codec: Option<CodecChoice>,
    #[command(flatten)]
    into_key: IntoKeyArgs,
    /// Give the tenants of an encrypted store new keys, and encrypt their pages anew. No process
    /// may use the store
    #[arg(long, conflicts_with = "into")]
    rekey: bool,
    /// The one tenant that gets a new key [default: all]
    #[arg(long, requires = "rekey")]
    tenant: Option<String>,
    /// Print the plan and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// The key of the new store: by default that of this one.
#[derive(Args, Debug)]
#[group(id = "into_key", multiple = false)]
struct IntoKeyArgs {
    /// Key of the new store, which is encrypted: a file that its owner alone can use [default: as
    /// this store]
    #[arg(long, value_name = "FILE", requires = "into")]
    into_key_file: Option<PathBuf>,
    /// Command that prints the key of the new store, within 10 seconds; a shell runs it
    #[arg(long, value_name = "COMMAND", requires = "into")]
    into_key_command: Option<String>,
    /// Make the new store without encryption, also if this one is encrypted
    #[arg(long, requires = "into")]
    plaintext: bool,
}

impl IntoKeyArgs {
    /// The key of the new store, beside that of the present one.
    fn read(&self, present: Option<WrappingKey>) -> Result<Option<WrappingKey>, Failure> {
        let file = self.into_key_file.clone().map(KeySource::File);
        let command = self.into_key_command.clone().map(KeySource::Command);
        match file.or(command) {
            Some(source) => Ok(Some(source.read(&Vault::new())?)),
            None => Ok(present.filter(|_| !self.plaintext)),
        }
    }
}

/// The layout of a store's pages.
#[derive(Clone, Copy, Debug, Serialize)]
struct Layout {
    /// Live pages, and their bytes.
    pages: u64,
    live_bytes: u64,
    /// Segments with content, and the dead page data in them.
    used_segments: u64,
    dead_bytes: u64,
    /// Contiguous pieces of chains, and the mean number of pages in one.
    runs: u64,
    mean_run_pages: f64,
}

#[derive(Serialize)]
struct CompactReport {
    /// The first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// The first volume of the new store.
    #[serde(serialize_with = "crate::report::paths")]
    into: Option<PathBuf>,
    /// Whether nothing was written.
    dry_run: bool,
    /// Whether servers use the store, and its owner moved the pages.
    online: bool,
    /// Whether pages were encrypted with new keys, rather than put in order.
    rekeyed: bool,
    before: Layout,
    /// Absent when nothing was written.
    after: Option<Layout>,
    /// The result in place, or the plan for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    in_place: Option<Compacted>,
    /// The result in the new store.
    #[serde(skip_serializing_if = "Option::is_none")]
    copied: Option<Copied>,
    /// Whether the operator ended it early.
    interrupted: bool,
}

impl Layout {
    fn of(survey: &Survey) -> Layout {
        let chains = survey.chains();
        let pages = survey.live().len() as u64;
        let runs: u64 = chains.iter().map(|facts| facts.runs).sum();
        let is_used = |case: Option<Case>| !matches!(case, None | Some(Case::Blank | Case::Free));
        let used = || survey.segments.iter().filter(|facts| is_used(facts.case));
        Layout {
            pages,
            live_bytes: survey.live_bytes(),
            used_segments: used().count() as u64,
            dead_bytes: used()
                .map(|facts| facts.data_bytes.saturating_sub(facts.live_bytes))
                .sum(),
            runs,
            mean_run_pages: usage::ratio(pages, runs),
        }
    }

    fn line(&self) -> String {
        format!(
            "{}, {} in {}, {} dead, average contiguous piece {:.1} pages",
            count(self.pages, "page"),
            ByteSize(self.live_bytes),
            count(self.used_segments, "segment"),
            ByteSize(self.dead_bytes),
            self.mean_run_pages
        )
    }
}

/// The result in place, or the plan for it.
fn moved_lines(done: &Compacted, dry_run: bool, online: bool, lines: &mut Lines) {
    let planned = format!(
        "{} in several pieces; {} to move, those of half-empty segments included, {}",
        count(done.scattered, "chain"),
        count(done.planned_pages, "page"),
        ByteSize(done.planned_bytes)
    );
    if dry_run {
        lines.row("Would do", planned);
        return;
    }
    rows! { lines:
        "Found" => "{}", planned;
        "Done" => "{} moved, {} given back",
            count(done.moved_pages, "page"), count(done.freed_segments, "segment");
    }
    if done.left_pages > 0 {
        let left = count(done.left_pages, "page");
        let advice = match online {
            _ if done.interrupted => "interrupted",
            true => {
                "no free segment could be spared, or a volume refuses writes. Run it again \
                 when servers put less"
            }
            false => "no free segment. Let the store run until pages are evicted, or use --into",
        };
        lines.row("Left", format!("{left}, not moved: {advice}"));
    }
    if done.damaged_pages + done.unfinished_pages > 0 {
        rows! { lines:
            "Dropped" => "{}, {} half written at a crash",
                count(done.damaged_pages, "damaged page"), done.unfinished_pages;
        }
    }
}

/// The result of a renewal of keys, or the plan for it.
fn rekeyed_lines(done: &Compacted, dry_run: bool, lines: &mut Lines) {
    if dry_run {
        let pages = count(done.planned_pages, "page");
        let bytes = ByteSize(done.planned_bytes);
        lines.row("Would do", format!("{pages} to encrypt anew, {bytes}"));
        return;
    }
    lines.row(
        "Done",
        format!(
            "{} encrypted anew, {}",
            count(done.planned_pages - done.left_pages, "page"),
            ByteSize(done.planned_bytes)
        ),
    );
    match done.left_pages {
        0 if done.interrupted => {}
        0 => {
            lines.row("Former keys", "erased".to_owned());
        }
        left => {
            let left = count(left, "page");
            let advice = "Run it again when more segments are free";
            let text = format!("not erased: {left} still with them. {advice}");
            lines.row("Former keys", text);
        }
    }
    if done.damaged_pages + done.unfinished_pages > 0 {
        rows! { lines:
            "Dropped" => "{}, {} half written at a crash",
                count(done.damaged_pages, "damaged page"), done.unfinished_pages;
        }
    }
}

/// The result in the new store.
fn copied_lines(copied: &Copied, lines: &mut Lines) {
    let pages = count(copied.pages, "page");
    lines.row("Copied", format!("{pages}, {}", ByteSize(copied.bytes)));
    let reasons = [
        (
            copied.nameless_pages,
            "of namespaces whose records are lost",
        ),
        (copied.damaged_pages, "damaged"),
        (copied.unfinished_pages, "half written at a crash"),
        (
            copied.sealed_pages,
            "that no key opens: changed by another writer",
        ),
        (copied.refused_pages, "refused by the new store"),
        (
            copied.evicted_pages,
            "that the new store evicted for lack of room: choose a larger --size",
        ),
    ];
    for (number, why) in reasons.into_iter().filter(|(number, _)| *number > 0) {
        lines.row("Left out", format!("{} {why}", count(number, "page")));
    }
}

impl Report for CompactReport {
    const COMMAND: &'static str = "compact";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        lines.row("Before", self.before.line());
        if let Some(in_place) = &self.in_place {
            match self.rekeyed {
                true => rekeyed_lines(in_place, self.dry_run, &mut lines),
                false => moved_lines(in_place, self.dry_run, self.online, &mut lines),
            }
        }
        if let Some(copied) = &self.copied {
            copied_lines(copied, &mut lines);
        }
        if let Some(after) = &self.after {
            lines.row("After", after.line());
        }
        if self.interrupted {
            lines.text(match &self.into {
                None => "Interrupted: the store is sound, and the next run goes on from here",
                Some(_) => "Interrupted: the new store is sound, and holds a part of the pages",
            });
        }
        lines
    }
}

impl CompactReport {
    fn ending(&self) -> Ending {
        let in_place = self.in_place.as_ref();
        let copied = self.copied.as_ref();
        let left = in_place.map_or(0, |done| done.left_pages + done.damaged_pages);
        let left_out = copied.map_or(0, |copied| {
            copied.nameless_pages
                + copied.damaged_pages
                + copied.refused_pages
                + copied.evicted_pages
        });
        Ending::Done
            .or_findings(left + left_out > 0)
            .or_interrupted(self.interrupted)
    }
}

/// Runs the command.
///
/// # Errors
/// There is no store, another process has it open, or the new one cannot be created.
pub fn run(args: &CompactArgs) -> Result<Ending, Failure> {
    let interrupt = Interrupt::watch();
    if args.into.is_none() && !args.rekey && is_served(&args.store.path)? {
        let report = beside(args, &interrupt)?;
        report::print(&report, args.json)?;
        return Ok(report.ending());
    }
    if args.rekey && is_served(&args.store.path)? {
        return Err(Failure::environment(format!(
            "{}: in use: keys change while no process uses the store; stop its server first",
            args.store.path.display()
        )));
    }
    let survey = match look(&args.store, true)? {
        Ok(survey) => survey,
        Err(damage) => return Err(unsound(args, damage)),
    };
    let report = match &args.into {
        Some(new) => into(args, new, &survey, &interrupt)?,
        None => in_place(args, survey, &interrupt)?,
    };
    report::print(&report, args.json)?;
    Ok(report.ending())
}

/// Whether an owner serves the store to other processes.
///
/// # Errors
/// There is an owner, and it does not serve this process.
fn is_served(path: &Path) -> Result<bool, Failure> {
    match larder_engine::report(path) {
        Ok(_) => Ok(true),
        // The survey finds out the reason.
        Err(
            StoreError::NotServed { .. }
            | StoreError::ServesAnother { .. }
            | StoreError::Locked { .. },
        ) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Surveys a store, a closed one with `hold`. Returns its content, or the number of damaged things.
fn look(store: &StoreArgs, hold: bool) -> Result<Result<Box<Survey>, usize>, Failure> {
    let look = store.look(|options| SurveyOptions { hold, ..options })?;
    let (survey, found) = match look {
        Look::Wreck(damage, _) => return Ok(Err(damage.len())),
        Look::Store(survey) => {
            let found = Finding::all_of(&survey);
            (survey, found)
        }
    };
    let damage = match hold {
        true => found,
        false => store.lasting(found),
    };
    Ok(match damage.len() {
        0 => Ok(survey),
        damage => Err(damage),
    })
}

fn unsound(args: &CompactArgs, flaws: usize) -> Failure {
    let path = args.store.path.clone();
    StoreError::Unsound { path, flaws }.into()
}

/// Compacts a store that servers use.
fn beside(args: &CompactArgs, interrupt: &Interrupt) -> Result<CompactReport, Failure> {
    let survey = match look(&args.store, false)? {
        Ok(survey) => survey,
        Err(damage) => return Err(unsound(args, damage)),
    };
    let bar = bar("compacting");
    let mut progress = |done, total| interrupt.advance(&bar, done, total);
    let path = &args.store.path;
    let done = larder_offline::compact_beside(path, &survey, args.dry_run, &mut progress);
    bar.finish_and_clear();
    let done = done?;
    let after = match args.dry_run {
        true => None,
        false => look(&args.store, false)?.ok(),
    };
    Ok(CompactReport {
        path: path.clone(),
        into: None,
        dry_run: args.dry_run,
        online: true,
        rekeyed: false,
        before: Layout::of(&survey),
        after: after.map(|survey| Layout::of(&survey)),
        in_place: Some(done),
        copied: None,
        interrupted: done.interrupted,
    })
}

fn in_place(
    args: &CompactArgs,
    survey: Box<Survey>,
    interrupt: &Interrupt,
) -> Result<CompactReport, Failure> {
    let before = Layout::of(&survey);
    // The store is opened for writing, which the survey's lock forbids.
    drop(survey);
    let options = args.store.options()?;
    let (path, tenant) = (&args.store.path, args.tenant.as_deref());
    let bar = bar("compacting");
    let mut progress = |done, total| interrupt.advance(&bar, done, total);
    let done = match args.rekey {
        true => larder_offline::rekey(path, &options, tenant, args.dry_run, &mut progress),
        false => larder_offline::compact(path, &options, args.dry_run, &mut progress),
    };
    bar.finish_and_clear();
    let done = done?;
    let after = match look(&args.store, true)? {
        Ok(survey) if !args.dry_run => Some(Layout::of(&survey)),
        Ok(_) => None,
        Err(damage) => return Err(unsound(args, damage)),
    };
    Ok(CompactReport {
        path: args.store.path.clone(),
        into: None,
        dry_run: args.dry_run,
        online: false,
        rekeyed: args.rekey,
        before,
        after,
        in_place: Some(done),
        copied: None,
        interrupted: done.interrupted,
    })
}

fn into(
    args: &CompactArgs,
    new: &Path,
    survey: &Survey,
    interrupt: &Interrupt,
) -> Result<CompactReport, Failure> {
    let identity = |path: &Path| path.metadata().ok().map(|found| (found.dev(), found.ino()));
    if identity(new).is_some_and(|new| identity(&args.store.path) == Some(new)) {
        return Err(Failure::usage(format!(
            "{}: is the store itself; choose another path, or leave --into out to have it put in \
             order where it is",
            new.display()
        )));
    }
    let segments = survey.segments.len() as u64;
    let wrapping = args.into_key.read(args.store.key.read()?)?;
    let options = CreateOptions::new(
        args.size
            .map_or(OVERHEAD_BYTES + segments * survey.segment_bytes(), |size| {
                size.0
            }),
    )
    .with(|o| {
        o.segment_size = Some(survey.segment_bytes());
        o.wrapping = wrapping.clone();
        o.dry_run = true;
    });
    let planned = larder_engine::create(new, &options).map_err(taken)?;
    if planned.usable_bytes < survey.taken_bytes() {
        return Err(Failure::usage(format!(
            "{}: a store of {} has {} for pages, and they take {}: choose a larger --size",
            new.display(),
            ByteSize(options.size),
            ByteSize(planned.usable_bytes),
            ByteSize(survey.taken_bytes())
        )));
    }
    let mut report = CompactReport {
        path: args.store.path.clone(),
        into: Some(new.to_owned()),
        dry_run: args.dry_run,
        online: false,
        rekeyed: false,
        before: Layout::of(survey),
        after: None,
        in_place: None,
        copied: None,
        interrupted: false,
    };
    if args.dry_run {
        return Ok(report);
    }
    larder_engine::create(new, &options.with(|o| o.dry_run = false)).map_err(taken)?;
    let codec = args.codec.unwrap_or_else(|| codec_of(survey));
    let options = OpenOptions::default().with(|o| {
        o.codec = codec;
        o.wrapping = wrapping.clone();
    });
    let store = Store::open(new, options)?;
    let bar = bar("copying");
    let mut progress = |done, total| interrupt.advance(&bar, done, total);
    let copied = larder_offline::copy_into(survey, &store, &mut progress);
    bar.finish_and_clear();
    let closed = store.close();
    let copied = copied?;
    closed?;
    let sealed = wrapping.map_or(Sealed::Refused, Sealed::Unlocked);
    let options = SurveyOptions {
        hold: true,
        sealed,
        ..SurveyOptions::default()
    };
    if let Ok(survey) = Survey::new(new, &options)
        && survey.flaws.is_empty()
    {
        report.after = Some(Layout::of(&survey));
    }
    report.interrupted = copied.interrupted;
    report.copied = Some(copied);
    Ok(report)
}

/// The codec with which the pages of a store take no more room than now.
fn codec_of(survey: &Survey) -> CodecChoice {
    match survey.live().any(|page| page.saved > 0) {
        true => CodecChoice::Bf16,
        false => CodecChoice::Off,
    }
}

/// The obstacle to a new store, in words for a user who cannot have it overwritten here.
fn taken(error: StoreError) -> Failure {
    let (path, what) = match error {
        StoreError::Exists(path) => (path, "already holds a Larder store"),
        StoreError::Foreign(path) => (path, "holds data that is not a Larder store"),
        error => return Failure::sized(error, "--size"),
    };
    let advice = "choose another path, or remove it, as when a compaction was interrupted";
    Failure::environment(format!("{}: {what}; {advice}", path.display()))
}

fn bar(doing: &'static str) -> ProgressBar {
    let bar = report::progress(
        None,
        "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
    );
    bar.set_message(doing);
    bar
}

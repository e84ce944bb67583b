//! `larder inspect`: shows the content of a store without opening it, in any state.
//!
//! It needs no lock and writes nothing. So it works beside a server that has the store open (then
//! it shows the state of one moment), on a store left by a crash, and on a damaged one. The output
//! states which of these it is. Pages are shown as the next open would find them. No page is read:
//! `verify --deep` checks their bytes.

mod rows;

use std::fmt;
use std::path::{Path, PathBuf};

use clap::Args;
use larder_engine::HolderState;
use larder_engine::format::{FORMAT_VERSION, Features, KeyPrefix, PageKey};
use larder_offline::survey::{Condition, Encryption, Survey, SurveyOptions};
use larder_store::share;
use larder_store::volume::socket::socket_path;
use serde::Serialize;

use crate::failure::{Ending, Failure};
use crate::findings::{self, Finding, Look, StoreArgs, is_locked};
use crate::key;
use crate::losses::LossReport;
use crate::owner::{damaged_line, damaged_pages_line};
use crate::report::{self, Lines, Report, count, rows};
use crate::size::{ByteSize, date};
use crate::usage;
use rows::{ChainRow, KeyRow, NamespaceRow, RemovalRow, SegmentCounts, SegmentRow, VolumeRow};

/// Hex digits of a key prefix, as descriptors keep it of parents.
const PREFIX_DIGITS: usize = 24;

/// Namespaces that the summary names.
const NAMESPACES_SHOWN: usize = 8;

/// Show the content of a store, also when it is in use, damaged or was not closed
///
/// An encrypted store is shown without its key, too: all but the namespaces and the pages. Exit
/// codes: 0 shown, 1 shown and damage found, 2 usage, 3 there is no store.
#[derive(Args, Debug)]
pub struct InspectArgs {
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    view: View,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// The views besides the summary.
#[derive(Args, Debug)]
#[group(multiple = false)]
struct View {
    /// List the segments
    #[arg(long)]
    segments: bool,
    /// List the namespaces
    #[arg(long)]
    namespaces: bool,
    /// Show how the pages of chains lie
    #[arg(long)]
    chains: bool,
    /// Show every record of a page: its key, or the first 24 digits of it
    #[arg(long, value_name = "HEX", value_parser = wanted)]
    key: Option<Wanted>,
}

impl View {
    /// Whether it shows namespaces or pages.
    fn shows_pages(&self) -> bool {
        self.namespaces || self.chains || self.key.is_some()
    }
}

/// A key to look for, or its beginning.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    prefix: KeyPrefix,
    whole: Option<PageKey>,
}

fn wanted(text: &str) -> Result<Wanted, String> {
    let text = text.trim().to_ascii_lowercase();
    if text.len() == PREFIX_DIGITS {
        let prefix = text.parse().map_err(|error| format!("{error}"))?;
        return Ok(Wanted {
            prefix,
            whole: None,
        });
    }
    let key: PageKey = text.parse().map_err(|error| {
        format!("{error}; a key has 64 hex digits, its beginning {PREFIX_DIGITS}")
    })?;
    Ok(Wanted {
        prefix: key.prefix(),
        whole: Some(key),
    })
}

#[derive(Serialize)]
struct InspectReport {
    /// The first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// Whether anything is damaged.
    damaged: bool,
    /// Absent if the store cannot be identified.
    #[serde(flatten)]
    store: Option<Summary>,
    /// All damage that the structures show.
    damage: Vec<Finding>,
    /// The damage that the owner has found since it opened the store, and may have removed.
    owner_damage: Vec<String>,
    /// The reason why there is nothing to show.
    #[serde(skip_serializing_if = "Option::is_none")]
    wreck: Option<String>,
}

/// The store as a whole.
#[derive(Serialize)]
struct Summary {
    /// The store's identity.
    store_id: String,
    /// When it was created, in seconds since 1970.
    created_unix_s: u64,
    /// Its on-disk format: version, features, and the release that opened it last for writing.
    format: FormatRow,
    /// `clean`, `not_closed` or `in_use`.
    condition: &'static str,
    /// The number of times it was opened.
    run: u32,
    /// The process that opened it last.
    holder: HolderRow,
    /// Bytes of a segment, of all volumes together, and the most bytes of pages kept.
    segment_bytes: u64,
    capacity_bytes: u64,
    usable_bytes: u64,
    volumes: Vec<VolumeRow>,
    /// Segments in all, and by state.
    segments: u64,
    segment_states: SegmentCounts,
    /// Whether it is encrypted, and was read with its key: `none`, `locked` or `unlocked`.
    encryption: &'static str,
    /// What is not known without the key of an encrypted store.
    not_checked: &'static [&'static str],
    /// Live pages: without the key those of the last clean close, if it still counts. Their bytes,
    /// and the number of pages that no sync covers.
    pages: Option<u64>,
    live_bytes: Option<u64>,
    unproven_pages: Option<u64>,
    /// Page records, live or not, and bytes of page data in use by them.
    records: Option<u64>,
    data_bytes: u64,
    /// Descriptor blocks and header copies that a crash cut short.
    unfinished_blocks: u64,
    namespaces: Option<Vec<NamespaceRow>>,
    /// The cost of damage. Absent if no record is lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    losses: Option<LossReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    segment_list: Option<Vec<SegmentRow>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    chains: Option<Vec<ChainRow>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<KeyView>,
    /// The selected views.
    #[serde(skip)]
    lists_namespaces: bool,
    /// The holder, for people.
    #[serde(skip)]
    holder_text: String,
}

/// The on-disk format of a store.
#[derive(Serialize)]
struct FormatRow {
    version: u32,
    compatible: u64,
    read_only_compatible: u64,
    /// Names of the features, separated by spaces.
    features: String,
    /// Empty before release 0.1.0.
    release: String,
}

impl FormatRow {
    fn of(features: &Features) -> FormatRow {
        FormatRow {
            version: FORMAT_VERSION,
            compatible: features.compatible,
            read_only_compatible: features.read_only_compatible,
            features: features.names.to_string(),
            release: features.release.to_string(),
        }
    }
}

impl fmt::Display for FormatRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "version {}", self.version)?;
        if self.compatible != 0 || self.read_only_compatible != 0 || !self.features.is_empty() {
            write!(
                f,
                ", features \"{}\" ({:#x}, {:#x})",
                self.features, self.compatible, self.read_only_compatible
            )?;
        }
        match self.release.as_str() {
            "" => Ok(()),
            release => write!(f, ", written by release {release}"),
        }
    }
}

#[derive(Serialize)]
struct HolderRow {
    /// In its own pid namespace.
    pid: u32,
    /// `None` where this process cannot see that pid namespace.
    alive: Option<bool>,
    /// Its name, while it exists.
    command: Option<String>,
}

/// All facts about one key.
#[derive(Serialize)]
struct KeyView {
    /// Puts and copies, by namespace, the oldest first.
    records: Vec<KeyRow>,
    /// Deletions, evictions and clears, the oldest first.
    removals: Vec<RemovalRow>,
}

impl Report for InspectReport {
    const COMMAND: &'static str = "inspect";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        if let Some(store) = &self.store {
            store.lines(&self.damage, &self.owner_damage, &mut lines);
        }
        findings::list(&self.damage, &mut lines);
        if let Some(wreck) = &self.wreck {
            lines.text(wreck.as_str());
        }
        lines
    }
}

impl Summary {
    fn new(survey: &Survey, view: &View) -> Summary {
        let holder = &survey.holder;
        let counts = survey.counts();
        Summary {
            store_id: survey.store().to_string(),
            created_unix_s: survey.created_unix_s(),
            format: FormatRow::of(&survey.features()),
            condition: findings::condition(survey),
            run: survey.run.get(),
            holder: HolderRow {
                pid: holder.process.pid,
                alive: match holder.process.state {
                    HolderState::Running => Some(true),
                    HolderState::Exited => Some(false),
                    HolderState::OutOfSight => None,
                },
                command: holder.command.clone(),
            },
            segment_bytes: survey.segment_bytes(),
            capacity_bytes: survey.volumes.iter().filter_map(|facts| facts.bytes).sum(),
            usable_bytes: survey.usable_bytes(),
            volumes: survey.volumes.iter().map(VolumeRow::of).collect(),
            segments: survey.segments.len() as u64 + survey.unreachable,
            segment_states: SegmentCounts::of(survey),
            encryption: findings::encryption(survey),
            not_checked: findings::not_checked(survey),
            pages: match survey.encryption {
                Encryption::Locked { pages } => pages,
                Encryption::None | Encryption::Unlocked => counts.map(|counts| counts.pages),
            },
            live_bytes: counts.map(|counts| counts.live_bytes),
            unproven_pages: counts.map(|counts| counts.unproven),
            records: counts.map(|counts| counts.records),
            data_bytes: survey.segments.iter().map(|facts| facts.data_bytes).sum(),
            unfinished_blocks: survey.unfinished_blocks,
            namespaces: counts.map(|_| NamespaceRow::all_of(survey)),
            losses: LossReport::of(survey, &[]),
            segment_list: view.segments.then(|| SegmentRow::all_of(survey)),
            chains: view.chains.then(|| ChainRow::all_of(survey)),
            key: view.key.map(|key| KeyView::of(survey, key)),
            lists_namespaces: view.namespaces,
            holder_text: holder.process.to_string(),
        }
    }

    fn lines(&self, damage: &[Finding], owner_damage: &[String], lines: &mut Lines) {
        rows! { lines:
            "Store" => "{}, created {}", self.store_id, date(self.created_unix_s);
            "Format" => "{}", self.format;
            "State" => "{}", self.state();
        }
        let damaged = match damage.len() as u64 {
            0 => "none in the structures now. `larder verify --deep` reads every page; the logs \
                of the owners have the damage that they removed"
                .to_owned(),
            found => format!("DAMAGED: {}, listed below", count(found, "finding")),
        };
        lines.row("Damage", damaged);
        for found in owner_damage {
            lines.row("  of this run", found.as_str());
        }
        for (index, volume) in self.volumes.iter().enumerate() {
            lines.row(format!("Volume {index}"), volume.line());
        }
        let segments = self.segment_states.line(self.segments);
        rows! { lines:
            "Segments" => "{}, {segments}", ByteSize(self.segment_bytes);
        }
        self.page_lines(lines);
        if let Some(losses) = &self.losses {
            losses.lines(lines);
        }
        self.view_lines(lines);
    }

    fn page_lines(&self, lines: &mut Lines) {
        if let (Some(pages), Some(live_bytes), Some(records)) =
            (self.pages, self.live_bytes, self.records)
        {
            let share = usage::ratio(live_bytes, self.usable_bytes) * 100.0;
            rows! { lines:
                "Pages" => "{pages}, {} of {} usable ({share:.0} %)",
                    ByteSize(live_bytes), ByteSize(self.usable_bytes);
                "Page data" => "{} in segments, {}",
                    ByteSize(self.data_bytes), count(records, "record");
            }
        } else {
            let pages = match self.pages {
                Some(pages) => format!("{pages} at the last clean close"),
                None => "not known without the key".to_owned(),
            };
            rows! { lines:
                "Pages" => "{pages}; {} usable", ByteSize(self.usable_bytes);
                "Page data" => "{} in segments", ByteSize(self.data_bytes);
            }
        }
        if self.encryption != findings::NOT_ENCRYPTED {
            lines.row("Encrypted", findings::encryption_line(self.not_checked));
        }
        if self.unproven_pages.unwrap_or(0) + self.unfinished_blocks > 0 {
            let blocks = count(self.unfinished_blocks, "unfinished block");
            let pages = match self.unproven_pages {
                Some(pages) => count(pages, "page") + " (checked when read), ",
                None => String::new(),
            };
            rows! { lines:
                "Not confirmed as written" => "{pages}{blocks}";
            }
        }
    }

    fn view_lines(&self, lines: &mut Lines) {
        if let Some(segments) = &self.segment_list {
            lines.text("");
            let rows: Vec<_> = segments.iter().map(SegmentRow::cells).collect();
            lines.table(&SegmentRow::HEADINGS, &rows);
        } else if let Some(chains) = &self.chains {
            lines.text("");
            let rows: Vec<_> = chains.iter().map(ChainRow::cells).collect();
            lines.table(&ChainRow::HEADINGS, &rows);
        } else if let Some(key) = &self.key {
            key.lines(lines);
        } else {
            let shown = if self.lists_namespaces {
                usize::MAX
            } else {
                NAMESPACES_SHOWN
            };
            self.namespace_lines(shown, lines);
        }
    }

    fn namespace_lines(&self, shown: usize, lines: &mut Lines) {
        let Some(namespaces) = &self.namespaces else {
            return;
        };
        lines.row("Namespaces", namespaces.len().to_string());
        for namespace in namespaces.iter().take(shown) {
            lines.text(namespace.line());
        }
        let hidden = namespaces.len().saturating_sub(shown);
        if hidden > 0 {
            lines.text(format!("  and {hidden} more (--namespaces lists them all)"));
        }
    }

    /// Whether it is closed, and the consequence.
    fn state(&self) -> String {
        let HolderRow { pid, alive, .. } = self.holder;
        let run = self.run;
        let look = "a snapshot";
        match (self.condition, &self.holder.command) {
            (findings::CLEAN, _) => format!("closed cleanly, run {run}"),
            (findings::IN_USE, Some(command)) => {
                format!("IN USE by process {pid} ({command}), run {run}: {look}")
            }
            (findings::IN_USE, None) => {
                format!("IN USE by {}, run {run}: {look}", self.holder_text)
            }
            _ => {
                let whose = match alive {
                    None => " of another pid namespace or boot",
                    Some(_) => "",
                };
                format!(
                    "NOT CLOSED: process {pid}{whose} left it in run {run} (a crash, a kill, a \
                     power \
                     loss); the next open recovers it"
                )
            }
        }
    }
}

impl KeyView {
    fn of(survey: &Survey, wanted: Wanted) -> KeyView {
        let is_wanted = |key: PageKey| wanted.whole.is_none_or(|whole| whole == key);
        let pages: Vec<_> = survey
            .records_of(wanted.prefix)
            .filter(|page| is_wanted(page.key))
            .collect();
        // A clear concerns the key only if the namespace had such a page.
        let concerns = |fingerprint| {
            pages
                .iter()
                .any(|page| survey.namespaces[page.namespace].fingerprint == fingerprint)
        };
        let removals = survey.removals.iter();
        KeyView {
            removals: removals
                .filter(|removal| !RemovalRow::is_clear(removal) || concerns(removal.namespace))
                .map(RemovalRow::of)
                .collect(),
            records: pages.iter().map(|page| KeyRow::of(survey, page)).collect(),
        }
    }

    fn lines(&self, lines: &mut Lines) {
        lines.text("");
        if self.records.is_empty() && self.removals.is_empty() {
            lines.text("No record of this key in any segment.");
        }
        for record in &self.records {
            record.lines(lines);
        }
        for removal in &self.removals {
            lines.text(removal.line());
        }
    }
}

/// The damage that the owner of a store has found since it opened the store.
fn owner_damage(survey: &Survey, path: &Path) -> Vec<String> {
    let asked = survey.condition == Condition::InUse && socket_path(path).exists();
    let Some(report) = asked.then(|| share::report(path)).and_then(Result::ok) else {
        return Vec::new();
    };
    let volumes = report.damaged_volumes.iter().map(damaged_line);
    volumes.chain(damaged_pages_line(&report.stats)).collect()
}

/// Runs the command.
///
/// # Errors
/// There is no store.
pub fn run(args: &InspectArgs) -> Result<Ending, Failure> {
    let look = args.store.look(|options| SurveyOptions {
        key: args.view.key.map(|wanted| wanted.prefix),
        sealed: options.sealed.or_locked(),
        ..options
    })?;
    if let Look::Store(survey) = &look
        && is_locked(survey)
        && args.view.shows_pages()
    {
        return Err(Failure::environment(format!(
            "{}: the store is encrypted: --namespaces, --chains and --key need its key; name it \
             with {}",
            args.store.path.display(),
            key::OPTIONS
        )));
    }
    let path = args.store.path.clone();
    let report = match look {
        Look::Wreck(damage, message) => InspectReport {
            path,
            damaged: true,
            store: None,
            damage,
            owner_damage: Vec::new(),
            wreck: Some(message),
        },
        Look::Store(survey) => {
            let damage = Finding::all_of(&survey);
            InspectReport {
                path,
                damaged: !damage.is_empty(),
                store: Some(Summary::new(&survey, &args.view)),
                damage,
                owner_damage: owner_damage(&survey, &args.store.path),
                wreck: None,
            }
        }
    };
    report::print(&report, args.json)?;
    Ok(if report.damaged {
        Ending::Findings
    } else {
        Ending::Done
    })
}

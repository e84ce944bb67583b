//! `larder pin` and `larder unpin`: pages that stay until a time.
//!
//! They are clients if the store has an owner. A change is durable when the command has ended.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use larder_engine::format::{Namespace, PageKey, TokenUnits, page_keys};
use larder_engine::{PageStore, Store};
use larder_store::inventory::{Inventory, Kept, KeptPage, Space, spaces};
use serde::Serialize;

use crate::failure::{Ending, Failure};
use crate::open::{self, OpenArgs};
use crate::place;
use crate::report::{self, Lines, Report, count};
use crate::selection::Selection;
use crate::size::{self, ByteSize, date};

/// Keep pages of a store until a time, or list the pages that are kept, also while servers use it
///
/// Without pages it lists them. A pin replaces the former one of its page. Pins survive a restart
/// and a crash. They end with their page: a deletion, an age limit and damage come first. Pinned
/// pages and the minima of quotas take at most half of the store.
///
/// Exit codes: 0 done, 1 some pages were refused or are not stored, 2 usage, 3 environment.
#[derive(Args, Debug)]
pub struct PinArgs {
    #[command(flatten)]
    pages: PageArgs,
    /// How long the pages stay: a duration from now (12h, 30d), or a moment as `@` and seconds
    /// since 1970
    #[arg(long, value_name = "TIME", value_parser = moment, requires = "PagesOfPins")]
    until: Option<u32>,
    #[command(flatten)]
    common: CommonArgs,
}

/// Let eviction take pages of a store again that were pinned
///
/// Exit codes: 0 done, 1 some pages are not pinned, 2 usage, 3 environment.
#[derive(Args, Debug)]
pub struct UnpinArgs {
    #[command(flatten)]
    pages: PageArgs,
    #[command(flatten)]
    common: CommonArgs,
}

#[derive(Args, Debug)]
struct CommonArgs {
    /// The store: its first volume, or a backend's directory
    #[arg(value_parser = place::parser())]
    path: PathBuf,
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    open: OpenArgs,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// The pages of a command.
#[derive(Args, Debug)]
#[group(id = "PagesOfPins", multiple = false)]
struct PageArgs {
    /// A file with the tokens of a prompt: whole numbers, apart from each other by spaces or commas
    /// (a JSON array too). All its whole pages, under the keys of SGLang and of `PrefixCache`
    /// without salt and extra key
    #[arg(long, value_name = "FILE")]
    tokens: Option<PathBuf>,
    /// A page, by its key in 64 hexadecimal digits; several with commas
    #[arg(long, value_name = "KEY", value_delimiter = ',')]
    key: Vec<PageKey>,
}

/// The pages that a command names.
enum Named {
    Tokens(Vec<u64>),
    Keys(Vec<PageKey>),
}

#[derive(Serialize)]
struct PinReport {
    /// The store: its first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// Pages that are pinned now, or that are not pinned any more.
    changed_pages: u64,
    /// Pages that are not stored, or that were not pinned.
    absent_pages: u64,
    /// Pages for which pins and minima leave no room.
    refused_pages: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pins: Option<Vec<PinRow>>,
}

/// The report of `larder unpin`.
#[derive(Serialize)]
#[serde(transparent)]
struct UnpinReport(PinReport);

/// A pinned page.
#[derive(Serialize)]
struct PinRow {
    namespace: String,
    model: Option<String>,
    /// The first 96 bits of its key.
    key: String,
    until_unix_s: u32,
    bytes: u64,
}

impl Report for PinReport {
    const COMMAND: &'static str = "pin";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        if let Some(pins) = &self.pins {
            for pin in pins {
                let until = date(pin.until_unix_s.into());
                let (size, of) = (ByteSize(pin.bytes), pin.model.as_deref().unwrap_or("?"));
                let (space, key) = (&pin.namespace, &pin.key);
                lines.text(format!("{space}  {of}: {key}, {size}, until {until}"));
            }
            let bytes = pins.iter().map(|pin| pin.bytes).sum();
            let pages = count(pins.len() as u64, "page");
            lines.row("Pinned", format!("{pages}, {}", ByteSize(bytes)));
            return lines;
        }
        lines.row("Pinned", count(self.changed_pages, "page"));
        if self.absent_pages > 0 {
            lines.row("Not stored", count(self.absent_pages, "page"));
        }
        if self.refused_pages > 0 {
            let refused = count(self.refused_pages, "page");
            lines.row("Refused", refused);
            lines.text("Pinned pages and the minima of quotas take at most half of the store.");
        }
        lines
    }
}

impl Report for UnpinReport {
    const COMMAND: &'static str = "unpin";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        lines.row("Unpinned", count(self.0.changed_pages, "page"));
        if self.0.absent_pages > 0 {
            lines.row("Not pinned", count(self.0.absent_pages, "page"));
        }
        lines
    }
}

/// Reads the end of a pin.
fn moment(text: &str) -> Result<u32, String> {
    let late = |_| format!("`{text}` is later than a pin can end, in the year 2106");
    if let Some(seconds) = text.trim().strip_prefix('@') {
        let seconds: u64 = seconds
            .parse()
            .map_err(|_| format!("`{text}` is no moment: write `@` and seconds since 1970"))?;
        return u32::try_from(seconds).map_err(late);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let then = now.unwrap_or_default() + size::duration(text)?.max(Duration::from_secs(1));
    u32::try_from(then.as_secs()).map_err(late)
}

impl PageArgs {
    fn named(&self) -> Result<Option<Named>, Failure> {
        if let Some(path) = &self.tokens {
            return Ok(Some(Named::Tokens(tokens_in(path)?)));
        }
        Ok((!self.key.is_empty()).then(|| Named::Keys(self.key.clone())))
    }
}

fn tokens_in(path: &Path) -> Result<Vec<u64>, Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
    let words = text.split(|c: char| c.is_whitespace() || ",[]".contains(c));
    let tokens = words.filter(|word| !word.is_empty()).map(str::parse);
    let tokens: Result<Vec<u64>, _> = tokens.collect();
    let tokens = tokens.map_err(|_| {
        let path = path.display();
        Failure::usage(format!(
            "{path}: tokens are whole numbers, apart from each other by spaces"
        ))
    })?;
    if tokens.is_empty() {
        return Err(Failure::usage(format!(
            "{}: there is no token",
            path.display()
        )));
    }
    Ok(tokens)
}

impl Named {
    /// The keys of these pages in a namespace.
    fn keys(&self, namespace: &Namespace) -> Vec<PageKey> {
        match self {
            Named::Keys(keys) => keys.clone(),
            Named::Tokens(tokens) => {
                let page_tokens = NonZeroUsize::new(namespace.fields().page_tokens as usize);
                page_tokens.map_or_else(Vec::new, |page_tokens| {
                    page_keys(tokens, page_tokens, None, TokenUnits::Single)
                })
            }
        }
    }
}

impl CommonArgs {
    fn run<R: Report + Serialize>(
        &self,
        work: impl FnOnce(&Store) -> Result<PinReport, Failure>,
        wrap: impl FnOnce(PinReport) -> R,
    ) -> Result<Ending, Failure> {
        let report = open::with_any(&self.path, self.open.options()?, work)?;
        let is_partial = report.absent_pages + report.refused_pages > 0;
        report::print(&wrap(report), self.json)?;
        Ok(Ending::Done.or_findings(is_partial))
    }

    fn report(&self) -> PinReport {
        PinReport {
            path: self.path.clone(),
            changed_pages: 0,
            absent_pages: 0,
            refused_pages: 0,
            pins: None,
        }
    }

    /// Pins the pages in each chosen namespace that has one of them.
    fn keep(&self, store: &Store, named: &Named, until_unix_s: u32) -> Result<PinReport, Failure> {
        let mut report = self.report();
        let spaces = spaces(store)?;
        let records = || spaces.iter().filter_map(|space| space.namespace.as_ref());
        let chosen = |record: &&Namespace| {
            let fingerprint = record.fingerprint();
            self.selection.takes(&fingerprint, Some(record))
        };
        if !records().any(|record| chosen(&record)) && !self.selection.is_open() {
            return Err(self.selection.unmatched(records()));
        }
        let mut absent = None;
        for record in records().filter(chosen) {
            let keys = named.keys(record);
            let id = store.namespace(record)?;
            let kept = store.keep(id, &keys, until_unix_s)?;
            let of = |wanted| kept.iter().filter(|kept| **kept == wanted).count() as u64;
            let missing = of(Kept::Absent);
            report.changed_pages += of(Kept::Yes);
            report.refused_pages += of(Kept::Refused);
            if missing < kept.len() as u64 {
                report.absent_pages += missing;
            } else {
                absent = absent.max(Some(missing));
            }
        }
        store.flush()?;
        // Namespaces with none of the pages do not count, unless all are such.
        if report.changed_pages + report.refused_pages == 0 {
            report.absent_pages = absent.unwrap_or(0);
        }
        Ok(report)
    }

    fn list(&self, store: &Store) -> Result<PinReport, Failure> {
        let spaces = spaces(store)?;
        let mut rows = Vec::new();
        loop {
            let from = u32::try_from(rows.len()).unwrap_or(u32::MAX);
            let pages = store.kept(from)?;
            if pages.is_empty() {
                break;
            }
            rows.extend(pages);
        }
        let of = |page: &KeptPage| {
            let is_its = |space: &&Space| space.usage.namespace == page.namespace;
            spaces.iter().find(is_its)?.namespace.as_ref()
        };
        let chosen = |page: &KeptPage| self.selection.takes(&page.namespace, of(page));
        let row = |page: KeptPage| PinRow {
            namespace: page.namespace.to_string(),
            model: of(&page).map(|record| record.fields().model.clone()),
            key: page.key.to_string(),
            until_unix_s: page.until_unix_s,
            bytes: page.bytes,
        };
        let pins = rows.into_iter().filter(chosen).map(row).collect();
        Ok(PinReport {
            pins: Some(pins),
            ..self.report()
        })
    }
}

/// Runs `larder pin`.
pub fn pin(args: &PinArgs) -> Result<Ending, Failure> {
    match (args.pages.named()?, args.until) {
        (Some(_), None) => Err(Failure::usage("give --until: how long the pages stay")),
        (Some(named), Some(until)) => {
            let keep = |store: &Store| args.common.keep(store, &named, until);
            args.common.run(keep, |report| report)
        }
        (None, _) => args
            .common
            .run(|store| args.common.list(store), |report| report),
    }
}

/// Runs `larder unpin`.
pub fn unpin(args: &UnpinArgs) -> Result<Ending, Failure> {
    let Some(named) = args.pages.named()? else {
        return Err(Failure::usage("give the pages: --tokens FILE or --key KEY"));
    };
    let keep = |store: &Store| args.common.keep(store, &named, 0);
    args.common.run(keep, UnpinReport)
}

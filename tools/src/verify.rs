//! `larder verify`: checks a closed store, and lists its damage. With `--repair` it repairs it
//! ([`repair`]).
//!
//! Without `--deep` it checks structures: all copies of every superblock and header, every
//! descriptor block, and that no two pages claim one place. With `--deep` it also checks the bytes
//! of every live page. The store is locked against writers meanwhile, except with `--online`
//! ([`online`]).
//!
//! One bad copy of two loses nothing yet. It is a finding all the same: the next fault in the other
//! copy would lose data. Writes that a crash cut short are counted and are no findings, because
//! they were never promised.

mod online;

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use larder_offline::Repair;
use larder_offline::survey::{BadPage, Payloads, Survey};
use serde::Serialize;

use crate::failure::{Ending, Failure};
use crate::findings::{self, Finding, Look, StoreArgs};
use crate::interrupt::Interrupt;
use crate::key;
use crate::losses::LossReport;
use crate::repair::{self, GivenUp, How, RepairReport};
use crate::report::{self, Lines, Report, count, rows};
use crate::size::{self, ByteSize};
use crate::usage;

/// Check a store, and list the damage
///
/// The store must not be in use, except with --online. Exit codes: 0 sound (writes that a crash cut
/// short are counted, not damage), or repaired, 1 damage found, or left by a repair, 2 usage, 3 the
/// store is in use, or there is none.
#[derive(Args, Debug)]
pub struct VerifyArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Also read every page and check its bytes
    #[arg(long)]
    deep: bool,
    /// Check as with --deep, then mend what can be mended: drop damaged pages, write bad copies of
    /// superblocks and headers anew from the good ones, move good pages out of segments with
    /// damaged descriptors. Nothing good is lost
    #[arg(long)]
    repair: bool,
    /// Check as with --deep while servers use the store: without its lock, at --rate. The owner
    /// drops the damaged pages
    #[arg(long, conflicts_with = "repair")]
    online: bool,
    /// Most bytes a second that --online reads
    #[arg(
        long,
        value_name = "SIZE",
        requires = "online",
        value_parser = size::positive,
        default_value = "200MiB"
    )]
    rate: ByteSize,
    /// Print the plan of --repair and change nothing
    #[arg(long, requires = "repair")]
    dry_run: bool,
    /// Give up volumes that are missing or beyond repair, for good: their pages are lost
    #[arg(long, requires = "repair")]
    degraded: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct VerifyReport {
    /// The first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// Whether anything is damaged: after a repair, whether damage is left.
    damaged: bool,
    /// Absent if the store cannot be identified.
    #[serde(flatten)]
    checked: Option<Checked>,
    /// Everything that was found damaged.
    damage: Vec<Finding>,
    /// The repair, or its plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    repair: Option<RepairReport>,
    /// Whether the operator ended it before a requested repair.
    not_repaired: bool,
    /// The reason why nothing could be checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    wreck: Option<String>,
    /// Whether pages were to be checked, and none was, for lack of the key.
    #[serde(skip)]
    lacks_key: bool,
}

/// The checked objects.
#[derive(Serialize)]
struct Checked {
    /// The store's identity.
    store_id: String,
    /// `clean`, `in_use`, or `not_closed`: the next open recovers it.
    condition: &'static str,
    /// Segments, and how many of them could be read.
    segments: u64,
    segments_read: u64,
    /// Descriptor blocks, and page records in them, live or not.
    descriptor_blocks: u64,
    records: Option<u64>,
    /// Whether it is encrypted, and was read with its key: `none`, `locked` or `unlocked`.
    encryption: &'static str,
    /// What was not checked, for lack of the key of an encrypted store.
    not_checked: &'static [&'static str],
    /// Live pages, and their bytes.
    pages: Option<u64>,
    live_bytes: Option<u64>,
    /// Live pages whose bytes no sync covers.
    unproven_pages: Option<u64>,
    /// Descriptor blocks and header copies that a crash cut short.
    unfinished_blocks: u64,
    /// Page records of writes that a crash cut short, if an older record of the key is whole.
    unfinished_records: Option<u64>,
    /// The bytes of the pages, with `--deep`.
    deep: Option<Deep>,
    /// The cost of damage. Absent if none is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    losses: Option<LossReport>,
}

/// The outcome for the pages' bytes.
#[derive(Serialize)]
struct Deep {
    /// Pages checked, and their bytes.
    pages_checked: u64,
    bytes_checked: u64,
    /// Pages with the right bytes.
    good_pages: u64,
    /// Pages that are lost.
    damaged_pages: u64,
    /// Unproven pages that a crash cut short.
    unfinished_pages: u64,
    /// Good pages of an encrypted store that no key opens: another writer changed their records.
    unopened_pages: u64,
    /// With `--online`: pages that the owner moved or dropped before they were read, and damaged
    /// pages that it dropped now.
    departed_pages: u64,
    dropped_pages: u64,
    /// Duration, and speed.
    seconds: f64,
    bytes_per_second: f64,
    /// CPU time of the process during that time.
    cpu_seconds: f64,
    /// Whether the operator ended it before the last page.
    interrupted: bool,
}

impl Report for VerifyReport {
    const COMMAND: &'static str = "verify";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        if let Some(checked) = &self.checked {
            checked.lines(&mut lines);
        }
        let result = match (&self.checked, !self.damage.is_empty()) {
            (_, true) if self.is_interrupted() && self.repair.is_none() => {
                count(self.damage.len() as u64, "thing")
                    + " damaged, found until it was interrupted"
            }
            (_, true) => count(self.damage.len() as u64, "thing") + " damaged",
            (Some(checked), false) if !checked.not_checked.is_empty() => {
                "what can be checked without the key is sound".to_owned()
            }
            (Some(checked), false) if checked.deep.is_none() => {
                "structures are sound (--deep reads the pages too)".to_owned()
            }
            _ if self.has_unopened() => {
                "no damage, but pages that the keys of their tenants do not open".to_owned()
            }
            _ if self.is_interrupted() => "no damage found until it was interrupted".to_owned(),
            _ => "sound".to_owned(),
        };
        lines.row("Result", result);
        findings::list(&self.damage, &mut lines);
        if let Some(wreck) = &self.wreck {
            lines.text(wreck.as_str());
        }
        if let Some(repair) = &self.repair {
            repair.lines(&mut lines);
        }
        if self.not_repaired {
            lines.text("Interrupted before anything was repaired: run it again.");
        }
        if self.lacks_key {
            lines.text(format!(
                "NO PAGE WAS CHECKED: that takes the key of the store ({})",
                key::OPTIONS
            ));
        }
        lines
    }
}

impl VerifyReport {
    fn is_interrupted(&self) -> bool {
        let deep = self
            .checked
            .as_ref()
            .and_then(|checked| checked.deep.as_ref());
        let repair = self.repair.as_ref();
        deep.is_some_and(|deep| deep.interrupted)
            || repair.is_some_and(|repair| repair.done.interrupted)
    }

    /// Whether a writer without the key has changed something.
    fn has_unopened(&self) -> bool {
        let checked = self.checked.as_ref();
        let deep = checked.and_then(|checked| checked.deep.as_ref());
        deep.is_some_and(|deep| deep.unopened_pages > 0)
    }

    fn ending(&self) -> Ending {
        let is_half_repaired =
            self.is_interrupted() && (self.repair.is_some() || self.not_repaired);
        Ending::Done
            .or_interrupted(self.is_interrupted())
            .or_findings(self.damaged || self.has_unopened())
            .or_interrupted(is_half_repaired)
    }
}

impl Checked {
    fn lines(&self, lines: &mut Lines) {
        lines.row("Store", self.store_id.as_str());
        let state = match self.condition {
            findings::CLEAN => "closed cleanly",
            findings::IN_USE => "IN USE",
            _ => "NOT CLOSED: the next open recovers it",
        };
        lines.row("State", state);
        let mut segments = self.segments.to_string();
        if self.segments_read < self.segments {
            segments.push_str(&format!(
                ", {} of them cannot be read",
                self.segments - self.segments_read
            ));
        }
        rows! { lines:
            "Segments" => "{}", segments;
        }
        let records = match self.records {
            Some(records) => format!(", {}", count(records, "record")),
            None => String::new(),
        };
        let blocks = format!("{}{records}", self.descriptor_blocks);
        lines.row("Descriptor blocks", blocks);
        if let (Some(pages), Some(bytes)) = (self.pages, self.live_bytes) {
            lines.row("Pages", format!("{pages}, {}", ByteSize(bytes)));
        }
        if self.encryption != findings::NOT_ENCRYPTED {
            lines.row("Encrypted", findings::encryption_line(self.not_checked));
        }
        let pages = self.unproven_pages.unwrap_or(0);
        let records = self.unfinished_records.unwrap_or(0);
        if pages + self.unfinished_blocks + records > 0 {
            let pages = count(pages, "page");
            let records = count(records, "unfinished record");
            let blocks = count(self.unfinished_blocks, "unfinished block");
            rows! { lines:
                "Not confirmed as written" => "{pages} (checked when read), {records}, {blocks}";
            }
        }
        if let Some(deep) = &self.deep {
            deep.lines(lines);
        }
        if let Some(losses) = &self.losses {
            losses.lines(lines);
        }
    }
}

impl Deep {
    fn lines(&self, lines: &mut Lines) {
        rows! { lines:
            "Bytes checked" => "{} of {} in {:.1} s, {}",
                ByteSize(self.bytes_checked), count(self.pages_checked, "page"), self.seconds,
                usage::rate(self.bytes_per_second);
            "Pages checked" => "{} good, {} damaged, {} unfinished",
                self.good_pages, self.damaged_pages, self.unfinished_pages;
        }
        if self.unopened_pages > 0 {
            rows! { lines:
                "Not decrypted" => "{}: the key of their tenant does not open them",
                    count(self.unopened_pages, "page");
            }
        }
        if self.departed_pages + self.dropped_pages > 0 {
            rows! { lines:
                "By the owner" => "{} moved or dropped meanwhile, {} damaged and dropped now",
                    self.departed_pages, self.dropped_pages;
            }
        }
    }
}

/// Runs the command.
///
/// # Errors
/// There is no store, or another process has it open.
pub fn run(args: &VerifyArgs) -> Result<Ending, Failure> {
    let interrupt = Interrupt::watch();
    let look = args
        .store
        .look(|options| larder_offline::survey::SurveyOptions {
            hold: !args.online,
            sealed: match args.repair {
                true => options.sealed,
                false => options.sealed.or_locked(),
            },
            ..options
        })?;
    let report = match look {
        Look::Wreck(damage, message) => VerifyReport {
            path: args.store.path.clone(),
            damaged: true,
            checked: None,
            damage,
            repair: args.repair.then(|| RepairReport::hopeless(args.dry_run)),
            not_repaired: false,
            wreck: Some(message),
            lacks_key: false,
        },
        Look::Store(survey) => check(args, survey, &interrupt)?,
    };
    report::print(&report, args.json)?;
    Ok(report.ending())
}

fn check(
    args: &VerifyArgs,
    survey: Box<Survey>,
    interrupt: &Interrupt,
) -> Result<VerifyReport, Failure> {
    let mut damage = Finding::all_of(&survey);
    if args.online {
        damage = args.store.lasting(damage);
    }
    let mut bad = Vec::new();
    let reads_pages = args.deep || args.repair || args.online;
    let deep = if reads_pages && !findings::is_locked(&survey) {
        Some(deep(args, &survey, interrupt, &mut bad)?)
    } else {
        None
    };
    let mut deep = deep;
    if let Some(deep) = deep.as_mut().filter(|_| args.online) {
        let (there, moved) = args.store.departed(bad);
        let judged = online::judge(&args.store, &survey, there, interrupt);
        deep.interrupted |= interrupt.is_raised();
        deep.departed_pages = moved + judged.departed;
        deep.damaged_pages -= deep.departed_pages;
        deep.dropped_pages = judged.dropped;
        bad = judged.lost;
    }
    damage.extend(bad.iter().map(|bad| Finding::of_page(&survey, bad)));
    let segments = &survey.segments;
    let counts = survey.counts();
    let checked = Checked {
        store_id: survey.store().to_string(),
        condition: findings::condition(&survey),
        segments: segments.len() as u64 + survey.unreachable,
        segments_read: segments.iter().filter(|facts| facts.case.is_some()).count() as u64,
        descriptor_blocks: segments
            .iter()
            .map(|facts| u64::from(facts.descriptor_blocks))
            .sum(),
        records: counts.map(|counts| counts.records),
        encryption: findings::encryption(&survey),
        not_checked: findings::not_checked(&survey),
        pages: counts.map(|counts| counts.pages),
        live_bytes: counts.map(|counts| counts.live_bytes),
        unproven_pages: counts.map(|counts| counts.unproven),
        unfinished_blocks: survey.unfinished_blocks,
        unfinished_records: counts.map(|counts| counts.unfinished_records),
        deep,
        losses: LossReport::of(&survey, &bad),
    };
    let mut report = VerifyReport {
        path: args.store.path.clone(),
        damaged: !damage.is_empty(),
        checked: Some(checked),
        damage,
        repair: None,
        not_repaired: false,
        wreck: None,
        lacks_key: reads_pages && findings::is_locked(&survey),
    };
    report.not_repaired = args.repair && report.is_interrupted();
    if args.repair && !report.is_interrupted() {
        let plan = Repair::plan(&survey, &bad);
        let how = How {
            store: &args.store,
            dry_run: args.dry_run,
            degraded: args.degraded,
            given_up: GivenUp::of(&survey, &plan),
        };
        // The store is opened for writing, which the survey's lock forbids.
        drop(survey);
        let repair = repair::run(&how, &plan, interrupt)?;
        report.damaged = !repair.is_whole();
        report.repair = Some(repair);
    }
    Ok(report)
}

fn deep(
    args: &VerifyArgs,
    survey: &Survey,
    interrupt: &Interrupt,
    bad: &mut Vec<BadPage>,
) -> Result<Deep, Failure> {
    let template = "verifying {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let bar = report::progress(Some(survey.live_bytes()), template);
    let (started, cpu) = (Instant::now(), usage::cpu_time());
    let pace = online::Pace::new(args.online.then_some(args.rate.0));
    let progress = |bytes| {
        bar.set_position(bytes);
        if pace.wait(bytes, interrupt) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    };
    let checked = survey.check_payloads(progress, |page| bad.push(page));
    bar.finish_and_clear();
    let path = args.store.path.display();
    let counts = checked.map_err(|error| {
        Failure::environment(format!(
            "{path}: this process cannot read the pages: {error}; they may be sound. Raise its \
             limits on threads and memory (ulimit -u, ulimit -v, TasksMax=), or let it read the \
             volumes"
        ))
    })?;
    let seconds = started.elapsed().as_secs_f64();
    let Payloads {
        checked,
        checked_bytes,
        good,
        unfinished,
        bad: damaged,
        unopened,
    } = counts;
    Ok(Deep {
        pages_checked: checked,
        bytes_checked: checked_bytes,
        good_pages: good,
        damaged_pages: damaged,
        unfinished_pages: unfinished,
        unopened_pages: unopened,
        departed_pages: 0,
        dropped_pages: 0,
        seconds,
        bytes_per_second: usage::per_second(checked_bytes, seconds),
        cpu_seconds: usage::cpu_time().saturating_sub(cpu).as_secs_f64(),
        interrupted: checked < survey.live().len() as u64,
    })
}

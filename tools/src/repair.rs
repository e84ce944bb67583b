//! The work of `larder verify --repair` after the survey, and its report.
//!
//! The engine decides and performs the repair. This module opens the store, surveys the structures
//! again afterwards, and reports the rest. A complete repair ends with 0. A repair that leaves
//! damage, or a dry run that would change something, ends with 1.

use std::collections::BTreeSet;

use larder_offline::survey::{Flaw, Page, Survey, SurveyOptions};
use larder_offline::{Repair, Repaired};
use serde::Serialize;

use crate::failure::Failure;
use crate::findings::{self, Finding, Look, StoreArgs};
use crate::interrupt::Interrupt;
use crate::report::{self, Lines, count, rows};

/// The parameters of a repair.
pub struct How<'a> {
    pub store: &'a StoreArgs,
    pub dry_run: bool,
    pub degraded: bool,
    pub given_up: GivenUp,
}

/// The pages of the volumes that are given up.
#[derive(Clone, Copy, Default, Serialize)]
pub struct GivenUp {
    /// Live pages that the survey found on them.
    #[serde(rename = "given_up_pages")]
    pages: u64,
    /// Segments whose pages it could not find.
    #[serde(rename = "given_up_segments")]
    segments: u64,
}

impl GivenUp {
    pub fn of(survey: &Survey, plan: &Repair) -> GivenUp {
        let volumes = volumes_of(&plan.beyond);
        let is_on_them = |page: &Page| volumes.contains(&survey.segments[page.segment].volume);
        GivenUp {
            pages: survey.live().filter(is_on_them).count() as u64,
            segments: survey.unreachable,
        }
    }
}

/// The result of a repair, or its plan.
#[derive(Default, Serialize)]
pub struct RepairReport {
    /// Whether nothing was changed, because only the plan was requested.
    dry_run: bool,
    #[serde(flatten)]
    pub done: Repaired,
    /// Volumes that the store is opened without from now on.
    given_up_volumes: Vec<usize>,
    #[serde(flatten)]
    given_up: GivenUp,
    /// The remaining damage.
    remaining_damage: Vec<Finding>,
    /// The reasons for the remaining damage.
    reasons: Vec<String>,
}

impl RepairReport {
    /// The store cannot be identified.
    pub fn hopeless(dry_run: bool) -> RepairReport {
        RepairReport {
            dry_run,
            reasons: vec![
                "cannot be repaired: the volume has no superblock. If the store \
                 has other volumes, name one with \
                 --volume to see what is left on this one"
                    .to_owned(),
            ],
            ..RepairReport::default()
        }
    }

    /// Whether no damage is left.
    pub fn is_whole(&self) -> bool {
        self.remaining_damage.is_empty() && self.reasons.is_empty() && !self.has_plans()
    }

    /// Structures outside of segments, and headers.
    fn structures(&self) -> u64 {
        let done = &self.done;
        done.superblocks + done.keyrings + done.quotas + done.headers + done.statements
    }

    /// Whether something would have been done.
    fn has_plans(&self) -> bool {
        let things = self.structures() + self.done.emptied_segments + self.done.dropped_pages;
        self.dry_run && (things > 0 || !self.given_up_volumes.is_empty())
    }

    fn planned(plan: &Repair) -> RepairReport {
        RepairReport {
            dry_run: true,
            done: Repaired {
                superblocks: plan.superblocks.len() as u64,
                keyrings: plan.keyrings,
                quotas: plan.quotas,
                headers: plan.headers.len() as u64,
                statements: plan.statements.len() as u64,
                emptied_segments: plan.segments.len() as u64,
                moved_pages: plan.pages_to_move,
                dropped_pages: plan.pages.len() as u64,
                ..Repaired::default()
            },
            given_up_volumes: volumes_of(&plan.beyond),
            ..RepairReport::default()
        }
    }

    fn done(repaired: Repaired) -> RepairReport {
        let mut reasons = Vec::new();
        if !repaired.stuck.is_empty() {
            reasons.push(format!(
                "{} not emptied: no free segment for their good pages, or the device refused the \
                 writes. Enlarge the \
                 store (`larder create --grow`), and repair again",
                count(repaired.stuck.len() as u64, "segment")
            ));
        }
        if repaired.unrecorded_pages > 0 {
            reasons.push(format!(
                "no room for the records of {}: enlarge the store, and repair again",
                count(repaired.unrecorded_pages, "dropped page")
            ));
        }
        RepairReport {
            done: repaired,
            reasons,
            ..RepairReport::default()
        }
    }

    pub fn lines(&self, lines: &mut Lines) {
        if self.is_refused() {
            lines.row("Repair", "not possible, nothing is changed");
        } else {
            self.deeds(lines);
        }
        findings::list(&self.remaining_damage, lines);
        for reason in &self.reasons {
            lines.text(reason.as_str());
        }
    }

    /// Whether every planned step was refused for a reason.
    fn is_refused(&self) -> bool {
        let pages = self.done.moved_pages + self.done.dropped_pages + self.done.unfinished_pages;
        let things = self.structures() + self.done.emptied_segments + pages;
        !self.reasons.is_empty() && things == 0 && self.given_up_volumes.is_empty()
    }

    fn deeds(&self, lines: &mut Lines) {
        let label = if self.dry_run {
            "Would repair"
        } else {
            "Repaired"
        };
        let done = &self.done;
        let pages = format!(
            "{} moved, {} dropped",
            count(done.moved_pages, "good page"),
            count(done.dropped_pages, "damaged page")
        );
        rows! { lines:
            label => "{}, {}, {}, {}; {pages}",
                copies(done.superblocks, "superblock"), copies(done.headers, "header"),
                count(done.statements, "closing statement"),
                count(done.emptied_segments, "segment");
        }
        if !self.given_up_volumes.is_empty() {
            let label = if self.dry_run {
                "Would give up"
            } else {
                "Given up"
            };
            let volumes = names_of(&self.given_up_volumes);
            let pages = count(self.given_up.pages, "page");
            let unlisted = match self.given_up.segments {
                0 => String::new(),
                some => format!(
                    ", and the pages of {} that cannot be reached",
                    count(some, "segment")
                ),
            };
            rows! { lines:
                label => "{volumes}: {pages}{unlisted}";
            }
        }
        if !self.dry_run && !self.done.interrupted {
            let left = match self.remaining_damage.len() as u64 {
                0 if self.reasons.is_empty() => "sound".to_owned(),
                0 => "not all was repaired".to_owned(),
                left => count(left, "thing") + " damaged still",
            };
            lines.row("After repair", left);
        }
    }
}

fn copies(number: u64, of: &str) -> String {
    match number {
        1 => format!("1 {of} copy"),
        number => format!("{number} {of} copies"),
    }
}

/// Performs the plan, or prints it.
///
/// # Errors
/// The store cannot be opened for writing.
pub fn run(how: &How<'_>, plan: &Repair, interrupt: &Interrupt) -> Result<RepairReport, Failure> {
    let is_given_up = how.degraded && plan.can_be_degraded();
    if !(plan.beyond.is_empty() || is_given_up) {
        return Ok(RepairReport {
            reasons: vec![beyond(&plan.beyond, plan.can_be_degraded())],
            dry_run: how.dry_run,
            ..RepairReport::default()
        });
    }
    if how.dry_run || plan.is_empty() {
        return Ok(RepairReport {
            dry_run: how.dry_run,
            given_up: how.given_up,
            ..RepairReport::planned(plan)
        });
    }
    let bar = report::progress(
        Some(plan.bytes_to_move),
        "repairing {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}",
    );
    let mut progress = |done, _| {
        bar.set_position(done);
        interrupt.flow()
    };
    let options = how.store.options()?.with(|o| o.degraded = how.degraded);
    let repaired = larder_offline::repair(&how.store.path, &options, plan, &mut progress);
    bar.finish_and_clear();
    let repaired = repaired?;
    let mut report = RepairReport::done(repaired);
    report.given_up_volumes = volumes_of(&plan.beyond);
    report.given_up = how.given_up;
    match remaining(how.store) {
        Ok(damage) => report.remaining_damage = damage,
        Err(failure) => {
            let reason = format!("the store could not be checked after the repair: {failure}");
            report.reasons.push(reason);
        }
    }
    Ok(report)
}

/// The findings of a new survey of the structures. The repair has stored the places of all volumes
/// that were named; the name of a volume that was given up would be refused.
fn remaining(store: &StoreArgs) -> Result<Vec<Finding>, Failure> {
    let store = StoreArgs {
        path: store.path.clone(),
        volumes: Vec::new(),
        key: store.key.clone(),
    };
    let look = store.look(|options| SurveyOptions {
        hold: true,
        ..options
    })?;
    Ok(match look {
        Look::Wreck(damage, _) => damage,
        Look::Store(survey) => Finding::all_of(&survey),
    })
}

fn volumes_of(flaws: &[Flaw]) -> Vec<usize> {
    let volumes: BTreeSet<usize> = flaws.iter().map(|flaw| flaw.volume).collect();
    volumes.into_iter().collect()
}

/// `volume 1, volume 2`
fn names_of(volumes: &[usize]) -> String {
    let names = volumes.iter().map(|volume| format!("volume {volume}"));
    names.collect::<Vec<String>>().join(", ")
}

fn beyond(flaws: &[Flaw], can_be_degraded: bool) -> String {
    let names = names_of(&volumes_of(flaws));
    if can_be_degraded {
        format!(
            "beyond repair: {names}. Restore these volumes, or give up their pages for good with \
             --repair --degraded. Until then nothing is changed"
        )
    } else {
        format!(
            "beyond repair: {names}. A store is opened by its first volume: restore that; or save \
             with `larder export` the pages that can be read, \
             and create the store anew. Nothing was changed"
        )
    }
}

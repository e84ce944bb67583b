//! Shared code of the commands that examine a store without using it: the survey without an open,
//! and the report of damage.
//!
//! Each finding names its place (volume, segment, byte offset, key) and the fault. The remedy is
//! given once for each kind. The exit code is decided elsewhere.

use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};

use clap::Args;
use larder_engine::OpenOptions;
use larder_offline::superblock_to_save;
use larder_offline::survey::{
    BadPage, Condition, Encryption, Flaw, Page, Survey, SurveyError, SurveyOptions,
};
use larder_remote::Trust;
use serde::Serialize;

use crate::archive::{Fault, FaultReason};
use crate::failure::Failure;
use crate::key::{self, KeyArgs};
use crate::owner::{hung_volume, on_device};
use crate::place;
use crate::report::{LISTED_MAX, Lines};

/// The remedy for a page whose bytes are lost.
const PAGE_ADVICE: &str = "the page is lost: reading it is a miss, and putting it again repairs \
    that. The owner of a served store has dropped it; elsewhere `larder verify --repair` drops it. \
    Many pages in one range: another program (`fuser -v` of the volume). Many at random places: \
    the drive (`smartctl -a`)";

/// Closed in order.
pub const CLEAN: &str = "clean";

/// Left open by a process that is gone: the next open recovers it.
pub const NOT_CLOSED: &str = "not_closed";

/// Open now.
pub const IN_USE: &str = "in_use";

/// The store to examine.
#[derive(Args, Clone, Debug)]
pub struct StoreArgs {
    /// The store: its first volume, or a backend's directory
    #[arg(value_parser = place::parser())]
    pub path: PathBuf,
    /// Where a further volume is, if not where the store remembers it (may be repeated)
    #[arg(long = "volume", value_name = "PATH")]
    pub volumes: Vec<PathBuf>,
    #[command(flatten)]
    pub key: KeyArgs,
}

/// A fault.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// Index of the volume, if the fault is in a store; and the path of the volume, or of the
    /// archive.
    volume: Option<usize>,
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// The segment's number on that volume, if the fault concerns a segment.
    segment: Option<u32>,
    /// Byte offset in the volume, if the fault has a place.
    pub offset: Option<u64>,
    /// The page's key, if the fault concerns a page.
    key: Option<String>,
    /// One word for programs: the kind of fault.
    kind: &'static str,
    /// The fault.
    pub reason: String,
    /// Its cost, and the remedy.
    pub advice: &'static str,
}

/// A surveyed store, or its remains.
pub enum Look {
    /// A store.
    Store(Box<Survey>),
    /// The store cannot be identified.
    Wreck(Vec<Finding>, String),
}

impl StoreArgs {
    /// A store with its key.
    pub fn with_key(path: &Path, volumes: &[PathBuf], key: KeyArgs) -> StoreArgs {
        StoreArgs {
            path: path.to_owned(),
            volumes: volumes.to_vec(),
            key,
        }
    }

    /// The engine's options for an open of the store.
    ///
    /// # Errors
    /// Its key cannot be read.
    pub fn options(&self) -> Result<OpenOptions, Failure> {
        let wrapping = self.key.read()?;
        Ok(OpenOptions::default().with(|o| {
            o.volumes = self.volumes.clone();
            o.wrapping = wrapping;
        }))
    }

    /// Surveys the store. `complete` fills in the options.
    ///
    /// # Errors
    /// There is no store, it cannot be read, or one of its volumes hangs: a read of that would not
    /// end, by a signal neither.
    pub fn look(
        &self,
        complete: impl FnOnce(SurveyOptions) -> SurveyOptions,
    ) -> Result<Look, Failure> {
        if let Some(volume) = hung_volume(&self.path) {
            let what = format!(
                "{}: hung; oldest operation {:.1} s: nothing of the store can be read",
                on_device(&volume),
                volume.oldest_seconds
            );
            return Err(Failure::environment(what).with_hint("`larder doctor` does not read it"));
        }
        let options = complete(SurveyOptions {
            volumes: self.volumes.clone(),
            sealed: self.key.sealed()?,
            ..SurveyOptions::default()
        });
        match Survey::new(&self.path, &options) {
            Ok(survey) => Ok(Look::Store(Box::new(survey))),
            Err(SurveyError::Store(error)) => Err(error.into()),
            Err(error @ SurveyError::NoSuperblock { .. }) => {
                let message = error.to_string();
                let SurveyError::NoSuperblock { path, flaws } = error else {
                    return Err(Failure::environment(message));
                };
                let findings = flaws.iter().map(|flaw| Finding::of(&path, flaw)).collect();
                Ok(Look::Wreck(findings, message))
            }
        }
    }
}

impl StoreArgs {
    /// Splits pages with wrong bytes: pages that are lost, and the number of the others. An owner,
    /// perhaps a later one, may have moved or dropped a page between the survey and the
    /// read. So the store is surveyed once more: a page still recorded at the place of the read is
    /// lost.
    pub fn departed(&self, bad: Vec<BadPage>) -> (Vec<BadPage>, u64) {
        if bad.is_empty() {
            return (bad, 0);
        }
        let Ok(Look::Store(now)) = self.look(|options| options) else {
            return (bad, 0);
        };
        let place = |page: &Page| (page.segment, page.offset, page.commit, page.birth);
        let live: HashSet<_> = now.live().map(|page| place(&page)).collect();
        let (there, departed): (Vec<_>, Vec<_>) = bad
            .into_iter()
            .partition(|bad| live.contains(&place(&bad.page)));
        (there, departed.len() as u64)
    }

    /// Findings of a store in use that a second survey has too. Others are writes that the first
    /// one met half done.
    pub fn lasting(&self, findings: Vec<Finding>) -> Vec<Finding> {
        if findings.is_empty() {
            return findings;
        }
        let locked = |options: SurveyOptions| SurveyOptions {
            sealed: options.sealed.or_locked(),
            ..options
        };
        let Ok(Look::Store(now)) = self.look(locked) else {
            return findings;
        };
        let place = |of: &Finding| (of.volume, of.segment, of.offset, of.kind);
        let there: HashSet<_> = Finding::all_of(&now).iter().map(place).collect();
        let lasting = findings.into_iter();
        lasting.filter(|of| there.contains(&place(of))).collect()
    }
}

/// The state of a store, in one word.
pub fn condition(survey: &Survey) -> &'static str {
    match survey.condition {
        Condition::Clean => CLEAN,
        Condition::NotClosed => NOT_CLOSED,
        Condition::InUse => IN_USE,
    }
}

/// The word for a store that is not encrypted.
pub const NOT_ENCRYPTED: &str = "none";

/// What a look at an encrypted store without its key does not show.
const LOCKED: &[&str] = &["namespaces", "records", "pages"];

/// Whether the store is encrypted, and was read without its key.
pub fn is_locked(survey: &Survey) -> bool {
    matches!(survey.encryption, Encryption::Locked { .. })
}

/// Whether the store is encrypted, and was read with its key, in one word.
pub fn encryption(survey: &Survey) -> &'static str {
    match survey.encryption {
        Encryption::None => NOT_ENCRYPTED,
        Encryption::Locked { .. } => "locked",
        Encryption::Unlocked => "unlocked",
    }
}

/// What was not checked, for lack of the key.
pub fn not_checked(survey: &Survey) -> &'static [&'static str] {
    match is_locked(survey) {
        true => LOCKED,
        false => &[],
    }
}

/// Whether a store is encrypted. Refuses one beside a remote without keys, which would have its
/// pages in clear.
///
/// # Errors
/// The store is encrypted, and the remote is not. Other obstacles are found later.
pub fn check_remote(path: &Path, trust: &Trust) -> Result<bool, Failure> {
    let superblock = superblock_to_save(path);
    let is_encrypted = superblock.is_ok_and(|superblock| superblock.keyring != 0);
    if is_encrypted && !trust.encrypts() {
        return Err(Failure::usage(format!(
            "{}: the store is encrypted, and an unsigned remote has pages in clear: give it a key \
             with --key-file",
            path.display()
        )));
    }
    Ok(is_encrypted)
}

/// The state of an encrypted store, for people.
pub fn encryption_line(not_checked: &[&str]) -> String {
    match not_checked {
        [] => "yes, and read with its key".to_owned(),
        parts => format!(
            "yes, and no key is given: {} are not checked ({})",
            parts.join(", "),
            key::OPTIONS
        ),
    }
}

impl Finding {
    fn of(path: &Path, flaw: &Flaw) -> Finding {
        Finding {
            volume: Some(flaw.volume),
            path: path.to_owned(),
            segment: flaw.segment,
            offset: flaw.offset,
            key: flaw.reason.key().map(|key| key.to_string()),
            kind: flaw.reason.kind(),
            reason: flaw.reason.to_string(),
            advice: flaw.reason.advice(),
        }
    }

    /// The findings of a survey.
    pub fn all_of(survey: &Survey) -> Vec<Finding> {
        let finding = |flaw: &Flaw| Finding::of(&survey.volumes[flaw.volume].path, flaw);
        survey.flaws.iter().map(finding).collect()
    }

    /// A page whose bytes are lost.
    pub fn of_page(survey: &Survey, bad: &BadPage) -> Finding {
        let segment = &survey.segments[bad.page.segment];
        Finding {
            volume: Some(segment.volume),
            path: survey.volumes[segment.volume].path.clone(),
            segment: Some(segment.number),
            offset: Some(bad.page.offset),
            key: Some(bad.page.key.to_string()),
            kind: "payload",
            reason: bad.fault.to_string(),
            advice: PAGE_ADVICE,
        }
    }

    /// A fault of an archive.
    pub fn of_archive(path: &Path, fault: &Fault, advice: &'static str) -> Finding {
        let key = match &fault.reason {
            FaultReason::Payload { key, .. } => Some(key.to_string()),
            _ => None,
        };
        Finding {
            volume: None,
            path: path.to_owned(),
            segment: None,
            offset: Some(fault.offset),
            key,
            kind: "archive",
            reason: fault.reason.to_string(),
            advice,
        }
    }

    /// The same as a single line.
    pub fn archive_line(&self) -> String {
        format!(
            "{}: offset {}: {}: {}",
            self.path.display(),
            self.offset.unwrap_or(0),
            self.reason,
            self.advice
        )
    }

    fn line(&self) -> String {
        let mut place = self.path.display().to_string();
        let parts = [
            self.segment.map(|segment| format!("segment {segment}")),
            self.offset.map(|offset| format!("offset {offset}")),
            self.key.as_ref().map(|key| format!("key {key}")),
        ];
        for part in parts.into_iter().flatten() {
            place.push_str(", ");
            place.push_str(&part);
        }
        format!("  {place}: {}", self.reason)
    }
}

/// Lists findings for people, then the remedy for each kind of them.
pub fn list(findings: &[Finding], lines: &mut Lines) {
    if findings.is_empty() {
        return;
    }
    lines.text("");
    lines.text(format!("Damage ({}):", findings.len()));
    for finding in findings.iter().take(LISTED_MAX) {
        lines.text(finding.line());
    }
    let unlisted = findings.len().saturating_sub(LISTED_MAX);
    if unlisted > 0 {
        lines.text(format!("  and {unlisted} more: --json lists all"));
    }
    let kinds: BTreeSet<(&str, &str)> = findings
        .iter()
        .map(|finding| (finding.kind, finding.advice))
        .collect();
    lines.text("What to do:");
    for (kind, advice) in kinds {
        lines.text(format!("  {kind}: {advice}"));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_list_for_people_has_an_end() {
        let finding = Finding {
            volume: Some(0),
            path: PathBuf::from("store"),
            segment: None,
            offset: None,
            key: None,
            kind: "payload",
            reason: "lost".to_owned(),
            advice: PAGE_ADVICE,
        };
        for (damaged, last) in [
            (LISTED_MAX, "  store: lost"),
            (LISTED_MAX + 7, "  and 7 more: --json lists all"),
        ] {
            let mut lines = Lines::default();
            list(&vec![finding.clone(); damaged], &mut lines);
            let mut told = Vec::new();
            lines.write(&mut told).unwrap();
            let told = String::from_utf8(told).unwrap();
            let told: Vec<&str> = told.lines().collect();
            let advice = told.iter().position(|text| *text == "What to do:");
            let listed = advice.map(|at| (told[at - 1], at));
            let beyond = usize::from(damaged > LISTED_MAX);
            assert_eq!(listed, Some((last, LISTED_MAX + beyond + 2)));
            assert_eq!(told[1], format!("Damage ({damaged}):"));
        }
    }
}

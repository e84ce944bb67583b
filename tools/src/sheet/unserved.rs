//! The facts of a store that no process serves: from its volumes, also if they are damaged.

use std::path::Path;

use larder_offline::survey::{Encryption, Sealed, Survey, SurveyError, SurveyOptions};

use super::page::{Page, Section, Table};
use super::served::{bytes_chart, percent};
use crate::failure::Failure;
use crate::findings::{Finding, condition, is_locked};
use crate::report::{LISTED_MAX, count};
use crate::size::{ByteSize, date};

/// The page, and whether the store is damaged. `why` is the reason why no process serves it.
pub fn page(path: &Path, why: &str) -> Result<(Page, bool), Failure> {
    let title = format!("Larder store {}", path.display());
    let options = SurveyOptions {
        sealed: Sealed::Locked,
        ..SurveyOptions::default()
    };
    let survey = match Survey::new(path, &options) {
        Ok(survey) => survey,
        Err(error @ SurveyError::NoSuperblock { .. }) => {
            let mut damage = Section::new("Incidents");
            damage.text = vec![why.to_owned(), error.to_string()];
            let page = Page {
                title,
                sections: vec![damage],
                ..Page::default()
            };
            return Ok((page, true));
        }
        Err(SurveyError::Store(error)) => return Err(error.into()),
    };
    let findings = Finding::all_of(&survey);
    let is_damaged = !findings.is_empty();
    let (live, usable) = (survey.live_bytes(), survey.usable_bytes());
    let pages = match survey.encryption {
        Encryption::Locked { pages } => {
            let pages = pages.map_or_else(|| "?".to_owned(), |pages| pages.to_string());
            format!("{pages}, encrypted: their names and sizes need the key of the store")
        }
        Encryption::None | Encryption::Unlocked => format!(
            "{}, {} of {} usable ({})",
            survey.live().len(),
            ByteSize(live),
            ByteSize(usable),
            percent(live as f64, usable.saturating_sub(live) as f64)
        ),
    };
    let mut sections = vec![incidents(&findings)];
    if !is_locked(&survey) {
        sections.insert(0, namespaces(&survey)?);
    }
    let page = Page {
        title,
        facts: vec![
            ("State", format!("{}; {why}", condition(&survey))),
            ("Created", date(survey.created_unix_s())),
            ("Pages", pages),
            (
                "Not here",
                "hits, the curve, latencies and evictions: an owner counts them while it serves \
                 the store"
                    .to_owned(),
            ),
        ],
        sections,
        ..Page::default()
    };
    Ok((page, is_damaged))
}

fn namespaces(survey: &Survey) -> Result<Section, Failure> {
    let mut spaces: Vec<_> = survey.namespaces.iter().collect();
    spaces.sort_by_key(|space| std::cmp::Reverse(space.bytes));
    let mut section = Section::new("Namespaces");
    let bytes: Vec<u64> = spaces.iter().map(|space| space.bytes).collect();
    section.charts.extend(bytes_chart(&bytes)?);
    let row = |(at, space): (usize, &&larder_offline::survey::NamespaceFacts)| {
        let record = space.record.as_ref();
        vec![
            record.map_or_else(|| "?".to_owned(), |record| record.fields().model.clone()),
            (at + 1).to_string(),
            space.fingerprint.to_string(),
            space.pages.to_string(),
            ByteSize(space.bytes).to_string(),
        ]
    };
    section.tables.push(Table::new(
        &["Model", "bar", "namespace", "pages", "size"],
        spaces
            .iter()
            .enumerate()
            .take(LISTED_MAX)
            .map(row)
            .collect(),
    ));
    Ok(section)
}

fn incidents(findings: &[Finding]) -> Section {
    let mut section = Section::new("Incidents");
    section.text.push(match findings.len() as u64 {
        0 => "No damage in the structures. `larder verify --deep` reads every page.".to_owned(),
        found => format!(
            "{}: `larder verify` lists all, `--repair` repairs.",
            count(found, "finding")
        ),
    });
    let rows = findings.iter().take(100).map(|finding| {
        let offset = finding
            .offset
            .map_or_else(|| "-".to_owned(), |at| at.to_string());
        vec![finding.reason.clone(), offset, finding.advice.to_owned()]
    });
    section
        .tables
        .push(Table::new(&["Finding", "offset", "advice"], rows.collect()));
    section
}

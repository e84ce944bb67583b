//! The cost of damage, summed up per namespace, for `inspect` and `verify`.

use larder_offline::survey::{BadPage, NamespaceLosses, Survey};
use serde::Serialize;

use crate::report::{Lines, count, rows};
use crate::size::ByteSize;

/// The cost of damage.
#[derive(Serialize)]
pub struct LossReport {
    /// Unusable segments, and an upper bound of the page bytes lost with all damage to structures.
    lost_segments: u64,
    lost_bytes_max: u64,
    /// The namespaces with losses.
    namespaces: Vec<LossRow>,
}

/// The cost of damage to one namespace.
#[derive(Serialize)]
struct LossRow {
    fingerprint: String,
    /// Its name in one line, when the store holds it.
    name: Option<String>,
    /// Live pages.
    pages: u64,
    /// Pages whose records are lost: a lower bound.
    lost_pages: u64,
    /// Pages whose bytes are lost, as far as they were read.
    damaged_pages: u64,
    /// Pages that are live again although a lost record had deleted, evicted or cleared them: an
    /// upper bound.
    doubtful_pages: u64,
}

impl LossReport {
    /// Sums up. `bad` are the pages whose bytes are lost. Returns `None` without losses.
    pub fn of(survey: &Survey, bad: &[BadPage]) -> Option<LossReport> {
        let losses = survey.losses();
        if losses.is_none() && bad.is_empty() {
            return None;
        }
        let rows = (0..survey.namespaces.len()).map(|at| {
            let of_structures = losses.and_then(|losses| losses.namespaces.get(at).copied());
            let damaged = bad.iter().filter(|bad| bad.page.namespace == at);
            LossRow::of(
                survey,
                at,
                of_structures.unwrap_or_default(),
                damaged.count(),
            )
        });
        let is_hit = |row: &LossRow| row.lost_pages + row.damaged_pages + row.doubtful_pages > 0;
        Some(LossReport {
            lost_segments: losses.map_or(0, |losses| losses.segments),
            lost_bytes_max: losses.map_or(0, |losses| losses.bytes_max),
            namespaces: rows.filter(is_hit).collect(),
        })
    }

    pub fn lines(&self, lines: &mut Lines) {
        let segments = count(self.lost_segments, "segment");
        let bytes = ByteSize(self.lost_bytes_max);
        if self.lost_bytes_max > 0 {
            rows! { lines:
                "Lost" => "{segments}: an unknown number of pages, at most {bytes}";
            }
        }
        for row in &self.namespaces {
            lines.text(row.line());
        }
    }
}

impl LossRow {
    fn of(survey: &Survey, at: usize, losses: NamespaceLosses, damaged: usize) -> LossRow {
        let facts = &survey.namespaces[at];
        LossRow {
            fingerprint: facts.fingerprint.to_string(),
            name: facts.record.as_ref().map(ToString::to_string),
            pages: facts.pages,
            lost_pages: losses.lost_pages,
            damaged_pages: damaged as u64,
            doubtful_pages: losses.doubtful_pages,
        }
    }

    fn line(&self) -> String {
        let mut parts = Vec::new();
        if self.lost_pages > 0 {
            parts.push(format!("at least {} lost", count(self.lost_pages, "page")));
        }
        if self.damaged_pages > 0 {
            parts.push(format!("{} damaged", count(self.damaged_pages, "page")));
        }
        if self.doubtful_pages > 0 {
            parts.push(format!(
                "up to {} of the remaining {} may have been deleted earlier",
                self.doubtful_pages,
                count(self.pages, "page")
            ));
        }
        let name = self.name.as_deref().unwrap_or("name not known");
        format!("  {}  {}: {name}", self.fingerprint, parts.join(", "))
    }
}

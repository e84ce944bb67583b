//! The hit rate of a store at other sizes.

use larder_store::curve::{CurveReport, FACTORS, SpaceCurve};
use larder_store::share::View;
use serde::Serialize;

use crate::report::{Lines, rows};
use crate::size::ByteSize;

/// Most namespaces with a curve for people.
const SHOWN_MAX: usize = 6;

/// The curves of a store: of all namespaces together, and of each.
#[derive(Serialize)]
pub(super) struct Curve {
    size_bytes: u64,
    seconds: f64,
    sampled: f64,
    pages_requested: u64,
    /// None if the store follows LRU.
    miniature_hit_rate: Option<f64>,
    sizes: Vec<Size>,
    spaces: Vec<Space>,
}

/// A store of another size.
#[derive(Serialize)]
struct Size {
    factor: f64,
    size_bytes: u64,
    hit_rate: f64,
    /// None if the store follows LRU.
    own_hit_rate: Option<f64>,
    read_bytes: u64,
}

impl Size {
    fn as_evicted(&self) -> f64 {
        self.own_hit_rate.unwrap_or(self.hit_rate)
    }
}

/// A namespace.
#[derive(Serialize)]
struct Space {
    fingerprint: String,
    model: Option<String>,
    pages_requested: u64,
    miniature_hit_rate: Option<f64>,
    is_rough: bool,
    sizes: Vec<Size>,
}

fn sizes(report: &CurveReport, of: &SpaceCurve) -> Vec<Size> {
    let values = of.hit_rates.iter().zip(&of.read_bytes);
    let sizes = FACTORS.iter().enumerate().zip(values);
    sizes
        .map(|((at, factor), (hit_rate, read_bytes))| Size {
            factor: *factor,
            size_bytes: (report.size_bytes as f64 * factor) as u64,
            hit_rate: *hit_rate,
            own_hit_rate: of.own_hit_rates.get(at).copied(),
            read_bytes: *read_bytes,
        })
        .collect()
}

impl Curve {
    pub(super) fn of(view: &View) -> Curve {
        let report = &view.report.curve;
        let model = |fingerprint: &str| {
            let named = view.spaces.iter().filter_map(|of| of.namespace.as_ref());
            let mut named = named.filter(|of| of.fingerprint().to_string() == fingerprint);
            named.next().map(|of| of.fields().model.clone())
        };
        let total = report.total();
        Curve {
            size_bytes: report.size_bytes,
            seconds: report.seconds,
            sampled: report.sampled,
            pages_requested: total.pages_requested,
            miniature_hit_rate: total.miniature_hit_rate,
            sizes: sizes(report, &total),
            spaces: report
                .spaces
                .iter()
                .map(|of| Space {
                    fingerprint: of.fingerprint.clone(),
                    model: model(&of.fingerprint),
                    pages_requested: of.pages_requested,
                    miniature_hit_rate: of.miniature_hit_rate,
                    is_rough: of.is_rough,
                    sizes: sizes(report, of),
                })
                .collect(),
        }
    }

    /// A table: a row for each size, a column for each of the first namespaces.
    pub(super) fn lines(&self, lines: &mut Lines) {
        let has_own = self.sizes.iter().any(|size| size.own_hit_rate.is_some());
        let name = if has_own { "Curve" } else { "Curve of LRU" };
        rows! { lines:
            name => "{} pages asked for in {:.0} s, 1 of {:.0} pages sampled",
                self.pages_requested, self.seconds, 1.0 / self.sampled.max(f64::MIN_POSITIVE);
        }
        if let Some(rate) = self.miniature_hit_rate {
            rows! { lines:
                "Its miniature" => "{:.1} % at the present size, before the adjustment",
                    rate * 100.0;
            }
        }
        let shown = || self.spaces.iter().take(SHOWN_MAX);
        let name = |space: &Space| {
            let short: String = space.fingerprint.chars().take(8).collect();
            match space.is_rough {
                true => format!("{short} (rough)"),
                false => short,
            }
        };
        let mut headings = vec!["Size".to_owned(), "hits".to_owned()];
        headings.extend(has_own.then(|| "of LRU".to_owned()));
        headings.push("read".to_owned());
        headings.extend(shown().map(name));
        let headings: Vec<&str> = headings.iter().map(String::as_str).collect();
        let percent = |rate: f64| format!("{:.1} %", rate * 100.0);
        let row = |(at, size): (usize, &Size)| {
            let mut row = vec![
                format!("{} x, {}", size.factor, ByteSize(size.size_bytes)),
                percent(size.as_evicted()),
            ];
            row.extend(has_own.then(|| percent(size.hit_rate)));
            row.push(ByteSize(size.read_bytes).to_string());
            let own = shown().filter_map(|space| space.sizes.get(at));
            row.extend(own.map(|size| percent(size.as_evicted())));
            row
        };
        let rows: Vec<Vec<String>> = self.sizes.iter().enumerate().map(row).collect();
        lines.table(&headings, &rows);
        if self.spaces.len() > SHOWN_MAX {
            lines.text("More namespaces: --json lists all of them.");
        }
    }
}

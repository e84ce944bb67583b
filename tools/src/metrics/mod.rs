//! The state of a store as metrics, in the text format of OpenMetrics.
//!
//! [`table`] has every metric with its name, unit and meaning, those of the counters from the
//! engine's own table ([`larder_core::counters`]). docs/metrics.md describes the same list for
//! people; a test compares the two. The official client library encodes the metrics, and
//! adds the suffixes of names (`_total`, units).
//!
//! Counters are the totals of all processes across owners ([`larder_store::totals`]). Gauges are
//! of this moment.

mod table;
mod wear;

use std::fmt;
use std::path::Path;

use larder_engine::StoreError;
use larder_store::share::{View, view};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, text::encode};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::Registry;

use table::{Metric, Sample, Value};
use wear::{Drive, wear};

/// The content type of the text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Most values of the label `kv_namespace` besides [`OTHER`].
pub const NAMESPACES_MAX: usize = 64;

/// The value of that label for all further namespaces together.
pub const OTHER: &str = "other";

/// The metrics of a moment.
#[derive(Debug)]
struct Collected(Vec<Metric>);

impl Collector for Collected {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        // The kind of a metric is that of its samples.
        for metric in self.0.iter().filter(|metric| !metric.samples.is_empty()) {
            let unit = metric.unit.clone();
            let kind = metric.kind();
            let mut of =
                encoder.encode_descriptor(metric.name, metric.help, unit.as_ref(), kind)?;
            for Sample { labels, value } in &metric.samples {
                if labels.is_empty() {
                    encode_value(&mut of, value)?;
                } else {
                    encode_value(&mut of.encode_family(labels)?, value)?;
                }
            }
        }
        Ok(())
    }
}

fn encode_value(encoder: &mut MetricEncoder<'_>, value: &Value) -> Result<(), fmt::Error> {
    type None = Option<&'static Exemplar<[(&'static str, &'static str); 0], f64>>;
    match value {
        Value::Count(count) => encoder.encode_counter(count, None::None),
        Value::Seconds(seconds) => encoder.encode_counter(seconds, None::None),
        Value::Gauge(value) => encoder.encode_gauge(value),
        Value::Histogram { counts, sum } => {
            let count = counts.iter().map(|(_, count)| count).sum();
            encoder.encode_histogram::<[(&str, &str); 0]>(*sum, count, counts, None)
        }
    }
}

/// The metrics of the store at `path`. Without an owner that answers, the metrics of an unserved
/// store.
///
/// # Errors
/// When the owner does not serve this process, or cannot be understood.
pub fn text(path: &Path) -> Result<String, StoreError> {
    match view(path) {
        Ok(view) => Ok(text_of(Some(&view), &wear(Some(&view.report)))),
        Err(
            StoreError::NotServed { .. }
            | StoreError::ServesAnother { .. }
            | StoreError::Unanswered { .. }
            | StoreError::OwnerGone
            | StoreError::Locked { .. },
        ) => Ok(text_of(None, &wear(None))),
        Err(error) => Err(error),
    }
}

/// The metrics of an owner's answer; `None` if there is none.
fn text_of(view: Option<&View>, drives: &[Drive]) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Collected(table::metrics(view, drives))));
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = encode(&mut text, &registry);
    text
}

impl Metric {
    fn kind(&self) -> MetricType {
        match self.samples.first().map(|sample| &sample.value) {
            Some(Value::Count(_) | Value::Seconds(_)) => MetricType::Counter,
            Some(Value::Histogram { .. }) => MetricType::Histogram,
            Some(Value::Gauge(_)) | None => MetricType::Gauge,
        }
    }
}

/// A sentence of a table of the documents: it begins small.
#[cfg(test)]
pub(crate) fn begun_small(text: &str) -> String {
    let (first, rest) = text.split_at(1);
    match rest.starts_with(char::is_uppercase) {
        true => text.to_owned(),
        false => first.to_lowercase() + rest,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use larder_disk::health::Health;
    use prometheus_client::registry::Unit;

    use super::*;

    const PAGE: &str = include_str!("../../../docs/metrics.md");

    /// The begin of the row of a metric in the page's tables.
    fn row(metric: &Metric) -> String {
        let unit = metric.unit.as_ref().map_or("", |unit| match unit {
            Unit::Bytes => "_bytes",
            Unit::Seconds => "_seconds",
            _ => "_ratio",
        });
        let total = match metric.kind() {
            MetricType::Counter => "_total",
            _ => "",
        };
        let labels = metric.samples[0].labels.iter().map(|(label, _)| *label);
        let labels = match &labels.collect::<Vec<&str>>()[..] {
            [] => String::new(),
            labels => format!("{{{}}}", labels.join(",")),
        };
        let help = begun_small(metric.help);
        format!("| `{}{unit}{total}{labels}` | {help}", metric.name)
    }

    #[test]
    fn the_page_lists_what_is_exported_and_nothing_else() {
        let view = table::tests::view(2);
        let drive = Health {
            used_percent: Some(7),
            spare_percent: Some((98, 10)),
            written_bytes: Some(1),
            media_errors: Some(0),
            ..Health::default()
        };
        let drives = vec![("nvme0n1".to_owned(), Some(drive))];
        let metrics = table::metrics(Some(&view), &drives);
        let exported: Vec<String> = metrics.iter().map(row).collect();
        let documented = || PAGE.lines().filter(|line| line.starts_with("| `larder_"));
        for row in &exported {
            assert!(
                documented().any(|line| line.starts_with(row)),
                "docs/metrics.md: add the row, or let it begin with:\n{row}"
            );
        }
        for line in documented() {
            let is_exported = exported.iter().any(|row| line.starts_with(row));
            assert!(is_exported, "docs/metrics.md: not exported:\n{line}");
        }
    }

    #[test]
    fn namespaces_beyond_the_limit_are_one() {
        let text = text_of(Some(&table::tests::view(NAMESPACES_MAX + 6)), &[]);
        let pages: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("larder_namespace_pages{"))
            .collect();
        assert_eq!(pages.len(), NAMESPACES_MAX + 1);
        let other = "larder_namespace_pages{kv_namespace=\"other\",model=\"\"} 6.0";
        assert_eq!(pages.last(), Some(&other));
    }

    #[test]
    fn without_an_owner_only_the_state_is_exported() {
        let unreadable = vec![("vda".to_owned(), None)];
        let text = text_of(None, &unreadable);
        let drive = "larder_drive_readable{drive=\"vda\"} 0.0\n";
        assert!(
            text.contains(drive) && !text.contains("larder_drive_critical{"),
            "{text}"
        );
        assert!(text.contains("larder_up 0.0\n"), "{text}");
        assert!(
            text.contains("larder_store_state{state=\"unserved\"} 1.0\n"),
            "{text}"
        );
        assert!(!text.contains("larder_page_hits_total"), "{text}");
        assert!(text.ends_with("# EOF\n"), "{text}");
    }
}

//! The state of a store as metrics, in the text format of OpenMetrics.
//!
//! [`table`] has every metric with its name, unit and meaning. docs/metrics.md describes the same
//! list for people; a test compares the two. The official client library encodes the metrics, and
//! adds the suffixes of names (`_total`, units).
//!
//! Counters are the totals of all processes across owners ([`larder_store::totals`]). Gauges are
//! of this moment.

mod table;
mod wear;

use std::fmt;
use std::path::Path;

use larder_disk::health::Health;
use larder_engine::StoreError;
use larder_store::share::{View, view};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, text::encode};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::Registry;

use table::{Metric, Sample, Value};
use wear::wear;

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
        Value::Gauge(value) => encoder.encode_gauge(value),
        Value::Times(buckets) => {
            let bounds = larder_base::latency::BOUNDS_NS.into_iter();
            let seconds = bounds.map(|ns| ns as f64 / 1e9).chain([f64::MAX]);
            let counts = buckets.counts.iter().copied().chain(std::iter::repeat(0));
            let counts: Vec<(f64, u64)> = seconds.zip(counts).collect();
            let sum = buckets.sum_ns as f64 / 1e9;
            encoder.encode_histogram::<[(&str, &str); 0]>(sum, buckets.count(), &counts, None)
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
        Ok(view) => Ok(text_of(Some(&view), &wear(path))),
        Err(
            StoreError::NotServed { .. }
            | StoreError::ServesAnother { .. }
            | StoreError::Unanswered { .. }
            | StoreError::OwnerGone
            | StoreError::Locked { .. },
        ) => Ok(text_of(None, &wear(path))),
        Err(error) => Err(error),
    }
}

/// The metrics of an owner's answer; `None` if there is none.
fn text_of(view: Option<&View>, drives: &[(String, Health)]) -> String {
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
            Some(Value::Count(_)) => MetricType::Counter,
            Some(Value::Times(_)) => MetricType::Histogram,
            Some(Value::Gauge(_)) | None => MetricType::Gauge,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::BTreeMap;

    use super::*;

    const PAGE: &str = include_str!("../../../docs/metrics.md");

    /// Names and labels in the page's tables: `name{label}`, as a query names them.
    fn documented() -> BTreeMap<String, String> {
        let rows = PAGE
            .lines()
            .filter_map(|line| line.strip_prefix("| `larder_"));
        rows.map(|row| {
            let (name, rest) = row.split_once('`').unwrap();
            let meaning = rest.trim_start_matches(" |").trim().to_owned();
            (format!("larder_{name}"), meaning)
        })
        .collect()
    }

    /// The same of an export.
    fn exported(text: &str) -> BTreeMap<String, String> {
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        samples
            .map(|line| {
                let name = line.rsplit_once(' ').unwrap().0;
                let (name, labels) = name.split_once('{').unwrap_or((name, ""));
                let name = ["_bucket", "_sum", "_count"]
                    .iter()
                    .find_map(|suffix| name.strip_suffix(suffix))
                    .unwrap_or(name);
                let labels = labels.trim_end_matches('}').split(',');
                let labels: Vec<&str> = labels
                    .filter_map(|label| label.split_once('=').map(|(key, _)| key))
                    .filter(|key| *key != "le")
                    .collect();
                match labels.is_empty() {
                    true => (name.to_owned(), String::new()),
                    false => (format!("{name}{{{}}}", labels.join(",")), String::new()),
                }
            })
            .collect()
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
        let exported = exported(&text_of(Some(&view), &[("nvme0n1".to_owned(), drive)]));
        let documented = documented();
        for name in exported.keys() {
            assert!(
                documented.contains_key(name),
                "docs/metrics.md has no {name}"
            );
        }
        for (name, meaning) in &documented {
            assert!(exported.contains_key(name), "{name} is not exported");
            assert!(
                !meaning.is_empty(),
                "docs/metrics.md: {name} without a meaning"
            );
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
        let text = text_of(None, &[]);
        assert!(text.contains("larder_up 0.0\n"), "{text}");
        assert!(
            text.contains("larder_store_state{state=\"unserved\"} 1.0\n"),
            "{text}"
        );
        assert!(!text.contains("larder_page_hits_total"), "{text}");
        assert!(text.ends_with("# EOF\n"), "{text}");
    }
}

//! Every metric: its name, unit and meaning, and its samples.

use larder_base::latency::BOUNDS_NS;
use larder_core::ages::{Ages, BOUNDS_S};
use larder_core::counters::{self, Counted};
use larder_disk::health::Health;
use larder_engine::Stats;
use larder_store::beneath::BeneathReport;
use larder_store::curve::{CurveReport, FACTORS};
use larder_store::inventory::Usage;
use larder_store::share::{Report, View, VolumeDamage, VolumeState};
use larder_store::spaces::{AgesOfSpaces, Spaces};
use larder_store::totals::Totals;
use prometheus_client::registry::Unit;

use super::wear::Drive;
use super::{NAMESPACES_MAX, OTHER};

/// Labels with their values.
type Labels = Vec<(&'static str, String)>;

/// A metric and its samples.
#[derive(Debug)]
pub(super) struct Metric {
    /// Without the suffixes of units and counters.
    pub name: &'static str,
    pub help: &'static str,
    pub unit: Option<Unit>,
    /// All of one kind.
    pub samples: Vec<Sample>,
}

#[derive(Debug)]
pub(super) struct Sample {
    pub labels: Labels,
    pub value: Value,
}

#[derive(Debug)]
pub(super) enum Value {
    /// Of a counter.
    Count(u64),
    /// Of a counter of seconds.
    Seconds(f64),
    Gauge(f64),
    /// The observations in each bucket with its upper bound, the last one infinite, and their sum.
    Histogram {
        counts: Vec<(f64, u64)>,
        sum: f64,
    },
}

/// The states of a store. One of them is 1, the others are 0.
const STATES: [&str; 4] = ["serving", "read_only", "degraded", "unserved"];

/// Metrics under construction.
struct Table(Vec<Metric>);

impl Table {
    /// Adds a sample to the last metric, if that is its own, or to a new one. `metric` is the name
    /// in full, with its labels, but without the suffix of counters.
    fn sample(
        &mut self,
        metric: &'static str,
        help: &'static str,
        values: &[&str],
        value: impl Into<Value>,
    ) {
        let (name, labels) = metric.split_once('{').unwrap_or((metric, ""));
        let labels = labels.trim_end_matches('}').split(',');
        let labels = labels.filter(|label| !label.is_empty()).zip(values);
        let labels = labels.map(|(label, value)| (label, (*value).to_owned()));
        let sample = Sample {
            labels: labels.collect(),
            value: value.into(),
        };
        let (name, unit) = match name.rsplit_once('_') {
            Some((name, "bytes")) => (name, Some(Unit::Bytes)),
            Some((name, "seconds")) => (name, Some(Unit::Seconds)),
            Some((name, "ratio")) => (name, Some(Unit::Other("ratio".to_owned()))),
            _ => (name, None),
        };
        match self.0.last_mut().filter(|last| last.name == name) {
            Some(metric) => metric.samples.push(sample),
            None => self.0.push(Metric {
                name,
                help,
                unit,
                samples: vec![sample],
            }),
        }
    }

    /// Adds a sample for each value of one label.
    fn by<const N: usize>(
        &mut self,
        metric: &'static str,
        help: &'static str,
        values: [(&str, Value); N],
    ) {
        for (of, value) in values {
            self.sample(metric, help, &[of], value);
        }
    }
}

impl From<counters::Value<'_>> for Value {
    fn from(value: counters::Value<'_>) -> Value {
        match value {
            counters::Value::Count(count) => Value::Count(count),
            counters::Value::Times(times) => {
                let bounds = BOUNDS_NS.map(|ns| ns as f64 / 1e9);
                Value::histogram(&bounds, &times.counts, times.sum_ns as f64 / 1e9)
            }
        }
    }
}

impl From<&Ages> for Value {
    fn from(ages: &Ages) -> Value {
        let bounds = BOUNDS_S.map(|bound| bound as f64);
        Value::histogram(&bounds, &ages.counts, ages.sum_s as f64)
    }
}

impl Value {
    fn histogram(bounds: &[f64], counts: &[u64], sum: f64) -> Value {
        let bounds = bounds.iter().copied().chain([f64::INFINITY]);
        let counts = counts.iter().copied().chain(std::iter::repeat(0));
        Value::Histogram {
            counts: bounds.zip(counts).collect(),
            sum,
        }
    }
}

fn gauge(value: u64) -> Value {
    Value::Gauge(value as f64)
}

/// Adds metrics without labels.
macro_rules! samples {
    ($table:ident: $($name:literal, $help:literal: $value:expr;)*) => {
        $($table.sample($name, $help, &[], $value);)*
    };
}

/// All metrics of an owner's answer. Without an answer: the metrics of a store without an owner.
pub(super) fn metrics(view: Option<&View>, drives: &[Drive]) -> Vec<Metric> {
    let mut table = Table(Vec::new());
    table.by(
        "larder_build_info{version}",
        "Release of the exporter",
        [(env!("CARGO_PKG_VERSION"), gauge(1))],
    );
    samples! { table:
        "larder_up", "Whether an owner serves the store and answers":
            gauge(u64::from(view.is_some()));
    }
    let state = view.map_or("unserved", state);
    table.by(
        "larder_store_state{state}",
        "State of the store, 1 for the present one",
        STATES.map(|of| (of, gauge(u64::from(of == state)))),
    );
    if let Some(view) = view {
        owner(&mut table, view);
        answers(&mut table, &view.report);
        content(&mut table, &view.report.stats);
        curve(&mut table, &view.report.curve);
        namespaces(&mut table, view);
        reads(&mut table, &view.report.totals.spaces);
        ages(&mut table, &view.report.totals.ages);
        totals(&mut table, &view.report.totals);
        if let Some(l4) = &view.report.beneath {
            remote(&mut table, l4);
        }
    }
    wear(&mut table, drives);
    table.0
}

fn state(view: &View) -> &'static str {
    let stats = &view.report.stats;
    if !stats.read_only_volumes.is_empty() {
        "read_only"
    } else if stats.unreadable_segments > 0
        || view.report.quotas.fault.is_some()
        || !view.report.displaced_volumes.is_empty()
        || is_late(&view.report)
        || { view.report.damaged_volumes.iter() }
            .any(|volume| volume.damage != VolumeDamage::AtOpen)
    {
        "degraded"
    } else {
        "serving"
    }
}

/// Whether a volume is slow or hung.
fn is_late(report: &Report) -> bool {
    let mut volumes = report.answering_volumes.iter();
    volumes.any(|volume| volume.state != VolumeState::Answering)
}

/// How each volume answers.
fn answers(table: &mut Table, report: &Report) {
    let volumes = &report.answering_volumes;
    let paths = volumes.iter().map(|volume| volume.path.to_string_lossy());
    let paths: Vec<_> = paths.collect();
    for (volume, path) in volumes.iter().zip(&paths) {
        for state in VolumeState::ALL {
            table.sample(
                "larder_volume_state{volume,state}",
                "How a volume answers, 1 for the present state",
                &[path, state.as_str()],
                gauge(u64::from(state == volume.state)),
            );
        }
    }
    for (volume, path) in volumes.iter().zip(&paths) {
        table.sample(
            "larder_volume_oldest_operation_seconds{volume}",
            "Age of the oldest operation of a volume that has not ended, over all processes",
            &[path],
            Value::Gauge(volume.oldest_seconds),
        );
    }
    for (volume, path) in volumes.iter().zip(&paths) {
        table.sample(
            "larder_volume_p99_seconds{volume}",
            "Bound of 99 % of a volume's reads and writes of the last 10 s, over all processes",
            &[path],
            Value::Gauge(volume.p99_seconds),
        );
    }
}

/// The owner and its clients.
fn owner(table: &mut Table, view: &View) {
    let report = &view.report;
    let (protocol, format) = (&report.protocol, report.format_version.to_string());
    table.sample(
        "larder_owner_info{version,protocol,format}",
        "Release, catalog protocol and on-disk format of the owner",
        &[&protocol.release, &protocol.newest.to_string(), &format],
        gauge(1),
    );
    samples! { table:
        "larder_owner_start_time_seconds",
        "When the owner opened the store, since 1970; a change is a takeover":
            Value::Gauge(report.started_unix_s);
        "larder_owner_resident_bytes", "Resident memory of the owner's process":
            gauge(report.rss_bytes);
        "larder_write_budget_bytes", "Bytes that the store may write a day; 0 without a budget":
            gauge(report.settings.write_budget.bytes_a_day(report.stats.capacity_bytes)
                .unwrap_or(0));
        "larder_clients", "Clients attached": gauge(using(view));
        "larder_lingering_clients",
        "Clients that have ended, and whose writes may still be in flight":
            gauge(u64::from(report.lingering));
        "larder_reads_in_flight", "Pages that clients are reading": gauge(report.reads_in_flight);
        "larder_puts_in_flight", "Puts of clients in progress": gauge(report.puts_in_flight);
        "larder_adrift_pages", "Pages of puts that were aborted because their client was silent":
            gauge(report.pages_adrift);
        "larder_stopped_clients",
        "Clients that have not run for 5 s, in the middle of reads or puts":
            gauge(report.stopped_clients.len() as u64);
        "larder_displaced_volumes",
        "Volumes whose paths no longer lead to the files that the owner serves":
            gauge(report.displaced_volumes.len() as u64);
    }
    for damage in VolumeDamage::ALL {
        let volumes = report.damaged_volumes.iter();
        let volumes = volumes.filter(|volume| volume.damage == damage).count();
        table.sample(
            "larder_damaged_volumes{cause}",
            "Volumes that do not hold what the store wrote, by cause",
            &[damage.as_str()],
            gauge(volumes as u64),
        );
    }
    quotas(table, report);
    samples! { table:
        "larder_compactions", "Processes that compact the store":
            gauge(u64::from(report.compactions));
        "larder_shared_reads_used_bytes", "Memory in use through which processes share reads":
            gauge(report.staging.used_bytes);
    }
}

/// The quotas, and their use.
fn quotas(table: &mut Table, report: &Report) {
    for of in &report.quotas.groups {
        let group = of.quota.group.to_string();
        table.sample(
            "larder_quota_stored_bytes{group}",
            "Bytes of the pages of a group with a quota, as stored",
            &[group.as_str()],
            gauge(of.stored_bytes),
        );
    }
    for of in &report.quotas.groups {
        let group = of.quota.group.to_string();
        table.sample(
            "larder_quota_min_bytes{group}",
            "Bytes below which eviction takes no page of the group",
            &[group.as_str()],
            gauge(of.quota.min_bytes),
        );
    }
    for of in &report.quotas.groups {
        let group = of.quota.group.to_string();
        if let Some(max) = of.quota.max_bytes {
            table.sample(
                "larder_quota_max_bytes{group}",
                "Most bytes that the group takes",
                &[group.as_str()],
                gauge(max),
            );
        }
    }
    for of in &report.quotas.groups {
        let group = of.quota.group.to_string();
        if let Some(age) = of.quota.max_age_s {
            table.sample(
                "larder_quota_max_age_seconds{group}",
                "How long pages of the group are served after their put",
                &[group.as_str()],
                gauge(age),
            );
        }
    }
    if let Some(removes) = report.quotas.removes_old_pages {
        samples! { table:
            "larder_removes_old_pages", "1 if pages older than their limit are removed":
                gauge(u64::from(removes));
        }
    }
}

/// The processes that use the store, without its owner.
fn using(view: &View) -> u64 {
    (view.report.processes.len() as u64).saturating_sub(1)
}

/// The hit rate at other sizes.
fn curve(table: &mut Table, curve: &CurveReport) {
    if curve.spaces.is_empty() {
        return;
    }
    let total = curve.total();
    for (name, meaning, rates) in [
        (
            "larder_curve_hit_ratio{size}",
            "Part of the pages asked for by lookups that an LRU store of this many times the \
             present size would have had",
            &total.hit_rates,
        ),
        (
            "larder_curve_own_hit_ratio{size}",
            "Part of the pages asked for by lookups that a store of this many times the present \
             size would have had in the order that this one follows",
            &total.own_hit_rates,
        ),
    ] {
        for (factor, rate) in FACTORS.iter().zip(rates) {
            table.sample(name, meaning, &[&factor.to_string()], Value::Gauge(*rate));
        }
    }
}

/// The content of the store, and its room.
fn content(table: &mut Table, stats: &Stats) {
    samples! { table:
        "larder_pages", "Pages in the store": gauge(stats.pages);
        "larder_live_bytes", "Bytes of those pages": gauge(stats.live_bytes);
        "larder_taken_bytes", "Usable bytes that pages take": gauge(stats.taken_bytes);
        "larder_usable_bytes", "Most bytes that pages may take": gauge(stats.usable_bytes);
        "larder_capacity_bytes", "Bytes of all volumes together": gauge(stats.capacity_bytes);
        "larder_pinned_pages", "Pinned pages": gauge(stats.pinned_pages);
        "larder_pinned_bytes", "Bytes of pinned pages": gauge(stats.pinned_bytes);
        "larder_leased_bytes", "Bytes of pages under a lease": gauge(stats.leased_bytes);
        "larder_unproven_pages",
        "Pages that recovery found without proof and that no read has verified":
            gauge(stats.unproven);
    }
    let segments = [
        ("free", stats.free_segments),
        ("open", stats.open_segments),
        ("sealed", stats.sealed_segments),
        ("reclaiming", stats.reclaiming_segments),
        ("unreadable", stats.unreadable_segments),
    ];
    let segments = segments.map(|(state, segments)| (state, gauge(segments)));
    table.by("larder_segments{state}", "Segments by state", segments);
    samples! { table:
        "larder_read_only_volumes", "Volumes in read-only service":
            gauge(stats.read_only_volumes.len() as u64);
        "larder_index_bytes", "RAM of the index": gauge(stats.index_bytes);
    }
}

fn namespaces(table: &mut Table, view: &View) {
    let (named, further) = view.spaces.split_at(view.spaces.len().min(NAMESPACES_MAX));
    let mut rows: Vec<([String; 2], [u64; 3])> = Vec::new();
    let counts = |usage: &Usage| [usage.pages, usage.bytes, usage.plain_bytes];
    for space in named {
        let model = space.namespace.as_ref().map(|of| of.fields().model.clone());
        let labels = [space.usage.namespace.to_string(), model.unwrap_or_default()];
        rows.push((labels, counts(&space.usage)));
    }
    if !further.is_empty() {
        let further = further.iter().map(|space| counts(&space.usage));
        let sum = further.fold([0; 3], |sum, of| [0, 1, 2].map(|at| sum[at] + of[at]));
        rows.push(([OTHER.to_owned(), String::new()], sum));
    }
    samples! { table:
        "larder_namespaces", "Namespaces with pages": gauge(view.spaces.len() as u64);
    }
    let metrics = [
        (
            "larder_namespace_pages{kv_namespace,model}",
            "Pages of a namespace",
        ),
        (
            "larder_namespace_bytes{kv_namespace,model}",
            "Bytes of the pages of a namespace",
        ),
        (
            "larder_namespace_plain_bytes{kv_namespace,model}",
            "Bytes of the pages of a namespace without a codec",
        ),
    ];
    for (at, (metric, help)) in metrics.into_iter().enumerate() {
        for ([name, model], counts) in &rows {
            table.sample(metric, help, &[name, model], gauge(counts[at]));
        }
    }
}

/// Hits, misses and tokens by namespace.
fn reads(table: &mut Table, spaces: &Spaces) {
    for (name, reads) in spaces.iter() {
        table.sample(
            "larder_namespace_page_hits{kv_namespace}",
            "Pages of a namespace that gets returned, read and verified",
            &[name],
            Value::Count(reads.hits),
        );
    }
    for (name, reads) in spaces.iter() {
        for (row, value) in reads.misses.rows() {
            table.sample(
                "larder_namespace_page_misses{kv_namespace,reason}",
                "Pages of a namespace that gets did not return, by reason",
                &[name, row.value],
                value,
            );
        }
    }
    for (name, reads) in spaces.iter() {
        table.sample(
            "larder_requests{kv_namespace}",
            "Requests that asked for tokens",
            &[name],
            Value::Count(reads.tokens.requests),
        );
    }
    for (name, reads) in spaces.iter() {
        let results = [
            ("found", reads.tokens.found),
            ("not_found", reads.tokens.not_found),
        ];
        for (result, tokens) in results {
            table.sample(
                "larder_lookup_tokens{kv_namespace,result}",
                "Tokens that requests asked for, by result",
                &[name, result],
                Value::Count(tokens),
            );
        }
    }
    for (name, reads) in spaces.iter() {
        table.sample(
            "larder_served_tokens{kv_namespace}",
            "Tokens whose pages requests read from the store",
            &[name],
            Value::Count(reads.tokens.served),
        );
    }
    for (name, reads) in spaces.iter() {
        table.sample(
            "larder_saved_prefill_seconds{kv_namespace}",
            "Time that computing these tokens would have taken, where the rate is known",
            &[name],
            Value::Seconds(reads.tokens.saved_ms as f64 / 1e3),
        );
    }
}

/// Ages of pages by namespace.
fn ages(table: &mut Table, spaces: &AgesOfSpaces) {
    for (name, ages) in spaces.iter() {
        table.sample(
            "larder_use_age_seconds{kv_namespace}",
            "Time from the put of a page to each read of it",
            &[name],
            &ages.used,
        );
    }
    for (name, ages) in spaces.iter() {
        table.sample(
            "larder_eviction_age_seconds{kv_namespace}",
            "Time from the put of a page to its eviction",
            &[name],
            &ages.evicted,
        );
    }
}

/// Counters of the L4, each with the value of its label.
const L4_OUTGOING: [(&str, &str); 6] = [
    ("published", "published_runs"),
    ("present", "present_runs"),
    ("dropped_queue", "dropped_queue_runs"),
    ("dropped_budget", "dropped_budget_runs"),
    ("dropped_absent", "dropped_absent_runs"),
    ("dropped_failed", "dropped_failed_runs"),
];
const L4_INCOMING: [(&str, &str); 6] = [
    ("fetched", "fetched_runs"),
    ("faulty", "faulty_runs"),
    ("gone", "gone_runs"),
    ("late", "late_runs"),
    ("failed", "failed_fetches"),
    ("too_slow", "too_slow_runs"),
];
const L4_PAGES: [(&str, &str); 3] = [
    ("stored", "stored_pages"),
    ("refused", "refused_pages"),
    ("faulty", "faulty_pages"),
];

/// The remote beneath the store.
fn remote(table: &mut Table, l4: &BeneathReport) {
    let of = |name: &str| l4.counts.get(name).copied().unwrap_or_default();
    let count = |name: &str| Value::Count(of(name));
    samples! { table:
        "larder_l4_up", "Whether requests are made to the remote": gauge(u64::from(l4.works));
        "larder_l4_known_runs", "Runs of the remote whose names are known":
            gauge(of("known_runs"));
    }
    table.by(
        "larder_l4_outgoing_runs{outcome}",
        "Runs that were to be published, by outcome",
        L4_OUTGOING.map(|(outcome, name)| (outcome, count(name))),
    );
    table.by(
        "larder_l4_incoming_runs{outcome}",
        "Runs that lookups missed and the remote has, by outcome",
        L4_INCOMING.map(|(outcome, name)| (outcome, count(name))),
    );
    table.by(
        "larder_l4_pages{outcome}",
        "Pages of fetched runs, by outcome",
        L4_PAGES.map(|(outcome, name)| (outcome, count(name))),
    );
    samples! { table:
        "larder_l4_unreadable_runs",
        "Looks at runs, and reads of them, that failed while the remote answered":
            count("unreadable_runs");
        "larder_l4_published_bytes", "Bytes of published objects": count("published_bytes");
        "larder_l4_fetched_bytes", "Bytes of fetched objects": count("fetched_bytes");
        "larder_l4_search_requests", "Requests that searched for prefixes without a known run":
            count("search_requests");
        "larder_l4_searched_runs", "Runs found by searches": count("searched_runs");
    }
}

/// The reports of the drives.
fn wear(table: &mut Table, drives: &[Drive]) {
    for (name, health) in drives {
        let is_readable = gauge(u64::from(health.is_some()));
        table.sample(
            "larder_drive_readable{drive}",
            "Whether the drive's report can be read",
            &[name],
            is_readable,
        );
    }
    let ratio = |percent: u8| Value::Gauge(f64::from(percent) / 100.0);
    let mut of = |metric, help, value: &dyn Fn(&Health) -> Option<Value>| {
        for (name, health) in drives {
            if let Some(value) = health.as_ref().and_then(value) {
                table.sample(metric, help, &[name], value);
            }
        }
    };
    of(
        "larder_drive_critical{drive}",
        "Whether the drive reports a failure of itself",
        &|health| Some(gauge(u64::from(health.is_critical))),
    );
    of(
        "larder_drive_used_ratio{drive}",
        "Part of the drive's rated life that is used",
        &|health| health.used_percent.map(ratio),
    );
    of(
        "larder_drive_spare_ratio{drive}",
        "Part of the drive's spare blocks that is left",
        &|health| health.spare_percent.map(|(left, _)| ratio(left)),
    );
    of(
        "larder_drive_written_bytes{drive}",
        "Bytes written to the drive in its life, by all programs",
        &|health| health.written_bytes.map(Value::Count),
    );
    of(
        "larder_drive_media_errors{drive}",
        "Errors of the drive's medium in its life",
        &|health| health.media_errors.map(Value::Count),
    );
}

/// Counters of all processes, across owners.
fn totals(table: &mut Table, totals: &Totals) {
    let rows = totals.counts.rows().into_iter();
    let rows = rows.chain(totals.store.rows());
    for (counter, value) in rows.chain(totals.latencies.rows()) {
        table.sample(counter.metric, counter.help, &[counter.value], value);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use larder_engine::format::Fingerprint;
    use larder_store::inventory::Space;

    use super::*;

    /// An answer of an owner of so many namespaces.
    pub(in crate::metrics) fn view(spaces: usize) -> View {
        let space = |number: usize| {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&number.to_le_bytes());
            let usage = Usage {
                namespace: Fingerprint::from_bytes(bytes),
                pages: 1,
                bytes: 4096,
                plain_bytes: 4096,
            };
            Space {
                usage,
                namespace: None,
            }
        };
        let mut report = Report {
            beneath: Some(BeneathReport::default()),
            ..Report::default()
        };
        let reads = r#"{"other": {"pages_hit": 1}}"#;
        let volume =
            r#"{"path": "/v", "state": "slow", "oldest_seconds": 0.0, "p99_seconds": 1.0}"#;
        report.answering_volumes = vec![serde_json::from_str(volume).expect("it is JSON")];
        report.totals.spaces = serde_json::from_str(reads).expect("it is JSON");
        report.totals.ages = serde_json::from_str(r#"{"other": {}}"#).expect("it is JSON");
        report.curve.spaces = vec![larder_store::curve::SpaceCurve {
            pages_requested: 1,
            hit_rates: vec![0.5; FACTORS.len()],
            own_hit_rates: vec![0.5; FACTORS.len()],
            read_bytes: vec![1; FACTORS.len()],
            ..Default::default()
        }];
        let quota = r#"{"kind": "model", "name": "m", "min_bytes": 1, "max_bytes": 2,
            "max_age_s": 3, "stored_bytes": 1, "namespaces": 1}"#;
        report.quotas.removes_old_pages = Some(true);
        report.quotas.groups = vec![serde_json::from_str(quota).expect("it is JSON")];
        View {
            report,
            spaces: (0..spaces).map(space).collect(),
        }
    }
}

//! Every metric: its name, unit and meaning, and its samples.

use larder_base::latency::Buckets;
use larder_disk::health::Health;
use larder_engine::Stats;
use larder_store::beneath::BeneathReport;
use larder_store::share::View;
use larder_store::spaces::Spaces;
use larder_store::totals::Totals;
use prometheus_client::registry::Unit;

use super::{NAMESPACES_MAX, OTHER};
use crate::misses::REASONS;

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
    Gauge(f64),
    /// Of a histogram, in seconds.
    Times(Buckets),
}

/// The states of a store. One of them is 1, the others are 0.
const STATES: [&str; 4] = ["serving", "read_only", "degraded", "unserved"];

/// Metrics under construction.
struct Table(Vec<Metric>);

impl Table {
    fn add(
        &mut self,
        name: &'static str,
        help: &'static str,
        unit: Option<Unit>,
        all: Vec<Sample>,
    ) {
        self.0.push(Metric {
            name,
            help,
            unit,
            samples: all,
        });
    }

    fn gauge(&mut self, name: &'static str, help: &'static str, value: u64) {
        self.add(name, help, None, vec![gauge(Vec::new(), value)]);
    }

    fn bytes(&mut self, name: &'static str, help: &'static str, value: u64) {
        self.add(
            name,
            help,
            Some(Unit::Bytes),
            vec![gauge(Vec::new(), value)],
        );
    }

    fn counter(&mut self, name: &'static str, help: &'static str, value: u64) {
        self.add(name, help, None, vec![count(Vec::new(), value)]);
    }

    fn bytes_counter(&mut self, name: &'static str, help: &'static str, value: u64) {
        self.add(
            name,
            help,
            Some(Unit::Bytes),
            vec![count(Vec::new(), value)],
        );
    }

    fn times(&mut self, name: &'static str, help: &'static str, of: &Buckets) {
        let sample = Sample {
            labels: Vec::new(),
            value: Value::Times(of.clone()),
        };
        self.add(name, help, Some(Unit::Seconds), vec![sample]);
    }
}

fn gauge(labels: Labels, value: u64) -> Sample {
    let value = Value::Gauge(value as f64);
    Sample { labels, value }
}

fn count(labels: Labels, value: u64) -> Sample {
    let value = Value::Count(value);
    Sample { labels, value }
}

/// A sample for each value of one label.
fn by<const N: usize>(
    label: &'static str,
    values: [(&'static str, u64); N],
    sample: fn(Labels, u64) -> Sample,
) -> Vec<Sample> {
    let samples = values.into_iter();
    samples
        .map(|(of, value)| sample(vec![(label, of.to_owned())], value))
        .collect()
}

/// All metrics of an owner's answer. Without an answer: the metrics of a store without an owner.
pub(super) fn metrics(view: Option<&View>, drives: &[(String, Health)]) -> Vec<Metric> {
    let mut table = Table(Vec::new());
    let own = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
    table.add(
        "larder_build_info",
        "Release of the exporter",
        None,
        vec![gauge(own, 1)],
    );
    table.gauge(
        "larder_up",
        "Whether an owner serves the store and answers",
        u64::from(view.is_some()),
    );
    let state = view.map_or("unserved", state);
    let states = STATES.map(|of| (of, u64::from(of == state)));
    table.add(
        "larder_store_state",
        "State of the store, 1 for the present one",
        None,
        by("state", states, gauge),
    );
    if let Some(view) = view {
        owner(&mut table, view);
        content(&mut table, &view.report.stats);
        namespaces(&mut table, view);
        reads(&mut table, &view.report.totals.spaces);
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
    } else if stats.unreadable_segments > 0 || !view.report.displaced_volumes.is_empty() {
        "degraded"
    } else {
        "serving"
    }
}

/// The owner and its clients.
fn owner(table: &mut Table, view: &View) {
    let report = &view.report;
    let info = vec![
        ("version", report.protocol.release.clone()),
        ("protocol", report.protocol.newest.to_string()),
        ("format", report.format_version.to_string()),
    ];
    table.add(
        "larder_owner_info",
        "Release, catalog protocol and on-disk format of the owner",
        None,
        vec![gauge(info, 1)],
    );
    let started = Sample {
        labels: Vec::new(),
        value: Value::Gauge(report.started_unix_s),
    };
    table.add(
        "larder_owner_start_time",
        "When the owner opened the store, since 1970; a change is a takeover",
        Some(Unit::Seconds),
        vec![started],
    );
    table.bytes(
        "larder_owner_resident",
        "Resident memory of the owner's process",
        report.rss_bytes,
    );
    table.gauge("larder_clients", "Clients attached", using(view));
    table.gauge(
        "larder_lingering_clients",
        "Clients that have ended, and whose writes may still be in flight",
        u64::from(report.lingering),
    );
    table.gauge(
        "larder_reads_in_flight",
        "Pages that clients are reading",
        report.reads_in_flight,
    );
    table.gauge(
        "larder_puts_in_flight",
        "Puts of clients in progress",
        report.puts_in_flight,
    );
    table.gauge(
        "larder_adrift_pages",
        "Pages of puts that were aborted because their client was silent",
        report.pages_adrift,
    );
    table.gauge(
        "larder_displaced_volumes",
        "Volumes whose paths no longer lead to the files that the owner serves",
        report.displaced_volumes.len() as u64,
    );
    table.gauge(
        "larder_compactions",
        "Processes that compact the store",
        u64::from(report.compactions),
    );
    table.bytes(
        "larder_shared_reads_used",
        "Memory in use through which processes share reads",
        report.staging.used_bytes,
    );
}

/// The processes that use the store, without its owner.
fn using(view: &View) -> u64 {
    (view.report.processes.len() as u64).saturating_sub(1)
}

/// The content of the store, and its room.
fn content(table: &mut Table, stats: &Stats) {
    table.gauge("larder_pages", "Pages in the store", stats.pages);
    table.bytes("larder_live", "Bytes of those pages", stats.live_bytes);
    table.bytes(
        "larder_taken",
        "Usable bytes that pages take",
        stats.taken_bytes,
    );
    table.bytes(
        "larder_usable",
        "Most bytes that pages may take",
        stats.usable_bytes,
    );
    table.bytes(
        "larder_capacity",
        "Bytes of all volumes together",
        stats.capacity_bytes,
    );
    table.bytes(
        "larder_leased",
        "Bytes of pages under a lease",
        stats.leased_bytes,
    );
    table.gauge(
        "larder_unproven_pages",
        "Pages that recovery found without proof and that no read has verified",
        stats.unproven,
    );
    let segments = [
        ("free", stats.free_segments),
        ("open", stats.open_segments),
        ("sealed", stats.sealed_segments),
        ("reclaiming", stats.reclaiming_segments),
        ("unreadable", stats.unreadable_segments),
    ];
    table.add(
        "larder_segments",
        "Segments by state",
        None,
        by("state", segments, gauge),
    );
    table.gauge(
        "larder_read_only_volumes",
        "Volumes in read-only service",
        stats.read_only_volumes.len() as u64,
    );
    table.bytes("larder_index", "RAM of the index", stats.index_bytes);
}

fn namespaces(table: &mut Table, view: &View) {
    let (named, further) = view.spaces.split_at(view.spaces.len().min(NAMESPACES_MAX));
    let mut rows: Vec<(Labels, u64, u64)> = Vec::new();
    for space in named {
        let model = space.namespace.as_ref().map(|of| of.fields().model.clone());
        let labels = vec![
            ("kv_namespace", space.usage.namespace.to_string()),
            ("model", model.unwrap_or_default()),
        ];
        rows.push((labels, space.usage.pages, space.usage.bytes));
    }
    if !further.is_empty() {
        let labels = vec![("kv_namespace", OTHER.to_owned()), ("model", String::new())];
        let pages = further.iter().map(|space| space.usage.pages).sum();
        let bytes = further.iter().map(|space| space.usage.bytes).sum();
        rows.push((labels, pages, bytes));
    }
    table.gauge(
        "larder_namespaces",
        "Namespaces with pages",
        view.spaces.len() as u64,
    );
    let pages = rows
        .iter()
        .map(|(labels, pages, _)| gauge(labels.clone(), *pages));
    table.add(
        "larder_namespace_pages",
        "Pages of a namespace",
        None,
        pages.collect(),
    );
    let bytes = rows
        .iter()
        .map(|(labels, _, bytes)| gauge(labels.clone(), *bytes));
    table.add(
        "larder_namespace",
        "Bytes of the pages of a namespace",
        Some(Unit::Bytes),
        bytes.collect(),
    );
}

/// Hits and misses by namespace.
fn reads(table: &mut Table, spaces: &Spaces) {
    let label = |name: &str| ("kv_namespace", name.to_owned());
    let hits = spaces
        .iter()
        .map(|(name, reads)| count(vec![label(name)], reads.hits));
    table.add(
        "larder_namespace_page_hits",
        "Pages of a namespace that gets returned, read and verified",
        None,
        hits.collect(),
    );
    let misses = spaces.iter().flat_map(|(name, reads)| {
        REASONS.map(|reason| {
            let labels = vec![label(name), ("reason", reason.label.to_owned())];
            count(labels, reason.of(&reads.misses))
        })
    });
    table.add(
        "larder_namespace_page_misses",
        "Pages of a namespace that gets did not return, by reason",
        None,
        misses.collect(),
    );
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
    let up = "Whether requests are made to the remote";
    table.gauge("larder_l4_up", up, u64::from(l4.works));
    let known = "Runs of the remote whose names are known";
    table.gauge("larder_l4_known_runs", known, of("known_runs"));
    let outgoing = L4_OUTGOING.map(|(outcome, name)| (outcome, of(name)));
    let help = "Runs that were to be published, by outcome";
    let samples = by("outcome", outgoing, count);
    table.add("larder_l4_outgoing_runs", help, None, samples);
    let incoming = L4_INCOMING.map(|(outcome, name)| (outcome, of(name)));
    let help = "Runs that lookups missed and the remote has, by outcome";
    let samples = by("outcome", incoming, count);
    table.add("larder_l4_incoming_runs", help, None, samples);
    let pages = L4_PAGES.map(|(outcome, name)| (outcome, of(name)));
    let help = "Pages of fetched runs, by outcome";
    table.add("larder_l4_pages", help, None, by("outcome", pages, count));
    let help = "Looks at runs, and reads of them, that failed while the remote answered";
    table.counter("larder_l4_unreadable_runs", help, of("unreadable_runs"));
    let help = "Bytes of published objects";
    table.bytes_counter("larder_l4_published", help, of("published_bytes"));
    let help = "Bytes of fetched objects";
    table.bytes_counter("larder_l4_fetched", help, of("fetched_bytes"));
    let help = "Requests that searched for prefixes without a known run";
    table.counter("larder_l4_search_requests", help, of("search_requests"));
    let help = "Runs found by searches";
    table.counter("larder_l4_searched_runs", help, of("searched_runs"));
}

/// The reports of the drives.
fn wear(table: &mut Table, drives: &[(String, Health)]) {
    let of = |value: &dyn Fn(&Health) -> Option<Value>| -> Vec<Sample> {
        let samples = drives.iter().filter_map(|(name, health)| {
            Some(Sample {
                labels: vec![("drive", name.clone())],
                value: value(health)?,
            })
        });
        samples.collect()
    };
    let ratio = |percent: u8| Value::Gauge(f64::from(percent) / 100.0);
    table.add(
        "larder_drive_critical",
        "Whether the drive reports a failure of itself",
        None,
        of(&|health| Some(Value::Gauge(f64::from(u8::from(health.is_critical))))),
    );
    table.add(
        "larder_drive_used",
        "Part of the drive's rated life that is used",
        Some(Unit::Other("ratio".to_owned())),
        of(&|health| health.used_percent.map(ratio)),
    );
    table.add(
        "larder_drive_spare",
        "Part of the drive's spare blocks that is left",
        Some(Unit::Other("ratio".to_owned())),
        of(&|health| health.spare_percent.map(|(left, _)| ratio(left))),
    );
    table.add(
        "larder_drive_written",
        "Bytes written to the drive in its life, by all programs",
        Some(Unit::Bytes),
        of(&|health| health.written_bytes.map(Value::Count)),
    );
    table.add(
        "larder_drive_media_errors",
        "Errors of the drive's medium in its life",
        None,
        of(&|health| health.media_errors.map(Value::Count)),
    );
}

/// Counters of all processes, across owners.
fn totals(table: &mut Table, totals: &Totals) {
    let (counts, store) = (&totals.counts, &totals.store);
    table.counter(
        "larder_page_hits",
        "Pages that gets returned, read and verified",
        counts.hits,
    );
    let reasons = REASONS.map(|reason| (reason.label, reason.of(&counts.misses)));
    table.add(
        "larder_page_misses",
        "Pages that gets did not return, by reason",
        None,
        by("reason", reasons, count),
    );
    table.bytes_counter(
        "larder_read",
        "Bytes of pages that gets requested from the device",
        counts.bytes_read,
    );
    let unread = [("slow", counts.slow), ("unmeasured", counts.unmeasured)];
    table.add(
        "larder_unread_pages",
        "Pages that a process found and computed instead of reading them, by reason",
        None,
        by("reason", unread, count),
    );
    table.counter(
        "larder_put_pages",
        "Pages that puts stored",
        counts.pages_put,
    );
    table.bytes_counter("larder_put", "Bytes of those pages", counts.bytes_put);
    table.counter(
        "larder_duplicate_pages",
        "Pages that puts found already stored",
        counts.duplicates,
    );
    table.counter(
        "larder_refused_pages",
        "Pages that puts refused",
        counts.refused,
    );
    table.counter(
        "larder_failed_pages",
        "Pages of puts whose write or sync failed",
        counts.failed,
    );
    table.counter(
        "larder_refused_read_only_puts",
        "Puts refused because every volume was in read-only service",
        store.refused_read_only_puts,
    );
    let removed = [
        ("evicted", store.evicted_pages),
        ("deleted", store.deleted_pages),
        ("damaged", store.damaged_pages),
        ("unfinished", store.unfinished_pages),
    ];
    table.add(
        "larder_removed_pages",
        "Pages that left the store, by reason",
        None,
        by("reason", removed, count),
    );
    table.counter(
        "larder_moved_pages",
        "Pages moved by reclaim",
        store.pages_moved,
    );
    table.counter(
        "larder_freed_segments",
        "Segments reclaimed",
        store.freed_segments,
    );
    table.add(
        "larder_written",
        "Bytes written to the volumes, by cause",
        Some(Unit::Bytes),
        by("cause", store.written.causes(), count),
    );
    let syncs = [("ok", store.syncs), ("failed", store.failed_syncs)];
    table.add(
        "larder_syncs",
        "Syncs of volumes, by result",
        None,
        by("result", syncs, count),
    );
    let shared = [
        ("filled", store.shared_pages_filled),
        ("hit", store.shared_pages_hit),
    ];
    table.add(
        "larder_shared_reads_pages",
        "Pages read into the memory of shared reads, and found there",
        None,
        by("result", shared, count),
    );
    let times = &totals.latencies;
    let help = "Time of calls of longest_prefix and contains, one in 64 measured";
    table.times("larder_lookup", help, &times.lookup);
    table.times("larder_get", "Time of calls of get", &times.get);
    let help = "Time of calls of put, with waits for room";
    table.times("larder_put", help, &times.put);
    table.times("larder_flush", "Time of calls of flush", &times.flush);
    let help = "Time of reads from the devices of the volumes";
    table.times("larder_device_read", help, &times.device_read);
    let help = "Time of writes to the devices of the volumes";
    table.times("larder_device_write", help, &times.device_write);
    let help = "Time of syncs of the devices of the volumes";
    table.times("larder_device_sync", help, &times.device_sync);
}

#[cfg(test)]
pub(super) mod tests {
    use larder_engine::Report;
    use larder_engine::format::Fingerprint;
    use larder_store::inventory::{Space, Usage};

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
        report.totals.spaces = serde_json::from_str(reads).expect("it is JSON");
        View {
            report,
            spaces: (0..spaces).map(space).collect(),
        }
    }
}

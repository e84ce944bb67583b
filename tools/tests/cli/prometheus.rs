//! A Prometheus of the distribution beside a real store: it scrapes through a takeover, evaluates
//! every query of the dashboard, and fires each rule for its fault and for no other.

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use larder_disk::{Action, Buffer, Choice, Disk, DiskError, Done, Op, Piece};
use larder_engine::format::SEGMENTS_OFFSET;
use larder_engine::{Count, NamespaceId, Part, PutOptions, PutPage, PutStatus};
use larder_store::api::DiskWrapper;

use super::metrics::serve;
use super::served::{absent_keys, namespace, read};
use super::support::honest::{eventually, found};
use super::support::observe::{Exporter, Prometheus, RULES, deployed, is_there};
use super::support::{chain, flip};
use super::*;

const DASHBOARD: &str = include_str!("../../../deploy/grafana/larder.json");
const RUNBOOK: &str = include_str!("../../../docs/runbook.md");
const PAGE_BYTES: usize = 64 << 10;

/// A disk that refuses writes on request.
struct Refusing {
    inner: Arc<dyn Disk>,
    refuses: Arc<AtomicBool>,
}

impl Disk for Refusing {
    unsafe fn submit(&self, ops: Vec<Op>) {
        let is_refused = |op: &Op| {
            self.refuses.load(Ordering::SeqCst) && matches!(op.action, Action::Write { .. })
        };
        let (refused, passed): (Vec<Op>, Vec<Op>) = ops.into_iter().partition(is_refused);
        for op in refused {
            let buffer = match op.action {
                Action::Write {
                    buffer: Buffer::Owned(memory),
                    ..
                } => Some(memory),
                _ => None,
            };
            op.sink.done(vec![Done {
                tag: op.tag,
                result: Err(DiskError::Os(libc::ENOSPC)),
                buffer,
            }]);
        }
        // SAFETY: this call has the same contract as the other disk's.
        unsafe { self.inner.submit(passed) };
    }

    fn expire(&self) {
        self.inner.expire();
    }

    unsafe fn register(&self, memory: &[Piece]) -> String {
        // SAFETY: this call has the same contract as the other disk's.
        unsafe { self.inner.register(memory) }
    }

    fn choice(&self) -> &Choice {
        self.inner.choice()
    }

    fn shutdown(&self) {
        self.inner.shutdown();
    }
}

pub fn put(store: &Store, id: NamespaceId, seed: u64, pages: u64) -> Vec<PutStatus> {
    let bytes = vec![3; PAGE_BYTES];
    let parts = [std::io::IoSlice::new(&bytes)];
    let keys = chain(seed, pages);
    let page = |(depth, key): (u32, _)| PutPage {
        key,
        parent: (depth > 0).then(|| keys[depth as usize - 1]),
        depth,
        parts: &parts,
    };
    let pages: Vec<PutPage<'_>> = (0..).zip(keys.iter().copied()).map(page).collect();
    store.put(id, &pages, PutOptions::default())
}

/// Queries of the dashboard, with Grafana's variables filled in.
fn queries() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let notes = dashboard["annotations"]["list"].as_array().unwrap().iter();
    let queries = targets
        .chain(notes)
        .map(|target| target["expr"].as_str().unwrap());
    queries
        .map(|query| {
            query
                .replace("$instance", ".*")
                .replace("$__rate_interval", "1m")
        })
        .collect()
}

#[test]
fn the_rules_are_sound_and_each_has_its_section_in_the_runbook() {
    let rules = std::fs::read_to_string(deployed(RULES)).unwrap();
    let alerts = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "));
    let links = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("runbook: "));
    let alerts: Vec<&str> = alerts.collect();
    assert_eq!(alerts.len(), links.clone().count());
    for (alert, link) in alerts.iter().zip(links) {
        assert_eq!(link, format!("docs/runbook.md#{}", alert.to_lowercase()));
        let section = RUNBOOK.split_once(&format!("\n### {alert}\n"));
        let (_, section) = section.unwrap_or_else(|| panic!("docs/runbook.md has no {alert}"));
        let section = section.split("\n### ").next().unwrap();
        for part in [
            "**Meaning.**",
            "**First command.**",
            "**Safe action.**",
            "**Escalate**",
        ] {
            assert!(section.contains(part), "{alert} has no {part}");
        }
    }
    if !is_there("promtool") {
        return;
    }
    let directory = deployed("deploy/prometheus");
    for (check, file) in [
        ("check", "larder.rules.yml"),
        ("test", "larder.rules.test.yml"),
    ] {
        let mut promtool = Command::new("promtool");
        let output = promtool
            .args([check, "rules", file])
            .current_dir(&directory);
        let output = output.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &stderr(&output);
        assert!(output.status.success(), "promtool {check} rules: {said}");
    }
}

#[test]
fn prometheus_sees_a_takeover_without_a_counter_that_goes_down_and_evaluates_the_dashboard() {
    if !is_there("prometheus") {
        return;
    }
    let directory = directory();
    let path = store_in(&directory);
    let at = text(&path);
    let owner = serve(at);
    let next = Store::attach(&path, OpenOptions::default()).unwrap();
    let id = next.namespace(&namespace()).unwrap();
    let work = |seed: u64| {
        assert!(
            put(&next, id, seed, 8)
                .iter()
                .all(|status| status.is_present())
        );
        assert!(
            read(&next, id, &chain(seed, 8), None)
                .iter()
                .all(|status| status.is_hit())
        );
        read(&next, id, &absent_keys(2), None);
        next.contains(id, &chain(seed, 8));
        // As an adapter counts for its engine.
        let (tokens, prefill_rate) = (8 * 64, Some(1e4));
        next.count(
            id,
            Count::Asked {
                tokens: tokens + 2 * 64,
                found: tokens,
                is_first: true,
            },
        );
        next.count(
            id,
            Count::Served {
                tokens,
                prefill_rate,
            },
        );
        next.flush().unwrap();
    };
    work(1);
    let exporter = Exporter::of(at);
    let prometheus = Prometheus::of(&exporter);
    eventually("it has scraped", || {
        prometheus.sum("larder_page_hits_total{job='larder'}") == 8.0
    });
    drop(owner);
    eventually("this process owns the store", || next.part() == Part::Owner);
    (2..6).for_each(work);
    eventually("it has scraped the next owner", || {
        prometheus.sum("larder_page_hits_total{job='larder'}") == 40.0
    });
    // The tokens of the last second before a takeover may be missing.
    eventually("tokens are counted", || {
        prometheus.sum("larder_served_tokens_total{job='larder'}") >= 4.0 * 8.0 * 64.0
    });
    assert!(prometheus.sum("changes(larder_owner_start_time_seconds[10m])") >= 1.0);
    let counters = prometheus.query("count by (__name__) ({__name__=~\"larder_.*_total\"})");
    assert!(counters.len() > 10, "{counters:?}");
    for (labels, _) in counters {
        let name = labels["__name__"].as_str().unwrap();
        assert_eq!(
            prometheus.sum(&format!("resets({name}[10m])")),
            0.0,
            "{name} went down"
        );
    }
    // Metrics that need a fault, a drive with a health report, a remote, an eviction, or a change
    // have no samples.
    let empty = [
        "larder_lingering_clients",
        "larder_stopped_clients",
        "larder_drive_",
        "larder_l4_",
        "larder_eviction_age_",
        "[1m]) > 0",
    ];
    for query in queries() {
        let is_empty = empty.iter().any(|part| query.contains(part));
        let samples = found(&query, || {
            let samples = prometheus.query(&query);
            (is_empty || !samples.is_empty()).then_some(samples)
        });
        assert!(
            samples.iter().all(|(_, value)| value.is_finite()),
            "{query}: {samples:?}"
        );
    }
    next.close().unwrap();
}

#[test]
fn each_rule_fires_for_its_fault_alone() {
    if !is_there("prometheus") {
        return;
    }
    let directory = directory();
    let path = store_in(&directory);
    let at = text(&path);
    let refuses = Arc::<AtomicBool>::default();
    let wrapper = DiskWrapper::new({
        let refuses = refuses.clone();
        move |inner| {
            let refuses = refuses.clone();
            Arc::new(Refusing { inner, refuses })
        }
    });
    let options = OpenOptions::default().with(|o| o.disk_wrapper = Some(wrapper));
    let store = Store::attach(&path, options).unwrap();
    let id = store.namespace(&namespace()).unwrap();
    put(&store, id, 1, 8);
    store.flush().unwrap();
    let exporter = Exporter::of(at);
    let prometheus = Prometheus::of(&exporter);
    eventually("it has scraped", || {
        prometheus.sum("larder_put_pages_total{job='larder'}") == 8.0
    });
    // Some more scrapes, of a store at work.
    let scrapes = |count: f64| {
        eventually("scrapes", || {
            prometheus.sum("count_over_time(larder_up{job='larder'}[10m])") >= count
        });
    };
    scrapes(3.0);
    assert_eq!(prometheus.firing(), BTreeSet::new());

    // Damaged pages.
    flip(&path, SEGMENTS_OFFSET + 2 * 4096 + 99);
    assert!(!read(&store, id, &chain(1, 1), None)[0].is_hit());
    let mut expected = vec!["LarderDamagedPages"];
    prometheus.fires("LarderDamagedPages", &expected);

    // A full store: a prompt of more pages than it keeps.
    let statuses = put(&store, id, 2, 5000);
    assert!(
        statuses
            .iter()
            .any(|status| matches!(status, PutStatus::Refused(_)))
    );
    expected.push("LarderRefusedPages");
    prometheus.fires("LarderRefusedPages", &expected);

    // A volume that refuses writes.
    refuses.store(true, Ordering::SeqCst);
    put(&store, id, 3, 1);
    expected.extend(["LarderReadOnly", "LarderFailedWrites"]);
    prometheus.fires("LarderReadOnly", &expected);
    refuses.store(false, Ordering::SeqCst);
    eventually("the volume is in service", || {
        store.stats().read_only_volumes.is_empty()
    });
    eventually("the rule does not fire any more", || {
        !prometheus.firing().contains("LarderReadOnly")
    });

    // A volume that is moved away.
    let aside = directory.path().join("aside");
    std::fs::rename(&path, &aside).unwrap();
    expected.push("LarderDisplaced");
    prometheus.fires("LarderDisplaced", &expected);
    std::fs::rename(&aside, &path).unwrap();
    eventually("the rule does not fire any more", || {
        !prometheus.firing().contains("LarderDisplaced")
    });

    // No owner.
    store.close().unwrap();
    expected.push("LarderUnserved");
    prometheus.fires("LarderUnserved", &expected);

    // An owner that is stopped.
    let owner = serve(at);
    eventually("the store is served", || {
        !prometheus.firing().contains("LarderUnserved")
    });
    let pid = Pid::from_raw(i32::try_from(owner.0.id()).unwrap());
    kill(pid, Signal::SIGSTOP).unwrap();
    // The answer comes after the timeout of the fast job.
    expected.push("LarderUnobserved");
    prometheus.fires("LarderUnserved", &expected);
    kill(pid, Signal::SIGCONT).unwrap();
}

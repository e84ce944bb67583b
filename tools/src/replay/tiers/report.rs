//! The result of a replay through all three tiers: the document, and the lines for people.
//!
//! Bytes are those of pages of full size, times are virtual, unless a name states otherwise.

use std::path::{Path, PathBuf};

use larder_tiers::config::{L3Write, PrefetchPolicy, WritePolicy};
use serde::Serialize;

use super::drive::Run;
use super::machine::Speeds;
use super::outcome::{Moved, Quantiles, Timing, seconds};
use super::plan::{Plan, Setting, USUAL_TOKENS};
use super::shared::Nanos;
use crate::disk::DiskFacts;
use crate::failure::Ending;
use crate::report::{Lines, Report, rows};
use crate::size::ByteSize;
use crate::usage;
use crate::verdict::{Facts, Verdict};

/// Width of a column of the table.
const COLUMN: usize = 22;

/// The store's own figures, and its state before.
#[derive(Clone, Debug, Default, Serialize)]
pub struct StoreFigures {
    /// Pages in it before.
    pub pages_before: u64,
    /// Most that it keeps at once.
    pub usable_pages: u64,
    /// Dropped to make room.
    pub evicted_pages: u64,
    /// Of all stores of this replay: forgotten because their bytes failed their checksum or could
    /// not be read.
    pub damaged_pages: u64,
    /// The disk that moved the bytes, and the reason for its choice.
    #[serde(flatten)]
    pub disk: DiskFacts,
}

/// The cost of the replay itself, in real time.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Cost {
    /// From its start.
    pub seconds: f64,
    /// CPU time of the process.
    pub cpu_seconds: f64,
    /// Most memory that the process had resident.
    pub peak_rss_bytes: u64,
    /// Whether the operator ended it early.
    pub interrupted: bool,
}

/// The speeds on which virtual time is based.
#[derive(Serialize)]
struct SpeedReport {
    read_bytes_per_second: f64,
    read_latency_us: f64,
    write_bytes_per_second: f64,
    write_latency_us: f64,
    link_bytes_per_second: f64,
    /// Whether the disk here was measured, or another one was given.
    disk_is_measured: bool,
    /// Whether the link has memcpy's speed here, or was given.
    link_is_measured: bool,
}

/// A run with some of the tiers.
#[derive(Serialize)]
struct SettingReport {
    /// The tiers in use.
    setting: &'static str,
    /// Requests served.
    requests: u64,
    /// Requests that do not fit L1. Left out of everything else.
    too_long_requests: u64,
    input_tokens: u64,
    /// Tokens found in L1; found in L2 after a backup; brought from L3 by a prefetch of the
    /// request; computed.
    l1_tokens: u64,
    l2_tokens: u64,
    l3_tokens: u64,
    computed_tokens: u64,
    /// `1 - computed_tokens / input_tokens`.
    hit_rate: f64,
    #[serde(flatten)]
    moved: Moved,
    /// Service time that the requests need, for each second that the servers have until the last
    /// request comes. Absent when all come at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    load: Option<f64>,
    /// Share of the time in which the disk was busy.
    disk_busy: f64,
    /// From a server's taking a request up to its first token.
    service: Quantiles,
    /// Time within that spent waiting for loads.
    stall: Quantiles,
    /// From a request's arrival to the start of its service, if compared: waiting for a server and
    /// for a prefetch.
    #[serde(skip_serializing_if = "Option::is_none")]
    queueing: Option<Quantiles>,
    /// The sum of both, if compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    ttft: Option<Quantiles>,
    /// Must be 0.
    wrong_pages: u64,
    /// Pages of a pool that were unreachable at the end. Must be 0.
    leaked_pages: u64,
    /// Invariants of the cache that did not hold at the end. Must be empty.
    leaks: Vec<String>,
    virtual_seconds: f64,
}

/// The document.
#[derive(Serialize)]
pub struct TiersReport {
    /// The store: its first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    model: String,
    page_tokens: u32,
    /// Bytes of a page of full size.
    page_bytes: u64,
    /// Bytes of the moved pages.
    moved_page_bytes: u64,
    instances: u32,
    rate: f64,
    write_policy: WritePolicy,
    l3_write: L3Write,
    prefetch_policy: PrefetchPolicy,
    l1_bytes: u64,
    l2_bytes: u64,
    speeds: SpeedReport,
    store: StoreFigures,
    settings: Vec<SettingReport>,
    /// The reason why times to the first token are not compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    ttft_refused: Option<String>,
    #[serde(flatten)]
    verdict: Verdict,
    #[serde(flatten)]
    cost: Cost,
}

impl TiersReport {
    /// A report of these runs.
    pub fn new(
        path: &Path,
        plan: &Plan<'_>,
        speeds: &Speeds,
        store: StoreFigures,
        runs: &[(Setting, Run)],
        cost: Cost,
    ) -> TiersReport {
        let args = plan.args;
        let loads: Vec<_> = runs
            .iter()
            .map(|(setting, run)| (setting.name(), offered(run, args.instances)))
            .collect();
        let ttft_refused = refusal(&loads);
        let settings = runs.iter().zip(&loads).map(|((setting, run), (_, load))| {
            SettingReport::new(*setting, run, *load, args.page_size, ttft_refused.is_none())
        });
        TiersReport {
            path: path.to_owned(),
            model: args.model.name.clone().into_owned(),
            page_tokens: args.page_size,
            page_bytes: u64::from(plan.page.page_bytes()),
            moved_page_bytes: u64::from(plan.scaled.page_bytes()),
            instances: args.instances,
            rate: args.rate,
            write_policy: args.write_policy,
            l3_write: args.l3_write,
            prefetch_policy: args.prefetch_policy,
            l1_bytes: args.l1.0,
            l2_bytes: args.l2.0,
            speeds: SpeedReport {
                read_bytes_per_second: speeds.read.0,
                read_latency_us: seconds(speeds.read.1) * 1e6,
                write_bytes_per_second: speeds.write.0,
                write_latency_us: seconds(speeds.write.1) * 1e6,
                link_bytes_per_second: speeds.link,
                disk_is_measured: args.disk().is_none(),
                link_is_measured: args.link().is_none(),
            },
            store,
            settings: settings.collect(),
            ttft_refused,
            verdict: facts(plan, speeds, runs).verdict(),
            cost,
        }
    }

    /// How the command ends.
    pub fn ending(&self) -> Ending {
        let is_bad = |setting: &SettingReport| {
            setting.wrong_pages + setting.leaked_pages > 0 || !setting.leaks.is_empty()
        };
        Ending::Done
            .or_interrupted(self.cost.interrupted)
            .or_findings(self.settings.iter().any(is_bad) || self.store.damaged_pages > 0)
    }
}

/// The facts of a verdict on L3.
fn facts(plan: &Plan<'_>, speeds: &Speeds, runs: &[(Setting, Run)]) -> Facts {
    let of = |wanted: Setting| {
        let found = runs.iter().find(|(setting, _)| *setting == wanted);
        found.map(|(_, run)| run)
    };
    let served = |run: &Run| -> f64 {
        let service = run.served.timings.iter().map(|timing| timing.service);
        seconds(service.sum())
    };
    let saved = of(Setting::All)
        .zip(of(Setting::L1L2))
        .map(|(all, without)| {
            let days = seconds(all.ended.max(1)) / 86_400.0;
            (served(without) - served(all)) / days
        });
    let hit_rate = of(Setting::All).map(|run| {
        let l3 = run.served.found.l3 * u64::from(plan.args.page_size);
        usage::ratio(l3, l3 + run.served.computed_tokens)
    });
    let pages = f64::from(USUAL_TOKENS) / f64::from(plan.args.page_size);
    let (rate, latency) = speeds.read;
    let read = pages * speeds.page_bytes as f64 / rate + seconds(latency);
    let model = &plan.args.model;
    let prefill = model.prefill_seconds(&plan.args.compute(), USUAL_TOKENS.into(), 0);
    let ms = |seconds: f64| Some(seconds * 1e6 / f64::from(USUAL_TOKENS));
    Facts {
        hit_rate,
        read_ms: ms(read),
        prefill_ms: ms(prefill),
        saved_seconds_per_day: saved,
        ..Facts::default()
    }
}

/// Service time for each second that is available for it. `None` when there is none.
fn offered(run: &Run, instances: u32) -> Option<f64> {
    let service: Nanos = run.served.timings.iter().map(|timing| timing.service).sum();
    (run.span > 0).then(|| seconds(service) / (seconds(run.span) * f64::from(instances)))
}

/// The reason why times to the first token cannot be compared, if any: one sentence.
fn refusal(loads: &[(&str, Option<f64>)]) -> Option<String> {
    if loads.iter().any(|(_, load)| load.is_none()) {
        return Some("all requests come at the same moment".to_owned());
    }
    let over: Vec<String> = loads
        .iter()
        .filter_map(|(name, load)| Some((name, load.filter(|load| *load > 1.0)?)))
        .map(|(name, load)| format!("{load:.2} times with {name}"))
        .collect();
    if over.is_empty() {
        return None;
    }
    Some(format!(
        "the load is above what the servers can do ({}), so that queues grow for as long as the \
         trace does; give more --instances \
         or a lower --rate",
        over.join(", ")
    ))
}

impl SettingReport {
    fn new(
        setting: Setting,
        run: &Run,
        load: Option<f64>,
        page_tokens: u32,
        is_compared: bool,
    ) -> SettingReport {
        let served = &run.served;
        let tokens = |pages: u64| pages * u64::from(page_tokens);
        let times = |time: fn(&Timing) -> Nanos| Quantiles::of(served.timings.iter().map(time));
        let all = seconds(run.ended);
        SettingReport {
            setting: setting.name(),
            requests: served.timings.len() as u64,
            too_long_requests: served.too_long,
            input_tokens: served.input_tokens,
            l1_tokens: tokens(served.found.l1),
            l2_tokens: tokens(served.found.l2),
            l3_tokens: tokens(served.found.l3),
            computed_tokens: served.computed_tokens,
            hit_rate: usage::ratio(
                served.input_tokens - served.computed_tokens,
                served.input_tokens,
            ),
            moved: served.tiers,
            load,
            disk_busy: if all > 0.0 {
                seconds(run.disk_busy) / all
            } else {
                0.0
            },
            service: times(|timing| timing.service),
            stall: times(|timing| timing.service - timing.computed),
            queueing: is_compared.then(|| times(|timing| timing.queued)),
            ttft: is_compared.then(|| times(|timing| timing.queued + timing.service)),
            wrong_pages: served.wrong_pages,
            leaked_pages: served.leaked_pages,
            leaks: served.leaks.clone(),
            virtual_seconds: all,
        }
    }
}

impl Report for TiersReport {
    const COMMAND: &'static str = "replay tiers";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        self.setup(&mut lines);
        self.table(&mut lines);
        if let Some(reason) = &self.ttft_refused {
            lines.text(format!(
                "Times to the first token are not compared: {reason}."
            ));
        }
        self.awareness(&mut lines);
        lines.text(&*self.verdict.verdict_reason);
        for setting in &self.settings {
            for leak in &setting.leaks {
                lines.text(format!("Leaked with {}: {leak}", setting.setting));
            }
        }
        if self.cost.interrupted {
            lines.text("Interrupted: these are the figures up to then.");
        }
        lines
    }
}

const TOO_LONG: &str = "  too long for L1";
const QUEUEING: &str = "Queueing p50 p90 p99";
const TTFT: &str = "TTFT p50 p90 p99";

/// A value of a setting, with pages of so many bytes.
type Value = fn(&SettingReport, u64) -> String;

/// The rows of the table.
const ROWS: &[(&str, Value)] = &[
    ("With", |s, _| s.setting.to_owned()),
    ("Requests", |s, _| s.requests.to_string()),
    (TOO_LONG, |s, _| s.too_long_requests.to_string()),
    ("Tokens found", |s, _| {
        part(s.input_tokens - s.computed_tokens, s)
    }),
    ("  in L1", |s, _| part(s.l1_tokens, s)),
    ("  in L2", |s, _| part(s.l2_tokens, s)),
    ("  in L3", |s, _| part(s.l3_tokens, s)),
    ("L1 to L2", |s, page| size(s.moved.pages_backed_up * page)),
    ("L2 to L1", |s, page| size(s.moved.pages_loaded * page)),
    ("L2 to L3", |s, page| size(s.moved.pages_put * page)),
    ("  not taken", |s, page| {
        size(s.moved.put_refused_pages * page)
    }),
    ("L3 to L2", |s, page| size(s.moved.pages_prefetched * page)),
    ("Left L1", |s, page| {
        size((s.moved.l1_evicted_pages + s.moved.l1_dropped_pages) * page)
    }),
    ("Left L2", |s, page| size(s.moved.l2_evicted_pages * page)),
    ("Disk busy", |s, _| format!("{:.1} %", 100.0 * s.disk_busy)),
    ("Load / capacity", |s, _| {
        s.load.map_or("-".to_owned(), |load| format!("{load:.2}"))
    }),
    ("Service p50 p90 p99", |s, _| both(Some(&s.service))),
    ("  waiting for loads", |s, _| both(Some(&s.stall))),
    (QUEUEING, |s, _| both(s.queueing.as_ref())),
    (TTFT, |s, _| both(s.ttft.as_ref())),
    ("Wrong pages", |s, _| s.wrong_pages.to_string()),
    ("Leaked pages", |s, _| s.leaked_pages.to_string()),
];

fn part(tokens: u64, setting: &SettingReport) -> String {
    format!(
        "{:.2} %",
        100.0 * usage::ratio(tokens, setting.input_tokens)
    )
}

fn size(bytes: u64) -> String {
    ByteSize(bytes).to_string()
}

fn both(times: Option<&Quantiles>) -> String {
    times.map_or(String::new(), |t| {
        let (p50, p90, p99) = (t.p50_seconds, t.p90_seconds, t.p99_seconds);
        format!("{p50:.3} {p90:.3} {p99:.3} s")
    })
}

impl TiersReport {
    fn setup(&self, lines: &mut Lines) {
        let speeds = &self.speeds;
        rows! { lines:
            "Pages" => "{}, {} tokens, {}; those moved here have {}",
                self.model, self.page_tokens, size(self.page_bytes), size(self.moved_page_bytes);
            "Servers" => "{}, each with {} of L1, {} of L2; {}, {}, {}",
                self.instances, size(self.l1_bytes), size(self.l2_bytes), name(&self.write_policy),
                name(&self.l3_write), name(&self.prefetch_policy);
            match speeds.disk_is_measured {
                true => "Disk, measured",
                false => "Disk, as given",
            } => "reads {} and {:.0} us a call, writes {} and {:.0} us",
                usage::rate(speeds.read_bytes_per_second), speeds.read_latency_us,
                usage::rate(speeds.write_bytes_per_second), speeds.write_latency_us;
        }
        let link = usage::rate(speeds.link_bytes_per_second);
        let source = if speeds.link_is_measured {
            ", memcpy's"
        } else {
            ", as given"
        };
        rows! { lines:
            "Link L2 to L1" => "{link}{source}";
            "Store" => "keeps {} pages, dropped {}; {}",
                self.store.usable_pages, self.store.evicted_pages, self.store.disk;
        }
        if self.store.damaged_pages > 0 {
            lines.row("Damaged pages", self.store.damaged_pages.to_string());
        }
        rows! { lines:
            "This took" => "{:.1} s, {:.1} s of CPU, {} of memory",
                self.cost.seconds, self.cost.cpu_seconds, size(self.cost.peak_rss_bytes);
        }
    }

    /// A row for each figure, with a value for each setting.
    fn table(&self, lines: &mut Lines) {
        let has_long = self.settings.iter().any(|s| s.too_long_requests > 0);
        for (label, value) in ROWS {
            let is_shown = match *label {
                TOO_LONG => has_long,
                QUEUEING | TTFT => self.ttft_refused.is_none(),
                _ => true,
            };
            if is_shown {
                let columns = self.settings.iter();
                let columns = columns.map(|s| format!("{:>COLUMN$}", value(s, self.page_bytes)));
                lines.row(*label, columns.collect::<String>());
            }
        }
    }

    /// The gain from hints to L3 about hot pages above.
    fn awareness(&self, lines: &mut Lines) {
        let find = |wanted: Setting| {
            let mut settings = self.settings.iter();
            settings.find(|setting| setting.setting == wanted.name())
        };
        let (Some(told), Some(untold)) = (find(Setting::All), find(Setting::Untold)) else {
            return;
        };
        lines.text(format!(
            "Hit rate with / without hints about L1 and L2: {:.2} % / {:.2} % of the tokens",
            100.0 * told.hit_rate,
            100.0 * untold.hit_rate
        ));
        lines.text(format!(
            "Tokens from L3 with / without them: {} / {}",
            told.l3_tokens, untold.l3_tokens
        ));
    }
}

/// A policy's name in configuration files.
fn name(policy: &impl Serialize) -> String {
    let value = serde_json::to_value(policy).unwrap_or_default();
    value.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn times_are_compared_only_where_every_setting_can_serve_what_comes() {
        assert_eq!(refusal(&[("L1", Some(0.99)), ("L1+L2", Some(0.5))]), None);
        let reason = refusal(&[("L1", Some(1.25)), ("L1+L2", Some(0.5))]).unwrap();
        assert!(reason.contains("1.25 times with L1"), "{reason}");
        assert!(!reason.contains("L1+L2"), "{reason}");
        assert!(reason.contains("--instances"), "{reason}");
        let reason = refusal(&[("L1", None)]).unwrap();
        assert!(reason.contains("same moment"), "{reason}");
    }
}

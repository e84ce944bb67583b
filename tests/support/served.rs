//! The text that an exporter served: as samples, for another parser of it, and as the input of
//! promtool.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use super::honest::skipped;
use super::observe::{RULES, deployed};
use super::{stderr, text};

/// Minutes of a store at work, before a fault and after it: more than the longest range of a rule.
const WELL: usize = 120;

/// Minutes of a fault after its alert has fired.
const MORE: usize = 3;

/// The samples of a text, and whether there was one.
#[derive(Clone, Debug, Default)]
pub struct Served {
    text: String,
    samples: BTreeMap<String, String>,
}

impl Served {
    /// Of the reply to a scrape. A reply that is no text of metrics has one sample, as Prometheus
    /// makes it.
    pub fn of((status, body): (String, String)) -> Served {
        let is_up = status.contains(" 200 ");
        let text = if is_up { body } else { String::new() };
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let samples = lines.filter_map(|line| line.rsplit_once(' '));
        let mut samples: BTreeMap<String, String> = samples
            .map(|(series, value)| (series.to_owned(), value.to_owned()))
            .collect();
        samples.insert("up".to_owned(), u8::from(is_up).to_string());
        Served { text, samples }
    }

    /// The values of a metric with these labels, whatever its other labels are.
    pub fn values(&self, metric: &str) -> Vec<f64> {
        let (name, labels) = metric.split_once('{').unwrap_or((metric, ""));
        let labels: Vec<&str> = labels.trim_end_matches('}').split(',').collect();
        let has = |series: &str| {
            let (of, all) = series.split_once('{').unwrap_or((series, ""));
            of == name && labels.iter().all(|label| all.contains(label))
        };
        let of = self.samples.iter().filter(|(series, _)| has(series));
        of.map(|(_, value)| value.parse().unwrap()).collect()
    }
}

/// Whether Python's `prometheus_client` takes the texts, by both its parsers, each sample once.
#[track_caller]
pub fn are_taken_by_python(texts: &[&Served]) {
    let Some(python) = &*PYTHON else {
        return;
    };
    let script = "import sys\n\
        from prometheus_client import openmetrics, parser\n\
        import prometheus_client.openmetrics.parser\n\
        for text in sys.stdin.read().split('\\0'):\n\
        \tfor read in (openmetrics.parser, parser):\n\
        \t\tfamilies = list(read.text_string_to_metric_families(text))\n\
        \t\tprint(sum(len(family.samples) for family in families))\n";
    let mut child = Command::new(python)
        .args(["-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let all: Vec<&str> = texts.iter().map(|served| &*served.text).collect();
    input.write_all(all.join("\0").as_bytes()).unwrap();
    drop(input);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}{all:?}", stderr(&output));
    let counts = String::from_utf8(output.stdout).unwrap();
    let expected = texts.iter().flat_map(|served| {
        let samples = (served.samples.len() - 1).to_string();
        [samples.clone(), samples]
    });
    assert!(counts.lines().eq(expected), "{counts}{all:?}");
}

/// A Python with the package `prometheus_client`; its absence is reported.
static PYTHON: LazyLock<Option<String>> = LazyLock::new(|| {
    let cache = std::env::var("LARDER_PYTHON_CACHE").unwrap_or_default();
    let environment = format!("{cache}/venv/bin/python");
    let known = ["python3", "/usr/bin/python3", &environment];
    let found = known.into_iter().find(|python| {
        let mut child = Command::new(python);
        let child = child.args(["-c", "import prometheus_client"]);
        let status = child.stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    });
    if found.is_none() {
        skipped(
            "Python's parser of metrics",
            "there is no package prometheus_client: install Debian's python3-prometheus-client",
        );
    }
    found.map(str::to_owned)
});

/// Texts of before a fault, of the fault, and of after it.
pub struct Phases {
    pub before: Served,
    pub within: Served,
    pub after: Served,
}

impl Phases {
    /// Each text that is one: see [`are_taken_by_python`].
    #[track_caller]
    pub fn are_taken_by_python(&self) {
        let mut texts = vec![&self.before, &self.within, &self.after];
        texts.retain(|served| !served.text.is_empty());
        are_taken_by_python(&texts);
    }

    /// Promtool evaluates the rules over these texts in stretched time. Before the fault no alert
    /// fires. The alert of the fault begins after its `for` and not before, and ends.
    #[track_caller]
    pub fn fire_in_time(&self, alert: &str, directory: &Path) {
        let wait = wait_of(alert);
        let within = wait + MORE;
        let phases = [
            (&self.before, WELL),
            (&self.within, within),
            (&self.after, WELL),
        ];
        let all = phases.iter().flat_map(|(served, _)| served.samples.keys());
        let mut input = String::new();
        for series in all.collect::<BTreeSet<_>>() {
            let values = phases.map(|(served, minutes)| match served.samples.get(series) {
                Some(value) => format!("{value}x{}", minutes - 1),
                None => format!("_x{minutes}"),
            });
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            let labels = labels.replace('\'', "''");
            let labels = match &*labels {
                "}" => "}".to_owned(),
                labels => format!(",{labels}"),
            };
            writeln!(
                input,
                "  - {{series: '{name}{{instance=\"a\",job=\"larder\"{labels}', values: '{}'}}",
                values.join(" ")
            )
            .unwrap();
        }
        let begin = WELL;
        let of_alert = format!("alertname=\"{alert}\",");
        let mut checks = String::new();
        let mut check = |of: &str, minute: usize, fires: bool| {
            let samples = if fires {
                "{labels: '{}', value: 1}"
            } else {
                ""
            };
            writeln!(
                checks,
                "  - {{expr: 'count(ALERTS{{{of}alertstate=\"firing\"}}) > bool 0', eval_time: \
                 {minute}m, exp_samples: [{samples}]}}"
            )
            .unwrap();
        };
        check("", begin - 1, false);
        if wait > 0 {
            check(&of_alert, begin + wait - 1, false);
        }
        check(&of_alert, begin + wait + 1, true);
        check(&of_alert, begin + within + WELL - 1, false);
        let tests = format!(
            "rule_files: ['{}']\nevaluation_interval: 1m\ntests:\n- interval: 1m\n  \
             input_series:\n{input}  promql_expr_test:\n{checks}",
            text(&deployed(RULES).canonicalize().unwrap())
        );
        let file = directory.join("alerts.test.yml");
        std::fs::write(&file, tests).unwrap();
        let mut promtool = Command::new("promtool");
        let output = promtool.args(["test", "rules", text(&file)]).output();
        let output = output.unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &stderr(&output);
        assert!(output.status.success(), "{alert}: {said}");
    }
}

/// The `for` of an alert, in minutes.
fn wait_of(alert: &str) -> usize {
    let rules = std::fs::read_to_string(deployed(RULES)).unwrap();
    let (_, rule) = rules.split_once(&format!("- alert: {alert}\n")).unwrap();
    let rule = rule.split("- alert: ").next().unwrap();
    let wait = rule
        .lines()
        .find_map(|line| line.trim().strip_prefix("for: "));
    wait.map_or(0, |wait| wait.trim_end_matches('m').parse().unwrap())
}

//! The readers of metrics: the exporter, and a Prometheus of the distribution that scrapes it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use super::honest::{Process, eventually, found, skipped};
use super::{as_user, text};

/// The alert rules.
pub const RULES: &str = "deploy/prometheus/larder.rules.yml";

const PATIENCE: Duration = Duration::from_secs(60);

/// Values by name, labels included.
pub type Samples = BTreeMap<String, f64>;

/// A file of the repository.
pub fn deployed(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

/// Whether a program of Debian's package is on this machine; says so if it is not.
pub fn is_there(program: &str) -> bool {
    let there = Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if !there.is_ok_and(|status| status.success()) {
        skipped(
            "metrics, rules and the dashboard with Prometheus",
            format!("there is no {program}: install Debian's package `prometheus`"),
        );
        return false;
    }
    true
}

/// A running exporter.
pub struct Exporter {
    _process: Process,
    address: String,
}

impl Exporter {
    pub fn of(store: &str) -> Exporter {
        Exporter::as_user(store, None)
    }

    /// As another user and its group, or as this one.
    pub fn as_user(store: &str, user: Option<u32>) -> Exporter {
        let mut child = as_user(&["exporter", store, "--listen", "127.0.0.1:0"], user)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let process = Process(child);
        let url = lines
            .find_map(|line| Some(line.unwrap().split_once("http://")?.1.to_owned()))
            .unwrap();
        Exporter {
            _process: process,
            address: url.trim_end_matches("/metrics").to_owned(),
        }
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    /// Status line and body of a request.
    pub fn ask(&self, method: &str, target: &str) -> (String, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let request = format!("{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        let (head, body) = reply.split_once("\r\n\r\n").unwrap();
        (head.lines().next().unwrap().to_owned(), body.to_owned())
    }

    pub fn scrape(&self) -> Samples {
        let (status, body) = self.ask("GET", "/metrics");
        assert_eq!(status, "HTTP/1.1 200 OK", "{body}");
        samples(&body)
    }
}

/// The values of a text of metrics.
pub fn samples(text: &str) -> Samples {
    assert!(text.ends_with("# EOF\n"), "{text}");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            (name.to_owned(), value.parse().unwrap())
        })
        .collect()
}

/// A running Prometheus that scrapes exporters every second. It ends with this value, and with the
/// process of the test, also if that is killed.
pub struct Prometheus {
    shell: Child,
    address: String,
}

impl Prometheus {
    /// Of one exporter.
    pub fn of(exporter: &Exporter) -> Prometheus {
        Prometheus::start(&[exporter.address()], "")
    }

    /// The rules fire at once, without their `for`. `options` are further ones of each job.
    pub fn start(targets: &[&str], options: &str) -> Prometheus {
        let directory = super::directory().keep();
        let rules = std::fs::read_to_string(deployed(RULES)).unwrap();
        let at_once = rules
            .lines()
            .filter(|line| !line.trim().starts_with("for: "));
        let at_once: Vec<&str> = at_once.collect();
        std::fs::write(directory.join("rules.yml"), at_once.join("\n")).unwrap();
        let job = format!("{options} static_configs: [{{targets: {targets:?}}}]");
        // An owner that is stopped makes the exporter answer late: only the slow job waits for it.
        let config = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 250ms}}\n\
             rule_files: [rules.yml]\n\
             scrape_configs:\n\
             - {{job_name: larder, {job}}}\n\
             - {{job_name: slow, scrape_interval: 3s, scrape_timeout: 3s, {job}}}\n"
        );
        std::fs::write(directory.join("prometheus.yml"), config).unwrap();
        // The shell reads to the end of its input, which comes with the end of this process.
        let script = "trap '' INT TERM HUP; cd \"$0\" || exit; \
            prometheus --config.file=prometheus.yml --storage.tsdb.path=tsdb \
            --web.listen-address=127.0.0.1:0 2>log & \
            read _; kill -9 $!; wait $!; cd /; rm -r \"$0\"";
        let mut shell = Command::new("sh");
        let shell = shell.args(["-c", script, text(&directory)]);
        let shell = shell.stdin(Stdio::piped()).stdout(Stdio::null());
        let shell = shell.stderr(Stdio::null()).spawn().unwrap();
        // It chooses a port that no other process has.
        let address = found("Prometheus listens", || {
            let lines = std::fs::read_to_string(directory.join("log")).ok()?;
            let (_, line) = lines.split_once("\"Listening on\" address=")?;
            Some(line.split_once('\n')?.0.to_owned())
        });
        Prometheus { shell, address }
    }

    fn get(&self, target: &str) -> Option<Value> {
        let mut stream = TcpStream::connect(&self.address).ok()?;
        let request = format!("GET {target} HTTP/1.0\r\nHost: x\r\n\r\n");
        stream.write_all(request.as_bytes()).ok()?;
        let mut reply = String::new();
        stream.read_to_string(&mut reply).ok()?;
        serde_json::from_str(reply.split_once("\r\n\r\n")?.1).ok()
    }

    /// The samples of a query: labels and value.
    #[track_caller]
    pub fn query(&self, query: &str) -> Vec<(Value, f64)> {
        let mut encoded = String::new();
        for byte in query.bytes() {
            write!(encoded, "%{byte:02X}").unwrap();
        }
        let reply = self.get(&format!("/api/v1/query?query={encoded}"));
        let Some(reply) = reply.filter(|reply| reply["status"] != "unavailable") else {
            return Vec::new();
        };
        assert_eq!(reply["status"], "success", "{query}: {reply}");
        let samples = reply["data"]["result"].as_array().unwrap().iter();
        samples
            .map(|sample| {
                let value = sample["value"][1].as_str().unwrap().parse().unwrap();
                (sample["metric"].clone(), value)
            })
            .collect()
    }

    /// The sum of a query's samples; 0 without any.
    #[track_caller]
    pub fn sum(&self, query: &str) -> f64 {
        self.query(query).iter().map(|(_, value)| value).sum()
    }

    /// Rules that fire.
    pub fn firing(&self) -> BTreeSet<String> {
        self.firing_of("")
    }

    /// Rules that fire for these labels.
    pub fn firing_of(&self, labels: &str) -> BTreeSet<String> {
        let alerts = self.query(&format!("ALERTS{{alertstate=\"firing\"{labels}}}"));
        let names = alerts
            .iter()
            .filter_map(|(labels, _)| labels["alertname"].as_str());
        names.map(str::to_owned).collect()
    }

    /// Waits until a rule fires. No unexpected rule may fire.
    #[track_caller]
    pub fn fires(&self, rule: &str, expected: &[&str]) {
        eventually(rule, || self.firing().contains(rule));
        for firing in self.firing() {
            assert!(expected.contains(&&*firing), "{firing} fires with {rule}");
        }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // This closes the input of the shell first.
        let _ = self.shell.wait();
    }
}

//! A store with its owner, its clients, and the instruments.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Instant;

use crate::support::honest::{PATIENCE, Process, eventually};
use crate::support::observe::{Exporter, Prometheus, is_there};
use crate::support::{directory, json, larder, text};

const STORE_SIZE: &str = "256MiB";

/// See the module.
pub struct Scene {
    _directory: tempfile::TempDir,
    pub path: PathBuf,
    log: PathBuf,
    pub owner: Option<Process>,
    exporter: Exporter,
    /// `None` where there is no Prometheus.
    prometheus: Option<Prometheus>,
}

/// The traces of a fault in the instruments.
pub struct Signs<'a> {
    /// A metric with its labels, without the label of the volume, and its value.
    pub metric: (&'a str, f64),
    /// Words of `stat`.
    pub stat: &'a str,
    /// The exit code of `stat --check`, and its words.
    pub check: (i32, &'a str),
    /// Words of a line of `doctor`, which begins with its level.
    pub doctor: (&'a str, &'a str),
    /// Words of the owner's log.
    pub log: &'a str,
    pub alert: &'a str,
}

impl Scene {
    /// A served store of two volumes. `prepare` is called on the path of the second one before the
    /// owner opens them.
    pub fn of<T>(prepare: impl FnOnce(&Path) -> Option<T>) -> Option<(Scene, T)> {
        let directory = directory();
        let path = directory.path().join("store");
        let second = directory.path().join("second");
        let create = ["create", text(&path), "--size", STORE_SIZE, "--volume"];
        json(&[&create[..], &[text(&second)]].concat());
        let prepared = prepare(&second)?;
        let exporter = Exporter::of(text(&path));
        let prometheus =
            is_there("prometheus").then(|| Prometheus::of(&exporter, directory.path()));
        let mut scene = Scene {
            log: directory.path().join("log"),
            owner: None,
            exporter,
            prometheus,
            _directory: directory,
            path,
        };
        scene.serve();
        Some((scene, prepared))
    }

    /// Starts an owner, and waits until it serves.
    pub fn serve(&mut self) {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(&self.log);
        let mut owner = larder(&["serve", self.at()])
            .env("LARDER_LOG", "info")
            .stdout(Stdio::piped())
            .stderr(log.unwrap())
            .spawn()
            .unwrap();
        let mut first = String::new();
        let told = owner.stdout.take().unwrap();
        BufReader::new(told).read_line(&mut first).unwrap();
        assert!(first.contains("Serving"), "{first}{}", self.log());
        self.owner = Some(Process(owner));
    }

    pub fn at(&self) -> &str {
        text(&self.path)
    }

    /// Starts `larder bench` as a client.
    pub fn client(&self, calls: &[&str]) -> Client {
        let mut bench = larder(&[&["bench", self.at(), "--shared"], calls].concat());
        let bench = bench.stdout(Stdio::null()).stderr(Stdio::null());
        Client(Process(bench.spawn().unwrap()))
    }

    /// The output of a command, and its exit code. It ends in time, whatever hangs.
    pub fn run(&self, arguments: &[&str]) -> (Option<i32>, String) {
        let begun = Instant::now();
        let output = larder(arguments).output().unwrap();
        let took = begun.elapsed();
        assert!(took < PATIENCE, "{arguments:?} took {took:?}");
        let said = [&output.stdout[..], &output.stderr].concat();
        (output.status.code(), String::from_utf8(said).unwrap())
    }

    /// The logged lines.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    /// Waits until every instrument shows the signs of a fault. Prints how long each took.
    #[track_caller]
    pub fn shows(&self, signs: &Signs<'_>) {
        let begun = Instant::now();
        let mut times = String::new();
        let mut seen = |instrument: &str, is_seen: &mut dyn FnMut() -> bool| {
            eventually(&format!("{instrument}, {}", signs.log), is_seen);
            let took = begun.elapsed().as_secs_f64();
            write!(times, " {instrument} {took:.1} s,").unwrap();
        };
        let (metric, value) = signs.metric;
        seen("metrics", &mut || self.metric(metric).contains(&value));
        let (code, words) = signs.check;
        seen("check", &mut || {
            let (ended, said) = self.run(&["stat", self.at(), "--check"]);
            ended == Some(code) && said.contains(words)
        });
        seen("stat", &mut || {
            self.run(&["stat", self.at()]).1.contains(signs.stat)
        });
        let (level, words) = signs.doctor;
        seen("doctor", &mut || {
            let said = self.run(&["doctor", self.at()]).1;
            let mut lines = said.lines();
            lines.any(|line| line.starts_with(level) && line.contains(words))
        });
        seen("log", &mut || self.log().contains(signs.log));
        if let Some(prometheus) = &self.prometheus {
            seen("alert", &mut || prometheus.firing().contains(signs.alert));
        }
        println!("signs of {}:{times} in all", signs.alert);
    }

    /// Waits until the store is well again: by the check, and without the alert.
    #[track_caller]
    pub fn recovers(&self, signs: &Signs<'_>) {
        eventually("the check is good again", || {
            self.run(&["stat", self.at(), "--check"]).0 == Some(0)
        });
        if let Some(prometheus) = &self.prometheus {
            eventually("the alert has ended", || {
                !prometheus.firing().contains(signs.alert)
            });
        }
    }

    /// The values of a metric with these labels, whatever its other labels are.
    pub fn metric(&self, metric: &str) -> Vec<f64> {
        let (name, labels) = metric.split_once('{').unwrap_or((metric, ""));
        let labels: Vec<&str> = labels.trim_end_matches('}').split(',').collect();
        let has = |series: &str| {
            let (of, all) = series.split_once('{').unwrap_or((series, ""));
            of == name && labels.iter().all(|label| all.contains(label))
        };
        let (status, body) = self.exporter.ask("GET", "/metrics");
        if !status.contains("200") {
            return Vec::new();
        }
        let lines = body.lines().filter_map(|line| line.rsplit_once(' '));
        let of = lines.filter(|(series, _)| has(series));
        of.map(|(_, value)| value.parse().unwrap()).collect()
    }
}

/// A client that makes calls, as a process.
pub struct Client(Process);

impl Client {
    /// Waits for its end. Whether all its pages were stored, or read.
    pub fn ends_well(mut self) -> bool {
        let child = &mut self.0.0;
        let mut ended = None;
        eventually("the client has ended", || {
            ended = child.try_wait().unwrap();
            ended.is_some()
        });
        ended.is_some_and(|status| status.success())
    }
}

//! A store with its owner, its clients, and the instruments.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::runbook;
use crate::support::honest::{PATIENCE, Process, eventually};
use crate::support::observe::Exporter;
use crate::support::served::{Phases, Served};
use crate::support::{as_user, directory, json, larder, text};
use crate::watch::Watch;

const STORE_SIZE: &str = "256MiB";

/// See the module.
pub struct Scene {
    directory: tempfile::TempDir,
    pub path: PathBuf,
    log: PathBuf,
    pub owner: Option<Process>,
    exporter: Exporter,
    /// `None` where there is no Prometheus.
    pub watch: Option<Watch>,
    /// The user of the instruments, if it is not that of the test.
    user: Option<u32>,
    /// Served before the incident, and in it.
    before: Served,
    within: Mutex<Served>,
}

/// The traces of a fault in the instruments. `None`: it leaves none there.
pub struct Signs<'a> {
    /// A metric with its labels, without the label of the volume, and its value.
    pub metric: (&'a str, f64),
    /// Words of `stat`.
    pub stat: &'a str,
    /// The exit code of `stat --check`, and its words.
    pub check: (i32, &'a str),
    /// Words of a line of `doctor`, which begins with its level.
    pub doctor: Option<(&'a str, &'a str)>,
    /// Words of the owner's log.
    pub log: Option<&'a str>,
    pub alert: Option<&'a str>,
}

impl Scene {
    /// A served store of two volumes. `prepare` is called on the path of the second one before the
    /// owner opens them.
    pub fn of<T>(prepare: impl FnOnce(&Path) -> Option<T>) -> Option<(Scene, T)> {
        Scene::with(None, prepare)
    }

    /// The same with instruments that run as another user. The owner serves its group.
    pub fn with<T>(
        user: Option<u32>,
        prepare: impl FnOnce(&Path) -> Option<T>,
    ) -> Option<(Scene, T)> {
        let directory = directory();
        let path = directory.path().join("store");
        let second = directory.path().join("second");
        let create = ["create", text(&path), "--size", STORE_SIZE, "--volume"];
        json(&[&create[..], &[text(&second)]].concat());
        let prepared = prepare(&second)?;
        let exporter = Exporter::as_user(text(&path), user);
        let mut scene = Scene {
            log: directory.path().join("log"),
            owner: None,
            watch: Watch::of(&exporter),
            exporter,
            directory,
            path,
            user,
            before: Served::default(),
            within: Mutex::default(),
        };
        scene.serve();
        scene.before = scene.served();
        if let Some(watch) = &scene.watch {
            eventually("Prometheus has seen the store without a fault", || {
                watch.sum("larder_up") == 1.0 && watch.firing().is_empty()
            });
        }
        Some((scene, prepared))
    }

    /// Starts an owner, and waits until it serves.
    pub fn serve(&mut self) {
        self.serve_with(&[]);
    }

    /// The same, with these options.
    pub fn serve_with(&mut self, options: &[&str]) {
        self.serve_in(&[], options);
    }

    /// The same, with these variables of the environment.
    pub fn serve_in(&mut self, environment: &[(&str, &str)], options: &[&str]) {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(&self.log);
        let group = self.user.map(|group| group.to_string());
        let group = group.iter().flat_map(|group| ["--group", group]);
        let arguments = ["serve", self.at()].into_iter().chain(group);
        let arguments = arguments.chain(options.iter().copied());
        let mut owner = larder(&arguments.collect::<Vec<_>>())
            .env("LARDER_LOG", "info")
            .envs(environment.iter().copied())
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

    /// The owner's process.
    pub fn pid(&self) -> u32 {
        self.owner.as_ref().unwrap().0.id()
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
        let output = as_user(arguments, self.user).output().unwrap();
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
        let (metric, value) = signs.metric;
        let seen = |instrument: &str, is_seen: &dyn Fn() -> bool| {
            eventually(&format!("{instrument}, of {metric}"), is_seen);
            let took = begun.elapsed().as_secs_f64();
            println!("sign of {metric}: {instrument} after {took:.1} s");
        };
        seen("metrics", &|| self.metric(metric).contains(&value));
        let (code, words) = signs.check;
        let checked = Mutex::default();
        // At once: some instruments wait for a stopped owner.
        thread::scope(|instruments| {
            instruments.spawn(|| {
                seen("check", &|| {
                    let (ended, said) = self.run(&["stat", self.at(), "--check"]);
                    let is_seen = ended == Some(code) && said.contains(words);
                    *checked.lock().unwrap() = said;
                    is_seen
                });
            });
            instruments.spawn(|| {
                seen("stat", &|| {
                    self.run(&["stat", self.at()]).1.contains(signs.stat)
                });
            });
            if let Some((level, words)) = signs.doctor {
                instruments.spawn(move || {
                    seen("doctor", &|| {
                        let said = self.run(&["doctor", self.at()]).1;
                        let mut lines = said.lines();
                        lines.any(|line| line.starts_with(level) && line.contains(words))
                    });
                });
            }
            if let Some(words) = signs.log {
                seen("log", &|| self.log().contains(words));
            }
            if let (Some(watch), Some(alert)) = (&self.watch, signs.alert) {
                seen("alert", &|| watch.firing().contains(alert));
            }
        });
        runbook::tells(code, &checked.lock().unwrap(), &self.log());
        *self.within.lock().unwrap() = self.served();
    }

    /// Waits until the store is well again: by the check, by the metric, and without the alert.
    /// Tests the texts that the exporter served.
    #[track_caller]
    pub fn recovers(&self, signs: &Signs<'_>) {
        eventually("the check is good again", || {
            self.run(&["stat", self.at(), "--check"]).0 == Some(0)
        });
        let (metric, value) = signs.metric;
        let is_counter = metric.contains("_total");
        eventually("the metric is another one", || {
            is_counter || !self.metric(metric).contains(&value)
        });
        let phases = Phases {
            before: self.before.clone(),
            within: std::mem::take(&mut self.within.lock().unwrap()),
            after: self.served(),
        };
        phases.are_taken_by_python();
        if let (Some(watch), Some(alert)) = (&self.watch, signs.alert) {
            eventually("the alert has ended", || !watch.firing().contains(alert));
            phases.fire_in_time(alert, self.directory.path());
        }
    }

    /// What the exporter serves.
    fn served(&self) -> Served {
        Served::of(self.exporter.ask("GET", "/metrics"))
    }

    /// The values of a metric with these labels, whatever its other labels are.
    pub fn metric(&self, metric: &str) -> Vec<f64> {
        self.served().values(metric)
    }
}

/// A client that makes calls, as a process.
pub struct Client(Process);

impl Client {
    pub fn pid(&self) -> u32 {
        self.0.0.id()
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.pid()).unwrap());
        kill(pid, signal).unwrap();
    }

    pub fn has_ended(&mut self) -> bool {
        self.0.0.try_wait().unwrap().is_some()
    }

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

//! The tasks of an operator on a store that servers use: deletions, imports and checks; the
//! service.

use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::Duration;

use larder_engine::format::{Namespace, PageKey, PageShape, SEGMENTS_OFFSET};
use larder_engine::{Part, PutOptions, PutPage};

use super::metrics::serve;
use super::served::read;
use super::support::honest::{eventually, found};
use super::support::{chain, flip, noise};
use super::*;

pub const PAGE_BYTES: u32 = 64 << 10;

/// A namespace of a model; the weights tell two namespaces of it apart.
pub fn namespace(model: &str, weights: &str) -> Namespace {
    Namespace::builder(model, weights, 64, PageShape::new(&[PAGE_BYTES]).unwrap())
        .build()
        .unwrap()
}

/// Puts a chain of pages.
pub fn put(store: &Store, namespace: &Namespace, seed: u64, pages: u64) {
    put_keys(store, namespace, &chain(seed, pages));
}

/// Puts a chain of pages with these keys.
pub fn put_keys(store: &Store, namespace: &Namespace, keys: &[PageKey]) {
    let id = store.namespace(namespace).unwrap();
    let bytes = noise(0, PAGE_BYTES as usize);
    let parts = [std::io::IoSlice::new(&bytes)];
    let mut parent = None;
    for (depth, &key) in (0..).zip(keys) {
        let page = PutPage {
            key,
            parent,
            depth,
            parts: &parts,
        };
        let statuses = store.put(id, &[page], PutOptions::default());
        assert!(statuses[0].is_present(), "{statuses:?}");
        parent = Some(key);
    }
}

fn hits(store: &Store, namespace: &Namespace, seed: u64, pages: u64) -> usize {
    let id = store.namespace(namespace).unwrap();
    let statuses = read(store, id, &chain(seed, pages), None);
    statuses.iter().filter(|status| status.is_hit()).count()
}

#[test]
fn a_model_and_a_namespace_are_deleted_from_a_store_that_servers_use() {
    let directory = directory();
    let path = store_in(&directory);
    let at = text(&path);
    let _owner = serve(at);
    let server = Store::attach(&path, OpenOptions::default()).unwrap();
    let spaces = [
        namespace("tiny", "w1"),
        namespace("tiny", "w2"),
        namespace("large", "w1"),
    ];
    for (seed, space) in (1..).zip(&spaces) {
        put(&server, space, seed, 4);
    }
    let one = spaces[0].fingerprint().to_string();
    fails(&["delete", at], 2, &["--namespace", "--model"]);
    fails(
        &["delete", at, "--model", "other"],
        2,
        &["\"other\"", "large, tiny"],
    );
    fails(
        &["delete", at, "--model", "tiny", "--namespace", &one],
        2,
        &[],
    );
    fails(&["delete", at, "--namespace", "tiny"], 2, &["--model"]);

    let would = json(&["delete", at, "--model", "tiny", "--dry-run"]);
    assert_eq!(
        (&would["dry_run"], &would["deleted_pages"]),
        (&true.into(), &8.into())
    );
    assert_eq!(json(&["stat", at])["pages"], 12);

    let done = json(&["delete", at, "--namespace", &one]);
    assert_eq!(done["deleted_pages"], 4);
    assert_eq!(done["namespaces"][0]["fingerprint"], one);
    assert_eq!(done["namespaces"][0]["live_bytes"], 4 * PAGE_BYTES);
    says(
        &["delete", at, "--model", "tiny"],
        0,
        &["tiny: 4 pages", "Deleted"],
    );
    let told = json(&["stat", at]);
    assert_eq!(
        (&told["pages"], &told["deleted_pages"]),
        (&4.into(), &8.into())
    );
    assert_eq!(
        hits(&server, &spaces[0], 1, 4) + hits(&server, &spaces[1], 2, 4),
        0
    );
    assert_eq!(hits(&server, &spaces[2], 3, 4), 4);
    server.close().unwrap();
}

#[test]
fn pages_of_a_model_leave_and_enter_a_store_that_servers_use() {
    let directory = directory();
    let path = store_in(&directory);
    let at = text(&path);
    let _owner = serve(at);
    let server = Store::attach(&path, OpenOptions::default()).unwrap();
    let [kept, other] = [namespace("kept", "w1"), namespace("other", "w1")];
    put(&server, &kept, 1, 4);
    put(&server, &other, 2, 4);
    server.flush().unwrap();
    let archive = directory.path().join("archive");
    let exported = json(&["export", at, text(&archive), "--model", "kept"]);
    assert_eq!(exported["pages"], 4);
    fails(
        &["export", at, "-", "--model", "none"],
        2,
        &["\"none\"", "kept, other"],
    );
    json(&["delete", at, "--model", "kept"]);
    assert_eq!(hits(&server, &kept, 1, 4), 0);
    let dry = json(&["import", at, text(&archive), "--dry-run"]);
    assert_eq!(
        (&dry["condition"], &dry["pages_put"]),
        (&"in_use".into(), &4.into())
    );
    assert_eq!(hits(&server, &kept, 1, 4), 0);
    assert_eq!(json(&["import", at, text(&archive)])["pages_put"], 4);
    assert_eq!(hits(&server, &kept, 1, 4), 4);
    assert_eq!(server.part(), Part::Client);
    server.close().unwrap();
}

#[test]
fn damaged_pages_of_a_store_in_use_are_found_and_dropped_by_its_owner() {
    const PAGES: u64 = 300;
    let directory = directory();
    let path = store_in(&directory);
    let at = text(&path);
    let _owner = serve(at);
    let server = Store::attach(&path, OpenOptions::default()).unwrap();
    let space = namespace("tiny", "w1");
    // More than a segment: the pages of the first one are proven.
    put(&server, &space, 1, PAGES);
    server.flush().unwrap();
    let sound = json(&["verify", at, "--online"]);
    assert_eq!(
        (&sound["damaged"], &sound["condition"]),
        (&false.into(), &"in_use".into())
    );
    assert_eq!(sound["deep"]["good_pages"], PAGES);

    // Behind two blocks of headers the first pages of the first segment.
    flip(
        &path,
        SEGMENTS_OFFSET + 2 * 4096 + u64::from(PAGE_BYTES) + 99,
    );
    let found = report(&["verify", at, "--online", "--rate", "1GiB"], 1);
    assert_eq!(found["deep"]["damaged_pages"], 1);
    assert_eq!(found["deep"]["dropped_pages"], 1);
    assert_eq!(found["damage"][0]["kind"], "payload");
    assert_eq!(json(&["stat", at])["damaged_pages"], 1);
    assert_eq!(
        json(&["verify", at, "--online"])["deep"]["good_pages"],
        PAGES - 1
    );
    fails(&["verify", at], 3, &["in use"]);
    fails(&["verify", at, "--online", "--repair"], 2, &["--repair"]);
    server.close().unwrap();
}

/// The next message of a service to its manager.
fn notice(manager: &UnixDatagram) -> String {
    let mut bytes = [0; 4096];
    let length = loop {
        match manager.recv(&mut bytes) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            received => break received.unwrap(),
        }
    };
    String::from_utf8(bytes[..length].to_vec()).unwrap()
}

/// A process of `larder serve`, and the manager that it notifies.
struct Service {
    process: Process,
    said: std::io::Lines<BufReader<std::process::ChildStdout>>,
    manager: UnixDatagram,
}

impl Service {
    fn start(at: &str, socket: &Path) -> Service {
        let manager = UnixDatagram::bind(socket).unwrap();
        manager
            .set_read_timeout(Some(Duration::from_secs(120)))
            .unwrap();
        let mut service = larder(&["serve", at])
            .env("NOTIFY_SOCKET", socket)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Service {
            said: BufReader::new(service.stdout.take().unwrap()).lines(),
            process: Process(service),
            manager,
        }
    }

    /// Waits for a notice and a line with these words.
    fn tells(&mut self, status: &str, line: &str) {
        while !notice(&self.manager).contains(status) {}
        while !self.said.next().unwrap().unwrap().contains(line) {}
    }

    fn pid(&self) -> u32 {
        self.process.0.id()
    }

    /// Stops it as a service manager does.
    fn stop(mut self) {
        let pid = i32::try_from(self.pid()).unwrap();
        kill(Pid::from_raw(pid), Signal::SIGTERM).unwrap();
        while !notice(&self.manager).contains("STOPPING=1") {}
        let ended = found("the service ends", || self.process.0.try_wait().unwrap());
        assert!(ended.success());
    }
}

#[test]
fn a_service_takes_the_store_over_from_a_server_and_keeps_it() {
    let directory = directory();
    let path = store_in(&directory);
    let at = text(&path);
    let tiny = namespace("tiny", "w1");
    let server = Store::attach(&path, OpenOptions::default()).unwrap();
    put(&server, &tiny, 1, 4);

    let mut service = Service::start(at, &directory.path().join("notify"));
    service.tells("STATUS=serving 4 pages", "Serving on");
    eventually("the server is a client", || server.part() == Part::Client);
    assert_eq!(json(&["stat", at])["pid"], service.pid());
    put(&server, &tiny, 2, 4);
    assert_eq!(hits(&server, &tiny, 1, 4) + hits(&server, &tiny, 2, 4), 8);

    let mut second = Service::start(at, &directory.path().join("second"));
    let own = format!("process {}", service.pid());
    second.tells("READY=1", &own);
    assert_eq!(json(&["stat", at])["pid"], service.pid());
    second.stop();

    server.close().unwrap();
    service.stop();
    eventually("the store is closed", || {
        doctor(&[at]).contains("closed cleanly")
    });
}

#[test]
fn a_store_whose_blocks_were_written_before_is_told_from_others() {
    let directory = directory();
    let said = |name: &str, options: &[&str]| {
        let path = directory.path().join(name);
        let create = ["create", text(&path), "--size", STORE_SIZE];
        ends(&[&create[..], options].concat(), 0);
        doctor(&[text(&path)])
    };
    let plain = said("plain", &[]);
    if !plain.contains("never written") {
        return skipped("blocks that were never written", "no extents of them here");
    }
    let prewritten = said("prewritten", &["--prewrite"]);
    assert!(prewritten.contains("all written before"), "{prewritten}");
}

#[test]
fn the_units_for_systemd_are_sound() {
    let verify = |unit: &Path| {
        Command::new("systemd-analyze")
            .arg("verify")
            .arg(unit)
            .output()
    };
    let directory = directory();
    let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/systemd");
    for name in ["larder", "larder-exporter"] {
        let unit = std::fs::read_to_string(units.join(format!("{name}@.service"))).unwrap();
        assert!(unit.contains("ExecStart=/usr/local/bin/larder "), "{unit}");
        let unit = unit.replace("/usr/local/bin/larder", env!("CARGO_BIN_EXE_larder"));
        let path = directory.path().join(format!("{name}@main.service"));
        std::fs::write(&path, unit).unwrap();
        let drop_in = format!("{name}@.service.d/drive-health.conf");
        if let Ok(text) = std::fs::read(units.join(drop_in)) {
            let beside = path.with_extension("service.d");
            std::fs::create_dir(&beside).unwrap();
            std::fs::write(beside.join("drive-health.conf"), text).unwrap();
        }
        match verify(&path) {
            Ok(output) => {
                let said = stderr(&output);
                assert!(output.status.success() && said.is_empty(), "{name}: {said}");
            }
            Err(error) => {
                return skipped("the units for systemd", format!("systemd-analyze: {error}"));
            }
        }
    }
}

#[test]
fn the_log_has_the_form_and_the_levels_that_are_asked_for() {
    let directory = directory();
    let path = store_in(&directory);
    let put = [
        "bench",
        text(&path),
        "--op",
        "put",
        "--pages",
        "1",
        "--page-bytes",
        "64KiB",
    ];
    let lines = |arguments: &[&str], variables: &[(&str, &str)]| {
        let mut command = larder(&[&put[..], arguments].concat());
        command
            .env_remove("RUST_LOG")
            .envs(variables.iter().copied());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        stderr(&output)
    };
    let json = ["--log-format", "json"];
    let said = lines(&json, &[("LARDER_LOG", "larder_store=debug")]);
    let objects: Vec<Value> = said
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(!objects.is_empty());
    for object in &objects {
        assert!(
            object["message"].is_string() && object["timestamp"].is_string(),
            "{object}"
        );
        assert!(
            object["target"]
                .as_str()
                .unwrap()
                .starts_with("larder_store"),
            "{object}"
        );
    }
    assert!(lines(&[], &[("RUST_LOG", "debug")]).contains("larder_store"));
    assert_eq!(
        lines(&[], &[("RUST_LOG", "debug"), ("LARDER_LOG", "error")]),
        ""
    );
    assert_eq!(lines(&[], &[]), "");
    let said = lines(&[], &[("LARDER_LOG", "larder_store=loud")]);
    assert!(said.contains("LARDER_LOG=larder_store=loud"), "{said}");
}

#[test]
fn completions_and_manual_pages_have_every_command() {
    let directory = directory();
    for shell in ["bash", "zsh", "fish"] {
        says(&["completions", shell], 0, &["exporter", "openmetrics"]);
    }
    let manuals = directory.path().join("man1");
    ends(&["man", text(&manuals)], 0);
    let help = String::from_utf8(ends(&["--help"], 0).stdout).unwrap();
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let commands: Vec<&str> = commands
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .collect();
    assert!(commands.len() > 12, "{help}");
    for command in commands {
        let page = std::fs::read_to_string(manuals.join(format!("larder-{command}.1"))).unwrap();
        assert!(page.contains(".SH"), "{command}");
    }
}

//! Commands on a store whose file was deleted or replaced while it is served, and beside an owner
//! that is stopped.

use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};

use super::support::honest::eventually;
use super::*;

/// An owner with its log, and what it has logged.
struct Logged {
    owner: Process,
    log: PathBuf,
}

impl Logged {
    fn serve(store: &Path) -> Logged {
        let log = store.with_extension("log");
        let mut owner = larder(&["serve", text(store)])
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let mut first = String::new();
        let told = owner.stdout.take().unwrap();
        BufReader::new(told).read_line(&mut first).unwrap();
        assert!(first.contains("Serving"), "{first}");
        Logged {
            owner: Process(owner),
            log,
        }
    }

    fn pid(&self) -> String {
        self.owner.0.id().to_string()
    }

    fn says(&self, line: &str) -> usize {
        std::fs::read_to_string(&self.log)
            .unwrap()
            .matches(line)
            .count()
    }
}

/// The value of a metric of the store.
fn metric(store: &str, name: &str) -> f64 {
    let output = larder(&["stat", store, "--openmetrics"]).output().unwrap();
    let told = String::from_utf8(output.stdout).unwrap();
    let line = told.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("{name}: {told}"))
        .trim()
        .parse()
        .unwrap()
}

#[test]
fn every_command_tells_that_the_file_of_a_served_store_is_gone() {
    let directory = directory();
    let path = store_in(&directory);
    let at = text(&path);
    let owner = Logged::serve(&path);
    says(&["stat", at, "--check"], 0, &["serving"]);
    assert_eq!(metric(at, "larder_displaced_volumes"), 0.0);
    std::fs::remove_file(&path).unwrap();

    let told = json(&["stat", at]);
    assert_eq!(told["displaced_volumes"][0]["path"], at);
    says(&["stat", at], 0, &["Displaced", at]);
    says(
        &["stat", at, "--check"],
        1,
        &["degraded", &owner.pid(), "Stop the owner"],
    );
    // A restart of its owner mends nothing.
    says(&["stat", at, "--check", "--alive"], 0, &["degraded"]);
    assert_eq!(metric(at, "larder_displaced_volumes"), 1.0);
    assert_eq!(metric(at, "larder_store_state{state=\"degraded\"}"), 1.0);
    let said = doctor(&[at]);
    assert!(said.contains("fail  place") && said.contains(at), "{said}");
    // Also without a question, and once.
    eventually("the owner has logged it", || {
        owner.says("a volume is displaced") > 0
    });
    json(&["stat", at]);
    assert_eq!(owner.says("a volume is displaced"), 1);
}

#[test]
fn the_store_that_replaces_a_served_one_is_named_apart_from_it_and_works_at_once() {
    let directory = directory();
    let path = store_in(&directory);
    let at = text(&path);
    let former = Logged::serve(&path);
    json(&[
        "bench",
        at,
        "--op",
        "put",
        "--shared",
        "--pages",
        "8",
        "--page-bytes",
        "64KiB",
    ]);
    assert!(json(&["stat", at])["pages"].as_u64() >= Some(8));
    std::fs::remove_file(&path).unwrap();
    let process = format!("Process {}", former.pid());
    let in_the_way = [&process[..], "serves another store"];
    says(&["create", at, "--size", "128MiB"], 0, &in_the_way);

    let another = [&process[..], "serves another store", "Stop that process"];
    fails(&["stat", at], 3, &another);
    fails(&["stat", at, "--check"], 3, &another);
    fails(&["stat", at, "--check", "--alive"], 3, &another);
    assert_eq!(metric(at, "larder_up"), 0.0);
    let said = doctor(&[at]);
    assert!(
        said.contains("fail  store in use") && said.contains(&process),
        "{said}"
    );
    says(&["compact", at, "--dry-run"], 0, &[]);
    // It does not delete in the former store, which has pages of this model.
    fails(&["delete", at, "--model", "bench"], 2, &["bench"]);

    let owner = Logged::serve(&path);
    let told = json(&["stat", at]);
    assert_eq!(told["pid"].to_string(), owner.pid());
    assert_eq!(
        (&told["pages"], &told["capacity_bytes"]),
        (&0.into(), &(128 << 20).into())
    );
    drop(former);
    says(&["stat", at, "--check"], 0, &["serving", &owner.pid()]);
}

#[test]
fn commands_beside_a_stopped_owner_say_that_it_does_not_answer() {
    let directory = directory();
    let path = store_in(&directory);
    let at = text(&path);
    let owner = Logged::serve(&path);
    let pid = Pid::from_raw(i32::try_from(owner.owner.0.id()).unwrap());
    kill(pid, Signal::SIGSTOP).unwrap();
    let stopped = waitpid(pid, Some(WaitPidFlag::WUNTRACED)).unwrap();
    assert_eq!(stopped, WaitStatus::Stopped(pid, Signal::SIGSTOP));
    let named = format!("process {pid}, has not answered for 2 s");
    let silent = [&named[..], "stopped", "kill -CONT"];
    fails(&["delete", at, "--model", "bench", "--dry-run"], 3, &silent);
    fails(&["delete", at, "--model", "bench"], 3, &silent);
    fails(&["compact", at], 3, &silent);
    fails(&["stat", at, "--check"], 3, &silent);
    // A stopped process does not block a store that is not its own.
    std::fs::remove_file(&path).unwrap();
    json(&["create", at, "--size", STORE_SIZE]);
    fails(&["delete", at, "--model", "bench"], 2, &["bench"]);
    let next = Logged::serve(&path);
    says(&["stat", at, "--check"], 0, &["serving", &next.pid()]);
    kill(pid, Signal::SIGCONT).unwrap();
}

//! Incidents of processes.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::scene::{Client, Scene, Signs};
use crate::support::honest::eventually;

const PUT: [&str; 6] = [
    "--op",
    "put",
    "--force",
    "--page-bytes=512KiB",
    "--pages",
    "8000",
];
const GET: [&str; 5] = ["--op", "get", "--page-bytes=64KiB", "--pages", "2000"];

const STOPPED: &str = "has not answered for 2 s: it is stopped (SIGSTOP or a debugger)";

#[test]
fn the_owner_is_stopped() {
    let Some((scene, ())) = Scene::of(|_| Some(())) else {
        return;
    };
    let signs = Signs {
        metric: ("larder_up", 0.0),
        stat: STOPPED,
        check: (3, STOPPED),
        doctor: Some(("fail  store in use", STOPPED)),
        log: None,
        alert: Some("LarderUnserved"),
    };
    let owner = Pid::from_raw(i32::try_from(scene.pid()).unwrap());
    kill(owner, Signal::SIGSTOP).unwrap();
    scene.shows(&signs);
    kill(owner, Signal::SIGCONT).unwrap();
    scene.recovers(&signs);
}

#[test]
fn the_owner_is_killed() {
    let Some((mut scene, ())) = Scene::of(|_| Some(())) else {
        return;
    };
    let owner = format!("process {}, which opened it at ", scene.pid());
    let killed = "was killed or crashed, and did not close it";
    let signs = Signs {
        metric: ("larder_up", 0.0),
        stat: killed,
        check: (3, killed),
        doctor: Some(("warn  store in use", killed)),
        log: None,
        alert: Some("LarderUnserved"),
    };
    scene.owner = None;
    scene.shows(&signs);
    let (_, said) = scene.run(&["stat", scene.at(), "--check"]);
    let is_named = said.contains("no process serves the store") && said.contains(&owner);
    assert!(is_named, "{said}");
    scene.serve();
    scene.recovers(&signs);
}

/// A client that makes these calls, stopped in the middle of some, as this metric shows.
fn stopped(scene: &Scene, calls: &[&str], metric: &str) -> Client {
    let mut client = scene.client(calls);
    let is_calling = || scene.metric(metric).iter().any(|count| *count > 0.0);
    eventually(&format!("stopped, with {metric}"), || {
        if client.has_ended() {
            client = scene.client(calls);
        }
        let mut is_stopped = is_calling();
        if is_stopped {
            client.signal(Signal::SIGSTOP);
            // A call may have ended in between.
            is_stopped = is_calling();
            if !is_stopped {
                client.signal(Signal::SIGCONT);
            }
        }
        is_stopped
    });
    client
}

#[test]
fn a_client_is_killed_in_a_put() {
    let Some((scene, ())) = Scene::of(|_| Some(())) else {
        return;
    };
    let client = stopped(&scene, &PUT, "larder_puts_in_flight");
    let pid = client.pid();
    drop(client);
    let aborted = || scene.metric("larder_aborted_pages_total")[0];
    eventually("pages are given up", || aborted() > 0.0);
    let (given_up, logged) = (
        format!("0 failed, {} given up by clients", aborted()),
        format!("pid={pid} pages={} more=0", aborted()),
    );
    let ended = format!("process {pid} (larder) ended in the middle of puts");
    let signs = Signs {
        metric: ("larder_aborted_pages_total", aborted()),
        stat: &given_up,
        check: (0, &ended),
        doctor: Some(("warn  clients", &ended)),
        log: Some(&logged),
        alert: None,
    };
    scene.shows(&signs);
    assert_eq!(scene.metric("larder_failed_pages_total"), [0.0]);
    let log = scene.log();
    assert!(
        log.contains("a client has ended in the middle of puts"),
        "{log}"
    );
    assert!(!log.contains("refuse"), "{log}");
    scene.recovers(&signs);
}

#[test]
fn a_client_is_stopped_in_a_read() {
    let Some((scene, ())) = Scene::of(|_| Some(())) else {
        return;
    };
    let client = stopped(&scene, &GET, "larder_reads_in_flight");
    let of = format!("process {} (larder) has not run for", client.pid());
    let logged = format!("pid={}", client.pid());
    let signs = Signs {
        metric: ("larder_stopped_clients", 1.0),
        stat: &of,
        check: (1, &of),
        doctor: Some(("warn  clients", &of)),
        log: Some(&logged),
        alert: Some("LarderStuckClients"),
    };
    scene.shows(&signs);
    let log = scene.log();
    assert!(
        log.contains("a client is stopped, in the middle of reads or puts"),
        "{log}"
    );
    client.signal(Signal::SIGCONT);
    scene.recovers(&signs);
}

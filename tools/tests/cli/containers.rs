//! The commands across containers: other pid, mount and user namespaces, a socket that is deleted,
//! a probe.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use super::*;
use crate::support::honest::found;

/// A command in namespaces of its own, which end with it; `None` where `unshare` makes none.
fn apart(namespaces: &[&str], arguments: &[&str]) -> Option<Command> {
    let mut probe = Command::new("unshare");
    let made = probe.args(namespaces).arg("true").stderr(Stdio::null());
    if !made.status().is_ok_and(|status| status.success()) {
        skipped(
            "commands across containers",
            "`unshare` makes no namespaces",
        );
        return None;
    }
    let mut command = Command::new("unshare");
    command
        .args(namespaces)
        .arg(env!("CARGO_BIN_EXE_larder"))
        .args(arguments)
        .env_remove("LARDER_LOG")
        .stdin(Stdio::null());
    Some(command)
}

/// Starts `larder serve`, and waits until it serves.
fn serving(command: &mut Command) -> Process {
    let mut owner = Process(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut said = BufReader::new(owner.0.stdout.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert!(line.contains("Serving on"), "{line}");
    // It goes on writing there.
    std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
    owner
}

/// A client that puts some pages.
fn puts(store: &Path) -> Vec<&str> {
    let pages = ["--page-bytes", "64KiB", "--pages", "8"];
    let client = ["bench", text(store), "--shared", "--op", "put"];
    [&client[..], &pages].concat()
}

/// The path of the socket of a store.
fn socket_of(store: &Path) -> PathBuf {
    let mut path = store.as_os_str().to_owned();
    path.push(".sock");
    path.into()
}

#[test]
fn an_owner_in_another_pid_namespace_is_asked_and_named_as_far_as_it_is_visible() {
    let directory = directory();
    let path = store_in(&directory);
    let own_pids = ["--pid", "--fork", "--kill-child"];
    let Some(mut serve) = apart(&own_pids, &["serve", text(&path)]) else {
        return;
    };
    let _owner = serving(&mut serve);
    // From the parent namespace it is visible.
    let seen = json(&["stat", text(&path)])["pid"].as_u64().unwrap();
    assert!(Path::new(&format!("/proc/{seen}")).exists());
    let mut stat = apart(&own_pids, &["stat", text(&path), "--json"]).unwrap();
    let told: Value = serde_json::from_slice(&stat.output().unwrap().stdout).unwrap();
    assert_eq!(told["pid"], Value::Null);
    // Its number is one of its own namespace, where another process of this one may have it.
    let inspected = json(&["inspect", text(&path)]);
    assert_eq!(inspected["condition"], "in_use");
    assert_eq!(inspected["holder"]["alive"], Value::Null);
    says(&["inspect", text(&path)], 0, &["IN USE", "container"]);
    fails(
        &["verify", text(&path)],
        3,
        &["in use", "container", "stop it first"],
    );
    let said = doctor(&[text(&path)]);
    assert!(
        said.contains(&format!("yes, served by process {seen}")),
        "{said}"
    );
    let mut doctor = apart(&own_pids, &["doctor", text(&path)]).unwrap();
    let said = String::from_utf8(doctor.output().unwrap().stdout).unwrap();
    let words = [
        "yes, served by a process of another pid namespace",
        "its container or to the host",
    ];
    assert!(words.iter().all(|word| said.contains(word)), "{said}");
    let wrote = apart(&own_pids, &puts(&path)).unwrap().output().unwrap();
    assert!(wrote.status.success(), "{}", stderr(&wrote));
}

#[test]
fn a_user_that_the_owners_user_namespace_does_not_map_is_denied_with_a_sentence_of_its_own() {
    let directory = directory();
    let path = store_in(&directory);
    if !rustix::process::geteuid().is_root() {
        skipped("a client of an unmapped user", "this is not root");
        return;
    }
    for (path, mode) in [(directory.path(), 0o755), (&path, 0o660)] {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }
    // It maps root alone. Its clients of group 0 may connect, whichever user they are.
    let arguments = ["serve", text(&path), "--group", "0"];
    let Some(mut serve) = apart(&["--user", "--map-root-user"], &arguments) else {
        return;
    };
    let log = directory.path().join("log");
    serve.stderr(std::fs::File::create(&log).unwrap());
    let _owner = serving(&mut serve);
    let uid = 54_321;
    for _ in 0..20 {
        let mut stat = Command::new("setpriv");
        stat.args([&format!("--reuid={uid}"), "--regid=0", "--clear-groups"]);
        stat.arg(env!("CARGO_BIN_EXE_larder"))
            .args(["stat", text(&path)]);
        let denied = stat.output().unwrap();
        assert_eq!(denied.status.code(), Some(3));
        let said = stderr(&denied);
        assert!(
            said.contains("not mapped in the owner's user namespace"),
            "{said}"
        );
    }
    let logged = std::fs::read_to_string(&log).unwrap();
    assert_eq!(logged.lines().count(), 1, "{logged}");
    json(&["stat", text(&path)]);
}

#[test]
fn a_client_that_has_the_directory_mounted_elsewhere_finds_the_owner_and_its_volumes() {
    let directory = directory();
    let path = directory.path().join("store");
    let further = directory.path().join("further");
    let volumes = [
        "create",
        text(&path),
        "--volume",
        text(&further),
        "--size",
        "512MiB",
    ];
    json(&volumes);
    let elsewhere = support::directory();
    let seen = elsewhere.path().join("store");
    let script = "mount --bind \"$1\" \"$2\" && shift 2 && exec \"$0\" \"$@\"";
    let mut client = Command::new("unshare");
    client
        .args(["--mount", "sh", "-c", script, env!("CARGO_BIN_EXE_larder")])
        .args([directory.path(), elsewhere.path()])
        .args(["bench", text(&seen), "--shared", "--op", "put"])
        .args(["--page-bytes", "64KiB", "--pages", "64"]);
    if apart(&["--mount"], &[]).is_none() {
        return;
    }
    let _owner = serving(&mut larder(&["serve", text(&path)]));
    let wrote = client.output().unwrap();
    assert!(wrote.status.success(), "{}", stderr(&wrote));
    assert_eq!(json(&["stat", text(&path)])["pages_put"], 64);
}

#[test]
fn a_socket_that_is_deleted_is_bound_anew_and_until_then_every_command_says_the_same() {
    let directory = directory();
    let path = store_in(&directory);
    let _owner = serving(&mut larder(&["serve", text(&path)]));
    let socket = socket_of(&path);
    for deletes in [
        (|socket| std::fs::remove_file(socket)) as fn(&Path) -> std::io::Result<()>,
        // Another socket in its place, without a listener.
        |socket| {
            std::fs::remove_file(socket)?;
            std::os::unix::net::UnixListener::bind(socket).map(drop)
        },
    ] {
        deletes(&socket).unwrap();
        found("the owner binds it anew", || {
            let asked = larder(&["stat", text(&path)]).output().unwrap();
            let said = stderr(&asked);
            let is_known = asked.status.success() || said.contains("serves no socket");
            assert!(is_known, "{said}");
            asked.status.success().then_some(())
        });
    }
    // A process that works on the store alone looks the same to all.
    let directory = self::directory();
    let path = store_in(&directory);
    let store = Store::open(&path, OpenOptions::default()).unwrap();
    let commands: [&[&str]; 4] = [
        &["stat", text(&path)],
        &["verify", text(&path)],
        &["serve", text(&path)],
        &["bench", text(&path), "--op", "get"],
    ];
    let sentence = commands.map(|arguments| {
        let said = fails(arguments, 3, &["in use by process", "serves no socket"]);
        said.lines().last().unwrap().to_owned()
    });
    assert!(
        sentence.iter().all(|said| *said == sentence[0]),
        "{sentence:?}"
    );
    store.close().unwrap();
}

#[test]
fn a_probe_tells_a_store_that_is_served_from_one_that_is_degraded_and_one_without_an_owner() {
    let directory = directory();
    let path = store_in(&directory);
    let probe = ["stat", text(&path), "--check"];
    fails(&probe, 3, &["larder serve"]);
    let owner = serving(&mut larder(&["serve", text(&path)]));
    says(&probe, 0, &["serving: process"]);
    assert_eq!(report(&probe, 0)["troubles"], serde_json::json!([]));
    drop(owner);
    // Until the device has answered for the last writes of the owner its lock stays.
    found("it has no owner", || {
        let said = fails(&probe, 3, &[]);
        said.contains("larder serve").then_some(())
    });
}

#[test]
fn an_owner_that_is_stopped_is_told_from_one_that_denies_a_user() {
    let directory = directory();
    let path = store_in(&directory);
    let owner = serving(&mut larder(&["serve", text(&path)]));
    let pid = Pid::from_raw(owner.0.id().cast_signed());
    kill(pid, Signal::SIGSTOP).unwrap();
    let said = fails(&["stat", text(&path)], 3, &["has not answered", "stopped"]);
    assert!(!said.contains("user") && !said.contains("group"), "{said}");
    let process = format!("process {pid}");
    let doctor = larder(&["doctor", text(&path)]).output().unwrap();
    let said = String::from_utf8_lossy(&doctor.stdout);
    let names_owner = |line: &str| line.contains(&process) && line.contains("has not answered");
    assert!(said.lines().any(names_owner), "{said}");
    kill(pid, Signal::SIGCONT).unwrap();
    json(&["stat", text(&path)]);
}

#[test]
fn a_lock_that_outlives_its_process_is_named_so() {
    let directory = directory();
    let path = store_in(&directory);
    let owner = serving(&mut larder(&["serve", text(&path)]));
    let pid = owner.0.id();
    drop(owner);
    // In place of the kernel, which holds it until the device has answered.
    let file = std::fs::File::open(&path).unwrap();
    found("the owner's lock is gone", || file.try_lock().ok());
    let words = [
        &format!("process {pid}, which has exited"),
        "its last writes are in flight",
    ];
    fails(&["verify", text(&path)], 3, &words);
    fails(&["stat", text(&path)], 3, &words);
}

#[test]
fn a_client_that_takes_over_says_so() {
    let directory = directory();
    let path = store_in(&directory);
    let owner = serving(&mut larder(&["serve", text(&path)]));
    let former = owner.0.id();
    let mut client = larder(&[&puts(&path)[..], &["--turns", "--json"]].concat());
    client
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut client = Process(client.spawn().unwrap());
    let mut turn = String::new();
    let said = client.0.stdout.take().unwrap();
    BufReader::new(said).read_line(&mut turn).unwrap();
    drop(owner);
    let log = BufReader::new(client.0.stderr.take().unwrap());
    let taken = log.lines().map_while(Result::ok);
    let taken = taken
        .into_iter()
        .find(|line| line.contains("takeover: this process owns"));
    assert!(taken.unwrap().contains(&former.to_string()));
}

#[test]
fn a_process_of_an_unmapped_user_is_a_client_and_no_owner() {
    let directory = directory();
    let path = store_in(&directory);
    let unmapped = ["--user"];
    let Some(mut serve) = apart(&unmapped, &["serve", text(&path)]) else {
        return;
    };
    let mut refused = Process(serve.stderr(Stdio::piped()).spawn().unwrap());
    let ended = found("it ends", || refused.0.try_wait().unwrap());
    assert_eq!(ended.code(), Some(3));
    let said = std::io::read_to_string(refused.0.stderr.take().unwrap()).unwrap();
    assert!(said.contains("not mapped in its user namespace"), "{said}");
    let _owner = serving(&mut larder(&["serve", text(&path)]));
    let wrote = apart(&unmapped, &puts(&path)).unwrap().output().unwrap();
    assert!(wrote.status.success(), "{}", stderr(&wrote));
}

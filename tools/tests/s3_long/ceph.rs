//! Ceph's gateway for objects, `radosgw`, over a monitor and a store of objects in memory.
//!
//! Debian has it in the packages `radosgw`, `ceph-mon`, `ceph-osd` and `ceph-common`, and `curl`.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::ports::port;
use crate::server::{BUCKET, Identity, Server};
use crate::support::directory;
use crate::support::honest::{Process, eventually};

const PROGRAMS: [&str; 7] = [
    "monmaptool",
    "ceph-mon",
    "ceph-osd",
    "ceph",
    "radosgw",
    "radosgw-admin",
    "curl",
];

const CLUSTER: &str = "67f4cb87-0845-4615-8ad8-e73603341cd4";

/// Identity of the store of objects.
const STORE: &str = "92d3ac6a-8cef-4914-a22e-59c11831217e";

const CONFIGURATION: &str = "[global]
fsid = CLUSTER
mon host = [v1:127.0.0.1:MONITOR]
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
mon pg warn min per osd = 0
mon data avail crit = 1
public addr = 127.0.0.1
cluster addr = 127.0.0.1
run dir = DIRECTORY/run
admin socket = DIRECTORY/run/$name.asok
log file = DIRECTORY/$name.log
mon data = DIRECTORY/mon
osd data = DIRECTORY/osd
[osd.0]
osd objectstore = memstore
memstore device bytes = 1073741824
[client.rgw.a]
rgw frontends = beast endpoint=127.0.0.1:GATEWAY
rgw data = DIRECTORY/rgw
rgw thread pool size = 64
rgw enable apis = s3, admin
";

/// A gateway. Without its programs, the first that is missing.
pub fn gateway() -> Result<Server, &'static str> {
    let is_there = |program: &str| {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path).any(|directory| directory.join(program).exists())
    };
    if let Some(missing) = PROGRAMS.into_iter().find(|program| !is_there(program)) {
        return Err(missing);
    }
    let (monitor, gateway) = (port(), port());
    let mut server = Server {
        processes: Vec::new(),
        directory: directory(),
        endpoint: format!("http://127.0.0.1:{gateway}"),
        ca_file: None,
    };
    let path = server.directory.path().to_owned();
    let configuration = CONFIGURATION
        .replace("CLUSTER", CLUSTER)
        .replace("MONITOR", &monitor.to_string())
        .replace("GATEWAY", &gateway.to_string())
        .replace("DIRECTORY", &path.display().to_string());
    fs::write(path.join("ceph.conf"), configuration).unwrap();
    for name in ["run", "mon", "osd", "rgw"] {
        fs::create_dir(path.join(name)).unwrap();
    }
    let address = format!("[v1:127.0.0.1:{monitor}]");
    let map = [
        "--create", "--fsid", CLUSTER, "--addv", "a", &address, "map",
    ];
    ends(&path, "monmaptool", &map);
    ends(&path, "ceph-mon", &["-i", "a", "--mkfs", "--monmap", "map"]);
    server
        .processes
        .push(start(&path, "ceph-mon", &["-i", "a", "-f"]));
    let ceph = |arguments: &str| {
        let arguments: Vec<&str> = arguments.split(' ').collect();
        command(&path, "ceph", &arguments).output().unwrap()
    };
    let monitor = &mut server.processes[0].0;
    eventually("a number for the store", || {
        let ended = monitor.try_wait().unwrap();
        assert_eq!(ended, None, "the monitor has ended; mon.a.log tells why");
        ceph(&format!("--connect-timeout 10 osd new {STORE}"));
        // It is published some time after the answer, and the store ends without it.
        let dump = ceph("--connect-timeout 10 osd dump");
        String::from_utf8_lossy(&dump.stdout).contains(STORE)
    });
    let make = ["-i", "0", "--mkfs", "--osd-uuid", STORE];
    ends(&path, "ceph-osd", &make);
    let mut of_store = start(&path, "ceph-osd", &["-i", "0", "-f"]);
    eventually("a store of objects", || {
        // It ends if it asks the monitor before it has the monitor's map, on a busy machine.
        if of_store.0.try_wait().unwrap().is_some() {
            of_store = start(&path, "ceph-osd", &["-i", "0", "-f"]);
        }
        let dump = ceph("--connect-timeout 10 osd dump");
        String::from_utf8_lossy(&dump.stdout).contains("osd.0 up")
    });
    let placed = ceph("osd crush add osd.0 1.0 root=default host=localhost");
    assert!(placed.status.success(), "{placed:?}");
    let of_gateway = start(&path, "radosgw", &["-n", "client.rgw.a", "-f"]);
    server.processes.extend([of_store, of_gateway]);
    let (key, secret) = Identity::Writer.credentials();
    let user = [
        "user",
        "create",
        "--uid",
        "larder",
        "--display-name",
        "larder",
    ];
    let credentials = ["--access-key", key, "--secret-key", secret];
    let user = [&["-n", "client.rgw.a"][..], &user, &credentials].concat();
    ends(&path, "radosgw-admin", &user);
    eventually("a bucket", || {
        let url = format!("{}/{BUCKET}", server.endpoint);
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--aws-sigv4", "aws:amz:us-east-1:s3"]);
        curl.args(["--header", "x-amz-content-sha256: UNSIGNED-PAYLOAD"]);
        curl.args([
            "--user",
            &format!("{key}:{secret}"),
            "--request",
            "PUT",
            &url,
        ]);
        curl.output().unwrap();
        server.answers()
    });
    Ok(server)
}

fn command(path: &Path, program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    if program != "monmaptool" {
        command.args(["-c", "ceph.conf"]);
    }
    command
        .args(arguments)
        .current_dir(path)
        .stdin(Stdio::null());
    command
}

fn start(path: &Path, program: &str, arguments: &[&str]) -> Process {
    let mut command = command(path, program, arguments);
    let log = fs::File::create(path.join(format!("{program}.output"))).unwrap();
    command.stdout(Stdio::null()).stderr(log);
    Process(command.spawn().unwrap())
}

#[track_caller]
fn ends(path: &Path, program: &str, arguments: &[&str]) {
    let output = command(path, program, arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
}

//! SeaweedFS: as one process, with https, and as a cluster.
//!
//! The program is the `weed` in `LARDER_WEED`, or in the cache where `tests/run` installs it.

use std::fs;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::ports::port;
use crate::server::{BUCKET, Server};
use crate::support::honest::{Process, eventually};
use crate::support::{directory, text};

const IDENTITIES: &str = r#"{"identities": [
    {"name": "larder", "credentials": [{"accessKey": "AK", "secretKey": "SKSKSKSK"}],
     "actions": ["Admin", "Read", "Write", "List", "Tagging"]},
    {"name": "reader", "credentials": [{"accessKey": "RO", "secretKey": "RORORORO"}],
     "actions": ["Read:kvpages", "List:kvpages"]}]}"#;

/// Addresses of all its servers.
const LOCAL: [&str; 2] = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1"];

/// Volume servers of a cluster. Each byte is on two of them.
pub const VOLUME_SERVERS: usize = 3;

/// The program, if it is installed.
fn program() -> Option<PathBuf> {
    let named = std::env::var_os("LARDER_WEED").map(PathBuf::from);
    let cache = || {
        let set = std::env::var_os("LARDER_PYTHON_CACHE").map(PathBuf::from);
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let home = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
        let place = set.or_else(|| cache.or(home).map(|cache| cache.join("larder/python")))?;
        Some(place.join("seaweedfs/venv/bin/weed"))
    };
    named.or_else(cache).filter(|weed| weed.exists())
}

/// The certificate of a server, its key, and the authority that signed it.
pub struct Certificate {
    pub certificate: PathBuf,
    pub key: PathBuf,
    pub authority: PathBuf,
}

/// One process. `None` without the program.
pub fn single() -> Option<Server> {
    started(&[], None)
}

/// The same, with https.
pub fn secured(certificate: &Certificate) -> Option<Server> {
    let file = |path: &Path| path.display().to_string();
    let options = [
        format!("-s3.cert.file={}", file(&certificate.certificate)),
        format!("-s3.key.file={}", file(&certificate.key)),
    ];
    started(&options, Some(certificate.authority.clone()))
}

fn started(options: &[String], ca_file: Option<PathBuf>) -> Option<Server> {
    let weed = program()?;
    let scheme = if ca_file.is_some() { "https" } else { "http" };
    let [s3, master, volume, filer] = [port(), port(), port(), port()];
    let mut server = new_server(format!("{scheme}://127.0.0.1:{s3}"), ca_file);
    fs::create_dir(server.directory.path().join("data")).unwrap();
    let mut command = command(&weed, &server, "server");
    command
        .args(["-filer", "-s3", "-dir=data", "-s3.config=s3.json"])
        .args(["-master.telemetry=false", "-master.volumeSizeLimitMB=64"])
        .args(["-volume.max=16", "-s3.port.iceberg=0", "-s3.port.lance=0"])
        .arg(format!("-s3.port={s3}"))
        .arg(format!("-master.port={master}"))
        .arg(format!("-volume.port={volume}"))
        .arg(format!("-filer.port={filer}"))
        .args(options);
    server.processes.push(Process(command.spawn().unwrap()));
    make_bucket(&weed, &server, master, filer);
    Some(server)
}

/// A master, volume servers, and a filer with S3: the processes in this order. `None` without the
/// program.
pub fn cluster() -> Option<Server> {
    let weed = program()?;
    let [s3, master, filer] = [port(), port(), port()];
    let mut server = new_server(format!("http://127.0.0.1:{s3}"), None);
    let make = |name: &str| fs::create_dir(server.directory.path().join(name)).unwrap();
    ["master", "filer"].into_iter().for_each(make);
    let mut commands = Vec::new();
    let mut of_master = command(&weed, &server, "master");
    of_master
        .args(["-mdir=master", "-volumeSizeLimitMB=64", "-telemetry=false"])
        .arg("-defaultReplication=001")
        .arg(format!("-port={master}"));
    commands.push(of_master);
    for number in 0..VOLUME_SERVERS {
        let name = format!("volumes{number}");
        make(&name);
        let mut of_volume = command(&weed, &server, "volume");
        of_volume
            .args(["-max=16", "-rack=r1"])
            .arg(format!("-dir={name}"))
            .arg(format!("-port={}", port()))
            .arg(format!("-master=127.0.0.1:{master}"));
        commands.push(of_volume);
    }
    let mut of_filer = command(&weed, &server, "filer");
    of_filer
        .args(["-defaultStoreDir=filer", "-s3", "-s3.config=s3.json"])
        .args(["-s3.port.iceberg=0", "-s3.port.lance=0"])
        .arg(format!("-port={filer}"))
        .arg(format!("-s3.port={s3}"))
        .arg(format!("-master=127.0.0.1:{master}"));
    commands.push(of_filer);
    for mut command in commands {
        server.processes.push(Process(command.spawn().unwrap()));
    }
    make_bucket(&weed, &server, master, filer);
    Some(server)
}

fn new_server(endpoint: String, ca_file: Option<PathBuf>) -> Server {
    let directory = directory();
    fs::write(directory.path().join("s3.json"), IDENTITIES).unwrap();
    Server {
        processes: Vec::new(),
        directory,
        endpoint,
        ca_file,
    }
}

/// `weed SUBCOMMAND` in the directory of a server.
fn command(weed: &Path, server: &Server, subcommand: &str) -> Command {
    let log = server.directory.path().join("log");
    let log = fs::File::options().create(true).append(true).open(log);
    let mut command = Command::new(weed);
    command
        .arg(subcommand)
        .args(LOCAL)
        .current_dir(server.directory.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log.unwrap())
        .process_group(0);
    command
}

fn make_bucket(weed: &Path, server: &Server, master: u16, filer: u16) {
    eventually("a bucket", || {
        let mut shell = Command::new(weed)
            .arg("shell")
            .arg(format!("-master=127.0.0.1:{master}"))
            .arg(format!("-filer=127.0.0.1:{filer}"))
            .current_dir(server.directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let create = format!("s3.bucket.create -name {BUCKET}\nexit\n");
        let mut stdin = shell.stdin.take().unwrap();
        // The shell may have ended for want of a server.
        let _ = stdin.write_all(create.as_bytes());
        drop(stdin);
        shell.wait().unwrap();
        server.answers()
    });
}

/// A certificate for the loopback address by a private authority. `None` without `openssl`.
pub fn certificate(directory: &Path, name: &str) -> Option<Certificate> {
    let file = |kind: &str| directory.join(format!("{name}.{kind}"));
    let [authority, its_key] = [file("ca.pem"), file("ca.key")];
    let [certificate, key, request] = [file("pem"), file("key"), file("csr")];
    let curve = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ];
    let openssl = |arguments: &[&str]| {
        let output = Command::new("openssl").args(arguments).output().ok()?;
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "openssl {arguments:?}: {said}");
        Some(())
    };
    let subject = format!("/CN={name}");
    let of_authority = ["req", "-x509", "-days", "2", "-subj", &subject];
    let out = ["-keyout", text(&its_key), "-out", text(&authority)];
    openssl(&[&of_authority[..], &curve, &out].concat())?;
    let of_server = ["req", "-subj", "/CN=server"];
    let out = ["-keyout", text(&key), "-out", text(&request)];
    openssl(&[&of_server[..], &curve, &out].concat())?;
    let names = file("names");
    fs::write(&names, "subjectAltName=IP:127.0.0.1").unwrap();
    openssl(
        &[
            &[
                "x509",
                "-req",
                "-days",
                "2",
                "-CAcreateserial",
                "-in",
                text(&request),
            ][..],
            &["-CA", text(&authority), "-CAkey", text(&its_key)],
            &["-extfile", text(&names), "-out", text(&certificate)],
        ]
        .concat(),
    )?;
    Some(Certificate {
        certificate,
        key,
        authority,
    })
}

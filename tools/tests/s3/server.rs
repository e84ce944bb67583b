//! A SeaweedFS server of a test's own, on ports of the loopback interface.

use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::support::honest::{Process, eventually};
use crate::support::{directory, larder};

/// Every port has a second one, for gRPC, so much higher.
const TWIN: u16 = 10_000;

const BUCKET: &str = "kvpages";

const IDENTITIES: &str = r#"{"identities": [
    {"name": "larder", "credentials": [{"accessKey": "AK", "secretKey": "SKSKSKSK"}],
     "actions": ["Admin", "Read", "Write", "List", "Tagging"]},
    {"name": "reader", "credentials": [{"accessKey": "RO", "secretKey": "RORORORO"}],
     "actions": ["Read:kvpages", "List:kvpages"]}]}"#;

/// The identity of a command.
#[derive(Clone, Copy)]
pub enum Identity {
    Writer,
    Reader,
}

impl Identity {
    /// The variables of the environment.
    pub fn variables(self) -> [(&'static str, &'static str); 3] {
        let (key, secret) = self.credentials();
        [
            ("AWS_ACCESS_KEY_ID", key),
            ("AWS_SECRET_ACCESS_KEY", secret),
            ("AWS_REGION", "us-east-1"),
        ]
    }

    fn credentials(self) -> (&'static str, &'static str) {
        match self {
            Identity::Writer => ("AK", "SKSKSKSK"),
            Identity::Reader => ("RO", "RORORORO"),
        }
    }
}

pub struct Server {
    directory: tempfile::TempDir,
    process: Process,
    endpoint: String,
}

/// The program, if it is installed.
fn weed() -> Option<PathBuf> {
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

/// A port that is free, as is its twin.
fn port() -> u16 {
    loop {
        let bound = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = bound.local_addr().unwrap().port();
        let twin = port.checked_add(TWIN);
        if twin.is_some_and(|twin| TcpListener::bind(("127.0.0.1", twin)).is_ok()) {
            return port;
        }
    }
}

impl Server {
    /// `None` without the program.
    pub fn start() -> Option<Server> {
        let weed = weed()?;
        let directory = directory();
        let at = |name: &str| directory.path().join(name).display().to_string();
        fs::write(at("s3.json"), IDENTITIES).unwrap();
        fs::create_dir(at("data")).unwrap();
        let [s3, master, volume, filer] = [port(), port(), port(), port()];
        let mut command = Command::new(&weed);
        command
            .arg("server")
            .args(["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"])
            .args(["-master.telemetry=false", "-master.volumeSizeLimitMB=64"])
            .args(["-volume.max=8", "-s3.port.iceberg=0", "-s3.port.lance=0"])
            .arg(format!("-dir={}", at("data")))
            .arg(format!("-s3.config={}", at("s3.json")))
            .arg(format!("-s3.port={s3}"))
            .arg(format!("-master.port={master}"))
            .arg(format!("-volume.port={volume}"))
            .arg(format!("-filer.port={filer}"))
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(at("log")).unwrap())
            .process_group(0);
        let server = Server {
            process: Process(command.spawn().unwrap()),
            endpoint: format!("http://127.0.0.1:{s3}"),
            directory,
        };
        eventually("a bucket", || {
            let mut shell = Command::new(&weed)
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
            let url = format!("s3://{BUCKET}");
            let arguments = ["remote", "ls", &url];
            server
                .command(&arguments, Identity::Writer)
                .output()
                .unwrap()
                .status
                .success()
        });
        Some(server)
    }

    fn command(&self, arguments: &[&str], identity: Identity) -> Command {
        let mut command = larder(arguments);
        command
            .args(["--endpoint", &self.endpoint])
            .envs(identity.variables());
        command
    }

    fn arguments<'a>(
        &self,
        url: &'a str,
        subcommand: &[&'a str],
        options: &[&'a str],
    ) -> Vec<&'a str> {
        let mut arguments = vec!["remote"];
        arguments.extend(subcommand);
        arguments.push(url);
        arguments.extend(options);
        let is_trusting = ["push", "pull", "verify"].contains(&subcommand[0]);
        arguments.extend(is_trusting.then_some("--unsigned"));
        arguments
    }

    /// `larder remote SUBCOMMAND s3://...`, which must end with `code`; its document.
    #[track_caller]
    pub fn remote(
        &self,
        subcommand: &[&str],
        options: &[&str],
        identity: Identity,
        code: i32,
    ) -> Value {
        let url = format!("s3://{BUCKET}/of/a-test");
        let arguments = self.arguments(&url, subcommand, options);
        let output = self
            .command(&arguments, identity)
            .arg("--json")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{subcommand:?}: {said}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// The same for a command that must fail by its environment; its message.
    #[track_caller]
    pub fn fails(&self, subcommand: &[&str], options: &[&str], identity: Identity) -> String {
        let url = format!("s3://{BUCKET}/of/a-test");
        self.failure(&url, subcommand, options, identity)
    }

    #[track_caller]
    pub fn fails_at(&self, url: &str, subcommand: &[&str], options: &[&str]) -> String {
        self.failure(url, subcommand, options, Identity::Writer)
    }

    #[track_caller]
    fn failure(
        &self,
        url: &str,
        subcommand: &[&str],
        options: &[&str],
        identity: Identity,
    ) -> String {
        let arguments = self.arguments(url, subcommand, options);
        let output = self.command(&arguments, identity).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(3), "{subcommand:?}: {said}");
        said
    }

    /// The options of a node's L4.
    pub fn l4(&self) -> Vec<String> {
        let url = format!("s3://{BUCKET}/of/nodes");
        let options = [
            "--l4",
            &url,
            "--l4-endpoint",
            &self.endpoint,
            "--l4-unsigned",
        ];
        options.map(str::to_owned).to_vec()
    }

    /// Works while the server is stopped.
    pub fn stopped<T>(&self, work: impl FnOnce() -> T) -> T {
        let pid = Pid::from_raw(i32::try_from(self.process.0.id()).unwrap());
        kill(pid, Signal::SIGSTOP).unwrap();
        let value = work();
        kill(pid, Signal::SIGCONT).unwrap();
        value
    }
}

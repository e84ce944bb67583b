//! An S3 server of a test's own, and commands that use it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

use crate::support::honest::{Process, eventually};
use crate::support::{larder, text};

pub const BUCKET: &str = "kvpages";

/// Options of `larder remote bench`.
pub const SMALL_RUNS: [&str; 6] = [
    "--run-bytes",
    "64KiB",
    "--page-bytes",
    "16KiB",
    "--runs",
    "2",
];

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

    pub fn credentials(self) -> (&'static str, &'static str) {
        match self {
            Identity::Writer => ("AK", "SKSKSKSK"),
            Identity::Reader => ("RO", "RORORORO"),
        }
    }
}

/// A server with a bucket and both identities.
pub struct Server {
    /// In the order of their start. They end before their directory is removed.
    pub processes: Vec<Process>,
    pub directory: TempDir,
    pub endpoint: String,
    /// The authority of its certificate, if it has one.
    pub ca_file: Option<PathBuf>,
}

impl Server {
    fn command(&self, arguments: &[&str], identity: Identity) -> Command {
        let mut command = larder(arguments);
        command
            .args(["--endpoint", &self.endpoint])
            .envs(identity.variables());
        if let Some(file) = &self.ca_file {
            command.args(["--ca-file", text(file)]);
        }
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
        let is_trusting = ["push", "pull", "verify", "bench"].contains(&subcommand[0]);
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
        self.document(&arguments, identity, code)
    }

    #[track_caller]
    fn document(&self, arguments: &[&str], identity: Identity, code: i32) -> Value {
        let mut command = self.command(arguments, identity);
        let output = command.arg("--json").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
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

    /// `larder remote bench` of small runs, which goes on until it is ended.
    pub fn endless_bench(&self, directory: &Path) -> Process {
        let url = format!("s3://{BUCKET}/of/a-test");
        let bench = ["bench", text(directory)];
        let options = [
            &SMALL_RUNS[..],
            &["--rounds", "500", "--timeout", "2s", "--json"],
        ]
        .concat();
        let arguments = self.arguments(&url, &bench, &options);
        let mut command = self.command(&arguments, Identity::Writer);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Process(command.spawn().unwrap())
    }

    /// Bytes of the files below the server's directory for data.
    pub fn data_bytes(&self) -> u64 {
        let entries = fs::read_dir(self.directory.path().join("data")).unwrap();
        let bytes = entries.filter_map(|entry| entry.ok()?.metadata().ok());
        bytes.map(|found| found.len()).sum()
    }

    /// `larder remote SUBCOMMAND` for a bucket that does not exist.
    #[track_caller]
    pub fn missing_bucket(&self, subcommand: &[&str], code: i32) -> Value {
        let arguments = self.arguments("s3://no-such-bucket", subcommand, &[]);
        self.document(&arguments, Identity::Writer, code)
    }

    /// Whether the bucket answers. Then its remotes are made: those of commands and of nodes.
    pub fn answers(&self) -> bool {
        ["of/a-test", "of/nodes"].iter().all(|prefix| {
            let url = format!("s3://{BUCKET}/{prefix}");
            let init = ["remote", "init", &url, "--new"];
            let output = self.command(&init, Identity::Writer).output();
            output.unwrap().status.success()
        })
    }

    /// `larder remote verify` for the objects of nodes; its document.
    #[track_caller]
    pub fn verify(&self) -> Value {
        let url = format!("s3://{BUCKET}/of/nodes");
        let arguments = self.arguments(&url, &["verify"], &[]);
        self.document(&arguments, Identity::Writer, 0)
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
        let authority = self.ca_file.iter();
        let authority = authority.flat_map(|file| ["--l4-ca-file", text(file)]);
        let options = options.into_iter().chain(authority);
        options.map(str::to_owned).collect()
    }

    /// Works while the first process is stopped.
    pub fn stopped<T>(&self, work: impl FnOnce() -> T) -> T {
        let id = self.processes[0].0.id();
        let pid = Pid::from_raw(i32::try_from(id).unwrap());
        kill(pid, Signal::SIGSTOP).unwrap();
        // Its threads stop one after the other.
        eventually("the server stands still", || is_stopped(pid));
        let value = work();
        kill(pid, Signal::SIGCONT).unwrap();
        value
    }
}

/// Whether all threads of a process are stopped (proc_pid_stat(5)).
fn is_stopped(pid: Pid) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    threads.flatten().all(|thread| {
        let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // The state follows the name in brackets.
        stat.rsplit_once(") ")
            .is_some_and(|(_, rest)| rest.starts_with('T'))
    })
}

//! Commands on a terminal: a real pty, wide and narrow, with and without colours.

use std::os::fd::AsFd;
use std::process::Command;

use nix::pty::{Winsize, openpty};
use regex_lite::Regex;

use super::*;

/// A terminal for a command.
#[derive(Clone, Copy, Debug)]
struct Terminal {
    columns: u16,
    variable: Option<(&'static str, &'static str)>,
}

/// Wide, narrow, without colours, and without any control.
const TERMINALS: [Terminal; 4] = [
    Terminal {
        columns: 200,
        variable: None,
    },
    Terminal {
        columns: 40,
        variable: None,
    },
    Terminal {
        columns: 80,
        variable: Some(("NO_COLOR", "1")),
    },
    Terminal {
        columns: 80,
        variable: Some(("TERM", "dumb")),
    },
];

impl Terminal {
    /// Runs a command whose three standard streams are this terminal. Returns its exit code, and
    /// all that the terminal was sent.
    fn run(self, mut command: Command) -> (Option<i32>, String) {
        let size = Winsize {
            ws_row: 24,
            ws_col: self.columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let pty = openpty(Some(&size), None).unwrap();
        let end = || Stdio::from(pty.slave.as_fd().try_clone_to_owned().unwrap());
        // The library of the command line takes the log of a CI for a terminal with colours.
        for name in ["CI", "CLICOLOR", "CLICOLOR_FORCE", "NO_COLOR"] {
            command.env_remove(name);
        }
        command.env("TERM", "xterm-256color");
        if let Some((name, value)) = self.variable {
            command.env(name, value);
        }
        command.stdin(end()).stdout(end()).stderr(end());
        let mut child = command.spawn().unwrap();
        drop((command, pty.slave));
        // A read of a terminal fails once no process has it open any more.
        let mut sent = Vec::new();
        let mut master = std::fs::File::from(pty.master);
        let mut some = [0; 4096];
        while let Ok(count @ 1..) = master.read(&mut some) {
            sent.extend_from_slice(&some[..count]);
        }
        let code = child.wait().unwrap().code();
        (code, String::from_utf8(sent).unwrap())
    }
}

/// Command lines of all commands, in an order that they can follow, with the exit codes. STORE, and
/// names that begin with it, are files in the directory of the test.
const LINES: [(&str, &[i32]); 39] = [
    ("create STORE --size 256MiB --dry-run", &[0]),
    ("create STORE --size 256MiB --prewrite --force", &[0]),
    ("volume add STORE STORE.2 --size 128MiB", &[0]),
    ("bench STORE --op put --pages 64 --page-bytes 64KiB", &[0]),
    ("superblock save STORE STORE.saved", &[0]),
    ("superblock restore STORE STORE.saved", &[0]),
    ("inspect STORE --chains", &[0]),
    ("verify STORE --deep", &[0]),
    ("compact STORE", &[0]),
    ("export STORE STORE.archive", &[0]),
    ("import STORE STORE.archive", &[0]),
    ("delete STORE --model none", &[2]),
    ("delete STORE --model bench", &[0]),
    ("doctor STORE --bundle STORE.facts", &[0, 1]),
    ("stat STORE", &[3]),
    ("stat STORE --check", &[3]),
    ("stat STORE --openmetrics", &[0]),
    ("inspect STORE.archive", &[3]),
    ("remote", &[2]),
    (
        "replay store TRACE --store STORE.replay --capacity 256MiB --page-bytes 64KiB",
        &[0],
    ),
    ("completions bash", &[0]),
    ("--version", &[0]),
    ("create --help", &[0]),
    ("volume --help", &[0]),
    ("inspect --help", &[0]),
    ("verify --help", &[0]),
    ("compact --help", &[0]),
    ("export --help", &[0]),
    ("import --help", &[0]),
    ("bench --help", &[0]),
    ("replay --help", &[0]),
    ("doctor --help", &[0]),
    ("serve --help", &[0]),
    ("stat --help", &[0]),
    ("delete --help", &[0]),
    ("remote --help", &[0]),
    ("exporter --help", &[0]),
    ("demo --help", &[0]),
    ("--help", &[0]),
];

/// Whether a terminal was sent a sequence that sets colours or other attributes of characters.
fn has_colours(sent: &str) -> bool {
    Regex::new("\u{1b}\\[[0-9;]*m").unwrap().is_match(sent)
}

#[test]
fn every_command_on_a_terminal_prints_its_own_lines_alone() {
    for terminal in TERMINALS {
        let directory = directory();
        let trace = trace_in(&directory, 8, 2);
        let store = directory.path().join("store");
        for (line, codes) in LINES {
            let line = line
                .replace("STORE", text(&store))
                .replace("TRACE", text(&trace));
            let (code, sent) = terminal.run(larder(&line.split(' ').collect::<Vec<_>>()));
            let what = format!("{terminal:?}, larder {line}:\n{sent}");
            assert!(
                code.is_some_and(|code| codes.contains(&code)),
                "{code:?}, {what}"
            );
            assert!(
                !sent.contains("tracing") && !sent.contains("crate feature"),
                "{what}"
            );
            if terminal.variable.is_some() {
                assert!(!has_colours(&sent), "{what}");
            }
        }
    }
}

#[test]
fn with_a_log_in_json_each_line_on_stderr_is_an_object() {
    let directory = directory();
    let nowhere = directory.path().join("nowhere");
    let at = text(&nowhere);
    let commands: [&[&str]; 3] = [&["stat", at], &["inspect", at], &["stat", at, "--unknown"]];
    for arguments in commands {
        let arguments = [&["--log-format", "json"], arguments].concat();
        let output = larder(&arguments).env("LARDER_LOG", "debug").output();
        let said = stderr(&output.unwrap());
        let objects = said.lines().map(|line| {
            let object: Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
            ["timestamp", "level", "message", "target"].map(|field| object[field].is_string())
        });
        let objects: Vec<_> = objects.collect();
        assert!(!objects.is_empty(), "{arguments:?}");
        assert!(objects.iter().flatten().all(|is_there| *is_there), "{said}");
    }
}

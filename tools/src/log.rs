//! The log on stderr: its levels, and its form.
//!
//! `LARDER_LOG` sets the levels of the library's lines wherever the library logs to stderr: in the
//! command, and in a Python process without a logger for it. `RUST_LOG` counts in the command
//! alone, and only if `LARDER_LOG` is not set: other Rust libraries of a Python process may read
//! it. Both are lists of levels by module (`larder_store=debug,warn`). Without them the level is
//! `warn`.

use std::env;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use clap::ValueEnum;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::program::{complain, complain_in_json};

/// Stderr without the lock of the standard library, which another thread may hold at the moment of
/// a fork: then a child could never log. A line is one write.
struct Unlocked;

impl Write for Unlocked {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(rustix::stdio::stderr(), bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The form of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Sends the log to stderr, for a process that embeds the library. A process with a logger keeps
/// it.
pub fn to_stderr() {
    start(LogFormat::Text, &["LARDER_LOG"]);
}

/// The same for the command.
pub(crate) fn of_command(format: LogFormat) {
    if format == LogFormat::Json {
        complain_in_json();
    }
    start(format, &["LARDER_LOG", "RUST_LOG"]);
}

/// The first of these variables that is set counts.
fn start(format: LogFormat, variables: &[&str]) {
    // A second attempt would take a lock of the whole process, which a fork may copy.
    static IS_STARTED: AtomicBool = AtomicBool::new(false);
    if IS_STARTED.swap(true, Ordering::Relaxed) {
        return;
    }
    let asked = variables
        .iter()
        .find_map(|name| Some((name, env::var(name).ok().filter(|asked| !asked.is_empty())?)));
    let levels = asked.as_ref().map(|(_, asked)| asked.parse::<Targets>());
    let usual = || Targets::new().with_default(LevelFilter::WARN);
    let filter = levels.map_or_else(usual, |levels| levels.unwrap_or_else(|_| usual()));
    // Otherwise a line that cannot be written would panic in the thread that logs it.
    let lines = tracing_subscriber::fmt::layer()
        .log_internal_errors(false)
        .with_ansi(false)
        .with_writer(|| Unlocked);
    let lines = match format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    let started = tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .try_init();
    if let (Some((name, asked)), Ok(())) = (asked, started)
        && let Err(error) = asked.parse::<Targets>()
    {
        complain(&format_args!(
            "{name}={asked}: {error}; the level is `warn`. Give a level, or levels by module: \
             larder_store=debug,warn"
        ));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_line_waits_for_no_lock() {
        let held = io::stderr().lock();
        // Another thread: the lock lets its own holder in.
        let (sender, written) = mpsc::channel();
        thread::spawn(move || sender.send(Unlocked.write(b"a line of a test\n").unwrap()));
        assert_eq!(written.recv_timeout(Duration::from_secs(60)), Ok(17));
        drop(held);
    }
}

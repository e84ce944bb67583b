//! The log on stderr: its levels, and its form.
//!
//! `LARDER_LOG` sets the levels of the library's lines wherever the library logs to stderr: in the
//! command, and in a Python process without a logger for it. `RUST_LOG` counts in the command
//! alone, and only if `LARDER_LOG` is not set: other Rust libraries of a Python process may read
//! it. Both are lists of levels by module (`larder_engine=debug,warn`). Without them the level is
//! `warn`.

use std::env;
use std::io::{self, IsTerminal};

use clap::ValueEnum;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::cli::complain;

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
    start(format, &["LARDER_LOG", "RUST_LOG"]);
}

/// The first of these variables that is set counts.
fn start(format: LogFormat, variables: &[&str]) {
    let asked = variables
        .iter()
        .find_map(|name| Some((name, env::var(name).ok().filter(|asked| !asked.is_empty())?)));
    let levels = asked.as_ref().map(|(_, asked)| asked.parse::<Targets>());
    let usual = || Targets::new().with_default(LevelFilter::WARN);
    let filter = levels.map_or_else(usual, |levels| levels.unwrap_or_else(|_| usual()));
    // Otherwise a line that cannot be written would panic in the thread that logs it.
    let lines = tracing_subscriber::fmt::layer()
        .log_internal_errors(false)
        .with_ansi(format == LogFormat::Text && io::stderr().is_terminal())
        .with_writer(io::stderr);
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
             larder_engine=debug,warn"
        ));
    }
}

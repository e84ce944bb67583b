//! The log: its place, its levels, and its form.
//!
//! The command logs to stderr. `LARDER_LOG` sets the levels there, else `RUST_LOG`. Both are lists
//! of levels by module (`larder_store=debug,warn`). Without them the level is `warn`.
//!
//! A program that embeds the library gets the lines from `info` on as datagrams, for its own log,
//! if it asks for them.
//! With `LARDER_LOG` it logs to stderr as the command does. `RUST_LOG` does not count there: other
//! Rust libraries of the program may read it.

use std::env;
use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::ValueEnum;
use tracing::{Level, Metadata};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::program::{complain, complain_in_json};

/// A second attempt would take a lock of the whole process, which a fork may copy.
static IS_STARTED: AtomicBool = AtomicBool::new(false);

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

/// A socket that takes the lines of a program around the library, a datagram each. A send waits for
/// nothing and takes no lock, so that the child of a fork can log, too.
struct Datagrams(UnixDatagram);

/// The writer of one line. Where the other end is closed or lags behind, stderr takes warnings and
/// errors.
struct Datagram<'a> {
    socket: &'a UnixDatagram,
    level: Level,
}

impl Write for Datagram<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.socket.send(bytes) {
            Err(_) if self.level <= Level::WARN => Unlocked.write(bytes),
            _ => Ok(bytes.len()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Datagrams {
    type Writer = Datagram<'a>;

    fn make_writer(&'a self) -> Datagram<'a> {
        Datagram {
            socket: &self.0,
            level: Level::ERROR,
        }
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Datagram<'a> {
        Datagram {
            socket: &self.0,
            level: *meta.level(),
        }
    }
}

/// Begins the log of a program that embeds the library. The datagrams have the form ` INFO target:
/// text`. Returns the socket that receives them; `None` if the log goes to stderr, or has begun. A
/// program with a logger keeps it.
///
/// # Errors
/// There is no socket. A later call tries again.
pub fn of_program() -> io::Result<Option<UnixDatagram>> {
    if IS_STARTED.load(Ordering::Relaxed) {
        return Ok(None);
    }
    if env::var_os("LARDER_LOG").is_some_and(|asked| !asked.is_empty()) {
        start(LogFormat::Text, &["LARDER_LOG"]);
        return Ok(None);
    }
    let (sender, receiver) = UnixDatagram::pair()?;
    sender.set_nonblocking(true)?;
    if IS_STARTED.swap(true, Ordering::Relaxed) {
        return Ok(None);
    }
    let lines = tracing_subscriber::fmt::layer()
        .log_internal_errors(false)
        .with_ansi(false)
        .without_time()
        .with_writer(Datagrams(sender))
        .with_filter(LevelFilter::INFO);
    let started = tracing_subscriber::registry().with(lines).try_init();
    Ok(started.is_ok().then_some(receiver))
}

/// Begins the log of a program that has not asked for the lines: to stderr, from warnings on, or as
/// `LARDER_LOG` asks.
pub fn of_library() {
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
    fn a_datagram_that_nobody_takes_is_no_failure() {
        let (socket, receiver) = UnixDatagram::pair().unwrap();
        socket.set_nonblocking(true).unwrap();
        let line = |level| Datagram {
            socket: &socket,
            level,
        };
        assert_eq!(line(Level::INFO).write(b" INFO a line\n").unwrap(), 13);
        let mut taken = [0; 64];
        assert_eq!(receiver.recv(&mut taken).unwrap(), 13);
        drop(receiver);
        assert_eq!(line(Level::INFO).write(b" INFO lost\n").unwrap(), 11);
        let warning = b" WARN a line of a test\n";
        assert_eq!(line(Level::WARN).write(warning).unwrap(), warning.len());
    }

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

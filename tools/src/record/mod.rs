//! `larder record`: writes the traffic of a served store to a file.
//!
//! The calls come from the store's owner over its socket. This process is no client of the store,
//! and no caller waits for it. Keys come as numbers, hashed with a salt that only this process and
//! the owner have, in memory. A new owner gets the same salt; the time without an owner is a line
//! of the trace.
//!
//! | module | content |
//! |---|---|
//! | `out` | the file |
//! | `merge` | calls of ranks and processes, merged to requests |
//! | `lines` | the lines of a trace, and the namespaces that they name |
//! | `parents` | whole chains, from the links in the calls |

mod lines;
mod merge;
mod out;
mod parents;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use larder_base::random::random_bytes;
use larder_engine::StoreError;
use larder_store::share::tape::Tape;
use larder_store::traffic::{Salt, Taken};
use serde::Serialize;

use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::owner::unserved;
use crate::place;
use crate::program::complain;
use crate::report::{self, Lines, Report, count, rows};
use crate::size::{self, ByteSize, Time};
use lines::Spaces;
use merge::Merger;
use out::Out;

/// Time between two questions for calls.
const EVERY: Duration = Duration::from_millis(200);

/// Record the calls of all processes on a served store: times, sizes, chains of hashed keys
#[derive(Args, Debug)]
pub struct RecordArgs {
    /// The store: its first volume, or a backend's directory
    #[arg(value_parser = place::parser())]
    path: PathBuf,
    /// The file to write, which must not exist; compressed if its name ends in .zst
    #[arg(value_name = "OUT.jsonl.zst")]
    out: PathBuf,
    /// Merge the calls of all ranks to requests: a trace for `larder replay`
    #[arg(long)]
    requests: bool,
    /// End after this time
    #[arg(long = "for", value_name = "DURATION", value_parser = size::duration)]
    limit: Option<Duration>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct RecordReport {
    /// The store: its first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// The recording, and its bytes.
    #[serde(serialize_with = "crate::report::paths")]
    out: PathBuf,
    out_bytes: u64,
    seconds: f64,
    /// Calls recorded, and their pages.
    calls: u64,
    pages: u64,
    /// Requests written, with `--requests`.
    requests: Option<u64>,
    /// Pages that lookups asked for, and the leading ones that they found.
    pages_requested: u64,
    pages_found: u64,
    /// Calls that came faster than they were taken, and their pages.
    lost_calls: u64,
    lost_pages: u64,
    /// Times without an owner.
    gaps: u64,
    gap_seconds: f64,
    interrupted: bool,
}

impl Report for RecordReport {
    const COMMAND: &'static str = "record";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        rows! { lines:
            "Recorded" => "{} of {} in {:.1} s", count(self.calls, "call"),
                count(self.pages, "page"), self.seconds;
            "Lookups" => "{} of {} pages found", self.pages_found, self.pages_requested;
        }
        if let Some(requests) = self.requests {
            lines.row("Requests", requests.to_string());
        }
        rows! { lines:
            "Lost" => "{} of {}", count(self.lost_calls, "call"), count(self.lost_pages, "page");
        }
        if self.gaps > 0 {
            rows! { lines:
                "Without an owner" => "{}, {:.1} s", count(self.gaps, "gap"), self.gap_seconds;
            }
        }
        rows! { lines:
            "Written" => "{}, {}", self.out.display(), ByteSize(self.out_bytes);
        }
        lines
    }
}

/// Runs the command.
pub fn run(args: &RecordArgs) -> Result<Ending, Failure> {
    let interrupt = Interrupt::watch();
    let salt = random_bytes().map_err(|error| {
        Failure::environment(format!("no random salt for the recording: {error}"))
    })?;
    let (tape, _) = Tape::reach(&args.path, salt).map_err(|error| unserved(&args.path, error))?;
    let out = Out::create(&args.out)?;
    let mut recording = Recording {
        path: &args.path,
        salt,
        out,
        spaces: Spaces::default(),
        merger: args.requests.then(Merger::default),
        begun: Instant::now(),
        limit: args.limit,
        report: RecordReport {
            path: args.path.clone(),
            out: args.out.clone(),
            out_bytes: 0,
            seconds: 0.0,
            calls: 0,
            pages: 0,
            requests: None,
            pages_requested: 0,
            pages_found: 0,
            lost_calls: 0,
            lost_pages: 0,
            gaps: 0,
            gap_seconds: 0.0,
            interrupted: false,
        },
    };
    let ended = recording.run(tape, &interrupt);
    // The calls so far are of use, whatever ended the recording.
    let report = recording.end(interrupt.is_raised())?;
    ended?;
    report::print(&report, args.json)?;
    Ok(Ending::Done)
}

struct Recording<'a> {
    path: &'a Path,
    salt: Salt,
    out: Out,
    spaces: Spaces,
    merger: Option<Merger>,
    begun: Instant,
    limit: Option<Duration>,
    report: RecordReport,
}

impl Recording<'_> {
    /// Whether it ends, after a pause.
    fn is_over(&self, interrupt: &Interrupt) -> bool {
        let left = self
            .limit
            .map(|limit| limit.saturating_sub(self.begun.elapsed()));
        interrupt.wait(left.unwrap_or(EVERY).min(EVERY)) || left.is_some_and(|left| left <= EVERY)
    }

    fn run(&mut self, mut tape: Tape, interrupt: &Interrupt) -> Result<(), Failure> {
        let mut is_over = false;
        while !is_over {
            is_over = self.is_over(interrupt);
            loop {
                match tape.take() {
                    Ok(taken) if taken == Taken::default() => break,
                    Ok(taken) => self.write(&tape, &taken)?,
                    Err(error @ (StoreError::Recorded | StoreError::OwnerOlder)) => {
                        return Err(error.into());
                    }
                    Err(_) if is_over => break,
                    Err(error) => match self.next_owner(&error, interrupt)? {
                        Some(next) => tape = next,
                        None => return Ok(()),
                    },
                }
            }
            if let Some(merger) = &mut self.merger {
                let requests = merger.ready(lines::now_ms());
                self.out.requests(&requests)?;
            }
            self.out.flush_in_time()?;
        }
        Ok(())
    }

    /// Waits for the next owner; `None` when the recording ends first.
    fn next_owner(
        &mut self,
        error: &StoreError,
        interrupt: &Interrupt,
    ) -> Result<Option<Tape>, Failure> {
        complain(&format!(
            "{error}; the recording goes on with the next owner"
        ));
        let since = Instant::now();
        let at_ms = lines::now_ms();
        let next = loop {
            match Tape::reach(self.path, self.salt) {
                Ok((tape, _)) => break Some(tape),
                Err(error @ (StoreError::Recorded | StoreError::OwnerOlder)) => {
                    return Err(error.into());
                }
                Err(_) if self.is_over(interrupt) => break None,
                Err(_) => {}
            }
        };
        let seconds = since.elapsed().as_secs_f64();
        self.report.gaps += 1;
        self.report.gap_seconds += seconds;
        self.out.gap(at_ms, seconds)?;
        Ok(next)
    }

    fn write(&mut self, tape: &Tape, taken: &Taken) -> Result<(), Failure> {
        self.report.lost_calls += taken.lost_calls;
        self.report.lost_pages += taken.lost_pages;
        for call in &taken.calls {
            let space = self.spaces.of(call.namespace, tape);
            let known = self.spaces.whole(space, call);
            self.report.calls += 1;
            self.report.pages += call.pages.len() as u64;
            if call.kind == larder_store::traffic::Kind::Lookup {
                self.report.pages_requested += call.pages.len() as u64;
                self.report.pages_found += u64::from(call.found);
            }
            match &mut self.merger {
                Some(merger) => merger.add(self.spaces.named(space), &known, call),
                None => self.out.call(self.spaces.named(space), &known, call)?,
            }
        }
        if taken.lost_calls > 0 {
            self.out
                .lost(lines::now_ms(), taken.lost_calls, taken.lost_pages)?;
        }
        Ok(())
    }

    fn end(mut self, interrupted: bool) -> Result<RecordReport, Failure> {
        if let Some(merger) = &mut self.merger {
            let requests = merger.ready(u64::MAX);
            self.out.requests(&requests)?;
            self.report.requests = Some(self.out.requests_written());
        }
        self.report.out_bytes = self.out.finish()?;
        self.report.interrupted = interrupted;
        self.report.seconds = self.begun.elapsed().as_secs_f64();
        if self.report.lost_calls > 0 {
            complain(&format!(
                "{} were lost: this process had too little time on a processor; their lines are \
                 missing, and a line states how many",
                count(self.report.lost_calls, "call")
            ));
        }
        tracing::debug!(seconds = %Time(self.begun.elapsed()), "the recording ended");
        Ok(self.report)
    }
}

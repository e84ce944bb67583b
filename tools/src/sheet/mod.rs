//! `larder report`: one HTML file about a store, a trace or a result, with charts.
//!
//! It has no script and loads nothing. The feature `charts` has it. Without the feature the command
//! refuses.
//!
//! | module | content |
//! |---|---|
//! | `written` | the file |
//! | `unserved` | the facts of a store that no process serves |
//! | `results` | the facts of a replay's document, or of a benchmark's tables |
//! | `requests` | the facts of a trace |
//! | `served` | the facts of a store in use |
//! | `answers` | the questions of an operator, answered from the facts |
//! | `words` | the words of a report |
//! | `page` | facts as HTML |
//! | `chart` | numbers as SVG |

#[cfg(feature = "charts")]
mod answers;
#[cfg(feature = "charts")]
mod chart;
#[cfg(feature = "charts")]
mod page;
#[cfg(feature = "charts")]
mod requests;
#[cfg(feature = "charts")]
mod results;
#[cfg(feature = "charts")]
mod served;
#[cfg(feature = "charts")]
mod unserved;
#[cfg(feature = "charts")]
mod words;
#[cfg(feature = "charts")]
mod written;

use std::path::PathBuf;

use clap::Args;

use crate::failure::{Ending, Failure};

/// Write a report with charts about a store, a trace or a result: one HTML file without a network
///
/// A result is the JSON document of `larder replay`, or the text of a benchmark with its tables.
///
/// Exit codes: 0 done, 1 done and the store is damaged, 2 usage, 3 there is no store or no trace.
#[derive(Args, Debug)]
pub struct SheetArgs {
    /// The store (its first volume, or a backend's directory), a trace, or a result
    #[arg(value_name = "STORE|TRACE|RESULT")]
    of: PathBuf,
    /// The file to write
    #[arg(short, long, value_name = "OUT.html")]
    out: PathBuf,
    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
}

/// Runs the command.
#[cfg(not(feature = "charts"))]
pub fn run(args: &SheetArgs) -> Result<Ending, Failure> {
    Err(Failure::environment(format!(
        "this build has no charts: take a released binary, or build it with `--features charts`; \
         `larder stat {} --curve` shows the same counters",
        args.of.display()
    )))
}

/// Runs the command.
#[cfg(feature = "charts")]
pub fn run(args: &SheetArgs) -> Result<Ending, Failure> {
    written::run(&args.of, &args.out, args.force)
}

//! `larder top`: a live screen of a served store.
//!
//! The feature `charts` has it. Without the feature the command refuses.
//!
//! | module | content |
//! |---|---|
//! | `live` | the terminal and its keys |
//! | `screen` | the picture of an answer |
//! | `looks` | the owner's answers, and the rates between two of them |

#[cfg(feature = "charts")]
mod live;
#[cfg(feature = "charts")]
mod looks;
#[cfg(feature = "charts")]
mod screen;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::failure::{Ending, Failure};
use crate::place;
use crate::size;

/// Show a store on a live screen: processes, namespaces, hits, disk, evictions, troubles
///
/// q ends it, the arrow keys show further namespaces. It needs a terminal, and no colours.
#[derive(Args, Debug)]
pub struct TopArgs {
    /// The store: its first volume, or a backend's directory
    #[arg(value_parser = place::parser())]
    path: PathBuf,
    /// Time between two looks at the store
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = size::duration)]
    every: Duration,
}

/// Runs the command.
#[cfg(not(feature = "charts"))]
pub fn run(args: &TopArgs) -> Result<Ending, Failure> {
    Err(Failure::environment(format!(
        "this build has no screen: take a released binary, or build it with `--features charts`; \
         `larder stat {} --watch` shows the same counters",
        args.path.display()
    )))
}

/// Runs the command.
#[cfg(feature = "charts")]
pub fn run(args: &TopArgs) -> Result<Ending, Failure> {
    live::run(&args.path, args.every)
}

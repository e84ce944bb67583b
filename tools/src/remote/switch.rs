//! `larder remote off` and `on`: ends and resumes the work of a served store's remotes.

use std::path::PathBuf;

use clap::Args;
use larder_store::share::use_beneath;
use serde::Serialize;

use crate::failure::{Ending, Failure};
use crate::place;
use crate::report::{self, Lines, Report};

/// The store of `remote off` and `remote on`.
#[derive(Args, Debug)]
pub struct SwitchArgs {
    /// The store: its first volume, or a backend's directory
    #[arg(value_parser = place::parser())]
    path: PathBuf,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct SwitchReport {
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    is_on: bool,
}

impl Report for SwitchReport {
    const COMMAND: &'static str = "remote on";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        let state = if self.is_on { "on" } else { "off" };
        lines.row("L4", format!("{state}, until the owner of the store ends"));
        lines
    }
}

/// Runs `remote on`, or `remote off`.
///
/// # Errors
/// No process owns the store, or it has no remote.
pub fn run(args: &SwitchArgs, is_on: bool) -> Result<Ending, Failure> {
    let path = args.path.clone();
    if !use_beneath(&path, is_on)? {
        return Err(Failure::environment(format!(
            "{}: its owner has no L4; configure one (`larder serve --l4`, or the key `l4`)",
            path.display()
        )));
    }
    report::print(&SwitchReport { path, is_on }, args.json)?;
    Ok(Ending::Done)
}

//! `larder volume`: adds a volume to a closed store, or retires one.
//!
//! Both work in place. A kill at any moment leaves a store that opens, with the volume or without
//! it; the same command again finishes.

use std::io::ErrorKind;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use larder_engine::{CreateOptions, StoreError};
use larder_offline::Retired;
use larder_store::volume::create;
use serde::Serialize;

use crate::failure::{Ending, Failure};
use crate::findings::StoreArgs;
use crate::interrupt::Interrupt;
use crate::report::{self, Lines, Report, count};
use crate::size::{self, ByteSize};

/// Add a volume to a store, or retire one
#[derive(Args, Debug)]
pub struct VolumeArgs {
    #[command(subcommand)]
    change: Change,
}

#[derive(Debug, Subcommand)]
enum Change {
    Add(AddArgs),
    Retire(RetireArgs),
}

/// Add a volume to a store that no process has open
///
/// A kill at any moment leaves the store as it was, or with the volume. The same command again
/// finishes. Exit codes: 0 done, 2 usage, 3 the store is in use, there is none, or no space.
#[derive(Args, Debug)]
struct AddArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// The volume to add: a file to make, or a block device
    new: PathBuf,
    /// Size of the new volume (64GiB, 512MiB, bytes) [default: as the largest other one, or the
    /// whole of a block device]
    #[arg(long, value_parser = size::positive)]
    size: Option<ByteSize>,
    /// Write every block of it once, so that later writes overwrite written extents
    #[arg(long)]
    prewrite: bool,
    /// Overwrite an existing store or other data
    #[arg(long)]
    force: bool,
    /// Check everything and print the plan, but write nothing
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Move the pages of a volume to the others, and go on without it
///
/// No process may have the store open. If the others have too little room, the coldest pages of the
/// store are dropped, and counted. The first volume cannot be retired. A kill at any moment leaves
/// the store with the volume, or without it; the same command again finishes. Exit codes: 0 done, 1
/// the store is damaged, 2 usage, 3 the store is in use, or there is none.
#[derive(Args, Debug)]
struct RetireArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// The volume to retire
    retired: PathBuf,
    /// Print the plan and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct AddReport {
    /// The first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// The new volume.
    #[serde(serialize_with = "crate::report::paths")]
    volume: PathBuf,
    /// Whether nothing was written.
    dry_run: bool,
    /// Whether it was added. Not if it was a volume of the store already.
    added: bool,
    /// All volumes.
    #[serde(serialize_with = "crate::report::paths")]
    volumes: Vec<PathBuf>,
    /// Segments of all volumes, and their bytes.
    segments: u64,
    segment_bytes: u64,
    /// Bytes of all volumes together.
    capacity_bytes: u64,
    /// Most bytes of pages that the store keeps at once.
    usable_bytes: u64,
    /// Whether the operator ended it early: nothing was added.
    interrupted: bool,
}

#[derive(Serialize)]
struct RetireReport {
    /// The first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// The volume.
    #[serde(serialize_with = "crate::report::paths")]
    volume: PathBuf,
    /// Whether nothing was written.
    dry_run: bool,
    /// Whether the store goes on without the volume.
    retired: bool,
    #[serde(flatten)]
    done: Retired,
}

impl Report for AddReport {
    const COMMAND: &'static str = "volume add";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        if self.interrupted {
            lines.text("Interrupted: the store is as it was.");
            return lines;
        }
        let done = match (self.added, self.dry_run) {
            (false, _) => "Is a volume already",
            (true, true) => "Would add",
            (true, false) => "Added",
        };
        lines.row(done, self.volume.display().to_string());
        let segments = count(self.segments, "segment");
        let volumes = count(self.volumes.len() as u64, "volume");
        lines.row("Segments", format!("{segments} on {volumes}"));
        lines.row("Capacity", ByteSize(self.capacity_bytes).to_string());
        lines.row("Usable for pages", ByteSize(self.usable_bytes).to_string());
        lines
    }
}

impl Report for RetireReport {
    const COMMAND: &'static str = "volume retire";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        if self.done.was_retired {
            lines.row("Was retired already", self.volume.display().to_string());
            return lines;
        }
        let pages = count(self.done.pages, "page");
        lines.row("On it", format!("{pages}, {}", ByteSize(self.done.bytes)));
        if self.dry_run {
            let volume = self.volume.display();
            lines.row("Would retire", volume.to_string());
            lines.row("Would drop", ByteSize(self.done.excess_bytes).to_string());
            return lines;
        }
        lines.row("Moved", count(self.done.moved_pages, "page"));
        let dropped = [
            (
                self.done.evicted_pages,
                "the coldest of the store, for want of room",
            ),
            (self.done.damaged_pages, "damaged"),
            (self.done.unfinished_pages, "half written at a crash"),
        ];
        for (number, why) in dropped.into_iter().filter(|(number, _)| *number > 0) {
            lines.row("Dropped", format!("{}, {why}", count(number, "page")));
        }
        if self.retired {
            let volume = self.volume.display();
            lines.row("Retired", format!("{volume}: it can be deleted"));
        } else {
            lines.text("Interrupted: the store keeps the volume; run it again to go on");
        }
        lines
    }
}

/// Runs the command.
pub fn run(args: &VolumeArgs) -> Result<Ending, Failure> {
    let interrupt = Interrupt::watch();
    let interrupted = match &args.change {
        Change::Add(args) => add(args, &interrupt)?,
        Change::Retire(args) => retire(args, &interrupt)?,
    };
    Ok(Ending::Done.or_interrupted(interrupted))
}

/// Returns whether the operator ended it.
fn add(args: &AddArgs, interrupt: &Interrupt) -> Result<bool, Failure> {
    let bar = bar("prewriting");
    let advance = |done, total| interrupt.advance(&bar, done, total);
    let wrapping = args.store.key.read()?;
    let options = CreateOptions::new(args.size.map_or(0, |size| size.0)).with(|o| {
        o.wrapping = wrapping;
        o.volumes = args.store.volumes.clone();
        o.prewrite = args.prewrite;
        o.force = args.force;
        o.dry_run = args.dry_run;
        o.progress = Some(&advance);
    });
    let added = create::add(&args.store.path, &args.new, &options);
    bar.finish_and_clear();
    let (created, interrupted) = match added {
        Ok(created) => (created, false),
        Err(StoreError::Io { source, .. }) if source.kind() == ErrorKind::Interrupted => {
            (create::Created::default(), true)
        }
        Err(error) => return Err(Failure::sized(error, "--size")),
    };
    let report = AddReport {
        path: args.store.path.clone(),
        volume: args.new.clone(),
        dry_run: args.dry_run,
        added: created.is_grown,
        volumes: created.volumes,
        segments: created.segments,
        segment_bytes: created.segment_bytes,
        capacity_bytes: created.capacity_bytes,
        usable_bytes: created.usable_bytes,
        interrupted,
    };
    report::print(&report, args.json)?;
    Ok(interrupted)
}

/// Returns whether the operator ended it.
fn retire(args: &RetireArgs, interrupt: &Interrupt) -> Result<bool, Failure> {
    let bar = bar("moving");
    let options = args.store.options()?;
    let mut progress = |done, total| interrupt.advance(&bar, done, total);
    let (path, volume) = (&args.store.path, &args.retired);
    let done = larder_offline::retire(path, volume, &options, args.dry_run, &mut progress);
    bar.finish_and_clear();
    let done = done?;
    let report = RetireReport {
        path: path.clone(),
        volume: volume.clone(),
        dry_run: args.dry_run,
        retired: done.was_retired || !args.dry_run && !done.interrupted,
        done,
    };
    report::print(&report, args.json)?;
    Ok(done.interrupted)
}

fn bar(doing: &'static str) -> indicatif::ProgressBar {
    let bar = report::progress(
        None,
        "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}",
    );
    bar.set_message(doing);
    bar
}

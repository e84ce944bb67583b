//! `larder create`: creates a store, or enlarges one.
//!
//! The engine decides and checks everything. This module prints the result, and shows the progress
//! of a `--prewrite`. If the operator ends it, no store is created. The module `access` gives the
//! files their permissions.

mod access;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use access::Access;
use clap::Args;
use larder_engine::{CreateOptions, Created, StoreError};
use serde::Serialize;

use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::key::KeyArgs;
use crate::place;
use crate::report::{self, Lines, Report};
use crate::size::{self, ByteSize};

/// Make a store, or enlarge one
#[derive(Args, Debug)]
pub struct CreateArgs {
    /// The first volume: a file to make, or a block device; with --grow also a backend's directory
    #[arg(value_parser = place::parser())]
    path: PathBuf,
    /// Size of the whole store, over all volumes (64GiB, 512MiB, bytes); with --grow, its new size
    /// [default: the whole of a block device]
    #[arg(long, value_parser = size::positive)]
    size: Option<ByteSize>,
    /// Size of the pages that the store will keep, if it is known: it chooses the segments
    #[arg(long, value_name = "SIZE", value_parser = size::positive)]
    #[arg(conflicts_with_all = ["grow", "segment_size"])]
    page_bytes: Option<ByteSize>,
    /// Size of a segment, the unit of reclaim [default: by the sizes of the store and of its pages]
    #[arg(long)]
    segment_size: Option<ByteSize>,
    /// A further volume (may be repeated); the size is divided evenly over all
    #[arg(long = "volume", value_name = "PATH")]
    volumes: Vec<PathBuf>,
    /// Write every block once, so that later writes overwrite written extents: up to 2.3 times as
    /// fast
    #[arg(long)]
    prewrite: bool,
    /// Leave a store that is there as it is: its size may be another. Its permissions are set
    #[arg(long, conflicts_with_all = ["grow", "force"])]
    if_absent: bool,
    #[command(flatten)]
    key: KeyArgs,
    /// Permissions of the store's files, in octal [default with --group: 660]
    #[arg(long, value_name = "MODE", value_parser = access::mode, conflicts_with = "grow")]
    mode: Option<u32>,
    /// Group of the store's files and of its directory, whose members may use the store: the
    /// directory gets the mode 2770, or with --mode that mode with search bits
    #[arg(long, value_name = "GID", conflicts_with = "grow")]
    group: Option<u32>,
    /// Add segments to an existing store that no process has open
    #[arg(long)]
    grow: bool,
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

/// The created store.
#[derive(Serialize)]
struct CreateReport {
    /// The first volume, by which the store is opened.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// All volumes, the first one first. Empty when the operator ended the command.
    #[serde(serialize_with = "crate::report::paths")]
    volumes: Vec<PathBuf>,
    /// Segments in all.
    segments: u64,
    /// Bytes of a segment.
    segment_bytes: u64,
    /// Bytes of all volumes together.
    capacity_bytes: u64,
    /// Most bytes of pages that the store keeps at once.
    usable_bytes: u64,
    /// Whether every block has been written once.
    prewritten: bool,
    /// Whether an existing store was enlarged. Not if it had the size already.
    grown: bool,
    /// Whether the store was there already, and was left as it was.
    existed: bool,
    /// Whether the store is encrypted.
    encrypted: bool,
    #[serde(skip)]
    grow: bool,
    /// The process that serves another store on the socket of this path.
    #[serde(skip)]
    in_the_way: Option<String>,
    /// Whether nothing was written.
    dry_run: bool,
    /// Whether the operator ended it early: nothing was made.
    interrupted: bool,
    /// Whether it was allowed to overwrite existing data.
    #[serde(skip)]
    force: bool,
}

impl Report for CreateReport {
    const COMMAND: &'static str = "create";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        if self.interrupted {
            lines.text(match (self.grow, self.force) {
                (true, _) => "Interrupted: the store is as it was.",
                (false, true) => {
                    "Interrupted: no store was created, and the data that --force overwrites is \
                     lost. Run it again, or remove the file."
                }
                (false, false) => "Interrupted: no store was made.",
            });
            return lines;
        }
        let done = match (self.dry_run, self.grow, self.grown) {
            _ if self.existed => "Exists already",
            (_, true, false) => "Has this size already",
            (true, true, true) => "Would enlarge",
            (true, false, _) => "Would create",
            (false, true, true) => "Enlarged",
            (false, false, _) => "Created",
        };
        for (index, volume) in self.volumes.iter().enumerate() {
            let label = if index == 0 { done } else { "" };
            lines.row(label, volume.display().to_string());
        }
        lines.row(
            "Segments",
            format!("{} of {}", self.segments, ByteSize(self.segment_bytes)),
        );
        lines.row("Capacity", ByteSize(self.capacity_bytes).to_string());
        lines.row("Usable for pages", ByteSize(self.usable_bytes).to_string());
        if self.encrypted {
            let advice = "with the given key. Keep a copy of the key elsewhere: without it no page \
                can be read";
            lines.row("Encrypted", advice);
        }
        if let Some(process) = &self.in_the_way {
            lines.text(process.as_str());
        }
        lines
    }
}

/// Runs the command.
pub fn run(args: &CreateArgs) -> Result<Ending, Failure> {
    let made = create(args, &Interrupt::watch())?;
    let interrupted = made.is_none();
    let created = made.unwrap_or_default();
    if !args.dry_run {
        Access::new(args.mode, args.group).give(&created.volumes)?;
    }
    let report = CreateReport {
        path: args.path.clone(),
        volumes: created.volumes,
        segments: created.segments,
        segment_bytes: created.segment_bytes,
        capacity_bytes: created.capacity_bytes,
        usable_bytes: created.usable_bytes,
        in_the_way: match args.dry_run || args.grow || interrupted || created.is_present {
            true => None,
            false => in_the_way(&args.path),
        },
        prewritten: args.prewrite && !args.dry_run && !interrupted && !created.is_present,
        grown: created.is_grown,
        existed: created.is_present,
        encrypted: created.is_encrypted,
        grow: args.grow,
        dry_run: args.dry_run,
        interrupted,
        force: args.force,
    };
    report::print(&report, args.json)?;
    Ok(Ending::Done.or_interrupted(interrupted))
}

/// The process that answers on the socket of a store that was just made. It cannot own that store:
/// it serves the former store at the path.
fn in_the_way(path: &Path) -> Option<String> {
    let what = match larder_engine::report(path) {
        Ok(report) => {
            let process = match report.pid {
                Some(pid) => format!("Process {pid}"),
                None => "A process of another pid namespace".to_owned(),
            };
            format!("{process} serves another store, whose file was deleted or replaced. Stop it")
        }
        Err(StoreError::ServesAnother { reason, .. }) => reason,
        Err(StoreError::Unanswered { .. }) => {
            "A process that does not answer has the socket of this path. Stop it".to_owned()
        }
        Err(_) => return None,
    };
    Some(format!(
        "{what}, or start `larder serve`, which takes its place at the socket."
    ))
}

/// `None` when the operator ended it.
fn create(args: &CreateArgs, interrupt: &Interrupt) -> Result<Option<Created>, Failure> {
    Access::new(args.mode, args.group).check(&args.path, &args.volumes)?;
    let bar = report::progress(
        None,
        "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}",
    );
    bar.set_message("prewriting");
    let advance = |done, total| interrupt.advance(&bar, done, total);
    let wrapping = args.key.read()?;
    let options = CreateOptions::new(args.size.map_or(0, |size| size.0)).with(|o| {
        o.segment_size = args.segment_size.map(|size| size.0);
        o.page_bytes = args.page_bytes.map(|size| size.0);
        o.volumes = args.volumes.clone();
        o.wrapping = wrapping;
        o.prewrite = args.prewrite;
        o.grow = args.grow;
        o.if_absent = args.if_absent;
        o.force = args.force;
        o.dry_run = args.dry_run;
        o.progress = Some(&advance);
    });
    let created = larder_engine::create(&args.path, &options);
    bar.finish_and_clear();
    match created {
        Err(StoreError::Io { source, .. }) if source.kind() == ErrorKind::Interrupted => Ok(None),
        Err(error) => Err(Failure::sized(error, "--size")),
        Ok(created) => Ok(Some(created)),
    }
}

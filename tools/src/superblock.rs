//! `larder superblock`: saves the superblock of a store to a file, and writes it back.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use larder_format::{BLOCK_BYTES, Superblock, SuperblockError};
use larder_offline::{restore, superblock_to_save};
use serde::Serialize;

use crate::failure::{Ending, Failure};
use crate::place::{self, directory_of};
use crate::report::{self, Lines, Report, count};

/// Save the superblocks of a store to a file, or write them back
#[derive(Args, Debug)]
pub struct SuperblockArgs {
    #[command(subcommand)]
    command: SuperblockCommand,
}

#[derive(Debug, Subcommand)]
enum SuperblockCommand {
    Save(SaveArgs),
    Restore(RestoreArgs),
}

/// Save the superblocks of a store to a small file
///
/// They lie in the first 128 KiB of each volume. Without them a store cannot be opened. The store
/// may be in use. The file stays good until the store is enlarged, or a volume is added or retired;
/// then save again. Exit codes: 0 done, 2 usage, 3 there is no store, or the file holds other data.
#[derive(Args, Debug)]
struct SaveArgs {
    /// The store: its first volume, or a backend's directory
    #[arg(value_parser = place::parser())]
    path: PathBuf,
    /// The file to write; an earlier save of the same store is replaced
    file: PathBuf,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Write saved superblocks back to the volumes of a store
///
/// No process may have the store open. Superblocks that are whole stay as they are. The next open
/// runs as after a crash. Exit codes: 0 done, 2 usage, 3 the store is in use, a volume is missing,
/// or the file is not of this store, or of another state of it.
#[derive(Args, Debug)]
struct RestoreArgs {
    /// The store: its first volume, or a backend's directory
    #[arg(value_parser = place::parser())]
    path: PathBuf,
    /// Where a further volume is, if not where the store remembers it (may be repeated)
    #[arg(long = "volume", value_name = "PATH")]
    volumes: Vec<PathBuf>,
    /// The file of `larder superblock save`
    file: PathBuf,
    /// Check everything and write nothing
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct SaveReport {
    /// The first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// The file.
    #[serde(serialize_with = "crate::report::paths")]
    file: PathBuf,
    store_id: String,
    /// Segments of all volumes.
    segments: u64,
}

#[derive(Serialize)]
struct RestoreReport {
    /// The first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// The file.
    #[serde(serialize_with = "crate::report::paths")]
    file: PathBuf,
    store_id: String,
    /// All volumes.
    #[serde(serialize_with = "crate::report::paths")]
    volumes: Vec<PathBuf>,
    /// Volumes whose superblocks were destroyed.
    destroyed_superblocks: u64,
    /// Whether nothing was written.
    dry_run: bool,
}

impl Report for SaveReport {
    const COMMAND: &'static str = "superblock save";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        lines.row("Saved", self.file.display().to_string());
        lines.row("Store", self.store_id.clone());
        lines.row("Segments", self.segments.to_string());
        lines
    }
}

impl Report for RestoreReport {
    const COMMAND: &'static str = "superblock restore";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        lines.row("Store", self.store_id.clone());
        let destroyed = count(self.destroyed_superblocks, "volume");
        let (name, what) = match (self.destroyed_superblocks, self.dry_run) {
            (0, _) => ("Is whole", "nothing to restore".to_owned()),
            (_, true) => ("Would restore", format!("the superblocks of {destroyed}")),
            (_, false) => (
                "Restored",
                format!("the superblocks of {destroyed}; the next open runs as after a crash"),
            ),
        };
        lines.row(name, what);
        lines
    }
}

/// Runs the command.
pub fn run(args: &SuperblockArgs) -> Result<Ending, Failure> {
    match &args.command {
        SuperblockCommand::Save(args) => save(args),
        SuperblockCommand::Restore(args) => write_back(args),
    }?;
    Ok(Ending::Done)
}

fn save(args: &SaveArgs) -> Result<(), Failure> {
    let superblock = superblock_to_save(&args.path)?;
    // Arguments that change places must not replace a store, and no save replaces that of another
    // store.
    if args.file.symlink_metadata().is_ok() {
        let former = read(&args.file)?;
        if former.store != superblock.store {
            return Err(Failure::environment(format!(
                "{}: holds the superblock of another store; choose another name",
                args.file.display()
            )));
        }
    }
    let encoded = superblock.encode_saved();
    let encoded = encoded.map_err(|error| Failure::environment(error.to_string()))?;
    write(&args.file, &encoded[..]).map_err(|error| in_file(&args.file, &error))?;
    let segments = superblock.volumes.iter().filter(|entry| !entry.lost);
    let report = SaveReport {
        path: args.path.clone(),
        file: args.file.clone(),
        store_id: superblock.store.to_string(),
        segments: segments.map(|entry| u64::from(entry.segments)).sum(),
    };
    report::print(&report, args.json)
}

fn write_back(args: &RestoreArgs) -> Result<(), Failure> {
    let saved = read(&args.file)?;
    let (path, volumes) = (&args.path, &args.volumes);
    let restored = restore(path, volumes, &saved, args.dry_run);
    let restored = restored.map_err(|error| Failure::environment(error.to_string()))?;
    let report = RestoreReport {
        path: path.clone(),
        file: args.file.clone(),
        store_id: saved.store.to_string(),
        volumes: restored.volumes,
        destroyed_superblocks: restored.destroyed as u64,
        dry_run: args.dry_run,
    };
    report::print(&report, args.json)
}

/// The superblock in a saved file.
fn read(path: &Path) -> Result<Superblock, Failure> {
    let mut bytes = Vec::new();
    let most = BLOCK_BYTES as u64 + 1;
    let file = File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes));
    file.map_err(|error| in_file(path, &error))?;
    let why = match Superblock::decode_saved(&bytes) {
        Ok(superblock) if bytes.len() == BLOCK_BYTES => return Ok(superblock),
        Ok(_) | Err(SuperblockError::NotLarder) => "".to_owned(),
        Err(error) => format!(": {error}"),
    };
    Err(Failure::environment(format!(
        "{}: is no whole file of `larder superblock save`{why}",
        path.display()
    )))
}

/// Gives the file its name when its content is durable.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let directory = directory_of(path);
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    // A user who may not read the directory still may write into it.
    File::open(directory).map_or(Ok(()), |directory| directory.sync_all())
}

fn in_file(path: &Path, error: &io::Error) -> Failure {
    Failure::environment(format!("{}: {error}; check the path", path.display()))
}

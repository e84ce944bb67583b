//! `larder key`: makes keys of encrypted stores, and rotates them.

use std::fs::{File, OpenOptions as FileOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use larder_seal::{KeySource, Vault, WrappingKey};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::Serialize;
use zeroize::Zeroizing;

use crate::failure::{Ending, Failure};
use crate::findings::StoreArgs;
use crate::key;
use crate::place::directory_of;
use crate::report::{self, Lines, Report};

const KEY_BYTES: usize = 32;

/// Make a key for encrypted stores, or change the key of a store
#[derive(Args, Debug)]
pub struct KeyCommandArgs {
    #[command(subcommand)]
    command: KeyCommand,
}

#[derive(Debug, Subcommand)]
enum KeyCommand {
    Make(MakeArgs),
    Rotate(RotateArgs),
}

/// Make a key in a new file, which its owner alone can read
///
/// Keep a copy elsewhere: without its key a store is lost. Exit codes: 0 done, 2 usage, 3 there is
/// such a file, or it cannot be written.
#[derive(Args, Debug)]
struct MakeArgs {
    /// The file to make
    file: PathBuf,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Have another key open a store, in place of the present one
///
/// No process may have the store open. No page is written again, so that it takes a moment. A kill
/// at any moment leaves a store that opens with the old key or with the new one. Copies of the
/// volumes from before still open with the old key: destroy it. Exit codes: 0 done, 2 usage, 3 the
/// store is in use, or a key is not right.
#[derive(Args, Debug)]
struct RotateArgs {
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    new: NewKeyArgs,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
#[group(id = "new_key", required = true, multiple = false)]
struct NewKeyArgs {
    /// The new key: a file that its owner alone can use
    #[arg(long, value_name = "FILE")]
    new_key_file: Option<PathBuf>,
    /// Command that prints the new key, within 10 seconds; a shell runs it
    #[arg(long, value_name = "COMMAND")]
    new_key_command: Option<String>,
}

#[derive(Serialize)]
struct MakeReport {
    /// The file.
    #[serde(serialize_with = "crate::report::paths")]
    file: PathBuf,
    /// The identity of the key, which does not show the key.
    key_id: String,
}

#[derive(Serialize)]
struct RotateReport {
    /// The first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// The identity of the key that opens the store now, and that of the former one.
    key_id: String,
    former_key_id: String,
}

impl Report for MakeReport {
    const COMMAND: &'static str = "key make";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        lines.row("Made", self.file.display().to_string());
        lines.row("Key", self.key_id.as_str());
        lines.text("Keep a copy elsewhere: without its key a store is lost.");
        lines
    }
}

impl Report for RotateReport {
    const COMMAND: &'static str = "key rotate";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        lines.row("Key", self.key_id.as_str());
        lines.row("Former key", self.former_key_id.as_str());
        lines.text(
            "Copies of the volumes from before still open with the former key: destroy it when \
             they are gone, or when they must not be read any more.",
        );
        lines
    }
}

/// Runs the command.
pub fn run(args: &KeyCommandArgs) -> Result<Ending, Failure> {
    match &args.command {
        KeyCommand::Make(args) => make(args),
        KeyCommand::Rotate(args) => rotate(args),
    }?;
    Ok(Ending::Done)
}

fn make(args: &MakeArgs) -> Result<(), Failure> {
    let failed = |error: io::Error| {
        let hint = match error.kind() {
            io::ErrorKind::AlreadyExists => "a key is never overwritten; choose another name",
            _ => "check the path",
        };
        Failure::environment(format!("{}: {error}", args.file.display())).with_hint(hint)
    };
    write_new(&args.file).map_err(failed)?;
    let key = KeySource::File(args.file.clone()).read(&Vault::new())?;
    let report = MakeReport {
        file: args.file.clone(),
        key_id: key.id().to_string(),
    };
    report::print(&report, args.json)
}

/// Writes a random key to a file that is not there yet, and makes it durable.
fn write_new(path: &Path) -> io::Result<()> {
    let mut key = Zeroizing::new([0; KEY_BYTES]);
    let mut rest = key.as_mut_slice();
    while !rest.is_empty() {
        let count = getrandom(&mut *rest, GetRandomFlags::empty())?;
        rest = rest.split_at_mut(count).1;
    }
    let mut text = Zeroizing::new([b'\n'; 2 * KEY_BYTES + 1]);
    for (digits, byte) in text.as_chunks_mut::<2>().0.iter_mut().zip(key.iter()) {
        *digits = [byte >> 4, byte & 15].map(|digit| b"0123456789abcdef"[usize::from(digit)]);
    }
    let mut options = FileOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o400)
        .open(path)?;
    let written = file.write_all(&*text).and_then(|()| file.sync_all());
    if written.is_err() {
        let _ = std::fs::remove_file(path);
    }
    written?;
    // A user who may not read the directory still may write into it.
    File::open(directory_of(path)).map_or(Ok(()), |directory| directory.sync_all())
}

fn rotate(args: &RotateArgs) -> Result<(), Failure> {
    let options = args.store.options()?;
    let Some(former) = &options.wrapping else {
        return Err(Failure::environment(format!(
            "name the present key of the store with {}",
            key::OPTIONS
        )));
    };
    let new = args.new.read()?;
    let rotated = larder_offline::rotate(&args.store.path, &options, &new);
    rotated.map_err(key::not_changed)?;
    let report = RotateReport {
        path: args.store.path.clone(),
        key_id: new.id().to_string(),
        former_key_id: former.id().to_string(),
    };
    report::print(&report, args.json)
}

impl NewKeyArgs {
    fn read(&self) -> Result<WrappingKey, Failure> {
        let file = self.new_key_file.clone().map(KeySource::File);
        let command = self.new_key_command.clone().map(KeySource::Command);
        match file.or(command) {
            Some(source) => Ok(source.read(&Vault::new())?),
            None => Err(Failure::usage("name the new key with --new-key-file")),
        }
    }
}

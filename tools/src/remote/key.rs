//! `larder remote key`: a file with a new key.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use clap::Args;
use larder_base::random::random_bytes;
use larder_engine::format::PageKey;
use larder_remote::SealKey;
use serde::Serialize;

use crate::failure::{Ending, Failure};
use crate::report::{self, Lines, Report};

/// Make a file with a new key, which all nodes need
///
/// To rotate keys, add the line of the new file below the old line on all nodes and restart all
/// processes: they read the file once. Then move the new line above the old line, and restart all.
/// When the old objects have expired, remove the old line, and restart all.
#[derive(Args, Debug)]
pub struct KeyArgs {
    /// The file to make
    file: PathBuf,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct KeyReport {
    #[serde(serialize_with = "crate::report::paths")]
    file: PathBuf,
    key_id: String,
}

impl Report for KeyReport {
    const COMMAND: &'static str = "remote key";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        lines.row("Key file", self.file.display().to_string());
        lines.row("Key", self.key_id.as_str());
        lines
    }
}

/// Runs the command.
///
/// # Errors
/// The file exists, or cannot be written.
pub fn run(args: &KeyArgs) -> Result<Ending, Failure> {
    let failed = |error: std::io::Error| {
        let file = args.file.display();
        Failure::environment(format!(
            "{file}: making the key file: {error}; choose another name or place"
        ))
    };
    let secret: [u8; 32] = random_bytes().map_err(failed)?;
    // Only its user may read it.
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&args.file)
        .map_err(failed)?;
    // A page key has the same length and text form.
    writeln!(file, "{}", PageKey::from_bytes(secret)).map_err(failed)?;
    file.sync_all().map_err(failed)?;
    let report = KeyReport {
        file: args.file.clone(),
        key_id: SealKey::new(&secret)
            .map_err(|error| Failure::environment(error.to_string()))?
            .id()
            .to_string(),
    };
    report::print(&report, args.json)?;
    Ok(Ending::Done)
}

//! The file of a report.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use larder_store::share;
use larder_store::volume::socket::socket_path;

use super::page::Page;
use super::{requests, results, served, unserved};
use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::owner;
use crate::place::volume_at;

/// Bytes by which the kind of a file is known.
const FIRST_BYTES: u64 = 4096;

/// Most bytes of the text of a result.
const TEXT_MAX: u64 = 16 << 20;

/// The first bytes of a file that zstd compressed.
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// Writes the report of a store or a trace.
pub fn run(of: &Path, out: &Path, replaces: bool) -> Result<Ending, Failure> {
    let interrupt = Interrupt::watch();
    let store = volume_at(of.to_owned());
    // A store in use is not read: its device may hang.
    let first = match socket_path(&store).exists() {
        true => Vec::new(),
        false => first_bytes(of),
    };
    let (page, is_damaged) = if results::may_begin(&first) {
        (results::page(of, &text_of(of)?)?, false)
    } else if begins_as_trace(&first) {
        (requests::page(of, &interrupt)?, false)
    } else {
        of_store(&store)?
    };
    write(out, replaces, &page.html()).map_err(|error| {
        let hint = match error.kind() {
            io::ErrorKind::AlreadyExists => ": give another name, or --force",
            _ => "",
        };
        Failure::environment(format!("{}: {error}{hint}", out.display()))
    })?;
    println_path(out);
    Ok(Ending::Done
        .or_findings(is_damaged)
        .or_interrupted(interrupt.is_raised()))
}

fn of_store(path: &Path) -> Result<(Page, bool), Failure> {
    match share::view(path) {
        Ok(view) => Ok((served::page(path, &view)?, false)),
        Err(error) => {
            let why = owner::unserved(path, error);
            unserved::page(path, &why.to_string()).map_err(|_| why)
        }
    }
}

/// The begin of a file; empty if it is none, or cannot be read.
fn first_bytes(path: &Path) -> Vec<u8> {
    let mut first = Vec::new();
    let file = File::open(path).and_then(|file| {
        let is_file = file.metadata()?.is_file();
        Ok(file.take(if is_file { FIRST_BYTES } else { 0 }))
    });
    match file.and_then(|mut file| file.read_to_end(&mut first)) {
        Ok(_) => first,
        Err(_) => Vec::new(),
    }
}

/// Whether a file begins as a trace does, and as no store does.
fn begins_as_trace(first: &[u8]) -> bool {
    first.starts_with(&ZSTD) || first.trim_ascii_start().starts_with(b"{")
}

/// The text of a result.
fn text_of(path: &Path) -> Result<String, Failure> {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(TEXT_MAX).read_to_string(&mut text));
    match read {
        Ok(_) => Ok(text),
        Err(error) => Err(Failure::environment(format!("{}: {error}", path.display()))),
    }
}

fn write(out: &Path, replaces: bool, html: &str) -> io::Result<()> {
    let folder = match out.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    // Whole, or not at all.
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(html.as_bytes())?;
    let readable = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    file.as_file().set_permissions(readable)?;
    let kept = match replaces {
        true => file.persist(out),
        false => file.persist_noclobber(out),
    };
    kept.map(drop).map_err(|error| error.error)
}

/// If stdout cannot be written, the file is there all the same.
fn println_path(path: &Path) {
    let _ = writeln!(io::stdout(), "{}", path.display());
}

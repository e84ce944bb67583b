//! The destination of an archive: a file that gets its name when it is complete and durable, or
//! standard output.
//!
//! Defends against partial files: the archive is written under another name, which is removed if
//! the export fails. Defends against unintended replacement: existing files need `--force`, volumes
//! of stores are never replaced.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use larder_engine::advice;
use larder_engine::format::Structure;
use larder_offline::survey::Survey;
use tempfile::NamedTempFile;

use crate::failure::Failure;
use crate::place::directory_of;
use crate::size::ByteSize;

/// The file name that stands for standard output.
const STDOUT: &str = "-";

/// The destination of the archive.
pub enum Target {
    Stdout,
    File {
        path: PathBuf,
        directory: PathBuf,
        replace: bool,
    },
}

impl Target {
    /// Checks whether the file may be created, before any work is done.
    ///
    /// # Errors
    /// An existing file may not be replaced, or there is no place for the file.
    pub fn check(path: &Path, force: bool) -> Result<Target, Failure> {
        if path.as_os_str() == STDOUT {
            if io::stdout().is_terminal() {
                return Err(Failure::usage(
                    "standard output is a terminal, and an archive is no text; give a file, or \
                     pipe it somewhere",
                ));
            }
            return Ok(Target::Stdout);
        }
        let shown = path.display();
        match path.symlink_metadata() {
            Ok(found) if !found.is_file() => Err(Failure::environment(format!(
                "{shown}: is there already and is no regular file; choose another name"
            ))),
            Ok(_) if !force => Err(Failure::environment(format!(
                "{shown}: is there already; use --force to replace it, or choose another name"
            ))),
            Ok(_) if is_volume(path) => Err(Failure::environment(format!(
                "{shown}: is a volume of a store, which --force does not replace; choose another \
                 name"
            ))),
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Failure::environment(
                format!("{shown}: looking at the file: {error}; check the path"),
            )),
            Ok(_) | Err(_) if !directory_of(path).is_dir() => Err(Failure::environment(format!(
                "{shown}: there is no directory for it; make it first, or check the path"
            ))),
            Ok(_) | Err(_) => Ok(Target::File {
                path: path.to_owned(),
                directory: directory_of(path).to_owned(),
                replace: force,
            }),
        }
    }

    /// A volume whose superblocks are broken is not to be replaced either.
    ///
    /// # Errors
    /// The file is a volume of the store.
    pub fn refuse_volumes(&self, survey: &Survey) -> Result<(), Failure> {
        let Target::File { path, .. } = self else {
            return Ok(());
        };
        let identity = |path: &Path| path.metadata().ok().map(|found| (found.dev(), found.ino()));
        let own = identity(path);
        let same = |facts: &&larder_offline::survey::VolumeFacts| {
            own.is_some() && identity(&facts.path) == own
        };
        match survey.volumes.iter().find(same) {
            Some(_) => Err(Failure::environment(format!(
                "{}: is a volume of the store that is exported; choose another name",
                path.display()
            ))),
            None => Ok(()),
        }
    }

    /// Writes the archive, and gives it its name when it is complete and durable. `needed` is an
    /// upper bound of its bytes. Returns `None` when the writer gave up: then nothing is left
    /// behind.
    ///
    /// # Errors
    /// The writer's, or there is no room, or the file cannot be created.
    pub fn make(
        &self,
        needed: u64,
        write: impl FnOnce(&mut dyn Write) -> io::Result<Option<u64>>,
    ) -> Result<Option<u64>, Failure> {
        match self {
            Target::Stdout => {
                let failed = |error| {
                    Failure::environment(format!(
                        "standard output: {error}; what went through it is no archive"
                    ))
                };
                // Not through the standard library's buffer, which searches for the ends of lines.
                let out = io::stdout().as_fd().try_clone_to_owned();
                write(&mut File::from(out.map_err(failed)?)).map_err(failed)
            }
            Target::File {
                path,
                directory,
                replace,
            } => {
                let failed = |error: io::Error| {
                    let failure = Failure::environment(format!(
                        "{}: writing the archive: {error}; nothing was left behind",
                        path.display()
                    ));
                    match advice(&error) {
                        "" => failure,
                        advice => failure.with_hint(advice),
                    }
                };
                check_space(path, directory, needed)?;
                let mut file = temporary(path, directory).map_err(failed)?;
                let written = write(file.as_file_mut()).map_err(failed)?;
                if written.is_some() {
                    keep(file, path, *replace).map_err(failed)?;
                    sync_name(path, directory)?;
                }
                Ok(written)
            }
        }
    }
}

fn is_volume(path: &Path) -> bool {
    let mut magic = [0; 8];
    let read = File::open(path).and_then(|mut file| io::Read::read_exact(&mut file, &mut magic));
    read.is_ok() && magic == Structure::Superblock.magic()
}

fn check_space(path: &Path, directory: &Path, needed: u64) -> Result<(), Failure> {
    // If the system cannot report the space, the write finds out.
    let Ok(space) = rustix::fs::statvfs(directory) else {
        return Ok(());
    };
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if needed <= free {
        return Ok(());
    }
    Err(Failure::environment(format!(
        "{}: no space: the archive may take {}, {} are free; free some, choose another place, or \
         export less",
        path.display(),
        ByteSize(needed),
        ByteSize(free)
    )))
}

/// A file beside the final one, removed when it is dropped. Only its user can read it, as with a
/// store's volumes: pages derive from users' prompts.
fn temporary(path: &Path, directory: &Path) -> io::Result<NamedTempFile> {
    let mut prefix = path.file_name().unwrap_or_default().to_owned();
    prefix.push(".");
    tempfile::Builder::new()
        .prefix(&prefix)
        .suffix(".tmp")
        .tempfile_in(directory)
}

fn keep(file: NamedTempFile, path: &Path, replace: bool) -> io::Result<()> {
    file.as_file().sync_all()?;
    if replace {
        file.persist(path)?;
    } else {
        file.persist_noclobber(path)?;
    }
    Ok(())
}

/// Makes the name of the archive durable.
fn sync_name(path: &Path, directory: &Path) -> Result<(), Failure> {
    // A user who may not read the directory still may write into it.
    let Ok(directory) = File::open(directory) else {
        return Ok(());
    };
    directory.sync_all().map_err(|error| {
        Failure::environment(format!(
            "{}: the archive is complete, but its name may not survive a power loss: {error}",
            path.display()
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_cannot_be_opened_is_no_reason_to_call_an_archive_missing() {
        let directory = Path::new("/nonexistent");
        assert!(sync_name(&directory.join("archive"), directory).is_ok());
    }
}

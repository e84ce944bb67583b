//! A disk's own speed, measured without the store: large direct reads and writes of a file, from a
//! few threads.
//!
//! Writes overwrite blocks that were written before, as in a store made with `--prewrite`. Reads
//! are scattered. The buffers are huge-page backed like the store's, so that the comparison is
//! fair. On a file system without direct I/O the figures are those of its cache, as the store's
//! then are. The content of reads is not checked.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use larder_engine::AlignedBuf;
use rustix::fs::OFlags;

use crate::failure::Failure;
use crate::usage;

/// Bytes of one read or write.
const CHUNK_BYTES: usize = 1 << 20;

/// Reads or writes in flight at once.
const THREADS: usize = 8;

/// Bytes a second of a disk.
#[derive(Clone, Copy, Debug)]
pub struct DeviceSpeed {
    /// Of scattered reads.
    pub read: f64,
    /// Of overwriting in order.
    pub write: f64,
}

/// Measures the disk under `directory` with a file of `chunks` MiB, a power of two, which is
/// removed again.
///
/// # Errors
/// When the file cannot be made, written or read.
pub fn measure(directory: &Path, chunks: u64) -> Result<DeviceSpeed, Failure> {
    assert!(
        chunks.is_power_of_two(),
        "the scatter of the reads needs a power of two"
    );
    let path = directory.join("device-speed");
    let measured = open(&path).and_then(|file| passes(&file, chunks));
    let removed = std::fs::remove_file(&path);
    measured
        .and_then(|speed| removed.map(|()| speed))
        .map_err(|error| {
            let path = path.display();
            Failure::environment(format!(
                "{path}: cannot measure the disk: {error}; choose another directory with --dir"
            ))
        })
}

fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true);
    let direct = i32::try_from(OFlags::DIRECT.bits()).map_err(io::Error::other)?;
    match options.clone().custom_flags(direct).open(path) {
        // The system refuses direct I/O only after it has made the file.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => options
            .create_new(false)
            .create(true)
            .truncate(true)
            .open(path),
        opened => opened,
    }
}

fn passes(file: &File, chunks: u64) -> io::Result<DeviceSpeed> {
    let write =
        |buffer: &mut AlignedBuf, chunk: u64| file.write_all_at(buffer, chunk * CHUNK_BYTES as u64);
    let read = |buffer: &mut AlignedBuf, chunk: u64| {
        file.read_exact_at(buffer, scattered(chunk, chunks) * CHUNK_BYTES as u64)
    };
    pass(chunks, write)?;
    let write = pass(chunks, write)?;
    Ok(DeviceSpeed {
        write,
        read: pass(chunks, read)?,
    })
}

/// A permutation of the first `chunks` numbers, a power of two. The odd factor visits each once,
/// far from the one before.
fn scattered(chunk: u64, chunks: u64) -> u64 {
    chunk.wrapping_mul(0x9e37_79b9) & (chunks - 1)
}

/// Transfers all chunks once. Returns the bytes per second.
fn pass(
    chunks: u64,
    work: impl Fn(&mut AlignedBuf, u64) -> io::Result<()> + Sync,
) -> io::Result<f64> {
    let mut buffers = Vec::with_capacity(THREADS);
    for _ in 0..THREADS {
        let mut buffer = AlignedBuf::zeroed(CHUNK_BYTES)?;
        buffer.fill(0x5a);
        buffers.push(buffer);
    }
    let next = AtomicU64::new(0);
    let started = Instant::now();
    std::thread::scope(|scope| {
        let worker = |mut buffer: AlignedBuf| {
            let (next, work) = (&next, &work);
            move || {
                loop {
                    let chunk = next.fetch_add(1, Ordering::Relaxed);
                    if chunk >= chunks {
                        return Ok(());
                    }
                    work(&mut buffer, chunk)?;
                }
            }
        };
        let start = |buffer| std::thread::Builder::new().spawn_scoped(scope, worker(buffer));
        let threads = buffers
            .into_iter()
            .map(start)
            .collect::<io::Result<Vec<_>>>()?;
        let panicked = || Err(io::Error::other("a measuring thread panicked"));
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|_| panicked()))
    })?;
    Ok(usage::per_second(
        chunks * CHUNK_BYTES as u64,
        started.elapsed().as_secs_f64(),
    ))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_disk_has_a_speed_and_keeps_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let speed = measure(directory.path(), 16).unwrap();
        assert!(speed.read > 0.0 && speed.write > 0.0, "{speed:?}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn every_chunk_is_worked_on_once() {
        let seen: Vec<AtomicU64> = (0..64).map(|_| AtomicU64::new(0)).collect();
        let count = |_: &mut AlignedBuf, chunk: u64| {
            seen[usize::try_from(scattered(chunk, 64)).unwrap()].fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        pass(64, count).unwrap();
        assert!(seen.iter().all(|times| times.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn a_directory_that_is_not_there_is_an_error_that_names_it() {
        let error = measure(Path::new("/nonexistent"), 16)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("/nonexistent/device-speed: cannot measure the disk: "),
            "{error}"
        );
    }
}

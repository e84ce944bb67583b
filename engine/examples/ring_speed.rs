//! How fast a bare io_uring moves the blocks of a file for a program that looks at every byte once:
//! the limit for a program that checks all bytes read and written. fio never looks at its bytes. On
//! disks that are memory of the host, where other processors copy them, one look alone costs up to
//! a third of the speed (docs/performance.md).
//!
//! `cargo run --release -p larder-engine --example ring_speed -- read|write FILE BLOCK_BYTES
//! WORK_BYTES BUFFER_BYTES [--blind]`
//!
//! Reads blocks of the first WORK_BYTES of a file in no particular order, or overwrites them in
//! order: their former content is lost. One thread, 16 at once, direct I/O, with a ring of buffers
//! of 2 MiB pages. Each block has its page checksum computed: a block read while the next are read,
//! and a block to write while those before it are written; with `--blind` none. Prints one JSON
//! document.

#![allow(clippy::cast_precision_loss, missing_docs)]

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};
use larder_base::memory::backing_page_bytes;
use larder_engine::AlignedBuf;
use larder_format::{BLOCK_BYTES, Fingerprint, PageChecksum, PageKey};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_pcg::Pcg64;
use rustix::time::{ClockId, clock_gettime};

/// The same depth as fio's (scripts/bench-vs-fio).
const DEPTH: u32 = 16;

struct Work {
    writes: bool,
    /// By turn: which block of the file.
    blocks: Vec<u64>,
    block_bytes: usize,
    looks: bool,
}

struct Ring {
    ring: IoUring,
    file: File,
    memory: AlignedBuf,
    /// By buffer: in the kernel, or read and not looked at yet.
    is_busy: Vec<bool>,
    in_flight: u32,
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (words, looks) = match words.as_slice() {
        [words @ .., "--blind"] => (words, false),
        words => (words, true),
    };
    let &[direction @ ("read" | "write"), path, block, work, memory] = words else {
        return Err("read|write FILE BLOCK_BYTES WORK_BYTES BUFFER_BYTES [--blind]".into());
    };
    let block_bytes: usize = block.parse()?;
    let (work_bytes, memory_bytes): (u64, usize) = (work.parse()?, memory.parse()?);
    if block_bytes == 0 || !block_bytes.is_multiple_of(BLOCK_BYTES) {
        return Err("BLOCK_BYTES is a multiple of 4096".into());
    }
    let buffers = (memory_bytes / block_bytes).max(DEPTH as usize);
    let writes = direction == "write";
    let mut blocks: Vec<u64> = (0..work_bytes / block_bytes as u64).collect();
    if !writes {
        blocks.shuffle(&mut Pcg64::seed_from_u64(u64::from(std::process::id())));
    }
    let work = Work {
        writes,
        blocks,
        block_bytes,
        looks,
    };
    let mut ring = Ring::new(path, &work, buffers)?;
    let (cpu_before, started) = (cpu_time()?, Instant::now());
    ring.run(&work)?;
    let (seconds, cpu) = (started.elapsed().as_secs_f64(), cpu_time()? - cpu_before);
    let bytes = (work.blocks.len() * block_bytes) as f64;
    println!(
        r#"{{"bytes_per_second":{:.0},"cpu_seconds_per_gib":{:.6},"memory_page_bytes":{}}}"#,
        bytes / seconds,
        cpu.as_secs_f64() * (1_u64 << 30) as f64 / bytes,
        backing_page_bytes(ring.memory.as_ptr()).unwrap_or(0),
    );
    Ok(())
}

impl Ring {
    fn new(path: &str, work: &Work, buffers: usize) -> io::Result<Ring> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(DEPTH)?;
        let mut file = OpenOptions::new();
        file.read(true).write(work.writes);
        let file = file.custom_flags(libc::O_DIRECT).open(path)?;
        let mut memory = AlignedBuf::zeroed(buffers * work.block_bytes)?;
        memory.fill(0xa5);
        Ok(Ring {
            ring,
            file,
            memory,
            is_busy: vec![false; buffers],
            in_flight: 0,
        })
    }

    fn run(&mut self, work: &Work) -> io::Result<()> {
        let mut next = 0;
        let mut landed = Vec::new();
        while next < work.blocks.len() || self.in_flight > 0 || !landed.is_empty() {
            while next < work.blocks.len() && self.in_flight < DEPTH {
                let buffer = next % self.is_busy.len();
                if self.is_busy[buffer] {
                    break;
                }
                if work.writes && work.looks {
                    self.look(buffer, work);
                }
                self.push(buffer, work.blocks[next], work)?;
                next += 1;
                if work.writes {
                    self.ring.submit()?;
                }
            }
            self.ring.submit()?;
            // The next reads are in flight.
            for buffer in landed.drain(..) {
                if !work.writes && work.looks {
                    self.look(buffer, work);
                }
                self.is_busy[buffer] = false;
            }
            if self.in_flight > 0 {
                self.ring.submit_and_wait(1)?;
                self.land(&mut landed, work)?;
            }
        }
        Ok(())
    }

    fn push(&mut self, buffer: usize, block: u64, work: &Work) -> io::Result<()> {
        let len = u32::try_from(work.block_bytes).map_err(io::Error::other)?;
        let start = &mut self.memory[buffer * work.block_bytes..][..work.block_bytes];
        let file = types::Fd(self.file.as_raw_fd());
        let offset = block * work.block_bytes as u64;
        let entry = if work.writes {
            let write = opcode::Write::new(file, start.as_ptr(), len);
            write.offset(offset).build()
        } else {
            let read = opcode::Read::new(file, start.as_mut_ptr(), len);
            read.offset(offset).build()
        };
        // SAFETY: the memory is freed after `drop` has waited for all operations in flight. A busy
        // buffer is not looked at while it is being read into, and none is ever changed here.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(buffer as u64)) };
        pushed.map_err(io::Error::other)?;
        self.is_busy[buffer] = true;
        self.in_flight += 1;
        Ok(())
    }

    /// Receives the ended operations.
    fn land(&mut self, landed: &mut Vec<usize>, work: &Work) -> io::Result<()> {
        for entry in self.ring.completion() {
            self.in_flight -= 1;
            let moved = entry.result();
            if moved < 0 {
                return Err(io::Error::from_raw_os_error(-moved));
            }
            if usize::try_from(moved) != Ok(work.block_bytes) {
                return Err(io::Error::other("the file is shorter than WORK_BYTES"));
            }
            let buffer = usize::try_from(entry.user_data()).map_err(io::Error::other)?;
            landed.push(buffer);
        }
        Ok(())
    }

    fn look(&self, buffer: usize, work: &Work) {
        let name = (
            Fingerprint::from_bytes([1; 16]),
            PageKey::from_bytes([2; 32]),
        );
        let mut checksum = PageChecksum::new(name.0, &name.1);
        checksum.blocks(&self.memory[buffer * work.block_bytes..][..work.block_bytes]);
        black_box(checksum.finish());
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        while self.in_flight > 0 {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // The kernel still has the memory.
                Err(_) => std::process::abort(),
            }
            self.in_flight -= u32::try_from(self.ring.completion().count()).unwrap_or(0);
        }
    }
}

fn cpu_time() -> Result<Duration, Box<dyn Error>> {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    Ok(Duration::new(
        now.tv_sec.try_into()?,
        now.tv_nsec.try_into()?,
    ))
}

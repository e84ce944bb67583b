//! How fast a bare io_uring moves the blocks of a file for a program that looks at every byte once:
//! the limit for a program that checks all bytes read and written. fio never looks at its bytes. On
//! disks that are memory of the host, where other processors copy them, one look alone costs up to
//! a third of the speed (docs/performance.md).
//!
//! `cargo run --release -p larder-engine --example ring_speed -- read|write FILE BLOCK_BYTES
//! WORK_BYTES BUFFER_BYTES [--blind|--seal]`
//!
//! Reads blocks of the first WORK_BYTES of a file in no particular order, or overwrites them in
//! order: their former content is lost. One thread, 16 at once, direct I/O, with a ring of buffers
//! of 2 MiB pages. Each block has its page checksum computed: a block read while the next are read,
//! and a block to write while those before it are written; with `--blind` none. Prints one JSON
//! document.
//!
//! With `--seal` each block is a page of an encrypted store. A block read is decrypted where it is.
//! A block to write is encrypted into the last memory that a write has left, with the checksum of
//! the encrypted bytes. `read --seal` first overwrites the blocks with encrypted ones, which is not
//! measured.

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
use larder_base::system::processes::fill_random;
use larder_engine::AlignedBuf;
use larder_format::{BLOCK_BYTES, Fingerprint, PageChecksum, PageKey, Seal, Serial, StoreId};
use larder_seal::{Keyring, PageName, Salts, TenantKey, Vault, WrappingKey};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_pcg::Pcg64;
use rustix::time::{ClockId, clock_gettime};

/// The same depth as fio's (scripts/bench-vs-fio).
const DEPTH: u32 = 16;

/// Bits of an operation's number that name its buffer. The others name its block.
const BUFFER_BITS: u32 = 24;

/// The pages whose salts are drawn at once, as in a call of the store.
const PAGES_AT_ONCE: usize = 64;

struct Work {
    writes: bool,
    /// By turn: which block of the file.
    blocks: Vec<u64>,
    block_bytes: usize,
}

/// What is done with the bytes of each block.
enum Look {
    Blind,
    Checksum,
    Seal(Cipher),
}

struct Cipher {
    key: TenantKey,
    /// By block of the file: the seal of its last writing.
    seals: Vec<Option<Seal>>,
}

struct Ring {
    ring: IoUring,
    file: File,
    /// The buffers. Behind them, as many as are in flight, for encrypted bytes.
    memory: AlignedBuf,
    block_bytes: usize,
    /// By buffer: in the kernel, or read and not looked at yet.
    is_busy: Vec<bool>,
    /// Memory for encrypted bytes that is free, the last used at the end.
    free: Vec<usize>,
    in_flight: u32,
    look: Look,
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (words, option) = match words.as_slice() {
        [words @ .., option @ ("--blind" | "--seal")] => (words, Some(*option)),
        words => (words, None),
    };
    let &[direction @ ("read" | "write"), path, block, work, memory] = words else {
        return Err("read|write FILE BLOCK_BYTES WORK_BYTES BUFFER_BYTES [--blind|--seal]".into());
    };
    let block_bytes: usize = block.parse()?;
    let (work_bytes, memory_bytes): (u64, usize) = (work.parse()?, memory.parse()?);
    if block_bytes == 0 || !block_bytes.is_multiple_of(BLOCK_BYTES) {
        return Err("BLOCK_BYTES is a multiple of 4096".into());
    }
    let buffers = (memory_bytes / block_bytes).max(DEPTH as usize);
    let writes = direction == "write";
    let mut blocks: Vec<u64> = (0..work_bytes / block_bytes as u64).collect();
    let look = match option {
        Some("--blind") => Look::Blind,
        Some(_) => Look::Seal(Cipher::new(blocks.len())?),
        None => Look::Checksum,
    };
    let mut ring = Ring::new(path, writes, look, block_bytes, buffers)?;
    if !writes {
        if option == Some("--seal") {
            let blocks = blocks.clone();
            let work = Work {
                writes: true,
                blocks,
                block_bytes,
            };
            ring.run(&work)?;
        }
        blocks.shuffle(&mut Pcg64::seed_from_u64(u64::from(std::process::id())));
    }
    let work = Work {
        writes,
        blocks,
        block_bytes,
    };
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

impl Cipher {
    fn new(blocks: usize) -> Result<Cipher, Box<dyn Error>> {
        let (vault, mut random) = (Vault::new(), fill_random);
        let wrapping = WrappingKey::new(&vault, &[1; 32])?;
        let store = StoreId::from_bytes([3; 16]);
        let mut ring = Keyring::create(store, &wrapping, &vault, &mut random, 0)?;
        let slot = ring.add_tenant("tenant", Serial::ZERO, &mut random, 0)?;
        Ok(Cipher {
            key: ring.key(slot).ok_or("a slot without a key")?.clone(),
            seals: vec![None; blocks],
        })
    }
}

fn names() -> (Fingerprint, PageKey) {
    (
        Fingerprint::from_bytes([1; 16]),
        PageKey::from_bytes([2; 32]),
    )
}

fn page_of(block_bytes: usize) -> io::Result<PageName> {
    let (namespace, key) = names();
    let blocks = u32::try_from(block_bytes / BLOCK_BYTES).map_err(io::Error::other)?;
    Ok(PageName {
        namespace,
        key,
        blocks,
        stored: blocks,
    })
}

impl Ring {
    fn new(
        path: &str,
        writes: bool,
        look: Look,
        block_bytes: usize,
        buffers: usize,
    ) -> io::Result<Ring> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(DEPTH)?;
        let is_sealed = matches!(look, Look::Seal(_));
        let apart = if is_sealed { DEPTH as usize } else { 0 };
        let mut file = OpenOptions::new();
        let file = file.read(true).write(writes || is_sealed);
        let mut memory = AlignedBuf::zeroed((buffers + apart) * block_bytes)?;
        memory.fill(0xa5);
        Ok(Ring {
            ring,
            file: file.custom_flags(libc::O_DIRECT).open(path)?,
            memory,
            block_bytes,
            is_busy: vec![false; buffers],
            free: (buffers..buffers + apart).collect(),
            in_flight: 0,
            look,
        })
    }

    fn run(&mut self, work: &Work) -> Result<(), Box<dyn Error>> {
        let mut random = fill_random;
        let mut salts = Salts::of(&mut random, work.blocks.len().min(PAGES_AT_ONCE));
        let mut next = 0;
        // Buffers with blocks that were read.
        let mut landed = Vec::new();
        while next < work.blocks.len() || self.in_flight > 0 || !landed.is_empty() {
            while next < work.blocks.len() && self.in_flight < DEPTH {
                let buffer = next % self.is_busy.len();
                if self.is_busy[buffer] {
                    break;
                }
                let block = work.blocks[next];
                let from = match work.writes {
                    true => self.make(buffer, block, &mut salts)?,
                    false => buffer,
                };
                self.push(from, block, work.writes)?;
                next += 1;
                if work.writes {
                    self.ring.submit()?;
                }
            }
            self.ring.submit()?;
            // The next reads are in flight.
            for (buffer, block) in landed.drain(..) {
                self.check(buffer, block)?;
                self.is_busy[buffer] = false;
            }
            if self.in_flight > 0 {
                self.ring.submit_and_wait(1)?;
                self.land(&mut landed, work)?;
            }
        }
        Ok(())
    }

    /// Makes the bytes of a block from those in a buffer, and returns the buffer that has them.
    fn make(
        &mut self,
        buffer: usize,
        block: u64,
        salts: &mut Salts<'_>,
    ) -> Result<usize, Box<dyn Error>> {
        let bytes = self.block_bytes;
        match &mut self.look {
            Look::Blind => return Ok(buffer),
            Look::Checksum => {}
            Look::Seal(cipher) => {
                let into = self.free.pop().ok_or("more writes than memory for them")?;
                let (plain, sealed) = self.memory.split_at_mut(self.is_busy.len() * bytes);
                let plain = &plain[buffer * bytes..][..bytes];
                let sealed = &mut sealed[(into - self.is_busy.len()) * bytes..][..bytes];
                let mut checksum = checksum();
                let each = |stored: &[u8]| checksum.blocks(stored);
                let page = page_of(bytes)?;
                let seal = cipher
                    .key
                    .seal_parts(salts, &page, &[plain], sealed, each)?;
                black_box(checksum.finish());
                cipher.seals[usize::try_from(block)?] = Some(seal);
                return Ok(into);
            }
        }
        self.check(buffer, block)?;
        Ok(buffer)
    }

    fn check(&mut self, buffer: usize, block: u64) -> Result<(), Box<dyn Error>> {
        let bytes = &mut self.memory[buffer * self.block_bytes..][..self.block_bytes];
        match &self.look {
            Look::Blind => {}
            Look::Checksum => {
                let mut checksum = checksum();
                checksum.blocks(bytes);
                black_box(checksum.finish());
            }
            Look::Seal(cipher) => {
                let seal = cipher.seals[usize::try_from(block)?];
                let seal = seal.ok_or("a block that was not encrypted")?;
                let page = page_of(self.block_bytes)?;
                cipher.key.open(&page, &seal, &mut [bytes])?;
            }
        }
        Ok(())
    }

    fn push(&mut self, buffer: usize, block: u64, writes: bool) -> io::Result<()> {
        let len = u32::try_from(self.block_bytes).map_err(io::Error::other)?;
        let start = &mut self.memory[buffer * self.block_bytes..][..self.block_bytes];
        let file = types::Fd(self.file.as_raw_fd());
        let offset = block * self.block_bytes as u64;
        let entry = if writes {
            let write = opcode::Write::new(file, start.as_ptr(), len);
            write.offset(offset).build()
        } else {
            let read = opcode::Read::new(file, start.as_mut_ptr(), len);
            read.offset(offset).build()
        };
        let entry = entry.user_data(buffer as u64 | block << BUFFER_BITS);
        // SAFETY: the memory is freed after `drop` has waited for all operations in flight. A
        // buffer that is read into, or written from, is not used until its operation has ended.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(io::Error::other)?;
        if let Some(is_busy) = self.is_busy.get_mut(buffer) {
            *is_busy = true;
        }
        self.in_flight += 1;
        Ok(())
    }

    /// Receives the ended operations.
    fn land(&mut self, landed: &mut Vec<(usize, u64)>, work: &Work) -> io::Result<()> {
        for entry in self.ring.completion() {
            self.in_flight -= 1;
            let moved = entry.result();
            if moved < 0 {
                return Err(io::Error::from_raw_os_error(-moved));
            }
            if usize::try_from(moved) != Ok(work.block_bytes) {
                return Err(io::Error::other("the file is shorter than WORK_BYTES"));
            }
            let block = entry.user_data() >> BUFFER_BITS;
            let buffer = entry.user_data() & ((1 << BUFFER_BITS) - 1);
            let buffer = usize::try_from(buffer).map_err(io::Error::other)?;
            match self.is_busy.get_mut(buffer) {
                None => self.free.push(buffer),
                Some(is_busy) if work.writes => *is_busy = false,
                Some(_) => landed.push((buffer, block)),
            }
        }
        Ok(())
    }
}

fn checksum() -> PageChecksum {
    let (namespace, key) = names();
    PageChecksum::new(namespace, &key)
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

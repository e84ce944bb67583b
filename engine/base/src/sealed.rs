//! Memory that several processes map: a file without a name, sealed against truncation.
//!
//! Invariants:
//! - No process can truncate the file under another one. A process that takes a file from another
//!   checks the seal before it maps the file.
//! - A forked child does not have the mapping.
//! - Any process that maps it may change any byte at any moment, so there is no reference into it,
//!   except to atomics.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

use crate::fork::{Private, keep_private};
use crate::runtime::descriptors;

/// See the module.
#[derive(Debug)]
pub struct Sealed {
    /// `None` only while it is dropped.
    map: Option<MmapRaw>,
    bytes: usize,
    file: OwnedFd,
    private: Private,
}

impl Sealed {
    /// Makes memory of so many bytes, zeroed. `flags` are those of `memfd_create(2)`, besides those
    /// that sealing needs.
    ///
    /// # Errors
    /// The kernel's, when there is no such memory.
    pub fn create(name: &str, bytes: usize, flags: MemfdFlags) -> io::Result<Sealed> {
        let flags = flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        descriptors::cover()?;
        let file = rustix::fs::memfd_create(name, flags)?;
        rustix::fs::ftruncate(&file, bytes as u64)?;
        if flags.contains(MemfdFlags::HUGETLB) {
            // A reservation alone is not enough: if the control group allows fewer pages, the first
            // touch of a page would be a SIGBUS.
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes as u64)?;
        }
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Sealed::map(file, bytes)
    }

    /// Maps the memory behind a file that another process has made, if its length suits.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a file that could be truncated or has another length;
    /// the kernel's.
    pub fn adopt(file: OwnedFd, suits: impl FnOnce(u64) -> bool) -> io::Result<Sealed> {
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        let bytes = u64::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0);
        let is_sound = seals.contains(SealFlags::SHRINK) && bytes > 0 && suits(bytes);
        match usize::try_from(bytes) {
            Ok(bytes) if is_sound => Sealed::map(file, bytes),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn map(file: OwnedFd, bytes: usize) -> io::Result<Sealed> {
        let map = MmapOptions::new().len(bytes).map_raw(&file)?;
        // Takes effect where the system gives huge pages to shared memory on request.
        let _ = map.advise(Advice::HugePage);
        // A forked child has no use for it.
        let _ = map.advise(Advice::DontFork);
        Ok(Sealed {
            map: Some(map),
            bytes,
            private: keep_private(&file),
            file,
        })
    }

    /// The file, to be passed to another process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its first byte, at a page boundary.
    pub fn start(&self) -> Option<*mut u8> {
        Some(self.map.as_ref()?.as_mut_ptr())
    }
}

impl Drop for Sealed {
    fn drop(&mut self) {
        if self.private.is_inherited() {
            // The mapping does not exist in a forked child: its address may be in use otherwise.
            std::mem::forget(self.map.take());
        }
    }
}

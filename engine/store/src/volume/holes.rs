//! Holes of a volume's file: blocks that are not allocated, or that other files share.
//!
//! `create` allocates every block. A copy made with `cp --sparse`, `rsync -S` or `tar -S` has
//! holes, and a reflinked copy shares its blocks. A write there needs free space in the file
//! system.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;

use crate::error;

/// Extents per request to the kernel.
const EXTENTS: usize = 256;

/// Most extents of a file that are read.
const EXTENTS_MAX: usize = 1 << 16;

/// Request number of `FS_IOC_FIEMAP`.
const FIEMAP: libc::Ioctl = 0xc020_660b_u32 as libc::Ioctl;
const LAST: u32 = 0x1;
const UNWRITTEN: u32 = 0x800;
const SHARED: u32 = 0x2000;

/// Bytes of a file for which a write may find no space, or that no write has reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holes {
    /// Bytes without allocated blocks.
    pub unallocated_bytes: u64,
    /// Bytes whose blocks are shared with other files.
    pub shared_bytes: u64,
    /// Bytes of allocated blocks that were never written: a first write there is slower. `None` if
    /// the file system does not list its extents.
    pub unwritten_bytes: Option<u64>,
}

impl Holes {
    /// Whether a block is allocated for every write.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.unallocated_bytes + self.shared_bytes == 0
    }

    /// How to fill the holes of the file at `path`.
    #[must_use]
    pub fn remedy(&self, path: &Path) -> String {
        let path = path.display();
        if self.shared_bytes > 0 {
            return format!(
                "close the store, then copy the file with \
                 `cp --reflink=never --sparse=never {path} COPY` and use the copy"
            );
        }
        format!(
            "fill them with \
             `fallocate --offset 0 --length $(stat -c %s {path}) {path}`"
        )
    }
}

impl fmt::Display for Holes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            (self.unallocated_bytes, "are not allocated (a sparse copy?)"),
            (
                self.shared_bytes,
                "share their blocks with other files (a reflinked copy?)",
            ),
        ];
        let mut before = "";
        for (bytes, what) in parts.into_iter().filter(|(bytes, _)| *bytes > 0) {
            write!(f, "{before}{} {what}", error::bytes(bytes))?;
            before = ", ";
        }
        Ok(())
    }
}

/// The holes of a regular file; `None` for other files, and if the file system does not report
/// them.
#[must_use]
pub fn holes(file: impl AsFd) -> Option<Holes> {
    let file = file.as_fd();
    let stat = rustix::fs::fstat(file).ok()?;
    let kind = rustix::fs::FileType::from_raw_mode(stat.st_mode);
    if kind != rustix::fs::FileType::RegularFile {
        return None;
    }
    let size = u64::try_from(stat.st_size).ok()?;
    let allocated = u64::try_from(stat.st_blocks).ok()?.saturating_mul(512);
    let listed = extents(file, [SHARED, UNWRITTEN]);
    Some(Holes {
        unallocated_bytes: size.saturating_sub(allocated),
        shared_bytes: listed.map_or(0, |[shared, _]| shared),
        unwritten_bytes: listed.map(|[_, unwritten]| unwritten),
    })
}

/// The kernel's `struct fiemap_extent`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Extent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// The kernel's `struct fiemap`.
#[repr(C)]
struct Request {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    extents: [Extent; EXTENTS],
}

/// Bytes of the extents with each of these flags; `None` if the file system does not list its
/// extents.
fn extents<const N: usize>(file: BorrowedFd<'_>, flags: [u32; N]) -> Option<[u64; N]> {
    let mut bytes = [0; N];
    let mut start = 0;
    for _ in 0..EXTENTS_MAX / EXTENTS {
        let mut request = Request {
            start,
            length: u64::MAX - start,
            flags: 0,
            mapped: 0,
            count: u32::try_from(EXTENTS).ok()?,
            reserved: 0,
            extents: [Extent::default(); EXTENTS],
        };
        // SAFETY: the kernel reads the head of the request, and writes no more than `count` extents
        // behind it, which is the number in the request.
        let answer = unsafe { libc::ioctl(file.as_raw_fd(), FIEMAP, &raw mut request) };
        if answer != 0 {
            return None;
        }
        let mapped = request.extents.get(..request.mapped as usize)?;
        for (bytes, flag) in bytes.iter_mut().zip(flags) {
            let with_flag = mapped.iter().filter(|extent| extent.flags & flag != 0);
            *bytes += with_flag.map(|extent| extent.length).sum::<u64>();
        }
        let Some(last) = mapped.last().filter(|extent| extent.flags & LAST == 0) else {
            break;
        };
        start = last.logical.saturating_add(last.length);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Write;

    use super::*;

    #[test]
    fn a_file_with_holes_reports_how_many_bytes_are_missing() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 64 << 10]).unwrap();
        file.sync_all().unwrap();
        assert!(holes(&file).unwrap().is_none());
        file.set_len(1 << 20).unwrap();
        let found = holes(&file).unwrap();
        assert_eq!(
            (found.unallocated_bytes, found.shared_bytes),
            (960 << 10, 0)
        );
        assert!(
            found
                .to_string()
                .starts_with("983040 bytes (960 KiB) are not allocated")
        );
        assert_eq!(holes(std::io::pipe().unwrap().0), None);
    }
}

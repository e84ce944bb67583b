//! Reads and writes that bypass the page cache.

use std::os::fd::AsFd;

use rustix::fs::{AtFlags, OFlags, StatxFlags};

/// Whether and how a file can be read and written without the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Direct {
    /// Whether `O_DIRECT` is honoured, and not only accepted.
    pub dio: bool,
    /// Required alignment of memory addresses, in bytes; 0 without direct I/O.
    pub memory_align: u32,
    /// Required alignment of offsets and lengths in the file, in bytes; 0 without direct I/O.
    pub offset_align: u32,
}

/// Asks the kernel whether direct I/O works on an open file.
///
/// Kernels before 6.1 do not report it. There, one byte is read from a file opened with `O_DIRECT`:
/// direct I/O refuses this read. An empty file refuses nothing, and counts as a file without direct
/// I/O.
pub fn direct_io(file: impl AsFd) -> Direct {
    let file = file.as_fd();
    let none = Direct {
        dio: false,
        memory_align: 0,
        offset_align: 0,
    };
    match rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
        Ok(stat) if stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0 => Direct {
            dio: stat.stx_dio_offset_align != 0,
            memory_align: stat.stx_dio_mem_align,
            offset_align: stat.stx_dio_offset_align,
        },
        _ if refuses_single_bytes(file) => Direct {
            dio: true,
            memory_align: 4096,
            offset_align: 4096,
        },
        _ => none,
    }
}

fn refuses_single_bytes(file: impl AsFd) -> bool {
    let file = file.as_fd();
    rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags.contains(OFlags::DIRECT))
        && rustix::io::pread(file, &mut [0u8; 1], 1) == Err(rustix::io::Errno::INVAL)
}

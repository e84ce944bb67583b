//! Memory for direct I/O: aligned, zeroed, and backed by huge pages if it is large.
//!
//! Owns: [`AlignedBuf`], the one owner of such memory. For memory that others allocated: the probe
//! [`backing_page_bytes`] for the size of its pages, and [`move_to_huge_pages`].
//!
//! Invariants of an [`AlignedBuf`]: its start is a multiple of [`ALIGN_BYTES`]; its length never
//! changes; every byte is initialised (zero until written); it is the only owner of its bytes, so
//! sharing it shares only reads.
//!
//! Why huge pages: a transfer is handed to the device as a list of physically contiguous runs. With
//! 4 KiB pages the list of a 1 MiB read has 256 entries, with huge pages one. That was worth 2.3 to
//! 3.4 times the bandwidth, and more in CPU time. Huge pages are requested, but not required: if
//! the kernel has none, the memory works all the same, only slower.
//!
//! Faults defended against: an overflowing length and a lack of memory are errors, not aborts.
//!
//! It does not pool, pin or register memory. Large memory costs address space until its pages are
//! first touched.

use std::alloc::Layout;
use std::fmt;
use std::io::{self, BufRead, BufReader};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use memmap2::{Advice, MmapOptions, MmapRaw};

use crate::system::pages::PageSizes;

/// Alignment of every [`AlignedBuf`], in bytes: the strictest requirement of direct I/O.
pub const ALIGN_BYTES: usize = 4096;

/// Longest buffer that comes from the allocator, in bytes; longer ones are mapped. A simulation
/// maps none: nothing unmaps the memory of the processes that it kills.
const HEAP_BYTES_MAX: usize = match cfg!(feature = "simulated") {
    true => isize::MAX as usize,
    false => 256 << 10,
};

/// `MADV_COLLAPSE` of `madvise(2)`, of Linux 6.1. `libc` has no name for it with musl.
const MADV_COLLAPSE: libc::c_int = 25;

/// An owned buffer of fixed length, aligned to 4096 bytes and zeroed. From half of a huge page on
/// (1 MiB where pages have 4 KiB) it is backed by huge pages if the kernel has them.
pub struct AlignedBuf {
    start: NonNull<u8>,
    len: usize,
    home: Home,
}

/// The source of the memory, to which it is returned.
enum Home {
    /// The allocator.
    Heap(Layout),
    /// An anonymous mapping, which may begin before the buffer and end after it.
    Map { _held: MmapRaw },
}

// SAFETY: an `AlignedBuf` is the only owner of plain bytes; no field is tied to the thread that
// made it.
unsafe impl Send for AlignedBuf {}
// SAFETY: a shared reference gives access to `&[u8]` only, and all changes need `&mut`.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// A buffer of `len` zero bytes. Pages of a large one are faulted in when they are first
    /// touched.
    ///
    /// # Errors
    /// [`io::ErrorKind::OutOfMemory`], or the kernel's error, if there is no such memory.
    pub fn zeroed(len: usize) -> Result<Self, io::Error> {
        if len <= HEAP_BYTES_MAX {
            Self::heap(len)
        } else {
            Self::map(len, PageSizes::here())
        }
    }

    fn heap(len: usize) -> Result<Self, io::Error> {
        // The allocator has no empty allocations; an empty buffer owns one hidden byte.
        let layout = Layout::from_size_align(len.max(1), ALIGN_BYTES).map_err(|_| too_long())?;
        // SAFETY: the layout's size is at least one byte.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            start,
            len,
            home: Home::Heap(layout),
        })
    }

    fn map(len: usize, sizes: PageSizes) -> Result<Self, io::Error> {
        // From here on, rounding up to whole huge pages wastes at most half of the memory.
        let is_huge = len >= sizes.huge() / 2;
        let align = if is_huge { sizes.huge() } else { sizes.small() };
        let used = len.checked_next_multiple_of(align).ok_or_else(too_long)?;
        let bytes = used
            .checked_add(align)
            .filter(|bytes| isize::try_from(*bytes).is_ok())
            .ok_or_else(too_long)?;
        let map = MmapRaw::from(MmapOptions::new().len(bytes).map_anon()?);
        let skip = map.as_ptr().align_offset(align);
        assert!(skip < align, "the mapping has room to align in");
        if is_huge {
            // A kernel without huge pages refuses; the memory works without them.
            let _ = map.advise_range(Advice::HugePage, skip, used);
        }
        let start = map.as_mut_ptr().wrapping_add(skip);
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            start,
            len,
            home: Home::Map { _held: map },
        })
    }
}

/// Leaks a buffer for the rest of the process: for memory that is registered with the kernel once
/// and then used for ever.
#[must_use]
pub fn leak(buffer: AlignedBuf) -> &'static mut [u8] {
    let memory = std::mem::ManuallyDrop::new(buffer);
    // SAFETY: `start` and `len` are this value's own initialised bytes; it was their only owner,
    // and is never dropped, so nothing frees them or refers to them again.
    unsafe { std::slice::from_raw_parts_mut(memory.start.as_ptr(), memory.len) }
}

fn too_long() -> io::Error {
    io::Error::new(
        io::ErrorKind::OutOfMemory,
        "the length of a buffer exceeds the address space",
    )
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if let Home::Heap(layout) = self.home {
            // SAFETY: `start` was allocated with this very layout and is freed once.
            unsafe { std::alloc::dealloc(self.start.as_ptr(), layout) }
        }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes from `start` belong to this buffer, and the borrow keeps
        // them from changing.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: `len` initialised bytes from `start` belong to this buffer, borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AlignedBuf")
            .field("start", &self.start)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// Size in bytes of the pages behind the memory at `address`: a small page's, or a huge page's if
/// any is in use in its mapping. `None` if nothing is mapped there, or `/proc` cannot be read.
///
/// Memory that has not been touched has no pages yet and reports small ones. The kernel walks the
/// page tables of every mapping below the address: for stats and start-up, not for hot paths. The
/// address is compared, never dereferenced.
pub fn backing_page_bytes(address: *const u8) -> Option<u64> {
    let smaps = BufReader::new(std::fs::File::open("/proc/self/smaps").ok()?);
    backing_in_smaps(smaps, address.addr(), PageSizes::here())
}

/// Moves memory that others allocated to huge pages. Returns the bytes that are on huge pages
/// afterwards.
///
/// Only whole huge pages (aligned) of the range are moved. Their bytes stay the same, and
/// other threads and devices may use them during the call. Memory that has not been touched is not
/// moved, but gets huge pages on its first touch where the kernel allows that. Memory that is
/// pinned, for a GPU for example, stays where it is, and so does all memory on kernels before 6.1
/// (`MADV_COLLAPSE`, `madvise(2)`). A move costs about as much time as copying the memory, and more
/// if the kernel has to make room for huge pages. It ends early when `is_wanted` is no longer true;
/// the memory may be unmapped at any time.
pub fn move_to_huge_pages(address: usize, length: usize, is_wanted: impl Fn() -> bool) -> usize {
    let sizes = PageSizes::here();
    let is_done = |page: &usize, advice| {
        let start = std::ptr::without_provenance_mut(page * sizes.huge());
        // SAFETY: neither advice changes the bytes of memory, and a range that is not mapped is an
        // error.
        unsafe { libc::madvise(start, sizes.huge(), advice) == 0 }
    };
    let pages = sizes.whole_huge(address, length);
    // The first is refused by kernels without huge pages, and needed only for later touches.
    let moved = pages.take_while(|_| is_wanted()).filter(|page| {
        is_done(page, libc::MADV_HUGEPAGE);
        is_done(page, MADV_COLLAPSE)
    });
    moved.count() * sizes.huge()
}

fn backing_in_smaps(smaps: impl BufRead, address: usize, sizes: PageSizes) -> Option<u64> {
    let mut inside = false;
    let mut page_bytes = None;
    for line in smaps.lines() {
        let line = line.ok()?;
        if let Some((start, end)) = mapping_range(&line) {
            if inside {
                break;
            }
            inside = (start..end).contains(&address);
        } else if inside && let Some((name, bytes)) = field(&line) {
            match name {
                "KernelPageSize" => page_bytes = page_bytes.max(Some(bytes)),
                "AnonHugePages" | "ShmemPmdMapped" | "FilePmdMapped" if bytes > 0 => {
                    page_bytes = page_bytes.max(Some(sizes.huge() as u64));
                }
                _ => {}
            }
        }
    }
    page_bytes
}

/// The address range of a mapping's first line, `7f00-7f10 rw-p ...`; `None` for the lines that
/// follow it.
fn mapping_range(line: &str) -> Option<(usize, usize)> {
    let (start, end) = line.split_ascii_whitespace().next()?.split_once('-')?;
    Some((
        usize::from_str_radix(start, 16).ok()?,
        usize::from_str_radix(end, 16).ok()?,
    ))
}

/// Name and size in bytes of a line such as `AnonHugePages:      2048 kB`.
fn field(line: &str) -> Option<(&str, u64)> {
    let (name, value) = line.split_once(':')?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    Some((name, kib.checked_mul(1024)?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const KIB_4: PageSizes = PageSizes::of(4 << 10);
    const KIB_16: PageSizes = PageSizes::of(16 << 10);
    const KIB_64: PageSizes = PageSizes::of(64 << 10);

    /// Of huge pages where small ones have 4 KiB.
    const HUGE_BYTES: usize = KIB_4.huge();

    const LENGTHS: [usize; 9] = [
        0,
        1,
        4096,
        HEAP_BYTES_MAX,
        HEAP_BYTES_MAX + 1,
        HUGE_BYTES / 2 - 1,
        HUGE_BYTES / 2,
        HUGE_BYTES,
        5_000_001,
    ];

    #[test]
    fn mapped_buffers_suit_the_pages_of_each_machine() {
        for (sizes, len, align) in [
            (KIB_4, 1 << 20, 2 << 20),
            (KIB_16, 1 << 20, 16 << 10),
            (KIB_16, 16 << 20, 32 << 20),
            (KIB_64, 16 << 20, 64 << 10),
            (KIB_64, 300_001, 64 << 10),
            (KIB_64, 256 << 20, 512 << 20),
        ] {
            let mut buf = AlignedBuf::map(len, sizes).unwrap();
            assert_eq!((buf.as_ptr().addr() % align, buf.len()), (0, len));
            (buf[0], buf[len - 1]) = (1, 2);
        }
    }

    #[test]
    fn buffers_of_every_size_are_aligned_zeroed_and_writable_to_the_last_byte() {
        for len in LENGTHS {
            let mut buf = AlignedBuf::zeroed(len).unwrap();
            assert_eq!(buf.len(), len);
            assert_eq!(buf.as_ptr().addr() % ALIGN_BYTES, 0);
            assert!(buf.iter().all(|byte| *byte == 0));
            buf.fill(0xa5);
            assert!(buf.iter().all(|byte| *byte == 0xa5));
        }
    }

    #[test]
    fn large_buffers_start_on_a_huge_page() {
        let huge = PageSizes::here().huge();
        let buf = AlignedBuf::zeroed(huge + 1).unwrap();
        assert_eq!(buf.as_ptr().addr() % huge, 0);
    }

    #[test]
    fn a_buffer_keeps_its_bytes_when_it_moves_to_another_thread() {
        let mut buf = AlignedBuf::zeroed(2 << 20).unwrap();
        buf[1_234_567] = 7;
        let buf = std::thread::spawn(move || buf).join().unwrap();
        assert_eq!(buf[1_234_567], 7);
    }

    #[test]
    fn a_length_beyond_the_address_space_is_an_error() {
        for len in [usize::MAX, usize::MAX - HUGE_BYTES, isize::MAX as usize] {
            assert_eq!(
                AlignedBuf::zeroed(len).unwrap_err().kind(),
                io::ErrorKind::OutOfMemory
            );
        }
    }

    #[test]
    fn touched_memory_reports_its_pages_and_unmapped_memory_none() {
        let mut buf = AlignedBuf::zeroed(4 << 20).unwrap();
        buf.fill(1);
        let page_bytes = backing_page_bytes(buf.as_ptr()).unwrap();
        assert!(
            page_bytes.is_power_of_two() && page_bytes >= 4096,
            "{page_bytes}"
        );
        assert_eq!(backing_page_bytes(std::ptr::null()), None);
    }

    #[test]
    fn shared_memory_moves_to_huge_pages_with_its_bytes() {
        let len = 8 << 20;
        let file = rustix::fs::memfd_create("rows", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = std::fs::File::from(file);
        file.set_len(len as u64).unwrap();
        // SAFETY: nothing else knows the file.
        let mut map = unsafe { MmapOptions::new().map_mut(&file) }.unwrap();
        for (at, byte) in map.iter_mut().enumerate().step_by(4096) {
            *byte = (at >> 12) as u8;
        }
        let moved = move_to_huge_pages(map.as_ptr().addr(), len, || true);
        for (at, byte) in map.iter().enumerate() {
            let expected = if at % 4096 == 0 { (at >> 12) as u8 } else { 0 };
            assert_eq!(*byte, expected, "{at}");
        }
        if moved == 0 {
            eprintln!("SKIPPED: this kernel moves no memory to huge pages");
        } else {
            let huge = PageSizes::here().huge();
            assert_eq!(backing_page_bytes(map.as_ptr()), Some(huge as u64));
        }
    }

    #[test]
    fn only_whole_huge_pages_that_are_mapped_are_moved() {
        let buf = AlignedBuf::zeroed(4 << 20).unwrap();
        let start = buf.as_ptr().addr();
        assert!(move_to_huge_pages(start, 4 << 20, || true) <= 4 << 20);
        assert_eq!(move_to_huge_pages(start, 4 << 20, || false), 0);
        let huge = PageSizes::here().huge();
        assert_eq!(move_to_huge_pages(start + 1, huge, || true), 0);
        assert_eq!(move_to_huge_pages(start, huge - 1, || true), 0);
        assert_eq!(move_to_huge_pages(0, huge, || true), 0);
        assert_eq!(
            move_to_huge_pages(usize::MAX - huge, usize::MAX, || true),
            0
        );
    }

    #[test]
    fn page_sizes_are_read_from_the_mapping_that_holds_the_address() {
        let smaps = "1000-3000 rw-p 00000000 00:00 0\n\
                     Size: 8 kB\nKernelPageSize:  4 kB\nAnonHugePages:  0 kB\nVmFlags: rd wr\n\
                     3000-9000 rw-p 00000000 00:00 0\n\
                     KernelPageSize:  4 kB\nAnonHugePages:  4096 kB\nVmFlags: rd\n\
                     a000-b000 rw-s 00000000 00:0f 12 /anon_hugepage (deleted)\n\
                     KernelPageSize:  2048 kB\nAnonHugePages: 0 kB\n";
        let of = |sizes, address| backing_in_smaps(smaps.as_bytes(), address, sizes);
        let at = |address| of(KIB_4, address);
        assert_eq!(of(KIB_64, 0x3000), Some(512 << 20));
        assert_eq!(at(0x0fff), None);
        assert_eq!(at(0x1000), Some(4096));
        assert_eq!(at(0x2fff), Some(4096));
        assert_eq!(at(0x3000), Some(2 << 20));
        assert_eq!(at(0x9000), None);
        assert_eq!(at(0xa000), Some(2 << 20));
        assert_eq!(at(0xb000), None);
    }
}

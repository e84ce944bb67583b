//! Memory of a run. All of it is given back at the end of the run, also the memory of killed tasks,
//! which nothing else frees.
//!
//! A program that plays many runs makes [`Heap`] its global allocator, and plays each in [`scope`].
//! In a scope a thread allocates from an area of its own, in blocks of powers of two. Freed blocks
//! are used again. The area is used again by the next scope, so its memory stays in the caches.
//!
//! Outside of scopes, and in a program with another allocator, memory is the system's.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

/// Address space of one area. Memory is used as far as a run touches it.
const AREA_BYTES: usize = 1 << 30;

/// Areas of a process. Without one, a thread uses the system's memory.
const AREAS: usize = 256;

/// The smallest block, and the largest alignment.
const BLOCK_MIN: usize = 16;
const ALIGN_MAX: usize = 4096;

/// Sizes of blocks: powers of two up to an area.
const SIZES: usize = AREA_BYTES.trailing_zeros() as usize + 1;

/// All areas, one behind the other. Null before the first scope.
static AREAS_BEGIN: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());
/// Areas that were given to threads at least once.
static AREAS_TAKEN: AtomicUsize = AtomicUsize::new(0);
/// Areas that threads have left, a bit each.
static AREAS_LEFT: [AtomicU64; AREAS / 64] = [const { AtomicU64::new(0) }; AREAS / 64];

/// The area of a thread.
struct Area {
    /// Null while the thread has none.
    begin: Cell<*mut u8>,
    /// The area of the last run that panicked, which may still hold the panic.
    former: Cell<*mut u8>,
    /// The first byte that no block has.
    next: Cell<usize>,
    /// By size: the first freed block. Its first word is the address of the next one.
    freed: [Cell<*mut u8>; SIZES],
    /// A scope is open.
    is_open: Cell<bool>,
}

thread_local! {
    static AREA: Area = const {
        Area {
            begin: Cell::new(ptr::null_mut()),
            former: Cell::new(ptr::null_mut()),
            next: Cell::new(0),
            freed: [const { Cell::new(ptr::null_mut()) }; SIZES],
            is_open: Cell::new(false),
        }
    };
}

/// See the module.
#[derive(Debug)]
pub struct Heap;

/// The size of the block for a layout, as a power of two. `None` for a layout that no area serves.
fn size_of(layout: Layout) -> Option<usize> {
    let bytes = layout.size().max(layout.align()).max(BLOCK_MIN);
    let fits = layout.align() <= ALIGN_MAX && bytes <= AREA_BYTES;
    fits.then(|| bytes.next_power_of_two().trailing_zeros() as usize)
}

impl Area {
    fn is_own(&self, block: *mut u8) -> bool {
        let begin = self.begin.get().addr();
        begin != 0 && (begin..begin + AREA_BYTES).contains(&block.addr())
    }

    /// A block. Null if the area is full.
    fn take(&self, size: usize) -> *mut u8 {
        let freed = self.freed[size].get();
        if !freed.is_null() {
            // SAFETY: a freed block of an area holds the address of the next one, or null.
            self.freed[size].set(unsafe { freed.cast::<*mut u8>().read() });
            return freed;
        }
        let bytes = 1 << size;
        let from = self.next.get().next_multiple_of(bytes.min(ALIGN_MAX));
        if from + bytes > AREA_BYTES {
            return ptr::null_mut();
        }
        self.next.set(from + bytes);
        self.begin.get().wrapping_add(from)
    }

    fn give_back(&self, block: *mut u8, size: usize) {
        // SAFETY: the block has at least 16 bytes, is aligned to them, and is not in use.
        unsafe { block.cast::<*mut u8>().write(self.freed[size].get()) };
        self.freed[size].set(block);
    }

    /// Forgets all blocks.
    fn clear(&self) {
        self.next.set(0);
        self.freed
            .iter()
            .for_each(|freed| freed.set(ptr::null_mut()));
    }

    /// Takes a new area. Without one, the thread goes on with the system's memory.
    fn renew(&self) {
        self.clear();
        let number = left().unwrap_or_else(|| AREAS_TAKEN.fetch_add(1, Ordering::Relaxed));
        let begin = areas();
        self.former.set(self.begin.get());
        self.begin.set(match number < AREAS && !begin.is_null() {
            true => begin.wrapping_add(number * AREA_BYTES),
            false => ptr::null_mut(),
        });
    }
}

/// Takes an area that a thread has left.
fn left() -> Option<usize> {
    AREAS_LEFT.iter().enumerate().find_map(|(at, areas)| {
        let lowest = |areas: u64| (areas != 0).then(|| areas & (areas - 1));
        let before = areas.fetch_update(Ordering::AcqRel, Ordering::Acquire, lowest);
        Some(at * 64 + before.ok()?.trailing_zeros() as usize)
    })
}

/// The address space of all areas. Null if there is none.
fn areas() -> *mut u8 {
    static RESERVED: std::sync::Once = std::sync::Once::new();
    RESERVED.call_once(|| {
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let mapped = unsafe {
            libc::mmap(
                ptr::null_mut(),
                AREAS * AREA_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if mapped != libc::MAP_FAILED {
            // SAFETY: the mapping just made. A kernel without huge pages refuses.
            unsafe { libc::madvise(mapped, AREAS * AREA_BYTES, libc::MADV_HUGEPAGE) };
            AREAS_BEGIN.store(mapped.cast(), Ordering::Release);
        }
    });
    AREAS_BEGIN.load(Ordering::Acquire)
}

/// Whether a block lies in some area.
fn is_in_area(block: *mut u8) -> bool {
    let begin = AREAS_BEGIN.load(Ordering::Acquire).addr();
    begin != 0 && (begin..begin + AREAS * AREA_BYTES).contains(&block.addr())
}

// SAFETY: a block of an area is given once until it is given back, is as large and as aligned as
// its layout wants, and belongs to the thread that took it. A block that another thread frees, or
// that is freed outside of a scope, stays unused until its area is cleared. All else is the
// system's.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let block = AREA.with(|area| match size_of(layout) {
            Some(size) if area.is_open.get() => area.take(size),
            _ => ptr::null_mut(),
        });
        match block.is_null() {
            // SAFETY: the caller's promise.
            true => unsafe { System.alloc(layout) },
            false => block,
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if !is_in_area(block) {
            // SAFETY: the caller's promise; the block is the system's.
            unsafe { System.dealloc(block, layout) };
            return;
        }
        AREA.with(|area| match size_of(layout) {
            Some(size) if area.is_open.get() && area.is_own(block) => area.give_back(block, size),
            _ => {}
        });
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        let block = unsafe { self.alloc(layout) };
        if !block.is_null() {
            // SAFETY: the block has these bytes.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        block
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        if !is_in_area(block) {
            // SAFETY: the caller's promise; the block is the system's.
            return unsafe { System.realloc(block, layout, bytes) };
        }
        // SAFETY: the caller's promise.
        let wanted = unsafe { Layout::from_size_align_unchecked(bytes, layout.align()) };
        if size_of(wanted) == size_of(layout) {
            return block;
        }
        // SAFETY: the caller's promise.
        let new = unsafe { self.alloc(wanted) };
        if !new.is_null() {
            // SAFETY: both blocks have that many bytes, and do not overlap.
            unsafe { ptr::copy_nonoverlapping(block, new, bytes.min(layout.size())) };
            // SAFETY: the caller's promise.
            unsafe { self.dealloc(block, layout) };
        }
        new
    }
}

/// Closes a scope. After a panic its area is never used again: the panic may lie in it.
struct Open;

impl Drop for Open {
    fn drop(&mut self) {
        AREA.with(|area| {
            area.is_open.set(false);
            if std::thread::panicking() {
                area.renew();
            } else {
                area.clear();
            }
        });
    }
}

/// Gives the areas of this thread back, with their memory: for a thread that plays no more runs.
///
/// # Safety
/// Nothing of the runs of this thread is used any more, also not the panic of a run.
pub unsafe fn leave() {
    AREA.with(|area| {
        area.clear();
        for begin in [&area.begin, &area.former] {
            let begin = begin.replace(ptr::null_mut());
            if begin.is_null() {
                continue;
            }
            // SAFETY: a whole area, which nothing uses by the caller's promise.
            unsafe { libc::madvise(begin.cast(), AREA_BYTES, libc::MADV_DONTNEED) };
            let number = (begin.addr() - areas().addr()) / AREA_BYTES;
            AREAS_LEFT[number / 64].fetch_or(1 << (number % 64), Ordering::AcqRel);
        }
    });
}

/// Calls `f` with the system's memory. Its allocations may be used after the scope.
pub fn outside<R>(f: impl FnOnce() -> R) -> R {
    struct Again(bool);
    impl Drop for Again {
        fn drop(&mut self) {
            AREA.with(|area| area.is_open.set(self.0));
        }
    }
    let _again = Again(AREA.with(|area| area.is_open.replace(false)));
    f()
}

/// Plays a run with memory of its own. The result is `Copy`: it owns no memory.
///
/// # Safety
/// Nothing that `run` allocates may be used after it has returned, but for [`outside`]. So it must
/// not leave anything in a static or in a value of a thread that owns memory. Before the first
/// scope of a process, something like `run` has to be played without one: statics that are made at
/// their first use are made then. If `run` panics, its memory stays.
pub unsafe fn scope<R: Copy + 'static>(run: impl FnOnce() -> R) -> R {
    AREA.with(|area| {
        assert!(!area.is_open.get(), "a scope within a scope");
        if area.begin.get().is_null() {
            area.renew();
        }
        crate::task::make_room_for_stacks();
        area.is_open.set(!area.begin.get().is_null());
    });
    let _open = Open;
    run()
}

//! The byte copies of the host device.

use crate::transfer::{Copy2d, Direction, Plan};

/// Copies one layer of all pages of a plan.
///
/// # Safety
/// The L1 pool is in host memory. No other access writes the source pages or touches the
/// destination pages.
pub(super) unsafe fn layer(plan: &Plan, direction: Direction, layer: u32) {
    let l2 = plan.l2.start().as_ptr();
    for copy in plan.copies(layer) {
        // SAFETY: guaranteed by the caller. The rows of a plan lie in their pools, and the pools do
        // not overlap.
        unsafe { rows(l2, direction, &copy) };
    }
}

/// # Safety
/// The rows lie inside two pools that do not overlap; the host pool starts at `l2`. They may be
/// read and written.
unsafe fn rows(l2: *mut u8, direction: Direction, copy: &Copy2d) {
    let rows = &copy.rows;
    let width = rows.width as usize;
    for row in 0..rows.count {
        let l1 = host_pointer(copy.l1 + row * rows.l1_pitch);
        let l2_offset = (copy.l2 + row * rows.l2_pitch) as usize;
        // SAFETY: inside the pool, guaranteed by the caller.
        let l2 = unsafe { l2.add(l2_offset) };
        let (from, to) = match direction {
            Direction::Load => (l2, l1),
            Direction::Store => (l1, l2),
        };
        // SAFETY: `width` bytes on each side, in memory that does not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, to, width) };
    }
}

/// A byte of an L1 pool in host memory. Its provenance was exposed when the pool was created.
pub(super) fn host_pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

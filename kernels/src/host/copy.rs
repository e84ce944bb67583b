//! The bytes themselves.

use crate::pool::L1Memory;
use crate::transfer::{Copy2d, Direction, Plan};

/// Copies one layer of all pages of a plan.
///
/// # Safety
/// The pages copied from are written by nobody, those copied to are touched by nobody, and the L1 pool lies in host memory.
pub(super) unsafe fn layer(plan: &Plan, direction: Direction, layer: u32) {
    let L1Memory::Host(l1) = plan.l1.memory();
    let (l1, l2) = (l1.start().as_ptr(), plan.l2.start().as_ptr());
    for copy in plan.copies(layer) {
        // SAFETY: as promised; the rows of a plan lie in their pools, and the pools are different memory.
        unsafe { rows(l1, l2, direction, &copy) };
    }
}

/// # Safety
/// The rows lie inside the two pools that begin at `l1` and `l2`, which do not overlap, and they may be read and written.
unsafe fn rows(l1: *mut u8, l2: *mut u8, direction: Direction, copy: &Copy2d) {
    let rows = &copy.rows;
    let width = rows.width as usize;
    for row in 0..rows.count {
        let l1_offset = (copy.l1 + row * rows.l1_pitch) as usize;
        let l2_offset = (copy.l2 + row * rows.l2_pitch) as usize;
        // SAFETY: inside the pool, as the caller vouches.
        let l1 = unsafe { l1.add(l1_offset) };
        // SAFETY: likewise.
        let l2 = unsafe { l2.add(l2_offset) };
        let (from, to) = match direction {
            Direction::Load => (l2, l1),
            Direction::Store => (l1, l2),
        };
        // SAFETY: `width` bytes of each, in memory that does not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, to, width) };
    }
}

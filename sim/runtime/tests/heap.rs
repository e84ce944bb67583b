//! The memory of runs: leaks end with their run, blocks are whole and aligned, and a panic keeps
//! its memory.
#![allow(clippy::unwrap_used)]

use std::alloc::{Layout, alloc, dealloc};
use std::panic::{catch_unwind, panic_any};

use larder_sim_runtime::heap::{Heap, outside, scope};

#[global_allocator]
static HEAP: Heap = Heap;

/// Plays a run that leaves nothing behind.
fn play<R: Copy + 'static>(run: impl FnOnce() -> R) -> R {
    // SAFETY: no static and no result of the runs below points into the memory of a run.
    unsafe { scope(run) }
}

/// The address of a leaked block.
fn leak(bytes: usize) -> usize {
    let _ = Vec::<u8>::with_capacity(bytes).leak();
    let leaked = Box::leak(vec![1_u8; bytes].into_boxed_slice());
    leaked.as_ptr().addr()
}

#[test]
fn the_next_run_has_the_memory_that_a_run_leaked() {
    let first = play(|| leak(1 << 20));
    assert_eq!(play(|| leak(1 << 20)), first);
    // Without a scope it is the system's, and stays.
    assert_ne!(leak(1 << 20), leak(1 << 20));
}

#[test]
fn what_is_made_outside_a_run_outlives_it() {
    let mut kept = vec![1_u8];
    let first = play(|| {
        outside(|| kept.extend([2; 1 << 16]));
        leak(1 << 20)
    });
    assert_eq!(play(|| leak(1 << 20)), first);
    assert_eq!((kept.len(), kept[0], kept[1 << 16]), (1 + (1 << 16), 1, 2));
}

#[test]
fn blocks_are_aligned_apart_and_used_again() {
    play(|| {
        let mut blocks = Vec::new();
        for (bytes, align) in [(1, 1), (24, 8), (100, 64), (4096, 4096), (70_000, 512)] {
            let layout = Layout::from_size_align(bytes, align).unwrap();
            for _ in 0..3 {
                // SAFETY: the layout has bytes.
                let block = unsafe { alloc(layout) };
                assert!(block.addr().is_multiple_of(align));
                blocks.push((block, layout));
            }
        }
        for (number, (block, layout)) in (0_u8..).zip(&blocks) {
            // SAFETY: the block has these bytes.
            unsafe { block.write_bytes(number, layout.size()) };
        }
        for (number, (block, layout)) in (0_u8..).zip(&blocks) {
            // SAFETY: the block has these bytes, and all of them were written.
            let bytes = unsafe { std::slice::from_raw_parts(*block, layout.size()) };
            assert!(bytes.iter().all(|byte| *byte == number));
        }
        let (last, layout) = blocks.pop().unwrap();
        // SAFETY: it came from `alloc`, with this layout, and is not used any more.
        unsafe { dealloc(last, layout) };
        // SAFETY: the layout has bytes.
        assert_eq!(unsafe { alloc(layout) }, last);
    });
}

#[test]
fn what_grows_keeps_its_bytes_also_across_the_end_of_a_run() {
    let mut outside: Vec<u32> = (0..100).collect();
    play(|| {
        let mut inside = Vec::new();
        (0..100_000_u32).for_each(|number| inside.push(number));
        assert!(inside.into_iter().eq(0..100_000));
    });
    outside.extend(100..100_000);
    assert!(outside.into_iter().eq(0..100_000));
}

#[test]
fn the_message_of_a_panic_outlives_its_run() {
    let said = catch_unwind(|| play::<()>(|| panic_any("x".repeat(10_000)))).unwrap_err();
    for _ in 0..3 {
        play(|| leak(20_000));
    }
    let said = said.downcast::<String>().unwrap();
    assert_eq!(*said, "x".repeat(10_000));
}

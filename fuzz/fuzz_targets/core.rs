//! The fuzzer's entry to `larder_fuzz::core`.
#![no_main]

/// A run does not free the memory of its killed processes.
#[global_allocator]
static HEAP: larder_sim::Heap = larder_sim::Heap;

libfuzzer_sys::fuzz_target!(|data: &[u8]| larder_fuzz::core(data));

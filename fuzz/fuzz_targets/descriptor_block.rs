//! The fuzzer's entry to `larder_fuzz::descriptor_block`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| larder_fuzz::descriptor_block(data));

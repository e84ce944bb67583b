//! The fuzzer's entry to `larder_fuzz::segment_header`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| larder_fuzz::segment_header(data));

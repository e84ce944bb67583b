//! The fuzzer's entry to `larder_fuzz::sizes`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| larder_fuzz::sizes(data));

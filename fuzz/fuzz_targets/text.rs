//! The fuzzer's entry to `larder_fuzz::text`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| larder_fuzz::text(data));

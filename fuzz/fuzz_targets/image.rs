//! The fuzzer's entry to `larder_fuzz::image`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| larder_fuzz::image(data));

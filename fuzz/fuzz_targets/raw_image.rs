//! The fuzzer's entry to `larder_fuzz::raw_image`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| larder_fuzz::raw_image(data));

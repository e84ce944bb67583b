//! The fuzzer's way into `larder_fuzz::namespace_record`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| larder_fuzz::namespace_record(data));

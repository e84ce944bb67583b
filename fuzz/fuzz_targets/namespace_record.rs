//! The fuzzer's entry to `larder_fuzz::namespace_record`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| larder_fuzz::namespace_record(data));

//! The fuzzer's entry to `larder_fuzz::keyring`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| larder_fuzz::keyring(data));

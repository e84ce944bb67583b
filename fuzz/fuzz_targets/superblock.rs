//! The fuzzer's way into `larder_fuzz::superblock`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| larder_fuzz::superblock(data));

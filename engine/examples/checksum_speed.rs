//! The cost of a page's checksum, from memory and from the cache, beside the same CRC from front to
//! back; prints one table.
//!
//! `cargo run --release -p larder-engine --example checksum_speed [PAGE_BYTES]` (default 131,072;
//! 0.5 GB of memory, in huge pages where available). The two take turns. CPU seconds a GiB,
//! medians.

use std::hint::black_box;
use std::time::Instant;

use crc_fast::{CrcAlgorithm, Digest};
use larder_engine::AlignedBuf;
use larder_format::{Fingerprint, PageChecksum, PageKey};

const MEMORY_BYTES: usize = 512 << 20;
const CACHED_BYTES: usize = 1 << 20;
const ROUNDS: usize = 15;

fn main() {
    let page_bytes = std::env::args()
        .nth(1)
        .and_then(|word| word.parse().ok())
        .unwrap_or(128 << 10)
        .clamp(1, CACHED_BYTES);
    let mut memory = AlignedBuf::zeroed(MEMORY_BYTES).expect("memory");
    for (byte, n) in memory.iter_mut().zip(0_u64..) {
        *byte = n.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes()[0];
    }
    let cached = &memory[..CACHED_BYTES];
    let mut seconds = [const { Vec::new() }; 4];
    for _ in 0..ROUNDS {
        let again = MEMORY_BYTES / CACHED_BYTES;
        seconds[0].push(time(&memory, page_bytes, 1, front_to_back));
        seconds[1].push(time(&memory, page_bytes, 1, of_page));
        seconds[2].push(time(cached, page_bytes, again, front_to_back));
        seconds[3].push(time(cached, page_bytes, again, of_page));
    }
    let [dram, dram_page, cache, cache_page] = seconds.map(median);
    println!(
        "pages of {page_bytes} bytes{:>22}{:>18}",
        "a CRC", "PageChecksum"
    );
    println!("out of memory, s/GiB  {dram:>22.3}{dram_page:>18.3}");
    println!("out of the cache, s/GiB{cache:>21.3}{cache_page:>18.3}");
}

fn front_to_back(page: &[u8]) -> u64 {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    digest.update(page);
    digest.finalize()
}

fn of_page(page: &[u8]) -> u64 {
    let name = (
        Fingerprint::from_bytes([1; 16]),
        PageKey::from_bytes([2; 32]),
    );
    let mut checksum = PageChecksum::new(name.0, &name.1);
    checksum.part(page);
    checksum.finish()
}

/// Seconds a GiB.
fn time(memory: &[u8], page_bytes: usize, times: usize, sum: fn(&[u8]) -> u64) -> f64 {
    let start = Instant::now();
    for _ in 0..times {
        for page in memory.chunks_exact(page_bytes) {
            black_box(sum(black_box(page)));
        }
    }
    let whole = memory.len() / page_bytes * page_bytes;
    let gib = (whole * times) as f64 / (1_u64 << 30) as f64;
    start.elapsed().as_secs_f64() / gib
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

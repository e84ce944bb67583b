//! Encode and decode of 64 MiB beside memcpy in the same run, on one core: medians of 31.
//!
//! `codec_speed [FILE]`: with the contents of a file of bf16 values, for example KV of a model.
//! Without it, values of a normal distribution.

use std::hint::black_box;
use std::time::Instant;
use std::{env, fs};

use larder_codec::{Codec, Form};

const BYTES: usize = 64 << 20;
const PAGE: usize = 4 << 20;
const ROUNDS: usize = 31;
const UNIT: usize = 4096;

fn main() {
    let sample = match env::args().nth(1) {
        Some(file) => fs::read(&file).unwrap_or_else(|error| panic!("{file}: {error}")),
        None => normal(),
    };
    let plain: Vec<u8> = sample.iter().copied().cycle().take(BYTES).collect();
    let mut stream = vec![0; BYTES];
    let mut page = vec![0; BYTES];
    for form in Form::all() {
        let codec = Codec::of(form);
        let [mut encodes, mut decodes, mut copies] = [const { Vec::new() }; 3];
        let mut lengths = Vec::new();
        for _ in 0..ROUNDS {
            lengths.clear();
            let start = Instant::now();
            for (plain, into) in plain.chunks(PAGE).zip(stream.chunks_mut(PAGE)) {
                lengths.push(codec.encode(&[plain], UNIT, into));
            }
            encodes.push(start.elapsed().as_secs_f64());
            for ((stream, page), length) in
                stream.chunks(PAGE).zip(page.chunks_mut(PAGE)).zip(&lengths)
            {
                let length = length.unwrap_or(0);
                page[..length].copy_from_slice(&stream[..length]);
            }
            let start = Instant::now();
            for (page, length) in page.chunks_mut(PAGE).zip(&lengths) {
                if let Some(length) = length {
                    codec
                        .decode_in_place(page, *length)
                        .expect("the stream of a page");
                }
            }
            decodes.push(start.elapsed().as_secs_f64());
            let start = Instant::now();
            black_box(&mut page).copy_from_slice(black_box(&plain));
            copies.push(start.elapsed().as_secs_f64());
        }
        let [encode, decode, copy] = [encodes, decodes, copies].map(median);
        let stored: usize = lengths.iter().map(|length| length.unwrap_or(PAGE)).sum();
        println!(
            "{:<9} ratio {:.3}  encode {:.2} GB/s, {:.2} of memcpy  decode {:.2} GB/s, {:.2} of \
             memcpy  memcpy {:.2} GB/s",
            form.name(),
            BYTES as f64 / stored as f64,
            BYTES as f64 / encode / 1e9,
            copy / encode,
            BYTES as f64 / decode / 1e9,
            copy / decode,
            BYTES as f64 / copy / 1e9,
        );
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Sums of twelve uniform values, by a generator of Lehmer's kind.
fn normal() -> Vec<u8> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    let mut value = || (0..12).map(|_| uniform()).sum::<f32>() - 6.0;
    (0..PAGE / 2)
        .flat_map(|_| ((value().to_bits() >> 16) as u16).to_le_bytes())
        .collect()
}

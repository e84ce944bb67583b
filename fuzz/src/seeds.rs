//! The first inputs: the output of the encoders, and one input for each edit. `cargo run -p
//! larder-fuzz --example seeds` writes them into directories, one for each target.

use larder_engine::format::{BLOCK_BYTES, Structure};

use crate::raw::{patches, raw_sample};
use crate::sample::{RECIPES, namespace, namespaces, sample};

const PROLOGUE_BYTES: usize = 24;

/// The seeds of a target.
///
/// # Panics
/// If a sample cannot be made.
#[must_use]
pub fn seeds(target: &str) -> Vec<Vec<u8>> {
    match target {
        "superblock" => superblocks(),
        "segment_header" => structures(Structure::SegmentHeader),
        "descriptor_block" => structures(Structure::DescriptorBlock),
        "namespace_record" => namespace_records(),
        "text" => texts(&[
            "{\"timestamp\": 0, \"input_length\": 900, \"output_length\": 5, \
             \"hash_ids\": [0, 1]}\n\n{\"hash_ids\": []}",
            "{\"hash_ids\":[18446744073709551615]}\r\n{\"hash_ids\": [1, -2]}",
            "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff",
            "0123456789abcdef0123456789abcdef\x03",
        ]),
        "sizes" => texts(&[
            "0",
            "4096",
            "64KiB",
            "1.5GiB",
            "16 MiB",
            "2TiB",
            "18446744073709551615",
            "0.000000000000001TiB",
            "30s",
            "500ms",
            "2m",
            "1e9",
            "64GB",
            "16777216TiB",
        ]),
        "image" => images(),
        "raw_image" => vec![patches(&raw_sample().image)],
        "core" => scripts(),
        "messages" => crate::messages::seeds(),
        "codec" => crate::codec::seeds(),
        "keyring" => crate::keyring::seeds(),
        _ => Vec::new(),
    }
}

fn texts(texts: &[&str]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

/// A block as it is on disk, and as its length and the fields behind its prologue.
fn both_forms(block: &[u8; BLOCK_BYTES]) -> [Vec<u8>; 2] {
    let length = usize::from(u16::from_le_bytes([block[12], block[13]]));
    let fields = [
        &block[12..14],
        &block[PROLOGUE_BYTES..length.max(PROLOGUE_BYTES)],
    ]
    .concat();
    [block.to_vec(), fields]
}

fn superblocks() -> Vec<Vec<u8>> {
    let of = |recipe: usize| sample(recipe).image.superblocks.clone();
    (0..RECIPES)
        .flat_map(of)
        .filter_map(|mut superblock| {
            // Samples may have smaller segments than superblocks allow.
            superblock.segment_blocks = superblock.segment_blocks.max(4096);
            superblock.encode().ok()
        })
        .flat_map(|block| both_forms(&block))
        .collect()
}

/// A few blocks of a structure from each sample.
fn structures(structure: Structure) -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for recipe in 0..RECIPES {
        let volume = &sample(recipe).image.volumes[0];
        let blocks = volume.written().into_iter().map(|at| volume.block(at));
        let some = blocks.filter(|block| block.starts_with(&structure.magic()));
        seeds.extend(some.step_by(3).take(6).flat_map(|block| both_forms(&block)));
    }
    seeds
}

fn namespace_records() -> Vec<Vec<u8>> {
    let odd = [namespace("m", &[1]), namespace("m", &[70_272; 8])];
    let all = namespaces().iter().chain(&odd);
    all.map(|namespace| namespace.encode().to_vec()).collect()
}

/// Each sample as it is, and each edit of each sample a few times.
fn images() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for recipe in 0..RECIPES as u8 {
        seeds.push(vec![recipe]);
        for edit in 1..16_u8 {
            for variant in 0..3_u8 {
                let mut seed = vec![recipe, 0, edit];
                // Different numbers, so that an edit uses two different blocks. Then the end of the
                // edits.
                seed.extend((0..14).map(|at: u8| {
                    at.wrapping_mul(37).wrapping_add(edit.wrapping_mul(11))
                        ^ variant.wrapping_mul(83)
                }));
                seed.extend([0, 0]);
                seed.extend((0..40).map(|at: u8| at.wrapping_mul(29).wrapping_add(variant)));
                seeds.push(seed);
            }
        }
    }
    seeds
}

fn scripts() -> Vec<Vec<u8>> {
    let mut seeds = vec![vec![0; 64], vec![0xff; 256]];
    for seed in 0..24_u64 {
        let mut word = seed;
        let next = |_| {
            word = word
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (word >> 33) as u8
        };
        seeds.push((0..400 + 100 * (seed % 8) as usize).map(next).collect());
    }
    seeds
}

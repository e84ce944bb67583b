//! Contents of pages that a codec can shrink: in full, by half, or not; and their form by it.

use larder_codec::Codec;
use larder_engine::format::PageChecksum;
use larder_sim_runtime::dice::mix;
use larder_sim_runtime::medium::{Block, Content};

use crate::setup::BLOCK;

/// A page as the codec stores it.
#[derive(Clone, Debug)]
pub struct Coded {
    pub checksum: u64,
    /// The digests of its blocks.
    pub blocks: Vec<u64>,
}

impl Coded {
    /// `None` if the codec does not save a block of this page. `checksum` is of its name alone.
    pub fn of(page: &[u8], mut checksum: PageChecksum) -> Option<Coded> {
        let stored = encode(page)?;
        checksum.blocks(&stored);
        let blocks = stored.as_chunks().0.iter().map(Content::coded);
        Some(Coded {
            checksum: checksum.finish(),
            blocks: blocks.filter_map(|block| digest(&block)).collect(),
        })
    }
}

/// A page as it is encrypted.
pub fn sealed(checksum: u64, stored: &[u8]) -> Coded {
    let blocks = stored.as_chunks().0.iter().map(Content::coded);
    Coded {
        checksum,
        blocks: blocks.filter_map(|block| digest(&block)).collect(),
    }
}

/// A block with other bytes under the same checksum.
pub fn forged(block: &Block) -> Content {
    let mut wrong = *block;
    spoil(&mut wrong);
    Content::coded(&wrong)
}

fn spoil(block: &mut Block) {
    for (byte, unseen) in block.iter_mut().zip(UNSEEN.to_le_bytes()) {
        *byte ^= unseen;
    }
}

/// The digest of a block of page data. A block that the codec stores plain has its word.
pub fn digest(block: &Content) -> Option<u64> {
    match block {
        Content::Data(digest) | Content::Coded(digest, _) => Some(*digest),
        Content::Zero | Content::Bytes(_) => None,
    }
}

fn encode(page: &[u8]) -> Option<Vec<u8>> {
    let mut stored = vec![0; page.len()];
    let length = Codec::new().encode(&[page], BLOCK, &mut stored)?;
    stored.truncate(length);
    Some(stored)
}

/// The word that a block of a version repeats: four values in bf16. Their signs and mantissas have
/// the version and the number of the block, and 4 bits of a check: each block that the codec stores
/// has some of them, so that it is of one version alone. The low bits of the exponents have the
/// rest of the check. Their high bits decide how far the codec can shrink the values.
pub fn word(version: usize, at: u32, salt: u64) -> u64 {
    assert!(
        version < 1 << 20 && at < 1 << 8,
        "a run has fewer versions and smaller pages"
    );
    let name = (version as u64) << 8 | u64::from(at);
    let check = mix(salt, name);
    let named = name << 4 | check & 0xf;
    // Values with an exponent that the codec escapes. With two of four it stores a block plain.
    let far = match mix(salt, version as u64) % 4 {
        0 => 0,
        1 => 1,
        2 => at & 2,
        _ => 2,
    };
    (0..4).fold(0, |word, lane| {
        let bits = named >> (8 * lane) & 0xff;
        let high = if lane < far { 0xe0 } else { 0x78 };
        let exponent = high | check >> (4 + 3 * lane) & 7;
        word << 16 | (bits & 0x80) << 8 | exponent << 7 | bits & 0x7f
    })
}

/// The version and the number of the block that repeats a word, if any does.
pub fn block_of(word: u64) -> (usize, u32) {
    let named = (0..4).rev().fold(0, |named, lane| {
        let value = word >> (48 - 16 * lane) & 0xffff;
        named << 8 | value >> 8 & 0x80 | value & 0x7f
    });
    ((named >> 12) as usize, (named >> 4) as u32 & 0xff)
}

/// A difference of bytes that no checksum of a page shows: the polynomial of the checksum itself.
const UNSEEN: u128 = 0x9a6c_9329_ac4b_c9b5 << 1 | 1;

/// The block `at` of an encoded page, with other bytes and the same checksum, so that the codec
/// refuses the page.
pub fn miscoded(page: &[u8], at: usize, block: &Block) -> Option<Content> {
    let mut stored = encode(page)?;
    let wrong = stored.as_chunks_mut::<BLOCK>().0.get_mut(at)?;
    assert_eq!(wrong, block, "a codec that stores a page in two ways");
    spoil(wrong);
    let wrong = *wrong;
    let is_refused = Codec::new()
        .decode(&stored, &mut [&mut page.to_vec()])
        .is_err();
    is_refused.then(|| Content::coded(&wrong))
}

#[cfg(test)]
mod tests {
    use larder_engine::format::{Fingerprint, PageKey};

    use super::*;

    fn page(version: usize, blocks: u32) -> Vec<u8> {
        let words = (0..blocks).map(|at| word(version, at, 7));
        words
            .flat_map(|word| word.to_le_bytes().repeat(BLOCK / 8))
            .collect()
    }

    #[test]
    fn contents_shrink_in_full_by_half_or_not() {
        let mut blocks =
            Vec::from_iter((0..100).map(|version| {
                encode(&page(version, 16)).map_or(16, |stored| stored.len() / BLOCK)
            }));
        blocks.sort_unstable();
        blocks.dedup();
        assert_eq!(blocks, [13, 15, 16]);
    }

    #[test]
    fn the_word_of_a_block_tells_its_version_and_number() {
        for version in [0, 1, 0xfffff] {
            for at in [0, 1, 255] {
                assert_eq!(block_of(word(version, at, 9)), (version, at));
            }
        }
    }

    #[test]
    fn a_miscoded_block_has_the_checksum_of_the_right_one() {
        let mut pages = (0..100).map(|version| page(version, 8));
        let coded = pages.find_map(|page| Some((encode(&page)?, page)));
        let (stored, page) = coded.expect("the codec makes some smaller");
        let name = (
            Fingerprint::from_bytes([1; 16]),
            PageKey::from_bytes([2; 32]),
        );
        let checksum = |bytes: &[u8]| {
            let mut checksum = PageChecksum::new(name.0, &name.1);
            checksum.blocks(bytes);
            checksum.finish()
        };
        let blocks = stored.as_chunks().0;
        for (at, block) in blocks.iter().enumerate() {
            let Some(wrong) = miscoded(&page, at, block) else {
                continue;
            };
            let mut bytes = stored.clone();
            wrong.render(&mut bytes.as_chunks_mut::<BLOCK>().0[at]);
            assert_ne!(bytes, stored);
            assert_eq!(checksum(&bytes), checksum(&stored));
        }
        assert!(miscoded(&page, 0, &blocks[0]).is_some());
    }
}

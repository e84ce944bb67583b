//! Encrypted pages: what opens, what does not, and what the stored bytes show.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::HashSet;
use std::num::NonZeroU16;

use common::*;
use larder_format::{BLOCK_BYTES, Fingerprint, PageChecksum, PageKey, Seal};
use larder_seal::*;
use proptest::prelude::*;

/// A page as it is stored.
#[derive(Clone)]
struct Stored {
    name: PageName,
    seal: Seal,
    checksum: u64,
    bytes: Vec<u8>,
}

fn name(stored: usize) -> PageName {
    let blocks = u32::try_from(stored / BLOCK_BYTES).unwrap();
    PageName {
        namespace: Fingerprint::from_bytes([3; 16]),
        key: PageKey::from_bytes([4; 32]),
        blocks: blocks + 1,
        stored: blocks,
    }
}

fn key(ring: &Keyring) -> TenantKey {
    ring.current(NO_TENANT).unwrap().unwrap().clone()
}

fn put(key: &TenantKey, parts: &[&[u8]]) -> Stored {
    let padded = parts
        .iter()
        .map(|part| part.len().next_multiple_of(BLOCK_BYTES));
    let mut bytes = vec![0xee; padded.sum()];
    let name = name(bytes.len());
    let mut checksum = PageChecksum::new(name.namespace, &name.key);
    let mut random = random;
    let mut salts = Salts::of(&mut random, 1);
    let each = |stored: &[u8]| checksum.blocks(stored);
    let seal = key
        .seal_parts(&mut salts, &name, parts, &mut bytes, each)
        .unwrap();
    Stored {
        name,
        seal,
        checksum: checksum.finish(),
        bytes,
    }
}

fn checksum(stored: &Stored) -> u64 {
    let mut checksum = PageChecksum::new(stored.name.namespace, &stored.name.key);
    checksum.blocks(&stored.bytes);
    checksum.finish()
}

/// What a get makes of a stored page.
#[derive(Debug, PartialEq)]
enum Found {
    Page(Vec<u8>),
    /// The checksum of the stored bytes is wrong.
    Damaged,
    /// The stored bytes are those of the record, and do not open.
    Sealed,
}

fn get(key: &TenantKey, stored: &Stored) -> Found {
    let mut bytes = stored.bytes.clone();
    match key.open(&stored.name, &stored.seal, &mut [&mut bytes]) {
        Ok(()) => return Found::Page(bytes),
        Err(OpenError::Tag) => assert!(bytes.iter().all(|byte| *byte == 0)),
        Err(OpenError::Vault(error)) => panic!("{error}"),
    }
    match checksum(stored) == stored.checksum {
        true => Found::Sealed,
        false => Found::Damaged,
    }
}

fn text(bytes: usize, seed: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 + seed) as u8).collect()
}

/// Sizes of the parts of pages.
const PAGES: [&[usize]; 6] = [
    &[4096],
    &[1],
    &[4096, 4096],
    &[131_072],
    &[16_384; 8],
    &[2_000_000, 70_001, 12],
];

fn pages() -> impl Iterator<Item = Vec<Vec<u8>>> {
    let parts = |(seed, bytes): (usize, &usize)| text(*bytes, seed);
    PAGES
        .iter()
        .map(move |sizes| sizes.iter().enumerate().map(parts).collect())
}

fn slices(parts: &[Vec<u8>]) -> Vec<&[u8]> {
    parts.iter().map(Vec::as_slice).collect()
}

fn padded(parts: &[Vec<u8>]) -> Vec<u8> {
    let mut whole = Vec::new();
    for part in parts {
        whole.extend_from_slice(part);
        whole.resize(whole.len().next_multiple_of(BLOCK_BYTES), 0);
    }
    whole
}

#[test]
fn a_page_comes_back_and_its_stored_bytes_show_nothing_of_it() {
    let key = key(&keyring(&Vault::new()));
    for parts in pages() {
        let stored = put(&key, &slices(&parts));
        let plain = padded(&parts);
        assert_eq!(get(&key, &stored), Found::Page(plain.clone()));
        assert_eq!(checksum(&stored), stored.checksum);
        let pieces = stored.bytes.chunks(16).zip(plain.chunks(16));
        assert!(pieces.clone().all(|(stored, plain)| stored != plain));
        let distinct: HashSet<&[u8]> = stored.bytes.chunks(16).collect();
        assert_eq!(distinct.len(), pieces.len());
        let again = put(&key, &slices(&parts));
        assert!(again.seal.salt != stored.seal.salt && again.bytes != stored.bytes);
    }
}

#[test]
fn each_changed_bit_of_the_stored_bytes_is_damage() {
    let key = key(&keyring(&Vault::new()));
    for parts in pages() {
        let stored = put(&key, &slices(&parts));
        let last = stored.bytes.len() - 1;
        for at in [0, 15, 16, 4095, stored.bytes.len() / 2, last] {
            for bit in [0, 7] {
                let mut bad = stored.clone();
                bad.bytes[at] ^= 1 << bit;
                assert_eq!(get(&key, &bad), Found::Damaged);
            }
        }
    }
}

#[test]
fn a_changed_name_or_seal_is_no_hit_and_no_damage() {
    let vault = Vault::new();
    let mut ring = keyring(&vault);
    let key = key(&ring);
    for parts in pages() {
        let stored = put(&key, &slices(&parts));
        let mut changes: Vec<Stored> = Vec::new();
        let mut change = |apply: &dyn Fn(&mut Stored)| {
            let mut bad = stored.clone();
            apply(&mut bad);
            bad.checksum = checksum(&bad);
            changes.push(bad);
        };
        for bit in 0..96 {
            change(&|bad| bad.seal.salt[bit / 8] ^= 1 << (bit % 8));
        }
        for bit in 0..128 {
            change(&|bad| bad.seal.tag[bit / 8] ^= 1 << (bit % 8));
        }
        change(&|bad| bad.seal.slot = NonZeroU16::MAX);
        change(&|bad| bad.name.blocks += 1);
        change(&|bad| bad.name.stored += 1);
        change(&|bad| bad.name.key = PageKey::from_bytes([5; 32]));
        change(&|bad| bad.name.namespace = Fingerprint::from_bytes([9; 16]));
        // A forger who knows the checksum.
        change(&|bad| bad.bytes[5] ^= 1);
        change(&|bad| bad.bytes.rotate_left(16));
        let other = put(&key, &slices(&parts));
        change(&|bad| bad.bytes.clone_from(&other.bytes));
        change(&|bad| bad.seal = other.seal);
        for bad in changes {
            assert_eq!(get(&key, &bad), Found::Sealed);
        }
    }
    let slot = ring
        .add_tenant("other", larder_format::Serial::ZERO, &mut random, 0)
        .unwrap();
    let stored = put(&key, &[&text(5000, 1)]);
    assert_eq!(get(ring.key(slot).unwrap(), &stored), Found::Sealed);
}

proptest! {
    /// In place as into other memory, from any parts, into any parts.
    #[test]
    fn parts_of_any_length_come_back(
        sizes in prop::collection::vec(1..70_000_usize, 1..9),
        shift in 0..64_usize,
    ) {
        let key = key(&keyring(&Vault::new()));
        let parts: Vec<Vec<u8>> = sizes.iter().map(|bytes| text(*bytes + shift, shift)).collect();
        let shifted: Vec<&[u8]> = parts.iter().map(|part| &part[shift..]).collect();
        let stored = put(&key, &shifted);
        let mut rest = stored.bytes.clone();
        let mut pieces: Vec<Vec<u8>> = Vec::new();
        for size in &sizes {
            let later = rest.split_off(size.next_multiple_of(BLOCK_BYTES));
            pieces.push([&vec![0; shift][..], &rest].concat());
            rest = later;
        }
        let mut buffers: Vec<&mut [u8]> = pieces.iter_mut().map(|it| &mut it[shift..]).collect();
        key.open(&stored.name, &stored.seal, &mut buffers).unwrap();
        for (buffer, part) in buffers.iter().zip(&shifted) {
            prop_assert_eq!(&buffer[..part.len()], *part);
            prop_assert!(buffer[part.len()..].iter().all(|byte| *byte == 0));
        }
        let mut whole = padded(&shifted.iter().map(|part| part.to_vec()).collect::<Vec<_>>());
        let plain = whole.clone();
        let mut random = random;
        let seal = key.seal(&mut Salts::of(&mut random, 1), &stored.name, &mut whole, |_| ());
        prop_assert!(whole != plain);
        key.open(&stored.name, &seal.unwrap(), &mut [&mut whole]).unwrap();
        prop_assert_eq!(whole, plain);
    }
}

#[test]
fn parts_that_are_not_as_long_as_the_stored_bytes_are_refused() {
    let key = key(&keyring(&Vault::new()));
    let parts = [&text(5000, 1)[..], &text(1, 1)];
    for blocks in [0, 1, 2, 4] {
        let mut bytes = vec![7; blocks * BLOCK_BYTES];
        let mut random = random;
        let mut salts = Salts::of(&mut random, 1);
        let sealed = key.seal_parts(&mut salts, &name(bytes.len()), &parts, &mut bytes, |_| ());
        assert!(matches!(sealed, Err(SealError::Length)));
        assert!(bytes.iter().all(|byte| *byte == 0));
    }
}

#[test]
fn without_random_bytes_nothing_is_encrypted() {
    let key = key(&keyring(&Vault::new()));
    let mut none = |_: &mut [u8]| Err(std::io::Error::other("none"));
    let mut bytes = vec![7; BLOCK_BYTES];
    let mut salts = Salts::of(&mut none, 1);
    let sealed = key.seal(&mut salts, &name(BLOCK_BYTES), &mut bytes, |_| ());
    assert!(matches!(sealed, Err(SealError::Random(_))));
    assert!(bytes.iter().all(|byte| *byte == 0));
}

/// Two copies of one store put the same pages. Nothing that they have in common is an input of a
/// salt.
#[test]
fn two_copies_of_a_store_never_repeat_a_salt() {
    let vault = Vault::new();
    let ring = keyring(&vault);
    let copies = [
        reopened(&ring, &vault, 1).unwrap(),
        reopened(&ring, &vault, 1).unwrap(),
    ];
    let mut drawn = HashSet::new();
    for copy in &copies {
        let mut random = random;
        let mut salts = Salts::of(&mut random, 10_000);
        for _ in 0..10_000 {
            let mut bytes = [0; 16];
            let key = copy.current(NO_TENANT).unwrap().unwrap();
            let seal = key
                .seal(&mut salts, &name(4096), &mut bytes, |_| ())
                .unwrap();
            assert!(drawn.insert(seal.salt));
        }
    }
}

/// Another implementation of HMAC-SHA256 and AES-256-GCM has made these bytes, as the documentation
/// of the module says.
#[test]
fn a_page_is_encrypted_as_it_is_documented() {
    let slot = NonZeroU16::new(7).unwrap();
    let key = TenantKey::taken(&Vault::new(), slot, |key| {
        *key = std::array::from_fn(|at| u8::try_from(at).unwrap());
        Ok::<(), VaultError>(())
    });
    let name = PageName {
        namespace: Fingerprint::from_bytes([0x11; 16]),
        key: PageKey::from_bytes([0x22; 32]),
        blocks: 3,
        stored: 1,
    };
    let mut random = |bytes: &mut [u8]| {
        bytes.fill(0x33);
        Ok(())
    };
    let mut bytes: Vec<u8> = (0..BLOCK_BYTES)
        .map(|at| u8::try_from(at % 251).unwrap())
        .collect();
    let mut salts = Salts::of(&mut random, 1);
    let seal = key.unwrap().seal(&mut salts, &name, &mut bytes, |_| ());
    let seal = seal.unwrap();
    let hex = |bytes: &[u8]| -> String { bytes.iter().map(|byte| format!("{byte:02x}")).collect() };
    assert_eq!((seal.slot, seal.salt), (slot, [0x33; 12]));
    assert_eq!(hex(&bytes[..16]), "4f085d97aa9cfa3125a614139a4b201c");
    assert_eq!(hex(&seal.tag), "b04f1e8f592c29f80a9fb113feea81f3");
}

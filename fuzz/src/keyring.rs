//! Keyrings: rows of blocks as they are, and framed with valid checksums. No row opens, unless a
//! writer with the key wrote it.

use std::sync::LazyLock;

use larder_engine::format::{BLOCK_BYTES, KEYRING_BYTES, KeyringCopy, Serial, StoreId, Structure};
use larder_seal::{Keyring, Vault, WrappingKey};

use crate::structures::framed;

const STORE: StoreId = StoreId::from_bytes([9; 16]);
const UNIX_S: u64 = 1_800_000_000;

/// A small keyring, and its wrapping key.
static SAMPLE: LazyLock<(Keyring, WrappingKey, Vault)> = LazyLock::new(|| {
    let vault = Vault::new();
    let key = WrappingKey::new(&vault, &[7; 32]).expect("memory for keys");
    let mut last = 0_u8;
    let mut random = |bytes: &mut [u8]| {
        for byte in bytes {
            last = last.wrapping_mul(181).wrapping_add(101);
            *byte = last;
        }
        Ok(())
    };
    let ring = Keyring::create(STORE, &key, &vault, &mut random, UNIX_S);
    let mut ring = ring.expect("the key suits");
    for tenant in 0..40 {
        let added = ring.add_tenant(&tenant.to_string(), Serial::ZERO, &mut random, UNIX_S);
        added.expect("there is room");
    }
    let erased = ring.erase("3", Serial::from_raw(1 << 40), &mut random);
    erased.expect("the key suits");
    (ring, key, vault)
});

/// The first two bytes of each block's part of the input are its length, the others its own fields.
///
/// # Panics
/// If a row is accepted that the encoder does not write, or opens without its key.
pub fn keyring(data: &[u8]) {
    let mut raw = data.to_vec();
    raw.resize(KEYRING_BYTES, 0);
    check(&raw);
    let mut rows: Vec<u8> = data
        .chunks(BLOCK_BYTES)
        .take(KEYRING_BYTES / BLOCK_BYTES)
        .flat_map(|own| framed(Structure::Keyring, own))
        .collect();
    rows.resize(KEYRING_BYTES, 0);
    check(&rows);
}

fn check(bytes: &[u8]) {
    let Ok(copy) = KeyringCopy::decode(bytes, STORE) else {
        return;
    };
    let blocks = copy.authenticated().len();
    let again = copy.encode();
    assert!(
        again[..blocks] == bytes[..blocks],
        "a keyring has two encodings"
    );
    let (ring, key, vault) = &*SAMPLE;
    let is_written = copy == *ring.copy();
    let opened = Keyring::open(copy, key, vault);
    assert_eq!(opened.is_ok(), is_written, "a forged keyring opens");
}

/// The sample as it is, and as the fields of its blocks.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let (ring, ..) = &*SAMPLE;
    let row = ring.copy().authenticated().len();
    let whole = ring.copy().encode()[..row].to_vec();
    let fields = |block: &[u8]| {
        let mut own = [&block[12..14], &block[24..]].concat();
        own.resize(BLOCK_BYTES, 0);
        own
    };
    let framed = whole.chunks(BLOCK_BYTES).flat_map(fields).collect();
    vec![framed, whole]
}

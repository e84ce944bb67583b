//! XAES-256-GCM (C2SP): AES-256-GCM with a nonce of 24 bytes. Random nonces of this length do not
//! repeat.

use zeroize::Zeroizing;

use crate::cipher::{Blocks, CipherError, Direction, Gcm, KEY_BYTES, NONCE_BYTES, TAG_BYTES};

/// Bytes of a nonce.
pub(crate) const LONG_NONCE_BYTES: usize = 24;

/// Encrypts a text in place. Returns its tag.
pub(crate) fn seal(
    key: &[u8; KEY_BYTES],
    nonce: &[u8; LONG_NONCE_BYTES],
    associated: &[u8],
    text: &mut [u8],
) -> Result<[u8; TAG_BYTES], CipherError> {
    let mut gcm = begin(Direction::Seal, key, nonce, associated)?;
    gcm.in_place(text, |_| ())?;
    gcm.tag()
}

/// Decrypts a text in place. Returns whether its tag is right, and zeroes it if not.
pub(crate) fn open(
    key: &[u8; KEY_BYTES],
    nonce: &[u8; LONG_NONCE_BYTES],
    associated: &[u8],
    text: &mut [u8],
    tag: &[u8; TAG_BYTES],
) -> Result<bool, CipherError> {
    let opened = begin(Direction::Open, key, nonce, associated).and_then(|mut gcm| {
        gcm.in_place(text, |_| ())?;
        Ok(gcm.has_tag(tag))
    });
    if opened != Ok(true) {
        text.fill(0);
    }
    opened
}

/// Begins a message.
pub(crate) fn begin(
    direction: Direction,
    key: &[u8; KEY_BYTES],
    nonce: &[u8; LONG_NONCE_BYTES],
    associated: &[u8],
) -> Result<Gcm, CipherError> {
    let blocks = Blocks::new(key)?;
    let mask = Zeroizing::new(subkey(&blocks));
    let [a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, short @ ..] = *nonce;
    let half = |counter| {
        let mut message = [
            0, counter, b'X', 0, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11,
        ];
        for (byte, mask) in message.iter_mut().zip(mask.iter()) {
            *byte ^= mask;
        }
        blocks.encrypt(&message)
    };
    let mut derived = Zeroizing::new([0; KEY_BYTES]);
    let (first, second) = derived.split_at_mut(16);
    first.copy_from_slice(&half(1));
    second.copy_from_slice(&half(2));
    let short: [u8; NONCE_BYTES] = short;
    Gcm::begin(direction, &derived, &short, associated)
}

/// The first subkey of CMAC.
fn subkey(blocks: &Blocks) -> [u8; 16] {
    let whole = u128::from_be_bytes(blocks.encrypt(&[0; 16]));
    let reduction = if whole >> 127 == 1 { 0b1000_0111 } else { 0 };
    (whole << 1 ^ reduction).to_be_bytes()
}

#[cfg(test)]
#[path = "xaes/tests.rs"]
mod tests;

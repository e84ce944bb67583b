//! Samples of keyrings.
#![allow(dead_code, clippy::unwrap_used)]

use larder_format::*;

use super::{Block, STORE};

/// A keyring with two wraps and that many slots, of all states.
pub fn keyring(slots: u16) -> KeyringCopy {
    let key = |byte| WrappedKey {
        nonce: [byte; 24],
        bytes: [byte ^ 0x5a; WRAPPED_KEY_BYTES],
    };
    let wrap = |byte| KeyWrap {
        id: WrapId::from_bytes([byte; 16]),
        key: key(byte),
    };
    let slot = |number: u16| KeyringSlot {
        tenant: TenantId::from_bytes(u128::from(number).to_le_bytes()),
        created_unix_s: 1_800_000_000 + u64::from(number),
        state: match number % 3 {
            0 => SlotState::Current(key(3)),
            1 => SlotState::Earlier(key(4)),
            _ => SlotState::Erased(Serial::from_raw(1 << 40 | u64::from(number))),
        },
    };
    KeyringCopy {
        store: STORE,
        generation: 7,
        nonce: [1; 24],
        tag: [2; 16],
        wraps: vec![wrap(9), wrap(10)],
        slots: (0..slots).map(slot).collect(),
    }
}

/// The first block of a copy, whose row has no other.
pub fn encode_keyring(keyring: &KeyringCopy) -> Block {
    keyring.encode()[..BLOCK_BYTES].try_into().unwrap()
}

pub fn decode_keyring(block: &[u8]) -> Result<KeyringCopy, Damage> {
    let mut copy = block.to_vec();
    if block.len() == BLOCK_BYTES {
        copy.resize(KEYRING_BYTES, 0);
    }
    KeyringCopy::decode(&copy, STORE)
}

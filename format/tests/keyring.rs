//! Keyrings: copies of several blocks, and the valid ones.
#![allow(clippy::unwrap_used)]

mod common;

use common::keyring::*;
use common::*;
use larder_format::*;
use proptest::prelude::*;

const SLOTS_MAX: u16 = 2_900;

proptest! {
    #[test]
    fn a_keyring_survives_the_disk(slots in 0..=SLOTS_MAX) {
        let keyring = keyring(slots);
        let copy = keyring.encode();
        prop_assert_eq!(copy.len(), KEYRING_BYTES);
        prop_assert_eq!(KeyringCopy::decode(&copy, STORE), Ok(keyring));
        let other = StoreId::from_bytes([1; 16]);
        let elsewhere = Elsewhere::Store { claimed: STORE, expected: other };
        prop_assert_eq!(KeyringCopy::decode(&copy, other), Err(Damage::Elsewhere(elsewhere)));
    }

    #[test]
    fn changed_bytes_of_a_keyring_are_refused_or_change_nothing(
        slots in 0..200_u16,
        changes in prop::collection::vec((0..KEYRING_BYTES, 1..=u8::MAX), 1..4),
    ) {
        let keyring = keyring(slots);
        let mut copy = keyring.encode();
        for (at, change) in changes {
            copy[at] ^= change;
        }
        if let Ok(found) = KeyringCopy::decode(&copy, STORE) {
            prop_assert_eq!(found, keyring);
        }
    }

    #[test]
    fn a_keyring_torn_at_any_block_is_the_old_one_or_the_new_one_or_refused(
        slots in [0..200_u16, 0..200_u16],
        written in prop::collection::vec(any::<bool>(), KEYRING_BYTES / BLOCK_BYTES),
    ) {
        let [old, new] = slots.map(keyring);
        let old = KeyringCopy { generation: 1, ..old };
        let new = KeyringCopy { generation: 2, ..new };
        let mut copy = old.encode();
        let after = new.encode();
        for (block, is_written) in written.into_iter().enumerate() {
            if is_written {
                let bytes = block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES;
                copy[bytes.clone()].copy_from_slice(&after[bytes]);
            }
        }
        if let Ok(found) = KeyringCopy::decode(&copy, STORE) {
            prop_assert!(found == old || found == new);
        }
    }

    /// A block with a right CRC and any fields is refused, or it has one encoding.
    #[test]
    fn any_fields_are_refused_or_come_back(
        slots in 1..40_u16,
        block in 0..3_usize,
        changes in prop::collection::vec((24..1024_usize, any::<u8>()), 1..4),
    ) {
        let mut copy = keyring(slots).encode();
        let block = &mut copy[block * BLOCK_BYTES..][..BLOCK_BYTES];
        if block.iter().any(|byte| *byte != 0) {
            changes.into_iter().for_each(|(at, byte)| block[at] = byte);
            reseal(block);
        }
        if let Ok(found) = KeyringCopy::decode(&copy, STORE) {
            let again = found.encode();
            let used = again.iter().rposition(|byte| *byte != 0).unwrap_or(0);
            prop_assert_eq!(&again[..used], &copy[..used]);
        }
    }
}

/// Gives a block the CRC of its content.
fn reseal(block: &mut [u8]) {
    block[16..20].fill(0);
    let crc = crc32fast::hash(block);
    block[16..20].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn the_tag_covers_all_but_itself() {
    let whole = keyring(40);
    let retagged = KeyringCopy {
        nonce: [7; 24],
        tag: [8; 16],
        ..whole.clone()
    };
    assert_eq!(whole.authenticated(), retagged.authenticated());
    let mut longer = whole.clone();
    longer.generation += 1;
    assert_ne!(whole.authenticated(), longer.authenticated());
    let mut erased = whole.clone();
    erased.slots[39].state = SlotState::Erased(Serial::ZERO);
    assert_ne!(whole.authenticated(), erased.authenticated());
}

#[test]
fn zeros_are_blank_and_zeros_before_other_bytes_are_not() {
    let mut copy = vec![0; KEYRING_BYTES];
    let blank = Damage::Blank(Structure::Keyring);
    assert_eq!(refused(KeyringCopy::decode(&copy, STORE)), blank);
    copy[KEYRING_BYTES - 1] = 1;
    let magic = Damage::Magic(Structure::Keyring);
    assert_eq!(refused(KeyringCopy::decode(&copy, STORE)), magic);
}

#[test]
fn the_places_of_the_keyrings_overlap_no_other() {
    let bytes = KEYRING_BYTES as u64;
    let [a, b, c] = keyring_offsets(64 << 20);
    let [quotas, _, quotas_end] = quotas_offsets(64 << 20);
    assert_eq!(a, RESERVED_OFFSET);
    assert!(a + bytes <= b && b + bytes <= quotas);
    assert!(c > tail_offset(64 << 20) && c + bytes <= quotas_end);
}

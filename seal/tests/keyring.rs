//! Keyrings: which key opens one, what a change makes of it, and changed copies.
#![allow(clippy::unwrap_used)]

mod common;

use std::num::NonZeroU16;

use common::*;
use larder_format::{
    BLOCK_BYTES, Fingerprint, KEY_SLOTS_MAX, KEYRING_BYTES, KeyringCopy, PageKey, Seal, Serial,
    SlotState, WRAPS_MAX,
};
use larder_seal::*;
use proptest::prelude::*;

const FIRST: NonZeroU16 = NonZeroU16::MIN;

const PAGE: PageName = PageName {
    namespace: Fingerprint::from_bytes([3; 16]),
    key: PageKey::from_bytes([4; 32]),
    blocks: 1,
    stored: 1,
};

/// The slot for new pages of a tenant.
fn current(ring: &Keyring, tenant: &str) -> Option<NonZeroU16> {
    ring.current(tenant).unwrap().map(TenantKey::slot)
}

fn put(ring: &Keyring, slot: NonZeroU16) -> (Seal, Vec<u8>) {
    let mut random = random;
    let mut bytes = vec![7; BLOCK_BYTES];
    let key = ring.key(slot).unwrap();
    let seal = key.seal(&mut Salts::of(&mut random, 1), &PAGE, &mut bytes, |_| ());
    (seal.unwrap(), bytes)
}

fn opens(ring: &Keyring, slot: NonZeroU16, (seal, bytes): &(Seal, Vec<u8>)) -> bool {
    let mut bytes = bytes.clone();
    let key = ring.key(slot);
    key.is_some_and(|key| key.open(&PAGE, seal, &mut [&mut bytes]).is_ok())
}

fn add(ring: &mut Keyring, tenant: &str) -> NonZeroU16 {
    ring.add_tenant(tenant, Serial::ZERO, &mut random, 5)
        .unwrap()
}

#[test]
fn a_keyring_opens_with_its_wrapping_key_alone() {
    let vault = Vault::new();
    let mut ring = keyring(&vault);
    let slot = add(&mut ring, "tenant a");
    let page = put(&ring, slot);
    let again = reopened(&ring, &vault, 1).unwrap();
    assert_eq!(current(&again, "tenant a"), Some(slot));
    assert_eq!(current(&again, NO_TENANT), Some(FIRST));
    assert_eq!(current(&again, "tenant b"), None);
    assert!(opens(&again, slot, &page) && !opens(&again, FIRST, &page));
    let error = reopened(&ring, &vault, 2).unwrap_err();
    assert!(matches!(error, KeyringError::WrongKey { .. }), "{error}");
    assert!(
        error
            .to_string()
            .contains(&wrapping(&vault, 1).id().to_string())
    );
}

#[test]
fn keys_and_names_are_not_in_the_bytes_of_a_keyring() {
    let vault = Vault::new();
    let mut ring = keyring(&vault);
    add(&mut ring, "a tenant with a name");
    let bytes = ring.copy().encode();
    let has = |text: &[u8]| bytes.windows(text.len()).any(|window| window == text);
    assert!(has(b"LARDERKR") && has(STORE.as_bytes()));
    assert!(!has(b"a tenant") && !has(&[1; 16]));
}

#[test]
fn the_wrapping_key_is_changed_without_a_change_of_any_other() {
    let vault = Vault::new();
    let mut ring = keyring(&vault);
    let page = put(&ring, FIRST);
    let slots = ring.copy().slots.clone();
    ring.add_wrap(&wrapping(&vault, 2), &mut random).unwrap();
    for key in [1, 2] {
        assert!(opens(&reopened(&ring, &vault, key).unwrap(), FIRST, &page));
    }
    let former = wrapping(&vault, 1).id();
    ring.remove_wrap(former, &mut random).unwrap();
    assert!(reopened(&ring, &vault, 1).is_err());
    let again = reopened(&ring, &vault, 2).unwrap();
    assert!(opens(&again, FIRST, &page) && again.copy().slots == slots);
    let absent = ring.remove_wrap(former, &mut random);
    assert!(matches!(absent, Err(KeyringError::NoWrap(_))));
    let last = ring.remove_wrap(wrapping(&vault, 2).id(), &mut random);
    assert!(matches!(last, Err(KeyringError::LastWrap)));
    for key in 3..=9 {
        ring.add_wrap(&wrapping(&vault, key), &mut random).unwrap();
    }
    assert_eq!(ring.copy().wraps.len(), WRAPS_MAX);
    let more = ring.add_wrap(&wrapping(&vault, 10), &mut random);
    assert!(matches!(more, Err(KeyringError::TooManyWraps)));
    // The same key again takes the place of its wrap.
    ring.add_wrap(&wrapping(&vault, 9), &mut random).unwrap();
    assert_eq!(ring.copy().wraps.len(), WRAPS_MAX);
}

#[test]
fn an_erased_tenant_is_gone_and_the_others_are_not() {
    let vault = Vault::new();
    let mut ring = keyring(&vault);
    let (a, b) = (add(&mut ring, "a"), add(&mut ring, "b"));
    let renewed = add(&mut ring, "a");
    assert!(a != renewed && current(&ring, "a") == Some(renewed));
    let pages = [a, renewed, b].map(|slot| (slot, put(&ring, slot)));
    assert!(pages.iter().all(|(slot, page)| opens(&ring, *slot, page)));
    let serial = Serial::from_raw(3 << 40 | 7);
    assert_eq!(ring.erase("a", serial, &mut random).unwrap(), [a, renewed]);
    for ring in [&ring, &reopened(&ring, &vault, 1).unwrap()] {
        let open = pages.iter().filter(|(slot, page)| opens(ring, *slot, page));
        assert_eq!(open.map(|(slot, _)| *slot).collect::<Vec<_>>(), [b]);
        assert_eq!(current(ring, "a"), None);
    }
    let until = |ring: &Keyring, tenant| ring.erased_until(tenant).unwrap();
    assert_eq!(["a", "b", "c"].map(|of| until(&ring, of)), [u64::MAX, 0, 0]);
    let mut back = ring.clone();
    for made in [7, 9] {
        back.add_tenant("a", Serial::ZERO, &mut random, made)
            .unwrap();
        assert_eq!(until(&back, "a"), 7);
    }
    // Once more, and of a tenant that never was: nothing changes.
    let generation = ring.copy().generation;
    for tenant in ["a", "c"] {
        assert_eq!(ring.erase(tenant, serial, &mut random).unwrap(), []);
    }
    assert_eq!(ring.copy().generation, generation);
}

#[test]
fn the_slot_of_an_erased_tenant_waits_until_no_segment_may_name_it() {
    let vault = Vault::new();
    let mut ring = keyring(&vault);
    let slot = add(&mut ring, "a");
    let page = put(&ring, slot);
    let erased = Serial::from_raw(3 << 40 | 7);
    ring.erase("a", erased, &mut random).unwrap();
    let before = Serial::from_raw(erased.get() - 1);
    // The keyring remembers the erasure as long as it has room.
    let other = ring.add_tenant("b", erased, &mut random, 5).unwrap();
    assert_ne!(other, slot);
    for number in ring.copy().slots.len()..KEY_SLOTS_MAX {
        add(&mut ring, &number.to_string());
    }
    assert_eq!(ring.erased_until("a").unwrap(), u64::MAX);
    let full = ring.add_tenant("c", before, &mut random, 5);
    assert!(matches!(full, Err(KeyringError::Full)));
    let same = ring.add_tenant("c", erased, &mut random, 5).unwrap();
    assert_eq!((same, ring.erased_until("a").unwrap()), (slot, 0));
    assert!(!opens(&ring, same, &page));
    assert!(opens(
        &reopened(&ring, &vault, 1).unwrap(),
        same,
        &put(&ring, same)
    ));
}

#[test]
fn a_former_key_is_erased_and_its_tenant_is_not() {
    let vault = Vault::new();
    let mut ring = keyring(&vault);
    let (slot, other) = (add(&mut ring, "a"), add(&mut ring, "b"));
    let (page, of_other) = (put(&ring, slot), put(&ring, other));
    ring.renew(Some("a"), &mut random, 7).unwrap();
    ring.renew(Some("a"), &mut random, 8).unwrap();
    let new = current(&ring, "a").unwrap();
    let renewed = |slot| ring.renewed(slot).map(TenantKey::slot);
    assert_eq!((renewed(slot), renewed(other)), (Some(new), None));
    assert!(new != slot && opens(&ring, slot, &page));
    let erased = ring.erase_earlier(None, Serial::ZERO, &mut random);
    assert_eq!(erased.unwrap(), [slot]);
    assert!(ring.is_erased(slot) && opens(&ring, other, &of_other));
    assert_eq!(ring.erased_until("a").unwrap(), 0);
    let again = reopened(&ring, &vault, 1).unwrap();
    assert!(current(&again, "a") == Some(new) && again.renewed(slot).is_none());
    // No memory of an erasure is lost with it.
    assert_eq!(add(&mut ring, "c"), slot);
    let none = ring.renew(Some("none"), &mut random, 7);
    assert!(matches!(none, Err(KeyringError::NoTenant)));
}

#[test]
fn the_most_tenants_fit_and_one_more_is_refused_by_name() {
    let vault = Vault::new();
    let mut ring = keyring(&vault);
    for number in 1..KEY_SLOTS_MAX {
        add(&mut ring, &number.to_string());
    }
    let again = reopened(&ring, &vault, 1).unwrap();
    assert_eq!(current(&again, "2899"), NonZeroU16::new(2_900));
    let generation = ring.copy().generation;
    let full = ring.add_tenant("one more", Serial::ZERO, &mut random, 5);
    assert!(matches!(full, Err(KeyringError::Full)));
    assert_eq!(ring.copy().generation, generation);
    assert_eq!(current(&ring, "one more"), None);
}

#[test]
fn a_keyring_that_another_writer_changed_does_not_open() {
    let vault = Vault::new();
    let mut ring = keyring(&vault);
    add(&mut ring, "a");
    add(&mut ring, "b");
    let changed = |change: &dyn Fn(&mut KeyringCopy)| {
        let mut copy = ring.copy().clone();
        change(&mut copy);
        let copy = KeyringCopy::decode(&copy.encode(), STORE).unwrap();
        Keyring::open(copy, &wrapping(&vault, 1), &vault).is_ok()
    };
    assert!(changed(&|_| ()));
    assert!(!changed(&|copy| copy.generation += 1));
    assert!(!changed(&|copy| copy.nonce[0] ^= 1));
    assert!(!changed(&|copy| copy.tag[15] ^= 1));
    assert!(!changed(&|copy| copy.slots.swap(0, 1)));
    assert!(!changed(&|copy| copy.slots.truncate(2)));
    assert!(!changed(&|copy| copy.slots[1].created_unix_s += 1));
    assert!(!changed(
        &|copy| copy.slots[1].state = SlotState::Erased(Serial::ZERO)
    ));
    assert!(!changed(&|copy| copy.wraps[0].key.bytes[0] ^= 1));
    let wrap = ring.copy().wraps[0];
    assert!(!changed(&|copy| copy.wraps.push(wrap)));
}

proptest! {
    /// Fields that a keyring has no way to check without its key.
    #[test]
    fn changed_bytes_of_a_copy_never_open(
        changes in prop::collection::vec((24..1024_usize, 1..=u8::MAX), 1..3),
        block in 0..2_usize,
    ) {
        let vault = Vault::new();
        let mut ring = keyring(&vault);
        add(&mut ring, "a");
        let whole = ring.copy().encode();
        let mut copy = whole.clone();
        let block = &mut copy[block * BLOCK_BYTES..][..BLOCK_BYTES];
        changes.into_iter().for_each(|(at, change)| block[at] ^= change);
        block[16..20].fill(0);
        let crc = crc32fast::hash(block);
        block[16..20].copy_from_slice(&crc.to_le_bytes());
        prop_assert_eq!(copy.len(), KEYRING_BYTES);
        if copy != whole && let Ok(copy) = KeyringCopy::decode(&copy, STORE) {
            let opened = Keyring::open(copy, &wrapping(&vault, 1), &vault);
            prop_assert!(opened.is_err());
        }
    }
}

#[test]
fn metadata_opens_at_its_own_place_alone() {
    let vault = Vault::new();
    let ring = keyring(&vault);
    let mut text = *b"a model and a tenant";
    let seal = ring
        .master()
        .seal(&mut random, b"segment 1", &mut text)
        .unwrap();
    assert_ne!(&text, b"a model and a tenant");
    let mut elsewhere = text;
    assert!(
        ring.master()
            .open(&seal, b"segment 2", &mut elsewhere)
            .is_err()
    );
    assert_eq!(elsewhere, [0; 20]);
    let again = reopened(&ring, &vault, 1).unwrap();
    again.master().open(&seal, b"segment 1", &mut text).unwrap();
    assert_eq!(&text, b"a model and a tenant");
    let other = keyring(&vault);
    let seal = ring.master().seal(&mut random, b"", &mut text).unwrap();
    assert!(other.master().open(&seal, b"", &mut text).is_err());
}

/// A wrap of another store with the same wrapping key does not open here.
#[test]
fn a_wrap_belongs_to_its_store() {
    let vault = Vault::new();
    let mut copy = keyring(&vault).copy().clone();
    copy.store = larder_format::StoreId::from_bytes([8; 16]);
    let opened = Keyring::open(copy, &wrapping(&vault, 1), &vault);
    assert!(matches!(opened, Err(KeyringError::Forged)));
}

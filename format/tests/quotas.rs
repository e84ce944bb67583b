//! Quotas: what is valid, and copies of several blocks.
#![allow(clippy::unwrap_used)]

mod common;

use common::quotas::*;
use common::*;
use larder_format::*;
use proptest::prelude::*;

/// Quotas of that many models, each named by its number.
fn models(generation: u64, count: usize) -> Quotas {
    let mut quotas = Quotas {
        generation,
        list: Vec::new(),
    };
    for number in 0..count {
        quotas.set(Quota {
            group: QuotaGroup::Model(format!("{number:03}")),
            min: 1,
            max: None,
            max_age_s: None,
        });
    }
    quotas
}

proptest! {
    #[test]
    fn quotas_survive_the_disk(quotas in any_quotas()) {
        let copy = quotas.encode(STORE).unwrap();
        prop_assert_eq!(copy.len(), QUOTAS_BYTES);
        prop_assert_eq!(Quotas::decode(&copy, STORE), Ok(quotas));
        let other = StoreId::from_bytes([1; 16]);
        let elsewhere = Elsewhere::Store { claimed: STORE, expected: other };
        prop_assert_eq!(Quotas::decode(&copy, other), Err(Damage::Elsewhere(elsewhere)));
    }

    #[test]
    fn any_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), QUOTAS_BYTES)) {
        prop_assert!(Quotas::decode(&bytes, STORE).is_err());
    }

    #[test]
    fn changed_bytes_of_a_copy_are_refused_or_change_nothing(
        quotas in any_quotas(),
        changes in prop::collection::vec((0..QUOTAS_BYTES, 1..=u8::MAX), 1..4),
    ) {
        let mut copy = quotas.encode(STORE).unwrap();
        for (at, change) in changes {
            copy[at] ^= change;
        }
        if let Ok(found) = Quotas::decode(&copy, STORE) {
            prop_assert_eq!(found, quotas);
        }
    }

    #[test]
    fn a_copy_torn_at_any_block_is_the_old_one_or_the_new_one_or_refused(
        old in any_quotas(),
        new in any_quotas(),
        written in prop::collection::vec(any::<bool>(), QUOTAS_BYTES / BLOCK_BYTES),
    ) {
        let old = Quotas { generation: 1, ..old };
        let new = Quotas { generation: 2, ..new };
        let mut copy = old.encode(STORE).unwrap();
        let after = new.encode(STORE).unwrap();
        for (block, is_written) in written.into_iter().enumerate() {
            if is_written {
                let bytes = block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES;
                copy[bytes.clone()].copy_from_slice(&after[bytes]);
            }
        }
        if let Ok(found) = Quotas::decode(&copy, STORE) {
            prop_assert!(found == old || found == new);
        }
    }
}

#[test]
fn zeros_are_blank_and_zeros_before_other_bytes_are_not() {
    let mut copy = vec![0; QUOTAS_BYTES];
    assert_eq!(
        refused(Quotas::decode(&copy, STORE)),
        Damage::Blank(Structure::Quotas)
    );
    copy[QUOTAS_BYTES - 1] = 1;
    assert_eq!(
        refused(Quotas::decode(&copy, STORE)),
        Damage::Magic(Structure::Quotas)
    );
}

#[test]
fn the_most_quotas_fit_and_one_more_is_refused() {
    let most = models(3, QUOTAS_MAX);
    let copy = most.encode(STORE).unwrap();
    assert_eq!(Quotas::decode(&copy, STORE), Ok(most));
    let more = models(3, QUOTAS_MAX + 1);
    assert_eq!(
        refused(more.encode(STORE)),
        QuotaError::TooMany(QUOTAS_MAX + 1)
    );
}

#[test]
fn a_short_row_over_a_long_one_is_read_and_its_remains_are_not() {
    let long = models(1, QUOTAS_MAX).encode(STORE).unwrap();
    let short = models(2, 3);
    let mut copy = short.encode(STORE).unwrap();
    copy[BLOCK_BYTES..].copy_from_slice(&long[BLOCK_BYTES..]);
    assert_eq!(Quotas::decode(&copy, STORE), Ok(short));
}

#[test]
fn quotas_that_mean_nothing_are_refused() {
    let valid = Quota {
        group: QuotaGroup::Model("m".to_owned()),
        min: 8,
        max: Some(8),
        max_age_s: None,
    };
    let refusal = |quota: Quota| {
        let list = vec![quota];
        let generation = 1;
        refused(Quotas { generation, list }.validate())
    };
    let of = |group| Quota {
        group,
        ..valid.clone()
    };
    for name in ["", "a\nb", &"n".repeat(QUOTA_NAME_BYTES_MAX + 1)] {
        assert_eq!(
            refusal(of(QuotaGroup::Model(name.to_owned()))),
            QuotaError::Name
        );
        assert_eq!(
            refusal(of(QuotaGroup::Tenant(name.to_owned()))),
            QuotaError::Name
        );
    }
    for (min, max) in [(9, 8), (0, 0)] {
        let max = Some(max);
        let quota = Quota {
            min,
            max,
            ..valid.clone()
        };
        assert!(matches!(refusal(quota), QuotaError::Range { .. }));
    }
    for (min, max_age_s) in [(0, None), (1, Some(0))] {
        let max = None;
        let quota = Quota {
            min,
            max,
            max_age_s,
            ..valid.clone()
        };
        assert!(matches!(refusal(quota), QuotaError::Empty));
    }
    let twice = Quotas {
        generation: 1,
        list: vec![valid.clone(), valid.clone()],
    };
    assert_eq!(refused(twice.validate()), QuotaError::Order);
    assert_eq!(
        models(1, 2)
            .get(&QuotaGroup::Model("001".to_owned()))
            .unwrap()
            .min,
        1
    );
}

#[test]
fn a_group_has_the_namespaces_that_it_names() {
    let plain = namespace();
    let mut fields = plain.fields().clone();
    fields.extra.insert(TENANT_FIELD.to_owned(), "a".to_owned());
    let rented = Namespace::new(fields).unwrap();
    let has = |group: &QuotaGroup, of: &Namespace| group.has(of.fingerprint(), Some(of.fields()));
    let own = QuotaGroup::Namespace(plain.fingerprint());
    assert_eq!((has(&own, &plain), has(&own, &rented)), (true, false));
    let model = QuotaGroup::Model(plain.fields().model.clone());
    assert_eq!((has(&model, &plain), has(&model, &rented)), (true, true));
    let tenant = QuotaGroup::Tenant("a".to_owned());
    assert_eq!((has(&tenant, &plain), has(&tenant, &rented)), (false, true));
    // Of a namespace whose record is lost only its fingerprint is known.
    assert!(own.has(plain.fingerprint(), None) && !model.has(plain.fingerprint(), None));
}

#[test]
fn the_places_of_the_quotas_overlap_no_other() {
    let [a, b, c] = quotas_offsets(64 << 20);
    let bytes = QUOTAS_BYTES as u64;
    assert!(a + bytes <= b && b + bytes <= CLOSING_OFFSET && a > RESERVED_OFFSET);
    let tail = tail_offset(64 << 20);
    assert!(c > tail && c + bytes <= tail + TAIL_BYTES);
}

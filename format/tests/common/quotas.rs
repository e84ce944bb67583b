//! Samples of quotas.
#![allow(dead_code, clippy::unwrap_used)]

use larder_format::*;
use proptest::prelude::*;

use super::{Block, STORE, namespace};

pub fn quotas() -> Quotas {
    let quota = |group, min, max, max_age_s| Quota {
        group,
        min,
        max,
        max_age_s,
    };
    let fingerprint = namespace().fingerprint();
    Quotas {
        generation: 7,
        list: vec![
            quota(QuotaGroup::Namespace(fingerprint), 1 << 30, None, None),
            quota(
                QuotaGroup::Model("Qwen/Qwen3-8B".to_owned()),
                0,
                Some(1 << 40),
                Some(3600),
            ),
            quota(QuotaGroup::Tenant("a".to_owned()), 4096, Some(4096), None),
        ],
    }
}

/// The first block of a copy, whose row has no other.
pub fn encode_quotas(quotas: &Quotas) -> Block {
    quotas.encode(STORE).unwrap()[..BLOCK_BYTES]
        .try_into()
        .unwrap()
}

pub fn decode_quotas(block: &[u8]) -> Result<Quotas, Damage> {
    let mut copy = block.to_vec();
    if block.len() == BLOCK_BYTES {
        copy.resize(QUOTAS_BYTES, 0);
    }
    Quotas::decode(&copy, STORE)
}

pub fn any_quotas() -> impl Strategy<Value = Quotas> {
    let name = "[a-z/ -]{1,40}";
    let group = prop_oneof![
        any::<[u8; 16]>().prop_map(|bytes| QuotaGroup::Namespace(Fingerprint::from_bytes(bytes))),
        name.prop_map(QuotaGroup::Model),
        name.prop_map(QuotaGroup::Tenant),
    ];
    let ages = prop::option::of(1..=u64::MAX);
    let quota = (group, any::<u64>(), prop::option::of(any::<u64>()), ages);
    let quota = quota.prop_map(|(group, min, more, max_age_s)| Quota {
        group,
        min: min.max(1),
        max: more.map(|more| min.max(1).saturating_add(more)),
        max_age_s,
    });
    let list = prop::collection::vec(quota, 0..QUOTAS_MAX);
    (any::<u64>(), list).prop_map(|(generation, list)| {
        let mut quotas = Quotas {
            generation,
            list: Vec::new(),
        };
        list.into_iter().for_each(|quota| quotas.set(quota));
        quotas
    })
}

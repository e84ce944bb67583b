//! Page keys are identical to those of SGLang.
#![allow(clippy::unwrap_used)]

use std::num::NonZeroUsize;

use larder_format::{HexError, PageKey, TokenUnits, namespace_seed, page_keys};
use proptest::prelude::*;
use serde_json::Value;

/// Made by SGLang's `get_storage_hash_str`, which names a partial last page too.
const VECTORS: &str = include_str!("sglang_vectors.json");

fn vectors() -> Vec<Value> {
    serde_json::from_str(VECTORS).unwrap()
}

fn keys_of(vector: &Value) -> Vec<String> {
    let tokens: Vec<u64> = vector["tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t.as_u64().unwrap())
        .collect();
    let page_tokens = usize::try_from(vector["page_size"].as_u64().unwrap()).unwrap();
    let units = if vector["is_bigram"].as_bool().unwrap() {
        TokenUnits::Bigram
    } else {
        TokenUnits::Single
    };
    let prior = vector["prior_hash"]
        .as_str()
        .map(|hex| hex.parse().unwrap());
    let seed = namespace_seed(vector["extra_key"].as_str(), vector["cache_salt"].as_str());
    let keys = page_keys(
        &tokens,
        NonZeroUsize::new(page_tokens).unwrap(),
        prior.or(seed),
        units,
    );
    keys.iter().map(PageKey::to_string).collect()
}

#[test]
fn keys_equal_those_of_sglang() {
    let vectors = vectors();
    assert_eq!(vectors.len(), 9);
    for vector in &vectors {
        let units = vector["tokens"].as_array().unwrap().len()
            - usize::from(vector["is_bigram"].as_bool().unwrap());
        let page_size = usize::try_from(vector["page_size"].as_u64().unwrap()).unwrap();
        let hashes = vector["hashes"].as_array().unwrap();
        assert_eq!(hashes.len(), units.div_ceil(page_size));
        let full: Vec<&str> = hashes[..units / page_size]
            .iter()
            .map(|h| h.as_str().unwrap())
            .collect();
        assert_eq!(keys_of(vector), full, "{}", vector["name"]);
    }
}

#[test]
fn the_vectors_cover_wide_tokens_bigrams_seeds_chaining_and_partial_pages() {
    let vectors = vectors();
    let some = |test: &dyn Fn(&Value) -> bool| vectors.iter().any(test);
    assert!(some(&|v| v["tokens"]
        .as_array()
        .unwrap()
        .iter()
        .any(|t| t.as_u64().unwrap() > u64::from(u32::MAX))));
    assert!(some(&|v| v["is_bigram"] == true));
    assert!(some(
        &|v| v["extra_key"].is_string() && v["cache_salt"].is_null()
    ));
    assert!(some(
        &|v| v["extra_key"].is_null() && v["cache_salt"].is_string()
    ));
    assert!(some(
        &|v| v["extra_key"].is_string() && v["cache_salt"].is_string()
    ));
    assert!(some(&|v| v["prior_hash"].is_string()));
    assert!(some(&|v| {
        let tokens = v["tokens"].as_array().unwrap().len() as u64;
        !tokens.is_multiple_of(v["page_size"].as_u64().unwrap())
    }));
}

#[test]
fn an_empty_salt_is_not_an_absent_one() {
    assert_eq!(namespace_seed(None, None), None);
    let seeds = [
        namespace_seed(Some(""), None),
        namespace_seed(None, Some("")),
        namespace_seed(Some(""), Some("")),
        namespace_seed(Some("ab"), Some("c")),
        namespace_seed(Some("a"), Some("bc")),
    ];
    for (index, seed) in seeds.iter().enumerate() {
        assert!(seed.is_some());
        assert!(!seeds[index + 1..].contains(seed));
    }
}

#[test]
fn too_few_tokens_make_no_page() {
    let page_tokens = NonZeroUsize::new(4).unwrap();
    assert!(page_keys(&[], page_tokens, None, TokenUnits::Single).is_empty());
    assert!(page_keys(&[], page_tokens, None, TokenUnits::Bigram).is_empty());
    assert!(page_keys(&[7], page_tokens, None, TokenUnits::Bigram).is_empty());
}

#[test]
fn a_key_has_one_spelling() {
    let text = "00".repeat(31) + "af";
    let key: PageKey = text.parse().unwrap();
    assert_eq!(key.to_string(), text);
    assert_eq!(key.as_bytes()[31], 0xaf);
    let parse = |text: &str| text.parse::<PageKey>();
    assert_eq!(parse(&text.to_uppercase()), Err(HexError::Digit { at: 62 }));
    assert_eq!(
        parse("ab"),
        Err(HexError::Length {
            expected: 64,
            found: 2
        })
    );
    assert_eq!(
        parse(&(text.clone() + "0")),
        Err(HexError::Length {
            expected: 64,
            found: 65
        })
    );
    assert_eq!(
        parse(&text.replacen("00", "0g", 1)),
        Err(HexError::Digit { at: 1 })
    );
}

#[test]
fn a_key_is_spelled_with_lowercase_digits_alone() {
    for character in (0..=0x7f_u8).map(char::from) {
        let text = format!("{}{character}0", "0".repeat(62));
        let key = text.parse::<PageKey>();
        match character {
            '0'..='9' | 'a'..='f' => {
                let value = character.to_digit(16).unwrap();
                assert_eq!(u32::from(key.unwrap().as_bytes()[31]), value << 4);
            }
            _ => assert_eq!(key, Err(HexError::Digit { at: 62 }), "{character:?}"),
        }
    }
}

#[test]
fn a_prefix_is_the_first_96_bits() {
    let bytes: [u8; 32] = std::array::from_fn(|index| u8::try_from(index).unwrap());
    assert_eq!(
        PageKey::from_bytes(bytes).prefix().as_bytes().as_slice(),
        &bytes[..12]
    );
}

proptest! {
    #[test]
    fn a_partial_page_has_no_key(
        tokens in prop::collection::vec(any::<u64>(), 0..64),
        page_tokens in 1..9_usize,
        bigram: bool,
    ) {
        let units = if bigram { TokenUnits::Bigram } else { TokenUnits::Single };
        let page = NonZeroUsize::new(page_tokens).unwrap();
        let full = tokens.len().saturating_sub(usize::from(bigram)) / page_tokens;
        let keys = page_keys(&tokens, page, None, units);
        prop_assert_eq!(keys.len(), full);
        let cut = full * page_tokens + usize::from(bigram && full > 0);
        prop_assert_eq!(page_keys(&tokens[..cut], page, None, units), keys);
    }

    #[test]
    fn keys_of_a_longer_prompt_begin_with_those_of_a_shorter(
        tokens in prop::collection::vec(prop_oneof![0..1000_u64, any::<u64>()], 0..64),
        page_tokens in 1..9_usize,
        pages in 0..8_usize,
        bigram: bool,
    ) {
        let units = if bigram { TokenUnits::Bigram } else { TokenUnits::Single };
        let lookahead = usize::from(bigram);
        let page = NonZeroUsize::new(page_tokens).unwrap();
        let all = page_keys(&tokens, page, None, units);
        let cut = pages * page_tokens;
        prop_assume!(cut + lookahead <= tokens.len());
        let head = page_keys(&tokens[..cut + lookahead], page, None, units);
        prop_assert_eq!(&all[..pages], head.as_slice());
        // A chain can be resumed at any page.
        let tail = page_keys(&tokens[cut..], page, head.last().copied(), units);
        prop_assert_eq!(&all[pages..], tail.as_slice());
    }

    #[test]
    fn every_token_of_a_page_counts(
        tokens in prop::collection::vec(0..1000_u64, 8),
        at in 0..8_usize,
        other in prop_oneof![0..1000_u64, any::<u64>()],
    ) {
        let mut changed = tokens.clone();
        changed[at] = other;
        let page = NonZeroUsize::new(4).unwrap();
        let keys = |tokens: &[u64]| page_keys(tokens, page, None, TokenUnits::Single);
        prop_assert_eq!(keys(&tokens)[at / 4] == keys(&changed)[at / 4], tokens[at] == other);
    }
}

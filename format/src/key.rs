//! Page keys: the SHA-256 chain over tokens, bit for bit as SGLang computes it.
//!
//! ```text
//!  key(i) = SHA-256( key(i-1), or the seed for the first page, or nothing  ||  words of page i )
//! ```
//!
//! Words are little-endian `u32`, one per token. If any word of the page exceeds 32 bits
//! (placeholders of multimodal input), the page is encoded as the byte `ff` followed by `u64`
//! words. With [`TokenUnits::Bigram`] (EAGLE drafts) unit `i` consists of the two words of tokens
//! `i` and `i + 1`, so `n` tokens make `n - 1` units.
//!
//! A key covers the tokens and the namespace of the request (`extra_key`, `cache_salt`) only. It
//! does not cover the model; [`Namespace`](crate::Namespace) does.

use std::num::NonZeroUsize;

use sha2::{Digest, Sha256};

use crate::ids::identity;

identity! {
    /// The name of a page: the SHA-256 of all tokens up to the end of the page. Shown as 64
    /// lowercase hex digits, as SGLang does.
    PageKey, 32
}

identity! {
    /// The first 96 bits of a [`PageKey`]. Descriptors store a parent in this form, and the index
    /// stores every key in it. A collision is harmless: the payload checksum covers the whole key,
    /// so the wrong page is a miss.
    KeyPrefix, 12
}

impl PageKey {
    /// The first 96 bits.
    #[must_use]
    pub const fn prefix(&self) -> KeyPrefix {
        let [a, b, c, d, e, f, g, h, i, j, k, l, ..] = self.0;
        KeyPrefix([a, b, c, d, e, f, g, h, i, j, k, l])
    }
}

impl KeyPrefix {
    /// This prefix followed by zeros, for interfaces that take a whole key but use only the prefix:
    /// the parent of a put.
    #[must_use]
    pub fn padded(&self) -> PageKey {
        let mut key = [0; 32];
        for (byte, of_prefix) in key.iter_mut().zip(self.0) {
            *byte = of_prefix;
        }
        PageKey(key)
    }
}

/// The content of one unit of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenUnits {
    /// A token.
    Single,
    /// A token and its successor: EAGLE-family draft models.
    Bigram,
}

/// The seed of a request's first key. `None` if the request has neither an extra key nor a salt;
/// otherwise a hash that separates its pages from those of other requests. An empty text is
/// different from an absent text.
#[must_use]
pub fn namespace_seed(extra_key: Option<&str>, cache_salt: Option<&str>) -> Option<PageKey> {
    if extra_key.is_none() && cache_salt.is_none() {
        return None;
    }
    let mut hasher = Sha256::new_with_prefix(b"sglang-cache-namespace-v1");
    for text in [extra_key, cache_salt] {
        match text {
            None => hasher.update([0]),
            Some(text) => {
                hasher.update([1]);
                hasher.update((text.len() as u64).to_le_bytes());
                hasher.update(text);
            }
        }
    }
    Some(PageKey(hasher.finalize().into()))
}

/// The keys of the pages that `tokens` fill, `page_tokens` units each. `prior` is the key of the
/// page before the first page, or the [`namespace_seed`]. Units behind the last full page have no
/// key: SGLang names a partial page too, and its callers store none.
#[must_use]
pub fn page_keys(
    tokens: &[u64],
    page_tokens: NonZeroUsize,
    prior: Option<PageKey>,
    units: TokenUnits,
) -> Vec<PageKey> {
    let unit_count = match units {
        TokenUnits::Single => tokens.len(),
        TokenUnits::Bigram => tokens.len().saturating_sub(1),
    };
    let firsts = tokens.get(..unit_count).unwrap_or_default();
    let seconds = tokens.get(1..).unwrap_or_default();
    let mut body = Vec::new();
    let mut key = prior;
    let mut keys = Vec::with_capacity(firsts.chunks_exact(page_tokens.get()).len());
    match units {
        TokenUnits::Single => {
            for page in firsts.chunks_exact(page_tokens.get()) {
                keys.push(*key.insert(next_key(key, page.iter().copied(), &mut body)));
            }
        }
        TokenUnits::Bigram => {
            let pages = firsts.chunks_exact(page_tokens.get());
            for (first, second) in pages.zip(seconds.chunks_exact(page_tokens.get())) {
                let words = first.iter().zip(second).flat_map(|(a, b)| [*a, *b]);
                keys.push(*key.insert(next_key(key, words, &mut body)));
            }
        }
    }
    keys
}

/// The key of the page with these words. `body` is a scratch buffer, reused for the next page.
fn next_key(
    prior: Option<PageKey>,
    words: impl Iterator<Item = u64> + Clone,
    body: &mut Vec<u8>,
) -> PageKey {
    body.clear();
    if let Some(prior) = prior {
        body.extend_from_slice(prior.as_bytes());
    }
    if words.clone().all(|word| u32::try_from(word).is_ok()) {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "each has just been found to fit"
        )]
        words.for_each(|word| body.extend_from_slice(&(word as u32).to_le_bytes()));
    } else {
        body.push(0xff);
        words.for_each(|word| body.extend_from_slice(&word.to_le_bytes()));
    }
    PageKey(Sha256::digest(body.as_slice()).into())
}

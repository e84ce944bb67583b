//! Prompts: the tokens of a request in the form that the tree compares, and its page keys, each
//! hashed once.
//!
//! The tree stores a token in one `u32` *word*. Tokens from [`ESCAPE`] on, including the 64-bit
//! placeholders of multimodal input, are numbered by a [`Vocabulary`]. Words from [`ESCAPE`] on are
//! such numbers.
//!
//! With bigrams, unit `i` consists of the tokens `i` and `i + 1`. If the first tokens of two
//! prompts are equal, their units are equal exactly if the second tokens of the units are.
//! Therefore word `i` is token `i + 1`, and the first token is part of the [`RootKey`]: a bigram
//! costs no more than a token.
//!
//! Invariant: prompts with different (extra key, cache salt, bigram) have different root keys and
//! never share a node.

use std::collections::HashMap;
use std::num::NonZeroUsize;

use larder_format::{PageKey, TokenUnits, namespace_seed, page_keys};

use crate::planted::planted;

/// Tokens from this value on are numbered.
pub const ESCAPE: u32 = 0xf000_0000;

/// Separates the pages of some requests from those of other requests with the same tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Scope {
    /// The namespace of the request: a tenant, a LoRA.
    pub extra_key: Option<String>,
    /// A secret of the request. Prevents others from probing for its cached tokens.
    pub cache_salt: Option<String>,
    /// Units are pairs of tokens: EAGLE-family draft models.
    pub bigram: bool,
}

/// The weights under which pages are computed: those of the namespace until others replace them.
/// Pages of other weights have other keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Weights {
    tag: Option<String>,
    /// The seed of a prompt without extra key and salt: most requests have neither.
    unscoped: Option<PageKey>,
    /// Number of replacements so far.
    changes: u64,
}

impl Weights {
    /// These weights are replaced.
    pub(crate) fn replace(&mut self, tag: &str) {
        self.tag = Some(tag.to_owned());
        self.unscoped = seed_under(tag, None);
        self.changes += 1;
    }

    /// Number of replacements so far.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// The seed of a prompt whose scope has this one.
    fn seed(&self, of_scope: Option<PageKey>) -> Option<PageKey> {
        match self.tag.as_deref().filter(|_| !planted!(WeightsIgnored)) {
            Some(_) if of_scope.is_none() => self.unscoped,
            Some(tag) => seed_under(tag, of_scope),
            None => of_scope,
        }
    }
}

/// The seed of the keys of pages under the weights of this tag: `of_scope` is that of the extra key
/// and the salt ([`namespace_seed`]).
#[must_use]
pub fn seed_under(tag: &str, of_scope: Option<PageKey>) -> Option<PageKey> {
    let scope = of_scope.map(|seed| seed.to_string());
    let tagged = namespace_seed(Some(tag), scope.as_deref())?;
    namespace_seed(Some("larder-weights"), Some(&tagged.to_string()))
}

/// The root of the forest for a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RootKey {
    seed: Option<PageKey>,
    /// With bigrams: the word of the first token.
    first: Option<u32>,
    bigram: bool,
}

/// No further token can be numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{numbered} distinct tokens from {ESCAPE:#x} on have been numbered, which is the maximum; \
     the prompt is cached up to the first token beyond it; raise wide_tokens_max"
)]
pub struct VocabularyFull {
    /// Number of numbered tokens.
    pub numbered: u32,
}

/// Numbers for tokens that do not fit in a word.
#[derive(Debug)]
pub struct Vocabulary {
    numbers: HashMap<u64, u32>,
    tokens: Vec<u64>,
    tokens_max: u32,
}

impl Vocabulary {
    /// A vocabulary for at most `tokens_max` distinct tokens.
    #[must_use]
    pub fn new(tokens_max: u32) -> Vocabulary {
        Vocabulary {
            numbers: HashMap::new(),
            tokens: Vec::new(),
            tokens_max: tokens_max.min(u32::MAX - ESCAPE),
        }
    }

    fn word(&mut self, token: u64) -> Result<u32, VocabularyFull> {
        if let Ok(word) = u32::try_from(token)
            && word < ESCAPE
        {
            return Ok(word);
        }
        if let Some(number) = self.numbers.get(&token) {
            return Ok(ESCAPE + number);
        }
        let numbered = u32::try_from(self.tokens.len()).unwrap_or(u32::MAX);
        if numbered >= self.tokens_max {
            return Err(VocabularyFull { numbered });
        }
        self.numbers.insert(token, numbered);
        self.tokens.push(token);
        Ok(ESCAPE + numbered)
    }

    fn token(&self, word: u32) -> u64 {
        match word.checked_sub(ESCAPE) {
            None => u64::from(word),
            Some(number) => self.tokens[number as usize],
        }
    }
}

/// The tokens of a request, extended as the answer is generated.
#[derive(Clone, Debug)]
pub struct Prompt {
    root: RootKey,
    /// The seed of its scope alone, and the weights in its root.
    of_scope: Option<PageKey>,
    weights: u64,
    words: Vec<u32>,
    keys: Vec<PageKey>,
    page_tokens: NonZeroUsize,
    is_cut: bool,
    /// A lookup in L3 has been counted for it.
    is_counted: bool,
}

impl Prompt {
    /// A prompt without tokens.
    #[must_use]
    pub fn new(scope: &Scope, page_tokens: NonZeroUsize) -> Prompt {
        let salt = if planted!(SaltIgnored) {
            None
        } else {
            scope.cache_salt.as_deref()
        };
        let of_scope = namespace_seed(scope.extra_key.as_deref(), salt);
        Prompt {
            of_scope,
            weights: 0,
            root: RootKey {
                seed: of_scope,
                first: None,
                bigram: scope.bigram,
            },
            words: Vec::new(),
            keys: Vec::new(),
            page_tokens,
            is_cut: false,
            is_counted: false,
        }
    }

    /// Whether a lookup in L3 is the first one for this prompt, which counts.
    pub(crate) fn is_first_lookup(&mut self) -> bool {
        !std::mem::replace(&mut self.is_counted, true)
    }

    /// Appends tokens.
    ///
    /// # Errors
    /// The vocabulary is full: the prompt permanently ends before the first token that needed a
    /// number.
    pub fn extend(
        &mut self,
        vocabulary: &mut Vocabulary,
        tokens: impl IntoIterator<Item = u64>,
    ) -> Result<(), VocabularyFull> {
        for token in tokens {
            if self.is_cut {
                break;
            }
            let word = vocabulary.word(token).inspect_err(|_| self.is_cut = true)?;
            if self.root.bigram && self.root.first.is_none() {
                self.root.first = Some(word);
            } else {
                self.words.push(word);
            }
        }
        Ok(())
    }

    /// Removes all but the first `tokens` tokens. A prompt of bigrams keeps its first token, which
    /// determines its root.
    pub fn truncate(&mut self, tokens: usize) {
        self.words.truncate(self.units_of(tokens));
        self.keys.truncate(self.words.len() / self.page_tokens);
    }

    /// Number of units of its first `tokens` tokens.
    #[must_use]
    pub fn units_of(&self, tokens: usize) -> usize {
        tokens.saturating_sub(usize::from(self.root.bigram))
    }

    /// The root of the prompt under these weights.
    pub(crate) fn root_under(&self, weights: &Weights) -> RootKey {
        let mut root = self.root;
        if self.weights != weights.changes() {
            root.seed = weights.seed(self.of_scope);
        }
        root
    }

    /// The pages of the prompt are those of these weights.
    pub(crate) fn renew(&mut self, weights: &Weights) {
        if self.weights != weights.changes() {
            self.root = self.root_under(weights);
            self.weights = weights.changes();
            self.keys.clear();
            self.is_counted = false;
        }
    }

    /// The number of replacements of weights before those of the prompt.
    pub(crate) fn weights(&self) -> u64 {
        self.weights
    }

    /// A number for its extra key and salt: another one for others, 0 for neither.
    pub(crate) fn tenant(&self) -> u64 {
        let seed = self.of_scope.as_ref();
        let first = seed.and_then(|seed| seed.as_bytes().first_chunk().copied());
        first.map_or(0, u64::from_le_bytes)
    }

    /// The root of the prompt.
    #[must_use]
    pub fn root(&self) -> RootKey {
        self.root
    }

    /// One word per unit.
    #[must_use]
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Number of whole pages.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.words.len() / self.page_tokens
    }

    /// The words and the keys of the first `pages` pages. Keys are hashed only once.
    ///
    /// # Panics
    /// If the prompt has fewer pages.
    pub fn words_and_keys(
        &mut self,
        vocabulary: &Vocabulary,
        pages: usize,
    ) -> (&[u32], &[PageKey]) {
        self.hash(vocabulary, pages);
        (
            &self.words[..pages * self.page_tokens.get()],
            &self.keys[..pages],
        )
    }

    /// The keys of the first `pages` pages, as [`Prompt::words_and_keys`].
    ///
    /// # Panics
    /// If the prompt has fewer pages.
    pub fn keys(&mut self, vocabulary: &Vocabulary, pages: usize) -> &[PageKey] {
        self.words_and_keys(vocabulary, pages).1
    }

    fn hash(&mut self, vocabulary: &Vocabulary, pages: usize) {
        assert!(pages <= self.pages(), "the prompt has no page {pages}");
        let known = self.keys.len();
        if known < pages {
            let per_page = self.page_tokens.get();
            let token = |word: &u32| vocabulary.token(*word);
            let words = &self.words[known * per_page..pages * per_page];
            let prior = self.keys.last().copied().or(self.root.seed);
            let (tokens, units): (Vec<u64>, TokenUnits) = if self.root.bigram {
                let before = match known * per_page {
                    0 => self.root.first,
                    at => Some(self.words[at - 1]),
                };
                let tokens = before.iter().chain(words).map(token).collect();
                (tokens, TokenUnits::Bigram)
            } else {
                (words.iter().map(token).collect(), TokenUnits::Single)
            };
            self.keys
                .extend(page_keys(&tokens, self.page_tokens, prior, units));
        }
    }

    /// A digest of its first tokens, its scope and its weights: equal in all processes for prompts
    /// that are equal so far. `None` if it has fewer tokens, or none.
    pub(crate) fn digest(&self, vocabulary: &Vocabulary, tokens: usize) -> Option<PageKey> {
        let words = self.root.first.iter().chain(&self.words);
        let length = NonZeroUsize::new(tokens)?;
        let tokens: Vec<u64> = words
            .take(tokens)
            .map(|word| vocabulary.token(*word))
            .collect();
        page_keys(&tokens, length, self.root.seed, TokenUnits::Single).pop()
    }

    /// Number of pages whose keys have been hashed.
    #[must_use]
    pub fn hashed_pages(&self) -> usize {
        self.keys.len()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn prompt(scope: &Scope, vocabulary: &mut Vocabulary, tokens: &[u64]) -> Prompt {
        let mut prompt = Prompt::new(scope, NonZeroUsize::new(4).unwrap());
        prompt.extend(vocabulary, tokens.iter().copied()).unwrap();
        prompt
    }

    #[test]
    fn keys_computed_in_pieces_equal_those_of_the_whole_chain() {
        let tokens: Vec<u64> = (0..50)
            .map(|at| if at == 21 { 1 << 40 } else { at * 7 })
            .collect();
        for bigram in [false, true] {
            let scope = Scope {
                bigram,
                extra_key: Some("tenantA".into()),
                ..Scope::default()
            };
            let units = if bigram {
                TokenUnits::Bigram
            } else {
                TokenUnits::Single
            };
            let mut vocabulary = Vocabulary::new(10);
            let mut prompt = prompt(&scope, &mut vocabulary, &tokens);
            let seed = namespace_seed(Some("tenantA"), None);
            let whole = page_keys(&tokens, NonZeroUsize::new(4).unwrap(), seed, units);
            assert_eq!(prompt.pages(), 12);
            for pages in [1, 3, 4, 12, 5] {
                assert_eq!(prompt.keys(&vocabulary, pages), &whole[..pages]);
            }
            assert_eq!(prompt.hashed_pages(), 12);
        }
    }

    #[test]
    fn a_truncated_prompt_equals_one_that_was_never_longer() {
        for bigram in [false, true] {
            let scope = Scope {
                bigram,
                ..Scope::default()
            };
            let mut vocabulary = Vocabulary::new(0);
            let wrong: Vec<u64> = (0..30).collect();
            let right: Vec<u64> = (0..10).chain(90..110).collect();
            let mut truncated = prompt(&scope, &mut vocabulary, &wrong);
            truncated.keys(&vocabulary, 7);
            truncated.truncate(10);
            truncated
                .extend(&mut vocabulary, right[10..].iter().copied())
                .unwrap();
            let mut expected = prompt(&scope, &mut vocabulary, &right);
            assert_eq!(truncated.words(), expected.words());
            assert_eq!(
                truncated.keys(&vocabulary, 7),
                expected.keys(&vocabulary, 7)
            );
        }
    }

    #[test]
    fn equal_tokens_under_another_salt_key_or_unit_have_another_root() {
        let mut vocabulary = Vocabulary::new(0);
        let text = |text: &str| Some(text.to_owned());
        let mut roots = Vec::new();
        for bigram in [false, true] {
            for (extra_key, cache_salt) in [
                (None, None),
                (text(""), None),
                (None, text("")),
                (text("a"), text("b")),
                (text("ab"), text("")),
            ] {
                let scope = Scope {
                    extra_key,
                    cache_salt,
                    bigram,
                };
                roots.push(prompt(&scope, &mut vocabulary, &[1, 2, 3, 4, 5]).root());
            }
        }
        for (at, root) in roots.iter().enumerate() {
            assert!(!roots[..at].contains(root));
        }
    }

    #[test]
    fn a_token_that_cannot_be_numbered_ends_the_prompt_before_it() {
        let mut vocabulary = Vocabulary::new(1);
        let mut prompt = Prompt::new(&Scope::default(), NonZeroUsize::MIN);
        let wide = u64::from(ESCAPE);
        let result = prompt.extend(&mut vocabulary, [1, wide, 2, wide, 1 << 50, 3]);
        assert_eq!(result, Err(VocabularyFull { numbered: 1 }));
        assert_eq!(prompt.words(), [1, ESCAPE, 2, ESCAPE]);
        prompt.extend(&mut vocabulary, [5]).unwrap();
        assert_eq!(prompt.pages(), 4);
    }
}

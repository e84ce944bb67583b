//! An engine for a hybrid model over [`PrefixCache`]: full attention with an indexer that follows
//! its pages, a sliding window, and a state of two sections. The toy model mixes all bytes that a
//! token sees, so one wrong byte changes every later word. It serves the same prompts cold, from
//! L1, from L2, and from L3 after a restart, and compares all words with a run without a cache.

#![allow(dead_code, missing_docs, clippy::cast_possible_truncation)]

use std::collections::HashMap;
use std::error::Error;
use std::time::{Duration, Instant};

use larder_kernels::{Attention, KvShape};
use larder_tiers::prefix::Cached;
use larder_tiers::{Component, Model, PrefixCache, PrefixOptions, Role, RowAt, Sequence};

// Tokens of a page and of the window, different tokens, tokens of an answer.
pub const PAGE: usize = 4;
pub const WINDOW: usize = 6;
pub const WORDS: u64 = 16;
const ANSWER: usize = 10;

// The components, in the order of the model.
pub const INDEXER: usize = 0;
pub const SLIDING: usize = 1;
pub const STATE: usize = 2;

pub type Fallible<T> = Result<T, Box<dyn Error>>;

/// The memory of a sequence: rows of 8 bytes, and the two sections of its state.
pub trait Memory {
    /// K (0) or V (1) of full attention.
    fn full(&mut self, part: u32, position: usize) -> Fallible<&mut [u8]>;
    fn read_full(&self, part: u32, position: usize) -> Fallible<&[u8]>;
    /// A row of the indexer or of the window.
    fn row(&mut self, component: usize, position: usize) -> Fallible<&mut [u8]>;
    fn read_row(&self, component: usize, position: usize) -> Fallible<&[u8]>;
    fn state(&mut self, section: usize) -> Fallible<&mut [u8]>;
}

fn at(component: usize, section: usize) -> RowAt {
    RowAt {
        component,
        section,
        ..RowAt::default()
    }
}

impl Memory for Sequence {
    fn full(&mut self, part: u32, position: usize) -> Fallible<&mut [u8]> {
        Ok(self.row_mut(part, 0, position)?)
    }
    fn read_full(&self, part: u32, position: usize) -> Fallible<&[u8]> {
        Ok(Sequence::row(self, part, 0, position)?)
    }
    fn row(&mut self, component: usize, position: usize) -> Fallible<&mut [u8]> {
        Ok(self.component_row_mut(at(component, 0), position)?)
    }
    fn read_row(&self, component: usize, position: usize) -> Fallible<&[u8]> {
        Ok(self.component_row(at(component, 0), position)?)
    }
    fn state(&mut self, section: usize) -> Fallible<&mut [u8]> {
        Ok(self.state_mut(at(STATE, section))?)
    }
}

/// Without a cache.
#[derive(Default)]
pub struct Uncached {
    rows: HashMap<(usize, u32, usize), [u8; 8]>,
    states: HashMap<usize, Vec<u8>>,
}

impl Memory for Uncached {
    fn full(&mut self, part: u32, position: usize) -> Fallible<&mut [u8]> {
        Ok(self.rows.entry((9, part, position)).or_default())
    }
    fn read_full(&self, part: u32, position: usize) -> Fallible<&[u8]> {
        Ok(&self.rows[&(9, part, position)])
    }
    fn row(&mut self, component: usize, position: usize) -> Fallible<&mut [u8]> {
        Ok(self.rows.entry((component, 0, position)).or_default())
    }
    fn read_row(&self, component: usize, position: usize) -> Fallible<&[u8]> {
        Ok(&self.rows[&(component, 0, position)])
    }
    fn state(&mut self, section: usize) -> Fallible<&mut [u8]> {
        let bytes = [16, 24][section];
        Ok(self.states.entry(section).or_insert_with(|| vec![0; bytes]))
    }
}

fn mix(a: u64, b: u64) -> u64 {
    let z = (a ^ b.rotate_left(29)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (z ^ z >> 31).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

fn mix_all(hidden: u64, bytes: &[u8]) -> u64 {
    let words = bytes.as_chunks().0.iter();
    words.fold(hidden, |hidden, word| {
        mix(hidden, u64::from_le_bytes(*word))
    })
}

/// The model: one layer of each kind.
pub fn model() -> Fallible<Model> {
    let page = PAGE as u32;
    let row = |tokens| KvShape::of_rows(Attention::Mla, 1, 8, tokens);
    let state = |bytes| KvShape::of_rows(Attention::Mla, 1, bytes, 1);
    let window = Role::Window {
        tokens: WINDOW as u32,
    };
    let model = Model::new(
        "toy hybrid",
        "seed 1",
        "u64",
        KvShape::mha(1, 1, 8, 1, page)?,
    )
    .with(Component::new(
        "indexer",
        "u64",
        Role::Follower,
        &[row(page)?],
    ))?
    .with(Component::new("sliding", "u64", window, &[row(page)?]))?
    .with(Component::new(
        "state",
        "u64",
        Role::State,
        &[state(16)?, state(24)?],
    ))?;
    Ok(model)
}

/// Computes a token. Returns the next one.
pub fn forward(memory: &mut impl Memory, token: u64, position: usize) -> Fallible<u64> {
    let mut hidden = mix(token, position as u64);
    for part in 0..2 {
        let row = mix(hidden, part.into()).to_le_bytes();
        memory.full(part, position)?.copy_from_slice(&row);
    }
    for component in [INDEXER, SLIDING] {
        let row = mix(hidden, 2 + component as u64).to_le_bytes();
        memory.row(component, position)?.copy_from_slice(&row);
    }
    for before in 0..=position {
        for part in 0..2 {
            hidden = mix_all(hidden, memory.read_full(part, before)?);
        }
        hidden = mix_all(hidden, memory.read_row(INDEXER, before)?);
    }
    for before in (position + 1).saturating_sub(WINDOW)..=position {
        hidden = mix_all(hidden, memory.read_row(SLIDING, before)?);
    }
    // The state: two words that take up each token, and those of the last three tokens.
    let recent = memory.state(1)?;
    recent.rotate_left(8);
    recent[16..].copy_from_slice(&hidden.to_le_bytes());
    hidden = mix_all(hidden, recent);
    let recurrent = memory.state(0)?;
    hidden = mix_all(hidden, recurrent);
    let next = [mix(hidden, 5), mix(hidden, 6)].map(u64::to_le_bytes);
    recurrent.copy_from_slice(next.as_flattened());
    Ok(hidden % WORDS)
}

/// The prompt and its answer, computed without a cache.
pub fn uncached(prompt: &[u64], answer: usize) -> Vec<u64> {
    let (mut memory, mut tokens) = (Uncached::default(), prompt.to_vec());
    for position in 0..prompt.len() + answer - 1 {
        let word = forward(&mut memory, tokens[position], position);
        let is_last = position + 1 == tokens.len();
        tokens.extend(word.ok().filter(|_| is_last));
    }
    tokens
}

/// Computes the tokens of a sequence up to the first `until`. Returns the next one.
pub fn compute(
    sequence: &mut Sequence,
    tokens: &[u64],
    computed: usize,
    until: usize,
) -> Fallible<u64> {
    // Window pages for these tokens, and the state from which the sequence starts.
    sequence.prepare_within(until, Duration::from_secs(10))?;
    let mut word = 0;
    for (position, token) in tokens.iter().enumerate().take(until).skip(computed) {
        word = forward(sequence, *token, position)?;
    }
    // A state at a border of pages is copied here; window pages behind are freed.
    sequence.computed(until)?;
    Ok(word)
}

/// Answers a prompt. Returns all tokens, and the cached ones.
pub fn serve(cache: &PrefixCache, prompt: &[u64], answer: usize) -> Fallible<(Vec<u64>, Cached)> {
    let mut sequence = cache.begin(prompt)?;
    let cached = sequence.cached();
    let (mut tokens, mut computed) = (prompt.to_vec(), cached.tokens());
    while tokens.len() < prompt.len() + answer {
        // A forward ends at each border, so a state is kept there.
        let until = tokens.len().min((computed / PAGE + 1) * PAGE);
        let word = compute(&mut sequence, &tokens, computed, until)?;
        computed = until;
        if until.is_multiple_of(PAGE) && sequence.is_loaded() {
            sequence.share()?;
        }
        if until == tokens.len() {
            tokens.push(word);
            sequence.push_within(word, Duration::from_secs(10))?;
        }
    }
    sequence.keep()?;
    Ok((tokens, cached))
}

fn show(from: &str, cache: &PrefixCache, prompts: &[Vec<u64>]) -> Fallible<()> {
    let mut all = Cached::default();
    for prompt in prompts {
        let (tokens, cached) = serve(cache, prompt, ANSWER)?;
        assert_eq!(tokens, uncached(prompt, ANSWER), "words differ");
        all.l1 += cached.l1;
        all.l2 += cached.l2;
        all.l3 += cached.l3;
    }
    let Cached { l1, l2, l3 } = all;
    println!("{from:<14} {l1:>6} {l2:>6} {l3:>6}  the same");
    Ok(())
}

fn main() -> Fallible<()> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("kv.store");
    let open = || -> Fallible<PrefixCache> {
        let options = PrefixOptions::new(&model()?, 300, 600).with(|o| {
            // A running sequence has one window and one state; the rest are cached.
            (o.config.tails[0].l1_pages, o.config.tails[0].l2_pages) = (100, 200);
            (o.config.tails[1].l1_pages, o.config.tails[1].l2_pages) = (100, 200);
        });
        Ok(options.open(&path, 128 << 20)?)
    };
    let prompts: Vec<Vec<u64>> = (1..4)
        .map(|number| (0..60 + number).map(|at| mix(number, at) % WORDS).collect())
        .collect();
    println!("tokens from        L1     L2     L3  words");
    let cache = open()?;
    show("no tier", &cache, &prompts)?;
    show("L1", &cache, &prompts)?;
    cache.settle(Instant::now() + Duration::from_secs(10))?;
    cache.evict(usize::MAX)?;
    show("L2", &cache, &prompts)?;
    cache.close()?;
    let cache = open()?;
    show("L3, restarted", &cache, &prompts)?;
    Ok(cache.close()?)
}

//! Hand-overs between a prefill and a decode process. The model is computed layer by layer, and a
//! wrong byte gives other words: each row depends on all before it and on the layer below.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a broken expectation is the finding"
)]

#[path = "../../../tests/support/honest.rs"]
mod honest;
mod kills;
#[path = "../prefix/memory.rs"]
#[allow(dead_code)]
mod memory;
#[cfg(debug_assertions)]
mod planted;
mod random;
mod rules;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_kernels::KvShape;
use larder_tiers::handover::{Decode, Offer, Prefill, Taken};
use larder_tiers::{Ask, Model, PrefixCache, PrefixOptions, Sequence};

use honest::{PATIENCE, eventually};
use memory::Memory;

/// Tokens of a page.
const PAGE: usize = 4;
const LAYERS: u32 = 3;
/// Different tokens.
const WORDS: u64 = 64;
/// Tokens of an answer, the first one included.
const ANSWER: usize = 6;
/// Long enough for each hand-over.
const TIME: Duration = Duration::from_secs(30);

type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

fn mixed(value: u64, with: u64) -> u64 {
    let mixed = (value ^ with.rotate_left(31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ mixed >> 29
}

/// The row of a position, from all rows before it and the layer below.
fn row(layer: u32, below: u64, before: impl Iterator<Item = (u64, u64)>) -> u64 {
    let first = mixed(u64::from(layer) + 1, below);
    before.fold(first, |row, (k, v)| mixed(mixed(row, k), v))
}

/// The prompt and its answer, computed without a cache.
fn uncached(prompt: &[u64]) -> Vec<u64> {
    let (mut tokens, mut known) = (prompt.to_vec(), vec![Vec::<u64>::new(); LAYERS as usize]);
    while tokens.len() < prompt.len() + ANSWER {
        for (layer, at) in (0..LAYERS)
            .flat_map(|layer| (known[0].len()..tokens.len()).map(move |at| (layer, at)))
            .collect::<Vec<_>>()
        {
            let below = match layer {
                0 => tokens[at],
                _ => known[layer as usize - 1][at],
            };
            let rows = &mut known[layer as usize];
            let new = row(layer, below, rows[..at].iter().map(|k| (*k, !*k)));
            rows.push(new);
        }
        tokens.push(known[LAYERS as usize - 1].last().unwrap() % WORDS);
    }
    tokens
}

fn get(sequence: &Sequence, part: u32, layer: u32, at: usize) -> Fallible<u64> {
    let row = sequence.row(part, layer, at)?;
    Ok(u64::from_le_bytes(*row.first_chunk().unwrap()))
}

/// Computes some rows of a layer. Returns the word behind the last of them, if this is the last
/// layer.
fn compute(
    sequence: &mut Sequence,
    tokens: &[u64],
    layer: u32,
    range: Range<usize>,
) -> Fallible<u64> {
    let mut word = 0;
    for at in range {
        let below = match layer {
            0 => tokens[at],
            _ => get(sequence, 0, layer - 1, at)?,
        };
        let mut before = Vec::new();
        for at in 0..at {
            before.push((get(sequence, 0, layer, at)?, get(sequence, 1, layer, at)?));
        }
        let new = row(layer, below, before.into_iter());
        for (part, value) in [(0, new), (1, !new)] {
            let row = sequence.row_mut(part, layer, at)?;
            row[..8].copy_from_slice(&value.to_le_bytes());
        }
        word = new % WORDS;
    }
    Ok(word)
}

/// Computes all layers of the tokens that are not there, and reports them. Returns the next word.
fn forward(sequence: &mut Sequence, tokens: &[u64], from: usize) -> Fallible<u64> {
    let mut word = 0;
    for layer in 0..LAYERS {
        word = compute(sequence, tokens, layer, from..tokens.len())?;
    }
    sequence.computed(tokens.len())?;
    Ok(word)
}

fn model() -> Model {
    let shape = KvShape::mha(LAYERS, 1, 4, 4, PAGE as u32).unwrap();
    Model::new("rows", "mixed", "u64", shape)
}

/// A cache over this L3.
fn cache(l3: &Arc<Memory>) -> PrefixCache {
    let options = PrefixOptions::new(&model(), 40, 60);
    options.over(Some(l3.clone())).unwrap()
}

/// A prefill and a decode process over one L3.
struct Node {
    l3: Arc<Memory>,
    here: PrefixCache,
    there: PrefixCache,
    socket: PathBuf,
    _directory: tempfile::TempDir,
}

impl Node {
    fn new() -> Node {
        let (l3, directory) = (Arc::<Memory>::default(), tempfile::tempdir().unwrap());
        Node {
            here: cache(&l3),
            there: cache(&l3),
            l3,
            socket: directory.path().join("handover.sock"),
            _directory: directory,
        }
    }

    /// The prefill process with memory of so many pages.
    fn prefill(&self, pages: u64) -> Prefill {
        let bytes = pages * u64::from(model().shape().page_bytes());
        Prefill::bind(&self.socket, &self.here, bytes).unwrap()
    }

    fn decode(&self) -> Decode {
        Decode::new(&self.socket, &self.there).unwrap()
    }

    /// All pages and locks of both caches have an owner: these sequences.
    fn audit<'s>(&self, here: &[&'s Sequence], there: &[&'s Sequence]) {
        self.here.audit(here.iter().copied()).unwrap();
        self.there.audit(there.iter().copied()).unwrap();
    }

    /// Waits until nothing runs, and no page is in use any more.
    fn is_empty(&self) {
        for cache in [&self.here, &self.there] {
            // The thread of a request that was dropped may just begin its sequence, to drop it.
            eventually("no page and no prefetch is in use", || {
                let is_idle = cache.settle(Instant::now() + PATIENCE).unwrap();
                let is_empty = cache.audit([]).is_ok() && cache.reset().is_ok();
                let left = cache.with_core(|core| {
                    let all = (core.config().l1_pages, core.config().l2_pages);
                    core.free_pages() == all && core.prefetches_out() == 0
                });
                is_idle && is_empty && left.unwrap()
            });
        }
    }
}

/// A prompt of so many tokens.
fn prompt(tokens: usize, seed: u64) -> Vec<u64> {
    (0..tokens as u64)
        .map(|at| mixed(at, seed) % WORDS)
        .collect()
}

/// Computes a prompt in chunks, and gives each layer of each chunk to the offer.
fn prefilled(sequence: &mut Sequence, offer: &mut Offer, tokens: &[u64], chunk: usize) -> u64 {
    let (mut from, mut word) = (sequence.cached().tokens(), 0);
    while from < tokens.len() {
        let until = (from + chunk).min(tokens.len());
        for layer in 0..LAYERS {
            word = compute(sequence, tokens, layer, from..until).unwrap();
            offer.layer(sequence, layer, until).unwrap();
        }
        sequence.computed(until).unwrap();
        from = until;
    }
    word
}

/// Computes what is missing, and the rest of the answer. Returns the sequence and all tokens.
fn answered(taken: Taken, prompt: &[u64]) -> Fallible<(Sequence, Vec<u64>)> {
    let Taken {
        mut sequence,
        computed,
        token,
        ..
    } = taken;
    let mut tokens = prompt.to_vec();
    if computed < tokens.len() {
        forward(&mut sequence, &tokens, computed)?;
    }
    tokens.push(token);
    sequence.push(token)?;
    while tokens.len() < prompt.len() + ANSWER {
        let from = tokens.len() - 1;
        let word = forward(&mut sequence, &tokens, from)?;
        tokens.push(word);
        sequence.push(word)?;
    }
    Ok((sequence, tokens))
}

/// The request, with room for its answer.
fn ask(prompt: &[u64]) -> Ask<'_> {
    Ask::new(prompt).reserved(ANSWER)
}

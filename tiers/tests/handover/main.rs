//! Hand-overs between a prefill and a decode process. The model, that of the fake driver, is
//! computed layer by layer, and a wrong byte gives other words: each row depends on all rows of the
//! layer below up to its place.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a broken expectation is the finding"
)]

mod device;
mod gpu;
#[path = "../../../tests/support/honest.rs"]
mod honest;
mod kills;
#[path = "../prefix/memory.rs"]
#[allow(dead_code)]
mod memory;
#[cfg(debug_assertions)]
#[path = "../support/planted.rs"]
mod noticed;
#[cfg(debug_assertions)]
mod planted;
mod random;
mod rules;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_fake_cuda::model;
use larder_kernels::{Device, KvShape, L1Pool};
use larder_tiers::handover::{Decode, Offer, Prefill, Taken};
use larder_tiers::prefix::L1Memory;
use larder_tiers::{Ask, Model, PrefixCache, PrefixOptions, Sequence};

use honest::{PATIENCE, eventually};
use memory::Memory;
#[cfg(debug_assertions)]
use noticed::all_are_noticed;

/// Tokens of a page.
const PAGE: usize = 4;
const LAYERS: u32 = 3;
const L1_PAGES: u32 = 40;
/// Different tokens of a prompt.
const WORDS: u64 = 64;
/// Tokens of an answer, the first one included.
const ANSWER: usize = 6;
/// Long enough for each hand-over.
const TIME: Duration = Duration::from_secs(30);

type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

/// The prompt and its answer, computed without a cache.
fn uncached(prompt: &[u64]) -> Vec<u64> {
    model::answered(&shape(), prompt, ANSWER)
}

/// The words of a row in both parts.
fn get(sequence: &Sequence, layer: u32, at: usize) -> Fallible<[u64; 4]> {
    let mut words = [0; 4];
    for (part, words) in (0..).zip(words.chunks_exact_mut(2)) {
        let row = sequence.row(part, layer, at)?.chunks_exact(8);
        let numbers = row.map(|word| u64::from_le_bytes(*word.first_chunk().unwrap()));
        words.iter_mut().zip(numbers).for_each(|(to, of)| *to = of);
    }
    Ok(words)
}

/// The state of a token behind a layer, from the rows of that layer.
fn behind(sequence: &Sequence, layer: u32, at: usize) -> Fallible<u64> {
    let own = get(sequence, layer, at)?;
    let mut before = Vec::new();
    for at in 0..at {
        before.push(get(sequence, layer, at)?);
    }
    Ok(model::behind(layer, own, &before))
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
    for at in range.clone() {
        let state = match layer {
            0 => model::first(tokens[at], at),
            _ => behind(sequence, layer - 1, at)?,
        };
        let new: [u64; 4] = model::row(layer, state);
        for (part, words) in (0..).zip(new.chunks_exact(2)) {
            let row = sequence.row_mut(part, layer, at)?;
            let bytes = words.iter().copied().map(u64::to_le_bytes);
            row.copy_from_slice(bytes.collect::<Vec<_>>().as_flattened());
        }
    }
    if layer + 1 == LAYERS && !range.is_empty() {
        word = behind(sequence, layer, range.end - 1)? % model::WORDS;
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

/// Two words a row.
fn shape() -> KvShape {
    KvShape::mha(LAYERS, 1, 4, 4, PAGE as u32).unwrap()
}

fn named() -> Model {
    Model::new("rows", "mixed", "u64", shape())
}

/// A device, and L1 on it.
type OnDevice = (Arc<dyn Device>, L1Pool);

/// A cache over this L3, with L1 in host memory or on a device.
fn cache(l3: &Arc<Memory>, l1: Option<OnDevice>) -> PrefixCache {
    let options = PrefixOptions::new(&named(), L1_PAGES, 60);
    let options = options.with(|o| o.l1 = l1.map(|(device, l1)| L1Memory::Pool(device, l1)));
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
        Node::over([None, None])
    }

    /// A node whose prefill and decode process have L1 on a device, or in host memory.
    fn over([here, there]: [Option<OnDevice>; 2]) -> Node {
        let (l3, directory) = (Arc::<Memory>::default(), tempfile::tempdir().unwrap());
        Node {
            here: cache(&l3, here),
            there: cache(&l3, there),
            l3,
            socket: directory.path().join("handover.sock"),
            _directory: directory,
        }
    }

    /// The prefill process with memory of so many pages.
    fn prefill(&self, pages: u64) -> Prefill {
        let bytes = pages * u64::from(shape().page_bytes());
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
        .map(|at| model::first(at, seed as usize) % WORDS)
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

/// Computes the missing rows, and the rest of the answer. Returns the sequence and all tokens.
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

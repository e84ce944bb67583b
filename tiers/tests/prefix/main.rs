//! The prefix cache as an engine sees it: a toy transformer, whose every word depends on all bytes
//! of its KV, against the same transformer without a cache.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a broken expectation is the finding"
)]

mod close;
mod dropped;
#[path = "../../examples/engine.rs"]
mod engine;
mod heads;
#[path = "../../../tests/support/honest.rs"]
mod honest;
mod kills;
mod launched;
mod lives;
mod loads;
mod memory;
mod polls;
mod random;
mod rank_kills;
mod ranks;
mod refuses;
mod remotes;
mod room;
mod rules;
mod sizes;
mod tenants;
mod truncate;
mod verify;
mod wakes;
mod weights;

use std::time::{Duration, Instant};

use larder_tiers::prefix::Cached;
use larder_tiers::{PrefixCache, Sequence};

use engine::Transformer;

/// Tokens of an answer.
const ANSWER: usize = 5;

/// Longer than any test takes.
const PATIENCE: Duration = Duration::from_secs(60);

fn toy() -> Transformer {
    Transformer::new(2, 8)
}

/// Computes the rest of a prompt and its answer, in forwards that end at once. Returns all tokens.
fn answer(toy: &Transformer, sequence: &mut Sequence, prompt: &[u64]) -> Vec<u64> {
    let (mut tokens, mut computed) = (prompt.to_vec(), sequence.cached().tokens());
    while tokens.len() < prompt.len() + ANSWER {
        let mut word = 0;
        for (position, token) in tokens.iter().enumerate().skip(computed) {
            word = toy.forward(sequence, *token, position).unwrap();
        }
        computed = tokens.len();
        sequence.computed(computed).unwrap();
        tokens.push(word);
        sequence.push_within(word, PATIENCE).unwrap();
    }
    tokens
}

/// Asks for a prompt, answers it, checks the words, and keeps it. Returns the cached tokens.
fn serve(cache: &PrefixCache, toy: &Transformer, prompt: &[u64]) -> Cached {
    let mut sequence = cache.begin(prompt).unwrap();
    let words = answer(toy, &mut sequence, prompt);
    assert_eq!(words, toy.uncached(prompt, ANSWER), "{prompt:?}");
    let cached = sequence.cached();
    sequence.keep().unwrap();
    cached
}

/// Waits until all kept pages are in L3, without a poll of the caller.
fn put_of(cache: &PrefixCache, pages: u64) {
    let deadline = Instant::now() + PATIENCE;
    while cache.stats().unwrap().put < pages {
        assert!(Instant::now() < deadline, "{:?}", cache.stats());
        std::thread::yield_now();
    }
}

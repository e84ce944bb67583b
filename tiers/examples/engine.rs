//! An engine over [`PrefixCache`]: a toy transformer in f32 that serves the same prompts cold, from
//! L1, from L2, and, after a SIGKILL, from L3. All words are compared with a run without a cache.
//! `docs/embedding.md` walks through [`serve`].

#![allow(
    dead_code,
    missing_docs,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss
)]

use std::collections::HashMap;
use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use larder_kernels::KvShape;
use larder_tiers::prefix::{Begin, Cached};
use larder_tiers::{Ask, Model, PrefixCache, Sequence};
use nix::sys::signal::{Signal, raise};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

// Tokens of a page, different tokens, tokens of an answer.
pub const PAGE: usize = 16;
pub const WORDS: u64 = 64;
const ANSWER: usize = 16;

pub type Fallible<T> = Result<T, Box<dyn Error>>;

/// The rows of K (part 0) and V (part 1) of each layer and position, as bytes of f32.
pub trait Rows {
    fn get(&self, part: u32, layer: u32, at: usize) -> Fallible<&[u8]>;
    fn put(&mut self, part: u32, layer: u32, at: usize, row: &[u8]) -> Fallible<()>;
}

impl Rows for Sequence {
    fn get(&self, part: u32, layer: u32, at: usize) -> Fallible<&[u8]> {
        Ok(self.row(part, layer, at)?)
    }
    fn put(&mut self, part: u32, layer: u32, at: usize, row: &[u8]) -> Fallible<()> {
        self.row_mut(part, layer, at)?.copy_from_slice(row);
        Ok(())
    }
}

/// Without a cache.
impl Rows for HashMap<(u32, u32, usize), Vec<u8>> {
    fn get(&self, part: u32, layer: u32, at: usize) -> Fallible<&[u8]> {
        Ok(&self[&(part, layer, at)])
    }
    fn put(&mut self, part: u32, layer: u32, at: usize, row: &[u8]) -> Fallible<()> {
        self.insert((part, layer, at), row.to_vec());
        Ok(())
    }
}

/// Square matrices of each layer: query, key, value, output, up, down. And a row per word.
pub struct Transformer {
    dim: usize,
    layers: Vec<[Vec<f32>; 6]>,
    words: Vec<f32>,
}

fn dot(a: &[f32], b: impl IntoIterator<Item = f32>) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn times(matrix: &[f32], vector: &[f32]) -> Vec<f32> {
    let rows = matrix.chunks_exact(vector.len());
    rows.map(|row| dot(row, vector.iter().copied())).collect()
}

fn norm(x: &[f32]) -> Vec<f32> {
    let length = (dot(x, x.iter().copied()) / x.len() as f32).sqrt() + 1e-6;
    x.iter().map(|value| value / length).collect()
}

fn add(to: &mut [f32], values: impl IntoIterator<Item = f32>) {
    to.iter_mut().zip(values).for_each(|(to, v)| *to += v);
}

fn floats(row: &[u8]) -> impl Iterator<Item = f32> + '_ {
    row.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b))
}

fn bytes(row: &[f32]) -> Vec<u8> {
    row.iter().flat_map(|value| value.to_le_bytes()).collect()
}

impl Transformer {
    pub fn new(layers: usize, dim: usize) -> Transformer {
        let mut dice = Pcg64Mcg::seed_from_u64(42);
        let mut matrix = |rows: usize| {
            let values = std::iter::repeat_with(|| dice.random_range(-0.5..0.5));
            values.take(rows * dim).collect()
        };
        let words = matrix(WORDS as usize);
        let mut layer = || std::array::from_fn(|_| matrix(dim));
        let layers = (0..layers).map(|_| layer()).collect();
        Transformer { dim, layers, words }
    }

    pub fn model(&self) -> Model {
        let (layers, dim) = (self.layers.len() as u32, self.dim as u32);
        let shape = KvShape::mha(layers, 1, dim, 4, PAGE as u32);
        Model::new("toy", "seed 42", "f32", shape.expect("small rows"))
    }

    /// Computes the rows of a token. Returns the most likely next token.
    pub fn forward(&self, rows: &mut impl Rows, token: u64, position: usize) -> Fallible<u64> {
        let mut x = self.words[token as usize * self.dim..][..self.dim].to_vec();
        let wave = |at: usize| (position as f32 / 1.2_f32.powi(at as i32)).sin();
        add(&mut x, (0..self.dim).map(wave));
        for (layer, [query, key, value, output, up, down]) in (0..).zip(&self.layers) {
            let input = norm(&x);
            rows.put(0, layer, position, &bytes(&times(key, &input)))?;
            rows.put(1, layer, position, &bytes(&times(value, &input)))?;
            let query = times(query, &input);
            let (mut mixed, mut sum) = (vec![0.0; self.dim], 0.0);
            for at in 0..=position {
                let weight = dot(&query, floats(rows.get(0, layer, at)?)).min(40.0).exp();
                let row = floats(rows.get(1, layer, at)?);
                add(&mut mixed, row.map(|v| v * weight));
                sum += weight;
            }
            mixed.iter_mut().for_each(|value| *value /= sum);
            add(&mut x, times(output, &mixed));
            let inner = times(up, &norm(&x)).into_iter().map(|v| v.max(0.0));
            add(&mut x, times(down, &inner.collect::<Vec<f32>>()));
        }
        let scores = times(&self.words, &norm(&x));
        let best = (0..).zip(scores).max_by(|(_, a), (_, b)| a.total_cmp(b));
        Ok(best.map_or(0, |(word, _)| word))
    }

    /// The prompt and its answer, computed without a cache.
    pub fn uncached(&self, prompt: &[u64], answer: usize) -> Vec<u64> {
        let (mut rows, mut tokens) = (HashMap::new(), prompt.to_vec());
        for position in 0..prompt.len() + answer - 1 {
            let word = self.forward(&mut rows, tokens[position], position);
            let is_last = position + 1 == tokens.len();
            tokens.extend(word.ok().filter(|_| is_last));
        }
        tokens
    }
}

/// A request of the batch: the prompt and the answer so far, and how many of them are computed.
struct Running {
    sequence: Sequence,
    tokens: Vec<u64>,
    computed: usize,
    words_left: usize,
    first_word: Duration,
}

/// Serves prompts in a continuous batch. Returns for each, in the order in which they end, its
/// tokens, the cached ones by tier, and the time to the first word.
fn serve(cache: &PrefixCache, toy: &Transformer, prompts: &[Vec<u64>]) -> Fallible<Vec<Served>> {
    let (begun, mut queue, mut batch, mut ended) = (Instant::now(), vec![], vec![], vec![]);
    for tokens in prompts.iter().cloned() {
        let waiting = cache.ask(&Ask::new(&tokens).reserved(ANSWER))?;
        queue.push((tokens, waiting));
    }
    while !(queue.is_empty() && batch.is_empty()) {
        for (tokens, waiting) in std::mem::take(&mut queue) {
            match waiting.try_begin()? {
                Begin::Later(waiting) => queue.push((tokens, waiting)),
                Begin::Ready(sequence) => batch.push(Running {
                    computed: sequence.cached().tokens(),
                    sequence,
                    tokens,
                    words_left: ANSWER,
                    first_word: Duration::ZERO,
                }),
            }
        }
        for running in &mut batch {
            // The rest of a page of the prompt, or one word.
            let page_end = (running.computed / PAGE + 1) * PAGE;
            let until = page_end.min(running.tokens.len());
            let mut word = 0;
            for at in running.computed..until {
                word = toy.forward(&mut running.sequence, running.tokens[at], at)?;
            }
            running.sequence.computed(until)?;
            running.computed = until;
            if until == running.tokens.len() {
                if running.words_left == ANSWER {
                    (running.first_word, _) = (begun.elapsed(), running.sequence.share()?);
                }
                running.tokens.push(word);
                running.sequence.push(word)?;
                running.words_left -= 1;
            }
        }
        for running in batch.extract_if(.., |running| running.words_left == 0) {
            let cached = running.sequence.cached();
            running.sequence.keep()?;
            ended.push((running.tokens, cached, running.first_word));
        }
    }
    Ok(ended)
}

type Served = (Vec<u64>, Cached, Duration);

/// Serves the prompts, prints the work, and compares the words.
fn show(from: &str, cache: &PrefixCache, toy: &Transformer, prompts: &[Vec<u64>]) -> Fallible<()> {
    let served = serve(cache, toy, prompts)?;
    let sum = |of: fn(&Served) -> usize| served.iter().map(of).sum::<usize>();
    let computed = sum(|(tokens, cached, _)| tokens.len() - 1 - cached.tokens());
    let [l1, l2, l3] = [sum(|s| s.1.l1), sum(|s| s.1.l2), sum(|s| s.1.l3)];
    let first_word = served.iter().map(|s| s.2).max().unwrap_or_default();
    print!("{from:<14} {computed:>8} {l1:>6} {l2:>6} {l3:>6} {first_word:>14.1?}");
    let is_right = |prompt: &Vec<u64>| served.iter().any(|s| s.0 == toy.uncached(prompt, ANSWER));
    assert!(
        prompts.iter().all(is_right),
        "words differ from the uncached run"
    );
    println!("  the same");
    Ok(())
}

fn main() -> Fallible<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, path, run] = arguments.as_slice() else {
        println!("prompts in     computed     L1     L2     L3     first word  words");
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("kv.store");
        let run = |name| Command::new(&arguments[0]).arg(&path).arg(name).status();
        assert!(!run("no tier")?.success() && run("L3, restarted")?.success());
        return Ok(());
    };
    let (toy, mut dice) = (Transformer::new(4, 64), Pcg64Mcg::seed_from_u64(7));
    let mut text = |tokens| (0..tokens).map(|_| dice.random_range(0..WORDS)).collect();
    let prompts: [Vec<u64>; 3] = [570, 590, 610].map(&mut text);
    let cache = PrefixCache::open(Path::new(path), 256 << 20, &toy.model(), 300, 600)?;
    show(run, &cache, &toy, &prompts)?;
    if run == "L3, restarted" {
        return Ok(cache.close()?);
    }
    show("L1", &cache, &toy, &prompts)?;
    cache.settle(Instant::now() + Duration::from_secs(10))?;
    cache.evict(usize::MAX)?;
    show("L2", &cache, &toy, &prompts)?;
    Ok(raise(Signal::SIGKILL)?)
}

//! The cost of the tree: match, insert and evict with a million pages in it, and its memory.
//!
//! Page sizes 1 and 64, prompts of 32,768 tokens (32,768 pages of size 1, 512 pages of size 64),
//! two shapes: each prompt is one node, or a chain of 512 nodes. *hot* matches the same prompt
//! repeatedly. *cold* matches a different prompt each time, so that none of it is in the
//! processor's caches. For comparison, in the same run: comparing 128 KiB, and hashing the keys of
//! a new tail. Eviction is also measured in a tree of one-page prompts below one root. The results
//! are the minimum and median of many rounds, because the load of a shared machine varies.
//!
//! `cargo run --release -p larder-tiers --example tree_speed`

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, missing_docs)]

use std::hint::black_box;
use std::time::Instant;

use larder_tiers::config::{Config, L3Write, WritePolicy};
use larder_tiers::core::{Core, Fence, Request};
use larder_tiers::prompt::{Prompt, Scope};

/// Tokens of the measured prompt.
const TOKENS: usize = 32_768;
/// Nodes of a multi-node prompt.
const NODES: usize = 512;
/// Pages in the tree.
const PAGES: usize = 1 << 20;
/// Pages per eviction.
const EVICTED: usize = 10_000;

fn main() {
    compare();
    for page_tokens in [1, 64] {
        for nodes in [1, NODES] {
            measure(page_tokens, nodes);
        }
    }
    siblings();
}

/// Measures the comparison of 128 KiB.
fn compare() {
    let ours: Vec<u32> = (0..TOKENS as u32).collect();
    let theirs = ours.clone();
    let times = repeat(1000, || {
        assert!(black_box(&ours) == black_box(&theirs));
    });
    println!("comparing {TOKENS} words: {times}");
}

/// Minimum and median of some times, in microseconds.
struct Times(Vec<f64>);

impl std::fmt::Display for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:.1} us (median {:.1})",
            self.0[0],
            self.0[self.0.len() / 2]
        )
    }
}

fn repeat(times: usize, mut what: impl FnMut()) -> Times {
    let mut taken: Vec<f64> = (0..times)
        .map(|_| {
            let started = Instant::now();
            what();
            started.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    taken.sort_by(f64::total_cmp);
    Times(taken)
}

/// A prompt with unique tokens.
fn prompt(core: &mut Core, number: usize, tokens: usize) -> Prompt {
    let mut prompt = core.prompt(&Scope::default());
    let own = (0..tokens as u64).map(|at| (number as u64) << 16 ^ at);
    core.extend_prompt(&mut prompt, own).unwrap();
    prompt
}

/// Runs a prompt to its end as a request that inserts in this number of steps.
fn run(core: &mut Core, prompt: Prompt, steps: usize) -> Request {
    let tokens = prompt.words().len();
    let mut request = core.start(prompt, 0);
    while request.tokens() < tokens {
        let more = (tokens / steps).min(tokens - request.tokens());
        core.extend(&mut request, more).unwrap();
        core.insert(&mut request, Fence(0)).unwrap();
    }
    request
}

/// A core that copies nothing to L2, so that only the tree is measured.
fn core(page_tokens: u32, pages: usize) -> Core {
    let mut config = Config::new(page_tokens, 4096, pages as u32, 1);
    config.write_policy = WritePolicy::WriteThroughSelective;
    config.selective_hits = u32::MAX;
    config.l3_write = L3Write::Never;
    Core::new(config).unwrap()
}

/// One-page prompts without a common prefix.
fn siblings() {
    let mut core = core(64, PAGES);
    for number in 0..PAGES {
        let mut prompt = core.prompt(&Scope::default());
        core.extend_prompt(&mut prompt, [number as u64; 64])
            .unwrap();
        let request = run(&mut core, prompt, 1);
        core.finish(request, false, Fence(0));
    }
    println!("\npage size 64, {PAGES} prompts of one page below one root");
    evict(&mut core);
}

fn measure(page_tokens: u32, nodes: usize) {
    let per_prompt = TOKENS / page_tokens as usize;
    let prompts = PAGES / per_prompt;
    let mut core = core(page_tokens, PAGES + 2 * per_prompt);
    let all: Vec<Prompt> = (0..prompts)
        .map(|number| prompt(&mut core, number, TOKENS))
        .collect();
    for prompt in &all {
        let request = run(&mut core, prompt.clone(), nodes);
        core.finish(request, false, Fence(0));
    }
    let counts = core.counts();
    println!(
        "\npage size {page_tokens}, {nodes} nodes a prompt: {} pages in {} nodes",
        counts.l1_pages, counts.nodes
    );
    println!(
        "  memory: {:.0} bytes a page without tokens",
        core.tree_bytes() as f64 / counts.l1_pages as f64
    );

    let hot = repeat(300, || {
        black_box(core.match_prefix(&all[0]));
    });
    println!("  match, hot: {hot}");
    let mut next = 0;
    let cold = repeat(300, || {
        next = (next + 1) % all.len();
        black_box(core.match_prefix(&all[next]));
    });
    println!("  match, cold: {cold}");
    inserts(&mut core, &all, per_prompt);
    evict(&mut core);
}

fn inserts(core: &mut Core, all: &[Prompt], per_prompt: usize) {
    // All hits: a second request with the same prompt, whose keys are already hashed.
    let page_tokens = TOKENS / per_prompt;
    let mut request = run(core, all[0].clone(), 1);
    let mut rounds = Vec::new();
    for _ in 0..100 {
        let started = Instant::now();
        core.insert(&mut request, Fence(0)).unwrap();
        rounds.push(started.elapsed().as_secs_f64() * 1e6);
    }
    rounds.sort_by(f64::total_cmp);
    println!("  insert, all hit: {}", Times(rounds));
    // The same with a forward in progress, including its end.
    let mut forward = 0;
    let rounds = repeat(100, || {
        forward += 1;
        core.insert(&mut request, Fence(forward)).unwrap();
        core.forwards_ended(Fence(forward));
    });
    println!("  insert, all hit, and the end of its forward: {rounds}");
    core.finish(request, false, Fence(forward));
    // Half of the prompt is new: the time without hashing, and the time of hashing.
    let (mut taken, mut hashed) = (Vec::new(), Vec::new());
    for round in 0..20 {
        let mut fresh = core.prompt(&Scope::default());
        let half = TOKENS / 2;
        let old = (0..half as u64).map(|at| ((round % all.len()) as u64) << 16 ^ at);
        core.extend_prompt(&mut fresh, old).unwrap();
        let own = (half as u64..TOKENS as u64).map(|at| (500_000 + round as u64) << 16 ^ at);
        core.extend_prompt(&mut fresh, own.map(|token| token % 0xe000_0000))
            .unwrap();
        let mut request = core.start(fresh, 0);
        let left = TOKENS - request.tokens();
        core.extend(&mut request, left).unwrap();
        let started = Instant::now();
        core.hash_prompt(request.prompt_mut());
        hashed.push(started.elapsed().as_secs_f64() * 1e6);
        let started = Instant::now();
        core.insert(&mut request, Fence(0)).unwrap();
        taken.push(started.elapsed().as_secs_f64() * 1e6);
        core.finish(request, false, Fence(0));
        core.evict(half / page_tokens);
    }
    taken.sort_by(f64::total_cmp);
    hashed.sort_by(f64::total_cmp);
    println!(
        "  insert, half of it new: {}, and its keys: {}",
        Times(taken),
        Times(hashed)
    );
}

fn evict(core: &mut Core) {
    let times = repeat(20, || {
        black_box(core.evict(EVICTED));
    });
    println!("  evicting {EVICTED} pages: {times}");
}

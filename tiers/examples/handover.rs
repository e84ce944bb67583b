//! Hand-overs from a prefill process to a decode process on one store, timed: through memory that
//! the prefill process lends, and through the store, beside a memcpy of the same bytes.
//!
//!     cargo run --release -p larder-tiers --example handover [DIRECTORY]
//!
//! The rows are those of a model with 16 layers of 8 heads of 64 values in bf16: 32 KiB a token.
//! The time begins when the prefill process has computed all rows, which is the worst case, and
//! ends when the decode process has the rows of all layers and the first token.

#![allow(missing_docs, clippy::cast_precision_loss)]

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use larder_kernels::KvShape;
use larder_tiers::handover::{Decode, Offer, Prefill, Taken};
use larder_tiers::{Ask, Model, PrefixCache, PrefixOptions, Sequence};
use rustix::time::{ClockId, clock_gettime};

const PAGE: usize = 64;
const LAYERS: u32 = 16;
const L1_PAGES: u32 = 200;
const TOKENS: [usize; 3] = [64, 1024, 8192];
const REPEATS: usize = 5;
const TIME: Duration = Duration::from_secs(60);

type Fallible<T> = Result<T, Box<dyn Error>>;

fn model() -> Fallible<Model> {
    let shape = KvShape::mha(LAYERS, 8, 64, 2, 64)?;
    Ok(Model::new("rows", "of no weights", "bf16", shape))
}

fn open(directory: &Path) -> Fallible<PrefixCache> {
    let options = PrefixOptions::new(&model()?, L1_PAGES, 420).with(|o| {
        o.config.prefetch.l2_percent_max = 100;
        o.config.prefetch.timeout_base_us = 60_000_000;
    });
    let cache = options.open(&directory.join("kv.store"), 4 << 30)?;
    warm(&cache)?;
    Ok(cache)
}

/// Touches all of L1: the first touch of memory takes longer than a copy.
fn warm(cache: &PrefixCache) -> Fallible<()> {
    let tokens = prompt(L1_PAGES as usize * PAGE, 0);
    let mut sequence = cache.begin(&tokens)?;
    (0..LAYERS).try_for_each(|layer| compute(&mut sequence, &tokens, layer))
}

/// Nanoseconds on the clock that both processes have.
fn now() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

fn prompt(tokens: usize, seed: u64) -> Vec<u64> {
    (0..tokens as u64)
        .map(|at| (at * 31 + seed * 7) % 30_000 + seed)
        .collect()
}

/// The bytes of a row.
fn value(tokens: &[u64], layer: u32, at: usize) -> [u8; 8] {
    (tokens[at] * 1000 + u64::from(layer)).to_le_bytes()
}

/// Stands for a forward of one layer.
fn compute(sequence: &mut Sequence, tokens: &[u64], layer: u32) -> Fallible<()> {
    for at in sequence.cached().tokens()..tokens.len() {
        for part in 0..2 {
            let row = sequence.row_mut(part, layer, at)?;
            let value = value(tokens, layer, at);
            row.chunks_exact_mut(8)
                .for_each(|to| to.copy_from_slice(&value));
        }
    }
    Ok(())
}

/// Whether all rows are those of the prefill process.
fn check(sequence: &Sequence, tokens: &[u64]) -> Fallible<()> {
    for layer in 0..LAYERS {
        for at in 0..tokens.len() {
            let row = sequence.row(at as u32 % 2, layer, at)?;
            assert!(
                row.ends_with(&value(tokens, layer, at)),
                "layer {layer}, token {at}"
            );
        }
    }
    Ok(())
}

/// A request of a prefill process, as an engine makes it: each layer is handed over when it is
/// computed.
fn offered(prefill: &Prefill, cache: &PrefixCache, id: &str, tokens: &[u64]) -> Fallible<Offer> {
    let mut sequence = cache.begin(tokens)?;
    let from = sequence.cached().tokens();
    let mut offer = prefill.offer(id, &sequence, from, TIME)?;
    for layer in 0..LAYERS {
        compute(&mut sequence, tokens, layer)?;
        offer.layer(&sequence, layer, tokens.len())?;
    }
    sequence.computed(tokens.len())?;
    let first_token = 7;
    offer.end(first_token, b"temperature 0.6")?;
    sequence.keep()?;
    Ok(offer) // offer.wait() learns whether it was taken; a drop takes it back
}

/// A request of a decode process.
fn taken(decode: &Decode, id: &str, tokens: &[u64]) -> Fallible<Sequence> {
    let patience = TIME / 2; // for pages that go through the store
    let taking = decode.take(id, &Ask::new(tokens).reserved(100), patience, TIME)?;
    let Taken {
        mut sequence,
        computed,
        token,
        data,
    } = taking.wait()?;
    assert_eq!(
        (computed, token, data.as_slice()),
        (tokens.len(), 7, &b"temperature 0.6"[..])
    );
    sequence.push(token)?; // the first step is launched now, each layer behind its tickets
    Ok(sequence)
}

/// The decode process: takes requests, and prints when it has all rows of one.
fn serve(directory: &Path) -> Fallible<()> {
    let cache = open(directory)?;
    let decode = Decode::new(&directory.join("handover.sock"), &cache)?;
    let mut line = String::new();
    println!("open");
    while std::io::stdin().read_line(&mut line)? > 0 {
        let mut words = line.split_whitespace();
        let id = words.next().ok_or("no request")?;
        let (tokens, seed) = (words.next().ok_or("no tokens")?.parse()?, id.parse()?);
        let tokens = prompt(tokens, seed);
        println!("taking");
        let sequence = taken(&decode, id, &tokens)?;
        let slots = sequence.slots()?;
        for layer in 0..LAYERS {
            slots.tickets(layer).try_for_each(|ticket| ticket.wait())?;
        }
        let over = now();
        check(&sequence, &tokens)?;
        drop(sequence);
        cache.evict(usize::MAX)?;
        println!("{over}");
        line.clear();
    }
    Ok(())
}

/// Milliseconds of a hand-over of all rows, from the end of their computation.
fn handed_over(node: &mut Node<'_>, tokens: usize, from: usize, id: u64) -> Fallible<f64> {
    let prompt = prompt(tokens, id);
    let mut sequence = node.cache.begin(&prompt)?;
    for layer in 0..LAYERS {
        compute(&mut sequence, &prompt, layer)?;
    }
    sequence.computed(tokens)?;
    writeln!(node.to, "{id} {tokens}")?;
    node.line()?;
    let begun = now();
    if from > 0 {
        sequence.share()?;
    }
    let mut offer = node.prefill.offer(&id.to_string(), &sequence, from, TIME)?;
    offer.layers(&sequence, tokens)?;
    offer.end(7, b"temperature 0.6")?;
    offer.wait()?;
    let over: i64 = node.line()?.parse()?;
    drop(sequence);
    Ok((over - begun) as f64 / 1e6)
}

struct Node<'n> {
    cache: &'n PrefixCache,
    prefill: &'n Prefill,
    to: std::process::ChildStdin,
    from: BufReader<std::process::ChildStdout>,
}

impl Node<'_> {
    fn line(&mut self) -> Fallible<String> {
        let mut line = String::new();
        match self.from.read_line(&mut line)? {
            0 => Err("the decode process has ended".into()),
            _ => Ok(line.trim().to_owned()),
        }
    }
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

fn main() -> Fallible<()> {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, role, directory] = arguments.as_slice()
        && role == "decode"
    {
        return serve(Path::new(directory));
    }
    let parent = arguments.get(1).map_or_else(std::env::temp_dir, Into::into);
    let directory = tempfile::tempdir_in(parent)?;
    let cache = open(directory.path())?;
    let page_bytes = u64::from(model()?.shape().page_bytes());
    let pages = TOKENS[2].div_ceil(PAGE) as u64;
    let socket = directory.path().join("handover.sock");
    let prefill = Prefill::bind(&socket, &cache, pages * page_bytes)?;
    let mut decode = Command::new(&arguments[0])
        .arg("decode")
        .arg(directory.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut node = Node {
        cache: &cache,
        prefill: &prefill,
        to: decode.stdin.take().ok_or("no pipe")?,
        from: BufReader::new(decode.stdout.take().ok_or("no pipe")?),
    };
    node.line()?;
    println!("tokens      MiB    memcpy   through memory    ratio   through the store");
    let mut id = 0;
    for tokens in TOKENS {
        let bytes = tokens * (page_bytes as usize / PAGE);
        let (from, mut to) = (vec![1_u8; bytes], vec![2_u8; bytes]);
        let (mut copied, mut lent, mut stored) = (vec![], vec![], vec![]);
        for repeat in 0..=REPEATS {
            let begun = Instant::now();
            to.copy_from_slice(std::hint::black_box(&from));
            let copy = begun.elapsed().as_secs_f64() * 1e3;
            std::hint::black_box(&to);
            id += 2;
            let by_memory = handed_over(&mut node, tokens, 0, id)?;
            let by_store = handed_over(&mut node, tokens, tokens - 1, id + 1)?;
            cache.settle(Instant::now() + TIME)?;
            cache.evict(usize::MAX)?;
            // The decode process maps the memory in the first one.
            if repeat > 0 {
                copied.push(copy);
                lent.push(by_memory);
                stored.push(by_store);
            }
        }
        let (copied, lent, stored) = (median(copied), median(lent), median(stored));
        println!(
            "{tokens:>6} {:>8.0} {copied:>7.2}ms {lent:>14.2}ms {:>8.2} {stored:>17.2}ms   {}",
            bytes as f64 / 1048576.0,
            lent / copied,
            match lent <= 2.0 * copied + 2.0 {
                true => "at most twice the memcpy and 2 ms",
                false => "more than twice the memcpy and 2 ms",
            }
        );
    }
    // A request as an engine makes it, layer by layer.
    let tokens = prompt(1000, 0);
    writeln!(node.to, "0 1000")?;
    node.line()?;
    let offer = offered(&prefill, &cache, "0", &tokens)?;
    offer.wait()?;
    node.line()?;
    drop(node);
    assert!(decode.wait()?.success());
    Ok(())
}

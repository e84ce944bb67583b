//! An engine on a GPU over [`PrefixCache`]: forwards are launched behind the loads of their cached
//! pages, and the host waits only for words. A batch of requests decodes with speculation.
//!
//! `cargo run --release -p larder-tiers --example gpu_engine [ROUNDS]`, or `-- --fake` on a driver
//! without a GPU. All words are compared with the model on the CPU, which has no KV: each word
//! follows from every byte of the KV that the forward read. The last lines are times: a forward
//! alone, the loads of its pages alone, and the forward behind the loads.
//!
//! The model ([`Forward`]) is a stand-in. The draft is the right answer with every third word
//! wrong, so each pass accepts some of it. [`Engine::launch`] and [`serve`] are what an engine
//! needs; `docs/embedding.md` explains the calls.
//!
//! Exit code 1: on a GPU, forward and loads together took more than 1.10 of the longer one. Exit
//! code 3: no GPU.

#![allow(dead_code, missing_docs)]

use std::error::Error;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_fake_cuda::driver::{Steering, fake};
use larder_fake_cuda::forward::{Forward, Pass};
use larder_fake_cuda::model::{WORDS, answered};
use larder_kernels::cuda::Choice;
use larder_kernels::{CudaDevice, CudaOptions, Device, KvShape};
use larder_tiers::prefix::{Begin, Cached, L1Memory};
use larder_tiers::{Ask, Model, PrefixCache, PrefixOptions, Sequence};

pub type Fallible<T> = Result<T, Box<dyn Error>>;

/// Words of an answer, and most words of a draft.
const ANSWER: usize = 16;
const DRAFT: usize = 4;

/// The longest that forward and loads together may take, in parts of the longer one.
const TOGETHER_MAX: f64 = 1.10;

/// What is served.
#[derive(Clone, Copy)]
pub struct Size {
    shape: KvShape,
    l1_pages: u32,
    /// Tokens of the shortest prompt.
    prompt: usize,
    /// Tokens of a pass, and threads for each.
    pass: usize,
    threads: u32,
    store_bytes: u64,
    /// Cached pages of the measured prompt.
    measured: usize,
}

impl Size {
    /// For a driver on the CPU.
    pub fn small() -> Fallible<Size> {
        Ok(Size {
            shape: KvShape::mha(3, 1, 8, 2, 4)?,
            l1_pages: 64,
            prompt: 41,
            pass: 16,
            threads: 4,
            store_bytes: 256 << 20,
            measured: 12,
        })
    }

    /// Pages of 8 MiB.
    pub fn large() -> Fallible<Size> {
        Ok(Size {
            shape: KvShape::mha(32, 8, 128, 2, 64)?,
            l1_pages: 256,
            prompt: 1000,
            pass: 512,
            threads: 1024,
            store_bytes: 4 << 30,
            measured: 64,
        })
    }
}

pub struct Engine {
    size: Size,
    device: Arc<CudaDevice>,
    forward: Forward,
}

/// A request of the batch: the prompt and the answer so far.
struct Running {
    sequence: Sequence,
    tokens: Vec<u64>,
    /// Tokens of the prompt, and the prompt with its right answer.
    prompt: usize,
    right: Vec<u64>,
    /// Tokens whose rows are computed: all but the last, when the prompt is.
    computed: usize,
    first_word: Option<Duration>,
    drafted: usize,
    accepted: usize,
}

pub struct Served {
    tokens: Vec<u64>,
    right: Vec<u64>,
    cached: Cached,
    first_word: Duration,
    drafted: usize,
    accepted: usize,
}

impl Engine {
    pub fn new(size: Size, options: &CudaOptions) -> Fallible<Engine> {
        let device = Arc::new(CudaDevice::open(options)?);
        let forward = Forward::new(&size.shape, size.pass, size.threads);
        Ok(Engine {
            size,
            device,
            forward,
        })
    }

    /// The options of a cache with L1 on the device. An engine that has tensors of its own passes
    /// them to `Device::adopt_l1`.
    fn options(&self) -> Fallible<PrefixOptions> {
        let (shape, pages) = (&self.size.shape, self.size.l1_pages);
        let l1 = self.device.alloc_l1(shape, pages + 1)?;
        let model = Model::new("toy on a GPU", "1", "u64", *shape);
        Ok(PrefixOptions::new(&model, pages, pages * 2).with(|o| {
            o.l1 = Some(L1Memory::Pool(self.device.clone(), l1));
        }))
    }

    /// Launches a forward for the tokens from place `from` to `until`: each layer behind the loads
    /// of its cached rows, in the stream. The host waits for nothing.
    fn launch(
        &self,
        cache: &PrefixCache,
        sequence: &mut Sequence,
        tokens: &[u64],
        (from, until): (usize, usize),
    ) -> Fallible<Pass> {
        let stream = self.forward.stream();
        let slots = sequence.slots()?;
        let mut pass = self.forward.pass(from, &tokens[from..until], slots.pages());
        let launched = (0..self.size.shape.layers()).try_for_each(|layer| {
            for ticket in slots.tickets(layer) {
                self.device.hold(stream, &ticket)?;
            }
            self.forward.layer(&mut pass, cache.l1(), layer);
            Ok::<(), larder_kernels::DeviceError>(())
        });
        self.forward.output(&mut pass);
        // What was launched is reported in any case: later loads into these pages wait for it.
        let ticket = self.device.record(stream)?;
        sequence.computed_by(until, &ticket)?;
        launched?;
        Ok(pass)
    }

    /// The next tokens to compute of a request: a part of its prompt, or its last word with a
    /// draft behind it.
    fn launch_next(&self, cache: &PrefixCache, running: &mut Running) -> Fallible<Pass> {
        let mut tokens = running.tokens.clone();
        if running.computed + 1 == tokens.len() {
            // The draft: its tokens have slots, as if they were right.
            let known = tokens.len();
            let until = (known + DRAFT).min(running.right.len() - 1);
            let draft = (known..until).map(|at| match at % 3 {
                0 => (running.right[at] + 1) % WORDS,
                _ => running.right[at],
            });
            tokens.extend(draft);
            for token in &tokens[known..] {
                running.sequence.push(*token)?;
            }
            running.drafted += tokens.len() - known;
        }
        let until = tokens.len().min(running.computed + self.size.pass);
        let from = running.computed;
        let pass = self.launch(cache, &mut running.sequence, &tokens, (from, until))?;
        running.computed = until;
        running.tokens = tokens;
        Ok(pass)
    }

    /// Takes the words of the pass of a request: those behind right tokens of the draft are right,
    /// and the first one after them. The rest is taken back.
    fn take(
        &self,
        running: &mut Running,
        pass: Pass,
        known: usize,
        begun: Instant,
    ) -> Fallible<()> {
        let from = running.computed - pass.tokens();
        let words = pass.words();
        if running.computed < known {
            return Ok(());
        }
        // All loads and forwards behind the words have ended, so the check comes at once.
        while !running.sequence.verify()? {}
        let draft = &running.tokens[known..];
        let right = (known..)
            .zip(draft)
            .take_while(|(at, d)| words[at - 1 - from] == **d);
        let right = right.count();
        running.accepted += right;
        running.computed = known + right;
        running.tokens.truncate(known + right);
        let stream = self.forward.stream();
        running.sequence.truncate_on(known + right, stream)?;
        running.tokens.push(words[known + right - 1 - from]);
        running.sequence.push(words[known + right - 1 - from])?;
        if running.first_word.is_none() {
            // Other requests find the pages of the prompt. Tokens of the draft are taken back
            // before, while their pages are own ones: no row is copied.
            running.first_word = Some(begun.elapsed());
            running.sequence.share()?;
        }
        Ok(())
    }
}

/// Serves prompts in a continuous batch. Each step launches a forward of every request, one behind
/// the other, and then takes their words.
fn serve(cache: &PrefixCache, engine: &Engine, prompts: &[Vec<u64>]) -> Fallible<Vec<Served>> {
    let (begun, mut queue, mut batch, mut ended) = (Instant::now(), vec![], vec![], vec![]);
    for tokens in prompts.iter().cloned() {
        let waiting = cache.ask(&Ask::new(&tokens).reserved(ANSWER + DRAFT))?;
        queue.push((tokens, waiting));
    }
    while !(queue.is_empty() && batch.is_empty()) {
        for (tokens, waiting) in std::mem::take(&mut queue) {
            match waiting.try_begin()? {
                Begin::Later(waiting) => queue.push((tokens, waiting)),
                Begin::Ready(sequence) => batch.push(Running {
                    computed: sequence.cached().tokens(),
                    sequence,
                    prompt: tokens.len(),
                    right: answered(&engine.size.shape, &tokens, ANSWER),
                    tokens,
                    first_word: None,
                    drafted: 0,
                    accepted: 0,
                }),
            }
        }
        let mut launched = Vec::new();
        for running in &mut batch {
            let known = running.tokens.len();
            launched.push((known, engine.launch_next(cache, running)?));
        }
        for (running, (known, pass)) in batch.iter_mut().zip(launched) {
            engine.take(running, pass, known, begun)?;
        }
        let is_full = |running: &mut Running| running.tokens.len() >= running.prompt + ANSWER;
        for running in batch.extract_if(.., is_full) {
            let cached = running.sequence.cached();
            running.sequence.keep()?;
            ended.push(Served {
                tokens: running.tokens,
                right: running.right,
                cached,
                first_word: running.first_word.unwrap_or_default(),
                drafted: running.drafted,
                accepted: running.accepted,
            });
        }
    }
    Ok(ended)
}

/// Serves the prompts, prints the work, and compares the words.
fn show(from: &str, cache: &PrefixCache, engine: &Engine, prompts: &[Vec<u64>]) -> Fallible<()> {
    let served = serve(cache, engine, prompts)?;
    let sum = |of: fn(&Served) -> usize| served.iter().map(of).sum::<usize>();
    let [l1, l2, l3] = [
        sum(|s| s.cached.l1),
        sum(|s| s.cached.l2),
        sum(|s| s.cached.l3),
    ];
    let prompt = served
        .iter()
        .map(|s| s.tokens.len() - ANSWER)
        .sum::<usize>();
    let first_word = served.iter().map(|s| s.first_word).max();
    print!(
        "{from:<12} {:>8} {l1:>6} {l2:>6} {l3:>6} {:>7} {:>8} {:>12.1?}",
        prompt - l1 - l2 - l3,
        sum(|s| s.drafted),
        sum(|s| s.accepted),
        first_word.unwrap_or_default(),
    );
    assert!(served.iter().all(|s| s.tokens == s.right), "wrong words");
    println!("  the same");
    Ok(())
}

/// Edits of a prompt: its last tokens are taken back to the middle of each page. The pages are
/// shared, so the rows before are copied to an own page, in the stream of the forwards.
fn edit(cache: &PrefixCache, engine: &Engine, prompt: &[u64]) -> Fallible<()> {
    let page = engine.size.shape.page_tokens() as usize;
    let mut edits = 0;
    for kept in (page / 2..prompt.len() - page).step_by(page) {
        let waiting = cache.ask(&Ask::new(prompt).reserved(ANSWER))?;
        let mut sequence = waiting.begin_within(PATIENCE)?;
        assert!(sequence.cached().tokens() > kept, "the prompt is cached");
        // The loads of the shared pages have ended when it is verified.
        while !sequence.verify()? {}
        sequence.truncate_on(kept, engine.forward.stream())?;
        let mut tokens = prompt[..kept].to_vec();
        for token in [3, 1, 4, 1, 5] {
            tokens.push(token);
            sequence.push(token)?;
        }
        let new = (kept, tokens.len());
        let words = engine.launch(cache, &mut sequence, &tokens, new)?.words();
        while !sequence.verify()? {}
        let right = answered(&engine.size.shape, &tokens, 1);
        assert_eq!(words.last(), right.last(), "behind {kept} kept tokens");
        edits += 1;
    }
    println!("{edits} edits within shared pages: the same");
    Ok(())
}

/// Longest wait for pages and copies.
const PATIENCE: Duration = Duration::from_secs(60);

fn settle(cache: &PrefixCache) -> Fallible<()> {
    match cache.settle(Instant::now() + PATIENCE)? {
        true => Ok(()),
        false => Err("copies and writes of the cache do not end".into()),
    }
}

/// Words from all tiers.
pub fn words(engine: &Engine, store: &Path) -> Fallible<()> {
    let cache = engine.options()?.open(store, engine.size.store_bytes)?;
    let prompts: Vec<Vec<u64>> = (0..3)
        .map(|number| prompt(engine.size.prompt + number * 7, number))
        .collect();
    println!("prompts in   computed     L1     L2     L3 drafted accepted   first word  words");
    show("no tier", &cache, engine, &prompts)?;
    show("L1", &cache, engine, &prompts)?;
    settle(&cache)?;
    cache.evict(usize::MAX)?;
    show("L2", &cache, engine, &prompts)?;
    settle(&cache)?;
    cache.reset()?;
    show("L3", &cache, engine, &prompts)?;
    edit(&cache, engine, &prompts[0])?;
    // The end of the cache frees the memory that forwards and copies use.
    engine.forward.wait();
    Ok(cache.close()?)
}

/// The tokens of a prompt.
fn prompt(tokens: usize, number: usize) -> Vec<u64> {
    let token = |at: usize| (at as u64 * 7919 + number as u64 * 104_729) % WORDS;
    (0..tokens).map(token).collect()
}

/// Milliseconds of a forward behind cached pages: alone, its loads alone, and both.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Times {
    forward: f64,
    loads: f64,
    together: f64,
}

impl Times {
    fn ratio(&self) -> f64 {
        self.together / self.forward.max(self.loads)
    }
}

/// Prints the times of some rounds. Returns the median of their ratios.
pub fn times(engine: &Engine, rounds: usize) -> Fallible<f64> {
    let cache = engine.options()?.over(None)?;
    let shape = &engine.size.shape;
    let cached = engine.size.measured * shape.page_tokens() as usize;
    let mut tokens = prompt(cached + engine.size.pass, 9);
    let mut sequence = cache.begin(&tokens[..=cached])?;
    for from in (0..cached).step_by(engine.size.pass) {
        let until = cached.min(from + engine.size.pass);
        engine.launch(&cache, &mut sequence, &tokens, (from, until))?;
    }
    sequence.keep()?;
    settle(&cache)?;
    // A forward that takes about as long as its loads: the hardest case for both together.
    let probe = 8.min(engine.size.pass);
    tokens.truncate(cached + probe);
    let first = measured(&cache, engine, &tokens)?;
    let more = (first.loads / first.forward * probe as f64) as usize;
    tokens = prompt(cached + more.clamp(1, engine.size.pass), 9);
    let mut all = Vec::new();
    for _ in 0..rounds {
        all.push(measured(&cache, engine, &tokens)?);
    }
    all.sort_by(|one, other| one.ratio().total_cmp(&other.ratio()));
    let median = all[rounds / 2];
    println!(
        "{} tokens behind {cached} cached ones ({:.0} MB): forward {:.3} ms, loads {:.3} ms, \
         together {:.3} ms: {:.3} of the longer one (median of {rounds} rounds)",
        tokens.len() - cached,
        (u64::from(shape.page_bytes()) * engine.size.measured as u64) as f64 / 1e6,
        median.forward,
        median.loads,
        median.together,
        median.ratio(),
    );
    cache.close()?;
    Ok(median.ratio())
}

/// One round. By the clock of the device, from before the begin of the request.
fn measured(cache: &PrefixCache, engine: &Engine, tokens: &[u64]) -> Fallible<Times> {
    let stream = engine.forward.stream();
    let last_layer = engine.size.shape.layers() - 1;
    let round = |has_loads: bool, has_forward: bool| {
        settle(cache)?;
        if has_loads {
            cache.evict(usize::MAX)?;
        }
        let start = engine.forward.mark();
        let mut sequence = cache.begin(tokens)?;
        let cached = sequence.cached();
        let expected = cached.tokens() / engine.size.shape.page_tokens() as usize;
        assert!(
            expected == engine.size.measured && (cached.l2 > 0) == has_loads,
            "{cached:?}"
        );
        if has_forward {
            let from = cached.tokens();
            drop(engine.launch(cache, &mut sequence, tokens, (from, tokens.len()))?);
        } else {
            for ticket in sequence.slots()?.tickets(last_layer) {
                engine.device.hold(stream, &ticket)?;
            }
        }
        let end = engine.forward.mark();
        engine.forward.wait();
        Fallible::Ok(end.ms_since(&start))
    };
    Ok(Times {
        forward: round(false, true)?,
        loads: round(true, false)?,
        together: round(true, true)?,
    })
}

/// Everything, on a driver without a GPU. The environment of the process must name it.
pub fn on_the_fake() -> Fallible<()> {
    // Its clock is its own: copies are as slow as the reads of its kernels.
    Steering::new().speeds([1000; 3]);
    let options = CudaOptions {
        choice: Choice::Published,
        ..CudaOptions::default()
    };
    let engine = Engine::new(Size::small()?, &options)?;
    let directory = tempfile::tempdir()?;
    words(&engine, &directory.path().join("kv.store"))?;
    times(&engine, 1).map(drop)
}

fn on_a_gpu(rounds: usize) -> Fallible<ExitCode> {
    let engine = match Engine::new(Size::large()?, &CudaOptions::default()) {
        Ok(engine) => engine,
        Err(error) => {
            println!("{error}");
            return Ok(ExitCode::from(3));
        }
    };
    println!("{}", engine.device.name());
    let directory = tempfile::tempdir()?;
    words(&engine, &directory.path().join("kv.store"))?;
    let is_good = times(&engine, rounds)? <= TOGETHER_MAX;
    Ok(ExitCode::from(u8::from(!is_good)))
}

fn main() -> Fallible<ExitCode> {
    /// Set in the process that has the fake.
    const INSIDE: &str = "LARDER_GPU_ENGINE_FAKE";
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("--fake") if std::env::var_os(INSIDE).is_some() => {
            on_the_fake()?;
            Ok(ExitCode::SUCCESS)
        }
        Some("--fake") => {
            // The driver is loaded by its name, from the directories of the environment.
            let directory = fake().ok_or("there is no fake driver")?;
            let mut inside = Command::new(std::env::current_exe()?);
            inside.args(&arguments[1..]).env(INSIDE, "1");
            let ended = inside.env("LD_LIBRARY_PATH", directory).status()?;
            Ok(ExitCode::from(u8::from(!ended.success())))
        }
        rounds => on_a_gpu(rounds.map_or(Ok(7), str::parse)?),
    }
}

//! An engine of several ranks in one thread: a toy transformer for each head, whose words add up.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use larder_kernels::{ChunkAt, Device, HostDevice, KvShape, L1Pool};
use larder_tiers::l3::L3;
use larder_tiers::prefix::L1Memory;
use larder_tiers::transfer::{
    Ended, Patience, Room, Sending, State, TcpOptions, TcpTransport, Transfer, Transport,
};
use larder_tiers::{Ask, Model, PrefixCache, PrefixOptions, Sequence};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::PATIENCE;
use super::engine::{Fallible, PAGE, Rows, Transformer, WORDS};
use super::memory::Memory;

pub const HEADS: u32 = 8;
const HEAD_BYTES: usize = 32;
pub const ANSWER: usize = 4;

pub fn heads_of(rank: u32, ranks: u32) -> Range<u32> {
    let each = HEADS / ranks;
    rank * each..(rank + 1) * each
}

pub fn model(name: &str, rank: u32, ranks: u32) -> Model {
    let shape = KvShape::mha(2, HEADS, 8, 4, PAGE as u32).unwrap();
    let model = Model::new(name, "seed 42", "f32", shape);
    model.heads(heads_of(rank, ranks)).unwrap()
}

pub fn text(seed: u64, tokens: usize) -> Vec<u64> {
    let mut dice = Pcg64Mcg::seed_from_u64(seed);
    (0..tokens).map(|_| dice.random_range(0..WORDS)).collect()
}

/// The token whose rows a head has.
fn own(token: u64, head: u32) -> u64 {
    (token + u64::from(head)) % WORDS
}

/// The rows of one head of a sequence, and L1 if it is on a device.
struct Head<'s>(&'s mut Sequence, usize, Option<&'s L1Pool>);

impl Head<'_> {
    /// The row of a device, which has L1 in the memory of this process.
    fn place(&self, l1: &L1Pool, part: u32, layer: u32, at: usize) -> *mut u8 {
        let slots = self.0.slots().unwrap();
        slots
            .tickets(layer)
            .for_each(|ticket| ticket.wait().unwrap());
        let page = slots.pages()[at / PAGE];
        let start = l1.address(ChunkAt { part, layer, page }).unwrap() as usize;
        let row = start + at % PAGE * l1.shape().row_bytes() as usize;
        std::ptr::with_exposed_provenance_mut(row + self.1 * HEAD_BYTES)
    }
}

impl Rows for Head<'_> {
    fn get(&self, part: u32, layer: u32, at: usize) -> Fallible<&[u8]> {
        if let Some(l1) = self.2 {
            let row = self.place(l1, part, layer, at);
            // SAFETY: values of a row of the sequence. Its loads have ended. No transfer has it.
            return Ok(unsafe { std::slice::from_raw_parts(row, HEAD_BYTES) });
        }
        let row = self.0.row(part, layer, at)?;
        Ok(&row[self.1 * HEAD_BYTES..][..HEAD_BYTES])
    }

    fn put(&mut self, part: u32, layer: u32, at: usize, row: &[u8]) -> Fallible<()> {
        if let Some(l1) = self.2 {
            let own = self.place(l1, part, layer, at);
            // SAFETY: as above; the row is of an own page.
            unsafe { own.copy_from_nonoverlapping(row.as_ptr(), HEAD_BYTES) };
            return Ok(());
        }
        let own = self.0.row_mut(part, layer, at)?;
        own[self.1 * HEAD_BYTES..][..HEAD_BYTES].copy_from_slice(row);
        Ok(())
    }
}

/// The prompt and its answer, computed without a cache.
pub fn uncached(prompt: &[u64]) -> Vec<u64> {
    let (toy, mut tokens) = (Transformer::new(2, 8), prompt.to_vec());
    let mut rows = vec![HashMap::new(); HEADS as usize];
    for position in 0..prompt.len() + ANSWER - 1 {
        let (token, mut sum) = (tokens[position], 0);
        for (head, rows) in (0..).zip(&mut rows) {
            sum += toy.forward(rows, own(token, head), position).unwrap();
        }
        if position + 1 == tokens.len() {
            tokens.push(sum % WORDS);
        }
    }
    tokens
}

pub struct Side {
    toy: Transformer,
    is_on_device: bool,
    pub caches: Vec<PrefixCache>,
    pub l3s: Vec<Arc<Memory>>,
    pub transports: Vec<TcpTransport>,
}

impl Side {
    /// An engine of so many ranks. With a place it is one of prefill.
    pub fn new(ranks: u32, patience: Patience, place: Option<SocketAddr>) -> Side {
        Side::with(ranks, |_| {
            TcpOptions::default().with(|o| {
                (o.patience, o.place) = (patience, place);
            })
        })
    }

    pub fn with(ranks: u32, options: impl Fn(u32) -> TcpOptions) -> Side {
        Side::on(false, ranks, options)
    }

    /// As [`Side::with`], with L1 on devices, or in host memory.
    pub fn on(is_on_device: bool, ranks: u32, options: impl Fn(u32) -> TcpOptions) -> Side {
        let l3s: Vec<Arc<Memory>> = (0..ranks).map(|_| Arc::default()).collect();
        let cache = |(rank, l3): (u32, &Arc<Memory>)| {
            let l3: Arc<dyn L3> = l3.clone();
            let model = model("toy", rank, ranks);
            let options = PrefixOptions::new(&model, 24, 40).with(|o| {
                if is_on_device {
                    let device = Arc::new(HostDevice::new().unwrap());
                    let l1 = device.alloc_l1(&model.shape(), 25).unwrap();
                    o.l1 = Some(L1Memory::Pool(device, l1));
                }
            });
            options.over(Some(l3)).unwrap()
        };
        let transport = |rank| {
            let model = model("toy", rank, ranks);
            TcpTransport::new(&model, rank, ranks, &options(rank)).unwrap()
        };
        Side {
            toy: Transformer::new(2, 8),
            is_on_device,
            caches: (0..).zip(&l3s).map(cache).collect(),
            transports: (0..ranks).map(transport).collect(),
            l3s,
        }
    }

    pub fn begin(&self, prompt: &[u64]) -> Vec<Sequence> {
        let begin = |cache: &PrefixCache| {
            let waiting = cache.ask(&Ask::new(prompt).reserved(ANSWER)).unwrap();
            waiting.begin_within(PATIENCE).unwrap()
        };
        self.caches.iter().map(begin).collect()
    }

    /// Computes what the sequences of all ranks lack of some tokens. Returns the next word.
    pub fn forward(&self, sequences: &mut [Sequence], tokens: &[u64]) -> u64 {
        let mut word = 0;
        for (rank, sequence) in (0..).zip(sequences.iter_mut()) {
            word += self.forward_of(rank, sequence, tokens);
        }
        word % WORDS
    }

    fn forward_of(&self, rank: u32, sequence: &mut Sequence, tokens: &[u64]) -> u64 {
        let (mut sum, heads) = (0, heads_of(rank, self.caches.len() as u32));
        let computed = sequence.computed_tokens();
        let l1 = self.caches[rank as usize].l1();
        for (position, token) in tokens.iter().enumerate().skip(computed) {
            let heads = heads.clone().enumerate();
            let word = heads.map(|(at, head)| {
                let mut rows = Head(sequence, at, self.is_on_device.then_some(l1));
                let word = self.toy.forward(&mut rows, own(*token, head), position);
                word.unwrap()
            });
            sum = word.sum();
        }
        sequence.computed(tokens.len()).unwrap();
        while !sequence.verify().unwrap() {}
        sum
    }

    /// Senders of a room, on all ranks.
    pub fn senders(&self, room: u64) -> Vec<Box<dyn Sending>> {
        let sender = |of: &TcpTransport| of.sender(Room(room)).unwrap();
        self.transports.iter().map(sender).collect()
    }

    /// Receivers of a room, on all ranks.
    pub fn receivers(
        &self,
        room: u64,
        place: SocketAddr,
        sequences: Vec<Sequence>,
    ) -> Vec<Box<dyn Transfer>> {
        let place = place.to_string();
        let each = self.transports.iter().zip(sequences);
        let begun = each.map(|(of, sequence)| of.receiver(Room(room), &place, sequence));
        begun.map(|begun| begun.unwrap()).collect()
    }

    /// Answers a prompt whose first word is known, and checks all words. Returns the sequences.
    pub fn answer(&self, mut sequences: Vec<Sequence>, prompt: &[u64], word: u64) -> Vec<Sequence> {
        let mut tokens = prompt.to_vec();
        let mut word = word;
        for sequence in &mut sequences {
            sequence.computed(prompt.len()).unwrap();
            sequence.share().unwrap();
        }
        loop {
            tokens.push(word);
            let push = |sequence: &mut Sequence| sequence.push_within(word, PATIENCE).unwrap();
            sequences.iter_mut().for_each(push);
            if tokens.len() == prompt.len() + ANSWER {
                break;
            }
            word = self.forward(&mut sequences, &tokens);
        }
        assert_eq!(
            tokens,
            uncached_of(prompt),
            "words differ from the uncached run"
        );
        sequences
    }

    /// Checks that no page is lost, with no sequence running.
    pub fn check_leaks(&self) {
        for cache in &self.caches {
            assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
            cache.audit([]).unwrap();
        }
    }

    /// As [`Side::check_leaks`], and that all pages are free after a reset.
    pub fn check_empty(&self) {
        self.check_leaks();
        for cache in &self.caches {
            cache.reset().unwrap();
            let left = cache.with_core(|core| {
                let all = (core.config().l1_pages, core.config().l2_pages);
                (core.free_pages(), all)
            });
            let (free, all) = left.unwrap();
            assert_eq!(free, all, "pages are lost");
        }
    }
}

/// As [`uncached`], computed once for each prompt.
pub fn uncached_of(prompt: &[u64]) -> Vec<u64> {
    static KNOWN: std::sync::Mutex<Vec<(Vec<u64>, Vec<u64>)>> = std::sync::Mutex::new(Vec::new());
    let find = || {
        let known = KNOWN
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let found = known.iter().find(|(of, _)| of == prompt);
        found.map(|(_, words)| words.clone())
    };
    find().unwrap_or_else(|| {
        let words = uncached(prompt);
        let mut known = KNOWN
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        known.push((prompt.to_vec(), words.clone()));
        words
    })
}

/// Waits until all transfers have ended. Returns their least state.
pub fn least<T: Transfer + ?Sized>(transfers: &[Box<T>]) -> State {
    for transfer in transfers {
        let state = transfer.wait(PATIENCE);
        assert!(state.is_final(), "a transfer does not end: {state:?}");
    }
    transfers.iter().map(|of| of.state()).min().unwrap()
}

/// The sequences of transfers that have succeeded, and the note of each.
pub fn succeeded<T: Transfer + ?Sized>(transfers: Vec<Box<T>>) -> (Vec<Sequence>, Vec<Vec<u8>>) {
    let ends = transfers.into_iter().map(|of| {
        let Ended { sequence, outcome } = of.end();
        (sequence.unwrap(), outcome.unwrap())
    });
    ends.unzip()
}

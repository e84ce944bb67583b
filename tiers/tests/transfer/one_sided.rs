//! A network engine whose card writes into the memory of a receiver, as RDMA does: a write that is
//! on its way arrives at any time, unless the receiver has taken its memory back.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use larder_kernels::{ChunkAt, L1Pool};
use larder_tiers::Sequence;
use larder_tiers::transfer::{
    Ended, NotBegun, Room, Sending, State, Transfer, TransferError, Transport,
};

use super::engine::PAGE;
use super::random::check_untouched;
use super::rules::LONG;
use super::side::{Side, least, succeeded, text};

const LAYERS: u32 = 2;
const ROW_BYTES: usize = 256;

/// A row that is on its way, or the last message.
enum Write {
    Row(ChunkAt, usize, Vec<u8>),
    Last(Vec<u8>),
}

#[derive(Default)]
struct Network {
    /// With their rooms.
    writes: VecDeque<(Room, Write)>,
    /// The memory of receivers that a card may write, with the pages and the tokens.
    memories: HashMap<Room, (L1Pool, Vec<u32>, Range<usize>)>,
    notes: HashMap<Room, Vec<u8>>,
    is_halted: bool,
}

/// A card, and the pool of its engine.
#[derive(Clone)]
struct Card {
    network: Arc<(Mutex<Network>, Condvar)>,
    pool: L1Pool,
    silence: Duration,
    /// Whether it takes its memory back before it reports a failure.
    has_fence: bool,
}

impl Card {
    fn new(pool: &L1Pool, silence: Duration, has_fence: bool) -> Card {
        let network: Arc<(Mutex<Network>, Condvar)> = Arc::default();
        let of_card = Arc::downgrade(&network);
        std::thread::spawn(move || {
            while let Some(network) = of_card.upgrade() {
                deliver(&network.0);
                let _ = network.1.wait_timeout(network.0.lock().unwrap(), PAUSE);
            }
        });
        Card {
            network,
            pool: pool.clone(),
            silence,
            has_fence,
        }
    }

    fn halt(&self, is_halted: bool) {
        self.network.0.lock().unwrap().is_halted = is_halted;
        self.network.1.notify_all();
    }

    fn is_drained(&self) -> bool {
        self.network.0.lock().unwrap().writes.is_empty()
    }
}

const PAUSE: Duration = Duration::from_millis(1);

/// Lets the writes arrive.
fn deliver(network: &Mutex<Network>) {
    let mut network = network.lock().unwrap();
    while !network.is_halted {
        let Some((room, write)) = network.writes.pop_front() else {
            return;
        };
        let Some((pool, ..)) = network.memories.get(&room) else {
            // The memory was taken back.
            continue;
        };
        match write {
            Write::Row(at, offset, bytes) => {
                let start = pool.address(at).unwrap() as usize + offset;
                let row: *mut u8 = std::ptr::with_exposed_provenance_mut(start);
                // SAFETY: the row lies in the pool. A receiver that takes its memory back before it
                // gives its sequence back has the row to itself; the test without that is the only
                // thread beside this one, and reads after the card is drained.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), row, bytes.len()) };
            }
            Write::Last(note) => {
                network.notes.insert(room, note);
            }
        }
    }
}

impl Transport for Card {
    fn sender(&self, room: Room) -> Result<Box<dyn Sending>, TransferError> {
        Ok(Box::new(Sender(self.clone(), room, None)))
    }

    fn receiver(
        &self,
        room: Room,
        _from: &str,
        sequence: Sequence,
    ) -> Result<Box<dyn Transfer>, Box<NotBegun>> {
        let tokens = sequence.cached().tokens()..sequence.len();
        let pages = sequence.slots().unwrap().pages().to_vec();
        let mut network = self.network.0.lock().unwrap();
        network
            .memories
            .insert(room, (self.pool.clone(), pages, tokens));
        drop(network);
        let ends = Instant::now() + self.silence;
        Ok(Box::new(Receiver(self.clone(), room, sequence, ends)))
    }
}

struct Sender(Card, Room, Option<Sequence>);

impl Transfer for Sender {
    fn state(&self) -> State {
        match (&self.2, self.0.is_drained()) {
            (None, _) => State::WaitingForInput,
            (Some(_), false) => State::Transferring,
            (Some(_), true) => State::Success,
        }
    }

    fn wait(&self, _most: Duration) -> State {
        self.state()
    }

    fn end(self: Box<Self>) -> Ended {
        // The bytes of its rows were copied.
        Ended {
            sequence: self.2,
            outcome: Ok(Vec::new()),
        }
    }
}

impl Sending for Sender {
    fn send(mut self: Box<Self>, sequence: Sequence, note: &[u8]) -> Box<dyn Transfer> {
        let mut network = self.0.network.0.lock().unwrap();
        let (_, pages, tokens) = network.memories[&self.1].clone();
        for position in tokens {
            for (part, layer) in (0..2).flat_map(|part| (0..LAYERS).map(move |of| (part, of))) {
                let row = sequence.row(part, layer, position).unwrap().to_vec();
                assert_eq!(row.len(), ROW_BYTES);
                let page = pages[position / PAGE];
                let at = ChunkAt { part, layer, page };
                let write = Write::Row(at, position % PAGE * ROW_BYTES, row);
                network.writes.push_back((self.1, write));
            }
        }
        network
            .writes
            .push_back((self.1, Write::Last(note.to_owned())));
        drop(network);
        self.0.network.1.notify_all();
        self.2 = Some(sequence);
        self
    }
}

struct Receiver(Card, Room, Sequence, Instant);

impl Transfer for Receiver {
    fn state(&self) -> State {
        let mut network = self.0.network.0.lock().unwrap();
        if network.notes.contains_key(&self.1) {
            return State::Success;
        }
        if Instant::now() < self.3 {
            return State::Transferring;
        }
        if self.0.has_fence {
            network.memories.remove(&self.1);
        }
        State::Failed
    }

    fn wait(&self, most: Duration) -> State {
        let until = Instant::now() + most;
        loop {
            let state = self.state();
            if state.is_final() || Instant::now() >= until {
                return state;
            }
            std::thread::yield_now();
        }
    }

    fn end(self: Box<Self>) -> Ended {
        let mut network = self.0.network.0.lock().unwrap();
        let note = network.notes.remove(&self.1);
        if self.0.has_fence {
            network.memories.remove(&self.1);
        }
        Ended {
            sequence: Some(self.2),
            outcome: note.ok_or(TransferError::Ended),
        }
    }
}

/// Two engines of one rank each.
fn engines() -> (Side, Side) {
    (Side::new(1, LONG, None), Side::new(1, LONG, None))
}

#[test]
fn a_network_that_writes_into_remote_memory_fits_the_trait() {
    let (prefill, decode) = engines();
    let card = Card::new(decode.caches[0].l1(), LONG.silence, true);
    let prompt = text(1, 2 * PAGE + 3);
    let receiving = card.receiver(Room(1), "", decode.begin(&prompt).remove(0));
    let receiving = vec![receiving.unwrap()];
    let mut sequences = prefill.begin(&prompt);
    let word = prefill.forward(&mut sequences, &prompt);
    let sender = card.sender(Room(1)).unwrap();
    let sent = sender.send(sequences.remove(0), &word.to_le_bytes());
    assert_eq!(least(&receiving), State::Success);
    drop(sent.end());
    let (sequences, _) = succeeded(receiving);
    drop(decode.answer(sequences, &prompt, word));
    decode.check_empty();
}

/// The rows of a receiver that has failed while writes are on their way stay as they are.
fn late_writes_arrive_nowhere(has_fence: bool) {
    let (prefill, decode) = engines();
    let card = Card::new(decode.caches[0].l1(), Duration::ZERO, has_fence);
    card.halt(true);
    let prompt = text(1, PAGE + 3);
    let receiving = card.receiver(Room(1), "", decode.begin(&prompt).remove(0));
    let receiving = receiving.unwrap();
    let mut sequences = prefill.begin(&prompt);
    prefill.forward(&mut sequences, &prompt);
    let sent = card.sender(Room(1)).unwrap().send(sequences.remove(0), &[]);
    assert_eq!(receiving.wait(LONG.silence), State::Failed);
    let arrive = || {
        card.halt(false);
        while !card.is_drained() {
            std::thread::yield_now();
        }
    };
    check_untouched(receiving.end(), arrive);
    drop(sent.end());
    decode.check_empty();
}

#[test]
fn no_write_arrives_after_a_failure_was_reported() {
    late_writes_arrive_nowhere(true);
    let without = std::panic::catch_unwind(|| late_writes_arrive_nowhere(false));
    assert!(without.is_err(), "a missing fence is not noticed");
}

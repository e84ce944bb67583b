//! The rules of a hand-over with L1 on a device, one by one: a device that copies behind promised
//! forwards, and fails on demand.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use larder_kernels::host::Moment;
use larder_kernels::{ChunkAt, Device, DeviceError, HostDevice, Promise, Ticket};
use larder_tiers::Sequence;
use larder_tiers::handover::{Decode, HandoverError, Offer, Prefill, State, Taken};
use larder_tiers::prefix::SequenceError;

use super::honest::eventually;
use super::{L1_PAGES, LAYERS, Node, OnDevice, PAGE, TIME, ask, prompt, shape};

/// The tokens of the requests: a whole page, and a part of one.
const TOKENS: usize = PAGE + 3;

/// Both processes with L1 on a device each.
struct Devices {
    node: Node,
    prefill: Prefill,
    decode: Decode,
    on: [OnDevice; 2],
    /// Copies of layer 1 fail.
    fail: Arc<AtomicBool>,
}

fn on_device(fail: &Arc<AtomicBool>) -> OnDevice {
    let fail = fail.clone();
    let device = HostDevice::with_faults(Box::new(move |moment| {
        let is_one = matches!(moment, Moment::Copy(_, 1)) && fail.load(Ordering::Relaxed);
        match is_one {
            true => Err(DeviceError::Closed),
            false => Ok(()),
        }
    }));
    let device: Arc<dyn Device> = Arc::new(device.unwrap());
    let l1 = device.alloc_l1(&shape(), L1_PAGES + 1).unwrap();
    (device, l1)
}

/// The bytes of a chunk: a row for each token.
fn chunk(part: u32, layer: u32, page: usize) -> Vec<u8> {
    let row =
        |token: usize| vec![(part * 100 + layer * 30) as u8 + (page * PAGE + token) as u8; 16];
    (0..PAGE).flat_map(row).collect()
}

fn chunks(sequence: &Sequence) -> impl Iterator<Item = (ChunkAt, Vec<u8>)> {
    let pages = sequence.slots().unwrap().pages().to_vec();
    let places = (0..2).flat_map(|part| (0..LAYERS).map(move |layer| (part, layer)));
    places.flat_map(move |(part, layer)| {
        let pages = pages.clone().into_iter().take(2).enumerate();
        pages.map(move |(number, page)| {
            let at = ChunkAt { part, layer, page };
            (at, chunk(part, layer, number))
        })
    })
}

impl Devices {
    fn new() -> Devices {
        let fail = Arc::<AtomicBool>::default();
        let on = [on_device(&fail), on_device(&fail)];
        let node = Node::over(on.clone().map(Some));
        Devices {
            prefill: node.prefill(4),
            decode: node.decode(),
            node,
            on,
            fail,
        }
    }

    /// A request whose forward runs: its rows are written when it ends.
    fn offered(&self) -> (Sequence, Offer, Forward) {
        let mut sequence = self.node.here.begin(&prompt(TOKENS, 1)).unwrap();
        let mut offer = self.prefill.offer("one", &sequence, 0, TIME).unwrap();
        let (promise, ticket) = Ticket::promised();
        for layer in 0..LAYERS {
            offer
                .layer_behind(&sequence, layer, TOKENS, &ticket)
                .unwrap();
        }
        offer.end(5, b"data").unwrap();
        sequence.computed_by(TOKENS, &ticket).unwrap();
        let forward = Forward {
            on: self.on[0].clone(),
            chunks: chunks(&sequence).collect(),
            promise,
        };
        (sequence, offer, forward)
    }

    fn taken(&self) -> Result<Taken, HandoverError> {
        let tokens = prompt(TOKENS, 1);
        let taking = self.decode.take("one", &ask(&tokens), TIME, TIME).unwrap();
        taking.wait()
    }

    /// A forward of the decode process, behind which its loads run.
    fn running(&self) -> (Sequence, Promise) {
        let other = prompt(2, 9);
        let mut running = self.node.there.begin(&other).unwrap();
        let (promise, ticket) = Ticket::promised();
        running.computed_by(other.len(), &ticket).unwrap();
        (running, promise)
    }

    /// Checks all rows of the decode process.
    fn check(&self, sequence: &Sequence) {
        let (device, l1) = &self.on[1];
        for (number, (at, right)) in chunks(sequence).enumerate() {
            let rows = if number % 2 == 0 { PAGE } else { TOKENS - PAGE };
            let mut found = vec![0; right.len()];
            // SAFETY: the copies of the rows have ended, and no forward runs.
            unsafe { device.read_l1(l1, at, &mut found) }.unwrap();
            assert_eq!(found[..rows * 16], right[..rows * 16], "{at:?}");
            // Rows behind those of the request are the engine's.
            assert!(found[rows * 16..].iter().all(|byte| *byte == 0), "{at:?}");
        }
    }

    /// Free pages of L1 of a process.
    fn free(&self, process: usize) -> u32 {
        let cache = [&self.node.here, &self.node.there][process];
        cache.with_core(|core| core.free_pages().0).unwrap()
    }
}

/// A forward of the prefill process.
struct Forward {
    on: OnDevice,
    chunks: Vec<(ChunkAt, Vec<u8>)>,
    promise: Promise,
}

impl Forward {
    fn run(self) {
        for (at, bytes) in self.chunks {
            // SAFETY: pages of the sequence. Copies of them wait for the promise.
            unsafe { self.on.0.write_l1(&self.on.1, at, &bytes) }.unwrap();
        }
        self.promise.settle(Ok(()));
    }
}

#[test]
fn a_layer_is_copied_behind_its_forward() {
    copied_behind_the_forward();
}

pub fn copied_behind_the_forward() {
    let devices = Devices::new();
    let (sequence, offer, forward) = devices.offered();
    let tokens = prompt(TOKENS, 1);
    let taking = devices
        .decode
        .take("one", &ask(&tokens), TIME, TIME)
        .unwrap();
    eventually("it is taken", || offer.state() == State::Transferring);
    forward.run();
    let mut taken = taking.wait().unwrap();
    assert_eq!((taken.computed, taken.token), (TOKENS, 5));
    eventually("it is verified", || taken.sequence.verify().unwrap());
    devices.check(&taken.sequence);
    offer.wait().unwrap();
    devices.node.audit(&[&sequence], &[&taken.sequence]);
    taken.sequence.keep().unwrap();
    sequence.keep().unwrap();
    assert_eq!(devices.prefill.free_pages(), 4);
    devices.node.is_empty();
}

#[test]
fn the_first_step_is_launched_behind_the_copies() {
    launched_behind_the_copies();
}

pub fn launched_behind_the_copies() {
    let devices = Devices::new();
    let (running, promise) = devices.running();
    let (sequence, offer, forward) = devices.offered();
    forward.run();
    let mut taken = devices.taken().unwrap();
    let slots = taken.sequence.slots().unwrap();
    let layer = |layer| slots.tickets(layer).collect::<Vec<_>>();
    let tickets: Vec<Ticket> = (0..LAYERS).flat_map(layer).collect();
    assert!(tickets.len() >= LAYERS as usize, "layers without tickets");
    assert!(!tickets.iter().any(Ticket::is_settled));
    assert!(!taken.sequence.is_loaded() && !taken.sequence.verify().unwrap());
    assert_eq!(taken.sequence.share().unwrap(), []);
    assert_eq!(taken.sequence.truncate(2), Err(SequenceError::Unsettled));
    promise.settle(Ok(()));
    tickets.iter().for_each(|ticket| ticket.wait().unwrap());
    eventually("it is verified", || taken.sequence.verify().unwrap());
    devices.check(&taken.sequence);
    offer.wait().unwrap();
    drop((running, sequence, taken));
    devices.node.is_empty();
}

#[test]
fn a_copy_into_the_memory_that_fails_fails_the_request() {
    for forward_fails in [false, true] {
        let devices = Devices::new();
        devices.fail.store(!forward_fails, Ordering::Relaxed);
        let (sequence, offer, forward) = devices.offered();
        match forward_fails {
            true => drop(forward),
            false => forward.run(),
        }
        assert!(matches!(offer.wait(), Err(HandoverError::Load(_))));
        let late = std::time::Duration::from_millis(20);
        let tokens = prompt(TOKENS, 1);
        let taking = devices
            .decode
            .take("one", &ask(&tokens), late, late)
            .unwrap();
        assert!(taking.wait().is_err());
        assert_eq!(devices.prefill.free_pages(), 4);
        devices.fail.store(false, Ordering::Relaxed);
        drop((sequence, offer));
        devices.node.is_empty();
    }
}

#[test]
fn a_copy_out_of_the_memory_that_fails_breaks_the_sequence() {
    let devices = Devices::new();
    let (running, promise) = devices.running();
    let (sequence, offer, forward) = devices.offered();
    forward.run();
    let mut taken = devices.taken().unwrap();
    devices.fail.store(true, Ordering::Relaxed);
    promise.settle(Ok(()));
    eventually("it is broken", || match taken.sequence.verify() {
        Err(SequenceError::Broken(_)) => true,
        verified => {
            assert_eq!(verified, Ok(false));
            false
        }
    });
    let kept = taken.sequence.keep();
    assert!(matches!(kept, Err(SequenceError::Broken(_))));
    assert_eq!(offer.wait(), Err(HandoverError::Gone));
    devices.fail.store(false, Ordering::Relaxed);
    drop((running, sequence, offer));
    assert_eq!(devices.prefill.free_pages(), 4);
    devices.node.is_empty();
}

#[test]
fn pages_of_a_sequence_that_ends_stay_until_their_copies_have_ended() {
    pages_stay();
}

pub fn pages_stay() {
    let devices = Devices::new();
    let (running, promise) = devices.running();
    let (sequence, offer, forward) = devices.offered();
    let pages = sequence.slots().unwrap().pages().len() as u32;
    let before = devices.free(0);
    drop(sequence);
    assert_eq!(devices.free(0), before, "pages are free under a copy");
    forward.run();
    eventually("the pages are free", || devices.free(0) == before + pages);
    let taken = devices.taken().unwrap();
    let before = devices.free(1);
    drop(taken);
    assert_eq!(devices.free(1), before, "pages are free under a copy");
    promise.settle(Ok(()));
    eventually("the pages are free", || devices.free(1) > before);
    assert_eq!(offer.wait(), Err(HandoverError::Gone));
    drop(running);
    devices.node.is_empty();
}

#[test]
fn memory_stays_lent_until_the_copies_into_it_have_ended() {
    memory_stays_lent();
}

pub fn memory_stays_lent() {
    let devices = Devices::new();
    let (sequence, offer, forward) = devices.offered();
    drop(offer);
    assert_eq!(devices.prefill.free_pages(), 2, "lent again under a copy");
    forward.run();
    eventually("the memory is back", || devices.prefill.free_pages() == 4);
    drop(sequence);
    devices.node.is_empty();
}

/// Chunks of a prompt that end within pages.
#[test]
fn layers_come_in_chunks() {
    let devices = Devices::new();
    let sequence = devices.node.here.begin(&prompt(TOKENS, 1)).unwrap();
    let mut offer = devices.prefill.offer("one", &sequence, 0, TIME).unwrap();
    for (at, bytes) in chunks(&sequence) {
        let (device, l1) = &devices.on[0];
        // SAFETY: no copy runs.
        unsafe { device.write_l1(l1, at, &bytes) }.unwrap();
    }
    let tokens = prompt(TOKENS, 1);
    let taking = devices
        .decode
        .take("one", &ask(&tokens), TIME, TIME)
        .unwrap();
    for until in [1, 1, 3, 6, TOKENS] {
        offer.layers(&sequence, until).unwrap();
    }
    offer.end(5, b"").unwrap();
    let mut taken = taking.wait().unwrap();
    eventually("it is verified", || taken.sequence.verify().unwrap());
    devices.check(&taken.sequence);
    offer.wait().unwrap();
    drop((sequence, taken));
    devices.node.is_empty();
}

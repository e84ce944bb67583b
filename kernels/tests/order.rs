//! Order of compute and copies. A stand-in for the forward pass reads each layer after its ticket,
//! in its own streams, while pages are evicted, backed up and overwritten by loads. It must never
//! see old or future bytes. The CPU waits only at the end.
//!
//! Runs on the fake driver, which runs its streams in its own order. With `LARDER_REQUIRE_GPU=1` it
//! runs on a GPU, also with pages of full size. A further test proves that the stand-in detects
//! errors: without tickets it does.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod support;

use larder_fake_cuda::compute::{Compute, Expected, word};
use larder_fake_cuda::driver::{
    Steering, compute, device_tensors, has_gpu, in_a_process_of_its_own,
    in_a_process_that_may_lose_its_device,
};
use larder_kernels::cuda::policy::Way;
use larder_kernels::cuda::{Choice, CudaOptions};
use larder_kernels::{
    CudaDevice, Device, DeviceError, Gated, HostDevice, HostMemory, KvShape, L1Pool, L2Pool,
    Layout, PagePair, Ticket, Transfer, pool_bytes,
};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use support::heads_at;
use support::honest::found;

/// L1 is divided into halves, each with its own compute stream, so that one is loaded while the
/// other is read.
const HALVES: u32 = 2;

/// Pages of L1 in each half.
const L1_PAGES: u32 = 6;

/// Pages of L2 that both halves only read.
const SOURCES: u32 = 12;

/// Pages of L2 that each half backs up to and loads from.
const BACKUPS: u32 = 6;

/// Idle cycles that make a layer of the forward pass slower than its load.
const SLOWER_THAN_LOADS: u64 = 400_000;

const WAYS: [Choice; 4] = [
    Choice::Always(Way::Kernel),
    Choice::Always(Way::Batch),
    Choice::Always(Way::Copies),
    Choice::Published,
];

fn device(choice: Choice) -> CudaDevice {
    let options = CudaOptions {
        choice,
        ..CudaOptions::default()
    };
    CudaDevice::open(&options).unwrap()
}

/// A device and its foreign compute streams.
fn open(choice: Choice) -> (CudaDevice, [Compute; HALVES as usize]) {
    (device(choice), [compute(), compute()])
}

/// The dependency that the forward pass omits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaves {
    Nothing,
    /// It reads layers before their tickets settle.
    Tickets,
    /// It lets loads overwrite pages that it still reads.
    After,
}

/// For half of the seeds in the engine's own tensors, one per layer and part.
fn l1_pool(device: &CudaDevice, shape: &KvShape, seed: u64) -> L1Pool {
    let pages = HALVES * L1_PAGES;
    if seed.is_multiple_of(2) {
        return device.alloc_l1(shape, pages).unwrap();
    }
    let count = shape.parts() * shape.layers();
    let bytes = shape.chunk_bytes() * pages;
    let tensors = device_tensors((count as usize, bytes as usize), 0);
    device.adopt_l1(tensors, shape, pages).unwrap()
}

struct Forward<'a> {
    device: &'a CudaDevice,
    shape: KvShape,
    layout: Layout,
    l1: L1Pool,
    l2: L2Pool,
    streams: &'a [Compute; HALVES as usize],
    /// The seed of each page after all submitted work.
    l1_seeds: Vec<u64>,
    l2_seeds: Vec<u64>,
    in_flight: Vec<Gated<Transfer>>,
    random: Pcg64Mcg,
    leaves: Leaves,
    /// Idle cycles before the forward pass reads a layer, on a GPU.
    cycles: u64,
}

impl<'a> Forward<'a> {
    fn new(
        (device, streams): &'a (CudaDevice, [Compute; HALVES as usize]),
        shape: KvShape,
        layout: Layout,
        seed: u64,
        leaves: Leaves,
    ) -> Forward<'a> {
        let pages = SOURCES + HALVES * BACKUPS;
        let memory = HostMemory::zeroed(pool_bytes(&shape, pages)).unwrap();
        let forward = Forward {
            device,
            shape,
            layout,
            l1: l1_pool(device, &shape, seed),
            l2: device.register(memory, layout, &shape, pages).unwrap(),
            streams,
            l1_seeds: vec![0; (HALVES * L1_PAGES) as usize],
            l2_seeds: (1..=u64::from(pages)).map(|page| page << 40).collect(),
            in_flight: Vec::new(),
            random: Pcg64Mcg::seed_from_u64(seed),
            leaves,
            cycles: if shape == large() {
                SLOWER_THAN_LOADS
            } else {
                20_000
            },
        };
        forward.each_row(|row, words| row.copy_from_slice(&words));
        forward
    }

    /// Each head of each row of L2 and its expected contents.
    fn each_row(&self, mut each: impl FnMut(&mut [u64], Vec<u64>)) {
        let shape = &self.shape;
        let row = u64::from(shape.row_bytes()) / 8;
        let head = u64::from(shape.head_bytes()) / 8;
        let words = u64::from(shape.chunk_bytes()) / 8;
        for (page, seed) in (0..).zip(&self.l2_seeds) {
            for part in 0..shape.parts() {
                for layer in 0..shape.layers() {
                    for token in 0..shape.page_tokens() {
                        let at = (part, layer, page, token);
                        let heads = heads_at(self.layout, shape, self.l2.pages(), at);
                        for (number, offset) in (0..).zip(heads) {
                            let start = self.l2.start().as_ptr().wrapping_add(offset).cast();
                            // SAFETY: a head of a row of the pool, aligned, and nothing is in
                            // flight.
                            let found =
                                unsafe { std::slice::from_raw_parts_mut(start, head as usize) };
                            let first = u64::from(token) * row + number * head;
                            let expected = (first..first + head)
                                .map(|at| word(*seed, words, (part, layer, at)));
                            each(found, expected.collect());
                        }
                    }
                }
            }
        }
    }

    /// Some pages of a half, paired with these L2 pages.
    fn pairs(&mut self, half: u32, mut l2: Vec<u32>) -> Vec<PagePair> {
        let first = half * L1_PAGES;
        let mut l1: Vec<u32> = (first..first + L1_PAGES).collect();
        // Pages are neighbours in some transfers.
        if self.random.random_bool(0.7) {
            l1.shuffle(&mut self.random);
            l2.shuffle(&mut self.random);
        }
        let count = self.random.random_range(1..=L1_PAGES as usize);
        std::iter::zip(l1, l2)
            .take(count)
            .map(|(l1, l2)| PagePair { l1, l2 })
            .collect()
    }

    fn backups(half: u32) -> std::ops::Range<u32> {
        let first = SOURCES + half * BACKUPS;
        first..first + BACKUPS
    }

    fn transfer(&self, pairs: &[PagePair]) -> Transfer {
        // SAFETY: all accesses to these pages are ordered by the stream of the half, except in the
        // tests that omit the order on purpose.
        unsafe { Transfer::new(&self.l1, &self.l2, pairs.to_vec()) }.unwrap()
    }

    /// All previous work of the stream of this half: overwritten pages are no longer read, and
    /// backed-up pages are complete.
    fn after(&self, half: u32) -> Ticket {
        match self.leaves {
            Leaves::After => Ticket::done(),
            Leaves::Nothing => self
                .device
                .record(self.streams[half as usize].stream())
                .unwrap(),
            Leaves::Tickets => {
                // Long after a reader that does not wait has read.
                let other = &self.streams[1 - half as usize];
                other.idle(100 * SLOWER_THAN_LOADS);
                self.device.record(other.stream()).unwrap()
            }
        }
    }

    /// Loads other pages into the half over evicted ones, then reads all pages of the half, layer
    /// by layer.
    fn load(&mut self, half: u32) {
        let from = (0..SOURCES).chain(Self::backups(half)).collect();
        let pairs = self.pairs(half, from);
        let after = self.after(half);
        let loading = self.device.load(self.transfer(&pairs), &after).unwrap();
        for pair in &pairs {
            self.l1_seeds[pair.l1 as usize] = self.l2_seeds[pair.l2 as usize];
        }
        let loaded: Vec<u32> = pairs.iter().map(|pair| pair.l1).collect();
        self.read(half, |layer| loading.gates()[0].layer(layer), &loaded);
        self.in_flight.push(loading);
    }

    fn read(&self, half: u32, ticket: impl Fn(u32) -> Ticket, loaded: &[u32]) {
        let compute = &self.streams[half as usize];
        let pages = half * L1_PAGES..(half + 1) * L1_PAGES;
        let expected: Vec<Expected> = pages
            .map(|page| Expected {
                page: page.into(),
                seed: self.l1_seeds[page as usize],
            })
            // The contents of pages that were never loaded are unknown.
            .filter(|expected| expected.seed != 0)
            .collect();
        assert!(expected.len() >= loaded.len());
        for layer in 0..self.shape.layers() {
            if self.leaves != Leaves::Tickets {
                self.device.hold(compute.stream(), &ticket(layer)).unwrap();
            }
            compute.read(&self.l1, layer, &expected, self.cycles);
        }
    }

    /// Copies pages of the half to L2 over others, after all previous work on them.
    fn back_up(&mut self, half: u32) {
        let mut pairs = self.pairs(half, Self::backups(half).collect());
        pairs.retain(|pair| self.l1_seeds[pair.l1 as usize] != 0);
        let after = self.after(half);
        let storing = self.device.store(self.transfer(&pairs), &after).unwrap();
        let stream = self.streams[half as usize].stream();
        self.device
            .hold(stream, &storing.gates()[0].layer(0))
            .unwrap();
        for pair in &pairs {
            self.l2_seeds[pair.l2 as usize] = self.l1_seeds[pair.l1 as usize];
        }
        self.in_flight.push(storing);
    }

    /// Runs `steps` steps. Returns the number of wrong words seen by the forward pass, and the
    /// number in L2.
    fn run(mut self, steps: usize) -> (u64, u64) {
        for _ in 0..steps {
            let half = self.random.random_range(0..HALVES);
            if self.random.random_bool(0.7) {
                self.load(half);
            } else {
                self.back_up(half);
            }
        }
        let read = self.streams.iter().map(Compute::wrong).sum();
        for moving in self.in_flight.drain(..) {
            moving.wait().1.unwrap();
        }
        let mut stored = 0;
        self.each_row(|row, words| {
            stored += std::iter::zip(row, words)
                .filter(|(found, expected)| **found != *expected)
                .count() as u64;
        });
        (read, stored)
    }
}

/// Small random shapes.
fn shape(random: &mut Pcg64Mcg) -> KvShape {
    let (layers, tokens) = (random.random_range(1..6), random.random_range(1..9));
    let heads = random.random_range(1..5);
    if random.random_bool(0.5) {
        KvShape::mha(layers, heads, 16, 2, tokens).unwrap()
    } else {
        KvShape::mla(layers, heads * 8, 2, tokens).unwrap()
    }
}

/// `count` cases, or `LARDER_CASES` if it is set.
fn cases(count: u64) -> u64 {
    std::env::var("LARDER_CASES").map_or(count, |count| count.parse().unwrap())
}

#[test]
fn a_forward_behind_the_tickets_never_sees_old_bytes_while_pages_come_and_go() {
    const NAME: &str = "a_forward_behind_the_tickets_never_sees_old_bytes_while_pages_come_and_go";
    if !in_a_process_of_its_own(NAME, &[]) {
        return;
    }
    for choice in WAYS {
        let device = open(choice);
        for seed in 0..cases(40) {
            let shape = shape(&mut Pcg64Mcg::seed_from_u64(seed));
            let layout = Layout::ALL[seed as usize % Layout::ALL.len()];
            let forward = Forward::new(&device, shape, layout, seed, Leaves::Nothing);
            assert_eq!(
                forward.run(20),
                (0, 0),
                "{choice:?} {seed} {shape:?} {layout}"
            );
        }
    }
}

/// On a GPU: pages of Llama-3.1-8B with 64 tokens. On the fake: pages that are faster to copy.
fn large() -> KvShape {
    if has_gpu() {
        KvShape::mha(32, 8, 128, 2, 64).unwrap()
    } else {
        KvShape::mha(6, 2, 16, 2, 8).unwrap()
    }
}

#[test]
fn pages_of_full_size_keep_their_order_under_load() {
    if !in_a_process_of_its_own("pages_of_full_size_keep_their_order_under_load", &[]) {
        return;
    }
    for choice in WAYS {
        let device = open(choice);
        let layout = Layout::PageFirstDirect;
        let forward = Forward::new(&device, large(), layout, 7, Leaves::Nothing);
        let steps = if has_gpu() { 400 } else { 60 };
        assert_eq!(forward.run(steps), (0, 0), "{choice:?}");
    }
}

#[test]
fn a_forward_that_does_not_wait_sees_old_bytes() {
    if !in_a_process_of_its_own("a_forward_that_does_not_wait_sees_old_bytes", &[]) {
        return;
    }
    for choice in WAYS {
        let device = open(choice);
        for leaves in [Leaves::Tickets, Leaves::After] {
            let layout = Layout::PageFirstDirect;
            let forward = Forward::new(&device, large(), layout, 7, leaves);
            let (read, stored) = forward.run(40);
            assert!(
                read + stored > 0,
                "{choice:?} {leaves:?}: nothing was detected"
            );
        }
    }
}

#[test]
fn a_device_that_dies_under_load_fails_transfers_in_flight_and_the_host_continues() {
    const NAME: &str =
        "a_device_that_dies_under_load_fails_transfers_in_flight_and_the_host_continues";
    if !in_a_process_that_may_lose_its_device(NAME) {
        return;
    }
    let device = device(Choice::Published);
    let shape = large();
    let pages = 12;
    let memory = HostMemory::zeroed(pool_bytes(&shape, pages)).unwrap();
    let l2 = device
        .register(memory, Layout::PageFirstDirect, &shape, pages)
        .unwrap();
    let l1 = device.alloc_l1(&shape, pages).unwrap();
    let compute = compute();
    let transfer = || {
        let pairs = (0..pages).map(|page| PagePair { l1: page, l2: page });
        // SAFETY: no code reads these pages.
        unsafe { Transfer::new(&l1, &l2, pairs.collect()) }.unwrap()
    };
    let mut in_flight = vec![device.load(transfer(), &Ticket::done()).unwrap()];
    let after = in_flight[0].gates()[0].layer(shape.layers() - 1);
    device.hold(compute.stream(), &after).unwrap();
    if has_gpu() {
        compute.fault();
    } else {
        Steering::new().fail_after(200);
    }
    // Ordered after the fault, so that the fault cannot come too late. Repeated until the fault is
    // detected.
    let refused = found("a load is refused", || {
        let after = device.record(compute.stream());
        match after.map(|after| device.load(transfer(), &after)) {
            Ok(Ok(loading)) => in_flight.push(loading),
            Ok(Err(refused)) => return Some(refused.error),
            // Concerns this call alone; the next one finds the fault.
            Err(DeviceError::Stream { .. }) => {}
            Err(error) => return Some(error),
        }
        let newest = in_flight.last().unwrap().gates()[0].layer(0);
        newest.wait().err()
    });
    assert!(
        matches!(refused, DeviceError::Dead(_) | DeviceError::Driver { .. }),
        "{refused}"
    );
    // All pages come back, and the device accepts no more work.
    for moving in in_flight {
        assert_eq!(moving.wait().0.pairs().len(), pages as usize);
    }
    let refused = device.load(transfer(), &Ticket::done()).unwrap_err();
    assert!(
        matches!(refused.error, DeviceError::Dead(_)),
        "{}",
        refused.error
    );
    drop((device, l1, compute));
    let host = HostDevice::new().unwrap();
    let memory = HostMemory::zeroed(pool_bytes(&shape, 1)).unwrap();
    let l2 = host.register(memory, Layout::PageFirst, &shape, 1).unwrap();
    let l1 = host.alloc_l1(&shape, 1).unwrap();
    let pairs = vec![PagePair { l1: 0, l2: 0 }];
    // SAFETY: no code reads these pages.
    let transfer = unsafe { Transfer::new(&l1, &l2, pairs) }.unwrap();
    assert_eq!(
        host.load(transfer, &Ticket::done()).unwrap().wait().1,
        Ok(())
    );
}

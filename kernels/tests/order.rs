//! Order: a stand-in for the forward reads each layer behind its ticket, in streams of its own, while pages are evicted, backed up and
//! loaded over; it must never see bytes of before or of after. The CPU waits for nothing until the end.
//!
//! Over the fake driver, which runs its streams in an order of its own; on a GPU with `LARDER_REQUIRE_GPU=1`, with pages of full size
//! too. That the stand-in would notice is tested as well: without tickets it does.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod support;

use larder_kernels::cuda::policy::Way;
use larder_kernels::cuda::{Choice, CudaOptions};
use larder_kernels::{
    CudaDevice, Device, DeviceError, Gated, HostDevice, HostMemory, KvShape, L1Pool, L2Pool,
    Layout, PagePair, Ticket, Transfer, pool_bytes,
};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use support::compute::{Compute, Expected, word};
use support::driver::{
    Steering, compute, device_tensors, has_gpu, in_a_process_of_its_own,
    in_a_process_that_may_lose_its_device,
};
use support::honest::found;
use support::row_at;

/// Halves of L1, each with a stream that computes on it, so that one is loaded while the other is read.
const HALVES: u32 = 2;

/// Pages of L1 in each half.
const L1_PAGES: u32 = 6;

/// Pages of L2 that are only read, by both halves.
const SOURCES: u32 = 12;

/// Pages of L2 that each half backs up to, and loads from again.
const BACKUPS: u32 = 6;

/// Cycles of idling that make a layer of the forward slower than its load.
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

/// And streams of somebody else's on it.
fn open(choice: Choice) -> (CudaDevice, [Compute; HALVES as usize]) {
    (device(choice), [compute(), compute()])
}

/// What the forward leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaves {
    Nothing,
    /// It reads layers before their tickets.
    Tickets,
    /// It has pages loaded over that it still reads.
    After,
}

/// For half of the seeds in tensors of the engine's own, a tensor a layer and part.
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
    /// What each page holds, once all that was asked for is done.
    l1_seeds: Vec<u64>,
    l2_seeds: Vec<u64>,
    in_flight: Vec<Gated<Transfer>>,
    random: Pcg64Mcg,
    leaves: Leaves,
    /// That the forward takes over a layer before it reads, on a GPU.
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

    /// Each row of L2, and what it should hold.
    fn each_row(&self, mut each: impl FnMut(&mut [u64], Vec<u64>)) {
        let shape = &self.shape;
        let row = u64::from(shape.row_bytes()) / 8;
        let words = u64::from(shape.chunk_bytes()) / 8;
        for (page, seed) in (0..).zip(&self.l2_seeds) {
            for part in 0..shape.parts() {
                for layer in 0..shape.layers() {
                    for token in 0..shape.page_tokens() {
                        let at = (part, layer, page, token);
                        let offset = row_at(self.layout, shape, self.l2.pages(), at);
                        let start = self.l2.start().as_ptr().wrapping_add(offset).cast::<u64>();
                        // SAFETY: a row of the pool, aligned, and nothing is in flight.
                        let found = unsafe { std::slice::from_raw_parts_mut(start, row as usize) };
                        let first = u64::from(token) * row;
                        let expected =
                            (first..first + row).map(|at| word(*seed, words, (part, layer, at)));
                        each(found, expected.collect());
                    }
                }
            }
        }
    }

    /// Some pages of a half, and as many of those.
    fn pairs(&mut self, half: u32, mut l2: Vec<u32>) -> Vec<PagePair> {
        let first = half * L1_PAGES;
        let mut l1: Vec<u32> = (first..first + L1_PAGES).collect();
        // Neighbours sometimes.
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
        // SAFETY: whoever touches these pages is in the order of the half's stream, or the test is about what comes of it not being.
        unsafe { Transfer::new(&self.l1, &self.l2, pairs.to_vec()) }.unwrap()
    }

    /// All that the half's stream has done: what is loaded over is read no more, and what is backed up is there.
    fn after(&self, half: u32) -> Ticket {
        match self.leaves {
            Leaves::After => Ticket::done(),
            Leaves::Nothing => self
                .device
                .record(self.streams[half as usize].stream())
                .unwrap(),
            Leaves::Tickets => {
                // Long after whoever does not wait has read.
                let other = &self.streams[1 - half as usize];
                other.idle(100 * SLOWER_THAN_LOADS);
                self.device.record(other.stream()).unwrap()
            }
        }
    }

    /// Pages of the half are evicted for others, and all that it then holds is read, layer by layer.
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
            // Of what was never loaded nothing is known.
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

    /// Pages of the half are copied to L2 over others, behind all that is done with them.
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

    /// So many steps, and how many words the forward found wrong, and how many in L2.
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

/// Random shapes, small ones.
fn shape(random: &mut Pcg64Mcg) -> KvShape {
    let (layers, tokens) = (random.random_range(1..6), random.random_range(1..9));
    let heads = random.random_range(1..5);
    if random.random_bool(0.5) {
        KvShape::mha(layers, heads, 16, 2, tokens).unwrap()
    } else {
        KvShape::mla(layers, heads * 8, 2, tokens).unwrap()
    }
}

/// As many as this, or as `LARDER_CASES` says.
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
            let layout = Layout::ALL[seed as usize % 3];
            let forward = Forward::new(&device, shape, layout, seed, Leaves::Nothing);
            assert_eq!(
                forward.run(20),
                (0, 0),
                "{choice:?} {seed} {shape:?} {layout}"
            );
        }
    }
}

/// Pages of Llama-3.1-8B, of 64 tokens: on a GPU. Over the fake, pages that are quicker to copy.
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
                "{choice:?} {leaves:?}: nothing was noticed"
            );
        }
    }
}

#[test]
fn a_device_that_dies_under_load_fails_what_is_in_flight_and_the_host_serves_on() {
    const NAME: &str =
        "a_device_that_dies_under_load_fails_what_is_in_flight_and_the_host_serves_on";
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
        // SAFETY: nobody looks at these pages.
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
    // Behind the fault, so that it cannot come too late; until somebody notices.
    let refused = found("a load is refused", || {
        let after = device.record(compute.stream());
        match after.map(|after| device.load(transfer(), &after)) {
            Ok(Ok(loading)) => in_flight.push(loading),
            Ok(Err(refused)) => return Some(refused.error),
            Err(error) => return Some(error),
        }
        let newest = in_flight.last().unwrap().gates()[0].layer(0);
        newest.wait().err()
    });
    assert!(
        matches!(refused, DeviceError::Dead(_) | DeviceError::Driver { .. }),
        "{refused}"
    );
    // All pages come back, and nothing more is taken.
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
    // SAFETY: as above.
    let transfer = unsafe { Transfer::new(&l1, &l2, pairs) }.unwrap();
    assert_eq!(
        host.load(transfer, &Ticket::done()).unwrap().wait().1,
        Ok(())
    );
}

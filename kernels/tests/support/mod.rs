//! Test cases and the oracle. The oracle copies one head of a row at a time, by the layouts'
//! definitions as arrays, and shares no arithmetic with the crate.

#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "shared by several tests; a broken expectation is the finding"
)]

#[path = "../../../tests/support/honest.rs"]
pub mod honest;
pub mod timeline;

use std::ops::Range;
use std::ptr::NonNull;

use larder_kernels::{
    Attention, ChunkAt, Device, Direction, HostMemory, KvCounts, KvShape, L1Pool, L2Pool, Layout,
    PagePair, Tensor, Tensors, Transfer,
};
use proptest::prelude::*;

/// Two pools and the pages to copy between them.
#[derive(Clone, Debug)]
pub struct Case {
    pub shape: KvShape,
    pub layout: Layout,
    pub direction: Direction,
    pub l1_pages: u32,
    pub l2_pages: u32,
    pub pairs: Vec<PagePair>,
    pub only: Only,
}

/// The layers of a transfer and its rows of each page, if it is not of all.
pub type Only = Option<(Range<u32>, Range<u32>)>;

/// Part, layer, page and token of a row.
pub type RowPlace = (u32, u32, u32, u32);

/// Byte offsets of the heads of a row, by the definition of the layouts as nested arrays.
pub fn heads_at(
    layout: Layout,
    shape: &KvShape,
    pages: u32,
    (part, layer, page, token): RowPlace,
) -> impl Iterator<Item = usize> + use<> {
    let [part, layer, page, token] = [part, layer, page, token].map(|index| index as usize);
    let [layers, tokens, pages, heads, bytes] = [
        shape.layers(),
        shape.page_tokens(),
        pages,
        shape.heads(),
        shape.head_bytes(),
    ]
    .map(|count| count as usize);
    let (slot, slots) = (page * tokens + token, pages * tokens);
    (0..heads).map(move |head| {
        let row = match layout {
            Layout::LayerFirst => (part * layers + layer) * slots + slot,
            Layout::PageFirst => (part * slots + slot) * layers + layer,
            Layout::PageFirstDirect => ((part * pages + page) * layers + layer) * tokens + token,
            Layout::PageHead => {
                let of_head = (part * pages + page) * heads + head;
                return bytes * ((of_head * tokens + token) * layers + layer);
            }
        };
        bytes * (row * heads + head)
    })
}

/// Random cases: all layouts, MHA and MLA, pages of 1 to 64 tokens, one head or several of every
/// size, neighbours and scattered pages.
pub fn cases(head_bytes: impl Strategy<Value = u32>) -> impl Strategy<Value = Case> {
    let shape = (
        prop_oneof![Just(Attention::Mha), Just(Attention::Mla)],
        1..6u32,
        head_bytes,
        prop_oneof![Just(1u32), Just(16), Just(64), 2..9u32],
        prop_oneof![Just(1u32), 2..5u32],
    )
        .prop_map(|(attention, layers, head_dim, page_tokens, heads)| {
            KvShape::new(KvCounts {
                attention,
                layers,
                heads,
                head_dim,
                value_bytes: 1,
                page_tokens,
            })
            .unwrap()
        });
    let rest = (
        prop::sample::select(Layout::ALL.to_vec()),
        prop_oneof![Just(Direction::Load), Just(Direction::Store)],
        1..14u32,
        1..14u32,
        any::<prop::sample::Index>(),
        any::<u64>(),
        any::<Option<[prop::sample::Index; 4]>>(),
    );
    (shape, rest).prop_map(
        |(shape, (layout, direction, l1_pages, l2_pages, count, seed, only))| Case {
            only: only.map(|ends| some_of(&shape, ends)),
            pairs: pairs(l1_pages, l2_pages, count.index(14), seed),
            shape,
            layout,
            direction,
            l1_pages,
            l2_pages,
        },
    )
}

fn some_of(shape: &KvShape, ends: [prop::sample::Index; 4]) -> (Range<u32>, Range<u32>) {
    let range = |all: u32, first: prop::sample::Index, count: prop::sample::Index| {
        let first = first.index(all as usize) as u32;
        first..first + 1 + count.index((all - first) as usize) as u32
    };
    let [layer, layers, row, rows] = ends;
    let layers = range(shape.layers(), layer, layers);
    (layers, range(shape.page_tokens(), row, rows))
}

/// At most `count` pairs. Half of the seeds keep neighbours together, so that runs are merged.
pub fn pairs(l1_pages: u32, l2_pages: u32, count: usize, seed: u64) -> Vec<PagePair> {
    use rand::SeedableRng;
    use rand::seq::SliceRandom;
    let mut random = rand_pcg::Pcg64Mcg::seed_from_u64(seed);
    let mut l1: Vec<u32> = (0..l1_pages).collect();
    let mut l2: Vec<u32> = (0..l2_pages).collect();
    if seed & 1 == 0 {
        l1.rotate_left(seed as usize % l1_pages as usize);
        l2.rotate_left((seed >> 32) as usize % l2_pages as usize);
    } else {
        l1.shuffle(&mut random);
        l2.shuffle(&mut random);
    }
    let mut pairs: Vec<PagePair> = std::iter::zip(l1, l2)
        .take(count)
        .map(|(l1, l2)| PagePair { l1, l2 })
        .collect();
    pairs.shuffle(&mut random);
    pairs
}

/// A small case: eight pages, each with its counterpart of the same number.
pub fn case(direction: Direction) -> Case {
    Case {
        shape: KvShape::mha(4, 2, 16, 2, 4).unwrap(),
        layout: Layout::PageFirstDirect,
        direction,
        l1_pages: 8,
        l2_pages: 16,
        pairs: (0..8).map(|page| PagePair { l1: page, l2: page }).collect(),
        only: None,
    }
}

/// Both pools of a case on a device, filled with distinct bytes.
pub struct Pools {
    pub l1: L1Pool,
    pub l2: L2Pool,
}

impl Pools {
    pub fn new(device: &dyn Device, case: &Case) -> Pools {
        let l1 = device.alloc_l1(&case.shape, case.l1_pages).unwrap();
        Pools::filled(device, case, l1, l2_pool(device, case))
    }

    /// As [`Pools::new`], with L1 in an engine's own tensors.
    pub fn of_tensors(device: &dyn Device, case: &Case, tensors: Tensors) -> Pools {
        let l1 = device.adopt_l1(tensors, &case.shape, case.l1_pages);
        Pools::filled(device, case, l1.unwrap(), l2_pool(device, case))
    }

    /// The pools of a case, filled.
    pub fn filled(device: &dyn Device, case: &Case, l1: L1Pool, l2: L2Pool) -> Pools {
        let shape = &case.shape;
        let bytes = larder_kernels::pool_bytes(shape, case.l2_pages);
        let pools = Pools { l1, l2 };
        pools.set_l2(&noise(1, bytes as usize));
        let bytes = larder_kernels::pool_bytes(shape, case.l1_pages) as usize;
        pools.set_l1(device, &noise(2, bytes));
        pools
    }

    pub fn transfer(&self, case: &Case) -> Transfer {
        // SAFETY: the tests touch pages only while nothing is in flight, or after their ticket has
        // settled.
        let all = unsafe { Transfer::new(&self.l1, &self.l2, case.pairs.clone()) }.unwrap();
        match case.only.clone() {
            Some((layers, rows)) => all.only(layers, rows).unwrap(),
            None => all,
        }
    }

    pub fn l2_bytes(&self) -> Vec<u8> {
        let bytes = larder_kernels::pool_bytes(self.l2.shape(), self.l2.pages()) as usize;
        // SAFETY: the pool has this size, and nothing is in flight.
        unsafe { std::slice::from_raw_parts(self.l2.start().as_ptr(), bytes) }.to_vec()
    }

    pub fn set_l2(&self, bytes: &[u8]) {
        // SAFETY: the pool has this size, and nothing is in flight.
        unsafe {
            self.l2
                .start()
                .copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len());
        };
    }

    /// All chunks of L1, in pool order.
    fn chunks(&self) -> impl Iterator<Item = ChunkAt> + use<> {
        let (shape, pages) = (*self.l1.shape(), self.l1.pages());
        (0..shape.parts()).flat_map(move |part| {
            (0..shape.layers())
                .flat_map(move |layer| (0..pages).map(move |page| ChunkAt { part, layer, page }))
        })
    }

    pub fn l1_bytes(&self, device: &dyn Device) -> Vec<u8> {
        let chunk = self.l1.shape().chunk_bytes() as usize;
        self.chunks()
            .flat_map(|at| {
                let mut bytes = vec![0; chunk];
                // SAFETY: nothing is in flight, or the ticket of the chunk has settled.
                unsafe { device.read_l1(&self.l1, at, &mut bytes) }.unwrap();
                bytes
            })
            .collect()
    }

    pub fn set_l1(&self, device: &dyn Device, bytes: &[u8]) {
        let chunks = bytes.chunks_exact(self.l1.shape().chunk_bytes() as usize);
        for (at, bytes) in self.chunks().zip(chunks) {
            // SAFETY: nothing is in flight.
            unsafe { device.write_l1(&self.l1, at, bytes) }.unwrap();
        }
    }
}

fn l2_pool(device: &dyn Device, case: &Case) -> L2Pool {
    let bytes = larder_kernels::pool_bytes(&case.shape, case.l2_pages);
    let memory = HostMemory::zeroed(bytes).unwrap();
    let l2 = device.register(memory, case.layout, &case.shape, case.l2_pages);
    l2.unwrap()
}

/// Number of tensors of the L1 pool of a case, and bytes per tensor.
pub fn tensors_of(case: &Case) -> (usize, usize) {
    let shape = &case.shape;
    let count = shape.parts() * shape.layers();
    let bytes = shape.chunk_bytes() * case.l1_pages;
    (count as usize, bytes as usize)
}

/// Tensors in host memory, each `skip` bytes after a multiple of 16, in reverse order.
pub fn host_tensors((count, bytes): (usize, usize), skip: usize) -> Tensors {
    let mut memory: Vec<Box<[u128]>> = (0..count).map(|_| vec![0; bytes / 16 + 2].into()).collect();
    let tensors = memory.iter_mut().rev().map(|memory| Tensor {
        address: memory.as_mut_ptr().expose_provenance() as u64 + skip as u64,
        bytes: bytes as u64,
    });
    let tensors = tensors.collect();
    // SAFETY: initialised, and no other code has access.
    unsafe { Tensors::new(tensors, Box::new(memory)) }
}

/// Bytes that depend on the position and on the tag.
pub fn noise(tag: u64, bytes: usize) -> Vec<u8> {
    use rand::{RngExt, SeedableRng};
    let mut noise = vec![0; bytes];
    rand_pcg::Pcg64Mcg::seed_from_u64(tag).fill(&mut noise[..]);
    noise
}

impl Case {
    /// Its layers.
    pub fn layers(&self) -> Range<u32> {
        let layers = self.only.as_ref().map(|only| only.0.clone());
        layers.unwrap_or(0..self.shape.layers())
    }

    /// Its rows of each page.
    pub fn rows(&self) -> Range<u32> {
        let rows = self.only.as_ref().map(|only| only.1.clone());
        rows.unwrap_or(0..self.shape.page_tokens())
    }
}

/// The contents of both pools after the layers before `layers` of the transfer of `case`, computed
/// one row at a time.
pub fn expected(case: &Case, l1: &[u8], l2: &[u8], layers: u32) -> (Vec<u8>, Vec<u8>) {
    let (mut l1, mut l2) = (l1.to_vec(), l2.to_vec());
    let shape = &case.shape;
    let bytes = shape.head_bytes() as usize;
    for pair in &case.pairs {
        for part in 0..shape.parts() {
            for layer in case.layers().take_while(|layer| *layer < layers) {
                for token in case.rows() {
                    let at = (part, layer, pair.l1, token);
                    let a = heads_at(Layout::LayerFirst, shape, case.l1_pages, at);
                    let at = (part, layer, pair.l2, token);
                    let b = heads_at(case.layout, shape, case.l2_pages, at);
                    for (a, b) in a.zip(b) {
                        match case.direction {
                            Direction::Load => l1[a..a + bytes].copy_from_slice(&l2[b..b + bytes]),
                            Direction::Store => l2[b..b + bytes].copy_from_slice(&l1[a..a + bytes]),
                        }
                    }
                }
            }
        }
    }
    (l1, l2)
}

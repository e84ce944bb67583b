//! The copy kernel without a GPU: the real source, compiled as C++, against the oracle; and the
//! source with planted bugs, all of them to be detected.
//!
//! Covered: address arithmetic, that every unit is stored exactly once and nothing else is stored,
//! the layout of the argument. Not covered: the two wrapped instructions, alignment faults, order
//! between streams, launch limits, speed.
//!
//! Needs a C++ compiler (`CXX`, or `c++`); without one the tests are skipped with a message.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod support;

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use larder_fake_cuda::driver::SHIM;
use larder_kernels::kernel::{KvCopyArgs, SOURCE};
use larder_kernels::{
    ChunkAt, Device, Direction, HostDevice, HostMemory, KvShape, Layout, PagePair, Transfer,
    pool_bytes,
};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestRunner};
use support::honest::skipped;
use support::{Case, cases, expected, noise};

const ENTRY: &str = include_str!("../cu/cpu_entry.cc");

/// Planted bugs: each replaces a piece of the source.
const MUTANTS: [(&str, &str); 18] = [
    (
        "part * step.part + layer * step.layer",
        "part * step.layer + layer * step.part",
    ),
    (
        "page * step.page + token * step.token",
        "page * step.token + token * step.page",
    ),
    ("layer * step.layer +", "layer * (kv_u32)step.layer +"),
    ("page * step.page +", "(kv_u32)(page * step.page) +"),
    (
        "pairs[2 * pair + copy.from_index]",
        "pairs[2 * pair + 1 - copy.from_index]",
    ),
    (
        "pairs[2 * pair + 1 - copy.from_index]",
        "pairs[2 * pair + 1]",
    ),
    ("next < copy.segments;", "next + 1 < copy.segments;"),
    ("next < copy.segments;", "next <= copy.segments;"),
    ("next += workers)", "next += workers - 1)"),
    ("next += workers)", "next += workers + 1)"),
    ("copy.lanes * KV_UNROLL + lane;", "copy.lanes + lane;"),
    (
        "const kv_u32 head = row % copy.heads;",
        "const kv_u32 head = 0;",
    ),
    ("head * copy.from_head;", "head * copy.to_head;"),
    (
        "const kv_u32 token = row % copy.tokens;",
        "const kv_u32 token = 0;",
    ),
    (
        "const kv_u32 layer = row / copy.parts;",
        "const kv_u32 layer = row % copy.layers;",
    ),
    ("kv_u64 next = worker;", "kv_u64 next = lane;"),
    (
        "if (unit < copy.row_units) {\n                kv_store(",
        "if (unit <= copy.row_units) {\n                kv_store(",
    ),
    (
        "blockIdx.x * blockDim.x + threadIdx.x",
        "blockIdx.x * gridDim.x + threadIdx.x",
    ),
];

/// A launch of the kernel for a case.
struct Launch {
    case: Case,
    args: KvCopyArgs,
    pairs: Vec<PagePair>,
    layers: std::ops::Range<u32>,
    grid: u32,
    block: u32,
    seed: u64,
}

impl Launch {
    fn new(
        mut case: Case,
        layers: std::ops::Range<u32>,
        (grid, block): (u32, u32),
        seed: u64,
    ) -> Option<Launch> {
        let device = HostDevice::stepped(Box::new(|_| Ok(())));
        let shape = &case.shape;
        // The pools provide only shapes and addresses; large pools are never touched.
        let memory = HostMemory::zeroed(pool_bytes(shape, case.l2_pages)).unwrap();
        let l2 = device
            .register(memory, case.layout, shape, case.l2_pages)
            .unwrap();
        let l1 = device.alloc_l1(shape, case.l1_pages).unwrap();
        // SAFETY: no device receives the transfer.
        let mut transfer = unsafe { Transfer::new(&l1, &l2, case.pairs.clone()) }.unwrap();
        if let Some(only) = &mut case.only {
            only.0 = layers.clone();
            transfer = transfer.only(layers.clone(), only.1.clone()).unwrap();
        }
        let mut args = KvCopyArgs::new(&transfer, case.direction, layers.clone(), 0)?;
        // The kernel's process has both memories at other addresses.
        let first = ChunkAt {
            part: 0,
            layer: 0,
            page: 0,
        };
        let starts = [l1.address(first).unwrap(), l2.start().addr().get() as u64];
        let (from, to) = match case.direction {
            Direction::Load => (starts[1], starts[0]),
            Direction::Store => (starts[0], starts[1]),
        };
        args.from -= from;
        args.to -= to;
        let pairs = transfer.pairs().to_vec();
        Some(Launch {
            case,
            args,
            pairs,
            layers,
            grid,
            block,
            seed,
        })
    }

    fn bytes(&self) -> [u64; 2] {
        let l1 = pool_bytes(&self.case.shape, self.case.l1_pages);
        let l2 = pool_bytes(&self.case.shape, self.case.l2_pages);
        match self.case.direction {
            Direction::Load => [l2, l1],
            Direction::Store => [l1, l2],
        }
    }

    /// The number of stores: one per unit.
    fn stores(&self) -> u64 {
        let shape = &self.case.shape;
        let rows = self.case.rows().len() as u64 * u64::from(shape.parts() * shape.row_bytes());
        self.pairs.len() as u64 * self.layers.len() as u64 * rows / 16
    }
}

/// The compiled kernel, run as a process.
struct Kernel {
    binary: PathBuf,
}

/// A byte range of one of the two memories: 0 is the source, 1 is the destination.
struct Patch {
    memory: u64,
    offset: u64,
    bytes: Vec<u8>,
}

impl Kernel {
    /// Compiles a source in its own directory. `None` without a compiler.
    fn compile(directory: &Path, source: &str) -> Option<Kernel> {
        std::fs::create_dir_all(directory).unwrap();
        for (name, text) in [
            ("kv_copy.cu", source),
            ("cpu_shim.h", SHIM),
            ("cpu_entry.cc", ENTRY),
        ] {
            std::fs::write(directory.join(name), text).unwrap();
        }
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let binary = directory.join("entry");
        let compiled = Command::new(&compiler)
            .args([
                "-std=c++17",
                "-O1",
                "-Wall",
                "-Wextra",
                "-Wno-unknown-pragmas",
                "-o",
            ])
            .arg(&binary)
            .arg(directory.join("cpu_entry.cc"))
            .output();
        match compiled {
            Err(error) => {
                let why = format!("there is no C++ compiler {compiler}: {error}");
                skipped("the copy kernel as C++", why);
                None
            }
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr);
                assert!(
                    output.status.success(),
                    "{compiler} does not compile the kernel:\n{said}"
                );
                Some(Kernel { binary })
            }
        }
    }

    /// Runs one case. Returns the number of stores and the bytes of the patches to `read`. `None`
    /// if the process died.
    fn run(&self, launch: &Launch, write: &[Patch], read: &[Patch]) -> Option<(u64, Vec<Vec<u8>>)> {
        let mut input = Vec::new();
        let put = |input: &mut Vec<u8>, number: u64| input.extend(number.to_ne_bytes());
        let args = launch.args.to_bytes();
        put(&mut input, args.len() as u64);
        input.extend(args);
        for number in launch.bytes() {
            put(&mut input, number);
        }
        for pair in &launch.pairs {
            input.extend(pair.l1.to_ne_bytes());
            input.extend(pair.l2.to_ne_bytes());
        }
        for number in [u64::from(launch.grid), u64::from(launch.block), launch.seed] {
            put(&mut input, number);
        }
        for (patches, with_bytes) in [(write, true), (read, false)] {
            put(&mut input, patches.len() as u64);
            for patch in patches {
                for number in [patch.memory, patch.offset, patch.bytes.len() as u64] {
                    put(&mut input, number);
                }
                if with_bytes {
                    input.extend(&patch.bytes);
                }
            }
        }
        let output = self.feed(input)?;
        let (stores, mut rest) = output.split_at_checked(8)?;
        let mut patches = Vec::new();
        for patch in read {
            let (bytes, after) = rest.split_at_checked(patch.bytes.len())?;
            patches.push(bytes.to_vec());
            rest = after;
        }
        Some((u64::from_ne_bytes(stores.try_into().unwrap()), patches))
    }

    fn feed(&self, input: Vec<u8>) -> Option<Vec<u8>> {
        let mut child = Command::new(&self.binary)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // A write error means that the process has died, which its exit status shows.
        let writing = std::thread::spawn(move || drop(stdin.write_all(&input)));
        let mut output = Vec::new();
        child
            .stdout
            .take()
            .unwrap()
            .read_to_end(&mut output)
            .unwrap();
        writing.join().unwrap();
        child.wait().unwrap().success().then_some(output)
    }

    /// Whether a case matches the oracle: every byte of both memories, and the number of stores.
    fn is_right(&self, launch: &Launch) -> bool {
        let case = &launch.case;
        let [from_bytes, to_bytes] = launch.bytes().map(|bytes| bytes as usize);
        let (from, to) = (noise(1, from_bytes), noise(2, to_bytes));
        let (l1, l2) = match case.direction {
            Direction::Load => (&to, &from),
            Direction::Store => (&from, &to),
        };
        // The oracle always starts at layer 0, so the layers before the range are undone.
        let whole = expected(case, l1, l2, launch.layers.end);
        let (before, after) = match case.direction {
            Direction::Load => (expected(case, l1, l2, launch.layers.start).0, whole.0),
            Direction::Store => (expected(case, l1, l2, launch.layers.start).1, whole.1),
        };
        let wanted: Vec<u8> = (0..to.len())
            .map(|at| {
                if after[at] == before[at] {
                    to[at]
                } else {
                    after[at]
                }
            })
            .collect();
        let patch = |memory, bytes: &[u8]| Patch {
            memory,
            offset: 0,
            bytes: bytes.to_vec(),
        };
        let both = [patch(0, &from), patch(1, &to)];
        let Some((stores, patches)) = self.run(launch, &both, &both) else {
            return false;
        };
        stores == launch.stores() && patches[0] == from && patches[1] == wanted
    }

    /// Whether rows with offsets past 4 GiB arrive: by their part, their layer or their page.
    fn is_right_past_4_gib(&self, layout: Layout, direction: Direction) -> bool {
        let by_part = KvShape::mha(4, 8, 128, 2, 64).unwrap();
        let by_layer = KvShape::mla(6, 8 * 128, 2, 64).unwrap();
        [
            (by_part, [(0, 3, 63), (1, 0, 0)]),
            (by_layer, [(0, 5, 63), (0, 4, 0)]),
        ]
        .into_iter()
        .all(|(shape, rows)| self.moves_rows(&shape, 10_000, layout, direction, &rows))
    }

    /// Whether some rows (part, layer, token) of a page near the end of large pools arrive.
    fn moves_rows(
        &self,
        shape: &KvShape,
        pages: u32,
        layout: Layout,
        direction: Direction,
        rows: &[(u32, u32, u32)],
    ) -> bool {
        let pair = PagePair {
            l1: pages - 1,
            l2: pages - 2,
        };
        let case = Case {
            shape: *shape,
            layout,
            direction,
            l1_pages: pages,
            l2_pages: pages,
            pairs: vec![pair],
            only: None,
        };
        let launch = Launch::new(case, 0..shape.layers(), (2, 64), 3).unwrap();
        let (row, head) = (shape.row_bytes() as usize, shape.head_bytes() as usize);
        let places = |memory: u64, (part, layer, token): (u32, u32, u32)| {
            let is_l1 = (memory == 0) == (direction == Direction::Store);
            let (layout, page) = if is_l1 {
                (Layout::LayerFirst, pair.l1)
            } else {
                (layout, pair.l2)
            };
            support::heads_at(layout, shape, pages, (part, layer, page, token))
        };
        let patches = |memory| {
            let heads = rows.iter().zip(10..).flat_map(|(at, tag)| {
                let bytes = noise(tag, row);
                let bytes: Vec<_> = bytes.chunks(head).map(<[u8]>::to_vec).collect();
                places(memory, *at).zip(bytes)
            });
            let heads = heads.map(|(offset, bytes)| Patch {
                memory,
                offset: offset as u64,
                bytes,
            });
            heads.collect::<Vec<_>>()
        };
        let (write, read) = (patches(0), patches(1));
        assert!(read.iter().any(|patch| patch.offset > 4 << 30));
        let Some((stores, patches)) = self.run(&launch, &write, &read) else {
            return false;
        };
        stores == launch.stores()
            && std::iter::zip(&patches, &read).all(|(got, wanted)| *got == wanted.bytes)
    }

    /// Whether all checks pass. Stops at the first failure.
    fn is_right_everywhere(&self, launches: &[Launch]) -> bool {
        launches.iter().all(|launch| self.is_right(launch))
            && Layout::ALL.into_iter().all(|layout| {
                [Direction::Load, Direction::Store]
                    .into_iter()
                    .all(|direction| self.is_right_past_4_gib(layout, direction))
            })
    }
}

/// The same random launches in every run, so that a detected mutant stays detected.
fn launches(count: usize) -> Vec<Launch> {
    let mut runner = TestRunner::new_with_rng(
        Config::default(),
        proptest::test_runner::TestRng::deterministic_rng(
            proptest::test_runner::RngAlgorithm::ChaCha,
        ),
    );
    let row_bytes =
        prop_oneof![Just(16u32), 1..40u32, Just(128), 1..90u32].prop_map(|units| units * 16);
    let grids = prop_oneof![
        Just((1u32, 32u32)),
        Just((2, 64)),
        Just((3, 96)),
        Just((2, 256))
    ];
    let all = (cases(row_bytes), grids, any::<(u64, bool)>(), 0..6u32);
    let mut launches = Vec::new();
    while launches.len() < count {
        let (case, grid, (seed, one_layer), layer) = all.new_tree(&mut runner).unwrap().current();
        let all_layers = case.shape.layers();
        let layer = layer % all_layers;
        let layers = if one_layer {
            layer..layer + 1
        } else {
            0..all_layers
        };
        // Random cases without pages have nothing to launch.
        launches.extend(Launch::new(case, layers, grid, seed));
    }
    launches
}

#[test]
fn the_kernel_matches_the_oracle_and_stores_nothing_twice() {
    let directory = tempfile::tempdir().unwrap();
    let Some(kernel) = Kernel::compile(directory.path(), SOURCE) else {
        return;
    };
    let launches = launches(200);
    for (index, launch) in launches.iter().enumerate() {
        assert!(
            kernel.is_right(launch),
            "launch {index}: {:?} {:?}",
            launch.case,
            launch.args
        );
    }
    for layout in Layout::ALL {
        for direction in [Direction::Load, Direction::Store] {
            assert!(
                kernel.is_right_past_4_gib(layout, direction),
                "{layout} {direction:?}"
            );
        }
    }
}

#[test]
fn every_bug_planted_in_the_kernel_is_detected() {
    let directory = tempfile::tempdir().unwrap();
    let launches = launches(60);
    let mut missed = Vec::new();
    for (index, (piece, bug)) in MUTANTS.into_iter().enumerate() {
        assert_eq!(
            SOURCE.matches(piece).count(),
            1,
            "the source has one {piece:?}"
        );
        let source = SOURCE.replace(piece, bug);
        let Some(kernel) = Kernel::compile(&directory.path().join(index.to_string()), &source)
        else {
            return;
        };
        if kernel.is_right_everywhere(&launches) {
            missed.push((piece, bug));
        }
    }
    assert!(missed.is_empty(), "not noticed: {missed:#?}");
}

#[test]
fn transfers_that_the_kernel_does_not_support_use_copy_engines() {
    let case = |row, pairs: &[(u32, u32)]| Case {
        shape: KvShape::of_rows(larder_kernels::Attention::Mla, 2, row, 4).unwrap(),
        layout: Layout::PageFirst,
        direction: Direction::Load,
        l1_pages: 4,
        l2_pages: 4,
        pairs: pairs.iter().map(|&(l1, l2)| PagePair { l1, l2 }).collect(),
        only: None,
    };
    let launch = |case, layers| Launch::new(case, layers, (1, 32), 0);
    assert!(launch(case(32, &[(1, 2)]), 0..2).is_some());
    assert!(launch(case(40, &[(1, 2)]), 0..2).is_none());
    assert!(launch(case(32, &[]), 0..2).is_none());
    assert!(launch(case(32, &[(1, 2)]), 1..1).is_none());
    assert!(launch(case(32, &[(1, 2)]), 1..3).is_none());
}

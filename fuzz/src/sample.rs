//! Small valid stores as a start, and the pages that were put into them.
//!
//! Each recipe runs the engine's own core over a disk in memory. So a sample has the content of
//! real stores: chains, copies made by reclaim, deletions, evictions, generations behind
//! generations, several epochs, segments left open. A page's bytes are a function of its name and
//! of the number of its puts. So bytes of another page, or of an older attempt, are recognised.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::OnceLock;

use larder_core::capacity::segments_min;
use larder_engine::PutStatus;
use larder_engine::format::{
    BLOCK_BYTES, Clock, Features, History, Holder, Namespace, OVERHEAD_BYTES, OpenState, PageKey,
    PageShape, Run, StoreId, Superblock, TokenUnits, VolumeEntry, VolumeId, page_keys,
};

use crate::machine::{Image, Machine, NewPage};
use crate::memory_disk::Volume;

/// Blocks of a segment where any size is valid: large enough for a few chains, small enough to
/// fill.
pub const SMALL_SEGMENT_BLOCKS: u32 = 64;

/// Blocks of the smallest valid segment of a file.
pub const REAL_SEGMENT_BLOCKS: u32 = 4096;

/// The store of all samples.
pub const STORE: StoreId = StoreId::from_bytes([0x5a; 16]);

/// A page's name: a namespace, by its number among [`namespaces`], and a key.
pub type Name = (usize, PageKey);

/// A store, and the pages that were put into it.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The store, which is not open.
    pub image: Image,
    /// Every page that was ever put.
    pub truth: Truth,
    /// The pages that an opening must find if nothing is broken.
    pub kept: Vec<Name>,
}

/// The number of puts of each page.
#[derive(Clone, Debug, Default)]
pub struct Truth {
    puts: HashMap<Name, u32>,
}

/// The two namespaces of all samples: pages of one block, and of three.
#[must_use]
pub fn namespaces() -> &'static [Namespace; 2] {
    static NAMESPACES: OnceLock<[Namespace; 2]> = OnceLock::new();
    NAMESPACES.get_or_init(|| {
        [
            namespace("small", &[4096]),
            namespace("large", &[5000, 4000]),
        ]
    })
}

/// A namespace of this model name and these parts.
///
/// # Panics
/// If the parts are not valid.
#[must_use]
pub fn namespace(model: &str, parts: &[u32]) -> Namespace {
    Namespace::builder(model, "w1", 64, PageShape::new(parts).expect("a shape"))
        .build()
        .expect("a namespace")
}

/// Keys of one chain. Chains of different seeds share nothing.
#[must_use]
pub fn chain(seed: u64, pages: usize) -> Vec<PageKey> {
    let tokens: Vec<u64> = (0..pages as u64).map(|page| seed << 24 | page).collect();
    page_keys(&tokens, NonZeroUsize::MIN, None, TokenUnits::Single)
}

/// The bytes of a page at its `put`-th put, padding included.
#[must_use]
pub fn payload(name: &Name, put: u32) -> Vec<u8> {
    let (namespace, key) = name;
    let shape = namespaces()[*namespace].shape();
    let mut bytes = vec![0; shape.page_blocks() as usize * BLOCK_BYTES];
    let mut word = key
        .as_bytes()
        .iter()
        .fold(u64::from(put) << 8 | *namespace as u64, |word, byte| {
            (word ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
    for part in 0..shape.parts() {
        let start = shape.part_offset(part) as usize;
        let end = start + shape.part_bytes(part) as usize;
        let mut next = || {
            word = word
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            word.to_le_bytes()
        };
        let (words, rest) = bytes[start..end].as_chunks_mut();
        words.iter_mut().for_each(|bytes| *bytes = next());
        if !rest.is_empty() {
            rest.copy_from_slice(&next()[..rest.len()]);
        }
    }
    bytes
}

impl Truth {
    /// Counts another put of a page, and returns its bytes.
    pub fn put(&mut self, name: Name) -> Vec<u8> {
        let puts = self.puts.entry(name).or_default();
        *puts += 1;
        payload(&name, *puts)
    }

    /// Whether these bytes were ever put under this name.
    #[must_use]
    pub fn was_put(&self, name: &Name, bytes: &[u8]) -> bool {
        let puts = self.puts.get(name).copied().unwrap_or(0);
        (1..=puts).any(|put| payload(name, put) == bytes)
    }

    /// Every page that was ever put, in a fixed order.
    #[must_use]
    pub fn names(&self) -> Vec<Name> {
        let mut names: Vec<Name> = self.puts.keys().copied().collect();
        names.sort_unstable();
        names
    }
}

/// A new store.
#[must_use]
pub fn fresh(volumes: &[u32], segment_blocks: u32) -> Image {
    let entries: Vec<VolumeEntry> = volumes
        .iter()
        .zip(1_u8..)
        .map(|(&segments, id)| VolumeEntry {
            id: VolumeId::from_bytes([id; 16]),
            segments,
            lost: false,
            path: format!("volume{id}"),
        })
        .collect();
    let superblock = |volume| Superblock {
        store: STORE,
        volume,
        generation: 1,
        run: Run::FIRST,
        state: OpenState::Clean,
        created_unix_s: 1_790_000_000,
        holder: Holder {
            pid: 1,
            pid_scope: [0; 16],
        },
        history: History::default(),
        clock: Clock::default(),
        keyring: 0,
        quotas: 0,
        segment_blocks,
        features: Features::default(),
        volumes: entries.clone(),
    };
    let beside = OVERHEAD_BYTES / BLOCK_BYTES as u64;
    let blocks = |segments: u32| beside + u64::from(segments) * u64::from(segment_blocks);
    Image {
        superblocks: (0..).zip(volumes).map(|(at, _)| superblock(at)).collect(),
        volumes: volumes
            .iter()
            .map(|&segments| Volume::new(blocks(segments)))
            .collect(),
    }
}

/// A store under construction.
pub struct Making {
    /// The store, open.
    pub machine: Machine,
    /// The pages that were put into it.
    pub truth: Truth,
}

impl Making {
    /// Opens a store.
    ///
    /// # Panics
    /// If it cannot be opened.
    #[must_use]
    pub fn on(image: Image, truth: Truth) -> Making {
        let (machine, damage) = Machine::open(image).expect("a store that can be opened");
        assert!(damage.is_empty(), "a sound store is damaged: {damage:?}");
        Making { machine, truth }
    }

    /// Puts chain `seed` of a namespace, as far as there is space.
    pub fn put(&mut self, namespace: usize, seed: u64, pages: usize) {
        let slot = self
            .machine
            .namespace(&namespaces()[namespace])
            .expect("few namespaces");
        let pages = new_pages(&mut self.truth, namespace, &chain(seed, pages));
        for status in self.machine.put_patiently(slot, &pages) {
            assert!(
                matches!(
                    status,
                    PutStatus::Stored | PutStatus::Duplicate | PutStatus::Refused(_)
                ),
                "{status:?}"
            );
        }
        self.machine.check();
    }

    /// Deletes the end of a chain, from page `from` on.
    pub fn delete(&mut self, namespace: usize, seed: u64, from: usize, pages: usize) {
        let slot = self.machine.namespace(&namespaces()[namespace]);
        let keys = chain(seed, pages).split_off(from);
        let done = self.machine.delete(slot.expect("few namespaces"), &keys);
        assert!(done, "a deletion finds no room");
    }

    /// Closes the store in order, or leaves it as a crash after a flush does.
    #[must_use]
    pub fn end(mut self, clean: bool) -> Sample {
        assert!(self.machine.flush(), "a flush fails");
        let names = self.truth.names();
        let kept = names
            .into_iter()
            .filter(|(namespace, key)| {
                let slot = self.machine.namespace(&namespaces()[*namespace]);
                self.machine
                    .index
                    .locate(slot.expect("few namespaces"), key)
                    .is_some()
            })
            .collect();
        let image = if clean {
            self.machine.close()
        } else {
            self.machine.kill()
        };
        Sample {
            image,
            truth: self.truth,
            kept,
        }
    }
}

/// The pages of a chain, ready to be put.
pub fn new_pages(truth: &mut Truth, namespace: usize, keys: &[PageKey]) -> Vec<NewPage> {
    let mut parent = None;
    keys.iter()
        .zip(0..)
        .map(|(&key, depth)| NewPage {
            key,
            parent: parent.replace(key),
            depth,
            bytes: truth.put((namespace, key)),
        })
        .collect()
}

/// Number of recipes.
pub const RECIPES: usize = 7;

/// The sample of a recipe.
///
/// # Panics
/// If the engine cannot make it.
#[must_use]
pub fn sample(recipe: usize) -> &'static Sample {
    static SAMPLES: [OnceLock<Sample>; RECIPES] = [const { OnceLock::new() }; RECIPES];
    SAMPLES[recipe].get_or_init(|| make(recipe))
}

fn make(recipe: usize) -> Sample {
    let least = |volumes: usize| u32::try_from(segments_min(volumes)).expect("few segments");
    let small = || fresh(&[least(1)], SMALL_SEGMENT_BLOCKS);
    match recipe {
        0 => Sample {
            image: small(),
            truth: Truth::default(),
            kept: Vec::new(),
        },
        1 => few_chains(small()).end(true),
        2 => few_chains(small()).end(false),
        3 => overfilled(small(), 40).end(true),
        4 => overfilled(small(), 57).end(false),
        5 => {
            let sides = least(2).div_ceil(2);
            overfilled(fresh(&[sides, sides], SMALL_SEGMENT_BLOCKS), 60).end(false)
        }
        _ => few_chains(fresh(&[least(1)], REAL_SEGMENT_BLOCKS)).end(false),
    }
}

fn few_chains(image: Image) -> Making {
    let mut making = Making::on(image, Truth::default());
    for seed in 0..3 {
        making.put(0, seed, 6);
    }
    making.put(1, 0, 4);
    making.delete(0, 1, 3, 6);
    making
}

/// More pages than fit, over several epochs.
fn overfilled(image: Image, chains: u64) -> Making {
    let mut making = Making::on(image, Truth::default());
    for seed in 0..chains {
        making.put((seed % 4 == 3).into(), seed, 8);
        if seed % 7 == 5 {
            making.delete(0, seed - 1, 4, 8);
        }
        if seed % 13 == 12 {
            let clean = seed % 2 == 0;
            let Sample { image, truth, .. } = making.end(clean);
            making = Making::on(image, truth);
        }
    }
    let slot = making.machine.namespace(&namespaces()[1]);
    let _ = making.machine.clear(slot.expect("few namespaces"));
    making.put(1, 1000, 3);
    making
}

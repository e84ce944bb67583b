//! Bits flipped anywhere in a store of 1,000 pages. It never returns wrong bytes. No open fails
//! while one superblock is whole. At most the touched pages are lost.
//!
//! A flip in a page's bytes touches that page. A flip in a descriptor block touches the pages that
//! the block describes. A flip in one copy of a header or of a superblock touches nothing.
//! `LARDER_FLIPS` sets the number of flipped bits, `LARDER_FLIPS_SEED` their choice.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};

use larder_core::capacity::segments_min;
use larder_engine::format::{
    BLOCK_BYTES, Body, Fingerprint, KeyPrefix, Record, Superblock, SuperblockError, newest,
    superblock_offsets,
};
use larder_engine::{PageStore, Store};
use larder_fuzz::edits::is_structure;
use larder_fuzz::examine::open_and_read;
use larder_fuzz::machine::{Image, Machine};
use larder_fuzz::memory_disk::Volume;
use larder_fuzz::raw::{MemoryFile, options, read_all};
use larder_fuzz::sample::{Making, Name, REAL_SEGMENT_BLOCKS, Sample, Truth, fresh, namespaces};
use larder_store::share::Inside;

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

const PAGES: usize = 1000;

/// Bits flipped without `LARDER_FLIPS`.
const FLIPS: usize = 10_000;

/// Flips in a store of real files, through the whole engine.
const FILE_FLIPS: usize = 40;

/// Blocks of the superblock's copies.
fn superblocks(volume: &Volume) -> [u64; 3] {
    let offsets = superblock_offsets(volume.blocks() * BLOCK_BYTES as u64);
    offsets.map(|offset| offset / BLOCK_BYTES as u64)
}

fn setting(name: &str, usual: usize) -> usize {
    std::env::var(name).map_or(usual, |value| value.parse().unwrap())
}

/// A store of 1,000 pages in several segments of several epochs, with deletions and dead pages in
/// between.
fn thousand(volumes: usize, clean: bool) -> Sample {
    let segments = segments_min(volumes) as u32 + 4;
    let mut making = Making::on(
        fresh(
            &vec![segments.div_ceil(volumes as u32); volumes],
            REAL_SEGMENT_BLOCKS,
        ),
        Truth::default(),
    );
    for seed in 0..100 {
        // One chain in ten has larger pages. Every chain of eleven pages loses its last page.
        making.put((seed % 10 == 9).into(), seed, 11);
        making.delete((seed % 10 == 9).into(), seed, 10, 11);
        // An epoch that ends in a crash leaves its segments to the next one, which opens others.
        if seed % 25 == 24 && seed < 99 {
            let Sample { image, truth, .. } = making.end(seed == 49);
            making = Making::on(image, truth);
        }
    }
    let mut sample = making.end(clean);
    assert_eq!(sample.kept.len(), PAGES);
    for (volume, superblock) in sample
        .image
        .volumes
        .iter_mut()
        .zip(&sample.image.superblocks)
    {
        let block = superblock.encode().unwrap();
        for copy in superblocks(volume) {
            volume.put(copy, *block);
        }
    }
    sample
}

/// The pages that need each block.
struct Needs {
    sample: Sample,
    pages: BTreeMap<(usize, u64), BTreeSet<Name>>,
}

impl Needs {
    fn of(sample: Sample) -> Needs {
        let kept: BTreeSet<Name> = sample.kept.iter().copied().collect();
        let by_prefix: BTreeMap<(Fingerprint, KeyPrefix), Name> = kept
            .iter()
            .map(|name| {
                let namespace = namespaces()[name.0].fingerprint();
                ((namespace, name.1.prefix()), *name)
            })
            .collect();
        let mut needs = Needs {
            sample: sample.clone(),
            pages: BTreeMap::new(),
        };
        let spots = sample.image.spots();
        for spot in &spots {
            let volume = &sample.image.volumes[spot.volume];
            for index in 0..spot.segment_blocks - 2 {
                let at = spot.block_offset(index) / BLOCK_BYTES as u64;
                let Ok(block) = spot.parse_block(index, &volume.block(at)) else {
                    continue;
                };
                let Body::Records(records) = &block.body else {
                    continue;
                };
                for record in records {
                    let Record::Page(page) = record else { continue };
                    if let Some(name) = by_prefix.get(&(page.namespace, page.key.prefix())) {
                        needs.note(spot.volume, at, *name);
                    }
                }
            }
        }
        let (mut machine, _) = Machine::open(sample.image).unwrap();
        for name in kept {
            let slot = machine.namespace(&namespaces()[name.0]).unwrap();
            let place = machine.index.locate(slot, &name.1).unwrap().place;
            let blocks = namespaces()[name.0].shape().page_blocks();
            let spot = &spots[place.segment.0 as usize];
            let first = spot.data(place.start, blocks).offset / BLOCK_BYTES as u64;
            for at in first..first + u64::from(blocks) {
                needs.note(spot.volume, at, name);
            }
        }
        needs
    }

    fn note(&mut self, volume: usize, at: u64, name: Name) {
        self.pages.entry((volume, at)).or_default().insert(name);
    }
}

/// A bit, as volume, block and bit in the block: in a structure, in any written block, or anywhere.
fn any_bit(image: &Image, random: &mut Pcg64Mcg) -> (usize, u64, usize) {
    let volume = random.random_range(0..image.volumes.len());
    let held = &image.volumes[volume];
    let mut written = held.written();
    let block = match random.random_range(0..8) {
        0 => random.random_range(0..held.blocks()),
        1 => superblocks(held)[random.random_range(0..3)],
        2..5 => {
            written.retain(|at| is_structure(&held.block(*at)));
            written[random.random_range(0..written.len())]
        }
        _ => written[random.random_range(0..written.len())],
    };
    (volume, block, random.random_range(0..BLOCK_BYTES * 8))
}

fn flip(image: &mut Image, (volume, at, bit): (usize, u64, usize)) {
    let mut block = image.volumes[volume].block(at);
    block[bit / 8] ^= 1 << (bit % 8);
    image.volumes[volume].put(at, block);
}

/// The superblock by which a volume is opened.
fn superblock_of(image: &Image, volume: usize) -> Option<Superblock> {
    newest(copies_of(image, volume)).ok()
}

fn copies_of(image: &Image, volume: usize) -> [Result<Superblock, SuperblockError>; 3] {
    let volume = &image.volumes[volume];
    superblocks(volume).map(|at| Superblock::decode(&volume.block(at)))
}

/// Flips bits in a copy of the store, opens it and reads it all.
fn check(needs: &Needs, flips: &[(usize, u64, usize)]) {
    let sample = &needs.sample;
    let mut image = sample.image.clone();
    let mut touched = BTreeSet::new();
    let mut copies = BTreeSet::new();
    for &bit in flips {
        flip(&mut image, bit);
        let (volume, at, _) = bit;
        touched.extend(
            needs
                .pages
                .get(&(volume, at))
                .into_iter()
                .flatten()
                .copied(),
        );
        let places = superblocks(&image.volumes[volume]);
        copies.extend(places.contains(&at).then_some((volume, at)));
    }
    for volume in 0..image.volumes.len() {
        let places = superblocks(&image.volumes[volume]);
        let both = places[..2].iter().all(|at| copies.contains(&(volume, *at)));
        // Beside a block without its magic the copy at the end does not count.
        let is_foreign = |copy: &Result<_, _>| *copy == Err(SuperblockError::NotLarder);
        let is_told = copies_of(&image, volume)[..2].iter().any(is_foreign);
        let all = both && (is_told || copies.contains(&(volume, places[2])));
        let found = superblock_of(&image, volume);
        assert!(
            found.as_ref() == Some(&image.superblocks[volume]) || found.is_none() && all,
            "volume {volume} is opened by another superblock after {flips:?}"
        );
    }
    let found = open_and_read(image, &sample.truth).expect("an epoch number is left");
    let hits: BTreeSet<Name> = found.hits.into_iter().collect();
    let lost: Vec<&Name> = sample
        .kept
        .iter()
        .filter(|name| !hits.contains(name) && !touched.contains(name))
        .collect();
    assert!(
        lost.is_empty(),
        "{} untouched pages are lost, after {flips:?}: {lost:?}",
        lost.len()
    );
}

#[test]
fn a_flipped_bit_costs_at_most_the_pages_it_touches_and_never_gives_wrong_bytes() {
    let count = setting("LARDER_FLIPS", FLIPS);
    let seed = setting("LARDER_FLIPS_SEED", 1) as u64;
    let stores = [
        Needs::of(thousand(1, true)),
        Needs::of(thousand(1, false)),
        Needs::of(thousand(2, false)),
    ];
    let next = AtomicUsize::new(0);
    let work = || {
        loop {
            // Half of the bits one at a time, the others in bursts of up to 64.
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count / 2 + count / 64 {
                return;
            }
            let mut random = Pcg64Mcg::seed_from_u64(seed << 32 | number as u64);
            let store = &stores[number % stores.len()];
            let together = if number < count / 2 {
                1
            } else {
                random.random_range(2..=64)
            };
            let flips: Vec<_> = (0..together)
                .map(|_| any_bit(&store.sample.image, &mut random))
                .collect();
            check(store, &flips);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
}

#[test]
fn a_store_of_flipped_bits_opens_through_the_whole_engine_as_long_as_one_superblock_is_whole() {
    let mut random = Pcg64Mcg::seed_from_u64(7);
    for clean in [true, false] {
        let sample = thousand(1, clean);
        for round in 0..FILE_FLIPS / 2 {
            let mut image = sample.image.clone();
            // One superblock copy, and a few bits anywhere behind the superblocks.
            let places = superblocks(&image.volumes[0]);
            let broken = places[round % 3];
            flip(
                &mut image,
                (0, broken, random.random_range(0..BLOCK_BYTES * 8)),
            );
            for _ in 0..round % 5 {
                let (volume, at, bit) = any_bit(&image, &mut random);
                if !places.contains(&at) {
                    flip(&mut image, (volume, at, bit));
                }
            }
            let file = MemoryFile::holding(&image);
            let store = Store::open(&file.path(), options(false)).unwrap();
            let hits = read_all(&store, &sample.truth);
            assert!(
                hits + 45 * (round % 5) >= PAGES,
                "{hits} of {PAGES} pages are left"
            );
            store.local().unwrap().check_invariants().unwrap();
            store.close().unwrap();
            // An opening for writing has repaired the broken copy.
            let block = file.read(broken * BLOCK_BYTES as u64, BLOCK_BYTES);
            Superblock::decode(&block).unwrap();
        }
    }
}

#[test]
fn a_store_without_a_whole_superblock_is_refused() {
    let sample = thousand(1, true);
    let mut image = sample.image.clone();
    for at in superblocks(&image.volumes[0]) {
        flip(&mut image, (0, at, 2000));
    }
    let file = MemoryFile::holding(&image);
    for read_only in [true, false] {
        let error = Store::open(&file.path(), options(read_only)).err().unwrap();
        assert!(error.to_string().contains("damaged"), "{error}");
    }
}

//! Ranks that hold some of the heads of a model, and find the pages of other numbers of ranks.

use std::path::Path;

use larder_kernels::KvShape;
use larder_tiers::prefix::{OpenError, PrefixOptions};
use larder_tiers::{Model, PrefixCache};

const HEADS: u32 = 8;
const HEAD_DIM: usize = 4;
const LAYERS: u32 = 2;
const PAGE_TOKENS: u32 = 4;
const PAGES: usize = 5;

/// The heads of a rank.
type Heads = std::ops::Range<u32>;

fn heads_of(rank: u32, ranks: u32) -> Heads {
    let each = HEADS / ranks;
    rank * each..(rank + 1) * each
}

fn options(heads: &Heads, groups: u32) -> PrefixOptions {
    let shape = KvShape::mha(LAYERS, HEADS, HEAD_DIM as u32, 1, PAGE_TOKENS).unwrap();
    let model = Model::new("m", "", "u8", shape)
        .heads(heads.clone())
        .unwrap();
    PrefixOptions::new(&model, 20, 20).with(|o| o.head_groups = Some(groups))
}

fn open(path: &Path, heads: &Heads) -> PrefixCache {
    options(heads, HEADS).open(path, 128 << 20).unwrap()
}

fn prompt() -> Vec<u64> {
    (0..=PAGES as u64 * u64::from(PAGE_TOKENS)).collect()
}

/// The values of some heads of a row. Every head of every row has others.
fn row(heads: &Heads, (part, layer, token): (u32, u32, usize)) -> Vec<u8> {
    let head = |head| {
        let place = [part, layer, token as u32, head];
        let number = place.iter().fold(1_u32, |sum, of| {
            (sum ^ of).wrapping_mul(0x0100_0193).rotate_left(9)
        });
        number.to_le_bytes()
    };
    heads.clone().flat_map(head).collect()
}

fn places(tokens: usize) -> impl Iterator<Item = (u32, u32, usize)> {
    let layers = (0..2).flat_map(|part| (0..LAYERS).map(move |layer| (part, layer)));
    layers.flat_map(move |(part, layer)| (0..tokens).map(move |token| (part, layer, token)))
}

/// A rank computes so many pages of the prompt, and keeps them.
fn keep(path: &Path, heads: &Heads, pages: usize) {
    let cache = open(path, heads);
    let tokens = pages * PAGE_TOKENS as usize;
    let mut sequence = cache.begin(&prompt()[..=tokens]).unwrap();
    assert_eq!(sequence.cached().tokens(), 0);
    for (part, layer, token) in places(tokens) {
        let values = row(heads, (part, layer, token));
        let into = sequence.row_mut(part, layer, token).unwrap();
        into.copy_from_slice(&values);
    }
    sequence.computed(tokens).unwrap();
    sequence.keep().unwrap();
    cache.close().unwrap();
}

/// The pages that a rank finds in L3, after a check of each value.
fn found(path: &Path, heads: &Heads) -> usize {
    let cache = open(path, heads);
    let sequence = cache.begin(&prompt()).unwrap();
    let tokens = sequence.cached().tokens();
    assert_eq!(sequence.cached().l3, tokens);
    for (part, layer, token) in places(tokens) {
        let found = sequence.row(part, layer, token).unwrap();
        assert_eq!(found, row(heads, (part, layer, token)), "{heads:?}");
    }
    drop(sequence);
    cache.close().unwrap();
    tokens / PAGE_TOKENS as usize
}

#[test]
fn a_store_of_four_ranks_serves_one_two_four_and_eight() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv.store");
    for rank in 0..4 {
        keep(&path, &heads_of(rank, 4), PAGES);
    }
    for ranks in [8, 4, 2, 1] {
        for rank in 0..ranks {
            assert_eq!(
                found(&path, &heads_of(rank, ranks)),
                PAGES,
                "{rank} of {ranks}"
            );
        }
    }
}

#[test]
fn a_page_of_three_of_four_ranks_is_not_used() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv.store");
    for rank in 0..4 {
        let pages = if rank == 2 { 2 } else { PAGES };
        keep(&path, &heads_of(rank, 4), pages);
    }
    let path = &path;
    let pages = |ranks| (0..ranks).map(move |rank| found(path, &heads_of(rank, ranks)));
    assert!(pages(1).eq([2]));
    assert!(pages(2).eq([PAGES, 2]));
    assert!(pages(8).eq([PAGES, PAGES, PAGES, PAGES, 2, 2, PAGES, PAGES]));
}

#[test]
fn a_rank_with_a_part_of_a_group_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv.store");
    for (heads, groups) in [(0..2, 2), (2..4, 3), (1..3, 4), (0..8, 0), (0..8, 16)] {
        let refused = options(&heads, groups).open(&path, 128 << 20).err();
        assert!(matches!(refused, Some(OpenError::Part(_))), "{refused:?}");
    }
    assert!(!path.exists());
}

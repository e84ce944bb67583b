//! The most hits that any policy can have.
//!
//! After each request the block whose next use is farthest goes, of equal ones the deepest, until
//! the rest fits. The blocks of the request itself may go too. A block is never used later than its
//! child, so that this takes leaves only, and the rest of a chain is a prefix of it.

use std::collections::BinaryHeap;

use crate::replay::requests::Requests;

const NEVER: u32 = u32::MAX;

/// Hits with room for `pages` blocks.
pub(super) fn hits(requests: &Requests, pages: usize) -> u64 {
    let next = next_uses(requests);
    let mut stored: Vec<Option<u32>> = vec![None; requests.distinct()];
    let mut farthest = BinaryHeap::new();
    let (mut hits, mut count, mut at) = (0, 0, 0);
    for request in requests.iter() {
        let blocks = requests.blocks(request);
        hits += blocks
            .iter()
            .take_while(|block| stored[**block as usize].is_some())
            .count() as u64;
        for (depth, block) in blocks.iter().enumerate() {
            let slot = &mut stored[*block as usize];
            count += usize::from(slot.is_none());
            *slot = Some(next[at]);
            farthest.push((next[at], depth, *block));
            at += 1;
        }
        while count > pages
            && let Some((next, _, block)) = farthest.pop()
        {
            let slot = &mut stored[block as usize];
            // Entries of earlier uses are stale.
            if *slot == Some(next) {
                *slot = None;
                count -= 1;
            }
        }
    }
    hits
}

/// For each reference the number of the request that uses its block next.
fn next_uses(requests: &Requests) -> Vec<u32> {
    let mut next = vec![NEVER; requests.references() as usize];
    let mut last = vec![NEVER; requests.distinct()];
    let mut at = next.len();
    for (number, request) in requests.iter().enumerate().rev() {
        let blocks = requests.blocks(request);
        at -= blocks.len();
        for (next, block) in next[at..].iter_mut().zip(blocks) {
            *next = last[*block as usize];
        }
        for block in blocks {
            last[*block as usize] = number as u32;
        }
    }
    next
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::interrupt::Interrupt;

    fn requests(chains: &[&[u64]]) -> Requests {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace");
        let line = |chain: &&[u64]| format!("{}\n", serde_json::json!({"hash_ids": chain}));
        std::fs::write(&path, chains.iter().map(line).collect::<String>()).unwrap();
        Requests::read(&path, usize::MAX, &Interrupt::never()).unwrap()
    }

    #[test]
    fn the_block_that_is_used_last_goes_and_blocks_that_are_used_no_more_go_before_all() {
        let requests = requests(&[&[1, 2], &[3], &[4], &[3], &[1, 2], &[4]]);
        let by_room: Vec<u64> = (0..5).map(|pages| hits(&requests, pages)).collect();
        // With room for two, 1 and 3 are kept.
        assert_eq!(by_room, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn a_chain_is_kept_from_its_head() {
        let requests = requests(&[&[1, 2, 3], &[9], &[1, 2, 3]]);
        let by_room: Vec<u64> = (0..5).map(|pages| hits(&requests, pages)).collect();
        assert_eq!(by_room, [0, 1, 2, 3, 3]);
    }
}

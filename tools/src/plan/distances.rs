//! The hits of a trace in an LRU store of any size, from exact stack distances.
//!
//! A request uses its blocks from the last one to the first. So a block is never older than the
//! block behind it, and a hit has all blocks before it. A block enters when it is stored: a request
//! of a recording may ask for blocks that nothing stores.

use std::collections::HashMap;

use crate::trace::Request;

/// See the module.
#[derive(Default)]
pub struct Distances {
    /// Blocks used since the last use of a block, for each block that was asked for again, in
    /// order once [`Distances::sort`] was called.
    asked: Vec<u32>,
    /// The same for each block that was stored again.
    stored: Vec<u32>,
    /// Blocks asked for, and blocks to be stored.
    pub blocks_asked: u64,
    blocks_stored: u64,
    last: HashMap<u64, u32>,
    sums: Vec<u32>,
}

impl Distances {
    /// Takes the next request. Returns the distance of each block asked for, from the first one to
    /// the last; `None` for a block that was not stored before.
    pub fn add(&mut self, request: &Request) -> Vec<Option<u32>> {
        let (blocks, asked) = (&request.hash_ids, request.asked());
        let end = asked.end.max(request.stored());
        self.blocks_asked += asked.len() as u64;
        let mut found = vec![None; asked.len()];
        for at in (asked.start..end).rev() {
            let enters = at < request.stored();
            if !enters && !self.last.contains_key(&blocks[at]) {
                continue;
            }
            let distance = self.used(blocks[at]);
            if asked.contains(&at) {
                found[at - asked.start] = distance;
                self.asked.extend(distance);
            }
            if enters {
                self.blocks_stored += 1;
                self.stored.extend(distance);
            }
        }
        found
    }

    /// The other blocks used since the last use of this one.
    fn used(&mut self, block: u64) -> Option<u32> {
        if self.sums.is_empty() {
            self.sums = vec![0, 0];
        }
        let now = self.sums.len() as u32 - 1;
        let before = self.last.insert(block, now);
        let distance = before.map(|before| {
            let since = self.last.len() as u32 - self.upto(before);
            self.change(before, u32::MAX);
            since
        });
        self.grow();
        self.change(now, 1);
        distance
    }

    /// Another place in the Fenwick tree. Places count from 1.
    fn grow(&mut self) {
        let node = self.sums.len();
        let mut sum = 0;
        let mut child = node - 1;
        let end = node & (node - 1);
        while child > end {
            sum += self.sums[child];
            child &= child - 1;
        }
        self.sums.push(sum);
    }

    fn change(&mut self, place: u32, by: u32) {
        let mut node = place as usize;
        while let Some(sum) = self.sums.get_mut(node) {
            *sum = sum.wrapping_add(by);
            node += node & node.wrapping_neg();
        }
    }

    fn upto(&self, place: u32) -> u32 {
        let (mut node, mut sum) = (place as usize, 0_u32);
        while node > 0 {
            sum = sum.wrapping_add(self.sums[node]);
            node &= node - 1;
        }
        sum
    }

    /// Comes after the last request.
    pub fn sort(&mut self) {
        self.asked.sort_unstable();
        self.stored.sort_unstable();
    }

    /// Different blocks that were stored.
    #[cfg(feature = "charts")]
    pub fn blocks(&self) -> u64 {
        self.last.len() as u64
    }

    /// Blocks asked for that a store of so many blocks has.
    pub fn hits(&self, blocks: u64) -> u64 {
        within(&self.asked, blocks)
    }

    /// Blocks that a store of so many blocks takes anew.
    pub fn puts(&self, blocks: u64) -> u64 {
        self.blocks_stored - within(&self.stored, blocks)
    }
}

fn within(sorted: &[u32], blocks: u64) -> u64 {
    sorted.partition_point(|distance| u64::from(*distance) < blocks) as u64
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::path::Path;

    use super::*;
    use crate::trace::Trace;

    fn of(text: &str) -> (Distances, Vec<Vec<Option<u32>>>) {
        let mut distances = Distances::default();
        let requests = Trace::new(Path::new("t"), text.as_bytes());
        let found = requests.map(|request| distances.add(&request.unwrap()));
        let found = found.collect();
        distances.sort();
        (distances, found)
    }

    #[test]
    fn the_distance_of_a_block_is_the_other_blocks_used_since() {
        let (distances, found) = of("{\"hash_ids\": [1, 2, 3]}\n{\"hash_ids\": [1, 2, 4]}\n\
             {\"hash_ids\": [9]}\n{\"hash_ids\": [1, 2, 3]}");
        assert_eq!(found[0], [None; 3]);
        // The last block is used first.
        assert_eq!(found[1], [Some(2), Some(2), None]);
        assert_eq!(found[3], [Some(3), Some(3), Some(4)]);
        assert_eq!((distances.blocks_asked, distances.hits(3)), (10, 2));
        assert_eq!((distances.hits(5), distances.puts(5)), (5, 5));
        assert_eq!(distances.puts(0), 10);
    }

    #[test]
    fn a_recorded_request_uses_the_blocks_it_asked_for_and_stored() {
        let (distances, found) = of("{\"hash_ids\": [1, 2, 3], \"asked\": [1, 2]}\n\
             {\"hash_ids\": [1, 2, 3], \"stored\": 0}");
        assert_eq!(found[1], [None, Some(1), Some(1)]);
        assert_eq!((distances.blocks_asked, distances.puts(9)), (4, 2));
    }

    #[test]
    fn blocks_that_were_asked_for_and_not_stored_are_not_found() {
        let (distances, found) = of("{\"hash_ids\": [1, 2, 3], \"stored\": 1}\n\
             {\"hash_ids\": [1, 2, 3]}\n{\"hash_ids\": [1, 2, 3]}");
        assert_eq!(found[1], [Some(2), None, None]);
        assert_eq!(found[2], [Some(2); 3]);
        assert_eq!((distances.blocks_asked, distances.hits(9)), (9, 4));
        assert_eq!(distances.puts(9), 3);
    }
}

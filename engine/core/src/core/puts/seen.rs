//! The pages that puts asked for lately, stored or not.
//!
//! Two filters of bits (Bloom): the present one, and the one before it. A filter takes two names
//! for each page that the store holds, so that a name is known for two to four capacities of new
//! pages, in 8 bytes a page. Of the names that were never asked for up to 3 % count as known.
//!
//! A name counts as known some seconds after it was asked for: until then a caller may ask again
//! for the same request.

use std::collections::VecDeque;

/// Until then an ask is of the same request.
const REQUEST_MS: u64 = 5_000;

/// Most names that wait to be known. Further ones are known earlier.
const WAITING_MAX: usize = 1 << 16;

const NAMES_MIN: usize = 1 << 10;

/// Names for each word of a filter: 16 bits a name.
const NAMES_A_WORD: usize = 4;

#[derive(Debug, Default)]
struct Filter {
    words: Vec<u64>,
    names: usize,
}

/// The word and the bit of a name.
fn places(name: u64, words: usize) -> [(usize, u64); 2] {
    let hash = name.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    [hash, hash.rotate_left(32)].map(|hash| {
        let at = ((hash >> 32) * words as u64) >> 32;
        (at as usize, 1 << (hash & 63))
    })
}

impl Filter {
    fn for_names(names: usize) -> Filter {
        Filter {
            words: vec![0; names.div_ceil(NAMES_A_WORD)],
            names: 0,
        }
    }

    fn has(&self, name: u64) -> bool {
        let words = &self.words;
        !words.is_empty()
            && places(name, words.len())
                .iter()
                .all(|(at, bit)| words[*at] & bit != 0)
    }

    fn add(&mut self, name: u64) {
        for (at, bit) in places(name, self.words.len()) {
            self.words[at] |= bit;
        }
        self.names += 1;
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Seen {
    present: Filter,
    before: Filter,
    waiting: VecDeque<(u64, u64)>,
}

impl Seen {
    /// The store holds so many pages.
    pub(super) fn expect(&mut self, pages: usize, now_ms: u64) {
        while let Some((name, asked_ms)) = self.waiting.front().copied()
            && (now_ms >= asked_ms + REQUEST_MS || self.waiting.len() > WAITING_MAX)
        {
            self.waiting.pop_front();
            self.know(name, pages);
        }
    }

    fn know(&mut self, name: u64, pages: usize) {
        if self.present.names >= self.present.words.len() * NAMES_A_WORD {
            let names = (2 * pages).max(NAMES_MIN);
            self.before = std::mem::replace(&mut self.present, Filter::for_names(names));
        }
        self.present.add(name);
    }

    /// Whether a name is known. It will be.
    pub(super) fn ask(&mut self, name: u64, now_ms: u64) -> bool {
        self.waiting.push_back((name, now_ms));
        self.present.has(name) || self.before.has(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_known_for_two_capacities_and_forgotten_after_five() {
        const PAGES: u64 = 10_000;
        let mut seen = Seen::default();
        let mut now_ms = 0;
        for name in 0..8 * PAGES {
            now_ms += 10;
            seen.expect(PAGES as usize, now_ms);
            seen.ask(name, now_ms);
        }
        seen.expect(PAGES as usize, now_ms + REQUEST_MS);
        let known = |names: std::ops::Range<u64>| {
            let ask = |name: &u64| seen.present.has(*name) || seen.before.has(*name);
            names.filter(ask).count() as u64
        };
        assert_eq!(known(6 * PAGES..8 * PAGES), 2 * PAGES);
        assert!(known(0..3 * PAGES) < PAGES * 3 / 20);
        assert!(known(100 * PAGES..110 * PAGES) < PAGES * 10 / 20);
    }

    #[test]
    fn a_name_is_known_only_after_its_request() {
        let mut seen = Seen::default();
        for (now_ms, is_known) in [(0, false), (4_000, false), (5_001, true)] {
            seen.expect(10, now_ms);
            assert_eq!(seen.ask(7, now_ms), is_known, "{now_ms}");
        }
    }
}

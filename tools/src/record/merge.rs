//! Calls, merged to requests: the lookups that all ranks make for one request, the lookups of its
//! parts, and its puts.
//!
//! A request is held for a while after its first call, for the calls that follow. Puts that belong
//! to no held request are requests that ask for no page.

use std::collections::VecDeque;

use larder_store::traffic::{Call, Kind};

use super::lines::{Named, RequestLine, Whole};
use crate::trace::{BLOCK_TOKENS, L3};

/// Time between the first lookup of a request and the last one, of another rank or of a later part.
const LOOKUPS_MS: u64 = 10_000;

/// How long a request is held whose pages are all found or stored, for the ranks behind.
const COMPLETE_MS: u64 = 2_000;

/// How long a request is held for its puts.
const HELD_MS: u64 = 60_000;

/// Most requests held.
const HELD_MAX: usize = 4096;

/// A request.
struct Held {
    at_ms: u64,
    group: usize,
    block_tokens: u32,
    model: Option<String>,
    chain: Vec<u64>,
    /// The pages asked for, the end of the found ones, and the end of the stored ones.
    from: usize,
    to: usize,
    found: usize,
    stored: usize,
    /// The ends of its lookups, and each process with the end of its last one.
    ends: Vec<usize>,
    by: Vec<(u32, usize)>,
}

/// See the module.
#[derive(Default)]
pub struct Merger {
    held: VecDeque<Held>,
}

impl Merger {
    /// A call, with the whole chain of its pages.
    pub fn add(&mut self, named: &Named, whole: &Whole, call: &Call) {
        match call.kind {
            Kind::Lookup => self.lookup(named, whole, call),
            Kind::Put => self.put(named, whole, call),
            Kind::Get => {}
        }
    }

    fn held(&mut self, group: usize) -> impl Iterator<Item = &mut Held> {
        let held = self.held.iter_mut().rev();
        held.filter(move |held| held.group == group)
    }

    fn lookup(&mut self, named: &Named, whole: &Whole, call: &Call) {
        let recent = |held: &&mut Held| call.at_ms.saturating_sub(held.at_ms) < LOOKUPS_MS;
        let mut held = self.held(named.group).filter(recent);
        if held.any(|held| held.takes_lookup(whole, call)) {
            return;
        }
        drop(held);
        let end = whole.pages.len();
        self.held.push_back(Held {
            from: whole.first,
            to: end,
            found: whole.first + call.found as usize,
            stored: 0,
            ends: vec![end],
            by: vec![(call.process, end)],
            ..Held::new(named, whole, call)
        });
    }

    fn put(&mut self, named: &Named, whole: &Whole, call: &Call) {
        if self.held(named.group).any(|held| held.takes_put(whole)) {
            return;
        }
        self.held.push_back(Held {
            from: whole.first,
            to: whole.first,
            found: whole.first,
            stored: whole.pages.len(),
            ..Held::new(named, whole, call)
        });
    }

    /// The requests that no later call belongs to, in the order of their first calls.
    pub fn ready(&mut self, now_ms: u64) -> Vec<RequestLine> {
        let mut ready = Vec::new();
        while let Some(first) = self.held.front() {
            let age = now_ms.saturating_sub(first.at_ms);
            let is_full = self.held.len() > HELD_MAX;
            if age < COMPLETE_MS || !(first.is_complete() || age >= HELD_MS || is_full) {
                break;
            }
            ready.extend(self.held.pop_front().map(Held::line));
        }
        ready
    }
}

impl Held {
    fn new(named: &Named, whole: &Whole, call: &Call) -> Held {
        let of = named.of.as_ref();
        Held {
            at_ms: call.at_ms,
            group: named.group,
            block_tokens: of.map_or(BLOCK_TOKENS, |of| of.block_tokens),
            model: of.map(|of| of.model.clone()),
            chain: whole.pages.clone(),
            from: 0,
            to: 0,
            found: 0,
            stored: 0,
            ends: Vec::new(),
            by: Vec::new(),
        }
    }

    /// Whether a lookup belongs to this request.
    fn takes_lookup(&mut self, whole: &Whole, call: &Call) -> bool {
        let (end, found) = (whole.pages.len(), whole.first + call.found as usize);
        let both = self.chain.len().min(end);
        if self.to == self.from || self.chain[..both] != whole.pages[..both] {
            return false;
        }
        let own = self
            .by
            .iter_mut()
            .find(|(process, _)| *process == call.process);
        match own {
            // Another rank.
            None if self.ends.contains(&end) => self.by.push((call.process, end)),
            None => return false,
            // The next part, which is asked for when all pages before it are found.
            Some((_, last)) if end > *last && whole.first <= *last && self.found >= *last => {
                *last = end;
                if end > self.to {
                    (self.to, self.found) = (end, found);
                    self.ends.push(end);
                }
                if end > self.chain.len() {
                    self.chain.clone_from(&whole.pages);
                }
                return true;
            }
            // The same part without its first page, which was not found.
            Some((_, last))
                if end == *last && whole.first == self.from + 1 && self.found == self.from =>
            {
                (self.from, self.found) = (whole.first, found);
                return true;
            }
            Some(_) => return false,
        }
        if end == self.to {
            self.found = self.found.min(found.max(self.from));
        }
        true
    }

    /// Whether a put belongs to this request: it stores pages of its chain, or the pages behind it.
    fn takes_put(&mut self, whole: &Whole) -> bool {
        let end = whole.pages.len();
        let both = self.chain.len().min(end);
        let follows = both > whole.first || both == whole.first && both > 0;
        if !follows || self.chain[..both] != whole.pages[..both] {
            return false;
        }
        self.stored = self.stored.max(end);
        if end > self.chain.len() {
            self.chain.clone_from(&whole.pages);
        }
        true
    }

    fn is_complete(&self) -> bool {
        self.found.max(self.stored) >= self.chain.len()
    }

    fn line(self) -> RequestLine {
        let pages = self.chain.len();
        let stored = self.stored.max(self.found);
        RequestLine {
            timestamp: self.at_ms,
            input_length: self.to as u64 * u64::from(self.block_tokens),
            hash_ids: self
                .chain
                .into_iter()
                .map(|page| of_group(page, self.group))
                .collect(),
            block_tokens: self.block_tokens,
            tier: L3,
            model: self.model,
            asked: ((self.from, self.to) != (0, pages)).then_some((self.from, self.to)),
            stored: (stored < pages).then_some(stored),
        }
    }
}

/// The number of a page among those of all groups: models have equal keys for equal tokens.
fn of_group(page: u64, group: usize) -> u64 {
    const STRIDE: u64 = 0x9e37_79b9_7f4a_7c15;
    page ^ (STRIDE.wrapping_mul(group as u64) >> 11)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANK: u32 = 7;

    fn named(group: usize) -> Named {
        Named {
            fingerprint: String::new(),
            group,
            of: None,
        }
    }

    fn call(kind: Kind, process: u32, at_ms: u64, pages: &[u64], found: u32) -> Call {
        Call {
            at_ms,
            kind,
            process,
            namespace: [0; 16],
            parent: None,
            pages: pages.to_vec(),
            found,
        }
    }

    /// Calls: their first page in the chain, the chain, the pages found.
    fn merged(calls: &[(Kind, u32, usize, &[u64], u32)]) -> Vec<RequestLine> {
        let mut merger = Merger::default();
        for (at, (kind, process, first, chain, found)) in (0..).zip(calls) {
            let whole = Whole {
                pages: chain.to_vec(),
                first: *first,
            };
            let call = call(*kind, *process, at, &chain[*first..], *found);
            merger.add(&named(0), &whole, &call);
        }
        merger.ready(u64::MAX)
    }

    fn facts(line: &RequestLine) -> (&[u64], Option<(usize, usize)>, Option<usize>) {
        (&line.hash_ids, line.asked, line.stored)
    }

    #[test]
    fn a_lookup_and_its_put_are_one_request() {
        use Kind::{Get, Lookup, Put};
        let lines = merged(&[
            (Lookup, 0, 0, &[1, 2, 3], 1),
            (Get, 0, 0, &[1], 1),
            (Put, 0, 1, &[1, 2, 3], 2),
            (Lookup, 0, 0, &[1, 2, 3], 3),
        ]);
        assert_eq!(lines.len(), 2);
        for line in &lines {
            assert_eq!(facts(line), (&[1, 2, 3][..], None, None));
        }
    }

    #[test]
    fn the_calls_of_all_ranks_are_one_request_and_equal_requests_are_two() {
        use Kind::{Lookup, Put};
        let one: Vec<_> = (0..RANK)
            .map(|rank| (Lookup, rank, 0, &[1_u64, 2][..], 0))
            .chain((0..RANK).map(|rank| (Put, rank, 0, &[1, 2][..], 2)))
            .collect();
        assert_eq!(merged(&one).len(), 1);
        let lines = merged(&[one.clone(), one].concat());
        assert_eq!(lines.len(), 2);
    }

    #[test]
    fn the_parts_of_a_lookup_are_one_request() {
        use Kind::Lookup;
        // Of two ranks, the second part with the page before it.
        let lines = merged(&[
            (Lookup, 0, 0, &[1, 2], 2),
            (Lookup, 1, 0, &[1, 2], 2),
            (Lookup, 0, 1, &[1, 2, 3, 4], 2),
            (Lookup, 1, 1, &[1, 2, 3, 4], 2),
        ]);
        assert_eq!(lines.len(), 1);
        assert_eq!(facts(&lines[0]), (&[1, 2, 3, 4][..], None, Some(3)));
        // The page before is not stored, and the part is asked for without it.
        let lines = merged(&[
            (Lookup, 0, 4, &[1, 2, 3, 4, 5, 6], 0),
            (Lookup, 0, 5, &[1, 2, 3, 4, 5, 6], 1),
        ]);
        assert_eq!(lines.len(), 1);
        assert_eq!(lines[0].asked, Some((5, 6)));
    }

    #[test]
    fn puts_behind_a_request_are_stored_without_being_asked_for() {
        use Kind::{Lookup, Put};
        let lines = merged(&[
            (Lookup, 0, 0, &[1, 2], 2),
            (Put, 0, 2, &[1, 2, 3], 1),
            (Put, 0, 1, &[8, 9], 1),
            (Lookup, 0, 0, &[5, 6, 7], 1),
        ]);
        let all: Vec<_> = lines.iter().map(facts).collect();
        assert_eq!(
            all,
            [
                (&[1, 2, 3][..], Some((0, 2)), None),
                (&[8, 9][..], Some((1, 1)), None),
                (&[5, 6, 7][..], None, Some(1)),
            ]
        );
    }

    #[test]
    fn a_request_is_held_until_its_pages_are_stored_or_its_time_is_over() {
        let mut merger = Merger::default();
        let whole = Whole {
            pages: vec![1, 2],
            first: 0,
        };
        merger.add(&named(0), &whole, &call(Kind::Lookup, 0, 0, &[1, 2], 0));
        assert!(merger.ready(COMPLETE_MS).is_empty());
        merger.add(&named(0), &whole, &call(Kind::Put, 0, 0, &[1, 2], 2));
        assert!(merger.ready(COMPLETE_MS - 1).is_empty());
        assert_eq!(merger.ready(COMPLETE_MS).len(), 1);
        merger.add(&named(1), &whole, &call(Kind::Lookup, 0, 0, &[1, 2], 0));
        assert_eq!(merger.ready(HELD_MS)[0].stored, Some(0));
    }

    #[test]
    fn equal_pages_of_two_models_have_two_numbers() {
        assert_eq!(of_group(5, 0), 5);
        assert_ne!(of_group(5, 1), of_group(5, 2));
        assert!(of_group((1 << 53) - 1, 3) < 1 << 53);
    }
}

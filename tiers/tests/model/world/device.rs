//! The device and L3: orders that begin and end in any order, and sometimes fail.

use larder_format::PageKey;
use larder_tiers::core::{Done, Fence, OpId, Order, Outcome, TierName};

use super::{Content, Flight, Forward, World, numbers};

impl World {
    /// Begins or ends one of the orders in progress.
    pub(super) fn run_device(&mut self) {
        let ids: Vec<OpId> = self.flights.keys().copied().collect();
        if ids.is_empty() {
            return;
        }
        let id = ids[self.below(ids.len())];
        self.run(id);
    }

    /// Begins or ends this order, if it is in progress.
    fn run(&mut self, id: OpId) {
        match self.flights.get(&id).map(|flight| flight.begun.is_some()) {
            None => {}
            Some(false) => self.begin(id),
            Some(true) => self.end(id),
        }
    }

    /// Drops a request whose forward has not run: its pages may be loaded into before.
    pub(super) fn abandon(&mut self) {
        self.start();
        let at = self.running.len().saturating_sub(1);
        self.forward_of(at);
        if at < self.running.len() {
            self.finish_one(at, false);
        }
        self.reuse();
    }

    /// Evicts pages and loads others, until most pages of L1 had a turn.
    pub(super) fn reuse(&mut self) {
        for _ in 0..6 {
            let running = self.running.len();
            self.core.evict(50);
            self.settle();
            self.start();
            self.load_back();
            self.settle();
            let loads = self.flights.iter();
            let loads = loads.filter(|(_, flight)| matches!(flight.order, Order::Load { .. }));
            for id in loads.map(|(id, _)| *id).collect::<Vec<_>>() {
                self.run(id);
                self.run(id);
                self.settle();
            }
            if self.running.len() > running {
                self.finish_one(running, false);
                self.settle();
            }
        }
    }

    pub(super) fn begin(&mut self, id: OpId) {
        let passed = Fence(self.fence_passed);
        let begun = match &self.flights[&id].order {
            Order::BackUp { l1, l2, .. } => {
                assert!(
                    l1.page_numbers()
                        .all(|page| !self.taint.contains_key(&page)),
                    "a backup of pages of a failed forward"
                );
                let source = numbers(l1).iter().map(|page| self.l1[*page]).collect();
                numbers(l2).iter().for_each(|page| self.l2[*page] = None);
                source
            }
            Order::Load { l1, l2, after, .. } => {
                if *after > passed {
                    return;
                }
                let waits = |forward: &&Forward| !forward.loads.contains(&id);
                for forward in self.forwards.iter().filter(waits) {
                    assert!(
                        !l1.page_numbers().any(|page| forward.touches(page)),
                        "a load into a page that a forward touches"
                    );
                }
                let source = numbers(l2).iter().map(|page| self.l2[*page]).collect();
                numbers(l1).iter().for_each(|page| self.l1[*page] = None);
                source
            }
            Order::Put { l2, .. } => numbers(l2).iter().map(|page| self.l2[*page]).collect(),
            Order::Get { l2, .. } => {
                numbers(l2).iter().for_each(|page| self.l2[*page] = None);
                Vec::new()
            }
            _ => Vec::new(),
        };
        self.flights.get_mut(&id).unwrap().begun = Some(begun);
    }

    pub(super) fn end(&mut self, id: OpId) {
        let Flight { order, begun } = self.flights.remove(&id).unwrap();
        let is_copy = matches!(order, Order::BackUp { .. } | Order::Load { .. });
        let begun = begun.unwrap();
        let is_bad = self.is_bad();
        let outcome = match order {
            Order::BackUp { l1, l2, .. } => {
                check_unchanged(&self.l1, &numbers(&l1), &begun);
                assert!(
                    begun.iter().all(Option::is_some),
                    "a backup of bytes that were not written"
                );
                fill(&mut self.l2, &numbers(&l2), &begun, is_bad);
                if is_bad {
                    let keys: Vec<PageKey> = begun.iter().copied().flatten().collect();
                    self.count_failure(TierName::L2, &keys);
                }
                Outcome::Copied(!is_bad)
            }
            Order::Load { l1, l2, .. } => {
                check_unchanged(&self.l2, &numbers(&l2), &begun);
                let expected = self.loading.remove(&id).unwrap();
                let expected: Vec<Content> = expected.into_iter().map(Some).collect();
                assert_eq!(begun, expected, "a load of wrong bytes");
                fill(&mut self.l1, &numbers(&l1), &begun, is_bad);
                self.taint
                    .retain(|page, _| !l1.page_numbers().any(|of| of == *page));
                self.loads_out.remove(&id);
                if is_bad {
                    self.failed_loads.insert(id);
                } else {
                    self.failed_loads.remove(&id);
                }
                Outcome::Copied(!is_bad)
            }
            Order::Put {
                keys,
                l2,
                is_skipped,
                ..
            } => {
                assert!(!is_skipped);
                check_unchanged(&self.l2, &numbers(&l2), &begun);
                let expected: Vec<Content> = keys.iter().copied().map(Some).collect();
                assert_eq!(begun, expected, "wrong bytes are written to L3");
                let stored = match (self.l3_refuses, is_bad) {
                    (true, _) => 0,
                    (false, true) => self.below(keys.len() + 1),
                    (false, false) => keys.len(),
                };
                self.l3.extend(&keys[..stored]);
                self.progress += stored as u64;
                self.count_failure(TierName::L3, &keys[stored..]);
                Outcome::Pages(stored)
            }
            Order::Exists { keys, .. } => {
                let found = keys.iter().take_while(|key| self.l3.contains(*key)).count();
                // A wrong count: too high or too low.
                Outcome::Pages(if is_bad {
                    self.below(keys.len() + 1)
                } else {
                    found
                })
            }
            Order::Get { keys, l2, .. } => {
                let found = keys.iter().take_while(|key| self.l3.contains(*key)).count();
                let good = if is_bad { self.below(found + 1) } else { found };
                let pages = numbers(&l2);
                assert!(
                    pages.iter().all(|page| self.l2[*page].is_none()),
                    "a page was used while L3 read into it"
                );
                for (page, key) in pages.iter().zip(&keys[..good]) {
                    self.l2[*page] = Some(*key);
                }
                Outcome::Pages(good)
            }
            _ => unreachable!(),
        };
        self.core.complete(Done { id, outcome }).unwrap();
        assert!(
            !is_copy || self.core.complete(Done { id, outcome }).is_err(),
            "an order ends twice"
        );
    }
}

fn check_unchanged(pool: &[Content], pages: &[usize], begun: &[Content]) {
    let now: Vec<Content> = pages.iter().map(|page| pool[*page]).collect();
    assert_eq!(now, begun, "the source of a copy changed while it ran");
}

fn fill(pool: &mut [Content], pages: &[usize], with: &[Content], is_bad: bool) {
    for (page, content) in pages.iter().zip(with) {
        assert_eq!(
            pool[*page], None,
            "a page was used while a copy wrote to it"
        );
        pool[*page] = content.filter(|_| !is_bad);
    }
}

//! Policies of this project: eviction by the fewest hits, and no page deeper than a limit.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use larder_engine::Class;
use larder_engine::policy::{
    AdmissionPolicy, Candidate, Departure, EvictionPolicy, PageFacts, PageNumber, ReclaimLines,
    Use, Worth,
};

/// The leaf that was used least often goes first; system prompts go last.
#[derive(Debug, Default)]
pub struct LeastUsed {
    /// By page: how often it was used.
    uses: Vec<u32>,
    leaves: BinaryHeap<Reverse<(Worth, PageNumber)>>,
    evicted: u64,
}

impl LeastUsed {
    fn uses(&mut self, page: PageNumber) -> &mut u32 {
        if self.uses.len() <= page.0 as usize {
            self.uses.resize(page.0 as usize + 1, 0);
        }
        &mut self.uses[page.0 as usize]
    }
}

impl EvictionPolicy for LeastUsed {
    fn arrived(&mut self, page: PageNumber, _: &PageFacts) {
        *self.uses(page) = 0;
    }

    fn used(&mut self, page: PageNumber, _: &PageFacts, _: Use) {
        *self.uses(page) += 1;
    }

    fn left(&mut self, _: PageNumber, _: &PageFacts, why: Departure) {
        self.evicted += u64::from(why == Departure::Evicted);
    }

    fn file(&mut self, page: PageNumber, facts: &PageFacts) {
        let worth = self.worth(page, facts);
        self.leaves.push(Reverse((worth, page)));
    }

    fn coldest(
        &mut self,
        facts: &mut dyn FnMut(PageNumber) -> Option<PageFacts>,
    ) -> Option<PageNumber> {
        loop {
            let Reverse((filed, page)) = self.leaves.pop()?;
            let Some(now) = facts(page) else { continue };
            let worth = self.worth(page, &now);
            if worth == filed {
                return Some(page);
            }
            self.leaves.push(Reverse((worth, page)));
        }
    }

    fn worth(&self, page: PageNumber, facts: &PageFacts) -> Worth {
        let (class, priority, _) = facts.hint.parts();
        let is_system = u32::from(class == Class::SYSTEM);
        let uses = self.uses.get(page.0 as usize).copied().unwrap_or(0);
        Worth(is_system << 31 | u32::from(priority) << 24 | uses.min(0xff_ffff))
    }

    fn lines(&self) -> ReclaimLines {
        // A leaf that was never used again is not copied.
        ReclaimLines::new(Some(Worth(0)), Worth(1 << 31))
    }

    fn ram_bytes(&self) -> usize {
        self.uses.capacity() * 4 + self.leaves.capacity() * 8
    }
}

/// Admits pages up to a depth.
#[derive(Debug)]
pub struct Shallow(pub u32);

impl AdmissionPolicy for Shallow {
    fn admits(&mut self, page: &Candidate) -> bool {
        page.depth < self.0
    }
}

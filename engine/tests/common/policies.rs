//! Toy policies of eviction. Two of them prove that the store holds its promises under any order.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use larder_core::policy::order::{self, EvictionOrder};
use larder_engine::OpenOptions;
use larder_engine::format::KeyPrefix;
use larder_engine::policy::{
    Departure, EvictionPolicy, PageFacts, PageNumber, ReclaimLines, Use, Worth,
};

/// First in, first out: the leaf that arrived first goes first, however often it was used.
#[derive(Debug, Default)]
pub struct Fifo {
    /// By page: the number of its arrival.
    arrivals: Vec<u32>,
    next: u32,
    leaves: VecDeque<(u32, PageNumber)>,
}

impl EvictionPolicy for Fifo {
    fn arrived(&mut self, page: PageNumber, _: &PageFacts) {
        self.next += 1;
        if self.arrivals.len() <= page.0 as usize {
            self.arrivals.resize(page.0 as usize + 1, 0);
        }
        self.arrivals[page.0 as usize] = self.next;
    }

    fn left(&mut self, page: PageNumber, _: &PageFacts, _: Departure) {
        self.arrivals[page.0 as usize] = 0;
    }

    fn file(&mut self, page: PageNumber, facts: &PageFacts) {
        let entry = (self.worth(page, facts).0, page);
        let at = self.leaves.partition_point(|filed| *filed < entry);
        self.leaves.insert(at, entry);
    }

    fn coldest(
        &mut self,
        facts: &mut dyn FnMut(PageNumber) -> Option<PageFacts>,
    ) -> Option<PageNumber> {
        loop {
            let (arrival, page) = self.leaves.pop_front()?;
            // Its number may name a later page.
            if self.arrivals[page.0 as usize] == arrival && facts(page).is_some() {
                return Some(page);
            }
        }
    }

    fn worth(&self, page: PageNumber, _: &PageFacts) -> Worth {
        Worth(self.arrivals[page.0 as usize])
    }

    fn lines(&self) -> ReclaimLines {
        let oldest = self.leaves.front().map_or(0, |(arrival, _)| *arrival);
        let line = oldest + (self.next - oldest) / 20;
        ReclaimLines::new(Some(Worth(line)), Worth(u32::MAX))
    }
}

/// Any leaf, by a seeded generator. The worth of a page changes with each use.
#[derive(Debug)]
pub struct Random {
    state: u64,
    worths: Vec<u32>,
    leaves: Vec<PageNumber>,
}

impl Random {
    pub fn new(seed: u64) -> Random {
        Random {
            state: seed | 1,
            worths: Vec::new(),
            leaves: Vec::new(),
        }
    }

    fn draw(&mut self) -> u32 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state >> 32) as u32
    }
}

impl EvictionPolicy for Random {
    fn arrived(&mut self, page: PageNumber, _: &PageFacts) {
        if self.worths.len() <= page.0 as usize {
            self.worths.resize(page.0 as usize + 1, 0);
        }
        self.worths[page.0 as usize] = self.draw();
    }

    fn used(&mut self, page: PageNumber, _: &PageFacts, _: Use) {
        self.worths[page.0 as usize] = self.draw();
    }

    fn file(&mut self, page: PageNumber, _: &PageFacts) {
        self.leaves.push(page);
    }

    fn coldest(
        &mut self,
        facts: &mut dyn FnMut(PageNumber) -> Option<PageFacts>,
    ) -> Option<PageNumber> {
        while !self.leaves.is_empty() {
            let at = self.draw() as usize % self.leaves.len();
            let page = self.leaves.swap_remove(at);
            if facts(page).is_some() {
                return Some(page);
            }
        }
        None
    }

    fn worth(&self, page: PageNumber, _: &PageFacts) -> Worth {
        Worth(self.worths[page.0 as usize])
    }
}

/// First in, first out; keeps the lessons and notes that it is given, and has some of its own.
#[derive(Debug)]
pub struct Pupil(Arc<Mutex<Vec<Recalled>>>, Fifo);

/// Lessons and notes.
pub type Recalled = (Vec<u8>, Vec<u128>);

/// Its note of a page.
pub fn note(key: KeyPrefix) -> u128 {
    key.as_bytes()
        .iter()
        .fold(0, |note, byte| note << 8 | u128::from(*byte))
}

pub const LESSONS: &[u8] = b"leaves fall in autumn";

impl Pupil {
    /// Options with such a policy, and what it is given.
    pub fn options() -> (OpenOptions, Arc<Mutex<Vec<Recalled>>>) {
        let recalled = Arc::new(Mutex::new(Vec::new()));
        let given = recalled.clone();
        let make = move || Pupil(given.clone(), Fifo::default());
        let options = OpenOptions::default().with(|o| o.eviction = Some(order::maker(make)));
        (options, recalled)
    }
}

impl EvictionPolicy for Pupil {
    fn arrived(&mut self, page: PageNumber, facts: &PageFacts) {
        self.1.arrived(page, facts);
    }

    fn file(&mut self, page: PageNumber, facts: &PageFacts) {
        self.1.file(page, facts);
    }

    fn coldest(
        &mut self,
        facts: &mut dyn FnMut(PageNumber) -> Option<PageFacts>,
    ) -> Option<PageNumber> {
        self.1.coldest(facts)
    }

    fn worth(&self, page: PageNumber, facts: &PageFacts) -> Worth {
        self.1.worth(page, facts)
    }
}

impl EvictionOrder for Pupil {
    fn lessons(&self) -> Vec<u8> {
        LESSONS.to_vec()
    }

    fn note(&self, _: PageNumber, key: KeyPrefix) -> Option<u128> {
        Some(note(key))
    }

    fn recall(&mut self, lessons: &[u8], notes: Vec<u128>) {
        self.0.lock().unwrap().push((lessons.to_vec(), notes));
    }
}

//! The learned policy of eviction: pages of a class are used again at a rate that depends on their
//! age. The rates are learned from the store's own traffic. The leaf goes first that promises the
//! fewest uses for the time that it would be kept.
//!
//! Crates of this project alone use it: `larder-engine`, whose module `policy` shows it.
//!
//! ```text
//!   a put or a read           every 30 s                     a page has to go
//!  +----------------+      +-------------+      index     +----------------------+
//!  | class of page  | ---> | hazard of a | -------------> | of the oldest leaf of |
//!  | use at its age |      | class by age|  class, age    | each class, the least |
//!  +----------------+      +-------------+                +----------------------+
//! ```
//!
//! From the top down: a module imports only modules below its own row.
//!
//! | module | content |
//! |---|---|
//! | `budget` | how much reclaim may copy |
//! | `sample` | the keys whose uses are counted, stored or not |
//! | `guard` | whether the store follows the learned order or LRU |
//! | `lessons` | the tables as bytes, for the next open |
//! | `notes` | the facts of stored pages as words, for the next open |
//! | `leaves` | the leaves of each class, the oldest first |
//! | `pages` | facts of stored pages |
//! | `hazard` | uses and time by class and age, and the index that follows from them |
//! | `class` | the class of a page, from facts of the store and hints |
//! | `ghost` | facts of pages that left |
//! | `recency` | what LRU would hold |
//! | this module | the policy |
//!
//! *Hazard*: the uses a second of the pages of a class at one age.
//!
//! *Index* of a leaf (not the index of the store): the highest mean rate of uses that a page of its
//! class and age reaches over any time ahead (the Gittins index). It is made to fall with age, so
//! that the oldest leaf of a class is always the one of least index, and an eviction compares one
//! leaf a class.
//!
//! *Superseded*: when a request goes from a page to another child than the request before, that
//! conversation went another way. The pages below the earlier child get a class of their own.
//!
//! Times are in ticks, `TICKS` to a second. Rates are in uses a second.

// The unit tests are those of the engine that ships.
#![cfg(not(all(test, feature = "simulated")))]

mod budget;
mod class;
mod ghost;
mod guard;
mod hazard;
mod leaves;
mod lessons;
mod notes;
mod pages;
mod recency;
mod sample;

use larder_core::policy::order::{self, EvictionOrder};
use larder_core::policy::{
    Departure, EvictionPolicy, PageFacts, PageNumber, PolicyMaker, ReclaimLines, Use, Worth,
};
use std::time::Duration;

use larder_base::ids::NamespaceId;
use larder_base::planted;
use larder_format::KeyPrefix;

use budget::Budget;
use class::{ClassId, Classes, Traits};
use ghost::{Ghosts, Memory};
use guard::{Guard, Order, Switched};
use hazard::{Hazards, REFRESH, TICKS};
#[cfg(debug_assertions)]
use larder_core::planted;
use leaves::Leaves;
use lessons::Moment;
use notes::Notes;
use pages::{NONE, Page, Pages};
use recency::Epoch;
use sample::Sample;

/// Uses of a page so close together are of one request.
const SAME_REQUEST: u32 = TICKS / 4;

/// The lines of reclaim while the store follows LRU: shares of the range of ages.
const COLD_SHARE: u32 = 20;
const WARM_SHARE: u32 = 4;

/// Below this number of segments a store follows LRU for good: reclaim would drop and copy more
/// than the order gains.
const SEGMENTS_MIN: usize = 160;

/// Pages of a chain that count for the worth of its first one.
const CHAIN: usize = 3;

/// Longest age of a page of an earlier open, 12 days: the clock begins there, and lasts for years.
const PAST_MAX: u32 = 1 << 26;

/// See the module.
#[derive(Debug)]
pub(crate) struct Learned {
    pages: Pages,
    stored: usize,
    stored_bytes: u64,
    most_stored: usize,
    classes: Classes,
    hazards: Hazards,
    sample: Sample,
    ghosts: Ghosts,
    leaves: Leaves,
    guard: Guard,
    budget: Budget,
    now: u32,
    /// The time that the facts of the last page gave: pages of a call have one.
    told: Duration,
    /// What the clock showed at the open.
    begun: u32,
    refreshed: u32,
    /// Facts of pages that have yet to arrive, and how far the clock was set back since.
    notes: Notes,
    set_back: u32,
    /// Mean index of the leaves evicted lately.
    cold: f32,
    /// It serves an estimate.
    is_estimate: bool,
    /// The last use of the leaf evicted last. `None` before the first eviction.
    frontier: Option<u32>,
}

impl Default for Learned {
    fn default() -> Learned {
        Learned {
            pages: Pages::default(),
            stored: 0,
            stored_bytes: 0,
            most_stored: 0,
            classes: Classes::default(),
            hazards: Hazards::default(),
            sample: Sample::default(),
            ghosts: Ghosts::default(),
            leaves: Leaves::default(),
            guard: Guard::default(),
            budget: Budget::default(),
            now: 0,
            told: Duration::ZERO,
            begun: 0,
            refreshed: 0,
            notes: Notes::default(),
            set_back: 0,
            cold: 0.0,
            is_estimate: false,
            frontier: None,
        }
    }
}

fn ticks(time: Duration) -> u32 {
    let (whole, rest) = (time.as_secs(), time.subsec_millis());
    let ticks = whole
        .saturating_mul(u64::from(TICKS))
        .saturating_add(u64::from(rest * TICKS / 1000));
    u32::try_from(ticks).unwrap_or(u32::MAX)
}

/// A number for a key. Keys are hashes already.
fn number_of(facts: &PageFacts) -> u64 {
    number(facts.namespace, facts.key)
}

fn number(namespace: NamespaceId, key: KeyPrefix) -> u64 {
    let (low, _) = key
        .as_bytes()
        .split_first_chunk::<8>()
        .expect("it has 12 bytes");
    u64::from_le_bytes(*low) ^ u64::from(namespace.0) << 48
}

/// The number that names a key in the sample.
fn sampled(number: u64) -> u32 {
    (number >> 16) as u32
}

impl Learned {
    /// Moves the clock on, and refreshes the tables when it is time.
    #[inline]
    fn advance(&mut self, now: Duration) {
        if now != self.told {
            self.told = now;
            self.now = self.now.max(self.begun.saturating_add(ticks(now)));
        }
        if self.hazards.index_some() {
            self.leaves.forget_values();
        }
        if self.now - self.refreshed >= REFRESH {
            self.refreshed = self.now;
            self.sample.account(self.now, &mut self.hazards);
            self.hazards.refresh(&self.classes);
        }
    }

    /// A request used a page, stored before or not, which has this memory from now on. `again`:
    /// for the second time, and tells more. It has passed through the page's parent.
    #[inline]
    fn seen(&mut self, id: u32, memory: Memory, facts: &PageFacts, again: bool) {
        let now = self.now;
        let class = self.class_of(Traits::of(facts, memory));
        let changes = self.pages.get(id).class() != class;
        if !again {
            let key = sampled(number_of(facts));
            self.sample.used((id, key), class, now, &mut self.hazards);
        } else if changes {
            self.sample.change_class(id, class, now, &mut self.hazards);
        }
        // Field by field: a copy of the whole page would wait for the stores before it.
        let page = self.pages.get_mut(id);
        page.last = now;
        page.epoch = self.guard.now();
        page.set_memory(memory);
        page.return_to();
        // In the heap of the same class its entry is corrected when it comes to the top.
        if changes {
            self.classify(id, class);
        }
    }

    /// Gives a page another class.
    fn classify(&mut self, id: u32, class: ClassId) {
        let is_filed = self.pages.get(id).is_filed();
        if is_filed {
            self.leaves.remove(&mut self.pages, id);
        }
        self.pages.get_mut(id).set_class(class);
        if is_filed && !planted!(LostLeaf) {
            self.leaves.file(&mut self.pages, id);
        }
    }

    /// Tells the guard the use of a page, which was used last in the epoch `before`.
    fn count(&mut self, facts: &PageFacts, before: Option<Epoch>, is_hit: bool) {
        let switched = self.guard.used(before, facts.bytes, is_hit, self.now);
        self.follow(switched);
    }

    /// Follows another order from now on, if the guard says so.
    fn follow(&mut self, switched: Option<Switched>) {
        let Some(Switched) = switched else {
            return;
        };
        self.leaves.forget_values();
        if !self.is_estimate {
            let (order, switches) = (self.order(), self.scale());
            tracing::info!(switches, "eviction follows another order now: {order}");
        }
    }

    /// A request goes through `parent` into `child`.
    fn pass(&mut self, parent: u32, child: u32) {
        let page = self.pages.get_mut(parent);
        let old = std::mem::replace(&mut page.child, child);
        if old != child && !page.memory().is_shared() {
            self.supersede(old);
        }
    }

    /// Takes in a page of an earlier open, with what was known of it.
    fn restore(&mut self, id: u32, facts: &PageFacts, known: Page) {
        let mut page = known;
        page.last = page.last.saturating_sub(self.set_back).min(self.begun - 1);
        if usize::from(page.class()) >= self.classes.all().len() {
            page.set_class(0);
        }
        self.pages.put(id, page);
        self.guard.recalled(page.epoch, facts.bytes);
        let key = sampled(number_of(facts));
        self.sample
            .recalled((id, key), page.class(), (page.last, self.begun));
        if let Some(parent) = facts.parent {
            self.rejoin(parent.0, id);
        }
    }

    /// The last request through `parent` went to the child that was used last.
    fn rejoin(&mut self, parent: u32, child: u32) {
        let other = self.pages.get(parent).child;
        let last = |id: u32| self.pages.find(id).map(|page| page.last);
        if last(other) < last(child) {
            self.pages.get_mut(parent).child = child;
        }
    }

    /// A page has a child that it never had before.
    fn adopt(&mut self, parent: u32) {
        let page = self.pages.get_mut(parent);
        let memory = page.memory().with_child();
        page.set_memory(memory);
        self.change_class(parent, |traits| traits.with_children(memory));
    }

    /// The branch that begins with this page was left.
    fn supersede(&mut self, branch: u32) {
        let mut at = branch;
        while let Some(page) = self.pages.find(at) {
            if page.is_superseded() {
                return;
            }
            let below = page.child;
            self.pages.get_mut(at).supersede();
            self.change_class(at, Traits::superseded);
            at = below;
        }
    }

    /// Changes the class of a page that is not used now: its age goes on.
    fn change_class(&mut self, id: u32, change: impl FnOnce(Traits) -> Traits) {
        let before = self.pages.get(id).class();
        let traits = change(self.classes.traits(before));
        let class = self.class_of(traits);
        if class != before {
            let hazards = &mut self.hazards;
            self.sample.change_class(id, class, self.now, hazards);
            self.classify(id, class);
        }
    }

    fn class_of(&mut self, traits: Traits) -> ClassId {
        let class = self.classes.of(traits);
        self.hazards.expect(self.classes.all().len());
        class
    }

    /// The index of a page for reclaim: at least that of the pages below it, which go first.
    /// Reclaim looks at the pages of least worth first, and of equal ones at the deepest. So a page
    /// has no children any more when its turn comes, if all of them could be dropped.
    fn index_of_chain(&self, page: &Page) -> f32 {
        let below = std::iter::successors(Some(page), |page| self.pages.find(page.child));
        let indexes = below.take(CHAIN).map(|page| self.index_of(page));
        indexes.fold(0.0, f32::max)
    }

    fn index_of(&self, page: &Page) -> f32 {
        let age = self.now.saturating_sub(page.last);
        self.hazards.index(page.class(), age)
    }
}

/// Makes the policy that learns which pages are used again.
#[must_use]
pub fn learned() -> PolicyMaker<dyn EvictionOrder> {
    order::maker(Learned::default)
}

impl EvictionPolicy for Learned {
    fn arrived(&mut self, page: PageNumber, facts: &PageFacts) {
        self.advance(facts.now);
        self.stored += 1;
        self.stored_bytes += facts.bytes;
        self.guard.holds(self.stored_bytes);
        if self.stored > self.most_stored {
            self.most_stored = self.stored;
            self.ghosts.expect(self.most_stored);
            self.sample.expect(self.most_stored);
        }
        if let Some(known) = self.notes.find(facts.key) {
            return self.restore(page.0, facts, known);
        }
        let known = self.ghosts.take(number_of(facts));
        let memory = known.map_or(Memory::NEW, |(memory, _)| memory.used());
        self.pages.put(page.0, Page::new(memory));
        if let Some(parent) = facts.parent {
            self.pass(parent.0, page.0);
            if known.is_none() {
                self.adopt(parent.0);
            }
        }
        self.count(facts, known.map(|(_, epoch)| epoch), false);
        self.seen(page.0, self.pages.get(page.0).memory(), facts, false);
    }

    fn used(&mut self, page: PageNumber, facts: &PageFacts, by: Use) {
        // A lookup announces the read that counts.
        if by == Use::Lookup {
            return;
        }
        self.advance(facts.now);
        if let Some(parent) = facts.parent {
            self.pass(parent.0, page.0);
        }
        let known = self.pages.get(page.0);
        let (memory, before) = (known.memory(), known.epoch);
        let again = self.now - known.last < SAME_REQUEST;
        let memory = if again { memory } else { memory.used() };
        self.count(facts, Some(before), true);
        self.seen(page.0, memory, facts, again);
    }

    fn left(&mut self, page: PageNumber, facts: &PageFacts, why: Departure) {
        self.stored = self.stored.saturating_sub(1);
        self.stored_bytes = self.stored_bytes.saturating_sub(facts.bytes);
        self.guard.holds(self.stored_bytes);
        let known = self.pages.get(page.0);
        let (memory, epoch, is_filed) = (known.memory(), known.epoch, known.is_filed());
        match why {
            Departure::Evicted => self.ghosts.put(number_of(facts), memory, epoch),
            _ => self.guard.removed(epoch, facts.bytes),
        }
        if is_filed && !planted!(KeptLeaf) {
            self.leaves.remove(&mut self.pages, page.0);
        }
        self.sample.left(page.0);
        if let Some(parent) = facts.parent
            && self.pages.get(parent.0).child == page.0
        {
            self.pages.get_mut(parent.0).child = NONE;
        }
        self.pages.put(page.0, Page::new(Memory::NEW));
    }

    fn file(&mut self, page: PageNumber, _: &PageFacts) {
        if !self.pages.get(page.0).is_filed() {
            self.leaves.file(&mut self.pages, page.0);
        }
    }

    fn coldest(
        &mut self,
        facts: &mut dyn FnMut(PageNumber) -> Option<PageFacts>,
    ) -> Option<PageNumber> {
        self.guard.evicts();
        loop {
            let (hazards, now) = (&self.hazards, self.now);
            let order = self.guard.order();
            let index = |class, last| match order {
                Order::Lru => 0.0,
                Order::Learned => hazards.index(class, now.saturating_sub(last)),
            };
            let id = self.leaves.take_least(&mut self.pages, now, index)?;
            let found = facts(PageNumber(id));
            if planted!(NamedParent) && found.is_none() {
                return Some(PageNumber(id));
            }
            let Some(facts) = found else {
                continue;
            };
            let page = self.pages.get(id);
            let (index, last) = (self.index_of(page), page.last);
            self.cold += 0.01 * (index - self.cold);
            self.frontier = Some(last);
            self.advance(facts.now);
            return Some(PageNumber(id));
        }
    }

    fn worth(&self, page: PageNumber, _: &PageFacts) -> Worth {
        let Some(page) = self.pages.find(page.0) else {
            return Worth(0);
        };
        match self.guard.order() {
            Order::Lru => Worth(page.last),
            Order::Learned => worth_of(self.index_of_chain(page)),
        }
    }

    fn lines(&self) -> ReclaimLines {
        // Before the store has filled, each page has its room.
        let drop_up_to = |line| self.frontier.map(|_| line);
        if self.guard.order() == Order::Learned {
            let line = worth_of(self.cold * self.budget.share());
            // No page goes for the room of others: that would be most of the store while the share
            // is high.
            return ReclaimLines::new(drop_up_to(line), Worth(0));
        }
        let frontier = self.frontier.unwrap_or(0);
        let range = self.now.saturating_sub(frontier);
        let line = |share| Worth(frontier + range / share);
        ReclaimLines::new(drop_up_to(line(COLD_SHARE)), line(WARM_SHARE))
    }

    fn ram_bytes(&self) -> usize {
        self.pages.ram_bytes()
            + self.classes.ram_bytes()
            + self.hazards.ram_bytes()
            + self.sample.ram_bytes()
            + self.ghosts.ram_bytes()
            + self.leaves.ram_bytes()
            + self.guard.ram_bytes()
    }
}

impl EvictionOrder for Learned {
    fn estimates(&mut self) {
        self.is_estimate = true;
    }

    fn opened(&mut self, segments: usize) -> Option<String> {
        let is_small = segments < SEGMENTS_MIN;
        is_small.then(|| {
            tracing::info!(
                segments,
                "eviction follows the LRU order: the store has fewer than {SEGMENTS_MIN} segments, \
                 and reclaim would drop and move too much under the learned one; create it with \
                 smaller segments (--segment-size)"
            );
            format!("the store has fewer than {SEGMENTS_MIN} segments")
        })
    }

    fn fetch(&self, names: &mut dyn Iterator<Item = (NamespaceId, KeyPrefix)>) {
        for (namespace, key) in names {
            self.ghosts.fetch(number(namespace, key));
            self.notes.fetch(key);
        }
    }

    fn fetch_used(&self, pages: &[PageNumber]) {
        pages.iter().for_each(|page| self.pages.fetch(page.0));
    }

    fn linked(&mut self, page: PageNumber, facts: &PageFacts) {
        let Some(parent) = facts.parent else {
            return;
        };
        if self.pages.get(page.0).last < self.begun {
            // What the parent knows includes it.
            self.rejoin(parent.0, page.0);
            return;
        }
        self.pass(parent.0, page.0);
        // A page that was used before is no new child.
        if self.pages.get(page.0).memory().hits() == 0 {
            self.adopt(parent.0);
        }
    }

    fn child(&self, page: PageNumber) -> Option<PageNumber> {
        let page = self.pages.find(page.0)?;
        (page.child != NONE).then_some(PageNumber(page.child))
    }

    fn sees_lookups(&self) -> bool {
        false
    }

    fn written(&mut self, put: u64, copied: u64) {
        let is_followed = self.guard.order() == Order::Learned;
        self.budget.written(put, copied, is_followed);
    }

    fn lessons(&self) -> Vec<u8> {
        let moment = Moment {
            now: self.now,
            epoch: self.guard.now(),
            is_ripe: self.guard.is_ripe(),
            cold: self.cold,
        };
        lessons::write(&self.classes, &self.hazards, moment)
    }

    fn note(&self, page: PageNumber, key: KeyPrefix) -> Option<u128> {
        let known = self.pages.find(page.0);
        known.map(|page| notes::write(key, page))
    }

    fn recall(&mut self, lessons: &[u8], notes: Vec<u128>) {
        let Some((classes, hazards, moment)) = lessons::read(lessons) else {
            return;
        };
        (self.classes, self.hazards) = (classes, hazards);
        self.guard.recalls(moment.epoch, moment.is_ripe);
        self.cold = moment.cold;
        // Pages that arrive without a note are younger than all with one.
        self.begun = moment.now.clamp(1, PAST_MAX);
        self.set_back = moment.now.saturating_sub(self.begun);
        (self.now, self.refreshed) = (self.begun, self.begun);
        self.notes = Notes::new(notes);
    }

    fn loaded(&mut self) {
        self.notes = Notes::default();
    }

    fn order(&self) -> String {
        match self.guard.reason() {
            None => "learned".to_owned(),
            Some(why) => format!("lru: {why}"),
        }
    }

    /// Ticks of the last use under LRU, and the bits of an index under the learned order.
    fn scale(&self) -> u64 {
        self.guard.switches()
    }
}

/// Positive numbers are in the order of their bits.
fn worth_of(index: f32) -> Worth {
    Worth(index.max(0.0).to_bits())
}

//! The learned policy of eviction: pages of a class are used again at a rate that depends on their
//! age. The rates are learned from the store's own traffic. The leaf goes first that promises the
//! fewest uses for the time that it would be kept.
//!
//! ```text
//!   a put or a read           every 30 s                     a page has to go
//!  +----------------+      +-------------+      index     +----------------------+
//!  | class of page  | ---> | hazard of a | -------------> | of the oldest leaf of |
//!  | use at its age |      | class by age|  class, age    | each class, the least |
//!  +----------------+      +-------------+                +----------------------+
//! ```
//!
//! | module | content |
//! |---|---|
//! | `budget` | how much reclaim may copy |
//! | `class` | the class of a page, from facts of the store and hints |
//! | `hazard` | uses and time by class and age, and the index that follows from them |
//! | `sample` | the keys whose uses are counted, stored or not |
//! | `ghost` | facts of pages that left |
//! | `guard` | whether the store follows the learned order or LRU |
//! | `leaves` | the leaves of each class, the oldest first |
//! | this module | the policy |
//!
//! *Index*: the highest rate of uses that a page of this class and age reaches over any time ahead
//! (the Gittins index of a job that may end with a use). It is made to fall with age, so that the
//! oldest leaf of a class is always the one of least index, and an eviction compares one leaf a
//! class.
//!
//! *Superseded*: when a request goes through a page into another child than the last one, the old
//! branch is a branch that a conversation left. Its pages get a class of their own.
//!
//! All rates are in uses a second, all times in [`TICKS`] a second.

mod budget;
mod class;
mod ghost;
mod guard;
mod hazard;
mod leaves;
mod sample;

use std::time::Duration;

use crate::index::Chunks;
use crate::policy::{Departure, EvictionPolicy, PageFacts, PageNumber, ReclaimLines, Use, Worth};
use budget::Budget;
use class::{Classes, Traits};
use ghost::{Ghosts, Memory};
use guard::{Guard, Order};
use hazard::Hazards;
use leaves::Leaves;
use sample::Sample;

/// Steps of the policy's clock a second: 32 bits last for two years.
const TICKS: u32 = 64;

/// Time between two refreshes of the tables.
const REFRESH: u32 = 30 * TICKS;

/// In a store of fewer segments the learned order scatters so many holes over them that reclaim
/// gives up what the order gains.
const SEGMENTS_MIN: usize = 600;

/// Uses of a page so close together are of one request.
const SAME_REQUEST: u32 = TICKS / 4;

/// The lines of reclaim while the store follows LRU: shares of the range of ages.
const COLD_SHARE: u32 = 20;
const WARM_SHARE: u32 = 4;

/// A number of a class.
type ClassId = u16;

/// The facts of a stored page.
#[derive(Debug, Clone, Copy)]
struct Page {
    /// When it was used last.
    last: u32,
    /// The child through which the last request went.
    child: u32,
    /// Names its key in the sample.
    key: u32,
    class: ClassId,
    memory: Memory,
    flags: u8,
}

const NO_CHILD: u32 = u32::MAX;

/// The policy holds it as a leaf.
const IS_FILED: u8 = 1;
const IS_SUPERSEDED: u8 = 2;
/// The guard watches its chain.
const IS_WATCHED: u8 = 4;

impl Page {
    const NEW: Page = Page {
        last: 0,
        child: NO_CHILD,
        key: 0,
        class: 0,
        memory: Memory::NEW,
        flags: 0,
    };

    fn is(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Learned {
    pages: Chunks<Page>,
    stored: usize,
    most_stored: usize,
    classes: Classes,
    hazards: Hazards,
    sample: Sample,
    ghosts: Ghosts,
    leaves: Leaves,
    guard: Guard,
    budget: Budget,
    /// Stored pages that the guard watches.
    watched: usize,
    now: u32,
    refreshed: u32,
    /// Mean index of the leaves evicted lately.
    cold: f32,
    /// The last use of the leaf evicted last.
    frontier: u32,
    /// The leaf that was named last.
    named: u32,
}

impl Default for Learned {
    fn default() -> Learned {
        Learned {
            pages: Chunks::new(),
            stored: 0,
            most_stored: 0,
            classes: Classes::default(),
            hazards: Hazards::default(),
            sample: Sample::default(),
            ghosts: Ghosts::default(),
            leaves: Leaves::default(),
            guard: Guard::default(),
            budget: Budget::default(),
            watched: 0,
            now: 0,
            refreshed: 0,
            cold: 0.0,
            frontier: 0,
            named: NO_CHILD,
        }
    }
}

fn ticks(time: Duration) -> u32 {
    let ticks = time.as_millis().saturating_mul(u128::from(TICKS)) / 1000;
    u32::try_from(ticks).unwrap_or(u32::MAX)
}

/// A number for a key. Keys are hashes already.
fn number_of(facts: &PageFacts) -> u64 {
    let bytes = facts.key.as_bytes();
    let (low, _) = bytes.split_first_chunk::<8>().expect("it has 12 bytes");
    u64::from_le_bytes(*low) ^ u64::from(facts.namespace.number()) << 48
}

impl Learned {
    /// Moves the clock on, and refreshes the tables when it is time.
    fn advance(&mut self, now: Duration) {
        self.now = self.now.max(ticks(now));
        if self.hazards.index_some() {
            self.leaves.forget_values();
            self.guard.forget_values();
        }
        if self.now - self.refreshed >= REFRESH {
            self.refreshed = self.now;
            self.sample.account(self.now, &mut self.hazards);
            self.hazards.refresh(&self.classes);
        }
    }

    fn page(&self, id: u32) -> Option<&Page> {
        ((id as usize) < self.pages.len()).then(|| self.pages.get(id as usize))
    }

    fn page_mut(&mut self, id: u32) -> &mut Page {
        while self.pages.len() <= id as usize {
            self.pages.push(Page::NEW);
        }
        self.pages.get_mut(id as usize)
    }

    /// A request used a page, stored before or not. `again`: for the second time, and tells more.
    fn seen(&mut self, id: u32, facts: &PageFacts, again: bool) {
        if let Some(parent) = facts.parent {
            self.pass(parent.0, id);
        }
        let now = self.now;
        let page = self.page_mut(id);
        let (memory, key, before) = (page.memory, page.key, page.class);
        let is_watched = page.is(IS_WATCHED);
        let traits = Traits::of(facts, memory);
        let class = self.classes.of(traits, &mut self.hazards);
        if again {
            self.sample.change_class(key, class, now, &mut self.hazards);
        } else {
            self.sample.used(key, class, now, &mut self.hazards);
        }
        let page = self.pages.get_mut(id as usize);
        (page.class, page.last) = (class, now);
        page.flags &= !IS_SUPERSEDED;
        if is_watched && !again {
            let parent = facts.parent.map(|parent| self.pages.get(parent.index()));
            let parent = parent.filter(|parent| parent.is(IS_WATCHED));
            let used = guard::Used {
                key,
                parent: parent.map(|parent| parent.key),
                class,
                memory,
                now,
            };
            self.watch(used);
        }
        let page = self.pages.get_mut(id as usize);
        // In the heap of the same class its entry is corrected when it comes to the top.
        if page.is(IS_FILED) && before != class {
            self.leaves.file(class, now, id);
        }
    }

    /// A request used a watched page.
    fn watch(&mut self, used: guard::Used) {
        if self.guard.used(used, &mut self.classes, &mut self.hazards) {
            self.leaves.forget_values();
            let order = self.guard.leader();
            tracing::info!(
                switches = self.guard.switches(),
                "eviction follows the {} order: it had more hits lately",
                if order == Order::Learned {
                    "learned"
                } else {
                    "LRU"
                },
            );
        }
    }

    /// A request goes through `parent` into `child`.
    fn pass(&mut self, parent: u32, child: u32) {
        let page = self.page_mut(parent);
        let old = std::mem::replace(&mut page.child, child);
        let is_shared = page.memory.is_shared();
        if old != child && !is_shared {
            self.supersede(old);
        }
    }

    /// Whether the chain of a new page is watched: as that of its parent, unless it leaves that.
    fn is_watched(&self, key: u32, facts: &PageFacts) -> bool {
        let parent = facts.parent.map(|parent| self.pages.get(parent.index()));
        match parent {
            Some(parent) if parent.memory.children() == 0 => parent.is(IS_WATCHED),
            _ => self.guard.watches(key),
        }
    }

    /// A page has a child that it never had before.
    fn adopt(&mut self, parent: u32) {
        let page = self.page_mut(parent);
        page.memory.count_child();
        let memory = page.memory;
        self.change_class(parent, |traits| traits.with_children(memory));
    }

    /// The branch that begins with this page was left.
    fn supersede(&mut self, branch: u32) {
        let mut at = branch;
        while let Some(page) = self.page(at) {
            if page.is(IS_SUPERSEDED) {
                return;
            }
            let below = page.child;
            self.pages.get_mut(at as usize).flags |= IS_SUPERSEDED;
            self.change_class(at, Traits::superseded);
            at = below;
        }
    }

    /// Changes the class of a page that is not used now: its age goes on.
    fn change_class(&mut self, id: u32, change: impl FnOnce(Traits) -> Traits) {
        let page = *self.pages.get(id as usize);
        let traits = change(self.classes.traits(page.class));
        let class = self.classes.of(traits, &mut self.hazards);
        if class == page.class {
            return;
        }
        let hazards = &mut self.hazards;
        self.sample.change_class(page.key, class, self.now, hazards);
        self.pages.get_mut(id as usize).class = class;
        if page.is(IS_WATCHED) {
            self.guard.change_class(page.key, class);
        }
        if page.is(IS_FILED) {
            self.leaves.file(class, page.last, id);
        }
    }

    fn index_of(&self, page: &Page) -> f32 {
        let age = self.now.saturating_sub(page.last);
        self.hazards.index(page.class, age)
    }
}

impl EvictionPolicy for Learned {
    fn opened(&mut self, segments: usize) {
        if segments < SEGMENTS_MIN {
            tracing::info!(
                segments,
                "eviction follows the LRU order: the store has fewer than {SEGMENTS_MIN} segments, \
                 and reclaim would move too much under the learned one; create it with smaller \
                 segments (--segment-size)"
            );
            self.guard.stay_with_lru();
        }
    }

    fn arrived(&mut self, page: PageNumber, facts: &PageFacts) {
        self.advance(facts.now);
        self.stored += 1;
        if self.stored > self.most_stored {
            self.most_stored = self.stored;
            self.ghosts.expect(self.most_stored);
            self.sample.expect(self.most_stored);
            self.guard.expect(self.most_stored);
        }
        let number = number_of(facts);
        let known = self.ghosts.take(number);
        let mut flags = 0;
        let key = (number >> 16) as u32;
        if self.is_watched(key, facts) {
            flags |= IS_WATCHED;
            self.watched += 1;
        }
        *self.page_mut(page.0) = Page {
            key,
            flags,
            memory: known.map_or(Memory::NEW, Memory::used),
            ..Page::NEW
        };
        if let (Some(parent), None) = (facts.parent, known) {
            self.pass(parent.0, page.0);
            self.adopt(parent.0);
        }
        self.seen(page.0, facts, false);
    }

    fn used(&mut self, page: PageNumber, facts: &PageFacts, by: Use) {
        // A lookup announces the read that counts.
        if by == Use::Lookup {
            return;
        }
        self.advance(facts.now);
        let now = self.now;
        let known = self.page_mut(page.0);
        let again = now - known.last < SAME_REQUEST;
        if !again {
            known.memory = known.memory.used();
        }
        self.seen(page.0, facts, again);
    }

    fn left(&mut self, page: PageNumber, facts: &PageFacts, why: Departure) {
        self.stored = self.stored.saturating_sub(1);
        let known = *self.page_mut(page.0);
        if why == Departure::Evicted {
            self.ghosts.put(number_of(facts), known.memory);
            if known.is(IS_WATCHED) && self.named != page.0 {
                self.guard.dropped(known.key);
            }
        }
        self.named = NO_CHILD;
        self.watched -= usize::from(known.is(IS_WATCHED));
        if let Some(parent) = facts.parent
            && self.page_mut(parent.0).child == page.0
        {
            self.page_mut(parent.0).child = NO_CHILD;
        }
        *self.page_mut(page.0) = Page::NEW;
    }

    fn file(&mut self, page: PageNumber, _: &PageFacts) {
        let known = self.page_mut(page.0);
        known.flags |= IS_FILED;
        let (class, last) = (known.class, known.last);
        self.leaves.file(class, last, page.0);
    }

    fn coldest(
        &mut self,
        facts: &mut dyn FnMut(PageNumber) -> Option<PageFacts>,
    ) -> Option<PageNumber> {
        loop {
            let (pages, hazards, now) = (&self.pages, &self.hazards, self.now);
            let standing = |id: u32| {
                let page = pages.get(id as usize);
                page.is(IS_FILED).then_some((page.class, page.last))
            };
            let order = self.guard.leader();
            let index = |class, last| match order {
                Order::Lru => 0.0,
                Order::Learned => hazards.index(class, now.saturating_sub(last)),
            };
            let id = self.leaves.take_least(now, standing, index)?;
            self.pages.get_mut(id as usize).flags &= !IS_FILED;
            let Some(facts) = facts(PageNumber(id)) else {
                continue;
            };
            let page = *self.pages.get(id as usize);
            self.cold += 0.01 * (self.index_of(&page) - self.cold);
            (self.frontier, self.named) = (page.last, id);
            self.guard.fill(self.watched);
            self.advance(facts.now);
            return Some(PageNumber(id));
        }
    }

    fn worth(&self, page: PageNumber, _: &PageFacts) -> Worth {
        let page = self.page(page.0).copied().unwrap_or(Page::NEW);
        match self.guard.leader() {
            Order::Lru => Worth(page.last),
            Order::Learned => worth_of(self.index_of(&page)),
        }
    }

    fn written(&mut self, put: u64, copied: u64) {
        self.budget.written(put, copied);
    }

    fn lines(&self) -> ReclaimLines {
        if self.guard.leader() == Order::Learned {
            let line = worth_of(self.cold * self.budget.share());
            return ReclaimLines::new(Some(line), line);
        }
        let range = self.now.saturating_sub(self.frontier);
        let line = |share| Worth(self.frontier + range / share);
        ReclaimLines::new(Some(line(COLD_SHARE)), line(WARM_SHARE))
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

/// Positive numbers are in the order of their bits.
fn worth_of(index: f32) -> Worth {
    Worth(index.max(0.0).to_bits())
}

//! The leaves of each class, in the order of their last use.
//!
//! One heap a class. Every leaf has one entry, in the heap of its class; it knows its position
//! there, so that it can leave the heap. The time in an entry may be too old, never too young: a
//! page that was used keeps its entry, which is corrected when it comes to the top. So the top of a
//! heap, once it is correct, is the oldest leaf of its class.

use larder_base::planted;
use larder_core::chunks::Chunks;

use super::class::ClassId;
use super::pages::{NONE, Pages};

/// Children of an entry of a heap: they lie side by side.
const WAYS: usize = 4;

/// Entries of 4 KiB.
const HEAP_BITS: u32 = 9;

/// Last use and number of each leaf, one word each.
type Heap = Chunks<u64, HEAP_BITS>;

/// The top of a class without leaves.
const NO_TOP: u64 = u64::MAX;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Leaves {
    heaps: Vec<Heap>,
    /// By class: the bits of the index of its oldest leaf, and the last use of that. Positive
    /// numbers are in the order of their bits.
    tops: Vec<u64>,
    /// When the tops were computed; `None`: they have to be.
    valued: Option<u32>,
    /// Classes whose tops have changed since.
    changed: Vec<ClassId>,
    /// The class whose top was taken: the word there is of no leaf until the next call fills the
    /// place. Mostly that call files the parent of the leaf, which is about as old and stays at the
    /// top, so that no entry moves.
    hole: Option<ClassId>,
}

impl Leaves {
    /// Takes in a leaf that it does not hold.
    pub(super) fn file(&mut self, pages: &mut Pages, id: u32) {
        let page = *pages.get(id);
        debug_assert!(!page.is_filed(), "{id} is filed twice");
        let class = usize::from(page.class());
        if class >= self.heaps.len() {
            self.heaps.resize_with(class + 1, Heap::new);
            self.tops.resize(class + 1, NO_TOP);
        }
        let heap = &mut self.heaps[class];
        let word = word(page.last, id);
        if self.hole == Some(page.class()) {
            self.hole = None;
            sink(heap, pages, 0, word);
        } else {
            heap.push(word);
            raise(heap, pages, heap.len() - 1, word);
        }
        self.change(page.class());
    }

    /// Fills the place of the leaf that was taken with the last one of its heap.
    fn fill_hole(&mut self, pages: &mut Pages) {
        let Some(class) = self.hole.take() else {
            return;
        };
        let heap = &mut self.heaps[usize::from(class)];
        if let Some(last) = heap.pop()
            && heap.len() > 0
        {
            sink(heap, pages, 0, last);
        }
    }

    /// Gives up a leaf that it holds. To be called before its class changes.
    pub(super) fn remove(&mut self, pages: &mut Pages, id: u32) {
        self.fill_hole(pages);
        let page = pages.get_mut(id);
        let class = page.class();
        let at = std::mem::replace(&mut page.at, NONE) as usize;
        let heap = &mut self.heaps[usize::from(class)];
        let last = heap.pop();
        if at < heap.len()
            && let Some(word) = last
        {
            settle(heap, pages, at, word);
        }
        self.change(class);
    }

    fn change(&mut self, class: ClassId) {
        self.changed.push(class);
        if self.changed.len() > self.heaps.len() {
            self.forget_values();
        }
    }

    /// The indexes have changed.
    pub(super) fn forget_values(&mut self) {
        self.valued = None;
        self.changed.clear();
    }

    /// Removes and returns the leaf of least index; of equal leaves the least recently used.
    pub(super) fn take_least(
        &mut self,
        pages: &mut Pages,
        now: u32,
        index: impl Fn(ClassId, u32) -> f32,
    ) -> Option<u32> {
        self.fill_hole(pages);
        if self.valued != Some(now) {
            self.changed.clear();
            self.changed.extend(0..self.heaps.len() as ClassId);
            self.valued = Some(now);
        }
        loop {
            while let Some(class) = self.changed.pop() {
                let at = usize::from(class);
                let top = oldest(&mut self.heaps[at], pages);
                self.tops[at] = top.map_or(NO_TOP, |(last, _)| {
                    word(index(class, last).max(0.0).to_bits(), last)
                });
            }
            let least = self.tops.iter().copied().min()?;
            if least == NO_TOP {
                return None;
            }
            let at = self.tops.iter().position(|top| *top == least)?;
            // Its page may have been used since the value was computed.
            let top = oldest(&mut self.heaps[at], pages);
            if let Some((last, id)) = top
                && last == unpack(least).1
            {
                pages.get_mut(id).at = NONE;
                self.hole = Some(at as ClassId);
                self.change(at as ClassId);
                return Some(id);
            }
            self.changed.push(at as ClassId);
        }
    }

    pub(super) fn ram_bytes(&self) -> usize {
        let heaps: usize = self.heaps.iter().map(Heap::ram_bytes).sum();
        heaps
            + self.heaps.capacity() * size_of::<Heap>()
            + self.tops.capacity() * size_of::<u64>()
            + self.changed.capacity() * size_of::<ClassId>()
    }
}

fn word(last: u32, id: u32) -> u64 {
    u64::from(last) << 32 | u64::from(id)
}

fn unpack(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

/// The last use and the number of the oldest leaf of a class. It is at the top then, with its
/// present time.
fn oldest(heap: &mut Heap, pages: &mut Pages) -> Option<(u32, u32)> {
    loop {
        let (filed, id) = unpack((heap.len() > 0).then(|| *heap.get(0))?);
        let last = pages.get(id).last;
        if last == filed || planted!(ColdLeaf) {
            return Some((filed, id));
        }
        sink(heap, pages, 0, word(last, id));
    }
}

fn put(heap: &mut Heap, pages: &mut Pages, at: usize, word: u64) {
    *heap.get_mut(at) = word;
    pages.get_mut(unpack(word).1).at = at as u32;
}

/// Puts an entry in the place `at`, or in that of one above it.
fn raise(heap: &mut Heap, pages: &mut Pages, mut at: usize, word: u64) {
    while at > 0 {
        let above = (at - 1) / WAYS;
        let other = *heap.get(above);
        if other <= word {
            break;
        }
        put(heap, pages, at, other);
        at = above;
    }
    put(heap, pages, at, word);
}

/// Puts an entry in the place `at`, or in that of one below it.
fn sink(heap: &mut Heap, pages: &mut Pages, mut at: usize, word: u64) {
    loop {
        let first = at * WAYS + 1;
        let children = first..heap.len().min(first + WAYS);
        let Some(child) = children.min_by_key(|child| *heap.get(*child)) else {
            break;
        };
        let below = *heap.get(child);
        if word <= below {
            break;
        }
        put(heap, pages, at, below);
        at = child;
    }
    put(heap, pages, at, word);
}

/// Puts an entry in the place `at`, whose entry was removed, or in one above or below it.
fn settle(heap: &mut Heap, pages: &mut Pages, at: usize, word: u64) {
    if at > 0 && word < *heap.get((at - 1) / WAYS) {
        raise(heap, pages, at, word);
    } else {
        sink(heap, pages, at, word);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ghost::Memory;
    use crate::pages::Page;

    struct Held {
        leaves: Leaves,
        pages: Pages,
    }

    impl Held {
        /// Pages of these classes and last uses, all filed.
        fn new(all: &[(ClassId, u32)]) -> Held {
            let (mut leaves, mut pages) = (Leaves::default(), Pages::default());
            for (id, (class, last)) in (0..).zip(all) {
                pages.put(id, Page::new(Memory::NEW));
                pages.get_mut(id).last = *last;
                pages.get_mut(id).set_class(*class);
                leaves.file(&mut pages, id);
            }
            Held { leaves, pages }
        }

        fn take(&mut self, index: impl Fn(ClassId, u32) -> f32) -> Option<u32> {
            self.leaves.take_least(&mut self.pages, 50, index)
        }
    }

    #[test]
    fn a_leaf_that_was_used_since_is_not_taken_for_the_oldest() {
        let mut held = Held::new(&[(0, 10), (0, 20), (0, 30)]);
        assert_eq!(held.take(|_, _| 0.0), Some(0));
        held.pages.get_mut(1).last = 40;
        assert_eq!(held.take(|_, _| 0.0), Some(2));
        assert_eq!(held.take(|_, _| 0.0), Some(1));
        assert_eq!(held.take(|_, _| 0.0), None);
    }

    #[test]
    fn a_leaf_is_found_in_the_class_that_it_has_now() {
        let mut held = Held::new(&[(0, 10), (0, 20)]);
        held.leaves.remove(&mut held.pages, 0);
        held.pages.get_mut(0).set_class(1);
        held.leaves.file(&mut held.pages, 0);
        // Class 1 is worth more at any age.
        let index = |class, _| f32::from(class);
        assert_eq!(held.take(index), Some(1));
        assert_eq!(held.take(index), Some(0));
        assert_eq!(held.take(index), None);
    }

    #[test]
    fn leaves_that_change_their_class_leave_nothing_behind() {
        let all: Vec<_> = (0..1000)
            .map(|at| ((at % 7) as ClassId, at * 37 % 1009))
            .collect();
        let mut held = Held::new(&all);
        let before = held.leaves.ram_bytes();
        for round in 0..50_000_u32 {
            let id = round.wrapping_mul(2_654_435_761) % 1000;
            held.leaves.remove(&mut held.pages, id);
            held.pages.get_mut(id).set_class((round % 7) as ClassId);
            held.pages.get_mut(id).last = round;
            held.leaves.file(&mut held.pages, id);
        }
        assert!(held.leaves.ram_bytes() <= before * 5);
        let mut last = 0;
        let mut taken = 0;
        while let Some(id) = held.take(|_, _| 0.0) {
            let now = held.pages.get(id).last;
            assert!(now >= last, "{id}");
            (last, taken) = (now, taken + 1);
        }
        assert_eq!(taken, 1000);
    }
}

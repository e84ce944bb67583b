//! The leaves of each class, in the order of their last use.
//!
//! One heap a class. An entry may be stale: its page was used since, or has another class, or is no
//! leaf any more. A page that changes its class gets an entry in the heap of the new one at once.
//! One that was used in the same class keeps its entry, which is too old, never too young: it is
//! corrected when it comes to the top. So the top of a heap, once it is valid, is the oldest leaf
//! of its class.

use super::ClassId;
use crate::index::{Heap, Heat, PageId};

/// The top of a class without leaves.
const NONE: (f32, u32) = (f32::INFINITY, u32::MAX);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Leaves {
    heaps: Vec<Heap>,
    /// By class: the index of its oldest leaf, and the last use of that.
    tops: Vec<(f32, u32)>,
    /// When the tops were computed; `None`: they have to be.
    valued: Option<u32>,
    /// Classes whose tops have changed since.
    changed: Vec<ClassId>,
}

impl Leaves {
    /// Takes in a leaf of a class that was used last at `last`.
    pub(super) fn file(&mut self, class: ClassId, last: u32, id: u32) {
        let at = usize::from(class);
        if at >= self.heaps.len() {
            self.heaps.resize_with(at + 1, Heap::new);
            self.tops.resize(at + 1, NONE);
        }
        self.heaps[at].push(Heat(last), PageId(id));
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
    /// `standing` is the class and the last use of a leaf that is still held.
    pub(super) fn take_least(
        &mut self,
        now: u32,
        standing: impl Fn(u32) -> Option<(ClassId, u32)>,
        index: impl Fn(ClassId, u32) -> f32,
    ) -> Option<u32> {
        if self.valued != Some(now) {
            self.changed.clear();
            self.changed.extend(0..self.heaps.len() as ClassId);
            self.valued = Some(now);
        }
        loop {
            while let Some(class) = self.changed.pop() {
                let at = usize::from(class);
                let top = oldest(&mut self.heaps[at], class, &standing);
                self.tops[at] = top.map_or(NONE, |last| (index(class, last), last));
            }
            let (at, least) = self.tops.iter().copied().enumerate().reduce(|least, top| {
                let is_less = top.1.0 < least.1.0 || top.1.0 == least.1.0 && top.1.1 < least.1.1;
                if is_less { top } else { least }
            })?;
            if least.0 == f32::INFINITY {
                return None;
            }
            // Its page may have been used since the value was computed.
            let class = at as ClassId;
            let top = oldest(&mut self.heaps[at], class, &standing);
            if top == Some(least.1) {
                let (_, id) = self.heaps[at].top()?;
                self.heaps[at].pop();
                self.changed.push(class);
                return Some(id.0);
            }
            self.changed.push(class);
        }
    }

    pub(super) fn ram_bytes(&self) -> usize {
        let heaps: usize = self.heaps.iter().map(Heap::ram_bytes).sum();
        heaps
            + self.heaps.capacity() * size_of::<Heap>()
            + self.tops.capacity() * size_of::<(f32, u32)>()
            + self.changed.capacity() * size_of::<ClassId>()
    }
}

/// The last use of the oldest leaf of a class, after stale entries before it are dropped or
/// corrected. That leaf is at the top then.
fn oldest(
    heap: &mut Heap,
    class: ClassId,
    standing: impl Fn(u32) -> Option<(ClassId, u32)>,
) -> Option<u32> {
    while let Some((filed, id)) = heap.top() {
        match standing(id.0) {
            Some((present, last)) if present == class => {
                if last == filed.0 {
                    return Some(last);
                }
                heap.replace_top(Heat(last), id);
            }
            _ => heap.pop(),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leaf_that_was_used_since_is_not_taken_for_the_oldest() {
        let mut leaves = Leaves::default();
        let mut last = [10, 20, 30];
        for (id, at) in (0..).zip(last) {
            leaves.file(0, at, id);
        }
        let index = |_, _| 0.0;
        assert_eq!(
            leaves.take_least(50, |id| Some((0, last[id as usize])), index),
            Some(0)
        );
        last[1] = 40;
        assert_eq!(
            leaves.take_least(50, |id| Some((0, last[id as usize])), index),
            Some(2)
        );
        assert_eq!(
            leaves.take_least(50, |id| Some((0, last[id as usize])), index),
            Some(1)
        );
        assert_eq!(
            leaves.take_least(50, |id| Some((0, last[id as usize])), index),
            None
        );
    }

    #[test]
    fn a_leaf_is_found_in_the_class_that_it_has_now() {
        let mut leaves = Leaves::default();
        leaves.file(0, 10, 7);
        leaves.file(1, 10, 7);
        leaves.file(0, 20, 8);
        let standing = |id| Some((ClassId::from(id == 7), if id == 7 { 10 } else { 20 }));
        // Class 1 is worth more at any age.
        let index = |class, _| f32::from(class);
        assert_eq!(leaves.take_least(50, standing, index), Some(8));
        assert_eq!(leaves.take_least(50, standing, index), Some(7));
        assert_eq!(leaves.take_least(50, standing, index), None);
    }
}

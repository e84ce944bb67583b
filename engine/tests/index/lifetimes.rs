//! Lifetimes in the index: random calls against a list of pages with the times of their puts.

use std::collections::BTreeMap;

use larder_core::index::{
    Index, Lease, NamespaceSlot, Parent, Place, Publish, Published, ReadAs, SegmentId,
};
use larder_format::PageKey;
use proptest::prelude::*;

const SPACES: u16 = 3;
const KEYS: u8 = 24;

#[derive(Clone, Debug)]
enum Op {
    Put(u16, u8),
    Delete(u16, u8),
    Move(u16, u8),
    Pass(u16),
    /// The limits in seconds, zero for none, and whether the times of all pages are learned.
    Limit([u32; SPACES as usize], bool),
    Remove,
}

fn op() -> impl Strategy<Value = Op> {
    let (space, key) = (0..SPACES, 0..KEYS);
    let limit = || prop_oneof![Just(0), 1..20_u32];
    prop_oneof![
        8 => (space.clone(), key.clone()).prop_map(|(space, key)| Op::Put(space, key)),
        1 => (space.clone(), key.clone()).prop_map(|(space, key)| Op::Delete(space, key)),
        2 => (space, key).prop_map(|(space, key)| Op::Move(space, key)),
        4 => (0..4000_u16).prop_map(Op::Pass),
        1 => ([limit(), limit(), limit()], any::<bool>())
            .prop_map(|(limits, learns)| Op::Limit(limits, learns)),
        1 => Just(Op::Remove),
    ]
}

fn key(number: u8) -> PageKey {
    PageKey::from_bytes([number; 32])
}

/// A page that lies in the index: its place, and when it was put, in milliseconds.
#[derive(Clone, Copy, Debug)]
struct Page {
    place: Place,
    put_ms: u64,
}

struct Model {
    index: Index,
    pages: BTreeMap<(u16, u8), Page>,
    limits: [u32; SPACES as usize],
    places: u32,
    now_ms: u64,
}

impl Model {
    fn place(&mut self) -> Place {
        self.places += 1;
        Place {
            segment: SegmentId(0),
            start: self.places,
            saved: 0,
        }
    }

    /// The limit is exact to the second, and no page is served beyond it.
    fn check(&self, space: u16, number: u8) {
        let slot = NamespaceSlot(space);
        let stored = self.pages.get(&(space, number));
        let limit_ms = u64::from(self.limits[usize::from(space)]) * 1000;
        let age = stored.map(|page| self.now_ms - page.put_ms);
        let is_young = |slack: u64| age.is_some_and(|age| limit_ms == 0 || age + slack < limit_ms);
        let found = self.index.has(slot, key(number).prefix());
        assert!(
            found || !is_young(1000),
            "{space} {number}: {age:?} is young"
        );
        assert!(!found || is_young(0), "{space} {number}: {age:?} is old");
        let lease = Lease {
            now_ms: 0,
            duration_ms: 0,
            blocks_per_page: 1,
        };
        let keys = [key(number)];
        let confirmed = self.index.contains(slot, &keys, lease, &mut Vec::new());
        let pinned = self.index.pin(slot, &keys, ReadAs::Use)[0];
        if let Some(page) = pinned {
            self.index.unpin(page.place.segment);
        }
        let prefix = self
            .index
            .longest_prefix(slot, &keys, lease, &mut Vec::new());
        let answers = [
            confirmed[0],
            self.index.peek(slot, &keys)[0],
            pinned.is_some(),
            self.index.locate(slot, &keys[0]).is_some(),
            prefix == 1,
        ];
        assert_eq!(answers, [found; 5], "{space} {number}");
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Put(space, number) => {
                let slot = NamespaceSlot(space);
                let page = Page {
                    place: self.place(),
                    put_ms: self.now_ms,
                };
                let published = self.index.publish(&[Publish {
                    namespace: slot,
                    key: key(number).prefix(),
                    parent: Parent::Head,
                    place: page.place,
                    proof: 0.into(),
                    unproven: false,
                    told: Default::default(),
                }]);
                let put_s = u32::try_from(self.now_ms / 1000).unwrap();
                self.index.note_put(slot, key(number).prefix(), put_s);
                let before = self.pages.insert((space, number), page);
                let expected =
                    before.map_or(Published::New, |page| Published::Replaced(page.place));
                assert_eq!(published, [expected]);
            }
            Op::Delete(space, number) => {
                let slot = NamespaceSlot(space);
                let place = self.index.remove(slot, key(number).prefix());
                let gone = self.pages.remove(&(space, number));
                assert_eq!(place, gone.map(|page| page.place));
            }
            Op::Move(space, number) => {
                let to = self.place();
                if let Some(page) = self.pages.get_mut(&(space, number)) {
                    let (slot, from) = (NamespaceSlot(space), page.place);
                    assert!(self.index.relocate(slot, key(number).prefix(), from, to));
                    page.place = to;
                }
            }
            Op::Pass(ms) => {
                self.now_ms += u64::from(ms);
                self.index.age_to(self.now_ms);
            }
            Op::Limit(limits, learns_more) => {
                let limited = (0..).map(NamespaceSlot).zip(limits);
                let limited: Vec<_> = limited.filter(|(_, limit)| *limit > 0).collect();
                self.index.limit_lives(&limited);
                self.limits = limits;
                assert_eq!(self.index.keeps_times(), !limited.is_empty());
                if self.index.lacks_puts() || learns_more {
                    let learned = self.pages.iter().map(|((space, number), page)| {
                        let put_s = u32::try_from(page.put_ms / 1000).unwrap();
                        let key = key(*number).prefix();
                        (NamespaceSlot(*space), key, page.place, put_s)
                    });
                    self.index.learn_puts(&learned.collect::<Vec<_>>());
                    self.index.puts_are_learned(true);
                }
                assert!(!self.index.lacks_puts());
            }
            Op::Remove => {
                let mut gone = Vec::new();
                let mut next = Some(0);
                while let Some(from) = next {
                    next = self.index.remove_old(from, |page| gone.push(page));
                }
                for page in gone {
                    let found = self.pages.iter().find(|(_, of)| of.place == page.place);
                    let (name, of) = found.map(|(name, of)| (*name, *of)).unwrap();
                    let limit_ms = u64::from(self.limits[usize::from(name.0)]) * 1000;
                    assert!(limit_ms > 0 && self.now_ms - of.put_ms + 1000 > limit_ms);
                    self.pages.remove(&name);
                }
                assert_eq!(self.index.len(), self.pages.len());
            }
        }
    }
}

proptest! {
    #[test]
    fn old_pages_are_absent_and_young_ones_are_not(ops in prop::collection::vec(op(), 1..200)) {
        let mut model = Model {
            index: Index::new(1, 1 << 20),
            pages: BTreeMap::new(),
            limits: [0; SPACES as usize],
            places: 0,
            now_ms: 1_790_000_000_000,
        };
        model.index.age_to(model.now_ms);
        for op in &ops {
            model.apply(op);
            for space in 0..SPACES {
                (0..KEYS).for_each(|number| model.check(space, number));
            }
        }
        model.index.check_invariants().unwrap();
    }
}

/// Without a limit there is no memory for times, and with one 4 bytes a page.
#[test]
fn times_take_memory_while_a_limit_needs_them() {
    let index = Index::new(1, 1 << 20);
    let publish = |from: u32| {
        let page = |number: u32| {
            let mut bytes = [7; 32];
            bytes[..4].copy_from_slice(&number.to_le_bytes());
            Publish {
                namespace: NamespaceSlot(0),
                key: PageKey::from_bytes(bytes).prefix(),
                parent: Parent::Head,
                place: Place {
                    segment: SegmentId(0),
                    start: number,
                    saved: 0,
                },
                proof: 0.into(),
                unproven: false,
                told: Default::default(),
            }
        };
        let pages: Vec<Publish> = (from..from + 40_000).map(page).collect();
        index.publish(&pages);
        pages
    };
    let pages = publish(0);
    let before = index.ram_bytes();
    index.limit_lives(&[(NamespaceSlot(1), 9)]);
    assert!(!index.lacks_puts() && index.ram_bytes() < before + 200);
    index.limit_lives(&[(NamespaceSlot(0), 9)]);
    assert!(index.lacks_puts());
    let learned = pages
        .iter()
        .map(|page| (page.namespace, page.key, page.place, 5));
    index.learn_puts(&learned.collect::<Vec<_>>());
    index.puts_are_learned(true);
    let with_times = index.ram_bytes() - before;
    assert!(
        (4 * 40_000..6 * 40_000).contains(&with_times),
        "{with_times}"
    );
    index.limit_lives(&[]);
    assert_eq!(index.ram_bytes(), before);
}

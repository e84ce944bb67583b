//! The index against a naive model: a map by name, and an exact LRU found by looking at all of it.

use std::collections::{BTreeMap, BTreeSet};

use larder_core::index::{
    Adoption, Departed, Heat, Index, NamespaceSlot, PageView, Parent, Place, Publish, Published,
    ReadAs, SegmentId,
};
use larder_engine::policy::Worth;
use larder_format::{KeyPrefix, PageKey, Proof};
use proptest::prelude::*;

use super::{AMPLE_BLOCKS, HEAT_END, after, key, lease, page, place, sealed};

const CHAINS: u32 = 3;
const DEPTHS: u32 = 7;
const SEGMENTS: u32 = 4;

pub(super) type Name = (u16, u32, u32);

#[derive(Debug, Clone)]
struct Stored {
    place: Place,
    proof: Proof,
    unproven: bool,
    heat: u64,
    leased: bool,
    orphan: bool,
    parent: Option<Name>,
}

/// The specification of the index: a map by name. A child keeps its parent's name when the parent
/// leaves.
struct Model {
    pages: BTreeMap<Name, Stored>,
    /// Stamp and end of each call with leases.
    leases: Vec<(u64, u64)>,
    next: u64,
    now_ms: u64,
}

fn name_key((_, chain, depth): Name) -> PageKey {
    key(chain, depth)
}

fn slot(name: Name) -> NamespaceSlot {
    NamespaceSlot(name.0)
}

pub(super) fn name_of(namespace: NamespaceSlot, prefix: KeyPrefix) -> Name {
    let word = |at: usize| u32::from_le_bytes(prefix.as_bytes()[at..at + 4].try_into().unwrap());
    (namespace.0, word(0), word(4))
}

/// Chains 1 and 2 branch off chain 0 after its third page.
fn true_parent((namespace, chain, depth): Name) -> Option<Name> {
    match (chain, depth) {
        (_, 0) => None,
        (1 | 2, 3) => Some((namespace, 0, 2)),
        _ => Some((namespace, chain, depth - 1)),
    }
}

impl Model {
    fn stamp(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    fn floor(&mut self) -> u64 {
        while self
            .leases
            .first()
            .is_some_and(|(_, end)| *end <= self.now_ms)
        {
            self.leases.remove(0);
        }
        self.leases.first().map_or(u64::MAX, |(stamp, _)| *stamp)
    }

    fn is_leased(&mut self, name: Name) -> bool {
        let floor = self.floor();
        let page = &self.pages[&name];
        page.leased && page.heat >= floor
    }

    fn children(&self, name: Name) -> u32 {
        self.pages
            .values()
            .filter(|page| page.parent == Some(name))
            .count() as u32
    }

    fn has_ancestor(&self, mut name: Name, ancestor: Name) -> bool {
        while let Some(parent) = self.pages.get(&name).and_then(|page| page.parent) {
            if parent == ancestor {
                return true;
            }
            name = parent;
        }
        false
    }

    fn adopt(&mut self, child: Name, parent: Name) -> bool {
        let allowed = child != parent
            && self.pages.contains_key(&parent)
            && self.pages.get(&child).is_some_and(|page| page.orphan)
            && !self.has_ancestor(parent, child);
        if allowed {
            let page = self.pages.get_mut(&child).unwrap();
            page.orphan = false;
            page.parent = Some(parent);
        }
        allowed
    }

    /// Raises a heat as arrivals and departures do: a valid lease stays valid.
    fn warm(&mut self, name: Name, heat: u64) {
        let leased = self.is_leased(name);
        let page = self.pages.get_mut(&name).unwrap();
        if heat > page.heat {
            (page.heat, page.leased) = (heat, leased);
        }
    }

    fn remove(&mut self, name: Name) -> Stored {
        let gone = self.pages.remove(&name).unwrap();
        if let Some(parent) = gone.parent.filter(|parent| self.pages.contains_key(parent)) {
            self.warm(parent, gone.heat);
        }
        gone
    }

    fn publish(&mut self, page: &Publish, stamp: u64, later: &mut Vec<(Name, Name)>) -> Published {
        let name = name_of(page.namespace, page.key);
        let parent = match page.parent {
            Parent::Key(prefix) => Some(Some(name_of(slot(name), prefix))),
            Parent::Unknown => Some(None),
            Parent::Head => None,
        };
        let had = self.pages.get(&name).cloned();
        let (orphan, linked) = match &had {
            Some(page) => (page.orphan, page.parent),
            None => (true, None),
        };
        let stored = Stored {
            place: page.place,
            proof: page.proof,
            unproven: page.unproven,
            heat: had.as_ref().map_or(stamp, |page| page.heat),
            leased: had.as_ref().is_some_and(|page| page.leased),
            orphan: orphan && parent.is_some(),
            parent: linked,
        };
        let is_new = had.is_none() && self.children(name) == 0;
        self.pages.insert(name, stored);
        self.warm(name, stamp);
        if let Some(Some(parent)) = parent
            && !(is_new && self.adopt(name, parent))
        {
            later.push((name, parent));
        }
        had.map_or(Published::New, |page| Published::Replaced(page.place))
    }

    fn use_pages(&mut self, names: &[Name], lease_ms: Option<u64>) {
        let stamp = self.stamp();
        self.floor();
        if let Some(duration) = lease_ms
            && names.iter().any(|name| self.pages.contains_key(name))
        {
            self.leases.push((stamp, self.now_ms + duration));
        }
        for name in names {
            if let Some(page) = self.pages.get_mut(name) {
                (page.heat, page.leased) = (stamp, lease_ms.is_some());
            }
        }
    }

    /// Heats of all pages that eviction may take now, with their names.
    fn evictable(&mut self) -> BTreeSet<(u64, Name)> {
        let names: Vec<Name> = self.pages.keys().copied().collect();
        let leaves = names.into_iter().filter(|name| self.children(*name) == 0);
        let leaves: Vec<Name> = leaves.collect();
        let free = leaves.into_iter().filter(|name| !self.is_leased(*name));
        free.collect::<Vec<_>>()
            .into_iter()
            .map(|name| (self.pages[&name].heat, name))
            .collect()
    }
}

#[derive(Debug, Clone)]
enum Op {
    Publish(Vec<(Name, u8)>),
    LongestPrefix(u16, u32, u32, u64),
    Contains(u16, u32, u64),
    Peek(u16, u32),
    Pin(u16, u32, u32),
    Touch(Vec<Name>),
    Adopt(Name, Name),
    Relocate(Name, bool),
    Forget(Name, bool),
    Prove(Name, bool),
    Remove(Name),
    RemoveNamespace(u16),
    ForgetSegment(u32),
    Evict(u8),
    EvictIfLeaf(Name),
    Tick(u64),
}

fn any_name() -> impl Strategy<Value = Name> {
    (0..2_u16, 0..CHAINS, 0..DEPTHS)
}

fn any_op() -> impl Strategy<Value = Op> {
    let chain = || (0..2_u16, 0..CHAINS);
    prop_oneof![
        8 => prop::collection::vec((any_name(), any::<u8>()), 1..8).prop_map(Op::Publish),
        8 => (chain(), 0..DEPTHS, 1..DEPTHS).prop_map(|((ns, chain), from, to)| {
            let run = from.min(to)..from.max(to) + 1;
            Op::Publish(run.map(|depth| ((ns, chain, depth), 0)).collect())
        }),
        3 => (chain(), 0..DEPTHS, 1..50_u64)
            .prop_map(|((n, c), d, t)| Op::LongestPrefix(n, c, d, t)),
        2 => (chain(), 1..50_u64).prop_map(|((n, c), t)| Op::Contains(n, c, t)),
        1 => chain().prop_map(|(n, c)| Op::Peek(n, c)),
        3 => (chain(), 1..=DEPTHS).prop_map(|((n, c), d)| Op::Pin(n, c, d)),
        3 => prop::collection::vec(any_name(), 1..5).prop_map(Op::Touch),
        4 => (any_name(), any_name()).prop_map(|(a, b)| Op::Adopt(a, b)),
        3 => (any_name(), any::<bool>()).prop_map(|(a, b)| Op::Relocate(a, b)),
        2 => (any_name(), any::<bool>()).prop_map(|(a, b)| Op::Forget(a, b)),
        2 => (any_name(), any::<bool>()).prop_map(|(a, b)| Op::Prove(a, b)),
        3 => any_name().prop_map(Op::Remove),
        1 => (0..2_u16).prop_map(Op::RemoveNamespace),
        1 => (0..SEGMENTS).prop_map(Op::ForgetSegment),
        6 => (1..6_u8).prop_map(Op::Evict),
        2 => any_name().prop_map(Op::EvictIfLeaf),
        3 => (1..40_u64).prop_map(Op::Tick),
    ]
}

struct Pair {
    index: Index,
    model: Model,
    places: u32,
}

impl Pair {
    fn new(first: u32) -> Self {
        let model = Model {
            pages: BTreeMap::new(),
            leases: Vec::new(),
            next: u64::from(first),
            now_ms: 0,
        };
        let index = Index::with_clock(SEGMENTS as usize, AMPLE_BLOCKS, Heat(first));
        Self {
            index,
            model,
            places: 0,
        }
    }

    fn fresh_place(&mut self) -> Place {
        self.places += 1;
        Place {
            saved: self.places % 3,
            ..place(self.places % SEGMENTS, self.places)
        }
    }

    fn place_of(&mut self, name: Name, truly: bool) -> Place {
        let stored = self
            .model
            .pages
            .get(&name)
            .filter(|_| truly)
            .map(|page| page.place);
        stored.unwrap_or_else(|| self.fresh_place())
    }

    fn step(&mut self, op: &Op) {
        match op {
            Op::Publish(pages) => self.publish(pages),
            Op::LongestPrefix(ns, chain, depth, ms) => {
                self.longest_prefix(*ns, *chain, *depth, *ms);
            }
            Op::Contains(ns, chain, ms) => {
                let (names, keys) = names_of(*ns, *chain, DEPTHS);
                let terms = lease(self.model.now_ms, *ms);
                let stored = self
                    .index
                    .contains(NamespaceSlot(*ns), &keys, terms, &mut Vec::new());
                assert_eq!(stored, self.stored(&names));
                self.model.use_pages(&names, Some(*ms));
            }
            Op::Peek(ns, chain) => {
                let (names, keys) = names_of(*ns, *chain, DEPTHS);
                assert_eq!(
                    self.index.peek(NamespaceSlot(*ns), &keys),
                    self.stored(&names)
                );
            }
            Op::Pin(ns, chain, depth) => {
                let (names, keys) = names_of(*ns, *chain, *depth);
                for (found, name) in self
                    .index
                    .pin(NamespaceSlot(*ns), &keys, ReadAs::Use)
                    .iter()
                    .zip(&names)
                {
                    let page = self.model.pages.get(name);
                    let expected = page.map(|page| (page.place, page.proof));
                    assert_eq!(found.map(|found| (found.place, found.proof)), expected);
                    found.map(|found| self.index.unpin(found.place.segment));
                }
                self.model.use_pages(&names, None);
            }
            Op::Touch(names) => {
                let same: Vec<Name> = names
                    .iter()
                    .copied()
                    .filter(|name| name.0 == names[0].0)
                    .collect();
                let keys: Vec<PageKey> = same.iter().copied().map(name_key).collect();
                self.index.touch(slot(names[0]), &keys);
                self.model.use_pages(&same, None);
            }
            Op::Adopt(child, parent) => {
                let parent = (child.0, parent.1, parent.2);
                let pair = Adoption {
                    namespace: slot(*child),
                    child: name_key(*child).prefix(),
                    parent: name_key(parent).prefix(),
                };
                let linked = self.index.adopt(&[pair]) == 1;
                assert_eq!(linked, self.model.adopt(*child, parent));
            }
            Op::Relocate(name, truly) => {
                let (from, to) = (self.place_of(*name, *truly), self.fresh_place());
                let moved = self
                    .index
                    .relocate(slot(*name), name_key(*name).prefix(), from, to);
                assert_eq!(moved, *truly && self.model.pages.contains_key(name));
                if moved {
                    self.model.pages.get_mut(name).unwrap().place = to;
                }
            }
            Op::Forget(name, truly) => {
                let from = self.place_of(*name, *truly);
                let gone = self
                    .index
                    .forget(slot(*name), name_key(*name).prefix(), from);
                assert_eq!(gone, *truly && self.model.pages.contains_key(name));
                if gone {
                    self.model.remove(*name);
                }
            }
            Op::Prove(name, truly) => {
                let at = self.place_of(*name, *truly);
                let proven = self.index.prove(slot(*name), name_key(*name).prefix(), at);
                assert_eq!(proven, *truly && self.model.pages.contains_key(name));
                if proven {
                    self.model.pages.get_mut(name).unwrap().unproven = false;
                }
            }
            Op::Remove(name) => {
                let gone = self.index.remove(slot(*name), name_key(*name).prefix());
                assert_eq!(gone, self.model.pages.get(name).map(|page| page.place));
                if gone.is_some() {
                    self.model.remove(*name);
                }
            }
            Op::RemoveNamespace(ns) => {
                let mut gone = Vec::new();
                self.index
                    .remove_namespace(NamespaceSlot(*ns), |page| gone.push(page));
                self.left(&gone, |name, _| name.0 == *ns);
            }
            Op::ForgetSegment(segment) => {
                let segment = SegmentId(*segment);
                let mut gone = Vec::new();
                self.index.forget_segment(segment, |page| gone.push(page));
                self.left(&gone, |_, page| page.place.segment == segment);
            }
            Op::Evict(pages) => (0..*pages).for_each(|_| self.evict()),
            Op::EvictIfLeaf(name) => {
                let at = self.place_of(*name, true);
                let prefix = name_key(*name).prefix();
                let may = self.model.evictable().iter().any(|(_, leaf)| leaf == name);
                let now_ms = self.model.now_ms;
                let gone = self
                    .index
                    .evict_chain(slot(*name), prefix, at, now_ms, |_, _, _| false);
                assert_eq!(gone.len(), usize::from(may));
                if may {
                    self.model.remove(*name);
                }
            }
            Op::Tick(ms) => self.model.now_ms += ms,
        }
    }

    fn stored(&self, names: &[Name]) -> Vec<bool> {
        names
            .iter()
            .map(|name| self.model.pages.contains_key(name))
            .collect()
    }

    fn publish(&mut self, pages: &[(Name, u8)]) {
        let mut batch = Vec::new();
        for (name, choice) in pages {
            let parent = match (choice % 8, true_parent(*name)) {
                (_, None) | (6, _) => Parent::Head,
                (7, _) => Parent::Unknown,
                (_, Some(parent)) => after(name_key(parent)),
            };
            let page = page(name_key(*name), parent, self.fresh_place());
            let page = match page.place.start % 3 {
                0 => sealed(page),
                _ => page,
            };
            batch.push(Publish {
                namespace: slot(*name),
                unproven: choice / 8 % 2 == 1,
                ..page
            });
        }
        let published = self.index.publish(&batch);
        let stamp = self.model.stamp();
        let mut later = Vec::new();
        for (page, outcome) in batch.iter().zip(published) {
            assert_eq!(outcome, self.model.publish(page, stamp, &mut later));
        }
        // From the tail: it decides which of the links that would close a circle together is not
        // made.
        for (child, parent) in later.into_iter().rev() {
            self.model.adopt(child, parent);
        }
    }

    fn longest_prefix(&mut self, ns: u16, chain: u32, depth: u32, ms: u64) {
        let (names, keys) = names_of(ns, chain, depth);
        let terms = lease(self.model.now_ms, ms);
        let mut orphans = Vec::new();
        let found = self
            .index
            .longest_prefix(NamespaceSlot(ns), &keys, terms, &mut orphans);
        let run = self
            .stored(&names)
            .iter()
            .take_while(|stored| **stored)
            .count();
        assert_eq!(found, run);
        let expected: Vec<KeyPrefix> = (1..run)
            .filter(|at| self.model.pages[&names[*at]].orphan)
            .map(|at| keys[at].prefix())
            .collect();
        assert_eq!(
            orphans.iter().map(|pair| pair.child).collect::<Vec<_>>(),
            expected
        );
        if !names.is_empty() {
            self.model.use_pages(&names[..run], Some(ms));
        }
    }

    fn left(&mut self, gone: &[Departed], expected: impl Fn(&Name, &Stored) -> bool) {
        let picked = self
            .model
            .pages
            .iter()
            .filter(|(name, page)| expected(name, page));
        let expected: BTreeSet<Name> = picked.map(|(name, _)| *name).collect();
        let names: Vec<Name> = gone
            .iter()
            .map(|page| name_of(page.namespace, page.key))
            .collect();
        assert_eq!(names.len(), expected.len());
        assert_eq!(names.iter().copied().collect::<BTreeSet<_>>(), expected);
        for name in names {
            self.model.remove(name);
        }
    }

    fn evict(&mut self) {
        let evictable = self.model.evictable();
        let evicted = self
            .index
            .evict_coldest(self.model.now_ms, |_, _| false, |_| false);
        let Some(page) = evicted else {
            assert!(evictable.is_empty(), "nothing evicted of {evictable:?}");
            return;
        };
        let name = name_of(page.namespace, page.key);
        let coldest = evictable.first().map(|(heat, _)| *heat);
        let is_coldest = coldest.is_some_and(|heat| evictable.contains(&(heat, name)));
        assert!(is_coldest, "{name:?} of {evictable:?}");
        assert_eq!(self.model.remove(name).place, page.place);
    }

    fn compare(&mut self) {
        self.index.check_invariants().unwrap();
        let mut saved: BTreeMap<u16, u64> = BTreeMap::new();
        for ((namespace, ..), page) in &self.model.pages {
            *saved.entry(*namespace).or_default() += u64::from(page.place.saved);
        }
        for (namespace, saved) in saved {
            assert_eq!(self.index.saved_of(NamespaceSlot(namespace)), saved);
        }
        assert_eq!(self.index.len(), self.model.pages.len());
        let mut views: BTreeMap<Name, PageView> = BTreeMap::new();
        self.index.each(|view| {
            views.insert(name_of(view.namespace, view.key), *view);
        });
        assert_eq!(views.len(), self.model.pages.len());
        // Lowering all heats shifts all of them alike.
        let shift = views.iter().next().map_or(0, |(name, view)| {
            self.model.pages[name].heat - u64::from(view.heat.0)
        });
        for (name, page) in self.model.pages.clone() {
            let parent = page
                .parent
                .filter(|parent| self.model.pages.contains_key(parent));
            let view = PageView {
                namespace: slot(name),
                key: name_key(name).prefix(),
                parent: parent.map(|parent| name_key(parent).prefix()),
                place: page.place,
                proof: page.proof,
                heat: Heat((page.heat - shift) as u32),
                children: self.model.children(name),
                unproven: page.unproven,
                orphan: page.orphan || page.parent.is_some() && parent.is_none(),
            };
            assert_eq!(views[&name], view);
            let info = self
                .index
                .live(view.namespace, view.key, view.place, self.model.now_ms)
                .unwrap();
            assert_eq!(info.leased, self.model.is_leased(name), "{name:?}");
        }
        self.compare_hottest(shift);
    }

    fn compare_hottest(&self, shift: u64) {
        let mut hottest = vec![None; SEGMENTS as usize];
        for (name, page) in &self.model.pages {
            let heat = Worth((page.heat - shift) as u32);
            let mut at = Some(*name);
            while let Some(page) = at.and_then(|name| self.model.pages.get(&name)) {
                let segment = &mut hottest[page.place.segment.0 as usize];
                *segment = (*segment).max(Some(heat));
                at = page.parent;
            }
        }
        assert_eq!(self.index.worthiest_by_segment(), hottest);
    }
}

fn names_of(namespace: u16, chain: u32, depth: u32) -> (Vec<Name>, Vec<PageKey>) {
    let names: Vec<Name> = (0..depth).map(|depth| (namespace, chain, depth)).collect();
    let keys = names.iter().copied().map(name_key).collect();
    (names, keys)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_index_matches_a_plain_map_and_an_exact_lru(
        ops in prop::collection::vec(any_op(), 1..250),
    ) {
        let mut pair = Pair::new(0);
        for op in &ops {
            pair.step(op);
            pair.compare();
        }
    }

    #[test]
    fn the_index_matches_them_while_all_heats_are_lowered(
        ops in prop::collection::vec(any_op(), 1..250),
        before in 1..100_u32,
    ) {
        let mut pair = Pair::new(HEAT_END - before);
        for op in &ops {
            pair.step(op);
            pair.compare();
        }
    }
}

/// A call whose pages have all gone keeps its record, and all heats are lowered as far as they go:
/// no later call may get its stamp.
#[test]
fn a_call_older_than_every_page_shares_its_stamp_with_no_later_one() {
    for before in 1..12 {
        let mut pair = Pair::new(HEAT_END - before);
        let later = [3, 0].map(|depth| ((0, 2, depth), 160));
        let ops = [
            Op::Publish(vec![((0, 0, 0), 0)]),
            Op::LongestPrefix(0, 0, 1, 39),
            Op::Tick(38),
            Op::RemoveNamespace(0),
            Op::LongestPrefix(1, 2, 2, 19),
            Op::Publish(later.to_vec()),
            Op::Contains(0, 2, 1),
            Op::Tick(11),
        ];
        for op in &ops {
            pair.step(op);
            pair.compare();
        }
    }
}

/// Chains of real keys cannot contain such a circle: keys are hashes of their parents'.
#[test]
fn of_links_that_would_close_a_circle_together_the_last_is_made_first() {
    let mut pair = Pair::new(0);
    let run = |chain, depths: &[u32]| {
        let names = depths.iter().map(|depth| ((0, chain, *depth), 0));
        Op::Publish(names.collect())
    };
    let ops = [
        run(0, &[1, 3]),
        Op::Adopt((0, 0, 1), (0, 0, 3)),
        run(0, &[0, 1, 2]),
        run(1, &[0, 1, 2, 3]),
        Op::Remove((0, 0, 2)),
        run(0, &[0, 1, 2, 3]),
    ];
    for op in &ops {
        pair.step(op);
        pair.compare();
    }
}

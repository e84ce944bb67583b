//! Quotas in the index: random calls against counts of blocks, without a policy and with one.

use std::collections::BTreeMap;

use larder_core::index::{
    GroupLimits, Index, Lease, Membership, NamespaceSlot, Parent, Place, Publish, SegmentId,
};
use larder_core::policy::{PolicyMaker, make};
use larder_format::{KeyPrefix, PageKey};
use proptest::prelude::*;

use crate::policies::{Fifo, Random};

/// Blocks of a page of each namespace. The first two are one group, the third and the fourth are
/// groups of their own, the last one has no quota.
const BLOCKS: [u32; 5] = [4, 1, 3, 2, 2];
const GROUPS: [Option<u16>; 5] = [Some(0), Some(0), Some(1), Some(2), None];
const KEYS: u16 = 96;

#[derive(Clone, Debug)]
enum Op {
    /// A put of a page, below the page before it if that is stored.
    Put(usize, u16),
    /// Evictions, of all pages or of a group.
    Evict(u8),
    EvictOwn(u16, u8),
    /// Reclaim drops a page with its chain.
    EvictChain(usize, u16),
    Delete(usize, u16),
    Clear(usize),
    Use(usize, u16, u8, bool),
    Move(usize, u16),
    Pass(u64),
    Limits([(u64, u64); 3]),
}

fn op() -> impl Strategy<Value = Op> {
    let space = 0..BLOCKS.len();
    let key = 0..KEYS;
    let limit = prop_oneof![Just((0, u64::MAX)), (0..60_u64, 0..90_u64)];
    prop_oneof![
        20 => (space.clone(), key.clone()).prop_map(|(space, key)| Op::Put(space, key)),
        6 => (0..12_u8).prop_map(Op::Evict),
        4 => (0..3_u16, 0..12_u8).prop_map(|(group, times)| Op::EvictOwn(group, times)),
        3 => (space.clone(), key.clone()).prop_map(|(space, key)| Op::EvictChain(space, key)),
        3 => (space.clone(), key.clone()).prop_map(|(space, key)| Op::Delete(space, key)),
        1 => space.clone().prop_map(Op::Clear),
        4 => (space.clone(), key.clone(), 1..20_u8, any::<bool>())
            .prop_map(|(space, key, pages, leases)| Op::Use(space, key, pages, leases)),
        2 => (space, key).prop_map(|(space, key)| Op::Move(space, key)),
        2 => (0..300_u64).prop_map(Op::Pass),
        1 => [limit.clone(), limit.clone(), limit].prop_map(Op::Limits),
    ]
}

fn name(space: usize, key: u16) -> (NamespaceSlot, PageKey) {
    let mut bytes = [0; 32];
    bytes[0] = space as u8;
    bytes[1..3].copy_from_slice(&key.to_le_bytes());
    (NamespaceSlot(space as u16), PageKey::from_bytes(bytes))
}

/// The pages that are stored, each with its blocks.
type Stored = BTreeMap<(NamespaceSlot, KeyPrefix), u32>;

struct Model {
    index: Index,
    limits: [GroupLimits; 3],
    stored: Stored,
    places: u32,
    now_ms: u64,
}

impl Model {
    fn level(&self, group: u16) -> u64 {
        let of = |slot: NamespaceSlot| GROUPS[usize::from(slot.0)];
        let own = self
            .stored
            .iter()
            .filter(|((slot, _), _)| of(*slot) == Some(group));
        own.map(|(_, blocks)| u64::from(*blocks)).sum()
    }

    fn set(&mut self, limits: [(u64, u64); 3]) {
        self.limits = limits.map(|(min, more)| GroupLimits {
            min,
            max: min.saturating_add(more),
        });
        let members = (0_u16..).zip(GROUPS).zip(BLOCKS);
        let members: Vec<_> = members
            .map(|((slot, group), blocks)| {
                let group = group.map_or(Membership::None, Membership::Of);
                (NamespaceSlot(slot), group, blocks)
            })
            .collect();
        self.index
            .set_groups(&self.limits, &members, std::iter::empty());
    }

    fn next_place(&mut self) -> Place {
        self.places += 1;
        Place {
            segment: SegmentId(self.places % 8),
            start: self.places,
            saved: self.places % 2,
        }
    }

    /// A page left as evicted: its group was to lose it.
    fn left(&mut self, slot: NamespaceSlot, key: KeyPrefix) {
        let blocks = self.stored.remove(&(slot, key)).expect("it was stored");
        if let Some(group) = GROUPS[usize::from(slot.0)] {
            let (level, limits) = (self.level(group), self.limits[usize::from(group)]);
            assert!(
                level >= limits.min,
                "group {group}: {level} after {blocks} left"
            );
        }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Put(space, at) => {
                let (namespace, key) = name(space, at);
                let before = at
                    .checked_sub(1)
                    .map(|before| name(space, before).1.prefix());
                let is_stored = |key| self.stored.contains_key(&(namespace, key));
                let parent = before.filter(|key| at % 8 != 0 && is_stored(*key));
                let place = self.next_place();
                self.index.publish(&[Publish {
                    namespace,
                    key: key.prefix(),
                    parent: parent.map_or(Parent::Head, Parent::Key),
                    place,
                    proof: 1.into(),
                    unproven: false,
                    told: Default::default(),
                }]);
                let blocks = BLOCKS[space].saturating_sub(place.saved);
                self.stored.insert((namespace, key.prefix()), blocks);
            }
            Op::Evict(times) => {
                for _ in 0..times {
                    let gone = self
                        .index
                        .evict_coldest(self.now_ms, |_, _| false, |_| false);
                    let Some(gone) = gone else {
                        // Only leased pages, their ancestors, and what groups keep are left.
                        assert!(self.some_must_stay());
                        break;
                    };
                    self.left(gone.namespace, gone.key);
                }
            }
            Op::EvictOwn(group, times) => {
                for _ in 0..times {
                    let (index, now) = (&self.index, self.now_ms);
                    let gone = index.evict_own(group, 0, now, |_, _| false, |_| false);
                    let Some(gone) = gone else { break };
                    assert_eq!(GROUPS[usize::from(gone.namespace.0)], Some(group));
                    self.left(gone.namespace, gone.key);
                }
            }
            Op::EvictChain(space, at) => {
                let (namespace, key) = name(space, at);
                if let Some(found) = self.index.locate(namespace, &key) {
                    let (index, key, now) = (&self.index, key.prefix(), self.now_ms);
                    let stays = |_, _, _| false;
                    for gone in index.evict_chain(namespace, key, found.place, now, stays) {
                        self.left(gone.namespace, gone.key);
                    }
                }
            }
            Op::Delete(space, at) => {
                let (namespace, key) = name(space, at);
                self.index.remove(namespace, key.prefix());
                self.stored.remove(&(namespace, key.prefix()));
            }
            Op::Clear(space) => {
                let namespace = NamespaceSlot(space as u16);
                self.index.remove_namespace(namespace, |_| {});
                self.stored.retain(|(slot, _), _| *slot != namespace);
            }
            Op::Use(space, at, pages, leases) => {
                let keys = (at..at + u16::from(pages)).map(|at| name(space, at).1);
                let keys: Vec<PageKey> = keys.collect();
                let lease = Lease {
                    now_ms: self.now_ms,
                    duration_ms: if leases { 100 } else { 0 },
                    blocks_per_page: BLOCKS[space],
                };
                let namespace = NamespaceSlot(space as u16);
                self.index
                    .contains(namespace, &keys, lease, &mut Vec::new());
            }
            Op::Move(space, at) => {
                let (namespace, key) = name(space, at);
                if let Some(found) = self.index.locate(namespace, &key) {
                    let place = Place {
                        saved: found.place.saved,
                        ..self.next_place()
                    };
                    let key = key.prefix();
                    assert!(self.index.relocate(namespace, key, found.place, place));
                }
            }
            Op::Pass(ms) => self.now_ms += ms,
            Op::Limits(limits) => self.set(limits),
        }
        self.check();
    }

    /// Whether there are no pages, or all leaves are leased or kept by their groups.
    fn some_must_stay(&self) -> bool {
        // The coldest page of a group may be its largest.
        let largest = BLOCKS.into_iter().max().map_or(0, u64::from);
        let may_lose = |slot: NamespaceSlot| match GROUPS[usize::from(slot.0)] {
            None => true,
            Some(group) => {
                let limits = self.limits[usize::from(group)];
                self.level(group) >= limits.min + largest
            }
        };
        let mut all_stay = true;
        self.index
            .each(|page| all_stay &= page.children > 0 || !may_lose(page.namespace));
        all_stay || self.index.leased_blocks(self.now_ms) > 0
    }

    fn check(&self) {
        self.index.check_invariants().unwrap();
        assert_eq!(self.index.len(), self.stored.len());
        for (group, (stored, level)) in (0..).zip(self.index.group_levels()) {
            assert_eq!((stored, level), (self.level(group), self.level(group)));
        }
    }
}

fn play(ops: &[Op], choose: impl FnOnce(&Index)) {
    let index = Index::new(8, 4096);
    choose(&index);
    let mut model = Model {
        index,
        limits: [GroupLimits {
            min: 0,
            max: u64::MAX,
        }; 3],
        stored: Stored::new(),
        places: 0,
        now_ms: 0,
    };
    ops.iter().for_each(|op| model.apply(op));
    // Without limits everything may go.
    model.set([(0, 0); 3]);
    model.now_ms += 1000;
    model.apply(&Op::Evict(u8::MAX));
    model.apply(&Op::Evict(u8::MAX));
    model.apply(&Op::Evict(u8::MAX));
    assert!(model.index.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn no_eviction_takes_a_group_below_its_minimum_by_least_recent_use(
        ops in prop::collection::vec(op(), 1..400),
    ) {
        play(&ops, |_| {});
    }

    #[test]
    fn no_eviction_takes_a_group_below_its_minimum_under_a_policy(
        ops in prop::collection::vec(op(), 1..400),
        seed: u64,
        is_fifo: bool,
    ) {
        play(&ops, |index| match is_fifo {
            true => index.choose(make(&PolicyMaker::eviction(Fifo::default))),
            false => index.choose(make(&PolicyMaker::eviction(move || Random::new(seed)))),
        });
    }
}

#[test]
fn the_leaves_that_a_group_keeps_cost_an_eviction_no_walk() {
    let index = Index::new(8, 1 << 20);
    let put = |namespace: u16, at: u32| {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&at.to_le_bytes());
        index.publish(&[Publish {
            namespace: NamespaceSlot(namespace),
            key: PageKey::from_bytes(bytes).prefix(),
            parent: Parent::Head,
            place: Place {
                segment: SegmentId(0),
                start: at % (1 << 19),
                saved: 0,
            },
            proof: 1.into(),
            unproven: false,
            told: Default::default(),
        }]);
    };
    let limits = [GroupLimits {
        min: 50_000,
        max: u64::MAX,
    }];
    let members = [(NamespaceSlot(0), Membership::Of(0), 1)];
    index.set_groups(&limits, &members, std::iter::empty());
    (0..50_000).for_each(|at| put(0, at));
    // Each time the coldest leaf of all is one that stays, and the group gets one leaf more.
    for at in 0..20_000 {
        put(1, 100_000 + at);
        let gone = index.evict_coldest(0, |_, _| false, |_| false).unwrap();
        assert_eq!(gone.namespace, NamespaceSlot(1));
        put(0, 200_000 + at);
        let gone = index.evict_coldest(0, |_, _| false, |_| false).unwrap();
        // The least recently used one of the group goes for it.
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&at.to_le_bytes());
        assert_eq!(gone.key, PageKey::from_bytes(bytes).prefix());
    }
    index.check_invariants().unwrap();
}

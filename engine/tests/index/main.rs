//! The index against a naive model, each of its promises by itself, and its readers against its
//! writer.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../../tests/support/honest.rs"]
mod honest;
mod lifetimes;
mod model;
#[path = "../common/policies.rs"]
#[allow(dead_code)]
mod policies;
mod quotas;
mod race;
mod ram;

use std::collections::BTreeSet;
use std::num::NonZeroU16;

use larder_core::index::{
    Adoption, Heat, Index, Lease, LiveInfo, NamespaceSlot, Parent, Place, Publish, Published,
    ReadAs, SegmentId,
};
use larder_format::{KeyPrefix, PageKey, Proof, Seal};

const NS: NamespaceSlot = NamespaceSlot(3);
const AMPLE_BLOCKS: u64 = 1 << 24;
const HEAT_END: u32 = 1 << 31;

/// The key of page `depth` of chain `chain`.
fn key(chain: u32, depth: u32) -> PageKey {
    let mut bytes = [0; 32];
    bytes[..4].copy_from_slice(&chain.to_le_bytes());
    bytes[4..8].copy_from_slice(&depth.to_le_bytes());
    PageKey::from_bytes(bytes)
}

fn chain(chain: u32, pages: u32) -> Vec<PageKey> {
    (0..pages).map(|depth| key(chain, depth)).collect()
}

fn place(segment: u32, start: u32) -> Place {
    Place {
        segment: SegmentId(segment),
        start,
        saved: 0,
    }
}

/// The page, encrypted.
fn sealed(page: Publish) -> Publish {
    let byte = page.place.start.to_le_bytes()[0];
    let proof = Proof {
        seal: Some(Seal {
            slot: NonZeroU16::MAX,
            salt: [byte; 12],
            tag: [byte | 1; 16],
        }),
        ..page.proof
    };
    Publish { proof, ..page }
}

fn page(at: PageKey, parent: Parent, place: Place) -> Publish {
    Publish {
        namespace: NS,
        key: at.prefix(),
        parent,
        place,
        proof: (u64::from(place.start) + 1).into(),
        unproven: false,
        told: Default::default(),
    }
}

fn after(parent: PageKey) -> Parent {
    Parent::Key(parent.prefix())
}

/// Publishes pages `from..to` of a chain into segment 0, one call for all.
fn publish_chain(index: &Index, number: u32, from: u32, to: u32) {
    let batch: Vec<Publish> = (from..to)
        .map(|depth| {
            let parent = depth
                .checked_sub(1)
                .map_or(Parent::Head, |up| after(key(number, up)));
            page(key(number, depth), parent, place(0, number * 1000 + depth))
        })
        .collect();
    let published = index.publish(&batch);
    assert!(published.iter().all(|outcome| *outcome == Published::New));
}

fn lease(now_ms: u64, duration_ms: u64) -> Lease {
    Lease {
        now_ms,
        duration_ms,
        blocks_per_page: 1,
    }
}

fn live(index: &Index, at: PageKey, now_ms: u64) -> Option<LiveInfo> {
    let found = index.locate(NS, &at)?;
    index.live(NS, at.prefix(), found.place, now_ms)
}

fn evict_all(index: &Index, now_ms: u64) -> Vec<KeyPrefix> {
    let evicted = std::iter::from_fn(|| index.evict_coldest(now_ms, |_, _| false, |_| false));
    evicted.map(|page| page.key).collect()
}

fn prefixes(keys: &[PageKey]) -> Vec<KeyPrefix> {
    keys.iter().map(PageKey::prefix).collect()
}

#[test]
fn a_published_page_is_found_where_it_was_put_and_in_no_other_namespace() {
    let index = Index::new(4, AMPLE_BLOCKS);
    let head = Publish {
        unproven: true,
        ..page(key(1, 0), Parent::Head, place(3, 1_048_575))
    };
    assert_eq!(index.publish(&[head]), [Published::New]);
    let found = index.locate(NS, &key(1, 0)).unwrap();
    assert_eq!(
        (found.place, found.proof, found.unproven),
        (head.place, head.proof, true)
    );
    assert_eq!(index.locate(NamespaceSlot(u16::MAX), &key(1, 0)), None);
    assert_eq!(index.locate(NS, &key(1, 1)), None);
    assert_eq!(index.len(), 1);
    index.check_invariants().unwrap();
}

#[test]
fn the_prefix_ends_at_the_first_gap_and_contains_sees_beyond_it() {
    let index = Index::new(1, AMPLE_BLOCKS);
    publish_chain(&index, 0, 0, 700);
    index.remove(NS, key(0, 600).prefix()).unwrap();
    let keys = chain(0, 800);
    let mut orphans = Vec::new();
    assert_eq!(
        index.longest_prefix(NS, &keys, lease(0, 10), &mut orphans),
        600
    );
    assert_eq!(
        index.longest_prefix(NS, &keys[..512], lease(0, 10), &mut orphans),
        512
    );
    assert_eq!(index.longest_prefix(NS, &[], lease(0, 10), &mut orphans), 0);
    let stored = index.contains(NS, &keys, lease(0, 10), &mut orphans);
    let expected: Vec<bool> = (0..800).map(|depth| depth < 700 && depth != 600).collect();
    assert_eq!(stored, expected);
    assert_eq!(index.peek(NS, &keys), expected);
    assert_eq!(orphans, []);
    index.check_invariants().unwrap();
}

#[test]
fn a_hundred_thousand_keys_are_looked_up_in_one_call() {
    let index = Index::new(1, AMPLE_BLOCKS);
    let keys = chain(0, 131_072);
    publish_chain(&index, 0, 0, 131_072);
    let mut orphans = Vec::new();
    assert_eq!(
        index.longest_prefix(NS, &keys, lease(0, 10), &mut orphans),
        keys.len()
    );
    assert_eq!(orphans, []);
    assert!(
        index
            .pin(NS, &keys, ReadAs::Use)
            .iter()
            .all(Option::is_some)
    );
    assert_eq!(index.pins(SegmentId(0)), 131_072);
    index.check_invariants().unwrap();
}

#[test]
fn a_replaced_page_gives_back_its_old_place_and_keeps_its_children() {
    let index = Index::new(2, AMPLE_BLOCKS);
    publish_chain(&index, 0, 0, 3);
    let again = page(key(0, 1), after(key(0, 0)), place(1, 7));
    assert_eq!(index.publish(&[again]), [Published::Replaced(place(0, 1))]);
    assert_eq!(live(&index, key(0, 1), 0).unwrap().children, 1);
    assert_eq!(live(&index, key(0, 0), 0).unwrap().children, 1);
    assert_eq!(index.len(), 3);
    index.check_invariants().unwrap();
}

#[test]
fn findings_about_an_old_place_change_nothing_at_the_new_one() {
    let index = Index::new(2, AMPLE_BLOCKS);
    let (name, old, new) = (key(0, 0).prefix(), place(0, 5), place(1, 9));
    index.publish(&[Publish {
        unproven: true,
        ..page(key(0, 0), Parent::Head, old)
    }]);
    assert!(index.relocate(NS, name, old, new));
    assert!(!index.relocate(NS, name, old, place(0, 6)));
    assert!(!index.forget(NS, name, old));
    assert!(!index.prove(NS, name, old));
    assert_eq!(index.evict_chain(NS, name, old, 0, |_, _, _| false), []);
    assert_eq!(index.live(NS, name, old, 0), None);
    let found = index.locate(NS, &key(0, 0)).unwrap();
    assert_eq!((found.place, found.unproven), (new, true));
    assert!(index.prove(NS, name, new));
    assert!(!index.locate(NS, &key(0, 0)).unwrap().unproven);
    assert!(index.forget(NS, name, new));
    assert!(index.is_empty());
}

#[test]
fn pins_hold_a_segment_until_the_last_is_given_back() {
    let index = Index::new(2, AMPLE_BLOCKS);
    publish_chain(&index, 0, 0, 2);
    index.relocate(NS, key(0, 1).prefix(), place(0, 1), place(1, 0));
    let found = index.pin(
        NS,
        &[key(0, 0), key(0, 1), key(0, 2), key(0, 0)],
        ReadAs::Use,
    );
    let places: Vec<_> = found
        .iter()
        .map(|found| found.map(|found| found.place))
        .collect();
    let (first, second) = (Some(place(0, 0)), Some(place(1, 0)));
    assert_eq!(places, [first, second, None, first]);
    assert_eq!((index.pins(SegmentId(0)), index.pins(SegmentId(1))), (2, 1));
    assert!(!index.await_readers(SegmentId(0)));
    assert_eq!(index.pins(SegmentId(0)), 2);
    assert!(!index.unpin(SegmentId(0)));
    assert!(
        index.unpin(SegmentId(0)),
        "the last reader of an awaited segment"
    );
    assert!(index.await_readers(SegmentId(0)));
    assert!(!index.unpin(SegmentId(1)), "no release waits for this one");
    assert!(index.await_readers(SegmentId(1)));
    assert_eq!((index.pins(SegmentId(0)), index.pins(SegmentId(1))), (0, 0));
}

#[test]
#[should_panic(expected = "unpinned more often than pinned")]
fn a_pin_given_back_twice_is_refused() {
    Index::new(1, AMPLE_BLOCKS).unpin(SegmentId(0));
}

#[test]
#[should_panic(expected = "beyond the store's")]
fn a_place_beyond_the_store_is_refused() {
    Index::new(1, AMPLE_BLOCKS).publish(&[page(key(0, 0), Parent::Head, place(1, 0))]);
}

#[test]
fn leaves_leave_in_the_order_of_their_last_use() {
    let index = Index::new(1, AMPLE_BLOCKS);
    for number in 0..50 {
        publish_chain(&index, number, 0, 1);
    }
    let order: Vec<u32> = (0..50).map(|step| step * 37 % 50).collect();
    for number in &order {
        index.touch(NS, &[key(*number, 0)]);
    }
    let expected: Vec<PageKey> = order.iter().map(|number| key(*number, 0)).collect();
    assert_eq!(evict_all(&index, 0), prefixes(&expected));
    index.check_invariants().unwrap();
}

#[test]
fn a_chain_leaves_from_its_tail() {
    let index = Index::new(1, AMPLE_BLOCKS);
    publish_chain(&index, 0, 0, 300);
    let mut expected = prefixes(&chain(0, 300));
    expected.reverse();
    assert_eq!(evict_all(&index, 0), expected);
    assert!(index.is_empty());
    index.check_invariants().unwrap();
}

#[test]
fn a_parent_is_as_hot_as_the_hottest_descendant_it_ever_had() {
    let index = Index::new(1, AMPLE_BLOCKS);
    publish_chain(&index, 0, 0, 2);
    publish_chain(&index, 1, 0, 1);
    index.touch(NS, &[key(0, 1)]);
    index.remove(NS, key(0, 1).prefix()).unwrap();
    assert_eq!(evict_all(&index, 0), prefixes(&[key(1, 0), key(0, 0)]));
}

/// Chain 0 begins in segment 0, and goes on in segment 2; chain 1 lies in segment 1.
#[test]
fn a_segment_is_as_hot_as_the_hottest_descendant_of_its_pages() {
    let index = Index::new(4, AMPLE_BLOCKS);
    let stamp = || index.hottest();
    index.publish(&[page(key(0, 0), Parent::Head, place(0, 0))]);
    let second = stamp();
    index.publish(&[page(key(1, 0), Parent::Head, place(1, 0))]);
    let third = stamp();
    index.publish(&[page(key(0, 1), after(key(0, 0)), place(2, 0))]);
    let hottest = |index: &Index| -> Vec<Option<Heat>> {
        let worths = index.worthiest_by_segment().into_iter();
        worths
            .map(|worth| worth.map(|worth| Heat(worth.0)))
            .collect()
    };
    assert_eq!(
        hottest(&index),
        [Some(third), Some(second), Some(third), None]
    );
    let fourth = stamp();
    index.touch(NS, &[key(1, 0)]);
    assert_eq!(hottest(&index)[1], Some(fourth));
}

#[test]
fn a_page_that_leaves_before_its_children_is_absent_until_it_comes_back_and_then_has_them_again() {
    let index = Index::new(1, AMPLE_BLOCKS);
    publish_chain(&index, 0, 0, 4);
    assert_eq!(index.remove(NS, key(0, 1).prefix()), Some(place(0, 1)));
    assert_eq!(index.remove(NS, key(0, 1).prefix()), None);
    assert_eq!(index.peek(NS, &chain(0, 4)), [true, false, true, true]);
    assert_eq!(live(&index, key(0, 0), 0).unwrap().children, 0);
    index.check_invariants().unwrap();
    let again = page(key(0, 1), after(key(0, 0)), place(0, 900));
    assert_eq!(index.publish(&[again]), [Published::New]);
    assert_eq!(live(&index, key(0, 0), 0).unwrap().children, 1);
    assert_eq!(live(&index, key(0, 1), 0).unwrap().children, 1);
    index.check_invariants().unwrap();
    let mut expected = prefixes(&chain(0, 4));
    expected.reverse();
    assert_eq!(evict_all(&index, 0), expected);
    index.check_invariants().unwrap();
}

#[test]
fn an_orphan_is_reported_by_a_lookup_and_linked_by_adopting() {
    let index = Index::new(1, AMPLE_BLOCKS);
    index.publish(&[page(key(0, 2), after(key(0, 1)), place(0, 2))]);
    index.publish(&[page(key(0, 3), Parent::Unknown, place(0, 3))]);
    publish_chain(&index, 0, 0, 2);
    let mut orphans = Vec::new();
    assert_eq!(
        index.longest_prefix(NS, &chain(0, 4), lease(0, 1), &mut orphans),
        4
    );
    let pair = |depth: u32| Adoption {
        namespace: NS,
        child: key(0, depth).prefix(),
        parent: key(0, depth - 1).prefix(),
    };
    assert_eq!(orphans, [pair(2), pair(3)]);
    assert_eq!(index.adopt(&orphans), 2);
    assert_eq!(index.adopt(&orphans), 0);
    index.check_invariants().unwrap();
    orphans.clear();
    index.contains(NS, &chain(0, 4), lease(0, 1), &mut orphans);
    assert_eq!(orphans, []);
}

/// Each page has to be linked to its ancestor: with a walk to the head of the chain for each this
/// would take minutes.
#[test]
fn many_runs_of_one_chain_are_linked_in_time_that_grows_with_their_number() {
    const PAGES: u32 = 1 << 18;
    let index = Index::new(1, AMPLE_BLOCKS);
    for depth in (0..PAGES).step_by(2) {
        let first = page(key(0, depth), Parent::Unknown, place(0, depth));
        let second = page(key(0, depth + 1), after(key(0, depth)), place(0, depth + 1));
        index.publish(&[first, second]);
    }
    let mut orphans = Vec::new();
    index.longest_prefix(NS, &chain(0, PAGES), lease(0, 1), &mut orphans);
    assert_eq!(index.adopt(&orphans), PAGES as usize / 2 - 1);
    index.check_invariants().unwrap();
}

/// A head that came last, over a long chain: whether the link closes a circle takes a walk along
/// all of it.
#[test]
fn links_that_take_too_many_steps_are_left_for_later() {
    let index = Index::new(4, AMPLE_BLOCKS);
    publish_chain(&index, 0, 0, 100);
    index.publish(&[page(key(2, 0), Parent::Unknown, place(2, 0))]);
    index.publish(&[page(key(2, 1), after(key(2, 0)), place(2, 1))]);
    let pair = |chain, depth| Adoption {
        namespace: NS,
        child: key(2, 0).prefix(),
        parent: key(chain, depth).prefix(),
    };
    let mut steps = 100;
    assert_eq!(index.adopt_within(&[pair(0, 99); 3], &mut steps), 1);
    assert_eq!(steps, 0, "a step for each page up to the head, and past it");
    index.check_invariants().unwrap();

    let index = Index::new(4, AMPLE_BLOCKS);
    publish_chain(&index, 0, 0, 100);
    index.publish(&[page(key(2, 0), Parent::Unknown, place(2, 0))]);
    index.publish(&[page(key(2, 1), after(key(2, 0)), place(2, 1))]);
    let mut steps = 99;
    assert_eq!(index.adopt_within(&[pair(0, 99); 3], &mut steps), 0);
    assert_eq!(steps, 0);
    assert_eq!(index.adopt(&[pair(0, 99)]), 1);
    index.check_invariants().unwrap();
}

#[test]
fn a_namespace_that_is_removed_step_by_step_is_gone_after_the_last() {
    let index = Index::new(1, AMPLE_BLOCKS);
    for number in 0..100 {
        publish_chain(&index, number, 0, 100);
    }
    let (mut gone, mut steps, mut next) = (0, 0, Some(0));
    while let Some(from) = next {
        next = index.remove_some_of(NS, from, |_| gone += 1);
        steps += 1;
        index.check_invariants().unwrap();
    }
    assert_eq!((gone, index.len()), (10_000, 0));
    assert!(steps > 1);
}

#[test]
fn an_orphan_at_the_seam_of_two_holds_is_reported() {
    let index = Index::new(1, AMPLE_BLOCKS);
    for depth in 0..300 {
        index.publish(&[page(key(0, depth), Parent::Unknown, place(0, depth))]);
    }
    let mut orphans = Vec::new();
    index.longest_prefix(NS, &chain(0, 300), lease(0, 1), &mut orphans);
    assert_eq!(orphans.len(), 299);
    assert_eq!(index.adopt(&orphans), 299);
    index.check_invariants().unwrap();
}

#[test]
fn pages_loaded_in_any_order_are_linked_to_their_parents_and_to_no_descendant() {
    const PAGES: u32 = 900;
    // A step that shares no factor with the count visits every page once.
    for step in [1, PAGES - 1, 7, 259, 641] {
        let index = Index::new(1, AMPLE_BLOCKS);
        let mut pages: Vec<Publish> = (0..PAGES)
            .map(|at| {
                let depth = at * step % PAGES;
                let parent = depth.checked_sub(1);
                let parent = parent.map_or(Parent::Head, |up| after(key(0, up)));
                page(key(0, depth), parent, place(0, depth))
            })
            .collect();
        // And a circle, in which one link must stay open.
        pages.extend((0..5).map(|at| {
            let parent = after(key(1, (at + 1) % 5));
            page(key(1, at), parent, place(0, PAGES + at))
        }));
        index.load(&pages);
        index.check_invariants().unwrap();
        let mut orphans = 0;
        index.each(|page| orphans += u32::from(page.orphan));
        assert_eq!(orphans, 1, "step {step}");
        let evicted = evict_all(&index, 0);
        assert_eq!(evicted.len(), pages.len());
        let of_chain = |key: &&KeyPrefix| key.as_bytes()[0] == 0;
        let mut expected = prefixes(&chain(0, PAGES));
        expected.reverse();
        let chain: Vec<KeyPrefix> = evicted.iter().filter(of_chain).copied().collect();
        assert_eq!(chain, expected, "step {step}");
    }
}

#[test]
fn no_page_becomes_its_own_ancestor() {
    let index = Index::new(1, AMPLE_BLOCKS);
    let pages: Vec<Publish> = (0..4)
        .map(|depth| page(key(0, depth), Parent::Unknown, place(0, depth)))
        .collect();
    index.publish(&pages);
    let pair = |child, parent| Adoption {
        namespace: NS,
        child: key(0, child).prefix(),
        parent: key(0, parent).prefix(),
    };
    assert_eq!(index.adopt(&[pair(0, 0)]), 0);
    assert_eq!(index.adopt(&[pair(1, 0), pair(2, 1), pair(3, 2)]), 3);
    assert_eq!(index.adopt(&[pair(0, 3), pair(0, 1)]), 0);
    let with_parent = |depth, parent| page(key(0, depth), after(key(0, parent)), place(0, depth));
    index.publish(&[with_parent(0, 3)]);
    index.remove(NS, key(0, 1).prefix()).unwrap();
    index.publish(&[with_parent(1, 3)]);
    index.check_invariants().unwrap();
    assert_eq!(evict_all(&index, 0).len(), 4);
}

#[test]
fn a_leased_page_is_not_evicted_until_the_lease_lapses() {
    let index = Index::new(1, AMPLE_BLOCKS);
    publish_chain(&index, 0, 0, 2);
    publish_chain(&index, 1, 0, 2);
    index.longest_prefix(NS, &chain(0, 2), lease(100, 50), &mut Vec::new());
    assert!(live(&index, key(0, 0), 149).unwrap().leased);
    assert_eq!(evict_all(&index, 149), prefixes(&[key(1, 1), key(1, 0)]));
    let gone = index.evict_chain(NS, key(0, 1).prefix(), place(0, 1), 149, |_, _, _| false);
    assert_eq!(gone, []);
    assert_eq!(index.evict_coldest(149, |_, _| false, |_| false), None);
    index.check_invariants().unwrap();
    assert!(!live(&index, key(0, 0), 150).unwrap().leased);
    assert_eq!(evict_all(&index, 150), prefixes(&[key(0, 1), key(0, 0)]));
    index.check_invariants().unwrap();
}

#[test]
fn a_lease_ends_with_the_read_it_was_for() {
    let index = Index::new(1, AMPLE_BLOCKS);
    for number in 0..3 {
        publish_chain(&index, number, 0, 1);
        index.contains(NS, &chain(number, 1), lease(0, 1000), &mut Vec::new());
    }
    assert_eq!(index.evict_coldest(0, |_, _| false, |_| false), None);
    index.pin(NS, &chain(1, 1), ReadAs::Use);
    assert_eq!(
        index
            .evict_coldest(0, |_, _| false, |_| false)
            .map(|page| page.key),
        Some(key(1, 0).prefix())
    );
    index.touch(NS, &chain(0, 1));
    assert_eq!(
        index
            .evict_coldest(0, |_, _| false, |_| false)
            .map(|page| page.key),
        Some(key(0, 0).prefix())
    );
    assert_eq!(index.evict_coldest(0, |_, _| false, |_| false), None);
    index.check_invariants().unwrap();
}

#[test]
fn leases_cover_a_quarter_of_the_capacity_and_the_oldest_lapses_first() {
    let index = Index::new(1, 400);
    for number in 0..4 {
        publish_chain(&index, number, 0, 10);
    }
    let terms = Lease {
        blocks_per_page: 4,
        ..lease(0, 1000)
    };
    let is_leased = |number| live(&index, key(number, 0), 0).unwrap().leased;
    for number in 0..2 {
        index.longest_prefix(NS, &chain(number, 10), terms, &mut Vec::new());
    }
    assert_eq!([0, 1].map(is_leased), [true, true]);
    index.longest_prefix(NS, &chain(2, 10), terms, &mut Vec::new());
    assert_eq!([0, 1, 2].map(is_leased), [false, true, true]);
    // Looking at the same pages again takes no second share, and a read gives its share back.
    index.longest_prefix(NS, &chain(2, 10), terms, &mut Vec::new());
    assert_eq!([1, 2].map(is_leased), [true, true]);
    index.pin(NS, &chain(1, 10), ReadAs::Use);
    index.longest_prefix(NS, &chain(3, 10), terms, &mut Vec::new());
    assert_eq!([1, 2, 3].map(is_leased), [false, true, true]);
    index.check_invariants().unwrap();
}

#[test]
fn one_lookup_leases_no_more_than_the_quarter_and_the_head_of_its_chain_first() {
    let index = Index::new(1, 40);
    publish_chain(&index, 0, 0, 600);
    assert_eq!(
        index.longest_prefix(NS, &chain(0, 600), lease(0, 1000), &mut Vec::new()),
        600
    );
    let leased: Vec<bool> = (0..600)
        .map(|depth| live(&index, key(0, depth), 0).unwrap().leased)
        .collect();
    let expected: Vec<bool> = (0..600).map(|depth| depth < 10).collect();
    assert_eq!(leased, expected);
    assert_eq!(evict_all(&index, 0).len(), 590);
    index.check_invariants().unwrap();
}

#[test]
fn a_lookup_that_finds_nothing_keeps_no_lease_of_others_standing() {
    let index = Index::new(1, AMPLE_BLOCKS);
    publish_chain(&index, 0, 0, 1);
    index.longest_prefix(NS, &chain(9, 5), lease(0, 1_000_000), &mut Vec::new());
    index.longest_prefix(NS, &chain(0, 1), lease(0, 10), &mut Vec::new());
    assert!(index.evict_coldest(9, |_, _| false, |_| false).is_none());
    assert!(index.evict_coldest(10, |_, _| false, |_| false).is_some());
}

#[test]
fn a_namespace_is_removed_whole_and_alone() {
    let index = Index::new(1, AMPLE_BLOCKS);
    let other = NamespaceSlot(4);
    publish_chain(&index, 0, 0, 700);
    let twin = Publish {
        namespace: other,
        ..page(key(0, 0), Parent::Head, place(0, 5000))
    };
    index.publish(&[twin]);
    let mut gone = BTreeSet::new();
    // The callback for each page may itself look into the index.
    index.remove_namespace(NS, |page| {
        assert!(index.locate(other, &key(0, 0)).is_some());
        assert!(gone.insert(page.place));
    });
    assert_eq!(gone, (0..700).map(|depth| place(0, depth)).collect());
    assert_eq!(index.len(), 1);
    index.check_invariants().unwrap();
    publish_chain(&index, 0, 0, 700);
    index.check_invariants().unwrap();
}

#[test]
fn a_segment_is_forgotten_whole_and_alone() {
    let index = Index::new(2, AMPLE_BLOCKS);
    publish_chain(&index, 0, 0, 20);
    for depth in [4, 9, 19] {
        index.relocate(NS, key(0, depth).prefix(), place(0, depth), place(1, depth));
    }
    let mut gone = Vec::new();
    index.forget_segment(SegmentId(1), |page| gone.push(page.key));
    assert_eq!(gone, prefixes(&[key(0, 4), key(0, 9), key(0, 19)]));
    assert_eq!(index.len(), 17);
    index.check_invariants().unwrap();
    let mut seen = 0;
    index.each(|page| {
        assert_eq!(page.place.segment, SegmentId(0));
        seen += 1;
    });
    assert_eq!(seen, 17);
}

#[test]
fn a_parent_of_three_hundred_thousand_children_is_dismantled_child_by_child() {
    const CHILDREN: u32 = 300_000;
    let index = Index::new(1, AMPLE_BLOCKS);
    publish_chain(&index, 0, 0, 1);
    let children: Vec<Publish> = (0..CHILDREN)
        .map(|child| page(key(1, child), after(key(0, 0)), place(0, child)))
        .collect();
    index.publish(&children);
    assert_eq!(live(&index, key(0, 0), 0).unwrap().children, CHILDREN);
    let evicted = evict_all(&index, 0);
    assert_eq!(evicted.len(), CHILDREN as usize + 1);
    assert_eq!(evicted.last(), Some(&key(0, 0).prefix()));
    index.check_invariants().unwrap();
}

#[test]
fn order_and_leases_outlive_the_lowering_of_all_heats() {
    let index = Index::with_clock(1, AMPLE_BLOCKS, Heat(HEAT_END - 8));
    for number in 0..4 {
        publish_chain(&index, number, 0, 1);
    }
    index.longest_prefix(NS, &chain(1, 1), lease(0, 10), &mut Vec::new());
    for number in 4..40 {
        publish_chain(&index, number, 0, 1);
    }
    assert!(live(&index, key(39, 0), 0).unwrap().heat < Heat(100));
    index.check_invariants().unwrap();
    let mut expected: Vec<PageKey> = (0..40).map(|number| key(number, 0)).collect();
    expected.remove(1);
    assert_eq!(evict_all(&index, 0), prefixes(&expected));
    assert_eq!(evict_all(&index, 10), prefixes(&[key(1, 0)]));
}

//! What a store knows of its pages after a restart.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/policies.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod toys;

use common::{Home, MIB, Pool, chain};
use larder_core::index::{Index, NamespaceSlot, Parent, Place, Publish, SegmentId, Told};
use larder_core::policy::make;
use larder_engine::format::{KeyPrefix, PageKey};
use larder_engine::{Hint, OpenOptions, PageStore, policy};
use toys::{LESSONS, Pupil, note};

const NS: NamespaceSlot = NamespaceSlot(0);

/// An index under the learned policy of a large store, which recalls this.
fn index((lessons, notes): (Vec<u8>, Vec<u128>)) -> Index {
    let index = Index::new(1, 1 << 20);
    let mut policy = make(&policy::learned());
    policy.opened(1000);
    policy.recall(&lessons, notes);
    index.choose(policy);
    index
}

fn page(keys: &[PageKey], at: usize) -> Publish {
    let parent = at.checked_sub(1).map(|before| keys[before].prefix());
    Publish {
        namespace: NS,
        key: keys[at].prefix(),
        parent: parent.map_or(Parent::Head, Parent::Key),
        place: Place {
            segment: SegmentId(0),
            start: 2,
            saved: 0,
        },
        proof: 1.into(),
        unproven: false,
        told: Told {
            depth: u32::try_from(at).unwrap(),
            blocks: 16,
            ..Told::default()
        },
    }
}

fn order(index: &Index) -> Vec<KeyPrefix> {
    let evict = || index.evict_coldest(1 << 20, |_, _| false, |_| false);
    let gone = std::iter::from_fn(evict);
    let order = gone.map(|page| page.key).collect();
    index.check_invariants().unwrap();
    order
}

/// Chains that were put one after the other, and then used in another order, a second apart.
fn used(index: &Index) -> Vec<Vec<PageKey>> {
    let chains: Vec<_> = (0..200).map(|at| chain(at, 3)).collect();
    for keys in &chains {
        index.publish(&[page(keys, 0), page(keys, 1), page(keys, 2)]);
    }
    for at in 0..200 {
        let now_ms = 1000 * (at as u64 + 1);
        index.touch_as(NS, &chains[at * 77 % 200], Hint::default(), now_ms);
    }
    chains
}

#[test]
fn pages_go_in_the_same_order_after_a_restart() {
    let before = index(Default::default());
    let chains = used(&before);
    let (lessons, mut notes) = before.lessons(1 << 20);
    notes.sort_unstable();
    assert_eq!(notes.len(), 600);
    let after = index((lessons.clone(), notes));
    let anew = index((lessons, Vec::new()));
    // The tails come first: their parents are linked later.
    let pages = (0..3)
        .rev()
        .flat_map(|at| chains.iter().map(move |keys| page(keys, at)));
    let pages: Vec<Publish> = pages.collect();
    after.load(&pages);
    anew.load(&pages);
    let expected = order(&before);
    assert_eq!(order(&after), expected);
    assert_ne!(order(&anew), expected);
}

#[test]
fn a_page_that_came_after_the_save_is_younger_than_those_of_the_save() {
    let before = index(Default::default());
    let chains = used(&before);
    let (lessons, mut notes) = before.lessons(1 << 20);
    notes.sort_unstable();
    let after = index((lessons, notes));
    let young = chain(1000, 2);
    let old = chains
        .iter()
        .flat_map(|keys| (0..3).map(|at| page(keys, at)));
    let pages = [page(&young, 0), page(&young, 1)].into_iter().chain(old);
    after.load(&pages.collect::<Vec<Publish>>());
    let order = order(&after);
    assert_eq!(order[600..], [young[1].prefix(), young[0].prefix()]);
}

#[test]
fn a_file_has_notes_of_the_last_run_alone() {
    let (options, recalled) = Pupil::options();
    let home = Home::with_store(128 * MIB);
    let given = || recalled.lock().unwrap().pop().unwrap();
    let store = home.open_with(options.clone());
    let pool = Pool::new(&store, "m", &[65536]);
    let keys = chain(1, 5);
    pool.put(&keys);
    store.close().unwrap();
    given();
    home.open_with(options.clone()).close().unwrap();
    let mut notes: Vec<u128> = keys.iter().map(|key| note(key.prefix())).collect();
    notes.sort_unstable();
    assert_eq!(given(), (LESSONS.to_vec(), notes));
    home.open_with(OpenOptions::default()).close().unwrap();
    home.open_with(options).close().unwrap();
    assert_eq!(given(), (LESSONS.to_vec(), Vec::new()));
}

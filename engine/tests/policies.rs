//! The seams for policies: toy policies of eviction and admission in a store and in the index.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/policies.rs"]
mod toys;

use std::os::unix::fs::PermissionsExt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Home, MIB, Pool, chain};
use larder_core::index::{
    Adoption, Index, Lease, NamespaceSlot, Parent, Place, Publish, ReadAs, SegmentId,
};
use larder_core::policy::order::EvictionOrder;
use larder_engine::format::PageKey;
use larder_engine::policy::{
    AdmissionPolicy, Candidate, Departure, EvictionPolicy, PageFacts, PageNumber, PolicyMaker, Use,
    Worth,
};
use larder_engine::{
    Class, GetStatus, Hint, OpenOptions, PageStore, Part, PutOptions, PutStatus, Refusal, Store,
    policy,
};
use larder_store::api::speaking;
use larder_store::protocol::Protocol;
use larder_store::share::Inside;
use rustix::fs::{CWD, FileType, Mode};
use toys::{Fifo, LESSONS, Pupil, Random};

const NS: NamespaceSlot = NamespaceSlot(0);

fn evicting<P: EvictionPolicy + 'static>(make: fn() -> P) -> OpenOptions {
    OpenOptions::default().with(|o| o.eviction = Some(PolicyMaker::eviction(make)))
}

fn admitting<P: AdmissionPolicy + 'static>(make: fn() -> P) -> OpenOptions {
    OpenOptions::default().with(|o| o.admission = Some(PolicyMaker::admission(make)))
}

/// The pages of a chain.
fn pages(keys: &[PageKey], hint: Hint) -> Vec<Publish> {
    let page = |(at, key): (usize, &PageKey)| Publish {
        namespace: NS,
        key: key.prefix(),
        parent: at
            .checked_sub(1)
            .map_or(Parent::Head, |before| Parent::Key(keys[before].prefix())),
        place: Place {
            segment: SegmentId(0),
            start: 2 + u32::try_from(at).unwrap(),
            saved: 0,
        },
        proof: 1.into(),
        unproven: false,
        told: larder_core::index::Told {
            depth: u32::try_from(at).unwrap(),
            blocks: 16,
            hint,
            new_pages: None,
        },
    };
    keys.iter().enumerate().map(page).collect()
}

/// Publishes the pages of a chain, one call each.
fn publish(index: &Index, keys: &[PageKey], hint: Hint) {
    for page in pages(keys, hint) {
        index.publish(&[page]);
    }
}

fn choose<P: EvictionPolicy + 'static>(
    index: &Index,
    make: impl Fn() -> P + Send + Sync + 'static,
) {
    index.choose(larder_core::policy::make(&PolicyMaker::eviction(make)));
}

fn evict(index: &Index, now_ms: u64) -> Option<larder_engine::format::KeyPrefix> {
    let gone = index.evict_coldest(now_ms, |_, _| false, |_| false);
    index.check_invariants().unwrap();
    gone.map(|page| page.key)
}

#[test]
fn first_in_first_out_ignores_uses_and_takes_leaves_only() {
    let index = Index::new(1, 1 << 20);
    choose(&index, Fifo::default);
    let (old, young) = (chain(1, 2), chain(2, 2));
    publish(&index, &old, Hint::default());
    publish(&index, &young, Hint::default());
    for _ in 0..3 {
        index.touch(NS, &old);
    }
    let order: Vec<_> = std::iter::from_fn(|| evict(&index, 0)).collect();
    // The heads arrived before the tails, but a page with a child stays.
    let expected = [old[1], old[0], young[1], young[0]].map(|key| key.prefix());
    assert_eq!(order, expected);
}

#[test]
fn row_26_a_leased_page_stays_under_any_policy_until_its_lease_lapses() {
    let index = Index::new(1, 1 << 20);
    choose(&index, Fifo::default);
    let keys = [chain(1, 1), chain(2, 1), chain(3, 1)].concat();
    for key in &keys {
        publish(&index, std::slice::from_ref(key), Hint::default());
    }
    let lease = Lease {
        now_ms: 0,
        duration_ms: 1000,
        blocks_per_page: 16,
    };
    assert_eq!(
        index.longest_prefix(NS, &keys[..1], lease, &mut Vec::new()),
        1
    );
    assert_eq!(evict(&index, 10), Some(keys[1].prefix()));
    // The lease has lapsed: the oldest page goes before a younger one.
    assert_eq!(evict(&index, 2000), Some(keys[0].prefix()));
    assert_eq!(evict(&index, 2000), Some(keys[2].prefix()));
    assert_eq!(evict(&index, 2000), None);
}

/// Keeps the facts of the pages that it is asked about.
#[derive(Debug)]
struct Recorder(Arc<Mutex<Vec<PageFacts>>>, Vec<PageNumber>);

impl EvictionPolicy for Recorder {
    fn file(&mut self, page: PageNumber, _: &PageFacts) {
        self.1.push(page);
    }

    fn coldest(
        &mut self,
        facts: &mut dyn FnMut(PageNumber) -> Option<PageFacts>,
    ) -> Option<PageNumber> {
        let page = self.1.pop()?;
        self.0.lock().unwrap().extend(facts(page));
        Some(page)
    }

    fn worth(&self, _: PageNumber, facts: &PageFacts) -> Worth {
        Worth(facts.hits)
    }
}

#[test]
fn a_policy_sees_depth_hits_ages_hint_and_bytes() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let index = Index::new(1, 1 << 20);
    let told = seen.clone();
    choose(&index, move || Recorder(told.clone(), Vec::new()));
    let keys = chain(1, 3);
    let system = Hint::new(Class::SYSTEM);
    publish(&index, &keys, system);
    let now = |now_ms| Lease {
        now_ms,
        duration_ms: 0,
        blocks_per_page: 16,
    };
    index.longest_prefix(NS, &keys, now(10_000), &mut Vec::new());
    index.touch(NS, &keys);
    for _ in 0..2 {
        index.pin(NS, &keys[2..], ReadAs::Use);
        index.unpin(SegmentId(0));
    }
    let tool = Hint::new(Class::TOOL).priority(3);
    index.touch_as(NS, &keys[2..], tool, 10_000);
    let other = chain(2, 1);
    publish(&index, &other, Hint::default());
    index.remove(NS, other[0].prefix());
    assert_eq!(evict(&index, 70_000), Some(keys[2].prefix()));
    let facts = seen.lock().unwrap().pop().unwrap();
    assert_eq!((facts.depth, facts.children, facts.hits), (2, 0, 4));
    assert_eq!((facts.bytes, facts.hint), (16 * 4096, tool));
    assert_eq!(facts.key, keys[2].prefix());
    assert_eq!((facts.idle_calls, facts.idle), (2, Duration::from_secs(60)));
    assert_eq!(evict(&index, 70_000), Some(keys[1].prefix()));
    let facts = seen.lock().unwrap().pop().unwrap();
    assert_eq!((facts.depth, facts.hits, facts.hint), (1, 1, system));
}

/// Returns each page twice.
#[derive(Debug, Default)]
struct Liar(Vec<PageNumber>);

impl EvictionPolicy for Liar {
    fn file(&mut self, page: PageNumber, _: &PageFacts) {
        self.0.extend([page, page]);
    }

    fn coldest(
        &mut self,
        _: &mut dyn FnMut(PageNumber) -> Option<PageFacts>,
    ) -> Option<PageNumber> {
        self.0.pop()
    }

    fn worth(&self, _: PageNumber, _: &PageFacts) -> Worth {
        Worth(0)
    }
}

#[test]
fn a_policy_that_returns_a_page_twice_evicts_it_once() {
    let index = Index::new(1, 1 << 20);
    choose(&index, Liar::default);
    let keys = chain(1, 8);
    publish(&index, &keys, Hint::default());
    let order: Vec<_> = std::iter::from_fn(|| evict(&index, 0)).collect();
    let expected: Vec<_> = keys.iter().rev().map(PageKey::prefix).collect();
    assert_eq!(order, expected);
    assert!(index.is_empty());
}

/// Returns the page that was filed first, and never forgets it.
#[derive(Debug, Default)]
struct Stubborn(Vec<PageNumber>);

impl EvictionPolicy for Stubborn {
    fn file(&mut self, page: PageNumber, _: &PageFacts) {
        self.0.push(page);
    }

    fn coldest(
        &mut self,
        _: &mut dyn FnMut(PageNumber) -> Option<PageFacts>,
    ) -> Option<PageNumber> {
        self.0.first().copied()
    }

    fn worth(&self, _: PageNumber, _: &PageFacts) -> Worth {
        Worth(0)
    }
}

#[test]
fn a_policy_that_never_forgets_a_page_cannot_hold_the_store_up() {
    for is_parked in [false, true] {
        let index = Index::new(1, 1 << 20);
        choose(&index, Stubborn::default);
        publish(&index, &chain(1, 1), Hint::default());
        publish(&index, &chain(2, 1), Hint::default());
        // The page has to stay, or its volume does: it is passed over, once.
        let gone = index.evict_coldest(0, |_, _| !is_parked, |_| is_parked);
        assert_eq!(gone.map(|page| page.key), None);
        index.check_invariants().unwrap();
    }
}

/// Knows for each page the child that came last. Its answers about other children are wrong.
#[derive(Debug, Default)]
struct Genealogist(std::collections::HashMap<PageNumber, PageNumber>);

impl EvictionPolicy for Genealogist {
    fn arrived(&mut self, page: PageNumber, facts: &PageFacts) {
        self.0.extend(facts.parent.map(|parent| (parent, page)));
    }

    fn file(&mut self, _: PageNumber, _: &PageFacts) {}

    fn coldest(
        &mut self,
        _: &mut dyn FnMut(PageNumber) -> Option<PageFacts>,
    ) -> Option<PageNumber> {
        None
    }

    fn worth(&self, _: PageNumber, _: &PageFacts) -> Worth {
        Worth(0)
    }
}

impl EvictionOrder for Genealogist {
    fn linked(&mut self, page: PageNumber, facts: &PageFacts) {
        self.arrived(page, facts);
    }

    fn child(&self, page: PageNumber) -> Option<PageNumber> {
        Some(self.0.get(&page).copied().unwrap_or(page))
    }
}

#[test]
fn a_chain_leaves_as_a_whole_the_deepest_page_first_or_not_at_all() {
    let index = Index::new(1, 1 << 20);
    index.choose(Box::<Genealogist>::default());
    let keys = chain(1, 4);
    publish(&index, &keys, Hint::default());
    let place = |at: u32| Place {
        segment: SegmentId(0),
        start: 2 + at,
        saved: 0,
    };
    let evict = |at: usize, now_ms, stays: Option<usize>| -> Vec<_> {
        let stays = stays.map(|at: usize| keys[at].prefix());
        let (key, place) = (keys[at].prefix(), place(at as u32));
        let stays = |_, key, _| Some(key) == stays;
        let gone = index.evict_chain(NS, key, place, now_ms, stays);
        index.check_invariants().unwrap();
        gone.into_iter().map(|page| page.key).collect()
    };
    // A page below has to stay; so does one under a lease of either kind.
    assert_eq!(evict(1, 0, Some(3)), []);
    let lease = Lease {
        now_ms: 0,
        duration_ms: 1000,
        blocks_per_page: 16,
    };
    index.longest_prefix(NS, &keys, lease, &mut Vec::new());
    assert_eq!(evict(1, 10, None), []);
    index.lease(NS, &keys[2..3], 16);
    assert_eq!(evict(1, 2000, None), []);
    index.unlease(NS, &keys[2..3]);
    let expected = [keys[3], keys[2], keys[1]].map(|key| key.prefix());
    assert_eq!(evict(1, 2000, None), expected);
    // Two children: the policy knows one of them.
    for tail in [chain(2, 1), chain(3, 1)] {
        publish(&index, &[keys[0], tail[0]], Hint::default());
    }
    assert_eq!(evict(0, 2000, None), []);
    assert_eq!(index.len(), 3);
}

#[test]
fn a_policy_knows_the_parent_of_a_page_that_arrived_before_it() {
    let index = Index::new(1, 1 << 20);
    index.choose(Box::<Genealogist>::default());
    let keys = chain(1, 3);
    for page in pages(&keys, Hint::default()).into_iter().rev() {
        index.publish(&[page]);
    }
    let links = [(2, 1), (1, 0)].map(|(child, parent): (usize, usize)| Adoption {
        namespace: NS,
        child: keys[child].prefix(),
        parent: keys[parent].prefix(),
    });
    assert_eq!(index.adopt(&links), 2);
    let head = pages(&keys, Hint::default())[0].place;
    let gone = index.evict_chain(NS, keys[0].prefix(), head, 0, |_, _, _| false);
    let gone: Vec<_> = gone.into_iter().map(|page| page.key).collect();
    assert_eq!(gone, [keys[2], keys[1], keys[0]].map(|key| key.prefix()));
}

/// Evicts the page that was filed last. Panics when it is given a page that it holds.
#[derive(Debug, Default)]
struct Strict(Vec<PageNumber>);

impl EvictionPolicy for Strict {
    fn left(&mut self, page: PageNumber, _: &PageFacts, _: Departure) {
        self.0.retain(|held| *held != page);
    }

    fn file(&mut self, page: PageNumber, _: &PageFacts) {
        assert!(!self.0.contains(&page), "{page:?} is filed twice");
        self.0.push(page);
    }

    fn coldest(
        &mut self,
        facts: &mut dyn FnMut(PageNumber) -> Option<PageFacts>,
    ) -> Option<PageNumber> {
        std::iter::from_fn(|| self.0.pop()).find(|page| facts(*page).is_some())
    }

    fn worth(&self, _: PageNumber, _: &PageFacts) -> Worth {
        Worth(0)
    }
}

#[test]
fn a_page_in_the_slot_of_one_that_was_set_aside_is_filed_once_and_evicted_once() {
    let index = Index::new(1, 1 << 20);
    choose(&index, Strict::default);
    let (leased, next) = (chain(1, 1), chain(2, 1));
    publish(&index, &leased, Hint::default());
    let lease = Lease {
        now_ms: 0,
        duration_ms: 1000,
        blocks_per_page: 16,
    };
    index.longest_prefix(NS, &leased, lease, &mut Vec::new());
    assert_eq!(evict(&index, 0), None);
    index.remove(NS, leased[0].prefix());
    publish(&index, &next, Hint::default());
    assert_eq!(evict(&index, 2000), Some(next[0].prefix()));
    assert_eq!(evict(&index, 2000), None);
}

#[test]
fn a_policy_knows_all_uses_before_reclaim_weighs_a_page() {
    let index = Index::new(1, 1 << 20);
    choose(&index, || Recorder(Arc::default(), Vec::new()));
    let keys = chain(1, 1);
    publish(&index, &keys, Hint::default());
    let place = index.locate(NS, &keys[0]).unwrap().place;
    for uses in 1..4 {
        index.touch(NS, &keys);
        let page = index.live(NS, keys[0].prefix(), place, 0).unwrap();
        assert_eq!(page.worth, Worth(uses));
    }
}

/// Fills a store three times over and reads everything back.
fn overfill(options: &OpenOptions) -> Home {
    let home = Home::with_store(128 * MIB);
    let wait = PutOptions::waiting(Duration::from_secs(120));
    let chains: Vec<_> = (0..64).map(|seed| chain(seed, 12)).collect();
    for _ in 0..2 {
        let store = home.open_with(options.clone());
        let pool = Pool::new(&store, "m", &[1 << 18]);
        for (at, keys) in chains.iter().enumerate() {
            let statuses = pool.put_from(keys, 0, wait);
            assert!(
                statuses.iter().all(|status| status.is_present()),
                "{statuses:?}"
            );
            pool.hits(&chains[at / 2]);
        }
        let stats = store.stats();
        assert!(stats.evicted > 0 && stats.reclaimed > 0, "{stats:?}");
        store.local().unwrap().check_invariants().unwrap();
        // Every page that is found is whole, and its ancestors are there.
        let before = store.stats().pages;
        let mut found = 0;
        for keys in &chains {
            let stored = store.longest_prefix(pool.id, keys);
            assert_eq!(
                pool.get(keys)
                    .iter()
                    .filter(|s| **s == GetStatus::Hit)
                    .count(),
                stored
            );
            found += stored as u64;
        }
        // Reclaim may evict some meanwhile.
        let after = store.stats().pages;
        assert!(
            (after..=before).contains(&found),
            "{after} {found} {before}"
        );
        store.close().unwrap();
    }
    home
}

#[test]
fn an_overfilled_store_holds_its_promises_under_first_in_first_out() {
    overfill(&evicting(Fifo::default));
}

#[test]
fn an_overfilled_store_holds_its_promises_under_a_random_order() {
    overfill(&evicting(|| Random::new(7)));
}

#[test]
fn an_overfilled_store_holds_its_promises_under_the_learned_order() {
    let options = OpenOptions::default().with(|o| o.eviction = Some(policy::learned()));
    let home = overfill(&options);
    // It is too small for the learned order, and so for its costs.
    assert!(!home.path.with_file_name("store.lessons").exists());
}

#[test]
fn the_learned_policy_leaves_a_store_of_few_segments_to_lru() {
    let mut policy = larder_core::policy::make(&policy::learned());
    assert!(policy.opened(159).is_some() && policy.opened(160).is_none());
}

#[test]
fn the_lessons_of_a_policy_come_back_unless_their_file_is_damaged_or_another_stores() {
    let (options, recalled) = Pupil::options();
    let (home, other) = (Home::with_store(128 * MIB), Home::with_store(128 * MIB));
    let open = |home: &Home| {
        home.open_with(options.clone()).close().unwrap();
        recalled.lock().unwrap().pop().unwrap().0
    };
    let file = |home: &Home| home.path.with_file_name("store.lessons");
    assert!(open(&home).is_empty());
    assert_eq!(open(&home), LESSONS);
    let whole = std::fs::read(file(&home)).unwrap();
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 4;
        std::fs::write(file(&home), damaged).unwrap();
        assert!(open(&home).is_empty(), "byte {at}");
    }
    std::fs::write(file(&home), vec![0; 2 << 20]).unwrap();
    assert!(open(&home).is_empty());
    assert_eq!(open(&home), LESSONS);
    std::fs::copy(file(&home), file(&other)).unwrap();
    assert!(open(&other).is_empty());
    assert_eq!(open(&other), LESSONS);
}

#[test]
fn lessons_are_for_the_users_of_the_store_and_follow_neither_links_nor_pipes() {
    let (options, recalled) = Pupil::options();
    let home = Home::with_store(128 * MIB);
    let open = || {
        home.open_with(options.clone()).close().unwrap();
        recalled.lock().unwrap().pop().unwrap().0
    };
    let beside = |suffix: &str| home.path.with_file_name(format!("store{suffix}"));
    let rights = |mode| std::fs::Permissions::from_mode(mode);
    std::fs::set_permissions(&home.path, rights(0o660)).unwrap();
    let other = beside(".other");
    std::fs::write(&other, "of another").unwrap();
    // A file that a killed process has left, or a link of another user.
    std::os::unix::fs::symlink(&other, beside(".lessons.new")).unwrap();
    assert!(open().is_empty());
    assert_eq!(open(), LESSONS);
    assert_eq!(std::fs::read(&other).unwrap(), b"of another");
    let mode = std::fs::metadata(beside(".lessons")).unwrap().permissions();
    assert_eq!(mode.mode() & 0o777, 0o660);
    std::fs::rename(beside(".lessons"), &other).unwrap();
    std::os::unix::fs::symlink(&other, beside(".lessons")).unwrap();
    assert!(open().is_empty());
    std::fs::remove_file(beside(".lessons")).unwrap();
    let pipe = beside(".lessons");
    rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    assert!(open().is_empty());
    assert_eq!(open(), LESSONS);
}

/// Takes the first pages of each chain, and no page behind them.
#[derive(Debug)]
struct Heads(u32);

impl AdmissionPolicy for Heads {
    fn admits(&mut self, page: &Candidate) -> bool {
        assert!(page.bytes == 65536 && page.taken_bytes <= page.usable_bytes);
        page.depth < self.0
    }
}

#[test]
fn row_26_pages_that_are_not_admitted_are_refused_with_all_behind_them() {
    let home = Home::with_store(128 * MIB);
    let store = home.open_with(admitting(|| Heads(3)));
    let pool = Pool::new(&store, "m", &[65536]);
    let keys = chain(1, 5);
    let refused = PutStatus::Refused(Refusal::NotAdmitted);
    let stored = PutStatus::Stored;
    assert_eq!(pool.put(&keys), [stored, stored, stored, refused, refused]);
    assert_eq!(store.longest_prefix(pool.id, &keys), 3);
    let again = PutStatus::Duplicate;
    assert_eq!(pool.put(&keys), [again, again, again, refused, refused]);
    // A page that is stored already needs no admission.
    let all = home_with_all(&keys);
    assert!(all.iter().all(|status| *status == PutStatus::Duplicate));
    assert_eq!(store.stats().refused, 4);
}

/// Stores a chain without a policy, opens the store with one, and puts the chain again.
fn home_with_all(keys: &[PageKey]) -> Vec<PutStatus> {
    let home = Home::with_store(128 * MIB);
    let store = home.open();
    Pool::new(&store, "m", &[65536]).put(keys);
    store.close().unwrap();
    drop(store);
    let store = home.open_with(admitting(|| Heads(0)));
    Pool::new(&store, "m", &[65536]).put(keys)
}

/// The calls that the policies of a store received.
type Told = Arc<Mutex<Vec<Hint>>>;

/// First in, first out; records the hints of touched pages.
#[derive(Debug)]
struct Touches(Told, Fifo);

impl EvictionPolicy for Touches {
    fn arrived(&mut self, page: PageNumber, facts: &PageFacts) {
        self.1.arrived(page, facts);
    }

    fn used(&mut self, _: PageNumber, facts: &PageFacts, by: Use) {
        if by == Use::Touch {
            self.0.lock().unwrap().push(facts.hint);
        }
    }

    fn left(&mut self, page: PageNumber, facts: &PageFacts, why: Departure) {
        self.1.left(page, facts, why);
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

/// Takes the first three pages of each chain; records the hints of all.
#[derive(Debug)]
struct Candidates(Told);

impl AdmissionPolicy for Candidates {
    fn admits(&mut self, page: &Candidate) -> bool {
        self.0.lock().unwrap().push(page.hint);
        page.depth < 3
    }
}

/// Options of an owner whose policies record hints: those of puts, and those of touches.
fn recording() -> (OpenOptions, Told, Told) {
    let (put, touched) = (Told::default(), Told::default());
    let options = OpenOptions::default().with(|o| {
        let (put, touched) = (put.clone(), touched.clone());
        let admission = move || Candidates(put.clone());
        o.admission = Some(PolicyMaker::admission(admission));
        let eviction = move || Touches(touched.clone(), Fifo::default());
        o.eviction = Some(PolicyMaker::eviction(eviction));
    });
    (options, put, touched)
}

#[test]
fn hints_and_refusals_by_a_policy_reach_callers_and_clients_of_a_release_that_knows_them() {
    let tool = Hint::new(Class::TOOL).priority(2).session(b"agent 7");
    let user = Hint::new(Class::USER);
    let former = Protocol {
        features: 0,
        release: "0.0.9".to_owned(),
        ..Protocol::default()
    };
    let not_admitted = PutStatus::Refused(Refusal::NotAdmitted);
    let unreachable = PutStatus::Refused(Refusal::Unreachable);
    for (client, hints, refused) in [
        (None, [tool, user], not_admitted),
        (Some(Protocol::default()), [tool, user], not_admitted),
        (Some(former), [Hint::default(); 2], unreachable),
    ] {
        let home = Home::with_store(128 * MIB);
        let (options, put, touched) = recording();
        let owner = Store::attach(&home.path, options).unwrap();
        let attach = |protocol| {
            let options = speaking(OpenOptions::default(), protocol);
            Store::attach(&home.path, options).unwrap()
        };
        let client = client.map(attach);
        let caller = client.as_ref().unwrap_or(&owner);
        assert_eq!(client.is_some(), caller.part() == Part::Client);
        let pool = Pool::new(caller, "m", &[65536]);
        let keys = chain(1, 5);
        let stored = PutStatus::Stored;
        let statuses = pool.put_from(&keys, 0, PutOptions::default().hinting(tool));
        assert_eq!(statuses, [stored, stored, stored, refused, refused]);
        // The put ends at the first page that is not admitted.
        assert_eq!(*put.lock().unwrap(), [hints[0]; 4]);
        caller.touch(pool.id, &keys[..1], user);
        caller.touch(pool.id, &keys[1..2], Hint::default());
        // The policy knows it before a page leaves. A put also counts as a use.
        caller.delete(pool.id, &keys[2..3]).unwrap();
        assert_eq!(*touched.lock().unwrap(), [hints[1], hints[0]]);
    }
}

#[test]
fn a_budget_of_writes_refuses_new_pages_alone_also_those_of_clients() {
    let home = Home::with_store(128 * MIB);
    let keys = chain(1, 5);
    let store = home.open();
    Pool::new(&store, "m", &[65536]).put(&keys[..2]);
    store.close().unwrap();
    drop(store);
    let options = OpenOptions::default().with(|o| o.write_budget = "0.001MB/day".parse().unwrap());
    let owner = Store::attach(&home.path, options).unwrap();
    let client = Store::attach(&home.path, OpenOptions::default()).unwrap();
    let (again, refused) = (PutStatus::Duplicate, PutStatus::Refused(Refusal::Budget));
    for caller in [&owner, &client] {
        let statuses = Pool::new(caller, "m", &[65536]).put(&keys);
        assert_eq!(statuses, [again, again, refused, refused, refused]);
    }
    let report = larder_engine::report(&home.path).unwrap();
    assert_eq!(report.totals.store.refused_by_budget, 6);
}

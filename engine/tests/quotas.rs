//! Quotas of namespaces: what eviction leaves to a group, and what it takes from one.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/policies.rs"]
#[allow(dead_code)]
mod policies;

use std::time::{Duration, Instant};

use common::{Home, MIB, Pool, chain, namespace};
use larder_engine::format::{Namespace, PageKey};
use larder_engine::policy::PolicyMaker;
use larder_engine::{OpenOptions, PageStore, PutOptions, PutStatus, Refusal, Store, StoreError};
use larder_store::quotas::{GroupKind, GroupName, QuotaChange, QuotaReport, QuotaSpec};
use larder_store::share::change_quotas;
use policies::Fifo;

const PAGE: u32 = 256 << 10;
const SIZE: u64 = 194 * MIB;

/// Longest wait for pages to expire.
const PATIENCE: Duration = Duration::from_secs(60);

fn model(name: &str) -> GroupName {
    GroupName {
        kind: GroupKind::Model,
        name: name.to_owned(),
    }
}

fn set(
    store: &Store,
    group: GroupName,
    min_bytes: u64,
    max_bytes: Option<u64>,
) -> Result<QuotaReport, StoreError> {
    let change = QuotaChange::Set(QuotaSpec {
        group,
        min_bytes,
        max_bytes,
        max_age_s: None,
    });
    change_quotas(store, &change)
}

/// Limits the lifetime of the pages of a model, in seconds.
fn limit(store: &Store, name: &str, max_age_s: u64) {
    let change = QuotaChange::Set(QuotaSpec {
        group: model(name),
        min_bytes: 0,
        max_bytes: None,
        max_age_s: Some(max_age_s),
    });
    change_quotas(store, &change).unwrap();
}

fn report(store: &Store) -> QuotaReport {
    change_quotas(store, &QuotaChange::None).unwrap()
}

fn stored(store: &Store, name: &str) -> u64 {
    let report = report(store);
    let group = report
        .groups
        .iter()
        .find(|of| of.quota.group == model(name));
    group.unwrap().stored_bytes
}

/// Pages that stand alone, so that each is a leaf.
fn heads(seed: u64, count: u64) -> Vec<PageKey> {
    (0..count)
        .map(|page| chain(seed << 20 | page, 1)[0])
        .collect()
}

fn put_heads(pool: &Pool<'_>, keys: &[PageKey]) -> Vec<PutStatus> {
    let wait = PutOptions::waiting(Duration::from_secs(120));
    let puts = keys.chunks(16).map(|some| pool.put_heads(some, wait));
    puts.flatten().collect()
}

/// Eviction by the least recent use, or by a policy.
fn options(is_fifo: bool) -> OpenOptions {
    let fifo = || PolicyMaker::eviction(Fifo::default);
    OpenOptions::default().with(|o| o.eviction = is_fifo.then(fifo))
}

/// Two models on one store. One scans twice the store; the other's pages stay up to its
/// minimum, and these are the ones used last.
#[test]
fn a_scan_of_one_model_leaves_the_other_its_minimum() {
    for is_fifo in [false, true] {
        let home = Home::with_store(SIZE);
        let store = home.open_with(options(is_fifo));
        let (a, b) = (
            Pool::new(&store, "a", &[PAGE]),
            Pool::new(&store, "b", &[PAGE]),
        );
        let min = 48 * MIB;
        set(&store, model("a"), min, None).unwrap();
        let own = heads(1, 300);
        put_heads(&a, &own);
        let share = (min / u64::from(PAGE)) as usize;
        let last = &own[own.len() - share..];
        for round in 0..2 {
            put_heads(&b, &heads(100 + round, SIZE / u64::from(PAGE)));
            assert!(stored(&store, "a") >= min, "{is_fifo}");
        }
        let hits = a.hits(last);
        assert!(
            hits * 100 >= share * 98,
            "{hits} of {share}, first in first out: {is_fifo}"
        );
        // Without the quota nothing of it is left.
        change_quotas(&store, &QuotaChange::Remove(model("a"))).unwrap();
        put_heads(&b, &heads(200, SIZE / u64::from(PAGE)));
        assert!(a.hits(last) < share / 2, "first in first out: {is_fifo}");
        store.close().unwrap();
    }
}

#[test]
fn a_group_at_its_maximum_evicts_its_own_pages_and_no_others() {
    for is_fifo in [false, true] {
        let home = Home::with_store(SIZE);
        let store = home.open_with(options(is_fifo));
        let (a, b) = (
            Pool::new(&store, "a", &[PAGE]),
            Pool::new(&store, "b", &[PAGE]),
        );
        let max = 32 * MIB;
        set(&store, model("b"), max, Some(max)).unwrap();
        let others = heads(1, 200);
        put_heads(&a, &others);
        let scan = heads(2, 300);
        for some in scan.chunks(20) {
            let statuses = put_heads(&b, some);
            assert!(statuses.iter().all(|status| status.is_present()));
            assert!(stored(&store, "b") <= max);
        }
        assert_eq!(stored(&store, "b"), max);
        assert_eq!(a.hits(&others), others.len());
        // The pages used last are there. Those of one put are used at once.
        let share = (max / u64::from(PAGE)) as usize - 20;
        assert_eq!(b.hits(&scan[scan.len() - share..]), share);
        store.close().unwrap();
    }
}

#[test]
fn chains_of_a_group_at_its_maximum_lose_their_ends_first() {
    let home = Home::with_store(SIZE);
    let store = home.open_with(OpenOptions::default().with(|o| o.lease = Duration::ZERO));
    let pool = Pool::new(&store, "m", &[PAGE]);
    let pages = 40;
    set(&store, model("m"), 0, Some(pages * u64::from(PAGE))).unwrap();
    let (old, new) = (chain(1, 30), chain(2, 30));
    assert!(pool.put(&old).iter().all(|status| status.is_present()));
    assert!(pool.put(&new).iter().all(|status| status.is_present()));
    assert_eq!(store.longest_prefix(pool.id, &old), 10);
    assert_eq!(store.longest_prefix(pool.id, &new), 30);
    // A chain of more pages than the maximum is refused where it exceeds it, and costs no page.
    let long = chain(3, 60);
    let statuses = pool.put(&long);
    let refused = PutStatus::Refused(Refusal::Quota);
    assert_eq!(
        statuses.iter().position(|status| *status == refused),
        Some(40)
    );
    assert!(statuses[40..].iter().all(|status| *status == refused));
    assert_eq!(store.longest_prefix(pool.id, &long), 40);
}

#[test]
fn a_group_above_a_new_maximum_is_evicted_before_colder_pages() {
    let home = Home::with_store(SIZE);
    let store = home.open();
    let (a, b) = (
        Pool::new(&store, "a", &[PAGE]),
        Pool::new(&store, "b", &[PAGE]),
    );
    let c = Pool::new(&store, "c", &[PAGE]);
    let (cold, warm) = (heads(1, 200), heads(2, 200));
    put_heads(&a, &cold);
    put_heads(&b, &warm);
    let max = 10 * u64::from(PAGE);
    set(&store, model("b"), 0, Some(max)).unwrap();
    assert!(stored(&store, "b") > max);
    let room = store.stats().usable_pages(PAGE.into());
    put_heads(&c, &heads(3, room - 200 - 10));
    assert!(stored(&store, "b") <= max);
    assert_eq!(a.hits(&cold), cold.len());
}

#[test]
fn a_put_that_finds_none_of_its_groups_pages_to_evict_is_refused() {
    let home = Home::with_store(SIZE);
    let store = home.open_with(OpenOptions::default().with(|o| o.lease = Duration::from_secs(600)));
    let pool = Pool::new(&store, "m", &[PAGE]);
    set(&store, model("m"), 0, Some(8 * u64::from(PAGE))).unwrap();
    let keys = heads(1, 8);
    put_heads(&pool, &keys);
    assert!(
        store
            .contains(pool.id, &keys)
            .iter()
            .all(|is_there| *is_there)
    );
    let more = heads(2, 4);
    let refused = PutStatus::Refused(Refusal::Quota);
    assert_eq!(put_heads(&pool, &more), vec![refused; 4]);
    assert_eq!(pool.hits(&keys), 8);
    // Reads end the leases of the pages that were read.
    assert!(
        put_heads(&pool, &more)
            .iter()
            .all(|status| status.is_present())
    );
}

#[test]
fn quotas_are_there_after_an_open_and_for_all_processes() {
    let home = Home::with_store(SIZE);
    let owner = Store::attach(&home.path, OpenOptions::default()).unwrap();
    let client = Store::attach(&home.path, OpenOptions::default()).unwrap();
    Pool::new(&owner, "a", &[PAGE]);
    let changed = set(&client, model("a"), 1 << 20, Some(2 << 20)).unwrap();
    assert_eq!(changed, report(&owner));
    assert_eq!((changed.groups.len(), changed.groups[0].namespaces), (1, 1));
    assert_eq!(larder_engine::report(&home.path).unwrap().quotas, changed);
    // A refusal names its reason to a client, too.
    let refused = change_quotas(&client, &QuotaChange::Remove(model("b"))).unwrap_err();
    assert!(matches!(&refused, StoreError::Quotas(why) if why.contains("model b has none")));
    client.close().unwrap();
    drop(owner);
    let store = home.open();
    assert_eq!(report(&store).groups[0].quota, changed.groups[0].quota);
    change_quotas(&store, &QuotaChange::Clear).unwrap();
    store.close().unwrap();
    assert_eq!(report(&home.open()).groups, []);
}

#[test]
fn quotas_that_cannot_hold_are_refused_and_change_nothing() {
    let home = Home::with_store(SIZE);
    let store = home.open();
    let with_tenant = Namespace::builder("a", "w1", 64, *namespace("a", &[PAGE]).shape());
    let with_tenant = with_tenant.extra("tenant", "t").build().unwrap();
    store.namespace(&with_tenant).unwrap();
    let half = store.stats().usable_bytes / 2;
    set(&store, model("a"), half - MIB, None).unwrap();
    let before = report(&store);
    let tenant = |name: &str| GroupName {
        kind: GroupKind::Tenant,
        name: name.to_owned(),
    };
    for (group, min, max, reason) in [
        (model("b"), 2 * MIB, None, "half of the usable room"),
        (tenant("t"), 0, Some(MIB), "two groups"),
        (model("b"), 2, Some(1), "raise the maximum"),
        (model("b"), 0, None, "states nothing"),
        (model(""), 1, None, "1 to 224 bytes"),
    ] {
        let refused = set(&store, group, min, max).unwrap_err();
        let StoreError::Quotas(why) = &refused else {
            panic!("{refused}");
        };
        assert!(why.contains(reason), "{why}");
        assert_eq!(report(&store), before);
    }
    // A namespace that comes into two groups later is served, and takes no page.
    set(&store, tenant("u"), 0, Some(MIB)).unwrap();
    let other = Namespace::builder("a", "w1", 64, *namespace("a", &[PAGE]).shape());
    let other = other.extra("tenant", "u").build().unwrap();
    let pool = Pool {
        id: store.namespace(&other).unwrap(),
        ..Pool::new(&store, "a", &[PAGE])
    };
    let refused = PutStatus::Refused(Refusal::Quota);
    assert_eq!(put_heads(&pool, &heads(1, 1)), [refused]);
    change_quotas(&store, &QuotaChange::Remove(tenant("u"))).unwrap();
    assert_eq!(put_heads(&pool, &heads(1, 1)), [PutStatus::Stored]);
}

#[test]
fn pages_beyond_the_limit_of_their_group_are_absent_and_are_put_anew() {
    let home = Home::with_store(SIZE);
    let store = home.open();
    let (a, b) = (
        Pool::new(&store, "a", &[PAGE]),
        Pool::new(&store, "b", &[PAGE]),
    );
    let keys = chain(1, 10);
    for pool in [&a, &b] {
        assert!(pool.put(&keys).iter().all(|status| status.is_present()));
    }
    let all = keys.len();
    limit(&store, "a", 3600);
    assert_eq!(report(&store).groups[0].quota.max_age_s, Some(3600));
    // No time service has kept the clock right for ten minutes of this use.
    assert_eq!(report(&store).removes_old_pages, Some(false));
    assert_eq!(
        (a.hits(&keys), store.longest_prefix(a.id, &keys)),
        (all, all)
    );
    let expire = |pool: &Pool<'_>, store: &Store| {
        limit(store, "a", 1);
        let until = Instant::now() + PATIENCE;
        while store.longest_prefix(pool.id, &keys) > 0 {
            assert!(Instant::now() < until, "the pages do not expire");
        }
        assert_eq!(pool.hits(&keys), 0);
        assert_eq!(store.contains(pool.id, &keys), vec![false; all]);
    };
    expire(&a, &store);
    assert_eq!(
        (b.hits(&keys), store.longest_prefix(b.id, &keys)),
        (all, all)
    );
    // They lie in the store still, and a put replaces them.
    assert_eq!(store.stats().pages, 2 * all as u64);
    assert_eq!(a.put(&keys), vec![PutStatus::Stored; all]);
    assert_eq!(store.stats().pages, 2 * all as u64);
    limit(&store, "a", 3600);
    assert_eq!(a.hits(&keys), all);
    assert_eq!(a.put(&keys), vec![PutStatus::Duplicate; all]);
    store.close().unwrap();
    // After an open the times of the puts are known, too.
    let store = home.open();
    let a = Pool::new(&store, "a", &[PAGE]);
    assert_eq!(a.hits(&keys), all);
    expire(&a, &store);
    store.close().unwrap();
    let store = home.open();
    let a = Pool::new(&store, "a", &[PAGE]);
    assert_eq!((a.hits(&keys), store.longest_prefix(a.id, &keys)), (0, 0));
    change_quotas(&store, &QuotaChange::Clear).unwrap();
    assert_eq!(report(&store).removes_old_pages, None);
    assert_eq!(a.hits(&keys), all);
}

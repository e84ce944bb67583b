//! The resources that one client can hold, and when they are released, over a real store.
#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::io::IoSlice;
use std::time::Duration;

use larder_core::hint::Hint;
use larder_core::index::ReadAs;
use larder_core::status::{PutFailure, PutStatus};

use super::*;
use crate::api::{OpenOptions, PageStore, PutOptions, PutPage};
use crate::share::server::answer::settled;
use crate::share::wire::Reply;
use crate::store::LocalStore;

/// Bytes that one client may have in flight.
const SHARE: u64 = 1 << 20;

/// Longest wait for reclaim.
const PATIENCE: Duration = Duration::from_secs(20);

/// Marks that a test sets.
struct Marked(Cell<bool>);

impl Marks for Marked {
    fn are_on_all(&self, _: ClientId) -> bool {
        self.0.get()
    }

    fn are_on_any(&self, _: ClientId) -> bool {
        self.0.get()
    }
}

struct Home {
    _directory: tempfile::TempDir,
    store: LocalStore,
    namespace: NamespaceId,
    map: SegmentMap,
}

fn home() -> Home {
    let (directory, path) = crate::share::tests::created();
    let store = LocalStore::open(&path, &OpenOptions::default()).unwrap();
    let namespace = store
        .namespace(&crate::share::tests::namespace(65536))
        .unwrap();
    Home {
        _directory: directory,
        store,
        namespace,
        map: SegmentMap::new(&[15], 4096),
    }
}

fn asks(count: u8) -> Vec<Ask> {
    let ask = |at| Ask {
        key: PageKey::from_bytes([at; 32]),
        parent: None,
        depth: 0,
        saved: 0,
    };
    (1..=count).map(ask).collect()
}

fn reserve(home: &Home, ledger: &Ledger, count: u8) -> (u64, Vec<Grant>) {
    let catalog = home.store.catalog();
    let reserved = ledger.reserve(
        catalog,
        (home.namespace, Hint::default()),
        &asks(count),
        65536,
        SHARE,
    );
    reserved.unwrap()
}

#[test]
fn row_23_extents_of_a_gone_client_are_released_when_its_writes_are_over() {
    let home = home();
    let catalog = home.store.catalog();
    let marks = Marked(Cell::new(false));
    let ledger = Ledger::new(ClientId(1), 2);
    assert!(!ledger.marked(&marks));
    let (_, unmarked) = reserve(&home, &ledger, 2);
    assert_eq!(unmarked, [Grant::Refused(Refusal::Busy); 2]);

    marks.0.set(true);
    assert!(ledger.marked(&marks));
    let (_, grants) = reserve(&home, &ledger, 4);
    assert!(grants.iter().all(|grant| matches!(grant, Grant::Write(_))));
    assert!(ledger.leave(catalog, &home.map).is_due);
    assert!(ledger.is_gone());
    assert_eq!(
        reserve(&home, &ledger, 1).1,
        [Grant::Refused(Refusal::Busy)]
    );
    assert_eq!(ledger.end_when_over(catalog, &home.map, &marks), None);
    assert_eq!(ledger.kept().len(), 4);

    marks.0.set(false);
    let ended = ledger.end_when_over(catalog, &home.map, &marks).unwrap();
    assert!(ledger.kept().is_empty());
    let statuses = catalog.wait(ended[0]);
    assert!(statuses.iter().all(|status| !status.is_present()));
    assert_eq!(ledger.counts(), (0, 0));
    home.store.close().unwrap();
}

#[test]
fn extents_of_a_silent_client_stay_reserved_until_it_reports_its_writes_as_over() {
    let home = home();
    let catalog = home.store.catalog();
    let ledger = Ledger::new(ClientId(1), 2);
    assert!(ledger.marked(&Marked(Cell::new(true))));
    let (put, grants) = reserve(&home, &ledger, 2);
    let Grant::Write(extent) = grants[0] else {
        panic!("a new page is not granted")
    };
    let looks = |times| {
        for _ in 0..times {
            let look = ledger.look(catalog, &home.map);
            assert!(look.is_due && look.given_up.is_empty());
        }
    };
    looks(LOOKS - 1);
    // The client is only slow.
    let landed = ledger.landed(catalog, &home.map, put, &[(0, true)]);
    let (reservation, pages) = landed.unwrap();
    catalog.landed(&[(reservation, pages)]);
    looks(LOOKS - 1);
    assert!(ledger.kept().is_empty());

    let look = ledger.look(catalog, &home.map);
    assert!(!look.is_due && look.given_up == [reservation]);
    let statuses = catalog.wait(reservation);
    assert_eq!(statuses, [PutStatus::Failed(PutFailure::Write); 2]);
    assert_eq!(ledger.kept(), [extent.place.segment]);
    // A new put of the same pages is given another place.
    let again = catalog.reserve(home.namespace, Hint::default(), &asks(1));
    assert!(
        matches!(again.1[0], Grant::Write(other) if other.place.segment != extent.place.segment)
    );
    catalog.commit(again.0, &[None]);
    catalog.landed(&[(again.0, vec![(0, false)])]);
    catalog.wait(again.0);

    assert!(ledger.commit(put).is_none());
    for _ in 0..2 {
        let landed = ledger.landed(catalog, &home.map, put, &[(0, true), (1, true)]);
        assert!(landed.is_none());
    }
    assert!(ledger.kept().is_empty());
    let awaited = ledger.wait(&[put]).unwrap();
    assert_eq!(awaited[0].reservation, Some(reservation));
    ledger.settled(put);
    assert_eq!(ledger.counts(), (0, 0));
    assert!(!ledger.leave(catalog, &home.map).is_due);
    home.store.close().unwrap();
}

/// Puts pages of 64 KiB, of which the store of [`home`] holds fewer than this.
fn put(home: &Home, seed: u8, wait: Duration) -> (Vec<PageKey>, Vec<PutStatus>) {
    const PAGES: u16 = 3840;
    let bytes = vec![7; 65536];
    let parts = [IoSlice::new(&bytes)];
    let key = |at: u16| {
        let [high, low] = at.to_be_bytes();
        let mut bytes = [seed; 32];
        bytes[..2].copy_from_slice(&[high, low]);
        PageKey::from_bytes(bytes)
    };
    let keys: Vec<PageKey> = (0..PAGES).map(key).collect();
    let page = |key: &PageKey| PutPage {
        key: *key,
        parent: None,
        depth: 0,
        parts: &parts,
    };
    let pages: Vec<PutPage<'_>> = keys.iter().map(page).collect();
    let statuses = home
        .store
        .put(home.namespace, &pages, PutOptions::waiting(wait));
    (keys, statuses)
}

#[test]
fn pins_of_a_silent_client_are_kept_for_a_while() {
    let home = home();
    let catalog = home.store.catalog();
    let ledger = Ledger::new(ClientId(1), 2);
    let (keys, _) = put(&home, 1, PATIENCE);
    let pinned = ledger.pin(catalog, home.namespace, &keys, ReadAs::Use);
    let pinned: Vec<Extent> = pinned
        .into_iter()
        .flatten()
        .map(|page| page.extent)
        .collect();
    assert!(pinned.len() > keys.len() / 2);
    // Not one segment can be written again.
    let (_, statuses) = put(&home, 2, Duration::ZERO);
    let refused = |status: &PutStatus| matches!(status, PutStatus::Refused(_));
    assert!(statuses.iter().any(refused));
    for _ in 1..READ_LOOKS {
        let look = ledger.look(catalog, &home.map);
        assert!(look.is_due && look.pins_taken_back == 0);
    }
    let look = ledger.look(catalog, &home.map);
    assert_eq!(
        (look.is_due, look.pins_taken_back),
        (false, pinned.len() as u64)
    );
    let (keys, statuses) = put(&home, 3, PATIENCE);
    assert!(statuses.iter().all(|status| status.is_present()));

    // The client goes on, with another page, in the place of those pages.
    let segments: Vec<SegmentId> = pinned.iter().map(|extent| extent.place.segment).collect();
    let found = catalog.pin(home.namespace, &keys, ReadAs::Use);
    let found: Vec<(usize, Extent)> = (0..)
        .zip(found)
        .filter_map(|(at, page)| Some((at, page?.extent)))
        .collect();
    let extents: Vec<Extent> = found.iter().map(|(_, extent)| *extent).collect();
    catalog.unpin(&extents);
    let there = |extent: &Extent| segments.contains(&extent.place.segment);
    let (at, again) = found.into_iter().find(|(_, extent)| there(extent)).unwrap();
    let page = &keys[at..=at];
    assert!(ledger.pin(catalog, home.namespace, page, ReadAs::Use)[0].is_some());
    let says = || {
        let finding = (page[0], again, Finding::Mismatch);
        ledger.verified(catalog, home.namespace, vec![finding]);
        catalog.contains(home.namespace, page)[0]
    };
    let segments: Vec<SegmentId> = pinned.iter().map(|extent| extent.place.segment).collect();
    assert!(segments.contains(&again.place.segment));
    assert!(
        says(),
        "it may have read that under a pin that was taken back"
    );
    ledger.unpin(catalog, &home.map, &segments);
    assert_eq!(ledger.counts(), (1, 0));
    assert!(!says());
    ledger.unpin(catalog, &home.map, &[again.place.segment]);
    assert_eq!(ledger.counts(), (0, 0));
    home.store.close().unwrap();
}

#[test]
fn row_24_grants_of_a_former_owner_have_no_effect() {
    let home = home();
    let marks = Marked(Cell::new(true));
    let [former, present] = [2, 3].map(|run| Ledger::new(ClientId(1), run));
    let puts = [&former, &present].map(|ledger| {
        assert!(ledger.marked(&marks));
        reserve(&home, ledger, 1).0
    });
    assert!(present.commit(puts[0]).is_none());
    let catalog = home.store.catalog();
    let landed = present.landed(catalog, &home.map, puts[0], &[(0, true)]);
    assert!(landed.is_none());
    assert!(present.wait(&puts).is_none());
    assert!(present.wait(&puts[1..]).is_some());
    assert!(present.commit(puts[1]).is_some());
}

#[test]
fn puts_that_are_awaited_together_fit_one_reply() {
    let home = home();
    let catalog = home.store.catalog();
    let ledger = Ledger::new(ClientId(1), 2);
    let asks = asks(1).repeat(KEYS_MAX / 2 + 1);
    let puts = [(); 2].map(|()| {
        let put = ledger.reserve(
            catalog,
            (home.namespace, Hint::default()),
            &asks,
            65536,
            SHARE,
        );
        put.unwrap().0
    });
    assert!(ledger.wait(&puts).is_none());
    let awaited = puts.map(|put| ledger.wait(&[put]).unwrap()[0]);
    assert!(
        awaited
            .iter()
            .all(|put| put.asks + put.beyond == asks.len())
    );
}

#[test]
fn each_page_gets_its_own_status_when_the_ledger_refused_some() {
    let home = home();
    let ledger = Ledger::new(ClientId(1), 2);
    let (unmarked, _) = reserve(&home, &ledger, 3);
    assert!(ledger.marked(&Marked(Cell::new(true))));
    let (whole, _) = reserve(&home, &ledger, 2);
    // The client has 14 of its 16 pages left.
    let (cut, _) = reserve(&home, &ledger, 20);
    let awaited = ledger.wait(&[unmarked, whole, cut]).unwrap();
    let of_core = [
        vec![],
        vec![PutStatus::Stored, PutStatus::Duplicate],
        vec![PutStatus::Stored; 14],
    ];
    let Reply::Settled(statuses) = settled(&ledger, awaited.into_iter().zip(of_core).collect())
    else {
        panic!("no statuses")
    };
    let busy = PutStatus::Refused(Refusal::Busy);
    let mut expected = vec![busy; 3];
    expected.extend([PutStatus::Stored, PutStatus::Duplicate]);
    expected.extend([PutStatus::Stored; 14]);
    expected.extend([busy; 6]);
    assert_eq!(statuses, expected);
    assert_eq!(ledger.counts(), (0, 0));
}

#[test]
fn row_25_findings_count_while_their_page_is_pinned_and_messages_about_a_put_once() {
    let home = home();
    let catalog = home.store.catalog();
    let bytes = larder_base::memory::AlignedBuf::zeroed(65536).unwrap();
    let key = asks(1)[0].key;
    let page = PutPage {
        key,
        parent: None,
        depth: 0,
        parts: &[IoSlice::new(&bytes)],
    };
    let stored = home
        .store
        .put(home.namespace, &[page], PutOptions::default());
    assert!(stored[0].is_present());
    let ledger = Ledger::new(ClientId(1), 2);
    let pinned = ledger.pin(catalog, home.namespace, &[key], ReadAs::Use)[0].unwrap();
    let segment = pinned.extent.place.segment;
    let found = || vec![(key, pinned.extent, Finding::Mismatch)];
    ledger.unpin(catalog, &home.map, &[segment, segment]);
    assert_eq!(ledger.counts(), (0, 0));
    ledger.verified(catalog, home.namespace, found());
    assert_eq!(home.store.contains(home.namespace, &[key]), [true]);
    ledger.pin(catalog, home.namespace, &[key], ReadAs::Use);
    ledger.verified(catalog, home.namespace, found());
    assert_eq!(home.store.contains(home.namespace, &[key]), [false]);

    ledger.marked(&Marked(Cell::new(true)));
    let (put, _) = reserve(&home, &ledger, 2);
    assert!(ledger.commit(put).is_some() && ledger.commit(put).is_none());
    let landed = |pages: &[_]| ledger.landed(catalog, &home.map, put, pages).unwrap().1;
    assert_eq!(landed(&[(0, false), (7, true)]), [(0, false)]);
    assert_eq!(landed(&[(0, true), (1, false)]), [(1, false)]);
    assert!(ledger.wait(&[put, put]).is_none());
    assert!(ledger.wait(&[put]).is_some() && ledger.wait(&[put]).is_none());
}

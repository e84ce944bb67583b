//! What one client holds of its owner: pins, puts, the right to write.
//!
//! A state machine without I/O, threads or clock: the server drives it from its connections, the simulation from its own steps.
//! Requests reach it through [`Desk`](super::answer::Desk).
//!
//! Invariants:
//! - a pin is given back once, by the client or when the client has gone, and only if it was taken;
//! - what a client says of a page that it read counts while it has the page's segment pinned: afterwards another page may lie there;
//! - a put is named by a number that is the ledger's own and no other owner's: what a client says of a put of another client, or
//!   of a former owner, counts for nothing;
//! - a put is committed once, a page of it lands once, its statuses are asked for once;
//! - once the client has gone its pins are given back and nothing more is granted to it; its puts end when its marks have gone
//!   (`guard`), for until then the kernel may be writing what it submitted.

use std::collections::{BTreeMap, BTreeSet};

use larder_format::{BLOCK_BYTES, PageKey};
use parking_lot::Mutex;

use crate::api::{NamespaceId, Refusal};
use crate::catalog::{
    Allocator, Ask, Catalog, Extent, Finding, Grant, Pinned, ReservationId, SegmentMap,
};
use crate::index::{Place, SegmentId};
use crate::planted;
use crate::share::guard::Marks;
use crate::share::wire::{ClientId, KEYS_MAX};

/// Pages that one client reads at once.
const PINS_MAX: u64 = 1 << 20;

/// Puts of one client whose outcome it has not asked for.
const PUTS_MAX: usize = 1 << 16;

/// Most pages that one message reserves: how long the core is kept from others. As many as a client's window has at least 4 KiB of
/// each.
const RESERVED_PAGES_MAX: usize = (WINDOW_BYTES / BLOCK_BYTES as u64) as usize;

/// Bytes that a client with nothing under way is given in any case: what it reserves together.
const WINDOW_BYTES: u64 = 8 << 20;

/// A client's account. Its methods may be called from several threads.
#[derive(Debug)]
pub struct Ledger {
    client: ClientId,
    held: Mutex<Held>,
}

#[derive(Debug)]
struct Held {
    gone: bool,
    may_write: bool,
    pins: BTreeMap<SegmentId, u64>,
    pinned: u64,
    puts: BTreeMap<u64, Put>,
    put_bytes: u64,
    next_put: u64,
}

/// A put of a client.
#[derive(Debug)]
struct Put {
    /// The core's; `None` when everything was refused here.
    reservation: Option<ReservationId>,
    asks: usize,
    /// Pages behind those that were refused here.
    beyond: usize,
    committed: bool,
    /// Somebody waits for its statuses.
    awaited: bool,
    /// Granted pages whose writes are not over.
    unlanded: BTreeSet<usize>,
    page_bytes: u64,
    /// Bytes that count against the client's share: of pages that are not written, or not committed.
    bytes: u64,
}

/// A put whose statuses its client waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// The ledger's number for it.
    pub number: u64,
    /// The core's; `None` when everything was refused here.
    pub reservation: Option<ReservationId>,
    /// Pages that it asked for, without those behind.
    pub asks: usize,
    /// Pages behind those that were refused here.
    pub beyond: usize,
}

impl Ledger {
    /// The account of a client that has just come, with an owner in this run.
    #[must_use]
    pub fn new(client: ClientId, run: u32) -> Ledger {
        Ledger {
            client,
            held: Mutex::new(Held {
                gone: false,
                may_write: false,
                pins: BTreeMap::new(),
                pinned: 0,
                puts: BTreeMap::new(),
                put_bytes: 0,
                // No owner of another run gives these numbers.
                next_put: u64::from(run) << 32,
            }),
        }
    }

    /// Whose it is.
    #[must_use]
    pub fn client(&self) -> ClientId {
        self.client
    }

    /// Whether the client has gone.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.held.lock().gone
    }

    /// Pages that it is reading, and puts that are under way.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        let held = self.held.lock();
        (held.pinned, held.puts.len() as u64)
    }

    /// The client says that it holds its marks; whether that is so. It may write from then on.
    pub fn marked(&self, marks: &dyn Marks) -> bool {
        let all = marks.are_on_all(self.client);
        self.held.lock().may_write |= all;
        all
    }

    /// Pins pages, on account.
    pub fn pin<C: Catalog + ?Sized>(
        &self,
        catalog: &C,
        namespace: NamespaceId,
        keys: &[PageKey],
    ) -> Vec<Option<Pinned>> {
        let mut held = self.held.lock();
        if held.gone || held.pinned + keys.len() as u64 > PINS_MAX {
            return vec![None; keys.len()];
        }
        let pages = catalog.pin(namespace, keys);
        for page in pages.iter().flatten() {
            *held.pins.entry(page.extent.place.segment).or_default() += 1;
            held.pinned += 1;
        }
        pages
    }

    /// Gives pins back: those that the client has.
    pub fn unpin<C: Catalog + ?Sized>(
        &self,
        catalog: &C,
        map: &SegmentMap,
        segments: &[SegmentId],
    ) {
        let mut held = self.held.lock();
        let given: Vec<Extent> = segments
            .iter()
            .filter(|segment| held.take_pin(**segment))
            .map(|segment| head_of(map, *segment))
            .collect();
        drop(held);
        catalog.unpin(&given);
    }

    /// Passes on what reading pages showed that the client still has pinned.
    pub fn verified<C: Catalog + ?Sized>(
        &self,
        catalog: &C,
        namespace: NamespaceId,
        mut findings: Vec<(PageKey, Extent, Finding)>,
    ) {
        let held = self.held.lock();
        findings.retain(|(_, extent, _)| {
            held.pins.contains_key(&extent.place.segment) || planted!(UnpinnedFinding)
        });
        // Under the lock: nobody gives the pins back meanwhile.
        if !findings.is_empty() {
            catalog.verified(namespace, &findings);
        }
    }

    /// Reserves room for pages of so many bytes each, as far as the client's share goes. Its number for the put, and a grant a page;
    /// `None` when it has too many puts.
    pub fn reserve<C: Allocator + ?Sized>(
        &self,
        catalog: &C,
        namespace: NamespaceId,
        asks: &[Ask],
        page_bytes: u64,
        share_bytes: u64,
    ) -> Option<(u64, Vec<Grant>)> {
        let mut held = self.held.lock();
        if held.puts.len() >= PUTS_MAX {
            return None;
        }
        let may_write = held.may_write || planted!(UnmarkedPut);
        let fitting = fitting(held.put_bytes, page_bytes, share_bytes).min(asks.len());
        let (asks, beyond) = asks.split_at(fitting);
        let refused = vec![Grant::Refused(Refusal::Busy); beyond.len()];
        if held.gone || !may_write || asks.is_empty() && !beyond.is_empty() {
            let all = asks.len() + beyond.len();
            let number = held.add(Put {
                reservation: None,
                asks: all,
                beyond: 0,
                // There is nothing to commit.
                committed: true,
                awaited: false,
                unlanded: BTreeSet::new(),
                page_bytes,
                bytes: 0,
            });
            return Some((number, vec![Grant::Refused(Refusal::Busy); all]));
        }
        let (reservation, mut grants) = catalog.reserve(namespace, asks);
        let unlanded: BTreeSet<usize> = grants
            .iter()
            .enumerate()
            .filter(|(_, grant)| matches!(grant, Grant::Write(_)))
            .map(|(index, _)| index)
            .collect();
        let number = held.add(Put {
            reservation: Some(reservation),
            asks: asks.len(),
            beyond: beyond.len(),
            committed: false,
            awaited: false,
            bytes: page_bytes * unlanded.len() as u64,
            unlanded,
            page_bytes,
        });
        grants.extend(refused);
        Some((number, grants))
    }

    /// A put is to be committed: the core's reservation, once.
    pub fn commit(&self, number: u64) -> Option<ReservationId> {
        let mut held = self.held.lock();
        let Some(put) = held.put(number) else {
            return astray(number);
        };
        let first = !std::mem::replace(&mut put.committed, true);
        put.reservation.filter(|_| first)
    }

    /// Writes of a put are over: the core's reservation, and the pages that were not over before.
    pub fn landed(
        &self,
        number: u64,
        pages: &[(u32, bool)],
    ) -> Option<(ReservationId, Vec<(usize, bool)>)> {
        let mut held = self.held.lock();
        let pages = pages.iter().map(|&(at, good)| (at as usize, good));
        let Some(put) = held.put(number) else {
            return astray(number).map(|core| (core, pages.collect()));
        };
        let over: Vec<(usize, bool)> = pages.filter(|(at, _)| put.unlanded.remove(at)).collect();
        let reservation = put.reservation?;
        // The rest of what they take is the core's own to do; whether the client ever asks for the outcome is not waited for.
        if put.committed {
            let bytes = put.page_bytes * over.len() as u64;
            put.bytes -= bytes;
            held.put_bytes -= bytes;
        }
        Some((reservation, over))
    }

    /// Puts to wait for, each of them once; `None`, and no wait for any, when one is not there or was waited for before, or when they
    /// have more pages than fit an answer.
    pub fn wait(&self, numbers: &[u64]) -> Option<Vec<Awaited>> {
        let mut held = self.held.lock();
        let mut named = BTreeSet::new();
        let mut pages = 0;
        for number in numbers {
            let put = held.put(*number).filter(|put| !put.awaited)?;
            pages += put.asks + put.beyond;
            if pages > KEYS_MAX || !named.insert(*number) {
                return None;
            }
        }
        let awaited = numbers.iter().filter_map(|&number| {
            let put = held.put(number)?;
            put.awaited = true;
            Some(Awaited {
                number,
                reservation: put.reservation,
                asks: put.asks,
                beyond: put.beyond,
            })
        });
        Some(awaited.collect())
    }

    /// The statuses of a put that was waited for are known: it is over.
    pub fn settled(&self, number: u64) {
        let mut held = self.held.lock();
        if let Some(put) = held.puts.remove(&number) {
            held.put_bytes -= put.bytes;
        }
    }

    /// The client has gone: gives back its pins (what it still reads goes into its own memory) and grants it nothing more. Whether
    /// puts are left, to be ended as soon as their writes are over.
    pub fn leave<C: Catalog + ?Sized>(&self, catalog: &C, map: &SegmentMap) -> bool {
        let mut held = self.held.lock();
        held.gone = true;
        held.pinned = 0;
        let pins = std::mem::take(&mut held.pins);
        let has_puts = !held.puts.is_empty();
        drop(held);
        for (segment, count) in pins {
            for _ in 0..count {
                if !planted!(KeptPins) {
                    catalog.unpin(&[head_of(map, segment)]);
                }
            }
        }
        has_puts
    }

    /// Ends the puts of a client that has gone, if its writes are over; see [`Ledger::end`]. `None` while they may not be.
    pub fn end_when_over<C: Allocator + ?Sized>(
        &self,
        catalog: &C,
        marks: &dyn Marks,
    ) -> Option<Vec<ReservationId>> {
        let is_over = !marks.are_on_any(self.client) || planted!(EarlyExtents);
        is_over.then(|| self.end(catalog))
    }

    /// Ends all puts: what has not landed by now never does, and what it was given stays dead. Returns the reservations that settle
    /// with nobody waiting for them.
    pub fn end<C: Allocator + ?Sized>(&self, catalog: &C) -> Vec<ReservationId> {
        let puts = {
            let mut held = self.held.lock();
            held.put_bytes = 0;
            std::mem::take(&mut held.puts)
        };
        let mut unawaited = Vec::new();
        for put in puts.into_values() {
            let Some(reservation) = put.reservation.filter(|_| !planted!(KeptPuts)) else {
                continue;
            };
            if !put.committed {
                catalog.commit(reservation, &vec![None; put.asks]);
            }
            let over: Vec<(usize, bool)> = put.unlanded.into_iter().map(|at| (at, false)).collect();
            catalog.landed(reservation, &over);
            if !put.awaited {
                unawaited.push(reservation);
            }
        }
        unawaited
    }
}

/// What a number that the ledger did not give means to the core: nothing.
fn astray(number: u64) -> Option<ReservationId> {
    planted!(ForeignPut).then_some(ReservationId(number & u64::from(u32::MAX)))
}

/// How many pages a client may reserve that has `put_bytes` under way. One page always goes through, however large.
fn fitting(put_bytes: u64, page_bytes: u64, share_bytes: u64) -> usize {
    let bytes = match put_bytes {
        0 => share_bytes.max(WINDOW_BYTES).max(page_bytes),
        _ => share_bytes.saturating_sub(put_bytes),
    };
    let pages = usize::try_from(bytes / page_bytes.max(1)).unwrap_or(usize::MAX);
    pages.min(RESERVED_PAGES_MAX)
}

/// An extent in a segment: pins are counted by segment.
fn head_of(map: &SegmentMap, segment: SegmentId) -> Extent {
    map.extent(Place { segment, start: 0 })
}

impl Held {
    fn put(&mut self, number: u64) -> Option<&mut Put> {
        if planted!(FormerPut) {
            let low = |number: u64| number & u64::from(u32::MAX);
            let mut puts = self.puts.iter_mut();
            return puts.find_map(|(known, put)| (low(*known) == low(number)).then_some(put));
        }
        self.puts.get_mut(&number)
    }

    fn add(&mut self, put: Put) -> u64 {
        let number = self.next_put;
        self.next_put += 1;
        self.put_bytes += put.bytes;
        self.puts.insert(number, put);
        number
    }

    fn take_pin(&mut self, segment: SegmentId) -> bool {
        let Some(count) = self.pins.get_mut(&segment) else {
            return false;
        };
        if planted!(DoubleUnpin) {
            return true;
        }
        *count -= 1;
        if *count == 0 {
            self.pins.remove(&segment);
        }
        self.pinned -= 1;
        true
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::cell::Cell;

    use super::*;
    use crate::Store;
    use crate::api::{OpenOptions, PageStore, PutStatus};
    use crate::share::server::answer::settled;
    use crate::share::wire::Reply;

    /// Bytes that one client may have under way.
    const SHARE: u64 = 1 << 20;

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
        store: Store,
        namespace: NamespaceId,
        map: SegmentMap,
    }

    fn home() -> Home {
        let (directory, path) = crate::share::tests::created();
        let store = Store::open(&path, OpenOptions::default()).unwrap();
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
        };
        (1..=count).map(ask).collect()
    }

    fn reserve(home: &Home, ledger: &Ledger, count: u8) -> (u64, Vec<Grant>) {
        let catalog = home.store.catalog();
        let reserved = ledger.reserve(catalog, home.namespace, &asks(count), 65536, SHARE);
        reserved.unwrap()
    }

    #[test]
    fn row_23_what_a_client_that_has_gone_was_given_is_given_back_when_its_writes_are_over() {
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
        assert!(ledger.leave(catalog, &home.map));
        assert!(ledger.is_gone());
        assert_eq!(
            reserve(&home, &ledger, 1).1,
            [Grant::Refused(Refusal::Busy)]
        );
        assert_eq!(ledger.end_when_over(catalog, &marks), None);

        marks.0.set(false);
        let ended = ledger.end_when_over(catalog, &marks).unwrap();
        let statuses = catalog.wait(ended[0]);
        assert!(statuses.iter().all(|status| !status.is_present()));
        assert_eq!(ledger.counts(), (0, 0));
        home.store.close().unwrap();
    }

    #[test]
    fn row_24_what_a_former_owner_granted_counts_for_nothing() {
        let home = home();
        let marks = Marked(Cell::new(true));
        let [former, present] = [2, 3].map(|run| Ledger::new(ClientId(1), run));
        let puts = [&former, &present].map(|ledger| {
            assert!(ledger.marked(&marks));
            reserve(&home, ledger, 1).0
        });
        assert!(present.commit(puts[0]).is_none());
        assert!(present.landed(puts[0], &[(0, true)]).is_none());
        assert!(present.wait(&puts).is_none());
        assert!(present.wait(&puts[1..]).is_some());
        assert!(present.commit(puts[1]).is_some());
    }

    #[test]
    fn what_is_waited_for_together_fits_an_answer() {
        let home = home();
        let catalog = home.store.catalog();
        let ledger = Ledger::new(ClientId(1), 2);
        let asks = asks(1).repeat(KEYS_MAX / 2 + 1);
        let puts = [(); 2].map(|()| {
            let put = ledger.reserve(catalog, home.namespace, &asks, 65536, SHARE);
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
    fn each_page_is_told_its_own_status_where_some_were_refused_here() {
        let home = home();
        let ledger = Ledger::new(ClientId(1), 2);
        let (unmarked, _) = reserve(&home, &ledger, 3);
        assert!(ledger.marked(&Marked(Cell::new(true))));
        let (whole, _) = reserve(&home, &ledger, 2);
        // Of its 16 pages the client has 14 left.
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
    fn row_25_what_is_said_of_a_page_counts_while_it_is_pinned_and_of_a_put_once() {
        let home = home();
        let catalog = home.store.catalog();
        let bytes = crate::memory::AlignedBuf::zeroed(65536).unwrap();
        let key = asks(1)[0].key;
        let page = crate::PutPage {
            key,
            parent: None,
            depth: 0,
            parts: &[std::io::IoSlice::new(&bytes)],
        };
        let stored = home
            .store
            .put(home.namespace, &[page], crate::PutOptions::default());
        assert!(stored[0].is_present());
        let ledger = Ledger::new(ClientId(1), 2);
        let pinned = ledger.pin(catalog, home.namespace, &[key])[0].unwrap();
        let segment = pinned.extent.place.segment;
        let found = || vec![(key, pinned.extent, Finding::Mismatch)];
        ledger.unpin(catalog, &home.map, &[segment, segment]);
        assert_eq!(ledger.counts(), (0, 0));
        ledger.verified(catalog, home.namespace, found());
        assert_eq!(home.store.contains(home.namespace, &[key]), [true]);
        ledger.pin(catalog, home.namespace, &[key]);
        ledger.verified(catalog, home.namespace, found());
        assert_eq!(home.store.contains(home.namespace, &[key]), [false]);

        ledger.marked(&Marked(Cell::new(true)));
        let (put, _) = reserve(&home, &ledger, 2);
        assert!(ledger.commit(put).is_some() && ledger.commit(put).is_none());
        let over = ledger.landed(put, &[(0, false), (7, true)]).unwrap().1;
        assert_eq!(over, [(0, false)]);
        let over = ledger.landed(put, &[(0, true), (1, false)]).unwrap().1;
        assert_eq!(over, [(1, false)]);
        assert!(ledger.wait(&[put, put]).is_none());
        assert!(ledger.wait(&[put]).is_some() && ledger.wait(&[put]).is_none());
    }
}

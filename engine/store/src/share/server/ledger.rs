//! The owner's resources that one client holds: pins, puts, the right to write.
//!
//! A state machine without I/O, threads or clock: the server drives it from its connections, the
//! simulation from its own steps. Requests reach it through [`Desk`](super::answer::Desk).
//!
//! Invariants:
//! - A pin is released once, by the client or after the client has gone, and only if it was taken.
//! - A client's finding about a page counts only while the client has the page's segment pinned:
//!   afterwards another page may be there.
//! - If a client begins and ends no read for a time, its pins are revoked. Otherwise a stopped
//!   client would keep segments from being written again. The client verifies its reads, so a read
//!   that goes on after that is a miss at worst. A later unpin of revoked pins has no effect.
//! - The number of a put is unique to this ledger and this owner: a message about a put of another
//!   client, or of a former owner, has no effect.
//! - A put is committed once, each of its pages lands once, its statuses are requested once.
//! - A silent put is aborted, and so are all puts once the client has gone: for the core their
//!   pages have failed, so that no caller waits for them. Their extents stay pinned until the
//!   client reports that its writes are over, or its marks have gone (`guard`): until then the
//!   kernel may carry out submitted writes, or a stopped client may resume.
//! - Once the client has gone, its own pins are released and it is granted nothing more.

mod put;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use larder_base::ids::{ClientId, NamespaceId};
use larder_base::planted;
use larder_base::runtime::Mutex;
use larder_core::grants::{Ask, Extent, Finding, Grant, ReservationId, SegmentMap};
use larder_core::hint::Hint;
use larder_core::index::{Place, ReadAs, SegmentId};
use larder_core::status::Refusal;
use larder_format::{BLOCK_BYTES, PageKey};

use crate::catalog::{Allocator, Catalog, Pinned};
use crate::share::wire::KEYS_MAX;
use crate::volume::guard::Marks;
pub use put::{Awaited, LOOKS, Look};
use put::{Put, Unlanded};

/// Most pages that one client may have pinned at once.
const PINS_MAX: u64 = 1 << 20;

/// Checks without any read of the client beginning or ending, after which its pins are revoked:
/// many times as long as a device takes.
pub const READ_LOOKS: u32 = 15;

/// Most puts of one client with statuses that it has not requested.
const PUTS_MAX: usize = 1 << 16;

/// Most pages that one message reserves. It bounds how long the core is occupied. A client's window
/// has at most this many pages, at 4 KiB each.
const RESERVED_PAGES_MAX: usize = (WINDOW_BYTES / BLOCK_BYTES as u64) as usize;

/// Bytes that a client with nothing in flight is granted in any case: the size of one reservation.
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
    /// Pins that were revoked, and that the client will still try to release.
    forfeited: BTreeMap<SegmentId, u64>,
    /// Checks since the last read began or ended.
    looks: u32,
    puts: BTreeMap<u64, Put>,
    /// Segments that ended puts may still be written to, because the client has not reported those
    /// writes as over. One entry per page.
    adrift: Vec<SegmentId>,
    put_bytes: u64,
    next_put: u64,
}

impl Ledger {
    /// The account of a new client, for an owner in this epoch.
    #[must_use]
    pub fn new(client: ClientId, run: u32) -> Ledger {
        Ledger {
            client,
            held: Mutex::new(Held {
                gone: false,
                may_write: false,
                pins: BTreeMap::new(),
                pinned: 0,
                forfeited: BTreeMap::new(),
                looks: 0,
                puts: BTreeMap::new(),
                adrift: Vec::new(),
                put_bytes: 0,
                // No owner of another epoch gives these numbers.
                next_put: u64::from(run) << 32,
            }),
        }
    }

    /// The client of this account.
    #[must_use]
    pub fn client(&self) -> ClientId {
        self.client
    }

    /// Whether the client has gone.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.held.lock().gone
    }

    /// Pages being read, and puts in progress.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        let held = self.held.lock();
        (held.pinned, held.puts.len() as u64)
    }

    /// The client reports that it holds its marks. Returns whether it does; it may write from then
    /// on.
    pub fn marked(&self, marks: &dyn Marks) -> bool {
        let all = marks.are_on_all(self.client);
        self.held.lock().may_write |= all;
        all
    }

    /// Whether the client has held its marks: it may use the store, and not only ask for a report.
    #[must_use]
    pub fn is_marked(&self) -> bool {
        self.held.lock().may_write
    }

    /// Pins pages for the client.
    pub fn pin<C: Catalog + ?Sized>(
        &self,
        catalog: &C,
        namespace: NamespaceId,
        keys: &[PageKey],
        read_as: ReadAs,
    ) -> Vec<Option<Pinned>> {
        let mut held = self.held.lock();
        if held.gone || held.pinned + keys.len() as u64 > PINS_MAX {
            return vec![None; keys.len()];
        }
        held.looks = 0;
        let pages = catalog.pin(namespace, keys, read_as);
        for page in pages.iter().flatten() {
            *held.pins.entry(page.extent.place.segment).or_default() += 1;
            held.pinned += 1;
        }
        pages
    }

    /// Releases pins, as far as the client has them.
    pub fn unpin<C: Catalog + ?Sized>(
        &self,
        catalog: &C,
        map: &SegmentMap,
        segments: &[SegmentId],
    ) {
        let mut held = self.held.lock();
        held.looks = 0;
        let given = segments.iter().copied();
        let given: Vec<SegmentId> = given.filter(|segment| held.take_pin(*segment)).collect();
        drop(held);
        unpin(catalog, map, &given);
    }

    /// Passes on findings about pages that the client still has pinned.
    pub fn verified<C: Catalog + ?Sized>(
        &self,
        catalog: &C,
        namespace: NamespaceId,
        mut findings: Vec<(PageKey, Extent, Finding)>,
    ) {
        let held = self.held.lock();
        findings.retain(|(_, extent, _)| {
            let segment = &extent.place.segment;
            // The page may have been read under a pin that was revoked.
            let is_pinned =
                held.pins.contains_key(segment) && !held.forfeited.contains_key(segment);
            is_pinned || planted!(UnpinnedFinding)
        });
        // Under the lock, so that the pins are not released meanwhile.
        if !findings.is_empty() {
            catalog.verified(namespace, &findings);
        }
    }

    /// Reserves room for pages of `page_bytes` each, as far as the client's share goes. Returns the
    /// ledger's number for the put, and one grant per page; `None` when the client has too many
    /// puts.
    pub fn reserve<C: Allocator + ?Sized>(
        &self,
        catalog: &C,
        (namespace, hint): (NamespaceId, Hint),
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
                unlanded: Unlanded::default(),
                aborted: false,
                looks: 0,
                page_bytes,
                bytes: 0,
            });
            return Some((number, vec![Grant::Refused(Refusal::Busy); all]));
        }
        let (reservation, mut grants) = catalog.reserve(namespace, hint, asks);
        let unlanded = Unlanded::of(&grants);
        let number = held.add(Put {
            reservation: Some(reservation),
            asks: asks.len(),
            beyond: beyond.len(),
            committed: false,
            awaited: false,
            bytes: page_bytes * unlanded.left() as u64,
            unlanded,
            aborted: false,
            looks: 0,
            page_bytes,
        });
        grants.extend(refused);
        Some((number, grants))
    }

    /// Marks a put as committed. Returns the core's reservation the first time.
    pub fn commit(&self, number: u64) -> Option<ReservationId> {
        let mut held = self.held.lock();
        let Some(put) = held.touch(number) else {
            return unknown_put(number);
        };
        let first = !std::mem::replace(&mut put.committed, true);
        put.reservation.filter(|_| first)
    }

    /// Writes of a put are over. Returns the core's reservation, and the pages that land for the
    /// first time. Pages of an aborted put are not passed to the core, only unpinned.
    pub fn landed<C: Catalog + ?Sized>(
        &self,
        catalog: &C,
        map: &SegmentMap,
        number: u64,
        pages: &[(u32, bool)],
    ) -> Option<(ReservationId, Vec<(usize, bool)>)> {
        let mut held = self.held.lock();
        let pages = pages.iter().map(|&(at, good)| (at as usize, good));
        let Some(put) = held.touch(number) else {
            return unknown_put(number).map(|core| (core, pages.collect()));
        };
        let mut over = Vec::new();
        let mut segments = Vec::new();
        for (at, good) in pages {
            if let Some(segment) = put.unlanded.land(at) {
                over.push((at, good));
                segments.push(segment);
            }
        }
        let (reservation, aborted) = (put.reservation?, put.aborted);
        // The core needs no more of the client for these pages, so they no longer count, even if
        // the client never requests the outcome.
        if put.committed {
            let bytes = put.page_bytes * over.len() as u64;
            put.bytes -= bytes;
            held.put_bytes -= bytes;
        }
        drop(held);
        if aborted {
            unpin(catalog, map, &segments);
            return None;
        }
        Some((reservation, over))
    }

    /// Puts to wait for, each of them once. `None`, and no wait at all, if a put is unknown or was
    /// waited for before, or if they have more pages than fit a reply.
    pub fn wait(&self, numbers: &[u64]) -> Option<Vec<Awaited>> {
        let mut held = self.held.lock();
        let mut named = BTreeSet::new();
        let mut pages = 0;
        for number in numbers {
            let put = held.touch(*number).filter(|put| !put.awaited)?;
            pages += put.asks + put.beyond;
            if pages > KEYS_MAX || !named.insert(*number) {
                return None;
            }
        }
        let awaited = numbers.iter().filter_map(|&number| {
            let put = held.touch(number)?;
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

    /// The statuses of an awaited put are known: the put ends.
    pub fn settled(&self, number: u64) {
        let mut held = self.held.lock();
        if let Some(put) = held.puts.remove(&number) {
            held.put_bytes -= put.bytes;
            held.adrift.extend(put.unlanded.segments());
        }
    }

    /// Aborts the puts that were silent for [`LOOKS`] checks, this one included, and revokes the
    /// client's pins after [`READ_LOOKS`] checks in which no read began or ended.
    pub fn look<C: Allocator + ?Sized>(&self, catalog: &C, map: &SegmentMap) -> Look {
        let mut held = self.held.lock();
        let mut is_due = false;
        let mut aborted = Vec::new();
        for put in held.puts.values_mut().filter(|put| put.is_under_way()) {
            put.looks += 1;
            if put.looks < LOOKS {
                is_due = true;
            } else {
                aborted.extend(put.abort(catalog));
            }
        }
        let forfeited = held.check_reads();
        is_due |= held.pinned > 0;
        drop(held);
        let pins_taken_back = forfeited.values().sum();
        unpin_all(catalog, map, forfeited);
        Look {
            pins_taken_back,
            ..Look::after(catalog, aborted, is_due)
        }
    }

    /// The client has gone: releases its pins (reads in flight go into its own memory), aborts its
    /// puts, and grants it nothing more. The rest stays reserved until its writes are over.
    pub fn leave<C: Allocator + ?Sized>(&self, catalog: &C, map: &SegmentMap) -> Look {
        let mut held = self.held.lock();
        held.gone = true;
        let pins = held.take_all_pins();
        let puts = held.puts.values_mut();
        let aborted = puts.filter_map(|put| put.abort(catalog)).collect();
        let is_due = !held.puts.is_empty() || !held.adrift.is_empty();
        drop(held);
        let look = Look::after(catalog, aborted, is_due);
        if !planted!(KeptPins) {
            unpin_all(catalog, map, pins);
        }
        look
    }

    /// Ends the puts of a client that has gone, and releases their extents, if its writes are over;
    /// `None` while they may not be. Returns the reservations that settle without a waiter.
    pub fn end_when_over<C: Allocator + ?Sized>(
        &self,
        catalog: &C,
        map: &SegmentMap,
        marks: &dyn Marks,
    ) -> Option<Vec<ReservationId>> {
        if marks.are_on_any(self.client) && !planted!(EarlyExtents) {
            return None;
        }
        let unawaited = self.abandon();
        let segments = std::mem::take(&mut self.held.lock().adrift);
        if !planted!(KeptPuts) {
            unpin(catalog, map, &segments);
        }
        Some(unawaited)
    }

    /// Ends the puts of a client that has gone and may still be writing. Their extents stay pinned
    /// for good. Returns the reservations that settle without a waiter.
    pub fn abandon(&self) -> Vec<ReservationId> {
        let mut held = self.held.lock();
        held.put_bytes = 0;
        let mut unawaited = Vec::new();
        for put in std::mem::take(&mut held.puts).into_values() {
            held.adrift.extend(put.unlanded.segments());
            unawaited.extend(put.reservation.filter(|_| !put.awaited));
        }
        unawaited
    }

    /// Segments that are pinned because a client's writes may go there. One entry per page.
    pub fn kept(&self) -> Vec<SegmentId> {
        let held = self.held.lock();
        let aborted = held.puts.values().filter(|put| put.aborted);
        let unlanded = aborted.flat_map(|put| put.unlanded.segments());
        unlanded.chain(held.adrift.iter().copied()).collect()
    }
}

fn unpin<C: Catalog + ?Sized>(catalog: &C, map: &SegmentMap, segments: &[SegmentId]) {
    let heads: Vec<Extent> = segments.iter().map(|at| head_of(map, *at)).collect();
    catalog.unpin(&heads);
}

fn unpin_all<C: Catalog + ?Sized>(catalog: &C, map: &SegmentMap, pins: BTreeMap<SegmentId, u64>) {
    for (segment, count) in pins {
        for _ in 0..count {
            catalog.unpin(&[head_of(map, segment)]);
        }
    }
}

/// A number that the ledger did not give maps to no reservation.
fn unknown_put(number: u64) -> Option<ReservationId> {
    planted!(ForeignPut).then_some(ReservationId(number & u64::from(u32::MAX)))
}

/// How many pages a client with `put_bytes` in flight may reserve. One page always goes through,
/// however large.
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
    map.extent(Place {
        segment,
        start: 0,
        saved: 0,
    })
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

    /// Finds a put, and notes that its client is active.
    fn touch(&mut self, number: u64) -> Option<&mut Put> {
        let put = self.put(number)?;
        put.looks = 0;
        Some(put)
    }

    fn add(&mut self, put: Put) -> u64 {
        let number = self.next_put;
        self.next_put += 1;
        self.put_bytes += put.bytes;
        self.puts.insert(number, put);
        number
    }

    /// Counts a check of the client's reads. Returns the pins that the client loses by it.
    fn check_reads(&mut self) -> BTreeMap<SegmentId, u64> {
        self.looks += 1;
        if self.pinned == 0 || self.looks < READ_LOOKS {
            return BTreeMap::new();
        }
        let pins = self.take_all_pins();
        for (segment, count) in &pins {
            *self.forfeited.entry(*segment).or_default() += count;
        }
        pins
    }

    fn take_all_pins(&mut self) -> BTreeMap<SegmentId, u64> {
        self.pinned = 0;
        std::mem::take(&mut self.pins)
    }

    /// Releases one of the client's pins. False when the client does not have it.
    fn take_pin(&mut self, segment: SegmentId) -> bool {
        if take_one(&mut self.forfeited, segment) {
            return false;
        }
        if planted!(DoubleUnpin) {
            return self.pins.contains_key(&segment);
        }
        let is_there = take_one(&mut self.pins, segment);
        self.pinned -= u64::from(is_there);
        is_there
    }
}

/// Decrements one count. False when there was none.
fn take_one(counts: &mut BTreeMap<SegmentId, u64>, segment: SegmentId) -> bool {
    let Some(count) = counts.get_mut(&segment) else {
        return false;
    };
    *count -= 1;
    if *count == 0 {
        counts.remove(&segment);
    }
    true
}

//! Storing pages: reserve, write, commit.
//!
//! A call is cut into windows of a few megabytes, and many windows are in flight at once: while the
//! device writes some, the checksums of the next are computed. A device with many operations
//! finishes them in no particular order. So windows are finished as they land, and the next one is
//! launched as soon as it fits the bytes in flight.
//!
//! Extents may have to come from another process. While the call waits for them, it computes the
//! next checksums. Within a window neighbouring pages are written together, each stretch as soon as
//! its checksums are there: the device then finds the bytes in the processor's cache, where caches
//! serve devices, and memory is read once instead of twice. Only for the first bytes of a call the
//! checksums are computed during the write: until then the device has nothing to do.
//!
//! The descriptors are written while the page data is still in flight. A page whose write failed is
//! written once more, in another segment, and on the next volume if there are several.
//!
//! Where a codec is on, the pages of a window that are not stored yet are encoded before their
//! extents are asked for, since an extent has the size of the encoded page. In an encrypted store
//! all pages are encrypted there, after they are encoded.
//!
//! A put may be given up ([`Recall`]) while it waits. The rule for the caller's memory: each
//! stretch of code that reads it holds a [`Reading`], and after a recall there is none. A write
//! that the device completes after a recall counts as failed, because its bytes may be others.

mod encoded;
mod windows;

use larder_base::ids::NamespaceId;
use larder_base::memory::AlignedBuf;
use larder_base::planted;
use larder_base::runtime::{Instant, after};
use larder_core::counters::Counts;
use larder_core::grants::{Ask, Extent, Grant, ReservationId};
use larder_core::status::{PutFailure, PutStatus, Refusal};
use larder_disk::{Action, Buffer, MERGE_BYTES_MAX, Op, PIECES_MAX, Piece, Purpose};
use larder_format::{BLOCK_BYTES, PageChecksum, Proof};

use super::coding::ENCODED_BYTES;
use super::get::push_piece;
use super::{Counters, DataPath};
use crate::api::{PutOptions, PutPage, Reading, Recall};
use crate::catalog::{Catalog, Landed, NamespaceShape, Putting};
use windows::{Window, Windows, tag};

/// Bytes of page data reserved and written together.
const WINDOW_BYTES: usize = 8 << 20;

/// Bytes of the first window of a call with several windows: few, so that it is soon granted, and
/// enough to keep the device busy until the next one is granted.
const FIRST_WINDOW_BYTES: usize = 2 << 20;

/// Bytes that a call first submits to the disk: few, so that the device has work soon. Each later
/// submission is as large as all before together, up to a limit. Each submission costs a wake-up.
/// The device has work meanwhile, since checksums take less than half its time.
const HANDED_FIRST_BYTES: usize = 512 << 10;
const HANDED_BYTES_MAX: usize = 4 << 20;

/// Bytes of one call in flight: enough to keep a device busy that finishes out of order.
const IN_FLIGHT_BYTES: usize = 128 << 20;

/// Most page data with checksums computed before the extents are known: as much as the processor's
/// cache holds.
const AHEAD_BYTES: usize = 2 << 20;

pub(super) fn put<C: Catalog + ?Sized>(
    catalog: &C,
    data: &DataPath,
    namespace: NamespaceId,
    pages: &[PutPage<'_>],
    options: PutOptions,
    recall: Option<&Recall>,
) -> Vec<PutStatus> {
    let mut statuses = vec![PutStatus::Refused(Refusal::WrongShape); pages.len()];
    let Some(shape) = catalog.shape(namespace) else {
        return statuses;
    };
    let fitting: Vec<usize> = (0..pages.len())
        .filter(|&index| fits(&shape, &pages[index]))
        .collect();
    let until = after(options.wait);
    let mut call = Call {
        putting: catalog.put(namespace, options.hint),
        made_unix_s: options.made_unix_s,
        data,
        shape: &shape,
        pages,
        recall,
        statuses: &mut statuses,
        windows: Windows::default(),
        landed: Vec::new(),
        handed: 0,
    };
    call.store(&fitting, until);
    let is_failed = |status: &PutStatus| *status == PutStatus::Failed(PutFailure::Write);
    let failed: Vec<usize> = fitting
        .into_iter()
        .filter(|&i| is_failed(&call.statuses[i]))
        .collect();
    if !call.lacks_key() {
        call.store(&failed, until);
    }
    if call.lacks_key() {
        // Erased since the call began.
        for status in call.statuses.iter_mut().filter(|status| is_failed(status)) {
            *status = PutStatus::Refused(Refusal::Erased);
        }
    }
    drop(call);
    count(data, &shape, &statuses);
    statuses
}

fn count(data: &DataPath, shape: &NamespaceShape, statuses: &[PutStatus]) {
    let (mut counts, mut read_only) = (Counts::default(), 0);
    for status in statuses {
        match status {
            PutStatus::Stored => counts.pages_put += 1,
            PutStatus::Duplicate => counts.duplicates += 1,
            PutStatus::Failed(_) => counts.failed += 1,
            PutStatus::Refused(why) => {
                counts.refused += 1;
                read_only += u64::from(*why == Refusal::ReadOnlyService);
                data.notices.refused(*why, shape.shape.page_bytes());
            }
        }
    }
    counts.bytes_put = counts.pages_put * shape.page_bytes() as u64;
    data.counters.calls.add(counts);
    Counters::add(&data.counters.refused_read_only, read_only);
}

fn fits(shape: &NamespaceShape, page: &PutPage<'_>) -> bool {
    let sizes = shape.shape.part_sizes();
    page.parts.len() == sizes.len()
        && page
            .parts
            .iter()
            .zip(sizes)
            .all(|(part, &size)| part.len() == size as usize)
}

fn is_aligned(shape: &NamespaceShape, page: &PutPage<'_>) -> bool {
    shape.shape.is_aligned()
        && page
            .parts
            .iter()
            .all(|part| (part.as_ptr() as usize).is_multiple_of(BLOCK_BYTES))
}

fn checksum(shape: &NamespaceShape, page: &PutPage<'_>) -> u64 {
    let mut checksum = PageChecksum::new(shape.fingerprint, &page.key);
    for part in page.parts {
        checksum.part(part);
    }
    checksum.finish()
}

/// Whether the caller's memory may be read, for as long as the result lives.
fn read(recall: Option<&Recall>) -> Option<Option<Reading<'_>>> {
    match recall {
        Some(recall) => recall.read().map(Some),
        None => Some(None),
    }
}

/// A call in progress.
struct Call<'a> {
    /// Declared first, and so dropped first: if the call unwinds, the catalog is notified after the
    /// disk is done.
    windows: Windows,
    putting: Box<dyn Putting + 'a>,
    made_unix_s: Option<u64>,
    data: &'a DataPath,
    shape: &'a NamespaceShape,
    pages: &'a [PutPage<'a>],
    recall: Option<&'a Recall>,
    statuses: &'a mut [PutStatus],
    /// Landed reservations that were not waited for yet, with the positions of their pages.
    landed: Vec<(ReservationId, Vec<usize>)>,
    /// Bytes submitted to the disk so far.
    handed: usize,
}

/// Pages of a window that are adjacent on disk and are written together.
struct Stretch {
    extent: Extent,
    pieces: Vec<Piece>,
    /// By position in the asks, and among the pages of the call.
    pages: Vec<(usize, usize)>,
    bytes: usize,
}

impl Call<'_> {
    /// Stores the pages at these positions and fills in their statuses.
    fn store(&mut self, members: &[usize], until: Instant) {
        let mut rest = members.to_vec();
        while !rest.is_empty() {
            let seen = self.putting.room();
            let (left, why) = self.admit(&rest);
            rest = left;
            // Also before a wait for room: the bytes in flight may be the reason that there is no
            // room.
            self.finish();
            let Some(why) = why else {
                // Given up, if any are left.
                for index in rest {
                    self.statuses[index] = PutStatus::Failed(PutFailure::Write);
                }
                break;
            };
            let waits = matches!(why, Refusal::NoSpace | Refusal::Busy) && Instant::now() < until;
            if !waits || !self.putting.wait_for_room(seen, until) {
                for index in rest {
                    self.statuses[index] = PutStatus::Refused(why);
                }
                break;
            }
        }
    }

    /// Waits for the writes in flight, and for the statuses of their pages.
    fn finish(&mut self) {
        while self.windows.left > 0 {
            self.wait();
        }
        let (reservations, members): (Vec<_>, Vec<_>) = self.landed.drain(..).unzip();
        if reservations.is_empty() {
            return;
        }
        for (members, settled) in members.iter().zip(self.putting.wait(&reservations)) {
            for (&index, status) in members.iter().zip(settled) {
                self.statuses[index] = status;
            }
        }
    }

    /// Waits for the device, and reports landed windows.
    fn wait(&mut self) {
        self.putting.stay();
        let landed = self.windows.wait(self.recall);
        self.land(landed);
    }

    /// Whether the tenant of an encrypted store has no key for these pages.
    fn lacks_key(&self) -> bool {
        let tenant = self.shape.tenant.as_ref();
        tenant.is_some_and(|tenant| !(tenant.has_key() && tenant.takes(self.made_unix_s)))
    }

    fn is_recalled(&self) -> bool {
        self.recall.is_some_and(Recall::is_recalled)
    }

    /// Starts to write the pages at these positions, window after window, up to the first refused
    /// page. Returns the remaining pages, and the reason; no reason after a recall.
    fn admit(&mut self, members: &[usize]) -> (Vec<usize>, Option<Refusal>) {
        let page_bytes = self.page_bytes();
        let mut window_bytes = match members.len() * page_bytes {
            0..=WINDOW_BYTES => WINDOW_BYTES,
            _ => FIRST_WINDOW_BYTES,
        };
        let mut rest = members;
        while !rest.is_empty() {
            let count = (window_bytes / page_bytes).max(1).min(rest.len());
            while self.windows.left > 0 && !self.may_launch(count * page_bytes) {
                self.wait();
            }
            if self.is_recalled() {
                return (rest.to_vec(), None);
            }
            let (admitted, refusal) = self.launch(&rest[..count]);
            rest = &rest[admitted..];
            if refusal.is_some() {
                // No page behind it may go ahead: it would be stored without its ancestors.
                return (rest.to_vec(), refusal);
            }
            window_bytes = WINDOW_BYTES;
        }
        (Vec::new(), None)
    }

    fn page_bytes(&self) -> usize {
        self.shape.page_bytes()
    }

    /// Whether a window of so many plain bytes fits the memory of a call.
    fn may_launch(&self, bytes: usize) -> bool {
        let encodes = self.shape.encoder.is_some() || self.shape.tenant.is_some();
        self.windows.bytes + bytes <= IN_FLIGHT_BYTES
            && (!encodes || self.windows.encoded + bytes <= ENCODED_BYTES)
    }

    /// Reports windows with ended writes to the catalog.
    fn land(&mut self, windows: Vec<Window>) {
        if windows.is_empty() {
            return;
        }
        let mut landed: Vec<Landed> = Vec::with_capacity(windows.len());
        for window in windows {
            landed.push((window.reservation, window.landed));
            self.landed.push((window.reservation, window.members));
            self.data.encoding.give_back(window.encoded.into_memory());
        }
        self.putting.landed(&landed);
    }

    /// Reserves room for these pages, starts their writes, and commits. Returns how many were
    /// admitted, and why the next one was not.
    fn launch(&mut self, members: &[usize]) -> (usize, Option<Refusal>) {
        let mut encoded = self.encode(members);
        let (pages, shape, recall) = (self.pages, self.shape, self.recall);
        let ask = |(at, &index): (usize, &usize)| Ask {
            key: pages[index].key,
            parent: pages[index].parent,
            depth: pages[index].depth,
            saved: encoded.saved(at),
        };
        let asks: Vec<Ask> = members.iter().enumerate().map(ask).collect();
        let ahead_max = match self.shape.tenant {
            // A page of an encrypted store is encrypted already, or is not written.
            Some(_) => 0,
            None => (AHEAD_BYTES / self.page_bytes()).min(members.len()),
        };
        let mut ahead = encoded.proofs(members.len());
        let mut next = 0;
        let mut meanwhile = || {
            let Some(_reading) = read(recall) else {
                return false;
            };
            if next < ahead_max {
                ahead[next].get_or_insert_with(|| checksum(shape, &pages[members[next]]).into());
                next += 1;
            }
            next < ahead_max
        };
        let (reservation, grants) = self.putting.reserve(&asks, &mut meanwhile);
        if self.shape.tenant.is_some() {
            self.encrypt(&mut encoded, members, &grants);
            ahead = encoded.proofs(members.len());
        }
        let refused = grants.iter().zip(0..).find_map(|(grant, at)| match grant {
            Grant::Refused(why) => Some((at, *why)),
            _ => None,
        });
        let admitted = refused.map_or(members.len(), |(at, _)| at);
        let window = Window {
            members: members[..admitted].to_vec(),
            reservation,
            groups: Vec::new(),
            left: 0,
            bytes: 0,
            landed: Vec::with_capacity(grants.len()),
            bounced: Vec::new(),
            encoded,
        };
        let (idle, proofs) = self.write(window, &grants, &ahead);
        self.putting.commit(reservation, &proofs);
        self.land(idle.into_iter().collect());
        (admitted, refused.map(|(_, why)| why))
    }

    /// Computes the checksums of a window's pages and starts their writes, one stretch after the
    /// other. The proofs of the first pages may be known `ahead`. Returns the window if it has no
    /// writes, and the proofs of the written pages, by position in the asks. After a recall there
    /// are no writes.
    fn write(
        &mut self,
        mut window: Window,
        grants: &[Grant],
        ahead: &[Option<Proof>],
    ) -> (Option<Window>, Vec<Option<Proof>>) {
        let mut proofs = vec![None; grants.len()];
        let Some(_reading) = read(self.recall) else {
            let is_granted = |at: &usize| matches!(grants[*at], Grant::Write(_));
            let aborted = (0..grants.len()).filter(is_granted);
            window.landed.extend(aborted.map(|ask| (ask, true)));
            return (Some(window), proofs);
        };
        let bytes_max = self.handed.clamp(HANDED_FIRST_BYTES, MERGE_BYTES_MAX);
        let stretches = self.stretches(&mut window, grants, bytes_max);
        if stretches.is_empty() {
            return (Some(window), proofs);
        }
        let number = self.windows.add(window);
        let mut sum = |pages: &mut Vec<(usize, usize)>| {
            for (ask, page) in pages.drain(..) {
                let at = ask + usize::from(planted!(ShiftedChecksum));
                let known = ahead.get(at).copied().flatten();
                let proof = || checksum(self.shape, &self.pages[page]).into();
                proofs[ask] = Some(known.unwrap_or_else(proof));
            }
        };
        let (mut ops, mut unsummed) = (Vec::new(), Vec::new());
        let mut bytes = 0;
        let last = stretches.len() - 1;
        for (group, mut stretch) in stretches.into_iter().enumerate() {
            unsummed.append(&mut stretch.pages);
            // Before the first submission the device has no work, so the write goes first.
            if self.handed > 0 {
                sum(&mut unsummed);
            }
            bytes += stretch.bytes;
            ops.push(Op {
                volume: stretch.extent.volume,
                action: Action::Write {
                    offset: stretch.extent.offset,
                    buffer: Buffer::Borrowed(stretch.pieces),
                },
                purpose: Purpose::Call,
                deadline: None,
                tag: tag(number, group),
                sink: self.windows.mailbox.clone(),
            });
            let enough = self.handed.clamp(HANDED_FIRST_BYTES, HANDED_BYTES_MAX);
            if bytes < enough && group < last {
                continue;
            }
            self.handed += std::mem::take(&mut bytes);
            self.windows.begin(number, ops.len());
            // SAFETY: the pieces are in the caller's parts, which are borrowed for the whole call,
            // or in the window's own copies. The windows are dropped before either, and wait for
            // every answer; a window that has landed has no outstanding operations. A write only
            // reads the pieces.
            unsafe { self.data.disk.submit(std::mem::take(&mut ops)) };
            // The disk's thread may have been woken on this CPU, and the next checksums would keep
            // the CPU busy: traced, the device had nothing to do for 0.5 ms of a call's 3.4.
            larder_base::runtime::thread::yield_now();
            sum(&mut unsummed);
        }
        (None, proofs)
    }

    /// The adjacent pages of a window, in stretches of at most `bytes_max` or one page. Pages are
    /// dropped if there is no memory to copy them, or if they were not encrypted.
    fn stretches(&self, window: &mut Window, grants: &[Grant], bytes_max: usize) -> Vec<Stretch> {
        let mut stretches: Vec<Stretch> = Vec::new();
        for (ask, grant) in grants.iter().enumerate() {
            let Grant::Write(extent) = *grant else {
                continue;
            };
            let index = window.members[ask];
            let pieces = match window.encoded.piece(ask) {
                Some(piece) => Some(vec![piece]),
                // It never leaves the memory in clear.
                None if self.shape.tenant.is_some() => None,
                None => self.pieces(&self.pages[index], window),
            };
            let Some(pieces) = pieces else {
                window.landed.push((ask, true));
                continue;
            };
            let page_bytes = self.shape.stored_bytes(extent.place);
            let fits = stretches.last().is_some_and(|stretch| {
                stretch.extent.volume == extent.volume
                    && stretch.extent.offset + stretch.bytes as u64 == extent.offset
                    && stretch.bytes + page_bytes <= bytes_max
                    && stretch.pieces.len() + pieces.len() <= PIECES_MAX
            });
            if !fits {
                window.groups.push(Vec::new());
                stretches.push(Stretch {
                    extent,
                    pieces: Vec::with_capacity(pieces.len()),
                    pages: Vec::new(),
                    bytes: 0,
                });
            }
            if let (Some(stretch), Some(group)) = (stretches.last_mut(), window.groups.last_mut()) {
                for piece in pieces {
                    push_piece(&mut stretch.pieces, piece);
                }
                stretch.pages.push((ask, index));
                stretch.bytes += page_bytes;
                group.push(ask);
            }
            window.bytes += page_bytes;
        }
        stretches
    }

    /// The memory to write a page from: its own, or an aligned copy that the window keeps.
    fn pieces(&self, page: &PutPage<'_>, window: &mut Window) -> Option<Vec<Piece>> {
        if is_aligned(self.shape, page) {
            Counters::add(&self.data.counters.direct_pages, 1);
            return Some(
                page.parts
                    .iter()
                    .map(|part| Piece {
                        ptr: part.as_ptr().cast_mut(),
                        len: part.len(),
                    })
                    .collect(),
            );
        }
        let copy = self.bounce(page)?;
        Counters::add(&self.data.counters.bounced_pages, 1);
        let piece = Piece {
            ptr: copy.as_ptr().cast_mut(),
            len: copy.len(),
        };
        window.bounced.push(copy);
        Some(vec![piece])
    }

    /// An aligned copy of a page, each part padded with zeros to whole blocks.
    fn bounce(&self, page: &PutPage<'_>) -> Option<AlignedBuf> {
        let mut copy = AlignedBuf::zeroed(self.page_bytes()).ok()?;
        for (index, part) in page.parts.iter().enumerate() {
            let start = usize::try_from(self.shape.shape.part_offset(index)).ok()?;
            copy.get_mut(start..start + part.len())?
                .copy_from_slice(part);
        }
        Some(copy)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::{IoSlice, IoSliceMut};
    use std::time::Duration;

    use larder_format::PageKey;

    use super::*;
    use crate::api::{GetPage, OpenOptions, PageStore};
    use crate::share::tests::{created, namespace};
    use crate::store::LocalStore;
    use larder_core::hint::Hint;
    use larder_core::status::GetStatus;

    const PAGE_BYTES: u32 = 1 << 20;

    /// A put in which one page finds no room, and all later pages do: another put ended meanwhile.
    struct Tight<'a> {
        inner: Box<dyn Putting + 'a>,
        /// Pages admitted before the refused one.
        left: Option<usize>,
    }

    impl Putting for Tight<'_> {
        fn stay(&mut self) {}

        fn reserve(
            &mut self,
            asks: &[Ask],
            meanwhile: &mut dyn FnMut() -> bool,
        ) -> (ReservationId, Vec<Grant>) {
            let admitted = self.left.unwrap_or(asks.len()).min(asks.len());
            while meanwhile() {}
            let (reservation, mut grants) = self.inner.reserve(&asks[..admitted], meanwhile);
            self.left = self.left.map(|left| left - admitted);
            if admitted < asks.len() {
                self.left = None;
                grants.resize(asks.len(), Grant::Refused(Refusal::Busy));
            }
            (reservation, grants)
        }

        fn commit(&mut self, reservation: ReservationId, proofs: &[Option<Proof>]) {
            let admitted = proofs.iter().take_while(|sum| sum.is_some()).count();
            self.inner.commit(reservation, &proofs[..admitted]);
        }

        fn landed(&mut self, reservations: &[Landed]) {
            assert!(!reservations.is_empty(), "a message for nothing");
            self.inner.landed(reservations);
        }

        fn wait(&mut self, reservations: &[ReservationId]) -> Vec<Vec<PutStatus>> {
            self.inner.wait(reservations)
        }

        fn peek(&mut self, keys: &[PageKey]) -> Vec<bool> {
            self.inner.peek(keys)
        }

        fn room(&self) -> u64 {
            self.inner.room()
        }

        fn wait_for_room(&mut self, _: u64, deadline: Instant) -> bool {
            Instant::now() < deadline
        }
    }

    /// The statuses of a call's pages if the page behind the first `admitted` is refused.
    fn statuses(admitted: usize, wait: Duration) -> Vec<PutStatus> {
        let (_directory, path) = created();
        let store = LocalStore::open(&path, &OpenOptions::default()).unwrap();
        let bytes = AlignedBuf::zeroed(PAGE_BYTES as usize).unwrap();
        let parts = [IoSlice::new(&bytes)];
        let key = |at: u8| PageKey::from_bytes([at; 32]);
        let page = |at: u8| PutPage {
            key: key(at),
            parent: (at > 0).then(|| key(at - 1)),
            depth: at.into(),
            parts: &parts,
        };
        let pages: Vec<PutPage<'_>> = (0..32).map(page).collect();
        let id = store.namespace(&namespace(PAGE_BYTES)).unwrap();
        let shape = store.local.shape(id).unwrap();
        let mut statuses = vec![PutStatus::Refused(Refusal::WrongShape); pages.len()];
        let mut call = Call {
            windows: Windows::default(),
            putting: Box::new(Tight {
                inner: store.local.put(id, Hint::default()),
                left: Some(admitted),
            }),
            made_unix_s: None,
            data: &store.data,
            shape: &shape,
            pages: &pages,
            recall: None,
            statuses: &mut statuses,
            landed: Vec::new(),
            handed: 0,
        };
        let all: Vec<usize> = (0..pages.len()).collect();
        call.store(&all, Instant::now() + wait);
        drop(call);
        let keys: Vec<PageKey> = pages.iter().map(|page| page.key).collect();
        let stored = statuses.iter().map(|status| status.is_present());
        let stored: Vec<bool> = stored.collect();
        assert_eq!(store.contains(id, &keys), stored);
        let mut bytes = AlignedBuf::zeroed(PAGE_BYTES as usize).unwrap();
        for (&key, stored) in keys.iter().zip(stored) {
            let page = GetPage {
                key,
                parts: &mut [IoSliceMut::new(&mut bytes)],
            };
            let got = store.get(id, &mut [page], None);
            assert_eq!(got[0] == GetStatus::Hit, stored, "{got:?}");
        }
        store.close().unwrap();
        statuses
    }

    #[test]
    fn a_put_stores_nothing_after_its_recall_and_keeps_no_room() {
        let (_directory, path) = created();
        let store = LocalStore::open(&path, &OpenOptions::default()).unwrap();
        let bytes = AlignedBuf::zeroed(PAGE_BYTES as usize).unwrap();
        let parts = [IoSlice::new(&bytes)];
        let keys = [1, 2].map(|at| PageKey::from_bytes([at; 32]));
        let pages = keys.map(|key| PutPage {
            key,
            parent: None,
            depth: 0,
            parts: &parts,
        });
        let id = store.namespace(&namespace(PAGE_BYTES)).unwrap();
        let recall = Recall::default();
        let reading = recall.read().unwrap();
        assert!(!recall.recall() && !recall.is_recalled());
        drop(reading);
        assert!(recall.recall() && recall.recall() && recall.read().is_none());
        let options = PutOptions::waiting(Duration::from_secs(60));
        let statuses = store.put_recallable(id, &pages, options, Some(&recall));
        assert_eq!(statuses, [PutStatus::Failed(PutFailure::Write); 2]);
        assert_eq!(store.contains(id, &keys), [false; 2]);
        let statuses = store.put_recallable(id, &pages, options, Some(&Recall::default()));
        assert_eq!(statuses, [PutStatus::Stored; 2]);
        store.close().unwrap();
    }

    #[test]
    fn nothing_behind_a_refused_page_is_stored_before_it() {
        for admitted in [0, 1, 5, 9, 20, 31] {
            let mut expected = vec![PutStatus::Stored; admitted];
            expected.resize(32, PutStatus::Refused(Refusal::Busy));
            assert_eq!(statuses(admitted, Duration::ZERO), expected);
            assert_eq!(
                statuses(admitted, Duration::from_secs(60)),
                [PutStatus::Stored; 32]
            );
        }
    }
}

//! Reading pages that other processes want too: from the device once, through the staging area.
//!
//! A call is cut into windows, and two of them are in flight at once. For each page of a window the
//! owner returns its location, and the role of this process: to read it into a slot of the area, to
//! copy it from one, or neither. The reads are submitted at once. The disk's answer wakes the
//! waiters of a page even if this thread is busy. Then all of the window's pages are copied out in
//! order. If no other process uses the namespace, the rest of the call is read as usual.
//!
//! Invariants:
//! - A copy is private to this process, and is verified after it was made. So other processes
//!   cannot make a page wrong by changing the area: a wrong copy is read from the device again,
//!   into memory of this process alone, as if it had not been shared. Only such a read counts as a
//!   finding about the page.
//! - The pins and slots of a window are released when none of its reads is in flight any more.
//! - No process waits for another one whose reads may wait for it: reads are submitted before any
//!   wait begins, and end without their thread.
//!
//! Faults defended against: a process that is killed, stopped, or slow while others wait for its
//! reads (they wait for at most `PATIENCE` without any page arriving, once a call); reads that
//! fail; bytes and words of the area changed by any process.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use larder_base::ids::NamespaceId;
use larder_base::planted;
use larder_base::runtime::{Condvar, Instant, Mutex, MutexGuard};
use larder_core::grants::{Extent, Finding};
use larder_core::index::ReadAs;
use larder_core::status::{GetStatus, MissReason};
use larder_disk::{
    Action, Buffer, Disk, Done, MERGE_BYTES_MAX, Op, PIECES_MAX, Piece, Purpose, Sink,
};
use larder_format::{BLOCK_BYTES, PageChecksum, PageKey};

use super::get::{Get, Job, Reads, decode, first, fits, is_aligned, take};
use super::hang::Hangs;
use super::{Counters, DataPath};
use crate::api::GetPage;
use crate::catalog::{Catalog, Pinned};
use crate::staging::{Area, Look, Served, Slot, SlotEnd, SlotId};

/// Longest wait for a page that another process reads.
const PATIENCE: Duration = Duration::from_secs(1);

/// Most bytes of a window, and its share of the area. Processes that are a window apart still find
/// each other's pages.
const WINDOW_BYTES_MAX: usize = 32 << 20;
const WINDOWS_IN_AREA: usize = 8;

/// Bytes copied and then verified while they are in the processor's nearest cache.
const COPY_BYTES: usize = 16 << 10;

/// Decides which process reads a page that several want. The pages that it returns are pinned.
pub(crate) trait Stage: Send + Sync {
    /// Finds and pins pages, like [`Catalog::pin`], and decides how each is read. Returns also
    /// whether other processes use the namespace.
    fn stage(&self, namespace: NamespaceId, keys: &[PageKey]) -> (bool, Vec<Option<Staged>>);

    /// Releases the result of `stage`: one pin of each extent's segment, and the slots.
    fn unstage(&self, extents: &[Extent], slots: &[SlotEnd]);

    /// The area with the slots of this namespace's pages; `None` when there is none.
    fn area(&self, namespace: NamespaceId) -> Option<Arc<Area>>;
}

/// A page that may be read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Staged {
    /// Its location.
    pub pinned: Pinned,
    /// Its slot if it is shared; `None` when this process must read it for itself.
    pub slot: Option<Slot>,
}

/// The facts that all windows of a call share.
struct Call<'a> {
    get: Get<'a, dyn Catalog + 'a>,
    stage: &'a dyn Stage,
    area: &'a Arc<Area>,
}

/// Like [`PageStore::get`](crate::api::PageStore::get). `None` when there is no area.
pub(crate) fn get(
    catalog: &dyn Catalog,
    stage: &dyn Stage,
    data: &DataPath,
    namespace: NamespaceId,
    pages: &mut [GetPage<'_, '_>],
    deadline: Option<Instant>,
) -> Option<Vec<GetStatus>> {
    let area = stage.area(namespace)?;
    let Some(shape) = catalog.shape(namespace) else {
        return Some(vec![GetStatus::Miss(MissReason::Absent); pages.len()]);
    };
    let call = Call {
        get: Get {
            catalog,
            data,
            namespace,
            shape: &shape,
            deadline,
            read_as: ReadAs::Use,
        },
        stage,
        area: &area,
    };
    let window_bytes = WINDOW_BYTES_MAX.min(area.bytes() / WINDOWS_IN_AREA);
    let window_pages = (window_bytes / shape.page_bytes()).max(1);
    let mut statuses = Vec::with_capacity(pages.len());
    let mut patience = PATIENCE;
    let mut under_way: Option<Window<'_, '_, '_, '_>> = None;
    let mut rest = pages;
    while !rest.is_empty() {
        let (some, later) = rest.split_at_mut(window_pages.min(rest.len()));
        rest = later;
        let window = Window::begin(&call, some);
        let is_shared = window.is_shared;
        if let Some(before) = under_way.replace(window) {
            before.finish(&mut patience, &mut statuses);
        }
        if !is_shared {
            break;
        }
    }
    // Without other processes there is no reason to go by windows.
    let alone = if rest.is_empty() {
        Vec::new()
    } else {
        super::get::get(catalog, data, namespace, rest, deadline, ReadAs::Use)
    };
    if let Some(window) = under_way {
        window.finish(&mut patience, &mut statuses);
    }
    statuses.extend(alone);
    Some(statuses)
}

/// A shared page.
struct Copy {
    page: usize,
    pinned: Pinned,
    slot: Slot,
    served: Served,
}

/// Some pages of a call. The fields are dropped in order: the reads end before their pins and slots
/// are released.
struct Window<'a, 'b, 'c, 'd> {
    /// Reads of pages that are not shared.
    reads: Reads<'a>,
    fills: Fills,
    held: Held<'a>,
    call: &'a Call<'a>,
    pages: &'b mut [GetPage<'c, 'd>],
    statuses: Vec<GetStatus>,
    /// Other processes use the namespace too.
    is_shared: bool,
}

/// The pins and slots of a window, until they are released.
struct Held<'a> {
    stage: &'a dyn Stage,
    extents: Vec<Extent>,
    copies: Vec<Copy>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let slots: Vec<SlotEnd> = self
            .copies
            .iter()
            .map(|copy| SlotEnd {
                unit: copy.slot.id.unit,
                filled: copy.slot.fill,
                served: copy.served,
            })
            .collect();
        self.stage.unstage(&self.extents, &slots);
    }
}

impl<'a, 'b, 'c, 'd> Window<'a, 'b, 'c, 'd> {
    /// Asks the owner for the pages, and starts the reads assigned to this process.
    fn begin(call: &'a Call<'a>, pages: &'b mut [GetPage<'c, 'd>]) -> Self {
        let mut statuses = vec![GetStatus::Miss(MissReason::Absent); pages.len()];
        let mut asked = Vec::with_capacity(pages.len());
        for (index, page) in pages.iter().enumerate() {
            if fits(call.get.shape, page.parts) {
                asked.push(index);
            } else {
                statuses[index] = GetStatus::Miss(MissReason::WrongShape);
            }
        }
        let keys: Vec<PageKey> = asked.iter().map(|&index| pages[index].key).collect();
        let mut held = Held {
            stage: call.stage,
            extents: Vec::with_capacity(keys.len()),
            copies: Vec::with_capacity(keys.len()),
        };
        let mut jobs = Vec::new();
        let (is_shared, staged) = call.stage.stage(call.get.namespace, &keys);
        for (staged, page) in staged.into_iter().zip(asked) {
            let Some(Staged { pinned, slot }) = staged else {
                continue;
            };
            held.extents.push(pinned.extent);
            match slot {
                Some(slot) => held.copies.push(Copy {
                    page,
                    pinned,
                    slot,
                    served: Served::Well,
                }),
                None => jobs.push(Job { page, pinned }),
            }
        }
        let fills = Fills::start(call, &held.copies);
        let reads = call.get.start(jobs, pages);
        Window {
            reads,
            fills,
            held,
            call,
            pages,
            statuses,
            is_shared,
        }
    }

    /// Copies the pages out, and reads the remaining ones for itself.
    fn finish(mut self, patience: &mut Duration, statuses: &mut Vec<GetStatus>) {
        let call = self.call;
        let mut findings: Vec<(PageKey, Extent, Finding)> = Vec::new();
        let mut alone = Vec::new();
        for copy in &mut self.held.copies {
            let page = &mut self.pages[copy.page];
            match call.wait(copy.slot.id, patience) {
                Look::Ready if let Some(status) = call.copy(copy, page, &mut findings) => {
                    self.statuses[copy.page] = status;
                    Counters::add(&call.get.data.counters.staged_pages, 1);
                    continue;
                }
                Look::Ready => copy.served = Served::Wrongly,
                // If there was no time to wait, the reading process is not slow.
                Look::Filling
                    if call
                        .get
                        .deadline
                        .is_some_and(|until| Instant::now() >= until) => {}
                Look::Filling => copy.served = Served::Late,
                Look::Over => {}
            }
            alone.push(Job {
                page: copy.page,
                pinned: copy.pinned,
            });
        }
        self.reads
            .finish(self.pages, &mut self.statuses, &mut findings);
        let mut reads = call.get.start(alone, self.pages);
        reads.finish(self.pages, &mut self.statuses, &mut findings);
        let mut tried = self.reads.without_their_bytes(&self.statuses);
        tried.append(&mut reads.without_their_bytes(&self.statuses));
        drop(reads);
        self.fills.wait();
        call.get.report(&findings);
        call.get.again(&tried, self.pages, &mut self.statuses);
        statuses.append(&mut self.statuses);
    }
}

impl Call<'_> {
    /// Waits for a page. Patience that was spent on one page is not available for another.
    fn wait(&self, slot: SlotId, patience: &mut Duration) -> Look {
        let left = self.get.deadline.map_or(*patience, |deadline| {
            deadline
                .saturating_duration_since(Instant::now())
                .min(*patience)
        });
        let look = self.area.wait(slot, left);
        if look == Look::Filling {
            *patience = Duration::ZERO;
        }
        look
    }

    /// Copies a page out of its slot. `None` if the copy is wrong.
    fn copy(
        &self,
        copy: &Copy,
        page: &mut GetPage<'_, '_>,
        findings: &mut Vec<(PageKey, Extent, Finding)>,
    ) -> Option<GetStatus> {
        let Get { data, shape, .. } = &self.get;
        let place = copy.pinned.extent.place;
        let stored = shape.stored_bytes(place);
        if shape.tenant.is_some() {
            return self.copy_sealed(copy, page, stored, findings);
        }
        let mut checksum = PageChecksum::new(shape.fingerprint, &page.key);
        let mut private = Vec::new();
        if place.saved > 0 {
            // Decoded from memory that no other process can change.
            if is_aligned(shape, page.parts) {
                let mut offset = 0;
                for part in first(page.parts, stored) {
                    self.copy_part(copy, offset, part, &mut checksum)?;
                    offset += part.len();
                }
            } else {
                private.resize(stored, 0);
                self.copy_part(copy, 0, &mut private, &mut checksum)?;
            }
        } else {
            for (index, part) in page.parts.iter_mut().enumerate() {
                let offset = usize::try_from(shape.shape.part_offset(index)).ok()?;
                self.copy_part(copy, offset, part, &mut checksum)?;
            }
        }
        if !copy.pinned.proof.has_checksum(checksum.finish()) {
            return None;
        }
        if copy.pinned.unproven {
            findings.push((page.key, copy.pinned.extent, Finding::Good));
        }
        let bounced = Some(&private[..]).filter(|bytes| !bytes.is_empty());
        Some(match place.saved {
            0 => GetStatus::Hit,
            _ => decode(&data.decoder, page, &copy.pinned, bounced, stored, findings),
        })
    }

    /// Copies an encrypted page out of its slot, and decrypts the copy, once. The slot stays
    /// encrypted. `None` if the copy is wrong: its tag shows it.
    fn copy_sealed(
        &self,
        copy: &Copy,
        page: &mut GetPage<'_, '_>,
        stored: usize,
        findings: &mut Vec<(PageKey, Extent, Finding)>,
    ) -> Option<GetStatus> {
        let Get { data, shape, .. } = &self.get;
        let mut private = Vec::new();
        if is_aligned(shape, page.parts) {
            let mut offset = 0;
            for part in first(page.parts, stored) {
                self.copy_bytes(copy, offset, part)?;
                offset += part.len();
            }
        } else {
            private.resize(stored, 0);
            self.copy_bytes(copy, 0, &mut private)?;
        }
        let bounced = Some(&mut private[..]).filter(|bytes| !bytes.is_empty());
        let taken = take(&data.decoder, shape, page, &copy.pinned, bounced, findings);
        if planted!(SlotDecryptedInPlace) && taken == Some(GetStatus::Hit) {
            let bytes: Vec<u8> = page.parts.iter().flat_map(|part| part.to_vec()).collect();
            #[cfg(debug_assertions)]
            self.area
                .overwrite(copy.slot.id, &bytes[..bytes.len().min(stored)]);
        }
        taken.inspect(|status| {
            if *status == GetStatus::Miss(MissReason::Sealed) {
                data.notices.sealed();
            }
        })
    }

    fn copy_bytes(&self, copy: &Copy, offset: usize, into: &mut [u8]) -> Option<()> {
        self.area.copy(copy.slot.id, offset, into).then_some(())
    }

    /// Copies some bytes of a slot, and adds them to a checksum: whole blocks, except the last of a
    /// part, which is padded. `None` if the slot has other content by now.
    fn copy_part(
        &self,
        copy: &Copy,
        mut offset: usize,
        into: &mut [u8],
        checksum: &mut PageChecksum,
    ) -> Option<()> {
        for some in into.chunks_mut(COPY_BYTES) {
            if !self.area.copy(copy.slot.id, offset, some) {
                return None;
            }
            checksum.part(some);
            offset += some.len();
        }
        Some(())
    }
}

/// The reads into slots of a window. Dropping it waits for them.
struct Fills {
    filling: Arc<Filling>,
    disk: Arc<dyn Disk>,
    deadline: Option<Instant>,
}

/// Settles each slot as the disk answers: its page is there, or will not come.
struct Filling {
    /// Keeps the memory mapped during the reads.
    area: Arc<Area>,
    hangs: Arc<Hangs>,
    /// By operation: the volume, and the slots read into.
    groups: Vec<(usize, Vec<SlotId>)>,
    left: Mutex<usize>,
    over: Condvar,
}

impl Sink for Filling {
    fn done(&self, answers: Vec<Done>) {
        let count = answers.len();
        for done in answers {
            let group = usize::try_from(done.tag).ok();
            let Some((volume, slots)) = group.and_then(|group| self.groups.get(group)) else {
                continue;
            };
            self.hangs.answered(*volume, &done.result);
            for slot in slots {
                self.area.settle(*slot, done.result.is_ok());
            }
        }
        let mut left = self.left.lock();
        *left -= count;
        if *left == 0 {
            self.over.notify_all();
        }
    }
}

impl Drop for Fills {
    fn drop(&mut self) {
        self.wait();
    }
}

/// One read of adjacent pages into their slots.
struct Group {
    extent: Extent,
    slots: Vec<SlotId>,
    pieces: Vec<Piece>,
}

impl Fills {
    /// Waits until no read is in flight.
    fn wait(&self) {
        let Filling { left, over, .. } = &*self.filling;
        let mut left = left.lock();
        if let Some(deadline) = self.deadline {
            while *left > 0 && !over.wait_until(&mut left, deadline).timed_out() {}
            if *left > 0 {
                // The disk answers expired reads into the sink, which takes the lock to count them.
                MutexGuard::unlocked(&mut left, || self.disk.expire());
            }
        }
        while *left > 0 {
            over.wait(&mut left);
        }
    }

    /// Starts the reads assigned to this process.
    fn start(call: &Call<'_>, copies: &[Copy]) -> Fills {
        let mut pages: Vec<&Copy> = copies.iter().filter(|copy| copy.slot.fill).collect();
        pages.sort_unstable_by_key(|copy| (copy.pinned.extent.volume, copy.pinned.extent.offset));
        let mut groups: VecDeque<Group> = VecDeque::new();
        for copy in pages {
            let (extent, slot) = (copy.pinned.extent, copy.slot.id);
            let bytes = call.get.shape.stored_bytes(extent.place);
            let hung = call.get.data.hangs.is_hung(extent.volume);
            let Some(piece) = call.area.piece(slot, bytes).filter(|_| !hung) else {
                call.area.settle(slot, false);
                continue;
            };
            Counters::add(&call.get.data.counters.bytes_read, bytes as u64);
            let neighbour = groups.back_mut().filter(|group| {
                let read: usize = group.pieces.iter().map(|piece| piece.len).sum();
                group.extent.volume == extent.volume
                    && group.extent.offset + read as u64 == extent.offset
                    && read + bytes <= MERGE_BYTES_MAX
                    && group.pieces.len() < PIECES_MAX
            });
            match neighbour {
                Some(group) => {
                    group.slots.push(slot);
                    group.pieces.push(piece);
                }
                None => groups.push_back(Group {
                    extent,
                    slots: vec![slot],
                    pieces: vec![piece],
                }),
            }
        }
        let filling = Arc::new(Filling {
            area: call.area.clone(),
            hangs: call.get.data.hangs.clone(),
            groups: groups
                .iter()
                .map(|group| (group.extent.volume, group.slots.clone()))
                .collect(),
            left: Mutex::new(groups.len()),
            over: Condvar::new(),
        });
        let hangs = &call.get.data.hangs;
        groups
            .iter()
            .for_each(|group| hangs.asked(group.extent.volume));
        let ops = groups
            .into_iter()
            .zip(0..)
            .map(|(group, tag)| Op {
                volume: group.extent.volume,
                action: Action::Read {
                    offset: group.extent.offset,
                    buffer: Buffer::Borrowed(group.pieces),
                },
                purpose: Purpose::Call,
                deadline: call.get.deadline,
                tag,
                sink: filling.clone(),
            })
            .collect();
        // SAFETY: the pieces are in the area, which every operation's sink keeps mapped until it is
        // answered. No reference into that memory exists; it is only copied from, and the copies
        // are verified.
        unsafe { call.get.data.disk.submit(ops) };
        Fills {
            filling,
            disk: call.get.data.disk.clone(),
            deadline: call.get.deadline,
        }
    }
}

const _: () = assert!(COPY_BYTES.is_multiple_of(BLOCK_BYTES));

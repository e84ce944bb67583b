//! Storing pages: reserve, write, commit.
//!
//! A call is cut into windows of a few megabytes, of which many are in flight at once: while the device writes some, the
//! checksums of the next are computed. A device that is given much finishes it in no particular order, so windows are
//! finished as they land, and the next one is launched as soon as there is room for it among the bytes in flight. Within a
//! window neighbouring pages are written together, and the descriptors go out while the page data is still in flight. A page
//! whose write failed is written once more, in another segment.

use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_format::{BLOCK_BYTES, PageChecksum};

use super::get::push_piece;
use super::{Counters, DataPath};
use crate::api::{NamespaceId, PutFailure, PutOptions, PutPage, PutStatus, Refusal};
use crate::catalog::{Ask, Catalog, Extent, Grant, NamespaceShape, ReservationId};
use crate::disk::mailbox::Mailbox;
use crate::disk::{Action, Buffer, MERGE_BYTES_MAX, Op, PIECES_MAX, Piece};
use crate::memory::AlignedBuf;

/// Bytes of page data reserved and written together.
const WINDOW_BYTES: usize = 8 << 20;

/// Bytes of one call in flight: as much as it takes to keep a device busy that finishes out of order.
const IN_FLIGHT_BYTES: usize = 128 << 20;

/// Longest wait for room: a moment much further off could not be named.
const WAIT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// How long one wait for answers lasts before it is begun again.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn put<C: Catalog + ?Sized>(
    catalog: &C,
    data: &DataPath,
    namespace: NamespaceId,
    pages: &[PutPage<'_>],
    options: PutOptions,
) -> Vec<PutStatus> {
    let mut statuses = vec![PutStatus::Refused(Refusal::WrongShape); pages.len()];
    let Some(shape) = catalog.shape(namespace) else {
        return statuses;
    };
    let fitting: Vec<usize> = (0..pages.len())
        .filter(|&index| fits(&shape, &pages[index]))
        .collect();
    let until = Instant::now() + options.wait.min(WAIT_MAX);
    let call = Call {
        catalog,
        data,
        namespace,
        shape: &shape,
        pages,
    };
    call.store(&fitting, until, &mut statuses);
    let failed: Vec<usize> = fitting
        .into_iter()
        .filter(|&i| statuses[i] == PutStatus::Failed(PutFailure::Write))
        .collect();
    if !failed.is_empty() {
        call.store(&failed, until, &mut statuses);
    }
    let refused = statuses
        .iter()
        .filter(|status| matches!(status, PutStatus::Refused(_)));
    Counters::add(&data.counters.refused, refused.count() as u64);
    statuses
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

/// What all windows of one call share.
struct Call<'a, C: Catalog + ?Sized> {
    catalog: &'a C,
    data: &'a DataPath,
    namespace: NamespaceId,
    shape: &'a NamespaceShape,
    pages: &'a [PutPage<'a>],
}

/// Some pages of a call, between their reservation and their statuses.
struct Window {
    /// Positions among the pages of the call, by position in the asks.
    members: Vec<usize>,
    reservation: ReservationId,
    /// By operation: positions in the asks.
    groups: Vec<Vec<usize>>,
    /// Operations with the disk.
    left: usize,
    bytes: usize,
    landed: Vec<(usize, bool)>,
    /// Positions in the asks of pages that there was no memory to copy.
    given_up: Vec<usize>,
    /// Aligned copies of pages whose own memory is not.
    bounced: Vec<AlignedBuf>,
}

/// The windows of a call that are with the disk. Dropping them waits for it: the memory is the caller's.
#[derive(Default)]
struct Windows {
    /// By number of launch; `None` once landed.
    list: Vec<Option<Window>>,
    mailbox: Arc<Mailbox>,
    /// Operations with the disk.
    left: usize,
    /// Bytes with the disk.
    bytes: usize,
}

impl Windows {
    /// Waits for answers; the windows that have landed with them.
    fn wait(&mut self) -> Vec<Window> {
        let mut landed = Vec::new();
        for done in self.mailbox.take(PATIENCE) {
            self.left -= 1;
            let (number, group) = untag(done.tag);
            let Some(slot) = self.list.get_mut(number) else {
                continue;
            };
            let Some(window) = slot else { continue };
            window.left -= 1;
            let pages = window.groups.get(group).into_iter().flatten();
            window
                .landed
                .extend(pages.map(|&ask| (ask, done.result.is_ok())));
            if window.left == 0 {
                self.bytes -= window.bytes;
                landed.extend(slot.take());
            }
        }
        landed
    }
}

impl Drop for Windows {
    fn drop(&mut self) {
        while self.left > 0 {
            self.wait();
        }
    }
}

/// An operation's tag: its window's number and its own within the window.
fn tag(window: usize, group: usize) -> u64 {
    (window as u64) << 32 | group as u64
}

fn untag(tag: u64) -> (usize, usize) {
    let part = |part: u64| usize::try_from(part).unwrap_or(usize::MAX);
    (part(tag >> 32), part(tag & u64::from(u32::MAX)))
}

impl<C: Catalog + ?Sized> Call<'_, C> {
    /// Stores the pages at these positions and fills in their statuses.
    fn store(&self, members: &[usize], until: Instant, statuses: &mut [PutStatus]) {
        let page_bytes = self.shape.shape.page_blocks() as usize * BLOCK_BYTES;
        let window_pages = (WINDOW_BYTES / page_bytes).max(1);
        let mut windows = Windows::default();
        let mut landed: Vec<(ReservationId, Vec<usize>)> = Vec::new();
        let mut rest = members;
        while !rest.is_empty() {
            let count = window_pages.min(rest.len());
            while windows.left > 0 && windows.bytes + count * page_bytes > IN_FLIGHT_BYTES {
                self.land(windows.wait(), &mut landed);
            }
            let seen = self.catalog.room();
            let (admitted, refusal) = self.launch(&rest[..count], &mut windows, &mut landed);
            let Some(why) = refusal else {
                rest = &rest[count..];
                continue;
            };
            rest = &rest[admitted..];
            // What is in flight may be what there is no room beside.
            while windows.left > 0 {
                self.land(windows.wait(), &mut landed);
            }
            let waits = matches!(why, Refusal::NoSpace | Refusal::Busy) && Instant::now() < until;
            if !waits || !self.catalog.wait_for_room(seen, until) {
                for &index in rest {
                    statuses[index] = PutStatus::Refused(why);
                }
                break;
            }
        }
        while windows.left > 0 {
            self.land(windows.wait(), &mut landed);
        }
        for (reservation, members) in landed {
            for (index, status) in members.into_iter().zip(self.catalog.wait(reservation)) {
                statuses[index] = status;
            }
        }
    }

    /// Tells the catalog of windows whose writes are over.
    fn land(&self, windows: Vec<Window>, landed: &mut Vec<(ReservationId, Vec<usize>)>) {
        for window in windows {
            self.catalog.landed(window.reservation, &window.landed);
            landed.push((window.reservation, window.members));
        }
    }

    /// Reserves, starts the writes, and commits. Returns how many pages were admitted, and why the next one was not.
    fn launch(
        &self,
        members: &[usize],
        windows: &mut Windows,
        landed: &mut Vec<(ReservationId, Vec<usize>)>,
    ) -> (usize, Option<Refusal>) {
        let asks: Vec<Ask> = members
            .iter()
            .map(|&index| {
                let page = &self.pages[index];
                Ask {
                    key: page.key,
                    parent: page.parent,
                    depth: page.depth,
                }
            })
            .collect();
        let (reservation, grants) = self.catalog.reserve(self.namespace, &asks);
        let refused = grants
            .iter()
            .position(|grant| matches!(grant, Grant::Refused(_)));
        let refusal = refused.and_then(|at| match grants[at] {
            Grant::Refused(why) => Some(why),
            _ => None,
        });
        let admitted = refused.unwrap_or(members.len());
        let window = Window {
            members: members[..admitted].to_vec(),
            reservation,
            groups: Vec::new(),
            left: 0,
            bytes: 0,
            landed: Vec::with_capacity(grants.len()),
            given_up: Vec::new(),
            bounced: Vec::new(),
        };
        let (idle, given_up) = self.write(window, &grants, windows);
        let checksums: Vec<Option<u64>> = grants
            .iter()
            .enumerate()
            .map(|(ask, grant)| {
                let written = matches!(grant, Grant::Write(_)) && !given_up.contains(&ask);
                written.then(|| self.checksum(&self.pages[members[ask]]))
            })
            .collect();
        self.catalog.commit(reservation, &checksums);
        self.land(idle.into_iter().collect(), landed);
        (admitted, refusal)
    }

    fn checksum(&self, page: &PutPage<'_>) -> u64 {
        let mut checksum = PageChecksum::new(self.shape.fingerprint, &page.key);
        for part in page.parts {
            checksum.part(part);
        }
        checksum.finish()
    }

    /// Starts the writes of a window. One without any is given back, and so are the pages that are given up.
    fn write(
        &self,
        mut window: Window,
        grants: &[Grant],
        windows: &mut Windows,
    ) -> (Option<Window>, Vec<usize>) {
        let page_bytes = self.shape.shape.page_blocks() as usize * BLOCK_BYTES;
        let mut writes: Vec<(Extent, Vec<Piece>)> = Vec::new();
        for (ask, grant) in grants.iter().enumerate() {
            let Grant::Write(extent) = *grant else {
                continue;
            };
            let page = &self.pages[window.members[ask]];
            let Some(pieces) = self.pieces(page, page_bytes, &mut window) else {
                window.landed.push((ask, true));
                window.given_up.push(ask);
                continue;
            };
            let group = window.groups.last_mut().filter(|group| {
                writes.last().is_some_and(|(first, so_far)| {
                    first.volume == extent.volume
                        && first.offset + (group.len() * page_bytes) as u64 == extent.offset
                        && (group.len() + 1) * page_bytes <= MERGE_BYTES_MAX
                        && so_far.len() + pieces.len() <= PIECES_MAX
                })
            });
            match (group, writes.last_mut()) {
                (Some(group), Some((_, so_far))) => {
                    group.push(ask);
                    pieces
                        .into_iter()
                        .for_each(|piece| push_piece(so_far, piece));
                }
                _ => {
                    window.groups.push(vec![ask]);
                    let mut joined = Vec::with_capacity(pieces.len());
                    pieces
                        .into_iter()
                        .for_each(|piece| push_piece(&mut joined, piece));
                    writes.push((extent, joined));
                }
            }
            window.bytes += page_bytes;
        }
        let given_up = std::mem::take(&mut window.given_up);
        if writes.is_empty() {
            return (Some(window), given_up);
        }
        let number = windows.list.len();
        let ops: Vec<Op> = writes
            .into_iter()
            .enumerate()
            .map(|(group, (extent, pieces))| Op {
                volume: extent.volume,
                action: Action::Write {
                    offset: extent.offset,
                    buffer: Buffer::Borrowed(pieces),
                },
                deadline: None,
                tag: tag(number, group),
                sink: windows.mailbox.clone(),
            })
            .collect();
        window.left = ops.len();
        windows.left += ops.len();
        windows.bytes += window.bytes;
        windows.list.push(Some(window));
        // SAFETY: the pieces lie in the caller's parts, which are borrowed for the whole call, or in the window's own copies. The
        // windows are dropped before either, and wait for every answer; a window that has landed has none outstanding. A write
        // only reads them.
        unsafe { self.data.disk.submit(ops) };
        (None, given_up)
    }

    /// The memory to write a page from: its own, or an aligned copy that the window keeps.
    fn pieces(
        &self,
        page: &PutPage<'_>,
        page_bytes: usize,
        window: &mut Window,
    ) -> Option<Vec<Piece>> {
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
        let copy = self.bounce(page, page_bytes)?;
        Counters::add(&self.data.counters.bounced_pages, 1);
        let piece = Piece {
            ptr: copy.as_ptr().cast_mut(),
            len: copy.len(),
        };
        window.bounced.push(copy);
        Some(vec![piece])
    }

    /// An aligned copy of a page, each part padded with zeros to whole blocks.
    fn bounce(&self, page: &PutPage<'_>, page_bytes: usize) -> Option<AlignedBuf> {
        let mut copy = AlignedBuf::zeroed(page_bytes).ok()?;
        for (index, part) in page.parts.iter().enumerate() {
            let start = usize::try_from(self.shape.shape.part_offset(index)).ok()?;
            copy.get_mut(start..start + part.len())?
                .copy_from_slice(part);
        }
        Some(copy)
    }
}

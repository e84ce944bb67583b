//! Storing pages: reserve, write, commit.
//!
//! A call is cut into windows of a few megabytes, of which many are in flight at once: while the device writes some, the
//! checksums of the next are computed. A device that is given much finishes it in no particular order, so windows are
//! finished as they land, and the next one is launched as soon as there is room for it among the bytes in flight. Within a
//! window neighbouring pages are written together, each stretch as soon as its checksums are there: what the processor has
//! just read the device finds in the cache, where caches serve devices, and memory is read once instead of twice. The
//! descriptors go out while the page data is still in flight. A page whose write failed is written once more, in another segment.

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

/// Bytes of the first window of a call that takes several: little, so that the device soon has work, and the rest is prepared while it
/// does it.
const FIRST_WINDOW_BYTES: usize = 512 << 10;

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
    /// Aligned copies of pages whose own memory is not.
    bounced: Vec<AlignedBuf>,
}

/// Pages of a window that lie together and are written together.
struct Stretch {
    extent: Extent,
    pieces: Vec<Piece>,
    /// By position in the asks, and among the pages of the call.
    pages: Vec<(usize, usize)>,
    bytes: usize,
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
    /// Takes a window in, whose operations are about to begin; its number.
    fn add(&mut self, window: Window) -> usize {
        self.bytes += window.bytes;
        self.list.push(Some(window));
        self.list.len() - 1
    }

    /// So many more operations of a window are with the disk.
    fn begin(&mut self, number: usize, ops: usize) {
        self.left += ops;
        if let Some(Some(window)) = self.list.get_mut(number) {
            window.left += ops;
        }
    }

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
        let mut window_bytes = match members.len() * page_bytes {
            0..=WINDOW_BYTES => WINDOW_BYTES,
            _ => FIRST_WINDOW_BYTES,
        };
        let mut windows = Windows::default();
        let mut landed: Vec<(ReservationId, Vec<usize>)> = Vec::new();
        let mut rest = members;
        while !rest.is_empty() {
            let count = (window_bytes / page_bytes).max(1).min(rest.len());
            while windows.left > 0 && windows.bytes + count * page_bytes > IN_FLIGHT_BYTES {
                self.land(windows.wait(), &mut landed);
            }
            let seen = self.catalog.room();
            let (admitted, refusal) = self.launch(&rest[..count], &mut windows, &mut landed);
            window_bytes = WINDOW_BYTES;
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
        let (reservations, members): (Vec<_>, Vec<_>) = landed.into_iter().unzip();
        for (members, settled) in members.iter().zip(self.catalog.wait_all(&reservations)) {
            for (&index, status) in members.iter().zip(settled) {
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
            bounced: Vec::new(),
        };
        let (idle, checksums) = self.write(window, &grants, windows);
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

    /// Computes the checksums of a window's pages and starts their writes, one stretch after the other. A window without any is
    /// given back. By position in the asks: the checksums of the pages that are written.
    fn write(
        &self,
        mut window: Window,
        grants: &[Grant],
        windows: &mut Windows,
    ) -> (Option<Window>, Vec<Option<u64>>) {
        let mut checksums = vec![None; grants.len()];
        let stretches = self.stretches(&mut window, grants);
        if stretches.is_empty() {
            return (Some(window), checksums);
        }
        let number = windows.add(window);
        let mut ops = Vec::new();
        let mut bytes = 0;
        let last = stretches.len() - 1;
        for (group, stretch) in stretches.into_iter().enumerate() {
            for (ask, page) in stretch.pages {
                checksums[ask] = Some(self.checksum(&self.pages[page]));
            }
            bytes += stretch.bytes;
            ops.push(Op {
                volume: stretch.extent.volume,
                action: Action::Write {
                    offset: stretch.extent.offset,
                    buffer: Buffer::Borrowed(stretch.pieces),
                },
                deadline: None,
                tag: tag(number, group),
                sink: windows.mailbox.clone(),
            });
            if bytes < MERGE_BYTES_MAX && group < last {
                continue;
            }
            bytes = 0;
            windows.begin(number, ops.len());
            // SAFETY: the pieces lie in the caller's parts, which are borrowed for the whole call, or in the window's own copies. The
            // windows are dropped before either, and wait for every answer; a window that has landed has none outstanding. A
            // write only reads them.
            unsafe { self.data.disk.submit(std::mem::take(&mut ops)) };
        }
        (None, checksums)
    }

    /// What of a window lies together. Pages that there is no memory to copy are given up.
    fn stretches(&self, window: &mut Window, grants: &[Grant]) -> Vec<Stretch> {
        let page_bytes = self.shape.shape.page_blocks() as usize * BLOCK_BYTES;
        let mut stretches: Vec<Stretch> = Vec::new();
        for (ask, grant) in grants.iter().enumerate() {
            let Grant::Write(extent) = *grant else {
                continue;
            };
            let index = window.members[ask];
            let Some(pieces) = self.pieces(&self.pages[index], page_bytes, window) else {
                window.landed.push((ask, true));
                continue;
            };
            let fits = stretches.last().is_some_and(|stretch| {
                stretch.extent.volume == extent.volume
                    && stretch.extent.offset + stretch.bytes as u64 == extent.offset
                    && stretch.bytes + page_bytes <= MERGE_BYTES_MAX
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

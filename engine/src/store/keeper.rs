//! The housekeeping thread: ticks the core when something falls due, and moves pages out of segments that are reclaimed.
//!
//! It sleeps until it is called. Moving a page is a put that keeps the page's birth: read, verify, write elsewhere, commit. A page that
//! fails its checksum on the way is forgotten, not copied.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use larder_format::{BLOCK_BYTES, DescriptorBlock, PageChecksum, StoreId, Superblock};

use super::get::is_of_the_medium;
use super::local::Local;
use crate::catalog::{Catalog, Extent, Finding, Grant};
use crate::core::{Move, Victim};
use crate::disk::mailbox::{Mailbox, ReadAt, read_all};
use crate::disk::{Action, Buffer, Disk, MERGE_BYTES_MAX, Op, Piece};
use crate::error::StoreError;
use crate::memory::AlignedBuf;
use crate::recovery::scan::Spot;

/// Bytes of pages moved at once.
const MOVE_BYTES: u64 = 8 << 20;

/// Descriptor blocks of a victim read at once.
const WINDOW_BLOCKS: u32 = 256;

/// How long one wait for answers lasts before it is begun again.
const PATIENCE: Duration = Duration::from_secs(60);

/// The running thread.
pub(super) struct Keeper {
    local: Arc<Local>,
    thread: JoinHandle<()>,
}

impl Keeper {
    pub(super) fn start(local: Arc<Local>, superblock: &Superblock) -> Result<Keeper, StoreError> {
        let place = Place {
            store: superblock.store,
            segment_blocks: superblock.segment_blocks,
        };
        let worker = local.clone();
        let thread = std::thread::Builder::new()
            .name("larder-keeper".to_owned())
            .spawn(move || run(&worker, place))
            .map_err(|e| {
                StoreError::io(
                    "starting the housekeeping thread",
                    std::path::Path::new("thread"),
                    e,
                )
            })?;
        local.with_core(crate::core::Core::start);
        Ok(Keeper { local, thread })
    }

    /// Lets it finish the pages it is moving, and ends it.
    pub(super) fn stop(self) {
        self.local.errands.lock().stop = true;
        self.local.errand.notify_one();
        if self.thread.join().is_err() {
            tracing::error!(
                "the housekeeping thread panicked; the store recovers at the next open"
            );
        }
    }
}

/// What a victim's blocks are recognised by.
#[derive(Clone, Copy)]
struct Place {
    store: StoreId,
    segment_blocks: u32,
}

fn run(local: &Local, place: Place) {
    loop {
        let mut errands = local.errands.lock();
        while !errands.stop && !errands.reclaim {
            match errands.wake_at {
                Some(at) => {
                    let now = local.now_ms();
                    if at <= now {
                        break;
                    }
                    local
                        .errand
                        .wait_for(&mut errands, Duration::from_millis(at - now));
                }
                None => local.errand.wait(&mut errands),
            }
        }
        if errands.stop {
            return;
        }
        errands.reclaim = false;
        errands.wake_at = None;
        drop(errands);
        local.with_core(|_| ());
        while let Some(victim) = local.with_core(crate::core::Core::next_victim) {
            let moved_all = empty(local, place, &victim);
            let released = local.with_core(|core| core.finish_victim(&victim, moved_all));
            if !released || local.errands.lock().stop {
                break;
            }
        }
    }
}

/// Moves what is worth it out of a victim; false when some page found no room, or when something could not be read that a
/// later try may be able to.
fn empty(local: &Local, place: Place, victim: &Victim) -> bool {
    let Some(blocks) = read_blocks(local.disk.as_ref(), place, victim) else {
        return false;
    };
    let moves = local.with_core(|core| core.plan(victim, &blocks));
    let mut rest = moves.as_slice();
    while !rest.is_empty() {
        let mut bytes = 0;
        let count = rest
            .iter()
            .take_while(|page| {
                bytes += u64::from(page.record.blocks) * BLOCK_BYTES as u64;
                bytes <= MOVE_BYTES
            })
            .count()
            .max(1);
        let (now, later) = rest.split_at(count);
        if !move_pages(local, now) || local.errands.lock().stop {
            return false;
        }
        rest = later;
    }
    true
}

/// The victim's descriptor blocks, but for damaged ones. `None` when one could not be read: unreadable is not the same as
/// empty.
fn read_blocks(disk: &dyn Disk, place: Place, victim: &Victim) -> Option<Vec<DescriptorBlock>> {
    let Place {
        store,
        segment_blocks,
    } = place;
    let spot = Spot {
        store,
        volume: victim.volume,
        number: victim.number,
        segment_blocks,
    };
    let mut blocks = Vec::with_capacity(victim.blocks as usize);
    let mut next = 0;
    while next < victim.blocks {
        let count = WINDOW_BLOCKS.min(victim.blocks - next);
        let bytes = read_all(disk, &[spot.blocks(next, count)]).pop()?.ok()?;
        for (bytes, index) in bytes.rchunks_exact(BLOCK_BYTES).zip(next..) {
            if let Ok(block) = spot.parse_block(index, bytes)
                && block.header.sequence == victim.sequence
            {
                blocks.push(block);
            }
        }
        next += count;
    }
    Some(blocks)
}

/// A page on its way: its bytes, and where they go.
struct Moving {
    index: usize,
    bytes: AlignedBuf,
    to: Extent,
}

/// Moves some pages; false when one found no room or its write failed.
fn move_pages(local: &Local, moves: &[Move]) -> bool {
    let (reservation, grants) = local.with_core(|core| core.reserve_copies(moves));
    let extents: Vec<Extent> =
        local.with_core(|core| moves.iter().map(|page| core.extent(page.from)).collect());
    let granted: Vec<(usize, Extent)> = grants
        .iter()
        .enumerate()
        .filter_map(|(index, grant)| match grant {
            Grant::Write(extent) => Some((index, *extent)),
            _ => None,
        })
        .collect();
    let reads: Vec<ReadAt> = granted
        .iter()
        .map(|(index, _)| ReadAt {
            volume: extents[*index].volume,
            offset: extents[*index].offset,
            bytes: moves[*index].record.blocks as usize * BLOCK_BYTES,
        })
        .collect();
    let mut checksums = vec![None; moves.len()];
    let mut good = Vec::with_capacity(granted.len());
    let mut over = Vec::new();
    let mut complete = !grants
        .iter()
        .any(|grant| matches!(grant, Grant::Refused(_)));
    for ((index, to), bytes) in granted
        .into_iter()
        .zip(read_all(local.disk.as_ref(), &reads))
    {
        let page = &moves[index];
        let finding = match bytes {
            Ok(bytes) => match check(page, &bytes) {
                Finding::Good => {
                    checksums[index] = Some(page.record.checksum);
                    good.push(Moving { index, bytes, to });
                    continue;
                }
                finding => Some(finding),
            },
            Err(error) if is_of_the_medium(&error) => Some(Finding::Unreadable),
            Err(_) => None,
        };
        over.push((index, true));
        match finding {
            Some(finding) => local.with_core(|core| {
                core.found(page.namespace, &page.record.key, page.from, finding);
            }),
            None => complete = false,
        }
    }
    local.with_core(|core| core.commit(reservation, &checksums));
    over.extend(write(local.disk.as_ref(), &good));
    local.with_core(|core| core.landed(reservation, &over));
    let statuses = local.wait(reservation);
    complete
        && good.iter().all(|page| {
            statuses
                .get(page.index)
                .is_some_and(|status| status.is_present())
        })
}

fn check(page: &Move, bytes: &[u8]) -> Finding {
    let mut checksum = PageChecksum::new(page.record.namespace, &page.record.key);
    checksum.blocks(bytes);
    if checksum.finish() == page.record.checksum {
        Finding::Good
    } else {
        Finding::Mismatch
    }
}

/// Writes pages, neighbours together; says of each whether it went well.
fn write(disk: &dyn Disk, pages: &[Moving]) -> Vec<(usize, bool)> {
    let mailbox = Arc::new(Mailbox::default());
    let mut groups: Vec<&[Moving]> = Vec::new();
    let mut rest = pages;
    while !rest.is_empty() {
        let mut bytes = 0;
        let mut count = 0;
        let mut end = (rest[0].to.volume, rest[0].to.offset);
        for page in rest {
            let fits = count == 0 || bytes + page.bytes.len() <= MERGE_BYTES_MAX;
            if !fits || (page.to.volume, page.to.offset) != end {
                break;
            }
            bytes += page.bytes.len();
            end.1 += page.bytes.len() as u64;
            count += 1;
        }
        let (group, later) = rest.split_at(count.max(1));
        groups.push(group);
        rest = later;
    }
    let ops: Vec<Op> = groups
        .iter()
        .zip(0..)
        .map(|(group, tag)| {
            let pieces = group
                .iter()
                .map(|page| Piece {
                    ptr: page.bytes.as_ptr().cast_mut(),
                    len: page.bytes.len(),
                })
                .collect();
            Op {
                volume: group[0].to.volume,
                action: Action::Write {
                    offset: group[0].to.offset,
                    buffer: Buffer::Borrowed(pieces),
                },
                deadline: None,
                tag,
                sink: mailbox.clone(),
            }
        })
        .collect();
    let mut left = ops.len();
    // SAFETY: the pieces lie in `pages`, which outlives the loop below, and that ends only when every operation has been
    // answered; a write only reads them.
    unsafe { disk.submit(ops) };
    let mut results = Vec::with_capacity(pages.len());
    while left > 0 {
        for done in mailbox.take(PATIENCE) {
            left -= 1;
            let group = usize::try_from(done.tag)
                .ok()
                .and_then(|tag| groups.get(tag));
            results.extend(
                group
                    .into_iter()
                    .copied()
                    .flatten()
                    .map(|page| (page.index, done.result.is_ok())),
            );
        }
    }
    results
}

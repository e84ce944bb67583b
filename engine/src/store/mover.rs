//! Moving pages from one segment to another: read, verify, write elsewhere, commit. It is a put that keeps the pages' births.
//!
//! Everything that rewrites pages does it here: reclaim while a store is in use, repair and compaction while it is not. A page is
//! copied before anything says that the old place is free, and the core gives that back only when the copies are synced: a
//! kill at any moment leaves at least one whole copy of each page. A page that fails its checksum on the way is forgotten, not
//! copied.

use std::sync::Arc;
use std::time::Duration;

use larder_format::{BLOCK_BYTES, DescriptorBlock, PageChecksum};

use super::get::is_of_the_medium;
use super::local::Local;
use crate::catalog::{Allocator, Extent, Finding, Grant};
use crate::core::{Move, Victim};
use crate::disk::mailbox::{Mailbox, ReadAt, read_all};
use crate::disk::{Action, Buffer, Disk, MERGE_BYTES_MAX, Op, Piece};
use crate::memory::AlignedBuf;
use crate::recovery::scan::{Spot, read_window};

/// Descriptor blocks of a victim read at once.
const WINDOW_BLOCKS: u32 = 256;

/// How long one wait for answers lasts before it is begun again.
const PATIENCE: Duration = Duration::from_secs(60);

/// The descriptor blocks of a victim's life.
pub(crate) struct VictimBlocks {
    /// Those that are whole.
    pub whole: Vec<DescriptorBlock>,
    /// Whether the device would not give some: unreadable is not the same as empty.
    pub some_unreadable: bool,
}

/// Reads a victim's descriptor blocks. `spot` is where it lies.
pub(crate) fn read_blocks(disk: &dyn Disk, spot: &Spot, victim: &Victim) -> VictimBlocks {
    let mut blocks = VictimBlocks {
        whole: Vec::with_capacity(victim.blocks as usize),
        some_unreadable: false,
    };
    let mut next = 0;
    while next < victim.blocks {
        let count = WINDOW_BLOCKS.min(victim.blocks - next);
        let window = read_window(disk, spot, next, count);
        for (bytes, index) in window.blocks().zip(next..) {
            let Ok(bytes) = bytes else {
                blocks.some_unreadable = true;
                continue;
            };
            if let Ok(block) = spot.parse_twice(disk, index, victim.sequence, bytes)
                && block.header.sequence == victim.sequence
            {
                blocks.whole.push(block);
            }
        }
        next += count;
    }
    blocks
}

/// How many of `moves`, at least one, are moved together when that is done `limit` bytes at a time.
pub(crate) fn batch(moves: &[Move], limit: u64) -> usize {
    let mut bytes = 0;
    let fitting = moves.iter().take_while(|page| {
        bytes += u64::from(page.record.blocks) * BLOCK_BYTES as u64;
        bytes <= limit
    });
    fitting.count().clamp(1, moves.len().max(1))
}

/// A page on its way: its bytes, and where they go.
struct Moving {
    index: usize,
    bytes: AlignedBuf,
    to: Extent,
}

/// Moves some pages, in this order; false when one found no room, its write failed, or it could not be read this time.
pub(crate) fn move_pages(local: &Local, moves: &[Move]) -> bool {
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

//! Moving pages from one segment to another: read, verify, write elsewhere, commit. It is a put
//! that keeps the pages' versions.
//!
//! All code that rewrites pages uses this module: reclaim while a store is in use, repair and
//! compaction while it is not. A page is copied before its old place is marked free, and the core
//! releases the old segment only when the copies are synced: a kill at any moment leaves at least
//! one whole copy of each page. A page that fails its checksum on the way is dropped, not copied.
//!
//! The stored bytes move as they are. Only a renewal of keys (`Keys::renew`) encrypts the pages
//! of former keys anew on the way.

use std::sync::Arc;
use std::time::Duration;

use larder_base::memory::AlignedBuf;
use larder_base::planted;
use larder_core::core::{Copied, Move, PageCopy};
use larder_core::grants::{Extent, Finding};
use larder_core::status::PutStatus;
use larder_disk::mailbox::{Mailbox, ReadAt, read_all};
use larder_disk::{Action, Buffer, Disk, MERGE_BYTES_MAX, Op, Piece, Purpose};
use larder_format::{BLOCK_BYTES, PageChecksum, PageRecord, Proof};

use super::local::Local;
use crate::catalog::Allocator;
use crate::keys::{Keys, Unrenewed};

/// Longest single wait for answers. After it the wait begins again.
const PATIENCE: Duration = Duration::from_secs(60);

/// Copies pages for a tool that has the store to itself. Pages that do not exist any more are
/// duplicates.
pub fn move_pages(local: &Local, moves: &[Move]) -> Vec<PutStatus> {
    let reservation = local.with_core(|core| core.copy(moves));
    local.wait(reservation)
}

/// A page in transit: its position among the pages to copy, its bytes, and its target.
struct Moving {
    at: usize,
    bytes: AlignedBuf,
    to: Extent,
    proof: Proof,
}

/// Reads pages, verifies them, and writes the good ones to their new places.
pub(crate) fn copy(disk: &dyn Disk, keys: Option<&Keys>, pages: &[PageCopy]) -> Vec<Copied> {
    let reads: Vec<ReadAt> = pages
        .iter()
        .map(|copy| ReadAt {
            volume: copy.from.volume,
            offset: copy.from.offset,
            bytes: copy.page.record.stored as usize * BLOCK_BYTES,
        })
        .collect();
    let mut outcomes = vec![Copied::NotRead; pages.len()];
    let mut good = Vec::with_capacity(pages.len());
    for ((at, copy), bytes) in pages.iter().enumerate().zip(read_all(disk, &reads)) {
        match bytes {
            Ok(mut bytes) if is_good(&copy.page, &bytes) => {
                match proof(keys, &copy.page.record, &mut bytes) {
                    Ok(proof) => good.push(Moving {
                        at,
                        bytes,
                        to: copy.to,
                        proof,
                    }),
                    Err(outcome) => outcomes[at] = outcome,
                }
            }
            Ok(_) => outcomes[at] = Copied::Damaged(Finding::Mismatch),
            Err(error) if error.is_of_the_medium() => {
                outcomes[at] = Copied::Damaged(Finding::Unreadable);
            }
            Err(_) => {}
        }
    }
    for (page, is_written) in write(disk, &good) {
        outcomes[page.at] = if is_written || planted!(IgnoredMove) {
            Copied::Written(page.proof)
        } else {
            Copied::NotWritten
        };
    }
    outcomes
}

/// The proof of a page's bytes, which are encrypted anew if their key is renewed. A page that its
/// key does not open is dropped then: nothing would open it after the renewal.
fn proof(keys: Option<&Keys>, page: &PageRecord, bytes: &mut [u8]) -> Result<Proof, Copied> {
    match keys.and_then(|keys| keys.renewed(page, bytes)) {
        None => Ok(Proof {
            checksum: page.checksum,
            seal: page.seal,
        }),
        Some(Ok(proof)) => Ok(proof),
        Some(Err(Unrenewed::Unopened)) => Err(Copied::Damaged(Finding::Mismatch)),
        Some(Err(Unrenewed::NotSealed)) => Err(Copied::NotRead),
    }
}

fn is_good(page: &Move, bytes: &[u8]) -> bool {
    let mut checksum = PageChecksum::new(page.record.namespace, &page.record.key);
    checksum.blocks(bytes);
    checksum.finish() == page.record.checksum
}

/// Writes pages, neighbours together. Returns for each whether the write succeeded.
fn write<'p>(disk: &dyn Disk, pages: &'p [Moving]) -> Vec<(&'p Moving, bool)> {
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
                purpose: Purpose::Background,
                deadline: None,
                tag,
                sink: mailbox.clone(),
            }
        })
        .collect();
    let mut left = ops.len();
    // SAFETY: the pieces are in `pages`, which outlives the loop below, and the loop ends only when
    // every operation has been answered; a write only reads them.
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
                    .map(|page| (page, done.result.is_ok())),
            );
        }
    }
    results
}

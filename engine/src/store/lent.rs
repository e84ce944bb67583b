//! Reading pages into memory of the store's own, for callers that do not wait for all of them: what the deadline finds missing is
//! still read, and its pins are given back by the disk's answer.
//!
//! A page whose bytes are not its own is a miss here, and not asked for again.

use std::sync::Arc;
use std::time::Instant;

use larder_format::{BLOCK_BYTES, PageChecksum, PageKey};
use parking_lot::Mutex;

use super::get::{failed, judge};
use super::hang::Hangs;
use super::{Counters, DataPath};
use crate::api::{GetStatus, LentPage, MissReason, NamespaceId};
use crate::catalog::{Catalog, Extent, Finding, NamespaceShape, Pinned};
use crate::disk::mailbox::Mailbox;
use crate::disk::{Action, Buffer, Done, Op, Sink};
use crate::memory::AlignedBuf;

/// Keeps the pins of reads that a call no longer waits for.
struct LentReads {
    catalog: Arc<dyn Catalog>,
    hangs: Arc<Hangs>,
    extents: Mutex<Vec<Option<Extent>>>,
    mailbox: Mailbox,
}

impl Sink for LentReads {
    fn done(&self, answers: Vec<Done>) {
        for done in &answers {
            let extent = usize::try_from(done.tag)
                .ok()
                .and_then(|tag| self.extents.lock().get_mut(tag)?.take());
            if let Some(extent) = extent {
                self.hangs.answered(extent.volume);
                self.catalog.unpin(&[extent]);
            }
        }
        self.mailbox.done(answers);
    }
}

/// See [`PageStore::get_lent`](crate::PageStore::get_lent).
pub(super) fn get(
    catalog: &Arc<dyn Catalog>,
    data: &DataPath,
    namespace: NamespaceId,
    keys: &[PageKey],
    deadline: Option<Instant>,
) -> Vec<Result<LentPage, MissReason>> {
    let mut pages: Vec<Result<LentPage, MissReason>> =
        keys.iter().map(|_| Err(MissReason::Absent)).collect();
    let Some(shape) = catalog.shape(namespace) else {
        return pages;
    };
    let page_bytes = shape.shape.page_blocks() as usize * BLOCK_BYTES;
    let pinned = catalog.pin(namespace, keys);
    let sink = Arc::new(LentReads {
        catalog: catalog.clone(),
        hangs: data.hangs.clone(),
        extents: Mutex::new(
            pinned
                .iter()
                .map(|page| page.map(|page| page.extent))
                .collect(),
        ),
        mailbox: Mailbox::default(),
    });
    let mut ops = Vec::new();
    for ((pinned, page), tag) in pinned.iter().zip(&mut pages).zip(0..) {
        let Some(pinned) = pinned else { continue };
        let hung = data.hangs.is_hung(pinned.extent.volume);
        match AlignedBuf::zeroed(page_bytes) {
            Ok(buffer) if !hung => {
                *page = Err(MissReason::Deadline);
                ops.push(Op {
                    volume: pinned.extent.volume,
                    action: Action::Read {
                        offset: pinned.extent.offset,
                        buffer: Buffer::Owned(buffer),
                    },
                    deadline,
                    tag,
                    sink: sink.clone(),
                });
            }
            _ => {
                *page = Err(MissReason::Hung);
                catalog.unpin(&[pinned.extent]);
            }
        }
    }
    let mut left = ops.len();
    // SAFETY: every operation owns its buffer.
    unsafe { data.disk.submit(ops) };
    let mut findings = Vec::new();
    while left > 0 {
        let now = Instant::now();
        let patience = deadline.map_or(data.hangs.limit(), |deadline| {
            deadline.saturating_duration_since(now)
        });
        let answers = sink.mailbox.take(patience.min(data.hangs.limit()));
        if answers.is_empty() {
            if deadline.is_none_or(|deadline| Instant::now() < deadline) {
                for (page, pinned) in pages.iter().zip(&pinned) {
                    if let (Err(MissReason::Deadline), Some(pinned)) = (page, pinned) {
                        data.hangs.fell_silent(pinned.extent.volume);
                    }
                }
            }
            break;
        }
        for done in answers {
            left -= 1;
            let Some(index) = usize::try_from(done.tag)
                .ok()
                .filter(|index| *index < keys.len())
            else {
                continue;
            };
            let Some(pinned) = &pinned[index] else {
                continue;
            };
            pages[index] = lend(&shape, &keys[index], pinned, done, &mut findings);
        }
    }
    if !findings.is_empty() {
        catalog.verified(namespace, &findings);
    }
    for page in &pages {
        let counter = if page.is_ok() {
            &data.counters.hits
        } else {
            &data.counters.misses
        };
        Counters::add(counter, 1);
    }
    pages
}

fn lend(
    shape: &NamespaceShape,
    key: &PageKey,
    pinned: &Pinned,
    done: Done,
    findings: &mut Vec<(PageKey, Extent, Finding)>,
) -> Result<LentPage, MissReason> {
    let status = match (done.result, done.buffer) {
        (Ok(()), Some(memory)) => {
            let mut checksum = PageChecksum::new(shape.fingerprint, key);
            checksum.blocks(&memory);
            match judge(key, pinned, checksum.finish(), findings) {
                GetStatus::Hit => {
                    return Ok(LentPage {
                        memory,
                        shape: shape.shape,
                    });
                }
                miss @ GetStatus::Miss(_) => miss,
            }
        }
        (Ok(()), None) => GetStatus::Miss(MissReason::Closed),
        (Err(error), _) => failed(key, pinned, error, findings),
    };
    match status {
        GetStatus::Miss(reason) => Err(reason),
        GetStatus::Hit => Err(MissReason::Absent),
    }
}

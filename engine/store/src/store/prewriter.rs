//! Writing blocks that were never written, in the background, so that the first pages in them are
//! written as fast as later ones.
//!
//! The first write into a preallocated file changes the filesystem's metadata, later writes do not.
//! On ext4, `larder bench --op put` into a fresh store ran at 0.64 (128 KiB pages) and 0.69 (1 MiB)
//! of its speed into one made with `--prewrite` (medians of three alternating runs, 2026-11-20).
//!
//! Invariants: a block is written only while the core has lent its segment, and only if the
//! filesystem reports that it was never written. The written bytes are zeros, as such a block reads
//! already. So every byte reads as before, even if a write fails or the process ends in the middle.
//! A segment is returned when the last write into it has been answered.
//!
//! The thread lets the device rest three times as long as each write took. It ends when every
//! unused segment has been checked, when few segments are free, or at the first write that fails.
//! Where a filesystem does not report holes, and on block devices, there is nothing to do.
//!
//! Does not: keep the volumes' files, and so their locks, when the store is dropped.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use larder_base::memory::AlignedBuf;
use larder_base::runtime::thread::JoinHandle;
use larder_base::runtime::{Condvar, Instant, Mutex};
use larder_base::system::files::{self, Handle};
use larder_core::core::{Core, Lent};
use larder_disk::mailbox::Mailbox;
use larder_disk::{Action, Buffer, Op, Purpose};
use larder_format::BLOCK_BYTES;

use super::local::Local;
use crate::error::{StoreError, io_error};
use crate::volume::Volumes;

/// Bytes of one write: some milliseconds of a disk, for which a read behind it waits.
const WRITE_BYTES: u64 = 4 << 20;

/// Rest of the device after a write, as a multiple of the write's duration.
const REST: u32 = 3;

/// Longest single wait for the device. After it the wait begins again, without a limit in all.
const PATIENCE: Duration = Duration::from_secs(60);

/// The running thread.
pub(super) struct Prewriter {
    stop: Arc<Stop>,
    thread: JoinHandle<()>,
}

#[derive(Default)]
struct Stop {
    asked: Mutex<bool>,
    changed: Condvar,
}

struct Work {
    local: Arc<Local>,
    files: Vec<Weak<Handle>>,
    stop: Arc<Stop>,
}

impl Prewriter {
    pub(super) fn start(local: Arc<Local>, volumes: &Volumes) -> Result<Prewriter, StoreError> {
        let stop = Arc::<Stop>::default();
        let file = |volume: &Option<crate::volume::Volume>| {
            volume
                .as_ref()
                .map_or_else(Weak::new, |volume| Arc::downgrade(&volume.file))
        };
        let work = Work {
            local,
            files: volumes.list.iter().map(file).collect(),
            stop: stop.clone(),
        };
        let thread = larder_base::runtime::thread::Builder::new()
            .name("larder-prewrite".to_owned())
            .spawn(move || work.run())
            .map_err(|e| {
                io_error(
                    "starting the thread that writes unused blocks",
                    Path::new("thread"),
                    e,
                )
            })?;
        Ok(Prewriter { stop, thread })
    }

    /// Lets the thread finish the write in flight, and ends it.
    pub(super) fn stop(self) {
        *self.stop.asked.lock() = true;
        self.stop.changed.notify_one();
        if self.thread.join().is_err() {
            tracing::error!("the thread that writes unused blocks panicked");
        }
    }
}

impl Work {
    fn run(&self) {
        let mut written = 0;
        while let Some(lent) = self.local.with_core(Core::lend_unused) {
            let outcome = self.write_unwritten(&lent, &mut written);
            self.local.with_core(|core| core.take_back(lent));
            if outcome.is_none() || *self.stop.asked.lock() {
                return;
            }
        }
        if written > 0 {
            tracing::info!(bytes = written, "prewriting finished");
        }
    }

    /// Writes the never-written blocks of a segment; `None` when the thread must end.
    fn write_unwritten(&self, lent: &Lent, written: &mut u64) -> Option<()> {
        let mut rest = lent.offset..lent.offset + lent.bytes;
        while let Some(hole) = unwritten(&*self.files.get(lent.volume)?.upgrade()?, rest.clone()) {
            for start in hole.clone().step_by(WRITE_BYTES as usize) {
                let bytes = (hole.end - start).min(WRITE_BYTES);
                let begun = Instant::now();
                self.write_zeros(lent.volume, start, bytes)?;
                *written += bytes;
                self.local.prewritten.fetch_add(bytes, Ordering::Relaxed);
                if self.is_stopped_within(begun.elapsed() * REST) {
                    return None;
                }
            }
            rest.start = hole.end;
        }
        Some(())
    }

    fn write_zeros(&self, volume: usize, offset: u64, bytes: u64) -> Option<()> {
        let zeros = AlignedBuf::zeroed(usize::try_from(bytes).ok()?).ok()?;
        let mailbox = Arc::new(Mailbox::default());
        let op = Op {
            volume,
            action: Action::Write {
                offset,
                buffer: Buffer::Owned(zeros),
            },
            purpose: Purpose::Background,
            deadline: None,
            tag: 0,
            sink: mailbox.clone(),
        };
        // SAFETY: the operation owns its buffer.
        unsafe { self.local.disk.submit(vec![op]) };
        loop {
            if let Some(done) = mailbox.take(PATIENCE).pop_front() {
                let failed = |error| {
                    tracing::warn!(
                        volume,
                        offset,
                        %error,
                        "writing unused blocks failed, and ends"
                    );
                };
                return done.result.map_err(failed).ok();
            }
        }
    }

    fn is_stopped_within(&self, rest: Duration) -> bool {
        let mut asked = self.stop.asked.lock();
        if !*asked {
            self.stop.changed.wait_for(&mut asked, rest);
        }
        *asked
    }
}

/// The first whole blocks of a range that were never written, as far as the filesystem reports.
fn unwritten(file: &Handle, range: Range<u64>) -> Option<Range<u64>> {
    const BLOCK: u64 = BLOCK_BYTES as u64;
    let start = files::next_hole(file, range.start).ok()?;
    if start >= range.end {
        return None;
    }
    // An error means that no data follows.
    let end = files::next_data(file, start).unwrap_or(range.end);
    let hole = start.next_multiple_of(BLOCK)..end.min(range.end) / BLOCK * BLOCK;
    (!hole.is_empty()).then_some(hole)
}

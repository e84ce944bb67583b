//! Reading pages into memory of the store's own, for callers that do not wait for all of them.
//! Reads that miss the deadline go on, and their pins are released after the disk's answer.
//!
//! If the bytes of a page were not its own, the page is looked up once more, as in any other get,
//! within the time that the deadline leaves.

use std::sync::Arc;
use std::time::Duration;

use larder_base::ids::NamespaceId;
use larder_base::memory::AlignedBuf;
use larder_base::planted;
use larder_base::runtime::{Instant, Mutex};
use larder_core::grants::{Extent, Finding};
use larder_core::status::{GetStatus, MissReason};
use larder_disk::mailbox::Mailbox;
use larder_disk::{Action, Buffer, Done, Op, Purpose, Sink};
use larder_format::{PageChecksum, PageKey};

use super::get::{Job, elsewhere, failed, is_without_its_bytes, judge, page_bytes, pin};
use super::hang::Hangs;
use super::{Counters, DataPath};
use crate::api::LentPage;
use crate::catalog::{Catalog, NamespaceShape, Pinned};

/// Keeps the pins of reads, also of reads that outlast their call.
struct LentReads {
    catalog: Arc<dyn Catalog>,
    hangs: Arc<Hangs>,
    pins: Mutex<Pins>,
    mailbox: Mailbox,
}

struct Pins {
    /// By tag, until the disk has answered.
    reading: Vec<Option<Extent>>,
    answered: Vec<Extent>,
    /// The call no longer waits for answers.
    is_left: bool,
}

impl LentReads {
    /// Ends the call's wait: releases the pins of answered reads, and leaves the others to the
    /// disk's answers.
    fn leave(&self) {
        let answered = {
            let mut pins = self.pins.lock();
            pins.is_left = true;
            std::mem::take(&mut pins.answered)
        };
        self.catalog.unpin(&answered);
    }

    /// Releases the pins of reads that were answered too late. On a thread of its own: the catalog
    /// may be in another process, and the thread that delivers the disk's answers must not wait for
    /// it.
    fn unpin_late(&self, late: Vec<Extent>) {
        let catalog = self.catalog.clone();
        let thread = larder_base::runtime::thread::Builder::new().name("larder-unpin".to_owned());
        if let Err(error) = thread.spawn(move || catalog.unpin(&late)) {
            tracing::error!(
                %error,
                "no thread to release pins: their segments stay pinned until the store is opened \
                 again"
            );
        }
    }
}

impl Sink for LentReads {
    fn done(&self, answers: Vec<Done>) {
        let mut late = Vec::new();
        {
            let mut pins = self.pins.lock();
            for done in &answers {
                let tag = usize::try_from(done.tag).unwrap_or(usize::MAX);
                let Some(extent) = pins.reading.get_mut(tag).and_then(Option::take) else {
                    continue;
                };
                self.hangs.answered(extent.volume, &done.result);
                if pins.is_left {
                    late.push(extent);
                } else {
                    pins.answered.push(extent);
                }
            }
        }
        self.mailbox.done(answers);
        if !late.is_empty() {
            self.unpin_late(late);
        }
    }
}

/// A call that waits for its reads. Dropping it ends the wait.
struct Waiting(Arc<LentReads>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// See [`PageStore::get_lent`](crate::api::PageStore::get_lent).
pub(super) fn get(
    catalog: &Arc<dyn Catalog>,
    data: &DataPath,
    namespace: NamespaceId,
    keys: &[PageKey],
    deadline: Option<Instant>,
) -> Vec<Lent> {
    let mut pages: Vec<Lent> = keys.iter().map(|_| Err(MissReason::Absent)).collect();
    let Some(shape) = catalog.shape(namespace) else {
        return pages;
    };
    let call = Call {
        catalog,
        data,
        namespace,
        shape: &shape,
        keys,
        deadline,
    };
    let all: Vec<usize> = (0..keys.len()).collect();
    let jobs = call.pin(&all);
    call.read(&jobs, &mut pages);
    call.again(&jobs, &mut pages);
    let statuses = pages.iter().map(|page| match page {
        Ok(_) => GetStatus::Hit,
        Err(reason) => GetStatus::Miss(*reason),
    });
    data.counters.reads.count(shape.fingerprint, statuses);
    pages
}

type Lent = Result<LentPage, MissReason>;

/// The facts that all pages of a call share.
struct Call<'a> {
    catalog: &'a Arc<dyn Catalog>,
    data: &'a DataPath,
    namespace: NamespaceId,
    shape: &'a NamespaceShape,
    keys: &'a [PageKey],
    deadline: Option<Instant>,
}

impl Call<'_> {
    fn pin(&self, asked: &[usize]) -> Vec<Job> {
        let key = |page: usize| self.keys[page];
        pin(self.catalog.as_ref(), self.namespace, asked, key)
    }

    /// Looks up once more the pages whose bytes were not theirs.
    fn again(&self, jobs: &[Job], pages: &mut [Lent]) {
        let is_without =
            |job: &&Job| matches!(pages[job.page], Err(why) if is_without_its_bytes(why));
        let tried: Vec<Job> = jobs.iter().filter(is_without).copied().collect();
        if tried.is_empty() {
            return;
        }
        let asked: Vec<usize> = tried.iter().map(|job| job.page).collect();
        let (jobs, same) = elsewhere(&tried, self.pin(&asked));
        let same: Vec<Extent> = same.iter().map(|job| job.pinned.extent).collect();
        self.catalog.unpin(&same);
        self.read(&jobs, pages);
    }

    /// Reads pages with pinned places. The pins are released once the pages have been read, if
    /// necessary after this returns.
    fn read(&self, jobs: &[Job], pages: &mut [Lent]) {
        let extents = jobs.iter().map(|job| Some(job.pinned.extent));
        let sink = Arc::new(LentReads {
            catalog: self.catalog.clone(),
            hangs: self.data.hangs.clone(),
            pins: Mutex::new(Pins {
                reading: extents.collect(),
                answered: Vec::with_capacity(jobs.len()),
                is_left: false,
            }),
            mailbox: Mailbox::default(),
        });
        // Held to the end: a finding counts only while its page is pinned.
        let _waiting = Waiting(sink.clone());
        let left = self.submit(jobs, pages, &sink);
        let mut findings: Vec<(PageKey, Extent, Finding)> = Vec::new();
        self.finish(jobs, pages, &sink, left, &mut findings);
        if let Some(recheck) = &self.data.recheck {
            let disk = self.data.disk.as_ref();
            let so_far = |page: usize| pages[page].as_ref().err().copied();
            // The same limit as for any other answer.
            let limit = Instant::now() + self.data.hangs.limit();
            let until = self.deadline.map_or(limit, |deadline| deadline.min(limit));
            for (job, why) in recheck.stale(disk, jobs, Some(until), so_far) {
                pages[job.page] = Err(why);
                findings.retain(|(_, extent, _)| *extent != job.pinned.extent);
            }
        }
        if !findings.is_empty() {
            self.catalog.verified(self.namespace, &findings);
        }
    }

    /// Starts the reads, and returns their number. A page whose read cannot start is a miss at
    /// once.
    fn submit(&self, jobs: &[Job], pages: &mut [Lent], sink: &Arc<LentReads>) -> usize {
        let mut ops = Vec::with_capacity(jobs.len());
        for (job, tag) in jobs.iter().zip(0..) {
            let extent = job.pinned.extent;
            let hung = self.data.hangs.is_hung(extent.volume);
            match AlignedBuf::zeroed(page_bytes(self.shape)) {
                Ok(buffer) if !hung => {
                    pages[job.page] = Err(MissReason::Deadline);
                    self.data.hangs.asked(extent.volume);
                    let bytes = page_bytes(self.shape) as u64;
                    Counters::add(&self.data.counters.bytes_read, bytes);
                    ops.push(Op {
                        volume: extent.volume,
                        action: Action::Read {
                            offset: extent.offset,
                            buffer: Buffer::Owned(buffer),
                        },
                        purpose: Purpose::Call,
                        deadline: self.deadline,
                        tag,
                        sink: sink.clone(),
                    });
                }
                _ => {
                    pages[job.page] = Err(MissReason::Hung);
                    self.catalog.unpin(&[extent]);
                }
            }
        }
        let count = ops.len();
        // SAFETY: every operation owns its buffer.
        unsafe { self.data.disk.submit(ops) };
        if planted!(LentUnpin) {
            let early = std::mem::take(&mut sink.pins.lock().reading);
            let early: Vec<Extent> = early.into_iter().flatten().collect();
            self.catalog.unpin(&early);
        }
        count
    }

    /// Receives `left` reads as they arrive, until the deadline, and verifies them.
    fn finish(
        &self,
        jobs: &[Job],
        pages: &mut [Lent],
        sink: &LentReads,
        mut left: usize,
        findings: &mut Vec<(PageKey, Extent, Finding)>,
    ) {
        let limit = self.data.hangs.limit();
        while left > 0 {
            let now = Instant::now();
            let until = |deadline: Instant| deadline.saturating_duration_since(now);
            let patience = self.deadline.map_or(limit, until).min(limit);
            let answers = sink.mailbox.take(patience);
            if answers.is_empty() {
                self.blame(jobs, pages, now.elapsed());
                // Reads that have not been started release their memory.
                self.data.disk.expire();
                break;
            }
            for done in answers {
                left -= 1;
                let job = usize::try_from(done.tag).ok().and_then(|at| jobs.get(at));
                if let Some(job) = job {
                    let key = &self.keys[job.page];
                    pages[job.page] = lend(self.shape, key, &job.pinned, done, findings);
                }
            }
        }
    }

    /// Notes that the volumes of the missing pages were silent for `waited`.
    fn blame(&self, jobs: &[Job], pages: &mut [Lent], waited: Duration) {
        let in_time = self.deadline.is_none_or(|until| Instant::now() < until);
        for job in jobs {
            if let Err(why @ MissReason::Deadline) = &mut pages[job.page] {
                let volume = job.pinned.extent.volume;
                self.data.hangs.fell_silent(volume, waited);
                if in_time {
                    *why = MissReason::Hung;
                }
            }
        }
    }
}

fn lend(
    shape: &NamespaceShape,
    key: &PageKey,
    pinned: &Pinned,
    done: Done,
    findings: &mut Vec<(PageKey, Extent, Finding)>,
) -> Lent {
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

//! Reading pages: pin, read, verify, unpin.
//!
//! Pages that are neighbours on disk are read together, up to 1 MiB, straight into the caller's
//! memory if that is aligned. The caller's thread verifies each page as it arrives, while the
//! device works on the others. The first pages of a long call are read before the rest are looked
//! up: the lookup may take a while, and the device has work meanwhile.
//!
//! Every byte that is returned has passed its checksum, which covers the page's key and namespace
//! too; or, in an encrypted store, its tag, which does the same. When a read of several pages fails
//! they are read again one by one: one bad sector costs one page. If the bytes of a page were not
//! its own, it is looked up once more: the place may have been stale.

mod verify;

use std::sync::Arc;

use larder_base::ids::NamespaceId;
use larder_base::memory::AlignedBuf;
use larder_base::planted;
use larder_base::runtime::Instant;
use larder_core::grants::{Extent, Finding};
use larder_core::index::ReadAs;
use larder_core::status::{GetStatus, MissReason};
use larder_disk::mailbox::Mailbox;
use larder_disk::{
    Action, Buffer, DiskError, Done, MERGE_BYTES_MAX, Op, PIECES_MAX, Piece, Purpose,
};
use larder_format::PageKey;

use super::{Counters, DataPath};
use crate::api::GetPage;
use crate::catalog::{Catalog, NamespaceShape, Pinned};
pub(super) use verify::{decode, first, fits, is_aligned, take};
use verify::{failed, judge_sealed};

/// A page that is being read.
#[derive(Clone, Copy)]
pub(super) struct Job {
    /// Position among the pages of the call.
    pub page: usize,
    pub pinned: Pinned,
}

/// One read of one or more pages that are neighbours on disk.
struct Group {
    jobs: std::ops::Range<usize>,
    answered: bool,
}

/// Bytes of a call that are read at once into memory of its own.
const BOUNCE_BYTES: usize = 64 << 20;

/// Bytes of page data that a call reads before it looks up the rest: enough to keep the device busy
/// during the lookup, even if the catalog is in another process.
const FIRST_BYTES: usize = 2 << 20;

pub(super) fn get<C: Catalog + ?Sized>(
    catalog: &C,
    data: &DataPath,
    namespace: NamespaceId,
    pages: &mut [GetPage<'_, '_>],
    deadline: Option<Instant>,
    read_as: ReadAs,
) -> Vec<GetStatus> {
    let Some(shape) = catalog.shape(namespace) else {
        return vec![GetStatus::Miss(MissReason::Absent); pages.len()];
    };
    let get = Get {
        catalog,
        data,
        namespace,
        shape: &shape,
        deadline,
        read_as,
    };
    get.all(pages)
}

/// The facts that all pages of a call share.
pub(super) struct Get<'a, C: Catalog + ?Sized> {
    pub catalog: &'a C,
    pub data: &'a DataPath,
    pub namespace: NamespaceId,
    pub shape: &'a NamespaceShape,
    pub deadline: Option<Instant>,
    pub read_as: ReadAs,
}

impl<'a, C: Catalog + ?Sized> Get<'a, C> {
    fn all(&self, pages: &mut [GetPage<'_, '_>]) -> Vec<GetStatus> {
        let mut statuses = vec![GetStatus::Miss(MissReason::Absent); pages.len()];
        let mut asked = Vec::with_capacity(pages.len());
        for (index, page) in pages.iter().enumerate() {
            if fits(self.shape, page.parts) {
                asked.push(index);
            } else {
                statuses[index] = GetStatus::Miss(MissReason::WrongShape);
            }
        }
        let mut pins = self.pins(&[]);
        let mut reads = self.start(Vec::new(), pages);
        let first = (FIRST_BYTES / self.shape.page_bytes()).max(1);
        let (first, rest) = asked.split_at(first.min(asked.len()));
        for some in [first, rest] {
            let jobs = self.pin(some, pages);
            pins.extents
                .extend(jobs.iter().map(|job| job.pinned.extent));
            reads.begin(jobs, pages);
        }
        let mut findings: Vec<(PageKey, Extent, Finding)> = Vec::new();
        if planted!(EarlyUnpin) {
            self.catalog.unpin(&std::mem::take(&mut pins.extents));
        }
        reads.finish(pages, &mut statuses, &mut findings);
        if let Some(recheck) = &self.data.recheck {
            let disk = self.data.disk.as_ref();
            let so_far = |page| miss(statuses[page]);
            for (job, why) in recheck.stale(disk, &reads.jobs, self.deadline, so_far) {
                statuses[job.page] = GetStatus::Miss(why);
                findings.retain(|(_, extent, _)| *extent != job.pinned.extent);
            }
        }
        let tried = reads.without_their_bytes(&statuses);
        drop(reads);
        // Findings count only while the pages are pinned.
        self.report(&findings);
        drop(pins);
        self.again(&tried, pages, &mut statuses);
        statuses
    }

    /// Looks up once more the pages whose bytes were not theirs. A page with another place now,
    /// because it was moved or put again meanwhile, is read there.
    pub fn again(&self, tried: &[Job], pages: &mut [GetPage<'_, '_>], statuses: &mut [GetStatus]) {
        if tried.is_empty() {
            return;
        }
        let asked: Vec<usize> = tried.iter().map(|job| job.page).collect();
        let found = self.pin(&asked, pages);
        let _pins = self.pins(&found);
        let (jobs, _) = elsewhere(tried, found);
        let mut reads = self.start(jobs, pages);
        let mut findings = Vec::new();
        reads.finish(pages, statuses, &mut findings);
        drop(reads);
        self.report(&findings);
    }

    /// Pins the requested pages that are present.
    fn pin(&self, asked: &[usize], pages: &[GetPage<'_, '_>]) -> Vec<Job> {
        let key = |page: usize| pages[page].key;
        pin(self.catalog, self.namespace, asked, key, self.read_as)
    }

    fn pins(&self, jobs: &[Job]) -> Pins<'a, C> {
        Pins {
            catalog: self.catalog,
            extents: jobs.iter().map(|job| job.pinned.extent).collect(),
        }
    }

    /// Starts reading pages with pinned places.
    pub fn start(&self, jobs: Vec<Job>, pages: &mut [GetPage<'_, '_>]) -> Reads<'a> {
        Reads::start(self.data, self.shape, jobs, pages, self.deadline)
    }

    pub fn report(&self, findings: &[(PageKey, Extent, Finding)]) {
        if !findings.is_empty() && !planted!(UnreportedDamage) {
            self.catalog.verified(self.namespace, findings);
        }
    }
}

/// Pins the requested pages that are present.
pub(super) fn pin<C: Catalog + ?Sized>(
    catalog: &C,
    namespace: NamespaceId,
    asked: &[usize],
    key: impl Fn(usize) -> PageKey,
    read_as: ReadAs,
) -> Vec<Job> {
    let keys: Vec<PageKey> = asked.iter().map(|&page| key(page)).collect();
    let pinned = catalog.pin(namespace, &keys, read_as).into_iter();
    pinned
        .zip(asked)
        .filter_map(|(pinned, &page)| pinned.map(|pinned| Job { page, pinned }))
        .collect()
}

/// Splits retried pages, after a new lookup, into the ones with another place now, which are worth
/// another read, and the others.
pub(super) fn elsewhere(tried: &[Job], found: Vec<Job>) -> (Vec<Job>, Vec<Job>) {
    found.into_iter().partition(|job| {
        let same = |tried: &Job| tried.page == job.page && tried.pinned == job.pinned;
        !tried.iter().any(same)
    })
}

/// The reason of a miss; `None` for a hit.
fn miss(status: GetStatus) -> Option<MissReason> {
    match status {
        GetStatus::Hit => None,
        GetStatus::Miss(why) => Some(why),
    }
}

/// Whether a page was missed because the bytes read were not its own: it may have been moved or put
/// again meanwhile.
pub(super) fn is_without_its_bytes(why: MissReason) -> bool {
    use MissReason::{Damaged, ReadError, Unfinished};
    matches!(why, Damaged | Unfinished | ReadError)
}

/// Releases pins when dropped.
struct Pins<'a, C: Catalog + ?Sized> {
    catalog: &'a C,
    extents: Vec<Extent>,
}

impl<C: Catalog + ?Sized> Drop for Pins<'_, C> {
    fn drop(&mut self) {
        self.catalog.unpin(&self.extents);
    }
}

/// The outcome of one page's read.
struct Outcome {
    job: usize,
    /// The page was read together with others.
    merged: bool,
    /// Its bytes, if they were not read straight into the caller's memory.
    result: Result<Option<AlignedBuf>, DiskError>,
}

/// The reads of one call. Dropping it waits for the device: the memory is the caller's.
pub(super) struct Reads<'a> {
    data: &'a DataPath,
    shape: &'a NamespaceShape,
    jobs: Vec<Job>,
    groups: Vec<Group>,
    mailbox: Arc<Mailbox>,
    /// Operations in flight.
    left: usize,
    /// Bytes that are read into memory of this call until it waits for all reads.
    owned: usize,
    /// Outcomes not processed yet.
    ready: Vec<Outcome>,
    /// Jobs that wait until others have given back the memory that they were read into.
    waiting: Vec<usize>,
    /// Jobs of encrypted pages that did not open: their bytes are read once more, apart.
    unopened: Vec<usize>,
    deadline: Option<Instant>,
    /// Reads that were still queued at the deadline have been given up.
    is_expired: bool,
    /// Start of the device's present silence.
    silent_since: Instant,
}

impl<'a> Reads<'a> {
    /// Starts reading pages with pinned places. The same pages must be passed to [`Reads::finish`],
    /// and must not be touched before that or the drop.
    pub(super) fn start(
        data: &'a DataPath,
        shape: &'a NamespaceShape,
        jobs: Vec<Job>,
        pages: &mut [GetPage<'_, '_>],
        deadline: Option<Instant>,
    ) -> Reads<'a> {
        let mut reads = Reads {
            data,
            shape,
            ready: Vec::new(),
            waiting: Vec::new(),
            unopened: Vec::new(),
            jobs: Vec::new(),
            groups: Vec::new(),
            mailbox: Arc::default(),
            left: 0,
            owned: 0,
            deadline,
            is_expired: false,
            silent_since: Instant::now(),
        };
        reads.begin(jobs, pages);
        reads
    }

    /// Starts reading more of the same pages.
    fn begin(&mut self, mut jobs: Vec<Job>, pages: &mut [GetPage<'_, '_>]) {
        jobs.sort_unstable_by_key(|job| (job.pinned.extent.volume, job.pinned.extent.offset));
        let known = self.jobs.len();
        self.jobs.append(&mut jobs);
        self.submit(pages, known..self.jobs.len(), MERGE_BYTES_MAX);
    }

    /// The pages whose bytes were not theirs, with the places that were read.
    pub(super) fn without_their_bytes(&self, statuses: &[GetStatus]) -> Vec<Job> {
        let is_without = |job: &&Job| miss(statuses[job.page]).is_some_and(is_without_its_bytes);
        self.jobs.iter().filter(is_without).copied().collect()
    }

    /// Receives the reads as they arrive, and verifies them.
    pub(super) fn finish(
        &mut self,
        pages: &mut [GetPage<'_, '_>],
        statuses: &mut [GetStatus],
        findings: &mut Vec<(PageKey, Extent, Finding)>,
    ) {
        let mut again = Vec::new();
        loop {
            while let Some(Outcome {
                job,
                merged,
                result,
            }) = self.next()
            {
                if merged && result.as_ref().is_err_and(DiskError::is_of_the_medium) {
                    again.push(job);
                    continue;
                }
                let Job { page, pinned } = &self.jobs[job];
                statuses[*page] = match result {
                    Ok(mut bounced) => {
                        let page = &mut pages[*page];
                        let (decoder, shape) = (&self.data.decoder, self.shape);
                        let bytes = bounced.as_deref_mut();
                        let status = match bytes {
                            Some(bytes) if self.unopened.contains(&job) => {
                                let page = (page, pinned, bytes);
                                Some(judge_sealed(decoder, shape, page, findings))
                            }
                            bytes => take(decoder, shape, page, pinned, bytes, findings),
                        };
                        let Some(status) = status else {
                            self.unopened.push(job);
                            again.push(job);
                            continue;
                        };
                        if status == GetStatus::Miss(MissReason::Sealed) {
                            self.data.notices.sealed();
                        }
                        status
                    }
                    Err(error) => failed(&pages[*page].key, pinned, error, findings),
                };
            }
            if again.is_empty() && self.waiting.is_empty() {
                break;
            }
            for job in again.drain(..) {
                self.submit(pages, job..job + 1, 0);
            }
            // No read is in flight.
            self.owned = 0;
            for job in std::mem::take(&mut self.waiting) {
                self.submit(pages, job..job + 1, 0);
            }
        }
    }

    /// Starts the reads of some jobs, neighbours together up to `merge` bytes.
    fn submit(
        &mut self,
        pages: &mut [GetPage<'_, '_>],
        jobs: std::ops::Range<usize>,
        merge: usize,
    ) {
        let mut ops = Vec::with_capacity(jobs.len());
        let mut next = jobs.start;
        while next < jobs.end {
            let first = self.jobs[next].pinned.extent;
            if self.data.hangs.is_hung(first.volume) {
                self.give_up(next, DiskError::Os(libc::ETIME));
                next += 1;
                continue;
            }
            let direct = self.is_direct(next, pages);
            let (end, bytes) = if direct {
                self.neighbours(next, jobs.end, merge, pages)
            } else {
                (next + 1, self.shape.stored_bytes(first.place))
            };
            let buffer = if direct {
                Buffer::Borrowed(self.pieces(next..end, pages))
            } else if self.owned > 0 && self.owned + bytes > BOUNCE_BYTES {
                self.waiting.push(next);
                next = end;
                continue;
            } else {
                match AlignedBuf::zeroed(bytes) {
                    Ok(memory) => {
                        self.owned += bytes;
                        Buffer::Owned(memory)
                    }
                    Err(_) => {
                        self.give_up(next, DiskError::Os(libc::ENOMEM));
                        next = end;
                        continue;
                    }
                }
            };
            let counter = if direct {
                &self.data.counters.direct_pages
            } else {
                &self.data.counters.bounced_pages
            };
            Counters::add(counter, (end - next) as u64);
            Counters::add(&self.data.counters.bytes_read, bytes as u64);
            self.data.hangs.asked(first.volume);
            ops.push(Op {
                volume: first.volume,
                action: Action::Read {
                    offset: first.offset,
                    buffer,
                },
                purpose: Purpose::Call,
                deadline: self.deadline,
                tag: self.groups.len() as u64,
                sink: self.mailbox.clone(),
            });
            self.groups.push(Group {
                jobs: next..end,
                answered: false,
            });
            next = end;
        }
        if self.left == 0 {
            self.silent_since = Instant::now();
        }
        self.left += ops.len();
        self.is_expired = false;
        // SAFETY: the pieces are in `pages`, which the caller lends for longer than this value
        // exists, and dropping it waits until every operation has been answered. Each part belongs
        // to one page and so to one operation at a time (a page is read again only after its first
        // read was answered); the parts are not accessed before the answer.
        unsafe { self.data.disk.submit(ops) };
    }

    fn give_up(&mut self, job: usize, error: DiskError) {
        self.ready.push(Outcome {
            job,
            merged: false,
            result: Err(error),
        });
    }

    fn is_direct(&self, job: usize, pages: &[GetPage<'_, '_>]) -> bool {
        !self.unopened.contains(&job) && is_aligned(self.shape, pages[self.jobs[job].page].parts)
    }

    /// One past the last job that is read together with job `first`, and the bytes of all.
    fn neighbours(
        &self,
        first: usize,
        limit: usize,
        merge: usize,
        pages: &[GetPage<'_, '_>],
    ) -> (usize, usize) {
        let start = self.jobs[first].pinned.extent;
        let parts = self.shape.shape.parts();
        let mut bytes = self.shape.stored_bytes(start.place);
        let mut end = first + 1;
        while end < limit {
            let extent = self.jobs[end].pinned.extent;
            let with_this = bytes + self.shape.stored_bytes(extent.place);
            let adjacent =
                extent.volume == start.volume && extent.offset == start.offset + bytes as u64;
            let small = with_this <= merge && (end - first + 1) * parts <= PIECES_MAX;
            if !adjacent || !small || !self.is_direct(end, pages) {
                break;
            }
            bytes = with_this;
            end += 1;
        }
        (end, bytes)
    }

    /// The memory of some jobs' pages, with adjacent pieces joined.
    fn pieces(&self, jobs: std::ops::Range<usize>, pages: &mut [GetPage<'_, '_>]) -> Vec<Piece> {
        let mut pieces: Vec<Piece> = Vec::with_capacity(jobs.len() * self.shape.shape.parts());
        for job in &self.jobs[jobs] {
            let mut left = self.shape.stored_bytes(job.pinned.extent.place);
            for part in pages[job.page].parts.iter_mut() {
                let len = part.len().min(left);
                left -= len;
                push_piece(
                    &mut pieces,
                    Piece {
                        ptr: part.as_mut_ptr(),
                        len,
                    },
                );
            }
        }
        pieces
    }

    /// The next outcome; `None` when all reads have ended.
    fn next(&mut self) -> Option<Outcome> {
        while self.ready.is_empty() {
            if self.left == 0 {
                return None;
            }
            self.wait();
        }
        self.ready.pop()
    }

    fn wait(&mut self) {
        let limit = self.data.hangs.limit();
        let deadline = self.deadline.filter(|_| !self.is_expired);
        let in_time = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let until_hung = limit.saturating_sub(self.silent_since.elapsed());
        let answers = self
            .mailbox
            .take(in_time.map_or(until_hung, |time| time.min(until_hung)));
        if answers.is_empty() && deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            self.is_expired = true;
            self.data.disk.expire();
            if planted!(LateRead) {
                self.left = 0;
            }
            return;
        }
        if answers.is_empty() && self.silent_since.elapsed() >= limit {
            self.silent_since = Instant::now();
            // The memory is the caller's, so this call keeps waiting; later calls need not.
            for group in self.groups.iter().filter(|group| !group.answered) {
                let volume = self.jobs[group.jobs.start].pinned.extent.volume;
                self.data.hangs.fell_silent(volume, limit);
            }
            return;
        }
        for Done {
            tag,
            result,
            mut buffer,
        } in answers
        {
            self.left -= 1;
            let group = usize::try_from(tag)
                .ok()
                .and_then(|tag| self.groups.get_mut(tag));
            let Some(group) = group else { continue };
            group.answered = true;
            let jobs = group.jobs.clone();
            let volume = self.jobs[jobs.start].pinned.extent.volume;
            self.data.hangs.answered(volume, &result);
            if !matches!(result, Err(DiskError::Deadline | DiskError::Shutdown)) {
                self.silent_since = Instant::now();
            }
            let merged = jobs.len() > 1;
            for job in jobs {
                self.ready.push(Outcome {
                    job,
                    merged,
                    result: result.map(|()| buffer.take()),
                });
            }
        }
    }
}

impl Drop for Reads<'_> {
    fn drop(&mut self) {
        while self.left > 0 {
            self.wait();
        }
    }
}

/// Appends a piece, or extends the last one if it is adjacent.
pub(super) fn push_piece(pieces: &mut Vec<Piece>, piece: Piece) {
    if let Some(last) = pieces.last_mut()
        && last.ptr.wrapping_add(last.len) == piece.ptr
    {
        last.len += piece.len;
        return;
    }
    pieces.push(piece);
}

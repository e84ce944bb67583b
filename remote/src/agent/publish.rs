//! Publication: a run, out of the store and into the remote.

use std::io::IoSliceMut;
use std::time::{SystemTime, UNIX_EPOCH};

use larder_base::runtime::Instant;
use larder_engine::{GetPage, PageStore};
use larder_format::{Fingerprint, Namespace, PageKey, PageShape, StoreId};

use super::counts::Count;
use super::desk::{Outgoing, Request};
use super::{Admission, Agent};
use crate::buffer::Buffer;
use crate::error::RemoteError;
use crate::planted::planted;
use crate::remote::Published;
use crate::run::{Draft, RunName};

/// Attempts to publish a run. Its pages may be on their way into the store, or the remote fails.
const TRIES_MAX: u32 = 5;

/// Why a run was not published.
enum NotPublished {
    /// A budget is used up.
    Budget,
    /// The store does not have all its pages.
    Absent,
    /// The remote failed, did not take the object, or it cannot be seen whether it has the run.
    /// That has been noted.
    Failed,
}

/// A run that the remote has.
enum Sent {
    /// This node made its object, of so many bytes.
    Created(u64),
    /// It was there.
    Present,
}

impl Agent {
    /// Publishes a run, and notes the outcome.
    pub(super) fn send(&self, run: Outgoing, store: &dyn PageStore) {
        let outcome = self.publish(&run, store);
        self.published(run, &outcome);
        // Not between the look of a waiter and its sleep.
        drop(self.desk.lock());
        self.changed.notify_all();
    }

    fn publish(&self, run: &Outgoing, store: &dyn PageStore) -> Result<Sent, NotPublished> {
        let (namespace, bytes) = self.reserve(run.namespace)?;
        let made = self.make(run, &namespace, store);
        let Ok(Some((name, object))) = made else {
            // The question alone was asked.
            let mut desk = self.desk.lock();
            desk.hour.give_back(1);
            desk.give_back(bytes);
            return made.map(|_| Sent::Present);
        };
        let sent = object.len() as u64;
        let published = self.remote.publish(&name, object, self.deadline());
        let mut desk = self.desk.lock();
        // An encoded object is shorter than its reserve.
        desk.give_back(bytes.saturating_sub(sent));
        match published {
            Ok(published) => {
                desk.publications.succeeded();
                Ok(match published {
                    Published::Created => Sent::Created(sent),
                    Published::Present => Sent::Present,
                })
            }
            // The directory is not mounted any more.
            Err(RemoteError::Unmarked(place)) => {
                drop(desk);
                self.missed_mark(place);
                Err(NotPublished::Failed)
            }
            Err(error) => {
                drop(desk);
                self.not_taken(&error);
                Err(NotPublished::Failed)
            }
        }
    }

    /// Marks a run as used. A failure is that of a publication; the next use after a day tries it
    /// again.
    pub(super) fn touch(&self, run: &RunName) {
        match self.remote.touch(run, self.deadline()) {
            Ok(()) => self.count(Count::RunsTouched, 1),
            Err(error) => self.not_taken(&error),
        }
    }

    /// The remote did not take an object or a mark.
    fn not_taken(&self, error: &RemoteError) {
        let is_first = self.desk.lock().not_taken(error, Instant::now());
        if is_first {
            tracing::warn!(
                "{} takes no objects from this node ({error}); its runs are read all the same. Set \
                 `l4_bytes_per_day = 0` if that is intended",
                self.options.place
            );
        }
    }

    /// Takes a publication from the budgets before it begins: several are in progress at once. It
    /// costs the question whether the run is there, and the object.
    fn reserve(&self, namespace: Fingerprint) -> Result<(Namespace, u64), NotPublished> {
        let mut desk = self.desk.lock();
        let (namespace, bytes) = desk.space(namespace).ok_or(NotPublished::Absent)?;
        let now = Instant::now();
        // A part of a run may be owed: an owner begins with few bytes.
        if !desk.day.has(1, now) || !desk.may_request(2, Request::Other, now) {
            return Err(NotPublished::Budget);
        }
        if !planted!(FreeBytes) {
            desk.day.spend(bytes, now);
            desk.second.spend(bytes, now);
        }
        Ok((namespace, bytes))
    }

    /// The object of a run; `None` if the remote has it.
    fn make(
        &self,
        run: &Outgoing,
        namespace: &Namespace,
        store: &dyn PageStore,
    ) -> Result<Option<(RunName, Buffer)>, NotPublished> {
        let trust = self.options.trust.clone();
        let draft = Draft::new(namespace.clone(), run.pages.clone(), trust);
        let mut draft = draft.map_err(|error| {
            self.failed(&error);
            NotPublished::Failed
        })?;
        let name = draft.name().ok_or(NotPublished::Absent)?;
        match self.remote.holds(&name, self.deadline()) {
            Ok(true) => return Ok(None),
            Ok(false) => {}
            Err(error) if self.is_of_object(&error) => {
                self.desk.lock().fail(&name, false, Instant::now());
                self.left_out(&name, &error);
                return Err(NotPublished::Failed);
            }
            Err(_) => return Err(NotPublished::Failed),
        }
        let keys: Vec<PageKey> = run.pages.iter().map(|page| page.key).collect();
        if !read(store, namespace, &keys, &mut draft) && !planted!(HollowRun) {
            return Err(NotPublished::Absent);
        }
        let encoder = self.desk.lock().encoder(namespace.fingerprint());
        if let Some(encoder) = encoder {
            draft.encode(&encoder);
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        // An object is the same whichever node made it, but for its time.
        let store_id = StoreId::from_bytes([0; 16]);
        let object = draft.finish(store_id, now.map_or(0, |now| now.as_secs()));
        let object = object.map_err(|error| {
            tracing::debug!(%error, "a run was not made an object");
            NotPublished::Absent
        })?;
        Ok(Some((name, object)))
    }

    fn published(&self, mut run: Outgoing, outcome: &Result<Sent, NotPublished>) {
        run.tries += 1;
        let is_last = run.tries >= TRIES_MAX;
        let may_come = self.options.admission == Admission::Through || run.tries < 2;
        let (count, again) = match outcome {
            Ok(Sent::Created(_)) => (Count::RunsPublished, false),
            Ok(Sent::Present) => (Count::RunsPresent, false),
            Err(NotPublished::Budget) => (Count::RunsDroppedBudget, false),
            Err(NotPublished::Absent) => (Count::RunsDroppedAbsent, may_come && !is_last),
            Err(NotPublished::Failed) => (Count::RunsDroppedFailed, !is_last),
        };
        if outcome.is_ok() {
            self.succeeded();
        }
        if planted!(LostRun) && matches!(outcome, Err(NotPublished::Failed)) {
            self.desk.lock().published(&run, false, Instant::now());
            return;
        }
        let mut desk = self.desk.lock();
        if again {
            // Each wait is twice the former one: a busy disk takes its time, and absent pages may
            // never come.
            run.due = Instant::now() + self.options.delay * (1 << (run.tries - 1));
            let dropped = desk.queue(run);
            drop(desk);
            self.count(Count::RunsDroppedQueue, dropped);
            return;
        }
        desk.published(&run, outcome.is_ok(), Instant::now());
        drop(desk);
        self.count(count, 1);
        if let Ok(Sent::Created(bytes)) = outcome {
            self.count(Count::BytesPublished, *bytes);
        }
    }
}

/// Reads the pages of a run from the store. Returns whether all were there.
fn read(store: &dyn PageStore, namespace: &Namespace, keys: &[PageKey], draft: &mut Draft) -> bool {
    let Ok(id) = store.namespace(namespace) else {
        return false;
    };
    let shape = namespace.shape();
    let payloads = draft.payloads().into_iter();
    let mut parts: Vec<_> = payloads.map(|payload| parts_of(payload, shape)).collect();
    let pages = keys.iter().zip(&mut parts);
    let mut pages: Vec<GetPage<'_, '_>> = pages
        .map(|(key, parts)| GetPage { key: *key, parts })
        .collect();
    let statuses = store.get_uncounted(id, &mut pages, None);
    statuses.iter().all(|status| status.is_hit())
}

/// The parts of a page in its memory.
fn parts_of<'a>(payload: &'a mut [u8], shape: &PageShape) -> Vec<IoSliceMut<'a>> {
    let mut rest = payload;
    let mut parts = Vec::with_capacity(shape.parts());
    for part in 0..shape.parts() {
        let bytes = shape.part_bytes(part) as usize;
        let padded = bytes.next_multiple_of(larder_format::BLOCK_BYTES);
        let (memory, behind) = rest.split_at_mut(padded);
        parts.push(IoSliceMut::new(&mut memory[..bytes]));
        rest = behind;
    }
    parts
}

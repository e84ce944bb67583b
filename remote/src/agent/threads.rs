//! The threads of an agent.
//!
//! The lock of the desk is never held during a request or a call of the store.

use std::io::{self, IoSliceMut};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use larder_engine::{GetPage, PageStore, PutOptions};
use larder_format::{Fingerprint, Namespace, PageKey, PageShape, StoreId};
use parking_lot::{Condvar, Mutex};

use super::counts::Count;
use super::desk::{End, Incoming, Outgoing, RUNS_MAX};
use super::{Admission, Agent};
use crate::local;
use crate::remote::{Published, RemoteError};
use crate::run::{self, Draft, RunName};

/// Fetches at once.
pub const FETCHERS: usize = 4;

/// Publications at once.
pub const PUBLISHERS: usize = 1;

/// Attempts to publish a run. Its pages may be on their way into the store, or the remote fails.
const TRIES_MAX: u32 = 5;

/// Longest wait of a put for room.
const PUT_WAIT: Duration = Duration::from_secs(1);

/// Longest time of a listing.
const LISTING_TIMEOUT: Duration = Duration::from_secs(60);

/// Objects of a listing that are noted at once.
const LISTED_AT_ONCE: usize = 4096;

/// The running threads.
#[derive(Default)]
pub(super) struct Threads {
    running: Mutex<usize>,
    ended: Condvar,
    /// The first fault of an object has been logged.
    has_warned: AtomicBool,
}

impl Threads {
    pub(super) fn start(&self, agent: &Arc<Agent>, store: &Arc<dyn PageStore>) -> io::Result<()> {
        self.spawn("larder-publish", agent, store, Agent::publish_runs)?;
        self.spawn("larder-remotes", agent, store, |agent, _| agent.mind())?;
        for _ in 0..FETCHERS {
            self.spawn("larder-fetch", agent, store, Agent::fetch_runs)?;
        }
        Ok(())
    }

    fn spawn(
        &self,
        name: &str,
        agent: &Arc<Agent>,
        store: &Arc<dyn PageStore>,
        work: fn(&Agent, &dyn PageStore),
    ) -> io::Result<()> {
        let (agent, store) = (Arc::clone(agent), Arc::clone(store));
        *self.running.lock() += 1;
        let spawned = thread::Builder::new().name(name.to_owned()).spawn(move || {
            work(&agent, &*store);
            // The store is closed by its owner, perhaps after this thread has let it go.
            drop(store);
            agent.threads.end();
        });
        if spawned.is_err() {
            self.end();
        }
        spawned.map(drop)
    }

    fn end(&self) {
        *self.running.lock() -= 1;
        self.ended.notify_all();
    }

    /// Waits until no thread works, at most until `until`.
    pub(super) fn wait_for_end(&self, until: Instant) {
        let mut running = self.running.lock();
        while *running > 0 && !self.ended.wait_until(&mut running, until).timed_out() {}
    }
}

/// Why a run was not published.
enum NotPublished {
    /// A budget is used up.
    Budget,
    /// The store does not have all its pages.
    Absent,
    Failed(RemoteError),
}

impl From<RemoteError> for NotPublished {
    fn from(error: RemoteError) -> NotPublished {
        NotPublished::Failed(error)
    }
}

/// Publication.
impl Agent {
    fn publish_runs(&self, store: &dyn PageStore) {
        while let Some(run) = self.next_outgoing() {
            let outcome = self.publish(&run, store);
            self.published(run, &outcome);
            self.changed.notify_all();
        }
    }

    /// Waits for a run; `None` when the agent is closed.
    fn next_outgoing(&self) -> Option<Outgoing> {
        let mut desk = self.desk.lock();
        loop {
            if desk.is_closed() {
                return None;
            }
            match desk.next_outgoing(Instant::now()) {
                Some(Ok(run)) => return Some(run),
                Some(Err(wait)) => {
                    self.work.wait_for(&mut desk, wait);
                }
                None => self.work.wait(&mut desk),
            }
        }
    }

    fn publish(&self, run: &Outgoing, store: &dyn PageStore) -> Result<Published, NotPublished> {
        let (namespace, bytes) = {
            let mut desk = self.desk.lock();
            let (namespace, bytes) = desk.space(run.namespace).ok_or(NotPublished::Absent)?;
            let now = Instant::now();
            // The question whether it is there, and the publication.
            if !desk.hour.has(2, now) || !desk.day.has(bytes, now) {
                return Err(NotPublished::Budget);
            }
            desk.hour.spend(1);
            (namespace, bytes)
        };
        let trust = self.options.trust.clone();
        let mut draft = Draft::new(namespace.clone(), run.pages.clone(), trust);
        let name = draft.name().ok_or(NotPublished::Absent)?;
        if self.remote.holds(&name, self.deadline())? {
            return Ok(Published::Present);
        }
        let keys: Vec<PageKey> = run.pages.iter().map(|page| page.key).collect();
        if !read(store, &namespace, &keys, &mut draft) {
            return Err(NotPublished::Absent);
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        // An object is the same whichever node made it, but for its time.
        let store_id = StoreId::from_bytes([0; 16]);
        let object = draft.finish(store_id, now.map_or(0, |now| now.as_secs()));
        let object = object.map_err(|_| NotPublished::Absent)?;
        {
            let mut desk = self.desk.lock();
            desk.hour.spend(1);
            desk.day.spend(bytes);
            desk.second.spend(bytes);
        }
        Ok(self.remote.publish(&name, object, self.deadline())?)
    }

    fn published(&self, mut run: Outgoing, outcome: &Result<Published, NotPublished>) {
        run.tries += 1;
        let is_last = run.tries >= TRIES_MAX;
        let may_come = self.options.admission == Admission::Through || run.tries < 2;
        let (count, again) = match outcome {
            Ok(Published::Created) => (Count::RunsPublished, false),
            Ok(Published::Present) => (Count::RunsPresent, false),
            Err(NotPublished::Budget) => (Count::RunsDroppedBudget, false),
            Err(NotPublished::Absent) => (Count::RunsDroppedAbsent, may_come && !is_last),
            Err(NotPublished::Failed(_)) => (Count::RunsDroppedFailed, !is_last),
        };
        match outcome {
            Ok(_) => self.succeeded(),
            Err(NotPublished::Failed(error)) => self.failed(error),
            Err(_) => {}
        }
        let mut desk = self.desk.lock();
        if again {
            run.due = Instant::now() + self.options.delay;
            let dropped = desk.queue(run);
            drop(desk);
            self.count(Count::RunsDroppedQueue, dropped);
            return;
        }
        desk.published(&run, outcome.is_ok());
        let bytes = desk.space(run.namespace).map_or(0, |(_, bytes)| bytes);
        drop(desk);
        self.count(count, 1);
        if matches!(outcome, Ok(Published::Created)) {
            self.count(Count::BytesPublished, bytes);
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
    let statuses = store.get(id, &mut pages, None);
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

/// Fetches.
impl Agent {
    fn fetch_runs(&self, store: &dyn PageStore) {
        while let Some(run) = self.next_incoming() {
            let end = match Instant::now() >= run.until {
                true => {
                    self.count(Count::RunsLate, 1);
                    End::GivenUp
                }
                false => self.fetch(&run, store),
            };
            self.desk.lock().arrived(&run, end);
            self.changed.notify_all();
        }
    }

    /// Waits for a run; `None` when the agent is closed.
    fn next_incoming(&self) -> Option<Incoming> {
        let mut desk = self.desk.lock();
        loop {
            if desk.is_closed() {
                return None;
            }
            if let Some(run) = desk.next_incoming() {
                return Some(run);
            }
            self.work.wait(&mut desk);
        }
    }

    fn fetch(&self, run: &Incoming, store: &dyn PageStore) -> End {
        // The pages of all fetches that end meanwhile count in the speed of each.
        let (begin, before) = (Instant::now(), self.counts.of(Count::BytesFetched));
        let bytes_max = usize::try_from(run.bytes).unwrap_or(usize::MAX);
        let object = match self.remote.fetch(&run.name, bytes_max, self.deadline()) {
            Ok(Some(object)) => object,
            Ok(None) => {
                self.succeeded();
                self.count(Count::RunsGone, 1);
                return End::Gone;
            }
            Err(error) => {
                self.count(Count::FetchesFailed, 1);
                self.failed(&error);
                return End::GivenUp;
            }
        };
        self.succeeded();
        self.count(Count::RunsFetched, 1);
        self.count(Count::BytesFetched, object.len() as u64);
        let arrived = self.counts.of(Count::BytesFetched) - before;
        self.desk.lock().speed.measure(arrived, begin.elapsed());
        self.take(&run.name, &object, store)
    }

    /// Puts the good pages of an object into the store.
    fn take(&self, name: &RunName, object: &[u8], store: &dyn PageStore) -> End {
        let opened = run::open(object, name, &self.options.trust);
        let (good, faulty): (Vec<_>, Vec<_>) =
            opened.pages.iter().partition(|page| page.payload.is_ok());
        let is_faulty = opened.fault.is_some() || !faulty.is_empty();
        self.count(Count::RunsFaulty, u64::from(opened.fault.is_some()));
        self.count(Count::PagesFaulty, faulty.len() as u64);
        if is_faulty && !self.threads.has_warned.swap(true, Ordering::Relaxed) {
            let page = faulty.iter().find_map(|page| page.payload.err());
            let fault = opened.fault.as_ref().map(ToString::to_string);
            let reason = fault.or(page.map(|page| page.to_string()));
            tracing::warn!(
                run = %name,
                "pages of the remote are not taken: {}; `larder remote verify` lists all (logged \
                 once)",
                reason.unwrap_or_default()
            );
        }
        if let Some(namespace) = &opened.namespace
            && let Ok(id) = store.namespace(namespace)
        {
            let options = PutOptions::waiting(PUT_WAIT);
            let statuses = local::put(store, id, namespace.shape(), &good, options);
            let stored = statuses.iter().filter(|status| status.is_present()).count();
            self.count(Count::PagesStored, stored as u64);
            self.count(Count::PagesRefused, (statuses.len() - stored) as u64);
        }
        if is_faulty { End::Faulty } else { End::Stored }
    }
}

/// The remote's state.
impl Agent {
    fn deadline(&self) -> Instant {
        Instant::now() + self.options.timeout
    }

    fn succeeded(&self) {
        let mut desk = self.desk.lock();
        let was_open = !desk.breaker.is_closed();
        desk.breaker.succeeded();
        drop(desk);
        if was_open {
            tracing::info!("{} answers again", self.options.place);
            self.work.notify_all();
        }
    }

    fn failed(&self, error: &RemoteError) {
        let mut desk = self.desk.lock();
        if !desk.failed(error, &self.options) {
            return;
        }
        let late = desk.give_up();
        drop(desk);
        self.count(Count::BreakerOpenings, 1);
        self.count(Count::RunsLate, late);
        tracing::warn!(
            "no requests to {} for some time: {error}; lookups answer from the local store alone",
            self.options.place
        );
        self.changed.notify_all();
        // The minder probes.
        self.work.notify_all();
    }

    /// Lists the remote at intervals, and probes it while the breaker is open.
    fn mind(&self) {
        let mut next_listing = Instant::now();
        loop {
            let probe_at = {
                let mut desk = self.desk.lock();
                loop {
                    if desk.is_closed() {
                        return;
                    }
                    let at = desk.breaker.probe_at().unwrap_or(next_listing);
                    if at <= Instant::now() {
                        break desk.breaker.probe_at();
                    }
                    self.work.wait_until(&mut desk, at);
                }
            };
            if probe_at.is_some() {
                self.probe();
            } else {
                self.list();
                next_listing = Instant::now() + self.options.refresh;
            }
        }
    }

    fn probe(&self) {
        let no_run = RunName {
            namespace: Fingerprint::from_bytes([0; 16]),
            last: PageKey::from_bytes([0; 32]),
        };
        match self.remote.holds(&no_run, self.deadline()) {
            Ok(_) => self.succeeded(),
            Err(error) => {
                self.desk.lock().failed(&error, &self.options);
            }
        }
    }

    /// Notes the names of all runs. Fetches one if the speed is not known.
    fn list(&self) {
        let (mut some, mut last, mut is_full) = (Vec::new(), None, false);
        let note = |some: &mut Vec<RunName>| {
            let mut desk = self.desk.lock();
            let noted = some
                .drain(..)
                .all(|name| desk.add_known((name.namespace, name.last.prefix())));
            !noted || desk.is_closed()
        };
        let mut each = |object: crate::remote::Listed| {
            some.push(object.run);
            last = Some(object);
            if some.len() >= LISTED_AT_ONCE {
                is_full = note(&mut some);
            }
            match is_full {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        };
        let until = Instant::now() + LISTING_TIMEOUT;
        let listed = self.remote.list(None, &mut each, until);
        is_full |= note(&mut some);
        match listed {
            Ok(()) => self.succeeded(),
            Err(error) => self.failed(&error),
        }
        if is_full && !self.desk.lock().is_closed() {
            tracing::warn!("more than {RUNS_MAX} runs are listed: the others are not known here");
        }
        let is_measured = self.desk.lock().speed.bytes_per_second() > 0;
        let Some(object) = last.filter(|_| !is_measured) else {
            return;
        };
        let (begin, bytes) = (Instant::now(), usize::try_from(object.bytes));
        let fetched = self
            .remote
            .fetch(&object.run, bytes.unwrap_or(usize::MAX), self.deadline());
        match fetched {
            Ok(Some(fetched)) => {
                let bytes = fetched.len() as u64;
                self.desk.lock().speed.measure(bytes, begin.elapsed());
            }
            Ok(None) => {}
            Err(error) => self.failed(&error),
        }
    }
}

//! The threads of an agent: they wait for work, and do it.
//!
//! The lock of the desk is never held during a request or a call of the store.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use larder_base::runtime::{Condvar, Instant, Mutex, MutexGuard, thread};
use larder_engine::PageStore;

use super::Agent;
use super::counts::Count;
use super::desk::{Chore, Desk, Errand, Fetch, Outgoing};
use crate::buffer;

/// Threads that wait for fetches. Others are started for more fetches at once, and end with them.
const FETCHERS: usize = 4;

/// Publications at once: the next run is read and sealed while others are sent.
pub const PUBLICATIONS: usize = 3;

/// Time without work after which the memory of objects is freed.
const MEMORY_PATIENCE: Duration = Duration::from_mins(1);

/// Time between two writes of the memory of puts.
const MEMORY_PERIOD: Duration = Duration::from_mins(10);

/// The running threads.
#[derive(Default)]
pub(super) struct Threads {
    running: Mutex<usize>,
    ended: Condvar,
    /// The first fault of an object has been logged.
    pub(super) has_warned: AtomicBool,
    /// A setting of the codec that could not be read has been logged.
    pub(super) has_no_codec: AtomicBool,
    /// The first object that could not be read has been logged.
    pub(super) has_left_out: AtomicBool,
    /// The first thread that could not be started has been logged.
    has_failed: AtomicBool,
    /// The first listing that failed while the remote answered has been logged.
    pub(super) has_ended_early: AtomicBool,
    /// The first page that the store refused has been logged.
    pub(super) has_refused: AtomicBool,
}

impl Threads {
    pub(super) fn start(&self, agent: &Arc<Agent>, store: &Arc<dyn PageStore>) -> io::Result<()> {
        self.spawn("larder-remotes", agent, store, |agent, store| {
            agent.mind(&**store);
        })?;
        self.spawn("larder-search", agent, store, |agent, _| agent.seek())?;
        for _ in 0..PUBLICATIONS {
            self.spawn("larder-publish", agent, store, |agent, store| {
                agent.publish_runs(&**store);
            })?;
        }
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
        work: fn(&Arc<Agent>, &Arc<dyn PageStore>),
    ) -> io::Result<()> {
        let (agent, store) = (Arc::clone(agent), Arc::clone(store));
        *self.running.lock() += 1;
        let spawned = thread::Builder::new().name(name.to_owned()).spawn(move || {
            work(&agent, &store);
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

/// When the memory of objects is freed, unless there is work before.
fn release_at() -> Option<Instant> {
    Some(Instant::now() + MEMORY_PATIENCE)
}

impl Agent {
    fn publish_runs(&self, store: &dyn PageStore) {
        while let Some(run) = self.next_outgoing() {
            self.send(run, store);
        }
    }

    /// Waits for a run; `None` when the agent is closed.
    fn next_outgoing(&self) -> Option<Outgoing> {
        let (mut desk, mut release) = (self.desk.lock(), release_at());
        loop {
            if desk.is_closed() {
                return None;
            }
            match desk.next_outgoing(Instant::now()) {
                Some(Ok(run)) => return Some(run),
                Some(Err(wait)) => {
                    self.work.wait_for(&mut desk, wait);
                }
                None => self.idle(&mut desk, &mut release),
            }
        }
    }

    /// Waits for work on objects, or until `release`, when their memory is freed once.
    fn idle(&self, desk: &mut MutexGuard<'_, Desk>, release: &mut Option<Instant>) {
        let Some(until) = *release else {
            self.work.wait(desk);
            return;
        };
        if self.work.wait_until(desk, until).timed_out() {
            MutexGuard::unlocked(desk, buffer::release);
            *release = None;
        }
    }

    fn fetch_runs(self: &Arc<Self>, store: &Arc<dyn PageStore>) {
        while let Some(fetch) = self.wait_for_fetch() {
            self.bring_beside(&fetch, store);
        }
    }

    /// Fetches the runs that wait, and does not wait for others.
    fn fetch_waiting(self: &Arc<Self>, store: &Arc<dyn PageStore>) {
        loop {
            let next = self.next_fetch(&mut self.desk.lock());
            match next {
                Some(fetch) => self.bring_beside(&fetch, store),
                None => return,
            }
        }
    }

    /// Fetches a run. Another thread takes the next one, if no other waits for it.
    fn bring_beside(self: &Arc<Self>, fetch: &Fetch, store: &Arc<dyn PageStore>) {
        if self.desk.lock().needs_fetcher(FETCHERS) {
            let threads = &self.threads;
            let spawned = threads.spawn("larder-fetch", self, store, Agent::fetch_waiting);
            if let Err(error) = spawned
                && !threads.has_failed.swap(true, Ordering::Relaxed)
            {
                tracing::warn!(
                    "fewer runs are fetched at once: a thread cannot be started ({error}); raise \
                     the limit of threads (logged once)"
                );
            }
        }
        self.bring(fetch, &**store);
    }

    /// Waits for a run; `None` when the agent is closed.
    fn wait_for_fetch(&self) -> Option<Fetch> {
        let (mut desk, mut release) = (self.desk.lock(), release_at());
        loop {
            if desk.is_closed() {
                return None;
            }
            let next = self.next_fetch(&mut desk);
            if next.is_some() {
                return next;
            }
            self.idle(&mut desk, &mut release);
        }
    }

    fn next_fetch(&self, desk: &mut Desk) -> Option<Fetch> {
        let mut late = 0;
        let next = desk.next_fetch(Instant::now(), &mut late);
        if late > 0 {
            self.count(Count::RunsLate, late);
            self.changed.notify_all();
        }
        next
    }

    fn seek(&self) {
        loop {
            let errand = {
                let mut desk = self.desk.lock();
                loop {
                    if desk.is_closed() {
                        return;
                    }
                    if let Some(errand) = desk.next_errand(Instant::now()) {
                        break errand;
                    }
                    self.work.wait(&mut desk);
                }
            };
            match errand {
                Errand::Search(search) => self.search(&search),
                Errand::Touch(run) => self.touch(&run),
            }
        }
    }

    /// Lists the remote at intervals, measures its speed, and probes it while the breaker is open.
    /// Not before the store is in use: other processes of the node may have the same configuration,
    /// and its owner the memory of puts.
    fn mind(&self, store: &dyn PageStore) {
        while self.wait_for_use() {
            self.recall();
            self.mind_use(store);
        }
    }

    /// Does so until the use of the store ends, or another one has begun meanwhile.
    fn mind_use(&self, store: &dyn PageStore) {
        let mut listing = Instant::now();
        let mut writing = listing + MEMORY_PERIOD;
        // After the last listing, if it failed.
        let mut pause = None;
        loop {
            let chore = {
                let mut desk = self.desk.lock();
                loop {
                    if desk.is_closed() || !desk.has_recalled() {
                        return;
                    }
                    match desk.next_chore(Instant::now(), listing, writing) {
                        Some(Ok(chore)) => break chore,
                        Some(Err(at)) => {
                            self.work.wait_until(&mut desk, at);
                        }
                        None => self.work.wait(&mut desk),
                    }
                }
            };
            match chore {
                Chore::Probe => self.probe(),
                Chore::List => {
                    // A store may grow.
                    let usable_bytes = store.stats().usable_bytes;
                    self.desk.lock().usable_bytes = usable_bytes;
                    let is_whole = self.list();
                    pause = (!is_whole).then(|| self.pauses().next(pause));
                    listing = Instant::now() + pause.unwrap_or(self.options.refresh);
                }
                Chore::Sample => self.sample(),
                Chore::Remember => {
                    self.remember();
                    writing = Instant::now() + MEMORY_PERIOD;
                }
            }
        }
    }
}

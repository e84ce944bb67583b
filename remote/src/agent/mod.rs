//! The agent of a node: shares the pages of a store with other nodes, while the store is in use.
//!
//! It lies beneath the store in the owner's process (`larder_store::beneath`), so it serves all
//! processes that use the store. Puts and lookups only leave notes at its desk. Its threads move
//! the bytes: out of the store by ordinary gets, into the store by ordinary puts.
//!
//! ```text
//!   puts and lookups of all processes of the node
//!        |  asked, used, missed: RAM alone                       wait
//!   +----v-----------------------------------------------------------+
//!   | desk: chains of pages, known runs, queues, breaker, speed      |
//!   +----+----------------+----------------+----------------+--------+
//!        | runs to send   | runs to bring  | prefixes       | due
//!   +----v------+  +------v-----+  +-------v----+  +--------v---+
//!   | publisher |  | fetchers   |  | searcher   |  | minder     |
//!   +----+------+  +------+-----+  +-------+----+  +--------+---+
//!        | publish        | fetch          | holds          | list, probe, fetch
//!        +----------------+----------------+----------------+------> remote
//! ```
//!
//! A module imports only the modules below it.
//!
//! | module | content |
//! |---|---|
//! | `levels` | several remotes beneath one store |
//! | `threads` | the threads, and their waits |
//! | `publish`, `fetch`, `mind` | the work of the threads |
//! | `desk` | the state under one lock, and its decisions |
//! | `speed` | the measured speed |
//! | `names` | the names of the runs in the remote |
//! | `touches` | the runs whose use is to be marked in the remote |
//! | `search` | the prefixes whose runs are searched for in the remote |
//! | `limits` | the budgets, the pauses, and the breaker |
//! | `memory` | the file that keeps the pages of puts from owner to owner |
//! | `chains` | the pages of puts, and the runs that they make |
//! | `options` | the configuration |
//! | `counts` | the counters |
//!
//! Promises:
//! - No put, lookup or close waits for the remote, and a read waits at most until its deadline or
//!   for [`AgentOptions::patience`], whichever is shorter.
//! - A lookup counts a page of the remote only if the measured speed brings it within that time.
//! - With keys the store takes no page before its tag was verified.

mod chains;
mod counts;
mod desk;
mod fetch;
mod levels;
mod limits;
mod memory;
mod mind;
mod names;
mod options;
mod publish;
mod search;
mod speed;
mod threads;
mod touches;

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use larder_base::runtime::{Condvar, Instant, Mutex, OnceLock};
use larder_core::grants::Ask;
use larder_engine::PageStore;
use larder_format::{Fingerprint, Namespace, PageKey};
use larder_store::beneath::{Beneath, BeneathReport};

use crate::remote::Remote;
use crate::run::RunPage;
use counts::{Count, Counts};
use desk::Desk;
pub use levels::Levels;
use memory::Memory;
pub use options::{Admission, AgentOptions};
pub use speed::CONNECTIONS_MAX;
pub use threads::PUBLICATIONS;
use threads::Threads;

/// Longest wait of [`Agent::close`].
pub(crate) const CLOSE_PATIENCE: Duration = Duration::from_secs(2);

/// See the [module](self).
pub struct Agent {
    remote: Box<dyn Remote>,
    options: AgentOptions,
    desk: Mutex<Desk>,
    /// Notified when there is work for a thread.
    work: Condvar,
    /// Notified when pages have arrived, or will not, and when a publication is over.
    changed: Condvar,
    counts: Counts,
    threads: Threads,
    memory: OnceLock<Memory>,
}

impl Agent {
    /// An agent without a store yet.
    #[must_use]
    pub fn new(remote: Box<dyn Remote>, options: AgentOptions) -> Arc<Agent> {
        Arc::new(Agent {
            desk: Mutex::new(Desk::new(&options, Instant::now())),
            remote,
            options,
            work: Condvar::new(),
            changed: Condvar::new(),
            counts: Counts::default(),
            threads: Threads::default(),
            memory: OnceLock::new(),
        })
    }

    /// Once this process owns the store: recalls the pages of puts from the file beside it, by its
    /// first volume, and keeps them there if `keeps`. Before [`start`](Self::start).
    pub fn remember_beside(&self, volume: &Path, keeps: bool) {
        if let Some(memory) = Memory::beside(volume, keeps, &self.options.trust) {
            self.memory.get_or_init(|| memory);
        }
    }

    /// Starts to work for the store that was opened over this agent.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(self: &Arc<Self>, store: &Arc<dyn PageStore>) -> std::io::Result<()> {
        self.threads.start(self, store)
    }

    /// Offers a run of stored pages that a former owner may not have published. Waits while many
    /// runs are queued. False when the agent is closed, or the use of the store has ended.
    pub fn offer(&self, namespace: &Namespace, pages: Vec<RunPage>) -> bool {
        let now = Instant::now();
        let mut desk = self.desk.lock();
        let is_over = |desk: &Desk| desk.is_closed() || !desk.is_in_use();
        while !is_over(&desk) && desk.is_busy() {
            self.changed.wait(&mut desk);
        }
        if is_over(&desk) {
            return false;
        }
        self.open(&mut desk, namespace);
        let noted = desk.offer(namespace.fingerprint(), pages, now);
        drop(desk);
        self.noted(noted);
        true
    }

    /// Ends the work. Waits at most two seconds for requests in progress.
    pub fn close(&self) {
        let was_open = self.stop();
        self.end(was_open, Instant::now() + CLOSE_PATIENCE);
    }

    /// Begins the end of the work. Returns whether it had not begun before.
    pub(crate) fn stop(&self) -> bool {
        let was_open = self.desk.lock().close();
        self.work.notify_all();
        self.changed.notify_all();
        was_open
    }

    /// Waits for requests in progress, at most until `until`. Writes the memory of puts if the
    /// agent was open.
    pub(crate) fn end(&self, was_open: bool, until: Instant) {
        self.threads.wait_for_end(until);
        if was_open {
            self.end_use();
        }
    }

    /// Waits until the store uses this agent. False when it is closed before.
    pub fn wait_for_use(&self) -> bool {
        let mut desk = self.desk.lock();
        while !desk.is_closed() && !desk.is_in_use() {
            self.changed.wait(&mut desk);
        }
        !desk.is_closed()
    }

    /// Waits until this holds of the report, and looks when a fetch or a publication has ended.
    /// False at `until`.
    pub fn wait_for(&self, until: Instant, is_so: impl Fn(&BeneathReport) -> bool) -> bool {
        let mut desk = self.desk.lock();
        loop {
            if is_so(&self.report_of(&desk)) {
                return true;
            }
            if self.changed.wait_until(&mut desk, until).timed_out() {
                return false;
            }
        }
    }

    fn open(&self, desk: &mut Desk, namespace: &Namespace) -> bool {
        let requests = |bytes| self.remote.requests_of_fetch(bytes);
        desk.open(namespace, &self.options, requests)
    }

    fn count(&self, what: Count, number: u64) {
        self.counts.add(what, number);
    }
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Agent({})", self.options.place)
    }
}

impl Beneath for Agent {
    fn encrypts(&self) -> bool {
        self.options.trust.encrypts()
    }

    fn began(&self) {
        self.desk.lock().begin_use();
        self.work.notify_all();
        self.changed.notify_all();
    }

    fn ended(&self) {
        self.end_use();
        self.work.notify_all();
        self.changed.notify_all();
    }

    fn opened(&self, namespace: &Namespace) {
        let is_new = self.open(&mut self.desk.lock(), namespace);
        if is_new {
            // A run of it may measure the speed.
            self.work.notify_all();
        }
    }

    fn asked(&self, namespace: Fingerprint, pages: &[Ask]) {
        let mut desk = self.desk.lock();
        let noted = desk.asked(namespace, pages, Instant::now(), &self.options);
        drop(desk);
        self.noted(noted);
    }

    fn used(&self, namespace: Fingerprint, keys: &[PageKey]) {
        let mut desk = self.desk.lock();
        let noted = desk.used(namespace, keys, Instant::now());
        drop(desk);
        self.noted(noted);
    }

    fn missed(&self, namespace: Fingerprint, keys: &[PageKey], found: usize) -> usize {
        let now = Instant::now();
        let mut desk = self.desk.lock();
        let missed = desk.missed(namespace, keys, found, now, &self.options);
        drop(desk);
        self.count(Count::RunsTooSlow, missed.too_slow);
        self.count(Count::PagesPromised, missed.promised as u64);
        if missed.begun + missed.searches > 0 {
            self.work.notify_all();
        }
        missed.promised
    }

    fn wait(&self, namespace: Fingerprint, keys: &[PageKey], until: Instant) {
        let until = until.min(Instant::now() + self.options.patience);
        let mut desk = self.desk.lock();
        while desk.some_arriving(namespace, keys) {
            if self.changed.wait_until(&mut desk, until).timed_out() {
                break;
            }
        }
    }

    fn use_it(&self, is_used: bool) {
        let late = self.desk.lock().use_it(is_used);
        self.count(Count::RunsLate, late);
        tracing::info!(
            "{}: switched {}",
            self.options.place,
            if is_used { "on" } else { "off" }
        );
        self.work.notify_all();
        self.changed.notify_all();
    }

    fn report(&self) -> BeneathReport {
        self.report_of(&self.desk.lock())
    }
}

impl Agent {
    fn report_of(&self, desk: &Desk) -> BeneathReport {
        let budgets = [
            ("budget_bytes_per_day", self.options.bytes_per_day),
            ("budget_requests_per_hour", self.options.requests_per_hour),
        ];
        BeneathReport {
            place: self.options.place.clone(),
            state: desk.state(Instant::now()),
            works: desk.works(),
            counts: self.counts.all(&[&desk.sizes()[..], &budgets].concat()),
        }
    }

    /// Runs were noted for publication, and others dropped for them.
    fn noted(&self, noted: desk::Noted) {
        self.count(Count::RunsDroppedQueue, noted.dropped);
        if noted.queued + noted.touched > 0 {
            self.work.notify_all();
        }
    }
}

#[cfg(test)]
mod tests;

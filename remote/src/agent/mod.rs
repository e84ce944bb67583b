//! The agent of a node: shares the pages of a store with other nodes, while the store is in use.
//!
//! It lies beneath the store in the owner's process (`larder_engine::beneath`), so it serves all
//! processes that use the store. Puts and lookups only leave notes at its desk. Its threads move
//! the bytes: out of the store by ordinary gets, into the store by ordinary puts.
//!
//! ```text
//!   puts and lookups of all processes of the node
//!        |  asked, used, missed: RAM alone                       wait
//!   +----v-----------------------------------------------------------+
//!   | desk: chains of pages, known runs, queues, breaker, speed      |
//!   +----+-------------------------+----------------------+----------+
//!        | runs to send            | runs to bring        | due
//!   +----v------+           +------v-----+         +------v-----+
//!   | publisher |           | fetchers   |         | minder     |
//!   +----+------+           +------+-----+         +------+-----+
//!        | publish                 | fetch                | list, probe
//!        +-------------------------+----------------------+--------> remote
//! ```
//!
//! | module | content |
//! |---|---|
//! | `desk` | the state under one lock, and its decisions |
//! | `chains` | the pages of puts, and the runs that they make |
//! | `limits` | the budgets of the publisher, the measured speed, the breaker |
//! | `counts` | the counters |
//! | `threads` | publisher, fetchers, minder |
//!
//! Promises:
//! - No put, lookup or close waits for the remote, and a read waits at most until its deadline or
//!   for [`AgentOptions::patience`], whichever is shorter.
//! - A lookup counts a page of the remote only if the measured speed brings it within that time.
//! - The store takes no page before its seal was verified.

mod chains;
mod counts;
mod desk;
mod limits;
mod threads;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_engine::PageStore;
use larder_engine::beneath::{Beneath, BeneathReport};
use larder_engine::catalog::Ask;
use larder_format::{Fingerprint, Namespace, PageKey};
use parking_lot::{Condvar, Mutex};

use crate::keys::Trust;
use crate::remote::Remote;
use crate::run::RunPage;
use counts::{Count, Counts};
use desk::Desk;
use threads::Threads;
pub use threads::{FETCHERS, PUBLISHERS};

/// Longest wait of [`Agent::close`].
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);

/// Which runs are published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Each run, when its last page is put.
    Through,
    /// A run whose last page is found or touched after it was put.
    SecondTouch,
}

/// The configuration of an agent.
#[derive(Clone)]
pub struct AgentOptions {
    /// The name of the remote, for reports.
    pub place: String,
    /// The runs that the store takes, and the key that seals its own.
    pub trust: Trust,
    /// Tokens of a run; the same on all nodes.
    pub run_tokens: u32,
    /// Which runs are published.
    pub admission: Admission,
    /// Most bytes published in a day.
    pub bytes_per_day: u64,
    /// Most bytes published in a second.
    pub bytes_per_second: u64,
    /// Most requests of the publisher in an hour.
    pub requests_per_hour: u64,
    /// Longest time in which a read waits for pages of the remote.
    pub patience: Duration,
    /// Longest time of one request.
    pub timeout: Duration,
    /// Tokens that the engine computes in a second: pages that it computes faster than they arrive
    /// are not fetched. Without it the patience alone decides.
    pub prefill_rate: Option<f64>,
    /// Time between two listings of the remote.
    pub refresh: Duration,
    /// Time between the note of a run and its publication, in which its pages are written.
    pub delay: Duration,
}

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
        })
    }

    /// Starts to work for the store that was opened over this agent.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(self: &Arc<Self>, store: &Arc<dyn PageStore>) -> std::io::Result<()> {
        self.threads.start(self, store)
    }

    /// Offers a run of stored pages that a former owner may not have published. Waits while many
    /// runs are queued. False when the agent is closed.
    pub fn offer(&self, namespace: &Namespace, pages: Vec<RunPage>) -> bool {
        let mut desk = self.desk.lock();
        desk.open(namespace, &self.options);
        while !desk.is_closed() && desk.is_busy() {
            self.changed.wait(&mut desk);
        }
        let noted = desk.offer(namespace.fingerprint(), pages, Instant::now());
        let is_closed = desk.is_closed();
        drop(desk);
        self.noted(noted);
        !is_closed
    }

    /// Ends the work. Waits at most two seconds for requests in progress.
    pub fn close(&self) {
        self.desk.lock().close();
        self.work.notify_all();
        self.changed.notify_all();
        self.threads.wait_for_end(Instant::now() + CLOSE_PATIENCE);
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
    fn opened(&self, namespace: &Namespace) {
        self.desk.lock().open(namespace, &self.options);
    }

    fn asked(&self, namespace: Fingerprint, pages: &[Ask]) {
        let mut desk = self.desk.lock();
        let noted = desk.asked(namespace, pages, Instant::now(), &self.options);
        drop(desk);
        self.noted(noted);
    }

    fn used(&self, namespace: Fingerprint, keys: &[PageKey]) {
        if self.options.admission == Admission::Through {
            return;
        }
        let mut desk = self.desk.lock();
        let noted = desk.used(namespace, keys, Instant::now());
        drop(desk);
        self.noted(noted);
    }

    fn missed(&self, namespace: Fingerprint, keys: &[PageKey]) -> usize {
        let mut desk = self.desk.lock();
        let missed = desk.missed(namespace, keys, Instant::now(), &self.options);
        drop(desk);
        self.count(Count::RunsTooSlow, missed.too_slow);
        self.count(Count::PagesPromised, missed.promised as u64);
        if missed.begun > 0 {
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

    fn report(&self) -> BeneathReport {
        let desk = self.desk.lock();
        BeneathReport {
            place: self.options.place.clone(),
            state: desk.state(Instant::now()),
            works: desk.works(),
            counts: self.counts.all(&desk.sizes()),
        }
    }
}

impl Agent {
    /// Runs were noted for publication, and others dropped for them.
    fn noted(&self, noted: desk::Noted) {
        self.count(Count::RunsDroppedQueue, noted.dropped);
        if noted.queued > 0 {
            self.work.notify_all();
        }
    }
}

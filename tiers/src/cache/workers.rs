//! The threads that wait for L3 instead of the scheduler.
//!
//! There are three kinds of work: lookups, reads and writes. Lookups and writes are executed in
//! submission order. Several reads run concurrently, each for a separate prefetch, so that a
//! stalled read does not delay the others. When [`Ends`] is dropped, each thread ends after its
//! current work, because no one receives the answer. The work left in the queues is dropped.
//!
//! Faults covered: a call of L3 that does not return. Its thread is left behind with the memory
//! that was lent to the call ([`Workers::end`]).

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use larder_base::fork::Origin;
use larder_engine::Count;
use larder_format::PageKey;

use super::lent::LentPages;
use crate::config::Config;
use crate::core::{Done, OpId, Outcome};
use crate::l3::L3;

/// A unit of work for a thread.
pub(super) enum Work {
    Exists {
        id: OpId,
        keys: Vec<PageKey>,
        is_counted: bool,
    },
    Get {
        id: OpId,
        keys: Vec<PageKey>,
        into: LentPages,
    },
    Put {
        id: OpId,
        keys: Vec<PageKey>,
        parent: Option<PageKey>,
        depth: usize,
        from: LentPages,
    },
    Touch {
        keys: Vec<PageKey>,
    },
}

/// The other ends of the threads.
struct Ends {
    /// Dropped first: a thread that has its answer refused takes no further work.
    answers: Receiver<Answer>,
    asking: Sender<Work>,
    reading: Sender<Work>,
    writing: Sender<Work>,
}

/// The facts by which tokens are counted.
#[derive(Clone, Copy)]
pub(super) struct Terms {
    page_tokens: u64,
    /// Tokens that the engine computes in a second, if known.
    prefill_rate: Option<f64>,
}

impl Terms {
    pub(super) fn of(config: &Config) -> Terms {
        let rate = config.prefetch.break_even_tokens_per_second;
        Terms {
            page_tokens: config.page_tokens.into(),
            prefill_rate: rate.map(|rate| f64::from(rate.get())),
        }
    }

    fn tokens(&self, pages: usize) -> u64 {
        pages as u64 * self.page_tokens
    }
}

/// Calls of L3 that had not returned when their cache ended. The pages of L2 that they use stay,
/// and so does the L3, until they return.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stuck {
    /// Calls.
    pub calls: usize,
    /// Bytes of L2 lent to them. The memory of the whole pool stays.
    pub bytes: u64,
}

/// Bytes lent to calls of L3 that had not returned when their caches ended, in this process.
static LEAKED: AtomicU64 = AtomicU64::new(0);

/// Bytes of L2 that were lent to calls of L3 when their caches ended, in this process: see
/// [`Stuck`].
#[must_use]
pub fn leaked_bytes() -> u64 {
    LEAKED.load(Ordering::Relaxed)
}

/// A completion, with the duration of a read in microseconds.
pub(super) struct Answer {
    pub(super) done: Done,
    pub(super) read_micros: Option<u64>,
}

/// Number of concurrent reads from L3.
pub const READERS: usize = 4;

/// How long the end waits at least: threads without a call end within it.
const ENDING: Duration = Duration::from_millis(100);

/// The threads.
pub(super) struct Workers {
    ends: Option<Ends>,
    threads: Vec<JoinHandle<()>>,
    woken: Arc<OnceLock<Waker>>,
    /// Bytes lent to calls in progress.
    lent: Arc<AtomicU64>,
    /// Its senders end with the threads.
    ended: Receiver<Infallible>,
    origin: Origin,
}

impl Workers {
    /// Starts the threads.
    pub(super) fn start(l3: &Arc<dyn L3>, terms: Terms) -> std::io::Result<Workers> {
        let (answer, answers) = channel();
        let (asking, to_ask) = channel();
        let (reading, to_read) = channel();
        let (writing, to_write) = channel();
        let (alive, ended) = channel();
        let mut workers = Workers {
            ends: Some(Ends {
                answers,
                asking,
                reading,
                writing,
            }),
            threads: Vec::new(),
            woken: Arc::default(),
            lent: Arc::default(),
            ended,
            origin: Origin::here(),
        };
        let mut start = |name: &str, queue: &Arc<Mutex<Receiver<Work>>>| {
            let (l3, queue, answer) = (l3.clone(), queue.clone(), answer.clone());
            let (woken, lent) = (workers.woken.clone(), workers.lent.clone());
            let alive: Sender<Infallible> = alive.clone();
            let thread = std::thread::Builder::new().name(format!("larder-l3-{name}"));
            let thread = thread.spawn(move || {
                serve(&*l3, terms, &queue, &answer, &woken, &lent);
                drop((l3, alive));
            })?;
            workers.threads.push(thread);
            Ok::<(), std::io::Error>(())
        };
        let shared = |queue| Arc::new(Mutex::new(queue));
        start("ask", &shared(to_ask))?;
        start("write", &shared(to_write))?;
        let to_read = shared(to_read);
        (0..READERS).try_for_each(|_| start("read", &to_read))?;
        Ok(workers)
    }

    /// Queues work for its thread. If the thread has ended, returns a completion as if L3 had no
    /// pages and stored none.
    pub(super) fn give(&self, work: Work) -> Option<Done> {
        let id = match &work {
            Work::Exists { id, .. } | Work::Get { id, .. } | Work::Put { id, .. } => Some(*id),
            Work::Touch { .. } => None,
        };
        let queue = self.ends.as_ref().map(|ends| match &work {
            Work::Exists { .. } => &ends.asking,
            Work::Get { .. } => &ends.reading,
            Work::Put { .. } | Work::Touch { .. } => &ends.writing,
        });
        let is_taken = queue.is_some_and(|queue| queue.send(work).is_ok());
        let outcome = Outcome::Pages(0);
        id.filter(|_| !is_taken).map(|id| Done { id, outcome })
    }

    /// Wakes this waker after every later completion. The first waker stays.
    pub(super) fn wake(&self, waker: Waker) {
        let _first = self.woken.set(waker);
    }

    /// The completions since the last call.
    pub(super) fn answers(&self) -> impl Iterator<Item = Answer> + '_ {
        self.ends.iter().flat_map(|ends| ends.answers.try_iter())
    }
}

impl Workers {
    /// Ends the threads after the calls in progress, at `deadline` at the latest. Later, threads
    /// whose calls have not returned stay, with the memory lent to those.
    pub(super) fn end(&mut self, deadline: Option<Instant>) -> Stuck {
        self.ends = None;
        let is_over = match deadline {
            None => true,
            Some(deadline) => {
                let wait = deadline.saturating_duration_since(Instant::now());
                self.ended.recv_timeout(wait.max(ENDING)) != Err(RecvTimeoutError::Timeout)
            }
        };
        let mut stuck = Stuck::default();
        for thread in self.threads.drain(..) {
            if is_over || thread.is_finished() {
                // The panic has already been reported. The thread's orders are never answered, but
                // the core is dropped too.
                let _ = thread.join();
            } else {
                stuck.calls += 1;
            }
        }
        if stuck.calls > 0 {
            stuck.bytes = self.lent.load(Ordering::Relaxed);
            LEAKED.fetch_add(stuck.bytes, Ordering::Relaxed);
            // runbook: calls of L3 have not returned
            tracing::error!(
                "{} calls of L3 have not returned: {} bytes of L2 that they use are not freed",
                stuck.calls,
                stuck.bytes
            );
        }
        stuck
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        if self.origin.is_inherited() {
            // A forked child has none of the threads, and locks may stay held forever.
            std::mem::forget((self.ends.take(), std::mem::take(&mut self.threads)));
            return;
        }
        self.end(None);
    }
}

/// Counts the bytes of a call while it lives.
struct Lent<'a>(&'a AtomicU64, u64);

impl Lent<'_> {
    fn new(lent: &AtomicU64, bytes: u64) -> Lent<'_> {
        lent.fetch_add(bytes, Ordering::Relaxed);
        Lent(lent, bytes)
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

fn serve(
    l3: &dyn L3,
    terms: Terms,
    queue: &Mutex<Receiver<Work>>,
    answers: &Sender<Answer>,
    woken: &OnceLock<Waker>,
    lent: &AtomicU64,
) {
    // One thread waits for work while it holds the lock. The others wait for the lock.
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
    while let Ok(work) = next() {
        let started = Instant::now();
        let mut read_micros = None;
        let (id, pages) = match work {
            Work::Exists {
                id,
                keys,
                is_counted,
            } => {
                let found = l3.longest_prefix(&keys);
                if is_counted {
                    l3.count(Count::Asked {
                        tokens: terms.tokens(keys.len()),
                        found: terms.tokens(found),
                        is_first: true,
                    });
                }
                (id, found)
            }
            Work::Get { id, keys, mut into } => {
                let _lent = Lent::new(lent, into.bytes());
                let pages = into.get(l3, &keys);
                read_micros = u64::try_from(started.elapsed().as_micros()).ok();
                l3.count(Count::Served {
                    tokens: terms.tokens(pages),
                    prefill_rate: terms.prefill_rate,
                });
                (id, pages)
            }
            Work::Put {
                id,
                keys,
                parent,
                depth,
                from,
            } => {
                let _lent = Lent::new(lent, from.bytes());
                (id, from.put(l3, &keys, parent, depth))
            }
            Work::Touch { keys } => {
                l3.touch(&keys);
                continue;
            }
        };
        let outcome = Outcome::Pages(pages);
        let done = Done { id, outcome };
        // The receiver is closed: the cache is being dropped.
        if answers.send(Answer { done, read_micros }).is_err() {
            return;
        }
        if let Some(waker) = woken.get() {
            waker.wake_by_ref();
        }
    }
}

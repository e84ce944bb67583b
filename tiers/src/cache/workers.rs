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

use super::l3s::L3s;
use super::lent::LentPages;
use crate::config::Config;
use crate::core::{Done, OpId, Outcome, TailLookup};
use crate::tails::Legal;

/// A unit of work for a thread.
pub(super) enum Work {
    Exists {
        id: OpId,
        keys: Vec<PageKey>,
        is_counted: bool,
        tails: Option<TailLookup>,
    },
    /// Pages of the model and of each follower.
    Get {
        id: OpId,
        keys: Vec<PageKey>,
        into: Vec<LentPages>,
    },
    GetTails {
        id: OpId,
        pages: Vec<(usize, PageKey, LentPages)>,
    },
    PutTail {
        id: OpId,
        pool: usize,
        key: PageKey,
        from: LentPages,
    },
    Put {
        id: OpId,
        keys: Vec<PageKey>,
        parent: Option<PageKey>,
        depth: usize,
        from: Vec<LentPages>,
    },
    Touch {
        keys: Vec<PageKey>,
        /// The tail pool, unless they are pages of the model.
        pool: Option<usize>,
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
    /// Of a lookup with tail pools.
    pub(super) legal: Option<Legal>,
}

impl Answer {
    /// A completion of anything but a read or such a lookup.
    pub(super) fn of(done: Done) -> Answer {
        Answer {
            done,
            read_micros: None,
            legal: None,
        }
    }
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
    pub(super) fn start(l3s: &L3s, terms: Terms) -> std::io::Result<Workers> {
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
            let (l3s, queue, answer) = (l3s.clone(), queue.clone(), answer.clone());
            let (woken, lent) = (workers.woken.clone(), workers.lent.clone());
            let alive: Sender<Infallible> = alive.clone();
            let thread = std::thread::Builder::new().name(format!("larder-l3-{name}"));
            let thread = thread.spawn(move || {
                serve(&l3s, terms, &queue, &answer, &woken, &lent);
                drop((l3s, alive));
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
            Work::Exists { id, .. }
            | Work::Get { id, .. }
            | Work::GetTails { id, .. }
            | Work::Put { id, .. }
            | Work::PutTail { id, .. } => Some(*id),
            Work::Touch { .. } => None,
        };
        let queue = self.ends.as_ref().map(|ends| match &work {
            Work::Exists { .. } => &ends.asking,
            Work::Get { .. } | Work::GetTails { .. } => &ends.reading,
            Work::Put { .. } | Work::PutTail { .. } | Work::Touch { .. } => &ends.writing,
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
    l3s: &L3s,
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
        let (mut read_micros, mut legal) = (None, None);
        let count = |count| l3s.main.iter().take(1).for_each(|l3| l3.count(count));
        let (id, pages) = match work {
            Work::Exists {
                id,
                keys,
                is_counted,
                tails,
            } => {
                let found = l3s.longest_prefix(&keys);
                if is_counted {
                    count(Count::Asked {
                        tokens: terms.tokens(keys.len()),
                        found: terms.tokens(found),
                        is_first: true,
                    });
                }
                legal = tails.map(|lookup| l3s.legal(&lookup, &keys, found));
                let longest = legal.as_ref().map(|set| set.longest_within(usize::MAX));
                (id, longest.unwrap_or(found))
            }
            Work::Get { id, keys, into } => {
                let bytes = into.iter().map(LentPages::bytes).sum();
                let _lent = Lent::new(lent, bytes);
                let mut pages = keys.len();
                for (mut into, l3) in into.into_iter().zip(&l3s.main) {
                    pages = pages.min(into.get(&**l3, &keys));
                }
                read_micros = u64::try_from(started.elapsed().as_micros()).ok();
                count(Count::Served {
                    tokens: terms.tokens(pages),
                    prefill_rate: terms.prefill_rate,
                });
                (id, pages)
            }
            Work::GetTails { id, pages } => {
                let bytes = pages.iter().map(|(_, _, into)| into.bytes()).sum();
                let _lent = Lent::new(lent, bytes);
                let mut read = 0;
                for (pool, key, mut into) in pages {
                    let l3 = l3s.tails.get(pool);
                    read += l3.map_or(0, |l3| into.get(&**l3, &[key]));
                }
                (id, read)
            }
            Work::Put {
                id,
                keys,
                parent,
                depth,
                from,
            } => {
                let bytes = from.iter().map(LentPages::bytes).sum();
                let _lent = Lent::new(lent, bytes);
                let mut pages = keys.len();
                // A page of the model that L3 has makes no one look for a follower that it lacks.
                for (from, l3) in from.into_iter().zip(&l3s.main).rev() {
                    pages = pages.min(from.put(&**l3, &keys, parent, depth));
                }
                (id, pages)
            }
            Work::PutTail {
                id,
                pool,
                key,
                from,
            } => {
                let _lent = Lent::new(lent, from.bytes());
                let l3 = l3s.tails.get(pool);
                (id, l3.map_or(0, |l3| from.put(&**l3, &[key], None, 0)))
            }
            Work::Touch { keys, pool: None } => {
                l3s.main.iter().for_each(|l3| l3.touch(&keys));
                continue;
            }
            Work::Touch {
                keys,
                pool: Some(pool),
            } => {
                l3s.tails
                    .get(pool)
                    .into_iter()
                    .for_each(|l3| l3.touch(&keys));
                continue;
            }
        };
        let outcome = Outcome::Pages(pages);
        let done = Done { id, outcome };
        // The receiver is closed: the cache is being dropped.
        let answer = Answer {
            done,
            read_micros,
            legal,
        };
        if answers.send(answer).is_err() {
            return;
        }
        if let Some(waker) = woken.get() {
            waker.wake_by_ref();
        }
    }
}

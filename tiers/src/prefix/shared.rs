//! The cache behind its lock, the signal of its progress, and the thread that polls it.
//!
//! Futures wait in a [`Queue`]. Progress wakes only the requests that can go on.
//!
//! The thread sleeps while the cache is idle. While work is in flight it polls in pauses that grow
//! from [`PAUSE_MIN`] to [`PAUSE_MAX`], because copies of a device wake no one. An answer of L3
//! wakes it at once. Threads that wait for something of the cache poll it in the same way. Every
//! duty besides the pauses is in [`Shared::poll`], so an engine can poll instead of the thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use larder_base::fork::Origin;
use larder_format::Fingerprint;
use larder_kernels::L1Pool;
use larder_sync::{Condvar, Mutex, MutexGuard};

use super::error::Closed;
use super::queue::{Place, Queue};
use crate::cache::{Cache, CacheError, Stuck};

/// The first pause after progress.
const PAUSE_MIN: Duration = Duration::from_micros(50);

/// The longest pause while work is in flight.
const PAUSE_MAX: Duration = Duration::from_millis(2);

/// Time between two reports of used pages to L3.
const WARMTH_EVERY: Duration = Duration::from_secs(1);

/// The progress of a cache: its threads wait for it.
#[derive(Default)]
struct Signal {
    /// Number of signals.
    count: Mutex<u64>,
    changed: Condvar,
}

impl Signal {
    fn count(&self) -> u64 {
        *self.count.lock()
    }

    fn give(&self) {
        *self.count.lock() += 1;
        self.changed.notify_all();
    }

    /// Waits for a signal after `seen`, or for the time.
    fn wait(&self, seen: u64, until: Option<Instant>) {
        let mut count = self.count.lock();
        while *count == seen {
            match until {
                None => self.changed.wait(&mut count),
                Some(until) => {
                    if self.changed.wait_until(&mut count, until).timed_out() {
                        return;
                    }
                }
            }
        }
    }
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        self.give();
    }
}

/// Where the pages of a component are numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Numbering {
    /// As the pages of the model.
    Follower,
    /// In the tail pool of this number.
    Tail(usize),
}

/// A component of the model.
pub(super) struct SharedComponent {
    pub(super) place: Numbering,
    /// The pools of L1 of its sections.
    pub(super) sections: Vec<L1Pool>,
}

/// See the module documentation.
pub(super) struct Shared {
    /// `None` after the end.
    cache: Mutex<Option<Cache>>,
    /// Requests whose futures wait. Locked after the cache.
    queue: Mutex<Queue>,
    signal: Arc<Signal>,
    /// The time of the last report of used pages to L3.
    told: Mutex<Instant>,
    l1: L1Pool,
    /// Whether the addresses of `l1` are those of this process.
    is_on_host: bool,
    components: Vec<SharedComponent>,
    /// `None` if its names are not valid.
    namespace: Option<Fingerprint>,
    page_tokens: usize,
    has_ranks: bool,
    origin: Origin,
}

impl Shared {
    pub(super) fn new(
        cache: Cache,
        l1: L1Pool,
        is_on_host: bool,
        components: Vec<SharedComponent>,
        namespace: Option<Fingerprint>,
    ) -> Shared {
        let signal = Arc::<Signal>::default();
        cache.wake_on_l3(signal.clone().into());
        Shared {
            page_tokens: l1.shape().page_tokens() as usize,
            has_ranks: cache.has_ranks(),
            cache: Mutex::new(Some(cache)),
            queue: Mutex::default(),
            signal,
            told: Mutex::new(Instant::now()),
            l1,
            is_on_host,
            components,
            namespace,
            origin: Origin::here(),
        }
    }

    pub(super) fn l1(&self) -> &L1Pool {
        &self.l1
    }

    pub(super) fn is_on_host(&self) -> bool {
        self.is_on_host
    }

    /// Whether the model has windows or states.
    pub(super) fn is_hybrid(&self) -> bool {
        self.components
            .iter()
            .any(|of| of.place != Numbering::Follower)
    }

    pub(super) fn component(&self, number: usize) -> Option<&SharedComponent> {
        self.components.get(number)
    }

    pub(super) fn namespace(&self) -> Option<Fingerprint> {
        self.namespace
    }

    pub(super) fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// Whether there are other ranks: all make the same calls, and no thread polls.
    pub(super) fn has_ranks(&self) -> bool {
        self.has_ranks
    }

    /// Calls the cache. Wakes its thread if the call has begun work.
    pub(super) fn with<R>(&self, call: impl FnOnce(&mut Cache) -> R) -> Result<R, Closed> {
        self.with_any(|cache| match cache.ranks_failure() {
            Some(failure) => Err(failure.clone().into()),
            None => Ok(call(cache)),
        })?
    }

    /// As [`Shared::with`], also after the ranks have ceased to agree: for drops and counters.
    pub(super) fn with_any<R>(&self, call: impl FnOnce(&mut Cache) -> R) -> Result<R, Closed> {
        if self.origin.is_inherited() {
            // The lock may be held for ever.
            return Err(Closed::Ended);
        }
        let mut lock = self.cache.lock();
        let cache = lock.as_mut().ok_or(Closed::Ended)?;
        let was_idle = cache.is_idle();
        let result = call(cache);
        let has_begun = was_idle && !cache.is_idle();
        // A waker that is woken may call the cache.
        drop(lock);
        if has_begun {
            self.signal.give();
        }
        Ok(result)
    }

    /// Processes completions, reports used pages to L3 from time to time, and wakes requests whose
    /// time for L3 may be over. Returns whether anything ended, and whether nothing is in flight.
    pub(super) fn poll(&self) -> Result<(bool, bool), Closed> {
        let (ended, is_idle, ready) = self.with(|cache| {
            let mut told = self.told.lock();
            if told.elapsed() >= WARMTH_EVERY {
                *told = Instant::now();
                cache.tell_warmth();
            }
            let ended = polled(cache)?;
            let mut queue = self.queue.lock();
            // The time of a prefetch may be over, which is no progress of the cache.
            let ready = match ended || queue.is_overdue(PAUSE_MAX) {
                true => queue.ready(cache),
                false => Vec::new(),
            };
            Ok::<_, Closed>((ended, cache.is_idle(), ready))
        })??;
        ready.into_iter().for_each(Waker::wake);
        if ended {
            self.signal.give();
        }
        Ok((ended, is_idle))
    }

    /// Polls until `check` has a result, or until `deadline`. The last check is after it, and knows
    /// that. Of several ranks, the first deadline counts.
    pub(super) fn wait<R>(
        &self,
        deadline: Instant,
        mut check: impl FnMut(&mut Cache, bool) -> Option<R>,
    ) -> Result<Option<R>, Closed> {
        if self.origin.is_inherited() {
            return Err(Closed::Ended);
        }
        let mut pause = PAUSE_MIN;
        loop {
            let (seen, is_over) = (self.signal.count(), Instant::now() >= deadline);
            let (ended, _) = self.poll()?;
            let (found, is_over) = self.with(|cache| {
                let is_over = cache.is_any_late(is_over)?;
                Ok::<_, Closed>((check(cache, is_over), is_over))
            })??;
            if found.is_some() || is_over {
                return Ok(found);
            }
            if !ended {
                let until = (Instant::now() + pause).min(deadline);
                self.signal.wait(seen, Some(until));
                pause = PAUSE_MAX.min(pause * 2);
            }
        }
    }

    /// Notifies waiting requests that a sequence has freed pages.
    pub(super) fn has_freed(&self) {
        let ready = self.with_any(|cache| self.queue.lock().ready(cache));
        let Ok(ready) = ready else {
            return;
        };
        ready.into_iter().for_each(Waker::wake);
        self.signal.give();
    }

    /// The requests whose futures wait. For calls that hold the cache.
    pub(super) fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }

    /// A request waits no longer.
    pub(super) fn leave(&self, place: Place) {
        if !self.origin.is_inherited() {
            self.queue.lock().leave(place);
        }
    }

    /// Ends the cache for all calls, waiting ones first, and then drops it: that waits for copies,
    /// and until `deadline` for calls of L3 in progress. Returns the calls that have not returned.
    /// A forked child does nothing: the lock may be held for ever.
    pub(super) fn end(&self, deadline: Instant) -> Stuck {
        if self.origin.is_inherited() {
            return Stuck::default();
        }
        let cache = self.cache.lock().take();
        let waiting = self.queue.lock().take_all();
        waiting.into_iter().for_each(Waker::wake);
        self.signal.give();
        cache.map_or(Stuck::default(), |cache| cache.end(deadline))
    }
}

/// Whether a poll has processed anything.
fn polled(cache: &mut Cache) -> Result<bool, Closed> {
    match cache.poll() {
        Ok(ended) => Ok(ended > 0),
        Err(error) => {
            tracing::error!("the prefix cache cannot continue: {error}");
            match error {
                CacheError::Ranks(failure) => Err(failure.into()),
                _ => Ok(false),
            }
        }
    }
}

/// The thread that polls. Ends when dropped.
pub(super) struct Poller {
    is_ending: Arc<AtomicBool>,
    signal: Arc<Signal>,
    thread: Option<JoinHandle<()>>,
    origin: Origin,
}

impl Poller {
    pub(super) fn start(shared: &Arc<Shared>) -> std::io::Result<Poller> {
        let is_ending = Arc::new(AtomicBool::new(false));
        let (shared, signal, ends) = (shared.clone(), shared.signal.clone(), is_ending.clone());
        let thread = std::thread::Builder::new().name("larder-poll".to_owned());
        let thread = thread.spawn(move || poll_until(&shared, &ends))?;
        Ok(Poller {
            is_ending,
            signal,
            thread: Some(thread),
            origin: Origin::here(),
        })
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        if self.origin.is_inherited() {
            // A forked child does not have the thread.
            std::mem::forget(self.thread.take());
            return;
        }
        self.is_ending.store(true, Ordering::Release);
        self.signal.give();
        if let Some(thread) = self.thread.take() {
            // A panic has been reported.
            let _ = thread.join();
        }
    }
}

fn poll_until(shared: &Shared, is_ending: &AtomicBool) {
    let mut pause = PAUSE_MIN;
    loop {
        let seen = shared.signal.count();
        if is_ending.load(Ordering::Acquire) {
            return;
        }
        let Ok((ended, is_idle)) = shared.poll() else {
            return;
        };
        if ended {
            pause = PAUSE_MIN;
            continue;
        }
        let is_asleep = is_idle && shared.queue.lock().is_empty();
        shared
            .signal
            .wait(seen, (!is_asleep).then(|| Instant::now() + pause));
        pause = if is_asleep {
            PAUSE_MIN
        } else {
            PAUSE_MAX.min(pause * 2)
        };
    }
}

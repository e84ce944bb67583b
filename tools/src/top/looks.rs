//! The owner's answers, and the rates between two of them.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use larder_core::counters::Counted;
use larder_store::share::{self, View};

use crate::owner::unserved;
use crate::stat::processes::{Before, Processes};

/// Most looks whose rates are kept: a wide terminal has a column for each.
const KEPT_MAX: usize = 512;

/// A look at the store: the owner's answer, or the reason why there is none.
pub struct Look {
    at: Instant,
    view: Result<Box<View>, String>,
}

/// Looks at the store again and again, until the receiver is gone.
pub fn look_on(path: &Path, every: Duration, tell: &SyncSender<Look>) {
    loop {
        let at = Instant::now();
        let view = share::view(path).map(Box::new);
        let view = view.map_err(|error| unserved(path, error).to_string());
        if tell.send(Look { at, view }).is_err() {
            return;
        }
        std::thread::sleep(every.saturating_sub(at.elapsed()));
    }
}

/// Counters per second between two looks.
#[derive(Clone, Copy, Default)]
pub struct Rates {
    pub hits: f64,
    pub misses: f64,
    pub read_bytes: f64,
    pub put_pages: f64,
    pub put_bytes: f64,
    pub evicted: f64,
    pub tokens_found: f64,
    pub tokens_not_found: f64,
}

/// The state of the screen.
pub struct Seen {
    pub path: PathBuf,
    /// The last answer, and its processes.
    pub now: Option<(Box<View>, Processes)>,
    /// The reason why there is no answer now.
    pub failure: Option<String>,
    /// The newest ones first.
    pub rates: VecDeque<Rates>,
    /// The number of namespaces above the shown ones.
    pub first_space: usize,
    before: Before,
    last: Option<(Instant, Counters)>,
}

/// Counters that only grow under one owner.
#[derive(Clone, Copy)]
struct Counters {
    started_unix_s: f64,
    counts: [u64; 8],
}

impl Counters {
    fn of(view: &View) -> Counters {
        let totals = &view.report.totals;
        let tokens = totals.spaces.total().tokens;
        Counters {
            started_unix_s: view.report.started_unix_s,
            counts: [
                totals.counts.hits,
                totals.counts.misses.total(),
                totals.counts.bytes_read,
                totals.counts.pages_put,
                totals.counts.bytes_put,
                totals.store.evicted,
                tokens.found,
                tokens.not_found,
            ],
        }
    }

    fn since(&self, before: &Counters, seconds: f64) -> Rates {
        let rate = |at: usize| self.counts[at].saturating_sub(before.counts[at]) as f64 / seconds;
        Rates {
            hits: rate(0),
            misses: rate(1),
            read_bytes: rate(2),
            put_pages: rate(3),
            put_bytes: rate(4),
            evicted: rate(5),
            tokens_found: rate(6),
            tokens_not_found: rate(7),
        }
    }
}

impl Seen {
    pub fn new(path: &Path) -> Seen {
        Seen {
            path: path.to_owned(),
            now: None,
            failure: None,
            rates: VecDeque::new(),
            first_space: 0,
            before: Before::default(),
            last: None,
        }
    }

    /// Takes a look. A new owner may begin its counters anew: the rates begin with its second look.
    pub fn take(&mut self, look: Look) {
        let view = match look.view {
            Ok(view) => view,
            Err(failure) => {
                self.failure = Some(failure);
                self.now = None;
                self.last = None;
                return;
            }
        };
        let counters = Counters::of(&view);
        let last = self.last.replace((look.at, counters));
        if let Some((at, before)) = last
            && before.started_unix_s == counters.started_unix_s
        {
            let seconds = (look.at - at).as_secs_f64().max(f64::MIN_POSITIVE);
            self.rates.push_front(counters.since(&before, seconds));
            self.rates.truncate(KEPT_MAX);
        }
        let processes = Processes::of(&view.report, &mut self.before);
        self.failure = None;
        self.now = Some((view, processes));
    }
}

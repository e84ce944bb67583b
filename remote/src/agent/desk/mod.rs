//! The state of an agent under one lock, and its decisions. Nothing here waits or does I/O.

mod lookup;
mod outgoing;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use larder_base::runtime::Instant;
use larder_core::grants::Ask;
use larder_engine::CodecChoice;
use larder_format::{Fingerprint, KeyPrefix, Namespace, PageKey};
use larder_store::encoder::Encoder;

use super::chains::Chains;
use super::limits::{Breaker, Budget, Pauses};
use super::names::Names;
use super::options::{Admission, AgentOptions};
use super::search::{Search, Searches};
use super::speed::{CONNECTIONS_MAX, Measured, Speed};
use super::touches::Touches;
use crate::error::RemoteError;
use crate::flights::{Flight, Flights};
use crate::keys::Trust;
use crate::planted::planted;
use crate::remote::Listed;
use crate::run::{RunName, RunNames, RunPage, object_bytes, pages_of_run};
pub(super) use outgoing::Outgoing;

/// Most runs that wait for their publication: beyond it the oldest are dropped.
const OUTGOING_MAX: usize = 4096;

/// The share of the requests that is left to reads.
const READS: u64 = 10;

/// The use of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// It serves lookups: a fetch, a listing, or a look at the remote.
    Read,
    /// It serves a publication or a search.
    Other,
}

/// A run that is to be fetched.
pub(super) struct Incoming {
    pub(super) name: RunName,
    namespace: Fingerprint,
    /// The pages of it that a lookup missed.
    pub(super) pages: Vec<PageKey>,
    pub(super) flight: Flight,
    /// From this moment on no caller waits for it.
    pub(super) until: Instant,
}

/// A fetch in progress.
pub(super) struct Fetch {
    pub(super) run: Incoming,
    measured: Measured,
}

/// A namespace in use.
pub(super) struct Space {
    pub(super) namespace: Namespace,
    /// The names of its runs.
    names: RunNames,
    run_pages: NonZeroU32,
    /// The object of a run.
    run: Flight,
    /// Of the pages of its objects.
    encoder: Option<Arc<Encoder>>,
}

/// Runs that were queued for publication, and others that were dropped for them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Noted {
    pub(super) queued: u64,
    pub(super) dropped: u64,
    /// Runs whose use is to be marked.
    pub(super) touched: u64,
}

/// A request of the searcher.
pub(super) enum Errand {
    Search(Search),
    /// Marks a run as used.
    Touch(RunName),
}

pub(super) struct Desk {
    trust: Trust,
    spaces: HashMap<Fingerprint, Space>,
    /// The namespaces in use by their names in the remote.
    spaces_by_name: HashMap<Fingerprint, Fingerprint>,
    /// Pages of puts, to this owner and to former ones.
    pub(super) chains: Chains,
    /// The pages of puts to former owners are among them.
    has_recalled: bool,
    pub(super) names: Names,
    pauses: Pauses,
    outgoing: VecDeque<Outgoing>,
    /// Runs that are queued for publication or being published.
    queued: HashSet<(Fingerprint, KeyPrefix)>,
    incoming: VecDeque<Incoming>,
    /// Fetches in progress.
    flights: Flights,
    /// Runs that are queued or being fetched, until no caller waits for them.
    pub(super) fetching: HashMap<RunName, Instant>,
    /// Pages of those runs, with the number of the runs.
    arriving: HashMap<(Fingerprint, PageKey), u32>,
    /// Bytes of those runs.
    arriving_bytes: u64,
    /// Runs of them that measure the speed: their pages are not promised.
    trial: HashSet<RunName>,
    /// The last trial of many: its number of fetches at once, or a higher one since, and its time.
    pub(super) tried: (usize, Option<Instant>),
    /// The last pause before a trial, since no run is fast enough.
    slow_pause: Option<Duration>,
    pub(super) breaker: Breaker,
    /// Of publications alone: the remote may let this node read, and take no objects. It may be
    /// full, refuse them, or be too slow for them.
    pub(super) publications: Breaker,
    pub(super) speed: Speed,
    pub(super) day: Budget,
    pub(super) second: Budget,
    pub(super) hour: Budget,
    /// Requests of the hour that publications and searches leave.
    requests_of_reads: u64,
    searches: Searches,
    touches: Touches,
    pub(super) mark: Mark,
    /// The setting of the remote, as it was read last.
    codec: CodecChoice,
    /// Of the store, as far as it is known.
    pub(super) usable_bytes: u64,
    /// This process owns the store.
    is_in_use: bool,
    /// Uses of the store that have begun.
    uses: u64,
    /// By the decision of an operator.
    is_off: bool,
    is_closed: bool,
}

/// Whether the remote has its mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    /// It was not looked for in this use of the store.
    Unknown,
    Found,
    /// It was looked for in vain: nothing is published. With the remedy.
    Missing(String),
}

/// The regular work of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chore {
    /// Tests whether the remote answers again.
    Probe,
    /// Lists the remote.
    List,
    /// Measures the speed.
    Sample,
    /// Writes the memory of pages that were put.
    Remember,
}

impl Desk {
    pub(super) fn new(options: &AgentOptions, now: Instant) -> Desk {
        let hours = Duration::from_hours;
        Desk {
            trust: options.trust.clone(),
            spaces: HashMap::new(),
            spaces_by_name: HashMap::new(),
            chains: Chains::default(),
            has_recalled: false,
            names: Names::default(),
            pauses: Pauses::of(options),
            outgoing: VecDeque::new(),
            queued: HashSet::new(),
            incoming: VecDeque::new(),
            flights: Flights::new(options.connections.min(CONNECTIONS_MAX)),
            fetching: HashMap::new(),
            arriving: HashMap::new(),
            arriving_bytes: 0,
            trial: HashSet::new(),
            tried: (1, None),
            slow_pause: None,
            breaker: Breaker::Closed { failures: 0 },
            publications: Breaker::Closed { failures: 0 },
            speed: Speed::default(),
            day: Budget::new(options.bytes_per_day, hours(24), now),
            second: Budget::new(options.bytes_per_second, Duration::from_secs(1), now),
            hour: Budget::new(options.requests_per_hour, hours(1), now),
            requests_of_reads: options.requests_per_hour / READS,
            searches: Searches::default(),
            touches: Touches::default(),
            mark: Mark::Unknown,
            codec: CodecChoice::Off,
            usable_bytes: u64::MAX,
            is_in_use: false,
            uses: 0,
            is_off: false,
            is_closed: false,
        }
    }

    /// Pages of puts to former owners: those of this one are newer.
    pub(super) fn recall(&mut self, former: Chains) {
        let newer = std::mem::replace(&mut self.chains, former);
        for (namespace, page) in newer.pages() {
            self.chains.add(namespace, *page);
        }
        self.has_recalled = true;
    }

    pub(super) fn has_recalled(&self) -> bool {
        self.has_recalled
    }

    pub(super) fn begin_use(&mut self) {
        self.is_in_use = true;
        self.uses += 1;
        self.mark = Mark::Unknown;
    }

    /// The number of the use of the store; `None` while another process may own it.
    pub(super) fn current_use(&self) -> Option<u64> {
        self.is_in_use.then_some(self.uses)
    }

    /// Another process may own the store from now on, and has the notes by the file. Returns the
    /// number of fetches that are given up, and of queued runs that are dropped.
    pub(super) fn end_use(&mut self) -> (u64, u64) {
        self.is_in_use = false;
        self.is_off = false;
        self.spaces.clear();
        self.spaces_by_name.clear();
        self.chains = Chains::default();
        self.has_recalled = false;
        let dropped = self.outgoing.len() as u64;
        self.outgoing.clear();
        self.queued.clear();
        self.searches.clear();
        self.touches.clear();
        (self.give_up(), dropped)
    }

    /// Whether this process owns the store.
    pub(super) fn is_in_use(&self) -> bool {
        self.is_in_use
    }

    /// A namespace is in use. A fetch of so many bytes makes so many requests. Returns whether the
    /// namespace was not in use before.
    pub(super) fn open(
        &mut self,
        namespace: &Namespace,
        options: &AgentOptions,
        requests: impl Fn(usize) -> usize,
    ) -> bool {
        let fingerprint = namespace.fingerprint();
        let Entry::Vacant(space) = self.spaces.entry(fingerprint) else {
            return false;
        };
        let run_pages = pages_of_run(namespace, options.run_tokens);
        let pages = usize::try_from(run_pages.get()).unwrap_or(usize::MAX);
        let bytes = object_bytes(namespace, pages);
        let names = RunNames::of(&self.trust, fingerprint);
        let by_name = names.spaces().map(|name| (name, fingerprint));
        self.spaces_by_name.extend(by_name);
        space.insert(Space {
            namespace: namespace.clone(),
            names,
            run_pages,
            run: Flight {
                bytes: bytes as u64,
                requests: requests(bytes),
            },
            encoder: Encoder::of(self.codec, namespace),
        });
        true
    }

    /// The namespace, and the bytes of the object of a run.
    pub(super) fn space(&self, namespace: Fingerprint) -> Option<(Namespace, u64)> {
        let space = self.spaces.get(&namespace)?;
        Some((space.namespace.clone(), space.run.bytes))
    }

    /// The encoder of a namespace's objects, if they are encoded.
    pub(super) fn encoder(&self, namespace: Fingerprint) -> Option<Arc<Encoder>> {
        self.spaces.get(&namespace)?.encoder.clone()
    }

    /// The setting of the remote. Returns whether it has changed.
    pub(super) fn set_codec(&mut self, codec: CodecChoice) -> bool {
        if std::mem::replace(&mut self.codec, codec) == codec {
            return false;
        }
        for space in self.spaces.values_mut() {
            space.encoder = Encoder::of(codec, &space.namespace);
        }
        true
    }

    /// The listing shows an object. False if there is no room for its name.
    pub(super) fn list(&mut self, object: &Listed) -> bool {
        let space = self.spaces_by_name.get(&object.run.namespace);
        let space = space.and_then(|space| self.spaces.get(space));
        let run_bytes = space.map_or(0, |space| space.run.bytes);
        self.names.list(object, run_bytes)
    }

    /// Whether the speed is to be measured, and a run is there for it. Only the runs of a namespace
    /// in use have a known length. Fetches measure by themselves.
    fn needs_sample(&self) -> bool {
        let mut spaces = self.spaces_by_name.keys();
        let is_needed = !self.speed.is_known() && self.fetching.is_empty();
        is_needed && spaces.any(|space| self.names.has_sample(*space))
    }

    /// A listed run to measure the speed with.
    pub(super) fn take_sample(&mut self) -> Option<(RunName, Flight)> {
        let mut spaces = self.spaces_by_name.iter();
        spaces.find_map(|(name, space)| {
            let space = self.spaces.get(space)?;
            let run = self.names.take_sample(*name, space.run.bytes)?;
            Some((run, space.run))
        })
    }

    /// Notes the pages of a put.
    pub(super) fn asked(
        &mut self,
        namespace: Fingerprint,
        pages: &[Ask],
        now: Instant,
        options: &AgentOptions,
    ) -> Noted {
        let mut noted = Noted::default();
        for page in pages {
            if !self.spaces.contains_key(&namespace) {
                break;
            }
            let page = RunPage {
                key: page.key,
                parent: page.parent,
                depth: page.depth,
            };
            self.chains.add(namespace, page);
            if options.admission == Admission::Through || planted!(EagerRun) {
                self.note(namespace, &page.key, now + options.delay, &mut noted);
            }
        }
        noted
    }

    /// Notes the use of stored pages.
    pub(super) fn used(&mut self, namespace: Fingerprint, keys: &[PageKey], now: Instant) -> Noted {
        let mut noted = Noted::default();
        for key in keys {
            self.note(namespace, key, now, &mut noted);
        }
        noted
    }

    /// Whether so many runs are queued that others can wait.
    pub(super) fn is_busy(&self) -> bool {
        self.outgoing.len() >= OUTGOING_MAX / 2
    }

    /// Queues a run. Returns the number of runs that were dropped for it.
    pub(super) fn queue(&mut self, run: Outgoing) -> u64 {
        self.outgoing.push_back(run);
        if self.outgoing.len() <= OUTGOING_MAX {
            return 0;
        }
        let oldest = self.outgoing.pop_front();
        u64::from(oldest.is_some_and(|oldest| self.queued.remove(&oldest.id())))
    }

    /// The next run to publish, or the time to wait for it; `None` without one.
    pub(super) fn next_outgoing(&mut self, now: Instant) -> Option<Result<Outgoing, Duration>> {
        let is_marked = self.mark == Mark::Found || planted!(BlindPublication);
        if !self.may_ask() || !is_marked {
            return None;
        }
        let debt = self.second.wait(0, now);
        let due = self.outgoing.front()?.due;
        // Also until the remote may take objects again.
        let due = self.publications.probe_at().map_or(due, |at| due.max(at));
        let wait = due.saturating_duration_since(now).max(debt);
        if wait > Duration::ZERO {
            return Some(Err(wait));
        }
        self.outgoing.pop_front().map(Ok)
    }

    /// A publication was reserved, and sent so many bytes fewer.
    pub(super) fn give_back(&mut self, bytes: u64) {
        self.day.give_back(bytes);
        self.second.give_back(bytes);
    }

    /// The publication of a run is over. It may be queued again, unless it is in the remote.
    pub(super) fn published(&mut self, run: &Outgoing, is_there: bool, now: Instant) {
        self.queued.remove(&run.id());
        let name = self.name_of(run).filter(|_| is_there);
        if let Some(name) = name {
            self.names.add(name.id());
            // Its object is new, or it is used again soon.
            self.touches.note_made(&name, now);
        }
    }

    /// The next search or mark; `None` without one.
    pub(super) fn next_errand(&mut self, now: Instant) -> Option<Errand> {
        if !self.may_ask() {
            return None;
        }
        if let Some(search) = self.searches.next() {
            return Some(Errand::Search(search));
        }
        let is_taken = self.publications.is_closed() && self.mark == Mark::Found;
        if !is_taken || self.touches.is_empty() || !self.may_request(1, Request::Other, now) {
            return None;
        }
        self.touches.next().map(Errand::Touch)
    }

    /// A search found the first `there` runs. The next one is searched for after a pause.
    pub(super) fn searched(&mut self, search: &Search, there: usize, now: Instant) {
        let is_blind = planted!(BlindSearch) && there > 0;
        let there = if is_blind { search.0.len() } else { there };
        let (found, left) = search.0.split_at(there.min(search.0.len()));
        for run in found {
            self.names.add(run.id());
        }
        self.searches.end(search, left.first(), now, self.pauses);
    }

    /// Takes a request from the budget. Publications and searches leave a part of it to reads.
    pub(super) fn may_request(&mut self, requests: u64, request: Request, now: Instant) -> bool {
        let left = match request {
            Request::Read => 0,
            Request::Other => self.requests_of_reads,
        };
        self.hour.take(requests, left, now)
    }

    fn begin(&mut self, run: Incoming, now: Instant) {
        // A lookup has looked for it.
        self.hour.spend(run.flight.requests as u64, now);
        self.fetching.insert(run.name, run.until);
        self.arriving_bytes += run.flight.bytes;
        for page in &run.pages {
            let arriving = self.arriving.entry((run.namespace, *page));
            *arriving.or_default() += 1;
        }
        self.incoming.push_back(run);
    }

    /// Begins the fetch of the next run; `None` without one, or while enough are in progress. A run
    /// that no caller waits for is given up here: a lookup that comes later begins it again.
    pub(super) fn next_fetch(&mut self, now: Instant, late: &mut u64) -> Option<Fetch> {
        while self.has_fetch() {
            let run = self.incoming.pop_front()?;
            // Another lookup may have asked for it since.
            let until = self.fetching.get(&run.name);
            if until.is_some_and(|until| now < *until) {
                self.flights.begin(run.flight);
                let measured = self.speed.begin(now);
                return Some(Fetch { run, measured });
            }
            self.hour.give_back(run.flight.requests as u64);
            self.arrived(&run, End::GivenUp, now);
            *late += 1;
        }
        None
    }

    /// Whether the fetch of a run may begin.
    fn has_fetch(&self) -> bool {
        let next = self.incoming.front();
        next.is_some_and(|run| self.flights.has_room(run.flight))
    }

    /// Whether a run waits that so many threads do not fetch.
    pub(super) fn needs_fetcher(&self, threads: usize) -> bool {
        self.has_fetch() && self.flights.runs() >= threads
    }

    /// The request of a fetch is over, and has brought so many bytes.
    pub(super) fn answered(&mut self, fetch: &Fetch, bytes: Option<u64>, now: Instant) {
        self.speed.end(fetch.measured, bytes, now);
        self.flights.answered(fetch.run.flight);
    }

    /// A fetch is over: its pages are stored.
    pub(super) fn ended(&mut self, fetch: &Fetch, end: End, now: Instant) {
        self.flights.end(fetch.run.flight);
        self.arrived(&fetch.run, end, now);
    }

    /// A fetch is over, or given up.
    fn arrived(&mut self, run: &Incoming, end: End, now: Instant) {
        self.fetching.remove(&run.name);
        self.trial.remove(&run.name);
        self.arriving_bytes -= run.flight.bytes;
        if planted!(LeftArrival) && end == End::GivenUp {
            return;
        }
        for page in &run.pages {
            let page = (run.namespace, *page);
            if let Some(runs) = self.arriving.get_mut(&page) {
                *runs -= 1;
                if *runs == 0 {
                    self.arriving.remove(&page);
                }
            }
        }
        match end {
            End::Stored => {
                self.names.recover(&run.name);
                self.touch(run.name, now);
            }
            End::GivenUp => {}
            End::Gone | End::Failed => {
                self.fail(&run.name, end == End::Failed, now);
            }
        }
    }

    /// A run could not be taken. Returns the end of its pause.
    pub(super) fn fail(&mut self, run: &RunName, is_there: bool, now: Instant) -> Instant {
        self.names.fail(run, is_there, now, self.pauses)
    }

    /// Gives up the fetches that have not begun. Returns their number.
    pub(super) fn give_up(&mut self) -> u64 {
        let (given_up, now) = (std::mem::take(&mut self.incoming), Instant::now());
        for run in &given_up {
            self.hour.give_back(run.flight.requests as u64);
            self.arrived(run, End::GivenUp, now);
        }
        given_up.len() as u64
    }

    /// Whether one of these pages is on its way.
    pub(super) fn some_arriving(&self, namespace: Fingerprint, keys: &[PageKey]) -> bool {
        let is_arriving = |key: &PageKey| self.arriving.contains_key(&(namespace, *key));
        !self.arriving.is_empty() && keys.iter().any(is_arriving)
    }

    /// Returns whether it was open.
    pub(super) fn close(&mut self) -> bool {
        let was_open = !std::mem::replace(&mut self.is_closed, true);
        self.give_up();
        self.searches.clear();
        self.arriving.clear();
        was_open
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed && !planted!(RestlessEnd)
    }

    /// Ends or resumes all requests. Returns the number of fetches that are given up.
    pub(super) fn use_it(&mut self, is_used: bool) -> u64 {
        self.is_off = !is_used;
        if is_used {
            return 0;
        }
        self.searches.clear();
        self.give_up()
    }

    /// Whether runs can be shared.
    pub(super) fn works(&self) -> bool {
        self.may_ask() && !matches!(self.mark, Mark::Missing(_))
    }

    /// Whether requests may be made.
    pub(super) fn may_ask(&self) -> bool {
        let is_on = !self.is_off || planted!(DeafSwitch);
        let answers = self.breaker.is_closed() || planted!(DeafBreaker);
        self.is_in_use && is_on && answers && !self.is_closed()
    }

    /// The next regular work, or the time of it; `None` while there is none.
    pub(super) fn next_chore(
        &self,
        now: Instant,
        listing: Instant,
        writing: Instant,
    ) -> Option<Result<Chore, Instant>> {
        if self.is_closed {
            return None;
        }
        let (at, request) = match self.breaker.probe_at() {
            Some(at) => (at, Chore::Probe),
            None if self.needs_sample() => (now, Chore::Sample),
            None => (listing, Chore::List),
        };
        // A listing begins with a look.
        let at = at.max(now + self.hour.wait(2, now));
        let writes = (writing, Chore::Remember);
        let (at, chore) = match self.is_off {
            true => writes,
            false => std::cmp::min_by_key((at, request), writes, |(at, _)| *at),
        };
        Some(if at <= now { Ok(chore) } else { Err(at) })
    }

    /// The state in a sentence.
    pub(super) fn state(&self, now: Instant) -> String {
        let probe = self.breaker.probe_at();
        match (self.breaker.reason(), probe) {
            _ if self.is_closed => "closed".to_owned(),
            _ if self.is_off => "switched off: `larder remote on` resumes its work".to_owned(),
            (Some(reason), Some(until)) => {
                let left = until.saturating_duration_since(now).as_secs();
                format!("no requests, the next attempt in {left} s: {reason}")
            }
            _ if self.hour.left(now) < 2 => {
                "no requests: those of the hour are used up (l4_requests_per_hour)".to_owned()
            }
            _ => match (&self.mark, self.publications.reason()) {
                (Mark::Missing(reason), _) => format!("no publications: {reason}"),
                (_, Some(reason)) => format!("in use for reads; no publications: {reason}"),
                _ => "in use".to_owned(),
            },
        }
    }

    /// Present sizes, with their names.
    pub(super) fn sizes(&self) -> [(&'static str, u64); 4] {
        [
            ("known_runs", self.names.len() as u64),
            ("waiting_runs", self.outgoing.len() as u64),
            ("arriving_runs", self.fetching.len() as u64),
            ("speed_bytes_per_s", self.speed.bytes_per_second()),
        ]
    }

    /// A request failed that was no publication. Returns whether the breaker opened.
    pub(super) fn failed(&mut self, error: &RemoteError, now: Instant) -> bool {
        self.slow_down(error, now);
        self.breaker.failed(error, now, self.pauses)
    }

    /// An object was not taken. Returns whether the breaker of publications opened.
    pub(super) fn not_taken(&mut self, error: &RemoteError, now: Instant) -> bool {
        self.slow_down(error, now);
        self.publications.failed(error, now, self.pauses)
    }

    fn slow_down(&mut self, error: &RemoteError, now: Instant) {
        if matches!(error, RemoteError::Overloaded(_)) {
            self.second.halve(now);
        }
    }
}

/// The end of a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Its pages are stored.
    Stored,
    /// It failed, or came too late.
    GivenUp,
    /// The remote has no such run.
    Gone,
    /// It cannot be read, has a fault, lacks pages, or the store refused some.
    Failed,
}

//! The remote of all agents: it fails, lies, delays and loses, and checks the requests of each.
//!
//! A thread of an agent decides under the lock of the agent, and asks a moment later: so each check
//! of a decision allows for [`MARGIN`]. A request that belongs to work in progress is no decision:
//! a publication after its question, a look after a failure, a listing after its look.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use larder_engine::format::{Fingerprint, PageKey, StoreId};
use larder_remote::agent::PUBLICATIONS;
use larder_remote::run::open;
use larder_remote::{
    Buffer, Draft, Listed, Published, Remote, RemoteError, RunName, RunPage, Trust, Unreadable,
};
use larder_sim_runtime::dice::Dice;
use larder_sim_runtime::note;
use larder_sim_runtime::sync::{Condvar, Mutex};
use larder_sim_runtime::thread::{self, ThreadId};
use larder_sim_runtime::time::Instant;

use super::{
    NODES, RUN_PAGES, TIMEOUT, content, key, last_at, last_page, name, namespace, run_of, trust,
};
use crate::totals::Totals;

/// Budgets of an agent.
pub const BYTES_PER_DAY: u64 = 24 * 3_000_000;
pub const BYTES_PER_SECOND: u64 = 100_000;

/// Bytes and seconds of each budget, and the bytes with which it begins.
const BUDGETS: [(f64, f64, f64); 2] = [
    (BYTES_PER_DAY as f64, 86_400.0, BYTES_PER_DAY as f64 / 24.0),
    (BYTES_PER_SECOND as f64, 1.0, BYTES_PER_SECOND as f64),
];

/// Bytes of an object that the remote moves in a second, each way.
const BANDWIDTH: f64 = 1e6;

const LATENCY: Duration = Duration::from_millis(2);

/// Failures in a row that open the breaker, and the least pause after them, and after the failure
/// of a run.
const FAILURES_MAX: u32 = 5;
pub const PAUSE: Duration = Duration::from_secs(5);

/// Longest time between an answer or an order and the decisions that follow from it.
const MARGIN: Duration = Duration::from_millis(10);

/// Longest time of the work on a run, stops of the process included.
const WORK: Duration = Duration::from_secs(5);

/// Most threads of an agent that may note a name at once, after another one has found it gone.
const STATEMENTS_MAX: u32 = 4;

const LISTED_AT_ONCE: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    Fine,
    /// A request in two fails.
    Failing,
    /// Answers come late, or not before the deadline.
    Slow,
    /// Answers are wrong.
    Lying,
    /// Access is denied.
    Denied,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Looks at the remote itself.
    Look,
    Publication,
    /// The first part of a listing.
    Listing,
    /// Another part of it.
    Part,
    /// For one object.
    Object,
    /// Marks the use of a run.
    Mark,
}

/// The answers to requests of a kind.
#[derive(Default)]
struct Answers {
    /// In a row.
    failures: u32,
    answered: Option<Instant>,
    /// Between these moments nothing may be asked, and then one probe.
    open: Option<(Instant, Instant)>,
}

impl Answers {
    /// `resumed`: the last stop of the process was over.
    fn failed(&mut self, failure: &RemoteError, now: Instant, resumed: Option<Instant>) {
        let since = self.answered.and_then(|at| Some(at).max(resumed));
        if since.is_some_and(|since| now <= since + MARGIN) {
            // The agent may take note of the answer before after this failure.
            return;
        }
        self.failures += 1;
        let is_final = matches!(failure, RemoteError::Denied(_));
        if self.open.is_none() && (is_final || self.failures >= FAILURES_MAX) {
            // It may have opened at a failure before, while this request was in progress.
            self.open = Some((now, now + PAUSE - 2 * TIMEOUT));
        }
    }

    fn succeeded(&mut self, now: Instant) {
        *self = Answers {
            answered: Some(now),
            ..Answers::default()
        };
    }
}

/// The facts that an agent was given, and its duties.
#[derive(Default)]
pub struct Facts {
    /// Since when it is closed, or switched off.
    pub idle_since: Option<Instant>,
    /// When its process was last resumed.
    pub resumed: Option<Instant>,
    /// Pages that were looked up and found.
    pub used: HashSet<PageKey>,
    /// How often the remote stated to have a run, less its answers that it has not: a thread may
    /// take note of a statement after another one has found the run gone.
    pub stated: HashMap<RunName, u32>,
    /// When runs were last given out with a fault.
    faulty: HashMap<RunName, Instant>,
    /// Threads whose request for one object failed: a look is due, and no other request.
    owing: HashSet<ThreadId>,
    /// The threads for publications and for listings.
    roles: HashMap<ThreadId, Kind>,
    /// While the mark is there, as far as the agent knows, and for the publications under way.
    publishes_until: Option<Instant>,
    requests: Answers,
    publications: Answers,
    /// Bytes spent of each budget, less those regained.
    spent: [f64; BUDGETS.len()],
    spent_at: Option<Instant>,
    /// Until when bytes are on their way to the agent, and from it.
    links: [Option<Instant>; 2],
}

impl Facts {
    fn state(&mut self, run: RunName) {
        let stated = self.stated.entry(run).or_default();
        *stated = (*stated + 1).min(STATEMENTS_MAX);
    }

    /// The remote states to have a run. A chain is published from its head, so it has those before.
    fn state_chain(&mut self, run: &RunName) {
        let (chain, run) = run_of(run);
        (0..=run).for_each(|run| self.state(name(chain, run)));
    }

    /// Each publisher may owe an object, and may have paid for another one so long ago that the
    /// budget was full again.
    fn spend(&mut self, bytes: usize, now: Instant) {
        let owed = (2 * PUBLICATIONS * bytes) as f64;
        let passed = self.spent_at.map_or(0.0, |at| (now - at).as_secs_f64());
        self.spent_at = Some(now);
        for (spent, (most, period, begin)) in self.spent.iter_mut().zip(BUDGETS) {
            *spent = (*spent - most * passed / period).max(begin - most) + bytes as f64;
            assert!(*spent < begin + owed, "beyond its budget");
        }
    }

    fn is(&self, thread: ThreadId, role: Kind) -> bool {
        self.roles.get(&thread) == Some(&role)
    }

    /// Checks that the agent may decide to make a request now.
    fn check(&mut self, kind: Kind, thread: ThreadId, now: Instant) {
        let is_known =
            |since: Instant| Some(now) > self.resumed.max(Some(since)).map(|at| at + MARGIN);
        let is_idle = self.idle_since.is_some_and(is_known);
        assert!(!is_idle, "a request of an agent that is closed or off");
        let open = |answers: &Answers| answers.open.filter(|(from, _)| is_known(*from));
        if let Some((from, until)) = open(&self.requests) {
            assert!(kind == Kind::Look, "a request while the breaker is open");
            assert!(now >= until, "a probe before its time");
            self.requests.open = Some((from, now + PAUSE));
        }
        let refused = open(&self.publications).is_some_and(|(_, until)| now < until);
        let is_refused = refused && (kind == Kind::Mark || self.is(thread, Kind::Publication));
        assert!(!is_refused, "a publication while its breaker is open");
    }
}

/// See the module.
pub struct Service {
    pub mood: Mood,
    /// Time of each part of a listing.
    pub part_takes: Duration,
    /// It has its mark.
    pub is_marked: bool,
    pub objects: BTreeMap<RunName, Vec<u8>>,
    dice: Dice,
    pub facts: [Facts; NODES],
    /// Changes that may break the promise of a lookup, and the end of the requests before the last
    /// of them.
    pub changes: u64,
    is_fair_from: Instant,
    /// A node that is to be stopped, and the notification of it.
    pub to_stop: Option<usize>,
    pub called: Arc<Condvar>,
    /// Nodes with calls to make.
    pub calling: usize,
    /// No more faults.
    pub is_calm: bool,
    pub totals: Totals,
    pub digest: u64,
}

impl Service {
    pub fn new(dice: Dice) -> Service {
        let now = Instant::now();
        Service {
            mood: Mood::Fine,
            part_takes: Duration::ZERO,
            is_marked: true,
            objects: BTreeMap::new(),
            dice,
            facts: Default::default(),
            changes: 0,
            is_fair_from: now,
            to_stop: None,
            called: Arc::default(),
            calling: NODES,
            is_calm: false,
            totals: Totals::default(),
            digest: 0,
        }
    }

    /// A promise of a lookup may be broken, also by requests in progress.
    pub fn change(&mut self) {
        self.changes += 1;
        self.is_fair_from = Instant::now() + TIMEOUT + PAUSE;
    }

    /// Whether the promise of a lookup can be kept.
    pub fn is_fair(&self) -> bool {
        self.mood == Mood::Fine && Instant::now() >= self.is_fair_from
    }

    /// An object expires.
    pub fn lose(&mut self) {
        let at = self.dice.below(self.objects.len().max(1));
        let lost = self.objects.keys().nth(at).copied();
        if let Some(lost) = lost {
            self.objects.remove(&lost);
            // Another object may get its name.
            for facts in &mut self.facts {
                facts.faulty.remove(&lost);
            }
        }
    }

    /// Whether the object of this run is there with all its pages.
    pub fn is_good(&self, run: &RunName) -> bool {
        let object = self.objects.get(run);
        object.is_some_and(|object| is_good(object, run))
    }

    /// Checks that an agent may make a request. Returns the time of the answer, and whether it is
    /// a failure.
    fn begin(
        &mut self,
        node: usize,
        kind: Kind,
        deadline: Instant,
    ) -> (Instant, Option<RemoteError>) {
        let (now, thread) = (Instant::now(), thread::current().id());
        let facts = &mut self.facts[node];
        let owes_look = facts.owing.remove(&thread);
        assert!(
            kind == Kind::Look || !owes_look,
            "a failure that was not looked into"
        );
        match kind {
            Kind::Publication => {
                facts.roles.insert(thread, kind);
                let until = facts.publishes_until;
                let is_marked = until.is_some_and(|until| now <= until);
                assert!(is_marked, "a publication into a place without a mark");
            }
            Kind::Listing => drop(facts.roles.insert(thread, kind)),
            Kind::Look if owes_look => {}
            Kind::Look | Kind::Part | Kind::Object | Kind::Mark => {
                facts.check(kind, thread, now);
            }
        }
        let is_part = matches!(kind, Kind::Listing | Kind::Part);
        let mut until = now
            + LATENCY
            + if is_part {
                self.part_takes
            } else {
                Duration::ZERO
            };
        let fails = self.dice.chance(0.5);
        let failure = match self.mood {
            Mood::Denied => Some(RemoteError::Denied("a test".to_owned())),
            Mood::Failing if fails => Some(match self.dice.chance(0.5) {
                true => RemoteError::Failed("a test".to_owned()),
                false => RemoteError::Overloaded("a test".to_owned()),
            }),
            Mood::Slow => {
                until += if fails {
                    TIMEOUT
                } else {
                    Duration::from_millis(300)
                };
                None
            }
            Mood::Fine | Mood::Lying | Mood::Failing => None,
        };
        match until < deadline {
            true => (until, failure),
            false => (deadline.max(now), Some(RemoteError::Deadline)),
        }
    }

    /// An agent gets its answer.
    fn end(&mut self, node: usize, kind: Kind, failure: Option<&RemoteError>) {
        let now = Instant::now();
        let facts = &mut self.facts[node];
        match (failure, kind) {
            (None | Some(RemoteError::Unmarked(_)), _) => {
                facts.requests.succeeded(now);
                if matches!(kind, Kind::Publication | Kind::Mark) {
                    facts.publications.succeeded(now);
                }
            }
            (Some(failure), Kind::Publication | Kind::Mark) => {
                facts.publications.failed(failure, now, facts.resumed);
            }
            (Some(RemoteError::Denied(_) | RemoteError::Failed(_)), Kind::Object) => {
                facts.owing.insert(thread::current().id());
            }
            (Some(failure), _) => facts.requests.failed(failure, now, facts.resumed),
        }
    }

    /// The object of a run, perhaps distorted.
    fn give(&mut self, node: usize, run: &RunName, bytes_max: usize) -> Option<Vec<u8>> {
        let is_sample = self.facts[node].is(thread::current().id(), Kind::Listing);
        let object = self.objects.get(run).cloned();
        let Some(mut object) = object.filter(|object| object.len() <= bytes_max) else {
            let stated = self.facts[node].stated.entry(*run).or_default();
            *stated = stated.saturating_sub(u32::from(!is_sample));
            return None;
        };
        if self.mood == Mood::Lying && self.dice.chance(0.5) {
            object = self.distorted(run, object);
        }
        // The bytes of a sample are not used.
        if !is_sample && !is_good(&object, run) {
            self.facts[node].faulty.insert(*run, Instant::now());
        }
        Some(object)
    }

    /// An object as a liar gives it out.
    fn distorted(&mut self, run: &RunName, mut object: Vec<u8>) -> Vec<u8> {
        let at = self.dice.below(object.len().max(1));
        match self.dice.below(4) {
            0 => object
                .iter_mut()
                .skip(at)
                .take(1)
                .for_each(|byte| *byte ^= 1),
            1 => object.truncate(at),
            2 => {
                let other = self.dice.below(self.objects.len());
                object = self
                    .objects
                    .values()
                    .nth(other)
                    .cloned()
                    .unwrap_or_default();
            }
            _ => object = forged(run),
        }
        object
    }

    fn take(&mut self, node: usize, run: &RunName, mut object: Buffer) -> Published {
        self.facts[node].state(*run);
        if self.mood == Mood::Lying {
            match self.dice.below(4) {
                // Acknowledged and lost.
                0 => return Published::Created,
                // Torn.
                1 => object.truncate(self.dice.below(object.len())),
                _ => {}
            }
        }
        if self.objects.contains_key(run) {
            return Published::Present;
        }
        self.objects.insert(*run, object.to_vec());
        Published::Created
    }
}

fn is_good(object: &[u8], run: &RunName) -> bool {
    let mut object = object.to_vec();
    let opened = open(&mut object, run, &trust(1));
    let is_whole = opened.fault.is_none() && opened.pages.len() == RUN_PAGES;
    let mut pages = opened.pages.iter();
    let is_right = |payload: &[u8], key: &PageKey| payload.starts_with(&content(key));
    is_whole && pages.all(|page| page.payload.is_ok_and(|it| is_right(it, &page.page.key)))
}

/// Other bytes with right checksums, as a writer without the key makes them.
fn forged(run: &RunName) -> Vec<u8> {
    let (chain, run) = run_of(run);
    let last = last_at(run);
    let page = |at: usize| RunPage {
        key: key(chain, at),
        parent: at.checked_sub(1).map(|before| key(chain, before)),
        depth: at as u32,
    };
    let pages = (last + 1 - RUN_PAGES..=last).map(page).collect();
    let draft = Draft::new(namespace(), pages, Trust::Unsigned).expect("memory");
    let object = draft.finish(StoreId::from_bytes([0; 16]), 1);
    object.map_or_else(|_| Vec::new(), |object| object.to_vec())
}

/// The remote of one agent.
pub struct Faulty {
    pub service: Arc<Mutex<Service>>,
    pub node: usize,
}

impl Faulty {
    /// Makes a request, which moves as many bytes as `act` states.
    fn ask<T>(
        &self,
        kind: Kind,
        deadline: Instant,
        act: impl FnOnce(&mut Service) -> (Result<T, RemoteError>, usize),
    ) -> Result<T, RemoteError> {
        note(|| format!("{kind:?} is asked"));
        let (until, failure) = self.service.lock().begin(self.node, kind, deadline);
        thread::sleep(until - Instant::now());
        let answer = match failure {
            Some(failure) => Err(failure),
            None => {
                let mut service = self.service.lock();
                let (answer, bytes) = act(&mut service);
                let links = &mut service.facts[self.node].links;
                let link = &mut links[usize::from(kind == Kind::Publication)];
                let takes = Duration::from_secs_f64(bytes as f64 / BANDWIDTH);
                let until = Some(Instant::now()).max(*link).map(|at| at + takes);
                *link = until;
                drop(service);
                if bytes > 0 {
                    until
                        .into_iter()
                        .for_each(|until| thread::sleep(until - Instant::now()));
                }
                answer
            }
        };
        let failure = answer.as_ref().err();
        note(|| format!("{kind:?} is answered: {failure:?}"));
        self.service.lock().end(self.node, kind, failure);
        answer
    }
}

impl Remote for Faulty {
    fn look(&self, deadline: Instant) -> Result<(), RemoteError> {
        self.ask(Kind::Look, deadline, |service| {
            let now = Instant::now();
            let facts = &mut service.facts[self.node];
            if service.is_marked {
                facts.publishes_until = Some(now + Duration::from_hours(24));
                return (Ok(()), 0);
            }
            facts.publishes_until = facts.publishes_until.min(Some(now + WORK));
            // All names are forgotten.
            facts.faulty.clear();
            (Err(RemoteError::Unmarked("a test".to_owned())), 0)
        })
    }

    fn mark(&self, _: Instant) -> Result<(), RemoteError> {
        unreachable!("agents make no remote")
    }

    fn now_unix_s(&self, _: Instant) -> Result<u64, RemoteError> {
        unreachable!("agents take no age")
    }

    fn holds(&self, run: &RunName, deadline: Instant) -> Result<bool, RemoteError> {
        self.ask(Kind::Object, deadline, |service| {
            let lies = service.mood == Mood::Lying && service.dice.chance(0.3);
            let holds = service.objects.contains_key(run) != lies;
            if holds {
                service.facts[self.node].state_chain(run);
            }
            (Ok(holds), 0)
        })
    }

    fn fetch(
        &self,
        run: &RunName,
        bytes_max: usize,
        deadline: Instant,
    ) -> Result<Option<Buffer>, RemoteError> {
        {
            let facts = &self.service.lock().facts[self.node];
            let is_stated = facts.stated.get(run).is_some_and(|times| *times > 0);
            if !facts.is(thread::current().id(), Kind::Listing) {
                assert!(is_stated, "a run that was never stated, or is gone");
                let given = facts.faulty.get(run);
                let pauses = given.is_some_and(|at| Instant::now() < *at + PAUSE);
                assert!(!pauses, "a run with a fault, again");
            }
        }
        let object = self.ask(Kind::Object, deadline, |service| {
            let object = service.give(self.node, run, bytes_max);
            let bytes = object.as_ref().map_or(0, Vec::len);
            (Ok(object), bytes)
        })?;
        object.map(|object| Buffer::copy_of(&object)).transpose()
    }

    fn publish(
        &self,
        run: &RunName,
        object: Buffer,
        deadline: Instant,
    ) -> Result<Published, RemoteError> {
        assert!(is_good(&object, run), "an object with wrong pages");
        {
            let facts = &mut self.service.lock().facts[self.node];
            let is_used = self.node == 0 || facts.used.contains(&last_page(run));
            assert!(is_used, "a run without a user");
            facts.spend(object.len(), Instant::now());
        }
        let bytes = object.len();
        self.ask(Kind::Publication, deadline, |service| {
            (Ok(service.take(self.node, run, object)), bytes)
        })
    }

    fn touch(&self, run: &RunName, deadline: Instant) -> Result<(), RemoteError> {
        {
            let facts = &self.service.lock().facts[self.node];
            let is_stated = facts.stated.contains_key(run);
            assert!(is_stated, "the use of a run that was never stated");
        }
        self.ask(Kind::Mark, deadline, |_| (Ok(()), 0))
    }

    fn list_marks(
        &self,
        _: &mut dyn FnMut() -> ControlFlow<()>,
        _: &mut dyn FnMut(Result<Listed, Unreadable>) -> ControlFlow<()>,
        _: Duration,
    ) -> Result<(), RemoteError> {
        unreachable!("agents list no marks")
    }

    fn remove(&self, _: &RunName, _: Instant) -> Result<(), RemoteError> {
        unreachable!("agents remove nothing")
    }

    fn list(
        &self,
        _: Option<Fingerprint>,
        part: &mut dyn FnMut() -> ControlFlow<()>,
        each: &mut dyn FnMut(Result<Listed, Unreadable>) -> ControlFlow<()>,
        patience: Duration,
    ) -> Result<(), RemoteError> {
        let listed = |(run, object): (&RunName, &Vec<u8>)| Listed {
            run: *run,
            bytes: object.len() as u64,
            created_unix_s: 0,
        };
        let listed: Vec<Listed> = self.service.lock().objects.iter().map(listed).collect();
        let mut kind = Kind::Listing;
        // Each part is a request, the empty one behind the last object, too.
        for objects in listed.chunks(LISTED_AT_ONCE).chain([[].as_slice()]) {
            if part().is_break() {
                break;
            }
            self.ask(kind, Instant::now() + patience, |service| {
                let facts = &mut service.facts[self.node];
                objects.iter().for_each(|object| facts.state(object.run));
                (Ok(()), 0)
            })?;
            kind = Kind::Part;
            if objects.iter().any(|object| each(Ok(*object)).is_break()) {
                break;
            }
        }
        Ok(())
    }
}

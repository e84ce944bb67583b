//! A remote that fails, lies, delays and loses, and checks the requests of each agent.

use std::collections::{BTreeMap, HashSet};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_format::{Fingerprint, PageKey, StoreId};
use larder_sync::Mutex;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;

use super::{
    BANDWIDTH, BYTES_PER_DAY, BYTES_PER_SECOND, RUN_PAGES, chain_of, content, name, namespace,
    trust,
};
use crate::buffer::Buffer;
use crate::error::RemoteError;
use crate::remote::{Listed, Published, Remote, Unreadable};
use crate::run::{Draft, RunName, RunPage, open};

/// Failures in a row that open the breaker, and the least pause after them.
const FAILURES_MAX: u32 = 5;
const PAUSE: Duration = Duration::from_secs(5);

const LISTED_AT_ONCE: usize = 10;

const LATENCY: Duration = Duration::from_millis(2);

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

/// The facts that an agent was given, and its duties.
#[derive(Default)]
pub struct Facts {
    pub is_off: bool,
    pub is_closed: bool,
    /// Pages that were looked up and found.
    pub used: HashSet<PageKey>,
    /// Runs that the remote has ever stated to have.
    pub announced: HashSet<RunName>,
    /// Runs that the remote does not have, by its last answer.
    gone: HashSet<RunName>,
    /// Runs that were given out with a fault.
    faulty: HashSet<RunName>,
    /// A fetch measures the speed: its bytes are not used.
    pub is_sample: bool,
    /// A request for one object failed: a look is due, and no other request.
    owes_look: bool,
    /// The mark was found, and not missed since.
    has_seen_mark: bool,
    requests: Answers,
    publications: Answers,
    day: Option<Bucket>,
    second: Option<Bucket>,
}

/// What a request is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Looks at the remote itself.
    Look,
    Publication,
    Listing,
    /// For one object.
    Object,
}

/// The answers to requests of a kind.
#[derive(Default)]
struct Answers {
    /// In a row.
    failures: u32,
    /// Before this moment nothing may be asked, and then one probe.
    open_until: Option<Instant>,
}

impl Answers {
    fn failed(&mut self, failure: &RemoteError, now: Instant) {
        self.failures += 1;
        let is_final = matches!(failure, RemoteError::Denied(_));
        if is_final || self.failures >= FAILURES_MAX || self.open_until.is_some() {
            self.open_until = Some(now + PAUSE);
        }
    }
}

/// A budget, as its description states it.
struct Bucket {
    most: f64,
    period_s: f64,
    left: f64,
    at: Instant,
}

impl Bucket {
    fn new(most: u64, period_s: f64, now: Instant) -> Bucket {
        let most = most as f64;
        Bucket {
            most,
            period_s,
            left: most * (3600.0 / period_s).min(1.0),
            at: now,
        }
    }

    /// Spends an amount. One object may be owed.
    fn spend(&mut self, bytes: usize, now: Instant) {
        let passed = (now - self.at).as_secs_f64();
        self.left = (self.left + self.most * passed / self.period_s).min(self.most);
        self.at = now;
        assert!(self.left > -1.0, "beyond its budget");
        self.left -= bytes as f64;
    }
}

pub struct World {
    now: Instant,
    pub mood: Mood,
    /// Time of each part of a listing.
    pub part_takes: Duration,
    /// It has its mark.
    pub is_marked: bool,
    /// A listing meets a name that the client does not take.
    pub has_foreign: bool,
    objects: BTreeMap<RunName, Vec<u8>>,
    random: Pcg64,
    pub facts: [Facts; 2],
}

impl World {
    pub fn new(seed: u64) -> World {
        let begin = Instant::now();
        World {
            now: begin,
            mood: Mood::Fine,
            part_takes: Duration::ZERO,
            is_marked: true,
            has_foreign: false,
            objects: BTreeMap::new(),
            random: Pcg64::seed_from_u64(seed),
            facts: [0; 2].map(|_| Facts {
                day: Some(Bucket::new(BYTES_PER_DAY, 86_400.0, begin)),
                second: Some(Bucket::new(BYTES_PER_SECOND, 1.0, begin)),
                ..Facts::default()
            }),
        }
    }

    pub fn now(&self) -> Instant {
        self.now
    }

    pub fn advance(&mut self, passed: Duration) {
        self.now += passed;
    }

    pub fn change_mood(&mut self, number: u8) {
        self.mood = match number % 8 {
            0..4 => Mood::Fine,
            4 => Mood::Failing,
            5 => Mood::Slow,
            6 => Mood::Lying,
            _ => Mood::Denied,
        };
    }

    /// An object expires.
    pub fn lose(&mut self) {
        let at = self.random.random_range(0..self.objects.len().max(1));
        let lost = self.objects.keys().nth(at).copied();
        let Some(lost) = lost else {
            return;
        };
        self.objects.remove(&lost);
        // Another object may get its name.
        for facts in &mut self.facts {
            facts.faulty.remove(&lost);
        }
    }

    /// Whether the object of this run is there with all its pages.
    pub fn is_good(&self, run: &RunName) -> bool {
        let object = self.objects.get(run);
        object.is_some_and(|object| is_good(object, run))
    }

    /// Objects without content.
    pub fn keep(&mut self, runs: impl Iterator<Item = RunName>) {
        self.objects = runs.map(|run| (run, Vec::new())).collect();
    }

    pub fn objects(&self) -> usize {
        self.objects.len()
    }

    fn chance(&mut self, one_in: u32) -> bool {
        self.random.random_range(0..one_in) == 0
    }

    /// Checks that an agent may make a request, and lets it fail.
    fn begin(&mut self, node: usize, kind: Kind, deadline: Instant) -> Result<(), RemoteError> {
        let now = self.now;
        let facts = &mut self.facts[node];
        assert!(!facts.is_closed, "a request of a closed agent");
        assert!(!facts.is_off, "a request of an agent that is switched off");
        if let Some(until) = facts.requests.open_until {
            assert!(kind == Kind::Look, "a request while the breaker is open");
            assert!(now >= until, "a probe before its time");
        }
        let is_looked_into = kind == Kind::Look || !facts.owes_look;
        assert!(is_looked_into, "a failure that was not looked into");
        let may_publish = kind != Kind::Publication || facts.has_seen_mark;
        assert!(may_publish, "a publication into a place without a mark");
        facts.owes_look = false;
        let until = facts.publications.open_until;
        let is_refused = kind == Kind::Publication && until.is_some_and(|until| now < until);
        assert!(!is_refused, "a publication while its breaker is open");
        self.advance(LATENCY);
        let fails = self.chance(2);
        let failure = match self.mood {
            Mood::Fine | Mood::Lying => None,
            Mood::Denied => Some(RemoteError::Denied("a test".to_owned())),
            Mood::Failing if fails => Some(match self.chance(2) {
                true => RemoteError::Failed("a test".to_owned()),
                false => RemoteError::Overloaded("a test".to_owned()),
            }),
            Mood::Slow if fails => {
                self.now = self.now.max(deadline);
                Some(RemoteError::Deadline)
            }
            Mood::Slow => {
                self.advance(Duration::from_millis(300));
                None
            }
            Mood::Failing => None,
        };
        let now = self.now;
        let facts = &mut self.facts[node];
        let is_publication = kind == Kind::Publication;
        let Some(failure) = failure else {
            facts.requests = Answers::default();
            if is_publication {
                facts.publications = Answers::default();
            }
            return Ok(());
        };
        let of_object = matches!(failure, RemoteError::Denied(_) | RemoteError::Failed(_));
        match kind {
            Kind::Publication => facts.publications.failed(&failure, now),
            Kind::Object if of_object => facts.owes_look = true,
            _ => facts.requests.failed(&failure, now),
        }
        Err(failure)
    }

    /// The remote states to have a run. A chain is published from its head, so it has those before.
    fn announce(&mut self, node: usize, run: &RunName) {
        let (chain, page) = chain_of(&run.last);
        for run in 0..=page / RUN_PAGES {
            let run = name(chain, run);
            self.facts[node].announced.insert(run);
            self.facts[node].gone.remove(&run);
        }
    }

    fn transfer(&mut self, bytes: usize) {
        self.advance(Duration::from_secs_f64(bytes as f64 / BANDWIDTH));
    }

    /// An object as a liar gives it out.
    fn distorted(&mut self, run: &RunName, object: &[u8]) -> Vec<u8> {
        let mut object = object.to_vec();
        let at = self.random.random_range(0..object.len().max(1));
        match self.random.random_range(0..4) {
            0 => object
                .iter_mut()
                .skip(at)
                .take(1)
                .for_each(|byte| *byte ^= 1),
            1 => object.truncate(at),
            2 => {
                let other = self.random.random_range(0..self.objects.len());
                let other = self.objects.values().nth(other);
                object = other.cloned().unwrap_or_default();
            }
            _ => object = forged(run),
        }
        object
    }
}

fn is_good(object: &[u8], run: &RunName) -> bool {
    let opened = open(object, run, &trust(1));
    let is_whole = opened.fault.is_none() && opened.pages.len() == RUN_PAGES;
    is_whole
        && opened.pages.iter().all(|page| {
            let expected = content(&page.page.key);
            page.payload
                .is_ok_and(|payload| payload.starts_with(&expected))
        })
}

/// Other bytes with right checksums, as a writer without the key makes them.
fn forged(run: &RunName) -> Vec<u8> {
    let (chain, last) = chain_of(&run.last);
    let page = |at: usize| RunPage {
        key: super::key(chain, at),
        parent: at.checked_sub(1).map(|before| super::key(chain, before)),
        depth: at as u32,
    };
    let pages = (last + 1 - RUN_PAGES..=last).map(page).collect();
    let mut draft = Draft::new(namespace(), pages, trust(2)).expect("memory");
    draft
        .payloads()
        .into_iter()
        .for_each(|page| page[..100].fill(0x66));
    let object = draft.finish(StoreId::from_bytes([0; 16]), 1);
    object.map_or_else(|_| Vec::new(), |object| object.to_vec())
}

/// The remote of one agent.
pub struct Faulty {
    world: Arc<Mutex<World>>,
    node: usize,
}

impl Faulty {
    pub fn new(world: &Arc<Mutex<World>>, node: usize) -> Faulty {
        Faulty {
            world: Arc::clone(world),
            node,
        }
    }
}

impl Remote for Faulty {
    fn look(&self, deadline: Instant) -> Result<(), RemoteError> {
        let mut world = self.world.lock();
        world.begin(self.node, Kind::Look, deadline)?;
        let is_marked = world.is_marked;
        world.facts[self.node].has_seen_mark = is_marked;
        match is_marked {
            true => Ok(()),
            false => Err(RemoteError::Unmarked("a test".to_owned())),
        }
    }

    fn mark(&self, _: Instant) -> Result<(), RemoteError> {
        unreachable!("agents make no remote")
    }

    fn now_unix_s(&self, _: Instant) -> Result<u64, RemoteError> {
        unreachable!("agents take no age")
    }

    fn holds(&self, run: &RunName, deadline: Instant) -> Result<bool, RemoteError> {
        let mut world = self.world.lock();
        world.begin(self.node, Kind::Object, deadline)?;
        let lies = world.mood == Mood::Lying && world.chance(3);
        let holds = world.objects.contains_key(run) != lies;
        if holds {
            world.announce(self.node, run);
        }
        Ok(holds)
    }

    fn fetch(
        &self,
        run: &RunName,
        bytes_max: usize,
        deadline: Instant,
    ) -> Result<Option<Buffer>, RemoteError> {
        let mut world = self.world.lock();
        {
            let facts = &world.facts[self.node];
            assert!(
                facts.announced.contains(run),
                "a run that was never announced"
            );
            assert!(!facts.gone.contains(run), "a run that is gone, again");
            assert!(!facts.faulty.contains(run), "a run with a fault, again");
        }
        world.begin(self.node, Kind::Object, deadline)?;
        let object = world.objects.get(run).cloned();
        let Some(mut object) = object.filter(|object| object.len() <= bytes_max) else {
            world.facts[self.node].gone.insert(*run);
            return Ok(None);
        };
        if world.mood == Mood::Lying && world.chance(2) {
            object = world.distorted(run, &object);
        }
        world.transfer(object.len());
        if !world.facts[self.node].is_sample && !is_good(&object, run) {
            world.facts[self.node].faulty.insert(*run);
        }
        Buffer::copy_of(&object).map(Some)
    }

    fn publish(
        &self,
        run: &RunName,
        mut object: Buffer,
        deadline: Instant,
    ) -> Result<Published, RemoteError> {
        let mut world = self.world.lock();
        assert!(is_good(&object, run), "an object with wrong pages");
        if self.node == 1 {
            let is_used = world.facts[1].used.contains(&run.last);
            assert!(is_used, "a run without a user");
        }
        let now = world.now;
        let facts = &mut world.facts[self.node];
        let budgets = [&mut facts.day, &mut facts.second];
        let budgets = budgets.into_iter().flatten();
        budgets.for_each(|budget| budget.spend(object.len(), now));
        world.begin(self.node, Kind::Publication, deadline)?;
        world.transfer(object.len());
        world.announce_one(self.node, run);
        if world.mood == Mood::Lying {
            match world.random.random_range(0..4) {
                // Acknowledged and lost.
                0 => return Ok(Published::Created),
                // Torn.
                1 => {
                    let at = world.random.random_range(0..object.len());
                    object.truncate(at);
                }
                _ => {}
            }
        }
        if world.objects.contains_key(run) {
            return Ok(Published::Present);
        }
        world.objects.insert(*run, object.to_vec());
        Ok(Published::Created)
    }

    fn remove(&self, _: &RunName, _: Instant) -> Result<(), RemoteError> {
        unreachable!("agents remove nothing")
    }

    fn list(
        &self,
        _: Option<Fingerprint>,
        each: &mut dyn FnMut(Result<Listed, Unreadable>) -> ControlFlow<()>,
        patience: Duration,
    ) -> Result<(), RemoteError> {
        let listed: Vec<Listed> = {
            let world = self.world.lock();
            let listed = world.objects.iter().map(|(run, object)| Listed {
                run: *run,
                bytes: object.len() as u64,
                created_unix_s: 0,
            });
            listed.collect()
        };
        // Each part is a request.
        for part in listed.chunks(LISTED_AT_ONCE).chain([[].as_slice()]) {
            let mut world = self.world.lock();
            let deadline = world.now + patience;
            world.begin(self.node, Kind::Listing, deadline)?;
            let took = world.part_takes;
            if world.has_foreign {
                return Err(RemoteError::Foreign("a test".to_owned()));
            }
            if took > patience {
                world.advance(patience);
                return Err(RemoteError::Deadline);
            }
            world.advance(took);
            for object in part {
                world.announce_one(self.node, &object.run);
            }
            drop(world);
            if part
                .iter()
                .copied()
                .map(Ok)
                .try_for_each(&mut *each)
                .is_break()
            {
                break;
            }
        }
        Ok(())
    }
}

impl World {
    fn announce_one(&mut self, node: usize, run: &RunName) {
        self.facts[node].announced.insert(*run);
        self.facts[node].gone.remove(run);
    }
}

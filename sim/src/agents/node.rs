//! A node: a store over an agent, the calls of its threads, and the checks of the end.

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::Duration;

use larder_engine::format::PageKey;
use larder_engine::{CodecChoice, GetPage, NamespaceId, PageStore, PutOptions, PutPage, Store};
use larder_remote::RunName;
use larder_remote::agent::{Admission, Agent, AgentOptions, CONNECTIONS_MAX};
use larder_sim_runtime::dice::{Dice, mix};
use larder_sim_runtime::sync::Mutex;
use larder_sim_runtime::time::Instant;
use larder_sim_runtime::{note, thread};
use larder_store::beneath::Beneath;

use super::remote::{BYTES_PER_DAY, BYTES_PER_SECOND, Faulty, PAUSE, Service};
use super::{
    CHAINS, PAGE, PAGES, RUN_PAGES, RUNS, TIMEOUT, content, key, name, namespace, place_of, trust,
};
use crate::processes::plan::Plan;

/// Longest wait of a read: about thirteen runs arrive in it.
const PATIENCE: Duration = Duration::from_millis(500);

/// Time in which a run is stored that has arrived.
const STORED_WITHIN: Duration = Duration::from_millis(300);

pub const REFRESH: Duration = Duration::from_secs(20);

/// Longest time until a remote that works has all runs, and until all threads have ended.
const RUNS_LIMIT: Duration = Duration::from_hours(1);
const END_LIMIT: Duration = Duration::from_secs(10);

/// See the module.
pub struct Node {
    service: Arc<Mutex<Service>>,
    at: usize,
    agent: Arc<Agent>,
    store: Arc<Store>,
    id: NamespaceId,
    /// Stored pages may be evicted.
    may_evict: bool,
    /// Held while the agent is switched on or off.
    switching: Mutex<()>,
}

/// The outcome of a lookup.
struct Lookup {
    /// Pages that are stored or promised.
    found: usize,
    /// The promise can be kept, unless something changes.
    is_fair: bool,
    /// Changes until then.
    changes: u64,
}

/// The first pages of a chain.
fn chain(chain: usize, pages: usize) -> Vec<PageKey> {
    (0..pages).map(|at| key(chain, at)).collect()
}

impl Node {
    /// Opens the store of a plan over a new agent.
    pub fn open(service: &Arc<Mutex<Service>>, at: usize, plan: &Plan) -> Arc<Node> {
        let options = AgentOptions {
            place: format!("node {at}"),
            trust: trust(1),
            run_tokens: 16 * RUN_PAGES as u32,
            admission: [Admission::Through, Admission::SecondTouch][at],
            bytes_per_day: BYTES_PER_DAY,
            bytes_per_second: BYTES_PER_SECOND,
            requests_per_hour: 1_000_000,
            connections: CONNECTIONS_MAX,
            patience: PATIENCE,
            timeout: TIMEOUT,
            prefill_rate: None,
            pause: PAUSE,
            refresh: REFRESH,
            delay: Duration::from_millis(100),
        };
        let service = service.clone();
        let remote = Faulty { service, node: at };
        let service = remote.service.clone();
        let agent = Agent::new(Box::new(remote), options);
        let options = plan.options(false, CodecChoice::Off, true);
        let opened = Store::attach(plan.path(), options.over(agent.clone()));
        let store = Arc::new(opened.expect("a node opens its store"));
        let shared: Arc<dyn PageStore> = store.clone();
        agent.start(&shared).expect("threads start");
        Arc::new(Node {
            service,
            at,
            agent,
            id: store.namespace(&namespace()).expect("a namespace"),
            store,
            may_evict: plan.may_evict(),
            switching: Mutex::default(),
        })
    }

    /// Makes the calls of two threads.
    pub fn call_all(self: &Arc<Node>, dice: &mut Dice) {
        let longest = dice.pick(&[50, 1_000, 5_000]);
        let calls = dice.pick(&[20, 60, 120]);
        let callers = [dice.fork(), dice.fork()].map(|mut dice| {
            let node = self.clone();
            thread::spawn(move || {
                for _ in 0..calls {
                    thread::sleep(Duration::from_millis(dice.between(0, longest)));
                    node.call(&mut dice);
                }
            })
        });
        callers.into_iter().for_each(|caller| drop(caller.join()));
    }

    fn call(&self, dice: &mut Dice) {
        let what = dice.below(100);
        match what {
            0..85 => self.serve(dice),
            85..95 => {
                self.service.lock().changes += 1;
                let page = key(dice.below(CHAINS), dice.below(PAGES));
                let _ = match what < 92 {
                    true => self.store.delete(self.id, &[page]),
                    // The disk is replaced.
                    false => self.store.clear_namespace(self.id),
                };
                self.service.lock().changes += 1;
            }
            _ => self.switch(dice.chance(0.5)),
        }
    }

    fn switch(&self, is_on: bool) {
        let _turn = self.switching.lock();
        self.service.lock().change();
        self.service.lock().facts[self.at].idle_since = None;
        self.agent.use_it(is_on);
        self.service.lock().facts[self.at].idle_since = (!is_on).then(Instant::now);
    }

    /// Looks a chain up, and reads the pages found and puts some that follow, or does neither.
    fn serve(&self, dice: &mut Dice) {
        let number = dice.below(CHAINS);
        let pages = chain(number, 1 + dice.below(PAGES));
        let mut lookup = self.look_up(&pages);
        if dice.chance(0.1) {
            // While runs are on their way.
            let mut service = self.service.lock();
            service.to_stop = Some(self.at);
            service.called.notify_all();
            drop(service);
            thread::sleep(Duration::from_millis(1));
            lookup = self.look_up(&pages);
        }
        if dice.chance(0.5) {
            self.read(&chain(number, lookup.found), &lookup);
        }
        if dice.chance(0.5) {
            let end = lookup.found + 1 + dice.below(3 * RUN_PAGES);
            self.put(&chain(number, end.min(PAGES)), lookup.found);
        }
    }

    fn look_up(&self, pages: &[PageKey]) -> Lookup {
        let (changes, is_fair) = {
            let service = self.service.lock();
            (service.changes, service.is_fair() && !self.may_evict)
        };
        let found = self.store.longest_prefix(self.id, pages);
        let service = &mut *self.service.lock();
        service.facts[self.at].used.extend(&pages[..found]);
        service.digest = mix(service.digest, found as u64);
        Lookup {
            found,
            is_fair,
            changes,
        }
    }

    /// Reads the pages that a lookup has found. Each has its bytes. All are there if the lookup was
    /// fair and nothing has changed since.
    fn read(&self, pages: &[PageKey], lookup: &Lookup) {
        let mut memory = vec![[0; PAGE]; pages.len()];
        let mut slots: Vec<_> = memory.iter_mut().map(|it| [IoSliceMut::new(it)]).collect();
        let mut asked: Vec<_> = pages
            .iter()
            .zip(&mut slots)
            .map(|(key, parts)| GetPage { key: *key, parts })
            .collect();
        let statuses = self.store.get(self.id, &mut asked, None);
        let read = statuses.iter().take_while(|status| status.is_hit()).count();
        let mut of_page = pages[..read].iter().zip(&memory);
        let is_right = of_page.all(|(key, bytes)| *bytes == content(key));
        assert!(is_right, "a wrong byte was stored");
        self.service.lock().totals.hits += read as u64;
        if read == pages.len() || !lookup.is_fair {
            return;
        }
        thread::sleep(STORED_WITHIN);
        let there = self.store.contains(self.id, pages);
        let service = self.service.lock();
        let missing = pages.iter().zip(there).find(|(_, is_there)| !is_there);
        let Some((page, _)) = missing.filter(|_| service.changes == lookup.changes) else {
            return;
        };
        let (chain, at) = place_of(page);
        let is_good = service.is_good(&name(chain, at / RUN_PAGES));
        assert!(
            !is_good,
            "page {at} of chain {chain} was promised and did not arrive"
        );
    }

    /// Puts the pages of a chain behind its first `from`.
    fn put(&self, pages: &[PageKey], from: usize) {
        let contents: Vec<_> = pages.iter().map(content).collect();
        let slots: Vec<_> = contents.iter().map(|it| [IoSlice::new(it)]).collect();
        let page = |at: usize| PutPage {
            key: pages[at],
            parent: at.checked_sub(1).map(|before| pages[before]),
            depth: at as u32,
            parts: &slots[at],
        };
        let asked: Vec<_> = (from..pages.len()).map(page).collect();
        let statuses = self.store.put(self.id, &asked, PutOptions::default());
        note(|| format!("put {:?}: {statuses:?}", pages.get(from).map(place_of)));
        let stored = statuses.iter().filter(|status| status.is_present()).count() as u64;
        let service = &mut *self.service.lock();
        service.totals.stored += stored;
        service.digest = mix(service.digest, stored);
    }

    pub fn counts(&self) -> BTreeMap<String, u64> {
        self.agent.report().counts
    }

    /// The remote works again, and all queues run empty. Then each run has an end, and nothing is
    /// on its way. The agent is closed: it makes no request, and its threads end.
    pub fn end(&self, dice: &mut Dice) {
        self.switch(true);
        let until = Instant::now() + RUNS_LIMIT;
        while self.counts()["waiting_runs"] > 0 || !self.agent.report().works {
            assert!(Instant::now() < until, "runs wait for ever");
            thread::sleep(Duration::from_secs(1));
        }
        // For publications in progress, and a listing.
        thread::sleep(2 * REFRESH);
        let (known, there) = (
            self.counts()["known_runs"],
            self.service.lock().objects.len(),
        );
        assert!(
            known <= there as u64,
            "{known} runs are known, and {there} there"
        );
        let begun = Instant::now();
        for number in 0..CHAINS {
            let (pages, until) = (chain(number, PAGES), Instant::now() + PATIENCE);
            self.agent.wait(namespace().fingerprint(), &pages, until);
        }
        assert!(
            begun.elapsed() < PATIENCE,
            "a page stays on its way for ever"
        );
        let counts = self.counts();
        if self.at == 0 {
            self.check_runs(&counts);
        }
        {
            let totals = &mut self.service.lock().totals;
            totals.opens += 1;
            totals.published += counts["published_runs"];
            totals.fetched += counts["fetched_runs"];
        }
        self.agent.close();
        self.service.lock().facts[self.at].idle_since = Some(Instant::now());
        (0..3).for_each(|_| self.serve(dice));
        thread::sleep(END_LIMIT);
        self.store.close().expect("a store closes");
        let users = Arc::strong_count(&self.store);
        assert_eq!(users, 1, "threads of a closed agent go on");
    }

    /// Each run that the node was asked to store is in the remote, as far as the node knows, or a
    /// counter says that it was dropped.
    fn check_runs(&self, counts: &BTreeMap<String, u64>) {
        let dropped = counts
            .iter()
            .filter(|(name, _)| name.starts_with("dropped"));
        let dropped: u64 = dropped.map(|(_, count)| count).sum();
        let mut lost = 0;
        for number in 0..CHAINS {
            let pages = chain(number, PAGES);
            let stored = self.store.contains(self.id, &pages);
            let stated = &self.service.lock().facts[self.at].stated;
            let runs = stored
                .chunks(RUN_PAGES)
                .zip((0..RUNS).map(|run| name(number, run)));
            let is_lost = |(pages, run): &(&[bool], RunName)| {
                !pages.contains(&false) && !stated.contains_key(run)
            };
            lost += runs.filter(is_lost).count();
        }
        let is_counted = lost as u64 <= dropped;
        assert!(is_counted, "{lost} runs were lost, and {dropped} counted");
    }
}

//! A simulation of two agents that share a remote: seeded, on one thread, with virtual time.
//!
//! It drives the code of the agents' threads in a random order, without their waits: they wait for
//! the clock and for each other alone. The remote fails, lies, delays and loses ([`remote`]), the
//! stores evict and refuse ([`shelf`]). Both check each call, and [`Sim::settle`] checks the end.
//! A planted bug must be noticed by a seed (`a_seed_notices_each_planted_bug`).

mod remote;
mod shelf;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_core::grants::Ask;
use larder_format::{Fingerprint, Namespace, PageKey, PageShape};
use larder_store::beneath::Beneath;
use larder_sync::Mutex;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;

use super::chains::Chains;
use super::desk::Chore;
use super::mind::LISTING_MAX;
use super::{Admission, Agent, AgentOptions};
use crate::error::RemoteError;
use crate::keys::{Keyring, SealKey, Trust};
use crate::planted::{Bug, plant};
use crate::run::{RunName, RunPage};
use remote::{Faulty, Mood, World};
use shelf::Shelf;

const CHAINS: usize = 3;
const RUNS: usize = 24;
const RUN_PAGES: usize = 4;
const PAGES: usize = RUNS * RUN_PAGES;

/// Bytes of a page without its padding.
const PAGE: usize = 300;

/// Bytes that the remote moves in a second.
const BANDWIDTH: f64 = 1e6;

/// Longest wait of a read: about five runs arrive in it.
const PATIENCE: Duration = Duration::from_millis(200);

const BYTES_PER_SECOND: u64 = 200_000;

/// The share of an hour, with which an owner begins, is about 80 runs.
const BYTES_PER_DAY: u64 = 24 * 3_000_000;

const STEPS: usize = 600;

/// Seeds of a correct agent, and most seeds until a bug is noticed.
const SEEDS: u64 = 300;
const SEEDS_OF_A_BUG: u64 = 1000;

fn namespace() -> Namespace {
    let shape = PageShape::new(&[PAGE as u32]).expect("a shape");
    let builder = Namespace::builder("model", "", 16, shape);
    builder.build().expect("a namespace")
}

fn trust(fill: u8) -> Trust {
    Trust::Sealed(Keyring::new(SealKey::new(&[fill; 32]), None))
}

/// Page `at` of a chain.
fn key(chain: usize, at: usize) -> PageKey {
    let mut bytes = [7; 32];
    bytes[..8].copy_from_slice(&(chain * PAGES + at + 1).to_le_bytes());
    PageKey::from_bytes(bytes)
}

fn chain_of(key: &PageKey) -> (usize, usize) {
    let (number, _) = key.as_bytes().split_first_chunk::<8>().expect("a key");
    let number = usize::from_le_bytes(*number) - 1;
    (number / PAGES, number % PAGES)
}

/// The bytes of a page.
fn content(key: &PageKey) -> [u8; PAGE] {
    std::array::from_fn(|at| key.as_bytes()[at % 32] | 1)
}

fn name(chain: usize, run: usize) -> RunName {
    RunName {
        namespace: namespace().fingerprint(),
        last: key(chain, (run + 1) * RUN_PAGES - 1),
    }
}

struct Node {
    agent: Arc<Agent>,
    shelf: Arc<Shelf>,
    listing: Instant,
    is_off: bool,
}

struct Sim {
    world: Arc<Mutex<World>>,
    nodes: Vec<Node>,
    random: Pcg64,
    space: Fingerprint,
}

impl Sim {
    fn new(seed: u64) -> Sim {
        let mut random = Pcg64::seed_from_u64(seed);
        let world = Arc::new(Mutex::new(World::new(random.random())));
        let nodes = (0..2).map(|at| {
            let options = AgentOptions {
                place: format!("node {at}"),
                trust: trust(1),
                run_tokens: 16 * RUN_PAGES as u32,
                admission: match at {
                    0 => Admission::Through,
                    _ => Admission::SecondTouch,
                },
                bytes_per_day: BYTES_PER_DAY,
                bytes_per_second: BYTES_PER_SECOND,
                requests_per_hour: 1_000_000,
                patience: PATIENCE,
                timeout: Duration::from_secs(2),
                prefill_rate: None,
                refresh: Duration::from_mins(5),
                delay: Duration::from_millis(100),
            };
            let clock = Arc::clone(&world);
            let agent = Agent::with_clock(
                Box::new(Faulty::new(&world, at)),
                options,
                Box::new(move || clock.lock().now()),
            );
            agent.began();
            agent.opened(&namespace());
            Node {
                shelf: Arc::new(Shelf::new(&agent)),
                listing: agent.now(),
                agent,
                is_off: false,
            }
        });
        let nodes: Vec<Node> = nodes.collect();
        let space = namespace().fingerprint();
        Sim {
            world,
            nodes,
            random,
            space,
        }
    }

    fn run(&mut self) {
        for _ in 0..STEPS {
            let at = self.random.random_range(0..self.nodes.len());
            match self.random.random_range(0..100) {
                0..20 => self.put(at),
                20..42 => self.look(at),
                42..56 => drop(self.publish(at)),
                56..68 => drop(self.fetch(at)),
                68..78 => drop(self.search(at)),
                78..84 => self.mind(at),
                84..90 => self.pass(),
                90..94 => {
                    let mood = self.random.random();
                    self.world.lock().change_mood(mood);
                }
                94..96 => self.world.lock().lose(),
                96..98 => {
                    let page = self.any_page();
                    self.nodes[at].shelf.evict(&page);
                }
                98 if self.random.random() => self.nodes[at].shelf.clear(),
                98 => self.mount(),
                _ => self.switch(at),
            }
        }
    }

    fn any_page(&mut self) -> PageKey {
        let chain = self.random.random_range(0..CHAINS);
        key(chain, self.random.random_range(0..PAGES))
    }

    fn pass(&mut self) {
        let most = [100, 5_000, 400_000][self.random.random_range(0..3)];
        let passed = Duration::from_millis(self.random.random_range(0..most));
        self.world.lock().advance(passed);
    }

    fn switch(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        node.is_off = !node.is_off;
        node.agent.use_it(!node.is_off);
        self.world.lock().facts[at].is_off = node.is_off;
    }

    /// A chain grows by some pages.
    fn put(&mut self, at: usize) {
        let chain = self.random.random_range(0..CHAINS);
        let pages = self.random.random_range(1..3 * RUN_PAGES);
        let shelf = &self.nodes[at].shelf;
        let begin = shelf.prefix(chain);
        let asks: Vec<Ask> = (begin..PAGES.min(begin + pages))
            .map(|at| Ask {
                key: key(chain, at),
                parent: at.checked_sub(1).map(|before| key(chain, before)),
                depth: at as u32,
            })
            .collect();
        self.nodes[at].agent.asked(self.space, &asks);
        for ask in &asks {
            shelf.keep(&ask.key);
        }
    }

    /// A lookup, and perhaps a read of the pages that it promised.
    fn look(&mut self, at: usize) {
        let chain = self.random.random_range(0..CHAINS);
        let keys: Vec<PageKey> = (0..PAGES).map(|page| key(chain, page)).collect();
        let node = &self.nodes[at];
        let found = node.shelf.prefix(chain);
        self.world.lock().facts[at].used.extend(&keys[..found]);
        if found > 0 {
            node.agent.used(self.space, &keys[..found]);
        }
        let (begin, promised) = {
            let promised = node.agent.missed(self.space, &keys, found);
            (node.agent.now(), &keys[found..found + promised])
        };
        if promised.is_empty() || self.random.random_range(0..2) == 0 {
            return;
        }
        let mut runs = promised.iter().filter_map(|page| {
            let (chain, page) = chain_of(page);
            let is_last = (page + 1).is_multiple_of(RUN_PAGES);
            is_last.then(|| name(chain, page / RUN_PAGES))
        });
        // Else the promise cannot be kept.
        let is_fair = {
            let world = self.world.lock();
            world.mood == Mood::Fine && runs.all(|run| world.is_good(&run))
        };
        while self.fetch(at) {}
        let node = &self.nodes[at];
        let is_there = promised.iter().all(|page| node.shelf.holds(page));
        let took = node.agent.now() - begin;
        assert!(
            is_there || !is_fair,
            "a promised page did not arrive in {took:?}"
        );
    }

    /// Publishes a run, if one is due.
    fn publish(&self, at: usize) -> bool {
        let node = &self.nodes[at];
        let run = node.agent.desk.lock().next_outgoing(node.agent.now());
        let Some(Ok(run)) = run else {
            return false;
        };
        node.agent.send(run, &*node.shelf);
        true
    }

    fn fetch(&self, at: usize) -> bool {
        let node = &self.nodes[at];
        let run = node.agent.desk.lock().next_incoming();
        run.iter()
            .for_each(|run| node.agent.bring(run, &*node.shelf));
        run.is_some()
    }

    fn search(&self, at: usize) -> bool {
        let node = &self.nodes[at];
        let search = node.agent.desk.lock().next_search();
        search.iter().for_each(|search| node.agent.search(search));
        search.is_some()
    }

    /// The regular work that is due.
    fn mind(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        loop {
            let (now, never) = (node.agent.now(), node.agent.now() + Duration::from_hours(1));
            let chore = node.agent.desk.lock().next_chore(now, node.listing, never);
            match chore {
                Some(Ok(Chore::Probe)) => node.agent.probe(),
                Some(Ok(Chore::List)) => {
                    node.agent.list();
                    node.listing = node.agent.now() + node.agent.options.refresh;
                }
                Some(Ok(Chore::Sample)) => {
                    self.world.lock().facts[at].is_sample = true;
                    node.agent.sample();
                    self.world.lock().facts[at].is_sample = false;
                }
                _ => return,
            }
        }
    }

    /// The directory is mounted, or not any more.
    fn mount(&mut self) {
        let mut world = self.world.lock();
        world.is_marked = !world.is_marked;
    }

    /// The remote works again, and all queues run empty. Then nothing is on its way, and each run
    /// has an end.
    fn settle(&mut self) {
        {
            let mut world = self.world.lock();
            (world.mood, world.is_marked) = (Mood::Fine, true);
        }
        for at in 0..self.nodes.len() {
            if self.nodes[at].is_off {
                self.switch(at);
            }
            let outgoing = |sim: &Sim| sim.nodes[at].agent.report().counts["waiting_runs"];
            for _ in 0..10_000 {
                let works = self.publish(at) | self.fetch(at) | self.search(at);
                if !works {
                    self.mind(at);
                    self.world.lock().advance(Duration::from_secs(2));
                    if outgoing(self) == 0 && self.nodes[at].agent.desk.lock().may_ask() {
                        break;
                    }
                }
            }
            assert_eq!(outgoing(self), 0, "runs wait for ever");
            let node = &self.nodes[at];
            let desk = node.agent.desk.lock();
            for chain in 0..CHAINS {
                let keys: Vec<PageKey> = (0..PAGES).map(|page| key(chain, page)).collect();
                let arrives = desk.some_arriving(self.space, &keys);
                assert!(!arrives, "a page stays on its way for ever");
            }
            drop(desk);
            if node.agent.options.admission == Admission::Through {
                self.check_ends(at);
            }
            self.check_names(at);
        }
    }

    /// Each run that the node was asked to store is in the remote, as far as the node knows, or a
    /// counter says that it was dropped.
    fn check_ends(&self, at: usize) {
        let node = &self.nodes[at];
        let counts = node.agent.report().counts;
        let dropped: u64 = counts
            .iter()
            .filter(|(name, _)| name.starts_with("dropped"))
            .map(|(_, count)| count)
            .sum();
        let world = self.world.lock();
        let lost = (0..CHAINS).flat_map(|chain| (0..RUNS).map(move |run| (chain, run)));
        let lost = lost.filter(|&(chain, run)| {
            let mut pages = run * RUN_PAGES..(run + 1) * RUN_PAGES;
            let is_stored = pages.all(|page| node.shelf.holds(&key(chain, page)));
            is_stored && !world.facts[at].announced.contains(&name(chain, run))
        });
        let lost: HashSet<(usize, usize)> = lost.collect();
        assert!(
            lost.len() as u64 <= dropped,
            "{} runs were lost, and {dropped} counted: {lost:?}",
            lost.len()
        );
    }

    /// A complete listing leaves the names of the runs that are there.
    fn check_names(&mut self, at: usize) {
        let agent = &self.nodes[at].agent;
        agent.list();
        let known = agent.report().counts["known_runs"];
        let there = self.world.lock().objects() as u64;
        assert!(known <= there, "{known} runs are known, and {there} there");
    }

    /// A closed agent makes no requests.
    fn close(&mut self) {
        for at in 0..self.nodes.len() {
            let node = &self.nodes[at];
            node.agent.desk.lock().close();
            self.world.lock().facts[at].is_closed = true;
        }
        for at in 0..self.nodes.len() {
            for _ in 0..10 {
                self.put(at);
                self.look(at);
                self.world.lock().advance(Duration::from_secs(1));
                while self.publish(at) | self.fetch(at) | self.search(at) {}
                self.mind(at);
            }
        }
    }
}

fn simulate(seed: u64) {
    let mut sim = Sim::new(seed);
    sim.run();
    sim.settle();
    sim.close();
}

/// The puts of the first pages of a chain.
fn asks(pages: usize) -> Vec<Ask> {
    let ask = |at: usize| Ask {
        key: key(0, at),
        parent: at.checked_sub(1).map(|before| key(0, before)),
        depth: at as u32,
    };
    (0..pages).map(ask).collect()
}

#[test]
fn pages_of_former_owners_are_recalled_before_those_of_this_one() {
    let sim = Sim::new(1);
    let agent = &sim.nodes[0].agent;
    let asks = asks(2 * RUN_PAGES);
    let mut former = Chains::default();
    for ask in &asks[..RUN_PAGES] {
        let page = RunPage {
            key: ask.key,
            parent: ask.parent,
            depth: ask.depth,
        };
        former.add(sim.space, page);
    }
    agent.asked(sim.space, &asks[RUN_PAGES..]);
    let mut desk = agent.desk.lock();
    assert!(!desk.has_recalled());
    desk.recall(former);
    assert!(desk.has_recalled());
    let pages = desk.chains.pages().map(|(space, page)| (space, page.key));
    assert!(pages.eq(asks.iter().map(|ask| (sim.space, ask.key))));
}

#[test]
fn a_listing_takes_an_hour_at_most_and_each_part_its_own_time() {
    let sim = Sim::new(1);
    let agent = &sim.nodes[0].agent;
    let count = |name: &str| agent.report().counts[name];
    // The names of a listing, a second for each part of ten.
    let list = |from: usize, runs: usize| {
        let mut world = sim.world.lock();
        world.keep((from..from + runs).map(|chain| name(chain, 0)));
        world.part_takes = Duration::from_secs(1);
        drop(world);
        let begin = agent.now();
        agent.list();
        agent.now() - begin
    };
    assert!(list(0, 1000) > Duration::from_secs(100));
    assert_eq!((count("listings"), count("known_runs")), (1, 1000));
    // It is stopped, so that nothing is forgotten.
    let took = list(1000, 40_000);
    assert!(took >= LISTING_MAX && took < LISTING_MAX + Duration::from_secs(2));
    assert_eq!(count("listings"), 1);
    assert!(count("known_runs") > 36_000);
    list(1000, 10);
    assert_eq!((count("listings"), count("known_runs")), (2, 10));
    // A part that takes longer than a request may.
    sim.world.lock().part_takes = Duration::from_secs(3);
    agent.list();
    assert_eq!(count("listings"), 2);
}

#[test]
fn a_search_begins_in_the_run_where_the_pages_end() {
    let sim = Sim::new(1);
    let agent = &sim.nodes[0].agent;
    let keys: Vec<PageKey> = (0..PAGES).map(|page| key(0, page)).collect();
    agent.asked(sim.space, &asks(RUN_PAGES + 2));
    // From the middle of the second run, whose first page is found.
    assert_eq!(agent.missed(sim.space, &keys[RUN_PAGES + 1..], 1), 0);
    let search = agent.desk.lock().next_search().expect("a search");
    let runs: Vec<RunName> = (1..RUNS).map(|run| name(0, run)).collect();
    assert_eq!(search.0, runs);
}

#[test]
fn a_search_without_a_question_is_no_answer() {
    let sim = Sim::new(1);
    let agent = &sim.nodes[0].agent;
    agent.desk.lock().hour.spend(u64::MAX);
    for chain in 0..5 {
        assert!(agent.desk.lock().may_ask());
        let keys: Vec<PageKey> = (0..PAGES).map(|page| key(chain, page)).collect();
        assert_eq!(agent.missed(sim.space, &keys, 0), 0);
        let search = agent.desk.lock().next_search().expect("a search");
        agent.search(&search);
        agent.failed(&RemoteError::Failed("a test".to_owned()));
    }
    assert!(!agent.desk.lock().may_ask());
    assert_eq!(agent.report().counts["search_requests"], 0);
}

/// Another writer of the remote has made a name that the client does not take.
#[test]
fn a_listing_that_cannot_end_is_no_failure_of_the_remote() {
    let sim = Sim::new(1);
    let agent = &sim.nodes[0].agent;
    let may_ask = || agent.desk.lock().may_ask();
    sim.world.lock().has_foreign = true;
    (0..10).for_each(|_| agent.list());
    assert!(may_ask());
    assert_eq!(agent.report().counts["listings"], 0);
    agent.failed(&RemoteError::Denied("a test".to_owned()));
    assert!(!may_ask());
    sim.world.lock().advance(Duration::from_mins(1));
    agent.probe();
    assert!(may_ask());
}

#[test]
fn agents_keep_their_promises_over_any_remote() {
    for seed in 0..SEEDS {
        let passed = catch_unwind(|| simulate(seed));
        assert!(passed.is_ok(), "seed {seed}");
    }
}

#[test]
fn a_seed_notices_each_planted_bug() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let unnoticed: Vec<Bug> = Bug::ALL
        .iter()
        .copied()
        .filter(|bug| {
            plant(Some(*bug));
            let is_noticed = |seed| catch_unwind(AssertUnwindSafe(|| simulate(seed))).is_err();
            let noticed = (0..SEEDS_OF_A_BUG).find(|seed| is_noticed(*seed));
            plant::<Bug>(None);
            println!("{bug:?}: {noticed:?}");
            noticed.is_none()
        })
        .collect();
    std::panic::set_hook(hook);
    assert_eq!(unnoticed, []);
}

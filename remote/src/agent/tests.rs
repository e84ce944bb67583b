//! The decisions of an agent whose threads have not been started.

use std::ops::ControlFlow;

use larder_format::{BLOCK_BYTES, PageShape};

use super::*;
use crate::buffer::Buffer;
use crate::error::RemoteError;
use crate::keys::Trust;
use crate::remote::{Listed, Published, Unreadable};
use crate::run::RunName;
use chains::Chains;
use desk::{End, Errand};
use search::Search;

const RUN_PAGES: usize = 4;
const PAGES: usize = 24 * RUN_PAGES;

/// Another writer of the remote has made a name that the client does not take.
struct Foreign;

impl Remote for Foreign {
    fn look(&self, _: Instant) -> Result<(), RemoteError> {
        Ok(())
    }

    fn mark(&self, _: Instant) -> Result<(), RemoteError> {
        unreachable!("agents make no remote")
    }

    fn now_unix_s(&self, _: Instant) -> Result<u64, RemoteError> {
        unreachable!("agents take no age")
    }

    fn holds(&self, _: &RunName, _: Instant) -> Result<bool, RemoteError> {
        unreachable!("no question is left in the budget")
    }

    fn fetch(&self, _: &RunName, _: usize, _: Instant) -> Result<Option<Buffer>, RemoteError> {
        unreachable!("no run is known")
    }

    fn publish(&self, _: &RunName, _: Buffer, _: Instant) -> Result<Published, RemoteError> {
        unreachable!("no thread publishes")
    }

    fn touch(&self, _: &RunName, _: Instant) -> Result<(), RemoteError> {
        unreachable!("no thread marks a use")
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
        _: &mut dyn FnMut() -> ControlFlow<()>,
        _: &mut dyn FnMut(Result<Listed, Unreadable>) -> ControlFlow<()>,
        _: Duration,
    ) -> Result<(), RemoteError> {
        Err(RemoteError::Foreign("a test".to_owned()))
    }
}

fn namespace() -> Namespace {
    let shape = PageShape::new(&[300]).expect("a shape");
    let builder = Namespace::builder("model", "", 16, shape);
    builder.build().expect("a namespace")
}

/// An agent in use.
fn agent() -> Arc<Agent> {
    let options = AgentOptions {
        place: "a test".to_owned(),
        trust: Trust::Unsigned,
        run_tokens: 16 * RUN_PAGES as u32,
        admission: Admission::Through,
        bytes_per_day: 1 << 30,
        bytes_per_second: 1 << 20,
        requests_per_hour: 1000,
        connections: CONNECTIONS_MAX,
        patience: Duration::from_millis(200),
        timeout: Duration::from_secs(2),
        prefill_rate: None,
        pause: Duration::from_secs(5),
        refresh: Duration::from_mins(5),
        delay: Duration::from_millis(100),
    };
    let agent = Agent::new(Box::new(Foreign), options);
    agent.began();
    agent.opened(&namespace());
    agent
}

/// Page `at` of a chain.
fn key(chain: usize, at: usize) -> PageKey {
    let mut bytes = [7; 32];
    bytes[..8].copy_from_slice(&(chain * PAGES + at).to_le_bytes());
    PageKey::from_bytes(bytes)
}

fn next_search(agent: &Agent) -> Search {
    match agent.desk.lock().next_errand(Instant::now()) {
        Some(Errand::Search(search)) => search,
        _ => panic!("no search"),
    }
}

/// The puts of the first pages of a chain.
fn asks(pages: usize) -> Vec<Ask> {
    let ask = |at: usize| Ask {
        key: key(0, at),
        parent: at.checked_sub(1).map(|before| key(0, before)),
        depth: at as u32,
        saved: 0,
    };
    (0..pages).map(ask).collect()
}

#[test]
fn pages_of_former_owners_are_recalled_before_those_of_this_one() {
    let (agent, space) = (agent(), namespace().fingerprint());
    let asks = asks(2 * RUN_PAGES);
    let mut former = Chains::default();
    for ask in &asks[..RUN_PAGES] {
        let page = RunPage {
            key: ask.key,
            parent: ask.parent,
            depth: ask.depth,
        };
        former.add(space, page);
    }
    agent.asked(space, &asks[RUN_PAGES..]);
    let mut desk = agent.desk.lock();
    assert!(!desk.has_recalled());
    desk.recall(former);
    assert!(desk.has_recalled());
    let pages = desk.chains.pages().map(|(space, page)| (space, page.key));
    assert!(pages.eq(asks.iter().map(|ask| (space, ask.key))));
}

#[test]
fn a_search_begins_in_the_run_where_the_pages_end() {
    let (agent, space) = (agent(), namespace().fingerprint());
    let keys: Vec<PageKey> = (0..PAGES).map(|page| key(0, page)).collect();
    agent.asked(space, &asks(RUN_PAGES + 2));
    // From the middle of the second run, whose first page is found.
    assert_eq!(agent.missed(space, &keys[RUN_PAGES + 1..], 1), 0);
    let search = next_search(&agent);
    let last = search.0.iter().map(|run| run.last);
    let ends = (2..).map(|run| key(0, run * RUN_PAGES - 1));
    assert!(last.eq(ends.take(PAGES / RUN_PAGES - 1)));
}

#[test]
fn a_search_without_a_question_is_no_answer() {
    let (agent, space) = (agent(), namespace().fingerprint());
    agent.desk.lock().hour.spend(u64::MAX, Instant::now());
    for chain in 0..5 {
        assert!(agent.desk.lock().may_ask());
        let keys: Vec<PageKey> = (0..PAGES).map(|page| key(chain, page)).collect();
        assert_eq!(agent.missed(space, &keys, 0), 0);
        let search = next_search(&agent);
        agent.search(&search);
        agent.failed(&RemoteError::Failed("a test".to_owned()));
    }
    assert!(!agent.desk.lock().may_ask());
    assert_eq!(agent.report().counts["search_requests"], 0);
}

#[test]
fn a_listing_that_cannot_end_is_no_failure_of_the_remote() {
    let agent = agent();
    let may_ask = || agent.desk.lock().may_ask();
    assert!((0..10).all(|_| !agent.list()));
    assert!(may_ask());
    assert_eq!(agent.report().counts["listings"], 0);
    agent.failed(&RemoteError::Denied("a test".to_owned()));
    assert!(!may_ask());
    agent.probe();
    assert!(may_ask());
}

/// A server that gives each connection a speed of its own: a run takes so long, also beside others.
const OF_A_RUN: Duration = Duration::from_millis(150);

/// Looks all runs of a chain up, and brings the begun ones. Returns the numbers of the promised and
/// of the begun ones.
fn look_up(agent: &Agent, now: &mut Instant) -> (usize, usize) {
    let (space, mut desk) = (namespace().fingerprint(), agent.desk.lock());
    let keys: Vec<PageKey> = (0..PAGES).map(|page| key(0, page)).collect();
    let missed = desk.missed(space, &keys, 0, *now, &agent.options);
    let mut fetches = Vec::new();
    while let Some(fetch) = desk.next_fetch(*now, &mut 0) {
        fetches.push(fetch);
    }
    let begun = fetches.len();
    *now += OF_A_RUN;
    for fetch in &fetches {
        desk.answered(fetch, Some(fetch.run.flight.bytes), *now);
    }
    for fetch in &fetches {
        desk.ended(fetch, End::Stored, *now);
    }
    (missed.promised / RUN_PAGES, begun)
}

/// An agent that knows all runs of a chain.
fn knowing_agent() -> Arc<Agent> {
    let (agent, space) = (agent(), namespace().fingerprint());
    let mut desk = agent.desk.lock();
    for run in 1..=PAGES / RUN_PAGES {
        desk.names
            .add((space, key(0, run * RUN_PAGES - 1).prefix()));
    }
    drop(desk);
    agent
}

#[test]
fn a_lookup_is_promised_the_speed_of_many_connections_after_a_trial_of_them() {
    let (agent, mut now) = (knowing_agent(), Instant::now());
    // Nothing is known, one run is in time, and then as many as were tried.
    let looked_up: Vec<_> = (0..4).map(|_| look_up(&agent, &mut now)).collect();
    let all = PAGES / RUN_PAGES;
    assert_eq!(looked_up, [(0, 1), (0, 4), (0, 20), (all, all)]);
}

#[test]
fn a_lookup_is_promised_no_more_pages_than_the_store_keeps() {
    let (agent, mut now) = (knowing_agent(), Instant::now());
    // A page has one block.
    let keep = |pages: usize| agent.desk.lock().usable_bytes = (pages * BLOCK_BYTES) as u64;
    keep(4 * RUN_PAGES - 1);
    let looked_up: Vec<_> = (0..3).map(|_| look_up(&agent, &mut now)).collect();
    assert_eq!(looked_up, [(0, 1), (0, 3), (3, 3)]);
    keep(RUN_PAGES - 1);
    assert_eq!(look_up(&agent, &mut now), (0, 0));
}

#[test]
fn a_trial_is_made_once_in_a_while_where_it_brings_no_more() {
    let (agent, mut now) = (knowing_agent(), Instant::now());
    let desk = || agent.desk.lock();
    assert_eq!(look_up(&agent, &mut now), (0, 1));
    // As if two at once had been tried in vain.
    desk().tried = (2, Some(now));
    let other = RunName {
        namespace: namespace().fingerprint(),
        last: key(1, RUN_PAGES - 1),
    };
    desk().fetching.insert(other, now + agent.options.refresh);
    assert_eq!(look_up(&agent, &mut now), (1, 1));
    now += agent.options.refresh;
    assert_eq!(look_up(&agent, &mut now), (0, 7));
}

#[test]
fn no_request_is_made_without_a_budget() {
    let (agent, mut now) = (knowing_agent(), Instant::now());
    let desk = || agent.desk.lock();
    desk().hour.spend(998, now);
    assert_eq!(look_up(&agent, &mut now), (0, 1));
    // The last one.
    assert_eq!(look_up(&agent, &mut now), (1, 1));
    assert_eq!(look_up(&agent, &mut now), (0, 0));
    assert!(desk().state(now).contains("l4_requests_per_hour"));
    agent.list();
    agent.probe();
    assert_eq!(agent.report().counts["listings"], 0);
}

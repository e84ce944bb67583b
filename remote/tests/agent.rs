//! Agents of two nodes over a remote that fails, lies and loses. Each page that a store returns has
//! its own bytes, and no read waits much longer than its deadline.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::ops::ControlFlow;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use common::member::{PATIENCE, RUN_PAGES};
use common::node::{Node, Objects, Watched, forged, listed_once};
use common::*;
use larder_engine::PageStore;
use larder_format::{Fingerprint, PageKey};
use larder_remote::agent::{Admission, AgentOptions};
use larder_remote::dir::Dir;
use larder_remote::{Buffer, Listed, Published, Remote, RemoteError, RunName, Unreadable};
use larder_store::beneath::{Beneath, BeneathReport};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;

const PAGES: usize = 8;

/// Offset of the first payload in an object, and length of a payload. Both in bytes.
const PAYLOADS: usize = 3 * 4096;
const PAYLOAD: usize = 12288;

/// Objects in memory, behind a network and a server that cannot be trusted.
struct Faulty {
    objects: Objects,
    random: Mutex<Pcg64>,
}

impl Faulty {
    /// A number below `below`, or a fault that any request may have.
    fn begin(&self, below: u32) -> Result<u32, RemoteError> {
        let (fault, number) = {
            let mut random = self.random.lock().unwrap();
            (random.random_range(0..20), random.random_range(0..below))
        };
        match fault {
            0 => return Err(RemoteError::Failed("a test".to_owned())),
            1 => return Err(RemoteError::Deadline),
            2 => return Err(RemoteError::Overloaded("a test".to_owned())),
            _ => {}
        }
        Ok(number)
    }

    /// An offset below `length`. 0 where the length is 0.
    fn at(&self, length: usize) -> usize {
        let mut random = self.random.lock().unwrap();
        random.random_range(0..length.max(1))
    }
}

impl Remote for Faulty {
    fn look(&self, _: Instant) -> Result<(), RemoteError> {
        self.begin(1).map(drop)
    }

    fn mark(&self, _: Instant) -> Result<(), RemoteError> {
        Ok(())
    }

    fn now_unix_s(&self, _: Instant) -> Result<u64, RemoteError> {
        Ok(0)
    }

    fn holds(&self, run: &RunName, _: Instant) -> Result<bool, RemoteError> {
        let lies = self.begin(10)? == 0;
        Ok(self.objects.lock().unwrap().contains_key(run) != lies)
    }

    fn fetch(
        &self,
        run: &RunName,
        bytes_max: usize,
        _: Instant,
    ) -> Result<Option<Buffer>, RemoteError> {
        let kind = self.begin(12)?;
        let objects = self.objects.lock().unwrap();
        let Some(object) = objects.get(run).filter(|object| object.len() <= bytes_max) else {
            return Ok(None);
        };
        let mut object = object.clone();
        match kind {
            // A flipped bit, anywhere.
            0 | 1 => {
                let at = self.at(object.len());
                // A torn object may be empty.
                object
                    .iter_mut()
                    .skip(at)
                    .take(1)
                    .for_each(|byte| *byte ^= 1);
            }
            2 => object.truncate(self.at(object.len())),
            // Another run under this name.
            3 => {
                object = objects
                    .values()
                    .nth(self.at(objects.len()))
                    .unwrap()
                    .clone();
            }
            // Payloads of two pages exchanged.
            4 if object.len() >= PAYLOADS + 2 * PAYLOAD => {
                let (first, second) = object[PAYLOADS..].split_at_mut(PAYLOAD);
                first.swap_with_slice(&mut second[..PAYLOAD]);
            }
            // The true name and pages, sealed by another key.
            5 => object = forged(run, &object),
            _ => {}
        }
        Buffer::copy_of(&object).map(Some)
    }

    fn publish(
        &self,
        run: &RunName,
        mut object: Buffer,
        _: Instant,
    ) -> Result<Published, RemoteError> {
        let kind = self.begin(12)?;
        match kind {
            // Acknowledged and lost.
            0 => return Ok(Published::Created),
            // Torn.
            1 => object.truncate(self.at(object.len())),
            _ => {}
        }
        let mut objects = self.objects.lock().unwrap();
        if objects.contains_key(run) {
            return Ok(Published::Present);
        }
        objects.insert(*run, object.to_vec());
        Ok(Published::Created)
    }

    fn touch(&self, _: &RunName, _: Instant) -> Result<(), RemoteError> {
        self.begin(1).map(drop)
    }

    fn list_marks(
        &self,
        _: &mut dyn FnMut() -> ControlFlow<()>,
        _: &mut dyn FnMut(Result<Listed, Unreadable>) -> ControlFlow<()>,
        _: Duration,
    ) -> Result<(), RemoteError> {
        unreachable!("agents list no marks")
    }

    fn remove(&self, run: &RunName, _: Instant) -> Result<(), RemoteError> {
        self.objects.lock().unwrap().remove(run);
        Ok(())
    }

    fn list(
        &self,
        _: Option<Fingerprint>,
        part: &mut dyn FnMut() -> ControlFlow<()>,
        each: &mut dyn FnMut(Result<Listed, Unreadable>) -> ControlFlow<()>,
        _: Duration,
    ) -> Result<(), RemoteError> {
        if part().is_break() {
            return Ok(());
        }
        self.begin(1)?;
        let objects = self.objects.lock().unwrap();
        let listed = objects.iter().map(|(run, object)| Listed {
            run: *run,
            bytes: object.len() as u64,
            created_unix_s: 0,
        });
        let listed: Vec<Listed> = listed.collect();
        drop(objects);
        let _ = listed.into_iter().map(Ok).try_for_each(each);
        Ok(())
    }
}

/// Answers the first question when a second one was asked, or when it is let go.
#[derive(Clone, Default)]
struct Meeting(Arc<(Mutex<u32>, Condvar)>);

impl Meeting {
    fn ask(&self) {
        *self.0.0.lock().unwrap() += 1;
        self.0.1.notify_all();
    }
}

impl Remote for Meeting {
    fn look(&self, _: Instant) -> Result<(), RemoteError> {
        Ok(())
    }

    fn mark(&self, _: Instant) -> Result<(), RemoteError> {
        Ok(())
    }

    fn now_unix_s(&self, _: Instant) -> Result<u64, RemoteError> {
        Ok(0)
    }

    fn holds(&self, _: &RunName, _: Instant) -> Result<bool, RemoteError> {
        self.ask();
        let asked = self.0.0.lock().unwrap();
        drop(self.0.1.wait_while(asked, |asked| *asked < 2).unwrap());
        Ok(false)
    }

    fn fetch(&self, _: &RunName, _: usize, _: Instant) -> Result<Option<Buffer>, RemoteError> {
        Ok(None)
    }

    fn publish(&self, _: &RunName, _: Buffer, _: Instant) -> Result<Published, RemoteError> {
        Ok(Published::Created)
    }

    fn touch(&self, _: &RunName, _: Instant) -> Result<(), RemoteError> {
        Ok(())
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
        Ok(())
    }

    fn list(
        &self,
        _: Option<Fingerprint>,
        _: &mut dyn FnMut() -> ControlFlow<()>,
        _: &mut dyn FnMut(Result<Listed, Unreadable>) -> ControlFlow<()>,
        _: Duration,
    ) -> Result<(), RemoteError> {
        Ok(())
    }
}

#[test]
fn no_fault_of_the_remote_makes_a_store_return_a_wrong_byte_or_wait() {
    let objects = Objects::default();
    let faulty = |seed| Faulty {
        objects: Arc::clone(&objects),
        random: Mutex::new(Pcg64::seed_from_u64(seed)),
    };
    let nodes = [1, 2].map(|seed| Node::new(Box::new(faulty(seed))));
    let begin = Instant::now();
    let mut hits = 0;
    let is_done = || {
        let second = |name| nodes[1].count(name);
        let faulty = second("faulty_pages") > 8 && second("faulty_runs") > 8;
        faulty && second("stored_pages") > 100 && second("failed_fetches") > 4
    };
    let mut seed = 0;
    while !is_done() {
        assert!(begin.elapsed() < PATIENCE, "{:?}", nodes[1].agent.report());
        seed += 1;
        nodes[0].put(&chain(seed, PAGES));
        // Runs that have been published meanwhile.
        for before in seed.saturating_sub(20)..seed {
            hits += nodes[1].read(&chain(before, PAGES));
        }
    }
    assert!(hits > 0);
    // Of the remote alone: the second node puts nothing itself.
    assert!(nodes[1].count("published_runs") <= nodes[1].count("stored_pages"));
    nodes.iter().for_each(Node::close);
}

#[test]
fn a_node_that_may_not_publish_reads_on() {
    let pages = chain(1, PAGES);
    let refusals = [
        RemoteError::Denied("a test".to_owned()),
        RemoteError::Failed("it is full".to_owned()),
        RemoteError::Deadline,
    ];
    for refusal in refusals {
        let mut remote = Watched::with("model", &pages);
        remote.refuses = Some(refusal);
        let node = Node::with(Box::new(remote), |options| {
            listed_once(options);
            options.pause = Duration::from_millis(1);
        });
        // Attempts at pages that the disk still writes count for a run, and not as refusals.
        let are_refused = |report: &BeneathReport| {
            report.counts["dropped_failed_runs"] >= 2 && report.state.contains("no publications")
        };
        let begin = Instant::now();
        while !are_refused(&node.agent.report()) {
            assert!(begin.elapsed() < PATIENCE, "{:?}", node.agent.report());
            node.put(&chain(2, PAGES));
        }
        node.eventually(|| node.read(&pages) == PAGES);
        assert_eq!(node.count("breaker_openings"), 0);
        let report = node.agent.report();
        assert!(are_refused(&report), "{report:?}");
        node.close();
    }
}

#[test]
fn publications_at_once_stay_within_the_bytes_of_a_day() {
    let meeting = Meeting::default();
    let run = larder_remote::run::object_bytes(&namespace("model"), RUN_PAGES) as u64;
    let node = Node::within(run + run / 2, Box::new(meeting.clone()));
    node.put(&chain(1, 2 * RUN_PAGES));
    let until = Instant::now() + PATIENCE;
    let ended = |report: &BeneathReport| {
        report.counts["published_runs"] + report.counts["dropped_budget_runs"]
    };
    let mut is_over = node.agent.wait_for(until, |report| ended(report) > 0);
    meeting.ask();
    is_over &= node.agent.wait_for(until, |report| ended(report) > 1);
    assert!(is_over, "{:?}", node.agent.report());
    assert_eq!(node.count("published_runs"), 1);
    node.close();
}

#[test]
fn a_day_begins_with_the_share_of_an_hour_and_one_run() {
    let run = larder_remote::run::object_bytes(&namespace("model"), RUN_PAGES) as u64;
    let remote = Watched::default();
    let node = Node::within(20 * run, Box::new(remote.clone()));
    node.put(&chain(1, 3 * RUN_PAGES));
    node.eventually(|| node.count("published_runs") + node.count("dropped_budget_runs") == 3);
    assert_eq!(node.count("published_runs"), 1);
    node.close();
}

/// An object that another writer of the remote says to have.
fn huge(model: &str, seed: u64) -> Listed {
    Listed {
        run: names(model).name(&chain(seed, 1)[0]),
        bytes: 1 << 40,
        created_unix_s: 0,
    }
}

#[test]
fn the_speed_is_measured_with_a_whole_run_of_a_namespace_in_use() {
    let mut remote = Watched::with("model", &chain(1, 3 * RUN_PAGES));
    let mut names: Vec<RunName> = remote.objects.lock().unwrap().keys().copied().collect();
    // The last one is short, and others are longer than any run.
    let short = names.pop().unwrap();
    remote.objects.lock().unwrap().insert(short, vec![1; 10]);
    remote.beside = vec![huge("other", 1), huge("model", 2), huge("other", 3)];
    let node = Node::with(Box::new(remote.clone()), listed_once);
    node.eventually(|| node.count("speed_bytes_per_s") > 0);
    let bytes = larder_remote::run::object_bytes(&namespace("model"), RUN_PAGES);
    assert_eq!(remote.fetched(), [(names[names.len() - 1], bytes)]);
    node.close();
}

#[test]
fn a_namespace_that_is_used_after_the_listing_is_measured_then() {
    let remote = Watched::with("late", &chain(1, RUN_PAGES));
    let node = Node::with(Box::new(remote.clone()), listed_once);
    node.eventually(|| node.count("listings") == 1);
    assert_eq!(remote.fetched(), []);
    node.store.namespace(&namespace("late")).unwrap();
    node.eventually(|| node.count("speed_bytes_per_s") > 0);
    assert_eq!(remote.fetched().len(), 1);
    node.close();
}

#[test]
fn a_run_that_a_listing_does_not_show_is_forgotten_and_published_again() {
    let remote = Watched::default();
    let node = Node::with(Box::new(remote.clone()), |options| {
        options.admission = Admission::SecondTouch;
    });
    let pages = chain(1, PAGES);
    node.put(&pages);
    node.eventually(|| node.read(&pages) == PAGES && node.count("known_runs") == 2);
    remote.objects.lock().unwrap().clear();
    node.eventually(|| node.count("known_runs") == 0);
    node.eventually(|| node.read(&pages) == PAGES && node.count("published_runs") == 4);
    assert_eq!(remote.objects.lock().unwrap().len(), 2);
    node.close();
}

#[test]
fn a_run_that_takes_the_name_of_a_faulty_one_is_fetched() {
    let pages = chain(1, RUN_PAGES);
    let remote = Watched::with("model", &pages);
    let (name, object) = remote.objects.lock().unwrap().pop_first().unwrap();
    let put = |object: &[u8]| remote.objects.lock().unwrap().insert(name, object.to_vec());
    put(&forged(&name, &object));
    let node = Node::new(Box::new(remote.clone()));
    node.eventually(|| node.read(&pages) == 0 && node.count("faulty_runs") > 0);
    remote.objects.lock().unwrap().clear();
    let listings = node.count("listings");
    node.eventually(|| node.count("listings") > listings + 1);
    put(&object);
    node.eventually(|| node.read(&pages) == RUN_PAGES);
    node.close();
}

/// Its name is known, so that the remote is not asked for it at each use.
#[test]
fn a_faulty_run_is_not_published_again_while_it_is_there() {
    let pages = chain(1, RUN_PAGES);
    let remote = Watched::with("model", &pages);
    let (name, object) = remote.objects.lock().unwrap().pop_first().unwrap();
    let put = |object: &[u8]| remote.objects.lock().unwrap().insert(name, object.to_vec());
    put(&forged(&name, &object));
    let node = Node::with(Box::new(remote.clone()), |options| {
        options.admission = Admission::SecondTouch;
        listed_once(options);
    });
    node.eventually(|| {
        node.read(&pages);
        node.count("faulty_runs") == 1 && node.count("arriving_runs") == 0
    });
    node.put(&pages);
    for _ in 0..100 {
        node.eventually(|| node.read(&pages) == RUN_PAGES && node.count("waiting_runs") == 0);
    }
    assert_eq!(node.count("present_runs"), 0);
    node.close();
}

/// The name of the run of a chain with one run.
fn name_of(pages: &[PageKey]) -> RunName {
    names("model").name(&pages[RUN_PAGES - 1])
}

/// Bad sectors, or errors of the server for some objects: more than failures that open the breaker.
#[test]
fn runs_that_cannot_be_read_cost_no_other_run() {
    let remote = Watched::default();
    let chains: Vec<_> = (1..=8).map(|seed| chain(seed, RUN_PAGES)).collect();
    for pages in &chains {
        let of_chain = Watched::with("model", pages);
        let mut objects = remote.objects.lock().unwrap();
        objects.append(&mut of_chain.objects.lock().unwrap());
    }
    let (good, broken) = chains.split_last().unwrap();
    let names: Vec<RunName> = broken.iter().map(|pages| name_of(pages)).collect();
    remote.broken.lock().unwrap().extend(&names);
    let node = Node::with(Box::new(remote.clone()), listed_once);
    // The fetch that measures the speed is over.
    let is_measured = || node.count("speed_bytes_per_s") + node.count("unreadable_runs") > 0;
    node.eventually(is_measured);
    node.eventually(|| {
        broken
            .iter()
            .for_each(|pages| assert_eq!(node.read(pages), 0));
        node.read(good) == RUN_PAGES && node.count("known_runs") == 1
    });
    // Each was fetched once.
    let fetched = remote.fetched();
    for name in &names {
        assert_eq!(fetched.iter().filter(|(run, _)| run == name).count(), 1);
    }
    assert!(node.count("unreadable_runs") >= names.len() as u64);
    assert_eq!(node.count("breaker_openings"), 0);
    // Nor are they published: it cannot be seen whether they are there.
    let written = chain(9, RUN_PAGES);
    node.put(&written);
    node.publishes(&written, 1);
    remote
        .broken
        .lock()
        .unwrap()
        .insert(name_of(&chain(10, RUN_PAGES)));
    node.put(&chain(10, RUN_PAGES));
    node.eventually(|| node.count("dropped_failed_runs") == 1);
    assert_eq!(node.count("published_runs"), 1);
    assert_eq!(node.agent.report().state, "in use");
    node.close();
}

#[test]
fn the_failure_of_the_remote_itself_is_none_of_an_object() {
    let pages = chain(1, RUN_PAGES);
    let remote = Watched::with("model", &pages);
    let node = Node::with(Box::new(remote.clone()), listed_once);
    node.eventually(|| node.count("speed_bytes_per_s") > 0);
    remote.broken.lock().unwrap().insert(name_of(&pages));
    *remote.is_down.lock().unwrap() = Some(RemoteError::Failed("a test".to_owned()));
    node.eventually(|| {
        assert_eq!(node.read(&pages), 0);
        node.count("breaker_openings") == 1
    });
    assert_eq!(node.count("unreadable_runs"), 0);
    node.close();
}

#[test]
fn a_run_that_could_not_be_read_is_read_after_the_next_listing() {
    let pages = chain(1, RUN_PAGES);
    let remote = Watched::with("model", &pages);
    remote.broken.lock().unwrap().insert(name_of(&pages));
    let node = Node::new(Box::new(remote.clone()));
    node.eventually(|| node.read(&pages) == 0 && node.count("unreadable_runs") > 0);
    remote.broken.lock().unwrap().clear();
    node.eventually(|| node.read(&pages) == RUN_PAGES);
    node.close();
}

/// A file system that is mounted late, and lost.
#[test]
fn an_owner_publishes_into_a_directory_while_it_has_the_mark() {
    let place = tempfile::tempdir().unwrap();
    let [mark, hidden] = ["v1", "hidden"].map(|name| place.path().join(name));
    let node = Node::new(Box::new(Dir::new(place.path().to_owned())));
    let is_unmarked = || {
        let report = node.agent.report();
        !report.works && report.state.contains("larder remote init URL --new")
    };
    node.put(&chain(1, RUN_PAGES));
    node.eventually(|| is_unmarked() && node.count("waiting_runs") == 1);
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    fs::create_dir(&mark).unwrap();
    node.publishes(&chain(1, RUN_PAGES), 1);
    fs::rename(&mark, &hidden).unwrap();
    node.put(&chain(2, RUN_PAGES));
    node.eventually(|| is_unmarked() && node.count("known_runs") == 0);
    assert!(!mark.exists());
    fs::rename(&hidden, &mark).unwrap();
    node.publishes(&chain(2, RUN_PAGES), 2);
    node.eventually(|| node.count("known_runs") == 2);
    assert_eq!(node.count("breaker_openings"), 0);
    node.close();
}

#[test]
fn a_run_that_is_published_during_a_listing_stays_known() {
    let remote = Watched::default();
    let gate = remote.gate.lock().unwrap();
    let node = Node::with(Box::new(remote.clone()), |options| {
        listed_once(options);
        // Its pages are written before the last attempt.
        options.delay = Duration::from_millis(200);
    });
    // The listing has begun, perhaps, and does not show what follows.
    std::thread::sleep(Duration::from_millis(20));
    node.put(&chain(1, RUN_PAGES));
    node.eventually(|| node.count("known_runs") == 1);
    drop(gate);
    node.eventually(|| node.count("listings") == 1);
    assert_eq!(node.count("known_runs"), 1);
    node.close();
}

#[test]
fn a_fetch_that_ends_at_its_deadline_lowers_the_speed() {
    let pages = chain(1, 2 * RUN_PAGES);
    let remote = Watched::with("model", &pages);
    let node = Node::with(Box::new(remote.clone()), listed_once);
    node.eventually(|| node.count("speed_bytes_per_s") > 0);
    let speed = node.count("speed_bytes_per_s");
    *remote.slow.lock().unwrap() = PATIENCE;
    let found = node.store.longest_prefix(node.id, &pages[..RUN_PAGES]);
    assert_eq!(found, RUN_PAGES);
    node.eventually(|| node.count("failed_fetches") == 1);
    assert!(node.count("speed_bytes_per_s") < speed);
    node.close();
}

/// One slow fetch measures a speed at which no run is worth its fetch. It is measured again with so
/// many runs.
fn is_measured_again(runs: usize, change: impl FnOnce(&mut AgentOptions)) {
    let pages = chain(1, 8 * RUN_PAGES);
    let remote = Watched::with("model", &pages);
    *remote.slow.lock().unwrap() = Duration::from_millis(300);
    let node = Node::with(Box::new(remote.clone()), change);
    node.eventually(|| node.count("speed_bytes_per_s") > 0);
    // The runs that measure it are not promised, by their own lookup or another.
    let gate = remote.gate.lock().unwrap();
    let is_promised = || node.store.longest_prefix(node.id, &pages) > 0;
    node.eventually(|| {
        assert!(!is_promised());
        remote.fetched().len() == 1 + runs
    });
    assert!(!is_promised());
    drop(gate);
    node.eventually(|| node.read(&pages) == pages.len());
    assert!(node.count("too_slow_runs") > 0);
    assert!(node.count("promised_pages") > 0);
    node.close();
}

#[test]
fn a_remote_that_is_too_slow_for_the_patience_is_measured_again() {
    is_measured_again(1, |options| options.patience = Duration::from_millis(100));
}

#[test]
fn a_remote_that_is_slower_than_the_engine_is_measured_again() {
    // A run in 0.15 s. Many at once may be faster.
    let tokens = 16.0 * RUN_PAGES as f64;
    is_measured_again(4, |options| {
        options.prefill_rate = Some(tokens / 0.15);
        options.connections = 4;
    });
}

#[test]
fn a_remote_that_does_not_answer_costs_a_read_its_deadline_and_is_left_alone() {
    let pages = chain(1, RUN_PAGES);
    let remote = Watched::with("model", &pages);
    let node = Node::with(Box::new(remote.clone()), listed_once);
    node.eventually(|| node.count("speed_bytes_per_s") > 0);
    let stored = chain(2, RUN_PAGES);
    node.put(&stored);
    *remote.fails.lock().unwrap() = Some(RemoteError::Deadline);
    // Each lookup begins fetches, until the failures are enough.
    node.eventually(|| {
        assert_eq!(node.read(&pages), 0);
        node.count("breaker_openings") == 1
    });
    assert_eq!(node.store.longest_prefix(node.id, &pages), 0);
    let state = node.agent.report().state;
    assert!(state.contains("no answer by the deadline"), "{state}");
    assert_eq!(node.read(&stored), RUN_PAGES);
    node.close();
}

#[test]
fn the_use_of_a_run_is_marked_once() {
    let pages = chain(1, PAGES);
    let remote = Watched::with("model", &pages);
    let node = Node::new(Box::new(remote.clone()));
    node.eventually(|| node.read(&pages) == PAGES && node.count("touched_runs") == 2);
    let own = chain(2, RUN_PAGES);
    node.put(&own);
    node.publishes(&own, 1);
    for _ in 0..10 {
        assert_eq!(node.read(&pages) + node.read(&own), PAGES + RUN_PAGES);
    }
    let mut touched = remote.touched.lock().unwrap().clone();
    touched.sort_unstable();
    let mut expected = [RUN_PAGES - 1, PAGES - 1].map(|last| names("model").name(&pages[last]));
    expected.sort_unstable();
    assert_eq!(touched, expected);
    node.close();
}

#[test]
fn a_node_without_a_budget_for_objects_marks_no_use() {
    let pages = chain(1, PAGES);
    let remote = Watched::with("model", &pages);
    let node = Node::within(0, Box::new(remote.clone()));
    node.eventually(|| node.read(&pages) == PAGES);
    assert_eq!(node.read(&pages), PAGES);
    node.close();
    assert!(remote.touched.lock().unwrap().is_empty());
}

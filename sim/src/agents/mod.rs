//! Two nodes, each with a store over an agent of `larder-remote`, and one remote beneath both.
//!
//! The engine and the agents that ship run with all their threads in one world. Callers look up,
//! read and put pages as an inference engine does. Meanwhile the remote fails, lies, delays and
//! loses, and checks each request. A process is stopped, an agent is switched off, pages are
//! deleted or evicted. At the end the remote works again, and each run must have an end.
//!
//! A module imports only the modules below it:
//!
//! | module | content |
//! |---|---|
//! | `node` | a store and its agent: the calls, and the checks of the end |
//! | `remote` | the remote, and the checks of each request |

mod node;
mod remote;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use larder_engine::format::{Namespace, PageKey, PageShape};
use larder_remote::{Keyring, RunName, RunNames, SealKey, Trust};
use larder_sim_runtime::dice::{Dice, mix};
use larder_sim_runtime::sync::Mutex;
use larder_sim_runtime::time::Instant;
use larder_sim_runtime::{Machine, Odds, Process, Setup, Step, World, note, thread};

use crate::classes::Tally;
use crate::processes::plan::Plan;
use crate::totals::Totals;
use crate::world::{Journal, Recorded};
use node::Node;
use remote::{Mood, Service};

const NODES: usize = 2;
const CHAINS: usize = 3;
const RUNS: usize = 24;
const RUN_PAGES: usize = 4;
const PAGES: usize = RUNS * RUN_PAGES;

/// Bytes of a page without its padding.
const PAGE: usize = 300;

/// Longest time of one request.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Virtual time after which a run counts as hanging.
const RUN_LIMIT: Duration = Duration::from_hours(6);

fn namespace() -> Namespace {
    let shape = PageShape::new(&[PAGE as u32]).expect("a shape");
    let builder = Namespace::builder("model", "", 16, shape);
    builder.build().expect("a namespace")
}

fn trust(fill: u8) -> Trust {
    let key = SealKey::new(&[fill; 32]).expect("memory for keys");
    Trust::Sealed(Keyring::new(key, None))
}

/// Page `at` of a chain.
fn key(chain: usize, at: usize) -> PageKey {
    let mut bytes = [7; 32];
    bytes[..8].copy_from_slice(&(chain * PAGES + at + 1).to_le_bytes());
    PageKey::from_bytes(bytes)
}

/// The chain of a page, and its place there.
fn place_of(key: &PageKey) -> (usize, usize) {
    let (number, _) = key.as_bytes().split_first_chunk::<8>().expect("a key");
    let number = usize::from_le_bytes(*number) - 1;
    (number / PAGES, number % PAGES)
}

/// The bytes of a page.
fn content(key: &PageKey) -> [u8; PAGE] {
    std::array::from_fn(|at| key.as_bytes()[at % 32] | 1)
}

fn name(chain: usize, run: usize) -> RunName {
    names().name(&key(chain, last_at(run)))
}

/// The place of the last page of a run in its chain.
fn last_at(run: usize) -> usize {
    (run + 1) * RUN_PAGES - 1
}

/// The last page of a run.
fn last_page(name: &RunName) -> PageKey {
    let (chain, run) = run_of(name);
    key(chain, last_at(run))
}

fn names() -> RunNames {
    RunNames::of(&trust(1), namespace().fingerprint())
}

/// The chain and the number of a run.
fn run_of(name: &RunName) -> (usize, usize) {
    let names = names();
    let all = (0..CHAINS).flat_map(|chain| (0..RUNS).map(move |run| (chain, run)));
    let mut found = all.filter(|(chain, run)| names.name(&key(*chain, last_at(*run))) == *name);
    found.next().expect("a run of the simulation")
}

/// Changes the remote and stops processes until all calls are over. Then the remote works.
fn strike(service: &Mutex<Service>, nodes: &[Process], mut dice: Dice) {
    let most = dice.pick(&[2_000, 10_000, 30_000]);
    while service.lock().calling > 0 {
        let stopped = {
            let mut service = service.lock();
            let called = service.called.clone();
            called.wait_for(&mut service, Duration::from_millis(dice.between(0, most)));
            service.to_stop.take()
        };
        let what = if stopped.is_some() {
            99
        } else {
            dice.below(100)
        };
        match what {
            0..45 => {
                let bad = [Mood::Failing, Mood::Slow, Mood::Lying, Mood::Denied];
                let is_fine = dice.chance(0.5);
                let mood = if is_fine { Mood::Fine } else { dice.pick(&bad) };
                note(|| format!("the remote is {mood:?}"));
                service.lock().mood = mood;
            }
            45..65 => service.lock().lose(),
            65..70 => {
                let service = &mut *service.lock();
                service.is_marked = !service.is_marked;
            }
            _ => {
                let node = stopped.unwrap_or(dice.below(NODES));
                note(|| format!("node {node} is stopped"));
                nodes[node].stop();
                thread::sleep(Duration::from_millis(dice.between(50, 800)));
                let service = &mut *service.lock();
                service.facts[node].resumed = Some(Instant::now());
                service.changes += 1;
                nodes[node].resume();
                continue;
            }
        }
        service.lock().change();
    }
    let service = &mut *service.lock();
    (service.mood, service.is_marked, service.is_calm) = (Mood::Fine, true, true);
    service.change();
}

/// Plays a seed. Returns a digest of all results, and counts.
///
/// # Panics
/// If a promise is broken.
pub fn play(seed: u64, journal: Option<Journal>) -> (u64, Totals, Tally) {
    let mut dice = Dice::new(seed);
    let setup = Setup {
        seed: dice.between(0, u64::MAX),
        switch_one_in: dice.pick(&[4, 16, 100]),
        ..Setup::default()
    };
    let world = World::new(setup);
    let odds = Odds {
        transfer: Duration::from_micros(dice.pick(&[50, 300])),
        ..Odds::default()
    };
    let machine = Recorded::new(Machine::new(dice.fork(), odds, journal.is_some()), journal);
    let service = Arc::new(Mutex::new(Service::new(dice.fork())));
    let nodes = [0; NODES].map(|_| world.process("a node"));
    let mut mains = Vec::new();
    for (at, process) in nodes.into_iter().enumerate() {
        let mut plan = Plan::draw(&mut dice);
        for (number, volume) in plan.volumes.iter_mut().enumerate() {
            *volume = format!("/node{at}-{number}").into();
        }
        if !plan.is_tight {
            // Room for all pages, and for holes.
            (plan.segment_blocks, plan.segments) = (48, 60);
        }
        plan.create(&machine);
        let (service, mut dice) = (service.clone(), dice.fork());
        mains.push(world.spawn(process, "main", move || {
            let node = Node::open(&service, at, &plan);
            node.call_all(&mut dice);
            service.lock().calling -= 1;
            while !service.lock().is_calm {
                thread::sleep(Duration::from_secs(1));
            }
            node.end(&mut dice);
        }));
    }
    world.spawn(world.process("faults"), "faults", {
        let (service, dice) = (service.clone(), dice.fork());
        move || strike(&service, &nodes, dice)
    });
    let begun = world.now();
    while !mains.iter().all(thread::JoinHandle::is_finished) {
        machine.settle();
        let is_stuck = world.step() == Step::Stuck;
        let hangs = is_stuck || world.now() - begun > RUN_LIMIT;
        assert!(!hangs, "a run hangs:\n{}", world.report());
    }
    let service = &mut *service.lock();
    service.totals.steps = world.steps();
    let digest = mix(service.digest, world.steps());
    (digest, service.totals, Tally::default())
}

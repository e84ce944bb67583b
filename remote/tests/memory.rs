//! The memory of puts goes from owner to owner, in a file beside the store.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use common::member::{Home, RUN_PAGES, eventually, files, put};
use common::node::options;
use common::{chain, namespace};
use larder_core::grants::Ask;
use larder_engine::{NamespaceId, OpenOptions, PageStore, Store};
use larder_format::PageKey;
use larder_remote::agent::{Admission, Agent, AgentOptions};
use larder_remote::dir::Dir;
use larder_store::beneath::Beneath;

/// Head of the file of a remote with keys, and a page in it. Both in bytes.
const HEAD: u64 = 136;
const PAGE: u64 = 84;

/// A process of a node with one agent, which publishes runs that are used again.
struct Process {
    agent: Arc<Agent>,
    store: Arc<Store>,
    id: NamespaceId,
}

impl Process {
    fn of(home: &Home, keeps_ownership: bool) -> Process {
        let agent = Agent::new(
            Box::new(Dir::new(home.remote.clone())),
            AgentOptions {
                admission: Admission::SecondTouch,
                refresh: Duration::from_millis(1),
                timeout: Duration::from_secs(60),
                ..options()
            },
        );
        let mut over = OpenOptions::default().over(agent.clone());
        over.keeps_ownership = keeps_ownership;
        let store = Arc::new(Store::attach(&home.store, over).unwrap());
        agent.remember_beside(&home.store, true);
        let of_agent: Arc<dyn PageStore> = store.clone();
        agent.start(&of_agent).unwrap();
        let id = store.namespace(&namespace("model")).unwrap();
        Process { agent, store, id }
    }

    fn count(&self, name: &str) -> u64 {
        self.agent.report().counts[name]
    }

    /// Uses pages that were put, until their run is published.
    fn publish(&self, home: &Home, pages: &[PageKey]) {
        eventually(|| {
            let found = self.store.longest_prefix(self.id, pages);
            found == pages.len() && files(&home.remote) == 1
        });
    }

    fn close(&self) {
        self.agent.close();
        self.store.close().unwrap();
    }
}

#[test]
fn a_former_owner_makes_no_requests_and_leaves_the_memory_to_the_next_one() {
    let home = Home::new();
    let first = Process::of(&home, false);
    eventually(|| first.count("listings") > 0);
    let pages = chain(1, RUN_PAGES);
    put(&first.store, first.id, &pages);
    // It asks the owner for the store.
    let second = Process::of(&home, true);
    eventually(|| second.count("listings") > 0);
    second.publish(&home, &pages);
    let (of_first, of_second) = (first.count("listings"), second.count("listings"));
    eventually(|| second.count("listings") > of_second + 20);
    // One may have been in progress.
    assert!(first.count("listings") <= of_first + 1);
    put(&second.store, second.id, &chain(2, RUN_PAGES));
    second.agent.close();
    let memory = fs::read(home.memory()).unwrap();
    assert_eq!(memory.len() as u64, HEAD + 2 * RUN_PAGES as u64 * PAGE);
    first.agent.close();
    assert_eq!(fs::read(home.memory()).unwrap(), memory);
    second.close();
    first.close();
}

/// The same agent serves the owner again, after another process.
#[test]
fn an_owner_that_comes_back_recalls_the_puts_of_the_other_one() {
    let home = Home::new();
    let first = Process::of(&home, false);
    eventually(|| first.count("listings") > 0);
    first.store.close().unwrap();
    let second = Process::of(&home, false);
    eventually(|| second.count("listings") > 0);
    let pages = chain(1, RUN_PAGES);
    put(&second.store, second.id, &pages);
    second.close();
    let listings = first.count("listings");
    let over = OpenOptions::default().over(first.agent.clone());
    let again = Store::open(&home.store, over).unwrap();
    eventually(|| first.count("listings") > listings);
    let id = again.namespace(&namespace("model")).unwrap();
    // The run is known, and the handle that the agent reads it by is closed.
    eventually(|| {
        let found = again.longest_prefix(id, &pages);
        found == RUN_PAGES && first.count("dropped_absent_runs") > 0
    });
    first.agent.close();
    again.close().unwrap();
}

/// Puts of pages of another namespace, or behind the pages of this one.
fn ask(agent: &Agent, model: &str, seed: u64, pages: u32) {
    let namespace = namespace(model);
    agent.opened(&namespace);
    let key = |at: u32| {
        let mut bytes = [0xab; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        bytes[8..12].copy_from_slice(&at.to_be_bytes());
        PageKey::from_bytes(bytes)
    };
    let asks: Vec<Ask> = (0..pages)
        .map(|at| Ask {
            key: key(at),
            parent: at.checked_sub(1).map(key),
            depth: at,
            saved: 0,
        })
        .collect();
    agent.asked(namespace.fingerprint(), &asks);
}

#[test]
fn the_newest_puts_are_remembered_however_many_namespaces_there_were() {
    const PAGES_MAX: u64 = 1 << 17;
    const PUTS: u32 = 2000;
    let home = Home::new();
    let first = Process::of(&home, false);
    eventually(|| first.count("listings") > 0);
    for at in 0..200 {
        ask(&first.agent, &format!("model {at}"), at, PUTS);
    }
    let pages = chain(1, RUN_PAGES);
    put(&first.store, first.id, &pages);
    ask(&first.agent, "model", 200, PUTS);
    first.close();
    let length = fs::metadata(home.memory()).unwrap().len();
    assert_eq!(length, HEAD + PAGES_MAX * PAGE);
    let second = Process::of(&home, false);
    eventually(|| second.count("listings") > 0);
    second.publish(&home, &pages);
    second.close();
}

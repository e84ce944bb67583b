//! Processes of several releases on one store, each as owner and as client. An option that is for
//! tests lets a process speak the protocol of another release.
#![allow(clippy::unwrap_used)]

mod common;

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use common::release::{LATER, features, later_features, next_release, set_features};
use common::{Home, MIB, Pool, chain};
use larder_engine::{OpenOptions, PageStore, Part, PutStatus, Store, StoreError, report};
use larder_store::api::speaking;
use larder_store::protocol::{Protocol, variants};
use larder_store::share::wire::{
    Failure, MAGIC, Reply, Request, parse, parse_greeting, receive, send,
};
use larder_store::volume::socket::socket_path;
use serde::Serialize;

const PATIENCE: Duration = Duration::from_secs(60);
const PARTS: [u32; 1] = [65536];

/// A release that speaks only versions that this one does not.
fn far_release() -> Protocol {
    let newest = Protocol::default().newest;
    Protocol {
        oldest: newest + 1,
        newest: newest + 2,
        features: 0,
        release: "0.9.0".to_owned(),
    }
}

fn attach_as(home: &Home, protocol: Protocol) -> Store {
    try_attach(home, protocol).unwrap()
}

fn try_attach(home: &Home, protocol: Protocol) -> Result<Store, StoreError> {
    let options = speaking(OpenOptions::default(), protocol);
    Store::attach(&home.path, options)
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "not within the time: {what}");
        std::thread::yield_now();
    }
}

/// A client made of messages alone.
struct Bare(UnixStream);

impl Bare {
    fn connect(home: &Home) -> Bare {
        let stream = UnixStream::connect(socket_path(&home.path)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Bare(stream)
    }

    fn ask(&mut self, message: &impl Serialize) -> Vec<u8> {
        send(&mut self.0, &mut Vec::new(), message).unwrap();
        let mut reply = Vec::new();
        assert!(receive(&mut self.0, &mut reply).unwrap(), "it hung up");
        reply
    }
}

#[test]
fn an_owner_and_clients_of_neighbouring_releases_share_pages_whoever_is_the_owner() {
    let (this, next) = (Protocol::default(), next_release());
    for (owners, clients) in [(&this, &next), (&next, &this)] {
        let home = Home::with_store(256 * MIB);
        let owner = attach_as(&home, owners.clone());
        let client = attach_as(&home, clients.clone());
        assert_eq!((owner.part(), client.part()), (Part::Owner, Part::Client));
        let pools = [&owner, &client].map(|store| Pool::new(store, "m", &PARTS));
        for (seed, writer) in (1..).zip(&pools) {
            let keys = chain(seed, 9);
            assert_eq!(writer.put(&keys), vec![PutStatus::Stored; 9]);
            assert!(pools.iter().all(|reader| reader.hits(&keys) == 9));
        }
        let told = report(&home.path).unwrap();
        assert_eq!(told.protocol, *owners);
        let of_next = told
            .releases
            .iter()
            .find(|of| of.release == clients.release);
        assert!(of_next.unwrap().clients >= 1, "{:?}", told.releases);
        assert!(told.releases.iter().all(|of| of.version == this.newest));
    }
}

#[test]
fn releases_without_a_common_version_refuse_each_other_by_name() {
    let (this, far) = (Protocol::default(), far_release());
    for (owners, others) in [(&this, &far), (&far, &this)] {
        let home = Home::with_store(256 * MIB);
        let owner = attach_as(&home, owners.clone());
        let refused = try_attach(&home, others.clone()).err().unwrap();
        assert!(
            matches!(refused, StoreError::NotUnderstood { .. }),
            "{refused}"
        );
        let said = refused.to_string();
        assert!(
            said.contains(&owners.release) && said.contains(&others.release),
            "{said}"
        );
        assert_eq!(owner.report().unwrap().clients, 0);
    }
}

#[test]
fn a_message_of_a_later_release_is_refused_and_the_connection_goes_on() {
    let home = Home::with_store(256 * MIB);
    let _owner = attach_as(&home, Protocol::default());
    let mut client = Bare::connect(&home);
    // A later greeting has more fields.
    let hello = Request::Hello {
        magic: MAGIC,
        protocol: next_release(),
    };
    let welcome = client.ask(&(hello, "a later field"));
    assert!(matches!(
        parse_greeting(&welcome).unwrap(),
        Reply::Welcome(_)
    ));
    let later = u32::try_from(variants::<Request<'_>>().len()).unwrap();
    for _ in 0..3 {
        let refused = client.ask(&(later, "a field"));
        assert!(matches!(
            parse(&refused).unwrap(),
            Reply::Failed(Failure::Unsupported)
        ));
        let known = client.ask(&Request::Room);
        assert!(matches!(parse(&known).unwrap(), Reply::Room { .. }));
    }
}

#[test]
fn counters_and_measures_are_sent_to_owners_that_take_them_alone() {
    let this = Protocol::default();
    let before = Protocol {
        features: 0,
        release: "0.0.9".to_owned(),
        ..this.clone()
    };
    for (owners, clients) in [(&this, &before), (&before, &this), (&this, &this)] {
        let home = Home::with_store(256 * MIB);
        let owner = attach_as(&home, owners.clone());
        let client = attach_as(&home, clients.clone());
        let pool = Pool::new(&client, "m", &PARTS);
        assert_eq!(pool.put(&chain(1, 9)), vec![PutStatus::Stored; 9]);
        assert_eq!(pool.hits(&chain(1, 9)), 9);
        let of_client = || owner.report().unwrap().processes.remove(1);
        assert_eq!(of_client().release, clients.release);
        if owners == clients {
            eventually("the counters arrive", || {
                of_client()
                    .counts
                    .is_some_and(|counts| (counts.hits, counts.pages_put) == (9, 9))
            });
        }
        // Served after every message before it.
        client.close().unwrap();
        let departed = || owner.report().unwrap().departed;
        eventually("the client has gone", || departed().clients == 1);
        let calls = u64::from(owners == clients);
        assert_eq!(departed().counts.hits, calls * 9, "{owners}, {clients}");
        let totals = owner.report().unwrap().totals;
        assert_eq!(totals.latencies.get.count(), calls, "{owners}, {clients}");
    }
}

/// The handles of a service of several processes, one of which owns the store.
struct Service<'h> {
    home: &'h Home,
    stores: Vec<Store>,
}

impl Service<'_> {
    fn owner(&self) -> Option<usize> {
        self.stores
            .iter()
            .position(|store| store.part() == Part::Owner)
    }

    /// Stops one process, and starts it with another release.
    fn change(&mut self, which: usize, protocol: &Protocol) {
        self.stores.remove(which).close().unwrap();
        eventually("the others have an owner", || {
            self.stores.iter().all(|store| store.part() != Part::Nobody) && self.owner().is_some()
        });
        self.stores
            .insert(which, attach_as(self.home, protocol.clone()));
    }

    /// Every process has all pages.
    fn check(&self, chains: u64) {
        for store in &self.stores {
            let pool = Pool::new(store, "m", &PARTS);
            for seed in 1..=chains {
                assert_eq!(pool.hits(&chain(seed, 16)), 16);
            }
        }
    }

    fn put(&self, by: usize, chains: u64) {
        let pool = Pool::new(&self.stores[by], "m", &PARTS);
        let put = pool.put(&chain(chains, 16));
        assert_eq!(put, vec![PutStatus::Stored; 16]);
    }
}

#[test]
fn a_rolling_change_of_releases_loses_no_page_owner_first_and_clients_first() {
    let (this, next) = (Protocol::default(), next_release());
    // Upward and downward.
    for (from, to) in [(&this, &next), (&next, &this)] {
        for is_owner_first in [true, false] {
            let home = Home::with_store(256 * MIB);
            let mut service = Service {
                home: &home,
                stores: (0..3).map(|_| attach_as(&home, from.clone())).collect(),
            };
            let mut chains = 1;
            service.put(0, chains);
            let mut left: Vec<usize> = (0..3).collect();
            while !left.is_empty() {
                let owner = service.owner().unwrap();
                let fits = |which: &usize| (*which == owner) == is_owner_first;
                let at = left.iter().position(fits).unwrap_or(0);
                let which = left.remove(at);
                service.change(which, to);
                service.check(chains);
                chains += 1;
                service.put(which, chains);
                service.check(chains);
            }
        }
    }
}

/// A store with a chain of pages, closed.
fn closed() -> Home {
    let home = Home::with_store(256 * MIB);
    let store = home.open();
    let pool = Pool::new(&store, "m", &PARTS);
    assert_eq!(pool.put(&chain(1, 9)), vec![PutStatus::Stored; 9]);
    store.close().unwrap();
    home
}

fn hits(store: &dyn PageStore) -> usize {
    Pool::new(store, "m", &PARTS).hits(&chain(1, 9))
}

#[test]
fn a_feature_that_may_be_ignored_is_kept_by_a_release_that_does_not_know_it() {
    let home = closed();
    set_features(&home.path, later_features(LATER, 0));
    let store = home.open();
    assert_eq!(hits(&store), 9);
    store.close().unwrap();
    let kept = features(&home.path);
    assert_eq!((kept.compatible, kept.read_only_compatible), (LATER, 0));
    assert_eq!(kept.names.to_string(), "tree");
    assert_eq!(kept.release.to_string(), env!("CARGO_PKG_VERSION"));
}

#[test]
fn a_feature_that_writers_must_know_leaves_the_store_readable_and_unchanged() {
    let home = closed();
    set_features(&home.path, later_features(0, LATER));
    let before = std::fs::read(&home.path).unwrap();
    let refused = [
        Store::open(&home.path, OpenOptions::default())
            .err()
            .unwrap(),
        try_attach(&home, Protocol::default()).err().unwrap(),
    ];
    for refused in refused {
        assert!(matches!(refused, StoreError::UnknownFeatures { .. }));
        let said = refused.to_string();
        assert!(said.contains("tree") && said.contains("0.2.0"), "{said}");
    }
    let reader = home.open_with(OpenOptions::default().with(|o| o.read_only = true));
    assert_eq!(hits(&reader), 9);
    drop(reader);
    assert!(
        std::fs::read(&home.path).unwrap() == before,
        "it was changed"
    );
}

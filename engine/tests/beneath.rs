//! A place beneath a store: it learns of puts and lookups, and reads wait for pages on their way.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::{Home, MIB, Pool, chain};
use larder_core::grants::Ask;
use larder_engine::format::{Fingerprint, Namespace, PageKey};
use larder_engine::{OpenOptions, PageStore, Store};
use larder_store::beneath::{Beneath, BeneathReport};
use larder_store::share::use_beneath;

/// Counts every page as on its way, as long as it promises.
#[derive(Debug, Default)]
struct Place {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    opened: Vec<String>,
    asked: Vec<(PageKey, Option<PageKey>, u32)>,
    used: Vec<PageKey>,
    missed: Vec<PageKey>,
    is_promising: bool,
    has_begun: bool,
    is_off: bool,
    waiting: usize,
}

impl Place {
    fn promise(&self, is_promising: bool) {
        self.state.lock().unwrap().is_promising = is_promising;
        self.changed.notify_all();
    }

    fn wait_for_reader(&self) {
        let state = self.state.lock().unwrap();
        let patience = common::honest::PATIENCE;
        let nobody = |state: &mut State| state.waiting == 0;
        let waited = self.changed.wait_timeout_while(state, patience, nobody);
        assert!(!waited.unwrap().1.timed_out(), "no read waits");
    }
}

impl Beneath for Place {
    fn began(&self) {
        self.state.lock().unwrap().has_begun = true;
    }

    fn opened(&self, namespace: &Namespace) {
        let model = namespace.fields().model.clone();
        self.state.lock().unwrap().opened.push(model);
    }

    fn asked(&self, _: Fingerprint, pages: &[Ask]) {
        let pages = pages.iter().map(|page| (page.key, page.parent, page.depth));
        self.state.lock().unwrap().asked.extend(pages);
    }

    fn used(&self, _: Fingerprint, keys: &[PageKey]) {
        self.state.lock().unwrap().used.extend(keys);
    }

    fn missed(&self, _: Fingerprint, keys: &[PageKey], found: usize) -> usize {
        let mut state = self.state.lock().unwrap();
        state.missed = keys[found..].to_vec();
        let is_promising = state.is_promising && !state.is_off;
        if is_promising { keys.len() - found } else { 0 }
    }

    fn use_it(&self, is_used: bool) {
        self.state.lock().unwrap().is_off = !is_used;
    }

    fn wait(&self, _: Fingerprint, _: &[PageKey], until: Instant) {
        let mut state = self.state.lock().unwrap();
        if !state.is_promising {
            return;
        }
        state.waiting += 1;
        self.changed.notify_all();
        let left = until.saturating_duration_since(Instant::now());
        let promising = |state: &mut State| state.is_promising;
        let (mut state, _) = self
            .changed
            .wait_timeout_while(state, left, promising)
            .unwrap();
        state.waiting -= 1;
    }

    fn report(&self) -> BeneathReport {
        BeneathReport {
            place: "a test".to_owned(),
            ..BeneathReport::default()
        }
    }
}

/// An owner over a place, and a client.
fn sharing(home: &Home) -> (Arc<Place>, Store, Store) {
    let place = Arc::new(Place::default());
    let over = OpenOptions::default().over(place.clone());
    let owner = Store::attach(&home.path, over).unwrap();
    let client = Store::attach(&home.path, OpenOptions::default()).unwrap();
    (place, owner, client)
}

#[test]
fn a_place_learns_of_the_puts_and_lookups_of_all_processes() {
    let home = Home::with_store(128 * MIB);
    let (place, owner, client) = sharing(&home);
    let keys = chain(1, 4);
    Pool::new(&client, "m", &[65536]).put(&keys[..2]);
    let owned = Pool::new(&owner, "m", &[65536]);
    assert_eq!(owned.store.longest_prefix(owned.id, &keys), 2);
    client.touch(
        Pool::new(&client, "m", &[65536]).id,
        &keys[..1],
        Default::default(),
    );
    // A message without a reply: the next one comes after it.
    assert_eq!(
        client.contains(Pool::new(&client, "m", &[65536]).id, &keys),
        [true, true, false, false]
    );
    {
        let state = place.state.lock().unwrap();
        assert!(state.has_begun);
        assert!(state.opened.iter().all(|model| model == "m") && !state.opened.is_empty());
        assert_eq!(state.asked[0], (keys[0], None, 0));
        assert_eq!(state.asked[1], (keys[1], Some(keys[0]), 1));
        assert_eq!(state.used, [keys[0], keys[1], keys[0], keys[0], keys[1]]);
        assert_eq!(state.missed, keys[2..]);
    }
    let report = larder_engine::report(&home.path).unwrap();
    assert_eq!(report.beneath.unwrap().place, "a test");
    client.close().unwrap();
    owner.close().unwrap();
}

/// Reads pages that arrive while the read waits.
fn arrives(reader: &Store, writer: &Store, place: &Place, seed: u64) {
    let keys = chain(seed, 4);
    let (reader, writer) = (
        Pool::new(reader, "m", &[65536]),
        Pool::new(writer, "m", &[65536]),
    );
    place.promise(true);
    assert_eq!(reader.store.longest_prefix(reader.id, &keys), 4);
    thread::scope(|scope| {
        scope.spawn(|| {
            place.wait_for_reader();
            writer.put(&keys);
            place.promise(false);
        });
        assert_eq!(reader.hits(&keys), 4);
    });
}

#[test]
fn a_read_waits_for_pages_on_their_way_in_owner_and_client() {
    let home = Home::with_store(128 * MIB);
    let (place, owner, client) = sharing(&home);
    arrives(&owner, &owner, &place, 1);
    arrives(&client, &owner, &place, 11);
    client.close().unwrap();
    owner.close().unwrap();
}

#[test]
fn a_read_leaves_at_its_deadline() {
    let home = Home::with_store(128 * MIB);
    let (place, owner, client) = sharing(&home);
    for store in [&owner, &client] {
        place.promise(true);
        let pool = Pool::new(store, "m", &[65536]);
        let begin = Instant::now();
        let deadline = begin + Duration::from_millis(50);
        let statuses = pool.get_until(&chain(1, 2), Some(deadline));
        assert!(!statuses.iter().any(|status| status.is_hit()));
        // A message states the time in whole milliseconds.
        assert!(begin.elapsed() >= Duration::from_millis(40));
        place.promise(false);
        assert_eq!(pool.hits(&chain(1, 2)), 0);
    }
    client.close().unwrap();
    owner.close().unwrap();
}

#[test]
fn a_client_of_an_owner_without_a_place_misses_at_once() {
    let home = Home::with_store(128 * MIB);
    let owner = Store::attach(&home.path, OpenOptions::default()).unwrap();
    let client = Store::attach(&home.path, OpenOptions::default()).unwrap();
    let pool = Pool::new(&client, "m", &[65536]);
    let begin = Instant::now();
    for _ in 0..2 {
        assert_eq!(pool.hits(&chain(1, 2)), 0);
    }
    // The longest wait for a read without a deadline.
    assert!(begin.elapsed() < Duration::from_secs(10));
    client.close().unwrap();
    owner.close().unwrap();
}

#[test]
fn an_operator_switches_a_place_off_and_on() {
    let home = Home::with_store(128 * MIB);
    let (place, owner, client) = sharing(&home);
    place.promise(true);
    let pool = Pool::new(&client, "m", &[65536]);
    let found = || pool.store.longest_prefix(pool.id, &chain(1, 2));
    assert_eq!(found(), 2);
    assert!(use_beneath(&home.path, false).unwrap());
    assert_eq!(found(), 0);
    assert!(use_beneath(&home.path, true).unwrap());
    assert_eq!(found(), 2);
    place.promise(false);
    client.close().unwrap();
    owner.close().unwrap();
    let bare = Store::attach(&home.path, OpenOptions::default()).unwrap();
    assert!(!use_beneath(&home.path, false).unwrap());
    bare.close().unwrap();
    assert!(use_beneath(&home.path, false).is_err());
}

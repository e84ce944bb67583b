//! Calls of callers who keep books of their own: counted leases, lists of pages, evictions. And
//! calls of a compaction, which has segments emptied.

use std::collections::{BTreeMap, BTreeSet};

use larder_core::core::Core;
use larder_core::index::{Leased, Place};
use larder_engine::format::PageKey;
use larder_engine::{NamespaceId, StoreError};
use larder_store::inventory::{Cursor, Inventory};

use super::calls::Caller;
use super::results::Pages;
use super::state::{Call, Phase, State};
use crate::classes::Class;
use crate::oracle::{Name, VersionId};

/// Most pages of one call that takes or returns leases.
const LEASES_MAX: usize = 16;

/// Most leases of one page.
const RETURNS_MAX: usize = 1000;

/// Share of the looks of the owner at which a compaction is called off.
const CALLED_OFF: f64 = 0.02;

/// The pages of the index, with their locations.
type Stored = BTreeMap<Name, (VersionId, Place)>;

impl State {
    fn stored(&self) -> Stored {
        let mut stored = Stored::new();
        if let Some(epoch) = &self.epoch {
            let namespaces = self.world.namespaces_by_slot(epoch);
            self.world
                .each_page(&epoch.index, &namespaces, |name, version, place, _| {
                    stored.insert(name, (version, place));
                });
        }
        stored
    }

    /// Pages that the store dropped by itself. `None` while a task holds the core.
    fn dropped(&self) -> Option<u64> {
        let c = self.try_core(Core::counters)?;
        Some(c.store.evicted + c.store.expired + c.store.damaged + c.store.unfinished)
    }

    /// Whether descriptors may be unreadable, or others than were written.
    fn may_lose_descriptors(&self) -> bool {
        let faults = &self.world.setup.faults;
        faults.spoils() || faults.misleads()
    }
}

impl Caller<'_> {
    /// Has a segment emptied. Its pages stay.
    pub fn empty_segment(&self) {
        let from = {
            let mut state = self.shared.lock();
            if !state.world.setup.compacts {
                return;
            }
            state.calls[self.own] = Call::Other;
            let segments = state.world.setup.volumes.iter().sum::<u32>() as usize;
            state.world.dice.below(segments) as u32
        };
        let Some(victim) = self.store.segment_with_pages(from) else {
            return;
        };
        let (before, starts) = {
            let mut state = self.shared.lock();
            let mut stored = state.stored();
            stored.retain(|_, (_, place)| place.segment == victim.segment);
            let starts = stored.values().map(|(_, place)| place.start);
            let mut starts: Vec<u32> = starts.collect();
            let turned = state.world.dice.below(starts.len().max(1));
            starts.rotate_left(turned);
            starts.truncate(turned);
            (stored, starts)
        };
        let goes_on = || {
            let mut state = self.shared.lock();
            state.phase == Phase::Open && !state.world.dice.chance(CALLED_OFF)
        };
        let emptied = self.store.empty_segment(&victim, starts, goes_on);
        let again = self.store.segment_with_pages(victim.segment.0);
        let is_same = again.is_some_and(|again| {
            (again.segment, again.sequence) == (victim.segment, victim.sequence)
        });
        let mut state = self.shared.lock();
        let segment = victim.segment;
        state.world.note(0, || {
            format!("{segment:?} is emptied: {emptied:?}, it had {before:?}")
        });
        match emptied {
            Ok(Some(_)) => {
                assert!(!is_same, "{segment:?} is emptied, and holds pages");
                state.world.count(Class::EmptiedForCaller);
            }
            Ok(None) | Err(StoreError::NoRoom | StoreError::Closed) => {}
            Err(error) => panic!("a segment cannot be emptied: {error}"),
        }
    }

    /// One of the calls for callers who keep books.
    pub fn keep_books(&self) {
        let which = {
            let mut state = self.shared.lock();
            if !state.world.setup.keeps_books {
                return;
            }
            state.world.dice.below(7)
        };
        match which {
            0 => self.lease(),
            1 => self.unlease(),
            2 => self.list(),
            3 => self.use_of_space(),
            4 => self.pin(),
            _ => self.ask_for_evictions(),
        }
    }

    fn lease(&self) {
        let Some(pages) = self.draw(Call::Other, LEASES_MAX) else {
            return;
        };
        let id = self.id(&pages);
        let departed = self.shared.lock().leases.departed();
        let outcomes = self.store.lease(id, &pages.keys);
        let mut state = self.shared.lock();
        let now = state.there(&pages.names);
        let is_open = state.phase == Phase::Open;
        for (at, leased) in outcomes.iter().enumerate() {
            let stays = pages.before[at].is_some() && pages.before[at] == now[at];
            assert!(
                *leased != Leased::Absent || !stays || !is_open,
                "{:?} is stored, and a lease finds it absent",
                pages.names[at]
            );
        }
        let keys = pages.keys.iter().zip(&outcomes);
        let keys: Vec<PageKey> = keys
            .filter(|(_, leased)| **leased == Leased::Yes)
            .map(|(key, _)| *key)
            .collect();
        state
            .world
            .tally
            .count_many(Class::CountedLease, keys.len() as u64);
        state.leases.lease(departed, id, &keys);
    }

    fn unlease(&self) {
        if let Some(pages) = self.draw(Call::Other, LEASES_MAX) {
            self.unlease_pages(self.id(&pages), &pages.keys);
        }
    }

    fn unlease_pages(&self, id: NamespaceId, keys: &[PageKey]) {
        self.shared.lock().leases.unlease(id, keys);
        self.store.unlease(id, keys);
    }

    /// Returns all counted leases.
    pub fn unlease_all(&self) {
        let (index, spaces) = {
            let state = self.shared.lock();
            let Some(epoch) = &state.epoch else { return };
            let oracle = &state.world.oracle;
            let keys_of = |namespace| {
                let names = oracle.names_of(namespace).into_iter();
                names.map(|name| oracle.name(name).key).collect()
            };
            let named = (0..).zip(&state.ids);
            let named = named.filter_map(|(namespace, id)| Some(((*id)?, keys_of(namespace))));
            let spaces: Vec<(NamespaceId, Vec<PageKey>)> = named.collect();
            (epoch.index.clone(), spaces)
        };
        for _ in 0..RETURNS_MAX {
            if index.counted_leases().0 == 0 {
                return;
            }
            for (id, keys) in &spaces {
                self.unlease_pages(*id, keys);
            }
        }
        panic!("pages stay leased: {:?}", index.counted_leases());
    }

    /// Lists a namespace: every page that stays where it is is in the list, and no other name.
    fn list(&self) {
        let Some(pages) = self.draw(Call::Other, 1) else {
            return;
        };
        let before = {
            let mut state = self.shared.lock();
            state.listing += 1;
            state.stored()
        };
        let keys = self.list_all(&pages);
        let mut state = self.shared.lock();
        state.listing -= 1;
        let Some(keys) = keys else { return };
        if state.phase != Phase::Open {
            return;
        }
        let now = state.stored();
        let oracle = &state.world.oracle;
        let names = oracle.names_of(pages.namespace);
        let own: BTreeSet<PageKey> = names.iter().map(|name| oracle.name(*name).key).collect();
        assert!(
            keys.is_subset(&own),
            "a list has pages of other namespaces, or of none"
        );
        if state.may_lose_descriptors() {
            return;
        }
        for name in names {
            let stays = before.contains_key(&name) && before.get(&name) == now.get(&name);
            assert!(
                !stays || keys.contains(&oracle.name(name).key),
                "{name:?} is stored, and not in the list"
            );
        }
    }

    fn list_all(&self, pages: &Pages) -> Option<BTreeSet<PageKey>> {
        let id = self.id(pages);
        let mut keys = BTreeSet::new();
        let mut cursor = Cursor::default();
        loop {
            let listing = match self.store.list(id, cursor) {
                Ok(listing) => listing,
                Err(error) => {
                    let state = self.shared.lock();
                    let may_fail = state.may_lose_descriptors() || state.phase != Phase::Open;
                    assert!(may_fail, "a list fails without a fault: {error}");
                    return None;
                }
            };
            keys.extend(listing.keys);
            match listing.next {
                Some(next) => cursor = next,
                None => return Some(keys),
            }
        }
    }

    fn use_of_space(&self) {
        let before = self.shared.lock().stored().len() as u64;
        let Ok(usage) = self.store.usage() else {
            return;
        };
        let state = self.shared.lock();
        let is_alone = state.calls.len() == 1;
        let pages: u64 = usage.iter().map(|usage| usage.pages).sum();
        let now = state.stored().len() as u64;
        assert!(
            pages == before || !is_alone || before != now,
            "{before} pages are stored, and {pages} are counted"
        );
    }

    /// Asks which pages the store has dropped. It tells of each, or that it has missed some.
    fn ask_for_evictions(&self) {
        let (since, before) = {
            let mut state = self.shared.lock();
            let before = state.dropped();
            let told = state.told.get_or_insert_default();
            if std::mem::replace(&mut told.is_asking, true) {
                return;
            }
            let next = told.next;
            state.listing += 1;
            (next, before)
        };
        let answer = self.store.evictions(since);
        let mut state = self.shared.lock();
        state.listing -= 1;
        let after = state.dropped();
        let Some(told) = &mut state.told else { return };
        told.is_asking = false;
        let Ok(answer) = answer else { return };
        state.world.note(answer.next, || {
            format!("{before:?} to {after:?} pages had left, told from {since:#x}: {answer:?}")
        });
        let may_lose = state.may_lose_descriptors() || state.world.setup.faults.fail_writes();
        let Some(told) = &mut state.told else { return };
        if since == 0 {
            told.before = before.unwrap_or(0);
            told.count = (before.is_some() && before == after).then_some(0);
        }
        // The keys of some may be lost: the numbers count them.
        let numbers = answer.next - if since == 0 { answer.next } else { since };
        told.next = answer.next;
        let is_whole = answer.pages.len() as u64 == numbers;
        if let Some(count) = &mut told.count {
            *count += numbers;
            let most = after.map(|after| after - told.before);
            // A descriptor that is lost may be looked for once more.
            let least = before
                .filter(|_| !may_lose)
                .map(|before| before - told.before);
            assert!(
                least.is_none_or(|least| *count >= least) && most.is_none_or(|most| *count <= most),
                "the store tells of {count} pages that left, and there were {least:?} to {most:?}"
            );
        }
        assert!(
            is_whole || answer.missed,
            "the store tells of {} of {numbers} pages, and of none missed",
            answer.pages.len()
        );
        assert!(
            is_whole && !answer.missed || may_lose,
            "the keys of pages that left are lost without a fault"
        );
        for (fingerprint, key) in &answer.pages {
            let spaces = &state.world.setup.namespaces;
            let namespace = spaces
                .iter()
                .position(|space| space.fingerprint() == *fingerprint);
            let is_known = namespace.is_some_and(|namespace| {
                let oracle = &state.world.oracle;
                let mut names = oracle.names_of(namespace).into_iter();
                names.any(|name| oracle.name(name).key == *key)
            });
            assert!(is_known, "the store tells of a page that was never put");
        }
        let told = answer.pages.len() as u64;
        state.world.tally.count_many(Class::EvictionTold, told);
    }
}

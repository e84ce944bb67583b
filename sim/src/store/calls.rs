//! Calls of the store, as a program makes them.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::Duration;

use larder_engine::format::PageKey;
use larder_engine::{
    GetPage, Hint, PageStore, PutOptions, PutPage, PutStatus, Recall, StoreError, SyncPolicy,
};
use larder_sim_runtime::thread;
use larder_sim_runtime::time::Instant;
use larder_store::store::LocalStore as Store;

use super::memory::{Memory, SCRIBBLE};
use super::results::Pages;
use super::state::{Call, Phase, Shared, State};
use crate::classes::Class;
use crate::oracle::{Name, VersionId};
use crate::sealed::tenant_of;

/// Longest time until a deadline, in microseconds.
const DEADLINE_US_MAX: u64 = 400;

/// Longest time until a recall, in microseconds.
const RECALL_US_MAX: u64 = 1000;

/// How often a recall is tried again while the put reads its memory.
const RECALL_AGAIN: Duration = Duration::from_micros(20);

/// Longest wait for room, in microseconds.
const ROOM_US_MAX: u64 = 20_000;

/// A deletion waits so long for room.
const RECORD_PATIENCE: Duration = Duration::from_secs(10);

/// Names a namespace. That costs nothing if it was named before.
pub fn name(shared: &Shared, store: &Store, namespace: usize) {
    let named = {
        let mut state = shared.lock();
        let State { world, epoch, .. } = &mut *state;
        // The namespace may have been forgotten meanwhile, and its new record is not durable yet.
        let slot = epoch.as_ref().and_then(|epoch| {
            let slot = epoch.slots[namespace]?;
            (epoch.index.pages_of(slot) > 0).then_some(slot)
        });
        if slot.is_none() {
            world.recorded.remove(&namespace);
        }
        world.setup.namespaces[namespace].clone()
    };
    let Ok(id) = store.namespace(&named) else {
        return;
    };
    let mut state = shared.lock();
    state.ids[namespace] = Some(id);
    if let Some(epoch) = &mut state.epoch {
        epoch.slots[namespace] = Some(id.into());
    }
}

pub struct Caller<'a> {
    pub shared: &'a Shared,
    pub store: &'a Store,
    pub own: usize,
}

impl State {
    /// A call that may end the leases of these pages begins, or has ended.
    fn use_pages(&mut self, names: &[Name], begins: bool) {
        let oracle = &self.world.oracle;
        let Some(id) = self.ids[oracle.name(names[0]).namespace] else {
            return;
        };
        let keys: Vec<PageKey> = names.iter().map(|name| oracle.name(*name).key).collect();
        match begins {
            true => self.leases.begin_use(id, &keys),
            false => self.leases.end_use(id, &keys),
        }
    }

    /// Blocks of a page of a namespace.
    fn page_blocks(&self, namespace: usize) -> u64 {
        let shape = self.world.setup.namespaces[namespace].shape();
        u64::from(shape.page_blocks())
    }
}

impl Caller<'_> {
    pub fn draw(&self, call: Call, most: usize) -> Option<Pages> {
        let drawn = {
            let mut state = self.shared.lock();
            state.calls[self.own] = call;
            let count = 1 + state.world.dice.below(most);
            state.world.draw_names(count)
        };
        let (namespace, names) = drawn;
        if self.shared.lock().ids[namespace].is_none() {
            if self.shared.lock().world.dice.chance(0.8) {
                return None;
            }
            name(self.shared, self.store, namespace);
        }
        let mut state = self.shared.lock();
        state.ids[namespace]?;
        Some(state.pages(namespace, names))
    }

    pub fn id(&self, pages: &Pages) -> larder_engine::NamespaceId {
        self.shared.lock().ids[pages.namespace].expect("a named namespace")
    }

    pub fn put(&self) {
        let most = self.shared.lock().world.setup.batch;
        let Some(pages) = self.draw(Call::Put, most) else {
            return;
        };
        let (wait, recall_after) = {
            let mut state = self.shared.lock();
            let world = &mut state.world;
            let wait = match world.dice.chance(0.2) {
                true => world.dice.between(1, ROOM_US_MAX),
                false => 0,
            };
            let recalls = world.setup.faults.recall;
            let is_recalled = world.fault(recalls);
            let after = is_recalled.then(|| world.dice.between(0, RECALL_US_MAX));
            (wait, after.map(Duration::from_micros))
        };
        self.put_pages(&pages.names, Duration::from_micros(wait), recall_after);
    }

    /// Puts pages of one namespace, and checks the statuses. Another task may recall the put.
    pub fn put_pages(
        &self,
        names: &[Name],
        wait: Duration,
        recall_after: Option<Duration>,
    ) -> Vec<PutStatus> {
        let (pages, versions, mut memory, parents) = {
            let mut state = self.shared.lock();
            let namespace = state.world.oracle.name(names[0]).namespace;
            let pages = state.pages(namespace, names.to_vec());
            let space = state.world.setup.namespaces[namespace].clone();
            let knows_parents = state.world.dice.chance(0.9);
            let is_aligned = state.world.dice.chance(0.8);
            let State { world, pool, .. } = &mut *state;
            let oracle = &mut world.oracle;
            let blocks = space.shape().page_blocks() as usize;
            let written = names.iter().map(|name| {
                let mut memory = pool.take(blocks, is_aligned);
                let version = oracle.write(*name, u64::MAX, &space, &mut memory);
                (version, memory)
            });
            let (versions, memory): (Vec<VersionId>, Vec<Memory>) = written.unzip();
            for version in &versions {
                oracle.version_mut(*version).begun_at = pages.begun;
            }
            let parents: Vec<Option<PageKey>> = names
                .iter()
                .map(|name| {
                    let parent = oracle.name(*name).parent.filter(|_| knows_parents)?;
                    Some(oracle.name(parent).key)
                })
                .collect();
            state.putting.extend(&versions);
            state.lives.putting(&versions);
            state.deletions.is_vague |= state.deletions.in_progress > 0;
            state.use_pages(names, true);
            state.world.note(pages.begun, || {
                format!("put of {names:?} as {versions:?} begins")
            });
            (pages, versions, memory, parents)
        };
        let places = memory
            .iter_mut()
            .map(|memory| (memory.as_mut_ptr().expose_provenance(), memory.len()));
        let places: Vec<(usize, usize)> = places.collect();
        let parts: Vec<[IoSlice<'_>; 1]> =
            memory.iter().map(|memory| [IoSlice::new(memory)]).collect();
        let asked: Vec<PutPage<'_>> = (0..names.len())
            .map(|at| PutPage {
                key: pages.keys[at],
                parent: parents[at],
                depth: self.shared.lock().world.oracle.name(names[at]).depth,
                parts: &parts[at],
            })
            .collect();
        let options = PutOptions::waiting(wait);
        let recall = Arc::new(Recall::default());
        let mut recalling = None;
        let statuses = match recall_after {
            None => self.store.put(self.id(&pages), &asked, options),
            Some(after) => {
                let recaller = Recaller {
                    shared: self.shared.clone(),
                    recall: recall.clone(),
                    versions: versions.clone(),
                    places,
                };
                self.shared.lock().under_recall.extend(&versions);
                let thread = thread::Builder::new().name(format!("recaller {}", self.own));
                let spawned = thread.spawn(move || recaller.recall(after));
                recalling = Some(spawned.expect("a thread"));
                self.store
                    .put_recallable(self.id(&pages), &asked, options, Some(&recall))
            }
        };
        drop(asked);
        drop(parts);
        // The memory is the caller's again.
        let mut state = self.shared.lock();
        state.pool.give_back(memory);
        for version in &versions {
            state.putting.remove(version);
            state.under_recall.remove(version);
        }
        state.lives.put(&versions);
        state.use_pages(names, false);
        state.check_put(&pages, &versions, &statuses);
        drop(state);
        // No task outlives the close.
        if let Some(recaller) = recalling {
            recaller.join().expect("the recaller ends");
        }
        statuses
    }

    pub fn get(&self) {
        if let Some(pages) = self.draw(Call::Get, 16) {
            self.get_pages(&pages);
        }
    }

    fn get_pages(&self, pages: &Pages) {
        let (blocks, is_aligned, deadline) = {
            let mut state = self.shared.lock();
            let blocks = state.world.setup.namespaces[pages.namespace]
                .shape()
                .page_blocks();
            let dice = &mut state.world.dice;
            (
                blocks as usize,
                dice.chance(0.8),
                self.draw_deadline_of(dice),
            )
        };
        let mut memory: Vec<Memory> = {
            let pool = &mut self.shared.lock().pool;
            let each = pages.names.iter();
            each.map(|_| pool.take(blocks, is_aligned)).collect()
        };
        let places = memory
            .iter()
            .map(|memory| (memory.as_ptr().addr(), memory.len()));
        let places: Vec<(usize, usize)> = places.collect();
        {
            let mut state = self.shared.lock();
            state.lent.extend(&places);
            state.use_pages(&pages.names, true);
        }
        let mut parts: Vec<[IoSliceMut<'_>; 1]> = memory
            .iter_mut()
            .map(|memory| [IoSliceMut::new(memory)])
            .collect();
        let mut asked: Vec<GetPage<'_, '_>> = pages
            .keys
            .iter()
            .zip(&mut parts)
            .map(|(key, parts)| GetPage { key: *key, parts })
            .collect();
        let statuses = self.store.get(self.id(pages), &mut asked, deadline);
        drop(asked);
        drop(parts);
        {
            let mut state = self.shared.lock();
            state.use_pages(&pages.names, false);
            // The memory is the caller's again: no read may end in it.
            state.lent.retain(|place| !places.contains(place));
            for (at, status) in statuses.iter().enumerate() {
                state.check_get(pages, at, *status, &memory[at], deadline);
            }
            state.pool.give_back(memory);
        }
    }

    fn draw_deadline_of(&self, dice: &mut larder_sim_runtime::dice::Dice) -> Option<Instant> {
        let is_limited = dice.chance(0.3);
        let micros = dice.between(0, DEADLINE_US_MAX);
        is_limited.then(|| Instant::now() + Duration::from_micros(micros))
    }

    pub fn look_up(&self) {
        if let Some(pages) = self.draw(Call::Other, 64) {
            self.look_up_pages(&pages);
        }
    }

    /// As an engine does: the pages that a lookup confirms are read.
    pub fn look_up_and_get(&self) {
        let Some(mut pages) = self.draw(Call::Other, 16) else {
            return;
        };
        self.look_up_pages(&pages);
        let names = std::mem::take(&mut pages.names);
        let pages = self.shared.lock().pages(pages.namespace, names);
        self.get_pages(&pages);
    }

    fn look_up_pages(&self, pages: &Pages) {
        let id = self.id(pages);
        let is_prefix = self.shared.lock().world.dice.chance(0.5);
        let lookup = {
            let mut state = self.shared.lock();
            let blocks = state.page_blocks(pages.namespace) * pages.keys.len() as u64;
            state.leases.begin_lookup(blocks)
        };
        let found = if is_prefix {
            let found = self.store.longest_prefix(id, &pages.keys);
            (0..pages.keys.len()).map(|at| at < found).collect()
        } else {
            self.store.contains(id, &pages.keys)
        };
        let mut state = self.shared.lock();
        let state = &mut *state;
        let keys = pages.keys.iter().zip(&found);
        let confirmed = keys.filter(|(_, found)| **found).map(|(key, _)| *key);
        let confirmed: Vec<PageKey> = confirmed.collect();
        let blocks = state.page_blocks(pages.namespace);
        state.leases.end_lookup(&lookup, id, &confirmed, blocks);
        state.check_looked_up(pages, &found, is_prefix);
    }

    pub fn touch(&self) {
        if let Some(pages) = self.draw(Call::Other, 64) {
            self.shared.lock().use_pages(&pages.names, true);
            self.store
                .touch(self.id(&pages), &pages.keys, Hint::default());
            self.shared.lock().use_pages(&pages.names, false);
        }
    }

    pub fn delete(&self) {
        let Some(pages) = self.draw(Call::Delete, 4) else {
            return;
        };
        let id = self.id(&pages);
        self.remove(&pages.names, false, || self.store.delete(id, &pages.keys));
    }

    /// Replaces the key that wraps the master key of an encrypted store.
    pub fn rotate(&self) {
        let (former, next) = {
            let mut state = self.shared.lock();
            state.calls[self.own] = Call::Other;
            let Some(sealed) = &mut state.world.sealed else {
                return;
            };
            if sealed.next.is_some() {
                return;
            }
            let (former, next) = (sealed.wrapping.clone(), sealed.begin_rotation());
            state.world.count(Class::Rotated);
            (former, next)
        };
        let rotated = self.store.rotate(&former, &next);
        let mut state = self.shared.lock();
        if let (Ok(()), Some(sealed)) = (rotated, &mut state.world.sealed) {
            sealed.rotated();
        }
    }

    /// Clears a namespace; or erases its tenant, in an encrypted store.
    pub fn clear_or_erase(&self) {
        let Some(pages) = self.draw(Call::Delete, 1) else {
            return;
        };
        let (names, tenant) = {
            let mut state = self.shared.lock();
            let world = &mut state.world;
            match world.setup.sealed && world.dice.chance(0.5) {
                true => {
                    world.count(Class::Erased);
                    let tenant = tenant_of(&world.setup.namespaces[pages.namespace]);
                    (world.names_of_tenant(&tenant), Some(tenant))
                }
                false => (world.oracle.names_of(pages.namespace), None),
            }
        };
        let id = self.id(&pages);
        self.remove(&names, tenant.is_some(), || match &tenant {
            Some(tenant) => self.store.erase_tenant(tenant),
            None => self.store.clear_namespace(id),
        });
    }

    /// Removes pages: at once for good, or as durably as the store promises.
    fn remove(
        &self,
        names: &[Name],
        for_good: bool,
        remove: impl FnOnce() -> Result<u64, StoreError>,
    ) {
        let request = {
            let mut state = self.shared.lock();
            let world = &mut state.world;
            let request = world.new_request();
            world.clock += 1;
            world.oracle.begin_delete(names, request, world.clock);
            world.note(request, || {
                format!("deletion {request} of {names:?} begins")
            });
            state.use_pages(names, true);
            state.deletions.in_progress += 1;
            state.deletions.has_erased |= for_good;
            state.deletions.is_vague |= !state.putting.is_empty();
            request
        };
        let begun = Instant::now();
        let removed = remove();
        let waited = Instant::now().duration_since(begun);
        assert!(
            !matches!(removed, Err(StoreError::NoRoom)) || waited >= RECORD_PATIENCE,
            "a deletion finds no room, and has waited {waited:?}"
        );
        let mut state = self.shared.lock();
        state
            .world
            .note(request, || format!("deletion {request} ends: {removed:?}"));
        state.deletions.in_progress -= 1;
        state.use_pages(names, false);
        if let Ok(found) = removed {
            state.deletions.found += found;
            state.world.totals.deleted += found;
            let always = for_good || state.world.setup.sync == SyncPolicy::Always;
            state.world.clock += 1;
            let now = state.world.clock;
            state.world.oracle.end_delete(request, always, now);
            if for_good {
                state.world.draw_power_soon();
            }
        } else {
            state.deletions.is_vague = true;
        }
    }

    /// Returns whether the flush succeeded.
    pub fn flush(&self) -> bool {
        let (versions, deletions) = {
            let mut state = self.shared.lock();
            state.calls[self.own] = Call::Flush;
            let State { world, epoch, .. } = &*state;
            let epoch = epoch.as_ref().expect("an open store");
            let namespaces = world.namespaces_by_slot(epoch);
            let mut versions: Vec<(Name, VersionId)> = Vec::with_capacity(epoch.index.len());
            world.each_page(&epoch.index, &namespaces, |name, version, _, _| {
                versions.push((name, version));
            });
            (versions, world.oracle.acked_deletions())
        };
        let flushed = self.store.flush();
        let mut state = self.shared.lock();
        let State {
            world,
            epoch,
            phase,
            ..
        } = &mut *state;
        let epoch = epoch.as_ref().expect("an open store");
        world.note(0, || format!("a flush ends: {flushed:?}"));
        world.totals.flushes += u64::from(flushed.is_ok());
        let may_fail = epoch.failures > 0 || *phase == Phase::Closing;
        assert!(
            flushed.is_ok() || may_fail,
            "a flush fails without a fault: {flushed:?}"
        );
        if flushed.is_err() {
            return false;
        }
        for (name, version) in versions {
            if world
                .current(epoch, name)
                .is_some_and(|(now, _)| now == version)
            {
                let known = world.oracle.version_mut(version);
                // A version that a crash cut short stays so, and was never promised.
                known.durable = !known.torn;
                known.in_place_of = None;
                world.made_durable(version);
            }
        }
        world.oracle.deletions_durable(&deletions);
        true
    }
}

/// Recalls a put, and uses its memory for something else.
struct Recaller {
    shared: Shared,
    recall: Arc<Recall>,
    versions: Vec<VersionId>,
    /// Address and length of the memory of each page.
    places: Vec<(usize, usize)>,
}

impl Recaller {
    fn recall(&self, after: Duration) {
        thread::sleep(after);
        loop {
            let mut state = self.shared.lock();
            // The call may have returned: then its memory has gone.
            let is_over = |version| !state.under_recall.contains(version);
            if self.versions.iter().any(is_over) {
                return;
            }
            if self.recall.recall() {
                state.world.count(Class::Recalled);
                state.recalled.extend(&self.versions);
                state
                    .world
                    .note(0, || format!("{:?} are recalled", self.versions));
                for (address, length) in &self.places {
                    let memory = std::ptr::with_exposed_provenance_mut::<u8>(*address);
                    // SAFETY: the put has not returned, so the memory of its pages is there. After
                    // a recall nothing reads it but the device. All tasks run on this thread.
                    unsafe { memory.write_bytes(SCRIBBLE, *length) };
                }
                return;
            }
            drop(state);
            thread::sleep(RECALL_AGAIN);
        }
    }
}

//! Callers: tasks that call the store as a program does, and the checks of what they get.
//!
//! A check compares the index right before the call with the index right after it. Other tasks run
//! in between, so a check that needs an unchanged store holds only if the page did not change.

use std::io::{IoSlice, IoSliceMut};
use std::time::Duration;

use larder_engine::format::PageKey;
use larder_engine::index::SegmentId;
use larder_engine::memory::AlignedBuf;
use larder_engine::store::LocalStore as Store;
use larder_engine::{
    GetPage, GetStatus, Hint, MissReason, PageStore, PutOptions, PutPage, PutStatus, Refusal,
    SyncPolicy,
};
use larder_sim_runtime::task;
use larder_sim_runtime::thread;
use larder_sim_runtime::time::Instant;

use super::{Call, Phase, Shared, State};
use crate::oracle::{Name, VersionId};
use crate::setup::BLOCK;
use larder_sim_runtime::medium::Content;

/// Longest pause of a caller between two calls, in microseconds.
const PAUSE_US_MAX: u64 = 300;

/// Longest time until a deadline, in microseconds.
const DEADLINE_US_MAX: u64 = 400;

/// Longest wait for room, in microseconds.
const ROOM_US_MAX: u64 = 20_000;

/// A byte that no page consists of.
const SCRIBBLE: u8 = 0xa5;

/// A page in the index: its version, and its segment.
type There = Option<(VersionId, SegmentId)>;

/// Names a share of the namespaces, at least one.
pub fn name_some(shared: &Shared, store: &Store) {
    let chosen: Vec<usize> = {
        let mut state = shared.lock();
        let world = &mut state.world;
        let count = world.setup.namespaces.len();
        let first = world.dice.below(count);
        let named = world.setup.named;
        (0..count)
            .filter(|namespace| *namespace == first || world.dice.chance(named))
            .collect()
    };
    for namespace in chosen {
        name(shared, store, namespace);
    }
}

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
        epoch.named[namespace] = true;
    }
}

/// Calls until the process is to end.
pub fn call(shared: &Shared, store: &Store, own: usize) {
    let caller = Caller { shared, store, own };
    loop {
        let (what, pause) = {
            let mut state = shared.lock();
            if state.phase != Phase::Open {
                return;
            }
            let dice = &mut state.world.dice;
            (dice.below(1000), dice.between(0, PAUSE_US_MAX))
        };
        match what {
            0..450 => caller.put(),
            450..650 => caller.get(),
            650..720 => caller.get_lent(),
            720..800 => caller.look_up(),
            800..840 => caller.touch(),
            840..880 => caller.delete(),
            880..883 => caller.clear(),
            883..930 => {
                let _ = caller.flush();
            }
            _ => {}
        }
        shared.lock().calls[own] = Call::Idle;
        thread::sleep(Duration::from_micros(pause));
    }
}

pub struct Caller<'a> {
    pub shared: &'a Shared,
    pub store: &'a Store,
    pub own: usize,
}

/// Pages of one call.
struct Pages {
    namespace: usize,
    names: Vec<Name>,
    keys: Vec<PageKey>,
    /// The index before the call.
    before: Vec<There>,
    /// The moment before the call.
    begun: u64,
    misdirected: u64,
}

impl State {
    fn there(&self, names: &[Name]) -> Vec<There> {
        let now = |name: &Name| self.world.current_at(self.epoch.as_ref()?, *name);
        names.iter().map(now).collect()
    }

    fn pages(&mut self, namespace: usize, names: Vec<Name>) -> Pages {
        self.world.clock += 1;
        Pages {
            namespace,
            keys: names
                .iter()
                .map(|name| self.world.oracle.name(*name).key)
                .collect(),
            before: self.there(&names),
            begun: self.world.clock,
            misdirected: self.misdirected,
            names,
        }
    }
}

impl Caller<'_> {
    fn draw(&self, call: Call, most: usize) -> Option<Pages> {
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

    fn id(&self, pages: &Pages) -> larder_engine::NamespaceId {
        self.shared.lock().ids[pages.namespace].expect("a named namespace")
    }

    fn put(&self) {
        let most = self.shared.lock().world.setup.batch;
        let Some(pages) = self.draw(Call::Put, most) else {
            return;
        };
        let wait = {
            let mut state = self.shared.lock();
            let dice = &mut state.world.dice;
            match dice.chance(0.2) {
                true => dice.between(1, ROOM_US_MAX),
                false => 0,
            }
        };
        self.put_pages(&pages.names, Duration::from_micros(wait));
    }

    /// Puts pages of one namespace, and checks the statuses.
    pub fn put_pages(&self, names: &[Name], wait: Duration) -> Vec<PutStatus> {
        let (pages, versions, mut memory, parents) = {
            let mut state = self.shared.lock();
            let namespace = state.world.oracle.name(names[0]).namespace;
            let pages = state.pages(namespace, names.to_vec());
            let space = state.world.setup.namespaces[namespace].clone();
            let knows_parents = state.world.dice.chance(0.9);
            let is_aligned = state.world.dice.chance(0.8);
            let oracle = &mut state.world.oracle;
            let versions: Vec<VersionId> = names
                .iter()
                .map(|name| oracle.write(*name, u64::MAX, &space))
                .collect();
            for version in &versions {
                oracle.version_mut(*version).begun_at = pages.begun;
            }
            let memory: Vec<Memory> = versions
                .iter()
                .map(|version| {
                    let payload = oracle.payload(*version);
                    let mut memory = Memory::new(payload.len(), is_aligned);
                    for (block, out) in payload.iter().zip(memory.chunks_exact_mut(BLOCK)) {
                        block.render(out);
                    }
                    memory
                })
                .collect();
            let parents: Vec<Option<PageKey>> = names
                .iter()
                .map(|name| {
                    let parent = oracle.name(*name).parent.filter(|_| knows_parents)?;
                    Some(oracle.name(parent).key)
                })
                .collect();
            state.putting.extend(&versions);
            state.world.note(pages.begun, || {
                format!("put of {names:?} as {versions:?} begins")
            });
            (pages, versions, memory, parents)
        };
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
        let statuses = self
            .store
            .put(self.id(&pages), &asked, PutOptions::waiting(wait));
        drop(asked);
        drop(parts);
        // The memory is the caller's again.
        memory.iter_mut().for_each(|memory| memory.fill(SCRIBBLE));
        let mut state = self.shared.lock();
        for version in &versions {
            state.putting.remove(version);
        }
        state.check_put(&pages, &versions, &statuses);
        statuses
    }

    fn get(&self) {
        let Some(pages) = self.draw(Call::Get, 16) else {
            return;
        };
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
        let mut memory: Vec<Memory> = pages
            .names
            .iter()
            .map(|_| Memory::new(blocks, is_aligned))
            .collect();
        let places = memory
            .iter()
            .map(|memory| (memory.as_ptr().addr(), memory.len()));
        let places: Vec<(usize, usize)> = places.collect();
        self.shared.lock().lent.extend(&places);
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
        let statuses = self.store.get(self.id(&pages), &mut asked, deadline);
        drop(asked);
        drop(parts);
        {
            let mut state = self.shared.lock();
            // The memory is the caller's again: no read may end in it.
            state.lent.retain(|place| !places.contains(place));
            for (at, status) in statuses.iter().enumerate() {
                state.check_get(&pages, at, *status, &memory[at], deadline);
            }
        }
    }

    fn draw_deadline_of(&self, dice: &mut larder_sim_runtime::dice::Dice) -> Option<Instant> {
        let is_limited = dice.chance(0.3);
        let micros = dice.between(0, DEADLINE_US_MAX);
        is_limited.then(|| task::now() + Duration::from_micros(micros))
    }

    fn get_lent(&self) {
        let Some(pages) = self.draw(Call::Get, 16) else {
            return;
        };
        let deadline = self.draw_deadline_of(&mut self.shared.lock().world.dice);
        let lent = self.store.get_lent(self.id(&pages), &pages.keys, deadline);
        let mut state = self.shared.lock();
        for (at, page) in lent.iter().enumerate() {
            match page {
                Ok(page) => {
                    let bytes = page.part(0).expect("a page has a part");
                    state.check_get(&pages, at, GetStatus::Hit, bytes, deadline);
                }
                Err(why) => state.check_get(&pages, at, GetStatus::Miss(*why), &[], deadline),
            }
        }
    }

    fn look_up(&self) {
        let Some(pages) = self.draw(Call::Other, 64) else {
            return;
        };
        let id = self.id(&pages);
        if self.shared.lock().world.dice.chance(0.5) {
            let found = self.store.longest_prefix(id, &pages.keys);
            let state = self.shared.lock();
            let now = state.there(&pages.names);
            let stays = |at: usize| pages.before[at].is_some() && pages.before[at] == now[at];
            let least = (0..now.len()).take_while(|at| stays(*at)).count();
            let is_open = state.phase == Phase::Open;
            assert!(
                found >= least || !is_open,
                "longest_prefix returns {found}, not {least}"
            );
        } else {
            let found = self.store.contains(id, &pages.keys);
            let state = self.shared.lock();
            let now = state.there(&pages.names);
            for (at, found) in found.into_iter().enumerate() {
                let stays = pages.before[at].is_some() && pages.before[at] == now[at];
                let is_open = state.phase == Phase::Open;
                assert!(
                    found || !stays || !is_open,
                    "contains misses {:?}",
                    pages.names[at]
                );
            }
        }
    }

    fn touch(&self) {
        if let Some(pages) = self.draw(Call::Other, 64) {
            self.store
                .touch(self.id(&pages), &pages.keys, Hint::default());
        }
    }

    fn delete(&self) {
        let Some(pages) = self.draw(Call::Delete, 4) else {
            return;
        };
        let id = self.id(&pages);
        self.remove(&pages.names, || self.store.delete(id, &pages.keys));
    }

    fn clear(&self) {
        let Some(pages) = self.draw(Call::Delete, 1) else {
            return;
        };
        let names = self.shared.lock().world.oracle.names_of(pages.namespace);
        let id = self.id(&pages);
        self.remove(&names, || self.store.clear_namespace(id));
    }

    fn remove(
        &self,
        names: &[Name],
        remove: impl FnOnce() -> Result<u64, larder_engine::StoreError>,
    ) {
        let request = {
            let mut state = self.shared.lock();
            let world = &mut state.world;
            let request = world.new_request();
            world.clock += 1;
            world.oracle.begin_delete(names, request.0, world.clock);
            world.note(request.0, || format!("{request:?} deletes {names:?}"));
            request
        };
        let removed = remove();
        let mut state = self.shared.lock();
        state
            .world
            .note(request.0, || format!("{request:?} ends: {removed:?}"));
        if let Ok(found) = removed {
            state.world.totals.deleted += found;
            let always = state.world.setup.sync == SyncPolicy::Always;
            state.world.clock += 1;
            let now = state.world.clock;
            state.world.oracle.end_delete(request.0, always, now);
        }
    }

    /// Returns whether the flush succeeded.
    pub fn flush(&self) -> bool {
        let (versions, deletions) = {
            let mut state = self.shared.lock();
            state.calls[self.own] = Call::Flush;
            let State { world, epoch, .. } = &*state;
            let epoch = epoch.as_ref().expect("an open store");
            let pages = world.snapshot(&epoch.index, &world.namespaces_by_slot(epoch));
            let versions: Vec<(Name, VersionId)> = pages
                .into_iter()
                .map(|(name, (version, ..))| (name, version))
                .collect();
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
            if world.current(epoch, name) == Some(version) {
                let version = world.oracle.version_mut(version);
                // A version that a crash cut short stays so, and was never promised.
                version.durable = !version.torn;
                version.in_place_of = None;
                version.dropped = false;
            }
        }
        world.oracle.deletions_durable(&deletions);
        true
    }
}

impl State {
    fn check_put(&mut self, pages: &Pages, versions: &[VersionId], statuses: &[PutStatus]) {
        let now = self.there(&pages.names);
        assert_eq!(
            statuses.len(),
            versions.len(),
            "not one status for each page"
        );
        let names = &pages.names;
        self.world.note(pages.begun, || {
            format!("put of {names:?} ends: {statuses:?}")
        });
        let always = self.world.setup.sync == SyncPolicy::Always;
        let failures = self.epoch.as_ref().map_or(0, |epoch| epoch.failures);
        for (at, status) in statuses.iter().enumerate() {
            let totals = &mut self.world.totals;
            match status {
                PutStatus::Stored => totals.stored += 1,
                PutStatus::Duplicate => totals.duplicates += 1,
                PutStatus::Refused(why) => {
                    totals.refused += 1;
                    let may_close = self.phase == Phase::Closing;
                    assert!(
                        *why != Refusal::Closed || may_close,
                        "an open store is closed"
                    );
                    assert!(
                        *why != Refusal::WrongShape,
                        "a page of the right shape is refused"
                    );
                }
                PutStatus::Failed(_) => {
                    totals.failed += 1;
                    assert!(failures > 0, "a put fails without a fault");
                }
                status => unreachable!("an unknown status: {status:?}"),
            }
            let reserved = self.world.oracle.version(versions[at]).reserved_at;
            let is_written = reserved != u64::MAX;
            assert!(
                is_written || *status != PutStatus::Stored,
                "{:?} is stored, and its bytes were never written",
                versions[at]
            );
            let Some((version, _)) = now[at].filter(|_| status.is_present()) else {
                continue;
            };
            let before = pages.before[at];
            let meant = match status {
                PutStatus::Stored => Some(versions[at]),
                _ => before.map(|(before, _)| before),
            };
            let is_it = meant == Some(version);
            if always && is_it {
                let known = self.world.oracle.version_mut(version);
                known.durable = true;
                known.in_place_of = None;
                known.dropped &= *status != PutStatus::Stored;
            }
        }
    }

    fn check_get(
        &mut self,
        pages: &Pages,
        at: usize,
        status: GetStatus,
        bytes: &[u8],
        deadline: Option<Instant>,
    ) {
        let name = pages.names[at];
        let before = pages.before[at];
        let now = self.there(&[name])[0];
        let world = &mut self.world;
        match status {
            GetStatus::Hit => {
                world.totals.hits += 1;
                let version = version_of(&world.oracle, bytes);
                let Some(version) = version else {
                    panic!("{name:?} is returned with wrong bytes: {before:?}, now {now:?}");
                };
                let known = world.oracle.version(version);
                assert!(
                    known.name == name,
                    "{name:?} is returned with bytes of {:?}",
                    known.name
                );
                let is_excused = !world.headless.is_empty();
                assert!(
                    is_excused || !world.oracle.was_dead(version, pages.begun),
                    "{version:?} of {name:?} was deleted before the get that returns it"
                );
            }
            GetStatus::Miss(why) => {
                world.totals.misses += 1;
                let may_close = self.phase == Phase::Closing;
                let is_late = deadline.is_some_and(|until| until <= task::now());
                let is_excused =
                    self.misdirected > pages.misdirected || world.oracle.has_bad_version(name);
                let fits = match why {
                    MissReason::Absent => before.is_none() || before != now,
                    MissReason::Damaged | MissReason::Unfinished | MissReason::ReadError => {
                        let is_dropped = before.is_none() || before != now;
                        assert!(
                            is_dropped || self.misdirected > pages.misdirected,
                            "{name:?} is {why:?}, and stays in the index"
                        );
                        before.is_none() || is_excused
                    }
                    MissReason::Deadline => is_late,
                    MissReason::Closed => may_close,
                    // After a jump of the clock a read in flight looks like a silent device.
                    MissReason::Hung => world.setup.faults.clock_forward > 0.0,
                    _ => false,
                };
                assert!(
                    fits,
                    "{name:?} misses as {why:?}: {before:?} before, {now:?} now"
                );
            }
            status => unreachable!("an unknown status: {status:?}"),
        }
    }
}

/// The version that these bytes are, if they are one as a whole.
fn version_of(oracle: &crate::oracle::Oracle, bytes: &[u8]) -> Option<VersionId> {
    let word = |block: &[u8]| u64::from_le_bytes(block[..8].try_into().expect("a word"));
    let contents: Vec<Content> = bytes
        .chunks_exact(BLOCK)
        .map(|block| match block[8..] == block[..BLOCK - 8] {
            true => Content::Data(word(block)),
            false => Content::Zero,
        })
        .collect();
    let version = oracle.owner(contents.first()?)?;
    oracle.is_payload(version, &contents).then_some(version)
}

/// The memory of one page: aligned, or a few bytes off.
struct Memory {
    buffer: AlignedBuf,
    from: usize,
    bytes: usize,
}

impl Memory {
    fn new(blocks: usize, is_aligned: bool) -> Memory {
        let from = if is_aligned { 0 } else { 64 };
        let whole = (blocks + 1) * BLOCK;
        Memory {
            buffer: AlignedBuf::zeroed(whole).expect("memory"),
            from,
            bytes: blocks * BLOCK,
        }
    }
}

impl std::ops::Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer[self.from..self.from + self.bytes]
    }
}

impl std::ops::DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[self.from..self.from + self.bytes]
    }
}

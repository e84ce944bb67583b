//! A process, and the calls of its threads.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{IoSlice, IoSliceMut};
use std::num::NonZeroU16;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use larder_core::core::{Core, Counters};
use larder_core::index::Leased;
use larder_engine::format::{BLOCK_BYTES, Fingerprint, PageKey};
use larder_engine::{
    GetPage, GetStatus, Hint, MissReason, NamespaceId, PageStore, Part, PutOptions, PutPage,
    PutStatus, Refusal, Store, StoreError,
};
use larder_sim_runtime::dice::{Dice, mix};
use larder_sim_runtime::time::Instant;
use larder_sim_runtime::{Process, note, thread};
use larder_store::inventory::{Cursor, Inventory};
use larder_store::share::Inside;
use larder_store::store::LocalStore;

use super::plan::{Name, Plan};
use super::promises::{Moment, Promises};
use crate::classes::{Class, Tally};
use crate::totals::Totals;

/// The state that all processes share with the driver: it is outside the simulated machine.
pub struct State {
    pub plan: Plan,
    pub dice: Dice,
    pub promises: Promises,
    pub totals: Totals,
    pub tally: Tally,
    pub digest: u64,
    /// Pages that former owners evicted. `None` once an owner went that could not be asked: killed
    /// while a task held its core, or after it had handed the store over.
    pub evicted: Option<u64>,
    /// Segments that the stores of this thread had given up before the run.
    pub given_up_before: u64,
    /// A process was stopped, killed or cut off: the owner may have given up a put.
    pub is_disturbed: bool,
    /// The pages that were encrypted: key slot, namespace, key and salt.
    pub salts: BTreeSet<(NonZeroU16, Fingerprint, PageKey, [u8; 12])>,
    /// The slots of keys that no process has any more.
    pub erased: Vec<NonZeroU16>,
}

impl State {
    /// Segments that owners have given up, with their pages, for lack of room for copies.
    pub fn given_up(&self) -> u64 {
        LocalStore::segments_given_up() - self.given_up_before
    }

    /// Whether stored pages may have been evicted. A roomy store evicts none before its owner gives
    /// up a segment: crashes seal segments part-filled, those of copies beside their victims, and
    /// may leave no free segment and no room for copies.
    pub fn may_have_evicted(&self) -> bool {
        self.plan.may_evict() || self.given_up() > 0
    }
}

pub type Shared = Rc<RefCell<State>>;

/// The call that a thread is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    Nothing,
    Put,
    Get,
    Other,
}

/// A process with a handle.
pub struct Running {
    pub process: Process,
    /// Set once it has attached.
    pub store: RefCell<Option<Rc<Store>>>,
    /// Why it could not attach.
    pub failed: RefCell<Option<StoreError>>,
    /// By thread that makes calls.
    pub doing: RefCell<Vec<Doing>>,
    pub callers_left: Cell<usize>,
    /// As its handle numbers them.
    pub namespaces: RefCell<Vec<NamespaceId>>,
    pub have_callers_begun: Cell<bool>,
    /// The number of the evictions to ask with next.
    pub evictions: Cell<u64>,
    /// How often it was stopped.
    pub stops: Cell<u64>,
    /// It has the key of an encrypted store.
    pub has_key: Cell<bool>,
    /// It has another key than that of the store.
    pub has_wrong_key: Cell<bool>,
}

impl Running {
    pub fn new(process: Process) -> Rc<Running> {
        Rc::new(Running {
            process,
            store: RefCell::default(),
            failed: RefCell::default(),
            doing: RefCell::default(),
            callers_left: Cell::new(0),
            namespaces: RefCell::default(),
            have_callers_begun: Cell::new(false),
            evictions: Cell::new(0),
            stops: Cell::new(0),
            has_key: Cell::new(true),
            has_wrong_key: Cell::new(false),
        })
    }

    pub fn part(&self) -> Option<Part> {
        self.store.borrow().as_ref().map(|store| store.part())
    }

    /// Changes of its role.
    pub fn turns(&self) -> u64 {
        self.store
            .borrow()
            .as_ref()
            .map_or(0, |store| store.turns())
    }

    /// The store of an owner.
    pub fn local(&self) -> Option<Arc<LocalStore>> {
        self.store.borrow().as_ref()?.local()
    }

    /// The counters of an owner, unless one of its tasks holds them.
    pub fn counters(&self) -> Option<Counters> {
        self.local()?.try_core(Core::counters)
    }

    pub fn is(&self, doing: Doing) -> bool {
        self.doing.borrow().contains(&doing)
    }
}

impl Drop for Running {
    /// No destructor of a handle may run: its process has gone, or nothing drives the world.
    fn drop(&mut self) {
        std::mem::forget(self.store.take());
    }
}

/// A thread that makes calls.
pub struct Caller {
    pub shared: Shared,
    pub running: Rc<Running>,
    pub store: Rc<Store>,
    pub number: usize,
}

/// The role of a process around a call.
type Role = (u64, Part);

/// A get that has just ended.
struct Got {
    from: Moment,
    had_owner: bool,
    /// The process was stopped in it.
    was_stopped: bool,
}

impl Caller {
    /// Makes calls, and ends.
    pub fn run(self) {
        let (calls, pause) = {
            let state = self.shared.borrow();
            (state.plan.calls, state.plan.pause)
        };
        let namespaces = self.namespaces();
        for _ in 0..calls {
            let longest = u64::try_from(pause.as_nanos()).unwrap_or(0);
            let pause = self.shared.borrow_mut().dice.between(0, longest);
            if pause > 0 {
                thread::sleep(Duration::from_nanos(pause));
            }
            self.call(&namespaces);
        }
        self.running
            .callers_left
            .set(self.running.callers_left.get() - 1);
    }

    /// Reads and looks up every page, and checks the results.
    pub fn check_all(&self) {
        let namespaces = self.namespaces();
        let (chains, depth) = {
            let state = self.shared.borrow();
            (state.plan.chains, state.plan.depth)
        };
        for namespace in 0..namespaces.len() {
            for chain in 0..chains {
                let name = |depth| Name {
                    namespace,
                    chain,
                    depth,
                };
                let names: Vec<Name> = (0..depth).map(name).collect();
                self.get(&namespaces, &names, None);
                self.contains(&namespaces, &names);
                self.longest_prefix(&namespaces, &names);
            }
        }
        let has_codec = self.shared.borrow().plan.codec.is_some();
        if has_codec && let Ok(usage) = self.store.usage() {
            let encoded = usage.iter().filter(|usage| usage.bytes < usage.plain_bytes);
            let tally = &mut self.shared.borrow_mut().tally;
            tally.count_many(Class::Encoded, encoded.count() as u64);
        }
    }

    fn namespaces(&self) -> Vec<NamespaceId> {
        let namespaces = self.shared.borrow().plan.namespaces.clone();
        let named = namespaces
            .iter()
            .map(|namespace| self.store.namespace(namespace));
        let named: Vec<NamespaceId> = named
            .collect::<Result<_, _>>()
            .expect("a namespace is refused");
        self.running.namespaces.borrow_mut().clone_from(&named);
        named
    }

    /// A part of a chain.
    fn draw_names(&self) -> Vec<Name> {
        let state = &mut *self.shared.borrow_mut();
        let namespace = state.dice.below(state.plan.namespaces.len());
        let chain = state.dice.below(state.plan.chains);
        // Pages without their ancestors are refused.
        let first = match state.dice.chance(0.7) {
            true => 0,
            false => state.dice.below(state.plan.depth),
        };
        let end = first + 1 + state.dice.below(state.plan.depth - first);
        let name = |depth| Name {
            namespace,
            chain,
            depth,
        };
        (first..end).map(name).collect()
    }

    fn call(&self, namespaces: &[NamespaceId]) {
        let names = self.draw_names();
        let what = self.shared.borrow_mut().dice.below(100);
        let doing = match what {
            0..38 => Doing::Put,
            38..72 => Doing::Get,
            _ => Doing::Other,
        };
        self.running.doing.borrow_mut()[self.number] = doing;
        match what {
            0..38 => self.put(namespaces, &names),
            38..72 => {
                let patience = self.shared.borrow_mut().dice.pick(&[0, 0, 0, 1, 1000]);
                let deadline =
                    (patience > 0).then(|| Instant::now() + Duration::from_millis(patience));
                self.get(namespaces, &names, deadline);
            }
            72..78 => self.contains(namespaces, &names),
            78..84 => self.longest_prefix(namespaces, &names),
            84..91 => self.delete(namespaces, &names),
            91..95 => self.flush(),
            95..96 => self.clear_or_erase(namespaces, names[0].namespace),
            96..97 => self.lease(namespaces, &names),
            97..98 => self.list(namespaces, names[0].namespace),
            98..99 => self.ask_for_evictions(namespaces.len()),
            _ => {
                let keys = self.keys(&names);
                self.store
                    .touch(namespaces[names[0].namespace], &keys, Hint::default());
            }
        }
        self.running.doing.borrow_mut()[self.number] = Doing::Nothing;
    }

    fn keys(&self, names: &[Name]) -> Vec<PageKey> {
        let state = self.shared.borrow();
        names.iter().map(|name| state.plan.key(*name)).collect()
    }

    fn index(&self, name: Name) -> usize {
        self.shared.borrow().plan.index(name)
    }

    fn role(&self) -> Role {
        (self.store.turns(), self.store.part())
    }

    /// Whether the call that has just ended had one owner all the time.
    fn had_owner(&self, before: Role) -> bool {
        before.1 != Part::Nobody && self.role() == before
    }

    fn begin(&self) -> Moment {
        self.shared.borrow_mut().promises.next_moment()
    }

    fn record(&self, word: u64) {
        let state = &mut *self.shared.borrow_mut();
        state.digest = mix(state.digest, word);
    }

    /// Memory for the parts of a page: aligned, or not.
    fn memory(&self, namespace: usize) -> Vec<Memory> {
        let state = &mut *self.shared.borrow_mut();
        let shape = *state.plan.namespaces[namespace].shape();
        let shift = state.dice.pick(&[0, 0, 8]);
        (0..shape.parts())
            .map(|part| Memory::new(shape.part_bytes(part) as usize, shift))
            .collect()
    }

    fn put(&self, namespaces: &[NamespaceId], names: &[Name]) {
        let namespace = names[0].namespace;
        let mut memory: Vec<Vec<Memory>> = names.iter().map(|_| self.memory(namespace)).collect();
        let versions: Vec<_> = {
            let state = &mut *self.shared.borrow_mut();
            let begun = names.iter().zip(&mut memory).map(|(name, parts)| {
                let version = state.promises.begin_put(state.plan.index(*name));
                let mut first = 0;
                for part in parts {
                    state.promises.fill(version, first, part.bytes());
                    first += part.bytes().len() / BLOCK_BYTES;
                }
                version
            });
            begun.collect()
        };
        let wait = Duration::from_millis(self.shared.borrow_mut().dice.pick(&[0, 0, 100, 5000]));
        let statuses = {
            let parts: Vec<Vec<IoSlice<'_>>> = memory
                .iter_mut()
                .map(|parts| {
                    parts
                        .iter_mut()
                        .map(|part| IoSlice::new(part.bytes()))
                        .collect()
                })
                .collect();
            let keys = self.keys(names);
            let parent = |name: &Name| {
                let state = self.shared.borrow();
                let depth = name.depth.checked_sub(1)?;
                Some(state.plan.key(Name { depth, ..*name }))
            };
            let pages: Vec<PutPage<'_>> = names
                .iter()
                .zip(&keys)
                .zip(&parts)
                .map(|((name, key), parts)| PutPage {
                    key: *key,
                    parent: parent(name),
                    depth: name.depth as u32,
                    parts,
                })
                .collect();
            self.store
                .put(namespaces[namespace], &pages, PutOptions::waiting(wait))
        };
        assert_eq!(statuses.len(), names.len(), "not one status for each page");
        // The caller's memory is the caller's again.
        for part in memory.iter_mut().flatten() {
            part.bytes().fill(0xee);
        }
        note(|| format!("put {names:?} as {versions:?}: {statuses:?}"));
        let state = &mut *self.shared.borrow_mut();
        state.tally.count(Class::BufferReused);
        for (version, status) in versions.into_iter().zip(&statuses) {
            state.promises.end_put(version, *status);
            let counter = match status {
                PutStatus::Stored => &mut state.totals.stored,
                PutStatus::Duplicate => &mut state.totals.duplicates,
                PutStatus::Refused(_) => &mut state.totals.refused,
                PutStatus::Failed(_) => {
                    let plan = &state.plan;
                    let may_fail =
                        state.is_disturbed || plan.has_write_errors() || plan.hands_over();
                    assert!(may_fail, "a put fails without a fault");
                    &mut state.totals.failed
                }
            };
            *counter += 1;
            state.digest = mix(state.digest, u64::from(status.is_present()));
        }
    }

    fn get(&self, namespaces: &[NamespaceId], names: &[Name], deadline: Option<Instant>) {
        let namespace = names[0].namespace;
        let mut memory: Vec<Vec<Memory>> = names.iter().map(|_| self.memory(namespace)).collect();
        let keys = self.keys(names);
        let (from, before, stops) = (self.begin(), self.role(), self.running.stops.get());
        let statuses = {
            let mut parts: Vec<Vec<IoSliceMut<'_>>> = memory
                .iter_mut()
                .map(|parts| {
                    parts
                        .iter_mut()
                        .map(|part| IoSliceMut::new(part.bytes()))
                        .collect()
                })
                .collect();
            let mut pages: Vec<GetPage<'_, '_>> = keys
                .iter()
                .zip(&mut parts)
                .map(|(key, parts)| GetPage { key: *key, parts })
                .collect();
            self.store.get(namespaces[namespace], &mut pages, deadline)
        };
        note(|| format!("get {names:?}: {statuses:?}"));
        let got = Got {
            from,
            had_owner: self.had_owner(before),
            was_stopped: self.running.stops.get() != stops,
        };
        for ((name, status), parts) in names.iter().zip(&statuses).zip(&mut memory) {
            let parts: Vec<&[u8]> = parts.iter_mut().map(|part| &*part.bytes()).collect();
            match status {
                GetStatus::Hit => self.hit(*name, from, &parts),
                GetStatus::Miss(reason) => self.miss(*name, &got, *reason),
            }
        }
    }

    fn hit(&self, name: Name, from: Moment, parts: &[&[u8]]) {
        self.record(1);
        let state = &mut *self.shared.borrow_mut();
        state.totals.hits += 1;
        state
            .promises
            .check_hit(state.plan.index(name), from, parts);
    }

    fn miss(&self, name: Name, got: &Got, reason: MissReason) {
        self.record(0);
        self.shared.borrow_mut().totals.misses += 1;
        let is_judged = match reason {
            MissReason::Absent
            | MissReason::Damaged
            | MissReason::Unfinished
            | MissReason::ReadError
            | MissReason::Stale
            | MissReason::WrongShape
            | MissReason::Undecodable
            | MissReason::Sealed => true,
            // A handle closes only in `Caller::close`, after all calls.
            MissReason::Closed => got.had_owner,
            MissReason::Deadline | MissReason::Hung => false,
        };
        if is_judged && got.had_owner {
            // A put that a kill cut short leaves an unproven record of a page that was evicted
            // before.
            use MissReason::{Absent, Closed, Unfinished};
            let is_evicted = matches!(reason, Absent | Closed | Unfinished);
            // The owner takes the pins of a stopped client back. It reads the bytes of other pages,
            // and does not find its own again if it was evicted.
            let is_bad = !is_evicted && !got.was_stopped;
            self.missed(name, got.from, is_bad, &format!("{reason:?}"));
        }
    }

    fn missed(&self, name: Name, from: Moment, is_bad: bool, why: &str) {
        let name = self.index(name);
        let state = &mut *self.shared.borrow_mut();
        let may_evict = state.may_have_evicted() && !is_bad;
        state.promises.check_miss(name, from, may_evict, why);
    }

    fn found(&self, name: Name, from: Moment) {
        let number = self.index(name);
        let is_absent = self.shared.borrow().promises.is_absent(number, from);
        assert!(!is_absent, "page {number} is found, and was deleted");
    }

    fn contains(&self, namespaces: &[NamespaceId], names: &[Name]) {
        let keys = self.keys(names);
        let (from, before) = (self.begin(), self.role());
        let found = self.store.contains(namespaces[names[0].namespace], &keys);
        note(|| format!("contains {names:?}: {found:?}"));
        assert_eq!(found.len(), names.len(), "not one answer for each page");
        let had_owner = self.had_owner(before);
        for (name, is_there) in names.iter().zip(found) {
            self.record(u64::from(is_there));
            if is_there {
                self.found(*name, from);
            } else if had_owner {
                self.missed(*name, from, false, "a lookup");
            }
        }
    }

    fn longest_prefix(&self, namespaces: &[NamespaceId], names: &[Name]) {
        let keys = self.keys(names);
        let (from, before) = (self.begin(), self.role());
        let count = self
            .store
            .longest_prefix(namespaces[names[0].namespace], &keys);
        note(|| format!("longest prefix {names:?}: {count}"));
        self.record(count as u64);
        for name in &names[..count] {
            self.found(*name, from);
        }
        if let Some(name) = names.get(count)
            && self.had_owner(before)
        {
            self.missed(*name, from, false, "the end of a prefix");
        }
    }

    fn delete(&self, namespaces: &[NamespaceId], names: &[Name]) {
        let keys = self.keys(names);
        let numbers = names.iter().map(|name| self.index(*name)).collect();
        let deletion = self.shared.borrow_mut().promises.begin_deletion(numbers);
        let outcome = self.store.delete(namespaces[names[0].namespace], &keys);
        note(|| format!("delete {names:?}: {outcome:?}"));
        self.end_deletion(deletion, outcome.is_ok());
    }

    pub(super) fn clear(&self, namespaces: &[NamespaceId], namespace: usize) {
        let deletion = {
            let state = &mut *self.shared.borrow_mut();
            let names = state.plan.names();
            let own = names.into_iter().filter(|name| name.namespace == namespace);
            let numbers = own.map(|name| state.plan.index(name)).collect();
            state.promises.begin_deletion(numbers)
        };
        let outcome = self.store.clear_namespace(namespaces[namespace]);
        note(|| format!("clear {namespace}: {outcome:?}"));
        self.end_deletion(deletion, outcome.is_ok());
    }

    pub(super) fn end_deletion(&self, deletion: usize, is_done: bool) {
        let state = &mut *self.shared.borrow_mut();
        state.totals.deleted += u64::from(is_done);
        state.promises.end_deletion(deletion, is_done);
    }

    fn flush(&self) {
        let from = self.begin();
        let outcome = self.store.flush();
        note(|| format!("flush: {outcome:?}"));
        if outcome.is_ok() {
            let state = &mut *self.shared.borrow_mut();
            state.totals.flushes += 1;
            state.promises.flushed(from);
        }
    }

    /// Leases pages, and returns some of the leases.
    fn lease(&self, namespaces: &[NamespaceId], names: &[Name]) {
        let namespace = namespaces[names[0].namespace];
        let keys = self.keys(names);
        let (from, before) = (self.begin(), self.role());
        let leased = self.store.lease(namespace, &keys);
        note(|| format!("lease {names:?}: {leased:?}"));
        assert_eq!(leased.len(), names.len(), "not one answer for each page");
        let had_owner = self.had_owner(before);
        for (name, leased) in names.iter().zip(leased) {
            match leased {
                Leased::Yes => self.found(*name, from),
                Leased::Absent if had_owner => self.missed(*name, from, false, "a lease"),
                Leased::Absent | Leased::Refused => {}
            }
        }
        let returned = self.shared.borrow_mut().dice.below(keys.len() + 1);
        self.store.unlease(namespace, &keys[..returned]);
    }

    /// The pages of a namespace in the plan, by their keys.
    fn known(&self, namespace: usize) -> BTreeMap<PageKey, Name> {
        let plan = &self.shared.borrow().plan;
        let names = plan.names().into_iter();
        let own = names.filter(|name| name.namespace == namespace);
        own.map(|name| (plan.key(name), name)).collect()
    }

    fn list(&self, namespaces: &[NamespaceId], namespace: usize) {
        let known = self.known(namespace);
        let (from, before) = (self.begin(), self.role());
        let mut cursor = Some(Cursor::default());
        while let Some(at) = cursor {
            let listing = self.store.list(namespaces[namespace], at);
            note(|| format!("list {namespace} from {at:?}: {listing:?}"));
            let Ok(listing) = listing else {
                assert!(!self.had_owner(before), "a list fails: {listing:?}");
                return;
            };
            for key in &listing.keys {
                let name = known
                    .get(key)
                    .expect("a list has a page that was never put");
                self.found(*name, from);
            }
            cursor = listing.next;
        }
    }

    fn ask_for_evictions(&self, namespaces: usize) {
        let since = self.running.evictions.get();
        let Ok(answer) = self.store.evictions(since) else {
            return;
        };
        note(|| format!("evictions since {since}: {answer:?}"));
        self.running.evictions.set(answer.next);
        for (fingerprint, key) in &answer.pages {
            let is_known = (0..namespaces).any(|namespace| {
                let is_it = {
                    let plan = &self.shared.borrow().plan;
                    plan.namespaces[namespace].fingerprint() == *fingerprint
                };
                is_it && self.known(namespace).contains_key(key)
            });
            assert!(is_known, "a page was evicted that was never put");
        }
    }

    /// A forked child of the process of this handle uses the handle.
    pub fn use_inherited(&self) {
        let key = PageKey::from_bytes([1; 32]);
        let Some(&namespace) = self.running.namespaces.borrow().first() else {
            return;
        };
        let page = PutPage {
            key,
            parent: None,
            depth: 0,
            parts: &[],
        };
        let statuses = self.store.put(namespace, &[page], PutOptions::default());
        assert_eq!(statuses, [PutStatus::Refused(Refusal::Closed)]);
        let mut page = GetPage {
            key,
            parts: &mut [],
        };
        let statuses = self
            .store
            .get(namespace, std::slice::from_mut(&mut page), None);
        assert_eq!(statuses, [GetStatus::Miss(MissReason::Closed)]);
        assert_eq!(self.store.contains(namespace, &[key]), [false]);
        assert_eq!(self.store.part(), Part::Nobody);
        for refused in [
            self.store.delete(namespace, &[key]).map(drop),
            self.store.flush(),
            self.store.close(),
        ] {
            assert!(matches!(refused, Err(StoreError::Forked)), "{refused:?}");
        }
    }
}

/// Memory of a caller, at any alignment.
struct Memory {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl Memory {
    /// `shift` bytes beyond the begin of a block.
    fn new(length: usize, shift: usize) -> Memory {
        let bytes = vec![0; length + 2 * BLOCK_BYTES];
        let start = bytes.as_ptr().align_offset(BLOCK_BYTES) + shift;
        Memory {
            bytes,
            start,
            length,
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.length]
    }
}

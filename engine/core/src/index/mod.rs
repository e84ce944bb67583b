//! The index in RAM: the stored pages and their places.
//!
//! # Ownership
//!
//! For every stored page: its name (namespace slot and 96 bits of its key), its place, its payload
//! checksum, its parent in the chain, its heat and its lease. For every segment: the number of
//! readers that hold it.
//!
//! # Guarantees
//!
//! - A page is found from the moment `publish` returns until it leaves, and always at a place that
//!   was published or relocated for that very name.
//! - A lookup finds the entry and pins its segment in one hold of the lock. The core may also pin a
//!   segment while pages are being written into it. So a segment without entries, without writes
//!   and with 0 pins is unused and stays unused.
//! - Eviction takes leaves only (a page goes after all its descendants), and no leased page: the
//!   least recently used first, or in the order of the policy of eviction. Only the core's
//!   emergency removes pages without these rules.
//! - A lookup waits for at most one step of a writer: a batch of 256 changes and one shard of the
//!   table growing, under a millisecond with ten million pages (figures in `table`). The one
//!   exception is the lowering of all heats, once in a billion calls (see [`Heat`]): 21 to 33 ms.
//! - At most 64 bytes of RAM a page at any moment of its growth, from 200,000 pages up: 32 of
//!   entry, 8 of links, 6.4 to 9.6 of table, and 8 for each leaf. 4 more where a codec makes pages
//!   smaller. RAM follows the highest number of pages there ever were.
//! - It is deterministic: no clock, and no order that depends on an address. Only the place of a
//!   name in the table is random, so that a caller who chooses keys cannot make them collide.
//!
//! # Faults it defends against
//!
//! *Two pages under one name*: 96 bits of SHA-256 collide by chance once in 10^15 stores of ten
//! million pages. The payload checksum covers the whole key and the namespace, so a collision is a
//! miss and never wrong bytes. The name is no hash over key and namespace: one block of BLAKE3
//! takes 75 to 90 ns, and a whole lookup may take 73 ns.
//!
//! *A stale view of a page*: a conclusion from bytes on disk is applied only if the page still lies
//! at the place of those bytes (`forget`, `prove`, `relocate`, `evict_chain` name the place).
//!
//! *False kinship*: a wrong or circular parent claimed by a caller can spoil the order of eviction.
//! It cannot make a circle, and cannot make a page vanish.
//!
//! # Speed
//!
//! Ten million pages, chains of 2,048, one core of an EPYC of 2024 (`examples/index_speed.rs`):
//! 2,048 keys in 85 to 105 us, 131,072 in 6 to 7 ms, an eviction in 0.3 us, a publish in 0.2 us;
//! 48.4 bytes a page, and never more than 53.2 (59.6 when every page is a leaf).
//!
//! # Limits
//!
//! It does no I/O, does not know descriptors, versions or sizes, and decides nothing: the core
//! decides which page is stored at which place. Structural changes come from one thread at a time,
//! under the core's own mutex; a second thread would only make the results of `adopt` and of the
//! sweeps wrong. Lookups come from any thread.
//!
//! # Map
//!
//! | module | content |
//! |---|---|
//! | `climb` | a preview of the order of eviction |
//! | `lease` | the pages that must not be evicted |
//! | `lookup` | the calls of readers |
//! | `erasing` | the removal of pages whose keys are erased |
//! | `evictions` | the calls of the core that make room |
//! | `aging` | the calls about the lifetimes of pages |
//! | `kept` | pages that stay until a time |
//! | `births` | the mean time of the puts of a segment's pages |
//! | `state` | the structures below, under one lock |
//! | `groups` | quotas of namespaces: leaves that stay, and groups that evict their own |
//! | `lifetimes` | namespaces whose pages are absent once their put is too long ago |
//! | `table` | from a hash to slots |
//! | `chosen` | the next page to evict, by a policy, and the facts that the policy sees |
//! | `coldness` | the next page to evict without a policy |
//! | `counted` | pages that must not be evicted: until leases are returned, or until a time |
//! | `slab` | the entries |
//! | `types` | the public types |
//! | this module | the calls of the core |

mod aging;
mod births;
mod chosen;
mod climb;
mod coldness;
mod counted;
mod erasing;
mod evictions;
mod groups;
mod kept;
mod lease;
mod lifetimes;
mod lookup;
mod slab;
mod state;
mod table;
mod types;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use larder_base::runtime::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use larder_format::{KeyPrefix, PageKey};
use larder_sync::Mutex;

use crate::policy::order::EvictionOrder;
use crate::policy::{Departure, ReclaimLines, Worth};
use chosen::Chosen;
pub use groups::{GroupLimits, Membership};

use climb::Climb;
pub use counted::{Keep, Leased};
use lease::Leases;
use slab::LIVE;
pub use slab::PageId;
use state::State;
pub use types::{
    Adoption, Departed, Heat, Lease, LiveInfo, Located, NamespaceSlot, PageView, Parent, Place,
    Publish, Published, ReadAs, SEGMENT_BLOCKS_MAX, SEGMENTS_MAX, SegmentId, Told,
};

/// Most changes made in one hold of the write lock: about 60 us.
const HOLD_CHANGES: usize = 256;

/// Pages to which an open gives one stamp: about as many as a put brings in, so that old and new
/// stamps measure alike.
const LOAD_STAMP_PAGES: usize = 32;

/// Most pages of a chain that [`Index::evict_chain`] evicts: about 30 us. To copy the first page of
/// a longer one is less than to lose it.
const CHAIN_PAGES_MAX: usize = 64;

/// Slots that a sweep checks in one hold of the read lock: 128 KiB of entries, about 10 us.
const HOLD_SLOTS: usize = 4096;

/// See the module.
#[derive(Debug)]
pub struct Index {
    state: RwLock<State>,
    /// Locked after `state` where both are held.
    leases: Mutex<Leases>,
    /// By segment: pages of it that readers hold.
    pins: Box<[AtomicU32]>,
    /// By segment: the mean time of the puts of its pages, in milliseconds since 1970; 0 if it is
    /// unknown. The core alone changes it.
    born: Box<[AtomicU64]>,
    /// The times of puts are kept for some namespaces.
    keeps_times: AtomicBool,
    /// The clock of the store at the last call that stated it, while times are kept.
    age_ms: AtomicU64,
}

impl Index {
    /// An empty index for a store of that many segments and blocks (leases cover a quarter of the
    /// blocks at most).
    ///
    /// # Panics
    ///
    /// When there are more than [`SEGMENTS_MAX`] segments: opening a volume checks that first.
    pub fn new(segments: usize, capacity_blocks: u64) -> Self {
        Self::with_clock(segments, capacity_blocks, Heat(0))
    }

    /// As `new`, with the stamps beginning at `first` (below 2^31), as after that many calls.
    ///
    /// # Panics
    ///
    /// As `new`.
    pub fn with_clock(segments: usize, capacity_blocks: u64, first: Heat) -> Self {
        assert!(
            segments <= SEGMENTS_MAX,
            "{segments} segments are more than {SEGMENTS_MAX}"
        );
        Self {
            state: RwLock::new(State::new(capacity_blocks, first)),
            leases: Mutex::new(Leases::new(capacity_blocks)),
            pins: (0..segments).map(|_| AtomicU32::new(0)).collect(),
            born: (0..segments).map(|_| AtomicU64::new(0)).collect(),
            keeps_times: AtomicBool::new(false),
            age_ms: AtomicU64::new(0),
        }
    }

    /// Evicts by a policy of the caller's instead of the least recent use. On an empty index.
    pub fn choose(&self, policy: Box<dyn EvictionOrder>) {
        self.state.write().choose(policy);
    }

    /// Evicts the least recently used page, for this reason.
    pub fn stay_with_lru(&self, reason: &str) {
        self.state.write().lru = format!("lru: {reason}");
    }

    /// The lines of reclaim of such a policy. It gets the blocks of pages that puts and reclaim
    /// have written. `None` without such a policy: the caller derives the lines from heats.
    pub fn lines(&self, put: u64, copied: u64) -> Option<ReclaimLines> {
        self.state.read().chosen()?;
        self.state.write().lines(put, copied)
    }

    // ---- the core's calls

    /// Makes room in an empty index for that many pages, so that loading them causes no growth.
    pub fn expect(&self, pages: usize) {
        self.state.write().expect(pages);
    }

    /// Makes pages visible, in order, all under one fresh stamp. Returns the result for each.
    ///
    /// A page is linked to its parent if the parent is stored when the call returns. Else it is an
    /// orphan. A key stored before gets the new place and keeps its children, its parent and a
    /// valid lease.
    ///
    /// # Panics
    ///
    /// When a place is beyond the store's geometry.
    pub fn publish(&self, batch: &[Publish]) -> Vec<Published> {
        let mut later = Vec::new();
        let published = self.publish_unadopted(batch, &mut later);
        self.adopt(&later);
        published
    }

    /// Fills an empty index with the recovered pages, in order, the oldest first. As `publish` in
    /// batches of 32, the estimated size of the original puts, except for the links. The links are
    /// made at the end, in any order, in time linear in the number of pages, whatever parents the
    /// image claims.
    ///
    /// # Panics
    ///
    /// As `publish`.
    pub fn load(&self, pages: &[Publish]) {
        self.expect(pages.len());
        let mut orphans = Vec::new();
        for batch in pages.chunks(LOAD_STAMP_PAGES) {
            self.publish_unadopted(batch, &mut orphans);
        }
        let mut state = self.state.write();
        state.adopt_all(&orphans);
        state.loaded();
    }

    /// `publish` without the links that it makes last: these are added to `later`.
    fn publish_unadopted(&self, batch: &[Publish], later: &mut Vec<Adoption>) -> Vec<Published> {
        let mut published = Vec::with_capacity(batch.len());
        let mut stamp = None;
        let mut ids = Vec::with_capacity(batch.len().min(HOLD_CHANGES));
        while published.len() < batch.len() {
            let (mut state, heat) = self.write_stamped(&mut stamp);
            // Uses before the pages that follow on them.
            state.report_uses();
            let floor = self.leases.lock().floor();
            let mut previous: Option<(NamespaceSlot, KeyPrefix, PageId)> = None;
            let rest = &batch[published.len()..];
            let hold = &rest[..rest.len().min(HOLD_CHANGES)];
            state.fetch(hold);
            for page in hold {
                self.check_place(page.place);
                let arrived = state.publish(page, previous, heat, floor, later);
                published.push(arrived.outcome);
                ids.push(arrived.id);
                previous = Some((page.namespace, page.key, arrived.id));
                // The growth of a shard takes as long as the rest of a hold: waiting readers go
                // first.
                if arrived.table_grew {
                    break;
                }
            }
            for id in ids.drain(..) {
                state.queue_if_leaf(id);
            }
        }
        published
    }

    /// Links orphans to their parents, the last pair first. Returns the number linked. So pairs in
    /// the order of their chain take a walk along one run each: the ancestors of the parent are not
    /// linked to it yet.
    ///
    /// Skipped: a pair with a page that is not stored, a child that is no orphan (any more), and a
    /// link that would make a page its own ancestor.
    pub fn adopt(&self, pairs: &[Adoption]) -> usize {
        let mut steps = usize::MAX;
        self.adopt_within(pairs, &mut steps)
    }

    /// As [`Index::adopt`], with at most `steps` steps along chains in search of circles. The steps
    /// taken are subtracted. A child whose check finds no steps left stays an orphan.
    pub fn adopt_within(&self, pairs: &[Adoption], steps: &mut usize) -> usize {
        let mut linked = 0;
        for pair in pairs.iter().rev() {
            // The search for a circle may walk along a whole chain; readers continue meanwhile.
            // Nothing changes the structure between the locks: that is for this thread alone.
            let found = self.state.read().can_adopt(pair, steps);
            if let Some((child, parent)) = found {
                self.state.write().adopt(child, parent);
                linked += 1;
            }
        }
        linked
    }

    /// Moves a page to `to` for reclaim, if it still lies at `from`.
    ///
    /// # Panics
    ///
    /// When `to` is beyond the store's geometry.
    pub fn relocate(
        &self,
        namespace: NamespaceSlot,
        key: KeyPrefix,
        from: Place,
        to: Place,
    ) -> bool {
        self.check_place(to);
        let mut state = self.state.write();
        let found = state.find_at(namespace, key, from);
        if let Some(id) = found {
            state.move_to(id, to);
        }
        found.is_some()
    }

    /// Marks the page proven, if it still lies at `place`. Returns whether it does. From any
    /// thread.
    pub fn prove(&self, namespace: NamespaceSlot, key: KeyPrefix, place: Place) -> bool {
        let mut state = self.state.write();
        let found = state.find_at(namespace, key, place);
        if let Some(id) = found {
            state.set_proven(id);
        }
        found.is_some()
    }

    /// Removes a damaged page, if it still lies at `place`. Returns whether it did. Its children
    /// stay.
    pub fn forget(&self, namespace: NamespaceSlot, key: KeyPrefix, place: Place) -> bool {
        let mut state = self.state.write();
        let found = state.find_at(namespace, key, place);
        found
            .map(|id| self.take_out(&mut state, id, Departure::Removed))
            .is_some()
    }

    /// Removes a page at any place. Returns the place. Its children stay.
    pub fn remove(&self, namespace: NamespaceSlot, key: KeyPrefix) -> Option<Place> {
        let mut state = self.state.write();
        let id = state.find(namespace, key)?;
        Some(self.take_out(&mut state, id, Departure::Removed).place)
    }

    /// Removes every page of a namespace. `gone` receives each, and may call the index.
    pub fn remove_namespace(&self, namespace: NamespaceSlot, gone: impl FnMut(Departed)) {
        let picks = |state: &State, id| is_of(state, id, namespace);
        self.sweep(0..u32::MAX, picks, gone);
    }

    /// The same one step at a time: checks some entries from `from` on, which is zero for the first
    /// step. Returns the start of the next step, or `None` after the last one.
    pub fn remove_some_of(
        &self,
        namespace: NamespaceSlot,
        from: u32,
        gone: impl FnMut(Departed),
    ) -> Option<u32> {
        self.sweep_some(from, |state, id| is_of(state, id, namespace), gone)
    }

    /// Removes every page that still lies in a segment. `gone` receives each, and may call the
    /// index.
    ///
    /// It checks every entry: for the rare segment whose descriptors cannot be read.
    pub fn forget_segment(&self, segment: SegmentId, gone: impl FnMut(Departed)) {
        let picks = |state: &State, id| state.slab().entry(id).spot.segment() == segment;
        self.sweep(0..u32::MAX, picks, gone);
    }

    /// The facts that reclaim weighs, if the page still lies at `place`.
    pub fn live(
        &self,
        namespace: NamespaceSlot,
        key: KeyPrefix,
        place: Place,
        now_ms: u64,
    ) -> Option<LiveInfo> {
        let state = self.read_reported();
        let floor = self.leases.lock().expire(now_ms);
        let id = state.find_at(namespace, key, place)?;
        let mark = state.slab().entry(id).mark();
        Some(LiveInfo {
            heat: mark.heat(),
            worth: state.worth(id),
            children: state.children(id),
            leased: mark.is_leased(floor) || state.has_counted_lease(id),
        })
    }

    /// For each segment, the worth of the page in it that eviction would take last. A page is worth
    /// as much as the worthiest of its descendants in any segment. `None` for a segment without
    /// pages.
    ///
    /// It checks every entry, and takes 8 bytes a slot meanwhile: for the rare store in which
    /// copies find no room. No page may be added, removed or linked meanwhile; heats may rise, and
    /// the scale may change: the climb begins again.
    pub fn worthiest_by_segment(&self) -> Vec<Option<Worth>> {
        loop {
            let scale = self.read_reported().scale();
            let slots = self.state.read().slab().slots();
            let mut climb = Climb::new(slots, self.pins.len());
            for first in (0..slots as u32).step_by(HOLD_SLOTS) {
                let state = self.read_reported();
                for slot in (first..slots as u32).take(HOLD_SLOTS) {
                    climb.start(&state, PageId(slot));
                }
            }
            if self.scale() == scale {
                return climb.segments();
            }
        }
    }

    // ---- counted leases

    /// Takes a counted lease of each page that is stored, of so many blocks each.
    pub fn lease(
        &self,
        namespace: NamespaceSlot,
        keys: &[PageKey],
        blocks_per_page: u32,
    ) -> Vec<Leased> {
        let mut leased = Vec::with_capacity(keys.len());
        for some in keys.chunks(HOLD_CHANGES) {
            let mut state = self.state.write();
            for key in some {
                let is_old = self.is_old(&state, namespace, state.find(namespace, key.prefix()));
                leased.push(match is_old {
                    true => Leased::Absent,
                    false => state.lease(namespace, key.prefix(), blocks_per_page),
                });
            }
        }
        leased
    }

    /// Returns one counted lease of each page that has one.
    pub fn unlease(&self, namespace: NamespaceSlot, keys: &[PageKey]) {
        for some in keys.chunks(HOLD_CHANGES) {
            let mut state = self.state.write();
            for key in some {
                state.unlease(namespace, key.prefix());
            }
        }
    }

    /// Blocks of pages under leases of any kind. A page may count for both kinds.
    pub fn leased_blocks(&self, now_ms: u64) -> u64 {
        let (_, counted, _) = self.counted_leases();
        let mut leases = self.leases.lock();
        leases.expire(now_ms);
        leases.blocks() + counted
    }

    /// Pages under counted leases, their blocks, and leases refused so far.
    pub fn counted_leases(&self) -> (u64, u64, u64) {
        self.state.read().counted_leases()
    }

    // ---- inspection

    /// Passes every page to `see`, outside the lock. A page that is added, removed or moved
    /// meanwhile may be seen in its old or new state, or not at all.
    pub fn each(&self, mut see: impl FnMut(&PageView)) {
        let mut views = Vec::new();
        let mut slots = 0..;
        loop {
            let state = self.state.read();
            let hold = slots.by_ref().take(HOLD_CHANGES).map(PageId);
            let mut is_end = false;
            for id in hold {
                is_end = id.0 as usize >= state.slab().slots();
                if is_end {
                    break;
                }
                views.extend(state.view(id));
            }
            drop(state);
            for view in views.drain(..) {
                see(&view);
            }
            if is_end {
                return;
            }
        }
    }

    /// Stored pages.
    pub fn len(&self) -> usize {
        self.state.read().pages()
    }

    /// Stored pages of one namespace.
    pub fn pages_of(&self, namespace: NamespaceSlot) -> usize {
        self.state.read().share_of(namespace).pages
    }

    /// Blocks that a codec saved of the pages of one namespace.
    pub fn saved_of(&self, namespace: NamespaceSlot) -> u64 {
        self.state.read().share_of(namespace).saved
    }

    /// Whether no page is stored.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A heat above that of every page: the heat that the next call will give.
    pub fn hottest(&self) -> Heat {
        self.state.read().next()
    }

    /// Bytes of RAM that the index has allocated, by its own count.
    pub fn ram_bytes(&self) -> usize {
        let leases = self.leases.lock().ram_bytes();
        size_of::<Self>()
            + size_of_val(&*self.pins)
            + size_of_val(&*self.born)
            + leases
            + self.state.read().ram_bytes()
    }

    /// What the chosen policy has learned, and its notes of at most so many pages.
    pub fn lessons(&self, notes_max: usize) -> (Vec<u8>, Vec<u128>) {
        let mut notes = Vec::new();
        let slots = self.read_reported().slab().slots() as u32;
        for first in (0..slots).step_by(HOLD_SLOTS) {
            let state = self.state.read();
            let Some(chosen) = state.chosen() else {
                return (Vec::new(), notes);
            };
            let hold = (first..slots).take(HOLD_SLOTS).map(PageId);
            let hold = hold.filter_map(|id| chosen.note(state.slab(), id));
            notes.extend(hold.take(notes_max - notes.len()));
        }
        let state = self.state.read();
        let lessons = state.chosen().map(Chosen::lessons);
        (lessons.unwrap_or_default(), notes)
    }

    /// The order of eviction that is followed, for people, and how often that has changed.
    pub fn order(&self) -> (String, u64) {
        self.state.read().order()
    }

    /// Names the scale of all worths. It changes with the order of the chosen policy, and without
    /// a policy when heats are lowered. Worths of two scales are not compared.
    pub fn scale(&self) -> u64 {
        self.state.read().scale()
    }

    /// Those of the chosen policy, and of the facts kept for it.
    pub fn policy_ram_bytes(&self) -> usize {
        self.state.read().chosen().map_or(0, Chosen::ram_bytes)
    }

    /// Checks the invariants, in about a microsecond a page; for tests and simulation.
    ///
    /// # Errors
    ///
    /// The violated invariant, and its slot.
    pub fn check_invariants(&self) -> Result<(), String> {
        let state = self.state.read();
        self.leases.lock().check()?;
        state.check()
    }

    // ---- inside

    fn check_place(&self, place: Place) {
        assert!(
            (place.segment.0 as usize) < self.pins.len(),
            "segment {} is beyond the store's {}",
            place.segment.0,
            self.pins.len()
        );
    }

    /// The write lock, and the call's stamp (drawn again if heats were lowered since its last
    /// hold).
    fn write_stamped(&self, stamp: &mut Option<Stamp>) -> (RwLockWriteGuard<'_, State>, Heat) {
        let mut state = self.state.write();
        loop {
            if let Some(heat) = Stamp::of(stamp, &state) {
                return (state, heat);
            }
            self.lower_heats(&mut state);
        }
    }

    /// The read lock, after the policy was given all noted uses.
    fn read_reported(&self) -> RwLockReadGuard<'_, State> {
        let state = self.state.read();
        if !state.has_unreported() {
            return state;
        }
        drop(state);
        self.state.write().report_uses();
        self.state.read()
    }

    /// Lowers all heats, so that stamps are free again, if they have run out.
    fn lower_heats(&self, state: &mut State) {
        if state.has_stamps() {
            return;
        }
        let mut leases = self.leases.lock();
        let cut = state.lower_heats(leases.floor());
        leases.lower(cut);
    }

    fn take_out(&self, state: &mut State, id: PageId, why: Departure) -> Departed {
        let mut leases = self.leases.lock();
        let (departed, mark) = state.take_out(id, leases.floor(), why);
        if mark.has_lease() {
            leases.release(mark.heat(), 1);
        }
        departed
    }

    /// One step of a sweep: see [`Index::remove_some_of`].
    fn sweep_some(
        &self,
        from: u32,
        picks: impl Fn(&State, PageId) -> bool,
        gone: impl FnMut(Departed),
    ) -> Option<u32> {
        let end = from.saturating_add(HOLD_SLOTS as u32);
        let slots = self.sweep(from..end, picks, gone);
        (end < slots).then_some(end)
    }

    /// Removes every page among some entries that `picks` accepts. Finds them under the read lock,
    /// removes them under the write lock, and reports them under no lock. Returns the total number
    /// of entries.
    fn sweep(
        &self,
        among: Range<u32>,
        picks: impl Fn(&State, PageId) -> bool,
        mut gone: impl FnMut(Departed),
    ) -> u32 {
        let is_picked =
            |state: &State, id: PageId| state.slab().entry(id).spot.has(LIVE) && picks(state, id);
        let slots = self.state.read().slab().slots() as u32;
        let mut departed = Vec::new();
        let end = among.end.min(slots);
        for first in (among.start..end).step_by(HOLD_SLOTS) {
            let hold = (first..end).take(HOLD_SLOTS).map(PageId);
            let picked: Vec<PageId> = {
                let state = self.state.read();
                hold.filter(|id| is_picked(&state, *id)).collect()
            };
            for some in picked.chunks(HOLD_CHANGES) {
                let mut state = self.state.write();
                for id in some {
                    if is_picked(&state, *id) {
                        departed.push(self.take_out(&mut state, *id, Departure::Removed));
                    }
                }
                drop(state);
                departed.drain(..).for_each(&mut gone);
            }
        }
        slots
    }
}

fn is_of(state: &State, id: PageId, namespace: NamespaceSlot) -> bool {
    state.slab().entry(id).spot.namespace() == namespace
}

/// A call's stamp, valid for one epoch of the clock.
#[derive(Debug, Clone, Copy)]
struct Stamp {
    heat: Heat,
    epoch: u64,
}

impl Stamp {
    /// The call's stamp; drawn if it has no valid one. `None` when stamps have run out.
    fn of(stamp: &mut Option<Self>, state: &State) -> Option<Heat> {
        let epoch = state.epoch();
        if let Some(known) = stamp.filter(|known| known.epoch == epoch) {
            return Some(known.heat);
        }
        let heat = state.draw()?;
        *stamp = Some(Self { heat, epoch });
        Some(heat)
    }
}

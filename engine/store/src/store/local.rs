//! The in-process catalog: a core behind one mutex.
//!
//! A command runs on its caller's thread, under the mutex. Its effects are carried out after the
//! mutex is released. So a put that has nothing to wait for costs no thread switch, and no I/O is
//! ever submitted with the core locked.

mod catalog;
mod emptying;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use larder_base::ids::NamespaceId;
use larder_base::planted;
use larder_base::runtime::{Condvar, Instant, Mutex, MutexGuard, OnceLock, thread};
use larder_base::system::processes;
use larder_core::ages::{Ages, AgesBySlot};
use larder_core::core::{Core, Effect, Fault, Io, IoId, RequestId, Victim};
use larder_core::counters::StoreCounts;
use larder_core::grants::{ReservationId, SegmentMap};
use larder_core::index::{Adoption, Index, Lease, Located};
use larder_core::status::PutStatus;
use larder_disk::{Action, Buffer, Disk, DiskError, Done, Op, Purpose, Sink};
use larder_format::{Clock, Fingerprint, Namespace, PageKey, StoreId};

use super::lifetimes::Lives;
use super::mover;
use super::notices::Notices;
use super::services::Services;
use crate::api::{OpenOptions, ReadOnlyVolume};
use crate::beneath::{Beneath, BeneathReport};
use crate::catalog::{Catalog, NamespaceShape};
use crate::curve::{Curve, CurveReport};
use crate::encoder::CodecChoice;
use crate::error::StoreError;
use crate::keys::Keys;
use crate::recovery::scan::{Bodies, Spot, read_descriptors};
use crate::spaces::{AgesOfSpaces, OTHER, SpaceAges};
use crate::traffic::Traffic;

/// How often a waiting request ticks the core.
const TICK_WHILE_WAITING: Duration = Duration::from_secs(1);

/// Most links of orphans that are passed to the core at once, and most steps along chains for all
/// orphans of one lookup.
const ADOPTED_AT_ONCE: usize = 64;
const ADOPT_STEPS_MAX: usize = 1 << 20;

/// Answers that threads wait for.
#[derive(Default)]
struct Answers {
    settled: HashMap<ReservationId, Vec<PutStatus>>,
    finished: HashMap<RequestId, Result<(), Fault>>,
    /// Times that space or write budget became available.
    room: u64,
}

/// Requests to the housekeeper thread.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub reclaim: bool,
    pub stop: bool,
    /// Lookups are to be counted for the curve.
    pub lookups: bool,
    /// When the core wants a tick, on its clock.
    pub wake_at: Option<u64>,
    /// Lifetimes may have been limited for the first time.
    pub quotas: bool,
}

pub struct Local {
    pub(super) core: Mutex<Core>,
    /// Held by the one thread that waits for the core.
    core_turn: Mutex<()>,
    pub index: Arc<Index>,
    pub disk: Arc<dyn Disk>,
    answers: Mutex<Answers>,
    answered: Condvar,
    pub(super) inbox: Mutex<Inbox>,
    pub(super) inbox_changed: Condvar,
    shapes: Mutex<Vec<Option<NamespaceShape>>>,
    store: StoreId,
    map: SegmentMap,
    lease: Duration,
    codec: CodecChoice,
    services: Services,
    /// Those of an encrypted store.
    pub(super) keys: Option<Arc<Keys>>,
    /// The beginning of the clock of the core, on the clock that goes on while the machine sleeps.
    epoch_ms: u64,
    next_request: AtomicU64,
    /// Bytes of blocks that were written before their first use.
    pub(super) prewritten: AtomicU64,
    /// Pages that lookups found, and that they did not find.
    pub(super) looked_up: [AtomicU64; 2],
    notices: Notices,
    pub(super) lives: Lives,
    /// The clock of the store at that moment.
    began_ms: u64,
    /// The ages of pages at their use.
    used: Mutex<AgesBySlot>,
    beneath: OnceLock<Arc<dyn Beneath>>,
    pub(crate) traffic: Traffic,
    pub(crate) curve: Curve,
    /// The place beneath knows that this use of the store is over.
    has_parted: AtomicBool,
    /// Weak reference to itself, for completions.
    this: Weak<Local>,
}

/// A core that panicked in the middle of a change must not decide anything more: its next
/// acknowledgement might be wrong. The store recovers from the end of the process as from any
/// crash.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        tracing::error!(
            "the store's core panicked; ending the process so that nothing wrong is acknowledged"
        );
        processes::abort();
    }
}

/// Passes the disk's answers to the core.
struct CoreSink(Weak<Local>);

impl Sink for CoreSink {
    fn done(&self, answers: Vec<Done>) {
        let Some(local) = self.0.upgrade() else {
            return;
        };
        local.with_core(|core| {
            for answer in &answers {
                core.io_done(IoId(answer.tag), answer.result);
            }
        });
    }
}

impl Local {
    pub(crate) fn new(
        core: Core,
        index: Arc<Index>,
        disk: Arc<dyn Disk>,
        map: SegmentMap,
        options: &OpenOptions,
        services: Services,
        keys: Option<Arc<Keys>>,
    ) -> Arc<Local> {
        let (store, began_ms) = (core.config().store, core.config().began_ms);
        let space = core.space_view();
        let (size_blocks, segments) = (space.usable_blocks, space.segments as usize);
        let order = options.eviction.clone().filter(|_| index.has_policy());
        let curve = Curve::new(size_blocks, order.map(|order| (order, segments)));
        Arc::new_cyclic(|this| Local {
            core: Mutex::new(core),
            core_turn: Mutex::default(),
            index,
            disk,
            answers: Mutex::default(),
            answered: Condvar::new(),
            inbox: Mutex::default(),
            inbox_changed: Condvar::new(),
            shapes: Mutex::default(),
            store,
            map,
            lease: options.lease,
            codec: options.codec,
            services,
            keys,
            epoch_ms: processes::boottime_ms(),
            next_request: AtomicU64::new(0),
            prewritten: AtomicU64::new(0),
            looked_up: Default::default(),
            notices: Notices::default(),
            lives: Lives::default(),
            began_ms,
            used: Mutex::default(),
            beneath: OnceLock::new(),
            traffic: Traffic::default(),
            curve,
            has_parted: AtomicBool::new(false),
            this: this.clone(),
        })
    }

    /// Puts the store over this place.
    pub(super) fn lie_over(&self, beneath: Arc<dyn Beneath>) {
        self.beneath.get_or_init(|| beneath).began();
    }

    /// This use of the store is over. Once: a later use may have begun in this process since.
    pub(super) fn part_from_beneath(&self) {
        if let Some(beneath) = self.beneath.get()
            && !self.has_parted.swap(true, Ordering::AcqRel)
        {
            beneath.ended();
        }
    }

    /// A namespace by its name in this store.
    pub(super) fn in_store(&self, namespace: &Namespace) -> Result<Namespace, StoreError> {
        let named = self.keys.as_ref().map(|keys| keys.named(namespace));
        let named = named.unwrap_or_else(|| Ok(namespace.plain()));
        named.map_err(|error| StoreError::Keyring {
            path: self.services.path(0),
            reason: error.to_string(),
        })
    }

    /// The place beneath the store, with the namespace's name there.
    pub(super) fn beneath(&self, id: NamespaceId) -> Option<(&Arc<dyn Beneath>, Fingerprint)> {
        let beneath = self.beneath.get()?;
        self.shape(id).map(|shape| (beneath, shape.beneath))
    }

    /// See [`LocalStore::arrive`](super::LocalStore::arrive).
    pub(crate) fn arrive(
        &self,
        namespace: NamespaceId,
        keys: &[PageKey],
        until: Instant,
    ) -> Option<bool> {
        let (beneath, fingerprint) = self.beneath(namespace)?;
        beneath.wait(fingerprint, keys, until);
        // Some may have arrived before the wait. Not by a lookup, which is reported as a use.
        let (lease, mut orphans) = (self.lease(namespace), Vec::new());
        let found = self
            .index_now()
            .contains(namespace.into(), keys, lease, &mut orphans);
        self.adopt(&orphans);
        Some(found.contains(&true))
    }

    pub(crate) fn use_beneath(&self, is_used: bool) -> bool {
        let beneath = self.beneath.get();
        beneath.inspect(|beneath| beneath.use_it(is_used)).is_some()
    }

    pub(crate) fn beneath_report(&self) -> Option<BeneathReport> {
        self.beneath.get().map(|beneath| beneath.report())
    }

    /// Milliseconds since the store was opened, the sleep of the machine included.
    pub(super) fn now_ms(&self) -> u64 {
        processes::boottime_ms().saturating_sub(self.epoch_ms)
    }

    /// The clock of the store now.
    pub(super) fn clock(&self) -> Clock {
        Clock {
            store_ms: self.began_ms.saturating_add(self.now_ms()),
            unix_ms: processes::unix_ms(),
        }
    }

    /// The index, for a call that takes old pages for absent.
    pub(super) fn index_now(&self) -> &Index {
        if self.index.keeps_times() {
            self.index
                .age_to(self.began_ms.saturating_add(self.now_ms()));
        }
        &self.index
    }

    /// Counts the ages of pages at their use.
    fn count_ages(&self, namespace: NamespaceId, found: &[Option<Located>]) {
        let now_ms = self.began_ms.saturating_add(self.now_ms());
        let segments = found.iter().flatten().map(|page| page.place.segment);
        let mut ages = Ages::default();
        for segment in segments {
            ages.record(self.index.born_ms(segment), now_ms, 1);
        }
        if ages.pages() > 0 {
            let mut used = self.used.lock();
            let of = used.of(namespace.into());
            of.combine(&ages, &mut u64::saturating_add);
        }
    }

    /// The ages of pages at their use and at their eviction, by namespace.
    pub(crate) fn ages(&self) -> AgesOfSpaces {
        let evicted = self.with_core(|core| core.evicted_ages());
        let used = self.used.lock().clone();
        let mut all = AgesOfSpaces::default();
        for (list, of) in [
            (
                &used,
                (|ages| &mut ages.used) as fn(&mut SpaceAges) -> &mut Ages,
            ),
            (&evicted, |ages| &mut ages.evicted),
        ] {
            for (slot, ages) in list.iter() {
                let name = slot.and_then(|slot| self.shape(NamespaceId(slot.0)));
                let name = name.map_or(OTHER.to_owned(), |shape| shape.fingerprint.to_string());
                of(all.entry(&name)).combine(ages, &mut u64::saturating_add);
            }
        }
        all
    }

    /// The hit rate at other sizes.
    pub(crate) fn curve_report(&self) -> CurveReport {
        let size_blocks = self.with_core(|core| core.space_view()).usable_blocks;
        self.curve.resize(size_blocks);
        let name = |id| self.shape(id).map(|shape| shape.fingerprint.to_string());
        self.curve.report(self.now_ms(), name)
    }

    /// Runs a command, then carries out its effects.
    pub fn with_core<R>(&self, command: impl FnOnce(&mut Core) -> R) -> R {
        let core = self.core.try_lock();
        self.run(core.unwrap_or_else(|| self.core_in_turn()), command)
    }

    /// The same for one of many calls: a caller that waits for the core gets it before the next
    /// one.
    pub(super) fn with_core_in_turn<R>(&self, command: impl FnOnce(&mut Core) -> R) -> R {
        self.run(self.core_in_turn(), command)
    }

    /// The same for one of many steps, after which another thread gets the processor.
    pub(super) fn with_core_by_turns<R>(&self, command: impl FnOnce(&mut Core) -> R) -> R {
        let result = self.with_core_in_turn(command);
        thread::yield_now();
        result
    }

    /// The core. One thread at a time waits for the core itself, the others for their turn. So a
    /// thread that takes the core in its turn again and again lets the others in between.
    pub(super) fn core_in_turn(&self) -> MutexGuard<'_, Core> {
        let _turn = self.core_turn.lock();
        self.core.lock()
    }

    fn run<R>(&self, mut core: MutexGuard<'_, Core>, command: impl FnOnce(&mut Core) -> R) -> R {
        let guard = AbortOnPanic;
        core.tick(self.now_ms());
        let result = command(&mut core);
        std::mem::forget(guard);
        let effects = core.take_effects();
        let wake_at = core.wakes_at();
        let counters = core.counters();
        drop(core);
        self.notices.counted(&counters);
        self.carry_out(effects, wake_at);
        result
    }

    fn carry_out(&self, effects: Vec<Effect>, wake_at: Option<u64>) {
        let mut ops = Vec::new();
        let mut answers = Vec::new();
        let mut reclaim = false;
        let mut read = None;
        let mut copies = Vec::new();
        for effect in effects {
            match effect {
                Effect::Io { id, volume, io } => ops.push(self.op(id, volume, io)),
                Effect::Reclaim => reclaim = true,
                Effect::ReadOnly(volume, error) => self.services.begin_read_only(volume, &error),
                Effect::ReadWrite(volume) => self.services.end_read_only(volume),
                Effect::Damaged(page) => self.services.tell_damaged(&page),
                Effect::ReadDescriptors(victim) => {
                    #[cfg(feature = "simulated")]
                    super::given_up::note(&victim);
                    read = Some(victim);
                }
                Effect::Copy(id, pages) => copies.push((id, pages)),
                effect => answers.push(effect),
            }
        }
        if !ops.is_empty() {
            // SAFETY: the core's writes own their buffers, its syncs have none.
            unsafe { self.disk.submit(ops) };
        }
        if !answers.is_empty() {
            self.answer(answers);
        }
        self.notify_housekeeper(reclaim, wake_at);
        if let Some(victim) = read {
            let read = read_descriptors(self.disk.as_ref(), &self.spot(&victim), &victim);
            self.with_core(|core| core.descriptors_read(read));
        }
        for (id, pages) in copies {
            let outcomes = mover::copy(self.disk.as_ref(), self.keys.as_deref(), &pages);
            self.with_core(|core| core.copied(id, &outcomes));
        }
    }

    /// Counters of the core and the prewriter.
    pub(crate) fn store_counts(&self) -> StoreCounts {
        let counters = self.core_in_turn().counters();
        let mut counts = counters.store;
        counts.damaged += counters.lost;
        [counts.found, counts.not_found] = self
            .looked_up
            .each_ref()
            .map(|pages| pages.load(Ordering::Relaxed));
        counts.written.prewriting_bytes = self.prewritten.load(Ordering::Relaxed);
        counts
    }

    /// Logs the first refusal of a counted lease.
    pub(super) fn note_refused_lease(&self) {
        self.notices.refused_lease();
    }

    /// Logs once that old pages stay, since the clock is not known to be right.
    pub(super) fn note_unsettled_clock(&self) {
        self.notices.unsettled_clock();
    }

    /// Where the descriptors of a segment lie.
    pub(super) fn spot(&self, victim: &Victim) -> Spot {
        Spot {
            store: self.store,
            volume: victim.volume,
            number: victim.number,
            segment_blocks: self.map.segment_blocks(),
            bodies: Bodies::with(self.keys.as_ref()),
        }
    }

    fn op(&self, id: IoId, volume: usize, io: Io) -> Op {
        let mut volume = volume;
        let action = match io {
            Io::Write { offset, mut bytes } => {
                if let Some(keys) = &self.keys
                    && let Err(error) = keys.seal_blocks(&mut bytes)
                {
                    self.notices.unsealed(&error);
                    // No volume has this number, so the write fails.
                    volume = usize::MAX;
                }
                Action::Write {
                    offset,
                    buffer: Buffer::Owned(bytes),
                }
            }
            Io::Sync => Action::Sync,
        };
        Op {
            volume,
            action,
            purpose: Purpose::Record,
            deadline: None,
            tag: id.0,
            sink: Arc::new(CoreSink(self.this.clone())),
        }
    }

    fn answer(&self, effects: Vec<Effect>) {
        let mut answers = self.answers.lock();
        for effect in effects {
            match effect {
                Effect::Settled(id, statuses) => {
                    answers.settled.insert(id, statuses);
                }
                Effect::Finished(id, result) => {
                    answers.finished.insert(id, result);
                }
                Effect::Room => answers.room += 1,
                Effect::Io { .. }
                | Effect::ReadDescriptors(_)
                | Effect::Copy(..)
                | Effect::Reclaim
                | Effect::ReadOnly(..)
                | Effect::ReadWrite(_)
                | Effect::Damaged(_) => {}
            }
        }
        drop(answers);
        self.answered.notify_all();
    }

    fn notify_housekeeper(&self, reclaim: bool, wake_at: Option<u64>) {
        let mut inbox = self.inbox.lock();
        let earlier = match (inbox.wake_at, wake_at) {
            (Some(known), Some(wanted)) => wanted < known,
            (None, Some(_)) => true,
            (_, None) => false,
        };
        if earlier {
            inbox.wake_at = wake_at;
        }
        let reclaim = reclaim && !planted!(DeafKeeper);
        let call = earlier || reclaim && !inbox.reclaim;
        inbox.reclaim |= reclaim;
        drop(inbox);
        if call {
            self.inbox_changed.notify_one();
        }
    }

    fn named(&self, (volume, error): (usize, DiskError)) -> ReadOnlyVolume {
        ReadOnlyVolume {
            path: self.services.path(volume),
            reason: error.to_string(),
        }
    }

    fn new_request(&self) -> RequestId {
        RequestId(self.next_request.fetch_add(1, Ordering::Relaxed))
    }

    /// Waits for an answer of the core.
    fn wait_for<T>(&self, take: impl Fn(&mut Answers) -> Option<T>) -> T {
        loop {
            if let Some(answer) = self.wait_a_moment_for(&take, TICK_WHILE_WAITING) {
                return answer;
            }
            // While a store is being closed no other thread ticks the core.
            self.with_core(|_| ());
        }
    }

    /// Waits for an answer of the core; `None` after `patience`.
    fn wait_a_moment_for<T>(
        &self,
        take: impl Fn(&mut Answers) -> Option<T>,
        patience: Duration,
    ) -> Option<T> {
        let until = Instant::now() + patience;
        let mut answers = self.answers.lock();
        loop {
            if let Some(answer) = take(&mut answers) {
                return Some(answer);
            }
            if self.answered.wait_until(&mut answers, until).timed_out() {
                return take(&mut answers);
            }
        }
    }

    fn wait_for_request(&self, id: RequestId) -> Result<(), Fault> {
        self.wait_for(|answers| answers.finished.remove(&id))
    }

    /// Waits until no operation is in flight; false when `until` passed first.
    pub(crate) fn wait_until_idle(&self, until: Instant) -> bool {
        const LOOK_AGAIN: Duration = Duration::from_millis(5);
        while !self.with_core(|core| core.is_idle()) {
            if Instant::now() >= until {
                return false;
            }
            // The last step of a close: header writes and syncs settle without a notification.
            let mut answers = self.answers.lock();
            self.answered.wait_for(&mut answers, LOOK_AGAIN);
        }
        true
    }

    fn lease(&self, namespace: NamespaceId) -> Lease {
        let blocks = self
            .shape(namespace)
            .map_or(1, |shape| shape.shape.page_blocks());
        Lease {
            now_ms: self.now_ms(),
            duration_ms: u64::try_from(self.lease.as_millis()).unwrap_or(u64::MAX),
            blocks_per_page: blocks,
        }
    }

    fn adopt(&self, orphans: &[Adoption]) {
        let mut steps = ADOPT_STEPS_MAX;
        // From the end, as the index does: the walks are short as long as the links above are
        // missing.
        for some in orphans.rchunks(ADOPTED_AT_ONCE) {
            self.with_core_by_turns(|core| core.adopt(some, &mut steps));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::mpsc;

    use larder_format::{PageKey, Run, Serial};

    use super::*;
    use crate::catalog::Allocator;
    use crate::share::tests::namespace;
    use larder_core::core::{Config, InitState, Recovered, SegmentInit, SyncPolicy};
    use larder_core::grants::{Ask, Grant};
    use larder_core::hint::Hint;
    use larder_disk::{Choice, Kind, Piece};

    const SEGMENTS: u32 = 16;
    const SEGMENT_BLOCKS: u32 = 64;

    /// Does nothing and reports success, except that the first sync fails.
    struct Hollow {
        choice: Choice,
        syncs: AtomicU64,
    }

    impl Disk for Hollow {
        unsafe fn submit(&self, ops: Vec<Op>) {
            for op in ops {
                let is_sync = matches!(op.action, Action::Sync);
                let fails = is_sync && self.syncs.fetch_add(1, Ordering::Relaxed) == 0;
                op.sink.done(vec![Done {
                    tag: op.tag,
                    result: if fails {
                        Err(DiskError::Os(libc::EIO))
                    } else {
                        Ok(())
                    },
                    buffer: None,
                }]);
            }
        }

        unsafe fn register(&self, _: &[Piece]) -> String {
            String::new()
        }

        fn choice(&self) -> &Choice {
            &self.choice
        }

        fn shutdown(&self) {}
    }

    /// An empty store that was not closed cleanly, without a housekeeper.
    fn alone() -> Arc<Local> {
        let free = SegmentInit {
            state: InitState::Free,
            sequence: Serial::ZERO,
            data_end: 0,
            blocks: 0,
            last_commit: Serial::ZERO,
            proven: Serial::ZERO,
            born_ms: 0,
        };
        let recovered = Recovered {
            volumes: vec![SEGMENTS],
            segments: vec![free; SEGMENTS as usize],
            namespaces: Vec::new(),
            first: Serial::first_of(Run::FIRST),
            clean: false,
            lost_pages: 0,
            is_partial: false,
        };
        let config = Config {
            store: StoreId::from_bytes([7; 16]),
            segment_blocks: SEGMENT_BLOCKS,
            sync: SyncPolicy::Always,
            write_bytes_max: 1 << 20,
            copy_blocks_max: 1,
            read_only: false,
            began_ms: 0,
        };
        let blocks = u64::from(SEGMENTS * SEGMENT_BLOCKS);
        let index = Arc::new(Index::new(SEGMENTS as usize, blocks));
        let disk = Arc::new(Hollow {
            choice: Choice {
                kind: Kind::Threads,
                reason: String::new(),
            },
            syncs: AtomicU64::new(0),
        });
        Local::new(
            Core::new(config, recovered, index.clone()),
            index,
            disk,
            SegmentMap::new(&[SEGMENTS], SEGMENT_BLOCKS),
            &OpenOptions::default(),
            Services::new(Vec::new()),
            None,
        )
    }

    #[test]
    fn a_put_that_waits_out_a_failed_sync_needs_no_housekeeper_to_end() {
        let local = alone();
        // The next sync is not tried at once, unless a caller asks for it.
        assert!(matches!(local.flush(), Err(StoreError::SyncFailed)));
        let id = Catalog::namespace(&*local, &namespace(4096)).unwrap();
        let ask = Ask {
            key: PageKey::from_bytes([1; 32]),
            parent: None,
            depth: 0,
            saved: 0,
        };
        let (reservation, grants) = local.reserve(id, Hint::default(), &[ask]);
        assert!(matches!(grants[0], Grant::Write(_)));
        local.commit(reservation, &[Some(1.into())]);
        local.landed(&[(reservation, vec![(0, true)])]);
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || sender.send(local.wait(reservation)));
        let statuses = receiver.recv_timeout(Duration::from_secs(60));
        assert_eq!(statuses.unwrap(), [PutStatus::Stored]);
    }
}

//! Opening a store, and the handle that callers hold.
//!
//! | module | content |
//! |---|---|
//! | `keeper` | the keeper thread: due syncs, reclaim |
//! | `prewriter` | writes unused blocks for the first time, before pages come |
//! | `books` | leases with a count, lists of pages, evictions, usage |
//! | `quotas` | the quotas of namespaces |
//! | `simulated` | a store over a simulated disk; in the build for the simulation alone |
//! | `opening` | from a path to a recovered store, and back to a closed one |
//! | `local` | the in-process catalog: a core behind a mutex, and the execution of its effects |
//! | `mover` | moves pages from segment to segment |
//! | `lessons` | the file with the tables of the policy of eviction |
//! | `lifetimes` | limits of the lifetimes of pages, and the clock that they count by |
//! | `services` | log lines about volumes in read-only service |
//! | `calls` | the calls that move the bytes of pages, with their times |
//! | `put` | writes on callers' threads |
//! | `staged` | gets that are shared with other processes |
//! | `turns` | the volumes, for one thread at a time |
//! | `data` | the data path of a handle, and the counters of its calls |
//! | `get` | reads on callers' threads |
//! | `coding` | the codec of a handle: memory, times, a log line |
//! | `recheck` | for a read-only handle: whether a segment is still in the generation it has read |
//! | `noted` | the calls of the owner itself, for a recording |
//! | `sealed` | the keys of an encrypted store: for new tenants, and for clients |
//! | `notices` | log lines about refused and failed puts |
//! | `hang` | which volumes have gone silent |
//! | `leases` | the leases that a handle has taken |
//! | `given_up` | the segments given up for lack of room; for the simulation alone |

mod books;
mod calls;
mod coding;
mod data;
mod get;
#[cfg(feature = "simulated")]
mod given_up;
mod hang;
mod keeper;
mod leases;
mod lessons;
mod lifetimes;
pub mod local;
pub mod mover;
mod noted;
mod notices;
pub mod opening;
mod prewriter;
mod put;
mod quotas;
mod recheck;
mod sealed;
pub(crate) mod services;
#[cfg(feature = "simulated")]
mod simulated;
pub(crate) mod staged;
mod turns;

use std::path::Path;
use std::sync::Arc;

use larder_base::fork::Origin;
use larder_base::ids::NamespaceId;
use larder_base::runtime::{Instant, Mutex, RwLock, RwLockReadGuard};
use larder_base::system::files;
use larder_core::core::Emptying;
use larder_core::hint::Hint;
use larder_core::index::ReadAs;
use larder_core::policy::make;
use larder_core::status::{GetStatus, MissReason, PutStatus, Refusal};
use larder_disk::Witness;
use larder_format::{Namespace, PageKey};

use crate::api::{Count, GetPage, OpenOptions, PageStore, PutOptions, PutPage, Recall, Stats};
use crate::catalog::{Allocator, Catalog};
use crate::error::StoreError;
use crate::inventory::Inventory;
use crate::recovery::Damage;
use crate::volume::holes::holes;
use crate::volume::quotas::QuotaState;
use crate::volume::{Access, Volumes, length};
use data::Counters;
pub use data::DataPath;
use keeper::Housekeeper;
pub use leases::LeaseBook;
use lessons::Lessons;
use lifetimes::Watch;
use local::Local;
use opening::{Opening, begin_run, catalog, config, mark_clean, open_volumes, services};
use prewriter::Prewriter;
use recheck::Recheck;
use staged::Stage;
use turns::Turns;

/// Most damaged places of a volume that an open logs one by one.
const DAMAGE_LOGGED_MAX: usize = 10;

/// An open store of this process.
///
/// Dropping it without [`PageStore::close`] is safe: the next open recovers as after a crash.
pub struct LocalStore {
    pub(crate) local: Arc<Local>,
    pub(crate) data: DataPath,
    pub(crate) volumes: Arc<Turns>,
    /// Changed with `volumes` held.
    quotas: Mutex<QuotaState>,
    keeper: Mutex<Option<Housekeeper>>,
    prewriter: Mutex<Option<Prewriter>>,
    /// The counted leases of this handle.
    leases: LeaseBook,
    /// Every call holds the read lock, so that no call is in progress during a close; true once
    /// closed. Calls only try the lock: a call that begins while a close waits for others does not
    /// wait with it.
    gate: RwLock<bool>,
    read_only: bool,
    /// Most bytes of puts in flight.
    pub(crate) write_bytes_max: u64,
    capacity_bytes: u64,
    unproven: u64,
    /// Damaged places that the open found, by volume.
    pub(crate) damaged_places: Vec<u64>,
    origin: Origin,
}

impl LocalStore {
    /// Opens the store whose first volume is at `path`.
    ///
    /// # Errors
    /// See [`StoreError`]: each error names the fault, its place, and the remedy.
    pub(crate) fn open(path: &Path, options: &OpenOptions) -> Result<LocalStore, StoreError> {
        let access = if options.read_only {
            Access::ReadOnly
        } else {
            Access::Exclusive
        };
        LocalStore::open_with(path, options, access, || Ok(()))
    }

    fn open_with(
        path: &Path,
        options: &OpenOptions,
        access: Access,
        may_open: impl FnOnce() -> Result<(), StoreError>,
    ) -> Result<LocalStore, StoreError> {
        let (volumes, disk) = open_volumes(path, options, access)?;
        if let Err(error) = may_open() {
            disk.shutdown();
            return Err(error);
        }
        let opening: Opening = Opening::new(volumes, disk, options)?;
        tell_damage(&opening.volumes, &opening.recovery.damage);
        if opening.recovery.doubtful > 0 {
            tracing::warn!(
                pages = opening.recovery.doubtful,
                "lost records may have deleted, evicted or cleared some of these pages: such \
                 pages are found again; if that must not happen, clear their namespaces"
            );
        }
        LocalStore::assemble(opening, options)
    }

    fn assemble(opening: Opening, options: &OpenOptions) -> Result<LocalStore, StoreError> {
        let Opening {
            mut volumes,
            disk,
            index,
            mut recovery,
            ..
        } = opening;
        let patient = Witness::new(disk.clone(), volumes.patience.clone());
        let quotas = volumes.open_quotas(&patient, !options.read_only)?;
        if !options.read_only {
            begin_run(&mut volumes, disk.as_ref(), &mut recovery)?;
        }
        let superblock = volumes.superblock();
        let recheck = options
            .read_only
            .then(|| Recheck::new(superblock, &recovery.recovered.segments));
        let capacity_bytes = capacity(&volumes)?;
        if let Some((_, volume)) = volumes.present().find(|(_, volume)| !volume.direct) {
            tracing::warn!(
                "{}: the filesystem does not honour O_DIRECT; reads and writes go through the page \
                 cache and cost far more CPU",
                volume.path.display()
            );
        }
        if !options.read_only {
            warn_of_holes(&volumes);
        }
        let unproven = recovery.unproven;
        let mut damaged_places = vec![0; volumes.list.len()];
        for damage in &recovery.damage {
            damaged_places[damage.volume] += 1;
        }
        let config = config(&volumes, options);
        let services = services(&volumes);
        let keys = volumes.keys.clone();
        let local = catalog(
            config,
            recovery,
            index,
            disk.clone(),
            options,
            services,
            keys,
        );
        let list = quotas.list().to_vec();
        local.limit_lives(list.iter().any(|quota| quota.max_age_s.is_some()));
        local.with_core(|core| core.set_quotas(list));
        local.learn_puts();
        if let Some(policy) = &options.admission {
            local.with_core(|core| core.admit_by(make(policy)));
        }
        if let Some(bytes) = options.write_budget.bytes_a_day(capacity_bytes) {
            local.with_core(|core| core.limit_writes(bytes));
        }
        let mut data = DataPath::new(disk, &volumes, options.hang_limit);
        data.recheck = recheck;
        let lessons = options.eviction.as_ref();
        let lessons = lessons.and_then(|_| Lessons::beside(&volumes));
        let volumes = Arc::new(Turns::new(volumes));
        let keeper = if options.read_only {
            None
        } else {
            let watch = Watch::new(volumes.clone());
            Some(Housekeeper::start(local.clone(), lessons, watch)?)
        };
        let prewriter = if options.settings().prewrite && !options.read_only {
            Prewriter::start(local.clone(), &volumes.lock()).map(Some)
        } else {
            Ok(None)
        };
        let prewriter = match prewriter {
            Ok(prewriter) => prewriter,
            Err(error) => {
                // It would keep the volumes open, and go on.
                keeper.into_iter().for_each(Housekeeper::stop);
                return Err(error);
            }
        };
        // After the last step that can fail.
        if let Some(beneath) = &options.beneath {
            local.lie_over(beneath.clone());
        }
        Ok(LocalStore {
            local,
            data,
            volumes,
            quotas: Mutex::new(quotas),
            keeper: Mutex::new(keeper),
            prewriter: Mutex::new(prewriter),
            leases: LeaseBook::default(),
            gate: RwLock::new(false),
            read_only: options.read_only,
            write_bytes_max: options.write_bytes_max,
            capacity_bytes,
            unproven,
            damaged_places,
            origin: Origin::here(),
        })
    }

    /// Opens a store as its owner, if no other process has it open at this moment. `may_open` is
    /// checked once the store is locked, and before anything is read or written.
    pub(crate) fn open_at_once(
        path: &Path,
        options: &OpenOptions,
        may_open: impl FnOnce() -> Result<(), StoreError>,
    ) -> Result<LocalStore, StoreError> {
        LocalStore::open_with(path, options, Access::AtOnce, may_open)
    }

    /// The pages of a get, not counted yet.
    pub(crate) fn read(
        &self,
        namespace: NamespaceId,
        pages: &mut [GetPage<'_, '_>],
        deadline: Option<Instant>,
        read_as: ReadAs,
    ) -> Vec<GetStatus> {
        let Some(_gate) = self.enter() else {
            return vec![GetStatus::Miss(MissReason::Closed); pages.len()];
        };
        let statuses = self
            .data
            .get(&*self.local, namespace, pages, deadline, read_as);
        if read_as == ReadAs::Use {
            self.note_get(namespace, pages, &statuses);
        }
        statuses
    }

    /// Like [`LocalStore::read`] for a use, shared with clients.
    pub(crate) fn get_staged(
        &self,
        stage: &dyn Stage,
        namespace: NamespaceId,
        pages: &mut [GetPage<'_, '_>],
        deadline: Option<Instant>,
    ) -> Vec<GetStatus> {
        let Some(_gate) = self.enter() else {
            return vec![GetStatus::Miss(MissReason::Closed); pages.len()];
        };
        let statuses = self
            .data
            .get_staged(&*self.local, stage, namespace, pages, deadline);
        self.note_get(namespace, pages, &statuses);
        statuses
    }

    /// Counts the pages of a get of a request.
    pub(crate) fn count_read(&self, namespace: NamespaceId, statuses: &[GetStatus]) {
        self.data.count_read(&*self.local, namespace, statuses);
    }

    pub(crate) fn catalog(&self) -> &dyn Allocator {
        &*self.local
    }

    /// The books of this store, with leases that no handle has entered.
    pub(crate) fn books(&self) -> &dyn Inventory {
        &*self.local
    }

    /// The namespaces with full records in the store.
    #[must_use]
    pub fn namespaces(&self) -> Vec<Namespace> {
        if self.origin.is_inherited() {
            return Vec::new();
        }
        self.local
            .with_core(|core| core.namespaces().cloned().collect())
    }

    /// Checks the invariants between index and space; for tests.
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn check_invariants(&self) -> Result<(), String> {
        self.local.with_core(|core| core.check_invariants())
    }

    /// Stops serving pages and reclaiming, for good: space that is released from here on is not
    /// granted again. The store is left as after a crash.
    pub(crate) fn abandon(&self) {
        *self.gate.write() = true;
        self.stop_threads();
        self.local.part_from_beneath();
    }

    fn stop_threads(&self) {
        if let Some(prewriter) = self.prewriter.lock().take() {
            prewriter.stop();
        }
        if let Some(keeper) = self.keeper.lock().take() {
            keeper.stop();
        }
    }

    fn close_once(&self) -> Result<(), StoreError> {
        self.stop_threads();
        let mut volumes = self.volumes.lock();
        let closed = if self.read_only {
            Ok(())
        } else {
            // This flush speeds up the operations in flight. If one of them is in doubt, the later
            // flushes fail.
            let _ = self.local.flush();
            mark_clean(&self.local, &mut volumes).map(drop)
        };
        self.data.disk.shutdown();
        // The next owner may begin as soon as the volumes are unlocked.
        self.local.part_from_beneath();
        // The disk has answered every operation: no write of this handle can reach the volumes any
        // more.
        for volume in volumes.list.iter_mut().filter_map(Option::take) {
            volume.unlock();
        }
        closed
    }
}

/// Logs the damage that an open found, with the places of each volume.
fn tell_damage(volumes: &Volumes, damage: &[Damage]) {
    for (volume, of) in volumes.present() {
        let places = || damage.iter().filter(|damage| damage.volume == volume);
        let path = of.path.display();
        for damage in places().take(DAMAGE_LOGGED_MAX) {
            tracing::warn!(
                volume,
                segment = damage.segment,
                offset = damage.fault.offset,
                "{path}: damage found at the open: {}",
                damage.fault
            );
        }
        let more = places().skip(DAMAGE_LOGGED_MAX).count();
        if more > 0 {
            tracing::warn!(
                volume,
                more,
                "{path}: further damaged places are not logged: `larder verify --online` checks \
                 the pages that are left"
            );
        }
    }
}

/// Writes into a volume with holes may fail for lack of space.
fn warn_of_holes(volumes: &Volumes) {
    for (_, volume) in volumes.present() {
        let found = files::descriptor(&volume.file).and_then(holes);
        let found = found.filter(|holes| !holes.is_none());
        if let Some(holes) = found {
            let path = volume.path.display();
            tracing::warn!(
                "{path}: {holes}; a write there needs free space: {}",
                holes.remedy(&volume.path)
            );
        }
    }
}

fn capacity(volumes: &Volumes) -> Result<u64, StoreError> {
    let lengths = volumes.present();
    let lengths = lengths.map(|(_, volume)| length(&volume.file, &volume.path));
    lengths.sum()
}

impl PageStore for LocalStore {
    fn namespace(&self, namespace: &Namespace) -> Result<NamespaceId, StoreError> {
        let Some(_gate) = self.enter() else {
            return Err(self.refusal());
        };
        self.local.namespace(namespace)
    }

    fn put_recallable(
        &self,
        namespace: NamespaceId,
        pages: &[PutPage<'_>],
        options: PutOptions,
        recall: Option<&Recall>,
    ) -> Vec<PutStatus> {
        let gate = self.enter();
        let why = match &gate {
            _ if self.read_only => Refusal::ReadOnly,
            None => Refusal::Closed,
            Some(_) if let Err(why) = self.give_key_for(namespace, options) => why,
            Some(_) => {
                let statuses = self
                    .data
                    .put(&*self.local, namespace, pages, options, recall);
                self.note_put(namespace, pages, &statuses);
                return statuses;
            }
        };
        vec![PutStatus::Refused(why); pages.len()]
    }

    fn get(
        &self,
        namespace: NamespaceId,
        pages: &mut [GetPage<'_, '_>],
        deadline: Option<Instant>,
    ) -> Vec<GetStatus> {
        let statuses = self.read(namespace, pages, deadline, ReadAs::Use);
        self.count_read(namespace, &statuses);
        statuses
    }

    fn get_uncounted(
        &self,
        namespace: NamespaceId,
        pages: &mut [GetPage<'_, '_>],
        deadline: Option<Instant>,
    ) -> Vec<GetStatus> {
        self.read(namespace, pages, deadline, ReadAs::Check)
    }

    fn count(&self, namespace: NamespaceId, count: Count) {
        self.data.count(&*self.local, namespace, count);
    }

    fn longest_prefix(&self, namespace: NamespaceId, keys: &[PageKey]) -> usize {
        let Some(_gate) = self.enter() else {
            return 0;
        };
        let found = self.data.longest_prefix(&*self.local, namespace, keys);
        self.note_lookup(namespace, keys, found);
        found
    }

    fn contains(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<bool> {
        let Some(_gate) = self.enter() else {
            return vec![false; keys.len()];
        };
        let found = self.data.contains(&*self.local, namespace, keys);
        let leading = found.iter().take_while(|is_found| **is_found).count();
        self.note_lookup(namespace, keys, leading);
        found
    }

    fn touch(&self, namespace: NamespaceId, keys: &[PageKey], hint: Hint) {
        if !self.origin.is_inherited() {
            self.local.touch(namespace, keys, hint);
        }
    }

    fn delete(&self, namespace: NamespaceId, keys: &[PageKey]) -> Result<u64, StoreError> {
        let _gate = self.enter_to_write()?;
        self.local.delete(namespace, keys)
    }

    fn clear_namespace(&self, namespace: NamespaceId) -> Result<u64, StoreError> {
        let _gate = self.enter_to_write()?;
        self.local.clear_namespace(namespace)
    }

    fn flush(&self) -> Result<(), StoreError> {
        let _gate = self.enter_to_write()?;
        self.data.flush(&*self.local)
    }

    fn register(&self, memory: &'static mut [u8]) -> (&'static mut [u8], String) {
        if self.origin.is_inherited() {
            return (memory, format!("not registered: {}", StoreError::Forked));
        }
        self.data.register(memory)
    }

    fn stats(&self) -> Stats {
        if self.origin.is_inherited() {
            return Stats::default();
        }
        let mut stats = self.local.stats();
        self.data.count_into(&mut stats);
        stats.capacity_bytes = self.capacity_bytes;
        stats.unproven = self.unproven;
        stats
    }

    fn close(&self) -> Result<(), StoreError> {
        if self.origin.is_inherited() {
            return Err(StoreError::Forked);
        }
        let mut gate = self.gate.write();
        if std::mem::replace(&mut *gate, true) {
            return Ok(());
        }
        self.close_once()
    }
}

impl LocalStore {
    /// Lets a call in; `None` once the store is closed, or is being closed.
    fn enter(&self) -> Option<RwLockReadGuard<'_, bool>> {
        if self.origin.is_inherited() {
            return None;
        }
        self.gate.try_read().filter(|is_closed| !**is_closed)
    }

    /// Empties a segment, with all its pages kept: see [`Local::empty`].
    pub(crate) fn empty(
        &self,
        wanted: &Emptying,
        goes_on: impl Fn() -> bool,
    ) -> Result<Option<u64>, StoreError> {
        let _gate = self.enter_to_write()?;
        self.local.empty(wanted, goes_on)
    }

    /// Why calls are refused.
    fn refusal(&self) -> StoreError {
        match self.origin.is_inherited() {
            true => StoreError::Forked,
            false => StoreError::Closed,
        }
    }

    fn enter_to_write(&self) -> Result<RwLockReadGuard<'_, bool>, StoreError> {
        let gate = self.enter().ok_or_else(|| self.refusal())?;
        if self.read_only {
            return Err(StoreError::ReadOnly);
        }
        Ok(gate)
    }
}

impl Drop for LocalStore {
    fn drop(&mut self) {
        if self.origin.is_inherited() {
            // The threads belong to the parent.
            std::mem::forget((
                self.prewriter.get_mut().take(),
                self.keeper.get_mut().take(),
            ));
            return;
        }
        self.stop_threads();
        // The volumes are dropped, and unlocked, after this.
        self.local.part_from_beneath();
    }
}

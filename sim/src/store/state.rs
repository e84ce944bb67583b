//! The state that driver, tasks and device share.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use larder_core::core::Core;
use larder_core::index::SegmentId;
use larder_engine::NamespaceId;
use larder_sim_runtime::task::{self, Turn};
use larder_store::store::LocalStore as Store;

use super::flight::Flight;
use super::limits::{Pins, Quotas};
use super::lives::Lives;
use super::memory::Pool;
use super::policies::Leases;
use crate::expected::Expected;
use crate::oracle::VersionId;
use crate::world::{Epoch, World};

/// The call that a caller is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Idle,
    Put,
    Get,
    Delete,
    Flush,
    Other,
}

/// The use that the process makes of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Opening,
    /// Callers call.
    Open,
    /// Callers end, then the store is closed.
    Closing,
    /// Callers end, faults have ended, all must come to rest.
    Resting,
}

/// Deletions of this epoch.
#[derive(Default)]
pub struct Deletions {
    pub in_progress: u32,
    /// Pages that ended deletions report.
    pub found: u64,
    /// The figure is not exact: a deletion has failed, or one overtook a put, whose page then
    /// counts as deleted.
    pub is_vague: bool,
    /// A tenant was erased, or its erasure has begun: a put of one of its pages may be refused at
    /// its end.
    pub has_erased: bool,
}

/// The evictions that the store has told of in this epoch.
#[derive(Default)]
pub struct Told {
    /// The number to ask with next.
    pub next: u64,
    /// Pages that it told of, or whose keys are lost. `None` when they cannot be compared with the
    /// counters: pages left while the first caller asked.
    pub count: Option<u64>,
    /// Pages that had left before the first caller asked.
    pub before: u64,
    /// A caller asks.
    pub is_asking: bool,
}

/// The state that driver, tasks and device share.
pub struct State {
    pub world: World,
    /// From recovery on.
    pub epoch: Option<Epoch>,
    pub store: Option<Arc<Store>>,
    /// By namespace.
    pub ids: Vec<Option<NamespaceId>>,
    pub expected: Expected,
    pub phase: Phase,
    pub calls: Vec<Call>,
    /// The close has begun.
    pub closing: bool,
    pub flights: Vec<Flight>,
    pub launched: u64,
    /// Disks that were made.
    pub disks: u64,
    /// The number of the owner's.
    pub owner_disk: u64,
    /// Versions of puts in progress.
    pub putting: BTreeSet<VersionId>,
    /// Versions of puts in progress that a task is to recall.
    pub under_recall: BTreeSet<VersionId>,
    /// Versions of puts that were recalled.
    pub recalled: BTreeSet<VersionId>,
    pub deletions: Deletions,
    /// Memory of calls that have ended.
    pub pool: Pool,
    /// Disks whose store is open. Before, an opening reads into memory of its own.
    pub opened: BTreeSet<u64>,
    /// Memory of gets in progress: address and length.
    pub lent: Vec<(usize, usize)>,
    /// Reads of page data from a wrong address.
    pub misdirected: u64,
    pub leases: Leases,
    pub pins: Pins,
    pub quotas: Quotas,
    pub lives: Lives,
    /// The evictions that the store has told of. `None` before a caller has asked.
    pub told: Option<Told>,
    /// Calls in progress that may read descriptors of any segment.
    pub listing: u32,
    /// Writes of the opening in progress.
    pub opening_writes: u64,
    /// An outage kept segments from this opening. It is closed at once: all its pages must be there
    /// again at the next one.
    pub is_partial: bool,
    /// Pages in each segment at the last clean close.
    pub held: BTreeMap<SegmentId, u64>,
    /// Segments that have become zeros since, and their pages.
    pub emptied: Option<(u32, u64)>,
    /// A volume is in read-only service.
    pub is_read_only: bool,
    /// Pages evicted, while no volume takes writes.
    pub evicted_read_only: Option<u64>,
}

impl State {
    /// Looks at the core, unless a task holds it.
    pub fn try_core<R>(&self, look: impl FnOnce(&Core) -> R) -> Option<R> {
        self.store.as_ref()?.try_core(look)
    }
}

/// No task waits while it holds this lock.
#[derive(Clone)]
pub struct Shared(Arc<Mutex<State>>);

impl Shared {
    /// The state before the first run of the process.
    pub fn new(world: World) -> Shared {
        let expected = Expected {
            exactly: true,
            ..Expected::default()
        };
        Shared(Arc::new(Mutex::new(State {
            calls: vec![Call::Idle; world.setup.clients],
            leases: Leases::new(&world.setup),
            pins: Pins::default(),
            quotas: Quotas::default(),
            lives: Lives::new(world.setup.lives),
            world,
            epoch: None,
            store: None,
            ids: Vec::new(),
            expected,
            phase: Phase::Opening,
            closing: false,
            flights: Vec::new(),
            launched: 0,
            disks: 0,
            owner_disk: 0,
            putting: Default::default(),
            under_recall: Default::default(),
            recalled: Default::default(),
            deletions: Deletions::default(),
            pool: Pool::default(),
            opened: Default::default(),
            lent: Vec::new(),
            told: None,
            listing: 0,
            misdirected: 0,
            opening_writes: 0,
            is_partial: false,
            held: BTreeMap::new(),
            emptied: None,
            is_read_only: false,
            evicted_read_only: None,
        })))
    }

    pub fn lock(&self) -> Held<'_> {
        let state = match self.0.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => panic!("a task waits while it holds the state"),
        };
        Held {
            state,
            _turn: task::keep_turn(),
        }
    }
}

/// The state, locked. Dropped in this order.
pub struct Held<'a> {
    state: MutexGuard<'a, State>,
    _turn: Turn,
}

impl Deref for Held<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

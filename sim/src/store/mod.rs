//! One process that uses a store: the engine's own handle, housekeeper, recovery and data path, on
//! the threads, locks and clock of `larder_sim_runtime`, over a simulated disk.
//!
//! Callers are tasks that call [`Store`]. The driver plays between their steps: it kills the
//! process, spoils the medium, and checks the state that the tasks leave. A kill is possible at
//! each point where a task waits.
//!
//! | module | content |
//! |---|---|
//! | `driver` | a seed from start to end |
//! | `epoch` | one run of the process: its begin, its end, the checks between two steps |
//! | `device` | operations in flight, and the threads that end them |
//! | `process` | the main task of the process |
//! | `callers` | calls |
//! | `results` | the checks of their results |
//! | `books` | counted leases, lists of pages, evictions; segments emptied for a caller |
//! | `policies` | eviction and admission by policies of the caller, and leases |
//! | `reader` | another process that reads beside the owner |
//! | `rest` | the quiet end: without faults all must come to rest |

mod books;
mod callers;
mod device;
mod driver;
mod epoch;
mod policies;
mod process;
mod reader;
mod rest;
mod results;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use larder_engine::NamespaceId;
use larder_engine::core::Core;
use larder_engine::index::SegmentId;
use larder_engine::store::LocalStore as Store;
use larder_sim_runtime::dice::Dice;
use larder_sim_runtime::task::{self, Turn};

use crate::classes::Tally;
use crate::expected::Expected;
use crate::oracle::VersionId;
use crate::totals::Totals;
use crate::world::{Epoch, Journal, World};
use books::Told;
use callers::Pool;
use device::Flight;
use driver::Driver;
use policies::Leases;

/// Plays a seed. Returns a digest of all events, and their counts.
pub fn play(seed: u64, journal: Option<Journal>) -> (u64, Totals, Tally) {
    Driver::new(World::new(Dice::new(seed), seed, journal), seed).play()
}

/// Plays a script: its bytes replace the randomness of callers and faults. The run has at most as
/// many steps as the script has bytes.
pub fn play_script(script: &[u8]) -> (u64, Totals, Tally) {
    let mut world = World::new(Dice::scripted(script), 0, None);
    world.setup.steps = world.setup.steps.min(script.len());
    let seed = world.dice.between(0, u64::from(u16::MAX));
    Driver::new(world, seed).play()
}

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
enum Phase {
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
struct Deletions {
    in_progress: u32,
    /// Pages that ended deletions report.
    found: u64,
    /// The figure is not exact: a deletion has failed, or one overtook a put, whose page then
    /// counts as deleted.
    is_vague: bool,
}

/// The state that driver, tasks and device share.
pub struct State {
    world: World,
    /// From recovery on.
    epoch: Option<Epoch>,
    store: Option<Arc<Store>>,
    /// By namespace.
    ids: Vec<Option<NamespaceId>>,
    expected: Expected,
    phase: Phase,
    calls: Vec<Call>,
    /// The close has begun.
    closing: bool,
    flights: Vec<Flight>,
    launched: u64,
    /// Disks that were made.
    disks: u64,
    /// The number of the owner's.
    owner_disk: u64,
    /// Versions of puts in progress.
    putting: BTreeSet<VersionId>,
    /// Versions of puts in progress that a task is to recall.
    under_recall: BTreeSet<VersionId>,
    /// Versions of puts that were recalled.
    recalled: BTreeSet<VersionId>,
    deletions: Deletions,
    /// Memory of calls that have ended.
    pool: Pool,
    /// Disks whose store is open. Before, an opening reads into memory of its own.
    opened: BTreeSet<u64>,
    /// Memory of gets in progress: address and length.
    lent: Vec<(usize, usize)>,
    /// Reads of page data from a wrong address.
    misdirected: u64,
    leases: Leases,
    /// The evictions that the store has told of. `None` before a caller has asked.
    told: Option<Told>,
    /// Calls in progress that may read descriptors of any segment.
    listing: u32,
    /// Writes of the opening in progress.
    opening_writes: u64,
    /// An outage kept segments from this opening. It is closed at once: all its pages must be there
    /// again at the next one.
    is_partial: bool,
    /// Pages in each segment at the last clean close.
    held: BTreeMap<SegmentId, u64>,
    /// Segments that have become zeros since, and their pages.
    emptied: Option<(u32, u64)>,
    /// A volume is in read-only service.
    is_read_only: bool,
    /// Pages evicted, while no volume takes writes.
    evicted_read_only: Option<u64>,
}

impl State {
    /// Looks at the core, unless a task holds it.
    fn try_core<R>(&self, look: impl FnOnce(&Core) -> R) -> Option<R> {
        self.store.as_ref()?.try_core(look)
    }
}

/// No task waits while it holds this lock.
#[derive(Clone)]
pub struct Shared(Arc<Mutex<State>>);

impl Shared {
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

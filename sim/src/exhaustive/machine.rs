//! One script in execution: the process that uses the store, a volume whose writes wait for a sync,
//! and the promises so far.
//!
//! The process runs the engine on the threads, locks and clock of `larder_sim_runtime`. When none
//! of its tasks can run, the device finishes one operation: its oldest or its newest. The reads of
//! the housekeeper wait until the script says so, or until a call waits for nothing else: reclaim
//! is an operation of the script. [`Explorer`] sees every change of the state that a crash could
//! leave.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use larder_core::core::Core;
use larder_core::index::Index;
use larder_disk::{Action, Done, Op, Purpose, Sink};
use larder_engine::format::{BLOCK_BYTES, OVERHEAD_BYTES};
use larder_sim_runtime as runtime;
use larder_sim_runtime::dice::Dice;
use larder_sim_runtime::time::Instant;
use larder_sim_runtime::{Odds, Queue, Step};
use larder_store::store::LocalStore;

use super::Explorer;
use super::image::{Image, Written};
use super::process::{Operation, run};
use super::promises::{Crash, Names, Promises};
use super::store::{NAMES, segment_at};
use crate::lines::{Answers, Device, answer};

/// Steps of the scheduler after which a script counts as one without an end.
const STEPS_MAX: u64 = 1_000_000;

/// The operation in flight that the device finishes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    #[default]
    Oldest,
    Newest,
}

/// Everything that decides which states a crash at this moment can leave, and which pages it must
/// not lose.
pub struct Moment<'a> {
    pub durable: &'a Image,
    /// Blocks written since the last sync, then blocks in flight, in order.
    pub blocks: &'a [Written],
    /// Number of these blocks that have been written.
    pub completed: usize,
    pub promises: &'a Promises,
}

/// The event for which the script waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wish {
    /// The end of a call.
    #[default]
    Call,
    /// Nothing is in flight but reads of the housekeeper.
    Rest,
    /// The housekeeper has read a segment, and has emptied it if it could.
    Reclaim,
}

/// The end of the script's process.
pub enum End {
    Done,
    Crash(Crash),
}

struct Flight {
    op: Op,
    /// The blocks of a write.
    blocks: Vec<Written>,
    /// Of a sync: the number of blocks ever written before it.
    covers: usize,
}

impl Flight {
    /// The segment that it reads for the housekeeper.
    fn victim(&self) -> Option<u64> {
        let is_background = self.op.purpose == Purpose::Background;
        match &self.op.action {
            Action::Read { offset, .. } if is_background => Some(segment_at(*offset)),
            _ => None,
        }
    }
}

/// The state that the tasks and the driver share.
#[derive(Default)]
pub struct State {
    /// `None` after the end.
    pub explorer: Option<Explorer>,
    order: Order,
    /// The rest of the script, the next operation last.
    pub script: Vec<Operation>,
    /// The store is to be filled first.
    pub fills: bool,
    /// The explorer examines moments.
    pub watched: bool,
    pub image: Image,
    durable: Image,
    unsynced: Vec<Written>,
    /// Blocks made durable, each as often as it was written.
    synced: usize,
    flights: Vec<Flight>,
    /// When the device finishes an operation, or fulfils the wish.
    due: Option<Instant>,
    pub wish: Wish,
    /// The segment that the housekeeper has read since the wish.
    pub victim: Option<u64>,
    /// The crash before this opening.
    pub crash: Option<Crash>,
    pub handle: Weak<LocalStore>,
    /// From recovery on.
    pub index: Option<Arc<Index>>,
    pub promises: Promises,
    pub attempts: Vec<usize>,
    pub clock: u64,
    pub failure: Option<String>,
    pub end: Option<End>,
}

impl State {
    /// Looks at the present state. Returns the names of the indexed pages.
    pub fn look(&mut self) -> Names {
        let (Some(index), Some(explorer), false) = (&self.index, &self.explorer, self.fills) else {
            return 0;
        };
        let store = &explorer.judge.store;
        let (mut all, mut whole) = (0, 0);
        index.each(|page| {
            if let Some(name) = store.name_of(page.key) {
                let sum = store.checksum_at(name, page.place, &self.image);
                all |= 1 << name;
                whole |= Names::from(sum == page.proof.checksum) << name;
            }
        });
        self.promises.present = whole;
        self.promises.durable &= whole;
        all
    }

    /// Looks at the core. `None` without an open store.
    fn try_core<R>(&self, look: impl FnOnce(&Core) -> R) -> Option<R> {
        self.handle.upgrade()?.try_core(look)
    }

    /// Looks at the present state and checks it, and has it examined if it is watched.
    pub fn examine(&mut self) {
        self.look();
        let broken = self.try_core(Core::check_invariants).and_then(Result::err);
        self.failure = self.failure.take().or(broken);
        if !self.watched || self.failure.is_some() {
            return;
        }
        let mut blocks = self.unsynced.clone();
        for flight in &self.flights {
            blocks.extend_from_slice(&flight.blocks);
        }
        let moment = Moment {
            durable: &self.durable,
            blocks: &blocks,
            completed: self.unsynced.len(),
            promises: &self.promises,
        };
        let seen = self.explorer.as_mut().map(|explorer| explorer.see(&moment));
        self.failure = seen.and_then(Result::err);
    }

    /// Whether the housekeeper has done with a segment, or has nothing to do.
    fn is_reclaimed(&self) -> bool {
        let is_another = |flight: &Flight| {
            let read = flight.victim();
            read.is_some() && self.victim.is_some() && read != self.victim
        };
        let is_reclaiming = self.try_core(Core::is_reclaiming);
        is_reclaiming == Some(false) || self.flights.iter().any(is_another)
    }

    /// The operation that the device finishes now.
    fn choose(&self) -> Option<usize> {
        let reclaims = self.wish == Wish::Reclaim;
        if reclaims && self.is_reclaimed() {
            return None;
        }
        let is_due = |flight: &Flight| reclaims || flight.victim().is_none();
        let mut flights = self.flights.iter();
        let due = match self.order {
            Order::Oldest => flights.position(is_due),
            Order::Newest => flights.rposition(is_due),
        };
        due.or((self.wish == Wish::Call && !self.flights.is_empty()).then_some(0))
    }

    /// Finishes an operation. `None` if there is none to be finished: the wish is fulfilled.
    fn finish(&mut self) -> Option<(Arc<dyn Sink>, Done)> {
        // The tasks may have promised more since the last operation.
        self.examine();
        let Some(at) = self.choose() else {
            self.wish = Wish::Call;
            return None;
        };
        let mut flight = self.flights.remove(at);
        self.victim = flight.victim().or(self.victim);
        let mut result = Ok(());
        match &mut flight.op.action {
            Action::Read { offset, buffer } => result = self.image.read(*offset, buffer),
            Action::Write { .. } => {
                for written in &flight.blocks {
                    self.image.put(written);
                }
                self.unsynced.append(&mut flight.blocks);
            }
            Action::Sync => {
                let covers = flight.covers.saturating_sub(self.synced);
                for written in self.unsynced.drain(..covers) {
                    self.durable.put(&written);
                }
                self.synced += covers;
            }
        }
        self.examine();
        Some(answer(flight.op, result))
    }

    /// The process has ended. A kill leaves all written blocks, a power loss every second block.
    fn crash(&mut self, crash: Crash) {
        let flights = std::mem::take(&mut self.flights);
        if crash == Crash::Power {
            let in_flight = flights.into_iter().flat_map(|flight| flight.blocks);
            let blocks = std::mem::take(&mut self.unsynced);
            for written in blocks.into_iter().chain(in_flight).step_by(2) {
                self.durable.put(&written);
            }
            self.image = self.durable.clone();
        }
        self.due = None;
        self.handle = Weak::new();
        self.index = None;
        self.crash = Some(crash);
    }
}

pub struct Shared {
    state: Mutex<State>,
    /// The script waits here for its wish.
    pub granted: Queue,
}

impl Shared {
    /// No task waits while it holds this lock.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The device as the process sees it.
pub struct Own(pub Arc<Shared>);

impl Device for Own {
    fn launch(&self, op: Op) -> bool {
        let blocks = match &op.action {
            Action::Write { offset, buffer } => Written::blocks(*offset, buffer),
            Action::Read { .. } | Action::Sync => Vec::new(),
        };
        let mut state = self.0.lock();
        let covers = state.synced + state.unsynced.len();
        state.flights.push(Flight { op, blocks, covers });
        true
    }

    fn launched(&self) {
        self.0.lock().examine();
    }

    fn land(&self, _: usize) -> (Vec<Answers>, Option<Instant>) {
        let mut state = self.0.lock();
        // Once: after an operation the tasks come first.
        if state.due.take_if(|due| *due <= Instant::now()).is_some() {
            if let Some((sink, done)) = state.finish() {
                return (vec![(sink, vec![done])], None);
            }
            self.0.granted.wake_all();
        }
        // The clock stands still while a task can run.
        let has_work = !state.flights.is_empty() || state.wish != Wish::Call;
        state.due = has_work.then(|| Instant::now() + Duration::from_nanos(1));
        (Vec::new(), state.due)
    }
}

/// The driver of a script.
pub struct Machine {
    world: runtime::World,
    files: runtime::Machine,
    shared: Arc<Shared>,
}

impl Machine {
    /// A machine with a store that was never opened.
    pub fn new(order: Order, fills: bool, script: &[Operation], explorer: Explorer) -> Machine {
        let blank = explorer.judge.store.blank();
        let setup = runtime::Setup {
            switch_one_in: 0,
            step: Duration::ZERO,
            ..runtime::Setup::default()
        };
        let files = runtime::Machine::new(Dice::new(0), Odds::default(), false);
        let blocks = OVERHEAD_BYTES as usize / BLOCK_BYTES + explorer.judge.store.blocks();
        files.add_volume(Path::new("volume0"), blocks);
        let state = State {
            explorer: Some(explorer),
            order,
            script: script.iter().rev().copied().collect(),
            fills,
            durable: blank.clone(),
            image: blank,
            attempts: vec![0; NAMES],
            ..State::default()
        };
        Machine {
            world: runtime::World::new(setup),
            files,
            shared: Arc::new(Shared {
                state: Mutex::new(state),
                granted: Queue::new(),
            }),
        }
    }

    /// Plays the script. Gives the explorer back.
    pub fn play(self) -> Result<Explorer, String> {
        loop {
            let process = self.world.process("store");
            let shared = self.shared.clone();
            let _ = self.world.spawn(process, "main", move || run(&shared));
            let end = self.live()?;
            self.files.kill(process);
            match end {
                End::Crash(crash) => self.shared.lock().crash(crash),
                End::Done => {
                    let explorer = self.shared.lock().explorer.take();
                    return explorer.ok_or_else(|| "the script has ended before".to_owned());
                }
            }
        }
    }

    /// One run of the process.
    fn live(&self) -> Result<End, String> {
        loop {
            let step = self.world.step();
            let mut state = self.shared.lock();
            if let Some(why) = state.failure.take() {
                return Err(why);
            }
            if let Some(end) = state.end.take() {
                return Ok(end);
            }
            if step == Step::Stuck || self.world.steps() > STEPS_MAX {
                return Err(format!("the script does not end:\n{}", self.world.report()));
            }
        }
    }
}

//! The scheduler: worlds, processes, tasks, and queues of waiting tasks.
//!
//! A driver outside all tasks makes a [`World`], starts tasks and calls [`World::step`]. The driver
//! must not wait. Between two steps it looks at the state that the tasks share with it, and kills,
//! stops or resumes processes.
//!
//! A task that panics ends the world: its panic leaves [`World::step`]. If the unwinding task has
//! to wait in a destructor, the step panics in its place, and the thread stays in the state of a
//! panic ([`std::thread::panicking`]): it must not play another world.

mod world;

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::ptr;
use std::time::Duration;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, Yielder};
use rand::RngExt;
use rand_pcg::Pcg64Mcg;
use rapidhash::RapidHashMap;

use crate::time::{BEGIN, Instant, set_clock};
pub use world::{Step, World};

/// Bytes of the stack of a task. Memory is used as far as a task touches it.
const STACK_BYTES: usize = 1 << 20;

/// Stacks that a thread keeps for later tasks.
const STACKS_KEPT: usize = 64;

/// The properties of a world.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// All choices follow from it.
    pub seed: u64,
    /// A task loses its turn at one in this many locks taken, on average; at none if it is zero.
    pub switch_one_in: u32,
    /// The time that a step takes on the virtual clock.
    pub step: Duration,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            seed: 0,
            switch_one_in: 16,
            step: Duration::from_micros(1),
        }
    }
}

/// Why a task was resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wakeup {
    Called,
    TimeOver,
}

/// A group of tasks that is killed and stopped as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Process(u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Going,
    Stopped,
    Killed,
}

struct ProcessState {
    name: String,
    life: Life,
    /// Tasks that could run, of a stopped process.
    held: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Wait {
    /// The address of the queue; zero for a wait for the clock alone.
    queue: usize,
    what: &'static str,
    at: &'static Location<'static>,
    since: Instant,
    until: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// In the list of tasks that can run, held with its process, or running.
    Able,
    Waiting(Wait),
    Ended,
}

type Fiber = Coroutine<(), (), Option<Box<dyn Any + Send>>, DefaultStack>;

struct Task {
    name: String,
    process: Process,
    state: State,
    /// Number of its waits. A timer of an earlier wait is void.
    waits: u32,
    wakeup: Wakeup,
    /// `None` while the task runs, and after its end.
    fiber: Option<Fiber>,
    /// Null before the first turn.
    yielder: *const Yielder<(), ()>,
}

struct Scheduler {
    setup: Setup,
    choices: Pcg64Mcg,
    steps: u64,
    tasks: Vec<Task>,
    processes: Vec<ProcessState>,
    able: Vec<u32>,
    /// Moment, order of setting, task, number of its wait.
    timers: BinaryHeap<Reverse<(Instant, u64, u32, u32)>>,
    timers_set: u64,
    /// By address. Never iterated.
    queues: RapidHashMap<usize, VecDeque<u32>>,
    running: u32,
    /// The clock stands still until this step.
    frozen_until: u64,
}

thread_local! {
    static SCHEDULER: RefCell<Option<Scheduler>> = const { RefCell::new(None) };
    /// The yielder of the running task. Null while the driver runs.
    static YIELDER: Cell<*const Yielder<(), ()>> = const { Cell::new(ptr::null()) };
    /// Locks to be taken until the running task loses its turn.
    static LOCKS_LEFT: Cell<u32> = const { Cell::new(u32::MAX) };
    /// Tasks in queues.
    static QUEUED: Cell<usize> = const { Cell::new(0) };
    static STACKS: RefCell<Vec<DefaultStack>> = const { RefCell::new(Vec::new()) };
}

fn with<R>(f: impl FnOnce(&mut Scheduler) -> R) -> R {
    SCHEDULER.with_borrow_mut(|scheduler| f(scheduler.as_mut().expect("there is no world")))
}

/// Whether the caller is a task.
#[must_use]
pub fn is_task() -> bool {
    !YIELDER.get().is_null()
}

/// Gives the turn back to [`World::step`], until the task is resumed.
fn suspend() {
    let yielder = YIELDER.get();
    assert!(!yielder.is_null(), "the driver of a world must not wait");
    // SAFETY: the yielder belongs to the running task, which is the caller: its coroutine has not
    // returned. `World::step` sets it at each resume.
    let yielder = unsafe { &*yielder };
    yielder.suspend(());
}

/// Gives another task the turn.
pub fn yield_now() {
    if is_task() {
        with(|scheduler| {
            let running = scheduler.running;
            scheduler.make_able(running);
        });
        suspend();
    }
}

/// A point where the seed may give another task the turn: called for each lock taken.
#[inline]
pub fn pass() {
    let left = LOCKS_LEFT.get();
    LOCKS_LEFT.set(left.wrapping_sub(1));
    if left == 0 {
        lose_turn();
    }
}

#[cold]
fn lose_turn() {
    if is_task() {
        yield_now();
    }
}

/// Keeps the turn of a task until it waits, or until this is dropped.
#[derive(Debug)]
#[must_use]
pub struct Turn(u32);

/// From here on, locks taken do not give another task the turn.
pub fn keep_turn() -> Turn {
    Turn(LOCKS_LEFT.replace(u32::MAX))
}

impl Drop for Turn {
    fn drop(&mut self) {
        LOCKS_LEFT.set(self.0);
    }
}

/// A number below `bound`, chosen by the seed. Zero if `bound` is.
///
/// # Panics
/// Outside a world.
#[must_use]
pub fn choose(bound: u64) -> u64 {
    with(|scheduler| match bound {
        0 => 0,
        bound => scheduler.choices.random_range(0..bound),
    })
}

/// Moves the clock forward. Timers that it passes are due.
pub fn advance(duration: Duration) {
    // Outside a world the clock stands still.
    with(|_| set_clock(Instant::now() + duration));
}

/// Lets the clock stand still for this many steps, or until no task can run.
pub fn freeze(steps: u64) {
    with(|scheduler| scheduler.frozen_until = scheduler.steps.saturating_add(steps));
}

/// The time since the world began.
#[must_use]
pub fn elapsed() -> Duration {
    Instant::now().duration_since(BEGIN)
}

/// Waits for a time of the virtual clock.
#[track_caller]
pub fn sleep(duration: Duration) {
    let until = Instant::now().checked_add(duration);
    wait(0, "the clock", Location::caller(), until);
}

fn wait(
    queue: usize,
    what: &'static str,
    at: &'static Location<'static>,
    until: Option<Instant>,
) -> Wakeup {
    assert!(
        is_task(),
        "the driver of a world would wait for {what} at {at}"
    );
    with(|scheduler| scheduler.begin_wait(queue, what, at, until));
    suspend();
    with(|scheduler| scheduler.tasks[scheduler.running as usize].wakeup)
}

/// Tasks that wait to be woken. It is known by its address, so it must not move while a task waits.
// One byte, so that no other queue has its address.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Queue(u8);

impl Queue {
    /// A queue without tasks.
    #[must_use]
    pub const fn new() -> Queue {
        Queue(0)
    }

    fn key(&self) -> usize {
        ptr::from_ref(self).addr()
    }

    /// Waits to be woken, until a moment at the latest. Returns whether the task was woken. `what`
    /// names the awaited thing in a few words, for reports.
    ///
    /// # Panics
    /// Outside a task.
    #[track_caller]
    pub fn wait(&self, what: &'static str, until: Option<Instant>) -> bool {
        wait(self.key(), what, Location::caller(), until) == Wakeup::Called
    }

    /// Wakes one task, chosen by the seed. Returns whether there was one.
    #[inline]
    pub fn wake_one(&self) -> bool {
        QUEUED.get() > 0 && with(|scheduler| scheduler.wake_one(self.key()))
    }

    /// Wakes all tasks. Returns their number.
    #[inline]
    pub fn wake_all(&self) -> usize {
        match QUEUED.get() {
            0 => 0,
            _ => with(|scheduler| scheduler.wake_all(self.key())),
        }
    }
}

/// All processes of the world, in the order of their start. None outside a world.
pub fn processes() -> impl Iterator<Item = Process> {
    let count = SCHEDULER.with_borrow(|scheduler| {
        scheduler
            .as_ref()
            .map_or(0, |scheduler| scheduler.processes.len())
    });
    (0..u32::try_from(count).unwrap_or(u32::MAX)).map(Process)
}

impl Process {
    /// The process of the running task.
    #[must_use]
    pub fn current() -> Option<Process> {
        is_task().then(|| with(|scheduler| scheduler.tasks[scheduler.running as usize].process))
    }

    /// Its number in the world: 1, 2, ... in the order of their start.
    #[must_use]
    pub fn id(self) -> u32 {
        self.0 + 1
    }

    /// Whether it has not been killed.
    #[must_use]
    pub fn is_alive(self) -> bool {
        with(|scheduler| scheduler.process(self).life != Life::Killed)
    }

    /// Whether it is stopped.
    #[must_use]
    pub fn is_stopped(self) -> bool {
        with(|scheduler| scheduler.process(self).life == Life::Stopped)
    }

    /// Number of its tasks that have not ended.
    #[must_use]
    pub fn tasks(self) -> usize {
        with(|scheduler| {
            let own = |task: &&Task| task.process == self && !matches!(task.state, State::Ended);
            scheduler.tasks.iter().filter(own).count()
        })
    }

    /// Kills it: none of its tasks runs again, and nothing of them is destroyed. A task that kills
    /// its own process does not return.
    pub fn kill(self) {
        let own = with(|scheduler| scheduler.kill(self));
        if own {
            suspend();
        }
    }

    /// Stops it: none of its tasks runs until [`Process::resume`]. A task that stops its own
    /// process goes on until it waits.
    pub fn stop(self) {
        with(|scheduler| scheduler.stop(self));
    }

    /// Lets a stopped process go on.
    pub fn resume(self) {
        with(|scheduler| scheduler.resume(self));
    }
}

/// The number of the running task.
///
/// # Panics
/// Outside a task.
pub(crate) fn current() -> u32 {
    assert!(is_task(), "only a task has a number");
    with(|scheduler| scheduler.running)
}

/// Starts a task that can run at once. Returns its number.
pub(crate) fn start(process: Process, name: String, f: impl FnOnce() + 'static) -> u32 {
    let stack = STACKS.with_borrow_mut(Vec::pop).unwrap_or_else(|| {
        DefaultStack::new(STACK_BYTES).expect("no memory for the stack of a task")
    });
    let fiber = Coroutine::with_stack(stack, move |yielder: &Yielder<(), ()>, ()| {
        YIELDER.set(yielder);
        with(|scheduler| {
            let running = scheduler.running as usize;
            scheduler.tasks[running].yielder = yielder;
        });
        catch_unwind(AssertUnwindSafe(f)).err()
    });
    with(|scheduler| scheduler.add(process, name, fiber))
}

/// Takes the memory for the list of kept stacks, which outlives a run.
pub(crate) fn make_room_for_stacks() {
    STACKS.with_borrow_mut(|stacks| stacks.reserve(STACKS_KEPT.saturating_sub(stacks.len())));
}

/// Keeps the stack of a task that will not run again.
fn retire(mut fiber: Fiber) {
    if !fiber.done() {
        // SAFETY: the objects on the stack are leaked, as by `mem::forget`: nothing of the task
        // runs again. The memory of the stack is used again. A reference to it can be held by the
        // task itself, or by tasks of a scope in it: they belong to the same process and die with
        // it.
        unsafe { fiber.force_reset() };
    }
    let stack = fiber.into_stack();
    STACKS.with_borrow_mut(|stacks| {
        if stacks.len() < STACKS_KEPT {
            stacks.push(stack);
        }
    });
}

impl Scheduler {
    fn process(&mut self, process: Process) -> &mut ProcessState {
        &mut self.processes[process.0 as usize]
    }

    fn add(&mut self, process: Process, name: String, fiber: Fiber) -> u32 {
        let task = u32::try_from(self.tasks.len()).expect("too many tasks");
        self.tasks.push(Task {
            name,
            process,
            state: State::Able,
            waits: 0,
            wakeup: Wakeup::Called,
            fiber: Some(fiber),
            yielder: ptr::null(),
        });
        self.make_able(task);
        task
    }

    fn make_able(&mut self, task: u32) {
        let process = self.tasks[task as usize].process;
        match self.process(process).life {
            Life::Going => self.able.push(task),
            Life::Stopped => self.process(process).held.push(task),
            Life::Killed => {}
        }
    }

    fn begin_wait(
        &mut self,
        queue: usize,
        what: &'static str,
        at: &'static Location<'static>,
        until: Option<Instant>,
    ) {
        let running = self.running;
        let task = &mut self.tasks[running as usize];
        task.waits = task.waits.wrapping_add(1);
        task.state = State::Waiting(Wait {
            queue,
            what,
            at,
            since: Instant::now(),
            until,
        });
        if let Some(until) = until {
            self.timers_set += 1;
            self.timers
                .push(Reverse((until, self.timers_set, running, task.waits)));
        }
        if queue != 0 {
            self.queues.entry(queue).or_default().push_back(running);
            QUEUED.set(QUEUED.get() + 1);
        }
    }

    fn wake(&mut self, task: u32, wakeup: Wakeup) {
        let woken = &mut self.tasks[task as usize];
        woken.state = State::Able;
        woken.wakeup = wakeup;
        self.make_able(task);
    }

    fn wake_one(&mut self, queue: usize) -> bool {
        let Some(waiting) = self.queues.get_mut(&queue) else {
            return false;
        };
        let at = match waiting.len() {
            1 => 0,
            count => self.choices.random_range(0..count),
        };
        let task = waiting.swap_remove_back(at);
        if waiting.is_empty() {
            self.queues.remove(&queue);
        }
        QUEUED.set(QUEUED.get() - 1);
        self.wake(task.expect("a queue without tasks"), Wakeup::Called);
        true
    }

    fn wake_all(&mut self, queue: usize) -> usize {
        let woken = self.queues.remove(&queue).unwrap_or_default();
        QUEUED.set(QUEUED.get() - woken.len());
        for &task in &woken {
            self.wake(task, Wakeup::Called);
        }
        woken.len()
    }

    /// Takes a task out of the queue in which it waits.
    fn leave_queue(&mut self, task: u32, queue: usize) {
        let Some(waiting) = self.queues.get_mut(&queue) else {
            return;
        };
        waiting.retain(|&other| other != task);
        if waiting.is_empty() {
            self.queues.remove(&queue);
        }
        QUEUED.set(QUEUED.get() - 1);
    }

    /// Wakes the tasks whose time is over.
    fn expire(&mut self) {
        while let Some(&Reverse((until, _, task, waits))) = self.timers.peek()
            && until <= Instant::now()
        {
            self.timers.pop();
            if let Some(wait) = self.awaited(task, waits) {
                if wait.queue != 0 {
                    self.leave_queue(task, wait.queue);
                }
                self.wake(task, Wakeup::TimeOver);
            }
        }
    }

    /// The wait that a timer is about, if the task is still in it.
    fn awaited(&self, task: u32, waits: u32) -> Option<Wait> {
        let task = &self.tasks[task as usize];
        match task.state {
            State::Waiting(wait) if task.waits == waits => Some(wait),
            _ => None,
        }
    }

    /// The task of the next step. The clock jumps to the next timer if no task can run.
    fn next(&mut self) -> Option<u32> {
        if self.steps >= self.frozen_until {
            set_clock(Instant::now() + self.setup.step);
            self.expire();
        }
        while self.able.is_empty() {
            let &Reverse((until, _, task, waits)) = self.timers.peek()?;
            if self.awaited(task, waits).is_none() {
                self.timers.pop();
                continue;
            }
            set_clock(until.max(Instant::now()));
            self.expire();
        }
        let at = match self.able.len() {
            1 => 0,
            count => self.choices.random_range(0..count),
        };
        Some(self.able.swap_remove(at))
    }

    fn draw_locks_left(&mut self) -> u32 {
        match self.setup.switch_one_in {
            0 => u32::MAX,
            mean => self.choices.random_range(0..=2 * mean.saturating_sub(1)),
        }
    }

    /// Whether the running task is one of the killed ones.
    fn kill(&mut self, process: Process) -> bool {
        let state = self.process(process);
        state.life = Life::Killed;
        state.held.clear();
        let tasks = &self.tasks;
        self.able
            .retain(|&task| tasks[task as usize].process != process);
        let mut own = false;
        for id in 0..self.tasks.len() {
            let task = &mut self.tasks[id];
            if task.process != process {
                continue;
            }
            if let State::Waiting(wait) = std::mem::replace(&mut task.state, State::Ended)
                && wait.queue != 0
            {
                self.leave_queue(u32::try_from(id).expect("a known task"), wait.queue);
            }
            // The running one has no fiber here: `World::step` retires it.
            match self.tasks[id].fiber.take() {
                Some(fiber) => retire(fiber),
                None => own |= self.running as usize == id && is_task(),
            }
        }
        own
    }

    fn stop(&mut self, process: Process) {
        if self.process(process).life != Life::Going {
            return;
        }
        let tasks = &self.tasks;
        let (held, able) = self
            .able
            .iter()
            .partition(|&&task| tasks[task as usize].process == process);
        self.able = able;
        let state = self.process(process);
        state.life = Life::Stopped;
        state.held = held;
    }

    fn resume(&mut self, process: Process) {
        let state = self.process(process);
        if state.life == Life::Stopped {
            state.life = Life::Going;
            let held = std::mem::take(&mut state.held);
            self.able.extend(held);
        }
    }

    /// The running task has returned, or was killed.
    fn end(&mut self, task: u32) {
        self.tasks[task as usize].state = State::Ended;
    }
}

//! A run of the scheduler, as its driver sees it: steps, and a report of the waiting tasks.

use std::collections::BinaryHeap;
use std::fmt;
use std::marker::PhantomData;
use std::panic::resume_unwind;
use std::ptr;

use corosensei::CoroutineResult;
use rand::SeedableRng;
use rand_pcg::Pcg64Mcg;
use rapidhash::RapidHashMap;

use super::{
    LOCKS_LEFT, Life, Process, ProcessState, QUEUED, SCHEDULER, Scheduler, Setup, State, Wait,
    YIELDER, retire, with,
};
use crate::time::{BEGIN, Instant, set_clock};

/// The outcome of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A task ran until it waited, lost its turn or ended.
    Ran,
    /// No task can run, and no timer is set: all have ended, or each waits for another one.
    Stuck,
}

/// All tasks of one run, on one thread. There is one world on a thread at a time.
pub struct World {
    /// The world belongs to its thread.
    _thread: PhantomData<*const ()>,
}

impl World {
    /// A world without processes.
    ///
    /// # Panics
    /// If the thread has one already.
    #[must_use]
    pub fn new(setup: Setup) -> World {
        let scheduler = Scheduler {
            setup,
            choices: Pcg64Mcg::seed_from_u64(setup.seed),
            steps: 0,
            tasks: Vec::new(),
            processes: Vec::new(),
            able: Vec::new(),
            timers: BinaryHeap::new(),
            timers_set: 0,
            queues: RapidHashMap::default(),
            running: 0,
            frozen_until: 0,
        };
        SCHEDULER.with_borrow_mut(|own| {
            assert!(own.is_none(), "two worlds on one thread");
            *own = Some(scheduler);
        });
        set_clock(BEGIN);
        World {
            _thread: PhantomData,
        }
    }

    /// A new process.
    #[must_use]
    pub fn process(&self, name: &str) -> Process {
        with(|scheduler| {
            scheduler.processes.push(ProcessState {
                name: name.to_owned(),
                life: Life::Going,
                held: Vec::new(),
            });
            Process(u32::try_from(scheduler.processes.len() - 1).expect("too many processes"))
        })
    }

    /// Lets one task run until it waits, loses its turn or ends.
    ///
    /// # Panics
    /// With the panic of the task.
    pub fn step(&self) -> Step {
        let Some((task, mut fiber)) = with(|scheduler| {
            let task = scheduler.next()?;
            scheduler.steps += 1;
            scheduler.running = task;
            LOCKS_LEFT.set(scheduler.draw_locks_left());
            let running = &mut scheduler.tasks[task as usize];
            YIELDER.set(running.yielder);
            Some((task, running.fiber.take().expect("a task that can run")))
        }) else {
            return Step::Stuck;
        };
        let outcome = fiber.resume(());
        YIELDER.set(ptr::null());
        LOCKS_LEFT.set(u32::MAX);
        let is_killed =
            with(|scheduler| matches!(scheduler.tasks[task as usize].state, State::Ended));
        match outcome {
            CoroutineResult::Yield(()) if std::thread::panicking() => {
                retire(fiber);
                with(|scheduler| scheduler.end(task));
                panic!("a task waits while it panics: {}", self.report());
            }
            CoroutineResult::Yield(()) if is_killed => retire(fiber),
            CoroutineResult::Yield(()) => with(|scheduler| {
                scheduler.tasks[task as usize].fiber = Some(fiber);
            }),
            CoroutineResult::Return(panicked) => {
                retire(fiber);
                with(|scheduler| scheduler.end(task));
                if let Some(panicked) = panicked {
                    resume_unwind(panicked);
                }
            }
        }
        Step::Ran
    }

    /// Steps until `is_over`.
    ///
    /// # Panics
    /// With the panic of a task; or, with a report, if no task can run before.
    pub fn run_until(&self, mut is_over: impl FnMut() -> bool) {
        while !is_over() {
            let step = self.step();
            assert!(step == Step::Ran, "no task can run:\n{}", self.report());
        }
    }

    /// Steps until all tasks have ended.
    ///
    /// # Panics
    /// With the panic of a task; or, with a report, if no task can run before.
    pub fn run(&self) {
        while self.step() == Step::Ran {}
        let tasks = self.report();
        assert!(tasks.is_empty(), "no task can run:\n{tasks}");
    }

    /// The present moment.
    #[must_use]
    pub fn now(&self) -> Instant {
        Instant::now()
    }

    /// Number of steps so far.
    #[must_use]
    pub fn steps(&self) -> u64 {
        with(|scheduler| scheduler.steps)
    }

    /// The tasks that have not ended, one a line, each with its wait.
    #[must_use]
    pub fn report(&self) -> String {
        with(|scheduler| scheduler.report())
    }
}

impl Scheduler {
    fn report(&self) -> String {
        let now = Instant::now();
        let mut lines = String::new();
        for task in &self.tasks {
            let process = &self.processes[task.process.0 as usize];
            let state = match task.state {
                State::Ended => continue,
                State::Able => "can run".to_owned(),
                State::Waiting(wait) => {
                    let limit = wait.until.map_or_else(String::new, |until| {
                        format!(
                            ", {} ms more at most",
                            until.duration_since(now).as_millis()
                        )
                    });
                    let since = now.duration_since(wait.since).as_millis();
                    let Wait { what, at, .. } = wait;
                    format!("waits for {what} at {at} for {since} ms{limit}")
                }
            };
            let stopped = match process.life {
                Life::Stopped => " (stopped)",
                Life::Going | Life::Killed => "",
            };
            let (process, name) = (&process.name, &task.name);
            lines.push_str(&format!("  {process}{stopped}, {name}: {state}\n"));
        }
        lines
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "World {{\n{}}}", self.report())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let scheduler = SCHEDULER.with_borrow_mut(Option::take);
        QUEUED.set(0);
        YIELDER.set(ptr::null());
        set_clock(BEGIN);
        for task in scheduler.into_iter().flat_map(|scheduler| scheduler.tasks) {
            task.fiber.into_iter().for_each(retire);
        }
    }
}

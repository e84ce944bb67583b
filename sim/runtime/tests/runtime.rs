//! The scheduler: the same seed gives the same run; timers, kills, stops and deadlocks.

#![allow(clippy::unwrap_used)]

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use larder_sim_runtime::sync::{Condvar, Mutex, MutexGuard, RwLock};
use larder_sim_runtime::time::Instant;
use larder_sim_runtime::{Process, Queue, Setup, Step, World, task, thread};

fn world(seed: u64) -> World {
    World::new(Setup {
        seed,
        switch_one_in: 2,
        ..Setup::default()
    })
}

/// The order in which three tasks take a lock, 10 times each.
fn order(seed: u64) -> Vec<usize> {
    let world = world(seed);
    let process = world.process("process");
    let order = Arc::new(Mutex::new(Vec::new()));
    for own in 0..3 {
        let order = order.clone();
        world.spawn(process, "task", move || {
            for _ in 0..10 {
                order.lock().push(own);
            }
        });
    }
    world.run();
    Arc::into_inner(order).unwrap().into_inner()
}

#[test]
fn a_seed_gives_one_order_and_seeds_give_many() {
    assert_eq!(order(7), order(7));
    let orders: BTreeSet<Vec<usize>> = (0..20).map(order).collect();
    assert!(orders.len() > 15, "{} orders of 20 seeds", orders.len());
    assert!(orders.iter().all(|order| order.len() == 30));
}

#[test]
fn the_clock_jumps_to_the_next_timer() {
    let world = world(0);
    let process = world.process("process");
    let begun = world.now();
    let ended = Arc::new(Mutex::new(Vec::new()));
    for hours in [3, 1, 2] {
        let ended = ended.clone();
        world.spawn(process, "sleeper", move || {
            thread::sleep(Duration::from_secs(3600 * hours));
            ended.lock().push(hours);
        });
    }
    world.run();
    assert_eq!(*ended.lock(), [1, 2, 3]);
    let passed = world.now().duration_since(begun);
    assert!((10_800..10_801).contains(&passed.as_secs()), "{passed:?}");
}

#[test]
fn a_spinning_task_sees_time_pass() {
    let world = world(0);
    let process = world.process("process");
    world.spawn(process, "spinner", || {
        let until = Instant::now() + Duration::from_micros(50);
        while Instant::now() < until {
            thread::yield_now();
        }
    });
    world.run();
    assert!(world.steps() <= 60);
}

#[test]
fn a_condition_is_notified_or_times_out() {
    let world = world(3);
    let process = world.process("process");
    let pair = Arc::new((Mutex::new(0), Condvar::new()));
    let other = pair.clone();
    let waiter = world.spawn(process, "waiter", move || {
        let mut count = other.0.lock();
        while *count == 0 {
            other.1.wait(&mut count);
        }
        let limit = Duration::from_millis(5);
        let late = other.1.wait_for(&mut count, limit).timed_out();
        assert!(!other.0.is_locked() || late);
        late
    });
    world.spawn(process, "notifier", move || {
        thread::sleep(Duration::from_millis(1));
        *pair.0.lock() += 1;
        pair.1.notify_one();
    });
    world.run();
    assert!(waiter.take().unwrap());
}

#[test]
fn a_mutex_excludes_whatever_the_order() {
    for seed in 0..50 {
        let world = world(seed);
        let process = world.process("process");
        let value = Arc::new(Mutex::new(0));
        for _ in 0..4 {
            let value = value.clone();
            world.spawn(process, "adder", move || {
                for _ in 0..5 {
                    let mut held = value.lock();
                    let before = *held;
                    thread::yield_now();
                    *held = before + 1;
                    MutexGuard::unlocked(&mut held, thread::yield_now);
                    drop(held);
                }
            });
        }
        world.run();
        assert_eq!(*value.lock(), 20);
    }
}

#[test]
fn a_read_write_lock_excludes_whatever_the_order() {
    for seed in 0..50 {
        let world = world(seed);
        let process = world.process("process");
        let lock = Arc::new(RwLock::new((0, 0)));
        for own in 0..6 {
            let lock = lock.clone();
            world.spawn(process, "user", move || {
                for _ in 0..4 {
                    let change = |(left, right): &mut (i32, i32)| {
                        *left += 1;
                        thread::yield_now();
                        *right += 1;
                    };
                    if own % 2 == 0 {
                        let held = lock.read();
                        let (left, right) = *held;
                        assert_eq!(left, right);
                        thread::yield_now();
                        assert_eq!(*held, (left, right), "it changed under a reader");
                    } else {
                        change(&mut lock.write());
                    }
                }
            });
        }
        world.run();
        assert_eq!(*lock.read(), (12, 12));
    }
}

#[test]
fn threads_belong_to_the_process_of_their_creator() {
    let world = world(1);
    let processes = [world.process("a"), world.process("b")];
    let handles = processes.map(|process| {
        world.spawn(process, "main", || {
            let child = thread::Builder::new().name("child".to_owned());
            let child = child.spawn(|| Process::current().unwrap()).unwrap();
            child.join().unwrap()
        })
    });
    world.run();
    assert_eq!(handles.map(|handle| handle.take().unwrap()), processes);
}

/// Counts the drops of a value.
struct Dropped(Arc<AtomicU32>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn nothing_of_a_killed_process_runs_again() {
    for seed in 0..30 {
        let world = world(seed);
        let [dies, lives] = [world.process("dies"), world.process("lives")];
        let drops = Arc::new(AtomicU32::new(0));
        let counts = Arc::new([const { AtomicU32::new(0) }; 2]);
        for (at, process) in [(0, dies), (1, lives)] {
            for _ in 0..3 {
                let (counts, drops) = (counts.clone(), drops.clone());
                world.spawn(process, "counter", move || {
                    let dropped = Dropped(drops);
                    for _ in 0..20 {
                        counts[at].fetch_add(1, Ordering::Relaxed);
                        thread::sleep(Duration::from_millis(1));
                    }
                    drop(dropped);
                });
            }
        }
        world.run_until(|| counts[0].load(Ordering::Relaxed) >= 10);
        dies.kill();
        let at_kill = counts[0].load(Ordering::Relaxed);
        assert_eq!((dies.is_alive(), dies.tasks()), (false, 0));
        world.run();
        assert_eq!(counts[0].load(Ordering::Relaxed), at_kill);
        assert_eq!(counts[1].load(Ordering::Relaxed), 60);
        assert_eq!(
            drops.load(Ordering::Relaxed),
            3,
            "a killed task was unwound"
        );
    }
}

#[test]
fn a_process_can_kill_itself() {
    let world = world(1);
    let process = world.process("process");
    let after = Rc::new(RefCell::new(false));
    let seen = after.clone();
    world.spawn(process, "main", move || {
        let own = Process::current().unwrap();
        thread::spawn(|| thread::sleep(Duration::from_secs(1)));
        own.kill();
        *seen.borrow_mut() = true;
    });
    world.run();
    assert!(!*after.borrow());
    assert_eq!(process.tasks(), 0);
}

#[test]
fn a_stopped_process_goes_on_where_it_was() {
    let world = world(1);
    let [stopped, other] = [world.process("stopped"), world.process("other")];
    let count = Arc::new(AtomicU32::new(0));
    let counted = count.clone();
    world.spawn(stopped, "counter", move || {
        for _ in 0..100 {
            counted.fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(1));
        }
    });
    world.run_until(|| count.load(Ordering::Relaxed) == 50);
    stopped.stop();
    let sleeper = world.spawn(other, "sleeper", || thread::sleep(Duration::from_secs(9)));
    world.run_until(|| sleeper.is_finished());
    assert_eq!(count.load(Ordering::Relaxed), 50);
    assert!(
        world
            .report()
            .contains("stopped (stopped), counter: can run")
    );
    stopped.resume();
    world.run();
    assert_eq!(count.load(Ordering::Relaxed), 100);
}

#[test]
fn a_deadlock_names_each_task_and_its_wait() {
    let world = world(2);
    let process = world.process("clumsy");
    let locks = Arc::new([Mutex::new(()), Mutex::new(())]);
    for first in 0..2 {
        let locks = locks.clone();
        world.spawn(process, &format!("task {first}"), move || {
            let _first = locks[first].lock();
            thread::sleep(Duration::from_millis(1));
            let _second = locks[1 - first].lock();
        });
    }
    let panicked = catch_unwind(AssertUnwindSafe(|| world.run())).unwrap_err();
    let text = panicked.downcast_ref::<String>().unwrap();
    for task in ["task 0", "task 1"] {
        let line = format!("clumsy, {task}: waits for a mutex at sim/runtime/tests/runtime.rs:");
        assert!(text.contains(&line), "{text}");
    }
}

#[test]
fn a_panic_of_a_task_leaves_the_step() {
    let own = world(0);
    let process = own.process("process");
    own.spawn(process, "task", || panic!("of the task"));
    let panicked = catch_unwind(AssertUnwindSafe(|| own.run())).unwrap_err();
    assert_eq!(*panicked.downcast_ref::<&str>().unwrap(), "of the task");
    drop(own);
    // The thread can play another world.
    assert_eq!(order(1).len(), 30);
}

#[test]
fn a_wait_while_unwinding_ends_the_world() {
    struct Waits;
    impl Drop for Waits {
        fn drop(&mut self) {
            thread::sleep(Duration::from_secs(1));
        }
    }
    let played = std::thread::spawn(|| {
        let world = world(0);
        let process = world.process("process");
        world.spawn(process, "task", || {
            let _waits = Waits;
            panic!("of the task");
        });
        world.run();
    });
    let panicked = played.join().unwrap_err();
    let text = panicked.downcast_ref::<String>().unwrap();
    assert!(text.starts_with("a task waits while it panics"), "{text}");
}

#[test]
fn a_queue_wakes_one_or_all() {
    let world = world(5);
    let process = world.process("process");
    let queue = Arc::new(Queue::new());
    let woken = Arc::new(AtomicU32::new(0));
    for _ in 0..5 {
        let (queue, woken) = (queue.clone(), woken.clone());
        world.spawn(process, "waiter", move || {
            assert!(queue.wait("a test", None));
            woken.fetch_add(1, Ordering::Relaxed);
        });
    }
    while world.step() == Step::Ran {}
    assert!(queue.wake_one());
    while world.step() == Step::Ran {}
    assert_eq!(woken.load(Ordering::Relaxed), 1);
    assert_eq!(queue.wake_all(), 4);
    world.run();
    assert!(!queue.wake_one());
}

#[test]
fn a_killed_waiter_takes_no_wakeup() {
    for seed in 0..20 {
        let world = world(seed);
        let [dies, lives] = [world.process("dies"), world.process("lives")];
        let queue = Arc::new(Queue::new());
        let woken = Arc::new(AtomicBool::new(false));
        let other = queue.clone();
        world.spawn(dies, "waiter", move || other.wait("a test", None));
        let (other, seen) = (queue.clone(), woken.clone());
        world.spawn(lives, "waiter", move || {
            other.wait("a test", None);
            seen.store(true, Ordering::Relaxed);
        });
        while world.step() == Step::Ran {}
        dies.kill();
        assert!(queue.wake_one());
        world.run();
        assert!(woken.load(Ordering::Relaxed));
    }
}

#[test]
fn outside_a_world_free_locks_work_and_the_clock_stands_still() {
    let lock = Mutex::new(1);
    *lock.lock() += 1;
    assert_eq!(*lock.lock(), 2);
    assert_eq!(Condvar::new().notify_all(), 0);
    assert_eq!(Instant::now(), Instant::now());
    assert!(!task::is_task());
}

//! Files, locks and sockets of the simulated machine, and their ends when a process is killed.

#![allow(clippy::unwrap_used)]

use std::cell::{Cell, RefCell};
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use larder_sim_runtime::dice::Dice;
use larder_sim_runtime::files::{self, Handle, How, Lock};
use larder_sim_runtime::medium::Content;
use larder_sim_runtime::sockets::{self, UnixStream};
use larder_sim_runtime::{Event, Machine, Odds, Process, Setup, Step, World, thread};

const BLOCK: usize = 4096;
const HOW: How = How {
    writes: true,
    alone: false,
};
const PATIENCE: Duration = Duration::from_secs(2);

fn volume() -> &'static Path {
    Path::new("/store")
}

fn socket() -> &'static Path {
    Path::new("/store.sock")
}

struct Run {
    // Dropped before the world: its queues belong to the world.
    machine: Machine,
    world: World,
}

impl Run {
    fn new(seed: u64, odds: Odds) -> Run {
        let setup = Setup {
            seed,
            ..Setup::default()
        };
        let world = World::new(setup);
        let machine = Machine::new(Dice::new(seed), odds, true);
        machine.add_volume(volume(), 64);
        Run { machine, world }
    }

    fn spawn(&self, name: &str, work: impl FnOnce() + 'static) -> Process {
        let process = self.world.process(name);
        self.world.spawn(process, name, work);
        process
    }

    /// Steps until `is_over`, or until nothing can run.
    fn until(&self, is_over: impl Fn() -> bool) {
        while !is_over() {
            self.machine.settle();
            if self.world.step() == Step::Stuck {
                return;
            }
        }
    }

    fn to_the_end(&self) {
        self.until(|| false);
        assert_eq!(self.world.report(), "");
    }

    fn word_at(&self, block: usize) -> Content {
        self.machine
            .with_medium(volume(), |medium| medium.visible(block).clone())
    }
}

fn open() -> Handle {
    files::open(volume(), HOW).unwrap().0
}

fn write(file: &Handle, block: usize, word: u64) {
    let bytes: Vec<u8> = word.to_le_bytes().repeat(BLOCK / 8);
    let written = files::write_at(file, &bytes, (block * BLOCK) as u64);
    assert_eq!(written.unwrap(), BLOCK);
}

fn slow() -> Odds {
    Odds {
        transfer: Duration::from_millis(50),
        ..Odds::default()
    }
}

#[test]
fn a_synced_block_survives_a_power_loss_and_another_may_not() {
    let mut lost = 0;
    for seed in 0..20 {
        let run = Run::new(seed, Odds::default());
        let process = run.spawn("writer", || {
            let file = open();
            write(&file, 1, 11);
            files::sync_data(&file).unwrap();
            write(&file, 2, 22);
            let mut bytes = [0; BLOCK];
            files::read_at(&file, &mut bytes, BLOCK as u64).unwrap();
            assert_eq!(bytes[..8], 11_u64.to_le_bytes());
        });
        run.to_the_end();
        run.machine.kill(process);
        assert_eq!(run.word_at(2), Content::Data(22), "the kernel has it");
        run.machine.lose_power();
        assert_eq!(run.word_at(1), Content::Data(11));
        lost += usize::from(run.word_at(2) == Content::Zero);
    }
    assert!((1..20).contains(&lost), "{lost} of 20");
}

/// Kills a process in the middle of a write, under a lock. Returns the events that this led to.
fn killed_while_writing(seed: u64) -> Vec<Event> {
    let run = Run::new(seed, slow());
    let is_locked = Rc::new(Cell::new(false));
    let process = run.spawn("writer", {
        let is_locked = is_locked.clone();
        move || {
            let file = open();
            files::lock(&file, Lock::Exclusive).unwrap();
            files::lock_bytes(&file, 100..101, true).unwrap();
            is_locked.set(true);
            write(&file, 3, 33);
            unreachable!("it is killed before");
        }
    });
    run.until(|| is_locked.get());
    run.machine.kill(process);
    let is_in_flight = run.machine.orphans() > 0;
    let outcome = Rc::new(Cell::new(false));
    run.spawn("next", {
        let outcome = outcome.clone();
        move || {
            let file = open();
            let is_free = files::lock(&file, Lock::Exclusive).is_ok();
            let are_bytes_free = !files::are_bytes_locked(&file, 0..1000).unwrap();
            assert_eq!((is_free, are_bytes_free), (!is_in_flight, !is_in_flight));
            while files::lock(&file, Lock::Exclusive).is_err() {
                thread::sleep(Duration::from_millis(1));
            }
            // All that the killed process wrote is over.
            let mut bytes = [0; BLOCK];
            files::read_at(&file, &mut bytes, 3 * BLOCK as u64).unwrap();
            write(&file, 3, 44);
            outcome.set(true);
        }
    });
    run.to_the_end();
    assert!(outcome.get() && run.machine.orphans() == 0);
    assert_eq!(run.word_at(3), Content::Data(44));
    run.machine.counts().into_keys().collect()
}

#[test]
fn the_locks_of_a_killed_process_last_until_its_last_write_is_over() {
    let mut events: Vec<Event> = (0..20).flat_map(killed_while_writing).collect();
    events.sort_unstable();
    events.dedup();
    for event in [
        Event::OrphanWrite,
        Event::UnstartedWrite,
        Event::LockKeptByTransfer,
    ] {
        assert!(events.contains(&event), "{event:?} in {events:?}");
    }
}

#[test]
fn a_write_of_a_stopped_process_is_carried_out() {
    let run = Run::new(1, slow());
    let begun = Rc::new(Cell::new(false));
    let process = run.spawn("writer", {
        let begun = begun.clone();
        move || {
            let file = open();
            begun.set(true);
            write(&file, 3, 33);
        }
    });
    run.until(|| begun.get());
    process.stop();
    run.spawn("clock", || thread::sleep(Duration::from_secs(1)));
    run.until(|| false);
    assert_eq!(run.word_at(3), Content::Data(33));
    process.resume();
    run.to_the_end();
}

#[test]
fn a_closed_file_gives_up_its_locks() {
    let run = Run::new(1, Odds::default());
    run.spawn("both", || {
        let (one, other) = (open(), open());
        files::lock(&one, Lock::Exclusive).unwrap();
        for lock in [Lock::Exclusive, Lock::Shared] {
            let refused = files::lock(&other, lock).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::WouldBlock);
        }
        drop(one);
        files::lock(&other, Lock::Shared).unwrap();
    });
    run.to_the_end();
}

/// A server that accepts one connection and gives it to `serve`, and a client.
fn talk(
    run: &Run,
    serve: impl FnOnce(UnixStream) + 'static,
    ask: impl FnOnce(UnixStream) + 'static,
) -> [Process; 2] {
    let listening = Rc::new(Cell::new(false));
    let server = run.spawn("server", {
        let listening = listening.clone();
        move || {
            let listener = sockets::listen(socket(), None, None).unwrap();
            listening.set(true);
            serve(listener.accept().unwrap().0);
        }
    });
    run.until(|| listening.get());
    let client = run.spawn("client", || {
        ask(sockets::connect(socket(), PATIENCE).unwrap());
    });
    [server, client]
}

#[test]
fn bytes_arrive_in_order_however_few_at_once() {
    let odds = Odds {
        socket_short: 0.5,
        signal: 0.5,
        socket_bytes: 1000,
        ..Odds::default()
    };
    let run = Run::new(3, odds);
    let sent: Vec<u8> = (0..10_000_u32).map(|at| at as u8).collect();
    let expected = sent.clone();
    talk(
        &run,
        move |stream| {
            let mut got = vec![0; expected.len()];
            (&stream).read_exact(&mut got).unwrap();
            assert_eq!(got, expected);
            assert_eq!((&stream).read_to_end(&mut got).unwrap(), 0);
        },
        move |stream| (&stream).write_all(&sent).unwrap(),
    );
    run.to_the_end();
    let counts = run.machine.counts();
    assert!(counts.contains_key(&Event::SocketShort) && counts.contains_key(&Event::Signal));
}

#[test]
fn the_connections_of_a_killed_process_end_after_the_bytes_that_it_sent() {
    let run = Run::new(4, Odds::default());
    let got = Rc::new(RefCell::new(Vec::new()));
    let sent = Rc::new(Cell::new(false));
    let [_, client] = talk(
        &run,
        {
            let got = got.clone();
            move |stream| {
                // Not before the end of the peer.
                thread::sleep(Duration::from_secs(1));
                (&stream).read_to_end(&mut got.borrow_mut()).unwrap();
                assert_eq!(
                    (&stream).write(&[1]).unwrap_err().kind(),
                    ErrorKind::BrokenPipe
                );
            }
        },
        {
            let sent = sent.clone();
            move |stream| {
                (&stream).write_all(b"last words").unwrap();
                sent.set(true);
                thread::sleep(Duration::from_secs(1000));
            }
        },
    );
    run.until(|| sent.get());
    run.machine.kill(client);
    run.to_the_end();
    assert_eq!(*got.borrow(), b"last words");
    assert_eq!(run.machine.counts()[&Event::ConnectionOfKilled], 1);
}

#[test]
fn a_socket_without_a_listener_refuses_and_one_that_was_removed_is_not_found() {
    let run = Run::new(5, Odds::default());
    let (server, kinds) = (Rc::new(Cell::new(None)), Rc::new(RefCell::new(Vec::new())));
    let process = run.spawn("server", {
        let server = server.clone();
        move || {
            let listener = sockets::listen(socket(), None, None).unwrap();
            server.set(Some(()));
            let _ = listener.accept();
        }
    });
    run.until(|| server.get().is_some());
    run.machine.kill(process);
    let ask = |run: &Run| {
        let kinds = kinds.clone();
        run.spawn("client", move || {
            let error = sockets::connect(socket(), PATIENCE).unwrap_err();
            kinds.borrow_mut().push(error.kind());
        });
        run.to_the_end();
    };
    ask(&run);
    assert!(run.machine.remove(socket()));
    ask(&run);
    let expected = [ErrorKind::ConnectionRefused, ErrorKind::NotFound];
    assert_eq!(*kinds.borrow(), expected);
}

#[test]
fn a_silent_peer_is_waited_for_as_long_as_the_patience_lasts() {
    let odds = Odds {
        socket_bytes: 100,
        ..Odds::default()
    };
    let run = Run::new(6, odds);
    talk(
        &run,
        |stream| {
            thread::sleep(Duration::from_secs(100));
            drop(stream);
        },
        |stream| {
            let begun = larder_sim_runtime::time::Instant::now();
            let late = |outcome: std::io::Result<usize>| {
                assert_eq!(outcome.unwrap_err().kind(), ErrorKind::WouldBlock);
            };
            assert!(!sockets::poll(&stream, Some(PATIENCE)).unwrap());
            late((&stream).read(&mut [0]));
            (&stream).write_all(&[0; 100]).unwrap();
            late((&stream).write(&[0]));
            let waited = begun.elapsed();
            assert!((3 * PATIENCE..4 * PATIENCE).contains(&waited), "{waited:?}");
        },
    );
    run.to_the_end();
}

#[test]
fn a_connection_closed_with_unread_bytes_is_reset_and_one_shut_down_ends() {
    for is_shut in [false, true] {
        let run = Run::new(7, Odds::default());
        talk(
            &run,
            move |stream| {
                while !sockets::poll(&stream, None).unwrap() {}
                if is_shut {
                    stream.shutdown(Shutdown::Both).unwrap();
                    thread::sleep(Duration::from_secs(1));
                }
            },
            move |stream| {
                (&stream).write_all(b"unread").unwrap();
                let end = (&stream).read(&mut [0]);
                match is_shut {
                    true => assert_eq!(end.unwrap(), 0),
                    false => assert_eq!(end.unwrap_err().kind(), ErrorKind::ConnectionReset),
                }
            },
        );
        run.to_the_end();
    }
}

#[test]
fn an_open_file_comes_with_the_bytes_that_it_was_sent_with() {
    let run = Run::new(8, Odds::default());
    talk(
        &run,
        |stream| {
            let mut bytes = [0; 100];
            for has_file in [false, true, false] {
                let (count, file) = sockets::receive(&stream, &mut bytes).unwrap();
                assert_eq!((count > 0, file.is_some()), (true, has_file));
                (&stream).write_all(b"next").unwrap();
            }
        },
        |stream| {
            let file = std::fs::File::open("/dev/null").unwrap();
            for file in [None, Some(file.as_fd()), None] {
                assert_eq!(sockets::send(&stream, b"message", file).unwrap(), 7);
                (&stream).read_exact(&mut [0; 4]).unwrap();
            }
        },
    );
    run.to_the_end();
}

#[test]
fn a_peer_is_the_process_that_connected() {
    let run = Run::new(9, Odds::default());
    let pids = Rc::new(RefCell::new([0; 2]));
    let (first, second) = (pids.clone(), pids.clone());
    let [server, client] = talk(
        &run,
        move |stream| first.borrow_mut()[1] = sockets::peer(&stream).unwrap().pid,
        move |stream| second.borrow_mut()[0] = sockets::peer(&stream).unwrap().pid,
    );
    run.to_the_end();
    assert_eq!(
        *pids.borrow(),
        [server, client].map(|process| 100 + process.id())
    );
}

#[test]
fn one_seed_is_one_run() {
    let events = |seed| {
        let run = Run::new(seed, slow());
        for name in ["a", "b", "c"] {
            run.spawn(name, move || {
                let file = open();
                for word in 1..10 {
                    write(&file, word as usize, word);
                    larder_sim_runtime::note(|| format!("{name} has written {word}"));
                }
            });
        }
        run.to_the_end();
        run.machine.events()
    };
    assert_eq!(events(1), events(1));
    assert_ne!(events(1), events(2));
}

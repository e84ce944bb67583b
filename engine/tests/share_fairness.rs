//! How one client can affect the others, and one call the others of its process, by asking for much
//! or by falling silent: counted, not timed.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};

use common::honest::{PATIENCE, eventually};
use common::{Home, MIB, Pool, chain};
use larder_disk::{Action, Buffer, Choice, Disk, Op, Piece};
use larder_engine::format::PageKey;
use larder_engine::{OpenOptions, PageStore, Part, PutOptions, PutStatus, Store};
use larder_store::api::DiskWrapper;

const BUDGET: u64 = 96 * MIB;
const PAGE: u64 = MIB;
const PARTS: [u32; 1] = [1 << 20];
const WAIT: PutOptions = PutOptions::waiting(PATIENCE);

fn options() -> OpenOptions {
    OpenOptions::default().with(|o| o.write_bytes_max = BUDGET)
}

fn attach(home: &Home) -> Store {
    Store::attach(&home.path, options()).unwrap()
}

/// A client whose writes stop at a gate.
fn attach_gated(home: &Home, gate: Gate) -> (Store, Arc<Gate>) {
    let gate = Arc::new(gate);
    let through = {
        let gate = gate.clone();
        move |inner: Arc<dyn Disk>| -> Arc<dyn Disk> {
            *gate.inner.lock().unwrap() = Some(inner.clone());
            let gate = gate.clone();
            Arc::new(Gated { inner, gate })
        }
    };
    let mut options = options();
    options.disk_wrapper = Some(DiskWrapper::new(through));
    let store = Store::attach(&home.path, options);
    (store.unwrap(), gate)
}

/// Holds writes back until it is opened, and counts their bytes.
#[derive(Default)]
struct Gate {
    /// `None` once it is open.
    held: Mutex<Option<Vec<Op>>>,
    bytes: AtomicU64,
    changed: Condvar,
    /// Where writes go once it is open.
    inner: Mutex<Option<Arc<dyn Disk>>>,
    /// The first write after this many bytes also blocks its thread.
    stops_after: Option<u64>,
}

/// Opens a gate, also when a test fails: a scope waits for its threads.
struct Opening<'a>(&'a Gate);

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        self.0.open();
    }
}

struct Gated {
    inner: Arc<dyn Disk>,
    gate: Arc<Gate>,
}

impl Gate {
    fn closed() -> Gate {
        Gate {
            held: Mutex::new(Some(Vec::new())),
            ..Gate::default()
        }
    }

    /// Waits until writes of this many bytes have arrived.
    fn wait_for(&self, bytes: u64) {
        let held = self.held.lock().unwrap();
        let come = |_: &mut _| self.bytes.load(Ordering::SeqCst) < bytes;
        let waited = self.changed.wait_timeout_while(held, PATIENCE, come);
        assert!(!waited.unwrap().1.timed_out(), "the flood does not come");
    }

    fn open(&self) {
        let held = self.held.lock().unwrap().take();
        let inner = self.inner.lock().unwrap().take().unwrap();
        // SAFETY: the submitter of these operations keeps their memory until they are answered.
        unsafe { inner.submit(held.unwrap_or_default()) };
        self.changed.notify_all();
    }

    /// Blocks the calling thread at its limit.
    fn stop(&self) {
        let held = self.held.lock().unwrap();
        let is_to = |bytes| self.bytes.load(Ordering::SeqCst) > bytes;
        if self.stops_after.is_some_and(is_to) {
            drop(
                self.changed
                    .wait_while(held, |held| held.is_some())
                    .unwrap(),
            );
        }
    }
}

impl Disk for Gated {
    unsafe fn submit(&self, ops: Vec<Op>) {
        let mut held = self.gate.held.lock().unwrap();
        let mut through = Vec::new();
        for op in ops {
            match (&op.action, &mut *held) {
                (Action::Write { buffer, .. }, Some(held)) => {
                    let bytes: usize = match buffer {
                        Buffer::Borrowed(pieces) => pieces.iter().map(|piece| piece.len).sum(),
                        Buffer::Owned(memory) => memory.len(),
                    };
                    self.gate.bytes.fetch_add(bytes as u64, Ordering::SeqCst);
                    held.push(op);
                }
                _ => through.push(op),
            }
        }
        drop(held);
        self.gate.changed.notify_all();
        self.gate.stop();
        // SAFETY: the caller's guarantee is passed on.
        unsafe { self.inner.submit(through) };
    }

    fn expire(&self) {
        self.inner.expire();
    }

    unsafe fn register(&self, memory: &[Piece]) -> String {
        // SAFETY: the caller's guarantee is passed on.
        unsafe { self.inner.register(memory) }
    }

    fn choice(&self) -> &Choice {
        self.inner.choice()
    }

    fn shutdown(&self) {
        self.inner.shutdown();
    }
}

#[test]
fn a_client_that_floods_the_store_with_puts_holds_its_share_and_no_more() {
    let home = Home::with_store(512 * MIB);
    let owner = attach(&home);
    let other = attach(&home);
    let (flooding, gate) = attach_gated(&home, Gate::closed());
    // Two clients and the owner: a third each.
    let share = BUDGET / 3;
    std::thread::scope(|scope| {
        let opening = Opening(&gate);
        let floods: Vec<_> = (0..4)
            .map(|thread| {
                let flooding = &flooding;
                scope.spawn(move || {
                    let pool = Pool::new(flooding, "m", &PARTS);
                    pool.put_from(&chain(thread, 30), 0, WAIT)
                })
            })
            .collect();
        gate.wait_for(share / 2);
        // While none of its writes gets through, the others put and get more than the flood's
        // share.
        for (seed, store) in (100..).zip([&owner, &other, &owner, &other]) {
            let pool = Pool::new(store, "m", &PARTS);
            let keys = chain(seed, 24);
            assert_eq!(pool.put_from(&keys, 0, WAIT), vec![PutStatus::Stored; 24]);
            assert_eq!(pool.hits(&keys), 24);
        }
        assert!(gate.bytes.load(Ordering::SeqCst) <= share);
        assert!(owner.report().unwrap().puts_in_flight > 0);
        drop(opening);
        for flood in floods {
            assert_eq!(flood.join().unwrap(), vec![PutStatus::Stored; 30]);
        }
    });
    assert_eq!(owner.report().unwrap().puts_in_flight, 0);
}

#[test]
fn a_put_of_more_than_a_clients_share_is_stored_all_the_same() {
    let home = Home::with_store(512 * MIB);
    let owner = attach(&home);
    let client = attach(&home);
    let pool = Pool::new(&client, "m", &PARTS);
    let keys = chain(1, usize::try_from(BUDGET / PAGE + 20).unwrap());
    let statuses = pool.put_from(&keys, 0, WAIT);
    assert!(statuses.iter().all(|status| *status == PutStatus::Stored));
    assert_eq!(Pool::new(&owner, "m", &PARTS).hits(&keys), keys.len());
}

/// Puts pages until all of them are there: a page in a segment with another client's failed write
/// fails with it.
fn put_all(store: &Store, keys: &[PageKey]) {
    let pool = Pool::new(store, "m", &PARTS);
    let are_there = || pool.put(keys).iter().all(|status| status.is_present());
    eventually("all pages of a chain are there", are_there);
}

#[test]
fn a_client_that_stops_in_the_middle_of_a_put_does_not_block_others_for_long() {
    let home = Home::with_store(512 * MIB);
    let owner = attach(&home);
    let other = attach(&home);
    // Of its first window the descriptors are written, the bytes are not. Of the second it has only
    // the grants.
    let gate = Gate {
        stops_after: Some(2 * PAGE),
        ..Gate::closed()
    };
    let (stopped, gate) = attach_gated(&home, gate);
    let keys: Vec<_> = (1..=20).map(|seed| chain(seed, 10)).collect();
    std::thread::scope(|scope| {
        let opening = Opening(&gate);
        let put = scope.spawn(|| Pool::new(&stopped, "m", &PARTS).put(&keys[0]));
        gate.wait_for(3 * PAGE);
        let (sender, receiver) = mpsc::channel();
        let others = scope.spawn({
            let (owner, other, keys) = (&owner, &other, &keys);
            move || {
                // More groups of descriptors than may be incomplete at once; and the pages that the
                // stopped client is putting.
                for (keys, store) in keys[1..]
                    .iter()
                    .chain(&keys[..1])
                    .zip([owner, other].into_iter().cycle())
                {
                    put_all(store, keys);
                }
                owner.flush().unwrap();
                other.flush().unwrap();
                sender.send(()).unwrap();
            }
        });
        let outcome = receiver.recv_timeout(PATIENCE);
        let report = owner.report().unwrap();
        drop(opening);
        outcome.expect("the others are held up");
        assert_eq!((report.puts_in_flight, report.pages_adrift), (2, 10));
        others.join().unwrap();
        // Others have put the pages since that it did not write.
        assert_eq!(put.join().unwrap(), vec![PutStatus::Duplicate; 10]);
    });
    let pool = Pool::new(&owner, "m", &PARTS);
    for keys in &keys {
        assert_eq!(pool.hits(keys), 10);
    }
    let report = owner.report().unwrap();
    assert_eq!((report.puts_in_flight, report.pages_adrift), (0, 0));
    owner.close().unwrap();
}

#[test]
fn a_call_that_waits_for_its_device_holds_up_no_other_when_the_owner_goes() {
    let home = Home::with_store(512 * MIB);
    let owner = attach(&home);
    let (client, gate) = attach_gated(&home, Gate::closed());
    std::thread::scope(|scope| {
        let opening = Opening(&gate);
        let put = scope.spawn(|| Pool::new(&client, "m", &PARTS).put(&chain(1, 4)));
        gate.wait_for(PAGE);
        drop(owner);
        let (sender, receiver) = mpsc::channel();
        scope.spawn({
            let client = &client;
            move || {
                eventually("the client knows that the owner has gone", || {
                    client.part() == Part::Nobody
                });
                sender.send(Pool::new(client, "m", &PARTS).hits(&chain(1, 4)))
            }
        });
        let outcome = receiver.recv_timeout(PATIENCE);
        drop(opening);
        assert_eq!(outcome, Ok(0), "the others are held up");
        put.join().unwrap();
    });
}

//! The main task of the process: it opens the store, starts the callers, and ends as the driver
//! says.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use larder_core::index::Index;
use larder_engine::{OpenOptions, PageStore, StoreError};
use larder_sim_runtime::thread;
use larder_store::recovery::Recovery;
use larder_store::store::LocalStore as Store;

use super::device::disk;
use super::epoch::Found;
use super::kept::Kept;
use super::state::{Phase, Shared};
use super::{callers, rest};
use crate::classes::Class;

/// How often the main task looks whether the callers are to end.
const LOOK_EVERY: Duration = Duration::from_micros(200);

/// Probability that an opening is tried with a wrong key first.
const WRONG_KEY: f64 = 0.1;

/// The end of the process's main task.
#[derive(Debug)]
pub enum End {
    NotOpened(StoreError),
    Closed(Result<(), StoreError>),
    /// Closed without a call, since a part of the store could not be read.
    ClosedPartly(Result<(), StoreError>),
    /// Whether the store came to rest.
    Rested(bool),
}

pub fn options(shared: &Shared, read_only: bool) -> OpenOptions {
    let mut state = shared.lock();
    let codec = state.world.draw_codec();
    let setup = &state.world.setup;
    OpenOptions::default().with(|o| {
        o.sync = setup.sync;
        o.lease = Duration::from_millis(setup.lease_ms);
        o.write_bytes_max = setup.write_bytes_max;
        o.degraded = true;
        o.read_only = read_only;
        o.codec = codec;
        o.wrapping = state
            .world
            .sealed
            .as_ref()
            .map(|sealed| sealed.wrapping.clone());
        o.write_budget = setup.write_budget;
        if !read_only {
            let seed = state.world.totals.opens;
            o.eviction = state.leases.eviction(seed);
            o.admission = state.leases.admission(seed);
        }
    })
}

/// An opening with a wrong key is refused, and writes nothing.
fn try_wrong_key(shared: &Shared, superblocks: &Found) {
    let wrong = {
        let mut state = shared.lock();
        let world = &mut state.world;
        let draws = world.sealed.is_some() && world.strikes(Class::WrongKey, WRONG_KEY);
        world
            .sealed
            .as_ref()
            .filter(|_| draws)
            .map(|sealed| sealed.wrong.clone())
    };
    let Some(wrong) = wrong else {
        return;
    };
    let (disk, number) = disk(shared, superblocks.len());
    shared.lock().owner_disk = number;
    let options = options(shared, false).with(|o| o.wrapping = Some(wrong));
    let refused = Store::open_simulated(superblocks.clone(), disk, &options, |_, _| ());
    let is_refused = matches!(
        refused,
        Err(StoreError::WrongKey { .. } | StoreError::Keyring { .. } | StoreError::NotRead { .. })
    );
    assert!(is_refused, "a store opens with a wrong key");
    assert_eq!(shared.lock().opening_writes, 0, "a refused opening writes");
}

pub fn open(shared: &Shared, superblocks: Found) -> Result<Arc<Store>, StoreError> {
    try_wrong_key(shared, &superblocks);
    let (disk, number) = disk(shared, superblocks.len());
    shared.lock().owner_disk = number;
    let options = options(shared, false);
    let recovered = |recovery: &Recovery, index: &Arc<Index>| {
        shared.lock().recovered(recovery, index);
    };
    let store = Store::open_simulated(superblocks, disk, &options, recovered)?;
    let quotas = store.quotas();
    let mut state = shared.lock();
    state.opened.insert(number);
    state.check_found_quotas(&quotas);
    state.check_clock(&store);
    drop(state);
    Ok(Arc::new(store))
}

/// A store that was opened without some of its segments gets no call. Its threads get a while for
/// forbidden evictions.
fn run_partly(shared: &Shared, store: &Arc<Store>) -> End {
    shared.lock().store = Some(store.clone());
    for _ in 0..4 {
        shared.lock().check_nothing_left();
        thread::sleep(Duration::from_millis(700));
    }
    shared.lock().check_nothing_left();
    shared.lock().closing = true;
    let closed = store.close();
    shared.lock().store = None;
    End::ClosedPartly(closed)
}

pub fn run(shared: &Shared, superblocks: Found) -> End {
    let store = match open(shared, superblocks) {
        Ok(store) => store,
        Err(error) => return End::NotOpened(error),
    };
    if shared.lock().is_partial {
        return run_partly(shared, &store);
    }
    shared.lock().world.outage = None;
    callers::name_some(shared, &store);
    let clients = {
        let mut state = shared.lock();
        state.store = Some(store.clone());
        state.phase = Phase::Open;
        state.world.is_opening = false;
        state.world.setup.clients
    };
    let caller = |own: usize| {
        let (shared, store) = (shared.clone(), store.clone());
        let thread = thread::Builder::new().name(format!("caller {own}"));
        thread
            .spawn(move || callers::call(&shared, &store, own))
            .expect("a thread")
    };
    let mut callers: VecDeque<_> = (0..clients).map(caller).collect();
    // Some closes come while calls are in progress.
    let hurries = shared.lock().world.dice.chance(0.3);
    while shared.lock().phase == Phase::Open {
        thread::sleep(LOOK_EVERY);
    }
    let join = |callers: &mut VecDeque<thread::JoinHandle<()>>| {
        while let Some(caller) = callers.pop_front() {
            let _ = caller.join();
        }
    };
    let phase = shared.lock().phase;
    if phase == Phase::Resting || !hurries {
        join(&mut callers);
    }
    if phase == Phase::Resting {
        return End::Rested(rest::rest(shared, &store));
    }
    let mut state = shared.lock();
    state.closing = true;
    state.leases.kept(Kept::close);
    drop(state);
    let closed = store.close();
    join(&mut callers);
    let mut state = shared.lock();
    if closed.is_ok() {
        state.end_counts();
    }
    state.store = None;
    drop(state);
    drop(store);
    End::Closed(closed)
}

//! Callers: tasks that call the store, one call after the other.

use std::time::Duration;

use larder_sim_runtime::thread;
use larder_store::store::LocalStore as Store;

use super::calls::{Caller, name};
use super::state::{Call, Phase, Shared};

/// Longest pause of a caller between two calls, in microseconds.
const PAUSE_US_MAX: u64 = 300;

/// Names a share of the namespaces, at least one.
pub fn name_some(shared: &Shared, store: &Store) {
    let chosen: Vec<usize> = {
        let mut state = shared.lock();
        let world = &mut state.world;
        let count = world.setup.namespaces.len();
        let first = world.dice.below(count);
        let named = world.setup.named;
        (0..count)
            .filter(|namespace| *namespace == first || world.dice.chance(named))
            .collect()
    };
    for namespace in chosen {
        name(shared, store, namespace);
    }
}

/// Calls until the process is to end.
pub fn call(shared: &Shared, store: &Store, own: usize) {
    let caller = Caller { shared, store, own };
    loop {
        let (what, deletes, pause) = {
            let mut state = shared.lock();
            if state.phase != Phase::Open {
                return;
            }
            let deletes = state.world.setup.deletes;
            let dice = &mut state.world.dice;
            let deletes = dice.chance(deletes);
            (dice.below(1000), deletes, dice.between(0, PAUSE_US_MAX))
        };
        if what % 50 == 0 {
            caller.change_quotas();
        }
        match what {
            _ if deletes => caller.delete(),
            0..450 => caller.put(),
            450..700 => caller.get(),
            700..780 => caller.look_up(),
            780..800 => caller.look_up_and_get(),
            800..840 => caller.touch(),
            840..880 => caller.delete(),
            880..883 => caller.clear_or_erase(),
            883..885 => caller.rotate(),
            885..930 => {
                let _ = caller.flush();
            }
            930..945 => caller.empty_segment(),
            945..1000 => caller.keep_books(),
            _ => {}
        }
        shared.lock().calls[own] = Call::Idle;
        thread::sleep(Duration::from_micros(pause));
    }
}

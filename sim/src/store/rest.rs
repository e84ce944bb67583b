//! The quiet end: without faults a flush succeeds, and pages can be put.

use std::time::Duration;

use larder_core::capacity::{footprint, segments_min};
use larder_core::core::{Core, SpaceView};
use larder_engine::{PutStatus, Refusal};
use larder_sim_runtime::medium::Medium;
use larder_sim_runtime::thread;
use larder_store::store::LocalStore as Store;

use super::calls::{Caller, name};
use super::state::Shared;
use crate::oracle::Name;

/// Pages put at the end.
const PUTS: usize = 10;

/// Returns false if failed syncs have left a full store without space to rewrite pages. Each flush
/// reports that, and the store must be opened again.
pub fn rest(shared: &Shared, store: &Store) -> bool {
    let caller = Caller {
        shared,
        store,
        own: 0,
    };
    caller.unlease_all();
    if !flush_for_good(&caller) {
        let space = space_of(store);
        let state = shared.lock();
        let counters = store.try_core(Core::counters);
        let failed = counters.is_some_and(|counters| counters.store.failed_syncs > 0);
        let is_sick = state.world.disk.volumes().iter().any(Medium::is_sick);
        assert!(
            failed && space.free_segments == 0 || is_sick,
            "flushes still fail: {counters:?}, {space:?}"
        );
        return false;
    }
    set_the_time(shared);
    caller.clear_quotas();
    // Unreadable segments stay out of use. If too few others are left, no put can succeed.
    let space = space_of(store);
    let sound = space.segments - space.unreadable_segments;
    let can_put = {
        let state = shared.lock();
        let is_sick = state.world.disk.volumes().iter().any(Medium::is_sick);
        sound >= segments_min(state.world.setup.volumes.len()) && !is_sick
    };
    for _ in 0..if can_put { PUTS } else { 0 } {
        put_for_good(&caller);
    }
    assert!(flush_for_good(&caller), "the last flush fails");
    true
}

/// The time of day is set, and the store has the time to note it.
fn set_the_time(shared: &Shared) {
    if !shared.lock().set_the_last_time() {
        return;
    }
    while !shared.lock().lives.has_looked() {
        thread::sleep(Duration::from_millis(50));
    }
}

fn space_of(store: &Store) -> SpaceView {
    loop {
        if let Some(space) = store.try_core(Core::space_view) {
            return space;
        }
        thread::yield_now();
    }
}

fn flush_for_good(caller: &Caller<'_>) -> bool {
    for _ in 0..20 {
        if caller.flush() {
            return true;
        }
        thread::sleep(Duration::from_secs(1));
    }
    false
}

fn put_for_good(caller: &Caller<'_>) {
    let Caller { shared, store, .. } = *caller;
    let (page, namespace, reach) = {
        let mut state = shared.lock();
        let world = &mut state.world;
        let page = Name(world.dice.below(world.oracle.names()));
        let info = world.oracle.name(page);
        let page_blocks = world.setup.namespaces[info.namespace].shape().page_blocks();
        let chain = u64::from(info.depth) + 1;
        let reach = chain * footprint(world.setup.segment_blocks, page_blocks);
        (page, info.namespace, reach)
    };
    name(shared, store, namespace);
    let mut last = PutStatus::Refused(Refusal::NoSpace);
    for _ in 0..50 {
        last = caller.put_pages(&[page], Duration::ZERO, None)[0];
        let is_over_budget = last == PutStatus::Refused(Refusal::Budget);
        if last.is_present() || is_over_budget || reach > space_of(store).usable_blocks {
            return;
        }
        // Leases lapse, and the housekeeper gets its turn.
        thread::sleep(Duration::from_secs(1));
    }
    panic!(
        "a put is still refused without faults: {last:?}, {:?}",
        space_of(store)
    );
}

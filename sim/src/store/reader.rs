//! Another process that reads beside the owner, without its lock.
//!
//! The owner goes on: it moves pages, and writes segments again that the reader knows in an earlier
//! generation. The reader may miss any page. A page that it returns is whole, and has its own name.

use std::io::IoSliceMut;
use std::time::Duration;

use larder_engine::{GetPage, GetStatus, PageStore};
use larder_sim_runtime::thread;
use larder_store::store::LocalStore as Store;

use super::device::disk;
use super::epoch::Found;
use super::memory::Memory;
use super::process::options;
use super::results::version_of;
use super::state::Shared;
use crate::classes::Class;

/// Gets of a reader, at most, and the longest pause before each, in microseconds.
const GETS_MAX: usize = 12;
const PAUSE_US_MAX: u64 = 1000;

/// The main task of a reader. The driver may kill it at any time.
pub fn read(shared: &Shared, superblocks: Found) {
    let (disk, number) = disk(shared, superblocks.len());
    let options = options(shared, true);
    let Ok(store) = Store::open_simulated(superblocks, disk, &options, |_, _| {}) else {
        return;
    };
    shared.lock().opened.insert(number);
    let gets = shared.lock().world.dice.below(GETS_MAX + 1);
    for _ in 0..gets {
        let pause = shared.lock().world.dice.between(0, PAUSE_US_MAX);
        thread::sleep(Duration::from_micros(pause));
        get(shared, &store);
    }
}

fn get(shared: &Shared, store: &Store) {
    let (namespace, names, keys) = {
        let mut state = shared.lock();
        let world = &mut state.world;
        let count = 1 + world.dice.below(8);
        let (namespace, names) = world.draw_names(count);
        let keys = names.iter().map(|name| world.oracle.name(*name).key);
        let keys: Vec<_> = keys.collect();
        (world.setup.namespaces[namespace].clone(), names, keys)
    };
    let Ok(id) = store.namespace(&namespace) else {
        return;
    };
    let blocks = namespace.shape().page_blocks() as usize;
    let mut memory: Vec<Memory> = names.iter().map(|_| Memory::new(blocks, true)).collect();
    let places = memory
        .iter()
        .map(|memory| (memory.as_ptr().addr(), memory.len()));
    let places: Vec<(usize, usize)> = places.collect();
    shared.lock().lent.extend(&places);
    let mut parts: Vec<[IoSliceMut<'_>; 1]> = memory
        .iter_mut()
        .map(|memory| [IoSliceMut::new(memory)])
        .collect();
    let mut asked: Vec<GetPage<'_, '_>> = keys
        .iter()
        .zip(&mut parts)
        .map(|(key, parts)| GetPage { key: *key, parts })
        .collect();
    let statuses = store.get(id, &mut asked, None);
    let mut state = shared.lock();
    state.lent.retain(|place| !places.contains(place));
    for ((name, status), memory) in names.iter().zip(statuses).zip(&memory) {
        if status != GetStatus::Hit {
            continue;
        }
        state.world.count(Class::ReaderBeside);
        let version = version_of(&state.world.oracle, memory);
        let is_right = version.is_some_and(|id| state.world.oracle.version(id).name == *name);
        assert!(
            is_right,
            "a reader gets {name:?} with the bytes of {version:?}"
        );
    }
}

//! Stores that are filled once and copied for each test.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::support::home::Home;
use crate::support::sparse::{pack, unpack};

/// The volumes of each store.
static FILLED: Mutex<BTreeMap<String, Vec<Vec<u8>>>> = Mutex::new(BTreeMap::new());

/// A store on these further volumes, as `fill` leaves it. `name` stands for `fill`.
pub fn copied(name: &str, further: &[&str], fill: impl FnOnce(&Home)) -> Home {
    let names = || std::iter::once(&"store").chain(further);
    let mut filled = FILLED.lock().unwrap_or_else(PoisonError::into_inner);
    let volumes = filled
        .entry(format!("{name} {further:?}"))
        .or_insert_with(|| {
            // It is gone before its copies are used: they must not find its volumes.
            let home = Home::with_volumes(further);
            fill(&home);
            names().map(|name| pack(&home.beside(name))).collect()
        });
    let home = Home::with_volumes(further);
    for (name, packed) in names().zip(volumes) {
        unpack(packed, &home.beside(name));
    }
    home
}

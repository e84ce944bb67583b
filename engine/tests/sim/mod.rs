//! The simulation of a store under crashes and faults: see `core_model.rs`.
//!
//! | module | what it is |
//! |---|---|
//! | `dice` | the one source of chance |
//! | `setup` | what a seed draws before it begins |
//! | `disk` | a disk that can lose, tear, refuse and rot |
//! | `oracle` | what was promised |
//! | `world` | the core and its effects, and what is checked at each |
//! | `clients` | callers |
//! | `keeper` | the housekeeper |
//! | `run` | a seed from end to end, step by step |
//! | `faults` | what goes wrong at the device |
//! | `opening` | recovery, and what it must have found |
//! | `ending` | crashes, closes, the quiet end |
//! | `totals` | what a run did |

mod clients;
mod dice;
mod disk;
mod ending;
mod faults;
mod keeper;
mod opening;
mod oracle;
pub mod run;
mod setup;
pub mod totals;
pub mod world;

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
//! | `run` | steps, crashes, recoveries, the quiet end |

mod clients;
mod dice;
mod disk;
mod keeper;
mod oracle;
pub mod run;
mod setup;
pub mod world;

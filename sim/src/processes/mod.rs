//! Several processes on one store, each with the real engine: `Store::attach`, the role monitor,
//! both ends of the catalog, the data path, the disk of threads.
//!
//! All threads of all processes are tasks of one world (`larder_sim_runtime`). The store lies on
//! the media of one simulated machine. A seed kills and stops processes at any point where one of
//! their threads waits, deletes the socket, cuts the power, and interrupts and shortens transfers.
//! The *promises* compare the results of the calls with the calls before them.
//!
//! A module imports only those below it:
//!
//! | module | content |
//! |---|---|
//! | `driver` | a seed from start to end: faults among the processes, and the checks |
//! | `compaction` | a process that compacts the store beside its owner |
//! | `stray` | a process that breaks the rules of the protocol |
//! | `erasure` | the erasure of a tenant by a process |
//! | `process` | a process, and the calls of its threads |
//! | `promises` | the results that each call may have |
//! | `plan` | the parameters that a seed draws |

mod compaction;
mod driver;
mod erasure;
pub mod plan;
mod process;
mod promises;
mod stray;

pub use driver::play;

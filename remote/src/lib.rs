//! Runs of pages beyond the node: in an object store, or in a directory that nodes share.
//!
//! A store dies with its disk, and a new node begins with none of its pages. A remote keeps pages
//! for all nodes: one node publishes a run of a chain as one object, and others fetch it. Lookups
//! need no service and no index: the name of a run follows from its last key.
//!
//! Every reader of a remote could read pages, and every writer could plant some. So objects are
//! encrypted with a key that the nodes share ([`keys`]), and no byte of a page is used before its
//! tag was verified ([`run::open`]).
//!
//! A module imports only the modules below it.
//!
//! | module | content |
//! |---|---|
//! | [`l4`] | remotes beneath a store, by their configuration |
//! | [`agent`] | shares the pages of a store while it is in use |
//! | [`stored`] | the whole runs of a store |
//! | [`local`] | pages of an object, into a store |
//! | [`place`] | a remote by its URL |
//! | [`dir`] | a directory |
//! | `s3` | an S3-compatible object store: with the feature `s3` alone |
//! | [`remote`] | the trait [`Remote`] |
//! | [`run`] | runs, their names, and the objects that hold them |
//! | [`flights`] | bounds of the runs on their way |
//! | [`buffer`] | memory for objects |
//! | [`keys`] | the keys of a remote, and key files |
//! | `error` | the errors of remotes |
//! | `planted` | bugs for the simulation to find; empty in other builds |
//!
//! Pages of a store are read and written through the engine, never beside it.

#![forbid(unsafe_code)]
// The unit tests are those of the agents that ship.
#![cfg(not(all(test, feature = "simulated")))]

pub mod agent;
pub mod buffer;
pub mod dir;
mod error;
pub mod flights;
pub mod keys;
pub mod l4;
pub mod local;
pub mod place;
pub mod planted;
pub mod remote;
pub mod run;
#[cfg(feature = "s3")]
pub mod s3;
pub mod stored;

pub use buffer::Buffer;
pub use error::{PlaceError, RemoteError};
pub use keys::{KeyError, Keyring, SealKey, Trust};
pub use place::Place;
pub use remote::{LISTED_MAX, Listed, Published, Remote, Unreadable};
pub use run::{
    Draft, OBJECT_BYTES_MAX, RUN_TOKENS, RunId, RunName, RunNames, RunPage, pages_of_run,
};

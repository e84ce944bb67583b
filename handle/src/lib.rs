//! A store as the faces for engines use it: the Python package and the C library.
//!
//! ```text
//!   larder_kv (Python)   larder.h (C)
//!  +------------------------------------------+
//!  | store: a Handle, its Spaces, its Queues  |
//!  +------------------------------------------+
//!  | larder_engine: Store                     |
//!  +------------------------------------------+
//! ```
//!
//! A module imports only those below it:
//!
//! | module | contents |
//! |---|---|
//! | [`store`] | a store, its namespaces with every call of the engine, and its queues of jobs |
//! | [`place`] | from a path to an attached store, which is created if necessary |
//! | [`config`] | the configuration: every key and its type |
//! | [`identity`] | the fields of a namespace |
//! | [`mount`] | the file system of a path |
//! | [`region`] | memory whose pages are named by row |
//! | [`chain`] | where pages stand in their chain |
//! | [`status`] | the codes of the answers |
//! | [`named`](mod@named) | enums whose values have names in the faces |

pub mod chain;
pub mod config;
pub mod identity;
pub mod mount;
pub mod named;
pub mod place;
pub mod region;
pub mod status;
pub mod store;

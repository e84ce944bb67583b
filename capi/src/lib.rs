//! The C library: the functions of `larder.h` over [`larder_handle`].
//!
//! The header is the contract. Each function here reads its arguments, makes one call of
//! [`larder_handle`], and writes the results. Nothing unwinds into the caller, and the library
//! calls nothing back.
//!
//! Every function reads memory at the caller's pointers: it is unsafe, and its contract is that of
//! the header. Null pointers and numbers out of range are errors.
//!
//! A module imports only those below it:
//!
//! | module | contents |
//! |---|---|
//! | [`jobs`] | the functions of queues |
//! | [`pages`] | the functions of namespaces and pages |
//! | [`store`] | the functions of stores |
//! | [`about`] | the version, errors, the log |
//! | `given` | arguments at the caller's pointers |
//! | [`answer`] | results and errors |
//! | [`types`] | the structs of the header |

#![allow(
    clippy::missing_safety_doc,
    reason = "the contract of all functions is that of the header"
)]

pub mod about;
pub mod answer;
mod given;
pub mod jobs;
pub mod pages;
pub mod store;
pub mod types;

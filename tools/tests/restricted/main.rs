//! The `larder` binary where the system refuses something: system calls that a container profile
//! forbids, file systems that are full or read-only, files with holes.
#![allow(clippy::unwrap_used, missing_docs)]

mod calls;
mod filters;
mod places;
#[cfg(target_arch = "x86_64")]
mod profiles;
#[path = "../../../tests/support/mod.rs"]
mod support;

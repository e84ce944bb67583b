//! `larder verify --repair` and `larder compact` on real stores: damaged in every structure,
//! scattered, in use, killed half-way.

#![allow(clippy::unwrap_used, missing_docs)]

mod compact;
#[path = "../inspect_verify/home.rs"]
mod home;
mod kills;
mod repair;
#[path = "../../../tests/support/mod.rs"]
mod support;

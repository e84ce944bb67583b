//! `larder verify --repair`, `larder compact`, `larder volume` and `larder superblock` on real
//! stores: damaged in every structure, scattered, in use, killed half-way.

#![allow(clippy::unwrap_used, missing_docs)]

mod beside;
mod codec;
mod compact;
mod copies;
#[path = "../inspect_verify/home.rs"]
mod home;
mod kills;
mod repair;
mod sealed;
mod superblocks;
#[path = "../../../tests/support/mod.rs"]
mod support;
mod traced;
mod volumes;

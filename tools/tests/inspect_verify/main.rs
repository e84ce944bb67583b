//! `larder inspect` and `larder verify` on real stores: whole, damaged in every structure, left by
//! a crash, in use, and none.

#![allow(clippy::unwrap_used, missing_docs)]

mod crash;
mod damage;
mod home;
mod losses;
#[path = "../../../tests/support/mod.rs"]
mod support;
mod views;

//! `larder export` and `larder import` between real stores: whole, damaged, left by a crash, in
//! use, full, of other shapes.

#![allow(clippy::unwrap_used, missing_docs)]

mod damage;
mod files;
mod home;
mod round_trips;
#[path = "../../../tests/support/mod.rs"]
mod support;

//! The C library as programs in C and C++ use it: its types, its names, and its behaviour.
//!
//! Needs a C compiler, a C++ compiler, GNU binutils and Python; what else is lacking is skipped.

#![allow(clippy::unwrap_used)]

mod abi;
mod contract;
mod counted;
mod installed;
mod package;
mod programs;
